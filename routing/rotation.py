"""The rotation: whose turn it is, as pure functions from one :class:`Line` to the next.

First in line and available gets the lead, then goes to the back. Skipped members keep their place. With equal weights
this is exactly: walk the line from the front, take the first available, move them to the end. With weights it is
*earliest eligible deadline first* (I. Stoica and H. Abdel-Wahab, "Earliest Eligible Virtual Deadline First", Old
Dominion University TR-95-22, 1995), here over a set of members that may differ from lead to lead.

Tags and the floor are exact integers in units of ``UNIT / weight`` per turn, so nothing is ever rounded, with one
exception that :func:`reweight` names. A member's *stride* is ``UNIT // weight``: what one turn costs them. Their
*start* is ``max(tag, floor)``, their *deadline* ``tag + stride``.

Every function is a plain value computation: no clock, no randomness, no database. Callers hold the lock of the queue.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from uuid import UUID

MAX_WEIGHT = 100
UNIT: int = math.lcm(*range(1, MAX_WEIGHT + 1))
"""One turn of a member of weight 1. Divisible by every weight, which is why strides are whole numbers (41 digits)."""

STANDING_TURNS = 1_000
"""How many turns :func:`standing` looks ahead at most: it is for showing, and must stay quick."""


class MoveRefused(ValueError):
    """The line cannot take this move. The message says what is wrong and how to put it right."""


class OwedKind(StrEnum):
    """Why a member is served before the line: ``give_next`` rows come first, then ``owed`` ones."""

    GIVE_NEXT = "give_next"
    OWED = "owed"


class How(StrEnum):
    """By what a turn was won."""

    LINE = "line"
    OWED = "owed"
    GIVE_NEXT = "give_next"


@dataclass(frozen=True, slots=True)
class Place:
    """One member's place in line.

    ``rank`` breaks ties and is never reused within a queue: the queue counts the ranks that it gives out, and whoever
    goes to the back gets a new one. ``weight`` is 0 to 100, as it counts *now* (1 for everyone while the weights flag
    is off). ``tag`` is how far the member has been served, in units of :data:`UNIT` per turn at weight 1;
    :func:`reweight` can make it negative. ``last`` is the turn that served them last, or the position at which they
    went to the back. ``averaging`` marks a member who was away at the last turn under the policy ``average``: when
    they are back, their absence earns them no place ahead of the floor.
    """

    agent_id: UUID
    rank: int
    weight: int
    tag: int = 0
    last: int = 0
    averaging: bool = False


@dataclass(frozen=True, slots=True)
class Owed:
    """A turn that a member gets before the line is asked: given back, granted as credit, or given next by an admin."""

    owed_id: UUID
    agent_id: UUID
    kind: OwedKind


@dataclass(frozen=True, slots=True)
class Line:
    """The whole state of one rotation.

    ``position`` counts turns ever taken; ``floor`` is the least start at the last pick and only rises. ``places`` are
    kept in order of rank whatever order they are given in, so that equal lines compare equal. ``owed`` is oldest
    first. Raises :class:`MoveRefused` for a state that no sequence of moves can reach.
    """

    position: int
    floor: int
    places: tuple[Place, ...]
    owed: tuple[Owed, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", tuple(sorted(self.places, key=lambda place: place.rank)))
        members = {place.agent_id for place in self.places}
        ranks = {place.rank for place in self.places}
        if self.position < 0 or self.floor < 0:
            raise MoveRefused("position and floor start at 0 and only rise; correct the stored queue")
        if len(members) != len(self.places):
            raise MoveRefused("an agent has two places in one line; keep one")
        if len(ranks) != len(self.places):
            raise MoveRefused("two members have one rank; give one of them a rank that was never used")
        if any(not 0 <= place.weight <= MAX_WEIGHT for place in self.places):
            raise MoveRefused(f"a weight must be a whole number from 0 to {MAX_WEIGHT}")
        if any(not 0 <= place.last <= self.position for place in self.places):
            raise MoveRefused("a member's last turn lies beyond the position; correct the stored members")
        if len({owed.owed_id for owed in self.owed}) != len(self.owed):
            raise MoveRefused("an owed turn is listed twice; keep one")
        if any(owed.agent_id not in members for owed in self.owed):
            raise MoveRefused("a turn is owed to an agent who is not a member; withdraw it or let them join")


@dataclass(frozen=True, slots=True)
class Pick:
    """Who gets the lead.

    ``turn`` is the position after it. ``passed_over`` are unavailable members who would have won before the winner:
    first those with an owed turn that was kept for them, then the others in line order. ``lost`` are the absentees
    whose queue lets them lose their turn, once per turn that this pick charged them.
    """

    agent_id: UUID
    turn: int
    how: How
    owed_id: UUID | None = None
    passed_over: tuple[UUID, ...] = ()
    lost: tuple[UUID, ...] = ()


# -- reading a line -------------------------------------------------------------------------------------------


def place_of(line: Line, agent_id: UUID) -> Place:
    """The place of `agent_id`. Raises :class:`MoveRefused` when they are not a member."""
    for place in line.places:
        if place.agent_id == agent_id:
            return place
    raise MoveRefused(f"agent {agent_id} is not a member of this queue; let them join first")


def _start(place: Place, floor: int) -> int:
    return max(place.tag, floor)


def _stride(weight: int) -> int:
    return UNIT // weight


def _turn_order(place: Place) -> tuple[int, int, int]:
    # The raw tag, not the start: a member away for long is ahead of one away for less, which is the order of the line.
    return place.tag + _stride(place.weight), place.last, place.rank


def _latest_start(contenders: Collection[Place], floor: int) -> int:
    """The weighted mean of all starts, rounded down: whole starts are not beyond the one when not beyond the other."""
    weighted = sum(place.weight * _start(place, floor) for place in contenders)
    return weighted // sum(place.weight for place in contenders)


def _first(contenders: Collection[Place], floor: int) -> Place:
    """The earliest deadline among those whose start is not beyond the weighted mean of all starts."""
    latest = _latest_start(contenders, floor)
    # The floor is never beyond the mean, for no start is before it.
    return min((place for place in contenders if place.tag <= latest), key=_turn_order)


# -- taking a turn --------------------------------------------------------------------------------------------


def pick(
    line: Line, available: Collection[UUID], lose_turn: Collection[UUID] = (), average: Collection[UUID] = ()
) -> tuple[Pick | None, Line]:
    """Serve one lead: who gets it, and the line after it.

    `available` are the agents who may take this lead; members of weight 0 and strangers in it are ignored.
    `lose_turn` are unavailable members whose queue says that absence costs them their turn, `average` those who come
    back at the floor; all other unavailable members keep their place. With nobody available the answer is None and the
    same line: no turn is consumed.
    """
    free = frozenset(available)
    if not any(place.weight and place.agent_id in free for place in line.places):
        return None, line
    picked, after = _serve(_all_back(line, free), free, lose_turn)
    away = frozenset(average) - free
    marked = tuple(replace(p, averaging=True) if p.agent_id in away else p for p in after.places)
    return picked, replace(after, places=marked) if away else after


def _all_back(line: Line, free: frozenset[UUID]) -> Line:
    """The line once those among `free` who come back at the floor have done so."""
    for place in line.places:
        if place.averaging and place.agent_id in free:
            line = returned_average(line, place.agent_id)
    return line


def _serve(line: Line, free: frozenset[UUID], lose_turn: Collection[UUID]) -> tuple[Pick, Line]:
    losing = frozenset(lose_turn)
    contenders = {
        place.agent_id: place
        for place in line.places
        if place.weight and (place.agent_id in free or place.agent_id in losing)
    }
    kept: list[UUID] = []
    for owed in _owed_in_order(line):
        if owed.agent_id not in free or owed.agent_id not in contenders:
            kept.append(owed.agent_id)
            continue
        rest = tuple(row for row in line.owed if row.owed_id != owed.owed_id)
        served = Pick(
            owed.agent_id,
            line.position + 1,
            How(owed.kind.value),
            owed_id=owed.owed_id,
            passed_over=tuple(dict.fromkeys(kept)),
        )
        if owed.kind is OwedKind.OWED:
            # It replaces a turn that was charged and lost, so it costs nothing and moves nobody.
            return served, replace(line, position=served.turn, owed=rest)
        return served, _charge(replace(line, owed=rest), contenders, contenders[owed.agent_id])

    lost: list[UUID] = []
    while (winner := _first(contenders.values(), line.floor)).agent_id not in free:
        contenders[winner.agent_id] = _debited(winner, line.floor)
        lost.append(winner.agent_id)
    passed = [place.agent_id for place in _passed_over(line, contenders, winner)]
    picked = Pick(
        winner.agent_id,
        line.position + 1,
        How.LINE,
        passed_over=tuple(dict.fromkeys(kept + passed)),
        lost=tuple(lost),
    )
    return picked, _charge(line, contenders, winner)


def _owed_in_order(line: Line) -> list[Owed]:
    return sorted(line.owed, key=lambda owed: owed.kind is not OwedKind.GIVE_NEXT)


def _passed_over(line: Line, contenders: dict[UUID, Place], winner: Place) -> list[Place]:
    """Members out of the running who, had they been in it, would have been eligible and due before `winner`."""
    # Adding a member to the sums changes both sides by the same amount, so those of the contenders decide for each.
    latest = _latest_start(contenders.values(), line.floor)
    return sorted(
        (
            place
            for place in line.places
            if place.weight
            and place.agent_id not in contenders
            and place.tag <= latest
            and _turn_order(place) < _turn_order(winner)
        ),
        key=_turn_order,
    )


def _charge(line: Line, contenders: dict[UUID, Place], winner: Place) -> Line:
    """The line after `winner` took the next turn against `contenders` (who may carry debits of this pick)."""
    turn = line.position + 1
    start = _start(winner, line.floor)
    changed = dict(contenders)
    changed[winner.agent_id] = replace(winner, tag=start + _stride(winner.weight), last=turn)
    return replace(
        line,
        position=turn,
        floor=min(_start(place, line.floor) for place in contenders.values()),
        places=tuple(changed.get(place.agent_id, place) for place in line.places),
    )


def next_up(
    line: Line,
    available: Collection[UUID],
    count: int,
    lose_turn: Collection[UUID] = (),
    average: Collection[UUID] = (),
) -> list[Pick]:
    """The next `count` picks if nothing changes: the preview runs the real thing. Empty when nobody is available."""
    picks: list[Pick] = []
    for _ in range(count):
        picked, line = pick(line, available, lose_turn, average)
        if picked is None:
            break
        picks.append(picked)
    return picks


def standing(line: Line, available: Collection[UUID] | None = None) -> tuple[UUID, ...]:
    """Members in the order in which each is next served, for showing.

    With `available`, only those of weight above 0 among them. Without it, all members as if everyone were available,
    those of weight 0 last. Looks :data:`STANDING_TURNS` turns ahead; whoever is not served by then follows by deadline.
    """
    free = frozenset(place.agent_id for place in line.places) if available is None else frozenset(available)
    waiting = [place for place in line.places if place.weight and place.agent_id in free]
    order: dict[UUID, None] = {}
    ahead = line
    for _ in range(STANDING_TURNS):
        if len(order) == len(waiting):
            break
        picked, ahead = pick(ahead, free)
        if picked is not None:
            order[picked.agent_id] = None
    order.update(dict.fromkeys(place.agent_id for place in sorted(waiting, key=_turn_order)))
    if available is None:
        order.update(dict.fromkeys(place.agent_id for place in line.places))
    return tuple(order)


def lineup(line: Line, available: Collection[UUID] | None = None) -> tuple[UUID, ...]:
    """All members in line order as one pick among `available` (None: everyone) sees them.

    Whoever is owed a turn stands first; then those whose share is due, the earliest deadline first; then those who had
    their share already; then those of weight 0. The first of it who is available is the one whom :func:`pick` takes.
    """
    free = frozenset(place.agent_id for place in line.places) if available is None else frozenset(available)
    line = _all_back(line, free)
    weighty = [place for place in line.places if place.weight]
    contenders = [place for place in weighty if place.agent_id in free] or weighty
    latest = _latest_start(contenders, line.floor) if contenders else 0
    weighty.sort(key=lambda place: (place.tag > latest, _turn_order(place)))
    due = [owed.agent_id for owed in _owed_in_order(line) if place_of(line, owed.agent_id).weight]
    rest = (place.agent_id for place in (*weighty, *line.places))
    return tuple(dict.fromkeys((*due, *rest)))


def first_by_rank(places: Collection[Place], available: Collection[UUID]) -> UUID | None:
    """Whom a lead goes to while the rotation flag is off: the first available by rank. Consumes no turn."""
    free = frozenset(available)
    ranked = [place for place in places if place.weight and place.agent_id in free]
    return min(ranked, key=lambda place: place.rank).agent_id if ranked else None


# -- moves ----------------------------------------------------------------------------------------------------


def new_line(members: Sequence[tuple[UUID, int]]) -> Line:
    """The line of a queue at its creation: `members` with their weights, first in line first, all tags 0."""
    places = tuple(Place(agent_id, rank, weight) for rank, (agent_id, weight) in enumerate(members))
    return Line(position=0, floor=0, places=places)


def _changed(line: Line, place: Place) -> Line:
    return replace(line, places=tuple(place if old.agent_id == place.agent_id else old for old in line.places))


def _mean(line: Line) -> tuple[int, int]:
    """Weighted mean of all starts as (numerator, denominator), the origin from which lags are counted.

    A member charged ahead by more than one turn (given next or debited repeatedly) counts as one turn ahead: else
    fifty debits of one member would drag the mean, and with it every newcomer, rounds away from the others.
    """
    counted = [place for place in line.places if place.weight]
    ahead = 0
    while True:
        total = sum(place.weight for place in counted)
        weighted = sum(place.weight * _start(place, line.floor) for place in counted) + ahead * UNIT
        near = [p for p in counted if (_start(p, line.floor) - _stride(p.weight)) * total <= weighted]
        if len(near) == len(counted):
            return weighted, total
        ahead, counted = ahead + len(counted) - len(near), near


def _back(line: Line, place: Place) -> Line:
    """Put `place` (a newcomer's, or a member's with their new rank) at the back: due when the last member is due.

    But at most one of their own turns beyond the mean: behind a light or a much debited member, a heavy one would
    wait for dozens of their rounds, and for dozens more once :func:`reweight` keeps such a lag. The new rank matters:
    with the old one, a member sent back right after another was served ties with them, and may win by it.
    """
    if any(other.rank >= place.rank for other in line.places):
        raise MoveRefused(f"rank {place.rank} was given out before; take the next rank of the queue")
    others = tuple(other for other in line.places if other.agent_id != place.agent_id)
    tag = max(line.floor, place.tag)  # nobody is sent forward
    deadlines = [_start(other, line.floor) + _stride(other.weight) for other in others if other.weight]
    if place.weight and deadlines:
        weighted, total = _mean(line)
        stride = _stride(place.weight)
        tag = max(tag, min(max(deadlines) - stride, weighted // total + stride))
    return replace(line, places=(*others, replace(place, tag=tag, last=line.position)))


def join(line: Line, agent_id: UUID, rank: int, weight: int = 1) -> Line:
    """Add a member at the back, with the next `rank` of the queue. Who left and joins again is a newcomer.

    Raises :class:`MoveRefused` for who is a member already and for a rank that is not beyond all others.
    """
    if any(place.agent_id == agent_id for place in line.places):
        raise MoveRefused(f"agent {agent_id} is already a member of this queue")
    _check_weight(weight)
    return _back(line, Place(agent_id, rank, weight, tag=line.floor))


def leave(line: Line, agent_id: UUID) -> Line:
    """Remove a member together with the turns they are owed. Nobody else's place changes."""
    place_of(line, agent_id)
    return replace(
        line,
        places=tuple(place for place in line.places if place.agent_id != agent_id),
        owed=tuple(owed for owed in line.owed if owed.agent_id != agent_id),
    )


