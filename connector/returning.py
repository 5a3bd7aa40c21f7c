"""Who is back when: the next instant at which time alone lets held leads go on, so that nobody has to poll for it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from routing import store, stored
from routing import tables as t
from routing.model import Flag
from routing.skips import next_change, quiet_until


def next_return(conn: sa.Connection, tenant_id: UUID, flags: frozenset[Flag], now: datetime) -> datetime | None:
    """The first instant after `now` at which an agent of the tenant is back (pause, leave, holiday, hours, caps) or a
    queue's quiet hours end. None: nothing that is away now ends by itself.

    All agents count, not only those of one queue: a lead may go on by a rule or a fallback.
    """
    if not flags & {Flag.SKIPS, Flag.CAPACITY}:
        return None  # all that is left is ended by somebody's doing, which wakes the drain
    agents = store.load_agents(conn, tenant_id, flags)
    loads = store.count_loads(conn, tenant_id, agents.values(), now)
    q = t.queues.c
    rows: Iterable[Any] = ()
    if Flag.SKIPS in flags:
        quiet = sa.select(q.quiet_hours).where(q.tenant_id == tenant_id, q.active, q.quiet_hours.is_not(None))
        rows = conn.execute(quiet).scalars()
    backs = (next_change(agent, now, loads.get(agent.agent_id)) for agent in agents.values())
    ends = (quiet_until(stored.quiet(row), now) for row in rows)
    return _first([*backs, *(end[0] for end in ends if end)], now)


def _first(moments: Iterable[datetime | None], now: datetime) -> datetime | None:
    return min((moment for moment in moments if moment is not None and moment > now), default=None)
