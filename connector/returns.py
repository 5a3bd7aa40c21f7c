"""Returned leads: an agent asks, a manager approves or refuses; the credit is one owed turn of the queue it came from.

An approved lead goes nowhere (``void``), or on to somebody who has not had it (``next``): through the inbox, decided
and written under the same locks as any lead. Everything about a return changes under the lock of its lead.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import sqlalchemy as sa

from connector import inbox, work
from connector.alarms import close_alarm, open_alarm
from connector.database import new_id, unit
from connector.endings import give_back
from connector.errors import NotFound, TurnlockError
from connector.naming import Json, Names, iso
from connector.replay import newest_refs
from connector.runtime import Runtime, Tenant
from connector.turns import check_words, require_credits
from routing import saving, store
from routing import tables as t
from routing.clocks import known_zone
from routing.model import Flag, Reason, Role

MAX_WORDS = 1000
_ALARM = ("returns_waiting", "leads")


class ReturnReason(StrEnum):
    """Why an agent returns a lead. The list is closed."""

    BOGUS = "bogus"
    DUPLICATE = "duplicate"
    OUT_OF_AREA = "out_of_area"
    ALREADY_REPRESENTED = "already_represented"
    UNREACHABLE = "unreachable"
    WRONG_KIND = "wrong_kind"
    CONFLICT = "conflict"
    OTHER = "other"

    @property
    def text(self) -> str:
        """What it means, in a few words."""
        return _TEXTS[self]


_TEXTS: Mapping[ReturnReason, str] = MappingProxyType(
    {
        ReturnReason.BOGUS: "nobody is behind it: a test, a robot, made-up data",
        ReturnReason.DUPLICATE: "the same inquiry is in the CRM already",
        ReturnReason.OUT_OF_AREA: "outside the area that the agent works in",
        ReturnReason.ALREADY_REPRESENTED: "has an agent of their own already",
        ReturnReason.UNREACHABLE: "no number or address of it works",
        ReturnReason.WRONG_KIND: "not the kind of business that this queue is for",
        ReturnReason.CONFLICT: "the agent must not act for them",
        ReturnReason.OTHER: "something else, as the agent says in their own words",
    }
)


# -- asking ---------------------------------------------------------------------------------------------------------


def ask(
    runtime: Runtime,
    tenant: Tenant,
    lead_id: UUID,
    reason: ReturnReason,
    *,
    actor: str,
    words: str | None = None,
    agent_id: UUID | None = None,
) -> Json:
    """Ask to return a lead, on behalf of the agent who holds it; with `agent_id` only if that is them.

    Nothing else changes until it is approved. `words` are the agent's own; they are shown to whoever decides and
    never logged. Raises :class:`TurnlockError` when it cannot be asked now, with what to do.
    """
    check_words(actor, None)
    if words is not None and (not words.strip() or len(words) > MAX_WORDS or "\x00" in words):
        raise TurnlockError(f"the agent's words: write 1 to {MAX_WORDS} characters, or leave them out")
    tenant_id = tenant.tenant_id
    with unit(runtime.engine) as (conn, now):
        require_credits(runtime, conn, tenant)
        store.lock_leads(conn, tenant_id, [lead_id])
        names = Names.load(conn, tenant_id)
        held = _assignment(conn, tenant_id, lead_id)
        if held is None:
            raise TurnlockError("no agent holds this lead by Turnlock's word, so there is nothing to return")
        if agent_id is not None and held.agent_id != agent_id:
            raise TurnlockError(f"this lead is {_name(names, held.agent_id)}'s; only they can return it")
        r = t.returns.c
        before = conn.execute(
            sa.select(r.return_id).where(
                r.tenant_id == tenant_id, r.assignment_id == held.assignment_id, r.state == "asked"
            )
        ).scalar_one_or_none()
        if before is not None:
            raise TurnlockError(f"its return is asked for already ({before}); `turnlock return list {tenant.name}`")
        _keep_to_the_limit(conn, tenant, names, held.agent_id, now)
        row = {
            "tenant_id": tenant_id,
            "return_id": new_id(),
            "lead_id": lead_id,
            "assignment_id": held.assignment_id,
            "agent_id": held.agent_id,
            "reason": reason.value,
            "words": words,
            "asked_at": now,
            "asked_by": actor,
        }
        conn.execute(sa.insert(t.returns).values(row))
        text = f"agents ask to return leads; `turnlock return list {tenant.name}` shows them"
        open_alarm(conn, tenant_id, *_ALARM, text)
        (told,) = _told(conn, tenant_id, names, r.return_id == row["return_id"])
    return told


def _assignment(conn: sa.Connection, tenant_id: UUID, lead_id: UUID) -> Any:
    """The active assignment of the lead's owner. Call with the lead locked."""
    a = t.assignments.c
    return conn.execute(
        sa.select(a.assignment_id, a.agent_id).where(
            a.tenant_id == tenant_id, a.lead_id == lead_id, a.role == Role.OWNER.value, a.state == "active"
        )
    ).one_or_none()


