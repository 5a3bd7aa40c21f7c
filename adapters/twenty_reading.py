"""What Twenty shows, in Turnlock's words: records of any object, members. The calls are in ``twenty.py``."""

from __future__ import annotations

from types import MappingProxyType

from adapters import payload
from adapters.payload import Fields
from routing.model import AgentSeen, Lead

_BASE = frozenset({"id", "createdAt", "updatedAt", "deletedAt", "position", "searchVector"})
_READ = frozenset({"name", "source", "type", "stage", "email", "phone"})  # under names of our own


def lead_of(record: Fields, relation: str) -> Lead:
    """Fields are found by their form, because the object may be any: a place, addresses, numbers, single values."""
    owner = f"{relation}Id"
    if not record.has(owner):
        raise payload.missing(owner)  # nobody is guessed
    parts = {k: Fields(v, strict=False) for k, v in record.data.items() if isinstance(v, dict)}
    none = Fields({}, strict=False)
    place = next((p for p in parts.values() if p.has("addressCity")), none)
    name, mails, phones = parts.get("name", none), parts.get("emails", none), parts.get("phones", none)
    price = next((parts[k].number("amountMicros") for k in ("amount", "price", "budget") if k in parts), None)
    custom = [k for k, v in record.data.items() if not isinstance(v, dict) and k not in _BASE | _READ | {owner}]
    called = f"{phones.text('primaryPhoneCallingCode') or ''}{phones.text('primaryPhoneNumber') or ''}"
    return Lead(
        ref=record.ref("id"),
        owner_ref=record.optional_ref(owner),
        source=record.text("source") or parts.get("createdBy", none).text("source"),
        type=record.text("type"),
        stage=record.text("stage") or record.text("status"),
        price=price / 1_000_000 if price else None,
        street=place.text("addressStreet1"),
        city=place.text("addressCity"),
        state=place.text("addressState"),
        zip=place.text("addressPostcode"),
        country=place.text("addressCountry"),
        emails=payload.emails([mails.text("primaryEmail") or record.text("email")]),
        phones=payload.phones([called or record.text("phone")]),
        custom=MappingProxyType(record.scalars(custom)),
        created_at=record.time("createdAt"),
        updated_at=record.time("updatedAt"),
        name=record.text("name") or " ".join(payload.unique(name.text(k) for k in ("firstName", "lastName"))) or None,
    )


def agent_of(member: Fields) -> AgentSeen:
    """A member of the workspace as an agent."""
    ref, name, email = member.ref("id"), member.object("name"), member.text("userEmail")
    full = " ".join(payload.unique(name.text(k) for k in ("firstName", "lastName")))
    gone = member.data.get("deletedAt") is not None
    return AgentSeen(ref=ref, name=full or email or ref, email=email, active=not gone, zone=member.zone("timeZone"))
