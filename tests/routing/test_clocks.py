"""Leave, holidays, quiet hours, caps' windows and "who is back when", minute by minute over changes of the clocks.

The reference is ``zdump`` and plain arithmetic on the wall times that it tells.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest

from routing import absence, caps, skips
from routing.clocks import instants, known_zone, shown, wall
from routing.model import Agent, Caps, Holidays, Leave, Load, Quiet, Skip
from routing.skips import DAYS, next_change, parse_hours, quiet_until, unavailable
from tests.routing import zdump

ANA = Agent(UUID(int=1), "1", "Ana Example")
AWKWARD = (
    "Australia/Lord_Howe", "Antarctica/Troll", "Africa/Casablanca", "Pacific/Chatham", "America/Santiago",
    "Europe/Dublin", "America/New_York", "Pacific/Apia",
)  # fmt: skip
STILL = int(datetime(2026, 6, 4, 12, tzinfo=UTC).timestamp()) // 60
RAW = {day: ["00:30-01:30", "02:05-02:15", "02:40-03:10", "22:00-23:40"] for day in DAYS}
HOURS = parse_hours(RAW)
OPEN = [(30, 90), (125, 135), (160, 190), (1320, 1420)]  # the same in minutes of a day, by hand
CAPS = Caps(hour=3, day=5, week=9)
AHEAD = 2 * 1440


def minutes(local: datetime) -> int:
    return local.hour * 60 + local.minute


def disagreements(zone: str, around: int, step: int) -> tuple[list[str], int]:
    """Where routing's answers differ from the reference, within `around` minutes of each change of the clocks."""
    clock, wrong = zdump.clock(zone), list[str]()
    moments = clock.changes()
    for number, moment in enumerate(moments or [STILL]):
        day = clock.wall(moment).date()
        tomorrow = datetime.combine(day, datetime.min.time()) + timedelta(days=1)
        # Each other year a leave that begins and ends around the hour that is moved; an extra holiday tomorrow.
        leave = Leave(tomorrow - timedelta(hours=22, minutes=20), tomorrow - timedelta(hours=21, minutes=15))
        agent = replace(
            ANA,
            zone=zone,
            hours=HOURS,
            leave=(leave,) if number // 2 % 2 else (),
            holidays=Holidays(extra=MappingProxyType({tomorrow.date(): "Office closed"})),
        )
        span = range(moment - around, moment + around)
        back: dict[int, int] = {}
        near = {minute: clock.wall(minute) for minute in range(moment - 1800, moment + 1800)}
        first = min(minute for minute, local in near.items() if local >= leave.start)
        ends = [minute for minute, local in near.items() if local == leave.end]
        last = max(ends, default=min(minute for minute, local in near.items() if local >= leave.end))
        away = range(first, last) if agent.leave else range(0)
        for minute in reversed(range(span.start, span.stop + AHEAD)):
            local = clock.wall(minute)
            off = minute in away, local.date() == tomorrow.date()
            works = not any(off) and any(start <= minutes(local) < end for start, end in OPEN)
            back[minute] = minute if works else back.get(minute + 1, -1)
            if minute not in span:
                continue
            found = unavailable(agent, 1, zdump.instant(minute), (), skips=True, weights=True)
            skip = Skip.LEAVE if off[0] else Skip.HOLIDAY if off[1] else None if works else Skip.OFF_HOURS
            if (found.skip if found else None) is not skip:
                wrong.append(f"{zone} {zdump.instant(minute)}: {found} instead of {skip}")
        for minute in span[::step]:
            now = zdump.instant(minute)
            if next_change(agent, now) != zdump.instant(back[minute]):
                wrong.append(f"{zone} {now}: back {next_change(agent, now)}, not {zdump.instant(back[minute])}")
            wrong += [f"{zone} {now}: {text}" for text in _windows(clock, zone, minute)]
    return wrong, len(moments)


