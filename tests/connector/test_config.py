"""The configuration file: what it means, every kind of problem at its line, and the way out and back."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from uuid import UUID

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.config import (
    AgentFacts,
    Config,
    ConfigProblem,
    ConfigProblems,
    ConfigTarget,
    KnownAgent,
    KnownTeam,
    Member,
    NobodyPolicy,
    QueueConfig,
    Released,
    RuleConfig,
    SettleTimes,
    TeamConfig,
    TeamMember,
    digest,
    export,
    parse,
    warnings,
)
from connector.config_yaml import MAX_BYTES, MAX_PROBLEMS
from routing.model import Hours, Role, TargetKind, UnassignedDefinition, WhenNobody

HOUSE, ANA, BEN, CY, CY2, NOMAIL = (UUID(int=n) for n in range(1, 7))
AGENTS = (
    KnownAgent(HOUSE, "1", "house@example.com", "House Account"),
    KnownAgent(ANA, "12", "ana@example.com", "Ana Agent"),
    KnownAgent(BEN, "13", "ben@example.com", "Ben Broker"),
    KnownAgent(CY, "14", "cy@example.com", "Cy Same"),
    KnownAgent(CY2, "15", "cy@example.com", "Cy Same"),
    KnownAgent(NOMAIL, "no", None, "Nora Nomail"),
)
EVERYTHING = frozenset({"collaborators", "tasks", "teams"})
DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


TEAMS = [KnownTeam("7", "North"), KnownTeam("8", "Twins"), KnownTeam("9", "twins")]


def load(text: str | bytes, capabilities: frozenset[str] = EVERYTHING) -> Config:
    return parse(text, known_agents=AGENTS, capabilities=capabilities, known_teams=TEAMS)


def problems(text: str | bytes, capabilities: frozenset[str] = EVERYTHING) -> tuple[ConfigProblem, ...]:
    with pytest.raises(ConfigProblems) as caught:
        load(text, capabilities)
    return caught.value.problems


def rule(condition: str) -> str:
    head = "version: 1\nqueues: {A: {members: [ana@example.com]}}\nrules:\n- name: r\n"
    return f"{head}  when: {condition}\n  to: {{queue: A}}\n"


WHOLE = """\
version: 1
unassigned: {users: ["1"], ponds: [7], unclaimed: true}
default_queue: Everyone
released: leave
returns: {per_day: 3}
settle: {default: 5, sources: {Zillow Flex: 20, "7": 0}}
agents:
  ana@example.com: {zone: America/Chicago, hours: {mon: ["09:00-17:00"], fri: ["22:00-02:00"]}}
queues:
  Everyone:
    members: [ana@example.com, {agent: "13", weight: 3}]
    when_nobody: {default_agent: Nora Nomail}
  Austin:
    members: [BEN@example.com]
    when_nobody: {fallback_queue: Everyone}
rules:
- name: Forbidden source
  when: {field: source, equals: Fax}
  to: leave_alone
- name: Austin buyers
  when: {all: [{field: city, equals: Austin}, {field: price, at_least: 400000}]}
  to: {queue: Austin}
  else: [existing_owner, {agent: "15"}]
- name: With Ben
  role: collaborator
  when: {not: {field: type, equals: seller}}
  to: {agent: ben@example.com}
