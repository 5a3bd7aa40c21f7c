"""Which rule wins: the rules of a tenant in an explicit order of precedence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from routing.conditions import Condition, Why, compile_condition
from routing.fields import ConditionProblems, Facts, Json, Problem, field_kind
from routing.model import Lead, Role, Rule


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

    def attributes(self, role: Role) -> frozenset[str]:
        """The attributes of :class:`Lead` that the rules of `role` look at: all that a lead must show for them."""
        fields = {name for _, condition in self.compiled(role) for name in condition.fields}
        return frozenset(kind.attribute for name in fields if (kind := field_kind(name)) is not None)

    def tries(self, lead: Lead | Facts, role: Role, *, start: int = 0) -> Iterator[Tried]:
        """Try the rules of `role` on `lead`, in order from number `start`, as far as the caller asks."""
        facts = lead if isinstance(lead, Facts) else Facts(lead)
        for rule, condition in self.compiled(role)[start:]:
            verdict = condition.test(facts)
            yield Tried(rule, verdict.value is True, verdict.why, verdict.omitted)

    def first_match(self, lead: Lead | Facts, role: Role) -> tuple[Rule | None, tuple[Tried, ...]]:
        """The rule that wins for `lead` in `role`, or None, and every rule that was tried on the way."""
        tries: list[Tried] = []
        for tried in self.tries(lead, role):
            tries.append(tried)
            if tried.matched:
                return tried.rule, tuple(tries)
        return None, tuple(tries)
