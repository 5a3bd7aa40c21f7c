"""The first hours of an installation: nobody has counted the rows of its tables yet, and a burst comes all the same."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from adapters.base import Event, EventKind
from connector.accept import store_delivery
from connector.database import at_rest
from connector.decide import Decider
from routing.model import Lead
from tests.rig import Rig

_READ = sa.text(
    "SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables) + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes)"
)


def rows_read(rig: Rig) -> int:
    """How many rows the connection of this test has had PostgreSQL look at up to now."""
    with at_rest(rig.runtime.engine) as conn:
        for _ in range(2):  # the second one ends with what the first one asked for
            conn.execute(sa.text("SELECT pg_stat_force_next_flush()"))
        return int(conn.execute(_READ).scalar_one())


def test_what_a_lead_costs_does_not_grow_with_tables_that_nobody_has_counted(make_rig: Callable[..., Rig]) -> None:
    """A plan is kept with its connection: one that was right for empty tables must be right for full ones."""
    rig = make_rig("generic", worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    decider = Decider(rig.runtime, lambda *_: None, lambda: 0)
    costs = []
    for part in range(25):
        before = rows_read(rig)
        for number in range(40):
            ref = f"{part}-{number}"
            lead = Lead(ref=ref, emails=(f"lead{ref}@example.com",))
            event = Event(EventKind.LEAD_CREATED, ref, ref=ref, lead=lead)
            store_delivery(rig.runtime, rig.tenant, [event], hook_id=None, body=b"x", flag_version=0, headers={})
        assert decider.run(rig.tenant.tenant_id) == 40
        costs.append((rows_read(rig) - before) / 40)
    assert len(rig.turns()) == 1000
    early, late = sum(costs[2:5]) / 3, sum(costs[-3:]) / 3
    assert late < 2.5 * early, costs  # where it grows with the tables, it grows sevenfold here
