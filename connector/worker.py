"""The worker: deciders, senders and a chore thread, woken within the process and by NOTIFY, with a slow look as a net.

A board says which tenants have work of which kind; threads take tenants from it in turn, so that one tenant's burst
or hanging CRM never occupies everybody.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from adapters.budget import Lane
from connector import inbox, log, work
from connector.chores import run_chore
from connector.database import at_rest, count_rows, is_outage, unit
from connector.decide import Decider, Found, first_questions
from connector.jobs import Leased
from connector.kept import KEPT, Kept, NotKept
from connector.limits import lane
from connector.runtime import Runtime
from connector.wake import CHANNEL, EVENTS, KINDS, NOTES, OWNERS, give_way, heard
from connector.writeback import Sender
from routing.flight import Aside
from routing.model import TELLING

# The net under lost wakes, and what makes rows due by time alone start: half a second late at most.
LOOK = 0.5
# How long the listener listens before it looks whether it is to stop.
HEARING = 0.25
# How long a start waits for the connection that shows that this process lives.
_SEEN = 3.0
# How long a stop waits for work in hand; longer than a sender's calls, shorter than what process managers grant.
DRAIN = 20.0

_CHORES = "chores"
_SENDING = (OWNERS, NOTES)
_log = log.get("worker")


class Board:
    """Which tenants have work of a kind. At most `cap` threads serve one tenant of a kind at once."""

    def __init__(self, caps: dict[str, int], groups: Sequence[Sequence[str]]) -> None:
        self._caps = caps
        # Each group of kinds has threads of its own, so that whatever comes wakes one that does it, and nobody else.
        self._lock = threading.Lock()
        self._changed = {kind: line for group in groups for line in [threading.Condition(self._lock)] for kind in group}
        self._pending: dict[str, OrderedDict[UUID, None]] = {kind: OrderedDict() for kind in caps}
        self._active: dict[str, Counter[UUID]] = {kind: Counter() for kind in caps}

    def post(self, kind: str, tenant_id: UUID) -> None:
        """This tenant may have work of this kind."""
        with self._lock:
            self._pending[kind].setdefault(tenant_id)
            self._changed[kind].notify()

    def call(self, kind: str) -> None:
        """Make one waiting thread look up, for something beside the board."""
        with self._lock:
            self._changed[kind].notify()

    def kick(self) -> None:
        """Make every waiting thread look up."""
        with self._lock:
            for line in self._changed.values():
                line.notify_all()

    def take(self, kinds: Sequence[str], timeout: float, other: Callable[[], bool]) -> tuple[str, UUID] | None:
        """The next tenant of the first of `kinds` that has one; None after `timeout`, or when `other` says so."""
        ends = time.monotonic() + timeout
        with self._lock:
            while True:
                if other():
                    return None
                for kind in kinds:
                    for tenant_id in self._pending[kind]:
                        if self._room(kinds, kind, tenant_id):
                            del self._pending[kind][tenant_id]
                            self._active[kind][tenant_id] += 1
                            return kind, tenant_id
                left = ends - time.monotonic()
                if left <= 0:
                    return None
                self._changed[kinds[0]].wait(left)

    def reserve(self, kind: str, tenant_id: UUID, threads: int) -> bool:
        """Work that comes beside the board is promised one of `threads`; :meth:`done` ends it, as what was taken.

        False when all have work, or when work of this tenant is in hand or waits: then it is better done together.
        """
        with self._lock:
            promised = self._active[kind]
            free = (
                sum(promised.values()) < threads and tenant_id not in promised and tenant_id not in self._pending[kind]
            )
            if free:
                promised[tenant_id] += 1
            return free

    def begin(self, kinds: Sequence[str], kind: str, tenant_id: UUID) -> bool:
        """Work that did not come from the board counts all the same; False when the tenant has its share already."""
        with self._lock:
            if not self._room(kinds, kind, tenant_id):
                return False
            self._active[kind][tenant_id] += 1
            return True

    def _room(self, kinds: Sequence[str], kind: str, tenant_id: UUID) -> bool:
        # The threads are those of all `kinds` together: one tenant's notes beside its owners must not take the last.
        most = max(self._caps[one] for one in kinds)
        return (
            self._active[kind][tenant_id] < self._caps[kind]
            and sum(self._active[one][tenant_id] for one in kinds) < most
        )

    def done(self, kind: str, tenant_id: UUID, *, more: bool) -> None:
        """A thread is through with this tenant; with `more` it goes to the end of the line again."""
        with self._lock:
            self._active[kind][tenant_id] -= 1
            if not self._active[kind][tenant_id]:
                del self._active[kind][tenant_id]
            if more:
                self._pending[kind].setdefault(tenant_id)
            line = self._changed[kind]
            if any(self._pending[one] for one, of in self._changed.items() if of is line):
                line.notify()  # this tenant's share may have held it up


class Worker:
    """All threads of one process that do leased work."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        settings = runtime.settings
        self._stopping = threading.Event()
        self._look_now = threading.Event()
        # One thread fewer than there are: a tenant whose CRM hangs leaves somebody for the others.
        self._board = Board(
            {
                EVENTS: max(1, settings.deciders - 1),
                OWNERS: max(1, settings.senders - 1),
                # Notes are the slower lane, one at a time per tenant: their pace is kept from one to the next.
                NOTES: 1,
                _CHORES: 1,
            },
            ((EVENTS,), _SENDING, (_CHORES,)),
        )
        self._leased: queue.SimpleQueue[Leased] = queue.SimpleQueue()
        self._handed: queue.SimpleQueue[tuple[UUID, UUID, Sequence[sa.Row[Any]], Found | None, Kept]] = (
            queue.SimpleQueue()
        )
        self._idle = 0
        self._idle_lock = threading.Lock()
        loops = [(f"decider-{n}", self._decide) for n in range(settings.deciders)]
        loops += [(f"sender-{n}", self._sending) for n in range(settings.senders)]
        loops += [(f"chores-{n}", self._chores) for n in range(2)]  # a hanging CRM must not end the chores of all
        loops += [("scout", self._scout)]
        self._threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops]
        self._listener = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._ended = threading.Event()

    def start(self) -> None:
        """Start all threads."""
        self._runtime.wake.subscribe(self.woken)
        self._runtime.storing.deciders = self
        self._listener.start()
        # What is leased before this counts by time alone, should the process be killed in the middle of it.
        self._runtime.life.wait_held(_SEEN)
        for thread in self._threads:
            thread.start()

    def stop(self, drain: float = DRAIN) -> bool:
        """Claim nothing more, finish what is in hand, give the rest back. False if something was still running."""
        self._stopping.set()
        self._board.kick()
        self._look_now.set()
        ends = time.monotonic() + drain
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        alive = any(thread.is_alive() for thread in self._threads)
        self._give_back()
        self._runtime.limits.leave()
        # Last, because others take what is leased by a process whose lock the listener no longer holds.
        self._ended.set()
        self._listener.join(max(2.0, ends - time.monotonic()))
        return not alive

    def _return_handed(self) -> None:
        while True:
            try:
                tenant_id, lease, rows, _, kept = self._handed.get_nowait()
            except queue.Empty:
                return
            self._board.done(EVENTS, tenant_id, more=False)
            try:
                kept.sure()
                with unit(self._runtime.engine) as (conn, _):
                    ids = [row.event_id for row in rows]
                    inbox.return_events(conn, tenant_id, lease, ids, after=timedelta(0))
            except NotKept:
                continue
            except SQLAlchemyError:
                return  # the lease is void when this process has ended

    def _give_back(self) -> None:
        if self._runtime.storing.deciders is self:
            self._runtime.storing.deciders = None
        self._return_handed()
        while True:
            try:
                one = self._leased.get_nowait()
            except queue.Empty:
                return
            try:
                self._return_leased(one)
            except SQLAlchemyError:
                return  # the lease runs out by itself

    def _return_leased(self, one: Leased) -> None:
        tenant_id, lease, outbox_id = one.tenant.tenant_id, one.lease, one.outbox_id
        try:
            one.kept.sure()
            with unit(self._runtime.engine) as (conn, _):
                work.return_outbox(conn, tenant_id, lease, outbox_id, after=timedelta(0), counts=False, reason=None)
        except NotKept:
            return
        except SQLAlchemyError as error:
            back = partial(work.release_outbox, tenant_id=tenant_id, lease=lease, outbox_id=outbox_id)
            self._runtime.abandoned.note(error, back)
            raise

    def woken(self, tenant_id: UUID | None, kinds: Sequence[str] = KINDS) -> None:
        """Somebody, of this process or another, stored work of these kinds, for this tenant if they say so."""
        if tenant_id is None:
            self._board.kick()
            self._look_now.set()
        else:
            for kind in kinds:
                self._board.post(kind, tenant_id)

    # -- deliveries that this process stores and decides itself ---------------------------------------------------

    def reserve(self, tenant_id: UUID) -> UUID | None:
        """The lease under which what is stored now goes straight to a decider; None when none waits for it."""
        settings = self._runtime.settings
        if self._stopping.is_set() or not self._board.reserve(EVENTS, tenant_id, settings.deciders):
            return None
        return self._runtime.life.new_lease()

    def asking(self, tenant_id: UUID, refs: Collection[str]) -> Aside[Found] | None:
        """What the decider would ask first of events about these leads, to go along with storing them."""
        return first_questions(self._runtime, tenant_id, refs)

    def hand(self, tenant_id: UUID, lease: UUID, rows: Sequence[sa.Row[Any]], found: Found | None, kept: Kept) -> None:
        """What was reserved: events that are leased, committed or just being so. Nothing new after all: no rows."""
        if rows:
            self._handed.put((tenant_id, lease, rows, found, kept))
            self._board.call(EVENTS)
        else:
            self._board.done(EVENTS, tenant_id, more=False)

    def handed(self) -> None:
        """What was handed over is committed, or lost: its decider goes on first."""
        give_way()
        if self._stopping.is_set():  # since the lease was given: perhaps nobody looks any more
            self._return_handed()

    # -- loops ----------------------------------------------------------------------------------------------

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run one step; an outage of the database is waited out for as long as it takes."""
        try:
            step()
        except SQLAlchemyError as error:
            if not is_outage(error):
                _log.error("worker fault", **log.fault(error))
            else:
                _log.warning("database away", **log.fault(error))
                self._runtime.database_lost()
            self._stopping.wait(random.uniform(0.2, 1.0))  # noqa: S311 - so that all threads do not come back at once
        except Exception as error:  # noqa: BLE001 - a thread that dies would stop the work in silence
            _log.error("worker fault", **log.fault(error))
            self._stopping.wait(1.0)

    def _decide(self) -> None:
        lane.set(Lane.OWNERS)
        decider = Decider(self._runtime, self._hand_over, self._free_senders)

        def step() -> None:
            taken = self._board.take((EVENTS,), 5.0, lambda: self._stopping.is_set() or not self._handed.empty())
            if taken is None:
                self._decide_handed(decider)
                return
            kind, tenant_id = taken
            more = True
            try:
                decider.run(tenant_id)
                more = decider.more
            finally:
                self._board.done(kind, tenant_id, more=more)

        while not self._stopping.is_set():
            self._guarded(step)

    def _decide_handed(self, decider: Decider) -> None:
        try:
            tenant_id, lease, rows, found, kept = self._handed.get_nowait()
        except queue.Empty:
            return
        more = True
        try:
            decider.decide(tenant_id, lease, rows, found, kept)
            more = decider.more
        finally:
            self._board.done(EVENTS, tenant_id, more=more)

    def _sending(self) -> None:
        sender = Sender(self._runtime)

        def step() -> None:
            with self._idle_lock:
                self._idle += 1
            try:
                taken = self._board.take(_SENDING, 5.0, lambda: self._stopping.is_set() or not self._leased.empty())
            finally:
                with self._idle_lock:
                    self._idle -= 1
            if self._stopping.is_set():
                if taken is not None:
                    self._board.done(*taken, more=False)
                return
            if taken is None:
                try:
                    one = self._leased.get_nowait()
                except queue.Empty:
                    return
                tenant_id = one.tenant.tenant_id
                if not self._board.begin(_SENDING, OWNERS, tenant_id):
                    self._return_leased(one)
                    self._board.post(OWNERS, tenant_id)
                    return
                try:
                    sender.send_leased(one)
                finally:
                    self._board.done(OWNERS, tenant_id, more=False)
                return
            kind, tenant_id = taken
            more = True
            try:
                # A note and a task: each has limits of its own, so that neither waits for the other.
                kinds = [("owner", "collaborator")] if kind == OWNERS else [(one,) for one in TELLING]
                more = sum(sender.run(tenant_id, one) for one in kinds) > 0
            finally:
                self._board.done(kind, tenant_id, more=more)

        while not self._stopping.is_set():
            self._guarded(step)

    def _free_senders(self) -> int:
        return max(0, self._idle - self._leased.qsize())

    def _hand_over(self, tenant_id: UUID, leased: Sequence[Leased], others: bool) -> None:
        for one in leased:
            self._leased.put(one)
            self._board.call(OWNERS)
        if others:
            self._board.post(OWNERS, tenant_id)
        elif len(leased) == 1 and leased[0].kept is KEPT:  # else whoever hands it over waits for the database next
            give_way()

    def _chores(self) -> None:
        lane.set(Lane.CHORES)

        def step() -> None:
            taken = self._board.take((_CHORES,), 5.0, self._stopping.is_set)
            if taken is None:
                return
            kind, tenant_id = taken
            more = True
            try:
                more = run_chore(self._runtime, tenant_id)
            finally:
                self._board.done(kind, tenant_id, more=more)

        while not self._stopping.is_set():
            self._guarded(step)

    def _scout(self) -> None:
        """Looks for due rows: what became due by time, what another process stored, what a lost wake left.

        And for tables that have grown since the database was new, so that what is asked of them is planned well.
        """

        def step() -> None:
            self._look_now.wait(self._runtime.limits.next_look(LOOK))  # what is closed opens to the moment
            self._look_now.clear()
            self._runtime.abandoned.give_back(self._runtime.engine)
            self._runtime.storing.clear_doubt()
            with at_rest(self._runtime.engine) as conn:
                self._runtime.life.look(conn)
                due = work.due_tenants(conn, living=self._runtime.life.living())
            for row in due:
                if row.events:
                    self._board.post(EVENTS, row.tenant_id)
                if row.writes:
                    self._board.post(OWNERS, row.tenant_id)
                if row.notes:
                    self._board.post(NOTES, row.tenant_id)
                if row.chores:
                    self._board.post(_CHORES, row.tenant_id)
            with at_rest(self._runtime.engine) as conn:
                if self._runtime.counts_rows(conn):
                    count_rows(conn)

        while not self._stopping.is_set():
            self._guarded(step)

    def _listen(self) -> None:
        """LISTEN, and be seen alive, on a connection of its own that no pooler may share (TURNLOCK_LISTEN_URL)."""
        settings = self._runtime.settings
        url = sa.make_url(settings.listen_url) if settings.listen_url else self._runtime.engine.url

        def step() -> None:
            dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
            with psycopg.connect(dsn, autocommit=True, connect_timeout=5) as conn, self._runtime.life.held(conn):
                conn.execute(f"LISTEN {CHANNEL}")
                while not self._ended.is_set():
                    for told in conn.notifies(timeout=HEARING, stop_after=1):
                        self.woken(*heard(told.payload))

        while not self._ended.is_set():
            try:
                step()
            except psycopg.Error as error:  # the scout's look covers what is missed meanwhile
                _log.warning("listener lost", **log.fault(error))
                self._ended.wait(random.uniform(0.2, 0.5))  # noqa: S311 - jitter, not a secret
