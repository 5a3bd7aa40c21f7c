"""The generic CRM end to end: signed both ways, written on condition, collaborators beside the owner."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connector.config import ConfigProblems
from connector.sandbox import generic
from tests.rig import ABC, ANA, BEN, CY, DEE, ELI, Rig, until

HELPERS = """
default_queue: All
queues:
  All: {members: ['12', '13', '14']}
  Helpers: {members: ['12', '15', '16']}
rules:
- {name: a second pair of hands, role: collaborator, to: {queue: Helpers}}
"""


@pytest.fixture
def live(make_rig: Callable[..., Rig]) -> Rig:
    """The generic CRM with queue "All" of Ana, Ben, Cy; everything runs."""
    return make_rig("generic")


def collaborators(rig: Rig, ref: str) -> list[str]:
    """Who works on the lead beside its owner, as the CRM has it."""
    lead = rig.sandbox.lead(int(ref))
    assert lead is not None
    return [str(agent) for agent in lead["collaborators"]]


def unchanged(rig: Rig) -> None:
    """Nothing waits, and every ledger follows."""
    rig.settle()
    rig.audit()
    assert rig.sandbox.errors() == []


# -- the way in --------------------------------------------------------------------------------------------


def test_a_signed_delivery_is_routed_and_noted(live: Rig) -> None:
    refs = live.burst(4)
    live.settle()
    assert live.owners(refs) == [ANA, BEN, CY, ANA] == live.turns()
    notes = [live.sandbox.lead(int(ref))["notes"] for ref in refs]  # type: ignore[index]
    assert [len(found) for found in notes] == [1, 1, 1, 1]
    assert "turn 4" in notes[3][0]["body"]
    unchanged(live)


def test_a_delivery_with_another_secret_or_none_is_refused_and_leaves_no_trace(live: Rig) -> None:
    body = live.delivery("40001")
    stranger = "whsec_c3RyYW5nZXItc2VjcmV0LTAxMjM0NTY3ODk="
    assert live.post(body, generic.signed_headers(stranger, "evt_1", body)).status == 401
    assert live.post(body, {"Content-Type": "application/json"}).status == 401
    assert live.events() == []
    assert live.position() == 0


def test_a_delivery_whose_lead_meanwhile_has_an_owner_costs_no_turn(live: Rig) -> None:
    live.sandbox.pause_dispatch()
    ref = live.create()
    live.sandbox.set_owner(int(ref), int(ELI))
    live.sandbox.resume_dispatch()
    live.settle()
    assert live.owner(ref) == ELI
    assert live.owner_writes() == []
    assert live.standing(ref)["state"] == "owned"
    assert [live.assign() for _ in range(3)] == [ANA, BEN, CY]
    unchanged(live)


# -- the conditional write ---------------------------------------------------------------------------------


def test_a_human_who_is_quicker_than_our_write_wins(live: Rig) -> None:
    """The human comes between our reading and our write: only the CRM's condition can tell."""
    live.sandbox.fault("hold", method="PUT", path="/owner$", apply=False, times=1)
    ref = live.create()
    assert live.sandbox.wait_held()
    live.sandbox.set_owner(int(ref), int(ELI))
    live.sandbox.release()
    until(lambda: live.standing(ref)["state"] == "owned", what="the notice of it")
    live.settle()
    assert live.owner(ref) == ELI
    assert live.owner_writes() == []
    assert live.assignments(ref) == [(ANA, "superseded")]
    assert live.sandbox.lead(int(ref))["notes"] == []  # type: ignore[index]
    refused = [row for row in live.sandbox.call_log() if row["status"] == 409]
    assert len(refused) == 1
    unchanged(live)


def test_a_write_that_was_only_refused_gives_the_turn_back(live: Rig) -> None:
    live.first_round()
    live.sandbox.fault("hold", method="GET", path="/leads$", apply=True, times=1)
    ref = live.create()
    assert live.sandbox.wait_held()  # the reading before the write
    live.sandbox.set_owner(int(ref), int(ELI))
    live.sandbox.release()
    until(lambda: live.standing(ref)["state"] == "owned", what="the notice of it")
    live.settle()
    assert live.owner(ref) == ELI
    assert live.owner_writes() == []
    assert live.void_turns() == {1: "superseded"}
    assert [live.assign() for _ in range(4)] == [ANA, BEN, CY, ANA]  # Ana has the turn that she is owed, then the line
    unchanged(live)


