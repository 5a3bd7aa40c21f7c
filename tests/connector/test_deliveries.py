"""Deliveries as CRMs really send them: twice, late, reordered, in batches, with a bad element, before they are true."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from threading import Barrier
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from adapters.base import Capability, Event, EventKind
from adapters.followupboss import FollowUpBoss
from connector import decide
from connector.accept import store_delivery
from connector.database import sqlstate
from connector.decide import Decider
from connector.flags import switch
from connector.sandbox.exchange import View
from connector.sandbox.generic import lead_json
from routing import kin, store
from routing import tables as t
from routing.flight import Asking, question
from routing.model import Flag
from tests.rig import ANA, BEN, CY, DEE, ELI, Rig, until

TWO_QUEUES = """
default_queue: All
queues:
  All: {members: ['12', '13', '14']}
  Other: {members: ['15', '16']}
rules:
  - {name: Zillow, when: {field: source, equals: Zillow}, to: {queue: Other}}
"""


def hook(rig: Rig, topic: str) -> int:
    """The number of our hook at the CRM for this topic."""
    return int(next(h["id"] for h in rig.sandbox.hooks() if topic in h["topics"]))


def untold(rig: Rig, count: int = 1, **fields: Any) -> list[str]:
    """Leads that no webhook tells of."""
    rig.sandbox.webhook_faults(drop=1.0)
    refs = [str(number) for number in rig.sandbox.create_leads(count, **fields)]
    rig.sandbox.webhook_faults()
    return refs


def tell(rig: Rig, *refs: Any, event: str = "peopleCreated", event_id: str | None = None) -> int:
    """Post one signed Follow Up Boss delivery; the sandbox's number of it."""
    body = {"eventId": event_id or str(uuid4()), "event": event, "resourceIds": list(refs)}
    return int(rig.sandbox.send_raw(hook(rig, event), json.dumps(body)))


def statuses(rig: Rig) -> list[int]:
    """Every answer that the CRM got from us."""
    return [attempt["status"] for d in rig.sandbox.deliveries() for attempt in d["attempts"]]


def owner_writes(rig: Rig) -> list[str]:
    return [str(row["lead"]) for row in rig.owner_writes()]


# -- twice, late, reordered ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("crm", ["followupboss", "generic"])
def test_one_delivery_sent_forty_times_over_eight_sockets_is_one_turn_and_one_write(
    make_rig: Callable[..., Rig], crm: str
) -> None:
    rig = make_rig(crm)
    rig.sandbox.webhook_faults(copies=8)
    ref = rig.create()
    rig.wait_owner(ref)
    rig.sandbox.webhook_faults()
    first = rig.sandbox.deliveries()[0]["id"]
    for _ in range(4):
        rig.sandbox.resend(first, copies=8)
    rig.settle()
    assert len(next(d for d in rig.sandbox.deliveries() if d["id"] == first)["attempts"]) == 40
    assert set(statuses(rig)) == {200}
    assert rig.turns() == [ANA]
    assert rig.decisions(ref) == [("new", "assigned", ANA)]
    assert owner_writes(rig) == [ref]
    assert len(rig.sandbox.lead(int(ref))["notes"]) == 1
    rig.audit()


@pytest.mark.parametrize("crm", ["followupboss", "generic"])
def test_an_update_that_overtakes_the_creation_changes_nothing(make_rig: Callable[..., Rig], crm: str) -> None:
    rig = make_rig(crm)
    rig.sandbox.webhook_faults(delay=0.5)
    ref = rig.create(price=300_000)
    rig.sandbox.webhook_faults()
    rig.sandbox.edit_leads([int(ref)], price=500_000)
    assert rig.wait_owner(ref) == ANA
    rig.settle()
    created, updated = rig.sandbox.deliveries()[:2]
    assert updated["attempts"][0]["mono"] < created["attempts"][0]["mono"]
    assert rig.turns() == [ANA]
    assert owner_writes(rig) == [ref]
    rig.audit()


def test_a_delivery_that_comes_again_a_day_later_moves_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    ref = rig.create()
    rig.wait_owner(ref)
    rig.settle()
    rig.wait_chores()
    for table, column in (("dedupe_keys", "seen_at"), ("events", "received_at"), ("deliveries", "received_at")):
        assert rig.sql(f"UPDATE {table} SET {column} = {column} - interval '1 day' WHERE tenant_id = :t")
    rig.sql("UPDATE chores SET last_ok_at = NULL WHERE tenant_id = :t AND kind = 'retention'")
    rig.want("retention")
    rig.wait_chores()
    calls, stored = len(rig.sandbox.call_log()), rig.one("SELECT count(*) FROM events WHERE tenant_id = :t")
    rig.sandbox.resend(rig.sandbox.deliveries()[0]["id"])
    assert rig.sandbox.wait_idle()
    rig.settle()
    assert statuses(rig)[-1] == 200
    assert rig.one("SELECT count(*) FROM events WHERE tenant_id = :t") == stored
    assert len(rig.sandbox.call_log()) == calls
    assert rig.turns() == [ANA]


