"""What Follow Up Boss tells: events of deliveries, people, users and teams.

Pages: see :mod:`adapters.followupboss`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from adapters import payload
from adapters.base import Event, EventKind, Team, Unreadable
from adapters.payload import Fields
from routing.model import AgentSeen, Lead

# https://docs.followupboss.com/reference/webhooks-guide (a merge has no event of its own)
KINDS: Mapping[str, EventKind] = MappingProxyType(
    {
        "peopleCreated": EventKind.LEAD_CREATED,
        "peopleUpdated": EventKind.LEAD_CHANGED,
        "peopleStageUpdated": EventKind.LEAD_CHANGED,
        "peopleTagsCreated": EventKind.LEAD_CHANGED,
        "peopleDeleted": EventKind.LEAD_DELETED,
        "eventsCreated": EventKind.INQUIRY,
    }
)

#: https://docs.followupboss.com/reference/error-responses and authentication: what the admin can do about it.
WORDS: Mapping[int, str] = MappingProxyType(
    {
        401: "Follow Up Boss does not accept the API key (any more). Give Turnlock the account owner's: `turnlock "
        "tenant secret`.",
        403: "Follow Up Boss forbids this: the API key is not that of the account's owner, the plan lacks it, or the "
        "account is not paid for. Correct that, or connect with the owner's key.",
    }
)


def events_of(element: Any) -> list[Event]:
    """The events of one object of a delivery. Raises :class:`Unreadable`."""
    body = Fields(element, strict=True)
    topic = body.text("event") or body.text("type")  # ``type``: seen in one third-party library
    if topic is None:
        raise payload.missing("event")
    if topic not in KINDS:
        return [Event(EventKind.UNKNOWN, f"unknown:{str(element.get('eventId'))[:100]}")]
    event_id = body.required_text("eventId")
    if element.get("resourceIds") is None:
        raise payload.missing("resourceIds")
    occurred_at = Fields(element, strict=False).time("eventCreated")
    events: dict[str, Event] = {}
    for position, value in enumerate(body.items("resourceIds")):
        try:
            ref = whole(payload.ref(value))
            events.setdefault(ref, Event(KINDS[topic], f"{event_id}:{ref}", ref=ref, occurred_at=occurred_at))
        except Unreadable:
            key = f"{event_id}:at{position}"
            events[key] = Event(EventKind.UNREADABLE, key, occurred_at=occurred_at, problem="wrong_type")
    return list(events.values())


def whole(ref: str) -> str:
    """An id of this CRM: a whole number, in one spelling (``ref`` lets ASCII through only)."""
    if not ref.isdigit():
        raise Unreadable("wrong_type")
    return str(int(ref))


def lead_of(row: Fields) -> Lead:
    """https://docs.followupboss.com/reference/people-id-get; the address is the contact's, its zip is ``code``."""
    tags = row.texts("tags", "name")  # texts, or objects with a name
    filled = (a for a in row.objects("addresses") if any(a.text(k) for k in ("city", "state", "code", "street")))
    address = next(filled, Fields({}, strict=False))
    ponds = [p.optional_ref("id") for key in ("ponds", "assignedPonds") for p in row.objects(key)]
    emails = sorted(row.objects("emails"), key=lambda e: not e.flag("isPrimary"))
    phones = sorted(row.objects("phones"), key=lambda p: not p.flag("isPrimary"))
    return Lead(
        ref=row.ref("id"),
        owner_ref=row.optional_ref("assignedUserId"),
        pond_ref=row.optional_ref("assignedPondId") or next((p for p in ponds if p), None),
        collaborator_refs=payload.unique(
            c.optional_ref("id") for c in row.objects("collaborators") if not c.flag("assigned")
        ),
        source=row.text("source"),
        type=row.text("type") or ("Seller" if "seller" in {t.casefold() for t in tags} else None),
        stage=row.text("stage"),
        price=row.number("price") or None,  # 0 stands for "not filled"
        street=address.text("street"),
        city=address.text("city"),
        state=address.text("state"),
        zip=address.text("code"),
        country=address.text("country"),
        language=row.text("customPreferredLanguage"),
        tags=tags,
        emails=payload.emails(e.text("value") for e in emails),
        phones=payload.phones(p.text("normalized") or p.text("value") for p in phones),
        custom=MappingProxyType(row.scalars(k for k in row.data if k.startswith("custom"))),
        created_at=row.time("created"),
        updated_at=row.time("updated"),
        name=row.text("name"),
    )


def agent_of(user: Fields) -> AgentSeen:
    """https://docs.followupboss.com/reference/users-get: ``status`` Active, Invited or Deleted."""
    return AgentSeen(
        ref=user.ref("id"),
        name=user.text("name") or user.ref("id"),
        email=user.text("email"),
        active=user.text("status") == "Active" and user.text("role") != "Lender",
        paused=bool(user.flag("pauseLeadDistribution")),
        zone=user.zone("timezone"),
    )


def team_of(row: Fields, ref: str, users: Iterable[str], active: Collection[str]) -> Team:
    """A team or group, of those of its users who are active."""
    return Team(ref, row.text("name") or ref, tuple(user for user in payload.unique(users) if user in active))
