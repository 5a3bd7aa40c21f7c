"""What ids of agents and queues are called, for showing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from routing import tables as t

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Names:
    """What ids of agents and queues are called."""

    agents: Mapping[str, tuple[str, str | None]]
    queues: Mapping[str, str]

    @classmethod
    def load(cls, conn: sa.Connection, tenant_id: UUID) -> Names:
        """All of a tenant, with those that no longer take part."""
        a, r, q = t.agents.c, t.agent_refs.c, t.queues.c
        rows = conn.execute(
            sa.select(a.agent_id, a.name, r.ref)
            .outerjoin(t.agent_refs, (r.tenant_id == a.tenant_id) & (r.agent_id == a.agent_id))
            .where(a.tenant_id == tenant_id)
            .order_by(r.ref)
        ).all()
        queues = conn.execute(sa.select(q.queue_id, q.name).where(q.tenant_id == tenant_id)).all()
        return cls(
            {str(row.agent_id): (row.name, row.ref) for row in rows}, {str(row.queue_id): row.name for row in queues}
        )

    def agent(self, agent_id: UUID | str | None) -> Json | None:
        """An agent with id, CRM id and name; None for None. A team has the id and the name of its line."""
        if agent_id is None:
            return None
        if str(agent_id) in self.queues:
            return {"agent_id": None, "ref": None, "name": self.queues[str(agent_id)], "queue_id": str(agent_id)}
        name, ref = self.agents.get(str(agent_id), ("unknown agent", None))
        return {"agent_id": str(agent_id), "ref": ref, "name": name}

    def queue(self, queue_id: UUID | str | None) -> str | None:
        """A queue's name; None for None."""
        return None if queue_id is None else self.queues.get(str(queue_id), "a queue that does not exist any more")


def iso(moment: datetime | None) -> str | None:
    """A time as JSON shows it."""
    return None if moment is None else moment.isoformat()
