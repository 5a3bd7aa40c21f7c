"""Leased work: outbox rows and chores (and events, in :mod:`connector.inbox`) are rows with a due time.

Leases are counted on the database's clock only, so that a worker whose own clock is wrong neither overtakes nor is
overtaken. A claim is a transaction of its own; SKIP LOCKED is right here because another worker that is claiming a
row will do its work. Every end re-checks the lease, so that a worker that comes back late changes nothing. A lease
ends by time, or with the process that holds it: `living` is what :meth:`connector.alive.Life.living` gives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from connector.alive import free
from connector.tables import breakers, chores, events
from routing.flight import Ask, Asking, Statement, exactly, one_of, question
from routing.model import TELLING
from routing.tables import lead_roles, outbox, tenants

# Longer than the hard deadline of the work: a decider reads from the CRM in one call per batch (10 s each) and waits
# for locks at most 2 s a try; a sender makes at most four calls. A live worker is never overtaken.
LEASE = timedelta(seconds=60)
_CLOCK = sa.func.clock_timestamp()


class LostLease(Exception):
    """Another worker took the work over meanwhile: whoever had it before keeps nothing of it."""


@dataclass(frozen=True, slots=True)
class Due:
    """A tenant with due rows, and of which kinds."""

    tenant_id: UUID
    events: bool
    writes: bool
    notes: bool
    chores: bool


@lru_cache(maxsize=2)
def _due(knows_the_living: bool) -> Statement:
    living = one_of("living", sa.Text()) if knows_the_living else None
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

    return Statement(
        sa.select(
            tenants.c.tenant_id,
            due(events, e.state == "waiting").label("events"),
            sends(("all",), o.kind.not_in(TELLING)).label("writes"),
            sends(("all", "note"), o.kind.in_(TELLING)).label("notes"),
            due(chores, c.kind.is_not(None)).label("chores"),
        ).where(tenants.c.status == "active")
    )


@question
def due_tenants(*, living: Sequence[str] | None = None) -> Asking[list[Due]]:
    """Which tenants have due rows: the one plain read that names no tenant. Locks nothing."""
    (rows,) = yield [_due(living is not None)(living=living)]
    return [
        Due(row.tenant_id, row.events, row.writes, row.notes, row.chores)
        for row in rows
        if row.events or row.writes or row.notes or row.chores
    ]


# -- outbox ---------------------------------------------------------------------------------------------------

#: What a sender knows of a write.
OUTBOX = (
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


@lru_cache(maxsize=2)
def _claiming(knows_the_living: bool) -> Statement:
    tenant_id, lease = sa.bindparam("tenant", type_=sa.Uuid), sa.bindparam("new_lease", type_=sa.Uuid)
    living = one_of("living", sa.Text()) if knows_the_living else None
    o = outbox.alias("o")
    earlier = outbox.alias("earlier")
    first = ~sa.exists().where(
        earlier.c.tenant_id == tenant_id,
        earlier.c.lead_id == o.c.lead_id,
        earlier.c.role == o.c.role,
        earlier.c.epoch < o.c.epoch,
        earlier.c.state.in_(("open", "parked")),
        sa.or_(earlier.c.kind.not_in(TELLING), o.c.kind.in_(TELLING)),
    )
    # Locked until the claim is written; a row that another worker is claiming is skipped, for that one will send it.
    chosen = (
        sa.select(o.c.outbox_id)
        .where(
            o.c.tenant_id == tenant_id,
            o.c.state == "open",
            o.c.kind == one_of("kinds", sa.Text()),
            o.c.due_at <= _CLOCK,
            free(o, living),
            first,
        )
        .order_by(o.c.due_at)  # as its index: sorted further, thirty-two would be looked at for each one that is taken
        .limit(1)
        .with_for_update(key_share=True, skip_locked=True, of=o)
        .cte("chosen")
    )
    return Statement(
        sa.update(outbox)
        .where(outbox.c.tenant_id == tenant_id, outbox.c.outbox_id == sa.select(chosen.c.outbox_id).scalar_subquery())
        .values(
            lease=lease,
            leased_until=_CLOCK + LEASE,
            claims=outbox.c.claims + 1,
            # A lease that ran out: whoever held it may have died right after sending.
            sent=sa.or_(outbox.c.sent, outbox.c.leased_until.is_not(None)),
        )
        .returning(outbox.c.outbox_id)
    )


@question
def claim_outbox(
    tenant_id: UUID, lease: UUID, *, kinds: Sequence[str], living: Sequence[str] | None = None
) -> Asking[UUID | None]:
    """Claim the write of these kinds that is due longest, of the earliest open ones per lead and role; its id.

    A note waits for what was ordered before it; an owner never waits for a note.
    """
    values = {"tenant": tenant_id, "new_lease": lease, "kinds": list(kinds)}
    (rows,) = yield [_claiming(living is not None)(**values, living=living)]
    return next((row.outbox_id for row in rows), None)


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


_CONFIRMED = Statement(
    exactly(
        sa.update(outbox)
        .where(
            outbox.c.tenant_id == sa.bindparam("tenant", type_=sa.Uuid),
            outbox.c.outbox_id == sa.bindparam("row", type_=sa.Uuid),
            outbox.c.lease == sa.bindparam("held", type_=sa.Uuid),
            outbox.c.state == "open",
        )
        .values(
            state="confirmed", reason=sa.null(), sent=True, closed_at=_CLOCK, lease=sa.null(), leased_until=sa.null()
        )
        .returning(sa.literal(1).label("ended"))
    )
)


def confirm_outbox(tenant_id: UUID, lease: UUID, outbox_id: UUID) -> Ask:
    """What closes a write as confirmed. It raises :class:`LostLease` unless this lease still holds it."""
    return _CONFIRMED(tenant=tenant_id, row=outbox_id, held=lease, wanted=1).orelse(LostLease())


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


def release_outbox(
    conn: sa.Connection,
    tenant_id: UUID,
    lease: UUID,
    *,
    outbox_id: UUID | None = None,
    sent: bool = False,
    besides: Collection[UUID] = (),
) -> None:
    """Give back every write (or this one) that the lease still holds, due at once: nobody works on them any more.

    `sent` when one may have reached the CRM. `besides` are those that somebody else sends under the same lease.
    """
    o = outbox.c
    conn.execute(
        sa.update(outbox)
        .where(
            o.tenant_id == tenant_id,
            o.lease == lease,
            o.state == "open",
            o.outbox_id == outbox_id if outbox_id is not None else sa.true(),
            o.outbox_id != sa.all_(sa.cast(list(besides), sa.ARRAY(sa.Uuid))),
        )
        .values(lease=None, leased_until=None, sent=sa.or_(o.sent, sa.literal(sent)))
    )


_BEHIND = Statement(
    sa.select(outbox.c.outbox_id)
    .where(
        outbox.c.tenant_id == sa.bindparam("tenant", type_=sa.Uuid),
        outbox.c.lead_id == sa.bindparam("lead", type_=sa.Uuid),
        outbox.c.state == "open",
        outbox.c.kind.not_in(TELLING),
    )
    .limit(1)
)


def writes_behind(tenant_id: UUID, lead_id: UUID) -> Asking[bool]:
    """Asks whether further writes of this lead are open, which waited for the one that ends."""
    (rows,) = yield [_BEHIND(tenant=tenant_id, lead=lead_id)]
    return bool(rows)


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
                o.kind.not_in(TELLING),
            )
        ).scalars()
    )


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


def want_if_held(conn: sa.Connection, tenant_id: UUID) -> None:
    """Wake the drain if any lead waits: without one nobody is told, and units do not meet at the chore's row."""
    s = lead_roles.c
    waits = sa.exists().where(s.tenant_id == tenant_id, s.state == "held")
    if conn.execute(sa.select(waits)).scalar_one():
        want(conn, tenant_id, "held")


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


def release_chore(conn: sa.Connection, tenant_id: UUID, lease: UUID) -> None:
    """Give back the chore that this lease still holds, due at once: nobody works on it any more."""
    c = chores.c
    conn.execute(
        sa.update(chores).where(c.tenant_id == tenant_id, c.lease == lease).values(lease=None, leased_until=None)
    )


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
