"""Queries of Salesforce's REST API (.../docs/platform/api-rest/guide/resources-query, .../soql-sosl): pages, leads,
queues and their users, and what a connection check looks at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from adapters import payload, upkeep
from adapters import salesforce_reading as reading
from adapters.base import Finding, Team
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from routing.model import Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Answer, Client
    from adapters.upkeep import Next

_VERSION = "66.0"  # Spring '26
# Rows of a page: the default of 2,000 would not fit into the megabyte that is read of an answer.
_PAGED = {"Sforce-Query-Options": "batchSize=500"}
_LAG = timedelta(seconds=120)  # for which a message may wait in Salesforce's queue
_MERGES = 5  # of leads into one another that are followed
_HIDDEN = "hidden fields"  # under which name a client remembers them
_GROUPS = "SELECT Id, Name FROM Group WHERE Type = 'Regular'"
_QUEUES = "SELECT QueueId, Queue.Name FROM QueueSobject WHERE SobjectType = 'Lead'"
_MEMBERS = "SELECT GroupId, UserOrGroupId FROM GroupMember WHERE Group.Type IN ('Queue', 'Regular')"

T = TypeVar("T")


def base(client: Client) -> str:
    """The path that all resources of the chosen version begin with."""
    said = client.credentials.parameters.get("api_version") or ""
    return f"/services/data/v{said if re.fullmatch('[0-9]{2,3}[.]0', said) else _VERSION}"


def ref_of(row: Fields, key: str) -> str:
    """A required id in its long form."""
    return reading.id18(row.ref(key))


def pages(client: Client, soql: str, make: Callable[[Fields], T], *, deleted: bool = False) -> Iterator[list[T]]:
    """The pages of a query's rows, all of one moment; with `deleted` also what lies in the recycle bin."""

    def get(path: str, params: Mapping[str, Any]) -> Answer:
        try:
            return client.get(path, params=params, headers=_PAGED)
        except CrmError as error:
            if error.outcome is not Outcome.GONE:
                raise
            outcome, text = reading.UNKNOWN_VERSION
            raise CrmError(outcome, status=error.status, text=text, call="GET query") from None

    def read(data: Fields) -> tuple[list[T], Next | None]:
        if not isinstance(data.data.get("records"), list):
            raise payload.missing("records")
        rows = [make(row) for row in data.objects("records")]
        return rows, None if data.flag("done") else (data.required_text("nextRecordsUrl"), {})

    return upkeep.pages(get, (f"{base(client)}/query{'All' if deleted else ''}", {"q": soql}), read)


def every(client: Client, soql: str, make: Callable[[Fields], T], *, deleted: bool = False) -> list[T]:
    """All rows of a query."""
    return [row for page in pages(client, soql, make, deleted=deleted) for row in page]


# -- leads -------------------------------------------------------------------------------------------------------------


def leads(client: Client, refs: Sequence[str], merged: Mapping[str, Sequence[str]] | None = None) -> list[Lead]:
    """The open leads with these ids; `merged` has the former ids of some.

    One field that does not exist, or that the connected user may not see, fails a whole query: Salesforce names it, it
    is left out from then on, and the query is repeated. A description of all fields beforehand may be of megabytes.
    """
    if not refs:
        return []
    said = client.credentials.parameters
    wanted = reading.optional_fields(said)

    def make(row: Fields) -> Lead | None:
        if row.flag("IsConverted") is True:
            return None
        ref = ref_of(row, "Id")
        return reading.lead_of(row, said, tuple((merged or {}).get(ref, ())))

    while True:
        columns = [*reading.NEEDED, *(name for name in wanted if name.lower() not in hidden(client))]
        soql = f"SELECT {', '.join(columns)} FROM Lead WHERE Id IN {reading.any_of(refs)}"  # noqa: S608 - quoted
        try:
            return [lead for lead in every(client, soql, make) if lead is not None]
        except CrmError as error:
            name = reading.unknown_column(error.data)
            if name is None:
                raise
            if name.lower() not in {column.lower() for column in columns[len(reading.NEEDED) :]}:
                outcome, text = reading.UNREADABLE_LEADS
                raise CrmError(outcome, status=error.status, text=text, call="GET query") from None
            client.learnt[_HIDDEN] = hidden(client) | {name.lower()}


def hidden(client: Client) -> frozenset[str]:
    """Fields of leads, in lower case, that this client has learnt it cannot read."""
    known: frozenset[str] = client.learnt.get(_HIDDEN, frozenset())
    return known


def merged(client: Client, refs: Sequence[str]) -> list[tuple[str, str]]:
    """Of leads that are not shown any more those that were merged, each with the lead that goes on."""
    if not refs:
        return []
    soql = f"SELECT Id, MasterRecordId FROM Lead WHERE IsDeleted = true AND Id IN {reading.any_of(refs)}"  # noqa: S608
    rows = every(client, soql, lambda row: (ref_of(row, "Id"), row.optional_ref("MasterRecordId")), deleted=True)
    return [(ref, reading.id18(master)) for ref, master in rows if master]


def survivors(client: Client, refs: Sequence[str]) -> dict[str, Lead]:
    """Of leads that are not shown any more: those that go on for the merged ones, by their own ids."""
    found: dict[str, Lead] = {}
    former: dict[str, list[str]] = {ref: [] for ref in refs}
    for _ in range(_MERGES):
        masters: dict[str, list[str]] = {}
        for ref, master in merged(client, list(former)):
            masters.setdefault(master, []).extend([*former[ref], ref])
        found |= {lead.ref: lead for lead in leads(client, list(masters), masters) if lead.ref in masters}
        former = {master: ids for master, ids in masters.items() if master not in found}
    return found


