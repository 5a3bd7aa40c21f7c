"""Held leads: who waits, who of them could be served now, and the drain that sees to it.

A held lead is decided again by the ordinary unit: read from the CRM, rules again, normal locks. The drain feeds the
oldest that somebody free may take, a bounded batch at a time and one batch per queue, so that two units never serve
two parts of one wait; and everybody once after a change of configuration, page by page.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector import inbox
from connector.alarms import close_alarm
from connector.database import at_rest, unit
from connector.returning import next_return
from connector.runtime import Runtime, Tenant
from connector.tables import alarms, deliveries, events
from routing import kin, store
from routing import tables as t
from routing.decide import Plan, QueueState, Waiting
from routing.model import TELLING, Agent, Flag, Load, Role
from routing.skips import quiet_until, unavailable

# Leads that one free agent is asked about at once: each is read from the CRM, and a cap may end it after the first.
PER_AGENT = 25
# Writes to the CRM that are due: with more than this, those who wait go on waiting, so that a new lead's is soon sent.
BACKLOG = 25
# A unit of this many holds the lock of its queue for some tenths of a second.
MOST = 100
# Looked at again though nothing of ours says that they could be served: a human may have taken one unseen.
REFRESH, REFRESH_EVERY = 50, timedelta(seconds=60)
# Fed, and nobody was served: something that we do not see stands against it.
_LOOK = 15.0


def _held(tenant_id: UUID) -> sa.ColumnElement[bool]:
    s, owner = t.lead_roles.c, t.lead_roles.alias("owner").c
    # A collaborator is waited for as long as the owner is ours.
    owned = sa.exists().where(
        owner.tenant_id == s.tenant_id,
        owner.lead_id == s.lead_id,
        owner.role == Role.OWNER.value,
        owner.state == "assigned",
    )
    return sa.and_(s.tenant_id == tenant_id, s.state == "held", sa.or_(s.role == Role.OWNER.value, owned))


def _in_order(tenant_id: UUID) -> sa.ColumnElement[bool]:
    """Not one of those that a fault or a human's decision keeps from being decided: they hold nobody up."""
    e = events.c
    bad = sa.select(e.lead_id).where(
        e.tenant_id == tenant_id,
        e.lead_id.is_not(None),
        sa.or_(e.state == "parked", sa.and_(e.state == "waiting", e.attempt > 0)),
    )
    return t.lead_roles.c.lead_id.not_in(bad)


