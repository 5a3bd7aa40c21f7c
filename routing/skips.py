"""Who cannot take a lead now, and why: one reason of the closed list in words that say what would change it.

Working hours and holidays are wall-clock time in the agent's own zone (see :mod:`routing.clocks`): the instant `now` is
converted and compared with what the admin wrote. What follows at a change of the clocks:

- An opening inside the skipped hour opens with the first minute that exists after it; an interval that lies wholly
  inside does not happen on that day.
- Both passes of the repeated hour count as that wall time: open 01:30-09:00 is open from the first 01:30, closed for
  the second 01:00 to 01:29, and open again from the second 01:30.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from uuid import UUID

from routing import caps
from routing.absence import holiday_on, leave_ends
from routing.clocks import changes, first_instant, instants, known_zone, next_instant, shown, wall
from routing.fields import DAYS, ConfigurationProblems, Problem
from routing.model import Agent, Hours, Load, Quiet, Skip

_DAY = 24 * 60
_WEEK = 7 * _DAY
_INTERVAL = re.compile(r"\s*([0-9]{1,2}):([0-9]{2})\s*[-–]\s*([0-9]{1,2}):([0-9]{2})\s*")
# An interval that a change of the clocks swallows comes again a week later.
_FORTNIGHT = 15
# So many absences in a row (a holiday, a leave, a closed day ...) are followed before giving up: years of them.
_FOLLOWED = 500


class HoursProblems(ConfigurationProblems):
    """A timetable cannot be used."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why an agent cannot take this lead now. ``detail`` says what would change it and holds no personal data."""

    agent_id: UUID
    skip: Skip
    detail: str


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


@lru_cache(maxsize=256)  # asked for every member at one instant, and a queue works in few zones
def _wall(zone: str, now: datetime) -> tuple[int, int]:
    """Weekday (0 = Monday) and minute of the day that the clocks of `zone` show at `now`."""
    local = wall(zone, now)
    return local.weekday(), local.hour * 60 + local.minute


def _opens(hours: Hours, zone: str, after: datetime) -> datetime | None:
    """The instant at which the timetable, closed at `after`, opens next; None when it does not."""
    day = wall(zone, after).replace(hour=0, minute=0, second=0, microsecond=0)
    for ahead in range(_FORTNIGHT + 1):
        midnight = day + timedelta(days=ahead)
        starts = [start for start, _ in hours.days.get(midnight.weekday(), ())]
        found = [moment for start in starts for moment in instants(zone, midnight + timedelta(minutes=start))]
        # The clocks may also be moved into an interval that began before.
        ends = first_instant(zone, midnight + timedelta(days=1))
        found += changes(zone, max(after, first_instant(zone, midnight)), ends)
        opening = min((m for m in found if m > after and is_open(hours, zone, m)), default=None)
        if opening is not None:
            return opening
    return None


def _closes(hours: Hours, zone: str, after: datetime) -> datetime | None:
    """The instant at which the timetable, open at `after`, closes next; None when it never does."""
    closed: dict[int, tuple[tuple[int, int], ...]] = {}
    for day in range(7):
        ends = [0, *(edge for interval in hours.days.get(day, ()) for edge in interval), _DAY]
        gaps = zip(ends[::2], ends[1::2], strict=True)
        closed[day] = tuple((start, end) for start, end in gaps if start < end)
    return _opens(Hours(closed), zone, after)


def quiet_until(quiet: Quiet | None, now: datetime) -> tuple[datetime | None, str] | None:
    """Whether a queue holds its leads at `now`: until when (None: always) and that in words. None when it does not.

    A zone that nobody can read is no reason to hold a lead.
    """
    if quiet is None or not known_zone(quiet.zone) or not is_open(quiet.hours, quiet.zone, now):
        return None
    ends = _closes(quiet.hours, quiet.zone, now)
    return ends, f"until {shown(quiet.zone, ends)}" if ends else "always; shorten the queue's quiet hours"


# -- agents -----------------------------------------------------------------------------------------------------


def paused(agent: Agent, now: datetime) -> bool:
    """Whether the admin's pause lasts at `now`."""
    return agent.paused_by_admin and (agent.paused_until is None or now < agent.paused_until)


def _absence(agent: Agent, now: datetime) -> tuple[Skip, datetime | None, str] | None:
    """Leave, holiday or closed hours at `now`: the reason, and of the first two the end and that in words.

    When closed hours end is left to who needs it: a decision asks this of every member under the queue's lock.
    """
    if agent.hours is None and not agent.leave and agent.holidays is None:
        return None
    if not known_zone(agent.zone):
        return Skip.OFF_HOURS, None, ""  # no lead goes to someone who may be off hours
    ends = leave_ends(agent.leave, agent.zone, now) if agent.leave else None
    if ends is not None:
        return Skip.LEAVE, ends, f"on leave until {shown(agent.zone, ends)}"
    if agent.holidays is not None:
        day = wall(agent.zone, now).date()
        holiday = holiday_on(agent.holidays, day)
        if holiday is not None:
            ends = next_instant(agent.zone, datetime.combine(day, time()) + timedelta(days=1), now)
            return Skip.HOLIDAY, ends, f"{holiday}, until {shown(agent.zone, ends)}"
    if agent.hours is not None and not is_open(agent.hours, agent.zone, now):
        return Skip.OFF_HOURS, None, ""
    return None


