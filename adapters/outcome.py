"""What a call to a CRM came to: the table of every status and fault, and the error that carries it.

Sources: RFC 9110 for the statuses. The shape (what may be done next, who must act, one text for the admin and one
for the log) follows from who reads it: a worker, an admin, an operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any


class Outcome(StrEnum):
    """What a call came to, in the terms of what may be done next."""

    OK = "ok"
    NOT_SENT = "not_sent"  # no write reached the CRM: nothing went out, or a read got no answer; safe to repeat
    UNKNOWN = "unknown"  # a write went out and may or may not have been applied: read, never resend blindly
    WAIT = "wait"  # not processed; repeat after ``retry_after`` seconds, or after a backoff where that is None
    REAUTHORISE = "reauthorise"
    FORBIDDEN = "forbidden"
    GONE = "gone"
    CONFLICT = "conflict"  # someone else changed the object: read it again
    REFUSED = "refused"
    AGENT_REFUSED = "agent_refused"  # not this agent; another one may well be taken
    ANSWER_UNREADABLE = "answer_unreadable"  # a read succeeded with something that is no usable JSON
    REDIRECTED = "redirected"
    PRIVATE_HOST = "private_host"


class Who(StrEnum):
    """Who must act: nobody (Turnlock tries again by itself), the CRM's admin, or the operator of Turnlock."""

    NOBODY = "nobody"
    ADMIN = "admin"
    OPERATOR = "operator"


