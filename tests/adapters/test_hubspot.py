"""HubSpot beyond the conformance suite: known signatures, odd elements, merges, limits, search."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import responses

from adapters.base import Credentials, EventKind, Rejected, WebhookRequest
from adapters.client import Client
from adapters.hubspot import HubSpot
from adapters.outcome import CrmError, Outcome
from routing.model import Lead, UnassignedDefinition
from tests.adapters.kit import NOW, LeadRow, Scripted, fixtures, kit, plain
from tests.adapters.loopback import Received, Reply

CRM = HubSpot()
BASE = "https://api.hubapi.com"
CREDENTIALS = Credentials(
    parameters={"tags_property": "lead_tags", "price_property": "budget_max", "properties": "bedrooms, nosuch"},
    secrets={"access_token": "pat-na1-x", "client_secret": "s"},
)


# -- signatures: made once with the vendor's own library, hubspot-api-client 12.0.0, on decoded addresses -----

SECRET = b"turnlock-test-secret-0001"
STAMP = "1775467200500"
AT = datetime.fromtimestamp(int(STAMP) / 1000, UTC)
PLAIN, QUERY = "https://hooks.example.com/hooks/token", "https://hooks.example.com/hooks/token?tenant=a%40b.com&p=x%2Fy"
KNOWN = [
    (PLAIN, b'[{"eventId":1,"portalId":62515}]', "be8p+uweUyh3Qls/b7ItwBb5DhRJeCEW3HdA/wNEzeg="),
    (PLAIN, '[{"eventId":2,"propertyValue":"Zoë Straße"}]'.encode(), "jSl5xflVmAjvbhgVdYCkWLm6cPrToLU6ZaumoFoMd90="),
    (QUERY, b'[{"eventId":1,"portalId":62515}]', "74pnZuWX3WWRcED9hV30vR4ICk9Exo0eX0uUz1dq50U="),
]


def signed(url: str, body: bytes, signature: str, stamp: str = STAMP) -> WebhookRequest:
    return WebhookRequest(
        "POST", url, {"x-hubspot-signature-v3": signature, "x-hubspot-request-timestamp": stamp}, body
    )


@pytest.mark.parametrize(("url", "body", "signature"), KNOWN)
def test_known_signatures(url: str, body: bytes, signature: str) -> None:
    CRM.verify(signed(url, body, signature), [SECRET], AT)
    for other in ("https://hooks.example.com/hooks/other", url + "/", url.upper(), url.replace("https", "http")):
        with pytest.raises(Rejected, match="bad_signature"):
            CRM.verify(signed(other, body, signature), [SECRET], AT)


def test_the_window_is_five_minutes_to_the_millisecond_on_both_sides() -> None:
    url, body, signature = KNOWN[0]
    for off in (-300_000, 300_000):
        CRM.verify(signed(url, body, signature), [SECRET], AT + timedelta(milliseconds=off))
    for off, reason in ((300_001, "too_old"), (-300_001, "too_new")):
        with pytest.raises(Rejected, match=reason):
            CRM.verify(signed(url, body, signature), [SECRET], AT + timedelta(milliseconds=off))
    for stamp in ("", "1775467200500.0", " 1775467200500", "+1775467200500", "٣", "9" * 400):
        with pytest.raises(Rejected):
            CRM.verify(signed(url, body, signature, stamp), [SECRET], AT)


def test_an_older_signature_alone_proves_nothing() -> None:
    old = {"x-hubspot-signature": "232db2615f3d666f", "x-hubspot-signature-version": "v1"}
    with pytest.raises(Rejected, match="no_signature"):
        CRM.verify(WebhookRequest("POST", PLAIN, old, b"[]"), [SECRET], AT)


# -- deliveries --------------------------------------------------------------------------------------------------------


def element(**more: Any) -> dict[str, Any]:
    made = {"appId": 9, "eventId": 1, "portalId": 62515, "occurredAt": 1775467200500, "objectId": 5001}
    return {**made, "subscriptionType": "contact.creation", **more}


def told(*elements: Any) -> list[Any]:
    return CRM.parse(WebhookRequest("POST", PLAIN, {}, json.dumps(elements).encode()))


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, EventKind.LEAD_CREATED),
        ({"changeSource": "INTEGRATION", "sourceId": "9"}, EventKind.LEAD_CREATED),  # a lead of our own making is news
        ({"subscriptionType": None, "eventType": "contact.creation"}, EventKind.LEAD_CREATED),
        ({"subscriptionType": "contact.restore"}, EventKind.LEAD_CHANGED),
        ({"subscriptionType": "object.creation", "objectTypeId": "0-1"}, EventKind.LEAD_CREATED),
        ({"subscriptionType": "object.creation", "objectTypeId": "0-3"}, EventKind.UNKNOWN),
        ({"subscriptionType": "object.creation"}, EventKind.UNKNOWN),
        ({"subscriptionType": "company.creation"}, EventKind.UNKNOWN),
        ({"subscriptionType": "contact.associationChange"}, EventKind.UNKNOWN),
    ],
)
def test_kinds(more: dict[str, Any], kind: EventKind) -> None:
    assert [(e.kind, e.account) for e in told(element(**more))] == [(kind, "62515")]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ({"changeSource": "INTEGRATION", "sourceId": "9"}, EventKind.UNKNOWN),
        ({"changeSource": "INTEGRATION", "sourceId": 9}, EventKind.UNKNOWN),
        ({"changeSource": "INTEGRATION", "sourceId": "10"}, EventKind.LEAD_CHANGED),
        ({"changeSource": "INTEGRATION"}, EventKind.LEAD_CHANGED),
        ({"changeSource": "CRM_UI", "sourceId": "9"}, EventKind.LEAD_CHANGED),
        ({"changeSource": "INTEGRATION", "appId": None}, EventKind.LEAD_CHANGED),
    ],
)
def test_our_own_write_is_known_by_the_app_that_made_it(source: dict[str, Any], kind: EventKind) -> None:
    changed = element(subscriptionType="contact.propertyChange", propertyName="hubspot_owner_id", **source)
    assert [e.kind for e in told(changed)] == [kind]


def test_the_event_id_alone_is_no_key_and_the_attempt_is_no_part_of_it() -> None:
    many = [
        element(), element(attemptNumber=7), element(objectId=5002), element(portalId=7), element(eventId=2),
        element(occurredAt=1775467200501), element(subscriptionType="contact.restore"),
        element(subscriptionType="contact.propertyChange", propertyName="a"),
        element(subscriptionType="contact.propertyChange", propertyName="b"),
    ]  # fmt: skip
    assert len(told(*many)) == len(many) - 1


def test_an_element_that_cannot_be_read_still_names_its_account() -> None:
    (bad, good) = told(element(objectId="x/../y"), element())
    assert (bad.kind, bad.account, bad.problem) == (EventKind.UNREADABLE, "62515", "wrong_type")
    assert good.kind is EventKind.LEAD_CREATED
    assert [e.account for e in told("no object")] == [None]


# -- leads -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mock() -> Any:
    with responses.RequestsMock(assert_all_requests_are_fired=False) as made:
        yield made


def test_a_contact_in_our_words(mock: responses.RequestsMock) -> None:
    fixture = next(f for f in fixtures("hubspot") if f.name == "contact")
    contact = json.loads(fixture.body)
    talk = Scripted(BASE, lambda *_: {"results": [contact]}, mock, CREDENTIALS)
    assert plain(CRM.fetch_leads(talk.client, ["106500991877"])["106500991877"]) == fixture.about["lead"]
    (request,) = [call.request for call in mock.calls]
    asked = json.loads(request.body or b"")["properties"]
    assert {"bedrooms", "nosuch", "lead_tags", "budget_max", "hubspot_owner_id", "lifecyclestage"} <= set(asked)
    assert len(asked) == len(set(asked))
    assert (
        CRM.fetch_leads(talk.client, ["106500991001", "x", ""]) == {}
    )  # shown under its new id: not the one asked for


@pytest.mark.parametrize("owner", [None, "", ...])
def test_nobody_has_many_forms(owner: Any, mock: responses.RequestsMock) -> None:
    values = {} if owner is ... else {"hubspot_owner_id": owner}
    talk = Scripted(BASE, lambda *_: {"results": [{"id": "1", "properties": values}]}, mock, CREDENTIALS)
    assert CRM.fetch_leads(talk.client, ["1"])["1"].owner_ref is None


def test_a_queue_is_no_agent(mock: responses.RequestsMock) -> None:
    rows = [{"id": "1", "type": "QUEUE", "email": "q@example.com"}, {"id": "2", "type": "PERSON", "firstName": "Ann"}]
    talk = Scripted(BASE, lambda m, p, q: {"results": rows if q.get("archived") == "false" else []}, mock, CREDENTIALS)
    assert [(a.ref, a.active, a.name) for a in CRM.list_agents(talk.client)] == [
        ("1", False, "q@example.com"),
        ("2", True, "Ann"),
    ]


def test_teams_come_from_the_owners_in_them(mock: responses.RequestsMock) -> None:
    rows = [
        {"id": "1", "teams": [{"id": "8", "name": "South", "primary": True}, {"id": "7", "name": "North"}]},
        {"id": "2", "teams": [{"id": "8", "name": "South"}]},
        {"id": "3"},
    ]
    talk = Scripted(BASE, lambda *_: {"results": rows}, mock, CREDENTIALS)
    assert [(t.ref, t.name, t.agent_refs) for t in CRM.list_teams(talk.client)] == [
        ("7", "North", ("1",)),
        ("8", "South", ("1", "2")),
    ]


def test_a_sweep_goes_on_from_the_last_id_and_ends() -> None:
    made = kit("hubspot")
    with made.running() as running:
        running.fake.add_leads(*(LeadRow(str(5000 + n), created=NOW - timedelta(minutes=30)) for n in range(450)))
        found = [
            ref
            for page in made.adapter.unassigned_since(
                running.client, NOW - timedelta(hours=1), UnassignedDefinition(frozenset({"3", "4"}))
            )
            for ref in page
        ]
        assert found == [str(5000 + n) for n in range(450)]
        assert len(running.server.received) == 3
        assert all(len(r.body) < 3000 for r in running.server.received)  # the vendor's limit on a search

        running.server.received.clear()
        many = UnassignedDefinition(frozenset(str(10**9 + n) for n in range(250)))
        found = [r for page in made.adapter.changed_since(running.client, NOW - timedelta(hours=1), many) for r in page]
        assert found == [str(5000 + n) for n in range(450)]
        assert all(len(r.body) < 3000 for r in running.server.received)

        def same_page_for_ever(asked: Received) -> Reply:
            rows = [{"id": "7", "properties": {}}] * 200
            return Reply(body={"results": rows})

        running.server.handle = same_page_for_ever
        with pytest.raises(CrmError) as caught:
            list(made.adapter.unassigned_since(running.client, NOW, UnassignedDefinition()))
        assert caught.value.outcome is Outcome.ANSWER_UNREADABLE


# -- errors ------------------------------------------------------------------------------------------------------------


def client_of() -> Client:
    return Client(
        BASE, CRM.headers(CREDENTIALS), CREDENTIALS, now=lambda: NOW, refine=CRM.refine,
        asks_to_wait=CRM.asks_to_wait, words=CRM.words,
    )  # fmt: skip


NO_OWNER = 'Property values were not valid: [{"isValid":false,"error":"INVALID_OWNER_ID","name":"hubspot_owner_id"}]'


@pytest.mark.parametrize(
    ("status", "body", "outcome", "wait", "words"),
    [
        (
            400,
            {"category": "VALIDATION_ERROR", "errors": [{"code": "PROPERTY_DOESNT_EXIST"}]},
            Outcome.REFUSED,
            None,
            "a property does not exist",
        ),
        (400, {"category": "VALIDATION_ERROR", "message": NO_OWNER}, Outcome.AGENT_REFUSED, None, "an owner"),
        (400, {"errors": [7, {"code": "INVALID_OWNER_ID"}]}, Outcome.AGENT_REFUSED, None, "an owner"),
        (400, {"errors": 7, "message": ["lena"]}, Outcome.REFUSED, None, "parked"),
        (401, {"category": "INVALID_AUTHENTICATION"}, Outcome.REAUTHORISE, None, "connect the CRM again"),
        (401, {"category": "EXPIRED_AUTHENTICATION"}, Outcome.REAUTHORISE, None, "connect the CRM again"),
        (403, {"category": "MISSING_SCOPES"}, Outcome.FORBIDDEN, None, "crm.objects.contacts.write"),
        (404, {"category": "OBJECT_NOT_FOUND"}, Outcome.GONE, None, "no longer"),
        (409, {"category": "CONFLICT"}, Outcome.CONFLICT, None, "meanwhile"),
        (414, b"<html>", Outcome.REFUSED, None, "parked"),
        (423, {}, Outcome.WAIT, 2.0, "locked"),
        (429, {"policyName": "SECONDLY"}, Outcome.WAIT, 1.0, "slow down"),
        (
            429,
            {"policyName": "TEN_SECONDLY_ROLLING", "message": "You have reached your daily limit."},
            Outcome.WAIT,
            10.0,
            "slow down",
        ),
        (429, {"policyName": "DAILY"}, Outcome.WAIT, 3600.0, "until midnight"),
        (429, {"policyName": ["DAILY"]}, Outcome.WAIT, None, "slow down"),
        (429, b"slow down", Outcome.WAIT, None, "slow down"),
        (477, {"message": "migration"}, Outcome.WAIT, None, "another data centre"),
        (502, b"", Outcome.UNKNOWN, None, "reads the lead again"),
        (504, b"", Outcome.UNKNOWN, None, "reads the lead again"),
        (521, b"", Outcome.UNKNOWN, None, "reads the lead again"),
        (523, b"", Outcome.UNKNOWN, None, "reads the lead again"),
        (524, b"", Outcome.UNKNOWN, None, "reads the lead again"),
    ],
)
def test_each_error_of_an_owner_write(
    status: int, body: Any, outcome: Outcome, wait: float | None, words: str, mock: responses.RequestsMock
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    mock.add("PATCH", f"{BASE}/crm/v3/objects/contacts/5001", raw, status=status)
    with client_of() as client, pytest.raises(CrmError) as caught:
        CRM.set_owner(client, Lead(ref="5001"), "12")
    assert (caught.value.outcome, caught.value.retry_after) == (outcome, wait)
    assert words in caught.value.text
    assert "lena" not in str(caught.value)


def row(ref: str, **more: str) -> dict[str, Any]:
    return {"id": ref, "properties": {"hubspot_owner_id": None, **more}}


def test_contacts_that_lack_for_another_reason_than_being_gone_are_asked_for_again(
    mock: responses.RequestsMock,
) -> None:
    gone = {"category": "OBJECT_NOT_FOUND", "context": {"ids": ["2"]}}
    talk = Scripted(BASE, lambda *_: {"results": [row("1")], "errors": [gone]}, mock, CREDENTIALS)
    assert set(CRM.fetch_leads(talk.client, ["1", "2"])) == {"1"}
    mock.reset()
    away = {"category": "SERVICE_UNAVAILABLE"}
    talk = Scripted(BASE, lambda *_: {"results": [row("1")], "errors": [gone, away]}, mock, CREDENTIALS)
    with pytest.raises(CrmError) as caught:
        CRM.fetch_leads(talk.client, ["1", "2"])
    assert caught.value.outcome is Outcome.NOT_SENT


def test_contacts_that_are_too_big_for_one_answer_are_read_in_halves() -> None:
    with kit("hubspot").running() as running:
        refs = [str(5000 + n) for n in range(8)]
        running.fake.add_leads(*(LeadRow(ref) for ref in refs))
        small = running.fake.handle

        def handle(asked: Received) -> Reply:
            reply = small(asked)
            for contact in reply.body["results"]:  # type: ignore[index,call-overload]
                contact["properties"]["story"] = "x" * 60_000
                contact["properties"] |= {f"story_{n}": "x" * 60_000 for n in range(4)}
            return reply

        running.server.handle = handle
        assert set(CRM.fetch_leads(running.client, refs)) == set(refs)
        assert [len(r.json["inputs"]) for r in running.server.received] == [8, 4, 2, 2, 4, 2, 2]


def test_a_scope_that_the_token_lacks_is_told_and_other_tokens_tell_none() -> None:
    with kit("hubspot").running() as running:
        running.fake.scopes = ["crm.objects.contacts.read", "crm.objects.owners.read"]  # type: ignore[attr-defined]
        (lacking,) = [f for f in CRM.check(running.client, None) if f.where == "scopes"]
        assert (lacking.ok, lacking.fix) == (False, "give the private app crm.objects.contacts.write")
        all_else = running.fake.handle
        running.server.handle = lambda a: Reply(404, {}) if a.path.endswith("token-info") else all_else(a)
        (untold,) = [f for f in CRM.check(running.client, None) if f.where == "scopes"]
        assert (untold.ok, untold.what) == (True, "not told of this kind of token")


def test_what_the_header_says_goes_before_the_name_of_the_limit(mock: responses.RequestsMock) -> None:
    mock.add("PATCH", f"{BASE}/x", json={"policyName": "DAILY"}, status=429, headers={"Retry-After": "3"})
    mock.add("PATCH", f"{BASE}/moving", status=477, headers={"Retry-After": "86400"})
    with Client(BASE, {}, CREDENTIALS, now=lambda: NOW, refine=CRM.refine, asks_to_wait=CRM.asks_to_wait) as client:
        with pytest.raises(CrmError) as caught:
            client.patch("/x", json={})
        assert caught.value.retry_after == 3.0
        with pytest.raises(CrmError) as caught:
            client.patch("/moving", json={})
        assert (caught.value.outcome, caught.value.retry_after) == (Outcome.WAIT, 3600.0)
