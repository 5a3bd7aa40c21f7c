"""Whatever bytes come: genuine ones are kept, the unreadable ones parked alone, and nobody else is harmed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters import registry
from adapters.base import Capability
from connector.sandbox import bottlecrm
from tests.rig import ANA, BEN, CY, Rig, captured_logs, http_send, until

CRMS = registry.names()
BATCHING = [name for name in CRMS if Capability.BATCH_DELIVERY in registry.adapter(name).capabilities]


def wrap(crm: str, refs: str) -> bytes:
    """A delivery in which the JSON text `refs` stands where the leads' ids stand."""
    if crm == "followupboss":
        return b'{"eventId": "e", "event": "peopleCreated", "resourceIds": %s}' % refs.encode()
    if crm == "bottlecrm":  # one lead each
        return b'{"id": "e", "event": "lead.created", "data": %s}' % refs.strip("[]").encode()
    return b'{"type": "lead.created", "data": {"leads": %s}}' % refs.encode()


def contact(ref: str, text: str = '"objectId": %s') -> str:
    """An element of a delivery of HubSpot; `text` is where its lead stands."""
    told = '"portalId": 1, "eventId": 2, "occurredAt": 3, "subscriptionType": "contact.creation"'
    return f"{{{told}, {text % ref}}}"


def one(crm: str, value: str) -> bytes:
    """A delivery of one lead with the JSON text `value` in a field that nobody asked for."""
    lead = "1" if crm == "followupboss" else '{"id": "1"}'
    return wrap(crm, f"[{lead}]")[:-1] + b', "extra": %s}' % value.encode()


# Bodies that no reader of JSON should take: name -> (body, reason), for each CRM alike.
POISON: Mapping[str, tuple[Callable[[str], bytes], str]] = {
    "empty": (lambda _: b"", "not_json"),
    "no JSON": (lambda _: b"<xml/>", "not_json"),
    "cut short": (lambda crm: one(crm, "1")[:-3], "not_json"),
    "two documents": (lambda crm: one(crm, "1") * 2, "not_json"),
    "a number": (lambda _: b"17", "wrong_type"),
    "a text": (lambda _: b'"peopleCreated"', "wrong_type"),
    "null": (lambda _: b"null", "wrong_type"),
    "NaN": (lambda crm: one(crm, "NaN"), "not_finite"),
    "infinity": (lambda crm: one(crm, "-Infinity"), "not_finite"),
    "1e400": (lambda crm: one(crm, "1e400"), "not_finite"),
    "1e-999999999": (lambda crm: one(crm, "1e-999999999"), "not_finite"),
    "5,000 digits": (lambda crm: one(crm, "7" * 5000), "long_number"),
    "5,000 places": (lambda crm: one(crm, "0." + "7" * 5000), "long_number"),
    "invalid UTF-8": (lambda crm: one(crm, '"#"').replace(b"#", b"\xff\xfe"), "not_utf8"),
    "overlong UTF-8": (lambda crm: one(crm, '"#"').replace(b"#", b"\xc0\x80"), "not_utf8"),
    "a surrogate in UTF-8": (lambda crm: one(crm, '"#"').replace(b"#", b"\xed\xa0\x80"), "not_utf8"),
    "UTF-16 with its mark": (lambda crm: one(crm, "1").decode().encode("utf-16"), "not_utf8"),
    "UTF-16 without": (lambda crm: one(crm, "1").decode().encode("utf-16-le"), "not_json"),
    "UTF-8 with a mark": (lambda crm: b"\xef\xbb\xbf" + one(crm, "1"), "not_json"),
    "depth 100": (lambda crm: one(crm, "[" * 100 + "]" * 100), "too_deep"),
    "depth 20,000": (lambda crm: one(crm, '{"a":' * 20_000 + "1" + "}" * 20_000), "too_deep"),
    "depth 500,000, never closed": (lambda _: b"[" * 500_000, "too_deep"),
    "501 elements": (lambda crm: one(crm, json.dumps(list(range(501)))), "too_many_elements"),
    "10,001 keys": (lambda crm: one(crm, json.dumps({str(n): n for n in range(10_001)})), "too_many_keys"),
}


def by_hand(make_rig: Callable[..., Rig], crm: str) -> Rig:
    rig = make_rig(crm=crm)
    rig.sandbox.webhook_faults(drop=1.0)
    # The first sweeps are over: until the next, nothing but the deliveries of the test tells of a lead.
    rig.wait_chores()
    until(lambda: not rig.one("SELECT count(*) FROM chores WHERE leased_until IS NOT NULL OR due_at <= now()"))
    return rig


