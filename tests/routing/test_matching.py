"""Finding the rules that match fast, and telling afterwards how each fared, against the straightforward reading."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import matching
from routing.fields import Facts
from routing.model import Lead, Role
from routing.rules import RuleSet, Tried, retold
from tests.routing.test_rules import _grow, _test, conditions, leads, rule

When = Mapping[str, Any]

# Fields that the older laws leave out: a place, a time of arrival, a range of codes.
_zones = st.sampled_from(["America/Chicago", "Asia/Tokyo"])
_others = st.one_of(
    st.builds(
        lambda op, value, zone: {"field": "arrival_hour", op: value, "zone": zone},
        st.sampled_from(["equals", "at_least", "at_most"]),
        st.integers(0, 23),
        _zones,
    ),
    st.builds(
        lambda days, zone: {"field": "arrival_weekday", "one_of": days, "zone": zone},
        st.lists(st.sampled_from(["mon", "Tuesday", "SUN"]), min_size=1),
        _zones,
    ),
    _test(st.just("zip"), "between", st.sampled_from([["00005", "00010"], [None, "5"], ["tx1", "tx9"]])),
    _test(st.just("location"), "within_radius", st.sampled_from([{"lat": 30, "lon": -97, "km": 50}])),
    _test(st.just("location"), "in_polygon", st.just([[29, -98], [29, -96], [31, -97]])),
    _test(st.just("location"), "exists", st.just(True)),
)
wide_conditions = st.recursive(conditions | _others, _grow, max_leaves=8)
_degrees = st.sampled_from([None, Decimal("30.25"), Decimal(-97), Decimal("29.000001"), Decimal(200)])
wide_leads = st.builds(
    lambda lead, lat, lon, at: replace(lead, latitude=lat, longitude=lon, created_at=at),
    leads,
    _degrees,
    _degrees,
    st.none() | st.datetimes(datetime(2024, 1, 1), datetime(2027, 1, 1)).map(lambda at: at.replace(tzinfo=UTC)),
)
ruled = st.lists(wide_conditions, max_size=8)


def rule_set(whens: Sequence[When]) -> RuleSet:
    return RuleSet([rule(f"r{at}", at, when) for at, when in enumerate(whens)])


def found(rules: RuleSet, of: Lead) -> list[int]:
    return [number for number, _ in rules.search(of, Role.OWNER).matches()]


def reference(rules: RuleSet, of: Lead) -> list[int]:
    return [number for number, tried in enumerate(rules.tries(of, Role.OWNER)) if tried.matched]


@settings(max_examples=200, deadline=None)
@given(ruled, wide_leads)
def test_the_same_rules_match_in_the_same_order(whens: list[When], of: Lead) -> None:
    rules = rule_set(whens)
    assert found(rules, of) == reference(rules, of)


def told(tries: Sequence[Tried]) -> list[Any]:
    return [tried.as_json() for tried in tries]


@settings(max_examples=200, deadline=None)
@given(ruled, wide_leads, st.integers(0, 8))
def test_a_decision_tells_later_how_each_rule_fared(whens: list[When], of: Lead, tried: int) -> None:
    whens = json.loads(json.dumps(whens, default=float))  # as they are stored
    rules = rule_set(whens)
    tried = min(tried, len(whens))
    search = rules.search(of, Role.OWNER)
    list(search.matches())
    kept = json.loads(json.dumps(search.record(tried), allow_nan=False))
    again = rule_set(whens)
    expected = told(list(rules.tries(of, Role.OWNER))[:tried])
    assert json.dumps(told(retold(again, Role.OWNER, kept) or ())) == json.dumps(expected)


PERSONAL = Lead(
    ref="L-1",
    street="1 Hidden Street",
    emails=("nobody@example.com",),
    phones=("+1 512 555 0100",),
    custom={"secret": "hidden words"},
    latitude=Decimal("30.2671"),
    longitude=Decimal("-97.7431"),
    city="Austin",
    tags=tuple(f"tag {n}" for n in range(300)),
)
LOOKING = rule_set(
    [
        {"all": [{"field": "email", "contains": "@example.org"}, {"field": "city", "equals": "Austin"}]},
        {"field": "phone", "equals": "+49 1"},
        {"field": "custom.secret", "contains": "public"},
        {"field": "street", "one_of": ["Elm Street", "Oak Street"]},
        {"field": "location", "within_radius": {"lat": 52.5, "lon": 13.4, "miles": 10}},
        {"field": "tags", "contains": "nothing"},
        {"not": {"field": "custom.secret", "starts_with": "hidden"}},
    ]
)


def test_what_a_decision_keeps_tells_nobody_who_the_lead_is() -> None:
    search = LOOKING.search(PERSONAL, Role.OWNER)
    assert list(search.matches()) == []
    kept = json.dumps(search.record(search.count))
    for personal in ("hidden", "nobody", "512", "30.26", "97.74"):
        assert personal not in kept.casefold()
    assert "Austin" in kept
    assert len(kept) < 700, "long values are not kept"


def test_a_lead_that_no_rule_looks_at_costs_no_room() -> None:
    rules = rule_set([{"field": "city", "equals": f"Town {n}"} for n in range(500)])
    search = rules.search(Lead("L-1", city="Austin", source="Portal"), Role.OWNER)
    assert list(search.matches()) == []
    assert search.record(search.count) == {"tried": 500, "matched": [], "facts": {"city": "Austin"}}
    tries = retold(rules, Role.OWNER, search.record(500))
    assert tries is not None
    assert [t.as_json()["why"][0]["lead"] for t in tries] == ["Austin"] * 500  # type: ignore[index]


def test_other_rules_than_those_of_the_decision_are_not_told_for_them() -> None:
    rules = rule_set([{"field": "city", "equals": "Dallas"}, {"field": "city", "equals": "Austin"}])
    search = rules.search(Lead("L-1", city="Austin"), Role.OWNER)
    list(search.matches())
    kept = search.record(2)
    assert retold(rules, Role.OWNER, kept) is not None
    assert retold(rule_set([{"field": "city", "equals": "Austin"}, {}]), Role.OWNER, kept) is None
    assert retold(rule_set([{"field": "city", "equals": "Dallas"}]), Role.OWNER, kept) is None


def test_only_rules_that_can_match_are_tried() -> None:
    whens: list[When] = [
        {"all": [{"field": "type", "equals": "Buyer"}, {"field": "zip", "equals": f"{n:05}"}]} for n in range(1000)
    ]
    whens[7] = {"any": [{"field": "city", "equals": "Austin"}, {"field": "zip", "one_of": ["1", "2"]}]}
    whens[9] = {"not": {"field": "type", "equals": "Seller"}}
    whens[11] = {"field": "source", "is_missing": True}
    rules = rule_set(whens)
    matcher = matching.Matcher([condition.root for _, condition in rules.compiled(Role.OWNER)])
    assert matcher.candidates(Facts(Lead("1", type="buyer", zip="00500"))) == [9, 11, 500]
    assert matcher.candidates(Facts(Lead("1", city="Austin"))) == [7, 11]
    assert matcher.candidates(Facts(Lead("1", zip="2"))) == [7, 11]


@pytest.mark.parametrize("broken", ["no order", "first value only", "unknown is no"])
def test_a_broken_twin_is_found_out(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The property that guards the index fails for an index that is wrong in one of these ways."""
    whens: list[When] = [
        {"field": "tags", "contains": "b"},
        {"not": {"field": "state", "equals": "TX"}},
        {"field": "tags", "contains": "a"},
        {},
    ]
    rules, of = rule_set(whens), Lead("L-1", tags=("a", "b"))
    assert found(rules, of) == reference(rules, of) == [0, 2, 3]
    if broken == "no order":
        monkeypatch.setattr(matching, "sorted", lambda numbers: sorted(numbers, reverse=True), raising=False)
    elif broken == "first value only":
        whole = matching.Matcher.candidates
        monkeypatch.setattr(
            matching.Matcher, "candidates", lambda self, facts: whole(self, Facts(replace(of, tags=of.tags[:1])))
        )
    else:
        whens[1] = {"field": "state", "is_missing": True}
        rules = rule_set(whens)
        monkeypatch.setattr(matching, "_test", lambda test: lambda facts: bool(facts[test.fact].values[test.slot]))
        rules = rule_set(whens)
    assert found(rules, of) != reference(rules, of)
