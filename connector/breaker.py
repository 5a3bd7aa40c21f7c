"""The breaker: while a tenant's CRM is given a pause, asked for or earned, no worker of any process calls it.

When a pause is over, one caller of all goes first, the probe; the others wait until it is through. So a CRM that keeps
asking for time gets one call per pause, however many leads and workers wait. The probe is known by its time: for as
long as it may take, the pause stands to exactly that instant, unless the probe's process is seen dead.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError

from connector.alarms import close_alarm
from connector.alive import UNSEEN, lives, number_of
from connector.database import at_rest, is_outage
from connector.tables import breakers
from routing.flight import Statement, fly
from routing.tables import tenants

_CLOCK = sa.func.clock_timestamp()
# For how long a probe may keep the others waiting, and how often they look meanwhile.
_PROBE, _LOOK = timedelta(seconds=15), 0.3
# A pause so long over that nobody called since says nothing any more.
_STALE = timedelta(minutes=5)
# Begins the reason while a probe calls; the number of its process follows, then the reason itself.
_PROBING = "probe "
_SINCE = len(_PROBING) + len(UNSEEN) + 1
#: Begins the reasons that only a write can disprove: a CRM may let everybody read and nobody write.
WRITE = "write "


def shut_breaker(conn: sa.Connection, tenant_id: UUID, *, seconds: float, reason: str, lane: str = "all") -> None:
    """No call to this tenant's CRM goes out for `seconds`, by any worker. A later end wins over an earlier one.

    `lane` "note" holds up notes alone: their limits must never delay an owner.
    """
    new = insert(breakers).values(
        tenant_id=tenant_id, lane=lane, failures=1, reason=reason, open_at=_CLOCK + timedelta(seconds=seconds)
    )
    later = sa.func.greatest(breakers.c.open_at, new.excluded.open_at)
    conn.execute(
        new.on_conflict_do_update(
            index_elements=["tenant_id", "lane"],
            set_={
                "failures": breakers.c.failures + 1,
                "reason": new.excluded.reason,
                "open_at": sa.case((_is_probe(), new.excluded.open_at), else_=later),
            },
        )
    )


def breaker_left(tenant_id: UUID, lane: str = "all") -> sa.ScalarSelect[Any]:
    """Seconds until calls of this lane may go out to the CRM again, as part of a query.

    Null: now. 0 or below: now, by the one who then gets :func:`probe`.
    """
    left = sa.extract("epoch", breakers.c.open_at - _CLOCK)
    waiting = sa.case((_abandoned(), 0), else_=sa.func.least(left, _LOOK))
    while_probing = sa.case((sa.and_(_is_probe(), left > 0), waiting), else_=left)
    return sa.select(sa.func.max(while_probing)).where(_fresh(tenant_id, lane)).scalar_subquery()


def admit(conn: sa.Connection, tenant_id: UUID, lease: UUID) -> tuple[float, datetime | None]:
    """Seconds to wait before a call, 0 for none; and the probe that the caller then is, to be ended.

    `lease` is of what the caller has in hand: it names the process.
    """
    left = conn.execute(sa.select(breaker_left(tenant_id))).scalar_one()
    return admitted(conn, tenant_id, lease, left)


def admitted(
    conn: sa.Connection, tenant_id: UUID, lease: UUID, left: float | None, lane: str = "all"
) -> tuple[float, datetime | None]:
    """As :func:`admit`, where :func:`breaker_left` was read already."""
    if left is None or left > 0:
        return float(left or 0), None
    mine = probe(conn, tenant_id, lease, lane)
    return (0.0, mine) if mine is not None else (_LOOK, None)


def probe(conn: sa.Connection, tenant_id: UUID, lease: UUID, lane: str = "all") -> datetime | None:
    """Be the one caller after a pause: what to end it with, or None when somebody else is."""
    b = breakers.c
    reason = sa.case((_is_probe(), sa.func.substr(b.reason, _SINCE + 1)), else_=sa.func.coalesce(b.reason, ""))
    until = sa.select(_CLOCK + _PROBE).scalar_subquery()  # once for all rows
    mine = (
        conn.execute(
            sa.update(breakers)
            .where(_fresh(tenant_id, lane), sa.or_(b.open_at <= _CLOCK, _abandoned()))
            .values(open_at=until, reason=f"{_PROBING}{number_of(lease)} " + reason)
            .returning(b.open_at)
        )
        .scalars()
        .first()
    )
    if mine is None:
        return None
    assert isinstance(mine, datetime)  # noqa: S101 - the column's type
    others = sa.select(sa.literal(1)).where(_fresh(tenant_id, lane), b.open_at > _CLOCK, b.open_at != mine)
    if conn.execute(others).first() is not None:
        end_probe(conn, tenant_id, mine)
        return None
    return mine


def end_probe(conn: sa.Connection, tenant_id: UUID, mine: datetime) -> None:
    """The probe is through without an answer to whether the pause is over: the next caller is one."""
    b = breakers.c
    conn.execute(
        sa.update(breakers)
        .where(b.tenant_id == tenant_id, b.open_at == mine)
        .values(open_at=_CLOCK, reason=sa.func.substr(b.reason, _SINCE + 1))
    )


def passed(
    conn: sa.Connection, tenant_id: UUID, mine: datetime | None, lane: str = "all", *, wrote: bool = False
) -> None:
    """A call got through: pauses that are over, our probe's among them, are so for good, and what they told of.

    One that only an owner write (`wrote`) can disprove stays for the next probe.
    """
    b = breakers.c
    over = sa.or_(b.open_at <= _CLOCK, b.open_at == mine) if mine is not None else b.open_at <= _CLOCK
    here = sa.and_(b.tenant_id == tenant_id, b.lane.in_({"all", lane}), over)
    probing = sa.and_(_is_probe(), sa.func.substr(b.reason, _SINCE + 1).startswith(WRITE))
    only_a_write = sa.or_(b.reason.startswith(WRITE), probing)
    disproved = sa.true() if wrote else sa.or_(b.lane != "all", ~sa.func.coalesce(only_a_write, sa.false()))
    gone = conn.execute(sa.delete(breakers).where(here, disproved).returning(b.lane)).scalars().all()
    if mine is not None:
        end_probe(conn, tenant_id, mine)
    if gone:
        close_alarm(conn, tenant_id, "crm_refuses_us")


def pauses(conn: sa.Connection, tenant_id: UUID) -> list[tuple[str, datetime, str]]:
    """The pauses that stand now, for showing: of which lane, until when (UTC), and why."""
    b = breakers.c
    rows = conn.execute(
        sa.select(b.lane, b.open_at, b.reason).where(b.tenant_id == tenant_id, b.open_at > _CLOCK).order_by(b.lane)
    )
    said = [(row, row.reason or "") for row in rows]
    return [
        (
            "notes" if row.lane == "note" else "every call",
            row.open_at.astimezone(UTC),
            f"{reason[_SINCE:]}, being tried" if reason.startswith(_PROBING) else reason,
        )
        for row, reason in said
    ]


def _may_send() -> Statement:
    b, c = breakers.c, tenants.c
    tenant_id = sa.bindparam("tenant", type_=sa.Uuid)
    mine: Any = sa.bindparam("mine", type_=sa.DateTime(timezone=True))
    shut = sa.exists().where(
        b.tenant_id == tenant_id, b.lane == "all", b.open_at > _CLOCK, b.open_at.is_distinct_from(mine)
    )
    return Statement(sa.select(sa.and_(c.sending, ~shut).label("now")).where(c.tenant_id == tenant_id))


_MAY_SEND = _may_send()


def may_send(conn: sa.Connection, tenant_id: UUID, mine: datetime | None = None) -> bool:
    """Whether a write may go out now: the tenant's sending is not stopped, the breaker not shut but for our probe."""
    ((row,),) = fly(conn, [_MAY_SEND(tenant=tenant_id, mine=mine)])
    return bool(row.now)


