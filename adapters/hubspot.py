"""HubSpot, CRM API v3.

Pages (https://developers.hubspot.com/docs/...): api-reference/legacy/webhooks/guide,
apps/legacy-apps/authentication/validating-requests, api-reference/legacy/authentication/manage-oauth-tokens,
api-reference/error-handling, api-reference/latest/crm/using-object-apis, .../crm/search-the-crm,
.../crm/owners/guide, api-reference/legacy/crm/activities/notes/guide, .../tasks/guide,
developer-tooling/platform/usage-guidelines.

What shapes this module: a lead is a contact; deliveries are arrays of up to 100 elements that hold ids only; the
signature covers method, address, body and time; there is no conditional write and an owner write echoes only some
properties, so the owner is read back; search lags behind, so it only ever yields ids. A merge may give a *new* id.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from adapters import hubspot_app as app
from adapters import hubspot_reading as reading
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
from adapters.budget import Bucket, Left
from adapters.oauth import OAuth
from adapters.outcome import Outcome
from adapters.payload import Fields
from adapters.upkeep import agents, clock, http_date, probe, unless_gone
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Client

_WINDOW = 300  # seconds; the vendor's. Ours may be ahead or behind by as much
# https://developers.hubspot.com/docs/api-reference/error-handling: how long each limit takes to let calls through
_POLICIES: Mapping[str, float] = MappingProxyType({"SECONDLY": 1.0, "TEN_SECONDLY_ROLLING": 10.0, "DAILY": 3600.0})
_LOCKED = 2.0  # seconds, at least, before a record that is locked by bulk traffic is asked for again
_MOVING = 477  # the account moves to another data centre
_NOTE_TO_CONTACT, _TASK_TO_CONTACT = 202, 204


class HubSpot(Adapter):
    """See the module's text."""

    name = "hubspot"
    capabilities = frozenset(
        {
            Capability.SIGNED_WEBHOOKS,
            Capability.SIGNED_TIME,
            Capability.TENANT_SECRET,  # a private app's; and the address is signed, so nothing fits another hook
            Capability.EVENT_ID,
            Capability.BATCH_DELIVERY,
            Capability.BATCH_READ,
            Capability.NULL_OWNER,
            Capability.NOTES,
            Capability.TASKS,
            Capability.SWEEP,
            Capability.SWEEP_CHANGES,
            Capability.TEAMS,
            Capability.TEST_LEAD,
            Capability.APP_HOOKS,
            Capability.APP_HOOKS_API,
        }
    )
    default_base_url = "https://api.hubapi.com"
    hook_secret = "client_secret"  # noqa: S105 - the name of a secret
    topics: ClassVar[Mapping[str, EventKind]] = MappingProxyType({f"contact.{k}": v for k, v in reading.KINDS.items()})
    oauth = OAuth(
        authorize_url="https://app.hubspot.com/oauth/authorize",
        token_url="https://api.hubapi.com/oauth/v3/token",  # noqa: S106 - an address
        scopes=("oauth", "crm.objects.contacts.read", "crm.objects.contacts.write", "crm.objects.owners.read"),
        pkce=True,
        account=lambda answer: answer.optional_ref("hub_id"),
        replaces=frozenset({"access_token", "client_secret"}),
        revoke_url="https://api.hubapi.com/oauth/v3/token/revoke",
    )
    missing_is_final_after = 30.0
    buckets = reading.BUCKETS
    max_batch = reading.PAGE
    app_access: ClassVar[Mapping[str, bool]] = MappingProxyType({"app_id": False, "developer_key": True})

    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        """``X-HubSpot-Signature-v3``: base64 HMAC-SHA256 of method, address, body and the time's own text."""
        keys = signing.keys(secrets)
        given = request.headers.get("x-hubspot-signature-v3", "")
        signed_at = request.headers.get("x-hubspot-request-timestamp", "")
        if not given or not signed_at:
            raise Rejected("no_signature")
        if not re.fullmatch("[0-9]{1,15}", signed_at):
            raise Rejected("bad_signature")
        signed = reading.signed_text(request, signed_at)
        signing.prove(given, [base64.b64encode(hmac.digest(key, signed, hashlib.sha256)) for key in keys])
        signing.fresh(int(signed_at) / 1000, now, _WINDOW)

    def parse(self, request: WebhookRequest) -> list[Event]:
        """The events of an array of up to 100 elements, each with the account (portal) that it is about."""
        body = payload.read_json(request.body)
        if not isinstance(body, list):
            raise Unreadable("wrong_type")
        digest = hashlib.sha256(request.body).hexdigest()
        events: dict[str, Event] = {}
        for position, element in enumerate(body):
            try:
                found = reading.events_of(element)
            except Unreadable as error:
                account = reading.account_of(element)
                key = f"{digest}:{position}"
                found = [Event(EventKind.UNREADABLE, key, problem=error.reason, account=account)]
            for event in found:
                events.setdefault(event.key, event)
        return list(events.values())

    def refine(self, status: int, data: Any) -> Outcome | None:
        """477 says that the account is being moved: nothing is wrong, and nothing was done. 400 may mean the agent."""
        if reading.names_a_bad_owner(status, data):
            return Outcome.AGENT_REFUSED
        return Outcome.WAIT if status == _MOVING else None

    def asks_to_wait(self, status: int, headers: Mapping[str, str], data: Any) -> float | None:
        """By the name of the limit that was met; its text varies."""
        if status == 423:
            return _LOCKED
        policy = data.get("policyName") if status == 429 and isinstance(data, dict) else None
        return _POLICIES.get(policy) if isinstance(policy, str) else None

    def words(self, status: int, headers: Mapping[str, str], data: Any) -> str | None:
        """Of a scope that is missing, an owner who is none, a day's calls that are used up, an account that moves."""
        return reading.words_for(status, data)

    def buckets_of(self, credentials: Credentials) -> Sequence[Bucket]:
        """An app that is installed by OAuth has no daily limit of its own."""
        return self.buckets[1:] if credentials.parameters.get("auth") == "oauth" else self.buckets

    def left(self, headers: Mapping[str, str], charged: Sequence[Bucket]) -> Mapping[str, Left]:
        """``X-HubSpot-RateLimit-*``. Answers of searches carry none."""
        return reading.left_of(headers, charged)

    def headers(self, credentials: Credentials) -> Mapping[str, str]:
        """The token of a private app, or of an installed app by OAuth."""
        token = credentials.secrets.get("access_token")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        """``POST /crm/v3/objects/contacts/batch/read``, 100 per call; contacts that are gone are left out."""
        found: dict[str, Lead] = {}
        refs = list(dict.fromkeys(r for r in refs if reading.is_id(r)))
        said = client.credentials.parameters
        wanted = list(dict.fromkeys([*reading.PROPERTIES, *reading.further(said)]))
        for start in range(0, len(refs), reading.PAGE):
            batch = refs[start : start + reading.PAGE]
            for row in reading.batch(client, reading.LEADS, batch, wanted):
                lead = reading.lead_of(row, said)
                if lead.ref in batch:  # asked for by an id from before a merge, the contact may come under its new one
                    found[lead.ref] = lead
        return found

    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        """``PATCH /crm/v3/objects/contacts/{id}``. The answer shows only some properties, so the owner is read."""
        owner = {"properties": {"hubspot_owner_id": agent_ref}}
        client.patch(f"{reading.LEADS}/{payload.ref(lead.ref)}", json=owner)
        return OwnerWrite()

    def find_note(self, client: Client, ref: str, marker: str) -> bool:
        """By the contact's associations, which do not lag as search does; the newest 100 notes are looked at."""
        return reading.marked(client, ref, "notes", "hs_note_body", marker)

    def add_note(self, client: Client, ref: str, subject: str, body: str) -> None:
        """``POST /crm/v3/objects/notes``; its body is HTML."""
        note = {"hs_timestamp": reading.stamp(client.now()), "hs_note_body": payload.note_html(subject, body)}
        client.post("/crm/v3/objects/notes", json=reading.put_on(ref, _NOTE_TO_CONTACT, note))

    def find_task(self, client: Client, ref: str, marker: str) -> bool:
        """As notes."""
        return reading.marked(client, ref, "tasks", "hs_task_body", marker)

    def add_task(self, client: Client, ref: str, agent_ref: str, text: str, marker: str, due: datetime) -> None:
        """``POST /crm/v3/objects/tasks``: a call, of high priority; the marker is its body."""
        task = {
            "hs_timestamp": reading.stamp(due),
            "hs_task_subject": text,
            "hs_task_body": marker,
            "hs_task_status": "NOT_STARTED",
            "hs_task_priority": "HIGH",
            "hs_task_type": "CALL",
            "hubspot_owner_id": agent_ref,
        }
        client.post("/crm/v3/objects/tasks", json=reading.put_on(ref, _TASK_TO_CONTACT, task))

    def add_test_lead(self, client: Client, name: str, email: str, definition: UnassignedDefinition) -> str:
        """``POST /crm/v3/objects/contacts``."""
        first, _, last = name.partition(" ")
        made = {"firstname": first, "lastname": last, "email": email}
        answer = client.post(reading.LEADS, json={"properties": made})
        with answer.reading(write=True):
            return reading.record_id(Fields(answer.data, strict=False), "id")

    def remove_test_lead(self, client: Client, ref: str) -> None:
        """``DELETE``: into the recycle bin, from which HubSpot removes it after 90 days."""
        unless_gone(lambda: client.delete(f"{reading.LEADS}/{payload.ref(ref)}"))

    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        """Owners, and those archived: deactivated users, whose names are blank."""
        seen: set[str] = set()
        for archived in ("false", "true"):
            for row in reading.owners(client, archived):
                agent = reading.agent_of(row, archived == "true")
                if agent.ref not in seen:
                    seen.add(agent.ref)
                    yield agent

    def list_teams(self, client: Client) -> Iterator[Team]:
        """As the owners name them. The API of teams itself knows user ids only, which are no owners' ids."""
        yield from reading.teams_of(reading.owners(client, "false"))

    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        """``GET /crm/v3/owners/{id}``, which shows a deactivated owner only where one asks for the archived."""
        for archived in ("false", "true"):
            query = {"idProperty": "id", "archived": archived}
            answer = unless_gone(lambda q=query: client.get(f"{reading.OWNERS}/{payload.ref(ref)}", params=q))  # type: ignore[misc]
            if answer is not None:
                with answer.reading():
                    return reading.agent_of(Fields(answer.data, strict=False), archived == "true")
        return None

    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Contacts younger than the parameter ``sweep_min_age`` (seconds, default 120) are left to the next sweep."""
        return reading.sweep(client, "createdate", since, definition)

    def changed_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """In the same way by ``lastmodifieddate``, which also moves when HubSpot itself reckons a property anew."""
        return reading.sweep(client, "lastmodifieddate", since, definition)

    def subscribe(self, client: Client, url: str) -> Subscribed:
        """By hand: the webhooks of a private app can be set in HubSpot's pages only."""
        return Subscribed(
            by_hand=(
                "HubSpot lets no token make webhooks. Unless they stand already, open the private app's page "
                "(Settings, Integrations, Private Apps, the app, Webhooks) as a super admin, set the target URL to "
                f"{url} with 10 concurrent requests, and subscribe contacts to: created, deleted, deleted for "
                "privacy, merged, restored, and property changed for hubspot_owner_id, lifecyclestage, hs_lead_status",
            )
        )

    def subscribe_app(self, client: Client, url: str, *, replace: bool) -> Subscribed:
        """``/webhooks/v3/{app_id}``: settings and subscriptions."""
        return app.subscribe(client, url, replace=replace)

    def unsubscribe(self, client: Client, url: str) -> int:
        """Nothing: a super admin removes the private app in HubSpot."""
        return 0

    def check(self, client: Client, url: str | None) -> list[Finding]:
        """Account, clock, contacts, owners. Webhooks cannot be looked at with a token."""

        def account() -> Iterator[Finding]:
            answer = client.get("/account-info/v3/details")
            with answer.reading():
                yield Finding("account", True, f"portal {Fields(answer.data, strict=False).ref('portalId')}")
            yield clock(http_date(answer.headers.get("Date")), client.now())

        def contacts() -> Iterator[Finding]:
            answer = client.get(reading.LEADS, params={"limit": "1", "properties": "hubspot_owner_id"})
            with answer.reading():
                reading.results(Fields(answer.data, strict=False))
            yield Finding("contacts", True, "readable")

        return [
            *probe("account", account),
            *probe("contacts", contacts),
            *probe("scopes", lambda: reading.scopes(client, self.oauth.scopes)),
            *probe("agents", lambda: [agents(sum(a.active for a in self.list_agents(client)))]),
            Finding("hooks", True, "cannot be read with a token; HubSpot lists deliveries in the app's logs"),
        ]
