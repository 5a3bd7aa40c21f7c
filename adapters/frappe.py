"""Frappe CRM 1 on Frappe Framework 15 and 16.

Pages (https://docs.frappe.io/framework/user/en/...): api/rest, guides/integration/webhooks.

What no page tells was seen on a running CRM 1.25.1; the traffic is kept in ``tests/fixtures/frappe/captured``.

What shapes this module: an owner write may name the ``modified`` that was read, and is refused (417) when the lead was
changed since; 417 is also each refusal for good. Times are those of the site's zone, without a mark. Nobody is null on
a new lead, an empty text on a cleared one, and left out where a single lead is read. Agents are e-mail addresses; a
disabled one is accepted. Deliveries hold what their webhook asks for, without id or time, and are tried three times in
five seconds. Webhooks show no secret, so ours carry a mark of it in their names.

Not captured, but read: the notes of a lead (frappe/crm: crm/fcrm/doctype/fcrm_note).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import json
import secrets as random_secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import quote

from adapters import frappe_api as api
from adapters import payload, signing, upkeep
from adapters.base import (
    HOOK_TOPIC,
    Adapter,
    Capability,
    Credentials,
    Event,
    EventKind,
    Finding,
    OwnerWrite,
    Rejected,
    Subscribed,
    WebhookRequest,
)
from adapters.frappe_reading import agent_of, wall
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Client

# frappe/integrations/doctype/webhook/webhook.json: ``webhook_docevent``. Each save sends on_update as well.
_TOPICS: Mapping[str, EventKind] = MappingProxyType(
    {"after_insert": EventKind.LEAD_CREATED, "on_change": EventKind.LEAD_CHANGED}
)
_USERS, _NOTES = "/api/resource/User", "/api/resource/FCRM%20Note"
_USER = ("name", "email", "full_name", "enabled", "user_type", "time_zone")
_AGENTS = (("user_type", "=", "System User"), ("name", "not in", ("Administrator", "Guest")))
_HELD = (
    "Frappe lets only a System Manager take a lead from one agent for another. Give the connected user that role, then "
    "replay the write."
)
_BY_HAND = (
    "{topic}: only a user with the role System Manager may make webhooks. Give it to the connected user and install "
    "again, or as an administrator make one: Document Type CRM Lead, Doc Event {topic}, Condition not doc.lead_owner, "
    "Request URL {url}/{topic}, Data name, Webhook Secret as set by `turnlock tenant secret <tenant> webhook_secret`"
)
_NAMES = 50  # of leads in one address
# Of the hour that the end of summer repeats, the second pass reads as the first; what Frappe filtered stays in.
_REPEATED = timedelta(hours=1)

T = TypeVar("T")


class Frappe(Adapter):
    """See the module's text."""

    name = "frappe"
    capabilities = frozenset(
        {
            Capability.SIGNED_WEBHOOKS,
            Capability.TENANT_SECRET,
            Capability.BATCH_READ,
            Capability.WEBHOOK_API,
            Capability.CONDITIONAL_WRITE,
            Capability.NULL_OWNER,
            Capability.NOTES,
            Capability.COLLABORATORS,
            Capability.SWEEP,
            Capability.SWEEP_CHANGES,
            Capability.TEST_LEAD,
        }
    )
    default_base_url = None
    hook_secret = "webhook_secret"  # noqa: S105 - the name of a secret
    topics: ClassVar[Mapping[str, EventKind]] = _TOPICS
    max_batch = _NAMES

    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        """``X-Frappe-Webhook-Signature: base64(HMAC-SHA256 of the body)``."""
        keys = signing.keys(secrets)
        given = request.headers.get("x-frappe-webhook-signature", "")
        if not given:
            raise Rejected("no_signature")
        signing.prove(given, [base64.b64encode(hmac.digest(key, request.body, hashlib.sha256)) for key in keys])

    def parse(self, request: WebhookRequest) -> list[Event]:
        """One event. Its key joins it with one about the same lead that nobody has read yet."""
        topic = request.headers.get(HOOK_TOPIC, "")
        body = Fields(payload.read_json(request.body), strict=True)
        kind = _TOPICS.get(topic)
        if kind is None:
            return [Event(EventKind.UNKNOWN, f"unknown:{hashlib.sha256(request.body).hexdigest()}", key_is_final=False)]
        ref = body.ref("name")
        return [Event(kind, f"{topic}:{ref}", key_is_final=False, ref=ref)]

    def refine(self, status: int, data: Any) -> Outcome | None:
        """417 is a refusal, unless somebody changed the lead meanwhile."""
        return Outcome.CONFLICT if status == 417 and api.kind_of(data) == "TimestampMismatchError" else None

    def asks_to_wait(self, status: int, headers: Mapping[str, str], data: Any) -> float | None:
        """A 404 without Frappe's name for it comes from somewhere else, or from a bench that has no such site."""
        return upkeep.elsewhere(status, api.kind_of(data) is not None)

    def words(self, status: int, headers: Mapping[str, str], data: Any) -> str | None:
        """What is not this site at all, and an owner whom no lead of theirs may have."""
        return api.words(status, data)

    def headers(self, credentials: Credentials) -> Mapping[str, str]:
        """``Authorization: token <key>:<secret>``."""
        key, secret = credentials.secrets.get("api_key"), credentials.secrets.get("api_secret")
        return {"Authorization": f"token {key}:{secret}"} if key and secret else {}

    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        """The list, by names: unlike the reading of one lead it shows an owner that is null."""
        found: dict[str, Lead] = {}
        wanted = [payload.ref(ref) for ref in dict.fromkeys(refs)]
        for start in range(0, len(wanted), _NAMES):
            names = wanted[start : start + _NAMES]
            leads = api.some_leads(client, ("*",), [("name", "in", names)], "name asc")
            found |= {lead.ref: lead for lead in leads if lead.ref in names}
        return found

    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        """``PUT`` of ``lead_owner``, on condition that nothing of the lead has changed since it was read."""
        if lead.updated_at is None:
            now = self.fetch_leads(client, [lead.ref]).get(lead.ref)
            if now is None or now.updated_at is None:
                raise CrmError(Outcome.GONE, call=f"PUT {api.LEADS}")
            if now.owner_ref != lead.owner_ref:
                return OwnerWrite(conflict=True)
            lead = now
        body = {"lead_owner": agent_ref, "modified": wall(lead.updated_at or client.now(), client)}
        try:
            client.put(f"{api.LEADS}/{quote(payload.ref(lead.ref))}", json=body)
        except CrmError as error:
            if error.outcome is Outcome.CONFLICT:
                return OwnerWrite(conflict=True)
            told = error.data.get("exception") if isinstance(error.data, dict) else None
            if error.outcome is Outcome.FORBIDDEN and "DocShare" in str(told):  # said of this lead, not of the user
                raise CrmError(Outcome.REFUSED, status=error.status, call=f"PUT {api.LEADS}", text=_HELD) from None
            raise
        return OwnerWrite()

    def add_collaborator(self, client: Client, lead: Lead, agent_ref: str) -> None:
        """``assign_to.add``: one more in *Assigned To*, with a ToDo; who stands there already stays."""
        to = {"doctype": api.LEAD, "name": payload.ref(lead.ref), "assign_to": json.dumps([agent_ref])}
        client.post("/api/method/frappe.desk.form.assign_to.add", json=to)

    def find_note(self, client: Client, ref: str, marker: str) -> bool:
        """The newest notes of the lead; ten pages are looked at."""
        of_lead = (("reference_doctype", "=", api.LEAD), ("reference_docname", "=", payload.ref(ref)))
        query = api.query(("title", "content"), of_lead, "creation desc")
        found = api.listing(client, _NOTES, query, lambda n: f"{n.text('title')} {n.text('content')}", most=10)
        return any(marker in html.unescape(text) for page in found for text in page)

    def add_note(self, client: Client, ref: str, subject: str, body: str) -> None:
        """``POST`` of an ``FCRM Note``; its text is HTML."""
        text = html.escape(body).replace("\n", "<br>")
        of_lead = {"reference_doctype": api.LEAD, "reference_docname": payload.ref(ref)}
        client.post(_NOTES, json={"title": subject, "content": f"<p>{text}</p>", **of_lead})

    def add_test_lead(self, client: Client, name: str, email: str, definition: UnassignedDefinition) -> str:
        """``POST`` of a lead."""
        first, _, last = name.partition(" ")
        answer = client.post(api.LEADS, json={"first_name": first, "last_name": last, "email": email})
        with answer.reading(write=True):
            return Fields(answer.data, strict=False).object("data").ref("name")

    def remove_test_lead(self, client: Client, ref: str) -> None:
        """``DELETE``: refused once the lead had an owner, of whose notification and ToDo Frappe keeps track."""
        upkeep.unless_gone(lambda: client.delete(f"{api.LEADS}/{quote(payload.ref(ref))}"))

    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        """Users of the desk, disabled ones too."""
        return upkeep.each_once(api.listing(client, _USERS, api.query(_USER, _AGENTS, "name asc"), agent_of))

    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        """The list, by name."""
        query = api.query(_USER, [*_AGENTS, ("name", "=", ref)], "name asc")
        return next(upkeep.each_once(api.listing(client, _USERS, query, agent_of)), None)

    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Open leads created since."""
        return upkeep.unassigned(api.open_leads(client, "creation", since), definition, since=since - _REPEATED)

    def changed_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Open leads modified since, in the order of their creation: nothing leaves its place in that."""
        return upkeep.unassigned(
            api.open_leads(client, "modified", since), definition, since=since - _REPEATED, changed=True
        )

    def subscribe(self, client: Client, url: str) -> Subscribed:
        """One webhook per topic for leads without an owner; with a secret made up here where there is none."""
        secret = client.credentials.secrets.get(self.hook_secret) or random_secrets.token_hex(32)
        try:
            left = upkeep.reconcile(
                api.hooks(client, secret),
                url,
                _TOPICS,
                create=lambda topic: api.create_hook(client, url, topic, secret),
                enable=lambda hook: hook,  # never asked for: a disabled one is stale
                remove=lambda hook: api.remove_hook(client, hook),
            )
        except CrmError as error:
            if error.outcome is not Outcome.FORBIDDEN:
                raise
            return Subscribed(by_hand=tuple(_BY_HAND.format(topic=topic, url=url) for topic in _TOPICS))
        return Subscribed(left.hooks, left.by_hand, secret)

    def unsubscribe(self, client: Client, url: str) -> int:
        """Remove every webhook at `url`; none where the user may not see any: made by hand, it goes by hand."""
        standing = upkeep.if_visible(lambda: api.hooks(client, ""))
        return sum(api.remove_hook(client, hook) for hook in standing if hook.url == url)

    def check(self, client: Client, url: str | None) -> list[Finding]:
        """User, clock, the site's zone, leads, agents, and webhooks where the user may see them."""

        def user() -> Iterator[Finding]:
            answer = client.get("/api/method/frappe.auth.get_logged_user")
            with answer.reading():
                what = Fields(answer.data, strict=False).required_text("message")
            yield Finding("user", True, what)
            yield upkeep.clock(upkeep.http_date(answer.headers.get("Date")), client.now())

        def leads() -> Iterator[Finding]:
            newest = api.some_leads(client, ("name", "lead_owner", "modified"), [], "modified desc", 1)
            yield Finding("leads", True, "readable")
            yield api.zone_finding(client, newest)

        secret = client.credentials.secrets.get(self.hook_secret, "")
        return upkeep.probes(
            ("user", user),
            ("leads", leads),
            ("notes", lambda: upkeep.notes(lambda: self.find_note(client, "none", "[turnlock:]"))),
            ("agents", lambda: [upkeep.agents(sum(a.active for a in self.list_agents(client)))]),
            ("hooks", lambda: [upkeep.hooks_alive(api.hooks(client, secret), url, _TOPICS)]),
        )
