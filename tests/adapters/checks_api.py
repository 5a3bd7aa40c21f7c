"""Checks of what goes out: the CRM's API over a real socket."""

from __future__ import annotations

import math
from dataclasses import fields
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from adapters.base import Capability, Credentials
from adapters.client import CrmError, Outcome
from routing.model import Lead, UnassignedDefinition
from tests.adapters.conformance import (
    CANARIES,
    FOREIGN_URL,
    OLD_URL,
    URL,
    WRITES,
    calls,
    check,
    crm_error,
    lead,
)
from tests.adapters.kit import NOW, AgentRow, Kit, LeadRow
from tests.adapters.loopback import Received, Reply, Server, reset


@check()
def leads_are_read_and_missing_ones_are_absent(kit: Kit) -> None:
    with kit.running() as running:
        pond = "7" if kit.ponds and not kit.pond_is_owner else None
        running.fake.add_leads(LeadRow("5001"), LeadRow("5002", owner="12", pond=pond, collaborators=["3"]))
        found = kit.adapter.fetch_leads(running.client, ["5002", "5001", "5999"])
        assert set(found) == {"5001", "5002"}
        assert all(ref == held.ref for ref, held in found.items())
        assert found["5001"].owner_ref is None
        assert (found["5002"].owner_ref, found["5002"].pond_ref) == ("12", pond)
        assert found["5002"].created_at == NOW - timedelta(hours=1)
        assert found["5001"].emails == ("canary@example.com",)
        assert kit.adapter.fetch_leads(running.client, []) == {}


