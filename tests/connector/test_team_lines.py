"""Teams in queues: a team that takes turns as one, everybody of a team as a member, and a rule's own ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from adapters.base import Team
from adapters.hubspot import HubSpot
from adapters.outcome import CrmError, Outcome
from connector import configuration, fairness, flags, preview, returns, turns
from connector.auditing import audit_queues
from connector.config import ConfigProblems
from connector.decide import Decider
from connector.errors import TurnlockError
from connector.explain import explain
from connector.past import replay_past
from connector.plan import plan
from connector.simulate import lead_of, simulate
from routing import store
from routing.flight import Asking, question
from routing.model import Flag
from tests.connector.cli_rig import command_line
from tests.locks import queue_held, waiting_for_locks
from tests.rig import ANA, BEN, CY, DEE, ELI, Rig, until

NORTH, SOUTH = "team North", "team South"
NESTED = """
default_queue: All
teams:
  North: {members: ['12', '13']}
  South: {members: ['14', '15', '16']}
queues:
  All: {members: [{team: North, nested: true}, {team: South, nested: true}]}
"""
BY = {"actor": "mia", "why": "a test"}


def line(rig: Rig, name: str) -> UUID:
    return UUID(str(rig.one("SELECT queue_id FROM queues WHERE tenant_id = :t AND name = :q", q=name)))


def taken(rig: Rig, name: str) -> list[str]:
    """Whose each turn of a line was, agents by CRM id, teams by the name of their line; fails if a turn is missing."""
    rows = rig.rows(
        sa.text(
            "SELECT t.turn, coalesce(r.ref, inside.name) AS who FROM turns t JOIN queues q USING (tenant_id, queue_id) "
            "LEFT JOIN agent_refs r ON (r.tenant_id, r.agent_id) = (t.tenant_id, t.agent_id) "
            "LEFT JOIN queues inside ON (inside.tenant_id, inside.queue_id) = (t.tenant_id, t.agent_id) "
            "WHERE t.tenant_id = :t AND q.name = :q ORDER BY t.turn"
        ).bindparams(t=rig.tenant.tenant_id, q=name)
    )
    assert [row.turn for row in rows] == list(range(1, rig.position(name) + 1))
    return [row.who for row in rows]


def members(rig: Rig, name: str) -> dict[str, int]:
    """Members of a line as `queue show` has them, in the order in which they are next, with their weights."""
    shown = preview.show(rig.runtime, rig.tenant, line(rig, name))
    return {row["agent"]["ref"] or row["agent"]["name"]: row["weight"] for row in shown["members"]}


def coming(rig: Rig, count: int, name: str = "All") -> list[str]:
    """Whom `queue next` names."""
    shown = preview.next_up(rig.runtime, rig.tenant, line(rig, name), count)
    return [row["agent"]["ref"] for row in shown["next"]]


# -- a rotation over teams ------------------------------------------------------------------------------------------


def test_a_lead_takes_a_turn_of_the_queue_and_one_of_the_team(rig: Rig) -> None:
    rig.configure(NESTED.replace("{team: North, nested: true}", "{team: North, nested: true, weight: 2}"))
    expected = coming(rig, 9)
    assert [rig.assign() for _ in range(9)] == expected == [ANA, CY, BEN, ANA, DEE, BEN, ANA, ELI, BEN]
    assert taken(rig, "All") == [NORTH, SOUTH, NORTH] * 3
    assert (taken(rig, NORTH), taken(rig, SOUTH)) == ([ANA, BEN] * 3, [CY, DEE, ELI])
    rig.settle_owners()
    rig.audit()
    with command_line(rig.runtime.settings) as run:
        assert "team South: 4" in run("queue", "next", "acme", "All", "--count", "3").output
        assert "Cy Chen" in run("queue", "show", "acme", "South").output  # by the team's own name


def deciding(rig: Rig) -> int:
    """One look of a decider of its own: how many events it saw through."""
    return Decider(rig.runtime, lambda *_: None, lambda: 0).run(rig.tenant.tenant_id)


def test_two_units_at_once_take_two_turns_of_the_queue_and_two_of_the_team(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(worker=False)
    rig.configure(NESTED.replace(", {team: South, nested: true}", ""))
    monkeypatch.setattr("connector.inbox.BATCH_DELIVERIES", 1)  # two units
    for _ in range(2):
        rig.create()
        assert rig.sandbox.wait_idle()
    with ThreadPoolExecutor(2) as pool:
        units = []
        with queue_held(rig, NORTH):  # both wait for the line of the team, with the queue's own or behind it
            for number in (1, 2):
                units.append(pool.submit(deciding, rig))
                until(lambda number=number: waiting_for_locks(rig) == number, what=f"unit {number} waiting")
        assert [unit.result() for unit in units] == [1, 1]
    assert (taken(rig, "All"), taken(rig, NORTH)) == ([NORTH, NORTH], [ANA, BEN])
    assert rig.most_tries() == 0
    rig.audit()


def test_without_the_locks_of_the_teams_lines_that_promise_breaks(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A team in two queues has one line: who decides in the one must see what was decided in the other."""
    rig = make_rig(worker=False)
    rig.configure(
        NESTED + "  Web: {members: [{team: North, nested: true}]}\n"
        "rules: [{name: web, when: {field: source, equals: Web}, to: {queue: Web}}]\n"
    )
    for source in ("Web", "Zillow"):
        rig.create(source=source)
        assert rig.sandbox.wait_idle()
    outer, lock, load = {line(rig, "All"), line(rig, "Web")}, store.lock_queues, store.load_queues
    loaded: list[Any] = []

    def only_queues(tenant_id: UUID, ids: Any) -> Asking[list[UUID]]:
        yield from lock.of(tenant_id, set(ids) & outer)
        return sorted(ids)

    def both_read(*given: Any) -> Asking[Any]:
        found = yield from load.of(*given)
        loaded.append(found)
        until(lambda: len(loaded) >= 2, what="both have read the line of the team")
        return found

    monkeypatch.setattr(store, "lock_queues", question(only_queues))
    monkeypatch.setattr(store, "load_queues", question(both_read))
    monkeypatch.setattr("connector.inbox.BATCH_DELIVERIES", 1)  # two units
    with ThreadPoolExecutor(2) as pool:
        units = []
        for number in (1, 2):
            units.append(pool.submit(deciding, rig))
            until(lambda number=number: len(loaded) >= number, what=f"unit {number} has read")
        assert [unit.result() for unit in units] == [1, 1]
    # The guard on the position is what is left: of the two one is refused, and tried again later.
    assert rig.most_tries() == 1
    assert taken(rig, NORTH) == [ANA]