def _keep_to_the_limit(conn: sa.Connection, tenant: Tenant, names: Names, agent_id: UUID, now: datetime) -> None:
    """Refuse when the agent has asked often enough today, by the clocks of their own zone."""
    a, c, r = t.agents.c, t.tenants.c, t.returns.c
    # Locked, after the lead, so that two asks at once are counted one after the other.
    zone = conn.execute(
        sa.select(sa.func.coalesce(a.zone_by_admin, a.zone))
        .where(a.tenant_id == tenant.tenant_id, a.agent_id == agent_id)
        .with_for_update(key_share=True)
    ).scalar_one()
    limit = conn.execute(sa.select(c.returns_per_day).where(c.tenant_id == tenant.tenant_id)).scalar_one()
    recent = conn.execute(
        sa.select(r.asked_at).where(
            r.tenant_id == tenant.tenant_id, r.agent_id == agent_id, r.asked_at > now - timedelta(days=2)
        )
    ).scalars()
    there = ZoneInfo(zone if known_zone(zone) else "UTC")
    today = now.astimezone(there).date()
    if sum(asked.astimezone(there).date() == today for asked in recent) >= limit:
        raise TurnlockError(
            f"{_name(names, agent_id)} has returned as many leads today as the configuration allows ({limit}); "
            "ask again tomorrow, or raise `returns: {per_day: ..}`"
        )


def _name(names: Names, agent_id: UUID) -> str:
    return names.agents.get(str(agent_id), ("unknown agent", None))[0]


# -- deciding -------------------------------------------------------------------------------------------------------


def approve(
    runtime: Runtime, tenant: Tenant, return_id: UUID, *, void: bool, actor: str, why: str | None = None
) -> Json:
    """Take the lead from its agent: nowhere with `void`, else on to somebody who has not had it.

    Their turn stays used, marked void, and they are owed one turn of that queue. Of a void lead the CRM's owner is left
    as it is. Raises :class:`NotFound`, and :class:`TurnlockError` when it is decided or the lead is theirs no more.
    """
    check_words(actor, why)
    tenant_id = tenant.tenant_id
    with unit(runtime.engine) as (conn, now):
        require_credits(runtime, conn, tenant)
        row = _lock(conn, tenant, return_id)
        held = _assignment(conn, tenant_id, row.lead_id)
        if held is None or held.assignment_id != row.assignment_id:
            raise TurnlockError("this lead is not the agent's any more; `turnlock return refuse` closes the return")
        if work.has_open_write(conn, tenant_id, [row.lead_id]):
            raise TurnlockError("a write of this lead to the CRM is not settled yet; repeat this in a moment")
        ended = saving.end_assignment(conn, tenant_id, row.lead_id, Role.OWNER, state="void", now=now)
        said = f"returned as {row.reason}{f': {why}' if why else ''}"
        give_back(runtime, conn, tenant_id, ended, "returned", now, actor=actor, why=said)
        if void:
            # Without a digest no change of the lead's fields brings it back.
            stands: dict[str, Any] = {"state": "left", "reason": Reason.RETURNED.value, "facts_digest": None}
        else:
            stands = {"state": "refused", "reason": "declined"}
        saving.set_standing(conn, tenant_id, row.lead_id, Role.OWNER, now=now, agent_id=None, queue_id=None, **stands)
        told = _close(conn, tenant, row, "approved", actor, why, now, outcome="void" if void else "next")
        if not void:
            inbox.enqueue(conn, tenant_id, "again", [(told["lead"], row.lead_id)])
        work.want(conn, tenant_id, "held")  # the agent has room for another
    runtime.wake(tenant_id)
    runtime.wake()
    return told | {"turn_given_back": ended.turn if ended is not None else None}


