"""Twenty: every captured delivery and answer, the write on condition, and pages that never end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import responses

from adapters import twenty_api
from adapters.base import HOOK_TOPIC, Credentials, Event, EventKind, Rejected
from adapters.client import Client, CrmError, Outcome
from adapters.twenty import Twenty
from routing.model import AgentSeen, Lead, UnassignedDefinition
from tests.adapters.captured import BASE, Captures, exact, sent

CRM = Twenty()
CAPTURED = Captures(CRM)
DELIVERIES, ANSWERS = CAPTURED.names("wh"), CAPTURED.names("api")
NOW = datetime(2026, 11, 29, 15, 40, tzinfo=UTC)
HOOK, TOPIC = "https://hooks.example.com/hooks/token", "company.accountOwner"
SECRET = "twenty-secret-1"
QUILL, MUNSTER, CAS = (
    "cbdca8a2-0de1-4f68-9278-6b0f87a4bb68",
    "35cb9286-52f0-412e-965e-9016c1b3ff0f",
    "21c3b1e7-2140-428f-a7d7-8ecd57abd4ec",
)
ANA, BEN = "20202020-0687-4c41-b707-ed1bfca972a7", "20202020-1553-45c6-a028-5a9064cce07f"


def credentials(**parameters: str) -> Credentials:
    return Credentials(parameters, {"api_key": "k", "webhook_secret": SECRET})


@pytest.fixture
def mock() -> Iterator[responses.RequestsMock]:
    with responses.RequestsMock() as made:
        yield made


@pytest.fixture
def client() -> Iterator[Client]:
    with CAPTURED.client(credentials(), NOW) as made:
        yield made


def event(name: str, topic: str = TOPIC) -> Event:
    (found,) = CRM.parse(CAPTURED.delivery(name, **{HOOK_TOPIC: topic})[0])
    return found


# -- deliveries ------------------------------------------------------------------------------------------------------

CREATED, CHANGED, DELETED = EventKind.LEAD_CREATED, EventKind.LEAD_CHANGED, EventKind.LEAD_DELETED
KINDS = {"created": CREATED, "updated": CHANGED, "destroyed": DELETED}


def test_every_capture_is_looked_at() -> None:
    assert len(DELIVERIES) == 18
    assert len(ANSWERS) == 63
    assert {name.partition("_")[0] for name in ANSWERS} >= set(OUTCOMES)


@pytest.mark.parametrize("name", DELIVERIES)
def test_captured_deliveries(name: str) -> None:
    request, came = CAPTURED.delivery(name, **{HOOK_TOPIC: TOPIC})
    CRM.verify(request, [b"another", SECRET.encode()], came)
    body, found = json.loads(request.body), event(name)
    assert found.kind is KINDS[body["eventName"].partition(".")[2]]
    assert (found.ref, found.key_is_final) == (body["record"]["id"], found.kind is CREATED)
    assert found.occurred_at is not None
    assert timedelta(0) <= came - found.occurred_at < timedelta(seconds=1)
    if found.kind is DELETED:
        assert found.lead is None
    else:
        assert found.lead is not None
        assert (found.lead.ref, found.lead.owner_ref) == (found.ref, body["record"]["accountOwnerId"])


@pytest.mark.parametrize("name", DELIVERIES)
def test_captured_deliveries_are_refused_late_early_and_changed(name: str) -> None:
    request, came = CAPTURED.delivery(name, **{HOOK_TOPIC: TOPIC})
    stamp = "x-twenty-webhook-timestamp"
    later = replace(request, headers={**request.headers, stamp: str(int(request.headers[stamp]) + 1)})
    in_seconds = replace(request, headers={**request.headers, stamp: request.headers[stamp][:-3]})
    for sent_, now, secret, reason in (
        (request, came + timedelta(seconds=302), SECRET, "too_old"),
        (request, came - timedelta(seconds=302), SECRET, "too_new"),
        (request, came, SECRET[:-1], "bad_signature"),
        (later, came, SECRET, "bad_signature"),
        (in_seconds, came, SECRET, "bad_signature"),
    ):
        with pytest.raises(Rejected, match=reason):
            CRM.verify(sent_, [secret.encode()], now)
    # The nonce is not signed: another one proves nothing and changes nothing.
    CRM.verify(replace(request, headers={**request.headers, "x-twenty-webhook-nonce": "x"}), [SECRET.encode()], came)


def test_two_webhooks_that_tell_the_same_are_one_event() -> None:
    assert event("wh0013").key == event("wh0014").key
    assert event("wh0015").key == event("wh0016").key
    assert event("wh0003").key == event("wh0004").key  # the same owner written again: updatedAt stayed
    assert len({event(name).key for name in ("wh0001", "wh0003", "wh0005", "wh0013")}) == 4


@pytest.mark.parametrize("topic", ["person.accountOwner", "company", "company.", "", "companies.accountOwner"])
def test_a_delivery_of_another_object_is_no_lead(topic: str) -> None:
    assert event("wh0001", topic).kind is EventKind.UNKNOWN


def test_a_record_without_the_relation_is_read() -> None:
    assert event("wh0001", "company.holder").lead is None  # nobody is guessed
    assert event("wh0001", "company.holder").ref == QUILL


def test_what_a_delivery_holds_is_what_a_reading_shows(client: Client, mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api18")
    assert CRM.fetch_leads(client, [QUILL]) == {QUILL: event("wh0001").lead}


# -- answers ---------------------------------------------------------------------------------------------------------

# What is not simply done, by the number of the capture; of REST by its status, of GraphQL by the code in a 200.
OUTCOMES = {
    **{f"api{n}": Outcome.REFUSED for n in (19, 20, 25, 26, 27, 31, 61, 62, 63)},
    "api24": Outcome.GONE,  # 400
    "api29": Outcome.REAUTHORISE,
    "api30": Outcome.REAUTHORISE,  # 403: no key at all
    "api66": Outcome.GONE,
    "api67": Outcome.GONE,
    "api99": Outcome.GONE,
    "api101": Outcome.GONE,
    "api121": Outcome.NOT_SENT,  # 500, after its Redis was lost
}


@pytest.mark.parametrize("name", ANSWERS)
def test_captured_answers_have_their_outcome(name: str, client: Client, mock: responses.RequestsMock) -> None:
    found = CAPTURED.answer(mock, name)
    outcome, asked = OUTCOMES.get(name.partition("_")[0]), found["request"]

    def call() -> Any:
        if urlsplit(asked["url"]).path != "/graphql":
            return CAPTURED.repeat(client, name)
        return twenty_api.graphql(client, asked["body"]["query"], asked["body"]["variables"], write=True)

    if outcome is None:
        answer = call()
        assert (answer.status, answer.data) == (found["status"], exact(found["response"]))
        return
    with pytest.raises(CrmError) as caught:
        call()
    assert (caught.value.outcome, caught.value.status) == (outcome, found["status"])


@pytest.mark.parametrize(
    ("error", "write", "read"),
    [
        ({"extensions": {"code": "INTERNAL_SERVER_ERROR"}}, Outcome.UNKNOWN, Outcome.NOT_SENT),
        ({"extensions": {"code": "SOMETHING_NEW"}}, Outcome.UNKNOWN, Outcome.NOT_SENT),
        ({}, Outcome.UNKNOWN, Outcome.NOT_SENT),
        ({"message": 'Cannot query field "x" on type "Y".'}, Outcome.REFUSED, Outcome.REFUSED),
        ({"message": 'Variable "$e" of type "UUID!" used in position ...', "extensions": {"code": "X"}},
         Outcome.REFUSED, Outcome.REFUSED),
        ({"extensions": {"code": "UNAUTHENTICATED"}}, Outcome.REAUTHORISE, Outcome.REAUTHORISE),
        ({"extensions": {"code": "FORBIDDEN"}}, Outcome.FORBIDDEN, Outcome.FORBIDDEN),
        ({"extensions": {"code": "BAD_USER_INPUT"}}, Outcome.REFUSED, Outcome.REFUSED),
        ({"message": "insert or update violates foreign key constraint", "extensions": {"code": "X"}},
         Outcome.REFUSED, Outcome.REFUSED),
    ],
)  # fmt: skip
def test_graphql_errors(
    error: Any, write: Outcome, read: Outcome, client: Client, mock: responses.RequestsMock
) -> None:
    mock.add("POST", f"{BASE}/graphql", json={"errors": [error], "data": None})
    for is_write, outcome in ((True, write), (False, read)):
        with pytest.raises(CrmError) as caught:
            twenty_api.graphql(client, "{x}", {}, write=is_write)
        assert caught.value.outcome is outcome


@pytest.mark.parametrize(
    ("status", "data"),
    [(400, None), (400, {"messages": ["Record not found", "x"]}), (404, {"error": "EntityNotFoundError"}),
     (403, {"messages": ["No"]}), (500, {"error": "X"}), (500, [])],
)  # fmt: skip
def test_only_its_own_words_change_what_a_status_means(status: int, data: Any) -> None:
    assert CRM.refine(status, data) is None


# -- leads and owners ------------------------------------------------------------------------------------------------


def test_fields_are_found_by_their_form(mock: responses.RequestsMock) -> None:
    prospect = {
        "id": "p1",
        "name": {"firstName": "Zoe", "lastName": "Quill"},
        "emails": {"primaryEmail": "Zoe@example.com", "additionalEmails": None},
        "phones": {"primaryPhoneNumber": "5550142", "primaryPhoneCallingCode": "+1", "additionalPhones": []},
        "home": {"addressStreet1": "7 Oak Lane", "addressCity": "Denver", "addressState": "CO",
                 "addressPostcode": "80202", "addressCountry": "US", "addressLat": None},
        "budget": {"amountMicros": "450000000000", "currencyCode": "USD"},
        "stage": "NEW",
        "type": "BUYER",
        "beds": 3,
        "areas": ["NORTH", "WEST"],
        "createdBy": {"source": "IMPORT", "name": "x"},
        "holderId": "m1",
        "createdAt": "2026-11-29T15:36:56.213Z",
        "updatedAt": "2026-11-29T15:36:56.213Z",
        "position": 3,
    }  # fmt: skip
    mock.add("GET", f"{BASE}/rest/prospects/p1", json={"data": {"prospect": prospect}})
    with CAPTURED.client(credentials(object="prospect", objects="prospects", owner="holder"), NOW) as client:
        lead = CRM.fetch_leads(client, ["p1"])["p1"]
    assert lead == Lead(
        ref="p1",
        owner_ref="m1",
        source="IMPORT",
        type="BUYER",
        stage="NEW",
        price=Decimal(450000),
        street="7 Oak Lane",
        city="Denver",
        state="CO",
        zip="80202",
        country="US",
        emails=("zoe@example.com",),
        phones=("+15550142",),
        custom={"beds": 3, "areas": ("NORTH", "WEST")},
        created_at=datetime(2026, 11, 29, 15, 36, 56, 213_000, tzinfo=UTC),
        updated_at=datetime(2026, 11, 29, 15, 36, 56, 213_000, tzinfo=UTC),
        name="Zoe Quill",
    )


def test_a_lead_that_is_gone_is_absent(client: Client, mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api101")
    assert CRM.fetch_leads(client, [MUNSTER]) == {}


@pytest.mark.parametrize(("name", "member", "conflict"), [("api98", ANA, False), ("api99", BEN, True)])
def test_a_conditional_write_is_the_one_that_was_captured(
    name: str, member: str, conflict: bool, client: Client, mock: responses.RequestsMock
) -> None:
    found = CAPTURED.answer(mock, name)
    written = CRM.set_owner(client, Lead(ref=CAS), member)
    assert sent(mock) == found["request"]["body"]
    assert (written.owner_ref, written.conflict) == (None, conflict)


def test_a_write_in_the_place_of_somebody_names_them(client: Client, mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api98")
    CRM.set_owner(client, Lead(ref=CAS, owner_ref=BEN), ANA)
    assert "filter:{id:{eq:$id},accountOwnerId:{eq:$e}}" in sent(mock)["query"]
    assert sent(mock)["variables"] == {"id": CAS, "o": ANA, "e": BEN}


UNKNOWN_FIELD = {"errors": [{"message": "Cannot query field", "extensions": {"code": "GRAPHQL_VALIDATION_FAILED"}}]}


@pytest.mark.parametrize(("owner", "status"), [(BEN, 200), (BEN, 400), (None, 200)])
def test_a_condition_that_is_not_understood_stops_no_change_of_owner(
    owner: str | None, status: int, client: Client, mock: responses.RequestsMock
) -> None:
    mock.add("POST", f"{BASE}/graphql", json=UNKNOWN_FIELD, status=status)
    if owner is None:  # that one was captured, so it is understood, and no reason to write without it
        with pytest.raises(CrmError) as caught:
            CRM.set_owner(client, Lead(ref=QUILL), ANA)
        assert caught.value.outcome is Outcome.REFUSED
        return
    found = CAPTURED.answer(mock, "api21")
    assert not CRM.set_owner(client, Lead(ref=QUILL, owner_ref=owner), ANA).conflict
    assert sent(mock, 1) == found["request"]["body"]


@pytest.mark.parametrize("name", ["objects", "object", "owner"])
def test_a_name_that_is_none_is_never_sent(name: str, mock: responses.RequestsMock) -> None:
    with CAPTURED.client(credentials(**{name: "a){x"}), NOW) as client:
        for call in (lambda: CRM.set_owner(client, Lead(ref=CAS), ANA), lambda: CRM.fetch_leads(client, [CAS])):
            with pytest.raises(CrmError) as caught:
                call()
            assert caught.value.outcome is Outcome.REFUSED
            assert "names of Twenty's API" in caught.value.text
    assert len(mock.calls) == 0


@pytest.mark.parametrize(("first", "relation"), [({"data": {}}, "companyId"), (UNKNOWN_FIELD, "targetCompanyId")])
def test_a_note_and_its_target_are_one_call_that_may_be_repeated(
    first: Any, relation: str, client: Client, mock: responses.RequestsMock
) -> None:
    mock.add("POST", f"{BASE}/graphql", json=first)  # what this version calls the record of a note's target
    mock.add("POST", f"{BASE}/graphql", json={"data": {"createNotes": [], "createNoteTargets": []}})
    for text in ("Ana [turnlock:9f]", "Ana [turnlock:9f]", "Ben [turnlock:77]"):
        CRM.add_note(client, QUILL, "Why", text)
    once, again, other = (sent(mock, n) for n in (1, 2, 3))
    (note,), (target,) = once["variables"]["n"], once["variables"]["t"]
    (second,), (its_target,) = other["variables"]["n"], other["variables"]["t"]
    assert once == again  # the same ids, and Twenty writes what is there already over itself
    assert once["query"].count("upsert:true") == 2
    assert (note["title"], note["bodyV2"]) == ("Why", {"markdown": "Ana [turnlock:9f]"})
    assert (target["noteId"], target[relation]) == (note["id"], QUILL)
    assert len({note["id"], target["id"], second["id"], its_target["id"]}) == 4


def test_a_note_that_somebody_edited_is_found(client: Client, mock: responses.RequestsMock) -> None:
    node = {"id": "t", "note": {"title": "Why", "bodyV2": {"markdown": "Ana \\[turnlock:9f\\]!"}}}
    page = {"pageInfo": {"hasNextPage": False}, "edges": [{"node": node}, {"node": {"id": "gone", "note": None}}]}
    for answer in ({}, {"noteTargets": page}):
        mock.add("POST", f"{BASE}/graphql", json={"data": answer})
    assert CRM.find_note(client, QUILL, "[turnlock:9f]")
    assert not CRM.find_note(client, QUILL, "[turnlock:77]")
    assert sent(mock, 1)["variables"] == {"id": QUILL}


def test_a_server_that_fails_is_not_taken_for_another_version(client: Client, mock: responses.RequestsMock) -> None:
    mock.add("POST", f"{BASE}/graphql", json={"errors": [{"extensions": {"code": "INTERNAL_SERVER_ERROR"}}]})
    with pytest.raises(CrmError) as caught:
        CRM.add_note(client, QUILL, "Why", "Ana")
    assert caught.value.outcome is Outcome.NOT_SENT
    assert client.learnt == {}


# -- lists -----------------------------------------------------------------------------------------------------------


def test_agents_are_members_and_not_users(client: Client, mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api11")
    found = list(CRM.list_agents(client))
    assert found[0] == AgentSeen(ref=ANA, name="Ana Adams", email="ana@agents.example", active=True, zone=None)
    assert len(found) == 3
    assert CRM.get_agent(client, BEN) == found[1]
    assert CRM.get_agent(client, "20202020-9e3b-46d4-a556-88b9ddc2b034") is None  # her id as a user
    assert dict(parse_qsl(urlsplit(str(mock.calls[0].request.url)).query)) == {"limit": "60"}


def test_the_sweep_goes_by_ids_to_its_end(client: Client, mock: responses.RequestsMock) -> None:
    pages = [CAPTURED.load(f"api{n}")["response"] for n in (89, 90, 91, 92)]
    for page in pages:
        for edge in page["data"]["companies"]["edges"]:
            edge["node"] |= {"accountOwnerId": None}
        mock.add("POST", f"{BASE}/graphql", json=page)
    since = datetime(2026, 11, 29, 15, 37, tzinfo=UTC)  # the demo's own companies are older
    found = [ref for page in CRM.unassigned_since(client, since, UnassignedDefinition()) for ref in page]
    assert len(found) == 2
    cursors = [sent(mock, n)["variables"].get("c") for n in range(4)]
    assert cursors == [None, *(page["data"]["companies"]["pageInfo"]["endCursor"] for page in pages[:3])]
    captured = CAPTURED.load("api89")["request"]["body"]["query"].replace("first:4", "first:60")
    asked = sent(mock)["query"].replace(',createdAt:{gte:"2026-11-29T15:37:00Z"}', "")
    for part in ("orderBy:[{id:AscNullsLast}],first:60,after:$c", "accountOwnerId:{is:NULL}", "query($c:String)"):
        assert part in captured
        assert part in asked


def test_changes_are_swept_by_the_time_of_the_update(client: Client, mock: responses.RequestsMock) -> None:
    page = CAPTURED.load("api64")["response"]
    page["data"]["companies"]["pageInfo"]["hasNextPage"] = False
    first, second = (edge["node"] for edge in page["data"]["companies"]["edges"])
    first |= {"createdAt": "2025-01-01T00:00:00.000Z", "updatedAt": "2026-11-29T15:37:00.000Z"}
    second |= {"updatedAt": "2026-11-29T15:36:59.999Z"}
    mock.add("POST", f"{BASE}/graphql", json=page)
    since = datetime(2026, 11, 29, 15, 37, tzinfo=UTC)
    assert list(CRM.changed_since(client, since, UnassignedDefinition())) == [[first["id"]]]
    assert '{accountOwnerId:{is:NULL},updatedAt:{gte:"2026-11-29T15:37:00Z"}}' in sent(mock)["query"]


def test_a_time_that_cannot_be_compared_stops_no_sweep(client: Client, mock: responses.RequestsMock) -> None:
    page = CAPTURED.load("api64")["response"]
    page["data"]["companies"]["pageInfo"]["hasNextPage"] = False
    first, second = (edge["node"] for edge in page["data"]["companies"]["edges"])
    first |= {"updatedAt": "2026-11-29T15:37:00.000Z"}
    second |= {"updatedAt": "2026-11-29T15:36:59.999Z"}
    for answer in (UNKNOWN_FIELD, page):
        mock.add("POST", f"{BASE}/graphql", json=answer)
    since = datetime(2026, 11, 29, 15, 37, tzinfo=UTC)
    assert list(CRM.changed_since(client, since, UnassignedDefinition())) == [[first["id"]]]
    assert "gte" not in sent(mock, 1)["query"]


def test_a_test_lead_of_a_company_has_its_mark_in_the_name(client: Client, mock: responses.RequestsMock) -> None:
    made = CAPTURED.answer(mock, "api16")["response"]["data"]["createCompany"]
    assert CRM.add_test_lead(client, "Turnlock Test", "tl1@example.com", UnassignedDefinition()) == made["id"]
    assert sent(mock) == {"name": "Turnlock Test tl1@example.com"}
    mock.add("DELETE", f"{BASE}/rest/companies/{made['id']}", json=CAPTURED.load("api35")["response"])
    CRM.remove_test_lead(client, made["id"])


def test_a_cursor_that_does_not_move_ends_the_sweep(client: Client, mock: responses.RequestsMock) -> None:
    for n in (84, 85):  # by createdAt the same page came eight times, each with hasNextPage
        page = CAPTURED.load(f"api{n}")["response"]
        for edge in page["data"]["companies"]["edges"]:
            edge["node"] |= {"accountOwnerId": None}
        mock.add("POST", f"{BASE}/graphql", json=page)
    since = datetime(2026, 11, 29, 15, 0, tzinfo=UTC)
    with pytest.raises(CrmError) as caught:
        list(CRM.unassigned_since(client, since, UnassignedDefinition()))
    assert caught.value.outcome is Outcome.ANSWER_UNREADABLE
    assert len(mock.calls) == 2


# -- set-up ----------------------------------------------------------------------------------------------------------


def webhooks(**more: Any) -> list[dict[str, Any]]:
    """The captured webhooks as ours."""
    rows = CAPTURED.load("api15")["response"]["data"]["webhooks"]
    wanted = ("created", "updated", "destroyed")
    return [
        row | {"operations": [f"company.{t}"], "targetUrl": f"{HOOK}/{TOPIC}"} | more
        for row, t in zip(rows, wanted, strict=True)
    ]


def test_webhooks_are_made_as_they_were_captured(client: Client, mock: responses.RequestsMock) -> None:
    mock.add("GET", f"{BASE}/rest/webhooks", json={"data": {"webhooks": []}})
    CAPTURED.answer(mock, "api12")
    left = CRM.subscribe(client, HOOK)
    assert left.secret == SECRET
    assert left.secret not in repr(left)
    assert [h.topic for h in left.hooks] == list(CRM.topics)
    captured = CAPTURED.load("api12")["request"]["body"]
    for n, topic in enumerate(CRM.topics, 1):
        assert sent(mock, n) == captured | {
            "targetUrl": f"{HOOK}/{TOPIC}",
            "operations": [f"company.{topic}"],
            "description": "Turnlock",
        }


@pytest.mark.parametrize(
    ("more", "stays"),
    [
        ({}, True),
        ({"secret": "another"}, False),
        ({"operations": ["company.*"]}, False),
        ({"operations": ["company.created", "company.updated"]}, False),
        ({"deletedAt": "2026-11-29T15:00:00.000Z"}, False),
    ],
)
def test_webhooks_that_stand_are_kept_or_replaced(
    more: dict[str, Any], stays: bool, client: Client, mock: responses.RequestsMock
) -> None:
    rows = webhooks(**more)
    mock.add("GET", f"{BASE}/rest/webhooks", json={"data": {"webhooks": rows}})
    if not stays:
        for row in rows:
            mock.add("DELETE", f"{BASE}/rest/webhooks/{row['id']}", json={"data": {}})
        CAPTURED.answer(mock, "api12")
    CRM.subscribe(client, HOOK)
    made = [call.request.method for call in mock.calls]
    assert made == ["GET"] if stays else ["GET", *["DELETE"] * 3, *["POST"] * 3]


def test_a_secret_is_made_up_where_there_is_none(mock: responses.RequestsMock) -> None:
    mock.add("GET", f"{BASE}/rest/webhooks", json={"data": {"webhooks": []}})
    CAPTURED.answer(mock, "api12")
    with CAPTURED.client(Credentials(secrets={"api_key": "k"}), NOW) as client:
        left = CRM.subscribe(client, HOOK)
    assert left.secret is not None
    assert len(left.secret) == 64
    assert sent(mock, 1)["secret"] == left.secret


@pytest.mark.parametrize("status", [200, 400])
def test_a_check_names_an_object_that_is_not_there(status: int, mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api11")
    mock.add("POST", f"{BASE}/graphql", json=UNKNOWN_FIELD, status=status)
    mock.add("GET", f"{BASE}/rest/webhooks", json={"data": {"webhooks": []}})
    with CAPTURED.client(credentials(object="prospect", objects="prospects", owner="holder"), NOW) as client:
        (found,) = (f for f in CRM.check(client, None) if f.where == "leads")
    assert not found.ok
    assert found.what == "no prospects with the relation holder"
    assert "Data model" in found.fix


def test_without_a_key_nothing_is_sent_as_one() -> None:
    assert CRM.headers(Credentials()) == {}
