"""Compiled conditions, and what they say of a lead: the verdict with the tests that decided it.

This is the straightforward reading of a condition, three-valued and with its reasons, used to explain a decision;
:mod:`routing.matching` finds the rules that match, and is held against it by a property test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from decimal import Decimal
from hashlib import blake2b
from typing import Any

from routing.fields import NUMBERS, POINTS, TEXTS, Fact, Facts, Json, bare_code
from routing.model import Lead
from routing.places import Area

MAX_WHY = 12  # records that explain one verdict


@dataclass(frozen=True, slots=True)
class Codes:
    """All codes from ``low`` to ``high`` (None: no limit), both :func:`bare_code` and of one ``length``.

    A code of digits must have that length, of any other the characters at its start count.
    """

    low: str | None
    high: str | None
    length: int

    def covers(self, text: str) -> bool:
        """Whether a normalised text is such a code."""
        code = bare_code(text)
        if len(code) != self.length:
            if len(code) < self.length or code.isdecimal():
                return False
            code = code[: self.length]
        return (self.low is None or self.low <= code) and (self.high is None or code <= self.high)


Operand = frozenset[Any] | tuple[Decimal | None, Decimal | None] | Codes | Area | str | None


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
    """One compiled test. ``operand`` is a set of values, a range, an area, a text, or None where presence is asked for.

    ``fact`` is the field as :class:`routing.fields.Facts` names it, ``mark`` stands for the test (without its ``not``)
    where the lead's value must not be kept.
    """

    __test__ = False  # a word of the rules, not a class for pytest to collect

    field: str
    operator: str
    operand: Operand
    slot: int
    negated: bool
    fact: str
    raw: Any = dataclass_field(compare=False, repr=False)
    shown: Json = dataclass_field(compare=False)
    match: Callable[[Fact], bool] = dataclass_field(compare=False, repr=False)

    @property
    def mark(self) -> str:
        """Sixteen hex digits of a digest of the test as the configuration has it: the same in every release."""
        said = json.dumps([self.fact, self.operator, self.raw], sort_keys=True, ensure_ascii=False, default=str)
        return blake2b(said.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    def passed(self, fact: Fact) -> bool:
        """Whether the field, which can be compared, passes this test, its ``not`` included."""
        found = self.match(fact) if fact.holds is None or self.operand is None else self.mark in fact.holds
        return found is not self.negated

    def check(self, facts: Facts, why: list[Why]) -> bool | None:
        """True, False or None (unknown). Appends its record to `why`."""
        fact = facts[self.fact]
        if self.operand is not None and not fact.values[self.slot]:
            why.append(Why(self, "not_comparable" if fact.present else "missing", fact.shown))
            return None
        value = self.passed(fact)
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


def tests_of(node: Node) -> Iterator[Test]:
    """The tests of a condition, from left to right."""
    if isinstance(node, Test):
        yield node
    else:
        for part in node.parts:
            yield from tests_of(part)


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled condition. ``root`` has no ``not``: De Morgan's laws, which hold for three values as well, have moved
    each one into the tests below it."""

    root: Node

    @property
    def fields(self) -> frozenset[str]:
        """The fields that its tests look at, as rules name them."""
        return frozenset(test.field for test in tests_of(self.root))

    def test(self, lead: Lead | Facts) -> Verdict:
        """Whether `lead` fulfils this condition, and what decided it. Raises for no lead."""
        why: list[Why] = []
        value = self.root.check(lead if isinstance(lead, Facts) else Facts(lead), why)
        return Verdict(value, tuple(why[:MAX_WHY]), max(0, len(why) - MAX_WHY))


def matcher(operator: str, operand: Operand, slot: int) -> Callable[[Fact], bool]:
    """How a test without its ``not`` looks at a fact that has values in `slot`."""
    if isinstance(operand, frozenset):
        return lambda fact: not operand.isdisjoint(fact.values[slot])
    if isinstance(operand, Area):
        return lambda fact: any(map(operand.covers, fact.values[POINTS]))
    if isinstance(operand, Codes):
        return lambda fact: any(map(operand.covers, fact.values[TEXTS]))
    if isinstance(operand, tuple):
        low, high = operand
        return lambda fact: any((low is None or low <= n) and (high is None or n <= high) for n in fact.values[NUMBERS])
    if isinstance(operand, str) and operator == "contains":
        # A list of entries is tested for the entry, one text for its part.
        return lambda fact: any(operand == t if fact.listed else operand in t for t in fact.values[TEXTS])
    if isinstance(operand, str):
        return lambda fact: any(text.startswith(operand) for text in fact.values[TEXTS])
    return lambda fact: fact.present is (operator == "exists")