@pytest.fixture(params=BATCHING)
def batching(request: pytest.FixtureRequest, make_rig: Callable[..., Rig]) -> Rig:
    """A tenant of each CRM that tells of several leads at once; its deliveries are made by hand."""
    return by_hand(make_rig, request.param)


@pytest.fixture(params=CRMS)
def quiet(request: pytest.FixtureRequest, make_rig: Callable[..., Rig]) -> Rig:
    """A tenant of each CRM; its deliveries are made by hand."""
    return by_hand(make_rig, request.param)


def test_what_nobody_can_read_is_kept_and_parked_once_and_the_next_lead_is_assigned(quiet: Rig) -> None:
    bodies = {name: make(quiet.crm) for name, (make, _) in POISON.items()}
    with captured_logs() as logs:
        for _ in range(2):  # every CRM sends again, under the same id or another
            answers = {name: quiet.post(body, event=f"evt_{name.encode().hex()}") for name, body in bodies.items()}
            assert {name: answer.status for name, answer in answers.items()} == dict.fromkeys(bodies, 200)
        ref = quiet.create()
        assert quiet.post(quiet.delivery(ref)).status == 200
        assert quiet.wait_owner(ref) == ANA
    quiet.settle_owners()
    parked = {(e.reason, e.body) for e in quiet.events() if e.state == "parked"}
    assert parked == {(reason, bodies[name]) for name, (_, reason) in POISON.items()}
    assert len(quiet.events()) == len(POISON) + 1
    assert "unreadable_event" in quiet.alarms()
    assert (quiet.turns(), quiet.position()) == ([ANA], 1)
    assert "error" not in logs.getvalue()
    quiet.audit()


# Elements of a batch that cannot be read, between two that can.
BAD_ELEMENTS = {
    "followupboss": ["null", "-3", "0", "1.5", '"twelve"', '"1\\u00b2"', '"../1"', '""', "true", "[5]", '{"id": 5}'],
    "generic": ["null", "17", "[]", "{}", '{"id": null}', '{"id": ""}', '{"id": "a/b"}', '{"id": ".."}', '{"id": -1}']
    + [f'{{"id": "9", {field}}}' for field in ('"price": "much"', '"owner": []', '"tags": "red"', '"custom": 5')]
    + ['{"id": "9", "created_at": "yesterday"}', '{"id": "9", "custom": {"a": {"b": 1}}}'],
    "hubspot": ["null", "17", "[]", "{}", '"contact.creation"']
    + [contact(ref) for ref in ("null", "-3", "0", "1.5", '"1\\u00b2"', '"../1"', '""', "true", "[5]", '{"id": 5}')],
}


def test_a_bad_element_of_a_batch_parks_alone_however_often_it_comes(batching: Rig) -> None:
    first, last = batching.create(), batching.create()
    good = [ref if batching.crm == "followupboss" else f'{{"id": "{ref}"}}' for ref in (first, last)]
    bad = BAD_ELEMENTS[batching.crm]
    if batching.crm == "hubspot":
        body = f"[{contact(first)}, {', '.join(bad)}, {contact(last)}]".encode()
    else:
        body = wrap(batching.crm, f"[{good[0]}, {', '.join(bad)}, {good[1]}]")
    assert [batching.post(body).status for _ in range(3)] == [200, 200, 200]
    assert [batching.wait_owner(first), batching.wait_owner(last)] == [ANA, BEN]
    batching.settle_owners()
    found = [(e.state, e.ordinal) for e in batching.events()]
    assert sorted(found) == sorted([("done", 0), ("done", len(bad) + 1)] + [("parked", n + 1) for n in range(len(bad))])
    assert batching.turns() == [ANA, BEN]
    batching.audit()


def test_more_leads_than_a_delivery_may_hold_park_as_one_and_five_hundred_do_not(batching: Rig) -> None:
    refs = [str(n) for n in batching.sandbox.create_leads(501)]
    assert batching.post(batching.delivery(*refs, event="more"), event="more").status == 200
    assert [(e.state, e.reason) for e in batching.events()] == [("parked", "too_many_elements")]
    batching.stop_worker()
    assert batching.post(batching.delivery(*refs[:500], event="most"), event="most").status == 200
    assert sorted(e.state for e in batching.events()) == ["parked"] + ["waiting"] * 500


