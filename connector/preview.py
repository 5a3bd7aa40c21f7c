"""Who is next in a queue, and who is not and why: the preview asks exactly what a decision would ask now."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from connector.naming import Json, Names, iso
from connector.runtime import Runtime, Tenant
from connector.trial import Trial, moment, snapshot
from routing import rotation, store
from routing import tables as t
from routing.decide import Case, Outcome, QueueState
from routing.model import Agent, Flag, Lead, Role
from routing.skips import Unavailable, unavailable


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
    """Who gets the next `count` leads of a queue if nothing changes, and every member who is unavailable now and why.

    The leads are decided, one after the other, by the code that decides, and not kept: a fallback, a default agent and
    turns that are owed are in it. ``then`` says what becomes of further leads when the list ends before its time. A
    lead may still go elsewhere for what only the lead brings, as when an agent already has this person.
    """
    with snapshot(runtime) as conn:
        trial = Trial(runtime, conn, tenant)
        trial.only(queue_id)
        queue = trial.queue(queue_id)
        names = Names.load(conn, tenant.tenant_id)
        held = _held(conn, tenant.tenant_id, queue_id)
        rows: list[Json] = []
        then = None
        for _ in range(count):
            # As a lead that waited: those that do are served first, and are the next leads.
            decision = trial.decide(Case(queue_id, Lead(ref=""), was_held=True))
            if decision.outcome is not Outcome.ASSIGNED:
                then = {"outcome": decision.outcome.value, "reason": decision.reason.value if decision.reason else None}
                break
            rows.append(
                {
                    "turn": decision.pick.turn if decision.pick else None,
                    "agent": names.agent(decision.agent_id),
                    "how": decision.record["how"],
                    "queue": names.queue(decision.queue_id),
                }
            )
    flags, now = trial.plan.flags, trial.now
    out = {p.agent_id: _away(trial.bench.agents[p.agent_id], p.weight, now, flags) for p in queue.line.places}
    return _head(names, queue, held, now) | {
        "next": rows,
        "then": then,
        "unavailable": [
            {"agent": names.agent(agent_id)} | _reason(away) for agent_id, away in out.items() if away is not None
        ],
    }


def show(runtime: Runtime, tenant: Tenant, queue_id: UUID) -> Json:
    """A queue as it stands: its members in the order in which they are served next, then the others."""
    with snapshot(runtime) as conn:
        row = store.tenant_row(conn, tenant.tenant_id)
        queue = store.load_queues(conn, tenant.tenant_id, row.flags, [queue_id])[queue_id]
        ids = {place.agent_id for place in queue.line.places}
        agents = store.load_agents(conn, tenant.tenant_id, row.flags, ids)
        names = Names.load(conn, tenant.tenant_id)
        held = _held(conn, tenant.tenant_id, queue_id)
        now = moment(runtime, conn)
    places = {place.agent_id: place for place in queue.line.places}
    out = {p.agent_id: _away(agents[p.agent_id], p.weight, now, row.flags) for p in queue.line.places}
    owed = [one.agent_id for one in queue.line.owed]
    turning = Flag.ROTATION in row.flags
    order = rotation.standing(queue.line) if turning else tuple(places)
    return _head(names, queue, held, now) | {
        "members": [
            {
                "agent": names.agent(agent_id),
                "weight": places[agent_id].weight,
                "last_turn": places[agent_id].last or None,
                "owed_turns": owed.count(agent_id),
            }
            | _reason(out[agent_id])
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
