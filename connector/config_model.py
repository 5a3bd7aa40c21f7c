"""A tenant's configuration as frozen values: what :mod:`connector.config` reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID

from connector.wording import Wording
from routing.model import (
    Caps,
    Holidays,
    Hours,
    Leave,
    Quiet,
    Role,
    Skip,
    SkipPolicy,
    TargetKind,
    UnassignedDefinition,
    WhenNobody,
)
from routing.settle import SettleTimes

#: Stages in which a lead no longer counts as open, where the admin names none. Case does not count.
CLOSED_STAGES = ("Closed", "Converted", "Lost", "Past Client", "Trash")


@dataclass(frozen=True, slots=True)
class KnownAgent:
    """An agent whom a configuration may name: by ``ref`` (the CRM's id), email or name."""

    agent_id: UUID
    ref: str
    email: str | None
    name: str


@dataclass(frozen=True, slots=True)
class KnownTeam:
    """A team of the CRM that a configuration may follow: by ``ref`` (the CRM's id) or name.

    ``gone``: the CRM lists it no more.
    """

    ref: str
    name: str
    gone: bool = False


class Released(StrEnum):
    """What happens to a lead whose owner is cleared in the CRM after Turnlock assigned it."""

    ROUTE_AGAIN = "route_again"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What the admin says about an agent. None: the CRM's time zone; always open; no holidays; no caps."""

    zone: str | None = None
    hours: Hours | None = None
    leave: tuple[Leave, ...] = ()
    holidays: Holidays | None = None
    caps: Caps | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """An agent in a queue. The place in the list is the rank; ``weight`` is 0 (no turns) to 100."""

    agent_id: UUID
    weight: int = 1


@dataclass(frozen=True, slots=True)
class TeamMember:
    """A team in a queue, by the name that the configuration gives it.

    ``nested``: it takes turns as one, with ``weight`` (None: 1), and its own line says who of it is served. Otherwise
    everybody in it is a member of the queue, with ``weight`` each (None: the weights that the team gives them).
    """

    team: str
    weight: int | None = None
    nested: bool = False


Members = tuple[Member | TeamMember, ...]


@dataclass(frozen=True, slots=True)
class TeamConfig:
    """A team: its members in order of rank, or ``from_crm``, the id or name of the CRM's team that it follows."""

    name: str
    from_crm: str | None = None
    members: Members = ()


@dataclass(frozen=True, slots=True)
class NobodyPolicy:
    """What a queue does when none of its members is available; ``queue`` or ``agent_id`` where ``kind`` needs one."""

    kind: WhenNobody = WhenNobody.HOLD
    queue: str | None = None
    agent_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """One queue, its members in order of rank."""

    name: str
    members: Members = ()
    when_nobody: NobodyPolicy = NobodyPolicy()
    quiet_hours: Quiet | None = None
    skip_policy: Mapping[Skip, SkipPolicy] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class ConfigTarget:
    """Where a rule sends a lead; ``queue`` (its name) or ``agent_id`` where ``kind`` needs one.

    Of the kind queue is also the line of a ``team`` (its name), and ``agents``, a ranking of the rule's own.
    """

    kind: TargetKind
    queue: str | None = None
    agent_id: UUID | None = None
    team: str | None = None
    agents: Members = ()


@dataclass(frozen=True, slots=True)
class RuleConfig:
    """One rule: a condition for :func:`routing.conditions.compile_condition`, the first choice and its fallbacks."""

    name: str
    role: Role
    when: Mapping[str, Any]
    targets: tuple[ConfigTarget, ...]


#: How many leads an agent may ask to return in a day, unless the configuration says otherwise.
RETURNS_PER_DAY = 5


@dataclass(frozen=True, slots=True)
class Config:
    """A whole configuration. ``queues`` and ``teams`` stand in order of name, ``rules`` in order of precedence.

    ``zone`` is the one on whose clocks rules read when a lead arrived; None: no rule may ask. ``country`` is that of
    phones without a country code (ISO 3166, two letters).
    ``caps_zone`` is the clock on which caps count, None: each agent's own.
    """

    unassigned: UnassignedDefinition = field(default_factory=UnassignedDefinition)
    zone: str | None = None
    country: str | None = None
    default_queue: str | None = None
    released: Released = Released.ROUTE_AGAIN
    caps_zone: str | None = None
    closed_stages: tuple[str, ...] = CLOSED_STAGES
    returns_per_day: int = RETURNS_PER_DAY
    settle: SettleTimes = field(default_factory=SettleTimes)
    wording: Wording = field(default_factory=Wording)
    agents: Mapping[UUID, AgentFacts] = field(default_factory=lambda: MappingProxyType({}))
    teams: tuple[TeamConfig, ...] = ()
    queues: tuple[QueueConfig, ...] = ()
    rules: tuple[RuleConfig, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigNote:
    """Something that an admin may not have meant. ``text`` ends with what to do; the configuration can be used."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"
