"""Storing deliveries: alone or together, what is stored goes to a decider at once, and nothing is lost on the way."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from sqlalchemy.exc import DBAPIError

from adapters import base
from adapters.base import EventKind
from connector import busy, inbox, storing, tenants
from connector.accept import store_delivery
from connector.database import at_rest, new_id, unit
from connector.wake import CHANNEL, EVENTS, KINDS, NOTES, OWNERS, Notifier, heard
from routing.flight import fly
from routing.model import Lead
from tests.rig import Rig, until


@pytest.fixture
def quiet(make_rig: Callable[..., Rig]) -> Rig:
    """A tenant whose deliveries are stored by the test itself; no worker runs."""
    rig = make_rig("generic", worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    return rig


def store(rig: Rig, key: str, **lead: Any) -> int:
    event = base.Event(EventKind.LEAD_CREATED, key, ref=key, lead=Lead(ref=key, **lead))
    return store_delivery(rig.runtime, rig.tenant, [event], hook_id=None, body=b"x", flag_version=0, headers={})


def held_up(monkeypatch: pytest.MonkeyPatch) -> tuple[Event, list[int]]:
    """The first commit waits until the event is set; gives how many deliveries each statement held."""
    go, sizes, real = Event(), list[int](), storing.at_once

    def at_once(engine: Any, statement: Any, values: Any, **more: Any) -> Any:
        if statement is storing.STORE:
            sizes.append(len(values["ids"]))
            if len(sizes) == 1:
                assert go.wait(10)
        return real(engine, statement, values, **more)

    monkeypatch.setattr(storing, "at_once", at_once)
    return go, sizes


def waiting(rig: Rig) -> int:
    """How many threads wait for the commit in hand to end."""
    return len(rig.runtime.storing._lines.get(rig.tenant.tenant_id, ()))


def test_what_comes_during_a_commit_shares_the_next_one(quiet: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    go, sizes = held_up(monkeypatch)
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(store, quiet, "first")
        until(lambda: sizes == [1])
        rest = [pool.submit(store, quiet, key) for key in ("b", "c", "same", "same", "d", "first")]
        until(lambda: waiting(quiet) == 6)
        go.set()
        assert first.result() == 1
        assert sorted(one.result() for one in rest) == [0, 0, 1, 1, 1, 1]
    assert sizes == [1, 6]
    assert sorted(event.ref for event in quiet.events()) == ["b", "c", "d", "first", "same"]
    assert {bytes(event.body) for event in quiet.events()} == {b"x"}


def test_one_that_cannot_be_stored_harms_nobody_but_itself(quiet: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    go, sizes = held_up(monkeypatch)
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(store, quiet, "first")
        until(lambda: sizes == [1])
        good = [pool.submit(store, quiet, f"good-{n}") for n in range(4)]
        bad = pool.submit(store, quiet, "bad", city="no\x00where")  # what no column can hold
        until(lambda: waiting(quiet) == 5)
        go.set()
        assert [one.result() for one in (first, *good)] == [1] * 5
        with pytest.raises(DBAPIError):
            bad.result()
    assert len(quiet.events()) == 5


def test_when_the_database_is_away_all_who_went_together_hear_it(quiet: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    go, sizes = held_up(monkeypatch)
    real = storing.at_once

    def away(engine: Any, statement: Any, values: Any, **more: Any) -> Any:
        rows = real(engine, statement, values, **more)
        if len(sizes) > 1:
            raise DBAPIError.instance(None, None, psycopg.OperationalError("away"), psycopg.Error)
        return rows

    monkeypatch.setattr(storing, "at_once", away)
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(store, quiet, "first")
        until(lambda: sizes == [1])
        rest = [pool.submit(store, quiet, f"more-{n}") for n in range(3)]
        until(lambda: waiting(quiet) == 3)
        go.set()
        assert first.result() == 1
        for one in rest:
            with pytest.raises(DBAPIError, match="away"):
                one.result()
    assert sizes == [1, 3]  # and nobody tries alone what cannot be done for anybody


def test_a_burst_over_sixteen_connections_is_stored_and_decided_once_each(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic")
    rig.sandbox.webhook_faults(drop=1.0)
    refs = [str(ref) for ref in rig.sandbox.create_leads(160)]
    start = Barrier(16)

    def client(mine: list[str]) -> list[int]:
        start.wait()
        return [rig.post(rig.delivery(ref), event=f"burst-{ref}").status for ref in mine for _ in range(2)]

    with ThreadPoolExecutor(16) as pool:
        statuses = [status for some in pool.map(client, [refs[n::16] for n in range(16)]) for status in some]
    assert set(statuses) == {200}
    rig.settle(60)
    assert len(rig.turns()) == rig.position() == 160
    rig.audit()


# -- straight to a decider ----------------------------------------------------------------------------------------


def test_a_lead_that_comes_alone_goes_straight_to_a_decider(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a claim, of which there is none to see: nothing else may take it up to then."""
    from connector import inbox

    monkeypatch.setattr(inbox, "claim_events", lambda *_, **__: [])
    ref = rig.create()
    assert rig.wait_owner(ref) is not None
    event = rig.events()[0]  # behind it may wait what the CRM tells of our own write
    assert (event.state, event.claims, event.lease) == ("done", 1, None)


