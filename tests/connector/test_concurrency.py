"""Turns under contention: each lead takes exactly one turn, and no lock stops what it does not protect."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from adapters.base import Capability
from adapters.followupboss import FollowUpBoss
from connector import configuration
from connector.agents import keep_agents
from connector.database import new_id, sqlstate, unit
from connector.decide import Decider
from connector.flags import switch
from routing import saving, store
from routing import tables as t
from routing.flight import Ask, Asking, Statement, question
from routing.model import AgentSeen, Flag
from tests.locks import queue_held, waiting_for_locks
from tests.rig import ANA, BEN, CY, DEE, Rig, until

CROSSED = """
queues:
  One:
    members: ['12', '13']
  Two:
    members: ['14', '15']
rules:
  - {name: First, when: {field: source, equals: Zillow}, to: {queue: One}, else: [{queue: Two}]}
  - {name: Second, to: {queue: Two}, else: [{queue: One}]}
"""


@pytest.fixture(autouse=True)
def _without_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Notes are a lane of their own with its own pace; here they would only take time.
    monkeypatch.setattr(FollowUpBoss, "capabilities", FollowUpBoss.capabilities - {Capability.NOTES})


def a_decider(rig: Rig) -> Decider:
    return Decider(rig.runtime, lambda *_: None, lambda: 0)


def race(rig: Rig, *leads: dict[str, Any]) -> None:
    """One unit per lead, all waiting for a lock at the same instant; then the queue's row is let go."""
    with ThreadPoolExecutor(len(leads)) as pool:
        with queue_held(rig):
            units = []
            for number, fields in enumerate(leads, 1):
                rig.create(**fields)
                assert rig.sandbox.wait_idle()
                units.append(pool.submit(a_decider(rig).run, rig.tenant.tenant_id))
                until(lambda number=number: waiting_for_locks(rig) == number, what=f"unit {number} waiting")
        assert [unit.result(20) for unit in units] == [1] * len(leads)


def no_lock(_: UUID, queue_ids: Any) -> Asking[list[UUID]]:
    """What a broken :func:`store.lock_queues` does."""
    yield []
    return sorted(queue_ids)


def two_units_take_two_turns(rig: Rig) -> None:
    """The promise that a broken lock must not keep."""
    race(rig, {}, {})
    assert rig.turns() == [ANA, BEN]
    assert rig.position() == 2
    assert rig.most_tries() == 0
    rig.audit()


# -- one turn per lead --------------------------------------------------------------------------------------------


