"""Locks and loads: what a decision may see, read in the one right order.

Works on the caller's connection and never commits. SQLAlchemy Core selecting columns only: an ORM entity already in
the session would be handed back with the values it had before the lock was granted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import lru_cache
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import aggregate_order_by

from routing import caps, stored
from routing import tables as t
from routing.decide import Plan, QueueState
from routing.flight import Asking, Statement, listed, one_of, question
from routing.model import (
    TELLING,
    Agent,
    Caps,
    Flag,
    Hours,
    Load,
    Role,
    Rule,
    Target,
    TargetKind,
    UnassignedDefinition,
    WhenNobody,
)
from routing.rotation import Line, Owed, OwedKind, Place
from routing.rules import RuleSet
from routing.settle import SettleTimes


class ConfigurationChanged(Exception):
    """The configuration moved between classification and lock: the unit starts again."""


@dataclass(frozen=True, slots=True)
class TenantRow:
    """The tenant's configuration row, with its flags."""

    tenant_id: UUID
    config_version: int
    flag_version: int
    flags: frozenset[Flag]
    default_queue_id: UUID | None
    unassigned: UnassignedDefinition
    released: str
    # In shadow, and on for some leads only (these are in `flags`, too: their state is kept up for all).
    shadowed: frozenset[Flag] = frozenset()
    partly: frozenset[Flag] = frozenset()

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever a decision could come out differently for the same lead and line."""
        return self.config_version, self.flag_version


@dataclass(frozen=True, slots=True)
class RoleRow:
    """Where one lead stands in one role."""

    lead_id: UUID
    role: Role
    state: str
    reason: str | None
    agent_id: UUID | None
    queue_id: UUID | None
    seq: int
    epoch: int
    confirmed_version: int | None
    facts_digest: bytes | None
    releases: Sequence[str]
    since: datetime
    open_write: bool = False


# -- configuration ------------------------------------------------------------------------------------------


# What changes from one time to the next in the statements below.
_TENANT = sa.bindparam("tenant", type_=sa.Uuid)


# Locks the configuration row against change.
HOLD_STILL = Statement(
    sa.select(t.tenants.c.tenant_id).where(t.tenants.c.tenant_id == _TENANT).with_for_update(read=True)
)
_CONFIGURATION = Statement(
    sa.select(
        *(
            t.tenants.c[name]
            for name in ("config_version", "flag_version", "default_queue_id", "unassigned", "released")
        ),
        sa.select(sa.func.jsonb_object_agg(t.flags.c.flag, t.flags.c.mode))
        .where(t.flags.c.tenant_id == _TENANT, t.flags.c.mode != "off")
        .scalar_subquery()
        .label("modes"),
    ).where(t.tenants.c.tenant_id == _TENANT)
)


_FLAGS = {flag.value: flag for flag in Flag}


@question
def tenant_row(tenant_id: UUID, *, share: bool = False) -> Asking[TenantRow]:
    """The configuration row as of now. `share` locks it against change until the transaction ends."""
    # Last resort of a unit that lost to configuration changes three times: hold them off while it decides. In a
    # statement of its own: one that had to wait would give the new version with the flags of before.
    locks = [HOLD_STILL(tenant=tenant_id)] if share else []
    *_, (row,) = yield [*locks, _CONFIGURATION(tenant=tenant_id)]
    modes_of = [(_FLAGS[name], mode) for name, mode in (row.modes or {}).items() if name in _FLAGS]

    def those(*wanted: str) -> frozenset[Flag]:
        return frozenset([flag for flag, mode in modes_of if mode in wanted])

    return TenantRow(
        tenant_id=tenant_id,
        config_version=row.config_version,
        flag_version=row.flag_version,
        flags=those("on", "partly"),
        default_queue_id=row.default_queue_id,
        unassigned=unassigned_definition(row.unassigned),
        released=row.released,
        shadowed=those("shadow"),
        partly=those("partly"),
    )


def unassigned_definition(stored: Mapping[str, Any]) -> UnassignedDefinition:
    """The tenant's definition of "nobody has this lead" from its column."""
    return UnassignedDefinition(
        user_refs=frozenset(stored.get("users", ())),
        pond_refs=frozenset(stored.get("ponds", ())),
        include_unclaimed=bool(stored.get("unclaimed", False)),
    )


