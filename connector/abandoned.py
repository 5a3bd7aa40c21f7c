"""Leased work that was let go of because the database went away: given back as soon as it answers again.

Its process lives, so that nobody else would take the rows before their leases run out, a minute or more later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from connector.database import is_contention, is_outage, unit

#: Gives back whatever is still leased by the lease that it knows; harmless when nothing is.
GiveBack = Callable[[sa.Connection], object]


class Abandoned:
    """What this process has to give back. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest: deque[GiveBack] = deque()

    def note(self, error: Exception, give_back: GiveBack) -> None:
        """Work was interrupted by `error`; nothing happens unless it speaks of the database rather than of the work."""
        if is_outage(error):
            self._rest.append(give_back)

    def give_back(self, engine: sa.Engine) -> None:
        """Give everything back that can be. Raises what the database raises; what is left then stays for the next."""
        with self._lock:  # one at a time: waiting is right, whoever holds it does what we came for
            while self._rest:
                try:
                    with unit(engine) as (conn, _):
                        self._rest[0](conn)
                except SQLAlchemyError as error:
                    if not (is_outage(error) or is_contention(error)):
                        self._rest.popleft()  # it would fail for ever; its lease ends by time
                    raise
                self._rest.popleft()
