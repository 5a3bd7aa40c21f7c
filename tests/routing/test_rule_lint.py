"""Notes on rules: what is claimed is true for every lead, and what an admin would see is noted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import rule_lint
from routing.conditions import Node, compile_condition
from routing.fields import ConditionProblems
from routing.model import Lead, Role, Rule, Target, TargetKind
from routing.rule_lint import MAX_OVERLAPS, Move, Note, NoteKind, _Prover, lint_rules, suggest_moves, suggest_order
from routing.rules import RuleSet

When = Mapping[str, Any]
EXISTING = (Target(TargetKind.EXISTING_OWNER),)


def to(number: int) -> tuple[Target, ...]:
    return (Target(TargetKind.QUEUE, UUID(int=number)),)


def rules(*whens: When, **targets: tuple[Target, ...]) -> list[Rule]:
    """Rules r1, r2, .. in this order, each to a queue of its own unless `targets` has the rule's name."""
    names = [f"r{at}" for at in range(1, len(whens) + 1)]
    return [
        Rule(name, at, Role.OWNER, when, targets.get(name, to(at)))
        for at, (name, when) in enumerate(zip(names, whens, strict=True), 1)
    ]


def notes(*whens: When, **targets: tuple[Target, ...]) -> list[tuple[str, str, str | None]]:
    return [(n.kind.value, n.rule, n.other) for n in lint_rules(rules(*whens, **targets))]


def source(*names: str) -> When:
    return {"field": "source", "equals": names[0]} if len(names) == 1 else {"field": "source", "one_of": list(names)}


def price(low: int | None, high: int | None) -> When:
    return {"field": "price", "between": [low, high]}


A, B = source("A"), source("B")
VIP = {"field": "tags", "contains": "vip"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, A),
        ({}, {}),
        (A, A),
        (A, source("a ")),
        (A, {"all": [VIP, A]}),
        ({"any": [A, B]}, A),
        (source("A", "B", "C"), source("c", "B")),
        (source("A", "B"), {"any": [A, B]}),
        ({"any": [A, B]}, source("A", "B")),
        ({"field": "source", "starts_with": "po"}, {"field": "source", "starts_with": "Portal"}),
        ({"field": "source", "contains": "rta"}, {"field": "source", "starts_with": "Portal"}),
        ({"field": "source", "contains": "rta"}, source("Portal", "ARTA")),
        ({"field": "source", "exists": True}, {"not": A}),
        ({"field": "source", "exists": True}, {"field": "source", "contains": "x"}),
        ({"not": A}, B),
        ({"not": A}, {"not": source("A", "B")}),
        ({"not": {"field": "source", "starts_with": "B"}}, {"field": "source", "starts_with": "A"}),
        ({"field": "price", "at_least": 100}, price(100, 200)),
        (price(100, None), {"field": "price", "equals": 100}),
        ({"field": "price", "one_of": [1, 2]}, price(2, 2)),
        ({"not": price(None, 99)}, price(100, 200)),
        ({"not": {"field": "form", "exists": True}}, {"field": "form", "is_missing": True}),
        (VIP, {"all": [{"field": "tags", "equals": "VIP"}, A]}),
        ({"field": "custom.a", "starts_with": "x"}, {"field": "custom.a", "equals": "xy"}),
        ({"field": "custom.a", "contains": "x"}, {"field": "custom.a", "equals": "x"}),
        ({"field": "email", "contains": "example.com"}, {"field": "email", "equals": "a@example.com"}),
    ],
)
def test_a_rule_that_an_earlier_one_takes_from_is_shadowed(first: When, second: When) -> None:
    assert notes(first, second) == [("shadowed", "r2", "r1")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"field": "custom.a", "contains": "x"}, {"field": "custom.a", "equals": "xy"}),
        ({"field": "custom.a", "contains": "x"}, {"field": "custom.a", "contains": "xy"}),
        ({"field": "tags", "contains": "x"}, {"field": "tags", "contains": "xy"}),
        ({"not": {"field": "tags", "contains": "x"}}, {"field": "tags", "contains": "y"}),
        ({"not": {"field": "custom.a", "equals": "x"}}, {"not": {"field": "custom.a", "equals": 5}}),
        ({"field": "source", "starts_with": "Portal"}, {"field": "source", "contains": "Portal"}),
        (price(100, 200), price(150, 201)),
        (price(100, None), price(None, 100)),
        ({"field": "state", "is_missing": True}, {"field": "city", "is_missing": True}),
        (A, VIP),
        ({"any": [A, {"all": [B, VIP]}]}, source("A", "B")),
        ({"field": "custom.a", "equals": "x"}, {"field": "custom.a", "equals": "y"}),
    ],
)
def test_what_only_overlaps_is_not_called_shadowed(first: When, second: When) -> None:
    found = notes(first, second)
    assert [n for n in found if n[0] == "shadowed"] == []
    specific = _Prover().implies(compile_condition(first).root, compile_condition(second).root)
    assert found == ([] if specific else [("overlap", "r2", "r1")])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (A, B),
        (A, source("B", "C")),
        (A, {"not": A}),
        (VIP, {"not": VIP}),
        (price(None, 99), price(100, None)),
        (price(1, 5), {"field": "price", "equals": 6}),
        ({"field": "city", "starts_with": "Ma"}, {"field": "city", "starts_with": "Lu"}),
        ({"field": "city", "is_missing": True}, {"field": "city", "equals": "x"}),
        ({"field": "city", "is_missing": True}, {"not": {"field": "city", "equals": "x"}}),
        ({"all": [A, VIP]}, {"any": [B, {"all": [source("C"), VIP]}]}),
    ],
)
def test_rules_that_no_lead_can_both_match_need_no_note(first: When, second: When) -> None:
    assert notes(first, second) == notes(second, first) == []


