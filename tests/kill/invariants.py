"""What must hold at every instant, whoever was killed when, and what must hold at the end.

The first kind is SQL, all of it in one snapshot. A broken promise has a name: it is how a seeded bug is told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from connector.auditing import audit_queues
from connector.runtime import Runtime
from connector.sandbox.remote import Remote


@dataclass(frozen=True)
class Broken:
    """A promise that was not kept."""

    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


#: Every promise and what it says.
PROMISES = {
    "lost_after_2xx": "a lead whose delivery was answered 2xx is stored",
    "unaccounted": "accepted = assigned + ignored + held + parked + waiting",
    "double_assignment": "one active assignment per lead and role, one assignment per epoch",
    "turns_not_gapless": "turns are 1, 2, 3 ... up to the position of the queue",
    "turn_without_assignment": "each turn is one assignment through the queue, of the same agent",
    "owner_rows": "a decision that orders an owner has exactly one owner row, of its epoch",
    "epochs_out_of_order": "no write of a lower epoch is open once a higher one is confirmed",
    "overdue_lease": "nothing at the head of its line stays leased past the end of its lease",
    "off_rotation": "every turn goes to whose turn it is",
    "not_assigned": "in the end every lead that was sent has its agent",
    "crm_differs": "the owner in the CRM is the one in the database",
    "double_owner": "the CRM saw at most one change of owner per epoch",
    "too_many_repeats": "equal writes were repeated at most once per fault and kill",
    "double_note": "a lead has its note once",
    "liveness": "the backlog is gone in time",
    "died": "no process ends unless it was killed",
    "left_behind": "no process is left at the end",
}
# Seconds after the end of its lease within which somebody must have taken a row up whose turn it is.
_LEASE_GRACE = 10.0

# Each gives rows of which there must be none: a text that says what is wrong.
_SQL = {
    "double_assignment": """
        SELECT format('lead %s, %s: %s active assignments', lead_id, role, count(*)) FROM assignments
        WHERE state = 'active' GROUP BY tenant_id, lead_id, role HAVING count(*) > 1
        UNION ALL
        SELECT format('lead %s, %s: %s assignments of epoch %s', lead_id, role, count(*), epoch) FROM assignments
        GROUP BY tenant_id, lead_id, role, epoch HAVING count(*) > 1
    """,
    "turns_not_gapless": """
        SELECT format('queue %s at %s has %s turns from %s to %s', q.name, q.position, t.taken, t.lowest, t.highest)
        FROM queues q CROSS JOIN LATERAL (
            SELECT count(*) AS taken, coalesce(min(turn), 1) AS lowest, coalesce(max(turn), 0) AS highest
            FROM turns WHERE tenant_id = q.tenant_id AND queue_id = q.queue_id
        ) t
        WHERE (t.taken, t.lowest, t.highest) <> (q.position, 1, q.position)
    """,
    "turn_without_assignment": """
        SELECT format('turn %s of %s: agent %s, assigned %s', t.turn, t.queue_id, t.agent_id, a.agent_id)
        FROM turns t FULL JOIN assignments a
            ON (a.tenant_id, a.queue_id, a.turn, a.decision_id) = (t.tenant_id, t.queue_id, t.turn, t.decision_id)
        WHERE (a.turn IS NOT NULL OR t.turn IS NOT NULL) AND a.agent_id IS DISTINCT FROM t.agent_id
    """,
    "owner_rows": """
        SELECT format('lead %s: assignment of epoch %s has %s owner rows', a.lead_id, a.epoch, count(o.outbox_id))
        FROM assignments a LEFT JOIN outbox o
            ON (o.tenant_id, o.decision_id) = (a.tenant_id, a.decision_id) AND o.kind = a.role AND o.epoch = a.epoch
        GROUP BY a.tenant_id, a.assignment_id HAVING count(o.outbox_id) <> 1
        UNION ALL
        SELECT format('lead %s: %s owner rows of epoch %s', lead_id, count(*), epoch)
        FROM outbox WHERE kind <> 'note' GROUP BY tenant_id, lead_id, role, epoch HAVING count(*) > 1
        UNION ALL
        SELECT format('lead %s stands at epoch %s, its rows go to %s', s.lead_id, s.epoch, max(o.epoch))
        FROM lead_roles s JOIN outbox o USING (tenant_id, lead_id, role)
        GROUP BY s.tenant_id, s.lead_id, s.role, s.epoch HAVING max(o.epoch) <> s.epoch
    """,
    "epochs_out_of_order": """
        SELECT format('lead %s: epoch %s is open, %s is confirmed', low.lead_id, low.epoch, high.epoch)
        FROM outbox low JOIN outbox high USING (tenant_id, lead_id, role)
        WHERE low.kind <> 'note' AND high.kind <> 'note' AND low.epoch < high.epoch
            AND low.state = 'open' AND high.state = 'confirmed'
    """,
}

# Rows at the head of their line whose lease is over. Behind others that are due, a row waits for its turn; events stand
# in two lines at once, because they are found by when they are due and taken in order of receipt.
_OVER = """
    SELECT format('event %s, claim %s', event_id, claims) FROM events e
    WHERE state = 'waiting' AND leased_until < clock_timestamp() AND NOT EXISTS (
        SELECT FROM events b WHERE b.tenant_id = e.tenant_id AND b.state = 'waiting' AND b.due_at < clock_timestamp()
            AND (b.due_at < e.due_at OR b.received_at < e.received_at)
            AND (b.leased_until IS NULL OR b.leased_until < clock_timestamp())
    )
    UNION ALL
    SELECT format('%s write %s, claim %s', kind, outbox_id, claims) FROM outbox o
    WHERE state = 'open' AND kind <> 'note' AND leased_until < clock_timestamp() AND NOT EXISTS (
        SELECT FROM outbox b WHERE b.tenant_id = o.tenant_id AND b.state = 'open' AND b.kind <> 'note'
            AND b.due_at < o.due_at AND (b.leased_until IS NULL OR b.leased_until < clock_timestamp())
    )
