"""What wakes those who wait, in which order they are served, and how little a long wait costs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from uuid import UUID

import pytest
import sqlalchemy as sa

from connector import replay, returns, turns
from connector.returns import ReturnReason
from connector.waiting import PER_AGENT, REFRESH
from tests.rig import ABC, ANA, BEN, CY, DEE, Rig, until

# What ends a wait must not wait for the look every 15 seconds: this is well below it, on a busy machine, too.
AT_ONCE = 6.0
TWO = (
    "queues:\n  Luxury: {members: ['12'], when_nobody: {fallback_queue: Rest}}\n  Rest: {members: ['13', '14']}\n"
    "default_queue: Rest\nrules:\n- {name: luxury, when: {field: price, at_least: 900000}, to: {queue: Luxury}}\n"
)


def held(rig: Rig, *refs: str) -> None:
    """These leads wait, and everybody has looked."""
    until(lambda: all(rig.standing(ref)["state"] == "held" for ref in refs), what="leads that wait")
    rig.settle_owners()
    rig.run_chore("held")
    rig.settle_owners()


def away(rig: Rig, *refs: str) -> None:
    for ref in refs:
        rig.pause(ref)


# -- what wakes the drain ---------------------------------------------------------------------------------------


def test_a_member_who_is_back_or_new_or_whose_hours_open_gets_the_oldest_at_once(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic")
    rig.at("2026-02-09T14:59:58+00:00")  # a Monday, two seconds before nine in Chicago
    hours = f"agents:\n  '{ANA}': {{zone: America/Chicago, hours: {{mon: ['09:00-17:00']}}}}\n"
    rig.configure(ABC.replace("'12', '13', '14'", "'12'") + hours)
    refs = [rig.create() for _ in range(2)]
    held(rig, *refs)
    rig.at("2026-02-09T15:00:00+00:00")
    until(lambda: all(rig.owners(refs)), AT_ONCE, "owners when the hours open")
    away(rig, ANA)
    ref = rig.create()
    held(rig, ref)
    rig.pause(ANA, False)
    until(lambda: rig.owner(ref), AT_ONCE, "an owner when a member is resumed")
    away(rig, ANA)
    ref = rig.create()
    held(rig, ref)
    turns.add(rig.runtime, rig.tenant, "All", rig.agent_id(DEE), actor="mia", why="started today")
    until(lambda: rig.owner(ref) == DEE, AT_ONCE, "an owner when a member is added")
    rig.settle_owners()
    rig.audit()


def test_a_returned_lead_waits_and_holds_nobody_up(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic", config=ABC.replace("'12', '13', '14'", "'12', '13'"))
    away(rig, BEN)
    ref = rig.create()
    assert rig.wait_owner(ref) == ANA
    rig.settle_owners()
    asked = returns.ask(rig.runtime, rig.tenant, rig.lead_id(ref), ReturnReason.BOGUS, actor="ana")
    returns.approve(rig.runtime, rig.tenant, UUID(asked["return_id"]), void=False, actor="mia")
    held(rig, ref)
    # Only Ben may take it, and he is away: whoever comes later goes to Ana straight, without a look at the old one.
    before = sum(fed(rig))
    newer = [rig.assign() for _ in range(3)]
    assert newer == [ANA] * 3
    rig.settle_owners()
    assert [d.reason for d in rig.decided(ref)][-1] == "nobody_available"
    assert sum(fed(rig)) == before
    rig.pause(BEN, False)
    until(lambda: rig.owner(ref) == BEN, AT_ONCE, "its owner, once he is back")
    rig.settle_owners()
    rig.audit()


# -- in order, through several queues ------------------------------------------------------------------------------


def test_whoever_waits_longer_has_the_first_claim_through_a_fallback_too(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic", config=TWO)
    away(rig, ANA, BEN, CY)
    dear = rig.create(price=1_000_000)
    held(rig, dear)
    cheap = rig.create(price=300_000)
    held(rig, cheap)
    # The CRM is slow to answer the drain about the older one; a new lead comes to the queue that is free again.
    hold = rig.sandbox.fault("hold", method="GET", path="/leads", times=1)
    rig.pause(CY, False)
    assert rig.sandbox.wait_held()
    newer = rig.create(price=300_000)
    until(lambda: rig.standing(newer)["state"], what="a decision about the newer lead")
    assert rig.standing(newer)["reason"] == "behind_held"
    assert rig.owners([dear, cheap, newer]) == [None] * 3
    rig.sandbox.clear_faults(hold)
    rig.sandbox.release()
    until(lambda: all(rig.owners([dear, cheap, newer])), what="owners for all")
    rig.settle_owners()
    assert rig.owners([dear, cheap, newer]) == [CY] * 3
    assert served(rig, "Rest") == [dear, cheap, newer]
    rig.audit()


def served(rig: Rig, queue: str) -> list[str]:
    """The CRM's ids of the leads in order of the turns of a queue."""
    query = (
        "SELECT string_agg(r.ref, ',' ORDER BY turns.turn) FROM turns JOIN queues q USING (tenant_id, queue_id) "
        "JOIN decisions d USING (tenant_id, decision_id) "
        "JOIN lead_refs r ON (r.tenant_id, r.lead_id) = (d.tenant_id, d.lead_id) "
        "WHERE turns.tenant_id = :t AND q.name = :q"
    )
    return str(rig.one(query, q=queue)).split(",")