def refuse(runtime: Runtime, tenant: Tenant, return_id: UUID, *, actor: str, why: str) -> Json:
    """Leave the lead with its agent. Raises like :func:`approve`."""
    check_words(actor, why)
    with unit(runtime.engine) as (conn, now):
        require_credits(runtime, conn, tenant)
        row = _lock(conn, tenant, return_id)
        return _close(conn, tenant, row, "refused", actor, why, now)


def find(conn: sa.Connection, tenant: Tenant, text: str) -> UUID:
    """The return that `text` names: by its id, or by its lead's CRM id when one of that is asked for."""
    r, x = t.returns.c, t.lead_refs.c
    try:
        return UUID(text)
    except ValueError:
        found = conn.execute(
            sa.select(r.return_id)
            .join(t.lead_refs, (x.tenant_id == r.tenant_id) & (x.lead_id == r.lead_id))
            .where(r.tenant_id == tenant.tenant_id, x.ref == text, r.state == "asked")
        ).scalar_one_or_none()
    if found is None:
        raise NotFound(f"no return of lead {text!r} is asked for; `turnlock return list {tenant.name}`")
    return UUID(str(found))


def _lock(conn: sa.Connection, tenant: Tenant, return_id: UUID) -> sa.Row[Any]:
    """The return, still asked for, with its lead locked."""
    r = t.returns.c
    this = sa.and_(r.tenant_id == tenant.tenant_id, r.return_id == return_id)
    lead_id = conn.execute(sa.select(r.lead_id).where(this)).scalar_one_or_none()
    if lead_id is None:
        raise NotFound(f"no return {return_id}; `turnlock return list {tenant.name}` lists them")
    store.lock_leads(conn, tenant.tenant_id, [lead_id])
    row = conn.execute(sa.select(t.returns).where(this)).one()
    if row.state != "asked":
        raise TurnlockError(f"this return was {row.state} already, at {iso(row.decided_at)}")
    return row


def _close(
    conn: sa.Connection,
    tenant: Tenant,
    row: sa.Row[Any],
    state: str,
    actor: str,
    why: str | None,
    now: datetime,
    outcome: str | None = None,
) -> Json:
    r = t.returns.c
    conn.execute(
        sa.update(t.returns)
        .where(r.tenant_id == tenant.tenant_id, r.return_id == row.return_id)
        .values(state=state, outcome=outcome, decided_at=now, decided_by=actor, why=why)
    )
    asked = sa.exists().where(r.tenant_id == tenant.tenant_id, r.state == "asked")
    if not conn.execute(sa.select(asked)).scalar_one():
        close_alarm(conn, tenant.tenant_id, *_ALARM)
    names = Names.load(conn, tenant.tenant_id)
    (told,) = _told(conn, tenant.tenant_id, names, r.return_id == row.return_id)
    return told


# -- listing --------------------------------------------------------------------------------------------------------


def listing(runtime: Runtime, tenant: Tenant, *, decided: bool = False, limit: int = 200) -> list[Json]:
    """Returns that wait for a decision, oldest first; with `decided` the newest `limit` of all."""
    with runtime.engine.connect() as conn:
        if Flag.CREDITS not in runtime.stages(conn):
            return []
        names = Names.load(conn, tenant.tenant_id)
        which = sa.true() if decided else t.returns.c.state == "asked"
        return _told(conn, tenant.tenant_id, names, which, limit=limit if decided else None)


def _told(
    conn: sa.Connection, tenant_id: UUID, names: Names, which: sa.ColumnElement[bool], limit: int | None = None
) -> list[Json]:
    r = t.returns.c
    query = sa.select(t.returns).where(r.tenant_id == tenant_id, which)
    order = (r.asked_at, r.return_id) if limit is None else (r.asked_at.desc(), r.return_id.desc())
    rows = conn.execute(query.order_by(*order).limit(limit)).all()
    refs = newest_refs(conn, tenant_id, {row.lead_id for row in rows})
    return [
        {
            "return_id": str(row.return_id),
            "lead_id": str(row.lead_id),
            "lead": refs.get(row.lead_id),
            "agent": names.agent(row.agent_id),
            "reason": row.reason,
            "words": row.words,
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
