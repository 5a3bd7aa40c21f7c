"""What waits for a human: listing it, trying it again, giving it up.

Nothing here is a second way to an assignment: everything goes back through the inbox or the outbox and is decided and
written under the same locks as a webhook.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from adapters.base import Event, EventKind, Unreadable, WebhookRequest
from connector import inbox, work
from connector.alarms import close_alarm
from connector.database import new_id, unit
from connector.endings import give_back
from connector.errors import NotFound, TurnlockError
from connector.naming import Json, Names, iso
from connector.reasons import parked_event_remedy, parked_write_remedy, remedy_of
from connector.runtime import Runtime, Tenant
from connector.tables import dedupe_keys, deliveries, delivery_bodies, events
from routing import saving, store
from routing import tables as t
from routing.model import Reason, Role

_CLOCK = sa.func.clock_timestamp()


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of one parked thing: ``again`` is True when it is on its way, else ``text`` says why not."""

    kind: str
    id: str
    again: bool
    text: str


# -- listing --------------------------------------------------------------------------------------------------------


def parked(runtime: Runtime, tenant: Tenant) -> Json:
    """Everything of a tenant that waits for a human: events, writes to the CRM, and leads, each with its remedy."""
    tenant_id = tenant.tenant_id
    e, d, o, s = events.c, deliveries.c, t.outbox.c, t.lead_roles.c
    with runtime.engine.connect() as conn:
        names = Names.load(conn, tenant_id)
        found = conn.execute(
            sa.select(e.event_id, e.kind, e.ref, e.reason, e.received_at, e.attempt, d.source)
            .join(deliveries, (d.tenant_id == e.tenant_id) & (d.delivery_id == e.delivery_id))
            .where(e.tenant_id == tenant_id, e.state == "parked")
            .order_by(e.received_at, e.event_id)
        ).all()
        writes = conn.execute(
            sa.select(o.outbox_id, o.lead_id, o.kind, o.agent_id, o.reason, o.attempt, o.created_at)
            .where(o.tenant_id == tenant_id, o.state == "parked")
            .order_by(o.created_at, o.outbox_id)
        ).all()
        leads = conn.execute(
            sa.select(s.lead_id, s.role, s.reason, s.since)
            .where(s.tenant_id == tenant_id, s.state == "parked")
            .order_by(s.since, s.lead_id)
        ).all()
        refs = newest_refs(conn, tenant_id, {row.lead_id for row in (*writes, *leads)})
    return {
        "tenant": tenant.name,
        "events": [
            {
                "event_id": str(row.event_id),
                "lead": row.ref,
                "kind": row.kind,
                "source": row.source,
                "reason": row.reason,
                "remedy": parked_event_remedy(row.reason),
                "attempt": row.attempt,
                "received_at": iso(row.received_at),
            }
            for row in found
        ],
        "writes": [
            {
                "write_id": str(row.outbox_id),
                "lead": refs.get(row.lead_id),
                "kind": row.kind,
                "agent": names.agent(row.agent_id),
                "reason": row.reason,
                "remedy": parked_write_remedy(row.reason),
                "attempt": row.attempt,
                "ordered_at": iso(row.created_at),
            }
            for row in writes
        ],
        "leads": [
            {
                "lead_id": str(row.lead_id),
                "lead": refs.get(row.lead_id),
                "role": row.role,
                "reason": row.reason,
                "remedy": remedy_of(row.reason),
                "since": iso(row.since),
            }
            for row in leads
        ],
    }


def newest_refs(conn: sa.Connection, tenant_id: UUID, lead_ids: set[UUID]) -> dict[UUID, str]:
    """The newest CRM id of each lead."""
    c = t.lead_refs.c
    rows = conn.execute(
        sa.select(c.lead_id, c.ref)
        .where(c.tenant_id == tenant_id, c.lead_id == sa.any_(sa.cast(list(lead_ids), sa.ARRAY(sa.Uuid))))
        .order_by(c.created_at, c.ref.desc())
    )
    return {row.lead_id: row.ref for row in rows}


# -- again ----------------------------------------------------------------------------------------------------------


