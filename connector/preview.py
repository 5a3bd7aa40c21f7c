"""Who is next in a queue, and who is not and why: the preview asks exactly what a decision would ask now."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from connector.explain import Json, Names, iso
from connector.runtime import Runtime, Tenant
from routing import rotation, store
from routing import tables as t
from routing.decide import QueueState
from routing.model import Agent, Flag, Role
from routing.rotation import OwedKind
from routing.skips import Unavailable, unavailable


def _snapshot(runtime: Runtime) -> sa.Connection:
    # One moment for the line, its members and the agents; without it the preview could mix two turns.
    return runtime.engine.connect().execution_options(isolation_level="REPEATABLE READ")


def _now(runtime: Runtime, conn: sa.Connection) -> datetime:
    found: datetime = conn.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
    return runtime.clock(found)


def _away(agent: Agent, weight: int, now: datetime, flags: frozenset[Flag]) -> Unavailable | None:
    return unavailable(agent, weight, now, (), skips=Flag.SKIPS in flags, weights=Flag.WEIGHTS in flags)


def _reason(out: Unavailable | None) -> Json:
    return {
        "available": out is None,
        "skip": out.skip.value if out else None,
        "detail": out.detail if out else None,
        "remedy": out.skip.remedy if out else None,
    }


def _held(conn: sa.Connection, tenant_id: UUID, queue_id: UUID) -> int:
    s = t.lead_roles.c
    found: int = conn.execute(
        sa.select(sa.func.count()).where(
            s.tenant_id == tenant_id, s.queue_id == queue_id, s.state == "held", s.role == Role.OWNER.value
        )
    ).scalar_one()
    return found


def _head(names: Names, queue: QueueState, held: int, now: datetime) -> Json:
    return {
        "queue": queue.name,
        "as_of": iso(now),
        "position": queue.line.position,
        "held": held,
        "when_nobody": queue.when_nobody.value,
        "fallback_queue": names.queue(queue.fallback_queue_id),
        "default_agent": names.agent(queue.default_agent_id),
    }


def next_up(runtime: Runtime, tenant: Tenant, queue_id: UUID, count: int) -> Json:
    """The next `count` turns of a queue if nothing changes, and every member who is unavailable now with the reason.

    A lead may still go elsewhere for what only the lead brings: it is held behind others, or an agent already has it.
    """
    with _snapshot(runtime) as conn:
        row = store.tenant_row(conn, tenant.tenant_id)
        queue = store.load_queues(conn, tenant.tenant_id, row.flags, [queue_id])[queue_id]
        ids = {place.agent_id for place in queue.line.places}
        agents = store.load_agents(conn, tenant.tenant_id, row.flags, ids)
        names = Names.load(conn, tenant.tenant_id)
        held = _held(conn, tenant.tenant_id, queue_id)
        now = _now(runtime, conn)
    out = {p.agent_id: _away(agents[p.agent_id], p.weight, now, row.flags) for p in queue.line.places}
    free = [agent_id for agent_id, away in out.items() if away is None]
    if Flag.ROTATION in row.flags:
        picks = rotation.next_up(queue.line, free, count)
        turns = [{"turn": p.turn, "agent": names.agent(p.agent_id), "how": p.how.value} for p in picks]
    else:
        # Without the rotation nobody moves: every lead goes to the same member, and none takes a turn.
        first = rotation.first_by_rank(queue.line.places, free)
        turns = [{"turn": None, "agent": names.agent(first), "how": "rank"}] * (count if first else 0)
    return _head(names, queue, held, now) | {
        "next": turns,
        "unavailable": [
            {"agent": names.agent(agent_id)} | _reason(away) for agent_id, away in out.items() if away is not None
        ],
    }


def show(runtime: Runtime, tenant: Tenant, queue_id: UUID) -> Json:
    """A queue as it stands: its members in the order in which they are served next, then the others."""
    with _snapshot(runtime) as conn:
        row = store.tenant_row(conn, tenant.tenant_id)
        queue = store.load_queues(conn, tenant.tenant_id, row.flags, [queue_id])[queue_id]
        ids = {place.agent_id for place in queue.line.places}
        agents = store.load_agents(conn, tenant.tenant_id, row.flags, ids)
        names = Names.load(conn, tenant.tenant_id)
        held = _held(conn, tenant.tenant_id, queue_id)
        now = _now(runtime, conn)
    places = {place.agent_id: place for place in queue.line.places}
    out = {p.agent_id: _away(agents[p.agent_id], p.weight, now, row.flags) for p in queue.line.places}
    owed = [(one.agent_id, one.kind) for one in queue.line.owed]
    turning = Flag.ROTATION in row.flags
    order = rotation.standing(queue.line) if turning else tuple(places)
    return _head(names, queue, held, now) | {
        "members": [
            {
                "agent": names.agent(agent_id),
                "weight": places[agent_id].weight,
                "last_turn": places[agent_id].last or None,
                "given_next": owed.count((agent_id, OwedKind.GIVE_NEXT)),
                "owed_turns": owed.count((agent_id, OwedKind.OWED)),
            }
            | _reason(out[agent_id])
            for agent_id in order
        ]
    }


def everyone(runtime: Runtime, tenant: Tenant) -> list[Json]:
    """All agents with what Turnlock knows of them, in order of name."""
    with _snapshot(runtime) as conn:
        stages = runtime.stages(conn)
        flags = store.tenant_row(conn, tenant.tenant_id).flags
        agents = store.load_agents(conn, tenant.tenant_id, stages)
        a, m, q = t.agents.c, t.members.c, t.queues.c
        emails = {
            row.agent_id: row.email
            for row in conn.execute(sa.select(a.agent_id, a.email).where(a.tenant_id == tenant.tenant_id))
        }
        queues: dict[UUID, list[str]] = {}
        for row in conn.execute(
            sa.select(m.agent_id, q.name)
            .join(t.queues, (q.tenant_id == m.tenant_id) & (q.queue_id == m.queue_id))
            .where(m.tenant_id == tenant.tenant_id, q.active)
            .order_by(q.name)
        ):
            queues.setdefault(row.agent_id, []).append(row.name)
        now = _now(runtime, conn)
    return [
        {
            "agent_id": str(agent.agent_id),
            "ref": agent.ref,
            "name": agent.name,
            "email": emails[agent.agent_id],
            "active": agent.active,
            "refused": agent.refused,
            "paused_by_crm": agent.paused_by_crm,
            "paused_by_admin": agent.paused_by_admin,
            "zone": agent.zone,
            "queues": queues.get(agent.agent_id, []),
        }
        | _reason(_away(agent, 1, now, flags))
        for agent in sorted(agents.values(), key=lambda x: (x.name.casefold(), x.ref))
    ]