def load_plan(conn: sa.Connection, tenant: TenantRow) -> Plan:
    """Rules and queue names of `tenant`. Compiling rules is dear: callers cache by ``tenant.version``."""
    rules: list[Rule] = []
    if Flag.RULES in tenant.flags:
        r = t.rules.c
        for row in conn.execute(
            sa.select(t.rules).where(r.tenant_id == tenant.tenant_id).order_by(r.role, r.precedence)
        ):
            targets = tuple(Target(TargetKind(x["kind"]), UUID(x["id"]) if x.get("id") else None) for x in row.targets)
            rules.append(Rule(row.name, row.precedence, Role(row.role), row.condition, targets))
    q, c = t.queues.c, t.tenants.c
    columns = [q.queue_id, q.name, q.when_nobody, q.fallback_queue_id, q.default_agent_id]
    columns += [q.quiet_hours] if Flag.SKIPS in tenant.flags else []
    queues = conn.execute(sa.select(*columns).where(q.tenant_id == tenant.tenant_id, q.active)).all()
    closed: list[str] = []
    if Flag.CAPACITY in tenant.flags:
        closed = conn.execute(sa.select(c.closed_stages).where(c.tenant_id == tenant.tenant_id)).scalar_one()
    settle = SettleTimes()
    if Flag.SETTLE in tenant.flags:
        times = conn.execute(sa.select(c.settle).where(c.tenant_id == tenant.tenant_id)).scalar_one()
        settle = SettleTimes.of_json(times)
    return Plan(
        config_version=tenant.config_version,
        flags=tenant.flags,
        rules=RuleSet(rules),
        default_queue_id=tenant.default_queue_id,
        queue_names={row.queue_id: row.name for row in queues},
        target_agents=frozenset(
            x.id for rule in rules for x in rule.targets if x.kind is TargetKind.AGENT and x.id is not None
        ),
        closed_stages=frozenset(closed),
        fallbacks={q.queue_id: q.fallback_queue_id for q in queues if q.when_nobody == WhenNobody.FALLBACK_QUEUE},
        default_agents={q.queue_id: q.default_agent_id for q in queues if q.when_nobody == WhenNobody.DEFAULT_AGENT},
        settle=settle,
        teams=_teams(conn, tenant) if Flag.TEAMS in tenant.flags else {},
        quiet={q.queue_id: stored.quiet(q.quiet_hours) for q in queues if q.quiet_hours}
        if Flag.SKIPS in tenant.flags
        else {},
    )


def _teams(conn: sa.Connection, tenant: TenantRow) -> dict[UUID, tuple[UUID, ...]]:
    """The lines that are members of other lines and take turns there, by the line that they are in."""
    m, q = t.members.c, t.queues.c
    # A line that is a member stands there by its own id.
    inside = sa.select(m.queue_id, m.agent_id).join(t.queues, (q.tenant_id == m.tenant_id) & (q.queue_id == m.agent_id))
    found: dict[UUID, tuple[UUID, ...]] = {}
    weighty = [m.weight > 0] if Flag.WEIGHTS in tenant.flags else []
    for row in conn.execute(inside.where(m.tenant_id == tenant.tenant_id, *weighty).order_by(m.queue_id, m.agent_id)):
        found[row.queue_id] = (*found.get(row.queue_id, ()), row.agent_id)
    return found


# -- locks: leads, then identities, then queues, then counters; each class in one statement, ordered by key ----


# How and why these three lock is told by the functions that send them.
LOCK_LEADS = Statement(
    sa.select(t.leads.c.lead_id, t.leads.c.version)
    .where(t.leads.c.tenant_id == _TENANT, t.leads.c.lead_id == one_of("leads", sa.Uuid()))
    .order_by(t.leads.c.lead_id)
    .with_for_update(key_share=True)
)


