"""Decide: claimed events are read, sorted into units, and seen through; then the writes go out.

What is done about events that do not come that far (a busy queue, a CRM that cannot be read, a fault) is here too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from adapters.base import EventKind
from adapters.outcome import CrmError, Fault, Outcome
from connector import breaker, inbox, log, oauth, settle, work
from connector.alarms import open_alarm
from connector.busy import QueueBusy
from connector.database import NO_DISK, at_rest, is_contention, is_outage, opening, transaction, unit
from connector.jobs import Send
from connector.kept import KEPT, Kept, NotKept
from connector.lanes import Planned, lanes
from connector.leads import Known, Unstored
from connector.reading import Events, Item, keep, known_now, read_events
from connector.runtime import Runtime, Tenant
from connector.splitting import split
from connector.units import BEHIND, Unit
from connector.work import LostLease
from routing import saving, store
from routing.decide import NeedQueues
from routing.flight import COMMIT, Aside, Asking, side_by_side, together
from routing.model import Reason, Role

_log = log.get("decide")


def _told_too_early(item: Item) -> bool:
    """Whether the lead as read is older than its event. To the second, as CRMs cut the times that they show."""
    told, read = item.event.occurred_at, item.lead.updated_at
    return told is not None and read is not None and read < told.replace(microsecond=0)


@dataclass(frozen=True, slots=True)
class Found:
    """What is asked first of events in hand: their tenant, what its CRM asked to wait, and which leads are known."""

    tenant: Tenant
    wait: float | None
    configured: store.TenantRow
    known: Mapping[str, Known]


def _first(
    runtime: Runtime, conn: sa.Connection | None, tenant_id: UUID, refs: Collection[str]
) -> tuple[Asking[Any], ...]:
    return (
        runtime.tenant_and_wait(conn, tenant_id),
        store.tenant_row.of(tenant_id),
        known_now(runtime, conn, tenant_id, refs),
    )


def _found(answers: Sequence[Any]) -> Found:
    (tenant, wait), configured, known = answers
    return Found(tenant, wait, configured, known)


def first_questions(runtime: Runtime, tenant_id: UUID, refs: Collection[str]) -> Aside[Found] | None:
    """What a decider asks first about events of these leads, to go along with their storing; None if that cannot be."""

    def asking() -> Asking[Found]:
        return _found((yield from side_by_side(*_first(runtime, None, tenant_id, refs))))

    return Aside(asking()) if runtime.knows_schema else None


# A unit that loses to configuration changes this often goes lead by lead with the configuration held still.
_RESTARTS = 3
# Lock races that a unit repeats at once before its events go back for a moment, so that other queues flow.
_CONTENTION_TRIES = 4
# A fault of data or code is tried this often, then the event is parked for a human.
_FAULT_TRIES = 5


class Decider:
    """Claims and decides. One per thread."""

    def __init__(self, runtime: Runtime, send: Send, capacity: Callable[[], int]) -> None:
        self._runtime = runtime
        self._send = send
        self._capacity = capacity
        #: Whether after the last run more may be due at once; what comes later wakes by itself.
        self.more = False
        # Of what is in hand: that its CRM did not ask to wait, and whether it is committed.
        self._calm, self._kept = True, KEPT
        self._sent: set[UUID] = set()  # writes of the present lease that senders have in hand

    def run(self, tenant_id: UUID) -> int:
        """Claim due events of a tenant and see them through; how many there were. Outages of the database raise."""
        lease, living = self._runtime.life.new_lease(), self._runtime.life.living()
        self.more = False
        self._runtime.units.wait(tenant_id)
        with self._given_back(tenant_id, lease), transaction(self._runtime.engine) as conn:
            claim = inbox.claim_events.of(tenant_id, lease, living=living, then=[NO_DISK, COMMIT])
            _, rows = together(conn, opening(conn), claim)
        if rows:
            self.decide(tenant_id, lease, rows)
        # What others left behind is claimed in parts.
        full = len({row.delivery_id for row in rows}) >= inbox.BATCH_DELIVERIES or len(rows) >= inbox.BATCH_EVENTS
        self.more = self.more or full or any(row.claims > 1 for row in rows)
        return len(rows)

    def decide(
        self,
        tenant_id: UUID,
        lease: UUID,
        rows: Sequence[sa.Row[Any]],
        found: Found | None = None,
        kept: Kept = KEPT,
    ) -> None:
        """See events through that are leased already; `found` is the answer to :func:`first_questions`, if there is.

        With `kept` they are still being committed, and nothing is written until they are. Outages of the database
        raise.
        """
        self.more = False
        with self._given_back(tenant_id, lease), suppress(NotKept):
            try:
                self._decide(tenant_id, lease, rows, found, kept)
            finally:
                kept.sure()  # what is not there yet cannot be given back

    @contextmanager
    def _given_back(self, tenant_id: UUID, lease: UUID) -> Iterator[None]:
        """What the lease still holds when the database is lost meanwhile is given back once it is there again."""
        sent: set[UUID] = set()
        self._sent = sent
        try:
            yield
        except SQLAlchemyError as error:

            def give_back(conn: sa.Connection) -> None:
                inbox.release_events(conn, tenant_id, lease)
                # A unit whose commit was not answered may have ordered writes that nobody was told of.
                work.release_outbox(conn, tenant_id, lease, besides=sent)

            self._runtime.abandoned.note(error, give_back)
            raise

    def _decide(
        self,
        tenant_id: UUID,
        lease: UUID,
        rows: Sequence[sa.Row[Any]],
        found: Found | None,
        kept: Kept,
    ) -> None:
        if found is None:
            refs = {row.ref for row in rows if row.ref is not None and row.kind != EventKind.INQUIRY}
            with at_rest(self._runtime.engine) as conn:
                found = _found(together(conn, *_first(self._runtime, conn, tenant_id, refs)))
        tenant, left, configured, known = found.tenant, found.wait, found.configured, found.known
        wait, probe = 0.0, None
        self._calm, self._kept = left is None, kept
        if left is not None or tenant.is_app:
            kept.sure()
        if left is not None:
            with at_rest(self._runtime.engine) as conn:
                wait, probe = breaker.admitted(conn, tenant_id, lease, left)
        if wait > 0:
            self._return(tenant, lease, [row.event_id for row in rows], after=wait, reason="crm_paused")
            return
        passed = False
        try:
            if tenant.is_app:
                split(self._runtime, tenant, lease, rows)
            else:
                self._see_through(tenant, configured, lease, rows, known, kept)
            passed = True
        except NotKept:
            raise
        except CrmError as error:
            self._crm_failed(tenant, lease, rows, error)
        except SQLAlchemyError as error:
            if is_outage(error):
                raise
            self._failed(tenant, lease, rows, error)
        except Exception as error:  # noqa: BLE001 - an event must never take its worker down with it
            self._failed(tenant, lease, rows, error)
        if probe is not None:
            with unit(self._runtime.engine) as (conn, _):
                if passed:
                    breaker.passed(conn, tenant_id, probe)
                else:
                    breaker.end_probe(conn, tenant_id, probe)

    def _see_through(
        self,
        tenant: Tenant,
        configured: store.TenantRow,
        lease: UUID,
        rows: Events,
        known: Mapping[str, Known],
        kept: Kept,
    ) -> None:
        try:
            client = oauth.client(self._runtime, tenant)
            read = read_events(self._runtime, tenant, configured, client, rows, known, kept)
        except Exception:
            kept.sure()  # what came of it is written next
            raise
        if not read.along:
            kept.sure()
        for row, lead_id in read.missing:
            self._missing(tenant, lease, row, lead_id)
        for row, reason in read.refused:
            self._park(tenant, lease, [row.event_id], reason)
        items = self._stored(tenant, lease, read.items)
        as_read: store.TenantRow | None = configured
        for _ in range(_RESTARTS):
            items = self._pass(tenant, lease, items, as_read)
            if not items:
                break
            as_read = None  # it moved
        for item in items:
            self._group(tenant, lease, [item], None)
        if read.later:
            self.more = True
            # Only now: another decider that takes them up must not overtake what came before them.
            with unit(self._runtime.engine) as (conn, _):
                later = [row.event_id for row in read.later]
                inbox.return_events(conn, tenant.tenant_id, lease, later, after=timedelta(0), untouched=True)

    def _stored(self, tenant: Tenant, lease: UUID, items: Sequence[Item]) -> Sequence[Item]:
        """`items` without those that the CRM told of before it stored them: they are read again.

        Such a CRM posts inside a transaction that is still open. Until it ends the lead is shown as it was, which
        would make a cleared owner an echo; if it is taken back, the lead is never shown as it was told.
        """
        if not tenant.adapter.settle:
            return items
        early = {item.event.event_id for item in items if _told_too_early(item)}
        if not early:
            return items
        with unit(self._runtime.engine) as (conn, now):
            for item in items:
                age = (now - item.event.received_at).total_seconds()
                if item.event.event_id in early and age >= tenant.adapter.missing_is_final_after:
                    early.remove(item.event.event_id)
                elif item.event.event_id in early:
                    after = timedelta(seconds=min(max(0.3, age / 2), 30.0))
                    ids = [item.event.event_id]
                    inbox.return_events(conn, tenant.tenant_id, lease, ids, after=after, reason="not_readable")
        return [item for item in items if item.event.event_id not in early]

    def _pass(self, tenant: Tenant, lease: UUID, items: Sequence[Item], row: store.TenantRow | None) -> list[Item]:
        """Sort `items` into units by their first queue and run them; gives those whose configuration moved.

        By `row`, else by the configuration as it is now. Should it be an old one, the unit finds out under its locks.
        """
        if row is None:
            with at_rest(self._runtime.engine) as conn:
                row = store.tenant_row(conn, tenant.tenant_id)
        items = settle.let_settle(self._runtime, tenant, lease, items, self._runtime.plan(None, row).settle)
        sorted_ = lanes(self._runtime, None, row, items)
        groups: dict[tuple[int, UUID | None], tuple[Planned, list[Item]]] = {}
        for number, (planned, lane) in enumerate(sorted_):
            for item in lane:
                groups.setdefault((number, planned.choice(item)[0]), (planned, []))[1].append(item)
        moved: list[Item] = []
        for planned, group in groups.values():
            try:
                self._group(tenant, lease, group, planned)
            except store.ConfigurationChanged:
                moved += group
        return moved

    def _group(self, tenant: Tenant, lease: UUID, items: Sequence[Item], planned: Planned | None) -> None:
        """Run one unit, again with more queues or after a lost race, and lead by lead if it fails as a whole."""
        queues: set[UUID] = set()
        tries = 0
        while True:
            try:
                with self._runtime.units.at_work(tenant.tenant_id), transaction(self._runtime.engine) as conn:
                    send = self._send if self._calm else None
                    attempt = Unit(self._runtime, tenant, lease, items, conn, send, self._kept)
                    # Where sending is stopped, what is born leased would only have to be given back.
                    at_once = self._capacity() if tenant.sending else 0
                    ordered = attempt.run(planned, queues, at_once)
                self.more = self.more or attempt.reads_again
            except NeedQueues as need:
                queues |= need.queue_ids
            except Unstored:
                items = keep(self._runtime, tenant, items)
            except LostLease:
                return
            except QueueBusy:
                items = keep(self._runtime, tenant, items)
                after = random.uniform(0.3, 0.7)  # noqa: S311 - jitter, not a secret
                self._return(tenant, lease, [i.event.event_id for i in items], after=after, reason="queue_busy")
                return
            except SQLAlchemyError as error:
                if is_outage(error):
                    raise
                tries += 1
                if is_contention(error) and tries < _CONTENTION_TRIES:
                    time.sleep(random.uniform(0.005, 0.05) * tries)  # noqa: S311 - jitter, not a secret
                    continue
                items = keep(self._runtime, tenant, items)
                if is_contention(error):
                    self._return(tenant, lease, [i.event.event_id for i in items], after=1.0, reason="queue_busy")
                    return
                self._alone(tenant, lease, items, error, planned)
                return
            except (store.ConfigurationChanged, saving.LostGuard, NotKept):
                raise
            except Exception as error:  # noqa: BLE001 - the good leads of a unit must not wait for the bad one
                items = keep(self._runtime, tenant, items)
                self._alone(tenant, lease, items, error, planned)
                return
            else:
                self._sent.update(one.outbox_id for one in ordered)
                self._send(tenant.tenant_id, attempt.leased, any(not one.leased for one in ordered))
                if attempt.wants_drain:
                    self._runtime.wake()
                return

    def _alone(
        self, tenant: Tenant, lease: UUID, items: Sequence[Item], error: Exception, planned: Planned | None
    ) -> None:
        if len(items) == 1:
            self._failed(tenant, lease, [items[0].event], error)
            return
        for item in items:
            try:
                self._group(tenant, lease, [item], planned)
            except store.ConfigurationChanged:
                # Some of the unit are saved already, so it cannot start again as a whole.
                self._group(tenant, lease, [item], None)

    # -- events that end otherwise --------------------------------------------------------------------------

    def _return(
        self, tenant: Tenant, lease: UUID, event_ids: Sequence[UUID], *, after: float, reason: str, counts: bool = False
    ) -> None:
        with unit(self._runtime.engine) as (conn, _):
            inbox.return_events(
                conn, tenant.tenant_id, lease, event_ids, after=timedelta(seconds=after), reason=reason, counts=counts
            )

    def _park(self, tenant: Tenant, lease: UUID, event_ids: Sequence[UUID], reason: str) -> None:
        with unit(self._runtime.engine) as (conn, _):
            if inbox.end_events(conn, tenant.tenant_id, lease, event_ids, state="parked", reason=reason):
                open_alarm(
                    conn,
                    tenant.tenant_id,
                    "event_parked",
                    reason,
                    "an event could not be decided and is parked; see `turnlock parked`, then `turnlock replay`",
                )

    def _missing(self, tenant: Tenant, lease: UUID, row: sa.Row[Any], lead_id: UUID | None) -> None:
        """The CRM does not show the lead: not readable yet while it is young, gone after that."""
        with unit(self._runtime.engine) as (conn, now):
            age = (now - row.received_at).total_seconds()
            # A lead that was readable once and is not any more is gone, however young the event is.
            if lead_id is None and row.kind != "lead_deleted" and age < tenant.adapter.missing_is_final_after:
                after = min(max(1.0, age / 2), 30.0)
                inbox.return_events(
                    conn, tenant.tenant_id, lease, [row.event_id], after=timedelta(seconds=after), reason="not_readable"
                )
                return
            if lead_id is not None:
                store.lock_leads(conn, tenant.tenant_id, [lead_id])
                if row.kind != "inquiry" and store.newest_ref(conn, tenant.tenant_id, lead_id) != row.ref:
                    # An id from before a merge: that the CRM does not show it says nothing about the lead.
                    inbox.end_events(conn, tenant.tenant_id, lease, [row.event_id], reason="merged", lead_id=lead_id)
                    return
                if lead_id in work.has_open_write(conn, tenant.tenant_id, [lead_id]):
                    inbox.return_events(
                        conn,
                        tenant.tenant_id,
                        lease,
                        [row.event_id],
                        after=BEHIND,
                        reason="behind_write",
                        lead_id=lead_id,
                    )
                    return
                saving.end_assignment(conn, tenant.tenant_id, lead_id, Role.OWNER, state="void", now=now)
                work.want_if_held(conn, tenant.tenant_id)  # it may have been what filled a cap
                saving.set_standing(
                    conn,
                    tenant.tenant_id,
                    lead_id,
                    Role.OWNER,
                    state="gone",
                    reason=Reason.GONE.value,
                    now=now,
                    queue_id=None,
                )
            inbox.end_events(conn, tenant.tenant_id, lease, [row.event_id], reason=Reason.GONE.value, lead_id=lead_id)

    def _crm_failed(self, tenant: Tenant, lease: UUID, rows: Sequence[sa.Row[Any]], error: CrmError) -> None:
        """The CRM could not be read. It says nothing against the events: they wait, however long it takes."""
        after = error.retry_after if error.retry_after is not None else 0.0
        claims = max(row.claims for row in rows)
        backoff = min(2.0 ** min(claims - 1, 6), 60.0) * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
        after = max(after * random.uniform(1.0, 1.1), 0.5 if after else backoff)  # noqa: S311 - never before Retry-After
        ids = [row.event_id for row in rows]
        if error.fault is Fault.BUDGET:  # nothing was sent
            self._return(tenant, lease, ids, after=error.retry_after or 0.0, reason="crm_limit")
            return
        _log.warning("crm not read", tenant=tenant.name, outcome=error.outcome.value, status=error.status)
        with unit(self._runtime.engine) as (conn, _):
            if error.outcome is Outcome.WAIT:
                breaker.shut_breaker(conn, tenant.tenant_id, seconds=after, reason="crm_asked_to_wait")
            elif error.outcome is Outcome.REAUTHORISE and oauth.doubt(self._runtime, conn, tenant):
                after = 0.0
            elif error.outcome in (Outcome.REAUTHORISE, Outcome.FORBIDDEN, Outcome.REDIRECTED, Outcome.PRIVATE_HOST):
                after = 60.0  # no lead can be read until a human acts, and that human must hear of it
                breaker.shut_breaker(conn, tenant.tenant_id, seconds=after, reason=error.outcome.value)
                open_alarm(conn, tenant.tenant_id, "crm_refuses_us", error.outcome.value, error.text)
            inbox.return_events(
                conn, tenant.tenant_id, lease, ids, after=timedelta(seconds=after), reason="crm_unreadable"
            )

    def _failed(self, tenant: Tenant, lease: UUID, rows: Sequence[sa.Row[Any]], error: BaseException) -> None:
        _log.error("decision failed", tenant=tenant.name, count=len(rows), **log.fault(error))
        spent = [row.event_id for row in rows if row.attempt + 1 >= _FAULT_TRIES]
        rest = [row.event_id for row in rows if row.event_id not in set(spent)]
        if spent:
            self._park(tenant, lease, spent, f"fault_{type(error).__name__.lower()}"[:60])
        if rest:
            after = 2.0 * random.uniform(0.5, 1.5)  # noqa: S311 - jitter
            self._return(tenant, lease, rest, after=after, reason="fault", counts=True)
