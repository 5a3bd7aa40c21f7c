"""Reading what a CRM sends: bounded JSON and typed fields.

Every body is untrusted, a signed one too. :func:`read_json` checks size and depth before it parses (the parser of
Python 3.11 recurses, so deep nesting would be a RecursionError) and mends once, here at the edge, what PostgreSQL
cannot store: NUL and lone surrogates. Whatever is wrong is one :class:`adapters.base.Unreadable` with a slug:
``too_big``, ``too_deep``, ``not_utf8``, ``not_json``, ``not_finite``, ``long_number``, ``too_many_elements``,
``too_many_keys``, ``wrong_type``, ``missing_<field>``.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any
from zoneinfo import ZoneInfo

from adapters.base import Unreadable
from routing.model import Scalar


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a body is read: bytes, levels of nesting, entries of any one list, keys in all."""

    max_bytes: int = 1 << 20
    max_depth: int = 64
    max_elements: int = 500
    max_keys: int = 10_000


DELIVERY = Limits()
# An answer may hold a page of 100 leads with a hundred fields each, so only the size is as tight as a delivery's.
ANSWER = Limits(max_elements=10_000, max_keys=200_000)

# No rule reads further into a text, and a long message must not park its lead: longer texts are cut, not refused.
MAX_TEXT = 64 * 1024
_MAX_DIGITS = 100
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_REF = re.compile(r"[A-Za-z0-9_.:@+=~-]{1,128}")
_NUMERAL = re.compile(r"[+-]?[0-9]{1,18}(?:\.[0-9]{1,18})?")
_DIGITS = frozenset("0123456789")


def read_json(body: bytes, limits: Limits = DELIVERY) -> Any:
    """Parse `body`; numbers with a point become Decimal, duplicate keys keep the last value.

    Raises:
        Unreadable: with the slug of the first limit that `body` breaks.
    """
    if len(body) > limits.max_bytes:
        raise Unreadable("too_big")
    _check_depth(body, limits.max_depth)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise Unreadable("not_utf8") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_decimal, parse_int=_integer)
    except (ValueError, RecursionError):
        raise Unreadable("not_json") from None
    return _Tidy(limits).tidy(value)


def _check_depth(body: bytes, limit: int) -> None:
    if body.count(b"[") + body.count(b"{") <= limit:  # the usual body: no need to tell brackets from text
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(body):
        first = match.group()[:1]
        if first in b"[{":
            depth += 1
            if depth > limit:
                raise Unreadable("too_deep")
        elif first in b"]}":
            depth -= 1


def _refuse_constant(_: str) -> None:
    raise Unreadable("not_finite")  # NaN and Infinity are no JSON, though Python's parser takes them


def _decimal(text: str) -> Decimal:
    if len(text) > _MAX_DIGITS:
        raise Unreadable("long_number")
    try:
        value = Decimal(text)
    except InvalidOperation:  # an exponent beyond what Decimal itself can hold
        raise Unreadable("not_finite") from None
    if value and abs(value.adjusted()) > 308:  # outside a double: 1e400 would be infinite elsewhere
        raise Unreadable("not_finite")
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise Unreadable("long_number")
    return int(text)


def clean(text: str) -> str:
    """`text` as PostgreSQL can store it. Works on decoded text, so a literal backslash-u0000 stays as it is."""
    if not text.isascii():
        text = _LONE_SURROGATE.sub("\ufffd", text)
    return text.replace("\x00", "")[:MAX_TEXT]


class _Tidy:
    """One walk over a parsed body: texts cleaned, lists and keys counted. Depth is bounded before."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._keys = 0

    def tidy(self, value: Any) -> Any:
        if isinstance(value, str):
            return clean(value)
        if isinstance(value, list):
            if len(value) > self._limits.max_elements:
                raise Unreadable("too_many_elements")
            return [self.tidy(v) for v in value]
        if isinstance(value, dict):
            self._keys += len(value)
            if self._keys > self._limits.max_keys:
                raise Unreadable("too_many_keys")
            return {clean(k): self.tidy(v) for k, v in value.items()}
        return value


def missing(key: str) -> Unreadable:
    """The error for a required field that is not there, named in its slug: ``eventId`` -> ``missing_event_id``."""
    return Unreadable("missing_" + re.sub(r"[^a-z0-9]+", "_", re.sub(r"([A-Z])", r"_\1", key).lower()).strip("_"))


def ref(value: Any) -> str:
    """A CRM's id as text. Only what can stand in a path or a comma list passes; ``.`` and ``..`` never do.

    Raises:
        Unreadable: ``wrong_type``.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**40:
        return str(value)
    if isinstance(value, str) and _REF.fullmatch(value) and value.strip("."):
        return value
    raise Unreadable("wrong_type")


def phone(text: str) -> str | None:
    """Digits of a phone number, with its leading ``+`` if it has one; None when no digit is in it."""
    digits = "".join(c for c in text if c in _DIGITS)
    return (("+" if text.strip().startswith("+") else "") + digits) or None if digits else None


def email(text: str) -> str | None:
    """An e-mail address in lower case, the form in which two of them are compared; None when it is none."""
    return text.strip().lower() if "@" in text else None


def emails(texts: Iterable[str | None]) -> tuple[str, ...]:
    """The e-mail addresses among `texts`, each once."""
    return unique(email(text or "") for text in texts)


def phones(texts: Iterable[str | None]) -> tuple[str, ...]:
    """The phone numbers among `texts`, each once."""
    return unique(phone(text or "") for text in texts)


