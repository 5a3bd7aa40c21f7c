"""Skips: who cannot take a lead now, and working hours on the agent's own clock, across changes of the clocks."""

from __future__ import annotations

import itertools
import zoneinfo
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.clocks import known_zone
from routing.fields import DAYS
from routing.model import Agent, Hours, Skip
from routing.skips import HoursProblems, is_open, next_opening, parse_hours, unavailable
from tests.routing import zdump

ANA = Agent(UUID(int=1), "1", "Ana Example")
OFFICE = parse_hours({day: ["09:00-17:00"] for day in DAYS[:5]})
EARLY = parse_hours({day: ["08:00-09:00"] for day in DAYS})
NOW = datetime(2026, 6, 4, 12, 0, tzinfo=UTC)  # a Thursday


def at(text: str) -> datetime:
    """An instant, written in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def why(agent: Agent, weight: int = 1, now: datetime = NOW, **more: Any) -> tuple[str, str] | None:
    more = {"on_lead": (), "skips": True, "weights": True} | more
    out = unavailable(agent, weight, now, **more)
    if out is None:
        return None
    assert out.agent_id == agent.agent_id
    return out.skip.value, out.detail


# -- the closed list ------------------------------------------------------------------------------------------
BOSS = replace(ANA, zone="America/Chicago", hours=parse_hours({"mon": ["09:00-12:00"]}))


@pytest.mark.parametrize(
    ("agent", "weight", "more", "skip", "says"),
    [
        (replace(ANA, active=False), 1, {}, "deactivated", "activate the agent there, then `turnlock agents sync`"),
        (replace(ANA, refused=True), 1, {}, "deactivated", "refused this agent"),
        (replace(ANA, paused_by_admin=True), 1, {}, "paused", "paused by the admin; `turnlock resume`"),
        (replace(ANA, paused_by_crm=True), 1, {}, "paused", "paused in the CRM; switch the agent on there"),
        (BOSS, 1, {}, "off_hours", "opens Mon 09:00 America/Chicago"),
        (replace(BOSS, hours=Hours({})), 1, {}, "off_hours", "no working hours at all"),
        (replace(BOSS, zone="Mars/Olympus"), 1, {}, "off_hours", "unknown time zone"),
        (ANA, 1, {"on_lead": {ANA.agent_id}}, "already_on_lead", "another role"),
        (ANA, 1, {"declined": {ANA.agent_id}}, "declined", "had this lead before"),
        (ANA, 0, {}, "weight_zero", "weight above 0"),
        (replace(BOSS, active=False, paused_by_admin=True), 0, {"on_lead": {ANA.agent_id}}, "deactivated", ""),
        (replace(BOSS, paused_by_admin=True), 0, {"on_lead": {ANA.agent_id}}, "paused", ""),
        (BOSS, 0, {"on_lead": {ANA.agent_id}}, "off_hours", ""),
        (ANA, 0, {"on_lead": {ANA.agent_id}, "declined": {ANA.agent_id}}, "already_on_lead", ""),
    ],
)
def test_a_skip_has_its_reason_and_what_would_change_it(
    agent: Agent, weight: int, more: dict[str, Any], skip: str, says: str
) -> None:
    found = why(agent, weight, **more)
    assert found is not None
    assert found[0] == skip
    assert says in found[1]
    assert agent.name not in found[1]


def test_both_pauses_are_told_because_both_must_end() -> None:
    found = why(replace(ANA, paused_by_admin=True, paused_by_crm=True))
    assert found == (
        "paused",
        "paused by the admin; `turnlock resume`, and paused in the CRM; switch the agent on there",
    )


def test_nothing_stands_in_the_way() -> None:
    assert why(ANA) is None
    assert why(replace(ANA, hours=OFFICE)) is None
    assert why(replace(ANA, zone="Mars/Olympus")) is None  # without hours the zone does not matter
    assert why(ANA, on_lead={UUID(int=2)}, declined={UUID(int=2)}) is None


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("agent", "more"),
    [
        (replace(ANA, paused_by_admin=True), {}),
        (replace(ANA, paused_by_crm=True), {}),
        (BOSS, {}),
        (replace(BOSS, zone="Mars/Olympus"), {}),
        (ANA, {"on_lead": {ANA.agent_id}}),
    ],
)
def test_without_the_capability_only_the_deactivated_are_passed_over(
    agent: Agent, more: dict[str, Any], weights: bool
) -> None:
    assert why(agent, **more) is not None
    assert why(agent, skips=False, weights=weights, **more) is None
    for gone in (replace(agent, active=False), replace(agent, refused=True)):
        found = why(gone, skips=False, weights=weights, **more)
        assert found is not None
        assert found[0] == "deactivated"
    assert (why(agent, 0, skips=False, weights=weights, **more) is not None) is weights


def test_whoever_had_a_returned_lead_is_passed_over_whatever_is_off() -> None:
    assert why(ANA, declined={ANA.agent_id}, skips=False, weights=False) == why(ANA, declined={ANA.agent_id})


def test_weight_zero_counts_only_with_weights() -> None:
    assert why(ANA, 0, weights=False) is None
    assert why(ANA, 0, weights=True) is not None


def test_every_skip_has_a_remedy() -> None:
    assert all(skip.remedy for skip in Skip)


def test_an_instant_without_zone_is_refused() -> None:
    naive = NOW.replace(tzinfo=None)
    for of in (lambda: why(ANA, now=naive), lambda: is_open(OFFICE, "UTC", naive)):
        with pytest.raises(ValueError, match="aware"):
            of()
    with pytest.raises(ValueError, match="unknown time zone"):
        is_open(OFFICE, "Mars/Olympus", NOW)


# -- each on their own clock ----------------------------------------------------------------------------------
MADRID = replace(ANA, zone="Europe/Madrid", hours=parse_hours({d: ["09:00-10:00"] for d in DAYS}))
LONDON = replace(ANA, agent_id=UUID(int=2), zone="Europe/London", hours=EARLY)


def test_two_agents_in_two_zones_at_half_past_eight_utc() -> None:
    january, july = at("2026-01-14T08:30"), at("2026-07-15T08:30")
    assert why(MADRID, now=january) is None  # 09:30 there
    assert why(MADRID, now=july) == ("off_hours", "opens Thu 09:00 Europe/Madrid")  # 10:30
    assert why(LONDON, now=january) is None  # 08:30
    assert why(LONDON, now=july) == ("off_hours", "opens Thu 08:00 Europe/London")  # 09:30


def test_works_monday_to_wednesday() -> None:
    agent = replace(ANA, zone="America/New_York", hours=parse_hours({d: ["00:00-24:00"] for d in DAYS[:3]}))
    week = [why(agent, now=at(f"2026-06-{day:02}T16:00")) is None for day in range(1, 8)]  # 1 June is a Monday
    assert week == [True, True, True, False, False, False, False]
    assert why(agent, now=at("2026-06-01T03:59")) == ("off_hours", "opens Mon 00:00 America/New_York")
    assert why(agent, now=at("2026-06-01T04:00")) is None
    assert why(agent, now=at("2026-06-04T03:59")) is None
    assert why(agent, now=at("2026-06-04T04:00")) is not None


def open_minutes(hours: Hours, zone: str, start: str, minutes: int) -> list[str]:
    """The UTC times at which `hours` opens (+) and closes (-), from `start` on."""
    changes, was = [], is_open(hours, zone, at(start) - timedelta(minutes=1))
    for minute in range(minutes):
        now = at(start) + timedelta(minutes=minute)
        if (is_now := is_open(hours, zone, now)) is not was:
            changes.append(f"{'+' if is_now else '-'}{now:%H:%M}")
        was = is_now
    return changes


@pytest.mark.parametrize(
    ("zone", "hours", "start", "changes"),
    [
        # 2026-11-01: New York goes from 01:59 EDT (05:59Z) to 01:00 EST (06:00Z).
        ("America/New_York", "01:30-09:00", "2026-11-01T05:00", ["+05:30", "-06:00", "+06:30", "-14:00"]),
        ("America/New_York", "01:00-02:00", "2026-11-01T04:00", ["+05:00", "-07:00"]),
        ("America/New_York", "00:30-01:30", "2026-11-01T04:00", ["+04:30", "-05:30", "+06:00", "-06:30"]),
        ("America/New_York", "09:00-10:00", "2026-11-01T10:00", ["+14:00", "-15:00"]),
        # 2027-03-14: New York goes from 01:59 EST (06:59Z) to 03:00 EDT (07:00Z).
        ("America/New_York", "02:30-09:00", "2027-03-14T05:00", ["+07:00", "-13:00"]),
        ("America/New_York", "02:00-03:00", "2027-03-14T05:00", []),
        ("America/New_York", "01:00-02:30", "2027-03-14T05:00", ["+06:00", "-07:00"]),
        ("America/New_York", "03:00-04:00", "2027-03-14T05:00", ["+07:00", "-08:00"]),
        # Lord Howe moves by half an hour: 2026-04-05 from 01:59 (+11, 14:59Z) to 01:30 (+10:30) ...
        ("Australia/Lord_Howe", "01:45-03:00", "2026-04-04T14:00", ["+14:45", "-15:00", "+15:15", "-16:30"]),
        # ... and 2026-10-04 from 01:59 (+10:30, 15:29Z) to 02:30 (+11).
        ("Australia/Lord_Howe", "02:15-03:00", "2026-10-03T14:00", ["+15:30", "-16:00"]),
        # Beirut changes at midnight: 2026-03-28 ends, then comes 01:00 (+03) on the 29th.
        ("Asia/Beirut", "00:00-02:00", "2026-03-28T21:30", ["+22:00", "-23:00"]),
    ],
)
def test_where_the_clocks_change(zone: str, hours: str, start: str, changes: list[str]) -> None:
    day = at(start).astimezone(zoneinfo.ZoneInfo(zone)) + timedelta(hours=1)
    timetable = parse_hours({DAYS[day.weekday()]: [hours]})
    assert open_minutes(timetable, zone, start, 11 * 60) == changes


# -- minute by minute against zdump -----------------------------------------------------------------------------
ZONES = (
    "America/New_York", "America/Chicago", "Europe/London", "Australia/Lord_Howe", "Asia/Beirut", "America/Santiago",
    "Africa/Cairo", "Africa/Casablanca", "Antarctica/Troll", "Pacific/Chatham", "America/Nuuk", "Europe/Dublin",
    "Pacific/Apia", "Asia/Kathmandu",
)  # fmt: skip
TIMETABLES: list[dict[str, list[str]]] = [
    {day: ["09:00-17:00"] for day in DAYS},
    {day: ["00:30-01:30", "02:15-02:45", "22:00-24:00"] for day in DAYS},
    {"sat": ["22:00-02:20"], "sun": ["02:30-03:00", "23:30-00:45"], "thu": ["00:00-24:00"]},
]
Open = Callable[[Hours, str, datetime], bool]
_EPOCH_WEEKDAY = 3  # 1 January 1970 was a Thursday


def bitmap(raw: dict[str, list[str]]) -> list[bool]:
    """Which minutes of a week are open, straight from the text."""
    week = [False] * 10_080
    for day, intervals in raw.items():
        for text in intervals:
            start, end = (int(t[:2]) * 60 + int(t[3:]) for t in text.split("-"))
            for minute in range(start, end if end > start else end + 1440):
                week[(DAYS.index(day) * 1440 + minute) % 10_080] = True
    return week


def differences(answer: Open, zones: Sequence[str], around: int) -> tuple[list[str], int]:
    """The shared check: where `answer` differs from what zdump says, and how many changes of the clocks were seen."""
    tables = [(parse_hours(raw), bitmap(raw)) for raw in TIMETABLES]
    wrong, seen = [], 0
    for name in zones:
        clock = zdump.clock(name)
        moments = clock.changes()
        seen += len(moments)
        for moment in moments or [int(NOW.timestamp()) // 60]:
            for minute in range(moment - around, moment + around):
                wall = (minute + clock.shift(minute) + _EPOCH_WEEKDAY * 1440) % 10_080
                now = zdump.instant(minute)
                wrong += [f"{name} {now}" for hours, week in tables if answer(hours, name, now) is not week[wall]]
    return wrong, seen


def test_minute_by_minute_around_every_change_of_the_clocks() -> None:
    wrong, seen = differences(is_open, ZONES, 240)
    assert wrong == []
    assert seen >= 6 * (len(ZONES) - 2)


def in_utc(hours: Hours, zone: str, now: datetime) -> bool:
    return is_open(hours, "UTC", now)


def winter_all_year(hours: Hours, zone: str, now: datetime) -> bool:
    fixed = timezone(at("2026-01-15T00:00").astimezone(zoneinfo.ZoneInfo(zone)).utcoffset() or timedelta())
    local = now.astimezone(fixed).replace(tzinfo=UTC)
    return is_open(hours, "UTC", local)


def scheduled(hours: Hours, zone: str, now: datetime) -> bool:
    """Builds today's openings as instants instead of reading the clock."""
    local = now.astimezone(zoneinfo.ZoneInfo(zone))
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    return any(
        (midnight + timedelta(minutes=start)).astimezone(UTC)
        <= now
        < (midnight + timedelta(minutes=end)).astimezone(UTC)
        for start, end in hours.days.get(local.weekday(), ())
    )


