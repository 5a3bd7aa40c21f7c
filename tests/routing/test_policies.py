"""What an absence costs: every policy for every reason, against the algorithm in fractions; and the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest

from routing import ledger, rotation
from routing.decide import Bench, Case, Decision, Outcome, Plan, QueueState
from routing.ledger import Check, Entry, Kind
from routing.model import Agent, Caps, Flag, Holidays, Hours, Lead, Leave, Load, Quiet, Reason, Skip, SkipPolicy
from routing.rotation import Line, Place
from routing.rules import RuleSet
from routing.skips import DAYS, parse_hours

QUEUE = UUID(int=100)
A, B, C = (UUID(int=n) for n in (1, 2, 3))
NOW = datetime(2026, 7, 2, 15, 0, tzinfo=UTC)
PLAN = Plan(1, frozenset(Flag), RuleSet([]), QUEUE, {QUEUE: "All"})
HERE = {who: Agent(who, str(who.int), f"Agent {who.int}", zone="America/Chicago") for who in (A, B, C)}


@dataclass(frozen=True)
class Away:
    """How B is away for one reason: what of the agent, of the case and of their load says so."""

    agent: Mapping[str, Any] = field(default_factory=dict)
    case: Mapping[str, Any] = field(default_factory=dict)
    load: Load | None = None


AWAY = {
    Skip.DEACTIVATED: Away({"active": False}),
    Skip.PAUSED: Away({"paused_by_admin": True}),
    Skip.LEAVE: Away({"leave": (Leave(datetime(2026, 7, 2), datetime(2026, 7, 3)),)}),
    Skip.HOLIDAY: Away({"holidays": Holidays(extra=MappingProxyType({NOW.date(): "Office closed"}))}),
    Skip.OFF_HOURS: Away({"hours": Hours({})}),
    Skip.AT_CAP: Away({"caps": Caps(day=2)}, load=Load(day=2)),
    Skip.ALREADY_ON_LEAD: Away(case={"holders": frozenset({B})}),
    Skip.DECLINED: Away(case={"declined": frozenset({B})}),
}


def serve(line: Line, away: Away | None, policies: Mapping[Skip, SkipPolicy]) -> tuple[Decision, Line]:
    """One lead, with B here or away."""
    agents = HERE | {B: replace(HERE[B], **(away.agent if away else {}))}
    state = QueueState(QUEUE, "All", line, policies=policies)
    bench = Bench(PLAN, agents, {QUEUE: state}, NOW, {B: away.load} if away and away.load else {})
    decision = bench.decide(Case(UUID(int=9), Lead("9"), **(away.case if away else {})))
    return decision, bench.lines[QUEUE]


def by_the_book(weights: Mapping[UUID, int], away_at: Sequence[bool], policy: SkipPolicy) -> list[UUID]:
    """Who gets each lead, by the published algorithm in fractions of a turn."""
    tag, last, floor, got, absent = (
        dict.fromkeys(weights, Fraction(0)),
        dict.fromkeys(weights, 0),
        Fraction(0),
        [],
        False,
    )
    for turn, b_away in enumerate(away_at, 1):
        if absent and not b_away and policy is SkipPolicy.AVERAGE:
            tag[B] = max(tag[B], floor)
        absent = b_away
        running = [who for who in weights if who != B or not b_away or policy is SkipPolicy.LOSE_TURN]
        while True:
            start = {who: max(tag[who], floor) for who in running}
            mean = sum(weights[who] * start[who] for who in running) / Fraction(sum(weights[who] for who in running))
            due = [who for who in running if start[who] <= mean]
            winner = min(due, key=lambda who: (tag[who] + Fraction(1, weights[who]), last[who], who.int))
            tag[winner] = start[winner] + Fraction(1, weights[winner])
            if winner != B or not b_away:
                break
        floor, last[winner] = min(start.values()), turn
        got.append(winner)
    return got


LEADS = [False] * 2 + [True] * 9 + [False] * 9 + [True, False, True, True, False, False, False, False, False, False]
WEIGHTS = {A: 3, B: 1, C: 2}


def play(policy: SkipPolicy, reason: Skip, weights: Mapping[UUID, int] = WEIGHTS) -> tuple[list[Decision], Line, Line]:
    places = tuple(Place(who, rank, weight) for rank, (who, weight) in enumerate(weights.items()))
    first = line = Line(position=0, floor=0, places=places)
    decisions = []
    for away in LEADS:
        decision, line = serve(line, AWAY[reason] if away else None, {reason: policy})
        decisions.append(decision)
    return decisions, first, line


@pytest.mark.parametrize("reason", AWAY, ids=str)
@pytest.mark.parametrize("policy", SkipPolicy, ids=str)
@pytest.mark.parametrize("weights", [WEIGHTS, {A: 1, B: 1, C: 1}, {A: 1, B: 5, C: 1}], ids=str)
def test_every_policy_for_every_reason(policy: SkipPolicy, reason: Skip, weights: Mapping[UUID, int]) -> None:
    decisions, first, line = play(policy, reason, weights)
    assert [decision.agent_id for decision in decisions] == by_the_book(weights, LEADS, policy)
    for away, decision in zip(LEADS, decisions, strict=True):
        (path,) = decision.record["paths"]
        told = [(out["agent"], out["skip"]) for out in path["unavailable"]]
        assert told == ([(str(B), reason.value)] if away else [])
        assert bool(path.get("lost")) <= (away and policy is SkipPolicy.LOSE_TURN)
    # The ledger alone leads to the same line.
    book = [Entry(1, Kind.CHECKPOINT, NOW, "test", None, ledger.checkpoint(first))]
    book += [Entry(n, Kind.TURN, NOW, "test", None, d.turn or {}) for n, d in enumerate(decisions, 2)]
    assert ledger.replay(book, line).problems == ()


def test_the_policies_differ() -> None:
    def played(policy: SkipPolicy) -> list[UUID | None]:
        return [d.agent_id for weights in (WEIGHTS, {A: 5, B: 1, C: 1}) for d in play(policy, Skip.LEAVE, weights)[0]]

    keep, lose, average = map(played, (SkipPolicy.KEEP_PLACE, SkipPolicy.LOSE_TURN, SkipPolicy.AVERAGE))
    assert keep != lose != average != keep


def test_a_reason_without_a_policy_costs_nothing() -> None:
    policies = {Skip.LEAVE: SkipPolicy.LOSE_TURN}
    line = rotation.new_line([(A, 1), (B, 1), (C, 1)])
    got = []
    for away in (None, AWAY[Skip.PAUSED], AWAY[Skip.PAUSED], None, None):
        decision, line = serve(line, away, policies)
        got.append(decision.agent_id)
    assert got == [A, C, A, B, C]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.pop("average"),
        lambda data: data.update(average=[]),
        lambda data: data.update(average=[str(C)]),
    ],
)
def test_a_ledger_that_forgets_who_was_away_does_not_replay(spoil: Callable[[dict[str, Any]], object]) -> None:
    decisions, first, line = play(SkipPolicy.AVERAGE, Skip.LEAVE)
    turns = [dict(d.turn or {}) for d in decisions]
    for turn in turns[2:11]:  # B's first absence
        spoil(turn)
    book = [Entry(1, Kind.CHECKPOINT, NOW, "test", None, ledger.checkpoint(first))]
    book += [Entry(n, Kind.TURN, NOW, "test", None, data) for n, data in enumerate(turns, 2)]
    (problem, *_) = ledger.replay(book, line).problems
    assert problem.check in (Check.OTHER_OUTCOME, Check.REFUSED, Check.OTHER_PICK, Check.OTHER_STATE)


def test_a_checkpoint_keeps_who_is_away() -> None:
    line = rotation.new_line([(A, 1), (B, 1)])
    _, line = rotation.pick(line, [A], average=[B])
    assert [place.averaging for place in line.places] == [False, True]
    assert ledger.line_of(ledger.checkpoint(line)) == line
    _, line = rotation.pick(line, [A, B])
    assert [place.averaging for place in line.places] == [False, False]
    # A line of before this policy is written as it always was.
    assert "averaging" not in str(ledger.checkpoint(rotation.new_line([(A, 1)])))


# -- quiet hours, caps: as far as they are a matter of one decision --------------------------------------------


def test_a_quiet_queue_holds_whoever_is_free() -> None:
    line = rotation.new_line([(A, 1), (B, 1)])
    quiet = Quiet(parse_hours({DAYS[3]: ["09:00-11:00"]}), "America/Chicago")  # NOW is 10:00 there
    bench = Bench(PLAN, HERE, {QUEUE: QueueState(QUEUE, "All", line, quiet=quiet)}, NOW)
    decision = bench.decide(Case(UUID(int=9), Lead("9")))
    assert (decision.outcome, decision.reason, decision.queue_id) == (Outcome.HELD, Reason.QUIET_HOURS, QUEUE)
    assert decision.record["paths"][0]["detail"] == "until Thu 2 Jul 2026 11:00 America/Chicago"
    assert bench.lines[QUEUE] == line


def test_what_a_unit_assigns_counts_at_once() -> None:
    agents = {who: replace(HERE[who], caps=Caps(day=2, open=3)) for who in HERE}
    state = QueueState(QUEUE, "All", rotation.new_line([(A, 1), (B, 1), (C, 1)]))
    bench = Bench(PLAN, agents, {QUEUE: state}, NOW, dict.fromkeys(agents, Load()))
    got = [bench.decide(Case(UUID(int=n), Lead(str(n)))).agent_id for n in range(8)]
    assert got == [A, B, C, A, B, C, None, None]


def test_a_lead_that_ends_makes_room_under_the_cap_on_open_leads() -> None:
    agents = {who: replace(HERE[who], caps=Caps(open=1)) for who in HERE}
    state = QueueState(QUEUE, "All", rotation.new_line([(A, 1)]))
    bench = Bench(PLAN, agents, {QUEUE: state}, NOW, {A: Load(open=1)})
    assert bench.decide(Case(UUID(int=1), Lead("1"))).outcome is Outcome.HELD
    bench.freed(A)
    assert bench.decide(Case(UUID(int=2), Lead("2"))).agent_id == A
    assert bench.decide(Case(UUID(int=3), Lead("3"))).outcome is Outcome.HELD


@pytest.mark.parametrize(
    ("caps", "load", "says"),
    [
        (Caps(hour=2, zone="America/Chicago"), Load(hour=2),
         "got 2 leads of 2 this hour; counts anew from Thu 2 Jul 2026 11:00 America/Chicago"),
        (Caps(day=1, zone="Asia/Tokyo"), Load(day=3),
         "got 3 leads of 1 today; counts anew from Sat 4 Jul 2026 00:00 Asia/Tokyo"),
        (Caps(week=5), Load(week=5), "got 5 leads of 5 this week; counts anew from Mon 6 Jul 2026 00:00 UTC"),
        (Caps(open=4), Load(open=4), "holds 4 open leads of 4; close or reassign some, or raise the cap"),
    ],
)  # fmt: skip
def test_a_cap_says_which_it_is_and_when_it_ends(caps: Caps, load: Load, says: str) -> None:
    agents = HERE | {A: replace(HERE[A], caps=caps)}
    state = QueueState(QUEUE, "All", rotation.new_line([(A, 1)]))
    decision = Bench(PLAN, agents, {QUEUE: state}, NOW, {A: load}).decide(Case(UUID(int=1), Lead("1")))
    assert decision.record["paths"][0]["unavailable"] == [{"agent": str(A), "skip": "at_cap", "detail": says}]
