"""Before a configuration is applied the plan says what happens; afterwards each version is kept and can return."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from connector import config_kept, configuration
from connector.config_model import Config, KnownAgent
from connector.draft import rehearse
from connector.settings import Settings
from routing import store
from routing import tables as t
from tests.connector.cli_rig import Cli, command_line
from tests.rig import ANA, BEN, CY, DEE, Rig

FIRST = """\
version: 1
default_queue: All
queues:
  All:
    members: ['12', '13', '14']
  Luxury:
    members: ['15']
rules:
  - {name: Web, when: {field: source, equals: Web}, to: {queue: Luxury}}
  - {name: Texas, when: {field: state, equals: TX}, to: {queue: All}}
  - {name: Old, when: {field: stage, equals: Old}, to: leave_alone}
"""
SECOND = """\
version: 1
default_queue: All
released: leave
queues:
  All:
    members: [{agent: '12', weight: 3}, '14', '15']
    when_nobody: leave_unassigned
  Luxury:
    members: ['15']
rules:
  - {name: Texas, when: {field: state, equals: TX}, to: {queue: Luxury}}
  - {name: Web, when: {field: source, equals: Web}, to: {queue: Luxury}}
  - {name: Florida, when: {field: state, equals: FL}, to: {queue: All}}
"""


@pytest.fixture
def turnlock(database: Settings) -> Iterator[Cli]:
    with command_line(database) as found:
        yield found


def everything(rig: Rig) -> dict[str, list[Any]]:
    """All that a configuration touches, row by row."""
    tables = ("tenants", "queues", "members", "rules", "agents", "ledger", "config_versions", "owed_turns")
    return {
        name: sorted(map(str, rig.rows(sa.text(f"SELECT * FROM {name} WHERE tenant_id = :t").bindparams(
            t=rig.tenant.tenant_id
        ))))
        for name in tables
    }  # fmt: skip


def lines(rig: Rig) -> dict[str, Any]:
    """Every line as stored."""
    with rig.runtime.engine.connect() as conn:
        row = store.tenant_row(conn, rig.tenant.tenant_id)
        ids = list(conn.execute(sa.select(t.queues.c.queue_id)).scalars())
        return {q.name: q.line for q in store.load_queues(conn, rig.tenant.tenant_id, row.flags, ids).values()}


def test_the_plan_names_every_difference_and_changes_nothing(
    make_rig: Callable[..., Rig], turnlock: Cli, tmp_path: Path
) -> None:
    rig = make_rig(config=FIRST.removeprefix("version: 1\n"))
    assert [rig.assign(state="NY", source="Portal") for _ in range(2)] == [ANA, BEN]
    rig.settle()
    rig.stop_worker()
    before = everything(rig)
    (tmp_path / "second.yaml").write_text(SECOND)
    shown = turnlock.json("config", "plan", "acme", str(tmp_path / "second.yaml"))
    assert everything(rig) == before
    assert (shown["version"], shown["changed"]) == (2, True)
    # The agents go by their emails in an export, and so in the plan.
    said = {(one["how"], one["path"], json.dumps(one["before"]), json.dumps(one["after"])) for one in shown["changes"]}
    assert said == {
        ("change", "released", '"route_again"', '"leave"'),
        ("add", "queues.All.members.ana.alvarez@example.com.weight", "null", "3"),
        ("remove", "queues.All.members.ben.brown@example.com", "null", "null"),
        ("add", "queues.All.members.dee.davis@example.com", "null", "null"),
        ("change", "queues.All.when_nobody", '"hold"', '"leave_unassigned"'),
        ("remove", "rules.Old", json.dumps({"when": {"field": "stage", "equals": "Old"}, "to": "leave_alone"}), "null"),
        ("change", "rules.Texas.to.queue", '"All"', '"Luxury"'),
        ("move", "rules.Texas", "2", "1"),
        ("add", "rules.Florida", "null",
         json.dumps({"when": {"field": "state", "equals": "FL"}, "to": {"queue": "All"}})),
    }  # fmt: skip
    (line,) = shown["lines"]
    assert (line["queue"], line["position"], line["moves"]) == ("All", 2, ["reweight", "leave", "join"])
    rows = {m["agent"]["ref"]: (m["what"], m["place_before"], m["weight_after"]) for m in line["members"]}
    assert rows == {
        CY: ("kept", 1, 1),
        ANA: ("reweighted", 2, 3),
        BEN: ("leaves", 3, None),
        DEE: ("joins", None, 1),
    }
    text = turnlock("config", "plan", "acme", str(tmp_path / "second.yaml")).stdout
    for part in (
        "Applying makes version 2 of acme",
        "  ~ released: route_again -> leave",
        "  - queues.All.members.ben.brown@example.com",
        "  ~ rules.Texas: moved from place 2 to 1 of the list",
        "Line of queue All, position 2:",
        "joins at the back",
        "Plan: 3 to add, 3 to change, 1 to move, 2 to remove. Nothing was applied.",
    ):
        assert part in text
    assert everything(rig) == before


def test_what_the_plan_says_of_the_lines_is_what_applying_does(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=FIRST.removeprefix("version: 1\n"))
    for _ in range(2):
        rig.assign(state="NY", source="Portal")
    rig.settle()
    rig.stop_worker()
    draft = rehearse(rig.runtime, rig.tenant, SECOND)
    configuration.apply(rig.runtime, rig.tenant, SECOND, "test")
    assert {queue.name: queue.line for queue in draft.after.values()} == lines(rig)
    kinds = rig.rows(
        sa.select(t.ledger.c.kind).where(t.ledger.c.actor == "test", t.ledger.c.kind != "checkpoint").order_by(
            t.ledger.c.queue_id, t.ledger.c.seq
        )
    )  # fmt: skip
    assert [row.kind for row in kinds] == [move.kind for move in draft.moves]
    assert rehearse(rig.runtime, rig.tenant, SECOND).changed is False
    rig.audit()


def test_a_plan_refuses_with_every_problem_at_once(make_rig: Callable[..., Rig], turnlock: Cli, tmp_path: Path) -> None:
    rig = make_rig(worker=False)
    before = everything(rig)
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        "version: 1\nqueues:\n  A: {members: ['12'], when_nobody: {fallback_queue: B}}\n"
        "  B: {members: [], when_nobody: {fallback_queue: A}}\n"
        "rules:\n  - {name: X, when: {field: sauce, equals: Web}, to: {queue: A}}\n"
    )
    for command in ("plan", "apply", "check"):
        told = turnlock("config", command, "acme", str(bad), code=1).stderr
        assert "queues fall back in a circle: A -> B -> A; let one of them hold" in told
        assert "names no field of a lead; did you mean source?" in told
    assert everything(rig) == before
    assert "give FILE, or --version" in turnlock("config", "plan", "acme", code=2).stderr


def test_every_version_is_kept_and_rolling_back_resets_nobody(make_rig: Callable[..., Rig], turnlock: Cli) -> None:
    rig = make_rig(config="# by hand\n" + FIRST.removeprefix("version: 1\n"))
    assert [rig.assign(state="NY", source="Portal") for _ in range(2)] == [ANA, BEN]
    turnlock("config", "apply", "acme", "-", text=SECOND)
    assert [rig.assign(state="NY", source="Portal") for _ in range(2)] == [CY, DEE]
    rig.settle()
    # An agent is called otherwise by now: the version is understood all the same.
    rig.sql("UPDATE agents SET email = 'b.brown@example.com' WHERE tenant_id = :t AND email = 'ben.brown@example.com'")
    shown = turnlock.json("config", "plan", "acme", "--version", "1")
    (line,) = shown["lines"]
    assert {m["agent"]["ref"]: m["what"] for m in line["members"]} == {
        ANA: "reweighted",
        CY: "kept",
        BEN: "joins",
        DEE: "leaves",
    }
    done = turnlock.json("config", "rollback", "acme")
    assert (done["version"], done["changed"]) == (3, True)
    assert turnlock("config", "export", "acme").stdout.startswith("version: 1\n# by hand\n")  # comments and all
    assert [(p.agent_id, p.weight) for p in lines(rig)["All"].places].count((rig.agent_id(ANA), 1)) == 1
    assert [rig.assign(state="NY", source="Portal") for _ in range(3)] == [ANA, CY, BEN]
    # Ana had waited longest; Ben is a newcomer, at the back
    rows = turnlock.json("config", "history", "acme")["versions"]
    assert [(r["version"], r["note"], r["in_force"]) for r in rows] == [
        (3, "rollback to version 1", True),
        (2, None, False),
        (1, None, False),
    ]
    assert rows[2]["actor"] == "test"
    assert rows[1]["actor"].startswith("cli")
    assert "rollback to version 1" in turnlock("config", "history", "acme").stdout
    again = turnlock.json("config", "rollback", "acme", "--version", "1")
    assert (again["version"], again["changed"]) == (3, False)
    assert (
        "has no version 9; there are 1 to 3" in turnlock("config", "rollback", "acme", "--version", "9", code=1).stderr
    )
    rig.settle()
    rig.audit()


def test_a_version_means_the_same_for_ever_whatever_its_agents_are_called(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=FIRST.replace("'12'", "ana.alvarez@example.com").removeprefix("version: 1\n"), worker=False)

    def read(version: int) -> tuple[Config, str]:
        with rig.runtime.engine.connect() as conn:
            kept = config_kept.kept(rig.runtime, conn, rig.tenant, version)
            agents = configuration.known_agents(conn, rig.tenant.tenant_id)
            return config_kept.config_of(kept, agents), config_kept.text_again(kept, agents)

    config, text = read(1)
    assert "ana.alvarez@example.com" in text
    # Ana's email is Ben's now: by name alone the version would mean him.
    rig.sql(
        "UPDATE agents SET email = 'a.alvarez@example.com' WHERE tenant_id = :t AND email = 'ana.alvarez@example.com'"
    )
    rig.sql(
        "UPDATE agents SET email = 'ana.alvarez@example.com' WHERE tenant_id = :t AND email = 'ben.brown@example.com'"
    )
    same, other = read(1)
    assert same == config
    assert "a.alvarez@example.com" in other
    agents = [KnownAgent(rig.agent_id(ref), ref, None, ref) for ref in (ANA, BEN, CY, DEE)]
    assert config_kept.config_of(
        config_kept.Kept(1, "", b"", "", None, config_kept.canonical(config, agents)), agents  # type: ignore[arg-type]
    ) == config  # fmt: skip