# -- nobody there, and turns given back -----------------------------------------------------------------------------


def test_a_team_of_which_nobody_is_there_keeps_its_place_and_explain_says_all_of_it(rig: Rig) -> None:
    rig.configure(NESTED)
    for who in (ANA, BEN):
        rig.pause(who)
    assert coming(rig, 1) == [CY]
    ref = rig.create()
    assert rig.wait_owner(ref) == CY
    assert (rig.position(), rig.position(NORTH), rig.position(SOUTH)) == (1, 0, 1)
    (decision,) = explain(rig.runtime, rig.tenant, rig.lead_id(ref))["decisions"]
    outer, passed, inner = decision["paths"]
    north, south = sorted(outer["members"], key=lambda row: row["agent"]["name"])
    assert (north["skip"], north["detail"]) == ("team_away", "nobody of the team is available: 2 paused")
    assert (north["passed_over"], south["state"]) == (True, "taken")
    assert (outer["position_before"], outer["position_after"]) == (0, 1)
    assert (passed["queue"], passed["within"], passed["position_after"]) == (NORTH, "All", None)
    assert {row["skip"] for row in passed["members"]} == {"paused"}
    assert (inner["queue"], inner["within"], inner["position_after"]) == (SOUTH, "All", 1)
    assert [row["agent"]["ref"] for row in inner["members"] if row["state"] == "taken"] == [CY]
    rig.pause(ANA, False)
    assert [rig.assign() for _ in range(3)] == [ANA, DEE, ANA]
    rig.settle_owners()
    rig.audit()


def test_when_nobody_of_any_team_is_there_the_lead_waits_and_wakes_with_the_first(rig: Rig) -> None:
    rig.configure(NESTED)
    everyone = (ANA, BEN, CY, DEE, ELI)
    for who in everyone:
        rig.pause(who)
    refs = [rig.create() for _ in range(2)]
    until(lambda: all(rig.standing(ref)["state"] == "held" for ref in refs), what="two leads that wait")
    rig.settle()
    assert rig.standing(refs[0])["reason"] == "nobody_available"
    assert "leads_held" in rig.alarms()
    assert (rig.position(), rig.position(NORTH), rig.position(SOUTH)) == (0, 0, 0)
    rig.pause(ELI, False)
    assert [rig.wait_owner(ref) for ref in refs] == [ELI, ELI]
    rig.settle_owners()
    assert (rig.position(), rig.position(SOUTH)) == (2, 2)
    rig.audit()


