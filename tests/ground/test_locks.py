"""Rows that somebody else holds: what does not need them goes on, and nothing of a lead is lost or out of turn."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa

from adapters.base import Capability
from adapters.followupboss import FollowUpBoss
from connector import accept
from connector.database import unit
from connector.decide import Decider
from connector.embedded import EmbeddedPostgres
from routing import flight, store
from routing.flight import Ask, Asking, Statement, question
from tests.locks import queue_held, waiting_for_locks
from tests.rig import ANA, BEN, CY, DEE, ELI, Rig, until

TWO_QUEUES = """
default_queue: All
queues:
  All:
    members: ['12', '13', '14']
  Other:
    members: ['15', '16']
rules:
  - name: Zillow
    when: {field: source, equals: Zillow}
    to: {queue: Other}
"""
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


# -- a queue that somebody holds ----------------------------------------------------------------------------------


def posted(rig: Rig, refs: Collection[str], seconds: float) -> list[float]:
    """Post a delivery for each lead, spread over so many seconds; how long each took to be answered 200."""
    took, url, began = [], rig.hook_url, time.monotonic()
    for number, ref in enumerate(refs):
        time.sleep(max(0.0, began + seconds * number / len(refs) - time.monotonic()))
        sent = time.monotonic()
        assert rig.post(rig.delivery(ref, event=ref), event=ref, url=url).status == 200
        took.append(time.monotonic() - sent)
    return took


def p99(values: list[float]) -> float:
    """Of the better half of the time: a machine that others use may be slow once, a door that waits always is."""
    half = len(values) // 2
    return min(statistics.quantiles(part, n=100, method="inclusive")[98] for part in (values[:half], values[half:]))


@pytest.mark.parametrize(
    ("seconds", "pairs"),
    [(1.5, 30), pytest.param(60, 300, marks=[pytest.mark.proof, pytest.mark.timeout(300)])],
    ids=["short", "a minute"],
)
def test_a_held_queue_delays_its_own_leads_alone(make_rig: Callable[..., Rig], seconds: float, pairs: int) -> None:
    rig = make_rig(config=TWO_QUEUES)
    rig.sandbox.webhook_faults(drop=1.0)
    rig.wait_chores()
    own = [rig.create(source="Website") for _ in range(pairs)]
    others = [rig.create(source="Zillow") for _ in range(pairs)]
    with queue_held(rig):
        # Whoever meets the lock first has to find out that it is held, and occupies a decider for one lock time-out.
        for number in (1, 2):
            posted(rig, own[number - 1 : number], 0)
            until(lambda number=number: waiting_for_locks(rig) >= number, what="a unit before the held queue")
        known = "SELECT count(*) FROM events WHERE tenant_id = :t AND reason = 'queue_busy'"
        until(lambda: rig.one(known) == 2, what="two units that found out")
        took = posted(rig, [ref for pair in zip(own[2:], others[2:], strict=True) for ref in pair], seconds)
        took += posted(rig, others[:2], 0)
        until(lambda: all(rig.owners(others)), what="an owner for every lead of the other queue")
        assert rig.owners(own) == [None] * pairs
        assert (rig.position(), rig.position("Other")) == (0, pairs)
    assert p99(took) <= 0.5, sorted(took)[-5:]
    waited = rig.rows(
        sa.text(
            "SELECT extract(epoch FROM d.decided_at - e.received_at)::float8 AS waited FROM decisions d "
            "JOIN lead_refs r USING (tenant_id, lead_id) JOIN events e USING (tenant_id, ref) "
            "JOIN queues q USING (tenant_id, queue_id) WHERE q.name = 'Other' ORDER BY e.received_at"
        )
    )
    # Measured alone: a tenth of a second. The lock's time-out, which none of them may have to wait for, is two seconds.
    assert statistics.median(row.waited for row in waited) < 1.0
    until(lambda: all(rig.owners(own)), 60, "an owner for every lead of the queue that was held")
    rig.settle()
    assert rig.turns() == [ANA, BEN, CY] * (pairs // 3)
    assert rig.turns("Other") == [DEE, ELI] * (pairs // 2)
    assert rig.most_tries() == 0
    assert rig.alarms() == set()
    rig.audit()


def test_a_door_that_asks_for_the_queue_would_be_noticed(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    stored = accept.store_delivery
    queue_id = rig.one("SELECT queue_id FROM queues WHERE tenant_id = :t")

    def lock_and_store(runtime: Any, tenant: Any, *args: Any, **named: Any) -> int:
        with unit(runtime.engine, lock_timeout="1s") as (conn, _):
            store.lock_queues(conn, tenant.tenant_id, [queue_id])
        return stored(runtime, tenant, *args, **named)

    monkeypatch.setattr(accept, "store_delivery", lock_and_store)
    with queue_held(rig), pytest.raises(AssertionError):
        assert p99(posted(rig, [rig.create() for _ in range(4)], 0)) <= 0.5


# -- deadlocks ----------------------------------------------------------------------------------------------------


def decide(rig: Rig) -> int:
    return Decider(rig.runtime, lambda *_: None, lambda: 0).run(rig.tenant.tenant_id)


def failures(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The SQLSTATE of each flight that fails from now on."""
    states, told = list[str | None](), flight._told

    def noted(engine: sa.Engine, ask: Ask, error: psycopg.Error, *, lost: bool) -> BaseException:
        states.append(error.sqlstate)
        return told(engine, ask, error, lost=lost)

    monkeypatch.setattr(flight, "_told", noted)
    return states


