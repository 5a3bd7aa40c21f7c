"""The Follow Up Boss face under ``/v1``: its v1 API as documented, answered out of the sandbox's state.

Source: https://docs.followupboss.com/reference (authentication, identification, rate-limiting, people, users, ponds,
notes, tasks, events, webhooks, error-responses). Errors read ``{"errorMessage": "..."}``.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from connector.sandbox import fub_hooks, fub_people
from connector.sandbox.deliver import Delivery, is_loopback
from connector.sandbox.exchange import Answer, ApiError, Request, Routes
from connector.sandbox.fub_people import page, pick, stamp
from connector.sandbox.limits import Windows
from connector.sandbox.state import Agent, Change, Hook, Lead, State

NEEDED = (
    "Authentication is required. Use Basic HTTP Authentication with API Key as username and blank password, "
    "or use Bearer token authentication."
)
HOOKS_PER_EVENT = 2
TASKS = ("Follow Up", "Call", "Text", "Email", "Appointment", "Showing", "Closing", "Open House", "Thank You")


class FollowUpBoss:
    """One request in, one answer out. The caller holds the state's transaction."""

    name = fub_hooks.FACE
    prefix = "/v1"

    def __init__(self, state: State, base: Callable[[], str]) -> None:
        self._state = state
        self._base = base
        self._windows = Windows()
        self._routes = Routes(
            ("GET", "/identity", self._identity),
            ("GET", "/people", self._people),
            ("GET", "/people/unclaimed", self._unclaimed),
            ("GET", r"/people/(\d{1,18})", self._person),
            ("PUT", r"/people/(\d{1,18})", self._change_person),
            ("POST", "/people", self._add_person),
            ("DELETE", r"/people/(\d{1,18})", self._delete_person),
            ("GET", "/users", self._users),
            ("GET", r"/users/(\d{1,18})", self._user),
            ("GET", "/ponds", self._ponds),
            ("GET", "/groups", self._groups),
            ("GET", "/teams", self._teams),
            ("GET", r"/ponds/(\d{1,18})", self._pond),
            ("GET", "/notes", self._notes),
            ("POST", "/notes", self._add_note),
            ("GET", "/tasks", self._tasks),
            ("POST", "/tasks", self._add_task),
            ("GET", "/events", self._events),
            ("GET", r"/events/(\d{1,18})", self._event),
            ("GET", "/webhooks", self._hooks),
            ("POST", "/webhooks", self._add_hook),
            ("GET", r"/webhooks/(\d{1,18})", self._hook),
            ("PUT", r"/webhooks/(\d{1,18})", self._change_hook),
            ("DELETE", r"/webhooks/(\d{1,18})", self._delete_hook),
            ("GET", r"/webhookEvents/([0-9A-Za-z-]{1,64})", self._hook_event),
        )

    def error(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> Answer:
        """An error in the vendor's form."""
        asks = {"WWW-Authenticate": 'Basic realm="Follow Up Boss API"'} if status == 401 else {}
        return Answer(status, {"errorMessage": text}, {**asks, **(headers or {})})

    def publish(self, changes: Sequence[Change]) -> list[Delivery]:
        """Deliveries that tell of `changes`."""
        return fub_hooks.deliveries(self._state, self._base(), changes)

    def answer(self, request: Request) -> Answer:
        """Serve one request."""
        headers: dict[str, str] = {}
        try:
            caller = self._caller(request)
            headers = {"FUB-Account-ID": str(self._state.account.id), "FUB-User-ID": str(caller.id)}
            headers |= self._limit(request)
            answer = self._routes.serve(request)
        except ApiError as error:
            answer = self.error(error.status, error.text, error.headers)
        answer.headers = {**headers, **answer.headers}
        return answer

    # -- who calls, how often -----------------------------------------------------------------------------
    def _caller(self, request: Request) -> Agent:
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() not in ("basic", "bearer") or not text:
            raise ApiError(401, NEEDED)
        try:
            name, colon, password = base64.b64decode(text, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            name = colon = password = ""
        number = self._state.keys.get(name)
        if scheme.lower() != "basic" or not colon or password or number is None:
            raise ApiError(401, "Access denied. Invalid API key or token.")
        return self._state.agents[number]

    def _system(self, request: Request) -> bool:
        key = request.headers.get("x-system-key", "")
        right = hmac.compare_digest(key.encode("utf-8", "replace"), self._state.account.system_key.encode())
        return right and bool(request.headers.get("x-system"))

    def _limit(self, request: Request) -> dict[str, str]:
        settings, path = self._state.settings, request.path
        if not settings.limits:
            return {}
        halves = 1 if self._system(request) else 2
        context, limit = "global", settings.limit_global // halves
        if path.startswith("/events"):
            context, limit = "events", settings.limit_events // halves
        elif path.startswith("/people/") and request.method == "PUT":
            context, limit = "people", settings.limit_people
        elif path.startswith("/notes") and request.method != "GET":
            context, limit = "notes", settings.limit_notes
        left, wait = self._windows.take(context, limit, settings.rate_window, time.monotonic())
        headers = {
            "X-RateLimit-Limit": str(limit),
            "X-RateLimit-Remaining": str(left),
            "X-RateLimit-Window": f"{settings.rate_window:g}",
            "X-RateLimit-Context": context,
        }
        if wait > 0:
            headers["Retry-After"] = str(math.ceil(wait))
            raise ApiError(429, "Too many requests. Wait and repeat.", headers)
        return headers

    def _visible(self, request: Request) -> Callable[[Lead], bool]:
        caller = self._caller(request)
        if caller.role == "Broker":
            return lambda lead: True
        return lambda lead: caller.id == lead.owner or caller.id in lead.collaborators

    def _lead(self, request: Request, number: int) -> Lead:
        lead = self._state.leads.get(number)
        if lead is None or not request.view.sees(lead, time.monotonic()) or not self._visible(request)(lead):
            raise ApiError(404, "The requested person was not found.")
        return lead

    # -- people -------------------------------------------------------------------------------------------
    def _identity(self, request: Request, match: re.Match[str]) -> Answer:
        account, caller = self._state.account, self._caller(request)
        owner = next(agent for agent in self._state.agents.values() if agent.is_owner)
        return Answer(
            200,
            {
                "account": {
                    "id": account.id,
                    "domain": account.domain,
                    "owner": {"name": owner.name, "email": owner.email},
                },
                "user": {
                    "id": caller.id,
                    "name": caller.name,
                    "email": caller.email,
                    "role": caller.role,
                    "isOwner": caller.is_owner,
                    "isAdmin": caller.role == "Broker",
                },
            },
        )

    def _listed(self, request: Request, leads: Sequence[Lead]) -> Answer:
        key, descending = fub_people.order(request)
        wanted = request.query.get("fields")
        return Answer(
            200,
            page(
                request,
                self._base(),
                "people",
                leads,
                key,
                lambda lead: pick(fub_people.person(self._state, lead, request.view), wanted, person=True),
                descending=descending,
            ),
        )

    def _people(self, request: Request, match: re.Match[str]) -> Answer:
        return self._listed(request, fub_people.matching(self._state, request, self._visible(request)))

    def _unclaimed(self, request: Request, match: re.Match[str]) -> Answer:
        now = time.monotonic()
        leads = [lead for lead in self._state.leads.values() if lead.unclaimed and request.view.sees(lead, now)]
        return self._listed(request, leads)

    def _person(self, request: Request, match: re.Match[str]) -> Answer:
        lead = self._lead(request, int(match[1]))
        row = fub_people.person(self._state, lead, request.view)
        return Answer(200, pick(row, request.query.get("fields"), person=True))

    def _change_person(self, request: Request, match: re.Match[str]) -> Answer:
        state, lead = self._state, self._lead(request, int(match[1]))
        fields, holder = fub_people.changes(state, lead, request)
        effect, target = request.view.lost_owner, holder.get("owner")
        if target is not None and not state.agents[target].active and state.settings.fub_inactive != "accept":
            if state.settings.fub_inactive == "refuse":
                raise ApiError(400, f"assignedUserId {target} is not active.")
            effect = effect or "empty"
        with state.transaction() as transaction:
            before = len(transaction.changes)
            if holder:
                state.write_owner(lead, target, effect, holder.get("pond"))
                request.owner_written = lead.id
            if fields:
                state.edit(lead, fields, "api")
            # One call is one peopleUpdated, also when it changes the owner and other fields.
            mine = transaction.changes[before:]
            if len(mine) > 1:
                merged = Change("updated", lead, mine[-1].tags_added, mine[-1].stage)
                transaction.changes[before:] = [merged]
        return Answer(200, fub_people.person(state, lead, request.view))

    def _add_person(self, request: Request, match: re.Match[str]) -> Answer:
        body = request.json(400)
        emails = body.get("emails", [])
        if not isinstance(emails, list) or not all(isinstance(e, dict) and e.get("value") for e in emails):
            raise ApiError(400, "emails must be a list of objects with a value.")
        name = " ".join(str(body[key]) for key in ("firstName", "lastName") if body.get(key))
        given = {"name": name or None, "emails": [email["value"] for email in emails], "phones": [], "tags": []}
        lead = self._state.create(given, "api")
        return Answer(201, fub_people.person(self._state, lead, request.view))

    def _delete_person(self, request: Request, match: re.Match[str]) -> Answer:
        self._state.delete(self._lead(request, int(match[1])))
        return Answer(200, {})

    # -- users, ponds, notes, tasks, events ----------------------------------------------------------------------
    def _user_json(self, agent: Agent) -> dict[str, Any]:
        first, _, last = agent.name.partition(" ")
        return {
            "id": agent.id,
            "created": stamp(agent.created),
            "updated": stamp(agent.updated),
            "name": agent.name,
            "firstName": first,
            "lastName": last,
            "email": agent.email,
            "role": agent.role,
            "status": agent.status,
            "timezone": agent.zone,
            "isOwner": agent.is_owner,
            "pauseLeadDistribution": agent.paused,
            "groups": [],
            "teamIds": [1],
            "teamLeaderOf": [],
        }

    def _rows(self, request: Request, collection: str, rows: Sequence[Mapping[str, Any]], by: str = "id") -> Answer:
        name = by.lstrip("-")
        body = page(
            request,
            self._base(),
            collection,
            rows,
            lambda row: (row[name], row["id"]),
            lambda row: pick(row, request.query.get("fields")),
            descending=by.startswith("-"),
        )
        return Answer(200, body)

    def _users(self, request: Request, match: re.Match[str]) -> Answer:
        query = request.query
        rows = [self._user_json(agent) for agent in self._state.agents.values()]
        if query.get("includeDeleted") != "true":
            rows = [row for row in rows if row["status"] != "Deleted"]
        rows = [row for row in rows if all(row[key] == query[key] for key in ("role", "name", "email") if key in query)]
        sort = query.get("sort", "-id")
        if sort.lstrip("-") not in ("id", "name", "created"):
            raise ApiError(400, "Users cannot be sorted by this.")
        return self._rows(request, "users", rows, sort)

    def _user(self, request: Request, match: re.Match[str]) -> Answer:
        agent = self._state.agents.get(int(match[1]))
        if agent is None:
            raise ApiError(404, "The requested user was not found.")
        return Answer(200, self._user_json(agent))

    def _pond_json(self, pond: Mapping[str, Any]) -> dict[str, Any]:
        members = [self._state.agents[number] for number in pond["agents"]]
        users = [{"id": agent.id, "name": agent.name} for agent in members]
        return {"id": pond["id"], "name": pond["name"], "users": users}

    def _ponds(self, request: Request, match: re.Match[str]) -> Answer:
        return self._rows(request, "ponds", [self._pond_json(pond) for pond in self._state.ponds.values()])

    def _pond(self, request: Request, match: re.Match[str]) -> Answer:
        pond = self._state.ponds.get(int(match[1]))
        if pond is None:
            raise ApiError(404, "The requested pond was not found.")
        return Answer(200, self._pond_json(pond))

    def _groups(self, request: Request, match: re.Match[str]) -> Answer:
        """The sandbox keeps one kind of named set of agents: its ponds stand for groups, too."""
        rows = [{**self._pond_json(pond), "distribution": "round-robin"} for pond in self._state.ponds.values()]
        return self._rows(request, "groups", rows)

    def _teams(self, request: Request, match: re.Match[str]) -> Answer:
        everybody = [agent.id for agent in self._state.agents.values()]
        return self._rows(request, "teams", [{"id": 1, "name": "Company", "userIds": everybody, "leaderIds": []}])

    def _note_json(self, lead: Lead, note: Mapping[str, Any]) -> dict[str, Any]:
        return {**note, "created": stamp(note["created"]), "personId": lead.id, "isHtml": False}

    def _asked_person(self, request: Request) -> Lead:
        text = request.query.get("personId", "")
        if not text.isdecimal():
            raise ApiError(400, "personId is required.")
        return self._lead(request, int(text))

    def _notes(self, request: Request, match: re.Match[str]) -> Answer:
        lead = self._asked_person(request)
        notes = self._state.notes.get(lead.id, [])
        return self._rows(request, "notes", [self._note_json(lead, note) for note in notes], "-id")

    def _add_note(self, request: Request, match: re.Match[str]) -> Answer:
        body = request.json(400)
        subject, text = body.get("subject", ""), body.get("body")
        if not isinstance(body.get("personId"), int) or not isinstance(text, str) or not isinstance(subject, str):
            raise ApiError(400, "A note needs personId and body.")
        lead = self._lead(request, body["personId"])
        return Answer(201, self._note_json(lead, self._state.add_note(lead, subject, text)))

    def _task_json(self, lead: Lead, task: Mapping[str, Any]) -> dict[str, Any]:
        shown = {"id": task["id"], "personId": lead.id, "assignedUserId": task["agent"], "name": task["text"]}
        return {**shown, "type": "Call", "dueDateTime": task["due"], "isCompleted": 0}

    def _tasks(self, request: Request, match: re.Match[str]) -> Answer:
        lead = self._asked_person(request)
        tasks = self._state.tasks.get(lead.id, [])
        return self._rows(request, "tasks", [self._task_json(lead, task) for task in tasks], "-id")

    def _add_task(self, request: Request, match: re.Match[str]) -> Answer:
        body = request.json(400)
        agent, name, due = body.get("assignedUserId"), body.get("name"), body.get("dueDateTime")
        if not isinstance(body.get("personId"), int) or not isinstance(name, str) or body.get("type") not in TASKS:
            raise ApiError(400, "A task needs personId, name and a type.")
        if agent not in self._state.agents or not isinstance(due, str):
            raise ApiError(400, "assignedUserId or dueDateTime is not valid.")
        lead = self._lead(request, body["personId"])
        return Answer(201, self._task_json(lead, self._state.add_task(lead, agent, name, "", due)))

    def _event_json(self, inquiry: Mapping[str, Any]) -> dict[str, Any]:
        shown = {key: value for key, value in inquiry.items() if key != "lead"}
        return {**shown, "created": stamp(inquiry["created"]), "personId": inquiry["lead"]}

    def _events(self, request: Request, match: re.Match[str]) -> Answer:
        lead = self._asked_person(request)
        rows = [self._event_json(item) for item in self._state.inquiries.values() if item["lead"] == lead.id]
        return self._rows(request, "events", rows, "-id")

    def _event(self, request: Request, match: re.Match[str]) -> Answer:
        inquiry = self._state.inquiries.get(int(match[1]))
        if inquiry is None:
            raise ApiError(404, "The requested event was not found.")
        self._lead(request, inquiry["lead"])
        return Answer(200, self._event_json(inquiry))

    # -- webhooks -----------------------------------------------------------------------------------------
    def _registered(self, request: Request, *, owner: bool = True) -> None:
        if not self._system(request):
            raise ApiError(403, "X-System and X-System-Key headers of a registered system are required.")
        if owner and not self._caller(request).is_owner:
            raise ApiError(403, "Only the account owner can manage webhooks.")

    def _hook_json(self, hook: Hook) -> dict[str, Any]:
        status = "Active" if hook.active else "Disabled"
        return {"id": hook.id, "status": status, "event": hook.topics[0], "url": hook.url}

    def _hook_fields(self, request: Request, hook: Hook | None) -> dict[str, Any]:
        """Checked event, url and status of a body; those of `hook` where the body has none."""
        body = request.json(400)
        event = body.get("event", hook.topics[0] if hook else None)
        url = body.get("url", hook.url if hook else None)
        status = body.get("status", "Active" if hook is None or hook.active else "Disabled")
        if event not in fub_hooks.TOPICS.values():
            raise ApiError(400, "event is not valid.")
        try:
            parts = urlsplit(url) if isinstance(url, str) else None
            fine = parts is not None and bool(parts.hostname) and (parts.scheme == "https" or is_loopback(parts))
        except ValueError:
            fine = False
        if not fine:
            raise ApiError(400, "url must be an https address.")  # http to this machine is the sandbox's own licence
        if status not in ("Active", "Disabled"):
            raise ApiError(400, "status must be Active or Disabled.")
        same = [item for item in self._state.hooks.values() if item.face == self.name and event in item.topics]
        if len([item for item in same if item is not hook]) >= HOOKS_PER_EVENT:
            raise ApiError(400, f"No more than {HOOKS_PER_EVENT} webhooks per event and system are allowed.")
        return {"event": event, "url": url, "active": status == "Active"}

    def _hooks(self, request: Request, match: re.Match[str]) -> Answer:
        self._registered(request)
        rows = [self._hook_json(hook) for hook in self._state.hooks.values() if hook.face == self.name]
        query = request.query
        rows = [row for row in rows if all(row[key] == query[key] for key in ("event", "status") if key in query)]
        return self._rows(request, "webhooks", rows)

    def _own_hook(self, request: Request, match: re.Match[str]) -> Hook:
        self._registered(request)
        hook = self._state.hooks.get(int(match[1]))
        if hook is None or hook.face != self.name:
            raise ApiError(404, "The requested webhook was not found.")
        return hook

    def _hook(self, request: Request, match: re.Match[str]) -> Answer:
        return Answer(200, self._hook_json(self._own_hook(request, match)))

    def _add_hook(self, request: Request, match: re.Match[str]) -> Answer:
        self._registered(request)
        fields = self._hook_fields(request, None)
        system = request.headers.get("x-system", "")
        hook = self._state.add_hook(self.name, fields["url"], (fields["event"],), system)
        hook.active = fields["active"]
        return Answer(201, self._hook_json(hook))

    def _change_hook(self, request: Request, match: re.Match[str]) -> Answer:
        hook = self._own_hook(request, match)
        fields = self._hook_fields(request, hook)
        hook.topics, hook.url, hook.active = (fields["event"],), fields["url"], fields["active"]
        return Answer(200, self._hook_json(hook))

    def _delete_hook(self, request: Request, match: re.Match[str]) -> Answer:
        del self._state.hooks[self._own_hook(request, match).id]
        return Answer(200, {})

    def _hook_event(self, request: Request, match: re.Match[str]) -> Answer:
        self._registered(request, owner=False)
        for delivery in reversed(self._state.deliveries.values()):
            if delivery.message_id == match[1] and delivery.event is not None:
                event = dict(delivery.event)
                return Answer(200, {"id": event.pop("eventId"), **event})
        raise ApiError(404, "The requested webhook event was not found.")
