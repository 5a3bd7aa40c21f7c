"""The generic face under ``/generic``: a plain JSON CRM, signed both ways by the Standard Webhooks scheme.

Source of the scheme: https://github.com/standard-webhooks/standard-webhooks (``webhook-id``, ``webhook-timestamp``,
``webhook-signature: v1,<base64 HMAC-SHA256 of "id.timestamp.body">``, secret ``whsec_<base64>``). API requests carry
the same headers, made with the API secret; a GET signs an empty body. Errors read ``{"error": "..."}``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from connector.sandbox.deliver import Delivery, is_loopback
from connector.sandbox.exchange import Answer, ApiError, Request, Routes, View
from connector.sandbox.limits import Windows
from connector.sandbox.state import Agent, Change, Hook, Lead, State

FACE = "generic"
TOPICS = {"created": "lead.created", "updated": "lead.updated", "deleted": "lead.deleted"}
TOLERANCE = 300  # seconds that a signed time may be away from now
# Seconds until each retry (5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 10 h: what a large sender of this scheme does).
RETRIES = (5, 300, 1800, 7200, 18000, 36000, 36000)
DELETES_HOOK = (410,)


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """One signature of the header's list."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.new(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


def signed_headers(secret: str, message_id: str, body: bytes) -> dict[str, str]:
    """Headers of a message signed now."""
    now = int(time.time())
    return {
        "Content-Type": "application/json",
        "User-Agent": "generic-crm",
        "webhook-id": message_id,
        "webhook-timestamp": str(now),
        "webhook-signature": sign(secret, message_id, now, body),
    }


ADDRESS = ("street", "city", "county", "state", "zip", "country", "latitude", "longitude")


