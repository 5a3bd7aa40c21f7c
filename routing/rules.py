"""Which rule wins: conditions over a lead's fields, and an explicit order.

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
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from routing.model import Lead, Role, Rule

MAX_DEPTH = 16  # nested conditions
MAX_TESTS = 500  # tests in one condition
MAX_VALUES = 2_000  # values of one `one_of`
MAX_TEXT = 500  # characters of one text in a rule
MAX_WHY = 12  # records that explain one verdict

Json = str | int | bool | None | list["Json"] | dict[str, "Json"]
Operand = frozenset[Any] | tuple[Decimal | None, Decimal | None] | str | None
TEXTS: Final = 0  # what a test compares: the index into Fact.values
NUMBERS: Final = 1
FLAGS: Final = 2
_WORDS = ("text", "a number", "true or false")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a configuration: where, what, and how to fix it."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


class ConfigurationProblems(ValueError):
    """A configuration cannot be used. ``problems`` holds everything that is wrong with it, not only the first thing."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class ConditionProblems(ConfigurationProblems):
    """Rules or their conditions cannot be used."""


# -- facts: a lead's fields, ready to compare -----------------------------------------------------------------
# Letters that Unicode does not decompose, although people type them without their stroke, or in two.
_PLAIN = str.maketrans({"ı": "i", "ł": "l", "ø": "o", "đ": "d", "ħ": "h", "ŧ": "t", "æ": "ae", "œ": "oe"})
_NUMBER = re.compile(r"[+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?")


def normal_text(text: str) -> str:
    """`text` without case, accents and surplus white space: ``" STRASSE  Łódź"`` and ``"straße lodz"`` are one.

    Works letter by letter, and is idempotent.
    """
    if not text.isascii():
        parts = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in parts if not unicodedata.combining(c))
    return " ".join(text.casefold().translate(_PLAIN).split())


def normal_phone(text: str) -> str:
    """The digits of a phone number, after a plus if it starts with one. No country code is guessed."""
    plain = unicodedata.normalize("NFKD", text).strip()
    digits = "".join(c for c in plain if "0" <= c <= "9")
    return f"+{digits}" if digits and plain.startswith("+") else digits


@dataclass(frozen=True, slots=True)
class FieldKind:
    """How a field is read from the lead's ``attribute``: what its tests may compare (``slots``), whether it is one
    value only (``single``), whether it is a list of entries (``listed``), and whether its value tells nothing
    personal and may stand in a decision (``shown``)."""

    attribute: str
    slots: tuple[int, ...] = (TEXTS,)
    single: bool = True
    listed: bool = False
    shown: bool = False
    normal: Callable[[str], str] = normal_text


_SHOWN = ("source", "type", "stage", "city", "state", "zip", "form", "campaign", "language")
_CUSTOM = FieldKind("custom", slots=(TEXTS, NUMBERS, FLAGS), single=False)
FIELDS: Mapping[str, FieldKind] = MappingProxyType(
    {name: FieldKind(name, shown=name in _SHOWN) for name in (*_SHOWN, "country", "street")}
    | {
        "price": FieldKind("price", slots=(NUMBERS,), shown=True),
        "tags": FieldKind("tags", single=False, listed=True, shown=True),
        "email": FieldKind("emails", single=False),
        "phone": FieldKind("phones", single=False, normal=normal_phone),
    }
)


def field_kind(name: str) -> FieldKind | None:
    """The kind of the field `name`, ``custom.<key>`` included (the key exactly as in the CRM). None: no such field."""
    return _CUSTOM if name.startswith("custom.") and len("custom.") < len(name) <= 200 else FIELDS.get(name)


class Fact(NamedTuple):
    """One field of one lead: its ``values`` by slot. ``present`` without values means that no test can compare them."""

    values: tuple[tuple[str, ...], tuple[Decimal, ...], tuple[bool, ...]] = ((), (), ())
    present: bool = False
    listed: bool = False
    shown: Json = None


class Facts:
    """The fields of one lead, each normalised once, when the first test asks for it."""

    __slots__ = ("_facts", "_lead")

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._facts: dict[str, Fact] = {}

    def get(self, name: str) -> Fact:
        """The field `name`. Raises KeyError for a name that :func:`field_kind` does not know."""
        fact = self._facts.get(name)
        if fact is None:
            fact = self._facts[name] = self._read(name)
        return fact

    def _read(self, name: str) -> Fact:
        kind = _CUSTOM if name.startswith("custom.") else FIELDS[name]
        raw = getattr(self._lead, kind.attribute)
        if kind is _CUSTOM:
            raw = raw.get(name.removeprefix("custom."))
        values = raw if isinstance(raw, tuple | list) else (raw,)
        texts: list[str] = []
        numbers: list[Decimal] = []
        flags: list[bool] = []
        strange = False
        for value in values:
            if isinstance(value, str):
                if text := kind.normal(value):
                    texts.append(text)
                if kind is _CUSTOM and _NUMBER.fullmatch(value.strip()):
                    numbers.append(Decimal(value.strip()))
            elif isinstance(value, bool):
                flags.append(value)
            elif isinstance(value, int | float | Decimal):
                if (number := _decimal(value)).is_finite():
                    numbers.append(number)
            elif value is not None:
                strange = True
        present = bool(texts or numbers or flags or strange)
        listed = kind.listed or (kind is _CUSTOM and values is raw)
        shown = _shown(raw) if kind.shown and present else None
        return Fact((tuple(texts), tuple(numbers), tuple(flags)), present, listed, shown)


