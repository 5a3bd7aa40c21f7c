"""From claimed events to leads as the CRM shows them now: look up, read in batches, remember.

Nothing here holds a lock or a transaction while it calls out.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from adapters.base import Adapter, EventKind
from adapters.client import Client
from adapters.outcome import CrmError, Outcome
from connector.database import at_once, at_rest, new_id, opening, pipelined, unit
from connector.kept import KEPT, Kept
from connector.runtime import Runtime, Tenant
from routing import tables as t
from routing.facts import Identities, identities, lead_from_json, lead_to_json, rule_digest
from routing.flight import COMMIT, Ask, Asking, Statement, listed, question, together
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
class Known:
    """A lead that Turnlock has seen before: its id, its version now, and whether it was ever decided or left.

    `settles_at` is until when it waits, where its source settles. `state` is the owner's, `modes` those that its last
    decision kept (with `modes` asked for).
    """

    lead_id: UUID
    version: int
    stands: bool
    settles_at: datetime | None = None
    state: str | None = None
    modes: Mapping[str, str] | None = None

    def kept(self, kind: str) -> dict[Flag, Mode]:
        """The modes that count for an event of this kind: those of a decision that is not closed yet."""
        if not self.modes or (self.state not in _OPEN and kind != "collaborators"):
            return {}
        return {flag: Mode(self.modes[flag.value]) for flag in Flag if flag.value in self.modes}


# The owner is decided again as part of the same: nobody was free, or the CRM refused the agent.
_OPEN = ("held", "refused")


@dataclass(frozen=True, slots=True)
class Read:
    """What became of a batch of events: readable ones, those whose lead is not shown, those the CRM refused.

    `later` are those from the first on for which there was no time.
    """

    items: list[Item]
    missing: list[tuple[sa.Row[Any], UUID | None]]
    refused: list[tuple[sa.Row[Any], str]]
    later: list[sa.Row[Any]]


@lru_cache(maxsize=4)
def _known(settling: bool, modes: bool) -> Statement:
    r, c, s = t.lead_refs.c, t.leads.c, t.lead_roles.c
    owner = t.lead_roles.alias("owner")
    o = owner.c
    stands = sa.exists().where(s.tenant_id == c.tenant_id, s.lead_id == c.lead_id)
    asked = listed("refs", sa.Text()).table_valued("ref").render_derived(name="asked")
    tenant_id = sa.bindparam("tenant", type_=sa.Uuid)
    # One by one, by their keys: see `routing.kin`.
    found = sa.select(r.lead_id).where(r.tenant_id == tenant_id, r.ref == asked.c.ref).limit(1).lateral()
    lead = (
        sa.select(
            c.version,
            stands.label("stands"),
            (c.settles_at if settling else sa.null()).label("until"),
            *([o.state, o.modes] if modes else []),
        )
        .select_from(
            t.leads.outerjoin(
                owner, (o.tenant_id == c.tenant_id) & (o.lead_id == c.lead_id) & (o.role == Role.OWNER.value)
            )
        )
        .where(c.tenant_id == tenant_id, c.lead_id == found.c.lead_id)
        .limit(1)
        .lateral()
    )
    return Statement(
        sa.select(asked.c.ref, found.c.lead_id, *lead.c).select_from(asked.join(found, sa.true()).join(lead, sa.true()))
    )


@question
def known_leads(
    tenant_id: UUID, refs: Collection[str], *, settling: bool = False, modes: bool = False
) -> Asking[dict[str, Known]]:
    """Which of these CRM ids Turnlock knows. With `settling` also until when they wait: the stage's column is there.

    With `modes` also the staged modes that they keep.
    """
    if not refs:
        return {}
    (rows,) = yield [_known(settling, modes)(tenant=tenant_id, refs=sorted(refs))]
    return {row.ref: Known(row.lead_id, row.version, row.stands, *row[4:]) for row in rows}


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
    told = {ref: _Told(lead_to_json(lead), _identities(tenant, lead)) for ref, lead in leads.items()}
    ids, unstored = _remember(runtime, tenant, leads, told, known, kept, alone=alone)
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
                    digest=rule_digest(lead, told[ref].facts),
                    identities=told[ref].identities,
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


def _identities(tenant: Tenant, lead: Lead) -> Identities:
    return identities(tenant.tenant_id, lead, households=tenant.households, country=tenant.country)


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


class Unstored(Exception):
    """A lead that was to be stored along with its unit is stored already: by another worker, or by an earlier try."""


def storing(conn: sa.Connection, items: Sequence[Item]) -> Asking[None]:
    """Stores the leads of these that are not stored yet, in a transaction of its own ahead of the unit's.

    So a lead is there whatever becomes of its unit. Raises :class:`Unstored`.
    """
    asks = [item.unstored for item in items if item.unstored is not None]
    if not asks:
        return
    before = next(opening(conn))
    rows = yield [*before, *asks, COMMIT]
    if not all(rows[len(before) : -1]):
        raise Unstored


def keep(runtime: Runtime, tenant: Tenant, items: Sequence[Item]) -> list[Item]:
    """Make sure that these are stored after :class:`Unstored`, under whichever id that was. Commits."""
    unstored = [item for item in items if item.unstored is not None]
    leads = {item.lead.ref: item.lead for item in unstored}
    told = {item.lead.ref: _Told(lead_to_json(item.lead), item.identities) for item in unstored}
    ids, _ = _remember(runtime, tenant, leads, told, {}, KEPT, alone=False)
    return [
        item if item.unstored is None else replace(item, lead_id=ids[item.lead.ref], unstored=None) for item in items
    ]


@dataclass(frozen=True, slots=True)
class _Told:
    """What is stored of a lead as read: its facts, and by what it is found to be somebody's."""

    facts: dict[str, Any]
    identities: Identities


