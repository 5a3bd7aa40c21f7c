"""Waking workers: directly inside a process, by NOTIFY across processes."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterable, Sequence
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from routing.flight import Statement, fly_alone

CHANNEL = "turnlock_work"

#: What kind of work there is: events to decide, owner writes, notes.
EVENTS, OWNERS, NOTES = "events", "owners", "notes"
KINDS = (EVENTS, OWNERS, NOTES)

# Between two messages. The first goes at once; whoever heard it has enough to do for so long, and in a burst telling of
# each commit would cost a third of what accepting does.
_PACE = 0.03  # seconds

Listener = Callable[[UUID | None, Sequence[str]], None]


def give_way() -> None:
    """Let the thread run that was just woken with the next step of a lead.

    The interpreter takes turns by itself only when a thread waits for something, or every 5 ms.
    """
    # That it is a wait is what counts; the system makes a tenth of a millisecond of it. Not `sleep`: it waits until an
    # instant, which may be over by then, and some clocks take that for an error.
    select.select((), (), (), 0.00005)


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


_NOTIFY = Statement(sa.text(f"SELECT pg_notify('{CHANNEL}', CAST(:work AS text))"))


class Notifier:
    """Tells the workers of other processes, after the commit and coalesced.

    NOTIFY inside the storing transaction would serialise every commit of the database on one lock; so a thread sends
    at most one message at a time, and wakes that come meanwhile share the next.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._told: dict[UUID | None, dict[str, None]] = {}
        self._wanted = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notifier", daemon=True)
        self._thread.start()

    def __call__(self, tenant_id: UUID | None = None, kinds: Sequence[str] = ()) -> None:
        """Something was committed that a worker elsewhere should see."""
        with self._lock:
            self._told.setdefault(tenant_id, {}).update(dict.fromkeys(kinds))
        self._wanted.set()

    def stop(self) -> None:
        """End the thread after what is wanted now was sent."""
        self._stopping.set()
        self._wanted.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            with self._lock:
                told, self._told = self._told, {}
            try:
                if told:
                    fly_alone(self._engine, [_NOTIFY(work=_message(*one)) for one in told.items()])
            except SQLAlchemyError:
                pass  # the workers look by themselves twice a second
            if self._stopping.is_set():
                return
            self._stopping.wait(_PACE)


def _message(tenant_id: UUID | None, kinds: Iterable[str]) -> str:
    return ",".join([tenant_id.hex, *kinds]) if tenant_id is not None else ""


def heard(message: str) -> tuple[UUID | None, Sequence[str]]:
    """What a :class:`Notifier` of another process told: who has work and of which kinds, None when it is not known."""
    name, *kinds = message.split(",")
    try:
        return UUID(name), [kind for kind in kinds if kind in KINDS]
    except ValueError:
        return None, KINDS
