"""Why a lead is where it is: every decision about it with the rules tried, the members considered and what was written.

Everything is told from what was recorded when it happened, as JSON-safe values. Of the lead itself only its CRM ids are
shown: names, numbers and addresses are not part of any answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector.reasons import event_text, remedy_of, skip_remedy, write_text
from connector.runtime import Runtime, Tenant
from connector.shadow_words import records_of
from connector.tables import breakers, deliveries, events
from routing import tables as t
from routing.model import Flag

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
        """An agent with id, CRM id and name; None for None."""
        if agent_id is None:
            return None
        name, ref = self.agents.get(str(agent_id), ("unknown agent", None))
        return {"agent_id": str(agent_id), "ref": ref, "name": name}

    def queue(self, queue_id: UUID | str | None) -> str | None:
        """A queue's name; None for None."""
        return None if queue_id is None else self.queues.get(str(queue_id), "a queue that does not exist any more")


def iso(moment: datetime | None) -> str | None:
    """A time as JSON shows it."""
    return None if moment is None else moment.isoformat()


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
            "text": event_text(row.state, row.reason),
            "received_at": iso(row.received_at),
            "due_at": iso(row.due_at) if row.state == "waiting" else None,
        }
        for row in rows
    ]


# -- decisions ------------------------------------------------------------------------------------------------------


def _decisions(runtime: Runtime, conn: sa.Connection, tenant_id: UUID, lead_id: UUID, names: Names) -> list[Json]:
    d, e, v, o, a = t.decisions.c, events.c, deliveries.c, t.outbox.c, t.assignments.c
    turning = Flag.ROTATION in runtime.stages(conn)
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
            "turn_void": _void_reason(conn, tenant_id, row) if turning and row.turn is not None else None,
            "rules": [_rule(tried) for tried in row.record.get("tried", ())],
            "paths": [_path(conn, tenant_id, names, row, path) for path in row.record.get("paths", ())],
            "assignment": _assignment(assignments.get(row.decision_id)),
            "writes": writes.get(row.decision_id, []),
        }
        for row in rows
    ]


def _void_reason(conn: sa.Connection, tenant_id: UUID, row: sa.Row[Any]) -> str | None:
    c = t.turns.c
    found: str | None = conn.execute(
        sa.select(c.void_reason).where(c.tenant_id == tenant_id, c.queue_id == row.queue_id, c.turn == row.turn)
    ).scalar_one_or_none()
    return found


def _rule(tried: Mapping[str, Any]) -> Json:
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
    took = None if row.closed_at is None else round((row.closed_at - row.created_at).total_seconds(), 3)
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
        "seconds": took,
    }


# -- paths: one per queue or agent that the decision looked at --------------------------------------------------------


def _path(conn: sa.Connection, tenant_id: UUID, names: Names, row: sa.Row[Any], path: Mapping[str, Any]) -> Json:
    why = path.get("why")
    out: Json = {"why": why, "remedy": remedy_of(why) or skip_remedy(why), "detail": path.get("detail")}
    if "queue" not in path:
        kind = "existing_owner" if "existing_owner" in path else "agent"
        return {"kind": kind, "agent": names.agent(path.get(kind))} | out
    before, after = path.get("position", (None, None))
    return {
        "kind": "queue",
        "queue": names.queue(path["queue"]),
        "position_before": before,
        "position_after": after,
        "members": _members(conn, tenant_id, names, row, path, after),
    } | out


def _members(
    conn: sa.Connection, tenant_id: UUID, names: Names, row: sa.Row[Any], path: Mapping[str, Any], turn: int | None
) -> list[Json]:
    """Everybody of the queue as the decision saw them: who took it, who could not and why, who stood further back."""
    away = {one["agent"]: one for one in path.get("unavailable", ())}
    passed = list(path.get("passed_over", ()))
    taker = str(row.agent_id) if str(row.queue_id) == path["queue"] and row.agent_id and "why" not in path else None
    others = _members_at(conn, tenant_id, UUID(path["queue"]), turn, row.decision_id) if turn is not None else []
    order = dict.fromkeys([*passed, *([taker] if taker else []), *away, *others])
    return [
        {
            "agent": names.agent(one),
            "state": "taken" if one == taker else "unavailable" if one in away else "available",
            "skip": away[one]["skip"] if one in away else None,
            "detail": away[one]["detail"] if one in away else None,
            "remedy": skip_remedy(away[one]["skip"]) if one in away else None,
            "passed_over": one in passed,
        }
        for one in order
    ]


def _members_at(conn: sa.Connection, tenant_id: UUID, queue_id: UUID, turn: int, decision_id: UUID) -> list[str]:
    """Who was a member when this turn was taken, from the ledger: the last checkpoint, then who came and went."""
    c = t.ledger.c
    of_queue = sa.and_(c.tenant_id == tenant_id, c.queue_id == queue_id)
    # Each turn is one entry, so its sequence number is at least the turn: the primary key leads nearly there.
    seq = conn.execute(
        sa.select(c.seq)
        .where(of_queue, c.seq >= turn, c.kind == "turn", c.data["decision"].astext == str(decision_id))
        .order_by(c.seq)
        .limit(1)
    ).scalar_one_or_none()
    if seq is None:
        return []
    first = conn.execute(
        sa.select(sa.func.max(c.seq)).where(of_queue, c.seq < seq, c.kind == "checkpoint")
    ).scalar_one()
    members: dict[str, None] = {}
    for entry in conn.execute(
        sa.select(c.kind, c.data)
        .where(of_queue, c.seq >= (first or 0), c.seq < seq, c.kind.in_(("checkpoint", "join", "leave")))
        .order_by(c.seq)
    ):
        if entry.kind == "checkpoint":
            members = dict.fromkeys(place["agent"] for place in entry.data["places"])
        elif entry.kind == "join":
            members[entry.data["agent"]] = None
        else:
            members.pop(entry.data["agent"], None)
    return list(members)