@pytest.mark.parametrize(
    "when",
    [
        {"not": {}},
        {"all": [A, B]},
        {"all": [A, {"not": A}]},
        {"all": [price(5, None), VIP, {"field": "price", "at_most": 4}]},
        {"any": [{"not": {}}, {"all": [A, {"any": [B, source("C")]}]}]},
    ],
)
def test_a_condition_that_contradicts_itself(when: When) -> None:
    assert notes(when, {}) == [("never_matches", "r1", None)]


def test_an_exception_before_its_general_rule_is_no_note() -> None:
    assert notes({"all": [A, VIP]}, A, {}) == []


def test_an_overlap_needs_different_targets() -> None:
    assert notes(A, VIP) == [("overlap", "r2", "r1")]
    assert notes(A, VIP, r1=to(7), r2=to(7)) == []


def test_rules_that_only_together_shadow_another() -> None:
    assert notes(A, B, source("A", "B")) == [("shadowed", "r3", None)]


def test_a_rule_for_existing_owners_lets_others_go_on() -> None:
    assert notes({}, A, {}, r1=EXISTING) == []
    assert notes({}, A, r1=EXISTING + to(1)) == [("shadowed", "r2", "r1")]


def test_shadowed_rules_cast_no_further_notes() -> None:
    assert notes(source("A", "B"), A, VIP) == [("shadowed", "r2", "r1"), ("overlap", "r3", "r1")]


def test_roles_do_not_shadow_each_other() -> None:
    both = [Rule("o", 1, Role.OWNER, {}, to(1)), Rule("c", 1, Role.COLLABORATOR, {}, to(2))]
    assert lint_rules(both) == []
    late = Rule("late", 2, Role.COLLABORATOR, A, to(3))
    assert [n.rule for n in lint_rules([*both, late])] == ["late"]


def test_a_note_says_what_to_do() -> None:
    (note,) = lint_rules(rules({}, A))
    assert note == Note(
        NoteKind.SHADOWED,
        "r2",
        "r1",
        "'r1' stands before it and takes every lead that it matches; move it up or remove it",
    )
    assert all("; " in n.text for n in lint_rules(rules({"not": {}}, A, VIP)))


def test_broken_rules_are_told_before_anything_is_noted() -> None:
    for of in (lint_rules, suggest_order):
        with pytest.raises(ConditionProblems):
            of(rules({"field": "nothing", "equals": 1}))


def test_many_overlaps_are_counted_not_listed() -> None:
    found = lint_rules(rules(*({"field": "tags", "contains": f"t{n}"} for n in range(20))))
    assert [n.kind for n in found] == [NoteKind.OVERLAP] * MAX_OVERLAPS + [NoteKind.UNFINISHED]
    assert found[-1].text.startswith("90 more")


def test_work_is_bounded_and_what_was_found_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    many = rules({}, A, *({"any": [source(f"a{n}"), source(f"b{n}")]} for n in range(40)))
    monkeypatch.setattr(rule_lint, "MAX_STEPS", 50)
    found = lint_rules(many)
    assert ("shadowed", "r2") in [(n.kind.value, n.rule) for n in found]
    assert ("unfinished", "r42") in [(n.kind.value, n.rule) for n in found]
    assert suggest_order(many) == [r.name for r in many]


