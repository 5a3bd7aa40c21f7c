"""Turns moved by hand: give next, send to back, credit, debit, reorder; members added, removed and re-weighted.

Every move is one ledger entry under the lock of its queue, with who did it and why. Who is a member, and with which
weight, is said by the configuration: those three moves make a new version of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector import configuration
from connector.config_lines import lines_of, team_line, team_of, with_members
from connector.config_model import Config, Member, Members, TeamMember
from connector.configuration import Applied, has_ledger
from connector.database import new_id, unit
from connector.errors import TurnlockError
from connector.naming import Json, Names, iso
from connector.runtime import Runtime, Tenant
from routing import rotation, saving, store
from routing import tables as t
from routing.ledger import Kind
from routing.model import Flag

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
MAX_WHO, MAX_WHY = 100, 500


def give_next(runtime: Runtime, tenant: Tenant, queue_id: UUID, agent_id: UUID, *, actor: str, why: str) -> Json:
    """The next lead that this member may take is theirs, before owed turns and the line; it counts as their turn.

    Like all moves here: gives the entry as :func:`ledger` tells it, and raises :class:`TurnlockError` with every
    problem, in which case nothing was moved.
    """
    return _of_member(runtime, tenant, queue_id, agent_id, Kind.GIVE_NEXT, actor, why, owed=str(new_id()))


def credit(runtime: Runtime, tenant: Tenant, queue_id: UUID, agent_id: UUID, *, actor: str, why: str) -> Json:
    """Owe this member one turn: served before the line, and their place in it stays as it is."""
    return _of_member(runtime, tenant, queue_id, agent_id, Kind.OWE, actor, why, owed=str(new_id()))


def debit(runtime: Runtime, tenant: Tenant, queue_id: UUID, agent_id: UUID, *, actor: str, why: str) -> Json:
    """Charge this member one turn that they did not take here."""
    return _of_member(runtime, tenant, queue_id, agent_id, Kind.DEBIT, actor, why)


def send_to_back(runtime: Runtime, tenant: Tenant, queue_id: UUID, agent_id: UUID, *, actor: str, why: str) -> Json:
    """Move this member to the back of the line. It never moves anyone forward."""
    return _of_member(runtime, tenant, queue_id, agent_id, Kind.SEND_TO_BACK, actor, why)


def reorder(runtime: Runtime, tenant: Tenant, queue_id: UUID, first: Sequence[UUID], *, actor: str, why: str) -> Json:
    """Put these members first in line, in this order; the others follow in the order in which they stand.

    Nobody is reset: the same places are dealt anew.
    """

    def given(moves: saving.Moves, names: Names) -> dict[str, Any]:
        problems = [] if first else ["no member is named; name those who come first"]
        for agent_id in dict.fromkeys(first):
            if first.count(agent_id) > 1:
                problems.append(f"{_called(names, agent_id)} is named more than once; name them once")
            problems += _not_a_member(moves.line, names, agent_id)
        if problems:
            raise TurnlockError("\n".join(problems))
        rest = [agent_id for agent_id in rotation.standing(moves.line) if agent_id not in first]
        order = [*first, *rest]
        rank = moves.next_rank
        moves.next_rank += len(order)
        return {"order": [str(agent_id) for agent_id in order], "rank": rank}

    return _move(runtime, tenant, queue_id, Kind.REORDER, actor, why, given)


def _of_member(
    runtime: Runtime, tenant: Tenant, queue_id: UUID, agent_id: UUID, kind: Kind, actor: str, why: str, **more: Any
) -> Json:
    def given(moves: saving.Moves, names: Names) -> dict[str, Any]:
        if problems := _not_a_member(moves.line, names, agent_id):
            raise TurnlockError(problems[0])
        if kind is not Kind.SEND_TO_BACK and not rotation.place_of(moves.line, agent_id).weight:
            raise TurnlockError(
                f"{_called(names, agent_id)} has weight 0 in this queue and takes no turns; "
                "`turnlock queue reweight` gives them some"
            )
        rank = {"rank": moves.rank()} if kind is Kind.SEND_TO_BACK else {}
        return {"agent": str(agent_id)} | rank | more

    return _move(runtime, tenant, queue_id, kind, actor, why, given)


def _move(
    runtime: Runtime,
    tenant: Tenant,
    queue_id: UUID,
    kind: Kind,
    actor: str,
    why: str,
    given: Callable[[saving.Moves, Names], dict[str, Any]],
) -> Json:
    """One move under the queue's lock: `given` gives its inputs from the line as it stands then, or refuses."""
    tenant_id = tenant.tenant_id
    check_words(actor, why)
    with unit(runtime.engine) as (conn, now):
        require_credits(runtime, conn, tenant)
        store.lock_queues(conn, tenant_id, [queue_id])
        flags = store.tenant_row(conn, tenant_id).flags
        if Flag.ROTATION not in flags or not has_ledger(conn, tenant_id, queue_id):
            raise TurnlockError(
                "this queue takes no turns while the rotation is off; "
                f"`turnlock flags {tenant.name} rotation on`, then repeat this"
            )
        names = Names.load(conn, tenant_id)
        state = store.load_queues(conn, tenant_id, flags, [queue_id])[queue_id]
        moves = saving.Moves(state.line, state.next_rank, actor)
        moves.do(kind, why, **given(moves, names))
        saving.save_lines(conn, tenant_id, {queue_id: state}, {queue_id: moves.line}, {queue_id: moves.drafts}, now)
        (done,) = _entries(conn, tenant_id, queue_id, names, limit=1)
    return {"queue": state.name} | done