def note_html(subject: str, body: str) -> str:
    """A note for a CRM that takes HTML: the subject above the text, and nothing in either that is read as markup."""
    return f"<strong>{html.escape(subject)}</strong><br>{html.escape(body)}".replace("\n", "<br>")


def unique(values: Iterable[str | None]) -> tuple[str, ...]:
    """`values` without gaps and repeats, in their order."""
    return tuple(dict.fromkeys(v for v in values if v))


def seconds(text: str | None, default: timedelta) -> timedelta:
    """A parameter that an admin wrote as whole seconds; `default` when it is absent or anything else."""
    return timedelta(seconds=int(text)) if text and re.fullmatch("[0-9]{1,6}", text) else default


class Fields:
    """Typed reading of one JSON object.

    A field that is absent, null or an empty text is None (or empty). A field of the wrong type raises
    :class:`Unreadable` when `strict` (a delivery: its element parks and the sender learns of it) and is None
    otherwise (an answer with other people's leads in it: one odd field must not block them).
    """

    def __init__(self, data: Any, *, strict: bool) -> None:
        if not isinstance(data, dict):
            raise Unreadable("wrong_type")
        self.data: Mapping[str, Any] = data
        self.strict = strict

    def _wrong(self) -> None:
        if self.strict:
            raise Unreadable("wrong_type")

    def has(self, key: str) -> bool:
        """Whether the object names `key` at all, be it with null."""
        return key in self.data

    def ref(self, key: str) -> str:
        """A required id. Raises :class:`Unreadable` in both modes."""
        value = self.data.get(key)
        if value is None or value == "":
            raise missing(key)
        return ref(value)

    def optional_ref(self, key: str) -> str | None:
        """An id that may be absent, null, empty or 0. A wrong type raises in both modes: no owner is guessed."""
        value = self.data.get(key)
        if value is None or value == "" or (value == 0 and not isinstance(value, bool)):
            return None
        return ref(value)

    def text(self, key: str) -> str | None:
        """A text, trimmed. A number (a zip code, say) is taken as it is written."""
        return self._text(self.data.get(key))

    def _text(self, value: Any) -> str | None:
        if isinstance(value, int | Decimal) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str):
            return value.strip() or None
        if value is not None:
            self._wrong()
        return None

    def required_text(self, key: str, longest: int = 200) -> str:
        """A text that must be there and may have `longest` characters."""
        value = self.data.get(key)
        if value is None or value == "":
            raise missing(key)
        if not isinstance(value, str) or len(value) > longest:
            raise Unreadable("wrong_type")
        return value

    def number(self, key: str) -> Decimal | None:
        """A number, also one written as text; at most 18 digits before the point."""
        value = self.data.get(key)
        if isinstance(value, str):
            value = value.strip()
            if not value:
                return None
            if _NUMERAL.fullmatch(value):
                return Decimal(value)
        elif isinstance(value, int | Decimal) and not isinstance(value, bool):
            found = Decimal(value)
            if abs(found) < 10**18:
                return found
        if value is not None:
            self._wrong()
        return None

    def time(self, key: str) -> datetime | None:
        """An ISO 8601 time as aware UTC; one without a zone is taken as UTC."""
        value = self.data.get(key)
        if value is None or value == "":
            return None
        try:
            read = datetime.fromisoformat(value)
            return read.replace(tzinfo=UTC) if read.tzinfo is None else read.astimezone(UTC)
        except (TypeError, ValueError, OverflowError):
            self._wrong()
            return None

    def flag(self, key: str) -> bool | None:
        """A truth value, also written as 0 or 1."""
        value = self.data.get(key)
        if isinstance(value, bool):
            return value
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        if value is not None:
            self._wrong()
        return None

    def zone(self, key: str) -> str | None:
        """An IANA time zone that exists, else None in both modes: a CRM may name zones its own way."""
        try:
            return ZoneInfo(str(self.data.get(key) or "-")).key
        except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
            return None

    def items(self, key: str) -> list[Any]:
        """A list; empty when absent or null."""
        value = self.data.get(key)
        if isinstance(value, list):
            return value
        if value is not None:
            self._wrong()
        return []

    def object(self, key: str) -> Fields:
        """An object, in the same mode; an empty one when absent or null."""
        value = self.data.get(key)
        if isinstance(value, dict):
            return Fields(value, strict=self.strict)
        if value is not None:
            self._wrong()
        return Fields({}, strict=self.strict)

    def objects(self, key: str) -> list[Fields]:
        """The objects of a list, in the same mode."""
        found = []
        for value in self.items(key):
            if isinstance(value, dict):
                found.append(Fields(value, strict=self.strict))
            else:
                self._wrong()
        return found

    def texts(self, key: str, name: str | None = None) -> tuple[str, ...]:
        """The texts of a list without repeats; of an object among them, its text `name`."""
        values = (v.get(name) if name and isinstance(v, dict) else v for v in self.items(key))
        return unique(self._text(v) for v in values)

    def scalars(self, keys: Iterable[str]) -> dict[str, Scalar | tuple[Scalar, ...]]:
        """Custom fields: single values and lists of them. Empty ones are left out, nested ones are wrong."""
        found: dict[str, Scalar | tuple[Scalar, ...]] = {}
        for key in keys:
            value = self.data[key]
            if value in (None, "", []):
                continue
            if isinstance(value, list) and all(isinstance(v, str | int | Decimal) for v in value):
                found[key] = tuple(value)
            elif isinstance(value, str | int | Decimal):  # bool is an int
                found[key] = value
            else:
                self._wrong()
        return found