def reweight(line: Line, agent_id: UUID, weight: int, rank: int | None = None) -> Line:
    """Change a member's weight and keep their lag *in turns* behind (or ahead of) the weighted mean.

    Shifting the tag by the difference of strides instead would flood. Rounds down once, by less than one of
    :data:`UNIT` parts of a turn. At 0 the member keeps a place that is never picked; from 0 they go to the back, for
    which the next `rank` of the queue is needed.
    """
    place = place_of(line, agent_id)
    _check_weight(weight)
    if weight == place.weight:
        return line
    if weight == 0:
        return _changed(line, replace(place, weight=0))
    if place.weight == 0:
        if rank is None:
            raise MoveRefused("from weight 0 a member goes to the back of the line; give the next rank of the queue")
        return _back(line, replace(place, rank=rank, weight=weight, tag=line.floor))
    weighted, total = _mean(line)
    # mean - (mean - start) * old / new, brought over one denominator.
    lag = weighted - _start(place, line.floor) * total
    tag = (weighted * weight - lag * place.weight) // (total * weight)
    return _changed(line, replace(place, weight=weight, tag=tag))


def reorder(line: Line, order: Sequence[UUID], rank: int) -> Line:
    """Deal the same tags to the members in a new order, the earliest to the first. Nobody is reset.

    `order` names every member once; they get the ranks from `rank`, the next of the queue, in that order. Members of
    weight 0 take part in the ranks only: their tag means nothing. Nobody is dealt more than one of their own turns of
    lead or lag: the tag of a light or a debited member would make a heavy one wait, or flood, for dozens of turns.
    """
    if sorted(order, key=str) != sorted((place.agent_id for place in line.places), key=str):
        raise MoveRefused("a new order must name every member of the queue exactly once")
    if any(place.rank >= rank for place in line.places):
        raise MoveRefused(f"rank {rank} was given out before; take the next rank of the queue")
    old = [place_of(line, agent_id) for agent_id in order]
    dealt = iter(sorted((place.tag, place.last, place.rank) for place in old if place.weight))
    weighted, total = _mean(line)
    places: list[Place] = []
    for number, place in enumerate(old, start=rank):
        tag, last = place.tag, place.last
        if place.weight:
            tag, last, _ = next(dealt)
            mean, stride = weighted // total, _stride(place.weight)
            if not mean - stride <= max(tag, line.floor) <= mean + stride:
                tag = mean - stride if tag < mean else mean + stride
        places.append(replace(place, rank=number, tag=tag, last=last))
    return replace(line, places=tuple(places))


