"""Several statements in one round trip: the short way to the server, for what every lead passes through.

SQLAlchemy writes the statements and compiles each once; from then on they go to libpq as they are, prepared on their
connection, all in one flight. Building, caching and interpreting a statement each time costs about forty times as
much, and that, not PostgreSQL, is what a lead would wait for.

The server carries a flight out in order, one statement after the other, and under READ COMMITTED each sees what was
committed when it begins: a read that follows a lock in one flight is a read after the lock was granted. Once a
statement fails the rest of its flight is not carried out. Source:
https://www.postgresql.org/docs/current/libpq-pipeline-mode.html.
"""

from __future__ import annotations

import itertools
import re
import select
from collections import namedtuple
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg import pq
from psycopg.adapt import Transformer
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.exc import DBAPIError

from routing.spelling import encoded, literal

P = ParamSpec("P")
T = TypeVar("T")

_DIALECT = PGDialect_psycopg()  # type: ignore[no-untyped-call]
_numbers = itertools.count(1)
# The SQLSTATE by which :func:`exactly` ends a transaction on the server.
_DIVISION_BY_ZERO = "22012"


class Rows(list[Any]):
    """The rows of an answer; ``changed`` is how many rows the statement gave or changed."""

    changed: int = 0


class Statement:
    """A statement compiled once; called with the values of its parameters it is ready to go.

    Values written into it become part of the text, so that a plan made once can use partial indexes; ``bindparam`` is
    what changes from one to the next. Make them once (of a module, or behind ``lru_cache``): each is prepared on every
    connection that sends it.
    """

    def __init__(self, statement: sa.ClauseElement) -> None:
        compiled = statement.compile(dialect=_DIALECT)
        #: As SQLAlchemy would hand it to the driver.
        self.spoken = str(compiled)
        self.names: list[str] = []
        self.name = b"turnlock_%d" % next(_numbers)
        binds, values = compiled.binds, compiled.params  # type: ignore[attr-defined]

        def put(found: re.Match[str]) -> str:
            if found[0] == "%%":
                return "%"
            if found[2]:
                value = values[found[2]]
                return literal(value) if isinstance(value, str) else ", ".join(map(literal, value))
            name = found[1]
            if not binds[name].required:
                return literal(values[name])
            if name not in self.names:
                self.names.append(name)
            return f"${self.names.index(name) + 1}"

        self.text = re.sub(r"%\((\w+)\)s|__\[POSTCOMPILE_(\w+)\]|%%", put, self.spoken).encode()
        self._readers = [
            (at, column.type)
            for at, column in enumerate(getattr(statement, "exported_columns", ()))
            if isinstance(column.type, sa.types.TypeDecorator)
        ]
        self._make: Callable[[Sequence[Any]], Any] | None = None

    def __call__(self, **values: object) -> Ask:
        """This statement with these values."""
        return Ask(self, [encoded(values[name]) for name in self.names])

    def make(self, result: pq.abc.PGresult) -> Callable[[Sequence[Any]], Any]:
        """What makes a named row of the values of one."""
        if self._make is None:
            names = [(result.fname(at) or b"").decode() for at in range(result.nfields)]
            row: Any = namedtuple("Row", names, rename=True)  # type: ignore[misc]
            plain = partial(tuple.__new__, row)  # as `_make` does, less a call of Python's per row
            readers = [(at, kind.process_result_value) for at, kind in self._readers]

            def read(values: Sequence[Any]) -> Any:
                changed = list(values)
                for at, reader in readers:
                    changed[at] = reader(changed[at], _DIALECT)
                return plain(changed)

            self._make = read if readers else plain
        return self._make


@dataclass(frozen=True, slots=True)
class Ask:
    """A statement on its way. ``otherwise`` is raised where :func:`exactly` finds another number of rows."""

    statement: Statement
    values: Sequence[bytes | None]
    otherwise: Exception | None = None

    def orelse(self, error: Exception) -> Ask:
        """The same, raising `error` where :func:`exactly` finds another number of rows."""
        return Ask(self.statement, self.values, error)


#: Asks in flights of one or more statements, and comes to something from their answers.
Asking = Generator[Sequence[Ask], Sequence[Rows], T]


