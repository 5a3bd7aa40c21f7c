"""How long a new lead settles: where fields arrive seconds after the lead, it is decided once they are in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from routing.fields import normal_text

MAX_SETTLE = 3600
"""Seconds. A lead that waits longer than an hour is not settling; it is forgotten."""


@dataclass(frozen=True, slots=True)
class SettleTimes:
    """Whole seconds by source as the CRM spells it, and ``default`` for all others and for leads without a source."""

    default: int = 0
    sources: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __bool__(self) -> bool:
        """Whether any lead waits at all."""
        return bool(self.default or any(self.sources.values()))

    def seconds(self, source: str | None) -> int:
        """How long a new lead of `source` settles; case, accents and surplus blanks do not count."""
        if source is None or not self.sources:
            return self.default
        wanted = normal_text(source)
        return next((s for name, s in self.sources.items() if normal_text(name) == wanted), self.default)

    def as_json(self) -> dict[str, Any]:
        """As it is stored; empty when nothing settles."""
        stored: dict[str, Any] = {"default": self.default} if self.default else {}
        return stored | ({"sources": dict(sorted(self.sources.items()))} if self.sources else {})

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> SettleTimes:
        """What :meth:`as_json` gave."""
        return cls(int(stored.get("default", 0)), MappingProxyType(dict(stored.get("sources", {}))))
