"""One decision: which rule wins, which agent gets the lead, who was passed over and why.

Pure: decides from what was read under the locks and returns values. A :class:`Bench` holds the lines of the locked
queues while a unit of several leads is decided in order; the store saves what it ends with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import Any
from uuid import UUID

from routing import caps, nested
from routing.model import Agent, Flag, Lead, Load, Reason, Role, Skip, Target, TargetKind, WhenNobody
from routing.nested import Sight, Taken
from routing.plan import Plan, QueueState, Reach, Waiting
from routing.rotation import Pick, Place
from routing.rules import Search
from routing.skips import Unavailable, absent, hindered, quiet_until, unavailable

__all__ = [
    "Bench",
    "Case",
    "Decision",
    "NeedQueues",
    "Outcome",
    "Plan",
    "QueueState",
    "Reach",
    "Waiting",
]


class Outcome(StrEnum):
    """What a decision came to."""

    ASSIGNED = "assigned"
    HELD = "held"
    LEFT = "left"
    PARKED = "parked"


@dataclass(frozen=True, slots=True)
class Case:
    """One lead to decide in one role. ``holders`` are agents who hold it in another role, ``declined`` those who had
    it and are not to get it again.

    ``chosen`` is the agent whom a human chose for this very lead: nothing else is asked. ``tried`` are the rules that
    were tried on it under this very plan already, if any: trying is pure, so they need not be tried again. ``waits`` is
    since when it is held, None for a lead that is not.
    """

    lead_id: UUID
    lead: Lead
    role: Role = Role.OWNER
    waits: datetime | None = None
    existing_owner: UUID | None = None
    household_owner: UUID | None = None
    holders: frozenset[UUID] = frozenset()
    declined: frozenset[UUID] = frozenset()
    tried: Search | None = None
    chosen: UUID | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome for one case. ``record`` is JSON-safe: everything that "why?" is answered from.

    ``turn`` is the data of the ledger entry where a turn was taken. ``inner`` are the turns of the lines within that
    one, where a team took it.
    """

    lead_id: UUID
    role: Role
    outcome: Outcome
    reason: Reason | None = None
    rule: str | None = None
    queue_id: UUID | None = None
    agent_id: UUID | None = None
    pick: Pick | None = None
    turn: Mapping[str, Any] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    inner: tuple[Taken, ...] = ()


class NeedQueues(Exception):
    """The decision reaches a queue that is not locked yet: the unit starts again with the union."""

    def __init__(self, queue_ids: Iterable[UUID]) -> None:
        self.queue_ids = frozenset(queue_ids)
        super().__init__("a further queue is needed")


class Bench:
    """Decides the cases of one unit in order, moving the lines of its locked queues in memory.

    `loads` is what the members with caps have, read under their counters' locks; every assignment of the unit adds.
    `ahead` are the held leads that are not of this unit and may have a claim on its members: whoever they could get now
    is not for a lead that came later. `members` are the members of every queue that has one of them, with weights.
    """

    def __init__(
        self,
        plan: Plan,
        agents: Mapping[UUID, Agent],
        queues: Mapping[UUID, QueueState],
        now: datetime,
        loads: Mapping[UUID, Load] | None = None,
        ahead: Iterable[Waiting] = (),
        members: Mapping[UUID, Mapping[UUID, int]] = MappingProxyType({}),
    ) -> None:
        self.plan = plan
        self.agents = agents
        self.queues = queues
        self.now = now
        self.lines = {queue_id: q.line for queue_id, q in queues.items()}
        self.loads = dict(loads or {})
        self.absent: dict[UUID, Unavailable | None] = {}  # what is the same for all leads is found out once
        self.ahead = list(ahead)
        self.members = members

    def decide(self, case: Case) -> Decision:
        """Decide `case`. Raises :class:`NeedQueues`; then nothing that this bench did may be kept."""
        decision = _Attempt(self, case).run()
        if decision.agent_id in self.loads:
            self.loads[decision.agent_id] = caps.more(self.loads[decision.agent_id])
        return decision

    def look(self, queue_id: UUID) -> Sight:
        """Who of a queue, and of the teams in it, could take a lead that nothing is known of."""
        return _Attempt(self, Case(queue_id, Lead(ref=""))).look(queue_id)

    def freed(self, agent_id: UUID | None) -> None:
        """An assignment of `agent_id` ended in this unit: the lead is not open any more."""
        if agent_id in self.loads:
            self.loads[agent_id] = caps.fewer_open(self.loads[agent_id])


