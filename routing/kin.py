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
from routing.model import Agent, Flag, Role


@dataclass(frozen=True, slots=True)
class Returned:
    """Of a lead that was ever returned: who gave it back, and everybody who had it (they do not get it again)."""

    by: frozenset[UUID]
    had: frozenset[UUID]


def load_returned(conn: sa.Connection, tenant_id: UUID, lead_ids: Collection[UUID]) -> dict[UUID, Returned]:
    """Those of these leads that were returned as owner's, with who had them. Call while ``credits`` is on."""
    r, d, a = t.returns.c, t.decisions.c, t.assignments.c
    by: dict[UUID, set[UUID]] = {}
    wanted = sa.cast(list(lead_ids), sa.ARRAY(sa.Uuid))
    for row in conn.execute(
        sa.select(r.lead_id, r.agent_id).where(
            r.tenant_id == tenant_id, r.lead_id == sa.any_(wanted), r.state == "approved"
        )
    ):
        by.setdefault(row.lead_id, set()).add(row.agent_id)
    if not by:
        return {}
    had = {lead_id: set(agents) for lead_id, agents in by.items()}
    for row in conn.execute(
        sa.select(d.lead_id, a.agent_id)
        .join(t.assignments, (a.tenant_id == d.tenant_id) & (a.decision_id == d.decision_id))
        .where(
            d.tenant_id == tenant_id,
            d.lead_id == sa.any_(sa.cast(list(by), sa.ARRAY(sa.Uuid))),
            d.role == Role.OWNER.value,
            a.confirmed_at.is_not(None),
        )
    ):
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


def existing_owners(
    conn: sa.Connection, tenant_id: UUID, digests: Collection[bytes]
) -> tuple[dict[bytes, dict[UUID, tuple[datetime, UUID]]], set[bytes]]:
    """For each identity the leads with a known agent and since when; and the identities shared by too many leads."""
    if not digests:
        return {}, set()
    li, lr = t.lead_identities.c, t.lead_roles.c
    rows = conn.execute(
        sa.select(li.digest, li.lead_id, lr.agent_id, lr.since)
        .outerjoin(
            t.lead_roles,
            (lr.tenant_id == li.tenant_id)
            & (lr.lead_id == li.lead_id)
            & (lr.role == Role.OWNER.value)
            & lr.state.in_(("assigned", "owned")),
        )
        .where(li.tenant_id == tenant_id, li.digest == sa.any_(sa.cast(list(digests), sa.ARRAY(sa.LargeBinary))))
    )
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
