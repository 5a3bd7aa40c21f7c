"""The way into PostgreSQL: engine, transactions with their time-outs, and what makes a server fit to keep promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast
from uuid import UUID

import psycopg
import sqlalchemy as sa
import sqlalchemy.event
from psycopg.pq import TransactionStatus
from sqlalchemy.exc import DBAPIError
from uuid_utils.compat import uuid7

from connector.errors import SettingsError
from routing.flight import BEGIN, Aside, Ask, Asking, Rows, Statement, fly_alone, question, together

# A row lock that takes longer than this is held by a stuck session, not by a busy queue: give up, try again later.
LOCK_TIMEOUT = "2s"
# No statement of ours is long; one that is has met a missing index or a sick server, and must not pin a worker.
STATEMENT_TIMEOUT = "30s"
# A client that stops in the middle of a transaction would keep its locks; the server ends it.
IDLE_TIMEOUT = "15s"

#: How PostgreSQL plans what we ask, all of which is by key. A plan is kept with its connection, and made of what is
#: known of the tables when it is made.
#: - For a table of fifty rows reading the whole of it is cheapest, and it stays so thousands of leads later. Every
#:   question of ours has an index; where one had not, jit would take the price set on this for real work.
#: - For an account that had no rows when they were counted last, any index that begins with the account looks as good
#:   as the one that is meant. So no plan is made for certain values: for any account, that is.
PLANNING = {"enable_seqscan": "off", "jit": "off", "plan_cache_mode": "force_generic_plan"}

_NOW = sa.text("SELECT clock_timestamp()")
_TIME = Statement(sa.text("SELECT clock_timestamp() AS now"))
_TIME_OUTS = Statement(
    sa.text(
        "SELECT clock_timestamp() AS now, set_config('lock_timeout', :lock, true), "
        "set_config('statement_timeout', :statement, true), "
        "set_config('idle_in_transaction_session_timeout', :idle, true)"
        + "".join(f", set_config('{name}', '{value}', true)" for name, value in PLANNING.items())
    )
)
#: Lets the transaction's COMMIT be answered before it is on the disk: only where nothing rests on it but what a later
#: commit carries there, which the log holds in order, and where losing it with the server's crash changes nothing.
NO_DISK = Statement(sa.text("SELECT set_config('synchronous_commit', 'off', true)"))()
_COUNT_ROWS = sa.text("SELECT turnlock_count_rows()")
_LOCK_TIMEOUT = Statement(sa.text("SELECT set_config('lock_timeout', :value, true)"))

# Lost connection, server going away, read-only after a failover: nothing is wrong with the work, wait and repeat.
_CONNECTION_CLASSES = ("08", "53", "57")
_CONNECTION_STATES = ("25006", "25P03")
# Lost a lock race: repeat at once, counting no attempt.
_CONTENTION_STATES = ("55P03", "40P01", "40001")

T = TypeVar("T")


def new_id() -> UUID:
    """A fresh UUIDv7: sorts by time of making, so that indexes grow at one end."""
    return uuid7()


def make_engine(url: str, *, pooled: bool = False, pool_size: int = 10, pool_timeout: float = 0.8) -> sa.Engine:
    """An engine on `url`. `pooled` says that a pooler in transaction mode stands between: no prepared statements.

    `pool_timeout` (seconds) is short on purpose: a web request that gets no connection answers 503 within a second,
    and the CRM repeats it, rather than hanging until the CRM gives up.
    """
    connect_args: dict[str, object] = {"connect_timeout": 5, "application_name": "turnlock"}
    # What is worth preparing goes by flight; psycopg drops all that is prepared when it rolls back what it prepared.
    connect_args["prepare_threshold"] = None
    if not pooled:
        settings = {
            "lock_timeout": LOCK_TIMEOUT,
            "statement_timeout": STATEMENT_TIMEOUT,
            "idle_in_transaction_session_timeout": IDLE_TIMEOUT,
            **PLANNING,
        }
        connect_args["options"] = " ".join(f"-c {name}={value}" for name, value in settings.items())
    # No ping before each use: it costs a round trip every time, and a lost connection is found by its first statement
    # anyway; then the whole pool is made anew, and every caller repeats what it did.
    engine = sa.create_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=pool_timeout,
        pool_use_lifo=True,  # those used last have prepared what is sent most
        connect_args=connect_args,
        hide_parameters=True,  # an error's text must not hold a lead
        # The driver opens no transactions by itself, so that a single statement costs one round trip and no switching
        # back and forth; `_begin` opens them for everybody who does not ask for :func:`at_once` or :func:`at_rest`.
        isolation_level="AUTOCOMMIT",
        pool_reset_on_return=None,  # see `_reset`
    )
    sa.event.listen(engine, "begin", _begin)
    sa.event.listen(engine, "reset", _reset)
    return engine.execution_options(turnlock_pooled=pooled)


def _reset(driver: Any, _: Any, state: Any) -> None:
    """Roll back what a connection that goes back to the pool has left open: hardly ever anything, so look first."""
    if not state.terminate_only and driver.pgconn.transaction_status != TransactionStatus.IDLE:
        driver.rollback()


def _begin(conn: sa.Connection) -> None:
    driver: Any = conn.connection.driver_connection
    if conn.get_execution_options().get("turnlock_plain"):
        return
    # Of another isolation level psycopg opens the transaction itself, with its first statement: a flight goes past it.
    conn.exec_driver_sql("BEGIN" if driver.autocommit else "SELECT 1")


def at_once(
    engine: sa.Engine,
    statement: Statement,
    values: Mapping[str, Any],
    *,
    repeat: bool = True,
    aside: Aside[Any] | None = None,
    early: Callable[[Sequence[Any]], None] | None = None,
) -> Sequence[Any]:
    """Run one idempotent statement as a transaction of its own, in one round trip; gives its rows.

    `aside` is asked in it as well, behind the statement. `early` is called with the rows, and the aside answered, while
    they are being committed (see :func:`routing.flight.fly_alone`); not together with `repeat`.

    A connection that turns out to be lost is replaced and the statement repeated once: it may have been carried out,
    which is why it must be idempotent; without `repeat` the caller looks after that. Raises
    :class:`sqlalchemy.exc.DBAPIError`.
    """
    first = []
    if engine.get_execution_options().get("turnlock_pooled"):
        first = [_time_outs(LOCK_TIMEOUT)]  # a pooler's connection has no settings of ours
    asks = [*first, statement(**values), *(aside.asks if aside is not None else ())]

    def rows(found: Sequence[Rows]) -> Sequence[Any]:
        if aside is not None:
            aside.heard(found[len(first) + 1 :])
        return found[len(first)]

    try:
        found = fly_alone(engine, asks, (lambda found: early(rows(found))) if early is not None else None)
    except DBAPIError as error:
        if not (repeat and error.connection_invalidated):
            raise
        found = fly_alone(engine, asks)
    return rows(found)


@contextmanager
def at_rest(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection for plain reads, each a transaction of its own: no BEGIN and no ROLLBACK to wait for."""
    with engine.connect() as conn:
        yield conn.execution_options(turnlock_plain=True)