def test_texts_that_a_database_cannot_hold_are_mended_and_a_written_u0000_is_left(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic", config=BY_SOURCE)
    rig.sandbox.webhook_faults(drop=1.0)
    ref = rig.create()
    lead = r"""{
        "id": "REF", "source": "a\u0000b", "name": "x\ud800y", "tags": ["c:\\u0000", "\ud83d\ude00"],
        "custom": {"\u0000k": "\udfff", "n": 12345678901234567890123, "x": 1.50},
        "address": {"city": "Zürich", "zip": 8001}
    }"""
    body = '{"type": "lead.created", "data": %s}' % lead.replace("REF", ref)  # noqa: UP031 - braces
    assert rig.post(body.encode()).status == 200
    assert rig.wait_owner(ref) == CY  # source "ab": the rule sees the mended text
    facts = rig.one("SELECT facts FROM lead_facts WHERE tenant_id = :t")
    assert facts == {
        "ref": ref, "source": "ab", "name": "x\ufffdy", "tags": ["c:\\u0000", "😀"], "city": "Zürich", "zip": "8001",
        "custom": {"k": "\ufffd", "n": 12345678901234567890123, "x": {"decimal": "1.50"}},
    }  # fmt: skip
    rig.settle_owners()
    rig.audit()


BY_SOURCE = """\
default_queue: All
queues:
  All:
    members: ['12', '13']
rules:
  - name: ab
    when: {field: source, equals: ab}
    to: {agent: '14'}
"""


def test_of_equal_keys_the_last_counts_everywhere(quiet: Rig) -> None:
    first, last = quiet.create(), quiet.create()
    if quiet.crm == "followupboss":
        body = b'{"event": "x", "eventId": "e", "event": "peopleCreated", "resourceIds": [%s], "resourceIds": [%s]}'
    elif quiet.crm == "bottlecrm":
        body = b'{"event": "x", "id": "e", "event": "lead.created", "data": {"id": "%s", "id": "%s"}}'
    elif quiet.crm == "hubspot":
        body = b"[" + contact("", '"objectId": #, "objectId": #%s').replace("#", "%s").encode() + b"]"
    else:
        body = b'{"type": "x", "type": "lead.created", "data": {"id": "%s", "id": "%s"}}'
    assert quiet.post(body % (first.encode(), last.encode())).status == 200
    assert quiet.wait_owner(last) == ANA
    quiet.settle_owners()
    assert quiet.owner(first) is None


def test_an_unknown_topic_is_ignored(quiet: Rig) -> None:
    for topic in ("weather.changed", "", "x" * 500, "\\u0000", "lead"):
        body = wrap(quiet.crm, "[1]").replace(b"peopleCreated", b"#").replace(b"lead.created", b"#")
        assert quiet.post(body.replace(b"#", topic.encode()), event=topic or "none").status == 200
    assert {e.state for e in quiet.events()} <= {"ignored", "parked"}
    assert quiet.position() == 0


# -- any bytes at all -------------------------------------------------------------------------------------------

# What databases and decoders stumble over stands close together: NUL, lone surrogates, the text that escapes them.
_TEXT = st.text(max_size=20) | st.text(st.sampled_from("\x00\ud800\udfff\\u0000é😀\x1f"), max_size=9)
_SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(width=32) | _TEXT
_JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
_WORDS = st.sampled_from(
    ["event", "eventId", "resourceIds", "type", "data", "leads", "id", "peopleCreated", "lead.created", "owner",
     "custom", "tags", "emails", "phones", "price", "created_at", "address", "timestamp", "eventCreated", "1", "12"]
)  # fmt: skip
# Bodies near to what a CRM sends: its own words as keys and values, anything between them.
_NEAR = st.dictionaries(_WORDS | st.text(max_size=5), st.deferred(lambda: _INNER), max_size=6)
_INNER: st.SearchStrategy[Any] = st.recursive(
    _SCALARS | _WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4)
)
_BODIES = st.one_of(
    st.binary(max_size=200),
    st.builds(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"), _JSON | _NEAR),
    st.builds(lambda value: json.dumps(value).encode(), _NEAR),
)
# What a header of HTTP may hold (RFC 9110, 5.5); anything else the server itself refuses.
_VALUES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f\x80\x85\xa0"))
_NAMES = st.sampled_from(
    ["FUB-Signature", "webhook-id", "webhook-timestamp", "webhook-signature", "X-BottleCRM-Signature",
     "Content-Type", "User-Agent", "Accept",
     "Content-Encoding", "X-Forwarded-For", "X-Forwarded-Proto", "Cookie", "Authorization", "Referer", "X-Request-Id"]
)  # fmt: skip
_HEADERS = st.dictionaries(_NAMES, _VALUES, max_size=5)


_FIELDS = st.sampled_from(
    ["name", "source", "type", "stage", "form", "campaign", "language", "title", "email", "phone", "status", "custom"]
)
_GENUINE = st.dictionaries(_FIELDS | _WORDS, _TEXT | _INNER, min_size=1, max_size=6)


def genuine(crm: str, lead: dict[str, Any], event: str) -> bytes:
    """A delivery as the CRM sends it, but for what is told of the lead."""
    if crm == "followupboss":
        body: Any = {"event": "peopleCreated", "eventId": event, "resourceIds": list(lead.values())}
    elif crm == "bottlecrm":
        body = json.loads(bottlecrm.event_body("lead.created", event, {"id": event} | lead))
    else:
        body = {"type": "lead.created", "data": {"leads": [{"id": event} | lead]}}
    return json.dumps(body).encode()


def _told(crm: str) -> st.SearchStrategy[bytes]:
    return st.builds(genuine, st.just(crm), _GENUINE, st.uuids().map(str))


def allowed(method: str, known: bool, proven: bool) -> set[int]:
    """The statuses that a CRM may see."""
    if method != "POST":
        return {405}
    if not known:
        return {404}
    return {200} if proven else {401}


def hurl(rig: Rig, examples: int) -> None:
    """Send `examples` deliveries of any bytes; the server must answer each as :func:`allowed`."""
    url = rig.hook_url
    stranger = url[:-4] + "zzzz"

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        body=_BODIES | _told(rig.crm) | _told(rig.crm) | _told(rig.crm),
        headers=_HEADERS,
        proven=st.booleans(),
        known=st.sampled_from([True, True, True, False]),
        method=st.sampled_from(["POST"] * 9 + ["GET", "PUT", "DELETE", "PATCH"]),
        event=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=300),
    )
    def deliver(body: bytes, headers: dict[str, str], proven: bool, known: bool, method: str, event: str) -> None:
        own = rig.signed(body, event)
        theirs = {k: v for k, v in headers.items() if k.lower() not in {name.lower() for name in own}}
        sent = {**theirs, **own} if proven else headers
        latin = {k: v.encode("latin-1") for k, v in sent.items()}
        answer = http_send(url if known else stranger, body, latin, method)  # type: ignore[arg-type]
        assert answer.status in allowed(method, known, proven), (answer, sent, body)

    with captured_logs() as logs:
        deliver()
    assert not [line for line in logs.getvalue().splitlines() if json.loads(line)["event"] != "rejected"]
    assert {e.state for e in rig.events()} <= {"waiting", "ignored", "parked"}


