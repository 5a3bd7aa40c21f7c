"""Trying before use: a lead is decided as it would be, under the configuration in force or a draft, and not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import pytest
import sqlalchemy as sa

from connector import past, returns, turns
from connector.past import replay_past
from connector.settings import Settings
from routing.tables import metadata
from tests.connector.cli_rig import Cli, command_line
from tests.rig import ANA, BEN, CY, DEE, Rig, until

CONFIG = """\
default_queue: All
queues:
  All: {members: ['12', '13', '14']}
  Luxury: {members: ['15'], when_nobody: {fallback_queue: All}}
rules:
  - {name: Luxury, when: {all: [{field: price, at_least: 1000000}, {field: tags, contains: vip}]}, to: {queue: Luxury}}
  - {name: Keys, when: {field: custom.Has keys, equals: true}, to: {agent: '16'}}
"""
DRAFT = """\
version: 1
default_queue: All
queues:
  All: {members: ['12', '13', '14', '15']}
rules:
  - {name: Cheap, when: {field: price, at_most: 100000}, to: {agent: '15'}}
"""


@pytest.fixture
def turnlock(database: Settings) -> Iterator[Cli]:
    with command_line(database) as found:
        yield found


def whole(rig: Rig) -> dict[str, list[str]]:
    """Everything that is stored, but for the heartbeat of chores and agents."""
    return {
        name: sorted(str(row) for row in rig.rows(sa.select(table)))
        for name, table in metadata.tables.items()
        if name not in ("chores", "agents")
    }


def test_a_lead_is_tried_and_nothing_is_kept(make_rig: Callable[..., Rig], turnlock: Cli, tmp_path: Path) -> None:
    rig = make_rig(config=CONFIG)
    kim = rig.create(emails=["kim@example.com"], source="Portal", price=200000)
    assert rig.wait_owner(kim) == ANA
    rig.pause(BEN)
    rig.settle()
    rig.stop_worker()
    before = whole(rig)

    def tried(*given: str) -> tuple[str | None, str | None, str, int | None]:
        (one,) = turnlock.json("simulate", "acme", *given)["decisions"]
        return one["agent"]["ref"], one["rule"], one["how"], one["turn"]

    assert tried("--field", "price=1000000", "--field", "tags=new", "--field", "tags=VIP") == (DEE, "Luxury", "line", 1)
    assert tried("--field", "custom.Has keys=true") == ("16", "Keys", "agent", None)
    assert tried("--field", "email=Kim@example.com") == (ANA, None, "existing_owner", None)
    assert tried("--field", "source=Web") == (CY, None, "line", 2)
    assert tried("--lead", kim) == (CY, None, "line", 2)
    text = turnlock("simulate", "acme", "--field", "source=Web").stdout
    for part in ("It would be assigned to Cy Chen (14), turn 2 of queue All.", "passed over", "Nothing was kept"):
        assert part in text

    (tmp_path / "draft.yaml").write_text(DRAFT)
    draft = ("--config", str(tmp_path / "draft.yaml"))
    assert tried("--field", "price=90000", *draft) == (DEE, "Cheap", "agent", None)
    assert tried("--field", "price=2000000", "--field", "tags=vip", *draft)[:2] == (CY, None)
    told = turnlock.json("simulate", "acme", "--field", "price=90000", *draft)
    assert (told["draft"], told["config_version"]) == (True, 2)
    assert whole(rig) == before

    rig.start_worker()
    assert rig.assign(source="Web") == CY  # as it was said


def test_a_stored_delivery_is_tried(make_rig: Callable[..., Rig], turnlock: Cli) -> None:
    rig = make_rig("generic")
    refs = [rig.create() for _ in range(2)]
    for ref in refs:
        rig.wait_owner(ref)
    rig.settle()
    delivery = rig.one(
        "SELECT delivery_id FROM events WHERE tenant_id = :t AND ref = :r AND kind = 'lead_created'", r=refs[0]
    )
    (one,) = turnlock.json("simulate", "acme", "--delivery", str(delivery))["decisions"]
    assert one["outcome"] == "assigned"
    assert one["agent"]["ref"] in (ANA, BEN, CY)
    missing = "00000000-0000-0000-0000-000000000001"
    assert "no delivery" in turnlock("simulate", "acme", "--delivery", missing, code=1).stderr


def test_the_past_under_the_configuration_in_force_is_what_happened(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=CONFIG)
    rig.burst(3)
    cut = rig.one("SELECT clock_timestamp()")  # the replay begins in the middle of a round
    rig.burst(2, source="Web")
    rig.pause(BEN)
    rig.burst(3)
    vip = rig.create(price=2000000, tags=["vip"])
    assert rig.wait_owner(vip) == DEE
    for ref in (ANA, CY):
        rig.pause(ref)
    held = [rig.create() for _ in range(2)]
    until(lambda: all(rig.standing(ref)["state"] == "held" for ref in held), what="two held leads")
    rig.pause(BEN, False)
    for ref in held:
        assert rig.wait_owner(ref) == BEN
    rig.pause(ANA, False)
    rig.burst(3)
    rig.settle_owners()
    told = replay_past(rig.runtime, rig.tenant, None, cut)
    assert told["differences"] == []
    assert (told["leads"], told["same"], told["unknown"]) == (11, 11, 0)
    assert told["held"] == {"actual": 2, "draft": 2, "actual_still": 0, "draft_still": 0}
    assert all(row["difference"] == 0 for row in told["agents"])


def test_the_past_under_a_draft_stands_beside_what_happened(
    make_rig: Callable[..., Rig], turnlock: Cli, tmp_path: Path
) -> None:
    rig = make_rig(config=CONFIG)
    rig.burst(4, price=50000)
    rich = rig.burst(4, price=300000)
    rig.settle_owners()
    rig.stop_worker()
    before = whole(rig)
    (tmp_path / "draft.yaml").write_text(DRAFT)
    given = ("replay-history", "acme", "--since", "1h", "--config", str(tmp_path / "draft.yaml"))
    told = turnlock.json(*given)
    assert whole(rig) == before
    shares = {row["agent"]["ref"]: (row["actual"], row["draft"]) for row in told["agents"]}
    # The cheap ones go to Dee by the rule; the others turn among four, from the line as it stood.
    assert shares == {ANA: (3, 1), BEN: (3, 1), CY: (2, 1), DEE: (0, 5)}
    assert told["leads"] == 8
    assert {one["draft"]["rule"] for one in told["differences"] if one["lead"] not in rich} == {"Cheap"}
    text = turnlock(*given, "--show", "1").stdout
    assert "8 leads of acme" in text
    assert f"... and {len(told['differences']) - 1} more" in text
    rig.sql("DELETE FROM lead_facts WHERE tenant_id = :t")  # as after an erasure
    assert turnlock.json(*given)["unknown"] == 8


def give_back(rig: Rig, ref: str, *, void: bool) -> None:
    asked = returns.ask(rig.runtime, rig.tenant, rig.lead_id(ref), returns.ReturnReason.BOGUS, actor="dee")
    returns.approve(rig.runtime, rig.tenant, UUID(asked["return_id"]), void=void, actor="mia")


class GivenBack(NamedTuple):
    """A past in which leads were given back, since when, and the one of them that went on to somebody else."""

    rig: Rig
    since: datetime
    passed_on: str


@pytest.fixture
def given_back(make_rig: Callable[..., Rig]) -> GivenBack:
    """Returned leads, one of which came before that time; a credit, a debit and a turn given next."""
    rig = make_rig(config=CONFIG)
    early = rig.create()
    assert rig.wait_owner(early) == ANA
    since = rig.one("SELECT clock_timestamp()")
    bogus, other = rig.create(price=150000), rig.create(price=50000)
    owners = rig.wait_owner(bogus), rig.wait_owner(other)
    rig.settle_owners()
    give_back(rig, bogus, void=True)
    give_back(rig, other, void=False)
    give_back(rig, early, void=True)  # came before that time: its agent is owed a turn all the same
    until(lambda: rig.owner(other) not in (None, owners[1]), what="another owner")
    rig.settle_owners()
    queue = UUID(str(rig.one("SELECT queue_id FROM queues WHERE tenant_id = :t AND name = 'All'")))
    said = {"actor": "mia", "why": "was promised"}
    turns.credit(rig.runtime, rig.tenant, queue, rig.agent_id(CY), **said)
    turns.debit(rig.runtime, rig.tenant, queue, rig.agent_id(ANA), **said)
    turns.give_next(rig.runtime, rig.tenant, queue, rig.agent_id(BEN), **said)
    for _ in range(7):
        rig.assign(price=150000)
    rig.settle_owners()
    rig.audit()
    return GivenBack(rig, since, other)


def test_what_was_given_back_and_credited_then_is_so_again_at_its_time(given_back: GivenBack) -> None:
    rig, since, _ = given_back
    told = replay_past(rig.runtime, rig.tenant, None, since)
    assert told["differences"] == []
    assert told["given_back"] == {"actual": 2, "draft": 2}
    assert told["moves"] == {"repeated": 4, "not_repeated": 0}
    assert sum(row["actual"] for row in told["agents"]) == 8


def test_a_replay_that_repeats_no_single_turns_would_be_noticed(
    given_back: GivenBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, since, _ = given_back
    monkeypatch.setattr(past, "moves_since", lambda *_: [])
    assert replay_past(rig.runtime, rig.tenant, None, since)["differences"]


def test_under_a_draft_whoever_has_the_lead_gives_it_back(given_back: GivenBack, turnlock: Cli, tmp_path: Path) -> None:
    (tmp_path / "draft.yaml").write_text(DRAFT)
    since = ("--since", given_back.since.isoformat(), "--config", str(tmp_path / "draft.yaml"))
    told = turnlock.json("replay-history", "acme", *since)
    assert told["given_back"] == {"actual": 2, "draft": 2}
    # The cheap one is Dee's by the rule; Dee gives it back, and the rule names nobody else.
    (passed_on,) = (one["draft"] for one in told["differences"] if one["lead"] == given_back.passed_on)
    assert (passed_on["rule"], passed_on["outcome"], passed_on["reason"]) == ("Cheap", "held", "target_away")
    assert sum(row["draft"] for row in told["agents"]) == 7
    text = turnlock("replay-history", "acme", *since).stdout
    assert "Given back: 2, would be 2" in text
    assert "4 repeated at their time, 0 not" in text


def test_what_cannot_be_tried_is_told_at_once(make_rig: Callable[..., Rig], turnlock: Cli) -> None:
    make_rig(worker=False)
    wrong = ("--field", "sauce=Web", "--field", "price=much", "--field", "city", "--field", "zip=1", "--field", "zip=2")
    told = turnlock("simulate", "acme", *wrong, code=1).stderr
    for part in ("'sauce': names no field", "price: 'much' is no number", "'city': no value", "zip: given twice"):
        assert part in told
    assert "give --field" in turnlock("simulate", "acme", code=2).stderr
    assert "knows no fields of a lead '7'" in turnlock("simulate", "acme", "--lead", "7", code=1).stderr
