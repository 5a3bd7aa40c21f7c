"""Which rules of many match one lead, without trying those that cannot.

Two things make it fast. A rule matches only when its condition is *true*, and conditions have no ``not`` above a test:
so unknown may count as false, and a condition becomes a plain function of yes and no. And most rules demand a value of
one field (``source`` is this, ``zip`` is one of these): they are found by that value in an index, and tried only for
leads that have it.

What matches, and in which order, is exactly what trying every rule by :class:`routing.verdicts.Condition` says; a
property test holds the two against each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from routing.fields import NUMBERS, TEXTS, Facts
from routing.verdicts import Codes, Node, Test, tests_of

Holds = Callable[[Facts], bool]
#: What a lead must have for a rule to match: (field, slot, value); the value is None where any will do.
Key = tuple[str, int, object]
_ANY = None
_COMMON = 1_000_000  # how dear a key is that says only that the field is filled


def holds(node: Node) -> Holds:
    """Whether a condition is true, as a function of a lead's facts."""
    if isinstance(node, Test):
        return _test(node)
    # Any order will do. What an index asks comes last: most leads for which the rule is tried have that value.
    parts = [holds(part) for part in sorted(node.parts, key=_by_value)]
    if len(parts) == 1:
        return parts[0]
    if node.every:

        def every(facts: Facts) -> bool:
            for part in parts:  # noqa: SIM110 - a generator costs more than most conditions
                if not part(facts):
                    return False
            return True

        return every

    def some(facts: Facts) -> bool:
        for part in parts:  # noqa: SIM110 - likewise
            if part(facts):
                return True
        return False

    return some


def _by_value(node: Node) -> bool:
    return isinstance(node, Test) and isinstance(node.operand, frozenset) and not node.negated


def _test(test: Test) -> Holds:
    name, slot, match, negated = test.fact, test.slot, test.match, test.negated
    if test.operand is None:
        return lambda facts: match(facts[name]) is not negated
    if not negated and isinstance(test.operand, frozenset):
        among = test.operand
        return lambda facts: not among.isdisjoint(facts[name].values[slot])
    if not negated and isinstance(test.operand, tuple) and slot == NUMBERS:
        low, high = test.operand

        def between(facts: Facts) -> bool:
            for n in facts[name].values[NUMBERS]:  # noqa: SIM110 - likewise
                if (low is None or low <= n) and (high is None or n <= high):
                    return True
            return False

        return between

    if not negated and isinstance(test.operand, str) and test.operator == "contains":
        part = test.operand

        def contains(facts: Facts) -> bool:
            fact = facts[name]
            for text in fact.values[TEXTS]:  # noqa: SIM110 - likewise
                if (part == text) if fact.listed else (part in text):
                    return True
            return False

        return contains
    if not negated and isinstance(test.operand, Codes):
        covers = test.operand.covers

        def in_range(facts: Facts) -> bool:
            for text in facts[name].values[TEXTS]:  # noqa: SIM110 - likewise
                if covers(text):
                    return True
            return False

        return in_range

    def compare(facts: Facts) -> bool:
        fact = facts[name]
        return bool(fact.values[slot]) and match(fact) is not negated

    return compare


def _demands(node: Node) -> list[frozenset[Key]]:
    """Sets of keys, of each of which a lead that makes `node` true has one. None at all: nothing is demanded."""
    if isinstance(node, Test):
        if node.operand is None:
            return []
        if isinstance(node.operand, frozenset) and not node.negated:
            return [frozenset((node.fact, node.slot, value) for value in node.operand)]
        return [frozenset([(node.fact, node.slot, _ANY)])]
    below = [_demands(part) for part in node.parts]
    if node.every:
        return [demand for demands in below for demand in demands]
    if not all(below):
        return []
    # One of the parts is true, so what the least demanding says of each, taken together, holds.
    return [frozenset().union(*(min(demands, key=_width) for demands in below))]


def _width(demand: frozenset[Key]) -> int:
    return sum(_COMMON if value is _ANY else 1 for _, _, value in demand)


class Matcher:
    """The conditions of one role, in the order in which they are tried."""

    def __init__(self, roots: Sequence[Node]) -> None:
        self._holds = [holds(root) for root in roots]
        demands = [_demands(root) for root in roots]
        common = Counter(key for one in demands for key in set().union(*one))
        self._always: list[int] = []
        self._index: dict[tuple[str, int], dict[object, list[int]]] = {}
        for number, choices in enumerate(demands):
            if not choices:
                self._always.append(number)
                continue
            # The demand that fewest rules share sends the fewest leads here.
            rarest = min(choices, key=lambda demand: sum(common[k] + (_COMMON if k[2] is _ANY else 0) for k in demand))
            for name, slot, value in rarest:
                self._index.setdefault((name, slot), {}).setdefault(value, []).append(number)

    def candidates(self, facts: Facts) -> list[int]:
        """The numbers of the rules that may match, in order; all others cannot."""
        lists = [self._always] if self._always else []
        for (name, slot), by_value in self._index.items():
            if values := facts[name].values[slot]:
                lists += [found for value in values if (found := by_value.get(value))]
                if rest := by_value.get(_ANY):
                    lists.append(rest)
        if len(lists) < 2:
            return lists[0] if lists else []
        return sorted(set().union(*lists))

    def matches(self, facts: Facts) -> Iterator[int]:
        """The numbers of the rules that match, in order, as far as the caller asks."""
        for number in self.candidates(facts):
            if self._holds[number](facts):
                yield number


class HiddenTests:
    """The tests of one field whose value must not be kept: which of them a lead passed is kept in its stead.

    A test is named by its mark. Given with the number of the first rule that has it, in order of that number.
    """

    def __init__(self, roots: Sequence[Node], fact: str) -> None:
        first: dict[str, tuple[int, Test]] = {}
        for number, root in enumerate(roots):
            for test in tests_of(root):
                if test.fact == fact and test.operand is not None:
                    first.setdefault(test.mark, (number, test))
        self._by_value: dict[tuple[int, object], list[tuple[int, str]]] = {}
        self._parts: list[tuple[int, str, str]] = []
        self._others: list[tuple[int, str, Test]] = []
        for mark, (number, test) in first.items():
            if isinstance(test.operand, frozenset):
                for value in test.operand:
                    self._by_value.setdefault((test.slot, value), []).append((number, mark))
            elif isinstance(test.operand, str) and test.operator == "contains":
                self._parts.append((number, mark, test.operand))
            else:
                self._others.append((number, mark, test))

    def passed(self, facts: Facts, fact: str, tried: int) -> list[str]:
        """The marks of those among the tests of the first `tried` rules that the lead passes, without their ``not``."""
        found = facts[fact]
        marks: set[str] = set()
        for slot, values in enumerate(found.values):
            for value in values:
                marks.update(mark for number, mark in self._by_value.get((slot, value), ()) if number < tried)
        for text in found.values[TEXTS]:
            if found.listed:
                marks.update(mark for number, mark, part in self._parts if part == text and number < tried)
            else:
                marks.update(mark for number, mark, part in self._parts if part in text and number < tried)
        for number, mark, test in self._others:
            if number >= tried:
                break
            if test.match(found):
                marks.add(mark)
        return sorted(marks)
