"""The suite that every adapter inherits.

A check takes a :class:`tests.adapters.kit.Kit` and fails by raising. :func:`cases` pairs every adapter of the
registry with every check that its *declared* capabilities select: there is nothing to skip and no way to opt out.
Checks that need more than an adapter (a database, a running service) can be added with :func:`check` elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from adapters import registry
from adapters.base import Adapter, Capability, Event, EventKind, Rejected, Unreadable, WebhookRequest
from adapters.client import CrmError, Outcome
from routing.model import Lead, UnassignedDefinition
from tests.adapters.kit import NOW, AgentRow, Kit, LeadRow, Running, deliveries, plain, replaced
from tests.adapters.loopback import Received, Reply, Server, reset

Check = Callable[[Kit], None]
URL = "https://hooks.example.com/hooks/token-now"
OLD_URL = "https://hooks.example.com/hooks/token-of-old"
FOREIGN_URL = "https://other.example.com/hooks/token-now"
CANARIES = ("canary", "Y2FuYXJ5")  # in clear, and at the start of base64


@dataclass(frozen=True)
class Case:
    check: Check
    needs: frozenset[Capability]


CHECKS: dict[str, Case] = {}


def check(*needs: Capability) -> Callable[[Check], Check]:
    """Register a check for every adapter that declares all of `needs`."""

    def register(function: Check) -> Check:
        assert function.__name__ not in CHECKS
        CHECKS[function.__name__] = Case(function, frozenset(needs))
        return function

    return register


def cases() -> list[Any]:
    """Every adapter with every check that its capabilities select."""
    return [
        pytest.param(name, title, id=f"{name}-{title}")
        for name in registry.names()
        for title, case in CHECKS.items()
        if case.needs <= registry.adapter(name).capabilities
    ]


# -- helpers ---------------------------------------------------------------------------------------------------------


def accepted(kit: Kit, request: WebhookRequest, *secrets: bytes, now: datetime = NOW) -> None:
    verdict: Any = kit.adapter.verify(request, secrets or kit.secrets[:1], now)  # type: ignore[func-returns-value]
    assert verdict is None, "a verdict is an exception, never a value that a caller may forget to look at"


def rejected(kit: Kit, request: WebhookRequest, *secrets: bytes, now: datetime = NOW) -> None:
    with pytest.raises(Rejected) as caught:
        kit.adapter.verify(request, secrets, now)
    told = f"{caught.value!r} {caught.value} {caught.value.__cause__!r} {caught.value.__context__!r}"
    assert not any(c in told for c in CANARIES)


def events(kit: Kit, body: Any, **headers: str) -> list[Event]:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return kit.adapter.parse(kit.signed(sent, headers=headers))


def parks(kit: Kit, body: Any, **headers: str) -> bool:
    """Whether `body` is refused as a whole or has an element that is parked."""
    try:
        return any(e.kind is EventKind.UNREADABLE for e in events(kit, body, **headers))
    except Unreadable:
        return True


def crm_error(call: Callable[[], Any]) -> CrmError:
    with pytest.raises(CrmError) as caught:
        call()
    return caught.value


def lead(ref: str = "5001", owner: str | None = None) -> Lead:
    return Lead(ref=ref, owner_ref=owner)


def calls(kit: Kit, running: Running) -> dict[str, Callable[[], Any]]:
    """Every outbound method of the adapter, by the capabilities it has."""
    adapter, client, has = kit.adapter, running.client, kit.adapter.capabilities.__contains__
    made: dict[str, Callable[[], Any]] = {
        "fetch_leads": lambda: adapter.fetch_leads(client, ["5001"]),
        "set_owner": lambda: adapter.set_owner(client, lead(), "12"),
        "list_agents": lambda: list(adapter.list_agents(client)),
        "get_agent": lambda: adapter.get_agent(client, "12"),
    }
    if type(adapter).resolve is not Adapter.resolve:  # else the ref of an event is the lead's own
        made["resolve"] = lambda: adapter.resolve(client, "61")
    if has(Capability.NOTES):
        made["find_note"] = lambda: adapter.find_note(client, "5001", "[marker]")
        made["add_note"] = lambda: adapter.add_note(client, "5001", "Routed", "To canary-person [marker]")
    if has(Capability.COLLABORATORS):
        made["add_collaborator"] = lambda: adapter.add_collaborator(client, lead(), "12")
    if has(Capability.SWEEP):
        everything = UnassignedDefinition(frozenset({"3"}), frozenset({"7"}), include_unclaimed=True)
        made["unassigned_since"] = lambda: list(adapter.unassigned_since(client, NOW - timedelta(hours=2), everything))
    if has(Capability.WEBHOOK_API):
        made["subscribe"] = lambda: adapter.subscribe(client, URL)
        made["unsubscribe"] = lambda: adapter.unsubscribe(client, URL)
    return made


WRITES = ("set_owner", "add_note", "add_collaborator", "subscribe")


# -- verification ----------------------------------------------------------------------------------------------------


@check(Capability.SIGNED_WEBHOOKS)
def accepts_good_deliveries(kit: Kit) -> None:
    for fixture in deliveries(kit.name):
        accepted(kit, kit.delivery(fixture))


@check(Capability.SIGNED_WEBHOOKS)
def rejects_a_missing_or_empty_signature(kit: Kit) -> None:
    good = kit.delivery(deliveries(kit.name)[0])
    for name in kit.signature_headers:
        rejected(kit, replace(good, headers={k: v for k, v in good.headers.items() if k != name}), kit.secrets[0])
        for empty in ("", " ", ",", "v1,"):
            rejected(kit, replace(good, headers={**good.headers, name: empty}), kit.secrets[0])
    rejected(kit, replace(good, headers={}), kit.secrets[0])


@check(Capability.SIGNED_WEBHOOKS)
def rejects_a_flipped_signature(kit: Kit) -> None:
    good = kit.delivery(deliveries(kit.name)[0])
    for name in kit.signature_headers:
        value = good.headers[name]
        for at, old in enumerate(value):
            flipped = value[:at] + ("b" if old != "b" else "c") + value[at + 1 :]
            rejected(kit, replace(good, headers={**good.headers, name: flipped}), kit.secrets[0])
        rejected(kit, replace(good, headers={**good.headers, name: value[:-1]}), kit.secrets[0])
        rejected(kit, replace(good, headers={**good.headers, name: value + "é"}), kit.secrets[0])


@check(Capability.SIGNED_WEBHOOKS)
def rejects_a_changed_body(kit: Kit) -> None:
    for fixture in deliveries(kit.name):
        good = kit.delivery(fixture)
        for at in range(0, len(good.body), max(len(good.body) // 40, 1)):
            flipped = good.body[:at] + bytes([good.body[at] ^ 1]) + good.body[at + 1 :]
            rejected(kit, replace(good, body=flipped), kit.secrets[0])
        for other in (b"", good.body + b"\n", good.body[:-1], b" " + good.body):
            rejected(kit, replace(good, body=other), kit.secrets[0])


@check(Capability.SIGNED_WEBHOOKS)
def white_space_in_the_body_matters(kit: Kit) -> None:
    for fixture in deliveries(kit.name):
        for indent in (None, 3):
            rewritten = json.dumps(json.loads(fixture.body), indent=indent, sort_keys=True).encode()
            accepted(kit, kit.signed(rewritten, headers=fixture.headers))
            if rewritten != fixture.body:
                rejected(kit, replace(kit.delivery(fixture), body=rewritten), kit.secrets[0])


@check(Capability.SIGNED_WEBHOOKS)
def rejects_without_a_secret(kit: Kit) -> None:
    good = deliveries(kit.name)[0]
    rejected(kit, kit.delivery(good))
    for void in kit.void_secrets:
        rejected(kit, kit.signed(good.body, void, headers=good.headers) if void else kit.delivery(good), void)
        signed_with_nothing = kit.request(good.body, kit.sign(good.body, void, headers=good.headers))
        rejected(kit, signed_with_nothing, void)
        rejected(kit, signed_with_nothing, kit.secrets[0], void)


@check(Capability.SIGNED_WEBHOOKS)
def rejects_another_secret(kit: Kit) -> None:
    good = deliveries(kit.name)[0]
    rejected(kit, kit.signed(good.body, kit.secrets[1], headers=good.headers), kit.secrets[0])


@check(Capability.SIGNED_WEBHOOKS)
def two_secrets_live_until_one_is_removed(kit: Kit) -> None:
    old, new = kit.secrets
    body = deliveries(kit.name)[0].body
    for secret in (old, new):
        accepted(kit, kit.signed(body, secret), new, old)
        accepted(kit, kit.signed(body, secret), old, new)
    rejected(kit, kit.signed(body, old), new)


@check(Capability.SIGNED_TIME)
def rejects_what_is_too_old_or_too_new(kit: Kit) -> None:
    body = deliveries(kit.name)[0].body
    for seconds in (-300, -1, 0, 1, 300):
        accepted(kit, kit.signed(body, at=NOW + timedelta(seconds=seconds)))
    for seconds in (-30 * 86400, -301, 301, 86400):
        rejected(kit, kit.signed(body, at=NOW + timedelta(seconds=seconds)), kit.secrets[0])
    replayed = kit.signed(body)
    rejected(kit, replayed, kit.secrets[0], now=NOW + timedelta(seconds=301))


@check()
def any_bytes_raise_only_the_declared_errors(kit: Kit) -> None:
    text = st.text(st.characters(codec=None), max_size=40)
    value = text | st.sampled_from(["v1,", "v1,é", "1e9", "9" * 400, "-1", "a" * 64, "\ud800", "\x00"])
    names = st.sampled_from([*kit.signature_headers, "content-type", "x-other"])
    jsonish = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda c: st.lists(c, max_size=3) | st.dictionaries(st.sampled_from(["id", "type", "event", "data"]), c),
        max_leaves=6,
    )
    bodies = st.binary(max_size=60) | jsonish.map(lambda v: json.dumps(v).encode())
    good = deliveries(kit.name)[0]

    # No shrinking: where this fails on purpose (a broken adapter), it would take the longest.
    @settings(max_examples=120, deadline=None, database=None, phases=[Phase.generate])
    @given(st.dictionaries(names, value, max_size=4), bodies)
    def run(headers: Mapping[str, str], body: bytes) -> None:
        for sent in (headers, {**kit.sign(good.body, kit.secrets[0]), **headers}):
            with pytest.raises(Rejected):
                kit.adapter.verify(kit.request(body, sent), kit.secrets, NOW)
        accepted(kit, kit.signed(body))
        for sent in ({}, headers):
            try:
                found = kit.adapter.parse(kit.request(body, {**kit.sign(body, kit.secrets[0]), **sent}))
            except Unreadable:
                continue
            assert all(isinstance(e, Event) for e in found)

    run()


# -- normalisation ---------------------------------------------------------------------------------------------------


@check()
def fixtures_give_their_events(kit: Kit) -> None:
    for fixture in deliveries(kit.name):
        assert str(fixture.about["from"]).startswith(("captured", "made from docs (https://")), fixture.name
        found = [
            {"kind": e.kind, "key": e.key, "ref": e.ref, "occurred_at": plain(e.occurred_at)}
            | ({"lead": plain(e.lead)} if e.lead else {})
            for e in kit.adapter.parse(kit.delivery(fixture))
        ]
        assert found == fixture.about["events"], fixture.name


@check()
def every_topic_has_a_fixture(kit: Kit) -> None:
    kinds = {f.about["topic"]: f.about["events"][0]["kind"] for f in deliveries(kit.name)}
    assert kit.adapter.topics
    assert set(kit.adapter.topics) <= set(kinds)
    assert all(kinds[topic] == kind for topic, kind in kit.adapter.topics.items())


@check()
def an_unknown_topic_is_ignored(kit: Kit) -> None:
    for fixture in deliveries(kit.name):
        body = json.loads(fixture.body)
        if isinstance(body, dict):
            for topic in ("somethingNew", "Ünknown", "x" * 200):
                assert [e.kind for e in events(kit, kit.retopic(body, topic), **fixture.headers)] == [EventKind.UNKNOWN]


@check()
def extra_fields_are_ignored(kit: Kit) -> None:
    for fixture in deliveries(kit.name):
        body = json.loads(fixture.body)
        if isinstance(body, dict):
            more = {"zzNew": {"deep": [1, None, {}]}, **body, "zz": "x"}
            assert events(kit, more, **fixture.headers) == events(kit, body, **fixture.headers)


@check()
def a_required_field_that_is_gone_or_wrong_parks(kit: Kit) -> None:
    assert kit.required
    for fixture in deliveries(kit.name):
        for path in kit.required.get(fixture.name, ()):
            for value in (..., None, True, {"a": 1}, [[]]):
                if value is ... and isinstance(path[-1], int):
                    continue
                assert parks(kit, replaced(json.loads(fixture.body), path, value), **fixture.headers), (path, value)


@check(Capability.BATCH_DELIVERY)
def a_batch_keeps_its_order_and_isolates_what_is_bad(kit: Kit) -> None:
    refs: list[str | None] = [str(5000 + (7 * n) % 100) for n in range(100)]
    refs[41] = None
    found = events(kit, kit.batch(refs))
    assert [e.ref if e.kind is not EventKind.UNREADABLE else None for e in found] == refs
    assert len({e.key for e in found}) == 100
    bad = found[41]
    assert bad.problem
    assert events(kit, kit.batch(refs)) == found


@check()
def times_are_utc_and_ids_are_text(kit: Kit) -> None:
    for fixture in deliveries(kit.name):
        for event in kit.adapter.parse(kit.delivery(fixture)):
            assert isinstance(event.key, str)
            assert 0 < len(event.key) <= 400
            assert event.ref is None or isinstance(event.ref, str)
            held = event.lead or lead()
            for time in (event.occurred_at, held.created_at, held.updated_at):
                assert time is None or time.tzinfo is UTC
            for ref in (held.ref, held.owner_ref, held.pond_ref, *held.collaborator_refs):
                assert ref is None or isinstance(ref, str)
            assert (event.lead is None) or event.lead.ref == event.ref


@check()
def the_same_delivery_has_the_same_keys(kit: Kit) -> None:
    seen: set[str] = set()
    for fixture in deliveries(kit.name):
        keys = [e.key for e in kit.adapter.parse(kit.delivery(fixture))]
        assert keys == [e.key for e in kit.adapter.parse(kit.signed(fixture.body, headers=fixture.headers))]
        assert len(set(keys)) == len(keys)
        assert seen.isdisjoint(keys)
        seen |= set(keys)


@check(Capability.EVENT_ID)
def keys_come_from_the_vendors_event_id(kit: Kit) -> None:
    found = [e for f in deliveries(kit.name) for e in kit.adapter.parse(kit.delivery(f))]
    assert all(e.key_is_final for e in found)


@check(Capability.COMPLETE_PAYLOAD)
def payloads_hold_the_whole_lead(kit: Kit) -> None:
    found = [e for f in deliveries(kit.name) for e in kit.adapter.parse(kit.delivery(f))]
    told = [e for e in found if e.kind in (EventKind.LEAD_CREATED, EventKind.LEAD_CHANGED)]
    assert told
    assert all(e.lead is not None for e in told)


@check()
def hostile_bodies_park(kit: Kit) -> None:
    for body in (
        b"", b"null", b"1", b'"x"', b"{}", b"[]x", b"{", b"NaN", b'{"a": 1e400}', b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100 + b"]" * 100, b"[" * 50_000, b"\xff\xfe{\x00}\x00", b'{"a": "\xff"}', b"[" + b"0," * 500 + b"0]",
        b'{"a": "' + b"x" * (1 << 20) + b'"}',
    ):  # fmt: skip
        assert parks(kit, body), body[:40]


@check()
def text_is_made_storable(kit: Kit) -> None:
    assert kit.texts
    for fixture in deliveries(kit.name):
        for path in kit.texts.get(fixture.name, ()):
            body = json.dumps(replaced(json.loads(fixture.body), path, "MARK"))
            body = body.replace("MARK", r"a\u0000b\ud800c\\u0000")
            found = repr(events(kit, body.encode(), **fixture.headers))
            assert r"ab�c\\u0000" in found
            assert r"\x00" not in found
            assert r"\ud800" not in found


# -- the API ---------------------------------------------------------------------------------------------------------


@check()
def leads_are_read_and_missing_ones_are_absent(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_leads(LeadRow("5001"), LeadRow("5002", owner="12", pond="7", collaborators=["3"]))
        found = kit.adapter.fetch_leads(running.client, ["5002", "5001", "5999"])
        assert set(found) == {"5001", "5002"}
        assert all(ref == held.ref for ref, held in found.items())
        assert found["5001"].owner_ref is None
        assert (found["5002"].owner_ref, found["5002"].pond_ref) == ("12", "7")
        assert found["5002"].created_at == NOW - timedelta(hours=1)
        assert found["5001"].emails == ("canary@example.com",)
        assert kit.adapter.fetch_leads(running.client, []) == {}


@check(Capability.BATCH_READ)
def leads_are_read_in_batches(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_leads(*(LeadRow(str(5000 + n)) for n in range(250)))
        refs = [str(5000 + n) for n in range(250)]
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
        assert sorted(int(a.ref) for a in found) == list(range(1, 251))
        assert {a.ref for a in found if not a.active} == {"50", "100", "150", "200", "250"}
        assert all(a.name and a.zone == "America/Denver" for a in found)
        one = kit.adapter.get_agent(running.client, "50")
        assert one is not None
        assert not one.active
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


@check(Capability.COLLABORATORS)
def a_collaborator_is_added_to_those_there(kit: Kit) -> None:
    with kit.running() as running:
        running.fake.add_leads(LeadRow("5001", owner="12", collaborators=["3"]))
        for _ in range(2):
            kit.adapter.add_collaborator(running.client, lead(owner="12"), "4")
        assert running.fake.leads["5001"].collaborators == ["3", "4"]
        assert running.fake.leads["5001"].owner == "12"


@check(Capability.SWEEP)
def the_sweep_finds_each_unassigned_lead_once(kit: Kit) -> None:
    since = NOW - timedelta(hours=2)
    with kit.running() as running:
        running.fake.add_leads(
            *(LeadRow(str(5000 + n), created=NOW - timedelta(minutes=30, seconds=n)) for n in range(230)),
            *(LeadRow(str(6000 + n), owner="12", created=NOW - timedelta(minutes=31)) for n in range(20)),
            *(LeadRow(str(8000 + n), created=NOW - timedelta(days=3, minutes=n)) for n in range(20)),
            LeadRow("9001", owner="3"),
            LeadRow("9002", pond="7"),
            LeadRow("9003", pond="8"),
        )

        def sweep(**definition: Any) -> list[str]:
            pages = kit.adapter.unassigned_since(running.client, since, UnassignedDefinition(**definition))
            return [ref for page in pages for ref in page]

        free = {str(5000 + n) for n in range(230)}
        for definition, more in (
            ({}, set()),
            ({"user_refs": frozenset({"3"})}, {"9001"}),
            ({"pond_refs": frozenset({"7"})}, {"9002"}),
            ({"user_refs": frozenset({"3"}), "pond_refs": frozenset({"7", "8"})}, {"9001", "9002", "9003"}),
        ):
            found = sweep(**definition)
            assert set(found) == free | more
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
        assert {f.where for f in lost} >= {"agents", "hooks"}
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
        for name, call in calls(kit, running).items():
            if name not in WRITES or name == "subscribe":
                continue
            for status, outcome in expected.items():
                running.fake.add_leads(LeadRow("5001"))
                failing = reset() if status is None else Reply(status, {"error": "x"}, {"Retry-After": "4"})
                running.server.handle = lambda asked, f=failing: f if asked.writes else running.fake.handle(asked)
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
    assert adapter.hook_secret in kit.credentials.secrets
    body, kind = adapter.acknowledgement()
    assert isinstance(body, str)
    assert "/" in kind
    for needed, method in (
        (Capability.NOTES, lambda c: adapter.add_note(c, "5001", "s", "b")),
        (Capability.NOTES, lambda c: adapter.find_note(c, "5001", "m")),
        (Capability.COLLABORATORS, lambda c: adapter.add_collaborator(c, lead(), "4")),
    ):
        if needed not in adapter.capabilities:
            with pytest.raises(NotImplementedError):
                method(None)
