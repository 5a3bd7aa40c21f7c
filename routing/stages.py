"""The stages of a capability: in which mode each flag counts for one lead.

A flag is ``off`` (the old path only), in ``shadow`` (the new path decides beside the live one and writes its own record
alone) or ``on``. While in shadow or on it may be limited to sources or a percentage of the leads; the others have it
off. A lead keeps its modes until its decision closes: switching forward counts for leads that come after, switching
back at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

from routing.fields import normal_text
from routing.model import Flag


class Mode(StrEnum):
    """How far a capability is rolled out, in order."""

    OFF = "off"
    SHADOW = "shadow"
    ON = "on"


_ORDER = tuple(Mode)


def lower(one: Mode, other: Mode) -> Mode:
    """The mode that is less far."""
    return min(one, other, key=_ORDER.index)


@dataclass(frozen=True, slots=True)
class Stage:
    """A flag's setting at one flag version.

    ``sources`` (none: all) and ``percent`` (of the leads, 1 to 100) limit it; a lead must meet both. ``run`` is the
    flag version at which the last shadow run began, 0 for none.
    """

    mode: Mode
    sources: tuple[str, ...] = ()
    percent: int = 100
    run: int = 0

    @property
    def limited(self) -> bool:
        """Whether it counts for some leads only."""
        return bool(self.sources) or self.percent < 100

    def mode_of(self, lead_id: UUID, source: str | None) -> Mode:
        """The mode for one lead. Sources compare as in rules; the percentage goes by a hash of the lead's id.

        The hash does not depend on the flag or the percentage: a wider one keeps the leads of the narrower one.
        """
        if self.sources and normal_text(source or "") not in {normal_text(name) for name in self.sources}:
            return Mode.OFF
        drawn = int.from_bytes(hashlib.sha256(lead_id.bytes).digest()[:4])
        return self.mode if drawn * 100 < self.percent << 32 else Mode.OFF

    def as_json(self) -> dict[str, Any]:
        """JSON-safe, for :func:`stage_of`."""
        return {"mode": self.mode.value, "sources": list(self.sources), "percent": self.percent, "run": self.run}


def stage_of(stored: Mapping[str, Any]) -> Stage:
    """What :meth:`Stage.as_json` wrote."""
    return Stage(Mode(stored["mode"]), tuple(stored["sources"]), stored["percent"], stored["run"])


def modes_of(
    lead_id: UUID,
    source: str | None,
    *,
    now: Mapping[Flag, Stage],
    stamped: Mapping[Flag, Stage],
    kept: Mapping[Flag, Mode],
) -> dict[Flag, Mode]:
    """The modes of one lead for every flag that is not simply off or on for all.

    `kept` are those that an open decision of this lead has, `stamped` the settings by which its event was accepted,
    `now` the present ones of every flag. A limit is resolved as it was stamped; no mode is further than the present,
    and a shadow that has ended is off.
    """
    found: dict[Flag, Mode] = {}
    for flag, stage in now.items():
        then = stamped.get(flag)
        if flag in kept:
            mode = kept[flag]
        elif then is not None and then.limited:
            mode = then.mode_of(lead_id, source)
        elif stage.limited or stage.mode is Mode.SHADOW:
            mode = stage.mode_of(lead_id, source)
        else:
            continue
        mode = lower(mode, stage.mode)
        # Its line went when the flag went on. To the live path shadow and off are the same.
        ended = mode is Mode.SHADOW and stage.mode is not Mode.SHADOW
        found[flag] = Mode.OFF if ended else mode
    return found
