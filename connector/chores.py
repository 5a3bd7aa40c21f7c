"""Chores: what each tenant needs regularly. A chore is a leased row; a wake in the causing transaction makes it due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from adapters.outcome import CrmError, Outcome
from connector import log, work
from connector.agents import keep_agents
from connector.alarms import close_alarm, open_alarm
from connector.auditing import audit_queues
from connector.database import is_outage, new_id, unit
from connector.runtime import Runtime, Tenant
from connector.tables import dedupe_keys, delivery_bodies, events
from routing import store
from routing import tables as t
from routing.model import Flag, Role
from routing.skips import unavailable

# Webhooks are late, retried and out of order: each sweep looks this far behind the last.
SWEEP_OVERLAP = timedelta(minutes=15)
# A sweep of an account never swept before looks back this far.
SWEEP_FIRST = timedelta(hours=24)
_HELD_BATCH = 200
_KEYS_LIVE = timedelta(days=90)  # longer than any sender retries (the longest known: 8 hours, by hand 30 days)

_log = log.get("chores")


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep saw: leads that look unassigned, and those of them that no webhook had told of."""

    seen: int
    found: int


def run_chore(runtime: Runtime, tenant_id: UUID) -> bool:
    """Claim and run one due chore of the tenant; whether there was one."""
    lease = new_id()
    with unit(runtime.engine) as (conn, _):
        row = work.claim_chore(conn, tenant_id, lease)
        if row is None:
            return False
        tenant = runtime.tenant(conn, tenant_id)
    chore = CHORES.get(row.kind)
    again, cursor, error = 86400.0, None, None
    try:
        if chore is not None:
            again, cursor = chore(runtime, tenant, row.cursor)
    except CrmError as failed:
        error = f"{failed.outcome.value}_{failed.status or failed.fault or ''}"
        again = max(failed.retry_after or 0.0, 60.0)
        _log.warning("chore waits for the crm", tenant=tenant.name, chore=row.kind, outcome=failed.outcome.value)
        with unit(runtime.engine) as (conn, _):
            if failed.outcome in (Outcome.REAUTHORISE, Outcome.FORBIDDEN, Outcome.REDIRECTED, Outcome.PRIVATE_HOST):
                open_alarm(conn, tenant_id, "crm_refuses_us", failed.outcome.value, failed.text)
    except SQLAlchemyError as failed:
        if is_outage(failed):
            raise
        error, again = "database", 60.0
        _log.error("chore failed", tenant=tenant.name, chore=row.kind, **log.fault(failed))
    except Exception as failed:  # noqa: BLE001 - one tenant's chore must not end the chores of all
        error, again = type(failed).__name__, 60.0
        _log.error("chore failed", tenant=tenant.name, chore=row.kind, **log.fault(failed))
    with unit(runtime.engine) as (conn, _):
        work.end_chore(conn, tenant_id, lease, row.kind, wanted=row.wanted, again=again, cursor=cursor, error=error)
    return True


def schedule(conn: sa.Connection, tenant_id: UUID) -> None:
    """Make every chore of a tenant due now."""
    for kind in CHORES:
        work.want(conn, tenant_id, kind)


# -- agents -----------------------------------------------------------------------------------------------------


def sync_agents(runtime: Runtime, tenant: Tenant) -> dict[str, int]:
    """Read all agents of the CRM and store what is new; counts of ``new``, ``changed``, ``same``, ``missing``."""
    with runtime.engine.connect() as conn:
        client = runtime.client(conn, tenant)
    seen = list(tenant.adapter.list_agents(client))
    with unit(runtime.engine) as (conn, now):
        counts = keep_agents(runtime, conn, tenant.tenant_id, seen, now)
        a, r = t.agents.c, t.agent_refs.c
        # Someone whom the CRM no longer lists at all is gone there: nobody may be assigned to them.
        refs = [agent.ref for agent in seen]
        here = sa.exists().where(
            r.tenant_id == a.tenant_id, r.agent_id == a.agent_id, r.ref == sa.any_(sa.cast(refs, sa.ARRAY(sa.Text)))
        )
        counts["missing"] = conn.execute(
            sa.update(t.agents).where(a.tenant_id == tenant.tenant_id, a.active, ~here).values(active=False)
        ).rowcount
        close_alarm(conn, tenant.tenant_id, "crm_refuses_us")
    return counts