def stamp(moment: datetime) -> str:
    """A time as this face writes it."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def lead_json(lead: Lead, view: View) -> dict[str, Any]:
    """The lead, as `view` shows it."""
    owner, pond = view.holder(lead, time.monotonic())
    return {
        "id": str(lead.id),
        "created_at": stamp(lead.created),
        "updated_at": stamp(lead.updated),
        "owner": None if owner is None else str(owner),
        "pond": None if pond is None else str(pond),
        "collaborators": [str(number) for number in lead.collaborators],
        "source": lead.source,
        "type": lead.type,
        "stage": lead.stage,
        "price": lead.price,
        "address": {name: getattr(lead, name) for name in ADDRESS},
        "form": lead.form,
        "campaign": lead.campaign,
        "language": lead.language,
        "tags": list(lead.tags),
        "emails": list(lead.emails),
        "phones": list(lead.phones),
        "custom": dict(lead.custom),
        "name": lead.name,
    }


class Generic:
    """One request in, one answer out. The caller holds the state's transaction."""

    name = FACE
    prefix = "/generic"

    def __init__(self, state: State, base: Callable[[], str]) -> None:
        self._state = state
        self._windows = Windows()
        self._routes = Routes(
            ("GET", "/account", self._account),
            ("GET", "/leads", self._leads),
            ("GET", r"/leads/([^/]+)", self._show),
            ("PUT", r"/leads/([^/]+)/owner", self._set_owner),
            ("POST", r"/leads/([^/]+)/collaborators", self._add_collaborator),
            ("GET", r"/leads/([^/]+)/notes", self._notes),
            ("POST", r"/leads/([^/]+)/notes", self._add_note),
            ("GET", "/agents", self._agents),
            ("GET", r"/agents/([^/]+)", self._agent),
            ("GET", "/hooks", self._hooks),
            ("POST", "/hooks", self._add_hook),
            ("DELETE", r"/hooks/([^/]+)", self._delete_hook),
        )

    def error(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> Answer:
        """An error in this face's form."""
        return Answer(status, {"error": text}, dict(headers or {}))

    def answer(self, request: Request) -> Answer:
        """Serve one request."""
        try:
            self._verify(request)
            self._limit()
            return self._routes.serve(request)
        except ApiError as error:
            return self.error(error.status, error.text, error.headers)

    def publish(self, changes: Sequence[Change]) -> list[Delivery]:
        """Deliveries that tell of `changes`: equal neighbours in one, cut at the batch size."""
        state, made = self._state, []
        for kind, group in groupby(changes, key=lambda change: change.kind):
            leads = list(dict.fromkeys(change.lead for change in group))
            for hook in state.hooks_for(FACE, TOPICS.get(kind, "")):
                for start in range(0, len(leads), state.settings.batch):
                    made.append(self._delivery(hook, TOPICS[kind], leads[start : start + state.settings.batch]))
        return made

    def _delivery(self, hook: Hook, topic: str, leads: list[Lead]) -> Delivery:
        state, shown = self._state, [lead_json(lead, View()) for lead in leads]
        data = shown[0] if len(shown) == 1 and state.settings.generic_single else {"leads": shown}
        event = {"type": topic, "timestamp": stamp(datetime.now(UTC)), "data": data}
        message_id = f"msg_{uuid4().hex}"
        return Delivery(
            id=state.number("delivery"),
            hook=hook,
            topic=topic,
            leads=[lead.id for lead in leads],
            message_id=message_id,
            body=json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode(),
            # The id stays over retries, the time of the attempt is signed anew.
            sign=lambda body: signed_headers(state.account.webhook_secret, message_id, body),
            retries=RETRIES,
            deletes_hook=DELETES_HOOK,
        )

    # -- who calls, how often -----------------------------------------------------------------------------
    def _verify(self, request: Request) -> None:
        names = ("webhook-id", "webhook-timestamp", "webhook-signature")
        message_id, timestamp, given = (request.headers.get(name, "") for name in names)
        if not message_id or not timestamp.isdecimal() or len(timestamp) > 12:
            raise ApiError(401, "webhook-id, webhook-timestamp and webhook-signature are required.")
        if abs(time.time() - int(timestamp)) > TOLERANCE:
            raise ApiError(401, "webhook-timestamp is too far from now.")
        right = sign(self._state.account.api_secret, message_id, int(timestamp), request.body).encode()
        if not any(hmac.compare_digest(part.encode("utf-8", "replace"), right) for part in given.split(" ")):
            raise ApiError(401, "webhook-signature is not valid.")

    def _limit(self) -> None:
        settings = self._state.settings
        if settings.limits:
            wait = self._windows.take("all", settings.limit_generic, settings.rate_window, time.monotonic())[1]
            if wait > 0:
                raise ApiError(429, "Too many requests.", {"Retry-After": str(math.ceil(wait))})

    def _lead(self, request: Request, text: str) -> Lead:
        lead = self._state.leads.get(_number(text))
        if lead is None or not request.view.sees(lead, time.monotonic()):
            raise ApiError(404, "There is no such lead.")
        return lead

    # -- leads --------------------------------------------------------------------------------------------
    def _account(self, request: Request, match: re.Match[str]) -> Answer:
        account = self._state.account
        return Answer(200, {"id": str(account.id), "name": account.name, "time": stamp(datetime.now(UTC))})

    def _leads(self, request: Request, match: re.Match[str]) -> Answer:
        state, query, view, now = self._state, request.query, request.view, time.monotonic()
        if "ids" in query:
            numbers = dict.fromkeys(_number(text) for text in query["ids"].split(","))
            found = [state.leads[number] for number in numbers if number in state.leads]
            return Answer(200, {"leads": [lead_json(lead, view) for lead in found if view.sees(lead, now)]})
        if query.get("unassigned", "true") != "true":
            raise ApiError(422, "unassigned must be true or absent.")
        try:
            since: datetime | None = datetime.fromisoformat(query.get("created_after", "1970-01-01T00:00:00Z"))
        except ValueError:
            since = None
        if since is None or since.tzinfo is None:
            raise ApiError(422, "created_after must be a time with its zone.")
        rows = [
            lead
            for lead in state.leads.values()
            if lead.created >= since
            and view.sees(lead, now)
            and ("unassigned" not in query or view.holder(lead, now)[0] is None)
        ]
        shown, further = self._paged(rows, query.get("cursor"))
        return Answer(200, {"leads": [lead_json(lead, view) for lead in shown], "next": further})

    def _show(self, request: Request, match: re.Match[str]) -> Answer:
        return Answer(200, {"lead": lead_json(self._lead(request, match[1]), request.view)})

    def _set_owner(self, request: Request, match: re.Match[str]) -> Answer:
        state, lead = self._state, self._lead(request, match[1])
        body = request.json(422)
        if "owner" not in body or not isinstance(body["owner"], str | None):
            raise ApiError(422, "owner must be an agent's id or null.")
        present = None if lead.owner is None else str(lead.owner)
        if "expected" in body and body["expected"] != present:
            raise ApiError(409, "The present owner is not the expected one.")
        target = None if body["owner"] is None else _number(body["owner"])
        agent, effect = state.agents.get(target or 0), request.view.lost_owner
        away = target is not None and (agent is None or not agent.active)
        if away and (agent is None or state.settings.generic_inactive != "accept"):
            if state.settings.generic_inactive == "refuse":
                raise ApiError(422, "owner is not an active agent.")
            effect = effect or "empty"
        state.write_owner(lead, target, effect)
        request.owner_written = lead.id
        return Answer(200, {"lead": lead_json(lead, request.view)})

    def _add_collaborator(self, request: Request, match: re.Match[str]) -> Answer:
        lead, body = self._lead(request, match[1]), request.json(422)
        agent = self._state.agents.get(_number(body.get("agent")))
        if agent is None or not agent.active:
            raise ApiError(422, "agent is not an active agent.")
        self._state.edit(lead, {"collaborators": list(dict.fromkeys([*lead.collaborators, agent.id]))}, "api")
        return Answer(200, {"lead": lead_json(lead, request.view)})

    def _notes(self, request: Request, match: re.Match[str]) -> Answer:
        notes = self._state.notes.get(self._lead(request, match[1]).id, [])
        return Answer(200, {"notes": [_note_json(note) for note in notes]})

    def _add_note(self, request: Request, match: re.Match[str]) -> Answer:
        lead, body = self._lead(request, match[1]), request.json(422)
        subject, text = body.get("subject"), body.get("body")
        if not isinstance(subject, str) or not isinstance(text, str):
            raise ApiError(422, "A note needs subject and body.")
        return Answer(201, _note_json(self._state.add_note(lead, subject, text)))

    # -- agents, hooks ------------------------------------------------------------------------------------
    def _agents(self, request: Request, match: re.Match[str]) -> Answer:
        shown, further = self._paged(list(self._state.agents.values()), request.query.get("cursor"))
        return Answer(200, {"agents": [_agent_json(agent) for agent in shown], "next": further})

    def _agent(self, request: Request, match: re.Match[str]) -> Answer:
        agent = self._state.agents.get(_number(match[1]))
        if agent is None:
            raise ApiError(404, "There is no such agent.")
        return Answer(200, {"agent": _agent_json(agent)})

    def _hooks(self, request: Request, match: re.Match[str]) -> Answer:
        return Answer(200, {"hooks": [_hook_json(hook) for hook in self._state.hooks.values() if hook.face == FACE]})

    def _add_hook(self, request: Request, match: re.Match[str]) -> Answer:
        body = request.json(422)
        url, topics = body.get("url"), body.get("topics")
        try:
            parts = urlsplit(url) if isinstance(url, str) else None
            fine = parts is not None and bool(parts.hostname) and (parts.scheme == "https" or is_loopback(parts))
        except ValueError:
            fine = False
        if not fine:
            raise ApiError(422, "url must be an https address.")  # http to this machine is the sandbox's own licence
        if not isinstance(topics, list) or not topics or not all(topic in TOPICS.values() for topic in topics):
            raise ApiError(422, f"topics must be a list of {', '.join(TOPICS.values())}.")
        return Answer(201, _hook_json(self._state.add_hook(FACE, str(url), tuple(dict.fromkeys(topics)))))

    def _delete_hook(self, request: Request, match: re.Match[str]) -> Answer:
        hook = self._state.hooks.get(_number(match[1]))
        if hook is None or hook.face != FACE:
            raise ApiError(404, "There is no such hook.")
        del self._state.hooks[hook.id]
        return Answer(200, {})

    def _paged(self, rows: Sequence[Any], cursor: str | None) -> tuple[list[Any], str | None]:
        """Rows after the cursor by ascending id, and the next cursor or None."""
        after = 0
        if cursor:
            try:
                after = _number(base64.urlsafe_b64decode(cursor).decode())
            except (binascii.Error, ValueError):
                after = -1
            if after < 0:
                raise ApiError(422, "cursor is not valid.")
        size = self._state.settings.generic_page
        rest = sorted((row for row in rows if row.id > after), key=lambda row: row.id)
        further = base64.urlsafe_b64encode(str(rest[size - 1].id).encode()).decode() if len(rest) > size else None
        return rest[:size], further


def _number(text: Any) -> int:
    """An id out of a request; one that nothing has for anything else."""
    return int(text) if isinstance(text, str) and re.fullmatch(r"[0-9]{1,18}", text) else -1


def _note_json(note: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": str(note["id"]), "subject": note["subject"], "body": note["body"]}


def _agent_json(agent: Agent) -> dict[str, Any]:
    shown = {"id": str(agent.id), "name": agent.name, "email": agent.email}
    return {**shown, "active": agent.active, "paused": agent.paused, "zone": agent.zone}


def _hook_json(hook: Hook) -> dict[str, Any]:
    return {"id": str(hook.id), "url": hook.url, "topics": list(hook.topics), "active": hook.active}
