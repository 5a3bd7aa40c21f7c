"""A rotation over teams, then inside the team: shares at both levels, kept places, and two broken twins that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import ledger, nested, rotation
from routing.decide import Bench, Case, Decision, NeedQueues, Outcome, Plan, QueueState, Waiting
from routing.model import Agent, Flag, Lead, Reason, Role, Rule, Skip, Target, TargetKind
from routing.nested import Sight, Taken
from routing.rules import RuleSet

NOW = datetime(2026, 7, 2, 15, 0, tzinfo=UTC)
OUTER = UUID(int=10_000)

Shape = Sequence[tuple[int, Sequence[int]]]
"""Per team: its weight in the queue, and the weights of its agents."""


def team(number: int) -> UUID:
    return UUID(int=1_000 + number)


def agent(number: int, member: int) -> UUID:
    return UUID(int=100 * (number + 1) + member)


class Office:
    """A queue of teams on a bench, one lead after the other; who is away is said for each."""

    def __init__(self, shape: Shape, flags: frozenset[Flag] = frozenset(Flag)) -> None:
        self.shape = shape
        lines = {OUTER: rotation.new_line([(team(n), weight) for n, (weight, _) in enumerate(shape)])}
        for n, (_, weights) in enumerate(shape):
            lines[team(n)] = rotation.new_line([(agent(n, m), w) for m, w in enumerate(weights)])
        everyone = [place.agent_id for line, of in lines.items() if line != OUTER for place in of.places]
        self.agents = {who: Agent(who, str(who.int), f"Agent {who.int}") for who in everyone}
        queues = {queue_id: QueueState(queue_id, str(queue_id.int), line) for queue_id, line in lines.items()}
        names = {queue_id: str(queue_id.int) for queue_id in lines}
        teams = {OUTER: tuple(team(n) for n, (weight, _) in enumerate(shape) if weight)}
        self.plan = Plan(1, flags, RuleSet([]), OUTER, names, teams=teams if Flag.TEAMS in flags else {})
        self.bench = Bench(self.plan, self.agents, queues, NOW)
        self.leads = 0

    def decide(self, away: Collection[UUID] = (), **case: Any) -> Decision:
        self.bench.agents = {who: replace(one, active=who not in away) for who, one in self.agents.items()}
        self.bench.absent.clear()
        self.leads += 1
        return self.bench.decide(Case(UUID(int=self.leads), Lead(str(self.leads)), **case))


def way(decision: Decision) -> list[UUID]:
    """Whose turn it was, line by line."""
    assert decision.pick is not None
    return [decision.pick.agent_id, *(one.pick.agent_id for one in decision.inner)]


# -- known answers --------------------------------------------------------------------------------------------------


def test_two_teams_two_to_one_then_everybody_inside_in_turn() -> None:
    office = Office([(2, (1, 1)), (1, (1, 1, 1))])
    ways = [way(office.decide()) for _ in range(9)]
    assert [which.int - 1_000 for which, _ in ways] == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert [who.int for which, who in ways if which == team(0)] == [100, 101, 100, 101, 100, 101]
    assert [who.int for which, who in ways if which == team(1)] == [200, 201, 202]


def test_a_team_of_which_nobody_is_there_is_passed_over_and_keeps_its_place_in_both_lines() -> None:
    office = Office([(1, (1, 1)), (1, (1,))])
    north = {agent(0, 0), agent(0, 1)}
    inside = office.bench.lines[team(0)]
    decision = office.decide(away=north)
    assert way(decision) == [team(1), agent(1, 0)]
    outer, passed, taken = decision.record["paths"]
    assert outer["passed_over"] == [str(team(0))]
    assert outer["unavailable"] == [
        {"agent": str(team(0)), "skip": "team_away", "detail": "nobody of the team is available: 2 deactivated"}
    ]
    assert (passed["queue"], passed["within"], passed["why"]) == (str(team(0)), str(OUTER), "nobody_available")
    assert {out["agent"] for out in passed["unavailable"]} == set(map(str, north))
    assert (taken["queue"], taken["within"], taken["position"]) == (str(team(1)), str(OUTER), [0, 1])
    assert office.bench.lines[team(0)] == inside  # no turn of the team
    assert [way(office.decide()) for _ in range(3)] == [
        [team(0), agent(0, 0)], [team(1), agent(1, 0)], [team(0), agent(0, 1)],
    ]  # fmt: skip


def test_nobody_in_any_team_holds_the_lead_and_moves_nothing() -> None:
    office = Office([(1, (1,)), (1, ())])
    lines = dict(office.bench.lines)
    decision = office.decide(away=[agent(0, 0)])
    assert (decision.outcome, decision.reason, decision.queue_id) == (Outcome.HELD, Reason.NOBODY_AVAILABLE, OUTER)
    details = [out["detail"] for out in decision.record["paths"][0]["unavailable"]]
    assert details == ["nobody of the team is available: 1 deactivated", "the team has no members; add some"]
    assert office.bench.lines == lines


def test_off_no_team_takes_a_turn_and_on_again_everybody_stands_where_they_stood() -> None:
    office = Office([(1, (1,)), (1, (1,))])
    assert way(office.decide()) == [team(0), agent(0, 0)]
    lines = dict(office.bench.lines)
    office.bench.plan = replace(office.plan, flags=office.plan.flags - {Flag.TEAMS}, teams={})
    decision = office.decide()
    assert decision.outcome is Outcome.HELD
    assert {out["skip"] for out in decision.record["paths"][0]["unavailable"]} == {Skip.TEAM_AWAY.value}
    assert office.bench.lines == lines
    office.bench.plan = office.plan
    assert way(office.decide()) == [team(1), agent(1, 0)]


def test_while_the_rotation_is_off_the_first_by_rank_of_the_first_team_that_has_somebody() -> None:
    office = Office([(1, (1, 1)), (1, (1,))], frozenset(Flag) - {Flag.ROTATION})
    assert office.decide().agent_id == agent(0, 0)
    assert office.decide(away=[agent(0, 0)]).agent_id == agent(0, 1)
    decision = office.decide(away=[agent(0, 0), agent(0, 1)])
    assert (decision.agent_id, decision.pick, decision.queue_id) == (agent(1, 0), None, OUTER)


def test_a_turn_that_a_team_is_owed_comes_first_and_so_does_the_one_of_its_agent() -> None:
    office = Office([(1, (1, 1)), (1, (1,))])
    assert [way(office.decide())[1] for _ in range(2)] == [agent(0, 0), agent(1, 0)]
    for line, who, owed in ((OUTER, team(0), UUID(int=1)), (team(0), agent(0, 0), UUID(int=2))):
        office.bench.lines[line] = rotation.owe(office.bench.lines[line], owed, who)
    decision = office.decide()
    assert (way(decision), decision.record["how"]) == ([team(0), agent(0, 0)], "owed")
    # Neither line moved by it: the next turns are those that were due.
    assert [way(office.decide())[1] for _ in range(3)] == [agent(0, 1), agent(1, 0), agent(0, 0)]


def test_a_team_of_teams_is_one_line_more() -> None:
    office = Office([(1, (1,)), (1, (1,))])
    region, far = UUID(int=5_000), UUID(int=5_001)
    lines = {
        region: rotation.new_line([(OUTER, 2), (far, 1)]),
        far: rotation.new_line([(agent(7, 0), 1)]),
        **office.bench.lines,
    }
    office.agents[agent(7, 0)] = Agent(agent(7, 0), "far", "Far away")
    queues = {queue_id: QueueState(queue_id, str(queue_id.int), line) for queue_id, line in lines.items()}
    names = {queue_id: queue.name for queue_id, queue in queues.items()}
    teams = {region: (OUTER, far), **office.plan.teams}
    plan = replace(office.plan, default_queue_id=region, queue_names=names, teams=teams)
    assert plan.lines_of([region]) == lines.keys()
    assert region in plan.homes([team(1)])
    office.bench = Bench(plan, office.agents, queues, NOW)
    assert [way(office.decide()) for _ in range(3)] == [
        [OUTER, team(0), agent(0, 0)], [far, agent(7, 0)], [OUTER, team(1), agent(1, 0)],
    ]  # fmt: skip
    decision = office.decide(away=[agent(0, 0), agent(1, 0)])
    assert way(decision) == [far, agent(7, 0)]
    passed = [(path["queue"], path["within"]) for path in decision.record["paths"][1:]]
    assert passed == [
        (str(OUTER), str(region)), (str(team(0)), str(OUTER)), (str(team(1)), str(OUTER)), (str(far), str(region)),
    ]  # fmt: skip


def test_all_lines_that_a_decision_may_need_are_asked_for_together() -> None:
    office = Office([(1, (1,)), (1, (1,))])
    bench = Bench(office.plan, office.agents, {}, NOW)
    with pytest.raises(NeedQueues) as needs:
        bench.decide(Case(UUID(int=1), Lead("1")))
    assert needs.value.queue_ids == {OUTER, team(0), team(1)}


def test_a_collaborator_whom_all_teams_have_already_is_not_waited_for() -> None:
    office = Office([(1, (1,)), (1, (1,))])
    holders = frozenset({agent(0, 0), agent(1, 0)})
    both = Rule("both", 1, Role.COLLABORATOR, {}, (Target(TargetKind.QUEUE, OUTER),))
    office.bench.plan = replace(office.plan, rules=RuleSet([both]))
    decision = office.decide(role=Role.COLLABORATOR, holders=holders)
    assert (decision.outcome, decision.reason) == (Outcome.LEFT, Reason.ALREADY_ON_LEAD)


def test_whoever_waits_longer_comes_first_also_for_somebody_inside_a_team() -> None:
    office = Office([(1, (1,)), (0, (1,))])
    office.bench.members = {team(0): {agent(0, 0): 1}, team(1): {agent(1, 0): 1}}
    waits = Waiting(OUTER, None, frozenset(), NOW, UUID(int=99))
    office.bench.ahead = [waits]
    assert office.decide().reason is Reason.BEHIND_HELD
    # Who waits has had the only one whom the queue could give; the team of weight 0 holds nobody up.
    office.bench.ahead = [replace(waits, had=frozenset({agent(0, 0)}))]
    assert office.decide().agent_id == agent(0, 0)


# -- in every run ---------------------------------------------------------------------------------------------------

weights = st.integers(1, 5)
shapes = st.lists(st.tuples(weights, st.lists(weights, min_size=1, max_size=4)), min_size=2, max_size=4)
absences = st.lists(st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6), min_size=1, max_size=40)


def check_shares(shape: Shape) -> None:
    """All there: each team has its share of the leads, each agent theirs of the team's, at every moment."""
    office = Office(shape)
    teams: Counter[UUID] = Counter()
    agents: Counter[UUID] = Counter()
    for count in range(1, 4 * sum(weight for weight, _ in shape) + 1):
        which, who = way(office.decide())
        teams[which] += 1
        agents[who] += 1
        for n, (weight, members) in enumerate(shape):
            exact = Fraction(count * weight, sum(w for w, _ in shape))
            assert abs(teams[team(n)] - exact) < 1
            for m, mine in enumerate(members):
                assert abs(agents[agent(n, m)] - Fraction(teams[team(n)] * mine, sum(members))) < 1