"""

_COUNTS = """
    WITH accepted AS (
        SELECT e.tenant_id, e.ref, bool_or(e.state = 'waiting') AS waits, bool_or(e.state = 'parked') AS parked,
            bool_or(e.state = 'ignored') AS ignored
        FROM events e WHERE e.ref IS NOT NULL GROUP BY e.tenant_id, e.ref
        HAVING bool_or(e.kind = 'lead_created')
    ), known AS (
        SELECT a.*, s.state, EXISTS (
            SELECT FROM assignments x
            WHERE (x.tenant_id, x.lead_id, x.role, x.epoch) = (s.tenant_id, s.lead_id, s.role, s.epoch)
                AND x.state = 'active' AND x.agent_id = s.agent_id
        ) AS holds
        FROM accepted a
        LEFT JOIN lead_refs r USING (tenant_id, ref)
        LEFT JOIN lead_roles s ON (s.tenant_id, s.lead_id) = (r.tenant_id, r.lead_id) AND s.role = 'owner'
    ), classed AS (
        SELECT ref, CASE
            WHEN state = 'assigned' AND holds THEN 'assigned'
            WHEN state IN ('held', 'parked') THEN state
            WHEN state IN ('left', 'owned', 'gone') OR ignored AND state IS NULL THEN 'ignored'
            WHEN state IS DISTINCT FROM 'assigned' AND waits THEN 'waiting'
            WHEN state IS NULL AND parked THEN 'parked'
            ELSE 'nowhere'
        END AS class FROM known
    )
    SELECT class, count(*), (array_agg(ref))[1:5] FROM classed GROUP BY class
"""

_BACKLOG = """
    SELECT (SELECT count(*) FROM events WHERE state = 'waiting')
        + (SELECT count(*) FROM outbox WHERE state = 'open' AND kind <> 'note')
"""


@dataclass(frozen=True)
class Seen:
    """What one look at the database showed."""

    broken: list[Broken]
    counts: Counter[str]
    backlog: int


def look(conn: psycopg.Connection[Any]) -> Seen:
    """All that must hold at every instant, in one snapshot."""
    broken = []
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        for name, query in _SQL.items():
            rows = conn.execute(query).fetchmany(3)
            broken += [Broken(name, row[0]) for row in rows]
        counts: Counter[str] = Counter()
        for name, count, some in conn.execute(_COUNTS).fetchall():
            counts[name] = count
            if name == "nowhere":
                broken.append(Broken("unaccounted", f"{count} leads are neither assigned nor waiting: {some}"))
        (backlog,) = conn.execute(_BACKLOG).fetchone() or (0,)
    return Seen(broken, counts, backlog)


class Leases:
    """Watches for leases that are over and that nobody takes up, from look to look."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def look(self, conn: psycopg.Connection[Any], now: float) -> list[Broken]:
        """`now` in seconds, of any clock that does not jump."""
        over = [row[0] for row in conn.execute(_OVER).fetchall()]
        self._since = {one: self._since.get(one, now) for one in over}
        late = [one for one, since in self._since.items() if now - since > _LEASE_GRACE]
        return [Broken("overdue_lease", f"{one}: free for {_LEASE_GRACE:.0f} s") for one in late[:3]]