class Question(Generic[P, T]):
    """A function that asks: called with a connection it is answered alone, :meth:`of` is for :func:`together`."""

    def __init__(self, asks: Callable[P, Asking[T]]) -> None:
        self.of = asks
        self.__doc__ = asks.__doc__

    def __call__(self, conn: sa.Connection, /, *args: P.args, **named: P.kwargs) -> T:
        """Ask on this connection, in the transaction that it is in."""
        (answer,) = together(conn, self.of(*args, **named))
        return answer  # type: ignore[no-any-return]


class Aside(Generic[T]):
    """A question that goes along in the flight of something else; ``answer`` stays None where one flight is too few."""

    def __init__(self, asking: Asking[T]) -> None:
        self._asking: Asking[T] | None = asking
        self.asks = next(asking)
        self.answer: T | None = None

    def heard(self, rows: Sequence[Rows]) -> None:
        """What came back for ``asks``; the second time it is nothing new."""
        asking, self._asking = self._asking, None
        try:
            if asking is not None:
                asking.send(rows)
        except StopIteration as end:
            self.answer = end.value


def question(asks: Callable[P, Asking[T]]) -> Question[P, T]:
    """Decorator for a generator that yields lists of :class:`Ask`, is sent their :class:`Rows`, and returns a value."""
    return Question(asks)


def write(asks: Callable[P, Sequence[Ask]]) -> Callable[Concatenate[sa.Connection, P], None]:
    """What carries out, on a connection, the statements that `asks` gives."""

    def carry_out(conn: sa.Connection, /, *args: P.args, **named: P.kwargs) -> None:
        fly(conn, asks(*args, **named))

    return carry_out


def exactly(done: Any) -> sa.Select[Any]:
    """`done`, an UPDATE that returns a row for each it changed, as a statement that fails unless they are `wanted`.

    It fails on the server, so that what stands behind it in the flight, the COMMIT too, is not carried out.
    """
    changed = done.cte("changed")
    right = sa.func.count() == sa.bindparam("wanted", type_=sa.BigInteger)
    return sa.select(1 / sa.case((right, 1), else_=0)).select_from(changed)


def listed(name: str, kind: sa.types.TypeEngine[Any]) -> sa.Function[Any]:
    """The elements of the array that is given as `name`."""
    return sa.func.unnest(sa.bindparam(name, type_=sa.ARRAY(kind)))


def one_of(name: str, kind: sa.types.TypeEngine[Any]) -> Any:
    """What equals an element of the array that is given as `name`."""
    return sa.any_(sa.bindparam(name, type_=sa.ARRAY(kind)))


BEGIN, COMMIT = Statement(sa.text("BEGIN"))(), Statement(sa.text("COMMIT"))()


def together(conn: sa.Connection, *askings: Asking[Any]) -> list[Any]:
    """Ask all of these :func:`side_by_side` on this connection; their answers in order."""
    asking = side_by_side(*askings)
    try:
        asks = next(asking)
        while True:
            asks = asking.send(fly(conn, asks))
    except StopIteration as end:
        answers: list[Any] = end.value
        return answers


def side_by_side(*askings: Asking[Any]) -> Asking[list[Any]]:
    """All of these in as few flights as the longest of them takes; what one flight asks goes in the order given."""
    answers: list[Any] = [None] * len(askings)
    asked: list[tuple[int, Asking[Any], Sequence[Ask]]] = []

    def go_on(at: int, asking: Asking[Any], rows: Sequence[Rows] | None) -> None:
        try:
            asked.append((at, asking, asking.send(rows) if rows is not None else next(asking)))
        except StopIteration as end:
            answers[at] = end.value

    for at, asking in enumerate(askings):
        go_on(at, asking, None)
    while asked:
        now, asked = asked, []
        rows = iter((yield [one for _, _, asks in now for one in asks]))
        for at, asking, asks in now:
            go_on(at, asking, [next(rows) for _ in asks])
    return answers


