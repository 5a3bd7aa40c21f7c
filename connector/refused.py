"""Deliveries that prove nothing: an alarm where nothing that proves itself comes in beside them.

A CRM whose secret is not ours any more sends in vain, again and again, and only the sweep finds its leads. The address
of a hook is known to its CRM alone, so what is refused there is seldom a stranger's; but a stranger who learnt it must
not raise alarms at a tenant whose deliveries come in well.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from connector import log
from connector.alarms import open_alarm
from connector.database import unit
from connector.runtime import Runtime, Tenant, app_id
from connector.tables import alarms, deliveries

_ALARM = "deliveries_refused"
# Seconds in which one process looks once for a tenant: a CRM may try hundreds of times a minute.
_LOOK_AGAIN = 60.0
_RECENTLY = timedelta(minutes=10)
_OF_TIME = frozenset({"too_old", "too_new", "bad_time"})

_log = log.get("refused")


def note(runtime: Runtime, tenant: Tenant, reason: str) -> None:
    """A delivery of this tenant's hook was refused. Never raises: its sender is answered all the same."""
    now = time.monotonic()
    if tenant.tenant_id == app_id(tenant.crm):
        return  # nobody lists the alarms of an app; what its accounts miss, their sweeps find
    if now - runtime.refused.get(tenant.tenant_id, -_LOOK_AGAIN) < _LOOK_AGAIN:
        return
    runtime.refused[tenant.tenant_id] = now
    try:
        with unit(runtime.engine) as (conn, _):
            if not _came(conn, tenant.tenant_id, sa.func.clock_timestamp() - _RECENTLY):
                open_alarm(conn, tenant.tenant_id, _ALARM, "hook", _text(tenant, reason))
    except SQLAlchemyError as error:
        _log.warning("refusal not noted", tenant=tenant.name, **log.fault(error))


def settle(conn: sa.Connection, tenant_id: UUID) -> None:
    """Close the alarm once a delivery came in after the last that was refused."""
    c = alarms.c
    of = sa.and_(c.tenant_id == tenant_id, c.kind == _ALARM, c.closed_at.is_(None))
    last = conn.execute(sa.select(c.last_at).where(of)).scalar_one_or_none()
    if last is not None and _came(conn, tenant_id, last):
        conn.execute(sa.update(alarms).where(of).values(closed_at=sa.func.clock_timestamp()))


def _came(conn: sa.Connection, tenant_id: UUID, since: sa.ColumnElement[object] | object) -> bool:
    d = deliveries.c
    of = sa.exists().where(d.tenant_id == tenant_id, d.source == "webhook", d.received_at > since)
    return bool(conn.execute(sa.select(of)).scalar_one())


def _text(tenant: Tenant, reason: str) -> str:
    if reason == "other_account":
        return "deliveries of another account come in and are refused: remove the webhooks of the copy that sends them"
    if reason in _OF_TIME:
        return f"deliveries are refused ({reason}): their time is not ours; see the clock with `turnlock check`"
    name = tenant.adapter.hook_secret or "secret"
    fix = (
        f"set it as the CRM has it (`turnlock tenant secret {tenant.name} {name}`), "
        f"or have the hooks made anew (`turnlock install {tenant.name}`)"
    )
    return f"deliveries are refused ({reason}): they do not fit our {name}; {fix}"