def test_two_units_at_the_same_instant_take_two_turns_of_two_agents(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(worker=False)
    two_units_take_two_turns(rig)
    rig.start_worker()
    rig.settle()
    assert Counter(str(owner) for _, owner in rig.sandbox.owners()) == {ANA: 1, BEN: 1}


def test_without_the_lock_that_promise_breaks(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "lock_queues", question(no_lock))
    with pytest.raises(AssertionError):
        two_units_take_two_turns(make_rig(worker=False))


def test_with_a_line_read_before_the_lock_that_promise_breaks(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(worker=False)
    lock = store.lock_queues

    def lock_late(tenant_id: UUID, queue_ids: Any) -> Asking[list[UUID]]:
        yield []  # one flight, in which the line is read
        return (yield from lock.of(tenant_id, queue_ids))

    monkeypatch.setattr(store, "lock_queues", question(lock_late))
    with pytest.raises(AssertionError):
        two_units_take_two_turns(rig)


def test_without_lock_and_guard_the_database_itself_refuses_a_second_lead_on_one_turn(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(worker=False)
    monkeypatch.setattr(store, "lock_queues", question(no_lock))

    def move_unguarded(tenant_id: UUID, queue_id: UUID, old: Any, line: Any, entries: int) -> Ask:
        c = t.queues.c
        moved = sa.update(t.queues).where(c.tenant_id == tenant_id, c.queue_id == queue_id)
        return Statement(moved.values(position=line.position, seq=c.seq + entries))()

    monkeypatch.setattr(saving, "_move_queue", move_unguarded)
    with pytest.raises(AssertionError):
        two_units_take_two_turns(rig)
    assert rig.turns() == [ANA]


def test_1_three_hundred_more_leads_from_16_clients_are_a_hundred_each(make_rig: Callable[..., Rig]) -> None:
    """The second half of scenario 1: see ``test_scenarios.py``."""
    rig = make_rig(concurrency=16)
    refs = rig.burst(2)
    rig.settle_owners()
    rig.sandbox.pause_dispatch()
    more = [rig.create() for _ in range(300)]
    rig.sandbox.resume_dispatch()
    rig.settle(60)
    turns = rig.turns()
    assert len(turns) == rig.position() == 302
    assert Counter(rig.owners(more)) == {ANA: 100, BEN: 100, CY: 100}
    refs += more
    assert all(one != following for one, following in pairwise(turns))
    assert Counter(turns) == {ANA: 101, BEN: 101, CY: 100}
    assert sorted(str(row["lead"]) for row in rig.owner_writes()) == sorted(refs)
    assert all(row["old"] is None for row in rig.sandbox.owner_log())
    assert all(attempt["status"] == 200 for d in rig.sandbox.deliveries() for attempt in d["attempts"])
    rig.audit()


def test_400_leads_take_400_turns_while_the_unchanged_configuration_is_saved_again_and_again(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(worker=False, concurrency=16)
    switch(rig.runtime, rig.tenant.tenant_id, Flag.WRITE_BACK, "off", "test")
    object.__setattr__(rig.runtime.settings, "deciders", 8)
    stop, saves = threading.Event(), []

    def keep_saving() -> None:
        while not stop.wait(0.01):
            with rig.runtime.engine.connect() as conn:
                before = configuration.current(conn, rig.tenant.tenant_id)
                queues = [row.queue_id for row in conn.execute(sa.select(t.queues.c.queue_id))]
                store.load_queues(conn, rig.tenant.tenant_id, frozenset(Flag), queues)
            assert before is not None
            saves.append(configuration.apply(rig.runtime, rig.tenant, before[1], "test"))

    with ThreadPoolExecutor(1) as pool:
        saving_thread = pool.submit(keep_saving)
        rig.start_worker()
        for _ in range(400):
            rig.create()
        rig.settle(60)
        stop.set()
        saving_thread.result(10)
    assert Counter(rig.turns()) == {ANA: 134, BEN: 133, CY: 133}
    assert rig.position() == 400
    assert len(saves) >= 10
    assert not any(save.changed for save in saves)
    assert rig.most_tries() == 0
    rig.audit()


# -- what a lock does not stop ------------------------------------------------------------------------------------


def test_two_queues_that_fall_back_to_each_other_lose_no_lead(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=CROSSED, concurrency=16)
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            for pair in ((ANA, BEN), (CY, DEE)):
                for ref in pair:
                    rig.pause(ref)
                stop.wait(0.1)
                for ref in pair:
                    rig.pause(ref, False)

    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(come_and_go)
        refs = [rig.create(source=source) for _ in range(60) for source in ("Zillow", "Website")]
        assert rig.sandbox.wait_idle()
        until(lambda: rig.one("SELECT count(*) FROM decisions WHERE tenant_id = :t") >= 60, 60, "half of the decisions")
        stop.set()
        moving.result(10)
    rig.settle(60)
    assert rig.one("SELECT count(*) FROM lead_roles WHERE tenant_id = :t AND state = 'assigned'") == len(refs)
    assert all(owner is not None for _, owner in rig.sandbox.owners())
    assert len(rig.turns("One")) + len(rig.turns("Two")) == len(refs)
    assert rig.most_tries() == 0
    assert rig.one("SELECT count(*) FROM assignments WHERE tenant_id = :t AND state <> 'active'") == 0
    rig.audit()


def test_rows_that_refer_to_a_queue_are_inserted_while_it_is_locked(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(worker=False)
    tenant_id = rig.tenant.tenant_id
    queue_id = rig.one("SELECT queue_id FROM queues WHERE tenant_id = :t")
    a_turn = {"tenant_id": tenant_id, "queue_id": queue_id, "decision_id": new_id(), "agent_id": rig.agent_id(ANA)}

    def insert(turn: int) -> None:
        with unit(rig.runtime.engine, lock_timeout="300ms") as (conn, now):
            conn.execute(sa.insert(t.turns).values(**a_turn, turn=turn, taken_at=now))

    with unit(rig.runtime.engine) as (conn, _):
        assert store.lock_queues(conn, tenant_id, [queue_id]) == [queue_id]
        insert(1)
    with queue_held(rig), pytest.raises(sa.exc.OperationalError) as blocked:  # what FOR UPDATE would have done
        insert(2)
    assert sqlstate(blocked.value) == "55P03"


# -- the same users, read twice at once ---------------------------------------------------------------------------


def test_two_readings_of_new_users_at_once_store_each_user_once(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(worker=False)
    engine, tenant_id, began = rig.runtime.engine, rig.tenant.tenant_id, rig.one("SELECT clock_timestamp()")
    seen = [AgentSeen(ref, f"Agent {ref}", f"a{ref}@example.com", True) for ref in ("901", "902")]

    def reading() -> dict[str, int]:
        with unit(engine) as (conn, _):
            return keep_agents(rig.runtime, conn, tenant_id, seen, began)

    with ThreadPoolExecutor(1) as pool:
        with unit(engine) as (conn, _):
            assert keep_agents(rig.runtime, conn, tenant_id, seen, began)["new"] == 2
            second = pool.submit(reading)
            until(lambda: waiting_for_locks(rig) == 1, what="the second reading waiting for the first")
        assert second.result(20) == {"new": 0, "changed": 0, "same": 2}
    named = "SELECT count(*) FROM agents WHERE tenant_id = :t AND name IN ('Agent 901', 'Agent 902')"
    assert rig.one(named) == 2
