"""A unit: the leads of one tenant whose first choice is one queue, decided in one short transaction under the locks.

Whatever is read under a lock is dropped when the transaction rolls back; nothing is called outside while it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector import inbox, work
from connector.alarms import open_alarm
from connector.busy import PROBE
from connector.database import LOCK_TIMEOUT, new_id, pipelined, set_lock_timeout
from connector.lanes import Planned, came_owned, lanes
from connector.reading import Item
from connector.runtime import Runtime, Tenant
from connector.shadow import Beside
from routing import saving, staging, store
from routing import tables as t
from routing.decide import Bench, Case, Decision, Outcome, Plan, QueueState
from routing.gate import Standing, Step, Verdict, gate
from routing.model import Agent, Flag, Reason, Role
from routing.stages import Mode

# Behind an own write: woken by its end; this is only for the case that the wake is lost with a crash.
BEHIND = timedelta(seconds=30)
_FORCED = ("console", "replay")
# Later than anything that is stored: what the unit at work has just decided.
_LATEST = datetime.max.replace(tzinfo=UTC)


class LostLease(Exception):
    """Another worker took the events over meanwhile: this unit keeps nothing."""


@dataclass(slots=True)
class _Result:
    """What a unit comes to, gathered while it decides and acted upon in its own transaction."""

    decided: list[saving.Decided] = field(default_factory=list)
    done: list[tuple[UUID, UUID, str]] = field(default_factory=list)
    behind: list[tuple[UUID, UUID]] = field(default_factory=list)
    again: list[UUID] = field(default_factory=list)
    modes: dict[UUID, Mapping[Flag, Mode]] = field(default_factory=dict)
    crm_owners: dict[UUID, UUID] = field(default_factory=dict)


class Unit:
    """One attempt at a unit, on the transaction that the caller opened and commits."""

    def __init__(
        self, runtime: Runtime, tenant: Tenant, lease: UUID, items: Sequence[Item], conn: sa.Connection, now: datetime
    ) -> None:
        self._runtime = runtime
        self._tenant_id = tenant.tenant_id
        self._lease = lease
        self._items = items
        self._conn = conn
        self._now = now
        self._result = _Result()

    def run(self, planned: Planned | None, more_queues: Collection[UUID], send_at_once: int) -> list[saving.Ordered]:
        """Decide and save; the writes that it ordered. Without `planned` the configuration is held still meanwhile.

        Raises :class:`routing.store.ConfigurationChanged`, :class:`routing.decide.NeedQueues` or
        :class:`connector.busy.QueueBusy`, upon which the caller rolls back and starts anew.
        """
        conn, tenant_id, runtime = self._conn, self._tenant_id, self._runtime
        # The lock order of the project: (configuration, only without a plan) leads, identities, queues.
        if planned is None:
            row = store.tenant_row(conn, tenant_id, share=True)
            ((planned, _),) = lanes(runtime, conn, row, self._items)  # one lead, so one lane
        self._versions = store.lock_leads(conn, tenant_id, {item.lead_id for item in self._items})
        digests = frozenset().union(*(item.identities for item in self._items))
        store.lock_identities(conn, tenant_id, digests)
        wanted = {q for item in self._items if (q := planned.choice(item)[0]) is not None} | set(more_queues)
        wanted |= set(planned.watched(self._items))
        with runtime.busy.asking(wanted) as held:
            if held:
                set_lock_timeout(conn, PROBE)
            locked = store.lock_queues(conn, tenant_id, wanted)
            if held:
                set_lock_timeout(conn, LOCK_TIMEOUT)
        # Only now, with every lock granted, is anything read that a decision rests on.
        self._row = store.tenant_row(conn, tenant_id)
        if self._row.version != planned.row.version:
            raise store.ConfigurationChanged
        self._planned, self._plan = planned, planned.plan
        self._known = _Known.load(conn, tenant_id, self._plan, locked, self._items, digests)
        self._bench = self._bench_of(self._plan, self._known)
        self._beside = self._shadows(locked, digests)
        self._open_writes = {row.lead_id for row in self._known.roles.values() if row.open_write}
        for item in sorted(self._items, key=lambda i: self._known.waiting_since(i, self._now)):
            if item.role is Role.COLLABORATOR:
                self._collaborator(item)
            else:
                self._owner(item)
        return self._save(send_at_once)

    def _bench_of(self, plan: Plan, known: _Known) -> Bench:
        return Bench(plan, known.agents, known.queues, self._runtime.clock(self._now))

    def _shadows(self, locked: Sequence[UUID], digests: frozenset[bytes]) -> list[Beside]:
        """The shadows of this unit, each with what it reads as the live path would with its flag on."""
        conn, tenant_id, items = self._conn, self._tenant_id, self._items
        held = [row.lead_id for row in self._known.roles.values() if row.state == "held"]
        found = [Beside(conn, tenant_id, watch, self._now) for watch in self._planned.watches]
        for one in found:

            def bench_of(plan: Plan) -> Bench:
                return self._bench_of(plan, _Known.load(conn, tenant_id, plan, locked, items, digests))

            if one.flag is not Flag.WRITE_BACK or any(came_owned(item) for item in items):
                one.load(self._plan, bench_of, locked, held)
        return found

    def _owner(self, item: Item) -> None:
        standing = self._known.roles.get((item.lead_id, Role.OWNER))
        event_id = item.event.event_id
        verdict = gate(
            item.lead,
            self._known.standing(standing),
            definition=self._row.unassigned,
            open_write=item.lead_id in self._open_writes,
            stale=self._versions[item.lead_id] != item.version,
            released=self._row.released,
            digest=item.digest,
            forced=item.event.source in _FORCED,
            now=self._now,
        )
        if verdict.step is Step.BEHIND_WRITE:
            self._result.behind.append((event_id, item.lead_id))
            return
        if verdict.step is Step.READ_AGAIN:
            self._result.again.append(event_id)
            return
        self._result.done.append((event_id, item.lead_id, verdict.cause or verdict.step.value))
        if verdict.step is not Step.DECIDE:
            if Flag.WRITE_BACK in self._row.shadowed:
                self._crm_gave(item, standing)
            self._remember(item, standing, verdict)
            return
        if standing is not None and standing.state == "assigned":
            self._end_assignment(item, "released")
        case = Case(
            item.lead_id,
            item.lead,
            was_held=standing is not None and standing.state == "held",
            existing_owner=self._known.existing_owner(item),
            tried=self._planned.choice(item)[1],
        )
        decision = self._bench.decide(case)
        self._keep(item, standing, decision, verdict, case)
        self._versions[item.lead_id] += 1  # a second event of this lead in the same unit has read too early
        if decision.outcome is Outcome.ASSIGNED and Flag.WRITE_BACK in self._plan.flags:
            self._open_writes.add(item.lead_id)

    def _crm_gave(self, item: Item, standing: store.RoleRow | None) -> None:
        """While write-back is in shadow the CRM routes by itself: whom it chose is kept beside whom we would have."""
        owner = self._known.agent_of(item.lead.owner_ref)
        if owner is None:
            return
        if standing is not None:
            self._result.crm_owners[item.lead_id] = owner
        elif came_owned(item):
            case = Case(item.lead_id, item.lead, existing_owner=self._known.existing_owner(item))
            for one in self._beside:
                if one.flag is Flag.WRITE_BACK:
                    one.came_owned(case, owner, item.event.received_at)

    def _keep(self, item: Item, before: store.RoleRow | None, decision: Decision, verdict: Verdict, case: Case) -> None:
        event = item.event
        modes = self._planned.modes.get(event.event_id, {})
        if modes:
            said = {flag.value: mode.value for flag, mode in modes.items()}
            decision = replace(decision, record={**decision.record, "modes": said})
        if (modes or item.noted) and decision.role is Role.OWNER:
            self._result.modes[item.lead_id] = modes
        decided = saving.Decided(
            decision, before, verdict.cause, event.event_id, event.received_at, item.digest, verdict.releases
        )
        if not saving.changes_nothing(decided):
            self._result.decided.append(decided)
            for one in self._beside:
                one.decide(case, decided)
        if decision.agent_id is not None and decision.role is Role.OWNER:
            self._known.assigned(item, decision.agent_id)

    def _collaborator(self, item: Item) -> None:
        """A collaborator is decided once, after the owner is confirmed, and never someone who already holds it."""
        if item.lead_id in self._open_writes:
            self._result.behind.append((item.event.event_id, item.lead_id))
            return
        owner = self._known.roles.get((item.lead_id, Role.OWNER))
        before = self._known.roles.get((item.lead_id, Role.COLLABORATOR))
        self._result.done.append((item.event.event_id, item.lead_id, "collaborator"))
        if owner is None or owner.state != "assigned" or owner.confirmed_version is None or owner.agent_id is None:
            return
        if before is not None and before.state == "assigned":
            return
        holders = frozenset({owner.agent_id})
        case = Case(item.lead_id, item.lead, role=Role.COLLABORATOR, holders=holders)
        decision = self._bench.decide(case)
        if decision.reason is not Reason.NO_RULE:
            self._keep(item, before, decision, Verdict(Step.DECIDE, "owner_confirmed"), case)

    def _end_assignment(self, item: Item, state: str) -> None:
        saving.end_assignment(self._conn, self._tenant_id, item.lead_id, Role.OWNER, state=state, now=self._now)

    def _stand(self, item: Item, **values: Any) -> None:
        saving.set_standing(self._conn, self._tenant_id, item.lead_id, Role.OWNER, now=self._now, **values)

    def _remember(self, item: Item, before: store.RoleRow | None, verdict: Verdict) -> None:
        """Record what was learnt without a decision; nothing when nothing is new."""
        owner = self._known.agent_of(item.lead.owner_ref)
        if verdict.step is Step.PARK:
            reason = Reason.KEEPS_COMING_BACK
            self._stand(item, state="parked", reason=reason.value, releases=list(verdict.releases))
            self._end_assignment(item, "released")
            open_alarm(self._conn, self._tenant_id, reason.value, str(item.lead_id), reason.remedy)
        elif verdict.step is Step.LEAVE_RELEASED:
            self._end_assignment(item, "released")
            # Without a digest no change of the lead's fields brings it back.
            self._stand(item, state="left", reason="released", agent_id=None, facts_digest=None)
        elif verdict.step is Step.OVERRIDDEN or (
            verdict.step is Step.OWNED and (before is None or before.state != "owned" or before.agent_id != owner)
        ):
            self._end_assignment(item, "overridden")
            self._stand(
                item,
                state="owned",
                reason=Reason.OWNED.value,
                agent_id=owner,
                queue_id=None,
                facts_digest=item.digest,
            )
        else:
            return
        self._versions[item.lead_id] += 1

    @property
    def reads_again(self) -> bool:
        """Whether events went back that are due again at once."""
        return bool(self._result.again)

    # -- saving ---------------------------------------------------------------------------------------------

    def _save(self, send_at_once: int) -> list[saving.Ordered]:
        conn, tenant_id, result, plan = self._conn, self._tenant_id, self._result, self._plan
        # First, because everything else is worth nothing if the events are somebody else's by now.
        if inbox.end_decided(conn, tenant_id, self._lease, result.done) != len(result.done):
            raise LostLease
        ordered, drafts = saving.save_decisions(
            conn,
            tenant_id,
            result.decided,
            config_version=plan.config_version,
            now=self._now,
            new_id=new_id,
            write_back=Flag.WRITE_BACK in plan.flags,
            lease=self._lease,
            lease_for=work.LEASE,
            send_at_once=send_at_once,
            batch=lambda: pipelined(conn),
        )
        if Flag.ROTATION in plan.flags:
            saving.save_lines(
                conn, tenant_id, self._bench.queues, self._bench.lines, drafts, self._now, lambda: pipelined(conn)
            )
        self._tell_of_held()
        staging.keep_modes(conn, tenant_id, result.modes)
        staging.note_crm_owners(conn, tenant_id, result.crm_owners, self._now)
        for one in self._beside:
            one.save()
        for event_id, lead_id in result.behind:
            inbox.return_events(
                conn, tenant_id, self._lease, [event_id], after=BEHIND, reason="behind_write", lead_id=lead_id
            )
        if result.again:
            inbox.return_events(conn, tenant_id, self._lease, result.again, after=timedelta(0), reason="read_again")
        return ordered

    def _tell_of_held(self) -> None:
        for item in self._result.decided:
            d = item.decision
            if d.outcome is not Outcome.HELD or d.reason is None:
                continue
            behind = d.reason is Reason.BEHIND_HELD
            work.want(self._conn, self._tenant_id, "held", within=0.0 if behind else 15.0)
            if not behind:
                subject = self._plan.queue_names.get(d.queue_id, "no queue") if d.queue_id else "no queue"
                text = f"leads are held ({d.reason.value}): {d.reason.remedy}"
                open_alarm(self._conn, self._tenant_id, "leads_held", subject, text)


@dataclass(slots=True)
class _Known:
    """What a unit reads once its locks are granted, and what it learns while it decides."""

    agents: dict[UUID, Agent]
    queues: dict[UUID, QueueState]
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
    ) -> _Known:
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
        wanted = {place.agent_id for queue in queues.values() for place in queue.line.places}
        wanted |= {row.agent_id for row in roles.values() if row.agent_id is not None}
        wanted |= {agent_id for by_lead in owners.values() for _, agent_id in by_lead.values()}
        wanted |= {queue.default_agent_id for queue in queues.values() if queue.default_agent_id is not None}
        wanted |= plan.target_agents
        agents = store.load_agents(conn, tenant_id, plan.flags, wanted)
        refs = _agents_by_ref(conn, tenant_id, {item.lead.owner_ref for item in items if item.lead.owner_ref})
        return cls(agents, queues, roles, owners, shared, refs)

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


def _agents_by_ref(conn: sa.Connection, tenant_id: UUID, refs: Collection[str]) -> dict[str, UUID]:
    if not refs:
        return {}
    r = t.agent_refs.c
    rows = conn.execute(
        sa.select(r.ref, r.agent_id).where(
            r.tenant_id == tenant_id, r.ref == sa.any_(sa.cast(sorted(refs), sa.ARRAY(sa.Text)))
        )
    )
    return {row.ref: row.agent_id for row in rows}
