"""Ledgers that a running Turnlock wrote once replay to the same picks on today's code.

The recordings are never made again: they stand for the ledgers that installations have. A new kind of entry gets a
recording of its own beside them, as `record_ledger.py` made the second.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from routing import ledger, rotation
from routing.ledger import Audit, Check, Entry, Kind, line_of, replay
from routing.rotation import Line, Pick

HERE = Path(__file__).parent
#: Each with what it was when it was recorded.
FIRST = "every_kind"
SECOND = "capacity_and_returns"
FILES = {
    FIRST: (
        HERE / "recorded_ledger.json",
        "56e8b4b0438a1f009fa561cefbfade53b09c53ae4e61a396a7a24271de5be3bf",
    ),
    SECOND: (
        HERE.parent / "fixtures" / "ledger" / "capacity_and_returns.json",
        "ef122b0f0c9b4647bb1f3f6ecbaacde82bce3ed80e7dd90e70a7dc6eb90c0d39",
    ),
}
both = pytest.mark.parametrize("name", list(FILES))

#: Every kind that there was when the first was recorded.
KINDS = {Kind(name) for name in (
    "checkpoint", "turn", "join", "leave", "reweight", "reorder", "send_to_back", "debit", "average", "owe",
    "give_next", "withdraw", "void",
)}  # fmt: skip


@cache
def stored(name: str) -> dict[str, Any]:
    """A recording as it lies there; its bytes are those that were recorded."""
    path, digest = FILES[name]
    raw = path.read_bytes()
    assert hashlib.sha256(raw).hexdigest() == digest, f"{path.name} was changed; a recording is never made again"
    found: dict[str, Any] = json.loads(raw)
    assert "NEVER regenerate it" in found["note"]
    return found


def recording(name: str) -> tuple[list[Entry], Line]:
    """The entries, and the line that the database held after them."""
    entries = [
        Entry(
            row["seq"], Kind(row["kind"]), datetime.fromisoformat(row["at"]), row["actor"], row["reason"], row["data"]
        )
        for row in stored(name)["entries"]
    ]
    return entries, line_of(stored(name)["present"])


def audit(name: str) -> Audit:
    return replay(*recording(name))


def turns(name: str) -> list[Any]:
    return [entry.data for entry in recording(name)[0] if entry.kind is Kind.TURN]


@both
def test_a_recording_replays_to_the_same_picks_and_the_same_line(name: str) -> None:
    entries, present = recording(name)
    found = audit(name)
    assert [str(problem) for problem in found.problems] == []
    assert found.line == present
    assert (found.entries, found.turns) == (len(entries), present.position)
    assert [turn["turn"] for turn in turns(name)] == list(range(1, present.position + 1))


def test_the_first_holds_every_kind_of_entry() -> None:
    entries, _ = recording(FIRST)
    assert {entry.kind for entry in entries} == KINDS
    assert (len(entries), len(turns(FIRST))) == (279, 244)
    assert Counter(turn["how"] for turn in turns(FIRST)) == {"line": 237, "owed": 6, "give_next": 1}
    assert sum(bool(turn["lost"]) for turn in turns(FIRST)) >= 1
    assert sum(bool(turn["passed_over"]) for turn in turns(FIRST)) >= 10


def test_the_second_holds_caps_skip_policies_moves_by_hand_returns_and_settled_leads() -> None:
    entries, _ = recording(SECOND)
    kinds = Counter(entry.kind for entry in entries)
    by_hand = (Kind.OWE, Kind.DEBIT, Kind.GIVE_NEXT, Kind.SEND_TO_BACK, Kind.REORDER, Kind.REWEIGHT)
    assert all(kinds[kind] >= 5 for kind in by_hand)
    assert Counter(entry.reason for entry in entries if entry.kind is Kind.VOID) == {"returned as bogus": 12}
    assert Counter(turn["how"] for turn in turns(SECOND)) == {"line": 201, "owed": 18, "give_next": 6}
    assert sum(bool(turn["lost"]) for turn in turns(SECOND)) == 131
    assert sum(bool(turn["lose_turn"]) for turn in turns(SECOND)) == 205
    assert sum(bool(turn.get("average")) for turn in turns(SECOND)) == 75
    beside = [row["beside"] for row in stored(SECOND)["entries"] if "beside" in row]
    skips = Counter(skip for one in beside for skip in one["skips"].values())
    assert skips == {"paused": 360, "at_cap": 104, "leave": 75, "off_hours": 46, "declined": 4}
    assert sum(one["settled"] for one in beside) == 7


def test_the_first_replays_from_each_of_its_checkpoints() -> None:
    entries, present = recording(FIRST)
    starts = [number for number, entry in enumerate(entries) if entry.kind is Kind.CHECKPOINT]
    assert len(starts) == 3
    assert all(replay(entries[start:], present).ok for start in starts)


BROKEN = [
    "ties by rank alone",
    "a floor that never rises",
    "owed turns newest first",
    "nobody loses a turn",
    "away under average is kept a place",
]


@pytest.mark.parametrize(
    ("name", "broken"), [*((FIRST, broken) for broken in BROKEN[:3]), *((SECOND, broken) for broken in BROKEN)]
)
def test_code_that_means_something_else_by_past_entries_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: str
) -> None:
    pick = rotation.pick

    def picking(line: Line, available: Any, lose: Any = (), average: Any = ()) -> tuple[Pick | None, Line]:
        return pick(line, available, () if "loses" in broken else lose, () if "average" in broken else average)

    if broken == BROKEN[0]:
        monkeypatch.setattr(
            rotation, "_turn_order", lambda place: (place.tag + rotation.UNIT // place.weight, place.rank)
        )
    elif broken == BROKEN[1]:
        charge = rotation._charge
        monkeypatch.setattr(rotation, "_charge", lambda line, *rest: replace(charge(line, *rest), floor=line.floor))
    elif broken == BROKEN[2]:
        monkeypatch.setattr(rotation, "_owed_in_order", lambda line: list(reversed(line.owed)))
    else:
        monkeypatch.setattr(ledger.rotation, "pick", picking)
    found = audit(name)
    assert not found.ok
    assert found.problems[0].check in {Check.OTHER_PICK, Check.OTHER_OUTCOME, Check.REFUSED, Check.UNREADABLE}


def test_a_pick_that_was_changed_in_a_recording_would_be_noticed() -> None:
    entries, present = recording(SECOND)
    number = next(n for n, entry in enumerate(entries) if entry.kind is Kind.TURN and entry.seq > 100)
    data = dict(entries[number].data)
    other = next(one for one in (str(p.agent_id) for p in present.places) if one != data["agent"])
    entries[number] = replace(entries[number], data=data | {"agent": other})
    assert replay(entries, present).problems[0].check is Check.OTHER_PICK
