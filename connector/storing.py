"""Storing deliveries: one statement and one commit, shared by those that come while another one is being committed.

A burst from a CRM is many small requests at once. Each is answered only after its own commit, but they need not each
have a commit to themselves: whoever finds nobody storing for the tenant goes at once, and all who come meanwhile go
together, next. Nobody waits for company.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from adapters.base import EventKind
from connector.database import at_once, is_contention, is_outage
from connector.kept import Kept
from connector.wake import EVENTS, Wake
from connector.work import LEASE
from routing.flight import Aside, Statement

# Deliveries and events that share a commit: far above what comes in during one, far below what a statement can hold.
_MOST_DELIVERIES = 50
_MOST_EVENTS = 500

# One statement, so one round trip: nothing of a delivery is stored without all of it. A key that is taken, by a
# committed event or by one being committed now, is a duplicate: done already. Keys go in sorted, so that two
# deliveries with common keys wait for each other in one direction only.
STORE = Statement(
    sa.text(
        """
        WITH given AS (
            SELECT * FROM jsonb_to_recordset(CAST(:events AS jsonb)) AS g(
                key text, final boolean, event_id uuid, delivery_id uuid, ordinal integer, kind text, ref text,
                payload jsonb, state text, reason text, occurred_at timestamptz, flag_version integer,
                settle double precision
            )
        ), sent AS (
            SELECT * FROM jsonb_to_recordset(CAST(:deliveries AS jsonb)) AS d(
                delivery_id uuid, source text, hook_id uuid, headers jsonb, size integer
            )
        ), fresh AS (
            INSERT INTO dedupe_keys (tenant_id, key, event_id, final)
            SELECT CAST(:tenant AS uuid), key, event_id, final FROM given ORDER BY key COLLATE "C"
            ON CONFLICT (tenant_id, key) DO NOTHING
            RETURNING event_id
        ), news AS (
            SELECT given.* FROM given JOIN fresh USING (event_id)
        ), delivery AS (
            INSERT INTO deliveries (tenant_id, delivery_id, source, hook_id, headers, size, received_at)
            SELECT CAST(:tenant AS uuid), delivery_id, source, hook_id, headers, size, now() FROM sent
            WHERE delivery_id IN (SELECT delivery_id FROM news)
            RETURNING delivery_id
        ), body AS (
            INSERT INTO delivery_bodies (tenant_id, delivery_id, received_at, body)
            SELECT CAST(:tenant AS uuid), delivery_id, now(), body
            FROM unnest(CAST(:ids AS uuid[]), CAST(:bodies AS bytea[])) AS b(delivery_id, body)
            JOIN delivery USING (delivery_id)
        )
        INSERT INTO events (tenant_id, event_id, delivery_id, ordinal, kind, ref, payload, flag_version, state, reason,
                            received_at, occurred_at, closed_at, due_at, lease, leased_until, claims)
        SELECT CAST(:tenant AS uuid), event_id, delivery_id, ordinal, kind, ref, payload, flag_version, state, reason,
               now(), occurred_at, CASE WHEN state = 'ignored' THEN now() END,
               clock_timestamp() + make_interval(secs => settle),
               CASE WHEN state = 'waiting' THEN CAST(:lease AS uuid) END,
               CASE WHEN state = 'waiting' AND CAST(:lease AS uuid) IS NOT NULL
                    THEN clock_timestamp() + CAST(:lease_for AS interval) END,
               CASE WHEN state = 'waiting' AND CAST(:lease AS uuid) IS NOT NULL THEN 1 ELSE 0 END
        FROM news
        RETURNING delivery_id, state, reason, event_id, ordinal, kind, ref, received_at, occurred_at, attempt,
                  claims, lead_id, flag_version,
                  CASE WHEN lease IS NOT NULL THEN payload END AS payload,
                  (SELECT source FROM sent WHERE sent.delivery_id = events.delivery_id) AS source
        """
    )
)
# Nobody knows whether the statement that leased these was carried out: anybody may take them.
_UNLEASE = Statement(
    sa.text(
        "UPDATE events SET lease = NULL, leased_until = NULL, claims = 0 "
        "WHERE tenant_id = :tenant AND lease = :lease AND state = 'waiting'"
    )
)

Rows = Sequence[sa.Row[Any]]


class Deciders(Protocol):
    """Threads of this process that may decide at once what it stores."""

    def reserve(self, tenant_id: UUID) -> UUID | None:
        """The lease for what is stored now, or None when nobody waits for it."""

    def asking(self, tenant_id: UUID, refs: Collection[str]) -> Aside[Any] | None:
        """What is asked first about the leads of these refs, to go along with the storing; None: later, by itself."""

    def hand(self, tenant_id: UUID, lease: UUID, rows: Rows, found: Any, kept: Kept) -> None:
        """What was stored under that lease, with the answer of :meth:`asking`; no rows when there was nothing new.

        `kept` says when, and whether, that is committed.
        """

    def handed(self) -> None:
        """What was handed over is committed, or lost: whoever has it may go on."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery as its rows will hold it: JSON-safe `row` and `events`, and the raw `body`."""

    delivery_id: UUID
    row: dict[str, Any]
    body: bytes
    events: Sequence[dict[str, Any]]


def values(tenant_id: UUID, given: Sequence[Delivery], lease: UUID | None = None) -> dict[str, object]:
    """The parameters of :data:`STORE`."""
    return {
        "tenant": tenant_id,
        "events": json.dumps([event for delivery in given for event in delivery.events]),
        "deliveries": json.dumps([delivery.row for delivery in given]),
        "ids": [delivery.delivery_id for delivery in given],
        "bodies": [delivery.body for delivery in given],
        "lease": lease,
        "lease_for": LEASE,
    }


