"""What a CRM lets an account call: buckets of calls (or of tokens) per window, and what its answers say is left.

An adapter declares a table of :class:`Bucket`; whoever owns the account's shared count hands the client a
:class:`Gate`. Nothing here counts: many processes call for one account, so the count stands where all of them see it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Lane(StrEnum):
    """For whose sake a call is made. Owners come first: each bucket keeps a share that only they get."""

    OWNERS = "owners"
    NOTES = "notes"
    TASKS = "tasks"
    CHORES = "chores"
    COMMANDS = "commands"  # somebody asked for it now


@dataclass(frozen=True, slots=True)
class Bucket:
    """A budget that a CRM keeps apart, as in ``Bucket("burst", 110, 10.0)``.

    Args:
        limit: what one window holds. 0: what the CRM's answers say, which then alone count: of a budget that all
            programs of the account share for long, such as a day. It holds up notes, tasks and chores, never an owner.
        window: seconds, taken as sliding.
        methods: which calls it is of; none named: all. `path`: a regular expression that the path begins with.
        alone: its calls are not counted in the buckets that stand below it in the table.
        kept: the share that only owners get; nothing for a bucket of which no owner takes.
        owner: how many one owner write takes of it, reading before and after included: they are put by before the
            write is begun, so that what is begun can be finished. `note`: the same for a note.
        cost: what a call takes, by method and path, where that is not 1.
    """

    name: str
    limit: int
    window: float
    methods: frozenset[str] = frozenset()
    path: str = ""
    alone: bool = False
    kept: float = 0.2
    owner: int = 0
    note: int = 0
    cost: Callable[[str, str], int] = lambda method, path: 1

    @property
    def told(self) -> bool:
        """Whether only the CRM's answers tell how much there is, and is left."""
        return not self.limit

    def covers(self, method: str, path: str) -> bool:
        """Whether a call is counted here."""
        return (not self.methods or method in self.methods) and re.match(self.path, path) is not None


@dataclass(frozen=True, slots=True)
class Left:
    """What an answer says of a bucket: how much is left of how much, and seconds until it is whole again if told."""

    left: int
    limit: int
    resets_in: float | None = None


def charges(buckets: Sequence[Bucket], method: str, path: str) -> list[tuple[Bucket, int]]:
    """The buckets that a call takes from, and how much of each."""
    found: list[tuple[Bucket, int]] = []
    for bucket in buckets:
        if bucket.covers(method, path):
            found.append((bucket, bucket.cost(method, path)))
            if bucket.alone:
                break
    return found


def left_by(headers: Mapping[str, str], left: str, limit: str, resets_in: str | None = None) -> Left | None:
    """What these headers say, by their names; None where they are missing or no numbers."""
    said = [headers.get(name, "") for name in (left, limit)]
    if not all(re.fullmatch(r"-?[0-9]{1,15}", text.strip(), re.ASCII) for text in said):
        return None
    seconds = headers.get(resets_in, "").strip() if resets_in else ""
    known = re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", seconds, re.ASCII) is not None
    return Left(max(0, int(said[0])), int(said[1]), float(seconds) if known else None)


class Gate(Protocol):
    """What a client asks before each call to an account, and tells after it."""

    def take(self, method: str, path: str) -> float:
        """Take what a call costs. Seconds to wait instead, with nothing taken that could be used; 0: call now."""

    def told(self, method: str, path: str, headers: Mapping[str, str], wait: float | None) -> None:
        """An answer came, with these headers; `wait`: it asks for a pause of so many seconds. Never raises."""