# -- the suggestion -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("whens", "order"),
    [
        ([], ""),
        ([{}, A, B], "r2 r3 r1"),
        ([A, B, {}], "r1 r2 r3"),
        ([B, A, VIP], "r1 r2 r3"),
        ([A, VIP, {"all": [A, VIP]}], "r3 r1 r2"),
        ([price(1, None), price(1, 100), price(10, 50)], "r3 r2 r1"),
        ([A, A], "r1 r2"),
        ([A, {"all": [A, B]}], "r1 r2"),
        ([{}, VIP, price(1, None), {"all": [VIP, price(5, None)]}], "r4 r2 r3 r1"),
    ],
)
def test_specific_before_general_otherwise_as_it_is(whens: list[When], order: str) -> None:
    given_rules = rules(*whens)
    assert suggest_order(given_rules[::-1]) == order.split()
    assert [r.precedence for r in given_rules] == sorted(r.precedence for r in given_rules)


def test_existing_owners_may_stay_first() -> None:
    assert suggest_order(rules({}, A, {}, r1=EXISTING)) == ["r1", "r2", "r3"]


def test_a_circle_of_half_found_proofs_still_gives_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    circle = rules(A, B, VIP)
    after = {
        compile_condition(one.when).root: compile_condition(circle[at - 2].when).root for at, one in enumerate(circle)
    }
    monkeypatch.setattr(_Prover, "implies", lambda self, a, b: after[a] == b)
    assert sorted(suggest_order(circle)) == ["r1", "r2", "r3"]


def test_long_chains_of_special_cases() -> None:
    chain = rules(*(price(n, None) for n in range(60)))
    assert suggest_order(chain) == [r.name for r in chain[::-1]]


# -- what is claimed holds for every lead ---------------------------------------------------------------------
TESTS: list[When] = [
    *({"field": f, "equals": v} for f in ("source", "tags", "custom.a") for v in ("x", "xy")),
    *({"field": f, op: v} for f in ("source", "tags", "custom.a") for op in ("contains", "starts_with") for v in "xy"),
    *({"field": f, "one_of": ["x", "y"]} for f in ("source", "tags", "custom.a")),
    *({"field": f, op: True} for f in ("source", "price", "custom.a") for op in ("exists", "is_missing")),
    *(
        {"field": f, "between": b}
        for f in ("price", "custom.a")
        for b in ([1, 2], [2, 3], [2, 2], [None, 1], [3, None])
    ),
    *({"field": f, "one_of": [1, 3]} for f in ("price", "custom.a")),
    {"field": "custom.a", "equals": True},
    *(
        {"field": "zip", "between": b}
        for b in (["1", "3"], ["2", "2"], ["2", None], [None, "1"], ["11", "22"], ["a1", "b1"])
    ),
    {"field": "zip", "one_of": ["2", "3"]},
    *({"field": "zip", "starts_with": v} for v in ("2", "b")),
    *(
        {"field": "location", "within_radius": {"lat": 0, "lon": lon, "km": km}}
        for lon, km in ((0, 50), (0, 200), (3, 50))
    ),
    *({"field": "location", "in_polygon": [[-1, x], [-1, x + 2], [1, x + 2], [1, x]]} for x in (-1, 0, 2)),
    *({"field": "arrival_hour", "at_least": h, "zone": z} for h in (6, 20) for z in ("UTC", "Asia/Tokyo")),
    {"field": "arrival_hour", "at_most": 5, "zone": "UTC"},
    {"field": "arrival_weekday", "one_of": ["sat", "sun"], "zone": "UTC"},
    {"field": "location", "exists": True},
    {},
]
TESTS += [{"not": test} for test in TESTS]
TEXTS: list[Any] = [None, "x", "y", "xy", "yx", "z"]
ENTRIES: list[Any] = [(), ("x",), ("xy",), ("z",), ("x", "y"), ("xy", "z")]
CUSTOM: list[Any] = [*TEXTS, *ENTRIES, 1, 2, 3, "2", (1, 3), ("x", 2), True, False]
LEADS = [
    *(Lead("L", source=v) for v in TEXTS),
    *(Lead("L", tags=v) for v in ENTRIES),
    *(Lead("L", price=v) for v in (None, Decimal(0), Decimal(1), Decimal(2), Decimal(3))),
    *(Lead("L", custom={"a": v}) for v in CUSTOM),
    *(Lead("L", zip=v) for v in ("1", "2", "3", "22", "2-2", "a1", "a2", "b1 x", "aa", "bz")),
    *(Lead("L", latitude=Decimal(lat), longitude=Decimal(lon)) for lat in (0, 1) for lon in (-1, 0, 1, 2, 3, 4)),
    *(Lead("L", created_at=datetime(2026, 11, day, hour, tzinfo=UTC)) for day in (27, 28) for hour in (3, 6, 12, 21)),
]
Proof = Callable[[Node, Node], bool]
_ROOTS = [compile_condition(test).root for test in TESTS]
_HOLDS = [frozenset(at for at, of in enumerate(LEADS) if compile_condition(t).test(of).value) for t in TESTS]


