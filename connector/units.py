"""A unit: the leads of one tenant whose first choice is one queue, decided in one short transaction under the locks.

Whatever is read under a lock is dropped when the transaction rolls back; nothing is called outside while it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector import inbox, jobs, testing, work
from connector.alarms import open_alarm
from connector.busy import PROBE
from connector.database import new_id, opening, patiently
from connector.jobs import Leased, Send
from connector.kept import Kept
from connector.lanes import Planned, came_owned, lanes
from connector.reading import Item, storing
from connector.runtime import Runtime, Tenant
from connector.seen import Seen
from connector.shadow import Beside
from connector.wake import give_way
from routing import saving, staging, store
from routing.decide import Bench, Case, Decision, Outcome, Plan, Waiting
from routing.flight import COMMIT, Ask, Asking, fly, together
from routing.gate import Step, Verdict, gate
from routing.model import Flag, Load, Reason, Role
from routing.skips import next_change, quiet_until
from routing.stages import Mode

# Behind an own write: woken by its end; this is only for the case that the wake is lost with a crash.
BEHIND = timedelta(seconds=30)
FORCED = ("console", "replay")
# Seconds after which the drain looks at a lead that was held, if nothing is known to change before.
_LOOK_AGAIN = 15.0


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
    """One attempt at a unit, on the connection and in the transaction that the caller rolls back where it fails.

    Two flights in all for most units: one brings BEGIN, the locks and what is read under them, one all that is
    written and COMMIT.
    """

    def __init__(
        self,
        runtime: Runtime,
        tenant: Tenant,
        lease: UUID,
        items: Sequence[Item],
        conn: sa.Connection,
        send: Send | None,
        kept: Kept,
    ) -> None:
        self._runtime = runtime
        self._tenant, self._tenant_id = tenant, tenant.tenant_id
        self._lease = lease
        self._items = items
        self._conn = conn
        # Only for a write whose lead may be read while it is being saved.
        self._send, self._kept = send, kept
        self._result = _Result()
        # Whether an agent may hold one open lead less after this unit.
        self._room = False
        #: Whether leads wait that the drain should look at, once this is committed.
        self.wants_drain = False
        #: Writes that were born leased, to be handed over once this is committed; those handed over ahead are not here.
        self.leased: list[Leased] = []

    def run(self, planned: Planned | None, more_queues: Collection[UUID], send_at_once: int) -> list[saving.Ordered]:
        """Decide and save; the writes that it ordered. Without `planned` the configuration is held still meanwhile.

        Raises :class:`routing.store.ConfigurationChanged`, :class:`routing.decide.NeedQueues`,
        :class:`connector.busy.QueueBusy` or :class:`connector.leads.Unstored`, upon which the caller rolls back and
        starts anew. It ends with one of these, too, only once it is sure that what it decides about is committed.
        """
        try:
            self._decide(planned, more_queues)
        finally:
            # Whatever came of it is written next. The locks are held meanwhile, for what they are held for anyway: a
            # commit that began before this, on the same disk.
            self._kept.sure()
        return self._save(send_at_once)

    def _decide(self, planned: Planned | None, more_queues: Collection[UUID]) -> None:
        conn, tenant_id, runtime = self._conn, self._tenant_id, self._runtime
        first: list[Asking[Any]] = [opening(conn)]
        # The lock order of the project: (configuration, only without a plan) leads, identities, queues.
        if planned is None:
            self._now, row = together(conn, *first, store.tenant_row.of(tenant_id, share=True))
            ((planned, _),) = lanes(runtime, conn, row, self._items)  # one lead, so one lane
            first = []
        known_by = [i.identities.all if planned.plan.households else i.identities.personal for i in self._items]
        digests = frozenset[bytes]().union(*known_by)
        wanted = {q for item in self._items if (q := planned.choice(item)[0]) is not None} | set(more_queues)
        wanted = set(planned.lines_of({*wanted, *planned.watched(self._items)}))
        now = runtime.database_clock.now()
        self._chosen = {i.lead_id: a for i in self._items if (a := testing.chosen(runtime, tenant_id, i.lead, now))}
        self._planned, self._plan, self._digests = planned, planned.plan, digests
        with runtime.busy.asking(wanted) as held:
            queues = store.lock_queues.of(tenant_id, wanted)
            *opened, _, self._versions, _, self._locked, self._row, self._known = together(
                conn,
                *first,
                storing(self._items),
                store.lock_leads.of(tenant_id, {item.lead_id for item in self._items}),
                store.lock_identities.of(tenant_id, digests),
                patiently.of(PROBE, queues) if held else queues,
                # Only behind these, with every lock granted, is anything read that a decision rests on.
                store.tenant_row.of(tenant_id),
                self._seen(self._plan, wanted),
            )
        if opened:
            (self._now,) = opened
        if self._row.version != planned.row.version:
            raise store.ConfigurationChanged
        at = runtime.clock(self._now)
        self._known.look_further(conn, tenant_id, self._plan, self._items, at)
        self._bench = self._bench_of(self._plan, self._known, at)
        self._beside = self._shadows(at)
        self._open_writes = {row.lead_id for row in self._known.roles.values() if row.open_write}
        for item in sorted(self._items, key=lambda i: self._known.waiting_since(i, self._now)):
            if item.role is Role.COLLABORATOR:
                self._collaborator(item)
            else:
                self._owner(item)

    def _seen(self, plan: Plan, queue_ids: Collection[UUID]) -> Asking[Seen]:
        chosen = self._chosen.values()
        return Seen.asked(self._tenant_id, plan, queue_ids, self._items, self._digests, chosen)

    def _bench_of(self, plan: Plan, known: Seen, at: datetime) -> Bench:
        loads = self._loads(plan, known, at)
        return Bench(plan, known.agents, known.queues, at, loads, ahead=known.ahead, members=known.members)

    def _loads(self, plan: Plan, known: Seen, at: datetime) -> dict[UUID, Load]:
        """What the members with caps have, counted once nobody else can give them a turn. No member, no lock."""
        if Flag.CAPACITY not in plan.flags:
            return {}
        members = {place.agent_id for queue_id in self._locked for place in known.queues[queue_id].line.places}
        capped = [agent for one in members if (agent := known.agents.get(one)) is not None and agent.caps is not None]
        store.lock_counters(self._conn, self._tenant_id, {agent.agent_id for agent in capped})
        return store.count_loads(self._conn, self._tenant_id, capped, at)

    def _shadows(self, at: datetime) -> list[Beside]:
        """The shadows of this unit, each with what it reads as the live path would with its flag on."""

        def bench_of(plan: Plan) -> Bench:
            (known,) = together(self._conn, self._seen(plan, self._locked))
            known.look_further(self._conn, self._tenant_id, plan, self._items, at)
            return self._bench_of(plan, known, at)

        held = [row.lead_id for row in self._known.roles.values() if row.state == "held"]
        found = [Beside(self._conn, self._tenant_id, watch, self._now) for watch in self._planned.watches]
        for one in found:
            if one.flag is not Flag.WRITE_BACK or any(came_owned(item) for item in self._items):
                one.load(self._plan, bench_of, self._locked, held)
        return found

    def _owner(self, item: Item) -> None:
        standing = self._known.roles.get((item.lead_id, Role.OWNER))
        event_id = item.event.event_id
        owner = self._known.agent_of(item.lead.owner_ref)
        returned = self._known.returned.get(item.lead_id)
        verdict = gate(
            item.lead,
            self._known.standing(standing),
            definition=self._row.unassigned,
            open_write=item.lead_id in self._open_writes,
            stale=self._versions[item.lead_id] != item.version,
            released=self._row.released,
            digest=item.digest,
            forced=item.event.source in FORCED,
            now=self._now,
            given_back=returned is not None and owner in returned.by,
        )
        if verdict.step in (Step.BEHIND_WRITE, Step.READ_AGAIN):
            if verdict.step is Step.BEHIND_WRITE:
                self._result.behind.append((event_id, item.lead_id))
            else:
                self._result.again.append(event_id)
            if standing is not None and standing.state == "held":
                self._still_ahead(item, standing)
            return
        self._result.done.append((event_id, item.lead_id, verdict.cause or verdict.step.value))
        if verdict.step is Step.ECHO and (item.lead.stage or "").lower() in self._plan.closed_stages:
            self._room = True
        if verdict.step is not Step.DECIDE:
            if Flag.WRITE_BACK in self._row.shadowed:
                self._crm_gave(item, standing)
            self._remember(item, standing, verdict)
            return
        if standing is not None and standing.state == "assigned":
            self._end_assignment(item, "released")
            self._bench.freed(standing.agent_id)
        case = Case(
            item.lead_id,
            item.lead,
            waits=standing.since if standing is not None and standing.state == "held" else None,
            existing_owner=self._known.owner_by(item, item.identities.personal),
            household_owner=self._known.owner_by(item, item.identities.household),
            declined=returned.had if returned is not None else frozenset(),
            tried=self._planned.choice(item)[1],
            chosen=self._chosen.get(item.lead_id),
        )
        decision = self._bench.decide(case)
        self._keep(item, standing, decision, verdict, case, expects=owner)
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
            case = Case(
                item.lead_id,
                item.lead,
                existing_owner=self._known.owner_by(item, item.identities.personal),
                household_owner=self._known.owner_by(item, item.identities.household),
            )
            for one in self._beside:
                if one.flag is Flag.WRITE_BACK:
                    one.came_owned(case, owner, item.event.received_at)

    def _keep(
        self,
        item: Item,
        before: store.RoleRow | None,
        decision: Decision,
        verdict: Verdict,
        case: Case,
        *,
        expects: UUID | None = None,
    ) -> None:
        event = item.event
        modes = self._planned.modes.get(event.event_id, {})
        if modes:
            said = {flag.value: mode.value for flag, mode in modes.items()}
            decision = replace(decision, record={**decision.record, "modes": said})
        if (modes or item.noted) and decision.role is Role.OWNER:
            self._result.modes[item.lead_id] = modes
        decided = saving.Decided(
            decision, before, verdict.cause, event.event_id, event.received_at, item.digest, verdict.releases, expects
        )
        if decision.outcome is Outcome.HELD and decision.reason is Reason.BEHIND_HELD:
            self.wants_drain = True
        same_rule = self._known.rules.get(item.lead_id, decision.rule) == decision.rule
        if not (saving.changes_nothing(decided) and same_rule):
            self._result.decided.append(decided)
            for one in self._beside:
                one.decide(case, decided)
        if decision.agent_id is not None and decision.role is Role.OWNER:
            self._known.assigned(item, decision.agent_id)

    def _still_ahead(self, item: Item, standing: store.RoleRow) -> None:
        """A held lead of this unit is not decided after all: those who came later must not overtake it."""
        returned = self._known.returned.get(item.lead_id)
        had = returned.had if returned is not None else frozenset()
        rule = self._known.rules.get(item.lead_id)
        self._bench.ahead.append(Waiting(standing.queue_id, rule, had, standing.since, item.lead_id))

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
        ended = saving.end_assignment(self._conn, self._tenant_id, item.lead_id, Role.OWNER, state=state, now=self._now)
        self._room = self._room or ended is not None

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
        saved = saving.save_decisions(
            tenant_id,
            result.decided,
            config_version=plan.config_version,
            now=self._now,
            new_id=new_id,
            write_back=Flag.WRITE_BACK in plan.flags,
            lease=self._lease,
            lease_for=work.LEASE,
            send_at_once=send_at_once,
        )
        # First, because everything else is worth nothing if the events are somebody else's by now.
        asks = [*inbox.end_decided(tenant_id, self._lease, result.done), *saved.asks]
        if Flag.ROTATION in plan.flags:
            asks += saving.moved_lines(tenant_id, self._bench.queues, self._bench.lines, saved.drafts, self._now)
        leased = [Leased(self._tenant, self._lease, one.outbox_id) for one in saved.ordered if one.leased]
        if not self._has_more_to_say():
            looks = [jobs.look(tenant_id, self._lease, one.outbox_id) for one in leased]
            if len(saved.ordered) == len(leased) == 1 and self._send is not None:
                self._save_with(self._send, leased[0], saved.ordered[0].lead_id, [*asks, *looks, COMMIT])
                return saved.ordered
            # What their senders need is read in the same flight, behind the commit.
            rows = fly(conn, [*asks, COMMIT, *looks])
            for born, found in zip(leased, rows[len(asks) + 1 :], strict=True):
                born.looked(found)
            self.leased = leased
            return saved.ordered
        fly(conn, asks)
        self.leased = leased
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
        return saved.ordered

    def _save_with(self, send: Send, one: Leased, lead_id: UUID, asks: Sequence[Ask]) -> None:
        """Save while the sender of the only write reads its lead in the CRM: nothing else before the commit is sure."""
        one.lead_ref, one.kept = next(item.lead.ref for item in self._items if item.lead_id == lead_id), Kept()
        try:
            *_, found, _ = fly(self._conn, asks, sent=partial(send, self._tenant_id, [one], False))
            one.looked(found)
            one.kept.tell(True)
        finally:
            one.kept.tell(False)
        give_way()

    def _has_more_to_say(self) -> bool:
        """Whether something is to be written beside decisions and lines, which most units do not come to."""
        result = self._result
        held = any(item.decision.outcome is Outcome.HELD for item in result.decided)
        told = held or self._room or self.wants_drain or any(item.event.source == "held" for item in self._items)
        return bool(told or self._beside or result.modes or result.crm_owners or result.behind or result.again)

    def _tell_of_held(self) -> None:
        if self._room and Flag.CAPACITY in self._plan.flags:
            work.want_if_held(self._conn, self._tenant_id)
        # A batch of the drain that led anywhere is followed by the next one at once.
        served = {item.decision.lead_id for item in self._result.decided if item.decision.outcome is Outcome.ASSIGNED}
        if any(item.event.source == "held" and item.lead_id in served for item in self._items):
            self.wants_drain = True
        if self.wants_drain:
            work.want(self._conn, self._tenant_id, "held")
        waits = {
            (d.queue_id, d.reason)
            for d in (item.decision for item in self._result.decided)
            if d.outcome is Outcome.HELD and d.reason is not None and d.reason is not Reason.BEHIND_HELD
        }
        # Once for all leads of the unit: these rows are everybody's, and locked from here to the commit.
        if waits and not self.wants_drain:
            work.want(self._conn, self._tenant_id, "held", within=self._looked_at_again())
        for queue_id, reason in sorted(waits, key=str):
            if reason is Reason.QUIET_HOURS:
                continue
            subject = self._plan.queue_names.get(queue_id, "no queue") if queue_id else "no queue"
            text = f"leads are held ({reason.value}): {reason.remedy}"
            open_alarm(self._conn, self._tenant_id, "leads_held", subject, text)

    def _looked_at_again(self) -> float:
        """Seconds until the drain is to look for the first time: when the first of those whom this unit knows is back.

        But soon, for it knows of all agents and queues, and then sleeps until the next of them is back; not at once,
        for what was found under the locks a moment ago would be found again.
        """
        bench = self._bench
        backs = [next_change(agent, bench.now, bench.loads.get(agent.agent_id)) for agent in bench.agents.values()]
        quiet = [quiet_until(queue.quiet, bench.now) for queue in bench.queues.values()]
        coming = [*backs, *(found[0] for found in quiet if found)]
        ahead = [(back - bench.now).total_seconds() for back in coming if back is not None and back > bench.now]
        return min([*ahead, _LOOK_AGAIN])
