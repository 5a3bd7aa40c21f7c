"""Waking workers: directly inside a process, by NOTIFY across processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from connector.database import at_rest

CHANNEL = "turnlock_work"

#: What kind of work there is: events to decide, owner writes, notes.
EVENTS, OWNERS, NOTES = "events", "owners", "notes"
KINDS = (EVENTS, OWNERS, NOTES)

Listener = Callable[[UUID | None, Sequence[str]], None]


class Wake:
    """Call it with a tenant that has work now and of which kinds, or with None when which one is not known."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """`listener` is called in the waking thread: it must be quick and never raise."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """`listener` is not called any more."""
        self._listeners.remove(listener)

    def __call__(self, tenant_id: UUID | None = None, *kinds: str) -> None:
        """There is work; of any kind if none is named."""
        for listener in self._listeners:
            listener(tenant_id, kinds or KINDS)


class Notifier:
    """Tells the workers of other processes, after the commit and coalesced.

    NOTIFY inside the storing transaction would serialise every commit of the database on one lock; so a thread sends
    at most one at a time, and wakes that come meanwhile share the next.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._wanted = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="notifier", daemon=True)
        self._thread.start()

    def __call__(self, _: UUID | None = None, __: Sequence[str] = ()) -> None:
        """Something was committed that a worker elsewhere should see."""
        self._wanted.set()

    def stop(self) -> None:
        """End the thread after what is wanted now was sent."""
        self._stopping = True
        self._wanted.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            try:
                with at_rest(self._engine) as conn:
                    conn.execute(sa.text(f"NOTIFY {CHANNEL}"))
            except SQLAlchemyError:
                pass  # the workers look by themselves twice a second
            if self._stopping:
                return
