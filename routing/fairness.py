"""Shares of turns: what each member was to expect, what they got, and why the two differ.

Pure: folds a queue's ledger, entry by entry, into counts per day (UTC), rule and agent. Turns are counted in
billionths of a turn (:data:`TURN`), each turn's shares rounded down by themselves, so that sums come out the same
whatever the steps in which a ledger is folded.

Of every turn that the line gave (owed turns stand apart: each replaces one that was given back or is a credit) a member
*expects* their weight over the weights of all members. Among those who were available their *fair* part is their weight
over the weights of those: the difference is what others' absence brought them, and an absence costs a member exactly
what they expected of that turn. What remains between the fair parts and the turns had is the order of the line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime
from typing import Any

from routing.ledger import Kind
from routing.rotation import How, OwedKind

TURN = 10**9
Key = tuple[date, str, str]
"""Day, rule (empty: none) and agent."""


@dataclass(slots=True)
class Counts:
    """Sums for one agent; those of shares in billionths of a turn, all others as they are.

    ``in_line`` counts the turns of the queue while they were a member; ``taken`` all turns they had, of which
    ``owed`` were owed and ``given_next`` given by an admin; ``given_back`` and ``debited`` count by the day on which
    that happened. ``absent`` is what they expected of turns for which they were unavailable, by reason. The longest
    wait is that between two own turns: the turns that others had while this member was available, and the seconds.
    """

    in_line: int = 0
    even: int = 0
    expected: int = 0
    fair: int = 0
    taken: int = 0
    owed: int = 0
    given_next: int = 0
    given_back: int = 0
    debited: int = 0
    longest_turns: int = 0
    longest_seconds: int = 0
    absent: dict[str, int] = field(default_factory=dict)

    def add(self, other: Counts) -> None:
        """Take up the counts of another time."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _MOST:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for reason, share in other.absent.items():
            self.absent[reason] = self.absent.get(reason, 0) + share

    def as_json(self) -> dict[str, Any]:
        """JSON-safe; what is nothing is left out."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Counts:
        """What :meth:`as_json` wrote; keys of a later version are ignored."""
        sums = {name: int(data.get(name, 0)) for name in (*_SUMS, *_MOST)}
        return cls(**sums, absent=dict(data.get("absent", {})))

    @property
    def actual(self) -> int:
        """The turns they had and kept."""
        return self.taken - self.given_back

    @property
    def away(self) -> int:
        """What their own absences cost."""
        return sum(self.absent.values())

    @property
    def stood_in(self) -> int:
        """What fell to them because others were away."""
        return self.fair - (self.expected - self.away)

    @property
    def order(self) -> int:
        """What the order of the line brought: places kept while away, newcomers at the back, a round not over."""
        return (self.taken - self.owed + self.debited) * TURN - self.fair


_MOST = ("longest_turns", "longest_seconds")
_SUMS = tuple(f.name for f in fields(Counts) if f.name not in (*_MOST, "absent"))


@dataclass(slots=True)
class Wait:
    """Since when a member waits for a turn: the number and time of the last, and for how many since they were away."""

    turn: int
    since: datetime
    away: int = 0


class Fold:
    """Folds entries of one queue's ledger in order. ``counts`` grows; the rest is where the ledger stands."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """From the start of a ledger, or from where :meth:`as_json` stood."""
        state = state or {"position": 0, "members": {}, "waits": {}}
        self.position: int = state["position"]
        self.weights: dict[str, int] = dict(state["members"])
        self.waits = {
            agent: Wait(turn, datetime.fromisoformat(since), away)
            for agent, (turn, since, away) in state["waits"].items()
        }
        self.counts: dict[Key, Counts] = {}
        # Turns that are alike, to be shared out together: their number by day, rule, whether charged, and who was away.
        self._alike: dict[tuple[date, str, bool, tuple[tuple[str, str], ...]], int] = {}

    def as_json(self) -> dict[str, Any]:
        """Where the ledger stands, JSON-safe, to go on from."""
        waits = {agent: [w.turn, w.since.isoformat(), w.away] for agent, w in self.waits.items()}
        return {"position": self.position, "members": self.weights, "waits": waits}

    def take(
        self, kind: Kind, at: datetime, data: Mapping[str, Any], rule: str | None, skips: Mapping[str, str]
    ) -> None:
        """Fold one entry. `rule` is that of the turn's decision; `skips` says why each of the unavailable was."""
        match kind:
            case Kind.TURN:
                self._turn(at, data, rule or "", skips)
            case Kind.VOID:
                self._of(at, rule or "", data["agent"]).given_back += 1
            case Kind.DEBIT:
                self._of(at, "", data["agent"]).debited += 1
            case Kind.CHECKPOINT:
                self.position = data["position"]
                self._members({place["agent"]: place["weight"] for place in data["places"]}, at)
            case Kind.JOIN | Kind.REWEIGHT:
                self._members(self.weights | {data["agent"]: data["weight"]}, at)
            case Kind.LEAVE:
                self._members({a: w for a, w in self.weights.items() if a != data["agent"]}, at)

    def _of(self, at: datetime, rule: str, agent: str) -> Counts:
        return self.counts.setdefault((at.astimezone(UTC).date(), rule, agent), Counts())

    def _members(self, weights: dict[str, int], at: datetime) -> None:
        if weights == self.weights:
            return
        self.share_out()
        fresh = {agent for agent, weight in weights.items() if weight and not self.weights.get(agent)}
        kept = {agent: wait for agent, wait in self.waits.items() if agent in weights and agent not in fresh}
        self.waits = kept | {agent: Wait(self.position, at) for agent in fresh}
        self.weights = weights

    def _turn(self, at: datetime, data: Mapping[str, Any], rule: str, skips: Mapping[str, str]) -> None:
        agent, turn = data["agent"], data["turn"]
        self.position = turn
        away = tuple((one, skips.get(one, "unknown")) for one in data["unavailable"])
        charged = data["how"] != OwedKind.OWED
        alike = (at.astimezone(UTC).date(), rule, charged, away)
        self._alike[alike] = self._alike.get(alike, 0) + 1
        for one, _ in away:
            if one in self.waits:
                self.waits[one].away += 1
        mine = self._of(at, rule, agent)
        mine.taken += 1
        mine.owed += not charged
        mine.given_next += data["how"] == How.GIVE_NEXT
        for lost in data.get("lost", ()):
            self._of(at, rule, lost).debited += 1
        if wait := self.waits.get(agent):
            mine.longest_turns = max(mine.longest_turns, turn - wait.turn - 1 - wait.away)
            mine.longest_seconds = max(mine.longest_seconds, int((at - wait.since).total_seconds()))
        self.waits[agent] = Wait(turn, at)

    def share_out(self) -> None:
        """Bring what is expected of the turns so far into ``counts``: at the end, and before the members change."""
        whole = sum(self.weights.values())
        running = sum(weight > 0 for weight in self.weights.values())
        for (day, rule, charged, away), times in self._alike.items():
            gone = dict(away)
            there = sum(weight for agent, weight in self.weights.items() if agent not in gone)
            for agent, weight in self.weights.items():
                mine = self.counts.setdefault((day, rule, agent), Counts())
                mine.in_line += times
                if not charged or not weight:
                    continue
                mine.even += TURN // running * times
                expected = TURN * weight // whole * times
                mine.expected += expected
                if agent in gone:
                    mine.absent[gone[agent]] = mine.absent.get(gone[agent], 0) + expected
                else:
                    mine.fair += TURN * weight // there * times
        self._alike.clear()

    def waiting(self, now: datetime) -> Iterator[tuple[str, int, int]]:
        """Each member of weight above 0 with the wait that is not over: turns and seconds, as for the longest."""
        for agent, wait in self.waits.items():
            if self.weights.get(agent):
                yield agent, self.position - wait.turn - wait.away, int((now - wait.since).total_seconds())
