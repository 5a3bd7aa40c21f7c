"""Pipedrive, API v1 and v2 at once, webhooks v2.

Pages (https://pipedrive.readme.io/docs/...): guide-for-webhooks-v2, webhooks-v2-migration-guide,
core-api-concepts-rate-limiting, marketplace-oauth-authorization, pipedrive-api-v2-migration-guide; and
https://developers.pipedrive.com/docs/api/v1 with Leads, Notes, Users, Webhooks, LegacyTeams.

What shapes this module: a lead is one of the Leads Inbox, or by the tenant's choice a deal or a person. Nothing is
signed: a delivery shows the password of its hook, so it is only a reason to read. A lead always has an owner, so some
user stands for nobody. A lead has no address or phone: its person is read, too. There is no conditional write. Three
minutes of failures lose a delivery and three days delete the hook, so the sweep and a look at the hooks are needed.
"""

from __future__ import annotations

import base64
import html
import math
import secrets as random_secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from adapters import payload, signing, upkeep
from adapters import pipedrive_api as api
from adapters import pipedrive_reading as reading
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
    WebhookRequest,
)
from adapters.budget import Bucket, Left
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Client

_NOTES = "/api/v1/notes"
_ACTIVITIES = "/api/v2/activities"
_PERSONS = reading.THINGS["person"].path
_BURST = 2.0  # seconds of the rolling window of a token
_BLOCKED = 1800.0  # seconds; how long a block lasts is not documented, and each call during it may prolong it


