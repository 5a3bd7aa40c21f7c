"""Every field that a rule may look at, from the configuration's words to the owner in the CRM; and how it is told."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from connector.explain import explain
from tests.rig import ABC, Rig

Fields = dict[str, Any]
IN_TOWN = {"latitude": 30.2672, "longitude": -97.7431}
DOWNTOWN = "[[30.25, -97.76], [30.25, -97.73], [30.28, -97.73], [30.28, -97.76]]"

# A condition as an admin writes it, a lead that it takes, and one that it does not.
ROWS: list[tuple[str, Fields, Fields]] = [
    ("{field: source, equals: Zillow}", {"source": "ZILLOW"}, {"source": "Website"}),
    ("{field: type, one_of: [Seller, Landlord]}", {"type": "seller"}, {"type": "Buyer"}),
    ("{field: price, between: [100000, 500000]}", {"price": 500_000}, {"price": 500_001}),
    ("{field: county, equals: Travis}", {"county": "travis"}, {"county": "Hays"}),
    ("{field: county, exists: true}", {"county": "Hays"}, {}),
    ('{field: zip, between: ["78701", "78799"]}', {"zip": "78799-1234"}, {"zip": "78800"}),
    ("{field: zip, one_of: [01234, 78701]}", {"zip": "01234"}, {"zip": "1234"}),
    ("{field: location, within_radius: {lat: 30.27, lon: -97.74, km: 5}}", IN_TOWN, {"latitude": 30, "longitude": -97}),
    ("{field: location, within_radius: {lat: 30.27, lon: -97.74, miles: 1}}", IN_TOWN, {}),
    (f"{{field: location, in_polygon: {DOWNTOWN}}}", IN_TOWN, {"latitude": 30.29, "longitude": -97.7431}),
    ("{field: tags, contains: Hot Lead}", {"tags": ["new", "hot lead"]}, {"tags": ["hot leads"]}),
    ("{field: language, starts_with: es}", {"language": "es-MX"}, {"language": "en"}),
    ("{field: campaign, contains: spring}", {"campaign": "Spring sale"}, {"campaign": "Autumn"}),
    ("{field: form, equals: Contact us}", {"form": "contact us"}, {"form": "Valuation"}),
    ("{field: custom.beds, at_least: 3}", {"custom": {"beds": "3"}}, {"custom": {"beds": 2}}),
    ("{field: custom.vip, equals: true}", {"custom": {"vip": True}}, {"custom": {"vip": "true"}}),
    ("{not: {field: state, equals: TX}}", {"state": "OK"}, {}),
]


@pytest.fixture
def generic_rig(make_rig: Callable[..., Rig]) -> Rig:
    """A CRM that tells all of these fields."""
    return make_rig("generic")


def rules(*whens: str) -> str:
    lines = [f"- {{name: r{at}, when: {when}, to: {{agent: '15'}}}}\n" for at, when in enumerate(whens)]
    return ABC + "rules:\n" + "".join(lines)


BLANK: Fields = dict.fromkeys(
    ("source", "type", "price", "street", "city", "county", "state", "zip", "country", "form", "campaign", "language")
) | {"tags": [], "custom": {}}


def test_each_field_and_operator_takes_its_lead_and_leaves_the_other(generic_rig: Rig) -> None:
    rig = generic_rig
    rig.configure(rules(*(f"{{all: [{{field: stage, equals: s{at}}}, {row[0]}]}}" for at, row in enumerate(ROWS))))
    fields = [BLANK | some | {"stage": f"s{at}"} for at, row in enumerate(ROWS) for some in row[1:]]
    refs = [str(number) for number in rig.sandbox.create_leads(each=fields)]
    rig.settle_owners()
    won = [rig.decision(ref).rule for ref in refs]
    assert won == [rule for at in range(len(ROWS)) for rule in (f"r{at}", None)]


def test_the_hour_and_day_of_arrival_are_of_the_tenants_zone_and_stay(generic_rig: Rig) -> None:
    """What counts is when the CRM got the lead: a held lead does not become a night's lead by waiting."""
    rig = generic_rig
    night = "{any: [{field: arrival_hour, at_least: 20}, {field: arrival_hour, at_most: 6}]}"
    weekend = "{field: arrival_weekday, one_of: [sat, Sunday]}"
    rig.configure("zone: America/Chicago\n" + rules(night, weekend))
    # 02:00 on a Saturday in Greenwich is 20:00 on Friday in Chicago.
    ref = rig.create(created=datetime(2026, 11, 28, 2, tzinfo=UTC))
    rig.settle_owners()
    assert rig.decision(ref).rule == "r0"
    ref = rig.create(created=datetime(2026, 11, 28, 18, tzinfo=UTC))
    rig.settle_owners()
    assert rig.decision(ref).rule == "r1"
    ref = rig.create(created=datetime(2026, 11, 30, 18, tzinfo=UTC))
    rig.settle_owners()
    assert rig.decision(ref).rule is None