@pytest.mark.parametrize("twin", [in_utc, winter_all_year, scheduled])
def test_a_broken_twin_fails_the_check(twin: Open) -> None:
    assert differences(twin, ["America/New_York"], 240)[0]


# -- zones and timetables -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["UTC", "America/Chicago", "Asia/Kathmandu"])
def test_zones_that_are_known(name: str) -> None:
    assert known_zone(name)


@pytest.mark.parametrize(
    "name",
    ["", "Mars/Olympus", "america/chicago", "America", "../../etc/passwd", "/etc/localtime", "localtime", "EST\x00"],
)
def test_zones_that_are_not(name: str) -> None:
    assert not known_zone(name)


@pytest.mark.parametrize(
    ("raw", "days"),
    [
        ({}, {}),
        ({"mon": []}, {}),
        ({"mon": ["09:00-12:00", "13:00-17:30"]}, {0: ((540, 720), (780, 1050))}),
        ({"mon": ["13:00-17:30", "9:00 - 12:00"]}, {0: ((540, 720), (780, 1050))}),
        ({"mon": ("09:00–12:00",)}, {0: ((540, 720),)}),
        ({"mon": ["00:00-24:00"]}, {0: ((0, 1440),)}),
        ({"fri": ["22:00-02:00"]}, {4: ((1320, 1440),), 5: ((0, 120),)}),
        ({"sun": ["22:00-02:00"]}, {6: ((1320, 1440),), 0: ((0, 120),)}),
        ({"fri": ["22:00-00:00"]}, {4: ((1320, 1440),)}),
        ({"fri": ["22:00-02:00"], "sat": ["01:00-05:00"]}, {4: ((1320, 1440),), 5: ((0, 300),)}),
        ({"mon": ["09:00-12:00", "12:00-13:00", "10:00-11:00"]}, {0: ((540, 780),)}),
        ({"mon": ["23:59-23:58"]}, {0: ((1439, 1440),), 1: ((0, 1438),)}),
    ],
)
def test_a_timetable(raw: dict[str, Any], days: dict[int, Any]) -> None:
    assert parse_hours(raw).days == days


