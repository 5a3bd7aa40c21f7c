"""Queues whose row another session holds for long: one unit at a time asks for them, so that other queues flow."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from connector.database import sqlstate
from routing.store import LOCK_QUEUES

# A queue known to be held is asked for this long: enough to pass behind a unit that is at work, too short for a
# decider to be missed by the other queues.
PROBE = "100ms"

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