def test_explain_tells_each_rule_after_the_person_is_erased_and_the_rules_are_others(generic_rig: Rig) -> None:
    rig = generic_rig
    rig.configure(
        rules(
            "{field: city, equals: Dallas}",
            "{all: [{field: custom.budget, at_least: 900000}, {field: city, equals: Austin}]}",
            "{field: street, contains: Hidden}",
            "{field: county, equals: Travis}",
            "{}",
        )
    )
    ref = rig.create(**BLANK | {"city": "Austin", "street": "1 Secret Road", "custom": {"budget": 5}})
    rig.settle_owners()

    def told() -> dict[str, Any]:
        (decision,) = explain(rig.runtime, rig.tenant, rig.lead_id(ref))["decisions"]
        assert isinstance(decision, dict)
        return decision

    before = told()
    assert [(r["rule"], r["matched"]) for r in before["rules"]] == [
        ("r0", False),
        ("r1", False),
        ("r2", False),
        ("r3", False),
        ("r4", True),
    ]
    test = {"not": False, "lead": None}
    assert [r["tests"] for r in before["rules"]] == [
        [test | {"field": "city", "test": "equals", "value": "Dallas", "result": "failed", "lead": "Austin"}],
        [test | {"field": "custom.budget", "test": "at_least", "value": "900000", "result": "failed"}],
        [test | {"field": "street", "test": "contains", "value": "Hidden", "result": "failed"}],
        [test | {"field": "county", "test": "equals", "value": "Travis", "result": "missing"}],
        [],
    ]
    rig.configure(ABC)
    rig.sql("DELETE FROM lead_facts WHERE tenant_id = :t")
    assert told() == before
    # Every version is kept; if one were lost all the same, that is said instead of something made up.
    gone = "UPDATE config_versions SET document = '{', rules = NULL WHERE tenant_id = :t AND version = :v"
    rig.sql(gone, v=before["config_version"])
    lost = told()
    assert lost["rules"] == []
    assert "cannot be read any more" in lost["rules_not_shown"]
    assert lost["rule"] == "r4"


def test_a_decision_of_before_still_tells_its_rules(generic_rig: Rig) -> None:
    """Decisions that hold every rule tried, as they once did, are told as they were."""
    rig = generic_rig
    ref = rig.create(city="Austin")
    rig.settle_owners()
    why = '{"field": "city", "test": "equals", "value": "Dallas", "result": "failed", "lead": "Austin"}'
    tried = f'{{"tried": [{{"rule": "old", "precedence": 1, "matched": false, "why": [{why}]}}]}}'
    rig.sql("UPDATE decisions SET record = CAST(:r AS jsonb) WHERE tenant_id = :t", r=tried)
    (decision,) = explain(rig.runtime, rig.tenant, rig.lead_id(ref))["decisions"]
    assert decision["rules"][0]["rule"] == "old"
    assert decision["rules"][0]["tests"][0]["lead"] == "Austin"
