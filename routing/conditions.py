"""Conditions over a lead's fields.

A condition is plain JSON or YAML: ``{}`` (matches always), ``{all: [..]}``, ``{any: [..]}``, ``{not: ..}`` or a test,
``{field: <name>, <operator>: <value>}``, with exactly one of these operators:

- ``equals: v``, ``one_of: [v, ..]``: text or numbers; ``equals`` in a custom field also true or false.
- ``contains: text``: part of the text; in tags and in lists of a custom field one whole entry.
- ``starts_with: text``.
- ``between: [low, high]`` (both included, one may be null), ``at_least: n``, ``at_most: n``: numbers.
- ``exists: true``, ``is_missing: true``.

A field with several values (tags, email, phone, a list in a custom field) passes a test when one value does. Text is
compared as :func:`normal_text` leaves it, phones by digits and a leading plus. Empty text, white space and numbers
that are not finite count as missing. Text of a custom field that is written as a number (``450000.50``) is compared as
one too, because CRMs hand the numbers of custom fields over as text.

**Three-valued** (Kleene): a test of a missing field, or of a value that it cannot compare (a number test of the text
"call me"), is *unknown*, and unknown stays unknown through ``not``. A rule matches only when its condition is true.
So ``{not: {field: state, equals: TX}}`` does not match a lead without a state; where it should, write
``{any: [{field: state, is_missing: true}, {not: ..}]}``. Only ``is_missing`` and its opposite ``exists`` speak of a
missing field: they are always true or false.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from decimal import Decimal
from typing import Any

from routing.fields import (
    FIELDS,
    FLAGS,
    NUMBERS,
    TEXTS,
    ConditionProblems,
    Fact,
    Facts,
    FieldKind,
    Json,
    Problem,
    decimal,
    field_kind,
    normal_phone,
    shown,
)
from routing.model import Lead

MAX_DEPTH = 16  # nested conditions
MAX_TESTS = 500  # tests in one condition
MAX_VALUES = 2_000  # values of one `one_of`
MAX_TEXT = 500  # characters of one text in a rule
MAX_WHY = 12  # records that explain one verdict

Operand = frozenset[Any] | tuple[Decimal | None, Decimal | None] | str | None
_WORDS = ("text", "a number", "true or false")


@dataclass(frozen=True, slots=True)
class Why:
    """What one test said of one lead: ``result`` is matched, failed, missing or not_comparable (after any ``not``).

    ``lead_value`` is None for every field that could tell who the lead is.
    """

    test: Test
    result: str
    lead_value: Json = None

    def as_json(self) -> dict[str, Json]:
        """The rule's own words, the result, and the lead's value where it may be shown."""
        record: dict[str, Json] = {"field": self.test.field, "test": self.test.operator, "value": self.test.shown}
        if self.test.negated:
            record["not"] = True
        record["result"] = self.result
        return record if self.lead_value is None else record | {"lead": self.lead_value}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a condition holds (None: unknown) and the tests that decided it, of which ``omitted`` are left out."""

    value: bool | None
    why: tuple[Why, ...]
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class Test:
    """One compiled test. ``operand`` is a set of values, a range, a text, or None where presence is asked for."""

    __test__ = False  # a word of the rules, not a class for pytest to collect

    field: str
    operator: str
    operand: Operand
    slot: int
    negated: bool
    shown: Json = dataclass_field(compare=False)
    match: Callable[[Fact], bool] = dataclass_field(compare=False, repr=False)

    def check(self, facts: Facts, why: list[Why]) -> bool | None:
        """True, False or None (unknown). Appends its record to `why`."""
        fact = facts.get(self.field)
        if self.operand is not None and not fact.values[self.slot]:
            why.append(Why(self, "not_comparable" if fact.present else "missing", fact.shown))
            return None
        value = self.match(fact) is not self.negated
        why.append(Why(self, "matched" if value else "failed", fact.shown))
        return value


@dataclass(frozen=True, slots=True)
class Group:
    """All (``every``) or any of the ``parts``. ``Group(True, ())`` is the condition that matches always."""

    every: bool
    parts: tuple[Node, ...] = ()

    def check(self, facts: Facts, why: list[Why]) -> bool | None:
        """Kleene's all / any. Of the records in `why` only those of the parts that decided stay."""
        start, unknown = len(why), False
        for part in self.parts:
            mark = len(why)
            value = part.check(facts, why)
            if value is (not self.every):
                del why[start:mark]
                return value
            if value is None and not unknown:
                unknown = True
                del why[start:mark]
            elif value is not None and unknown:
                del why[mark:]
        return None if unknown else self.every


