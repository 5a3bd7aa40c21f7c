"""Leads to and from JSON, and what is derived from their facts: the digest of rule fields, the identities.

Pure. Identities are hashed with the tenant's id before they are stored, so that the look-up table holds no
plain addresses or numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import phonenumbers

from routing.fields import bare_code, normal_text
from routing.model import Lead, Scalar

_TUPLES = ("collaborator_refs", "former_refs", "tags", "emails", "phones")
_NAMES = tuple(f.name for f in fields(Lead))
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
    for name in _NAMES:
        value = getattr(lead, name)
        if not value and value != "":
            continue
        out[name] = _out(value)
    return out


def lead_from_json(data: Mapping[str, Any]) -> Lead:
    """The lead that :func:`lead_to_json` wrote. Unknown keys, of a later version, are ignored."""
    values: dict[str, Any] = {}
    for name in _NAMES:
        if name not in data:
            continue
        value = data[name]
        if name in _TUPLES:
            values[name] = tuple(value)
        elif name in _TIMES:
            values[name] = datetime.fromisoformat(value)
        elif name == "custom":
            custom: dict[str, Scalar | tuple[Scalar, ...]] = {k: _scalar(v) for k, v in value.items()}
            values[name] = custom
        else:
            values[name] = _scalar(value)
    return Lead(**values)


def rule_digest(lead: Lead, told: Mapping[str, Any] | None = None) -> bytes:
    """A digest of the fields that rules can see: equal digests mean that no rule can decide differently.

    `told` is what :func:`lead_to_json` gave of it, if that was asked already.
    """
    seen = {k: v for k, v in (told or lead_to_json(lead)).items() if k not in _NOT_FOR_RULES}
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


@dataclass(frozen=True, slots=True)
class Identities:
    """Digests of what another lead of the same person (``personal``: email, phone) or household (street, zip) has, too.

    ``personal`` are email and phone, ``household`` is street and zip. ``twins`` are pairs of digests of one phone, the
    finer and the coarser: what says nothing any more as the one, because too many share it, says nothing as the other
    either.
    """

    personal: frozenset[bytes] = frozenset()
    household: frozenset[bytes] = frozenset()
    twins: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def all(self) -> frozenset[bytes]:
        """Every digest, for storing."""
        return self.personal | self.household

    def mute(self, shared: Collection[bytes]) -> frozenset[bytes]:
        """Of these digests those that say nothing, as too many leads share them: `shared` says of which that is so."""
        return frozenset((self.all & set(shared)) | {fine for fine, coarse in self.twins if coarse in shared})


def identities(tenant_id: UUID, lead: Lead, *, households: bool = False, country: str | None = None) -> Identities:
    """The identities of `lead`, hashed per tenant.

    With `households` phones are also read as numbers of the world, those without a country code as of `country` (ISO
    3166, two letters), and the address counts. The digests of bare digits stay beside the finer ones, so that whoever
    was stored by them alone is still found.
    """

    def digest(kind: str, value: str) -> bytes:
        plain = f"{kind}:{value}".encode()
        return hashlib.blake2b(plain, key=tenant_id.bytes, digest_size=20).digest()

    personal = {digest("email", e) for e in map(normal_email, lead.emails) if e}
    twins = []
    for phone in lead.phones:
        bare = normal_phone(phone)
        coarse = None if bare is None else digest("phone", bare)
        number = world_phone(phone, country) if households else None
        fine = None if number is None else digest("tel", number)
        personal |= {one for one in (coarse, fine) if one is not None}
        if coarse is not None and fine is not None:
            twins.append((fine, coarse))
    address = normal_address(lead.street, lead.zip) if households else None
    return Identities(
        frozenset(personal), frozenset() if address is None else frozenset({digest("household", address)}), tuple(twins)
    )


def world_phone(value: str, country: str | None) -> str | None:
    """`value` as E.164 (``+15125550100``), read as a number of `country` if it has no country code; None when it cannot
    be one. An extension does not count. By Google's libphonenumber."""
    try:
        number = phonenumbers.parse(value, country)
    except phonenumbers.NumberParseException:
        return None
    if not phonenumbers.is_possible_number(number):
        return None
    return phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164)


# Words of an address that people shorten (USPS Publication 28), and those that stand before the number of a flat.
_SHORT = {
    "avenue": "ave", "boulevard": "blvd", "circle": "cir", "court": "ct", "drive": "dr", "highway": "hwy", "lane": "ln",
    "parkway": "pkwy", "place": "pl", "road": "rd", "square": "sq", "street": "st", "terrace": "ter", "trail": "trl",
    "north": "n", "south": "s", "east": "e", "west": "w", "northeast": "ne", "northwest": "nw", "southeast": "se",
    "southwest": "sw", "apartment": "", "apt": "", "unit": "", "suite": "", "ste": "", "no": "",
}  # fmt: skip
_WORD = re.compile(r"\w+")


def normal_address(street: str | None, zip_code: str | None) -> str | None:
    """Street and zip as compared; None without a zip, or without a house number: such an address is of many."""
    words = _WORD.findall(normal_text(street or ""))
    code = bare_code(normal_text(zip_code or ""))
    if not code or not any(c.isdecimal() for word in words for c in word):
        return None
    return " ".join(short for word in words if (short := _SHORT.get(word, word))) + "|" + code
