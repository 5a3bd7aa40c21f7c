"""A configuration tried before it is used: applied in a transaction that is taken back, so it cannot tell otherwise.

What a plan says and what a replay decides by comes from the very code that applies. Its locks are those of an apply,
held for as long; then everything is as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector import config_kept
from connector.config_diff import Change, changes
from connector.config_model import Config, KnownAgent
from connector.configuration import carry_out, hold, known_agents
from connector.database import unit
from connector.runtime import Runtime, Tenant
from routing import store
from routing import tables as t
from routing.decide import Plan, QueueState
from routing.model import Agent, Flag, Load


@dataclass(frozen=True, slots=True)
class Move:
    """A ledger entry that applying would write."""

    queue_id: UUID
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Draft:
    """What applying a configuration would come to.

    ``before`` and ``after`` hold the lines of all queues, ``loads`` what the agents with caps have under them.
    """

    version: int
    changed: bool
    config: Config
    before_config: Config | None
    known: Sequence[KnownAgent]
    row: store.TenantRow
    plan: Plan
    agents: Mapping[UUID, Agent]
    loads: Mapping[UUID, Load]
    before: Mapping[UUID, QueueState]
    after: Mapping[UUID, QueueState]
    moves: Sequence[Move]

    @property
    def changes(self) -> list[Change]:
        """How the configuration differs from the one in force."""
        return changes(self.before_config, self.config, self.known)


def rehearse(runtime: Runtime, tenant: Tenant, text: str | bytes) -> Draft:
    """Apply `text`, look at what came of it, and take it back. Raises :class:`connector.config.ConfigProblems`."""
    tenant_id = tenant.tenant_id
    with unit(runtime.engine) as (conn, now):
        # The locks of the apply itself, in its order, so that the lines do not move between before and after.
        hold(conn, tenant_id)
        store.lock_queues(conn, tenant_id, _queue_ids(conn, tenant_id))
        old = store.tenant_row(conn, tenant_id)
        before = store.load_queues(conn, tenant_id, old.flags, _queue_ids(conn, tenant_id))
        seqs = _seqs(runtime, conn, tenant_id)
        before_config = _config_before(runtime, conn, tenant, old.config_version)
        done, config = carry_out(runtime, conn, tenant, text, "plan", None, now)
        row = store.tenant_row(conn, tenant_id)
        agents = store.load_agents(conn, tenant_id, row.flags)
        draft = Draft(
            version=done.version,
            changed=done.changed,
            config=config,
            before_config=before_config,
            known=known_agents(conn, tenant_id),
            row=row,
            plan=store.load_plan(conn, row),
            agents=agents,
            loads=store.count_loads(conn, tenant_id, agents.values(), runtime.clock(now)),
            before=before,
            after=store.load_queues(conn, tenant_id, row.flags, _queue_ids(conn, tenant_id)),
            moves=_moves(conn, tenant_id, seqs, _seqs(runtime, conn, tenant_id)),
        )
        conn.rollback()
    return draft


def _queue_ids(conn: sa.Connection, tenant_id: UUID) -> list[UUID]:
    q = t.queues.c
    return list(conn.execute(sa.select(q.queue_id).where(q.tenant_id == tenant_id)).scalars())


def _seqs(runtime: Runtime, conn: sa.Connection, tenant_id: UUID) -> dict[UUID, int]:
    """The last ledger entry of each queue."""
    if Flag.ROTATION not in runtime.stages(conn):
        return {}
    q = t.queues.c
    rows = conn.execute(sa.select(q.queue_id, q.seq).where(q.tenant_id == tenant_id))
    return {row.queue_id: row.seq for row in rows}


def _config_before(runtime: Runtime, conn: sa.Connection, tenant: Tenant, version: int) -> Config | None:
    if not version:
        return None
    found = config_kept.kept(runtime, conn, tenant, version)
    return config_kept.config_of(found, known_agents(conn, tenant.tenant_id))


def _moves(conn: sa.Connection, tenant_id: UUID, before: Mapping[UUID, int], after: Mapping[UUID, int]) -> list[Move]:
    c = t.ledger.c
    moves: list[Move] = []
    for queue_id, seq in after.items():
        if seq > before.get(queue_id, 0):
            rows = conn.execute(
                sa.select(c.kind, c.data)
                .where(c.tenant_id == tenant_id, c.queue_id == queue_id, c.seq > before.get(queue_id, 0))
                .order_by(c.seq)
            )
            moves += [Move(queue_id, row.kind, row.data) for row in rows]
    return moves