@pytest.mark.parametrize(
    ("raw", "where", "says"),
    [
        (None, "hours", "not a mapping"),
        (["09:00-17:00"], "hours", "not a mapping"),
        ({"monday": []}, "hours.monday", "did you mean mon?"),
        ({"Mon": []}, "hours.Mon", "did you mean mon?"),
        ({"x": []}, "hours.x", "use mon, tue"),
        ({1: []}, "hours.1", "no day"),
        ({"mon": "09:00-17:00"}, "hours.mon", "not a list"),
        ({"mon": None}, "hours.mon", "[] for closed"),
        ({"mon": [540]}, "hours.mon[0]", "in quotes"),
        ({"mon": ["9-17"]}, "hours.mon[0]", "in quotes"),
        ({"mon": ["09:00-17:00", "9am-5pm"]}, "hours.mon[1]", "in quotes"),
        ({"mon": ["09:00-24:01"]}, "hours.mon[0]", "no clock shows"),
        ({"mon": ["09:60-10:00"]}, "hours.mon[0]", "no clock shows"),
        ({"mon": ["24:00-01:00"]}, "hours.mon[0]", "no clock shows"),
        ({"mon": ["09:00-09:00"]}, "hours.mon[0]", "00:00-24:00"),
        ({"mon": ["٠٩:٠٠-١٧:٠٠"]}, "hours.mon[0]", "in quotes"),
    ],
)
def test_a_timetable_that_cannot_be_used(raw: Any, where: str, says: str) -> None:
    with pytest.raises(HoursProblems) as caught:
        parse_hours(raw)
    (problem,) = caught.value.problems
    assert problem.where == where
    assert says in str(problem)
    assert all((problem.where, problem.what, problem.fix))


