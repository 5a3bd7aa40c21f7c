"""Leads that wait for an agent, leads that no webhook told of, and agents as the CRM shows them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from adapters import registry
from connector import flags
from connector.alarms import open_alarm
from connector.database import unit
from routing import decide, saving
from routing.model import Flag, Role
from tests.rig import ABC, ANA, BEN, CY, DEE, ELI, Rig, until

NOBODY = "default_queue: All\nqueues:\n  All:\n    members: []\n"


def all_away(rig: Rig, away: bool = True, *refs: str) -> None:
    """The admin pauses everybody, or ends that."""
    for ref in refs or (ANA, BEN, CY):
        rig.pause(ref, away)


def wait(rig: Rig, count: int = 1, **fields: Any) -> list[str]:
    """Leads that come in one after the other and find nobody."""
    refs = []
    for _ in range(count):
        refs.append(rig.create(**fields))
        rig.settle_owners()
        assert rig.standing(refs[-1])["state"] == "held"
        assert rig.owner(refs[-1]) is None
    return refs


def served(rig: Rig, refs: list[str]) -> list[str | None]:
    """Owners of these leads, once each has one; ledgers follow and no alarm about held leads stays."""
    until(lambda: all(rig.owners(refs)), what="owners for those who waited")
    rig.settle_owners()
    rig.run_chore("held")
    until(lambda: "leads_held" not in rig.alarms(), what="the end of the alarm")
    rig.audit()
    return rig.owners(refs)


def leads_by_turn(rig: Rig) -> list[str]:
    """The CRM's ids of the leads, in the order in which their turns were taken."""
    query = (
        "SELECT string_agg(r.ref, ',' ORDER BY turns.turn) FROM turns JOIN decisions d USING (tenant_id, decision_id) "
        "JOIN lead_refs r USING (tenant_id, lead_id) WHERE tenant_id = :t"
    )
    return str(rig.one(query)).split(",")


# -- held --------------------------------------------------------------------------------------------------


def test_a_lead_that_finds_nobody_is_held_with_a_reason_and_an_alarm(rig: Rig) -> None:
    all_away(rig)
    (ref,) = wait(rig)
    assert rig.standing(ref)["reason"] == "nobody_available"
    assert rig.skips(ref) == dict.fromkeys([ANA, BEN, CY], "paused")
    assert rig.alarms() == {"leads_held"}
    assert (rig.position(), rig.turns()) == (0, [])
    assert rig.owner_writes() == []


def test_those_who_waited_are_served_oldest_first_from_where_the_line_stood(rig: Rig) -> None:
    assert rig.assign() == ANA
    all_away(rig)
    refs = wait(rig, 4)
    assert rig.decided(refs[3])[0].reason == "nobody_available"
    all_away(rig, False)
    assert sorted(map(str, served(rig, refs))) == sorted([BEN, CY, ANA, BEN])
    turns = rig.turns()
    assert turns[0] == ANA
    # The first to come back is there before the others, so who gets which is theirs; the order of leads is not.
    assert turns[1:] == rig.owners(refs)


def test_a_newer_lead_never_overtakes_one_that_waits(rig: Rig) -> None:
    all_away(rig)
    refs = wait(rig, 2)
    rig.first_round()
    # Somebody is there again, but the drain has not come by yet: the CRM is slow to answer it.
    hold = rig.sandbox.fault("hold", method="GET", path="/people$", apply=True, times=1)
    rig.pause(BEN, False)
    assert rig.sandbox.wait_held()
    newer = rig.create()
    until(lambda: rig.standing(newer)["state"], what="a decision about the newer lead")
    assert (rig.standing(newer)["state"], rig.standing(newer)["reason"]) == ("held", "behind_held")
    rig.sandbox.clear_faults(hold)
    rig.sandbox.release()
    assert served(rig, [*refs, newer]) == [BEN] * 3
    assert leads_by_turn(rig) == [*refs, newer]


