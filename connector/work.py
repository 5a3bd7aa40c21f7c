"""Leased work: events, outbox rows and chores are rows with a due time; this module alone claims and returns them.

Leases are counted on the database's clock only, so that a worker whose own clock is wrong neither overtakes nor is
overtaken. A claim is a transaction of its own; SKIP LOCKED is right here because another worker that is claiming a
row will do its work. Every end re-checks the lease, so that a worker that comes back late changes nothing. A lease
ends by time, or with the process that holds it: `living` is what :meth:`connector.alive.Life.living` gives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from connector.alive import free
from connector.database import new_id
from connector.tables import breakers, chores, dedupe_keys, deliveries, events
from routing.tables import outbox, tenants

# Longer than the hard deadline of the work: a decider reads from the CRM in one call per batch (10 s each) and waits
# for locks at most 2 s a try; a sender makes at most four calls. A live worker is never overtaken.
LEASE = timedelta(seconds=60)
# What one decider takes at once: enough to fill a unit from a burst, small enough to finish well inside the lease.
BATCH_DELIVERIES = 50
BATCH_EVENTS = 500

# The reason of an event whose last worker did not give it back.
_TAKEN_OVER = "taken_over"
_CLOCK = sa.func.clock_timestamp()


@dataclass(frozen=True, slots=True)
class Due:
    """A tenant with due rows, and of which kinds."""

    tenant_id: UUID
    events: bool
    writes: bool
    notes: bool
    chores: bool


def due_tenants(conn: sa.Connection, living: Sequence[str] | None = None) -> list[Due]:
    """Which tenants have due rows: the one plain read that names no tenant. Locks nothing."""
    e, o, c, b = events.c, outbox.c, chores.c, breakers.c

    def due(table: Any, *extra: Any) -> Any:
        return sa.exists().where(
            table.c.tenant_id == tenants.c.tenant_id,
            table.c.due_at <= _CLOCK,
            free(table, living),
            *extra,
        )

    def sends(lanes: Sequence[str], *kind: Any) -> Any:
        shut = sa.exists().where(b.tenant_id == tenants.c.tenant_id, b.lane.in_(lanes), b.open_at > _CLOCK)
        return sa.and_(tenants.c.sending, ~shut, due(outbox, o.state == "open", *kind))

    query = sa.select(
        tenants.c.tenant_id,
        due(events, e.state == "waiting").label("events"),
        sends(("all",), o.kind != "note").label("writes"),
        sends(("all", "note"), o.kind == "note").label("notes"),
        due(chores, c.kind.is_not(None)).label("chores"),
    ).where(tenants.c.status == "active")
    return [
        Due(row.tenant_id, row.events, row.writes, row.notes, row.chores)
        for row in conn.execute(query)
        if row.events or row.writes or row.notes or row.chores
    ]


# -- events ---------------------------------------------------------------------------------------------------


def claim_events(
    conn: sa.Connection, tenant_id: UUID, lease: UUID, *, living: Sequence[str] | None = None
) -> Sequence[sa.Row[Any]]:
    """Claim due events by whole deliveries, in order of receipt; gives their rows.

    The delivery rows are locked while its events are leased: order is promised within a delivery, so no second
    worker may take the rest of one. Events of which two workers died in a row are claimed alone, one per claim, so
    that an event that crashes its worker cannot take its neighbours with it. Once is no such sign: when a worker is
    killed, all that it held would go on one by one.
    """
    e, d = events.c, deliveries.c
    waiting = sa.and_(e.tenant_id == tenant_id, e.state == "waiting", e.due_at <= _CLOCK, free(events, living))
    wanted = sa.select(e.delivery_id).where(waiting).order_by(e.due_at).limit(BATCH_EVENTS).scalar_subquery()
    locked = (
        conn.execute(
            sa.select(d.delivery_id)
            .where(d.tenant_id == tenant_id, d.delivery_id.in_(wanted))
            .order_by(d.received_at, d.delivery_id)
            .limit(BATCH_DELIVERIES)
            .with_for_update(key_share=True, skip_locked=True)
        )
        .scalars()
        .all()
    )
    if not locked:
        return []
    found = conn.execute(
        sa.select(e.event_id, e.delivery_id, e.leased_until, e.reason)
        .where(waiting, e.delivery_id == sa.any_(sa.cast(locked, sa.ARRAY(sa.Uuid))))
        .order_by(e.received_at, e.delivery_id, e.ordinal)
        .limit(BATCH_EVENTS)
    ).all()
    last = found[-1].delivery_id if len(found) == BATCH_EVENTS else None
    if last is not None and last != found[0].delivery_id:
        found = [row for row in found if row.delivery_id != last]  # cut short: the next claim takes it whole
    crashed = [row.event_id for row in found if row.leased_until is not None and row.reason == _TAKEN_OVER]
    chosen = crashed[:1] or [row.event_id for row in found]
    if not chosen:
        return []
    rows = conn.execute(
        sa.update(events)
        .where(e.tenant_id == tenant_id, e.event_id == sa.any_(sa.cast(chosen, sa.ARRAY(sa.Uuid))))
        .values(
            lease=lease,
            leased_until=_CLOCK + LEASE,
            claims=e.claims + 1,
            reason=sa.case((e.leased_until.is_not(None), _TAKEN_OVER), else_=e.reason),
        )
        .returning(
            e.event_id,
            e.delivery_id,
            e.ordinal,
            e.kind,
            e.ref,
            e.payload,
            e.received_at,
            e.attempt,
            e.claims,
            e.lead_id,
            sa.select(d.source)
            .where(d.tenant_id == e.tenant_id, d.delivery_id == e.delivery_id)
            .scalar_subquery()
            .label("source"),
        )
    ).all()
    return sorted(rows, key=lambda row: (row.received_at, row.delivery_id.bytes, row.ordinal))


def end_events(
    conn: sa.Connection,
    tenant_id: UUID,
    lease: UUID,
    event_ids: Collection[UUID],
    *,
    state: str = "done",
    reason: str | None = None,
    lead_id: UUID | None = None,
) -> int:
    """Close events that this lease holds; how many it still held. Call inside the transaction of their effect."""
    if not event_ids:
        return 0
    e = events.c
    values: dict[str, Any] = {
        "state": state,
        "reason": reason,
        "closed_at": _CLOCK,
        "lease": None,
        "leased_until": None,
    }
    if state == "done":
        values["payload"] = None  # personal data is kept in lead_facts alone
    if lead_id is not None:
        values["lead_id"] = lead_id
    return conn.execute(
        sa.update(events)
        .where(
            e.tenant_id == tenant_id,
            e.event_id == sa.any_(sa.cast(list(event_ids), sa.ARRAY(sa.Uuid))),
            e.lease == lease,
            e.state == "waiting",
        )
        .values(**values)
    ).rowcount


def end_decided(conn: sa.Connection, tenant_id: UUID, lease: UUID, done: Sequence[tuple[UUID, UUID, str]]) -> int:
    """Close decided events (event, lead, reason) that this lease holds, in one statement; how many it still held."""
    if not done:
        return 0
    e = events.c
    given = sa.func.unnest(
        sa.cast([event_id for event_id, _, _ in done], sa.ARRAY(sa.Uuid)),
        sa.cast([lead_id for _, lead_id, _ in done], sa.ARRAY(sa.Uuid)),
        sa.cast([reason for _, _, reason in done], sa.ARRAY(sa.Text)),
    ).table_valued("event_id", "lead_id", "reason").render_derived(name="given")
    return conn.execute(
        sa.update(events)
        .where(e.tenant_id == tenant_id, e.event_id == given.c.event_id, e.lease == lease, e.state == "waiting")
        .values(
            state="done",
            reason=given.c.reason,
            lead_id=given.c.lead_id,
            payload=None,  # personal data is kept in lead_facts alone
            closed_at=_CLOCK,
            lease=None,
            leased_until=None,
        )
    ).rowcount


def return_events(
    conn: sa.Connection,
    tenant_id: UUID,
    lease: UUID,
    event_ids: Collection[UUID],
    *,
    after: timedelta,
    counts: bool = False,
    reason: str | None = None,
    lead_id: UUID | None = None,
) -> None:
    """Give events back, due again `after`. `counts` when the try says something against the event itself."""
    if not event_ids:
        return
    e = events.c
    values: dict[str, Any] = {
        "due_at": _CLOCK + after,
        "lease": None,
        "leased_until": None,
        "reason": reason,
        "attempt": e.attempt + (1 if counts else 0),
    }
    if lead_id is not None:
        values["lead_id"] = lead_id
    conn.execute(
        sa.update(events)
        .where(
            e.tenant_id == tenant_id,
            e.event_id == sa.any_(sa.cast(list(event_ids), sa.ARRAY(sa.Uuid))),
            e.lease == lease,
            e.state == "waiting",
        )
        .values(**values)
    )


def wake_events_of(conn: sa.Connection, tenant_id: UUID, lead_id: UUID) -> None:
    """Make the events that wait behind a write of this lead due now. Call in the transaction that ends the write."""
    e = events.c
    conn.execute(
        sa.update(events)
        .where(
            e.tenant_id == tenant_id,
            e.lead_id == lead_id,
            e.state == "waiting",
            e.leased_until.is_(None),
            e.due_at > _CLOCK,
        )
        .values(due_at=_CLOCK)
    )


# -- outbox ---------------------------------------------------------------------------------------------------

_OUTBOX = (
    outbox.c.outbox_id,
    outbox.c.lead_id,
    outbox.c.role,
    outbox.c.epoch,
    outbox.c.kind,
    outbox.c.agent_id,
    outbox.c.decision_id,
    outbox.c.expects_agent_id,
    outbox.c.sent,
    outbox.c.empty_writes,
    outbox.c.attempt,
    outbox.c.claims,
    outbox.c.created_at,
)


def claim_outbox(
    conn: sa.Connection,
    tenant_id: UUID,
    lease: UUID,
    *,
    kinds: Sequence[str],
    limit: int,
    living: Sequence[str] | None = None,
) -> Sequence[sa.Row[Any]]:
    """Claim due writes of these kinds, oldest first, at most the earliest open one per lead and role."""
    o = outbox.alias("o")
    earlier = outbox.alias("earlier")
    first = ~sa.exists().where(
        earlier.c.tenant_id == tenant_id,
        earlier.c.lead_id == o.c.lead_id,
        earlier.c.role == o.c.role,
        earlier.c.epoch < o.c.epoch,
        earlier.c.state.in_(("open", "parked")),
    )
    # Locked until the claim is written; a row that another worker is claiming is skipped, for that one will send it.
    chosen = (
        conn.execute(
            sa.select(o.c.outbox_id)
            .where(
                o.c.tenant_id == tenant_id,
                o.c.state == "open",
                o.c.kind.in_(kinds),
                o.c.due_at <= _CLOCK,
                free(o, living),
                first,
            )
            .order_by(o.c.due_at, o.c.outbox_id)
            .limit(limit)
            .with_for_update(key_share=True, skip_locked=True, of=o)
        )
        .scalars()
        .all()
    )
    if not chosen:
        return []
    return conn.execute(
        sa.update(outbox)
        .where(outbox.c.tenant_id == tenant_id, outbox.c.outbox_id == sa.any_(sa.cast(chosen, sa.ARRAY(sa.Uuid))))
        .values(
            lease=lease,
            leased_until=_CLOCK + LEASE,
            claims=outbox.c.claims + 1,
            # A lease that ran out: whoever held it may have died right after sending.
            sent=sa.or_(outbox.c.sent, outbox.c.leased_until.is_not(None)),
        )
        .returning(*_OUTBOX)
    ).all()


def leased_outbox(conn: sa.Connection, tenant_id: UUID, lease: UUID, outbox_id: UUID) -> sa.Row[Any] | None:
    """The row of a write that was born leased, if the lease still stands and the tenant sends."""
    o = outbox.c
    row = conn.execute(
        sa.select(*_OUTBOX).where(
            o.tenant_id == tenant_id,
            o.outbox_id == outbox_id,
            o.lease == lease,
            o.state == "open",
            o.leased_until > _CLOCK,
            sa.exists().where(tenants.c.tenant_id == tenant_id, tenants.c.sending),
        )
    ).one_or_none()
    return cast("sa.Row[Any] | None", row)


def end_outbox(
    conn: sa.Connection,
    tenant_id: UUID,
    lease: UUID,
    outbox_id: UUID,
    *,
    state: str,
    reason: str | None = None,
    **values: Any,
) -> bool:
    """Close (or park) a write that this lease holds; False when the lease was lost: then nothing else may be kept."""
    o = outbox.c
    closed = None if state == "parked" else _CLOCK
    return (
        conn.execute(
            sa.update(outbox)
            .where(o.tenant_id == tenant_id, o.outbox_id == outbox_id, o.lease == lease, o.state == "open")
            .values(state=state, reason=reason, closed_at=closed, lease=None, leased_until=None, **values)
        ).rowcount
        == 1
    )


def return_outbox(
    conn: sa.Connection,
    tenant_id: UUID,
    lease: UUID,
    outbox_id: UUID,
    *,
    after: timedelta,
    counts: bool,
    reason: str | None,
    **values: Any,
) -> bool:
    """Give a write back, due again `after`. `counts` when the outside world was really asked."""
    o = outbox.c
    return (
        conn.execute(
            sa.update(outbox)
            .where(o.tenant_id == tenant_id, o.outbox_id == outbox_id, o.lease == lease, o.state == "open")
            .values(
                due_at=_CLOCK + after,
                lease=None,
                leased_until=None,
                reason=reason,
                attempt=o.attempt + (1 if counts else 0),
                **values,
            )
        ).rowcount
        == 1
    )


def has_open_write(conn: sa.Connection, tenant_id: UUID, lead_ids: Collection[UUID]) -> set[UUID]:
    """Which of these leads have an owner or collaborator write that is not settled. Call with the leads locked."""
    if not lead_ids:
        return set()
    o = outbox.c
    return set(
        conn.execute(
            sa.select(o.lead_id).where(
                o.tenant_id == tenant_id,
                o.lead_id == sa.any_(sa.cast(list(lead_ids), sa.ARRAY(sa.Uuid))),
                o.state.in_(("open", "parked")),
                o.kind != "note",
            )
        ).scalars()
    )


# -- breaker --------------------------------------------------------------------------------------------------


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
    sending = conn.execute(sa.select(tenants.c.sending).where(tenants.c.tenant_id == tenant_id)).scalar_one()
    return bool(sending) and not breaker_wait(conn, tenant_id, lane)


# -- chores ---------------------------------------------------------------------------------------------------


def want(conn: sa.Connection, tenant_id: UUID, kind: str, *, within: float = 0.0) -> None:
    """Wake a chore, in the transaction that causes it: due `within` seconds, however far off it was."""
    due = _CLOCK + timedelta(seconds=within)
    new = insert(chores).values(tenant_id=tenant_id, kind=kind, wanted=1, due_at=due)
    conn.execute(
        new.on_conflict_do_update(
            index_elements=["tenant_id", "kind"],
            set_={"wanted": chores.c.wanted + 1, "due_at": sa.func.least(chores.c.due_at, new.excluded.due_at)},
        )
    )


def claim_chore(
    conn: sa.Connection, tenant_id: UUID, lease: UUID, *, living: Sequence[str] | None = None
) -> sa.Row[Any] | None:
    """Claim one due chore of the tenant."""
    c = chores.c
    kind = conn.execute(
        sa.select(c.kind)
        .where(
            c.tenant_id == tenant_id,
            c.due_at <= _CLOCK,
            free(chores, living),
        )
        .order_by(c.due_at)
        .limit(1)
        .with_for_update(key_share=True, skip_locked=True)
    ).scalar_one_or_none()
    if kind is None:
        return None
    return conn.execute(
        sa.update(chores)
        .where(c.tenant_id == tenant_id, c.kind == kind)
        # A sweep reads many pages: its lease is longer, and nothing but the next sweep waits for it.
        .values(lease=lease, leased_until=_CLOCK + 5 * LEASE)
        .returning(c.kind, c.wanted, c.cursor, c.attempt)
    ).one()


def end_chore(
    conn: sa.Connection,
    tenant_id: UUID,
    lease: UUID,
    kind: str,
    *,
    wanted: int,
    again: float,
    cursor: Any = None,
    error: str | None = None,
) -> None:
    """Put a chore back to sleep for `again` seconds, unless someone wanted it since it was claimed."""
    c = chores.c
    values: dict[str, Any] = {
        "lease": None,
        "leased_until": None,
        "last_error": error,
        "due_at": sa.case((c.wanted == wanted, _CLOCK + timedelta(seconds=again)), else_=_CLOCK),
        "attempt": c.attempt + 1 if error else 0,
    }
    if error is None:
        values |= {"last_ok_at": _CLOCK}
        if cursor is not None:
            values |= {"cursor": cursor}
    conn.execute(sa.update(chores).where(c.tenant_id == tenant_id, c.kind == kind, c.lease == lease).values(**values))


def enqueue(
    conn: sa.Connection,
    tenant_id: UUID,
    source: str,
    refs: Sequence[tuple[str, UUID | None]],
    *,
    kind: str = "lead_changed",
    flag_version: int = 0,
    coalesce: str | None = None,
) -> int:
    """Feed leads by ref through the same inbox as webhooks: (ref, lead id if known); how many were new.

    With `coalesce` an event joins one of the same name for the same lead that no worker has claimed yet.
    """
    rows = [(new_id(), ref, lead_id) for ref, lead_id in refs]
    if coalesce is not None and rows:
        key = {ref: f"{coalesce}:{ref}" for _, ref, _ in rows}
        fresh = set(
            conn.execute(
                insert(dedupe_keys)
                .values(
                    [
                        {"tenant_id": tenant_id, "key": key[ref], "event_id": event_id, "final": False}
                        for event_id, ref, _ in sorted(rows, key=lambda r: key[r[1]])
                    ]
                )
                .on_conflict_do_nothing(index_elements=["tenant_id", "key"])
                .returning(dedupe_keys.c.event_id)
            ).scalars()
        )
        rows = [row for row in rows if row[0] in fresh]
    if not rows:
        return 0
    delivery_id = new_id()
    conn.execute(
        sa.insert(deliveries).values(tenant_id=tenant_id, delivery_id=delivery_id, source=source, received_at=_CLOCK)
    )
    conn.execute(
        sa.insert(events).values(received_at=_CLOCK),
        [
            {
                "tenant_id": tenant_id,
                "event_id": event_id,
                "delivery_id": delivery_id,
                "ordinal": number,
                "kind": kind,
                "ref": ref,
                "lead_id": lead_id,
                "flag_version": flag_version,
            }
            for number, (event_id, ref, lead_id) in enumerate(rows)
        ],
    )
    return len(rows)
