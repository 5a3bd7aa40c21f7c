"""The admin's switch per agent: pause and resume. A sync never undoes it."""

from __future__ import annotations

from uuid import UUID

import sqlalchemy as sa

from connector import work
from connector.alarms import close_alarm
from connector.database import unit
from connector.errors import TurnlockError
from connector.runtime import Runtime, Tenant
from routing.model import Flag
from routing.tables import agents


def pause(runtime: Runtime, tenant: Tenant, agent_id: UUID, actor: str) -> bool:
    """No lead of a rotation goes to this agent until :func:`resume`; their place in every line is kept."""
    return _set(runtime, tenant, agent_id, paused=True)


def resume(runtime: Runtime, tenant: Tenant, agent_id: UUID, actor: str) -> bool:
    """End the admin's pause, and a refusal by the CRM that only a human may end. The CRM's own pause stays."""
    return _set(runtime, tenant, agent_id, paused=False)


def _set(runtime: Runtime, tenant: Tenant, agent_id: UUID, *, paused: bool) -> bool:
    with unit(runtime.engine) as (conn, _):
        if Flag.SKIPS not in runtime.stages(conn):
            raise TurnlockError("pausing needs the stage `skips`; run `turnlock migrate`")
        c = agents.c
        # Locked until the write below, so that of two who switch at once only one is told that it changed.
        before = conn.execute(
            sa.select(c.paused_by_admin, c.refusals)
            .where(c.tenant_id == tenant.tenant_id, c.agent_id == agent_id)
            .with_for_update(key_share=True)
        ).one()
        values: dict[str, object] = {"paused_by_admin": paused}
        if not paused:
            values |= {"refused_at": None, "refusals": 0}
            work.want(conn, tenant.tenant_id, "held")
            close_alarm(conn, tenant.tenant_id, "agent_refused", str(agent_id))
        conn.execute(sa.update(agents).where(c.tenant_id == tenant.tenant_id, c.agent_id == agent_id).values(**values))
    runtime.wake()
    return before.paused_by_admin is not paused or (not paused and before.refusals > 0)
