"""Turns moved by hand: every move is told in the ledger, counts for the next lead, and survives an audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest

from connector import configuration, flags, turns
from connector.errors import TurnlockError
from connector.preview import next_up, show
from routing.model import Flag
from tests.connector.cli_rig import Cli, command_line
from tests.rig import ABC, ANA, BEN, CY, DEE, Rig

WHY = {"actor": "mia", "why": "agreed on Monday"}
FOUR = "default_queue: All\nqueues:\n  All:\n    members: ['12', '13', '14', '15']\n"


def queue_id(rig: Rig, name: str = "All") -> UUID:
    return UUID(str(rig.one("SELECT queue_id FROM queues WHERE tenant_id = :t AND name = :q", q=name)))


def move(rig: Rig, what: Callable[..., dict[str, Any]], *refs: str, queue: str = "All") -> dict[str, Any]:
    """One move of the members with these CRM ids."""
    ids: Any = [rig.agent_id(ref) for ref in refs]
    return what(rig.runtime, rig.tenant, queue_id(rig, queue), ids if what is turns.reorder else ids[0], **WHY)


def upcoming(rig: Rig, count: int, queue: str = "All") -> list[tuple[str, str]]:
    """The CRM ids of those who are next, and by what."""
    shown = next_up(rig.runtime, rig.tenant, queue_id(rig, queue), count)
    return [(one["agent"]["ref"], one["how"]) for one in shown["next"]]


def entries(rig: Rig, queue: str = "All") -> list[dict[str, Any]]:
    return list(turns.ledger(rig.runtime, rig.tenant, queue_id(rig, queue), limit=100)["entries"])


# -- what each move does to the next leads ----------------------------------------------------------------------


COUNTS = {
    "give-next": (turns.give_next, [BEN], [BEN, ANA, CY, BEN, ANA, CY]),  # charged: it was Ben's turn of the round
    "credit": (turns.credit, [BEN], [BEN, ANA, BEN, CY, ANA, BEN]),  # beside their own
    "debit": (turns.debit, [ANA], [BEN, CY, ANA, BEN, CY, ANA]),
    "back": (turns.send_to_back, [BEN], [ANA, CY, BEN, ANA, CY, BEN]),
    "reorder": (turns.reorder, [CY, BEN], [CY, BEN, ANA, CY, BEN, ANA]),
}


def test_a_move_counts_from_the_next_lead_on(make_rig: Callable[..., Rig]) -> None:
    queues = "".join(f"  {name}: {{members: ['12', '13', '14']}}\n" for name in COUNTS)
    rules = "".join(
        f"- {{name: {name}, when: {{field: source, equals: {name}}}, to: {{queue: {name}}}}}\n" for name in COUNTS
    )
    rig = make_rig(crm="generic", config=f"queues:\n{queues}rules:\n{rules}")
    for name, (what, refs, owners) in COUNTS.items():
        told = move(rig, what, *refs, queue=name)
        assert ([ref for ref, _ in upcoming(rig, 6, name)], name) == (owners, name)
        assert (rig.owners(rig.burst(6, source=name)), name) == (owners, name)
        assert (told["actor"], told["why"], told["queue"]) == ("mia", "agreed on Monday", name)
        assert told in [entry | {"queue": name} for entry in entries(rig, name)]
    rig.audit()


def test_who_is_given_next_stands_first_in_every_listing_and_waits_while_away(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic")
    move(rig, turns.give_next, CY)
    move(rig, turns.credit, BEN)
    assert upcoming(rig, 3) == [(CY, "give_next"), (BEN, "owed"), (ANA, "line")]
    members = {one["agent"]["ref"]: one for one in show(rig.runtime, rig.tenant, queue_id(rig))["members"]}
    assert [(members[ref]["given_next"], members[ref]["owed_turns"]) for ref in (ANA, BEN, CY)] == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]
    rig.pause(CY)
    assert rig.assign() == BEN
    rig.pause(CY, False)
    assert [rig.assign() for _ in range(2)] == [CY, ANA]
    told = [(entry["kind"], entry["agent"]["ref"] if entry["agent"] else None, entry["how"]) for entry in entries(rig)]
    assert told == [
        ("checkpoint", None, None),
        ("give_next", CY, None),
        ("owe", BEN, None),
        ("turn", BEN, "owed"),
        ("turn", CY, "give_next"),
        ("turn", ANA, "line"),
    ]
    rig.audit()


def test_a_credit_is_one_turn_and_no_flood(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic")
    rig.pause(CY)
    move(rig, turns.credit, CY)
    assert rig.owners(rig.burst(10)) == [ANA, BEN] * 5
    rig.pause(CY, False)
    # The turn they are owed, the place that they kept in line, and then everybody in turn.
    assert [rig.assign() for _ in range(5)] == [CY, CY, ANA, BEN, CY]
    rig.audit()


# -- members -----------------------------------------------------------------------------------------------------


def exported(rig: Rig) -> str:
    with rig.runtime.engine.connect() as conn:
        found = configuration.current(conn, rig.tenant.tenant_id)
    assert found is not None
    return found[1]


def test_members_changed_by_command_are_in_the_export_and_nobody_is_reset(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic")
    assert rig.assign() == ANA
    added = turns.add(rig.runtime, rig.tenant, "All", rig.agent_id(DEE), **WHY)
    assert (added.version, added.changed) == (2, True)
    assert rig.owners(rig.burst(4)) == [BEN, CY, ANA, DEE]
    turns.remove(rig.runtime, rig.tenant, "All", rig.agent_id(BEN), **WHY)
    turns.reweight(rig.runtime, rig.tenant, "All", rig.agent_id(CY), 2, **WHY)
    told = [(entry["kind"], entry["actor"], entry["why"]) for entry in entries(rig) if entry["kind"] != "turn"]
    assert told[1:] == [(kind, "mia", "agreed on Monday") for kind in ("join", "leave", "reweight")]
    # Whoever applies what is exported changes nothing: the file and the line say the same.
    applied = configuration.apply(rig.runtime, rig.tenant, exported(rig), "test")
    assert (applied.version, applied.changed) == (4, False)
    assert "dee" in exported(rig)
    assert "ben" not in exported(rig)
    same = turns.reweight(rig.runtime, rig.tenant, "All", rig.agent_id(CY), 2, **WHY)
    assert (same.version, same.changed) == (4, False)
    rig.audit()


def test_a_queue_keeps_its_hours_and_policies_when_a_member_is_changed_by_command(make_rig: Callable[..., Rig]) -> None:
    kept = "quiet_hours: {zone: UTC, hours: {sun: ['01:00-02:00']}}\n    skip_policy: {paused: lose_turn}\n"
    rig = make_rig(crm="generic", config=f"{ABC}    {kept}", worker=False)
    before = exported(rig)
    turns.add(rig.runtime, rig.tenant, "All", rig.agent_id(DEE), **WHY)
    turns.remove(rig.runtime, rig.tenant, "All", rig.agent_id(DEE), **WHY)
    after = exported(rig)
    for said in ("quiet_hours", "01:00-02:00", "lose_turn"):
        assert said in before
        assert said in after
    assert rig.one("SELECT skip_policy FROM queues WHERE tenant_id = :t") == {"paused": "lose_turn"}


def test_a_member_who_is_added_gets_the_leads_that_waited(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic", config="default_queue: All\nqueues: {All: {members: []}}\n")
    ref = rig.create()
    rig.settle_owners()
    assert rig.standing(ref)["state"] == "held"
    turns.add(rig.runtime, rig.tenant, "All", rig.agent_id(DEE), **WHY)
    assert rig.wait_owner(ref) == DEE
    rig.audit()


# -- refused, with the fix, and nothing moved ------------------------------------------------------------------------


def test_what_cannot_be_done_says_why_and_moves_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic", config=ABC.replace("'12'", "{agent: '12', weight: 0}"), worker=False)
    all_of_them = queue_id(rig)
    ids = {ref: rig.agent_id(ref) for ref in (ANA, BEN, CY, DEE)}

    def refused(match: str, what: Callable[..., Any], *given: Any, **more: Any) -> None:
        with pytest.raises(TurnlockError, match=match):
            what(rig.runtime, rig.tenant, *given, **(WHY | more))

    refused("not a member of this queue; `turnlock queue add`", turns.give_next, all_of_them, ids[DEE])
    refused("weight 0 .* `turnlock queue reweight`", turns.credit, all_of_them, ids[ANA])
    refused("is empty; say it in a few words", turns.debit, all_of_them, ids[BEN], why=" ")
    refused("(?s)who did it.*the reason", turns.debit, all_of_them, ids[BEN], actor="a" * 101, why="two\nlines")
    refused("(?s)named more than once.*not a member", turns.reorder, all_of_them, [ids[BEN], ids[BEN], ids[DEE]])
    refused("is a member of 'All' already", turns.add, "All", ids[BEN])
    refused("is not a member of 'All'; `turnlock queue show`", turns.remove, "All", ids[DEE])
    refused("is not a member of 'All'; `turnlock queue add`", turns.reweight, "All", ids[DEE], 2)
    refused("no queue 'Nowhere' is configured; there are: All", turns.add, "Nowhere", ids[DEE])
    refused("use a whole number from 0 to 100", turns.reweight, "All", ids[BEN], 101)
    assert [entry["kind"] for entry in entries(rig)] == ["checkpoint"]
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.CREDITS, "off", "test")
    refused("credits are off; `turnlock flags acme credits on`", turns.give_next, all_of_them, ids[BEN])
    flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.CREDITS, "on", "test", force="as before")
    for flag in (Flag.SKIPS, Flag.WEIGHTS, Flag.ROTATION):
        flags.switch(rig.runtime, rig.tenant.tenant_id, flag, "off", "test")
    refused("while the rotation is off; `turnlock flags acme rotation on`", turns.give_next, all_of_them, ids[BEN])


# -- at the terminal ---------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(make_rig: Callable[..., Rig]) -> Iterator[tuple[Rig, Cli]]:
    rig = make_rig(crm="generic", worker=False)
    with command_line(rig.runtime.settings) as cli:
        yield rig, cli


def test_the_commands_say_what_they_did_and_the_ledger_lists_it(terminal: tuple[Rig, Cli]) -> None:
    rig, cli = terminal
    said = ["--why", "agreed on Monday"]
    assert "Cy" in cli("queue", "give-next", "acme", "All", CY, *said, "--by", "mia").stdout
    for word, ref in (("back", ANA), ("credit", BEN), ("debit", CY)):
        told = cli.json("queue", word, "acme", "all", ref, *said)
        assert (told["agent"]["ref"], told["actor"][:3], told["why"]) == (ref, "cli", "agreed on Monday")
    assert cli.json("queue", "reorder", "acme", "All", CY, *said)["order"][0]["ref"] == CY
    assert cli.json("queue", "add", "acme", "All", DEE, "--weight", "2", *said)["version"] == 2
    assert "version 3" in cli("queue", "reweight", "acme", "All", DEE, "3", *said).stdout
    assert cli.json("queue", "remove", "acme", "All", DEE, *said)["changed"]
    listed = cli.json("queue", "ledger", "acme", "All")["entries"]
    assert [one["kind"] for one in listed] == [
        *("checkpoint", "give_next", "send_to_back", "owe", "debit", "reorder", "join", "reweight", "leave")
    ]
    assert [
        one["seq"] for one in cli.json("queue", "ledger", "acme", "All", "--count", "2", "--before", "4")["entries"]
    ] == [
        2,
        3,
    ]
    text = cli("queue", "ledger", "acme", "All").stdout
    for word in ("mia", "agreed on Monday", "gets the next lead"):
        assert word in text
    assert "Missing option '--why'" in cli("queue", "back", "acme", "All", ANA, code=2).stderr
    rig.audit()
