"""Who cannot take a lead now, and why: one reason of the closed list in words that say what would change it.

Working hours are wall-clock time in the agent's own zone. The instant `now` is converted to that zone and its weekday
and minute are compared with the timetable; no local time is ever built from a timetable, so nothing is scheduled at a
time that does not exist or exists twice. What follows at a change of the clocks:

- An opening inside the skipped hour opens with the first minute that exists after it; an interval that lies wholly
  inside does not happen on that day.
- Both passes of the repeated hour count as that wall time: open 01:30-09:00 is open from the first 01:30, closed for
  the second 01:00 to 01:29, and open again from the second 01:30.
"""

from __future__ import annotations

import difflib
import re
import zoneinfo
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from uuid import UUID

from routing.fields import ConfigurationProblems, Problem
from routing.model import Agent, Hours, Skip

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = 24 * 60
_WEEK = 7 * _DAY
_INTERVAL = re.compile(r"\s*([0-9]{1,2}):([0-9]{2})\s*[-–]\s*([0-9]{1,2}):([0-9]{2})\s*")
# Files of a zone directory that are no place: the machine's own zone, and placeholders.
_NOT_ZONES = frozenset({"localtime", "posixrules", "Factory"})


class HoursProblems(ConfigurationProblems):
    """A timetable cannot be used."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why an agent cannot take this lead now. ``detail`` says what would change it and holds no personal data."""

    agent_id: UUID
    skip: Skip
    detail: str


@lru_cache(maxsize=1)
def _zone_names() -> frozenset[str]:
    return frozenset(zoneinfo.available_timezones()) - _NOT_ZONES


def known_zone(name: str) -> bool:
    """Whether `name` is an IANA time zone of this installation, spelled exactly (``America/Chicago``)."""
    return name in _zone_names()


@lru_cache(maxsize=1024)  # zoneinfo itself keeps only the last 8, and a tenant may work in more
def _zone(name: str) -> zoneinfo.ZoneInfo | None:
    return zoneinfo.ZoneInfo(name) if known_zone(name) else None


def parse_hours(raw: Mapping[str, Any], where: str = "hours") -> Hours:
    """A weekly timetable from ``{'mon': ['09:00-12:00', '13:00-17:30'], ..}``.

    Days are ``mon`` to ``sun``; a day that is not named is closed. Times are 24-hour wall-clock times in the agent's
    zone; ``24:00`` is allowed as an end. An interval that ends before it starts runs over midnight into the next day
    (``22:00-02:00``). Intervals that overlap or touch are merged: together they say the same.

    Raises HoursProblems with every problem; `where` starts their paths.
    """
    if not isinstance(raw, Mapping):
        raise HoursProblems([Problem(where, "is not a mapping of days", "write {mon: ['09:00-17:00'], ..}")])
    problems: list[Problem] = []
    spans: list[tuple[int, int]] = []  # minutes from Monday 00:00; the end may lie in the next week
    for day, intervals in raw.items():
        if day not in DAYS:
            close = difflib.get_close_matches(day[:20].lower(), DAYS, 1, 0.5) if isinstance(day, str) else []
            fix = f"did you mean {close[0]}?" if close else f"use {', '.join(DAYS)}"
            problems.append(Problem(f"{where}.{str(day)[:20]}", "is no day of the week", fix))
        elif not isinstance(intervals, list | tuple):
            problems.append(Problem(f"{where}.{day}", "is not a list", "write ['09:00-17:00'], or [] for closed"))
        else:
            for at, text in enumerate(intervals):
                span = _span(text, f"{where}.{day}[{at}]")
                if isinstance(span, Problem):
                    problems.append(span)
                else:
                    midnight = DAYS.index(day) * _DAY
                    spans.append((midnight + span[0], midnight + span[1]))
    if problems:
        raise HoursProblems(problems)
    return Hours(_by_day(spans))


def _span(text: Any, where: str) -> tuple[int, int] | Problem:
    """Start and end in minutes from midnight, an end on the next day above 1440; or what is wrong."""
    found = _INTERVAL.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return Problem(where, "is not an interval", "write it in quotes like '09:00-17:30'")
    start_hour, start_minute, end_hour, end_minute = map(int, found.groups())
    start, end = start_hour * 60 + start_minute, end_hour * 60 + end_minute
    if max(start_minute, end_minute) > 59 or start >= _DAY or end > _DAY:
        return Problem(where, "has a time that no clock shows", "use 00:00 to 23:59, and 24:00 for an end")
    if start == end:
        return Problem(where, "starts when it ends", "write 00:00-24:00 for a whole day, or leave it out")
    return start, end if end > start else end + _DAY


