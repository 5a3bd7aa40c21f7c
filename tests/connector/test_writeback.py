"""Telling a CRM that is slow, down, rate limited, or lying about what it did: one owner, one note, nothing lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from connector import writeback
from connector.decide import Decider
from connector.sandbox import Sandbox
from connector.switches import resume
from connector.tenants import set_sending
from connector.worker import Worker
from tests.rig import ANA, BEN, CY, Rig, until

OWNER = {"method": "PUT", "path": r"/people/\d+$"}
READ = {"method": "GET", "path": "/people$"}
NOTE = {"method": "POST", "path": "/notes$"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_BACKOFF", (0.1,) * 8)  # seconds; the schedule itself is not what is tested here


def outbox(rig: Rig, kind: str = "owner") -> list[tuple[str, str | None]]:
    """State and reason of each write, in order."""
    query = "SELECT state, reason FROM outbox WHERE tenant_id = :t AND kind = :k ORDER BY outbox_id"
    return [tuple(row) for row in rig.rows(sa.text(query).bindparams(t=rig.tenant.tenant_id, k=kind))]


def calls(rig: Rig, method: str, path: str = "") -> list[dict[str, Any]]:
    """API calls of the kind that reached the CRM."""
    return [call for call in rig.sandbox.call_log() if call["method"] == method and path in call["path"]]


def notes(rig: Rig, ref: str) -> int:
    return len(rig.sandbox.lead(int(ref))["notes"])


# -- a CRM that asks to wait --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "retry_after"), [(OWNER, "2"), (READ, "date:2")], ids=["write", "read"])
def test_no_call_goes_out_before_retry_after_is_over_and_other_tenants_go_on(
    rig: Rig, where: dict[str, str], retry_after: str
) -> None:
    rig.wait_chores()
    with Sandbox(retry_scale=0.001) as second:
        beta = rig.neighbour(second)
        beta.wait_chores()
        rig.sandbox.clear_logs()
        rig.sandbox.fault("status", status=429, retry_after=retry_after, times=1, **where)
        ref = rig.create()
        until(lambda: rig.one("SELECT count(*) FROM breakers WHERE tenant_id = :t"), what="the pause")
        for _ in range(5):
            rig.create()
        for kind in ("agents", "sweep"):
            rig.want(kind)
        assert [beta.assign() for _ in range(3)] == [ANA, BEN, CY]
        assert rig.owner(ref) is None
        rig.wait_owner(ref)
        rig.settle()
    log = rig.sandbox.call_log()
    told = next(number for number, call in enumerate(log) if call["status"] == 429)
    assert log[told + 1]["mono"] - log[told]["mono"] >= 2.0
    assert len(rig.owner_writes()) == 6
    assert sorted(str(owner) for _, owner in rig.sandbox.owners()) == [ANA, ANA, BEN, BEN, CY, CY]
    assert rig.most_tries() == 0
    rig.audit()


def test_a_write_whose_reading_was_slow_does_not_go_out_into_a_pause_that_began_meanwhile(rig: Rig) -> None:
    rig.wait_chores()
    rig.sandbox.fault("hold", apply=True, skip=1, times=1, **READ)
    slow = rig.create()
    assert rig.sandbox.wait_held()
    rig.sandbox.fault("status", status=429, retry_after="2", times=1, **OWNER)
    rig.create()
    until(lambda: any(call["status"] == 429 for call in rig.sandbox.call_log()), what="the refusal")
    until(lambda: rig.one("SELECT count(*) FROM breakers WHERE tenant_id = :t"), what="the pause")
    rig.sandbox.release()
    rig.wait_owner(slow)
    rig.settle()
    told = next(call for call in rig.sandbox.call_log() if call["status"] == 429)
    assert min(row["mono"] for row in rig.owner_writes()) - told["mono"] >= 2.0
    assert rig.turns() == [ANA, BEN]


def test_a_pause_outlives_the_success_of_a_write_that_began_before_it(rig: Rig) -> None:
    rig.wait_chores()
    # So long over that nobody need be the first to call.
    rig.sql("INSERT INTO breakers VALUES (:t, 'all', 1, 'crm_asked_to_wait', clock_timestamp() - interval '6 min')")
    rig.sandbox.fault("hold", apply=True, times=1, **OWNER)
    first = rig.create()
    assert rig.sandbox.wait_held()
    rig.sandbox.fault("status", status=429, retry_after="2", times=1, **OWNER)
    rig.create()
    until(lambda: any(call["status"] == 429 for call in rig.sandbox.call_log()), what="the refusal")
    until(lambda: rig.one("SELECT count(*) FROM breakers WHERE tenant_id = :t AND open_at > clock_timestamp()"))
    rig.sandbox.release()
    until(lambda: rig.standing(first)["confirmed_version"], what="the confirmation")
    assert rig.one("SELECT count(*) FROM breakers WHERE tenant_id = :t AND open_at > clock_timestamp()") == 1
    rig.due_now()
    rig.settle()


# -- a CRM that does not say what it did --------------------------------------------------------------------------


UNTRUSTED: list[dict[str, Any]] = [
    {"what": "status", "status": 500, "apply": True},
    {"what": "status", "status": 502},
    {"what": "status", "status": 503, "apply": True},
    {"what": "drop", "apply": True},
    {"what": "drop"},
    {"what": "drop", "apply": True, "sent": "headers"},
    {"what": "html", "apply": True},
    {"what": "raw", "body": "{}"},
]


def test_a_write_without_a_trustworthy_answer_is_read_before_anything_else(rig: Rig) -> None:
    rig.wait_chores()
    for number, fault in enumerate(UNTRUSTED):
        rig.sandbox.clear_logs()
        rig.sandbox.fault(**fault, times=1, **OWNER)
        ref = rig.create()
        assert rig.wait_owner(ref) == (ANA, BEN, CY)[number % 3]
        rig.settle()
        methods = "".join(call["method"][0] for call in rig.sandbox.call_log() if "/people" in call["path"])
        looks = methods.split("P")  # what was read before, between and after the writes
        assert len(looks) == (2 if fault.get("apply") else 3), fault
        assert all(looks[:-1]), fault
        assert looks[-1] or not fault.get("apply"), fault
        assert len([row for row in rig.sandbox.owner_log() if row["by"] == "api"]) == 1, fault
        assert notes(rig, ref) == 1
    assert set(outbox(rig)) == {("confirmed", None)}
    assert len(rig.turns()) == len(UNTRUSTED)
    assert rig.void_turns() == {}
    assert rig.alarms() == set()
    rig.audit()


def test_a_human_who_changes_an_unconfirmed_owner_wins_and_the_turn_stays_used(rig: Rig) -> None:
    rig.sandbox.fault("drop", apply=True, times=1, **OWNER)
    ref = rig.create()
    rig.wait_owner(ref)
    rig.sandbox.set_owner(int(ref), int(CY))
    rig.settle()
    assert rig.owner(ref) == CY
    assert len(rig.owner_writes()) == 1
    assert rig.void_turns() == {}  # a write was sent: Ana had the lead for a moment
    assert rig.assign() == BEN
    rig.audit()


def test_an_owner_that_was_silently_not_set_is_set_by_the_second_write(rig: Rig) -> None:
    rig.sandbox.fault("lost_owner", owner="empty", times=1, **OWNER)
    ref = rig.create()
    assert rig.wait_owner(ref) == ANA
    rig.settle()
    assert len(rig.owner_writes()) == 2
    assert outbox(rig) == [("confirmed", None)]
    assert rig.void_turns() == {}
    assert rig.one("SELECT max(refusals) FROM agents WHERE tenant_id = :t") == 0
    rig.audit()


def test_an_answer_that_never_shows_the_owner_ends_with_a_human_not_with_a_hot_loop(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig("generic")
    rig.sandbox.fault("status", status=409, method="PUT", path="/owner$")
    ref = rig.create()
    until(lambda: rig.one("SELECT max(attempt) FROM outbox WHERE tenant_id = :t") == 1, what="a counted try")
    assert len(calls(rig, "PUT")) <= 4
    rig.sandbox.clear_faults()
    rig.due_now()
    assert rig.wait_owner(ref) == ANA
    rig.settle()
    rig.audit()


# -- a CRM that does not take an agent ----------------------------------------------------------------------------


def test_an_agent_whom_the_crm_does_not_keep_is_passed_by_until_seen_active_and_then_served_first(rig: Rig) -> None:
    rig.wait_chores()
    rig.sandbox.fault("hold", method="GET", path="/users$", apply=False)  # so that no reading of agents ends meanwhile
    rig.sandbox.fault("lost_owner", owner="empty", times=2, **OWNER)
    ref = rig.create()
    assert rig.wait_owner(ref) == BEN
    rig.settle()
    assert rig.decisions(ref) == [("new", "assigned", ANA), ("refused", "assigned", BEN)]
    assert rig.void_turns() == {1: "refused"}
    assert [state for state, _ in outbox(rig)] == ["refused", "confirmed"]
    assert [rig.assign() for _ in range(3)] == [CY, BEN, CY]
    rig.sandbox.clear_faults()
    rig.sandbox.release()
    rig.want("agents")
    until(lambda: rig.one("SELECT count(*) FROM agents WHERE tenant_id = :t AND refused_at IS NOT NULL") == 0)
    assert [rig.assign() for _ in range(4)] == [ANA, ANA, BEN, CY]  # the owed turn, then her old place in line
    rig.settle()
    rig.audit()


def test_a_reading_of_agents_begun_before_the_refusal_does_not_end_it(rig: Rig) -> None:
    rig.wait_chores()
    rig.sandbox.fault("hold", method="GET", path="/users$", apply=True, times=1)
    rig.want("agents")
    assert rig.sandbox.wait_held()
    rig.sandbox.fault("lost_owner", owner="empty", times=2, **OWNER)
    assert rig.assign() == BEN
    rig.settle()
    rig.sql("UPDATE chores SET last_ok_at = NULL WHERE tenant_id = :t AND kind = 'agents'")
    rig.sandbox.fault("hold", method="GET", path="/users$", apply=True)
    rig.sandbox.release()
    rig.wait_chores()
    assert rig.one("SELECT count(*) FROM agents WHERE tenant_id = :t AND refused_at IS NOT NULL") == 1
    rig.sandbox.clear_faults()
    rig.sandbox.release()


def test_an_agent_refused_three_times_in_a_row_is_a_humans_matter(rig: Rig) -> None:
    rig.wait_chores()
    for number in range(1, 4):
        rig.sandbox.fault("lost_owner", owner="empty", times=2, **OWNER)
        rig.assign()
        rig.settle()
        assert rig.alarms() == ({"agent_refused"} if number == 3 else set())
        rig.sql("UPDATE chores SET last_ok_at = NULL WHERE tenant_id = :t AND kind = 'agents'")
        rig.want("agents")
        rig.wait_chores()
    assert rig.void_turns() == {1: "refused", 3: "refused", 5: "refused"}
    assert ANA not in [rig.assign() for _ in range(3)]
    resume(rig.runtime, rig.tenant, rig.agent_id(ANA), "test")
    assert rig.alarms() == set()
    assert rig.assign() == ANA
    rig.settle()
    rig.audit()


def test_an_agent_deactivated_since_the_last_look_gets_no_write(rig: Rig) -> None:
    rig.wait_chores()
    rig.sandbox.deactivate_agent(int(ANA))
    rig.sql("UPDATE agents SET seen_at = seen_at - interval '61 seconds' WHERE tenant_id = :t")
    ref = rig.create()
    assert rig.wait_owner(ref) == BEN
    rig.settle()
    assert [str(row["target"]) for row in rig.owner_writes()] == [BEN]
    assert rig.void_turns() == {1: "refused"}
    assert [rig.assign() for _ in range(2)] == [CY, BEN]
    rig.sandbox.activate_agent(int(ANA))
    rig.want("agents")
    until(lambda: rig.one("SELECT bool_and(active AND refused_at IS NULL) FROM agents WHERE tenant_id = :t"))
    assert rig.assign() == ANA
    rig.settle()
    rig.audit()


@pytest.mark.parametrize("inactive", ["refuse", "empty"])
def test_an_agent_deactivated_within_the_last_minute_is_found_out_by_the_write(rig: Rig, inactive: str) -> None:
    rig.wait_chores()
    rig.sandbox.configure(fub_inactive=inactive)
    rig.sandbox.deactivate_agent(int(ANA))
    assert rig.assign() == BEN
    rig.settle()
    assert rig.void_turns() == {1: "refused"}
    assert [rig.assign() for _ in range(2)] == [CY, BEN]
    rig.audit()


def test_an_empty_list_of_agents_takes_nobody_out_of_the_rotation(rig: Rig) -> None:
    rig.wait_chores()
    rig.sandbox.fault("empty", method="GET", path="/users$", times=1)
    assert rig.sync()["missing"] == 0
    assert rig.assign() == ANA


# -- a CRM that refuses us ----------------------------------------------------------------------------------------


def test_refused_credentials_lose_nothing_and_are_over_by_themselves(rig: Rig) -> None:
    rig.wait_chores()
    for status, where in ((401, READ), (403, OWNER), (401, OWNER)):
        rig.sandbox.clear_logs()
        rig.sandbox.fault("status", status=status, **where)
        refs = [rig.create() for _ in range(3)]
        until(lambda: rig.alarms() == {"crm_refuses_us"}, what="the alarm")
        assert rig.sandbox.wait_idle()
        assert [rig.owner(ref) for ref in refs] == [None] * 3
        refused = [call for call in rig.sandbox.call_log() if call["status"] == status]
        assert 1 <= len(refused) <= 6  # nobody hammers a closed door
        in_hand = (
            "SELECT (SELECT count(*) FROM outbox WHERE tenant_id = :t AND state = 'open' AND lease IS NOT NULL)"
            " + (SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'waiting' AND lease IS NOT NULL)"
        )
        until(lambda q=in_hand: rig.one(q) == 0, what="the end of what was refused")  # none may tell of it later
        rig.sandbox.clear_faults()
        until(lambda refs=refs: (rig.due_now(), all(map(rig.owner, refs)))[1], what="all owners")
        rig.settle()
        until(lambda: rig.alarms() == set(), what="the end of the alarm")
        assert sorted(map(rig.owner, refs)) == [ANA, BEN, CY]
    assert rig.most_tries() == 0
    assert rig.void_turns() == {}
    rig.audit()


def test_one_lead_that_we_may_not_give_away_holds_up_the_others_once(rig: Rig) -> None:
    rig.wait_chores()
    set_sending(rig.runtime, rig.tenant, False)
    first = rig.create()
    until(lambda: rig.turns() == [ANA], what="its decision")
    rig.sandbox.fault("status", status=403, method="PUT", path=f"/people/{first}$")
    set_sending(rig.runtime, rig.tenant, True)
    until(lambda: rig.alarms() == {"crm_refuses_us"}, what="the pause")
    second = rig.create()
    pause = "SELECT count(*) FROM breakers WHERE tenant_id = :t"

    def over() -> bool:  # the pause alone: the first lead is due a little later, and whoever calls now calls alone
        rig.sql(
            "UPDATE breakers SET open_at = least(open_at, clock_timestamp()) "
            "WHERE tenant_id = :t AND NOT starts_with(reason, 'probe')"
        )
        rig.sql("UPDATE outbox SET due_at = clock_timestamp() WHERE tenant_id = :t AND reason = 'crm_paused'")
        rig.sql("UPDATE events SET due_at = clock_timestamp() WHERE tenant_id = :t AND state = 'waiting'")
        rig.runtime.wake(rig.tenant.tenant_id)
        return bool(rig.one(pause) == 0)

    until(over, what="another write, which ends the pause")
    assert rig.owner(second) == BEN
    parked = "SELECT reason FROM outbox WHERE tenant_id = :t AND state = 'parked'"
    until(lambda: (rig.due_now(), rig.one(parked) == "forbidden_403")[1], what="a write for a human")
    assert rig.alarms() == {"owner_not_written"}
    assert rig.assign() == CY  # at once
    assert rig.one(pause) == 0


def test_a_crm_that_is_away_for_minutes_is_an_alarm_until_it_is_back(rig: Rig) -> None:
    rig.wait_chores()
    tries = "SELECT attempt FROM chores WHERE tenant_id = :t AND kind = 'agents'"

    def tried() -> bool:
        rig.sql("DELETE FROM breakers WHERE tenant_id = :t")
        rig.want("agents")
        return bool(rig.one(tries) >= 3)

    for status, opens in ((429, set[str]()), (502, {"crm_away"})):  # to ask for time is no absence
        rig.sandbox.fault("status", status=status, method="GET", path="/users$")
        until(tried, what="three tries in a row")
        until(lambda opens=opens: rig.alarms() == opens, what="the alarm, or none")
        rig.sandbox.clear_faults()
        rig.sql("DELETE FROM breakers WHERE tenant_id = :t")
        rig.run_chore("agents")
        assert rig.alarms() == set()
    assert rig.assign() == ANA


def test_notes_that_are_forbidden_hold_up_no_owner(rig: Rig) -> None:
    rig.wait_chores()
    rig.sandbox.fault("status", status=403, **NOTE)
    first = rig.create()
    until(lambda: rig.alarms() == {"crm_refuses_us"}, what="the alarm")
    assert [rig.owner(first), rig.assign(), rig.assign()] == [ANA, BEN, CY]
    assert rig.one("SELECT array_agg(lane) FROM breakers WHERE tenant_id = :t") == ["note"]
    rig.sandbox.clear_faults()
    until(lambda: (rig.due_now(), notes(rig, first))[1], what="the note after all")
    rig.audit()


@pytest.mark.parametrize(
    "fault", [{"what": "drop"}, {"what": "status", "status": 401}, {"what": "status", "status": 307}]
)
def test_a_note_that_cannot_be_looked_for_holds_up_no_owner(fault: dict[str, Any], rig: Rig) -> None:
    rig.wait_chores()
    rig.sandbox.fault("drop", times=1, **NOTE)  # whether it is there is unknown, so it is looked for
    rig.sandbox.fault(**fault, **NOTE | {"method": "GET"})
    first = rig.create()
    until(lambda: (rig.due_now(), rig.one("SELECT count(*) FROM breakers WHERE tenant_id = :t"))[1], what="a pause")
    assert rig.one("SELECT array_agg(lane) FROM breakers WHERE tenant_id = :t") == ["note"]
    assert [rig.owner(first), rig.assign(), rig.assign()] == [ANA, BEN, CY]
    rig.sandbox.clear_faults()
    until(lambda: (rig.due_now(), notes(rig, first))[1], what="the note after all")
    rig.audit()


def test_a_lead_that_the_crm_no_longer_knows_at_the_write_is_gone_and_the_turn_comes_back(rig: Rig) -> None:
    rig.sandbox.fault("status", status=404, times=1, **OWNER)
    ref = rig.create()
    until(lambda: rig.standing(ref)["state"] == "gone", what="gone")
    rig.settle()
    assert outbox(rig) == [("gone", None)]
    assert rig.void_turns() == {1: "gone"}
    assert rig.alarms() == set()
    assert rig.assign() == ANA
    rig.audit()


def test_a_lead_gone_after_an_unconfirmed_write_leaves_the_turn_used(rig: Rig) -> None:
    rig.sandbox.fault("drop", apply=True, times=1, **OWNER)
    ref = rig.create()
    rig.wait_owner(ref)
    rig.sandbox.delete_leads([int(ref)])
    until(lambda: rig.standing(ref)["state"] == "gone", what="gone")
    assert outbox(rig) == [("gone", None)]
    assert rig.void_turns() == {}
    rig.audit()


def test_a_write_that_the_crm_cannot_take_is_parked_with_an_alarm_and_others_go_on(rig: Rig) -> None:
    rig.sandbox.fault("status", status=400, times=1, **OWNER)
    ref = rig.create()
    until(lambda: outbox(rig) == [("parked", "refused_400")], what="a parked write")
    assert rig.alarms() == {"owner_not_written"}
    assert rig.assign() == BEN
    assert rig.owner(ref) is None
    assert rig.sandbox.wait_idle()
    assert len(calls(rig, "PUT")) == 2
    rig.audit()


# -- a CRM that is away or slow -----------------------------------------------------------------------------------


def test_what_comes_while_the_crm_is_down_waits_and_is_written_when_it_is_back(rig: Rig) -> None:
    rig.wait_chores()
    known = rig.create()
    rig.wait_owner(known)
    rig.settle()
    set_sending(rig.runtime, rig.tenant, False)
    decided = [rig.create() for _ in range(3)]
    until(lambda: len(rig.turns()) == 4, what="decisions")
    rig.unplug()
    set_sending(rig.runtime, rig.tenant, True)
    undecided = [rig.create() for _ in range(3)]  # the CRM's own sender lives on
    until(lambda: rig.one("SELECT max(attempt) FROM outbox WHERE tenant_id = :t") >= 1, what="a try that failed")
    until(lambda: rig.one("SELECT count(*) FROM events WHERE tenant_id = :t AND reason = 'crm_unreadable'") >= 1)
    rig.plug_in()
    until(lambda: (rig.due_now(), all(map(rig.owner, decided + undecided)))[1], what="all owners")
    rig.settle()
    assert rig.one("SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'parked'") == 0
    assert sorted(map(rig.owner, decided + undecided)) == [ANA, ANA, BEN, BEN, CY, CY]
    assert len(rig.owner_writes()) == 7
    assert rig.alarms() == set()
    rig.audit()


def test_a_slow_crm_of_one_tenant_does_not_slow_another(rig: Rig) -> None:
    rig.wait_chores()
    with Sandbox(retry_scale=0.001) as second:
        beta = rig.neighbour(second)
        beta.wait_chores()

        def four_leads() -> float:
            began = time.monotonic()
            for _ in range(4):
                beta.assign()
            return time.monotonic() - began

        alone = four_leads()
        rig.sandbox.clear_logs()
        rig.sandbox.fault("slow", seconds=2.0)
        slow = [rig.create() for _ in range(12)]
        until(lambda: len(rig.sandbox.call_log()) > 6, what="as many slow calls as there are senders")
        beside = four_leads()
        assert beside < 4 * alone + 1.0, (alone, beside)
        assert not all(map(rig.owner, slow))
        rig.sandbox.clear_faults()
        rig.settle()
        assert all(map(rig.owner, slow))
        beta.settle()
        assert len(beta.turns()) == 8


# -- stopped and started ------------------------------------------------------------------------------------------


def test_stopped_sending_lets_no_write_out_and_started_sending_all_of_them(rig: Rig) -> None:
    rig.wait_chores()
    set_sending(rig.runtime, rig.tenant, False)
    refs = [rig.create() for _ in range(20)]
    until(lambda: len(rig.turns()) == 20, what="twenty decisions")
    rig.runtime.wake(rig.tenant.tenant_id)
    assert [
        call for call in rig.sandbox.call_log() if call["method"] in ("PUT", "POST") and "hook" not in call["path"]
    ] == []
    assert {state for state, _ in outbox(rig)} == {"open"}
    began = time.monotonic()
    set_sending(rig.runtime, rig.tenant, True)
    rig.settle()
    assert time.monotonic() - began < 20  # no lease of the stopped time holds anything up
    assert sorted(str(rig.owner(ref)) for ref in refs) == sorted(rig.turns())
    assert len(rig.owner_writes()) == 20
    assert rig.void_turns() == {}
    rig.audit()


def test_writes_of_one_lead_go_out_in_the_order_of_their_decisions(rig: Rig) -> None:
    ref = rig.create()
    rig.wait_owner(ref)
    rig.settle()
    set_sending(rig.runtime, rig.tenant, False)
    rig.sandbox.clear_owner(int(ref))
    until(lambda: len(rig.turns()) == 2, what="the second decision")
    rig.sandbox.edit_leads([int(ref)], price=1)  # an event that meets the open write
    until(lambda: rig.one("SELECT count(*) FROM events WHERE tenant_id = :t AND reason = 'behind_write'") == 1)
    set_sending(rig.runtime, rig.tenant, True)
    rig.settle()
    assert [str(row["target"]) for row in rig.owner_writes()] == [ANA, BEN]
    assert rig.turns() == [ANA, BEN]
    assert notes(rig, ref) == 2
    rig.audit()


def test_writes_born_leased_to_a_worker_that_died_are_sent_by_the_next(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(worker=False)
    refs = []
    for _ in range(3):
        refs.append(rig.create())
        assert rig.sandbox.wait_idle()
    Decider(rig.runtime, lambda *_: None, lambda: 8).run(rig.tenant.tenant_id)  # and the process ends here
    assert rig.one("SELECT count(*) FROM outbox WHERE tenant_id = :t AND leased_until IS NOT NULL") == 3
    rig.start_worker()
    rig.wait_chores()
    assert [rig.owner(ref) for ref in refs] == [None] * 3  # the lease still stands
    rig.sql("UPDATE outbox SET leased_until = clock_timestamp() - interval '1 second' WHERE tenant_id = :t")
    rig.settle()
    assert [rig.owner(ref) for ref in refs] == [ANA, BEN, CY]
    assert len(rig.owner_writes()) == 3
    rig.audit()


def test_a_worker_that_stops_in_order_leaves_nothing_leased(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(worker=False)
    for _ in range(3):
        rig.create()
    assert rig.sandbox.wait_idle()
    worker = Worker(rig.runtime)  # its threads never start: what it is handed stays with it
    Decider(rig.runtime, worker._hand_over, lambda: 8).run(rig.tenant.tenant_id)
    assert rig.one("SELECT count(*) FROM outbox WHERE tenant_id = :t AND leased_until IS NOT NULL") == 3
    worker._give_back()
    assert rig.one("SELECT count(*) FROM outbox WHERE tenant_id = :t AND leased_until IS NOT NULL OR sent") == 0
    rig.start_worker()
    rig.settle()
    assert sorted(str(owner) for _, owner in rig.sandbox.owners()) == [ANA, BEN, CY]


def test_sending_that_is_stopped_while_the_crm_is_read_stops_the_write(rig: Rig) -> None:
    rig.wait_chores()
    rig.sandbox.fault("hold", method="GET", path="/people", skip=1, times=1)  # the decider's reading, then the sender's
    ref = rig.create()
    assert rig.sandbox.wait_held()
    set_sending(rig.runtime, rig.tenant, False)
    read_at = time.monotonic()
    until(lambda: time.monotonic() - read_at > writeback._JUST_NOW)  # as long as a reading takes
    rig.sandbox.release()
    until(lambda: rig.one("SELECT count(*) FROM outbox WHERE tenant_id = :t AND leased_until IS NULL") == 1)
    assert (rig.owner(ref), rig.owner_writes()) == (None, [])
    set_sending(rig.runtime, rig.tenant, True)
    assert rig.wait_owner(ref) == ANA
    rig.audit()


# -- notes --------------------------------------------------------------------------------------------------------


def test_a_lead_gets_exactly_one_note_even_when_the_answer_is_lost(rig: Rig) -> None:
    rig.wait_chores()
    faults = UNTRUSTED[:-1]  # a note's answer holds nothing to be trusted: any success is one
    for fault in faults:
        rig.sandbox.fault(**fault, times=1, **NOTE)
        ref = rig.create()
        rig.wait_owner(ref)
        rig.settle()
        assert notes(rig, ref) == 1, fault
    assert outbox(rig, "note") == [("confirmed", None)] * len(faults)


def test_a_limit_on_notes_delays_no_owner(rig: Rig) -> None:
    rig.wait_chores()
    rig.sandbox.fault("status", status=429, retry_after="60", **NOTE)
    refs = [rig.create()]
    rig.wait_owner(refs[0])
    until(lambda: any(call["status"] == 429 for call in rig.sandbox.call_log()), what="the refused note")
    began = time.monotonic()
    for _ in range(5):
        refs.append(rig.create())
        rig.wait_owner(refs[-1])
    assert time.monotonic() - began < 15
    assert len([call for call in rig.sandbox.call_log() if call["status"] == 429]) == 1
    rig.sandbox.clear_faults()

    def all_told() -> bool:
        rig.due_now()  # again and again: a note that was in hand just now is put off only after it
        return [notes(rig, ref) for ref in refs] == [1] * 6

    until(all_told, what="the notes")
    rig.settle()
    assert [notes(rig, ref) for ref in refs] == [1] * 6
