"""What an admin should know about rules on save: which can never win, and which are decided by their order only.

The analysis is sound and conservative: "implies" and "never both" are claimed only when they hold for every possible
lead, so a rule that is called shadowed truly is, while a shadowed one may go unnoticed. It works on compiled
conditions, which have no ``not`` above a test, and its work is bounded. Nothing here changes an order: it suggests.

A rule with no other target than who has the person or the household already lets a lead go on when nobody has, so it
shadows nothing and may stand before more specific rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from routing.fields import CUSTOM, Fact, field_kind
from routing.model import Role, Rule, TargetKind
from routing.places import Circle, Polygon, kilometres
from routing.rules import RuleSet
from routing.verdicts import Codes, Condition, Group, Node, Test

MAX_STEPS = 5_000_000  # comparisons of two conditions or tests, about three seconds
MAX_OVERLAPS = 100  # pairs listed
_ROUNDING_KM = 0.001  # what the computation of a distance may be off, and far more


class NoteKind(StrEnum):
    """What a note says."""

    NEVER_MATCHES = "never_matches"
    SHADOWED = "shadowed"
    OVERLAP = "overlap"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Note:
    """One finding about ``rule``, and the ``other`` rule that causes it (None: no single one). ``text`` ends with what
    to do."""

    kind: NoteKind
    rule: str
    other: str | None
    text: str


def lint_rules(rules: Sequence[Rule]) -> list[Note]:
    """Notes on `rules`, role by role in order of precedence. Raises ConditionProblems like RuleSet.

    An overlap is a pair that one lead may match, with different targets, of which neither is a special case of the
    other: an exception before its general rule is how it should be, and no note.
    """
    rule_set, prover, notes = RuleSet(rules), _Prover(), list[Note]()
    for role in Role:
        found, compiled = list[Note](), rule_set.compiled(role)
        try:
            for note in _lint(compiled, prover):
                found.append(note)
        except _TooMuch:
            text = f"the {role} rules are too many or too long to compare them all; shorten their conditions"
            notes.append(Note(NoteKind.UNFINISHED, compiled[-1][0].name, None, text))
        overlaps = [note for note in found if note.kind is NoteKind.OVERLAP]
        notes += [note for note in found if note.kind is not NoteKind.OVERLAP] + overlaps[:MAX_OVERLAPS]
        left_out = len(overlaps[MAX_OVERLAPS:])
        if left_out:
            text = f"{left_out} more overlaps of {role} rules are not listed; narrow their conditions"
            notes.append(Note(NoteKind.UNFINISHED, overlaps[MAX_OVERLAPS].rule, None, text))
    return notes


def suggest_order(rules: Sequence[Rule]) -> list[str]:
    """The names of `rules` with specific rules before the general ones that would take all their leads.

    Role by role; otherwise in the present order of precedence, which this never changes by itself. Raises
    ConditionProblems like RuleSet.
    """
    rule_set, prover, names = RuleSet(rules), _Prover(), list[str]()
    for role in Role:
        compiled = rule_set.compiled(role)
        try:
            names += _specific_first(compiled, prover)
        except _TooMuch:
            names += [rule.name for rule, _ in compiled]
    return names


def _lint(compiled: Sequence[tuple[Rule, Condition]], prover: _Prover) -> Iterator[Note]:
    living: list[tuple[Rule, Node]] = []
    for rule, condition in compiled:
        root = condition.root
        if prover.never(root):
            text = "no lead can fulfil this condition; correct it or remove the rule"
            yield Note(NoteKind.NEVER_MATCHES, rule.name, None, text)
            continue
        final = [(before, other) for before, other in living if not _falls_through(before)]
        shadow = next((before.name for before, other in final if prover.implies(root, other)), None)
        if shadow is not None or prover.implies(root, Group(False, tuple(other for _, other in final))):
            who = f"{shadow!r} stands before it and takes" if shadow else "the rules before it together take"
            text = f"{who} every lead that it matches; move it up or remove it"
            yield Note(NoteKind.SHADOWED, rule.name, shadow, text)
            continue
        for before, other in living:
            if before.targets != rule.targets and prover.overlap(other, root):
                text = f"a lead may match both, then {before.name!r} wins by its place alone; check that it should"
                yield Note(NoteKind.OVERLAP, rule.name, before.name, text)
        living.append((rule, root))


def _falls_through(rule: Rule) -> bool:
    known = (TargetKind.EXISTING_OWNER, TargetKind.SAME_HOUSEHOLD)
    return all(target.kind in known for target in rule.targets)


def _specific_first(compiled: Sequence[tuple[Rule, Condition]], prover: _Prover) -> list[str]:
    roots = {rule.name: condition.root for rule, condition in compiled}
    first: dict[str, list[str]] = {rule.name: [] for rule, _ in compiled}  # the special cases of each general rule
    for general, _ in compiled:
        for name, root in roots.items():
            a, b = root, roots[general.name]
            special = not _falls_through(general) and not prover.never(a) and prover.implies(a, b)
            if special and not prover.implies(b, a):
                first[general.name].append(name)
    order: list[str] = []
    left = dict.fromkeys(roots)
    while left:
        pick: str | None = next(iter(left))
        path: list[str] = []
        while pick is not None:
            path.append(pick)
            pick = next((name for name in first[path[-1]] if name in left and name not in path), None)
        order.append(path[-1])
        del left[path[-1]]
    return order


@dataclass(frozen=True, slots=True)
class Move:
    """A suggestion: ``rule``, now number ``now`` of its role, should stand before ``before``, now number ``where``,
    which is more general and has other leads besides all of those of ``rule``."""

    rule: str
    now: int
    before: str
    where: int


def suggest_moves(rules: Sequence[Rule]) -> list[Move]:
    """What :func:`suggest_order` would change, rule by rule in the suggested order. Raises like it."""
    rule_set, moves = RuleSet(rules), list[Move]()
    suggested = suggest_order(rules)
    for role in Role:
        now = {rule.name: at for at, (rule, _) in enumerate(rule_set.compiled(role), 1)}
        order = [name for name in suggested if name in now]
        for at, name in enumerate(order):
            # Of the rules that it would pass, the first: the others follow from it.
            passed = [other for other in order[at + 1 :] if now[other] < now[name]]
            if passed:
                first = min(passed, key=now.__getitem__)
                moves.append(Move(name, now[name], first, now[first]))
    return moves


class _TooMuch(Exception):
    """The work is larger than its bound."""


class _Prover:
    """Proofs about two conditions. Each answer True is a proof; False means only that none was found."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise _TooMuch

    def implies(self, a: Node, b: Node) -> bool:
        """Every lead for which `a` is true makes `b` true."""
        self.step()
        if isinstance(b, Group) and b.every:
            return all(self.implies(a, part) for part in b.parts)
        if isinstance(a, Group) and not a.every:
            return all(self.implies(part, b) for part in a.parts)
        if isinstance(b, Group) and any(self.implies(a, part) for part in b.parts):
            return True
        if isinstance(a, Group):
            return any(self.implies(part, b) for part in a.parts)
        if isinstance(b, Test):
            return _test_implies(a, b)
        # One of several values may fall under one part of b, another value under another part.
        if isinstance(a.operand, frozenset) and not a.negated and len(a.operand) > 1:
            return all(self.implies(replace(a, operand=frozenset((value,))), b) for value in a.operand)
        return False

    def disjoint(self, a: Node, b: Node) -> bool:
        """No lead makes both true."""
        self.step()
        for one, two in ((a, b), (b, a)):
            if isinstance(one, Group) and not one.every:
                return all(self.disjoint(part, two) for part in one.parts)
        if isinstance(a, Group) and any(self.disjoint(part, b) for part in a.parts):
            return True
        if isinstance(b, Group):
            return any(self.disjoint(a, part) for part in b.parts)
        return isinstance(a, Test) and _tests_disjoint(a, b)

    def never(self, a: Node) -> bool:
        """No lead makes `a` true."""
        self.step()
        if isinstance(a, Test):
            return False
        if not a.every:
            return all(self.never(part) for part in a.parts)
        pairs = ((one, two) for at, one in enumerate(a.parts) for two in a.parts[:at])
        return any(self.never(part) for part in a.parts) or any(self.disjoint(one, two) for one, two in pairs)

    def overlap(self, a: Node, b: Node) -> bool:
        """A lead may make both true, and neither was proved to be a special case of the other."""
        return not (self.disjoint(a, b) or self.implies(a, b) or self.implies(b, a))


