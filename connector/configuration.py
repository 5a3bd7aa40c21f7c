"""Applying a tenant's configuration: one transaction, each version kept, lines moved by ledger entries only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from connector import config as yaml_config
from connector import config_kept, team_lines, work
from connector.config_kept import canonical, rules_kept
from connector.config_lines import follows, lines_of, members_of, ranks_agents, stored_entries, target_line
from connector.config_model import (
    RETURNS_PER_DAY,
    Config,
    ConfigTarget,
    KnownAgent,
    KnownTeam,
    Member,
    QueueConfig,
    RuleConfig,
)
from connector.database import new_id, unit
from connector.errors import NotFound, TurnlockError
from connector.runtime import Runtime, Tenant
from connector.tables import config_versions
from connector.wording import Wording
from routing import rotation, saving, store, stored
from routing import tables as t
from routing.conditions import in_zone
from routing.ledger import Kind
from routing.model import Flag, TargetKind


@dataclass(frozen=True, slots=True)
class Applied:
    """What an apply did. `changed` is False when the meaning is that of the version in force: nothing happened."""

    version: int
    changed: bool
    warnings: tuple[str, ...] = field(default=())


def known_agents(conn: sa.Connection, tenant_id: UUID) -> list[KnownAgent]:
    """Everyone whom a configuration may name."""
    a, r = t.agents.c, t.agent_refs.c
    rows = conn.execute(
        sa.select(a.agent_id, r.ref, a.email, a.name)
        .join(t.agent_refs, (r.tenant_id == a.tenant_id) & (r.agent_id == a.agent_id))
        .where(a.tenant_id == tenant_id)
        .order_by(a.name, r.ref)
    )
    return [KnownAgent(*row) for row in rows]


def known_teams(runtime: Runtime, conn: sa.Connection, tenant_id: UUID) -> Sequence[KnownTeam] | None:
    """The CRM's teams that a configuration may follow; None while the database cannot keep any."""
    return team_lines.Teams.load(conn, tenant_id, ()).known if Flag.TEAMS in runtime.stages(conn) else None


def current(conn: sa.Connection, tenant_id: UUID, version: int | None = None) -> tuple[int, str] | None:
    """The newest version and its document, or the one asked for; None when there is none."""
    c = config_versions.c
    query = sa.select(c.version, c.document).where(c.tenant_id == tenant_id).order_by(c.version.desc()).limit(1)
    if version is not None:
        query = query.where(c.version == version)
    row = conn.execute(query).one_or_none()
    return (row.version, row.document) if row else None


def starter(conn: sa.Connection, tenant_id: UUID) -> str:
    """A first configuration to edit: one queue with every active agent. Nothing is applied."""
    a = t.agents.c
    active = set(conn.execute(sa.select(a.agent_id).where(a.tenant_id == tenant_id, a.active)).scalars())
    agents = known_agents(conn, tenant_id)
    everyone = tuple(Member(x.agent_id) for x in agents if x.agent_id in active)
    config = Config(default_queue="Everyone", queues=(QueueConfig("Everyone", everyone),))
    return yaml_config.export(config, agents)


def apply(runtime: Runtime, tenant: Tenant, text: str | bytes, actor: str, note: str | None = None) -> Applied:
    """Check and apply a whole configuration. Raises :class:`connector.config.ConfigProblems`; then nothing changed.

    A save without a change of meaning bumps no version. Members keep their places: adding, removing and re-weighting
    never reset anyone. `note` is kept with the version.
    """
    with unit(runtime.engine) as (conn, now):
        done, config = carry_out(runtime, conn, tenant, text, actor, note, now)
    if done.changed:
        runtime.wake()
    return replace(done, warnings=_warnings(config))


def edit(runtime: Runtime, tenant: Tenant, change: Callable[[Config], Config], actor: str, why: str) -> Applied:
    """Apply what `change` makes of the configuration in force, as a new version; `why` goes into the ledgers it moves.

    The version is written out as :func:`connector.config.export` does, so an export stays true, without comments.
    Raises like :func:`apply`, what `change` raises, and :class:`TurnlockError` while there is no configuration yet.
    """
    with unit(runtime.engine) as (conn, now):
        hold(conn, tenant.tenant_id)
        agents = known_agents(conn, tenant.tenant_id)
        stored_text = current(conn, tenant.tenant_id)
        if stored_text is None:
            raise TurnlockError(
                f"{tenant.name!r} has no configuration yet; `turnlock config apply` makes the first one"
            )
        before = yaml_config.parse(stored_text[1], known_agents=agents, capabilities=_capabilities(tenant))
        # Written out and read back: whatever a file could not say is refused here, too.
        document = yaml_config.export(change(before), agents)
        done, config = carry_out(runtime, conn, tenant, document, actor, why, now, moves_say=why)
    if done.changed:
        runtime.wake()
    return replace(done, warnings=_warnings(config))


