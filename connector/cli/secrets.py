"""Secrets on their way in: from the environment, a file or a hidden prompt, never from the command line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def option(about: str) -> Callable[[F], F]:
    """``--secret``, any number of them, as `named`: for :func:`gather`."""
    text = f"{about} From FILE, from TURNLOCK_SECRET_<NAME>, or asked for."
    return click.option("--secret", "named", multiple=True, metavar="NAME[=@FILE]", help=text)


def variable(name: str) -> str:
    """The environment variable that may hold the secret called `name`."""
    return f"TURNLOCK_SECRET_{name.upper()}"


def split(given: str, known: Sequence[str]) -> tuple[str, str | None]:
    """``name`` or ``name=@file`` as name and file. Whatever else was written is refused and not repeated."""
    name, equals, source = given.partition("=")
    if not _NAME.fullmatch(name) or name not in known:
        raise click.UsageError(f"a secret is named by one of: {', '.join(known) or 'none, this CRM has no secrets'}")
    if equals and not source.startswith("@"):
        raise click.UsageError(
            f"{name}: a value in the command line can be seen by others and stays in the shell's history; "
            f"set {variable(name)}, or write {name}=@FILE, or only {name} to be asked for it"
        )
    return name, source[1:] if equals else None


def read(name: str, file: str | None = None) -> str:
    """The value: of `file` (``-`` is standard input), else of the environment, else asked for without showing it."""
    if file is not None:
        try:
            value = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            raise click.UsageError(f"{name}: the file cannot be read as text; check its path and rights") from None
    else:
        value = os.environ.get(variable(name)) or click.prompt(name, hide_input=True, err=True)
    value = value.strip()
    if not value:
        raise click.UsageError(f"{name}: the value is empty; set {variable(name)}, or write {name}=@FILE")
    return value


def gather(given: Sequence[str], parameters: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Every secret that was named, and those required ones that the environment has or the terminal can be asked for.

    `parameters` are the manifest's of one CRM. Names are all checked before anything is asked.
    """
    known = [p["name"] for p in parameters if p["secure"]]
    named = dict(split(one, known) for one in given)
    for p in parameters:
        # Without a terminal nobody can be asked: the list of what is missing says so for all at once.
        can_ask = os.environ.get(variable(p["name"])) or sys.stdin.isatty()
        if p["secure"] and p["required"] and p["name"] not in named and can_ask:
            named[p["name"]] = None
    return {name: read(name, file) for name, file in named.items()}