def test_all_problems_of_a_timetable_come_at_once() -> None:
    with pytest.raises(HoursProblems) as caught:
        parse_hours({"mon": ["x", "09:00-10:00", "25:00-26:00"], "noon": [], "tue": 5}, "agents.ana.hours")
    assert [p.where for p in caught.value.problems] == [
        "agents.ana.hours.mon[0]", "agents.ana.hours.mon[2]", "agents.ana.hours.noon", "agents.ana.hours.tue",
    ]  # fmt: skip


_clock = st.integers(0, 1439).map(lambda m: f"{m // 60:02}:{m % 60:02}")
_intervals = st.tuples(_clock, _clock | st.just("24:00")).filter(lambda p: p[0] != p[1]).map("-".join)
_raw_hours = st.dictionaries(st.sampled_from(DAYS), st.lists(_intervals, max_size=4))


@settings(max_examples=40, deadline=None)
@given(_raw_hours)
def test_a_timetable_says_what_its_text_says(raw: dict[str, list[str]]) -> None:
    hours = parse_hours(raw)
    week = [False] * 10_080
    for day, intervals in hours.days.items():
        assert list(intervals) == sorted(intervals)
        assert all(0 <= start < end <= 1440 for start, end in intervals)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(intervals))
        for start, end in intervals:
            week[day * 1440 + start : day * 1440 + end] = [True] * (end - start)
    assert week == bitmap(raw)


@settings(max_examples=100, deadline=None)
@given(_raw_hours, st.integers(0, 10_079))
def test_the_next_opening_is_the_first_after_now(raw: dict[str, list[str]], minute: int) -> None:
    hours, monday = parse_hours(raw), at("2026-06-01T00:00")
    now = monday + timedelta(minutes=minute)
    if is_open(hours, "UTC", now):
        return
    later = (now + timedelta(minutes=m) for m in range(1, 10_081))
    first = next((t for t in later if is_open(hours, "UTC", t)), None)
    assert next_opening(hours, "UTC", now) == (None if first is None else f"{first:%a %H:%M} UTC")