def test_each_free_agent_gets_the_oldest_lead_that_they_may_take(rig: Rig) -> None:
    rig.configure(
        "default_queue: Rest\nqueues:\n  Luxury: {members: ['12']}\n  Rest: {members: ['13']}\n"
        "rules:\n- {name: luxury, when: {field: price, at_least: 900000}, to: {queue: Luxury}}\n"
    )
    all_away(rig, True, ANA, BEN)
    dear = wait(rig, 2, price=1_000_000)
    cheap = wait(rig, 2, price=300_000)
    rig.pause(BEN, False)
    until(lambda: all(rig.owners(cheap)), what="owners for the cheaper ones")
    rig.settle_owners()
    assert rig.owners(dear + cheap) == [None, None, BEN, BEN]
    rig.run_chore("held")
    # One queue has caught up, the other still waits: the alarm names it alone.
    subjects = "SELECT string_agg(subject, ',') FROM alarms WHERE tenant_id = :t AND closed_at IS NULL"
    until(lambda: rig.one(subjects) == "Luxury", what="an alarm about the other queue alone")
    rig.pause(ANA, False)
    assert served(rig, dear + cheap) == [ANA, ANA, BEN, BEN]


def test_an_emptied_and_refilled_queue_serves_those_who_waited(rig: Rig) -> None:
    rig.configure(NOBODY)
    refs = wait(rig, 3)
    assert rig.standing(refs[0])["reason"] == "queue_empty"
    rig.configure("default_queue: All\nqueues:\n  All:\n    members: ['15', '16']\n")
    assert served(rig, refs) == [DEE, ELI, DEE] == rig.turns()


def test_a_lead_that_comes_to_wait_elsewhere_keeps_its_place_in_time(rig: Rig) -> None:
    queues = "default_queue: Rest\nqueues:\n  Luxury: {members: ['12']}\n  Rest: {members: ['13']}\n"
    rig.configure(queues + "rules:\n- {name: luxury, when: {field: price, at_least: 900000}, to: {queue: Luxury}}\n")
    all_away(rig, True, ANA, BEN)
    older, newer = wait(rig, 1, price=1_000_000) + wait(rig, 1, price=300_000)
    rig.configure(queues)
    in_rest = "SELECT count(*) FROM lead_roles JOIN queues USING (tenant_id, queue_id) WHERE name = 'Rest'"
    until(lambda: rig.one(in_rest) == 2, what="both in one queue")
    rig.settle_owners()
    rig.pause(BEN, False)
    assert served(rig, [older, newer]) == [BEN, BEN]
    assert leads_by_turn(rig) == [older, newer]


def test_held_leads_survive_a_restart(rig: Rig) -> None:
    all_away(rig)
    refs = wait(rig, 2)
    rig.restart()
    rig.run_chore("held")
    rig.settle_owners()
    assert [rig.standing(ref)["state"] for ref in refs] == ["held", "held"]
    all_away(rig, False)
    served(rig, refs)
    assert rig.turns() == rig.owners(refs)


def test_asking_again_in_vain_leaves_no_trace(rig: Rig) -> None:
    all_away(rig)
    refs = wait(rig, 2)
    for _ in range(3):
        rig.run_chore("held")
        rig.settle_owners()
    assert [len(rig.decided(ref)) for ref in refs] == [1, 1]
    before = rig.one("SELECT array_agg(since ORDER BY since) FROM lead_roles WHERE tenant_id = :t")
    rig.run_chore("held")
    rig.settle_owners()
    assert rig.one("SELECT array_agg(since ORDER BY since) FROM lead_roles WHERE tenant_id = :t") == before
    assert rig.one("SELECT count(*) FROM decisions WHERE tenant_id = :t") == 2


def test_a_held_lead_that_a_human_takes_is_left_to_them(rig: Rig) -> None:
    all_away(rig)
    refs = wait(rig, 2)
    rig.sandbox.set_owner(int(refs[0]), int(ELI))
    rig.settle_owners()
    assert rig.standing(refs[0])["state"] == "owned"
    all_away(rig, False)
    assert served(rig, refs[1:]) == [rig.turns()[0]]
    assert rig.owner(refs[0]) == ELI
    assert rig.position() == 1


