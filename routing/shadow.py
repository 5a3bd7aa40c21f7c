"""What a shadow's decision differs in from the live one, and how its line follows the members of its queue. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from routing import rotation
from routing.decide import Decision, Outcome
from routing.rotation import Line, Place


class Difference(StrEnum):
    """Why a shadow came to something else. The list is closed; each has its explanation."""

    RULE = "rule"
    EXISTING_OWNER = "existing_owner"
    SKIP = "skip"
    NOBODY = "nobody"
    SOMEBODY = "somebody"
    QUEUE = "queue"
    TURN = "turn"
    LINE = "line"

    @property
    def text(self) -> str:
        """What happened, in one sentence."""
        return _TEXTS[self]


_TEXTS: Mapping[Difference, str] = MappingProxyType(
    {
        Difference.RULE: "another rule decides",
        Difference.EXISTING_OWNER: "one of the two gives it to the agent who has this person already",
        Difference.SKIP: "the live agent is unavailable to the shadow",
        Difference.NOBODY: "the shadow finds nobody",
        Difference.SOMEBODY: "the shadow finds somebody where the live path has nobody",
        Difference.QUEUE: "another queue decides",
        Difference.TURN: "in the rotation it is somebody else's turn",
        Difference.LINE: "the shadow's own line has moved on otherwise",
    }
)


def compare(live: Decision, shadow: Decision) -> Difference | None:
    """Why `shadow` differs from `live`; None when the same agent gets the lead, or none in either.

    Of several causes the one that comes first in a decision is given: rule, then people, then the line.
    """
    if (live.outcome, live.agent_id) == (shadow.outcome, shadow.agent_id):
        return None
    if live.rule != shadow.rule:
        return Difference.RULE
    by_owner = [d.record.get("how") == "existing_owner" for d in (live, shadow)]
    if by_owner[0] != by_owner[1]:
        return Difference.EXISTING_OWNER
    if skip_of(live, shadow) is not None:
        return Difference.SKIP
    if shadow.outcome is not Outcome.ASSIGNED:
        return Difference.NOBODY
    if live.outcome is not Outcome.ASSIGNED:
        return Difference.SOMEBODY
    if live.queue_id != shadow.queue_id:
        return Difference.QUEUE
    return Difference.TURN if live.pick is None and shadow.pick is not None else Difference.LINE


def skip_of(live: Decision, shadow: Decision) -> Mapping[str, Any] | None:
    """Why the live agent is unavailable to the shadow, as its decision recorded it; None if they are not."""
    away = (out for path in shadow.record.get("paths", ()) for out in path.get("unavailable", ()))
    return next((out for out in away if live.agent_id and out["agent"] == str(live.agent_id)), None)


def flat(line: Line) -> Line:
    """`line` with every weight as 1: how it stands while the weights flag is off."""
    return replace(line, places=tuple(replace(place, weight=1) for place in line.places))


def follow(line: Line, members: Sequence[Place]) -> Line:
    """`line` with the present `members` and weights: leavers leave, the re-weighted keep their lag, joiners join.

    The ranks that it gives out are its own; they need not be those of the live line.
    """
    weights = {place.agent_id: place.weight for place in members}
    next_rank = max((place.rank for place in (*line.places, *members)), default=0) + 1
    for place in line.places:
        weight = weights.get(place.agent_id)
        if weight is None:
            line = rotation.leave(line, place.agent_id)
        elif weight != place.weight:
            line = rotation.reweight(line, place.agent_id, weight, next_rank)
            next_rank += 1
    standing = {place.agent_id for place in line.places}
    for place in members:
        if place.agent_id not in standing:
            line = rotation.join(line, place.agent_id, next_rank, place.weight)
            next_rank += 1
    return line
