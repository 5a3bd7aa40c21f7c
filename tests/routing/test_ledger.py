"""The ledger: what was recorded replays to what is, and whatever was changed afterwards is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing import ledger, rotation
from routing.ledger import Audit, Check, DoesNotFollow, Entry, Kind, apply, carry_out, checkpoint, line_of, replay
from routing.rotation import UNIT, Line, MoveRefused, new_line
from tests.routing.line_model import Action, Script, agent, steps
from tests.routing.test_rotation_properties import ALL, a_pick, some_weights

NOW = datetime(2026, 3, 2, 9, 30, tzinfo=UTC)
A, B, C, D = (agent(number) for number in range(4))
ONE, TWO = UUID(int=1001), UUID(int=1002)


class Recorder:
    """Keeps a line and its ledger as the store would: inputs carried out, the whole data through JSON."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.entries: list[Entry] = []
        self.do(Kind.CHECKPOINT)

    def do(self, kind: Kind, **given: Any) -> None:
        self.line, data = carry_out(self.line, kind, given)
        stored = json.loads(json.dumps(data | {"decision": "beside the point"}))
        self.entries.append(Entry(len(self.entries) + 1, kind, NOW, "admin@example.com", "why", stored))

    def lead(self, *unavailable: UUID, lose: tuple[UUID, ...] = (), average: tuple[UUID, ...] = ()) -> None:
        sets = {"unavailable": unavailable, "lose_turn": lose, "average": average}
        self.do(Kind.TURN, **{name: [str(who) for who in agents] for name, agents in sets.items()})

    def give_back(self, turn: int, owed_id: UUID) -> None:
        agent_id = next(e.data["agent"] for e in self.entries if e.kind is Kind.TURN and e.data["turn"] == turn)
        self.do(Kind.VOID, turn=turn, agent=agent_id, owed=str(owed_id))

    def replay(self) -> Audit:
        return replay(self.entries, self.line)


def a_ledger() -> Recorder:
    """Every kind of entry once, and turns of every kind between them."""
    book = Recorder(new_line([(A, 5), (B, 1), (C, 1)]))
    book.lead()
    book.lead(A)
    book.lead(A, B, lose=(A,))
    book.do(Kind.JOIN, agent=str(D), rank=3, weight=2)
    book.lead(A, C)
    book.do(Kind.REWEIGHT, agent=str(A), weight=3)
    book.give_back(2, ONE)
    book.do(Kind.GIVE_NEXT, agent=str(C), owed=str(TWO))
    book.lead(B)
    book.do(Kind.REORDER, order=[str(who) for who in (D, C, B, A)], rank=4)
    book.lead()
    book.do(Kind.SEND_TO_BACK, agent=str(D), rank=8)
    book.do(Kind.DEBIT, agent=str(A))
    book.do(Kind.AVERAGE, agent=str(B))
    book.do(Kind.REWEIGHT, agent=str(C), weight=0)
    book.lead(D)
    book.do(Kind.REWEIGHT, agent=str(C), weight=4, rank=9)
    book.do(Kind.OWE, agent=str(D), owed=str(UUID(int=1003)))
    book.do(Kind.OWE, agent=str(A), owed=str(UUID(int=1004)))
    book.do(Kind.WITHDRAW, owed=str(UUID(int=1003)))
    book.do(Kind.CHECKPOINT)
    book.lead(A)
    book.lead(B, C)
    book.do(Kind.LEAVE, agent=str(B))
    book.lead()
    book.give_back(book.line.position, UUID(int=1005))
    return book


def only(audit: Audit) -> ledger.Problem:
    assert not audit.ok
    return audit.problems[0]


# -- what was recorded replays --------------------------------------------------------------------------------


def test_every_kind_replays() -> None:
    book = a_ledger()
    assert {entry.kind for entry in book.entries} == set(Kind)
    audit = book.replay()
    assert (audit.problems, audit.ok) == ((), True)
    assert (audit.entries, audit.turns, audit.line) == (len(book.entries), book.line.position, book.line)
    assert replay(book.entries, None).ok


