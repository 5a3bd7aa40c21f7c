"""Why a lead is where it is: every decision about it with the rules tried, the members considered and what was written.

Everything is told from what was recorded when it happened, as JSON-safe values. Of the lead itself only its CRM ids are
shown: names, numbers and addresses are not part of any answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector.naming import Json, Names, iso
from connector.past_rules import PastRules
from connector.paths import line_around, taker_of, tell_path, tell_rule
from connector.reasons import event_text, remedy_of, write_text
from connector.runtime import Runtime, Tenant
from connector.shadow_words import records_of
from connector.tables import breakers, deliveries, events
from routing import tables as t
from routing.model import Flag


def explain(runtime: Runtime, tenant: Tenant, lead_id: UUID) -> Json:
    """All that can be told of one lead: where it stands, what is under way, and its decisions in order."""
    tenant_id = tenant.tenant_id
    with runtime.engine.connect() as conn:
        names = Names.load(conn, tenant_id)
        r, c, s = t.lead_refs.c, t.leads.c, t.lead_roles.c
        refs = list(
            conn.execute(
                sa.select(r.ref).where(r.tenant_id == tenant_id, r.lead_id == lead_id).order_by(r.created_at, r.ref)
            ).scalars()
        )
        lead = conn.execute(
            sa.select(c.created_at, c.crm_created_at).where(c.tenant_id == tenant_id, c.lead_id == lead_id)
        ).one()
        roles = conn.execute(
            sa.select(t.lead_roles).where(s.tenant_id == tenant_id, s.lead_id == lead_id).order_by(s.role.desc())
        ).all()
        b = breakers.c
        shut = conn.execute(
            sa.select(b.open_at).where(b.tenant_id == tenant_id, b.lane == "all", b.open_at > sa.func.clock_timestamp())
        ).scalar_one_or_none()
        shadows = records_of(conn, tenant_id, names, lead_id) if runtime.shadows(conn) else []
        return {
            "tenant": tenant.name,
            "lead": {
                "lead_id": str(lead_id),
                "refs": refs,
                "created_in_crm": iso(lead.crm_created_at),
                "known_since": iso(lead.created_at),
            },
            "sending": tenant.sending,
            "crm_paused_until": iso(shut),
            "standing": [_standing(names, row) for row in roles],
            "open_events": _open_events(conn, tenant_id, lead_id, refs),
            "returns": _returns(conn, tenant_id, lead_id, names) if Flag.CREDITS in runtime.stages(conn) else [],
            "decisions": [
                row | {"shadows": [one for one in shadows if (one["role"], one["seq"]) == (row["role"], row["seq"])]}
                for row in _decisions(runtime, conn, tenant_id, lead_id, names)
            ],
            # Beside no decision: the lead came with an owner while write_back was in shadow.
            "shadows": [one for one in shadows if not one["seq"]],
        }


def _standing(names: Names, row: sa.Row[Any]) -> Json:
    return {
        "role": row.role,
        "state": row.state,
        "reason": row.reason,
        "remedy": remedy_of(row.reason),
        "agent": names.agent(row.agent_id),
        "queue": names.queue(row.queue_id),
        "confirmed": row.confirmed_version is not None,
        "since": iso(row.since),
    }


def _open_events(conn: sa.Connection, tenant_id: UUID, lead_id: UUID, refs: Iterable[str]) -> list[Json]:
    """Events of this lead that are not closed. Both states have an index of their own; closed ones have none."""
    e = events.c
    rows = conn.execute(
        sa.select(e.event_id, e.kind, e.state, e.reason, e.received_at, e.due_at)
        .where(
            e.tenant_id == tenant_id,
            e.state.in_(("waiting", "parked")),
            sa.or_(e.lead_id == lead_id, e.ref == sa.any_(sa.cast(list(refs), sa.ARRAY(sa.Text)))),
        )
        .order_by(e.received_at, e.event_id)
    )
    return [
        {
            "event_id": str(row.event_id),
            "kind": row.kind,
            "state": row.state,
            "reason": row.reason,
            "text": event_text(row.state, row.reason)
            + (f" until {row.due_at:%Y-%m-%d %H:%M:%S}Z" if row.reason == "settling" else ""),
            "received_at": iso(row.received_at),
            "due_at": iso(row.due_at) if row.state == "waiting" else None,
        }
        for row in rows
    ]


def _returns(conn: sa.Connection, tenant_id: UUID, lead_id: UUID, names: Names) -> list[Json]:
    """Who gave it back, and what was decided. The agent's own words are for whoever decides: `turnlock return list`."""
    r = t.returns.c
    rows = conn.execute(
        sa.select(t.returns).where(r.tenant_id == tenant_id, r.lead_id == lead_id).order_by(r.asked_at, r.return_id)
    )
    return [
        {
            "return_id": str(row.return_id),
            "agent": names.agent(row.agent_id),
            "reason": row.reason,
            "state": row.state,
            "outcome": row.outcome,
            "asked_at": iso(row.asked_at),
            "asked_by": row.asked_by,
            "decided_at": iso(row.decided_at),
            "decided_by": row.decided_by,
            "why": row.why,
        }
        for row in rows
    ]


# -- decisions ------------------------------------------------------------------------------------------------------