def _missing(test: Test) -> bool:
    return test.operand is None and (test.operator == "is_missing") is not test.negated


def _test_implies(a: Test, b: Test) -> bool:
    if a.fact != b.fact:
        return False
    if b.operand is None:  # every other true test of a field needs a value in it
        return _missing(a) is _missing(b)
    if a.operand is None or a.slot != b.slot:
        return False
    if a.negated is b.negated:
        return _inside(b, a) if a.negated else _inside(a, b)
    return b.negated and _single(a.field) and _apart(a, b)


def _tests_disjoint(a: Test, b: Test) -> bool:
    if a.fact != b.fact:
        return False
    if a.operand is None or b.operand is None:
        return _missing(a) is not _missing(b)
    if a.slot != b.slot or (a.negated and b.negated):
        return False
    if a.negated or b.negated:
        return _inside(b, a) if a.negated else _inside(a, b)
    return _single(a.field) and _apart(a, b)


def _single(field: str) -> bool:
    kind = field_kind(field)
    return kind is not None and kind.single


def _holds(test: Test, value: object) -> bool:
    """Whether a field with this one value passes `test` (before its ``not``), whether or not it comes as a list."""
    values = tuple((value,) if slot == test.slot else () for slot in range(4))
    lists = (True, False) if field_kind(test.field) is CUSTOM else (False,)
    return all(test.match(Fact(values, True, listed)) for listed in lists)  # type: ignore[arg-type]


