"""A tenant's rules, queues, members, hours, leave and caps as one YAML file.

:func:`parse` reads a file against the agents that the CRM has and reports everything that is wrong with it at once,
each with its line. :func:`export` writes a configuration as text that parses to the same; :func:`digest` tells whether
two mean the same. Every key is described in docs/configuration.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from datetime import time, timedelta
from decimal import Decimal
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

import yaml

from connector.config_build import Builder, Directory
from connector.config_lines import lines_of, target_line, team_notes
from connector.config_model import (
    CLOSED_STAGES,
    RETURNS_PER_DAY,
    AgentFacts,
    Config,
    ConfigNote,
    ConfigTarget,
    KnownAgent,
    KnownTeam,
    Member,
    Members,
    NobodyPolicy,
    QueueConfig,
    Released,
    RuleConfig,
    TeamConfig,
    TeamMember,
)
from connector.config_yaml import ConfigProblem, ConfigProblems, read
from routing import stored
from routing.conditions import in_zone
from routing.fields import DAYS
from routing.model import Hours, Leave, Role, Rule, Target, TargetKind, WhenNobody
from routing.rule_lint import lint_rules
from routing.settle import SettleTimes

__all__ = [
    "AgentFacts",
    "Config",
    "ConfigNote",
    "ConfigProblem",
    "ConfigProblems",
    "ConfigTarget",
    "KnownAgent",
    "KnownTeam",
    "Member",
    "NobodyPolicy",
    "QueueConfig",
    "Released",
    "RuleConfig",
    "SettleTimes",
    "TeamConfig",
    "TeamMember",
    "digest",
    "export",
    "parse",
    "rules_of",
    "warnings",
]

_HEADER = """\
# Turnlock: rules, queues and members of one account. Rules are tried from the top; the first that matches decides.
# Every key is explained in docs/configuration.md. Comments do not survive an export.
"""


def parse(
    text: str | bytes,
    *,
    known_agents: Iterable[KnownAgent],
    capabilities: frozenset[str],
    known_teams: Collection[KnownTeam] | None = None,
) -> Config:
    """The configuration that `text` (bytes: UTF-8) describes, its agents found among `known_agents`.

    `capabilities` are those of the tenant's CRM (:class:`adapters.base.Capability`); what it cannot do is refused.
    `known_teams` are the CRM's teams; None: it is not asked whether those that are named are among them.

    Raises:
        ConfigProblems: the text cannot be used. Holds every problem with line, column, path and remedy.
    """
    root, problems = read(text)
    if root is None:
        raise ConfigProblems(problems)
    builder = Builder(root, known_agents, capabilities, known_teams)
    config = builder.build()
    # What cannot be read as YAML looks wrong to the later checks too; the first finding says it better.
    broken = {(problem.line, problem.column) for problem in problems}
    problems += [problem for problem in builder.problems if (problem.line, problem.column) not in broken]
    if problems:
        raise ConfigProblems(problems)
    return config


class _Dumper(yaml.SafeDumper):
    """Writes every value out (aliases are not read) and numbers as :func:`connector.config_yaml.typed` reads them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:float", format(Decimal(repr(value)), "f"))


_Dumper.add_representer(float, _number)


