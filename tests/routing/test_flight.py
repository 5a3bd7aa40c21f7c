"""Several statements in one round trip: what goes along, what comes back, and what a failure leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import DBAPIError

from connector.database import at_rest, is_contention, is_outage, make_engine
from connector.runtime import Runtime
from connector.settings import Settings
from routing import flight
from routing.flight import (
    BEGIN,
    COMMIT,
    Asking,
    Statement,
    exactly,
    fly,
    fly_alone,
    question,
    side_by_side,
    together,
)
from routing.tables import Whole

ECHO = Statement(sa.text("SELECT CAST(:given AS text) AS said"))
NOTHING = Statement(sa.text("SELECT no_such_column"))
BACKEND = Statement(sa.text("SELECT pg_backend_pid() AS pid"))
NUMBERS = sa.table("numbers", sa.column("name", sa.Text), sa.column("value", Whole))
PUT = Statement(sa.insert(NUMBERS).values(name=sa.bindparam("called"), value=sa.bindparam("is_now", type_=Whole)))
GET = Statement(sa.select(NUMBERS.c.name, NUMBERS.c.value).order_by(NUMBERS.c.name))
RAISE = Statement(
    exactly(sa.update(NUMBERS).values(value=NUMBERS.c.value + 1).returning(sa.literal(1).label("raised")))
)


class Short(Exception):
    """What a guard raises here."""


@pytest.fixture
def conn(database: Settings) -> Iterator[sa.Connection]:
    """A connection with a table of numbers of its own."""
    engine = make_engine(database.migrate_url or "")
    with at_rest(engine) as conn:
        conn.execute(sa.text("CREATE TEMPORARY TABLE numbers (name text, value numeric(60,0))"))
        yield conn
    engine.dispose()


def test_a_flight_answers_in_order_with_named_rows_and_whole_numbers(conn: sa.Connection) -> None:
    large = 10**40 + 1
    put, also, got, said = fly(conn, [PUT(called="a", is_now=large), PUT(called="b", is_now=2), GET(), ECHO(given="x")])
    assert (put.changed, also.changed, got.changed) == (1, 1, 2)
    assert [(row.name, row.value) for row in got] == [("a", large), ("b", 2)]
    assert type(got[0].value) is int
    assert said[0].said == "x"


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_text_written_into_a_statement_is_that_text(text: str) -> None:
    spoken = Statement(sa.select(sa.literal(text, sa.Text).label("said"))).text.decode()
    start = spoken.index("'") - (1 if spoken[spoken.index("'") - 1] == "E" else 0)
    literal = spoken[start : spoken.rindex("'") + 1]
    escaped = literal.startswith("E")
    inner = literal[2 if escaped else 1 : -1].replace("''", "'")
    assert (inner.replace("\\\\", "\\") if escaped else inner) == text
    assert escaped == ("\\" in text)


VALUES: list[tuple[str, object]] = [
    ("text", 'O\'Neil "x" \\ {,} ü'),
    ("uuid", UUID(int=7)),
    ("bytea", b"\0\\\"'\xff"),
    ("timestamptz", datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC)),
    ("interval", timedelta(days=-2, microseconds=7)),
    ("numeric", Decimal("1.50")),
    ("bigint", -(2**62)),
    ("boolean", True),
    ("double precision", 0.1),
    ("jsonb", {"a": ["ü", None, 'x"y']}),
    ("text[]", ['a"b', "c\\d", "e,f", "NULL", "", None]),
    ("uuid[]", [UUID(int=1), None]),
    ("bytea[]", [b"\\x", b""]),
    ("timestamptz[]", [datetime(2026, 3, 1, tzinfo=UTC)]),
]


def test_values_come_back_as_they_went(conn: sa.Connection) -> None:
    for kind, value in VALUES:
        statement = Statement(sa.text(f"SELECT CAST(:given AS {kind}) AS same, CAST(:none AS {kind}) AS none"))
        for _ in range(2):  # the first prepares, the second finds it prepared
            ((row,),) = fly(conn, [statement(given=value, none=None)])
            assert row == (value, None), kind


def test_what_the_database_cannot_spell_is_refused_before_it_is_sent(conn: sa.Connection) -> None:
    with pytest.raises(ValueError, match="NUL"):
        ECHO(given="a\0b")
    with pytest.raises(ValueError, match="NUL"):
        ECHO(given=["a\0b"])
    with pytest.raises(TypeError, match="no spelling"):
        ECHO(given=object())
    assert fly(conn, [ECHO(given="still here")])[0][0].said == "still here"


def test_after_a_statement_that_fails_nothing_of_its_flight_is_carried_out(conn: sa.Connection) -> None:
    for _ in range(2):
        with pytest.raises(DBAPIError) as error:
            fly(conn, [BEGIN, PUT(called="a", is_now=1), NOTHING(), PUT(called="b", is_now=1), COMMIT])
        assert error.value.statement == NOTHING.spoken
        assert not error.value.connection_invalidated
        fly(conn, [Statement(sa.text("ROLLBACK"))()])
        assert fly(conn, [GET()]) == [[]]


def test_a_guard_that_finds_another_number_keeps_the_commit_behind_it_from_happening(conn: sa.Connection) -> None:
    fly(conn, [PUT(called="a", is_now=1)])
    with pytest.raises(Short):
        fly(conn, [BEGIN, RAISE(wanted=2).orelse(Short()), COMMIT])
    fly(conn, [Statement(sa.text("ROLLBACK"))()])
    assert fly(conn, [GET()])[0][0].value == 1
    fly(conn, [BEGIN, RAISE(wanted=1).orelse(Short()), COMMIT])
    assert fly(conn, [GET()])[0][0].value == 2


def test_a_read_behind_a_lock_in_one_flight_sees_what_was_committed_while_it_waited(runtime: Runtime) -> None:
    lock = Statement(sa.text("SELECT name FROM tenants WHERE name = 'a' FOR NO KEY UPDATE"))
    read = Statement(sa.text("SELECT released FROM tenants WHERE name = 'a'"))
    values = {"t": uuid4()}
    insert = sa.text("INSERT INTO tenants (tenant_id, name, crm) VALUES (:t, 'a', 'generic')")
    with runtime.engine.begin() as conn:
        conn.execute(insert, values)
    found: list[str] = []

    def wait_and_read() -> None:
        with at_rest(runtime.engine) as conn:
            found.append(fly(conn, [BEGIN, lock(), read(), COMMIT])[2][0].released)

    waiting = threading.Thread(target=wait_and_read)
    with runtime.engine.begin() as conn, runtime.engine.connect() as other:
        conn.execute(sa.text("UPDATE tenants SET released = 'leave' WHERE tenant_id = :t"), values)
        waiting.start()
        seen = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%KEY U%'")
        while not other.execute(seen).scalar_one():
            other.rollback()
    waiting.join(10)
    assert found == ["leave"]


def test_a_connection_that_is_lost_is_told_so_and_the_next_one_works(runtime: Runtime) -> None:
    with runtime.engine.connect() as conn:
        pid = fly(conn, [BACKEND()])[0][0].pid
        with runtime.engine.connect() as other:
            other.execute(sa.text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
        with pytest.raises(DBAPIError) as error:
            fly(conn, [ECHO(given="x"), ECHO(given="y")])
        assert error.value.connection_invalidated
        assert is_outage(error.value)
        assert conn.invalidated
    assert fly_alone(runtime.engine, [ECHO(given="x")])[0][0].said == "x"


def test_a_server_that_is_not_there_is_an_outage() -> None:
    engine = make_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")
    with pytest.raises(DBAPIError) as error:
        fly_alone(engine, [ECHO(given="x")])
    assert is_outage(error.value)


def test_more_than_the_line_holds_goes_and_comes_without_standing_still(conn: sa.Connection) -> None:
    large = "x" * 300_000
    answers = fly(conn, [ECHO(given=large) for _ in range(40)])
    assert [len(rows[0].said) for rows in answers] == [300_000] * 40


def test_a_lock_outlasts_its_flight_wherever_the_caller_did_not_ask_for_plain_reads(runtime: Runtime) -> None:
    lock = Statement(sa.text("LOCK TABLE tenants"))
    held = sa.text(
        "SELECT count(*) FROM pg_locks WHERE relation = 'tenants'::regclass AND mode = 'AccessExclusiveLock'"
    )
    with runtime.engine.connect() as conn, runtime.engine.connect() as other:
        fly(conn, [lock()])
        assert other.execute(held).scalar_one() == 1
        conn.rollback()
        assert other.execute(held).scalar_one() == 0


def test_a_pooled_connection_prepares_nothing(runtime: Runtime) -> None:
    pooled = runtime.engine.execution_options(turnlock_pooled=True)
    with pooled.connect() as conn:
        assert fly(conn, [ECHO(given="x")])[0][0].said == "x"
        held = sa.text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'turnlock%'")
        assert conn.execute(held).scalar_one() == 0


@question
def said(*words: str) -> Asking[str]:
    """Ask for these words, one flight each."""
    found = []
    for word in words:
        ((row,),) = yield [ECHO(given=word)]
        found.append(row.said)
    return " ".join(found)


def test_questions_side_by_side_take_as_many_flights_as_the_longest_of_them(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    flights: list[int] = []
    exchange = flight._exchange

    def counted(pgconn: Any, wire: Any, asks: Any, *more: Any) -> Any:
        flights.append(len(asks))
        return exchange(pgconn, wire, asks, *more)

    def both() -> Asking[list[str]]:
        return (yield from side_by_side(said.of("d"), said.of()))

    monkeypatch.setattr(flight, "_exchange", counted)
    with at_rest(runtime.engine) as conn:
        assert together(conn, said.of("a", "b"), said.of("c"), both()) == ["a b", "c", ["d", ""]]
        assert said(conn, "alone") == "alone"
    assert flights == [3, 1, 1]


def test_a_lock_that_is_not_granted_in_time_is_contention(runtime: Runtime) -> None:
    lock = Statement(sa.text("LOCK TABLE tenants"))
    briefly = Statement(sa.text("SET LOCAL lock_timeout = '20ms'"))
    with at_rest(runtime.engine) as one, at_rest(runtime.engine) as other:
        fly(one, [BEGIN, lock()])
        with pytest.raises(DBAPIError) as error:
            fly(other, [BEGIN, briefly(), lock(), ECHO(given="x")])
        assert is_contention(error.value)
        assert error.value.statement == lock.spoken
        fly(one, [COMMIT])


def test_a_flight_sees_the_snapshot_of_a_connection_that_has_one(runtime: Runtime) -> None:
    keys = Statement(sa.text("SELECT count(*) AS n FROM dedupe_keys"))
    with runtime.engine.connect() as other, runtime.engine.connect() as conn:
        conn.execution_options(isolation_level="REPEATABLE READ")
        ((before,),) = fly(conn, [keys()])
        with other.begin():
            put = "INSERT INTO dedupe_keys (tenant_id, key, event_id, final) VALUES (:tenant, 'new', :event, true)"
            other.execute(sa.text(put), {"tenant": uuid4(), "event": uuid4()})
        ((after,),) = fly(conn, [keys()])
        assert (before.n, after.n, conn.execute(sa.text("SELECT count(*) FROM dedupe_keys")).scalar()) == (0, 0, 0)
        conn.rollback()
        assert fly(conn, [keys()])[0][0].n == 1
