"""EspoCRM: every captured delivery and answer, its own kind of signature, and the lock after wrong logins."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import responses

from adapters.base import HOOK_TOPIC, Capability, Credentials, EventKind, Rejected, Subscribed
from adapters.client import Client, CrmError, Outcome
from adapters.espocrm import EspoCrm
from routing.model import AgentSeen, Lead, UnassignedDefinition
from tests.adapters.captured import BASE, Captures, exact, sent

CRM = EspoCrm()
CAPTURED = Captures(CRM)
DELIVERIES, ANSWERS = CAPTURED.names("wh"), CAPTURED.names("api")
NOW = datetime(2026, 11, 29, 15, 30, tzinfo=UTC)
HOOK = "https://hooks.example.com/hooks/token"
ZOE, MAX, TWIN, START = "6b0c43c193a4f6bd7", "6b0c43c19ba02b86c", "6b0c43c441480e9fc", "6b0c4a88cc69a2901"
ANA, BEN, CY = "6b0c43ab6233db099", "6b0c43ab6c0ff5f36", "6b0c43ab74fc77776"
WEBHOOKS = CAPTURED.load("api12")["response"]["list"]
SECRET = ",".join(f"{w['id']}:{w['secretKey']}" for w in WEBHOOKS).encode()


def delivery(name: str) -> tuple[Any, datetime]:
    """A captured delivery. There, too, the address ends with the topic."""
    return CAPTURED.delivery(name, **{HOOK_TOPIC: CAPTURED.load(name)["path"].rpartition("/")[2]})


@pytest.fixture
def mock() -> Iterator[responses.RequestsMock]:
    with responses.RequestsMock() as made:
        yield made


@pytest.fixture
def client() -> Iterator[Client]:
    with CAPTURED.client(Credentials(secrets={"api_key": "k"}), NOW) as made:
        yield made


# -- deliveries ------------------------------------------------------------------------------------------------------

CREATED, CHANGED, DELETED = EventKind.LEAD_CREATED, EventKind.LEAD_CHANGED, EventKind.LEAD_DELETED
TOLD = {
    "wh0001": [(CREATED, ZOE), (CREATED, MAX)],
    "wh0002": [(CHANGED, ZOE), (CHANGED, MAX)],  # three records: the owner, then the followers
    "wh0003": [(CHANGED, ZOE), (CHANGED, MAX)],
    "wh0004": [(CHANGED, ZOE)],  # five records of one lead
    "wh0005": [(CHANGED, ZOE)],
    "wh0006": [(CREATED, TWIN)],
    "wh0007": [(DELETED, TWIN)],
    "wh0008": [(DELETED, TWIN)],  # the same again, after a 500
    "wh0009": [(CREATED, START)],
    "wh0010": [(CHANGED, START)],
    "wh0011": [(CHANGED, START)],
}


def test_every_capture_is_looked_at() -> None:
    assert set(TOLD) == set(DELIVERIES)
    assert len(ANSWERS) == 49
    assert {name[:5] for name in ANSWERS} >= set(OUTCOMES)


@pytest.mark.parametrize("name", DELIVERIES)
def test_captured_deliveries(name: str) -> None:
    request, came = delivery(name)
    CRM.verify(request, [SECRET], came)
    found = CRM.parse(request)
    assert [(event.kind, event.ref) for event in found] == TOLD[name]
    # Without an id a delivery is news again once it was read, and no payload is trusted: cron sends it minutes later.
    assert not any(event.key_is_final or event.lead for event in found)


@pytest.mark.parametrize("name", DELIVERIES)
def test_captured_deliveries_are_refused_with_any_other_secret(name: str) -> None:
    request, came = delivery(name)
    mine = next(w for w in WEBHOOKS if w["event"] == request.headers[HOOK_TOPIC])
    others = ",".join(f"{w['id']}:{w['secretKey']}" for w in WEBHOOKS if w is not mine)
    for secret, reason in (
        (others, "bad_signature"),
        (f"{mine['id']}:{mine['secretKey'][:-1]}", "bad_signature"),
        (f"{others.partition(':')[0]}:{mine['secretKey']}", "bad_signature"),  # the id is signed too
        (mine["secretKey"], "bad_secret"),
        (f"{mine['id']}:", "bad_secret"),
    ):
        with pytest.raises(Rejected, match=reason):
            CRM.verify(request, [secret.encode()], came)


def test_the_newer_header_holds_the_hash_in_hex() -> None:
    request, came = delivery("wh0001")
    hook_id, _, key = SECRET.split(b",")[-1].partition(b":")
    mac = hmac.new(key, request.body, hashlib.sha256)
    newer = base64.b64encode(hook_id + b":" + mac.hexdigest().encode()).decode()
    headers = {k: v for k, v in request.headers.items() if k != "x-signature"} | {"signature": newer}
    CRM.verify(replace(request, headers=headers), [SECRET], came)
    for wrong in (newer[:-4] + "AAA=", request.headers["x-signature"]):
        with pytest.raises(Rejected, match="bad_signature"):
            CRM.verify(replace(request, headers=headers | {"signature": wrong}), [SECRET], came)
    with pytest.raises(Rejected, match="bad_signature"):  # where both are sent, neither stands in for the other
        CRM.verify(replace(request, headers=headers | {"x-signature": "x"}), [SECRET], came)


@pytest.mark.parametrize("topic", [None, "", "Contact.create", "Lead.nope"])
def test_what_no_topic_tells_of_is_ignored(topic: str | None) -> None:
    request, _ = delivery("wh0001")
    headers = {k: v for k, v in request.headers.items() if k != HOOK_TOPIC}
    if topic is not None:
        headers[HOOK_TOPIC] = topic
    assert [e.kind for e in CRM.parse(replace(request, headers=headers))] == [EventKind.UNKNOWN]


# -- answers ---------------------------------------------------------------------------------------------------------

# What is not simply done, by the number of the capture.
OUTCOMES = {
    "api26": Outcome.FORBIDDEN,  # a page too big
    "api31": Outcome.GONE,
    "api32": Outcome.REFUSED,  # 403: no such user
    "api34": Outcome.REFUSED,
    "api36": Outcome.REFUSED,
    "api37": Outcome.REAUTHORISE,
    "api38": Outcome.REAUTHORISE,
    "api39": Outcome.FORBIDDEN,
    "api43": Outcome.CONFLICT,
    "api45": Outcome.FORBIDDEN,  # the right to assign
    **{f"api{n}": Outcome.WAIT for n in range(61, 69)},  # locked, the good key as well
}


@pytest.mark.parametrize("name", ANSWERS)
def test_captured_answers_have_their_outcome(name: str, client: Client, mock: responses.RequestsMock) -> None:
    found = CAPTURED.answer(mock, name)
    outcome = OUTCOMES.get(name[:5])
    if outcome is None:
        answer = CAPTURED.repeat(client, name)
        assert (answer.status, answer.data) == (found["status"], exact(found["response"]))
        return
    with pytest.raises(CrmError) as caught:
        CAPTURED.repeat(client, name)
    assert (caught.value.outcome, caught.value.status) == (outcome, found["status"])
    # The window of the lock is a minute, and every further try within it would prolong it.
    assert caught.value.retry_after == (60.0 if outcome is Outcome.WAIT else None)


@pytest.mark.parametrize(
    ("status", "data"),
    [(403, None), (403, []), (403, {"messageTranslation": []}), (400, {"messageTranslation": {"label": "x"}}),
     (400, {"messageTranslation": {"label": "cannotRelateNonExisting"}})],
)  # fmt: skip
def test_only_the_words_of_an_unknown_user_refuse_one(status: int, data: Any) -> None:
    assert CRM.refine(status, data) is None


def test_an_agent_who_may_not_follow_leads_is_refused(client: Client, mock: responses.RequestsMock) -> None:
    told = {"messageTranslation": {"label": "couldNotAddFollowerUserHasNoAccessToStream", "scope": "Stream"}}
    reason = {"X-Status-Reason": "Could not add user to followers."}
    mock.add("POST", f"{BASE}/api/v1/Lead/{ZOE}/followers", json=told, status=403, headers=reason)
    with pytest.raises(CrmError) as caught:
        CRM.add_collaborator(client, Lead(ref=ZOE), ANA)
    assert caught.value.outcome is Outcome.REFUSED
    assert sent(mock) == {"id": ANA}


@pytest.mark.parametrize(("status", "outcome"), [(404, Outcome.GONE), (403, Outcome.FORBIDDEN)])
@pytest.mark.parametrize("agent", [ANA, CY])
def test_a_user_who_left_is_told_from_a_lead_that_is_gone(
    status: int, outcome: Outcome, agent: str, client: Client, mock: responses.RequestsMock
) -> None:
    mock.add("POST", f"{BASE}/api/v1/Lead/{ZOE}/followers", status=status, headers={"X-Status-Reason": "No."})
    CAPTURED.answer(mock, "api27")  # Cy is deactivated, so not listed
    with pytest.raises(CrmError) as caught:
        CRM.add_collaborator(client, Lead(ref=ZOE), agent)
    assert caught.value.outcome is (Outcome.REFUSED if agent == CY else outcome)


def test_a_note_is_a_post_in_the_stream(client: Client, mock: responses.RequestsMock) -> None:
    mock.add("POST", f"{BASE}/api/v1/Note", json={"id": "n1"})
    CRM.add_note(client, ZOE, "Why", "Ana has the turn. [turnlock:9f]")
    text = "**Why**\n\nAna has the turn. [turnlock:9f]"
    assert sent(mock) == {"type": "Post", "parentType": "Lead", "parentId": ZOE, "post": text}
    others = [{"id": f"n{n}", "type": "Assign", "data": {}} for n in range(100)]
    for page in (others, [{"id": "n1", "type": "Post", "post": text}]):
        mock.add("GET", f"{BASE}/api/v1/Lead/{ZOE}/stream", json={"list": page})
    assert CRM.find_note(client, ZOE, "[turnlock:9f]")
    assert len(mock.calls) == 3


def test_a_stream_is_not_read_for_ever(client: Client, mock: responses.RequestsMock) -> None:
    page = {"list": [{"id": f"n{n}", "type": "Update", "data": {}} for n in range(100)]}
    mock.add("GET", f"{BASE}/api/v1/Lead/{ZOE}/stream", json=page)
    assert not CRM.find_note(client, ZOE, "[turnlock:9f]")
    assert len(mock.calls) == 10


def test_a_lead_that_is_read(client: Client, mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api23")
    lead = CRM.fetch_leads(client, [ZOE])[ZOE]
    assert lead == Lead(
        ref=ZOE,
        source="Web Site",
        stage="New",
        price=lead.price,
        city="Berlin",
        zip="10115",
        country="DE",
        emails=("zoe.quill@example.com",),
        phones=("+49301234567",),
        custom={"industry": "Software", "accountName": "Quill GmbH"},
        created_at=datetime(2026, 11, 29, 15, 24, 49, tzinfo=UTC),
        updated_at=datetime(2026, 11, 29, 15, 24, 49, tzinfo=UTC),
        name="Zoe Quill",
    )
    assert lead.price == 25000


def test_custom_fields_and_further_addresses_are_read(client: Client, mock: responses.RequestsMock) -> None:
    more = {
        "cBeds": 3,
        "cAreas": ["North", "West"],
        "addressStreet": "7 Oak Lane",
        "addressState": "BE",
        "campaignName": "Spring",
        "assignedUserId": ANA,
        "followersIds": [ANA, BEN],
        "emailAddressData": [{"emailAddress": "zoe.quill@example.com"}, {"emailAddress": "Zoe@home.example.com"}],
        "phoneNumberData": [{"phoneNumber": "+1 303 555 0142"}],
    }
    CAPTURED.answer(mock, "api23", lambda body: body | more)
    lead = CRM.fetch_leads(client, [ZOE])[ZOE]
    assert (lead.owner_ref, lead.street, lead.state, lead.campaign) == (ANA, "7 Oak Lane", "BE", "Spring")
    assert lead.collaborator_refs == (BEN,)
    assert (lead.custom["cBeds"], lead.custom["cAreas"]) == (3, ("North", "West"))
    assert lead.emails == ("zoe.quill@example.com", "zoe@home.example.com")
    assert lead.phones == ("+49301234567", "+13035550142")


def test_a_lead_that_is_gone_is_absent(client: Client, mock: responses.RequestsMock) -> None:
    mock.add("GET", f"{BASE}/api/v1/Lead/{ZOE}", status=404, headers={"X-Status-Reason": f"Record {ZOE} not found."})
    assert CRM.fetch_leads(client, [ZOE]) == {}


def test_an_owner_that_may_not_be_seen_is_never_nobody(client: Client, mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api23", lambda body: {k: v for k, v in body.items() if k != "assignedUserId"})
    with pytest.raises(CrmError) as caught:
        CRM.fetch_leads(client, [ZOE])
    assert caught.value.outcome is Outcome.ANSWER_UNREADABLE


@pytest.mark.parametrize("name", ["api28", "api29", "api33"])
def test_an_owner_write_is_the_one_that_was_captured(name: str, client: Client, mock: responses.RequestsMock) -> None:
    found = CAPTURED.answer(mock, name)
    written = CRM.set_owner(client, Lead(ref=ZOE), found["request"]["body"]["assignedUserId"])
    assert sent(mock) == found["request"]["body"]
    # The inactive user of api33 was accepted as well: whoever asked reads agent and lead again.
    assert (written.owner_ref, written.conflict) == (None, False)
    assert Capability.WRITE_ANSWERS_OWNER not in CRM.capabilities


def test_agents_are_the_users_that_are_shown(client: Client, mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api27")
    found = {agent.ref: agent for agent in CRM.list_agents(client)}
    assert found.keys() == {ANA, BEN}
    assert found[ANA] == AgentSeen(ref=ANA, name="Ana Adams", email="ana@agents.example", active=True)
    assert CRM.get_agent(client, CY) is None  # deactivated: not shown, so not assignable
    asked = parse_qsl(urlsplit(str(mock.calls[0].request.url)).query)
    assert [v for k, v in asked if k == "where[0][value][]"] == ["regular", "admin"]


def test_the_sweep_leaves_out_what_is_done_or_owned(client: Client, mock: responses.RequestsMock) -> None:
    row = CAPTURED.load("api24")["response"]["list"][0]
    rows = [
        row,
        row | {"id": "dead1", "status": "Dead"},
        row | {"id": "owned1", "assignedUserId": ANA},
        row | {"id": "house1", "assignedUserId": BEN},
        row | {"id": "old1", "createdAt": "2026-11-29 15:23:58"},
    ]
    CAPTURED.answer(mock, "api24", lambda body: {"total": 5, "list": rows}, path="/api/v1/Lead")
    since = datetime(2026, 11, 29, 15, 24, 49, 500_000, tzinfo=UTC)  # the CRM cuts to seconds: not to be missed
    pages = list(CRM.unassigned_since(client, since, UnassignedDefinition(frozenset({BEN}))))
    assert pages == [[ZOE, "house1"]]
    asked = dict(parse_qsl(urlsplit(str(mock.calls[0].request.url)).query))
    assert asked["where[0][value]"] == "2026-11-29 15:24:48"
    assert asked["where[0][timeZone]"] == "UTC"  # else the value would be a time of the site's zone


def test_changes_are_asked_for_as_they_were_captured(client: Client, mock: responses.RequestsMock) -> None:
    row = CAPTURED.load("api25")["response"]["list"][0] | {"createdAt": "2025-01-01 00:00:00"}
    rows = [
        row,
        row | {"id": "older", "modifiedAt": "2026-11-29 14:59:59"},
        row | {"id": "owned", "assignedUserId": ANA},
    ]
    found = CAPTURED.answer(mock, "api25", lambda body: {"list": rows}, path="/api/v1/Lead")
    since = datetime(2026, 11, 29, 15, 0, 1, tzinfo=UTC)
    assert list(CRM.changed_since(client, since, UnassignedDefinition())) == [[row["id"]]]
    theirs = dict(parse_qsl(urlsplit(found["request"]["url"]).query))
    asked = dict(parse_qsl(urlsplit(str(mock.calls[0].request.url)).query))
    for ours, captured in (("attribute", "attribute"), ("value", "value"), ("dateTime", "dateTime"), ("type", "type")):
        assert asked[f"where[0][{ours}]"] == theirs[f"where[1][{captured}]"]


@pytest.mark.parametrize(("parameters", "seconds"), [({}, 150), ({"sweep_min_age": "0"}, 0)])
def test_what_cron_may_not_have_told_yet_is_left_to_the_next_sweep(
    parameters: dict[str, str], seconds: int, mock: responses.RequestsMock
) -> None:
    row = CAPTURED.load("api24")["response"]["list"][0]
    edge = NOW - timedelta(seconds=seconds)
    rows = [
        row | {"id": f"aged{n}", "createdAt": f"{edge - timedelta(seconds=n):%Y-%m-%d %H:%M:%S}"} for n in (1, 0, -1)
    ]
    CAPTURED.answer(mock, "api24", lambda body: {"total": 3, "list": rows}, path="/api/v1/Lead")
    with CAPTURED.client(Credentials(parameters, {"api_key": "k"}), NOW) as client:
        since = NOW - timedelta(hours=1)
        assert list(CRM.unassigned_since(client, since, UnassignedDefinition())) == [["aged1", "aged0"]]


# -- set-up ----------------------------------------------------------------------------------------------------------


def test_the_secrets_of_the_webhooks_are_handed_on(client: Client, mock: responses.RequestsMock) -> None:
    def ours(body: Any) -> Any:
        rows = [w | {"url": f"{HOOK}/{w['event']}"} for w in body["list"] if w["event"] != "Lead.update"]
        return {"total": 4, "list": [*rows, {"id": "foreign1", "event": "Lead.create", "url": "https://x.example.com"}]}

    CAPTURED.answer(mock, "api12", ours)
    left: Subscribed = CRM.subscribe(client, HOOK)
    assert {h.topic for h in left.hooks} == set(CRM.topics)
    assert left.secret is not None
    assert set(left.secret.split(",")) == {f"{w['id']}:{w['secretKey']}" for w in WEBHOOKS if w["type"] != "update"}
    assert left.secret not in repr(left)
    for name in DELIVERIES:
        request, came = delivery(name)
        if request.headers[HOOK_TOPIC] in CRM.topics:
            CRM.verify(request, [left.secret.encode()], came)


def test_a_webhook_is_made_as_it_was_captured(client: Client, mock: responses.RequestsMock) -> None:
    mock.add("GET", f"{BASE}/api/v1/Webhook", json={"total": 0, "list": []})
    for name in ("api08", "api10", "api11"):
        CAPTURED.answer(mock, name)
    CRM.subscribe(client, HOOK)
    made = [json.loads(c.request.body or b"") for c in mock.calls if c.request.method == "POST"]
    owner = {"skipOwn": True}  # our own writes of it need not come back; leads that a form makes with our key must
    assert made == [
        {"event": topic, "url": f"{HOOK}/{topic}"} | (owner if "assignedUser" in topic else {}) for topic in CRM.topics
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda acl: acl, ""),
        (lambda acl: acl["table"]["Lead"].update(edit="own"), "Leads: edit all"),
        (lambda acl: acl["table"]["Lead"].update(stream="no"), "Leads: stream all"),
        (lambda acl: acl.update(assignmentPermission="no"), "Assignment Permission: all"),
        (lambda acl: acl["table"].pop("Webhook"), "Webhooks: enabled"),
        (lambda acl: acl.clear(), "Leads: read all; Leads: edit all"),
    ],
)
def test_a_check_names_the_rights_that_lack(
    change: Any, told: str, client: Client, mock: responses.RequestsMock
) -> None:
    def lessen(body: Any) -> Any:
        change(body["acl"])
        return body

    CAPTURED.answer(mock, "api07", lessen)
    for name in ("api24", "api27", "api12"):
        CAPTURED.answer(mock, name)
    found = {f.where: f for f in CRM.check(client, None)}
    assert found["rights"].ok == (not told)
    assert told in found["rights"].fix
    # Only rules with collaborators need it, so it is told and not demanded.
    assert found["collaborators"].ok
    assert "Follower Management Permission" in found["collaborators"].what


def test_without_a_key_nothing_is_sent_as_one() -> None:
    assert CRM.headers(Credentials()) == {}
