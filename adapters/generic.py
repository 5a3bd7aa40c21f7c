"""The generic face: what a server of your own offers so that Turnlock can work with any CRM.

Both directions are signed by Standard Webhooks (https://www.standardwebhooks.com, spec/standard-webhooks.md):
``webhook-id``, ``webhook-timestamp`` (seconds), ``webhook-signature`` (``v1,<base64>``, several separated by spaces)
over ``id.timestamp.body``. Deliveries use the secret ``webhook_secret``, our calls ``api_secret`` (over the body,
which is empty for GET and DELETE); both have the form ``whsec_<base64>``. Time may differ by 300 s.

Deliveries: ``{"type": "lead.created" | "lead.updated" | "lead.deleted", "timestamp": <ISO>, "data": <lead> |
{"leads": [<lead>, ...]}}``, each lead complete; of a deleted one its ``id`` is enough.

Lead: ``id, created_at, updated_at, owner, pond, collaborators [ids], source, type, stage, price, address {street, city,
county, state, zip, country, latitude, longitude}, form, campaign, language, tags [], emails [], phones [], custom {},
name``. Only ``id`` is required. Ids are texts of 1 to 128 letters, digits and ``_ . : @ + = ~ -``.

Calls: ``GET /leads?ids=a,b``, ``GET /leads?unassigned=true&created_after=<ISO>&cursor=`` (``{"leads", "next"}``),
``GET /leads/{id}``, ``PUT /leads/{id}/owner {"owner", "expected"}`` (200 ``{"lead"}`` as stored, 409 when the owner is
not the expected one), ``POST /leads/{id}/collaborators {"agent"}``, ``GET`` and ``POST /leads/{id}/notes {"subject",
"body"}``, ``GET /agents?cursor=`` (``id, name, email, active, paused, zone``), ``GET /agents/{id}``, ``GET /hooks``
(``{"hooks": [{"id", "url", "topics", "active"}]}``), ``POST /hooks {"url", "topics"}``, ``DELETE /hooks/{id}``,
``GET /account {"id", "name", "time"}``. Errors are ``{"error": "text"}``; 429 with ``Retry-After``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from uuid import uuid4

from standardwebhooks import Webhook

from adapters import payload, signing, upkeep
from adapters.base import (
    Adapter,
    Capability,
    Credentials,
    Event,
    EventKind,
    Finding,
    Hook,
    OwnerWrite,
    Rejected,
    Subscribed,
    Unreadable,
    WebhookRequest,
)
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from adapters.upkeep import agents, clock, each_once, hooks_alive, http_date, ours, pages, probe, unless_gone
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Answer, Client
    from adapters.upkeep import Next

_TOLERANCE = 300  # seconds, the specification's own libraries use it
_BATCH = 100
_FIRST = "/leads"
_LACKING = {
    Capability.APP_HOOKS,
    Capability.APP_HOOKS_API,
    Capability.HOOK_PASSWORD,
    Capability.SWEEP_CHANGES,
    Capability.TASKS,
    Capability.TEAMS,
    Capability.TEST_LEAD,
}

T = TypeVar("T")


class Generic(Adapter):
    """See the module's text."""

    name = "generic"
    # The face is defined here, so nothing is out of its reach that a server of one account can have.
    capabilities = frozenset(Capability) - _LACKING
    default_base_url = None
    hook_secret = "webhook_secret"  # noqa: S105 - the name of a secret
    topics: ClassVar[Mapping[str, EventKind]] = MappingProxyType(
        {
            "lead.created": EventKind.LEAD_CREATED,
            "lead.updated": EventKind.LEAD_CHANGED,
            "lead.deleted": EventKind.LEAD_DELETED,
        }
    )
    max_batch = _BATCH

    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        """Standard Webhooks, by hand: its library takes the time from the system and the body as text only."""
        keys = [key for key in map(_key, secrets) if key]
        if not keys:
            raise Rejected("bad_secret" if any(secrets) else "no_secret")
        event_id, at, given = (request.headers.get(f"webhook-{n}", "") for n in ("id", "timestamp", "signature"))
        if not event_id or not at or not given:
            raise Rejected("no_signature")
        if not re.fullmatch("[0-9]{1,12}", at):
            raise Rejected("bad_time")
        signed = f"{event_id}.{at}.".encode("utf-8", "replace") + request.body
        wanted = [b"v1," + base64.b64encode(hmac.digest(key, signed, "sha256")) for key in keys]
        signing.prove(given.split(" ")[:10], wanted)
        signing.fresh(int(at), now, _TOLERANCE)

    def parse(self, request: WebhookRequest) -> list[Event]:
        """Events with whole leads. The key is the delivery's id, the place in it, and the lead."""
        body = Fields(payload.read_json(request.body), strict=True)
        delivery = payload.clean(request.headers.get("webhook-id", ""))
        if not delivery:
            raise payload.missing("webhook-id")
        if len(delivery) > 200:
            delivery = hashlib.sha256(delivery.encode()).hexdigest()
        topic = body.required_text("type")
        if topic not in self.topics:
            return [Event(EventKind.UNKNOWN, delivery)]
        if not body.has("data"):
            raise payload.missing("data")
        occurred_at = Fields(body.data, strict=False).time("timestamp")
        data = body.object("data")
        if not data.has("leads"):
            return [_event(self.topics[topic], f"{delivery}:0", data.data, occurred_at)]
        events = []
        for position, element in enumerate(data.items("leads")):
            key = f"{delivery}:{position}"
            try:
                events.append(_event(self.topics[topic], key, element, occurred_at))
            except Unreadable as error:
                events.append(Event(EventKind.UNREADABLE, key, occurred_at=occurred_at, problem=error.reason))
        return events

    def headers(self, credentials: Credentials) -> Mapping[str, str]:
        """None that stand: every call is signed by itself."""
        return {}

    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        """``GET /leads?ids=``, 100 per call."""
        found: dict[str, Lead] = {}
        for start in range(0, len(refs), _BATCH):
            batch = refs[start : start + _BATCH]
            answer = _send(client, "GET", _FIRST, params={"ids": ",".join(batch)})
            with answer.reading():
                leads = [_lead(row) for row in Fields(answer.data, strict=False).objects("leads")]
            found |= {lead.ref: lead for lead in leads if lead.ref in batch}
        return found

    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        """``PUT /leads/{id}/owner``, on condition that the owner is still the one just read."""
        body = {"owner": agent_ref, "expected": lead.owner_ref}
        try:
            answer = _send(client, "PUT", f"/leads/{payload.ref(lead.ref)}/owner", body=body)
        except CrmError as error:
            if error.outcome is not Outcome.CONFLICT:
                raise
            return OwnerWrite(conflict=True)
        with answer.reading(write=True):
            stored = Fields(answer.data, strict=False).object("lead")
            if stored.ref("id") != lead.ref or not stored.has("owner"):
                raise Unreadable("wrong_type")  # not the lead as stored, so nothing is proven
            return OwnerWrite(owner_ref=stored.optional_ref("owner"))

    def add_collaborator(self, client: Client, lead: Lead, agent_ref: str) -> None:
        """``POST /leads/{id}/collaborators``; those already there stay."""
        _send(client, "POST", f"/leads/{payload.ref(lead.ref)}/collaborators", body={"agent": agent_ref})

    def find_note(self, client: Client, ref: str, marker: str) -> bool:
        """``GET /leads/{id}/notes``."""
        answer = _send(client, "GET", f"/leads/{payload.ref(ref)}/notes")
        with answer.reading():
            notes = Fields(answer.data, strict=False).objects("notes")
        return any(marker in f"{n.text('subject')} {n.text('body')}" for n in notes)

    def add_note(self, client: Client, ref: str, subject: str, body: str) -> None:
        """``POST /leads/{id}/notes``."""
        _send(client, "POST", f"/leads/{payload.ref(ref)}/notes", body={"subject": subject, "body": body})

    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        """``GET /agents`` to its end."""
        return each_once(_pages(client, "/agents", {}, "agents", _agent))

    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        """``GET /agents/{id}``."""
        answer = unless_gone(lambda: _send(client, "GET", f"/agents/{payload.ref(ref)}"))
        if answer is None:
            return None
        with answer.reading():
            found = Fields(answer.data, strict=False)
            return _agent(found.object("agent") if found.has("agent") else found)

    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """``GET /leads?unassigned=true``; with house users all leads are listed, since theirs have an owner."""
        query = {"created_after": since.astimezone(UTC).isoformat()}
        if not definition.user_refs:
            query["unassigned"] = "true"
        return upkeep.unassigned(_pages(client, _FIRST, query, "leads", _lead), definition, since=since)

    def subscribe(self, client: Client, url: str) -> Subscribed:
        """One hook for all topics."""
        kept: list[Hook] = []
        for hook_ref, hooks in _by_ref(ours(_hooks(client), url)).items():
            exact = {(h.topic, h.url, h.active) for h in hooks} == {(t, url, True) for t in self.topics}
            if exact and not kept:
                kept = hooks
            else:
                _remove(client, hook_ref)
        if not kept:
            answer = _send(client, "POST", "/hooks", body={"url": url, "topics": list(self.topics)})
            with answer.reading(write=True):
                kept = _hook(Fields(answer.data, strict=False))
        return Subscribed(tuple(kept))

    def unsubscribe(self, client: Client, url: str) -> int:
        """Remove every hook at exactly `url`."""
        return sum(_remove(client, ref) for ref in _by_ref(h for h in _hooks(client) if h.url == url))

    def check(self, client: Client, url: str | None) -> list[Finding]:
        """Account, clock, agents, hooks."""

        def account() -> Iterator[Finding]:
            answer = _send(client, "GET", "/account")
            with answer.reading():
                about = Fields(answer.data, strict=False)
                what = f"{about.text('name') or 'account'} {about.ref('id')}"
            yield Finding("account", True, what)
            yield clock(about.time("time") or http_date(answer.headers.get("Date")), client.now())

        return [
            *probe("account", account),
            *probe("agents", lambda: [agents(sum(a.active for a in self.list_agents(client)))]),
            *probe("hooks", lambda: [hooks_alive(_hooks(client), url, self.topics)]),
        ]


