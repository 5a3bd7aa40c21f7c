"""kill -9 at every step between two commits, without a hook in the product.

A step is frozen from outside. ``LOCK TABLE`` stops whoever comes to that table, in the middle of its transaction; a
standby that never answers stops a commit after it is on the disk and before its client hears of it; the sandbox holds
an answer. The views of the server tell whose session waits: that process is killed, then everything is let go.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.kill.house import WEB, WORKERS, House

# How long somebody is awaited at a point. The product's own sessions give up waiting for a lock after 2 seconds.
_PATIENCE = 6.0
_WAITING = (
    "SELECT usename, pid, query, wait_event_type || ':' || wait_event AS waits FROM pg_stat_activity "
    "WHERE usename = ANY (%s) AND state = 'active' AND (wait_event_type = 'Lock' OR wait_event = 'SyncRep')"
)
_WRITES, _ALL = "SHARE", "ACCESS EXCLUSIVE"  # what a lock stops: those who write, or those who read as well
_STORE = "INSERT INTO dedupe_keys"  # the one statement that stores a delivery
_CONFIRM = "^UPDATE assignments SET confirmed_at"


class Missed(Exception):
    """Nobody came to the point in time."""


@dataclass(frozen=True)
class Waiter:
    """A session that stands still: whose process, its backend."""

    name: str
    pid: int


class Freezer:
    """Freezes and lets go."""

    def __init__(self, house: House) -> None:
        self.house = house

    @contextmanager
    def locked(self, table: str, mode: str) -> Iterator[Callable[[], None]]:
        """The table is locked; gives what lets it go early."""
        with self.house.admin() as conn:
            conn.autocommit = False
            conn.execute("SET LOCAL lock_timeout = '3s'")
            try:
                conn.execute(f"LOCK TABLE {table} IN {mode} MODE")
            except psycopg.errors.LockNotAvailable as error:
                raise Missed(f"{table} could not be locked") from error
            yield conn.rollback

    @contextmanager
    def commits_held(self) -> Iterator[None]:
        """Commits reach the disk and wait for a standby that there is not."""
        with self.house.admin() as conn, self.house.admin() as probe:
            try:
                conn.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
                conn.execute("SELECT pg_reload_conf()")
                self._wait_held(conn, probe)
                yield
            finally:
                conn.execute("ALTER SYSTEM RESET synchronous_standby_names")
                conn.execute("SELECT pg_reload_conf()")
                while probe.pgconn.get_result() is not None:
                    pass

    def _wait_held(self, conn: psycopg.Connection[Any], probe: psycopg.Connection[Any]) -> None:
        """The server takes the setting up a moment later: the sign is a commit of ours that does not return."""
        held = "SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = %s"
        ends = time.monotonic() + 1.5
        sent = False
        while time.monotonic() < ends:
            if not sent:
                probe.pgconn.send_query(b"SELECT pg_logical_emit_message(true, 'probe', '')")
                sent = True
            time.sleep(0.01)
            row = conn.execute(held, [probe.info.backend_pid]).fetchone()
            if row is not None and row[0]:
                return
            probe.pgconn.consume_input()
            while sent and not probe.pgconn.is_busy():
                sent = probe.pgconn.get_result() is not None
        raise Missed("commits are not held")

    def wait(self, query: str, names: tuple[str, ...], *, how: str = "Lock") -> Waiter:
        """Wait for one of `names` to stand still in a statement that `query` (a regular expression) is found in."""
        wanted = re.compile(query, re.DOTALL)
        ends = time.monotonic() + _PATIENCE
        with self.house.admin() as conn:
            while time.monotonic() < ends:
                for name, pid, text, waits in conn.execute(_WAITING, [list(names)]).fetchall():
                    if how in waits and wanted.search(text):
                        return Waiter(name, pid)
                time.sleep(0.005)
        raise Missed(query)


#: Makes a lead come in, so that somebody comes to the point.
Come = Callable[[], None]
Point = Callable[[House, Come], None]
#: Every point by its name.
POINTS: dict[str, Point] = {}


def _point(name: str) -> Callable[[Point], Point]:
    def add(point: Point) -> Point:
        POINTS[name] = point
        return point

    return add


def _at_lock(house: House, come: Come, table: str, mode: str, query: str, names: tuple[str, ...] = WORKERS) -> None:
    freezer = Freezer(house)
    with freezer.locked(table, mode):
        come()
        house.kill(freezer.wait(query, names).name)


def _at_commit(house: House, come: Come, table: str, query: str, names: tuple[str, ...] = WORKERS) -> None:
    """Freeze in the middle of a transaction, let it go on to its commit, and kill its process there."""
    freezer = Freezer(house)
    with freezer.locked(table, _WRITES) as let_go:
        come()
        waiter = freezer.wait(query, names)
        with freezer.commits_held():
            let_go()
            house.kill(freezer.wait(f"COMMIT|{query}", (waiter.name,), how="SyncRep").name)


# -- the web server -------------------------------------------------------------------------------------------


@_point("W1 body read")
def _w1(house: House, come: Come) -> None:
    _at_lock(house, come, "hooks", _ALL, "FROM hooks", (WEB,))


@_point("W2 verified")
def _w2(house: House, come: Come) -> None:
    # The statement that stores is one round trip: so that nothing of it happens, its session is ended with it.
    freezer = Freezer(house)
    with freezer.locked("dedupe_keys", _WRITES), house.admin() as conn:
        come()
        waiter = freezer.wait(_STORE, (WEB,))
        house.kill(waiter.name)
        conn.execute("SELECT pg_terminate_backend(%s, 2000)", [waiter.pid])


@_point("W3 storing")
def _w3(house: House, come: Come) -> None:
    # Here the database goes on and commits for a client that is dead.
    _at_lock(house, come, "dedupe_keys", _WRITES, _STORE, (WEB,))


@_point("W4 committed, not answered")
def _w4(house: House, come: Come) -> None:
    _at_commit(house, come, "dedupe_keys", _STORE, (WEB,))


@_point("W5 answered")
def _w5(house: House, come: Come) -> None:
    last = max((row["id"] for row in house.crm.deliveries()), default=0)
    come()
    ends = time.monotonic() + _PATIENCE
    while time.monotonic() < ends:
        if any(row["state"] == "delivered" for row in house.crm.deliveries(since=last)):
            house.kill(WEB)
            return
        time.sleep(0.005)
    raise Missed("no answer")


# -- deciders -------------------------------------------------------------------------------------------------


@_point("R1 claimed")
def _r1(house: House, come: Come) -> None:
    _at_lock(house, come, "lead_refs", _ALL, "AS asked.*FROM lead_refs")


@_point("R2 queue locked")
def _r2(house: House, come: Come) -> None:
    _at_lock(house, come, "members", _ALL, "FROM members")


@_point("R3 assigned")
def _r3(house: House, come: Come) -> None:
    _at_lock(house, come, "turns", _WRITES, "^INSERT INTO turns")


@_point("R4 turn taken")
def _r4(house: House, come: Come) -> None:
    _at_lock(house, come, "outbox", _WRITES, "^INSERT INTO outbox.*claims")


@_point("R5 position moved")
def _r5(house: House, come: Come) -> None:
    _at_lock(house, come, "ledger", _WRITES, "^INSERT INTO ledger")


@_point("R6 committed, not known")
def _r6(house: House, come: Come) -> None:
    _at_commit(house, come, "ledger", "^INSERT INTO ledger")


# -- senders --------------------------------------------------------------------------------------------------


@_point("S1 claimed")
def _s1(house: House, come: Come) -> None:
    # What a sender needs is read in the flight that commits the decision, behind the commit. So the lock is asked for
    # while the unit stands still before that, and granted when it has committed.
    freezer, killed = Freezer(house), threading.Event()

    def lock() -> None:
        with contextlib.suppress(Missed), freezer.locked("agent_refs", _ALL):
            killed.wait(_PATIENCE)

    locking = threading.Thread(target=lock)
    try:
        with freezer.locked("turns", _WRITES) as let_go, house.admin() as conn:
            come()
            freezer.wait("^INSERT INTO turns", WORKERS)
            locking.start()
            asked = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
            ends = time.monotonic() + 1.0
            while conn.execute(asked).fetchone() == (0,) and time.monotonic() < ends:
                time.sleep(0.005)
            let_go()
            house.kill(freezer.wait("(?=.*agent_refs)(?=.*breakers)", WORKERS).name)
    finally:
        killed.set()
        if locking.ident is not None:
            locking.join()


@_point("S2 read, not sent")
def _s2(house: House, come: Come) -> None:
    _while_held(house, come, apply=False, outcome="drop")


@_point("S3 sent, done late")
def _s3_late(house: House, come: Come) -> None:
    _while_held(house, come, apply=False, outcome="answer")


@_point("S3 done, not answered")
def _s3_done(house: House, come: Come) -> None:
    _while_held(house, come, apply=True, outcome="drop")


@_point("S4 answered, not recorded")
def _s4(house: House, come: Come) -> None:
    with _written(house, come) as answer:
        _at_lock(house, answer, "assignments", _WRITES, _CONFIRM)


@_point("S5 recorded, not known")
def _s5(house: House, come: Come) -> None:
    with _written(house, come) as answer:
        _at_commit(house, answer, "assignments", _CONFIRM)


@contextmanager
def _written(house: House, come: Come) -> Iterator[Come]:
    """An owner write is done and not answered; gives what answers it, so that somebody comes to record it."""
    fault = house.crm.fault(what="hold", method="PUT", apply=True, times=1)

    def answer() -> None:
        house.crm.clear_faults(fault=fault)
        house.crm.release(outcome="answer")

    try:
        come()
        if not house.crm.wait_held(count=1, timeout=_PATIENCE):
            raise Missed("no write was held")
        yield answer
    finally:
        answer()


def _while_held(house: House, come: Come, *, apply: bool, outcome: str) -> None:
    """Kill whoever waits for the answer to an owner write. It is not told which worker that is: both go.

    Not done before and dropped after: as if it never left. Not done before and let go: a write of the dead.
    """
    fault = house.crm.fault(what="hold", method="PUT", apply=apply, times=1)
    try:
        come()
        if not house.crm.wait_held(count=1, timeout=_PATIENCE):
            raise Missed("no write was held")
        for name in WORKERS:
            house.kill(name)
    finally:
        house.crm.clear_faults(fault=fault)
        house.crm.release(outcome=outcome)


#: Points that take both workers.
TAKE_BOTH = ("S2 read, not sent", "S3 sent, done late", "S3 done, not answered")
