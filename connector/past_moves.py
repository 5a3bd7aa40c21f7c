"""What happened to single turns in the past: given back, credited, charged, given next; to happen again in a replay.

A lead that was given back (returned by its agent, gone, taken by a human first) is given back by whoever has it under
the draft: it was the lead that was bogus, not the agent. A refusal of the CRM was about the agent, so it happens again
only to the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from routing import tables as t
from routing.ledger import Kind, carry_out
from routing.model import Flag, Role
from routing.rotation import Line, MoveRefused

_REPEATED = (Kind.VOID, Kind.OWE, Kind.GIVE_NEXT, Kind.WITHDRAW, Kind.DEBIT)
# Entries bear the time at which their transaction began: their order may differ from it by as much as one lasts.
_OUT_OF_ORDER = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Move:
    """One of them. ``lead_id`` is the lead that was given back and ``reason`` why; a lead that had taken no turn has no
    queue."""

    at: datetime
    kind: Kind
    queue_id: UUID | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    lead_id: UUID | None = None
    agent_id: UUID | None = None
    reason: str = ""


def moves_since(conn: sa.Connection, tenant_id: UUID, stages: frozenset[Flag], start: datetime) -> list[Move]:
    """Everything of this kind since `start`, in order of time; as far as the database's `stages` record it."""
    found: list[Move] = []
    if Flag.ROTATION in stages:
        q = t.queues.c
        for row in conn.execute(sa.select(q.queue_id, q.seq).where(q.tenant_id == tenant_id)).all():
            found += _of_queue(conn, tenant_id, row.queue_id, row.seq, start)
    if Flag.CREDITS in stages:
        found += _returned_without_turn(conn, tenant_id, start)
    return sorted(found, key=lambda move: move.at)


def _of_queue(conn: sa.Connection, tenant_id: UUID, queue_id: UUID, last: int, start: datetime) -> list[Move]:
    c, u, d = t.ledger.c, t.turns.c, t.decisions.c
    of_queue = sa.and_(c.tenant_id == tenant_id, c.queue_id == queue_id)
    first, end = 1, last + 1
    while first < end:  # the first entry of that time, by halves: sequence numbers have no gap, and no index has times
        middle = (first + end) // 2
        at = conn.execute(sa.select(c.at).where(of_queue, c.seq == middle)).scalar_one()
        first, end = (middle + 1, end) if at < start - _OUT_OF_ORDER else (first, middle)
    given_back = sa.case((c.kind == Kind.VOID, sa.cast(c.data["turn"].astext, sa.BigInteger)))
    rows = conn.execute(
        sa.select(c.at, c.kind, c.data, u.void_reason, d.lead_id)
        .outerjoin(t.turns, (u.tenant_id == c.tenant_id) & (u.queue_id == c.queue_id) & (u.turn == given_back))
        .outerjoin(t.decisions, (d.tenant_id == u.tenant_id) & (d.decision_id == u.decision_id))
        .where(of_queue, c.seq >= first, c.kind.in_(_REPEATED), c.at >= start)
        # Collaborators are not decided again.
        .where(sa.or_(d.role.is_(None), d.role == Role.OWNER.value))
        .order_by(c.seq)
    )
    return [
        Move(
            row.at,
            Kind(row.kind),
            queue_id,
            row.data,
            row.lead_id,
            UUID(row.data["agent"]) if "agent" in row.data else None,
            row.void_reason or "",
        )
        for row in rows
    ]


def _returned_without_turn(conn: sa.Connection, tenant_id: UUID, start: datetime) -> list[Move]:
    r, a = t.returns.c, t.assignments.c
    rows = conn.execute(
        sa.select(r.decided_at, r.lead_id, r.agent_id)
        .join(t.assignments, (a.tenant_id == r.tenant_id) & (a.assignment_id == r.assignment_id))
        .where(
            r.tenant_id == tenant_id,
            r.state == "approved",
            r.decided_at >= start,
            a.role == Role.OWNER.value,
            a.turn.is_(None),
        )
    )
    return [
        Move(row.decided_at, Kind.VOID, lead_id=row.lead_id, agent_id=row.agent_id, reason="returned") for row in rows
    ]


def moved(line: Line | None, kind: Kind, data: Mapping[str, Any]) -> Line | None:
    """The line after a move, or None where there is nothing to move: the agent is no member, or it was served."""
    if line is None or not data:
        return None
    with suppress(MoveRefused):
        after, _ = carry_out(line, kind, data)
        return None if after == line else after
    return None
