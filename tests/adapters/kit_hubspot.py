"""HubSpot for the conformance suite."""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from adapters.base import Credentials
from tests.adapters.kit import NOW, AgentRow, Fake, Kit, LeadRow
from tests.adapters.loopback import Received, Reply

_NOT_FOUND = {"status": "error", "category": "OBJECT_NOT_FOUND", "message": "resource not found"}


class FakeHubSpot(Fake):
    """Contacts, search, notes by association, owners, the scopes of the token."""

    def __init__(self) -> None:
        super().__init__()
        self.scopes = ["crm.objects.contacts.read", "crm.objects.contacts.write", "crm.objects.owners.read"]

    def handle(self, asked: Received) -> Reply:
        if asked.path.startswith("/webhooks/v3/9/"):
            return self._app(asked)
        if asked.headers.get("authorization") != "Bearer pat-na1-canary1":
            return Reply(401, {"status": "error", "category": "INVALID_AUTHENTICATION", "message": "no"})
        path = asked.path
        if path == "/account-info/v3/details":
            clock = (NOW + self.clock_is_off).strftime("%a, %d %b %Y %H:%M:%S GMT")
            return Reply(body={"portalId": 62515, "timeZone": "US/Eastern"}, headers={"Date": clock})
        if path == "/oauth/v2/private-apps/get/access-token-info":
            assert asked.json == {"tokenKey": "pat-na1-canary1"}
            return Reply(body={"hubId": 62515, "appId": 9, "scopes": self.scopes})
        if path.startswith("/crm/v3/owners"):
            return self._owners(asked, path.removeprefix("/crm/v3/owners").strip("/"))
        if path == "/crm/v3/objects/notes":
            to = asked.json["associations"][0]
            assert to["types"] == [{"associationCategory": "HUBSPOT_DEFINED", "associationTypeId": 202}]
            shown = asked.json["properties"]["hs_note_body"]
            assert asked.json["properties"]["hs_timestamp"].endswith("Z")
            subject, body = re.fullmatch("<strong>(.*)</strong><br>(.*)", shown).groups()  # type: ignore[union-attr]
            note = (html.unescape(subject), html.unescape(body.replace("<br>", "\n")))
            self.leads[to["to"]["id"]].notes.append(note)
            return Reply(201, {"id": self.new_ref(), "properties": {}})
        if path == "/crm/v3/objects/tasks":
            to, values = asked.json["associations"][0], asked.json["properties"]
            assert to["types"] == [{"associationCategory": "HUBSPOT_DEFINED", "associationTypeId": 204}]
            assert (values["hs_task_status"], values["hs_task_type"]) == ("NOT_STARTED", "CALL")
            text = f"{values['hs_task_subject']} {values['hs_task_body']}"
            self.leads[to["to"]["id"]].tasks.append((values["hubspot_owner_id"], text, values["hs_timestamp"]))
            return Reply(201, {"id": self.new_ref(), "properties": {}})
        if path == "/crm/v3/objects/tasks/batch/read":
            texts = dict(self._tasks())
            rows = [{"id": i["id"], "properties": {"hs_task_body": texts[i["id"]]}} for i in asked.json["inputs"]]
            return Reply(body={"status": "COMPLETE", "results": rows})
        if found := re.fullmatch("/crm/v4/objects/contacts/([0-9]+)/associations/tasks", path):
            ids = [n for n, _ in self._tasks(found[1])]
            return Reply(body={"results": [{"toObjectId": int(n), "associationTypes": []} for n in ids]})
        if path == "/crm/v3/objects/notes/batch/read":
            texts = {n: f"{s}<br>{html.escape(b)}" for n, s, b in self._notes()}
            rows = [{"id": i["id"], "properties": {"hs_note_body": texts[i["id"]]}} for i in asked.json["inputs"]]
            return Reply(body={"status": "COMPLETE", "results": rows})
        if found := re.fullmatch("/crm/v4/objects/contacts/([0-9]+)/associations/notes", path):
            ids = [n for n, *_ in self._notes(found[1])]
            return Reply(body={"results": [{"toObjectId": int(n), "associationTypes": []} for n in ids]})
        return self._contacts(asked, path.removeprefix("/crm/v3/objects/contacts").strip("/"))

    def _app(self, asked: Received) -> Reply:
        assert asked.query["hapikey"] == "canary-developer-key"
        if asked.path.endswith("/settings"):
            if asked.method == "PUT":
                assert asked.json["throttling"] == {"maxConcurrentRequests": 10}
                self.app_target = asked.json["targetUrl"]
            if self.app_target is None:
                return Reply(404, _NOT_FOUND)
            return Reply(body={"targetUrl": self.app_target, "throttling": {"maxConcurrentRequests": 10}})
        topics = sorted(self.app_topics)
        if asked.method == "POST":
            assert asked.json["active"] is True
            topic = " ".join(filter(None, (asked.json["eventType"], asked.json.get("propertyName"))))
            self.app_topics[topic] = True
            return Reply(201, {"id": "77", "eventType": asked.json["eventType"], "active": True})
        if asked.method == "PATCH":
            self.app_topics[topics[int(asked.path.rpartition("/")[2])]] = asked.json["active"]
            return Reply(body={})
        rows = []
        for number, topic in enumerate(topics):
            kind, _, name = topic.partition(" ")
            rows.append({"id": str(number), "eventType": kind, "active": self.app_topics[topic]})
            rows[-1] |= {"propertyName": name} if name else {}
        return Reply(body={"results": rows})

    def _tasks(self, ref: str | None = None) -> list[tuple[str, str]]:
        rows = [row for row in self.leads.values() if ref in (None, row.ref)]
        return [(f"{row.ref}{at:03d}", text) for row in rows for at, (_, text, _) in enumerate(row.tasks)]

    def _notes(self, ref: str | None = None) -> list[tuple[str, str, str]]:
        rows = sorted(self.leads.values(), key=lambda row: row.ref)
        return [
            (f"{row.ref}{at:03d}", subject, body)
            for row in rows
            for at, (subject, body) in enumerate(row.notes)
            if ref in (None, row.ref)
        ]

    def _contact(self, row: LeadRow) -> dict[str, Any]:
        stamp = row.created.isoformat().replace("+00:00", "Z")
        values = {"createdate": stamp, "hubspot_owner_id": row.owner, "email": "canary@example.com"}
        values["lastmodifieddate"] = (row.changed or row.created).isoformat().replace("+00:00", "Z")
        return {"id": row.ref, "properties": values | {"firstname": "canary-person"}, "createdAt": stamp}

    def _contacts(self, asked: Received, rest: str) -> Reply:
        if rest == "batch/read":
            ids = [i["id"] for i in asked.json["inputs"]]
            assert len(ids) <= 100
            assert len(set(ids)) == len(ids)
            assert "hubspot_owner_id" in asked.json["properties"]
            found = [self._contact(self.leads[i]) for i in ids if i in self.leads]
            if len(found) == len(ids):
                return Reply(body={"status": "COMPLETE", "results": found})
            return Reply(207, {"status": "COMPLETE", "results": found, "numErrors": 1, "errors": [_NOT_FOUND]})
        if rest == "search":
            return self._search(asked.json)
        if not rest and asked.method == "POST":
            assert set(asked.json["properties"]) == {"firstname", "lastname", "email"}
            self.add_leads(LeadRow(ref := self.new_ref()))
            return Reply(201, self._contact(self.leads[ref]))
        if not rest:
            return Reply(body={"results": [self._contact(row) for row in list(self.leads.values())[:1]]})
        row = self.leads.get(rest)
        if row is None:
            return Reply(404, _NOT_FOUND)
        if asked.method == "DELETE":
            del self.leads[rest]
            return Reply(204)
        assert asked.method == "PATCH"
        (row.owner,) = asked.json["properties"].values()
        return Reply(body={"id": row.ref, "properties": {"lastmodifieddate": NOW.isoformat()}})

    def _search(self, query: Mapping[str, Any]) -> Reply:
        assert query["sorts"] == [{"propertyName": "hs_object_id", "direction": "ASCENDING"}]
        assert query["limit"] <= 200
        assert len(query["filterGroups"]) <= 5

        def fits(row: LeadRow, rule: Mapping[str, Any]) -> bool:
            name, operator = rule["propertyName"], rule["operator"]
            if operator == "NOT_HAS_PROPERTY":
                return row.owner is None
            if operator == "IN":
                return row.owner in rule["values"]
            times = {"createdate": row.created, "lastmodifieddate": row.changed or row.created}
            shown = int(row.ref) if name == "hs_object_id" else times[name].timestamp() * 1000
            return shown > int(rule["value"]) if operator == "GT" else shown >= int(rule["value"])

        rows = [
            row
            for row in sorted(self.leads.values(), key=lambda row: int(row.ref))
            if any(all(fits(row, rule) for rule in group["filters"]) for group in query["filterGroups"])
        ]
        shown = rows[: query["limit"]]
        more = {"paging": {"next": {"after": str(len(shown))}}} if len(shown) < len(rows) else {}
        return Reply(body={"total": len(rows), "results": [self._contact(row) for row in shown], **more})

    def _owners(self, asked: Received, ref: str) -> Reply:
        archived = asked.query.get("archived") == "true"
        rows = [a for a in self.agents.values() if a.active is not archived]
        if ref:
            found = [a for a in rows if a.ref == ref]
            return Reply(body=self._owner(found[0])) if found else Reply(404, _NOT_FOUND)
        start = int(asked.query.get("after") or 0)
        shown = rows[start : start + min(int(asked.query.get("limit") or 100), 100)]
        end = start + len(shown)
        more = {"paging": {"next": {"after": str(end), "link": "https://elsewhere.example.com/"}}}
        return Reply(body={"results": [self._owner(a) for a in shown], **(more if end < len(rows) else {})})

    def _owner(self, row: AgentRow) -> dict[str, Any]:
        names = {"firstName": "Agent", "lastName": row.ref} if row.active else {"firstName": "", "lastName": ""}
        about: dict[str, Any] = {
            "email": f"{row.ref}@example.com",
            "type": "PERSON",
            "archived": not row.active,
            **names,
        }
        about["teams"] = [{"id": t, "name": n} for t, (n, refs) in self.teams.items() if row.ref in refs]
        return {"id": row.ref, "userId": int(row.ref) + 900_000 if row.active else None, **about}


