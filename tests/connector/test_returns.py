"""Returned leads: asked by the agent, approved by a manager, on to somebody who has not had it, for one credit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from connector import flags, returns
from connector.errors import NotFound, TurnlockError
from connector.explain import explain
from connector.returns import ReturnReason
from routing import gate
from routing.model import Flag
from tests.connector.cli_rig import command_line
from tests.rig import ABC, ANA, BEN, CY, DEE, Rig, captured_logs, until


@pytest.fixture
def generic(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(crm="generic")


def ask(rig: Rig, ref: str, reason: ReturnReason = ReturnReason.OUT_OF_AREA, **more: Any) -> UUID:
    """The agent who has the lead asks, once the CRM has said yes to them."""
    rig.settle_owners()
    asked = returns.ask(rig.runtime, rig.tenant, rig.lead_id(ref), reason, **({"actor": "the agent"} | more))
    assert asked["state"] == "asked"
    return UUID(asked["return_id"])


def approve(rig: Rig, return_id: UUID, *, void: bool = False) -> dict[str, Any]:
    return returns.approve(rig.runtime, rig.tenant, return_id, void=void, actor="mia", why="seen")


def give_back(rig: Rig, ref: str, *, void: bool = False) -> dict[str, Any]:
    return approve(rig, ask(rig, ref), void=void)


# -- on to somebody else ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("crm", ["followupboss", "bottlecrm"])
def test_a_returned_lead_goes_on_and_its_agent_is_owed_one_turn(make_rig: Callable[..., Rig], crm: str) -> None:
    rig = make_rig(crm=crm)
    agents = [rig.agent_id(ref) for ref in (ANA, BEN, CY)] if crm != "bottlecrm" else []
    first = rig.create()
    had = rig.wait_owner(first)
    told = give_back(rig, first)
    assert (told["state"], told["outcome"], told["turn_given_back"]) == ("approved", "next", 1)
    second = until(lambda: (owner := rig.owner(first)) != had and owner, what="another owner")
    rig.settle_owners()
    assert rig.decisions(first) == [("new", "assigned", had), ("declined", "assigned", second)]
    assert rig.assignments(first) == [(had, "void"), (second, "active")]
    assert rig.skips(first) == {had: "declined"}
    assert rig.void_turns() == {1: "returned"}
    # The turn that they are owed comes before the line, once; then everybody in turn.
    after = [rig.assign() for _ in range(4)]
    assert after[0] == had
    assert rig.turns() == [had, second, *after]
    if agents:
        assert [had, second, *after] == [ANA, BEN, ANA, CY, ANA, BEN]
    assert (
        rig.one("SELECT reason FROM ledger WHERE tenant_id = :t AND kind = 'void'") == "returned as out_of_area: seen"
    )
    assert rig.one("SELECT actor FROM ledger WHERE tenant_id = :t AND kind = 'void'") == "mia"
    rig.audit()


def test_whoever_had_it_never_gets_it_again_and_at_the_end_it_waits(generic: Rig) -> None:
    rig = generic
    ref = rig.create()
    owners = []
    for _ in range(3):
        owners.append(until(lambda: (o := rig.owner(ref)) not in owners and o, what="an owner who has not had it"))
        give_back(rig, ref)
    until(lambda: rig.standing(ref)["state"] == "held", what="a lead that waits")
    rig.settle_owners()
    assert owners == [ANA, BEN, CY]
    assert rig.skips(ref) == dict.fromkeys(owners, "declined")
    assert rig.standing(ref)["reason"] == "nobody_available"
    # News of it, while the CRM still shows Cy, is no reason to think that a human gave it to Cy.
    rig.sandbox.edit_leads([int(ref)], stage="Contacted")
    rig.run_chore("held")
    rig.settle_owners()
    assert rig.standing(ref)["state"] == "held"
    # Those who are owed turns get other leads meanwhile: a lead that only others may take holds nobody up.
    assert sorted(rig.assign() for _ in range(3)) == [ANA, BEN, CY]
    rig.configure(ABC.replace("'14'", "'14', '15'"))
    until(lambda: rig.owner(ref) == DEE, what="the newcomer as owner")
    rig.settle_owners()
    rig.audit()


def test_the_same_person_on_another_lead_does_not_bring_it_back_to_who_returned_it(generic: Rig) -> None:
    kim = {"emails": ["kim@example.com"]}
    assert generic.assign(**kim) == ANA
    ref = generic.create(**kim)
    assert generic.wait_owner(ref) == ANA  # her client already, without a turn
    told = give_back(generic, ref)
    assert told["turn_given_back"] is None
    assert until(lambda: (o := generic.owner(ref)) != ANA and o, what="another owner") == BEN
    assert generic.void_turns() == {}
    generic.settle_owners()
    generic.audit()


def test_a_human_who_gives_it_to_somebody_else_meanwhile_wins(generic: Rig) -> None:
    ref = generic.create()
    assert generic.wait_owner(ref) == ANA
    asked = ask(generic, ref)
    hold = generic.sandbox.fault("hold", method="GET", path="/leads", times=1)
    approve(generic, asked)
    assert generic.sandbox.wait_held()
    generic.sandbox.set_owner(int(ref), int(DEE))
    generic.sandbox.clear_faults(hold)
    generic.sandbox.release()
    until(lambda: generic.standing(ref)["state"] == "owned", what="the notice of Dee")
    generic.settle_owners()
    assert generic.owner(ref) == DEE
    assert generic.assignments(ref)[0] == (ANA, "void")
    assert (ANA, "active") not in generic.assignments(ref)
    generic.audit()


# -- nowhere ---------------------------------------------------------------------------------------------------------


def test_a_void_lead_goes_nowhere_whatever_the_crm_tells_of_it(generic: Rig) -> None:
    rig = generic
    ref = rig.create()
    assert rig.wait_owner(ref) == ANA
    give_back(rig, ref, void=True)
    assert (rig.standing(ref)["state"], rig.standing(ref)["reason"]) == ("left", "returned")
    writes = len(rig.owner_writes())
    rig.sandbox.edit_leads([int(ref)], stage="Trash")
    rig.settle_owners()
    assert (rig.standing(ref)["state"], rig.standing(ref)["reason"]) == ("left", "returned")
    rig.sandbox.clear_owner(int(ref))
    rig.settle_owners()
    rig.run_chore("sweep")
    rig.settle_owners()
    assert (rig.standing(ref)["state"], rig.owner(ref), len(rig.owner_writes())) == ("left", None, writes)
    assert rig.void_turns() == {1: "returned"}
    # A human may have it decided after all: by somebody who has not had it.
    rig.feed("console", ref)
    assert rig.wait_owner(ref) == BEN
    rig.settle_owners()
    assert [rig.assign() for _ in range(3)] == [ANA, CY, ANA]
    rig.audit()


# -- refused, limits, words ------------------------------------------------------------------------------------------


def test_a_refused_return_changes_nothing_and_may_be_asked_again(generic: Rig) -> None:
    ref = generic.create()
    assert generic.wait_owner(ref) == ANA
    asked = ask(generic, ref)
    assert "returns_waiting" in generic.alarms()
    with pytest.raises(TurnlockError, match="is asked for already"):
        ask(generic, ref)
    returns.refuse(generic.runtime, generic.tenant, asked, actor="mia", why="it is in your area")
    assert "returns_waiting" not in generic.alarms()
    assert (generic.owner(ref), generic.void_turns()) == (ANA, {})
    with pytest.raises(TurnlockError, match="was refused already"):
        approve(generic, asked)
    assert ask(generic, ref) != asked


def test_a_day_has_only_so_many_returns_by_the_agents_own_clocks(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic", config=ABC.replace("'12', '13', '14'", "'12'") + "returns: {per_day: 2}\n")
    refs = rig.burst(4)
    for ref in refs[:2]:
        ask(rig, ref)
    with pytest.raises(TurnlockError, match=r"Ana .* as the configuration allows \(2\)"):
        ask(rig, refs[2])
    rig.sql("UPDATE returns SET asked_at = asked_at - interval '25 hours' WHERE tenant_id = :t")
    assert ask(rig, refs[2])


def test_two_who_ask_at_once_are_counted_one_after_the_other(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic", config=ABC.replace("'12', '13', '14'", "'12'") + "returns: {per_day: 1}\n")
    refs = rig.burst(4)
    rig.settle_owners()
    at_once, refused = threading.Barrier(4), []

    def run(ref: str) -> None:
        at_once.wait()
        try:
            returns.ask(rig.runtime, rig.tenant, rig.lead_id(ref), ReturnReason.BOGUS, actor="the agent")
        except TurnlockError:
            refused.append(ref)

    threads = [threading.Thread(target=run, args=(ref,)) for ref in refs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3


def test_what_cannot_be_returned_says_why(generic: Rig) -> None:
    rig = generic
    ref = rig.create()
    assert rig.wait_owner(ref) == ANA
    asked = ask(rig, ref)
    with pytest.raises(TurnlockError, match=r"is Ana .*'s; only they can return it"):
        ask(rig, ref, agent_id=rig.agent_id(BEN))
    rig.sandbox.set_owner(int(ref), int(BEN))
    rig.settle_owners()
    with pytest.raises(TurnlockError, match="is not the agent's any more; `turnlock return refuse`"):
        approve(rig, asked)
    with pytest.raises(TurnlockError, match="there is nothing to return"):
        ask(rig, ref)
    with pytest.raises(NotFound, match="no return"):
        approve(rig, UUID(int=7))
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.CREDITS, "off", "test")
    with pytest.raises(TurnlockError, match="credits are off"):
        approve(rig, asked)
    rig.audit()


def test_the_commands_and_what_they_keep_to_themselves(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic")
    ref = rig.create()
    assert rig.wait_owner(ref) == ANA
    rig.settle_owners()
    secret = "lives next door to my cousin"
    with command_line(rig.runtime.settings) as cli, captured_logs() as logs:
        assert "there are: bogus (" in cli("return", "ask", "acme", ref, "dull", code=2).stderr
        assert "Ana" in cli("return", "ask", "acme", ref, "out of area", "--text", secret, "--by", "ana").stdout
        (listed,) = cli.json("return", "list", "acme")["returns"]
        assert (listed["lead"], listed["reason"], listed["words"], listed["asked_by"]) == (
            ref,
            "out_of_area",
            secret,
            "ana",
        )
        assert "--void (nowhere) or --next" in cli("return", "approve", "acme", ref, code=2).stderr
        assert "turn 1 is given back" in cli("return", "approve", "acme", ref, "--next").stdout
        until(lambda: rig.owner(ref) == BEN, what="another owner")
        rig.settle_owners()
        assert cli.json("return", "list", "acme")["returns"] == []
        assert cli.json("return", "list", "acme", "--all")["returns"][0]["state"] == "approved"
        told = cli("explain", "acme", ref).stdout
        assert "(12), out of area, asked" in told
        assert "approved, the lead goes to somebody else" in told
        assert "had this lead before" in told
        assert secret not in told
        assert secret not in logs.getvalue()
    assert secret not in str(explain(rig.runtime, rig.tenant, rig.lead_id(ref)))
    rig.sql("UPDATE returns SET decided_at = decided_at - interval '40 days' WHERE tenant_id = :t")
    rig.run_chore("retention")
    assert rig.one("SELECT words FROM returns WHERE tenant_id = :t") is None


def test_without_the_gates_word_a_returned_lead_would_stay_with_its_agent(
    generic: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken twin, to show that the tests above can fail: who returned the lead counts as its owner."""
    honest = gate.gate
    monkeypatch.setattr("connector.units.gate", lambda *a, given_back=False, **named: honest(*a, **named))
    ref = generic.create()
    assert generic.wait_owner(ref) == ANA
    give_back(generic, ref)
    until(lambda: generic.standing(ref)["state"] == "owned", what="the wrong conclusion")
    assert generic.owner(ref) == ANA