@dataclass(frozen=True, slots=True)
class Who:
    """Who changes a configuration, and why where they said so."""

    actor: str
    why: str | None = None


def _capabilities(tenant: Tenant) -> frozenset[str]:
    return frozenset(c.value for c in tenant.adapter.capabilities)


def hold(conn: sa.Connection, tenant_id: UUID) -> int:
    """Hold the configuration still until the transaction ends; gives the version in force."""
    c = t.tenants.c
    # First in the lock order: two applies take turns, and a unit that holds the row shared finishes before us.
    query = sa.select(c.config_version).where(c.tenant_id == tenant_id).with_for_update(key_share=True)
    return int(conn.execute(query).scalar_one())


def carry_out(
    runtime: Runtime,
    conn: sa.Connection,
    tenant: Tenant,
    text: str | bytes,
    actor: str,
    note: str | None,
    now: datetime,
    *,
    moves_say: str | None = None,
) -> tuple[Applied, Config]:
    """All of :func:`apply` on the caller's transaction; a rehearsal takes it back instead of committing.

    `moves_say` is the reason that goes into the ledgers.
    """
    tenant_id, stages = tenant.tenant_id, runtime.stages(conn)
    held = hold(conn, tenant_id)
    agents = known_agents(conn, tenant_id)
    teams = known_teams(runtime, conn, tenant_id)
    capabilities = _capabilities(tenant)
    config = yaml_config.parse(text, known_agents=agents, capabilities=capabilities, known_teams=teams)
    _refuse_beyond_schema(runtime, conn, config)
    digest = yaml_config.digest(config)
    c, v = t.tenants.c, config_versions.c
    before = conn.execute(sa.select(v.digest).where(v.tenant_id == tenant_id, v.version == held)).scalar_one_or_none()
    if before is not None and bytes(before) == digest:
        return Applied(held, False), config
    queue_ids = _queues(runtime, conn, tenant_id, config, Who(actor, moves_say), now)
    if Flag.RULES in stages:
        _rules(conn, tenant_id, config, queue_ids)
    if Flag.SKIPS in stages:
        _agent_facts(conn, tenant_id, config)
    if Flag.CAPACITY in stages:
        _caps(conn, tenant_id, config)
    document = text.decode("utf-8") if isinstance(text, bytes) else text
    more: dict[str, Any] = {"rules": rules_kept(config)} if runtime.tells(conn) else {}
    more |= {"canonical": canonical(config, agents), "note": note} if runtime.keeps_why(conn) else {}
    conn.execute(
        sa.insert(config_versions).values(
            tenant_id=tenant_id, version=held + 1, document=document, digest=digest, actor=actor, **more
        )
    )
    definition, same = config.unassigned, tenant.adapter.canonical_ref
    values: dict[str, Any] = {
        "config_version": held + 1,
        "default_queue_id": queue_ids[config.default_queue] if config.default_queue else None,
        "released": config.released.value,
        "unassigned": {
            "users": sorted({same(ref) for ref in definition.user_refs}),
            "ponds": sorted({same(ref) for ref in definition.pond_refs}),
            "unclaimed": definition.include_unclaimed,
        },
    }
    if Flag.HOUSEHOLDS in stages:
        values["country"] = config.country
        work.want(conn, tenant_id, "identities")
    if Flag.CREDITS in stages:
        values["returns_per_day"] = config.returns_per_day
    if Flag.SETTLE in stages:
        values["settle"] = config.settle.as_json()
    if runtime.keeps_wording(conn):
        values["wording"] = config.wording.as_json()
    conn.execute(sa.update(t.tenants).where(c.tenant_id == tenant_id).values(**values))
    work.want(conn, tenant_id, "held")
    work.want(conn, tenant_id, "sweep")
    return Applied(held + 1, True), config


def _warnings(config: Config) -> tuple[str, ...]:
    # After the commit: looking for overlaps among hundreds of rules takes seconds, too long to hold the tenant's row.
    return tuple(str(found) for found in yaml_config.warnings(config))


