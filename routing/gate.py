"""May this lead be decided now? Pure: from one CRM reading and where the lead stands, the one right thing to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from routing.model import Lead, UnassignedDefinition

#: A lead whose owner is cleared again and again is fought over: this many new decisions in 24 h, then a human looks.
MAX_RELEASES = 3
RELEASE_WINDOW = timedelta(hours=24)


class Step(StrEnum):
    """What to do with an event."""

    DECIDE = "decide"
    BEHIND_WRITE = "behind_write"  # an own write is not settled: wait for it
    READ_AGAIN = "read_again"  # the lead moved on after this reading began
    ECHO = "echo"  # our own write, seen from outside
    OWNED = "owned"  # somebody has it: remember, touch nothing
    OVERRIDDEN = "overridden"  # somebody replaced our agent: the human wins
    LEAVE_RELEASED = "leave_released"  # cleared after our assignment, and the tenant wants such leads left
    PARK = "park"  # keeps coming back
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the lead stands in the role, as far as this question needs it. `agent_ref` is our agent's CRM id."""

    state: str
    agent_ref: str | None
    written: bool  # our owner write was confirmed
    facts_digest: bytes | None  # of the fields that rules read; None for a lead left whatever becomes of them
    releases: Sequence[str]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The step, and for ``DECIDE`` its cause; ``releases`` is the history to keep with the decision."""

    step: Step
    cause: str = ""
    releases: tuple[str, ...] = ()


def gate(
    lead: Lead,
    standing: Standing | None,
    *,
    definition: UnassignedDefinition,
    open_write: bool,
    stale: bool,
    released: str,
    digest: bytes,
    forced: bool,
    now: datetime,
    given_back: bool = False,
) -> Verdict:
    """What to do about the owner of `lead` as just read.

    `stale` says that the lead's version rose after this reading began; `released` is the tenant's policy for a
    cleared owner (``route_again`` or ``leave``); `forced` means that a human asked for this decision (console,
    replay), which also ends a parked or left state. `given_back` means that the CRM still shows an agent who returned
    this lead: until somebody else has it that is nobody, and of a lead that was taken out it is no news.
    """
    if open_write:
        return Verdict(Step.BEHIND_WRITE)
    if stale:
        return Verdict(Step.READ_AGAIN)
    unassigned = definition.covers(lead)
    if standing is None:
        return Verdict(Step.DECIDE, "new") if unassigned else Verdict(Step.OWNED)
    if given_back and standing.state == "left" and not forced:
        return Verdict(Step.NOTHING)
    unassigned = unassigned or (given_back and standing.state in ("refused", "held", "left"))
    if not unassigned:
        if standing.state == "assigned":
            same = lead.owner_ref is not None and lead.owner_ref == standing.agent_ref
            return Verdict(Step.ECHO if same else Step.OVERRIDDEN)
        return Verdict(Step.OWNED)
    if standing.state == "assigned":
        if not standing.written:
            return Verdict(Step.NOTHING)  # decided while write-back was off: the CRM never heard of it
        if released == "leave" and not forced:
            return Verdict(Step.LEAVE_RELEASED)
        recent = tuple(r for r in standing.releases if datetime.fromisoformat(r) > now - RELEASE_WINDOW)
        if len(recent) >= MAX_RELEASES and not forced:
            return Verdict(Step.PARK, releases=recent)
        return Verdict(Step.DECIDE, "released", (*recent, now.isoformat()))
    kept = tuple(standing.releases)
    if forced:
        return Verdict(Step.DECIDE, "by_hand", () if standing.state == "parked" else kept)
    if standing.state == "parked" or (standing.state == "left" and standing.facts_digest in (None, digest)):
        return Verdict(Step.NOTHING)
    cause = {"held": "held", "left": "changed", "owned": "cleared", "gone": "returned", "refused": "refused"}
    cause["refused"] = "declined" if standing.reason == "declined" else "refused"
    return Verdict(Step.DECIDE, cause[standing.state], kept)