def _by_day(spans: list[tuple[int, int]]) -> Mapping[int, tuple[tuple[int, int], ...]]:
    days: dict[int, list[tuple[int, int]]] = {}
    pieces = []
    for start, end in spans:
        midnight = (start // _DAY + 1) * _DAY
        pieces += [(start, min(end, midnight)), (midnight % _WEEK, midnight % _WEEK + end - midnight)]
    for start, end in sorted(pieces):
        if start >= end:
            continue
        day = days.setdefault(start // _DAY, [])
        opens, closes = start % _DAY, start % _DAY + end - start
        if day and opens <= day[-1][1]:
            day[-1] = (day[-1][0], max(day[-1][1], closes))
        else:
            day.append((opens, closes))
    return MappingProxyType({day: tuple(intervals) for day, intervals in days.items()})


def is_open(hours: Hours, zone: str, now: datetime) -> bool:
    """Whether the timetable is open at the instant `now` on the clocks of `zone`; changes of the clocks: see above.

    Raises ValueError for a `now` without a zone, and for a `zone` that :func:`known_zone` does not know.
    """
    weekday, minute = _wall(zone, now)
    return any(start <= minute < end for start, end in hours.days.get(weekday, ()))


def next_opening(hours: Hours, zone: str, now: datetime) -> str | None:
    """The next wall time at which the timetable opens, like ``Mon 09:00 America/Chicago``; None: it never does.

    It is the time as the timetable has it. Raises like :func:`is_open`.
    """
    weekday, minute = _wall(zone, now)
    starts = [day * _DAY + start for day, intervals in hours.days.items() for start, _ in intervals]
    here = weekday * _DAY + minute
    if not starts:
        return None
    start = min(starts, key=lambda start: (start - here - 1) % _WEEK)
    return f"{DAYS[start // _DAY].title()} {start % _DAY // 60:02}:{start % 60:02} {zone}"


def _wall(zone: str, now: datetime) -> tuple[int, int]:
    """Weekday (0 = Monday) and minute of the day that the clocks of `zone` show at `now`."""
    if now.utcoffset() is None:
        raise ValueError("now has no time zone; pass an aware datetime")
    known = _zone(zone)
    if known is None:
        raise ValueError("unknown time zone; use an IANA name such as America/Chicago")
    local = now.astimezone(known)
    return local.weekday(), local.hour * 60 + local.minute


def unavailable(
    agent: Agent,
    weight: int,
    now: datetime,
    on_lead: Collection[UUID],
    *,
    declined: Collection[UUID] = (),
    skips: bool,
    weights: bool,
) -> Unavailable | None:
    """Why `agent` cannot take a lead at `now`, or None when they can.

    `weight` is the member's in the queue (pass 1 for a direct target); `on_lead` are the agents who hold this lead
    already, in any role, `declined` those who had it before it was given back. `skips` and `weights` say whether these
    capabilities are on: without `skips` only an agent who is deactivated, or declined this lead, is passed over,
    without `weights` a weight of 0 counts like any other.
    Of several reasons the first is given, in the order of :class:`routing.model.Skip`. A `zone` that nobody can read
    counts as off hours: no lead goes to someone who may be off hours.

    Raises ValueError for a `now` without a time zone.
    """
    if now.utcoffset() is None:
        raise ValueError("now has no time zone; pass an aware datetime")

    def because(skip: Skip, detail: str) -> Unavailable:
        return Unavailable(agent.agent_id, skip, detail)

    if not agent.active:
        return because(
            Skip.DEACTIVATED, "deactivated in the CRM; activate the agent there, then `turnlock agents sync`"
        )
    if agent.refused:
        fix = "activate the agent in the CRM, then `turnlock agents sync`"
        return because(Skip.DEACTIVATED, f"the CRM refused this agent as an owner; {fix}")
    if skips and (agent.paused_by_admin or agent.paused_by_crm):
        details = ["paused by the admin; `turnlock resume`"] if agent.paused_by_admin else []
        details += ["paused in the CRM; switch the agent on there"] if agent.paused_by_crm else []
        return because(Skip.PAUSED, ", and ".join(details))
    if skips and agent.hours is not None:
        if not known_zone(agent.zone):
            return because(Skip.OFF_HOURS, "has working hours in an unknown time zone; give the agent an IANA zone")
        if not is_open(agent.hours, agent.zone, now):
            opening = next_opening(agent.hours, agent.zone, now)
            detail = f"opens {opening}" if opening else "has no working hours at all; add some in the configuration"
            return because(Skip.OFF_HOURS, detail)
    if skips and agent.agent_id in on_lead:
        return because(Skip.ALREADY_ON_LEAD, "holds this lead already in another role; nothing to change")
    if agent.agent_id in declined:
        return because(Skip.DECLINED, "had this lead before; nothing to change")
    if weights and weight <= 0:
        return because(Skip.WEIGHT_ZERO, "has weight 0 in this queue; give the member a weight above 0")
    return None
