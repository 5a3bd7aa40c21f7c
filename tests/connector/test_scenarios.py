"""What went wrong in other systems that do this job, each as a lead's way through the service: webhook in, owner out.

The numbers are those of the list that these scenarios were collected in. Queue "All" is Ana, Ben, Cy in that order,
equal weights, unless a test says otherwise. The second half of 1 stands in ``test_concurrency.py`` and 37 in
``test_capacity.py``, under the same kind of name.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from connector import byhand, decide, flags, inbox, preview, replay
from connector.database import unit
from connector.decide import Decider
from connector.runtime import Runtime
from routing import store
from routing.model import Flag
from tests.rig import ABC, ANA, BEN, CY, DEE, ELI, Rig, until

AB = "default_queue: All\nqueues:\n  All:\n    members: ['12', '13']\n"
ABD = "default_queue: All\nqueues:\n  All:\n    members: ['12', '13', '15']\n"
NOBODY = "default_queue: All\nqueues:\n  All:\n    members: []\n"
OFFICE_HOURS = "{mon: ['09:00-17:00'], tue: ['09:00-17:00'], wed: ['09:00-17:00'], thu: ['09:00-17:00']}"


def in_step(rig: Rig, refs: list[str] | None = None, queue: str = "All") -> None:
    """The CRM, the turns, the position and the ledger say the same."""
    rig.settle_owners()
    assert rig.sandbox.errors() == []
    turns = rig.turns(queue)
    assert rig.position(queue) == len(turns)
    if refs is not None:
        assert rig.owners(refs) == turns
    rig.audit()


def together(*actions: Callable[[], object]) -> None:
    """Do all of these at the same instant."""
    start = threading.Barrier(len(actions))
    failed: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            start.wait(10)
            action()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert not any(thread.is_alive() for thread in threads)


def test_1_two_leads_in_the_same_instant_get_one_agent_each(rig: Rig) -> None:
    rig.sandbox.pause_dispatch()
    refs = [rig.create(), rig.create()]
    rig.sandbox.resume_dispatch()
    for ref in refs:
        rig.wait_owner(ref)
    assert sorted(filter(None, rig.owners(refs))) == [ANA, BEN]
    in_step(rig)
    assert rig.turns() == [ANA, BEN]


def test_3_the_line_goes_on_after_everything_is_restarted(rig: Rig) -> None:
    refs = [rig.create() for _ in range(4)]
    for ref in refs:
        rig.wait_owner(ref)
    rig.settle_owners()
    rig.restart()
    assert [rig.assign() for _ in range(2)] == [BEN, CY]
    in_step(rig)
    assert rig.position() == 6


def test_4_a_delivery_of_six_leads_is_dealt_in_its_order(rig: Rig) -> None:
    refs = rig.burst(6)
    assert rig.owners(refs) == [ANA, BEN, CY, ANA, BEN, CY]
    assert [len(d["leads"]) for d in rig.sandbox.deliveries() if d["topic"] == "peopleCreated"] == [6]
    in_step(rig, refs)


def test_4_seventy_leads_to_seven_agents_are_ten_each(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic")
    more = [str(rig.sandbox.add_agent(name)) for name in ("Fay Fox", "Gil Gray")]
    rig.sync()
    rig.configure(f"default_queue: All\nqueues:\n  All:\n    members: {[ANA, BEN, CY, DEE, ELI, *more]}\n")
    refs = rig.burst(70)
    assert Counter(rig.owners(refs)) == dict.fromkeys([ANA, BEN, CY, DEE, ELI, *more], 10)
    in_step(rig, refs)


def test_5_whom_the_crm_deactivates_is_passed_over_and_every_decision_says_so(rig: Rig) -> None:
    rig.sandbox.deactivate_agent(int(BEN))
    rig.sync()
    refs = rig.burst(4)
    assert rig.owners(refs) == [ANA, CY, ANA, CY]
    assert all(rig.skips(ref) == {BEN: "deactivated"} for ref in refs)
    in_step(rig, refs)


def test_7_nobody_absorbs_the_leads_of_the_absent(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(
        "generic", config="default_queue: All\nqueues:\n  All:\n    members: ['12', '13', '14', '15', '16']\n"
    )
    rig.pause(CY)
    rig.pause(DEE)
    refs = rig.burst(30)
    assert Counter(rig.owners(refs)) == {ANA: 10, BEN: 10, ELI: 10}
    in_step(rig, refs)


def test_9_any_number_of_agents_share_alike(make_rig: Callable[..., Rig]) -> None:
    agents = [ANA, BEN, CY, DEE, ELI, "17", "18", "19"]
    sizes = range(2, 9)
    queues = "".join(f"  Q{n}:\n    members: {agents[:n]}\n" for n in sizes)
    rules = "".join(f"- {{name: r{n}, when: {{field: form, equals: f{n}}}, to: {{queue: Q{n}}}}}\n" for n in sizes)
    rig = make_rig("generic", worker=False)
    for name in ("Fay Fox", "Gil Gray", "Hal Hart"):
        rig.sandbox.add_agent(name)
    rig.sync()
    rig.configure(f"queues:\n{queues}rules:\n{rules}")
    # The CRM hears of none of them: that every decision reaches it is shown by the other tests.
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.WRITE_BACK, "off", "test")
    rig.start_worker()
    rig.sandbox.create_leads(each=[{"form": f"f{n}"} for n in sizes for _ in range(10 * n)])
    rig.settle_owners()
    for n in sizes:
        assert Counter(rig.turns(f"Q{n}")) == dict.fromkeys(agents[:n], 10)
    rig.audit()


def test_11_a_lead_of_an_empty_queue_is_held_and_served_when_somebody_joins(rig: Rig) -> None:
    rig.configure(NOBODY)
    ref = rig.create()
    rig.settle_owners()
    assert [d["state"] for d in rig.sandbox.deliveries()] == ["delivered"]
    assert (rig.standing(ref)["state"], rig.standing(ref)["reason"]) == ("held", "queue_empty")
    assert "leads_held" in rig.alarms()
    assert rig.position() == 0
    assert rig.owner(ref) is None
    rig.configure("default_queue: All\nqueues:\n  All:\n    members: ['12']\n")
    assert rig.wait_owner(ref) == ANA
    in_step(rig, [ref])
    rig.want("held")
    until(lambda: "leads_held" not in rig.alarms(), what="the end of the alarm")


def test_13_whoever_was_paused_comes_back_to_the_front_and_is_served_once(rig: Rig) -> None:
    rig.pause(BEN)
    refs = rig.burst(4)
    assert rig.owners(refs) == [ANA, CY, ANA, CY]
    rig.pause(BEN, False)
    refs += rig.burst(3)
    assert rig.owners(refs[4:]) == [BEN, ANA, CY]
    in_step(rig, refs)


def test_15_a_newcomer_joins_at_the_back_and_is_not_flooded(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic", config=AB)
    refs = rig.burst(20)
    rig.configure(ABD)
    refs += rig.burst(6)
    assert rig.owners(refs[20:]) == [ANA, BEN, DEE, ANA, BEN, DEE]
    in_step(rig, refs)


def test_17_thirty_restarts_favour_nobody(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic", worker=False)
    engine, tenant_id = rig.runtime.engine, rig.tenant.tenant_id
    refs = []
    for _ in range(30):
        refs.append(rig.create())
        assert rig.sandbox.wait_idle()
        engine.dispose()
        reborn = Runtime(rig.runtime.settings, engine)  # no connection and no memory of the life before is left
        assert Decider(reborn, lambda *_: None, lambda: 0).run(tenant_id) == 1
    rig.start_worker()
    in_step(rig, refs)
    assert Counter(rig.owners(refs)) == {ANA: 10, BEN: 10, CY: 10}


def test_19_one_lead_by_webhook_sweep_and_console_at_once_is_assigned_once(rig: Rig) -> None:
    rig.run_chore("sweep")
    rig.sandbox.pause_dispatch()
    # Old enough for the sweep, which leaves the youngest leads to their webhooks.
    ref = rig.create(created=datetime.now(UTC) - timedelta(minutes=10))
    together(
        rig.sandbox.resume_dispatch,
        lambda: rig.run_chore("sweep"),
        lambda: byhand.route(rig.runtime, rig.tenant, ref, None, patience=20),
    )
    assert rig.wait_owner(ref) == ANA
    rig.settle_owners()
    assert rig.assignments(ref) == [(ANA, "active")]
    assert rig.decision(ref).outcome == "assigned"
    assert [write["target"] for write in rig.owner_writes()] == [int(ANA)]
    in_step(rig, [ref])
    assert rig.one("SELECT count(*) FROM deliveries WHERE tenant_id = :t AND source IN ('sweep', 'console')") >= 1


def test_21_when_all_are_off_hours_a_lead_is_held_and_no_one_gets_it(rig: Rig) -> None:
    hours = "".join(f"  '{ref}': {{zone: America/Chicago, hours: {OFFICE_HOURS}}}\n" for ref in (ANA, BEN, CY))
    rig.configure(f"{ABC}agents:\n{hours}")
    rig.at("2026-02-07T18:00:00+00:00")  # a Saturday
    ref = rig.create()
    rig.settle_owners()
    rig.run_chore("held")
    rig.settle_owners()
    assert rig.owner(ref) is None
    assert rig.owner_writes() == []
    assert (rig.standing(ref)["state"], rig.standing(ref)["reason"]) == ("held", "nobody_available")
    assert rig.skips(ref) == dict.fromkeys([ANA, BEN, CY], "off_hours")
    assert "leads_held" in rig.alarms()
    rig.at("2026-02-09T18:00:00+00:00")  # Monday noon in Chicago
    rig.want("held")
    assert rig.wait_owner(ref) == ANA
    in_step(rig, [ref])


def test_23_whoever_works_monday_to_wednesday_gets_no_lead_on_thursday(rig: Rig) -> None:
    days = "{mon: ['00:00-24:00'], tue: ['00:00-24:00'], wed: ['00:00-24:00']}"
    rig.configure(f"{ABC}agents:\n  '{BEN}': {{zone: America/Chicago, hours: {days}}}\n")
    rig.at("2026-02-05T18:00:00+00:00")
    refs = rig.burst(4)
    assert rig.owners(refs) == [ANA, CY, ANA, CY]
    assert all(rig.skips(ref) == {BEN: "off_hours"} for ref in refs)
    rig.at("2026-02-04T18:00:00+00:00")
    refs += rig.burst(1)
    assert rig.owners(refs[4:]) == [BEN]
    in_step(rig, refs)


def test_23_a_day_of_leave_inside_the_working_days_is_honoured(rig: Rig) -> None:
    days = "{mon: ['00:00-24:00'], tue: ['00:00-24:00'], wed: ['00:00-24:00']}"
    leave = "[{from: 2026-02-03, to: 2026-02-03}]"
    rig.configure(f"{ABC}agents:\n  '{BEN}': {{zone: America/Chicago, hours: {days}, leave: {leave}}}\n")
    rig.at("2026-02-03T18:00:00+00:00")  # a Tuesday
    refs = rig.burst(4)
    assert rig.owners(refs) == [ANA, CY, ANA, CY]
    assert all(rig.skips(ref) == {BEN: "leave"} for ref in refs)
    rig.at("2026-02-04T18:00:00+00:00")
    refs += rig.burst(1)
    assert rig.owners(refs[4:]) == [BEN]
    in_step(rig, refs)


def test_25_each_agents_own_clock_is_followed_in_winter_and_in_summer(rig: Rig) -> None:
    daily = "{mon: [W], tue: [W], wed: [W], thu: [W], fri: [W]}"
    ana = daily.replace("W", "'09:00-10:00'")  # in Berlin: 08:30Z is inside in winter alone
    ben = daily.replace("W", "'09:00-17:00'")  # in London: 08:30Z is inside in summer alone
    rig.configure(
        f"{AB}agents:\n  '{ANA}': {{zone: Europe/Berlin, hours: {ana}}}\n"
        f"  '{BEN}': {{zone: Europe/London, hours: {ben}}}\n"
    )
    rig.at("2026-01-14T08:30:00+00:00")
    winter = rig.burst(2)
    rig.at("2026-07-15T08:30:00+00:00")
    summer = rig.burst(2)
    assert rig.owners(winter) == [ANA, ANA]
    assert rig.owners(summer) == [BEN, BEN]
    in_step(rig, winter + summer)


def test_27_a_lead_moved_by_hand_does_not_move_the_line(rig: Rig) -> None:
    refs = rig.burst(2)
    rig.settle_owners()
    rig.sandbox.set_owner(int(refs[0]), int(BEN))
    rig.settle_owners()
    assert rig.standing(refs[0])["state"] == "owned"
    assert rig.assignments(refs[0]) == [(ANA, "overridden")]
    assert rig.assign() == CY
    assert rig.owner(refs[0]) == BEN
    in_step(rig)
    assert rig.turns() == [ANA, BEN, CY]


def test_29_our_own_write_that_comes_back_changes_nothing(rig: Rig) -> None:
    ref = rig.create()
    rig.wait_owner(ref)
    rig.settle_owners()
    assert "peopleUpdated" in {d["topic"] for d in rig.sandbox.deliveries()}
    for kind in ("sweep", "held"):
        rig.run_chore(kind)
    rig.settle_owners()
    assert rig.decision(ref).agent == ANA
    assert rig.assignments(ref) == [(ANA, "active")]
    assert len(rig.owner_writes()) == 1
    in_step(rig, [ref])


@pytest.mark.proof
@pytest.mark.timeout(180)
def test_29_sixty_seconds_after_an_assignment_nothing_more_was_written(rig: Rig) -> None:
    ref = rig.create()
    rig.wait_owner(ref)
    rig.settle()
    writes = [row for row in rig.sandbox.call_log() if row["method"] != "GET"]
    time.sleep(60)
    assert [row for row in rig.sandbox.call_log() if row["method"] != "GET"] == writes
    assert rig.decision(ref).agent == ANA
    in_step(rig, [ref])


def test_31_the_same_person_under_a_second_id_goes_to_their_agent_without_a_turn(rig: Rig) -> None:
    first = rig.create(emails=["same.person@example.com"])
    assert rig.wait_owner(first) == ANA
    assert rig.assign() == BEN
    second = rig.create(emails=["Same.Person@Example.com"], phones=[])
    assert rig.wait_owner(second) == ANA
    rig.settle_owners()
    assert (rig.decision(second).turn, rig.decision(second).record["how"]) == (None, "existing_owner")
    assert rig.assign() == CY
    in_step(rig)
    assert rig.turns() == [ANA, BEN, CY]


def test_31_both_ids_of_one_person_at_once_go_to_one_agent(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic")
    rig.sandbox.pause_dispatch()
    refs = [rig.create(emails=["same.person@example.com"], phones=[]) for _ in range(2)]
    rig.sandbox.resume_dispatch()
    assert [rig.wait_owner(ref) for ref in refs] == [ANA, ANA]
    in_step(rig)
    assert rig.turns() == [ANA]


def test_33_every_way_in_shares_one_line(rig: Rig) -> None:
    refs = [rig.create()]
    assert rig.wait_owner(refs[0]) == ANA
    rig.settle_owners()
    rig.first_round()
    rig.sandbox.fault("status", method="GET", path="/people$", status=400, times=1)
    refs.append(rig.create())
    until(lambda: rig.alarms() == {"event_parked"}, what="a parked event")
    (again,) = replay.replay_all(rig.runtime, rig.tenant)
    assert again.again
    assert rig.wait_owner(refs[1]) == BEN
    rig.sandbox.webhook_faults(drop=1.0)
    refs.append(rig.create(created=datetime.now(UTC) - timedelta(minutes=10)))
    rig.run_chore("sweep")
    assert rig.wait_owner(refs[2]) == CY
    refs.append(rig.create())
    byhand.route(rig.runtime, rig.tenant, refs[3], None, patience=20)
    assert rig.owner(refs[3]) == ANA
    in_step(rig, refs)
    assert rig.one("SELECT count(DISTINCT source) FROM deliveries WHERE tenant_id = :t") == 3


def test_35_another_automation_is_noticed_and_not_fought(rig: Rig) -> None:
    rig.sandbox.fault("flip", method="PUT", seconds=2.0, owner=int(CY), times=1)
    ref = rig.create()
    assert rig.wait_owner(ref) == ANA
    until(lambda: rig.owner(ref) == CY, what="the flip")
    rig.settle_owners()
    until(lambda: rig.standing(ref)["state"] == "owned", what="the notice of it")
    assert rig.assignments(ref) == [(ANA, "overridden")]
    assert rig.owner(ref) == CY
    assert len(rig.owner_writes()) == 1
    assert rig.assign() == BEN
    in_step(rig)
    assert rig.turns() == [ANA, BEN]


def test_39_saving_an_unchanged_configuration_again_and_again_disturbs_nobody(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic", batch=1)
    version = rig.configure(ABC).version
    stop = threading.Event()
    saved: list[bool] = []

    def save() -> None:
        while not stop.is_set():
            saved.append(rig.configure(f"# save {len(saved)}\n{ABC}").changed)

    saving = threading.Thread(target=save)
    saving.start()
    try:
        refs = rig.burst(30)
    finally:
        stop.set()
        saving.join(30)
    assert len(saved) > 5
    assert not any(saved)
    assert rig.configure(ABC).version == version
    assert Counter(rig.owners(refs)) == {ANA: 10, BEN: 10, CY: 10}
    in_step(rig)


def test_41_weights_interleave_and_go_on_after_a_restart(rig: Rig) -> None:
    rig.configure("default_queue: All\nqueues:\n  All:\n    members: [{agent: '12', weight: 5}, '13', '14']\n")
    once = [ANA, BEN, ANA, ANA, CY, ANA, ANA]
    refs = rig.burst(4)
    rig.settle_owners()
    rig.restart()
    refs += rig.burst(10)
    assert rig.owners(refs) == once * 2
    in_step(rig, refs)


def test_43_the_preview_tells_who_gets_the_next_lead(rig: Rig) -> None:
    queue_id = rig.one("SELECT queue_id FROM queues WHERE tenant_id = :t")
    refs = []
    for step in range(6):
        rig.pause(BEN, step in (1, 2))
        told = preview.next_up(rig.runtime, rig.tenant, queue_id, 1)["next"]
        refs.append(rig.create())
        assert [rig.wait_owner(refs[-1])] == [one["agent"]["ref"] for one in told] == [rig.turns()[-1]]
    in_step(rig, refs)


@pytest.fixture
def many(make_rig: Callable[..., Rig]) -> Rig:
    """A tenant whose leads are decided without a worker and without writes to the CRM."""
    rig = make_rig("generic", worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.WRITE_BACK, "off", "test")
    return rig


def decide_all(rig: Rig, leads: int, threads: int, before: Callable[[], object]) -> None:
    """`threads` deciders take `leads` leads, each of a delivery of its own; `before` is done before each claim."""
    for ref in rig.sandbox.create_leads(leads):
        rig.feed("again", str(ref))
    waiting = "SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'waiting'"

    def run() -> None:
        decider = Decider(rig.runtime, lambda *_: None, lambda: 0)
        ends = time.monotonic() + 60
        while rig.one(waiting) and time.monotonic() < ends:
            before()
            decider.run(rig.tenant.tenant_id)

    together(*[run] * threads)


def every_turn_once(rig: Rig, leads: int, *, even: bool = True) -> None:
    """Each lead has one agent and one turn, nothing failed on the way, and the ledger follows."""
    assert rig.one("SELECT count(*) FROM events WHERE tenant_id = :t AND state <> 'done'") == 0
    assert rig.most_tries() == 0
    assert len(rig.turns()) == rig.position() == leads
    shares = Counter(rig.turns()).values()
    assert not even or max(shares) - min(shares) <= 1
    assert rig.one("SELECT count(DISTINCT lead_id) FROM assignments WHERE tenant_id = :t AND state = 'active'") == leads
    rig.audit()


def test_45_code_that_also_reads_the_queue_takes_every_turn_once(many: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "BATCH_DELIVERIES", 5)
    decide_all(many, 400, 8, many.next_up)
    every_turn_once(many, 400)


def test_45_without_the_lock_the_same_run_fails(many: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin, to show that the run above can fail: a store that reads the queue without its lock."""
    monkeypatch.setattr(store, "lock_queues", lambda conn, tenant_id, queue_ids: sorted(queue_ids))
    monkeypatch.setattr(inbox, "BATCH_DELIVERIES", 1)
    monkeypatch.setattr(decide, "_FAULT_TRIES", 1)
    decide_all(many, 30, 8, many.next_up)
    with pytest.raises(AssertionError):
        every_turn_once(many, 30)


