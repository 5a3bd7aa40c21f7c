"""The admin's switch per agent: pause (until resumed, or until an instant) and resume. A sync never undoes it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import sqlalchemy as sa

from connector import work
from connector.alarms import close_alarm
from connector.database import unit
from connector.errors import TurnlockError
from connector.runtime import Runtime, Tenant
from routing.clocks import first_instant, shown
from routing.model import Flag
from routing.tables import agents


@dataclass(frozen=True, slots=True)
class Switched:
    """What a switch did. ``until`` says when the pause ends by itself, on the agent's clock."""

    changed: bool
    until: str | None


def pause(
    runtime: Runtime,
    tenant: Tenant,
    agent_id: UUID,
    actor: str,
    until: datetime | timedelta | None = None,
) -> Switched:
    """No lead of a rotation goes to this agent until :func:`resume`, or `until`; their place in every line is kept.

    `until` is an instant, a time without a zone (on the agent's own clock), or how long from now.
    """
    return _set(runtime, tenant, agent_id, paused=True, until=until)


def resume(runtime: Runtime, tenant: Tenant, agent_id: UUID, actor: str) -> Switched:
    """End the admin's pause, and a refusal by the CRM that only a human may end. The CRM's own pause stays."""
    return _set(runtime, tenant, agent_id, paused=False)


def _set(
    runtime: Runtime, tenant: Tenant, agent_id: UUID, *, paused: bool, until: datetime | timedelta | None = None
) -> Switched:
    with unit(runtime.engine) as (conn, db_now):
        if Flag.SKIPS not in runtime.stages(conn):
            raise TurnlockError("pausing needs the stage `skips`; run `turnlock migrate`")
        c = agents.c
        # Locked until the write below, so that of two who switch at once only one is told that it changed.
        row = conn.execute(
            sa.select(
                c.paused_by_admin, c.paused_until, c.refusals, sa.func.coalesce(c.zone_by_admin, c.zone).label("zone")
            )
            .where(c.tenant_id == tenant.tenant_id, c.agent_id == agent_id)
            .with_for_update(key_share=True)
        ).one()
        now = runtime.clock(db_now)
        ends = _instant(until, row.zone, now)
        values: dict[str, object] = {"paused_by_admin": paused, "paused_until": ends}
        if not paused:
            values |= {"refused_at": None, "refusals": 0}
            work.want(conn, tenant.tenant_id, "held")
            close_alarm(conn, tenant.tenant_id, "agent_refused", str(agent_id))
        conn.execute(sa.update(agents).where(c.tenant_id == tenant.tenant_id, c.agent_id == agent_id).values(**values))
        if paused:
            work.want_if_held(conn, tenant.tenant_id)  # whoever waits must not miss the new end of this pause
    runtime.wake()
    lasted = row.paused_by_admin and (row.paused_until is None or now < row.paused_until)
    changed = (lasted, row.paused_until if lasted else None) != (paused, ends) or (not paused and row.refusals > 0)
    return Switched(changed, shown(row.zone, ends) if ends else None)


def _instant(until: datetime | timedelta | None, zone: str, now: datetime) -> datetime | None:
    if until is None:
        return None
    try:
        if isinstance(until, timedelta):
            ends = now + until
        else:
            ends = first_instant(zone, until) if until.tzinfo is None else until.astimezone(UTC)
        shown(zone, ends)
    except (OverflowError, ValueError):
        raise TurnlockError("no calendar shows that time; give one within the next years") from None
    if ends <= now:
        raise TurnlockError(f"the pause would end at {shown(zone, ends)}, which is past; give a later time")
    return ends