@contextmanager
def pipelined(conn: sa.Connection) -> Iterator[None]:
    """Send the statements of this block without waiting for each answer; their errors come at its end.

    For statements whose results nobody looks at: a unit's inserts are many and each wait is a round trip.
    """
    driver: Any = conn.connection.driver_connection  # psycopg's own connection, beneath SQLAlchemy's
    try:
        with driver.pipeline():
            yield
    except psycopg.Error as error:
        raise DBAPIError.instance(None, None, error, psycopg.Error, dialect=conn.dialect) from error


@contextmanager
def unit(engine: sa.Engine, *, lock_timeout: str = LOCK_TIMEOUT) -> Iterator[tuple[sa.Connection, datetime]]:
    """One transaction, READ COMMITTED, with its time-outs. Yields the connection and the database's time."""
    with transaction(engine) as conn:
        (now,) = together(conn, opening(conn, lock_timeout=lock_timeout))
        yield conn, now


@contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Like :func:`unit`, but the first flight of the block brings :func:`opening` itself, and the last may COMMIT."""
    with engine.connect() as conn, conn.execution_options(turnlock_plain=True).begin():
        yield conn


def opening(conn: sa.Connection, *, lock_timeout: str = LOCK_TIMEOUT) -> Asking[datetime]:
    """Asks for a transaction with its time-outs; comes to the database's time."""
    # A connection of our own has them from its start.
    usual = lock_timeout == LOCK_TIMEOUT and not conn.get_execution_options().get("turnlock_pooled")
    _, (row,) = yield [BEGIN, _TIME() if usual else _time_outs(lock_timeout)]
    return cast("datetime", row.now)


