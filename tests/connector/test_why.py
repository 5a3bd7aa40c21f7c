"""Why, and who is next: an explanation shows the whole line, cheaply, and the preview is what happens."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from connector.database import new_id, unit
from connector.explain import explain
from connector.preview import next_up
from connector.runtime import Runtime
from routing import saving, store
from routing import tables as t
from routing.ledger import Kind
from tests.rig import ANA, BEN, CY, DEE, ELI, Rig

FALLBACK = """\
default_queue: All
queues:
  All:
    members: [{agent: '12', weight: 2}, '13', '14']
    when_nobody: {fallback_queue: Rest}
  Rest:
    members: ['15', {agent: '16', weight: 3}]
"""


def queue_id(rig: Rig, name: str) -> Any:
    with rig.runtime.engine.connect() as conn:
        return conn.execute(sa.select(t.queues.c.queue_id).where(t.queues.c.name == name)).scalar_one()


def move(rig: Rig, queue: str, kind: Kind, **given: Any) -> None:
    """An admin's move on a line."""
    tenant_id, one = rig.tenant.tenant_id, queue_id(rig, queue)
    with unit(rig.runtime.engine) as (conn, now):
        store.lock_queues(conn, tenant_id, [one])
        before = store.load_queues(conn, tenant_id, store.tenant_row(conn, tenant_id).flags, [one])
        moves = saving.Moves(before[one].line, before[one].next_rank, "test")
        moves.do(kind, **given)
        saving.save_lines(conn, tenant_id, before, {one: moves.line}, {one: moves.drafts}, now)


def preview(rig: Rig, count: int) -> list[tuple[str, str]]:
    """Agent and queue of the next leads."""
    shown = next_up(rig.runtime, rig.tenant, queue_id(rig, "All"), count)
    return [(row["agent"]["ref"], row["queue"]) for row in shown["next"]]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_preview_is_what_happens(make_rig: Callable[..., Rig], seed: int) -> None:
    rig = make_rig(config=FALLBACK)
    chance = random.Random(seed)
    everyone = (ANA, BEN, CY, DEE, ELI)
    away: set[str] = set()
    through: set[str] = set()
    for number in range(4):
        for ref in everyone:
            # Once the whole first queue is away, and never everyone.
            gone = ref in (ANA, BEN, CY) if number == 2 else ref != ELI and chance.random() < 0.4
            if gone is not (ref in away):
                rig.pause(ref, gone)
                (away.add if gone else away.discard)(ref)
        owed = chance.choice((ANA, BEN, CY))
        kind = chance.choice((Kind.OWE, Kind.GIVE_NEXT))
        move(rig, "All", kind, agent=str(rig.agent_id(owed)), owed=str(new_id()))
        told = preview(rig, 5)
        assert len(told) == 5
        refs = rig.burst(5)
        got = [(row.agent, row.queue) for row in map(rig.decision, refs)]
        assert got == told, (number, away, owed)
        through |= {queue for _, queue in got}
    assert through == {"All", "Rest"}
    rig.settle_owners()
    rig.audit()


def test_a_preview_ends_where_leads_would_be_held(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    for ref in (ANA, BEN, CY):
        rig.pause(ref)
    shown = next_up(rig.runtime, rig.tenant, queue_id(rig, "All"), 5)
    assert (shown["next"], shown["then"]) == ([], {"outcome": "held", "reason": "nobody_available"})


@contextmanager
def counted(runtime: Runtime) -> Iterator[list[str]]:
    """The statements that are sent meanwhile."""
    said: list[str] = []
    me = threading.current_thread()

    def hear(_: Any, __: Any, statement: str, *___: Any) -> None:
        if threading.current_thread() is me and statement != "BEGIN":  # not what the worker says
            said.append(statement)

    sa.event.listen(runtime.engine, "before_cursor_execute", hear)
    yield said
    sa.event.remove(runtime.engine, "before_cursor_execute", hear)


def test_an_explanation_shows_the_whole_line_in_a_bounded_number_of_statements(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=FALLBACK)
    rig.burst(20)
    rig.pause(BEN)
    told = preview(rig, 1)
    ref = rig.create()
    owner = rig.wait_owner(ref)
    rig.settle_owners()
    assert told == [(owner, "All")]
    lead_id = rig.lead_id(ref)
    with counted(rig.runtime) as said:
        found = explain(rig.runtime, rig.tenant, lead_id)
    # 14 for whatever is told, 2 for each queue that was turned: all that costs time, however long the ledger is.
    assert len(said) <= 16
    (decision,) = found["decisions"]
    (path,) = decision["paths"]
    members = path["members"]
    assert [m["place_before"] for m in members] == [1, 2, 3]
    taken = next(m for m in members if m["state"] == "taken")
    assert taken["agent"]["ref"] == owner
    assert taken["place_after"] == 3
    for member in members:
        if member["agent"]["ref"] == BEN:
            assert (member["skip"], member["passed_over"]) == ("paused", member["place_before"] < taken["place_before"])
            assert "turnlock resume" in member["remedy"]
        elif member is not taken:
            assert member["detail"].startswith(f"stood behind: place {member['place_before']} in line")
    assert 0 <= decision["seconds_to_decide"] <= decision["seconds_to_owner"]
    owner_write = decision["writes"][0]
    assert (owner_write["sent"], owner_write["state"]) == (True, "confirmed")

    all_of_them = queue_id(rig, "All")
    with counted(rig.runtime) as said:
        next_up(rig.runtime, rig.tenant, all_of_them, 20)
    assert len(said) <= 12
