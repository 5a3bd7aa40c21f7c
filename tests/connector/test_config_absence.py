"""Leave, holidays, caps, quiet hours and skip policies in the configuration: what they mean, and what is refused."""

from __future__ import annotations

from datetime import date, datetime

import pytest

from connector.config import Config, ConfigProblems, digest, export, parse, warnings
from routing import stored
from routing.model import Caps, Holidays, Leave, Skip, SkipPolicy
from tests.connector.test_config import AGENTS, ANA, BEN
from tests.rig import ABC, Rig

WHOLE = """\
version: 1
caps_zone: America/Denver
closed_stages: [Won, lost]
agents:
  ana@example.com:
    leave:
    - {from: "2026-09-01 12:00", to: "2026-09-01 15:00"}
    - {from: 2026-07-01, to: 2026-07-05, why: by the sea}
    holidays: {country: US, region: TX, extra: [{day: 2026-12-24, name: Office closed}]}
    caps: {hour: 1, day: 5, week: 20, open: 30}
  "13":
    holidays: [{day: 2026-12-31}]
    caps: {day: 2}
queues:
  A:
    members: [ana@example.com]
    quiet_hours: {zone: America/Chicago, hours: {sat: ["22:00-02:00"]}}
    skip_policy: {off_hours: lose_turn, leave: average, paused: keep_place}
"""


def load(text: str) -> Config:
    return parse(text, known_agents=AGENTS, capabilities=frozenset())


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        load("version: 1\n" + text)
    return [str(problem) for problem in caught.value.problems]


def test_what_it_means() -> None:
    config = load(WHOLE)
    assert (config.caps_zone, config.closed_stages) == ("America/Denver", ("lost", "Won"))
    ana, ben = config.agents[ANA], config.agents[BEN]
    assert ana.leave == (
        Leave(datetime(2026, 7, 1), datetime(2026, 7, 6)),  # the last day is part of it
        Leave(datetime(2026, 9, 1, 12), datetime(2026, 9, 1, 15)),
    )
    assert ana.holidays == Holidays("US", "TX", {date(2026, 12, 24): "Office closed"})
    assert (ana.caps, ben.caps) == (Caps(1, 5, 20, 30), Caps(day=2))
    assert ben.holidays == Holidays(extra={date(2026, 12, 31): "an extra day"})
    (queue,) = config.queues
    assert queue.quiet_hours is not None
    assert (queue.quiet_hours.zone, queue.quiet_hours.hours.days) == (
        "America/Chicago",
        {5: ((1320, 1440),), 6: ((0, 120),)},
    )
    assert queue.skip_policy == {
        Skip.OFF_HOURS: SkipPolicy.LOSE_TURN,
        Skip.LEAVE: SkipPolicy.AVERAGE,
        Skip.PAUSED: SkipPolicy.KEEP_PLACE,
    }


def test_the_way_out_and_back_and_into_the_database_and_back() -> None:
    config = load(WHOLE)
    assert load(export(config, AGENTS)) == config
    assert "by the sea" not in export(config, AGENTS)
    for facts in config.agents.values():
        assert stored.leave(stored.leave_json(facts.leave)) == facts.leave
        assert facts.holidays is not None
        assert stored.holidays(stored.holidays_json(facts.holidays)) == facts.holidays
    quiet = config.queues[0].quiet_hours
    assert quiet is not None
    assert stored.quiet(stored.quiet_json(quiet)) == quiet


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2026-07-05", "2026-07-06"),
        ("region: TX", "region: CA"),
        ("Office closed", "Party"),
        ("day: 5", "day: 6"),
        ("America/Denver", "America/Chicago"),
        ("Won", "Sold"),
        ("22:00-02:00", "22:00-03:00"),
        ("leave: average", "leave: lose_turn"),
    ],
)
def test_each_part_makes_a_new_version(old: str, new: str) -> None:
    assert digest(load(WHOLE.replace(old, new))) != digest(load(WHOLE))
    assert digest(load(WHOLE.replace(", why: by the sea", ""))) == digest(load(WHOLE))


def test_a_queue_that_is_always_quiet_is_a_likely_slip() -> None:
    days = ", ".join(f'{day}: ["00:00-24:00"]' for day in ("mon", "tue", "wed", "thu", "fri", "sat", "sun"))
    config = load(f"version: 1\nqueues: {{A: {{members: [], quiet_hours: {{zone: UTC, hours: {{{days}}}}}}}}}")
    assert any("quiet hours never end" in str(note) for note in warnings(config))


