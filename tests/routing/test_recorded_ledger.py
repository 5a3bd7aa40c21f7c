"""A ledger that a running Turnlock wrote once replays to the same picks on today's code.

`recorded_ledger.json` is never made again: it stands for the ledgers that installations have. A new kind of entry gets
a recording of its own beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from routing import rotation
from routing.ledger import Audit, Check, Entry, Kind, line_of, replay
from routing.rotation import Line

#: Every kind that there was when it was recorded, and how turns were won.
KINDS = {Kind(name) for name in (
    "checkpoint", "turn", "join", "leave", "reweight", "reorder", "send_to_back", "debit", "average", "owe",
    "give_next", "withdraw", "void",
)}  # fmt: skip


def recording() -> tuple[list[Entry], Line]:
    """The entries, and the line that the database held after them."""
    stored: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_ledger.json").read_text("utf-8"))
    assert "NEVER regenerate it" in stored["note"]
    entries = [
        Entry(
            row["seq"], Kind(row["kind"]), datetime.fromisoformat(row["at"]), row["actor"], row["reason"], row["data"]
        )
        for row in stored["entries"]
    ]
    return entries, line_of(stored["present"])


def audit() -> Audit:
    return replay(*recording())


def test_the_recording_replays_to_the_same_picks_and_the_same_line() -> None:
    entries, present = recording()
    found = audit()
    assert [str(problem) for problem in found.problems] == []
    assert found.line == present
    assert (found.entries, found.turns) == (279, 244)
    assert {entry.kind for entry in entries} == KINDS
    turns = [entry.data for entry in entries if entry.kind is Kind.TURN]
    assert [turn["turn"] for turn in turns] == list(range(1, 245))
    assert Counter(turn["how"] for turn in turns) == {"line": 237, "owed": 6, "give_next": 1}
    assert sum(bool(turn["lost"]) for turn in turns) >= 1
    assert sum(bool(turn["passed_over"]) for turn in turns) >= 10


def test_it_replays_from_each_of_its_checkpoints() -> None:
    entries, present = recording()
    starts = [number for number, entry in enumerate(entries) if entry.kind is Kind.CHECKPOINT]
    assert len(starts) == 3
    assert all(replay(entries[start:], present).ok for start in starts)


@pytest.mark.parametrize("broken", ["ties by rank alone", "a floor that never rises", "owed turns newest first"])
def test_code_that_means_something_else_by_past_entries_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken == "ties by rank alone":
        monkeypatch.setattr(
            rotation, "_turn_order", lambda place: (place.tag + rotation.UNIT // place.weight, place.rank)
        )
    elif broken == "a floor that never rises":
        charge = rotation._charge
        monkeypatch.setattr(rotation, "_charge", lambda line, *rest: replace(charge(line, *rest), floor=line.floor))
    else:
        monkeypatch.setattr(rotation, "_owed_in_order", lambda line: list(reversed(line.owed)))
    found = audit()
    assert not found.ok
    assert found.problems[0].check in {Check.OTHER_PICK, Check.OTHER_OUTCOME, Check.REFUSED, Check.UNREADABLE}