def test_a_held_lead_that_is_deleted_is_not_waited_for(rig: Rig) -> None:
    all_away(rig)
    refs = wait(rig, 2)
    rig.sandbox.delete_leads([int(refs[0])])
    until(lambda: rig.standing(refs[0])["state"] == "gone", what="the notice of it")
    all_away(rig, False)
    assert rig.wait_owner(refs[1]) == rig.turns()[0]
    assert rig.position() == 1
    rig.run_chore("held")
    assert "leads_held" not in rig.alarms()
    rig.audit()


def test_an_alarm_that_is_raised_while_the_drain_looks_stays_open(rig: Rig) -> None:
    all_away(rig)
    (ref,) = wait(rig)
    rig.sandbox.set_owner(int(ref), int(ELI))
    rig.settle_owners()
    rig.sandbox.webhook_faults(drop=1.0)
    rig.sandbox.set_owner(int(ref), None)  # whoever reads the lead from now on finds it as it stands below
    tenant_id, lead_id = rig.tenant.tenant_id, rig.lead_id(ref)
    queue_id = rig.one("SELECT queue_id FROM queues WHERE tenant_id = :t")
    ended = "SELECT leased_until IS NULL FROM chores WHERE tenant_id = :t AND kind = 'held'"
    blocked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    rig.run_chore("held")  # the one that the human's choice made due is over, and closed the first alarm
    with unit(rig.runtime.engine) as (conn, _):
        open_alarm(conn, tenant_id, "leads_held", "All", "leads are held")
    with unit(rig.runtime.engine) as (conn, now):  # a decision that is not committed yet
        open_alarm(conn, tenant_id, "leads_held", "All", "leads are held")
        saving.set_standing(
            conn, tenant_id, lead_id, Role.OWNER, state="held", reason="nobody_available", now=now, queue_id=queue_id
        )
        rig.want("held")
        until(lambda: rig.one(blocked) > 0, what="a drain that waits for us")
    until(lambda: rig.one(ended), what="the end of the drain")
    assert rig.standing(ref)["state"] == "held"
    assert rig.alarms() == {"leads_held"}


