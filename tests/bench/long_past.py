"""A long past, and what it costs: deciding, explaining, previewing and a fairness report after very many decisions.

The past is written straight into the tables, as a queue whose members take turns would have left it; every tenth lead
goes to the person's existing agent without a turn. Part of the stopwatch (``past``). A million decisions by default;
``BENCH_PAST=10000000 make bench ARGS="past --home FOLDER"`` takes about an hour and 20 GB, which stay in the folder to
be measured again.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import sqlalchemy as sa

from connector import fairness, preview
from connector.decide import Decider
from connector.errors import UnknownTenant
from connector.explain import explain
from connector.runtime import Runtime
from connector.sandbox import Sandbox
from routing import store
from routing.ledger import checkpoint
from routing.saving import CHECKPOINT_EVERY
from tests.bench import cpu
from tests.rig import Rig

DAYS = 100
FLAT_BOUND = 2.0  # times the cost at the beginning
SHOW_BOUND = 50.0  # milliseconds of CPU for `explain` and for `queue next`
REPORT_BOUND = 1.0  # seconds for a fairness report of 30 days
_PORTION = 100_000

# UUIDv7 as they would have been made then, so that indexes are as they would be.
_ID = (
    "CAST(lpad(to_hex(CAST(extract(epoch FROM at) * 1000 AS bigint)), 12, '0') || '7' || lpad(to_hex(n % 4096), 3, '0')"
    " || '8{kind}' || lpad(to_hex(n), 14, '0') AS uuid)"
)
_MADE = f"""
CREATE TEMPORARY TABLE made ON COMMIT DROP AS
SELECT n, at, {_ID.format(kind="1")} AS lead, {_ID.format(kind="2")} AS decision, {_ID.format(kind="3")} AS assignment,
       {_ID.format(kind="4")} AS outbox, agents[1 + turn % cardinality(agents)] AS agent,
       CASE WHEN n % 10 > 0 THEN turn END AS turn
FROM (SELECT n, CAST(:began AS timestamptz) + n * CAST(:step AS interval) AS at, CAST(:agents AS uuid[]) AS agents,
             CAST(:position AS bigint) + n - n / 10 AS turn
      FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS n) AS numbers