def test_owed_turns_are_compared_in_the_order_in_which_they_are_served() -> None:
    book = Recorder(new_line([(A, 1), (B, 1)]))
    book.do(Kind.OWE, agent=str(A), owed=str(ONE))
    book.do(Kind.GIVE_NEXT, agent=str(B), owed=str(TWO))
    older, given = book.line.owed
    assert replay(book.entries, replace(book.line, owed=(given, older))).ok  # as the database gives them
    book.do(Kind.OWE, agent=str(B), owed=str(UUID(int=1003)))
    older, given, newer = book.line.owed
    assert not replay(book.entries, replace(book.line, owed=(given, newer, older))).ok


def test_replay_starts_at_the_first_checkpoint_given() -> None:
    book = a_ledger()
    second = [entry.kind for entry in book.entries].index(Kind.CHECKPOINT, 1)
    for first in range(1, second + 1):
        audit = replay(book.entries[first:], book.line)
        assert audit.ok
        assert audit.entries == len(book.entries) - second
    assert only(replay(book.entries[second + 1 :], book.line)).check is Check.NO_CHECKPOINT
    assert only(replay([], None)).check is Check.NO_CHECKPOINT


@st.composite
def records(draw: Any) -> Recorder:
    """The ledger of a random queue, with turns and places lost, turns given back and checkpoints now and then."""
    script = Script(draw(some_weights(100, least=0)))
    book = Recorder(new_line(list(script.members.items())))
    void: set[int] = set()
    moves = (*ALL, "checkpoint", "void")
    for step in draw(steps(*moves, size=25, most=100, least=0)):
        op, a, b = step
        turn = next((t for t in range(1, book.line.position + 1) if t % 7 == a % 7 and t not in void), None)
        if op == "checkpoint":
            book.do(Kind.CHECKPOINT)
        elif op == "void" and turn is not None:
            void.add(turn)
            book.give_back(turn, UUID(int=5000 + turn))
        for action in script.actions([step]):
            _record(book, action, script, loses=b % 3 == 0)
    return book


def _record(book: Recorder, action: Action, script: Script, *, loses: bool) -> None:
    if action.op == "lead":
        if any(script.members[who] for who in action.agents):
            away = tuple(who for who in script.members if who not in action.agents)
            book.lead(*away, lose=away[:2] if loses else (), average=away[2:] if loses else ())
        return
    given: dict[str, Any] = {"agent": str(action.agent_id), "weight": action.weight, "rank": action.rank}
    given |= {"owed": str(action.owed_id), "order": [str(who) for who in action.agents]}
    book.do(Kind(action.op), **given)


