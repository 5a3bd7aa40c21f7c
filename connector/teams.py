"""Teams and groups of the CRM as templates for queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from adapters.base import Capability, Team
from connector import config as yaml_config
from connector import configuration, oauth
from connector.config_model import Config, Member, QueueConfig
from connector.database import at_rest
from connector.errors import NotFound, TurnlockError
from connector.runtime import Runtime, Tenant
from routing import tables as t


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