def lost(conn: psycopg.Connection[Any], crm: Remote) -> list[Broken]:
    """Leads whose delivery was answered 2xx and that are not in the inbox. The answers are the sender's record."""
    answered = {
        str(lead)
        for delivery in crm.deliveries()
        if delivery["topic"] in ("peopleCreated", "lead.created")
        and any(attempt["status"] is not None and attempt["status"] // 100 == 2 for attempt in delivery["attempts"])
        for lead in delivery["leads"]
    }
    query = (
        "SELECT ref FROM events e JOIN deliveries d USING (tenant_id, delivery_id) "
        "WHERE d.source = 'webhook' AND e.kind = 'lead_created'"
    )
    # Asked of the sender first: what was answered before this reading must be in it.
    gone = answered - {row[0] for row in conn.execute(query).fetchall()}
    return [Broken("lost_after_2xx", f"{len(gone)} of {len(answered)} leads: {sorted(gone)[:5]}")] if gone else []


def off_rotation(conn: psycopg.Connection[Any], runtime: Runtime, tenant_id: UUID) -> Iterator[Broken]:
    """Turns that went to somebody else than the line says: by the ledger's replay, and by counting."""
    for audit in audit_queues(runtime, tenant_id, whole=True):
        for problem in audit.problems[:3]:
            of_turns = ": turn_gap:" in problem or not problem.startswith(("entry", "present"))
            yield Broken("turns_not_gapless" if of_turns else "off_rotation", f"{audit.queue}: {problem}")
    # Counted without the product's code: with everybody there all the time, equal members take turns in a circle.
    disturbed = conn.execute(
        "SELECT (SELECT count(*) FROM turns WHERE void_reason IS NOT NULL) + (SELECT count(*) FROM ledger "
        "WHERE kind = 'turn' AND (data->'unavailable' <> '[]' OR data->>'owed' IS NOT NULL))"
    ).fetchone()
    if disturbed is None or disturbed[0]:
        return
    size = dict(conn.execute("SELECT queue_id, count(*) FROM members GROUP BY 1").fetchall())
    last: dict[tuple[UUID, UUID], int] = {}
    for queue, turn, agent in conn.execute("SELECT queue_id, turn, agent_id FROM turns ORDER BY 1, 2").fetchall():
        before = last.get((queue, agent))
        if before is not None and turn - before != size[queue]:
            yield Broken("off_rotation", f"an agent among {size[queue]} has turns {before} and {turn}")
            return
        last[queue, agent] = turn


def in_the_crm(conn: psycopg.Connection[Any], crm: Remote, sent: Collection[int], troubles: int) -> Iterator[Broken]:
    """What the CRM must show at the end; `troubles` is how many faults and kills there were."""
    query = (
        "SELECT r.ref, s.epoch, g.ref FROM lead_roles s JOIN lead_refs r USING (tenant_id, lead_id) "
        "LEFT JOIN agent_refs g ON (g.tenant_id, g.agent_id) = (s.tenant_id, s.agent_id) "
        "WHERE s.role = 'owner' AND s.state = 'assigned'"
    )
    ours = {int(ref): (epoch, int(agent)) for ref, epoch, agent in conn.execute(query).fetchall()}
    owners = dict(crm.owners())
    differ = [lead for lead in sent if lead in ours and owners[lead] != ours[lead][1]]
    if differ:
        shown = ", ".join(f"lead {lead}: {owners[lead]} there, {ours[lead][1]} here" for lead in differ[:3])
        yield Broken("crm_differs", f"{len(differ)} of {len(sent)} leads: {shown}")
    changes = Counter(row["lead"] for row in crm.owner_log() if row["new"] is not None)
    twice = [lead for lead in sent if changes[lead] > (ours[lead][0] if lead in ours else 1)]
    if twice:
        yield Broken("double_owner", f"{len(twice)} leads: {[(lead, changes[lead]) for lead in twice[:5]]}")
    repeats = repeated(crm)
    if repeats > troubles:
        yield Broken("too_many_repeats", f"{repeats} equal writes were repeated after {troubles} faults and kills")


def repeated(crm: Remote) -> int:
    """Owner writes that changed nothing because the same one had been done."""
    return sum(not row["changed"] and row["effect"] is None for row in crm.write_log())


def notes_twice(crm: Remote, leads: Collection[int]) -> Iterator[Broken]:
    """Leads with more than one note."""
    twice = [lead for lead in leads if len(crm.lead(lead=lead)["notes"]) > 1]
    if twice:
        yield Broken("double_note", f"{len(twice)} leads: {twice[:5]}")
