"""The lines that a configuration makes: of its queues, of teams that take turns as one, and of rules that rank agents.

A line's members are given as entries: an agent or a line with its weight, or a team of the CRM of which everybody is a
member. Entries are stored where such a team is among them, so that the line can follow it without the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from connector.config_model import (
    Config,
    ConfigTarget,
    Member,
    Members,
    QueueConfig,
    RuleConfig,
    TeamMember,
)
from connector.errors import TurnlockError
from routing.model import TargetKind


@dataclass(frozen=True, slots=True)
class Entry:
    """One of `agent_id`, `line` (its name) and `crm` (the CRM's team as the configuration names it).

    ``by_hand``: named in the line's own list, which wins over what comes with a team.
    """

    weight: int | None
    agent_id: UUID | None = None
    line: str | None = None
    crm: str | None = None
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class LineConfig:
    """A line by its name, with what a queue says besides its members; None for the line of a team or rule."""

    name: str
    entries: tuple[Entry, ...]
    queue: QueueConfig | None = None


def team_line(team: str) -> str:
    """What the line of a team is called."""
    return f"team {team}"


def team_of(line: str) -> str:
    """The team whose line is called so."""
    return line.removeprefix("team ")


def rule_line(rule: str) -> str:
    """What the line of a rule is called."""
    return f"rule {rule}"


def ranks_agents(rule: RuleConfig) -> bool:
    """Whether a rule has a line of its own."""
    return any(target.agents for target in rule.targets)


def target_line(rule: RuleConfig, target: ConfigTarget) -> str | None:
    """The name of the line that a rule's target leads to; None when it is no line."""
    if target.kind is not TargetKind.QUEUE:
        return None
    if target.agents:
        return rule_line(rule.name)
    return target.queue if target.team is None else team_line(target.team)


def lines_of(config: Config) -> dict[str, LineConfig]:
    """Every line by name. A team has one where it is nested somewhere or a rule sends leads to it."""
    flat = _Flat(config)
    found = {queue.name: LineConfig(queue.name, flat.of(queue.members), queue) for queue in config.queues}
    named: list[str] = []
    for rule in config.rules:
        for target in rule.targets:
            if target.agents:
                name = rule_line(rule.name)
                found[name] = LineConfig(name, flat.of(target.agents))
            elif target.team is not None:
                named.append(target.team)
    todo = [*named, *(one for line in found.values() for one in _nested(line))]
    while todo:
        team = todo.pop()
        name = team_line(team)
        if name not in found:
            found[name] = LineConfig(name, flat.of_team(team))
            todo += _nested(found[name])
    return found


def with_members(config: Config, line: str, change: Callable[[Members], Members]) -> Config | None:
    """`config` with other members in the line of this name; None when it has no such line.

    Raises :class:`TurnlockError` for the line of a team that follows the CRM, and for a team or a rule left empty.
    """
    for queue in config.queues:
        if queue.name == line:
            new = replace(queue, members=change(queue.members))
            return replace(config, queues=tuple(new if one is queue else one for one in config.queues))
    for team in config.teams:
        if team_line(team.name) == line:
            if team.from_crm is not None:
                raise TurnlockError(f"{line!r} has the members of the CRM's team {team.from_crm!r}; change them there")
            changed = replace(team, members=_some(line, change(team.members)))
            return replace(config, teams=tuple(changed if one is team else one for one in config.teams))
    for rule in config.rules:
        if rule_line(rule.name) == line and ranks_agents(rule):
            other = replace(
                rule,
                targets=tuple(
                    replace(one, agents=_some(line, change(one.agents))) if one.agents else one for one in rule.targets
                ),
            )
            return replace(config, rules=tuple(other if one is rule else one for one in config.rules))
    return None


def _some(line: str, members: Members) -> Members:
    if not members:
        raise TurnlockError(f"{line!r} would have no member left; take it out of the configuration instead")
    return members


def _nested(line: LineConfig) -> Iterator[str]:
    return (team_of(entry.line) for entry in line.entries if entry.line is not None)


class _Flat:
    """Who is in lists of members, teams taken apart where they are not nested. Each team is taken apart once."""

    def __init__(self, config: Config) -> None:
        self._teams = {team.name: team for team in config.teams}
        self._done: dict[str, tuple[Entry, ...]] = {}

    def of_team(self, name: str) -> tuple[Entry, ...]:
        """Everybody of a team."""
        if name not in self._done:
            team = self._teams[name]
            crm = (Entry(None, crm=team.from_crm),)
            self._done[name] = self.of(team.members) if team.from_crm is None else crm
        return self._done[name]

    def of(self, members: Members) -> tuple[Entry, ...]:
        """Each member once: where they are named first, as they are named by hand, else as the first team has them."""
        found: dict[tuple[UUID | None, str | None, str | None], Entry] = {}
        for one in members:
            if isinstance(one, Member):
                some = [Entry(one.weight, agent_id=one.agent_id, by_hand=True)]
            elif one.nested:
                some = [Entry(1 if one.weight is None else one.weight, line=team_line(one.team), by_hand=True)]
            else:
                some = [
                    replace(entry, weight=entry.weight if one.weight is None else one.weight, by_hand=False)
                    for entry in self.of_team(one.team)
                ]
            for entry in some:
                key = (entry.agent_id, entry.line, entry.crm)
                if entry.by_hand or key not in found:
                    found[key] = entry
        return tuple(found.values())


def team_notes(config: Config, lines: Mapping[str, LineConfig]) -> Iterator[tuple[str, str]]:
    """What is likely a slip about teams and rules that rank agents: where, and what with what to do."""
    lists = [queue.members for queue in config.queues]
    lists += [team.members for team in config.teams]
    lists += [target.agents for rule in config.rules for target in rule.targets]
    used: set[str | None] = {one.team for members in lists for one in members if isinstance(one, TeamMember)}
    used |= {target.team for rule in config.rules for target in rule.targets}
    for team in config.teams:
        if team.name not in used:
            yield f'team "{team.name}"', "nothing uses it; name it in a queue or a rule, or remove it"
    flat = _Flat(config)
    for line in lines.values():
        members = line.queue.members if line.queue is not None else ()
        alone = {one.agent_id for one in members if isinstance(one, Member)}
        whole = flat.of(tuple(one for one in members if isinstance(one, TeamMember)))
        twice = len(alone & {entry.agent_id for entry in whole})
        where = f'queue "{line.name}"' if line.queue is not None else line.name
        if twice:
            text = "named in it also come(s) with a team; each is a member once, with the weight written beside them"
            yield where, f"{twice} agent(s) {text}"
        if line.queue is None and all(entry.weight == 0 for entry in line.entries):
            yield where, "has no members who take turns; give somebody a weight above 0"


# -- entries as they are stored, and who they are ---------------------------------------------------------------------


Kept = Mapping[str, Any]
"""An entry as it is stored."""


def stored_entries(
    entries: Sequence[Entry], line_ids: Mapping[str, UUID], refs: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Entries as JSON: members by Turnlock's ids, teams of the CRM by the CRM's (`refs`) and as they are named."""

    def one(entry: Entry) -> dict[str, Any]:
        if entry.crm is not None:
            return {"team": refs(entry.crm), "named": entry.crm, "weight": entry.weight}
        member = entry.agent_id if entry.line is None else line_ids[entry.line]
        return {"member": str(member), "weight": entry.weight, "by_hand": entry.by_hand}

    return [one(entry) for entry in entries]


def follows(kept: Sequence[Kept]) -> bool:
    """Whether a team of the CRM is among stored entries."""
    return any("team" in entry for entry in kept)


def members_of(kept: Sequence[Kept], agents_in: Callable[[Kept], Sequence[UUID]]) -> dict[UUID, int]:
    """The members of a line and their weights, in order of rank, from stored entries.

    Whoever is named more than once is a member once, where they come first, with the weight written beside them by
    hand, else with that of the first team. `agents_in` tells who is in the CRM's team of an entry.
    """
    found: dict[UUID, int] = {}
    for entry in kept:
        if "team" in entry:
            for agent_id in agents_in(entry):
                found.setdefault(agent_id, 1 if entry["weight"] is None else entry["weight"])
        else:
            found.setdefault(UUID(entry["member"]), entry["weight"])
    return found | {UUID(entry["member"]): entry["weight"] for entry in kept if entry.get("by_hand")}
