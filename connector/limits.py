"""Keeping to what each CRM lets an account call, over all processes, owners first, and cheaply.

A bucket's count is a row in the database (:mod:`connector.buckets`). So that a lone lead pays no round trip for it, a
fifth of each bucket is dealt out by that row among the living processes that ask: each keeps a part from then on and
uses it without asking. Beyond that it asks, in portions that grow with its use. Who finds a bucket empty is told for
how long; the rows wait, not the threads.

Limits count at the CRM's own address, and elsewhere as soon as an answer tells of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from adapters.base import Adapter, Credentials
from adapters.budget import Bucket, Lane, Left, charges
from connector import buckets, log
from connector.alive import Life
from connector.daily import Budgets
from connector.database import is_contention

#: For whose sake this thread calls. Who says nothing is a command.
lane: ContextVar[Lane] = ContextVar("lane", default=Lane.COMMANDS)

_PATIENT = (Lane.CHORES, Lane.COMMANDS)
_TELLING = (Lane.NOTES, Lane.TASKS)
# The part of a bucket that is dealt out among the processes.
_DEALT = 0.2
# A portion is at most this part of a bucket.
_PORTION = 25
# Seconds that who is patient waits in its thread for one call: its place in a list of pages cannot be put down.
_PATIENCE = 15.0
# Seconds for which the threads of this process hold still after the CRM asked to wait: then the breaker is known.
_UNTIL_KNOWN = 1.0

# Seconds until a bucket whose row somebody holds for long is asked for again.
_BUSY = 0.3

_log = log.get("limits")


@dataclass(frozen=True, slots=True)
class _Token:
    """One call put by: `slot` where it is counted in the database, None where it is of this process's own part."""

    slot: int | None
    at: float