def test_a_turn_given_back_is_owed_to_the_team_and_to_the_agent(rig: Rig) -> None:
    rig.configure(NESTED)
    refs = [rig.create() for _ in range(1)]
    assert rig.wait_owner(refs[0]) == ANA
    rig.settle_owners()
    asked = returns.ask(
        rig.runtime, rig.tenant, rig.lead_id(refs[0]), returns.ReturnReason.OUT_OF_AREA, actor="the agent"
    )
    returns.approve(rig.runtime, rig.tenant, UUID(asked["return_id"]), void=True, actor="mia", why="seen")
    voids = "SELECT count(*) FROM turns WHERE tenant_id = :t AND void_reason = 'returned'"
    assert rig.one(voids) == 2
    assert members(rig, "All") == {NORTH: 1, SOUTH: 1}
    assert coming(rig, 3) == [ANA, CY, BEN]  # both turns that are owed, then the lines as they stand
    assert [rig.assign() for _ in range(3)] == [ANA, CY, BEN]
    assert taken(rig, "All") == [NORTH, NORTH, SOUTH, NORTH]
    rig.settle_owners()
    rig.audit()


# -- moves by hand --------------------------------------------------------------------------------------------------


def test_moves_by_hand_on_the_queue_and_inside_the_team(rig: Rig) -> None:
    rig.configure(NESTED)
    here, inside = line(rig, "All"), line(rig, SOUTH)
    turns.give_next(rig.runtime, rig.tenant, here, inside, **BY)
    turns.give_next(rig.runtime, rig.tenant, inside, rig.agent_id(ELI), **BY)
    turns.send_to_back(rig.runtime, rig.tenant, line(rig, NORTH), rig.agent_id(ANA), **BY)
    assert coming(rig, 3) == [ELI, BEN, CY]
    assert [rig.assign() for _ in range(3)] == [ELI, BEN, CY]
    turns.credit(rig.runtime, rig.tenant, here, inside, **BY)
    turns.debit(rig.runtime, rig.tenant, line(rig, SOUTH), rig.agent_id(DEE), **BY)
    with command_line(rig.runtime.settings) as run:
        said = run("queue", "reorder", "acme", "All", SOUTH, "--why", "agreed").output
        assert "First in line: team South, team North" in said
        run("queue", "reweight", "acme", "All", "Team North", "3", "--why", "it grew")
        run("queue", "remove", "acme", "team South", "16", "--why", "left")
        run("queue", "add", "acme", "North", "16", "--weight", "2", "--why", "moved")
        ledger = run("queue", "ledger", "acme", "All").output
    assert "is owed a turn" in ledger
    assert "gets another weight (3)" in ledger
    assert members(rig, "All") == {SOUTH: 1, NORTH: 3}
    assert members(rig, NORTH) == {ANA: 1, BEN: 1, ELI: 2}
    assert rig.assign() == DEE  # the credit of the team; that Dee was charged puts her level with Cy, who had one later
    with pytest.raises(TurnlockError, match="is not a member of this queue"):
        turns.give_next(rig.runtime, rig.tenant, here, rig.agent_id(ANA), **BY)
    rig.settle_owners()
    rig.audit()


# -- a rule's own ranking -------------------------------------------------------------------------------------------

RANKED = """
default_queue: All
queues:
  All: {members: ['12', '13']}
rules:
  - {name: Luxury, when: {field: price, at_least: 900000}, to: {agents: [{agent: '12', weight: 3}, '13']}, else: [{queue: All}]}
  - {name: South, when: {field: city, equals: Waco}, to: {team: South}}
teams:
  South: {members: ['14', '15']}
"""  # noqa: E501 - a rule in one line


