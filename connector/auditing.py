"""`turnlock audit`: replay each queue's ledger from its last checkpoint and hold the result against the present."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

import sqlalchemy as sa

from connector.runtime import Runtime
from routing import ledger, store
from routing import tables as t
from routing.model import Flag


@dataclass(frozen=True, slots=True)
class QueueAudit:
    """The audit of one queue. ``problems`` are in order: the first is where the ledger stops to follow."""

    queue: str
    position: int
    entries: int
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether everything follows."""
        return not self.problems


def audit_queues(runtime: Runtime, tenant_id: UUID, *, whole: bool = False) -> list[QueueAudit]:
    """Audit every queue of a tenant, from its last checkpoint or, with `whole`, from its first.

    Each queue is read in one snapshot, so that a turn taken meanwhile is no false alarm and no lead waits for an audit.
    """
    with runtime.engine.connect() as conn:
        if Flag.ROTATION not in runtime.stages(conn):
            return []
        q = t.queues.c
        names = conn.execute(sa.select(q.queue_id, q.name).where(q.tenant_id == tenant_id).order_by(q.name)).all()
    return [_audit_queue(runtime, tenant_id, row.queue_id, row.name, whole) for row in names]


def _audit_queue(runtime: Runtime, tenant_id: UUID, queue_id: UUID, name: str, whole: bool) -> QueueAudit:
    with runtime.engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
        flags = store.tenant_row(conn, tenant_id).flags
        line = store.load_queues(conn, tenant_id, flags | {Flag.ROTATION}, [queue_id])[queue_id].line
        c, turns, a = t.ledger.c, t.turns.c, t.assignments.c
        of_queue = sa.and_(c.tenant_id == tenant_id, c.queue_id == queue_id)
        pick = sa.func.min if whole else sa.func.max
        first = conn.execute(sa.select(pick(c.seq)).where(of_queue, c.kind == "checkpoint")).scalar_one()
        entries = [
            ledger.Entry(row.seq, ledger.Kind(row.kind), row.at, row.actor, row.reason, row.data)
            for row in conn.execute(sa.select(t.ledger).where(of_queue, c.seq >= (first or 0)).order_by(c.seq))
        ]
        found = ledger.replay(entries, line)
        # A queue that never turned has no ledger to follow yet: the flag's `on` begins it.
        problems = [str(p) for p in found.problems] if entries or Flag.ROTATION in flags else []
        last = conn.execute(
            sa.select(t.queues.c.seq).where(t.queues.c.tenant_id == tenant_id, t.queues.c.queue_id == queue_id)
        ).scalar_one()
        if entries and entries[-1].seq != last:
            problems.append(f"the queue says {last} ledger entries, the ledger ends at {entries[-1].seq}")
        count, highest = conn.execute(
            sa.select(sa.func.count(), sa.func.coalesce(sa.func.max(turns.turn), 0)).where(
                turns.tenant_id == tenant_id, turns.queue_id == queue_id
            )
        ).one()
        if not count == highest == line.position:
            problems.append(f"position {line.position}, but {count} turns up to {highest}: they must be 1..position")
        # A turn of a team's line may stand within the turn of a queue: it is that queue which the assignment names.
        mine = sa.and_(turns.tenant_id == a.tenant_id, turns.decision_id == a.decision_id)
        assigned = conn.execute(
            sa.select(sa.func.count(), sa.func.count(turns.turn.distinct()))
            .select_from(t.turns.join(t.assignments, mine & sa.or_(a.queue_id != turns.queue_id, a.turn == turns.turn)))
            .where(turns.tenant_id == tenant_id, turns.queue_id == queue_id)
        ).one()
        # One by one, by the key of turns: joined, all turns would be read for each on tables nobody has counted yet.
        taken = sa.select(turns.decision_id).where(
            turns.tenant_id == tenant_id, turns.queue_id == queue_id, turns.turn == a.turn
        )
        stray = conn.execute(
            sa.select(sa.func.count()).where(
                a.tenant_id == tenant_id,
                a.queue_id == queue_id,
                a.turn.is_not(None),
                taken.limit(1).scalar_subquery().is_distinct_from(a.decision_id),
            )
        ).scalar_one()
        if (*assigned, stray) != (line.position, line.position, 0):
            problems.append(
                f"position {line.position}, but {assigned[0] + stray} assignments with {assigned[1]} turns: "
                "each turn is one"
            )
        if halves := _without_inner(conn, tenant_id, queue_id):
            problems.append(f"{halves} turn(s) went to a team in whose line none was taken for the same lead")
    return QueueAudit(name, line.position, len(entries), tuple(problems))


def _without_inner(conn: sa.Connection, tenant_id: UUID, queue_id: UUID) -> int:
    """How many turns of a queue went to a team whose own line took none for the same decision."""
    q, outer, inner = t.queues.c, t.turns.c, t.turns.alias("inner").c
    found: int = conn.execute(
        sa.select(sa.func.count())
        .select_from(t.turns.join(t.queues, (q.tenant_id == outer.tenant_id) & (q.queue_id == outer.agent_id)))
        .where(
            outer.tenant_id == tenant_id,
            outer.queue_id == queue_id,
            ~sa.exists().where(
                inner.tenant_id == outer.tenant_id,
                inner.queue_id == outer.agent_id,
                inner.decision_id == outer.decision_id,
            ),
        )
    ).scalar_one()
    return found