@question
def lock_leads(tenant_id: UUID, lead_ids: Collection[UUID]) -> Asking[dict[UUID, int]]:
    """Lock these leads and give their versions. First in the lock order.

    Protects: where a lead stands (``lead_roles``) and its open writes. Waiting is right: another worker is deciding
    or confirming this very lead. FOR NO KEY UPDATE, so that rows that refer to the lead can still be inserted.
    """
    if not lead_ids:
        return {}
    (rows,) = yield [LOCK_LEADS(tenant=tenant_id, leads=sorted(lead_ids))]
    return {row.lead_id: row.version for row in rows}


def newest_ref(conn: sa.Connection, tenant_id: UUID, lead_id: UUID) -> str | None:
    """The id under which the CRM shows the lead now: a merge adds one, and the newest is the one it answers to."""
    c = t.lead_refs.c
    return conn.execute(
        sa.select(c.ref)
        .where(c.tenant_id == tenant_id, c.lead_id == lead_id)
        .order_by(c.created_at.desc(), c.ref)
        .limit(1)
    ).scalar_one_or_none()


LOCK_IDENTITIES = Statement(
    sa.select(t.identities.c.digest)
    .where(t.identities.c.tenant_id == _TENANT, t.identities.c.digest == one_of("digests", sa.LargeBinary()))
    .order_by(t.identities.c.digest)
    .with_for_update(key_share=True)
)


@question
def lock_identities(tenant_id: UUID, digests: Collection[bytes]) -> Asking[None]:
    """Lock these identities. After the leads, before the queues.

    Protects: one person under two lead ids at once; the second waits here and then sees the first's agent.
    """
    if not digests:
        return
    yield [LOCK_IDENTITIES(tenant=tenant_id, digests=sorted(digests))]


LOCK_QUEUES = Statement(
    sa.select(t.queues.c.queue_id)
    .where(t.queues.c.tenant_id == _TENANT, t.queues.c.queue_id == one_of("queues", sa.Uuid()))
    .order_by(t.queues.c.queue_id)
    .with_for_update(key_share=True)
)


@question
def lock_queues(tenant_id: UUID, queue_ids: Collection[UUID]) -> Asking[list[UUID]]:
    """Lock these queues' rows: the only place in the project that does. After the leads and identities.

    Protects: position, floor, ledger sequence, the members' tags and the owed turns of the queue. Everything about
    a line is read *after* this returns, in further statements: a join that waited for the lock would hand back the
    members as they were before it. Waiting is right: whoever holds the row is taking the turn before ours, and
    lock_timeout bounds it. FOR NO KEY UPDATE, so that inserts of rows that refer to the queue are not blocked.
    """
    if not queue_ids:
        return []
    (rows,) = yield [LOCK_QUEUES(tenant=tenant_id, queues=sorted(queue_ids))]
    return [row.queue_id for row in rows]


def lock_counters(conn: sa.Connection, tenant_id: UUID, agent_ids: Collection[UUID]) -> None:
    """Lock these agents' counters. Last in the lock order.

    Protects: what an agent has under their caps, which span queues. Whoever decides in another queue that shares one
    of these agents waits here, and counts only afterwards, in a further statement, what we assign. Waiting is right:
    a decision is short, and lock_timeout bounds it. Raises LookupError when an agent has no row to lock.
    """
    if not agent_ids:
        return
    c = t.agent_counters.c
    rows = conn.execute(
        sa.select(c.agent_id)
        .where(c.tenant_id == tenant_id, c.agent_id == sa.any_(sa.cast(sorted(agent_ids), sa.ARRAY(sa.Uuid))))
        .order_by(c.agent_id)
        .with_for_update(key_share=True)
    ).all()
    if len(rows) != len(set(agent_ids)):
        raise LookupError("an agent with caps has no counter to lock; apply the configuration again")


# -- reads under the locks -----------------------------------------------------------------------------------