def test_47_an_agent_who_comes_and_goes_gets_their_share_of_what_they_are_there_for(many: Rig) -> None:
    for step in range(60):
        many.pause(BEN, step % 2 == 1)
        decide_all(many, 1, 1, lambda: None)
    shares = Counter(many.turns())
    assert shares[BEN] == 15
    assert abs(shares[ANA] - shares[CY]) <= 1
    every_turn_once(many, 60, even=False)


def test_49_sixteen_deciders_at_once_lose_no_lead(many: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "BATCH_DELIVERIES", 1)
    monkeypatch.setattr(decide, "unit", partial(unit, lock_timeout="100ms"))
    tenant_id = many.tenant.tenant_id
    queue_id = many.one("SELECT queue_id FROM queues WHERE tenant_id = :t")

    def hold_until_races_are_lost() -> None:
        with unit(many.runtime.engine) as (conn, _):
            store.lock_queues(conn, tenant_id, [queue_id])
            busy = "SELECT count(*) FROM events WHERE tenant_id = :t AND reason = 'queue_busy'"
            until(lambda: many.one(busy) > 0, what="a lost race")

    together(hold_until_races_are_lost, lambda: decide_all(many, 40, 16, lambda: None))
    assert many.one("SELECT max(claims) FROM events WHERE tenant_id = :t") > 1
    every_turn_once(many, 40)
    assert many.alarms() == set()