def rollback(runtime: Runtime, tenant: Tenant, version: int | None, actor: str) -> Applied:
    """Apply an earlier version's configuration as a new version; None: the one before that in force.

    Through the ordinary apply, so that lines move by the ledger's rules alone: nobody is reset. Raises
    :class:`connector.errors.NotFound` when there is no such version.
    """
    with runtime.engine.connect() as conn:
        text, number = earlier(runtime, conn, tenant, version)
    return apply(runtime, tenant, text, actor, f"rollback to version {number}")


def earlier(runtime: Runtime, conn: sa.Connection, tenant: Tenant, version: int | None) -> tuple[str, int]:
    """The text of an earlier version as it must be applied today, and its number."""
    if version is None:
        version = config_kept.in_force(conn, tenant.tenant_id) - 1
        if version < 1:
            raise NotFound(f"{tenant.name!r} has no version before the one in force")
    found = config_kept.kept(runtime, conn, tenant, version)
    return config_kept.text_again(found, known_agents(conn, tenant.tenant_id)), version


def _refuse_beyond_schema(runtime: Runtime, conn: sa.Connection, config: Config) -> None:
    """A part of the configuration whose columns do not exist yet would be lost in silence."""
    stages = runtime.stages(conn)
    needs = {
        Flag.RULES: bool(config.rules),
        Flag.WEIGHTS: any(entry.weight != 1 for line in lines_of(config).values() for entry in line.entries),
        Flag.HOUSEHOLDS: config.country is not None
        or any(target.kind is TargetKind.SAME_HOUSEHOLD for rule in config.rules for target in rule.targets),
        Flag.SKIPS: bool(config.agents) or any(q.quiet_hours or q.skip_policy for q in config.queues),
        Flag.CAPACITY: config.caps_zone is not None or any(facts.caps for facts in config.agents.values()),
        Flag.CREDITS: config.returns_per_day != RETURNS_PER_DAY,
        Flag.SETTLE: bool(config.settle),
        Flag.TEAMS: bool(config.teams) or any(ranks_agents(rule) for rule in config.rules),
    }
    missing = [flag.value for flag, needed in needs.items() if needed and flag not in stages]
    if config.wording != Wording() and not runtime.keeps_wording(conn):
        missing.append("language, note or task")
    if missing:
        raise TurnlockError(
            f"this configuration uses {', '.join(missing)}, which the database lacks; run `turnlock migrate`"
        )


def _rules(conn: sa.Connection, tenant_id: UUID, config: Config, queue_ids: dict[str, UUID]) -> None:
    def target(rule: RuleConfig, one: ConfigTarget) -> dict[str, str]:
        line = target_line(rule, one)
        found = queue_ids[line] if line else one.agent_id
        return {"kind": one.kind.value} | ({"id": str(found)} if found else {})

    conn.execute(sa.delete(t.rules).where(t.rules.c.tenant_id == tenant_id))
    rows = [
        {
            "tenant_id": tenant_id,
            "name": rule.name,
            "role": rule.role.value,
            "precedence": number,
            "condition": dict(in_zone(rule.when, config.zone)),
            "targets": [target(rule, one) for one in rule.targets],
        }
        for number, rule in enumerate(config.rules, 1)
    ]
    if rows:
        conn.execute(sa.insert(t.rules), rows)


def _agent_facts(conn: sa.Connection, tenant_id: UUID, config: Config) -> None:
    a = t.agents.c
    none = dict.fromkeys(("hours", "zone_by_admin", "leave", "holidays"))
    conn.execute(sa.update(t.agents).where(a.tenant_id == tenant_id).values(**none))
    for agent_id, facts in config.agents.items():
        values: dict[str, Any] = {}
        if facts.zone is not None:
            values["zone_by_admin"] = facts.zone
        if facts.hours is not None:
            values["hours"] = stored.hours_json(facts.hours)
        if facts.leave:
            values["leave"] = stored.leave_json(facts.leave)
        if facts.holidays is not None:
            values["holidays"] = stored.holidays_json(facts.holidays)
        if values:
            conn.execute(sa.update(t.agents).where(a.tenant_id == tenant_id, a.agent_id == agent_id).values(**values))


