"""Odoo for the conformance suite."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from adapters.base import Credentials
from tests.adapters.kit import NOW, AgentRow, Fake, Fixture, HookRow, Kit, LeadRow
from tests.adapters.loopback import Received, Reply

Record = dict[str, Any]
_WRITES = {"create", "write", "unlink", "message_post", "message_subscribe"}
_PARTNERS = 7000  # the number of the partner that a user is, less the user's own


class Refused(Exception):
    """An error of the application: answered 200."""


class FakeOdoo(Fake):
    """Answers as in tests/fixtures/odoo/captured. Domains are lists of conditions that all must hold."""

    def handle(self, asked: Received) -> Reply:
        assert (asked.method, asked.path) == ("POST", "/jsonrpc")
        date = (NOW + self.clock_is_off).strftime("%a, %d %b %Y %H:%M:%S GMT")
        told: Record = {"jsonrpc": "2.0", "id": 1}
        try:
            told["result"] = self._call(asked.json["params"])
        except Refused as refused:
            name, _, message = str(refused).partition(": ")
            data = {"name": f"odoo.exceptions.{name}", "message": message, "debug": "Traceback canary"}
            told["error"] = {"code": 200, "message": "Odoo Server Error", "data": data}
        return Reply(body=told, headers={"Date": date})

    def _call(self, params: Record) -> Any:
        if params["method"] == "version":
            return {"server_version": "18.0"}
        database, who, key, *rest = params["args"]
        assert database == "odoo18"
        if params["method"] == "authenticate":
            return 6 if (who, key) == ("router", "canary-key-1") else False
        if key != "canary-key-1":
            raise Refused("AccessDenied: Access Denied")
        assert who == 6
        model, method, args, named = rest
        route = getattr(self, f"_{model.replace('.', '_')}")
        if method in _WRITES:
            return route(method, [*args, *([named] if named else [])])
        if method == "has_group":
            return True
        if method == "fields_get":
            return {name: {"type": "char"} for name in self._lead(LeadRow("1"))}
        rows = [row for row in route("all", []) if all(self._holds(row, *each) for each in args[0])]
        if named.get("context", {}).get("active_test") is not False:
            rows = [row for row in rows if row.get("active", True)]
        if named.get("order"):
            assert named["order"] == "id asc"
            rows.sort(key=lambda row: row["id"])
        rows = rows[: named.get("limit") or None]
        if method == "search":
            return [row["id"] for row in rows]
        return [{k: row[k] for k in ("id", *named["fields"])} for row in rows]

    @staticmethod
    def _holds(row: Record, field: str, operator: str, value: Any) -> bool:
        found = row[field]
        found = found[0] if field in ("user_id", "partner_id") and found else found
        if operator == "in":
            return bool(set(found) & set(value)) if isinstance(found, list) else found in value
        if operator == "ilike":
            return value.lower() in found.lower()
        return bool({"=": found == value, ">": found > value, ">=": found >= value, "<": found < value}[operator])

    def _lead(self, row: LeadRow) -> Record:
        made = row.created.strftime("%Y-%m-%d %H:%M:%S")
        return {
            "id": int(row.ref),
            "name": "canary-person",
            "email_from": "Canary <canary@example.com>",
            "user_id": [int(row.owner), "canary-person"] if row.owner else False,
            "create_date": made,
            "write_date": (row.changed or row.created).strftime("%Y-%m-%d %H:%M:%S"),
            "active": True,
            "probability": 10.0,
            "message_partner_ids": [_PARTNERS + int(ref) for ref in (*row.collaborators, row.owner) if ref],
        }

    def _crm_lead(self, method: str, args: list[Any]) -> Any:
        if method == "all":
            return [self._lead(row) for row in self.leads.values()]
        if method == "create":
            (values,) = args
            assert (values["user_id"], values["type"]) == (False, "lead")
            self.add_leads(LeadRow(ref := self.new_ref()))
            return int(ref)
        (number,), *values = args
        if str(number) not in self.leads:
            raise Refused(f"MissingError: Record does not exist.\n(Record: crm.lead({number},), User: 6)")
        row = self.leads[str(number)]
        if method == "unlink":
            del self.leads[row.ref]
            return True
        (values,) = values
        if method == "message_subscribe":
            (partner,) = values["partner_ids"]
            row.collaborators += [str(partner - _PARTNERS)] if str(partner - _PARTNERS) not in row.collaborators else []
        elif method == "message_post":
            assert (values["body_is_html"], values["subtype_xmlid"]) == (True, "mail.mt_note")
            subject, _, text = values["body"].removeprefix("<strong>").partition("</strong><br>")
            row.notes.append((html.unescape(subject), html.unescape(text.replace("<br>", "\n"))))
        else:
            assert set(values) == {"user_id"}
            row.owner = str(values["user_id"])
        return True

    def _mail_message(self, _: str, __: list[Any]) -> Any:
        return [
            {"id": n, "model": "crm.lead", "res_id": int(row.ref), "body": f"<p>{text}</p>"}
            for row in self.leads.values()
            for n, (_, text) in enumerate(row.notes, 1)
        ]

    def _crm_team(self, _: str, __: list[Any]) -> Any:
        return [
            {"id": int(ref), "name": name, "member_ids": [int(member) for member in members]}
            for ref, (name, members) in self.teams.items()
        ]

    def _user(self, row: AgentRow) -> Record:
        return {
            "id": int(row.ref),
            "login": f"{row.ref}@example.com",
            "name": f"Agent {row.ref}",
            "email": f"{row.ref}@example.com",
            "active": row.active,
            "partner_id": [_PARTNERS + int(row.ref), f"Agent {row.ref}"],
            "tz": "America/Denver",
            "share": False,
        }

    def _res_users(self, _: str, __: list[Any]) -> Any:
        router = {**self._user(AgentRow("6")), "share": True}  # else it would be one more agent
        return [*(self._user(row) for row in self.agents.values()), *([] if "6" in self.agents else [router])]

    def _ir_model(self, _: str, __: list[Any]) -> Any:
        return [{"id": 401, "model": "crm.lead"}, {"id": 402, "model": "base.automation"}]

    def _ir_model_fields(self, _: str, __: list[Any]) -> Any:
        names = ("id", "user_id", "create_date", "write_date", "write_uid", "name")
        return [{"id": 3500 + n, "model": "crm.lead", "name": name} for n, name in enumerate(names)]

    def _ir_actions_server(self, _: str, __: list[Any]) -> Any:
        return [{"id": int(h.ref) + 5000, "state": "webhook", "webhook_url": h.url} for h in self.hooks]

    def _base_automation(self, method: str, args: list[Any]) -> Any:
        if method == "create":
            (rule,) = args
            assert (rule["trigger"], rule["filter_domain"]) == ("on_create_or_write", "[]")
            assert rule["trigger_field_ids"] == [[6, 0, [3501]]]
            ((_, _, action),) = rule["action_server_ids"]
            assert (action["state"], action["usage"]) == ("webhook", "base_automation")
            assert action["webhook_field_ids"] == [[6, 0, [3500, 3501, 3502, 3503, 3504]]]
            return int(self.add_hook("owner_changed", action["webhook_url"]).ref)
        if method == "unlink":
            before, gone = len(self.hooks), str(args[0][0])
            self.hooks = [h for h in self.hooks if h.ref != gone]
            if len(self.hooks) == before:
                raise Refused(f"MissingError: Record does not exist.\n(Record: base.automation({gone},), User: 6)")
            return True
        return [self._rule(h) for h in self.hooks]

    def _rule(self, row: HookRow) -> Record:
        return {
            "id": int(row.ref),
            "active": row.active,
            "trigger": "on_create_or_write" if row.topic == "owner_changed" else "on_write",
            "trigger_field_ids": [3501],
            "action_server_ids": [int(row.ref) + 5000],
        }


class TheKit(Kit):
    name = "odoo"
    secrets = (b"none", b"none")
    void_secrets = ()
    signature_headers = ()
    credentials = Credentials({"database": "odoo18", "login": "router"}, {"api_key": "canary-key-1"})
    ponds = False
    missing = None
    required: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {"created": (("_model",), ("_id",))}
    texts: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {}

    def sign(self, body: bytes, secret: bytes, at: datetime = NOW, headers: Mapping[str, str] = {}) -> dict[str, str]:
        return {**headers, "content-type": "application/json"}

    def writes(self, asked: Received) -> bool:
        return asked.json["params"]["args"][4:5] in [[word] for word in _WRITES]

    def about(self, fixture: Fixture, ref: str) -> bytes:
        made = "2026-04-06 08:20:00.123456"
        body = json.loads(fixture.body) | {"_id": int(ref), "id": int(ref), "create_date": made, "write_date": made}
        return json.dumps(body).encode()

    def retopic(self, body: Any, topic: str) -> Any:
        return {**body, "_model": topic}

    def batch(self, refs: Sequence[str | None]) -> Any:
        raise NotImplementedError("a delivery tells of one lead")

    def fake(self) -> Fake:
        return FakeOdoo()
