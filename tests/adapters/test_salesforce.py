"""Salesforce beyond the conformance suite: messages, ids, queries, conditional writes, errors, merges."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import responses
from hypothesis import given, settings
from hypothesis import strategies as st
from requests.structures import CaseInsensitiveDict
from simple_salesforce import Salesforce as Library
from simple_salesforce.exceptions import (
    SalesforceError,
    SalesforceExpiredSession,
    SalesforceMalformedRequest,
    SalesforceRefusedRequest,
    SalesforceResourceNotFound,
)
from simple_salesforce.format import quote_soql_value

from adapters import salesforce_reading as reading
from adapters.base import Credentials, EventKind, Unreadable, WebhookRequest
from adapters.budget import Left
from adapters.client import Client
from adapters.oauth import App, DeadGrant, renew
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from adapters.salesforce import Salesforce
from routing.model import Lead, UnassignedDefinition
from tests.adapters import soql
from tests.adapters.kit import NOW, AgentRow, LeadRow, Running, Scripted, fixtures, kit, plain
from tests.adapters.kit_salesforce import ACCOUNT, HOSTILE, USER, FakeSalesforce, error, message

CRM = Salesforce()
BASE = "https://acme.my.salesforce.com"
SAID = {
    "price_field": "budget__c", "tags_field": "Interests__c", "type_field": "Kind__c", "form_field": "Landing_Page__c",
    "language_field": "Language__c", "fields": "Beds__c, ns__Agreed__c,company, x'y",
}  # fmt: skip
CREDENTIALS = Credentials(parameters=SAID, secrets={"access_token": "t"})
QUEUE = reading.id18("00G7Q000000Qeue")


def told(body: bytes) -> Any:
    return CRM.parse(WebhookRequest("POST", "https://hooks.example.com/hooks/token", {}, body))


@pytest.fixture
def running() -> Iterator[Running]:
    with kit("salesforce").running() as made:
        assert isinstance(made.fake, FakeSalesforce)
        yield made


@pytest.fixture
def mock() -> Iterator[responses.RequestsMock]:
    with responses.RequestsMock(assert_all_requests_are_fired=False) as made:
        yield made


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("00QHo00001AbCdE", "00QHo00001AbCdEMAV"),
        ("005Ho000009xYzA", "005Ho000009xYzAIAU"),
        ("00GHo000003QuEu", "00GHo000003QuEuMAK"),
    ],
)
def test_an_id_of_15_characters_gets_its_18(short: str, long: str) -> None:
    assert (reading.id18(short), reading.id18(long), CRM.canonical_ref(short)) == (long, long, long)


@given(st.text("abcXYZ019", min_size=15, max_size=15), st.integers(0, 14))
@settings(max_examples=60, deadline=None)
def test_ids_that_differ_by_case_alone_differ_in_their_suffix(ref: str, at: int) -> None:
    other = ref[:at] + ref[at].swapcase() + ref[at + 1 :]
    assert reading.id18(ref)[:15] == ref
    assert (reading.id18(ref)[15:] == reading.id18(other)[15:]) == (ref == other)


def test_what_is_no_id_stays_as_it_is() -> None:
    for text in ("", "12", "00QHo00001AbCd", "00QHo00001AbCdEMAVx", "00QHo00001AbCd'", "ééééééééééééééé"):
        assert reading.id18(text) == text


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_no_document_type_and_no_entity_is_read(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(Unreadable, match="forbidden_xml"):
        told(HOSTILE[name])
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not_xml"),
        (b"{}", "not_xml"),
        (b"<x>", "not_xml"),
        (b"<x/>", "no_outbound_message"),
        (b'<?xml version="1.0" encoding="nosuch"?><x/>', "not_xml"),
        (b'<?xml version="1.0" encoding="rot13"?><x/>', "not_xml"),
        (b'<?xml version="1.0" encoding="utf-32"?><x/>', "not_xml"),
        (b"<x>&nosuch;</x>", "not_xml"),
        (b"<x>\x00</x>", "not_xml"),
        (b"<x>" * 200_000 + b"</x>" * 200_000, "too_big"),
        (b"<x>" * 100_000 + b"</x>" * 100_000, "no_outbound_message"),
        (message({"OrganizationId": ACCOUNT}), "missing_notification"),
        (message({"OrganizationId": USER, "Notification": [{"Id": "04l1"}]}), "wrong_type"),
        (message({"Notification": [{"Id": "04l1"}]}), "missing_organization_id"),
        (message({"OrganizationId": ACCOUNT, "Notification": [{"Id": "04l1"}] * 501}), "too_many_elements"),
    ],
)
def test_what_is_no_message_parks_as_a_whole(body: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        told(body)


def one(ref: str, number: int, **more: Any) -> dict[str, Any]:
    return {"Id": f"04l{number}", "sObject": {"@type": "sf:Lead", "Id": ref, **more}}


def test_a_hundred_are_a_hundred_and_one_is_one() -> None:
    many = told(message({"OrganizationId": ACCOUNT, "Notification": [one(f"00Q{n}", n) for n in range(100)]}))
    assert [event.ref for event in many] == [f"00Q{n}" for n in range(100)]
    assert {event.account for event in many} == {ACCOUNT}
    (single,) = told(message({"OrganizationId": ACCOUNT[:15], "Notification": one("00Q7Q00000LeadA", 1)}))
    assert (single.account, single.ref) == (ACCOUNT, reading.id18("00Q7Q00000LeadA"))


def test_a_repeat_has_the_same_key_whatever_it_shows_by_then() -> None:
    first = told(message({"OrganizationId": ACCOUNT, "Notification": one("00Q1", 7, OwnerId=QUEUE)}))
    later = told(message({"OrganizationId": ACCOUNT, "Notification": one("00Q1", 7, OwnerId=USER, Status="Open")}))
    assert [event.key for event in first] == [event.key for event in later]
    assert not first[0].key_is_final  # nothing proves it, so it may only join what nobody has read yet


def test_what_is_about_nothing_is_ignored_and_what_is_odd_parks_alone() -> None:
    lead = {"@type": "sf:Lead"}
    found = told(
        message(
            {
                "OrganizationId": ACCOUNT,
                "Notification": [
                    {"Id": "04l1"}, {"Id": "04l2", "sObject": None},
                    {"Id": "04l3", "sObject": {"@type": "sf:Case", "Id": "5001"}},
                    {"Id": "04l4", "sObject": {**lead, "OwnerId": QUEUE}}, one("00Q5", 5, LastModifiedDate="soon"),
                    {"Id": "?", "sObject": {**lead, "Id": "00Q6"}}, one("00Q7' OR Id != '", 7), one("00Q8", 8),
                ],
            }
        )
    )  # fmt: skip
    bad, ignored, good = EventKind.UNREADABLE, EventKind.UNKNOWN, EventKind.LEAD_CHANGED
    assert [event.kind for event in found] == [ignored, ignored, ignored, bad, bad, bad, bad, good]
    assert {event.account for event in found} == {ACCOUNT}


def test_the_answer_is_the_ack_that_ends_the_repeats() -> None:
    from xml.etree import ElementTree

    body, kind = CRM.acknowledgement()
    assert kind.startswith("text/xml")
    root = ElementTree.fromstring(body)
    ack = root.find(
        "{http://schemas.xmlsoap.org/soap/envelope/}Body/{http://soap.sforce.com/2005/09/outbound}notificationsResponse"
        "/{http://soap.sforce.com/2005/09/outbound}Ack"
    )
    assert ack is not None
    assert ack.text == "true"


# -- queries -----------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=100, deadline=None)
def test_a_quoted_text_is_one_value_of_a_query(text: str) -> None:
    assert reading.quoted(text) == quote_soql_value(text)  # of the library simple-salesforce
    query = soql.read(f"SELECT Id FROM Lead WHERE Name = {reading.quoted(text)}")
    assert query.fits({"Name": text})
    assert not query.fits({"Name": text + "x"})


def test_a_lead_in_our_words(mock: responses.RequestsMock) -> None:
    fixture = next(f for f in fixtures("salesforce") if f.name == "lead")
    row = json.loads(fixture.body)
    answer = {"totalSize": 1, "done": True, "records": [row]}
    talk = Scripted(BASE, lambda *_: answer, mock, CREDENTIALS)
    assert plain(CRM.fetch_leads(talk.client, [row["Id"][:15]])[row["Id"]]) == fixture.about["lead"]
    (asked,) = [query["q"] for _, _, query in talk.calls]
    columns = soql.read(asked).columns
    assert len({c.lower() for c in columns}) == len(columns)
    assert {"budget__c", "Beds__c", "ns__Agreed__c", "Owner.Type"} <= set(columns)
    assert not any("'" in c for c in columns)


@pytest.mark.parametrize(
    ("row", "said", "owner", "pond"),
    [
        ({"OwnerId": USER, "Owner": {"Type": "User"}}, {}, USER, None),
        ({"OwnerId": USER[:15], "Owner": {"Type": "User"}}, {"all_queues": "yes"}, USER, None),
        ({"OwnerId": QUEUE, "Owner": {"Type": "Queue"}}, {}, None, QUEUE),
        ({"OwnerId": QUEUE, "Owner": {"Type": "Queue"}}, {"all_queues": "no"}, None, QUEUE),
        ({"OwnerId": QUEUE, "Owner": {"Type": "Queue"}}, {"all_queues": "yes"}, None, None),
        ({"OwnerId": QUEUE}, {}, None, QUEUE),
        ({"OwnerId": None}, {}, None, None),
    ],
)
def test_a_queue_holds_a_lead_and_a_user_owns_it(
    row: dict[str, Any], said: dict[str, str], owner: str | None, pond: str | None
) -> None:
    lead = reading.lead_of(Fields({"Id": "00Q1", **row}, strict=False), said)
    assert (lead.owner_ref, lead.pond_ref) == (owner, pond)


def test_an_owner_that_is_not_shown_is_not_guessed() -> None:
    with pytest.raises(Unreadable, match="missing_owner_id"):
        reading.lead_of(Fields({"Id": "00Q1"}, strict=False), {})


def test_a_field_that_cannot_be_seen_is_left_out_and_told(running: Running) -> None:
    fake = running.fake
    fake.hidden, fake.custom = {"Phone", "Beds__c"}, {"Beds__c": 3, "Baths__c": 2}
    client = running.client
    client.credentials = Credentials({"fields": "Beds__c,Baths__c,Gone__c"}, client.credentials.secrets)
    fake.add_leads(LeadRow("5001"))
    fake.add_agents(AgentRow("12"))
    found = CRM.fetch_leads(client, ["5001"])["5001"]
    assert dict(found.custom) == {"Baths__c": 2}
    asked = len(running.server.received)
    CRM.fetch_leads(client, ["5001"])
    assert len(running.server.received) == asked + 1  # it is learnt once
    (fields,) = [f for f in CRM.check(client, None) if f.where == "fields"]
    assert not fields.ok
    assert fields.what == "not readable: beds__c, gone__c, phone"


@pytest.mark.parametrize("hidden", ["OwnerId", "Owner.Type"])
def test_an_owner_that_cannot_be_seen_stops_all(running: Running, hidden: str) -> None:
    running.fake.hidden = {hidden}
    running.fake.add_leads(LeadRow("5001"))
    with pytest.raises(CrmError) as caught:
        CRM.fetch_leads(running.client, ["5001"])
    assert caught.value.outcome is Outcome.FORBIDDEN
    assert "read and edit on leads" in caught.value.text


@pytest.mark.parametrize("status", [404, 410])
def test_a_version_that_is_not_there_is_no_lead_that_is_gone(status: int, mock: responses.RequestsMock) -> None:
    body = [{"errorCode": "NOT_FOUND", "message": "The requested resource does not exist"}]
    mock.add("GET", f"{BASE}/services/data/v66.0/query", json=body, status=status)
    with client_of(BASE) as client, pytest.raises(CrmError) as caught:
        CRM.fetch_leads(client, ["00Q1"])
    assert caught.value.outcome is Outcome.FORBIDDEN
    assert "api_version" in caught.value.text


def test_the_version_is_chosen(mock: responses.RequestsMock) -> None:
    said = Credentials({"api_version": "67.0"}, {"access_token": "t"})
    talk = Scripted(BASE, lambda *_: {"done": True, "records": []}, mock, said)
    CRM.fetch_leads(talk.client, ["00Q1"])
    assert {path for _, path, _ in talk.calls} == {"/services/data/v67.0/query", "/services/data/v67.0/queryAll"}


def test_the_converted_are_no_leads_any_more(running: Running) -> None:
    running.fake.add_leads(LeadRow("5001"), LeadRow("5002"))
    running.fake.converted.add("5001")
    assert set(CRM.fetch_leads(running.client, ["5001", "5002"])) == {"5002"}
    with pytest.raises(CrmError) as caught:
        CRM.set_owner(running.client, Lead(ref="5001", updated_at=NOW), "12")
    assert (caught.value.outcome, caught.value.text) == (Outcome.GONE, "The lead was converted in Salesforce.")


def test_the_merged_bring_the_lead_that_goes_on(running: Running) -> None:
    fake = running.fake
    fake.add_leads(*(LeadRow(str(n), owner="12") for n in range(5001, 5006)))
    fake.deleted = {"5001": "5002", "5003": "5002", "5004": None}
    found = CRM.fetch_leads(running.client, ["5001", "5003", "5004", "5005"])
    assert {ref: lead.former_refs for ref, lead in found.items()} == {"5002": ("5001", "5003"), "5005": ()}
    fake.deleted["5002"] = "5005"  # the one that went on is merged, too
    found = CRM.fetch_leads(running.client, ["5003", "5001", "5004"])
    assert {ref: set(lead.former_refs) for ref, lead in found.items()} == {"5005": {"5001", "5002", "5003"}}
    fake.deleted["5005"] = "5001"  # a ring, which is none that Salesforce would make
    assert CRM.fetch_leads(running.client, ["5001"]) == {}


def test_a_sweep_reads_all_pages_of_the_queues_that_count(running: Running) -> None:
    fake, young, long_ago = running.fake, NOW - timedelta(minutes=30), NOW - timedelta(days=9)
    fake.add_leads(
        *(LeadRow(str(5000 + n), pond="7", created=young) for n in range(250)),
        LeadRow("6001", pond="7", created=long_ago, changed=NOW - timedelta(minutes=3)),  # came back to the queue
        LeadRow("6002", pond="7", created=long_ago),
        LeadRow("6003", pond="8", created=young),
        LeadRow("6004", owner="12", created=young),
        LeadRow("6005", pond="7", created=young),
    )
    fake.converted.add("6005")

    def sweep(by: Any, **said: str) -> set[str]:
        running.client.credentials = Credentials(said, running.client.credentials.secrets)
        pages = by(running.client, NOW - timedelta(hours=1), UnassignedDefinition(pond_refs=frozenset({"7"})))
        return {ref for page in pages for ref in page}

    wanted = {str(5000 + n) for n in range(250)}
    assert sweep(CRM.unassigned_since) == wanted
    assert len(running.server.received) == 3
    assert sweep(CRM.changed_since) == wanted | {"6001"}
    assert sweep(CRM.unassigned_since, all_queues="yes") == wanted | {"6003"}


@pytest.mark.parametrize(("said", "found"), [({}, ["5002"]), ({"sweep_min_age": "30"}, ["5002", "5001"])])
def test_a_sweep_leaves_a_lead_to_the_message_that_may_be_on_its_way(
    said: dict[str, str], found: list[str], running: Running
) -> None:
    old = NOW - timedelta(days=9)
    running.client.credentials = Credentials(said, running.client.credentials.secrets)
    for made in ("created", "changed"):
        running.fake.leads.clear()
        for ref, seconds in (("5001", 31), ("5002", 121)):
            then = NOW - timedelta(seconds=seconds)
            running.fake.add_leads(LeadRow(ref, created=then if made == "created" else old, changed=then))
        by = CRM.unassigned_since if made == "created" else CRM.changed_since
        pages = by(running.client, NOW - timedelta(hours=1), UnassignedDefinition())
        assert [ref for page in pages for ref in page] == found


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("api-usage=4749/5000; per-app-api-usage=4999/5000(appName=other)", Left(251, 5000)),
        ("per-app-api-usage=17/250(appName=other), api-usage=18/5000", Left(4982, 5000)),
        ("api-usage=5003/5000", Left(0, 5000)),
        ("per-app-api-usage=17/250(appName=other)", None),
        ("api-usage=many/5000", None),
        (None, None),
    ],
)
def test_answers_tell_what_is_left_of_the_calls_of_a_day(said: str | None, left: Left | None) -> None:
    headers = CaseInsensitiveDict({} if said is None else {"sforce-limit-info": said})
    assert CRM.left(headers, CRM.buckets) == ({} if left is None else {"daily": left})


def test_a_list_that_salesforce_gave_up_is_read_again_later(running: Running) -> None:
    running.fake.add_agents(*(AgentRow(str(n)) for n in range(150)))
    real = running.server.handle
    running.server.handle = lambda asked: real(replace(asked, path=asked.path.replace("/01g", "/01gX")))
    with pytest.raises(CrmError) as caught:
        list(CRM.list_agents(running.client))
    assert caught.value.outcome is Outcome.NOT_SENT


def test_a_next_page_elsewhere_is_not_asked_for(mock: responses.RequestsMock) -> None:
    answer = {"done": False, "nextRecordsUrl": "https://evil.example.com/services", "records": []}
    talk = Scripted(BASE, lambda *_: answer, mock, CREDENTIALS)
    with pytest.raises(CrmError) as caught:
        list(CRM.list_agents(talk.client))
    assert caught.value.outcome is Outcome.REDIRECTED
    assert len(talk.calls) == 1


# -- owners ------------------------------------------------------------------------------------------------------------


def test_no_assignment_rule_runs_on_our_write(running: Running) -> None:
    running.fake.add_leads(LeadRow("5001", pond="7"))
    lead = CRM.fetch_leads(running.client, ["5001"])["5001"]
    assert not CRM.set_owner(running.client, lead, "12").conflict
    assert (running.fake.leads["5001"].owner, running.fake.leads["5001"].pond) == ("12", None)
    (written,) = running.server.written
    assert written.headers["sforce-call-options"] == "client=Turnlock"
    assert written.json == {"OwnerId": "12"}


@pytest.mark.parametrize(
    ("code", "status", "outcome", "words"),
    [
        ("REQUIRED_FIELD_MISSING", 400, Outcome.REFUSED, "required fields"),
        ("DUPLICATES_DETECTED", 400, Outcome.REFUSED, "duplicate rules"),
        ("INVALID_CROSS_REFERENCE_KEY", 400, Outcome.AGENT_REFUSED, "create on leads"),
        ("INSUFFICIENT_ACCESS_OR_READONLY", 403, Outcome.FORBIDDEN, "create on leads"),
        ("API_DISABLED_FOR_ORG", 403, Outcome.FORBIDDEN, "has no API"),
        ("UNABLE_TO_LOCK_ROW", 400, Outcome.NOT_SENT, "tries again"),
    ],
)
def test_why_no_test_lead_can_be_made(
    code: str, status: int, outcome: Outcome, words: str, mock: responses.RequestsMock
) -> None:
    mock.add("POST", f"{BASE}/services/data/v66.0/sobjects/Lead", json=no(code), status=status)
    queues = UnassignedDefinition(pond_refs=frozenset({"7"}))
    with client_of(BASE) as client, pytest.raises(CrmError) as caught:
        CRM.add_test_lead(client, "Turnlock Test", "tl1@example.com", queues)
    assert (caught.value.outcome, words in caught.value.text) == (outcome, True)
    assert "lena" not in str(caught.value)


def test_whom_a_test_lead_belongs_to(running: Running) -> None:
    running.fake.queues = {"00G8"}
    running.fake.teams = {"00G8": ("New", [])}
    every_queue = replace(running.client.credentials, parameters={"all_queues": "yes"})
    for definition, credentials, owner in (
        (UnassignedDefinition(frozenset({"3"}), frozenset({"00G7", "00G9"})), None, "00G7"),
        (UnassignedDefinition(frozenset({"3"})), None, "3"),
        (UnassignedDefinition(), every_queue, "00G8"),
    ):
        running.client.credentials = credentials or running.client.credentials
        CRM.add_test_lead(running.client, "Turnlock Test", "tl1@example.com", definition)
        assert running.server.written[-1].json == {
            "FirstName": "Turnlock", "LastName": "Test", "Company": "Turnlock Test", "Email": "tl1@example.com",
            "OwnerId": owner,
        }  # fmt: skip


def test_a_lead_that_anybody_changed_since_is_not_written(running: Running) -> None:
    running.fake.add_leads(LeadRow("5001", pond="7"))
    lead = CRM.fetch_leads(running.client, ["5001"])["5001"]
    running.fake.touch("5001")
    assert CRM.set_owner(running.client, lead, "12").conflict
    assert running.fake.leads["5001"].owner is None
    fresh = CRM.fetch_leads(running.client, ["5001"])["5001"]
    assert not CRM.set_owner(running.client, fresh, "12").conflict


@pytest.mark.parametrize(
    ("changed", "stamped", "date"),
    [
        ("2026-03-02T17:22:16.000+0000", "2026-03-02T17:22:16.000+0000", "Mon, 02 Mar 2026 17:22:16 GMT"),
        ("2026-03-02T17:22:16.000+0000", "2026-03-02T17:22:20.000+0000", "Mon, 02 Mar 2026 17:22:20 GMT"),
        ("2026-03-02T17:22:16.001+0000", "2026-03-02T17:22:16.000+0000", "Mon, 02 Mar 2026 17:22:17 GMT"),
        ("2026-03-02T17:22:16.000+0200", None, "Mon, 02 Mar 2026 15:22:16 GMT"),
    ],
)
def test_the_condition_is_never_older_than_the_lead(changed: str, stamped: str | None, date: str) -> None:
    row = {"Id": "00Q1", "OwnerId": QUEUE, "LastModifiedDate": changed, "SystemModstamp": stamped}
    assert reading.unmodified_since(reading.lead_of(Fields(row, strict=False), {})) == date


def client_of(base: str) -> Client:
    return Client(
        base, CRM.headers(CREDENTIALS), CREDENTIALS, now=lambda: NOW, refine=CRM.refine,
        asks_to_wait=CRM.asks_to_wait, words=CRM.words,
    )  # fmt: skip


def no(code: str, message: str = "lena.leadman@example.com") -> Any:
    return [{"message": message, "errorCode": code, "fields": []}]


LOCKED = "unable to obtain exclusive access to this record or 1 records: 00Q7Q00000LeadA"
DAY, AT_ONCE = "TotalRequests Limit exceeded.", "ConcurrentRequests (Concurrent API Requests) Limit exceeded."
WRITTEN = [
    (300, ["/a", "/b"], Outcome.REFUSED, None, "several records"),
    (400, no("UNABLE_TO_LOCK_ROW", LOCKED), Outcome.NOT_SENT, None, "tries again"),
    (400, no("FIELD_CUSTOM_VALIDATION_EXCEPTION"), Outcome.REFUSED, None, "validation rule"),
    (400, no("REQUIRED_FIELD_MISSING"), Outcome.REFUSED, None, "lacks a field"),
    (400, no("INVALID_FIELD"), Outcome.REFUSED, None, "hidden from the connected user"),
    (400, no("MALFORMED_ID"), Outcome.REFUSED, None, "an id is none"),
    (400, no("MALFORMED_QUERY"), Outcome.REFUSED, None, "cannot be read"),
    (400, no("INVALID_FIELD_FOR_INSERT_UPDATE"), Outcome.REFUSED, None, "Transfer Leads"),
    (400, no("INACTIVE_OWNER_OR_USER"), Outcome.AGENT_REFUSED, None, "inactive"),
    (400, no("OPERATION_WITH_INACTIVE_USER"), Outcome.AGENT_REFUSED, None, "inactive"),
    (400, no("TRANSFER_REQUIRES_READ"), Outcome.AGENT_REFUSED, None, "may not read leads"),
    (403, no("TRANSFER_REQUIRES_READ"), Outcome.AGENT_REFUSED, None, "may not read leads"),
    (400, no("INVALID_CROSS_REFERENCE_KEY"), Outcome.AGENT_REFUSED, None, "does not know the agent's user"),
    (400, no("CANNOT_UPDATE_CONVERTED_LEAD"), Outcome.GONE, None, "converted"),
    (400, no("ENTITY_IS_DELETED"), Outcome.GONE, None, "deleted"),
    (404, no("ENTITY_IS_DELETED"), Outcome.GONE, None, "deleted"),
    (400, no("INSUFFICIENT_ACCESS_OR_READONLY"), Outcome.FORBIDDEN, None, "Transfer Leads"),
    (403, no("INSUFFICIENT_ACCESS_OR_READONLY"), Outcome.FORBIDDEN, None, "Transfer Leads"),
    (400, no("INSUFFICIENT_ACCESS_ON_CROSS_REFERENCE_ENTITY"), Outcome.FORBIDDEN, None, "Transfer Leads"),
    (401, no("INVALID_SESSION_ID"), Outcome.REAUTHORISE, None, "credentials"),
    (403, no("REQUEST_LIMIT_EXCEEDED", DAY), Outcome.WAIT, 900.0, "used up its API calls"),
    (403, no("REQUEST_LIMIT_EXCEEDED", AT_ONCE), Outcome.WAIT, 5.0, "used up its API calls"),
    (403, no("API_DISABLED_FOR_ORG"), Outcome.FORBIDDEN, None, "API Enabled"),
    (403, no("FORBIDDEN"), Outcome.FORBIDDEN, None, "API Enabled"),
    (404, no("NOT_FOUND"), Outcome.GONE, None, "no longer has"),
    (410, no("UNSUPPORTED_API_VERSION"), Outcome.FORBIDDEN, None, "api_version"),
    (414, b"<html>", Outcome.REFUSED, None, "parked"),
    (415, no("UNSUPPORTED_MEDIA_TYPE"), Outcome.REFUSED, None, "parked"),
    (431, b"", Outcome.REFUSED, None, "parked"),
    (500, no("UNKNOWN_EXCEPTION"), Outcome.UNKNOWN, None, "did not confirm"),
    (502, b"<html>Bad Gateway", Outcome.UNKNOWN, None, "did not confirm"),
    (503, no("SERVER_UNAVAILABLE"), Outcome.WAIT, None, "slow down"),
    (503, b"<?xml version='1.0'?><Errors/>", Outcome.WAIT, None, "slow down"),
    (400, [None, "x", {"errorCode": ["UNABLE_TO_LOCK_ROW"]}], Outcome.REFUSED, None, "parked"),
    (400, {"errorCode": "UNABLE_TO_LOCK_ROW"}, Outcome.REFUSED, None, "parked"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "outcome", "wait", "words"), WRITTEN)
def test_each_error_of_an_owner_write(
    status: int, body: Any, outcome: Outcome, wait: float | None, words: str, mock: responses.RequestsMock
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    mock.add("PATCH", f"{BASE}/services/data/v66.0/sobjects/Lead/00Q1", raw, status=status)
    with client_of(BASE) as client, pytest.raises(CrmError) as caught:
        CRM.set_owner(client, Lead(ref="00Q1", updated_at=NOW), "0051")
    assert (caught.value.outcome, caught.value.retry_after) == (outcome, wait)
    assert words in caught.value.text
    assert "example.com" not in f"{caught.value!r} {caught.value}"


@pytest.mark.parametrize(
    ("status", "body"), [(409, b""), (412, b""), (400, no("ENTITY_FAILED_IFLASTMODIFIED_ON_UPDATE_CHECK"))]
)
def test_a_conflict_is_no_error(status: int, body: Any, mock: responses.RequestsMock) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    mock.add("PATCH", f"{BASE}/services/data/v66.0/sobjects/Lead/00Q1", raw, status=status)
    with client_of(BASE) as client:
        assert CRM.set_owner(client, Lead(ref="00Q1", updated_at=NOW), "0051").conflict


# -- notes, teams, checks ----------------------------------------------------------------------------------------------


def test_a_note_is_a_task_of_the_agent(running: Running) -> None:
    running.fake.add_leads(LeadRow("5001", owner="12"), LeadRow("5002", pond="7"))
    CRM.add_note(running.client, "5001", "S" * 300, "why")
    CRM.add_note(running.client, "5002", "s", "why")
    first, second = (asked.json for asked in running.server.written)
    assert (first["OwnerId"], len(first["Subject"]), first["WhoId"]) == ("12", 255, "5001")
    assert "OwnerId" not in second


def test_groups_in_groups_are_resolved_and_rings_end(running: Running) -> None:
    north, south, ring = "00Gnorth", "00Gsouth", "00Gring"
    running.fake.add_agents(AgentRow("12"), AgentRow("13"), AgentRow("14", active=False))
    running.fake.teams = {north: ("North", ["12"]), south: ("South", ["13", "14"]), ring: ("Ring", [])}
    running.fake.queues = {north}
    running.fake.nested = [(north, south), (north, "00Grole"), (south, ring), (ring, south), (ring, ring)]
    found = {team.name: team.agent_refs for team in CRM.list_teams(running.client)}
    assert found == {"North": ("12", "13"), "South": ("13",), "Ring": ("13",)}


def test_a_check_tells_what_an_admin_must_know(running: Running) -> None:
    fake = running.fake
    fake.add_agents(AgentRow("12"))
    fake.add_leads(LeadRow("5001", pond=QUEUE))
    fake.teams, fake.queues = {QUEUE: ("Web leads", ["12"])}, {QUEUE}
    found = {f.where: f for f in CRM.check(running.client, "https://hooks.example.com/hooks/t")}
    assert all(f.ok for f in found.values())
    assert found["account"].what == f"{ACCOUNT}, connected as {USER}"
    assert found["queues"].what == f"1 for leads: Web leads {QUEUE}"
    assert found["rights"].what == "may set owners"
    fake.may_transfer = False
    bad = {f.where: f for f in CRM.check(running.client, None) if not f.ok}
    assert set(bad) == {"rights"}
    assert "Transfer Leads" in bad["rights"].fix
    assert running.server.written == []


def test_what_is_by_hand_names_the_address_and_each_step() -> None:
    with client_of(BASE) as client:
        steps = CRM.subscribe(client, "https://hooks.example.com/hooks/t").by_hand
    assert "https://hooks.example.com/hooks/t" in steps[0]
    for step, word in zip(steps, ("Outbound Messages", "record-triggered", "turnlock check"), strict=True):
        assert word in step


# -- another client of the API: simple-salesforce reads what the adapter's fake says as the adapter does -------------


@pytest.fixture
def library(running: Running) -> Library:
    made = Library(instance_url="https://acme.my.salesforce.com", session_id="canary-session-1", version="66.0")
    made.base_url = f"{running.server.url}/services/data/v66.0/"
    return made


def test_another_client_reads_the_same_leads(running: Running, library: Library) -> None:
    running.fake.add_leads(*(LeadRow(str(5000 + n), owner=str(n % 7 + 1)) for n in range(230)))
    page = library.query("SELECT Id, OwnerId FROM Lead ORDER BY Id")
    seen = {row["Id"]: row["OwnerId"] for row in page["records"]}
    while not page["done"]:
        page = library.query_more(page["nextRecordsUrl"].rpartition("/")[2])
        seen |= {row["Id"]: row["OwnerId"] for row in page["records"]}
    ours = CRM.fetch_leads(running.client, sorted(seen))
    assert {ref: lead.owner_ref for ref, lead in ours.items()} == seen
    assert len(seen) == 230
    assert library.api_usage["api-usage"].used == 18
    assert reading.left_of({"Sforce-Limit-Info": running.fake.usage})["daily"] == Left(5000 - 18, 5000)


def test_another_client_sets_an_owner_that_the_adapter_sees(running: Running, library: Library) -> None:
    running.fake.add_leads(LeadRow("5001", pond="7"))
    since = reading.unmodified_since(CRM.fetch_leads(running.client, ["5001"])["5001"])
    headers = {"If-Unmodified-Since": since, "Sforce-Auto-Assign": "FALSE"}
    wrote = Library.__getattr__(library, "Lead")
    wrote.base_url = f"{library.base_url}sobjects/Lead/"
    assert wrote.update("5001", {"OwnerId": "13"}, headers=headers) == 204
    assert CRM.fetch_leads(running.client, ["5001"])["5001"].owner_ref == "13"
    with pytest.raises(SalesforceError) as late:
        wrote.update("5001", {"OwnerId": "14"}, headers=headers)
    assert late.value.status == 412


@pytest.mark.parametrize(
    ("status", "code", "theirs", "ours"),
    [
        (401, "INVALID_SESSION_ID", SalesforceExpiredSession, Outcome.REAUTHORISE),
        (403, "INSUFFICIENT_ACCESS_OR_READONLY", SalesforceRefusedRequest, Outcome.FORBIDDEN),
        (404, "NOT_FOUND", SalesforceResourceNotFound, Outcome.GONE),
        (400, "MALFORMED_ID", SalesforceMalformedRequest, Outcome.REFUSED),
    ],
)
def test_another_client_takes_errors_alike(
    running: Running, library: Library, status: int, code: str, theirs: type[Exception], ours: Outcome
) -> None:
    running.server.handle = lambda _: error(code, status=status)
    with pytest.raises(theirs) as caught:
        library.restful("sobjects/Lead/00Q1")
    assert caught.value.content[0]["errorCode"] == code  # type: ignore[attr-defined]
    with pytest.raises(CrmError) as mine:
        CRM.set_owner(running.client, Lead(ref="00Q1", updated_at=NOW), "12")
    assert mine.value.outcome is ours


# -- tokens ------------------------------------------------------------------------------------------------------------

ANSWER = {
    "access_token": "00D7Q!AQ0", "refresh_token": "5Aep8", "signature": "c2ln", "scope": "refresh_token api",
    "instance_url": "https://acme.my.salesforce.com", "token_type": "Bearer", "issued_at": "1772472136625",
    "id": f"https://login.salesforce.com/id/{ACCOUNT}/{USER}",
}  # fmt: skip
APP = App("3MVG9", "canary-secret", "https://hooks.example.com/oauth/callback")


def renewed(mock: responses.RequestsMock, status: int, body: Any) -> Any:
    mock.add("POST", "https://login.salesforce.com/services/oauth2/token", json=body, status=status)
    assert CRM.oauth is not None
    with Client("https://login.salesforce.com", {}, Credentials(), now=lambda: NOW) as client:
        return renew(client, CRM.oauth, APP, "5Aep7")


def test_a_token_answer_names_account_and_address(mock: responses.RequestsMock) -> None:
    found = renewed(mock, 200, {**ANSWER, "id": f"https://test.salesforce.com/id/{ACCOUNT[:15]}/{USER[:15]}"})
    assert (found.account, found.base_url, found.refresh) == (ACCOUNT, "https://acme.my.salesforce.com", "5Aep8")
    assert found.lives == 3600.0  # it is not told; by default a session ends two hours after its last use
    moved = renewed(mock, 200, {**ANSWER, "instance_url": "https://acme.sandbox.my.salesforce.com/"})
    assert moved.base_url == "https://acme.sandbox.my.salesforce.com"


@pytest.mark.parametrize(
    "odd",
    [
        {"id": None}, {"id": "https://login.salesforce.com/"}, {"instance_url": None}, {"instance_url": "ftp://x.example"},
        {"instance_url": "https://a@b.example"}, {"instance_url": "https://b.example/path"}, {"instance_url": 7},
    ],
)  # fmt: skip
def test_an_answer_without_account_or_address_is_none(odd: dict[str, Any], mock: responses.RequestsMock) -> None:
    with pytest.raises(CrmError) as caught:
        renewed(mock, 200, {**ANSWER, **odd})
    assert caught.value.outcome is Outcome.UNKNOWN or caught.value.outcome is Outcome.ANSWER_UNREADABLE


@pytest.mark.parametrize(
    ("status", "said", "outcome", "words"),
    [
        (400, "invalid_grant", Outcome.REAUTHORISE, "turnlock connect"),
        (400, "inactive_user", Outcome.FORBIDDEN, "inactive"),
        (400, "inactive_org", Outcome.FORBIDDEN, "inactive"),
        (400, "invalid_client_id", Outcome.FORBIDDEN, "client id"),
        (401, "invalid_client", Outcome.FORBIDDEN, "client id"),
        (400, "unsupported_grant_type", Outcome.REFUSED, "parked"),
        (503, "unavailable", Outcome.WAIT, "slow down"),
    ],
)
def test_each_error_of_a_renewal(
    status: int, said: str, outcome: Outcome, words: str, mock: responses.RequestsMock
) -> None:
    with pytest.raises(CrmError) as caught:
        renewed(mock, status, {"error": said, "error_description": "expired access/refresh token"})
    assert caught.value.outcome is outcome
    assert words in caught.value.text
    assert isinstance(caught.value, DeadGrant) == (said == "invalid_grant")