"""


def test_every_part_is_read() -> None:
    hours = Hours({0: ((540, 1020),), 4: ((1320, 1440),), 5: ((0, 120),)})
    assert load(WHOLE) == Config(
        unassigned=UnassignedDefinition(frozenset({"1"}), frozenset({"7"}), True),
        default_queue="Everyone",
        released=Released.LEAVE,
        returns_per_day=3,
        settle=SettleTimes(5, {"Zillow Flex": 20, "7": 0}),
        agents=MappingProxyType({ANA: AgentFacts("America/Chicago", hours)}),
        queues=(
            QueueConfig("Austin", (Member(BEN),), NobodyPolicy(WhenNobody.FALLBACK_QUEUE, queue="Everyone")),
            QueueConfig(
                "Everyone", (Member(ANA), Member(BEN, 3)), NobodyPolicy(WhenNobody.DEFAULT_AGENT, agent_id=NOMAIL)
            ),
        ),
        rules=(
            RuleConfig(
                "Forbidden source",
                Role.OWNER,
                {"field": "source", "equals": "Fax"},
                (ConfigTarget(TargetKind.LEAVE_ALONE),),
            ),
            RuleConfig(
                "Austin buyers",
                Role.OWNER,
                {"all": [{"field": "city", "equals": "Austin"}, {"field": "price", "at_least": 400000}]},
                (
                    ConfigTarget(TargetKind.QUEUE, queue="Austin"),
                    ConfigTarget(TargetKind.EXISTING_OWNER),
                    ConfigTarget(TargetKind.AGENT, agent_id=CY2),
                ),
            ),
            RuleConfig(
                "With Ben",
                Role.COLLABORATOR,
                {"not": {"field": "type", "equals": "seller"}},
                (ConfigTarget(TargetKind.AGENT, agent_id=BEN),),
            ),
        ),
    )


def test_the_least_configuration() -> None:
    assert load("version: 1") == Config()
    assert load("version: 1\ndefault_queue: null\n") == Config()


# -- the tongue of YAML: text stays as it is written ----------------------------------------------------------
@pytest.mark.parametrize(
    ("condition", "value"),
    [
        ("{field: state, equals: NO}", "NO"),
        ("{field: zip, equals: 01234}", "01234"),
        ("{field: zip, equals: 78701}", "78701"),
        ("{field: zip, starts_with: 0x10}", "0x10"),
        ("{field: campaign, equals: 2026-03-01}", "2026-03-01"),
        ("{field: source, equals: 12:30}", "12:30"),
        ("{field: source, equals: true}", "true"),
        ("{field: tags, contains: 1_000}", "1_000"),
        ("{field: custom.lot, starts_with: 5}", "5"),
        ("{field: custom.lot, equals: 5}", 5),
        ('{field: custom.lot, equals: "5"}', "5"),
        ("{field: custom.lot, equals: 05}", "05"),
        ("{field: custom.vip, equals: true}", True),
        ("{field: custom.vip, equals: yes}", "yes"),
        ("{field: price, equals: 5.0}", 5),
        ("{field: price, at_most: 450000.75}", 450000.75),
    ],
)
def test_values_of_conditions(condition: str, value: object) -> None:
    when = load(rule(condition)).rules[0].when
    found = next(v for k, v in when.items() if k != "field")
    assert found == value
    assert type(found) is type(value)


def test_numbers_and_switches_inside_lists() -> None:
    when = load(rule("{any: [{field: price, between: [~, 5]}, {field: zip, one_of: [01, 2]}]}")).rules[0].when
    assert when == {"any": [{"field": "price", "between": [None, 5]}, {"field": "zip", "one_of": ["01", "2"]}]}


def test_an_amount_that_a_float_would_round_is_refused() -> None:
    assert "number" in problems(rule("{field: price, at_least: 123456789012345678.123456789}"))[0].what


def test_names_that_yaml_would_turn_into_something_else() -> None:
    config = load("version: 1\ndefault_queue: on\nqueues:\n  on: {members: [no]}\n")
    assert config.queues == (QueueConfig("on", (Member(NOMAIL),)),)


# -- every kind of problem, with its line ---------------------------------------------------------------------
CASES = [
    # text and YAML
    (b"version: 1\n\xff", 2, "UTF-8", "UTF-8"),
    ("version: 1\n# " + "x" * MAX_BYTES, 1, "bytes", "fewer"),
    ("", 1, "empty", "version: 1"),
    ("# only a comment\n", 1, "empty", "version: 1"),
    ("version: 1\nrules: [\n", 3, "not YAML", "indentation"),
    ("version: 1\n\trules: []\n", 2, "not YAML", "tabs"),
    ("version: 1\nunassigned:\n  users: [\x07]\n", 3, "character", "remove"),
    ('version: 1\nunassigned:\n  users: ["\\0"]\n', 3, "control character", "remove"),
    ('version: 1\nunassigned:\n  users: ["\\ud800"]\n', 3, "half of a character", "remove"),
    ('version: 1\nunassigned:\n  users: ["\\UFFFFFFFF"]\n', 3, "not YAML", "quotes"),
    ("%YAML 1." + "9" * 5000 + "\n---\nversion: 1", 1, "not YAML", "quotes"),
    ("version: 1\n---\nversion: 1\n", 2, "second document", "one document"),
    ("version: 1\nreleased: leave\nreleased: leave\n", 3, "twice", "line 2"),
    ("version: 1\nqueues:\n  A: &a {members: []}\n  B: *a\n", 4, "alias", "write the value out"),
    ("version: !!int 1\n", 1, "tag", "leave the tag out"),
    ("version: 1\n? [a, b]\n: 1\n", 2, "key that is a list", "plain text"),
    ("version: 1\nx: " + "[" * 50 + "]" * 50, 2, "deep", "nest fewer"),
    # shape
    ("- version: 1\n", 1, "must be a mapping, not a list", "mapping"),
    ("released: leave\n", 1, '"version" is missing', "version: 1"),
    ("version: 2\n", 1, "must be 1", "version: 1"),
    ("version: 1\nqueus: {}\n", 2, "not a known key", 'did you mean "queues"?'),
    ("version: 1\nqueues:\n", 2, "not nothing", "remove it"),
    ("version: 1\nreleased: leaf\n", 2, '"leaf" is not a choice', 'did you mean "leave"?'),
    ("version: 1\nunassigned: {unclaimed: yes}\n", 2, "true or false", "true or false"),
    ('version: 1\nunassigned: {ponds: ["7", 7]}\n', 2, "twice", "remove"),
    ("version: 1\nqueues:\n  A: {}\n", 3, '"members" is missing', "order of rank"),
    ("version: 1\nqueues:\n  A:\n    members: [{agent: '12', weight: 101}]\n", 4, "0 and 100", "0 (no turns) to 100"),
    ("version: 1\nqueues:\n  A:\n    members: [{agent: '12', weight: -1}]\n", 4, "0 and 100", "100"),
    ("version: 1\nqueues:\n  A:\n    members: [{agent: '12', weight: 1.5}]\n", 4, "whole number", "100"),
    ("version: 1\nqueues:\n  A:\n    members: [{agent: '12', weight: lots}]\n", 4, "not text", "100"),
    ("version: 1\nqueues:\n  A: {members: [], when_nobody: holt}\n", 3, "not a choice", 'did you mean "hold"?'),
    ("version: 1\nqueues:\n  A: {members: [], when_nobody: {queue: A}}\n", 3, "not a known key", "fallback_queue"),
    ("version: 1\nqueues:\n  ' A': {members: []}\n", 3, "form", "without blanks"),
    ('version: 1\nqueues:\n  "A\\nB": {members: []}\n', 3, "form", "one line"),
    ("version: 1\nrules:\n- {name: r, to: leave}\n", 3, "not a choice", 'did you mean "leave_alone"?'),
    ("version: 1\nrules:\n- {name: r, to: {}}\n", 3, "empty", "same_household or leave_alone"),
    ("version: 1\nrules:\n- {name: r, to: existing_owner, else: []}\n", 3, "empty", "remove it"),
    ("version: 1\nrules:\n- {name: r, to: existing_owner, role: boss}\n", 3, "not a choice", '"collaborator", "owner"'),
    ("version: 1\nagents:\n  ana@example.com: {}\n", 3, "empty", "zone, hours, leave, holidays or caps"),
    ("version: 1\nreturns: {per_day: -1}\n", 2, "0 and 1000", "0 for none"),
    ("version: 1\nreturns: {per_week: 1}\n", 2, "not a known key", "per_day"),
    ("version: 1\nsettle: {default: 5 s}\n", 2, "not text", "seconds from 0 to 3600"),
    ("version: 1\nsettle:\n  sources: {Zillow: 4000}\n", 3, "0 and 3600", "seconds from 0 to 3600"),
    ("version: 1\nsettle: {Zillow: 5}\n", 2, "not a known key", "sources"),
    ("version: 1\nsettle:\n  sources:\n    Café: 5\n    cafe: 6\n", 5, "the same source", "keep one"),
    # meaning
    ("version: 1\ndefault_queue: Everone\nqueues: {Everyone: {members: []}}\n", 2, "no queue", "Everyone"),
    ("version: 1\ndefault_queue: A\n", 2, "no queue", "none to name yet"),
    ("version: 1\nqueues:\n  A:\n    members:\n    - '12'\n    - anna@example.com\n", 6, "no agent", "ana@example.com"),
    ("version: 1\nqueues:\n  A: {members: [zzz]}\n", 3, "no agent", "id or email"),
    ("version: 1\nqueues:\n  A: {members: [cy@example.com]}\n", 3, "any of 2 agents", "14, 15"),
    ("version: 1\nqueues:\n  A: {members: [Cy Same]}\n", 3, "any of 2 agents", "14, 15"),
    ("version: 1\nqueues:\n  A: {members: ['12', ana@example.com]}\n", 3, "member of this queue already", "weight"),
    ("version: 1\nqueues:\n  A: {members: []}\n  a: {members: []}\n", 4, "line 3 has this name", "of its own"),
    ("version: 1\nagents:\n  '12': {zone: UTC}\n  ana@example.com: {zone: UTC}\n", 4, "same agent", "join"),
    ("version: 1\nagents:\n  who@example.org: {zone: UTC}\n", 3, "no agent", "id or email"),
    ("version: 1\nagents:\n  '12':\n    zone: America/Chicgo\n", 4, "no time zone", "America/Chicago"),
    ("version: 1\nagents:\n  '12':\n    zone: ../../etc/passwd\n", 4, "no time zone", "IANA"),
    ("version: 1\nagents:\n  '12':\n    hours: {mon: [9 to 5]}\n", 4, "not an interval", "09:00-17:30"),
    ("version: 1\nagents:\n  '12':\n    hours:\n      tue: 09:00-17:00\n", 5, "not a list", "[]"),
    ("version: 1\nagents:\n  '12':\n    hours:\n      mo: []\n", 5, "no day", "mon"),
    ("version: 1\nunassigned:\n  users: [nobody@example.org]\n", 3, "no agent", "id or email"),
    ("version: 1\nunassigned: {users: ['12']}\nqueues:\n  A: {members: [Ana Agent]}\n", 4, "house user", "remove"),
    (
        "version: 1\nunassigned: {users: [Ana Agent]}\nqueues:\n  A:\n    members: []\n"
        "    when_nobody: {default_agent: '12'}\n",
        6,
        "house user",
        "remove",
    ),
    ("version: 1\nunassigned: {users: ['12']}\nrules:\n- {name: r, to: {agent: '12'}}\n", 4, "house user", "remove"),
    (
        "version: 1\nqueues:\n  A: {members: [], when_nobody: {fallback_queue: A}}\n",
        3,
        "circle: A -> A",
        "let one of them hold",
    ),
    (
        "version: 1\nqueues:\n  Z: {members: [], when_nobody: {fallback_queue: A}}\n"
        "  A: {members: [], when_nobody: {fallback_queue: B}}\n  B: {members: [], when_nobody: {fallback_queue: A}}\n",
        4,
        "circle: A -> B -> A",
        "hold",
    ),
    ("version: 1\nqueues:\n  A: {members: [], when_nobody: {fallback_queue: B}}\n", 3, "no queue", '"A"'),
    ("version: 1\nrules:\n- {name: r, to: leave_alone}\n- {name: R, to: leave_alone}\n", 4, "line 3 has this", "own"),
    ("version: 1\nrules:\n- {name: r, to: {queue: Q}}\n", 3, "no queue", "none to name"),
    ("version: 1\nrules:\n- name: r\n  to: leave_alone\n  else: [existing_owner]\n", 5, "never reached", "remove"),
    ("version: 1\nrules:\n- name: r\n  to: {agent: '12'}\n  else: [{agent: Ana Agent}]\n", 5, "same target", "remove"),
    ("version: 1\nteams: {North: {}}\n", 2, "empty", "from_crm or members"),
    ("version: 1\nteams: {North: {members: []}}\n", 2, "empty", "order of rank"),
    ("version: 1\nteams: {North: {members: ['12'], from_crm: North}}\n", 2, "more than 1 keys", "from_crm or members"),
    ("version: 1\nteams: {North: {from_crm: Norht}}\n", 2, 'CRM has no team "Norht"', 'did you mean "North"'),
    ("version: 1\nteams: {North: {from_crm: Twins}}\n", 2, "any of 2 teams", "8, 9"),
    ("version: 1\nteams:\n  N: {members: ['12']}\n  n: {members: ['13']}\n", 4, "line 3 has this name", "of its own"),
    ("version: 1\nteams: {N: {members: [{weight: 2}]}}\n", 2, "agent or a team", "write agent or team"),
    ("version: 1\nteams: {N: {members: [{agent: '12', team: N}]}}\n", 2, "agent or a team", "write agent or team"),
    ("version: 1\nteams: {N: {members: [{agent: '12', nested: true}]}}\n", 2, "only a team", "remove"),
    ("version: 1\nteams: {N: {members: [{agent: '12', weight: -1}]}}\n", 2, "0 and 100", "whole number"),
    ("version: 1\nqueues:\n  A: {members: [{team: Noth}]}\nteams: {North: {members: ['12']}}\n", 3, "no team", "North"),
    (
        "version: 1\nqueues:\n  A: {members: [{team: N}, {team: N, nested: true}]}\nteams: {N: {members: ['12']}}\n",
        3,
        "named twice",
        "keep one",
    ),
    (
        "version: 1\nteams:\n  A: {members: [{team: B}]}\n  B: {members: [{team: C, nested: true}]}\n"
        "  C: {members: [{team: A}]}\n",
        3,
        "circle: A -> B -> C -> A",
        "take one of them out",
    ),
    ("version: 1\nteams:\n  A: {members: [{team: A, nested: true}]}\n", 3, "circle: A -> A", "take one of them out"),
    (
        "version: 1\nteams:\n  A: {members: ['12']}\n  B: {members: [{team: A, nested: true}]}\n"
        "  C: {members: [{team: B, nested: true}]}\n  D: {members: [{team: C, nested: true}]}\n"
        "queues:\n  Q: {members: [{team: D, nested: true}]}\n",
        8,
        "4 teams one within the other",
        "3 at most",
    ),
    ("version: 1\nteams: {N: {members: ['12']}}\nqueues: {Team n: {members: []}}\n", 2, "and so is a queue", "another"),
    (
        "version: 1\nqueues: {rule R: {members: []}}\nrules:\n- {name: R, to: {agents: ['12']}}\n",
        4,
        "and so is a queue",
        "another name",
    ),
    ("version: 1\nrules:\n- {name: R, to: {agents: []}}\n", 3, "empty", "order of rank"),
    ("version: 1\nrules:\n- {name: R, to: {agents: ['12', zed]}}\n", 3, "no agent", "id or email"),
    ("version: 1\nrules:\n- {name: R, to: {team: N}}\n", 3, "no team", "none to name yet"),
    (
        "version: 1\nrules:\n- name: R\n  to: {agents: ['12']}\n  else: [{agents: ['13']}]\n",
        5,
        "ranks agents again",
        "queue of one",
    ),
    (rule("{field: cty, equals: Austin}"), 5, "no field", "city"),
    (rule("\n    all:\n    - {field: city, equals: A}\n    - {field: price, at_least: a lot}"), 8, "number", "450000"),
    (rule("\n    not:\n      field: city\n      eqals: A"), 6, "operator that does not exist", "equals"),
    (rule("{field: city, equals: ~}"), 5, "plain value", "is_missing"),
    (rule("nonsense"), 5, "not text", "condition"),
    (rule("{field: city, exists: 'true'}"), 5, "not true", "exists: true"),
]


@pytest.mark.parametrize(("text", "line", "what", "fix"), CASES, ids=[f"{c[2]}-{n}" for n, c in enumerate(CASES)])
def test_a_problem_is_told_with_its_line_and_its_remedy(text: str | bytes, line: int, what: str, fix: str) -> None:
    found = problems(text)
    assert [(p.line, what in p.what, fix in p.fix) for p in found] == [(line, True, True)], [str(p) for p in found]
    assert str(found[0]).startswith(f"line {line}, column {found[0].column}")
    assert found[0].column >= 1


def test_a_collaborator_rule_needs_a_crm_that_has_them() -> None:
    text = "version: 1\nrules:\n- name: r\n  role: collaborator\n  to: {agent: ana@example.com}\n"
    assert load(text).rules[0].role is Role.COLLABORATOR
    (problem,) = problems(text, frozenset())
    assert (problem.line, problem.path) == (4, "rules[0].role")


def test_a_team_of_the_crm_needs_a_crm_that_has_teams() -> None:
    text = "version: 1\nteams:\n  North: {from_crm: North}\n"
    assert load(text).teams[0].from_crm == "North"
    (problem,) = problems(text, frozenset())
    assert (problem.line, problem.path) == (3, "teams.North.from_crm")
    assert "no teams that Turnlock can read" in problem.what


def test_a_house_user_may_collaborate_but_not_own() -> None:
    text = "version: 1\nunassigned: {users: ['12']}\nrules:\n- {name: r, role: ROLE, to: {agent: '12'}}\n"
    assert load(text.replace("ROLE", "collaborator")).rules
    assert problems(text.replace("ROLE", "owner"))


def test_all_problems_are_reported_at_once_in_order() -> None:
    bad = """\