class Probe:
    """A thread's part in the breaker: whether it is the one that calls after a pause. One per thread."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self.mine: datetime | None = None

    def admitted(self, tenant_id: UUID, lease: UUID, left: float | None, lane: str) -> float:
        """Seconds to wait, by what :func:`breaker_left` said; 0: call, as the probe if there was a pause."""
        if left is None:
            return 0.0
        with at_rest(self._engine) as conn:
            wait, self.mine = admitted(conn, tenant_id, lease, left, lane)
        return wait

    def may_send(self, tenant_id: UUID) -> bool:
        """See :func:`may_send`."""
        with at_rest(self._engine) as conn:
            return may_send(conn, tenant_id, self.mine)

    def end(self, tenant_id: UUID) -> None:
        """Whatever came of it, the next may call; nothing where :func:`passed` has said so already."""
        mine, self.mine = self.mine, None
        if mine is None:
            return
        try:
            with at_rest(self._engine) as conn:
                end_probe(conn, tenant_id, mine)
        except SQLAlchemyError as error:
            if not is_outage(error):  # its time runs out by itself
                raise


def _fresh(tenant_id: UUID, lane: str) -> sa.ColumnElement[bool]:
    b = breakers.c
    return sa.and_(b.tenant_id == tenant_id, b.lane.in_({"all", lane}), b.open_at > _CLOCK - _STALE)


def _is_probe() -> sa.ColumnElement[bool]:
    return sa.func.coalesce(breakers.c.reason, "").startswith(_PROBING)


def _abandoned() -> sa.ColumnElement[bool]:
    """Whether a probe was to call whose process is no more: nobody would tell what became of it."""
    return sa.and_(_is_probe(), ~lives(sa.func.substr(breakers.c.reason, len(_PROBING) + 1, len(UNSEEN))))