def _refs(events: Sequence[Mapping[str, Any]]) -> set[str]:
    """The leads that events name; what an inquiry names is not one."""
    return {event["ref"] for event in events if event["ref"] is not None and event["kind"] != EventKind.INQUIRY.value}


@dataclass(eq=False, slots=True)
class _Waiting:
    """A delivery on its way in, and how its thread hears what became of it."""

    delivery: Delivery
    called: threading.Event = field(default_factory=threading.Event)
    rows: Rows | None = None
    error: Exception | None = None


class Storing:
    """One per process; safe to share between threads."""

    def __init__(self, engine: sa.Engine, wake: Wake) -> None:
        self._engine = engine
        self._wake = wake
        #: Who decides in this process, if anybody.
        self.deciders: Deciders | None = None
        # Leases of statements of which nobody knows whether they were carried out.
        self._doubtful: list[tuple[UUID, UUID]] = []
        self._lock = threading.Lock()
        # Per tenant for whom somebody is storing right now: who goes next.
        self._lines: dict[UUID, list[_Waiting]] = {}

    def store(self, tenant_id: UUID, delivery: Delivery) -> Rows:
        """Commit `delivery`; the rows of those of its events that are new. Raises what its storing raised."""
        mine = _Waiting(delivery)
        with self._lock:
            line = self._lines.get(tenant_id)
            if line is None:
                self._lines[tenant_id] = []
            else:
                line.append(mine)
        if line is not None:
            # Whoever is storing calls: its statements end by their own time-outs, and it calls however they end.
            mine.called.wait()
        if mine.rows is None and mine.error is None:
            self._lead(tenant_id, mine)
        if mine.error is not None:
            if is_outage(mine.error) or is_contention(mine.error):
                raise mine.error
            # Something is wrong with one of those that went together: alone, it harms nobody but itself.
            return self._commit(tenant_id, [delivery])
        assert mine.rows is not None  # noqa: S101 - leading ends with rows or an error
        return mine.rows

    def _lead(self, tenant_id: UUID, mine: _Waiting) -> None:
        """Store `mine` with all that wait now, tell them, and call the next."""
        together = [mine]
        with self._lock:
            line = self._lines[tenant_id]
            events = len(mine.delivery.events)
            while line and len(together) < _MOST_DELIVERIES:
                events += len(line[0].delivery.events)
                if events > _MOST_EVENTS:
                    break
                together.append(line.pop(0))
        try:
            found: dict[UUID, list[sa.Row[Any]]] = {}
            for row in self._commit(tenant_id, [one.delivery for one in together]):
                found.setdefault(row.delivery_id, []).append(row)
            for one in together:
                one.rows = found.get(one.delivery.delivery_id, [])
        except Exception as error:
            for one in together:
                one.error = error
            if len(together) == 1:
                raise
        finally:
            with self._lock:
                following = line.pop(0) if line else None
                if following is None:
                    del self._lines[tenant_id]
            for one in together[1:]:
                one.called.set()
            if following is not None:
                following.called.set()

    def _commit(self, tenant_id: UUID, given: Sequence[Delivery]) -> Rows:
        """Store, and see that a decider has what is new: straight from here if one waits for it."""
        self.clear_doubt()
        # What has no key of its own for good must be seen again as soon as a decider has it: that is for claims. And
        # so is what its CRM has not stored yet.
        events = [event for delivery in given for event in delivery.events]
        direct = self.deciders is not None and all(event["final"] and not event["settle"] for event in events)
        deciders = self.deciders if direct else None
        lease = deciders.reserve(tenant_id) if deciders is not None else None
        if deciders is None or lease is None:
            return self._for_anybody(tenant_id, given)
        kept, handed = Kept(), False
        aside: Aside[Any] | None = None

        def hand(stored: Rows) -> None:
            nonlocal handed
            handed = True
            waiting = [row for row in stored if row.state == "waiting"]
            waiting.sort(key=lambda row: (row.delivery_id.bytes, row.ordinal))
            deciders.hand(tenant_id, lease, waiting, aside.answer if aside is not None else None, kept)

        stored: Rows = ()
        try:
            aside = deciders.asking(tenant_id, _refs(events))
            # What comes alone is made ready for its decision while it is being committed.
            early = hand if len(events) == 1 else None
            news = values(tenant_id, given, lease)
            stored = at_once(self._engine, STORE, news, repeat=False, aside=aside, early=early)
            kept.tell(True)
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            self._doubtful.append((tenant_id, lease))
            self.clear_doubt()
            return self._for_anybody(tenant_id, given)
        finally:
            kept.tell(False)
            if not handed:
                hand(stored)
            deciders.handed()
        return stored

    def _for_anybody(self, tenant_id: UUID, given: Sequence[Delivery]) -> Rows:
        rows = at_once(self._engine, STORE, values(tenant_id, given))
        if any(row.state == "waiting" for row in rows):
            self._wake(tenant_id, EVENTS)
        return rows

    def clear_doubt(self) -> None:
        """Give back what was stored under a lease that no decider was told of. Raises what the database raises."""
        while self._doubtful:
            try:
                tenant_id, lease = self._doubtful.pop()
            except IndexError:
                return  # another thread was quicker
            try:
                at_once(self._engine, _UNLEASE, {"tenant": tenant_id, "lease": lease})
            except BaseException:
                self._doubtful.append((tenant_id, lease))
                raise
            self._wake(tenant_id, EVENTS)
