"""From the words of a configuration to owners in the CRM: rules, targets, policies, members, versions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from connector import configuration
from connector.database import unit
from routing import store
from tests.rig import ABC, ANA, BEN, CY, DEE, ELI, Rig, until

AB_AND_CD = """
default_queue: Rest
queues:
  Zip: {members: ['12', '13']}
  Rest: {members: ['14', '15']}
"""


def same(rig: Rig, refs: list[str], owners: list[str | None]) -> None:
    """These owners, in the CRM and in what Turnlock holds true; all ledgers follow."""
    rig.settle_owners()
    assert rig.owners(refs) == owners
    for ref, owner in zip(refs, owners, strict=True):
        active = [agent for agent, state in rig.assignments(ref) if state == "active"]
        assert active == ([owner] if owner else []), ref
    rig.audit()


def held(rig: Rig, ref: str) -> str | None:
    """The reason for which a lead waits; None when it does not."""
    standing = rig.standing(ref)
    return standing["reason"] if standing["state"] == "held" else None


# -- which rule wins ---------------------------------------------------------------------------------------


def test_the_first_rule_in_the_given_order_wins(rig: Rig) -> None:
    rig.configure(
        AB_AND_CD
        + """
rules:
- name: dear zillow
  when: {all: [{field: source, equals: zillow}, {field: price, at_least: 900000}]}
  to: {agent: '16'}
- {name: zillow, when: {field: source, equals: Zillow}, to: {queue: Zip}}
"""
    )
    leads = [("Zillow", 1_000_000), ("Zillow", 300_000), ("Open House", 1_000_000)]
    refs = [rig.burst(1, source=source, price=price)[0] for source, price in leads]
    same(rig, refs, [ELI, ANA, CY])
    assert [rig.decision(ref).rule for ref in refs] == ["dear zillow", "zillow", None]
    assert (rig.position("Zip"), rig.position("Rest")) == (1, 1)


def test_a_general_rule_that_stands_first_takes_everything(rig: Rig) -> None:
    applied = rig.configure(
        AB_AND_CD
        + """
rules:
- {name: zillow, when: {field: source, equals: Zillow}, to: {queue: Zip}}
- name: dear zillow
  when: {all: [{field: source, equals: Zillow}, {field: price, at_least: 900000}]}
  to: {agent: '16'}
"""
    )
    assert any("dear zillow" in text for text in applied.warnings)
    refs = rig.burst(2, source="Zillow", price=1_000_000)
    same(rig, refs, [ANA, BEN])


def test_two_rules_that_feed_one_queue_share_its_line(rig: Rig) -> None:
    rig.configure(
        ABC
        + """