def check_kept_places(shape: Shape, away: Sequence[Collection[tuple[int, int]]]) -> None:
    """Whoever is away: the queue turns as a plain line of its teams, each team as a plain line of its agents."""
    office = Office(shape)
    outer = office.bench.lines[OUTER]
    inner = {team(n): office.bench.lines[team(n)] for n in range(len(shape))}
    for absent in away:
        gone = {agent(n, m) for n, m in absent}
        there = {which: [p.agent_id for p in line.places if p.agent_id not in gone] for which, line in inner.items()}
        decision = office.decide(away=gone)
        picked, outer = rotation.pick(outer, [which for which, some in there.items() if some])
        if picked is None:
            assert decision.outcome is Outcome.HELD
            continue
        second, inner[picked.agent_id] = rotation.pick(inner[picked.agent_id], there[picked.agent_id])
        assert second is not None
        assert way(decision) == [picked.agent_id, second.agent_id]
        assert office.bench.lines == {OUTER: outer, **inner}
        for one in decision.inner:  # its entry leads from the line before the turn to the one after it
            assert ledger.carry_out(one.before, ledger.Kind.TURN, one.data) == (one.after, one.data)


@settings(max_examples=40)
@given(shapes)
def test_shares_of_teams_and_inside_them(shape: Shape) -> None:
    check_shares(shape)


