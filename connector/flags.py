"""Capabilities per tenant: `off` is always one command and loses nothing; `on` keeps the order of the migrations."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from connector import work
from connector.configuration import has_ledger, reweight, start_line
from connector.database import unit
from connector.errors import TurnlockError
from connector.migrate import STAGES
from connector.runtime import Runtime
from routing import saving, store
from routing import tables as t
from routing.ledger import Kind
from routing.model import Flag

#: What must be on before: the stages build on each other. Write-back and settle stand apart.
NEEDS = {
    Flag.ROTATION: Flag.RULES,
    Flag.WEIGHTS: Flag.ROTATION,
    Flag.SKIPS: Flag.WEIGHTS,
    Flag.HOUSEHOLDS: Flag.RULES,
    Flag.CAPACITY: Flag.SKIPS,
    Flag.CREDITS: Flag.ROTATION,
}


def start_flags(conn: sa.Connection, tenant_id: UUID, stages: frozenset[Flag]) -> None:
    """A new tenant starts with every capability on that the database has."""
    conn.execute(
        sa.insert(t.flags),
        [
            {"tenant_id": tenant_id, "flag": flag.value, "mode": "on" if flag in stages else "off", "changed_by": "new"}
            for flag in Flag
        ],
    )


def modes(conn: sa.Connection, tenant_id: UUID) -> dict[Flag, str]:
    """Every flag with its mode; one that was never set is off."""
    c = t.flags.c
    rows = conn.execute(sa.select(c.flag, c.mode).where(c.tenant_id == tenant_id))
    found = {row.flag: row.mode for row in rows}
    return {flag: found.get(flag.value, "off") for flag in Flag}


def switch(runtime: Runtime, tenant_id: UUID, flag: Flag, mode: str, actor: str) -> bool:
    """Switch a flag; whether it changed. Raises :class:`TurnlockError` when `on` must be refused.

    Decisions in flight are safe: a unit that began before sees the new version under its locks and starts again.
    """
    with unit(runtime.engine) as (conn, now):
        c = t.tenants.c
        # First in the lock order, so that two switches, or a switch and a configuration, take turns.
        conn.execute(
            sa.select(c.tenant_id).where(c.tenant_id == tenant_id).with_for_update(key_share=True)
        ).scalar_one()
        before = modes(conn, tenant_id)
        if before[flag] == mode:
            return False
        if mode == "on":
            if flag not in runtime.stages(conn):
                raise TurnlockError(
                    f"{flag.value} cannot be on: revision {STAGES[flag]} is not applied; run `turnlock migrate`"
                )
            needs = NEEDS.get(flag)
            if needs is not None and before[needs] != "on":
                raise TurnlockError(
                    f"{flag.value} cannot be on while {needs.value} is off; `turnlock flags TENANT {needs.value} on`"
                )
        old = frozenset(f for f, m in before.items() if m == "on")
        new = old | {flag} if mode == "on" else old - {flag}
        if flag is Flag.WEIGHTS or (flag, mode) in ((Flag.ROTATION, "on"), (Flag.SKIPS, "off")):
            _carry_lines(conn, tenant_id, old, new, actor, now)
        row = insert(t.flags).values(tenant_id=tenant_id, flag=flag.value, mode=mode, changed_by=actor, changed_at=now)
        conn.execute(
            row.on_conflict_do_update(
                index_elements=["tenant_id", "flag"],
                set_={"mode": mode, "changed_by": actor, "changed_at": now},
            )
        )
        conn.execute(sa.update(t.tenants).where(c.tenant_id == tenant_id).values(flag_version=c.flag_version + 1))
        work.want(conn, tenant_id, "held")
        if flag is Flag.HOUSEHOLDS:
            work.want(conn, tenant_id, "identities")
    runtime.wake()
    return True


def _carry_lines(
    conn: sa.Connection,
    tenant_id: UUID,
    old: frozenset[Flag],
    new: frozenset[Flag],
    actor: str,
    now: datetime,
) -> None:
    """Bring every line over a change of the rotation, weights or skips flag.

    A line that has begun goes on where it stands: members who came and went meanwhile moved it by ledger entries. Who
    is away under the policy `average` counts as back once skips are off, because nobody looks for them any more.
    """
    q, m = t.queues.c, t.members.c
    ids = list(conn.execute(sa.select(q.queue_id).where(q.tenant_id == tenant_id)).scalars())
    store.lock_queues(conn, tenant_id, ids)
    for queue_id in ids:
        stored = store.load_queues(conn, tenant_id, old | {Flag.ROTATION}, [queue_id])[queue_id]
        moves = saving.Moves(stored.line, stored.next_rank, actor)
        rows = conn.execute(
            sa.select(m.agent_id, m.rank, *([m.weight] if Flag.WEIGHTS in old | new else []))
            .where(m.tenant_id == tenant_id, m.queue_id == queue_id)
            .order_by(m.rank)
        ).all()
        weights = {row.agent_id: row.weight if Flag.WEIGHTS in new else 1 for row in rows}
        if has_ledger(conn, tenant_id, queue_id):
            for place in moves.line.places:
                if weights[place.agent_id] != place.weight:
                    reweight(moves, place, weights[place.agent_id])
            for place in moves.line.places:
                if place.averaging and Flag.SKIPS not in new:
                    moves.do(Kind.AVERAGE, "skips are off", agent=str(place.agent_id))
        elif Flag.ROTATION in new:
            start_line(moves, [(row.agent_id, row.rank, weights[row.agent_id]) for row in rows])
        if moves.drafts:
            saving.save_lines(
                conn, tenant_id, {queue_id: stored}, {queue_id: moves.line}, {queue_id: moves.drafts}, now
            )
