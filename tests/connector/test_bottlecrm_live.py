"""BottleCRM end to end: decided on its payload where that is enough, and never deceived by its 200."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from connector import tenants
from routing.model import Role, Rule
from routing.rules import RuleSet
from tests.rig import ABC, ANA, BEN, CY, DEE, ELI, Rig, until

BY_CITY = """
default_queue: All
queues:
  All: {members: ['12', '13']}
  Kyle: {members: ['14']}
rules:
- {name: our office in Kyle, when: {field: city, equals: Kyle}, to: {queue: Kyle}}
"""
BY_SOURCE = BY_CITY.replace("{field: city, equals: Kyle}", "{field: source, equals: Zillow}")


@pytest.fixture
def live(make_rig: Callable[..., Rig]) -> Rig:
    """BottleCRM with queue "All" of Ana, Ben, Cy; everything runs."""
    return make_rig("bottlecrm")


def calls(rig: Rig, ref: str) -> list[str]:
    """Methods of the calls about one lead, in order."""
    rig.settle()
    return [c["method"] for c in rig.sandbox.call_log() if c["path"] == f"/bottlecrm/api/leads/{ref}/"]


def sound(rig: Rig) -> None:
    """Nothing waits, every ledger follows, the CRM's stand-in has no defect."""
    rig.settle()
    rig.audit()
    assert rig.sandbox.errors() == []


def test_leads_get_agents_in_turn(live: Rig) -> None:
    assert [live.assign() for _ in range(4)] == [ANA, BEN, CY, ANA]
    assert live.turns() == [ANA, BEN, CY, ANA]
    sound(live)


def test_install_tells_the_admin_what_no_token_may_do(live: Rig) -> None:
    (todo,) = tenants.install(live.runtime, live.tenant).by_hand
    assert live.hook_url in todo
    assert "lead.created, lead.updated, lead.deleted" in todo


# -- a payload is enough, until a rule looks at what it lacks -------------------------------------------------


def test_what_rules_look_at() -> None:
    def rule(number: int, role: Role, when: dict[str, Any]) -> Rule:
        return Rule(f"rule {number}", number, role, when, ())

    rules = RuleSet(
        [
            rule(
                1, Role.OWNER, {"any": [{"field": "email", "contains": "@"}, {"not": {"field": "city", "equals": "x"}}]}
            ),
            rule(2, Role.OWNER, {"all": [{"any": [{"field": "custom.beds", "at_least": 3}]}]}),
            rule(3, Role.OWNER, {}),
            rule(4, Role.COLLABORATOR, {"field": "tags", "exists": True}),
        ]
    )
    assert rules.attributes(Role.OWNER) == {"emails", "city", "custom"}
    assert rules.attributes(Role.COLLABORATOR) == {"tags"}
    assert RuleSet([]).attributes(Role.OWNER) == frozenset()


@pytest.mark.parametrize("config", [ABC, BY_SOURCE])
def test_a_new_lead_is_decided_on_its_payload(live: Rig, config: str) -> None:
    live.configure(config)
    ref = live.create(source="Zillow")
    assert live.wait_owner(ref) == (CY if config is BY_SOURCE else ANA)
    # Before the write and after it: the decision itself read nothing. The echo is read, as the lead is known then.
    assert calls(live, ref)[:3] == ["GET", "PATCH", "GET"]
    sound(live)


def test_a_rule_on_a_field_that_no_payload_holds_has_the_lead_read_first(live: Rig) -> None:
    live.configure(BY_CITY)
    there, elsewhere = live.create(city="Kyle"), live.create(city="Buda")
    assert (live.wait_owner(there), live.wait_owner(elsewhere)) == (CY, ANA)
    assert live.decision(there).rule == "our office in Kyle"
    assert calls(live, there)[:4] == ["GET", "GET", "PATCH", "GET"]
    sound(live)


# -- 200 that is none ----------------------------------------------------------------------------------------


def test_an_agent_whom_the_crm_drops_is_passed_over_without_a_loop(live: Rig) -> None:
    live.wait_chores()
    live.sandbox.deactivate_agent(int(ANA))  # read as active a moment ago
    ref = live.create()
    assert live.wait_owner(ref) == BEN
    live.settle()
    assert [(d.outcome, d.agent) for d in live.decided(ref)] == [("assigned", ANA), ("assigned", BEN)]
    assert [w["target"] for w in live.owner_writes(ref)] == [int(ANA), int(ANA), int(BEN)]
    assert live.void_turns() == {1: "refused"}
    assert [live.assign() for _ in range(3)] == [CY, BEN, CY]
    sound(live)


def test_an_old_body_that_comes_late_changes_nothing(live: Rig) -> None:
    ref = live.create()
    assert live.wait_owner(ref) == ANA
    live.settle()
    first = live.sandbox.deliveries()[0]
    live.sandbox.set_owner(int(ref), int(ELI))
    live.settle()
    live.sandbox.resend(first["id"])  # same id
    body = next(e.body for e in live.events() if e.kind == "lead_created")
    assert live.post(bytes(body).replace(b'{"id":"', b'{"id":"0', 1)).status == 200  # as news, under an id of its own
    live.settle()
    assert live.owner(ref) == ELI
    assert len(live.decided(ref)) == 1
    assert len(live.owner_writes(ref)) == 1
    sound(live)


# -- several holders, wrong tokens, the sweep ----------------------------------------------------------------


def test_a_colleague_added_by_hand_stays(live: Rig) -> None:
    ref = live.create()
    assert live.wait_owner(ref) == ANA
    live.settle()
    live.sandbox.edit_leads([int(ref)], collaborators=[int(DEE)])
    live.settle()
    lead = live.sandbox.lead(int(ref))
    assert lead is not None
    assert (lead["owner"], lead["collaborators"]) == (int(ANA), [int(DEE)])
    assert len(live.owner_writes(ref)) == 1
    sound(live)


def test_a_house_user_is_replaced_and_a_colleague_beside_them_kept(live: Rig) -> None:
    live.configure(ABC + "unassigned: {users: ['16']}\n")
    ref = live.create(owner=int(ELI), collaborators=[int(BEN)])
    until(lambda: len(live.owner_writes(ref)), what="a write")
    live.settle()
    lead = live.sandbox.lead(int(ref))
    assert lead is not None
    assert {lead["owner"], *lead["collaborators"]} == {int(ANA), int(BEN)}
    sound(live)


def test_a_revoked_token_waits_for_the_admin_and_loses_nothing(live: Rig) -> None:
    good = live.sandbox.account()["api_token"]
    tenants.set_secret(live.runtime, live.tenant, "api_token", "bcrm_pat_revoked", at_once=True)
    ref = live.create()
    until(lambda: "crm_refuses_us" in live.alarms(), what="the alarm")
    alarm = live.one("SELECT subject FROM alarms WHERE tenant_id = :t AND kind = 'crm_refuses_us'")
    assert alarm == "reauthorise"
    tenants.set_secret(live.runtime, live.tenant, "api_token", good, at_once=True)
    live.due_now()
    assert live.wait_owner(ref) == ANA
    sound(live)


def test_the_sweep_finds_what_no_webhook_told(live: Rig) -> None:
    live.wait_chores()
    (hook,) = live.sandbox.hooks()
    live.sandbox.change_hook(hook["id"], active=False)
    refs = [live.create() for _ in range(3)]
    live.run_chore("sweep")
    assert sorted(live.wait_owner(ref) for ref in refs) == [ANA, BEN, CY]
    assert "webhooks_missing" in live.alarms()
    sound(live)
