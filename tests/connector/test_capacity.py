"""Caps through the service: never one lead too many, whatever comes at once, and nothing waits longer than it must."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from adapters.base import Capability
from adapters.followupboss import FollowUpBoss
from connector import explain, preview
from connector.decide import Decider
from connector.flags import switch
from routing import store
from routing.model import Agent, Flag, Load
from tests.rig import ANA, BEN, CY, DEE, Rig, until


@pytest.fixture(autouse=True)
def _without_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Notes are a lane of their own with its own pace; here they would only take time.
    monkeypatch.setattr(FollowUpBoss, "capabilities", FollowUpBoss.capabilities - {Capability.NOTES})


def capped(caps: str, members: Collection[str] = (ANA, BEN, CY)) -> str:
    """Two queues that share all their members, each of whom has these caps."""
    who = ", ".join(f"'{ref}'" for ref in members)
    agents = "".join(f"  '{ref}': {{caps: {caps}}}\n" for ref in members)
    return (
        f"default_queue: All\nagents:\n{agents}queues:\n  All: {{members: [{who}]}}\n  Other: {{members: [{who}]}}\n"
        "rules: [{name: zillow, when: {field: source, equals: Zillow}, to: {queue: Other}}]\n"
    )


def holding(rig: Rig) -> Counter[str]:
    """How many leads each agent has, by CRM id."""
    rows = rig.rows(
        sa.text(
            "SELECT r.ref, count(*) FROM assignments JOIN agent_refs r USING (tenant_id, agent_id) "
            "WHERE tenant_id = :t AND state = 'active' GROUP BY r.ref"
        ).bindparams(t=rig.tenant.tenant_id)
    )
    return Counter({row.ref: row.count for row in rows})


def waiting(rig: Rig) -> int:
    return int(rig.one("SELECT count(*) FROM lead_roles WHERE tenant_id = :t AND state = 'held'"))


def skip_of(rig: Rig, ref: str, agent: str) -> dict[str, Any]:
    """What `explain` shows of an agent at the last decision about a lead."""
    told = explain.explain(rig.runtime, rig.tenant, rig.lead_id(ref))
    members = told["decisions"][-1]["paths"][-1]["members"]
    return next(member for member in members if member["agent"]["ref"] == agent)


# -- two queues at the same instant ------------------------------------------------------------------------------


def rush(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten leads for each of two queues, decided at the same time; the first has counted before the second begins."""
    count, counted, go = store.count_loads, [], threading.Event()

    def count_and_wait(
        conn: sa.Connection, tenant_id: UUID, agents: Collection[Agent], now: datetime
    ) -> dict[UUID, Load]:
        loads = count(conn, tenant_id, agents, now)
        counted.append(loads)
        assert go.wait(10)
        return loads

    monkeypatch.setattr(store, "count_loads", count_and_wait)
    locks = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(2) as pool:
        units = []
        for source in ("Website", "Zillow"):
            rig.sandbox.create_leads(10, source=source)
            assert rig.sandbox.wait_idle()
            decider = Decider(rig.runtime, lambda *_: None, lambda: 0)
            units.append(pool.submit(decider.run, rig.tenant.tenant_id))
            until(lambda: len(counted) + rig.one(locks) == len(units), what="every unit at its lock or beyond")
        go.set()
        assert [unit.result(20) for unit in units] == [10, 10]
    monkeypatch.undo()


