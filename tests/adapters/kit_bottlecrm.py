"""BottleCRM for the conformance suite."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any, ClassVar

from adapters.base import Credentials
from tests.adapters.kit import NOW, AgentRow, Fake, Kit, LeadRow
from tests.adapters.loopback import Received, Reply


class FakeBottleCrm(Fake):
    """Answers as in tests/fixtures/bottlecrm/captured."""

    def handle(self, asked: Received) -> Reply:
        if asked.headers.get("authorization") != "Bearer bcrm_pat_canary1":
            return Reply(403, {"detail": "Organization context is required. Please login again."})
        api, kind, *rest = asked.path.strip("/").split("/")
        assert api == "api"
        assert asked.path.endswith("/")
        reply = self._leads(asked, rest) if kind == "leads" else self._users(asked) if kind == "users" else None
        return reply or Reply(404, {"detail": "Not found."})

    def _list(self, asked: Received, name: str, count: str, rows: Sequence[Any]) -> dict[str, Any]:
        start, limit = int(asked.query.get("offset") or 0), int(asked.query["limit"])
        shown = rows[start : start + limit]
        following = start + len(shown) if start + len(shown) < len(rows) else None
        return {count: len(rows), name: shown, "offset": following if shown else 0}

    def _lead(self, row: LeadRow) -> dict[str, Any]:
        holders = [row.owner, *row.collaborators] if row.owner else []
        return {
            "id": row.ref,
            "title": "canary",
            "first_name": "canary-person",
            "email": "canary@example.com",
            "assigned_to": [{"id": holder, "is_active": True} for holder in holders],
            "created_at": row.created.isoformat(),
            "tags": [{"id": "t", "name": "canary"}],
            "custom_fields": {},
        }

    def _leads(self, asked: Received, rest: list[str]) -> Reply:
        if asked.method == "POST":
            assert set(asked.json) == {"title", "first_name", "last_name", "email"}
            self.add_leads(LeadRow(ref := self.new_ref()))
            return Reply(body={"error": False, "message": "Lead Created Successfully", "id": ref})
        if not rest:
            assert asked.query["open"] == "true"
            after = date.fromisoformat(asked.query.get("created_at__gte", "1970-01-01"))
            rows = [self._lead(r) for r in self.leads.values() if r.created.date() >= after]
            page = {"open_leads": self._list(asked, "open_leads", "leads_count", rows)}
            clock = (NOW + self.clock_is_off).strftime("%a, %d %b %Y %H:%M:%S GMT")
            return Reply(body=page, headers={"Date": clock})
        row = self.leads.get(rest[0])
        if row is None:
            return Reply(404, {"detail": "No Lead matches the given query."})
        if asked.method == "DELETE":
            del self.leads[row.ref]
            return Reply(body={"error": False, "message": "Lead deleted Successfully"})
        if asked.method == "PATCH":
            holders = asked.json["assigned_to"]
            row.owner, row.collaborators = (holders[0], holders[1:]) if holders else (None, [])
            return Reply(body={"error": False, "message": "Lead updated Successfully"})
        return Reply(body={"lead_obj": self._lead(row), "comments": []})

    def _users(self, asked: Received) -> Reply:
        lists = {}
        for name, active in (("active_users", True), ("inactive_users", False)):
            rows = [self._profile(a) for a in self.agents.values() if a.active is active]
            lists[name] = self._list(asked, name, f"{name}_count", rows)
        return Reply(body=lists)

    def _profile(self, row: AgentRow) -> dict[str, Any]:
        user = {"id": f"user-{row.ref}", "email": f"{row.ref}@example.com", "name": row.ref, "is_active": True}
        return {"id": row.ref, "user_details": user, "role": "USER", "is_active": row.active}


class TheKit(Kit):
    name = "bottlecrm"
    secrets = (b"whsec_canary-one", b"whsec_canary-two")
    void_secrets = (b"",)
    signature_headers = ("x-bottlecrm-signature",)
    credentials = Credentials(
        secrets={"api_token": "bcrm_pat_canary1", "webhook_secret": secrets[0].decode()},
    )
    ponds = False
    missing: ClassVar[Any] = {"detail": "No Lead matches the given query."}
    zone = None
    required: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {
        "lead.created": (("event",), ("id",), ("data",), ("data", "id")),
        "lead.deleted": (("event",), ("id",), ("data",), ("data", "id")),
    }
    texts: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {
        "lead.created": (("data", "source"), ("data", "status"), ("data", "first_name"))
    }

    def sign(self, body: bytes, secret: bytes, at: datetime = NOW, headers: Mapping[str, str] = {}) -> dict[str, str]:
        seconds = int(at.timestamp())
        digest = hmac.new(secret, f"{seconds}.".encode() + body, hashlib.sha256).hexdigest()
        return {**headers, "x-bottlecrm-signature": f"t={seconds},v1={digest}"}

    def retopic(self, body: Any, topic: str) -> Any:
        return {**body, "event": topic}

    def batch(self, refs: Sequence[str | None]) -> Any:
        raise NotImplementedError("a delivery tells of one lead")

    def fake(self) -> Fake:
        return FakeBottleCrm()
