"""Which leases still count: a worker holds an advisory lock for as long as it lives, and its leases name that lock.

A process that is killed cannot give its rows back, and the full lease is long, because a live worker must never be
overtaken. But PostgreSQL sees at once that the process is gone: its connections end, and the lock with them. So the
leases of a number that nobody holds are over a few seconds later, not a minute. Nothing else rests on it: a worker
that cannot hold its lock, or is cut off in a way that the server does not see, has plain leases that run out by time.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
import sqlalchemy as sa

from connector.database import new_id
from routing.flight import Statement, fly

#: A live worker whose connection was lost, as all are when the server restarts, holds its lock again within this time.
GRACE = 5.0
# Looks further apart than this may have missed that a lock was there: waiting begins anew.
_GAP = 2.0
_CLASS = 0x7475726E  # "turn": the class of these locks among all advisory locks of the database

_LOCKS = sa.table("pg_locks", *map(sa.column, ("locktype", "classid", "objsubid", "granted", "objid")))
#: What stands for a process that shows nobody whether it lives.
UNSEEN = "0" * 8

_HELD = Statement(
    sa.text(
        "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND classid = :class AND objsubid = 2 AND granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
)


class Life:
    """The life of this process as others see it, and those of the others as it sees them. Safe to share by threads."""

    def __init__(self) -> None:
        self._number = secrets.randbelow(2**31 - 1) + 1
        self._holds = threading.Event()
        self._lock = threading.Lock()
        self._seen: dict[int, float] = {}
        self._began = self._looked = float("-inf")
        self._shown_since: float | None = None  # the first of the looks in a row that showed this process as well
        self._shown_at = float("-inf")

    @contextmanager
    def held(self, conn: psycopg.Connection[Any]) -> Iterator[None]:
        """Be alive while `conn` is open: a direct connection, not one of a pooler that hands it to others meanwhile.

        Raises :class:`psycopg.Error` when that cannot be; try again on another connection.
        """
        # Only this process takes its number, so whoever holds it is an earlier session of ours that the server has
        # not seen the end of: it is worth a moment, not more.
        conn.execute("SET lock_timeout = '3s'")
        conn.execute("SELECT pg_advisory_lock(%s, %s)", [_CLASS, self._number])
        self._holds.set()
        try:
            yield
        finally:
            self._holds.clear()  # what is leased from now on is leased by time alone

    def wait_held(self, seconds: float) -> bool:
        """Wait until others see this process alive; False when that has not come about in time."""
        return self._holds.wait(seconds)

    def new_lease(self) -> UUID:
        """A fresh lease. It names this process: version 8, of which the first four bytes are the number of its lock."""
        if not self._holds.is_set():
            return new_id()
        value = self._number << 96 | secrets.randbits(96)
        return UUID(int=value & ~(0xF << 76) & ~(0x3 << 62) | 8 << 76 | 2 << 62)

    def look(self, conn: sa.Connection) -> None:
        """See who is alive. To be called again and again; after a pause of more than a moment the grace starts anew."""
        asked = time.monotonic()
        (rows,) = fly(conn, [_HELD(**{"class": _CLASS})])
        held = {row.objid for row in rows}
        now = time.monotonic()
        with self._lock:
            if self._number not in held:
                self._shown_since = None
            elif self._shown_since is None or asked - self._shown_at > _GAP:
                self._shown_since = asked
            self._shown_at = asked
            if now - self._looked > _GAP:
                self._began = now
                self._seen = dict.fromkeys(self._seen, now)
            self._looked = now
            self._seen = {n: at for n, at in self._seen.items() if now - at < GRACE} | dict.fromkeys(held, now)

    def living(self) -> Sequence[str] | None:
        """The numbers, as leases spell them, of all who must be taken for alive; None when too little was seen."""
        found = self.numbers()
        return None if found is None else [f"{number:08x}" for number in found]

    def numbers(self) -> Sequence[int] | None:
        """As :meth:`living`, the bare numbers."""
        with self._lock:
            if self._looked - self._began < GRACE or time.monotonic() - self._looked > _GAP:
                return None
            return list(self._seen)

    def known(self) -> tuple[int, float] | None:
        """The number of this process, and since when it is shown, while nobody can take it for dead; else None.

        Whoever knows who lives has then seen it, and goes on taking it for alive for longer than this stays true after
        its lock is lost: so it may count on what others grant the living.
        """
        with self._lock:
            since = self._shown_since
            if since is None or self._shown_at - since < GRACE or time.monotonic() - self._shown_at > _GAP:
                return None
            return self._number, since


def number_of(lease: UUID) -> str:
    """The number of the process that a lease names, as leases spell it; :data:`UNSEEN` where it names none."""
    return lease.hex[:8] if lease.version == 8 else UNSEEN


def lives(number: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Whether the server sees the process of this number alive, for what may be over the moment it is not."""
    k = _LOCKS.c
    same = sa.func.lpad(sa.func.to_hex(sa.cast(k.objid, sa.BigInteger)), 8, "0") == number
    ours = sa.and_(k.locktype == "advisory", k.classid == _CLASS, k.objsubid == 2, k.granted)
    return sa.or_(number == UNSEEN, sa.exists().where(ours, same))


def free(table: sa.FromClause, living: Sequence[str] | sa.ColumnElement[Any] | None) -> sa.ColumnElement[bool]:
    """Whether nobody has a row of `table`: not leased, the lease ran out, or who leased it is none of `living`.

    Those are given as they are, or as what :func:`routing.flight.one_of` makes of a parameter.
    """
    c = table.c
    over = sa.or_(c.leased_until.is_(None), c.leased_until < sa.func.clock_timestamp())
    if living is None:
        return over
    text = sa.cast(c.lease, sa.Text)
    names_its_process = sa.func.substr(text, 15, 1) == "8"
    known = living if isinstance(living, sa.ColumnElement) else sa.any_(sa.cast(list(living), sa.ARRAY(sa.Text)))
    alive = sa.func.left(text, 8) == known
    return sa.or_(over, sa.and_(names_its_process, sa.not_(alive)))