def replay_all(runtime: Runtime, tenant: Tenant) -> list[Replayed]:
    """Try everything parked again: events, then writes, then leads."""
    found = parked(runtime, tenant)
    ids = [one["event_id"] for one in found["events"]] + [one["write_id"] for one in found["writes"]]
    ids += [one["lead_id"] for one in found["leads"]]
    done = []
    for one in ids:
        with suppress(NotFound):  # somebody else was quicker
            done.append(replay_one(runtime, tenant, one))
    return done


def replay_one(runtime: Runtime, tenant: Tenant, text: str) -> Replayed:
    """Try one parked thing again: an event or a write by its id, a lead by the CRM's id or ours.

    Raises :class:`NotFound` when nothing parked has this id.
    """
    tenant_id = tenant.tenant_id
    wanted = _uuid(text)
    with unit(runtime.engine) as (conn, _):
        e = events.c
        done: Replayed | None = None
        if wanted is not None:
            # Locked against a second replay of the same event; nobody else touches a parked one.
            row = conn.execute(
                sa.select(e.event_id, e.delivery_id, e.ordinal, e.kind, e.reason, e.flag_version, e.received_at)
                .where(e.tenant_id == tenant_id, e.event_id == wanted, e.state == "parked")
                .with_for_update(key_share=True)
            ).one_or_none()
            done = _event(runtime, conn, tenant, row) if row is not None else _write_again(conn, tenant_id, wanted)
        done = done or _lead_again(conn, tenant_id, text, wanted)
    if done is None:
        raise NotFound(f"nothing parked has the id {text!r}; `turnlock parked {tenant.name}` lists what there is")
    runtime.wake(tenant_id)
    return done


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _event(runtime: Runtime, conn: sa.Connection, tenant: Tenant, row: Any) -> Replayed:
    if row.kind == EventKind.UNREADABLE:
        return _read_again(runtime, conn, tenant, row)
    _to_inbox(conn, tenant.tenant_id, row)
    return Replayed("event", str(row.event_id), True, "waits to be decided")


def _to_inbox(conn: sa.Connection, tenant_id: UUID, row: sa.Row[Any], **values: Any) -> None:
    """As if it had just come. Without its payload, which is a snapshot of long ago: the lead is read from the CRM."""
    _close_if_last(conn, tenant_id, row)
    e = events.c
    conn.execute(
        sa.update(events)
        .where(e.tenant_id == tenant_id, e.event_id == row.event_id)
        .values(
            state="waiting", reason=None, attempt=0, claims=0, lease=None, leased_until=None, closed_at=None,
            payload=None, due_at=_CLOCK, **values,
        )
    )  # fmt: skip


def _close_event(conn: sa.Connection, tenant_id: UUID, row: sa.Row[Any], state: str, reason: str) -> None:
    _close_if_last(conn, tenant_id, row)
    e = events.c
    conn.execute(
        sa.update(events)
        .where(e.tenant_id == tenant_id, e.event_id == row.event_id)
        .values(state=state, reason=reason, closed_at=_CLOCK, payload=None)
    )


def _close_if_last(conn: sa.Connection, tenant_id: UUID, row: sa.Row[Any]) -> None:
    """Close the alarm about events parked for this reason when this is the last of them. Call before it changes."""
    e = events.c
    more = conn.execute(
        sa.select(
            sa.exists().where(
                e.tenant_id == tenant_id, e.state == "parked", e.reason == row.reason, e.event_id != row.event_id
            )
        )
    ).scalar_one()
    if not more:
        kind = "unreadable_event" if row.kind == EventKind.UNREADABLE else "event_parked"
        close_alarm(conn, tenant_id, kind, row.reason or "unreadable")