def test_twenty_leads_at_once_in_two_queues_overrun_no_cap(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(worker=False, config=capped("{day: 4}"))
    rush(rig, monkeypatch)
    assert holding(rig) == {ANA: 4, BEN: 4, CY: 4}
    assert waiting(rig) == 8
    assert rig.most_tries() == 0
    rig.audit()


def test_without_the_lock_of_the_counters_they_do(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(worker=False, config=capped("{day: 4}"))
    monkeypatch.setattr(store, "lock_counters", lambda *_: None)
    rush(rig, monkeypatch)
    assert max(holding(rig).values()) > 4


def test_37_twenty_leads_for_three_agents_who_may_hold_four(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=capped("{open: 4}"), concurrency=16)
    refs = [rig.create(source=("Website", "Zillow")[n % 2]) for n in range(20)]
    until(lambda: waiting(rig) == 8 and sum(holding(rig).values()) == 12, what="twelve owners and eight who wait")
    rig.settle_owners()
    assert holding(rig) == {ANA: 4, BEN: 4, CY: 4}
    assert Counter(rig.owners(refs)) == {ANA: 4, BEN: 4, CY: 4, None: 8}
    # One lead is closed in the CRM: the next one that waits goes to whoever had it.
    rig.first_round()
    closed = next(ref for ref in refs if rig.owner(ref) == BEN)
    rig.sandbox.edit_leads([int(closed)], stage="Closed")
    until(lambda: waiting(rig) == 7, what="the next lead")
    rig.settle_owners()
    assert holding(rig) == {ANA: 4, BEN: 5, CY: 4}
    # One is taken away by a human.
    taken = next(ref for ref in refs if rig.owner(ref) == CY)
    rig.sandbox.set_owner(int(taken), int(DEE))
    until(lambda: waiting(rig) == 6, what="one more")
    rig.settle_owners()
    assert holding(rig) == {ANA: 4, BEN: 5, CY: 4}
    rig.audit()


# -- windows -----------------------------------------------------------------------------------------------------


def test_a_cap_is_told_with_its_end_and_a_new_day_makes_room(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=capped("{day: 1}") + "caps_zone: America/Chicago\n")
    shown = preview.next_up(rig.runtime, rig.tenant, _queue(rig, "All"), 9)
    assert [turn["agent"]["ref"] for turn in shown["next"]] == [ANA, BEN, CY]  # nobody could have a second
    refs = rig.burst(3)
    assert Counter(rig.owners(refs)) == {ANA: 1, BEN: 1, CY: 1}
    late = rig.create()
    until(lambda: rig.standing(late)["state"] == "held")
    assert rig.skips(late) == dict.fromkeys([ANA, BEN, CY], "at_cap")
    ana = skip_of(rig, late, ANA)
    assert ana["detail"].startswith("got 1 leads of 1 today; counts anew from ")
    assert ana["detail"].endswith(" 00:00 America/Chicago")
    assert "raise the cap" in ana["remedy"]
    shown = preview.next_up(rig.runtime, rig.tenant, _queue(rig, "Other"), 9)
    assert (shown["next"], [away["skip"] for away in shown["unavailable"]]) == ([], ["at_cap"] * 3)
    rig.sql("UPDATE assignments SET assigned_at = assigned_at - interval '1 day' WHERE tenant_id = :t")
    rig.want("held")
    assert rig.wait_owner(late) in (ANA, BEN, CY)
    rig.settle_owners()
    rig.audit()


def _queue(rig: Rig, name: str) -> UUID:
    return UUID(str(rig.one("SELECT queue_id FROM queues WHERE tenant_id = :t AND name = :q", q=name)))


def test_what_an_agent_never_had_does_not_count(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=capped("{week: 1}", [ANA]))
    (ref,) = rig.burst(1)
    rig.settle_owners()
    for state in ("void", "refused", "superseded"):
        rig.sql("UPDATE assignments SET state = :s, ended_at = now() WHERE tenant_id = :t", s=state)
        assert [t["agent"]["ref"] for t in preview.next_up(rig.runtime, rig.tenant, _queue(rig, "All"), 2)["next"]] == [
            ANA
        ]
    for state in ("released", "overridden"):
        rig.sql("UPDATE assignments SET state = :s WHERE tenant_id = :t", s=state)
        assert preview.next_up(rig.runtime, rig.tenant, _queue(rig, "All"), 2)["next"] == []
    assert rig.owner(ref) == ANA


# -- what caps do not stop ---------------------------------------------------------------------------------------


def test_leads_by_name_and_of_known_people_count_and_are_not_stopped(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(
        config="default_queue: All\nagents: {'12': {caps: {day: 1}}}\nqueues: {All: {members: ['12', '13']}}\n"
        "rules: [{name: ana, when: {field: source, equals: Ana}, to: {agent: '12'}}]\n"
    )
    assert rig.assign(source="Ana") == ANA
    assert rig.assign(emails=["kim@example.com"]) == BEN  # Ana's turn, but she has had her one
    assert rig.assign(source="Ana", emails=["lee@example.com"]) == ANA
    assert rig.assign(emails=["lee@example.com"]) == ANA  # the same person
    assert rig.assign() == BEN
    rig.settle_owners()
    assert holding(rig) == {ANA: 3, BEN: 2}
    rig.audit()


def test_a_full_queue_falls_back_and_the_default_agent_takes_the_rest(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(
        config="default_queue: First\nagents: {'12': {caps: {day: 1}}, '13': {caps: {day: 2}}}\nqueues:\n"
        "  First: {members: ['12'], when_nobody: {fallback_queue: Second}}\n"
        "  Second: {members: ['12', '13'], when_nobody: {default_agent: '13'}}\n"
    )
    # In the end nobody of the first queue is there, and its own policy names no agent but another queue.
    assert [rig.assign() for _ in range(5)] == [ANA, BEN, BEN, BEN, BEN]
    rig.settle_owners()
    assert (rig.turns("First"), rig.turns("Second")) == ([ANA], [BEN, BEN])
    rig.audit()


def test_off_nobody_is_stopped_and_on_again_what_came_meanwhile_counts(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=capped("{day: 1}", [ANA]))
    switch(rig.runtime, rig.tenant.tenant_id, Flag.CAPACITY, "off", "test")
    assert [rig.assign() for _ in range(2)] == [ANA, ANA]
    switch(rig.runtime, rig.tenant.tenant_id, Flag.CAPACITY, "on", "test", force="as before")
    ref = rig.create()
    until(lambda: rig.standing(ref)["state"] == "held")
    assert rig.skips(ref) == {ANA: "at_cap"}
    switch(rig.runtime, rig.tenant.tenant_id, Flag.CAPACITY, "off", "test")
    assert rig.wait_owner(ref) == ANA