def _latest(role: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """The join from a standing to its latest decision, which names the rule."""
    s, d = t.lead_roles.c, t.decisions.c
    return sa.and_(d.tenant_id == s.tenant_id, d.lead_id == s.lead_id, d.role == role, d.seq == s.seq)


def load_waiting(
    conn: sa.Connection,
    tenant_id: UUID,
    flags: frozenset[Flag],
    role: Role,
    homes: Collection[UUID] | None = None,
    without: Collection[UUID] = (),
) -> list[Waiting]:
    """Who waits (in `homes`, or anywhere), leads that are alike told by the oldest; leads of `without` left out.

    In a unit: call with its queues locked, so that whoever is waiting is so for its members as well.
    """
    s, d, r = t.lead_roles.c, t.decisions.c, t.returns.c
    here = [_held(tenant_id), s.role == role.value, _in_order(tenant_id)]
    if homes is not None:
        here.append(s.queue_id == sa.any_(sa.cast(list(homes), sa.ARRAY(sa.Uuid))))
    if without:
        here.append(s.lead_id != sa.all_(sa.cast(list(without), sa.ARRAY(sa.Uuid))))
    columns = (s.queue_id, d.rule, s.since, s.lead_id)
    query = sa.select(*columns).outerjoin(t.decisions, _latest(s.role)).where(*here)
    found: list[Waiting] = []
    if Flag.CREDITS in flags and role is Role.OWNER:
        # Who may not get them differs from lead to lead, so each of those that were returned stands for itself.
        given_back = conn.execute(
            sa.select(r.lead_id)
            .join(t.lead_roles, (s.tenant_id == r.tenant_id) & (s.lead_id == r.lead_id))
            .where(r.tenant_id == tenant_id, r.state == "approved", s.role == role.value, s.state == "held")
            .distinct()
        )
        if alone := list(given_back.scalars()):
            ids = sa.cast(alone, sa.ARRAY(sa.Uuid))
            returned = kin.load_returned(conn, tenant_id, alone)
            found = [
                Waiting(row.queue_id, row.rule, returned[row.lead_id].had, row.since, row.lead_id)
                for row in conn.execute(query.where(s.lead_id == sa.any_(ids)))
                if row.lead_id in returned
            ]
            query = query.where(s.lead_id != sa.all_(ids))
    place = sa.func.row_number().over(partition_by=(s.queue_id, d.rule), order_by=(s.since, s.lead_id))
    each = query.add_columns(place.label("place")).subquery().c
    rows = conn.execute(sa.select(each.queue_id, each.rule, each.since, each.lead_id).where(each.place == 1)).all()
    return found + [Waiting(row.queue_id, row.rule, frozenset(), row.since, row.lead_id) for row in rows]


def load_rules(conn: sa.Connection, tenant_id: UUID, lead_ids: Collection[UUID]) -> dict[UUID, str | None]:
    """By which rule each of these held leads waits as owner's."""
    s, d = t.lead_roles.c, t.decisions.c
    rows = conn.execute(
        sa.select(s.lead_id, d.rule)
        .join(t.decisions, _latest(s.role))
        .where(
            s.tenant_id == tenant_id,
            s.lead_id == sa.any_(sa.cast(list(lead_ids), sa.ARRAY(sa.Uuid))),
            s.role == Role.OWNER.value,
        )
    )
    return {row.lead_id: row.rule for row in rows}


# -- the drain ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cursor:
    """What one run leaves to the next: the configuration for which everybody was asked, and how far that came."""

    version: tuple[int, int]
    changed: bool
    asking: dict[str, list[str] | None]  # per line of waiting: after whom; None when all were asked
    refreshed: dict[str, list[str]]
    refreshed_at: datetime
    heads: dict[str, str]

    @classmethod
    def of(cls, stored: Any, version: tuple[int, int], now: datetime) -> _Cursor:
        # Before the first look nobody knows by which configuration they came to wait: everybody is asked once.
        stored = stored or {}
        last = stored.get("refreshed_at")
        same = stored.get("version") == list(version)
        return cls(
            version,
            not same,
            dict(stored.get("asking", {})) if same else {},
            dict(stored.get("refreshed", {})),
            datetime.fromisoformat(last) if last else now,
            dict(stored.get("heads", {})),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "version": list(self.version),
            "asking": self.asking,
            "refreshed": self.refreshed,
            "refreshed_at": self.refreshed_at.isoformat(),
            "heads": self.heads,
        }


def drain(runtime: Runtime, tenant: Tenant, stored: Any) -> tuple[float, Any]:
    """One look at everybody who waits: feed those who can be served now. Seconds until the next, and the cursor."""
    tenant_id = tenant.tenant_id
    again = REFRESH_EVERY.total_seconds()
    with unit(runtime.engine) as (conn, db_now):
        row = store.tenant_row(conn, tenant_id)
        plan = runtime.plan(conn, row)
        cursor = _Cursor.of(stored, row.version, db_now)
        subjects = _lock_alarms(conn, tenant_id)
        s = t.lead_roles.c
        lines = conn.execute(sa.select(s.role, s.queue_id).where(_held(tenant_id)).distinct()).all()
        names = plan.queue_names
        for subject in subjects - {names.get(q, "no queue") if q else "no queue" for _, q in lines}:
            close_alarm(conn, tenant_id, "leads_held", subject)
        keys = {f"{role}:{home or ''}" for role, home in lines}
        for kept in (cursor.asking, cursor.refreshed, cursor.heads):
            for key in kept.keys() - keys:
                del kept[key]
        if not lines:
            return 900.0, cursor.as_json()
        for key in keys:  # whoever came to wait since the last change was decided by the configuration as it is
            cursor.asking.setdefault(key, ["", ""] if cursor.changed else None)
        if tenant.sending and _writes_due(conn, tenant_id) > BACKLOG:
            return 0.5, cursor.as_json()
        there = _There.load(conn, tenant_id, plan, runtime.clock(db_now))
        waiting = {role: load_waiting(conn, tenant_id, plan.flags, role) for role in {Role(r) for r, _ in lines}}
        refresh = db_now - cursor.refreshed_at >= REFRESH_EVERY
        cursor.refreshed_at = db_now if refresh else cursor.refreshed_at
        claimed: set[UUID] = set()
        for line in sorted((_Line(conn, tenant_id, Role(r), home, waiting[Role(r)], there) for r, home in lines)):
            key = line.key
            if _under_way(conn, tenant_id, line.role, line.home):
                claimed |= line.agents
                again = min(again, 1.0)  # the unit that ends it wakes us if it led anywhere
                continue
            if (after := cursor.asking[key]) is not None:
                rows = line.oldest(MOST, after=after)
                cursor.asking[key] = [rows[-1].since.isoformat(), str(rows[-1].lead_id)] if len(rows) == MOST else None
            elif line.servable:
                # Whoever a longer wait has a claim on is not for this one: it would be read for nothing.
                if line.agents & claimed:
                    again = min(again, 1.0)
                    continue
                rows = line.oldest(max(PER_AGENT, min(MOST, PER_AGENT * len(line.agents))), servable=True)
            elif refresh:
                rows = line.oldest(REFRESH, after=cursor.refreshed.get(key))
                cursor.refreshed[key] = (
                    [rows[-1].since.isoformat(), str(rows[-1].lead_id)] if len(rows) == REFRESH else ["", ""]
                )
                line.feed(rows)
                continue
            else:
                continue
            claimed |= line.agents
            line.feed(rows)
            head = str(rows[0].lead_id) if rows else ""
            # Fed again at once only as long as it leads anywhere.
            again = min(again, 1.0 if cursor.heads.get(key) != head else _LOOK)
            cursor.heads[key] = head
    runtime.wake(tenant_id)
    with at_rest(runtime.engine) as conn:  # apart, because it looks at everybody, and alarms were locked above
        coming = next_return(conn, tenant_id, plan.flags, there.now)
    if coming is not None:
        again = min(again, max((coming - there.now).total_seconds(), 0.05))
    return again, cursor.as_json()


def _writes_due(conn: sa.Connection, tenant_id: UUID) -> int:
    """How many writes of owners and collaborators are due; counted no further than matters."""
    o = t.outbox.c
    due = (
        sa.select(o.outbox_id)
        .where(
            o.tenant_id == tenant_id, o.state == "open", o.kind.not_in(TELLING), o.due_at <= sa.func.clock_timestamp()
        )
        .limit(BACKLOG + 1)
    )
    return int(conn.execute(sa.select(sa.func.count()).select_from(due.subquery())).scalar_one())


def _under_way(conn: sa.Connection, tenant_id: UUID, role: Role, home: UUID | None) -> bool:
    """Whether a batch of this line of waiting is still to be decided. One that failed before holds nobody up."""
    s, e, d = t.lead_roles.c, events.c, deliveries.c
    fed = (
        sa.select(e.event_id)
        .join(t.lead_roles, (s.tenant_id == e.tenant_id) & (s.lead_id == e.lead_id))
        .join(deliveries, (d.tenant_id == e.tenant_id) & (d.delivery_id == e.delivery_id))
        .where(
            e.tenant_id == tenant_id,
            e.state == "waiting",
            e.attempt == 0,
            d.source == "held",
            s.role == role.value,
            s.state == "held",
            s.queue_id == home if home else s.queue_id.is_(None),
        )
    )
    return bool(conn.execute(sa.select(fed.exists())).scalar_one())


class _There:
    """Who is there now, ready to take a lead of a queue, or any that is given to them directly."""

    def __init__(
        self,
        plan: Plan,
        queues: Mapping[UUID, QueueState],
        agents: Mapping[UUID, Agent],
        loads: Mapping[UUID, Load],
        now: datetime,
    ) -> None:
        self._plan = plan
        self.now = now
        self._agents = agents
        self._of_queue = {
            queue_id: frozenset(
                p.agent_id
                for p in queue.line.places
                if p.weight
                and p.agent_id in agents
                and self._is_there(agents[p.agent_id], p.weight, loads.get(p.agent_id))
            )
            for queue_id, queue in queues.items()
            if quiet_until(queue.quiet, now) is None
        }

    @classmethod
    def load(cls, conn: sa.Connection, tenant_id: UUID, plan: Plan, now: datetime) -> _There:
        queues = store.load_queues(conn, tenant_id, plan.flags, list(plan.queue_names))
        agents = store.load_agents(conn, tenant_id, plan.flags)
        return cls(plan, queues, agents, store.count_loads(conn, tenant_id, agents.values(), now), now)

    def _is_there(self, agent: Agent, weight: int, load: Load | None = None) -> bool:
        skips, weights = Flag.SKIPS in self._plan.flags, Flag.WEIGHTS in self._plan.flags
        return unavailable(agent, weight, self.now, (), load=load, skips=skips, weights=weights) is None

    def for_lead(self, lead: Waiting, role: Role) -> frozenset[UUID]:
        """Whoever is there and may get this lead."""
        reach = self._plan.reach(lead.home, lead.rule, role)
        found = {agent_id for queue_id in reach.queues for agent_id in self._of_queue.get(queue_id, ())}
        found |= {a for a in reach.agents if a in self._agents and self._is_there(self._agents[a], 1)}
        return frozenset(found - lead.had)


class _Line:
    """Those who wait in one role for one queue. Lines sort by who of theirs waits longest and can be served now."""

    def __init__(
        self,
        conn: sa.Connection,
        tenant_id: UUID,
        role: Role,
        home: UUID | None,
        waiting: Sequence[Waiting],
        there: _There,
    ) -> None:
        self._conn = conn
        self._tenant_id = tenant_id
        self.role, self.home, self.key = role, home, f"{role.value}:{home or ''}"
        s = t.lead_roles.c
        of_home = s.queue_id == home if home else s.queue_id.is_(None)
        self._which = sa.and_(_held(tenant_id), s.role == role.value, of_home, _in_order(tenant_id))
        self._all = [w for w in waiting if w.home == home]
        free = {w.lead_id: there.for_lead(w, role) for w in self._all}
        self.servable = [w for w in self._all if free[w.lead_id]]
        #: Whoever is there and may get one of theirs.
        self.agents = frozenset().union(*free.values())
        self._place = min(((w.since, w.lead_id) for w in self.servable), default=None)

    def __lt__(self, other: _Line) -> bool:
        """Whether one of this line waits longer; lines where nobody can be served come last."""
        if self._place is None or other._place is None:
            return self._place is not None
        return self._place < other._place

    def oldest(self, limit: int, *, after: list[str] | None = None, servable: bool = False) -> Sequence[sa.Row[Any]]:
        """The oldest of all, those `after` one, or those who can be served now: ref, lead, since."""
        s, r, d = t.lead_roles.c, t.lead_refs.c, t.decisions.c
        # The newest ref of each lead: a merge adds one, and that is the one the CRM answers to.
        newest = (
            sa.select(r.ref)
            .where(r.tenant_id == s.tenant_id, r.lead_id == s.lead_id)
            .order_by(r.created_at.desc(), r.ref)
            .limit(1)
            .scalar_subquery()
        )
        query: Any = sa.select(newest.label("ref"), s.lead_id, s.since).where(self._which)
        if after is not None and after[0]:
            place = sa.tuple_(sa.literal(datetime.fromisoformat(after[0])), sa.literal(UUID(after[1])))
            query = query.where(sa.tuple_(s.since, s.lead_id) > place)
        if servable and len(self.servable) < len(self._all):
            rules = [w.rule for w in self.servable if not w.had]
            alone = sa.cast([w.lead_id for w in self._all if w.had], sa.ARRAY(sa.Uuid))
            chosen = sa.cast([w.lead_id for w in self.servable if w.had], sa.ARRAY(sa.Uuid))
            by_rule = sa.or_(d.rule.in_([one for one in rules if one is not None]), d.rule.is_(None) & (None in rules))
            query = query.outerjoin(t.decisions, _latest(s.role)).where(
                sa.or_(s.lead_id == sa.any_(chosen), sa.and_(by_rule, s.lead_id != sa.all_(alone)))
            )
        found: Sequence[sa.Row[Any]] = self._conn.execute(query.order_by(s.since, s.lead_id).limit(limit)).all()
        return found

    def feed(self, rows: Sequence[sa.Row[Any]]) -> None:
        """Back to the inbox with these, in this order."""
        kind = "lead_changed" if self.role is Role.OWNER else "collaborators"
        refs = [(row.ref, row.lead_id) for row in rows]
        inbox.enqueue(self._conn, self._tenant_id, "held", refs, kind=kind, coalesce=f"held:{kind}")


def _lock_alarms(conn: sa.Connection, tenant_id: UUID) -> set[str]:
    """The subjects of the open alarms about held leads, locked.

    Protects: an alarm that is opened, or counted up, while we look. Locked before it is read who waits, an alarm's lead
    is seen waiting, or its decision waits for us and opens a new one. Waiting is right: a decision is short.
    """
    c = alarms.c
    rows = conn.execute(
        sa.select(c.subject)
        .where(c.tenant_id == tenant_id, c.kind == "leads_held", c.closed_at.is_(None))
        .order_by(c.alarm_id)
        .with_for_update(key_share=True)
    )
    return set(rows.scalars())
