"""The command line beside real work: previews, explanations, switches, what is parked, routing by hand, audit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from adapters.base import Unreadable
from adapters.followupboss import FollowUpBoss
from connector.alarms import open_alarm
from connector.database import unit
from connector.settings import Settings
from tests.connector.cli_rig import Cli, command_line, program
from tests.rig import ANA, BEN, CY, DEE, Rig, until

CONFIG = """\
default_queue: All
queues:
  All:
    members: ['12', '13', '14']
  Luxury:
    members: ['15']
    when_nobody: {fallback_queue: All}
rules:
  - name: Luxury
    when: {all: [{field: price, at_least: 1000000}, {field: source, one_of: [Website, Zillow]}]}
    to: {queue: Luxury}
  - name: Friends
    when: {field: source, equals: Friends}
    to: {agent: '16'}
"""


@pytest.fixture
def turnlock(database: Settings) -> Iterator[Cli]:
    with command_line(database) as found:
        yield found


@pytest.fixture
def quiet(make_rig: Callable[..., Rig]) -> Rig:
    """A rig without a worker whose CRM tells nothing by itself: only what a test does happens."""
    rig = make_rig(worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    return rig


def names(rows: list[dict[str, Any]]) -> list[str]:
    """The CRM ids of the agents in rows of JSON."""
    return [row["agent"]["ref"] for row in rows]


# -- asking ----------------------------------------------------------------------------------------------------


def test_the_preview_is_what_happens_and_each_lead_is_explained(make_rig: Callable[..., Rig], turnlock: Cli) -> None:
    rig = make_rig(config=CONFIG)
    assert "Ben Brown (13) is paused now." in turnlock("pause", "acme", "ben brown").stdout
    assert "is paused already." in turnlock("pause", "acme", BEN).stdout
    shown = turnlock.json("queue", "next", "acme", "All", "--count", "3")
    assert names(shown["next"]) == [ANA, CY, ANA]
    assert [row["turn"] for row in shown["next"]] == [1, 2, 3]
    (away,) = shown["unavailable"]
    assert (away["agent"]["ref"], away["skip"]) == (BEN, "paused")
    assert "`turnlock resume`" in away["remedy"]

    refs = []
    for owner in (ANA, CY, ANA):
        refs.append(rig.create(source="Portal", name="Quinn Quimby", price=450000))
        assert rig.wait_owner(refs[-1]) == owner
    rig.settle()
    told = turnlock.json("explain", "acme", refs[1])
    (decision,) = told["decisions"]
    assert told["standing"][0]["confirmed"] is True
    assert [(rule["rule"], rule["matched"]) for rule in decision["rules"]] == [("Luxury", False), ("Friends", False)]
    test = decision["rules"][1]["tests"][0]
    assert test == {
        "field": "source", "test": "equals", "value": "Friends", "not": False, "result": "failed", "lead": "Portal",
    }  # fmt: skip
    (path,) = decision["paths"]
    assert (path["queue"], path["position_before"], path["position_after"], decision["turn"]) == ("All", 1, 2, 2)
    members = [(m["agent"]["ref"], m["state"], m["skip"], m["passed_over"]) for m in path["members"]]
    assert members == [
        (BEN, "unavailable", "paused", True),
        (CY, "taken", None, False),
        (ANA, "available", None, False),
    ]
    owner, note = decision["writes"]
    assert (owner["kind"], owner["state"], note["kind"], note["state"]) == ("owner", "confirmed", "note", "confirmed")
    assert owner["ordered_at"] <= owner["closed_at"]
    assert (decision["cause"], decision["told_by"]["source"], decision["config_version"]) == ("new", "webhook", 1)

    text = turnlock("explain", "acme", str(rig.lead_id(refs[1]))).stdout
    for part in (
        f"Lead {refs[1]} of acme",
        "assigned to Cy Chen (14)",
        "source equals Friends: no, the lead has Portal",
        "looked at queue All, position 1 -> 2",
        "paused: paused by the admin; `turnlock resume`",
        "the CRM shows this agent",
    ):
        assert part in text
    lead = rig.sandbox.lead(lead=int(refs[1]))
    for personal in ("Quinn", "Quimby", *lead["emails"], *lead["phones"]):
        assert str(personal) not in text + json.dumps(told)


def test_other_ways_to_an_agent_are_explained_too(make_rig: Callable[..., Rig], turnlock: Cli) -> None:
    rig = make_rig(config=CONFIG)
    refs = [rig.create(source="Friends"), rig.create(source="Zillow", price=2000000)]  # two queues: any order will do
    assert [rig.wait_owner(ref) for ref in refs] == ["16", DEE]
    turnlock("pause", "acme", DEE)
    refs.append(rig.create(source="Zillow", price=2000000))
    assert rig.wait_owner(refs[2]) == ANA
    direct, luxury, fallback = (turnlock.json("explain", "acme", ref)["decisions"][0] for ref in refs)
    assert (direct["rule"], direct["how"], direct["turn"], direct["paths"]) == ("Friends", "agent", None, [])
    assert (luxury["rule"], luxury["queue"], luxury["turn"]) == ("Luxury", "Luxury", 1)
    empty, taken = fallback["paths"]
    assert (empty["queue"], empty["why"], empty["members"][0]["skip"]) == ("Luxury", "nobody_available", "paused")
    assert (taken["queue"], taken["position_after"], fallback["agent"]["ref"]) == ("All", 1, ANA)
    assert "Luxury: nobody_available" in turnlock("explain", "acme", refs[2]).stdout
    assert "named by the rule, without a turn" in turnlock("explain", "acme", refs[0]).stdout


def test_agents_are_read_and_listed_with_what_keeps_them_away(quiet: Rig, turnlock: Cli) -> None:
    quiet.sandbox.pause_agent(agent=int(CY))
    assert turnlock.json("agents", "sync", "acme")["agents"]["changed"] == 1
    rows = {row["ref"]: row for row in turnlock.json("agents", "list", "acme")["agents"]}
    assert (rows[ANA]["available"], rows[ANA]["queues"]) == (True, ["All"])
    assert (rows[CY]["available"], rows[CY]["skip"], rows[CY]["paused_by_crm"]) == (False, "paused", True)
    assert "paused in the CRM; switch the agent on there" in turnlock("agents", "list", "acme").stdout
    shown = turnlock.json("queue", "show", "acme", "all")
    assert names(shown["members"]) == [ANA, BEN, CY]
    assert [row["available"] for row in shown["members"]] == [True, True, False]
    assert "there are: Ana Alvarez (12), Ben Brown (13)" in turnlock("pause", "acme", "Zoe", code=1).stderr


# -- switches --------------------------------------------------------------------------------------------------


def test_a_pause_until_a_time_on_the_agents_own_clock(quiet: Rig, turnlock: Cli) -> None:
    quiet.configure(CONFIG + "agents: {'13': {zone: Europe/Rome}}\n")
    done = turnlock("pause", "acme", BEN, "--until", "2099-07-06 09:00")
    assert done.stdout == "Ben Brown (13) is paused now, until Mon 6 Jul 2099 09:00 Europe/Rome.\n"
    assert (
        "is paused already, until Mon 6 Jul 2099"
        in turnlock("pause", "acme", BEN, "--until", "2099-07-06T07:00Z").stdout
    )
    (away,) = turnlock.json("queue", "next", "acme", "All")["unavailable"]
    assert away["detail"] == "paused by the admin until Mon 6 Jul 2099 09:00 Europe/Rome; `turnlock resume`"
    ben = next(row for row in turnlock.json("agents", "list", "acme")["agents"] if row["ref"] == BEN)
    assert (ben["paused_by_admin"], ben["paused_until"]) == (True, "2099-07-06T07:00:00+00:00")
    assert "which is past; give a later time" in turnlock("pause", "acme", BEN, "--until", "2020-01-01", code=1).stderr
    assert "is no time; write 24h, 7d" in turnlock("pause", "acme", BEN, "--until", "soon", code=2).stderr
    # Over by itself: nobody has to switch anything.
    quiet.sql("UPDATE agents SET paused_until = now() - interval '1 second' WHERE tenant_id = :t")
    assert turnlock.json("queue", "next", "acme", "All")["unavailable"] == []
    assert "is paused now, until " in turnlock("pause", "acme", BEN, "--until", "90m").stdout
    turnlock("resume", "acme", BEN)
    assert turnlock.json("queue", "next", "acme", "All")["unavailable"] == []


def test_the_preview_says_that_a_queue_is_quiet(quiet: Rig, turnlock: Cli) -> None:
    always = ", ".join(f"{day}: ['00:00-24:00']" for day in ("mon", "tue", "wed", "thu", "fri", "sat", "sun"))
    quiet.configure(CONFIG.replace("  Luxury", f"    quiet_hours: {{zone: UTC, hours: {{{always}}}}}\n  Luxury"))
    shown = turnlock.json("queue", "next", "acme", "All")
    assert (shown["next"], shown["quiet"]) == ([], "always; shorten the queue's quiet hours")
    said = turnlock("queue", "next", "acme", "All").stdout
    assert "It is quiet and holds its leads always" in said
    assert "Whatever comes now is held." in said
    assert turnlock.json("queue", "next", "acme", "Luxury")["quiet"] is None


def test_a_held_lead_is_decided_as_soon_as_somebody_is_resumed(make_rig: Callable[..., Rig], turnlock: Cli) -> None:
    rig = make_rig()
    for ref in (ANA, BEN, CY):
        turnlock("pause", "acme", ref)
    ref = rig.create()
    until(lambda: rig.standing(ref)["state"] == "held", what="a held lead")
    told = turnlock.json("explain", "acme", ref)
    assert (told["standing"][0]["reason"], told["decisions"][0]["outcome"]) == ("nobody_available", "held")
    assert {m["skip"] for m in told["decisions"][0]["paths"][0]["members"]} == {"paused"}
    assert turnlock.json("queue", "next", "acme", "All")["held"] == 1
    (alarm,) = [row for row in turnlock.json("alarms", "acme")["alarms"] if row["kind"] == "leads_held"]
    assert "make a member available" in alarm["text"]
    assert "leads_held" in turnlock("alarms").stdout
    rig.sql("UPDATE agents SET refusals = 3, refused_at = now() WHERE tenant_id = :t AND email LIKE 'ben%'")
    with unit(rig.runtime.engine) as (conn, _):
        open_alarm(conn, rig.tenant.tenant_id, "agent_refused", str(rig.agent_id(BEN)), "the CRM keeps refusing")
    assert "Ben Brown (13) is not paused by the admin now." in turnlock("resume", "acme", BEN).stdout
    assert "agent_refused" not in rig.alarms()
    assert rig.wait_owner(ref) == BEN
    rig.settle()
    rig.audit()


def test_nothing_is_sent_while_sending_is_stopped(make_rig: Callable[..., Rig], turnlock: Cli) -> None:
    rig = make_rig()
    turnlock("outbox", "stop", "acme")
    first = rig.create()
    until(lambda: rig.standing(first)["state"] == "assigned", what="a decision")
    second = rig.create()  # its webhook wakes the senders
    until(lambda: rig.standing(second)["state"] == "assigned", what="a second decision")
    told = turnlock("explain", "acme", first).stdout
    assert "sending to the CRM is stopped; `turnlock outbox start acme`" in told
    assert "not written yet" in told
    found = turnlock.json("check", "acme", code=1)
    assert [row["where"] for row in found["tenants"][0]["findings"] if not row["ok"]] == ["sending"]
    assert rig.owner_writes() == []
    turnlock("outbox", "start", "acme")
    assert [rig.wait_owner(first), rig.wait_owner(second)] == [ANA, BEN]


def test_a_sweep_finds_what_no_webhook_told(make_rig: Callable[..., Rig], turnlock: Cli) -> None:
    rig = make_rig("generic")
    rig.sandbox.webhook_faults(drop=1.0)
    ref = rig.create()
    swept = turnlock.json("sweep", "acme", "--since", "1h")
    assert (swept["seen"], swept["found"]) == (1, 1)
    assert rig.wait_owner(ref) == ANA


# -- parked ----------------------------------------------------------------------------------------------------


def _parked_write(rig: Rig, turnlock: Cli) -> tuple[str, dict[str, Any]]:
    """A lead whose owner write the CRM refuses, and its row of `turnlock parked`."""
    fault = rig.sandbox.fault("status", method="PUT", path="/people", status=422)
    ref = rig.create()
    told = turnlock("route", "acme", ref).stdout
    assert "parked: `turnlock replay` tries again, `turnlock give-up` returns the turn" in told
    rig.sandbox.clear_faults(fault=fault)
    found = turnlock.json("parked", "acme")
    (write,) = found["writes"]
    assert (found["events"], found["leads"], write["lead"], write["agent"]["ref"]) == ([], [], ref, ANA)
    assert write["reason"] == "refused_422"
    assert "`turnlock replay` tries again; `turnlock give-up` ends it" in write["remedy"]
    assert "owner_not_written" in rig.alarms()
    return ref, write


def test_a_parked_write_is_replayed(quiet: Rig, turnlock: Cli) -> None:
    ref, write = _parked_write(quiet, turnlock)
    done = turnlock("route", "acme", ref, code=1)
    assert f"waits behind write {write['write_id']}, which is parked" in done.stderr
    (row,) = turnlock.json("replay", "acme", write["write_id"])["replayed"]
    assert (row["kind"], row["again"]) == ("write", True)
    assert "owner_not_written" not in quiet.alarms()
    quiet.start_worker()
    assert quiet.wait_owner(ref) == ANA
    assert turnlock("parked", "acme").stdout == "Nothing is parked.\n"
    assert turnlock("replay", "acme", "--all").stdout == "Nothing is parked.\n"


def test_a_parked_write_is_given_up_and_its_turn_comes_back(quiet: Rig, turnlock: Cli) -> None:
    ref, write = _parked_write(quiet, turnlock)
    done = turnlock.json("give-up", "acme", write["write_id"])
    assert (done["lead"], done["agent"]["ref"], done["turn_given_back"]) == (ref, ANA, 1)
    assert "is given_up, not parked" in turnlock("give-up", "acme", write["write_id"], code=1).stderr
    assert quiet.standing(ref)["reason"] == "given_up"
    assert quiet.void_turns() == {1: "given_up"}
    assert "owner_not_written" not in quiet.alarms()
    shown = turnlock.json("queue", "next", "acme", "All", "--count", "2")
    assert [(row["agent"]["ref"], row["how"], row["turn"]) for row in shown["next"]] == [
        (ANA, "owed", 2),
        (BEN, "line", 3),
    ]
    routed = turnlock.json("route", "acme", ref)
    assert [d["turn_void"] for d in routed["decisions"]] == ["given_up", None]
    assert (routed["result"], quiet.owner(ref)) == ("by_hand", ANA)
    quiet.audit()


def test_a_body_that_could_not_be_read_is_read_again(
    quiet: Rig, turnlock: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [quiet.create(), quiet.create()]

    def cannot(*_: object) -> None:
        raise Unreadable("new_shape")

    with monkeypatch.context() as older:
        older.setattr(FollowUpBoss, "parse", cannot)
        assert quiet.post(quiet.delivery(*refs)).status == 200
        (event,) = turnlock.json("parked", "acme")["events"]
        assert (event["reason"], event["source"]) == ("new_shape", "webhook")
        assert "unreadable_event" in quiet.alarms()
        done = turnlock("replay", "acme", event["event_id"], code=1)
        assert "still unreadable (new_shape); it stays parked" in done.stdout
    (row,) = turnlock.json("replay", "acme", "--all")["replayed"]
    assert row["text"] == "can be read now and waits to be decided; 1 more of its delivery too"
    assert "unreadable_event" not in quiet.alarms()
    quiet.post(quiet.delivery(*refs))  # the CRM sends it again: known by now
    quiet.start_worker()
    assert [quiet.wait_owner(ref) for ref in refs] == [ANA, BEN]
    quiet.settle()
    assert quiet.position() == 2
    assert [event.state for event in quiet.events()] == ["done", "done"]


def test_a_body_past_its_keeping_time_says_where_its_leads_are_found(quiet: Rig, turnlock: Cli) -> None:
    assert quiet.post(b'{"event": "peopleCreated", "resourceIds": 7}').status == 200
    quiet.sql("DELETE FROM delivery_bodies WHERE tenant_id = :t")
    assert "`turnlock sweep` finds leads" in turnlock("replay", "acme", "--all", code=1).stdout


def test_an_event_and_a_lead_are_replayed(quiet: Rig, turnlock: Cli) -> None:
    first, second = quiet.create(), quiet.create()
    quiet.post(quiet.delivery(first))
    quiet.sql("UPDATE events SET state = 'parked', reason = 'fault_valueerror', attempt = 5 WHERE tenant_id = :t")
    turnlock("route", "acme", second)
    quiet.sandbox.clear_owner(lead=int(second))
    quiet.sql("UPDATE lead_roles SET state = 'parked', reason = 'keeps_coming_back' WHERE tenant_id = :t")
    quiet.sql("UPDATE assignments SET state = 'released' WHERE tenant_id = :t")
    found = turnlock.json("parked", "acme")
    assert "see the worker's log" in found["events"][0]["remedy"]
    assert (found["leads"][0]["lead"], found["leads"][0]["reason"]) == (second, "keeps_coming_back")
    assert "Parked leads:" in turnlock("parked", "acme").stdout
    done = turnlock.json("replay", "acme", "--all")["replayed"]
    assert [(row["kind"], row["again"]) for row in done] == [("event", True), ("lead", True)]
    quiet.start_worker()
    assert quiet.wait_owner(first) == BEN
    assert quiet.wait_owner(second) == CY
    assert [cause for cause, _, _ in quiet.decisions(second)] == ["new", "by_hand"]


# -- by hand ---------------------------------------------------------------------------------------------------


def test_a_lead_is_routed_by_hand_without_a_worker(quiet: Rig, turnlock: Cli) -> None:
    ref = quiet.create()
    told = turnlock.json("route", "acme", ref)
    assert (told["result"], told["decided"], told["standing"][0]["confirmed"]) == ("new", True, True)
    assert quiet.owner(ref) == ANA
    assert quiet.sandbox.lead(lead=int(ref))["notes"]
    again = turnlock("route", "acme", str(quiet.lead_id(ref)))
    assert again.stdout.startswith("Nothing was decided: the lead has its agent already.")
    quiet.sandbox.set_owner(lead=int(ref), agent=int(DEE))
    assert "the human wins" in turnlock("route", "acme", ref).stdout
    assert len(quiet.owner_writes()) == 1
    assert "the CRM does not show a lead '999'" in turnlock("route", "acme", "999", code=1).stderr
    quiet.audit()


def test_a_lead_is_routed_beside_a_worker(make_rig: Callable[..., Rig], turnlock: Cli) -> None:
    rig = make_rig("generic")
    refs = [rig.create() for _ in range(3)]
    for ref in refs:
        assert turnlock.json("route", "acme", ref)["standing"][0]["state"] == "assigned"
    rig.settle()
    assert rig.turns() == [ANA, BEN, CY]
    assert len(rig.owner_writes()) == 3
    assert "the CRM has no lead 'nobody'" in turnlock("route", "acme", "nobody", code=1).stderr
    rig.audit()


def test_a_crm_that_cannot_be_read_is_told_and_the_lead_stays_in_the_inbox(quiet: Rig, turnlock: Cli) -> None:
    ref = quiet.create()
    quiet.sandbox.fault("status", method="GET", path="/people", status=503)
    done = turnlock("route", "acme", ref, "--wait", "0.3", code=1)
    assert "is not decided yet: " in done.stderr
    assert "It stays in the inbox" in done.stderr
    assert [event.state for event in quiet.events()] == ["waiting"]


# -- audit -----------------------------------------------------------------------------------------------------


TAMPERED = (
    ("UPDATE members SET tag = tag + 1 WHERE tenant_id = :t", "present state: other_state: tag of"),
    ("UPDATE members SET tag = tag - 1 WHERE tenant_id = :t", None),
    ("DELETE FROM turns WHERE tenant_id = :t AND turn = 2", "position 2, but 1 turns up to 1"),
    (
        "UPDATE ledger SET data = jsonb_set(data, '{agent}', to_jsonb(CAST(:a AS text))) "
        "WHERE tenant_id = :t AND data ->> 'turn' = '1'",
        "entry 2: ",
    ),
)


def test_an_audit_fails_at_the_first_turn_that_does_not_follow(quiet: Rig, turnlock: Cli) -> None:
    for _ in range(2):
        turnlock("route", "acme", quiet.create())
    good = turnlock.json("audit", "acme", "--whole")
    assert good["ok"] is True
    assert good["tenants"][0]["queues"][0].keys() == {"queue", "ok", "position", "entries", "problems"}
    for tamper, said in TAMPERED:
        assert quiet.sql(tamper, a=str(quiet.agent_id(CY))) > 0
        done = turnlock("audit", "acme", "--whole", code=0 if said is None else 1)
        assert said is None or f"acme, queue All: the first that does not follow:\n  {said}" in done.stdout
    assert turnlock.json("audit", "acme", code=1)["ok"] is False
    assert turnlock.process("audit").returncode == 1


# -- into the CRM, out of it, and check ------------------------------------------------------------------------


def test_a_tenant_is_checked_installed_and_uninstalled(quiet: Rig, turnlock: Cli) -> None:
    found = turnlock.json("check", "acme")
    assert found["ok"] is True
    assert {row["where"] for row in found["server"]} == {"settings", "database", "schema", "public URL"}
    hook = quiet.sandbox.hooks()[0]["id"]
    quiet.sandbox.change_hook(hook=hook, active=False)
    assert "WRONG  acme" in turnlock("check", code=1).stdout
    assert "Subscribed: " in turnlock("install", "acme").stdout
    assert turnlock.json("check", "acme")["ok"] is True

    assert turnlock("uninstall", "acme", code=1, text="n\n").stdout == ""
    quiet.sandbox.fault("status", path="/webhooks", status=401, times=1)
    assert "use --force" in turnlock("uninstall", "acme", "--yes", code=1).stderr
    assert turnlock.json("uninstall", "acme", "--yes")["hooks_removed"] == len(FollowUpBoss.topics)
    assert quiet.sandbox.hooks() == []
    assert turnlock.json("tenant", "list")["tenants"] == []
    (gone,) = turnlock.json("tenant", "list", "--all")["tenants"]
    assert gone["status"] == "removed"
    assert "was uninstalled" in turnlock("install", gone["name"], code=1).stderr
    assert turnlock("config", "export", gone["name"]).stdout.startswith("version: 1")


def test_serve_runs_until_it_is_told_to_stop(turnlock: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {"PATH": os.environ["PATH"], **turnlock.env, "TURNLOCK_PORT": str(port)}

    def ready() -> bool:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    with subprocess.Popen([program(), "serve"], env=env, stderr=subprocess.PIPE, text=True) as running:
        until(ready, 30.0, "a server that is ready")
        taken = turnlock.process("web", env=turnlock.env | {"TURNLOCK_PORT": str(port)})
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
        assert running.stderr is not None
        said = [json.loads(line) for line in running.stderr.read().splitlines()]
    assert {"listening", "stopping"} <= {row["event"] for row in said}
    assert taken.returncode == 1
    assert "Error: the port is taken by another program" in taken.stderr