version: 1
unknown: 1
default_queue: Nowhere
released: maybe
agents:
  who@example.org: {zone: Mars/Base, hours: {mon: [x], sol: []}}
queues:
  A: {members: [nobody, {agent: "12", weight: 1000}], when_nobody: {fallback_queue: A}}
rules:
- {name: r, when: {any: [{field: x, equals: 1}, {field: city}]}, to: {queue: B}}
- {name: r, to: {agent: nobody}, else: [nonsense]}
"""
    found = problems(bad)
    assert [p.line for p in found] == [2, 3, 4, 6, 6, 6, 6, 8, 8, 8, 10, 10, 10, 11, 11, 11]


def test_the_exception_itself_quotes_nothing_of_the_file() -> None:
    with pytest.raises(ConfigProblems) as caught:
        load("version: 1\nqueues: {A: {members: [secret@example.org]}}\n")
    assert "secret@example.org" in str(caught.value.problems[0])
    assert str(caught.value) == "1 problem in the configuration, the first at line 2"


def test_a_file_of_another_kind_gives_a_bounded_list() -> None:
    found = problems("".join(f"key{n}: {n}\n" for n in range(5000)))
    assert len(found) == MAX_PROBLEMS


def test_aliases_do_not_multiply() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(18)
    )
    found = problems(bomb)
    assert sum("alias" in p.what for p in found) == 162


# -- out and back ---------------------------------------------------------------------------------------------
def test_an_export_reads_back_to_the_same() -> None:
    config = load(WHOLE)
    text = export(config, AGENTS)
    assert load(text) == config
    assert export(load(text), AGENTS) == text
    assert text.startswith("# ")
    assert "- {agent: ben@example.com, weight: 3}" in text
    assert "agent: '15'" in text, "an email that two agents share must not stand for one of them"


def test_an_export_never_writes_an_alias() -> None:
    when = {"field": "tags", "one_of": ["a", "b"]}
    targets = (ConfigTarget(TargetKind.LEAVE_ALONE),)
    text = export(Config(rules=(RuleConfig("r", Role.OWNER, {"any": [when, when]}, targets),)), AGENTS)
    assert load(text).rules[0].when == {"any": [when, when]}


def test_an_agent_who_is_not_known_cannot_be_exported() -> None:
    with pytest.raises(LookupError, match="sync the agents"):
        export(Config(agents={UUID(int=99): AgentFacts("UTC")}), AGENTS)


def test_an_email_that_is_the_id_of_another_is_not_used() -> None:
    agents = (KnownAgent(ANA, "a", "x@example.com", "Ana"), KnownAgent(BEN, "x@example.com", None, "Ben"))
    config = Config(queues=(QueueConfig("Q", (Member(ANA), Member(BEN))),))
    assert parse(export(config, agents), known_agents=agents, capabilities=EVERYTHING) == config


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=12)
names = names.filter(lambda name: not name[0].isspace() and not name[-1].isspace() and name.isprintable())
tricky = st.sampled_from(
    ["NO", "yes", "null", "~", "01234", "1e5", "5", "12:30", "<<", "a: b", "# x", "'", '"', "=", "0o7", "+1"]
)
texts = names | tricky
numbers = st.integers(-(10**12), 10**12) | st.decimals(-1000000, 1000000, places=2).map(
    lambda d: int(d) if d == d.to_integral_value() else float(d)
)
leaves = (
    st.builds(lambda f, v: {"field": f, "equals": v}, st.sampled_from(["city", "state", "zip", "source"]), tricky)
    | st.builds(lambda v: {"field": "tags", "one_of": v}, st.lists(tricky.filter(str.isalnum), min_size=1, max_size=3))
    | st.builds(lambda v: {"field": "price", "at_least": v}, numbers)
    | st.builds(
        lambda v: {"field": "custom.Lot size", "equals": v}, numbers | st.booleans() | st.sampled_from(["5", "NO"])
    )
    | st.just({"field": "language", "is_missing": True})
    | st.just({"field": "price", "between": [None, 0.5]})
)
leaves = leaves.filter(lambda leaf: any(c.isalnum() for c in str(leaf.get("equals", "x"))))
conditions = st.just({}) | st.recursive(
    leaves,
    lambda below: (
        st.builds(
            lambda key, parts: {key: parts}, st.sampled_from(["all", "any"]), st.lists(below, min_size=1, max_size=3)
        )
        | below.map(lambda part: {"not": part})
    ),
    max_leaves=5,
)
spans = st.tuples(st.integers(0, 700), st.integers(701, 1440)).map(lambda span: (span,))
hours = st.builds(Hours, st.dictionaries(st.integers(0, 6), spans, max_size=7))
facts = st.builds(AgentFacts, st.none() | st.sampled_from(["UTC", "America/Chicago"]), st.none() | hours)
facts = facts.filter(lambda f: f.zone is not None or f.hours is not None)
receivers = st.sampled_from([ANA, BEN, CY, CY2, NOMAIL])
members = st.lists(receivers, unique=True, max_size=4).flatmap(
    lambda ids: st.tuples(*(st.builds(Member, st.just(i), st.integers(0, 100)) for i in ids))
)


seconds = st.sampled_from([0, 1, 3600])


@st.composite
def configs(draw: st.DrawFn) -> Config:
    team_names = sorted(draw(st.lists(texts, unique_by=str.casefold, max_size=2)))
    teams = []
    whole_teams = st.just(())
    for name in team_names:
        some = draw(members.filter(bool)) + draw(whole_teams)
        teams.append(TeamConfig(name, "North") if draw(st.booleans()) else TeamConfig(name, None, some))
        one = st.builds(TeamMember, st.just(name), st.none() | st.integers(0, 100), st.booleans())
        whole_teams |= one.map(lambda member: (member,))
    queue_names = sorted(draw(st.lists(texts, unique_by=str.casefold, max_size=4)))
    queues = []
    for at, name in enumerate(queue_names):
        policies = [
            NobodyPolicy(),
            NobodyPolicy(WhenNobody.LEAVE_UNASSIGNED),
            NobodyPolicy(WhenNobody.DEFAULT_AGENT, agent_id=BEN),
        ]
        policies += [NobodyPolicy(WhenNobody.FALLBACK_QUEUE, queue=other) for other in queue_names[:at]]
        queues.append(QueueConfig(name, draw(members) + draw(whole_teams), draw(st.sampled_from(policies))))
    targets = [ConfigTarget(TargetKind.EXISTING_OWNER), *(ConfigTarget(TargetKind.QUEUE, queue=q) for q in queue_names)]
    targets += [ConfigTarget(TargetKind.AGENT, agent_id=a) for a in (ANA, NOMAIL)]
    chains = st.lists(st.sampled_from(targets), unique=True, min_size=1, max_size=3).map(tuple)
    chains |= st.just((ConfigTarget(TargetKind.LEAVE_ALONE),))
    ranked = members.filter(bool).map(lambda those: ConfigTarget(TargetKind.QUEUE, agents=those))
    chains |= st.tuples(ranked, *(st.just(ConfigTarget(TargetKind.QUEUE, team=name)) for name in team_names[:1]))
    rules = [
        RuleConfig(name, draw(st.sampled_from(Role)), draw(conditions), draw(chains))
        for name in draw(st.lists(texts, unique_by=str.casefold, max_size=3))
    ]
    refs = st.frozensets(st.sampled_from(["1", "007", "NO", "x y"]), max_size=3)
    users = draw(st.frozensets(st.sampled_from(["1", "007", "~"]), max_size=2))
    return Config(
        unassigned=UnassignedDefinition(users, draw(refs), draw(st.booleans())),
        default_queue=draw(st.none() | st.sampled_from(queue_names)) if queue_names else None,
        released=draw(st.sampled_from(Released)),
        returns_per_day=draw(st.sampled_from([0, 5, 7])),
        settle=draw(
            st.builds(SettleTimes, seconds, st.dictionaries(st.sampled_from(["NO", "5", "a: b", "sources"]), seconds))
        ),
        agents=draw(st.dictionaries(receivers, facts, max_size=3)),
        teams=tuple(teams),
        queues=tuple(queues),
        rules=tuple(rules),
    )


@settings(max_examples=150, deadline=None)
@given(configs())
def test_every_configuration_survives_its_export(config: Config) -> None:
    text = export(config, AGENTS)
    back = load(text)
    assert back == config
    assert digest(back) == digest(config)
    assert yaml.safe_load(text), "other tools can read it too"


def test_slips_about_teams_are_noted() -> None:
    text = (
        "version: 1\nteams:\n  North: {members: ['12', '13']}\n  South: {members: [{agent: no, weight: 0}]}\n"
        "  Spare: {members: ['12']}\nqueues:\n  A: {members: [{team: North}, '12', {team: South, nested: true}]}\n"
        "default_queue: A\n"
    )
    assert {str(note) for note in warnings(load(text))} == {
        'team "Spare": nothing uses it; name it in a queue or a rule, or remove it',
        'queue "A": 1 agent(s) named in it also come(s) with a team; each is a member once, with the weight written '
        "beside them",
        "team South: has no members who take turns; give somebody a weight above 0",
    }


# -- digest ---------------------------------------------------------------------------------------------------
def test_the_digest_is_of_the_meaning() -> None:
    base = load(WHOLE)
    same = WHOLE.replace('"13"', "'13'").replace("ponds: [7]", 'ponds: ["7"]').replace("BEN@", "ben@")
    same = "# a comment\n" + same.replace("  Austin:\n    members: [ben@example.com]", "  Austin:\n    members: ['13']")
    assert digest(load(same)) == digest(base)
    assert len(digest(base)) == 32


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("unclaimed: true", "unclaimed: false"),
        ("default_queue: Everyone", "default_queue: Austin"),
        ("released: leave", "released: route_again"),
        ("America/Chicago", "America/Denver"),
        ("09:00-17:00", "09:00-17:30"),
        ("weight: 3", "weight: 4"),
        ("per_day: 3", "per_day: 4"),
        ("default: 5", "default: 6"),
        ("Flex: 20", "Flex: 21"),
        ('[ana@example.com, {agent: "13", weight: 3}]', '[{agent: "13", weight: 3}, ana@example.com]'),
        ("default_agent: Nora Nomail", "default_agent: ana@example.com"),
        ("at_least: 400000", "at_least: 400001"),
        ("else: [existing_owner, ", "else: ["),
        ("role: collaborator", "role: owner"),
        ("name: With Ben", "name: With Ben too"),
    ],
)
def test_the_digest_sees_every_change(old: str, new: str) -> None:
    assert WHOLE.count(old) == 1
    assert digest(load(WHOLE.replace(old, new))) != digest(load(WHOLE))


def test_the_order_of_rules_counts_and_that_of_queues_does_not() -> None:
    first, second = "- {name: a, to: existing_owner}\n", "- {name: b, to: leave_alone}\n"
    head = "version: 1\nrules:\n"
    assert digest(load(head + first + second)) != digest(load(head + second + first))
    one, two = "  A: {members: ['12']}\n", "  B: {members: ['13']}\n"
    assert load("version: 1\nqueues:\n" + one + two) == load("version: 1\nqueues:\n" + two + one)


# -- warnings -------------------------------------------------------------------------------------------------
def test_a_sound_configuration_has_no_warnings() -> None:
    text = """\
