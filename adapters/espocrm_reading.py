"""What EspoCRM shows, in Turnlock's words: leads, users, lists. The calls are in ``espocrm.py``."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TypeVar

from adapters import payload
from adapters.payload import Fields
from routing.model import AgentSeen, Lead

_ABOUT = ("industry", "accountName", "title", "website")  # besides custom fields, whose names begin with c

T = TypeVar("T")


def lead_of(lead: Fields) -> Lead:
    """A lead. Raises :class:`Unreadable` where the owner is not shown."""
    if not lead.has("assignedUserId"):
        raise payload.missing("assignedUserId")  # a right to the field may lack: nobody is guessed
    emails = [e.text("emailAddress") for e in lead.objects("emailAddressData")]
    phones = [p.text("phoneNumber") for p in lead.objects("phoneNumberData")]
    custom = [k for k in lead.data if k in _ABOUT or (k[:1] == "c" and k[1:2].isupper())]
    owner = lead.optional_ref("assignedUserId")
    return Lead(
        ref=lead.ref("id"),
        owner_ref=owner,
        collaborator_refs=tuple(ref for ref in lead.texts("followersIds") if ref != owner),
        source=lead.text("source"),
        stage=lead.text("status"),
        price=lead.number("opportunityAmount"),
        street=lead.text("addressStreet"),
        city=lead.text("addressCity"),
        state=lead.text("addressState"),
        zip=lead.text("addressPostalCode"),
        country=lead.text("addressCountry"),
        campaign=lead.text("campaignName"),
        emails=payload.emails((lead.text("emailAddress"), *emails)),
        phones=payload.phones((lead.text("phoneNumber"), *phones)),
        custom=MappingProxyType(lead.scalars(custom)),
        created_at=lead.time("createdAt"),
        updated_at=lead.time("modifiedAt"),
        name=lead.text("name"),
    )


def agent_of(user: Fields) -> AgentSeen:
    """A user as an agent."""
    ref = user.ref("id")
    name = user.text("name") or user.text("userName") or ref
    return AgentSeen(ref=ref, name=name, email=user.text("emailAddress"), active=user.flag("isActive") is True)


def rows_of(data: Fields, make: Callable[[Fields], T]) -> list[T]:
    """What `make` makes of each record of a list."""
    if not isinstance(data.data.get("list"), list):
        raise payload.missing("list")
    return [make(row) for row in data.objects("list")]
