"""Printing: JSON for programs, tables for people. A table that is piped keeps every character of every cell."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

SCHEMA = 1
"""What ``"schema"`` says in all JSON: it rises when a key changes its meaning or goes."""

_WIDE = 100_000  # columns: what is no terminal has no edge at which to break or cut


def print_json(data: Mapping[str, Any]) -> None:
    """`data` with its ``"schema"``, times and ids as text."""
    click.echo(json.dumps({"schema": SCHEMA, **data}, indent=2, ensure_ascii=False, default=str))


def say(*lines: str) -> None:
    """Plain lines."""
    for line in lines:
        click.echo(line)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, none: str = "none", indent: int = 0) -> None:
    """A table, or `none` when it has no rows. None in a cell is an empty cell."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if not cells:
        say(" " * indent + none)
        return
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=_WIDE, color_system=None)
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in columns:
        # Broken into lines where the terminal is narrow, never cut: an id with an ellipsis is of no use.
        made.add_column(Text(title), overflow="fold")
    for row in cells:
        made.add_row(*map(Text, row))
    with console.capture() as captured:
        console.print(Padding(made, (0, 0, 0, indent)))
    say(*(line.rstrip() for line in captured.get().splitlines()))


def when(moment: str | None) -> str:
    """A time from JSON as people read it: to the second, UTC."""
    return "" if moment is None else moment[:19].replace("T", " ") + "Z"


def yes(value: object) -> str:
    """``yes`` or ``no``."""
    return "yes" if value else "no"


def agent(one: Mapping[str, Any] | None) -> str:
    """An agent from JSON: name and CRM id."""
    if one is None:
        return "nobody"
    return f"{one['name']} ({one['ref']})" if one["ref"] else str(one["name"])