_ROLES = Statement(
    sa.select(
        *(t.lead_roles.c[one.name] for one in fields(RoleRow) if one.name != "open_write"),
        sa.exists()
        .where(
            t.outbox.c.tenant_id == t.lead_roles.c.tenant_id,
            t.outbox.c.lead_id == t.lead_roles.c.lead_id,
            t.outbox.c.state.in_(("open", "parked")),
            t.outbox.c.kind.not_in(TELLING),
        )
        .label("open_write"),
    ).where(t.lead_roles.c.tenant_id == _TENANT, t.lead_roles.c.lead_id == one_of("leads", sa.Uuid()))
)


@question
def load_roles(tenant_id: UUID, lead_ids: Collection[UUID]) -> Asking[dict[tuple[UUID, Role], RoleRow]]:
    """Where these leads stand, and whether a write of theirs is not settled. Call with the leads locked."""
    if not lead_ids:
        return {}
    (rows,) = yield [_ROLES(tenant=tenant_id, leads=list(lead_ids))]
    found = (RoleRow(**{**row._asdict(), "role": Role(row.role)}) for row in rows)
    return {(row.lead_id, row.role): row for row in found}


@lru_cache(maxsize=1024)
def _hours(stored: str) -> Hours:
    """A timetable from its column. Most agents of a queue keep the same hours, and they are read for every lead."""
    return Hours({int(day): tuple((x, y) for x, y in spans) for day, spans in json.loads(stored).items()})


# Members and agents are read for every lead, all of a queue, and hardly one of them has changed since the last: each
# row comes as one text, and what was made of it is kept by that text. A row that changed is another text.
_KEPT = 16_384


@lru_cache(maxsize=_KEPT)
def _agent(row: str, skips: bool, capacity: bool) -> Agent:
    """An agent from the text of :func:`load_agents`."""
    agent_id, ref, name, active, refused, *rest = json.loads(row)
    more: dict[str, Any] = {}
    if skips:
        by_crm, by_admin, until, zone, leave, holidays, hours, *rest = rest
        more = {
            "paused_by_crm": by_crm,
            "paused_by_admin": by_admin,
            "paused_until": None if until is None else datetime.fromisoformat(until),
            "zone": zone,
            "hours": None if hours is None else _hours(json.dumps(hours)),
            "leave": stored.leave(leave or ()),
            "holidays": None if holidays is None else stored.holidays(holidays),
        }
    if capacity and rest[0] is not None:
        more["caps"] = Caps(**rest[0], zone=rest[1] or more.get("zone") or "UTC")
    return Agent(agent_id=UUID(agent_id), ref=ref, name=name, active=active, refused=refused, **more)


@lru_cache(maxsize=8)
def _agents(skips: bool, capacity: bool, some: bool) -> Statement:
    a, r, m, q = t.agents.c, t.agent_refs.c, t.members.c, t.queues.c
    columns: list[Any] = [a.agent_id, r.ref, a.name, a.active, a.refused_at.is_not(None)]
    if skips:
        zone = sa.func.coalesce(a.zone_by_admin, a.zone)
        columns += [a.paused_by_crm, a.paused_by_admin, a.paused_until, zone, a.leave, a.holidays, a.hours]
    if capacity:
        c = t.tenants.c
        columns += [a.caps, sa.select(c.caps_zone).where(c.tenant_id == _TENANT).scalar_subquery()]
    query = (
        sa.select(sa.cast(sa.func.jsonb_build_array(*columns), sa.Text).label("told"))
        .join(t.agent_refs, (r.tenant_id == a.tenant_id) & (r.agent_id == a.agent_id))
        .where(a.tenant_id == _TENANT)
        .order_by(r.ref)
    )
    if some:
        wanted = sa.union_all(
            sa.select(listed("agents", sa.Uuid())),
            sa.select(m.agent_id).where(m.tenant_id == _TENANT, m.queue_id == one_of("queues", sa.Uuid())),
            sa.select(q.default_agent_id).where(q.tenant_id == _TENANT, q.queue_id == one_of("queues", sa.Uuid())),
        )
        query = query.where(a.agent_id.in_(wanted))
    return Statement(query)


