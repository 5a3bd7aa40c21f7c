"""Caps: how many leads an agent may get in an hour, a day, a week, and hold open at once. Over all queues together.

Hours, days and weeks are those of a clock on the wall: an hour runs from :00 to :00, a day from midnight, a week from
Monday. A repeated hour counts as one, so a cap per hour holds for both passes together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from routing.clocks import first_instant, known_zone, next_instant, shown, wall
from routing.model import Agent, Caps, Load

WINDOWS: Mapping[str, tuple[timedelta, str]] = {
    "hour": (timedelta(hours=1), "this hour"),
    "day": (timedelta(days=1), "today"),
    "week": (timedelta(days=7), "this week"),
}
Window = tuple[datetime, datetime]


def windows(caps: Caps, now: datetime) -> dict[str, Window]:
    """The hour, day and week that `now` lies in, as instants: start included, end not."""
    zone = _zone(caps)
    local = wall(zone, now)
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
    starts = {
        "hour": local.replace(minute=0, second=0, microsecond=0),
        "day": midnight,
        "week": midnight - timedelta(days=midnight.weekday()),
    }
    return {
        name: (first_instant(zone, start), next_instant(zone, start + WINDOWS[name][0], now))
        for name, start in starts.items()
    }


def _zone(caps: Caps) -> str:
    return caps.zone if known_zone(caps.zone) else "UTC"


def reached(caps: Caps, load: Load) -> tuple[str, ...]:
    """The caps that leave no room for one more lead, by name: ``hour``, ``day``, ``week``, ``open``."""
    limits = ((name, getattr(caps, name), getattr(load, name)) for name in (*WINDOWS, "open"))
    return tuple(name for name, limit, count in limits if limit is not None and count >= limit)


def more(load: Load) -> Load:
    """The load after one more assignment."""
    return Load(load.hour + 1, load.day + 1, load.week + 1, load.open + 1)


def fewer_open(load: Load) -> Load:
    """The load after one of the agent's assignments ended: it still counts in its hour, day and week."""
    return replace(load, open=max(load.open - 1, 0))


def explained(caps: Caps, load: Load, now: datetime) -> str:
    """Which caps are reached and what ends each, in words."""
    ends = windows(caps, now)
    texts = []
    for name in reached(caps, load):
        count, limit = getattr(load, name), getattr(caps, name)
        if name == "open":
            texts.append(f"holds {count} open leads of {limit}; close or reassign some, or raise the cap")
        else:
            again = shown(_zone(caps), ends[name][1])
            texts.append(f"got {count} leads of {limit} {WINDOWS[name][1]}; counts anew from {again}")
    return ", and ".join(texts)


def resets(agent: Agent, load: Load, now: datetime) -> datetime | None:
    """When time alone makes room under every cap that is reached: `now` when none is, None when time does not help."""
    if agent.caps is None:
        return now
    full = reached(agent.caps, load)
    if "open" in full:
        return None
    ends = windows(agent.caps, now)
    return max((ends[name][1] for name in full), default=now)
