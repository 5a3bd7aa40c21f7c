"""The generic face beyond the conformance suite: Standard Webhooks both ways, and its odd cases."""

from __future__ import annotations

import base64
import datetime as dt
import json
from typing import Any

import pytest
import responses
from hypothesis import given, settings
from hypothesis import strategies as st
from standardwebhooks import Webhook

from adapters.base import Credentials, EventKind, Rejected, Unreadable, WebhookRequest
from adapters.client import CrmError, Outcome
from adapters.generic import Generic
from routing.model import Lead, UnassignedDefinition
from tests.adapters.kit import NOW, Answering, LeadRow, Scripted, kit
from tests.adapters.kit_generic import API_SECRET
from tests.adapters.loopback import Received, Reply

GENERIC = Generic()
BASE = "https://crm.example.com/api"
HOOK = "https://hooks.example.com/hooks/token-now"
KIT = kit("generic")
SECRET = KIT.secrets[0]


def delivery(body: bytes, **headers: str) -> WebhookRequest:
    return WebhookRequest("POST", HOOK, {k.replace("_", "-"): v for k, v in headers.items()}, body)


@pytest.mark.parametrize(
    ("message", "at", "body", "secret", "signature"),
    [
        (  # the vector that the specification's libraries share
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1614265330,
            b'{"test": 2432232314}',
            b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        ),
        (  # computed with openssl
            "msg_own",
            1775466900,
            b'{"type": "x"}',
            SECRET,
            "v1,w25+VBMq+9Ql0y9JptqS8gA4hqsgwxNMZKOYI8q/lYE=",
        ),
    ],
)
def test_known_signatures(message: str, at: int, body: bytes, secret: bytes, signature: str) -> None:
    now = dt.datetime.fromtimestamp(at, dt.UTC)
    for given_ in (signature, f"v1a,xx {signature}", f"v1,AAAA {signature} v2,zz"):
        request = delivery(body, webhook_id=message, webhook_timestamp=str(at), webhook_signature=given_)
        for form in (secret, secret.removeprefix(b"whsec_"), secret.rstrip(b"=")):
            GENERIC.verify(request, [form], now)
    assert Webhook(secret.decode()).sign(message, now, body.decode()) == signature


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=30), st.binary(min_size=1, max_size=40))
def test_what_the_library_signs_is_accepted(body: str, key: bytes) -> None:
    secret = f"whsec_{base64.b64encode(key).decode()}"
    signature = Webhook(secret).sign("msg_1", NOW, body)
    at = str(int(NOW.timestamp()))
    request = delivery(body.encode(), webhook_id="msg_1", webhook_timestamp=at, webhook_signature=signature)
    GENERIC.verify(request, [secret.encode()], NOW)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"webhook-id": ""}, "no_signature"),
        ({"webhook-timestamp": "1775467200.5"}, "bad_time"),
        ({"webhook-timestamp": "-1"}, "bad_time"),
        ({"webhook-timestamp": "٣"}, "bad_time"),
        ({"webhook-timestamp": "9" * 13}, "bad_time"),
        ({"webhook-signature": "v1"}, "bad_signature"),
        ({"webhook-signature": "v1, v1, ,"}, "bad_signature"),
        ({"webhook-id": "msg_other"}, "bad_signature"),
    ],
)
def test_why_a_delivery_is_rejected(change: dict[str, str], reason: str) -> None:
    headers = KIT.sign(b"{}", SECRET) | change
    with pytest.raises(Rejected, match=reason):
        GENERIC.verify(KIT.request(b"{}", headers), [SECRET], NOW)


@pytest.mark.parametrize(
    ("secrets", "reason"),
    [([], "no_secret"), ([b""], "no_secret"), ([b"whsec_"], "bad_secret"), ([b"whsec_%%%"], "bad_secret")],
)
def test_secrets_that_prove_nothing(secrets: list[bytes], reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        GENERIC.verify(KIT.signed(b"{}"), secrets, NOW)


def test_age_is_judged_after_the_signature() -> None:
    for seconds, reason in ((-301, "too_old"), (301, "too_new")):
        request = KIT.signed(b"{}", at=NOW + dt.timedelta(seconds=seconds))
        with pytest.raises(Rejected, match=reason):
            GENERIC.verify(request, [SECRET], NOW)
        with pytest.raises(Rejected, match="bad_signature"):
            GENERIC.verify(request, [KIT.secrets[1]], NOW)


def test_a_signed_body_that_is_no_text_parks_instead_of_being_rejected() -> None:
    request = KIT.signed(b"\xff\xfe")
    GENERIC.verify(request, [SECRET], NOW)
    with pytest.raises(Unreadable, match="not_utf8"):
        GENERIC.parse(request)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"data": {"id": "1"}}, "missing_type"),
        ({"type": "lead.created"}, "missing_data"),
        ({"type": "lead.created", "data": None}, "missing_id"),
        ({"type": "lead.created", "data": []}, "wrong_type"),
        ({"type": "lead.created", "data": {"leads": {}}}, "wrong_type"),
        ({"type": "lead.created", "data": {"id": "1", "price": "much"}}, "wrong_type"),
        ({"type": "lead.created", "data": {"id": "1", "owner": {}}}, "wrong_type"),
        ({"type": "lead.created", "data": {"id": "1", "custom": {"a": {}}}}, "wrong_type"),
        ({"type": "lead.created", "data": {"id": "1", "created_at": 1775466900}}, "wrong_type"),
        ({"type": "lead.created", "data": {"id": "a,b"}}, "wrong_type"),
        ([], "wrong_type"),
    ],
)
def test_what_parks_a_delivery(body: Any, reason: str) -> None:
    with pytest.raises(Unreadable, match=f"^{reason}$"):
        GENERIC.parse(KIT.signed(json.dumps(body).encode()))