def send_to_back(line: Line, agent_id: UUID, rank: int) -> Line:
    """Move a member to the back, with the next `rank` of the queue. It never moves anyone forward."""
    return _back(line, replace(place_of(line, agent_id), rank=rank))


def _debited(place: Place, floor: int) -> Place:
    return replace(place, tag=_start(place, floor) + _stride(place.weight))


def debit(line: Line, agent_id: UUID) -> Line:
    """Charge a member one turn that they did not take here. A member of weight 0 has no stride: nothing changes."""
    place = place_of(line, agent_id)
    return _changed(line, _debited(place, line.floor)) if place.weight else line


def returned_average(line: Line, agent_id: UUID) -> Line:
    """A member is back in a queue whose policy is ``average``: their absence earns them no place ahead of the floor."""
    place = place_of(line, agent_id)
    return _changed(line, replace(place, tag=_start(place, line.floor), averaging=False))


def owe(line: Line, owed_id: UUID, agent_id: UUID) -> Line:
    """Owe a member one turn (given back, or a credit): served before the line, without charge, when they are there."""
    return _with_owed(line, Owed(owed_id, agent_id, OwedKind.OWED))


def give_next(line: Line, owed_id: UUID, agent_id: UUID) -> Line:
    """Give a member the next lead that they may take, before owed turns and the line. It is charged as usual."""
    return _with_owed(line, Owed(owed_id, agent_id, OwedKind.GIVE_NEXT))


def _with_owed(line: Line, owed: Owed) -> Line:
    place_of(line, owed.agent_id)
    if any(row.owed_id == owed.owed_id for row in line.owed):
        raise MoveRefused(f"owed turn {owed.owed_id} is already in the line; use a new id")
    return replace(line, owed=(*line.owed, owed))


def withdraw(line: Line, owed_id: UUID) -> Line:
    """Take back an owed turn or a give next that has not been served. Raises :class:`MoveRefused` if there is none."""
    rest = tuple(owed for owed in line.owed if owed.owed_id != owed_id)
    if len(rest) == len(line.owed):
        raise MoveRefused(f"owed turn {owed_id} is not waiting; it was served or withdrawn already")
    return replace(line, owed=rest)


def _check_weight(weight: int) -> None:
    if not 0 <= weight <= MAX_WEIGHT:
        raise MoveRefused(f"a weight must be a whole number from 0 to {MAX_WEIGHT}")