@dataclass(slots=True)
class _State:
    """What this process knows of one bucket. Guarded by `lock`, which is held while it asks: one asks for all."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    part: int = 0  # what this process keeps by the database's row, and uses without asking
    part_of: float = 0.0  # since when it was known to be alive when it got that
    own: deque[float] = field(default_factory=deque)  # when it used of it
    recent: deque[float] = field(default_factory=deque)
    portion: list[int] = field(default_factory=list)  # slots of what is left of the last portion
    portion_at: float = 0.0
    empty_until: dict[bool, float] = field(default_factory=dict)  # for owners, for all others
    heard_at: float = float("-inf")


class TenantGate:
    """The :class:`adapters.budget.Gate` of one tenant in this process. Safe to share between threads."""

    def __init__(self, limits: Limits, tenant_id: UUID, adapter: Adapter, table: tuple[Bucket, ...]) -> None:
        self._limits, self._tenant_id, self._adapter = limits, tenant_id, adapter
        self.table = table
        #: Whether the limits count at all; set once an answer tells of them.
        self.counts = False
        #: Those that the CRM's answers count.
        self.daily = Budgets(limits.engine, tenant_id, table)
        self._told = tuple(bucket for bucket in table if bucket.told)
        self._states = {bucket.name: _State() for bucket in table}
        self._still_until = {False: 0.0, True: 0.0}  # for every call; for what tells agents

    def take(self, method: str, path: str) -> float:
        """See :meth:`adapters.budget.Gate.take`. A chore waits here for a moment."""
        ends = time.monotonic() + (_PATIENCE if lane.get() in _PATIENT else 0.0)
        while True:
            wait = self._take(method, path)
            if not wait or time.monotonic() + wait > ends:
                return wait
            time.sleep(wait)

    def _take(self, method: str, path: str) -> float:
        telling = lane.get() in _TELLING
        still = max(self._still_until[False], self._still_until[True] if telling else 0.0)
        if (left := still - time.monotonic()) > 0:
            return left
        charged = charges(self.table, method, path)
        for bucket, _ in charged:
            if bucket.told and (left := self.daily.wait(bucket, lane.get())):
                return left
        for bucket, cost in charged:
            if bucket.told or not self.counts:
                continue
            cost -= self._use_put_by(bucket, cost)
            if cost > 0 and isinstance(got := self._get(bucket, cost), float):
                return got
        return 0.0

    def told(self, method: str, path: str, headers: Mapping[str, str], wait: float | None) -> None:
        """See :meth:`adapters.budget.Gate.told`."""
        if wait:
            # CRMs that ask to wait mean every call; but notes have limits of their own, and no owner waits for them.
            self._still_until[lane.get() in _TELLING] = time.monotonic() + min(wait, _UNTIL_KNOWN)
        charged = {bucket.name: bucket for bucket, _ in charges(self.table, method, path)}
        for name, said in self._adapter.left(headers, tuple(charged.values())).items():
            bucket, now = charged[name], time.monotonic()
            if bucket.told:
                self.daily.hear(bucket, said, lane.get())
                continue
            self.counts = True
            state = self._states[name]
            # While there is plenty nobody needs to know.
            if said.left > bucket.limit / 2 or now - state.heard_at < max(0.5, bucket.window / 20):
                continue
            state.heard_at = now
            try:
                used = bucket.limit - said.left
                buckets.hear(self._limits.engine, self._tenant_id, bucket, used, said.resets_in)
            except SQLAlchemyError as error:  # the answer must not be lost for it
                _log.warning("limits not kept", **log.fault(error))

    def put_by(self, wanted: Lane) -> tuple[list[tuple[Bucket, _Token]], float]:
        """Take what one row of a lane needs from begin to end; or the seconds to wait. The scarcest bucket first."""
        found: list[tuple[Bucket, _Token]] = []
        wait = max((self.daily.wait(bucket, wanted) for bucket in self._told), default=0.0)
        if wait or not self.counts:
            return found, wait
        for bucket in sorted(self.table, key=lambda b: b.limit / b.window):
            n = {Lane.OWNERS: bucket.owner, Lane.NOTES: bucket.note}.get(wanted, 0)
            got = self._get(bucket, n) if n else []
            if isinstance(got, float):
                self.give_back(found)
                return [], got
            found += [(bucket, token) for token in got]
        return found, 0.0

    def give_back(self, tokens: list[tuple[Bucket, _Token]]) -> None:
        """What was put by and not used. What is counted in the database stays counted: it is over soon."""
        for bucket, token in tokens:
            state = self._states[bucket.name]
            with state.lock:
                if token.slot is None and token.at in state.own:
                    state.own.remove(token.at)

    def _use_put_by(self, bucket: Bucket, cost: int) -> int:
        """Use what this thread put by; how much it was."""
        here = self._limits.put_by_here()
        mine = [entry for entry in here if entry[0] is bucket][:cost]
        for entry in mine:
            here.remove(entry)
            token, now = entry[1], time.monotonic()
            if now - token.at <= buckets.life(bucket):
                continue
            if token.slot is not None:
                buckets.move(self._limits.engine, self._tenant_id, bucket, token.slot)
                continue
            own = self._states[bucket.name].own
            with self._states[bucket.name].lock:
                if token.at in own:
                    own.remove(token.at)
                own.append(now)
        return len(mine)

    def _get(self, bucket: Bucket, n: int) -> list[_Token] | float:
        """`n` calls of a bucket from wherever they are nearest; or the seconds to wait."""
        owners, state = lane.get() is Lane.OWNERS, self._states[bucket.name]
        kept = 0 if owners else round(bucket.limit * bucket.kept)
        with state.lock:
            now, life = time.monotonic(), buckets.life(bucket)
            if (left := state.empty_until.get(owners, 0.0) - now) > 0:
                return left
            while state.own and state.own[0] <= now - buckets.hold(bucket):
                state.own.popleft()
            known = self._limits.known()
            if known is None or known[1] != state.part_of:
                state.part = 0  # others may have taken this process for dead since, and count on nothing of it
            # Where more processes came meanwhile it asks, and keeps less from then on.
            if not kept and len(state.own) + n <= state.part <= self._limits.share(bucket):
                state.own.extend([now] * n)
                return [_Token(None, now)] * n
            while state.recent and state.recent[0] <= now - life:
                state.recent.popleft()
            state.recent.extend([now] * n)
            if now - state.portion_at > life:
                state.portion.clear()
            if len(state.portion) >= n:
                return [_Token(state.portion.pop(), state.portion_at) for _ in range(n)]
            most = bucket.limit - kept
            for portion in sorted({n, max(n, min(len(state.recent), bucket.limit // _PORTION))}, reverse=True):
                taken = self._ask(bucket, state, portion, most, known)
                if taken.slot is not None:
                    state.portion, state.portion_at = [taken.slot] * (portion - n), now
                    return [_Token(taken.slot, now)] * n
            wait = max(taken.wait, 0.02)
            state.empty_until[owners] = now + wait
            return wait

    def _ask(self, bucket: Bucket, state: _State, n: int, most: int, known: tuple[int, float] | None) -> buckets.Taken:
        before, share, part = state.part, self._limits.share(bucket), None
        if known is not None:
            # An owner may take what is left of the own part as well; whoever leaves something to owners may not.
            least = max(len(state.own), 0 if most == bucket.limit else min(before, share))
            part = buckets.Part(known[0], max(share, least), int(bucket.limit * _DEALT), least)
        state.part = 0  # until it is sure what stands there now
        living = self._limits.living()
        try:
            taken = buckets.take(self._limits.engine, self._tenant_id, bucket, n, most, part, living)
        except SQLAlchemyError as error:
            if not is_contention(error):
                raise
            taken = buckets.Taken(None, _BUSY)
        if taken.slot is None:
            state.part = before
        elif known is not None:
            state.part, state.part_of = taken.part, known[1]
        return taken

    def leave(self, number: int) -> None:
        """Keep nothing any more: the process ends. Raises :class:`sqlalchemy.exc.DBAPIError`."""
        for bucket in self.table:
            state, now = self._states[bucket.name], time.monotonic()
            with state.lock:
                part, state.part = state.part, 0
                used = sum(at > now - buckets.hold(bucket) for at in state.own)
            if part:
                buckets.leave(self._limits.engine, self._tenant_id, bucket, number, used)


class Limits:
    """The gates of this process, one per tenant. Safe to share between threads."""

    def __init__(self, engine: sa.Engine, life: Life) -> None:
        self.engine = engine
        self._life = life
        self._left = False
        self._gates: dict[UUID, TenantGate] = {}
        self._opens: dict[tuple[UUID, Lane], float] = {}
        self._local = threading.local()

    def gate(self, tenant_id: UUID, adapter: Adapter, credentials: Credentials, *, at_home: bool) -> TenantGate:
        """The gate of a tenant; `at_home` says that its calls go to the CRM's own address."""
        table = tuple(adapter.buckets_of(credentials))
        gate = self._gates.get(tenant_id)
        if gate is None or gate.table != table:
            gate = self._gates[tenant_id] = TenantGate(self, tenant_id, adapter, table)
        gate.counts = gate.counts or at_home
        return gate

    def told(self, tenant_id: UUID, bucket: Bucket) -> Left | None:
        """What the last answer told this process of a bucket that the CRM counts; None: none did."""
        gate = self._gates.get(tenant_id)
        return gate.daily.said(bucket) if gate is not None and bucket in gate.table else None

    def known(self) -> tuple[int, float] | None:
        """See :meth:`connector.alive.Life.known`; None also once this process has left."""
        return None if self._left else self._life.known()

    def living(self) -> Sequence[int] | None:
        """See :meth:`connector.alive.Life.numbers`."""
        return self._life.numbers()

    def share(self, bucket: Bucket) -> int:
        """How much of a bucket each living process may keep; 0 while it is not known how many there are."""
        living = self.living()
        return int(bucket.limit * _DEALT) // len(living) if living else 0

    def leave(self) -> None:
        """This process ends: what it keeps of the buckets is there for others at once, not when it is seen dead."""
        known, self._left = self.known(), True
        if known is None:
            return
        try:
            for gate in list(self._gates.values()):
                gate.leave(known[0])
        except SQLAlchemyError as error:
            _log.warning("limits not given back", **log.fault(error))

    @contextmanager
    def row(self, tenant_id: UUID, of: Lane) -> Iterator[bool]:
        """Around one row of a lane: whether it may be begun now. If not, its lane is closed for a while.

        Only with a row in hand: what is put by for none would be lost to those that come.
        """
        before = lane.set(of)
        gate = self._gates.get(tenant_id)
        here = self.put_by_here()
        try:
            tokens, wait = gate.put_by(of) if gate is not None else ([], 0.0)
            here += tokens
            if wait:
                self.close(tenant_id, of, wait)
            yield not wait
        finally:
            if gate is not None:
                gate.give_back(here)
            here.clear()
            lane.reset(before)

    def closed(self, tenant_id: UUID, of: Lane) -> bool:
        """Whether rows of this lane need not be looked for now."""
        return self._opens.get((tenant_id, of), 0.0) > time.monotonic()

    def close(self, tenant_id: UUID, of: Lane, seconds: float) -> None:
        """No row of this lane is begun by this process for so long."""
        self._opens[tenant_id, of] = time.monotonic() + seconds

    def next_look(self, most: float) -> float:
        """Seconds until the next closed lane opens, at `most` so many."""
        now = time.monotonic()
        return min([most, *(max(at - now, 0.005) for at in list(self._opens.values()) if at > now)])

    def put_by_here(self) -> list[tuple[Bucket, _Token]]:
        """What this thread has put by for the row in hand."""
        found: list[tuple[Bucket, _Token]] = self._local.__dict__.setdefault("put_by", [])
        return found
