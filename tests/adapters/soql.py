"""As much of SOQL as a fake of Salesforce needs: SELECT, WHERE with AND, OR and brackets, ORDER BY, LIMIT."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Row = Mapping[str, Any]
Test = Callable[[Row], bool]

_TOKEN = re.compile(r"[ ]*('(?:[^'\\]|\\.)*'|[0-9]{4}-[0-9T:-]+Z|[A-Za-z_][A-Za-z0-9_.]*|[0-9]+|>=|[=(),])", re.DOTALL)
_WORDS = frozenset({"SELECT", "FROM", "WHERE", "AND", "OR", "IN", "ORDER", "BY", "LIMIT", "ASC", "DESC"})
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}


class Malformed(Exception):
    """The query cannot be read."""


@dataclass(frozen=True)
class Query:
    """A query that was read. ``names`` are all columns that it names anywhere."""

    columns: tuple[str, ...]
    of: str
    fits: Test
    order: tuple[tuple[str, bool], ...]
    limit: int | None
    names: frozenset[str]

    def run(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that fit, in order."""
        found = [row for row in rows if self.fits(row)]
        for name, descending in reversed(self.order):
            found.sort(key=lambda row: row[name], reverse=descending)
        return found[: self.limit]


class _Reader:
    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        at, text = 0, text.strip(" ")
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise Malformed(text[at : at + 20])
            self.tokens.append(found[1])
            at = found.end()
        self.at = 0
        self.names: set[str] = set()

    def ahead(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        token = self.ahead()
        if (wanted and token.upper() not in wanted) or not token:
            raise Malformed(f"{token!r}, not {wanted}")
        self.at += 1
        return token

    def may(self, word: str) -> bool:
        if self.ahead().upper() != word:
            return False
        self.at += 1
        return True

    def name(self) -> str:
        token = self.take()
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_.]*", token) or token.upper() in _WORDS:
            raise Malformed(token)
        self.names.add(token)
        return token

    def value(self) -> Any:
        token = self.take()
        if token.startswith("'"):
            return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), token[1:-1])
        if token.lower() in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[token.lower()]
        if token.endswith("Z"):
            return datetime.fromisoformat(token)
        raise Malformed(token)

    def any_of(self) -> Test:
        tests = [self.all_of()]
        while self.may("OR"):
            tests.append(self.all_of())
        return lambda row: any(test(row) for test in tests)

    def all_of(self) -> Test:
        tests = [self.one()]
        while self.may("AND"):
            tests.append(self.one())
        return lambda row: all(test(row) for test in tests)

    def one(self) -> Test:
        if self.may("("):
            inner = self.any_of()
            self.take(")")
            return inner
        name = self.name()
        if self.may("IN"):
            self.take("(")
            values = [self.value()]
            while self.may(","):
                values.append(self.value())
            self.take(")")
            return lambda row: row[name] in values
        operator, value = self.take("=", ">="), self.value()
        return lambda row: row[name] == value if operator == "=" else row[name] >= value


def read(text: str) -> Query:
    """Read a query. Raises :class:`Malformed`."""
    reader = _Reader(text)
    reader.take("SELECT")
    columns = [reader.name()]
    while reader.may(","):
        columns.append(reader.name())
    reader.take("FROM")
    of = reader.take()
    fits: Test = lambda row: True  # noqa: E731
    if reader.may("WHERE"):
        fits = reader.any_of()
    order: list[tuple[str, bool]] = []
    if reader.may("ORDER"):
        reader.take("BY")
        while True:
            name = reader.name()
            descending = reader.may("DESC")
            order.append((name, descending))
            if not reader.may(","):
                break
    limit = int(reader.take()) if reader.may("LIMIT") else None
    if reader.ahead():
        raise Malformed(reader.ahead())
    return Query(tuple(columns), of, fits, tuple(order), limit, frozenset(reader.names))
