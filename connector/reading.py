"""From claimed events to leads as the CRM shows them now: look up, read in batches, have them stored.

Nothing here holds a lock or a transaction while it calls out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from adapters.base import Adapter, EventKind
from adapters.client import Client
from adapters.outcome import CrmError, Outcome
from connector.database import at_rest
from connector.kept import KEPT, Kept
from connector.leads import Known, Unstored, known_leads, remember, told
from connector.runtime import Runtime, Tenant
from routing.facts import Identities, lead_from_json, rule_digest
from routing.flight import Ask, Asking, together
from routing.model import Flag, Lead, Role
from routing.stages import Mode
from routing.store import TenantRow

# How long reading goes on before what is read is decided. A CRM that shows one lead per call and is slow must neither
# keep the first of a burst waiting for the last, nor outlast the lease of them all.
READ_FOR = 1.0  # seconds
# Leads one after the other whose answers cannot be read, and none that can: it is the CRM.
_ODD = 3

Events = Sequence[sa.Row[Any]]


@dataclass(frozen=True, slots=True)
class Item:
    """One claimed event with its lead as read. `version` is the lead's before that reading began.

    `fresh` is a lead that was never decided or left; `settles_at` is until when one of those waits, once that is known.
    `kept` are the modes of staged flags that an open decision of the lead has; `noted` says that any are stored.
    `unstored` is what stores a lead never seen before, where that goes along with its unit: see :func:`storing`.
    """

    event: sa.Row[Any]
    role: Role
    lead_id: UUID
    lead: Lead
    version: int
    digest: bytes
    identities: Identities
    fresh: bool = False
    settles_at: datetime | None = None
    kept: Mapping[Flag, Mode] = field(default_factory=dict)
    noted: bool = False
    unstored: Ask | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """What became of a batch of events: readable ones, those whose lead is not shown, those the CRM refused.

    `later` are those from the first on for which there was no time.
    """

    items: list[Item]
    missing: list[tuple[sa.Row[Any], UUID | None]]
    refused: list[tuple[sa.Row[Any], str]]
    later: list[sa.Row[Any]]

    @property
    def along(self) -> bool:
        """Whether nothing is to be written of it but by its unit, which stores its lead, too."""
        return not self.missing and not self.refused and any(item.unstored is not None for item in self.items)


def known_now(
    runtime: Runtime, conn: sa.Connection | None, tenant_id: UUID, refs: Collection[str]
) -> Asking[dict[str, Known]]:
    """Asks which of the leads under these ids are known. To be asked before any of them is read.

    A lead whose version rises while the CRM answers is read again, never decided on this reading.
    """
    settling = Flag.SETTLE in runtime.stages(conn)
    return known_leads.of(tenant_id, refs, settling=settling, modes=runtime.shadows(conn))


def read_events(
    runtime: Runtime,
    tenant: Tenant,
    configured: TenantRow,
    client: Client,
    rows: Events,
    known: Mapping[str, Known],
    kept: Kept,
) -> Read:
    """Read the leads behind `rows`; `known` is what :func:`known_now` found of them.

    Nothing is written before `kept` says that the rows themselves are committed.
    Raises :class:`CrmError` when the CRM as a whole cannot be read now.
    """
    adapter, ends = tenant.adapter, time.monotonic() + READ_FOR
    later: list[sa.Row[Any]] = []
    refs: dict[UUID, str] = {}
    missing: list[tuple[sa.Row[Any], UUID | None]] = []
    refused: list[tuple[sa.Row[Any], str]] = []
    for number, row in enumerate(rows):
        if number and time.monotonic() >= ends:
            rows, later = rows[:number], list(rows[number:])
            break
        ref = row.ref
        if row.kind == EventKind.INQUIRY and ref is not None:
            try:
                ref = adapter.resolve(client, ref)
            except CrmError as error:
                if error.outcome not in (Outcome.GONE, Outcome.REFUSED):
                    raise
                ref = None
        if ref is None:
            missing.append((row, None))
        else:
            refs[row.event_id] = ref
    inquired = {refs[row.event_id] for row in rows if row.kind == EventKind.INQUIRY and row.event_id in refs}
    if inquired:
        with at_rest(runtime.engine) as conn:
            found = together(conn, known_now(runtime, conn, tenant.tenant_id, inquired))
            known = {**known, **found[0]}
    complete = _payload_is_complete(runtime, tenant, configured)
    leads: dict[str, Lead] = {}
    to_fetch: list[str] = []
    for row in rows:
        ref = refs.get(row.event_id)
        if ref is None:
            continue
        # A payload is a snapshot that may be old: it is trusted only for a lead never seen before, and not for one that
        # settles, because what it lacks is what is waited for.
        seen = ref in known and (known[ref].stands or known[ref].settles_at is not None)
        if row.payload is not None and complete and not seen:
            leads[ref] = lead_from_json(row.payload)
        elif ref not in to_fetch:
            to_fetch.append(ref)
    to_fetch = [ref for ref in to_fetch if ref not in leads]
    fetched, bad, unread = _fetch(adapter, client, to_fetch, ends)
    leads |= fetched
    for number, row in enumerate(rows):
        if refs.get(row.event_id) in unread:  # and what came after it waits, too, so that nobody is overtaken
            rows, later = rows[:number], [*rows[number:], *later]
            break
    # A lead that comes alone pays no round trip for being stored; one that settles waits in its row.
    alone = len(rows) == 1 and not (adapter.settle or runtime.plan(None, configured).settle)
    all_told = {ref: told(tenant, lead) for ref, lead in leads.items()}
    ids, unstored = remember(runtime, tenant, all_told, known, kept, alone=alone)
    items = []
    for row in rows:
        ref = refs.get(row.event_id)
        if ref is None:
            continue
        if ref in bad:
            refused.append((row, bad[ref]))
        elif ref not in leads:
            missing.append((row, known[ref].lead_id if ref in known else None))
        else:
            lead = leads[ref]
            items.append(
                Item(
                    event=row,
                    role=Role.COLLABORATOR if row.kind == "collaborators" else Role.OWNER,
                    lead_id=ids[ref],
                    lead=lead,
                    version=known[ref].version if ref in known else 0,
                    digest=rule_digest(lead, all_told[ref].facts),
                    identities=all_told[ref].identities,
                    fresh=not (ref in known and known[ref].stands),
                    settles_at=known[ref].settles_at if ref in known else None,
                    kept=known[ref].kept(row.kind) if ref in known else {},
                    noted=ref in known and bool(known[ref].modes),
                    unstored=unstored,
                )
            )
    read = {row.event_id for row in rows}
    return Read(items, [lost for lost in missing if lost[0].event_id in read], refused, later)


def _payload_is_complete(runtime: Runtime, tenant: Tenant, row: TenantRow) -> bool:
    """Whether a payload of this CRM shows all that the tenant's rules look at. Else it could send a lead astray."""
    lacking = tenant.adapter.not_in_payload
    if not lacking:
        return True
    rules = runtime.plan(None, row, row.flags | row.shadowed).rules  # a shadow looks at them, too
    return lacking.isdisjoint(rules.attributes(Role.OWNER))