@question
def load_agents(
    tenant_id: UUID,
    flags: frozenset[Flag],
    agent_ids: Collection[UUID] | None = None,
    *,
    of_queues: Collection[UUID] = (),
) -> Asking[dict[UUID, Agent]]:
    """Agents as Turnlock knows them now, all or those asked for; with these those who get leads of `of_queues`."""
    if agent_ids is not None and not agent_ids and not of_queues:
        return {}
    skips, capacity = Flag.SKIPS in flags, Flag.CAPACITY in flags
    statement = _agents(skips, capacity, agent_ids is not None)
    (rows,) = yield [statement(tenant=tenant_id, agents=list(agent_ids or ()), queues=list(of_queues))]
    return {agent.agent_id: agent for agent in (_agent(row.told, skips, capacity) for row in rows)}


#: How an assignment ends that its agent never really had: it counts under no cap.
NEVER_HAD = ("void", "refused", "superseded")


def count_loads(conn: sa.Connection, tenant_id: UUID, agents: Collection[Agent], now: datetime) -> dict[UUID, Load]:
    """What the agents with caps got in the windows around `now`, and hold open, over all queues and none.

    Call with :func:`lock_counters` granted to decide by it. A lead is open while its assignment is active and the CRM,
    when it was last read, showed it in none of the tenant's closed stages.
    """
    capped = {agent.agent_id: caps.windows(agent.caps, now) for agent in agents if agent.caps is not None}
    if not capped:
        return {}
    a, f, c = t.assignments.c, t.lead_facts.c, t.tenants.c
    columns: dict[str, tuple[list[Any], Any]] = {"agent_id": (list(capped), sa.Uuid)}
    for name in caps.WINDOWS:
        for at, edge in enumerate(("start", "end")):
            columns[f"{name}_{edge}"] = ([spans[name][at] for spans in capped.values()], sa.DateTime(timezone=True))
    given = sa.func.unnest(*(sa.cast(values, sa.ARRAY(kind)) for values, kind in columns.values()))
    w = given.table_valued(*(sa.column(name, kind) for name, (_, kind) in columns.items())).render_derived("w")
    within = [
        sa.func.count().filter(a.assigned_at >= w.c[f"{name}_start"], a.assigned_at < w.c[f"{name}_end"]).label(name)
        for name in caps.WINDOWS
    ]
    rows = conn.execute(
        sa.select(w.c.agent_id, *within)
        .join(t.assignments, a.agent_id == w.c.agent_id)
        .where(
            a.tenant_id == tenant_id,
            a.state.not_in(NEVER_HAD),
            a.assigned_at >= sa.func.least(w.c.week_start, w.c.day_start, w.c.hour_start),
        )
        .group_by(w.c.agent_id)
    )
    loads = dict.fromkeys(capped, Load())
    for row in rows:
        loads[row.agent_id] = Load(row.hour, row.day, row.week)
    closed = sa.select(c.closed_stages).where(c.tenant_id == tenant_id).scalar_subquery()
    stage = sa.func.coalesce(sa.func.lower(f.facts["stage"].astext), "")
    holding = [agent.agent_id for agent in agents if agent.caps is not None and agent.caps.open is not None]
    if holding:
        held = conn.execute(
            sa.select(a.agent_id, sa.func.count(a.lead_id.distinct()).label("open"))
            .outerjoin(t.lead_facts, (f.tenant_id == a.tenant_id) & (f.lead_id == a.lead_id))
            .where(
                a.tenant_id == tenant_id,
                a.agent_id == sa.any_(sa.cast(holding, sa.ARRAY(sa.Uuid))),
                a.state == "active",
                sa.not_(closed.bool_op("?")(stage)),
            )
            .group_by(a.agent_id)
        )
        for row in held:
            loads[row.agent_id] = replace(loads[row.agent_id], open=row.open)
    return loads


@lru_cache(maxsize=_KEPT)
def _place(row: str) -> Place:
    """A member's place from the text of :func:`load_queues`."""
    agent_id, rank, tag, last, weight, *averaging = row.split(" ")
    return Place(UUID(agent_id), int(rank), int(weight), int(tag), int(last), averaging == ["t"])


