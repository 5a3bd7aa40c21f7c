"""Agents as the CRM shows them, kept in step. A sync never undoes what the admin set."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from connector import work
from connector.database import new_id
from connector.runtime import Runtime
from routing import tables as t
from routing.clocks import known_zone
from routing.model import AgentSeen, Flag

#: Writes in a row that the CRM accepted without keeping the agent; after these only a human lets them back.
MAX_REFUSALS = 3


def keep_agents(
    runtime: Runtime, conn: sa.Connection, tenant_id: UUID, seen: Iterable[AgentSeen], began: datetime
) -> dict[str, int]:
    """Store what a reading of the CRM's agents shows; counts of ``new``, ``changed`` and ``same``.

    `began` is the database's time before that reading: it proves nothing about a refusal that came later. An agent
    seen active after a refusal may receive leads again, unless the CRM refused them too often in a row.
    Wakes the held leads when somebody may have become available.
    """
    r, a = t.agent_refs.c, t.agents.c
    skips = Flag.SKIPS in runtime.stages(conn)
    columns = [r.ref, a.agent_id, a.name, a.email, a.active, a.refused_at, a.refusals]
    columns += [a.paused_by_crm, a.zone] if skips else []
    known = {
        row.ref: row
        for row in conn.execute(
            sa.select(*columns)
            .join(t.agents, (a.tenant_id == r.tenant_id) & (a.agent_id == r.agent_id))
            .where(r.tenant_id == tenant_id)
        )
    }
    counts = {"new": 0, "changed": 0, "same": 0}
    better = False
    for agent in sorted(seen, key=lambda x: x.ref.encode("utf-8")):
        row = known.get(agent.ref)
        values: dict[str, Any] = {"active": agent.active}
        if agent.name:
            values |= {"name": agent.name, "email": agent.email}
        if skips:
            values["paused_by_crm"] = agent.paused
            if agent.zone and known_zone(agent.zone):
                values["zone"] = agent.zone
        if row is None:
            counts["new" if _keep_new(conn, tenant_id, agent.ref, began, values) else "same"] += 1
            continue
        refused_before = row.refused_at is not None and row.refused_at < began
        back = agent.active and refused_before and row.refusals < MAX_REFUSALS
        if back:
            values["refused_at"] = None
        changed = back or any(getattr(row, name) != value for name, value in values.items())
        counts["changed" if changed else "same"] += 1
        better = better or (changed and agent.active and not agent.paused)
        conn.execute(
            sa.update(t.agents)
            .where(a.tenant_id == tenant_id, a.agent_id == row.agent_id)
            .values(seen_at=began, **values)
        )
    if better:
        work.want(conn, tenant_id, "held")
    return counts


def _keep_new(conn: sa.Connection, tenant_id: UUID, ref: str, began: datetime, values: dict[str, Any]) -> bool:
    """Store an agent not known when this reading began; whether it still was not.

    An installation, a chore and a write-back may read the same users at the same moment: the ref decides who stores
    them. Waits for another's transaction that has the ref; as everybody stores in the order of refs, in no circle.
    """
    a, agent_id = t.agents.c, new_id()
    conn.execute(
        sa.insert(t.agents).values(tenant_id=tenant_id, agent_id=agent_id, seen_at=began, **({"name": ref} | values))
    )
    mine = insert(t.agent_refs).values(tenant_id=tenant_id, ref=ref, agent_id=agent_id).on_conflict_do_nothing()
    if conn.execute(mine.returning(t.agent_refs.c.ref)).first():
        return True
    conn.execute(sa.delete(t.agents).where(a.tenant_id == tenant_id, a.agent_id == agent_id))
    return False