def label(name: str, local: datetime) -> datetime:
    """What the clock calls the hour, the day or the week of a wall time."""
    hour = local.replace(minute=0)
    midnight = hour.replace(hour=0)
    return {"hour": hour, "day": midnight, "week": midnight - timedelta(days=midnight.weekday())}[name]


def _windows(clock: zdump.Clock, zone: str, minute: int) -> list[str]:
    """Each window begins with the first minute of its label, ends with the first of a later one, and no earlier."""
    wrong = []
    for name, (start, end) in caps.windows(replace(CAPS, zone=zone), zdump.instant(minute)).items():
        first, last = (int(edge.timestamp()) // 60 for edge in (start, end))
        this = label(name, clock.wall(minute))
        before, begins, ends, after = (label(name, clock.wall(at)) for at in (first - 1, first, last - 1, last))
        if not before < begins == this == ends < after or not first <= minute < last:
            wrong.append(f"the {name} is {start} to {end}")
    return wrong


def test_minute_by_minute_in_awkward_zones() -> None:
    seen = 0
    for zone in AWKWARD:
        wrong, changes = disagreements(zone, 200, 13)
        assert wrong == []
        seen += changes
    assert seen >= 6 * (len(AWKWARD) - 1)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(8))
def test_minute_by_minute_in_every_zone_of_tzdata(part: int) -> None:
    zones = sorted(zone for zone in zoneinfo.available_timezones() if known_zone(zone))
    assert len(zones) > 400
    found = [text for zone in zones[part::8] for text in disagreements(zone, 180, 11)[0]]
    assert found == []


def no_changes(*_: object) -> Iterator[datetime]:
    return iter(())


def second_pass_first(zone: str, local: datetime) -> tuple[datetime, ...]:
    return instants(zone, local)[::-1]


def adding(zone: str, local: datetime, after: datetime) -> datetime:
    """So many minutes from now, instead of asking when the clock shows that time."""
    return after + (local - wall(zone, after))


@pytest.mark.parametrize(
    ("module", "name", "twin"),
    [
        (skips, "changes", no_changes),
        (absence, "instants", second_pass_first),
        (caps, "next_instant", adding),
        (caps, "first_instant", lambda zone, local: second_pass_first(zone, local)[0]),
    ],
)
def test_a_broken_twin_fails_the_check(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, twin: Any) -> None:
    monkeypatch.setattr(module, name, twin)
    assert disagreements("America/New_York", 90, 13)[0]


# -- instants of a wall time -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("zone", "local", "expected"),
    [
        ("America/New_York", "2026-06-01T09:00", ["2026-06-01T13:00"]),
        ("America/New_York", "2026-11-01T01:30", ["2026-11-01T05:30", "2026-11-01T06:30"]),
        ("America/New_York", "2026-03-08T02:30", ["2026-03-08T07:00"]),  # skipped: when the clocks say 03:00
        ("Australia/Lord_Howe", "2026-10-04T02:10", ["2026-10-03T15:30"]),
        ("Asia/Beirut", "2026-03-29T00:20", ["2026-03-28T22:00"]),
        ("UTC", "2026-03-29T00:20", ["2026-03-29T00:20"]),
    ],
)
def test_when_the_clocks_show_a_time(zone: str, local: str, expected: Sequence[str]) -> None:
    found = instants(zone, datetime.fromisoformat(local))
    assert [f"{moment:%Y-%m-%dT%H:%M}" for moment in found] == list(expected)


