"""The store of staged rollout: settings by flag version, modes of leads, shadow lines and records. Never commits.

Call what touches a shadow line with the lock of its queue's row granted: it protects both lines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from routing import tables as t
from routing.ledger import checkpoint, line_of
from routing.model import Flag, Role
from routing.rotation import Line
from routing.stages import Mode, Stage, stage_of
from routing.tables_shadow import flag_versions, shadow_lines, shadow_records


def settings_at(conn: sa.Connection, tenant_id: UUID, version: int) -> dict[Flag, Stage]:
    """The settings of every flag at a flag version; empty for one from before they were kept."""
    c = flag_versions.c
    stored = conn.execute(
        sa.select(c.settings).where(c.tenant_id == tenant_id, c.version == version)
    ).scalar_one_or_none()
    return {} if stored is None else {flag: stage_of(stored[flag.value]) for flag in Flag if flag.value in stored}


def keep_settings(
    conn: sa.Connection,
    tenant_id: UUID,
    version: int,
    settings: Mapping[Flag, Stage],
    *,
    flag: Flag,
    actor: str,
    reason: str | None,
    now: datetime,
) -> None:
    """Keep the settings of a new flag version, with what was changed, by whom, and why if it was forced."""
    conn.execute(
        sa.insert(flag_versions).values(
            tenant_id=tenant_id,
            version=version,
            settings={one.value: stage.as_json() for one, stage in settings.items()},
            flag=flag.value,
            changed_at=now,
            changed_by=actor,
            reason=reason,
        )
    )


def keep_modes(conn: sa.Connection, tenant_id: UUID, modes: Mapping[UUID, Mapping[Flag, Mode]]) -> None:
    """Note on leads in which mode each staged flag counts while their decision is open. Call with them locked."""
    s = t.lead_roles.c
    for lead_id, found in modes.items():
        conn.execute(
            sa.update(t.lead_roles)
            .where(s.tenant_id == tenant_id, s.lead_id == lead_id, s.role == Role.OWNER.value)
            .values(modes={flag.value: mode.value for flag, mode in found.items()} or None)
        )


# -- shadow lines and records -----------------------------------------------------------------------------------


def load_lines(conn: sa.Connection, tenant_id: UUID, flag: Flag, queue_ids: Collection[UUID]) -> dict[UUID, Line]:
    """The lines of a flag's shadow, as far as it has begun them."""
    c = shadow_lines.c
    rows = conn.execute(
        sa.select(c.queue_id, c.line).where(
            c.tenant_id == tenant_id,
            c.flag == flag.value,
            c.queue_id == sa.any_(sa.cast(list(queue_ids), sa.ARRAY(sa.Uuid))),
        )
    )
    return {row.queue_id: line_of(row.line) for row in rows}


def save_lines(conn: sa.Connection, tenant_id: UUID, flag: Flag, lines: Mapping[UUID, Line]) -> None:
    """Keep these lines as they stand now."""
    if not lines:
        return
    new = insert(shadow_lines)
    conn.execute(
        new.on_conflict_do_update(index_elements=["tenant_id", "flag", "queue_id"], set_={"line": new.excluded.line}),
        [
            {"tenant_id": tenant_id, "flag": flag.value, "queue_id": queue_id, "line": checkpoint(line)}
            for queue_id, line in sorted(lines.items())
        ],
    )


def drop_lines(conn: sa.Connection, tenant_id: UUID, flag: Flag) -> None:
    """A shadow ended or begins anew: its lines go, its records stay."""
    c = shadow_lines.c
    conn.execute(sa.delete(shadow_lines).where(c.tenant_id == tenant_id, c.flag == flag.value))


def earlier_picks(
    conn: sa.Connection, tenant_id: UUID, flag: Flag, run: int, lead_ids: Collection[UUID]
) -> dict[tuple[UUID, Role], Any]:
    """Whom this run gave these leads to at an earlier decision of theirs, the latest of each."""
    c = shadow_records.c
    rows = conn.execute(
        sa.select(c.lead_id, c.role, c.queue_id, c.agent_id, c.turn, c.rule)
        .where(
            c.tenant_id == tenant_id,
            c.flag == flag.value,
            c.run == run,
            c.outcome == "assigned",
            c.lead_id == sa.any_(sa.cast(list(lead_ids), sa.ARRAY(sa.Uuid))),
        )
        .order_by(c.seq)
    )
    return {(row.lead_id, Role(row.role)): row for row in rows}


def save_records(conn: sa.Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Keep what a shadow would have decided."""
    if rows:
        conn.execute(insert(shadow_records).on_conflict_do_nothing(), list(rows))


def note_crm_owners(conn: sa.Connection, tenant_id: UUID, owners: Mapping[UUID, UUID], seen_at: datetime) -> None:
    """The CRM itself gave these leads (lead: agent) away: kept beside what would have been written, once."""
    c = shadow_records.c
    for lead_id, agent_id in owners.items():
        conn.execute(
            sa.update(shadow_records)
            .where(
                c.tenant_id == tenant_id,
                c.lead_id == lead_id,
                c.flag == Flag.WRITE_BACK.value,
                c.role == Role.OWNER.value,
                c.crm_agent_id.is_(None),
            )
            .values(crm_agent_id=agent_id, crm_seen_at=seen_at)
        )
