"""Frappe CRM for the conformance suite."""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar
from urllib.parse import unquote
from zoneinfo import ZoneInfo

from adapters.base import HOOK_TOPIC, Credentials
from tests.adapters.kit import NOW, AgentRow, Fake, HookRow, Kit, LeadRow
from tests.adapters.loopback import Received, Reply

Record = dict[str, Any]
ZONE = ZoneInfo("America/Denver")


def refused(status: int, kind: str) -> Reply:
    """An error as Frappe tells it, with its traceback."""
    return Reply(status, {"exc_type": kind, "exception": f"frappe.exceptions.{kind}: canary", "exc": "Traceback"})


class FakeFrappe(Fake):
    """Answers as in tests/fixtures/frappe/captured. ``modified`` follows the owner."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: set[str] = set()  # webhooks that have sent something, which Frappe does not remove
        self.site_zone: str | None = None  # as the settings tell it; None to whom may not read them

    def add_hook(self, topic: str, url: str, active: bool = True) -> HookRow:
        return super().add_hook(topic, f"{url}/{topic}", active)

    def standing(self, url: str) -> list[tuple[str, bool]]:
        return sorted((h.topic, h.active) for h in self.hooks if h.url == f"{url}/{h.topic}")

    def handle(self, asked: Received) -> Reply:
        if asked.headers.get("authorization") != "token canary-key-1:canary-pass-1":
            return refused(401, "AuthenticationError")
        api, kind, what, *rest = unquote(asked.path).strip("/").split("/")
        date = {"Date": (NOW + self.clock_is_off).strftime("%a, %d %b %Y %H:%M:%S GMT")}
        if what == "frappe.desk.form.assign_to.add":
            return self._assign(asked.json)
        if kind == "method":
            return Reply(body={"message": "router@example.com"}, headers=date)
        assert (api, kind) == ("api", "resource")
        if what == "System Settings":
            shown = Reply(body={"data": {"name": what, "time_zone": self.site_zone}})
            return shown if self.site_zone else refused(403, "PermissionError")
        route = {"CRM Lead": self._leads, "User": self._users, "Webhook": self._webhooks, "FCRM Note": self._notes}[
            what
        ]
        return route(asked, rest)

    def _list(self, asked: Received, rows: Sequence[Record]) -> Reply:
        fields, size = json.loads(asked.query["fields"]), int(asked.query.get("limit_page_length", 20))
        start = int(asked.query.get("limit_start") or 0)
        rows = [row for row in rows if all(self._holds(row, *f) for f in json.loads(asked.query["filters"]))]
        field, _, way = asked.query["order_by"].partition(",")[0].partition(" ")
        rows = sorted(rows, key=lambda row: str(row[field]), reverse=way == "desc")[start : start + size]
        return Reply(body={"data": [{k: row[k] for k in (row if fields == ["*"] else fields)} for row in rows]})

    @staticmethod
    def _holds(row: Record, field: str, operator: str, value: Any) -> bool:
        found = row[field]
        return bool(
            {
                "=": lambda: found == value,
                "in": lambda: found in value,
                "not in": lambda: found not in value,
                ">=": lambda: found >= value,
            }[operator]()
        )

    def _lead(self, row: LeadRow) -> Record:
        made, changed = (at.astimezone(ZONE).replace(tzinfo=None) for at in (row.created, row.changed or row.created))
        return {
            "name": row.ref,
            "lead_name": "canary-person",
            "email": "canary@example.com",
            "lead_owner": row.owner,
            "_assign": json.dumps([*([row.owner] if row.owner else []), *row.collaborators]) if row.owner else None,
            "converted": 0,
            "creation": made.isoformat(sep=" "),
            "modified": changed.replace(microsecond=int(row.owner or 0)).isoformat(sep=" "),
        }

    def _leads(self, asked: Received, rest: list[str]) -> Reply:
        if asked.method == "POST":
            assert set(asked.json) == {"first_name", "last_name", "email"}
            self.add_leads(LeadRow(ref := self.new_ref()))
            return Reply(body={"data": self._lead(self.leads[ref])})
        if not rest:
            return self._list(asked, [self._lead(row) for row in self.leads.values()])
        row = self.leads.get(rest[0])
        if row is None:
            return refused(404, "DoesNotExistError")
        if asked.method == "DELETE":
            del self.leads[row.ref]
            return Reply(202, {"data": "ok"})
        assert (asked.method, set(asked.json)) == ("PUT", {"lead_owner", "modified"})
        if asked.json["modified"] != self._lead(row)["modified"]:
            return refused(417, "TimestampMismatchError")
        row.owner = asked.json["lead_owner"]
        return Reply(body={"data": self._lead(row)})

    def _assign(self, to: Record) -> Reply:
        assert to["doctype"] == "CRM Lead"
        (agent,), row = json.loads(to["assign_to"]), self.leads.get(to["name"])
        if row is None:
            return refused(404, "DoesNotExistError")
        row.collaborators += [agent] if agent not in row.collaborators else []
        return Reply(body={"message": [{"owner": agent, "name": "todo"} for agent in row.collaborators]})

    def _notes(self, asked: Received, _: list[str]) -> Reply:
        if asked.method == "POST":
            text = html.unescape(asked.json["content"].removeprefix("<p>").removesuffix("</p>").replace("<br>", "\n"))
            self.leads[asked.json["reference_docname"]].notes.append((asked.json["title"], text))
            return Reply(body={"data": {"name": "1"}})
        notes = [(row.ref, note) for row in self.leads.values() for note in row.notes]
        return self._list(
            asked,
            [
                {"title": title, "content": f"<p>{html.escape(text)}</p>", "reference_doctype": "CRM Lead"}
                | {"reference_docname": ref, "creation": f"{n:09}"}
                for n, (ref, (title, text)) in enumerate(notes)
            ],
        )

    def _users(self, asked: Received, _: list[str]) -> Reply:
        everybody = [*self.agents.values(), AgentRow("Administrator"), AgentRow("Guest")]
        return self._list(asked, [self._user(row) for row in everybody])

    def _user(self, row: AgentRow) -> Record:
        return {
            "name": row.ref,
            "email": f"{row.ref}@example.com",
            "full_name": f"Agent {row.ref}",
            "enabled": int(row.active),
            "user_type": "System User",
            "time_zone": ZONE.key,
        }

    def _webhooks(self, asked: Received, rest: list[str]) -> Reply:
        if asked.method == "DELETE" and rest[0] in self.logged:
            return refused(417, "LinkExistsError")
        if asked.method == "PUT":
            (hook,) = (h for h in self.hooks if h.ref == rest[0])
            hook.active = asked.json["enabled"] == 1
            return Reply(body={"data": {"name": hook.ref}})
        if asked.method == "DELETE":
            before = len(self.hooks)
            self.hooks = [h for h in self.hooks if h.ref != rest[0]]
            return Reply(202, {"data": "ok"}) if len(self.hooks) < before else refused(404, "DoesNotExistError")
        if asked.method == "POST":
            name, event, url = (asked.json[k] for k in ("name", "webhook_docevent", "request_url"))
            if any(h.ref == name for h in self.hooks):
                return refused(409, "DuplicateEntryError")
            assert (asked.json["condition"], asked.json["enable_security"]) == ("not doc.lead_owner", 1)
            self.hooks.append(HookRow(name, event, url))
            return Reply(body={"data": {"name": name, "webhook_secret": "*****"}})
        return self._list(asked, [self._hook(h) for h in self.hooks])

    def _hook(self, row: HookRow) -> Record:
        told = {"name": row.ref, "webhook_docevent": row.topic, "enabled": int(row.active), "request_url": row.url}
        return told | {"webhook_doctype": "CRM Lead"}


class TheKit(Kit):
    name = "frappe"
    secrets = (b"canary-secret-one", b"canary-secret-two")
    void_secrets = (b"",)
    signature_headers = ("x-frappe-webhook-signature",)
    credentials = Credentials(
        {"time_zone": ZONE.key},
        {"api_key": "canary-key-1", "api_secret": "canary-pass-1", "webhook_secret": secrets[0].decode()},
    )
    ponds = False
    missing: ClassVar[Any] = {"exc_type": "DoesNotExistError"}
    required: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {"after_insert": (("name",),)}
    texts: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {}

    def sign(self, body: bytes, secret: bytes, at: datetime = NOW, headers: Mapping[str, str] = {}) -> dict[str, str]:
        signature = base64.b64encode(hmac.digest(secret, body, hashlib.sha256)).decode()
        return {HOOK_TOPIC: "after_insert", **headers, "x-frappe-webhook-signature": signature}

    def topic_headers(self, topic: str) -> Mapping[str, str]:
        return {HOOK_TOPIC: topic}

    def retopic(self, body: Any, topic: str) -> Any:
        return body

    def batch(self, refs: Sequence[str | None]) -> Any:
        raise NotImplementedError("a delivery tells of one lead")

    def fake(self) -> Fake:
        return FakeFrappe()
