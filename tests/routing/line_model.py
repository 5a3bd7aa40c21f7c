"""Independent models of the rotation, and scripts of what happens to a queue that both they and it can play.

Nothing here uses the arithmetic of :mod:`routing.rotation`: :class:`PlainLine` walks a list, :class:`FractionLine` does
the published algorithm in fractions of a round. They agree with it or one of them is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor
from typing import Any
from uuid import UUID

from hypothesis import strategies as st

from routing.rotation import UNIT, Line, Pick

# Ids in no order of their own: whoever sorts by id instead of by rank is found out.
_SCATTER = 0x9E3779B97F4A7C15F39CC0605CEDC835


def agent(number: int) -> UUID:
    """The id of the agent who joins as number `number` (0, 1, 2 ...)."""
    return UUID(int=(number + 1) * _SCATTER % (1 << 128))


@dataclass(frozen=True)
class Action:
    """One thing that happens to a queue, with everything that anyone needs to carry it out."""

    op: str
    agent_id: UUID | None = None
    agents: tuple[UUID, ...] = ()  # lead: available; reorder: the new order
    weight: int = 1
    rank: int = 0
    owed_id: UUID | None = None


@dataclass
class Script:
    """Turns raw steps ``(op, a, b)`` of numbers into actions that fit the members there are."""

    weights: tuple[int, ...]
    members: dict[UUID, int] = field(init=False)
    joined: int = field(init=False)
    rank: int = field(init=False)
    granted: int = 0

    def __post_init__(self) -> None:
        self.members = {agent(number): weight for number, weight in enumerate(self.weights)}
        self.joined = self.rank = len(self.weights)

    def actions(self, steps: list[tuple[str, int, int]]) -> Iterator[Action]:
        """Each step as one action, or as several for ``leads``; steps that do not fit now are left out."""
        for op, a, b in steps:
            ids = list(self.members)
            one = ids[a % len(ids)]
            if op == "leads":
                there = tuple(id_ for number, id_ in enumerate(ids) if a >> number & 1)
                for _ in range(b):
                    yield Action("lead", agents=there)
            elif op == "join" and len(ids) < 8:
                new = agent(self.joined)
                self.joined += 1
                self.members[new] = b
                yield Action("join", new, weight=b, rank=self._ranks(1))
            elif op == "leave" and len(ids) > 2:
                del self.members[one]
                yield Action("leave", one)
            elif op == "reweight":
                self.members[one] = b
                yield Action("reweight", one, weight=b, rank=self._ranks(1))
            elif op == "reorder":
                order = sorted(ids, key=lambda id_: (id_.int * (2 * a + 1) + b) % (1 << 128))
                yield Action("reorder", agents=tuple(order), rank=self._ranks(len(order)))
            elif op == "send_to_back":
                yield Action("send_to_back", one, rank=self._ranks(1))
            elif op in ("owe", "give_next"):
                self.granted += 1
                yield Action(op, one, owed_id=UUID(int=self.granted))
            elif op in ("debit", "average"):
                yield Action(op, one)

    def _ranks(self, count: int) -> int:
        self.rank += count
        return self.rank - count


def steps(*moves: str, size: int, most: int = 9, least: int = 1, everyone: bool = False) -> st.SearchStrategy[Any]:
    """Raw steps: runs of leads of one kind, between them one of `moves`; weights from `least` to `most`."""
    who = st.just(255) if everyone else st.integers(1, 255)
    parts = [st.tuples(st.just("leads"), who, st.integers(1, 12))]
    if moves:
        parts.append(st.tuples(st.sampled_from(moves), st.integers(0, 255), st.integers(least, most)))
    return st.lists(st.one_of(*parts), min_size=1, max_size=size)


def perform(impl: Any, line: Line, action: Action) -> tuple[Pick | None, Line]:
    """Let the implementation `impl` carry out `action`."""
    who = action.agent_id
    match action.op:
        case "lead":
            picked, line = impl.pick(line, action.agents)
            return picked, line
        case "join":
            return None, impl.join(line, who, action.rank, action.weight)
        case "leave":
            return None, impl.leave(line, who)
        case "reweight":
            return None, impl.reweight(line, who, action.weight, action.rank)
        case "reorder":
            return None, impl.reorder(line, action.agents, action.rank)
        case "send_to_back":
            return None, impl.send_to_back(line, who, action.rank)
        case "owe":
            return None, impl.owe(line, action.owed_id, who)
        case "give_next":
            return None, impl.give_next(line, action.owed_id, who)
        case "debit":
            return None, impl.debit(line, who)
        case "average":
            return None, impl.returned_average(line, who)
    raise AssertionError(action.op)


class PlainLine:
    """Equal weights: walk the line from the front, take the first available, move them to the end."""

    def __init__(self, members: list[UUID]) -> None:
        self.line = list(members)
        self.owed: list[UUID] = []

    def perform(self, action: Action) -> UUID | None:
        """The agent who gets the lead, for a lead; None otherwise."""
        who = action.agent_id
        match action.op:
            case "lead":
                return self._lead(action.agents)
            case "join":
                self.line.append(who)
            case "leave":
                self.line.remove(who)
                self.owed = [owed for owed in self.owed if owed != who]
            case "send_to_back":
                self.line.remove(who)
                self.line.append(who)
            case "reorder":
                self.line = list(action.agents)
            case "owe":
                self.owed.append(who)
            case _:
                raise AssertionError(action.op)
        return None

    def _lead(self, available: tuple[UUID, ...]) -> UUID | None:
        for who in self.owed:
            if who in available:
                self.owed.remove(who)
                return who
        for who in self.line:
            if who in available:
                self.line.remove(who)
                self.line.append(who)
                return who
        return None


@dataclass
class _Member:
    weight: int
    rank: int
    served: Fraction = Fraction(0)  # in rounds of a member of weight 1
    last: int = 0


class FractionLine:
    """Earliest eligible deadline first in fractions, straight from its description."""

    def __init__(self, members: dict[UUID, int]) -> None:
        self.members = {who: _Member(weight, rank) for rank, (who, weight) in enumerate(members.items())}
        self.base = Fraction(0)
        self.turns = 0
        self.owed: list[tuple[str, UUID]] = []

    def _start(self, m: _Member) -> Fraction:
        return max(m.served, self.base)

    def _middle(self) -> Fraction:
        """The point V with sum of w * min(start - V, 1/w) = 0, by trying every number of members that are capped."""
        running = [m for m in self.members.values() if m.weight]
        running.sort(key=lambda m: self._start(m) - Fraction(1, m.weight))
        for count in range(len(running), 0, -1):
            inside = running[:count]
            total = sum(m.weight * self._start(m) for m in inside) + len(running) - count
            middle = Fraction(total) / sum(m.weight for m in inside)
            if all(self._start(m) - Fraction(1, m.weight) <= middle for m in inside):
                return middle
        raise AssertionError("someone is always inside")

    def perform(self, action: Action) -> UUID | None:
        """The agent who gets the lead, for a lead; None otherwise."""
        who = action.agent_id
        match action.op:
            case "lead":
                return self._lead([w for w in action.agents if w in self.members and self.members[w].weight])
            case "join":
                self.members[who] = self._at_back(_Member(action.weight, action.rank, self.base), set())
            case "leave":
                del self.members[who]
                self.owed = [row for row in self.owed if row[1] != who]
            case "send_to_back":
                old = self.members[who]
                self.members[who] = self._at_back(_Member(old.weight, action.rank, self._start(old)), {who})
            case "reweight":
                self._reweight(who, action.weight, action.rank)
            case "reorder":
                self._reorder(action.agents, action.rank)
            case "debit" if self.members[who].weight:
                m = self.members[who]
                m.served = self._start(m) + Fraction(1, m.weight)
            case "average":
                self.members[who].served = self._start(self.members[who])
            case "owe" | "give_next":
                self.owed.append((action.op, who))
        return None

    def _at_back(self, m: _Member, without: set[UUID]) -> _Member:
        m.last = self.turns
        others = [o for w, o in self.members.items() if o.weight and w not in without]
        if others and m.weight:
            behind = max(self._start(o) + Fraction(1, o.weight) for o in others) - Fraction(1, m.weight)
            limit = Fraction(floor(self._middle() * UNIT), UNIT) + Fraction(1, m.weight)
            m.served = max(m.served, min(behind, limit))
        return m

    def _reweight(self, who: UUID, weight: int, rank: int) -> None:
        m = self.members[who]
        if m.weight == weight:
            return
        if m.weight == 0:
            self.members[who] = self._at_back(_Member(weight, rank, self.base), {who})
            return
        if weight:
            middle = self._middle()
            behind = (middle - self._start(m)) * m.weight
            m.served = Fraction(floor((middle - behind / weight) * UNIT), UNIT)
        m.weight = weight

    def _reorder(self, order: tuple[UUID, ...], rank: int) -> None:
        running = [m for m in self.members.values() if m.weight]
        tags = sorted((m.served, m.last, m.rank) for m in running)
        middle = Fraction(floor(self._middle() * UNIT), UNIT) if running else Fraction(0)
        for number, who in enumerate(order):
            m = self.members[who]
            m.rank = rank + number
            if m.weight:
                (m.served, m.last, _), own = tags.pop(0), Fraction(1, m.weight)
                if self._start(m) > middle + own:
                    m.served = middle + own
                elif self._start(m) < middle - own:
                    m.served = middle - own

    def _lead(self, there: list[UUID]) -> UUID | None:
        if not there:
            return None
        self.turns += 1
        for kind in ("give_next", "owe"):
            for row in self.owed:
                if row[0] == kind and row[1] in there:
                    self.owed.remove(row)
                    return self._serve(row[1], there) if kind == "give_next" else row[1]
        weights = sum(self.members[w].weight for w in there)
        middle = sum(self._start(self.members[w]) * self.members[w].weight for w in there) / weights
        due = {w: (m.served + Fraction(1, m.weight), m.last, m.rank) for w, m in self.members.items() if w in there}
        return self._serve(
            min((w for w in there if self._start(self.members[w]) <= middle), key=due.__getitem__), there
        )

    def _serve(self, who: UUID, there: list[UUID]) -> UUID:
        m = self.members[who]
        start = self._start(m)
        self.base = min(self._start(self.members[w]) for w in there)
        m.served, m.last = start + Fraction(1, m.weight), self.turns
        return who