def test_an_old_creation_under_a_new_event_id_never_undoes_a_human(rig: Rig) -> None:
    ref = rig.create()
    rig.wait_owner(ref)
    rig.settle()
    rig.sandbox.set_owner(int(ref), int(CY))
    rig.settle()
    tell(rig, int(ref))
    rig.settle()
    assert rig.owner(ref) == CY
    assert rig.turns() == [ANA]
    assert rig.standing(ref)["state"] == "owned"


def test_a_payload_that_is_older_than_what_we_know_is_not_believed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic")
    ref = rig.create()
    rig.wait_owner(ref)
    rig.settle()
    old = lead_json(rig.sandbox.state.leads[int(ref)], View()) | {"owner": None}
    body = {"type": "lead.updated", "timestamp": datetime.now(UTC).isoformat(), "data": old}
    rig.sandbox.send_raw(hook(rig, "lead.updated"), json.dumps(body))
    rig.settle()
    assert rig.owner(ref) == ANA
    assert rig.turns() == [ANA]
    assert owner_writes(rig) == [ref]


def test_one_lead_under_six_event_ids_at_once_is_one_turn(rig: Rig) -> None:
    for ref in untold(rig, 3):
        rig.sandbox.pause_dispatch()
        for event in ("peopleCreated", "peopleUpdated") * 3:
            tell(rig, int(ref), event=event)
        rig.sandbox.resume_dispatch()
        rig.wait_owner(ref)
        rig.settle()
        assert rig.decisions(ref) == [("new", "assigned", rig.owner(ref))]
    assert rig.turns() == [ANA, BEN, CY]
    assert len(owner_writes(rig)) == 3
    assert rig.most_tries() == 0
    rig.audit()


# -- batches ------------------------------------------------------------------------------------------------------


def in_batch(rig: Rig, refs: list[str]) -> int:
    """Post a delivery of these leads with an element between them that nobody can read."""
    if rig.crm == "followupboss":
        return tell(rig, int(refs[0]), "x/y", *map(int, refs[1:]))
    leads: list[dict[str, Any]] = [lead_json(rig.sandbox.state.leads[int(ref)], View()) for ref in refs]
    leads.insert(1, {"id": "x/y", "source": "Website"})
    body = {"type": "lead.created", "timestamp": datetime.now(UTC).isoformat(), "data": {"leads": leads}}
    return int(rig.sandbox.send_raw(hook(rig, "lead.created"), json.dumps(body)))


@pytest.mark.parametrize("crm", ["followupboss", "generic"])
def test_a_bad_element_parks_alone_and_its_batch_keeps_its_order(make_rig: Callable[..., Rig], crm: str) -> None:
    rig = make_rig(crm)
    refs = untold(rig, 5)
    delivery = in_batch(rig, refs)
    assert [rig.wait_owner(ref) for ref in refs] == [ANA, BEN, CY, ANA, BEN]
    rig.settle()
    parked = sa.text("SELECT reason FROM events WHERE tenant_id = :t AND state = 'parked'")
    assert [row.reason for row in rig.rows(parked.bindparams(t=rig.tenant.tenant_id))] == ["wrong_type"]
    assert rig.alarms() == {"unreadable_event"}
    rig.sandbox.resend(delivery, copies=3)
    rig.settle()
    assert len(rig.rows(parked.bindparams(t=rig.tenant.tenant_id))) == 1
    assert rig.turns() == [ANA, BEN, CY, ANA, BEN]
    assert sorted(owner_writes(rig)) == refs
    assert set(statuses(rig)) == {200}
    rig.audit()


def test_a_hundred_leads_in_one_delivery_are_one_unit_in_their_order(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FollowUpBoss, "capabilities", FollowUpBoss.capabilities - {Capability.NOTES})
    refs = [str(number) for number in rig.sandbox.create_leads(100)]
    rig.settle(60)
    assert [rig.owner(ref) for ref in refs] == ([ANA, BEN, CY] * 34)[:100]
    taken = "SELECT count(DISTINCT decided_at) FROM decisions WHERE tenant_id = :t"
    assert rig.one(taken) == 1
    rig.audit()


