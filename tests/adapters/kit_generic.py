"""The generic face for the conformance suite."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from standardwebhooks import Webhook

from adapters.base import Credentials
from tests.adapters.kit import NOW, AgentRow, Fake, HookRow, Kit, LeadRow
from tests.adapters.loopback import Received, Reply

API_SECRET = "whsec_Y2FuYXJ5LWFwaS1zZWNyZXQ="


class FakeGeneric(Fake):
    """A server of the generic face. Checks every call's signature with the library of the specification."""

    page = 40

    def handle(self, asked: Received) -> Reply:
        at = datetime.fromtimestamp(int(asked.headers["webhook-timestamp"]), tz=NOW.tzinfo)
        want = Webhook(API_SECRET).sign(asked.headers["webhook-id"], at, asked.body.decode())
        if at != NOW or asked.headers["webhook-signature"] != want:
            return Reply(401, {"error": "bad signature"})
        kind, _, rest = asked.path.strip("/").partition("/")
        route: Callable[[Received, list[str]], Reply] | None = getattr(self, f"_{kind}", None)
        return route(asked, [p for p in rest.split("/") if p]) if route else Reply(404, {"error": "no such path"})

    def _list(self, asked: Received, name: str, rows: Sequence[Any]) -> Reply:
        start = int(asked.query.get("cursor") or 0)
        end = start + self.page
        return Reply(body={name: rows[start:end], "next": str(end) if end < len(rows) else None})

    def _lead(self, row: LeadRow) -> dict[str, Any]:
        return {
            "id": row.ref,
            "created_at": row.created.isoformat(),
            "owner": row.owner,
            "pond": row.pond,
            "collaborators": row.collaborators,
            "name": "canary-person",
            "emails": ["canary@example.com"],
        }

    def _leads(self, asked: Received, rest: list[str]) -> Reply:
        if not rest:
            if "ids" in asked.query:
                rows = [self.leads[r] for r in asked.query["ids"].split(",") if r in self.leads]
                return Reply(body={"leads": [self._lead(r) for r in rows]})
            after = datetime.fromisoformat(asked.query["created_after"])
            rows = [r for r in self.leads.values() if r.created >= after]
            if asked.query.get("unassigned") == "true":
                rows = [r for r in rows if r.owner is None]
            return self._list(asked, "leads", [self._lead(r) for r in rows])
        row = self.leads.get(rest[0])
        if row is None:
            return Reply(404, {"error": "no such lead"})
        if rest[1:] == ["owner"]:
            if row.owner != asked.json["expected"]:
                return Reply(409, {"error": "the owner is another one"})
            if not self.refuses_owners:
                row.owner = asked.json["owner"]
            return Reply(body={"lead": self._lead(row)})
        if rest[1:] == ["collaborators"]:
            if asked.json["agent"] not in row.collaborators:
                row.collaborators.append(asked.json["agent"])
            return Reply(body=self._lead(row))
        if asked.method == "POST":
            row.notes.append((asked.json["subject"], asked.json["body"]))
            return Reply(201, {"id": "n"})
        return Reply(body={"notes": [{"id": str(i), "subject": s, "body": b} for i, (s, b) in enumerate(row.notes)]})

    def _agents(self, asked: Received, rest: list[str]) -> Reply:
        if rest:
            found = self.agents.get(rest[0])
            return Reply(body=self._agent(found)) if found else Reply(404, {"error": "no such agent"})
        return self._list(asked, "agents", [self._agent(a) for a in self.agents.values()])

    def _agent(self, row: AgentRow) -> dict[str, Any]:
        zone = "America/Denver"
        return {"id": row.ref, "name": row.ref, "email": None, "active": row.active, "paused": row.paused, "zone": zone}

    def _hooks(self, asked: Received, rest: list[str]) -> Reply:
        if asked.method == "DELETE":
            before = len(self.hooks)
            self.hooks = [h for h in self.hooks if h.ref != rest[0]]
            return Reply(204) if len(self.hooks) < before else Reply(404, {"error": "no such hook"})
        if asked.method == "POST":
            ref = self.new_ref()
            self.hooks += [HookRow(ref, t, asked.json["url"]) for t in asked.json["topics"]]
            return Reply(201, {"id": ref, "url": asked.json["url"], "topics": asked.json["topics"], "active": True})
        refs = dict.fromkeys(h.ref for h in self.hooks)
        return Reply(body={"hooks": [self._hook([h for h in self.hooks if h.ref == r]) for r in refs]})

    def _hook(self, rows: list[HookRow]) -> dict[str, Any]:
        return {"id": rows[0].ref, "url": rows[0].url, "topics": [r.topic for r in rows], "active": rows[0].active}

    def _account(self, _: Received, __: list[str]) -> Reply:
        return Reply(body={"id": "acc-1", "name": "Example Homes", "time": (NOW + self.clock_is_off).isoformat()})


class TheKit(Kit):
    name = "generic"
    secrets = (b"whsec_Y2FuYXJ5LXNlY3JldC1vbmU=", b"whsec_Y2FuYXJ5LXNlY3JldC10d28=")
    void_secrets = (b"", b"whsec_", b"whsec_no base64!")
    signature_headers = ("webhook-id", "webhook-timestamp", "webhook-signature")
    credentials = Credentials(secrets={"api_secret": API_SECRET, "webhook_secret": secrets[0].decode()})
    required: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {
        "lead.created": (("type",), ("data",), ("data", "id")),
        "lead.created.batch": (("data", "leads", 0, "id"), ("data", "leads", 2, "id")),
        "lead.deleted": (("data", "leads", 1, "id"),),
    }
    texts: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {
        "lead.created": (("data", "source"), ("data", "custom", "bedrooms"), ("data", "tags", 0), ("data", "name"))
    }

    def sign(self, body: bytes, secret: bytes, at: datetime = NOW, headers: Mapping[str, str] = {}) -> dict[str, str]:
        try:
            key = base64.b64decode(secret.removeprefix(b"whsec_"))
        except ValueError:
            key = secret
        made = {"webhook-id": "msg_zero", "webhook-timestamp": str(int(at.timestamp()))} | dict(headers)
        signed = f"{made['webhook-id']}.{made['webhook-timestamp']}.".encode() + body
        made["webhook-signature"] = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        return made

    def retopic(self, body: Any, topic: str) -> Any:
        return {**body, "type": topic}

    def batch(self, refs: Sequence[str | None]) -> Any:
        leads = [{"id": r} if r else {"id": "1", "price": "much"} for r in refs]
        return {"type": "lead.created", "timestamp": NOW.isoformat(), "data": {"leads": leads}}

    def fake(self) -> Fake:
        return FakeGeneric()