@lru_cache(maxsize=8)
def _lines(turning: bool, weighted: bool, skipping: bool) -> tuple[Statement, Statement, Statement]:
    """Members, owed turns and the queues themselves."""
    q, m, o, lr = t.queues.c, t.members.c, t.owed_turns.c, t.lead_roles.c
    columns: list[Any] = [m.agent_id, m.rank]
    columns += [m.tag, m.last_turn] if turning else [sa.literal_column("0"), sa.literal_column("0")]
    columns += [m.weight if weighted else sa.literal_column("1")]
    columns += [m.averaging] if skipping else []
    # Who joined while the rotation was off has no tag; the flag's `on` brings them into the line.
    in_line = [m.tag.is_not(None)] if turning else []
    by_rank: sa.ColumnElement[str] = aggregate_order_by(sa.literal_column("','"), m.rank)
    line = sa.func.string_agg(sa.func.concat_ws(" ", *columns), by_rank).label("line")
    # Of owners alone: a lead that has its owner and waits for a collaborator holds no other lead up.
    of_owners = sa.and_(lr.role == Role.OWNER.value, lr.state == "held")
    holding = sa.exists().where(lr.tenant_id == q.tenant_id, of_owners).label("held")
    wide: list[Any] = [q.queue_id, q.name, q.when_nobody, q.fallback_queue_id, q.default_agent_id, q.next_rank, holding]
    wide += [q.position, q.floor] if turning else []
    wide += [q.quiet_hours, q.skip_policy] if skipping else []
    return (
        Statement(
            sa.select(m.queue_id, line)
            .where(m.tenant_id == _TENANT, m.queue_id == one_of("queues", sa.Uuid()), *in_line)
            .group_by(m.queue_id)
        ),
        Statement(
            sa.select(o.queue_id, o.owed_id, o.agent_id, o.kind)
            .where(o.tenant_id == _TENANT, o.queue_id == one_of("queues", sa.Uuid()))
            .order_by(o.kind, o.seq)  # give_next before owed, each oldest first
        ),
        Statement(sa.select(*wide).where(q.tenant_id == _TENANT, q.queue_id == one_of("queues", sa.Uuid()))),
    )


@question
def load_queues(tenant_id: UUID, flags: frozenset[Flag], queue_ids: Collection[UUID]) -> Asking[dict[UUID, QueueState]]:
    """Queues with their lines. Call with :func:`lock_queues` granted, or for showing only."""
    if not queue_ids:
        return {}
    turning, weighted, skipping = (flag in flags for flag in (Flag.ROTATION, Flag.WEIGHTS, Flag.SKIPS))
    wanted = {"tenant": tenant_id, "queues": list(queue_ids)}
    of_members, of_owed, of_queues = (one(**wanted) for one in _lines(turning, weighted, skipping))
    members, queues, *more = yield [of_members, of_queues, *([of_owed] if turning else [])]
    places: dict[UUID, list[Place]] = {queue_id: [] for queue_id in queue_ids}
    for row in members:
        places[row.queue_id] = [_place(one) for one in row.line.split(",")]
    owed: dict[UUID, list[Owed]] = {}
    for row in more[0] if more else ():
        owed.setdefault(row.queue_id, []).append(Owed(row.owed_id, row.agent_id, OwedKind(row.kind)))
    found = {}
    for row in queues:
        found[row.queue_id] = QueueState(
            queue_id=row.queue_id,
            name=row.name,
            line=Line(
                position=row.position if turning else 0,
                floor=row.floor if turning else 0,
                places=tuple(places[row.queue_id]),
                owed=tuple(owed.get(row.queue_id, ())),
            ),
            when_nobody=WhenNobody(row.when_nobody),
            fallback_queue_id=row.fallback_queue_id,
            default_agent_id=row.default_agent_id,
            held=row.held,
            next_rank=row.next_rank,
            quiet=stored.quiet(row.quiet_hours) if skipping and row.quiet_hours else None,
            policies=stored.policies(row.skip_policy) if skipping else {},
        )
    return found
