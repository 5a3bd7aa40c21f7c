"""Teams and groups of the CRM: kept in step with the lines that follow them, and as templates for queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from adapters.base import Capability, Team
from adapters.outcome import CrmError
from connector import config as yaml_config
from connector import configuration, log, oauth, team_lines, work
from connector.alarms import close_alarm, open_alarm
from connector.config_model import Config, Member, QueueConfig
from connector.database import at_rest, unit
from connector.errors import NotFound, TurnlockError
from connector.naming import Json, Names
from connector.runtime import Runtime, Tenant
from routing import store
from routing import tables as t
from routing.model import Flag

_log = log.get("teams")


def sync_teams(runtime: Runtime, tenant: Tenant) -> int:
    """Read the CRM's teams, store them and let the lines that follow them do so; how many lines moved.

    Call after the agents were read. Nothing is done where the CRM has no teams or the database lacks their stage. A
    CRM that refuses is an error only if a line follows it.
    """
    tenant_id = tenant.tenant_id
    with at_rest(runtime.engine) as conn:
        if Capability.TEAMS not in tenant.adapter.capabilities or Flag.TEAMS not in runtime.stages(conn):
            return 0
        followed = team_lines.following(conn, tenant_id)
    try:
        found = list(tenant.adapter.list_teams(oauth.client(runtime, tenant)))
    except CrmError as error:
        if followed:
            raise
        _log.info("teams cannot be read", tenant=tenant.name, outcome=error.outcome.value)
        return 0
    with unit(runtime.engine) as (conn, now):
        team_lines.keep_teams(conn, tenant_id, found, now)
        teams = team_lines.Teams.load(conn, tenant_id)
        wanted = [entry for entries in followed.values() for entry in entries if "team" in entry]
        there = {entry["named"]: teams.ref(entry) is not None for entry in wanted}
        for name in sorted(there):
            if there[name]:
                close_alarm(conn, tenant_id, "team_gone", name)
            else:
                text = "the CRM has this team no more; its last members go on. Name another team in the configuration"
                open_alarm(conn, tenant_id, "team_gone", name, text)
        if all(there.values()):
            close_alarm(conn, tenant_id, "team_gone")  # also of teams that nothing follows any more
    with unit(runtime.engine) as (conn, now):
        if Flag.TEAMS not in store.tenant_row(conn, tenant_id).flags:
            return 0
        moved = configuration.follow_teams(runtime, conn, tenant_id, now)
        if moved:
            work.want(conn, tenant_id, "held")  # somebody may have joined
    if moved:
        runtime.wake(tenant_id)
    return moved


def shown(runtime: Runtime, tenant: Tenant) -> list[Json]:
    """The CRM's teams as they were read last, with who is in each and the lines that follow it, JSON-safe."""
    tenant_id = tenant.tenant_id
    with runtime.engine.connect() as conn:
        if Flag.TEAMS not in runtime.stages(conn):
            return []
        names, teams = Names.load(conn, tenant_id), team_lines.Teams.load(conn, tenant_id)
        lines: dict[str | None, list[str | None]] = {}
        for queue_id, entries in team_lines.following(conn, tenant_id).items():
            for ref in {teams.ref(entry) or entry["team"] for entry in entries if "team" in entry}:
                lines.setdefault(ref, []).append(names.queue(queue_id))
    return [
        {
            "ref": team.ref,
            "name": team.name,
            "agents": [names.agent(agent_id) for agent_id in teams.agents[team.ref]],
            "lines": sorted(filter(None, lines.get(team.ref, ()))),
            "gone": team.gone,
        }
        for team in teams.known
    ]


@dataclass(frozen=True, slots=True)
class Imported:
    """Queues made of teams, as the part of a configuration that holds them.

    `present` are names of teams that a queue of the configuration in force has already; `unknown` counts agents in
    teams whom Turnlock has not read yet.
    """

    text: str
    queues: tuple[str, ...]
    present: tuple[str, ...]
    unknown: int


def as_queues(runtime: Runtime, tenant: Tenant, only: Sequence[str] = ()) -> Imported:
    """The CRM's teams (of these names, or all) as queues of their active agents. Nothing is applied.

    Raises :class:`TurnlockError` where the CRM has no teams, :class:`NotFound` for a name that no team has.
    """
    if Capability.TEAMS not in tenant.adapter.capabilities:
        raise TurnlockError(f"{tenant.crm} has no teams that Turnlock can read; write the queues by hand")
    found = list(tenant.adapter.list_teams(oauth.client(runtime, tenant)))
    if missing := sorted(set(only) - {team.name for team in found}):
        there = ", ".join(sorted({team.name for team in found})) or "none"
        raise NotFound(f"no team {missing[0]!r} in the CRM; there are: {there}")
    wanted = [team for team in found if not only or team.name in only]
    with at_rest(runtime.engine) as conn:
        agents = configuration.known_agents(conn, tenant.tenant_id)
        q = t.queues.c
        taken = set(conn.execute(sa.select(q.name).where(q.tenant_id == tenant.tenant_id)).scalars())
    by_ref = {agent.ref: agent.agent_id for agent in agents}
    names = _names(wanted)
    queues = tuple(
        QueueConfig(name, tuple(Member(by_ref[ref]) for ref in team.agent_refs if ref in by_ref))
        for name, team in zip(names, wanted, strict=True)
        if name not in taken
    )
    unknown = {ref for team in wanted for ref in team.agent_refs} - by_ref.keys()
    text = yaml_config.export(Config(queues=queues), agents)
    part = text[text.index("queues:") :] if queues else ""
    present = tuple(name for name in names if name in taken)
    return Imported(part, tuple(queue.name for queue in queues), present, len(unknown))


def _names(teams: Sequence[Team]) -> list[str]:
    """One name per team: where several have the same, each with its id."""
    plain = [" ".join(team.name.split())[:100] for team in teams]
    return [
        name if plain.count(name) == 1 else f"{name[:60]} ({team.ref})" for name, team in zip(plain, teams, strict=True)
    ]