# -- before and after it is true ----------------------------------------------------------------------------------


def test_a_lead_that_is_readable_only_later_is_waited_for(rig: Rig) -> None:
    rig.sandbox.fault("unreadable", seconds=2.5)
    ref = rig.create()
    waits = "SELECT count(*) FROM events WHERE tenant_id = :t AND reason = 'not_readable'"
    until(lambda: rig.one(waits) == 1, what="an event waiting for its lead")
    assert rig.wait_owner(ref) == ANA
    rig.settle()
    assert rig.turns() == [ANA]
    assert rig.most_tries() == 0
    assert rig.alarms() == set()


@pytest.mark.proof
def test_a_lead_that_is_readable_only_after_ten_seconds_is_waited_for(rig: Rig) -> None:
    rig.sandbox.fault("unreadable", seconds=10.0)
    assert rig.assign() == ANA


def test_a_lead_deleted_before_its_decision_takes_no_turn(rig: Rig) -> None:
    rig.sandbox.pause_dispatch()
    ref = rig.create()
    rig.sandbox.delete_leads([int(ref)])
    rig.sandbox.resume_dispatch()
    assert rig.sandbox.wait_idle()
    until(lambda: rig.one("SELECT count(*) FROM events WHERE tenant_id = :t AND reason = 'not_readable'"))
    rig.sql("UPDATE events SET received_at = received_at - interval '3 minutes' WHERE tenant_id = :t")
    rig.due_now()
    rig.settle()
    assert {row.reason for row in rig.events()} == {"gone"}
    assert rig.assign() == ANA
    rig.settle()
    assert rig.turns() == [ANA]
    assert rig.most_tries() == 0


def test_a_lead_deleted_after_its_assignment_leaves_the_turn_used(rig: Rig) -> None:
    ref = rig.create()
    rig.wait_owner(ref)
    rig.settle()
    rig.sandbox.delete_leads([int(ref)])
    rig.settle()
    assert rig.standing(ref)["state"] == "gone"
    assert rig.one("SELECT state FROM assignments WHERE tenant_id = :t") == "void"
    assert rig.void_turns() == {}
    assert rig.assign() == BEN
    rig.settle()
    assert rig.turns() == [ANA, BEN]
    rig.audit()


def test_a_lead_deleted_between_decision_and_write_gives_the_turn_back(rig: Rig) -> None:
    rig.sandbox.fault("hold", method="GET", path="/people$", apply=False, skip=1, times=1)
    ref = rig.create()
    assert rig.sandbox.wait_held()
    rig.sandbox.delete_leads([int(ref)])
    rig.sandbox.release()
    rig.settle()
    assert rig.standing(ref)["state"] == "gone"
    assert rig.void_turns() == {1: "gone"}
    assert rig.assign() == ANA  # who is owed one
    rig.audit()


# -- one person ---------------------------------------------------------------------------------------------------


def test_two_leads_of_one_person_at_the_same_instant_go_to_one_agent_with_one_turn(rig: Rig) -> None:
    for number in range(8):
        email = f"twin{number}@example.com"
        with ThreadPoolExecutor(2) as pool:
            refs = list(pool.map(lambda _, email=email: rig.create(emails=[email]), range(2)))
        owners = {rig.wait_owner(ref) for ref in refs}
        assert len(owners) == 1
    rig.settle()
    assert rig.turns() == [ANA, BEN, CY, ANA, BEN, CY, ANA, BEN]
    assert rig.one("SELECT count(*) FROM assignments WHERE tenant_id = :t AND turn IS NULL") == 8
    assert rig.most_tries() == 0
    rig.audit()


def a_unit(rig: Rig, pool: ThreadPoolExecutor, source: str) -> Future[int]:
    """A lead of somebody and one of the twin come in, and a decider of its own takes both.

    A lead alone would be stored along with its unit, which keeps another of the same person waiting as well.
    """
    rig.create(source=source)
    rig.create(source=source, emails=["twin@example.com"])
    assert rig.sandbox.wait_idle()
    return pool.submit(Decider(rig.runtime, lambda *_: None, lambda: 0).run, rig.tenant.tenant_id)


