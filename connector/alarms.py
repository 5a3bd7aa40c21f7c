"""Alarms: conditions a human must hear of, opened and closed by the software."""

from __future__ import annotations

from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from connector.database import new_id
from connector.tables import alarms

#: Of a flag's shadow that failed while it decided; its subject is the flag.
SHADOW_ERRORS = "shadow_errors"


def open_alarm(conn: sa.Connection, tenant_id: UUID, kind: str, subject: str, text: str) -> None:
    """Open an alarm, or count once more the one that is open. `text` names the fix and holds no personal data."""
    new = insert(alarms).values(tenant_id=tenant_id, alarm_id=new_id(), kind=kind, subject=subject, text=text)
    conn.execute(
        new.on_conflict_do_update(
            index_elements=["tenant_id", "kind", "subject"],
            index_where=alarms.c.closed_at.is_(None),
            set_={"times": alarms.c.times + 1, "last_at": sa.func.clock_timestamp(), "text": new.excluded.text},
        )
    )


def close_alarm(conn: sa.Connection, tenant_id: UUID, kind: str, subject: str | None = None) -> int:
    """Close the open alarms of a kind (of one subject, or of all); how many there were."""
    c = alarms.c
    query = sa.update(alarms).where(c.tenant_id == tenant_id, c.kind == kind, c.closed_at.is_(None))
    if subject is not None:
        query = query.where(c.subject == subject)
    return conn.execute(query.values(closed_at=sa.func.clock_timestamp())).rowcount