def _remember(
    runtime: Runtime,
    tenant: Tenant,
    leads: Mapping[str, Lead],
    told: Mapping[str, _Told],
    known: Mapping[str, Known],
    kept: Kept,
    *,
    alone: bool,
) -> tuple[dict[str, UUID], Ask | None]:
    """Make sure that each lead, its ref, facts and identities are stored; gives the lead ids. Commits.

    But one that is `alone` and was never seen before is left to :func:`storing`: what does it then is given as well.
    """
    if alone and all(ref not in known and lead.ref == ref and not lead.former_refs for ref, lead in leads.items()):
        made = {ref: new_id() for ref in leads}
        return made, _FRESH(**_fresh(tenant, leads, told, made)) if made else None
    kept.sure()
    ids = {ref: known[ref].lead_id for ref in leads if ref in known}
    ids |= _rekeyed(runtime, tenant.tenant_id, {ref: lead for ref, lead in leads.items() if ref not in known})
    fresh = {ref: lead for ref, lead in leads.items() if ref not in ids}
    stored = _store_fresh(runtime, tenant, fresh, told)
    changed = {ref: lead for ref, lead in leads.items() if ref not in stored}
    if changed:
        with at_rest(runtime.engine) as conn:  # another worker may have stored some of them first
            ids |= {ref: found.lead_id for ref, found in known_leads(conn, tenant.tenant_id, list(changed)).items()}
        _store_facts(runtime, tenant, changed, told, ids)
    return ids | stored, None


def _agents_of(conn: sa.Connection, tenant_id: UUID, lead_ids: Collection[UUID]) -> set[tuple[UUID, str | None]]:
    """The leads of these that are assigned, each with the CRM ids of its agent."""
    s, r = t.lead_roles.c, t.agent_refs.c
    rows = conn.execute(
        sa.select(s.lead_id, r.ref)
        .join(t.agent_refs, (r.tenant_id == s.tenant_id) & (r.agent_id == s.agent_id))
        .where(
            s.tenant_id == tenant_id,
            s.lead_id == sa.any_(sa.cast(list(lead_ids), sa.ARRAY(sa.Uuid))),
            s.role == Role.OWNER.value,
            s.state == "assigned",
        )
    )
    return {(row.lead_id, row.ref) for row in rows}


def _rekeyed(runtime: Runtime, tenant_id: UUID, leads: Mapping[str, Lead]) -> dict[str, UUID]:
    """Of leads under ids never seen, those known under former ids: the CRM merged them. Each keeps its lead id.

    Where several of the merged were known, the one goes on whose agent is the owner that the CRM kept, else one that
    stands somewhere, else the oldest; the others end as gone once their ids are not shown any more.
    """
    former = {old for lead in leads.values() for old in lead.former_refs}
    if not former:
        return {}
    with at_rest(runtime.engine) as conn:
        before = known_leads(conn, tenant_id, sorted(former))
        agents = _agents_of(conn, tenant_id, {found.lead_id for found in before.values()})
    kept: dict[str, UUID] = {}
    for ref, lead in leads.items():
        known = [before[old] for old in lead.former_refs if old in before]
        if known:
            order = [
                ((found.lead_id, lead.owner_ref) not in agents, not found.stands, found.lead_id) for found in known
            ]
            kept[ref] = min(order)[-1]
    if not kept:
        return {}
    with unit(runtime.engine) as (conn, _):
        conn.execute(
            insert(t.lead_refs).on_conflict_do_nothing(index_elements=["tenant_id", "ref"]),
            [{"tenant_id": tenant_id, "ref": ref, "lead_id": kept[ref]} for ref in sorted(kept)],
        )
        # Another worker may have stored a ref first: what stands there now counts.
        return {ref: found.lead_id for ref, found in known_leads(conn, tenant_id, sorted(kept)).items()}