def test_a_rule_has_a_line_of_its_own_that_goes_on_through_every_apply(rig: Rig) -> None:
    rig.configure(RANKED)
    with command_line(rig.runtime.settings) as run:
        assert run.json("queue", "next", "acme", "Luxury", "--count", "4")["queue"] == "rule Luxury"
        run("queue", "reweight", "acme", "rule Luxury", "13", "2", "--why", "a test")
        run("queue", "reweight", "acme", "rule Luxury", "13", "1", "--why", "a test")
        run("queue", "remove", "acme", "South", "15", "--why", "a test")
        said = run("queue", "remove", "acme", "South", "14", "--why", "a test", code=1).stderr
        assert "'team South' would have no member left" in said
        run("queue", "add", "acme", "South", "15", "--why", "a test")
    owners = [rig.assign(price=950_000) for _ in range(2)]
    moved = RANKED.replace(
        "rules:\n", "rules:\n  - {name: First, when: {field: city, equals: Rome}, to: {queue: All}}\n"
    )
    rig.configure(
        moved.replace("900000", "800000").replace(
            "agents: [{agent: '12', weight: 3}, '13']", "agents: [{agent: '12', weight: 3}, '13', '14']"
        )
    )
    owners += [rig.assign(price=950_000) for _ in range(3)]
    assert owners[:4] == [ANA, BEN, ANA, ANA]
    assert taken(rig, "rule Luxury") == owners
    assert rig.position() == 0  # the other queue has a line of its own
    assert [rig.assign(city="Waco", price=1) for _ in range(3)] == [CY, DEE, CY]
    assert taken(rig, SOUTH) == [CY, DEE, CY]
    for who in (ANA, BEN, CY):
        rig.pause(who)
    ref = rig.create(price=950_000)
    until(lambda: rig.standing(ref)["state"] == "held", what="a lead that waits in the line of its rule")
    rig.pause(BEN, False)
    assert rig.wait_owner(ref) == BEN
    rig.settle_owners()
    rig.audit()


# -- the CRM's teams ------------------------------------------------------------------------------------------------

FOLLOWS = """
default_queue: All
teams:
  North: {from_crm: Austin North}
queues:
  All: {members: [{agent: '12', weight: 2}, {team: North}]}
  Web: {members: [{team: North, nested: true}, '16']}
rules: [{name: web, when: {field: source, equals: Web}, to: {queue: Web}}]
"""