version: 1
default_queue: A
queues:
  A: {members: [ana@example.com], when_nobody: {fallback_queue: B}}
  B: {members: [ben@example.com]}
rules:
- {name: r, when: {field: city, equals: Austin}, to: {queue: B}}
"""
    assert warnings(load(text)) == []


def test_warnings() -> None:
    config = load("""\
version: 1
agents:
  ana@example.com: {hours: {}}
queues:
  Empty: {members: [{agent: ben@example.com, weight: 0}], when_nobody: leave_unassigned}
  Unused: {members: [ana@example.com]}
rules:
- {name: All of Texas, when: {field: state, equals: TX}, to: {queue: Empty}}
- {name: Austin, when: {all: [{field: state, equals: tx}, {field: city, equals: Austin}]}, to: existing_owner}
""")
    told = [str(note) for note in warnings(config)]
    assert [text.split(":")[0] for text in told] == [
        'rule "Austin"',
        'queue "Empty"',
        'queue "Unused"',
        "default_queue",
        "agents",
    ]
    assert "All of Texas" in told[0]
    assert "leave_unassigned" in told[1]


# -- whatever comes in ----------------------------------------------------------------------------------------
PIECES = (
    "version: 1\n|rules:\n|- |  |name: r\n|to: |{|}|[|]|queue: A|queues:\n|A:\n|: |when: |field: |city|equals: |&a |*a"
    "|'|!!str |>\n"
    '|"|\\u0000|\\ud800|\n|---\n|agents:\n|ana@example.com: |hours: |mon: |? |%YAML 1.2\n|\t|~|members: |unassigned: '
)
pieces = st.sampled_from(PIECES.split("|"))


def read_or_refuse(text: str | bytes) -> tuple[Config | None, tuple[ConfigProblem, ...]]:
    try:
        return load(text), ()
    except ConfigProblems as error:
        return None, error.problems


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60) | st.lists(pieces, max_size=14).map("".join))
def test_nothing_but_configproblems_is_raised(text: str | bytes) -> None:
    config, found = read_or_refuse(text)
    assert (config is None) == bool(found)
    assert all(p.line >= 1 and p.column >= 1 and p.what and p.fix for p in found)
    if config is not None:
        assert load(export(config, AGENTS)) == config


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["A", "12", "hold", "TX", "", "leave_alone"]),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(
            st.sampled_from(["agent", "queue", "team", "all", "field", "weight", "nested", "x"]), below, max_size=3
        )
    ),
    max_leaves=6,
)
KEYS = [
    ("returns",), ("returns", "per_day"), ("settle",), ("settle", "default"), ("settle", "sources"),
    ("unassigned",), ("unassigned", "users"), ("default_queue",), ("released",), ("agents",), ("agents", "12"),
    ("agents", "12", "hours"), ("queues",), ("queues", "A"), ("queues", "A", "members"), ("queues", "A", "when_nobody"),
    ("agents", "12", "leave"), ("agents", "12", "holidays"), ("agents", "12", "caps"), ("agents", "12", "caps", "day"),
    ("caps_zone",), ("closed_stages",), ("queues", "A", "quiet_hours"), ("queues", "A", "skip_policy"),
    ("queues", "A", "quiet_hours", "zone"), ("rules",), ("rules", 0),
    ("rules", 0, "name"), ("rules", 0, "when"), ("rules", 0, "to"), ("rules", 0, "else"),
    ("rules", 0, "role"), ("teams",), ("teams", "T"), ("teams", "T", "members"), ("queues", "A", "members", 0),
    ("rules", 0, "to", "agents"),
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KEYS), json_values)
def test_any_value_in_any_place_is_read_or_refused_with_words(path: tuple[str | int, ...], value: object) -> None:
    whole = yaml.safe_load(
        "{version: 1, unassigned: {users: []}, returns: {}, settle: {},"
        " agents: {'12': {zone: UTC, hours: {}, leave: [], holidays: {}, caps: {}}},"
        " teams: {T: {members: ['12']}}, queues: {A: {members: [{team: T}], quiet_hours: {}, skip_policy: {}}},"
        " rules: [{name: r, when: {}, to: {agents: ['12']}, else: [existing_owner]}]}"
    )
    at = whole
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    config, found = read_or_refuse(yaml.safe_dump(whole))
    assert (config is None) == bool(found)


# -- the page -------------------------------------------------------------------------------------------------
def _examples() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)


def test_the_whole_example_of_the_page_is_sound() -> None:
    config = load(next(text for text in _examples() if text.startswith("# A whole example")))
    assert warnings(config) == []
    assert config.rules
    assert config.agents
    assert len(config.queues) > 1
    assert load(export(config, AGENTS)) == config


def test_the_examples_of_places_and_times_are_sound() -> None:
    queue = "version: 1\ndefault_queue: Everyone\nqueues: {Everyone: {members: [ana@example.com]}}\n"
    (example,) = (text for text in _examples() if text.startswith("zone: "))
    notes = warnings(load(queue + example))
    assert ["by its place alone" in note.text for note in notes] == [True], "both may match downtown; the order decides"


def test_the_page_explains_every_key() -> None:
    page = DOCS.read_text("utf-8")
    keys = set(
        re.findall(r'"([a-z_]+)": \{', (DOCS.parents[1] / "connector" / "config.schema.json").read_text("utf-8"))
    )
    keys -= {"properties", "items", "if", "then", "name", "target", "refs", "seconds", "version", "type"}
    keys -= {"extra_day", "cap", "policy", "member", "some_members"}  # names of parts of the schema, not keys
    assert len(keys) > 15
    assert {key for key in keys if f"`{key}`" not in page} == set()


@pytest.mark.parametrize(
    ("condition", "what", "fix"),
    [
        ("{field: arrival_hour, equals: 9}", "without a time zone", "write zone: America/Chicago at the top"),
        ("{field: arrival_hour, equals: 24, zone: UTC}", "no hour of the day", "from 0 to 23"),
        ("{field: arrival_hour, between: [22, 6], zone: UTC}", "low side above", "write any: with at_least"),
        ("{field: arrival_weekday, one_of: [mon, Someday], zone: UTC}", "no day of the week", "such as mon"),
        ("{field: arrival_hour, equals: 9, zone: Mars/Base}", "no time zone", "such as America/Chicago"),
        ("{field: city, equals: A, zone: UTC}", "no clock", "remove it"),
        ('{field: zip, between: ["787", "78799"]}', "unequal length", "same number of characters"),
        ("{field: zip, between: [78799, 78701]}", "low side above", "swap the two codes"),
        ('{field: city, between: ["a", "b"]}', "does not fit", "use equals"),
        ("{field: location, equals: here}", "does not fit a field of a place", "within_radius, in_polygon"),
        ("{field: location, within_radius: {lat: 91, lon: 0, km: 1}}", "no place on Earth", "latitude (-90 to 90)"),
        ("{field: location, within_radius: {lat: 1, lon: 1}}", "no circle", "km: 10}, or miles"),
        ("{field: location, within_radius: {lat: 1, lon: 1, km: 0}}", "no usable distance", "above 0"),
        ("{field: location, in_polygon: [[1, 1], [2, 2]]}", "not a list of corners", "3 to 1000"),
        ("{field: location, in_polygon: [[1, 1], [2, 2], [3, 3]]}", "on one line", "in order round it"),
        ("{field: location, in_polygon: [[1, 1], [2, x], [3, 1]]}", "no place on Earth", "then longitude"),
    ],
)
def test_places_codes_and_times_are_checked(condition: str, what: str, fix: str) -> None:
    (found,) = problems(rule(condition))
    assert what in found.what
    assert fix in found.fix


def test_a_zone_and_a_country_are_checked_read_and_given_back() -> None:
    head = "version: 1\nzone: America/Chicago\ncountry: NO\n"
    hours = (
        rule("{field: arrival_hour, at_least: 9}").replace("version: 1\n", "").replace("{queue: A}", "same_household")
    )
    config = load(head + hours)
    assert (config.zone, config.country) == ("America/Chicago", "NO")
    assert config.rules[0].when == {"field": "arrival_hour", "at_least": 9}
    assert config.rules[0].targets == (ConfigTarget(TargetKind.SAME_HOUSEHOLD),)
    assert load(export(config, AGENTS)) == config
    assert len({digest(load(f"version: 1\n{more}")) for more in ("", "zone: UTC", "country: US", "country: NO")}) == 4
    wrong = problems("version: 1\nzone: America/Chicagoo\ncountry: Norway\n" + hours)
    assert [(p.line, p.fix) for p in wrong] == [
        (2, 'did you mean "America/Chicago"?'),
        (3, "write the two letters of ISO 3166 such as US or CA"),
    ]
