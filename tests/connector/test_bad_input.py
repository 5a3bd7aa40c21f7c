"""Whatever bytes come: genuine ones are kept, the unreadable ones parked alone, and nobody else is harmed."""

from __future__ import annotations

import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters import registry
from adapters.base import Capability
from adapters.payload import DELIVERY
from connector.accept import MAX_BODY
from connector.sandbox import bottlecrm
from tests.kill.source import Patch, copy_source
from tests.rig import ANA, BEN, CY, SANDBOXED, Rig, captured_logs, http_send, until
from tests.serving import Serving

CRMS = SANDBOXED
BATCHING = [name for name in CRMS if Capability.BATCH_DELIVERY in registry.adapter(name).capabilities]


def element(ref: str, number: int = 1, **more: Any) -> dict[str, Any]:
    """What HubSpot tells of a lead; ids are numbers there."""
    about = {"eventId": number, "occurredAt": 1_775_000_000_000, "subscriptionType": "contact.creation"}
    return {"portalId": 62515, **about, "objectId": int(ref) if ref.isdecimal() else ref, **more}


def named(crm: str, ref: str) -> str:
    """The JSON text that names a lead in a list of them."""
    if crm == "hubspot":
        return json.dumps(element(ref))
    return ref if crm == "followupboss" else f'{{"id": "{ref}"}}'


def wrap(crm: str, refs: str) -> bytes:
    """A delivery in which the JSON text `refs` stands where the leads stand."""
    if crm == "hubspot":
        return refs.encode()
    if crm == "followupboss":
        return b'{"eventId": "e", "event": "peopleCreated", "resourceIds": %s}' % refs.encode()
    if crm == "bottlecrm":  # one lead each
        return b'{"id": "e", "event": "lead.created", "data": %s}' % refs.strip("[]").encode()
    return b'{"type": "lead.created", "data": {"leads": %s}}' % refs.encode()


def one(crm: str, value: str, ref: str = "1") -> bytes:
    """A delivery of one lead with the JSON text `value` in a field that nobody asked for."""
    body = wrap(crm, f"[{named(crm, ref)}]").replace(b'"e"', b'"e%s"' % ref.encode())
    ends = 2 if crm == "hubspot" else 1  # there the field is one of the lead's, in a list
    return body[:-ends] + b', "extra": %s}' % value.encode() + body[len(body) - ends + 1 :]


def twice(crm: str, ref: str) -> bytes:
    """A delivery with equal keys, of which the last names the lead."""
    if crm == "followupboss":
        body = b'{"eventId": "d", "event": "x", "event": "peopleCreated", "resourceIds": ["x"], "resourceIds": [%s]}'
    elif crm == "hubspot":
        body = json.dumps([element("%s", 2, subscriptionType="x", objectType="x")]).encode()
        body = body.replace(b'"objectType": "x"', b'"subscriptionType": "contact.creation"')
    elif crm == "bottlecrm":
        body = b'{"event": "x", "id": "d", "event": "lead.created", "data": {"id": "x/y", "id": "%s"}}'
    else:
        body = b'{"type": "x", "type": "lead.created", "data": {"id": "x/y", "id": "%s"}}'
    return body % ref.encode()


def extra(value: str) -> Callable[[str, str], bytes]:
    return lambda crm, ref: one(crm, value, ref)


def deep(levels: int) -> Callable[[str, str], bytes]:
    """A delivery of so many levels, of which one or two are its own."""

    def made(crm: str, ref: str) -> bytes:
        own = levels - (2 if crm == "hubspot" else 1)
        return one(crm, "[" * own + "]" * own, ref)

    return made


def spoiled(*new: bytes) -> Callable[[str, str], bytes]:
    """A delivery with these bytes inside a text."""
    return lambda crm, ref: one(crm, '"#"', ref).replace(b"#", b"".join(new))


def parked(reason: str) -> tuple[int, str]:
    return 200, f"parked: {reason}"


TAKEN, TOO_LARGE = (200, "done: assigned"), (413, "")