def test_lines_follow_a_team_of_the_crm_as_agents_join_and_leave(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("hubspot")
    pond = rig.sandbox.add_pond("Austin North", [int(ANA), int(BEN), int(CY)])
    with pytest.raises(ConfigProblems) as none_yet:
        rig.configure(FOLLOWS)
    assert "`turnlock agents sync` reads the CRM's teams" in none_yet.value.problems[0].fix
    rig.sync()
    rig.configure(FOLLOWS)
    # Once, with the weight that is written beside her; nobody joins or leaves without a reading.
    assert members(rig, "All") == {ANA: 2, BEN: 1, CY: 1}
    with command_line(rig.runtime.settings) as run:
        (team,) = [row for row in run.json("agents", "teams", "acme")["teams"] if row["name"] == "Austin North"]
        assert ([who["ref"] for who in team["agents"]], team["lines"]) == ([ANA, BEN, CY], ["All", NORTH])
        assert "Ana Alvarez (12), Ben Brown (13), Cy Chen (14)" in run("agents", "teams", "acme").output
    version = rig.one("SELECT config_version FROM tenants WHERE tenant_id = :t")
    assert [rig.assign() for _ in range(4)] == [ANA, BEN, CY, ANA]
    rig.settle_owners()

    rig.sandbox.change_pond(pond, [int(BEN), int(DEE), int(CY)])
    rig.sandbox.deactivate_agent(int(CY))
    rig.sync()
    assert members(rig, "All") == {ANA: 2, BEN: 1, CY: 1, DEE: 1}  # Cy is away, and keeps his place
    assert set(members(rig, NORTH)) == {BEN, CY, DEE}
    assert [rig.assign() for _ in range(3)] == [ANA, BEN, DEE]  # the newcomer at the back
    rig.sandbox.activate_agent(int(CY))
    rig.sandbox.change_pond(pond, [int(DEE), int(CY)])
    rig.sync()
    assert members(rig, "All") == {CY: 1, ANA: 2, DEE: 1}
    assert rig.one("SELECT config_version FROM tenants WHERE tenant_id = :t") == version
    said = "SELECT count(*) FROM ledger WHERE tenant_id = :t AND reason = 'the members of a team in the CRM changed'"
    assert rig.one(said) == 5  # three moves of the queue, two of the team
    rig.sync()
    assert rig.one(said) == 5

    # A lead that waits wakes with the first who joins the team.
    for who in (CY, DEE, ELI):
        rig.pause(who)
    ref = rig.create(source="Web")
    until(lambda: rig.standing(ref)["state"] == "held", what="a lead that nobody can take")
    rig.sandbox.change_pond(pond, [int(DEE), int(CY), int(BEN)])
    rig.sync()
    assert rig.wait_owner(ref) == BEN

    # A team that is gone leaves everybody where they are, and says so; a house user comes into no line.
    rig.sandbox.change_pond(pond, None)
    rig.sync()
    assert "team_gone" in rig.alarms()
    assert set(members(rig, NORTH)) == {BEN, CY, DEE}
    again = rig.sandbox.add_pond("austin north", [int(BEN), int(ELI), int(DEE)])  # by the name that is configured
    rig.sync()
    assert "team_gone" not in rig.alarms()
    assert set(members(rig, NORTH)) == {BEN, ELI, DEE}
    rig.sandbox.change_pond(again, [int(BEN), int(CY), int(DEE)])
    rig.configure(FOLLOWS.replace("default_queue", "unassigned: {users: ['15']}\ndefault_queue"))
    assert set(members(rig, NORTH)) == {BEN, ELI}
    rig.sync()
    assert set(members(rig, NORTH)) == {BEN, CY}
    rig.settle_owners()
    rig.audit()


def test_while_the_flag_is_off_lines_keep_whom_they_have_and_follow_at_once_when_it_is_on(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig("hubspot", worker=False)
    pond = rig.sandbox.add_pond("Austin North", [int(BEN)])
    rig.sync()
    rig.configure(FOLLOWS)
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.TEAMS, "off", "test")
    rig.sandbox.change_pond(pond, [int(BEN), int(CY)])
    rig.sync()
    assert set(members(rig, "All")) == {ANA, BEN}
    assert coming(rig, 2, "Web") == [ELI, ELI]
    shown = preview.show(rig.runtime, rig.tenant, line(rig, "Web"))
    assert [row["skip"] for row in shown["members"]] == ["team_away", None]
    rig.start_worker()
    assert rig.assign(source="Web") == ELI
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.TEAMS, "on", "test", force="a look was enough")
    until(lambda: set(members(rig, "All")) == {ANA, BEN, CY}, what="a line that follows")
    assert [rig.assign(source="Web") for _ in range(3)] == [BEN, ELI, CY]
    rig.settle_owners()
    rig.audit()


