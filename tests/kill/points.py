"""kill -9 at every step between two commits, without a hook in the product.

A step is frozen from outside. ``LOCK TABLE`` stops whoever comes to that table, in the middle of its transaction; a
standby that never answers stops a commit after it is on the disk and before its client hears of it; the sandbox holds
an answer. The views of the server tell whose session waits: that process is killed, then everything is let go.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
_SHARE, _ALL = "SHARE", "ACCESS EXCLUSIVE"  # stops who writes; stops who reads, too


class Missed(Exception):
    """Nobody came to the point in time."""


@dataclass(frozen=True)
class Waiter:
    """A session that stands still: whose process, its backend."""

    name: str
    pid: int


class Freezer:
    """Freezes and lets go. One at a time."""

    def __init__(self, house: House) -> None:
        self.house = house

    @contextmanager
    def locked(self, table: str, mode: str) -> Iterator[Callable[[], None]]:
        """The table is locked; gives what lets it go early."""
        with self.house.admin() as conn:
            conn.autocommit = False
            conn.execute("SET LOCAL lock_timeout = '3s'")
            try:
                conn.execute(f"LOCK TABLE {table} IN {mode} MODE")  # type: ignore[arg-type]
            except psycopg.errors.LockNotAvailable as error:
                raise Missed(f"{table} could not be locked") from error
            yield conn.rollback

    @contextmanager
    def commits_held(self) -> Iterator[None]:
        """Commits reach the disk and wait for a standby that there is not."""
        with self.house.admin() as conn:
            try:
                self._standby(conn, "nobody")
                yield
            finally:
                self._standby(conn, "")

    def _standby(self, conn: psycopg.Connection[Any], name: str) -> None:
        conn.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")  # type: ignore[arg-type]
        conn.execute("SELECT pg_reload_conf()")
        # The server takes it up a moment later, without a sign that could be awaited.
        time.sleep(0.1)

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


Point = Callable[[House], None]
POINTS: dict[str, Point] = {}


def _point(name: str) -> Callable[[Point], Point]:
    def add(point: Point) -> Point:
        POINTS[name] = point
        return point

    return add


def _at_lock(house: House, table: str, mode: str, query: str, names: tuple[str, ...]) -> None:
    freezer = Freezer(house)
    with freezer.locked(table, mode):
        house.kill(freezer.wait(query, names).name)


def _chained(house: House, first: tuple[str, str], query: str, then: Callable[[Freezer, ExitStack], tuple[str, str]]) -> None:
    """Freeze at `first`, set up what comes next, let go, and kill the same process where it then stands still."""
    freezer = Freezer(house)
    with ExitStack() as stack:
        with freezer.locked(*first) as let_go:
            waiter = freezer.wait(query, WORKERS if first[0] != "events" else (WEB,))
            further, how = then(freezer, stack)
            let_go()
            house.kill(freezer.wait(further, (waiter.name,), how=how).name)


def _hold_commits(freezer: Freezer, stack: ExitStack) -> tuple[str, str]:
    stack.enter_context(freezer.commits_held())
    return "COMMIT|INSERT INTO events", "SyncRep"


def _hold_events(freezer: Freezer, stack: ExitStack) -> tuple[str, str]:
    stack.enter_context(freezer.locked("events", _SHARE))
    return "^UPDATE events", "Lock"


# -- the web server -------------------------------------------------------------------------------------------


@_point("W1 body read")
def _w1(house: House) -> None:
    _at_lock(house, "hooks", _ALL, "FROM hooks", (WEB,))


@_point("W2 verified")
def _w2(house: House) -> None:
    # The statement that stores is one round trip: so that nothing of it happens, its session is ended with it.
    freezer = Freezer(house)
    with freezer.locked("dedupe_keys", _SHARE), house.admin() as conn:
        waiter = freezer.wait("INSERT INTO dedupe_keys", (WEB,))
        house.kill(waiter.name)
        conn.execute("SELECT pg_terminate_backend(%s, 2000)", [waiter.pid])


@_point("W3 storing")
def _w3(house: House) -> None:
    # Here the server goes on and commits for a client that is dead.
    _at_lock(house, "dedupe_keys", _SHARE, "INSERT INTO dedupe_keys", (WEB,))


@_point("W4 committed, not answered")
def _w4(house: House) -> None:
    _chained(house, ("events", _SHARE), "INSERT INTO events", _hold_commits)


@_point("W5 answered")
def _w5(house: House) -> None:
    lead = house.crm.create_lead()
    ends = time.monotonic() + _PATIENCE
    while time.monotonic() < ends:
        told = [row for row in house.crm.deliveries(since=0) if lead in row["leads"]]
        if any(row["state"] == "delivered" for row in told):
            house.kill(WEB)
            return
        time.sleep(0.005)
    raise Missed("no answer")


# -- deciders -------------------------------------------------------------------------------------------------


@_point("R1 claimed")
def _r1(house: House) -> None:
    _at_lock(house, "lead_refs", _ALL, "FROM lead_refs JOIN leads", WORKERS)


@_point("R2 queue locked")
def _r2(house: House) -> None:
    _at_lock(house, "members", _ALL, "FROM members", WORKERS)


@_point("R3 assigned")
def _r3(house: House) -> None:
    _at_lock(house, "turns", _SHARE, "INSERT INTO turns", WORKERS)


@_point("R4 position moved")
def _r4(house: House) -> None:
    _at_lock(house, "ledger", _SHARE, "INSERT INTO ledger", WORKERS)


@_point("R5 all written")
def _r5(house: House) -> None:
    _chained(house, ("ledger", _SHARE), "INSERT INTO ledger", _hold_events)


@_point("R6 committed, not known")
def _r6(house: House) -> None:
    _chained(house, ("ledger", _SHARE), "INSERT INTO ledger", _hold_commits)


# -- senders --------------------------------------------------------------------------------------------------


@_point("S1 claimed")
def _s1(house: House) -> None:
    _at_lock(house, "agent_refs", _ALL, "SELECT clock_timestamp.*FROM agent_refs", WORKERS)


@_point("S2 lead read")
def _s2(house: House) -> None:
    _while_held(house, "GET", apply=True)


@_point("S3 sent, not done")
def _s3_before(house: House) -> None:
    _while_held(house, "PUT", apply=False)


@_point("S3 done, not answered")
def _s3_after(house: House) -> None:
    _while_held(house, "PUT", apply=True)


@_point("S4 answered, not recorded")
def _s4(house: House) -> None:
    _at_lock(house, "assignments", _SHARE, "^UPDATE assignments SET confirmed_at", WORKERS)


@_point("S5 recorded, not known")
def _s5(house: House) -> None:
    _chained(house, ("assignments", _SHARE), "^UPDATE assignments SET confirmed_at", _hold_commits)


def _while_held(house: House, method: str, *, apply: bool) -> None:
    """Kill whoever waits for an answer of the CRM. It is not told which worker that is: both go."""
    path = r"/people/\d+|/leads/[^/?]+" if method == "GET" else ""
    fault = house.crm.fault(what="hold", method=method, path=path, apply=apply, times=1)
    try:
        if not house.crm.wait_held(count=1, timeout=_PATIENCE):
            raise Missed(f"no {method} was held")
        for name in WORKERS:
            house.kill(name)
    finally:
        with suppress(ValueError):
            house.crm.clear_faults(fault=fault)
        # What was held before it was done happens now, though its sender is dead: a late write.
        house.crm.release()