def test_a_long_wait_is_drained_in_order(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic")
    all_away(rig)
    rig.sandbox.create_leads(250)
    rig.settle_owners()
    waiting = str(
        rig.one(
            "SELECT string_agg(ref, ',' ORDER BY since, lead_id) FROM lead_roles "
            "JOIN lead_refs USING (tenant_id, lead_id) WHERE tenant_id = :t AND state = 'held'"
        )
    ).split(",")
    assert len(waiting) == 250
    rig.configure("default_queue: All\nqueues:\n  All:\n    members: ['15', '16']\n")
    until(
        lambda: rig.position() == 250, 40.0, "turns for all"
    )  # as fast as the CRM takes the owners, on a busy machine
    assert leads_by_turn(rig) == waiting
    until(lambda: rig.owners(waiting[:4]) == [DEE, ELI, DEE, ELI], what="the first owners")


def test_without_the_rule_of_waiting_a_newer_lead_would_overtake(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin, to show that the test of overtaking can fail."""
    made = decide.Bench.__init__

    def forgetful(self: decide.Bench, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        self.ahead.clear()

    monkeypatch.setattr(decide.Bench, "__init__", forgetful)
    with pytest.raises(AssertionError):
        test_a_newer_lead_never_overtakes_one_that_waits(rig)
    rig.sandbox.release()


# -- the sweep ---------------------------------------------------------------------------------------------


def ten_minutes_ago() -> datetime:
    """A time of creation that a sweep looks at: the youngest leads it leaves to their webhooks."""
    return datetime.now(UTC) - timedelta(minutes=10)


@pytest.mark.parametrize("crm", ["followupboss", "generic"])
def test_leads_whose_webhooks_were_lost_are_found(make_rig: Callable[..., Rig], crm: str) -> None:
    rig = make_rig(crm)
    first = "SELECT last_ok_at FROM chores WHERE tenant_id = :t AND kind = 'sweep'"
    until(lambda: rig.one(first), what="a first sweep")
    rig.sandbox.webhook_faults(drop=1.0)
    refs = [rig.create(created=ten_minutes_ago() + timedelta(seconds=n)) for n in range(3)]
    owned = rig.create(created=ten_minutes_ago(), owner=int(ELI))
    rig.run_chore("sweep")
    until(lambda: all(rig.owners(refs)), what="owners")
    rig.settle_owners()
    assert sorted(map(str, rig.owners(refs))) == [ANA, BEN, CY]
    assert rig.owner(owned) == ELI
    assert rig.alarms() == {"webhooks_missing"}
    rig.run_chore("sweep")
    assert rig.alarms() == set()
    assert rig.position() == 3
    rig.audit()


def test_a_sweep_leaves_what_waits_or_was_left_alone(rig: Rig) -> None:
    rig.configure(ABC + "rules:\n- {name: hands off, when: {field: source, equals: Referral}, to: leave_alone}\n")
    # The new configuration is swept for, too: let that be over, lest it falls between a lead and its webhook.
    busy = (
        "SELECT leased_until IS NOT NULL OR due_at <= clock_timestamp() FROM chores WHERE tenant_id = :t AND kind = :k"
    )
    until(lambda: not rig.one(busy, k="sweep"), what="an end of the sweep")
    all_away(rig)
    refs = wait(rig, created=ten_minutes_ago(), source="Website")
    refs.append(rig.create(created=ten_minutes_ago(), source="Referral"))
    rig.settle_owners()
    rig.run_chore("sweep")
    rig.settle_owners()
    assert rig.one("SELECT count(*) FROM deliveries WHERE tenant_id = :t AND source = 'sweep'") == 0
    assert [rig.standing(ref)["state"] for ref in refs] == ["held", "left"]
    assert "webhooks_missing" not in rig.alarms()


def test_a_sweep_does_not_tell_again_what_write_back_off_kept_from_the_crm(rig: Rig) -> None:
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.WRITE_BACK, "off", "test")
    ref = rig.create(created=ten_minutes_ago())
    rig.settle_owners()
    assert rig.assignments(ref) == [(ANA, "active")]
    assert rig.owner(ref) is None
    rig.run_chore("sweep")
    rig.settle_owners()
    assert len(rig.decided(ref)) == 1
    assert rig.position() == 1
    assert rig.alarms() == set()


def test_a_sweep_finds_an_owner_that_was_cleared_unseen(rig: Rig) -> None:
    ref = rig.create(created=ten_minutes_ago())
    assert rig.wait_owner(ref) == ANA
    rig.settle_owners()
    rig.sandbox.webhook_faults(drop=1.0)
    rig.sandbox.clear_owner(int(ref))
    rig.run_chore("sweep")
    assert rig.wait_owner(ref) == BEN
    rig.settle_owners()
    assert rig.assignments(ref) == [(ANA, "released"), (BEN, "active")]
    rig.audit()


@pytest.mark.parametrize("by_creation", [False, True], ids=["by change", "by creation only, which finds nothing"])
@pytest.mark.parametrize("crm", ["followupboss", "hubspot"])
def test_an_old_lead_whose_owner_was_cleared_while_turnlock_was_down_is_assigned_again(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, crm: str, by_creation: bool
) -> None:
    if by_creation:
        monkeypatch.setattr(type(registry.adapter(crm)), "changed_since", lambda *_: iter(()))
    rig = make_rig(crm)
    rig.first_round()
    months_ago = datetime.now(UTC) - timedelta(days=90)
    ref = rig.create(created=months_ago)
    assert rig.wait_owner(ref) == ANA
    rig.settle_owners()
    rig.sandbox.webhook_faults(drop=1.0)
    rig.stop_worker()
    rig.sandbox.clear_owner(int(ref))
    never_known = rig.create(created=months_ago)
    with rig.sandbox.crm.state.lock:  # it was down for ten minutes, longer than the sweep leaves to the webhooks
        for lead in rig.sandbox.crm.state.leads.values():
            lead.updated -= timedelta(minutes=10)
    rig.restart()
    rig.run_chore("sweep")
    rig.settle_owners()
    assert rig.owner(ref) == (None if by_creation else BEN)
    assert rig.owner(never_known) is None
    if not by_creation:
        assert rig.decisions(ref) == [("new", "assigned", ANA), ("released", "assigned", BEN)]
        assert rig.alarms() == {"webhooks_missing"}
        rig.audit()


# -- agents ------------------------------------------------------------------------------------------------


def test_a_sync_sees_who_is_new_who_left_and_who_is_not_there_any_more(rig: Rig) -> None:
    assert rig.sync() == {"new": 0, "changed": 0, "same": 6, "missing": 0}
    fay = str(rig.sandbox.add_agent("Fay Fox"))
    rig.sandbox.deactivate_agent(int(BEN))
    with rig.sandbox.crm.state.lock:
        del rig.sandbox.crm.state.agents[int(CY)]
    assert rig.sync() == {"new": 1, "changed": 1, "same": 4, "missing": 1}
    rig.configure(f"default_queue: All\nqueues:\n  All:\n    members: ['12', '13', '14', '{fay}']\n")
    refs = rig.burst(3)
    assert rig.owners(refs) == [ANA, fay, ANA]
    assert rig.skips(refs[0]) == {BEN: "deactivated", CY: "deactivated"}
    assert rig.sync()["missing"] == 0
    rig.sandbox.activate_agent(int(BEN))
    rig.sync()
    assert rig.assign() == BEN
    rig.settle_owners()
    rig.audit()


def test_an_empty_list_of_agents_is_not_believed(rig: Rig) -> None:
    rig.first_round()
    rig.sandbox.fault("empty", method="GET", path="/users$", times=1)
    assert rig.sync()["missing"] == 0
    assert rig.assign() == ANA


def test_whoever_the_crm_pauses_is_passed_over_until_the_crm_ends_it(rig: Rig) -> None:
    rig.sandbox.pause_agent(int(ANA))
    rig.run_chore("agents")
    refs = rig.burst(2)
    assert rig.owners(refs) == [BEN, CY]
    assert rig.skips(refs[0]) == {ANA: "paused"}
    rig.sandbox.resume_agent(int(ANA))
    rig.run_chore("agents")
    assert [rig.assign() for _ in range(2)] == [ANA, BEN]
    rig.settle_owners()
    rig.audit()


def test_working_hours_follow_the_crms_zone_until_the_admin_names_one(rig: Rig) -> None:
    def hours(zone: str = "") -> str:
        return f"{ABC}agents:\n  '{ANA}': {{{zone}hours: {{mon: ['09:00-17:00']}}}}\n"

    rig.at("2026-02-09T14:30:00+00:00")  # Monday 08:30 in Chicago, 09:30 in New York
    rig.configure(hours())
    assert rig.skips(rig.burst(1)[0]) == {ANA: "off_hours"}
    rig.sandbox.change_agent(int(ANA), zone="America/New_York")
    rig.sync()
    assert rig.assign() == ANA
    rig.configure(hours("zone: America/Chicago, "))
    rig.sync()
    assert rig.skips(rig.burst(1)[0]) == {ANA: "off_hours"}
    rig.configure(hours())
    assert rig.skips(rig.burst(1)[0]) == {}
    rig.settle_owners()
    rig.audit()


def test_an_agent_whom_the_crm_brings_back_gets_the_leads_that_waited(rig: Rig) -> None:
    rig.configure("default_queue: All\nqueues:\n  All:\n    members: ['12']\n")
    rig.sandbox.deactivate_agent(int(ANA))
    rig.run_chore("agents")
    refs = wait(rig, 2)
    assert rig.skips(refs[0]) == {ANA: "deactivated"}
    rig.sandbox.activate_agent(int(ANA))
    rig.run_chore("agents")
    assert served(rig, refs) == [ANA, ANA]
