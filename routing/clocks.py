"""Clocks: what those of a zone show at an instant, and at which instant they show a time.

The rule for what comes again and again (hours, days): an instant is converted to wall time and the wall times are
compared; both passes of a repeated hour count as that wall time, and a time that is skipped comes with the first
instant after the skip.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache

# Files of a zone directory that are no place: the machine's own zone, and placeholders.
_NOT_ZONES = frozenset({"localtime", "posixrules", "Factory"})
# No zone changes its clocks twice within this.
_STEP = timedelta(hours=12)
_SECOND = timedelta(seconds=1)


@lru_cache(maxsize=1)
def _zone_names() -> frozenset[str]:
    return frozenset(zoneinfo.available_timezones()) - _NOT_ZONES


def known_zone(name: str) -> bool:
    """Whether `name` is an IANA time zone of this installation, spelled exactly (``America/Chicago``)."""
    return name in _zone_names()


@lru_cache(maxsize=1024)  # zoneinfo itself keeps only the last 8, and a tenant may work in more
def _zone(name: str) -> zoneinfo.ZoneInfo:
    if not known_zone(name):
        raise ValueError("unknown time zone; use an IANA name such as America/Chicago")
    return zoneinfo.ZoneInfo(name)


def wall(zone: str, now: datetime) -> datetime:
    """What the clocks of `zone` show at the instant `now`, without a zone.

    Raises ValueError for a `now` without a zone, and for a `zone` that :func:`known_zone` does not know.
    """
    if now.utcoffset() is None:
        raise ValueError("now has no time zone; pass an aware datetime")
    return now.astimezone(_zone(zone)).replace(tzinfo=None, fold=0)


def instants(zone: str, shown: datetime) -> tuple[datetime, ...]:
    """The instants (UTC) at which the clocks of `zone` show the wall time `shown`: one, or two in a repeated hour.

    For a time that is skipped it is the first instant after the skip.
    """
    info = _zone(zone)
    first, second = (shown.replace(tzinfo=info, fold=fold).astimezone(UTC) for fold in (0, 1))
    if first == second:
        return (first,)
    if first < second:
        return first, second
    return (_change(info, second, first),)


def first_instant(zone: str, shown: datetime) -> datetime:
    """The first of :func:`instants`."""
    return instants(zone, shown)[0]


def next_instant(zone: str, shown: datetime, after: datetime) -> datetime:
    """The first instant after `after` at which the clocks show `shown`; a minute after it when there is none."""
    later = [instant for instant in instants(zone, shown) if instant > after]
    return min(later, default=after + timedelta(minutes=1))


def changes(zone: str, start: datetime, end: datetime) -> Iterator[datetime]:
    """The instants after `start`, up to `end`, at which the clocks of `zone` are changed."""
    info = _zone(zone)
    while start < end:
        stop = min(start + _STEP, end)
        if start.astimezone(info).utcoffset() != stop.astimezone(info).utcoffset():
            yield _change(info, start, stop)
        start = stop


def _change(info: zoneinfo.ZoneInfo, low: datetime, high: datetime) -> datetime:
    """The one change of the clocks in (`low`, `high`], to the second."""
    before = low.astimezone(info).utcoffset()
    while high - low > _SECOND:
        middle = (low + (high - low) / 2).replace(microsecond=0)
        if middle <= low:
            break
        low, high = (middle, high) if middle.astimezone(info).utcoffset() == before else (low, middle)
    return high.replace(microsecond=0).astimezone(UTC)


def shown(zone: str, instant: datetime) -> str:
    """`instant` for people, like ``Mon 6 Jul 2026 09:00 America/Chicago``; in UTC where the zone is not known."""
    zone = zone if known_zone(zone) else "UTC"
    local = wall(zone, instant)
    return f"{local:%a} {local.day} {local:%b %Y %H:%M} {zone}"
