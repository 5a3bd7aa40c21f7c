"""The breaker: while a tenant's CRM is given a pause, asked for or earned, no worker of any process calls it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from connector.tables import breakers
from routing.tables import tenants

_CLOCK = sa.func.clock_timestamp()


def shut_breaker(conn: sa.Connection, tenant_id: UUID, *, seconds: float, reason: str, lane: str = "all") -> None:
    """No call to this tenant's CRM goes out for `seconds`, by any worker. A later end wins over an earlier one.

    `lane` "note" holds up notes alone: their limits must never delay an owner.
    """
    new = insert(breakers).values(
        tenant_id=tenant_id, lane=lane, failures=1, reason=reason, open_at=_CLOCK + timedelta(seconds=seconds)
    )
    conn.execute(
        new.on_conflict_do_update(
            index_elements=["tenant_id", "lane"],
            set_={
                "failures": breakers.c.failures + 1,
                "reason": new.excluded.reason,
                "open_at": sa.func.greatest(breakers.c.open_at, new.excluded.open_at),
            },
        )
    )


def breaker_left(tenant_id: UUID, lane: str = "all") -> sa.ScalarSelect[Any]:
    """Seconds until calls of this lane may go out to the CRM again, as part of a query; null or below 0: now."""
    b = breakers.c
    return (
        sa.select(sa.func.max(sa.extract("epoch", b.open_at - _CLOCK)))
        .where(b.tenant_id == tenant_id, b.lane.in_({"all", lane}))
        .scalar_subquery()
    )


def breaker_wait(conn: sa.Connection, tenant_id: UUID, lane: str = "all") -> float:
    """Seconds until calls of this lane may go out to the tenant's CRM again; 0 when they may now."""
    return max(0.0, float(conn.execute(sa.select(breaker_left(tenant_id, lane))).scalar_one() or 0))


def may_send(conn: sa.Connection, tenant_id: UUID, lane: str = "all") -> bool:
    """Whether writes of this lane may go out now: the tenant's sending is not stopped, the breaker not shut."""
    c = tenants.c
    row = conn.execute(sa.select(c.sending, breaker_left(tenant_id, lane)).where(c.tenant_id == tenant_id)).one()
    return bool(row[0]) and not (row[1] or 0) > 0