"""
# The entry of the k-th turn, with a checkpoint before every thousandth.
_NUMBERED = "(SELECT *, turn - CAST(:position AS bigint) AS k FROM made WHERE turn > 0) AS numbered"
_WRITTEN = (
    "INSERT INTO leads (tenant_id, lead_id, version, created_at) SELECT :t, lead, 2, at FROM made",
    """INSERT INTO lead_roles (tenant_id, lead_id, role, state, agent_id, queue_id, seq, epoch, confirmed_version,
                               since)
       SELECT :t, lead, 'owner', 'assigned', agent, CASE WHEN turn > 0 THEN CAST(:q AS uuid) END, 1, 1, 2, at
       FROM made""",
    """INSERT INTO decisions (tenant_id, decision_id, lead_id, role, seq, decided_at, received_at, cause, outcome,
                              queue_id, agent_id, turn, config_version, record)
       SELECT :t, decision, lead, 'owner', 1, at, at, 'new', 'assigned', CASE WHEN turn > 0 THEN CAST(:q AS uuid) END,
              agent, turn, 1, CASE WHEN turn > 0 THEN jsonb_build_object('how', 'line', 'paths', jsonb_build_array(
                  jsonb_build_object('queue', CAST(:q AS uuid), 'unavailable', '[]'::jsonb, 'passed_over',
                                     '[]'::jsonb, 'position', jsonb_build_array(turn - 1, turn))))
              ELSE '{"how": "existing_owner"}' END
       FROM made""",
    """INSERT INTO assignments (tenant_id, assignment_id, decision_id, lead_id, role, agent_id, queue_id, turn, epoch,
                                assigned_at, confirmed_at)
       SELECT :t, assignment, decision, lead, 'owner', agent, CASE WHEN turn > 0 THEN CAST(:q AS uuid) END, turn, 1,
              at, at
       FROM made""",
    """INSERT INTO outbox (tenant_id, outbox_id, lead_id, role, epoch, kind, decision_id, agent_id, state, created_at,
                           closed_at)
       SELECT :t, outbox, lead, 'owner', 1, 'owner', decision, agent, 'confirmed', at, at FROM made""",
    """INSERT INTO turns (tenant_id, queue_id, turn, decision_id, agent_id, taken_at)
       SELECT :t, :q, turn, decision, agent, at FROM made WHERE turn > 0""",
    f"""INSERT INTO ledger (tenant_id, queue_id, seq, kind, at, actor, data)
       SELECT :t, :q, CAST(:seq AS bigint) + k + k / CAST(:every AS bigint), 'turn', at, 'turnlock',
              jsonb_build_object('turn', turn, 'agent', agent, 'how', 'line', 'owed', NULL, 'lost', '[]'::jsonb,
                  'unavailable', '[]'::jsonb, 'lose_turn', '[]'::jsonb, 'passed_over', '[]'::jsonb, 'tag', '0',
                  'floor', '0', 'decision', decision)
       FROM {_NUMBERED}""",
    f"""INSERT INTO ledger (tenant_id, queue_id, seq, kind, at, actor, data)
       SELECT :t, :q, CAST(:seq AS bigint) + k + k / CAST(:every AS bigint) - 1, 'checkpoint', at, 'turnlock',
              jsonb_set(CAST(:line AS jsonb), '{{position}}', to_jsonb(turn - 1))
       FROM {_NUMBERED} WHERE k % CAST(:every AS bigint) = 0""",
)


def write(owner_url: str, rig: Rig, count: int, *, began: datetime | None = None) -> None:
    """Give the one queue of `rig` a past of `count` leads over :data:`DAYS` days from `began` on (default: until now).

    Nine of ten took a turn; nobody was ever away. Its checkpoints hold the line as it stands now.
    """
    with rig.runtime.engine.connect() as conn:
        tenant = store.tenant_row(conn, rig.tenant.tenant_id)
        queue_id, seq = conn.execute(
            sa.text("SELECT queue_id, seq FROM queues WHERE tenant_id = :t"), {"t": tenant.tenant_id}
        ).one()
        (queue,) = store.load_queues(conn, tenant.tenant_id, tenant.flags, [queue_id]).values()
    given = {
        "t": tenant.tenant_id,
        "q": queue_id,
        "seq": seq,
        "position": queue.line.position,
        "agents": [place.agent_id for place in queue.line.places],
        "began": began or datetime.now(UTC) - timedelta(days=DAYS),
        "step": timedelta(days=DAYS) / count,
        "every": CHECKPOINT_EVERY,
        "line": json.dumps(checkpoint(queue.line)),
    }
    engine = sa.create_engine(owner_url, poolclass=sa.NullPool)
    with _unchecked(engine):
        for first in range(1, count + 1, _PORTION):
            with engine.begin() as conn:
                conn.execute(sa.text("SET LOCAL synchronous_commit = off"))
                for statement in (_MADE, *_WRITTEN):
                    conn.execute(sa.text(statement), given | {"first": first, "last": min(first + _PORTION - 1, count)})
    turns = count - count // 10
    line = replace(queue.line, position=queue.line.position + turns)
    end = {
        "t": tenant.tenant_id,
        "q": queue_id,
        "position": line.position,
        "seq": seq + turns + turns // CHECKPOINT_EVERY + 1,
        "line": json.dumps(checkpoint(line)),
    }
    with engine.begin() as conn:
        conn.execute(
            sa.text("UPDATE queues SET position = :position, seq = :seq WHERE tenant_id = :t AND queue_id = :q"), end
        )
        conn.execute(
            sa.text(
                "INSERT INTO ledger (tenant_id, queue_id, seq, kind, at, actor, data) "
                "VALUES (:t, :q, :seq, 'checkpoint', now(), 'turnlock', CAST(:line AS jsonb))"
            ),
            end,
        )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(sa.text("VACUUM (ANALYZE)"))  # as it would have happened by itself over the days


@contextmanager
def _unchecked(engine: sa.Engine) -> Iterator[None]:
    """Foreign keys look up every row that refers to another, which is half of the work; these rows are as they should
    be. Afterwards the keys hold for new rows again."""
    keys = (
        "SELECT conname, conrelid::regclass AS owner, pg_get_constraintdef(oid) AS said FROM pg_constraint "
        "WHERE contype = 'f' AND conrelid = ANY(CAST(:tables AS regclass[]))"
    )
    tables = ["lead_roles", "decisions", "assignments", "outbox", "turns", "ledger"]
    with engine.begin() as conn:
        found = conn.execute(sa.text(keys), {"tables": tables}).all()
        for key in found:
            conn.execute(sa.text(f"ALTER TABLE {key.owner} DROP CONSTRAINT {key.conname}"))
    try:
        yield
    finally:
        with engine.begin() as conn:
            for key in found:
                conn.execute(sa.text(f"ALTER TABLE {key.owner} ADD CONSTRAINT {key.conname} {key.said} NOT VALID"))


# -- what it costs ----------------------------------------------------------------------------------------------------


def run(
    runtime: Runtime, sandbox: Sandbox, owner_url: str, count: int, say: Callable[[str], None], bound: cpu.Bound
) -> None:
    """Measure on two tenants, each with a queue of 200 members with hours and 1,000 rules of which none matches.

    One has the past, the other none; their units are measured in turns. A past that is in the database already, from
    an earlier run that was told to keep it, is measured as it is.
    """
    long, new = past(runtime, sandbox, owner_url, count, say), tenant(runtime, sandbox, f"new-{time.monotonic_ns()}")
    before, after = _decide([new, long], 10)
    worse = max(many / few for few, many in zip(before, after, strict=True))
    word = bound(f"flat after {count:,}", worse <= FLAT_BOUND)
    say(f"- deciding at the beginning: {_told(before)}")
    say(f"- after {count:,} decisions: {_told(after)}; {worse:.2f} x at most (bound {FLAT_BOUND:.0f}: {word})")
    _report(long, count, say, bound)
    _show(long, count, say, bound)


def tenant(runtime: Runtime, sandbox: Sandbox, name: str) -> Rig:
    """A tenant with the 200 members and the rules."""
    known = [agent["id"] for agent in sandbox.agents() if agent["name"].startswith("Member ")]
    agents = known or [sandbox.add_agent(f"Member {n}", zone="America/Chicago") for n in range(200)]
    rig = Rig(runtime, sandbox, "generic")
    rig.add_tenant(name, config=None)
    rig.sync()
    rig.configure(cpu.queue(agents) + cpu.rules(1000, "by price"))
    return rig


def past(runtime: Runtime, sandbox: Sandbox, owner_url: str, count: int, say: Callable[[str], None]) -> Rig:
    """The tenant whose past has so many decisions, written now unless it is there."""
    name = f"past-{count}"
    with runtime.engine.connect() as conn:
        try:
            rig = Rig(runtime, sandbox, "generic")
            rig.tenant = runtime.tenant_named(conn, name)
            return rig
        except UnknownTenant:
            pass
    rig = tenant(runtime, sandbox, name)
    began = time.monotonic()
    write(owner_url, rig, count)
    say(f"- writing {count:,} past decisions took {time.monotonic() - began:.0f} s")
    return rig


def _decide(rigs: Sequence[Rig], rounds: int) -> list[tuple[float, float]]:
    """Milliseconds for a unit of 50 leads: CPU of this process, and by the clock. The lower quartile of each."""
    used: list[list[float]] = [[] for _ in rigs]
    took: list[list[float]] = [[] for _ in rigs]
    for at in range(rounds + 2):
        for number, rig in enumerate(rigs):
            cpu.feed(rig, 50)
            decider = Decider(rig.runtime, lambda *_: None, lambda: 0)
            cpu_began, began = time.process_time(), time.perf_counter()
            done = 0
            while done < 50:
                done += decider.run(rig.tenant.tenant_id)
            if at > 1:  # the first compile the rules and fill what is kept in memory
                used[number].append((time.process_time() - cpu_began) * 1000)
                took[number].append((time.perf_counter() - began) * 1000)
    return [(statistics.quantiles(u, n=4)[0], statistics.quantiles(w, n=4)[0]) for u, w in zip(used, took, strict=True)]


def _told(cost: tuple[float, float]) -> str:
    return f"a unit of 50 leads {cost[1]:.0f} ms, of which {cost[0]:.0f} ms CPU here"


def _report(rig: Rig, count: int, say: Callable[[str], None], bound: cpu.Bound) -> None:
    """Fairness: what is rolled up once, and what a report then reads."""
    behind = (
        "SELECT q.seq - coalesce(m.seq, 0) FROM queues q LEFT JOIN fairness_marks m USING (tenant_id, queue_id) "
        "WHERE q.tenant_id = :t"
    )
    with rig.runtime.engine.connect() as conn:
        entries = conn.execute(sa.text(behind), {"t": rig.tenant.tenant_id}).scalar_one()
    began = time.monotonic()
    while not fairness.roll_up(rig.runtime, rig.tenant.tenant_id, batches=50):
        pass
    if entries > 100_000:
        took_once = time.monotonic() - began
        say(f"- rolling up {entries:,} ledger entries, and all assignments, once: {took_once:.0f} s")
    heard: list[str] = []

    def hear(_: object, __: object, statement: str, *___: object) -> None:
        heard.append(statement)

    today = datetime.now(UTC).date()
    sa.event.listen(rig.runtime.engine, "before_cursor_execute", hear)
    took = []
    for _ in range(5):
        began = time.monotonic()
        told = fairness.report(rig.runtime, rig.tenant, since=today - timedelta(days=29), until=today)
        took.append(time.monotonic() - began)
    sa.event.remove(rig.runtime.engine, "before_cursor_execute", hear)
    with rig.runtime.engine.connect() as conn:
        days = conn.execute(
            sa.text("SELECT count(*) FROM fairness_days WHERE tenant_id = :t AND day > current_date - 30"),
            {"t": rig.tenant.tenant_id},
        ).scalar_one()
    (period,) = told["periods"]
    word = bound(f"fairness after {count:,}", min(took) <= REPORT_BOUND)
    say(
        f"- a fairness report of 30 days: {min(took) * 1000:.0f} ms (bound {REPORT_BOUND * 1000:.0f}: {word}); "
        f"{period['turns']:,} turns and {period['without_turn']:,} leads without one, told from {days:,} rows of sums"
    )


def _show(rig: Rig, count: int, say: Callable[[str], None], bound: cpu.Bound) -> None:
    """`explain` and `queue next`, each for many leads and looks."""
    with rig.runtime.engine.connect() as conn:
        queue_id = conn.execute(
            sa.text("SELECT queue_id FROM queues WHERE tenant_id = :t"), {"t": rig.tenant.tenant_id}
        ).scalar_one()
        query = "SELECT lead_id FROM decisions WHERE tenant_id = :t ORDER BY decision_id {} LIMIT 20"
        leads = [
            lead
            for order in ("", "DESC")
            for lead in conn.execute(sa.text(query.format(order)), {"t": rig.tenant.tenant_id}).scalars()
        ]
    told = {
        "explain": [_timed(partial(explain, rig.runtime, rig.tenant, lead)) for lead in leads],
        "queue next": [_timed(partial(preview.next_up, rig.runtime, rig.tenant, queue_id, 5)) for _ in leads],
    }
    for name, times in told.items():
        used, took = (statistics.median(column) for column in zip(*times, strict=True))
        word = bound(f"{name} after {count:,}", used <= SHOW_BOUND)
        say(
            f"- `{name}`, 1,000 rules, 200 members: {used:.0f} ms of CPU (bound {SHOW_BOUND:.0f}: {word}); "
            f"{took:.0f} ms by the clock of a machine that others use too"
        )


def _timed(what: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds: CPU of this process, and by the clock."""
    cpu_began, began = time.process_time(), time.perf_counter()
    what()
    return (time.process_time() - cpu_began) * 1000, (time.perf_counter() - began) * 1000