def _agents(runtime: Runtime, tenant: Tenant, _: Any) -> tuple[float, Any]:
    sync_agents(runtime, tenant)
    return 900.0, None


# -- sweep ------------------------------------------------------------------------------------------------------


def sweep(runtime: Runtime, tenant: Tenant, since: datetime) -> Swept:
    """Find leads created since `since` that are unassigned in the CRM and unknown here; feed them to the inbox."""
    with runtime.engine.connect() as conn:
        client = runtime.client(conn, tenant)
        definition = store.tenant_row(conn, tenant.tenant_id).unassigned
    seen: set[str] = set()
    found = 0
    for page in tenant.adapter.unassigned_since(client, since, definition):
        fresh = [ref for ref in dict.fromkeys(page) if ref not in seen]
        seen.update(fresh)
        with unit(runtime.engine) as (conn, _):
            unknown = _not_waiting_here(conn, tenant.tenant_id, fresh)
            found += work.enqueue(
                conn, tenant.tenant_id, "sweep", [(ref, None) for ref in unknown], coalesce="sweep"
            )
    with unit(runtime.engine) as (conn, _):
        if found:
            open_alarm(
                conn, tenant.tenant_id, "webhooks_missing", "sweep",
                "the sweep found unassigned leads that no webhook told of; see the subscription with `turnlock check`",
            )
        else:
            close_alarm(conn, tenant.tenant_id, "webhooks_missing")
    runtime.wake(tenant.tenant_id)
    return Swept(len(seen), found)


def _not_waiting_here(conn: sa.Connection, tenant_id: UUID, refs: list[str]) -> list[str]:
    """Of these refs those that are not accounted for: held, left, parked, being written, or still in the inbox."""
    if not refs:
        return []
    wanted = sa.cast(refs, sa.ARRAY(sa.Text))
    r, s, o, e = t.lead_refs.c, t.lead_roles.c, t.outbox.c, events.c
    writing = sa.exists().where(
        o.tenant_id == r.tenant_id, o.lead_id == r.lead_id, o.kind == "owner", o.state.in_(("open", "parked"))
    )
    stands = sa.exists().where(
        s.tenant_id == r.tenant_id,
        s.lead_id == r.lead_id,
        s.role == Role.OWNER.value,
        sa.or_(
            s.state.in_(("held", "left", "parked")),
            # Decided while write-back was off: the CRM was never told, and never will be.
            sa.and_(s.state == "assigned", s.confirmed_version.is_(None)),
        ),
    )
    known = conn.execute(
        sa.select(r.ref).where(r.tenant_id == tenant_id, r.ref == sa.any_(wanted), sa.or_(writing, stands))
    ).scalars()
    waiting = conn.execute(
        sa.select(e.ref).where(
            e.tenant_id == tenant_id, e.state.in_(("waiting", "parked")), e.ref == sa.any_(wanted)
        )
    ).scalars()
    accounted = {*known, *waiting}
    return [ref for ref in refs if ref not in accounted]


def _sweep(runtime: Runtime, tenant: Tenant, cursor: Any) -> tuple[float, Any]:
    began = datetime.now(UTC)
    since = datetime.fromisoformat(cursor["began"]) - SWEEP_OVERLAP if cursor else began - SWEEP_FIRST
    sweep(runtime, tenant, since)
    return 300.0, {"began": began.isoformat()}


# -- held leads -------------------------------------------------------------------------------------------------


