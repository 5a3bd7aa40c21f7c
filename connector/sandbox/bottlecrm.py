"""The BottleCRM face under ``/bottlecrm``: what version 1.35.0 was seen to do, as far as a router of leads meets it.

Source: traffic captured from a running server (``tests/fixtures/bottlecrm/captured``). Leads are held by a list of
profiles, shown newest profile first whatever the order of writing; a write replaces the list, answers 200 without the
record and drops whoever is unknown or inactive. A delivery is signed with the secret as it is shown, tells of one lead,
and is sent again with the body that it had. Ids here are the sandbox's numbers, where BottleCRM has UUIDs.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid4, uuid5

from connector.sandbox.deliver import Delivery
from connector.sandbox.exchange import Answer, ApiError, Request, Routes, View
from connector.sandbox.state import Agent, Change, Hook, Lead, State

FACE = "bottlecrm"
TOPICS = {"created": "lead.created", "updated": "lead.updated", "deleted": "lead.deleted"}
RETRIES = (60, 300, 1800, 7200, 21600)  # seconds
DELETES_HOOK = (410,)  # it is switched off there
LOGIN = "Organization context is required. Please login again."
CREDENTIALS = "API tokens and organization API keys cannot read or manage other credentials. Sign in to manage them."
_OVER = ("closed", "converted")


def sign(secret: str, timestamp: int, body: bytes) -> str:
    """The value of ``X-BottleCRM-Signature``."""
    digest = hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={timestamp},v1={digest}"


def signed_headers(secret: str, topic: str, delivery: str, body: bytes) -> dict[str, str]:
    """Headers of an attempt made now."""
    return {
        "Content-Type": "application/json",
        "User-Agent": "BottleCRM-Webhooks",
        "X-BottleCRM-Event": topic,
        "X-BottleCRM-Delivery": delivery,
        "X-BottleCRM-Signature": sign(secret, int(time.time()), body),
    }


def event_body(topic: str, event_id: str, data: Mapping[str, Any]) -> bytes:
    """The bytes of a delivery. Keys stand in PostgreSQL's order (by length), because the body is kept as jsonb."""
    body = {
        "id": event_id,
        "data": {key: data[key] for key in sorted(data, key=lambda key: (len(key), key))},
        "event": topic,
        "org_id": str(uuid5(NAMESPACE_URL, "org")),
        "created_at": datetime.now(UTC).isoformat(),
    }
    return json.dumps(body, separators=(",", ":")).encode()


