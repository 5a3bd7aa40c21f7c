"""A line as it stood at some entry of its ledger, taken at the ledger's word: for showing.

:func:`routing.ledger.replay` picks every turn again, to prove it; that is what an audit is for. Here a turn's recorded
outcome is believed, which is many times quicker and gives the same line for a ledger that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

from routing.ledger import Kind, carry_out, line_of
from routing.rotation import UNIT, How, Line, Owed, Place


def recall(entries: Iterable[tuple[str, Mapping[str, Any]]], line: Line | None = None) -> Line | None:
    """The line after these entries (kind, data), from `line` on or from a checkpoint, which then is the first of them.

    Of a turn the key ``passed_over`` is not looked at. Raises KeyError, TypeError or ValueError
    for entries that do not follow each other.
    """
    turns: _Turns | None = None
    for kind, data in entries:
        if kind == Kind.CHECKPOINT:
            line, turns = line_of(data), None
        elif line is None:
            raise ValueError("a ledger is recalled from a checkpoint on")
        elif kind == Kind.TURN:
            turns = turns or _Turns(line)
            turns.take(data)
        else:
            line, _ = carry_out(line if turns is None else turns.line(), Kind(kind), data)
            turns = None
    return line if turns is None else turns.line()


class _Turns:
    """A run of turns on one line, without a new line for each of them."""

    def __init__(self, line: Line) -> None:
        self.position, self.floor = line.position, line.floor
        self.owed: tuple[Owed, ...] = line.owed
        self.places: dict[UUID, Place] = {place.agent_id: place for place in line.places}
        # Beside the places: few are ever, and looking through all of a long queue at each turn is what would cost.
        self.averaging = {place.agent_id for place in line.places if place.averaging}

    def take(self, data: Mapping[str, Any]) -> None:
        for back in self.averaging - {UUID(one) for one in data["unavailable"]} if self.averaging else ():
            place = self.places[back]
            self.places[back] = replace(place, tag=max(place.tag, self.floor), averaging=False)
            self.averaging.discard(back)
        for agent in data["lost"]:
            place = self.places[UUID(agent)]
            tag = max(place.tag, self.floor) + UNIT // place.weight
            self.places[place.agent_id] = replace(place, tag=tag)
        agent_id = UUID(data["agent"])
        self.position = data["turn"]
        if data["owed"] is not None:
            self.owed = tuple(row for row in self.owed if row.owed_id != UUID(data["owed"]))
        if data["how"] != How.OWED:  # a turn that was owed moves nobody
            self.floor = int(data["floor"])
            self.places[agent_id] = replace(self.places[agent_id], tag=int(data["tag"]), last=data["turn"])
        for agent in data.get("average", ()):
            self.places[UUID(agent)] = replace(self.places[UUID(agent)], averaging=True)
            self.averaging.add(UUID(agent))

    def line(self) -> Line:
        return Line(self.position, self.floor, tuple(self.places.values()), self.owed)
