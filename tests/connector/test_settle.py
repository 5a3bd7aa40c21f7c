"""New leads of slow sources settle first: they are read when their fields are in, and decided once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from connector import byhand, flags, settle
from connector.explain import explain
from routing.model import Flag
from routing.settle import SettleTimes
from tests.rig import ANA, BEN, Rig, until

# An hour: nothing of what these tests see happens by the passing of time alone.
SLOW = (
    "default_queue: Rest\nqueues:\n  Luxury: {members: ['12']}\n  Rest: {members: ['13']}\n"
    "rules:\n- {name: luxury, when: {field: price, at_least: 900000}, to: {queue: Luxury}}\n"
    "settle: {sources: {Zillow: 3600}}\n"
)


@pytest.fixture
def slow(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(crm="generic", config=SLOW)


def settling(rig: Rig, ref: str, count: int = 1) -> list[Any]:
    """The events of a lead, once `count` of them wait for it to settle."""
    query = (
        "SELECT count(*) FROM events WHERE tenant_id = :t AND ref = :r AND state = 'waiting' AND reason = 'settling'"
    )
    until(lambda: rig.one(query, r=ref) == count, what=f"{count} events that wait")
    return [event for event in rig.events() if event.ref == ref]


def an_hour_later(rig: Rig) -> None:
    rig.sql("UPDATE leads SET settles_at = clock_timestamp() WHERE tenant_id = :t AND settles_at > clock_timestamp()")
    rig.due_now()


def test_a_lead_is_decided_once_by_what_it_holds_when_it_has_settled(slow: Rig) -> None:
    ref = slow.create(source="zillow", price=300_000)
    (first,) = settling(slow, ref)
    ends = slow.one("SELECT settles_at FROM leads WHERE tenant_id = :t")
    assert (ends - first.received_at).total_seconds() == 3600
    # Its fields arrive, and are told: that neither restarts the wait nor ends it.
    slow.sandbox.edit_leads([int(ref)], price=1_000_000)
    told = settling(slow, ref, 2)
    assert slow.one("SELECT settles_at FROM leads WHERE tenant_id = :t") == ends
    assert {abs((event.due_at - ends).total_seconds()) < 0.1 for event in told} == {True}
    assert slow.standing(ref)["state"] is None
    (shown, _) = explain(slow.runtime, slow.tenant, slow.lead_id(ref))["open_events"]
    assert shown["text"] == f"waits to settle until {told[0].due_at:%Y-%m-%d %H:%M:%S}Z"
    an_hour_later(slow)
    assert slow.wait_owner(ref) == ANA
    slow.settle_owners()
    assert slow.decisions(ref) == [("new", "assigned", ANA)]
    assert (slow.position("Luxury"), slow.position("Rest"), len(slow.owner_writes(ref))) == (1, 0, 1)
    slow.audit()


def test_other_sources_do_not_wait_and_a_default_is_for_all_that_are_not_named(slow: Rig) -> None:
    assert slow.assign(source="Website", price=1) == BEN
    slow.configure(SLOW.replace("{sources:", "{default: 60, sources:").replace("3600", "0"))
    settling(slow, slow.create(source="Website", price=1))
    settling(slow, slow.create(source=None, price=1))
    assert slow.assign(source="Zillow", price=1) == BEN
    flags.switch(slow.runtime, slow.tenant.tenant_id, Flag.SETTLE, "off", "test")
    assert slow.assign(source="Website", price=1) == BEN


def test_a_decision_by_hand_does_not_wait(slow: Rig) -> None:
    ref = slow.create(source="Zillow", price=1)
    settling(slow, ref)
    routed = byhand.route(slow.runtime, slow.tenant, ref, slow.lead_id(ref), patience=20.0)
    assert routed.decided
    assert slow.owner(ref) == BEN
    an_hour_later(slow)
    slow.settle_owners()
    assert len(slow.decided(ref)) == 1


def late(rig: Rig) -> str:
    """A lead whose news is looked at only after it has settled: by what agent it was taken."""
    rig.stop_worker()
    ref = rig.create(source="Zillow", price=1)
    assert rig.sandbox.wait_idle()
    rig.sandbox.webhook_faults(drop=1.0)
    rig.sandbox.edit_leads([int(ref)], price=1_000_000)
    rig.sql("UPDATE events SET received_at = received_at - interval '2 hours' WHERE tenant_id = :t")
    rig.start_worker()
    return rig.wait_owner(ref)


def test_a_payload_is_never_believed_however_late_it_is_looked_at(slow: Rig) -> None:
    assert late(slow) == ANA


def test_without_the_wait_it_would_go_by_the_payload(slow: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin, to show that the test above can fail."""
    monkeypatch.setattr(settle, "let_settle", lambda runtime, tenant, lease, items, times: list(items))
    assert late(slow) == BEN


def test_a_source_is_named_as_people_write_it() -> None:
    times = SettleTimes(5, {"Zillow Flex": 20, "Café": 0})
    asked = [times.seconds(source) for source in ("zillow  flex", "CAFE", "Zillow", None)]
    assert asked == [20, 0, 5, 5]
    assert [bool(SettleTimes()), bool(SettleTimes(0, {"A": 0})), bool(times)] == [False, False, True]
    assert SettleTimes.of_json(times.as_json()) == times
