"""Checks of what comes in: verification and normalisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, timedelta

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from adapters.base import Capability, Event, EventKind, Rejected, Unreadable
from tests.adapters.conformance import (
    accepted,
    check,
    events,
    lead,
    parks,
    rejected,
)
from tests.adapters.kit import NOW, Kit, deliveries, plain, replaced

# -- verification ----------------------------------------------------------------------------------------------------


@check(Capability.SIGNED_WEBHOOKS, instead=Capability.HOOK_PASSWORD)
def accepts_good_deliveries(kit: Kit) -> None:
    for fixture in deliveries(kit.name):
        accepted(kit, kit.delivery(fixture))


@check(Capability.SIGNED_WEBHOOKS, instead=Capability.HOOK_PASSWORD)
def rejects_a_missing_or_empty_signature(kit: Kit) -> None:
    good = kit.delivery(deliveries(kit.name)[0])
    for name in kit.signature_headers:
        rejected(kit, replace(good, headers={k: v for k, v in good.headers.items() if k != name}), kit.secrets[0])
        for empty in ("", " ", ",", "v1,"):
            rejected(kit, replace(good, headers={**good.headers, name: empty}), kit.secrets[0])
    rejected(kit, replace(good, headers={}), kit.secrets[0])


@check(Capability.SIGNED_WEBHOOKS, instead=Capability.HOOK_PASSWORD)
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


@check(Capability.SIGNED_WEBHOOKS, instead=Capability.HOOK_PASSWORD)
def rejects_without_a_secret(kit: Kit) -> None:
    good = deliveries(kit.name)[0]
    rejected(kit, kit.delivery(good))
    for void in kit.void_secrets:
        rejected(kit, kit.signed(good.body, void, headers=good.headers) if void else kit.delivery(good), void)
        signed_with_nothing = kit.request(good.body, kit.sign(good.body, void, headers=good.headers))
        rejected(kit, signed_with_nothing, void)
        rejected(kit, signed_with_nothing, kit.secrets[0], void)


@check(Capability.SIGNED_WEBHOOKS, instead=Capability.HOOK_PASSWORD)
def rejects_another_secret(kit: Kit) -> None:
    good = deliveries(kit.name)[0]
    rejected(kit, kit.signed(good.body, kit.secrets[1], headers=good.headers), kit.secrets[0])


@check(Capability.SIGNED_WEBHOOKS, instead=Capability.HOOK_PASSWORD)
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
        of_another_body = {**kit.sign(good.body, kit.secrets[0]), **headers}
        for sent in (headers, of_another_body):
            if not {Capability.SIGNED_WEBHOOKS, Capability.HOOK_PASSWORD} & kit.adapter.capabilities:
                accepted(kit, kit.request(body, sent))
                continue
            if sent is of_another_body and Capability.HOOK_PASSWORD in kit.adapter.capabilities:
                continue  # a password covers nothing of the body
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
        body = kit.load(fixture.body)
        for topic in ("somethingNew", "Ünknown", "x" * 200):
            headers = {**fixture.headers, **kit.topic_headers(topic)}
            if isinstance(body, dict) or kit.topic_headers(topic):
                assert {e.kind for e in events(kit, kit.retopic(body, topic), **headers)} == {EventKind.UNKNOWN}


@check()
def extra_fields_are_ignored(kit: Kit) -> None:
    for fixture in deliveries(kit.name):
        body = kit.load(fixture.body)
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
                assert parks(kit, replaced(kit.load(fixture.body), path, value), **fixture.headers), (path, value)


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


@check(Capability.APP_HOOKS)
def each_event_names_its_account(kit: Kit) -> None:
    assert kit.adapter.oauth is not None  # by which it is known whose account that is
    found = [e for f in deliveries(kit.name) for e in kit.adapter.parse(kit.delivery(f))]
    assert all(e.account for e in found)


@check(Capability.COMPLETE_PAYLOAD)
def payloads_hold_the_whole_lead(kit: Kit) -> None:
    found = [e for f in deliveries(kit.name) for e in kit.adapter.parse(kit.delivery(f))]
    told = [e for e in found if e.kind in (EventKind.LEAD_CREATED, EventKind.LEAD_CHANGED)]
    assert told
    assert all(e.lead is not None for e in told)


@check()
def what_nobody_signed_is_only_a_reason_to_read(kit: Kit) -> None:
    if Capability.SIGNED_WEBHOOKS not in kit.adapter.capabilities:
        found = [e for f in deliveries(kit.name) for e in kit.adapter.parse(kit.delivery(f))]
        proven = Capability.HOOK_PASSWORD in kit.adapter.capabilities
        assert all(e.lead is None and (proven or not e.key_is_final) for e in found)


@check()
def hostile_bodies_park(kit: Kit) -> None:
    for body in (
        b"", b"null", b"1", b'"x"', b"{}", b"[]x", b"{", b"NaN", b'{"a": 1e400}', b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100 + b"]" * 100, b"[" * 50_000, b"\xff\xfe{\x00}\x00", b'{"a": "\xff"}', b"[" + b"0," * 500 + b"0]",
        b'{"a": "' + b"x" * (1 << 20) + b'"}', *kit.hostile,
    ):  # fmt: skip
        assert parks(kit, body), body[:40]


@check()
def text_is_made_storable(kit: Kit) -> None:
    assert kit.texts or Capability.COMPLETE_PAYLOAD not in kit.adapter.capabilities  # else events are ids alone
    for fixture in deliveries(kit.name):
        for path in kit.texts.get(fixture.name, ()):
            body = json.dumps(replaced(json.loads(fixture.body), path, "MARK"))
            body = body.replace("MARK", r"a\u0000b\ud800c\\u0000")
            found = repr(events(kit, body.encode(), **fixture.headers))
            assert r"ab�c\\u0000" in found
            assert r"\x00" not in found
            assert r"\ud800" not in found