def _read_again(runtime: Runtime, conn: sa.Connection, tenant: Tenant, row: sa.Row[Any]) -> Replayed:
    """Parse the stored body again. It was proven to be the CRM's when it came, so it is not verified a second time."""
    tenant_id = tenant.tenant_id
    b, d = delivery_bodies.c, deliveries.c
    stored = conn.execute(
        sa.select(b.body, d.headers)
        .join(deliveries, (d.tenant_id == b.tenant_id) & (d.delivery_id == b.delivery_id))
        .where(b.tenant_id == tenant_id, b.delivery_id == row.delivery_id)
    ).one_or_none()
    said = ("event", str(row.event_id))
    if stored is None:
        days = runtime.settings.body_retention_days
        text = f"its body is older than {days} days and gone; `turnlock sweep` finds leads that nobody has"
        return Replayed(*said, False, text)
    request = WebhookRequest("POST", f"{runtime.settings.public_url}/hooks/replay", stored.headers, bytes(stored.body))
    try:
        found = tenant.adapter.parse(request)
    except Unreadable as unreadable:
        return Replayed(*said, False, f"still unreadable ({unreadable.reason}); it stays parked")
    mine = found[row.ordinal] if row.ordinal < len(found) else None
    if mine is not None and mine.kind is EventKind.UNREADABLE:
        return Replayed(*said, False, f"still unreadable ({mine.problem}); it stays parked")
    more = _neighbours(conn, tenant_id, row, found)
    if mine is None or mine.kind is EventKind.UNKNOWN:
        _close_event(conn, tenant_id, row, "ignored", "nothing_to_decide")
        text = "it tells of no lead"
    elif not _take_key(conn, tenant_id, mine, row.event_id):
        _close_event(conn, tenant_id, row, "done", "duplicate")
        text = "the same event came again meanwhile and was read"
    else:
        _to_inbox(conn, tenant_id, row, kind=mine.kind.value, ref=mine.ref, occurred_at=mine.occurred_at)
        text = "can be read now and waits to be decided"
    return Replayed(*said, True, text + (f"; {more} more of its delivery too" if more else ""))


def _neighbours(conn: sa.Connection, tenant_id: UUID, row: sa.Row[Any], found: list[Event]) -> int:
    """A body that was unreadable as a whole may hold several events: store those that have no row of their own yet."""
    e = events.c
    there = set(
        conn.execute(sa.select(e.ordinal).where(e.tenant_id == tenant_id, e.delivery_id == row.delivery_id)).scalars()
    )
    rows = []
    for number, event in enumerate(found):
        if number in there or event.kind in (EventKind.UNKNOWN, EventKind.UNREADABLE):
            continue
        event_id = new_id()
        if _take_key(conn, tenant_id, event, event_id):
            rows.append(
                {
                    "tenant_id": tenant_id, "event_id": event_id, "delivery_id": row.delivery_id, "ordinal": number,
                    "kind": event.kind.value, "ref": event.ref, "flag_version": row.flag_version,
                    "received_at": row.received_at, "occurred_at": event.occurred_at,
                }
            )  # fmt: skip
    if rows:
        conn.execute(sa.insert(events), rows)
    return len(rows)


def _take_key(conn: sa.Connection, tenant_id: UUID, event: Event, event_id: UUID) -> bool:
    """Take the event's dedupe key; False when another event has it: that one was or will be decided."""
    k = dedupe_keys.c
    conn.execute(
        insert(dedupe_keys)
        .values(tenant_id=tenant_id, key=event.key, event_id=event_id, final=event.key_is_final)
        .on_conflict_do_nothing(index_elements=["tenant_id", "key"])
    )
    holder = conn.execute(
        sa.select(k.event_id).where(k.tenant_id == tenant_id, k.key == event.key)
    ).scalar_one_or_none()
    return holder == event_id


def _write_again(conn: sa.Connection, tenant_id: UUID, outbox_id: UUID) -> Replayed | None:
    o = t.outbox.c
    row = conn.execute(
        sa.select(o.kind, o.reason).where(o.tenant_id == tenant_id, o.outbox_id == outbox_id, o.state == "parked")
    ).one_or_none()
    if row is None:
        return None
    # `sent` and `claims` stay: they say that a write may have reached the CRM, so that the next try reads first.
    conn.execute(
        sa.update(t.outbox)
        .where(o.tenant_id == tenant_id, o.outbox_id == outbox_id, o.state == "parked")
        .values(state="open", reason=None, attempt=0, due_at=_CLOCK, lease=None, leased_until=None)
    )
    _close_write_alarm(conn, tenant_id, row.kind, row.reason)
    return Replayed("write", str(outbox_id), True, "waits to be sent")