class TheKit(Kit):
    name = "hubspot"
    secrets = (b"canary-client-secret-1", b"canary-client-secret-2")
    void_secrets = (b"",)
    signature_headers = ("x-hubspot-signature-v3", "x-hubspot-request-timestamp")
    credentials = Credentials(
        parameters={"sweep_min_age": "0"},
        secrets={"access_token": "pat-na1-canary1", "client_secret": secrets[0].decode()},
    )
    app_access: ClassVar[Mapping[str, str]] = {"app_id": "9", "developer_key": "canary-developer-key"}
    ponds = False
    zone = None
    required: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {
        "contact.creation": (
            (0,), (0, "subscriptionType"), (0, "portalId"), (0, "eventId"), (0, "objectId"), (0, "occurredAt"),
        ),
    }  # fmt: skip
    texts: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {
        "contact.propertyChange": ((0, "propertyName"),),
    }

    def sign(self, body: bytes, secret: bytes, at: datetime = NOW, headers: Mapping[str, str] = {}) -> dict[str, str]:
        stamp = str(int(at.timestamp() * 1000))
        digest = hmac.new(secret, f"POST{self.url}".encode() + body + stamp.encode(), hashlib.sha256).digest()
        signature = base64.b64encode(digest).decode()
        return {**headers, "x-hubspot-signature-v3": signature, "x-hubspot-request-timestamp": stamp}

    def writes(self, asked: Received) -> bool:
        return asked.writes and not asked.path.endswith(("/batch/read", "/search", "/access-token-info"))

    def retopic(self, body: Any, topic: str) -> Any:
        return [{**element, "subscriptionType": topic} for element in body]

    def batch(self, refs: Sequence[str | None]) -> Any:
        at = int(NOW.timestamp() * 1000)
        return [
            {"portalId": 62515, "appId": 1, "eventId": 1, "occurredAt": at, "subscriptionType": "contact.creation"}
            | {"objectId": int(ref) if ref else "?"}
            for ref in refs
        ]

    def fake(self) -> Fake:
        return FakeHubSpot()