def test_an_owner_who_was_cleared_in_between_is_written_again(live: Rig) -> None:
    ref = live.create()
    assert live.wait_owner(ref) == ANA
    live.settle()
    live.sandbox.clear_owner(int(ref))
    assert live.wait_owner(ref) == BEN
    live.settle()
    assert live.assignments(ref) == [(ANA, "released"), (BEN, "active")]
    unchanged(live)


# -- collaborators -----------------------------------------------------------------------------------------


def test_a_collaborator_is_added_after_the_owner_is_there(live: Rig) -> None:
    live.configure(HELPERS)
    live.sandbox.fault("hold", method="PUT", path="/owner$", apply=False, times=1)
    ref = live.create(owner=None)
    assert live.sandbox.wait_held()
    assert collaborators(live, ref) == []
    assert live.turns("Helpers") == []
    live.sandbox.release()
    until(lambda: collaborators(live, ref), what="a collaborator")
    live.settle()
    assert live.owner(ref) == ANA
    assert collaborators(live, ref) == [DEE]
    assert [(d.role, d.agent, d.rule) for d in live.decided(ref)] == [
        ("owner", ANA, None),
        ("collaborator", DEE, "a second pair of hands"),
    ]
    assert sorted(live.assignments(ref)) == [(ANA, "active"), (DEE, "active")]
    unchanged(live)


def test_helpers_whom_we_may_not_add_hold_up_no_owner(live: Rig) -> None:
    live.configure(HELPERS)
    live.sandbox.fault("status", method="POST", path="/collaborators$", status=403)
    refs = live.burst(3)
    parked = "SELECT count(*) FROM outbox WHERE tenant_id = :t AND kind = 'collaborator' AND state = 'parked'"
    until(lambda: live.one(parked) == 3, what="writes that wait for a human")
    assert live.alarms() == {"collaborator_not_written"}
    assert [*live.owners(refs), live.assign()] == [ANA, BEN, CY, ANA]
    assert live.one("SELECT count(*) FROM breakers WHERE tenant_id = :t") == 0
    live.audit()


def test_the_owner_is_passed_over_among_the_helpers_and_keeps_their_turn_there(live: Rig) -> None:
    live.configure(HELPERS)
    refs = []
    for _ in range(3):
        refs.append(live.create())
        until(lambda: collaborators(live, refs[-1]), what="a collaborator")
    live.settle()
    assert live.owners(refs) == [ANA, BEN, CY]
    # Ana owns the first lead, so Dee helps there; at the next lead Ana is still first in that line.
    assert [collaborators(live, ref) for ref in refs] == [[DEE], [ANA], [ELI]]
    assert live.skips(refs[0]) == {ANA: "already_on_lead"}
    assert live.skips(refs[1]) == {}
    assert live.turns("Helpers") == [DEE, ANA, ELI]
    unchanged(live)


def test_the_echo_of_a_collaborator_adds_no_other(live: Rig) -> None:
    live.configure(HELPERS)
    ref = live.create()
    until(lambda: collaborators(live, ref), what="a collaborator")
    live.settle()
    live.sandbox.edit_leads([int(ref)], source="Elsewhere")
    for kind in ("sweep", "held"):
        live.run_chore(kind)
    live.settle()
    assert collaborators(live, ref) == [DEE]
    assert len(live.decided(ref)) == 2
    assert (live.position("All"), live.position("Helpers")) == (1, 1)
    unchanged(live)


