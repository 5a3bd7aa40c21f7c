"""Which rule wins: the rules of a tenant in an explicit order of precedence.

Three readers. :class:`Search` finds the rules that match one lead, fast, and makes the small record that a decision
keeps. :meth:`RuleSet.tries` tries every rule and gives each with its reasons: slower, for showing. :func:`retold` does
that from the record of a decision, when the lead has changed since or is not known any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import islice
from typing import Any

from routing.conditions import compile_condition
from routing.fields import NUMBERS, ConditionProblems, Fact, Facts, Json, Problem, fact_of, field_kind, kind_of, shown
from routing.matching import HiddenTests, Matcher
from routing.model import Lead, Role, Rule
from routing.verdicts import Condition, Node, Why, tests_of

MAX_KEPT = 1_000  # characters of a value that the record of a decision keeps


@dataclass(frozen=True, slots=True)
class Tried:
    """One rule that was tried on a lead and what decided: the tests that failed it, or those that made it match."""

    rule: Rule
    matched: bool
    why: tuple[Why, ...]
    omitted: int = 0

    def as_json(self) -> dict[str, Json]:
        """For showing. Holds nothing that tells who the lead is."""
        record: dict[str, Json] = {"rule": self.rule.name, "precedence": self.rule.precedence, "matched": self.matched}
        record["why"] = [why.as_json() for why in self.why]
        return record | {"omitted": self.omitted} if self.omitted else record


class _RoleRules:
    """The rules of one role, compiled, in the order in which they are tried."""

    def __init__(self, compiled: Sequence[tuple[Rule, Condition]]) -> None:
        self.compiled = tuple(compiled)
        roots: list[Node] = [condition.root for _, condition in compiled]
        # By the first rule that looks at them, so that a lead taken by the first rule is not read further.
        self.facts: dict[str, int] = {}
        for number, root in enumerate(roots):
            for test in tests_of(root):
                self.facts.setdefault(test.fact, number)
        self._roots = roots
        self._hidden: dict[str, HiddenTests] = {}

    @cached_property
    def matcher(self) -> Matcher:
        """Finds the rules that match. Made when first asked for: who only tells of the past needs none."""
        return Matcher(self._roots)

    def hidden(self, fact: str) -> HiddenTests:
        """The tests of a field whose value is not kept."""
        if fact not in self._hidden:
            self._hidden[fact] = HiddenTests(self._roots, fact)
        return self._hidden[fact]

    def hide(self, facts: Facts, name: str, tried: int) -> dict[str, Any]:
        """What a record keeps of a field in stead of its value: which tests of the first `tried` rules it passed."""
        filled = [slot for slot, values in enumerate(facts[name].values) if values]
        return {"slots": filled, "passed": self.hidden(name).passed(facts, name, tried)}


class Search:
    """The rules of one role on one lead. What was found is kept, so that asking again costs nothing."""

    def __init__(self, rules: _RoleRules, lead: Lead | Facts) -> None:
        self._rules = rules
        self._facts = lead if isinstance(lead, Facts) else Facts(lead)
        self._found: list[int] = []
        self._rest = rules.matcher.matches(self._facts)

    def matches(self) -> Iterator[tuple[int, Rule]]:
        """The rules that match, in order of precedence, each with how many rules stand before it."""
        at = 0
        while True:
            if at == len(self._found):
                number = next(self._rest, None)
                if number is None:
                    return
                self._found.append(number)
            number = self._found[at]
            yield number, self._rules.compiled[number][0]
            at += 1

    @property
    def count(self) -> int:
        """How many rules there are to try."""
        return len(self._rules.compiled)

    def record(self, tried: int) -> dict[str, Any]:
        """What :func:`retold` needs to tell how each of the first `tried` rules came out. JSON-safe and small.

        Values that tell who the lead is are not in it; instead of them stands which tests they passed.
        """
        facts: dict[str, Any] = {}
        for name, number in self._rules.facts.items():
            if number < tried and (fact := self._facts[name]).present:
                facts[name] = self._kept(name, fact, tried)
        return {"tried": tried, "matched": [n for n in self._found if n < tried], "facts": facts}

    def _kept(self, name: str, fact: Fact, tried: int) -> Any:
        if kind_of(name).shown:
            raw = self._facts.raw(name)
            values = raw if isinstance(raw, tuple | list) else (raw,)
            if sum(len(str(value)) for value in values) <= MAX_KEPT:
                return shown(raw, whole=True)
        kept = self._rules.hide(self._facts, name, tried)
        return kept if fact.shown is None else kept | {"shown": fact.shown}


class _Recorded(Facts):
    """The facts of a lead as the record of a decision has them."""

    __slots__ = ("_record",)

    def __init__(self, record: Mapping[str, Any]) -> None:
        super().__init__(Lead(ref=""))
        self._record = record

    def __missing__(self, name: str) -> Fact:
        kept = self._record.get(name)
        if isinstance(kept, dict):
            values = tuple((None,) if slot in kept["slots"] else () for slot in range(4))
            passed = frozenset(kept["passed"])
            return Fact(values, True, shown=kept.get("shown"), holds=passed)  # type: ignore[arg-type]
        if isinstance(kept, str) and kind_of(name).slots == (NUMBERS,):
            kept = Decimal(kept)  # JSON would have rounded it
        return fact_of(name, kept)


class RuleSet:
    """A tenant's rules, compiled, in order of precedence within each role; never of creation or of the sequence given.

    Raises ConditionProblems with every problem of every rule; two rules of one role with the same precedence (the
    order must be total) or the same name (a decision names its rule) are problems too.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        problems: list[Problem] = []
        taken: set[tuple[Role, str | int]] = set()
        compiled: dict[Role, list[tuple[Rule, Condition]]] = {role: [] for role in Role}
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
                compiled[rule.role].append((rule, condition))
        if problems:
            raise ConditionProblems(problems)
        self._roles = {role: _RoleRules(found) for role, found in compiled.items()}

    def compiled(self, role: Role) -> tuple[tuple[Rule, Condition], ...]:
        """The rules of `role` with their compiled conditions, in the order in which they are tried."""
        return self._roles[role].compiled

    def attributes(self, role: Role) -> frozenset[str]:
        """The attributes of :class:`Lead` that the rules of `role` look at: all that a lead must show for them."""
        fields = {name for _, condition in self.compiled(role) for name in condition.fields}
        return frozenset(a for name in fields if (kind := field_kind(name)) is not None for a in kind.attributes)

    def without_values(self, role: Role, record: Mapping[str, Any]) -> dict[str, Any]:
        """What :meth:`Search.record` kept by these rules, without any value of the lead: :func:`retold` tells of it how
        each rule came out and no more."""
        facts = _Recorded(record["facts"])
        hidden: dict[str, Any] = {}
        for name, kept in record["facts"].items():
            if isinstance(kept, dict):
                hidden[name] = {key: value for key, value in kept.items() if key != "shown"}
            else:
                hidden[name] = self._roles[role].hide(facts, name, record["tried"])
        return {**record, "facts": hidden}

    def search(self, lead: Lead | Facts, role: Role) -> Search:
        """The rules of `role`, about to be tried on `lead`."""
        return Search(self._roles[role], lead)

    def tries(self, lead: Lead | Facts, role: Role) -> Iterator[Tried]:
        """Try the rules of `role` on `lead` one by one, in order, as far as the caller asks."""
        facts = lead if isinstance(lead, Facts) else Facts(lead)
        for rule, condition in self.compiled(role):
            verdict = condition.test(facts)
            yield Tried(rule, verdict.value is True, verdict.why, verdict.omitted)

    def first_match(self, lead: Lead | Facts, role: Role) -> tuple[Rule | None, tuple[Tried, ...]]:
        """The rule that wins for `lead` in `role`, or None, and every rule that was tried on the way, for showing."""
        tries: list[Tried] = []
        for tried in self.tries(lead, role):
            tries.append(tried)
            if tried.matched:
                return tried.rule, tuple(tries)
        return None, tuple(tries)


def retold(rules: RuleSet, role: Role, record: Mapping[str, Any]) -> tuple[Tried, ...] | None:
    """Each rule that a decision tried and what decided it, from what :meth:`Search.record` kept.

    `rules` are those of the decision's configuration version. None when they are not: other rules match than did then.
    """
    tries = tuple(islice(rules.tries(_Recorded(record["facts"]), role), record["tried"]))
    matched = [number for number, tried in enumerate(tries) if tried.matched]
    return tries if len(tries) == record["tried"] and matched == record["matched"] else None
