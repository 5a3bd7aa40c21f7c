"""Fairness through the service: shares with their reasons, exact across crashes, bounded however long the ledger is."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID
from xml.etree import ElementTree

import pytest
import sqlalchemy as sa

from connector import fairness, returns, tenants
from connector.database import unit
from connector.fairness_chart import chart
from connector.settings import Settings
from routing import tables as t
from tests.bench import long_past
from tests.connector.cli_rig import Cli, command_line
from tests.rig import ANA, BEN, CY, DEE, ELI, Rig, until

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
    assert "no lead of this time came from a rule 'Wob'" in turnlock("fairness", "acme", "--rule", "Wob", code=1).stderr

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


TURNLESS = """\
default_queue: All
queues:
  All: {members: ['12', '13', '14']}
  Late: {members: ['13'], when_nobody: {default_agent: '16'}}
rules:
  - {name: Late, when: {field: source, equals: Late}, to: {queue: Late}}
  - {name: Keys, when: {field: source, equals: Keys}, to: {agent: '15'}}
"""


def without_turn(rig: Rig, **of: Any) -> dict[str, dict[str, int]]:
    """Leads without a turn of the last two days, by agent (CRM id) and the way to them."""
    today = datetime.now(UTC).date()
    told = fairness.report(rig.runtime, rig.tenant, since=today - timedelta(days=1), until=today, **of)
    rows = [row for period in told["periods"] for row in period["agents"] if row["without_turn"]]
    assert all(row["without_turn"] == sum(row["without_turn_by"].values()) for row in rows)
    assert sum(period["without_turn"] for period in told["periods"]) == sum(row["without_turn"] for row in rows)
    return {row["agent"]["ref"]: row["without_turn_by"] for row in rows}


def test_leads_without_a_turn_stand_beside_the_shares(make_rig: Callable[..., Rig], turnlock: Cli) -> None:
    rig = make_rig(config=TURNLESS)
    kim = {"emails": ["kim@example.com"]}
    mine = rig.assign(**kim)
    rig.burst(2)
    rig.assign(**kim)
    named = rig.burst(3, source="Keys")
    rig.pause(BEN)
    rig.burst(2, source="Late")
    rig.settle_owners()
    asked = returns.ask(rig.runtime, rig.tenant, rig.lead_id(named[0]), returns.ReturnReason.BOGUS, actor="dee")
    returns.approve(rig.runtime, rig.tenant, UUID(asked["return_id"]), void=True, actor="mia")
    # The CRM takes no owner: refused, and nobody else is named.
    rig.sandbox.fault("lost_owner", method="PUT", times=2)
    refused = rig.create(source="Keys")
    until(lambda: rig.assignments(refused) == [(DEE, "refused")], what="a refusal")
    rig.sandbox.set_owner(int(refused), int(CY))  # before the CRM is asked again whether it takes Dee
    until(lambda: rig.standing(refused)["state"] == "owned", what="the human's choice")
    rig.settle_owners()
    had = {mine: {"existing_owner": 1}, DEE: {"agent": 2}, ELI: {"default_agent": 2}}
    assert without_turn(rig) == had

    told = turnlock.json("fairness", "acme", "--since", "2d")
    rows = {row["agent"]["ref"]: row for period in told["periods"] for row in period["agents"]}
    assert sum(row["actual"] for row in rows.values()) == 3
    assert (rows[ELI]["expected"], rows[ELI]["actual"], rows[ELI]["actual_share"]) == (0, 0, 0)
    assert "2 (default agent 2)" in turnlock("fairness", "acme").stdout
    lines = list(csv.DictReader(io.StringIO(turnlock("fairness", "acme", "--format", "csv").stdout)))
    (eli,) = (line for line in lines if line["agent_ref"] == ELI)
    assert (eli["without_turn"], eli["without_turn_default_agent"], eli["without_turn_agent"]) == ("2", "2", "0")
    assert "2 without a turn" in turnlock("fairness", "acme", "--format", "svg").stdout
    with rig.runtime.engine.connect() as conn:
        late = conn.execute(sa.select(t.queues.c.queue_id).where(t.queues.c.name == "Late")).scalar_one()
    assert without_turn(rig, queue_id=late) == {ELI: {"default_agent": 2}}
    assert without_turn(rig, rule="Keys") == {DEE: {"agent": 2}}

    # A write that is not settled is set aside while everything else is rolled up, and counts once it is.
    tenants.set_sending(rig.runtime, rig.tenant, False)
    waiting = rig.create(source="Keys")
    until(lambda: rig.assignments(waiting), what="a decision")
    rig.sql("UPDATE assignments SET assigned_at = assigned_at - interval '2 hours' WHERE tenant_id = :t")
    now_too = had | {DEE: {"agent": 3}}
    assert without_turn(rig) == now_too
    folded = "SELECT coalesce(sum(leads), 0) FROM turnless_days WHERE tenant_id = :t"
    assert rig.one(folded) == 6  # the returned one too, which is taken off on the day of its return
    assert rig.one("SELECT jsonb_array_length(unsettled) FROM turnless_marks WHERE tenant_id = :t") == 1
    rig.sandbox.set_owner(int(waiting), int(CY))  # a human is quicker
    tenants.set_sending(rig.runtime, rig.tenant, True)
    until(lambda: rig.assignments(waiting) == [(DEE, "superseded")], what="the human's choice")
    assert without_turn(rig) == had
    fairness.rebuild(rig.runtime, rig.tenant.tenant_id)
    assert without_turn(rig) == had
    assert rig.one("SELECT jsonb_array_length(unsettled) FROM turnless_marks WHERE tenant_id = :t") == 0


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
def test_a_report_over_a_million_decisions_reads_a_handful_of_rows(
    make_rig: Callable[..., Rig], database: Settings
) -> None:
    rig = make_rig(config=CONFIG, worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    million = 1_000_000
    long_past.write(database.migrate_url or "", rig, million, began=datetime(2026, 1, 1, tzinfo=UTC))
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
    # Nine of ten took a turn; the last lead of the thirtieth day is the first of the next.
    assert (period["turns"], period["without_turn"]) == (million // 1000 * 270, million // 1000 * 30 - 1)
    assert not [statement for statement in heard if " ledger" in statement]
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
