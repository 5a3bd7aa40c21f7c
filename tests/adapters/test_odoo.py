"""Odoo: every captured delivery and answer, errors inside a 200, and what is told before it is stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import responses

from adapters.base import Capability, Credentials, EventKind, WebhookRequest
from adapters.client import Client, CrmError, Outcome
from adapters.odoo import Odoo
from routing.model import AgentSeen, Lead, UnassignedDefinition
from tests.adapters.captured import BASE, Captures, exact, sent

CRM = Odoo()
CAPTURED = Captures(CRM)
DELIVERIES, ANSWERS = CAPTURED.names("wh"), CAPTURED.names("api")
NOW = datetime(2026, 11, 29, 15, 30, tzinfo=UTC)
HOOK = "https://hooks.example.com/hooks/token"
ANA, BEN, CY, ROUTER = "7", "8", "9", "6"
CREDENTIALS = Credentials({"database": "odoo18", "login": "router"}, {"api_key": "k"})


@pytest.fixture
def mock() -> Iterator[responses.RequestsMock]:
    with responses.RequestsMock() as made:
        yield made


@pytest.fixture
def client() -> Iterator[Client]:
    with CAPTURED.client(CREDENTIALS, NOW) as made:
        made.learnt |= {"uid": 6, "fields": ["id", "name", "user_id"], "truths": frozenset({"x_pool"})}
        yield made


# -- deliveries ------------------------------------------------------------------------------------------------------

CREATED, CHANGED = EventKind.LEAD_CREATED, EventKind.LEAD_CHANGED
TOLD = {
    "wh0023": (CREATED, "2"), "wh0046": (CREATED, "3"), "wh0129": (CREATED, "5"), "wh0151": (CREATED, "6"),
    "wh0177": (CREATED, "7"), "wh0178": (CREATED, "8"), "wh0179": (CREATED, "9"), "wh0239": (CREATED, "10"),
    "wh0284": (CREATED, "11"), "wh0326": (CREATED, "12"), "wh0327": (CREATED, "12"), "wh0328": (CHANGED, "12"),
    "wh0329": (CHANGED, "12"), "wh0330": (CREATED, "13"), "wh0331": (CREATED, "13"), "wh0332": (CHANGED, "13"),
    "wh0333": (CREATED, "14"), "wh0334": (CREATED, "14"), "wh0335": (CHANGED, "14"),
}  # fmt: skip


def test_every_capture_is_looked_at() -> None:
    assert set(TOLD) == set(DELIVERIES)
    assert len(ANSWERS) == 72
    assert {name.partition("_")[0] for name in ANSWERS} >= set(OUTCOMES)


@pytest.mark.parametrize("name", DELIVERIES)
def test_captured_deliveries(name: str) -> None:
    request, came = CAPTURED.delivery(name)
    CRM.verify(request, [], came)
    (event,) = CRM.parse(request)
    assert (event.kind, event.ref) == TOLD[name]
    assert (event.key, event.key_is_final, event.lead) == (f"lead:{event.ref}", False, None)
    assert event.occurred_at is not None
    assert timedelta(0) <= came - event.occurred_at < timedelta(seconds=3)


def test_two_rules_that_tell_of_one_lead_are_one_reason_to_read() -> None:
    keys = {event.key for name in ("wh0326", "wh0327") for event in CRM.parse(CAPTURED.delivery(name)[0])}
    assert len(keys) == 1


def test_what_a_delivery_told_was_not_to_be_read_yet(client: Client, mock: responses.RequestsMock) -> None:
    (race,) = json.loads((CAPTURED.folder / "race_readback_during_delivery.json").read_text())
    (event,) = CRM.parse(WebhookRequest("POST", HOOK, {}, json.dumps(race["webhook_body"]).encode()))
    result = {"jsonrpc": "2.0", "id": 1, "result": race["read_back_during_delivery"]}
    mock.add("POST", f"{BASE}/jsonrpc", json=result)
    assert event.ref is not None
    assert CRM.fetch_leads(client, [event.ref]) == {}
    assert CRM.missing_is_final_after > CRM.settle > 0  # so it is read a moment later, and again for a minute


@pytest.mark.parametrize("change", [{"write_date": False}, {"write_date": "soon"}, {"create_date": 7}])
def test_an_odd_time_harms_nobody(change: dict[str, Any]) -> None:
    body = json.loads(CAPTURED.delivery("wh0329")[0].body) | change
    (event,) = CRM.parse(WebhookRequest("POST", HOOK, {}, json.dumps(body).encode()))
    assert (event.kind, event.ref) == (CHANGED, "12")


def test_other_records_are_ignored() -> None:
    body = json.loads(CAPTURED.delivery("wh0329")[0].body) | {"_model": "res.partner"}
    (event,) = CRM.parse(WebhookRequest("POST", HOOK, {}, json.dumps(body).encode()))
    assert event.kind is EventKind.UNKNOWN


# -- answers ---------------------------------------------------------------------------------------------------------

# What is not simply done, by the number of the capture. All but one are 200.
OUTCOMES = {
    "api40": Outcome.REFUSED,
    "api41": Outcome.REFUSED,
    "api43": Outcome.GONE,
    "api44": Outcome.GONE,  # of a user, which only an owner write can tell
    "api47": Outcome.REFUSED,
    "api48": Outcome.REFUSED,
    "api49": Outcome.REAUTHORISE,
    "api50": Outcome.FORBIDDEN,
    "api52": Outcome.REFUSED,  # 400
    "api94": Outcome.GONE,
}


@pytest.mark.parametrize("name", ANSWERS)
def test_captured_answers_have_their_outcome(name: str, client: Client, mock: responses.RequestsMock) -> None:
    from adapters import odoo_rpc

    found = CAPTURED.answer(mock, name)
    outcome = OUTCOMES.get(name.partition("_")[0])
    asked = found["request"]["body"]
    params = asked["params"] if isinstance(asked, dict) else {"service": "x", "method": "x", "args": []}

    def call() -> Any:
        return odoo_rpc.call(client, params["service"], params["method"], params["args"], write=True)[1]

    if outcome is None:
        assert call() == exact(found["response"]["result"])
        assert sent(mock)["params"] == params
        return
    with pytest.raises(CrmError) as caught:
        call()
    assert (caught.value.outcome, caught.value.status) == (outcome, found["status"])
    assert "Traceback" not in f"{caught.value} {caught.value!r} {caught.value.args}"


@pytest.mark.parametrize(
    ("name", "status", "outcome"),
    [
        ("psycopg2.errors.SerializationFailure", 200, Outcome.NOT_SENT),
        ("odoo.exceptions.RedirectWarning", 200, Outcome.REFUSED),
        ("", 200, Outcome.REFUSED),
        ("odoo.exceptions.AccessError", 500, Outcome.UNKNOWN),  # a proxy speaks, whatever stands behind it
    ],
)
def test_an_error_that_was_not_captured(
    name: str, status: int, outcome: Outcome, client: Client, mock: responses.RequestsMock
) -> None:
    mock.add("POST", f"{BASE}/jsonrpc", json={"error": {"data": {"name": name}}}, status=status)
    with pytest.raises(CrmError) as caught:
        CRM.set_owner(client, Lead(ref="2"), ANA)
    assert caught.value.outcome is outcome


@pytest.mark.parametrize("result", [False, None, "6", 0])
def test_a_login_that_is_refused_asks_for_new_credentials(result: Any, mock: responses.RequestsMock) -> None:
    mock.add("POST", f"{BASE}/jsonrpc", json={"jsonrpc": "2.0", "id": 1, "result": result})
    with CAPTURED.client(CREDENTIALS, NOW) as client, pytest.raises(CrmError) as caught:
        CRM.fetch_leads(client, ["2"])
    assert caught.value.outcome is Outcome.REAUTHORISE
    assert len(mock.calls) == 1


def test_a_database_that_is_not_there_is_the_admins_to_correct(mock: responses.RequestsMock) -> None:
    told = {"name": "psycopg2.OperationalError", "message": 'connection failed: FATAL:  database "x" does not exist\n'}
    mock.add("POST", f"{BASE}/jsonrpc", json={"error": {"data": told}})
    with CAPTURED.client(CREDENTIALS, NOW) as client, pytest.raises(CrmError) as caught:
        list(CRM.list_agents(client))
    assert caught.value.outcome is Outcome.REAUTHORISE
    assert "database" in caught.value.text


def test_the_login_is_asked_for_once(mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api03")
    CAPTURED.answer(mock, "api39")
    with CAPTURED.client(CREDENTIALS, NOW) as client:
        for _ in range(3):
            list(CRM.list_agents(client))
    methods = [sent(mock, n)["params"]["method"] for n in range(len(mock.calls))]
    assert methods == ["authenticate", *["execute_kw"] * 3]


# -- leads and owners ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "owner"), [("api32", ROUTER), ("api34", None), ("api75", ANA), ("api80", CY)])
def test_owners_that_are_read(name: str, owner: str | None, client: Client, mock: responses.RequestsMock) -> None:
    found = CAPTURED.answer(mock, name)
    ref = str(found["response"]["result"][0]["id"])
    lead = CRM.fetch_leads(client, [ref])[ref]
    assert lead.owner_ref == owner
    # api32 was made through the API without an owner: it belongs to who made it, and a tenant may say that is nobody.
    assert UnassignedDefinition(frozenset({ROUTER})).covers(lead) == (owner in (None, ROUTER))
    assert lead.updated_at == datetime.fromisoformat(found["response"]["result"][0]["write_date"]).replace(tzinfo=UTC)


def test_every_field_of_a_lead_that_is_read(client: Client, mock: responses.RequestsMock) -> None:
    row = CAPTURED.load("api36")["response"]["result"][0] | {
        "contact_name": "Zoe Quill",
        "partner_name": "Quill GmbH",
        "email_from": "Zoe <Zoe.Quill@example.com>",
        "phone": "+49 30 1234567",
        "mobile": "555-0142",
        "street": "7 Oak Lane",
        "city": "Berlin",
        "state_id": [3, "Berlin (DE)"],
        "country_id": [57, "Germany"],
        "source_id": [2, "Newsletter"],
        "campaign_id": [1, "Spring"],
        "medium_id": [4, "Website"],
        "lang_id": [1, "English"],
        "team_id": [1, "Sales"],
        "expected_revenue": 25000.5,
        "tag_ids": [9, 4],
        "x_beds": 3,
        "x_pool": False,
        "x_note": False,
    }
    tags = [{"id": 4, "name": "VIP"}, {"id": 9, "name": "Hot"}]
    for result in ([row], tags):
        mock.add("POST", f"{BASE}/jsonrpc", json={"jsonrpc": "2.0", "id": 1, "result": result})
    lead = CRM.fetch_leads(client, ["2"])["2"]
    expected = {
        "name": "Zoe Quill",
        "owner_ref": None,
        "emails": ("zoe.quill@example.com",),
        "phones": ("+49301234567", "5550142"),
        "street": "7 Oak Lane",
        "city": "Berlin",
        "state": "Berlin (DE)",
        "zip": "10115",
        "country": "Germany",
        "source": "Newsletter",
        "campaign": "Spring",
        "language": "English",
        "type": "lead",
        "stage": "New",
        "tags": ("Hot", "VIP"),
        "custom": {"team": "Sales", "medium": "Website", "company": "Quill GmbH", "x_beds": 3, "x_pool": False},
        "created_at": datetime(2026, 11, 29, 15, 28, 31, tzinfo=UTC),
    }
    assert {name: getattr(lead, name) for name in expected} == expected
    assert str(lead.price) == "25000.5"


def test_only_fields_that_this_odoo_has_are_asked_for(client: Client, mock: responses.RequestsMock) -> None:
    client.learnt.pop("fields")
    kinds = {"user_id": {"type": "many2one"}, "zip": {"type": "char"}, "x_beds": {"type": "integer"},
             "x_pool": {"type": "boolean"},
             "x_links": {"type": "many2many"}, "message_ids": {"type": "one2many"}}  # fmt: skip
    for result in (kinds, []):
        mock.add("POST", f"{BASE}/jsonrpc", json={"jsonrpc": "2.0", "id": 1, "result": result})
    CRM.fetch_leads(client, ["2"])
    assert sent(mock, 1)["params"]["args"][6]["fields"] == ["id", "zip", "user_id", "x_beds", "x_pool"]
    assert client.learnt["truths"] == {"x_pool"}  # of all other fields false says that they are empty


@pytest.mark.parametrize("result", [[], {"user_id": 7}, {"zip": {"type": "char"}}, None, True])
def test_odd_fields_are_no_fault_of_ours(result: Any, client: Client, mock: responses.RequestsMock) -> None:
    client.learnt.pop("fields")
    mock.add("POST", f"{BASE}/jsonrpc", json={"jsonrpc": "2.0", "id": 1, "result": result})
    with pytest.raises(CrmError) as caught:
        CRM.fetch_leads(client, ["2"])
    assert caught.value.outcome is Outcome.ANSWER_UNREADABLE


def test_a_field_that_went_is_asked_for_once_only(client: Client, mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api47")
    with pytest.raises(CrmError):
        CRM.fetch_leads(client, ["2"])
    assert "fields" not in client.learnt


def test_an_owner_that_is_not_shown_is_never_nobody(client: Client, mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api34", lambda body: {"result": [{"id": 2, "name": "x"}]})
    with pytest.raises(CrmError) as caught:
        CRM.fetch_leads(client, ["2"])
    assert caught.value.outcome is Outcome.ANSWER_UNREADABLE


@pytest.mark.parametrize("name", ["api73", "api74", "api79"])
def test_an_owner_write_is_the_one_that_was_captured(name: str, client: Client, mock: responses.RequestsMock) -> None:
    found = CAPTURED.answer(mock, name)
    (lead_id,), values = found["request"]["body"]["params"]["args"][5]
    written = CRM.set_owner(client, Lead(ref=str(lead_id)), str(values["user_id"]))
    assert sent(mock)["params"]["args"][3:6] == found["request"]["body"]["params"]["args"][3:6]
    # The archived user of api79 was accepted as well: whoever asked reads agent and lead again.
    assert (written.owner_ref, written.conflict) == (None, False)
    assert Capability.WRITE_ANSWERS_OWNER not in CRM.capabilities


@pytest.mark.parametrize("ref", ["nope", "", "7.0", "-7", "²"])
def test_an_owner_that_is_no_number_is_never_sent(ref: str, client: Client, mock: responses.RequestsMock) -> None:
    with pytest.raises(CrmError) as caught:  # Odoo answers true to it and clears the owner (api77, api78)
        CRM.set_owner(client, Lead(ref="11"), ref)
    assert caught.value.outcome is Outcome.REFUSED
    assert len(mock.calls) == 0


@pytest.mark.parametrize(
    ("name", "outcome"), [("api43", Outcome.GONE), ("api44", Outcome.REFUSED), ("api94", Outcome.REFUSED)]
)
def test_it_is_told_whether_lead_or_agent_is_missing(
    name: str, outcome: Outcome, client: Client, mock: responses.RequestsMock
) -> None:
    CAPTURED.answer(mock, name)
    with pytest.raises(CrmError) as caught:
        CRM.set_owner(client, Lead(ref="3"), "999999")
    assert caught.value.outcome is outcome


@pytest.mark.parametrize(("address", "outcome"), [(False, Outcome.FORBIDDEN), ("r@x.example", Outcome.REFUSED)])
def test_a_user_without_an_address_is_the_admins_to_mend(
    address: Any, outcome: Outcome, client: Client, mock: responses.RequestsMock
) -> None:
    CAPTURED.answer(mock, "api40")
    router = {"id": 6, "login": "router", "name": "Router", "email": address, "active": True, "tz": False}
    mock.add("POST", f"{BASE}/jsonrpc", json={"jsonrpc": "2.0", "id": 1, "result": [router]})
    with pytest.raises(CrmError) as caught:
        CRM.set_owner(client, Lead(ref="2"), ANA)
    assert caught.value.outcome is outcome
    assert ("e-mail address" in caught.value.text) == (outcome is Outcome.FORBIDDEN)


@pytest.mark.parametrize(("address", "outcome"), [(False, Outcome.FORBIDDEN), ("r@x.example", Outcome.REFUSED)])
def test_a_note_of_a_user_without_an_address_is_the_admins_to_mend(
    address: Any, outcome: Outcome, client: Client, mock: responses.RequestsMock
) -> None:
    CAPTURED.answer(mock, "api40")
    mock.add("POST", f"{BASE}/jsonrpc", json={"result": [{"id": 6, "email": address}]})
    with pytest.raises(CrmError) as caught:
        CRM.add_note(client, "2", "Why", "<b>Ana</b>")
    assert caught.value.outcome is outcome
    model, method, args, said = sent(mock)["params"]["args"][3:]
    assert (model, method, args) == ("crm.lead", "message_post", [[2]])
    assert said == {
        "body": "<strong>Why</strong><br>&lt;b&gt;Ana&lt;/b&gt;",
        "body_is_html": True,
        "message_type": "comment",
        "subtype_xmlid": "mail.mt_note",  # internal: nobody is sent a message
    }


def test_followers_are_partners_and_only_those_who_are_users_count(
    client: Client, mock: responses.RequestsMock
) -> None:
    def lead(owner: Any, partners: list[int]) -> dict[str, Any]:
        return {"result": [{"id": 2, "user_id": owner, "message_partner_ids": partners}]}

    users = [{"id": 7, "partner_id": [71, "Ana"]}, {"id": 8, "partner_id": [81, "Ben"]}]
    for answer in (lead([7, "Ana"], [71, 81, 99]), {"result": users}, lead(False, [81]), lead(False, [])):
        mock.add("POST", f"{BASE}/jsonrpc", json=answer)
    read = [CRM.fetch_leads(client, ["2"])["2"] for _ in range(3)]
    assert [lead.collaborator_refs for lead in read] == [(BEN,), (BEN,), ()]
    assert sent(mock, 1)["params"]["args"][5] == [[["partner_id", "in", [71, 81, 99]]]]
    assert len(mock.calls) == 4  # a partner who was found to be a user is not asked for again


@pytest.mark.parametrize(("ref", "asked"), [("999", 1), ("nope", 0)])
def test_who_is_no_user_is_no_collaborator(ref: str, asked: int, client: Client, mock: responses.RequestsMock) -> None:
    if asked:
        mock.add("POST", f"{BASE}/jsonrpc", json={"result": []})
    with pytest.raises(CrmError) as caught:
        CRM.add_collaborator(client, Lead(ref="2"), ref)
    assert caught.value.outcome is Outcome.REFUSED
    assert len(mock.calls) == asked


# -- lists -----------------------------------------------------------------------------------------------------------


def test_agents_are_internal_users_archived_or_not(client: Client, mock: responses.RequestsMock) -> None:
    CAPTURED.answer(mock, "api39")
    found = {agent.ref: agent for agent in CRM.list_agents(client)}
    assert {ref for ref, agent in found.items() if not agent.active} == {"1", "3", CY}
    assert found[ANA] == AgentSeen(ref=ANA, name="Ana", email="ana@agents.example", active=True)
    assert sent(mock)["params"]["args"][6]["context"] == {"active_test": False}


def test_the_sweep_goes_on_behind_the_last_number(client: Client, mock: responses.RequestsMock) -> None:
    first = [{"id": n, "user_id": False, "create_date": "2026-11-29 15:28:31"} for n in range(1, 101)]
    first[5]["user_id"] = [7, "Ana"]
    first[6]["create_date"] = "2026-11-29 15:28:30"
    for result in (first, [{"id": 101, "user_id": False, "create_date": "2026-11-29 15:29:00"}]):
        mock.add("POST", f"{BASE}/jsonrpc", json={"jsonrpc": "2.0", "id": 1, "result": result})
    since = datetime(2026, 11, 29, 15, 28, 31, 900_000, tzinfo=UTC)  # the CRM cuts to seconds: not to be missed
    found = [ref for page in CRM.unassigned_since(client, since, UnassignedDefinition()) for ref in page]
    assert found == [str(n) for n in range(1, 102) if n not in (6, 7)]
    domains = [sent(mock, n)["params"]["args"][5][0] for n in (0, 1)]
    assert [domain[0] for domain in domains] == [["id", ">", 0], ["id", ">", 100]]
    assert domains[0][1:] == [
        ["create_date", ">=", "2026-11-29 15:28:31"],
        ["active", "=", True],
        ["probability", "<", 100],
        ["user_id", "=", False],
    ]


def test_changes_are_asked_for_as_they_were_captured(client: Client, mock: responses.RequestsMock) -> None:
    row = CAPTURED.load("api37")["response"]["result"][0] | {"user_id": False, "create_date": "2025-01-01 00:00:00"}
    CAPTURED.answer(
        mock, "api37", lambda body: {"result": [row, row | {"id": 99, "write_date": "2026-01-01 00:00:00"}]}
    )
    since = datetime.fromisoformat(row["write_date"]).replace(tzinfo=UTC) + timedelta(microseconds=1)
    assert list(CRM.changed_since(client, since, UnassignedDefinition())) == [[str(row["id"])]]
    theirs = CAPTURED.load("api37")["request"]["body"]["params"]["args"][5][0]
    assert ["write_date", ">=", row["write_date"]] in sent(mock)["params"]["args"][5][0]
    assert "write_date" in [condition[0] for condition in theirs]


# -- set-up ----------------------------------------------------------------------------------------------------------


def answering(mock: responses.RequestsMock, answers: Callable[[str, str, list[Any]], Any]) -> list[tuple[str, str]]:
    """Answer each call by its model and method; those that were made."""
    made: list[tuple[str, str]] = []

    def callback(request: Any) -> tuple[int, dict[str, str], str]:
        model, method, args = json.loads(request.body)["params"]["args"][3:6]
        made.append((model, method))
        found = answers(model, method, args)
        return 200, {}, json.dumps(found if isinstance(found, dict) else {"result": found})

    mock.add_callback("POST", f"{BASE}/jsonrpc", callback)
    return made


def test_a_rule_is_made_as_it_was_captured(client: Client, mock: responses.RequestsMock) -> None:
    rules: list[Any] = []

    def answers(model: str, method: str, args: list[Any]) -> Any:
        if method == "create":
            rules.append(args[0])
            return 3
        return [401] if model == "ir.model" else [3548] if method == "search" else []

    answering(mock, answers)
    left = CRM.subscribe(client, HOOK)
    assert [(h.hook_ref, h.topic, h.url, h.active) for h in left.hooks] == [("3", "owner_changed", HOOK, True)]
    captured = CAPTURED.load("api88")["request"]["body"]["params"]["args"][5][0]
    ours, theirs = rules[0]["action_server_ids"][0][2], captured["action_server_ids"][0][2]
    for same in ("trigger", "trigger_field_ids", "filter_domain", "model_id", "active"):
        assert rules[0][same] == captured[same]
    for same in ("state", "usage", "model_id"):
        assert ours[same] == theirs[same]
    assert set(ours) == set(theirs)


def test_a_rule_that_is_too_wide_is_replaced(client: Client, mock: responses.RequestsMock) -> None:
    wide = {"id": 2, "active": True, "trigger": "on_write", "trigger_field_ids": [], "action_server_ids": [236]}

    def answers(model: str, method: str, args: list[Any]) -> Any:
        if method == "search_read":
            return [{"id": 236, "webhook_url": HOOK}] if model == "ir.actions.server" else [wide]
        return {"unlink": True, "create": 3}.get(method, [401])

    made = answering(mock, answers)
    CRM.subscribe(client, HOOK)
    assert [method for _, method in made if method in ("unlink", "create")] == ["unlink", "create"]


def test_without_the_right_the_rule_is_made_by_hand(client: Client, mock: responses.RequestsMock) -> None:
    refused = CAPTURED.load("api50")["response"]
    answering(mock, lambda model, method, args: refused)
    left = CRM.subscribe(client, HOOK)
    assert left.hooks == ()
    (todo,) = left.by_hand
    for needed in (HOOK, "Administration: Settings", "On create and edit", "Salesperson", "Send Webhook"):
        assert needed in todo


def test_a_check_shows_the_missing_address_and_the_rule_that_it_may_not_see(
    client: Client, mock: responses.RequestsMock
) -> None:
    version, users, lead = (CAPTURED.load(name)["response"] for name in ("api01", "api39", "api34"))
    refused = CAPTURED.load("api50")["response"]
    answers = {"crm.lead": lead, "res.users": users, "ir.actions.server": refused, "mail.message": {"result": []}}
    users["result"] = [user for user in users["result"] if user["id"] == 6] + users["result"]

    def callback(request: Any) -> tuple[int, dict[str, str], str]:
        params = json.loads(request.body)["params"]
        found = version if params["method"] == "version" else answers[params["args"][3]]
        if found is users and ["id", "=", 6] in params["args"][5][0]:
            found = {"result": [{"id": 6, "email": False}]}
        return 200, {"Date": "Sun, 29 Nov 2026 15:30:00 GMT"}, json.dumps(found)

    mock.add_callback("POST", f"{BASE}/jsonrpc", callback)
    findings = {f.where: f for f in CRM.check(client, HOOK)}
    assert {where for where, f in findings.items() if not f.ok} == {"address"}
    assert "e-mail address" in findings["address"].fix
    assert "not visible" in findings["hooks"].what
