"""Follow Up Boss beyond the conformance suite: its signature, its people, its lists."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

import pytest
import responses

from adapters.base import Credentials, EventKind, Rejected, Unreadable, WebhookRequest
from adapters.client import Client, CrmError, Outcome
from adapters.followupboss import FollowUpBoss
from routing.model import Lead, UnassignedDefinition
from tests.adapters.kit import NOW, AgentRow, Answering, LeadRow, Scripted, fixtures, kit, plain
from tests.adapters.loopback import Received, Reply

FUB = FollowUpBoss()
BASE = "https://api.followupboss.com/v1"
HOOK = "https://hooks.example.com/hooks/token-now"
SINCE = NOW - dt.timedelta(hours=2)

# The contract's worked example (docs.followupboss.com/reference/webhooks-guide), then own bodies signed with openssl.
DOCS_KEY = b"0123456789abcdef0123456789abcdef"
DOCS_BODY = (
    b'{"eventId":"152d60c0-79fc-4f75-bfa0-8ef2ef9de0f8","eventCreated":"2026-03-02T17:22:28+00:00",'
    b'"event":"peopleCreated","resourceIds":[40773],"uri":"https://api.followupboss.com/v1/people?id=40773"}'
)
DOCS_SIGNATURE = "aec4d875e55a74c31297ceda98e830e8f30c02129fdac961b21eff5ac2942c6f"
OWN_KEY = b"9f8e7d6c5b4a39281706f5e4d3c2b1a0"
OWN_BODY = (
    b'{"eventId":"7d1c0b52-0000-4000-8000-00000000aa01","eventCreated":"2026-04-06T09:15:00+00:00",'
    b'"event":"peopleCreated","resourceIds":[5101],"uri":"https://api.followupboss.com/v1/people?id=5101"}'
)
OWN_SIGNATURE = "f57ca390ec9181db87ec6edbceb87a3a5c0d09c10c4767f677b14f5b7492cea2"
TAGS_BODY = (
    '{"eventId":"7d1c0b52-0000-4000-8000-00000000aa02","eventCreated":"2026-04-06T09:15:00+00:00",'
    '"event":"peopleTagsCreated","resourceIds":[5101,5104],'
    '"uri":"https:\\/\\/api.followupboss.com\\/v1\\/people?id=5101,5104","data":{"tags":["Größe","VIP"]}}'
).encode()
TAGS_SIGNATURE = "5fae109491dedaf7a10945e1e12f3f8b361b6b5cedf6a34ddb81a8b0cca3b791"


def delivery(body: bytes, signature: str = "") -> WebhookRequest:
    return WebhookRequest("POST", HOOK, {"fub-signature": signature}, body)


@pytest.mark.parametrize(
    ("body", "signature", "key"),
    [
        (DOCS_BODY, DOCS_SIGNATURE, DOCS_KEY),
        (OWN_BODY, OWN_SIGNATURE, OWN_KEY),
        (TAGS_BODY, TAGS_SIGNATURE, OWN_KEY),
        (OWN_BODY, f" {OWN_SIGNATURE.upper()} ", OWN_KEY),
    ],
)
def test_known_signatures(body: bytes, signature: str, key: bytes) -> None:
    assert len(DOCS_BODY) == 195
    FUB.verify(delivery(body, signature), [key], NOW)


@pytest.mark.parametrize(
    ("body", "signature", "reason"),
    [
        (DOCS_BODY, "7ef5a112f1c1e59d202d43b775fa723f9c663f644bef6cbf294b3929a86bbe06", "bad_signature"),  # no base64
        (DOCS_BODY.replace(b"[40773]", b"[40774]"), DOCS_SIGNATURE, "bad_signature"),
        (DOCS_BODY.replace(b"/", b"\\/"), DOCS_SIGNATURE, "bad_signature"),
        (DOCS_BODY, "", "no_signature"),
        (DOCS_BODY, "sha256=" + DOCS_SIGNATURE, "bad_signature"),
        (DOCS_BODY, "٠" * 64, "bad_signature"),
    ],
)
def test_known_forgeries(body: bytes, signature: str, reason: str) -> None:
    with pytest.raises(Rejected, match=f"^{reason}$"):
        FUB.verify(delivery(body, signature), [DOCS_KEY], NOW)
    with pytest.raises(Rejected, match="no_secret"):
        FUB.verify(delivery(body, signature), [], NOW)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"eventId":"a","resourceIds":[1]}', "missing_event"),
        (b'{"event":"peopleCreated","resourceIds":[1]}', "missing_event_id"),
        (b'{"event":"peopleCreated","eventId":"a"}', "missing_resource_ids"),
        (b'{"event":"peopleCreated","eventId":"a","resourceIds":7}', "wrong_type"),
        (b"7", "wrong_type"),
    ],
)
def test_what_parks_a_delivery(body: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=f"^{reason}$"):
        FUB.parse(delivery(body))


def test_bad_elements_park_alone() -> None:
    ids = FUB.parse(delivery(b'{"event":"peopleUpdated","eventId":"a","resourceIds":[5,"6",null,"x",5,-1,7.5,8]}'))
    assert [(e.ref, e.key, e.problem) for e in ids] == [
        ("5", "a:5", None),
        ("6", "a:6", None),
        (None, "a:at2", "wrong_type"),
        (None, "a:at3", "wrong_type"),
        (None, "a:at5", "wrong_type"),
        (None, "a:at6", "wrong_type"),
        ("8", "a:8", None),
    ]
    wrapped = b'[{"event":"peopleUpdated","eventId":"a","resourceIds":[5]},7,{"eventId":"b"}]'
    kinds = [(e.kind, e.problem) for e in FUB.parse(delivery(wrapped))]
    assert kinds == [
        (EventKind.LEAD_CHANGED, None),
        (EventKind.UNREADABLE, "wrong_type"),
        (EventKind.UNREADABLE, "missing_event"),
    ]
    assert FUB.parse(delivery(b"[]")) == []


def test_the_name_of_the_event_may_stand_under_type() -> None:
    assert FUB.parse(delivery(b'{"type":"peopleDeleted","eventId":"a","resourceIds":[5]}'))[0].kind == "lead_deleted"


# -- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("credentials", "expected"),
    [
        (
            Credentials(secrets={"api_key": "fka_0123456789", "system_key": "k"}),
            {"X-System": "Turnlock", "X-System-Key": "k", "Authorization": "Basic ZmthXzAxMjM0NTY3ODk6"},
        ),
        (
            Credentials({"system": "Lead Desk"}, {"access_token": "at_1", "api_key": "fka_1"}),
            {"X-System": "Lead Desk", "Authorization": "Bearer at_1"},
        ),
        (Credentials(), {"X-System": "Turnlock"}),
    ],
)
def test_headers(credentials: Credentials, expected: Mapping[str, str]) -> None:
    assert FUB.headers(credentials) == expected


# -- people ----------------------------------------------------------------------------------------------------------


class Talk(Scripted):
    def __init__(self, answer: Answering, mock: responses.RequestsMock, **parameters: str) -> None:
        super().__init__(BASE, answer, mock, Credentials(parameters))


@pytest.fixture
def mock() -> Any:
    with responses.RequestsMock(assert_all_requests_are_fired=False) as found:
        yield found


def people(*rows: dict[str, Any], **meta: Any) -> dict[str, Any]:
    return {"_metadata": {"collection": "people", **meta}, "people": list(rows)}


def test_a_person_becomes_a_lead(mock: responses.RequestsMock) -> None:
    fixture = next(f for f in fixtures("followupboss") if f.name == "person")
    talk = Talk(lambda *_: fixture.body, mock)
    found = FUB.fetch_leads(talk.client, ["5101"])
    assert plain(found["5101"]) == fixture.about["lead"]
    assert talk.calls == [("GET", "/people", {"id": "5101", "fields": "allFields", "limit": "100"})]


def test_what_is_no_id_of_a_person_is_not_asked_for(mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: people(), mock)
    assert FUB.fetch_leads(talk.client, ["abc", "", "1,2", "٣"]) == {}
    assert talk.calls == []


def test_an_unclaimed_offer_is_marked(mock: responses.RequestsMock) -> None:
    def answer(_: str, __: str, query: dict[str, str]) -> Any:
        shown = {"1", "2"} if query.get("includeUnclaimed") == "true" else {"1"}
        return people(*({"id": int(r)} for r in query["id"].split(",") if r in shown))

    talk = Talk(answer, mock)
    found = FUB.fetch_leads(talk.client, ["1", "2", "3"])
    assert {ref: lead.unclaimed for ref, lead in found.items()} == {"1": False, "2": True}
    assert [query["id"] for _, _, query in talk.calls] == ["1,2,3", "2,3", "2"]


def test_who_becomes_readable_between_two_calls_is_no_offer(mock: responses.RequestsMock) -> None:
    def answer(_: str, __: str, query: dict[str, str]) -> Any:
        return people({"id": 1, "assignedUserId": 12}) if len(talk.calls) > 1 else people()

    talk = Talk(answer, mock)
    lead = FUB.fetch_leads(talk.client, ["1"])["1"]
    assert (lead.unclaimed, lead.owner_ref) == (False, "12")


def test_the_usual_read_is_one_call(mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: people({"id": 1}, {"id": 2}), mock)
    FUB.fetch_leads(talk.client, ["1", "2", "1"])
    assert len(talk.calls) == 1


def test_an_answer_that_is_too_big_is_asked_for_in_halves(mock: responses.RequestsMock) -> None:
    def answer(_: str, __: str, query: dict[str, str]) -> Any:
        return people(*({"id": int(r), "background": "x" * 300_000} for r in query["id"].split(",")))

    talk = Talk(answer, mock)
    assert set(FUB.fetch_leads(talk.client, [str(n) for n in range(1, 9)])) == {str(n) for n in range(1, 9)}
    assert max(len(q["id"].split(",")) for _, _, q in talk.calls) == 8
    mock.reset()
    one = Talk(lambda *_: people({"id": 1, "background": ["x" * 60_000] * 20}), mock)
    with pytest.raises(CrmError) as caught:
        FUB.fetch_leads(one.client, ["1"])
    assert caught.value.outcome is Outcome.ANSWER_UNREADABLE


@pytest.mark.parametrize(
    ("person", "expected"),
    [
        ({"assignedUserId": 0, "assignedPondId": 0}, {}),
        ({"assignedUserId": 12}, {"owner_ref": "12"}),
        ({"assignedPondId": 7, "ponds": [{"id": 8}]}, {"pond_ref": "7"}),
        ({"assignedPonds": [{"id": 8, "name": "x"}]}, {"pond_ref": "8"}),
        ({"type": "Buyer", "tags": ["Seller"]}, {"type": "Buyer", "tags": ["Seller"]}),
        ({"tags": [{"id": 1, "name": "SELLER"}, 5, None, {}]}, {"type": "Seller", "tags": ["SELLER", "5"]}),
        ({"price": 0}, {}),
        ({"price": "cheap", "created": "soon", "addresses": "x", "emails": [7, {"value": None}]}, {}),
        ({"phones": [{"value": "303-555-0142", "normalized": ""}]}, {"phones": ["3035550142"]}),
        ({"customA": {"x": 1}, "customB": ["a", 1], "customC": None, "custom": "x", "Custom": 1},
         {"custom": {"customB": ["a", 1], "custom": "x"}}),
    ],
)  # fmt: skip
def test_odd_people(person: dict[str, Any], expected: dict[str, Any], mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: people({"id": 1, **person}), mock)
    assert plain(FUB.fetch_leads(talk.client, ["1"])["1"]) == {"ref": "1", **expected}


@pytest.mark.parametrize("owner", ["x y", True, [], {"id": 1}, -1])
def test_an_owner_that_cannot_be_read_is_not_nobody(owner: Any, mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: people({"id": 1, "assignedUserId": owner}), mock)
    with pytest.raises(CrmError) as caught:
        FUB.fetch_leads(talk.client, ["1"])
    assert caught.value.outcome is Outcome.ANSWER_UNREADABLE


# -- owner, inquiry, agents -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"id": 1, "assignedUserId": 12}, "12"),
        ({"id": 1, "assignedUserId": 99}, "99"),
        ({"id": 1, "assignedUserId": None}, None),
    ],
)
def test_the_owner_that_a_write_answers(answer: Any, expected: str | None, mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: answer, mock)
    assert FUB.set_owner(talk.client, Lead(ref="1"), "12").owner_ref == expected
    assert talk.calls == [("PUT", "/people/1", {})]
    assert mock.calls[0].request.body == b'{"assignedUserId":12}'


@pytest.mark.parametrize(
    "answer", [{"id": 2, "assignedUserId": 12}, {"id": 1}, {}, [], {"id": 1, "assignedUserId": []}]
)
def test_an_answer_that_proves_nothing_is_unknown(answer: Any, mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: answer, mock)
    with pytest.raises(CrmError) as caught:
        FUB.set_owner(talk.client, Lead(ref="1"), "12")
    assert caught.value.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("status", "outcome", "wait", "words"),
    [
        (400, Outcome.REFUSED, None, "parked"),
        (401, Outcome.REAUTHORISE, None, "the account owner's"),
        (403, Outcome.FORBIDDEN, None, "not paid for"),
        (404, Outcome.GONE, None, "no longer"),
        (429, Outcome.WAIT, 7.0, "slow down"),
        (500, Outcome.UNKNOWN, None, "reads the lead again"),
        (503, Outcome.WAIT, None, "slow down"),
        (504, Outcome.UNKNOWN, None, "reads the lead again"),
    ],
)
def test_each_error_of_an_owner_write(
    status: int, outcome: Outcome, wait: float | None, words: str, mock: responses.RequestsMock
) -> None:
    headers = {"Retry-After": "7"} if wait else {}
    mock.add("PUT", f"{BASE}/people/1", json={"errorMessage": "Lena Leadman"}, status=status, headers=headers)
    with (
        Client(BASE, {}, Credentials(), now=lambda: NOW, refine=FUB.refine, words=FUB.words) as client,
        pytest.raises(CrmError) as caught,
    ):
        FUB.set_owner(client, Lead(ref="1"), "12")
    assert (caught.value.outcome, caught.value.retry_after) == (outcome, wait)
    assert words in caught.value.text
    assert "Lena" not in str(caught.value)


def test_an_inquiry_leads_to_its_person() -> None:
    with kit("followupboss").running() as running:
        assert FUB.resolve(running.client, "61") == "5001"
        assert FUB.resolve(running.client, "62") is None


def test_an_inquiry_without_a_person(mock: responses.RequestsMock) -> None:
    assert FUB.resolve(Talk(lambda *_: {"id": 61, "personId": None}, mock).client, "61") is None


@pytest.mark.parametrize(
    ("user", "active", "paused"),
    [
        ({"status": "Active", "role": "Agent"}, True, False),
        ({"status": "Active", "role": "Broker", "pauseLeadDistribution": True}, True, True),
        ({"status": "Active", "role": "Lender"}, False, False),
        ({"status": "Invited", "role": "Agent"}, False, False),
        ({"status": "Deleted", "role": "Agent"}, False, False),
        ({"role": "Agent"}, False, False),
    ],
)
def test_who_is_active(user: Any, active: bool, paused: bool, mock: responses.RequestsMock) -> None:
    seen = FUB.get_agent(Talk(lambda *_: {"id": 12, "name": "Ann", **user}, mock).client, "12")
    assert seen is not None
    assert (seen.active, seen.paused, seen.name) == (active, paused, "Ann")


def users(*ids: int, **meta: Any) -> Any:
    return {"_metadata": meta, "users": [{"id": i} for i in ids]}


@pytest.mark.parametrize(
    "pages",
    [
        {"": users(1, 2, next="t"), "t": users(2, 3)},
        {"": users(1, 2, nextLink=f"{BASE}/users?next=t"), "t": users(3)},
        {"": users(1, 2, total=3, collection="users"), "2": users(3, total=3)},
        {"": users(1, 2, 3, total=3, collection="gone")},
        {"": users(1, 2, next="t"), "t": users(next="u"), "u": users(3)},
    ],
    ids=["next", "nextLink", "offset", "the only list", "an empty page"],
)
def test_lists_are_read_to_their_end(pages: Any, mock: responses.RequestsMock) -> None:
    talk = Talk(lambda _, __, query: pages[query.get("next") or query.get("offset") or ""], mock)
    assert [a.ref for a in FUB.list_agents(talk.client)] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("pages", "outcome"),
    [
        ({"": users(1, next="t"), "t": users(2, next="t")}, Outcome.ANSWER_UNREADABLE),
        ({"": users(1, nextLink="https://elsewhere.example.com/users")}, Outcome.REDIRECTED),
        ({"": {"a": [], "b": []}}, Outcome.ANSWER_UNREADABLE),
        ({"": {"users": [{"name": "no id"}]}}, Outcome.ANSWER_UNREADABLE),
    ],
)
def test_lists_that_cannot_be_read(pages: Any, outcome: Outcome, mock: responses.RequestsMock) -> None:
    talk = Talk(lambda _, __, query: pages[query.get("next", "")], mock)
    with pytest.raises(CrmError) as caught:
        list(FUB.list_agents(talk.client))
    assert caught.value.outcome is outcome


# -- the sweep --------------------------------------------------------------------------------------------------------


def swept(talk: Talk, **definition: Any) -> list[str]:
    return [r for page in FUB.unassigned_since(talk.client, SINCE, UnassignedDefinition(**definition)) for r in page]


def row(ref: int, minutes: float, **more: Any) -> dict[str, Any]:
    return {"id": ref, "created": (NOW - dt.timedelta(minutes=minutes)).isoformat(), **more}


def test_the_sweep_leaves_the_youngest_to_the_next(mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: people(row(1, 0.5), row(2, 1.9), row(3, 2.1), row(4, 60)), mock)
    assert swept(talk) == ["3", "4"]
    mock.reset()
    talk = Talk(lambda *_: people(row(1, 0.5), row(2, 1.9)), mock, sweep_min_age="0")
    assert swept(talk) == ["1", "2"]


def test_the_sweep_stops_at_the_first_older_row(mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: people(row(1, 10), row(2, 119), row(3, 121), row(4, 9000), next="more"), mock)
    assert swept(talk) == ["1", "2"]
    assert len(talk.calls) == 1
    assert talk.calls[0][2] == {
        "limit": "100",
        "sort": "-created",
        "createdAfter": "2026-04-05 07:20:00",  # a day before, since its time zone is not documented
        "fields": "id,created,assignedUserId,assignedPondId",
    }


def test_changes_are_asked_for_with_the_last_changed_first(mock: responses.RequestsMock) -> None:
    def changed(ref: int, minutes: float) -> dict[str, Any]:
        return row(ref, 99_999, updated=(NOW - dt.timedelta(minutes=minutes)).isoformat())

    def found(talk: Talk) -> list[str]:
        return [ref for page in FUB.changed_since(talk.client, SINCE, UnassignedDefinition()) for ref in page]

    talk = Talk(lambda *_: people(changed(9, 1), changed(2, 10), changed(7, 119), changed(3, 121), next="more"), mock)
    assert found(talk) == ["2", "7"]  # the youngest is left to its webhook, and the page beyond is not asked for
    assert [query for *_, query in talk.calls] == [
        {
            "limit": "100",
            "sort": "-updated",
            "updatedAfter": "2026-04-05 07:20:00",
            "fields": "id,updated,assignedUserId,assignedPondId",
        }
    ]
    mock.reset()
    pages = {"": people(changed(9, 9000), changed(8, 10), next="t"), "t": people(changed(7, 9000), changed(6, 20))}
    talk = Talk(lambda _, __, query: pages[query.get("next", "")], mock)  # a server that lists them by their ids
    assert found(talk) == ["8", "6"]


def test_a_row_without_a_time_is_looked_at(mock: responses.RequestsMock) -> None:
    assert swept(Talk(lambda *_: people({"id": 1}), mock)) == ["1"]


def test_the_sweep_asks_for_ponds_and_offers_that_count(mock: responses.RequestsMock) -> None:
    def answer(_: str, path: str, query: dict[str, str]) -> Any:
        if path == "/people/unclaimed":
            return people(row(3, 5, assignedUserId=12), row(4, 500), row(1, 20))
        return people(row(1, 20, assignedPondId=7), row(2, 30, assignedPondId=8))

    talk = Talk(answer, mock)
    assert swept(talk, pond_refs=frozenset({"7"}), include_unclaimed=True) == ["1", "3"]
    assert [(path, query.get("assignedPondId")) for _, path, query in talk.calls] == [
        ("/people", None),
        ("/people", "7"),
        ("/people/unclaimed", None),
    ]
    assert swept(talk) == []


def test_the_sweep_finds_offers_only_when_they_count() -> None:
    with kit("followupboss").running() as running:
        running.fake.add_leads(LeadRow("7777"), LeadRow("1", owner="12"))
        for include, expected in ((False, []), (True, [["7777"]])):
            definition = UnassignedDefinition(include_unclaimed=include)
            assert list(FUB.unassigned_since(running.client, SINCE, definition)) == expected
        assert FUB.fetch_leads(running.client, ["7777"])["7777"].unclaimed


# -- hooks and checks -----------------------------------------------------------------------------------------------


def test_only_https_is_subscribed(mock: responses.RequestsMock) -> None:
    talk = Talk(lambda *_: pytest.fail("called"), mock)
    left = FUB.subscribe(talk.client, "http://hooks.example.com/hooks/token")
    assert left.hooks == ()
    assert "TURNLOCK_PUBLIC_URL" in left.by_hand[0]


def test_a_crm_that_is_itself_spoken_to_over_http_may_call_over_http() -> None:
    with kit("followupboss").running() as running:
        assert len(FUB.subscribe(running.client, "http://127.0.0.1:8080/hooks/token").hooks) == 4


def test_a_full_topic_is_told_and_the_others_stand() -> None:
    with kit("followupboss").running() as running:
        running.fake.add_hook("peopleUpdated", "https://one.example.com/hooks/a")
        running.fake.add_hook("peopleUpdated", "https://two.example.com/hooks/b")
        left = FUB.subscribe(running.client, HOOK)
        assert [h.topic for h in left.hooks] == ["peopleCreated", "peopleDeleted", "eventsCreated"]
        assert len(left.by_hand) == 1
        assert left.by_hand[0].startswith("peopleUpdated: ")
        assert len(running.fake.hooks) == 5


def test_a_key_that_is_not_the_owners() -> None:
    with kit("followupboss").running() as running:
        handle = running.server.handle

        def as_agent(asked: Received) -> Reply:
            if asked.path == "/webhooks":
                return Reply(403, {"errorMessage": "owner only"})
            if asked.path == "/identity":
                return Reply(body={"account": {"id": 44}, "user": {"isOwner": False}})
            return handle(asked)

        running.server.handle = as_agent
        with pytest.raises(CrmError) as caught:
            FUB.subscribe(running.client, HOOK)
        assert caught.value.outcome is Outcome.FORBIDDEN
        findings = {f.where: f for f in FUB.check(running.client, HOOK)}
        assert (findings["key"].ok, findings["key"].fix) == (False, "connect with the API key of the owner")
        assert (findings["hooks"].ok, findings["hooks"].what) == (False, "403")
        assert findings["account"].ok
        assert "/me" not in {r.path for r in running.server.received}


def test_groups_and_teams_without_an_active_agent_and_the_whole_company_are_no_queues() -> None:
    groups = [
        {"id": 3, "name": "Austin", "type": "Agent", "users": [{"id": 12}, {"id": 13}]},
        {"id": 4, "name": "Lenders", "type": "Lender", "users": [{"id": 15}]},
    ]
    everybody = {"id": 1, "name": "Company", "userIds": [12, 13, 15], "leaderIds": []}
    teams = [everybody, {"id": 4, "name": "North", "userIds": [13, 12], "leaderIds": [99]}]
    with kit("followupboss").running() as running:
        running.fake.add_agents(AgentRow("12"), AgentRow("13", active=False))
        handle = running.server.handle

        def answer(asked: Received) -> Reply:
            rows = {"/groups": groups, "/teams": teams}.get(asked.path)
            name = asked.path.strip("/")
            return handle(asked) if rows is None else Reply(body={"_metadata": {"collection": name}, name: rows})

        running.server.handle = answer
        found = list(FUB.list_teams(running.client))
        assert [(t.ref, t.name, t.agent_refs) for t in found] == [
            ("3", "Austin", ("12",)),
            ("team-4", "North", ("12",)),
        ]
        groups.clear()
        teams.clear()  # a plan without teams answers an empty list
        assert list(FUB.list_teams(running.client)) == []
