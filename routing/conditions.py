"""Conditions over a lead's fields.

A condition is plain JSON or YAML: ``{}`` (matches always), ``{all: [..]}``, ``{any: [..]}``, ``{not: ..}`` or a test,
``{field: <name>, <operator>: <value>}``, with exactly one of these operators:

- ``equals: v``, ``one_of: [v, ..]``: text or numbers; ``equals`` in a custom field also true or false.
- ``contains: text``: part of the text; in tags and in lists of a custom field one whole entry.
- ``starts_with: text``.
- ``between: [low, high]`` (both included, one may be null), ``at_least: n``, ``at_most: n``: numbers. In zip also
  ``between: ["78701", "78799"]``, two texts of equal length: digits compare as a whole, without the four that may
  follow a ZIP code; others by as many characters at the start as the limits have.
- ``within_radius: {lat: .., lon: .., km: ..}`` (or ``miles``), ``in_polygon: [[lat, lon], ..]``: location.
- ``exists: true``, ``is_missing: true``.

A field with several values (tags, email, phone, a list in a custom field) passes a test when one value does. Text is
compared as :func:`normal_text` leaves it, phones by digits and a leading plus. Empty text, white space and numbers
that are not finite count as missing. Text of a custom field that is written as a number (``450000.50``) is compared as
one too, because CRMs hand the numbers of custom fields over as text. ``arrival_hour`` (0 to 23) and
``arrival_weekday`` (mon to sun) are of the time at which the CRM got the lead, on the clocks of the zone that stands
beside the operator (``zone: America/Chicago``).

**Three-valued** (Kleene): a test of a missing field, or of a value that it cannot compare (a number test of the text
"call me"), is *unknown*, and unknown stays unknown through ``not``. A rule matches only when its condition is true.
So ``{not: {field: state, equals: TX}}`` does not match a lead without a state; where it should, write
``{any: [{field: state, is_missing: true}, {not: ..}]}``. Only ``is_missing`` and its opposite ``exists`` speak of a
missing field: they are always true or false.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from routing.clocks import known_zone
from routing.fields import (
    FIELDS,
    FLAGS,
    NUMBERS,
    POINTS,
    TEXTS,
    ConditionProblems,
    FieldKind,
    Problem,
    bare_code,
    decimal,
    fact_name,
    field_kind,
    normal_text,
    shown,
)
from routing.places import KM_PER_MILE, MAX_KM, MAX_POINTS, Area, Circle, Point, point_of, polygon
from routing.verdicts import MAX_WHY, Codes, Condition, Group, Node, Operand, Test, Verdict, Why, matcher

__all__ = [
    "MAX_DEPTH",
    "MAX_TESTS",
    "MAX_TEXT",
    "MAX_VALUES",
    "MAX_WHY",
    "OPERATORS",
    "Condition",
    "Group",
    "Node",
    "Operand",
    "Test",
    "Verdict",
    "Why",
    "compile_condition",
]

MAX_DEPTH = 16  # nested conditions
MAX_TESTS = 500  # tests in one condition
MAX_VALUES = 2_000  # values of one `one_of`
MAX_TEXT = 500  # characters of one text in a rule

_HOURS = frozenset(map(Decimal, range(24)))
_DEGREES = re.compile(r"[-+]?[0-9]{1,9}(\.[0-9]{1,30})?")
_WORDS = ("text", "a number", "true or false", "a place")


def compile_condition(raw: Mapping[str, Any], where: str = "when") -> Condition:
    """Compile `raw`, shaped as told above. Raises ConditionProblems with all problems; `where` starts their paths."""
    compiler = _Compiler()
    root = compiler.node(raw, where, 1, False)
    if compiler.problems:
        raise ConditionProblems(compiler.problems)
    return Condition(root)


def in_zone(raw: Any, zone: str | None) -> Any:
    """The condition `raw` with `zone` beside each test that is read on the clocks of a zone and names none."""
    if zone is None:
        return raw
    if isinstance(raw, list | tuple):
        return [in_zone(part, zone) for part in raw]
    if not isinstance(raw, Mapping):
        return raw
    kind = field_kind(raw["field"]) if isinstance(raw.get("field"), str) else None
    if kind is not None:
        return {**raw, "zone": zone} if kind.zoned and "zone" not in raw else raw
    return {key: in_zone(part, zone) if key in ("all", "any", "not") else part for key, part in raw.items()}


# Per slot, the operators whose value is compared there.
_SLOT_OPERATORS = (
    ("equals", "one_of", "contains", "starts_with"),
    ("equals", "one_of", "between", "at_least", "at_most"),
    ("equals",),
    ("within_radius", "in_polygon"),
)
OPERATORS = (*dict.fromkeys(sum(_SLOT_OPERATORS, ())), "exists", "is_missing")
_NEVER_USED = Group(every=True)  # stands where a problem was found


def _guess(word: object, among: Sequence[str]) -> str:
    close = difflib.get_close_matches(word[:40], among, 1) if isinstance(word, str) else []
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(among)}"


def _number(raw: Any) -> Decimal | None:
    """`raw` as a finite number; text counts when it is written as one, with more digits than a float holds."""
    if isinstance(raw, str) and _DEGREES.fullmatch(raw):
        return Decimal(raw)
    if isinstance(raw, bool) or not isinstance(raw, int | float | Decimal):
        return None
    found = decimal(raw)
    return found if found.is_finite() and abs(found) < Decimal(10) ** 9 else None


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
        name, operators = raw.get("field"), [key for key in raw if key not in ("field", "zone")]
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
            zone = self.zone(kind, raw, where)
            value = raw[operator]
            slot, operand = self.operand(kind, str(operator), value, f"{where}.{operator}")
            if len(self.problems) == before:
                fact, match = fact_name(str(name), zone), matcher(str(operator), operand, slot)
                return Test(str(name), str(operator), operand, slot, negated, fact, value, shown(value), match)
        return _NEVER_USED

    def zone(self, kind: FieldKind, raw: Mapping[Any, Any], where: str) -> str | None:
        zone = raw.get("zone")
        if not kind.zoned:
            if "zone" in raw:
                self.problem(f"{where}.zone", "stands beside a field that has no clock", "remove it")
        elif zone is None:
            fix = "write zone: America/Chicago at the top of the configuration, or beside the operator"
            self.problem(where, "asks for a time of day without a time zone", fix)
        elif not (isinstance(zone, str) and known_zone(zone)):
            self.problem(f"{where}.zone", "is no time zone", "write an IANA time zone such as America/Chicago")
        else:
            return zone
        return None

    def operand(self, kind: FieldKind, operator: str, raw: Any, where: str) -> tuple[int, Operand]:
        slots = tuple(slot for slot in kind.slots if operator in _SLOT_OPERATORS[slot])
        if operator == "between" and kind.ranged:
            return TEXTS, self.code_range(raw, where)
        if operator in ("exists", "is_missing"):
            if raw is not True:
                self.problem(where, "is not true", "write exists: true or is_missing: true")
        elif not slots:
            fits = [word for word in OPERATORS if any(word in _SLOT_OPERATORS[slot] for slot in kind.slots)]
            fits += ["between"] if kind.ranged else []
            self.problem(where, f"does not fit a field of {_WORDS[kind.slots[0]]}", f"use {', '.join(fits)}")
        elif slots == (POINTS,):
            return POINTS, self.circle(raw, where) if operator == "within_radius" else self.polygon(raw, where)
        elif operator == "between":
            if isinstance(raw, list | tuple) and len(raw) == 2 and any(side is not None for side in raw):
                low, high = (None if n is None else self.value(kind, slots, n, where)[1] for n in raw)
                if low is not None and high is not None and low > high:
                    night = "write any: with at_least for the evening and at_most for the morning"
                    fix = night if kind.zoned else "swap the two numbers"
                    self.problem(where, "has its low side above its high side", fix)
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

    def code_range(self, raw: Any, where: str) -> Operand:
        """Two codes of equal length, as :func:`routing.verdicts.Codes` compares them."""
        codes = [raw] if not isinstance(raw, list | tuple) else raw
        low, high = (codes[0], codes[1]) if len(codes) == 2 else (None, None)
        if not all(side is None or isinstance(side, str) for side in codes) or (low is None and high is None):
            fix = 'write ["78701", "78799"] in quotes; one of them may be null'
            self.problem(where, "is not a pair of texts", fix)
            return None
        low, high = (None if side is None else bare_code(normal_text(side[:MAX_TEXT])) for side in (low, high))
        if "" in (low, high) or (low and high and len(low) != len(high)):
            self.problem(where, "has two limits of unequal length", "write both with the same number of characters")
        elif low and high and low > high:
            self.problem(where, "has its low side above its high side", "swap the two codes")
        return Codes(low, high, len(low or high or ""))

    def degrees(self, pair: Any, where: str) -> Point | None:
        """A point of two numbers, latitude first."""
        if isinstance(pair, list | tuple) and len(pair) == 2:
            both = [_number(side) for side in pair]
            if both[0] is not None and both[1] is not None and (point := point_of(both[0], both[1])) is not None:
                return point
        fix = "write latitude (-90 to 90), then longitude (-180 to 180), in degrees such as 30.2672 and -97.7431"
        self.problem(where, "is no place on Earth", fix)
        return None

    def circle(self, raw: Any, where: str) -> Area | None:
        units = {"km": 1.0, "miles": KM_PER_MILE}
        unit = next((word for word in units if isinstance(raw, Mapping) and word in raw), None)
        if unit is None or raw.keys() != {"lat", "lon", unit}:
            self.problem(where, "is no circle", "write {lat: 30.2672, lon: -97.7431, km: 10}, or miles for km")
            return None
        centre, radius = self.degrees((raw["lat"], raw["lon"]), where), _number(raw[unit])
        if radius is None or not 0 < float(radius) * units[unit] <= MAX_KM:
            self.problem(f"{where}.{unit}", "is no usable distance", f"write a number above 0, at most {MAX_KM} km")
        elif centre is not None:
            return Circle(centre, float(radius) * units[unit])
        return None

    def polygon(self, raw: Any, where: str) -> Area | None:
        if not isinstance(raw, list | tuple) or not 3 <= len(raw) <= MAX_POINTS:
            fix = f"write 3 to {MAX_POINTS} corners as [[lat, lon], [lat, lon], ..]"
            self.problem(where, "is not a list of corners", fix)
            return None
        corners = [self.degrees(pair, f"{where}[{at}]") for at, pair in enumerate(raw)]
        known = [corner for corner in corners if corner is not None]
        if len(known) < len(corners):
            return None
        found = polygon(known)
        if isinstance(found, str):
            self.problem(where, found, "list its corners in order round it; split what crosses the 180th meridian")
            return None
        return found

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
            if kind.zoned and number_value not in _HOURS:
                self.problem(where, "is no hour of the day", "write a whole number from 0 to 23")
            elif number_value.is_finite() and abs(number_value) < Decimal(10) ** 30:
                return slot, number_value
            else:
                self.problem(where, "is not a usable number", "write a finite number below 10^30")
        else:
            if len(raw) <= MAX_TEXT and (text := kind.normal(raw)):
                return slot, text
            what = "is no day of the week" if kind.zoned else "is an empty or endless text"
            self.problem(where, what, f"write {kind.wants}, at most {MAX_TEXT} characters")
        return slots[0], None