# One statement and one round trip for leads never seen before: lead, ref, facts and identities, all or nothing. Refs go
# in by the order of their bytes (collation C), so that two workers wait for each other one way round. A ref that is
# taken gives no row, and then nothing of its lead is stored here. It does not wait for the disk: nothing is answered on
# it, and the commit of the unit that decides these leads, which comes after it in the log, brings it there.
_FRESH = Statement(
    sa.text(
        """
        WITH given AS (
            SELECT * FROM unnest(
                CAST(:refs AS text[]), CAST(:ids AS uuid[]), CAST(:created AS timestamptz[]), CAST(:facts AS jsonb[])
            ) AS g(ref, lead_id, crm_created_at, facts)
        ), pairs AS (
            SELECT * FROM unnest(CAST(:digests AS bytea[]), CAST(:owners AS uuid[])) AS p(digest, lead_id)
        ), stored AS (
            INSERT INTO lead_refs (tenant_id, ref, lead_id)
            SELECT CAST(:tenant AS uuid), ref, lead_id FROM given ORDER BY ref COLLATE "C"
            ON CONFLICT (tenant_id, ref) DO NOTHING
            RETURNING ref, lead_id
        ), lead AS (
            INSERT INTO leads (tenant_id, lead_id, crm_created_at)
            SELECT CAST(:tenant AS uuid), lead_id, crm_created_at FROM given JOIN stored USING (lead_id)
        ), fact AS (
            INSERT INTO lead_facts (tenant_id, lead_id, facts) SELECT CAST(:tenant AS uuid), lead_id, facts FROM given
            JOIN stored USING (lead_id)
        ), identity AS (
            INSERT INTO identities (tenant_id, digest)
            SELECT DISTINCT CAST(:tenant AS uuid), digest FROM pairs JOIN stored USING (lead_id) ORDER BY digest
            ON CONFLICT (tenant_id, digest) DO NOTHING
        ), belongs AS (
            INSERT INTO lead_identities (tenant_id, digest, lead_id)
            SELECT CAST(:tenant AS uuid), digest, lead_id FROM pairs JOIN stored USING (lead_id)
        )
        SELECT ref, lead_id, set_config('synchronous_commit', 'off', true) FROM stored
        """
    )
)


def _store_fresh(
    runtime: Runtime, tenant: Tenant, leads: Mapping[str, Lead], told: Mapping[str, _Told]
) -> dict[str, UUID]:
    """Store leads that were not known; the ids of those that were indeed new."""
    if not leads:
        return {}
    values = _fresh(tenant, leads, told, {ref: new_id() for ref in leads})
    return {row.ref: row.lead_id for row in at_once(runtime.engine, _FRESH, values)}


def _fresh(
    tenant: Tenant, leads: Mapping[str, Lead], told: Mapping[str, _Told], ids: Mapping[str, UUID]
) -> dict[str, Any]:
    """The parameters of :data:`_FRESH`."""
    pairs = [(digest, ids[ref]) for ref in leads for digest in told[ref].identities.all]
    return {
        "tenant": tenant.tenant_id,
        "refs": list(leads),
        "ids": [ids[ref] for ref in leads],
        "created": [lead.created_at for lead in leads.values()],
        "facts": [json.dumps(told[ref].facts) for ref in leads],
        "digests": [digest for digest, _ in pairs],
        "owners": [lead_id for _, lead_id in pairs],
    }


def _store_facts(
    runtime: Runtime,
    tenant: Tenant,
    leads: Mapping[str, Lead],
    told: Mapping[str, _Told],
    ids: Mapping[str, UUID],
) -> None:
    """Store what is now known of leads that Turnlock had; an older reading never replaces a newer one."""
    tenant_id = tenant.tenant_id
    facts = insert(t.lead_facts)
    with unit(runtime.engine) as (conn, now), pipelined(conn):
        conn.execute(
            facts.on_conflict_do_update(
                index_elements=["tenant_id", "lead_id"],
                set_={"facts": facts.excluded.facts, "read_at": facts.excluded.read_at},
                where=t.lead_facts.c.read_at <= facts.excluded.read_at,
            ),
            [
                {"tenant_id": tenant_id, "lead_id": ids[ref], "facts": told[ref].facts, "read_at": now}
                for ref in sorted(leads, key=lambda r: ids[r])
            ],
        )
        _keep_identities(conn, tenant, {ids[ref]: told[ref].identities for ref in leads})


def keep_identities(conn: sa.Connection, tenant: Tenant, leads: Mapping[UUID, Lead]) -> None:
    """Store by what these leads may be found to be the same person or household; what is stored already stays."""
    _keep_identities(conn, tenant, {lead_id: _identities(tenant, lead) for lead_id, lead in leads.items()})


def _keep_identities(conn: sa.Connection, tenant: Tenant, known_by: Mapping[UUID, Identities]) -> None:
    pairs = sorted((digest, lead_id) for lead_id, by in known_by.items() for digest in by.all)
    if not pairs:
        return
    conn.execute(
        insert(t.identities).on_conflict_do_nothing(index_elements=["tenant_id", "digest"]),
        [{"tenant_id": tenant.tenant_id, "digest": digest} for digest in sorted({d for d, _ in pairs})],
    )
    conn.execute(
        insert(t.lead_identities).on_conflict_do_nothing(),
        [{"tenant_id": tenant.tenant_id, "digest": digest, "lead_id": lead_id} for digest, lead_id in pairs],
    )