@check(Capability.BATCH_READ)
def leads_are_read_in_batches(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_leads(*(LeadRow(str(5000 + n)) for n in range(250)))
        refs = [str(5000 + n) for n in range(250)]
        kit.adapter.fetch_leads(running.client, refs[:1])  # what is asked once for an account does not count
        running.server.received.clear()
        assert set(kit.adapter.fetch_leads(running.client, refs)) == set(refs)
        assert len(running.server.received) <= math.ceil(250 / kit.adapter.max_batch)


@check()
def the_same_owner_twice_is_harmless(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_leads(LeadRow("5001"))
        kit.adapter.set_owner(running.client, lead(), "12")
        kit.adapter.set_owner(running.client, lead(owner="12"), "12")
        assert running.fake.leads["5001"].owner == "12"
        read = kit.adapter.fetch_leads(running.client, ["5001"])["5001"]
        assert read.owner_ref == "12"


@check(Capability.WRITE_ANSWERS_OWNER)
def a_write_answers_the_owner_that_is_stored(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_leads(LeadRow("5001"))
        assert kit.adapter.set_owner(running.client, lead(), "12").owner_ref == "12"
        running.fake.leads["5001"].owner = None
        running.fake.refuses_owners = True
        written = kit.adapter.set_owner(running.client, lead(), "13")
        assert (written.owner_ref, written.conflict) == (None, False)
        for answer in (None, {}, [], {"ok": True}, b""):
            running.server.handle = lambda _, a=answer: Reply(body=a)
            assert crm_error(lambda: kit.adapter.set_owner(running.client, lead(), "13")).outcome is Outcome.UNKNOWN


@check(Capability.CONDITIONAL_WRITE)
def a_conditional_write_yields_to_a_human(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_leads(LeadRow("5001", owner="99"))
        assert kit.adapter.set_owner(running.client, lead(), "12").conflict
        assert running.fake.leads["5001"].owner == "99"
        assert not kit.adapter.set_owner(running.client, lead(owner="99"), "12").conflict
        assert running.fake.leads["5001"].owner == "12"


@check(Capability.NULL_OWNER)
def no_owner_is_read_as_none(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_leads(LeadRow("5001"))
        assert kit.adapter.fetch_leads(running.client, ["5001"])["5001"].owner_ref is None


@check()
def agents_are_listed_to_the_end_with_deactivated_ones(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_agents(*(AgentRow(str(n), active=n % 50 != 0) for n in range(1, 251)))
        found = list(kit.adapter.list_agents(running.client))
        gone = set() if kit.shows_deactivated else {50, 100, 150, 200, 250}
        assert sorted(int(a.ref) for a in found) == sorted(set(range(1, 251)) - gone)
        assert {int(a.ref) for a in found if not a.active} == {50, 100, 150, 200, 250} - gone
        assert all(a.name and a.zone == kit.zone for a in found)
        one = kit.adapter.get_agent(running.client, "50")
        assert one is None or not one.active
        assert (one is not None) == kit.shows_deactivated
        assert kit.adapter.get_agent(running.client, "49") in found
        assert kit.adapter.get_agent(running.client, "999") is None


@check(Capability.AGENT_PAUSE)
def the_crms_own_pause_is_seen(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_agents(AgentRow("12"), AgentRow("13", paused=True))
        assert {a.ref: (a.paused, a.active) for a in kit.adapter.list_agents(running.client)} == {
            "12": (False, True),
            "13": (True, True),
        }


@check(Capability.NOTES)
def a_note_is_found_by_its_marker(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_leads(LeadRow("5001"), LeadRow("5002"))
        assert not kit.adapter.find_note(running.client, "5001", "[tl:9f]")
        kit.adapter.add_note(running.client, "5001", "Routed", "Rule Ä\nto Ann [tl:9f]")
        assert running.fake.leads["5001"].notes == [("Routed", "Rule Ä\nto Ann [tl:9f]")]
        assert kit.adapter.find_note(running.client, "5001", "[tl:9f]")
        assert not kit.adapter.find_note(running.client, "5001", "[tl:77]")
        assert not kit.adapter.find_note(running.client, "5002", "[tl:9f]")


@check(Capability.TASKS)
def a_task_has_its_agent_and_time_and_is_found_by_its_marker(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_leads(LeadRow("5001"), LeadRow("5002"))
        due = datetime(2026, 3, 2, 18, 5, tzinfo=timezone(timedelta(hours=1)))
        kit.adapter.add_task(running.client, "5001", "12", "Call Ä", "[tl:9f]", due)
        ((agent, text, until),) = running.fake.leads["5001"].tasks
        assert (agent, text) == ("12", "Call Ä [tl:9f]")
        assert datetime.fromisoformat(until) == due
        assert kit.adapter.find_task(running.client, "5001", "[tl:9f]")
        assert not kit.adapter.find_task(running.client, "5001", "[tl:77]")
        assert not kit.adapter.find_task(running.client, "5002", "[tl:9f]")


@check(Capability.COLLABORATORS)
def a_collaborator_is_added_to_those_there(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_agents(*(AgentRow(ref) for ref in ("3", "4", "12")))
        running.fake.add_leads(LeadRow("5001", owner="12", collaborators=["3"]))
        for _ in range(2):
            kit.adapter.add_collaborator(running.client, lead(owner="12"), "4")
        assert running.fake.leads["5001"].collaborators == ["3", "4"]
        assert running.fake.leads["5001"].owner == "12"
        read = kit.adapter.fetch_leads(running.client, ["5001"])["5001"]
        assert (read.owner_ref, set(read.collaborator_refs)) == ("12", {"3", "4"})  # the owner is none of them


@check(Capability.TEAMS)
def teams_are_read_with_their_active_agents(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_agents(*(AgentRow(str(n), active=n % 7 != 0) for n in range(1, 251)))
        running.fake.teams = {"81": ("North", [str(n) for n in range(1, 120)]), "82": ("South", ["2", "9"])}
        found = {team.name: team for team in kit.adapter.list_teams(running.client)}
        assert set(found) == {"North", "South"}
        assert set(found["North"].agent_refs) == {str(n) for n in range(1, 120) if n % 7}
        assert (found["South"].ref, found["South"].agent_refs) == ("82", ("2", "9"))


@check(Capability.TEST_LEAD)
def a_test_lead_is_made_and_removed(kit: Kit) -> None:
    nobody = UnassignedDefinition(pond_refs=frozenset({"7"}) if kit.ponds else frozenset())
    with kit.running() as running:
        ref = kit.adapter.add_test_lead(running.client, "Test Turnlock", "canary@example.com", nobody)
        assert nobody.covers(kit.adapter.fetch_leads(running.client, [ref])[ref])
        for _ in range(2):
            kit.adapter.remove_test_lead(running.client, ref)
            assert kit.adapter.fetch_leads(running.client, [ref]) == {}


@check(Capability.SWEEP)
def the_sweep_finds_each_unassigned_lead_once(kit: Kit) -> None:
    since = NOW - timedelta(hours=2)
    with kit.running() as running:
        running.fake.add_leads(
            *(LeadRow(str(5000 + n), created=NOW - timedelta(minutes=30, seconds=n)) for n in range(230)),
            *(LeadRow(str(6000 + n), owner="12", created=NOW - timedelta(minutes=31)) for n in range(20)),
            *(LeadRow(str(8000 + n), created=NOW - timedelta(days=3, minutes=n)) for n in range(20)),
            LeadRow("9001", owner="3"),
        )
        definitions: list[tuple[dict[str, frozenset[str]], set[str]]] = [
            ({}, set()),
            ({"user_refs": frozenset({"3"})}, {"9001"}),
        ]
        if kit.ponds:
            running.fake.add_leads(LeadRow("9002", pond="7"), LeadRow("9003", pond="8"))
            definitions += [
                ({"pond_refs": frozenset({"7"})}, {"9002"}),
                ({"user_refs": frozenset({"3"}), "pond_refs": frozenset({"7", "8"})}, {"9001", "9002", "9003"}),
            ]

        def sweep(**definition: Any) -> list[str]:
            pages = kit.adapter.unassigned_since(running.client, since, UnassignedDefinition(**definition))
            return [ref for page in pages for ref in page]

        free = {str(5000 + n) for n in range(230)}
        for definition, more in definitions:
            found = sweep(**definition)
            assert set(found) == free | more
            assert len(found) == len(set(found))


@check(Capability.SWEEP_CHANGES)
def the_sweep_of_changes_finds_old_leads_that_lost_their_owner(kit: Kit) -> None:
    since, long_ago = NOW - timedelta(hours=2), NOW - timedelta(days=90)
    with kit.running() as running:
        running.fake.add_leads(
            *(
                LeadRow(str(5000 + n), created=long_ago, changed=NOW - timedelta(minutes=30, seconds=n))
                for n in range(230)
            ),
            *(LeadRow(str(6000 + n), owner="12", created=long_ago, changed=NOW - timedelta(hours=1)) for n in range(9)),
            *(LeadRow(str(8000 + n), created=long_ago, changed=NOW - timedelta(days=3)) for n in range(9)),
            LeadRow("9001", owner="3", created=long_ago, changed=NOW - timedelta(minutes=40)),
        )
        for users, more in ((frozenset[str](), set[str]()), (frozenset({"3"}), {"9001"})):
            pages = kit.adapter.changed_since(running.client, since, UnassignedDefinition(users))
            found = [ref for page in pages for ref in page]
            assert set(found) == {str(5000 + n) for n in range(230)} | more
            assert len(found) == len(set(found))


@check(Capability.WEBHOOK_API)
def subscriptions_are_reconciled(kit: Kit) -> None:
    topics = sorted(kit.adapter.topics)
    with kit.running() as running:
        fake, adapter = running.fake, kit.adapter
        fake.add_hook(topics[0], OLD_URL)
        fake.add_hook(topics[0], URL, active=False)
        fake.add_hook("retiredTopic", URL)
        fake.add_hook(topics[0], FOREIGN_URL)
        for _ in range(2):
            left = adapter.subscribe(running.client, URL)
            assert left.by_hand == ()
            assert sorted(h.topic for h in left.hooks if h.active and h.url == URL) == topics
            assert fake.standing(URL) == [(t, True) for t in topics]
            assert fake.standing(OLD_URL) == []
            assert fake.standing(FOREIGN_URL) == [(topics[0], True)]
        settled = len(running.server.written)
        adapter.subscribe(running.client, URL)
        assert len(running.server.written) == settled
        assert adapter.unsubscribe(running.client, URL) > 0
        assert adapter.unsubscribe(running.client, URL) == 0
        assert fake.standing(URL) == []
        assert fake.standing(FOREIGN_URL) == [(topics[0], True)]


@check(Capability.APP_HOOKS_API)
def the_hook_of_an_app_is_made_and_taken_from_no_other_installation(kit: Kit) -> None:
    assert set(kit.app_access) == set(kit.adapter.app_access)
    with kit.running() as running:
        secret = {name for name, is_secret in kit.adapter.app_access.items() if is_secret}
        given = {which: {n: v for n, v in kit.app_access.items() if (n in secret) is which} for which in (False, True)}
        running.client.credentials = Credentials(given[False], given[True])
        fake, subscribe = running.fake, kit.adapter.subscribe_app
        made = subscribe(running.client, URL, replace=False)
        assert (fake.app_target, made.by_hand) == (URL, ())
        topics = dict.fromkeys((hook.topic for hook in made.hooks), True)
        assert fake.app_topics == topics
        assert {topic.partition(" ")[0] for topic in topics} == set(kit.adapter.topics)
        fake.app_topics |= {min(topics): False, "deal.creation": True}
        del fake.app_topics[max(topics)]
        subscribe(running.client, URL, replace=False)
        assert fake.app_topics == topics | {"deal.creation": True}
        settled = len(running.server.written)
        subscribe(running.client, URL, replace=False)
        (left,) = subscribe(running.client, FOREIGN_URL, replace=False).by_hand
        assert (len(running.server.written), fake.app_target) == (settled, URL)
        assert "--replace" in left
        subscribe(running.client, FOREIGN_URL, replace=True)
        assert fake.app_target == FOREIGN_URL


@check()
def a_healthy_connection_has_only_good_findings(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_agents(AgentRow("12"))
        if Capability.WEBHOOK_API in kit.adapter.capabilities:
            kit.adapter.subscribe(running.client, URL)
        running.server.received.clear()
        findings = kit.adapter.check(running.client, URL)
        assert len(findings) >= 3
        assert [f for f in findings if not f.ok] == []
        assert running.server.written == []
        assert all(f.ok for f in kit.adapter.check(running.client, None))


@check()
def a_check_reports_every_problem_and_raises_none(kit: Kit) -> None:
    with kit.running() as running:
        lost = [f for f in kit.adapter.check(running.client, URL) if not f.ok]
        readable = {"hooks"} if Capability.WEBHOOK_API in kit.adapter.capabilities else set()
        assert {f.where for f in lost} >= {"agents"} | readable
        for reply in (Reply(401), Reply(403, {}), Reply(500), Reply(body=b"<html>"), Reply(body=[]), Reply(body={})):
            running.server.handle = lambda _, r=reply: r
            findings = kit.adapter.check(running.client, URL)
            assert len(findings) >= 3
            assert any(not f.ok for f in findings)
            assert all(f.fix and f.what for f in findings if not f.ok)


@check()
def a_skewed_clock_is_reported(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_agents(AgentRow("12"))
        for minutes, well in ((0, True), (-4, False), (4, False)):
            running.fake.clock_is_off = timedelta(minutes=minutes)
            clocks = [f for f in kit.adapter.check(running.client, None) if f.where == "clock"]
            assert [f.ok for f in clocks] == [well]


@check()
def a_write_is_sent_once_whatever_comes_back(kit: Kit) -> None:
    with kit.running() as running:
        expected = {
            400: Outcome.REFUSED, 401: Outcome.REAUTHORISE, 403: Outcome.FORBIDDEN, 404: Outcome.GONE,
            408: Outcome.UNKNOWN, 429: Outcome.WAIT, 500: Outcome.UNKNOWN, 502: Outcome.UNKNOWN, 503: Outcome.WAIT,
            504: Outcome.UNKNOWN, None: Outcome.UNKNOWN,
        }  # fmt: skip
        if kit.missing is None:
            expected[404] = Outcome.WAIT
        running.fake.add_agents(AgentRow("12"))
        for name, call in calls(kit, running).items():
            if name not in WRITES or name == "subscribe":
                continue
            for status, outcome in expected.items():
                running.fake.add_leads(LeadRow("5001"))
                body = kit.missing if status == 404 else {"error": "x"}
                failing = reset() if status is None else Reply(status, body, {"Retry-After": "4", **kit.refusal})
                running.server.handle = lambda asked, f=failing: f if kit.writes(asked) else running.fake.handle(asked)
                running.server.received.clear()
                error = crm_error(call)
                assert error.outcome is outcome, (name, status)
                assert error.retry_after == (None if status is None else 4.0)
                assert len(running.server.written) == 1, (name, status)


@check()
def odd_answers_raise_only_crm_errors(kit: Kit) -> None:
    odd: list[Reply] = [
        Reply(body=body)
        for body in (b"<html>Maintenance</html>", b"", b"[]", b"null", b'"x"', b"7", b"{}", b'{"a": [1]}', b"[" * 99)
    ]
    odd += [Reply(body={k: [7, None, {"id": []}] for k in ("people", "leads", "users", "agents", "hooks", "notes")})]
    odd += [Reply(status, {"error": "x"}) for status in (302, 400, 401, 404, 409, 412, 422, 429, 500, 503)]
    odd += [Reply(500, b"<html>"), Reply(429, b"", {"Retry-After": "soon"}), reset()]
    with kit.running() as running:
        for reply in odd:
            running.server.handle = lambda _, r=reply: r
            for name, call in calls(kit, running).items():
                try:
                    call()
                except CrmError:
                    continue
                except Exception as error:
                    raise AssertionError(f"{name} raised {error!r} for {reply}") from error


@check()
def a_redirect_is_never_followed(kit: Kit) -> None:
    with Server(lambda _: Reply(body={})).running() as other, kit.running() as running:
        running.server.handle = lambda _: Reply(307, headers={"Location": f"{other.url}/stolen"})
        for call in calls(kit, running).values():
            assert crm_error(call).outcome is Outcome.REDIRECTED
        assert other.received == []


@check()
def errors_tell_no_secret_and_no_person(kit: Kit) -> None:
    def echo(asked: Received) -> Reply:
        return Reply(400, {"error": f"canary-person {dict(asked.headers)} {asked.body!r}"})

    with kit.running() as running:
        running.server.handle = echo
        printed = ""
        for name, call in calls(kit, running).items():
            if name == "subscribe" and Capability.WEBHOOK_API in kit.adapter.capabilities:
                continue
            error = crm_error(call)
            printed += f"{error} {error!r} {error.text} {error.__cause__!r} {error.__context__!r} {error.args}"
        printed += repr(kit.adapter.check(running.client, URL))
    assert printed
    for canary in (*CANARIES, *kit.credentials.secrets.values()):
        assert canary not in printed


@check()
def the_adapter_is_what_it_declares(kit: Kit) -> None:
    adapter = kit.adapter
    assert adapter.name == kit.name
    assert adapter.capabilities <= frozenset(Capability)
    assert adapter.default_base_url is None or adapter.default_base_url.startswith("https://")
    assert adapter.max_batch >= (2 if Capability.BATCH_READ in adapter.capabilities else 1)
    assert adapter.not_in_payload <= {f.name for f in fields(Lead)}
    assert not adapter.not_in_payload or Capability.COMPLETE_PAYLOAD in adapter.capabilities
    if {Capability.SIGNED_WEBHOOKS, Capability.HOOK_PASSWORD} & adapter.capabilities:
        assert adapter.hook_secret in kit.credentials.secrets
    else:
        assert adapter.hook_secret is None
        assert Capability.COMPLETE_PAYLOAD not in adapter.capabilities
    assert not adapter.settle or adapter.missing_is_final_after > adapter.settle
    body, kind = adapter.acknowledgement()
    assert isinstance(body, str)
    assert "/" in kind
    for needed, method in (
        (Capability.NOTES, lambda c: adapter.add_note(c, "5001", "s", "b")),
        (Capability.NOTES, lambda c: adapter.find_note(c, "5001", "m")),
        (Capability.TASKS, lambda c: adapter.add_task(c, "5001", "12", "t", "m", NOW)),
        (Capability.TASKS, lambda c: adapter.find_task(c, "5001", "m")),
        (Capability.COLLABORATORS, lambda c: adapter.add_collaborator(c, lead(), "4")),
        (Capability.SWEEP_CHANGES, lambda c: adapter.changed_since(c, NOW, UnassignedDefinition())),
        (Capability.APP_HOOKS_API, lambda c: adapter.subscribe_app(c, URL, replace=False)),
    ):
        if needed not in adapter.capabilities:
            with pytest.raises(NotImplementedError):
                method(None)
