"""The words of Turnlock as frozen values.

Everything here is plain data: no database, no HTTP, no clock. Adapters make :class:`Lead` and :class:`AgentSeen`
out of a CRM's answers; the rest of ``routing`` decides over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID

Scalar = str | int | Decimal | bool | None
Custom = Mapping[str, Scalar | tuple[Scalar, ...]]


#: Kinds of writes that tell an agent of a lead: after every owner, and no owner waits for them.
TELLING = ("note", "task")


class Role(StrEnum):
    """In which role an agent holds a lead. ``owner`` is decided first, collaborators after it is confirmed."""

    OWNER = "owner"
    COLLABORATOR = "collaborator"


@dataclass(frozen=True, slots=True)
class Lead:
    """A prospect as one CRM shows it at one reading, in Turnlock's words.

    ``ref`` is the CRM's id as text. ``owner_ref`` is the CRM's id of the owning agent or None; ``pond_ref`` names a
    shared bucket that holds the lead; ``unclaimed`` marks an open first-to-claim offer; ``former_refs`` are ids that
    this lead, or one merged into it, had before. Money is in the account's currency, ``latitude`` and ``longitude``
    are degrees (WGS 84). Times are aware UTC. A field that the CRM does not fill is None or empty, never a made-up
    default.
    """

    ref: str
    owner_ref: str | None = None
    pond_ref: str | None = None
    unclaimed: bool = False
    collaborator_refs: tuple[str, ...] = ()
    former_refs: tuple[str, ...] = ()
    source: str | None = None
    type: str | None = None
    stage: str | None = None
    price: Decimal | None = None
    street: str | None = None
    city: str | None = None
    county: str | None = None
    state: str | None = None
    zip: str | None = None
    country: str | None = None
    latitude: Decimal | None = None
    longitude: Decimal | None = None
    form: str | None = None
    campaign: str | None = None
    language: str | None = None
    tags: tuple[str, ...] = ()
    emails: tuple[str, ...] = ()
    phones: tuple[str, ...] = ()
    custom: Custom = field(default_factory=lambda: MappingProxyType({}))
    created_at: datetime | None = None
    updated_at: datetime | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class UnassignedDefinition:
    """What "nobody has this lead" means for one tenant.

    A lead with neither owner nor pond is always unassigned. These add to it: house users (``user_refs``), ponds
    (``pond_refs``), and open first-to-claim offers. A pond that is not listed holds the lead as an agent would.
    """

    user_refs: frozenset[str] = frozenset()
    pond_refs: frozenset[str] = frozenset()
    include_unclaimed: bool = False

    def covers(self, lead: Lead) -> bool:
        """Whether `lead` is unassigned by this definition."""
        if lead.unclaimed:
            return self.include_unclaimed
        if lead.owner_ref is not None:
            return lead.owner_ref in self.user_refs
        return lead.pond_ref is None or lead.pond_ref in self.pond_refs


@dataclass(frozen=True, slots=True)
class AgentSeen:
    """An agent as the CRM shows them: the raw material of a sync.

    ``active`` is False for anyone who must not receive leads by the CRM's own word (deleted, invited, a lender);
    ``paused`` is the CRM's own pause switch; ``zone`` an IANA time zone name, or None where the CRM has none.
    """

    ref: str
    name: str
    email: str | None = None
    active: bool = True
    paused: bool = False
    zone: str | None = None


@dataclass(frozen=True, slots=True)
class Hours:
    """A weekly timetable: for each weekday (0 = Monday) the open intervals as minutes from local midnight.

    An interval is ``(start, end)`` with ``0 <= start < end <= 1440``. No interval on any day means never open.
    """

    days: Mapping[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class Leave:
    """A span in which an agent does not work, as wall times of their zone: ``start`` included, ``end`` not."""

    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Holidays:
    """Whose public holidays an agent keeps (ISO 3166 country and a region of it), and extra days with their names."""

    country: str | None = None
    region: str | None = None
    extra: Mapping[date, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Caps:
    """How many leads an agent may get per hour, day and week on the clock of ``zone``, and hold open; None: no cap."""

    hour: int | None = None
    day: int | None = None
    week: int | None = None
    open: int | None = None
    zone: str = "UTC"


@dataclass(frozen=True, slots=True)
class Load:
    """What an agent got in the present hour, day and week, and how many leads they hold that are not closed."""

    hour: int = 0
    day: int = 0
    week: int = 0
    open: int = 0


@dataclass(frozen=True, slots=True)
class Quiet:
    """When a queue holds its leads: a weekly timetable on the clock of ``zone``."""

    hours: Hours
    zone: str


@dataclass(frozen=True, slots=True)
class Agent:
    """Who may receive a lead, as Turnlock knows them now.

    ``paused_until`` ends the admin's pause by itself; None: it lasts until somebody ends it.
    """

    agent_id: UUID
    ref: str
    name: str
    active: bool = True
    refused: bool = False
    paused_by_crm: bool = False
    paused_by_admin: bool = False
    paused_until: datetime | None = None
    zone: str = "UTC"
    hours: Hours | None = None
    leave: tuple[Leave, ...] = ()
    holidays: Holidays | None = None
    caps: Caps | None = None


class Skip(StrEnum):
    """Why a member was passed over at their turn. The list is closed; each value says what would change it."""

    DEACTIVATED = "deactivated"
    PAUSED = "paused"
    LEAVE = "leave"
    HOLIDAY = "holiday"
    OFF_HOURS = "off_hours"
    AT_CAP = "at_cap"
    ALREADY_ON_LEAD = "already_on_lead"
    DECLINED = "declined"
    WEIGHT_ZERO = "weight_zero"
    TEAM_AWAY = "team_away"

    @property
    def remedy(self) -> str:
        """What an admin can do about it, in one sentence."""
        return _SKIP_REMEDIES[self]


_SKIP_REMEDIES: Mapping[Skip, str] = MappingProxyType(
    {
        Skip.DEACTIVATED: "activate the agent in the CRM and run `turnlock agents sync`",
        Skip.PAUSED: "resume the agent: `turnlock resume` for an admin's pause, the CRM's own switch for the CRM's",
        Skip.LEAVE: "wait for the end of the leave, or shorten it in the configuration",
        Skip.HOLIDAY: "wait for the next working day, or remove the holiday calendar from the agent",
        Skip.OFF_HOURS: "wait for the agent's working hours, or widen them in the configuration",
        Skip.AT_CAP: "raise the cap, or wait until it resets or leads are closed",
        Skip.ALREADY_ON_LEAD: "nothing: this agent already holds this lead in another role",
        Skip.DECLINED: "nothing: this agent had this lead before it was given back",
        Skip.WEIGHT_ZERO: "give the member a weight above 0 in the queue",
        Skip.TEAM_AWAY: "make a member of the team available; the team keeps its place meanwhile",
    }
)


class SkipPolicy(StrEnum):
    """What an absence costs in a queue: nothing; the turn it would have been; the place ahead of the others."""

    KEEP_PLACE = "keep_place"
    LOSE_TURN = "lose_turn"
    AVERAGE = "average"


class Reason(StrEnum):
    """Why a lead has no agent from Turnlock. The list is closed; each value has its remedy."""

    NOBODY_AVAILABLE = "nobody_available"
    QUEUE_EMPTY = "queue_empty"
    BEHIND_HELD = "behind_held"
    QUIET_HOURS = "quiet_hours"
    NO_RULE = "no_rule"
    LEFT_BY_RULE = "left_by_rule"
    LEFT_BY_QUEUE = "left_by_queue"
    OWNED = "owned"
    GONE = "gone"
    TARGET_AWAY = "target_away"
    TARGET_MISSING = "target_missing"
    KEEPS_COMING_BACK = "keeps_coming_back"
    NO_IDENTITY_MATCH = "no_identity_match"
    ALREADY_ON_LEAD = "already_on_lead"
    RETURNED = "returned"

    @property
    def remedy(self) -> str:
        """What an admin can do about it, in one sentence."""
        return _REASON_REMEDIES[self]


_REASON_REMEDIES: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.NOBODY_AVAILABLE: "make a member available; the lead is then decided again by itself",
        Reason.QUEUE_EMPTY: "add members to the queue; the lead is then decided again by itself",
        Reason.BEHIND_HELD: "older leads of this queue wait too; make a member available and all are decided in order",
        Reason.QUIET_HOURS: "nothing: the queue holds its leads in these hours; they are decided when the hours end",
        Reason.NO_RULE: "add a rule that matches, or name a default queue",
        Reason.LEFT_BY_RULE: "nothing: a rule says to leave this lead alone; change the rule to route it",
        Reason.LEFT_BY_QUEUE: "the queue leaves leads unassigned when nobody is free; change its policy or members",
        Reason.OWNED: "nothing: the lead has an owner in the CRM; clear the owner there to have it routed",
        Reason.GONE: "nothing: the CRM no longer has this lead",
        Reason.TARGET_AWAY: "the agent whom the rule names is unavailable and the rule has no fallback; add one",
        Reason.TARGET_MISSING: "the rule names a queue or agent that does not exist any more; correct the rule",
        Reason.KEEPS_COMING_BACK: "something in the CRM keeps clearing the owner; stop it, then `turnlock replay`",
        Reason.NO_IDENTITY_MATCH: "no known lead shares this email, phone or household; give the rule a fallback",
        Reason.ALREADY_ON_LEAD: "nothing: whoever the rule could add holds this lead already; add others to have two",
        Reason.RETURNED: "nothing: its agent returned it and it was taken out; `turnlock route` decides it again",
    }
)


class TargetKind(StrEnum):
    """Where a rule sends a lead."""

    QUEUE = "queue"
    AGENT = "agent"
    EXISTING_OWNER = "existing_owner"
    SAME_HOUSEHOLD = "same_household"
    LEAVE_ALONE = "leave_alone"


@dataclass(frozen=True, slots=True)
class Target:
    """One destination. ``id`` is the queue's or the agent's, None for the other kinds."""

    kind: TargetKind
    id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A predicate and its targets, tried in order of ``precedence`` (1 first), never of creation.

    ``when`` is the condition in the form that :func:`routing.conditions.compile_condition` takes. ``targets`` is the
    first choice followed by its fallback chain.
    """

    name: str
    precedence: int
    role: Role
    when: Mapping[str, Any]
    targets: tuple[Target, ...]


class WhenNobody(StrEnum):
    """What a queue does with a lead when none of its members is available."""

    HOLD = "hold"
    FALLBACK_QUEUE = "fallback_queue"
    DEFAULT_AGENT = "default_agent"
    LEAVE_UNASSIGNED = "leave_unassigned"


class Flag(StrEnum):
    """Capabilities that roll out per tenant, in the order of their migrations."""

    WRITE_BACK = "write_back"
    RULES = "rules"
    ROTATION = "rotation"
    WEIGHTS = "weights"
    SKIPS = "skips"
    HOUSEHOLDS = "households"
    CAPACITY = "capacity"
    CREDITS = "credits"
    SETTLE = "settle"
    TEAMS = "teams"