def _key(secret: bytes) -> bytes | None:
    """The bytes behind ``whsec_<base64>``, None when `secret` is not of that form or empty. Padding may lack."""
    text = secret.removeprefix(b"whsec_")
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True) or None
    except (binascii.Error, ValueError):
        return None


def _send(
    client: Client, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Any = None
) -> Answer:
    """One signed call. The signature covers the very bytes that are sent."""
    data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    secret, now = client.credentials.secrets.get("api_secret", ""), client.now().astimezone(UTC)
    if _key(secret.encode()) is None:
        text = "The secret api_secret is missing or not of the form whsec_<base64>. Enter it again."
        raise CrmError(Outcome.REAUTHORISE, call=f"{method} {path}", text=text)
    message = f"msg_{uuid4().hex}"
    headers = {
        "webhook-id": message,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(message, now, data.decode()),
        "content-type": "application/json",
    }
    return client.request(method, path, params=params, data=data or None, headers=headers)


def _event(kind: EventKind, key: str, element: Any, occurred_at: datetime | None) -> Event:
    fields = Fields(element, strict=True)
    ref = fields.ref("id")
    lead = None if kind is EventKind.LEAD_DELETED else _lead(fields)
    return Event(kind, f"{key}:{ref}", ref=ref, lead=lead, occurred_at=occurred_at)


