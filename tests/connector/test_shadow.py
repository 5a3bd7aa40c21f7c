"""A capability in shadow: it decides beside the live path, writes only its own record, and says where it differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from connector import flags
from connector.errors import TurnlockError
from connector.sandbox import Sandbox
from connector.shadow_report import report
from routing import shadow as pure
from routing import staging
from routing.decide import Bench
from routing.model import Flag
from tests.connector.cli_rig import command_line
from tests.rig import ANA, BEN, CY, Rig, until

RULES = "rules: [{name: web, when: {field: source, equals: Web}, to: {queue: Two}}]\n"
TWO = "default_queue: All\nqueues:\n  All:\n    members: ['12', '13', '14']\n  Two:\n    members: ['13', '14']\n"


def switch(rig: Rig, flag: Flag, mode: str, **more: Any) -> None:
    """One command."""
    assert flags.switch(rig.runtime, rig.tenant.tenant_id, flag, mode, "test", **more)


def off(rig: Rig, *gone: Flag) -> None:
    for flag in gone:
        switch(rig, flag, "off")


def told(rig: Rig, flag: Flag) -> dict[str, Any]:
    """The counts of a flag's last run."""
    (found,) = report(rig.runtime, rig.tenant, flag=flag)["shadows"]
    return dict(found)


def shadows(rig: Rig, flag: Flag) -> list[tuple[str | None, str, str | None]]:
    """Whom the shadow gave each lead to, in order, the verdict and why."""
    rows = rig.rows(
        sa.text(
            "SELECT a.ref, s.verdict, s.why FROM shadow_records s LEFT JOIN agent_refs a USING (tenant_id, agent_id) "
            "WHERE s.tenant_id = :t AND s.flag = :f ORDER BY s.decided_at, s.seq"
        ).bindparams(t=rig.tenant.tenant_id, f=flag.value)
    )
    return [tuple(row) for row in rows]


# -- each flag beside the live path -------------------------------------------------------------------------------


def test_rotation_in_shadow_takes_turns_on_its_own_line_and_the_live_line_stands_still(rig: Rig) -> None:
    assert rig.assign() == ANA
    off(rig, Flag.ROTATION)
    switch(rig, Flag.ROTATION, "shadow")
    assert [rig.assign() for _ in range(4)] == [ANA] * 4
    rig.settle_owners()
    assert shadows(rig, Flag.ROTATION) == [
        (BEN, "different", "turn"),
        (CY, "different", "turn"),
        (ANA, "same", None),
        (BEN, "different", "turn"),
    ]
    assert rig.turns() == [ANA]
    assert rig.position() == 1
    assert len(rig.owner_writes()) == 5
    found = told(rig, Flag.ROTATION)
    assert [found[k] for k in ("decisions", "same", "different", "errors", "clean")] == [4, 1, 3, 0, True]
    assert found["why"] == [
        {"verdict": "different", "why": "turn", "text": "in the rotation it is somebody else's turn", "count": 3}
    ]
    rig.audit()
    # On continues the live line, whatever the shadow's did, and drops that one.
    switch(rig, Flag.ROTATION, "on", min_decisions=4)
    assert rig.one("SELECT count(*) FROM shadow_lines WHERE tenant_id = :t") == 0
    assert [rig.assign() for _ in range(3)] == [BEN, CY, ANA]
    assert len(shadows(rig, Flag.ROTATION)) == 4
    rig.audit()


