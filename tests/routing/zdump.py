"""What the clocks of a zone show, told by ``zdump`` (of glibc or of tzcode): nothing here asks the code under test.

``zdump`` is given the very file that Python's ``zoneinfo`` reads (the system's, else the ``tzdata`` package's), so that
both speak of one version of the data whatever versions a machine has.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import zoneinfo
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from pathlib import Path

EPOCH = datetime(1970, 1, 1)
FIRST, LAST = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) // 60 for year in (2026, 2029))
_LINE = re.compile(r" (\w{3} +\d+ \d\d:\d\d:\d\d -?\d+) UT = .* gmtoff=(-?\d+)")
_NOW = re.compile(r"(\w{3} +\d+ \d\d:\d\d:\d\d \d+) \S+$")


def _file(zone: str) -> Path:
    for folder in zoneinfo.TZPATH:
        if (path := Path(folder, zone)).is_file():
            return path
    return Path(str(files("tzdata.zoneinfo").joinpath(*zone.split("/"))))


def _told(*arguments: str) -> list[str]:
    program = shutil.which("zdump") or shutil.which("/usr/sbin/zdump")
    assert program, "these tests hold the clocks against zdump; install it (Debian: libc-bin)"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def _time(text: str) -> datetime:
    return datetime.strptime(text, "%b %d %H:%M:%S %Y")


@dataclass(frozen=True)
class Clock:
    """The offsets of a zone: ``shifts[i]`` minutes ahead of UTC from second ``starts[i]`` since 1970 on."""

    starts: tuple[int, ...]
    shifts: tuple[int, ...]

    def shift(self, minute: int) -> int:
        """Minutes ahead of UTC at `minute` since 1970."""
        return self.shifts[max(bisect_right(self.starts, minute * 60) - 1, 0)]

    def wall(self, minute: int) -> datetime:
        """What the clocks show then."""
        return EPOCH + timedelta(minutes=minute + self.shift(minute))

    def changes(self) -> list[int]:
        """The minutes in 2026 to 2028 at which the clocks are moved."""
        found = ((start // 60, shift) for start, shift in zip(self.starts, self.shifts, strict=True))
        return [at for at, shift in found if FIRST <= at < LAST and self.shift(at - 1) != shift == self.shift(at)]


@cache
def clock(zone: str) -> Clock:
    """The clocks of `zone`."""
    path = str(_file(zone))
    seen: dict[int, int] = {}
    for line in _told("-v", "-c", "1900,2030", path):
        if found := _LINE.search(line):
            # Of each change the last second before it and the first after it.
            seen[int((_time(found[1]) - EPOCH).total_seconds())] = int(found[2]) // 60
    if not seen:  # never changed since 1900: all that zdump can say is what time it is there and in UTC
        there, here = (_time(m[1]) for line in _told(path, "UTC") if (m := _NOW.search(line)))
        seen[0] = round((there - here).total_seconds() / 60)
    starts = tuple(sorted(seen))
    return Clock(starts, tuple(seen[start] for start in starts))


def instant(minute: int) -> datetime:
    """A minute since 1970 as an aware time."""
    return (EPOCH + timedelta(minutes=minute)).replace(tzinfo=UTC)