rules:
- {name: buyers, when: {field: type, equals: buyer}, to: {queue: All}}
- {name: sellers, when: {field: type, equals: seller}, to: {queue: All}}
"""
    )
    refs = [rig.burst(1, type=kind)[0] for kind in ("Buyer", "Seller", "Buyer", "Seller")]
    same(rig, refs, [ANA, BEN, CY, ANA])
    assert [rig.decision(ref).rule for ref in refs] == ["buyers", "sellers", "buyers", "sellers"]
    assert rig.turns() == [ANA, BEN, CY, ANA]


def test_one_delivery_is_dealt_to_the_queues_of_its_leads(rig: Rig) -> None:
    rig.configure(AB_AND_CD + "rules:\n- {name: zip, when: {field: zip, starts_with: '787'}, to: {queue: Zip}}\n")
    zips = ["78701", "78613", "78704", "78628", "78745", "78664"]
    refs = [str(number) for number in rig.sandbox.create_leads(each=[{"zip": code} for code in zips])]
    until(lambda: all(rig.owners(refs)), what="all owners")
    same(rig, refs, [ANA, CY, BEN, DEE, ANA, CY])


# -- targets -----------------------------------------------------------------------------------------------


def test_a_named_agent_gets_the_lead_and_no_line_moves(rig: Rig) -> None:
    rig.configure(ABC + "rules:\n- {name: vip, when: {field: tags, contains: VIP}, to: {agent: '15'}}\n")
    refs = rig.burst(1, tags=["vip"]) + rig.burst(1, tags=[])
    same(rig, refs, [DEE, ANA])
    assert rig.position() == 1


def test_a_paused_named_agent_passes_the_lead_down_the_chain(rig: Rig) -> None:
    rig.configure(ABC + "rules:\n- {name: vip, to: {agent: '15'}, else: [{agent: '16'}, {queue: All}]}\n")
    rig.pause(DEE)
    refs = rig.burst(1)
    rig.pause(ELI)
    refs += rig.burst(2)
    rig.pause(DEE, False)
    refs += rig.burst(1)
    same(rig, refs, [ELI, ANA, BEN, DEE])


def test_a_paused_named_agent_without_a_chain_is_waited_for(rig: Rig) -> None:
    rig.configure(ABC + "rules:\n- {name: vip, when: {field: tags, contains: vip}, to: {agent: '15'}}\n")
    rig.pause(DEE)
    ref = rig.create(tags=["vip"])
    rig.settle_owners()
    assert held(rig, ref) == "target_away"
    assert "leads_held" in rig.alarms()
    same(rig, rig.burst(1, tags=[]), [ANA])  # nobody else waits for this
    rig.pause(DEE, False)
    assert rig.wait_owner(ref) == DEE
    same(rig, [ref], [DEE])
    assert rig.position() == 1


def test_a_lead_of_a_known_person_goes_to_their_agent_unless_they_left(rig: Rig) -> None:
    person = {"emails": ["same.person@example.com"]}
    (first,) = rig.burst(1, **person)
    rig.settle_owners()
    (second,) = rig.burst(1, **person)
    same(rig, [first, second], [ANA, ANA])
    assert rig.decision(second).record["how"] == "existing_owner"
    rig.sandbox.deactivate_agent(int(ANA))
    rig.sync()
    (third,) = rig.burst(1, **person)
    same(rig, [third], [BEN])
    assert {"existing_owner": str(rig.agent_id(ANA)), "why": "deactivated"} in rig.decision(third).record["paths"]
    assert rig.turns() == [ANA, BEN]


def test_the_latest_agent_of_a_person_counts_and_an_earlier_one_when_that_one_left(rig: Rig) -> None:
    for n in range(4):
        by_mail, by_phone = f"person{n}@example.com", f"(512) 555-011{n}"
        rig.create(emails=[by_mail], phones=[], owner=int(DEE))
        rig.settle_owners()
        rig.create(emails=[], phones=[by_phone], owner=int(ELI))
        rig.settle_owners()
        same(rig, rig.burst(1, emails=[by_mail], phones=[by_phone]), [ELI])
    rig.sandbox.deactivate_agent(int(ELI))
    rig.sync()
    same(rig, rig.burst(1, emails=["person0@example.com"], phones=["512 555 0110"]), [DEE])
    assert rig.position() == 0


def test_the_owner_whom_a_human_chose_is_the_person_s_agent(rig: Rig) -> None:
    first = rig.create(emails=["same.person@example.com"], owner=int(ELI))
    rig.settle_owners()
    assert rig.standing(first)["state"] == "owned"
    (second,) = rig.burst(1, emails=["same.person@example.com"])
    same(rig, [second], [ELI])
    assert rig.position() == 0


def test_existing_owner_as_a_target_falls_to_the_next_rule_when_nobody_is_known(rig: Rig) -> None:
    rig.configure(ABC + "rules:\n- {name: known, to: existing_owner}\n- {name: rest, to: {queue: All}}\n")
    refs = rig.burst(1, emails=["same.person@example.com"], phones=["(512) 555-0123"])
    rig.settle_owners()
    refs += rig.burst(1, emails=[], phones=["512-555-0123"]) + rig.burst(1)
    same(rig, refs, [ANA, ANA, BEN])
    assert rig.decision(refs[0]).rule == "rest"


def test_existing_owner_with_a_fallback_uses_it(rig: Rig) -> None:
    rig.configure(ABC + "rules:\n- {name: known, to: existing_owner, else: [{agent: '16'}]}\n")
    refs = rig.burst(2)
    same(rig, refs, [ELI, ELI])
    assert rig.position() == 0


def test_an_identity_that_many_leads_share_says_nothing_and_is_an_alarm(rig: Rig) -> None:
    office = {"phones": ["(512) 555-0100"]}
    refs = []
    for _ in range(5):
        refs += rig.burst(1, **office)
        rig.settle_owners()
    same(rig, refs, [ANA] * 5)
    assert "shared_identity" not in rig.alarms()
    refs = rig.burst(2, **office)
    same(rig, refs, [BEN, CY])
    assert "shared_identity" in rig.alarms()


def test_a_lead_left_alone_is_routed_once_its_rule_fields_change(rig: Rig) -> None:
    rig.configure(ABC + "rules:\n- {name: hands off, when: {field: source, equals: Referral}, to: leave_alone}\n")
    ref = rig.create(source="Referral")
    rig.settle_owners()
    assert (rig.standing(ref)["state"], rig.standing(ref)["reason"]) == ("left", "left_by_rule")
    assert "leads_held" not in rig.alarms()
    rig.sandbox.edit_leads([int(ref)], name="Another Name")  # rules do not look at names
    rig.settle_owners()
    assert rig.decision(ref).outcome == "left"
    rig.sandbox.edit_leads([int(ref)], source="Website")
    assert rig.wait_owner(ref) == ANA
    same(rig, [ref], [ANA])
    assert rig.position() == 1


def test_a_rule_that_leaves_leads_alone_holds_for_known_people_too(rig: Rig) -> None:
    rig.configure(ABC + "rules:\n- {name: hands off, when: {field: source, equals: Referral}, to: leave_alone}\n")
    person = {"emails": ["same.person@example.com"]}
    refs = rig.burst(1, source="Website", **person)
    rig.settle_owners()
    refs.append(rig.create(source="Referral", **person))
    same(rig, refs, [ANA, None])
    assert rig.standing(refs[1])["reason"] == "left_by_rule"


# -- nobody, or no rule ------------------------------------------------------------------------------------


def test_a_lead_without_a_rule_waits_until_a_configuration_has_one(rig: Rig) -> None:
    rig.configure(
        "queues:\n  All: {members: ['12', '13', '14']}\n"
        "rules:\n- {name: zillow, when: {field: source, equals: Zillow}, to: {queue: All}}\n"
    )
    ref = rig.create(source="Referral")
    rig.settle_owners()
    assert held(rig, ref) == "no_rule"
    assert "leads_held" in rig.alarms()
    rig.configure(ABC)
    assert rig.wait_owner(ref) == ANA
    same(rig, [ref], [ANA])
    assert [d.config_version for d in rig.decided(ref)] == [2, 3]


def test_a_lead_that_waits_for_one_queue_follows_its_rule_to_another(rig: Rig) -> None:
    rig.configure("default_queue: Away\nqueues:\n  Away: {members: ['12']}\n  Here: {members: ['13']}\n")
    rig.pause(ANA)
    refs = [rig.create(), rig.create()]
    rig.settle_owners()
    assert [rig.standing(ref)["state"] for ref in refs] == ["held", "held"]
    rig.configure("default_queue: Here\nqueues:\n  Away: {members: ['12']}\n  Here: {members: ['13']}\n")
    for ref in refs:
        rig.wait_owner(ref)
    same(rig, refs, [BEN, BEN])


def test_a_lead_that_waits_for_a_queue_that_is_removed_is_not_forgotten(rig: Rig) -> None:
    rig.configure("default_queue: Old\nqueues:\n  Old: {members: ['12']}\n")
    rig.pause(ANA)
    ref = rig.create()
    rig.settle_owners()
    assert held(rig, ref) == "nobody_available"
    rig.configure("default_queue: New\nqueues:\n  New: {members: ['13']}\n")
    assert rig.wait_owner(ref) == BEN
    same(rig, [ref], [BEN])


def test_a_queue_may_pass_its_leads_to_another(rig: Rig) -> None:
    rig.configure(
        "default_queue: First\nqueues:\n  First: {members: ['12'], when_nobody: {fallback_queue: Second}}\n"
        "  Second: {members: ['13', '14']}\n"
    )
    rig.pause(ANA)
    refs = rig.burst(3)
    same(rig, refs, [BEN, CY, BEN])
    assert (rig.position("First"), rig.position("Second")) == (0, 3)
    rig.pause(ANA, False)
    same(rig, rig.burst(1), [ANA])


def test_a_queue_may_have_an_agent_for_when_nobody_is_there(rig: Rig) -> None:
    rig.configure(
        "default_queue: All\nqueues:\n  All: {members: ['12'], when_nobody: {default_agent: ben.brown@example.com}}\n"
    )
    rig.pause(ANA)
    refs = rig.burst(2)
    same(rig, refs, [BEN, BEN])
    assert rig.position() == 0
    rig.pause(BEN)
    ref = rig.create()
    rig.settle_owners()
    assert held(rig, ref) == "nobody_available"


def test_a_queue_may_leave_leads_unassigned(rig: Rig) -> None:
    rig.configure("default_queue: All\nqueues:\n  All: {members: ['12'], when_nobody: leave_unassigned}\n")
    rig.pause(ANA)
    ref = rig.create()
    rig.settle_owners()
    assert (rig.standing(ref)["state"], rig.standing(ref)["reason"]) == ("left", "left_by_queue")
    assert "leads_held" not in rig.alarms()
    rig.pause(ANA, False)
    same(rig, rig.burst(1), [ANA])
    same(rig, [ref], [None])


def test_a_chain_of_rules_ends_in_the_policy_of_its_own_queue(rig: Rig) -> None:
    rig.configure(
        "default_queue: Rest\nqueues:\n  Luxury: {members: ['12'], when_nobody: {default_agent: '16'}}\n"
        "  Rest: {members: ['13']}\nrules:\n- {name: all, to: {queue: Luxury}, else: [{agent: '15'}]}\n"
    )
    rig.pause(ANA)
    refs = rig.burst(1)
    rig.pause(DEE)
    refs += rig.burst(1)
    same(rig, refs, [DEE, ELI])


# -- versions, members -------------------------------------------------------------------------------------


def test_only_a_change_of_meaning_makes_a_version(rig: Rig) -> None:
    first = rig.configure(ABC)
    assert (first.version, first.changed) == (1, False)
    again = rig.configure(
        "# a comment\ndefault_queue: 'All'\nqueues: {All: {members: [ana.alvarez@example.com, '13', '14']}}"
    )
    assert (again.version, again.changed) == (1, False)
    other = rig.configure(ABC + "released: leave\n")
    assert (other.version, other.changed) == (2, True)


def test_decisions_carry_the_version_that_they_were_taken_by(rig: Rig) -> None:
    refs = rig.burst(1)
    rig.configure(ABC + "rules:\n- {name: all, to: {queue: All}}\n")
    refs += rig.burst(1)
    same(rig, refs, [ANA, BEN])
    assert [(rig.decision(ref).config_version, rig.decision(ref).rule) for ref in refs] == [(1, None), (2, "all")]


def test_a_configuration_that_changes_while_leads_come_in_loses_none(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic", batch=1)
    stop = threading.Event()
    versions: list[int] = []

    def change() -> None:
        while not stop.is_set():
            name = f"rule {len(versions)}"
            versions.append(rig.configure(f"{ABC}rules:\n- {{name: {name}, to: {{queue: All}}}}\n").version)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        refs = rig.burst(40)
        while len(versions) <= 5:
            refs += rig.burst(10)
    finally:
        stop.set()
        changing.join(30)
    rig.settle_owners()
    decisions = [rig.decision(ref) for ref in refs]
    assert len({d.config_version for d in decisions}) > 1
    # Each by the very rules of the version that it names: none mixes two.
    assert all(d.rule == (f"rule {d.config_version - 2}" if d.config_version > 1 else None) for d in decisions)
    assert rig.position() == len(rig.turns()) == len(refs)
    counts = Counter(rig.owners(refs)).values()
    assert max(counts) - min(counts) <= 1
    rig.audit()


def test_a_lead_that_waited_for_its_queue_is_decided_by_the_configuration_that_came_first(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "unit", partial(unit, lock_timeout="15s"))
    queue_id = rig.one("SELECT queue_id FROM queues WHERE tenant_id = :t")
    blocked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    new = ABC + "rules:\n- {name: new, to: {queue: All}}\n"
    applying = threading.Thread(target=rig.configure, args=(new,))
    with unit(rig.runtime.engine) as (conn, _):
        store.lock_queues(conn, rig.tenant.tenant_id, [queue_id])
        applying.start()
        until(lambda: rig.one(blocked) == 1, what="a configuration that waits for the queue")
        ref = rig.create()
        until(lambda: rig.one(blocked) == 2, what="a lead that waits behind it")
    applying.join(20)
    assert rig.wait_owner(ref) == ANA
    assert (rig.decision(ref).config_version, rig.decision(ref).rule) == (2, "new")


def test_members_who_come_and_go_leave_the_line_of_the_others_as_it_was(rig: Rig) -> None:
    def members(*refs: str) -> None:
        rig.configure(f"default_queue: All\nqueues:\n  All:\n    members: {list(refs)}\n")

    members(ANA, BEN, CY, DEE)
    refs = rig.burst(2)
    members(BEN, CY, DEE)
    refs += rig.burst(4)
    assert rig.owners(refs) == [ANA, BEN, CY, DEE, BEN, CY]
    members(DEE, BEN, CY, ELI)  # another order in the file costs nobody their place
    more = rig.burst(4)
    same(rig, more, [DEE, BEN, CY, ELI])


def test_a_queue_that_was_away_comes_back_with_its_count(rig: Rig) -> None:
    refs = rig.burst(2)
    rig.settle_owners()
    rig.configure("default_queue: Other\nqueues:\n  Other: {members: ['15']}\n")
    refs += rig.burst(1)
    rig.settle_owners()
    rig.configure(ABC)
    refs += rig.burst(3)
    same(rig, refs, [ANA, BEN, DEE, ANA, BEN, CY])
    assert (rig.position("All"), rig.position("Other")) == (5, 1)


def test_weights_are_dealt_smoothly_and_change_without_a_reset(rig: Rig) -> None:
    def weights(**given: int) -> None:
        people = {"ana": ANA, "ben": BEN, "cy": CY}
        rows = [f"{{agent: '{people[name]}', weight: {weight}}}" for name, weight in given.items()]
        rig.configure(f"default_queue: All\nqueues:\n  All:\n    members: [{', '.join(rows)}]\n")

    weights(ana=5, ben=1, cy=1)
    refs = rig.burst(7)
    assert rig.owners(refs) == [ANA, BEN, ANA, ANA, CY, ANA, ANA]
    weights(ana=1, ben=1, cy=1)
    even = rig.burst(6)
    assert Counter(rig.owners(even)) == {ANA: 2, BEN: 2, CY: 2}
    weights(ana=0, ben=2, cy=1)
    refs = rig.burst(6)
    assert Counter(rig.owners(refs)) == {BEN: 4, CY: 2}
    assert rig.skips(refs[0]) == {ANA: "weight_zero"}
    rig.settle_owners()
    assert rig.position() == 19
    rig.audit()


def test_a_queue_of_members_without_weight_holds(rig: Rig) -> None:
    rig.configure("default_queue: All\nqueues:\n  All: {members: [{agent: '12', weight: 0}]}\n")
    ref = rig.create()
    rig.settle_owners()
    assert held(rig, ref) == "nobody_available"
    assert rig.skips(ref) == {ANA: "weight_zero"}


@pytest.mark.parametrize("policy", ["hold", "leave_unassigned"])
def test_a_lead_that_has_an_owner_is_never_touched(rig: Rig, policy: str) -> None:
    rig.configure(f"default_queue: All\nqueues:\n  All: {{members: ['12'], when_nobody: {policy}}}\n")
    ref = rig.create(owner=int(ELI))
    rig.settle_owners()
    assert rig.standing(ref)["state"] == "owned"
    assert rig.owner_writes() == []
    same(rig, rig.burst(1), [ANA])
    assert rig.owner(ref) == ELI