def test_weights_in_shadow_begin_where_the_live_line_stands_and_follow_its_members(
    make_rig: Callable[..., Rig],
) -> None:
    weighted = "default_queue: All\nqueues: {All: {members: [{agent: '12', weight: 5}, '13', '14']}}\n"
    rig = make_rig(config=weighted)
    off(rig, Flag.SKIPS, Flag.WEIGHTS)
    switch(rig, Flag.WEIGHTS, "shadow")
    assert Counter(rig.assign() for _ in range(7)) == {ANA: 3, BEN: 2, CY: 2}
    assert Counter(who for who, *_ in shadows(rig, Flag.WEIGHTS)) == {ANA: 5, BEN: 1, CY: 1}
    assert {why for *_, why in shadows(rig, Flag.WEIGHTS)} <= {"line", None}
    rig.configure("default_queue: All\nqueues: {All: {members: [{agent: '12', weight: 5}, '13', '15']}}\n")
    for _ in range(7):
        rig.assign()
    assert Counter(who for who, *_ in shadows(rig, Flag.WEIGHTS)[7:]) == {ANA: 5, BEN: 1, "15": 1}
    rig.settle_owners()
    assert rig.position() == 14
    rig.audit()


def test_skips_in_shadow_say_who_would_be_passed_over_and_why(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    off(rig, Flag.SKIPS)
    switch(rig, Flag.SKIPS, "shadow")
    rig.pause(BEN)
    refs = [rig.create()]
    assert rig.wait_owner(refs[0]) == ANA
    refs.append(rig.create())
    assert rig.wait_owner(refs[1]) == BEN
    assert shadows(rig, Flag.SKIPS) == [(ANA, "same", None), (CY, "different", "skip")]
    (difference,) = report(rig.runtime, rig.tenant, differences=10)["differences"]
    assert difference["lead"]["ref"] == refs[1]
    assert (difference["live"]["agent"]["ref"], difference["agent"]["ref"]) == (BEN, CY)
    assert difference["text"].startswith("the live agent is unavailable to the shadow: Ben")
    assert "is paused (paused by the admin; `turnlock resume`)" in difference["text"]
    # The shadow finds nobody: the live path goes on.
    for agent in (ANA, CY):
        rig.pause(agent)
    rig.assign()
    assert shadows(rig, Flag.SKIPS)[-1] == (None, "different", "skip")
    assert rig.alarms() == set()
    rig.audit()


def test_rules_in_shadow_decide_in_other_queues_without_moving_them(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=TWO + RULES)
    off(rig, Flag.RULES)
    switch(rig, Flag.RULES, "shadow")
    assert [rig.assign(source="Web") for _ in range(3)] == [ANA, BEN, CY]
    assert rig.assign(source="Zillow") == ANA
    assert shadows(rig, Flag.RULES) == [
        (BEN, "different", "rule"),
        (CY, "different", "rule"),
        (BEN, "different", "rule"),
        (ANA, "same", None),
    ]
    assert [rig.position("All"), rig.position("Two")] == [4, 0]
    found = report(rig.runtime, rig.tenant, differences=1)["differences"]
    assert found[0]["text"] == "another rule decides: 'web'"
    rig.audit()


def test_a_shadow_leaves_everything_else_as_it_would_be_without_it(make_rig: Callable[..., Rig]) -> None:
    config = TWO.replace("members: ['13', '14']", "members: [{agent: '13', weight: 4}, '14']") + RULES
    watched = make_rig(config=config)
    with Sandbox(retry_scale=0.001) as sandbox:
        plain = watched.neighbour(sandbox)
        plain.configure(config)
        for rig in (watched, plain):
            off(rig, Flag.SKIPS, Flag.WEIGHTS, Flag.RULES)
        switch(watched, Flag.RULES, "shadow")
        for number in range(12):
            if number % 4 == 3:
                for rig in (watched, plain):
                    rig.sandbox.deactivate_agent(int(BEN)) if number == 3 else rig.sandbox.activate_agent(int(BEN))
                    rig.sync()
            source = "Web" if number % 2 else "Zillow"
            assert watched.assign(source=source) == plain.assign(source=source)
        for rig in (watched, plain):
            rig.settle_owners()
            rig.audit()
        assert told(watched, Flag.RULES)["different"] > 3
        for table in ("leads", "lead_roles", "decisions", "assignments", "turns", "ledger", "outbox", "owed_turns"):
            query = f"SELECT count(*) FROM {table} WHERE tenant_id = :t AND {{}}"
            where = "kind <> 'note'" if table == "outbox" else "true"
            assert watched.one(query.format(where)) == plain.one(query.format(where)), table
        for query in (
            "SELECT q.name, q.position, q.floor, q.seq, m.rank, m.tag, m.last_turn FROM queues q "
            "JOIN members m USING (tenant_id, queue_id) WHERE tenant_id = :t ORDER BY 1, 5",
            "SELECT kind, (data - 'decision' - 'agent' - 'passed_over' - 'unavailable' - 'places')::text FROM ledger "
            "WHERE tenant_id = :t ORDER BY queue_id, seq",
            "SELECT cause, outcome, reason, rule, turn FROM decisions WHERE tenant_id = :t ORDER BY decision_id",
        ):
            rows = [rig.rows(sa.text(query).bindparams(t=rig.tenant.tenant_id)) for rig in (watched, plain)]
            assert rows[0] == rows[1]
            assert rows[0]
        assert watched.alarms() == plain.alarms()


# -- write-back ---------------------------------------------------------------------------------------------------


def test_write_back_in_shadow_writes_nothing_and_on_writes_once(rig: Rig) -> None:
    off(rig, Flag.WRITE_BACK)
    switch(rig, Flag.WRITE_BACK, "shadow")
    quiet = [rig.create() for _ in range(3)]
    until(lambda: rig.position() == 3)
    rig.settle_owners()
    for _ in range(2):
        rig.run_chore("sweep")
    rig.settle_owners()
    assert rig.owner_writes() == []
    assert rig.one("SELECT count(*) FROM outbox WHERE tenant_id = :t") == 0
    assert rig.one("SELECT count(*) FROM deliveries WHERE tenant_id = :t AND source = 'sweep'") == 0
    assert rig.one("SELECT count(*) FROM decisions WHERE tenant_id = :t") == 3
    found = told(rig, Flag.WRITE_BACK)
    assert (found["would_have_written"], found["decisions"], found["errors"]) == (3, 3, 0)
    switch(rig, Flag.WRITE_BACK, "on", min_decisions=3)
    assert rig.assign() == ANA
    rig.settle_owners()
    assert rig.owners(quiet) == [None] * 3
    assert len(rig.owner_writes()) == 1
    rig.audit()


def test_write_back_in_shadow_is_scored_against_the_crms_own_round_robin(rig: Rig) -> None:
    off(rig, Flag.WRITE_BACK)
    switch(rig, Flag.WRITE_BACK, "shadow")
    theirs = [ANA, BEN, CY, BEN]
    refs = []
    for number, who in enumerate(theirs, 1):
        refs.append(rig.create())
        until(lambda n=number: rig.position() == n)
        rig.sandbox.set_owner(int(refs[-1]), int(who))  # the CRM's own routing, a moment later
    until(lambda: rig.one("SELECT count(crm_agent_id) FROM shadow_records WHERE tenant_id = :t") == 4)
    # Two more come with their owner: nothing is decided about them, the shadow says who it would have been.
    for who in (ANA, CY):
        ref = rig.create(owner=int(who))
        until(lambda r=ref: rig.standing(r)["state"] == "owned")
    rig.create()  # the CRM gives this one to nobody
    until(lambda: rig.position() == 5)
    rig.settle_owners()
    assert rig.one("SELECT count(*) FROM decisions WHERE tenant_id = :t") == 5
    score = report(rig.runtime, rig.tenant, score=True)["score"]
    assert (score["leads"], score["owned_by_crm"], score["without_owner"]) == (7, 6, 1)
    # The live line gives Ana, Ben, Cy, Ana; the shadow's own line begins after those: Ben, then Cy.
    assert (score["agreed"], score["agreement"]) == (4, 0.6667)
    shares = {row["agent"]["ref"]: (row["turnlock"], row["crm"]) for row in score["shares"]}
    assert shares == {ANA: (2, 2), BEN: (2, 2), CY: (2, 2)}
    assert min(row["median"] for row in score["seconds_to_owner"].values()) >= 0
    assert rig.owner_writes() == []
    rig.audit()


# -- order, proof, faults -----------------------------------------------------------------------------------------


def test_on_is_refused_until_the_shadow_ran_clean_and_forcing_it_is_recorded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(match: str, mode: str = "on", flag: Flag = Flag.SKIPS, **more: Any) -> None:
        with pytest.raises(TurnlockError, match=match):
            flags.switch(rig.runtime, rig.tenant.tenant_id, flag, mode, "test", **more)

    off(rig, Flag.SKIPS)
    refused("before its shadow has run; `turnlock flags TENANT skips shadow`, or give a reason")
    switch(rig, Flag.SKIPS, "shadow")
    rig.assign()
    refused("made 1 of 20 decisions")
    refused("made 1 of 2 decisions", min_decisions=2)
    off(rig, Flag.WEIGHTS)
    refused("skips cannot be on while weights is off", min_decisions=1)
    refused("weights cannot be on for some leads only", flag=Flag.WEIGHTS, percent=50)
    off(rig, Flag.ROTATION)
    refused("weights cannot be in shadow while rotation is off", mode="shadow", flag=Flag.WEIGHTS)
    refused("off for every lead; leave the limits out", mode="off", percent=50)
    for flag in (Flag.ROTATION, Flag.WEIGHTS):
        switch(rig, flag, "on", force="known to be good")

    # A shadow that fails is counted, and the live path never notices.
    def broken(self: Bench, case: Any, decide: Any = Bench.decide) -> Any:
        if Flag.SKIPS in self.plan.flags:
            raise ZeroDivisionError
        return decide(self, case)

    monkeypatch.setattr(Bench, "decide", broken)
    rig.assign()
    monkeypatch.undo()
    monkeypatch.setattr(staging, "save_lines", lambda *_: 1 / 0)
    rig.assign()
    monkeypatch.undo()
    monkeypatch.setattr(
        staging, "load_lines", lambda conn, *_: conn.execute(sa.text("SELECT 1 FROM nothing_of_this_name"))
    )
    rig.assign()
    monkeypatch.undo()
    assert shadows(rig, Flag.SKIPS)[1:] == [
        (None, "error", "zerodivisionerror"),
        (None, "error", "zerodivisionerror"),
        (None, "error", "programmingerror"),
    ]
    refused("its shadow failed 3 time", min_decisions=1)
    assert rig.most_tries() == 0
    rig.assign()  # what goes well later in the same run makes up for nothing
    assert failing(rig)[0].startswith("the shadow of skips failed 3 time(s)")
    off(rig, Flag.SKIPS)
    refused("its shadow failed 3 time", min_decisions=1)
    switch(rig, Flag.SKIPS, "shadow")
    assert len(failing(rig)) == 1
    rig.assign()
    assert failing(rig) == []
    switch(rig, Flag.SKIPS, "on", min_decisions=1)
    reasons = rig.rows(sa.text("SELECT flag, reason FROM flag_versions WHERE reason IS NOT NULL ORDER BY version"))
    assert [tuple(row) for row in reasons] == [("rotation", "known to be good"), ("weights", "known to be good")]
    rig.audit()


def failing(rig: Rig) -> list[str]:
    """The texts of the open alarms of shadows that failed, each of its flag."""
    query = "SELECT subject, text FROM alarms WHERE tenant_id = :t AND kind = 'shadow_errors' AND closed_at IS NULL"
    rows = rig.rows(sa.text(query).bindparams(t=rig.tenant.tenant_id))
    assert all(row.subject in row.text for row in rows)
    return [row.text for row in rows]


def test_a_lead_that_waits_is_decided_once_by_the_shadow(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=TWO + RULES)
    off(rig, Flag.RULES)
    switch(rig, Flag.RULES, "shadow")
    rig.configure(TWO.replace("['12', '13', '14']", "['12']") + RULES)
    rig.pause(ANA)
    ref = rig.create(source="Web")
    until(lambda: rig.standing(ref)["state"] == "held")
    rig.pause(ANA, False)
    assert rig.wait_owner(ref) == ANA
    assert shadows(rig, Flag.RULES) == [(BEN, "different", "rule"), (BEN, "different", "rule")]
    assert rig.assign(source="Web") == ANA
    assert shadows(rig, Flag.RULES)[-1] == (CY, "different", "rule")
    rig.audit()


# -- limits -------------------------------------------------------------------------------------------------------


def test_a_flag_limited_to_sources_counts_for_those_alone_and_a_lead_keeps_its_mode(rig: Rig) -> None:
    off(rig, Flag.ROTATION)
    switch(rig, Flag.ROTATION, "on", sources=["zillow "], force="a pilot")
    assert [rig.assign(source="Zillow") for _ in range(2)] == [ANA, BEN]
    assert [rig.assign(source="Web") for _ in range(2)] == [ANA, ANA]
    assert rig.turns() == [ANA, BEN]
    rig.pause(ANA)
    rig.pause(BEN)
    rig.pause(CY)
    web = rig.create(source="Web")
    until(lambda: rig.standing(web)["state"] == "held")
    assert rig.standing(web)["modes"] == {"rotation": "off"}
    switch(rig, Flag.ROTATION, "on")  # for all who come from here on
    for agent in (ANA, BEN, CY):
        rig.pause(agent, False)
    assert rig.wait_owner(web) == ANA
    assert rig.assign(source="Web") == CY
    assert rig.turns() == [ANA, BEN, CY]
    rig.settle_owners()
    rig.audit()


def test_the_stamp_of_an_event_decides_even_when_the_limit_has_changed_since(rig: Rig) -> None:
    off(rig, Flag.ROTATION)
    switch(rig, Flag.ROTATION, "on", sources=["Zillow"], force="a pilot")
    rig.stop_worker()
    early = [rig.create(source=source) for source in ("Zillow", "Web")]
    until(lambda: len(rig.events()) == 2)
    switch(rig, Flag.ROTATION, "on", sources=["Web"])
    late = [rig.create(source=source) for source in ("Zillow", "Web")]
    until(lambda: len(rig.events()) == 4)
    rig.start_worker()
    for ref in (*early, *late):
        rig.wait_owner(ref)
    turns = [rig.decision(ref).turn is not None for ref in (*early, *late)]
    assert turns == [True, False, False, True]
    rig.audit()


def test_a_percentage_goes_by_the_leads_id_and_a_wider_one_keeps_its_leads(rig: Rig) -> None:
    off(rig, Flag.SKIPS)
    switch(rig, Flag.SKIPS, "shadow", percent=50)
    rig.burst(40)
    half = {row.lead_id for row in rig.rows(sa.text("SELECT lead_id FROM shadow_records"))}
    assert 5 < len(half) < 35
    run = told(rig, Flag.SKIPS)["run"]
    switch(rig, Flag.SKIPS, "shadow", percent=75)
    assert told(rig, Flag.SKIPS)["run"] == run  # the same run goes on
    modes = rig.rows(sa.text("SELECT lead_id, record->'modes'->>'skips' AS mode FROM decisions"))
    assert {row.lead_id for row in modes if row.mode == "shadow"} == half
    assert len(modes) == 40


def test_nothing_staged_asks_nothing_more(rig: Rig) -> None:
    """The hot path: not one statement on a table of shadows while no flag is staged."""
    rig.assign()
    heard: list[str] = []
    sa.event.listen(rig.runtime.engine, "before_cursor_execute", lambda *args: heard.append(args[2]))
    rig.assign()
    rig.settle_owners()
    assert len(heard) > 10
    assert [s for s in heard if "shadow_" in s or "flag_versions" in s or "SAVEPOINT" in s or "SET modes" in s] == []


def test_explain_shows_the_shadow_beside_the_live_decision(rig: Rig) -> None:
    from connector.explain import explain

    off(rig, Flag.ROTATION)
    switch(rig, Flag.ROTATION, "shadow")
    rig.assign()
    ref = rig.create()
    assert rig.wait_owner(ref) == ANA
    (decision,) = explain(rig.runtime, rig.tenant, rig.lead_id(ref))["decisions"]
    assert decision["modes"] == {"rotation": "shadow"}
    (beside,) = decision["shadows"]
    assert (beside["flag"], beside["agent"]["ref"], beside["verdict"], beside["turn"]) == (
        "rotation",
        BEN,
        "different",
        2,
    )
    assert beside["text"] == "in the rotation it is somebody else's turn: turn 2 of its line"


def test_the_command_line_stages_a_flag_and_tells_what_its_shadow_did(rig: Rig) -> None:
    with command_line(rig.runtime.settings) as turnlock:
        assert turnlock("shadow", "acme").stdout == (
            "No shadow has run; `turnlock flags acme FLAG shadow` starts one.\n"
        )
        for flag in ("skips", "weights", "rotation"):
            turnlock("flags", "acme", flag, "off")
        refused = turnlock("flags", "acme", "rotation", "on", code=1).stderr
        assert "before its shadow has run; `turnlock flags TENANT rotation shadow`, or give a reason" in refused
        shown = turnlock.json("flags", "acme", "rotation", "shadow", "--sources", "Web, Open house")
        row = next(row for row in shown["flags"] if row["flag"] == "rotation")
        assert (row["mode"], row["sources"], row["percent"], row["forced"]) == (
            "shadow",
            ["Web", "Open house"],
            100,
            None,
        )
        assert "sources Web, Open house" in turnlock("flags", "acme").stdout
        assert "0 is not in the range" in turnlock("flags", "acme", "rules", "on", "--percent", "0", code=2).stderr
        until(lambda: rig.assign(source="Web") and told(rig, Flag.ROTATION)["decisions"] >= 2)
        rig.assign(source="Zillow")
        (run,) = turnlock.json("shadow", "acme", "rotation", "--differences")["shadows"]
        assert (run["decisions"], run["same"], run["different"], run["errors"]) == (2, 1, 1, 0)
        text = turnlock("shadow", "acme", "--differences").stdout
        assert "rotation (shadow now), shadow since" in text
        assert "1 x in the rotation it is somebody else's turn" in text
        assert "Ana" in text
        assert "turn 2 of its line" in text
        assert "No score yet" in turnlock("shadow", "acme", "--score").stdout
        assert "made 2 of 20 decisions" in turnlock("flags", "acme", "rotation", "on", code=1).stderr
        on = turnlock.json("flags", "acme", "rotation", "on", "--force", "a quiet week")
        assert next(row["forced"] for row in on["flags"] if row["flag"] == "rotation") == "a quiet week"
        assert "forced: a quiet week" in turnlock("flags", "acme").stdout
        assert "no flag 'x'; there are: write_back" in turnlock("shadow", "acme", "x", code=1).stderr
        assert "--force needs a reason" in turnlock("flags", "acme", "rules", "on", "--force", " ", code=2).stderr
        ref = rig.create(source="Web")
        rig.wait_owner(ref)
        assert "shadow of" not in turnlock("explain", "acme", ref).stdout
        first = rig.one("SELECT ref FROM lead_refs WHERE tenant_id = :t ORDER BY created_at LIMIT 1")
        explained = turnlock("explain", "acme", first).stdout
        assert "  staged for this lead: rotation shadow\n" in explained
        assert "  shadow of rotation: assigned to Ana" in explained


def test_every_difference_has_its_text() -> None:
    assert all(len(one.text) > 10 for one in pure.Difference)