def _decimal(value: float | Decimal) -> Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def _shown(value: Any) -> Json:
    """`value` as short JSON: long texts and lists are cut, numbers are text because JSON would round them."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        more = [f"... and {len(value) - 8} more"] if len(value) > 8 else []
        return [*map(_shown, value[:8]), *more]
    text = value if isinstance(value, str) else str(_decimal(value)) if isinstance(value, int | float) else str(value)
    return text if len(text) <= 100 else text[:100] + "..."


# -- conditions -----------------------------------------------------------------------------------------------
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


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled condition. ``root`` has no ``not``: De Morgan's laws, which hold for three values as well, have moved
    each one into the tests below it."""

    root: Node

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
                return Test(str(name), str(operator), operand, slot, negated, _shown(raw[operator]), match)
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
            number_value = _decimal(raw)
            if number_value.is_finite() and abs(number_value) < Decimal(10) ** 30:
                return slot, number_value
            self.problem(where, "is not a usable number", "write a finite number below 10^30")
        else:
            if len(raw) <= MAX_TEXT and (text := kind.normal(raw)):
                return slot, text
            needs = "digits" if kind.normal is normal_phone else "letters or digits"
            self.problem(where, "is an empty or endless text", f"write {needs}, at most {MAX_TEXT} characters")
        return slots[0], None


# -- the order ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Tried:
    """One rule that was tried on a lead and what decided: the tests that failed it, or those that made it match."""

    rule: Rule
    matched: bool
    why: tuple[Why, ...]
    omitted: int = 0

    def as_json(self) -> dict[str, Json]:
        """For the decision's record. Holds nothing that tells who the lead is."""
        record: dict[str, Json] = {"rule": self.rule.name, "precedence": self.rule.precedence, "matched": self.matched}
        record["why"] = [why.as_json() for why in self.why]
        return record | {"omitted": self.omitted} if self.omitted else record


class RuleSet:
    """A tenant's rules, compiled, in order of precedence within each role; never of creation or of the sequence given.

    Raises ConditionProblems with every problem of every rule; two rules of one role with the same precedence (the
    order must be total) or the same name (a decision names its rule) are problems too.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        problems: list[Problem] = []
        taken: set[tuple[Role, str | int]] = set()
        self._compiled: dict[Role, tuple[tuple[Rule, Condition], ...]] = {}
        for rule in sorted(rules, key=lambda rule: rule.precedence):
            where = f"rules[{rule.name}]"
            for what in ("name", "precedence"):
                if (key := (rule.role, getattr(rule, what))) in taken:
                    fix = f"give each rule of the role {rule.role} its own {what}"
                    problems.append(Problem(f"{where}.{what}", "is also that of another rule", fix))
                taken.add(key)
            try:
                condition = compile_condition(rule.when, f"{where}.when")
            except ConditionProblems as error:
                problems.extend(error.problems)
            else:
                self._compiled[rule.role] = (*self.compiled(rule.role), (rule, condition))
        if problems:
            raise ConditionProblems(problems)

    def compiled(self, role: Role) -> tuple[tuple[Rule, Condition], ...]:
        """The rules of `role` with their compiled conditions, in the order in which they are tried."""
        return self._compiled.get(role, ())

    def tries(self, lead: Lead | Facts, role: Role) -> Iterator[Tried]:
        """Try every rule of `role` on `lead`, in order, as far as the caller asks."""
        facts = lead if isinstance(lead, Facts) else Facts(lead)
        for rule, condition in self.compiled(role):
            verdict = condition.test(facts)
            yield Tried(rule, verdict.value is True, verdict.why, verdict.omitted)

    def matches(self, lead: Lead | Facts, role: Role) -> Iterator[tuple[Rule, tuple[Tried, ...]]]:
        """Each rule that matches, in order, with what was tried since the one before, itself last: to go on when the
        targets of a rule fall through. What was tried after the last match is :meth:`failed_tail`."""
        tries: list[Tried] = []
        for tried in self.tries(lead, role):
            tries.append(tried)
            if tried.matched:
                yield tried.rule, tuple(tries)
                tries.clear()

    def failed_tail(self, lead: Lead | Facts, role: Role) -> tuple[Tried, ...]:
        """The tries after the last rule that matches; all of them when none does."""
        tries: list[Tried] = []
        for tried in self.tries(lead, role):
            tries.append(tried)
            if tried.matched:
                tries.clear()
        return tuple(tries)

    def first_match(self, lead: Lead | Facts, role: Role) -> tuple[Rule | None, tuple[Tried, ...]]:
        """The rule that wins for `lead` in `role`, or None, and every rule that was tried on the way."""
        tries: list[Tried] = []
        for tried in self.tries(lead, role):
            tries.append(tried)
            if tried.matched:
                return tried.rule, tuple(tries)
        return None, tuple(tries)
