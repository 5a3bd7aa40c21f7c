"""Lines within lines: a team that is a member of a queue takes turns there, and its own line says who of it is served.

Pure. A line's members are agents or other lines. Looking goes all the way down before anything moves: a team of which
nobody can take the lead is passed over like an absent agent and takes no turn. Taking then goes down once, one turn of
each line on the way. The caller holds the locks of all these lines.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from routing import ledger, rotation
from routing.model import Skip, SkipPolicy
from routing.plan import QueueState
from routing.rotation import How, Line, Pick, Place
from routing.skips import Unavailable


@dataclass(slots=True)
class Sight:
    """One line as a lead finds it: who of it is away, who can take it, and its teams as they were found in turn."""

    queue_id: UUID
    line: Line
    away: list[Unavailable] = field(default_factory=list)
    available: list[UUID] = field(default_factory=list)
    inside: dict[UUID, Sight] = field(default_factory=dict)

    def passed(self) -> Iterator[tuple[UUID, Sight]]:
        """The teams in which nobody is available, each with the line that it is a member of."""
        for inside in self.inside.values():
            if not inside.available:
                yield self.queue_id, inside
                yield from inside.passed()


@dataclass(frozen=True, slots=True)
class Taken:
    """A turn of one line on the way down: the line before and after it, and the data of its ledger entry."""

    queue_id: UUID
    pick: Pick
    before: Line
    after: Line
    data: Mapping[str, Any]


def look(
    queue_id: UUID,
    lines: Mapping[UUID, Line],
    agents: Container[UUID],
    away: Callable[[Place], Unavailable | None],
    *,
    teams: bool,
    weights: bool,
) -> Sight:
    """Who of a line, and of the teams in it, can take a lead.

    Members that are not among `agents` are teams, by the id of their line. `away` says why an agent cannot take the
    lead; `teams` and `weights` whether these capabilities are on. Raises KeyError for a line that is not among `lines`.
    """
    sight = Sight(queue_id, lines[queue_id])
    for place in sight.line.places:
        out: Unavailable | None
        if place.agent_id in agents:
            out = away(place)
        elif not teams:
            detail = "teams are off and take no turns; `turnlock flags TENANT teams on`"
            out = Unavailable(place.agent_id, Skip.TEAM_AWAY, detail)
        elif weights and not place.weight:
            detail = "has weight 0 in this queue; give the team a weight above 0"
            out = Unavailable(place.agent_id, Skip.WEIGHT_ZERO, detail)
        else:
            inside = look(place.agent_id, lines, agents, away, teams=teams, weights=weights)
            sight.inside[place.agent_id] = inside
            out = None if inside.available else Unavailable(place.agent_id, Skip.TEAM_AWAY, _nobody(inside))
        if out is None:
            sight.available.append(place.agent_id)
        else:
            sight.away.append(out)
    return sight


def _nobody(sight: Sight) -> str:
    """Why nobody of a team is available, counted by reason."""
    if not sight.away:
        return "the team has no members; add some"
    reasons = [out.skip.value for out in sight.away]
    counted = ", ".join(f"{reasons.count(one)} {one}" for one in dict.fromkeys(reasons))
    return f"nobody of the team is available: {counted}"


def take(sight: Sight, queues: Mapping[UUID, QueueState]) -> list[Taken]:
    """The turns by which a lead finds its agent, from the outer line to the one that the agent stands in.

    Empty when nobody is available. `queues` gives the skip policy of each line. Nothing is moved: each turn holds the
    line after it.
    """
    taken: list[Taken] = []
    at: Sight | None = sight
    while at is not None:
        policies = queues[at.queue_id]
        lose, average = policies.under(SkipPolicy.LOSE_TURN, at.away), policies.under(SkipPolicy.AVERAGE, at.away)
        pick, after = rotation.pick(at.line, at.available, lose, average)
        if pick is None:
            return []
        gone = [out.agent_id for out in at.away]
        data = ledger.turn_data(pick, after, gone, lose, average)
        taken.append(Taken(at.queue_id, pick, at.line, after, data))
        at = at.inside.get(pick.agent_id)
    return taken


def how(taken: list[Taken]) -> How:
    """By what the agent won: what the innermost line that did not simply turn says."""
    return next((one.pick.how for one in reversed(taken) if one.pick.how is not How.LINE), How.LINE)


def by_rank(sight: Sight) -> list[tuple[UUID, UUID]]:
    """Whom a lead goes to while the rotation is off: (line, member) by rank, down to the agent. Empty for nobody."""
    found: list[tuple[UUID, UUID]] = []
    at: Sight | None = sight
    while at is not None:
        first = rotation.first_by_rank(at.line.places, at.available)
        if first is None:
            return []
        found.append((at.queue_id, first))
        at = at.inside.get(first)
    return found


def agents_of(
    queue_id: UUID, lines: Mapping[UUID, Line], agents: Container[UUID], *, teams: bool
) -> Iterator[tuple[UUID, int]]:
    """Every agent who can get a turn of a line, with their weight, down through its teams. Weight 0 is left out."""
    for place in lines[queue_id].places:
        if place.weight and place.agent_id in agents:
            yield place.agent_id, place.weight
        elif place.weight and teams:
            yield from agents_of(place.agent_id, lines, agents, teams=teams)
