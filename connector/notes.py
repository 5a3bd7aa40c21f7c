"""What tells an agent, in their CRM, that and why the lead is theirs: a note, and a task with a due time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import sqlalchemy as sa

from connector.runtime import Runtime
from connector.wording import LANGUAGES, Wording, why, wording_of
from routing import tables as t

if TYPE_CHECKING:
    from connector.jobs import Job


@dataclass(frozen=True, slots=True)
class Told:
    """What is to be put on the lead. A repeat finds it by the marker; ``due`` is of a task. Empty: nothing is."""

    subject: str
    body: str
    marker: str
    due: datetime | None = None

    def find(self, job: Job) -> bool:
        """Whether it is on the lead already."""
        look = job.adapter.find_note if self.due is None else job.adapter.find_task
        return look(job.client, job.lead_ref, self.marker)

    def add(self, job: Job) -> None:
        """Put it there."""
        if self.due is None:
            job.adapter.add_note(job.client, job.lead_ref, self.subject, f"{self.body} {self.marker}")
        else:
            job.adapter.add_task(job.client, job.lead_ref, job.agent_ref, self.body, self.marker, self.due)


def told(runtime: Runtime, conn: sa.Connection, tenant_id: UUID, row: sa.Row[Any]) -> Told | None:
    """What an outbox row tells its agent, in the tenant's words. None: nothing any more."""
    d, a, q, f, c = t.decisions.c, t.agents.c, t.queues.c, t.lead_facts.c, t.tenants.c
    given = c.wording if runtime.keeps_wording(conn) else sa.null()
    found = conn.execute(
        sa.select(
            d.rule,
            d.turn,
            d.record,
            a.name,
            q.name.label("queue"),
            f.facts["source"].astext.label("source"),
            given.label("wording"),
        )
        .join(t.tenants, c.tenant_id == d.tenant_id)
        .join(t.agents, (a.tenant_id == d.tenant_id) & (a.agent_id == d.agent_id))
        .outerjoin(t.queues, (q.tenant_id == d.tenant_id) & (q.queue_id == d.queue_id))
        .outerjoin(t.lead_facts, (f.tenant_id == d.tenant_id) & (f.lead_id == d.lead_id))
        .where(d.tenant_id == tenant_id, d.decision_id == row.decision_id)
    ).one()
    wording = wording_of(found.wording or {})
    words, how = LANGUAGES[wording.language], found.record.get("how")
    values = {
        "agent": found.name,
        "rule": found.rule or "",
        "queue": found.queue or "",
        "turn": found.turn or "",
        "source": found.source or "",
        "why": why(words, how, found.rule),
        "place": words.place.format(turn=found.turn, queue=found.queue) if found.turn else "",
        "passed_over": "",
    }
    if "{passed_over}" in f"{wording.note}{wording.subject}{wording.task}":
        values["passed_over"] = _passed_over(conn, tenant_id, found.record)
    marker = f"[turnlock:{row.outbox_id.hex[-12:]}]"
    if row.kind == "task":
        return None if how == "chosen" else _task(wording, values, marker, row.created_at)
    subject = (wording.subject or words.subject).format_map(values)
    return Told(subject, (wording.note or words.note).format_map(values), marker)


def _task(wording: Wording, values: dict[str, Any], marker: str, since: datetime) -> Told | None:
    minutes = wording.task_minutes
    if minutes is None:  # taken out of the configuration since
        return None
    text = (wording.task or LANGUAGES[wording.language].task).format_map(values | {"minutes": minutes})
    return Told("", text, marker, since + timedelta(minutes=minutes))


def _passed_over(conn: sa.Connection, tenant_id: UUID, record: dict[str, Any]) -> str:
    """The names of those whose turn it was before, in the order in which they were passed over."""
    ids = [UUID(one) for path in record.get("paths", ()) for one in path.get("passed_over", ())]
    a = t.agents.c
    wanted = sa.any_(sa.cast(ids, sa.ARRAY(sa.Uuid)))
    rows = conn.execute(sa.select(a.agent_id, a.name).where(a.tenant_id == tenant_id, a.agent_id == wanted))
    names = {row.agent_id: row.name for row in rows}
    return ", ".join(names[one] for one in dict.fromkeys(ids))
