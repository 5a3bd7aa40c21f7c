"""Leads that agents had without a turn: default agents, agents whom a rule names, whoever has the person already.

They are in no ledger, so they are counted from the assignments: rolled up by day once they are old enough that no
transaction can still add to them, and read as they are from there to now. An assignment whose write to the CRM is not
settled yet is set aside by its id and counted when it is. What counts is what the agent got: not a write that the CRM
refused or a human was quicker than, and not a lead whose return was approved (taken off on the day of that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from connector.database import unit
from connector.runtime import Runtime
from connector.tables import turnless_days, turnless_marks
from routing import store
from routing import tables as t
from routing.model import Role

#: Time that one transaction folds.
WINDOW = timedelta(hours=6)
# An assignment bears the time at which its transaction began. One takes seconds; with every statement at its time-out
# it would still be over by then.
_SETTLED = timedelta(hours=1)
# A lead made to try the way (`turnlock test-lead`) is nobody's gain.
_NOT_COUNTED = "chosen"

Found = Mapping[tuple[date, str, str], int]
"""Leads by day (UTC), agent and how the agent came to them."""


class _Key(NamedTuple):
    day: date
    rule: str
    how: str
    queue: str
    agent_id: UUID


@dataclass(frozen=True, slots=True)
class _Seen:
    """Leads of a stretch of time, and the assignments among them (ids as text) whose write is not settled."""

    leads: Counter[_Key]
    unsettled: tuple[str, ...]


def roll_up(runtime: Runtime, tenant_id: UUID, *, batches: int | None = None) -> bool:
    """Fold what is old enough; whether that is all, or `batches` windows of time came to their end first."""
    with runtime.engine.connect() as conn:
        if not runtime.tells(conn):
            return True
    while batches is None or batches > 0:
        with unit(runtime.engine) as (conn, now):
            if not _roll(conn, tenant_id, now - _SETTLED):
                return True
        batches = None if batches is None else batches - 1
    return False


def forget(conn: sa.Connection, tenant_id: UUID) -> None:
    """Drop a tenant's sums, to be made anew from the first assignment on."""
    # The mark first, as a roll-up locks it.
    conn.execute(sa.delete(turnless_marks).where(turnless_marks.c.tenant_id == tenant_id))
    conn.execute(sa.delete(turnless_days).where(turnless_days.c.tenant_id == tenant_id))


def _roll(conn: sa.Connection, tenant_id: UUID, until: datetime) -> bool:
    """Fold one window; whether there may be more."""
    m = turnless_marks.c
    mark = _mark(conn, tenant_id, lock=True)
    if mark is None:
        first = _first(conn, tenant_id)
        if first is None or first >= until:
            return False
        begin = insert(turnless_marks).values(tenant_id=tenant_id, folded_until=first, unsettled=[])
        conn.execute(begin.on_conflict_do_nothing(index_elements=["tenant_id"]))
        return True
    if mark.folded_until >= until:
        return False
    end = min(mark.folded_until + WINDOW, until)
    seen = _seen(conn, tenant_id, mark.folded_until, end, mark.unsettled, settled_only=True)
    if seen.leads:
        new = insert(turnless_days)
        conn.execute(
            new.on_conflict_do_update(
                index_elements=["tenant_id", *_Key._fields],
                set_={"leads": turnless_days.c.leads + new.excluded.leads},
            ),
            [{"tenant_id": tenant_id, **key._asdict(), "leads": count} for key, count in seen.leads.items()],
        )
    conn.execute(
        sa.update(turnless_marks)
        .where(m.tenant_id == tenant_id)
        .values(folded_until=end, unsettled=list(seen.unsettled))
    )
    return bool(end < until)


def _mark(conn: sa.Connection, tenant_id: UUID, *, lock: bool = False) -> Any:
    m = turnless_marks.c
    query = sa.select(m.folded_until, m.unsettled).where(m.tenant_id == tenant_id)
    # Protects the sums of this tenant: two that fold at once take turns. No other lock is taken while it is held, and
    # no decision ever asks for it.
    return conn.execute(query.with_for_update(key_share=True) if lock else query).one_or_none()


def _agent_ids(conn: sa.Connection, tenant_id: UUID) -> sa.ColumnElement[Any]:
    """All agents of a tenant: with them named, the index of assignments by agent and time serves."""
    g = t.agents.c
    ids = list(conn.execute(sa.select(g.agent_id).where(g.tenant_id == tenant_id)).scalars())
    return sa.any_(sa.cast(ids, sa.ARRAY(sa.Uuid)))


def _first(conn: sa.Connection, tenant_id: UUID) -> datetime | None:
    """When the first lead was assigned. Of each agent the first, by the index."""
    a, g = t.assignments.c, t.agents.c
    own = (
        sa.select(a.assigned_at)
        .where(a.tenant_id == g.tenant_id, a.agent_id == g.agent_id)
        .order_by(a.assigned_at)
        .limit(1)
        .scalar_subquery()
    )
    of_each = sa.select(own.label("first")).where(g.tenant_id == tenant_id).subquery()
    found: datetime | None = conn.execute(sa.select(sa.func.min(of_each.c.first))).scalar_one()
    return found


