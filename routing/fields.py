"""A lead's fields as rules see them: their kinds, their values made ready to compare, and the words for problems."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from routing.model import Lead

Json = str | int | bool | None | list["Json"] | dict[str, "Json"]
TEXTS: Final = 0  # what a test compares: the index into Fact.values
NUMBERS: Final = 1
FLAGS: Final = 2


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
_NUMBER = re.compile(r"[+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?")


def normal_text(text: str) -> str:
    """`text` without case, accents and surplus white space: ``" STRASSE  Łódź"`` and ``"straße lodz"`` are one.

    Works letter by letter, and is idempotent.
    """
    if not text.isascii():
        parts = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in parts if not unicodedata.combining(c))
    return " ".join(text.casefold().translate(_PLAIN).split())


def normal_phone(text: str) -> str:
    """The digits of a phone number, after a plus if it starts with one. No country code is guessed."""
    plain = unicodedata.normalize("NFKD", text).strip()
    digits = "".join(c for c in plain if "0" <= c <= "9")
    return f"+{digits}" if digits and plain.startswith("+") else digits


@dataclass(frozen=True, slots=True)
class FieldKind:
    """How a field is read from the lead's ``attribute``: what its tests may compare (``slots``), whether it is one
    value only (``single``), whether it is a list of entries (``listed``), and whether its value tells nothing
    personal and may stand in a decision (``shown``)."""

    attribute: str
    slots: tuple[int, ...] = (TEXTS,)
    single: bool = True
    listed: bool = False
    shown: bool = False
    normal: Callable[[str], str] = normal_text


_SHOWN = ("source", "type", "stage", "city", "state", "zip", "form", "campaign", "language")
_CUSTOM = FieldKind("custom", slots=(TEXTS, NUMBERS, FLAGS), single=False)
FIELDS: Mapping[str, FieldKind] = MappingProxyType(
    {name: FieldKind(name, shown=name in _SHOWN) for name in (*_SHOWN, "country", "street")}
    | {
        "price": FieldKind("price", slots=(NUMBERS,), shown=True),
        "tags": FieldKind("tags", single=False, listed=True, shown=True),
        "email": FieldKind("emails", single=False),
        "phone": FieldKind("phones", single=False, normal=normal_phone),
    }
)


def field_kind(name: str) -> FieldKind | None:
    """The kind of the field `name`, ``custom.<key>`` included (the key exactly as in the CRM). None: no such field."""
    return _CUSTOM if name.startswith("custom.") and len("custom.") < len(name) <= 200 else FIELDS.get(name)


class Fact(NamedTuple):
    """One field of one lead: its ``values`` by slot. ``present`` without values means that no test can compare them."""

    values: tuple[tuple[str, ...], tuple[Decimal, ...], tuple[bool, ...]] = ((), (), ())
    present: bool = False
    listed: bool = False
    shown: Json = None


class Facts:
    """The fields of one lead, each normalised once, when the first test asks for it."""

    __slots__ = ("_facts", "_lead")

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._facts: dict[str, Fact] = {}

    def get(self, name: str) -> Fact:
        """The field `name`. Raises KeyError for a name that :func:`field_kind` does not know."""
        fact = self._facts.get(name)
        if fact is None:
            fact = self._facts[name] = self._read(name)
        return fact

    def _read(self, name: str) -> Fact:
        kind = _CUSTOM if name.startswith("custom.") else FIELDS[name]
        raw = getattr(self._lead, kind.attribute)
        if kind is _CUSTOM:
            raw = raw.get(name.removeprefix("custom."))
        values = raw if isinstance(raw, tuple | list) else (raw,)
        texts: list[str] = []
        numbers: list[Decimal] = []
        flags: list[bool] = []
        strange = False
        for value in values:
            if isinstance(value, str):
                if text := kind.normal(value):
                    texts.append(text)
                if kind is _CUSTOM and _NUMBER.fullmatch(value.strip()):
                    numbers.append(Decimal(value.strip()))
            elif isinstance(value, bool):
                flags.append(value)
            elif isinstance(value, int | float | Decimal):
                if (number := decimal(value)).is_finite():
                    numbers.append(number)
            elif value is not None:
                strange = True
        present = bool(texts or numbers or flags or strange)
        listed = kind.listed or (kind is _CUSTOM and values is raw)
        visible = shown(raw) if kind.shown and present else None
        return Fact((tuple(texts), tuple(numbers), tuple(flags)), present, listed, visible)


def decimal(value: float | Decimal) -> Decimal:
    """`value` as it is written: 0.1 becomes 0.1, not the nearest binary fraction."""
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def shown(value: Any) -> Json:
    """`value` as short JSON: long texts and lists are cut, numbers are text because JSON would round them."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        more = [f"... and {len(value) - 8} more"] if len(value) > 8 else []
        return [*map(shown, value[:8]), *more]
    text = value if isinstance(value, str) else str(decimal(value)) if isinstance(value, int | float) else str(value)
    return text if len(text) <= 100 else text[:100] + "..."