def check_words(actor: str, why: str | None) -> None:
    """Refuse an actor or a reason that a ledger cannot keep: it is for ever, and read in one line."""
    problems = []
    for what, text, most in (("who did it", actor, MAX_WHO), ("the reason", why, MAX_WHY)):
        if text is None:
            continue
        if not text.strip():
            problems.append(f"{what}: is empty; say it in a few words")
        elif len(text) > most:
            problems.append(f"{what}: has {len(text)} characters; use {most} at most")
        elif _CONTROL.search(text):
            problems.append(f"{what}: holds a line break or a control character; write one line of text")
    if problems:
        raise TurnlockError("\n".join(problems))


def require_credits(runtime: Runtime, conn: sa.Connection, tenant: Tenant) -> None:
    """Refuse while the capability `credits` is not on for this tenant."""
    if Flag.CREDITS not in runtime.stages(conn):
        raise TurnlockError("moving turns and returning leads need the stage `credits`; run `turnlock migrate`")
    if Flag.CREDITS not in store.tenant_row(conn, tenant.tenant_id).flags:
        raise TurnlockError(f"credits are off; `turnlock flags {tenant.name} credits on`")


def _called(names: Names, agent_id: UUID) -> str:
    name, ref = names.agents.get(str(agent_id), ("unknown agent", None))
    return f"{name} ({ref})" if ref is not None else name


def _not_a_member(line: rotation.Line, names: Names, agent_id: UUID) -> list[str]:
    if any(place.agent_id == agent_id for place in line.places):
        return []
    return [f"{_called(names, agent_id)} is not a member of this queue; `turnlock queue add` lets them join"]


# -- members: the configuration says who they are -------------------------------------------------------------------


def add(
    runtime: Runtime, tenant: Tenant, queue: str, agent_id: UUID, *, weight: int = 1, actor: str, why: str
) -> Applied:
    """Let an agent join the queue called `queue` at the back of its line, by a new version of the configuration.

    `agent_id` may be the line of a team, which then takes turns there as one; so it may in the other moves.
    """

    def change(members: Members, which: _Which) -> Members:
        if which.of(members) is not None:
            raise TurnlockError(
                f"{which.who} is a member of {queue!r} already; `turnlock queue reweight` changes the weight"
            )
        new = Member(agent_id, weight) if which.line is None else TeamMember(team_of(which.line), weight, nested=True)
        return (*members, new)

    return _edit(runtime, tenant, queue, agent_id, change, actor, why, weight)


def remove(runtime: Runtime, tenant: Tenant, queue: str, agent_id: UUID, *, actor: str, why: str) -> Applied:
    """Take a member out of the queue called `queue`, with the turns they are owed there. Nobody else moves."""

    def change(members: Members, which: _Which) -> Members:
        found = which.of(members)
        if found is None:
            raise TurnlockError(which.missing(queue, members, "`turnlock queue show` lists who is"))
        return tuple(one for one in members if one is not found)

    return _edit(runtime, tenant, queue, agent_id, change, actor, why)


def reweight(
    runtime: Runtime, tenant: Tenant, queue: str, agent_id: UUID, weight: int, *, actor: str, why: str
) -> Applied:
    """Give a member another weight (0: no turns) by a new version of the configuration; their lag in turns stays."""

    def change(members: Members, which: _Which) -> Members:
        found = which.of(members)
        if found is None:
            raise TurnlockError(which.missing(queue, members, "`turnlock queue add` lets them join"))
        return tuple(replace(one, weight=weight) if one is found else one for one in members)

    return _edit(runtime, tenant, queue, agent_id, change, actor, why, weight)


