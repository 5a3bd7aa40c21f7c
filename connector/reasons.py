"""Reasons in words: what a stored slug means and what an admin can do about it."""

from __future__ import annotations

from adapters.outcome import CrmError, Fault, Outcome, verdict
from routing.model import TELLING, Reason, Skip

_REASONS = {reason.value: reason for reason in Reason}
_SKIPS = {skip.value: skip for skip in Skip}
_FAULTS = {fault.value: fault for fault in Fault}
_STANDING = {
    "refused": "nothing: the CRM did not take that agent; the lead goes to the next one by itself",
    "declined": "nothing: its agent gave it back; it goes by itself to somebody who has not had it",
    "released": "`released: leave` leaves a lead whose owner was cleared; `turnlock route` decides it again",
    "given_up": "the write to the CRM was given up; `turnlock route` decides this lead again",
}
_EVENT = {
    "behind_write": "waits for the end of a write of this lead",
    "settling": "waits to settle",
    "not_readable": "the CRM does not show this lead yet",
    "crm_unreadable": "the CRM could not be read; Turnlock tries again",
    "crm_paused": "calls to the CRM are paused; Turnlock goes on by itself",
    "queue_busy": "others are deciding in this queue; Turnlock tries again at once",
    "taken_over": "the worker that had it died; another one goes on",
    "read_again": "the lead changed while it was read; it is read again",
    "fault": "the last try failed; Turnlock tries again",
}
_WRITE_STATE = {
    "confirmed": "the CRM shows this agent",
    "superseded": "somebody else was set in the CRM; the human wins",
    "refused": "the CRM does not take this agent",
    "gone": "the CRM no longer has the lead",
    "stale": "nothing was left to write",
    "given_up": "given up",
    "parked": "parked: `turnlock replay` tries again, `turnlock give-up` returns the turn",
    "open": "not written yet",
}
_WRITE_REASON = {
    "crm_paused": "calls to the CRM are paused",
    "late": "it started too late in its lease",
    "stopped": "the worker was stopped before it was sent",
    "fault": "the last try failed",
    "not_kept": "the CRM accepted it and did not keep it",
    "newer_epoch": "a newer decision exists",
    "already_on_lead": "the agent holds the lead already",
}


def remedy_of(reason: str | None) -> str | None:
    """What can be done about the reason of a decision or standing; None where there is none to be known."""
    if reason is None:
        return None
    return _REASONS[reason].remedy if reason in _REASONS else _STANDING.get(reason)


def skip_remedy(skip: str | None) -> str | None:
    """What would make a member available again."""
    return _SKIPS[skip].remedy if skip in _SKIPS else None


def event_text(state: str, reason: str | None) -> str:
    """Why an event is not closed."""
    if state == "parked":
        return f"parked: {parked_event_remedy(reason)}"
    return _EVENT.get(reason or "", "waits for a worker")


def write_text(kind: str, state: str, reason: str | None) -> str:
    """What became of a write, with the CRM's cause where it has one."""
    cause = _WRITE_REASON.get(reason or "") or _crm_text(reason)
    told = kind in TELLING and state == "confirmed"
    text = f"the {kind} is on the lead" if told else _WRITE_STATE.get(state, state)
    return f"{text}; {cause}" if cause else text


def _crm_text(reason: str | None) -> str | None:
    """The admin's text behind a reason like ``refused_422``, ``not_sent_connect`` or ``wait``."""
    outcome = next((o for o in sorted(Outcome, key=len, reverse=True) if (reason or "").startswith(o.value)), None)
    if reason is None or outcome is None or outcome is Outcome.GONE:
        return None
    tail = reason.removeprefix(outcome.value).removeprefix("_")
    if tail.isdigit():
        return f"status {tail}: {verdict(int(tail), write=True).text}"
    return CrmError(outcome, fault=_FAULTS.get(tail)).text


def parked_event_remedy(reason: str | None) -> str:
    """What a human can do about a parked event."""
    if (reason or "").startswith("fault_"):
        return "deciding it failed again and again; see the worker's log for the cause, then `turnlock replay`"
    if (reason or "").startswith("crm_refused_"):
        return "the CRM refuses to show this lead; give the connected user the right, then `turnlock replay`"
    return "it could not be read; once Turnlock can (after an update), `turnlock replay`. The sweep finds its leads too"


def parked_write_remedy(reason: str | None) -> str:
    """What a human can do about a parked write."""
    cause = _WRITE_REASON.get(reason or "") or _crm_text(reason)
    act = "`turnlock replay` tries again; `turnlock give-up` ends it and returns the turn"
    return f"{cause.rstrip('.')}. {act}" if cause else act
