"""Values in PostgreSQL's own spelling: what :mod:`routing.flight` sends, as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _array(values: Sequence[Any]) -> str:
    """The elements of an array; those of one type, as most are, by few steps that are C's."""
    kinds = set(map(type, values))
    if kinds == {UUID}:
        return "{" + ",".join([f"{value.int:032x}" for value in values]) + "}"
    if kinds == {int}:
        return "{" + ",".join(map(str, values)) + "}"
    if kinds == {str}:
        together = "\0".join(values)
        if together.count("\0") == len(values) - 1:  # one that holds it is told of with all others
            quoted = together.replace("\\", "\\\\").replace('"', '\\"')
            return '{"' + quoted.replace("\0", '","') + '"}'
    return "{" + ",".join([_ELEMENTS.get(type(value), _other_element)(value) for value in values]) + "}"


def _other_element(value: object) -> str:
    return _quoted(_spelling(value)(value))


def _spelling(value: object) -> Callable[[Any], str]:
    """How the values of its type are spelt; an enumeration's as those of the type it extends."""
    spelling = _SPELLINGS.get(type(value))
    if spelling is None:
        spelling = next((known for kind, known in _SPELLINGS.items() if isinstance(value, kind)), None)
    if spelling is None:
        raise TypeError(f"a {type(value).__name__} has no spelling for the database")
    return spelling


_SPELLINGS: dict[type, Callable[[Any], str]] = {
    str: str.__str__,
    UUID: lambda value: value.hex,
    bool: lambda value: "true" if value else "false",
    int: str,
    float: repr,
    Decimal: str,
    bytes: lambda value: "\\x" + value.hex(),
    datetime: lambda value: value.isoformat(),
    date: lambda value: value.isoformat(),
    timedelta: lambda value: f"{value // timedelta(microseconds=1)} microseconds",
    list: _array,
    tuple: _array,
    dict: json.dumps,
}
_ELEMENTS: dict[type, Callable[[Any], str]] = {
    type(None): lambda _: "NULL",
    str: _quoted,
    **{kind: _SPELLINGS[kind] for kind in (UUID, bool, int, float)},
}


def encoded(value: object) -> bytes | None:
    """A value as a parameter of a statement; None is NULL. Raises :class:`TypeError` and :class:`ValueError`."""
    if value is None:
        return None
    text = _spelling(value)(value)
    if "\0" in text:
        raise ValueError("a text for the database holds a NUL")  # libpq would cut it short
    return text.encode()


def literal(value: object) -> str:
    """A value written into a statement by ourselves; a cast that SQLAlchemy adds follows it."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    spelling = encoded(value)
    assert spelling is not None  # noqa: S101 - None was answered above
    if isinstance(value, timedelta):  # less an unknown, a time means another time
        return f"INTERVAL '{spelling.decode()}'"
    quoted = spelling.decode().replace("'", "''")
    return f"E'{quoted.replace(chr(92), chr(92) * 2)}'" if "\\" in quoted else f"'{quoted}'"
