"""The inbox as leased work: events are claimed by whole deliveries, ended, given back, and fed by Turnlock itself.

The rules of leases are those of :mod:`connector.work`.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from connector.alive import free
from connector.database import new_id
from connector.tables import dedupe_keys, deliveries, events
from connector.work import LEASE, LostLease
from routing.flight import Ask, Asking, Statement, exactly, one_of, question

# What one decider takes at once: enough to fill a unit from a burst, small enough to finish well inside the lease.
BATCH_DELIVERIES = 50
BATCH_EVENTS = 500

# The reason of an event whose last worker did not give it back.
_TAKEN_OVER = "taken_over"
_CLOCK = sa.func.clock_timestamp()


@lru_cache(maxsize=2)
def _claiming(knows_the_living: bool) -> tuple[Statement, Statement]:
    """What finds due events by whole deliveries, whose rows it locks, and what leases those of them that are chosen."""
    living = one_of("living", sa.Text()) if knows_the_living else None
    tenant_id: Any = sa.bindparam("tenant", type_=sa.Uuid)
    d = deliveries.c

    def waiting(e: Any) -> Any:
        return sa.and_(e.c.tenant_id == tenant_id, e.c.state == "waiting", e.c.due_at <= _CLOCK, free(e, living))

    e = events.c
    due = (
        sa.select(e.delivery_id, e.received_at).where(waiting(events)).order_by(e.due_at).limit(BATCH_EVENTS).subquery()
    )
    wanted = (
        sa.select(due.c.delivery_id)
        .group_by(due.c.delivery_id)
        .order_by(sa.func.min(due.c.received_at), due.c.delivery_id)
        .subquery()
    )
    # Each by its id, whatever the planner believes of the table: joined, all that ever came would be read. And none
    # beyond the limit is locked, for it is asked only until enough are found.
    lockable = (
        sa.select(d.delivery_id)
        .where(d.tenant_id == tenant_id, d.delivery_id == wanted.c.delivery_id)
        .with_for_update(key_share=True, skip_locked=True)
        .lateral()
    )
    locked = (
        sa.select(lockable.c.delivery_id)
        .select_from(wanted.join(lockable, sa.true()))
        .limit(sa.bindparam("most", type_=sa.Integer))
        .cte("locked")
    )
    # Each delivery's by its id as well, which nothing asked of them may turn into a search among all that wait.
    theirs = (
        sa.select(events).where(e.tenant_id == tenant_id, e.delivery_id == locked.c.delivery_id).offset(0).lateral()
    )
    found = (
        sa.select(theirs.c.event_id, theirs.c.delivery_id, theirs.c.leased_until, theirs.c.reason)
        .select_from(locked.join(theirs, sa.true()))
        .where(waiting(theirs))
        .order_by(theirs.c.received_at, theirs.c.delivery_id, theirs.c.ordinal)
        .limit(BATCH_EVENTS)
    )
    source = sa.select(d.source).where(d.tenant_id == e.tenant_id, d.delivery_id == e.delivery_id).scalar_subquery()
    chosen = (
        sa.update(events)
        # Still, because what was found was read before its delivery was locked: another may have been quicker.
        .where(waiting(events), e.event_id == one_of("chosen", sa.Uuid()))
        .values(
            lease=sa.bindparam("new_lease", type_=sa.Uuid),
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
            e.occurred_at,
            e.attempt,
            e.claims,
            e.lead_id,
            e.flag_version,
            source.label("source"),
        )
    )
    return Statement(found), Statement(chosen)


# From here on an equal body is news, unless the vendor named the event.
_REOPEN = Statement(
    sa.delete(dedupe_keys).where(
        dedupe_keys.c.tenant_id == sa.bindparam("tenant", type_=sa.Uuid),
        ~dedupe_keys.c.final,
        dedupe_keys.c.event_id == one_of("chosen", sa.Uuid()),
    )
)


@question
def claim_events(
    tenant_id: UUID, lease: UUID, *, living: Sequence[str] | None = None, then: Sequence[Ask] = ()
) -> Asking[Sequence[sa.Row[Any]]]:
    """Claim due events by whole deliveries, in order of receipt; gives their rows. `then` goes in the last flight.

    The delivery rows are locked while its events are leased: order is promised within a delivery, so no second
    worker may take the rest of one. Of events whose last two workers died, only a quarter is claimed at once, apart
    from all others: one that crashes its worker is soon alone. One by one would be too slow, because all that a
    killed worker held comes back like this; and once is no sign at all.
    """
    finding, leasing = _claiming(living is not None)
    (rows,) = yield [finding(tenant=tenant_id, living=living, most=BATCH_DELIVERIES)]
    found = list(rows)
    last = found[-1].delivery_id if len(found) == BATCH_EVENTS else None
    if last is not None and last != found[0].delivery_id:
        found = [row for row in found if row.delivery_id != last]  # cut short: the next claim takes it whole
    crashed = [row.event_id for row in found if row.leased_until is not None and row.reason == _TAKEN_OVER]
    # By lot, so that those beside one that crashes its worker are others each time and get through without it.
    chosen = random.sample(crashed, -(-len(crashed) // 4)) or [row.event_id for row in found]
    if not chosen:
        return []
    claim = leasing(tenant=tenant_id, living=living, chosen=chosen, new_lease=lease)
    rows, *_ = yield [claim, _REOPEN(tenant=tenant_id, chosen=chosen), *then]
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


_GIVEN = (
    sa.func.unnest(
        sa.bindparam("event_ids", type_=sa.ARRAY(sa.Uuid)),
        sa.bindparam("lead_ids", type_=sa.ARRAY(sa.Uuid)),
        sa.bindparam("reasons", type_=sa.ARRAY(sa.Text)),
    )
    .table_valued("event_id", "lead_id", "reason")
    .render_derived(name="given")
)
_END_DECIDED = Statement(
    exactly(
        sa.update(events)
        .where(
            events.c.tenant_id == sa.bindparam("tenant", type_=sa.Uuid),
            events.c.event_id == _GIVEN.c.event_id,
            events.c.lease == sa.bindparam("lease_held", type_=sa.Uuid),
            events.c.state == "waiting",
        )
        .values(
            state="done",
            reason=_GIVEN.c.reason,
            lead_id=_GIVEN.c.lead_id,
            payload=sa.null(),  # personal data is kept in lead_facts alone
            closed_at=_CLOCK,
            lease=sa.null(),
            leased_until=sa.null(),
        )
        .returning(sa.literal(1).label("ended"))
    )
)


def end_decided(tenant_id: UUID, lease: UUID, done: Sequence[tuple[UUID, UUID, str]]) -> list[Ask]:
    """What closes decided events (event, lead, reason). It raises :class:`LostLease` unless the lease has all."""
    if not done:
        return []
    event_ids, lead_ids, reasons = zip(*done, strict=True)
    values = {"event_ids": event_ids, "lead_ids": lead_ids, "reasons": reasons}
    return [_END_DECIDED(tenant=tenant_id, lease_held=lease, wanted=len(done), **values).orelse(LostLease())]


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
    untouched: bool = False,
) -> None:
    """Give events back, due again `after`. `counts` when the try says something against the event itself.

    `untouched`: as if they had never been claimed.
    """
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
    if untouched:
        values["claims"] = e.claims - 1
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


def release_events(conn: sa.Connection, tenant_id: UUID, lease: UUID) -> None:
    """Give back every event that this lease still holds, due at once: nobody works on them any more."""
    e = events.c
    conn.execute(
        sa.update(events)
        .where(e.tenant_id == tenant_id, e.lease == lease, e.state == "waiting")
        .values(lease=None, leased_until=None)
    )


_WAKE = Statement(
    sa.update(events)
    .where(
        events.c.tenant_id == sa.bindparam("tenant", type_=sa.Uuid),
        events.c.lead_id == sa.bindparam("lead", type_=sa.Uuid),
        events.c.state == "waiting",
        events.c.leased_until.is_(None),
        events.c.due_at > _CLOCK,
    )
    .values(due_at=_CLOCK)
)


@question
def wake_events_of(tenant_id: UUID, lead_id: UUID) -> Asking[bool]:
    """Make the events that wait behind a write of this lead due now; whether there were any.

    To be sent in the transaction that ends the write.
    """
    (rows,) = yield [_WAKE(tenant=tenant_id, lead=lead_id)]
    return rows.changed > 0


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
