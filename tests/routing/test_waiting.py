"""Whoever waits longer comes first, and a lead that nobody there may take holds nobody up: random lives of queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.decide import Bench, Case, Decision, NeedQueues, Outcome, Plan, QueueState, Waiting
from routing.model import Agent, Flag, Lead, Reason, Role, Rule, Target, TargetKind, WhenNobody
from routing.rotation import Line, new_line
from routing.rules import RuleSet

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
AGENTS = [UUID(int=n) for n in range(1, 6)]
EAST, WEST, NORTH = (UUID(int=100 + n) for n in range(3))
MEMBERS = {EAST: AGENTS[:2], WEST: AGENTS[1:4], NORTH: AGENTS[3:]}
# East falls back to West by itself; the rule "wide" leads from North to East, and so to West, too.
CHAINS = {"east": [EAST], "west": [WEST], "north": [NORTH], "wide": [NORTH, EAST]}
ALL_WAYS = {"east": {EAST, WEST}, "west": {WEST}, "north": {NORTH}, "wide": {NORTH, EAST}}

PLAN = Plan(
    config_version=1,
    flags=frozenset(Flag),
    rules=RuleSet(
        [
            Rule(
                name,
                number,
                Role.OWNER,
                {"field": "source", "equals": name},
                tuple(Target(TargetKind.QUEUE, queue_id) for queue_id in chain),
            )
            for number, (name, chain) in enumerate(CHAINS.items(), 1)
        ]
    ),
    default_queue_id=None,
    queue_names={EAST: "East", WEST: "West", NORTH: "North"},
    fallbacks={EAST: WEST},
)


@dataclass(frozen=True)
class Held:
    """A lead that waits: since when, by which rule, and who had it."""

    lead_id: UUID
    rule: str
    since: datetime
    had: frozenset[UUID]

    @property
    def place(self) -> tuple[datetime, UUID]:
        return self.since, self.lead_id

    def waiting(self) -> Waiting:
        return Waiting(CHAINS[self.rule][0], self.rule, self.had, self.since, self.lead_id)


@dataclass
class World:
    """Queues, who is there, and who waits; leads are decided as units decide them."""

    there: set[UUID] = field(default_factory=set)
    waits: dict[UUID, Held] = field(default_factory=dict)
    lines: dict[UUID, Line] = field(
        default_factory=lambda: {queue_id: new_line([(a, 1) for a in agents]) for queue_id, agents in MEMBERS.items()}
    )
    forgetful: bool = False
    clock: int = 0
    served: list[tuple[Held, UUID]] = field(default_factory=list)

    def could_have(self, lead: Held) -> set[UUID]:
        """Who is there and may take `lead`: by the rules of the house, not by how the code finds out."""
        ways = {agent for queue_id in ALL_WAYS[lead.rule] for agent in MEMBERS[queue_id]}
        return ways & self.there - lead.had

    def unit(self, leads: Sequence[Held]) -> None:
        """Decide these leads, held ones first, in one unit: with whatever further queues it turns out to need."""
        wanted = {CHAINS[lead.rule][0] for lead in leads}
        while True:
            try:
                self._attempt(leads, wanted)
            except NeedQueues as need:
                wanted |= need.queue_ids
            else:
                return

    def _attempt(self, leads: Sequence[Held], wanted: set[UUID]) -> None:
        mine = {lead.lead_id for lead in leads}
        served = {agent for queue_id in wanted for agent in MEMBERS[queue_id]}
        members = {q: dict.fromkeys(served & set(agents), 1) for q, agents in MEMBERS.items() if served & set(agents)}
        homes = PLAN.homes(members)
        others = [w.waiting() for w in self.waits.values() if w.lead_id not in mine]
        ahead = [] if self.forgetful else [w for w in others if w.home in homes]
        queues = {
            q: QueueState(q, str(q), self.lines[q], *((WhenNobody.FALLBACK_QUEUE, WEST) if q == EAST else ()))
            for q in wanted
        }
        agents = {a: Agent(a, str(a), "A", active=a in self.there) for a in AGENTS}
        bench = Bench(PLAN, agents, queues, NOW, ahead=ahead, members=members)
        in_order = sorted(leads, key=lambda x: (x.lead_id not in self.waits, x.place))
        done: list[tuple[Held, Decision]] = []
        for lead in in_order:
            waits = lead.since if lead.lead_id in self.waits else None
            case = Case(lead.lead_id, Lead(ref="1", source=lead.rule), waits=waits, declined=lead.had)
            done.append((lead, bench.decide(case)))
        self.lines |= bench.lines
        for number, (lead, decision) in enumerate(done):
            if decision.outcome is Outcome.ASSIGNED:
                assert decision.agent_id is not None
                later = {x.lead_id for x, _ in done[number + 1 :]}
                self._check(lead, decision.agent_id, later)
                self.waits.pop(lead.lead_id, None)
                self.served.append((lead, decision.agent_id))
            else:
                assert decision.outcome is Outcome.HELD
                if lead.lead_id not in self.waits:
                    self._check_held(lead, decision)
                self.waits.setdefault(lead.lead_id, lead)

    def _check(self, lead: Held, agent_id: UUID, later: set[UUID]) -> None:
        """Nobody who waits longer could have had this agent."""
        old = [
            x
            for x in self.waits.values()
            if x.lead_id != lead.lead_id and (lead.lead_id not in self.waits or x.place < lead.place)
        ]
        for other in old:
            assert agent_id not in self.could_have(other), (lead, agent_id, other)

    def _check_held(self, lead: Held, decision: Decision) -> None:
        """It waits because nobody is there for it, or because somebody who waits longer can be served right now."""
        if decision.reason is Reason.BEHIND_HELD:
            assert any(self.could_have(other) for other in self.waits.values())
        else:
            assert not self.could_have(lead)


def had(number: int) -> frozenset[UUID]:
    return frozenset(agent for bit, agent in enumerate(AGENTS) if number >> bit & 1)


def live(world: World, steps: Sequence[tuple[str, int, int, int]]) -> World:
    """Agents come and go, leads arrive, and parts of the wait are decided again, in whatever units."""
    for number, (what, one, two, three) in enumerate(steps, 1):
        world.clock += 1
        if what == "switch":
            world.there ^= {AGENTS[one % len(AGENTS)]}
        elif what == "arrive":
            rules = [list(CHAINS)[(one + n) % len(CHAINS)] for n in range(1 + two % 3)]
            first = CHAINS[rules[0]][0]
            arrivals = [
                Held(UUID(int=1000 * number + n), rule, NOW + timedelta(seconds=world.clock), had(three >> n))
                for n, rule in enumerate(rules)
                if CHAINS[rule][0] == first
            ]
            world.unit(arrivals)
        else:
            order = sorted(world.waits.values(), key=lambda x: x.place)
            chosen = [x for bit, x in enumerate(order) if (one | two << 3) >> bit & 1]
            if chosen:
                world.unit([x for x in chosen if CHAINS[x.rule][0] == CHAINS[chosen[0].rule][0]])
    return world


steps = st.lists(
    st.tuples(
        st.sampled_from(["switch", "arrive", "arrive", "again"]),
        st.integers(0, 31),
        st.integers(0, 7),
        st.sampled_from([0, 0, 1, 2, 6, 13, 31]),
    ),
    max_size=30,
)


@settings(max_examples=150)
@given(steps)
def test_a_newer_lead_never_takes_an_agent_whom_an_older_one_could_have(raw: list[tuple[str, int, int, int]]) -> None:
    live(World(there=set(AGENTS[:2])), raw)


@settings(max_examples=100)
@given(steps, st.integers(1, 4))
def test_in_the_end_everybody_is_served_whom_somebody_there_may_take(
    raw: list[tuple[str, int, int, int]], batch: int
) -> None:
    world = live(World(there=set()), raw)
    world.there = set(AGENTS)
    while True:  # the drain: the oldest of one line that can be served, a batch at a time
        order = sorted((x for x in world.waits.values() if world.could_have(x)), key=lambda x: x.place)
        if not order:
            break
        before = len(world.served)
        world.unit([x for x in order if CHAINS[x.rule][0] == CHAINS[order[0].rule][0]][:batch])
        assert len(world.served) > before, "the oldest that can be served is served"
    for lead in world.waits.values():
        assert not world.could_have(lead)


# -- by hand -------------------------------------------------------------------------------------------------------


def lead(number: int, rule: str, seconds: int, had: frozenset[UUID] = frozenset()) -> Held:
    return Held(UUID(int=1000 + number), rule, NOW + timedelta(seconds=seconds), had)


def overtakes(forgetful: bool) -> World:
    """East's lead waits for a fallback that has just come back; a newer one comes to West itself."""
    world = World(there=set(), forgetful=forgetful)
    world.unit([lead(1, "east", 0)])
    world.there = {AGENTS[2]}
    world.unit([lead(2, "west", 1)])
    return world


