"""What Odoo shows, in Turnlock's words: leads, with the fields to ask for, and users."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parseaddr
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from adapters import odoo_rpc as rpc
from adapters import payload
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from routing.model import AgentSeen, Lead

if TYPE_CHECKING:
    from adapters.client import Client


_OF_A_LEAD = (
    "name", "contact_name", "partner_name", "email_from", "phone", "mobile", "street", "city", "state_id", "zip",
    "country_id", "source_id", "campaign_id", "medium_id", "user_id", "team_id", "stage_id", "type", "tag_ids",
    "lang_id", "expected_revenue", "create_date", "write_date", "message_partner_ids",
)  # fmt: skip
# What every Odoo shows of a lead, for a user who may not ask what there is.
_EVERYWHERE: Mapping[str, str | None] = MappingProxyType(
    dict.fromkeys(
        ("name", "contact_name", "partner_name", "email_from", "phone", "city", "zip", "country_id", "source_id",
         "user_id", "team_id", "stage_id", "type", "expected_revenue", "create_date", "write_date")
    )
)  # fmt: skip
_CUSTOM_KINDS = frozenset({"char", "text", "selection", "boolean", "integer", "float", "monetary", "date"})


def lead_fields(client: Client) -> list[str]:
    """Those of a lead that this Odoo has, its custom fields among them."""
    if "fields" not in client.learnt:
        kinds = rpc.if_allowed(partial(rpc.field_kinds, client, "crm.lead"), _EVERYWHERE)
        if "user_id" not in kinds:
            raise CrmError(Outcome.ANSWER_UNREADABLE, status=200, call="POST /jsonrpc")
        custom = sorted(n for n, kind in kinds.items() if n.startswith("x_") and kind in _CUSTOM_KINDS)
        client.learnt |= {"truths": {n for n in custom if kinds[n] == "boolean"}}
        client.learnt["fields"] = ["id", *(n for n in _OF_A_LEAD if n in kinds), *custom]
    return list(client.learnt["fields"])


def lead_of(
    row: Fields, tags: Mapping[int, str] = MappingProxyType({}), users: Mapping[int, str] = MappingProxyType({})
) -> Lead:
    """A lead, with the names of its `tags` and the `users` that its followers are.

    Raises :class:`Unreadable` where the owner is not shown.
    """
    if not row.has("user_id"):
        raise payload.missing("user_id")  # nobody is guessed
    shown = row.data["user_id"]
    owner = None if shown is None else payload.ref(shown[0] if isinstance(shown, list) and shown else shown)
    followers = (users.get(partner) for partner in row.items("message_partner_ids") if isinstance(partner, int))
    about: dict[str, Any] = {"team": rpc.named(row, "team_id"), "medium": rpc.named(row, "medium_id")}
    about |= {"company": row.text("partner_name")} | row.scalars(k for k in row.data if k.startswith("x_"))
    return Lead(
        ref=row.ref("id"),
        owner_ref=owner,
        collaborator_refs=tuple(ref for ref in payload.unique(followers) if ref != owner),
        source=rpc.named(row, "source_id"),
        type=row.text("type"),
        stage=rpc.named(row, "stage_id"),
        price=row.number("expected_revenue") or None,  # 0 stands for "not filled"
        street=row.text("street"),
        city=row.text("city"),
        state=rpc.named(row, "state_id"),
        zip=row.text("zip"),
        country=rpc.named(row, "country_id"),
        campaign=rpc.named(row, "campaign_id"),
        language=rpc.named(row, "lang_id"),
        tags=payload.unique(tags.get(tag) for tag in row.items("tag_ids") if isinstance(tag, int)),
        emails=payload.emails([parseaddr(row.text("email_from") or "")[1]]),
        phones=payload.phones(row.text(k) for k in ("phone", "mobile")),
        custom=MappingProxyType({k: v for k, v in about.items() if v not in (None, "")}),
        created_at=row.time("create_date"),
        updated_at=row.time("write_date"),
        name=row.text("contact_name") or row.text("partner_name") or row.text("name"),
    )


def agent_of(user: Fields) -> AgentSeen:
    """A user as an agent."""
    ref = user.ref("id")
    return AgentSeen(
        ref=ref,
        name=user.text("name") or user.text("login") or ref,
        email=user.text("email"),
        active=user.flag("active") is True,
        zone=user.zone("tz"),
    )
