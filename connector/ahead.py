"""A lead that comes alone: its write is in a sender's hands before its decision is committed.

The agent is known once the unit has decided, under its locks; what is left is to wait for the disk. Meanwhile a sender
asks the CRM how the lead stands, as it must before every write. Nothing is written before the commit: if there is
none, what was read is forgotten.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from adapters.outcome import CrmError
from connector.runtime import Tenant
from routing.model import Lead

#: What was read of a lead serves for so long, in seconds: as long as a call of a CRM takes anyway. What took longer,
#: because the disk did, is read again.
FRESH = 0.1


@dataclass(frozen=True, slots=True)
class Reading:
    """What the CRM said of a lead under this id: the lead, None where it shows none, or the error that it is."""

    ref: str
    lead: Lead | None
    error: CrmError | None
    at: float  # monotonic seconds

    @classmethod
    def of(cls, ref: str, read: Callable[[], Lead | None]) -> Reading:
        """Read now."""
        try:
            return cls(ref, read(), None, time.monotonic())
        except CrmError as error:
            return cls(ref, None, error, time.monotonic())

    def serves(self, ref: str) -> bool:
        """Whether this is still how the lead of this id stands. An error is always: the CRM is not asked twice."""
        return self.error is not None or (ref == self.ref and time.monotonic() - self.at < FRESH)

    def result(self) -> Lead | None:
        """The lead, or raise what was raised."""
        if self.error is not None:
            raise self.error
        return self.lead


@dataclass(slots=True)
class Coming:
    """A write on its way from the decider that commits it to the sender that reads its lead meanwhile.

    Both may be the first to have done with it, so whoever is settles it under the lock.
    """

    tenant: Tenant
    lease: UUID
    outbox_id: UUID
    lead_ref: str
    #: What its sender needs, as :func:`connector.jobs.look` gives it behind the commit; and when (monotonic seconds).
    row: sa.Row[Any] | None = None
    read_at: float = 0.0
    committed: bool = False
    _refused: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _settled: threading.Event = field(default_factory=threading.Event)

    def commit(self, row: sa.Row[Any] | None) -> bool:
        """It is committed; False when no sender has it in hand, then it goes the way of all others."""
        with self._lock:
            self.row, self.read_at = row, time.monotonic()
            self.committed = not self._refused
            self._settled.set()
            return self.committed

    def cancel(self) -> None:
        """There was no commit, as far as anybody knows."""
        self._settled.set()

    def refuse(self) -> bool:
        """No sender takes it; False when it is committed already, then whoever refuses has to give it back."""
        with self._lock:
            self._refused = not self.committed
            return self._refused

    def wait(self) -> bool:
        """Wait until it is settled, and whether it is committed.

        Without a time of its own: the decider is at its last statement, which ends by the database's time-outs or with
        the connection, and settles it however that ends.
        """
        self._settled.wait()
        return self.committed