def test_a_collaborator_who_is_the_owner_already_is_simply_not_added(live: Rig) -> None:
    live.configure(ABC + "rules:\n- {name: ana helps, role: collaborator, to: {agent: '12'}}\n")
    refs = live.burst(2)
    until(lambda: collaborators(live, refs[1]), what="a collaborator")
    live.settle()
    assert live.owners(refs) == [ANA, BEN]
    assert [collaborators(live, ref) for ref in refs] == [[], [ANA]]
    assert "leads_held" not in live.alarms()
    assert [live.assign() for _ in range(2)] == [CY, ANA]
    unchanged(live)


def test_helpers_who_are_away_hold_nobody_up_and_help_when_they_are_back(live: Rig) -> None:
    live.configure(HELPERS.replace("['12', '15', '16']", "['15']"))
    live.pause(DEE)
    refs = live.burst(2)
    live.settle()
    assert live.owners(refs) == [ANA, BEN]
    assert [collaborators(live, ref) for ref in refs] == [[], []]
    live.pause(DEE, False)
    until(lambda: all(collaborators(live, ref) for ref in refs), what="the collaborators")
    live.settle()
    assert [collaborators(live, ref) for ref in refs] == [[DEE], [DEE]]
    live.run_chore("held")
    assert "leads_held" not in live.alarms()
    unchanged(live)


def test_a_queue_that_serves_both_roles_gives_owners_although_a_collaborator_waits(live: Rig) -> None:
    live.configure(
        "default_queue: All\nqueues:\n  All: {members: ['12', '13']}\n"
        "rules:\n- {name: two, role: collaborator, to: {queue: All}}\n"
    )
    live.pause(BEN)
    refs = live.burst(2)
    live.settle()
    assert live.one("SELECT count(*) FROM lead_roles WHERE tenant_id = :t AND state = 'held'") == 2
    refs += live.burst(1)
    live.settle()
    assert live.owners(refs) == [ANA, ANA, ANA]
    assert live.decisions(refs[2]) == [("new", "assigned", ANA)]  # it never waited
    live.pause(BEN, False)
    until(lambda: all(collaborators(live, ref) for ref in refs), what="the collaborators")
    assert [collaborators(live, ref) for ref in refs] == [[BEN], [BEN], [BEN]]
    unchanged(live)


def test_collaborator_rules_are_refused_where_the_crm_has_none(rig: Rig) -> None:
    with pytest.raises(ConfigProblems) as refused:
        rig.configure(HELPERS)
    (problem,) = refused.value.problems
    assert "this CRM has no collaborators" in str(problem)
    assert rig.configure(ABC).version == 1
    assert rig.assign() == ANA


# -- agents ------------------------------------------------------------------------------------------------


def test_the_crms_pause_and_the_admins_are_kept_apart(live: Rig) -> None:
    live.pause(ANA)
    live.sandbox.pause_agent(int(BEN))
    live.sync()
    refs = live.burst(1)
    assert live.owners(refs) == [CY]
    assert live.skips(refs[0]) == {ANA: "paused", BEN: "paused"}
    live.sync()  # the CRM knows nothing of the admin's pause and does not end it
    assert live.assign() == CY
    live.sandbox.pause_agent(int(ANA))
    live.sync()
    live.pause(ANA, False)  # the admin ends the own pause, not the CRM's
    assert live.assign() == CY
    live.sandbox.resume_agent(int(ANA))
    live.sandbox.resume_agent(int(BEN))
    live.sync()
    assert [live.assign() for _ in range(3)] == [ANA, BEN, CY]
    unchanged(live)


def test_a_deactivated_owner_whom_the_crm_takes_without_keeping_is_refused(live: Rig) -> None:
    """The CRM answers 200 and leaves the owner empty: the lead goes on, the agent waits for a later reading."""
    live.wait_chores()
    live.sandbox.deactivate_agent(int(ANA))
    ref = live.create()
    assert live.wait_owner(ref) == BEN
    live.settle()
    assert live.assignments(ref) == [(ANA, "refused"), (BEN, "active")]
    assert live.void_turns() == {1: "refused"}
    live.sandbox.activate_agent(int(ANA))
    live.sync()
    assert [live.assign() for _ in range(2)] == [ANA, CY]  # the turn that was given back comes first
    unchanged(live)
