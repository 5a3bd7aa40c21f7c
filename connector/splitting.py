"""Splits what an app's one hook was told into the inboxes of its tenants.

One commit per tenant, under the events' own keys, then the app's events are closed. A crash in between copies again,
which the keys make no difference. What is about an account that is nobody's here is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector import inbox, log
from connector.accept import store_delivery
from connector.database import at_rest, unit
from connector.packed import unpack
from connector.runtime import Runtime, Tenant
from connector.tables import app_accounts
from routing.tables import tenants

_log = log.get("apps")


def split(runtime: Runtime, app: Tenant, lease: UUID, rows: Sequence[sa.Row[Any]]) -> None:
    """See these claimed events of the app through."""
    groups: dict[str | None, list[sa.Row[Any]]] = {}
    for row in rows:
        groups.setdefault(row.payload["account"] if row.payload else None, []).append(row)
    members = _members(runtime, app, [account for account in groups if account is not None])
    for account, told in groups.items():
        if account is None:  # parked once and replayed: nothing says yet whose it is
            _end(runtime, app, lease, told, state="parked", reason="no_account")
        elif account not in members:
            _end(runtime, app, lease, told, state="ignored", reason="unknown_account")
        else:
            member, version = members[account]
            events = [unpack(row.payload) for row in told]
            store_delivery(runtime, member, events, hook_id=None, body=b"", flag_version=version, headers={})
            _end(runtime, app, lease, told, state="done", reason="copied")


def _members(runtime: Runtime, app: Tenant, accounts: Sequence[str]) -> dict[str, tuple[Tenant, int]]:
    """The active tenants behind these accounts, each with the version of its flags."""
    a, t = app_accounts.c, tenants.c
    found: dict[str, tuple[Tenant, int]] = {}
    with at_rest(runtime.engine) as conn:
        rows = conn.execute(
            sa.select(a.account, a.member_id).where(
                a.tenant_id == app.tenant_id, a.account == sa.any_(sa.cast(list(accounts), sa.ARRAY(sa.Text)))
            )
        ).all()
        for row in rows:
            member = runtime.tenant(conn, row.member_id)
            version = conn.execute(sa.select(t.flag_version).where(t.tenant_id == row.member_id)).scalar_one()
            if member.status == "active":
                found[row.account] = member, version
    return found


def _end(runtime: Runtime, app: Tenant, lease: UUID, rows: Sequence[sa.Row[Any]], *, state: str, reason: str) -> None:
    if reason == "unknown_account":
        _log.info("ignored", app=app.name, reason=reason, count=len(rows))
    with unit(runtime.engine) as (conn, _):
        inbox.end_events(conn, app.tenant_id, lease, [row.event_id for row in rows], state=state, reason=reason)