class BottleCrm:
    """One request in, one answer out. The caller holds the state's transaction."""

    name = FACE
    prefix = "/bottlecrm"

    def __init__(self, state: State, base: Callable[[], str]) -> None:
        self._state = state
        self._routes = Routes(
            ("GET", "/api/leads/", self._leads),
            ("GET", r"/api/leads/([^/]+)/", self._show),
            ("PATCH", r"/api/leads/([^/]+)/", self._change),
            ("GET", "/api/users/", self._users),
            ("GET", "/api/webhooks/", self._webhooks),
            ("POST", "/api/webhooks/", self._webhooks),
        )

    def error(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> Answer:
        """An error in this face's form."""
        return Answer(status, {"detail": text}, dict(headers or {}))

    def answer(self, request: Request) -> Answer:
        """Serve one request."""
        right = f"Bearer {self._state.account.api_token}".encode()
        if not hmac.compare_digest(request.headers.get("authorization", "").encode("utf-8", "replace"), right):
            return self.error(403, LOGIN)  # this CRM has no 401
        try:
            return self._routes.serve(request)
        except ApiError as error:
            return self.error(error.status, error.text, error.headers)

    def publish(self, changes: Sequence[Change]) -> list[Delivery]:
        """One delivery per lead and kind of change, as the leads are when the request ends; a new lead is only new."""
        told = {(change.lead.id, change.kind): change.lead for change in changes if change.kind in TOPICS}
        return [
            self._delivery(hook, TOPICS[kind], lead)
            for (number, kind), lead in told.items()
            if kind != "updated" or (number, "created") not in told
            for hook in self._state.hooks_for(FACE, TOPICS[kind])
        ]

    def _delivery(self, hook: Hook, topic: str, lead: Lead) -> Delivery:
        number, secret = str(uuid4()), self._state.account.webhook_secret
        return Delivery(
            id=self._state.number("delivery"),
            hook=hook,
            topic=topic,
            leads=[lead.id],
            message_id=number,
            body=event_body(topic, str(uuid4()), lead_data(lead)),
            # The body stays over retries, however old it gets; the time of the attempt is signed anew.
            sign=lambda raw: signed_headers(secret, topic, number, raw),
            retries=RETRIES,
            deletes_hook=DELETES_HOOK,
        )

    # -- leads --------------------------------------------------------------------------------------------
    def _lead(self, request: Request, text: str) -> Lead:
        lead = self._state.leads.get(int(text)) if re.fullmatch(r"[0-9]{1,18}", text) else None
        if lead is None or not request.view.sees(lead, time.monotonic()):
            raise ApiError(404, "No Lead matches the given query.")
        return lead

    def _show(self, request: Request, match: re.Match[str]) -> Answer:
        return Answer(200, {"lead_obj": self._lead_obj(self._lead(request, match[1]), request.view), "comments": []})

    def _lead_obj(self, lead: Lead, view: View) -> dict[str, Any]:
        holders = sorted({owner for owner in (view.holder(lead, time.monotonic())[0], *lead.collaborators) if owner})
        shown = lead_data(lead) | {
            "assigned_to": [_profile(self._state.agents[number]) for number in reversed(holders)],
            "address_line": lead.street,
            "city": lead.city,
            "state": lead.state,
            "postcode": lead.zip,
            "country": lead.country,
            "tags": [{"id": str(uuid5(NAMESPACE_URL, tag)), "name": tag} for tag in lead.tags],
            "custom_fields": dict(lead.custom),
            "created_at": _stamp(lead.created, "microseconds"),
            "updated_at": _stamp(lead.updated, "microseconds"),
        }
        del shown["stage_id"]
        return shown

    def _change(self, request: Request, match: re.Match[str]) -> Answer:
        state, lead = self._state, self._lead(request, match[1])
        body = request.json(400)
        asked = body.get("assigned_to") or []
        bad = [item for item in asked if not (isinstance(item, str) and re.fullmatch(r"[0-9]{1,18}", item))]
        if bad:
            return Answer(400, {"assigned_to": [f"'{bad[0]}' is not a valid id."]})
        known = [state.agents[int(item)] for item in asked if int(item) in state.agents]
        kept = sorted((agent.id for agent in known if agent.active), reverse=True)
        with state.transaction() as transaction:
            if "assigned_to" in body:
                effect = request.view.lost_owner or ("empty" if asked and not kept else None)
                state.write_owner(lead, kept[0] if kept else int(asked[0]) if asked else None, effect)
                if effect != "unchanged":
                    state.edit(lead, {"collaborators": [] if effect else kept[1:]}, "api")
                request.owner_written = lead.id
            if not any(change.lead is lead for change in transaction.changes):
                transaction.changes.append(Change("updated", lead))  # a write that changes nothing is told as well
        return Answer(200, {"error": False, "message": "Lead updated Successfully"})

    def _leads(self, request: Request, match: re.Match[str]) -> Answer:
        try:
            since = date.fromisoformat(request.query.get("created_at__gte", "0001-01-01"))
        except ValueError:
            return Answer(400, {"created_at__gte": ["Enter a valid date."]})
        rows = [
            self._lead_obj(lead, request.view)
            for lead in self._state.leads.values()
            if lead.created.date() >= since
            and (lead.stage or "").lower() not in _OVER
            and request.view.sees(lead, time.monotonic())
        ]
        return Answer(200, {"open_leads": _page(request, rows, "open_leads", "leads_count")})

    # -- profiles, webhooks -------------------------------------------------------------------------------
    def _users(self, request: Request, match: re.Match[str]) -> Answer:
        lists = {}
        for name, active in (("active_users", True), ("inactive_users", False)):
            rows = [_profile(agent) for agent in self._state.agents.values() if agent.active is active]
            lists[name] = _page(request, rows, name, f"{name}_count")
        return Answer(200, lists)

    def _webhooks(self, request: Request, match: re.Match[str]) -> Answer:
        raise ApiError(403, CREDENTIALS)


def lead_data(lead: Lead) -> dict[str, Any]:
    """The lead as a delivery shows it: no address, no tags, no custom fields."""
    first, _, last = (lead.name or "").partition(" ")
    holders = sorted({owner for owner in (lead.owner, *lead.collaborators) if owner}, reverse=True)
    return {
        "id": str(lead.id),
        "title": lead.name,
        "first_name": first or None,
        "last_name": last or None,
        "email": lead.emails[0] if lead.emails else None,
        "phone": lead.phones[0] if lead.phones else None,
        "company_name": None,
        "status": lead.stage,
        "source": lead.source,
        "stage_id": None,
        "opportunity_amount": None if lead.price is None else f"{lead.price}.00",
        "currency": None,
        "close_date": None,
        "assigned_to": [str(number) for number in holders],
        "created_at": _stamp(lead.created, "milliseconds"),
        "updated_at": _stamp(lead.updated, "milliseconds"),
    }


def _stamp(moment: datetime, to: str) -> str:
    return moment.astimezone(UTC).isoformat(timespec=to).replace("+00:00", "Z")


def _profile(agent: Agent) -> dict[str, Any]:
    user_id = str(uuid5(NAMESPACE_URL, f"user {agent.id}"))
    user = {"id": user_id, "email": agent.email, "name": agent.name, "is_active": True}
    role = "ADMIN" if agent.is_owner else "USER"
    return {"id": str(agent.id), "user_details": user, "role": role, "is_active": agent.active}


def _page(request: Request, rows: Sequence[dict[str, Any]], name: str, count: str) -> dict[str, Any]:
    """One page in the order of nothing that means anything: ids are random there."""
    numbers = [request.query.get("limit") or "10", request.query.get("offset") or "0"]
    limit, offset = (int(text) if text.isdecimal() and len(text) < 10 else 0 for text in numbers)
    ordered = sorted(rows, key=lambda row: hashlib.sha256(row["id"].encode()).digest())
    shown = ordered[offset : offset + limit]
    following = offset + len(shown) if offset + len(shown) < len(ordered) else None
    return {count: len(ordered), name: shown, "offset": following if shown else 0}
