"""What a shadow noted, in words: each record as JSON-safe values, with why it differs from the live decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import sqlalchemy as sa

from routing.shadow import Difference
from routing.tables_shadow import shadow_records

if TYPE_CHECKING:
    from connector.naming import Json, Names


def text_of(verdict: str, why: str | None) -> str | None:
    """What a verdict's word means, in one sentence."""
    if verdict == "error":
        return f"the shadow failed ({why}); the live decision stands"
    return Difference(why).text if why is not None else None


def records_of(conn: sa.Connection, tenant_id: UUID, names: Names, lead_id: UUID) -> list[Json]:
    """Everything that shadows noted about one lead, in order; ``seq`` is that of the decision, 0 without one."""
    c = shadow_records.c
    rows = conn.execute(
        sa.select(shadow_records)
        .where(c.tenant_id == tenant_id, c.lead_id == lead_id)
        .order_by(c.decided_at, c.flag, c.role.desc(), c.seq)
    ).all()
    return [record_of(names, row) for row in rows]


def record_of(names: Names, row: sa.Row[Any]) -> Json:
    """One record as JSON-safe values."""
    return {
        "flag": row.flag,
        "role": row.role,
        "seq": row.seq,
        "decided_at": row.decided_at.isoformat(),
        "verdict": row.verdict,
        "why": row.why,
        "text": _explained(names, row),
        "outcome": row.outcome,
        "reason": row.reason,
        "rule": row.rule,
        "queue": names.queue(row.queue_id),
        "agent": names.agent(row.agent_id),
        "turn": row.turn,
        "how": row.record.get("how"),
        "crm_agent": names.agent(row.crm_agent_id),
        "crm_seen_at": row.crm_seen_at.isoformat() if row.crm_seen_at else None,
    }


def _explained(names: Names, row: sa.Row[Any]) -> str | None:
    """Why a record differs, with the names and figures of its own case."""
    text = text_of(row.verdict, row.why)
    if row.verdict != "different":
        return text
    match Difference(row.why):
        case Difference.RULE:
            return f"{text}: {repr(row.rule) if row.rule else 'none, so the default queue'}"
        case Difference.SKIP:
            skip = row.record["skip"]
            who = names.agent(skip["agent"]) or {}
            return f"{text}: {who.get('name')} is {skip['skip']} ({skip['detail']})"
        case Difference.NOBODY:
            return f"{text} ({row.reason})"
        case Difference.QUEUE:
            return f"{text}: {names.queue(row.queue_id)}"
        case Difference.TURN | Difference.LINE if row.turn is not None:
            return f"{text}: turn {row.turn} of its line"
        case _:
            return text
