"""Follow Up Boss for the conformance suite."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from adapters.base import Credentials
from tests.adapters.kit import NOW, AgentRow, Fake, HookRow, Kit, LeadRow
from tests.adapters.loopback import Received, Reply


class FakeFollowUpBoss(Fake):
    """Pages by ``next``; ``refuses_owners`` answers the person without the owner."""

    unclaimed: ClassVar[frozenset[str]] = frozenset({"7777"})

    def handle(self, asked: Received) -> Reply:
        assert asked.headers["authorization"] == "Basic ZmthX2NhbmFyeTE6"
        assert (asked.headers["x-system"], asked.headers["x-system-key"]) == ("Lead Desk", "canary-system-key-1")
        kind, _, ref = asked.path.strip("/").partition("/")
        route: Callable[[Received, str], Reply] | None = getattr(self, f"_{kind}", None)
        return route(asked, ref) if route else Reply(404, {"errorMessage": "no such path"})

    def _list(self, asked: Received, name: str, rows: Sequence[Any]) -> Reply:
        start = int(asked.query.get("next") or 0)
        end = start + min(int(asked.query.get("limit", 10)), 100)
        meta = {"collection": name, "offset": start, "limit": end - start, "total": len(rows)}
        if end < len(rows):
            meta |= {"next": str(end), "nextLink": f"https://elsewhere.example.com/{name}?next={end}"}
        return Reply(body={"_metadata": meta, name: rows[start:end]})

    def _person(self, row: LeadRow) -> dict[str, Any]:
        return {
            "id": int(row.ref),
            "created": row.created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "updated": (row.changed or row.created).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "assignedUserId": int(row.owner) if row.owner else None,
            "assignedPondId": int(row.pond) if row.pond else None,
            "name": "canary-person",
            "emails": [{"value": "canary@example.com"}],
            "collaborators": [{"id": int(c), "assigned": False} for c in row.collaborators],
        }

    def _people(self, asked: Received, ref: str) -> Reply:
        if ref == "unclaimed":
            return self._list(
                asked, "people", [self._person(r) for r in self.leads.values() if r.ref in self.unclaimed]
            )
        if asked.method == "PUT":
            row = self.leads.get(ref)
            if row is None:
                return Reply(404, {"errorMessage": "not found"})
            assert set(asked.json) == {"assignedUserId"}
            if not self.refuses_owners:
                row.owner = str(asked.json["assignedUserId"])
            return Reply(body=self._person(row))
        if asked.method == "POST":
            assert set(asked.json) == {"firstName", "lastName", "emails"}
            self.add_leads(LeadRow(new := self.new_ref()))
            return Reply(201, self._person(self.leads[new]))
        if asked.method == "DELETE":
            return Reply(body={}) if self.leads.pop(ref, None) else Reply(404, {"errorMessage": "not found"})
        by = asked.query.get("sort", "-created")
        rows = sorted(self.leads.values(), key=lambda r: (r.changed if by == "-updated" else None) or r.created)[::-1]
        if wanted := asked.query.get("id"):
            assert asked.query["fields"] == "allFields"
            assert len(wanted.split(",")) <= 100
            rows = [r for r in rows if r.ref in wanted.split(",")]
        else:
            assert by in ("-created", "-updated")
            after = datetime.fromisoformat(asked.query[f"{by[1:]}After"]).replace(tzinfo=UTC)
            rows = [r for r in rows if (r.changed if by == "-updated" and r.changed else r.created) >= after]
        if asked.query.get("includeUnclaimed") != "true":
            rows = [r for r in rows if r.ref not in self.unclaimed]
        return self._list(asked, "people", [self._person(r) for r in rows])

    def _users(self, asked: Received, ref: str) -> Reply:
        if ref:
            found = self.agents.get(ref)
            return Reply(body=self._user(found)) if found else Reply(404, {"errorMessage": "not found"})
        shown = [a for a in self.agents.values() if a.active or asked.query.get("includeDeleted") == "true"]
        return self._list(asked, "users", [self._user(a) for a in shown])

    def _user(self, row: AgentRow) -> dict[str, Any]:
        return {
            "id": int(row.ref),
            "name": f"Agent {row.ref}",
            "status": "Active" if row.active else "Deleted",
            "role": "Agent",
            "timezone": "America/Denver",
            "pauseLeadDistribution": row.paused,
        }

    def _groups(self, asked: Received, _: str) -> Reply:
        rows = [
            {"id": int(ref), "name": name, "distribution": "round-robin", "users": [{"id": int(u)} for u in users]}
            for ref, (name, users) in self.teams.items()
        ]
        return self._list(asked, "groups", rows)

    def _teams(self, asked: Received, _: str) -> Reply:
        everybody = {"id": 1, "name": "Company", "userIds": [int(a) for a in self.agents], "leaderIds": []}
        return self._list(asked, "teams", [everybody])

    def _notes(self, asked: Received, _: str) -> Reply:
        if asked.method == "POST":
            assert asked.json["isHtml"] is False
            self.leads[str(asked.json["personId"])].notes.append((asked.json["subject"], asked.json["body"]))
            return Reply(201, {"id": 1})
        notes = self.leads[asked.query["personId"]].notes
        return self._list(asked, "notes", [{"id": i, "subject": s, "body": b} for i, (s, b) in enumerate(notes, 1)])

    def _tasks(self, asked: Received, _: str) -> Reply:
        if asked.method == "POST":
            given = asked.json
            assert given["type"] == "Call"
            task = (str(given["assignedUserId"]), given["name"], given["dueDateTime"])
            self.leads[str(given["personId"])].tasks.append(task)
            return Reply(201, {"id": 1})
        tasks = self.leads[asked.query["personId"]].tasks
        return self._list(asked, "tasks", [{"id": i, "name": text} for i, (_, text, _) in enumerate(tasks, 1)])

    def _webhooks(self, asked: Received, ref: str) -> Reply:
        if asked.method == "DELETE":
            before = len(self.hooks)
            self.hooks = [h for h in self.hooks if h.ref != ref]
            return Reply(204) if len(self.hooks) < before else Reply(404, {"errorMessage": "not found"})
        if asked.method == "PUT":
            row = next(h for h in self.hooks if h.ref == ref)
            row.active = asked.json["status"] == "Active"
            return Reply(body=self._hook(row))
        if asked.method == "POST":
            if sum(h.topic == asked.json["event"] for h in self.hooks) >= 2:
                return Reply(400, {"errorMessage": "limit of webhooks reached"})
            return Reply(201, self._hook(self.add_hook(asked.json["event"], asked.json["url"])))
        return self._list(asked, "webhooks", [self._hook(h) for h in self.hooks])

    def _hook(self, row: HookRow) -> dict[str, Any]:
        status = "Active" if row.active else "Disabled"
        return {"id": int(row.ref), "status": status, "event": row.topic, "url": row.url}

    def _events(self, _: Received, ref: str) -> Reply:
        return Reply(body={"id": int(ref), "personId": 5001}) if ref == "61" else Reply(404, {"errorMessage": "no"})

    def _identity(self, _: Received, __: str) -> Reply:
        date = (NOW + self.clock_is_off).strftime("%a, %d %b %Y %H:%M:%S GMT")
        about = {"account": {"id": 44, "domain": "example-homes"}, "user": {"id": 1, "isOwner": True}}
        return Reply(body=about, headers={"Date": date})


class TheKit(Kit):
    name = "followupboss"
    secrets = (b"canary-system-key-1", b"canary-system-key-2")
    void_secrets = (b"",)
    signature_headers = ("fub-signature",)
    credentials = Credentials(
        parameters={"system": "Lead Desk", "sweep_min_age": "0"},
        secrets={"api_key": "fka_canary1", "system_key": "canary-system-key-1"},
    )
    required: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {
        "peopleCreated": (("event",), ("eventId",), ("resourceIds",), ("resourceIds", 0)),
        "wrapped": ((0, "event"), (0, "eventId"), (0, "resourceIds")),
    }
    texts: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {"peopleCreated": (("eventId",),)}

    def sign(self, body: bytes, secret: bytes, at: datetime = NOW, headers: Mapping[str, str] = {}) -> dict[str, str]:
        signature = hmac.new(secret, base64.b64encode(body), hashlib.sha256).hexdigest()
        return {**headers, "x-system": "Lead Desk", "fub-signature": signature}

    def retopic(self, body: Any, topic: str) -> Any:
        return {**body, "event": topic}

    def batch(self, refs: Sequence[str | None]) -> Any:
        ids = [int(r) if r else {"id": 1} for r in refs]
        return {"eventId": "e-1", "eventCreated": NOW.isoformat(), "event": "peopleUpdated", "resourceIds": ids}

    def fake(self) -> Fake:
        return FakeFollowUpBoss()
