"""Fairness per agent and period: rolled up from the ledgers as they grow, so that a report never reads them.

Each queue's ledger is folded in order of its sequence numbers, which are given out under the queue's lock: what is
visible is a gapless beginning of it. How far that went is kept beside the sums and moves in the same transaction, so a
crash repeats or loses nothing, and the sums can be made anew from the ledger at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB, insert

from connector import turnless
from connector.database import unit
from connector.errors import NotFound, TurnlockError
from connector.naming import Json, Names, iso
from connector.runtime import Runtime, Tenant
from connector.tables import fairness_days, fairness_marks
from routing import tables as t
from routing.fairness import TURN, Counts, Fold, Key
from routing.ledger import Kind
from routing.model import Flag

#: Ledger entries that one transaction folds: some tens of milliseconds.
BATCH = 5000
PERIODS = ("whole", "day", "week", "month")
# Of a turn's entry.
_NOT_FOLDED = ("decision", "floor", "lose_turn", "owed", "passed_over", "tag")


# -- rolling up -----------------------------------------------------------------------------------------------------


def roll_up(runtime: Runtime, tenant_id: UUID, *, batches: int | None = None) -> bool:
    """Fold what is not folded yet; whether that is all, or `batches` of entries came to their end first."""
    with runtime.engine.connect() as conn:
        if not (runtime.keeps_why(conn) and Flag.ROTATION in runtime.stages(conn)):
            return True
        q, m = t.queues.c, fairness_marks.c
        behind = conn.execute(
            sa.select(q.queue_id)
            .outerjoin(fairness_marks, (m.tenant_id == q.tenant_id) & (m.queue_id == q.queue_id))
            .where(q.tenant_id == tenant_id, q.seq > sa.func.coalesce(m.seq, 0))
            .order_by(q.queue_id)
        ).scalars()
        queue_ids = list(behind)
    for queue_id in queue_ids:
        more = True
        while more:
            if batches is not None and batches <= 0:
                return False
            with unit(runtime.engine) as (conn, _):
                more = _roll(conn, tenant_id, queue_id)
            batches = None if batches is None else batches - 1
    return turnless.roll_up(runtime, tenant_id, batches=batches)


def rebuild(runtime: Runtime, tenant_id: UUID) -> None:
    """Make the sums of a tenant anew from its ledgers and assignments, from their first ones on."""
    with unit(runtime.engine) as (conn, _):
        # The marks first, as a roll-up locks them: one that is under way ends before its days go.
        conn.execute(sa.delete(fairness_marks).where(fairness_marks.c.tenant_id == tenant_id))
        conn.execute(sa.delete(fairness_days).where(fairness_days.c.tenant_id == tenant_id))
        if runtime.tells(conn):
            turnless.forget(conn, tenant_id)
    roll_up(runtime, tenant_id)


def _roll(conn: sa.Connection, tenant_id: UUID, queue_id: UUID) -> bool:
    """Fold one batch; whether there may be more."""
    m = fairness_marks.c
    first = insert(fairness_marks).values(tenant_id=tenant_id, queue_id=queue_id, seq=0, state={})
    conn.execute(first.on_conflict_do_nothing(index_elements=["tenant_id", "queue_id"]))
    # Protects the sums of this queue: two that fold at once take turns. No other lock is taken while it is held, and
    # no decision ever asks for it.
    mark = conn.execute(
        sa.select(m.seq, m.state)
        .where(m.tenant_id == tenant_id, m.queue_id == queue_id)
        .with_for_update(key_share=True)
    ).one()
    fold = Fold(mark.state or None)
    seq = mark.seq
    entries = _entries(conn, tenant_id, queue_id, seq)
    for row in entries:
        fold.take(Kind(row.kind), row.at, row.data, row.rule, _skips(queue_id, row.paths))
        seq = row.seq
    fold.share_out()
    _keep(conn, tenant_id, queue_id, fold.counts)
    conn.execute(
        sa.update(fairness_marks)
        .where(m.tenant_id == tenant_id, m.queue_id == queue_id)
        .values(seq=seq, state=fold.as_json())
    )
    return len(entries) == BATCH


def _entries(conn: sa.Connection, tenant_id: UUID, queue_id: UUID, after: int) -> list[Any]:
    """The next entries; those about a turn with the rule and the recorded paths of its decision."""
    c, u, d = t.ledger.c, t.turns.c, t.decisions.c
    turn = sa.case((c.kind.in_(("turn", "void")), sa.cast(c.data["turn"].astext, sa.BigInteger)))
    # What nobody looks at is not fetched: parsing it would be half of the work.
    data = c.data.op("-", return_type=JSONB)(sa.cast(_NOT_FOLDED, sa.ARRAY(sa.Text))).label("data")
    paths = sa.case((sa.func.jsonb_array_length(c.data["unavailable"]) > 0, d.record["paths"])).label("paths")
    return list(
        conn.execute(
            sa.select(c.seq, c.kind, c.at, data, d.rule, paths)
            .outerjoin(t.turns, (u.tenant_id == c.tenant_id) & (u.queue_id == c.queue_id) & (u.turn == turn))
            .outerjoin(t.decisions, (d.tenant_id == u.tenant_id) & (d.decision_id == u.decision_id))
            .where(c.tenant_id == tenant_id, c.queue_id == queue_id, c.seq > after)
            .order_by(c.seq)
            .limit(BATCH)
        )
    )


def _skips(queue_id: UUID, paths: Iterable[Mapping[str, Any]] | None) -> dict[str, str]:
    """Why each member of the queue who was unavailable was."""
    own = str(queue_id)
    return {
        out["agent"]: out["skip"]
        for path in paths or ()
        if path.get("queue") == own
        for out in path.get("unavailable", ())
    }


def _keep(conn: sa.Connection, tenant_id: UUID, queue_id: UUID, counts: Mapping[Key, Counts]) -> None:
    if not counts:
        return
    f = fairness_days.c
    days = sorted({day for day, _, _ in counts})
    for row in conn.execute(
        sa.select(f.day, f.rule, f.agent_id, f.counts).where(
            f.tenant_id == tenant_id, f.queue_id == queue_id, f.day == sa.any_(sa.cast(days, sa.ARRAY(sa.Date)))
        )
    ):
        mine = counts.get((row.day, row.rule, str(row.agent_id)))
        if mine is not None:
            mine.add(Counts.from_json(row.counts))
    new = insert(fairness_days)
    conn.execute(
        new.on_conflict_do_update(
            index_elements=["tenant_id", "queue_id", "day", "rule", "agent_id"], set_={"counts": new.excluded.counts}
        ),
        [
            {
                "tenant_id": tenant_id,
                "queue_id": queue_id,
                "day": day,
                "rule": rule,
                "agent_id": UUID(agent),
                "counts": mine.as_json(),
            }
            for (day, rule, agent), mine in counts.items()
        ],
    )


# -- the report -----------------------------------------------------------------------------------------------------


def report(
    runtime: Runtime,
    tenant: Tenant,
    *,
    since: date,
    until: date,
    per: str = "whole",
    queue_id: UUID | None = None,
    rule: str | None = None,
) -> Json:
    """Shares from the day `since` to the day `until`, both included (UTC), per agent and period, JSON-safe.

    Over one queue or all, and over one rule or all. Beside the shares stands how many leads each agent had without a
    turn; with `queue_id` those of its default agent. Folds what is new first. Raises :class:`TurnlockError` while the
    database lacks the tables and :class:`NotFound` for a rule that no lead came from.
    """
    with runtime.engine.connect() as conn:
        if not runtime.tells(conn):
            raise TurnlockError("the database keeps no fairness yet; run `turnlock migrate`")
    roll_up(runtime, tenant.tenant_id)
    with runtime.engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
        now = conn.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
        names = Names.load(conn, tenant.tenant_id)
        rows = _days(conn, tenant.tenant_id, since, until, queue_id, rule)
        without = turnless.counted(conn, tenant.tenant_id, since, until, queue_id, rule)
        if queue_id is None:  # what a team got is told by who of it got it
            rows = [row for row in rows if str(row.agent_id) not in names.queues]
        if rule is not None and not rows and not without:
            raise NotFound(f"no lead of this time came from a rule {rule!r}; `turnlock explain` names a lead's rule")
        waits = {} if rule is not None or until < now.date() else _waits(conn, tenant.tenant_id, queue_id, now)
    found: dict[tuple[date, str], Counts] = {}
    for row in rows:
        key = (_start(row.day, per, since), str(row.agent_id))
        found.setdefault(key, Counts()).add(Counts.from_json(row.counts))
    last = _start(until, per, since)
    for (period, agent), mine in found.items():
        turns, seconds = waits.get(agent, (0, 0)) if period == last else (0, 0)
        mine.add(Counts(longest_turns=turns, longest_seconds=seconds))
    extra: dict[tuple[date, str], Counter[str]] = {}
    for (day, agent, how), leads in without.items():
        key = (_start(day, per, since), agent)
        found.setdefault(key, Counts())
        extra.setdefault(key, Counter())[how] += leads
    starts = sorted({period for period, _ in found})
    return {
        "tenant": tenant.name,
        "queue": names.queue(queue_id),
        "rule": rule,
        "since": since.isoformat(),
        "until": until.isoformat(),
        "as_of": iso(now),
        "periods": [
            _period(
                names,
                start,
                {a: c for (s, a), c in found.items() if s == start},
                {a: c for (s, a), c in extra.items() if s == start},
            )
            for start in starts
        ],
    }


def _days(
    conn: sa.Connection, tenant_id: UUID, since: date, until: date, queue_id: UUID | None, rule: str | None
) -> list[Any]:
    f, q = fairness_days.c, t.queues.c
    # By the key: of each queue the days asked for, whatever else there is.
    queues = [queue_id] if queue_id else list(
        conn.execute(sa.select(q.queue_id).where(q.tenant_id == tenant_id)).scalars()
    )  # fmt: skip
    query = sa.select(f.day, f.agent_id, f.counts).where(
        f.tenant_id == tenant_id,
        f.queue_id == sa.any_(sa.cast(queues, sa.ARRAY(sa.Uuid))),
        f.day.between(since, until),
    )
    return list(conn.execute(query if rule is None else query.where(f.rule == rule)))


def _waits(conn: sa.Connection, tenant_id: UUID, queue_id: UUID | None, now: datetime) -> dict[str, tuple[int, int]]:
    """The waits that are not over, the longest of each agent."""
    m, q = fairness_marks.c, t.queues.c
    query = (
        sa.select(m.state)
        .join(t.queues, (q.tenant_id == m.tenant_id) & (q.queue_id == m.queue_id))
        .where(m.tenant_id == tenant_id, q.active)
    )
    found: dict[str, tuple[int, int]] = {}
    for state in conn.execute(query if queue_id is None else query.where(m.queue_id == queue_id)).scalars():
        for agent, turns, seconds in Fold(state or None).waiting(now):
            most = found.get(agent, (0, 0))
            found[agent] = (max(most[0], turns), max(most[1], seconds))
    return found


def _start(day: date, per: str, since: date) -> date:
    """The first day of the period that `day` lies in."""
    match per:
        case "day":
            return day
        case "week":
            return day - timedelta(days=day.weekday())
        case "month":
            return day.replace(day=1)
    return since


def _turns(share: float) -> float:
    return round(share / TURN, 3)


def _period(names: Names, start: date, found: Mapping[str, Counts], extra: Mapping[str, Counter[str]]) -> Json:
    expected = sum(mine.expected for mine in found.values())
    actual = sum(mine.actual for mine in found.values())
    agents = [
        _agent(names, agent, mine, expected, actual, extra.get(agent, Counter())) for agent, mine in found.items()
    ]
    agents.sort(key=lambda row: (-row["expected"], row["agent"]["name"]))
    return {
        "start": start.isoformat(),
        "turns": sum(c.taken for c in found.values()),
        "kept": actual,
        "without_turn": sum(mine.total() for mine in extra.values()),
        "agents": agents,
    }


def _agent(names: Names, agent: str, mine: Counts, expected: int, actual: int, extra: Counter[str]) -> Json:
    difference = mine.actual * TURN - mine.expected
    return {
        "agent": names.agent(agent),
        "in_line": mine.in_line,
        "expected": _turns(mine.expected),
        "expected_share": round(mine.expected / expected, 5) if expected else None,
        "actual": mine.actual,
        "actual_share": round(mine.actual / actual, 5) if actual else None,
        "difference": _turns(difference),
        "because": {
            "absent": {reason: _turns(-share) for reason, share in sorted(mine.absent.items())},
            "others_absent": _turns(mine.stood_in),
            "owed_turns": mine.owed,
            "given_back": -mine.given_back,
            "debits": -mine.debited,
            "order_of_the_line": _turns(mine.order),
        },
        "with_even_weights": _turns(mine.even),
        "by_weight": _turns(mine.expected - mine.even),
        "given_next": mine.given_next,
        "without_turn": extra.total(),
        "without_turn_by": {how: leads for how, leads in sorted(extra.items()) if leads},
        "longest_wait": {"turns": mine.longest_turns, "seconds": mine.longest_seconds},
    }
