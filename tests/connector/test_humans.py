"""Humans and other automations in the CRM: their choice wins, and nobody is fought."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from connector.tenants import set_sending
from tests.rig import ABC, ANA, BEN, CY, DEE, Rig, until

OLIVE = "11"  # owns the account: the house user of these tests
POND = 7


@contextmanager
def between_decision_and_write(rig: Rig) -> Iterator[str]:
    """A lead that is decided, and whose write has not gone out yet."""
    set_sending(rig.runtime, rig.tenant, False)
    ref = rig.create()
    until(lambda: rig.standing(ref)["state"] == "assigned", what="a decision")
    yield ref
    set_sending(rig.runtime, rig.tenant, True)
    rig.settle()


def assignment_states(rig: Rig, ref: str) -> list[str]:
    """What became of each assignment of the lead, in order."""
    query = "SELECT array_agg(state ORDER BY epoch) FROM assignments WHERE tenant_id = :t AND lead_id = :lead"
    return list(rig.one(query, lead=rig.lead_id(ref)))


def by_the_api(rig: Rig) -> list[tuple[str | None, str | None]]:
    """Every change of an owner that went through the API: (old, new)."""
    return [(row["old"], row["new"]) for row in rig.sandbox.owner_log() if row["by"] == "api"]


def quiet_for(rig: Rig, seconds: float) -> None:
    """Nothing is decided, called or written meanwhile."""

    def everything() -> tuple[int, int, int]:
        decided = rig.one("SELECT count(*) FROM decisions WHERE tenant_id = :t")
        writes = [call for call in rig.sandbox.call_log() if call["method"] != "GET"]
        return decided, len(writes), len(rig.turns())

    before = everything()
    time.sleep(seconds)  # that nothing happens can only be seen by looking on
    assert everything() == before


# -- before our write ---------------------------------------------------------------------------------------------


def test_a_human_who_is_faster_than_our_write_wins_and_the_turn_is_given_back(rig: Rig) -> None:
    with between_decision_and_write(rig) as ref:
        rig.sandbox.set_owner(int(ref), int(CY))
    assert rig.owner(ref) == CY
    assert rig.owner_writes() == []
    assert assignment_states(rig, ref) == ["superseded"]
    standing = rig.standing(ref)
    assert (standing["state"], standing["agent_id"]) == ("owned", rig.agent_id(CY))
    assert rig.void_turns() == {1: "superseded"}
    assert [rig.assign() for _ in range(3)] == [ANA, BEN, CY]  # Ana is owed one, the line goes on
    rig.settle()
    assert rig.position() == 4
    rig.audit()


def test_a_human_wins_between_our_reading_and_our_write_where_the_crm_can_tell(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic")
    rig.sandbox.fault("hold", method="PUT", path="/owner$", apply=False, times=1)
    ref = rig.create()
    assert rig.sandbox.wait_held()
    rig.sandbox.set_owner(int(ref), int(CY))
    rig.sandbox.release()
    rig.settle()
    assert rig.owner(ref) == CY
    assert by_the_api(rig) == []
    assert assignment_states(rig, ref) == ["superseded"]
    assert rig.void_turns() == {1: "superseded"}  # our write was refused: Ana never had the lead
    assert rig.assign() == ANA
    rig.audit()


def test_a_human_wins_while_the_lead_is_read_before_the_write(rig: Rig) -> None:
    rig.wait_chores()
    rig.sandbox.fault("hold", method="GET", path="/people$", apply=False, skip=1, times=1)
    ref = rig.create()
    assert rig.sandbox.wait_held()
    rig.sandbox.set_owner(int(ref), int(DEE))
    rig.sandbox.release()
    rig.settle()
    assert rig.owner(ref) == DEE
    assert by_the_api(rig) == []
    assert rig.void_turns() == {1: "superseded"}
    rig.audit()


def test_a_human_who_sets_our_agent_saves_us_the_write(rig: Rig) -> None:
    with between_decision_and_write(rig) as ref:
        rig.sandbox.set_owner(int(ref), int(ANA))
    assert rig.owner_writes() == []
    standing = rig.standing(ref)
    assert standing["state"] == "assigned"
    assert standing["confirmed_version"] is not None
    assert rig.void_turns() == {}
    assert rig.turns() == [ANA]
    assert rig.assign() == BEN
    rig.audit()


def test_a_human_who_takes_the_lead_and_lets_it_go_before_our_write_changes_nothing(rig: Rig) -> None:
    with between_decision_and_write(rig) as ref:
        rig.sandbox.set_owner(int(ref), int(CY))
        rig.sandbox.clear_owner(int(ref))
    assert rig.owner(ref) == ANA
    assert rig.turns() == [ANA]
    assert len(rig.owner_writes()) == 1
    rig.audit()


def test_three_of_an_agents_leads_in_a_row_taken_by_others_open_an_alarm(rig: Rig) -> None:
    for number in range(3):
        assert rig.alarms() == set(), number
        with between_decision_and_write(rig) as ref:
            rig.sandbox.set_owner(int(ref), int(DEE))
    assert rig.alarms() == {"another_router"}
    assert rig.turns() == [ANA, ANA, ANA]  # each time the turn came back to her
    assert rig.void_turns() == {1: "superseded", 2: "superseded", 3: "superseded"}
    assert rig.assign() == ANA
    rig.audit()


# -- after our write ----------------------------------------------------------------------------------------------


def test_a_cleared_owner_is_routed_again_three_times_and_then_a_human_must_look(rig: Rig) -> None:
    ref = rig.create()
    for number, agent in enumerate([ANA, BEN, CY, ANA], 1):
        until(lambda agent=agent: rig.owner(ref) == agent, what=f"agent {agent}")
        rig.settle()
        assert rig.position() == number
        assert rig.alarms() == set()
        rig.sandbox.clear_owner(int(ref))
    rig.settle()
    assert rig.owner(ref) is None
    assert [cause for cause, _, _ in rig.decisions(ref)] == ["new", "released", "released", "released"]
    assert assignment_states(rig, ref) == ["released"] * 4
    standing = rig.standing(ref)
    assert (standing["state"], standing["reason"]) == ("parked", "keeps_coming_back")
    assert rig.alarms() == {"keeps_coming_back"}
    rig.sandbox.edit_leads([int(ref)], price=1)
    rig.settle()
    assert rig.standing(ref)["state"] == "parked"
    assert rig.turns() == [ANA, BEN, CY, ANA]
    assert rig.void_turns() == {}
    rig.audit()


def test_releases_older_than_a_day_are_forgotten(rig: Rig) -> None:
    ref = rig.create()
    for agent in [ANA, BEN, CY, ANA]:
        until(lambda agent=agent: rig.owner(ref) == agent)
        rig.settle()
        rig.sql(
            "UPDATE lead_roles SET releases = (SELECT coalesce(jsonb_agg(to_jsonb((r::timestamptz - interval "
            "'25 hours')::text)), '[]') FROM jsonb_array_elements_text(releases) r) WHERE tenant_id = :t"
        )
        rig.sandbox.clear_owner(int(ref))
    assert rig.wait_owner(ref) == BEN
    rig.settle()
    assert rig.alarms() == set()


def test_a_tenant_that_leaves_released_leads_has_them_left(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=ABC + "released: leave\n")
    ref = rig.create()
    assert rig.wait_owner(ref) == ANA
    rig.settle()
    rig.sandbox.clear_owner(int(ref))
    rig.settle()
    rig.sandbox.edit_leads([int(ref)], tags=["Called"])
    rig.settle()
    assert rig.owner(ref) is None
    assert assignment_states(rig, ref) == ["released"]
    standing = rig.standing(ref)
    assert (standing["state"], standing["reason"]) == ("left", "released")
    assert rig.turns() == [ANA]
    assert rig.alarms() == set()
    rig.audit()


def test_a_human_who_replaces_our_agent_is_recorded_and_not_fought(rig: Rig) -> None:
    ref = rig.create()
    rig.wait_owner(ref)
    rig.settle()
    rig.sandbox.set_owner(int(ref), int(DEE))
    rig.settle()
    quiet_for(rig, 0.5)
    assert rig.owner(ref) == DEE
    assert len(rig.owner_writes()) == 1
    assert assignment_states(rig, ref) == ["overridden"]
    assert rig.standing(ref)["agent_id"] == rig.agent_id(DEE)
    assert rig.void_turns() == {}  # Ana had the lead: her turn is used
    assert rig.assign() == BEN
    rig.audit()


def test_an_automation_that_changes_the_owner_after_our_write_is_not_fought(rig: Rig) -> None:
    rig.sandbox.fault("flip", method="PUT", seconds=2.0, owner=int(CY), times=1)
    ref = rig.create()
    assert rig.wait_owner(ref) == ANA
    until(lambda: rig.owner(ref) == CY, what="the automation")
    rig.settle()
    quiet_for(rig, 0.5)
    assert rig.owner(ref) == CY
    assert len(rig.owner_writes()) == 1
    assert rig.decisions(ref) == [("new", "assigned", ANA)]
    assert assignment_states(rig, ref) == ["overridden"]
    assert rig.turns() == [ANA]
    rig.audit()


def test_a_lead_that_a_human_held_and_lets_go_is_routed(rig: Rig) -> None:
    ref = rig.create(owner=int(DEE))
    rig.settle()
    assert rig.standing(ref)["state"] == "owned"
    rig.sandbox.clear_owner(int(ref))
    assert rig.wait_owner(ref) == ANA
    rig.settle()
    assert rig.decisions(ref) == [("cleared", "assigned", ANA)]
    rig.audit()


# -- echoes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crm", ["followupboss", "generic"])
def test_our_own_echo_is_no_news(make_rig: Callable[..., Rig], crm: str) -> None:
    rig = make_rig(crm)
    rig.sandbox.webhook_faults(echo_first=True)  # the CRM tells of our write before it answers it
    ref = rig.create()
    assert rig.wait_owner(ref) == ANA
    rig.settle()
    quiet_for(rig, 1.0)
    assert len(rig.owner_writes()) == 1
    assert rig.standing(ref)["state"] == "assigned"
    assert rig.decisions(ref) == [("new", "assigned", ANA)]
    echo = "SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'done' AND reason = 'echo'"
    assert rig.one(echo) == 1


@pytest.mark.proof
def test_a_minute_after_an_assignment_is_quiet(rig: Rig) -> None:
    for _ in range(3):
        rig.assign()
    rig.settle()
    quiet_for(rig, 60.0)
    assert len(rig.owner_writes()) == 3


# -- what "nobody has it" means -----------------------------------------------------------------------------------


@pytest.mark.parametrize("crm", ["followupboss", "generic"])
def test_a_lead_that_comes_with_a_real_owner_is_never_touched(make_rig: Callable[..., Rig], crm: str) -> None:
    rig = make_rig(crm)
    refs = [rig.create(owner=int(DEE)), rig.create(owner=int(OLIVE)), rig.create(pond=POND)]
    rig.settle()
    rig.sandbox.edit_leads([int(ref) for ref in refs], price=1)
    rig.settle()
    assert rig.owner_writes() == []
    assert rig.turns() == []
    assert [rig.standing(ref)["state"] for ref in refs] == ["owned"] * 3
    assert rig.assign() == ANA


def test_a_house_users_lead_is_nobodys_and_giving_it_back_to_the_house_releases_it(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(config=ABC + f"unassigned: {{users: ['{OLIVE}']}}\n")
    ref = rig.create(owner=int(OLIVE))
    until(lambda: rig.owner(ref) == ANA, what="Ana")
    rig.settle()
    rig.sandbox.set_owner(int(ref), int(OLIVE))
    until(lambda: rig.owner(ref) == BEN, what="Ben")
    rig.settle()
    assert [cause for cause, _, _ in rig.decisions(ref)] == ["new", "released"]
    other = rig.create(owner=int(DEE))
    rig.settle()
    assert rig.owner(other) == DEE
    rig.audit()


def test_only_a_listed_pond_counts_as_nobody(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=ABC + f"unassigned: {{ponds: ['{POND}']}}\n")
    private = rig.sandbox.add_pond("Private pond")
    kept, routed = rig.create(pond=private), rig.create(pond=POND)
    assert rig.wait_owner(routed) == ANA
    rig.settle()
    assert rig.owner(kept) is None
    assert rig.sandbox.lead(int(kept))["pond"] == private
    assert rig.sandbox.lead(int(routed))["pond"] is None
    assert rig.standing(kept)["state"] == "owned"
    rig.audit()


@pytest.mark.parametrize(("unclaimed", "owner"), [("false", None), ("true", ANA)])
def test_an_open_offer_counts_as_nobodys_only_where_the_tenant_says_so(
    make_rig: Callable[..., Rig], unclaimed: str, owner: str | None
) -> None:
    rig = make_rig(config=ABC + f"unassigned: {{unclaimed: {unclaimed}}}\n")
    ref = rig.create(unclaimed=True)
    rig.settle()
    assert rig.owner(ref) == owner
    assert rig.turns() == ([] if owner is None else [owner])
    assert rig.sandbox.lead(int(ref))["unclaimed"] is (owner is None)
    rig.audit()
