"""From the tree of a configuration to its values: names become agents, and all that is wrong is collected."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, TypeVar
from uuid import UUID
from zoneinfo import available_timezones

from phonenumbers import SUPPORTED_REGIONS

from adapters.base import Capability
from connector.config_model import (
    CLOSED_STAGES,
    RETURNS_PER_DAY,
    AgentFacts,
    Config,
    ConfigTarget,
    KnownAgent,
    KnownTeam,
    NobodyPolicy,
    QueueConfig,
    Released,
    RuleConfig,
)
from connector.config_teams import TeamReader
from connector.config_yaml import ConfigProblem, Node, place, read, typed
from connector.schema_words import Path, faults, nearest, one_of, show
from connector.wording import LANGUAGES, OF_A_TASK, PLACEHOLDERS, Wording, wording_of, wrong_in
from routing.absence import parse_holidays, parse_leave
from routing.clocks import known_zone
from routing.conditions import compile_condition, in_zone
from routing.fields import TEXTS, ConditionProblems, ConfigurationProblems, field_kind, normal_text
from routing.model import Caps, Quiet, Role, Rule, TargetKind, UnassignedDefinition, WhenNobody
from routing.settle import SettleTimes
from routing.skips import parse_hours
from routing.stored import policies

_P = TypeVar("_P")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_MAX_HINTS = 20
CAPS = ("hour", "day", "week", "open")
_DEFAULT = ("settle", "default")
_zones = cache(available_timezones)


class Directory:
    """Finds the agent that a text names: by CRM id, else by email, else by name; both without regard to case."""

    def __init__(self, known: Iterable[KnownAgent]) -> None:
        self.by_id: dict[UUID, KnownAgent] = {}
        self._by_ref: dict[str, KnownAgent] = {}
        self._by_word: tuple[dict[str, list[KnownAgent]], dict[str, list[KnownAgent]]] = ({}, {})
        for agent in known:
            self.by_id[agent.agent_id] = agent
            self._by_ref[agent.ref] = agent
            for words, word in zip(self._by_word, (agent.email, agent.name), strict=True):
                if word and word.strip():
                    words.setdefault(word.strip().casefold(), []).append(agent)

    def find(self, text: str) -> list[KnownAgent]:
        """The agents that `text` may mean: one when it is clear, none when it is unknown."""
        if text in self._by_ref:
            return [self._by_ref[text]]
        word = text.strip().casefold()
        return next((words[word] for words in self._by_word if word in words), [])

    @cached_property
    def words(self) -> list[str]:
        """What a configuration would best call each agent."""
        return [self.word(agent_id) for agent_id in self.by_id]

    def word(self, agent_id: UUID) -> str:
        """The email of an agent when it names nobody else, otherwise the CRM id. Raises LookupError if unknown."""
        agent = self.by_id.get(agent_id)
        if agent is None:
            raise LookupError(f"no known agent {agent_id}; sync the agents first")
        return agent.email if agent.email and self.find(agent.email) == [agent] else agent.ref


def _is_typed(path: Path, key: str, siblings: Mapping[str, Node]) -> bool:
    """Whether the value under `key` may be a number or a switch. Everywhere else NO, 01234 and 09:00 are text."""
    if path == ():
        return key == "version"
    if path[0] == "rules" and path[2:3] == ("when",):
        if key in ("exists", "is_missing") or path[-1] == "within_radius":
            return True
        kind = field_kind(siblings["field"].text or "") if "field" in siblings else None
        return kind is not None and kind.slots != (TEXTS,) and key not in ("field", "zone", "contains", "starts_with")
    if path[0] == "agents" and path[2:] == ("caps",):
        return key in CAPS
    return (
        key in ("unclaimed", "weight", "nested", "per_day", "within_minutes")
        or path == ("settle", "sources")
        or (*path, key) == _DEFAULT
    )


def _plain(node: Node, path: Path, as_typed: bool = False) -> Any:
    if node.items is not None:
        return {k: _plain(v, (*path, k), _is_typed(path, k, node.items)) for k, v in node.items.items()}
    if node.entries is not None:
        return [_plain(entry, (*path, at), as_typed) for at, entry in enumerate(node.entries)]
    if node.is_null:
        return None
    return typed(node) if as_typed else node.text


def _items(value: object) -> dict[str, Any]:
    """`value` if it is a mapping; what has the wrong shape is reported by the schema and passed over here."""
    return value if isinstance(value, dict) else {}


def _entries(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(value: object, default: int) -> int:
    return value if type(value) is int else default


class Builder:
    """Builds one configuration. ``problems`` grows as it goes; :meth:`build` is of use only if it stays empty."""

    def __init__(
        self,
        root: Node,
        known: Iterable[KnownAgent],
        capabilities: frozenset[str],
        known_teams: Collection[KnownTeam] | None = None,
    ) -> None:
        self.root = root
        self.directory = Directory(known)
        self.capabilities = capabilities
        self.problems: list[ConfigProblem] = []
        self.value = _plain(root, ())
        self.raw = _items(self.value)
        self.queues = _items(self.raw.get("queues"))
        self.house: set[str] = set()
        self.hints = _MAX_HINTS
        self.team_reader = TeamReader(self, _items(self.raw.get("teams")), known_teams)

    def problem(self, path: Path, what: str, fix: str, *, of_key: bool = False) -> None:
        """Note that something at `path` is wrong, with its fix; `of_key` points to the key instead of its value."""
        line, column = place(self.root, path, of_key=of_key)
        self.problems.append(ConfigProblem(line, column, show(path), what, fix))

    def hint(self, word: str, known: Collection[str], other: str, cutoff: float = 0.6) -> str:
        """What `word` was likely meant to be, else `other`. After many hints always that: each takes its time."""
        self.hints -= 1
        return (nearest(word, known, cutoff) if self.hints >= 0 else "") or other

    def build(self) -> Config:
        """The configuration, as far as it can be read."""
        for fault in faults("config.schema.json", self.value):
            self.problem(fault.path, fault.what, fault.fix, of_key=fault.of_key)
        self.zone = self._zone(("zone",), self.raw.get("zone"))
        unassigned = self._unassigned(_items(self.raw.get("unassigned")))
        agents = dict(self._agents(_items(self.raw.get("agents"))))
        self._twins([(("queues", name), name) for name in self.queues], "queue")
        self._twins([(("teams", name), name) for name in _items(self.raw.get("teams"))], "team")
        teams = self.team_reader.teams()
        queues = [self._queue(name, _items(raw)) for name, raw in self.queues.items()]
        self._circles()
        rules = [self._rule(at, _items(raw)) for at, raw in enumerate(_entries(self.raw.get("rules")))]
        self._twins([(("rules", at, "name"), rule.name) for at, rule in enumerate(rules)], "rule")
        self.team_reader.check(teams, queues, rules)
        released = self.raw.get("released")
        closed = self.raw.get("closed_stages")
        stages = {text.lower(): text for text in _entries(closed) if isinstance(text, str)}
        return Config(
            unassigned=unassigned,
            zone=self.zone,
            country=self._country(self.raw.get("country")),
            default_queue=self._queue_name(("default_queue",), self.raw.get("default_queue")),
            released=Released.LEAVE if released == "leave" else Released.ROUTE_AGAIN,
            caps_zone=self._zone(("caps_zone",), self.raw.get("caps_zone")),
            closed_stages=CLOSED_STAGES if closed is None else tuple(stages[low] for low in sorted(stages)),
            returns_per_day=_whole(_items(self.raw.get("returns")).get("per_day"), RETURNS_PER_DAY),
            settle=self._settle(_items(self.raw.get("settle"))),
            wording=self._wording(_items(self.raw.get("note")), _items(self.raw.get("task"))),
            agents=MappingProxyType(agents),
            teams=teams,
            queues=tuple(sorted(queues, key=lambda queue: queue.name)),
            rules=tuple(rules),
        )

    def _adopt(self, above: Path, error: ConfigurationProblems) -> None:
        """Take over the problems of routing, whose paths begin below `above`."""
        for problem in error.problems:
            steps = (int(index) if index else key for key, index in _STEP.findall(problem.where))
            self.problem((*above, *steps), problem.what, problem.fix)

    # -- names --------------------------------------------------------------------------------------------
    def _agent(self, path: Path, text: object, *, of_key: bool = False) -> KnownAgent | None:
        if not isinstance(text, str) or not text:
            return None
        found = self.directory.find(text)
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(sorted(agent.ref for agent in found))
            self.problem(path, f'"{text}" may be any of {len(found)} agents', f"use the CRM id: {ids}", of_key=of_key)
        else:
            fix = self.hint(text, self.directory.words, "name an agent of the CRM by id or email", 0.85)
            self.problem(path, f'no agent "{text[:100]}" is known', fix, of_key=of_key)
        return None

    def receiver(self, path: Path, text: object, *, owns: bool = True) -> UUID | None:
        """An agent who is to receive leads. Whoever owns them must not be one whose leads count as unassigned."""
        agent = self._agent(path, text)
        if owns and agent is not None and agent.ref in self.house:
            what = f'"{text}" is also a house user (unassigned.users), so their leads would be routed again and again'
            self.problem(path, what, "remove them here or there")
        return agent.agent_id if agent else None

    def _queue_name(self, path: Path, text: object) -> str | None:
        if not isinstance(text, str) or not text:
            return None
        if text not in self.queues:
            self.problem(path, f'there is no queue "{text[:100]}"', self.hint(text, self.queues, one_of(self.queues)))
        return text

    def _twins(self, names: list[tuple[Path, str]], noun: str) -> None:
        first: dict[str, Path] = {}
        for path, name in names:
            before = first.setdefault(name.casefold(), path)
            if name and before is not path:
                line = place(self.root, before, of_key=True)[0]
                what = f"the {noun} on line {line} has this name too (case does not count)"
                self.problem(path, what, f"give each {noun} a name of its own", of_key=True)

    # -- sections -----------------------------------------------------------------------------------------
    def _unassigned(self, raw: dict[str, Any]) -> UnassignedDefinition:
        for at, text in enumerate(_entries(raw.get("users"))):
            if not isinstance(text, str):
                continue
            path = ("unassigned", "users", at)
            # An id may be of a user who can never be an agent, so only what is no id must be known.
            known = self._agent(path, text) if "@" in text or " " in text or self.directory.find(text) else None
            self.house.add(known.ref if known else text)
        ponds = frozenset(p for p in _entries(raw.get("ponds")) if isinstance(p, str))
        return UnassignedDefinition(frozenset(self.house), ponds, raw.get("unclaimed") is True)

    def _settle(self, raw: dict[str, Any]) -> SettleTimes:
        sources = {name: _whole(seconds, 0) for name, seconds in _items(raw.get("sources")).items()}
        first: dict[str, str] = {}
        for name in sources:
            before = first.setdefault(normal_text(name), name)
            if before != name:
                what = f'means the same source as "{before[:100]}" (case and accents do not count)'
                self.problem(("settle", "sources", name), what, "keep one of the two", of_key=True)
        return SettleTimes(_whole(raw.get("default"), 0), MappingProxyType(sources))

    def _wording(self, note: dict[str, Any], task: dict[str, Any]) -> Wording:
        if task and Capability.TASKS not in self.capabilities:
            self.problem(("task",), "this CRM has no tasks that Turnlock can make", "remove it", of_key=True)
        places = (("note", "subject", note), ("note", "text", note), ("task", "text", task))
        for above, key, given in places:
            known = PLACEHOLDERS + (OF_A_TASK if above == "task" else ())
            if isinstance(template := given.get(key), str):
                for what, name, fix in wrong_in(template, known):
                    self.problem((above, key), what, self.hint(name, known, fix) if name else fix)
        said = {"language": self.raw.get("language", "en"), "note": note, "task": task}
        return wording_of(said) if said["language"] in LANGUAGES else Wording()

    def _agents(self, raw: dict[str, Any]) -> Iterator[tuple[UUID, AgentFacts]]:
        seen: dict[UUID, str] = {}
        for key, value in raw.items():
            path = ("agents", key)
            agent, facts = self._agent(path, key, of_key=True), _items(value)
            zone = self._zone((*path, "zone"), facts.get("zone"))
            timetable = self._part((*path, "hours"), facts.get("hours"), dict, parse_hours)
            leave = self._part((*path, "leave"), facts.get("leave"), list, parse_leave)
            holidays = self._part((*path, "holidays"), facts.get("holidays"), (dict, list), parse_holidays)
            limits = {k: v for k, v in _items(facts.get("caps")).items() if k in CAPS and type(v) is int}
            if agent is None:
                continue
            if agent.agent_id in seen:
                what = f'is the same agent as "{seen[agent.agent_id]}"'
                self.problem(path, what, "join the two entries", of_key=True)
            seen.setdefault(agent.agent_id, key)
            hour, day, week, held = map(limits.get, CAPS)
            caps = Caps(hour, day, week, held) if limits else None
            yield agent.agent_id, AgentFacts(zone, timetable, leave or (), holidays, caps)

    def _country(self, country: object) -> str | None:
        if isinstance(country, str) and country not in SUPPORTED_REGIONS:
            fix = "write the two letters of ISO 3166 such as US or CA"
            self.problem(("country",), f'no country "{country[:100]}" is known', fix)
        return country if isinstance(country, str) else None

    def _zone(self, path: Path, zone: object) -> str | None:
        if isinstance(zone, str) and not known_zone(zone):
            fix = self.hint(zone, _zones(), "write an IANA time zone such as America/Chicago")
            self.problem(path, f'no time zone "{zone[:100]}" is known', fix)
            return None
        return zone if isinstance(zone, str) else None

    def _part(self, path: Path, raw: object, shape: type | tuple[type, ...], parse: Callable[[Any], _P]) -> _P | None:
        """A part that routing reads itself. What has the wrong shape was reported by the schema already."""
        if not isinstance(raw, shape):
            return None
        told = {(problem.line, problem.column) for problem in self.problems}
        before = len(self.problems)
        try:
            return parse(raw)
        except ConfigurationProblems as error:
            self._adopt(path[:-1], error)
        new = self.problems[before:]
        self.problems[before:] = [problem for problem in new if (problem.line, problem.column) not in told]
        return None

    def _quiet(self, path: Path, raw: object) -> Quiet | None:
        given = _items(raw)
        zone = self._zone((*path, "zone"), given.get("zone"))
        hours = self._part((*path, "hours"), given.get("hours"), dict, parse_hours)
        return Quiet(hours, zone) if hours is not None and zone is not None else None

    def _queue(self, name: str, raw: dict[str, Any]) -> QueueConfig:
        policy = _items(raw.get("skip_policy"))
        return QueueConfig(
            name,
            self.team_reader.members(("queues", name, "members"), raw.get("members")),
            self._nobody(("queues", name), raw.get("when_nobody")),
            self._quiet(("queues", name, "quiet_hours"), raw.get("quiet_hours")),
            MappingProxyType(dict(sorted(policies({k: str(v) for k, v in policy.items()}).items()))),
        )

    def _nobody(self, queue: Path, raw: object) -> NobodyPolicy:
        path = (*queue, "when_nobody")
        if raw == "leave_unassigned":
            return NobodyPolicy(WhenNobody.LEAVE_UNASSIGNED)
        if "fallback_queue" in _items(raw):
            name = self._queue_name((*path, "fallback_queue"), _items(raw)["fallback_queue"])
            return NobodyPolicy(WhenNobody.FALLBACK_QUEUE, queue=name)
        if "default_agent" in _items(raw):
            agent_id = self.receiver((*path, "default_agent"), _items(raw)["default_agent"])
            return NobodyPolicy(WhenNobody.DEFAULT_AGENT, agent_id=agent_id)
        return NobodyPolicy()

    def _circles(self) -> None:
        after = {name: _items(_items(q).get("when_nobody")).get("fallback_queue") for name, q in self.queues.items()}
        done: set[str] = set()
        for start in after:
            walk: list[str] = []
            at: object = start
            while isinstance(at, str) and at in after and at not in done and at not in walk:
                walk.append(at)
                at = after[at]
            if isinstance(at, str) and at in walk:
                circle = [*walk[walk.index(at) :], at]
                path = ("queues", at, "when_nobody", "fallback_queue")
                self.problem(path, f"queues fall back in a circle: {' -> '.join(circle)}", "let one of them hold")
            done.update(walk)

    def _rule(self, at: int, raw: dict[str, Any]) -> RuleConfig:
        path: Path = ("rules", at)
        role = Role.COLLABORATOR if raw.get("role") == "collaborator" else Role.OWNER
        if role is Role.COLLABORATOR and Capability.COLLABORATORS not in self.capabilities:
            fix = "remove the rule, or make its role owner"
            self.problem((*path, "role"), "this CRM has no collaborators", fix)
        when = _items(raw.get("when"))
        try:
            # A zone that is wrong is reported once, at its own place.
            compile_condition(in_zone(when, self.zone or ("UTC" if "zone" in self.raw else None)))
        except ConditionProblems as error:
            self._adopt(path, error)
        chain = [((*path, "to"), raw.get("to"))]
        chain += [((*path, "else", step), target) for step, target in enumerate(_entries(raw.get("else")))]
        targets: list[ConfigTarget] = []
        for where, entry in chain:
            target = self._target(where, entry, role)
            if target is None:
                continue
            if target.agents and any(before.agents for before in targets):
                fix = "rank them all in one, or make a queue of one of them"
                self.problem(where, "ranks agents again, and a rule has one line of its own", fix)
            if targets and targets[-1].kind is TargetKind.LEAVE_ALONE:
                self.problem(where, "stands after leave_alone and is never reached", "remove one of the two")
            elif target in targets:
                self.problem(where, "names the same target again", "remove it; it would be away still")
            targets.append(target)
        name = raw.get("name")
        return RuleConfig(name if isinstance(name, str) else "", role, when, tuple(targets))

    def _target(self, path: Path, raw: object, role: Role) -> ConfigTarget | None:
        if raw in ("existing_owner", "same_household", "leave_alone"):
            return ConfigTarget(TargetKind(str(raw)))
        if "queue" in _items(raw):
            return ConfigTarget(TargetKind.QUEUE, queue=self._queue_name((*path, "queue"), _items(raw)["queue"]))
        if "team" in _items(raw):
            team = self.team_reader.target((*path, "team"), _items(raw)["team"])
            return ConfigTarget(TargetKind.QUEUE, team=team) if team is not None else None
        if "agents" in _items(raw):
            ranked = self.team_reader.members((*path, "agents"), _items(raw)["agents"])
            return ConfigTarget(TargetKind.QUEUE, agents=ranked) if ranked else None
        if "agent" in _items(raw):
            agent_id = self.receiver((*path, "agent"), _items(raw)["agent"], owns=role is Role.OWNER)
            return ConfigTarget(TargetKind.AGENT, agent_id=agent_id) if agent_id else None
        return None


def rules_as_written(text: str) -> tuple[Rule, ...]:
    """The rules of a stored configuration with their conditions and no targets: enough to tell how a lead fared.

    Whether the agents and queues that they name are still there does not matter. Raises ValueError when `text` cannot
    be read as a configuration.
    """
    root, problems = read(text)
    if root is None or problems:
        raise ValueError("the stored configuration cannot be read")
    raw = _items(_plain(root, ()))
    rules = []
    for at, rule in enumerate(map(_items, _entries(raw.get("rules"))), 1):
        when = in_zone(_items(rule.get("when")), raw.get("zone"))
        rules.append(Rule(str(rule.get("name")), at, Role(rule.get("role", Role.OWNER)), when, ()))
    return tuple(rules)
