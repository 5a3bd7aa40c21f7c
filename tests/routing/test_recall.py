"""A line recalled from its ledger is the line that was, and its order is that in which it is served."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from routing import rotation
from routing.ledger import Kind
from routing.recall import recall
from tests.routing.line_model import Script, steps
from tests.routing.test_ledger import Recorder, a_ledger, over_records
from tests.routing.test_rotation_properties import ALL, given, some_weights
from tests.routing.test_rotation_properties import play as played


def stored(book: Recorder) -> list[tuple[str, dict[str, Any]]]:
    """The entries as they are read for showing: a turn without the set that is not looked at."""
    rows = []
    for entry in book.entries:
        data = copy.deepcopy(dict(entry.data))
        data.pop("passed_over", None)
        rows.append((entry.kind.value, data))
    return rows


@over_records(60)
def test_a_line_is_recalled_as_it_was(book: Recorder, random: Any) -> None:
    rows = stored(book)
    assert recall(rows) == book.line
    half = len(rows) // 2 or 1
    assert recall(rows[half:], recall(rows[:half])) == book.line


def test_every_kind_is_recalled() -> None:
    book = a_ledger()
    rows = stored(book)
    assert {kind for kind, _ in rows} == {kind.value for kind in Kind}
    assert recall(rows) == book.line
    assert recall([]) is None
    with pytest.raises(ValueError, match="from a checkpoint on"):
        recall(rows[1:])


def test_a_turn_that_was_recorded_otherwise_is_recalled_otherwise() -> None:
    book = a_ledger()
    rows = stored(book)
    last = max(number for number, (kind, data) in enumerate(rows) if kind == "turn" and data["how"] == "line")
    rows[last][1]["tag"] = str(int(rows[last][1]["tag"]) + 1)
    assert recall(rows) != book.line


@given(some_weights(9), steps(*ALL, size=15))
def test_the_first_in_the_lineup_who_is_available_is_picked(weights: tuple[int, ...], raw: Any) -> None:
    for action, before, picked, _ in played(rotation, Script(weights), raw):
        if action.op != "lead" or picked is None:
            continue
        order = rotation.lineup(before, action.agents)
        assert set(order) == {place.agent_id for place in before.places}
        assert next(who for who in order if who in action.agents) == picked.agent_id
        assert [who for who in order[: order.index(picked.agent_id)] if who not in action.agents] == list(
            picked.passed_over
        )
