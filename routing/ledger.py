"""The ledger of a queue: every change of its line as an entry from which the state can be recomputed.

An entry's ``data`` holds the *inputs* of a move (who, which weight, who was unavailable) and its *outcome* (who won,
tags, floor). :func:`carry_out` makes both from the inputs; :func:`apply` makes them again and insists that the
recorded ones are the same; :func:`replay` does so for a run of entries. ``data`` is JSON-safe: ids and the whole
numbers of tags and floor are text (41 digits do not survive a JSON number), turns, ranks and weights are numbers.
It may hold more keys (a decision's id, say): those are not looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import dropwhile, pairwise
from typing import Any
from uuid import UUID

from routing import rotation
from routing.rotation import Line, MoveRefused, Owed, OwedKind, Pick, Place

Data = dict[str, Any]


class Kind(StrEnum):
    """What an entry did to the line. The list is closed; the keys of its inputs are named beside each kind."""

    CHECKPOINT = "checkpoint"  # none: the data is the whole line, from which a replay can start
    TURN = "turn"  # unavailable, lose_turn; average where somebody is away under that policy
    JOIN = "join"  # agent, rank, weight
    LEAVE = "leave"  # agent
    REWEIGHT = "reweight"  # agent, weight; rank where the weight was 0
    REORDER = "reorder"  # order, rank
    SEND_TO_BACK = "send_to_back"  # agent, rank
    DEBIT = "debit"  # agent
    AVERAGE = "average"  # agent
    OWE = "owe"  # agent, owed
    GIVE_NEXT = "give_next"  # agent, owed
    WITHDRAW = "withdraw"  # owed
    VOID = "void"  # turn, agent, owed


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. ``seq`` is gapless within a queue; ``actor`` and ``reason`` say who did it and why."""

    seq: int
    kind: Kind
    at: datetime
    actor: str
    reason: str | None
    data: Mapping[str, Any]


class Check(StrEnum):
    """What an audit can find wrong. The list is closed."""

    NO_CHECKPOINT = "no_checkpoint"
    SEQ_GAP = "seq_gap"
    TURN_GAP = "turn_gap"
    OTHER_PICK = "other_pick"
    OTHER_OUTCOME = "other_outcome"
    OTHER_STATE = "other_state"
    BAD_VOID = "bad_void"
    REFUSED = "refused"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that does not follow. ``where`` names the field; ``seq`` is None for the present state."""

    check: Check
    seq: int | None
    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        entry = "present state" if self.seq is None else f"entry {self.seq}"
        return f"{entry}: {self.check.value}: {self.where} should be {self.expected}, is {self.found}"


class DoesNotFollow(Exception):
    """An entry is not what the line before it leads to."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Audit:
    """What a replay found. ``entries`` and ``turns`` count what was carried out, ``line`` is the state after it.

    ``problems`` are in order. Replaying ends at the first entry that does not follow; gaps in ``seq`` after it are
    still named.
    """

    entries: int
    turns: int
    line: Line | None
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every entry follows and leads to the present state."""
        return not self.problems


# -- a line as data -------------------------------------------------------------------------------------------


def checkpoint(line: Line) -> Data:
    """The whole of `line` as JSON-safe data."""
    return {
        "position": line.position,
        "floor": str(line.floor),
        "places": [
            {
                "agent": str(place.agent_id),
                "rank": place.rank,
                "weight": place.weight,
                "tag": str(place.tag),
                "last": place.last,
            }
            | ({"averaging": True} if place.averaging else {})
            for place in line.places
        ],
        "owed": [{"owed": str(row.owed_id), "agent": str(row.agent_id), "kind": row.kind.value} for row in line.owed],
    }


def line_of(data: Mapping[str, Any]) -> Line:
    """The line that :func:`checkpoint` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    return Line(
        position=_whole(data["position"]),
        floor=int(data["floor"]),
        places=tuple(
            Place(
                UUID(place["agent"]),
                rank=_whole(place["rank"]),
                weight=_whole(place["weight"]),
                tag=int(place["tag"]),
                last=_whole(place["last"]),
                averaging=place.get("averaging") is True,
            )
            for place in data["places"]
        ),
        owed=tuple(Owed(UUID(row["owed"]), UUID(row["agent"]), OwedKind(row["kind"])) for row in data["owed"]),
    )


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("a rank, weight, turn or position must be a whole number")
    return value


# -- carrying out ---------------------------------------------------------------------------------------------