def refuted(implies: Proof, disjoint: Proof) -> tuple[list[tuple[When, When]], int, int]:
    """The shared check: pairs of tests for which a claim is false for some lead, and how many claims there were."""
    false, counts = [], [0, 0]
    for (a, root_a, in_a), (b, root_b, in_b) in itertools.product(zip(TESTS, _ROOTS, _HOLDS, strict=True), repeat=2):
        if implies(root_a, root_b):
            counts[0] += 1
            false += [] if in_a <= in_b else [(a, b)]
        if disjoint(root_a, root_b):
            counts[1] += 1
            false += [(a, b)] if in_a & in_b else []
    return false, counts[0], counts[1]


def test_no_claim_about_two_tests_is_false() -> None:
    prover = _Prover()
    false, implied, apart = refuted(prover.implies, prover.disjoint)
    assert false == []
    assert implied > 2 * len(TESTS)
    assert apart > len(TESTS)


def test_a_broken_prover_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    prover = _Prover()
    assert refuted(lambda a, b: prover.implies(b, a), prover.disjoint)[0]
    monkeypatch.setattr(rule_lint, "_single", lambda field: True)
    assert refuted(prover.implies, prover.disjoint)[0]
    monkeypatch.undo()
    monkeypatch.setattr(rule_lint, "_missing", lambda test: test.operator == "is_missing")
    assert refuted(prover.implies, prover.disjoint)[0]


_whens = st.recursive(
    st.sampled_from(TESTS),
    lambda inner: st.one_of(
        *(st.lists(inner, min_size=1, max_size=3).map(lambda p, k=key: {k: p}) for key in ("all", "any")),
        inner.map(lambda c: {"not": c}),
    ),
    max_leaves=5,
)
_leads = st.builds(
    Lead,
    ref=st.just("L"),
    source=st.sampled_from(TEXTS),
    tags=st.sampled_from(ENTRIES),
    price=st.sampled_from([None, *map(Decimal, range(4))]),
    custom=st.sampled_from(CUSTOM).map(lambda v: {"a": v}),
)


@settings(max_examples=300, deadline=None)
@given(_whens, _whens, st.lists(_leads, min_size=5, max_size=25))
def test_no_claim_about_two_conditions_is_false(a: When, b: When, some: list[Lead]) -> None:
    one, two = compile_condition(a), compile_condition(b)
    prover = _Prover()
    for of in [*some, *LEADS]:
        in_one, in_two = one.test(of).value is True, two.test(of).value is True
        assert not (prover.implies(one.root, two.root) and in_one and not in_two)
        assert not (prover.disjoint(one.root, two.root) and in_one and in_two)
        assert not (prover.never(one.root) and in_one)
    assert prover.implies(one.root, one.root)
    assert prover.disjoint(one.root, two.root) is prover.disjoint(two.root, one.root)


@settings(max_examples=100, deadline=None)
@given(st.lists(_whens, min_size=1, max_size=5), st.lists(_leads, min_size=5, max_size=25))
def test_a_noted_rule_never_wins_and_a_suggestion_is_an_order(whens: list[When], some: list[Lead]) -> None:
    made = rules(*whens)
    hopeless = {n.rule for n in lint_rules(made) if n.kind in (NoteKind.SHADOWED, NoteKind.NEVER_MATCHES)}
    winners = {won.name for of in [*some, *LEADS] if (won := RuleSet(made).first_match(of, Role.OWNER)[0])}
    assert not hopeless & winners
    assert sorted(suggest_order(made)) == sorted(r.name for r in made)


def test_a_suggestion_names_what_stands_before_what() -> None:
    """Specific before general by places and codes too; nothing else moves, and nothing is done by itself."""
    near = {"field": "location", "within_radius": {"lat": 30.27, "lon": -97.74, "km": 5}}
    far = {"field": "location", "within_radius": {"lat": 30.27, "lon": -97.74, "miles": 30}}
    made = rules(A, far, {"field": "zip", "between": ["78701", "78799"]}, near, {"field": "zip", "equals": "78704"})
    assert suggest_moves(made) == [Move("r4", 4, "r2", 2), Move("r5", 5, "r3", 3)]
    assert suggest_order(made) == ["r1", "r4", "r2", "r5", "r3"]
    assert [r.name for r in made] == ["r1", "r2", "r3", "r4", "r5"]
    assert suggest_moves([made[at] for at in (0, 3, 1, 4, 2)]) != []  # the precedence counts, not the sequence
    assert suggest_moves(rules(near, far, A)) == []
