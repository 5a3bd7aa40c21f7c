"""Twenty for the conformance suite."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from adapters.base import HOOK_TOPIC, Credentials
from tests.adapters.kit import NOW, AgentRow, Fake, HookRow, Kit, LeadRow
from tests.adapters.loopback import Received, Reply

Record = dict[str, Any]
SECRET = "canary-secret-one"


def refused(status: int, error: str, *messages: str) -> Reply:
    """An error of REST."""
    return Reply(status, {"statusCode": status, "error": error, "messages": list(messages)})


NOT_FOUND = {"errors": [{"message": "Records not found", "extensions": {"code": "NOT_FOUND"}}], "data": None}


class FakeTwenty(Fake):
    """Answers as in tests/fixtures/twenty/captured; its leads are an object of its own, ``prospects``."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: dict[str, str] = {}
        self.notes: dict[str, Record] = {}
        self.targets: dict[str, Record] = {}
        self.note_relation = "prospectId"

    def add_hook(self, topic: str, url: str, active: bool = True) -> HookRow:
        return super().add_hook(topic, f"{url}/prospect.holder", active)

    def standing(self, url: str) -> list[tuple[str, bool]]:
        return sorted((h.topic, h.active) for h in self.hooks if h.url == f"{url}/prospect.holder")

    def handle(self, asked: Received) -> Reply:
        if asked.headers.get("authorization") != "Bearer canary-key-1":
            return refused(401, "UNAUTHENTICATED", "No payload")
        date = {"Date": (NOW + self.clock_is_off).strftime("%a, %d %b %Y %H:%M:%S GMT")}
        if asked.path == "/graphql":
            query = asked.json["query"]
            if "ote" in query:
                return Reply(
                    body=(self._add_note if "createNote" in query else self._notes)(query, asked.json["variables"])
                )
            route = self._update if query.startswith("mutation") else self._sweep
            return Reply(body=route(query, asked.json["variables"]), headers=date)
        rest, kind, *more = asked.path.strip("/").split("/")
        assert rest == "rest"
        if kind == "prospects" and asked.method == "POST":
            if not isinstance(asked.json["name"], dict):
                return refused(400, "BadRequestException", "Invalid composite field")
            self.add_leads(LeadRow(ref := self.new_ref()))
            return Reply(201, {"data": {"createProspect": self._lead(self.leads[ref])}})
        if kind == "prospects":
            (ref,) = more
            if asked.method == "DELETE" and self.leads.pop(ref, None):
                return Reply(body={"data": {"deleteProspect": {"id": ref}}})
            found = self.leads.get(ref)
            return Reply(body={"data": {"prospect": self._lead(found)}}) if found else self._missing()
        if kind == "workspaceMembers":
            reply = self._list(asked, kind, [self._agent(row) for row in self.agents.values() if row.active])
            return Reply(reply.status, reply.body, date)
        assert kind == "webhooks"
        return self._webhooks(asked, more)

    def _missing(self) -> Reply:
        return refused(400, "BadRequestException", "Record not found")

    def _page(self, rows: Sequence[Record], after: str | None, size: int) -> tuple[list[Record], Record]:
        rows = sorted(rows, key=lambda row: str(row["id"]))
        left = [row for row in rows if after is None or str(row["id"]) > after]
        shown = left[: min(size, 60)]
        end = shown[-1]["id"] if shown else None
        return shown, {"hasNextPage": len(left) > len(shown), "endCursor": end}

    def _list(self, asked: Received, name: str, rows: Sequence[Record]) -> Reply:
        shown, info = self._page(rows, asked.query.get("starting_after"), int(asked.query.get("limit", 60)))
        return Reply(body={"data": {name: shown}, "pageInfo": info, "totalCount": len(rows)})

    def _lead(self, row: LeadRow) -> Record:
        made, changed = (
            at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            for at in (row.created, row.changed or row.created)
        )
        return {
            "id": row.ref,
            "name": {"firstName": "canary-person", "lastName": ""},
            "emails": {"primaryEmail": "canary@example.com", "additionalEmails": []},
            "holderId": row.owner,
            "createdAt": made,
            "updatedAt": changed,
        }

    def _sweep(self, query: str, given: Mapping[str, str]) -> Record:
        rows = [self._lead(row) for row in self.leads.values()]
        if "filter" in query:
            assert "orderBy:[{id:AscNullsLast}]" in query
            since = re.search(r'(createdAt|updatedAt):\{gte:"([^"]+)"\}', query)
            assert since
            rows = [r for r in rows if r[since[1]] >= since[2]]
        if "holderId:{is:NULL}" in query:
            rows = [r for r in rows if r["holderId"] is None]
        shown, info = self._page(rows, given.get("c"), 60)
        return {"data": {"prospects": {"pageInfo": info, "edges": [{"node": row} for row in shown]}}}

    def _update(self, query: str, given: Mapping[str, str]) -> Record:
        assert query.startswith("mutation($id:UUID!,$o:ID!")
        assert "updateProspects(filter:{id:{eq:$id},holderId:{" in query
        row = self.leads.get(given["id"])
        wanted = given["e"] if "holderId:{eq:$e}" in query else None
        assert wanted is not None or "holderId:{is:NULL}" in query
        if row is None or row.owner != wanted:
            return NOT_FOUND
        row.owner = given["o"]
        return {"data": {"updateProspects": [{"id": row.ref, "holderId": row.owner}]}}

    def _notes(self, query: str, given: Mapping[str, str]) -> Record:
        if self.note_relation not in query:
            return {"errors": [{"message": "Cannot query field", "extensions": {"code": "GRAPHQL_VALIDATION_FAILED"}}]}
        rows = [
            {"id": ref, "note": {"title": note["title"], "bodyV2": {"markdown": note["bodyV2"]["markdown"]}}}
            for ref, target in self.targets.items()
            if target[self.note_relation] == given.get("id") and (note := self.notes[target["noteId"]])
        ]
        shown, info = self._page(rows, given.get("c"), 60)
        return {"data": {"noteTargets": {"pageInfo": info, "edges": [{"node": row} for row in shown]}}}

    def _add_note(self, query: str, given: Mapping[str, Any]) -> Record:
        assert query.count("upsert:true") == 2
        (note,), (target,) = given["n"], given["t"]
        self.notes[note["id"]], self.targets[target["id"]] = note, target
        for row in self.leads.values():
            held = [self.notes[t["noteId"]] for t in self.targets.values() if t[self.note_relation] == row.ref]
            row.notes = [(n["title"], n["bodyV2"]["markdown"]) for n in held]
        return {"data": {"createNotes": [{"id": note["id"]}], "createNoteTargets": [{"id": target["id"]}]}}

    def _agent(self, row: AgentRow) -> Record:
        name = {"firstName": "Agent", "lastName": row.ref}
        return {"id": row.ref, "name": name, "userEmail": f"{row.ref}@example.com", "timeZone": "America/Denver"}

    def _webhooks(self, asked: Received, more: list[str]) -> Reply:
        if asked.method == "DELETE":
            before = len(self.hooks)
            self.hooks = [h for h in self.hooks if h.ref != more[0]]
            return (
                Reply(body={"data": {"deleteWebhook": {"id": more[0]}}})
                if len(self.hooks) < before
                else self._missing()
            )
        if asked.method == "POST":
            (operation,), url = asked.json["operations"], asked.json["targetUrl"]
            row = self.add_hook(operation.removeprefix("prospect."), url.removesuffix("/prospect.holder"))
            self.secrets[row.ref] = asked.json["secret"]
            return Reply(201, {"data": {"createWebhook": self._hook(row)}})
        return self._list(asked, "webhooks", [self._hook(h) for h in self.hooks])

    def _hook(self, row: HookRow) -> Record:
        gone = None if row.active else "2026-04-01T00:00:00.000Z"
        operations = [f"prospect.{row.topic}"]
        return {"id": row.ref, "operations": operations, "targetUrl": row.url, "deletedAt": gone} | {
            "secret": self.secrets.get(row.ref, SECRET)
        }