def turn_data(
    picked: Pick,
    after: Line,
    unavailable: Collection[UUID],
    lose_turn: Collection[UUID] = (),
    average: Collection[UUID] = (),
) -> Data:
    """Data of the ``turn`` entry for `picked`, which led to `after`.

    `unavailable` is the whole set of members who could not take the lead, not only those passed over: the floor and
    the shares depend on it. `lose_turn` and `average` are those among them whose absence falls under that policy.
    """
    data: Data = {
        "turn": picked.turn,
        "agent": str(picked.agent_id),
        "how": picked.how.value,
        "owed": str(picked.owed_id) if picked.owed_id else None,
        "passed_over": [str(agent_id) for agent_id in picked.passed_over],
        "lost": [str(agent_id) for agent_id in picked.lost],
        "tag": str(rotation.place_of(after, picked.agent_id).tag),
        "floor": str(after.floor),
        "unavailable": sorted(str(agent_id) for agent_id in unavailable),
        "lose_turn": sorted(str(agent_id) for agent_id in lose_turn),
    }
    # Only where there is one: an entry of a time before this policy must be made again exactly as it is.
    return data | ({"average": sorted(str(agent_id) for agent_id in average)} if average else {})


def carry_out(line: Line, kind: Kind, given: Mapping[str, Any]) -> tuple[Line, Data]:
    """Do what an entry of `kind` with the inputs `given` does: the line after it, and the entry's complete data.

    Raises :class:`routing.rotation.MoveRefused` for a move that the line cannot take, and KeyError, TypeError or
    ValueError for inputs that cannot be read.
    """
    match kind:
        case Kind.CHECKPOINT:
            return line, checkpoint(line)
        case Kind.TURN:
            return _turn(line, given)
        case Kind.REORDER:
            order = [UUID(agent) for agent in given["order"]]
            line = rotation.reorder(line, order, _whole(given["rank"]))
            tags = [str(rotation.place_of(line, agent_id).tag) for agent_id in order]
            return line, {"order": [str(agent_id) for agent_id in order], "rank": given["rank"], "tags": tags}
        case Kind.WITHDRAW:
            owed_id = UUID(given["owed"])
            return rotation.withdraw(line, owed_id), {"owed": str(owed_id)}
        case Kind.VOID:
            return _void(line, given)
    agent_id = UUID(given["agent"])
    data: Data = {"agent": str(agent_id)}
    match kind:
        case Kind.LEAVE:
            data["dropped"] = [str(row.owed_id) for row in line.owed if row.agent_id == agent_id]
            return rotation.leave(line, agent_id), data
        case Kind.OWE | Kind.GIVE_NEXT:
            owed_id = UUID(given["owed"])
            grant = rotation.owe if kind is Kind.OWE else rotation.give_next
            return grant(line, owed_id, agent_id), data | {"owed": str(owed_id)}
        case Kind.JOIN:
            line = rotation.join(line, agent_id, _whole(given["rank"]), _whole(given["weight"]))
        case Kind.REWEIGHT:
            rank = given.get("rank")
            line = rotation.reweight(line, agent_id, _whole(given["weight"]), None if rank is None else _whole(rank))
        case Kind.SEND_TO_BACK:
            line = rotation.send_to_back(line, agent_id, _whole(given["rank"]))
        case Kind.DEBIT:
            line = rotation.debit(line, agent_id)
        case Kind.AVERAGE:
            line = rotation.returned_average(line, agent_id)
    place = rotation.place_of(line, agent_id)
    return line, data | {"rank": place.rank, "weight": place.weight, "tag": str(place.tag)}


def _turn(line: Line, given: Mapping[str, Any]) -> tuple[Line, Data]:
    unavailable = {UUID(agent) for agent in given["unavailable"]}
    lose_turn = {UUID(agent) for agent in given.get("lose_turn", ())}
    average = {UUID(agent) for agent in given.get("average", ())}
    members = {place.agent_id for place in line.places}
    if not lose_turn | average <= unavailable <= members:
        raise MoveRefused("unavailable must name members only, and lose_turn and average only unavailable ones")
    picked, after = rotation.pick(line, members - unavailable, lose_turn, average)
    if picked is None:
        raise MoveRefused("nobody was available, so no turn can have been taken")
    return after, turn_data(picked, after, unavailable, lose_turn, average)


def _void(line: Line, given: Mapping[str, Any]) -> tuple[Line, Data]:
    """A turn is given back: its number stays used, and its agent is owed one unless they are no longer a member."""
    turn, agent_id = _whole(given["turn"]), UUID(given["agent"])
    if not 1 <= turn <= line.position:
        raise MoveRefused(f"turn {turn} was never taken")
    data: Data = {"turn": turn, "agent": str(agent_id), "owed": None}
    if all(place.agent_id != agent_id for place in line.places):
        return line, data
    if given["owed"] is None:
        raise MoveRefused("the agent of a void turn is still a member and must be owed one")
    owed_id = UUID(given["owed"])
    return rotation.owe(line, owed_id, agent_id), data | {"owed": str(owed_id)}