def sweep(client: Client, column: str, since: datetime, definition: UnassignedDefinition) -> Iterator[Sequence[str]]:
    """Pages of ids of open leads that nobody has, of which the time in `column` is not before `since`; oldest first.

    Those of the last moments (the parameter ``sweep_min_age``) are left to their message, which may still be queued.
    """
    said = client.credentials.parameters
    holders = sorted(definition.user_refs | definition.pond_refs)
    nobody = ["OwnerId = null"]  # never so in an account, but where every definition begins
    nobody += [f"OwnerId IN {reading.any_of(holders)}"] if holders else []
    nobody += ["Owner.Type = 'Queue'"] if said.get("all_queues") == "yes" else []
    soql = (
        f"SELECT {', '.join(reading.NEEDED)} FROM Lead WHERE IsConverted = false "  # noqa: S608 - quoted
        f"AND {column} >= {since.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ} AND ({' OR '.join(nobody)}) ORDER BY {column}, Id"
    )
    found = pages(client, soql, lambda row: reading.lead_of(row, said))
    until = client.now() - payload.seconds(said.get("sweep_min_age"), _LAG)
    return upkeep.unassigned(found, definition, since=since, until=until, changed=column != "CreatedDate")


def add_lead(
    client: Client, name: str, email: str, definition: UnassignedDefinition, headers: Mapping[str, str]
) -> str:
    """Make a lead of an invented person whom nobody has; its id."""
    holders = sorted(definition.pond_refs) or sorted(definition.user_refs)
    if not holders and client.credentials.parameters.get("all_queues") == "yes":
        holders = sorted(queues(client))
    if not holders:
        raise CrmError(Outcome.REFUSED, text=reading.NOBODY, call="POST Lead")
    first, _, last = name.partition(" ")
    lead = {"FirstName": first, "LastName": last, "Company": name, "Email": email, "OwnerId": holders[0]}
    with reading.in_words("POST Lead", reading.NOT_MADE):
        answer = client.post(f"{base(client)}/sobjects/Lead", json=lead, headers=headers)
    with answer.reading(write=True):
        return ref_of(Fields(answer.data, strict=False), "id")


def remove_lead(client: Client, ref: str) -> None:
    """Delete a lead; one that is gone is no error."""
    with reading.in_words("DELETE Lead", reading.NOT_REMOVED):
        upkeep.unless_gone(lambda: client.delete(f"{base(client)}/sobjects/Lead/{payload.ref(ref)}"))


# -- queues and groups -------------------------------------------------------------------------------------------------


def queues(client: Client) -> dict[str, str]:
    """The queues that may own leads: id and name."""
    rows = every(client, _QUEUES, lambda row: (ref_of(row, "QueueId"), row.object("Queue").text("Name") or ""))
    return dict(rows)


def teams(client: Client, active: frozenset[str]) -> Iterator[Team]:
    """Queues for leads and public groups, with the active users in them and in groups of theirs; roles say nobody."""
    names = queues(client) | dict(every(client, _GROUPS, lambda row: (ref_of(row, "Id"), row.text("Name") or "")))
    members: dict[str, list[str]] = {}
    for group, member in every(client, _MEMBERS, lambda row: (ref_of(row, "GroupId"), ref_of(row, "UserOrGroupId"))):
        members.setdefault(group, []).append(member)

    def users(group: str, above: frozenset[str]) -> Iterator[str]:
        for member in members.get(group, ()):
            if member in active:
                yield member
            elif member.startswith("00G") and member not in above:
                yield from users(member, above | {member})

    for ref in sorted(names, key=lambda r: (names[r], r)):
        yield Team(ref, names[ref] or ref, payload.unique(users(ref, frozenset({ref}))))


# -- checks ------------------------------------------------------------------------------------------------------------


def identity(client: Client) -> tuple[Answer, str, str]:
    """The account and the connected user, with the answer that told them."""
    answer = client.get(base(client))
    with answer.reading():
        return answer, *reading.identity(Fields(answer.data, strict=False), "identity")


def readable(client: Client) -> tuple[list[Finding], str | None]:
    """Whether leads and all fields that are asked for can be read; the newest lead."""
    newest = every(
        client,
        "SELECT Id FROM Lead WHERE IsConverted = false ORDER BY CreatedDate DESC LIMIT 1",
        lambda r: ref_of(r, "Id"),
    )
    leads(client, newest or ["00Q000000000000AAA"])  # an id that no lead has: what counts is that it may be asked
    lacking = sorted(hidden(client))
    fix = "give the connected user read on these fields of leads, or correct their names" if lacking else ""
    what = f"not readable: {', '.join(lacking)}" if lacking else "all readable"
    return [Finding("leads", True, "readable"), Finding("fields", not lacking, what, fix)], next(iter(newest), None)


def may_transfer(client: Client, user: str, lead: str) -> Finding:
    """Whether the connected user may give this lead to somebody else."""
    of = f"WHERE UserId = {reading.quoted(user)} AND RecordId = {reading.quoted(lead)}"
    soql = f"SELECT RecordId, HasTransferAccess FROM UserRecordAccess {of}"  # noqa: S608 - quoted
    may = every(client, soql, lambda row: row.flag("HasTransferAccess") is True) == [True]
    fix = "" if may else "give the connected user edit on leads and Transfer Leads, or Modify All on leads"
    return Finding("rights", may, "may set owners" if may else "may not change the owner of a lead", fix)
