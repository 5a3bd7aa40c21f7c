"""Saving what a unit decided, in bulk, on the caller's connection and under the caller's locks. Never commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from routing import bulk
from routing import tables as t
from routing.decide import Decision, Outcome, QueueState
from routing.ledger import Kind, carry_out, checkpoint
from routing.model import Reason, Role
from routing.rotation import Line, Pick
from routing.store import RoleRow

Rows = Sequence[dict[str, Any]]
#: How a run of statements whose results nobody looks at is sent: one by one, or as the caller's driver can.
Batch = Callable[[], AbstractContextManager[None]]
#: A ledger gets a checkpoint at least this often (turns), so that an audit never reads much more than that.
CHECKPOINT_EVERY = 1000


class LostGuard(Exception):
    """A guarded write met other values than were read under the lock. Never expected; nothing may be kept."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A ledger entry before it has its sequence number. `data` is what :func:`routing.ledger.carry_out` gives."""

    kind: Kind
    actor: str
    data: Mapping[str, Any]
    reason: str | None = None


class Moves:
    """Admin moves on one line: each is carried out at once and leaves its draft."""

    def __init__(self, line: Line, next_rank: int, actor: str) -> None:
        self.line = line
        self.next_rank = next_rank
        self.drafts: list[Draft] = []
        self._actor = actor

    def do(self, kind: Kind, reason: str | None = None, **given: Any) -> None:
        """Carry out one move; `given` are the inputs that :class:`routing.ledger.Kind` names for it."""
        self.line, data = carry_out(self.line, kind, given)
        self.drafts.append(Draft(kind, self._actor, data, reason))

    def rank(self) -> int:
        """The next rank of the queue, given out."""
        self.next_rank += 1
        return self.next_rank - 1


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision with what its rows need. ``before`` is where the lead stood in this role, None for a new one.

    ``expects`` is the agent whom the CRM still shows and whom the write may replace; None: nobody.
    """

    decision: Decision
    before: RoleRow | None
    cause: str
    event_id: UUID | None
    received_at: datetime | None
    facts_digest: bytes | None
    releases: Sequence[str] = field(default=())
    expects: UUID | None = None


@dataclass(frozen=True, slots=True)
class Ordered:
    """A write that a decision ordered, with what its sender needs so that it need not be read again."""

    outbox_id: UUID
    lead_id: UUID
    agent_id: UUID
    leased: bool


def save_lines(
    conn: sa.Connection,
    tenant_id: UUID,
    before: Mapping[UUID, QueueState],
    after: Mapping[UUID, Line],
    drafts: Mapping[UUID, Sequence[Draft]],
    now: datetime,
    batch: Batch = nullcontext,
) -> None:
    """Write the moved lines and their ledger entries. Call with the queues locked.

    Raises :class:`LostGuard` if a position is not what was read under the lock.
    """
    entries: list[dict[str, Any]] = []
    moved: dict[UUID, int] = {}
    for queue_id, line in after.items():
        old = before[queue_id].line
        news = list(drafts.get(queue_id, ()))
        if line == old and not news:
            continue
        if line.position // CHECKPOINT_EVERY > old.position // CHECKPOINT_EVERY:
            news.append(Draft(Kind.CHECKPOINT, "turnlock", checkpoint(line)))
        seq = moved[queue_id] = _move_queue(conn, tenant_id, queue_id, old, line, len(news))
        entries += [
            {
                "tenant_id": tenant_id,
                "queue_id": queue_id,
                "seq": seq - len(news) + number,
                "kind": draft.kind.value,
                "at": now,
                "actor": draft.actor,
                "reason": draft.reason,
                "data": dict(draft.data),
            }
            for number, draft in enumerate(news, 1)
        ]
    with batch():
        for queue_id, seq in moved.items():
            _move_places(conn, tenant_id, queue_id, before[queue_id].line, after[queue_id])
            _move_owed(conn, tenant_id, queue_id, before[queue_id].line, after[queue_id], seq)
        if entries:
            bulk.insert(conn, t.ledger, entries)


def _move_queue(conn: sa.Connection, tenant_id: UUID, queue_id: UUID, old: Line, line: Line, entries: int) -> int:
    q = t.queues.c
    seq = conn.execute(
        sa.update(t.queues)
        # The guard: the lock already promises this; if it ever does not hold, nothing of the unit may commit.
        .where(q.tenant_id == tenant_id, q.queue_id == queue_id, q.position == old.position)
        .values(
            position=line.position,
            floor=line.floor,
            next_rank=sa.func.greatest(q.next_rank, max((place.rank + 1 for place in line.places), default=0)),
            seq=q.seq + entries,
        )
        .returning(q.seq)
    ).scalar_one_or_none()
    if seq is None:
        raise LostGuard(f"queue {queue_id} moved under its lock")
    return int(seq)


def _move_places(conn: sa.Connection, tenant_id: UUID, queue_id: UUID, old: Line, line: Line) -> None:
    was = {p.agent_id: p for p in old.places}
    bulk.update(
        conn,
        t.members,
        tenant_id,
        ("queue_id", "agent_id"),
        [
            {"queue_id": queue_id, "agent_id": p.agent_id, "tag": p.tag, "last_turn": p.last, "rank": p.rank}
            for p in line.places
            if p != was.get(p.agent_id)
        ],
    )
    # Rare, and a column of the stage `skips`: not named unless it changes.
    marked = [p for p in line.places if p.agent_id in was and p.averaging is not was[p.agent_id].averaging]
    bulk.update(
        conn,
        t.members,
        tenant_id,
        ("queue_id", "agent_id"),
        [{"queue_id": queue_id, "agent_id": p.agent_id, "averaging": p.averaging} for p in marked],
    )


def _move_owed(conn: sa.Connection, tenant_id: UUID, queue_id: UUID, old: Line, line: Line, seq: int) -> None:
    o = t.owed_turns.c
    kept, known = {x.owed_id for x in line.owed}, {x.owed_id for x in old.owed}
    if served := known - kept:
        conn.execute(
            sa.delete(t.owed_turns).where(
                o.tenant_id == tenant_id,
                o.queue_id == queue_id,
                o.owed_id == sa.any_(sa.cast(sorted(served), sa.ARRAY(sa.Uuid))),
            )
        )
    if added := [x for x in line.owed if x.owed_id not in known]:
        conn.execute(
            sa.insert(t.owed_turns),
            [
                {
                    "tenant_id": tenant_id,
                    "queue_id": queue_id,
                    "owed_id": x.owed_id,
                    "agent_id": x.agent_id,
                    "kind": x.kind.value,
                    "seq": seq - len(added) + number,  # each was an entry of its own, and they keep their order
                }
                for number, x in enumerate(added, 1)
            ],
        )


def changes_nothing(decided: Decided) -> bool:
    """A held lead that is still held for the same reason: no new decision row, its place in the wait is kept."""
    before, d = decided.before, decided.decision
    return (
        before is not None
        and before.state == "held"
        and d.outcome is Outcome.HELD
        and before.queue_id == d.queue_id
        and (before.reason == d.reason or d.reason is Reason.BEHIND_HELD)
    )


def save_decisions(
    conn: sa.Connection,
    tenant_id: UUID,
    items: Iterable[Decided],
    *,
    config_version: int,
    now: datetime,
    new_id: Callable[[], UUID],
    write_back: bool,
    lease: UUID | None,
    lease_for: timedelta,
    send_at_once: int,
    batch: Batch = nullcontext,
) -> tuple[list[Ordered], dict[UUID, list[Draft]]]:
    """Decisions, assignments, turns, standings and outbox of one unit; also the ledger drafts of its turns.

    The first `send_at_once` owner writes are born leased to `lease` for `lease_for`; the others are due for anyone.
    Call with leads and queues locked, and pass the drafts to :func:`save_lines` in the same transaction.
    """
    decisions: list[dict[str, Any]] = []
    assignments: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    roles: list[dict[str, Any]] = []
    outbox: list[dict[str, Any]] = []
    drafts: dict[UUID, list[Draft]] = {}
    ordered: list[Ordered] = []
    for item in items:
        d, before = item.decision, item.before
        decision_id = new_id()
        assigned = d.outcome is Outcome.ASSIGNED
        seq = (before.seq if before else 0) + 1
        epoch = (before.epoch if before else 0) + (1 if assigned and write_back else 0)
        turn = d.pick.turn if d.pick else None
        key = {"tenant_id": tenant_id, "lead_id": d.lead_id, "role": d.role.value}
        decisions.append(
            key
            | {
                "decision_id": decision_id,
                "seq": seq,
                "decided_at": now,
                "received_at": item.received_at,
                "event_id": item.event_id,
                "cause": item.cause,
                "outcome": d.outcome.value,
                "reason": d.reason.value if d.reason else None,
                "rule": d.rule,
                "queue_id": d.queue_id,
                "agent_id": d.agent_id,
                "turn": turn,
                "config_version": config_version,
                "record": dict(d.record),
            }
        )
        # A lead that waits keeps its place in the wait, whatever is decided about it meanwhile.
        waits_on = before is not None and before.state == "held" and d.outcome is Outcome.HELD
        roles.append(
            key
            | {
                "state": d.outcome.value,
                "reason": d.reason.value if d.reason else None,
                "agent_id": d.agent_id,
                "queue_id": d.queue_id,
                "seq": seq,
                "epoch": epoch,
                "confirmed_version": None,
                "facts_digest": item.facts_digest,
                "releases": list(item.releases),
                "since": before.since if waits_on and before else now,
            }
        )
        if not assigned:
            continue
        assignments.append(
            key
            | {
                "assignment_id": new_id(),
                "decision_id": decision_id,
                "agent_id": d.agent_id,
                "queue_id": d.queue_id,
                "turn": turn,
                "epoch": epoch,
                "assigned_at": now,
            }
        )
        for queue_id, pick, data in _taken(d):
            turns.append(
                {
                    "tenant_id": tenant_id,
                    "queue_id": queue_id,
                    "turn": pick.turn,
                    "decision_id": decision_id,
                    "agent_id": pick.agent_id,
                    "taken_at": now,
                }
            )
            draft = Draft(Kind.TURN, "turnlock", dict(data) | {"decision": str(decision_id)})
            drafts.setdefault(queue_id, []).append(draft)
        if write_back and d.agent_id is not None:
            leased = lease is not None and len(ordered) < send_at_once
            outbox_id = new_id()
            outbox.append(
                key
                | {
                    "outbox_id": outbox_id,
                    "epoch": epoch,
                    "kind": "owner" if d.role is Role.OWNER else "collaborator",
                    "decision_id": decision_id,
                    "agent_id": d.agent_id,
                    "expects_agent_id": item.expects,
                    "lease": lease if leased else None,
                    "claims": 1 if leased else 0,
                }
            )
            ordered.append(Ordered(outbox_id, d.lead_id, d.agent_id, leased))
    with batch():
        _write(conn, tenant_id, decisions, roles, assignments, turns, outbox, lease_for)
    return ordered, drafts


def _taken(d: Decision) -> list[tuple[UUID, Pick, Mapping[str, Any]]]:
    """The turns that a decision took: of its queue, and of each line within that one on the way to the agent."""
    if d.pick is None or d.queue_id is None:
        return []
    assert d.turn is not None  # noqa: S101 - the bench gives every pick its entry
    return [(d.queue_id, d.pick, d.turn), *((one.queue_id, one.pick, one.data) for one in d.inner)]


def _write(
    conn: sa.Connection,
    tenant_id: UUID,
    decisions: Rows,
    roles: Rows,
    assignments: Rows,
    turns: Rows,
    outbox: Rows,
    lease_for: timedelta,
) -> None:
    if decisions:
        bulk.insert(conn, t.decisions, decisions)
        bulk.insert(conn, t.lead_roles, roles, ending=_ROLES_MOVE)
        c = t.leads.c
        decided = sorted({row["lead_id"] for row in roles})
        conn.execute(
            sa.update(t.leads)
            .where(c.tenant_id == tenant_id, c.lead_id == sa.any_(sa.cast(decided, sa.ARRAY(sa.Uuid))))
            .values(version=c.version + 1)
        )
    bulk.insert(conn, t.assignments, assignments)
    bulk.insert(conn, t.turns, turns)
    # The database's clock says how long a lease lasts.
    until = "CASE WHEN lease IS NOT NULL THEN clock_timestamp() + CAST(:lease_for AS interval) END"
    bulk.insert(conn, t.outbox, outbox, computed=("leased_until", until), lease_for=lease_for)


_ROLES_MOVE = "ON CONFLICT (tenant_id, lead_id, role) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}"
    for name in (
        "state",
        "reason",
        "agent_id",
        "queue_id",
        "seq",
        "epoch",
        "confirmed_version",
        "facts_digest",
        "releases",
        "since",
    )
)


def set_standing(
    conn: sa.Connection,
    tenant_id: UUID,
    lead_id: UUID,
    role: Role,
    *,
    state: str,
    now: datetime,
    **values: Any,
) -> None:
    """Record where a lead stands without a decision (owned by a human, gone, refused ...). Call with it locked."""
    row = {"tenant_id": tenant_id, "lead_id": lead_id, "role": role.value, "state": state, "since": now} | values
    new = insert(t.lead_roles).values(row)
    conn.execute(
        new.on_conflict_do_update(
            index_elements=["tenant_id", "lead_id", "role"],
            set_={name: new.excluded[name] for name in row if name not in ("tenant_id", "lead_id", "role")},
        )
    )
    c = t.leads.c
    conn.execute(sa.update(t.leads).where(c.tenant_id == tenant_id, c.lead_id == lead_id).values(version=c.version + 1))


def end_assignment(
    conn: sa.Connection, tenant_id: UUID, lead_id: UUID, role: Role, *, state: str, now: datetime
) -> sa.Row[Any] | None:
    """End the active assignment of a lead in a role; gives its row (agent, queue, turn), None when there is none."""
    c = t.assignments.c
    return conn.execute(
        sa.update(t.assignments)
        .where(c.tenant_id == tenant_id, c.lead_id == lead_id, c.role == role.value, c.state == "active")
        .values(state=state, ended_at=now)
        .returning(c.assignment_id, c.agent_id, c.queue_id, c.turn, c.decision_id)
    ).one_or_none()