@dataclass(frozen=True, slots=True)
class _Which:
    """The member whom a move means: an agent, or a team by the id and name of its line."""

    agent_id: UUID
    who: str
    line: str | None

    def of(self, members: Members) -> Member | TeamMember | None:
        """The entry that names them in a list of members."""
        for one in members:
            if one.agent_id == self.agent_id if isinstance(one, Member) else team_line(one.team) == self.line:
                return one
        return None

    def missing(self, queue: str, members: Members, fix: str) -> str:
        """That no entry names them, and what to do."""
        if any(isinstance(one, TeamMember) and not one.nested for one in members):
            return f"{self.who} is not named in {queue!r}; {fix}, and who comes with a team is changed in the team"
        return f"{self.who} is not a member of {queue!r}; {fix}"


def _edit(
    runtime: Runtime,
    tenant: Tenant,
    queue: str,
    agent_id: UUID,
    change: Callable[[Members, _Which], Members],
    actor: str,
    why: str,
    weight: int = 1,
) -> Applied:
    check_words(actor, why)
    if not 0 <= weight <= rotation.MAX_WEIGHT:
        raise TurnlockError(f"the weight: {weight} is out of range; use a whole number from 0 to {rotation.MAX_WEIGHT}")
    with runtime.engine.connect() as conn:
        names = Names.load(conn, tenant.tenant_id)
    which = _Which(agent_id, _called(names, agent_id), names.queues.get(str(agent_id)))

    def edited(config: Config) -> Config:
        found = with_members(config, queue, lambda members: change(members, which))
        if found is None:
            there = ", ".join(lines_of(config)) or "none"
            raise TurnlockError(f"no queue {queue!r} is configured; there are: {there}")
        return found

    return configuration.edit(runtime, tenant, edited, actor, why)


# -- the ledger, told -----------------------------------------------------------------------------------------------


def ledger(runtime: Runtime, tenant: Tenant, queue_id: UUID, *, limit: int, before: int | None = None) -> Json:
    """The newest `limit` entries of a queue's ledger, oldest first; with `before` those of a lower number."""
    with runtime.engine.connect() as conn:
        names = Names.load(conn, tenant.tenant_id)
        entries: list[Json] = []
        if Flag.ROTATION in runtime.stages(conn):
            entries = _entries(conn, tenant.tenant_id, queue_id, names, limit=limit, before=before)
    return {"queue": names.queue(queue_id), "entries": entries}


def _entries(
    conn: sa.Connection, tenant_id: UUID, queue_id: UUID, names: Names, *, limit: int, before: int | None = None
) -> list[Json]:
    c = t.ledger.c
    query = sa.select(t.ledger).where(c.tenant_id == tenant_id, c.queue_id == queue_id).order_by(c.seq.desc())
    if before is not None:
        query = query.where(c.seq < before)
    rows = conn.execute(query.limit(limit)).all()[::-1]
    leads = _leads(conn, tenant_id, [UUID(row.data["decision"]) for row in rows if "decision" in row.data])
    return [_told(names, row, leads) for row in rows]


def _leads(conn: sa.Connection, tenant_id: UUID, decisions: list[UUID]) -> Mapping[str, str]:
    """The CRM's id of each decision's lead."""
    if not decisions:
        return {}
    d, r = t.decisions.c, t.lead_refs.c
    newest = (
        sa.select(r.ref)
        .where(r.tenant_id == d.tenant_id, r.lead_id == d.lead_id)
        .order_by(r.created_at.desc(), r.ref)
        .limit(1)
        .scalar_subquery()
    )
    rows = conn.execute(
        sa.select(d.decision_id, newest.label("ref")).where(
            d.tenant_id == tenant_id, d.decision_id == sa.any_(sa.cast(decisions, sa.ARRAY(sa.Uuid)))
        )
    )
    return {str(row.decision_id): row.ref for row in rows}


def _told(names: Names, row: sa.Row[Any], leads: Mapping[str, str]) -> Json:
    """An entry as people ask about it; what only a replay needs (tags, floor) is left to the audit."""
    data = row.data
    at: datetime = row.at
    return {
        "seq": row.seq,
        "kind": row.kind,
        "at": iso(at),
        "actor": row.actor,
        "why": row.reason,
        "agent": names.agent(data.get("agent")),
        "turn": data.get("turn"),
        "how": data.get("how"),
        "lead": leads.get(data.get("decision", "")),
        "weight": data.get("weight"),
        "passed_over": [names.agent(one) for one in data.get("passed_over", ())],
        "order": [names.agent(one) for one in data.get("order", ())],
    }
