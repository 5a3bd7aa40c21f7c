"""Who is next in a queue, and who is not and why: the preview asks exactly what a decision would ask now."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import sqlalchemy as sa

from connector.naming import Json, Names, iso
from connector.runtime import Runtime, Tenant
from connector.trial import Trial, moment, snapshot
from routing import rotation, store
from routing import tables as t
from routing.decide import Case, Outcome
from routing.model import Agent, Flag, Lead, Load, Role
from routing.rotation import OwedKind
from routing.skips import Unavailable, paused, quiet_until, unavailable

# Who waits is served before anybody who comes later.
_LONGEST = datetime.min.replace(tzinfo=UTC)


def _away(agent: Agent, weight: int, now: datetime, flags: frozenset[Flag], load: Load | None) -> Unavailable | None:
    return unavailable(agent, weight, now, (), load=load, skips=Flag.SKIPS in flags, weights=Flag.WEIGHTS in flags)


def _reason(out: Unavailable | None) -> Json:
    return {
        "available": out is None,
        "skip": out.skip.value if out else None,
        "detail": out.detail if out else None,
        "remedy": out.skip.remedy if out else None,
    }


def _members(trial: Trial, queue_id: UUID) -> dict[UUID, Unavailable | None]:
    """Each member of a queue, in order of rank, with why they cannot take a lead now."""
    places = trial.queue(queue_id).line.places
    away = {out.agent_id: out for out in trial.bench.look(queue_id).away}
    return {place.agent_id: away.get(place.agent_id) for place in places}


def _head(conn: sa.Connection, tenant: Tenant, trial: Trial, names: Names, queue_id: UUID) -> Json:
    queue = trial.queue(queue_id)
    quiet = quiet_until(queue.quiet, trial.now)
    return {
        "queue": queue.name,
        "as_of": iso(trial.now),
        "position": queue.line.position,
        "held": _held(conn, tenant.tenant_id, queue_id),
        "quiet": quiet[1] if quiet else None,
        "when_nobody": queue.when_nobody.value,
        "fallback_queue": names.queue(queue.fallback_queue_id),
        "default_agent": names.agent(queue.default_agent_id),
    }


def _held(conn: sa.Connection, tenant_id: UUID, queue_id: UUID) -> int:
    s = t.lead_roles.c
    found: int = conn.execute(
        sa.select(sa.func.count()).where(
            s.tenant_id == tenant_id, s.queue_id == queue_id, s.state == "held", s.role == Role.OWNER.value
        )
    ).scalar_one()
    return found


def next_up(runtime: Runtime, tenant: Tenant, queue_id: UUID, count: int) -> Json:
    """Who gets the next `count` leads of a queue if nothing changes, and every member who is unavailable now and why.

    The leads are decided, one after the other, by the code that decides, and not kept: a fallback, a default agent,
    turns that are owed and caps that fill up are in it. ``then`` says what becomes of further leads when the list ends
    before its time. A lead may still go elsewhere for what only the lead brings, as when an agent already has this
    person.
    """
    with snapshot(runtime) as conn:
        trial = Trial(runtime, conn, tenant)
        trial.only(queue_id)
        names = Names.load(conn, tenant.tenant_id)
        head = _head(conn, tenant, trial, names, queue_id)
        members = _members(trial, queue_id)
        rows: list[Json] = []
        then = None
        for _ in range(count):
            # As a lead that waited: those that do are served first, and are the next leads.
            decision = trial.decide(Case(queue_id, Lead(ref=""), waits=_LONGEST))
            if decision.outcome is not Outcome.ASSIGNED:
                then = {"outcome": decision.outcome.value, "reason": decision.reason.value if decision.reason else None}
                break
            rows.append(
                {
                    "turn": decision.pick.turn if decision.pick else None,
                    "teams": [{"team": names.queue(one.queue_id), "turn": one.pick.turn} for one in decision.inner],
                    "agent": names.agent(decision.agent_id),
                    "how": decision.record["how"],
                    "queue": names.queue(decision.queue_id),
                }
            )
    return head | {
        "next": rows,
        "then": then,
        "unavailable": [{"agent": names.agent(agent_id)} | _reason(out) for agent_id, out in members.items() if out],
    }


def show(runtime: Runtime, tenant: Tenant, queue_id: UUID) -> Json:
    """A queue as it stands: its members in the order in which they are served next, then the others."""
    with snapshot(runtime) as conn:
        trial = Trial(runtime, conn, tenant)
        line = trial.queue(queue_id).line
        names = Names.load(conn, tenant.tenant_id)
        head = _head(conn, tenant, trial, names, queue_id)
    members = _members(trial, queue_id)
    places = {place.agent_id: place for place in line.places}
    owed = [(one.agent_id, one.kind) for one in line.owed]
    order = rotation.standing(line) if Flag.ROTATION in trial.plan.flags else tuple(places)
    return head | {
        "members": [
            {
                "agent": names.agent(agent_id),
                "weight": places[agent_id].weight,
                "last_turn": places[agent_id].last or None,
                "given_next": owed.count((agent_id, OwedKind.GIVE_NEXT)),
                "owed_turns": owed.count((agent_id, OwedKind.OWED)),
            }
            | _reason(members[agent_id])
            for agent_id in order
        ]
    }


def everyone(runtime: Runtime, tenant: Tenant) -> list[Json]:
    """All agents with what Turnlock knows of them, in order of name."""
    with snapshot(runtime) as conn:
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
        now = moment(runtime, conn)
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
