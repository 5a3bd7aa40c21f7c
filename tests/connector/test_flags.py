"""Each capability off and on again, one command each: nothing is lost, the line goes on, the ledger follows."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
import sqlalchemy as sa

from connector import flags, tenants
from connector.errors import TurnlockError
from connector.work import want
from routing import store
from routing import tables as t
from routing.model import Flag
from tests.rig import ABC, ANA, BEN, CY, Rig, until

RULES = "rules: [{name: web, when: {field: source, equals: Web}, to: {agent: '14'}}]\n"
WEIGHTED = "default_queue: All\nqueues: {All: {members: [{agent: '12', weight: 3}, '13', '14']}}\n"


def switch(rig: Rig, flag: Flag, mode: str) -> None:
    """One command; `on` without waiting for a shadow."""
    force = "nothing to find out" if mode == "on" else None
    assert flags.switch(rig.runtime, rig.tenant.tenant_id, flag, mode, "test", force=force)


def sweep_twice(rig: Rig) -> None:
    """Two sweeps have ended: whatever they were to find is found."""
    for _ in range(2):
        before = rig.one("SELECT last_ok_at FROM chores WHERE tenant_id = :t AND kind = 'sweep'")
        with rig.runtime.engine.begin() as conn:
            want(conn, rig.tenant.tenant_id, "sweep")
        rig.runtime.wake()
        until(lambda b=before: rig.one("SELECT last_ok_at FROM chores WHERE tenant_id = :t AND kind = 'sweep'") != b)


def test_write_back_off_decides_and_tells_nobody_and_on_again_tells_only_of_what_comes(rig: Rig) -> None:
    assert rig.assign() == ANA
    switch(rig, Flag.WRITE_BACK, "off")
    quiet = [rig.create() for _ in range(2)]
    until(lambda: rig.position() == 3)
    assert {rig.standing(ref)["state"] for ref in quiet} == {"assigned"}
    switch(rig, Flag.WRITE_BACK, "on")
    assert rig.assign() == ANA
    for ref in quiet:
        rig.sandbox.edit_leads([int(ref)], stage="Contacted")  # news of them, while the CRM shows nobody
    sweep_twice(rig)
    rig.settle_owners()
    assert [rig.owner(ref) for ref in quiet] == [None, None]
    assert rig.turns() == [ANA, BEN, CY, ANA]
    assert len(rig.owner_writes()) == 2
    rig.audit()


def test_rules_off_sends_every_lead_to_the_default_queue(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=ABC + RULES)
    assert rig.assign(source="Web", emails=["kim@example.com"]) == CY
    for flag in (Flag.SKIPS, Flag.WEIGHTS, Flag.ROTATION, Flag.RULES):
        switch(rig, flag, "off")
    for flag in (Flag.ROTATION, Flag.WEIGHTS, Flag.SKIPS):
        with pytest.raises(TurnlockError, match="cannot be on while"):
            switch(rig, flag, "on")
    assert [rig.assign(source="Web") for _ in range(2)] == [ANA, ANA]
    assert rig.assign(emails=["kim@example.com"]) == ANA  # the default for the same person is a rule, too
    for flag in (Flag.RULES, Flag.ROTATION, Flag.WEIGHTS, Flag.SKIPS):
        switch(rig, flag, "on")
    assert rig.assign(source="Web") == CY
    assert rig.assign() == ANA
    rig.audit()


def test_rules_alone_off_keeps_the_line_turning(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=ABC + RULES)
    assert [rig.assign(source="Web"), rig.assign()] == [CY, ANA]
    switch(rig, Flag.RULES, "off")
    assert [rig.assign(source="Web") for _ in range(3)] == [BEN, CY, ANA]
    switch(rig, Flag.RULES, "on")
    assert [rig.assign(source="Web"), rig.assign()] == [CY, BEN]
    assert rig.turns() == [ANA, BEN, CY, ANA, BEN]
    rig.audit()


def test_rotation_off_takes_the_first_available_and_no_turn_and_on_again_the_line_goes_on(rig: Rig) -> None:
    assert rig.assign() == ANA
    switch(rig, Flag.ROTATION, "off")
    assert [rig.assign() for _ in range(3)] == [ANA, ANA, ANA]
    rig.pause(ANA)
    assert rig.assign() == BEN
    rig.pause(ANA, False)
    assert rig.position() == 1
    switch(rig, Flag.ROTATION, "on")
    assert [rig.assign() for _ in range(3)] == [BEN, CY, ANA]
    rig.settle_owners()
    assert rig.turns() == [ANA, BEN, CY, ANA]
    rig.audit()


def test_members_who_come_and_go_while_the_rotation_is_off_join_and_leave_the_line_when_it_is_on(rig: Rig) -> None:
    rig.wait_chores()  # a reading of the agents would let Cy back at once
    assert [rig.assign(), rig.assign()] == [ANA, BEN]
    # Cy is owed a turn, and leaves before it is served.
    rig.sandbox.fault("lost_owner", method="PUT", times=2)
    rig.assign()
    rig.settle_owners()
    assert rig.one("SELECT count(*) FROM owed_turns WHERE tenant_id = :t") == 1
    switch(rig, Flag.ROTATION, "off")
    rig.configure("default_queue: All\nqueues: {All: {members: ['12', '13', '15']}}\n")
    assert rig.assign() == ANA
    rig.audit()
    switch(rig, Flag.ROTATION, "on")
    rig.audit()
    owners = [rig.assign() for _ in range(6)]
    assert Counter(owners) == {ANA: 2, BEN: 2, "15": 2}
    rig.configure(ABC)
    assert rig.one("SELECT count(*) FROM owed_turns WHERE tenant_id = :t") == 0
    rig.settle_owners()
    rig.audit()


def test_a_turn_given_back_while_the_rotation_is_off_is_owed_when_it_is_on(rig: Rig) -> None:
    tenants.set_sending(rig.runtime, rig.tenant, False)
    ref = rig.create()
    until(lambda: rig.position() == 1)
    switch(rig, Flag.ROTATION, "off")
    rig.sandbox.set_owner(int(ref), int(BEN))  # nothing was sent yet: a human was faster
    tenants.set_sending(rig.runtime, rig.tenant, True)
    until(lambda: rig.standing(ref)["state"] == "owned")
    assert rig.void_turns() == {1: "superseded"}
    rig.audit()
    switch(rig, Flag.ROTATION, "on")
    assert [rig.assign() for _ in range(4)] == [ANA, BEN, CY, ANA]
    rig.settle_owners()
    assert rig.turns() == [ANA, ANA, BEN, CY, ANA]
    rig.audit()


def test_weights_off_is_flat_and_on_again_keeps_what_each_was_behind(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=WEIGHTED)
    assert Counter(rig.assign() for _ in range(5)) == {ANA: 3, BEN: 1, CY: 1}
    switch(rig, Flag.SKIPS, "off")
    switch(rig, Flag.WEIGHTS, "off")
    assert Counter(rig.assign() for _ in range(6)) == {ANA: 2, BEN: 2, CY: 2}
    rig.audit()
    switch(rig, Flag.WEIGHTS, "on")
    switch(rig, Flag.SKIPS, "on")
    assert Counter(rig.assign() for _ in range(10)) == {ANA: 6, BEN: 2, CY: 2}
    rig.settle_owners()
    assert rig.position() == 21
    rig.audit()


def test_weights_flipped_between_any_two_leads_favour_nobody(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    for number in range(12):
        switch(rig, Flag.WEIGHTS, "off" if number % 2 == 0 else "on")
        rig.assign()
    assert rig.turns() == [ANA, BEN, CY] * 4
    rig.audit()


def test_skips_off_passes_over_only_the_deactivated(make_rig: Callable[..., Rig]) -> None:
    never = "agents: {'13': {zone: Europe/Rome, hours: {mon: ['00:00-00:01']}}}\n"
    rig = make_rig(config=ABC + never)
    rig.at("2026-11-24 12:00:00+00:00")  # a Tuesday
    rig.pause(ANA)
    rig.sandbox.pause_agent(int(CY))
    rig.sync()
    waiting = rig.create()
    until(lambda: rig.standing(waiting)["state"] == "held")
    switch(rig, Flag.SKIPS, "off")
    assert rig.wait_owner(waiting) == ANA
    assert [rig.assign(), rig.assign()] == [BEN, CY]
    rig.sandbox.deactivate_agent(int(ANA))
    rig.sync()
    assert [rig.assign(), rig.assign()] == [BEN, CY]
    switch(rig, Flag.SKIPS, "on")
    again = rig.create()
    until(lambda: rig.standing(again)["state"] == "held")
    assert rig.turns() == [ANA, BEN, CY, BEN, CY]
    rig.audit()


def test_a_flag_that_flips_all_the_time_loses_no_lead_and_decides_none_twice(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic", config=WEIGHTED + RULES)
    stop = threading.Event()
    flips = Counter[Flag]()

    def flip() -> None:
        while not stop.wait(0.05):
            flag = (Flag.ROTATION, Flag.WEIGHTS, Flag.RULES)[sum(flips.values()) // 2 % 3]
            for mode in ("off", "on"):
                with suppress(sa.exc.OperationalError):  # the queue was busy: an admin is told so, and repeats it
                    flips[flag] += flags.switch(rig.runtime, rig.tenant.tenant_id, flag, mode, "test", force="x")
                stop.wait(0.05)

    flipping = threading.Thread(target=flip)
    flipping.start()
    refs = [rig.create(source="Web" if number % 5 == 0 else "Zillow") for number in range(200)]
    for ref in refs:
        rig.wait_owner(ref, 60)
    stop.set()
    flipping.join()
    rig.settle_owners()
    assert sum(flips.values()) > 10
    assert rig.one("SELECT count(*) FROM decisions WHERE tenant_id = :t AND role = 'owner'") == 200
    assert rig.one("SELECT count(*) FROM assignments WHERE tenant_id = :t AND role = 'owner'") == 200
    assert Counter(write["lead"] for write in rig.owner_writes()) == Counter(map(int, refs))
    for ref in refs:
        assert rig.standing(ref)["confirmed_version"] is not None
    for flag in flags.NEEDS:  # a flip that was refused may have left one off
        flags.switch(rig.runtime, rig.tenant.tenant_id, flag, "on", "test", force="a flip was refused")
    rig.turns()
    rig.audit()


def test_who_waited_for_a_switch_sees_the_flags_of_after_it(rig: Rig) -> None:
    tenant_id, engine = rig.tenant.tenant_id, rig.runtime.engine
    rig.stop_worker()
    found = []

    def read() -> None:
        with engine.begin() as conn:
            found.append(store.tenant_row(conn, tenant_id, share=True))

    reading = threading.Thread(target=read)
    with engine.begin() as conn:
        conn.execute(sa.update(t.tenants).where(t.tenants.c.tenant_id == tenant_id).values(flag_version=99))
        conn.execute(sa.update(t.flags).where(t.flags.c.flag == "skips").values(mode="off"))
        reading.start()
        until(lambda: rig.one("SELECT count(*) FROM pg_locks WHERE NOT granted"), what="a reader that waits")
    reading.join()
    assert found[0].flag_version == 99
    assert found[0].flags == frozenset(Flag) - {Flag.SKIPS}


def test_switching_to_where_it_stands_changes_nothing(rig: Rig) -> None:
    before = rig.one("SELECT flag_version FROM tenants WHERE tenant_id = :t")
    for flag in Flag:
        assert not flags.switch(rig.runtime, rig.tenant.tenant_id, flag, "on", "test")
    assert rig.one("SELECT flag_version FROM tenants WHERE tenant_id = :t") == before