@settings(max_examples=60)
@given(shapes, absences)
def test_skipping_keeps_places_at_both_levels(shape: Shape, away: Sequence[Collection[tuple[int, int]]]) -> None:
    check_kept_places(shape, away)


# -- broken on purpose ----------------------------------------------------------------------------------------------


def _charges_empty_teams(real: Callable[..., list[Taken]]) -> Callable[..., list[Taken]]:
    """Picks a team before it looks whether anybody is in it, and charges it all the same."""

    def take(sight: Sight, queues: Mapping[UUID, QueueState]) -> list[Taken]:
        blind, _ = rotation.pick(sight.line, [place.agent_id for place in sight.line.places])
        if blind is not None and blind.agent_id in {out.agent_id for out in sight.away}:
            sight.line = rotation.debit(sight.line, blind.agent_id)
        return real(sight, queues)

    return take


def _forgets_the_inner_line(real: Callable[..., list[Taken]]) -> Callable[..., list[Taken]]:
    """Inside the team always the same: its line is not kept."""

    def take(sight: Sight, queues: Mapping[UUID, QueueState]) -> list[Taken]:
        return [one if one.queue_id == OUTER else replace(one, after=one.before) for one in real(sight, queues)]

    return take


@pytest.mark.parametrize("broken", [_charges_empty_teams, _forgets_the_inner_line])
def test_a_broken_twin_is_caught(broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested, "take", broken(nested.take))
    with pytest.raises(AssertionError):
        check_kept_places([(1, (1, 1)), (2, (1, 2))], [{(1, 0), (1, 1)}, set(), set(), set()])
