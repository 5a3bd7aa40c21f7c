"""What a decision looked at, for people: rules with their tests, queues with everyone in line order, agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector.naming import Json, Names
from connector.reasons import remedy_of, skip_remedy
from routing import rotation
from routing import tables as t
from routing.recall import recall
from routing.rotation import Line


def tell_rule(tried: Mapping[str, Any]) -> Json:
    """A rule that was tried, with every key: what is recorded leaves out what is empty."""
    return {
        "rule": tried["rule"],
        "precedence": tried["precedence"],
        "matched": tried["matched"],
        "tests": [
            {
                "field": why["field"],
                "test": why["test"],
                "value": why["value"],
                "not": why.get("not", False),
                "result": why["result"],
                "lead": why.get("lead"),
            }
            for why in tried["why"]
        ],
        "omitted": tried.get("omitted", 0),
    }


def taker_of(path: Mapping[str, Any], queue_id: object, agent_id: object) -> str | None:
    """The member of a recorded path who got the lead by it: a team in a queue that it is nested in, else the agent.

    `queue_id` and `agent_id` are those of the decision.
    """
    if "taken" in path:
        return str(path["taken"])
    return str(agent_id) if agent_id and str(queue_id) == path.get("queue") and "why" not in path else None


def tell_path(
    names: Names, path: Mapping[str, Any], taker: str | None, before: Line | None, after: Line | None
) -> Json:
    """A recorded path. `taker` is the member who got the lead by it; the lines are the queue's around that turn."""
    why = path.get("why")
    out: Json = {"why": why, "remedy": remedy_of(why) or skip_remedy(why), "detail": path.get("detail")}
    if "queue" not in path:
        kind = "existing_owner" if "existing_owner" in path else "agent"
        return {"kind": kind, "agent": names.agent(path.get(kind))} | out
    position_before, position_after = path.get("position", (None, None))
    return {
        "kind": "queue",
        "queue": names.queue(path["queue"]),
        "within": names.queue(path.get("within")),
        "position_before": position_before,
        "position_after": position_after,
        "members": _members(names, path, taker, before, after),
    } | out


def _members(
    names: Names, path: Mapping[str, Any], taker: str | None, before: Line | None, after: Line | None
) -> list[Json]:
    """Everybody of the queue in line order as the decision saw them, each with why it was not theirs."""
    away = {one["agent"]: one for one in path.get("unavailable", ())}
    passed, lost = list(path.get("passed_over", ())), set(path.get("lost", ()))
    was, is_ = _places(before, away), _places(after, away)
    order = dict.fromkeys([*was, *passed, *([taker] if taker else []), *away])
    rows = []
    for one in order:
        out = away.get(one)
        behind = taker is not None and one != taker and out is None
        rows.append(
            {
                "agent": names.agent(one),
                "state": "taken" if one == taker else "unavailable" if out else "available",
                "skip": out["skip"] if out else None,
                "detail": out["detail"] if out else _behind(was, one, taker) if behind else None,
                "remedy": skip_remedy(out["skip"]) if out else None,
                "passed_over": one in passed,
                "lost_turn": one in lost,
                "place_before": was.get(one),
                "place_after": is_.get(one),
            }
        )
    return rows


def _behind(was: Mapping[str, int], one: str, taker: str | None) -> str | None:
    if taker is None or one not in was:
        return None
    return f"stood behind: place {was[one]} in line, and place {was[taker]} was available"


def _places(line: Line | None, away: Mapping[str, Any]) -> dict[str, int]:
    """The place of each member in line, from 1, as a pick among those who are not away sees it."""
    if line is None:
        return {}
    there = [place.agent_id for place in line.places if str(place.agent_id) not in away]
    return {str(agent_id): at for at, agent_id in enumerate(rotation.lineup(line, there), 1)}


# Where a turn's entry is to be looked for: turns rise with the sequence numbers, so it is found by halves. Each turn is
# one entry, so its number is at least the turn; how many other entries there are besides grows with the ledger.
_NEAR = sa.text(
    "WITH RECURSIVE halves (low, high) AS ("
    "SELECT CAST(:turn AS bigint), queues.seq FROM queues "
    "WHERE queues.tenant_id = :tenant_id AND queues.queue_id = :queue_id "
    "UNION ALL "
    "SELECT CASE WHEN later.turn < :turn THEN middle + 1 ELSE low END, "
    "CASE WHEN later.turn < :turn THEN high ELSE middle END "
    "FROM (SELECT low, high, (low + high) / 2 AS middle FROM halves WHERE low < high) AS half "
    "LEFT JOIN LATERAL (SELECT CAST(ledger.data->>'turn' AS bigint) AS turn FROM ledger "
    "WHERE ledger.tenant_id = :tenant_id AND ledger.queue_id = :queue_id AND ledger.seq >= half.middle "
    "AND ledger.kind = 'turn' ORDER BY ledger.seq LIMIT 1) AS later ON true"
    ") SELECT low FROM halves WHERE low >= high LIMIT 1"
).columns(low=sa.BigInteger)


def line_around(
    conn: sa.Connection, tenant_id: UUID, queue_id: UUID, turn: int, decision_id: UUID
) -> tuple[Line | None, Line | None]:
    """A queue's line before and after the turn of a decision, from its ledger: two statements, a checkpoint's reach."""
    c = t.ledger.c
    of_queue = sa.and_(c.tenant_id == tenant_id, c.queue_id == queue_id)
    near = _NEAR.bindparams(tenant_id=tenant_id, queue_id=queue_id, turn=turn).scalar_subquery()
    seq = conn.execute(
        sa.select(c.seq)
        .where(of_queue, c.seq >= near, c.kind == "turn", c.data["decision"].astext == str(decision_id))
        .order_by(c.seq)
        .limit(1)
    ).scalar_one_or_none()
    if seq is None:
        return None, None
    start = sa.select(sa.func.max(c.seq)).where(of_queue, c.seq < seq, c.kind == "checkpoint").scalar_subquery()
    entries = [
        (row.kind, row.data)
        for row in conn.execute(sa.select(c.kind, c.data).where(of_queue, c.seq >= start, c.seq <= seq).order_by(c.seq))
    ]
    before = recall(entries[:-1])
    return before, recall(entries[-1:], before)
