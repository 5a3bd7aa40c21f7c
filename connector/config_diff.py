"""What would change between two configurations: each difference by its path, rules and members by their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

from connector import config as yaml_config
from connector.config_model import Config, KnownAgent


class How(StrEnum):
    """What happens to the thing at a path."""

    ADD = "add"
    REMOVE = "remove"
    CHANGE = "change"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. ``path`` names the thing (``queues.Luxury.members.ana@example.com.weight``).

    For a move ``before`` and ``after`` are places, from 1.
    """

    how: How
    path: str
    before: Any = None
    after: Any = None


def changes(before: Config | None, after: Config, agents: Sequence[KnownAgent]) -> list[Change]:
    """Every difference, in the order of the file. `before` None: there was no configuration."""
    old = {} if before is None else _plain(before, agents)
    return list(_mappings("", old, _plain(after, agents)))


def _plain(config: Config, agents: Sequence[KnownAgent]) -> dict[str, Any]:
    # By way of the export, so that whatever a configuration can say is compared, by the words of the admin.
    found: dict[str, Any] = yaml.safe_load(yaml_config.export(config, agents))
    return {key: value for key, value in found.items() if key != "version"}


def _step(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _mappings(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for name in dict.fromkeys([*old, *new]):
        yield from _values(_step(path, name), str(name), old.get(name), new.get(name), name in old, name in new)


def _values(path: str, name: str, old: Any, new: Any, was: bool, is_: bool) -> Iterator[Change]:
    if was and is_ and old == new and type(old) is type(new):
        return
    if name in ("rules", "members", "agents") and isinstance(old or [], list) and isinstance(new or [], list):
        yield from _named(path, name, old or [], new or [])
    elif isinstance(old, dict) and isinstance(new, dict) and "field" not in old:
        yield from _mappings(path, old, new)
    elif name in ("queues", "agents", "teams") and isinstance(old or {}, dict) and isinstance(new or {}, dict):
        yield from _mappings(path, old or {}, new or {})
    elif not was:
        yield Change(How.ADD, path, after=new)
    elif not is_:
        yield Change(How.REMOVE, path, before=old)
    else:
        yield Change(How.CHANGE, path, old, new)


def _keyed(name: str, entries: Sequence[Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for entry in entries:
        value = dict(entry) if isinstance(entry, dict) else {"agent": entry}
        if name != "rules" and "team" in value:
            found[f"team {value.pop('team')}"] = value
        else:
            found[str(value.pop("name" if name == "rules" else "agent"))] = value
    return found


def _named(path: str, name: str, old: Sequence[Any], new: Sequence[Any]) -> Iterator[Change]:
    """Entries of a list that have names: added, removed, changed within, and moved among those that stay."""
    was, is_ = _keyed(name, old), _keyed(name, new)
    for one in was:
        if one not in is_:
            yield Change(How.REMOVE, _step(path, one), before=was[one] or None)
    both_before, both_after = [one for one in was if one in is_], [one for one in is_ if one in was]
    kept = set()
    for block in difflib.SequenceMatcher(None, both_before, both_after, autojunk=False).get_matching_blocks():
        kept.update(both_after[block.b : block.b + block.size])
    places = {one: at for at, one in enumerate(was, 1)}
    for at, one in enumerate(is_, 1):
        if one not in was:
            yield Change(How.ADD, _step(path, one), after=is_[one] or None)
            continue
        yield from _mappings(_step(path, one), was[one], is_[one])
        if one not in kept:
            yield Change(How.MOVE, _step(path, one), places[one], at)