def test_a_fallback_is_claimed_by_whoever_waits_for_it_longer() -> None:
    world = overtakes(forgetful=False)
    assert [x.rule for x in world.waits.values()] == ["east", "west"]
    world.unit([world.waits[UUID(int=1001)]])
    world.unit([world.waits[UUID(int=1002)]])
    assert [(x.rule, agent) for x, agent in world.served] == [("east", AGENTS[2]), ("west", AGENTS[2])]


def test_a_lead_that_only_others_may_take_holds_nobody_up() -> None:
    world = World(there={AGENTS[0]})
    world.unit([lead(1, "east", 0, had=frozenset(AGENTS[:1]))])
    assert not world.served
    world.unit([lead(2, "east", 1)])
    assert [(x.lead_id, agent) for x, agent in world.served] == [(UUID(int=1002), AGENTS[0])]


def test_without_the_claim_of_those_who_wait_it_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        overtakes(forgetful=True)


@pytest.mark.parametrize(
    ("home", "rule", "queues"),
    [
        (EAST, "east", {EAST, WEST}),
        (NORTH, "wide", {NORTH, EAST}),
        (NORTH, "north", {NORTH}),
        (NORTH, "a rule that is no more", {NORTH}),
        (None, None, set()),
    ],
)
def test_where_a_held_lead_finds_an_agent(home: UUID | None, rule: str | None, queues: set[UUID]) -> None:
    assert PLAN.reach(home, rule).queues == queues


def test_without_rules_a_lead_reaches_its_queue_and_that_queues_fallback() -> None:
    plan: Any = replace(PLAN, flags=frozenset(Flag) - {Flag.RULES}, default_agents={WEST: AGENTS[4]})
    assert plan.reach(NORTH, "wide").queues == {NORTH}
    assert plan.reach(EAST, "east").agents == {AGENTS[4]}
    assert PLAN.homes([WEST]) == {WEST, EAST}
    assert PLAN.homes([EAST]) == {EAST, NORTH}
