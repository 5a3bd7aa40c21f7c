"""Write back: tell the CRM who the agent is, read before and after, and never against a human.

A write is idempotent by value, so repeating it is safe as long as nothing newer exists on our side (the epoch) and
nobody changed it in the CRM (the reading before). Each end is one transaction that re-checks the lease.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from adapters.base import Capability
from adapters.budget import Lane
from adapters.outcome import CrmError, Fault, Outcome
from connector import breaker, jobs, log, oauth, work
from connector.agents import keep_agents
from connector.alarms import open_alarm
from connector.database import at_rest, is_contention, is_outage, unit
from connector.endings import confirm, gone, refuse, stale, supersede
from connector.jobs import Job, Leased
from connector.kept import NotKept
from connector.notes import told
from connector.runtime import Runtime, Tenant
from routing import tables as t
from routing.flight import fly
from routing.model import TELLING, AgentSeen, Lead

# What a decider read for a sender serves for so long, in seconds: longer only if no sender was free after all.
_FRESH = 1.0
# What was read ahead, of a lead or of the tenant's switches, counts as how it stands for so long: no longer than a call
# takes to arrive.
_JUST_NOW = 0.1
# Several CRMs accept an inactive owner with 200: an agent not read for this long is read again before the write.
_AGENT_FRESH = timedelta(seconds=60)
# Real tries at the outside world before a human looks. With the backoff below that is about half an hour.
_TRIES = 12
_BACKOFF = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# The longest pause, of those above, for a CRM that asks to wait and does not say how long: 30 seconds.
_LONGEST_UNTOLD = 4
# Readings before a write that somebody's change overtakes each time, before the row waits.
_LOOKS = 4
# The CRM refuses us as a whole (credentials, rights, address): a human must act, so looking once a minute is enough.
_REFUSED_WAIT = 60.0

_log = log.get("writeback")

P = ParamSpec("P")
T = TypeVar("T")


_LANES = {"note": Lane.NOTES, "task": Lane.TASKS}


def _lane(row: sa.Row[Any]) -> str:
    """Which of the breaker's lanes a row waits in."""
    return "note" if row.kind in TELLING else "all"


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What was read of a lead while its write was being saved, and when (monotonic seconds); or why it was not."""

    lead_ref: str
    at: float
    lead: Lead | None = None
    error: Exception | None = None


class Sender:
    """Sends outbox rows. One per thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # What is known of the row in hand beyond its columns; kept with it when it is given back.
        self._sent = False
        self._ahead: _Ahead | None = None
        self._empty_writes = 0
        self._probe = breaker.Probe(runtime.engine)
        self._pauses = 0

    def run(self, tenant_id: UUID, kinds: Sequence[str]) -> int:
        """Claim one due row of these kinds and send it; how many there were. Outages of the database raise."""
        lease, living = self._runtime.life.new_lease(), self._runtime.life.living()
        if self._runtime.limits.closed(tenant_id, _LANES.get(kinds[0], Lane.OWNERS)):
            return 0
        with self._given_back(tenant_id, lease, None):
            with at_rest(self._runtime.engine) as conn:
                if not breaker.may_send(conn, tenant_id):
                    return 0
                claimed = work.claim_outbox(conn, tenant_id, lease, kinds=kinds, living=living)
                found = fly(conn, [jobs.look(tenant_id, lease, claimed)])[0] if claimed is not None else []
            read_at = time.monotonic()
            if not found:
                return 0
            (row,) = found
            with self._runtime.limits.row(tenant_id, _LANES.get(row.kind, Lane.OWNERS)) as now:
                return int(self._send(tenant_id, lease, row, read_at, now))

    def send_leased(self, one: Leased) -> None:
        """Send a row that was born leased. Nothing happens when it is not saved, the lease is over or sending stopped.

        One that is still being saved has its lead read meanwhile.
        """
        tenant_id, lease, outbox_id = one.tenant.tenant_id, one.lease, one.outbox_id
        limits = self._runtime.limits.row(tenant_id, Lane.OWNERS)
        with self._given_back(tenant_id, lease, outbox_id), suppress(NotKept), limits as now:
            if now and one.lead_ref is not None:
                self._ahead = self._read_ahead(one.tenant, one.lead_ref)
            one.kept.sure()
            row, read_at = one.row, one.read_at
            if row is None or time.monotonic() - read_at > _FRESH:
                row, read_at = self._look(tenant_id, lease, outbox_id), time.monotonic()
            if row is not None and row.sending:
                self._send(tenant_id, lease, row, read_at, now)
                return
            with unit(self._runtime.engine) as (conn, _):
                # Sending was stopped in between: whoever starts it again must not wait for the lease to run out.
                work.return_outbox(
                    conn, tenant_id, lease, outbox_id, after=timedelta(0), counts=False, reason="stopped"
                )

    def _read_ahead(self, tenant: Tenant, lead_ref: str) -> _Ahead:
        try:
            lead = tenant.adapter.fetch_leads(oauth.client(self._runtime, tenant), [lead_ref]).get(lead_ref)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the write meets it
            return _Ahead(lead_ref, time.monotonic(), error=error)
        return _Ahead(lead_ref, time.monotonic(), lead)

    @contextmanager
    def _given_back(self, tenant_id: UUID, lease: UUID, outbox_id: UUID | None) -> Iterator[None]:
        """What the lease still holds when the database is lost meanwhile is given back once it is there again."""
        self._sent, self._ahead = False, None
        try:
            yield
        except SQLAlchemyError as error:
            back = partial(work.release_outbox, tenant_id=tenant_id, lease=lease, outbox_id=outbox_id, sent=self._sent)
            self._runtime.abandoned.note(error, back)
            raise

    def _send(self, tenant_id: UUID, lease: UUID, row: sa.Row[Any], read_at: float, now: bool) -> bool:
        """Send a row, unless what its CRM lets us call is used up (not `now`): then it is given back, and False."""
        if now:
            self._send_now(tenant_id, lease, row, read_at)
            return True
        with unit(self._runtime.engine) as (conn, _):  # due as it was, in its place among the others
            work.release_outbox(conn, tenant_id, lease, outbox_id=row.outbox_id)
        return False

    def _send_now(self, tenant_id: UUID, lease: UUID, row: sa.Row[Any], read_at: float) -> None:
        tenant: Tenant | None = None
        self._sent, self._empty_writes = bool(row.sent), row.empty_writes
        try:
            tenant = jobs.tenant_of(row)
            job = jobs.job_of(self._runtime, lease, row, read_at)
            self._pauses = job.breaker_failures
            if wait := self._probe.admitted(tenant_id, lease, job.wait, _lane(row)):
                self._return(tenant_id, lease, row, after=wait, counts=False, reason="crm_paused")
                return
            {"owner": self._owner, "collaborator": self._collaborator}.get(row.kind, self._tell)(job)
            if job.breaker_failures:
                with unit(self._runtime.engine) as (conn, _):
                    # Only a pause that is over: another thread may have been told to wait just now.
                    breaker.passed(conn, tenant_id, self._probe.mine, _lane(row), wrote=row.kind == "owner")
        except CrmError as error:
            self._crm_failed(tenant_id, lease, row, error, tenant)
        except SQLAlchemyError as error:
            if is_outage(error):
                raise
            _log.warning("write-back interrupted", tenant=str(tenant_id), **log.fault(error))
            counts = not is_contention(error)
            self._return(tenant_id, lease, row, after=1.0, counts=counts, reason="fault")
        except Exception as error:  # noqa: BLE001 - one row must never take its sender down with it
            _log.error("write-back failed", tenant=str(tenant_id), **log.fault(error))
            self._sent = True  # an answer that nobody foresaw: the write may well have been applied
            self._return(tenant_id, lease, row, after=5.0, counts=True, reason="fault")
        finally:
            self._probe.end(tenant_id)

    def _look(self, tenant_id: UUID, lease: UUID, outbox_id: UUID) -> sa.Row[Any] | None:
        with at_rest(self._runtime.engine) as conn:
            (rows,) = fly(conn, [jobs.look(tenant_id, lease, outbox_id)])
        return rows[0] if rows else None

    # -- the owner ------------------------------------------------------------------------------------------

    def _owner(self, job: Job) -> None:
        runtime, row = self._runtime, job.row
        if row.epoch < job.epoch:
            stale(runtime, job, "newer_epoch")
            return
        if job.now - job.agent_seen_at > _AGENT_FRESH and not self._agent_active(job):
            refuse(runtime, job, sent=self._sent)
            return
        for _ in range(_LOOKS):
            lead = self._read(job)
            if lead is None:
                gone(runtime, job, sent=self._sent)
                return
            if lead.owner_ref == job.agent_ref:
                confirm(runtime, job, lead)
                return
            if not self._may_write(job, lead):
                supersede(runtime, job, lead.owner_ref, sent=self._sent)
                return
            if self._too_late(job):
                self._return(job.tenant.tenant_id, job.lease, row, after=0.0, counts=False, reason="late")
                return
            try:
                written = self._write(job.adapter.set_owner, job.client, lead, job.agent_ref)
            except CrmError as error:
                refused = error.outcome in (Outcome.REFUSED, Outcome.AGENT_REFUSED)
                if refused and (not self._agent_active(job) or error.outcome is Outcome.AGENT_REFUSED):
                    refuse(runtime, job, sent=self._sent, why=error.text)
                    return
                if error.outcome is Outcome.CONFLICT:
                    continue
                raise
            if written.conflict:
                continue  # somebody changed the owner between our reading and our write: look again
            self._sent = True
            stored = written.owner_ref
            if Capability.WRITE_ANSWERS_OWNER not in job.adapter.capabilities:
                after = self._read(job)
                stored = after.owner_ref if after else None
            if stored == job.agent_ref:
                confirm(runtime, job, lead)
                return
            # Whom the write was to replace is nobody else: the CRM kept the owner as it was.
            if stored is not None and stored not in job.definition.user_refs and stored != job.expects_ref:
                supersede(runtime, job, stored, sent=True)
                return
            self._empty_writes += 1
            if self._empty_writes >= 2:
                # Accepted twice and still nobody: the CRM does not take this agent, whatever it answers.
                refuse(runtime, job, sent=False)
                return
        # The owner changes under our hands, or the CRM says so each time: not now, and not for ever.
        self._return(job.tenant.tenant_id, job.lease, row, after=5.0, counts=True, reason=Outcome.CONFLICT.value)

    def _write(self, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Make a call that changes the CRM, and note when it failed in a way that may have changed it all the same."""
        try:
            return call(*given, **named)
        except CrmError as error:
            # 503 says "not processed", but a gateway says it too, of a request that got through.
            self._sent = self._sent or error.outcome is Outcome.UNKNOWN or error.status == 503
            raise

    def _too_late(self, job: Job) -> bool:
        """Whether the write must not start any more: while the CRM was read, the lease ran down, or sending stopped."""
        now = time.monotonic()
        if now - job.read_at < _JUST_NOW and self._probe.mine is None:
            return False
        return now > job.deadline or not self._probe.may_send(job.tenant.tenant_id)

    def _may_write(self, job: Job, lead: Lead) -> bool:
        if job.definition.covers(lead):
            return True
        return job.expects_ref is not None and lead.owner_ref == job.expects_ref

    def _read(self, job: Job) -> Lead | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.lead_ref == job.lead_ref:
            if ahead.error is not None:
                raise ahead.error
            if time.monotonic() - ahead.at < _JUST_NOW:
                return ahead.lead
        return job.adapter.fetch_leads(job.client, [job.lead_ref]).get(job.lead_ref)

    def _agent_active(self, job: Job) -> bool:
        seen: AgentSeen | None = job.adapter.get_agent(job.client, job.agent_ref)
        with unit(self._runtime.engine) as (conn, _):
            found = seen or AgentSeen(ref=job.agent_ref, name="", active=False)
            keep_agents(self._runtime, conn, job.tenant.tenant_id, [found], job.now)
        return seen is not None and seen.active

    # -- collaborators and notes ----------------------------------------------------------------------------

    def _collaborator(self, job: Job) -> None:
        for write in (True, False):
            lead = self._read(job)
            if lead is None:
                gone(self._runtime, job, sent=self._sent)
            elif job.agent_ref in lead.collaborator_refs:
                confirm(self._runtime, job, lead)
            elif lead.owner_ref == job.agent_ref:
                stale(self._runtime, job, "already_on_lead")
            elif write:
                try:
                    self._write(job.adapter.add_collaborator, job.client, lead, job.agent_ref)
                except CrmError as error:
                    if error.outcome is not Outcome.FORBIDDEN:
                        raise
                    # The lead could be read, so it is this right alone that lacks. It says nothing of owners, who wait
                    # in the same lane and would stand still for it: the write parks, and says which right it is.
                    raise CrmError(Outcome.REFUSED, status=error.status, text=error.text) from None
                self._sent = True
                continue
            else:
                self._return(job.tenant.tenant_id, job.lease, job.row, after=5.0, counts=True, reason="not_kept")
            return

    def _tell(self, job: Job) -> None:
        """Once: a repeat, after a crash or a lost answer, looks for its own marker first."""
        with self._runtime.engine.connect() as conn:
            what = told(self._runtime, conn, job.tenant.tenant_id, job.row)
        if what is None or (job.row.kind == "task" and job.row.epoch < job.epoch):
            stale(self._runtime, job, "not_wanted" if what is None else "newer_epoch")
            return
        if not (job.sent and what.find(job)):
            self._write(what.add, job)
            self._sent = True
        with unit(self._runtime.engine) as (conn, _):
            work.end_outbox(conn, job.tenant.tenant_id, job.lease, job.row.outbox_id, state="confirmed")

    # -- what went wrong ------------------------------------------------------------------------------------

    def _crm_failed(
        self, tenant_id: UUID, lease: UUID, row: sa.Row[Any], error: CrmError, tenant: Tenant | None
    ) -> None:
        if error.fault is Fault.BUDGET:
            # Nothing was sent. The row waits, and its lane with it: the next would find no more than this one.
            after = max(error.retry_after or 0.0, 0.02)
            self._runtime.limits.close(tenant_id, _LANES.get(row.kind, Lane.OWNERS), after)
            self._return(tenant_id, lease, row, after=after, counts=False, reason="crm_limit")
            return
        _log.warning(
            "crm call failed",
            tenant=tenant.name if tenant else str(tenant_id),
            outcome=error.outcome.value,
            status=error.status,
            attempt=row.attempt,
            kind=row.kind,
        )
        jitter = random.uniform(1.0, 1.2)  # noqa: S311 - spreads retries, no secret
        backoff = _BACKOFF[min(row.attempt, len(_BACKOFF) - 1)] * jitter
        outcome = error.outcome
        if outcome is Outcome.WAIT:
            # Never before Retry-After; the whole tenant waits, because CRMs count all calls of an account. Notes wait
            # alone: they have limits of their own, and an owner must never wait for a note.
            untold = _BACKOFF[min(self._pauses, _LONGEST_UNTOLD)] * jitter
            after = max(error.retry_after * jitter if error.retry_after else untold, 0.2)
            with unit(self._runtime.engine) as (conn, _):
                reason = breaker.WRITE + "crm_asked_to_wait"
                breaker.shut_breaker(conn, tenant_id, seconds=after, reason=reason, lane=_lane(row))
                self._put_back(conn, tenant_id, lease, row, after=after, counts=False, reason=outcome.value)
            return
        if outcome is Outcome.FORBIDDEN and row.kind == "owner" and self._others_were_let(tenant_id, row):
            self._park(tenant_id, lease, row, f"forbidden_{error.status}", error)
            return
        if outcome in (Outcome.REAUTHORISE, Outcome.FORBIDDEN, Outcome.REDIRECTED, Outcome.PRIVATE_HOST):
            with unit(self._runtime.engine) as (conn, _):
                if outcome is Outcome.REAUTHORISE and tenant is not None and oauth.doubt(self._runtime, conn, tenant):
                    self._put_back(conn, tenant_id, lease, row, after=0.0, counts=False, reason=outcome.value)
                    return
                # A note that is refused holds up notes alone: the right to write them is one of its own, and where it
                # is no longer us whom the CRM knows, the next owner write tells.
                breaker.shut_breaker(
                    conn, tenant_id, seconds=_REFUSED_WAIT, reason=breaker.WRITE + outcome.value, lane=_lane(row)
                )
                open_alarm(conn, tenant_id, "crm_refuses_us", outcome.value, error.text)
                # Later than the pause ends: if only this lead is forbidden, another one shows it, and goes first.
                after = _REFUSED_WAIT * (1.25 if outcome is Outcome.FORBIDDEN else 1.0)
                self._put_back(conn, tenant_id, lease, row, after=after, counts=False, reason=outcome.value)
            return
        if outcome is Outcome.GONE:
            job = jobs.job_of(self._runtime, lease, row, time.monotonic())
            if row.kind in TELLING:
                stale(self._runtime, job, "gone")
            else:
                gone(self._runtime, job, sent=self._sent)
            return
        if row.attempt + 1 >= _TRIES or outcome in (Outcome.REFUSED, Outcome.AGENT_REFUSED):
            self._park(tenant_id, lease, row, f"{outcome.value}_{error.status or error.fault or 'no_answer'}", error)
            return
        with unit(self._runtime.engine) as (conn, _):
            if outcome is Outcome.NOT_SENT and error.status is None:
                # Nobody is there: one look per pause instead of one per waiting row. For a note that may be the fault
                # of what notes are read from, so that owners are not told to wait for it.
                seconds = min(backoff, 30.0)
                breaker.shut_breaker(conn, tenant_id, seconds=seconds, reason=outcome.value, lane=_lane(row))
            self._put_back(conn, tenant_id, lease, row, after=backoff, counts=True, reason=outcome.value)

    def _others_were_let(self, tenant_id: UUID, row: sa.Row[Any]) -> bool:
        """Whether this write was forbidden before and an owner write has ended the pause since.

        Then it is this lead or this agent (another company's, outside the team), and all others would stand still for
        it, a minute of each.
        """
        if self._pauses:
            return False
        o = t.outbox.c
        query = sa.select(o.reason).where(o.tenant_id == tenant_id, o.outbox_id == row.outbox_id)
        with at_rest(self._runtime.engine) as conn:
            return conn.execute(query).scalar_one_or_none() == Outcome.FORBIDDEN.value

    def _return(
        self, tenant_id: UUID, lease: UUID, row: sa.Row[Any], *, after: float, counts: bool, reason: str
    ) -> None:
        if counts and row.attempt + 1 >= _TRIES:
            self._park(tenant_id, lease, row, reason, None)
            return
        with unit(self._runtime.engine) as (conn, _):
            self._put_back(conn, tenant_id, lease, row, after=after, counts=counts, reason=reason)

    def _put_back(
        self,
        conn: sa.Connection,
        tenant_id: UUID,
        lease: UUID,
        row: sa.Row[Any],
        *,
        after: float,
        counts: bool,
        reason: str,
    ) -> None:
        work.return_outbox(
            conn,
            tenant_id,
            lease,
            row.outbox_id,
            after=timedelta(seconds=after),
            counts=counts,
            reason=reason,
            sent=self._sent,
            empty_writes=self._empty_writes,
        )

    def _park(self, tenant_id: UUID, lease: UUID, row: sa.Row[Any], reason: str, error: CrmError | None) -> None:
        """At the limit: a note is given up, a write stays open until a human replays it or gives it up."""
        with unit(self._runtime.engine) as (conn, _):
            state = "given_up" if row.kind in TELLING else "parked"
            if work.end_outbox(conn, tenant_id, lease, row.outbox_id, state=state, reason=reason[:60], sent=True):
                text = error.text if error else "a write to the CRM failed again and again"
                open_alarm(
                    conn,
                    tenant_id,
                    f"{row.kind}_not_written",
                    reason[:60],
                    f"{text} See `turnlock parked`; `turnlock replay` tries again.",
                )