def test_keys_of_a_delivery() -> None:
    body = json.dumps(KIT.batch(["1", "1", None])).encode()
    found = GENERIC.parse(delivery(body, webhook_id="m"))
    assert [(e.key, e.kind) for e in found] == [
        ("m:0:1", EventKind.LEAD_CREATED),
        ("m:1:1", EventKind.LEAD_CREATED),
        ("m:2", EventKind.UNREADABLE),
    ]
    long = GENERIC.parse(delivery(body, webhook_id="x" * 5000))
    assert len(long[0].key) == 64 + len(":0:1")
    assert long[0].key != GENERIC.parse(delivery(body, webhook_id="x" * 5001))[0].key
    assert GENERIC.parse(delivery(b'{"type": "lead.created", "data": {"leads": []}}', webhook_id="m")) == []
    with pytest.raises(Unreadable, match="missing_webhook_id"):
        GENERIC.parse(delivery(body))


# -- outbound ----------------------------------------------------------------------------------------------------------


class Talk(Scripted):
    def __init__(self, answer: Answering, mock: responses.RequestsMock, secret: str = API_SECRET) -> None:
        super().__init__(BASE, answer, mock, Credentials(secrets={"api_secret": secret}))


@pytest.fixture
def mock() -> Any:
    with responses.RequestsMock(assert_all_requests_are_fired=False) as found:
        yield found


def test_every_call_is_signed_over_the_bytes_it_sends() -> None:
    with KIT.running() as running:
        running.fake.add_leads(LeadRow("L-1"))
        GENERIC.add_note(running.client, "L-1", "Größe", "body")
        GENERIC.find_note(running.client, "L-1", "x")
        sent, read = running.server.received
        assert json.loads(sent.body) == {"subject": "Größe", "body": "body"}
        assert read.body == b""
        assert sent.headers["webhook-id"] != read.headers["webhook-id"]
        Webhook_ = Webhook(API_SECRET)
        for asked in (sent, read):
            want = Webhook_.sign(asked.headers["webhook-id"], NOW, asked.body.decode())
            assert asked.headers["webhook-signature"] == want


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_no base64!", "plain text"])
def test_without_a_usable_secret_nothing_is_sent(secret: str, mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: {}, mock, secret)
    with pytest.raises(CrmError, match="api_secret") as caught:
        GENERIC.get_agent(talk.client, "A-1")
    assert caught.value.outcome is Outcome.REAUTHORISE
    assert talk.calls == []
    assert [f.ok for f in GENERIC.check(talk.client, HOOK)] == [False, False, False]


def test_a_write_says_whom_it_expects(mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: {"lead": {"id": "L-1", "owner": "A-2"}}, mock)
    assert GENERIC.set_owner(talk.client, Lead(ref="L-1", owner_ref="A-1"), "A-2").owner_ref == "A-2"
    assert GENERIC.set_owner(talk.client, Lead(ref="L-1"), "A-2").owner_ref == "A-2"
    bodies = [json.loads(call.request.body) for call in mock.calls]
    assert bodies == [{"owner": "A-2", "expected": "A-1"}, {"owner": "A-2", "expected": None}]
    assert talk.calls[0] == ("PUT", "/leads/L-1/owner", {})


@pytest.mark.parametrize("status", [409, 412])
def test_a_conflict_is_told_not_raised(status: int, mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: (status, {"error": "taken"}), mock)
    assert GENERIC.set_owner(talk.client, Lead(ref="L-1"), "A-2").conflict


@pytest.mark.parametrize(
    "answer", [{}, {"lead": None}, {"lead": {"id": "L-2", "owner": "A-2"}}, {"lead": {"id": "L-1"}}, {"id": "L-1"}]
)
def test_an_answer_that_proves_nothing_is_unknown(answer: Any, mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: answer, mock)
    with pytest.raises(CrmError) as caught:
        GENERIC.set_owner(talk.client, Lead(ref="L-1"), "A-2")
    assert caught.value.outcome is Outcome.UNKNOWN


