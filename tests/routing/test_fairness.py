"""Fairness: what is expected and why it differs is exact, whatever the steps in which a ledger is folded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID

from routing import rotation
from routing.fairness import TURN, Counts, Fold, Key
from routing.ledger import Entry, Kind
from routing.rotation import new_line
from tests.routing.line_model import agent
from tests.routing.test_ledger import Recorder, over_records

START = datetime(2026, 3, 2, 22, tzinfo=UTC)
A, B, C, D = (agent(number) for number in range(4))
ONE = UUID(int=1001)


def folded(entries: Sequence[Entry], cuts: Iterable[int] = ()) -> tuple[dict[Key, Counts], dict[str, Any]]:
    """Fold entries, one a minute, going on from what was stored after each of the cuts."""
    sums: dict[Key, Counts] = {}
    state: dict[str, Any] | None = None
    edges = [0, *sorted(cuts), len(entries)]
    for first, last in pairwise(edges):
        fold = Fold(state)
        for entry in entries[first:last]:
            at = START + timedelta(minutes=entry.seq)
            reasons = {one: f"reason_{number % 2}" for number, one in enumerate(entry.data.get("unavailable", ()))}
            fold.take(entry.kind, at, entry.data, "rule" if entry.seq % 3 else None, reasons)
        fold.share_out()
        state = json.loads(json.dumps(fold.as_json()))
        for key, counts in fold.counts.items():
            sums.setdefault(key, Counts()).add(Counts.from_json(json.loads(json.dumps(counts.as_json()))))
    assert state is not None
    return sums, state


def of(sums: dict[Key, Counts], agent_id: UUID) -> Counts:
    total = Counts()
    for (_, _, who), counts in sums.items():
        if who == str(agent_id):
            total.add(counts)
    return total


@over_records(60)
def test_sums_are_the_same_whatever_the_steps_and_the_difference_is_explained_whole(
    book: Recorder, random: Any
) -> None:
    sums, state = folded(book.entries)
    cuts = sorted(random.randrange(1, len(book.entries) + 1) for _ in range(3))
    assert folded(book.entries, cuts) == (sums, state)
    total = Counts()
    for counts in sums.values():
        total.add(counts)
        reasons = (counts.owed - counts.given_back - counts.debited) * TURN
        assert counts.actual * TURN - counts.expected == reasons - counts.away + counts.stood_in + counts.order
    turns = [entry for entry in book.entries if entry.kind is Kind.TURN]
    assert total.taken == len(turns)
    charged = sum(entry.data["how"] != "owed" for entry in turns)
    # Every charged turn is shared out whole, but for what is rounded off: less than a billionth per member.
    assert 0 <= charged * TURN - total.expected <= charged * 10
    assert 0 <= charged * TURN - total.fair <= charged * 10
    assert state["members"] == {str(place.agent_id): place.weight for place in book.line.places}


def test_who_is_always_there_gets_what_they_expect_within_a_turn() -> None:
    book = Recorder(new_line([(A, 3), (B, 2), (C, 1)]))
    for _ in range(50):
        book.lead()
    sums, _ = folded(book.entries)
    for who, weight in ((A, 3), (B, 2), (C, 1)):
        counts = of(sums, who)
        assert abs(counts.expected - 50 * weight * TURN // 6) < 50
        assert (counts.in_line, counts.away, counts.stood_in) == (50, 0, 0)
        assert abs(counts.order) < TURN
    assert of(sums, C).longest_turns == 5  # A B A C B A | A B A C ...: its own round
    assert of(sums, C).longest_seconds == 6 * 60


def test_an_absence_its_gain_and_a_turn_given_back_are_told_apart() -> None:
    book = Recorder(new_line([(A, 1), (B, 1), (C, 1)]))
    for _ in range(3):
        book.lead()
    for _ in range(6):
        book.lead(B)
    book.give_back(1, ONE)
    book.lead()
    sums, _ = folded(book.entries)
    absent, back = of(sums, B), of(sums, A)
    assert (absent.taken, absent.absent) == (1, {"reason_0": 6 * (TURN // 3)})
    assert (back.taken, back.owed, back.given_back, back.actual) == (1 + 3 + 1, 1, 1, 4)
    assert abs(back.expected - 3 * TURN) < 10  # nine charged turns: the owed one only replaces what was given back
    assert abs(back.stood_in - TURN) < 10
    assert abs(back.order) < 10


def test_a_newcomer_expects_from_their_joining_on_and_waits_from_then() -> None:
    book = Recorder(new_line([(A, 1), (B, 1)]))
    for _ in range(4):
        book.lead()
    book.do(Kind.JOIN, agent=str(D), rank=2, weight=2)
    for _ in range(4):
        book.lead()
    book.do(Kind.LEAVE, agent=str(B))
    sums, state = folded(book.entries)
    assert of(sums, D).in_line == 4
    assert of(sums, D).expected == 4 * (TURN // 2)
    assert set(state["members"]) == {str(A), str(D)}
    fold = Fold(state)
    waits = {who: turns for who, turns, _ in fold.waiting(START + timedelta(hours=1))}
    last = {str(p.agent_id): p.last for p in book.line.places}
    assert waits == {who: book.line.position - turn for who, turn in last.items()}


def test_days_are_those_of_utc() -> None:
    book = Recorder(new_line([(A, 1)]))
    for _ in range(200):
        book.lead()
    sums, _ = folded(book.entries)
    assert sorted({str(day) for day, _, _ in sums}) == ["2026-03-02", "2026-03-03"]
    assert rotation.UNIT  # a day has no part in the line itself
