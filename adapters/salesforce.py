"""Salesforce Sales Cloud: REST API (https://developer.salesforce.com/docs/platform/api-rest/guide/...: errorcodes,
headers-autoassign, intro-rest-conditional-requests, dome-discoveryresource, headers-api-usage) and outbound messages
(https://developer.salesforce.com/docs/platform/api/guide/sforce-api-om-outboundmessaging-wsdl.html).

What shapes this module: there is no webhook; a flow sends SOAP messages that nothing signs, of up to 100 leads, again
and again for a day until the answer is an ``Ack``. So the token in the address and the account's id prove a message,
and it is only a reason to read. A lead always has an owner: queues are ponds, users who stand for nobody are named. An
assignment rule of the account runs on each write unless a header says otherwise. Writes are conditional to the second.
Ids come in two forms, errors as lists, limits as 403, and a row that is locked for a moment as 400.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from adapters import payload, upkeep
from adapters import salesforce_api as api
from adapters import salesforce_reading as reading
from adapters.base import (
    Adapter,
    Capability,
    Credentials,
    Event,
    EventKind,
    Finding,
    OwnerWrite,
    Subscribed,
    Team,
    WebhookRequest,
)
from adapters.budget import Bucket, Left
from adapters.oauth import OAuth
from adapters.outcome import CrmError, Outcome
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Client

# Without the first the account's assignment rule would hand the lead to somebody else in the same write.
_WRITES = {"Sforce-Auto-Assign": "FALSE", "Sforce-Call-Options": "client=Turnlock"}
_USER = "SELECT Id, Name, Email, IsActive, TimeZoneSidKey FROM User WHERE UserType = 'Standard'"
_BY_HAND = (
    "Salesforce lets no token make its messages. As an administrator, in Setup: (1) Outbound Messages, New: object "
    "Lead, endpoint URL {url}, user to send as: the connected user, no session id, fields Id, OwnerId, CreatedDate, "
    "LastModifiedDate",
    "(2) Flows, New, record-triggered on Lead, when a record is created or updated, after the record is saved; entry "
    "condition: OwnerId equals the queue or user that holds unassigned leads, only when a record is updated to meet "
    "it; action: this outbound message. Activate the flow",
    "(3) Make a lead in that queue: `turnlock check` then tells of the first delivery",
)


class Salesforce(Adapter):
    """See the module's text."""

    name = "salesforce"
    capabilities = frozenset(
        {
            Capability.BATCH_DELIVERY,
            Capability.BATCH_READ,
            Capability.CONDITIONAL_WRITE,
            Capability.NOTES,
            Capability.SWEEP,
            Capability.SWEEP_CHANGES,
            Capability.TASKS,
            Capability.TEAMS,
            Capability.TEST_LEAD,
        }
    )
    default_base_url = None
    hook_secret = None
    topics: ClassVar[Mapping[str, EventKind]] = MappingProxyType(
        {"created": EventKind.LEAD_CREATED, "changed": EventKind.LEAD_CHANGED}
    )
    oauth = OAuth(
        authorize_url="https://login.salesforce.com/services/oauth2/authorize",
        token_url="https://login.salesforce.com/services/oauth2/token",  # noqa: S106 - an address
        revoke_url="https://login.salesforce.com/services/oauth2/revoke",
        revoke_proves=False,
        scopes=("api", "refresh_token"),
        pkce=True,
        account=lambda answer: reading.identity(answer, "id")[0],
        base_url=reading.api_host,
        replaces=frozenset({"access_token"}),
        own_host=True,
        client_credentials=True,
    )
    # All programs of the account share the calls of 24 hours; no other limit is told of.
    buckets = (Bucket("daily", 0, 86400.0, kept=0.1),)
    missing_is_final_after = 30.0  # a message is of a transaction that a reading may not see yet
    max_batch = 100

    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        """Nothing to look at: the token in the address guards the hook, and the account that each event names."""

    def parse(self, request: WebhookRequest) -> list[Event]:
        """The events of an outbound message, each with the account that sent it."""
        return reading.events_of(request.body)

    def acknowledgement(self) -> tuple[str, str]:
        """What ends the repeats: Salesforce takes any other 200 for a failure, too."""
        return reading.ACK, "text/xml; charset=utf-8"

    def refine(self, status: int, data: Any) -> Outcome | None:
        """By the error's code: 400 is for now or for good, about the lead, the agent or the connected user."""
        found = reading.meaning(status, data)
        return found[0] if found else None

    def words(self, status: int, headers: Mapping[str, str], data: Any) -> str | None:
        """By the error's code."""
        found = reading.meaning(status, data)
        return found[1] if found else None

    def asks_to_wait(self, status: int, headers: Mapping[str, str], data: Any) -> float | None:
        """403 also says that the account's calls are used up."""
        return reading.wait(data)

    def left(self, headers: Mapping[str, str], charged: Sequence[Bucket]) -> Mapping[str, Left]:
        """``Sforce-Limit-Info``."""
        return reading.left_of(headers)

    def canonical_ref(self, ref: str) -> str:
        """The form of 18 characters, of which an admin may have copied the first 15."""
        return reading.id18(ref)

    def headers(self, credentials: Credentials) -> Mapping[str, str]:
        """The token that the account granted."""
        token = credentials.secrets.get("access_token")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def account(self, client: Client) -> str | None:
        """The account's id (``00D...``), which each of its messages names."""
        return api.identity(client)[1]

    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        """By query, which leaves out the deleted; the converted are left out as well.

        When one of those is asked for that were merged into another lead, that lead comes along, with their ids as
        former ones; also where it was merged into a third by then.
        """
        found: dict[str, Lead] = {}
        refs = list(dict.fromkeys(reading.id18(ref) for ref in refs if reading.is_id(ref)))
        for start in range(0, len(refs), self.max_batch):
            wanted = refs[start : start + self.max_batch]
            found |= {lead.ref: lead for lead in api.leads(client, wanted) if lead.ref in wanted}
            found |= api.survivors(client, [ref for ref in wanted if ref not in found])
        return found

    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        """``PATCH`` of ``OwnerId``, on condition that the lead was not changed since it was read."""
        since = reading.unmodified_since(lead)
        if since is None:
            now = self.fetch_leads(client, [lead.ref]).get(reading.id18(lead.ref))
            since = reading.unmodified_since(now) if now is not None else None
            if now is None or since is None:
                raise CrmError(Outcome.GONE, call="PATCH Lead")
            if (now.owner_ref, now.pond_ref) != (lead.owner_ref, lead.pond_ref):
                return OwnerWrite(conflict=True)
        path = f"{api.base(client)}/sobjects/Lead/{payload.ref(lead.ref)}"
        try:
            client.patch(path, json={"OwnerId": agent_ref}, headers={**_WRITES, "If-Unmodified-Since": since})
        except CrmError as error:
            if error.outcome is not Outcome.CONFLICT:
                raise
            return OwnerWrite(conflict=True)
        return OwnerWrite()

    def find_note(self, client: Client, ref: str, marker: str) -> bool:
        """Among the newest tasks of the lead: a query can read descriptions, but not look for one.

        Each may have 32,000 characters, and of an answer a megabyte is read.
        """
        of = f"WHERE WhoId = {reading.quoted(ref)} ORDER BY CreatedDate DESC LIMIT 30"
        soql = f"SELECT Id, Description FROM Task {of}"  # noqa: S608 - quoted
        texts = api.pages(client, soql, lambda row: row.text("Description") or "")
        return any(marker in text for page in texts for text in page)

    def add_note(self, client: Client, ref: str, subject: str, body: str) -> None:
        """A task for the lead's owner, due today (UTC): in the lead's activities, and in the agent's own list."""
        soql = f"SELECT OwnerId, Owner.Type FROM Lead WHERE Id = {reading.quoted(ref)}"  # noqa: S608 - quoted
        owners = api.every(client, soql, lambda row: None if reading.is_queue(row) else row.optional_ref("OwnerId"))
        task = {"WhoId": ref, "Subject": subject[:255], "Description": body, "ActivityDate": f"{client.now():%Y-%m-%d}"}
        if owners and owners[0]:
            task["OwnerId"] = owners[0]
        client.post(f"{api.base(client)}/sobjects/Task", json=task)

    def find_task(self, client: Client, ref: str, marker: str) -> bool:
        """As notes, which are tasks as well."""
        return self.find_note(client, ref, marker)

    def add_task(self, client: Client, ref: str, agent_ref: str, text: str, marker: str, due: datetime) -> None:
        """A task of the agent's. It is due on a day (UTC); the reminder has the time."""
        due = due.astimezone(UTC)
        task = {"WhoId": ref, "OwnerId": agent_ref, "Subject": text[:255], "Description": marker}
        until = {
            "ActivityDate": f"{due:%Y-%m-%d}",
            "IsReminderSet": True,
            "ReminderDateTime": f"{due:%Y-%m-%dT%H:%M:%SZ}",
        }
        client.post(f"{api.base(client)}/sobjects/Task", json=task | until)

    def add_test_lead(self, client: Client, name: str, email: str, definition: UnassignedDefinition) -> str:
        """``POST .../sobjects/Lead``, owned by a queue or user that stands for nobody; no assignment rule runs."""
        return api.add_lead(client, name, email, definition, _WRITES)

    def remove_test_lead(self, client: Client, ref: str) -> None:
        """``DELETE``: into the recycle bin, with the task that says why."""
        api.remove_lead(client, ref)

    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        """Users with a full licence, inactive ones too."""
        return upkeep.each_once(api.pages(client, f"{_USER} ORDER BY Id", reading.agent_of))

    def list_teams(self, client: Client) -> Iterator[Team]:
        """Queues for leads and public groups."""
        return api.teams(client, frozenset(agent.ref for agent in self.list_agents(client) if agent.active))

    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        """By query, under the condition of the list."""
        if not reading.is_id(ref):
            return None
        return next(iter(api.every(client, f"{_USER} AND Id = {reading.quoted(ref)}", reading.agent_of)), None)

    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """By ``CreatedDate``, oldest first. The pages are of one moment: none is missed while leads are assigned."""
        return api.sweep(client, "CreatedDate", since, definition)

    def changed_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """By ``SystemModstamp``, Salesforce's own time of the last change: leads that came back to a queue."""
        return api.sweep(client, "SystemModstamp", since, definition)

    def subscribe(self, client: Client, url: str) -> Subscribed:
        """By hand: no call of the API makes what a flow needs."""
        return Subscribed(by_hand=tuple(step.format(url=url) for step in _BY_HAND))

    def unsubscribe(self, client: Client, url: str) -> int:
        """Nothing: an administrator deactivates the flow. What it still sends is acknowledged and ignored."""
        return 0

    def check(self, client: Client, url: str | None) -> list[Finding]:
        """Account and user, clock, leads and the right to hand one over, agents, queues."""
        user: list[str] = []

        def account() -> Iterator[Finding]:
            answer, of, who = api.identity(client)
            user.append(who)
            yield Finding("account", True, f"{of}, connected as {who}")
            yield upkeep.clock(upkeep.http_date(answer.headers.get("Date")), client.now())

        def leads() -> Iterator[Finding]:
            found, newest = api.readable(client)
            yield from found
            if user and newest is not None:
                yield api.may_transfer(client, user[0], newest)

        def queues() -> Iterator[Finding]:
            told = sorted(f"{name} {ref}" for ref, name in api.queues(client).items())
            yield Finding(
                "queues", True, f"{len(told)} for leads: {', '.join(told[:20])}" if told else "none for leads"
            )

        return [
            *upkeep.probe("account", account),
            *upkeep.probe("leads", leads),
            *upkeep.probe("agents", lambda: [upkeep.agents(sum(a.active for a in self.list_agents(client)))]),
            *upkeep.probe("queues", queues),
            Finding(
                "hooks", True, "cannot be read; Salesforce shows what it could not send in Setup, Outbound Messages"
            ),
        ]
