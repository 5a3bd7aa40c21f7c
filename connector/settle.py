"""New leads of sources that settle: read and decided once, when the CRM had its time to fill them in."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa

from connector import inbox
from connector.database import unit
from connector.reading import Item
from connector.runtime import Runtime, Tenant
from connector.units import FORCED
from routing import tables as t
from routing.model import Role
from routing.settle import SettleTimes


def let_settle(runtime: Runtime, tenant: Tenant, lease: UUID, items: Sequence[Item], times: SettleTimes) -> list[Item]:
    """Give back the events of new leads that have not settled yet; the others. Commits.

    The wait is of the lead and begins with the first event of it: later ones neither restart nor shorten it. Who asks
    for a decision by hand gets it at once.
    """
    new = [
        item
        for item in items
        if item.fresh
        and item.role is Role.OWNER
        and item.event.source not in FORCED
        and (item.settles_at is not None or times.seconds(item.lead.source))
    ]
    if not new:
        return list(items)
    wanted: dict[UUID, datetime] = {}
    for item in new:
        until = item.event.received_at + timedelta(seconds=times.seconds(item.lead.source))
        wanted[item.lead_id] = min(until, wanted.get(item.lead_id, until))
    back: set[UUID] = set()
    with unit(runtime.engine) as (conn, now):
        settles_at = _settles_at(conn, tenant.tenant_id, wanted)
        for item in new:
            left = settles_at[item.lead_id] - now
            # A payload lacks what is waited for, however late it is looked at: the lead is read.
            only_told = item.settles_at is None and item.event.payload is not None
            if left > timedelta(0) or only_told:
                event_id = item.event.event_id
                back.add(event_id)
                after = max(left, timedelta(0))
                inbox.return_events(
                    conn, tenant.tenant_id, lease, [event_id], after=after, reason="settling", lead_id=item.lead_id
                )
    return [item for item in items if item.event.event_id not in back]


def _settles_at(conn: sa.Connection, tenant_id: UUID, wanted: dict[UUID, datetime]) -> dict[UUID, datetime]:
    """Until when these leads wait: what the first event of each says, for those that come after it, too."""
    c = t.leads.c
    for lead_id in sorted(wanted):  # in order of id, like every lock on leads
        conn.execute(
            sa.update(t.leads)
            .where(c.tenant_id == tenant_id, c.lead_id == lead_id, c.settles_at.is_(None))
            .values(settles_at=wanted[lead_id])
        )
    rows = conn.execute(
        sa.select(c.lead_id, c.settles_at).where(
            c.tenant_id == tenant_id, c.lead_id == sa.any_(sa.cast(sorted(wanted), sa.ARRAY(sa.Uuid)))
        )
    )
    return {row.lead_id: row.settles_at for row in rows}
