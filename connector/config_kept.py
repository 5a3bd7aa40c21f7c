"""Every applied version of a configuration: who applied it and when, what it said, and what it meant.

A version is kept as the text that was applied and once more in one spelling with every agent by Turnlock's own id, so
that it can be read for ever, whatever an agent is called in the CRM by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from adapters.base import Capability
from connector import config as yaml_config
from connector.config_model import Config, KnownAgent
from connector.config_yaml import ConfigProblems
from connector.errors import NotFound, TurnlockError
from connector.runtime import Runtime, Tenant
from connector.tables import config_versions
from routing import tables as t
from routing.conditions import in_zone

_ALL = frozenset(capability.value for capability in Capability)


@dataclass(frozen=True, slots=True)
class Kept:
    """One applied version. ``document`` is the text as applied; ``canonical`` is None for one of an early Turnlock."""

    version: int
    document: str
    digest: bytes
    actor: str
    applied_at: datetime
    canonical: str | None = None
    note: str | None = None


def canonical(config: Config, agents: Iterable[KnownAgent]) -> str:
    """`config` in one spelling, with every agent by Turnlock's own id."""
    return yaml_config.export(config, _by_id(agents))


def rules_kept(config: Config) -> list[dict[str, Any]]:
    """The rules of `config` in order, JSON-safe: what :class:`connector.past_rules.PastRules` reads."""
    return [
        {"name": rule.name, "role": rule.role.value, "when": dict(in_zone(rule.when, config.zone))}
        for rule in config.rules
    ]


def _by_id(agents: Iterable[KnownAgent]) -> list[KnownAgent]:
    return [KnownAgent(agent.agent_id, str(agent.agent_id), None, agent.name) for agent in agents]


def versions(runtime: Runtime, conn: sa.Connection, tenant_id: UUID) -> list[Kept]:
    """Every version of a tenant, newest first."""
    return _read(runtime, conn, tenant_id, sa.true())


def kept(runtime: Runtime, conn: sa.Connection, tenant: Tenant, version: int) -> Kept:
    """One version. Raises :class:`NotFound` that says which there are."""
    found = _read(runtime, conn, tenant.tenant_id, config_versions.c.version == version)
    if not found:
        newest = conn.execute(
            sa.select(sa.func.max(config_versions.c.version)).where(config_versions.c.tenant_id == tenant.tenant_id)
        ).scalar_one()
        there = f"there are 1 to {newest}" if newest else "there is none yet"
        raise NotFound(f"{tenant.name!r} has no version {version}; {there}")
    return found[0]


def _read(runtime: Runtime, conn: sa.Connection, tenant_id: UUID, which: sa.ColumnElement[bool]) -> list[Kept]:
    c = config_versions.c
    columns = [c.version, c.document, c.digest, c.actor, c.applied_at]
    if runtime.keeps_why(conn):
        columns += [c.canonical, c.note]
    query = sa.select(*columns).where(c.tenant_id == tenant_id, which).order_by(c.version.desc())
    return [Kept(row[0], row[1], bytes(row[2]), *row[3:]) for row in conn.execute(query)]


def in_force(conn: sa.Connection, tenant_id: UUID) -> int:
    """The version in force, 0 before the first."""
    c = t.tenants.c
    return int(conn.execute(sa.select(c.config_version).where(c.tenant_id == tenant_id)).scalar_one())


def config_of(version: Kept, agents: Iterable[KnownAgent]) -> Config:
    """What a kept version means: its rules, queues and members, with `agents` as they are called now.

    Raises :class:`TurnlockError` for a version that was kept by names alone and names somebody who is gone.
    """
    agents = list(agents)
    if version.canonical is not None:
        return yaml_config.parse(version.canonical, known_agents=_by_id(agents), capabilities=_ALL)
    try:
        return yaml_config.parse(version.document, known_agents=agents, capabilities=_ALL)
    except ConfigProblems as error:
        raise TurnlockError(
            f"version {version.version} cannot be read any more, because agents are called otherwise now; print it "
            f"with `turnlock config export --version {version.version}`, mend it and apply it\n{error}"
        ) from None


def text_again(version: Kept, agents: Iterable[KnownAgent]) -> str:
    """A text that means today what `version` meant: its own, comments and all, if it still does."""
    agents = list(agents)
    try:
        same = yaml_config.parse(version.document, known_agents=agents, capabilities=_ALL)
        if yaml_config.digest(same) == version.digest:
            return version.document
    except ConfigProblems:
        pass
    return yaml_config.export(config_of(version, agents), agents)
