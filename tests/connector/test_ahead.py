"""A lead that comes alone: how it stands in the CRM is read while its decision is committed, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

from connector import ahead
from tests.locks import waiting_for_locks
from tests.rig import ANA, CY, Rig, until


@contextmanager
def commit_held(rig: Rig) -> Iterator[psycopg.Connection]:
    """No decision gets past its outbox row; gives the connection that holds it."""
    dsn = rig.runtime.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn) as conn:
        conn.execute("LOCK TABLE outbox IN SHARE MODE")
        yield conn
        conn.rollback()


def calls(rig: Rig) -> list[str]:
    """How the CRM was called about leads since it was quiet."""
    return [call["method"] for call in rig.sandbox.call_log() if "/people" in call["path"]]


@pytest.fixture
def calm(rig: Rig) -> Rig:
    """Nothing is called but what a lead makes."""
    rig.wait_chores()
    rig.sandbox.clear_logs()
    return rig


@pytest.fixture
def patient(calm: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """What was read ahead serves however long the disk takes."""
    monkeypatch.setattr(ahead, "FRESH", 60.0)
    return calm


def test_a_lead_is_read_while_its_decision_is_committed_and_written_after_it(patient: Rig) -> None:
    with commit_held(patient):
        ref = patient.create()
        until(lambda: waiting_for_locks(patient) == 1)
        until(lambda: calls(patient) == ["GET", "GET"])  # for the decision, and ahead of the write
        assert patient.owner(ref) is None
    assert patient.wait_owner(ref) == ANA
    patient.settle()
    assert calls(patient)[:3] == ["GET", "GET", "PUT"]
    assert patient.turns() == [ANA]
    patient.audit()


def test_what_was_read_too_long_before_the_commit_is_read_again(calm: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a human who was quicker than the disk wins."""
    monkeypatch.setattr(ahead, "FRESH", 0.0)
    with commit_held(calm):
        ref = calm.create()
        until(lambda: calls(calm) == ["GET", "GET"])
        calm.sandbox.set_owner(int(ref), int(CY))
    calm.settle()
    assert calm.owner(ref) == CY
    assert calm.owner_writes(ref) == []


def test_without_a_commit_nothing_is_written_and_the_lead_is_decided_once(patient: Rig) -> None:
    with commit_held(patient) as held:
        ref = patient.create()
        until(lambda: calls(patient) == ["GET", "GET"] and waiting_for_locks(patient) == 1)
        ended = held.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).rowcount
        assert ended == 1
        until(lambda: waiting_for_locks(patient) == 1)  # it is tried again
        assert patient.owner_writes() == []
    assert patient.wait_owner(ref) == ANA
    patient.settle()
    assert len(patient.owner_writes(ref)) == 1
    assert patient.turns() == [ANA]
    patient.audit()


def test_a_crm_that_asks_to_wait_is_not_asked_again_for_the_write(calm: Rig) -> None:
    calm.sandbox.fault("status", status=429, retry_after=1, times=1, skip=1, method="GET")
    ref = calm.create()
    until(lambda: calls(calm) == ["GET", "GET"])
    assert calm.wait_owner(ref) == ANA
    asked = [call["mono"] for call in calm.sandbox.call_log() if "/people" in call["path"]]
    assert asked[2] - asked[1] >= 1.0
    calm.audit()


def test_a_worker_that_stops_meanwhile_leaves_the_write_to_the_next(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from connector.decide import Decider
    from connector.worker import Worker

    rig = make_rig(worker=False)
    ref = rig.create()
    assert rig.sandbox.wait_idle()
    worker = Worker(rig.runtime)  # its threads never start: what it is handed stays with it
    monkeypatch.setattr(worker, "_free_senders", lambda: 1)
    Decider(rig.runtime, worker._hand_over, worker._free_senders, worker._expect).run(rig.tenant.tenant_id)
    assert rig.one("SELECT count(*) FROM outbox WHERE tenant_id = :t AND leased_until IS NOT NULL") == 1
    worker._give_back()
    assert rig.one("SELECT count(*) FROM outbox WHERE tenant_id = :t AND leased_until IS NOT NULL") == 0
    rig.start_worker()
    assert rig.wait_owner(ref) == ANA