def _decisions(runtime: Runtime, conn: sa.Connection, tenant_id: UUID, lead_id: UUID, names: Names) -> list[Json]:
    d, e, v, o, a = t.decisions.c, events.c, deliveries.c, t.outbox.c, t.assignments.c
    rows = conn.execute(
        sa.select(t.decisions, e.kind.label("told_kind"), v.source.label("told_source"))
        .outerjoin(events, (e.tenant_id == d.tenant_id) & (e.event_id == d.event_id))
        .outerjoin(deliveries, (v.tenant_id == e.tenant_id) & (v.delivery_id == e.delivery_id))
        .where(d.tenant_id == tenant_id, d.lead_id == lead_id)
        .order_by(d.decided_at, d.decision_id)
    ).all()
    writes: dict[UUID, list[Json]] = {}
    for row in conn.execute(
        sa.select(t.outbox).where(o.tenant_id == tenant_id, o.lead_id == lead_id).order_by(o.created_at, o.outbox_id)
    ):
        writes.setdefault(row.decision_id, []).append(_write(names, row))
    ids = [row.decision_id for row in rows]
    assignments = {
        row.decision_id: row
        for row in conn.execute(
            sa.select(a.decision_id, a.state, a.assigned_at, a.confirmed_at, a.ended_at).where(
                a.tenant_id == tenant_id, a.decision_id == sa.any_(sa.cast(ids, sa.ARRAY(sa.Uuid)))
            )
        )
    }
    confirmed = {decision_id: found.confirmed_at for decision_id, found in assignments.items()}
    voids = _voids(runtime, conn, tenant_id, rows)
    past = PastRules(conn, tenant_id)
    tried = {row.decision_id: past.tried(row) for row in rows}
    return [
        {
            "decision_id": str(row.decision_id),
            "role": row.role,
            "seq": row.seq,
            "decided_at": iso(row.decided_at),
            "received_at": iso(row.received_at),
            "cause": row.cause,
            "told_by": None if row.told_source is None else {"source": row.told_source, "kind": row.told_kind},
            "config_version": row.config_version,
            "outcome": row.outcome,
            "reason": row.reason,
            "remedy": remedy_of(row.reason),
            "rule": row.rule,
            "queue": names.queue(row.queue_id),
            "agent": names.agent(row.agent_id),
            "how": row.record.get("how"),
            "turn": row.turn,
            "modes": row.record.get("modes", {}),
            "turn_void": voids.get((row.queue_id, row.turn)),
            "rules": [tell_rule(one) for one in tried[row.decision_id][0]],
            "rules_not_shown": tried[row.decision_id][1],
            "paths": [_path(conn, tenant_id, names, row, path) for path in row.record.get("paths", ())],
            "assignment": _assignment(assignments.get(row.decision_id)),
            "seconds_to_decide": _seconds(row.received_at, row.decided_at),
            "seconds_to_owner": _seconds(row.received_at, confirmed.get(row.decision_id)),
            "writes": writes.get(row.decision_id, []),
        }
        for row in rows
    ]


def _voids(
    runtime: Runtime, conn: sa.Connection, tenant_id: UUID, rows: Iterable[sa.Row[Any]]
) -> dict[tuple[UUID, int], str]:
    """Of the turns of these decisions those that were given back, with the reason. In one statement for all."""
    taken = [(row.queue_id, row.turn) for row in rows if row.turn is not None]
    if not taken or Flag.ROTATION not in runtime.stages(conn):
        return {}
    c = t.turns.c
    found = conn.execute(
        sa.select(c.queue_id, c.turn, c.void_reason).where(
            c.tenant_id == tenant_id, sa.tuple_(c.queue_id, c.turn).in_(taken), c.void_reason.is_not(None)
        )
    )
    return {(row.queue_id, row.turn): row.void_reason for row in found}


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else round((end - start).total_seconds(), 3)


def _path(conn: sa.Connection, tenant_id: UUID, names: Names, row: sa.Row[Any], path: Mapping[str, Any]) -> Json:
    """One queue or agent that the decision looked at; a queue with its line as it stood then."""
    taker = taker_of(path, row.queue_id, row.agent_id)
    before = after = None
    if taker is not None and path.get("position") is not None:
        before, after = line_around(conn, tenant_id, UUID(path["queue"]), path["position"][1], row.decision_id)
    return tell_path(names, path, taker, before, after)


def _assignment(row: Any) -> Json | None:
    if row is None:
        return None
    return {
        "state": row.state,
        "assigned_at": iso(row.assigned_at),
        "confirmed_at": iso(row.confirmed_at),
        "ended_at": iso(row.ended_at),
    }


def _write(names: Names, row: sa.Row[Any]) -> Json:
    return {
        "write_id": str(row.outbox_id),
        "kind": row.kind,
        "agent": names.agent(row.agent_id),
        "state": row.state,
        "reason": row.reason,
        "text": write_text(row.kind, row.state, row.reason),
        "attempt": row.attempt,
        "claims": row.claims,
        "ordered_at": iso(row.created_at),
        "due_at": iso(row.due_at) if row.state == "open" else None,
        "closed_at": iso(row.closed_at),
        "sent": row.sent,
        "seconds": _seconds(row.created_at, row.closed_at),
    }