@pytest.mark.parametrize("crm", CRMS)
def test_no_bytes_make_the_door_fail(make_rig: Callable[..., Rig], crm: str) -> None:
    hurl(make_rig(crm=crm, worker=False), 200)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("crm", CRMS)
def test_ten_thousand_deliveries_of_any_bytes_do_not_make_the_door_fail(make_rig: Callable[..., Rig], crm: str) -> None:
    hurl(make_rig(crm=crm, worker=False), 10_000)


@pytest.mark.parametrize("crm", CRMS)
def test_no_genuine_delivery_harms_the_worker(make_rig: Callable[..., Rig], crm: str) -> None:
    rig = make_rig(crm=crm, worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    numbers = iter(range(10_000))

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(_GENUINE)
    def deliver(lead: dict[str, Any]) -> None:
        event = f"evt_{next(numbers)}"
        assert rig.post(genuine(crm, lead, event), event=event).status == 200

    deliver()
    ref = rig.create()
    assert rig.post(rig.delivery(ref, event="last"), event="last").status == 200
    # Only now: threads that draw random numbers would disturb the drawing of examples.
    with captured_logs() as logs:
        rig.start_worker()
        untouched = "SELECT count(*) FROM events WHERE state = 'waiting' AND (claims = 0 OR lease IS NOT NULL)"
        until(lambda: not rig.one(untouched), 30, "a look at every event")
        assert rig.wait_owner(ref)
        rig.stop_worker()
    assert not [line for line in logs.getvalue().splitlines() if json.loads(line)["level"] == "error"]
    assert rig.one("SELECT count(*) FROM events WHERE attempt > 0") == 0
    rig.audit()