def export(config: Config, agents: Iterable[KnownAgent]) -> str:
    """`config` as YAML that :func:`parse` reads back to an equal configuration, given the same `agents`.

    Agents are named by email where that names only them, otherwise by CRM id. Raises LookupError if `config` holds an
    agent who is not among `agents`.
    """
    directory = Directory(agents)
    word = directory.word

    def members(those: Members) -> list[object]:
        return [_member(word, one) for one in those]

    def target(one: ConfigTarget) -> object:
        if one.agents:
            return {"agents": members(one.agents)}
        if one.team is not None:
            return {"team": one.team}
        if one.kind is TargetKind.QUEUE:
            return {"queue": one.queue}
        if one.kind is TargetKind.AGENT and one.agent_id is not None:
            return {"agent": word(one.agent_id)}
        return one.kind.value

    def nobody(policy: NobodyPolicy) -> object:
        if policy.kind is WhenNobody.FALLBACK_QUEUE:
            return {"fallback_queue": policy.queue}
        if policy.kind is WhenNobody.DEFAULT_AGENT and policy.agent_id is not None:
            return {"default_agent": word(policy.agent_id)}
        return policy.kind.value

    out: dict[str, object] = {"version": 1}
    meant = config.unassigned
    unassigned = {
        "users": sorted(meant.user_refs),
        "ponds": sorted(meant.pond_refs),
        "unclaimed": meant.include_unclaimed,
    }
    if any(unassigned.values()):
        out["unassigned"] = unassigned
    if config.zone is not None:
        out["zone"] = config.zone
    if config.country is not None:
        out["country"] = config.country
    out["default_queue"] = config.default_queue
    out["released"] = config.released.value
    if config.caps_zone is not None:
        out["caps_zone"] = config.caps_zone
    if config.closed_stages != CLOSED_STAGES:
        out["closed_stages"] = list(config.closed_stages)
    if config.returns_per_day != RETURNS_PER_DAY:
        out["returns"] = {"per_day": config.returns_per_day}
    if config.settle != SettleTimes():
        out["settle"] = config.settle.as_json()
    out |= config.wording.as_json()
    if config.agents:
        named = sorted((word(agent_id), facts) for agent_id, facts in config.agents.items())
        out["agents"] = {name: _facts(facts) for name, facts in named}
    if config.teams:
        out["teams"] = {
            team.name: {"members": members(team.members)} if team.from_crm is None else {"from_crm": team.from_crm}
            for team in config.teams
        }
    if config.queues:
        out["queues"] = {
            queue.name: {
                "members": members(queue.members),
                "when_nobody": nobody(queue.when_nobody),
            }
            | _absences(queue)
            for queue in config.queues
        }
    rules = []
    for rule in config.rules:
        first, *others = map(target, rule.targets)
        entry: dict[str, object] = {"name": rule.name}
        if rule.role is not Role.OWNER:
            entry["role"] = rule.role.value
        if rule.when:
            entry["when"] = rule.when
        entry["to"] = first
        if others:
            entry["else"] = others
        rules.append(entry)
    if rules:
        out["rules"] = rules
    return _HEADER + yaml.dump(
        out, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None
    )


def _member(word: Callable[[UUID], str], one: Member | TeamMember) -> object:
    if isinstance(one, Member):
        return word(one.agent_id) if one.weight == 1 else {"agent": word(one.agent_id), "weight": one.weight}
    more = ({"weight": one.weight} if one.weight is not None else {}) | ({"nested": True} if one.nested else {})
    return {"team": one.team} | more


def _facts(facts: AgentFacts) -> dict[str, object]:
    out: dict[str, object] = {}
    if facts.zone is not None:
        out["zone"] = facts.zone
    if facts.hours is not None:
        out["hours"] = _timetable(facts.hours)
    if facts.leave:
        out["leave"] = [_span(leave) for leave in facts.leave]
    if facts.holidays is not None:
        calendar = {"country": facts.holidays.country, "region": facts.holidays.region}
        named = {key: value for key, value in calendar.items() if value is not None}
        extra = [{"day": day.isoformat(), "name": name} for day, name in facts.holidays.extra.items()]
        out["holidays"] = named | ({"extra": extra} if extra or not named else {})
    if facts.caps is not None:
        out["caps"] = stored.caps_json(facts.caps)
    return out


def _span(leave: Leave) -> dict[str, str]:
    if leave.start.time() == leave.end.time() == time():
        return {"from": f"{leave.start:%Y-%m-%d}", "to": f"{leave.end - timedelta(days=1):%Y-%m-%d}"}
    return {"from": f"{leave.start:%Y-%m-%d %H:%M}", "to": f"{leave.end:%Y-%m-%d %H:%M}"}


def _absences(queue: QueueConfig) -> dict[str, object]:
    """A queue's quiet hours and skip policy, as far as it has them."""
    out: dict[str, object] = {}
    if queue.quiet_hours is not None:
        out["quiet_hours"] = {"zone": queue.quiet_hours.zone, "hours": _timetable(queue.quiet_hours.hours)}
    if queue.skip_policy:
        out["skip_policy"] = {skip.value: policy.value for skip, policy in queue.skip_policy.items()}
    return out


def _timetable(hours: Hours) -> dict[str, list[str]]:
    def clock(minutes: int) -> str:
        return f"{minutes // 60:02d}:{minutes % 60:02d}"

    days = sorted((day, spans) for day, spans in hours.days.items() if spans)
    return {DAYS[day]: [f"{clock(start)}-{clock(end)}" for start, end in spans] for day, spans in days}