def _back(agent: Agent, now: datetime) -> datetime | None:
    """The first instant from `now` on without leave, holiday and closed hours; None when there is none to be seen."""
    for _ in range(_FOLLOWED):
        away = _absence(agent, now)
        if away is None:
            return now
        ends = away[1]
        if away[0] is Skip.OFF_HOURS and agent.hours is not None and known_zone(agent.zone):
            ends = _opens(agent.hours, agent.zone, now)
        if ends is None:
            return None
        now = ends
    return None


def next_change(agent: Agent, now: datetime, load: Load | None = None) -> datetime | None:
    """The next instant, from `now` on, at which nothing that ends by time keeps leads from `agent`.

    `now` itself when nothing does so now; None when time alone does not help (deactivated, paused without an end, no
    working hours, the cap on open leads). `load` is what they got, if their caps are to count.
    """
    if not agent.active or agent.refused or agent.paused_by_crm or (paused(agent, now) and not agent.paused_until):
        return None
    room = now if load is None else caps.resets(agent, load, now)
    if room is None:
        return None
    pause = agent.paused_until if paused(agent, now) else None
    return _back(agent, max(room, pause or now))


def _off_hours(agent: Agent, now: datetime) -> str:
    """When an agent who is off hours works next, as the timetable has it; with the date when that is not the next."""
    if not known_zone(agent.zone):
        return "has working hours in an unknown time zone; give the agent an IANA zone"
    assert agent.hours is not None  # noqa: S101 - off hours is said of a timetable only
    plain = next_opening(agent.hours, agent.zone, now)
    if plain is None:
        return "has no working hours at all; add some in the configuration"
    if agent.leave or agent.holidays is not None:
        back = _back(agent, now)
        if back is not None and back != _opens(agent.hours, agent.zone, now):
            return f"opens {shown(agent.zone, back)}, after leave or holidays"
    return f"opens {plain}"


def unavailable(
    agent: Agent,
    weight: int,
    now: datetime,
    on_lead: Collection[UUID],
    *,
    declined: Collection[UUID] = (),
    load: Load | None = None,
    skips: bool,
    weights: bool,
) -> Unavailable | None:
    """Why `agent` cannot take a lead at `now`, or None when they can.

    `weight` is the member's in the queue (pass 1 for a direct target); `on_lead` are the agents who hold this lead
    already, in any role, `declined` those who had it before it was given back. `load` is what the agent got, None where
    caps do not stop a lead. `skips` and `weights` say whether these capabilities are on: without `skips` only an agent
    who is deactivated, at a cap or declined this lead is passed over, without `weights` a weight of 0 counts like any
    other. Of several reasons the first is given, in the order of :class:`routing.model.Skip`.

    Raises ValueError for a `now` without a time zone.
    """
    return absent(agent, now, skips=skips) or hindered(
        agent, weight, now, on_lead, declined=declined, load=load, skips=skips, weights=weights
    )


def absent(agent: Agent, now: datetime, *, skips: bool) -> Unavailable | None:
    """The part of :func:`unavailable` that is the same for every lead and queue at `now`."""
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
    if skips and (paused(agent, now) or agent.paused_by_crm):
        until = f" until {shown(agent.zone, agent.paused_until)}" if agent.paused_until else ""
        details = [f"paused by the admin{until}; `turnlock resume`"] if paused(agent, now) else []
        details += ["paused in the CRM; switch the agent on there"] if agent.paused_by_crm else []
        return because(Skip.PAUSED, ", and ".join(details))
    away = _absence(agent, now) if skips else None
    if away is not None:
        return because(away[0], away[2] or _off_hours(agent, now))
    return None


def hindered(
    agent: Agent,
    weight: int,
    now: datetime,
    on_lead: Collection[UUID],
    *,
    declined: Collection[UUID] = (),
    load: Load | None = None,
    skips: bool,
    weights: bool,
) -> Unavailable | None:
    """The part of :func:`unavailable` that depends on the lead, the queue and what the agent got up to now."""

    def because(skip: Skip, detail: str) -> Unavailable:
        return Unavailable(agent.agent_id, skip, detail)

    if load is not None and agent.caps is not None and caps.reached(agent.caps, load):
        return because(Skip.AT_CAP, caps.explained(agent.caps, load, now))
    if skips and agent.agent_id in on_lead:
        return because(Skip.ALREADY_ON_LEAD, "holds this lead already in another role; nothing to change")
    if agent.agent_id in declined:
        return because(Skip.DECLINED, "had this lead before; nothing to change")
    if weights and weight <= 0:
        return because(Skip.WEIGHT_ZERO, "has weight 0 in this queue; give the member a weight above 0")
    return None
