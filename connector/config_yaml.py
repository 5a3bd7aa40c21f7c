"""YAML text as a tree that remembers where each value stands.

PyYAML's loader is not used above the level of its events, for three reasons: a configuration must report every problem
with its line, an alias must be refused before it multiplies, and YAML 1.1 reads ``NO`` as false, ``09:00`` as 540 and
``01234`` as 668. Here every scalar keeps its written text; :func:`typed` reads the few that are numbers or switches, by
the rules of the YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#103-core-schema).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import yaml

from connector.schema_words import Path, show

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 40
MAX_PROBLEMS = 200

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# Eighteen digits hold any price and keep int() away from its own limit of 4,300.
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})\.[0-9]{1,9}")
# What PostgreSQL or a terminal would choke on; a double-quoted escape can smuggle it past the reader.
_UNSTORABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True, order=True)
class ConfigProblem:
    """One thing wrong in a configuration. ``line`` and ``column`` count from 1; an empty ``path`` is the whole file."""

    line: int
    column: int
    path: str
    what: str
    fix: str

    def __str__(self) -> str:
        where = f"line {self.line}, column {self.column}"
        return f"{where} ({self.path}): {self.what}; {self.fix}" if self.path else f"{where}: {self.what}; {self.fix}"


class ConfigProblems(Exception):
    """A configuration that cannot be used. ``problems`` holds every one, in order of line.

    The exception's own text gives only their number and the first place, because problems may quote the file, which
    names people: show ``problems`` to the admin, log the exception.
    """

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        found = sorted(set(problems))
        self.problems: tuple[ConfigProblem, ...] = tuple(found[:MAX_PROBLEMS])
        first = self.problems[0]
        many = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        super().__init__(f"{many} in the configuration, the first at line {first.line}")


@dataclass(frozen=True, slots=True)
class Node:
    """A value at its place. Exactly one of ``items`` (mapping), ``entries`` (list) and ``text`` (scalar) is not None.

    ``plain`` marks a scalar without quotes, the only kind that can be a number, a switch or null. ``keys`` gives the
    place of each key of a mapping.
    """

    line: int
    column: int
    text: str | None = None
    plain: bool = False
    items: dict[str, Node] | None = None
    entries: list[Node] | None = None
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_null(self) -> bool:
        """Whether this is nothing at all, or an unquoted ``null`` or ``~``."""
        return self.plain and self.text in _NULL


def typed(node: Node) -> str | int | float | bool | None:
    """A scalar by YAML 1.2's core schema: quoted is text; unquoted may be a switch, a decimal number, null or text.

    A fraction that a float would round stays text, so that no amount is ever changed in silence.
    """
    text = node.text or ""
    if not node.plain:
        return text
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        number = float(text)
        if Decimal(repr(number)) == Decimal(text):
            return int(number) if number.is_integer() else number
    return text


def place(root: Node, path: Sequence[str | int], *, of_key: bool = False) -> tuple[int, int]:
    """Line and column of the value at `path`, of its key if `of_key`; of the nearest value above when there is none."""
    node, mark = root, (root.line, root.column)
    for step in path:
        below: Node | None = None
        if isinstance(step, int) and node.entries is not None and step < len(node.entries):
            below = node.entries[step]
            mark = (below.line, below.column)
        elif isinstance(step, str) and node.items is not None and step in node.items:
            below = node.items[step]
            # A block value starts on a line of its own; the key is where an admin looks for it.
            at_key = of_key or below.text is None or below.is_null
            mark = node.keys[step] if at_key else (below.line, below.column)
        if below is None:
            break
        node = below
    return mark


def _start(event: yaml.Event) -> tuple[int, int]:
    mark: Any = event.start_mark
    return mark.line + 1, mark.column + 1


class _Stop(Exception):
    """Reading cannot go on; the problem is already noted."""


class _Reader:
    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []

    def note(self, event: yaml.Event, path: Path, what: str, fix: str) -> None:
        self.problems.append(ConfigProblem(*_start(event), show(path), what, fix))

    def document(self, events: Iterator[yaml.Event]) -> Node | None:
        root: Node | None = None
        for event in events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            if root is not None:
                self.note(event, (), "a second document starts here", "keep everything in one document")
                break
            root = self.node(next(events), events, ())
        return root

    def node(self, event: yaml.Event, events: Iterator[yaml.Event], path: Path) -> Node:
        line, column = _start(event)
        if len(path) > MAX_DEPTH:
            self.note(event, (), f"nested more than {MAX_DEPTH} deep", "nest fewer conditions into each other")
            raise _Stop
        if isinstance(event, yaml.AliasEvent):
            self.note(event, path, "is an alias (*)", "write the value out again; aliases are not read")
            return Node(line, column, text="*", plain=True)
        if getattr(event, "tag", None) is not None:
            self.note(event, path, "has a tag (!)", "leave the tag out; put text that must stay text in quotes")
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(events, path, line, column)
        if isinstance(event, yaml.SequenceStartEvent):
            entries: list[Node] = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                entries.append(self.node(event, events, (*path, len(entries))))
            return Node(line, column, entries=entries)
        if not isinstance(event, yaml.ScalarEvent):
            raise TypeError(f"PyYAML gave {type(event).__name__} where a value starts")
        if _UNSTORABLE.search(event.value):
            self.note(event, path, "holds a control character or half of a character", "remove it")
        return Node(line, column, text=_UNSTORABLE.sub("?", event.value), plain=event.style is None)

    def mapping(self, events: Iterator[yaml.Event], path: Path, line: int, column: int) -> Node:
        items: dict[str, Node] = {}
        keys: dict[str, tuple[int, int]] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            start = _start(event)
            key = self.node(event, events, (*path, "?"))
            name = key.text
            if name is None:
                self.note(event, path, "has a key that is a list or a mapping", "use plain text as the key")
            elif name in items:
                first = keys[name][0]
                fix = f"remove one of the two; the first is on line {first}"
                self.note(event, (*path, name), "is written twice", fix)
            below = self.node(next(events), events, (*path, "?" if name is None else name))
            if name is not None and name not in items:
                items[name] = below
                keys[name] = start
        return Node(line, column, items=items, keys=keys)


def _decode(source: str | bytes) -> str:
    size = len(source) if isinstance(source, bytes) else len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        what = f"the configuration has {size:,} bytes, more than {MAX_BYTES:,}"
        raise ConfigProblems([ConfigProblem(1, 1, "", what, "keep hours and rules that repeat in fewer lines")])
    if isinstance(source, str):
        return source.removeprefix("\ufeff")
    try:
        return source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = source[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise ConfigProblems([ConfigProblem(line, column, "", "is not UTF-8", "save the file as UTF-8")]) from None


def _events(loader: yaml.SafeLoader) -> Iterator[yaml.Event]:
    while loader.check_event():
        yield loader.get_event()  # type: ignore[no-untyped-call]


def _syntax(error: Exception, text: str, loader: yaml.SafeLoader | None) -> ConfigProblem:
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position] if isinstance(error.position, int) else ""
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        return ConfigProblem(line, column, "", "holds a character that YAML does not allow", "remove it")
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None and loader is not None:
        mark = loader.get_mark()
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    what = getattr(error, "problem", None) or "has a number or an escape that YAML does not allow"
    fix = "check the indentation (spaces, no tabs) and put text that holds ': ', ' #' or quotes into quotes"
    return ConfigProblem(line, column, "", f"is not YAML: {what}", fix)


def read(source: str | bytes) -> tuple[Node | None, list[ConfigProblem]]:
    """The tree of a configuration, and what is wrong with it as YAML.

    `source` is text, or bytes in UTF-8. The tree is None when reading had to stop; otherwise it can be checked further
    even if there are problems (of a key written twice it holds the first value).

    Raises:
        ConfigProblems: the text is over 1 MiB or not UTF-8, so that nothing was read.
    """
    text = _decode(source)
    reader = _Reader()
    root: Node | None = None
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        root = reader.document(_events(loader))
    except _Stop:
        pass
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML lets chr() and int() of its escapes and directives through as they are.
        reader.problems.append(_syntax(error, text, loader))
    else:
        if root is None or root.is_null:
            root = None
            reader.problems.append(ConfigProblem(1, 1, "", "the configuration is empty", "start with `version: 1`"))
    return root, reader.problems
