"""How a write ends: confirmed, superseded by a human, refused by the CRM, gone, stale. One transaction each.

Each locks the lead first and re-checks the lease; a sender that lost its lease changes nothing.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import sqlalchemy as sa

from adapters.base import Capability
from connector import inbox, work
from connector.agents import MAX_REFUSALS
from connector.alarms import open_alarm
from connector.database import new_id, opening, transaction, unit
from connector.runtime import Runtime
from connector.wake import EVENTS, NOTES, OWNERS
from routing import bulk, saving, store
from routing import tables as t
from routing.flight import COMMIT, Asking, Statement, fly, together
from routing.ledger import Kind
from routing.model import Flag, Lead, Reason, Role

if TYPE_CHECKING:
    from connector.jobs import Job

# So many in a row that somebody else, not chance, gives this agent's leads away.
_SUPERSEDED_IN_A_ROW = 3


def confirm(runtime: Runtime, job: Job, lead: Lead) -> None:
    """The CRM holds our agent, whoever put them there. Orders the note, then the collaborators."""
    row, tenant_id = job.row, job.tenant.tenant_id
    owner = Role(row.role) is Role.OWNER
    capabilities = job.adapter.capabilities
    notes = owner and Capability.NOTES in capabilities
    try:
        with transaction(runtime.engine) as conn:
            tasks = owner and Capability.TASKS in capabilities and runtime.keeps_wording(conn)
            *_, waited, more = together(
                conn,
                opening(conn),
                store.lock_leads.of(tenant_id, [row.lead_id]),
                _confirmed(job, notes=notes, tasks=tasks),
                inbox.wake_events_of.of(tenant_id, row.lead_id),
                work.writes_behind(tenant_id, row.lead_id),
            )
            if owner and Capability.COLLABORATORS in capabilities:
                plan = runtime.plan(conn, store.tenant_row(conn, tenant_id))
                if plan.rules.compiled(Role.COLLABORATOR):
                    inbox.enqueue(conn, tenant_id, "again", [(job.lead_ref, row.lead_id)], kind="collaborators")
                    waited = True
            fly(conn, [COMMIT])
    except work.LostLease:
        return
    woken = [kind for kind, any_ in ((NOTES, notes or tasks), (EVENTS, waited), (OWNERS, more)) if any_]
    if woken:
        runtime.wake(tenant_id, *woken)


def _of_row(table: sa.Table) -> list[Any]:
    c = table.c
    tenant_id, lead_id = sa.bindparam("tenant", type_=sa.Uuid), sa.bindparam("lead", type_=sa.Uuid)
    role, epoch = sa.bindparam("row_role", type_=sa.Text), sa.bindparam("row_epoch", type_=sa.Integer)
    return [c.tenant_id == tenant_id, c.lead_id == lead_id, c.role == role, c.epoch == epoch]


_LEAD = (
    t.leads.c.tenant_id == sa.bindparam("tenant", type_=sa.Uuid),
    t.leads.c.lead_id == sa.bindparam("lead", type_=sa.Uuid),
)
_CONFIRM = (
    Statement(sa.update(t.leads).where(*_LEAD).values(version=t.leads.c.version + 1)),
    Statement(
        sa.update(t.lead_roles)
        .where(*_of_row(t.lead_roles))
        .values(confirmed_version=sa.select(t.leads.c.version).where(*_LEAD).scalar_subquery())
    ),
    Statement(
        sa.update(t.assignments)
        .where(*_of_row(t.assignments), t.assignments.c.state == "active")
        .values(confirmed_at=sa.func.now())
    ),
    Statement(
        sa.update(t.agents)
        .where(
            t.agents.c.tenant_id == sa.bindparam("tenant", type_=sa.Uuid),
            t.agents.c.agent_id == sa.bindparam("agent", type_=sa.Uuid),
            t.agents.c.refusals > 0,
        )
        .values(refusals=0, refused_at=sa.null())
    ),
)


_TOLD = ("tenant_id", "outbox_id", "lead_id", "role", "epoch", "kind", "decision_id", "agent_id")
# Where the tenant's wording has none, no task is wanted.
_TASK = Statement(
    sa.insert(t.outbox).from_select(
        _TOLD,
        sa.select(*(sa.bindparam(name, type_=t.outbox.c[name].type) for name in _TOLD)).where(
            sa.exists().where(
                t.tenants.c.tenant_id == sa.bindparam("tenant_id", type_=sa.Uuid), t.tenants.c.wording.has_key("task")
            )
        ),
    )
)


def _confirmed(job: Job, *, notes: bool, tasks: bool) -> Asking[None]:
    row, tenant_id = job.row, job.tenant.tenant_id
    values = {"lead": row.lead_id, "row_role": row.role, "row_epoch": row.epoch, "agent": row.agent_id}
    note = {
        "tenant_id": tenant_id,
        "outbox_id": new_id(),
        "lead_id": row.lead_id,
        "role": row.role,
        "epoch": row.epoch,
        "kind": "note",
        "decision_id": row.decision_id,
        "agent_id": row.agent_id,
    }
    yield [
        work.confirm_outbox(tenant_id, job.lease, row.outbox_id),
        *(statement(tenant=tenant_id, **values) for statement in _CONFIRM),
        *bulk.insert(t.outbox, [note] if notes else []),
        *([_TASK(**{**note, "kind": "task", "outbox_id": new_id()})] if tasks else []),
    ]


def supersede(runtime: Runtime, job: Job, owner_ref: str | None, *, sent: bool) -> None:
    """Somebody else has the lead: the human wins. The turn is given back only if our agent never had it."""
    row, tenant_id = job.row, job.tenant.tenant_id
    with unit(runtime.engine) as (conn, now):
        if not _close(conn, job, "superseded"):
            return
        ended = saving.end_assignment(conn, tenant_id, row.lead_id, Role(row.role), state="superseded", now=now)
        if not sent:
            give_back(runtime, conn, tenant_id, ended, "superseded", now)
        r, a = t.agent_refs.c, t.assignments.c
        owner = conn.execute(
            sa.select(r.agent_id).where(r.tenant_id == tenant_id, r.ref == (owner_ref or ""))
        ).scalar_one_or_none()
        saving.set_standing(
            conn,
            tenant_id,
            row.lead_id,
            Role(row.role),
            state="owned",
            reason=Reason.OWNED.value,
            now=now,
            agent_id=owner,
            queue_id=None,
        )
        latest = (
            conn.execute(
                sa.select(a.state)
                .where(a.tenant_id == tenant_id, a.agent_id == row.agent_id)
                .order_by(a.assigned_at.desc())
                .limit(_SUPERSEDED_IN_A_ROW)
            )
            .scalars()
            .all()
        )
        if latest == ["superseded"] * _SUPERSEDED_IN_A_ROW:
            open_alarm(
                conn,
                tenant_id,
                "another_router",
                str(row.agent_id),
                "another router is assigning: the owners of this agent's last leads were set by something else first; "
                "switch the CRM's own lead routing off",
            )
        work.want_if_held(conn, tenant_id)  # it may have been what filled a cap
        inbox.wake_events_of(conn, tenant_id, row.lead_id)
    runtime.wake(tenant_id)


def refuse(runtime: Runtime, job: Job, *, sent: bool, why: str = "") -> None:
    """The CRM does not take this agent. The lead goes to the next; the turn is given back; the agent waits.

    `why` is what the admin reads of the CRM's answer, should that have to be told.
    """
    row, tenant_id = job.row, job.tenant.tenant_id
    with unit(runtime.engine) as (conn, now):
        if not _close(conn, job, "refused"):
            return
        ended = saving.end_assignment(conn, tenant_id, row.lead_id, Role(row.role), state="refused", now=now)
        if not sent:
            give_back(runtime, conn, tenant_id, ended, "refused", now)
        g = t.agents.c
        refusals = conn.execute(
            sa.update(t.agents)
            .where(g.tenant_id == tenant_id, g.agent_id == row.agent_id)
            .values(refusals=g.refusals + 1, refused_at=now)
            .returning(g.refusals)
        ).scalar_one()
        if refusals >= MAX_REFUSALS:
            open_alarm(
                conn,
                tenant_id,
                "agent_refused",
                str(row.agent_id),
                "the CRM keeps refusing this agent as an owner; correct the agent there, then `turnlock resume`"
                + (f". {why}" if why else ""),
            )
        saving.set_standing(
            conn, tenant_id, row.lead_id, Role(row.role), state="refused", reason="refused", now=now, agent_id=None
        )
        inbox.enqueue(conn, tenant_id, "again", [(job.lead_ref, row.lead_id)])
        # Soon, not at once: the reading that lets them back in must be later than the refusal.
        work.want(conn, tenant_id, "agents", within=5.0)
        work.want_if_held(conn, tenant_id)  # it may have been what filled a cap
        inbox.wake_events_of(conn, tenant_id, row.lead_id)
    runtime.wake(tenant_id)


def gone(runtime: Runtime, job: Job, *, sent: bool) -> None:
    """The CRM no longer has the lead."""
    row, tenant_id = job.row, job.tenant.tenant_id
    with unit(runtime.engine) as (conn, now):
        if not _close(conn, job, "gone"):
            return
        ended = saving.end_assignment(conn, tenant_id, row.lead_id, Role(row.role), state="void", now=now)
        if not sent:
            give_back(runtime, conn, tenant_id, ended, "gone", now)
        saving.set_standing(
            conn,
            tenant_id,
            row.lead_id,
            Role(row.role),
            state="gone",
            reason=Reason.GONE.value,
            now=now,
            agent_id=None,
            queue_id=None,
        )
        work.want_if_held(conn, tenant_id)  # it may have been what filled a cap
        inbox.wake_events_of(conn, tenant_id, row.lead_id)
    runtime.wake(tenant_id)


def stale(runtime: Runtime, job: Job, reason: str) -> None:
    """Nothing is left to write: a newer decision exists, or the agent holds the lead already."""
    with unit(runtime.engine) as (conn, _):
        if _close(conn, job, "stale", reason):
            inbox.wake_events_of(conn, job.tenant.tenant_id, job.row.lead_id)


def _close(conn: sa.Connection, job: Job, state: str, reason: str | None = None) -> bool:
    store.lock_leads(conn, job.tenant.tenant_id, [job.row.lead_id])
    return work.end_outbox(conn, job.tenant.tenant_id, job.lease, job.row.outbox_id, state=state, reason=reason)


def give_back(
    runtime: Runtime,
    conn: sa.Connection,
    tenant_id: UUID,
    ended: sa.Row[Any] | None,
    reason: str,
    now: datetime,
    *,
    actor: str = "turnlock",
    why: str | None = None,
) -> None:
    """Void the turn of an ended assignment and owe the agent one. Call with the lead locked; locks the queue.

    The turn number stays used; `actor` and `why` (else `reason`) go into the ledger. Nothing happens for an
    assignment that took no turn, or one that is void already. Where a team took the turn, it is owed one in the queue
    and the agent one in the line of the team.
    """
    if ended is None or ended.turn is None or ended.queue_id is None:
        return
    turns = _turns_of(conn, tenant_id, ended)
    store.lock_queues(conn, tenant_id, turns)
    c = t.turns.c
    # A turn was taken, so the line is there and owes one, even while the rotation is off.
    flags = store.tenant_row(conn, tenant_id).flags | {Flag.ROTATION}
    queues = store.load_queues(conn, tenant_id, flags, turns)
    moved: dict[UUID, saving.Moves] = {}
    for queue_id, (turn, member) in turns.items():
        voided = conn.execute(
            sa.update(t.turns)
            .where(c.tenant_id == tenant_id, c.queue_id == queue_id, c.turn == turn, c.void_reason.is_(None))
            .values(void_reason=reason)
        ).rowcount
        if voided:
            moves = moved[queue_id] = saving.Moves(queues[queue_id].line, queues[queue_id].next_rank, actor)
            moves.do(Kind.VOID, why or reason, turn=turn, agent=member, owed=str(new_id()))
    lines = {queue_id: moves.line for queue_id, moves in moved.items()}
    drafts = {queue_id: moves.drafts for queue_id, moves in moved.items()}
    saving.save_lines(conn, tenant_id, queues, lines, drafts, now)


def _turns_of(conn: sa.Connection, tenant_id: UUID, ended: sa.Row[Any]) -> dict[UUID, tuple[int, str]]:
    """The turns that an assignment took, by line: the number, and whose it was. More than one where teams are in it."""
    d = t.decisions.c
    paths = conn.execute(
        sa.select(d.record["paths"]).where(d.tenant_id == tenant_id, d.decision_id == ended.decision_id)
    ).scalar_one_or_none()
    taken = {
        UUID(path["queue"]): (path["position"][1], path["taken"])
        for path in paths or ()
        if "position" in path and "taken" in path
    }
    return taken or {ended.queue_id: (ended.turn, str(ended.agent_id))}
