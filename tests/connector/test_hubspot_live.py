"""HubSpot end to end: batches, merges, owners that nobody should write to, a sweep behind a lagging search."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from connector import tenants
from connector.chores import sweep
from tests.rig import ANA, BEN, CY, Rig, until


@pytest.fixture
def live(make_rig: Callable[..., Rig]) -> Rig:
    """HubSpot with queue "All" of Ana, Ben, Cy; everything runs."""
    return make_rig("hubspot")


def sound(rig: Rig) -> None:
    """Nothing waits, every ledger follows, the CRM's stand-in has no defect."""
    rig.settle()
    rig.audit()
    assert rig.sandbox.errors() == []


def test_leads_get_agents_in_turn_and_a_note_that_says_why(live: Rig) -> None:
    first = live.create()
    assert [live.wait_owner(first), *(live.assign() for _ in range(3))] == [ANA, BEN, CY, ANA]
    sound(live)
    assert live.turns() == [ANA, BEN, CY, ANA]
    (note,) = live.sandbox.lead(int(first))["notes"]  # type: ignore[index]
    assert "Ana Alvarez" in note["subject"] + note["body"]
    # The echo of our own write names our app: it is ignored without a call.
    echoes = [e for e in live.events() if e.ref is None]
    assert {e.state for e in echoes} == {"ignored"}


def test_a_hundred_new_contacts_are_one_read_and_dealt_in_order(live: Rig) -> None:
    live.stop_worker()
    refs = [str(n) for n in live.sandbox.create_leads(100)]
    until(lambda: len(live.events()) == 100, what="the delivery")
    live.start_worker()
    until(lambda: all(live.owner(ref) for ref in refs), 60.0, "all owners")
    sound(live)
    assert [live.owner(ref) for ref in refs] == [(ANA, BEN, CY)[n % 3] for n in range(100)]
    reads = [c for c in live.sandbox.call_log() if c["path"].endswith("contacts/batch/read")]
    first_write = next(c["seq"] for c in live.sandbox.call_log() if c["method"] == "PATCH")
    assert len([c for c in reads if c["seq"] < first_write]) <= 1 + 8  # one for all to decide; one per sender


def test_an_agent_whom_the_crm_refuses_is_passed_over(live: Rig) -> None:
    live.sandbox.deactivate_agent(int(ANA))  # read as active a moment ago
    ref = live.create()
    assert live.wait_owner(ref) == BEN
    sound(live)
    assert live.void_turns() == {1: "refused"}
    assert [w["target"] for w in live.owner_writes(ref)] == [int(BEN)]


def test_an_owner_whom_hubspot_does_not_know_is_passed_over_though_they_read_as_active(live: Rig) -> None:
    live.first_round()  # a later reading of the agents would show them active, and they would be asked again
    said = json.dumps({"category": "VALIDATION_ERROR", "errors": [{"code": "INVALID_OWNER_ID"}]})
    live.sandbox.fault("raw", method="PATCH", path="/contacts/", times=1, status=400, body=said)
    ref = live.create()
    assert live.wait_owner(ref) == BEN
    sound(live)
    assert live.void_turns() == {1: "refused"}
    assert live.alarms() == set()


def test_a_human_who_is_faster_wins(live: Rig) -> None:
    live.stop_worker()
    ref = live.create()
    live.sandbox.set_owner(int(ref), int(CY))
    live.start_worker()
    sound(live)
    assert live.owner(ref) == CY
    assert live.owner_writes(ref) == []


def test_a_merge_gives_a_new_id_and_takes_nothing_from_anybody(live: Rig) -> None:
    first, second = live.create(), live.create()
    owners = {live.wait_owner(first), live.wait_owner(second)}
    assert owners == {ANA, BEN}
    sound(live)
    agent, lead_id = live.owner(first), live.lead_id(first)
    new = str(live.sandbox.merge_leads(int(first), int(second)))
    until(lambda: any(e.ref == new for e in live.events()), what="news of the merge")
    sound(live)
    assert live.lead_id(new) == lead_id  # one lead goes on under both ids
    assert (live.owner(new), live.standing(new)["state"]) == (agent, "assigned")
    assert live.assignments(new) == [(agent, "active")]
    assert live.standing(second)["state"] == "gone"
    assert live.position() == 2
    assert live.alarms() == set()
    # What happens to it from now on is the old lead's story: a cleared owner is a release, not a new lead.
    live.sandbox.set_owner(int(new), None)
    assert live.wait_owner(new) == CY
    assert [cause for cause, *_ in live.decisions(new)] == ["new", "released"]
    sound(live)


def test_a_lead_that_is_merged_while_nobody_has_it_is_still_one_lead(live: Rig) -> None:
    for ref in (ANA, BEN, CY):
        live.pause(ref)
    first, second = live.create(), live.create()
    until(lambda: {live.standing(r)["state"] for r in (first, second)} == {"held"}, what="both held")
    new = str(live.sandbox.merge_leads(int(first), int(second)))
    until(lambda: "gone" in {live.standing(r)["state"] for r in (first, second)}, what="the end of the other")
    live.pause(BEN, False)
    assert live.wait_owner(new) == BEN
    sound(live)
    assert live.position() == 1


def test_the_sweep_finds_what_no_webhook_told(live: Rig) -> None:
    live.sandbox.webhook_faults(drop=1.0)
    old = live.create(created="2026-01-01T00:00:00+00:00")
    found = sweep(live.runtime, live.tenant, datetime(2025, 12, 31, tzinfo=UTC))
    assert (found.seen, found.found) == (1, 1)
    assert live.wait_owner(old) == ANA
    young = live.create()  # within the lag of the search
    assert sweep(live.runtime, live.tenant, datetime.now(UTC) - timedelta(hours=1)).found == 0
    live.sandbox.webhook_faults()
    sound(live)
    assert live.owner(young) is None


def test_what_a_lagging_search_takes_for_unassigned_is_read_again_first(live: Rig) -> None:
    live.sandbox.webhook_faults(drop=1.0)
    ref = live.create(created=(datetime.now(UTC) - timedelta(minutes=10)).isoformat())
    live.sandbox.set_owner(int(ref), int(CY))
    live.sandbox.fault("stale", path="/search$", seconds=60)
    assert sweep(live.runtime, live.tenant, datetime.now(UTC) - timedelta(hours=1)).found == 1
    until(lambda: live.standing(ref)["state"] == "owned", what="the reading")
    sound(live)
    assert live.owner(ref) == CY
    assert live.owner_writes(ref) == []
    assert live.position() == 0


def test_install_tells_what_no_token_may_do(live: Rig) -> None:
    (todo,) = tenants.install(live.runtime, live.tenant).by_hand
    assert live.hook_url in todo
    assert "hubspot_owner_id, lifecyclestage, hs_lead_status" in todo
    assert [f for f in tenants.check(live.runtime, live.tenant) if not f.ok] == []