class _Attempt:
    def __init__(self, bench: Bench, case: Case) -> None:
        self.bench = bench
        self.case = case
        self.flags = bench.plan.flags
        self.search = case.tried or bench.plan.search(case.lead, case.role)
        self.tried: int | None = None  # how many rules were tried; None: it did not come to that
        self.rule: str | None = None
        self.home: UUID | None = None  # the first queue that was looked at: where the lead waits
        self.record: dict[str, Any] = {}
        self.paths: list[dict[str, Any]] = []

    def run(self) -> Decision:
        case, plan, search = self.case, self.bench.plan, self.search
        if case.chosen is not None:
            found, reason = self._agent(case.chosen, "chosen")
            return found or self._end(Outcome.LEFT, reason)
        if case.role is Role.OWNER and search is not None and case.existing_owner and not self._left_alone(search):
            # The default for every newcomer: the same person goes to the agent who has them, before any other rule.
            decision = self._existing_owner(case.existing_owner, "existing_owner")
            if decision is not None:
                return decision
        if search is not None:
            for number, rule in search.matches():
                self.rule, self.tried = rule.name, number + 1
                decision = self._targets(rule.targets)
                if decision is not None:
                    return decision
            self.rule, self.tried = None, search.count
        if case.role is Role.COLLABORATOR:
            return self._end(Outcome.LEFT, Reason.NO_RULE)
        if plan.default_queue_id is None:
            return self._end(Outcome.HELD, Reason.NO_RULE)
        decision = self._targets((Target(TargetKind.QUEUE, plan.default_queue_id),))
        assert decision is not None  # noqa: S101 - a queue always ends in a decision
        return decision

    def _left_alone(self, search: Search) -> bool:
        """Whether a rule forbids to route this lead at all, which no default may overrule."""
        return any(rule.targets[0].kind is TargetKind.LEAVE_ALONE for _, rule in islice(search.matches(), 1))

    def _end(self, outcome: Outcome, reason: Reason | None, **more: Any) -> Decision:
        if self.paths:
            self.record["paths"] = self.paths
        if self.search is not None and self.tried is not None:
            self.record["rules"] = self.search.record(self.tried)
        return Decision(self.case.lead_id, self.case.role, outcome, reason, rule=self.rule, record=self.record, **more)

    def _assigned(self, how: str, agent_id: UUID, **more: Any) -> Decision:
        self.record["how"] = how
        return self._end(Outcome.ASSIGNED, None, agent_id=agent_id, **more)

    def _targets(self, targets: tuple[Target, ...]) -> Decision | None:
        """Walk a fallback chain. None: it was only an existing owner that is not there, so the next rule is tried."""
        home: UUID | None = None  # where the lead waits when the chain ends: its first choice among the queues
        reason = Reason.NO_IDENTITY_MATCH
        for target in targets:
            if target.kind is TargetKind.LEAVE_ALONE:
                return self._end(Outcome.LEFT, Reason.LEFT_BY_RULE)
            if target.kind is TargetKind.EXISTING_OWNER:
                decision = self._existing_owner(self.case.existing_owner, "existing_owner")
            elif target.kind is TargetKind.SAME_HOUSEHOLD:
                decision = self._existing_owner(self.case.household_owner, "same_household")
            elif target.kind is TargetKind.AGENT:
                assert target.id is not None  # noqa: S101 - the configuration gives every agent target its agent
                decision, reason = self._agent(target.id, "agent")
            else:
                assert target.id is not None  # noqa: S101 - likewise
                if target.id not in self.bench.plan.queue_names:
                    reason = Reason.TARGET_MISSING
                    self.paths.append({"queue": str(target.id), "why": reason.value})
                    continue
                home = home or target.id
                decision = self._queue(target.id)
            if decision is not None:
                return decision
        if self._all_hold_it():
            return self._end(Outcome.LEFT, Reason.ALREADY_ON_LEAD)
        if home is not None:
            return self._when_nobody(home)
        if reason is Reason.NO_IDENTITY_MATCH:
            return None
        return self._end(Outcome.HELD, reason)

    def _all_hold_it(self) -> bool:
        """Whether everyone whom the chain names holds this lead in another role: waiting would change nothing."""
        why = {path["why"] for path in self.paths if "unavailable" not in path}
        skips = {out["skip"] for path in self.paths for out in path.get("unavailable", ())}
        why |= skips - {Skip.TEAM_AWAY.value}  # whoever is in the team is told by its own path
        empty = any(path.get("unavailable") == [] for path in self.paths)
        return why == {Skip.ALREADY_ON_LEAD.value} and not empty

    def _existing_owner(self, agent_id: UUID | None, how: str) -> Decision | None:
        agent = self.bench.agents.get(agent_id) if agent_id else None
        if agent is None:
            self.paths.append({"existing_owner": None, "why": Reason.NO_IDENTITY_MATCH.value})
            return None
        if agent.agent_id in self.case.declined:
            self.paths.append({"existing_owner": str(agent.agent_id), "why": Skip.DECLINED.value})
            return None
        # Else only deactivation stops it: someone's own client goes to them on their day off, too.
        if not agent.active or agent.refused:
            self.paths.append({"existing_owner": str(agent.agent_id), "why": Skip.DEACTIVATED.value})
            return None
        return self._assigned(how, agent.agent_id)

    def _agent(self, agent_id: UUID, how: str) -> tuple[Decision | None, Reason]:
        agent = self.bench.agents.get(agent_id)
        if agent is None:
            self.paths.append({"agent": str(agent_id), "why": Reason.TARGET_MISSING.value})
            return None, Reason.TARGET_MISSING
        away = self._away(agent, 1)  # caps count what is named directly, and do not stop it
        if away is not None:
            self.paths.append({"agent": str(agent_id), "why": away.skip.value, "detail": away.detail})
            return None, Reason.TARGET_AWAY
        return self._assigned(how, agent_id), Reason.TARGET_AWAY

    def _away(self, agent: Agent, weight: int, load: Load | None = None) -> Unavailable | None:
        bench, skips = self.bench, Flag.SKIPS in self.flags
        if agent.agent_id not in bench.absent:
            bench.absent[agent.agent_id] = absent(agent, bench.now, skips=skips)
        return bench.absent[agent.agent_id] or hindered(
            agent,
            weight,
            bench.now,
            self.case.holders,
            declined=self.case.declined,
            load=load,
            skips=skips,
            weights=Flag.WEIGHTS in self.flags,
        )

    def _queue(self, queue_id: UUID) -> Decision | None:
        """The rotation's answer, or None when nobody of the queue is available."""
        bench = self.bench
        queue = bench.queues.get(queue_id)
        if queue is None:
            raise NeedQueues(bench.plan.lines_of([queue_id]))
        self.home = self.home or queue_id
        quiet = quiet_until(queue.quiet, bench.now)
        if quiet is not None:
            why = Reason.QUIET_HOURS
            self.paths.append({"queue": str(queue_id), "why": why.value, "detail": quiet[1]})
            return self._end(Outcome.HELD, why, queue_id=self.home)
        if self._would_overtake(queue_id):
            # The drain comes at once and decides the older ones first; then it is this one's turn.
            return self._end(Outcome.HELD, Reason.BEHIND_HELD, queue_id=self.home)
        sight = self.look(queue_id)
        path = self._looked(sight)
        if not sight.available:
            path["why"] = (Reason.NOBODY_AVAILABLE if sight.line.places else Reason.QUEUE_EMPTY).value
            return None
        if Flag.ROTATION not in self.flags:
            return self._by_rank(sight, path)
        taken = nested.take(sight, bench.queues)
        if not taken:
            path["why"] = Reason.NOBODY_AVAILABLE.value
            return None
        for number, one in enumerate(taken):
            if number:
                sight = sight.inside[one.queue_id]
                path = self._looked(sight, within=taken[number - 1].queue_id)
            bench.lines[one.queue_id] = one.after
            path["position"] = [one.before.position, one.after.position]
            path["passed_over"] = [str(a) for a in one.pick.passed_over]
            if one.pick.lost:
                path["lost"] = [str(a) for a in one.pick.lost]
            if len(taken) > 1:
                path["taken"] = str(one.pick.agent_id)
        first, last, how = taken[0], taken[-1], nested.how(taken).value
        more = {"pick": first.pick, "turn": first.data, "inner": tuple(taken[1:])}
        return self._assigned(how, last.pick.agent_id, queue_id=queue_id, **more)

    def look(self, queue_id: UUID) -> Sight:
        """Who of a locked queue can take this lead."""
        bench = self.bench
        teams, weights = Flag.TEAMS in self.flags, Flag.WEIGHTS in self.flags
        return nested.look(queue_id, bench.lines, bench.agents, self._of_place, teams=teams, weights=weights)

    def _of_place(self, place: Place) -> Unavailable | None:
        agent_id = place.agent_id
        return self._away(self.bench.agents[agent_id], place.weight, self.bench.loads.get(agent_id))

    def _looked(self, sight: Sight, within: UUID | None = None) -> dict[str, Any]:
        """Record a line as this lead found it (its own record is given), and the teams in it that were passed over."""
        path = self._path(sight, within)
        for outer, inside in sight.passed():
            why = Reason.NOBODY_AVAILABLE if inside.line.places else Reason.QUEUE_EMPTY
            self._path(inside, outer)["why"] = why.value
        return path

    def _path(self, sight: Sight, within: UUID | None) -> dict[str, Any]:
        away = [{"agent": str(out.agent_id), "skip": out.skip.value, "detail": out.detail} for out in sight.away]
        path: dict[str, Any] = {"queue": str(sight.queue_id), "unavailable": away}
        if within is not None:
            path["within"] = str(within)
        self.paths.append(path)
        return path

    def _by_rank(self, sight: Sight, path: dict[str, Any]) -> Decision:
        chain = nested.by_rank(sight)
        for number, (queue_id, member) in enumerate(chain if len(chain) > 1 else ()):
            if number:
                sight = sight.inside[queue_id]
                path = self._looked(sight, within=chain[number - 1][0])
            path["taken"] = str(member)
        return self._assigned("rank", chain[-1][1], queue_id=chain[0][0])

    def _would_overtake(self, queue_id: UUID) -> bool:
        """Whether somebody of this queue is there now whom a lead that waits longer could have, in whichever queue."""
        case, bench = self.case, self.bench
        if not bench.ahead or case.role is not Role.OWNER:
            return False
        older = [w for w in bench.ahead if case.waits is None or (w.since, w.lead_id) < (case.waits, case.lead_id)]
        if not older:
            return False
        members = nested.agents_of(queue_id, bench.lines, bench.agents, teams=Flag.TEAMS in self.flags)
        there = {agent_id for agent_id, weight in members if self._at_all(agent_id, weight) is None}
        for waiting in older:
            for line in bench.plan.reach(waiting.home, waiting.rule).queues:
                weights = bench.members.get(line, {})
                claimed = [a for a in there - waiting.had if weights.get(a)]
                if any(self._at_all(agent_id, weights[agent_id]) is None for agent_id in claimed):
                    return True
        return False

    def _at_all(self, agent_id: UUID, weight: int) -> Unavailable | None:
        """Why this agent can take no lead of a queue at all now, whichever it is."""
        bench, skips, weights = self.bench, Flag.SKIPS in self.flags, Flag.WEIGHTS in self.flags
        load = bench.loads.get(agent_id)
        return unavailable(bench.agents[agent_id], weight, bench.now, (), load=load, skips=skips, weights=weights)

    def _when_nobody(self, queue_id: UUID) -> Decision:
        """Nobody in the whole chain: the policy of the lead's own queue decides."""
        bench = self.bench
        seen = {queue_id}
        queue = bench.queues[queue_id]
        reason = Reason.QUEUE_EMPTY if not queue.line.places else Reason.NOBODY_AVAILABLE
        while queue.when_nobody is WhenNobody.FALLBACK_QUEUE and queue.fallback_queue_id is not None:
            following = queue.fallback_queue_id
            if following in seen or following not in bench.plan.queue_names:
                break
            seen.add(following)
            decision = self._queue(following)
            if decision is not None:
                return decision
            queue = bench.queues[following]
        if queue.when_nobody is WhenNobody.DEFAULT_AGENT and queue.default_agent_id is not None:
            decision, _ = self._agent(queue.default_agent_id, "default_agent")
            if decision is not None:
                return decision
        if queue.when_nobody is WhenNobody.LEAVE_UNASSIGNED:
            return self._end(Outcome.LEFT, Reason.LEFT_BY_QUEUE, queue_id=queue_id)
        return self._end(Outcome.HELD, reason, queue_id=queue_id)