def fly(conn: sa.Connection, asks: Sequence[Ask], sent: Callable[[], None] | None = None) -> list[Rows]:
    """Send these in one flight and wait for all answers, in the transaction that `conn` is in.

    `sent` is called once all are on their way, while they are carried out: it must be quick and never raise.
    Raises :class:`sqlalchemy.exc.DBAPIError` for the first statement that failed (with its text), or what that one
    should raise. A connection that is lost is invalidated, and so are the others of its engine.
    """
    if not asks:
        return []
    options = conn.get_execution_options()
    if not (options.get("turnlock_plain") or conn.in_transaction()):
        conn.begin()  # as with any statement that SQLAlchemy sends: a lock must outlast its flight
    try:
        return _fly(conn.connection, conn.engine, asks, not options.get("turnlock_pooled"), sent=sent)
    except DBAPIError as error:
        if error.connection_invalidated:
            conn.invalidate(error)
        raise


def fly_alone(engine: sa.Engine, asks: Sequence[Ask], early: Callable[[list[Rows]], None] | None = None) -> list[Rows]:
    """:func:`fly` on a connection taken for it, all as one transaction.

    `early` is called with the answers while they are being committed, if nothing failed: it must be quick and never
    raise, and nothing may rest on what it is told until this returns.
    """
    try:
        held = engine.raw_connection()
    except psycopg.Error as error:  # which SQLAlchemy would wrap where it connects for itself
        raise _told(engine, asks[0], error, lost=False) from error
    lost: BaseException | None = None
    try:
        return _fly(held, engine, asks, not engine.get_execution_options().get("turnlock_pooled"), early=early)
    except DBAPIError as error:
        lost = error if error.connection_invalidated else None
        raise
    finally:
        if lost is not None:
            held.invalidate(lost)
        held.close()


# -- the wire -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Wire:
    """What is kept with a connection: what it prepared, and what reads its answers."""

    reader: Any  # a psycopg.adapt.Transformer, which the library itself gives no type
    prepared: set[bytes] = field(default_factory=set)


def _fly(
    held: sa.PoolProxiedConnection,
    engine: sa.Engine,
    asks: Sequence[Ask],
    prepare: bool,
    *,
    sent: Callable[[], None] | None = None,
    early: Callable[[list[Rows]], None] | None = None,
) -> list[Rows]:
    driver: Any = held.driver_connection
    wire: _Wire | None = held.info.get("turnlock_wire")
    if wire is None:
        wire = held.info["turnlock_wire"] = _Wire(Transformer.from_context(driver))
    for listener in engine.dispatch.before_cursor_execute:
        for ask in asks:
            listener(None, None, ask.statement.spoken, None, None, False)
    failed: Ask | None = None
    answers: list[Rows] = []

    def read(results: Sequence[pq.abc.PGresult]) -> None:
        nonlocal failed
        for ask, result in zip(asks[len(answers) :], results[len(answers) :], strict=False):
            failed = ask
            answers.append(_answer(wire, ask.statement, result))

    def ahead(results: Sequence[pq.abc.PGresult]) -> None:
        if early is not None and all(result.status != pq.ExecStatus.FATAL_ERROR for result in results):
            read(results)
            early(answers[:])

    try:
        read(_exchange(driver.pgconn, wire, asks, prepare, sent, ahead if early is not None else None))
        return answers
    except psycopg.Error as error:
        if failed is not None and failed.otherwise is not None and error.sqlstate == _DIVISION_BY_ZERO:
            raise failed.otherwise from None
        lost = driver.pgconn.status != pq.ConnStatus.OK
        if lost:
            # The others are lost as well. This is what SQLAlchemy does when it meets a lost connection; `dispose` would
            # forget those in use instead of having them closed when they come back.
            engine.pool._invalidate(held, error, _checkin=False)
        raise _told(engine, failed or asks[0], error, lost=lost) from error


def _told(engine: sa.Engine, ask: Ask, error: psycopg.Error, *, lost: bool) -> BaseException:
    """The error as everybody expects it of SQLAlchemy, without the values of a lead in its text."""
    return DBAPIError.instance(
        ask.statement.spoken,
        None,
        error,
        psycopg.Error,
        hide_parameters=True,
        connection_invalidated=lost,
        dialect=engine.dialect,
    )


