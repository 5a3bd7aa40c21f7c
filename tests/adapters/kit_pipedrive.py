"""Pipedrive for the conformance suite."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from adapters.base import Credentials
from tests.adapters.kit import NOW, AgentRow, Fake, HookRow, Kit, LeadRow
from tests.adapters.loopback import Received, Reply

ME = "20580200"  # the connected user, who owns whatever nobody has
PASSWORD = "canary-hook-password-1"
NOT_FOUND = Reply(404, {"success": False, "error": "requested lead not found", "error_info": "Object was not found."})


def ok(data: Any, code: int = 200, **more: Any) -> Reply:
    return Reply(code, {"success": True, "data": data, **more})


class FakePipedrive(Fake):
    """Leads and their persons, notes, users, teams, webhooks, as the two OpenAPI files show them."""

    def __init__(self) -> None:
        super().__init__()
        self.passwords: dict[str, str] = {}  # of hooks that were made by the API
        self.emails: dict[str, str] = {}  # of persons that were made by the API
        self.archived: set[str] = set()
        self.company = 13052000

    def handle(self, asked: Received) -> Reply:
        token, bearer = asked.headers.get("x-api-token"), asked.headers.get("authorization")
        if "canary-api-token-1" not in (token, (bearer or "").removeprefix("Bearer ")):
            return Reply(401, {"success": False, "error": "unauthorized access", "errorCode": 401})
        api, version, name, *rest = asked.path.strip("/").split("/")
        assert api == "api"
        places = {
            ("v1", "leads"): self._leads, ("v2", "persons"): self._persons, ("v1", "notes"): self._notes,
            ("v2", "activities"): self._activities, ("v1", "users"): self._users, ("v1", "webhooks"): self._webhooks,
            ("v1", "legacyTeams"): self._teams,
        }  # fmt: skip
        return places[version, name](asked, *rest)

    def lead(self, row: LeadRow) -> dict[str, Any]:
        made, changed = (
            moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            for moment in (row.created, row.changed or row.created)
        )
        return {
            "id": row.ref, "title": "canary lead", "owner_id": int(row.owner or ME), "creator_id": int(ME),
            "label_ids": [], "person_id": self.person_of(row), "organization_id": None, "source_name": "Web forms",
            "origin": "API", "origin_id": None, "channel": None, "channel_id": None, "was_seen": False,
            "is_archived": row.ref in self.archived, "value": None, "visible_to": "3",
            "add_time": made, "update_time": changed,
        }  # fmt: skip

    def person_of(self, row: LeadRow) -> int:
        return 1092

    def _leads(self, asked: Received, ref: str = "") -> Reply:
        if not ref and asked.method == "POST":
            assert asked.json.keys() == {"title", "person_id", "owner_id"}
            owner = str(asked.json["owner_id"])
            self.add_leads(LeadRow(new := self.new_ref(), owner=None if owner == ME else owner))
            return ok(self.lead(self.leads[new]), 201)
        if not ref:
            return self._list(asked)
        row = self.leads.get(ref)
        if row is None:
            return NOT_FOUND
        if asked.method == "DELETE":
            del self.leads[ref]
            return ok({"id": ref})
        if asked.method == "PATCH":
            assert asked.json.keys() == {"owner_id"}
            assert isinstance(asked.json["owner_id"], int)
            if not self.refuses_owners:
                row.owner = str(asked.json["owner_id"])
        return ok(self.lead(row))

    def _list(self, asked: Received) -> Reply:
        owner, since = asked.query.get("owner_id"), asked.query.get("updated_since", "")
        rows = [self.lead(row) for row in self.leads.values() if row.ref not in self.archived]
        rows = [r for r in rows if owner in (None, str(r["owner_id"])) and r["update_time"] >= since]
        start, limit = int(asked.query.get("start") or 0), int(asked.query["limit"])
        end = start + limit
        more = {"start": start, "limit": limit, "more_items_in_collection": end < len(rows), "next_start": end}
        return ok(rows[start:end], additional_data={"pagination": more})

    def _persons(self, asked: Received, ref: str = "") -> Reply:
        if asked.method == "GET" and not ref:
            return ok([], additional_data={"next_cursor": None})
        if asked.method == "POST":
            self.emails[new := self.new_ref()] = asked.json["emails"][0]["value"]
            return ok({"id": int(new)})
        if asked.method == "DELETE":
            return ok({"id": int(ref)}) if self.emails.pop(ref, None) else NOT_FOUND
        emails = [{"value": self.emails.get(ref, "canary@example.com"), "primary": True, "label": "work"}]
        return ok({"id": int(ref), "name": "canary-person", "owner_id": int(ME), "emails": emails, "phones": []})

    def _notes(self, asked: Received) -> Reply:
        if asked.method == "POST":
            shown = re.fullmatch("<b>(.*)</b><br>(.*)", asked.json["content"])
            assert shown is not None
            note = (html.unescape(shown[1]), html.unescape(shown[2].replace("<br>", "\n")))
            self.leads[asked.json["lead_id"]].notes.append(note)
            return ok({"id": int(self.new_ref()), "content": asked.json["content"]})
        row = self.leads.get(asked.query["lead_id"])
        kept = [f"<b>{html.escape(s)}</b><br>{html.escape(b)}" for s, b in (row.notes if row else [])]
        more = {"pagination": {"start": 0, "limit": 100, "more_items_in_collection": False}}
        return ok([{"id": n, "content": text} for n, text in enumerate(kept, 1)] or None, additional_data=more)

    def _activities(self, asked: Received) -> Reply:
        if asked.method == "POST":
            said = asked.json
            assert (said["type"], said["done"]) == ("call", False)
            row = self.leads[said["lead_id"]]
            assert said["participants"] == [{"person_id": self.person_of(row), "primary": True}]
            text, due = f"{said['subject']} {said['note']}", f"{said['due_date']}T{said['due_time']}Z"
            row.tasks.append((str(said["owner_id"]), text, due))
            return ok({"id": int(self.new_ref())})
        found = self.leads.get(asked.query["lead_id"])
        rows = [
            {"id": n, "subject": "s", "note": text} for n, (_, text, _) in enumerate(found.tasks if found else [], 1)
        ]
        return ok(rows, additional_data={"next_cursor": None})

    def _user(self, row: AgentRow) -> dict[str, Any]:
        return {
            "id": int(row.ref), "name": f"Agent {row.ref}", "email": f"{row.ref}@example.com", "activated": True,
            "active_flag": row.active, "is_deleted": not row.active, "is_you": row.ref == ME,
            "timezone_name": "America/Denver", "access": [{"app": "sales", "admin": row.ref == ME}],
        }  # fmt: skip

    def _users(self, asked: Received, ref: str = "") -> Reply:
        if ref == "me":
            clock = (NOW + self.clock_is_off).strftime("%a, %d %b %Y %H:%M:%S GMT")
            me = self._user(AgentRow(ME)) | {"company_id": self.company, "company_domain": "acme"}
            return Reply(body={"success": True, "data": me}, headers={"Date": clock})
        if ref:
            return ok(self._user(self.agents[ref])) if ref in self.agents else NOT_FOUND
        return ok([self._user(row) for row in self.agents.values()])

    def _teams(self, asked: Received) -> Reply:
        rows = [
            {"id": int(ref), "name": name, "manager_id": 1, "users": [int(u) for u in users], "active_flag": 1}
            for ref, (name, users) in self.teams.items()
        ]
        return ok([*rows, {"id": 99, "name": "Gone", "users": [2], "active_flag": 0, "deleted_flag": 1}])

    def hook(self, row: HookRow) -> dict[str, Any]:
        return {
            "id": int(row.ref), "event_action": row.topic, "event_object": "lead", "subscription_url": row.url,
            "version": "2.0", "is_active": int(row.active), "http_auth_user": "turnlock",
            "http_auth_password": self.passwords.get(row.ref, PASSWORD), "last_http_status": None,
        }  # fmt: skip

    def _webhooks(self, asked: Received, ref: str = "") -> Reply:
        if asked.method == "POST":
            said = asked.json
            assert said["event_action"] in ("create", "change", "delete") and said["event_object"] == "lead"  # noqa: PT018
            assert said["version"] == "2.0" and 0 < len(said["name"]) <= 255  # noqa: PT018
            assert said["http_auth_user"] == "turnlock"
            row = self.add_hook(said["event_action"], said["subscription_url"])
            self.passwords[row.ref] = said["http_auth_password"]
            return ok(self.hook(row), 201, status="ok")
        if asked.method == "DELETE":
            before = len(self.hooks)
            self.hooks = [hook for hook in self.hooks if hook.ref != ref]
            if len(self.hooks) == before:
                return Reply(404, {"status": "error", "success": False, "errors": {"id": ["not found"]}})
            return Reply(body={"status": "ok", "success": True})
        return ok([self.hook(row) for row in self.hooks], status="ok")


class TheKit(Kit):
    name = "pipedrive"
    secrets = (PASSWORD.encode(), b"canary-hook-password-2")
    void_secrets = (b"",)
    signature_headers = ("authorization",)
    credentials = Credentials(
        parameters={"sweep_min_age": "0"}, secrets={"api_token": "canary-api-token-1", "hook_password": PASSWORD}
    )
    ponds = False
    required: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = dict.fromkeys(
        ("create", "change", "delete"),
        (("meta",), ("meta", "version"), ("meta", "action"), ("meta", "entity"), ("meta", "entity_id"), ("meta", "id")),
    )
    texts: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {"create": (("meta", "timestamp"),)}

    def sign(self, body: bytes, secret: bytes, at: datetime = NOW, headers: Mapping[str, str] = {}) -> dict[str, str]:
        return {**headers, "authorization": "Basic " + base64.b64encode(b"turnlock:" + secret).decode()}

    def retopic(self, body: Any, topic: str) -> Any:
        return {**body, "meta": {**body["meta"], "action": topic}}

    def batch(self, refs: Sequence[str | None]) -> Any:
        raise NotImplementedError("a delivery tells of one lead")

    def fake(self) -> Fake:
        return FakePipedrive()