def digest(config: Config) -> bytes:
    """SHA-256 over what `config` means: equal for texts that differ in comments, layout, quotes, aliases of agents or
    the order of queues, so that saving an unchanged configuration makes no new version."""
    meaning: dict[str, object] = {
        "unassigned": [
            sorted(config.unassigned.user_refs),
            sorted(config.unassigned.pond_refs),
            config.unassigned.include_unclaimed,
        ],
        "default_queue": config.default_queue,
        "released": config.released.value,
        "agents": {
            str(agent_id): [facts.zone, None if facts.hours is None else _timetable(facts.hours), *_more(facts)]
            for agent_id, facts in config.agents.items()
        },
        "queues": {
            queue.name: [
                _members_meaning(queue.members),
                _target_meaning(queue.when_nobody),
                *filter(None, [_absences(queue)]),
            ]
            for queue in config.queues
        },
        "rules": [
            [rule.name, rule.role.value, rule.when, [_target_meaning(target) for target in rule.targets]]
            for rule in config.rules
        ],
    }
    # Left out where they are not given, so that what was saved before there were such keys means the same.
    for key in ("zone", "country"):
        if (value := getattr(config, key)) is not None:
            meaning[key] = value
    if config.caps_zone is not None or config.closed_stages != CLOSED_STAGES:
        meaning["caps"] = [config.caps_zone, config.closed_stages]
    if config.returns_per_day != RETURNS_PER_DAY:
        meaning["returns"] = config.returns_per_day
    if config.settle != SettleTimes():
        meaning["settle"] = config.settle.as_json()
    meaning |= config.wording.as_json()
    if config.teams:
        meaning["teams"] = {team.name: [team.from_crm, _members_meaning(team.members)] for team in config.teams}
    canonical = json.dumps(meaning, sort_keys=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(canonical.encode("ascii")).digest()


def _more(facts: AgentFacts) -> list[object]:
    more = {key: value for key, value in _facts(facts).items() if key not in ("zone", "hours")}
    return [more] if more else []


def _members_meaning(members: Members) -> list[object]:
    return [
        [str(one.agent_id), one.weight] if isinstance(one, Member) else ["team", one.team, one.weight, one.nested]
        for one in members
    ]


def _target_meaning(target: ConfigTarget | NobodyPolicy) -> list[object]:
    meaning: list[object] = [target.kind.value, target.queue, None if target.agent_id is None else str(target.agent_id)]
    if isinstance(target, ConfigTarget) and (target.team is not None or target.agents):
        meaning += [target.team, _members_meaning(target.agents)]
    return meaning


def warnings(config: Config) -> list[ConfigNote]:
    """What is allowed in `config` and yet likely a slip: rules that never win, queues that cannot give or get a lead.

    Expects a configuration that :func:`parse` accepts.
    """
    notes = [ConfigNote(f'rule "{note.rule}"', note.text) for note in lint_rules(rules_of(config))]
    fed = {target.queue for rule in config.rules for target in rule.targets}
    fed |= {queue.when_nobody.queue for queue in config.queues} | {config.default_queue}
    lines = lines_of(config)
    for queue in config.queues:
        where = f'queue "{queue.name}"'
        if queue.name not in fed:
            notes.append(ConfigNote(where, "nothing leads here; name it in a rule, or remove it"))
        elif not any(entry.weight != 0 for entry in lines[queue.name].entries):
            text = f"has no members who take turns, so each lead gets: {queue.when_nobody.kind}; add members"
            notes.append(ConfigNote(where, text))
    notes += [ConfigNote(where, text) for where, text in team_notes(config, lines)]
    if config.default_queue is None and not any(rule.role is Role.OWNER and not rule.when for rule in config.rules):
        text = "there is none: a lead that no rule matches stays without an agent (no_rule); name a queue"
        notes.append(ConfigNote("default_queue", text))
    closed = sum(facts.hours is not None and not any(facts.hours.days.values()) for facts in config.agents.values())
    if closed:
        notes.append(ConfigNote("agents", f"{closed} have hours that never open; add days, or remove their hours"))
    for queue in config.queues:
        if queue.quiet_hours is not None and _always(queue.quiet_hours.hours):
            text = "its quiet hours never end, so it holds every lead; shorten them"
            notes.append(ConfigNote(f'queue "{queue.name}"', text))
    return notes


def _always(hours: Hours) -> bool:
    return all(hours.days.get(day) == ((0, 24 * 60),) for day in range(7))


def rules_of(config: Config) -> list[Rule]:
    """The rules as routing takes them. Queues get ids made of their names: to be compared, not to be stored."""

    def target(rule: RuleConfig, one: ConfigTarget) -> Target:
        line = target_line(rule, one)
        return Target(one.kind, one.agent_id if line is None else uuid5(NAMESPACE_URL, f"queue:{line}"))

    return [
        Rule(
            rule.name, at, rule.role, in_zone(rule.when, config.zone), tuple(target(rule, one) for one in rule.targets)
        )
        for at, rule in enumerate(config.rules, start=1)
    ]
