"""A lead that comes alone: stored along with its unit, and no statement on its way is planned anew."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa

from connector.database import at_rest, new_id
from connector.decide import Decider
from routing.flight import Asking
from tests.locks import queue_held, waiting_for_locks
from tests.rig import ANA, Rig, until


def test_a_lead_is_there_once_its_queue_was_found_to_be_held(rig: Rig) -> None:
    rig.wait_chores()
    with queue_held(rig):
        ref = rig.create()
        until(lambda: waiting_for_locks(rig) == 1)
        until(lambda: rig.one("SELECT count(*) FROM lead_refs WHERE tenant_id = :t AND ref = :r", r=ref) == 1)
        assert rig.turns() == []
    assert rig.wait_owner(ref) == ANA
    rig.audit()


def test_a_lead_that_another_worker_stored_in_between_goes_on_under_its_id(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(worker=False)
    ref = rig.create()
    assert rig.sandbox.wait_idle()
    theirs = new_id()
    rig.sql("INSERT INTO leads (tenant_id, lead_id) VALUES (:t, :l)", l=theirs)
    rig.sql("INSERT INTO lead_refs (tenant_id, ref, lead_id) VALUES (:t, :r, :l)", r=ref, l=theirs)
    rig.sql("INSERT INTO lead_facts (tenant_id, lead_id, facts) VALUES (:t, :l, '{}')", l=theirs)

    def not_yet(*_: Any) -> Asking[dict[str, Any]]:
        return {}
        yield []

    monkeypatch.setattr("connector.decide.known_now", not_yet)
    assert Decider(rig.runtime, lambda *_: None, lambda: 0).run(rig.tenant.tenant_id) == 1
    assert rig.lead_id(ref) == theirs
    assert rig.standing(ref)["state"] == "assigned"
    assert rig.turns() == [ANA]
    assert rig.one("SELECT count(*) FROM leads WHERE tenant_id = :t") == 1
    rig.audit()


@pytest.mark.parametrize("fault", [RuntimeError(), sa.exc.DataError("", None, Exception())], ids=["code", "data"])
def test_a_lead_whose_unit_fails_is_there(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    rig = make_rig(worker=False)
    ref = rig.create()
    assert rig.sandbox.wait_idle()

    def fail(*_: Any) -> None:
        raise fault

    monkeypatch.setattr("routing.decide.Bench.decide", fail)
    assert Decider(rig.runtime, lambda *_: None, lambda: 0).run(rig.tenant.tenant_id) == 1
    assert rig.lead_id(ref) is not None
    assert rig.most_tries() == 1


# PostgreSQL plans the first five uses by their values, whatever it decides then.
_PLANNED_ANEW = sa.text("SELECT statement, custom_plans FROM pg_prepared_statements WHERE custom_plans > 5")


@pytest.mark.parametrize("crm", ["followupboss", "bottlecrm"])
def test_what_a_lone_lead_asks_is_planned_once(make_rig: Callable[..., Rig], crm: str) -> None:
    rig = make_rig(crm)
    for _ in range(20):
        rig.assign()
    rig.settle()
    rig.stop_worker()
    with ExitStack() as stack:
        pool = rig.runtime.engine.pool
        assert isinstance(pool, sa.pool.QueuePool)
        # All of them at once, or the one that came back last would be looked at again and again.
        kept = [stack.enter_context(at_rest(rig.runtime.engine)) for _ in range(pool.checkedin())]
        anew = {row.statement: row.custom_plans for conn in kept for row in conn.execute(_PLANNED_ANEW)}
        used = sum(conn.execute(sa.text("SELECT count(*) FROM pg_prepared_statements")).scalar_one() for conn in kept)
    assert used > 20
    assert anew == {}
