"""A lead's fields as rules see them: their kinds, their values made ready to compare, and the words for problems."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfo

from routing.model import Lead
from routing.places import Point, point_of

Json = str | int | bool | None | list["Json"] | dict[str, "Json"]
TEXTS: Final = 0  # what a test compares: the index into Fact.values
NUMBERS: Final = 1
FLAGS: Final = 2
POINTS: Final = 3
DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a configuration: where, what, and how to fix it."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


class ConfigurationProblems(ValueError):
    """A configuration cannot be used. ``problems`` holds everything that is wrong with it, not only the first thing."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class ConditionProblems(ConfigurationProblems):
    """Rules or their conditions cannot be used."""


# Letters that Unicode does not decompose, although people type them without their stroke, or in two.
_PLAIN = str.maketrans({"ı": "i", "ł": "l", "ø": "o", "đ": "d", "ħ": "h", "ŧ": "t", "æ": "ae", "œ": "oe"})
_LONG_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_NUMBER = re.compile(r"[+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?")


def normal_text(text: str) -> str:
    """`text` without case, accents and surplus white space: ``" STRASSE  Łódź"`` and ``"straße lodz"`` are one.

    Works letter by letter, and is idempotent.
    """
    if not text.isascii():
        parts = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in parts if not unicodedata.combining(c))
    return " ".join(text.casefold().translate(_PLAIN).split())


def normal_day(text: str) -> str:
    """``mon`` to ``sun`` for any spelling of a day that begins with those letters; empty for anything else."""
    word = normal_text(text)
    return next(
        (day for day, long in zip(DAYS, _LONG_DAYS, strict=True) if day == word[:3] and long.startswith(word)), ""
    )


def normal_phone(text: str) -> str:
    """The digits of a phone number, after a plus if it starts with one. No country code is guessed."""
    plain = unicodedata.normalize("NFKD", text).strip()
    digits = "".join(c for c in plain if "0" <= c <= "9")
    return f"+{digits}" if digits and plain.startswith("+") else digits


@lru_cache(maxsize=4096)  # of one lead's code it is asked once for each range
def bare_code(text: str) -> str:
    """A code as ranges compare it: letters and digits only, and of a nine-digit one (ZIP+4) the first five."""
    code = "".join(c for c in text if c.isalnum())
    return code[:5] if len(code) == 9 and code.isdecimal() else code


@dataclass(frozen=True, slots=True)
class FieldKind:
    """How a field is read from the lead's ``attributes``: what its tests may compare (``slots``), whether it is one
    value only (``single``), whether it is a list of entries (``listed``), and whether its value tells nothing
    personal and may stand in a decision (``shown``). ``ranged``: its texts may be compared by a range, as codes.
    ``zoned``: it is read on the clocks of a time zone, which its tests name."""

    attributes: tuple[str, ...]
    slots: tuple[int, ...] = (TEXTS,)
    single: bool = True
    listed: bool = False
    shown: bool = False
    ranged: bool = False
    zoned: bool = False
    normal: Callable[[str], str] = normal_text
    wants: str = "letters or digits"


_SHOWN = ("source", "type", "stage", "city", "county", "state", "form", "campaign", "language")
CUSTOM: Final = FieldKind(("custom",), slots=(TEXTS, NUMBERS, FLAGS), single=False)
FIELDS: Mapping[str, FieldKind] = MappingProxyType(
    {name: FieldKind((name,), shown=name in _SHOWN) for name in (*_SHOWN, "country", "street")}
    | {
        "zip": FieldKind(("zip",), shown=True, ranged=True),
        "price": FieldKind(("price",), slots=(NUMBERS,), shown=True),
        "tags": FieldKind(("tags",), single=False, listed=True, shown=True),
        "email": FieldKind(("emails",), single=False),
        "phone": FieldKind(("phones",), single=False, normal=normal_phone, wants="digits"),
        "location": FieldKind(("latitude", "longitude"), slots=(POINTS,)),
        "arrival_hour": FieldKind(("created_at",), slots=(NUMBERS,), shown=True, zoned=True),
        "arrival_weekday": FieldKind(
            ("created_at",), shown=True, zoned=True, normal=normal_day, wants="a day of the week such as mon"
        ),
    }
)


def field_kind(name: str) -> FieldKind | None:
    """The kind of the field `name`, ``custom.<key>`` included (the key exactly as in the CRM). None: no such field."""
    return CUSTOM if name.startswith("custom.") and len("custom.") < len(name) <= 200 else FIELDS.get(name)


