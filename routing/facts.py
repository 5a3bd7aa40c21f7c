"""Leads to and from JSON, and what is derived from their facts: the digest of rule fields, the identities.

Pure. Identities are hashed with the tenant's id before they are stored, so that the look-up table holds no
plain addresses or numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from routing.model import Lead, Scalar

_TUPLES = ("collaborator_refs", "former_refs", "tags", "emails", "phones")
_TIMES = ("created_at", "updated_at")
# Who holds the lead, and when it was touched, are not what rules look at: a change there alone is no news to them.
_NOT_FOR_RULES = frozenset(
    {"ref", "former_refs", "owner_ref", "pond_ref", "unclaimed", "collaborator_refs", "updated_at", "name"}
)


def _out(value: object) -> Any:
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple):
        return [_out(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _out(v) for k, v in value.items()}
    return value


def _scalar(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"decimal"}:
        return Decimal(value["decimal"])
    if isinstance(value, list):
        return tuple(_scalar(v) for v in value)
    return value


def lead_to_json(lead: Lead) -> dict[str, Any]:
    """`lead` as JSON-safe values; empty fields are left out. :func:`lead_from_json` gives the same lead back."""
    out = {}
    for f in fields(lead):
        value = getattr(lead, f.name)
        if value is None or value in ((), False) or (f.name == "custom" and not value):
            continue
        out[f.name] = _out(value)
    return out


def lead_from_json(data: Mapping[str, Any]) -> Lead:
    """The lead that :func:`lead_to_json` wrote. Unknown keys, of a later version, are ignored."""
    values: dict[str, Any] = {}
    for f in fields(Lead):
        if f.name not in data:
            continue
        value = data[f.name]
        if f.name in _TUPLES:
            values[f.name] = tuple(value)
        elif f.name in _TIMES:
            values[f.name] = datetime.fromisoformat(value)
        elif f.name == "custom":
            custom: dict[str, Scalar | tuple[Scalar, ...]] = {k: _scalar(v) for k, v in value.items()}
            values[f.name] = custom
        else:
            values[f.name] = _scalar(value)
    return Lead(**values)


def rule_digest(lead: Lead) -> bytes:
    """A digest of the fields that rules can see: equal digests mean that no rule can decide differently."""
    seen = {k: v for k, v in lead_to_json(lead).items() if k not in _NOT_FOR_RULES}
    return hashlib.sha256(json.dumps(seen, sort_keys=True, ensure_ascii=False).encode("utf-8")).digest()


def normal_email(value: str) -> str | None:
    """`value` as compared: trimmed, case folded; None when it is no address at all."""
    text = value.strip().casefold()
    return text if "@" in text[1:-1] else None


def normal_phone(value: str) -> str | None:
    """The digits of `value` without the North American 1; None below seven digits (too short to identify)."""
    digits = "".join(c for c in value if c.isascii() and c.isdigit())
    if len(digits) == 11 and digits.startswith("1"):
        digits = digits[1:]
    return digits if len(digits) >= 7 else None


def identity_digests(tenant_id: UUID, lead: Lead) -> frozenset[bytes]:
    """The identities (email, phone) by which another lead may be the same person, hashed per tenant."""
    plain = {f"email:{e}" for e in map(normal_email, lead.emails) if e}
    plain |= {f"phone:{p}" for p in map(normal_phone, lead.phones) if p}
    return frozenset(hashlib.blake2b(p.encode("utf-8"), key=tenant_id.bytes, digest_size=20).digest() for p in plain)
