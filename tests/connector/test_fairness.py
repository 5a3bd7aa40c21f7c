"""Fairness through the service: shares with their reasons, exact across crashes, bounded however long the ledger is."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from typing import Any
from xml.etree import ElementTree

import pytest
import sqlalchemy as sa

from connector import fairness
from connector.database import unit
from connector.fairness_chart import chart
from connector.settings import Settings
from routing import tables as t
from tests.connector.cli_rig import Cli, command_line
from tests.rig import ANA, BEN, CY, Rig

CONFIG = """\
default_queue: All
queues:
  All: {members: [{agent: '12', weight: 2}, '13', '14']}
rules:
  - {name: Web, when: {field: source, equals: Web}, to: {queue: All}}
"""


@pytest.fixture
def turnlock(database: Settings) -> Iterator[Cli]:
    with command_line(database) as found:
        yield found


def stored(rig: Rig) -> list[str]:
    """Every sum, and how far the ledgers are folded."""
    return sorted(
        json.dumps([str(value) if not isinstance(value, dict) else value for value in row], sort_keys=True)
        for name in ("fairness_days", "fairness_marks")
        for row in rig.rows(sa.text(f"SELECT * FROM {name}"))
    )


def test_each_agents_share_and_why_it_differs(make_rig: Callable[..., Rig], turnlock: Cli) -> None:
    rig = make_rig(config=CONFIG)
    rig.burst(8, source="Web")
    rig.pause(BEN)
    rig.burst(6, source="Portal")
    rig.settle_owners()
    told = turnlock.json("fairness", "acme", "--queue", "All", "--since", "7d")
    (period,) = told["periods"]
    rows = {row["agent"]["ref"]: row for row in period["agents"]}
    assert (period["turns"], period["kept"]) == (14, 14)
    owners = rig.turns()
    for ref, weight in ((ANA, 2), (BEN, 1), (CY, 1)):
        row = rows[ref]
        because = row["because"]
        assert row["actual"] == owners.count(ref)
        assert row["expected"] == pytest.approx(14 * weight / 4, abs=0.01)
        assert row["in_line"] == 14
        reasons = sum(because["absent"].values()) + because["others_absent"] + because["order_of_the_line"]
        assert row["difference"] == pytest.approx(reasons, abs=0.01)
        assert abs(because["order_of_the_line"]) < 1.5
        assert row["by_weight"] == pytest.approx(14 * weight / 4 - 14 / 3, abs=0.01)
    assert rows[BEN]["because"]["absent"] == {"paused": -1.5}
    assert rows[ANA]["because"]["others_absent"] == pytest.approx(1.0, abs=0.01)
    assert rows[CY]["longest_wait"]["turns"] >= 2
    (web,) = turnlock.json("fairness", "acme", "--rule", "Web", "--per", "day")["periods"]
    assert web["turns"] == 8
    assert "no turn of this time came from a rule 'Wob'" in turnlock("fairness", "acme", "--rule", "Wob", code=1).stderr

    text = turnlock("fairness", "acme").stdout
    assert "absent (paused) -1.50" in text
    lines = list(csv.DictReader(io.StringIO(turnlock("fairness", "acme", "--format", "csv").stdout)))
    assert {line["agent_ref"]: line["absent_paused"] for line in lines} == {ANA: "0", BEN: "-1.5", CY: "0"}
    picture = ElementTree.fromstring(turnlock("fairness", "acme", "--format", "svg").stdout)
    said = "".join(picture.itertext())
    assert "Ana Alvarez" in said
    assert "14 turns" in said
    later = turnlock.json("fairness", "acme", "--since", "2020-01-01", "--until", "2020-02-01")
    assert later["periods"] == []
    ElementTree.fromstring(chart(later))


def test_a_turn_given_back_long_after_is_counted_on_its_own_day(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=CONFIG)
    rig.burst(4)
    rig.settle_owners()
    fairness.roll_up(rig.runtime, rig.tenant.tenant_id)
    # As if the turns were of last month: what is folded never changes again.
    rig.sql("UPDATE fairness_days SET day = day - 40 WHERE tenant_id = :t")
    before = rig.one("SELECT jsonb_agg(counts ORDER BY agent_id)::text FROM fairness_days WHERE tenant_id = :t")
    rig.sandbox.fault("lost_owner", method="PUT", times=2)  # the CRM keeps no owner: refused, and the turn comes back
    rig.assign()
    rig.settle_owners()
    assert rig.void_turns()
    fairness.roll_up(rig.runtime, rig.tenant.tenant_id)
    old = "SELECT jsonb_agg(counts ORDER BY agent_id)::text FROM fairness_days WHERE tenant_id = :t AND day < "
    assert rig.one(old + "now() - interval '20 days'") == before
    told = fairness.report(rig.runtime, rig.tenant, since=datetime.now(UTC).date(), until=datetime.now(UTC).date())
    (period,) = told["periods"]
    assert sum(row["because"]["given_back"] for row in period["agents"]) == -1


def test_sums_are_exact_across_crashes_and_can_be_made_anew(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(config=CONFIG)
    rig.wait_chores()
    rig.stop_worker()
    rig.start_worker()
    monkeypatch.setattr(fairness, "BATCH", 3)
    rig.burst(10)
    rig.settle_owners()
    rig.stop_worker()
    keep, calls = fairness._keep, [0]

    def crashing(*args: Any) -> None:
        keep(*args)
        calls[0] += 1
        if calls[0] % 2:
            raise RuntimeError("killed in the middle")

    monkeypatch.setattr(fairness, "_keep", crashing)
    for _ in range(30):
        try:
            if fairness.roll_up(rig.runtime, rig.tenant.tenant_id):
                break
        except RuntimeError:
            pass
    monkeypatch.setattr(fairness, "_keep", keep)
    assert calls[0] > 4
    in_steps = stored(rig)
    monkeypatch.setattr(fairness, "BATCH", 5000)
    fairness.rebuild(rig.runtime, rig.tenant.tenant_id)
    assert stored(rig) == in_steps
    assert sum(json.loads(row)[5]["taken"] if "taken" in row else 0 for row in in_steps) == 10


@pytest.mark.proof
def test_a_report_over_a_million_decisions_reads_a_handful_of_rows(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=CONFIG, worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    million = 1_000_000
    _a_million(rig, million)
    while not fairness.roll_up(rig.runtime, rig.tenant.tenant_id, batches=10):
        pass
    with unit(rig.runtime.engine) as (conn, _):
        conn.execute(sa.text("ANALYZE fairness_days"))
        days = conn.execute(sa.text("SELECT count(*) FROM fairness_days")).scalar_one()
    assert days == 100 * 3
    heard: list[str] = []

    def hear(_: Any, __: Any, statement: str, *___: Any) -> None:
        heard.append(statement)

    sa.event.listen(rig.runtime.engine, "before_cursor_execute", hear)
    told = fairness.report(rig.runtime, rig.tenant, since=date(2026, 1, 1), until=date(2026, 1, 30))
    sa.event.remove(rig.runtime.engine, "before_cursor_execute", hear)
    (period,) = told["periods"]
    assert period["turns"] == million // 100 * 30
    assert not [statement for statement in heard if " ledger" in statement or " decisions" in statement]
    with unit(rig.runtime.engine) as (conn, _):
        plan = conn.execute(
            sa.text(
                "EXPLAIN (ANALYZE, FORMAT JSON) SELECT day, agent_id, counts FROM fairness_days "
                "WHERE tenant_id = :t AND queue_id = ANY(ARRAY(SELECT queue_id FROM queues WHERE tenant_id = :t)) "
                "AND day BETWEEN '2026-01-01' AND '2026-01-30'"
            ),
            {"t": rig.tenant.tenant_id},
        ).scalar_one()
    assert plan[0]["Plan"]["Actual Rows"] <= 30 * 3


def _a_million(rig: Rig, count: int) -> None:
    """Turns of a hundred days, as a queue of three writes them: A B A C over and over, without a single absence."""
    with unit(rig.runtime.engine) as (conn, _):
        queue = conn.execute(sa.select(t.queues.c.queue_id)).scalar_one()
        agents = [str(rig.agent_id(ref)) for ref in (ANA, BEN, ANA, CY)]
        given = {"t": rig.tenant.tenant_id, "q": queue, "n": count, "agents": agents, "per": count // 100}
        conn.execute(sa.text("SET LOCAL statement_timeout = 0"))
        conn.execute(
            sa.text(
                "WITH lead AS (INSERT INTO leads (tenant_id, lead_id) VALUES (:t, gen_random_uuid()) RETURNING lead_id)"
                ", "
                "made AS (SELECT n, gen_random_uuid() AS id, (CAST(:agents AS uuid[]))[1 + (n - 1) % 4] AS agent, "
                "timestamptz '2026-01-01 12:00Z' + ((n - 1) / :per) * interval '1 day' AS at "
                "FROM generate_series(1, :n) AS n), "
                "decided AS (INSERT INTO decisions (tenant_id, decision_id, lead_id, role, seq, decided_at, cause, "
                "outcome, queue_id, agent_id, turn, config_version, record) SELECT :t, id, lead_id, 'owner', n, at, "
                "'new', "
                "'assigned', :q, agent, n, 1, '{}' FROM made, lead), "
                "taken AS (INSERT INTO turns (tenant_id, queue_id, turn, decision_id, agent_id, taken_at) "
                "SELECT :t, :q, n, id, agent, at FROM made) "
                "INSERT INTO ledger (tenant_id, queue_id, seq, kind, at, actor, data) "
                "SELECT :t, :q, n + 1, 'turn', at, 'turnlock', jsonb_build_object('turn', n, 'agent', agent, 'how', "
                "'line', 'owed', NULL, 'lost', '[]'::jsonb, 'unavailable', '[]'::jsonb, 'decision', id) FROM made"
            ),
            given,
        )
        conn.execute(
            sa.text("UPDATE queues SET seq = :n + 1, position = :n WHERE tenant_id = :t AND queue_id = :q"), given
        )
