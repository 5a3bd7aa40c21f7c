"""The first hours of an installation: nobody has counted the rows of its tables, or when they were few; a burst comes.

A plan is kept with its connection: one that was right for empty or small tables must be right for full ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from adapters.base import Event, EventKind
from connector.accept import store_delivery
from connector.database import at_rest, count_rows, make_engine
from connector.decide import Decider
from connector.tables import events
from connector.writeback import Sender
from routing.model import Lead
from routing.tables import lead_roles, ledger, outbox
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


class Burst:
    """Leads that come one by one and are decided together, without a worker: all on one connection."""

    def __init__(self, rig: Rig) -> None:
        rig.sandbox.webhook_faults(drop=1.0)
        self._rig, self._sender = rig, Sender(rig.runtime)
        self._decider = Decider(rig.runtime, lambda *_: None, lambda: 0)

    def decide(self, count: int = PART) -> None:
        """So many come and are decided."""
        rig = self._rig
        for ref in rig.sandbox.create_leads(count):
            lead = Lead(ref=str(ref), emails=(f"lead{ref}@example.com",))
            event = Event(EventKind.LEAD_CREATED, str(ref), ref=str(ref), lead=lead)
            store_delivery(rig.runtime, rig.tenant, [event], hook_id=None, body=b"x", flag_version=0, headers={})
        assert self._decider.run(rig.tenant.tenant_id) == count

    def send(self) -> None:
        """All that is to be written back is."""
        tenant_id = self._rig.tenant.tenant_id
        while self._sender.run(tenant_id, ["owner"]) or self._sender.run(tenant_id, ["note"]):
            pass

    def of_an_earlier_account(self) -> None:
        """An account has had its day, and the tables are counted, when that of the rig comes."""
        for _ in range(3):
            self.decide()
            self.send()
        autovacuum(self._rig)
        self._rig.add_tenant("another")

    def look(self) -> None:
        """The worker's scout does, twice a second."""
        with at_rest(self._rig.runtime.engine) as conn:
            count_rows(conn)


def begun(make_rig: Callable[..., Rig], account: str) -> tuple[Rig, Burst]:
    """A rig whose account is the first of its database, or another than one that had its day."""
    rig = make_rig("generic", worker=False)
    burst = Burst(rig)
    if account == "another":
        burst.of_an_earlier_account()
    return rig, burst


@pytest.mark.parametrize(
    ("account", "counted_after"),
    [("the first", None), ("the first", 0), ("the first", 2), ("the first", 5), ("another", None), ("another", 2)],
)
def test_what_deciding_costs_does_not_grow_with_what_came_before(
    make_rig: Callable[..., Rig], account: str, counted_after: int | None
) -> None:
    """Nor for an account that is new beside one that had its day: PostgreSQL takes it for one without rows."""
    rig, burst = begun(make_rig, account)
    costs = []
    for part in range(20):
        before = rows_read(rig)
        burst.decide()
        costs.append((rows_read(rig) - before) / PART)
        burst.look()
        if part == counted_after:
            autovacuum(rig)
    assert len(rig.turns()) == 20 * PART
    early, late = sum(costs[:3]) / 3, sum(costs[-3:]) / 3
    assert late < 1.5 * early, costs  # where one table is read through for each unit, it doubles; for each lead, x 40


@pytest.mark.parametrize("account", ["the first", "another"])
def test_what_writing_back_costs_does_not_grow_once_the_worker_has_looked(
    make_rig: Callable[..., Rig], account: str
) -> None:
    rig, burst = begun(make_rig, account)
    costs = []
    for _ in range(7):
        burst.decide()
        burst.look()
        before = rows_read(rig)
        burst.send()
        costs.append((rows_read(rig) - before) / PART)
    assert len(rig.turns()) == 7 * PART
    early, late = sum(costs[1:3]) / 2, sum(costs[-2:]) / 2
    assert late < 1.5 * early, costs


def test_the_worker_has_tables_counted_that_nobody_knows_anything_of_and_each_but_once(rig: Rig) -> None:
    counted = (  # by autovacuum, should its minute come just then
        "SELECT count(*) FILTER (WHERE analyze_count + autoanalyze_count > 0) = 8 AND max(analyze_count) = 1 "
        "FROM pg_stat_user_tables WHERE relname IN "
        "('deliveries', 'events', 'leads', 'lead_roles', 'decisions', 'turns', 'ledger', 'outbox')"
    )
    rig.burst(150)
    until(lambda: rig.one(counted), what="every table that grew is counted")
    rig.burst(50)
    with at_rest(rig.runtime.engine) as conn:
        assert count_rows(conn) == 0
    assert rig.one(counted)


def test_a_table_that_somebody_holds_is_counted_later_and_nobody_waits_for_it(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic", worker=False)
    burst = Burst(rig)
    for _ in range(4):
        burst.decide()
    owner = make_engine(rig.runtime.settings.migrate_url or "", pool_size=1)
    with owner.connect() as holding, at_rest(rig.runtime.engine) as conn:
        holding.execute(sa.text("LOCK TABLE leads"))
        began = time.monotonic()
        assert count_rows(conn) == 0
        assert time.monotonic() - began < 1.0  # the session's own patience is twice that
        holding.rollback()
        assert count_rows(conn) > 5
    owner.dispose()


def test_a_plan_once_made_is_kept_whatever_comes(make_rig: Callable[..., Rig]) -> None:
    """A plan for certain values is right for these alone: for an account that has no rows yet, for one lead."""
    rig = make_rig("bottlecrm", worker=False)
    burst = Burst(rig)
    for count in (1, 1, 5, 1):
        burst.decide(count)
        burst.send()
    plans = rig.rows(sa.text("SELECT statement, generic_plans, custom_plans FROM pg_prepared_statements"))
    assert len([row for row in plans if row.generic_plans]) > 30
    assert [row.statement for row in plans if row.custom_plans] == []


@pytest.mark.parametrize(
    ("condition", "index"),
    [
        (outbox.c.state == "open", "outbox_due_ix"),
        (outbox.c.state.in_({"open", "parked"}), "outbox_open_ix"),
        (events.c.state == "parked", "events_parked_ix"),
        (lead_roles.c.state == "held", "lead_roles_held_ix"),
        (ledger.c.kind == "checkpoint", "ledger_checkpoint_ix"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_an_index_of_certain_rows_serves_who_asks_for_them(rig: Rig, condition: Any, index: str) -> None:
    """Though no plan is made for certain values: the word stands in the statement."""
    table = condition.left.table
    query = sa.select(table.c.tenant_id).where(table.c.tenant_id == rig.tenant.tenant_id, condition)
    asked = query.compile(rig.runtime.engine, compile_kwargs={"render_postcompile": True})
    with rig.runtime.engine.begin() as conn:
        conn.execute(sa.text("SET LOCAL enable_sort = off"))
        names = {name: f"${at}" for at, name in enumerate(asked.params, 1)}
        conn.exec_driver_sql(f"PREPARE asked AS {str(asked) % names}".replace("%", "%%"))
        values = ", ".join(f"'{value}'" for value in asked.params.values())
        plan = conn.exec_driver_sql(f"EXPLAIN EXECUTE asked ({values})").scalars().all()
    assert any(index in line for line in plan), plan
