"""What a decision reads of a configuration: queues with their lines, and where a lead can find an agent. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from uuid import UUID

from routing.model import Flag, Lead, Quiet, Role, Skip, SkipPolicy, Target, TargetKind, WhenNobody
from routing.rotation import Line
from routing.rules import RuleSet, Search
from routing.settle import SettleTimes
from routing.skips import Unavailable, quiet_until


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue as read under its lock. ``held`` says that leads wait, in this queue or any other of the tenant; ranks
    below ``next_rank`` are used.

    ``policies`` says what an absence costs, by its reason; a reason that is not in it costs nothing.
    """

    queue_id: UUID
    name: str
    line: Line
    when_nobody: WhenNobody = WhenNobody.HOLD
    fallback_queue_id: UUID | None = None
    default_agent_id: UUID | None = None
    held: bool = False
    next_rank: int = 0
    quiet: Quiet | None = None
    policies: Mapping[Skip, SkipPolicy] = field(default_factory=dict)

    def under(self, policy: SkipPolicy, away: Iterable[Unavailable]) -> frozenset[UUID]:
        """Those of `away` whose absence falls under `policy` here."""
        return frozenset(out.agent_id for out in away if self.policies.get(out.skip) is policy)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Leads that are held and alike: their home queue, the rule that brought them there, and who had them before.

    Told by the one that waits longest: ``since`` and ``lead_id``, which is the order in which they are served.
    """

    home: UUID | None
    rule: str | None
    had: frozenset[UUID]
    since: datetime
    lead_id: UUID


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a held lead can find an agent: the lines of these queues, and agents whom it gets without a turn."""

    queues: frozenset[UUID]
    agents: frozenset[UUID]


@dataclass(frozen=True)
class Plan:
    """What routing needs to know of a tenant's configuration, at one version of it.

    ``target_agents`` are the agents whom rules name directly, ``closed_stages`` the stages (in lower case) in which a
    lead no longer counts as open; ``fallbacks`` and ``default_agents`` are what queues do when nobody is available,
    where that is somebody else. ``teams`` are the lines that take turns as members of another, of weight above 0.
    """

    config_version: int
    flags: frozenset[Flag]
    rules: RuleSet
    default_queue_id: UUID | None
    queue_names: Mapping[UUID, str]
    target_agents: frozenset[UUID] = frozenset()
    closed_stages: frozenset[str] = frozenset()
    fallbacks: Mapping[UUID, UUID] = field(default_factory=dict)
    default_agents: Mapping[UUID, UUID] = field(default_factory=dict)
    settle: SettleTimes = field(default_factory=SettleTimes)
    quiet: Mapping[UUID, Quiet] = field(default_factory=dict)
    teams: Mapping[UUID, tuple[UUID, ...]] = field(default_factory=dict)

    def lines_of(self, queue_ids: Iterable[UUID]) -> frozenset[UUID]:
        """These queues and the lines of all teams in them: what is locked together to decide in them."""
        found, new = set[UUID](), set(queue_ids)
        while new:
            found |= new
            new = {line for queue_id in new for line in self.teams.get(queue_id, ())} - found
        return frozenset(found)

    def is_quiet(self, queue_id: UUID | None, now: datetime) -> bool:
        """Whether this queue keeps its leads to itself at `now`."""
        hours = self.quiet.get(queue_id) if queue_id is not None else None
        return hours is not None and quiet_until(hours, now) is not None

    @cached_property
    def households(self) -> bool:
        """Whether any rule asks who has the household."""
        rules = (rule for role in Role for rule, _ in self.rules.compiled(role))
        return any(target.kind is TargetKind.SAME_HOUSEHOLD for rule in rules for target in rule.targets)

    def search(self, lead: Lead, role: Role) -> Search | None:
        """The rules about to be tried on `lead`; None while the rules are off."""
        return self.rules.search(lead, role) if Flag.RULES in self.flags else None

    def first_choice(self, lead: Lead, role: Role) -> tuple[UUID | None, Search | None]:
        """The queue that `lead` would be decided in first, None when that is no queue, and the rules tried for it."""
        tried = self.search(lead, role)
        for _, rule in tried.matches() if tried is not None else ():
            return next((t.id for t in rule.targets if t.kind is TargetKind.QUEUE), None), tried
        return (self.default_queue_id if role is Role.OWNER else None), tried

    def reach(self, home: UUID | None, rule: str | None, role: Role = Role.OWNER) -> Reach:
        """Where a lead that is held in `home` by `rule` can find an agent. A rule that is no more leaves the home."""
        targets = self._targets(rule, role) if Flag.RULES in self.flags else ()
        agents = {x.id for x in targets if x.kind is TargetKind.AGENT and x.id is not None}
        queues = {x.id for x in targets if x.kind is TargetKind.QUEUE and x.id in self.queue_names and x.id is not None}
        at, seen = home, set[UUID]()
        while at is not None and at not in seen:  # what the home queue does when nobody is available
            seen.add(at)
            if at in self.default_agents:
                agents.add(self.default_agents[at])
            at = self.fallbacks.get(at)
        return Reach(self.lines_of(queues | seen), frozenset(agents))

    def _targets(self, rule: str | None, role: Role) -> tuple[Target, ...]:
        return next((r.targets for r, _ in self.rules.compiled(role) if r.name == rule), ())

    def homes(self, queue_ids: Iterable[UUID]) -> frozenset[UUID]:
        """The queues in which leads may be held that could get a member of these queues."""
        wanted = frozenset(queue_ids)
        found = set(wanted)
        for home in {*self.fallbacks, *self.teams}:
            if self.reach(home, None).queues & wanted:
                found.add(home)
        if Flag.RULES in self.flags:
            for rule, _ in self.rules.compiled(Role.OWNER):
                chain = [x.id for x in rule.targets if x.kind is TargetKind.QUEUE and x.id is not None]
                if len(chain) > 1 and not wanted.isdisjoint(self.lines_of(chain)):
                    found.add(chain[0])
        return frozenset(found)