def _exchange(
    pgconn: pq.abc.PGconn,
    wire: _Wire,
    asks: Sequence[Ask],
    prepare: bool,
    sent: Callable[[], None] | None,
    early: Callable[[Sequence[pq.abc.PGresult]], None] | None,
) -> list[pq.abc.PGresult]:
    """Send, and collect one result for each of `asks`. Raises :class:`psycopg.Error` if the line is lost."""
    try:
        pgconn.enter_pipeline_mode()
        expected = _send(pgconn, wire, asks, prepare)
        if early is not None:
            pgconn.send_flush_request()  # the server would keep the answers until all is committed
        pgconn.pipeline_sync()
        _flush(pgconn)
        if sent is not None:
            sent()
        results = _collect(pgconn, wire, expected)
        if early is not None:
            early(results)
        _end(pgconn)
    except BaseException:
        pgconn.finish()  # whatever is still on the wire must not be taken for somebody else's answer
        raise
    return results


def _send(pgconn: pq.abc.PGconn, wire: _Wire, asks: Sequence[Ask], prepare: bool) -> list[bytes | None]:
    """What is to come back, in order: for a result that prepares its name, None for one that answers."""
    expected: list[bytes | None] = []
    for ask in asks:
        statement = ask.statement
        if not prepare:
            pgconn.send_query_params(statement.text, ask.values, result_format=pq.Format.BINARY)
        else:
            if statement.name not in wire.prepared and statement.name not in expected:
                pgconn.send_prepare(statement.name, statement.text)
                expected.append(statement.name)
            pgconn.send_query_prepared(statement.name, ask.values, result_format=pq.Format.BINARY)
        expected.append(None)
    return expected


def _collect(pgconn: pq.abc.PGconn, wire: _Wire, expected: Sequence[bytes | None]) -> list[pq.abc.PGresult]:
    results: list[pq.abc.PGresult] = []
    failed: pq.abc.PGresult | None = None
    unprepared: pq.abc.PGresult | None = None
    for name in expected:
        result = _next(pgconn)
        if result.status == pq.ExecStatus.FATAL_ERROR:
            failed = failed or result
        if failed is not None and pgconn.status != pq.ConnStatus.OK:
            raise psycopg.errors.error_from_result(failed)
        if name is None:
            results.append(result if unprepared is None else unprepared)
            unprepared = None
        elif result.status == pq.ExecStatus.COMMAND_OK:
            wire.prepared.add(name)
        else:
            unprepared = result  # why the statement itself is not carried out
    return results


def _end(pgconn: pq.abc.PGconn) -> None:
    if _next(pgconn).status != pq.ExecStatus.PIPELINE_SYNC:
        raise psycopg.OperationalError("the flight did not end where it should")
    pgconn.exit_pipeline_mode()


def _flush(pgconn: pq.abc.PGconn) -> None:
    """Send what is buffered; meanwhile what arrives is taken in, or both sides would wait for each other."""
    while pgconn.flush():
        both = select.poll()
        both.register(pgconn.socket, select.POLLIN | select.POLLOUT)
        if any(event & ~select.POLLOUT for _, event in both.poll()):
            pgconn.consume_input()


def _next(pgconn: pq.abc.PGconn) -> pq.abc.PGresult:
    ended = 0
    while True:
        while pgconn.is_busy():
            arriving = select.poll()
            arriving.register(pgconn.socket, select.POLLIN)
            arriving.poll()
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is not None:
            return result
        ended += 1  # the end of one statement's results
        if ended > 1:
            raise psycopg.OperationalError("the connection is lost")


def _answer(wire: _Wire, statement: Statement, result: pq.abc.PGresult) -> Rows:
    if result.status == pq.ExecStatus.TUPLES_OK:
        wire.reader.set_pgresult(result)
        rows = Rows(wire.reader.load_rows(0, result.ntuples, statement.make(result)))
    elif result.status == pq.ExecStatus.COMMAND_OK:
        rows = Rows()
    else:
        raise psycopg.errors.error_from_result(result)
    rows.changed = result.command_tuples or 0
    return rows
