"""What Frappe shows, in Turnlock's words: times of the site's zone, leads, users. The calls are in ``frappe.py``."""

from __future__ import annotations

from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from adapters import payload
from adapters.base import Unreadable
from adapters.payload import Fields
from routing.model import AgentSeen, Lead

if TYPE_CHECKING:
    from adapters.client import Client

# Besides fields of the site's own, whose names begin with custom_.
_ABOUT = ("organization", "territory", "industry", "job_title", "no_of_employees", "annual_revenue", "website")


def zone(client: Client) -> ZoneInfo:
    """The zone of the site, by which it writes its times."""
    named = Fields({"zone": client.credentials.parameters.get("time_zone")}, strict=False).zone("zone")
    return ZoneInfo(named or "UTC")


def _utc(time: datetime | None, zone: ZoneInfo) -> datetime | None:
    """A time that was read, which ``Fields`` took for UTC, as the instant that it is on the site's clocks."""
    return time and time.replace(tzinfo=zone).astimezone(UTC)


def wall(time: datetime, client: Client, named: str | None = None) -> str:
    """As the site writes it, or one in the zone `named`: to the microsecond, without a fraction where that is zero."""
    return time.astimezone(ZoneInfo(named) if named else zone(client)).replace(tzinfo=None).isoformat(sep=" ")


def lead_of(lead: Fields, zone: ZoneInfo) -> Lead:
    """A lead, its times read as those of `zone`. Raises :class:`Unreadable` where the owner is not shown."""
    if not lead.has("lead_owner"):
        raise payload.missing("lead_owner")  # nobody is guessed
    owner = lead.optional_ref("lead_owner")
    custom = [k for k in lead.data if k in _ABOUT or k.startswith("custom_")]
    return Lead(
        ref=lead.ref("name"),
        owner_ref=owner,
        collaborator_refs=tuple(ref for ref in _assigned_to(lead) if ref != owner),
        source=lead.text("source"),
        stage=lead.text("status"),
        emails=payload.emails([lead.text("email")]),
        phones=payload.phones(lead.text(k) for k in ("mobile_no", "phone")),
        custom=MappingProxyType(lead.scalars(custom)),
        created_at=_utc(lead.time("creation"), zone),
        updated_at=_utc(lead.time("modified"), zone),
        name=lead.text("lead_name"),
    )


def _assigned_to(lead: Fields) -> tuple[str, ...]:
    """Users who stand in *Assigned To*: a list that is kept as text. The owner and former ones are among them."""
    try:
        users = payload.read_json((lead.text("_assign") or "[]").encode())
    except Unreadable:
        return ()
    return Fields({"users": users}, strict=False).texts("users")


def agent_of(user: Fields) -> AgentSeen:
    """A user as an agent."""
    ref = user.ref("name")
    return AgentSeen(
        ref=ref,
        name=user.text("full_name") or ref,
        email=user.text("email"),
        active=user.flag("enabled") is True,
        zone=user.zone("time_zone"),
    )
