"""Saving what a unit decided, in bulk, on the caller's connection and under the caller's locks. Never commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from routing import bulk
from routing import tables as t
from routing.decide import Decision, Outcome, QueueState
from routing.flight import Ask, Statement, exactly, one_of, write
from routing.ledger import Kind, carry_out, checkpoint
from routing.model import Reason, Role
from routing.rotation import Line, Pick
from routing.store import RoleRow

Rows = Sequence[dict[str, Any]]
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


def moved_lines(
    tenant_id: UUID,
    before: Mapping[UUID, QueueState],
    after: Mapping[UUID, Line],
    drafts: Mapping[UUID, Sequence[Draft]],
    now: datetime,
) -> list[Ask]:
    """What writes the moved lines and their ledger entries. To be sent with the queues locked.

    It raises :class:`LostGuard` if a position is not what was read under the lock.
    """
    asks: list[Ask] = []
    entries: list[dict[str, Any]] = []
    for queue_id, line in after.items():
        old = before[queue_id].line
        news = list(drafts.get(queue_id, ()))
        if line == old and not news:
            continue
        if line.position // CHECKPOINT_EVERY > old.position // CHECKPOINT_EVERY:
            news.append(Draft(Kind.CHECKPOINT, "turnlock", checkpoint(line)))
        asks.append(_move_queue(tenant_id, queue_id, old, line, len(news)))
        asks += _move_places(tenant_id, queue_id, old, line)
        asks += _move_owed(tenant_id, queue_id, old, line)
        entries += [
            {
                "tenant_id": tenant_id,
                "queue_id": queue_id,
                "seq": number - len(news),
                "kind": draft.kind.value,
                "at": now,
                "actor": draft.actor,
                "reason": draft.reason,
                "data": dict(draft.data),
            }
            for number, draft in enumerate(news, 1)
        ]
    return asks + bulk.insert(t.ledger, entries, computed={"seq": _NEXT_SEQ})


#: Write the moved lines on a connection, at once.
save_lines = write(moved_lines)

# Rows count back from the queue's sequence as it is once the line has moved.
_NEXT_SEQ = (
    "given.seq + (SELECT q.seq FROM queues AS q WHERE q.tenant_id = given.tenant_id AND q.queue_id = given.queue_id)"
)
_MOVE_QUEUE = Statement(
    exactly(
        sa.update(t.queues)
        # The guard: the lock already promises this; if it ever does not hold, nothing of the unit may commit.
        .where(
            t.queues.c.tenant_id == sa.bindparam("tenant", type_=sa.Uuid),
            t.queues.c.queue_id == sa.bindparam("queue", type_=sa.Uuid),
            t.queues.c.position == sa.bindparam("was", type_=sa.BigInteger),
        )
        .values(
            position=sa.bindparam("to", type_=sa.BigInteger),
            floor=sa.bindparam("new_floor", type_=t.Whole),
            next_rank=sa.func.greatest(t.queues.c.next_rank, sa.bindparam("rank", type_=sa.Integer)),
            seq=t.queues.c.seq + sa.bindparam("entries", type_=sa.BigInteger),
        )
        .returning(sa.literal(1).label("moved"))
    )
)


def _move_queue(tenant_id: UUID, queue_id: UUID, old: Line, line: Line, entries: int) -> Ask:
    return _MOVE_QUEUE(
        tenant=tenant_id,
        queue=queue_id,
        was=old.position,
        to=line.position,
        new_floor=line.floor,
        rank=max((place.rank + 1 for place in line.places), default=0),
        entries=entries,
        wanted=1,
    ).orelse(LostGuard(f"queue {queue_id} moved under its lock"))


def _move_places(tenant_id: UUID, queue_id: UUID, old: Line, line: Line) -> list[Ask]:
    was = {p.agent_id: p for p in old.places}
    moved = bulk.update(
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
    return moved + bulk.update(
        t.members,
        tenant_id,
        ("queue_id", "agent_id"),
        [{"queue_id": queue_id, "agent_id": p.agent_id, "averaging": p.averaging} for p in marked],
    )


_SERVED = Statement(
    sa.delete(t.owed_turns).where(
        t.owed_turns.c.tenant_id == sa.bindparam("tenant", type_=sa.Uuid),
        t.owed_turns.c.queue_id == sa.bindparam("queue", type_=sa.Uuid),
        t.owed_turns.c.owed_id == one_of("served", sa.Uuid()),
    )
)


def _move_owed(tenant_id: UUID, queue_id: UUID, old: Line, line: Line) -> list[Ask]:
    kept, known = {x.owed_id for x in line.owed}, {x.owed_id for x in old.owed}
    served, added = known - kept, [x for x in line.owed if x.owed_id not in known]
    gone = [_SERVED(tenant=tenant_id, queue=queue_id, served=sorted(served))] if served else []
    return gone + bulk.insert(
        t.owed_turns,
        [
            {
                "tenant_id": tenant_id,
                "queue_id": queue_id,
                "owed_id": x.owed_id,
                "agent_id": x.agent_id,
                "kind": x.kind.value,
                "seq": number - len(added),  # each was an entry of its own, and they keep their order
            }
            for number, x in enumerate(added, 1)
        ],
        computed={"seq": _NEXT_SEQ},
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


@dataclass(frozen=True, slots=True)
class Saved:
    """What writes a unit's decisions, the writes that they ordered, and the ledger drafts of their turns by queue."""

    asks: list[Ask]
    ordered: list[Ordered]
    drafts: dict[UUID, list[Draft]]


def save_decisions(
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
) -> Saved:
    """Decisions, assignments, turns, standings and outbox of one unit.

    The first `send_at_once` owner writes are born leased to `lease` for `lease_for`; the others are due for anyone.
    To be sent with leads and queues locked, and in the same transaction the drafts by :func:`moved_lines`.
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
    return Saved(_rows(tenant_id, decisions, roles, assignments, turns, outbox, lease_for), ordered, drafts)


def _taken(d: Decision) -> list[tuple[UUID, Pick, Mapping[str, Any]]]:
    """The turns that a decision took: of its queue, and of each line within that one on the way to the agent."""
    if d.pick is None or d.queue_id is None:
        return []
    assert d.turn is not None  # noqa: S101 - the bench gives every pick its entry
    return [(d.queue_id, d.pick, d.turn), *((one.queue_id, one.pick, one.data) for one in d.inner)]


_DECIDED = Statement(
    sa.update(t.leads)
    .where(
        t.leads.c.tenant_id == sa.bindparam("tenant", type_=sa.Uuid),
        t.leads.c.lead_id == one_of("leads", sa.Uuid()),
    )
    .values(version=t.leads.c.version + 1)
)


def _rows(
    tenant_id: UUID,
    decisions: Rows,
    roles: Rows,
    assignments: Rows,
    turns: Rows,
    outbox: Rows,
    lease_for: timedelta,
) -> list[Ask]:
    asks: list[Ask] = []
    if decisions:
        asks += bulk.insert(t.decisions, decisions)
        asks += bulk.insert(t.lead_roles, roles, ending=_ROLES_MOVE)
        asks.append(_DECIDED(tenant=tenant_id, leads=sorted({row["lead_id"] for row in roles})))
    asks += bulk.insert(t.assignments, assignments)
    asks += bulk.insert(t.turns, turns)
    # The database's clock says how long a lease lasts.
    until = "CASE WHEN given.lease IS NOT NULL THEN clock_timestamp() + CAST(:lease_for AS interval) END"
    return asks + bulk.insert(t.outbox, outbox, computed={"leased_until": until}, lease_for=lease_for)


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