def _inside(a: Test, b: Test) -> bool:
    """Every value that `a` asks for is one that `b` asks for. Both compare the same slot of the same field."""
    one, two = a.operand, b.operand
    if a.operator == b.operator and one == two:
        return True
    if isinstance(one, frozenset):
        return all(_holds(b, value) for value in one)
    if isinstance(one, tuple) and isinstance(two, tuple):
        (low, high), (least, most) = one, two
        return (least is None or (low is not None and least <= low)) and (
            most is None or (high is not None and high <= most)
        )
    if isinstance(one, Codes) and isinstance(two, Codes) and one.length == two.length:
        above = two.low is None or (one.low is not None and two.low <= one.low)
        return above and (two.high is None or (one.high is not None and one.high <= two.high))
    if isinstance(one, Circle) and isinstance(two, Circle):
        return kilometres(one.centre, two.centre) + one.km < two.km - _ROUNDING_KM
    if not isinstance(one, str) or not isinstance(two, str):
        return isinstance(one, tuple) and one[0] is not None and one[0] == one[1] and _holds(b, one[0])
    if b.operator == "starts_with":
        return a.operator == "starts_with" and one.startswith(two)
    if field_kind(a.field) is CUSTOM:  # contains asks for a part of a text, for an entry of a list
        return a.operator == "contains" and one == two
    return two in one


def _apart(a: Test, b: Test) -> bool:
    """No one value is what both ask for. Says nothing of fields with several values."""
    for one, two in ((a, b), (b, a)):
        if isinstance(one.operand, frozenset):
            return not any(_holds(two, value) for value in one.operand)
    if isinstance(a.operand, tuple) and isinstance(b.operand, tuple):
        (low, high), (least, most) = a.operand, b.operand
        return (high is not None and least is not None and high < least) or (
            most is not None and low is not None and most < low
        )
    if isinstance(a.operand, Codes) and isinstance(b.operand, Codes) and a.operand.length == b.operand.length:
        lows = [codes.low for codes in (a.operand, b.operand) if codes.low is not None]
        highs = [codes.high for codes in (a.operand, b.operand) if codes.high is not None]
        return bool(lows and highs) and max(lows) > min(highs)
    if isinstance(a.operand, Circle) and isinstance(b.operand, Circle):
        return kilometres(a.operand.centre, b.operand.centre) > a.operand.km + b.operand.km + _ROUNDING_KM
    if isinstance(a.operand, Polygon) and isinstance(b.operand, Polygon):
        # Their boxes do not meet.
        pairs = ((a.operand, b.operand), (b.operand, a.operand))
        return any(one.high[side] < two.low[side] for one, two in pairs for side in (0, 1))
    if isinstance(a.operand, str) and isinstance(b.operand, str) and a.operator == b.operator == "starts_with":
        return not (a.operand.startswith(b.operand) or b.operand.startswith(a.operand))
    return False