def _lead(lead: Fields) -> Lead:
    address = lead.object("address")
    custom = lead.object("custom")
    return Lead(
        ref=lead.ref("id"),
        owner_ref=lead.optional_ref("owner"),
        pond_ref=lead.optional_ref("pond"),
        collaborator_refs=payload.unique(payload.ref(c) for c in lead.items("collaborators")),
        source=lead.text("source"),
        type=lead.text("type"),
        stage=lead.text("stage"),
        price=lead.number("price"),
        street=address.text("street"),
        city=address.text("city"),
        county=address.text("county"),
        state=address.text("state"),
        zip=address.text("zip"),
        country=address.text("country"),
        latitude=address.number("latitude"),
        longitude=address.number("longitude"),
        form=lead.text("form"),
        campaign=lead.text("campaign"),
        language=lead.text("language"),
        tags=lead.texts("tags"),
        emails=payload.emails(lead.texts("emails")),
        phones=payload.phones(lead.texts("phones")),
        custom=MappingProxyType(custom.scalars(custom.data)),
        created_at=lead.time("created_at"),
        updated_at=lead.time("updated_at"),
        name=lead.text("name"),
    )


def _agent(agent: Fields) -> AgentSeen:
    ref = agent.ref("id")
    return AgentSeen(
        ref=ref,
        name=agent.text("name") or ref,
        email=agent.text("email"),
        active=agent.flag("active") is True or not agent.has("active"),
        paused=bool(agent.flag("paused")),
        zone=agent.zone("zone"),
    )


def _hook(hook: Fields) -> list[Hook]:
    ref, url, active = hook.ref("id"), hook.text("url") or "", bool(hook.flag("active"))
    return [Hook(ref, topic, url, active) for topic in hook.texts("topics") or ("",)]


def _hooks(client: Client) -> list[Hook]:
    answer = _send(client, "GET", "/hooks")
    with answer.reading():
        return [h for row in Fields(answer.data, strict=False).objects("hooks") for h in _hook(row)]


def _remove(client: Client, hook_ref: str) -> bool:
    return unless_gone(lambda: _send(client, "DELETE", f"/hooks/{hook_ref}")) is not None


def _by_ref(hooks: Iterable[Hook]) -> dict[str, list[Hook]]:
    """A hook of several topics is several :class:`Hook` with one ref."""
    found: dict[str, list[Hook]] = {}
    for hook in hooks:
        found.setdefault(hook.hook_ref, []).append(hook)
    return found


def _pages(
    client: Client, path: str, query: Mapping[str, str], key: str, make: Callable[[Fields], T]
) -> Iterator[list[T]]:
    def read(data: Fields) -> tuple[list[T], Next | None]:
        cursor = data.text("next")
        return [make(row) for row in data.objects(key)], (path, {**query, "cursor": cursor}) if cursor else None

    return pages(lambda path, params: _send(client, "GET", path, params=params), (path, query), read)