# -- who is back when ------------------------------------------------------------------------------------------
NOW = datetime(2026, 7, 2, 15, 0, tzinfo=UTC)  # a Thursday, 10:00 in Chicago
CHICAGO = replace(ANA, zone="America/Chicago")
OFFICE = parse_hours({day: ["09:00-17:00"] for day in DAYS[:5]})


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("agent", "load", "back"),
    [
        (CHICAGO, None, NOW),
        (replace(CHICAGO, active=False), None, None),
        (replace(CHICAGO, refused=True), None, None),
        (replace(CHICAGO, paused_by_crm=True), None, None),
        (replace(CHICAGO, paused_by_admin=True), None, None),
        (replace(CHICAGO, paused_by_admin=True, paused_until=at("2026-07-02T18:00")), None, at("2026-07-02T18:00")),
        (replace(CHICAGO, paused_by_admin=True, paused_until=NOW), None, NOW),  # a pause that is over
        # The pause ends on the evening of the 2nd, the 3rd is Independence Day observed, then comes the week-end.
        (
            replace(
                CHICAGO,
                paused_by_admin=True,
                paused_until=at("2026-07-02T23:30"),
                hours=OFFICE,
                holidays=Holidays("US"),
            ),
            None,
            at("2026-07-06T14:00"),
        ),
        (replace(CHICAGO, hours=parse_hours({})), None, None),
        (replace(CHICAGO, leave=(Leave(datetime(2026, 7, 1), datetime(2026, 7, 11)),), hours=OFFICE), None,
         at("2026-07-13T14:00")),
        (replace(CHICAGO, caps=Caps(hour=1, zone="America/Chicago")), Load(hour=1), at("2026-07-02T16:00")),
        (replace(CHICAGO, caps=Caps(hour=1, day=2, zone="America/Chicago")), Load(1, 2, 2, 0), at("2026-07-03T05:00")),
        (replace(CHICAGO, caps=Caps(week=9, zone="UTC")), Load(1, 2, 9, 0), at("2026-07-06T00:00")),
        (replace(CHICAGO, caps=Caps(day=2, zone="America/Chicago"), hours=OFFICE), Load(1, 2, 2),
         at("2026-07-03T14:00")),
        (replace(CHICAGO, caps=Caps(hour=1, open=1)), Load(1, 1, 1, 1), None),
        (replace(CHICAGO, caps=Caps(hour=1)), None, NOW),  # caps are not looked at without a load
    ],
)  # fmt: skip
def test_who_is_back_when(agent: Agent, load: Load | None, back: datetime | None) -> None:
    assert next_change(agent, NOW, load) == back
    out = unavailable(agent, 1, NOW, (), load=load, skips=True, weights=True)
    assert (out is None) is (back == NOW)


def test_nobody_is_followed_for_ever() -> None:
    always = tuple(Leave(datetime(year, 1, 1), datetime(year + 1, 1, 1)) for year in range(2026, 2100))
    assert next_change(replace(CHICAGO, leave=always), NOW) == datetime(2100, 1, 1, 6, tzinfo=UTC)


# -- quiet hours -----------------------------------------------------------------------------------------------
NIGHT = Quiet(parse_hours({day: ["21:00-08:00"] for day in DAYS}), "America/Chicago")


def test_a_queue_is_quiet_on_its_own_clock_and_says_until_when() -> None:
    assert quiet_until(None, NOW) is None
    assert quiet_until(NIGHT, NOW) is None
    assert quiet_until(NIGHT, at("2026-07-03T01:59")) is None
    assert quiet_until(NIGHT, at("2026-07-03T02:00")) == (
        at("2026-07-03T13:00"),
        "until Fri 3 Jul 2026 08:00 America/Chicago",
    )
    # The night in which an hour is skipped ends on time.
    found = quiet_until(NIGHT, at("2026-03-08T05:00"))
    assert found is not None
    assert found[0] == at("2026-03-08T13:00")
    always = Quiet(parse_hours({day: ["00:00-24:00"] for day in DAYS}), "UTC")
    assert quiet_until(always, NOW) == (None, "always; shorten the queue's quiet hours")
    assert quiet_until(replace(NIGHT, zone="Mars/Olympus"), at("2026-07-03T02:00")) is None


def test_an_instant_for_people() -> None:
    assert shown("America/Chicago", at("2026-07-06T14:00")) == "Mon 6 Jul 2026 09:00 America/Chicago"
    assert shown("Mars/Olympus", at("2026-07-06T14:00")) == "Mon 6 Jul 2026 14:00 UTC"