class TheKit(Kit):
    name = "twenty"
    secrets = (SECRET.encode(), b"canary-secret-two")
    void_secrets = (b"",)
    signature_headers = ("x-twenty-webhook-timestamp", "x-twenty-webhook-signature")
    credentials = Credentials(
        {"object": "prospect", "objects": "prospects", "owner": "holder"},
        {"api_key": "canary-key-1", "webhook_secret": SECRET},
    )
    ponds = False
    missing: ClassVar[Any] = {"statusCode": 404, "messages": ["Record not found"]}
    shows_deactivated = False
    required: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {
        "created": (("eventName",), ("objectMetadata",), ("record",), ("record", "id")),
        "destroyed": (("eventName",), ("record",), ("record", "id")),
    }
    texts: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {
        "created": (("record", "name"), ("record", "address", "addressCity"))
    }

    def sign(self, body: bytes, secret: bytes, at: datetime = NOW, headers: Mapping[str, str] = {}) -> dict[str, str]:
        sent = str(int(at.timestamp() * 1000))
        return {
            HOOK_TOPIC: "company.accountOwner",
            **headers,
            "x-twenty-webhook-timestamp": sent,
            "x-twenty-webhook-signature": hmac.new(secret, f"{sent}:".encode() + body, hashlib.sha256).hexdigest(),
            "x-twenty-webhook-nonce": "5580cb4d794e2a731412f26c5cf076e8",
        }

    def writes(self, asked: Received) -> bool:
        return asked.writes and not (asked.path == "/graphql" and not asked.json["query"].startswith("mutation"))

    def retopic(self, body: Any, topic: str) -> Any:
        return {**body, "eventName": f"company.{topic}"}

    def batch(self, refs: Sequence[str | None]) -> Any:
        raise NotImplementedError("a delivery tells of one lead")

    def fake(self) -> Fake:
        return FakeTwenty()
