"""Who is at a queue's row: one that another session holds for long is asked for by one unit at a time.

So other queues flow meanwhile. And while a unit is at work nobody of this process claims more for its tenant: it would
most likely wait for the same row, with less in hand than it finds a moment later.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from connector.database import sqlstate
from routing.store import LOCK_QUEUES

# A queue known to be held is asked for this long: enough to pass behind a unit that is at work, too short for a
# decider to be missed by the other queues.
PROBE = "100ms"

# Units are through in less. One that is not waits for a row, and the other queues of its tenant must not wait with it.
_AT_WORK = 0.02  # seconds

_LOCK_NOT_AVAILABLE = "55P03"


class QueueBusy(Exception):
    """A queue's row is held by somebody else for longer than any turn takes. It says nothing against the leads."""


class BusyQueues:
    """What this process knows of held queues. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[UUID] = set()
        self._asked: set[UUID] = set()

    @contextmanager
    def asking(self, queue_ids: Collection[UUID]) -> Iterator[bool]:
        """Around the flight that locks these queues; yields whether one is known to be held: ask for a moment only.

        Raises :class:`QueueBusy` when the lock is not granted in time, or at once when another unit asks already.
        """
        with self._lock:
            known = self._busy.intersection(queue_ids)
            if known & self._asked:
                raise QueueBusy
            self._asked |= known
        try:
            yield bool(known)
        except DBAPIError as error:
            if sqlstate(error) != _LOCK_NOT_AVAILABLE or error.statement != LOCK_QUEUES.spoken:
                raise
            with self._lock:
                self._busy.update(queue_ids)
            raise QueueBusy from error
        else:
            with self._lock:
                self._busy.difference_update(queue_ids)
        finally:
            with self._lock:
                self._asked -= known


class Units:
    """Which tenants have a unit at work in this process. Safe to share between threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._at_work: Counter[UUID] = Counter()

    @contextmanager
    def at_work(self, tenant_id: UUID) -> Iterator[None]:
        """Around a unit of this tenant."""
        with self._changed:
            self._at_work[tenant_id] += 1
        try:
            yield
        finally:
            with self._changed:
                self._at_work[tenant_id] -= 1
                if not self._at_work[tenant_id]:
                    del self._at_work[tenant_id]
                self._changed.notify_all()

    def wait(self, tenant_id: UUID) -> None:
        """Wait until no unit of this tenant is at work, for a moment at most."""
        with self._changed:
            self._changed.wait_for(lambda: tenant_id not in self._at_work, _AT_WORK)
