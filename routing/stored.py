"""What an admin wrote about agents and queues, to JSON columns and back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from types import MappingProxyType
from typing import Any

from routing.model import Caps, Holidays, Hours, Leave, Quiet, Skip, SkipPolicy

Json = dict[str, Any]


def hours_json(value: Hours) -> Json:
    """A timetable for its column."""
    return {str(day): [list(span) for span in spans] for day, spans in value.days.items()}


def hours(data: Mapping[str, Any]) -> Hours:
    """The timetable that :func:`hours_json` wrote."""
    return Hours({int(day): tuple((start, end) for start, end in spans) for day, spans in data.items()})


def leave_json(value: Iterable[Leave]) -> list[list[str]]:
    """Leave for its column. Why somebody is away is not stored: it is nobody's business but the admin's."""
    return [[leave.start.isoformat(), leave.end.isoformat()] for leave in value]


def leave(data: Sequence[Sequence[str]]) -> tuple[Leave, ...]:
    """The leave that :func:`leave_json` wrote."""
    return tuple(Leave(datetime.fromisoformat(start), datetime.fromisoformat(end)) for start, end in data)


def holidays_json(value: Holidays) -> Json:
    """Holidays for their column."""
    extra = {day.isoformat(): name for day, name in value.extra.items()}
    return {"country": value.country, "region": value.region, "extra": extra}


def holidays(data: Mapping[str, Any]) -> Holidays:
    """The holidays that :func:`holidays_json` wrote."""
    extra = {date.fromisoformat(day): name for day, name in data["extra"].items()}
    return Holidays(data["country"], data["region"], MappingProxyType(extra))


def caps_json(value: Caps) -> Json:
    """Caps for their column, without the zone: that is the agent's or the tenant's."""
    return {name: getattr(value, name) for name in ("hour", "day", "week", "open") if getattr(value, name) is not None}


def quiet_json(value: Quiet) -> Json:
    """Quiet hours for their column."""
    return {"zone": value.zone, "hours": hours_json(value.hours)}


def quiet(data: Mapping[str, Any]) -> Quiet:
    """The quiet hours that :func:`quiet_json` wrote."""
    return Quiet(hours(data["hours"]), data["zone"])


def policies(data: Mapping[str, str]) -> Mapping[Skip, SkipPolicy]:
    """Skip policies from their column; a reason or policy of a later version counts as none."""
    skips, known = {skip.value for skip in Skip}, {policy.value for policy in SkipPolicy}
    return {Skip(skip): SkipPolicy(policy) for skip, policy in data.items() if skip in skips and policy in known}
