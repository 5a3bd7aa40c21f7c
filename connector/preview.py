"""Who is next in a queue, and who is not and why: the preview asks exactly what a decision would ask now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from connector.explain import Json, Names, iso
from connector.runtime import Runtime, Tenant
from routing import rotation, store
from routing import tables as t
from routing.caps import more
from routing.decide import QueueState
from routing.model import Agent, Flag, Load, Role, SkipPolicy
from routing.rotation import OwedKind, Pick
from routing.skips import Unavailable, paused, quiet_until, unavailable


def _snapshot(runtime: Runtime) -> sa.Connection:
    # One moment for the line, its members and the agents; without it the preview could mix two turns.
    return runtime.engine.connect().execution_options(isolation_level="REPEATABLE READ")


def _now(runtime: Runtime, conn: sa.Connection) -> datetime:
    found: datetime = conn.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
    return runtime.clock(found)


def _away(
    agent: Agent, weight: int, now: datetime, flags: frozenset[Flag], load: Load | None = None
) -> Unavailable | None:
    return unavailable(agent, weight, now, (), load=load, skips=Flag.SKIPS in flags, weights=Flag.WEIGHTS in flags)


def _reason(out: Unavailable | None) -> Json:
    return {
        "available": out is None,
        "skip": out.skip.value if out else None,
        "detail": out.detail if out else None,
        "remedy": out.skip.remedy if out else None,
    }


@dataclass(frozen=True, slots=True)
class _Seen:
    """A queue as a decision would see it now."""

    flags: frozenset[Flag]
    queue: QueueState
    agents: Mapping[UUID, Agent]
    loads: Mapping[UUID, Load]
    names: Names
    held: int
    now: datetime

    @classmethod
    def load(cls, runtime: Runtime, tenant_id: UUID, queue_id: UUID) -> _Seen:
        with _snapshot(runtime) as conn:
            flags = store.tenant_row(conn, tenant_id).flags
            queue = store.load_queues(conn, tenant_id, flags, [queue_id])[queue_id]
            agents = store.load_agents(conn, tenant_id, flags, {place.agent_id for place in queue.line.places})
            names = Names.load(conn, tenant_id)
            held = _held(conn, tenant_id, queue_id)
            now = _now(runtime, conn)
            loads = store.count_loads(conn, tenant_id, agents.values(), now)
        return cls(flags, queue, agents, loads, names, held, now)

    def away(self, loads: Mapping[UUID, Load] | None = None) -> dict[UUID, Unavailable]:
        """Who cannot take a lead now, had they what `loads` says."""
        has = self.loads if loads is None else loads
        found = {
            p.agent_id: _away(self.agents[p.agent_id], p.weight, self.now, self.flags, has.get(p.agent_id))
            for p in self.queue.line.places
        }
        return {agent_id: out for agent_id, out in found.items() if out is not None}

    def picks(self, count: int) -> list[Pick]:
        """The next turns: each counts under the caps of whom it goes to, as it would when the lead comes."""
        line, loads, away, found = self.queue.line, dict(self.loads), self.away(), list[Pick]()
        while len(found) < count:
            free = [p.agent_id for p in line.places if p.agent_id not in away]
            lose, average = (self.queue.under(p, away.values()) for p in (SkipPolicy.LOSE_TURN, SkipPolicy.AVERAGE))
            picked, line = rotation.pick(line, free, lose, average)
            if picked is None:
                break
            found.append(picked)
            if picked.agent_id in loads:
                loads[picked.agent_id] = more(loads[picked.agent_id])
                away = self.away(loads)
        return found

    @property
    def quiet(self) -> str | None:
        """Until when the queue holds its leads, None when it does not."""
        found = quiet_until(self.queue.quiet, self.now)
        return found[1] if found else None


def _held(conn: sa.Connection, tenant_id: UUID, queue_id: UUID) -> int:
    s = t.lead_roles.c
    found: int = conn.execute(
        sa.select(sa.func.count()).where(
            s.tenant_id == tenant_id, s.queue_id == queue_id, s.state == "held", s.role == Role.OWNER.value
        )
    ).scalar_one()
    return found


def _head(seen: _Seen) -> Json:
    queue, names = seen.queue, seen.names
    return {
        "queue": queue.name,
        "as_of": iso(seen.now),
        "position": queue.line.position,
        "held": seen.held,
        "quiet": seen.quiet,
        "when_nobody": queue.when_nobody.value,
        "fallback_queue": names.queue(queue.fallback_queue_id),
        "default_agent": names.agent(queue.default_agent_id),
    }


def next_up(runtime: Runtime, tenant: Tenant, queue_id: UUID, count: int) -> Json:
    """The next `count` turns of a queue if nothing changes, and every member who is unavailable now with the reason.

    A lead may still go elsewhere for what only the lead brings: it is held behind others, or an agent already has it.
    """
    seen = _Seen.load(runtime, tenant.tenant_id, queue_id)
    names, away = seen.names, seen.away()
    if seen.quiet:
        turns: list[Json] = []  # whatever comes is held
    elif Flag.ROTATION in seen.flags:
        turns = [{"turn": p.turn, "agent": names.agent(p.agent_id), "how": p.how.value} for p in seen.picks(count)]
    else:
        # Without the rotation nobody moves: every lead goes to the same member, and none takes a turn.
        first = rotation.first_by_rank(
            seen.queue.line.places, [p.agent_id for p in seen.queue.line.places if p.agent_id not in away]
        )
        turns = [{"turn": None, "agent": names.agent(first), "how": "rank"}] * (count if first else 0)
    return _head(seen) | {
        "next": turns,
        "unavailable": [{"agent": names.agent(agent_id)} | _reason(out) for agent_id, out in away.items()],
    }


def show(runtime: Runtime, tenant: Tenant, queue_id: UUID) -> Json:
    """A queue as it stands: its members in the order in which they are served next, then the others."""
    seen = _Seen.load(runtime, tenant.tenant_id, queue_id)
    line, away = seen.queue.line, seen.away()
    places = {place.agent_id: place for place in line.places}
    owed = [(one.agent_id, one.kind) for one in line.owed]
    order = rotation.standing(line) if Flag.ROTATION in seen.flags else tuple(places)
    return _head(seen) | {
        "members": [
            {
                "agent": seen.names.agent(agent_id),
                "weight": places[agent_id].weight,
                "last_turn": places[agent_id].last or None,
                "given_next": owed.count((agent_id, OwedKind.GIVE_NEXT)),
                "owed_turns": owed.count((agent_id, OwedKind.OWED)),
            }
            | _reason(away.get(agent_id))
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
        loads = store.count_loads(conn, tenant.tenant_id, agents.values(), now) if Flag.CAPACITY in flags else {}
    return [
        {
            "agent_id": str(agent.agent_id),
            "ref": agent.ref,
            "name": agent.name,
            "email": emails[agent.agent_id],
            "active": agent.active,
            "refused": agent.refused,
            "paused_by_crm": agent.paused_by_crm,
            "paused_by_admin": paused(agent, now),
            "paused_until": iso(agent.paused_until) if paused(agent, now) else None,
            "zone": agent.zone,
            "queues": queues.get(agent.agent_id, []),
        }
        | _reason(_away(agent, 1, now, flags, loads.get(agent.agent_id)))
        for agent in sorted(agents.values(), key=lambda x: (x.name.casefold(), x.ref))
    ]
