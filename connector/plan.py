"""What applying a configuration would do, before it is done: the differences, and what becomes of each line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from connector.config import warnings
from connector.draft import Draft, Move, rehearse
from connector.runtime import Runtime, Tenant
from routing import rotation
from routing.decide import QueueState

Json = dict[str, Any]


def plan(runtime: Runtime, tenant: Tenant, text: str | bytes) -> Json:
    """The plan for `text`, JSON-safe. Nothing is applied.

    Raises :class:`connector.config.ConfigProblems` with everything that is wrong.
    """
    draft = rehearse(runtime, tenant, text)
    return {
        "tenant": tenant.name,
        "version": draft.version,
        "changed": draft.changed,
        "changes": [
            {"how": one.how.value, "path": one.path, "before": one.before, "after": one.after} for one in draft.changes
        ],
        "lines": _lines(draft),
        "warnings": [str(note) for note in warnings(draft.config)],
    }


def _lines(draft: Draft) -> list[Json]:
    """The queues whose line moves or begins, each with its members before and after."""
    found = []
    for queue_id, after in sorted(draft.after.items(), key=lambda item: item[1].name):
        moves = [move for move in draft.moves if move.queue_id == queue_id]
        if moves:
            found.append(_line(draft, draft.before.get(queue_id), after, moves))
    return found


def _line(draft: Draft, before: QueueState | None, after: QueueState, moves: Sequence[Move]) -> Json:
    was = _places(before)
    is_ = _places(after)
    weights = {} if before is None else {place.agent_id: place.weight for place in before.line.places}
    new_weights = {place.agent_id: place.weight for place in after.line.places}
    dropped: Mapping[str, int] = {
        move.data["agent"]: len(move.data.get("dropped", ())) for move in moves if move.kind == "leave"
    }
    return {
        "queue": after.name,
        "position": after.line.position,
        "moves": [move.kind for move in moves],
        "members": [
            {
                "agent": _agent(draft, agent_id),
                "what": _what(agent_id, was, is_, weights, new_weights),
                "weight_before": weights.get(agent_id),
                "weight_after": new_weights.get(agent_id),
                "place_before": was.get(agent_id),
                "place_after": is_.get(agent_id),
                "owed_turns_dropped": dropped.get(str(agent_id), 0),
            }
            for agent_id in dict.fromkeys([*is_, *was])
        ],
    }


def _places(queue: QueueState | None) -> dict[UUID, int]:
    """Each member's place in line if all were available, from 1."""
    return {} if queue is None else {agent_id: at for at, agent_id in enumerate(rotation.lineup(queue.line), 1)}


def _agent(draft: Draft, agent_id: UUID) -> Json:
    agent = draft.agents.get(agent_id)
    if agent is None:  # a team that takes turns as one
        return {"agent_id": None, "ref": None, "name": draft.after[agent_id].name, "queue_id": str(agent_id)}
    return {"agent_id": str(agent_id), "ref": agent.ref, "name": agent.name}


def _what(
    agent_id: UUID,
    was: Mapping[UUID, int],
    is_: Mapping[UUID, int],
    weights: Mapping[UUID, int],
    new_weights: Mapping[UUID, int],
) -> str:
    if agent_id not in was:
        return "joins"
    if agent_id not in is_:
        return "leaves"
    if weights[agent_id] != new_weights[agent_id]:
        return "reweighted"
    return "kept"
