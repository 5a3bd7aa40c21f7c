"""Pipedrive beyond the conformance suite: events, nobody, deals and persons, limits, hooks, consent."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qsl

import pytest
import responses
from requests.structures import CaseInsensitiveDict

from adapters import oauth
from adapters.base import Credentials, EventKind, Hook, Unreadable, WebhookRequest
from adapters.budget import Left
from adapters.client import Client
from adapters.oauth import App, DeadGrant
from adapters.outcome import CrmError, Outcome
from adapters.pipedrive import Pipedrive
from routing.model import Lead, UnassignedDefinition
from tests.adapters.kit import NOW, plain

CRM = Pipedrive()
BASE = "https://acme.pipedrive.com"
URL = "https://hooks.example.com/hooks/token"
ME, ANN, BOB = 20580200, 20580210, 20580211
LEAD = "8ba414d0-8ad8-11ef-9e9e-07879dd74146"
HOT = "f08b42a0-4e75-11ea-9643-03698ef1cfd6"
WEB, PLACE = "d1e2f3a4b5c6d7e8f9a0b1c2d3e4f5a6b7c8d9e0", "a1b2c3d4e5f6a7b8c9d0e1f2a3b4c5d6e7f8a9b0"
SINCE = datetime(2026, 4, 6, 8, tzinfo=UTC)


@pytest.fixture
def mock() -> Iterator[responses.RequestsMock]:
    with responses.RequestsMock() as made:
        yield made


def client(**parameters: str) -> Client:
    credentials = Credentials(parameters, {"api_token": "t" * 40, "hook_password": "pw"})
    return Client(
        BASE, CRM.headers(credentials), credentials, now=lambda: NOW,
        refine=CRM.refine, asks_to_wait=CRM.asks_to_wait, words=CRM.words,
    )  # fmt: skip


def serve(mock: responses.RequestsMock, path: str, data: Any, method: str = "GET", **more: Any) -> None:
    status = more.pop("status", 200)
    mock.add(method, BASE + path, json={"success": True, "data": data, **more}, status=status)


def sent(mock: responses.RequestsMock, method: str) -> list[tuple[str, Any]]:
    """Path and body of the calls of this method."""
    made = [call.request for call in mock.calls if call.request.method == method]
    return [(str(r.path_url), json.loads(r.body) if r.body else None) for r in made]


def failing(call: Callable[[], Any]) -> CrmError:
    with pytest.raises(CrmError) as caught:
        call()
    return caught.value


LEAD_ROW: dict[str, Any] = {
    "id": LEAD, "title": "Lena Leadman lead", "owner_id": ME, "creator_id": ME, "label_ids": [HOT], "person_id": 1092,
    "organization_id": None, "source_name": "Web forms", "origin": "API", "origin_id": "12", "channel": 52,
    "channel_id": "June billboards", "is_archived": False, "was_seen": False,
    "value": {"amount": 450000, "currency": "USD"}, "add_time": "2026-03-02T17:22:16.600Z",
    "update_time": "2026-03-02T17:22:16.600Z", "visible_to": "3", WEB: "https://www.example.com/austin",
}  # fmt: skip
WHO: dict[str, Any] = {
    "id": 1092, "name": "Lena Leadman", "owner_id": ME, "org_id": None, "is_deleted": False, "label_ids": [1],
    "emails": [{"value": "old@example.com", "primary": False}, {"value": "Lena@Example.com", "primary": True}],
    "phones": [{"value": "+1 (555) 0101-234", "primary": True, "label": "mobile"}],
    "custom_fields": {
        PLACE: {"value": "12 Elm St, Austin, TX 78701", "locality": "Austin", "admin_area_level_1": "TX",
                "admin_area_level_2": "Travis", "postal_code": "78701", "country": "US",
                "route": "Elm St", "street_number": "12"},
    },
    "postal_address": {"value": "9 Oak Ave", "locality": "Waco"},
}  # fmt: skip


# -- deliveries --------------------------------------------------------------------------------------------------------


def told(meta: Mapping[str, Any], **body: Any) -> list[Any]:
    full = {
        "version": "2.0", "action": "change", "entity": "lead", "entity_id": LEAD, "id": "e1", "company_id": "1",
        "user_id": "7", "webhook_owner_id": str(ME), "change_source": "app", "timestamp": "2026-03-02T17:22:16.625Z",
    } | dict(meta)  # fmt: skip
    sent = {"meta": full, "data": {"id": LEAD, "owner_id": ANN}, "previous": {"owner_id": BOB}} | body
    return CRM.parse(WebhookRequest("POST", URL, {}, json.dumps(sent).encode()))


OURS = {"change_source": "api", "user_id": str(ME)}


@pytest.mark.parametrize(
    ("meta", "body", "kind"),
    [
        ({}, {}, EventKind.LEAD_CHANGED),
        (OURS, {}, EventKind.UNKNOWN),  # our own write
        ({**OURS, "user_id": ME, "webhook_owner_id": ME}, {}, EventKind.UNKNOWN),  # ids as numbers
        ({**OURS, "user_id": "7"}, {}, EventKind.LEAD_CHANGED),  # somebody else's program
        ({**OURS, "change_source": "app"}, {}, EventKind.LEAD_CHANGED),  # the same user by hand
        (OURS, {"data": {"id": LEAD, "owner_id": ME}}, EventKind.LEAD_CHANGED),  # given back to nobody: never by us
        ({**OURS, "action": "create"}, {"previous": None}, EventKind.LEAD_CREATED),  # leads of the API are news
        ({**OURS, "webhook_owner_id": None, "user_id": None}, {}, EventKind.LEAD_CHANGED),
        ({}, {"previous": {"next_activity_id": 1, "update_time": "x"}}, EventKind.UNKNOWN),
        ({}, {"previous": {"next_activity_id": 1, "label_ids": []}}, EventKind.LEAD_CHANGED),
        ({}, {"previous": {"custom_fields": {WEB: None}}}, EventKind.LEAD_CHANGED),
        ({}, {"previous": {}}, EventKind.LEAD_CHANGED),
        ({"action": "delete"}, {"data": None}, EventKind.LEAD_DELETED),
        ({"entity": "organization", "entity_id": "9"}, {}, EventKind.UNKNOWN),
        ({"action": "merged"}, {}, EventKind.UNKNOWN),
        ({"merged_from_id": LEAD}, {"previous": {"update_time": "x"}}, EventKind.LEAD_CHANGED),
        ({"entity": "deal", "entity_id": 31}, {}, EventKind.LEAD_CHANGED),
    ],
)
def test_kinds(meta: dict[str, Any], body: dict[str, Any], kind: EventKind) -> None:
    (event,) = told(meta, **body)
    assert event.kind is kind
    assert event.ref in ((None,) if kind is EventKind.UNKNOWN else (LEAD, "31"))
    assert event.account == "1"


def test_one_id_for_two_events_loses_neither() -> None:
    keys = [
        told(meta)[0].key
        for meta in ({}, {"action": "create"}, {"entity_id": "x"}, {"timestamp": "2026-03-02T17:22:17Z"})
    ]
    assert len(set(keys)) == 4
    assert told({"attempt": 3})[0].key == keys[0]


def test_a_hook_of_version_1_is_told_apart() -> None:
    old = {"v": 1, "action": "added", "object": "deal", "id": 31, "company_id": 1}
    with pytest.raises(Unreadable, match="not_version_2"):
        CRM.parse(WebhookRequest("POST", URL, {}, json.dumps({"meta": old, "current": {"id": 31}}).encode()))
    for version in ("1.0", 1, None):
        with pytest.raises(Unreadable, match="not_version_2"):
            told({"version": version})
    assert told({"version": 2.0})[0].kind is EventKind.LEAD_CHANGED


# -- leads -------------------------------------------------------------------------------------------------------------


def test_a_lead_is_read_with_the_person_behind_it(mock: responses.RequestsMock) -> None:
    serve(mock, "/api/v1/users/me", {"id": ME})
    serve(mock, f"/api/v1/leads/{LEAD}", LEAD_ROW)
    serve(mock, "/api/v2/persons/1092", WHO)
    serve(mock, "/api/v1/leadLabels", [{"id": HOT, "name": "Hot"}])
    with client(address_field=PLACE, type_field=WEB) as made:
        found = CRM.fetch_leads(made, [LEAD, LEAD])
        assert plain(found[LEAD]) == {
            "ref": LEAD, "source": "Web forms", "type": "https://www.example.com/austin", "price": "450000",
            "street": "12 Elm St", "city": "Austin", "county": "Travis", "state": "TX", "zip": "78701", "country": "US",
            "form": "12", "campaign": "June billboards", "tags": ["Hot"],
            "emails": ["lena@example.com", "old@example.com"], "phones": ["+15550101234"],
            "custom": {
                "title": "Lena Leadman lead", "origin": "API", "channel": "52", WEB: "https://www.example.com/austin",
                PLACE: "12 Elm St, Austin, TX 78701",
            },
            "created_at": "2026-03-02T17:22:16.600000+00:00", "updated_at": "2026-03-02T17:22:16.600000+00:00",
            "name": "Lena Leadman",
        }  # fmt: skip
        assert CRM.fetch_leads(made, [LEAD])[LEAD] == found[LEAD]
    asked = [str(call.request.path_url) for call in mock.calls]
    assert asked.count("/api/v1/users/me") == asked.count("/api/v1/leadLabels") == 1  # they cost 2 and 10 API tokens
    assert asked.count(f"/api/v1/leads/{LEAD}") == asked.count("/api/v2/persons/1092") == 2
    assert {call.request.headers["x-api-token"] for call in mock.calls} == {"t" * 40}


def test_the_place_is_the_named_field_in_any_form_else_the_postal_address(mock: responses.RequestsMock) -> None:
    flat = {PLACE: "7 Pine Rd, Boise", f"{PLACE}_locality": "Boise", f"{PLACE}_admin_area_level_1": "ID"}
    rows = iter([LEAD_ROW | {"label_ids": []} | flat, LEAD_ROW | {"label_ids": []}])
    path = f"{BASE}/api/v1/leads/{LEAD}"
    mock.add_callback("GET", path, lambda _: (200, {}, json.dumps({"success": True, "data": next(rows)})))
    serve(mock, "/api/v2/persons/1092", WHO | {"custom_fields": {}})
    with client(address_field=PLACE, nobody=str(ME)) as made:
        read = [CRM.fetch_leads(made, [LEAD])[LEAD] for _ in range(2)]
    assert [(x.street, x.city, x.state) for x in read] == [
        ("7 Pine Rd, Boise", "Boise", "ID"),
        ("9 Oak Ave", "Waco", None),
    ]


def test_a_label_that_is_gone_keeps_its_id_and_is_asked_for_once(mock: responses.RequestsMock) -> None:
    serve(mock, f"/api/v1/leads/{LEAD}", LEAD_ROW | {"person_id": None})
    serve(mock, "/api/v1/leadLabels", [])
    with client(nobody=str(ME)) as made:
        for _ in range(3):
            assert CRM.fetch_leads(made, [LEAD])[LEAD].tags == (HOT,)
    assert len([c for c in mock.calls if str(c.request.path_url) == "/api/v1/leadLabels"]) == 1


@pytest.mark.parametrize(
    ("parameters", "owner", "shown"),
    [
        ({}, ME, None),
        ({}, ANN, str(ANN)),
        ({"nobody": f"{BOB}, {ANN}"}, ANN, None),
        ({"nobody": f"{BOB}, {ANN}"}, ME, str(ME)),
        ({}, None, None),
    ],
)
def test_somebody_stands_for_nobody(
    mock: responses.RequestsMock, parameters: dict[str, str], owner: int | None, shown: str | None
) -> None:
    if not parameters:
        serve(mock, "/api/v1/users/me", {"id": ME})
    serve(mock, f"/api/v1/leads/{LEAD}", LEAD_ROW | {"owner_id": owner, "label_ids": [], "person_id": None})
    with client(**parameters) as made:
        assert CRM.fetch_leads(made, [LEAD])[LEAD].owner_ref == shown


def test_what_nobody_may_receive_is_left_out_and_an_owner_is_never_guessed(mock: responses.RequestsMock) -> None:
    bare = {"label_ids": [], "person_id": 5}
    for ref, more in {"a": {"is_archived": True}, "b": {"id": "other"}, "c": {}}.items():
        serve(mock, f"/api/v1/leads/{ref}", LEAD_ROW | bare | {"id": ref} | more)
    mock.add("GET", f"{BASE}/api/v1/leads/d", json={"success": False, "error": "requested lead not found"}, status=404)
    mock.add("GET", f"{BASE}/api/v1/leads/1092", json={"success": False, "error": "id: not a uuid"}, status=400)
    mock.add("GET", f"{BASE}/api/v2/persons/5", json={"success": False, "error": "Person not found"}, status=404)
    serve(mock, "/api/v1/leads/e", {k: v for k, v in LEAD_ROW.items() if k != "owner_id"} | bare | {"id": "e"})
    with client(nobody=str(ME)) as made:
        found = CRM.fetch_leads(made, ["a", "b", "c", "d", "1092"])
        assert {ref: (x.name, x.emails) for ref, x in found.items()} == {"c": ("Lena Leadman lead", ())}
        assert failing(lambda: CRM.fetch_leads(made, ["e"])).outcome is Outcome.ANSWER_UNREADABLE


def test_deals_and_persons_may_be_the_leads(mock: responses.RequestsMock) -> None:
    deal = {
        "id": 31, "title": "12 Elm St", "owner_id": ANN, "value": 200.5, "currency": "USD", "person_id": 1092,
        "stage_id": 4, "pipeline_id": 1, "status": "open", "is_archived": False, "is_deleted": False,
        "label_ids": [3], "origin": "ManuallyCreated", "origin_id": None, "channel": None, "channel_id": None,
        "add_time": "2026-03-02T17:22:15Z", "update_time": "2026-03-02T17:22:15Z",
        "custom_fields": {WEB: {"value": 900, "currency": "USD"}},
    }  # fmt: skip
    serve(mock, "/api/v2/deals/31", deal)
    serve(mock, "/api/v2/persons/1092", WHO)
    serve(mock, "/api/v2/deals/31", {"id": 31, "owner_id": BOB}, "PATCH")
    serve(mock, "/api/v2/persons/1092", {"id": 1092, "owner_id": BOB}, "PATCH")
    serve(mock, "/api/v1/notes", {"id": 1}, "POST", status=201)
    with client(object="deal", nobody=str(ME)) as made:
        read = CRM.fetch_leads(made, ["31"])["31"]
        assert (read.owner_ref, read.stage, read.price, read.source) == (
            str(ANN),
            "4",
            Decimal("200.5"),
            "ManuallyCreated",
        )
        assert (read.custom["status"], read.custom[WEB], read.tags, read.emails[0]) == (
            "open",
            900,
            ("3",),
            "lena@example.com",
        )
        CRM.set_owner(made, read, str(BOB))
        CRM.add_note(made, "31", "A <b>", "1\n2")
    with client(object="person", nobody=str(ME)) as made:
        read = CRM.fetch_leads(made, ["1092"])["1092"]
        assert (read.name, read.owner_ref, read.city, read.tags) == ("Lena Leadman", None, "Waco", ("1",))
        CRM.set_owner(made, read, str(BOB))
        CRM.add_note(made, "1092", "s", "b")
    assert sent(mock, "PATCH") == [
        ("/api/v2/deals/31", {"owner_id": BOB}),
        ("/api/v2/persons/1092", {"owner_id": BOB}),
    ]
    assert [body for _, body in sent(mock, "POST")] == [
        {"content": "<b>A &lt;b&gt;</b><br>1<br>2", "deal_id": 31},
        {"content": "<b>s</b><br>b", "person_id": 1092},
    ]
    with client(object="company") as made:
        assert "lead, deal, person" in failing(lambda: CRM.fetch_leads(made, ["1"])).text


def test_a_task_is_a_call_with_the_person_due_in_utc(mock: responses.RequestsMock) -> None:
    serve(mock, "/api/v2/activities", {"id": 5}, "POST")
    serve(mock, "/api/v2/deals/31", {"id": 31, "owner_id": ANN, "person_id": 77})
    serve(mock, f"/api/v1/leads/{LEAD}", LEAD_ROW | {"person_id": None, "organization_id": 9})
    due = datetime(2026, 3, 2, 23, 55, tzinfo=timezone(timedelta(hours=-6)))
    for entity, ref in (("deal", "31"), ("person", "1092"), ("lead", LEAD)):
        with client(object=entity, nobody=str(ME)) as made:
            CRM.add_task(made, ref, str(ANN), "Call within 5 minutes", "[m]", due)
    call = {
        "subject": "Call within 5 minutes", "type": "call", "owner_id": ANN, "note": "[m]", "done": False,
        "due_date": "2026-03-03", "due_time": "05:55",
    }  # fmt: skip
    assert [body for _, body in sent(mock, "POST")] == [
        call | {"deal_id": 31, "participants": [{"person_id": 77, "primary": True}]},
        call | {"participants": [{"person_id": 1092, "primary": True}]},
        call | {"lead_id": LEAD},
    ]


def test_a_test_lead_is_nobodys_and_leaves_no_person_behind(mock: responses.RequestsMock) -> None:
    serve(mock, "/api/v2/persons", {"id": 77}, "POST")
    serve(mock, "/api/v2/deals", {"id": 31}, "POST")
    mock.add("POST", f"{BASE}/api/v1/leads", json={"success": False, "error": "Scope and URL mismatch"}, status=403)
    serve(mock, "/api/v2/deals/31", {"id": 31, "person_id": 77})
    serve(mock, "/api/v2/deals/31", {"id": 31}, "DELETE")
    serve(mock, "/api/v2/persons/77", {"id": 77}, "DELETE")
    with client(object="deal", nobody=f"{ANN}, {ME}") as made:
        assert CRM.add_test_lead(made, "Turnlock Test", "tl1@example.com", UnassignedDefinition()) == "31"
        CRM.remove_test_lead(made, "31")
    with client(object="person", nobody=str(ME)) as made:
        assert CRM.add_test_lead(made, "Turnlock Test", "tl1@example.com", UnassignedDefinition()) == "77"
    person = {"name": "Turnlock Test", "emails": [{"value": "tl1@example.com", "primary": True, "label": "work"}]}
    assert sent(mock, "POST") == [
        ("/api/v2/persons", person | {"owner_id": ME}),
        ("/api/v2/deals", {"title": "Turnlock Test", "person_id": 77, "owner_id": ME}),
        ("/api/v2/persons", person | {"owner_id": ME}),
    ]
    gone = ["/api/v2/deals/31", "/api/v2/persons/77"]
    assert [path for path, _ in sent(mock, "DELETE")] == gone
    with client(nobody=str(ME)) as made:
        assert (
            "lacks a scope"
            in failing(lambda: CRM.add_test_lead(made, "Turnlock Test", "tl1@example.com", UnassignedDefinition())).text
        )
    assert [path for path, _ in sent(mock, "DELETE")] == [*gone, "/api/v2/persons/77"]


# -- agents ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "active"),
    [
        ({}, True),
        ({"active_flag": False}, False),
        ({"is_deleted": True}, False),
        ({"activated": False}, False),  # invited, and never came
        ({"access": [{"app": "projects"}]}, False),
        ({"access": []}, False),
        ({"id": ME}, False),  # stands for nobody
    ],
)
def test_who_may_receive_leads(mock: responses.RequestsMock, more: dict[str, Any], active: bool) -> None:
    row = {
        "id": ANN, "name": "Ann Agent", "email": "ann@example.com", "activated": True, "active_flag": True,
        "is_deleted": False, "timezone_name": "America/Chicago", "access": [{"app": "sales", "admin": False}],
    } | more  # fmt: skip
    serve(mock, "/api/v1/users", [row])
    with client(nobody=str(ME)) as made:
        (agent,) = CRM.list_agents(made)
    assert (agent.active, agent.name, agent.zone) == (active, "Ann Agent", "America/Chicago")


# -- errors and limits -------------------------------------------------------------------------------------------------

HTML = b"<html>error code: 1015</html>"
SPENT = {"x-daily-ratelimit-token-remaining": "0", "Retry-After": "2"}
LEFT = {"x-daily-ratelimit-token-remaining": "812"}


@pytest.mark.parametrize(
    ("status", "body", "headers", "outcome", "wait", "words"),
    [
        (400, {"success": False, "error": "owner_id is invalid"}, {}, Outcome.REFUSED, None, "parked"),
        (401, {"success": False, "error": "unauthorized access"}, {}, Outcome.REAUTHORISE, None, "again"),
        (402, {"success": False}, {}, Outcome.FORBIDDEN, None, "subscription"),
        (403, {"success": False, "error": "Scope and URL mismatch"}, {}, Outcome.FORBIDDEN, None, "lacks a scope"),
        (403, {"success": False, "message": "Forbidden"}, {}, Outcome.FORBIDDEN, None, "the right"),
        (403, HTML, {}, Outcome.WAIT, 1800.0, "blocks all calls"),
        (404, {"success": False, "error": "requested lead not found"}, {}, Outcome.GONE, None, "no longer"),
        (404, {"status": "error", "errors": {"id": ["not found"]}}, {}, Outcome.GONE, None, "no longer"),
        (410, {"success": False}, {}, Outcome.REFUSED, None, "parked"),  # an endpoint that was ended
        (405, {}, {}, Outcome.REFUSED, None, "parked"),
        (415, {}, {}, Outcome.REFUSED, None, "parked"),
        (422, {"success": False, "error": ["x"]}, {}, Outcome.REFUSED, None, "parked"),
        (429, {"success": False}, {}, Outcome.WAIT, 2.0, "slow down"),
        (429, {}, LEFT | {"Retry-After": "7"}, Outcome.WAIT, 7.0, "slow down"),
        (429, {}, SPENT, Outcome.WAIT, 3600.0, "used up"),  # until midnight, whatever it says
        (500, {}, {}, Outcome.UNKNOWN, None, "did not confirm"),
        (501, {}, {}, Outcome.UNKNOWN, None, "did not confirm"),
        (503, {}, {}, Outcome.WAIT, None, "slow down"),
        (200, {"success": False, "data": None}, {}, Outcome.UNKNOWN, None, "did not confirm"),
        (200, HTML, {}, Outcome.UNKNOWN, None, "did not confirm"),
    ],
)  # fmt: skip
def test_each_error_of_an_owner_write(
    mock: responses.RequestsMock,
    status: int,
    body: Any,
    headers: dict[str, str],
    outcome: Outcome,
    wait: float | None,
    words: str,
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    mock.add("PATCH", f"{BASE}/api/v1/leads/{LEAD}", raw, status=status, headers=headers)
    with client() as made:
        error = failing(lambda: CRM.set_owner(made, Lead(ref=LEAD), str(ANN)))
    assert (error.outcome, error.retry_after) == (outcome, wait)
    assert words in error.text
    assert sent(mock, "PATCH") == [(f"/api/v1/leads/{LEAD}", {"owner_id": ANN})]


def test_an_owner_that_is_no_number_is_never_sent(mock: responses.RequestsMock) -> None:
    with client() as made:
        assert failing(lambda: CRM.set_owner(made, Lead(ref=LEAD), "ann")).outcome is Outcome.REFUSED
    assert len(mock.calls) == 0


# -- sweep -------------------------------------------------------------------------------------------------------------


def sweep(made: Client, *users: str) -> list[str]:
    pages = CRM.unassigned_since(made, SINCE, UnassignedDefinition(frozenset(users)))
    return [ref for page in pages for ref in page]


@pytest.mark.parametrize("place", ["pagination", "bare", "without next_start"])
def test_the_sweep_walks_all_pages_for_each_who_stands_for_nobody(mock: responses.RequestsMock, place: str) -> None:
    def row(ref: str, owner: str, minutes: float, **more: Any) -> dict[str, Any]:
        created = (NOW - timedelta(minutes=minutes)).isoformat().replace("+00:00", "Z")
        return {"id": ref, "owner_id": int(owner), "add_time": created, "is_archived": False, **more}

    table = {
        str(ME): [[row("a", str(ME), 9), row("old", str(ME), 900)], [row("b", str(ME), 8), row("a", str(ME), 9)]],
        str(BOB): [[row("c", str(BOB), 7), row("young", str(BOB), 1), row("gone", str(BOB), 7, is_archived=True)]],
        str(ANN): [[row("d", str(ANN), 7)]],
    }

    def answer(request: Any) -> tuple[int, dict[str, str], str]:
        asked = dict(parse_qsl(request.path_url.partition("?")[2]))
        assert asked["updated_since"] == "2026-04-06T08:00:00Z"
        assert int(asked["limit"]) <= 500
        pages = table[asked["owner_id"]]
        number = int(asked.get("start", "0")) // 100
        more = number + 1 < len(pages)
        told = {"more_items_in_collection": more, "start": number * 100, "limit": 100}
        told |= {"next_start": (number + 1) * 100} if more and place != "without next_start" else {}
        data = {"pagination": told} if place == "pagination" else told
        return 200, {}, json.dumps({"success": True, "data": pages[number], "additional_data": data})

    mock.add_callback("GET", f"{BASE}/api/v1/leads", answer)
    with client(nobody=f"{ME},{BOB}") as made:
        assert sweep(made) == ["a", "b", "c"]
        assert sorted(sweep(made, str(ANN))) == ["a", "b", "c", "d"]


def test_deals_are_swept_by_cursor_and_only_open_ones(mock: responses.RequestsMock) -> None:
    created = (NOW - timedelta(minutes=9)).isoformat()

    def answer(request: Any) -> tuple[int, dict[str, str], str]:
        asked = dict(parse_qsl(request.path_url.partition("?")[2]))
        assert (asked["status"], asked["owner_id"]) == ("open", str(ME))
        ref, cursor = (1, "abc=") if "cursor" not in asked else (2, None)
        assert asked.get("cursor") in (None, "abc=")
        row = {"id": ref, "owner_id": ME, "add_time": created}
        return 200, {}, json.dumps({"success": True, "data": [row], "additional_data": {"next_cursor": cursor}})

    mock.add_callback("GET", f"{BASE}/api/v2/deals", answer)
    with client(object="deal", nobody=str(ME)) as made:
        assert sweep(made) == ["1", "2"]


# -- hooks -------------------------------------------------------------------------------------------------------------


def hook_row(number: int, action: str, **more: Any) -> dict[str, Any]:
    return {
        "id": number, "event_action": action, "event_object": "lead", "subscription_url": URL, "version": "2.0",
        "is_active": 1, "http_auth_user": "turnlock", "http_auth_password": "pw", "last_http_status": 200, **more,
    }  # fmt: skip


WHOLE = [hook_row(n, action) for n, action in enumerate(("create", "change", "delete"), 1)]


@pytest.mark.parametrize(
    "spoilt",
    [
        {"is_active": 0},
        {"version": "1.0"},
        {"http_auth_password": "another"},
        {"http_auth_password": None},
        {"http_auth_user": "somebody"},
        {"event_object": "person"},
    ],
)
def test_a_hook_that_is_not_as_it_should_be_is_lost_and_made_anew(
    mock: responses.RequestsMock, spoilt: dict[str, Any]
) -> None:
    serve(mock, "/api/v1/webhooks", [WHOLE[0] | spoilt, *WHOLE[1:]], status=200)
    mock.add("DELETE", f"{BASE}/api/v1/webhooks/1", json={"status": "ok", "success": True})
    serve(mock, "/api/v1/webhooks", hook_row(9, "create"), "POST", status=201)
    with client() as made:
        assert CRM.lost_hooks(made, URL) == ("create",)
        left = CRM.subscribe(made, URL)
        assert (left.by_hand, left.secret) == ((), "pw")
        assert Hook("9", "create", URL, True) in left.hooks
    (posted,) = [body for _, body in sent(mock, "POST")]
    assert posted == {
        "subscription_url": URL, "event_action": "create", "event_object": "lead", "version": "2.0",
        "name": "Turnlock create.lead", "http_auth_user": "turnlock", "http_auth_password": "pw",
    }  # fmt: skip


def test_a_password_is_made_up_where_there_is_none(mock: responses.RequestsMock) -> None:
    serve(mock, "/api/v1/webhooks", [])
    serve(mock, "/api/v1/webhooks", hook_row(9, "create"), "POST", status=201)
    credentials = Credentials({}, {"api_token": "t"})
    with Client(BASE, CRM.headers(credentials), credentials, now=lambda: NOW) as made:
        password = CRM.subscribe(made, URL).secret
    assert password is not None
    assert len(password) >= 32
    assert {body["http_auth_password"] for _, body in sent(mock, "POST")} == {password}


def test_an_address_that_cannot_be_reached_and_a_right_that_is_missing_are_told(mock: responses.RequestsMock) -> None:
    serve(mock, "/api/v1/webhooks", [])
    unreachable = {
        "status": "error",
        "success": False,
        "errors": {"subscription_url": ["invalid or non-reachable URL"]},
    }
    mock.add("POST", f"{BASE}/api/v1/webhooks", json=unreachable, status=400)
    with client() as made:
        by_hand = CRM.subscribe(made, URL).by_hand
    assert len(by_hand) == 3
    assert all("TURNLOCK_PUBLIC_URL" in text for text in by_hand)
    mock.replace("GET", f"{BASE}/api/v1/webhooks", json={"success": False, "message": "Forbidden"}, status=403)
    with client(object="deal") as made:
        left = CRM.subscribe(made, URL)
        assert (left.hooks, left.secret) == ((), None)
        assert f"event object deal, version 2.0, endpoint URL {URL}" in left.by_hand[0]
        assert CRM.lost_hooks(made, URL) == ()
        hooks = next(f for f in CRM.check(made, URL) if f.where == "hooks")
        assert (hooks.ok, hooks.what.partition(";")[0]) == (True, "not visible to this user")


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (
            {"x-daily-ratelimit-token-limit": "150000", "x-daily-ratelimit-token-remaining": "812"},
            {"daily": Left(812, 150_000)},
        ),
        ({"x-ratelimit-limit": "20", "x-ratelimit-remaining": "3"}, {"burst": Left(3, 20)}),
        ({"x-daily-ratelimit-token-remaining": "812"}, {}),  # of how many it does not say
        ({}, {}),
    ],
)
def test_answers_tell_what_is_left_of_two_seconds_and_of_a_day(said: dict[str, str], left: dict[str, Left]) -> None:
    assert CRM.left(CaseInsensitiveDict(said), CRM.buckets) == left


def test_a_check_tells_of_rights_and_failing_deliveries(mock: responses.RequestsMock) -> None:
    me = {"id": ME, "company_domain": "acme", "access": [{"app": "sales", "admin": False}]}
    mock.add("GET", f"{BASE}/api/v1/users/me", json={"success": True, "data": me})
    serve(mock, "/api/v1/leads", [])
    no_scope = {"success": False, "error": "Scope and URL mismatch", "errorCode": 403}
    mock.add("GET", f"{BASE}/api/v2/persons", json=no_scope, status=403)
    serve(mock, "/api/v1/users", [{"id": ME, "name": "Iris Integration", "active_flag": True}])
    serve(mock, "/api/v1/webhooks", [*WHOLE[:2], WHOLE[2] | {"last_http_status": 401}])
    with client(nobody=f"{ME}, {BOB}") as made:
        found = {f.where: f for f in CRM.check(made, URL)}
    lacking = {where for where, f in found.items() if not f.ok}
    assert lacking == {"rights", "leads", "agents", "nobody", "deliveries"}
    assert "lacks a scope" in found["leads"].fix
    assert found["nobody"].what == f"{ME}, {BOB}: their leads are nobody's"
    assert str(BOB) in found["nobody"].fix
    assert "401" in found["deliveries"].what
    assert all("pw" not in f.what + f.fix for f in found.values())


# -- consent -----------------------------------------------------------------------------------------------------------

APP = App("client-id-123", "client-secret-456", "https://turnlock.example.com/oauth/callback")
TOKENS = {
    "access_token": "v1u:a", "token_type": "Bearer", "refresh_token": "123:456:abc", "expires_in": "3599",
    "scope": "base,leads:full", "api_domain": BASE,
}  # fmt: skip


def test_an_app_proves_itself_by_basic_and_learns_the_address(mock: responses.RequestsMock) -> None:
    mock.add("POST", "https://oauth.pipedrive.com/oauth/token", json=TOKENS)
    with Client("https://oauth.pipedrive.com", {}, Credentials(), now=lambda: NOW) as made:
        first = oauth.redeem(made, CRM.oauth, APP, "code1", None)
        again = oauth.renew(made, CRM.oauth, APP, "123:456:abc")
    assert first == again
    assert (first.base_url, first.account, first.lives) == (BASE, None, 3599.0)
    basic = "Basic " + base64.b64encode(b"client-id-123:client-secret-456").decode()
    assert {call.request.headers["Authorization"] for call in mock.calls} == {basic}
    assert [dict(parse_qsl(call.request.body)) for call in mock.calls] == [
        {"grant_type": "authorization_code", "code": "code1", "redirect_uri": APP.redirect_uri},
        {"grant_type": "refresh_token", "refresh_token": "123:456:abc"},
    ]
    asked = oauth.consent_url(CRM.oauth, APP, "state1", None)
    assert asked.startswith("https://oauth.pipedrive.com/oauth/authorize?client_id=client-id-123&")
    assert "scope" not in asked  # the app's registration names them
    assert "x-api-token" not in CRM.headers(Credentials({}, {"access_token": "v1u:a", "api_token": "t"}))


@pytest.mark.parametrize(
    ("body", "dead"),
    [
        ({"success": False, "message": "Invalid grant: refresh_token is invalid"}, True),
        ({"success": False, "error": "invalid_grant", "message": "x"}, True),
        ({"success": False, "message": "Invalid client: client is invalid"}, False),
        ({"success": False, "message": "Missing parameter: grant_type"}, False),
    ],
)
def test_a_grant_that_is_over_is_told_in_either_way(mock: responses.RequestsMock, body: Any, dead: bool) -> None:
    mock.add("POST", "https://oauth.pipedrive.com/oauth/token", json=body, status=400)
    with Client("https://oauth.pipedrive.com", {}, Credentials(), now=lambda: NOW) as made:
        error = failing(lambda: oauth.renew(made, CRM.oauth, APP, "r"))
    assert isinstance(error, DeadGrant) == dead
