"""The first hours of an installation: nobody has counted the rows of its tables, or when they were few; a burst comes.

A plan is kept with its connection: one that was right for empty or small tables must be right for full ones.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from adapters.base import Event, EventKind
from connector.accept import store_delivery
from connector.database import at_rest, count_rows, make_engine
from connector.decide import Decider
from connector.writeback import Sender
from routing.model import Lead
from tests.rig import Rig, until

_READ = sa.text(
    "SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables) + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes)"
)
PART = 40


def rows_read(rig: Rig) -> int:
    """How many rows the connection of this test has had PostgreSQL look at up to now."""
    with at_rest(rig.runtime.engine) as conn:
        for _ in range(2):  # the second one ends with what the first one asked for
            conn.execute(sa.text("SELECT pg_stat_force_next_flush()"))
        return int(conn.execute(_READ).scalar_one())


def autovacuum(rig: Rig) -> None:
    """What it does within a minute of the fiftieth row."""
    engine = make_engine(rig.runtime.settings.migrate_url or "", pool_size=1)
    with at_rest(engine) as conn:
        conn.execute(sa.text("ANALYZE"))
    engine.dispose()


def came(rig: Rig, count: int = PART) -> None:
    """A part of the burst is stored, each lead by a delivery of its own."""
    for ref in rig.sandbox.create_leads(count):
        lead = Lead(ref=str(ref), emails=(f"lead{ref}@example.com",))
        event = Event(EventKind.LEAD_CREATED, str(ref), ref=str(ref), lead=lead)
        store_delivery(rig.runtime, rig.tenant, [event], hook_id=None, body=b"x", flag_version=0, headers={})


@pytest.mark.parametrize("counted_after", [None, 0, 2, 5], ids=lambda part: f"counted-{part}")
def test_what_deciding_costs_does_not_grow_with_what_came_before(
    make_rig: Callable[..., Rig], counted_after: int | None
) -> None:
    rig = make_rig("generic", worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    decider = Decider(rig.runtime, lambda *_: None, lambda: 0)
    costs = []
    for part in range(25):
        before = rows_read(rig)
        came(rig)
        assert decider.run(rig.tenant.tenant_id) == PART
        costs.append((rows_read(rig) - before) / PART)
        if part == counted_after:
            autovacuum(rig)
    assert len(rig.turns()) == 1000
    early, late = sum(costs[:3]) / 3, sum(costs[-3:]) / 3
    assert late < 1.5 * early, costs  # where one table is read through for each unit, it doubles; for each lead, x 40


def test_what_writing_back_costs_does_not_grow_once_the_worker_has_looked(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic", worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    decider, sender = Decider(rig.runtime, lambda *_: None, lambda: 0), Sender(rig.runtime)
    costs = []
    for _ in range(15):
        came(rig)
        assert decider.run(rig.tenant.tenant_id) == PART
        with at_rest(rig.runtime.engine) as conn:
            count_rows(conn)
        before = rows_read(rig)
        while sender.run(rig.tenant.tenant_id, ["owner"]) or sender.run(rig.tenant.tenant_id, ["note"]):
            pass
        costs.append((rows_read(rig) - before) / PART)
    assert len(rig.sandbox.owners()) == 15 * PART
    early, late = sum(costs[2:5]) / 3, sum(costs[-3:]) / 3
    assert late < 1.5 * early, costs


def test_the_worker_has_tables_counted_that_nobody_knows_anything_of_and_each_but_once(rig: Rig) -> None:
    counted = (
        "SELECT count(*) FILTER (WHERE analyze_count > 0), max(analyze_count) FROM pg_stat_user_tables "
        "WHERE relname IN ('deliveries', 'events', 'leads', 'lead_roles', 'decisions', 'turns', 'ledger', 'outbox')"
    )
    rig.burst(150)
    until(lambda: tuple(rig.rows(sa.text(counted))[0]) == (8, 1), what="every table that grew is counted")
    rig.burst(50)
    with at_rest(rig.runtime.engine) as conn:
        assert count_rows(conn) == 0
    assert tuple(rig.rows(sa.text(counted))[0]) == (8, 1)


@pytest.mark.parametrize("counted", [False, True], ids=["uncounted", "counted"])
@pytest.mark.parametrize("size", [1, 5])
def test_a_plan_once_made_is_kept_whatever_comes(make_rig: Callable[..., Rig], size: int, counted: bool) -> None:
    """Planning takes longer than carrying out; what is asked for one lead would be planned anew for each."""
    planned = "SELECT statement, custom_plans FROM pg_prepared_statements"
    rig = make_rig("bottlecrm", worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    decider, sender = Decider(rig.runtime, lambda *_: None, lambda: 0), Sender(rig.runtime)

    def go(times: int, leads: int) -> dict[str, int]:
        for _ in range(times):
            came(rig, leads)
            assert decider.run(rig.tenant.tenant_id) == leads
            while sender.run(rig.tenant.tenant_id, ["owner"]) or sender.run(rig.tenant.tenant_id, ["note"]):
                pass
        return {row.statement: row.custom_plans for row in rig.rows(sa.text(planned))}

    go(30, 1)
    if counted:
        autovacuum(rig)
    before = go(50, size)  # until plans that were made for once when the tables were small weigh nothing any more
    after = go(10, size)
    assert len(after) > 30
    assert {text: count - before[text] for text, count in after.items() if count > before.get(text, 5)} == {}