def _fetch(
    adapter: Adapter, client: Client, refs: Sequence[str], ends: float
) -> tuple[dict[str, Lead], dict[str, str], set[str]]:
    """Leads by ref, refs of which the CRM shows nothing to read with the reason, and those for which time ran out.

    One bad ref harms no other. An answer that cannot be read is one lead's fault where others were read meanwhile.
    At least one call is made, none is begun after `ends` (monotonic), or somewhat later to find such a lead.
    """
    found: dict[str, Lead] = {}
    bad: dict[str, str] = {}
    odd: dict[str, CrmError] = {}
    whole = [list(refs[start : start + adapter.max_batch]) for start in range(0, len(refs), adapter.max_batch)]
    batches = deque(whole)
    asked = False
    while batches and not (asked and time.monotonic() >= ends):
        batch, asked = batches.popleft(), True
        try:
            found |= adapter.fetch_leads(client, batch)
        except CrmError as error:
            if error.outcome is Outcome.ANSWER_UNREADABLE and len(batch) > 1:
                if batch in whole:
                    ends += 4 * READ_FOR  # to find the one takes a call per halving, and without it none is decided
                half = len(batch) // 2
                batches.extendleft((batch[half:], batch[:half]))
            elif error.outcome is Outcome.ANSWER_UNREADABLE:
                odd[batch[0]] = error
                if len(odd) >= _ODD and not found:
                    raise
            elif error.outcome not in (Outcome.GONE, Outcome.REFUSED):
                raise
            elif len(batch) > 1:
                batches.extendleft([ref] for ref in reversed(batch))
            elif error.outcome is Outcome.REFUSED:
                bad[batch[0]] = f"crm_refused_{error.status}"
    if odd and not found:  # nothing says that it is these leads and not the CRM as a whole
        raise next(iter(odd.values()))
    bad |= dict.fromkeys(odd, "crm_answer_unreadable")
    return found, bad, {ref for batch in batches for ref in batch}


def storing(items: Sequence[Item]) -> Asking[None]:
    """Stores those leads of a unit that are not stored yet, ahead of its locks. Raises :class:`Unstored`."""
    asks = [item.unstored for item in items if item.unstored is not None]
    if asks and not all((yield asks)):
        raise Unstored


def keep(runtime: Runtime, tenant: Tenant, items: Sequence[Item]) -> list[Item]:
    """Make sure that these are stored after all, with or without their unit, under whichever id. Commits."""
    unstored = [item for item in items if item.unstored is not None]
    if not unstored:
        return list(items)
    ids, _ = remember(runtime, tenant, {i.lead.ref: told(tenant, i.lead) for i in unstored}, {}, KEPT, alone=False)
    return [
        item if item.unstored is None else replace(item, lead_id=ids[item.lead.ref], unstored=None) for item in items
    ]