# What breaks readers and databases: the body, made for a CRM and a lead; what is answered and what becomes of it.
POISON: Mapping[str, tuple[Callable[[str, str], bytes], tuple[int, str]]] = {
    "NUL, escaped": (extra(r'"a\u0000b"'), TAKEN),
    "NUL, escaped, in a key": (extra(r'{"a\u0000b": 1}'), TAKEN),
    "a backslash before u0000": (extra(r'"a\\u0000b"'), TAKEN),
    "NUL as it is": (spoiled(b"\x00"), parked("not_json")),
    "a lone surrogate, escaped": (extra(r'"a\ud800b"'), TAKEN),
    "a lone surrogate in UTF-8": (spoiled(b"\xed\xa0\x80"), parked("not_utf8")),
    "NaN": (extra("NaN"), parked("not_finite")),
    "infinity": (extra("-Infinity"), parked("not_finite")),
    "1e400": (extra("1e400"), parked("not_finite")),
    "1e200000": (extra("1e200000"), parked("not_finite")),
    "1e-999999999": (extra("1e-999999999"), parked("not_finite")),
    "a number of 100 digits": (extra("7" * 100), TAKEN),
    "a number of 5,000 digits": (extra("7" * 5000), parked("long_number")),
    "a number of 5,000 places": (extra("0." + "7" * 5000), parked("long_number")),
    "as deep as may be": (deep(DELIVERY.max_depth), TAKEN),
    "one deeper": (deep(DELIVERY.max_depth + 1), parked("too_deep")),
    "brackets inside a text": (extra('"' + "[" * 5000 + '"'), TAKEN),
    "depth 1,000": (extra("[" * 1000 + "]" * 1000), parked("too_deep")),
    "depth 20,000": (extra('{"a":' * 20_000 + "1" + "}" * 20_000), parked("too_deep")),
    "depth 500,000, never closed": (lambda *_: b"[" * 500_000, parked("too_deep")),
    "500 elements": (extra(json.dumps(list(range(500)))), TAKEN),
    "501 elements": (extra(json.dumps(list(range(501)))), parked("too_many_elements")),
    "9,990 keys": (extra(json.dumps({str(n): n for n in range(9_990)})), TAKEN),
    "10,001 keys": (extra(json.dumps({str(n): n for n in range(10_001)})), parked("too_many_keys")),
    "a text of 500 KiB": (extra('"' + "x" * 512_000 + '"'), TAKEN),
    "1 MiB": (lambda crm, ref: one(crm, "1", ref).ljust(MAX_BODY), TAKEN),
    "a byte more than 1 MiB": (lambda crm, ref: one(crm, "1", ref).ljust(MAX_BODY + 1), TOO_LARGE),
    "equal keys": (twice, TAKEN),
    "invalid UTF-8": (spoiled(b"\xff\xfe"), parked("not_utf8")),
    "overlong UTF-8": (spoiled(b"\xc0\x80"), parked("not_utf8")),
    "UTF-16 with its mark": (lambda crm, ref: one(crm, "1", ref).decode().encode("utf-16"), parked("not_utf8")),
    "UTF-16 without": (lambda crm, ref: one(crm, "1", ref).decode().encode("utf-16-le"), parked("not_json")),
    "UTF-8 with a mark": (lambda crm, ref: b"\xef\xbb\xbf" + one(crm, "1", ref), parked("not_json")),
    "nothing": (lambda *_: b"", parked("not_json")),
    "no JSON": (lambda *_: b"<xml/>", parked("not_json")),
    "cut short": (lambda crm, ref: one(crm, "1", ref)[:-3], parked("not_json")),
    "two documents": (lambda crm, ref: one(crm, "1", ref) * 2, parked("not_json")),
    "a number": (lambda *_: b"17", parked("wrong_type")),
    "a text": (lambda *_: b'"peopleCreated"', parked("wrong_type")),
    "null": (lambda *_: b"null", parked("wrong_type")),
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


def test_each_poison_is_taken_parked_or_refused_as_it_should_be_and_harms_no_other_lead(quiet: Rig) -> None:
    refs = {name: quiet.create() for name, (_, end) in POISON.items() if end == TAKEN}
    bodies = {name: make(quiet.crm, refs.get(name, "1")) for name, (make, _) in POISON.items()}
    with captured_logs() as logs:
        for _ in range(2):  # every CRM sends again, under the same id or another
            answers = {name: quiet.post(body, event=f"evt_{name.encode().hex()}") for name, body in bodies.items()}
            assert {name: answer.status for name, answer in answers.items()} == {
                name: status for name, (_, (status, _)) in POISON.items()
            }
        until(lambda: all(quiet.owners(list(refs.values()))), what="an owner for every lead that can be read")
        quiet.settle_owners()
    named = {body: name for name, body in bodies.items()}
    kept = [e for e in quiet.events() if e.body is not None]
    found = {named[e.body]: f"{e.state}: {'assigned' if e.state == 'done' else e.reason}" for e in kept}
    assert found == {name: end for name, (_, (_, end)) in POISON.items() if end}
    assert len(quiet.events()) == len(found)
    assert "unreadable_event" in quiet.alarms()
    assert sorted(Counter(quiet.turns()).values()) == sorted(len(refs) // 3 + (n < len(refs) % 3) for n in range(3))
    assert "error" not in logs.getvalue()
    quiet.audit()


def test_of_a_hundred_with_a_bad_one_ninety_nine_are_assigned_however_often_they_come(batching: Rig) -> None:
    refs = [str(number) for number in batching.sandbox.create_leads(99)]
    told = [named(batching.crm, ref) for ref in refs]
    body = wrap(batching.crm, "[" + ", ".join([*told[:50], "null", *told[50:]]) + "]")
    assert [batching.post(body).status for _ in range(3)] == [200, 200, 200]
    until(lambda: all(batching.owners(refs)), what="an owner for ninety-nine")
    batching.settle_owners()
    assert Counter(e.state for e in batching.events()) == {"done": 99, "parked": 1}
    assert batching.owners(refs) == [ANA, BEN, CY] * 33
    batching.audit()


# Elements of a batch that cannot be read, between two that can.
BAD_ELEMENTS = {
    "followupboss": ["null", "-3", "0", "1.5", '"twelve"', '"1\\u00b2"', '"../1"', '""', "true", "[5]", '{"id": 5}'],
    "generic": ["null", "17", "[]", "{}", '{"id": null}', '{"id": ""}', '{"id": "a/b"}', '{"id": ".."}', '{"id": -1}']
    + [f'{{"id": "9", {field}}}' for field in ('"price": "much"', '"owner": []', '"tags": "red"', '"custom": 5')]
    + ['{"id": "9", "created_at": "yesterday"}', '{"id": "9", "custom": {"a": {"b": 1}}}'],
    "hubspot": ["null", "17", "[]", "{}", '"5"']
    + [json.dumps(element(ref)) for ref in ("", "twelve", "../1", "-3", "0", "1.5", "1\u00b2")]
    + [json.dumps(element("9") | {key: None}) for key in ("portalId", "eventId", "occurredAt", "subscriptionType")]
    + [json.dumps(element("9") | {key: what}) for key in ("objectId", "portalId") for what in ([5], {"id": 5}, True)],
}


def test_a_bad_element_of_a_batch_parks_alone_however_often_it_comes(batching: Rig) -> None:
    first, last = batching.create(), batching.create()
    good = [named(batching.crm, ref) for ref in (first, last)]
    bad = BAD_ELEMENTS[batching.crm]
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


def test_an_unknown_topic_is_ignored(quiet: Rig) -> None:
    for topic in ("weather.changed", "", "x" * 500, "\\u0000", "lead"):
        body = wrap(quiet.crm, f"[{named(quiet.crm, '1')}]")
        for known in (b"peopleCreated", b"lead.created", b"contact.creation"):
            body = body.replace(known, b"#")
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
     "custom", "tags", "emails", "phones", "price", "created_at", "address", "timestamp", "eventCreated", "1", "12",
     "portalId", "objectId", "occurredAt", "subscriptionType", "contact.creation", "contact.merge", "mergedObjectIds"]
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
     "X-HubSpot-Signature-v3", "X-HubSpot-Request-Timestamp",
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
    elif crm == "hubspot":
        body = [element(str(zlib.crc32(event.encode()))) | lead]
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


def hurl(rig: Rig, examples: int, process: Serving | None = None) -> list[int]:
    """Send `examples` deliveries of any bytes; the server must answer each as :func:`allowed`.

    With `process` it is that one which answers; gives its memory (resident bytes) after each hundred.
    """
    url = rig.hook_url if process is None else process.base + urlsplit(rig.hook_url).path
    stranger = url[:-4] + "zzzz"
    memory, numbers = list[int](), itertools.count(1)

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
        if process is not None and next(numbers) % 100 == 0:
            memory.append(psutil.Process(process.process.pid).memory_info().rss)

    with captured_logs() as logs:
        deliver()
    assert not [line for line in logs.getvalue().splitlines() if json.loads(line)["event"] != "rejected"]
    assert {e.state for e in rig.events()} <= {"waiting", "ignored", "parked"}
    return memory


def leaked(memory: list[int]) -> float:
    """Bytes that each delivery left in the process, once it was warm: from the second fifth to the last."""
    fifth = len(memory) // 5
    return (median(memory[-fifth:]) - median(memory[fifth : 2 * fifth])) / (300 * fifth)


FLAT = 512  # bytes per delivery; one kept with its headers is two thousand


@pytest.mark.parametrize("crm", CRMS)
def test_no_bytes_make_the_door_fail(make_rig: Callable[..., Rig], crm: str) -> None:
    hurl(make_rig(crm=crm, worker=False), 200)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("crm", CRMS)
def test_ten_thousand_deliveries_of_any_bytes_make_the_door_neither_fail_nor_grow(
    make_rig: Callable[..., Rig], serve: Callable[..., Serving], crm: str
) -> None:
    rig = make_rig(crm=crm, worker=False)
    memory = hurl(rig, 10_000, serve(rig, worker=False))
    assert leaked(memory) < FLAT, memory[::10]


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_door_that_keeps_what_it_was_sent_would_be_noticed(
    make_rig: Callable[..., Rig], serve: Callable[..., Serving], tmp_path: Path
) -> None:
    keep = '    runtime.__dict__.setdefault("kept", []).append(delivery)\n'
    old = "    hook.adapter.verify("
    leaky = copy_source(tmp_path / "source", [Patch("connector/accept.py", old, keep + old)])
    rig = make_rig(crm="generic", worker=False)
    memory = hurl(rig, 3_000, serve(rig, worker=False, source=leaky))
    assert leaked(memory) >= FLAT, memory


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