ONE = "agents:\n  ana@example.com:\n    "
QUEUE = "queues:\n  A:\n    members: []\n    "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ONE + "leave: [{from: 2026-07-01, to: 2026-07-05}, {from: 2026-07-05, to: 2026-07-06}]",
         ["leave[1]): overlaps the leave at leave[0]; join the two"]),
        (ONE + "leave: [{from: 2026-07-05, to: 2026-07-01}]", ["leave[0].to): is not after from; write the last day"]),
        (ONE + "leave: [{from: 2026-02-30, to: 1.7.2026}]",
         ["leave[0].from): is no day and no time; write a day like 2026-07-01", "leave[0].to): is no day"]),
        (ONE + "leave: [{from: '2026-07-01 25:00', to: 2026-07-05}]", ["leave[0].from): is no day and no time"]),
        (ONE + "leave: [{from: 2026-07-01}]", ['the key "to" is missing; write the last day']),
        (ONE + "leave: 2026-07-01", ["must be a list, not text; write a list such as"]),
        (ONE + "holidays: {country: USA}", ['holidays.country): "USA" has no calendar; did you mean "US"?']),
        (ONE + "holidays: {country: US, region: Texas}", ['"Texas" is no region of US']),
        (ONE + "holidays: {region: TX}", ["region): stands without a country; add the country"]),
        (ONE + "holidays: [{day: 24.12.}, {day: 2026-12-24}, {day: 2026-12-24}]",
         ["holidays[0].day): is no day; write a day like", "holidays[2]): is listed twice"]),
        (ONE + "caps: {day: -1, week: 0, open: many, month: 3}",
         ["caps.day): must lie between 1 and 100000; write a whole number from 1", "caps.week): must lie between",
          "caps.open): must be a whole number, not text", "caps.month): is not a known key"]),
        ("caps_zone: Mars/Olympus", ['(caps_zone): no time zone "Mars/Olympus" is known']),
        ("closed_stages: Closed", ["(closed_stages): must be a list"]),
        (QUEUE + "quiet_hours: {zone: America/Chicgo, hours: {mon: ['25:00-26:00']}}",
         ['quiet_hours.zone): no time zone "America/Chicgo" is known; did you mean "America/Chicago"?',
          "quiet_hours.hours.mon[0]): has a time that no clock shows"]),
        (QUEUE + "quiet_hours: {hours: {}}", ['the key "zone" is missing; write an IANA time zone']),
        (QUEUE + "skip_policy: {of_hours: lose_turn, leave: lose}",
         ['skip_policy.of_hours): is not a known key; did you mean "off_hours"?', '"lose" is not a choice']),
        (QUEUE + "skip_policy: {weight_zero: lose_turn}", ["skip_policy.weight_zero): is not a known key"]),
    ],
)  # fmt: skip
def test_what_is_refused_and_how_to_fix_it(text: str, told: list[str]) -> None:
    found = problems(text)
    assert len(found) == len(told)
    for said in told:
        assert any(said in one for one in found), (said, found)


def test_every_problem_comes_at_once() -> None:
    found = problems(
        "caps_zone: Mars\nagents:\n  ana@example.com: {zone: Venus, hours: {mon: ['9-17']}, leave: [{from: x, to: y}],"
        " holidays: {country: ZZ}, caps: {day: 0}}\nqueues:\n  A: {members: [], quiet_hours: {zone: Pluto, hours: {}},"
        " skip_policy: {leave: no}}\n"
    )
    assert len(found) == 9


def test_nothing_of_a_refused_file_is_applied(rig: Rig) -> None:
    good = ABC + "agents: {'12': {caps: {day: 3}, leave: [{from: 2030-01-01, to: 2030-01-02}]}}\n"
    rig.configure(good)
    query = (
        "SELECT string_agg(concat(a.caps, a.leave, a.holidays, q.quiet_hours, q.skip_policy, config_version), ',' "
        "ORDER BY agent_id) FROM agents a JOIN queues q USING (tenant_id) JOIN tenants USING (tenant_id) "
        "WHERE tenant_id = :t"
    )
    before = rig.one(query)
    with pytest.raises(ConfigProblems):
        rig.configure(good.replace("day: 3", "day: 9").replace("2030-01-02", "2029-01-01"))
    assert rig.one(query) == before
    assert not rig.configure(good).changed
    # What is taken out of the file is taken away.
    rig.configure(ABC)
    assert rig.one("SELECT count(*) FROM agents WHERE tenant_id = :t AND (caps IS NOT NULL OR leave IS NOT NULL)") == 0
