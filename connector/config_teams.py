"""Members of queues, teams and rules as a configuration names them: agents and teams, read and checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any
from uuid import UUID

from adapters.base import Capability
from connector.config_lines import ranks_agents, rule_line, team_line
from connector.config_model import KnownTeam, Member, Members, QueueConfig, RuleConfig, TeamConfig, TeamMember
from connector.schema_words import Path, one_of

if TYPE_CHECKING:
    from connector.config_build import Builder

#: So many teams one within the other at most: with the queue's own, one line more is locked together.
MAX_DEPTH = 3


def find_team(text: str, known: Iterable[KnownTeam]) -> list[KnownTeam]:
    """The CRM's teams that `text` may mean, by id, else by name; one when it is clear. One that is gone counts last."""
    said = text.strip().casefold()
    known = list(known)
    found = [team for team in known if team.ref == text] or [team for team in known if team.name.casefold() == said]
    return [team for team in found if not team.gone] or found


class TeamReader:
    """Reads members and teams for a :class:`connector.config_build.Builder`, which takes the problems."""

    def __init__(self, builder: Builder, raw: Mapping[str, Any], known: Collection[KnownTeam] | None) -> None:
        """`known` are the CRM's teams; None: whether the CRM has a team is not asked."""
        self._builder = builder
        self._raw = raw
        self._known = known

    def members(self, path: Path, raw: object) -> Members:
        """The members in a list. Each agent and each team may stand in it once."""
        agents: dict[UUID, Member] = {}
        found: list[Member | TeamMember] = []
        teams: set[str] = set()
        for at, entry in enumerate(raw if isinstance(raw, list) else []):
            here: Path = (*path, at)
            given = entry if isinstance(entry, dict) else {"agent": entry}
            weight = _whole(given.get("weight"))
            if isinstance(entry, dict) and ("agent" in given) == ("team" in given):
                self._builder.problem(here, "must name an agent or a team, and not both", "write agent or team")
                continue
            if "team" in given:
                one = TeamMember(str(given["team"]), weight, given.get("nested") is True)
                self._team((*here, "team"), given["team"])
                if one.team in teams:
                    self._builder.problem((*here, "team"), "is named twice in this list", "keep one entry")
                teams.add(one.team)
                found.append(one)
                continue
            if "nested" in given:
                self._builder.problem((*here, "nested"), "only a team can be nested", "remove it")
            agent_id = self._builder.receiver((*here, "agent") if isinstance(entry, dict) else here, given["agent"])
            if agent_id is None:
                continue
            if agent_id in agents:
                where = (*here, "agent") if isinstance(entry, dict) else here
                fix = "keep one entry; give it a weight if they are to get more"
                self._builder.problem(where, "is a member of this queue already", fix)
                continue
            agents[agent_id] = Member(agent_id, 1 if weight is None else weight)
            found.append(agents[agent_id])
        return tuple(found)

    def target(self, path: Path, text: object) -> str | None:
        """A team that a rule sends leads to."""
        self._team(path, text)
        return text if isinstance(text, str) and text else None

    def _team(self, path: Path, text: object) -> None:
        if isinstance(text, str) and text and text not in self._raw:
            fix = self._builder.hint(text, self._raw, one_of(self._raw) + "; teams stand under `teams`")
            self._builder.problem(path, f'there is no team "{text[:100]}"', fix)

    def teams(self) -> tuple[TeamConfig, ...]:
        """All teams, in order of name."""
        found = [self._one(name, raw if isinstance(raw, dict) else {}) for name, raw in self._raw.items()]
        return tuple(sorted(found, key=lambda team: team.name))

    def _one(self, name: str, raw: Mapping[str, Any]) -> TeamConfig:
        text = raw.get("from_crm")
        if isinstance(text, str) and text:
            self._of_crm(("teams", name, "from_crm"), text)
            return TeamConfig(name, text)
        return TeamConfig(name, None, self.members(("teams", name, "members"), raw.get("members")))

    def _of_crm(self, path: Path, text: str) -> None:
        problem, known = self._builder.problem, self._known
        if Capability.TEAMS not in self._builder.capabilities:
            problem(path, "this CRM has no teams that Turnlock can read", "write the team's members by hand")
        elif known is not None:
            found = find_team(text, known)
            if len(found) > 1:
                ids = ", ".join(sorted(team.ref for team in found))
                problem(path, f'"{text[:100]}" may be any of {len(found)} teams', f"use the CRM id: {ids}")
            elif not found:
                names = [team.name for team in known]
                other = one_of(names) + "; `turnlock agents sync` reads the CRM's teams"
                problem(path, f'the CRM has no team "{text[:100]}"', self._builder.hint(text, names, other))

    def check(self, teams: tuple[TeamConfig, ...], queues: Iterable[QueueConfig], rules: Iterable[RuleConfig]) -> None:
        """Whatever can only be seen of all of them: circles, depth, and names of lines that clash."""
        graph = {team.name: _held(team.members) & self._raw.keys() for team in teams}
        depth: dict[str, int] = {}
        for name in self._in_order(graph):
            depth[name] = 1 + max((depth.get(held, 0) for held in graph[name]), default=0)
        lists: list[tuple[Path, Members]] = [(("queues", queue.name, "members"), queue.members) for queue in queues]
        for at, rule in enumerate(rules):
            for step, target in enumerate(rule.targets):
                lists.append((("rules", at, *(("to",) if step == 0 else ("else", step - 1))), target.agents))
        for path, members in lists:
            deepest = max((depth.get(held, 0) for held in _held(members)), default=0)
            if deepest > MAX_DEPTH:
                what = f"has {deepest} teams one within the other"
                self._builder.problem(path, what, f"join some of them, so that there are {MAX_DEPTH} at most")
        self._names(teams, rules)

    def _in_order(self, graph: dict[str, set[str]]) -> list[str]:
        """The teams, each after those that it holds; what is left of them once every circle is told and cut."""
        while True:
            try:
                return list(TopologicalSorter(graph).static_order())
            except CycleError as error:
                circle = error.args[1][::-1]  # each holds the next
                first = min(range(len(circle) - 1), key=lambda at: list(graph).index(circle[at]))
                way = [*circle[first:-1], *circle[: first + 1]]
                fix = "take one of them out of the other"
                what = f"teams hold each other in a circle: {' -> '.join(way)}"
                self._builder.problem(("teams", way[0]), what, fix, of_key=True)
                graph[way[0]] = graph[way[0]] - {way[1]}

    def _names(self, teams: Iterable[TeamConfig], rules: Iterable[RuleConfig]) -> None:
        """A line of a team or rule goes by its name, so no queue may be called the same."""
        queues = {name.casefold(): name for name in self._builder.queues}
        for path, line in (
            *((("teams", team.name), team_line(team.name)) for team in teams),
            *((("rules", at, "name"), rule_line(rule.name)) for at, rule in enumerate(rules) if ranks_agents(rule)),
        ):
            clash = queues.get(line.casefold())
            if clash is not None:
                what = f'its line is called "{line}", and so is a queue'
                self._builder.problem(path, what, "give the queue another name", of_key=path[0] == "teams")


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _held(members: Members) -> set[str]:
    """The teams in a list of members."""
    return {one.team for one in members if isinstance(one, TeamMember)}