Node = Test | Group


def _fields(node: Node) -> Iterator[str]:
    if isinstance(node, Test):
        yield node.field
    else:
        for part in node.parts:
            yield from _fields(part)


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled condition. ``root`` has no ``not``: De Morgan's laws, which hold for three values as well, have moved
    each one into the tests below it."""

    root: Node

    @property
    def fields(self) -> frozenset[str]:
        """The fields that its tests look at, as rules name them."""
        return frozenset(_fields(self.root))

    def test(self, lead: Lead | Facts) -> Verdict:
        """Whether `lead` fulfils this condition, and what decided it. Raises for no lead."""
        why: list[Why] = []
        value = self.root.check(lead if isinstance(lead, Facts) else Facts(lead), why)
        return Verdict(value, tuple(why[:MAX_WHY]), max(0, len(why) - MAX_WHY))


def compile_condition(raw: Mapping[str, Any], where: str = "when") -> Condition:
    """Compile `raw`, shaped as told above. Raises ConditionProblems with all problems; `where` starts their paths."""
    compiler = _Compiler()
    root = compiler.node(raw, where, 1, False)
    if compiler.problems:
        raise ConditionProblems(compiler.problems)
    return Condition(root)


# Per slot, the operators whose value is compared there.
_SLOT_OPERATORS = (
    ("equals", "one_of", "contains", "starts_with"),
    ("equals", "one_of", "between", "at_least", "at_most"),
    ("equals",),
)
OPERATORS = (*dict.fromkeys(sum(_SLOT_OPERATORS, ())), "exists", "is_missing")
_NEVER_USED = Group(every=True)  # stands where a problem was found


def _matcher(operator: str, operand: Operand, slot: int) -> Callable[[Fact], bool]:
    if isinstance(operand, frozenset):
        return lambda fact: not operand.isdisjoint(fact.values[slot])
    if isinstance(operand, tuple):
        low, high = operand
        return lambda fact: any((low is None or low <= n) and (high is None or n <= high) for n in fact.values[NUMBERS])
    if isinstance(operand, str) and operator == "contains":
        # A list of entries is tested for the entry, one text for its part.
        return lambda fact: any(operand == t if fact.listed else operand in t for t in fact.values[TEXTS])
    if isinstance(operand, str):
        return lambda fact: any(text.startswith(operand) for text in fact.values[TEXTS])
    return lambda fact: fact.present is (operator == "exists")


def _guess(word: object, among: Sequence[str]) -> str:
    close = difflib.get_close_matches(word[:40], among, 1) if isinstance(word, str) else []
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(among)}"


class _Compiler:
    """Walks a raw condition once and collects its problems. They never quote a value, which may be personal."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.leaves = 0

    def problem(self, where: str, what: str, fix: str) -> None:
        self.problems.append(Problem(where, what, fix))

    def node(self, raw: Any, where: str, depth: int, negated: bool) -> Node:
        # The limits also end the walk of what YAML aliases can build: a condition inside itself, or 10^9 tests.
        key = next(iter(raw)) if isinstance(raw, Mapping) and len(raw) == 1 else None
        inner = raw[key] if key is not None else None
        if key == "not" and depth <= MAX_DEPTH:
            return self.node(inner, f"{where}.not", depth + 1, not negated)
        elif key in ("all", "any") and isinstance(inner, list | tuple) and inner and depth <= MAX_DEPTH:
            nodes = []
            for at, part in enumerate(inner):
                if self.leaves <= MAX_TESTS:
                    nodes.append(self.node(part, f"{where}.{key}[{at}]", depth + 1, negated))
            return Group((key == "all") is not negated, tuple(nodes))
        else:
            self.leaves += 1
            if self.leaves > MAX_TESTS:
                self.problem(where, f"is one test more than the {MAX_TESTS} of a condition", "use one_of, or two rules")
            elif depth > MAX_DEPTH:
                self.problem(where, f"is nested more than {MAX_DEPTH} deep", "flatten it, or split the rule in two")
            elif key in ("all", "any"):
                self.problem(f"{where}.{key}", "is not a list with conditions", "list at least one; {} matches always")
            elif not isinstance(raw, Mapping):
                self.problem(where, "is not a condition", "write {field: .., <operator>: ..}, {all: [..]} or {}")
            else:
                return self.test(raw, where, negated) if raw else Group(every=not negated)
        return _NEVER_USED

    def test(self, raw: Mapping[Any, Any], where: str, negated: bool) -> Node:
        name, operators = raw.get("field"), [key for key in raw if key != "field"]
        kind = field_kind(name) if isinstance(name, str) else None
        operator = operators[0] if operators else None
        known = operator in OPERATORS
        if kind is None and "field" in raw:
            self.problem(f"{where}.field", "names no field of a lead", _guess(name, [*FIELDS, "custom.<key>"]))
        if "field" not in raw or len(operators) != 1:
            fix = "write a field and one operator; join conditions with all or any, two limits with between"
            self.problem(where, f"has {len(operators)} operators and {'field' in raw:d} fields", fix)
        elif not known:
            self.problem(where, "has an operator that does not exist", _guess(operator, OPERATORS))
        elif kind is not None:
            before = len(self.problems)
            slot, operand = self.operand(kind, str(operator), raw[operator], f"{where}.{operator}")
            if len(self.problems) == before:
                match = _matcher(str(operator), operand, slot)
                return Test(str(name), str(operator), operand, slot, negated, shown(raw[operator]), match)
        return _NEVER_USED

    def operand(self, kind: FieldKind, operator: str, raw: Any, where: str) -> tuple[int, Operand]:
        slots = tuple(slot for slot in kind.slots if operator in _SLOT_OPERATORS[slot])
        if operator in ("exists", "is_missing"):
            if raw is not True:
                self.problem(where, "is not true", "write exists: true or is_missing: true")
        elif not slots:
            fits = dict.fromkeys(sum((_SLOT_OPERATORS[slot] for slot in kind.slots), ()))
            self.problem(where, f"does not fit a field of {_WORDS[kind.slots[0]]}", f"use {', '.join(fits)}")
        elif operator == "between":
            if isinstance(raw, list | tuple) and len(raw) == 2 and any(side is not None for side in raw):
                low, high = (None if n is None else self.value(kind, slots, n, where)[1] for n in raw)
                if low is not None and high is not None and low > high:
                    self.problem(where, "has its low side above its high side", "swap the two numbers")
                return NUMBERS, (low, high)
            self.problem(where, "is not a pair of numbers", "write [low, high]; one of them may be null")
        elif operator == "one_of":
            if isinstance(raw, list | tuple) and 0 < len(raw) <= MAX_VALUES:
                found = [self.value(kind, slots, value, f"{where}[{at}]") for at, value in enumerate(raw)]
                if len({slot for slot, _ in found}) > 1:
                    self.problem(where, "mixes text and numbers", "put all of its values in quotes, or none")
                return found[0][0], frozenset(value for _, value in found)
            self.problem(where, "is not a list of values", f"write [first, second, ..], at most {MAX_VALUES}")
        else:
            slot, value = self.value(kind, slots, raw, where)
            if operator in ("at_least", "at_most"):
                return slot, (value, None) if operator == "at_least" else (None, value)
            entry = operator == "equals" or (operator == "contains" and kind.listed)
            return slot, frozenset((value,)) if entry else value
        return TEXTS, None

    def value(self, kind: FieldKind, slots: tuple[int, ...], raw: Any, where: str) -> tuple[int, Any]:
        """One value of a rule, normalised, after what it compares; (first slot, None) where it is a problem."""
        slot = FLAGS if isinstance(raw, bool) else NUMBERS if isinstance(raw, int | float | Decimal) else TEXTS
        if slot == TEXTS and not isinstance(raw, str):
            self.problem(where, "is not one plain value", "write one text or number; for no value is_missing: true")
        elif slot not in slots:
            number = "write digits without quotes, currency and thousands separators, like 450000"
            fix = "put the value in quotes" if TEXTS in slots else number
            self.problem(where, f"is {_WORDS[slot]}, not {' or '.join(_WORDS[fit] for fit in slots)}", fix)
        elif slot == FLAGS:
            return slot, raw
        elif slot == NUMBERS:
            number_value = decimal(raw)
            if number_value.is_finite() and abs(number_value) < Decimal(10) ** 30:
                return slot, number_value
            self.problem(where, "is not a usable number", "write a finite number below 10^30")
        else:
            if len(raw) <= MAX_TEXT and (text := kind.normal(raw)):
                return slot, text
            needs = "digits" if kind.normal is normal_phone else "letters or digits"
            self.problem(where, "is an empty or endless text", f"write {needs}, at most {MAX_TEXT} characters")
        return slots[0], None