def _caps(conn: sa.Connection, tenant_id: UUID, config: Config) -> None:
    """Caps, and a counter to lock for each agent who has some. Call with the queues locked: whoever decides reads the
    caps of members under such a lock."""
    a, c = t.agents.c, t.tenants.c
    closed = sorted(stage.lower() for stage in config.closed_stages)
    tenant = sa.update(t.tenants).where(c.tenant_id == tenant_id)
    conn.execute(tenant.values(caps_zone=config.caps_zone, closed_stages=closed))
    conn.execute(sa.update(t.agents).where(a.tenant_id == tenant_id).values(caps=None))
    capped = {agent_id: facts.caps for agent_id, facts in config.agents.items() if facts.caps is not None}
    for agent_id, caps in capped.items():
        of_agent = sa.and_(a.tenant_id == tenant_id, a.agent_id == agent_id)
        conn.execute(sa.update(t.agents).where(of_agent).values(caps=stored.caps_json(caps)))
    if capped:
        # In order of id, as they are locked.
        rows = [{"tenant_id": tenant_id, "agent_id": agent_id} for agent_id in sorted(capped)]
        conn.execute(insert(t.agent_counters).on_conflict_do_nothing(), rows)


# -- queues, members and their lines -----------------------------------------------------------------------------


def _queues(
    runtime: Runtime, conn: sa.Connection, tenant_id: UUID, config: Config, who: Who, now: datetime
) -> dict[str, UUID]:
    """All lines and their members as configured; gives their ids by name. Calls the one queue lock for all at once."""
    stages = runtime.stages(conn)
    q = t.queues.c
    rows = conn.execute(sa.select(q.queue_id, q.name).where(q.tenant_id == tenant_id)).all()
    ids = {row.name: row.queue_id for row in rows}
    wanted = lines_of(config)
    for name in wanted:
        if name not in ids:
            ids[name] = new_id()
            conn.execute(sa.insert(t.queues).values(tenant_id=tenant_id, queue_id=ids[name], name=name))
    nested = {entry.line for line in wanted.values() for entry in line.entries if entry.line is not None}
    team_lines.take_places(conn, tenant_id, {name: ids[name] for name in nested})
    house = config.unassigned.user_refs
    teams = team_lines.Teams.load(conn, tenant_id, house) if Flag.TEAMS in stages else team_lines.Teams()
    store.lock_queues(conn, tenant_id, list(ids.values()))
    flags = store.tenant_row(conn, tenant_id).flags
    for name, queue_id in ids.items():
        line = wanted.get(name)
        configured = None if line is None else line.queue or QueueConfig(name)
        entries = [] if line is None else stored_entries(line.entries, ids, teams.named)
        values: dict[str, Any] = {"active": configured is not None}
        if Flag.TEAMS in stages:
            values["follows"] = entries if follows(entries) else None
        if configured is not None:
            policy = configured.when_nobody
            values |= {
                "when_nobody": policy.kind.value,
                "fallback_queue_id": ids[policy.queue] if policy.queue else None,
                "default_agent_id": policy.agent_id,
            }
            if Flag.SKIPS in stages:
                quiet = configured.quiet_hours
                values |= {
                    "quiet_hours": None if quiet is None else stored.quiet_json(quiet),
                    "skip_policy": {skip.value: cost.value for skip, cost in configured.skip_policy.items()},
                }
        conn.execute(sa.update(t.queues).where(q.tenant_id == tenant_id, q.queue_id == queue_id).values(**values))
        members = members_of(entries, teams.agents_in)
        set_members(conn, tenant_id, queue_id, members, stages=stages, flags=flags, who=who, now=now)
    return {name: ids[name] for name in wanted}


def follow_teams(runtime: Runtime, conn: sa.Connection, tenant_id: UUID, now: datetime) -> int:
    """Let the lines that follow teams of the CRM have their members now; how many moved. No version is made."""
    if not team_lines.out_of_step(conn, tenant_id):
        return 0
    # First in the lock order: an apply that changes what a line follows is over before we look, or waits for us.
    hold(conn, tenant_id)
    moved = team_lines.out_of_step(conn, tenant_id)
    store.lock_queues(conn, tenant_id, moved)
    stages, flags = runtime.stages(conn), store.tenant_row(conn, tenant_id).flags
    who = Who("turnlock", "the members of a team in the CRM changed")
    for queue_id in sorted(moved):
        set_members(conn, tenant_id, queue_id, moved[queue_id], stages=stages, flags=flags, who=who, now=now)
    return len(moved)


