"""Decide: claimed events become units, each one short transaction under the locks, then the writes go out.

A unit is the leads of one tenant whose first choice is one queue (or none). Whatever was read under a lock is dropped
when the unit rolls back; nothing is called outside while it runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from adapters.outcome import CrmError, Outcome
from connector import log, work
from connector.alarms import open_alarm
from connector.busy import PROBE, QueueBusy
from connector.database import LOCK_TIMEOUT, is_contention, is_outage, new_id, set_lock_timeout, unit
from connector.reading import Item, read_events
from connector.runtime import Runtime, Tenant
from connector.tables import dedupe_keys
from routing import saving, store
from routing import tables as t
from routing.decide import Bench, Case, Decision, NeedQueues, Plan
from routing.decide import Outcome as Came
from routing.gate import Standing, Step, Verdict, gate
from routing.model import Agent, Flag, Reason, Role

#: Hands writes that were born leased to the senders of this process.
Send = Callable[[UUID, UUID, Sequence[saving.Ordered]], None]

# A unit that loses to configuration changes this often goes lead by lead with the configuration held still.
_RESTARTS = 3
# Lock races that a unit repeats at once before its events go back for a moment, so that other queues flow.
_CONTENTION_TRIES = 4
# A fault of data or code is tried this often, then the event is parked for a human.
_FAULT_TRIES = 5
# Behind an own write: woken by its end; this is only for the case that the wake is lost with a crash.
_BEHIND = timedelta(seconds=30)
_FORCED = ("console", "replay")
# Later than anything that is stored: what the unit at work has just decided.
_LATEST = datetime.max.replace(tzinfo=UTC)


class LostLease(Exception):
    """Another worker took the events over meanwhile: this unit keeps nothing."""


@dataclass(slots=True)
class _Result:
    """What one unit came to, gathered while it decides and acted upon in its own transaction."""

    decided: list[saving.Decided] = field(default_factory=list)
    done: list[tuple[UUID, UUID, str]] = field(default_factory=list)
    behind: list[tuple[UUID, UUID]] = field(default_factory=list)
    again: list[UUID] = field(default_factory=list)


class Decider:
    """Claims and decides. One per thread."""

    def __init__(self, runtime: Runtime, send: Send, capacity: Callable[[], int]) -> None:
        self._runtime = runtime
        self._send = send
        self._capacity = capacity

    def run(self, tenant_id: UUID) -> int:
        """Claim due events of a tenant and see them through; how many there were. Outages of the database raise."""
        lease, living = self._runtime.life.new_lease(), self._runtime.life.living()
        with unit(self._runtime.engine) as (conn, _):
            rows = work.claim_events(conn, tenant_id, lease, living=living)
            if not rows:
                return 0
            final = [row.event_id for row in rows]
            d = dedupe_keys.c
            # From here on an equal body is news, unless the vendor named the event.
            conn.execute(
                sa.delete(dedupe_keys).where(
                    d.tenant_id == tenant_id, ~d.final, d.event_id == sa.any_(sa.cast(final, sa.ARRAY(sa.Uuid)))
                )
            )
            tenant = self._runtime.tenant(conn, tenant_id)
            wait = work.breaker_wait(conn, tenant_id)
        if wait > 0:
            self._return(tenant, lease, [row.event_id for row in rows], after=wait, reason="crm_paused")
            return len(rows)
        try:
            self._see_through(tenant, lease, rows)
        except CrmError as error:
            self._crm_failed(tenant, lease, rows, error)
        except SQLAlchemyError as error:
            if is_outage(error):
                raise
            self._failed(tenant, lease, rows, error)
        except Exception as error:  # noqa: BLE001 - an event must never take its worker down with it
            self._failed(tenant, lease, rows, error)
        return len(rows)

    def _see_through(self, tenant: Tenant, lease: UUID, rows: Sequence[sa.Row[Any]]) -> None:
        with self._runtime.engine.connect() as conn:
            client = self._runtime.client(conn, tenant)
        read = read_events(self._runtime, tenant, client, rows)
        for row, lead_id in read.missing:
            self._missing(tenant, lease, row, lead_id)
        for row, reason in read.refused:
            self._park(tenant, lease, [row.event_id], reason)
        items = read.items
        for _ in range(_RESTARTS):
            items = self._pass(tenant, lease, items)
            if not items:
                return
        for item in items:
            self._group(tenant, lease, [item], share=True)

    def _pass(self, tenant: Tenant, lease: UUID, items: Sequence[Item]) -> list[Item]:
        """Sort `items` into units by their first queue and run them; gives those whose configuration moved."""
        with self._runtime.engine.connect() as conn:
            row = store.tenant_row(conn, tenant.tenant_id)
            plan = self._runtime.plan(conn, row)
        groups: dict[UUID | None, list[Item]] = {}
        for item in items:
            wants = row.unassigned.covers(item.lead) and item.event.kind != "lead_deleted"
            groups.setdefault(plan.first_queue(item.lead, item.role) if wants else None, []).append(item)
        moved: list[Item] = []
        for group in groups.values():
            try:
                self._group(tenant, lease, group, version=row.version)
            except store.ConfigurationChanged:
                moved += group
        return moved

    def _group(
        self,
        tenant: Tenant,
        lease: UUID,
        items: Sequence[Item],
        *,
        version: tuple[int, int] | None = None,
        share: bool = False,
    ) -> None:
        """Run one unit, again with more queues or after a lost race, and lead by lead if it fails as a whole."""
        queues: set[UUID] = set()
        tries = 0
        while True:
            try:
                ordered = self._unit(tenant, lease, items, queues, version, share)
            except NeedQueues as need:
                queues |= need.queue_ids
            except LostLease:
                return
            except QueueBusy:
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
                if is_contention(error):
                    self._return(tenant, lease, [i.event.event_id for i in items], after=1.0, reason="queue_busy")
                    return
                self._alone(tenant, lease, items, error, version, share)
                return
            except (store.ConfigurationChanged, saving.LostGuard):
                raise
            except Exception as error:  # noqa: BLE001 - the good leads of a unit must not wait for the bad one
                self._alone(tenant, lease, items, error, version, share)
                return
            else:
                if ordered:
                    self._send(tenant.tenant_id, lease, ordered)
                return

    def _alone(
        self,
        tenant: Tenant,
        lease: UUID,
        items: Sequence[Item],
        error: Exception,
        version: tuple[int, int] | None,
        share: bool,
    ) -> None:
        if len(items) == 1:
            self._failed(tenant, lease, [items[0].event], error)
            return
        for item in items:
            self._group(tenant, lease, [item], version=version, share=share)

    # -- the unit: one transaction ------------------------------------------------------------------------

    def _unit(
        self,
        tenant: Tenant,
        lease: UUID,
        items: Sequence[Item],
        more_queues: Iterable[UUID],
        version: tuple[int, int] | None,
        share: bool,
    ) -> list[saving.Ordered]:
        runtime, tenant_id = self._runtime, tenant.tenant_id
        with unit(runtime.engine) as (conn, db_now):
            lead_ids = {item.lead_id for item in items}
            digests = frozenset().union(*(item.identities for item in items))
            # The lock order of the project: (configuration, only when sharing) leads, identities, queues.
            row = store.tenant_row(conn, tenant_id, share=True) if share else None
            versions = store.lock_leads(conn, tenant_id, lead_ids)
            store.lock_identities(conn, tenant_id, digests)
            before_lock = row or store.tenant_row(conn, tenant_id)
            plan = runtime.plan(conn, before_lock)
            wanted = set(more_queues)
            for item in items:
                first = plan.first_queue(item.lead, item.role) if before_lock.unassigned.covers(item.lead) else None
                wanted |= {first} - {None} if first else set()
            with runtime.busy.asking(wanted) as held:
                if held:
                    set_lock_timeout(conn, PROBE)
                locked = store.lock_queues(conn, tenant_id, wanted)
                if held:
                    set_lock_timeout(conn, LOCK_TIMEOUT)
            # Only now, with every lock granted, is anything read that a decision rests on.
            after_lock = store.tenant_row(conn, tenant_id)
            if after_lock.version != (version or before_lock.version):
                raise store.ConfigurationChanged
            bench_input = _BenchInput.load(conn, tenant_id, plan, locked, items, digests)
            bench = Bench(plan, bench_input.agents, bench_input.queues, runtime.clock(db_now))
            result = _Result()
            self._decide_all(conn, tenant, after_lock, plan, bench, bench_input, items, versions, result, db_now)
            ordered = self._save(conn, tenant, lease, plan, bench, result, db_now)
            for event_id, lead_id in result.behind:
                work.return_events(
                    conn, tenant_id, lease, [event_id], after=_BEHIND, reason="behind_write", lead_id=lead_id
                )
            if result.again:
                work.return_events(conn, tenant_id, lease, result.again, after=timedelta(0), reason="read_again")
            return ordered

    def _decide_all(
        self,
        conn: sa.Connection,
        tenant: Tenant,
        row: store.TenantRow,
        plan: Plan,
        bench: Bench,
        known: _BenchInput,
        items: Sequence[Item],
        versions: dict[UUID, int],
        result: _Result,
        now: datetime,
    ) -> None:
        open_writes = work.has_open_write(conn, tenant.tenant_id, versions)
        for item in sorted(items, key=lambda i: known.waiting_since(i, now)):
            event_id = item.event.event_id
            standing = known.roles.get((item.lead_id, Role.OWNER))
            if item.role is Role.COLLABORATOR:
                self._collaborator(bench, known, item, standing, open_writes, result)
                continue
            verdict = gate(
                item.lead,
                known.standing(standing),
                definition=row.unassigned,
                open_write=item.lead_id in open_writes,
                stale=versions[item.lead_id] != item.version,
                released=row.released,
                digest=item.digest,
                forced=item.event.source in _FORCED,
                now=now,
            )
            if verdict.step is Step.BEHIND_WRITE:
                result.behind.append((event_id, item.lead_id))
                continue
            if verdict.step is Step.READ_AGAIN:
                result.again.append(event_id)
                continue
            result.done.append((event_id, item.lead_id, verdict.cause or verdict.step.value))
            if verdict.step is not Step.DECIDE:
                self._remember(conn, tenant, item, standing, verdict, known, versions, now)
                continue
            if standing is not None and standing.state == "assigned":
                saving.end_assignment(conn, tenant.tenant_id, item.lead_id, Role.OWNER, state="released", now=now)
            decision = bench.decide(
                Case(
                    item.lead_id,
                    item.lead,
                    was_held=standing is not None and standing.state == "held",
                    existing_owner=known.existing_owner(item),
                )
            )
            self._keep(result, known, item, standing, decision, verdict)
            versions[item.lead_id] += 1  # a second event of this lead in the same unit has read too early
            if decision.outcome is Came.ASSIGNED and Flag.WRITE_BACK in plan.flags:
                open_writes.add(item.lead_id)

    def _keep(
        self,
        result: _Result,
        known: _BenchInput,
        item: Item,
        before: store.RoleRow | None,
        decision: Decision,
        verdict: Verdict,
    ) -> None:
        decided = saving.Decided(
            decision, before, verdict.cause, item.event.event_id, item.event.received_at, item.digest, verdict.releases
        )
        if not saving.changes_nothing(decided):
            result.decided.append(decided)
        if decision.agent_id is not None and decision.role is Role.OWNER:
            known.assigned(item, decision.agent_id)

    def _collaborator(
        self,
        bench: Bench,
        known: _BenchInput,
        item: Item,
        owner: store.RoleRow | None,
        open_writes: set[UUID],
        result: _Result,
    ) -> None:
        """A collaborator is decided once, after the owner is confirmed, and never someone who already holds it."""
        event_id = item.event.event_id
        if item.lead_id in open_writes:
            result.behind.append((event_id, item.lead_id))
            return
        before = known.roles.get((item.lead_id, Role.COLLABORATOR))
        confirmed = owner is not None and owner.state == "assigned" and owner.confirmed_version is not None
        result.done.append((event_id, item.lead_id, "collaborator"))
        if not confirmed or owner is None or owner.agent_id is None or (before and before.state == "assigned"):
            return
        decision = bench.decide(
            Case(item.lead_id, item.lead, role=Role.COLLABORATOR, holders=frozenset({owner.agent_id}))
        )
        if decision.reason is not Reason.NO_RULE:
            self._keep(result, known, item, before, decision, Verdict(Step.DECIDE, "owner_confirmed"))

    def _remember(
        self,
        conn: sa.Connection,
        tenant: Tenant,
        item: Item,
        before: store.RoleRow | None,
        verdict: Verdict,
        known: _BenchInput,
        versions: dict[UUID, int],
        now: datetime,
    ) -> None:
        """Record what was learnt without a decision; nothing when nothing is new."""
        tenant_id, lead_id = tenant.tenant_id, item.lead_id
        owner = known.agent_of(item.lead.owner_ref)
        if verdict.step is Step.PARK:
            saving.set_standing(
                conn,
                tenant_id,
                lead_id,
                Role.OWNER,
                state="parked",
                reason=Reason.KEEPS_COMING_BACK.value,
                now=now,
                releases=list(verdict.releases),
            )
            saving.end_assignment(conn, tenant_id, lead_id, Role.OWNER, state="released", now=now)
            open_alarm(conn, tenant_id, "keeps_coming_back", str(lead_id), Reason.KEEPS_COMING_BACK.remedy)
        elif verdict.step is Step.LEAVE_RELEASED:
            saving.end_assignment(conn, tenant_id, lead_id, Role.OWNER, state="released", now=now)
            saving.set_standing(
                conn,
                tenant_id,
                lead_id,
                Role.OWNER,
                state="left",
                reason="released",
                now=now,
                agent_id=None,
                facts_digest=None,  # no change of the lead's fields brings it back
            )
        elif verdict.step is Step.OVERRIDDEN or (
            verdict.step is Step.OWNED and (before is None or before.state != "owned" or before.agent_id != owner)
        ):
            saving.end_assignment(conn, tenant_id, lead_id, Role.OWNER, state="overridden", now=now)
            saving.set_standing(
                conn,
                tenant_id,
                lead_id,
                Role.OWNER,
                state="owned",
                reason=Reason.OWNED.value,
                now=now,
                agent_id=owner,
                queue_id=None,
                facts_digest=item.digest,
            )
        else:
            return
        versions[lead_id] += 1

    def _save(
        self,
        conn: sa.Connection,
        tenant: Tenant,
        lease: UUID,
        plan: Plan,
        bench: Bench,
        result: _Result,
        now: datetime,
    ) -> list[saving.Ordered]:
        tenant_id = tenant.tenant_id
        ordered, drafts = saving.save_decisions(
            conn,
            tenant_id,
            result.decided,
            config_version=plan.config_version,
            now=now,
            new_id=new_id,
            write_back=Flag.WRITE_BACK in plan.flags,
            lease=lease,
            lease_for=work.LEASE,
            send_at_once=self._capacity(),
        )
        if Flag.ROTATION in plan.flags:
            saving.save_lines(conn, tenant_id, bench.queues, bench.lines, drafts, now)
        for item in result.decided:
            d = item.decision
            if d.outcome is Came.HELD and d.reason is not None:
                subject = plan.queue_names.get(d.queue_id, "no queue") if d.queue_id else "no queue"
                behind = d.reason is Reason.BEHIND_HELD
                work.want(conn, tenant_id, "held", within=0.0 if behind else 15.0)
                if not behind:
                    text = f"leads are held ({d.reason.value}): {d.reason.remedy}"
                    open_alarm(conn, tenant_id, "leads_held", subject, text)
        ended = 0
        for event_id, lead_id, reason in result.done:
            ended += work.end_events(conn, tenant_id, lease, [event_id], reason=reason, lead_id=lead_id)
        if ended != len(result.done):
            raise LostLease
        return ordered

    # -- events that end otherwise --------------------------------------------------------------------------

    def _return(
        self, tenant: Tenant, lease: UUID, event_ids: Sequence[UUID], *, after: float, reason: str, counts: bool = False
    ) -> None:
        with unit(self._runtime.engine) as (conn, _):
            work.return_events(
                conn, tenant.tenant_id, lease, event_ids, after=timedelta(seconds=after), reason=reason, counts=counts
            )

    def _park(self, tenant: Tenant, lease: UUID, event_ids: Sequence[UUID], reason: str) -> None:
        with unit(self._runtime.engine) as (conn, _):
            if work.end_events(conn, tenant.tenant_id, lease, event_ids, state="parked", reason=reason):
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
            if row.kind != "lead_deleted" and age < tenant.adapter.missing_is_final_after:
                after = min(max(1.0, age / 2), 30.0)
                work.return_events(
                    conn, tenant.tenant_id, lease, [row.event_id], after=timedelta(seconds=after), reason="not_readable"
                )
                return
            if lead_id is not None:
                store.lock_leads(conn, tenant.tenant_id, [lead_id])
                if lead_id in work.has_open_write(conn, tenant.tenant_id, [lead_id]):
                    work.return_events(
                        conn,
                        tenant.tenant_id,
                        lease,
                        [row.event_id],
                        after=_BEHIND,
                        reason="behind_write",
                        lead_id=lead_id,
                    )
                    return
                saving.end_assignment(conn, tenant.tenant_id, lead_id, Role.OWNER, state="void", now=now)
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
            work.end_events(conn, tenant.tenant_id, lease, [row.event_id], reason=Reason.GONE.value, lead_id=lead_id)

    def _crm_failed(self, tenant: Tenant, lease: UUID, rows: Sequence[sa.Row[Any]], error: CrmError) -> None:
        """The CRM could not be read. It says nothing against the events: they wait, however long it takes."""
        after = error.retry_after if error.retry_after is not None else 0.0
        claims = max(row.claims for row in rows)
        backoff = min(2.0 ** min(claims - 1, 6), 60.0) * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
        after = max(after * random.uniform(1.0, 1.1), 0.5 if after else backoff)  # noqa: S311 - never before Retry-After
        _log.warning("crm not read", tenant=tenant.name, outcome=error.outcome.value, status=error.status)
        ids = [row.event_id for row in rows]
        with unit(self._runtime.engine) as (conn, _):
            if error.outcome is Outcome.WAIT:
                work.shut_breaker(conn, tenant.tenant_id, seconds=after, reason="crm_asked_to_wait")
            elif error.outcome in (Outcome.REAUTHORISE, Outcome.FORBIDDEN):
                after = 60.0
                work.shut_breaker(conn, tenant.tenant_id, seconds=after, reason=error.outcome.value)
                open_alarm(conn, tenant.tenant_id, "crm_refuses_us", error.outcome.value, error.text)
            work.return_events(
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


_log = log.get("decide")


@dataclass(slots=True)
class _BenchInput:
    """What a unit reads once its locks are granted, and what it learns while it decides."""

    agents: dict[UUID, Agent]
    queues: dict[UUID, Any]
    roles: dict[tuple[UUID, Role], store.RoleRow]
    owners: dict[bytes, dict[UUID, tuple[datetime, UUID]]]
    shared: set[bytes]
    refs: dict[str, UUID]

    @classmethod
    def load(
        cls,
        conn: sa.Connection,
        tenant_id: UUID,
        plan: Plan,
        queue_ids: Sequence[UUID],
        items: Sequence[Item],
        digests: frozenset[bytes],
    ) -> _BenchInput:
        roles = store.load_roles(conn, tenant_id, {item.lead_id for item in items})
        owners, shared = store.existing_owners(conn, tenant_id, digests)
        if shared:
            open_alarm(
                conn,
                tenant_id,
                "shared_identity",
                "email or phone",
                f"more than {store.SHARED_BY_MANY} leads share an email or phone, so it no longer says who the agent "
                "is; give these leads contact data of their own in the CRM",
            )
        queues = store.load_queues(conn, tenant_id, plan.flags, queue_ids)
        r = t.agent_refs.c
        wanted_refs = sorted({item.lead.owner_ref for item in items if item.lead.owner_ref})
        refs = {}
        if wanted_refs:
            refs = {
                row.ref: row.agent_id
                for row in conn.execute(
                    sa.select(r.ref, r.agent_id).where(
                        r.tenant_id == tenant_id, r.ref == sa.any_(sa.cast(wanted_refs, sa.ARRAY(sa.Text)))
                    )
                )
            }
        wanted = {place.agent_id for queue in queues.values() for place in queue.line.places}
        wanted |= {row.agent_id for row in roles.values() if row.agent_id is not None}
        wanted |= {agent_id for by_lead in owners.values() for _, agent_id in by_lead.values()}
        wanted |= {queue.default_agent_id for queue in queues.values() if queue.default_agent_id is not None}
        wanted |= plan.target_agents
        return cls(store.load_agents(conn, tenant_id, plan.flags, wanted), queues, roles, owners, shared, refs)

    def agent_of(self, ref: str | None) -> UUID | None:
        return self.refs.get(ref) if ref else None

    def waiting_since(self, item: Item, now: datetime) -> tuple[int, datetime, datetime, int]:
        """Held leads first, longest waiting first; the others in order of receipt."""
        row = self.roles.get((item.lead_id, item.role))
        held = row is not None and row.state == "held"
        return (0 if held else 1, row.since if held and row else now, item.event.received_at, item.event.ordinal)

    def standing(self, row: store.RoleRow | None) -> Standing | None:
        if row is None:
            return None
        agent = self.agents.get(row.agent_id) if row.agent_id else None
        return Standing(
            row.state, agent.ref if agent else None, row.confirmed_version is not None, row.facts_digest, row.releases
        )

    def existing_owner(self, item: Item) -> UUID | None:
        """The agent of another lead that is the same person: the latest who can still take leads, else the latest."""

        def rank(known: tuple[datetime, UUID]) -> tuple[bool, datetime]:
            agent = self.agents.get(known[1])
            return agent is not None and agent.active and not agent.refused, known[0]

        found = [
            known
            for digest in item.identities
            for lead_id, known in self.owners.get(digest, {}).items()
            if lead_id != item.lead_id
        ]
        return max(found, key=rank)[1] if found else None

    def assigned(self, item: Item, agent_id: UUID) -> None:
        """Later leads of the same unit see this one, as the latest, by what says who the person is."""
        for digest in item.identities - self.shared:
            self.owners.setdefault(digest, {})[item.lead_id] = (_LATEST, agent_id)
