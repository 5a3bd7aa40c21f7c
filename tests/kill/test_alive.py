"""Leases end with the process that holds them: seen by its advisory lock, after a grace, and never of a live one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa

from connector import alive
from connector.alive import Life, free
from connector.database import new_id
from connector.runtime import Runtime
from tests.rig import until


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alive, "GRACE", 0.3)


@pytest.fixture
def direct(runtime: Runtime) -> Iterator[psycopg.Connection]:
    """The connection of another process."""
    url = runtime.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as conn:
        yield conn


def look(runtime: Runtime, observer: Life, seconds: float = 0.0) -> None:
    """The scout of one process looks, again and again for so long."""
    ends = time.monotonic() + seconds
    while True:
        with runtime.engine.connect() as conn:
            observer.look(conn)
        if time.monotonic() >= ends:
            return
        time.sleep(0.02)


def is_free(runtime: Runtime, observer: Life, lease: UUID | None, left: str | None = "1 minute") -> bool:
    """Whether a row with this lease, which has so much time left, may be claimed."""
    columns = (
        sa.literal(lease, sa.Uuid).label("lease"),
        (sa.func.clock_timestamp() + sa.cast(left, sa.Interval)).label("leased_until"),
    )
    row = sa.select(*columns).subquery()
    with runtime.engine.connect() as conn:
        return bool(conn.execute(sa.select(free(row, observer.living()))).scalar_one())


def test_the_lease_of_a_process_that_died_is_free_after_the_grace(runtime: Runtime, direct: psycopg.Connection) -> None:
    other, observer = Life(), Life()
    with other.held(direct):
        lease = other.new_lease()
        look(runtime, observer, 0.5)
        assert not is_free(runtime, observer, lease)
        direct.close()
    look(runtime, observer)
    assert not is_free(runtime, observer, lease)
    look(runtime, observer, 0.5)
    assert is_free(runtime, observer, lease)
    assert is_free(runtime, observer, new_id(), "-1 second")
    assert not is_free(runtime, observer, new_id())


def test_a_process_that_was_never_seen_is_given_the_grace_as_well(runtime: Runtime) -> None:
    stranger, observer = Life(), Life()
    stranger._holds.set()
    lease = stranger.new_lease()
    look(runtime, observer)
    assert not is_free(runtime, observer, lease)
    look(runtime, observer, 0.5)
    assert is_free(runtime, observer, lease)


def test_a_live_process_that_loses_its_connection_keeps_its_leases_if_it_is_back_in_time(
    runtime: Runtime, direct: psycopg.Connection
) -> None:
    other, observer = Life(), Life()
    with other.held(direct):
        lease = other.new_lease()
        look(runtime, observer, 0.5)
        direct.close()
    assert other.new_lease().version == 7  # meanwhile leases are by time alone
    look(runtime, observer, 0.1)
    url = runtime.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as again, other.held(again):
        look(runtime, observer, 0.6)
        assert not is_free(runtime, observer, lease)
        assert str(other.new_lease())[:8] == str(lease)[:8]


def test_after_a_pause_without_looks_nobody_is_taken_for_dead_at_once(
    runtime: Runtime, direct: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alive, "_GAP", 0.2)
    other, observer = Life(), Life()
    with other.held(direct):
        lease = other.new_lease()
        look(runtime, observer, 0.5)
        direct.close()
    time.sleep(0.5)  # the database was away, say, and everybody's lock with it
    assert observer.living() is None
    look(runtime, observer)
    assert not is_free(runtime, observer, lease)
    look(runtime, observer, 0.5)
    assert is_free(runtime, observer, lease)


def test_leases_are_told_apart_by_their_form(runtime: Runtime, direct: psycopg.Connection) -> None:
    life = Life()
    assert life.new_lease().version == 7
    with life.held(direct):
        leases = {life.new_lease() for _ in range(1000)}
    assert len(leases) == 1000
    assert {lease.version for lease in leases} == {8}
    assert len({str(lease)[:8] for lease in leases}) == 1


def test_a_row_that_nobody_has_is_free(runtime: Runtime) -> None:
    observer = Life()
    assert is_free(runtime, observer, None, None)
    look(runtime, observer, 0.4)
    assert observer.living() == []
    assert is_free(runtime, observer, None, None)


def test_a_lock_of_the_dead_that_the_server_still_sees_is_waited_for(
    runtime: Runtime, direct: psycopg.Connection
) -> None:
    life = Life()
    with life.held(direct):
        url = runtime.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True) as again:
            with pytest.raises(psycopg.errors.LockNotAvailable), life.held(again):
                pass
            direct.close()
            until(lambda: not _holders(runtime), what="the end of the first session")
            with life.held(again):
                assert _holders(runtime) == 1


def _holders(runtime: Runtime) -> int:
    with runtime.engine.connect() as conn:
        return int(conn.execute(sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")).scalar_one())


def test_a_process_counts_on_being_taken_for_alive_only_while_everybody_who_looks_has_seen_it(
    runtime: Runtime, direct: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(alive, "time", clock)
    life, observer = Life(), Life()

    def looks(*lives: Life, times: int = 8) -> None:
        """Each looks so often, in steps of a twentieth of a second."""
        for _ in range(times):
            clock.now += 0.05
            for one in lives:
                look(runtime, one)

    looks(life, observer)
    assert life.known() is None
    assert observer.numbers() == []
    with life.held(direct):
        looks(life, times=1)
        assert life.known() is None  # somebody's last look may be older
        looks(life, observer)
        known = life.known()
        assert known is not None
        assert observer.numbers() == [known[0]]
        looks(life)
        assert life.known() == known
        clock.now += alive._GAP + 0.1  # for so long it saw nothing: it may have been taken for dead
        assert life.known() is None
        looks(life)
        again = life.known()
        assert again is not None
        assert again[0] == known[0]
        assert again[1] > known[1]
    direct.close()
    until(lambda: looks(life, times=1) or life.known() is None, what="the end of its lock")