def test_units_that_lock_two_queues_against_each_other_come_apart_by_themselves(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(worker=False, config=CROSSED)
    for ref in (ANA, BEN, CY, DEE):
        rig.pause(ref)  # so that either queue sends its lead on to the other one
    lock, states, gate = store.lock_queues, failures(monkeypatch), 20_000_001
    mine = threading.local()
    patient = Statement(sa.text("SELECT set_config('lock_timeout', '20s', true)"))
    meeting = Statement(sa.text(f"SELECT pg_advisory_xact_lock_shared({gate})"))

    def against_each_other(tenant_id: UUID, queue_ids: Collection[UUID]) -> Asking[list[UUID]]:
        """Not as the product does it: each unit begins with its own queue, once the other one has begun as well."""
        if len(queue_ids) == 1:
            (mine.first,) = queue_ids
        elif not getattr(mine, "met", False):
            mine.met = True
            first, then = (
                next(lock.of(tenant_id, [queue_id])) for queue_id in sorted(queue_ids, key=lambda q: q != mine.first)
            )
            yield [patient(), *first, meeting(), *then]
            return sorted(queue_ids)
        return (yield from lock.of(tenant_id, queue_ids))

    monkeypatch.setattr(store, "lock_queues", question(against_each_other))
    with ThreadPoolExecutor(2) as pool:
        units = []
        with unit(rig.runtime.engine) as (conn, _):
            conn.execute(sa.text(f"SELECT pg_advisory_xact_lock({gate})"))
            for number, source in enumerate(("Zillow", "Website"), 1):
                rig.create(source=source)
                assert rig.sandbox.wait_idle()
                units.append(pool.submit(decide, rig))
                until(lambda number=number: waiting_for_locks(rig) == number, what=f"unit {number} with its own queue")
            for ref in (ANA, BEN, CY, DEE):
                rig.pause(ref, False)
        assert [one.result(20) for one in units] == [1, 1]
    assert states == ["40P01"]
    monkeypatch.setattr(store, "lock_queues", lock)
    rig.start_worker()
    rig.settle()
    assert (rig.turns("One"), rig.turns("Two")) == ([ANA], [CY])
    assert [rig.assign(source=source) for source in ("Zillow", "Website") * 2] == [BEN, DEE, ANA, CY]
    assert rig.most_tries() == 0
    rig.audit()


def test_a_session_that_locks_two_queues_the_other_way_round_costs_no_lead_its_turn(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, server: EmbeddedPostgres
) -> None:
    rig = make_rig(worker=False, config=CROSSED)
    names = [row.name for row in rig.rows(sa.text("SELECT name FROM queues ORDER BY queue_id"))]
    for ref in (ANA, BEN) if names[0] == "One" else (CY, DEE):
        rig.pause(ref)
    states = failures(monkeypatch)
    rig.create(source="Zillow" if names[0] == "One" else "Website")  # of the queue that is locked first, which is away
    assert rig.sandbox.wait_idle()
    with ThreadPoolExecutor(1) as pool:
        with queue_held(rig, names[1], server.superuser_dsn(rig.runtime.engine.url.database or "")) as session:
            session.execute("SET deadlock_timeout = '20s'")  # so that not this one is the victim
            deciding = pool.submit(decide, rig)
            until(lambda: waiting_for_locks(rig) == 1, what="a unit before the second queue")
            other = "SELECT FROM queues WHERE tenant_id = %s AND name = %s FOR UPDATE"
            session.execute(other, [rig.tenant.tenant_id, names[0]])
        assert deciding.result(20) == 1
    assert states == ["40P01"]
    assert rig.turns(names[1]) == [CY if names[1] == "Two" else ANA]
    assert rig.turns(names[0]) == []
    assert rig.most_tries() == 0
    rig.audit()