Values = tuple[tuple[str, ...], tuple[Decimal, ...], tuple[bool, ...], tuple[Point, ...]]


class Fact(NamedTuple):
    """One field of one lead: its ``values`` by slot. ``present`` without values means that no test can compare them.

    ``holds`` is None unless the values themselves are not known any more: then it holds the marks of the tests of this
    field that they passed, and ``values`` says only in which slots there were some.
    """

    values: Values = ((), (), (), ())
    present: bool = False
    listed: bool = False
    shown: Json = None
    holds: frozenset[str] | None = None


def fact_name(field: str, zone: str | None) -> str:
    """By what name :class:`Facts` knows a field: its own, with the zone whose clocks it is read on."""
    return field if zone is None else f"{field}@{zone}"


def kind_of(fact: str) -> FieldKind:
    """The kind of what :func:`fact_name` names. Raises KeyError when there is none."""
    return CUSTOM if fact.startswith("custom.") else FIELDS[fact.partition("@")[0]]


class Facts(dict[str, Fact]):
    """The fields of one lead by :func:`fact_name`, each normalised once, when the first test asks for it.

    Raises KeyError for a name that :func:`field_kind` does not know.
    """

    __slots__ = ("_lead",)

    def __init__(self, lead: Lead) -> None:
        super().__init__()
        self._lead = lead

    def __missing__(self, name: str) -> Fact:
        fact = self[name] = fact_of(name, self.raw(name))
        return fact

    def raw(self, name: str) -> Any:
        """The field as the lead has it."""
        return raw_value(self._lead, name)


def raw_value(lead: Lead, name: str) -> Any:
    """What `lead` holds in the field that :func:`fact_name` names, None where it holds nothing."""
    kind = kind_of(name)
    if kind is CUSTOM:
        return lead.custom.get(name.removeprefix("custom."))
    if POINTS in kind.slots:
        return None if lead.latitude is None or lead.longitude is None else (lead.latitude, lead.longitude)
    if kind.zoned:
        # When the CRM got the lead, not when it told us: the same however late, and however often, it is decided.
        if lead.created_at is None:
            return None
        field, _, zone = name.partition("@")
        local = lead.created_at.astimezone(ZoneInfo(zone))
        return local.hour if field == "arrival_hour" else DAYS[local.weekday()]
    return getattr(lead, kind.attributes[0])


def fact_of(name: str, raw: Any) -> Fact:
    """What tests compare of `raw`, the value of the field that :func:`fact_name` names."""
    kind = kind_of(name)
    if kind.slots == (POINTS,):
        point = None if raw is None else point_of(*raw)
        return Fact() if point is None else Fact(((), (), (), (point,)), present=True)
    values = raw if isinstance(raw, tuple | list) else (raw,)
    texts: list[str] = []
    numbers: list[Decimal] = []
    flags: list[bool] = []
    strange = False
    for value in values:
        if isinstance(value, str):
            if text := kind.normal(value):
                texts.append(text)
            if kind is CUSTOM and _NUMBER.fullmatch(value.strip()):
                numbers.append(Decimal(value.strip()))
        elif isinstance(value, bool):
            flags.append(value)
        elif isinstance(value, int | float | Decimal):
            if (number := decimal(value)).is_finite():
                numbers.append(number)
        elif value is not None:
            strange = True
    present = bool(texts or numbers or flags or strange)
    listed = kind.listed or (kind is CUSTOM and values is raw)
    visible = shown(raw) if kind.shown and present else None
    return Fact((tuple(texts), tuple(numbers), tuple(flags), ()), present, listed, visible)


def decimal(value: float | Decimal) -> Decimal:
    """`value` as it is written: 0.1 becomes 0.1, not the nearest binary fraction."""
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def shown(value: Any, *, whole: bool = False) -> Json:
    """`value` as short JSON: long texts and lists are cut unless it must be `whole`, numbers are text because JSON
    would round them."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        if whole:
            return [shown(one, whole=True) for one in value]
        more = [f"... and {len(value) - 8} more"] if len(value) > 8 else []
        return [*map(shown, value[:8]), *more]
    if isinstance(value, Mapping):
        return {str(key): shown(one) for key, one in value.items()}
    text = value if isinstance(value, str) else str(decimal(value)) if isinstance(value, int | float) else str(value)
    return text if whole or len(text) <= 100 else text[:100] + "..."