def test_what_was_stored_for_a_worker_that_stops_is_everybodys_at_once(rig: Rig) -> None:
    assert rig.worker is not None
    worker = rig.worker
    lease = worker.reserve(rig.tenant.tenant_id)
    assert lease is not None
    assert worker.reserve(rig.tenant.tenant_id) is None  # one at a time: what comes meanwhile goes together
    rig.stop_worker()
    assert worker.reserve(rig.tenant.tenant_id) is None
    ref = str(rig.sandbox.create_lead())
    until(lambda: len(rig.events()) == 1)
    with unit(rig.runtime.engine) as (conn, _):
        rows = conn.execute(
            storing.sa.text("UPDATE events SET lease = :l, leased_until = now() + interval '1 min' RETURNING *"),
            {"l": lease},
        ).all()
    kept = storing.Kept()
    worker.hand(rig.tenant.tenant_id, lease, rows, None, kept)
    kept.tell(True)
    worker.handed()
    assert [event.leased_until for event in rig.events()] == [None]
    rig.start_worker()
    assert rig.wait_owner(ref) is not None


def test_a_commit_of_which_nobody_knows_leaves_no_lease_behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is lost after the commit: stored and leased, and no row came back to say so."""
    real, lost = storing.at_once, list[object]()

    def at_once(engine: Any, statement: Any, values: Any, **more: Any) -> Any:
        rows = real(engine, statement, values, **more)
        if statement is storing.STORE and not lost:
            assert values["lease"] is not None
            lost.append(values["lease"])
            error = psycopg.OperationalError("server closed the connection unexpectedly")
            raise DBAPIError.instance(None, None, error, psycopg.Error, connection_invalidated=True)
        return rows

    monkeypatch.setattr(storing, "at_once", at_once)
    ref = rig.create()
    assert rig.wait_owner(ref) is not None
    assert lost
    rig.settle()
    assert len(rig.turns()) == 1


def test_what_is_decided_while_sending_is_stopped_is_leased_to_nobody(rig: Rig) -> None:
    """It waits for whoever starts sending again, and no sender takes it only to give it back."""
    tenants.set_sending(rig.runtime, rig.tenant, False)
    rig.create()
    until(lambda: len(rig.turns()) == 1)
    assert rig.one("SELECT count(*) FROM outbox WHERE tenant_id = :t AND state = 'open' AND leased_until IS NULL") == 1


@pytest.mark.parametrize("kinds", [(EVENTS,), (OWNERS, NOTES), ()])
def test_a_worker_elsewhere_hears_whose_work_it_is(kinds: tuple[str, ...], quiet: Rig) -> None:
    told = queue.SimpleQueue[tuple[Any, Any]]()
    dsn = quiet.runtime.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    notifier = Notifier(quiet.runtime.engine)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"LISTEN {CHANNEL}")
        notifier(quiet.tenant.tenant_id, kinds)
        for note in conn.notifies(timeout=10, stop_after=1):
            told.put(heard(note.payload))
    notifier.stop()
    assert told.get_nowait() == (quiet.tenant.tenant_id, list(kinds))


@pytest.mark.parametrize("message", ["", "x", "events", f"{'0' * 31}g,events"])
def test_a_message_of_another_version_means_any_work_of_anybody(message: str) -> None:
    assert heard(message) == (None, KINDS)


# -- claims -----------------------------------------------------------------------------------------------------------


def test_what_another_claimed_between_the_look_and_the_claim_stays_theirs(quiet: Rig) -> None:
    """A look sees the events as they were when it began, and its locks do not tell it of those who were quicker."""
    store(quiet, "one")
    tenant_id, mine, theirs = quiet.tenant.tenant_id, new_id(), new_id()
    claim = inbox.claim_events.of(tenant_id, mine)
    with at_rest(quiet.runtime.engine) as conn:
        seen = fly(conn, next(claim))
        assert [len(rows) for rows in seen] == [1]
        with unit(quiet.runtime.engine) as (other, _):
            assert len(inbox.claim_events(other, tenant_id, theirs)) == 1
        with pytest.raises(StopIteration) as claimed:
            claim.send(fly(conn, claim.send(seen)))
    assert claimed.value.value == []
    assert quiet.events()[0].lease == theirs


def test_who_would_claim_waits_for_the_unit_at_work_but_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    units, tenant_id, other = busy.Units(), new_id(), new_id()
    monkeypatch.setattr(busy, "_AT_WORK", 60.0)
    with ThreadPoolExecutor(1) as pool:
        with units.at_work(other), units.at_work(tenant_id):
            waits = pool.submit(units.wait, tenant_id)
            with pytest.raises(TimeoutError):
                waits.result(0.05)
        assert waits.result(10) is None
    monkeypatch.setattr(busy, "_AT_WORK", 0.01)
    with units.at_work(tenant_id):
        units.wait(other)
        units.wait(tenant_id)  # a unit that waits for a row must not keep the other queues waiting


def test_what_a_connection_left_open_is_rolled_back_before_the_next_has_it(quiet: Rig) -> None:
    held = quiet.runtime.engine.raw_connection()
    driver: Any = held.driver_connection
    driver.execute("BEGIN")
    driver.execute("UPDATE tenants SET name = 'changed'")
    held.close()
    assert driver.info.transaction_status == TransactionStatus.IDLE
    assert quiet.one("SELECT name FROM tenants WHERE tenant_id = :t") == quiet.tenant.name
