"""Deciding one lead by hand: through the inbox, like everything, but in this process and at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector import inbox
from connector.database import unit
from connector.decide import Decider
from connector.errors import NotFound, TurnlockError
from connector.reasons import event_text
from connector.runtime import Runtime, Tenant
from connector.tables import deliveries, events
from connector.writeback import Sender
from routing import tables as t
from routing.model import TELLING, Reason

_CLOCK = sa.func.clock_timestamp()
_LOOK = 0.05  # seconds between looks at what another process may be doing

# The words with which an event is closed that led to no decision, and what they mean to whoever asked for one.
_UNDECIDED = {
    "owned": "the lead has an owner in the CRM; clear it there to have it routed",
    "overridden": "somebody else became its owner in the CRM, and the human wins; clear it there to have it routed",
    "echo": "the lead has its agent already",
    "nothing": "it was decided while write_back was off, so the CRM was never told",
    "leave_released": "its owner was cleared, and the configuration leaves such leads",
    "park": "its owner is cleared again and again; `turnlock parked`",
}


@dataclass(frozen=True, slots=True)
class Routed:
    """How a lead that was routed by hand came out: our id of it and the word with which its event was closed."""

    lead_id: UUID
    word: str

    @property
    def decided(self) -> bool:
        """Whether there is a new decision. One that is held as before makes no new one, but was decided too."""
        return self.word not in _UNDECIDED

    @property
    def text(self) -> str:
        """Why nothing was decided; empty when it was."""
        return _UNDECIDED.get(self.word, "")


def route(runtime: Runtime, tenant: Tenant, ref: str, lead_id: UUID | None, *, patience: float) -> Routed:
    """Decide one lead now and write it to the CRM, in this process, beside whatever worker runs.

    Raises :class:`NotFound` when the CRM does not show the lead, and :class:`TurnlockError` that says what it waits
    for when it is not decided after `patience` seconds: it stays in the inbox and a worker goes on by itself.
    """
    tenant_id = tenant.tenant_id
    e, d = events.c, deliveries.c
    with unit(runtime.engine) as (conn, _):
        inbox.enqueue(conn, tenant_id, "console", [(ref, lead_id)])
        event_id = conn.execute(
            sa.select(e.event_id)
            .join(deliveries, (d.tenant_id == e.tenant_id) & (d.delivery_id == e.delivery_id))
            .where(e.tenant_id == tenant_id, e.ref == ref, e.state == "waiting", d.source == "console")
            .order_by(e.event_id.desc())
            .limit(1)
        ).scalar_one()
    # Nothing is born leased: a write that is due for anyone is sent below, or by a worker that is quicker.
    decider = Decider(runtime, lambda *_: None, lambda: 0)
    sender = Sender(runtime)
    ends = time.monotonic() + patience
    while True:
        busy = decider.run(tenant_id) + sender.run(tenant_id, ("owner", "collaborator"))
        with runtime.engine.connect() as conn:
            row = conn.execute(
                sa.select(e.state, e.reason, e.lead_id).where(e.tenant_id == tenant_id, e.event_id == event_id)
            ).one()
            left = _under_way(conn, tenant_id, event_id, row.lead_id)
        if row.state == "waiting":
            _give_hope_up(runtime, tenant, ref, row, late=time.monotonic() > ends)
        elif left is None or not tenant.sending or left > ends - time.monotonic():
            break
        if not busy:
            time.sleep(_LOOK)
    for kind in TELLING:  # unless others stand before them: a worker sends those in time
        sender.run(tenant_id, (kind,))
    if row.state == "parked":
        raise TurnlockError(f"lead {ref!r} is {event_text('parked', row.reason)} ({event_id})")
    if row.lead_id is None or row.reason == Reason.GONE.value:
        raise NotFound(f"the CRM has no lead {ref!r}; give the CRM's id of a lead")
    return Routed(row.lead_id, row.reason)


def _under_way(conn: sa.Connection, tenant_id: UUID, event_id: UUID, lead_id: UUID | None) -> float | None:
    """Seconds until something more of this lead is due (a write, collaborators); None when nothing is left."""
    if lead_id is None:
        return None
    e, o = events.c, t.outbox.c
    due = sa.union_all(
        sa.select(o.due_at).where(
            o.tenant_id == tenant_id, o.lead_id == lead_id, o.kind.not_in(TELLING), o.state == "open"
        ),
        sa.select(e.due_at).where(
            e.tenant_id == tenant_id,
            e.lead_id == lead_id,
            e.state == "waiting",
            e.event_id != event_id,
            # What waits to settle brings no news to a lead that was decided by hand meanwhile.
            e.reason.is_distinct_from("settling"),
        ),
    ).subquery()
    first = conn.execute(sa.select(sa.extract("epoch", sa.func.min(due.c.due_at) - _CLOCK))).scalar_one()
    return None if first is None else max(0.0, float(first))


def _give_hope_up(runtime: Runtime, tenant: Tenant, ref: str, row: Any, *, late: bool) -> None:
    """Raise when waiting longer cannot help, or has lasted long enough."""
    if row.reason == "not_readable":
        wait = timedelta(seconds=tenant.adapter.missing_is_final_after)
        raise NotFound(f"the CRM does not show a lead {ref!r}; if it is new, it is decided by itself within {wait}")
    if row.reason == "behind_write" and row.lead_id is not None:
        o = t.outbox.c
        with runtime.engine.connect() as conn:
            stuck = conn.execute(
                sa.select(o.outbox_id)
                .where(o.tenant_id == tenant.tenant_id, o.lead_id == row.lead_id, o.state == "parked")
                .limit(1)
            ).scalar_one_or_none()
        if stuck is not None:
            raise TurnlockError(
                f"lead {ref!r} waits behind write {stuck}, which is parked; "
                f"`turnlock replay {tenant.name} {stuck}` or `turnlock give-up {tenant.name} {stuck}`"
            )
        if not tenant.sending:
            raise TurnlockError(
                f"lead {ref!r} waits behind a write, and sending is stopped; `turnlock outbox start {tenant.name}`"
            )
    if late:
        raise TurnlockError(
            f"lead {ref!r} is not decided yet: {event_text('waiting', row.reason)}. It stays in the inbox; "
            "a running worker goes on by itself"
        )
