"""BottleCRM: every captured delivery and answer, and the odd things that its list-valued owner brings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import responses

from adapters.base import Capability, Credentials, Event, EventKind, Rejected, WebhookRequest
from adapters.bottlecrm import BottleCrm
from adapters.client import Client, CrmError, Outcome
from routing.model import AgentSeen, Lead, UnassignedDefinition
from tests.adapters.kit import FIXTURES

CAPTURED = FIXTURES / "bottlecrm" / "captured"
DELIVERIES = sorted(CAPTURED.glob("wh*.json"))
ANSWERS = sorted(CAPTURED.glob("api*.json"))
CRM = BottleCrm()
BASE = "https://crm.example.com"
SECRET = json.loads((CAPTURED / "api07_create_webhook.json").read_text())["response"]["secret"].encode()
ADMIN, ANA = "7129e369-5702-41a2-940c-49b32dcdcc69", "4d920d5b-7031-4ff7-8d54-3f86d8ef6f49"
BEN, CY = "bd5249ec-fefa-4dcc-a7a6-c8075c7ea080", "a6bc9a27-9596-4e13-aac3-9fe00a83dec9"
ZOE, MAX = "511fb195-05d9-432d-ae2c-dbca3b6ac773", "470ffedd-5e28-4b88-9ff3-e8068dbc1a4c"
DEL, START = "e716031a-f37a-4a03-b424-54e4d79dbda2", "a64aee6c-309e-41cd-b49f-e490b50c81ae"


def captured(name: str) -> Any:
    (path,) = CAPTURED.glob(f"{name}*.json")
    return json.loads(path.read_text())


def delivery(name: str) -> tuple[WebhookRequest, datetime]:
    """A captured delivery and when it came."""
    found = captured(name)
    headers = {key.lower(): value for key, value in found["headers"]}
    request = WebhookRequest("POST", f"https://hooks.example.com{found['path']}", headers, found["body"].encode())
    return request, datetime.fromisoformat(found["received_at"]).replace(tzinfo=UTC)


def event(name: str) -> Event:
    (found,) = CRM.parse(delivery(name)[0])
    return found


@pytest.fixture
def mock() -> Iterator[responses.RequestsMock]:
    with responses.RequestsMock() as made:
        yield made


@pytest.fixture
def client() -> Iterator[Client]:
    now = datetime(2026, 11, 29, 15, 30, tzinfo=UTC)
    credentials = Credentials(secrets={"api_token": "bcrm_pat_x"})
    with Client(BASE, CRM.headers(credentials), credentials, now=lambda: now, refine=CRM.refine) as made:
        yield made


def answers(mock: responses.RequestsMock, found: Any, body: Any = ...) -> None:
    """Answer the captured request as it was answered, or with another `body`."""
    asked = found["request"]
    url = BASE + asked["url"].removeprefix("http://127.0.0.1:8190").partition("?")[0]
    sent = json.dumps(found["response"] if body is ... else body)
    mock.add(asked["method"], url, body=sent, status=found["status"], content_type="application/json")


# -- deliveries ------------------------------------------------------------------------------------------------------

CREATED, CHANGED, DELETED = EventKind.LEAD_CREATED, EventKind.LEAD_CHANGED, EventKind.LEAD_DELETED
# kind, lead, and its owner as far as the delivery may be believed (...: the lead must be read)
TOLD = {
    "wh0001": (CREATED, ZOE, None),
    "wh0002": (CREATED, MAX, None),
    "wh0003": (CHANGED, ZOE, ANA),
    "wh0004": (CHANGED, ZOE, ANA),  # the same owner was written again
    "wh0005": (CHANGED, MAX, BEN),
    "wh0006": (CHANGED, MAX, None),  # an unknown profile was written
    "wh0007": (CHANGED, MAX, None),  # a user's id in the place of a profile's
    "wh0008": (CHANGED, MAX, None),  # an inactive profile
    "wh0009": (CHANGED, MAX, None),
    "wh0010": (CHANGED, MAX, None),
    "wh0011": (EventKind.UNKNOWN, None, ...),  # ping
    "wh0012": (CREATED, DEL, None),
    "wh0013": (DELETED, DEL, ...),
    "wh0014": (CHANGED, MAX, ...),  # wh0010 again, two minutes later
    "wh0015": (CREATED, START, None),
    "wh0016": (CHANGED, START, ANA),
}


@pytest.mark.parametrize("name", [path.stem for path in DELIVERIES])
def test_captured_deliveries(name: str) -> None:
    request, came = delivery(name)
    CRM.verify(request, [SECRET], came)
    found = event(name)
    kind, ref, owner = TOLD[name]
    assert (found.kind, found.ref) == (kind, ref)
    assert found.key_is_final
    if owner is ...:
        assert found.lead is None
    else:
        assert found.lead is not None
        assert (found.lead.ref, found.lead.owner_ref, found.lead.collaborator_refs) == (ref, owner, ())
    if kind is not EventKind.UNKNOWN:
        assert found.key == json.loads(request.body)["id"]
        assert found.occurred_at is not None
        assert found.occurred_at <= came


@pytest.mark.parametrize("name", [path.stem for path in DELIVERIES])
def test_captured_deliveries_are_refused_late_early_and_with_another_secret(name: str) -> None:
    request, came = delivery(name)
    for now, secret, reason in (
        (came + timedelta(seconds=302), SECRET, "too_old"),
        (came - timedelta(seconds=302), SECRET, "too_new"),
        (came, SECRET.removeprefix(b"whsec_"), "bad_signature"),  # the secret is the text as shown, prefix and all
        (came, SECRET[:-1], "bad_signature"),
    ):
        with pytest.raises(Rejected, match=reason):
            CRM.verify(request, [secret], now)


def test_a_retry_has_the_key_of_the_first_attempt_and_no_lead() -> None:
    first, again = delivery("wh0010")[0], delivery("wh0014")[0]
    assert first.body == again.body
    assert first.headers["x-bottlecrm-delivery"] == again.headers["x-bottlecrm-delivery"]
    assert event("wh0010").key == event("wh0014").key
    assert event("wh0010").lead is not None
    assert event("wh0014").lead is None  # by then the lead may long be another's


def test_other_records_and_other_forms_are_ignored() -> None:
    request, _ = delivery("wh0001")
    body = json.loads(request.body)
    for topic in ("contact.created", "deal.won", "lead.merged"):
        (found,) = CRM.parse(replace(request, body=json.dumps({**body, "event": topic}).encode()))
        assert found.kind is EventKind.UNKNOWN


@pytest.mark.parametrize(
    "odd",
    [
        {"assigned_to": ...},
        {"assigned_to": None},
        {"assigned_to": ANA},
        {"assigned_to": [{"name": "ana"}]},
        {"assigned_to": [True]},
        {"opportunity_amount": "much"},
        {"phone": ["1"]},
    ],
)
def test_a_payload_with_an_odd_field_has_its_lead_read(odd: dict[str, Any]) -> None:
    request, _ = delivery("wh0001")
    body = json.loads(request.body)
    body["data"] = {k: v for k, v in (body["data"] | odd).items() if v is not ...}
    (found,) = CRM.parse(replace(request, body=json.dumps(body).encode()))
    assert (found.kind, found.ref, found.lead) == (CREATED, ZOE, None)


# -- answers ---------------------------------------------------------------------------------------------------------

# What is not simply done, by the number of the capture.
OUTCOMES = {
    "api08": Outcome.FORBIDDEN,  # a token at /api/webhooks/
    "api22": Outcome.REFUSED,
    "api34": Outcome.GONE,
    "api36": Outcome.REFUSED,
    "api38": Outcome.REFUSED,
    "api39": Outcome.REFUSED,
    "api40": Outcome.REFUSED,
    "api41": Outcome.REAUTHORISE,  # 403, as all of these
    "api42": Outcome.REAUTHORISE,
    "api43": Outcome.REAUTHORISE,
    "api44": Outcome.FORBIDDEN,
    "api46": Outcome.FORBIDDEN,
    "api49": Outcome.REFUSED,
}


@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_captured_answers_have_their_outcome(path: Path, client: Client, mock: responses.RequestsMock) -> None:
    found = json.loads(path.read_text())
    answers(mock, found)
    parts = urlsplit(found["request"]["url"])
    query, outcome = dict(parse_qsl(parts.query)), OUTCOMES.get(path.stem[:5])
    if outcome is None:
        answer = client.request(found["request"]["method"], parts.path, params=query, json=found["request"]["body"])
        assert (answer.status, answer.data) == (found["status"], found["response"])
        return
    with pytest.raises(CrmError) as caught:
        client.request(found["request"]["method"], parts.path, params=query, json=found["request"]["body"])
    assert caught.value.outcome is outcome
    assert caught.value.status == found["status"]
    assert "token" not in str(caught.value)  # nothing of the answer's text


def test_every_named_outcome_was_captured() -> None:
    assert set(OUTCOMES) <= {path.stem[:5] for path in ANSWERS}
    assert len(ANSWERS) == 46
    assert set(TOLD) == {path.stem for path in DELIVERIES}


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (403, None),
        (403, []),
        (403, {"detail": ["Organization context is required"]}),
        (403, {"error": True, "errors": "Permission Denied"}),  # not an admin
        (400, {"detail": "Organization context is required. Please login again."}),
        (500, {"detail": "Organization context is required. Please login again."}),
    ],
)
def test_only_the_words_of_a_lost_login_ask_for_new_credentials(status: int, data: Any) -> None:
    assert CRM.refine(status, data) is None


@pytest.mark.parametrize(("answer", "told"), [("api25", "wh0001"), ("api32", "wh0004")])
def test_a_lead_read_is_the_lead_that_was_told(
    answer: str, told: str, client: Client, mock: responses.RequestsMock
) -> None:
    answers(mock, captured(answer))
    read = CRM.fetch_leads(client, [ZOE])[ZOE]
    assert read == event(told).lead
    assert read.owner_ref == (None if answer == "api25" else ANA)
    assert (read.name, read.emails, read.stage) == ("Zoe Quill", ("zoe.quill@example.com",), None)
    assert read.created_at == datetime(2026, 11, 29, 15, 26, 51, 854_000, tzinfo=UTC)


def test_every_field_of_a_lead_that_is_read(client: Client, mock: responses.RequestsMock) -> None:
    found = captured("api25")
    filled = found["response"]["lead_obj"] | {
        "phone": "+1 303 555 0142",
        "source": "partner",
        "status": "in process",
        "opportunity_amount": "25000.00",
        "address_line": "7 Oak Lane",
        "city": "Denver",
        "state": "CO",
        "postcode": "80202",
        "country": "US",
        "tags": [{"id": "t1", "name": "Hot", "slug": "hot"}, {"id": "t2", "name": "VIP", "slug": "vip"}],
        "custom_fields": {"beds": 3, "pool": True, "areas": ["North", "West"], "nothing": None},
        "assigned_to": [{"id": CY, "is_active": True}, {"id": ANA, "is_active": True}],
        "first_name": None,
        "last_name": "Quill",
    }
    answers(mock, found, {"lead_obj": filled})
    read = CRM.fetch_leads(client, [ZOE])[ZOE]
    expected = {
        "ref": ZOE,
        "owner_ref": CY,  # the first as the CRM lists them
        "collaborator_refs": (ANA,),
        "source": "partner",
        "stage": "in process",
        "price": 25000,
        "street": "7 Oak Lane",
        "city": "Denver",
        "state": "CO",
        "zip": "80202",
        "country": "US",
        "tags": ("Hot", "VIP"),
        "emails": ("zoe.quill@example.com",),
        "phones": ("+13035550142",),
        "custom": {"beds": 3, "pool": True, "areas": ("North", "West")},
        "name": "Quill",
    }
    assert {name: getattr(read, name) for name in expected} == expected
    payload_shows = {f.name for f in fields(Lead) if getattr(event("wh0005").lead, f.name)}
    assert CRM.not_in_payload.isdisjoint(payload_shows)


def test_a_lead_that_is_gone_is_absent(client: Client, mock: responses.RequestsMock) -> None:
    found = captured("api34")
    found["request"]["method"] = "GET"
    answers(mock, found)
    assert CRM.fetch_leads(client, ["00000000-0000-4000-8000-000000000000"]) == {}


@pytest.mark.parametrize("lacking", ["lead_obj", "assigned_to"])
def test_an_answer_without_its_list_of_holders_is_never_nobody(
    lacking: str, client: Client, mock: responses.RequestsMock
) -> None:
    found = captured("api25")
    del (found["response"] if lacking == "lead_obj" else found["response"]["lead_obj"])[lacking]
    answers(mock, found)
    with pytest.raises(CrmError) as caught:
        CRM.fetch_leads(client, [ZOE])
    assert caught.value.outcome is Outcome.ANSWER_UNREADABLE


def test_an_owner_write_is_the_one_that_was_captured(client: Client, mock: responses.RequestsMock) -> None:
    found = captured("api30")
    answers(mock, found)
    CRM.set_owner(client, Lead(ref=ZOE), ANA)
    assert json.loads(mock.calls[0].request.body) == found["request"]["body"]


def test_an_owner_write_keeps_who_else_holds_the_lead(client: Client, mock: responses.RequestsMock) -> None:
    answers(mock, captured("api30"))
    CRM.set_owner(client, Lead(ref=ZOE, owner_ref=ADMIN, collaborator_refs=(BEN, ANA)), ANA)
    assert json.loads(mock.calls[0].request.body) == {"assigned_to": [ANA, BEN]}


@pytest.mark.parametrize("name", ["api35", "api37", "api48"])
def test_a_success_that_left_nobody_proves_nothing(name: str, client: Client, mock: responses.RequestsMock) -> None:
    found = captured(name)
    answers(mock, found)
    written = CRM.set_owner(client, Lead(ref=MAX), found["request"]["body"]["assigned_to"][0])
    assert (written.owner_ref, written.conflict) == (None, False)
    assert Capability.WRITE_ANSWERS_OWNER not in CRM.capabilities  # so whoever asked reads again


def test_agents_are_profiles_active_or_not(client: Client, mock: responses.RequestsMock) -> None:
    answers(mock, captured("api05"))
    found = {agent.ref: agent for agent in CRM.list_agents(client)}
    assert found.keys() == {ADMIN, ANA, BEN, CY}  # never the ids of users
    assert found[ANA] == AgentSeen(ref=ANA, name="ana", email="ana@agents.example", active=True)
    assert CRM.get_agent(client, BEN) == found[BEN]
    assert CRM.get_agent(client, "1133f053-d56b-4f73-ad08-c4311bd93adf") is None  # ana's id as a user
    asked = dict(parse_qsl(urlsplit(str(mock.calls[0].request.url)).query))
    assert asked == {"limit": "100", "offset": "0"}


def test_the_deactivated_are_seen(client: Client, mock: responses.RequestsMock) -> None:
    profiles, found = captured("api47")["response"], captured("api05")
    lists = {
        "active_users": {"active_users": profiles["active_profiles"], "offset": None},
        "inactive_users": {"inactive_users": profiles["inactive_profiles"], "offset": None},
    }
    answers(mock, found, lists)
    assert {a.ref: a.active for a in CRM.list_agents(client)} == {ADMIN: True, ANA: True, BEN: True, CY: False}
    lists["active_users"]["active_users"][0]["user_details"]["is_active"] = False
    mock.reset()
    answers(mock, found, lists)
    assert [a.ref for a in CRM.list_agents(client) if not a.active] == [BEN, CY]


def test_a_list_that_is_not_there_is_no_empty_list(client: Client, mock: responses.RequestsMock) -> None:
    found = captured("api05")
    del found["response"]["inactive_users"]
    answers(mock, found)
    with pytest.raises(CrmError) as caught:
        list(CRM.list_agents(client))  # else everybody would count as gone
    assert caught.value.outcome is Outcome.ANSWER_UNREADABLE


@pytest.mark.parametrize(("name", "free"), [("api26", [ZOE, MAX]), ("api27", [MAX]), ("api45", [])])
def test_the_sweep_reads_captured_pages(
    name: str, free: list[str], client: Client, mock: responses.RequestsMock
) -> None:
    found = captured(name)
    found["response"]["open_leads"]["offset"] = None
    answers(mock, found)
    since = datetime(2026, 11, 29, 15, 0, tzinfo=UTC)
    assert [ref for page in CRM.unassigned_since(client, since, UnassignedDefinition()) for ref in page] == free
    asked = dict(parse_qsl(urlsplit(str(mock.calls[0].request.url)).query))
    assert asked == {"open": "true", "created_at__gte": "2026-11-28", "limit": "100", "offset": "0"}
    later = since + timedelta(hours=1)
    assert list(CRM.unassigned_since(client, later, UnassignedDefinition())) == []


def test_a_sweep_misses_no_lead_when_others_leave_the_list_meanwhile(
    client: Client, mock: responses.RequestsMock
) -> None:
    row = captured("api26")["response"]["open_leads"]["open_leads"][0]
    rows = [row | {"id": f"lead-{n}"} for n in range(250)]
    offsets: list[int] = []

    def page(request: Any) -> tuple[int, dict[str, str], str]:
        query = dict(parse_qsl(urlsplit(request.url).query))
        start, limit = int(query["offset"]), int(query["limit"])
        shown = rows[start : start + limit]
        following = start + len(shown) if start + len(shown) < len(rows) else None
        offsets.append(start)
        del rows[:9]  # closed by somebody: all others move up
        leads = {"leads_count": len(rows), "open_leads": shown, "offset": following if shown else 0}
        return 200, {}, json.dumps({"open_leads": leads})

    mock.add_callback("GET", re.compile(re.escape(f"{BASE}/api/leads/")), page)
    since = datetime(2026, 11, 29, 15, 0, tzinfo=UTC)
    found = [ref for refs in CRM.unassigned_since(client, since, UnassignedDefinition()) for ref in refs]
    assert offsets == [0, 90, 180]
    assert sorted(found) == sorted(f"lead-{n}" for n in range(250))
    assert len(found) == len(set(found))


# -- set-up ----------------------------------------------------------------------------------------------------------


def test_webhooks_are_made_by_hand_and_say_how(client: Client) -> None:
    url = "https://hooks.example.com/hooks/token"
    left = CRM.subscribe(client, url)
    assert left.hooks == ()
    (todo,) = left.by_hand
    for needed in (url, "lead.created, lead.updated, lead.deleted", "turnlock tenant secret", "https on port 443"):
        assert needed in todo
    assert CRM.unsubscribe(client, url) == 0


@pytest.mark.parametrize(
    ("leads", "users", "wrong"),
    [
        ("api26", "api05", set()),
        ("api41", "api41", {"leads", "agents"}),
        ("api26", "api44", {"agents"}),  # the token lacks users:read
    ],
)
def test_a_check_names_what_is_wrong(
    leads: str, users: str, wrong: set[str], client: Client, mock: responses.RequestsMock
) -> None:
    mock.assert_all_requests_are_fired = leads == "api26"  # with a key that is wrong nothing more is asked
    for name, path in ((leads, "/api/leads/"), (users, "/api/users/")):
        found = captured(name)
        found["request"]["url"] = f"http://127.0.0.1:8190{path}"
        answers(mock, found)
    findings = CRM.check(client, "https://hooks.example.com/hooks/token")
    assert {f.where for f in findings if not f.ok} == wrong
    assert all(f.fix for f in findings if not f.ok)


def test_without_a_token_nothing_is_sent_as_one() -> None:
    assert CRM.headers(Credentials()) == {}
