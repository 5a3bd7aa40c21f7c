"""Leads as Turnlock has them: which of those in hand are known, and what is stored of one as it was read.

Nothing here calls the CRM.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from connector.database import at_once, at_rest, new_id, pipelined, unit
from connector.kept import Kept
from connector.runtime import Runtime, Tenant
from routing import tables as t
from routing.facts import Identities, identities, lead_to_json
from routing.flight import Ask, Asking, Statement, listed, question
from routing.model import Flag, Lead, Role
from routing.stages import Mode


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


def identities_of(tenant: Tenant, lead: Lead) -> Identities:
    """By what a lead is found to be somebody's, as the tenant has it."""
    return identities(tenant.tenant_id, lead, households=tenant.households, country=tenant.country)


class Unstored(Exception):
    """A lead that was to be stored along with its unit is stored already: by another worker, or by an earlier try."""


@dataclass(frozen=True, slots=True)
class Told:
    """A lead as read, with what is stored of it: its facts, and by what it is found to be somebody's."""

    lead: Lead
    facts: dict[str, Any]
    identities: Identities


def told(tenant: Tenant, lead: Lead) -> Told:
    """What is stored of this lead."""
    return Told(lead, lead_to_json(lead), identities_of(tenant, lead))


def remember(
    runtime: Runtime,
    tenant: Tenant,
    leads: Mapping[str, Told],
    known: Mapping[str, Known],
    kept: Kept,
    *,
    alone: bool,
) -> tuple[dict[str, UUID], Ask | None]:
    """Make sure that each lead, its ref, facts and identities are stored; gives the lead ids. Commits.

    But one that is `alone` and was never seen before is left to :func:`connector.reading.storing`: what does it then is
    given as well.
    """
    if alone and all(
        ref not in known and one.lead.ref == ref and not one.lead.former_refs for ref, one in leads.items()
    ):
        made = {ref: new_id() for ref in leads}
        return made, _ALONG(**_fresh(tenant, leads, made)) if made else None
    kept.sure()
    ids = {ref: known[ref].lead_id for ref in leads if ref in known}
    ids |= _rekeyed(runtime, tenant.tenant_id, {ref: one.lead for ref, one in leads.items() if ref not in known})
    stored = _store_fresh(runtime, tenant, {ref: one for ref, one in leads.items() if ref not in ids})
    changed = {ref: one for ref, one in leads.items() if ref not in stored}
    if changed:
        with at_rest(runtime.engine) as conn:  # another worker may have stored some of them first
            ids |= {ref: found.lead_id for ref, found in known_leads(conn, tenant.tenant_id, list(changed)).items()}
        _store_facts(runtime, tenant, changed, ids)
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
# taken gives no row, and then nothing of its lead is stored here.
_FRESH = """
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
        SELECT ref, lead_id{} FROM stored
"""
# Along with the unit that decides the lead.
_ALONG = Statement(sa.text(_FRESH.format("")))
# By itself it does not wait for the disk: nothing is answered on it, and the commit of the unit that decides these
# leads, which comes after it in the log, brings it there.
_AHEAD = Statement(sa.text(_FRESH.format(", set_config('synchronous_commit', 'off', true)")))


def _store_fresh(runtime: Runtime, tenant: Tenant, leads: Mapping[str, Told]) -> dict[str, UUID]:
    """Store leads that were not known; the ids of those that were indeed new."""
    if not leads:
        return {}
    values = _fresh(tenant, leads, {ref: new_id() for ref in leads})
    return {row.ref: row.lead_id for row in at_once(runtime.engine, _AHEAD, values)}


def _fresh(tenant: Tenant, leads: Mapping[str, Told], ids: Mapping[str, UUID]) -> dict[str, Any]:
    """The parameters of what stores leads never seen before."""
    pairs = [(digest, ids[ref]) for ref, one in leads.items() for digest in one.identities.all]
    return {
        "tenant": tenant.tenant_id,
        "refs": list(leads),
        "ids": [ids[ref] for ref in leads],
        "created": [one.lead.created_at for one in leads.values()],
        "facts": [json.dumps(one.facts) for one in leads.values()],
        "digests": [digest for digest, _ in pairs],
        "owners": [lead_id for _, lead_id in pairs],
    }


def _store_facts(runtime: Runtime, tenant: Tenant, leads: Mapping[str, Told], ids: Mapping[str, UUID]) -> None:
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
                {"tenant_id": tenant_id, "lead_id": ids[ref], "facts": leads[ref].facts, "read_at": now}
                for ref in sorted(leads, key=lambda r: ids[r])
            ],
        )
        _keep_identities(conn, tenant, {ids[ref]: one.identities for ref, one in leads.items()})


def keep_identities(conn: sa.Connection, tenant: Tenant, leads: Mapping[UUID, Lead]) -> None:
    """Store by what these leads may be found to be the same person or household; what is stored already stays."""
    _keep_identities(conn, tenant, {lead_id: identities_of(tenant, lead) for lead_id, lead in leads.items()})


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