def _held(runtime: Runtime, tenant: Tenant, _: Any) -> tuple[float, Any]:
    """Feed the oldest held leads back, queue by queue where somebody is available now."""
    tenant_id = tenant.tenant_id
    with unit(runtime.engine) as (conn, db_now):
        row = store.tenant_row(conn, tenant_id)
        s, r = t.lead_roles.c, t.lead_refs.c
        waiting = conn.execute(
            sa.select(s.queue_id, sa.func.count().label("n"))
            .where(s.tenant_id == tenant_id, s.state == "held", s.role == Role.OWNER.value)
            .group_by(s.queue_id)
        ).all()
        if not waiting:
            close_alarm(conn, tenant_id, "leads_held")
            return 900.0, None
        queues = store.load_queues(conn, tenant_id, row.flags, [w.queue_id for w in waiting if w.queue_id])
        members = {p.agent_id for q in queues.values() for p in q.line.places}
        agents = store.load_agents(conn, tenant_id, row.flags, members)
        now = runtime.clock(db_now)

        def free(queue_id: UUID | None) -> bool:
            queue = queues.get(queue_id) if queue_id else None
            if queue is None or queue.when_nobody != "hold":
                return True  # a rule, the configuration or a fallback may take it now: ask the ordinary way
            return any(
                unavailable(
                    agents[p.agent_id], p.weight, now, (), skips=Flag.SKIPS in row.flags,
                    weights=Flag.WEIGHTS in row.flags,
                )
                is None
                for p in queue.line.places
            )

        for w in waiting:
            if not free(w.queue_id):
                continue
            # The newest ref of each lead: a merge adds one, and that is the one the CRM answers to.
            newest = (
                sa.select(r.ref)
                .where(r.tenant_id == s.tenant_id, r.lead_id == s.lead_id)
                .order_by(r.created_at.desc(), r.ref)
                .limit(1)
                .scalar_subquery()
            )
            oldest = conn.execute(
                sa.select(newest.label("ref"), s.lead_id)
                .where(
                    s.tenant_id == tenant_id, s.state == "held", s.role == Role.OWNER.value,
                    s.queue_id == w.queue_id if w.queue_id else s.queue_id.is_(None),
                )
                .order_by(s.since, s.lead_id)
                .limit(_HELD_BATCH)
            ).all()
            work.enqueue(conn, tenant_id, "held", [(x.ref, x.lead_id) for x in oldest], coalesce="held")
    runtime.wake(tenant_id)
    return 15.0, None


# -- audit, retention -------------------------------------------------------------------------------------------


def _audit(runtime: Runtime, tenant: Tenant, _: Any) -> tuple[float, Any]:
    bad = [a for a in audit_queues(runtime, tenant.tenant_id) if not a.ok]
    with unit(runtime.engine) as (conn, _now):
        for audit in bad:
            open_alarm(
                conn, tenant.tenant_id, "ledger_broken", audit.queue,
                "the ledger of this queue does not replay to its present state; run `turnlock audit` and report it",
            )
        if not bad:
            close_alarm(conn, tenant.tenant_id, "ledger_broken")
    return 3600.0, None


def _retention(runtime: Runtime, tenant: Tenant, _: Any) -> tuple[float, Any]:
    """Personal data and keys past their time go: bodies, payloads of closed events, dedupe keys."""
    days = timedelta(days=runtime.settings.body_retention_days)
    with unit(runtime.engine) as (conn, now):
        b, k = delivery_bodies.c, dedupe_keys.c
        conn.execute(
            sa.delete(delivery_bodies).where(b.tenant_id == tenant.tenant_id, b.received_at < now - days)
        )
        conn.execute(
            sa.delete(dedupe_keys).where(k.tenant_id == tenant.tenant_id, k.seen_at < now - _KEYS_LIVE)
        )
    return 86400.0, None


Chore = Callable[[Runtime, Tenant, Any], tuple[float, Any]]
CHORES: Mapping[str, Chore] = {
    "agents": _agents,
    "sweep": _sweep,
    "held": _held,
    "audit": _audit,
    "retention": _retention,
}