class Fault(StrEnum):
    """What can go wrong without a usable status."""

    NAME = "name"  # the host's name has no address
    CONNECT = "connect"
    TLS = "tls"
    PRIVATE_HOST = "private_host"
    BROKEN = "broken"  # time-out or reset after the request, or part of it, was sent
    UNREADABLE = "unreadable"
    TOO_BIG = "too_big"
    FOREIGN = "foreign"  # the CRM's answer points to an address of another origin
    BUDGET = "budget"  # our part of what the CRM lets an account call is used up; nothing was sent


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a status or fault means: the outcome, who must act, a text for the admin and one for the log."""

    outcome: Outcome
    who: Who
    text: str
    internal: str


_MEANINGS: Mapping[Outcome, Verdict] = MappingProxyType(
    {
        v.outcome: v
        for v in (
            Verdict(Outcome.OK, Who.NOBODY, "The CRM did it.", "2xx"),
            Verdict(
                Outcome.NOT_SENT,
                Who.NOBODY,
                "The CRM does not answer. Nothing was changed there; Turnlock tries again.",
                "no write was sent; repeat with backoff",
            ),
            Verdict(
                Outcome.UNKNOWN,
                Who.NOBODY,
                "The CRM did not confirm a change. Turnlock reads the lead again before anything else.",
                "sent, no trustworthy answer; read before any repeat",
            ),
            Verdict(
                Outcome.WAIT,
                Who.NOBODY,
                "The CRM asks to slow down. Turnlock waits and tries again.",
                "not processed; honour Retry-After for the whole tenant",
            ),
            Verdict(
                Outcome.REAUTHORISE,
                Who.ADMIN,
                "The CRM no longer accepts the credentials. Enter them anew with `turnlock tenant secret`; where they "
                "came by OAuth, connect the CRM again.",
                "401; renew a token once, else stop the tenant's sending",
            ),
            Verdict(
                Outcome.FORBIDDEN,
                Who.ADMIN,
                "The CRM forbids this to the connected user. Give that user the right, renew the CRM's plan, or "
                "connect with another user.",
                "402 or 403; repeating does not help",
            ),
            Verdict(Outcome.GONE, Who.NOBODY, "The CRM no longer has this object.", "404 or 410"),
            Verdict(
                Outcome.CONFLICT,
                Who.NOBODY,
                "Somebody changed the object in the CRM meanwhile. Turnlock reads it again.",
                "409 or 412; nothing was written",
            ),
            Verdict(
                Outcome.REFUSED,
                Who.OPERATOR,
                "The CRM refuses the request. It is parked; replay it when the cause is gone.",
                "unmapped 4xx; repeating the same request does not help",
            ),
            Verdict(
                Outcome.AGENT_REFUSED,
                Who.ADMIN,
                "The CRM does not take this agent as an owner. The lead goes to the next one.",
                "nothing was written; the agent waits for a reading that shows them active",
            ),
            Verdict(
                Outcome.ANSWER_UNREADABLE,
                Who.OPERATOR,
                "The CRM answered something that Turnlock cannot read. Check that the base address is the CRM's API.",
                "success with a body that is no usable JSON",
            ),
            Verdict(
                Outcome.REDIRECTED,
                Who.ADMIN,
                "The CRM's address sends to another address. Turnlock does not follow; enter the final address with "
                "`turnlock tenant set`.",
                "redirect refused: it would carry the lead and the credentials along",
            ),
            Verdict(
                Outcome.PRIVATE_HOST,
                Who.OPERATOR,
                "The CRM's address lies inside a private network. If that is meant, set "
                "TURNLOCK_ALLOW_PRIVATE_HOSTS=1; otherwise correct the address.",
                "no public address; nothing was sent",
            ),
        )
    }
)

# Statuses whose meaning does not follow from their class. 408: the CRM gave up on a request that it may have had.
_STATUSES: Mapping[int, Outcome] = MappingProxyType(
    {
        401: Outcome.REAUTHORISE,
        402: Outcome.FORBIDDEN,
        403: Outcome.FORBIDDEN,
        404: Outcome.GONE,
        408: Outcome.UNKNOWN,
        409: Outcome.CONFLICT,
        410: Outcome.GONE,
        412: Outcome.CONFLICT,
        423: Outcome.WAIT,
        425: Outcome.WAIT,
        429: Outcome.WAIT,
        503: Outcome.WAIT,
    }
)
_CLASSES: Mapping[int, Outcome] = MappingProxyType(
    {
        1: Outcome.ANSWER_UNREADABLE,  # a final answer is never 1xx
        2: Outcome.OK,
        3: Outcome.REDIRECTED,
        4: Outcome.REFUSED,
        5: Outcome.UNKNOWN,
    }
)
_FAULTS: Mapping[Fault, Verdict] = MappingProxyType(
    {
        Fault.NAME: Verdict(
            Outcome.NOT_SENT,
            Who.ADMIN,
            "The CRM's host name has no address. Check the base address; Turnlock tries again.",
            "name resolution failed",
        ),
        Fault.CONNECT: Verdict(
            Outcome.NOT_SENT,
            Who.NOBODY,
            "Nobody answers at the CRM's address. See that it runs and that the base address is right; Turnlock tries "
            "again.",
            "no connection",
        ),
        Fault.TLS: Verdict(
            Outcome.NOT_SENT,
            Who.ADMIN,
            "The CRM's certificate is not valid. Have it renewed, or correct the base address; one of an authority of "
            "your own, or of none, is trusted by TURNLOCK_CA_FILE. Turnlock tries again.",
            "TLS handshake failed",
        ),
        Fault.PRIVATE_HOST: _MEANINGS[Outcome.PRIVATE_HOST],
        Fault.BROKEN: _MEANINGS[Outcome.UNKNOWN],
        Fault.UNREADABLE: _MEANINGS[Outcome.ANSWER_UNREADABLE],
        Fault.TOO_BIG: _MEANINGS[Outcome.ANSWER_UNREADABLE],
        Fault.FOREIGN: _MEANINGS[Outcome.REDIRECTED],
        Fault.BUDGET: Verdict(
            Outcome.WAIT,
            Who.NOBODY,
            "What the CRM lets this account call is used up for the moment. Turnlock goes on as soon as it may.",
            "not sent: the account's bucket is empty until then",
        ),
    }
)


def verdict(cause: int | Fault, *, write: bool) -> Verdict:
    """What `cause`, a status or a fault, means for a call; `write` tells whether the call could change the CRM.

    Total: a status outside 100..599 is an answer that cannot be read. A read that got no answer has sent no write,
    so it is ``NOT_SENT``; a write whose success cannot be read may have been applied, so it is ``UNKNOWN``.
    """
    if isinstance(cause, Fault):
        found = _FAULTS[cause]
    else:
        outcome = _STATUSES.get(cause) or _CLASSES.get(cause // 100, Outcome.ANSWER_UNREADABLE)
        found = _MEANINGS[outcome]
    if found.outcome is Outcome.UNKNOWN and not write:
        return _MEANINGS[Outcome.NOT_SENT]
    if found.outcome is Outcome.ANSWER_UNREADABLE and write:
        return _MEANINGS[Outcome.UNKNOWN]
    return found


class CrmError(Exception):
    """A call that did not do what was asked.

    `outcome` says what may be done next and `who` must act. `status` is the CRM's, None without an answer.
    `retry_after` is in seconds, 0 to 3600, None where the CRM gave none that can be read. The text names the call
    without its query and holds no body and no secret. `data` is the parsed error body, for the adapter's eyes: it
    may name people and belongs in no log.
    """

    def __init__(
        self,
        outcome: Outcome,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        fault: Fault | None = None,
        call: str = "",
        text: str | None = None,
        data: Any = None,
    ) -> None:
        meaning = _MEANINGS[outcome]
        if fault is not None and _FAULTS[fault].outcome is outcome:
            meaning = _FAULTS[fault]
        self.outcome = outcome
        self.status = status
        self.retry_after = retry_after
        self.fault = fault
        self.who = meaning.who
        self.text = text or meaning.text
        self.own_text = text  # None: what the outcome says of any CRM
        self.internal = meaning.internal
        self.data = data
        cause = str(status) if status is not None else fault or outcome.value
        super().__init__(": ".join(p for p in (call, cause, self.text) if p))


class PrivateHost(CrmError):
    """The CRM's name leads to an address that is not public. Raised before anything is sent."""