def _close_write_alarm(conn: sa.Connection, tenant_id: UUID, kind: str, reason: str | None) -> None:
    """Close the alarm about such writes when none is left. Call after the row has left its parked state."""
    o = t.outbox.c
    more = conn.execute(
        sa.select(sa.exists().where(o.tenant_id == tenant_id, o.state == "parked", o.kind == kind, o.reason == reason))
    ).scalar_one()
    if not more:
        close_alarm(conn, tenant_id, f"{kind}_not_written", reason)


def _lead_again(conn: sa.Connection, tenant_id: UUID, text: str, lead_id: UUID | None) -> Replayed | None:
    r, s = t.lead_refs.c, t.lead_roles.c
    named = r.ref == text if lead_id is None else sa.or_(r.ref == text, r.lead_id == lead_id)
    row = conn.execute(
        sa.select(r.ref, r.lead_id)
        .join(t.lead_roles, (s.tenant_id == r.tenant_id) & (s.lead_id == r.lead_id))
        .where(r.tenant_id == tenant_id, named, s.role == Role.OWNER.value, s.state == "parked")
        .order_by(r.created_at.desc(), r.ref)
        .limit(1)
    ).one_or_none()
    if row is None:
        return None
    inbox.enqueue(conn, tenant_id, "replay", [(row.ref, row.lead_id)], coalesce="replay")
    close_alarm(conn, tenant_id, Reason.KEEPS_COMING_BACK.value, str(row.lead_id))
    return Replayed("lead", row.ref, True, "waits to be decided")


# -- given up ---------------------------------------------------------------------------------------------------------


def give_up(runtime: Runtime, tenant: Tenant, outbox_id: UUID) -> Json:
    """End a parked write for good: the agent's turn is given back and the lead stays without an agent of ours.

    Raises :class:`NotFound` when no write has this id and :class:`TurnlockError` when it is not parked.
    """
    tenant_id = tenant.tenant_id
    o = t.outbox.c
    with unit(runtime.engine) as (conn, now):
        found = conn.execute(
            sa.select(o.lead_id).where(o.tenant_id == tenant_id, o.outbox_id == outbox_id)
        ).scalar_one_or_none()
        if found is None:
            raise NotFound(f"no write {outbox_id}; `turnlock parked {tenant.name}` lists those that can be given up")
        store.lock_leads(conn, tenant_id, [found])
        row = conn.execute(sa.select(t.outbox).where(o.tenant_id == tenant_id, o.outbox_id == outbox_id)).one()
        if row.state != "parked":
            raise TurnlockError(f"write {outbox_id} is {row.state}, not parked; only a parked write can be given up")
        ending = (
            sa.update(t.outbox)
            .where(o.tenant_id == tenant_id, o.outbox_id == outbox_id, o.state == "parked")
            .values(state="given_up", closed_at=now)
        )
        if conn.execute(ending).rowcount != 1:
            raise TurnlockError(f"write {outbox_id} was replayed at the same moment; look again and repeat")
        role = Role(row.role)
        ended = saving.end_assignment(conn, tenant_id, row.lead_id, role, state="void", now=now)
        give_back(runtime, conn, tenant_id, ended, "given_up", now)
        saving.set_standing(
            conn, tenant_id, row.lead_id, role, state="left", reason="given_up", now=now, agent_id=None, queue_id=None
        )
        work.want_if_held(conn, tenant_id)  # it may have been what filled a cap
        inbox.wake_events_of(conn, tenant_id, row.lead_id)
        _close_write_alarm(conn, tenant_id, row.kind, row.reason)
        names = Names.load(conn, tenant_id)
        lead = newest_refs(conn, tenant_id, {row.lead_id}).get(row.lead_id)
    runtime.wake(tenant_id)
    turn = ended.turn if ended is not None else None
    return {"write_id": str(outbox_id), "lead": lead, "agent": names.agent(row.agent_id), "turn_given_back": turn}