def over_records(examples: int) -> Callable[[Any], Any]:
    def decorate(test: Any) -> Any:
        quick = settings(
            max_examples=examples,
            deadline=None,  # the machine may be busy; time is not what is checked here
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        return quick(given(records(), st.randoms(use_true_random=False))(test))

    return decorate


@over_records(80)
def test_replay_reproduces_every_pick_and_the_present_state(book: Recorder, random: Any) -> None:
    audit = book.replay()
    assert audit.problems == ()
    assert audit.line == book.line
    assert audit.turns == sum(entry.kind is Kind.TURN for entry in book.entries)


@over_records(40)
def test_a_line_survives_json(book: Recorder, random: Any) -> None:
    assert line_of(json.loads(json.dumps(checkpoint(book.line)))) == book.line


def test_data_holds_no_number_that_json_would_round() -> None:
    def numbers(value: Any) -> list[int]:
        if isinstance(value, dict):
            value = list(value.values())
        return [n for one in value for n in numbers(one)] if isinstance(value, list) else [value]

    for entry in a_ledger().entries:
        assert all(abs(n) < 2**53 for n in numbers(dict(entry.data)) if isinstance(n, int))
    assert str(UNIT) in json.dumps([dict(entry.data) for entry in a_ledger().entries])


# -- and what was changed afterwards is named -----------------------------------------------------------------


def changed(book: Recorder, at: int, **data: Any) -> list[Entry]:
    return [replace(e, data={**e.data, **data}) if n == at else e for n, e in enumerate(book.entries)]


def where(book: Recorder, kind: Kind) -> int:
    return next(n for n, entry in enumerate(book.entries) if entry.kind is kind)


def test_changed_agent_is_another_pick() -> None:
    book = a_ledger()
    problem = only(replay(changed(book, 1, agent=str(B)), book.line))
    assert (problem.check, problem.seq, problem.expected, problem.found) == (Check.OTHER_PICK, 2, str(A), str(B))
    assert str(problem) == f"entry 2: other_pick: turn agent should be {A}, is {B}"


def test_hidden_absence_is_another_pick() -> None:
    book = a_ledger()
    problem = only(replay(changed(book, 3, unavailable=[], lose_turn=[]), book.line))
    assert (problem.check, problem.seq, problem.found) == (Check.OTHER_PICK, 4, str(C))


def test_dropped_entry_is_a_gap() -> None:
    book = a_ledger()
    dropped = book.entries[:2] + book.entries[3:]
    audit = replay(dropped, book.line)
    assert {(p.check, p.seq) for p in audit.problems} >= {(Check.SEQ_GAP, 4), (Check.TURN_GAP, 4)}
    # With the numbers closed over the gap the turns still tell.
    closed = [replace(entry, seq=number) for number, entry in enumerate(dropped, 1)]
    problem = only(replay(closed, book.line))
    assert (problem.check, problem.seq, problem.expected, problem.found) == (Check.TURN_GAP, 3, "2", "3")


def test_gap_after_the_end_of_the_replay_is_still_named() -> None:
    book = a_ledger()
    entries = changed(book, 1, agent=str(B))
    del entries[-2]
    assert [p.check for p in replay(entries, book.line).problems] == [Check.OTHER_PICK, Check.SEQ_GAP]


def test_dropped_last_entry_is_another_present_state() -> None:
    book = Recorder(new_line([(A, 1), (B, 1)]))
    book.lead()
    problems = replay(book.entries[:-1], book.line).problems
    assert {(p.check, p.seq, p.where) for p in problems} == {
        (Check.OTHER_STATE, None, where) for where in ("position", f"tag of agent {A}", f"last of agent {A}")
    }
    assert str(problems[0]) == "present state: other_state: position should be 0, is 1"


def swapped(book: Recorder, first: int, *, renumber: bool) -> list[Entry]:
    entries = [*book.entries[:first], *reversed(book.entries[first : first + 2]), *book.entries[first + 2 :]]
    return [replace(entry, seq=number) for number, entry in enumerate(entries, 1)] if renumber else entries


def test_swapped_entries_do_not_follow() -> None:
    book = a_ledger()
    for first in range(1, len(book.entries) - 1):
        checks = {problem.check for problem in replay(swapped(book, first, renumber=False), book.line).problems}
        assert Check.SEQ_GAP in checks
    # With the numbers put right the content still tells, unless the two have nothing to do with each other.
    problem = only(replay(swapped(book, 1, renumber=True), book.line))
    assert (problem.check, problem.seq, problem.expected, problem.found) == (Check.TURN_GAP, 2, "1", "2")
    problem = only(replay(swapped(book, where(book, Kind.JOIN) - 1, renumber=True), book.line))
    assert (problem.check, problem.seq, problem.where) == (Check.OTHER_OUTCOME, 4, "join tag")
    problem = only(replay(swapped(book, where(book, Kind.REORDER) - 1, renumber=True), book.line))
    assert (problem.check, problem.where) == (Check.OTHER_OUTCOME, "reorder tags")


def test_changed_tag_is_another_outcome() -> None:
    book = a_ledger()
    for kind in (Kind.TURN, Kind.JOIN, Kind.REWEIGHT, Kind.SEND_TO_BACK, Kind.DEBIT, Kind.AVERAGE):
        at = where(book, kind)
        tag = str(int(book.entries[at].data["tag"]) + 1)
        problem = only(replay(changed(book, at, tag=tag), book.line))
        assert (problem.check, problem.seq) == (Check.OTHER_OUTCOME, at + 1)
        assert problem.where == f"{kind.value} tag"


def test_changed_tag_of_a_checkpoint_does_not_lead_on() -> None:
    book = a_ledger()
    for at, entry in enumerate(book.entries):
        if entry.kind is Kind.CHECKPOINT:
            for number, place in enumerate(entry.data["places"]):
                places = json.loads(json.dumps(entry.data["places"]))
                places[number]["tag"] = str(int(place["tag"]) + 1)
                assert not replay(changed(book, at, places=places), book.line).ok


def test_changed_present_state_is_named_field_by_field() -> None:
    book = a_ledger()
    line = book.line
    first, *rest = line.places
    for present, where_ in (
        (replace(line, floor=line.floor + 1), "floor"),
        (replace(line, places=(replace(first, tag=first.tag - 1), *rest)), f"tag of agent {first.agent_id}"),
        (replace(line, owed=()), "owed turns"),
    ):
        (problem,) = replay(book.entries, present).problems
        assert (problem.check, problem.where) == (Check.OTHER_STATE, where_)
    gone = rotation.leave(line, first.agent_id)
    assert {p.found for p in replay(book.entries, gone).problems if "agent" in p.where} == {"absent"}


def test_turn_is_given_back_once_and_by_its_taker() -> None:
    book = Recorder(new_line([(A, 1), (B, 1)]))
    book.lead()
    book.do(Kind.VOID, turn=1, agent=str(A), owed=str(ONE))
    book.do(Kind.VOID, turn=1, agent=str(A), owed=str(TWO))
    problem = only(book.replay())
    assert (problem.check, problem.seq, problem.found) == (Check.BAD_VOID, 4, "void already")
    book = Recorder(new_line([(A, 1), (B, 1)]))
    book.lead()
    book.do(Kind.VOID, turn=1, agent=str(B), owed=str(ONE))
    assert (only(book.replay()).check, only(book.replay()).found) == (Check.BAD_VOID, str(A))


def test_void_of_a_former_member_owes_nothing() -> None:
    book = Recorder(new_line([(A, 1), (B, 1)]))
    book.lead()
    book.do(Kind.LEAVE, agent=str(A))
    book.do(Kind.VOID, turn=1, agent=str(A), owed=str(ONE))
    assert book.entries[-1].data["owed"] is None
    assert book.line.owed == ()
    assert book.replay().ok


@over_records(60)
def test_no_recorded_outcome_can_be_changed(book: Recorder, random: Any) -> None:
    """Any one value that the rotation determines, changed: the audit names that entry."""
    at = random.randrange(len(book.entries))
    data = dict(book.entries[at].data)
    inputs = {"unavailable", "lose_turn", "decision", "order", "places"}
    key = random.choice(sorted(data.keys() - inputs) or ["position"])
    data[key] = f"{data[key]}x" if isinstance(data[key], str) else [data[key]]
    audit = replay([*book.entries[:at], replace(book.entries[at], data=data), *book.entries[at + 1 :]], book.line)
    assert only(audit).seq == at + 1


@over_records(60)
def test_changed_absences_are_found_or_change_nothing(book: Recorder, random: Any) -> None:
    turns = [n for n, entry in enumerate(book.entries) if entry.kind is Kind.TURN]
    if not turns:
        return
    at = random.choice(turns)
    line = replay(book.entries[:at], None).line
    members = sorted(str(place.agent_id) for place in line.places)
    other = [who for who in members if (who in book.entries[at].data["unavailable"]) != (random.random() < 0.3)]
    entries = changed(book, at, unavailable=other)
    audit = replay(entries, book.line)
    if audit.ok:
        # Then those absences weighed nothing: the same agent, charged the same, from the same floor.
        assert audit.line == book.line
    else:
        assert only(audit).seq == at + 1


@pytest.mark.parametrize("fault", ["eligible", "floor_over_all", "skips_cost"])
def test_ledger_of_a_broken_rotation_does_not_replay(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(ledger.rotation, "pick", a_pick(**{fault: fault != "eligible"}))
        book = Recorder(new_line([(A, 5), (B, 2), (C, 1)]))
        for number in range(30):
            book.lead(*([A] if number % 3 else []))
    assert not book.replay().ok


# -- what cannot be read or done ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "data", "check"),
    [
        (Kind.TURN, {}, Check.UNREADABLE),
        (Kind.TURN, {"unavailable": ["nobody"]}, Check.UNREADABLE),
        (Kind.TURN, {"unavailable": [7]}, Check.UNREADABLE),
        (Kind.TURN, [], Check.UNREADABLE),
        (Kind.TURN, [1], Check.UNREADABLE),
        (Kind.CHECKPOINT, {}, Check.OTHER_OUTCOME),
        (Kind.CHECKPOINT, [1], Check.UNREADABLE),
        (Kind.JOIN, {"agent": str(D), "rank": True, "weight": 1}, Check.UNREADABLE),
        (Kind.JOIN, {"agent": str(D), "rank": 9, "weight": 1.5}, Check.UNREADABLE),
        (Kind.TURN, {"unavailable": [str(D)]}, Check.REFUSED),
        (Kind.TURN, {"unavailable": [str(A), str(B)]}, Check.REFUSED),
        (Kind.TURN, {"unavailable": [], "lose_turn": [str(A)]}, Check.REFUSED),
        (Kind.JOIN, {"agent": str(A), "rank": 9, "weight": 1}, Check.REFUSED),
        (Kind.VOID, {"turn": 1, "agent": str(A), "owed": str(ONE)}, Check.REFUSED),
        (Kind.TURN, {"unavailable": []}, Check.TURN_GAP),
        (Kind.DEBIT, {"agent": str(A)}, Check.OTHER_OUTCOME),
    ],
)
def test_entries_that_cannot_be(kind: Kind, data: Any, check: Check) -> None:
    line = new_line([(A, 1), (B, 1)])
    with pytest.raises(DoesNotFollow) as caught:
        apply(line, Entry(2, kind, NOW, "turnlock", None, data))
    assert caught.value.problem.check is check
    book = Recorder(line)
    book.entries.append(Entry(2, kind, NOW, "turnlock", None, data))
    assert book.replay().problems == (caught.value.problem,)
    assert (book.replay().entries, book.replay().line) == (1, line)


def test_void_must_be_of_a_turn_taken_and_owe_its_member() -> None:
    line = rotation.pick(new_line([(A, 1)]), [A])[1]
    for turn in (0, 2):
        with pytest.raises(MoveRefused, match="never taken"):
            carry_out(line, Kind.VOID, {"turn": turn, "agent": str(A), "owed": str(ONE)})
    with pytest.raises(MoveRefused, match="owed one"):
        carry_out(line, Kind.VOID, {"turn": 1, "agent": str(A), "owed": None})


@pytest.mark.parametrize("data", [{}, [], {"position": 0, "floor": "0", "places": [{}], "owed": []}])
def test_checkpoint_that_cannot_be_read(data: Any) -> None:
    book = Recorder(new_line([(A, 1)]))
    book.lead()
    first = Entry(0, Kind.CHECKPOINT, NOW, "turnlock", None, data)
    audit = replay([first, book.entries[1]], None)
    assert [problem.check for problem in audit.problems] == [Check.UNREADABLE, Check.SEQ_GAP]
    assert audit.line is None


def test_checkpoint_must_be_written_as_we_write_it() -> None:
    data = checkpoint(new_line([(A, 1), (B, 1)]))
    data["places"].reverse()
    assert only(replay([Entry(1, Kind.CHECKPOINT, NOW, "turnlock", None, data)], None)).check is Check.OTHER_OUTCOME
