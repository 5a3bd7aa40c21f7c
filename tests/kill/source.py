"""Copies of today's source: processes are started again for minutes, and all of them must run the same code."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
_PARTS = ("routing", "adapters", "connector", "migrations")


@dataclass(frozen=True)
class Patch:
    """Replace a text that stands exactly once in a file."""

    file: str
    old: str
    new: str


def copy_source(to: Path, patches: Sequence[Patch] = ()) -> Path:
    """Copy what is installed to `to`, patched. A patch that does not fit any more is an error: it proves nothing."""
    for part in _PARTS:
        shutil.copytree(SOURCE / part, to / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("manifest.json", "pyproject.toml"):
        shutil.copy(SOURCE / file, to / file)
    for patch in patches:
        path = to / patch.file
        text = path.read_text("utf-8")
        assert text.count(patch.old) == 1, f"{text.count(patch.old)} times in {patch.file}, not once:\n{patch.old}"
        path.write_text(text.replace(patch.old, patch.new), "utf-8")
    return to