class Pipedrive(Adapter):
    """See the module's text."""

    name = "pipedrive"
    capabilities = frozenset(
        {
            Capability.HOOK_PASSWORD,
            Capability.TENANT_SECRET,
            Capability.EVENT_ID,
            Capability.WEBHOOK_API,
            Capability.NULL_OWNER,  # a user who stands for nobody is read as none
            Capability.NOTES,
            Capability.SWEEP,
            Capability.SWEEP_CHANGES,
            Capability.TASKS,
            Capability.TEAMS,
            Capability.TEST_LEAD,
        }
    )
    default_base_url = None  # each company has its own
    hook_secret = "hook_password"  # noqa: S105 - the name of a secret
    topics: ClassVar[Mapping[str, EventKind]] = reading.KINDS
    oauth = api.OAUTH
    missing_is_final_after = 30.0
    buckets = api.BUCKETS

    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        """HTTP Basic with the hook's password. Compared encoded, so that there is one spelling of it."""
        keys = signing.keys(secrets)
        given = request.headers.get("authorization", "")
        if not given:
            raise Rejected("no_signature")
        signing.prove(given, [b"Basic " + base64.b64encode(f"{api.HOOK_USER}:".encode() + key) for key in keys])

    def parse(self, request: WebhookRequest) -> list[Event]:
        """One event, or two of a merge."""
        return reading.events_of(Fields(payload.read_json(request.body), strict=True))

    def refine(self, status: int, data: Any) -> Outcome | None:
        """410 is an endpoint that Pipedrive has ended, never a lead that is gone."""
        return Outcome.REFUSED if status == 410 else None

    def asks_to_wait(self, status: int, headers: Mapping[str, str], data: Any) -> float | None:
        """A day's budget that is used up comes back at midnight, whatever ``Retry-After`` says; a 403 that is a page
        is the block that follows on limits ignored.
        """
        if status == 429:
            return math.inf if reading.is_spent(headers) else _BURST
        return _BLOCKED if status == 403 and data is None else None

    def words(self, status: int, headers: Mapping[str, str], data: Any) -> str | None:
        """Of an unpaid account, a block, an address that cannot be reached, a scope that is missing."""
        return reading.words_for(status, headers, data)

    def left(self, headers: Mapping[str, str], charged: Sequence[Bucket]) -> Mapping[str, Left]:
        """Of the last two seconds, and of the day."""
        return {**super().left(headers, charged), **reading.left_of(headers)}

    def headers(self, credentials: Credentials) -> Mapping[str, str]:
        """An OAuth token where there is one, else the API token of one user."""
        if token := credentials.secrets.get("access_token"):
            return {"Authorization": f"Bearer {token}"}
        api_token = credentials.secrets.get("api_token")
        return {"x-api-token": api_token} if api_token else {}

    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        """``GET`` of each, and of the person behind it. What is archived, deleted or not visible is left out."""
        thing, nobody, said = api.thing(client), api.nobody(client), client.credentials.parameters
        rows: dict[str, Fields] = {}
        for ref in dict.fromkeys(refs):
            row = api.lead_row(client, ref)
            if row is not None and row.text("id") == ref and reading.is_there(row):
                rows[ref] = row
        people: dict[str, Fields | None] = {}
        found: dict[str, Lead] = {}
        for ref, row in rows.items():
            person: Fields | None = row if thing.entity == "person" else None
            with api.understood():
                behind = row.optional_ref("person_id")
            if person is None and behind is not None:
                if behind not in people:
                    people[behind] = api.one(client, f"{_PERSONS}/{behind}")
                person = people[behind]
            labels = api.labels(client, row) if thing.entity == "lead" else {}
            with api.understood():
                found[ref] = reading.lead_of(thing, row, person, said, nobody, labels)
        return found

    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        """``PATCH`` with ``owner_id`` alone. That its answer shows what is stored is nowhere said, so it is read."""
        if not (agent_ref.isascii() and agent_ref.isdigit()):
            raise CrmError(Outcome.REFUSED, call="PATCH owner_id")
        answer = client.patch(f"{api.thing(client).path}/{payload.ref(lead.ref)}", json={"owner_id": int(agent_ref)})
        with answer.reading(write=True):
            reading.data_of(answer.data)
        return OwnerWrite()

    def find_note(self, client: Client, ref: str, marker: str) -> bool:
        """Newest first; ten pages are looked at."""
        query = {api.thing(client).note_key: ref, "sort": "id DESC", "limit": api.PAGE}
        found = api.pages(client, _NOTES, query, lambda note: html.unescape(note.text("content") or ""), most=10)
        return any(marker in text for page in found for text in page)

    def add_note(self, client: Client, ref: str, subject: str, body: str) -> None:
        """``POST /notes``; its content is HTML, of which Pipedrive keeps what it knows to be harmless."""
        shown = f"<b>{html.escape(subject)}</b><br>" + html.escape(body).replace("\n", "<br>")
        thing = api.thing(client)
        client.post(_NOTES, json={"content": shown, thing.note_key: thing.note_ref(payload.ref(ref))})

    def find_task(self, client: Client, ref: str, marker: str) -> bool:
        """Newest first; two pages are looked at."""
        query = {api.thing(client).note_key: ref, "sort_by": "id", "sort_direction": "desc", "limit": api.PAGE}
        found = api.pages(client, _ACTIVITIES, query, lambda task: task.text("note") or "", most=2)
        return any(marker in text for page in found for text in page)

    def add_task(self, client: Client, ref: str, agent_ref: str, text: str, marker: str, due: datetime) -> None:
        """``POST /activities``: a call with the person behind it, due at a time of UTC."""
        thing, due = api.thing(client), due.astimezone(UTC)
        task: dict[str, Any] = {"subject": text, "type": "call", "owner_id": int(agent_ref), "note": marker}
        task |= {"due_date": f"{due:%Y-%m-%d}", "due_time": f"{due:%H:%M}", "done": False}
        if thing.entity != "person":
            task[thing.note_key] = thing.note_ref(payload.ref(ref))
        if person := api.behind(client, ref):
            task["participants"] = [{"person_id": int(person), "primary": True}]
        client.post(_ACTIVITIES, json=task)

    def add_test_lead(self, client: Client, name: str, email: str, definition: UnassignedDefinition) -> str:
        """A person, and a lead or deal of theirs, owned by whoever stands for nobody."""
        thing, owner = api.thing(client), int(min(api.nobody(client), key=int))
        person = {"name": name, "owner_id": owner, "emails": [{"value": email, "primary": True, "label": "work"}]}
        ref = api.made(client.post(_PERSONS, json=person))
        if thing.entity == "person":
            return ref
        try:
            return api.made(client.post(thing.path, json={"title": name, "person_id": int(ref), "owner_id": owner}))
        except CrmError:
            with suppress(CrmError):  # why there is no lead says more
                client.delete(f"{_PERSONS}/{ref}")
            raise

    def remove_test_lead(self, client: Client, ref: str) -> None:
        """Delete it and its person. Pipedrive keeps both for 30 days."""
        person = None if api.thing(client).entity == "person" else api.behind(client, ref)
        upkeep.unless_gone(lambda: client.delete(f"{api.thing(client).path}/{payload.ref(ref)}"))
        if person is not None:
            upkeep.unless_gone(lambda: client.delete(f"{_PERSONS}/{person}"))

    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        """All users, deactivated ones included, in one answer."""
        nobody = api.nobody(client)
        answer = client.get(api.USERS)
        with answer.reading():
            yield from upkeep.each_once([[reading.agent_of(row, nobody) for row in reading.rows_of(answer.data)]])

    def list_teams(self, client: Client) -> Iterator[Team]:
        """``GET /legacyTeams``: said to end some day, and nothing has come in its place."""
        active = {agent.ref for agent in self.list_agents(client) if agent.active}
        answer = client.get("/api/v1/legacyTeams")
        with answer.reading():
            yield from reading.teams_of(reading.rows_of(answer.data), active)

    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        """``GET /users/{id}``."""
        row = api.one(client, f"{api.USERS}/{payload.ref(ref)}")
        with api.understood():
            return None if row is None else reading.agent_of(row, api.nobody(client))

    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Leads younger than the parameter ``sweep_min_age`` (seconds, default 120) are left to the webhooks."""
        yield from api.listed(client, since, definition, by="add_time")

    def changed_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """The same lists, by the time of the last change."""
        yield from api.listed(client, since, definition, by="update_time")

    def subscribe(self, client: Client, url: str) -> Subscribed:
        """One hook per topic, with a password that is made up here where there is none. By hand without the right."""
        password = client.credentials.secrets.get(self.hook_secret) or random_secrets.token_urlsafe(32)
        thing = api.thing(client)
        try:
            left = upkeep.reconcile(
                api.hooks(client, password),
                url,
                self.topics,
                create=lambda topic: api.create_hook(client, url, topic, password),
                enable=lambda hook: api.renew_hook(client, hook, url, password),
                remove=lambda hook: api.remove_hook(client, hook),
            )
        except CrmError as error:
            if not upkeep.lacks_right(error):
                raise
            return Subscribed(by_hand=(reading.NO_ADMIN.format(entity=thing.entity, url=url, user=api.HOOK_USER),))
        return Subscribed(left.hooks, left.by_hand, password)

    def lost_hooks(self, client: Client, url: str) -> tuple[str, ...]:
        """Pipedrive deletes a hook after three days of failures."""
        password = client.credentials.secrets.get(self.hook_secret)
        return upkeep.lost_if_visible(lambda: api.hooks(client, password), url, self.topics)

    def account(self, client: Client) -> str | None:
        """The company's id, which every delivery names."""
        return api.company(client)

    def unsubscribe(self, client: Client, url: str) -> int:
        """Remove every hook at `url`."""
        return sum(api.remove_hook(client, hook) for hook in api.hooks(client, None) if hook.url == url)

    def check(self, client: Client, url: str | None) -> list[Finding]:
        """Account, rights, clock, leads, agents, hooks and what became of their last deliveries."""

        def account() -> Iterator[Finding]:
            answer = client.get(f"{api.USERS}/me")
            with answer.reading():
                me = reading.row_of(answer.data)
                yield Finding("account", True, f"{me.text('company_domain') or 'company'}, user {me.ref('id')}")
            fix = "" if reading.is_admin(me) else "connect an admin: webhooks tell only of what their user may see"
            yield Finding("rights", not fix, "not an admin's" if fix else "an admin's", fix)
            yield upkeep.clock(upkeep.http_date(answer.headers.get("Date")), client.now())

        def leads() -> Iterator[Finding]:
            # Persons have a scope of their own, and without the person no lead can be read.
            for kind in dict.fromkeys((api.thing(client), reading.THINGS["person"])):
                answer = client.get(kind.path, params={"limit": "1"})
                with answer.reading():
                    reading.rows_of(answer.data)
                yield Finding("leads", True, f"{kind.entity}s are readable")

        def people() -> Iterator[Finding]:
            found, named = list(self.list_agents(client)), client.credentials.parameters.get("nobody") or ""
            yield upkeep.agents(sum(agent.active for agent in found))
            strange = {*reading.refs_of(named)} - {agent.ref for agent in found}
            fix = f"no such user: {', '.join(sorted(strange))}; correct the parameter nobody" if strange else ""
            yield Finding("nobody", not fix, f"{', '.join(sorted(api.nobody(client)))}: their leads are nobody's", fix)

        def hooks() -> Iterator[Finding]:
            try:
                secret, rows = client.credentials.secrets.get(self.hook_secret), api.hook_rows(client)
            except CrmError as error:
                if not upkeep.lacks_right(error):
                    raise
                yield Finding("hooks", True, "not visible to this user; see Tools and apps, Webhooks, in Pipedrive")
                return
            yield upkeep.hooks_alive(api.hooks(client, secret, rows), url, self.topics)
            for row in rows:
                status = row.number("last_http_status")
                if row.text("subscription_url") == url and status is not None and not 200 <= status < 300:
                    fix = "see that Turnlock runs and is reachable; after a secret was changed, install again"
                    yield Finding("deliveries", False, f"Pipedrive last got {status} from Turnlock", fix)

        return [
            *upkeep.probe("account", account),
            *upkeep.probe("leads", leads),
            *upkeep.probe("agents", people),
            *upkeep.probe("hooks", hooks),
        ]
