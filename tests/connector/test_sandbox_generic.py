"""The sandbox's generic face over real sockets, with the scheme's own library on the other side."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from standardwebhooks import Webhook

from connector.sandbox import Sandbox
from connector.sandbox.generic import sign as generic_sign
from tests.connector import sandbox_rig
from tests.connector.sandbox_rig import ACCOUNT, ANA, BEN, CY, DEE, ELI, POND, Api, Receiver

api, receiver, sandbox = sandbox_rig.api, sandbox_rig.receiver, sandbox_rig.sandbox


def test_generic_wants_a_signature(api: Api) -> None:
    lead = api.sandbox.create_lead()
    now = datetime.now(UTC)
    assert api.generic("GET", "/account").json()["id"] == str(ACCOUNT.id)
    good = Webhook(ACCOUNT.api_secret).sign("msg_1", now, "")
    assert api.generic("GET", "/account", at=now, headers={"webhook-signature": f"v1,AAAA {good}"}).status_code == 200
    for name, value in (
        ("webhook-signature", "v1,AAAA"),
        ("webhook-signature", good.replace("v1,", "v2,")),
        ("webhook-id", "msg_2"),
        ("webhook-id", None),
        ("webhook-timestamp", "now"),
        ("webhook-timestamp", str(int(now.timestamp()) - 1)),
    ):
        answer = api.generic("GET", "/account", at=now, headers={name: value})
        assert (answer.status_code, list(answer.json())) == (401, ["error"]), (name, value)
    for seconds, status in ((-310, 401), (-290, 200), (290, 200), (310, 401)):
        assert api.generic("GET", "/account", at=now + timedelta(seconds=seconds)).status_code == status, seconds
    with api.session.put(
        f"{api.sandbox.generic_url}/leads/{lead}/owner",
        data='{"owner":"13"}',
        headers={"webhook-id": "m", "webhook-timestamp": "1", "webhook-signature": "v1,AAAA"},
        timeout=5,
    ) as answer:
        assert answer.status_code == 401
    assert api.sandbox.lead(lead)["owner"] is None


def test_generic_signature_has_the_value_of_the_scheme() -> None:
    # The example of the scheme's own documentation.
    secret, message_id, at = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330
    right = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert generic_sign(secret, message_id, at, b'{"test": 2432232314}') == right


def test_generic_leads(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead(owner=ANA, city="Kyle", collaborators=[ELI], emails=["a@example.com"])
    free = sandbox.create_lead(pond=POND)
    shown = api.generic("GET", f"/leads/{lead}").json()["lead"]
    assert (shown["id"], shown["owner"], shown["pond"], shown["collaborators"]) == (
        str(lead),
        str(ANA),
        None,
        [str(ELI)],
    )
    assert shown["address"]["city"] == "Kyle"
    assert set(shown["address"]) == {"street", "city", "county", "state", "zip", "country", "latitude", "longitude"}
    assert datetime.fromisoformat(shown["created_at"]).tzinfo is not None
    several = api.generic("GET", f"/leads?ids={free},77,x,{lead}").json()["leads"]
    assert [row["id"] for row in several] == [str(free), str(lead)]
    assert several[0]["pond"] == str(POND)
    assert api.generic("GET", "/leads/77").status_code == 404
    for bad in ("?unassigned=false", "?unassigned=true&created_after=soon", "?unassigned=true&cursor=-"):
        assert api.generic("GET", f"/leads{bad}").status_code == 422, bad


def test_generic_pages(api: Api, sandbox: Sandbox) -> None:
    sandbox.configure(generic_page=2)
    sandbox.create_lead(created=(datetime.now(UTC) - timedelta(hours=2)).isoformat())
    since = (datetime.now(UTC) - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    leads = sandbox.create_leads(5)
    sandbox.set_owner(leads[1], ANA)
    seen, cursor, pages = [], "", 0
    while cursor is not None:
        body = api.generic("GET", f"/leads?unassigned=true&created_after={since}&cursor={cursor}").json()
        seen += [int(row["id"]) for row in body["leads"]]
        cursor, pages = body["next"], pages + 1
    assert (seen, pages) == ([leads[0], *leads[2:]], 2)
    everything = api.generic("GET", f"/leads?created_after={since}").json()
    assert [int(row["id"]) for row in everything["leads"]] == leads[:2]
    body = api.generic("GET", "/agents").json()
    assert [row["name"] for row in body["agents"]] == ["Olive Owner", "Ana Alvarez"]
    assert [row["name"] for row in api.generic("GET", f"/agents?cursor={body['next']}").json()["agents"]] == [
        "Ben Brown",
        "Cy Chen",
    ]


def test_generic_owner_write(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()

    def put(**body: Any) -> Any:
        return api.generic("PUT", f"/leads/{lead}/owner", body)

    answer = put(owner=str(ANA), expected=None)
    assert (answer.status_code, answer.json()["lead"]["owner"]) == (200, str(ANA))
    refused = put(owner=str(BEN), expected=None)
    assert (refused.status_code, list(refused.json())) == (409, ["error"])
    assert put(owner=str(BEN), expected=str(CY)).status_code == 409
    assert put(owner=str(BEN), expected=str(ANA)).json()["lead"]["owner"] == str(BEN)
    assert put(owner=str(CY)).json()["lead"]["owner"] == str(CY)  # unconditional
    assert put(owner=None).json()["lead"]["owner"] is None
    assert put(expected=None).status_code == 422
    assert put(owner=12).status_code == 422
    assert api.generic("PUT", "/leads/77/owner", {"owner": None}).status_code == 404
    sandbox.deactivate_agent(BEN)
    for mode, agent, status, owner in (
        ("empty", BEN, 200, None),
        ("empty", 999, 200, None),
        ("accept", BEN, 200, BEN),
        ("refuse", BEN, 422, ANA),
        ("refuse", 999, 422, ANA),
    ):
        sandbox.configure(generic_inactive=mode)
        sandbox.set_owner(lead, ANA)
        assert put(owner=str(agent)).status_code == status, (mode, agent)
        assert sandbox.lead(lead)["owner"] == owner


def test_generic_the_rest(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    lead = sandbox.create_lead()
    for _ in range(2):  # a repeat is harmless
        shown = api.generic("POST", f"/leads/{lead}/collaborators", {"agent": str(DEE)}).json()["lead"]
        assert shown["collaborators"] == [str(DEE)]
    assert api.generic("POST", f"/leads/{lead}/collaborators", {"agent": "999"}).status_code == 422
    note = {"subject": "Lead routed", "body": "Why: [tl:1]"}
    assert api.generic("POST", f"/leads/{lead}/notes", note).status_code == 201
    assert api.generic("POST", f"/leads/{lead}/notes", {"body": 1}).status_code == 422
    assert api.generic("GET", f"/leads/{lead}/notes").json() == {"notes": [{"id": "1", **note}]}
    sandbox.deactivate_agent(BEN)
    sandbox.pause_agent(CY)
    agents = {row["id"]: row for row in api.generic("GET", "/agents").json()["agents"]}
    assert [agents[str(number)]["active"] for number in (ANA, BEN, CY)] == [True, False, True]
    assert [agents[str(number)]["paused"] for number in (ANA, BEN, CY)] == [False, False, True]
    assert api.generic("GET", f"/agents/{CY}").json()["agent"] == agents[str(CY)]
    assert agents[str(CY)]["zone"] == "America/New_York"
    assert api.generic("GET", "/agents/999").status_code == 404
    hook = api.generic("POST", "/hooks", {"url": receiver.url, "topics": ["lead.created"]})
    assert (hook.status_code, hook.json()["topics"], hook.json()["active"]) == (201, ["lead.created"], True)
    assert api.generic("GET", "/hooks").json() == {"hooks": [hook.json()]}
    for bad in ({"url": "http://example.com", "topics": ["lead.created"]}, {"url": receiver.url, "topics": ["x"]}):
        assert api.generic("POST", "/hooks", bad).status_code == 422
    assert api.generic("DELETE", f"/hooks/{hook.json()['id']}").status_code == 200
    assert api.generic("DELETE", f"/hooks/{hook.json()['id']}").status_code == 404


def test_generic_deliveries(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    api.generic("POST", "/hooks", {"url": receiver.url, "topics": ["lead.created", "lead.updated", "lead.deleted"]})
    sandbox.configure(concurrency=1)
    lead = sandbox.create_lead()
    api.generic("PUT", f"/leads/{lead}/owner", {"owner": str(ANA)})
    sandbox.configure(generic_single=False)
    sandbox.delete_leads([lead])
    assert sandbox.wait_idle()
    for headers, raw in receiver.got:
        Webhook(ACCOUNT.webhook_secret).verify(raw, headers)  # raises unless it is right
    created, updated, deleted = receiver.bodies()
    assert (created["type"], created["data"]["id"], created["data"]["owner"]) == ("lead.created", str(lead), None)
    assert (updated["type"], updated["data"]["owner"]) == ("lead.updated", str(ANA))
    assert (deleted["type"], deleted["data"]["leads"][0]["id"]) == ("lead.deleted", str(lead))
