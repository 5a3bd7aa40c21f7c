"""The note that tells an agent why the lead is theirs."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import sqlalchemy as sa

from routing import tables as t


def note_text(conn: sa.Connection, tenant_id: UUID, row: sa.Row[Any]) -> tuple[str, str, str]:
    """Subject, body and the marker in it by which a repeat finds it. Who was passed over is not told to agents."""
    d, a, q = t.decisions.c, t.agents.c, t.queues.c
    found = conn.execute(
        sa.select(d.rule, d.turn, d.record, a.name, q.name.label("queue"))
        .join(t.agents, (a.tenant_id == d.tenant_id) & (a.agent_id == d.agent_id))
        .outerjoin(t.queues, (q.tenant_id == d.tenant_id) & (q.queue_id == d.queue_id))
        .where(d.tenant_id == tenant_id, d.decision_id == row.decision_id)
    ).one()
    why = f"by rule “{found.rule}”" if found.rule else "by the default queue"
    if found.record.get("how") == "existing_owner":
        why = "because this person was already yours"
    if found.record.get("how") == "chosen":
        why = "because you were chosen for a test; nothing is to be done"
    turn = f", turn {found.turn} of queue “{found.queue}”" if found.turn else ""
    marker = f"[turnlock:{row.outbox_id.hex[-12:]}]"
    return "Turnlock: why this lead is yours", f"Assigned to {found.name} {why}{turn}. {marker}", marker
