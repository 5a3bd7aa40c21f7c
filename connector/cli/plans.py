"""A plan (:func:`connector.plan.plan`) as text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from connector.cli.output import agent, say, table

_SIGNS = {"add": "+", "remove": "-", "change": "~", "move": "~"}
_LONG = 100


def tell_plan(shown: Mapping[str, Any]) -> None:
    """Print all of it."""
    say(*(f"Note: {warning}" for warning in shown["warnings"]))
    if not shown["changed"]:
        say(f"It means the same as version {shown['version']} of {shown['tenant']}; applying would change nothing.")
        return
    say(f"Applying makes version {shown['version']} of {shown['tenant']}:", "")
    say(*(f"  {_SIGNS[one['how']]} {one['path']}{_detail(one)}" for one in shown["changes"]))
    for line in shown["lines"]:
        _line(line)
    kept = "No line moves: everyone keeps their place." if not shown["lines"] else "All other lines stay as they are."
    counts = [sum(one["how"] == how for one in shown["changes"]) for how in ("add", "change", "move", "remove")]
    say("", kept, "Plan: {} to add, {} to change, {} to move, {} to remove. Nothing was applied.".format(*counts))


def _detail(one: Mapping[str, Any]) -> str:
    match one["how"]:
        case "add":
            return "" if one["after"] is None else f": {_value(one['after'])}"
        case "remove":
            return "" if one["before"] is None else f": {_value(one['before'])}"
        case "move":
            return f": moved from place {one['before']} to {one['after']} of the list"
    return f": {_value(one['before'])} -> {_value(one['after'])}"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def _line(line: Mapping[str, Any]) -> None:
    say("", f"Line of queue {line['queue']}, position {line['position']}:")
    rows = []
    for one in line["members"]:
        weight = _step(one["weight_before"], one["weight_after"])
        place = _step(one["place_before"], one["place_after"])
        dropped = f"; {one['owed_turns_dropped']} owed turn(s) lapse" if one["owed_turns_dropped"] else ""
        what = "joins at the back" if one["what"] == "joins" and line["position"] else one["what"]
        rows.append((agent(one["agent"]), what + dropped, weight, place))
    table(("member", "", "weight", "place if all were available"), rows, indent=2)


def _step(before: int | None, after: int | None) -> str:
    if before is None or after is None or before == after:
        return str(after if before is None else before)
    return f"{before} -> {after}"