def test_a_crm_that_does_not_show_its_teams_fails_the_sync_only_where_a_line_follows_one(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("hubspot", worker=False)

    def refuses(*_: Any) -> Iterator[Team]:
        raise CrmError(Outcome.FORBIDDEN, status=403)
        yield

    with monkeypatch.context() as patch:
        patch.setattr(HubSpot, "list_teams", refuses)
        assert rig.sync()["same"] > 0
    rig.sandbox.add_pond("Austin North", [int(BEN)])
    rig.sync()
    rig.configure(FOLLOWS)
    monkeypatch.setattr(HubSpot, "list_teams", lambda *_: iter(()))
    rig.sync()  # an account without any team is a hiccup, and says nothing
    assert set(members(rig, NORTH)) == {BEN}
    monkeypatch.setattr(HubSpot, "list_teams", refuses)
    with pytest.raises(CrmError):
        rig.sync()


# -- seen from everywhere -------------------------------------------------------------------------------------------


def test_simulate_plan_fairness_and_the_past_know_both_levels(rig: Rig) -> None:
    rig.configure(NESTED)
    start = datetime.now(UTC) - timedelta(minutes=5)
    owners = [rig.assign(source="Web") for _ in range(4)]
    assert owners == [ANA, CY, BEN, DEE]
    (tried,) = simulate(rig.runtime, rig.tenant, [lead_of(["source=Web"], datetime.now(UTC))])["decisions"]
    assert (tried["agent"]["ref"], [path["queue"] for path in tried["paths"]]) == (ANA, ["All", NORTH])
    assert rig.assign() == ANA

    draft = "version: 1" + NESTED.replace("'13']", "'13', '16']").replace("nested: true}]", "nested: true, weight: 3}]")
    told = plan(rig.runtime, rig.tenant, draft)
    assert {change["path"] for change in told["changes"]} == {
        "teams.North.members.eli.evans@example.com", "queues.All.members.team South.weight",
    }  # fmt: skip
    assert {row["queue"]: {m["agent"]["name"]: m["what"] for m in row["members"]} for row in told["lines"]} == {
        "All": {NORTH: "kept", SOUTH: "reweighted"},
        NORTH: {"Ana Alvarez": "kept", "Ben Brown": "kept", "Eli Evans": "joins"},
    }

    today = datetime.now(UTC).date()
    dates = {"since": today - timedelta(days=1), "until": today}
    everywhere = fairness.report(rig.runtime, rig.tenant, **dates)["periods"][0]
    assert everywhere["turns"] == 5
    had = {row["agent"]["ref"]: row["actual"] for row in everywhere["agents"]}
    assert had == {ANA: 2, BEN: 1, CY: 1, DEE: 1, ELI: 0}
    of_queue = fairness.report(rig.runtime, rig.tenant, queue_id=line(rig, "All"), **dates)["periods"][0]
    assert {row["agent"]["name"]: row["actual"] for row in of_queue["agents"]} == {NORTH: 3, SOUTH: 2}

    again = replay_past(rig.runtime, rig.tenant, None, start)
    assert (again["leads"], again["same"]) == (5, 5)
    alone = "version: 1" + NESTED.replace("{team: North, nested: true}, ", "")
    other = replay_past(rig.runtime, rig.tenant, alone, start)
    assert {row["agent"]["ref"] for row in other["agents"] if row["draft"]} == {CY, DEE, ELI}
    rig.settle_owners()
    rig.audit()


def test_in_shadow_the_teams_take_turns_beside_the_live_path(rig: Rig) -> None:
    rig.configure(NESTED.replace("nested: true}]", "nested: true}, '16']"))
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.TEAMS, "off", "test")
    assert rig.assign() == ELI
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.TEAMS, "shadow", "test")
    assert [rig.assign() for _ in range(3)] == [ELI] * 3
    rows = rig.rows(
        sa.text(
            "SELECT r.ref, s.verdict FROM shadow_records s JOIN agent_refs r USING (tenant_id, agent_id) "
            "WHERE tenant_id = :t AND flag = 'teams' ORDER BY decided_at"
        ).bindparams(t=rig.tenant.tenant_id)
    )
    assert [tuple(row) for row in rows] == [(ANA, "different"), (CY, "different"), (ELI, "same")]
    assert (rig.position(), rig.position(NORTH)) == (4, 0)
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.TEAMS, "on", "test", force="seen enough")
    assert rig.assign() == ANA
    rig.settle_owners()
    rig.audit()


def test_an_audit_finds_a_turn_of_a_team_without_one_inside_it(rig: Rig) -> None:
    rig.configure(NESTED)
    assert rig.assign() == ANA
    rig.settle_owners()
    rig.audit()
    rig.sql(
        "UPDATE turns SET decision_id = gen_random_uuid() WHERE tenant_id = :t AND agent_id = :a", a=rig.agent_id(ANA)
    )
    broken = {one.queue: one.problems for one in audit_queues(rig.runtime, rig.tenant.tenant_id) if not one.ok}
    assert "went to a team in whose line none was taken" in broken["All"][0]
    assert "each turn is one" in broken[NORTH][0]


def test_teams_are_written_out_as_they_are_read(rig: Rig) -> None:
    text = RANKED + "  West: {members: [{team: South, nested: true, weight: 2}, '16']}\n"
    text = text.replace("All: {members: [", "All: {members: [{team: West, weight: 0}, ")
    rig.configure(text)
    version = rig.one("SELECT config_version FROM tenants WHERE tenant_id = :t")
    turns.reweight(rig.runtime, rig.tenant, "All", rig.agent_id(ANA), 2, **BY)
    turns.reweight(rig.runtime, rig.tenant, "All", rig.agent_id(ANA), 1, **BY)
    with rig.runtime.engine.connect() as conn:
        found = configuration.current(conn, rig.tenant.tenant_id)
    assert found is not None
    assert not configuration.apply(rig.runtime, rig.tenant, found[1], "test").changed
    back = configuration.rollback(rig.runtime, rig.tenant, version, "test")
    assert back.changed is False or members(rig, "All") == {ANA: 1, BEN: 1, SOUTH: 0, ELI: 0}
    assert members(rig, "All") == {ANA: 1, BEN: 1, SOUTH: 0, ELI: 0}
