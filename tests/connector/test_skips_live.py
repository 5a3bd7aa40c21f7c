"""Leave, holidays, pauses with an end, quiet hours and skip policies through the service: webhook in, CRM owner out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from adapters.base import Capability
from adapters.followupboss import FollowUpBoss
from connector import explain, flags, preview, switches
from connector.errors import TurnlockError
from routing.model import Flag
from tests.rig import ABC, ANA, BEN, CY, Rig, until

AWAY = """\
agents:
  '12': {zone: America/Chicago, leave: [{from: 2026-07-06, to: 2026-07-10, why: by the sea}]}
  '13': {zone: Europe/Berlin, holidays: {country: US, region: TX, extra: [{day: 2026-07-07, name: Office closed}]}}
"""
NIGHT = """\
default_queue: All
queues:
  All:
    members: ['12', '13', '14']
    quiet_hours: {zone: America/Chicago, hours: {mon: ['00:00-08:00', '21:00-24:00']}}
"""


@pytest.fixture(autouse=True)
def _without_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Notes are a lane of their own with its own pace; here they would only take time.
    monkeypatch.setattr(FollowUpBoss, "capabilities", FollowUpBoss.capabilities - {Capability.NOTES})


def unavailable(rig: Rig) -> dict[str, tuple[str, str]]:
    """Who cannot take a lead now by the preview: reason and detail."""
    queue_id = rig.rows(sa.text("SELECT queue_id FROM queues WHERE name = 'All'"))[0].queue_id
    shown = preview.next_up(rig.runtime, rig.tenant, queue_id, 3)
    return {away["agent"]["ref"]: (away["skip"], away["detail"]) for away in shown["unavailable"]}


def test_leave_and_holidays_are_kept_on_each_agents_own_clock(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=ABC + AWAY)
    rig.at("2026-07-06T22:30:00+00:00")  # Monday evening; in Berlin it is the 7th already
    refs = rig.burst(2)
    assert rig.owners(refs) == [CY, CY]
    assert rig.skips(refs[0]) == {ANA: "leave", BEN: "holiday"}
    assert unavailable(rig) == {
        ANA: ("leave", "on leave until Sat 11 Jul 2026 00:00 America/Chicago"),
        BEN: ("holiday", "Office closed, until Wed 8 Jul 2026 00:00 Europe/Berlin"),
    }
    told = str(explain.explain(rig.runtime, rig.tenant, rig.lead_id(refs[0])))
    assert "on leave until Sat 11 Jul 2026 00:00 America/Chicago" in told
    assert "by the sea" not in told
    # The end of the leave, to the second; in Texas nobody works on Thanksgiving.
    rig.at("2026-07-11T04:59:59+00:00")
    assert rig.assign() == BEN
    rig.at("2026-07-11T05:00:00+00:00")
    assert rig.assign() == ANA
    rig.at("2026-11-26T12:00:00+00:00")
    assert unavailable(rig) == {BEN: ("holiday", "Thanksgiving Day, until Fri 27 Nov 2026 00:00 Europe/Berlin")}
    rig.settle_owners()
    rig.audit()


def test_a_quiet_queue_holds_its_leads_without_an_alarm_and_gives_them_out_when_it_ends(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(config=NIGHT)
    rig.at("2026-07-06T12:59:00+00:00")  # Monday, 07:59 in Chicago
    refs = []
    for _ in range(2):
        refs.append(rig.create())
        until(lambda: rig.standing(refs[-1])["state"] == "held", what="a lead that waits")
    assert {rig.standing(ref)["reason"] for ref in refs} <= {"quiet_hours"}
    rig.settle_owners()
    rig.run_chore("held")
    rig.settle_owners()
    assert rig.alarms() == set()
    assert (rig.position(), rig.owners(refs)) == (0, [None, None])
    assert [outcome for _, outcome, _ in rig.decisions(refs[0])] == ["held"]
    told = explain.explain(rig.runtime, rig.tenant, rig.lead_id(refs[0]))["decisions"][0]
    assert (told["reason"], told["paths"][0]["detail"]) == ("quiet_hours", "until Mon 6 Jul 2026 08:00 America/Chicago")
    rig.at("2026-07-06T13:00:00+00:00")
    rig.want("held")
    assert [rig.wait_owner(ref) for ref in refs] == [ANA, BEN]
    rig.settle_owners()
    rig.audit()


# -- pauses with an end, and when the drain comes ---------------------------------------------------------------


def pause(rig: Rig, ref: str, **until_: Any) -> switches.Switched:
    return switches.pause(rig.runtime, rig.tenant, rig.agent_id(ref), "test", **until_)


def test_a_pause_ends_by_itself_and_who_waited_is_served_then(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=ABC.replace("['12', '13', '14']", "['12']"))
    rig.first_round()
    done = pause(rig, ANA, until=timedelta(seconds=40))
    assert done.changed
    assert [pause(rig, BEN).changed for _ in range(2)] == [True, False]
    ref = rig.create()
    until(lambda: rig.standing(ref)["state"] == "held")
    assert unavailable(rig)[ANA] == ("paused", f"paused by the admin until {done.until}; `turnlock resume`")
    # The drain comes at that instant: not before, and not by asking again and again.
    rig.run_chore("held")
    ends = rig.one("SELECT paused_until FROM agents WHERE agent_id = :a", a=rig.agent_id(ANA))
    due = "SELECT due_at FROM chores WHERE tenant_id = :t AND kind = 'held' AND lease IS NULL"
    until(lambda: abs(((rig.one(due) or ends.replace(year=2000)) - ends).total_seconds()) < 1, what="the drain's time")
    # The admin changes the end: the drain hears of it.
    pause(rig, ANA, until=timedelta(seconds=1))
    assert rig.wait_owner(ref, 8) == ANA
    # A lead that comes while it is known when somebody is back waits no longer than that.
    rig.settle_owners()
    pause(rig, ANA, until=timedelta(seconds=2))
    assert rig.wait_owner(rig.create(), 8) == ANA
    rig.settle_owners()
    rig.audit()


def test_resume_ends_a_pause_early_and_a_pause_without_an_end_replaces_one_with_an_end(rig: Rig) -> None:
    pause(rig, ANA, until=timedelta(days=2))
    assert rig.assign() == BEN
    assert switches.resume(rig.runtime, rig.tenant, rig.agent_id(ANA), "test").changed
    assert rig.assign() == ANA
    pause(rig, ANA, until=timedelta(days=2))
    assert pause(rig, ANA).changed
    assert rig.one("SELECT paused_until FROM agents WHERE agent_id = :a", a=rig.agent_id(ANA)) is None
    with pytest.raises(TurnlockError, match="which is past; give a later time"):
        pause(rig, ANA, until=timedelta(0))
    with pytest.raises(TurnlockError, match="no calendar shows that time"):
        pause(rig, ANA, until=timedelta(days=9_999_999))


# -- what a skip costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "owners"),
    [
        ("keep_place", [CY, ANA, CY, ANA, BEN, CY, ANA]),
        # Ben is charged for the turns that he would have had, so he comes back in order and not before it.
        ("lose_turn", [CY, ANA, CY, ANA, CY, BEN, ANA]),
    ],
)
def test_a_policy_decides_who_is_next(make_rig: Callable[..., Rig], policy: str, owners: list[str]) -> None:
    rig = make_rig(config=f"{ABC}    skip_policy: {{paused: {policy}}}\n")
    assert rig.assign() == ANA
    rig.pause(BEN)
    got = [rig.assign() for _ in range(4)]
    rig.pause(BEN, False)
    got += [rig.assign() for _ in range(3)]
    assert got == owners
    rig.settle_owners()
    rig.audit()


def test_average_is_remembered_over_a_restart_and_ends_when_skips_go_off(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(
        config="default_queue: All\nqueues:\n  All:\n"
        "    members: [{agent: '12', weight: 3}, '13', {agent: '14', weight: 2}]\n    skip_policy: {paused: average}\n"
    )
    marks = "SELECT count(*) FROM members WHERE tenant_id = :t AND averaging"
    rig.pause(BEN)
    rig.burst(7)
    assert rig.one(marks) == 1
    rig.restart()
    rig.pause(BEN, False)
    assert rig.assign() != BEN  # with their place kept Ben would be first now
    assert rig.one(marks) == 0
    rig.pause(BEN)
    rig.assign()
    assert rig.one(marks) == 1
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.SKIPS, "off", "test")
    assert rig.one(marks) == 0
    rig.assign()
    rig.settle_owners()
    rig.audit()
