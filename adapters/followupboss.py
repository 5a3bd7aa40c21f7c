"""Follow Up Boss, API v1.

Pages (https://docs.followupboss.com/reference/...): webhooks-guide, webhooks-post, identification, authentication,
people-get, people-id-put, events-get, notes-post, users-get, pagination, common-filters, rate-limiting, identity.

What shapes this module: deliveries hold ids only, so every event is read again; the signature covers the *base64
text* of the body and no time, with one key for the whole product (``system_key``); an owner write answers the whole
person; there is no conditional write. A limit answer (429) means "not processed"; owner writes are limited to 25 in
10 seconds per account.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from adapters import followupboss_api as api
from adapters import followupboss_reading as reading
from adapters import payload, signing
from adapters.base import (
    Adapter,
    Capability,
    Credentials,
    Event,
    EventKind,
    Finding,
    OwnerWrite,
    Rejected,
    Subscribed,
    Team,
    Unreadable,
    WebhookRequest,
)
from adapters.budget import Bucket
from adapters.payload import Fields
from adapters.upkeep import (
    agents,
    clock,
    each_once,
    hooks_alive,
    http_date,
    in_halves,
    lost_if_visible,
    probe,
    reconcile,
    unless_gone,
)
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Client

# peopleUpdated tells of stages and tags too, so their own events would only double the calls.
_TOPICS = ("peopleCreated", "peopleUpdated", "peopleDeleted", "eventsCreated")
_HEX = re.compile(r"[0-9a-f]{64}")


class FollowUpBoss(Adapter):
    """See the module's text."""

    name = "followupboss"
    capabilities = frozenset(
        {
            Capability.SIGNED_WEBHOOKS,
            Capability.EVENT_ID,
            Capability.BATCH_DELIVERY,
            Capability.BATCH_READ,
            Capability.WEBHOOK_API,
            Capability.WRITE_ANSWERS_OWNER,
            Capability.NULL_OWNER,
            Capability.NOTES,
            Capability.TASKS,
            Capability.AGENT_PAUSE,
            Capability.SWEEP,
            Capability.SWEEP_CHANGES,
            Capability.TEAMS,
            Capability.TEST_LEAD,
        }
    )
    default_base_url = "https://api.followupboss.com/v1"
    # https://docs.followupboss.com/reference/rate-limiting: each call falls into one context and eats no other's
    buckets = (
        Bucket("events", 20, 10.0, path="/events", alone=True),
        Bucket("people", 25, 10.0, frozenset({"PUT"}), "/people/", alone=True, owner=1),
        Bucket("notes", 10, 10.0, frozenset({"POST", "PUT", "DELETE"}), "/notes", alone=True, kept=0.0, note=1),
        Bucket("global", 250, 10.0, owner=2),
    )
    hook_secret = "system_key"  # noqa: S105 - the name of a secret
    topics: ClassVar[Mapping[str, EventKind]] = MappingProxyType({t: reading.KINDS[t] for t in _TOPICS})
    missing_is_final_after = 120.0  # a new person is not readable while lead flow runs
    max_batch = api.PAGE

    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        """``FUB-Signature``: lower-case hex HMAC-SHA256 of the base64 text of the body. No time is signed."""
        keys = signing.keys(secrets)
        given = request.headers.get("fub-signature", "").strip().lower()
        if not given:
            raise Rejected("no_signature")
        if not _HEX.fullmatch(given):
            raise Rejected("bad_signature")
        signed = base64.b64encode(request.body)
        wanted = [hmac.new(key, signed, hashlib.sha256).hexdigest().encode() for key in keys]
        signing.prove(given, wanted)

    def parse(self, request: WebhookRequest) -> list[Event]:
        """One event per id of ``resourceIds``; ``data`` and ``uri`` are never used."""
        body = payload.read_json(request.body)
        if not isinstance(body, list):
            return reading.events_of(body)
        digest = hashlib.sha256(request.body).hexdigest()
        events: list[Event] = []
        for position, element in enumerate(body):  # seen in a forum post: the object wrapped in a list
            try:
                events += reading.events_of(element)
            except Unreadable as error:
                events.append(Event(EventKind.UNREADABLE, f"{digest}:{position}", problem=error.reason))
        return events

    def words(self, status: int, headers: Mapping[str, str], data: Any) -> str | None:
        """By the status alone: what the body says is for people, and may change."""
        return reading.WORDS.get(status)

    def headers(self, credentials: Credentials) -> Mapping[str, str]:
        """An OAuth token where there is one, else the API key as the user name of HTTP Basic."""
        secrets, found = credentials.secrets, {"X-System": credentials.parameters.get("system") or "Turnlock"}
        if key := secrets.get("system_key"):
            found["X-System-Key"] = key
        if token := secrets.get("access_token"):
            found["Authorization"] = f"Bearer {token}"
        elif api_key := secrets.get("api_key"):
            found["Authorization"] = "Basic " + base64.b64encode(f"{api_key}:".encode()).decode()
        return found

    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        """Read people by id, 100 per call.

        A person is an unclaimed offer exactly when the list shows them with ``includeUnclaimed`` and not without.
        So only those missing from the plain list are asked for again, and those found then are looked up plainly
        once more: one who merely became readable in between is no offer. People in the trash are not asked for
        (``includeTrash``): nobody is to receive them.
        """
        people: dict[str, Lead] = {}
        refs = list(dict.fromkeys(r for r in refs if r.isascii() and r.isdigit()))
        for start in range(0, len(refs), api.PAGE):
            batch = refs[start : start + api.PAGE]
            shown = _people(client, batch)
            hidden = _people(client, [r for r in batch if r not in shown], includeUnclaimed="true")
            offers = {r: replace(lead, unclaimed=True) for r, lead in hidden.items()}
            people |= shown | offers | _people(client, list(offers))
        return people

    def resolve(self, client: Client, ref: str) -> str | None:
        """The person behind an inquiry (``GET /events/:id``; its limit is 20 calls in 10 seconds)."""
        answer = unless_gone(lambda: client.get(f"/events/{payload.ref(ref)}"))
        if answer is None:
            return None
        with answer.reading():
            return Fields(answer.data, strict=False).optional_ref("personId")

    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        """``PUT /people/:id`` with ``assignedUserId`` alone: lists that are sent along would be replaced."""
        answer = client.put(f"/people/{payload.ref(lead.ref)}", json={"assignedUserId": int(agent_ref)})
        with answer.reading(write=True):
            person = Fields(answer.data, strict=False)
            if person.ref("id") != lead.ref or not person.has("assignedUserId"):
                raise Unreadable("wrong_type")  # not the person as stored, so nothing is proven
            return OwnerWrite(owner_ref=person.optional_ref("assignedUserId"))

    def find_note(self, client: Client, ref: str, marker: str) -> bool:
        """Lists come newest first, so a note of ours is on the first page as a rule; ten pages are looked at."""

        def text_of(note: Fields) -> str:
            return f"{note.text('subject')} {note.text('body')}"

        found = api.pages(client, "/notes", {"personId": ref}, text_of, most=10)
        return any(marker in text for page in found for text in page)

    def add_note(self, client: Client, ref: str, subject: str, body: str) -> None:
        """``POST /notes``, plain text; limited to 10 writes in 10 seconds."""
        client.post("/notes", json={"personId": int(ref), "subject": subject, "body": body, "isHtml": False})

    def find_task(self, client: Client, ref: str, marker: str) -> bool:
        """As notes: the newest come first."""
        found = api.pages(client, "/tasks", {"personId": ref}, lambda task: task.text("name") or "", most=10)
        return any(marker in name for page in found for name in page)

    def add_task(self, client: Client, ref: str, agent_ref: str, text: str, marker: str, due: datetime) -> None:
        """``POST /tasks``, a call to be made. Its name is all the text it has, so the marker stands there."""
        task = {"personId": int(ref), "assignedUserId": int(agent_ref), "name": f"{text} {marker}", "type": "Call"}
        until = due.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        client.post("/tasks", json=task | {"dueDateTime": until, "remindSecondsBefore": 0})

    def add_test_lead(self, client: Client, name: str, email: str, definition: UnassignedDefinition) -> str:
        """``POST /people``: makes a person and starts neither lead flow nor automations."""
        first, _, last = name.partition(" ")
        made = {"firstName": first, "lastName": last, "emails": [{"value": email, "type": "home"}]}
        answer = client.post("/people", json=made)
        with answer.reading(write=True):
            return reading.whole(Fields(answer.data, strict=False).ref("id"))

    def remove_test_lead(self, client: Client, ref: str) -> None:
        """``DELETE /people/:id``."""
        unless_gone(lambda: client.delete(f"/people/{payload.ref(ref)}"))

    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        """All users, deleted ones included."""
        return each_once(api.pages(client, "/users", {"includeDeleted": "true"}, reading.agent_of))

    def list_teams(self, client: Client) -> Iterator[Team]:
        """Groups, which lead flow deals to, then teams. Team 1 is the whole company: no queue of its own. One in which
        no active agent stands (a group of lenders, say) is left out.
        """
        active = {agent.ref for agent in self.list_agents(client) if agent.active}

        def group(row: Fields) -> Team:
            return reading.team_of(row, row.ref("id"), (user.ref("id") for user in row.objects("users")), active)

        def team(row: Fields) -> Team:
            return reading.team_of(row, f"team-{row.ref('id')}", map(payload.ref, row.items("userIds")), active)

        for path, read in (("/groups", group), ("/teams", team)):
            for page in api.pages(client, path, {}, read):
                yield from (found for found in page if found.agent_refs and found.ref != "team-1")

    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        """``GET /users/:id``."""
        answer = unless_gone(lambda: client.get(f"/users/{payload.ref(ref)}"))
        if answer is None:
            return None
        with answer.reading():
            return reading.agent_of(Fields(answer.data, strict=False))

    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Newest first, filtered here: no server filter for "nobody" is documented.

        Rows younger than the parameter ``sweep_min_age`` (seconds, default 120) are left to the next sweep.
        """
        return api.sweep(client, "created", since, definition)

    def changed_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """In the same way by the time of the last change: one call as a rule, for the last changed come first."""
        return api.sweep(client, "updated", since, definition)

    def subscribe(self, client: Client, url: str) -> Subscribed:
        """One hook per topic, https only. At most two per event and system may stand on an account."""
        if urlsplit(url).scheme != "https" and client.base_url.startswith("https:"):  # a sandbox on http takes http
            return Subscribed(by_hand=("TURNLOCK_PUBLIC_URL: Follow Up Boss calls https addresses only; set one",))
        return reconcile(
            api.hooks(client),
            url,
            _TOPICS,
            create=lambda topic: api.written(client.post("/webhooks", json={"event": topic, "url": url})),
            enable=lambda hook: api.written(client.put(f"/webhooks/{hook.hook_ref}", json={"status": "Active"})),
            remove=lambda hook: api.remove(client, hook),
        )

    def lost_hooks(self, client: Client, url: str) -> tuple[str, ...]:
        """Follow Up Boss disables a hook that failed more often than not for two days and did not recover."""
        return lost_if_visible(lambda: api.hooks(client), url, _TOPICS)

    def unsubscribe(self, client: Client, url: str) -> int:
        """Remove every hook at exactly `url`."""
        return sum(api.remove(client, hook) for hook in api.hooks(client) if hook.url == url)

    def check(self, client: Client, url: str | None) -> list[Finding]:
        """Account, clock, agents, and hooks, which only the account owner's key can read.

        ``/me`` is never called: it answers the caller's API key.
        """

        def account() -> Iterator[Finding]:
            answer = client.get("/identity")
            with answer.reading():
                who = Fields(answer.data, strict=False)
                about, user = who.object("account"), who.object("user")
                what = f"{about.text('domain') or 'account'} {about.ref('id')}"
            yield Finding("account", True, what)
            if user.flag("isOwner") is False:
                yield Finding("key", False, "not the account owner's", "connect with the API key of the owner")
            yield clock(http_date(answer.headers.get("Date")), client.now())

        return [
            *probe("account", account),
            *probe("agents", lambda: [agents(sum(a.active for a in self.list_agents(client)))]),
            *probe("hooks", lambda: [hooks_alive(api.hooks(client), url, _TOPICS)]),
        ]


def _people(client: Client, refs: Sequence[str], **options: str) -> dict[str, Lead]:
    def read(some: Sequence[str]) -> list[Lead]:
        params = {"id": ",".join(some), "fields": "allFields", "limit": str(api.PAGE), **options}
        answer = client.get("/people", params=params)
        with answer.reading():
            return [reading.lead_of(person) for person in api.rows(Fields(answer.data, strict=False))]

    return {lead.ref: lead for lead in in_halves(refs, read) if lead.ref in refs} if refs else {}
