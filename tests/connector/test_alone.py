"""A lead that comes alone is stored in the flight that opens its unit, in a transaction of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from connector.database import new_id
from connector.decide import Decider
from routing.flight import Asking
from tests.locks import queue_held, waiting_for_locks
from tests.rig import ANA, Rig, until


def test_a_lead_is_there_while_its_queue_is_held(rig: Rig) -> None:
    rig.wait_chores()
    with queue_held(rig):
        ref = rig.create()
        until(lambda: waiting_for_locks(rig) == 1)
        assert rig.one("SELECT count(*) FROM lead_refs WHERE tenant_id = :t AND ref = :r", r=ref) == 1
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