def test_a_lead_that_cannot_be_decided_holds_nobody_up(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic")
    away(rig, ANA, BEN, CY)
    refs = [rig.create() for _ in range(3)]
    held(rig, *refs)
    oldest = min(refs, key=lambda ref: rig.standing(ref)["since"])
    rig.sql(
        "UPDATE events SET state = 'parked', reason = 'fault_keyerror', lead_id = :l WHERE event_id = "
        "(SELECT event_id FROM events WHERE tenant_id = :t AND ref = :r LIMIT 1)",
        l=rig.lead_id(oldest),
        r=oldest,
    )
    rig.pause(ANA, False)
    rest = [ref for ref in refs if ref != oldest]
    until(lambda: all(rig.owners(rest)), what="owners for the others")
    assert rig.assign() == ANA
    assert rig.standing(oldest)["state"] == "held"
    replay.replay_all(rig.runtime, rig.tenant)
    until(lambda: rig.owner(oldest) == ANA, AT_ONCE, "its owner, once a human has it tried again")
    rig.settle_owners()
    rig.audit()


# -- a long wait ---------------------------------------------------------------------------------------------------


def backlog(rig: Rig, count: int) -> None:
    for start in range(0, count, 500):
        rig.sandbox.create_leads(min(500, count - start), price=1)
    waiting = "SELECT count(*) FROM lead_roles WHERE tenant_id = :t AND state = 'held'"
    until(lambda: rig.one(waiting) == count, 300.0, f"{count} leads that wait")
    rig.settle_owners()
    # The configuration is new, so everybody is asked about once, part by part, whether it lets anybody serve them.
    asking = (
        "SELECT count(*) FROM chores, jsonb_each(cursor -> 'asking') AS a(line, after) "
        "WHERE tenant_id = :t AND kind = 'held' AND after <> 'null'"
    )
    rig.run_chore("held")
    while rig.one(asking):
        rig.settle_owners()
        rig.run_chore("held")
    rig.settle_owners()


def fed(rig: Rig) -> Sequence[int]:
    """How many leads each look of the drain has fed."""
    query = (
        "SELECT count(*) AS n FROM deliveries JOIN events USING (tenant_id, delivery_id) "
        "WHERE source = 'held' GROUP BY delivery_id"
    )
    return [row.n for row in rig.rows(sa.text(query))]


def test_a_look_at_those_who_wait_reads_a_bounded_part_and_none_while_nobody_is_there(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(crm="generic")
    away(rig, ANA, BEN, CY)
    backlog(rig, 80)
    rig.sql("DELETE FROM events WHERE tenant_id = :t AND state = 'done'")
    for _ in range(3):
        rig.create(price=1)
        rig.run_chore("held")
    rig.settle_owners()
    assert rig.one("SELECT count(*) FROM lead_roles WHERE tenant_id = :t AND state = 'held'") == 83
    assert sum(fed(rig)) in (0, REFRESH)  # at most one page, to see whether a human took one unseen
    rig.sql("DELETE FROM events WHERE tenant_id = :t AND state = 'done'")
    rig.pause(BEN, False)
    until(lambda: rig.position() == 83, what="turns for all")
    assert max(fed(rig)) <= PER_AGENT
    assert sum(fed(rig)) == 83


@pytest.mark.proof
def test_a_long_wait_is_served_in_order_and_keeps_nobody_else_waiting(make_rig: Callable[..., Rig]) -> None:
    leads = int(os.environ.get("TURNLOCK_HELD_LEADS", "1500"))  # 5000 on demand
    rig = make_rig(crm="generic", config=TWO.replace("when_nobody: {fallback_queue: Rest}", "when_nobody: hold"))
    away(rig, BEN, CY)
    backlog(rig, leads)
    order = str(
        rig.one(
            "SELECT string_agg(ref, ',' ORDER BY since, lead_id) FROM lead_roles "
            "JOIN lead_refs USING (tenant_id, lead_id) WHERE tenant_id = :t AND state = 'held'"
        )
    ).split(",")
    rig.sql("DELETE FROM events WHERE tenant_id = :t AND state = 'done'")
    took = []

    def elsewhere() -> None:
        """A new lead of the other queue: from its creation to its owner."""
        began = time.monotonic()
        rig.wait_owner(rig.create(price=1_000_000))
        took.append(time.monotonic() - began)

    elsewhere()
    alone = took.pop()
    calls, began = len(rig.sandbox.call_log()), time.monotonic()
    rig.pause(BEN, False)
    until(lambda: rig.position("Rest") >= 1, AT_ONCE, "a first turn")
    first = time.monotonic() - began
    while rig.position("Rest") < leads:
        elsewhere()
        assert time.monotonic() - began < 600
    total = time.monotonic() - began
    assert served(rig, "Rest")[:leads] == order
    assert max(fed(rig)) <= PER_AGENT
    assert sum(fed(rig)) <= leads * 1.04  # each is read about once
    took.sort()
    print(
        f"\n{leads:,} wait, one agent is back: first turn {first:.2f} s, all decided {total:.1f} s, "
        f"fed {sum(fed(rig))} in {len(fed(rig))} looks of at most {max(fed(rig))}; a new lead elsewhere {alone:.2f} s "
        f"before, {took[len(took) // 2]:.2f} s (middle) and {took[-1]:.2f} s (worst of {len(took)}) meanwhile"
    )
    assert calls < len(rig.sandbox.call_log())
    rig.audit()
