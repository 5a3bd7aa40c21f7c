"""What Odoo shows, in Turnlock's words: leads and users. The calls are in ``odoo.py``."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parseaddr
from types import MappingProxyType
from typing import Any

from adapters import odoo_rpc as rpc
from adapters import payload
from adapters.payload import Fields
from routing.model import AgentSeen, Lead


def lead_of(row: Fields, tags: Mapping[int, str] = MappingProxyType({})) -> Lead:
    """A lead, with the names of its `tags`. Raises :class:`Unreadable` where the owner is not shown."""
    if not row.has("user_id"):
        raise payload.missing("user_id")  # nobody is guessed
    owner = row.data["user_id"]
    about: dict[str, Any] = {"team": rpc.named(row, "team_id"), "medium": rpc.named(row, "medium_id")}
    about |= {"company": row.text("partner_name")} | row.scalars(k for k in row.data if k.startswith("x_"))
    return Lead(
        ref=row.ref("id"),
        owner_ref=None if owner is None else payload.ref(owner[0] if isinstance(owner, list) and owner else owner),
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
        emails=payload.unique([payload.email(parseaddr(row.text("email_from") or "")[1])]),
        phones=payload.unique(payload.phone(row.text(k) or "") for k in ("phone", "mobile")),
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
