"""Chores: what each tenant needs regularly. A chore is a leased row; a wake in the causing transaction makes it due."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError

from adapters.base import Capability
from adapters.outcome import CrmError, Fault, Outcome
from connector import breaker, erase, fairness, inbox, log, oauth, refused, subscribing, work
from connector.agents import keep_agents
from connector.alarms import close_alarm, open_alarm
from connector.auditing import audit_queues
from connector.database import is_contention, is_outage, unit
from connector.leads import keep_identities
from connector.runtime import Runtime, Tenant
from connector.tables import chores, dedupe_keys, delivery_bodies, events
from connector.teams import sync_teams
from connector.waiting import drain
from routing import store
from routing import tables as t
from routing.facts import lead_from_json
from routing.model import Flag, Role

# Webhooks are late, retried and out of order: each sweep looks this far behind the last.
SWEEP_OVERLAP = timedelta(minutes=15)
# A sweep of an account never swept before looks back this far.
SWEEP_FIRST = timedelta(hours=24)
_FORGET_BATCH = 200  # leads past their time that one run forgets
_FOLDS = 20  # portions of the ledger that one run of the fairness chore folds
_KEYS_LIVE = timedelta(days=90)  # longer than any sender retries (the longest known: 8 hours, by hand 30 days)

_ASK_THE_CRM = frozenset({"agents", "sweep", "hooks"})
# Failures in a row, a minute apart, after which a CRM that does not answer is worth a human's look: a restart is over
# by then, and nothing else would tell of an address that is wrong or a door that stays locked.
_AWAY_AFTER = 3
_AWAY = "crm_away"

_log = log.get("chores")


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep saw: leads that look unassigned, and those of them that no webhook had told of."""

    seen: int
    found: int


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a chore: the cursor that its last run left, and when it began."""

    cursor: Any
    began: datetime


def run_chore(runtime: Runtime, tenant_id: UUID) -> bool:
    """Claim and run one due chore of the tenant; whether there was one. Outages of the database raise."""
    lease = runtime.life.new_lease()
    try:
        return _run_chore(runtime, tenant_id, lease)
    except SQLAlchemyError as error:
        runtime.abandoned.note(error, partial(work.release_chore, tenant_id=tenant_id, lease=lease))
        raise


def _run_chore(runtime: Runtime, tenant_id: UUID, lease: UUID) -> bool:
    with unit(runtime.engine) as (conn, began):
        row = work.claim_chore(conn, tenant_id, lease, living=runtime.life.living())
        if row is None:
            return False
        tenant = runtime.tenant(conn, tenant_id)
        wait, probe = breaker.admit(conn, tenant_id, lease) if row.kind in _ASK_THE_CRM else (0.0, None)
        if wait > 0:
            work.end_chore(conn, tenant_id, lease, row.kind, wanted=row.wanted, again=wait, error="crm_paused")
            return True
    chore = CHORES.get(row.kind)
    again, cursor, error = 86400.0, None, None
    try:
        if chore is not None:
            again, cursor = chore(runtime, tenant, Call(row.cursor, began))
    except CrmError as failed:
        error = f"{failed.outcome.value}_{failed.status or failed.fault or ''}"
        again = max(failed.retry_after or 0.0, 60.0)
        _log.warning("chore waits for the crm", tenant=tenant.name, chore=row.kind, outcome=failed.outcome.value)
        with unit(runtime.engine) as (conn, _):
            if failed.outcome is Outcome.WAIT and failed.fault is not Fault.BUDGET:
                seconds = failed.retry_after or 1.0
                breaker.shut_breaker(conn, tenant_id, seconds=seconds, reason="crm_asked_to_wait")
            refused = failed.outcome is Outcome.REAUTHORISE and row.kind != "tokens"
            if refused and oauth.doubt(runtime, conn, tenant):
                again = 1.0
            elif failed.outcome in (Outcome.REAUTHORISE, Outcome.FORBIDDEN, Outcome.REDIRECTED, Outcome.PRIVATE_HOST):
                open_alarm(conn, tenant_id, "crm_refuses_us", failed.outcome.value, failed.text)
            elif row.attempt + 1 >= _AWAY_AFTER and failed.status != 429 and failed.fault is not Fault.BUDGET:
                open_alarm(conn, tenant_id, _AWAY, "", failed.text)
    except SQLAlchemyError as failed:
        if is_outage(failed):
            raise
        error, again = "database", 1.0 if is_contention(failed) else 60.0
        _log.error("chore failed", tenant=tenant.name, chore=row.kind, **log.fault(failed))
    except Exception as failed:  # noqa: BLE001 - one tenant's chore must not end the chores of all
        error, again = type(failed).__name__, 60.0
        _log.error("chore failed", tenant=tenant.name, chore=row.kind, **log.fault(failed))
    for last in (False, False, False, True):
        try:
            with unit(runtime.engine) as (conn, _):
                if probe is not None and error is None:
                    breaker.passed(conn, tenant_id, probe)
                elif probe is not None:
                    breaker.end_probe(conn, tenant_id, probe)
                if error is None and row.kind in _ASK_THE_CRM:
                    close_alarm(conn, tenant_id, _AWAY)
                work.end_chore(
                    conn, tenant_id, lease, row.kind, wanted=row.wanted, again=again, cursor=cursor, error=error
                )
            break
        except SQLAlchemyError as failed:
            # Whoever wakes this chore holds its row until they commit. Given up, it would sleep for its whole lease.
            if last or not is_contention(failed):
                raise
    return True


def schedule(conn: sa.Connection, tenant_id: UUID) -> None:
    """Make every chore of a tenant due now, but the renewal of a token: that begins with the token."""
    for kind in CHORES.keys() - {"tokens"}:
        work.want(conn, tenant_id, kind)


# -- identities -------------------------------------------------------------------------------------------------

_IDENTITIES_BATCH = 500


def _identities(runtime: Runtime, tenant: Tenant, call: Call) -> tuple[float, Any]:
    """Leads that were stored before they were known by household and country get these identities, a batch at a time.

    The cursor is the country they were read for and the last lead that was done; another country starts anew.
    """
    if not tenant.households:
        return 86400.0, {}  # what is stored until it is on again will have to be done, too
    cursor = call.cursor if isinstance(call.cursor, dict) and call.cursor.get("country") == tenant.country else {}
    if cursor.get("done"):
        return 86400.0, cursor
    f = t.lead_facts.c
    with unit(runtime.engine) as (conn, _):
        query = sa.select(f.lead_id, f.facts).where(f.tenant_id == tenant.tenant_id).order_by(f.lead_id)
        if "after" in cursor:
            query = query.where(f.lead_id > UUID(cursor["after"]))
        rows = conn.execute(query.limit(_IDENTITIES_BATCH)).all()
        keep_identities(conn, tenant, {row.lead_id: lead_from_json(row.facts) for row in rows})
    if len(rows) < _IDENTITIES_BATCH:
        return 86400.0, {"country": tenant.country, "done": True}
    return 0.0, {"country": tenant.country, "after": str(rows[-1].lead_id)}


# -- agents -----------------------------------------------------------------------------------------------------


def sync_agents(runtime: Runtime, tenant: Tenant) -> dict[str, int]:
    """Read all agents of the CRM and store what is new; counts of ``new``, ``changed``, ``same``, ``missing``."""
    client = oauth.client(runtime, tenant)
    with runtime.engine.connect() as conn:
        began = conn.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
    seen = list(tenant.adapter.list_agents(client))
    with unit(runtime.engine) as (conn, _):
        counts = keep_agents(runtime, conn, tenant.tenant_id, seen, began)
        a, r = t.agents.c, t.agent_refs.c
        # Someone whom the CRM no longer lists at all is gone there: nobody may be assigned to them. An account without
        # any agent is no account: an empty list is a hiccup of the CRM, and says nothing about anybody.
        refs = [agent.ref for agent in seen]
        here = sa.exists().where(
            r.tenant_id == a.tenant_id, r.agent_id == a.agent_id, r.ref == sa.any_(sa.cast(refs, sa.ARRAY(sa.Text)))
        )
        counts["missing"] = conn.execute(
            sa.update(t.agents)
            .where(a.tenant_id == tenant.tenant_id, a.active, ~here, sa.literal(bool(refs)))
            .values(active=False)
        ).rowcount
        close_alarm(conn, tenant.tenant_id, "crm_refuses_us")
    sync_teams(runtime, tenant)
    return counts


def _agents(runtime: Runtime, tenant: Tenant, _: Call) -> tuple[float, Any]:
    sync_agents(runtime, tenant)
    return 900.0, None


# -- tokens -----------------------------------------------------------------------------------------------------


def _tokens(runtime: Runtime, tenant: Tenant, _: Call) -> tuple[float, Any]:
    """Renew the access token ahead of its end, so that no lead waits for that."""
    return (oauth.renew(runtime, tenant) if tenant.has_tokens else 86400.0), None


# -- sweep ------------------------------------------------------------------------------------------------------


def sweep(runtime: Runtime, tenant: Tenant, since: datetime, *, first: bool = False) -> Swept:
    """Find leads that are unassigned in the CRM and not accounted for here; feed them to the inbox.

    They were created since `since`, or, where the CRM can tell, changed since: those only if they had an owner when
    they were last seen here. Others that changed are leads from before Turnlock, which no sweep may take up.
    Finding any is an alarm, but for the `first` sweep of a tenant: no webhook told of leads from before.
    """
    client = oauth.client(runtime, tenant)
    with runtime.engine.connect() as conn:
        definition = store.tenant_row(conn, tenant.tenant_id).unassigned
    seen: set[str] = set()
    found = 0

    def take(page: Iterable[str], *, once_owned: bool) -> None:
        nonlocal found
        fresh = [ref for ref in dict.fromkeys(page) if ref not in seen]
        with unit(runtime.engine) as (conn, _):
            if once_owned:
                fresh = _once_owned(conn, tenant.tenant_id, fresh)
            seen.update(fresh)
            unknown = _not_waiting_here(conn, tenant.tenant_id, fresh)
            found += inbox.enqueue(conn, tenant.tenant_id, "sweep", [(ref, None) for ref in unknown], coalesce="sweep")

    for page in tenant.adapter.unassigned_since(client, since, definition):
        take(page, once_owned=False)
    if Capability.SWEEP_CHANGES in tenant.adapter.capabilities:
        for page in tenant.adapter.changed_since(client, since, definition):
            take(page, once_owned=True)
    with unit(runtime.engine) as (conn, _):
        if found and not first:
            open_alarm(
                conn,
                tenant.tenant_id,
                "webhooks_missing",
                "sweep",
                "the sweep found unassigned leads that no webhook told of; see the subscription with `turnlock check`",
            )
            work.want(conn, tenant.tenant_id, "hooks")  # the CRM may have removed them
        elif not found:
            close_alarm(conn, tenant.tenant_id, "webhooks_missing")
        refused.settle(conn, tenant.tenant_id)
    runtime.wake(tenant.tenant_id)
    return Swept(len(seen), found)


def _once_owned(conn: sa.Connection, tenant_id: UUID, refs: list[str]) -> list[str]:
    """Of these refs those of leads that had an owner when they were last seen here."""
    if not refs:
        return []
    r, s = t.lead_refs.c, t.lead_roles.c
    owned = sa.select(r.ref).where(
        r.tenant_id == tenant_id,
        r.ref == sa.any_(sa.cast(refs, sa.ARRAY(sa.Text))),
        sa.exists().where(
            s.tenant_id == r.tenant_id,
            s.lead_id == r.lead_id,
            s.role == Role.OWNER.value,
            s.state.in_(("assigned", "owned")),
        ),
    )
    known = set(conn.execute(owned).scalars())
    return [ref for ref in refs if ref in known]


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
        sa.select(e.ref).where(e.tenant_id == tenant_id, e.state.in_(("waiting", "parked")), e.ref == sa.any_(wanted))
    ).scalars()
    accounted = {*known, *waiting}
    return [ref for ref in refs if ref not in accounted]


def _sweep(runtime: Runtime, tenant: Tenant, call: Call) -> tuple[float, Any]:
    began, cursor = call.began, call.cursor
    since = datetime.fromisoformat(cursor["began"]) - SWEEP_OVERLAP if cursor else began - SWEEP_FIRST
    sweep(runtime, tenant, since, first=not cursor)
    return 300.0, {"began": began.isoformat()}


# -- held leads -------------------------------------------------------------------------------------------------


def _held(runtime: Runtime, tenant: Tenant, call: Call) -> tuple[float, Any]:
    return drain(runtime, tenant, call.cursor)


# -- audit, retention -------------------------------------------------------------------------------------------


def _audit(runtime: Runtime, tenant: Tenant, _: Call) -> tuple[float, Any]:
    bad = [a for a in audit_queues(runtime, tenant.tenant_id) if not a.ok]
    with unit(runtime.engine) as (conn, _now):
        for audit in bad:
            open_alarm(
                conn,
                tenant.tenant_id,
                "ledger_broken",
                audit.queue,
                "the ledger of this queue does not replay to its present state; run `turnlock audit` and report it",
            )
        if not bad:
            close_alarm(conn, tenant.tenant_id, "ledger_broken")
        # A tenant that was installed under an earlier Turnlock gets the chores that came since.
        missing = [{"tenant_id": tenant.tenant_id, "kind": kind} for kind in CHORES]
        conn.execute(insert(chores).on_conflict_do_nothing(index_elements=["tenant_id", "kind"]), missing)
    return 3600.0, None


def _retention(runtime: Runtime, tenant: Tenant, _: Call) -> tuple[float, Any]:
    """Personal data and keys past their time go: bodies, parked payloads, agents' words, facts, dedupe keys."""
    settings, tenant_id = runtime.settings, tenant.tenant_id
    days = timedelta(days=settings.body_retention_days)
    old: list[UUID] = []
    with unit(runtime.engine) as (conn, now):
        b, k, e = delivery_bodies.c, dedupe_keys.c, events.c
        conn.execute(sa.delete(delivery_bodies).where(b.tenant_id == tenant_id, b.received_at < now - days))
        conn.execute(
            sa.update(events)
            .where(e.tenant_id == tenant_id, e.state == "parked", e.received_at < now - days, e.payload.is_not(None))
            .values(payload=None)
        )
        conn.execute(sa.delete(dedupe_keys).where(k.tenant_id == tenant_id, k.seen_at < now - _KEYS_LIVE))
        if Flag.CREDITS in runtime.stages(conn):
            r = t.returns.c
            told = sa.and_(r.tenant_id == tenant_id, r.decided_at < now - days, r.words.is_not(None))
            conn.execute(sa.update(t.returns).where(told).values(words=None))
    if settings.facts_retention_days is not None:
        with unit(runtime.engine) as (conn, now):
            before = now - timedelta(days=settings.facts_retention_days)
            old = erase.old_leads(conn, tenant_id, before, _FORGET_BATCH)
            erase.forget(conn, tenant_id, old)
    return (1.0 if len(old) == _FORGET_BATCH else 86400.0), None


def _fairness(runtime: Runtime, tenant: Tenant, _: Call) -> tuple[float, Any]:
    """Fold what the ledgers have gained, in portions: a tenant with millions of turns must not hold up the others."""
    done = fairness.roll_up(runtime, tenant.tenant_id, batches=_FOLDS)
    return (300.0 if done else 1.0), None


Chore = Callable[[Runtime, Tenant, Call], tuple[float, Any]]
CHORES: Mapping[str, Chore] = {
    "tokens": _tokens,
    "agents": _agents,
    "sweep": _sweep,
    "hooks": lambda runtime, tenant, _: subscribing.run(runtime, tenant),
    "held": _held,
    "audit": _audit,
    "retention": _retention,
    "identities": _identities,
    "fairness": _fairness,
}