def _seen(
    conn: sa.Connection,
    tenant_id: UUID,
    start: datetime,
    end: datetime | None,
    unsettled: Iterable[str],
    *,
    settled_only: bool,
) -> _Seen:
    """Leads assigned without a turn from `start` to `end` (None: now), and those set aside earlier."""
    a = t.assignments.c
    within = [a.agent_id == _agent_ids(conn, tenant_id), a.assigned_at >= start]
    rows = _rows(conn, tenant_id, *within, *([] if end is None else [a.assigned_at < end]))
    aside = [UUID(one) for one in unsettled]
    if aside:
        rows += _rows(conn, tenant_id, a.assignment_id == sa.any_(sa.cast(aside, sa.ARRAY(sa.Uuid))))
    leads: Counter[_Key] = Counter()
    still: list[str] = []
    for row in rows:
        if row.open and settled_only:
            still.append(str(row.assignment_id))
        elif row.confirmed_at is not None or row.returned or row.state not in store.NEVER_HAD:
            leads[_key(row, row.assigned_at)] += 1
    return _Seen(leads, tuple(still))


def _rows(conn: sa.Connection, tenant_id: UUID, *which: sa.ColumnElement[bool]) -> list[Any]:
    a, d, o, r = t.assignments.c, t.decisions.c, t.outbox.c, t.returns.c
    open_write = sa.exists().where(
        o.tenant_id == a.tenant_id,
        o.lead_id == a.lead_id,
        o.decision_id == a.decision_id,
        o.kind == "owner",
        o.state.in_(("open", "parked")),
    )
    returned = sa.exists().where(r.tenant_id == a.tenant_id, r.assignment_id == a.assignment_id, r.state == "approved")
    return list(
        conn.execute(
            sa.select(
                a.assignment_id, a.agent_id, a.assigned_at, a.confirmed_at, a.state, open_write.label("open"),
                returned.label("returned"), *_told(),
            )
            .join(t.decisions, (d.tenant_id == a.tenant_id) & (d.decision_id == a.decision_id))
            .where(a.tenant_id == tenant_id, *_turnless(), *which)
        )
    )  # fmt: skip


def _turnless() -> list[sa.ColumnElement[bool]]:
    a, how = t.assignments.c, t.decisions.c.record["how"].astext
    return [a.turn.is_(None), a.role == Role.OWNER.value, how != _NOT_COUNTED]


def _told() -> list[sa.ColumnElement[Any]]:
    """The rule, the way to the agent, and the queue that the lead came from: where it waits when nobody is there."""
    d = t.decisions.c
    queue = sa.func.jsonb_path_query_first(d.record, sa.text("'$.paths[*].queue'")).op("#>>")(sa.text("'{}'"))
    return [d.rule, d.record["how"].astext.label("how"), queue.label("queue")]


def _key(row: Any, at: datetime) -> _Key:
    # A person's own agent and one whom a rule names stand beside all queues, whichever were asked before.
    queue = row.queue if row.how in ("default_agent", "rank") else None
    return _Key(at.astimezone(UTC).date(), row.rule or "", row.how, queue or "", row.agent_id)


# -- telling ----------------------------------------------------------------------------------------------------------


def counted(
    conn: sa.Connection, tenant_id: UUID, since: date, until: date, queue_id: UUID | None, rule: str | None
) -> Found:
    """Leads without a turn from the day `since` to the day `until` (UTC), both included, of one queue and rule or all.

    Call in one snapshot: what is folded and what is not must be of the same moment.
    """
    d = turnless_days.c
    queue = None if queue_id is None else str(queue_id)
    leads: Counter[_Key] = Counter()
    for row in conn.execute(
        sa.select(*(d[name] for name in _Key._fields), d.leads).where(
            d.tenant_id == tenant_id, d.day.between(since, until)
        )
    ):
        leads[_Key(*row[:-1])] += row.leads
    mark = _mark(conn, tenant_id)
    start = _first(conn, tenant_id) if mark is None else mark.folded_until
    if start is not None:
        leads += _seen(conn, tenant_id, start, None, () if mark is None else mark.unsettled, settled_only=False).leads
    leads.subtract(_returned(conn, tenant_id, since, until))
    found: Counter[tuple[date, str, str]] = Counter()
    for key, count in leads.items():
        if since <= key.day <= until and rule in (None, key.rule) and queue in (None, key.queue):
            found[key.day, str(key.agent_id), key.how] += count
    return found


def _returned(conn: sa.Connection, tenant_id: UUID, since: date, until: date) -> Counter[_Key]:
    """Those of which a return was approved in this time, by that day. Returns are few: an agent may ask some a day."""
    a, d, r = t.assignments.c, t.decisions.c, t.returns.c
    first = datetime.combine(since, time(), UTC)
    rows = conn.execute(
        sa.select(r.decided_at, a.agent_id, *_told())
        .join(t.assignments, (a.tenant_id == r.tenant_id) & (a.assignment_id == r.assignment_id))
        .join(t.decisions, (d.tenant_id == a.tenant_id) & (d.decision_id == a.decision_id))
        .where(
            r.tenant_id == tenant_id,
            r.state == "approved",
            r.decided_at >= first,
            r.decided_at < first + (until - since + timedelta(days=1)),
            *_turnless(),
        )
    )
    return Counter(_key(row, row.decided_at) for row in rows)
