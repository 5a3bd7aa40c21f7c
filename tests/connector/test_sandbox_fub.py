"""The sandbox's Follow Up Boss face over real sockets."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import requests

from connector.sandbox import Sandbox
from connector.sandbox.fub_hooks import sign as fub_sign
from connector.sandbox.limits import Windows
from tests.connector import sandbox_rig
from tests.connector.sandbox_rig import ACCOUNT, ANA, BEN, CY, DEE, ELI, OWNER, POND, Api, Receiver, until

api, receiver, sandbox = sandbox_rig.api, sandbox_rig.receiver, sandbox_rig.sandbox


def test_fub_identity_and_who_may_ask(api: Api, sandbox: Sandbox) -> None:
    body = api.fub("GET", "/identity").json()
    assert body["account"] == {
        "id": ACCOUNT.id,
        "domain": "acmehomes",
        "owner": {"name": "Olive Owner", "email": "olive.owner@example.com"},
    }
    assert (body["user"]["id"], body["user"]["isOwner"]) == (OWNER, True)
    bare = requests.get(sandbox.fub_url + "/identity", timeout=5)
    assert bare.status_code == 401
    assert bare.headers["WWW-Authenticate"] == 'Basic realm="Follow Up Boss API"'
    assert bare.json()["errorMessage"].startswith("Authentication is required. Use Basic HTTP Authentication")
    for wrong in (
        "Basic " + base64.b64encode(b"nobody:").decode(),
        "Basic " + base64.b64encode(f"{ACCOUNT.api_key}:x".encode()).decode(),
        "Basic ###",
        f"Bearer {ACCOUNT.api_key}",
    ):
        answer = requests.get(sandbox.fub_url + "/identity", headers={"Authorization": wrong}, timeout=5)
        assert (answer.status_code, list(answer.json())) == (401, ["errorMessage"]), wrong
    assert api.fub("GET", "/nothing").status_code == 404
    assert api.fub("DELETE", "/users").status_code == 405


def test_fub_shows_a_person(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead(
        name="Lena Leadman",
        zip="78701",
        tags=["VIP"],
        custom={"budget": 5},
        language="Spanish",
        phones=["(555) 010-1234"],
    )
    short = api.fub("GET", f"/people/{lead}").json()
    assert (short["name"], short["firstName"], short["assignedUserId"], short["tags"]) == (
        "Lena Leadman",
        "Lena",
        None,
        ["VIP"],
    )
    assert not {"customBudget", "addresses", "collaborators"} & set(short)
    whole = api.fub("GET", f"/people/{lead}?fields=allFields").json()
    assert whole["customBudget"] == 5
    assert whole["customPreferredLanguage"] == "Spanish"
    assert whole["addresses"][0]["code"] == "78701"
    assert whole["phones"][0]["normalized"] == "5550101234"
    assert set(api.fub("GET", f"/people/{lead}?fields=stage,tags").json()) == {"id", "stage", "tags"}
    assert "customBudget" in api.fub("GET", f"/people/{lead}?fields=allCustom").json()
    missing = api.fub("GET", "/people/99")
    assert (missing.status_code, list(missing.json())) == (404, ["errorMessage"])
    assert api.fub("GET", f"/people/{lead}", key=ACCOUNT.agent_key).status_code == 404  # an agent sees only their own
    sandbox.set_owner(lead, ANA)
    assert api.fub("GET", f"/people/{lead}", key=ACCOUNT.agent_key).json()["assignedTo"] == "Ana Alvarez"


def test_fub_pages_to_the_end_whatever_arrives_meanwhile(api: Api, sandbox: Sandbox) -> None:
    leads = sandbox.create_leads(25)
    page = api.fub("GET", "/people").json()
    assert page["_metadata"]["limit"] == 10
    assert page["_metadata"]["total"] == 25
    seen = [row["id"] for row in page["people"]]
    while "next" in page["_metadata"]:
        sandbox.create_leads(3)
        assert page["_metadata"]["nextLink"].startswith(sandbox.fub_url + "/people?")
        page = api.session.get(page["_metadata"]["nextLink"], auth=(ACCOUNT.api_key, ""), timeout=5).json()
        seen += [row["id"] for row in page["people"]]
    assert seen == sorted(leads, reverse=True)
    assert [row["id"] for row in api.fub("GET", "/people?sort=id&offset=4&limit=2").json()["people"]] == leads[4:6]
    sandbox.create_leads(100)
    assert len(api.fub("GET", "/people?limit=500").json()["people"]) == 100
    for bad in ("offset=2001", "next=x", "sort=colour", "limit=many", "createdAfter=soon"):
        assert api.fub("GET", f"/people?{bad}").status_code == 400, bad


def test_fub_filters(api: Api, sandbox: Sandbox) -> None:
    def found(query: str) -> list[int]:
        return [row["id"] for row in api.fub("GET", f"/people?sort=id&{query}").json()["people"]]

    old = sandbox.create_lead(created=(datetime.now(UTC) - timedelta(hours=2)).isoformat())
    ponded, trash, offer, plain = (
        sandbox.create_lead(pond=POND),
        sandbox.create_lead(stage="Trash"),
        sandbox.create_lead(unclaimed=True),
        sandbox.create_lead(owner=BEN),
    )
    hour_ago = (datetime.now(UTC) - timedelta(hours=1)).strftime("%Y-%m-%d %H:%M:%S")
    assert found("") == [old, ponded, plain]
    assert found(f"createdAfter={hour_ago}") == [ponded, plain]
    assert found(f"createdBefore={hour_ago}") == [old]
    assert found(f"assignedPondId={POND}") == [ponded]
    assert found(f"assignedUserId={BEN}") == [plain]
    assert found(f"id={trash},{plain},77") == [plain]
    assert found(f"ids={old},{plain}") == [old, plain]
    assert found("includeTrash=true") == [old, ponded, trash, plain]
    assert found("includeUnclaimed=true") == [old, ponded, offer, plain]
    assert [row["id"] for row in api.fub("GET", "/people/unclaimed").json()["people"]] == [offer]


def test_fub_put(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead(pond=POND, source="Zillow", tags=["Buyer"])

    def put(body: Any, query: str = "") -> Any:
        return api.fub("PUT", f"/people/{lead}{query}", json=body)

    answer = put({"assignedUserId": CY})
    assert (answer.status_code, answer.json()["assignedUserId"], answer.json()["assignedPondId"]) == (200, CY, None)
    assert "customBeds" in answer.json()
    assert put({"assignedPondId": POND}).json()["assignedUserId"] is None
    assert put({"assignedTo": "Dee Davis"}).json()["assignedUserId"] == DEE
    assert put({"assignedUserId": None}).json()["assignedUserId"] is None
    assert put({"tags": ["Routed"]}, "?mergeTags=true").json()["tags"] == ["Buyer", "Routed"]
    assert put({"tags": ["Only"]}).json()["tags"] == ["Only"]
    assert put({"source": "Mine"}).json()["source"] == "Zillow"
    assert [row["id"] for row in put({"collaborators": [{"id": ELI}]}).json()["collaborators"]] == [ELI]
    for bad in (
        {"assignedUserId": 999},
        {"assignedUserId": "12"},
        {"assignedPondId": 1},
        {"colour": 1},
        {"tags": "x"},
        [],
    ):
        assert put(bad).status_code == 400, bad
    assert api.fub("PUT", f"/people/{lead}", data="{").status_code == 400
    assert api.fub("PUT", "/people/99", json={"assignedUserId": CY}).status_code == 404
    assert [(row["old"], row["new"], row["by"]) for row in sandbox.owner_log(lead=lead)] == [
        (None, CY, "api"),
        (CY, None, "api"),
        (None, DEE, "api"),
        (DEE, None, "api"),
    ]


def test_fub_deleted_user_as_owner_is_accepted_emptied_or_refused(api: Api, sandbox: Sandbox) -> None:
    sandbox.deactivate_agent(BEN)
    for mode, status, owner in (("accept", 200, BEN), ("empty", 200, None), ("refuse", 400, ANA)):
        sandbox.configure(fub_inactive=mode)
        lead = sandbox.create_lead(owner=ANA)
        assert api.fub("PUT", f"/people/{lead}", json={"assignedUserId": BEN}).status_code == status
        assert sandbox.lead(lead)["owner"] == owner


def test_fub_users_and_ponds(api: Api, sandbox: Sandbox) -> None:
    sandbox.deactivate_agent(BEN)
    sandbox.pause_agent(CY)
    for number in range(10):
        sandbox.add_agent(f"Extra {number}")
    assert len(api.fub("GET", "/users").json()["users"]) == 10
    everyone = api.fub("GET", "/users?limit=100&includeDeleted=true&sort=id").json()["users"]
    assert [row["id"] for row in everyone[:6]] == [OWNER, ANA, BEN, CY, DEE, ELI]
    assert [row["status"] for row in everyone[:4]] == ["Active", "Active", "Deleted", "Active"]
    assert [row["id"] for row in everyone if row["pauseLeadDistribution"]] == [CY]
    assert everyone[1]["timezone"] == "America/Chicago"
    assert BEN not in [row["id"] for row in api.fub("GET", "/users?limit=100").json()["users"]]
    assert [row["id"] for row in api.fub("GET", "/users?role=Broker").json()["users"]] == [OWNER]
    assert api.fub("GET", f"/users/{BEN}").json()["status"] == "Deleted"
    assert api.fub("GET", "/users/999").status_code == 404
    assert api.fub("GET", "/ponds").json()["ponds"][0]["users"][0] == {"id": ANA, "name": "Ana Alvarez"}
    assert api.fub("GET", f"/ponds/{POND}").json()["name"] == "Shared pond"


def test_fub_notes_and_events(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()
    note = {"personId": lead, "subject": "Lead routed", "body": "Assigned to Ana. [tl:1]", "isHtml": False}
    assert api.fub("POST", "/notes", json=note).status_code == 201
    assert api.fub("POST", "/notes", json={"personId": lead}).status_code == 400
    assert api.fub("POST", "/notes", json={**note, "personId": 99}).status_code == 404
    shown = api.fub("GET", f"/notes?personId={lead}").json()
    assert shown["_metadata"]["collection"] == "notes"
    assert [(row["subject"], row["body"]) for row in shown["notes"]] == [("Lead routed", "Assigned to Ana. [tl:1]")]
    inquiry = sandbox.add_inquiry(lead, type="Property Inquiry", message="Is it sold?", property={"code": "78704"})
    assert api.fub("GET", f"/events/{inquiry}").json()["personId"] == lead
    assert [row["property"] for row in api.fub("GET", f"/events?personId={lead}").json()["events"]] == [
        {"code": "78704"}
    ]
    sandbox.delete_leads([lead])
    assert api.fub("GET", f"/events/{inquiry}").status_code == 404
    assert api.fub("GET", f"/notes?personId={lead}").status_code == 404


def test_fub_hooks(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    body = {"event": "peopleCreated", "url": "https://hooks.example.com/a"}
    assert api.fub("POST", "/webhooks", system=False, json=body).status_code == 403
    assert api.fub("POST", "/webhooks", headers={"X-System-Key": "wrong"}, json=body).status_code == 403
    assert api.fub("POST", "/webhooks", key=ACCOUNT.agent_key, json=body).status_code == 403
    first = api.fub("POST", "/webhooks", json=body)
    assert (first.status_code, first.json()["status"], first.json()["url"]) == (201, "Active", body["url"])
    assert api.fub("POST", "/webhooks", json={**body, "url": receiver.url}).status_code == 201
    assert api.fub("POST", "/webhooks", json=body).status_code == 400  # two per event and system
    other = {"event": "peopleUpdated", "url": "https://hooks.example.com/a"}
    for bad in (
        {"event": "peopleEaten"},
        {"url": "http://hooks.example.com/a"},
        {"url": "https://[x"},
        {"status": "Odd"},
    ):
        assert api.fub("POST", "/webhooks", json={**other, **bad}).status_code == 400, bad
    number = first.json()["id"]
    assert api.fub("PUT", f"/webhooks/{number}", json={"status": "Disabled"}).json()["status"] == "Disabled"
    assert [row["id"] for row in api.fub("GET", "/webhooks?status=Disabled").json()["webhooks"]] == [number]
    assert api.fub("DELETE", f"/webhooks/{number}").status_code == 200
    assert api.fub("GET", f"/webhooks/{number}").status_code == 404
    lead = sandbox.create_lead()
    assert sandbox.wait_idle()
    event = receiver.bodies()[0]
    again = api.fub("GET", f"/webhookEvents/{event['eventId']}").json()
    assert (again["id"], again["event"], again["resourceIds"]) == (event["eventId"], "peopleCreated", [lead])
    assert api.fub("GET", "/webhookEvents/none").status_code == 404


def test_fub_signature_has_the_values_computed_elsewhere() -> None:
    key = "0123456789abcdef0123456789abcdef"
    body = (
        b'{"eventId":"152d60c0-79fc-4f75-bfa0-8ef2ef9de0f8","eventCreated":"2026-03-02T17:22:28+00:00",'
        b'"event":"peopleCreated","resourceIds":[40773],"uri":"https://api.followupboss.com/v1/people?id=40773"}'
    )
    assert fub_sign(body, key) == "aec4d875e55a74c31297ceda98e830e8f30c02129fdac961b21eff5ac2942c6f"
    escaped = body.replace(b"/", rb"\/")
    assert fub_sign(escaped, key) == "4ef2204e9011586834f2dc7cda38f944fea72c2d6d528f22eb6c043f1e5d7aa2"


def test_fub_tells_every_change_once_in_order_and_signed(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    api.subscribe(receiver, "peopleCreated", "peopleUpdated", "peopleDeleted", "peopleTagsCreated", "eventsCreated")
    sandbox.configure(concurrency=1, php_escapes=True)
    lead = sandbox.create_lead(tags=[])
    api.fub("PUT", f"/people/{lead}", json={"assignedUserId": ANA, "tags": ["Zoë"]})  # one call, one update: the echo
    api.fub("PUT", f"/people/{lead}", json={"assignedUserId": ANA})  # nothing changes: nothing is told
    inquiry = sandbox.add_inquiry(lead, type="Inquiry")
    sandbox.delete_leads([lead])
    assert sandbox.wait_idle()
    told = [(body["event"], body["resourceIds"]) for body in receiver.bodies()]
    assert told == [
        ("peopleCreated", [lead]),
        ("peopleUpdated", [lead]),
        ("peopleTagsCreated", [lead]),
        ("eventsCreated", [inquiry]),
        ("peopleDeleted", [lead]),
    ]
    for headers, raw in receiver.got:
        right = hmac.new(ACCOUNT.system_key.encode(), base64.b64encode(raw), hashlib.sha256).hexdigest()
        assert (headers["fub-signature"], headers["x-system"]) == (right, "Turnlock")
    assert rb"http:\/\/127" in receiver.got[0][1]
    assert rb"Zo\u00eb" in receiver.got[2][1]
    assert receiver.bodies()[2]["data"] == {"tags": ["Zoë"]}
    assert receiver.bodies()[4]["uri"] is None
    sandbox.configure(php_escapes=False)
    sandbox.create_lead()
    assert sandbox.wait_idle()
    assert b"http://127" in receiver.got[5][1]


def test_bulk_changes_are_told_together(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    api.subscribe(receiver, "peopleCreated", "peopleUpdated")
    api.generic("POST", "/hooks", {"url": receiver.url, "topics": ["lead.updated"]})
    sandbox.configure(concurrency=1)
    leads = sandbox.create_leads(250, stage="Lead")
    assert sandbox.wait_idle()
    assert [body["resourceIds"] for body in receiver.bodies()] == [leads[:100], leads[100:200], leads[200:]]
    assert len({body["eventId"] for body in receiver.bodies()}) == 3
    receiver.got.clear()
    assert sandbox.edit_leads(leads[:3], owner=ANA) == 3
    sandbox.deactivate_agent(ANA, assign_to=BEN)
    assert sandbox.wait_idle()
    fub, generic = receiver.bodies()[0], receiver.bodies()[1]
    assert (fub["event"], fub["resourceIds"]) == ("peopleUpdated", leads[:3])
    assert (generic["type"], len(generic["data"]["leads"])) == ("lead.updated", 3)
    assert receiver.bodies()[2]["resourceIds"] == leads[:3]
    assert sandbox.lead(leads[0])["owner"] == BEN


def test_rate_limits(api: Api, sandbox: Sandbox) -> None:
    sandbox.configure(limits=True, limit_people=3, limit_notes=2, limit_events=4, rate_window=1.0, limit_generic=2)
    lead = sandbox.create_lead()

    def put() -> Any:
        return api.fub("PUT", f"/people/{lead}", json={"assignedUserId": ANA})

    started = time.monotonic()
    first = put()
    assert {key: first.headers[f"X-RateLimit-{key}"] for key in ("Limit", "Remaining", "Window", "Context")} == {
        "Limit": "3",
        "Remaining": "2",
        "Window": "1",
        "Context": "people",
    }
    assert [put().status_code for _ in range(3)] == [200, 200, 429]
    refused = api.fub("PUT", f"/people/{lead}", json={"assignedUserId": BEN})
    assert (refused.status_code, refused.headers["Retry-After"], list(refused.json())) == (429, "1", ["errorMessage"])
    assert sandbox.lead(lead)["owner"] == ANA  # a refused call is not done
    assert api.fub("GET", "/identity").headers["X-RateLimit-Limit"] == "250"  # contexts do not eat each other
    assert api.fub("GET", "/identity", system=False).headers["X-RateLimit-Limit"] == "125"
    events = f"/events?personId={lead}"
    assert [api.fub("GET", events, system=False).status_code for _ in range(3)] == [200, 200, 429]
    note = {"personId": lead, "body": "x"}
    assert [api.fub("POST", "/notes", json=note).status_code for _ in range(3)] == [201, 201, 429]
    assert [api.generic("GET", "/account").status_code for _ in range(3)] == [200, 200, 429]
    assert api.generic("GET", "/account").headers["Retry-After"] == "1"
    until(lambda: put().status_code == 200)
    assert time.monotonic() - started >= 1.0  # not before the first call has left the window


def test_the_window_slides() -> None:
    windows = Windows()
    assert windows.take("a", 2, 10.0, 0.0) == (1, 0.0)
    assert windows.take("a", 2, 10.0, 6.0) == (0, 0.0)
    assert windows.take("a", 2, 10.0, 7.0) == (0, 3.0)
    assert windows.take("b", 2, 10.0, 7.0) == (1, 0.0)
    assert windows.take("a", 2, 10.0, 10.0) == (0, 0.0)  # only the first has left
    assert windows.take("a", 2, 10.0, 15.0) == (0, 1.0)