def test_the_second_lead_of_a_person_waits_until_the_first_has_its_agent(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(worker=False, config=TWO_QUEUES)

    def waiting() -> int:
        states = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return int(rig.one(states))

    with ThreadPoolExecutor(2) as pool:
        with rig.runtime.engine.connect() as conn:
            conn.execute(sa.select(t.queues.c.queue_id).where(t.queues.c.name == "All").with_for_update()).all()
            first = a_unit(rig, pool, "Website")
            until(lambda: waiting() == 1, what="the first unit before its queue")
            second = a_unit(rig, pool, "Zillow")
            until(lambda: waiting() == 2, what="the second unit behind the first, though its own queue is free")
            conn.rollback()
        assert [first.result(20), second.result(20)] == [2, 2]
    assert rig.turns("All") == [ANA, BEN]
    assert rig.turns("Other") == [DEE]
    assert rig.most_tries() == 0
    rig.start_worker()
    rig.settle()
    some, twin, other, again = (str(owner) for _, owner in rig.sandbox.owners())
    assert {some, twin} == {ANA, BEN}
    assert (other, again) == (DEE, twin)
    rig.audit()


def test_without_the_lock_on_identities_they_part(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(worker=False, config=TWO_QUEUES)
    both_have_read, look_up = Barrier(2), kin.existing_owners

    def look_up_together(*given: Any) -> Asking[Any]:
        found = yield from look_up.of(*given)
        both_have_read.wait(10)
        return found

    def no_lock(*_: Any) -> Asking[None]:
        yield []

    monkeypatch.setattr(store, "lock_identities", question(no_lock))
    monkeypatch.setattr(kin, "existing_owners", question(look_up_together))
    with ThreadPoolExecutor(2) as pool:
        first = a_unit(rig, pool, "Website")
        until(lambda: both_have_read.n_waiting == 1, what="the first unit, which has claimed its own")
        second = a_unit(rig, pool, "Zillow")
        assert [first.result(20), second.result(20)] == [2, 2]
    assert [rig.turns("All"), rig.turns("Other")] == [[ANA, BEN], [DEE, ELI]]


# -- ids and keys -------------------------------------------------------------------------------------------------


def test_ids_that_a_locale_sorts_otherwise_never_deadlock(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A locale puts "a-1" before "B-2" and ignores punctuation; bytes put "B-2" first."""
    rig = make_rig("generic", concurrency=16)
    switch(rig.runtime, rig.tenant.tenant_id, Flag.WRITE_BACK, "off", "test")
    lost: list[str | None] = []
    monkeypatch.setattr(decide, "is_contention", lambda error: lost.append(sqlstate(error)) or True)
    number = hook(rig, "lead.created")
    rounds = 20
    for n in range(rounds):
        leads = [{"id": f"{ref}.{n}", "emails": [f"{ref}{n}@example.com"]} for ref in ("a-1", "B-2", "Z", "a_1", "~b")]
        for order in (leads, leads[::-1]):
            body = {"type": "lead.created", "timestamp": datetime.now(UTC).isoformat(), "data": {"leads": order}}
            rig.sandbox.send_raw(number, json.dumps(body))
    rig.settle()
    assert lost == []
    assert set(statuses(rig)) == {200}
    decided = "SELECT count(*), count(DISTINCT lead_id) FROM decisions WHERE tenant_id = :t AND outcome = 'assigned'"
    assert tuple(rig.rows(sa.text(decided).bindparams(t=rig.tenant.tenant_id))[0]) == (5 * rounds, 5 * rounds)
    assert len(rig.turns()) == 5 * rounds
    assert rig.most_tries() == 0
    rig.audit()


def test_a_key_that_is_not_final_joins_only_an_event_that_nobody_has_claimed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(worker=False)
    ref = untold(rig)[0]
    same = Event(EventKind.LEAD_CHANGED, "changed:" + ref, key_is_final=False, ref=ref)

    def store() -> int:
        return store_delivery(rig.runtime, rig.tenant, [same], hook_id=None, body=b"{}", flag_version=0, headers={})

    assert [store(), store()] == [1, 0]
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: store(), range(16))) == {0}
    rig.start_worker()
    assert rig.wait_owner(ref) == ANA
    rig.settle()
    assert rig.sandbox.clear_owner(int(ref))
    rig.settle()
    assert store() == 1  # the same bytes again are news once the first event was claimed
    rig.runtime.wake(rig.tenant.tenant_id)
    rig.settle()
    assert rig.turns() == [ANA, BEN]
    rig.audit()


def test_a_final_key_is_a_duplicate_for_ever(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic")
    ref = rig.create()
    rig.wait_owner(ref)
    rig.settle()
    event = Event(EventKind.LEAD_CHANGED, "vendor:1", ref=ref)
    for expected in (1, 0):
        assert (
            store_delivery(rig.runtime, rig.tenant, [event], hook_id=None, body=b"{}", flag_version=0, headers={})
            == expected
        )
        rig.runtime.wake(rig.tenant.tenant_id)
        rig.settle()
    assert rig.turns() == [ANA]
