"""Days and spans on which an agent does not work: leave, public holidays, extra days. All on the agent's own clock.

Public holidays are those of the `holidays` library, computed per country, region and year; a day that
moves to a working day ("observed") counts on both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from routing.clocks import instants, wall
from routing.fields import ConfigurationProblems, Problem
from routing.model import Holidays, Leave

_DATE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})(?:[ T]([0-9]{2}):([0-9]{2}))?")
_DAY = timedelta(days=1)  # no clock is moved by more
_FIRST_YEAR, _LAST_YEAR = 2000, 2100
_WRITE_DAY = "write a day like 2026-07-01"
_WRITE_TIME = "write a day like 2026-07-01, or a time like '2026-07-01 13:00'"


class AbsenceProblems(ConfigurationProblems):
    """Leave or holidays cannot be used."""


def leave_ends(leaves: tuple[Leave, ...], zone: str, now: datetime) -> datetime | None:
    """When the leave ends that covers the instant `now`; None when none does.

    A leave is one span, however the clocks are moved in it: it begins when they first show its start, and ends when
    they last show its end.
    """
    local = wall(zone, now)
    for leave in leaves:
        if leave.start - _DAY <= local < leave.end + _DAY:
            ends = instants(zone, leave.end)[-1]
            if instants(zone, leave.start)[0] <= now < ends:
                return ends
    return None


def holiday_on(holidays: Holidays, day: date) -> str | None:
    """The name of the holiday that `day` is, None for a working day. A country that is not known has none."""
    extra = holidays.extra.get(day)
    if extra is not None or holidays.country is None:
        return extra
    return _public(holidays.country, holidays.region, day.year).get(day)


@lru_cache(maxsize=512)
def _public(country: str, region: str | None, year: int) -> Mapping[date, str]:
    # Here and not above: the library is large, and only who uses calendars should wait for it.
    import holidays

    english = "en_US" if "en_US" in _languages(country) else None  # else names depend on the machine's language
    try:
        found = holidays.country_holidays(country, subdiv=region, years=year, language=english)
    except NotImplementedError:  # a later version of the library dropped what was valid when it was configured
        return MappingProxyType({})
    return MappingProxyType({day: name for day, name in found.items() if day.year == year})


def _languages(country: str) -> tuple[str, ...]:
    import holidays

    try:
        return tuple(holidays.country_holidays(country).supported_languages)
    except NotImplementedError:
        return ()


@lru_cache(maxsize=1)
def countries() -> Mapping[str, frozenset[str]]:
    """The countries (ISO 3166, two letters) that have a calendar, with the regions of each that may be named."""
    import holidays

    found = holidays.list_supported_countries(include_aliases=False)
    return MappingProxyType({country: frozenset(map(str, regions)) for country, regions in found.items()})


# -- reading what an admin wrote --------------------------------------------------------------------------------


def parse_leave(raw: Any, where: str = "leave") -> tuple[Leave, ...]:
    """Leave from ``[{'from': '2026-07-01', 'to': '2026-07-05'}, ..]``, in order of time.

    Both ends are days (the last is included) or wall times of the agent's zone like ``2026-07-01 13:00`` (the end is
    not included). ``why`` is for the admin alone and is not kept. Raises :class:`AbsenceProblems` with every problem.
    """
    if not isinstance(raw, list | tuple):
        raise AbsenceProblems([Problem(where, "is not a list", "write [{from: 2026-07-01, to: 2026-07-05}]")])
    problems: list[Problem] = []
    found: list[tuple[Leave, int]] = []
    for at, entry in enumerate(raw):
        here = f"{where}[{at}]"
        if not isinstance(entry, Mapping) or not {"from", "to"} <= entry.keys():
            problems.append(Problem(here, "lacks from or to", "write {from: 2026-07-01, to: 2026-07-05}"))
            continue
        start, end = _moment(entry["from"]), _moment(entry["to"], last=True)
        problems += [
            Problem(f"{here}.{key}", "is no day and no time", _WRITE_TIME)
            for key, moment in (("from", start), ("to", end))
            if moment is None
        ]
        if start is None or end is None:
            continue
        if end <= start:
            problems.append(Problem(f"{here}.to", "is not after from", "write the last day of the leave, or swap them"))
        else:
            found.append((Leave(start, end), at))
    found.sort(key=lambda one: (one[0].start, one[1]))
    for (before, first), (after, second) in pairwise(found):
        if after.start < before.end:
            low, high = sorted((first, second))
            fix = "join the two into one, or correct their days"
            problems.append(Problem(f"{where}[{high}]", f"overlaps the leave at {where}[{low}]", fix))
    if problems:
        raise AbsenceProblems(problems)
    return tuple(leave for leave, _ in found)


def _moment(text: Any, *, last: bool = False) -> datetime | None:
    """A day or a wall time; with `last` a day means its end."""
    found = _DATE.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None or not _FIRST_YEAR <= int(found[1]) <= _LAST_YEAR:
        return None
    try:
        day = date(int(found[1]), int(found[2]), int(found[3]))
        if found[4] is None:
            return datetime.combine(day, time()) + (_DAY if last else timedelta())
        return datetime.combine(day, time(int(found[4]), int(found[5])))
    except ValueError:
        return None


def parse_holidays(raw: Any, where: str = "holidays") -> Holidays:
    """Holidays from ``{'country': 'US', 'region': 'TX', 'extra': [{'day': '2026-12-24', 'name': 'Office closed'}]}``.

    A list alone is the extra days. Raises :class:`AbsenceProblems` with every problem.
    """
    given: Mapping[str, Any] = {"extra": raw} if isinstance(raw, list | tuple) else raw
    if not isinstance(given, Mapping) or not given:
        raise AbsenceProblems(
            [Problem(where, "names no calendar", "write {country: US, region: TX}, or a list of days")]
        )
    problems: list[Problem] = []
    country, region = given.get("country"), given.get("region")
    known = countries()
    if country is not None and country not in known:
        fix = _near(country, known) or "write the two letters of ISO 3166, such as US"
        problems.append(Problem(f"{where}.country", f'"{str(country)[:40]}" has no calendar', fix))
    elif region is not None and country is None:
        problems.append(Problem(f"{where}.region", "stands without a country", "add the country"))
    elif region is not None and region not in known[str(country)]:
        there = sorted(known[str(country)])
        some = f"use one of {', '.join(there[:12])}{', ...' if len(there) > 12 else ''}" if there else "leave it out"
        fix = _near(region, there) or some
        problems.append(Problem(f"{where}.region", f'"{str(region)[:40]}" is no region of {country}', fix))
    extra: dict[date, str] = {}
    inside = where if isinstance(raw, list | tuple) else f"{where}.extra"
    for at, entry in enumerate(given.get("extra") or ()):
        here = f"{inside}[{at}]"
        moment = _moment(entry.get("day")) if isinstance(entry, Mapping) else None
        name = entry.get("name") if isinstance(entry, Mapping) else None
        if moment is None or moment.time() != time():
            problems.append(Problem(f"{here}.day", "is no day", _WRITE_DAY))
        elif moment.date() in extra:
            problems.append(Problem(here, "is listed twice", "remove one of the two"))
        else:
            extra[moment.date()] = name if isinstance(name, str) and name else "an extra day"
    if problems:
        raise AbsenceProblems(problems)
    return Holidays(country, region, MappingProxyType(dict(sorted(extra.items()))))


def _near(word: Any, known: Any) -> str:
    close = get_close_matches(str(word)[:40].upper(), [str(name).upper() for name in known], 1, 0.5)
    names = {str(name).upper(): name for name in known}
    return f'did you mean "{names[close[0]]}"?' if close else ""
