"""Locked leads and who goes with them: returned leads, members who share queues, agents of the same person.

Works on the caller's connection, like :mod:`routing.store`, and never commits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from routing import tables as t
from routing.flight import Asking, Statement, listed, one_of, question
from routing.model import Agent, Flag, Role


@dataclass(frozen=True, slots=True)
class Returned:
    """Of a lead that was ever returned: who gave it back, and everybody who had it (they do not get it again)."""

    by: frozenset[UUID]
    had: frozenset[UUID]


_TENANT = sa.bindparam("tenant", type_=sa.Uuid)
_AMONG_LEADS = one_of("leads", sa.Uuid())
_RETURNED = Statement(
    sa.select(t.returns.c.lead_id, t.returns.c.agent_id).where(
        t.returns.c.tenant_id == _TENANT, t.returns.c.lead_id == _AMONG_LEADS, t.returns.c.state == "approved"
    )
)
_HAD = Statement(
    sa.select(t.decisions.c.lead_id, t.assignments.c.agent_id)
    .join(
        t.assignments,
        (t.assignments.c.tenant_id == t.decisions.c.tenant_id)
        & (t.assignments.c.decision_id == t.decisions.c.decision_id),
    )
    .where(
        t.decisions.c.tenant_id == _TENANT,
        t.decisions.c.lead_id == _AMONG_LEADS,
        t.decisions.c.role == Role.OWNER.value,
        t.assignments.c.confirmed_at.is_not(None),
    )
)


@question
def load_returned(tenant_id: UUID, lead_ids: Collection[UUID]) -> Asking[dict[UUID, Returned]]:
    """Those of these leads that were returned as owner's, with who had them. Call while ``credits`` is on."""
    if not lead_ids:
        return {}
    by: dict[UUID, set[UUID]] = {}
    (rows,) = yield [_RETURNED(tenant=tenant_id, leads=list(lead_ids))]
    for row in rows:
        by.setdefault(row.lead_id, set()).add(row.agent_id)
    if not by:
        return {}
    had = {lead_id: set(agents) for lead_id, agents in by.items()}
    (rows,) = yield [_HAD(tenant=tenant_id, leads=list(by))]
    for row in rows:
        had[row.lead_id].add(row.agent_id)
    return {lead_id: Returned(frozenset(agents), frozenset(had[lead_id])) for lead_id, agents in by.items()}


def load_members(
    conn: sa.Connection, tenant_id: UUID, flags: frozenset[Flag], agent_ids: Collection[UUID]
) -> dict[UUID, dict[UUID, int]]:
    """Every queue that one of these agents is a member of, with those of them who are and their weights."""
    m = t.members.c
    columns = [m.queue_id, m.agent_id, *([m.weight] if Flag.WEIGHTS in flags else [])]
    of_turns = [m.tag.is_not(None)] if Flag.ROTATION in flags else []
    found: dict[UUID, dict[UUID, int]] = {}
    for row in conn.execute(
        sa.select(*columns).where(
            m.tenant_id == tenant_id, m.agent_id == sa.any_(sa.cast(list(agent_ids), sa.ARRAY(sa.Uuid))), *of_turns
        )
    ):
        found.setdefault(row.queue_id, {})[row.agent_id] = row.weight if Flag.WEIGHTS in flags else 1
    return found


# An identity that this many leads share (an office's number, a placeholder) says nothing about the person.
SHARED_BY_MANY = 5


def _owning() -> Statement:
    """Look-ups one by one, whatever the planner thinks of the tables: a plan made while they were small, and kept with
    the connection, would read all of them for each unit until somebody counts them anew."""
    li, s = t.lead_identities.c, t.lead_roles.c
    asked = listed("digests", sa.LargeBinary()).table_valued("digest").render_derived(name="asked")
    known = (
        sa.select(li.digest, li.lead_id)
        .where(li.tenant_id == _TENANT, li.digest == asked.c.digest)
        .limit(SHARED_BY_MANY + 1)  # one more says all that is asked of a shared one
        .lateral()
    )
    owner = (
        sa.select(s.agent_id, s.since)
        .where(
            s.tenant_id == _TENANT,
            s.lead_id == known.c.lead_id,
            s.role == Role.OWNER.value,
            s.state.in_(("assigned", "owned")),
        )
        .limit(1)
        .lateral()
    )
    return Statement(
        sa.select(known.c.digest, known.c.lead_id, owner.c.agent_id, owner.c.since).select_from(
            asked.join(known, sa.true()).outerjoin(owner, sa.true())
        )
    )


_OWNERS = _owning()


@question
def existing_owners(
    tenant_id: UUID, digests: Collection[bytes]
) -> Asking[tuple[dict[bytes, dict[UUID, tuple[datetime, UUID]]], set[bytes]]]:
    """For each identity the leads with a known agent and since when; and the identities shared by too many leads."""
    if not digests:
        return {}, set()
    (rows,) = yield [_OWNERS(tenant=tenant_id, digests=list(digests))]
    count: dict[bytes, int] = {}
    owners: dict[bytes, dict[UUID, tuple[datetime, UUID]]] = {}
    for row in rows:
        digest = bytes(row.digest)
        count[digest] = count.get(digest, 0) + 1
        if row.agent_id is not None:
            owners.setdefault(digest, {})[row.lead_id] = (row.since, row.agent_id)
    shared = {d for d, n in count.items() if n > SHARED_BY_MANY}
    return {d: o for d, o in owners.items() if d not in shared}, shared


def latest_owner(known: Iterable[tuple[datetime, UUID]], agents: Mapping[UUID, Agent]) -> UUID | None:
    """Of the agents of a person's leads (since when, who) the latest who can still take leads, else the latest."""

    def rank(one: tuple[datetime, UUID]) -> tuple[bool, datetime]:
        agent = agents.get(one[1])
        return agent is not None and agent.active and not agent.refused, one[0]

    return max(known, key=rank, default=(None, None))[1]