def set_members(
    conn: sa.Connection,
    tenant_id: UUID,
    queue_id: UUID,
    weights: Mapping[UUID, int],
    *,
    stages: frozenset[Flag],
    flags: frozenset[Flag],
    who: Who,
    now: datetime,
) -> None:
    """Make these (in order of rank, with their weights) the members of a line, by ledger entries. Call with it locked.

    Leavers leave with the turns they are owed, re-weighted members keep their lag, joiners join at the back in the
    order given. The order of those who stay is not touched: a save must never cost anyone their place.
    """
    m = t.members.c
    of_queue = sa.and_(m.tenant_id == tenant_id, m.queue_id == queue_id)
    begun = Flag.ROTATION in stages and has_ledger(conn, tenant_id, queue_id)
    if begun:  # a line is kept while the rotation is off, too, so that it goes on where it stands
        flags = flags | {Flag.ROTATION}
    state = store.load_queues(conn, tenant_id, flags, [queue_id])[queue_id]
    ranks = {row.agent_id: row.rank for row in conn.execute(sa.select(m.agent_id, m.rank).where(of_queue))}
    present = set(ranks)
    moves = saving.Moves(state.line, state.next_rank, who.actor)
    if begun:
        move_members(moves, weights, who.why, weighted=Flag.WEIGHTS in flags)
    else:
        start_line(moves, [(a, ranks.get(a), w if Flag.WEIGHTS in flags else 1) for a, w in weights.items()])
    if leavers := present - weights.keys():
        conn.execute(sa.delete(t.members).where(of_queue, m.agent_id.in_(leavers)))
    ranks = {place.agent_id: place.rank for place in moves.line.places}
    if newcomers := [agent_id for agent_id in weights if agent_id not in present]:
        conn.execute(
            sa.insert(t.members),
            [{"tenant_id": tenant_id, "queue_id": queue_id, "agent_id": a, "rank": ranks[a]} for a in newcomers],
        )
    if Flag.WEIGHTS in stages:
        for agent_id, weight in weights.items():
            conn.execute(sa.update(t.members).where(of_queue, m.agent_id == agent_id).values(weight=weight))
    if Flag.ROTATION in flags:
        saving.save_lines(conn, tenant_id, {queue_id: state}, {queue_id: moves.line}, {queue_id: moves.drafts}, now)
    else:
        q = t.queues.c
        conn.execute(
            sa.update(t.queues)
            .where(q.tenant_id == tenant_id, q.queue_id == queue_id)
            .values(next_rank=moves.next_rank)
        )


def move_members(moves: saving.Moves, weights: Mapping[UUID, int], why: str | None = None, *, weighted: bool) -> None:
    """Leavers leave, the re-weighted are re-weighted, joiners join: in that order, so that joiners see the rest."""
    for place in moves.line.places:
        weight = weights.get(place.agent_id)
        if weight is None:
            moves.do(Kind.LEAVE, why, agent=str(place.agent_id))
        elif weighted and weight != place.weight:
            reweight(moves, place, weight, why)
    standing = {place.agent_id for place in moves.line.places}
    for agent_id, weight in weights.items():
        if agent_id not in standing:
            moves.do(Kind.JOIN, why, agent=str(agent_id), rank=moves.rank(), weight=weight if weighted else 1)


def reweight(moves: saving.Moves, place: rotation.Place, weight: int, why: str | None = None) -> None:
    """Give a member another weight; from 0 they go to the back, for which a rank is given out."""
    if place.weight == 0 and weight:
        moves.do(Kind.REWEIGHT, why, agent=str(place.agent_id), weight=weight, rank=moves.rank())
    else:
        moves.do(Kind.REWEIGHT, why, agent=str(place.agent_id), weight=weight)


def start_line(moves: saving.Moves, members: Sequence[tuple[UUID, int | None, int]]) -> None:
    """Begin the line of a queue that never turned: (agent, rank if any, weight), everyone at tag 0, in that order."""
    places = tuple(
        rotation.Place(agent_id, moves.rank() if rank is None else rank, weight) for agent_id, rank, weight in members
    )
    moves.line = rotation.Line(position=0, floor=0, places=places)
    moves.do(Kind.CHECKPOINT)


def has_ledger(conn: sa.Connection, tenant_id: UUID, queue_id: UUID) -> bool:
    """Whether this queue ever turned."""
    c = t.ledger.c
    return conn.execute(sa.select(sa.exists().where(c.tenant_id == tenant_id, c.queue_id == queue_id))).scalar_one()