def test_ids_are_quoted_in_paths_and_lists(mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: {"leads": [{"id": "a@b+c=d"}], "notes": []}, mock)
    assert set(GENERIC.fetch_leads(talk.client, ["a@b+c=d", "x~y:z"])) == {"a@b+c=d"}
    GENERIC.find_note(talk.client, "a@b+c=d", "m")
    assert talk.calls[0][2] == {"ids": "a@b+c=d,x~y:z"}
    assert talk.calls[1][1] == "/leads/a@b+c=d/notes"
    with pytest.raises(Unreadable):
        GENERIC.find_note(talk.client, "../agents", "m")


@pytest.mark.parametrize(
    ("agent", "active"),
    [
        ({}, True),
        ({"active": True}, True),
        ({"active": False}, False),
        ({"active": None}, False),
        ({"active": "no"}, False),
    ],
)
def test_who_is_active(agent: Any, active: bool, mock: responses.RequestsMock) -> None:
    for body in ({"id": "A-1", **agent}, {"agent": {"id": "A-1", **agent}}):
        seen = GENERIC.get_agent(Talk(lambda *_, b=body: b, mock).client, "A-1")
        assert seen is not None
        assert (seen.active, seen.name) == (active, "A-1")
        mock.reset()


def test_a_cursor_that_comes_again_ends_in_an_error(mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: {"agents": [{"id": "A-1"}], "next": "c"}, mock)
    with pytest.raises(CrmError) as caught:
        list(GENERIC.list_agents(talk.client))
    assert caught.value.outcome is Outcome.ANSWER_UNREADABLE
    assert len(talk.calls) == 2


@pytest.mark.parametrize(
    ("definition", "query"),
    [
        (UnassignedDefinition(), {"created_after": NOW.isoformat(), "unassigned": "true"}),
        (UnassignedDefinition(user_refs=frozenset({"A-9"})), {"created_after": NOW.isoformat()}),
    ],
)
def test_what_the_sweep_asks_for(definition: Any, query: Any, mock: responses.RequestsMock) -> None:
    rows = [
        {"id": "1"},
        {"id": "2", "owner": "A-9"},
        {"id": "3", "owner": "A-1"},
        {"id": "4", "pond": "p"},
        {"id": "5", "created_at": "2026-04-06T09:19:59Z"},
    ]
    talk = Talk(lambda *_: {"leads": rows, "next": None}, mock)
    found = [r for page in GENERIC.unassigned_since(talk.client, NOW, definition) for r in page]
    assert found == (["1", "2"] if definition.user_refs else ["1"])
    assert talk.calls == [("GET", "/leads", query)]


def test_one_odd_lead_does_not_block_its_neighbours(mock: responses.RequestsMock) -> None:
    rows = [{"id": "1", "price": "much", "tags": 7, "custom": []}, {"id": "2", "price": 5}]
    found = GENERIC.fetch_leads(Talk(lambda *_: {"leads": rows}, mock).client, ["1", "2"])
    assert (found["1"].price, found["2"].price) == (None, 5)


def test_a_hook_with_other_topics_is_replaced() -> None:
    with KIT.running() as running:
        topics = list(GENERIC.topics)
        GENERIC.subscribe(running.client, HOOK)
        (old,) = {h.ref for h in running.fake.hooks}
        row = running.fake.add_hook("lead.merged", HOOK)
        row.ref = old  # one hook, one topic too many
        GENERIC.subscribe(running.client, HOOK)
        assert running.fake.standing(HOOK) == [(t, True) for t in sorted(topics)]
        assert old not in {h.ref for h in running.fake.hooks}
        assert GENERIC.unsubscribe(running.client, HOOK) == 1


def test_a_hook_without_topics_is_removed(mock: responses.RequestsMock) -> None:
    def answer(method: str, path: str, _: dict[str, str]) -> Any:
        if method == "POST":
            return 201, {"id": "h2", "url": HOOK, "topics": list(GENERIC.topics), "active": True}
        return {"hooks": [{"id": "h1", "url": HOOK, "topics": None, "active": True}]} if method == "GET" else (404, {})

    talk = Talk(answer, mock)
    assert len(GENERIC.subscribe(talk.client, HOOK).hooks) == 3
    assert [(m, p) for m, p, _ in talk.calls] == [("GET", "/hooks"), ("DELETE", "/hooks/h1"), ("POST", "/hooks")]


def test_a_signature_that_the_server_refuses_asks_for_new_credentials() -> None:
    with KIT.running() as running:
        running.client.credentials = Credentials(secrets={"api_secret": "whsec_b3RoZXI="})
        with pytest.raises(CrmError) as caught:
            list(GENERIC.list_agents(running.client))
        assert caught.value.outcome is Outcome.REAUTHORISE


def test_the_clock_is_told_by_the_account_or_by_the_date_header() -> None:
    def handle(asked: Received) -> Reply:
        return Reply(body={"id": "a"}, headers={"Date": "Mon, 06 Apr 2026 09:10:00 GMT"} if told else {})

    with KIT.running() as running:
        running.server.handle = handle
        for told in (True, False):
            (clock,) = [f for f in GENERIC.check(running.client, None) if f.where == "clock"]
            assert clock.ok is not told
            assert clock.what == ("600 s apart from the CRM's" if told else "the CRM does not tell its time")