# -- auditing -------------------------------------------------------------------------------------------------

_CHECKS = {"turn": Check.TURN_GAP, "agent": Check.OTHER_PICK}


def apply(line: Line, entry: Entry) -> Line:
    """The line after `entry`. Raises :class:`DoesNotFollow` unless its data is exactly what `line` leads to."""
    try:
        recorded = dict(entry.data)
        after, expected = carry_out(line, entry.kind, recorded)
    except MoveRefused as error:
        raise DoesNotFollow(_problem(Check.REFUSED, entry, "data", "possible", str(error))) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DoesNotFollow(_problem(Check.UNREADABLE, entry, "data", "readable", type(error).__name__)) from error
    for where, value in expected.items():
        found = recorded.get(where, "missing")
        if found != value:
            check = _CHECKS.get(where, Check.OTHER_OUTCOME) if entry.kind is Kind.TURN else Check.OTHER_OUTCOME
            raise DoesNotFollow(_problem(check, entry, where, str(value), str(found)))
    return after


def _problem(check: Check, entry: Entry, where: str, expected: str, found: str) -> Problem:
    return Problem(check, entry.seq, f"{entry.kind.value} {where}", expected, found)


def replay(entries: Iterable[Entry], present: Line | None) -> Audit:
    """Carry out `entries` (in order of ``seq``) again, from the first checkpoint among them, and compare.

    Every turn is picked again from the recorded unavailable set. `present` is the state that the last entry must lead
    to, or None to leave that out.
    """
    following = list(dropwhile(lambda entry: entry.kind is not Kind.CHECKPOINT, entries))
    if not following:
        return Audit(0, 0, None, (Problem(Check.NO_CHECKPOINT, None, "ledger", "started by a checkpoint", "without"),))
    gaps = [
        Problem(Check.SEQ_GAP, entry.seq, "seq", str(before.seq + 1), str(entry.seq))
        for before, entry in pairwise(following)
        if entry.seq != before.seq + 1
    ]
    try:
        line = line_of(following[0].data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found = _problem(Check.UNREADABLE, following[0], "data", "readable", type(error).__name__)
        return Audit(0, 0, None, (found, *gaps))
    done = turns = 0
    taken: dict[int, str] = {}
    try:
        for entry in following:
            line = apply(line, entry)
            if entry.kind is Kind.TURN:
                turns += 1
                taken[line.position] = entry.data["agent"]
            elif entry.kind is Kind.VOID:
                _check_void(entry, taken)
            done += 1
    except DoesNotFollow as error:
        problems = sorted([error.problem, *gaps], key=lambda problem: problem.seq or 0)
        return Audit(done, turns, line, tuple(problems))
    return Audit(done, turns, line, (*gaps, *(() if present is None else _differences(line, present))))


def _check_void(entry: Entry, taken: dict[int, str]) -> None:
    """A turn is given back once, and by whoever took it. Who took a turn before the checkpoint is not known here."""
    turn, agent = entry.data["turn"], entry.data["agent"]
    holder = taken.get(turn, agent)
    if holder != agent:
        raise DoesNotFollow(_problem(Check.BAD_VOID, entry, f"turn {turn}", f"held by {agent}", holder))
    taken[turn] = "void already"


def _differences(line: Line, present: Line) -> list[Problem]:
    """Where the present state is not what the ledger leads to, field by field."""
    expected, found = _flat(line), _flat(present)
    return [
        Problem(Check.OTHER_STATE, None, where, expected.get(where, "absent"), found.get(where, "absent"))
        for where in dict.fromkeys([*expected, *found])
        if expected.get(where) != found.get(where)
    ]


def _flat(line: Line) -> dict[str, str]:
    data = checkpoint(line)
    flat = {name: str(data[name]) for name in ("position", "floor")}
    for place in data["places"]:
        agent = place["agent"]
        flat |= {f"{name} of agent {agent}": str(value) for name, value in place.items() if name != "agent"}
    # In the order in which they are served: whether a give next or an older owed turn came first decides nothing.
    owed = sorted(data["owed"], key=lambda row: row["kind"] != OwedKind.GIVE_NEXT.value)
    return flat | {"owed turns": ", ".join(f"{row['kind']} {row['owed']} to {row['agent']}" for row in owed)}