def _time_outs(lock_timeout: str) -> Ask:
    return _TIME_OUTS(lock=lock_timeout, statement=STATEMENT_TIMEOUT, idle=IDLE_TIMEOUT)


class DatabaseClock:
    """The database's time for what is judged outside of its statements: signatures, dates that a CRM gives.

    The clock of this computer may be minutes off, and then every genuine signature would look stale. So the time of the
    last reading is counted on with the monotonic clock. Safe to share between threads.
    """

    # A monotonic clock stands still while a computer sleeps: what is counted on must be little.
    _FRESH = 2.0

    def __init__(self) -> None:
        self._read: tuple[datetime, float] | None = None

    def read(self, conn: sa.Connection, *, fresh: bool = False) -> datetime:
        """Ask the database, unless that was done within two seconds and need not be `fresh`; its time."""
        kept = self._read
        if fresh or kept is None or time.monotonic() - kept[1] >= self._FRESH:
            now: datetime = conn.execute(_NOW).scalar_one()
            self._read = (now, time.monotonic())
        return self.now()

    def now(self) -> datetime:
        """The database's time, aware. Raises :class:`LookupError` before the first reading."""
        if self._read is None:
            raise LookupError("the database's clock was never read")
        at, then = self._read
        return at + timedelta(seconds=time.monotonic() - then)


@question
def patiently(lock_timeout: str, locking: Asking[T]) -> Asking[T]:
    """`locking` with another time-out than the transaction's for its first flight."""
    asks = next(locking)
    _, *rows, _ = yield [_LOCK_TIMEOUT(value=lock_timeout), *asks, _LOCK_TIMEOUT(value=LOCK_TIMEOUT)]
    try:
        locking.send(rows)
    except StopIteration as end:
        return cast("T", end.value)
    raise AssertionError("what locks asks once")


def count_rows(conn: sa.Connection) -> int:
    """Have PostgreSQL count the rows of tables that it knows nothing of, once there is more than a page; how many.

    Without, it takes a tenant's rows for one or two, and whatever finds all of them for as good as what finds the one
    that is meant. Autovacuum looks once a minute: a burst into a new database would be over by then, or would have read
    every row for each that it writes. Takes a quarter of a millisecond where there is nothing to do.
    Source: https://www.postgresql.org/docs/current/planner-stats.html.
    """
    return int(conn.execute(_COUNT_ROWS).scalar_one())


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE behind a SQLAlchemy or psycopg error, if it has one."""
    original = error.orig if isinstance(error, DBAPIError) else error
    return getattr(original, "sqlstate", None)


def is_contention(error: BaseException) -> bool:
    """Whether `error` only says that someone else held a lock."""
    return sqlstate(error) in _CONTENTION_STATES


def is_outage(error: BaseException) -> bool:
    """Whether `error` speaks of the server or the way to it, not of the work: repeat for as long as it takes."""
    if isinstance(error, sa.exc.TimeoutError):  # no connection free in the pool
        return True
    state = sqlstate(error)
    if state is None:
        original = error.orig if isinstance(error, DBAPIError) else error
        return isinstance(original, (psycopg.OperationalError, psycopg.InterfaceError))
    return state[:2] in _CONNECTION_CLASSES or state in _CONNECTION_STATES


def check_server(conn: sa.Connection) -> None:
    """Refuse a server that can lose what it acknowledged, or is too old. Raises :class:`SettingsError`."""
    names = ("server_version_num", "fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names")
    found = {name: conn.execute(sa.text("SELECT current_setting(:n)"), {"n": name}).scalar_one() for name in names}
    problems = []
    if int(found["server_version_num"]) < 150000:
        problems.append("server_version: PostgreSQL 15 or newer is needed; upgrade the server")
    for name in ("fsync", "full_page_writes"):
        if found[name] != "on":
            problems.append(f"{name}: is {found[name]}; a crash could lose accepted leads. Set {name} = on")
    weak = {"off"} | ({"local"} if found["synchronous_standby_names"] else set())
    if found["synchronous_commit"] in weak:
        problems.append(
            f"synchronous_commit: is {found['synchronous_commit']}; an accepted lead could be lost. "
            "Set synchronous_commit = on"
        )
    if problems:
        raise SettingsError("Turnlock refuses this database:\n" + "\n".join(f"  {p}" for p in problems))
