"""Salesforce in the running service: consent, tokens that rotate and end unannounced, messages until they are stored,
queues, and an account whose API refuses in all its ways.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, cast
from urllib.parse import parse_qsl

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from adapters.budget import Lane
from adapters.client import Client, CrmError
from adapters.oauth import DeadGrant, NotConnected
from adapters.salesforce_reading import ACK, id18
from connector import apps, daily, oauth, tenants, testing
from connector.chores import sweep
from connector.database import unit
from connector.errors import TurnlockError
from connector.runtime import Runtime
from connector.sandbox import Sandbox
from tests.adapters.kit import NOW, AgentRow, LeadRow, kit
from tests.adapters.kit_salesforce import ACCOUNT, USER, FakeSalesforce, error
from tests.adapters.loopback import Received, Reply, Server
from tests.adapters.test_conformance_live import Live
from tests.connector.oauth_rig import ask_at_once, browse
from tests.rig import Reply as Answer
from tests.rig import Rig, http_send, until

QUEUE, OTHER_QUEUE = id18("00G7Q000000Qeue"), id18("00G7Q000000Othr")
CONFIG = f"""
unassigned: {{ponds: ['{QUEUE[:15]}']}}
default_queue: All
queues: {{All: {{members: ['12', '13', '14']}}}}
"""


class Login:
    """The host that asks for consent and gives tokens. A refresh token is good once: used again, it ends the grant."""

    def __init__(self, fake: FakeSalesforce) -> None:
        self.fake = fake
        self.api = ""  # where the account's API is, as token answers tell
        self.account = ACCOUNT
        self.asked: list[Mapping[str, str]] = []
        self.given = 0
        self.dead = False
        self.revoked: list[str] = []
        self._challenge = ""
        self._lock = threading.Lock()

    def handle(self, asked: Received) -> Reply:
        with self._lock:
            if asked.path == "/services/oauth2/authorize":
                said = asked.query
                assert (said["response_type"], said["scope"]) == ("code", "api refresh_token")
                assert said["code_challenge_method"] == "S256"
                self._challenge = said["code_challenge"]
                back = f"{said['redirect_uri']}?code=canary-code&state={said['state']}"
                return Reply(302, headers={"Location": back})
            form = dict(parse_qsl(asked.body.decode()))
            if asked.path == "/services/oauth2/revoke":
                self.revoked.append(form["token"])
                return Reply(200)
            assert asked.path == "/services/oauth2/token"
            self.asked.append(form)
            return self._token(form)

    def _token(self, form: Mapping[str, str]) -> Reply:
        if (form["client_id"], form["client_secret"]) != ("3MVG9.canary", "canary-app-secret"):
            return Reply(400, {"error": "invalid_client_id", "error_description": "client identifier invalid"})
        if form["grant_type"] == "client_credentials":
            assert set(form) == {"grant_type", "client_id", "client_secret"}
            if self.dead:
                said = "no client credentials user enabled"
                return Reply(400, {"error": "invalid_grant", "error_description": said})
            good = True
        elif form["grant_type"] == "authorization_code":
            digest = hashlib.sha256(form["code_verifier"].encode()).digest()
            good = base64.urlsafe_b64encode(digest).decode().rstrip("=") == self._challenge
            self.dead = False
        else:
            good = form["refresh_token"] == f"canary-refresh-{self.given}"
        if not good or self.dead:
            self.dead = True
            return Reply(400, {"error": "invalid_grant", "error_description": "expired access/refresh token"})
        self.given += 1
        self.fake.token = f"canary-session-{self.given}"
        more = {} if form["grant_type"] == "client_credentials" else {"refresh_token": f"canary-refresh-{self.given}"}
        return Reply(
            body={
                "access_token": self.fake.token, **more, "token_type": "Bearer", "instance_url": self.api, "id": f"https://login.salesforce.com/id/{self.account}/{USER}",
                "scope": "refresh_token api", "signature": "c2ln", "issued_at": "1775467200500",
            }
        )  # fmt: skip


class Sales(Live):
    """One tenant by OAuth of an app at a loopback Salesforce, whose login and API are at two addresses."""

    fake: FakeSalesforce

    def __init__(self, runtime: Runtime, login: Server, server: Server) -> None:
        Rig.__init__(self, runtime, cast(Sandbox, None), "salesforce")
        self.kit, self.server, self.login_server, self.secret = kit("salesforce"), server, login, b""
        self.fake = cast(FakeSalesforce, self.kit.fake())
        self.fake.add_agents(*(AgentRow(ref) for ref in ("12", "13", "14")))
        self.lose_answer = lambda kind: False
        self.written: list[str] = []
        self.refusals: list[Reply] = []  # what the next owner writes are answered instead
        self.before_write: Callable[[], None] = lambda: None
        self.keeps_leads = False  # the connected user may delete none
        self._lock = threading.Lock()
        self.login = Login(self.fake)
        self.login.api = server.url
        login.handle, server.handle = self.login.handle, self._answer

    def _answer(self, asked: Received) -> Reply:
        if asked.method == "DELETE" and self.keeps_leads:
            return error("INSUFFICIENT_ACCESS_OR_READONLY", status=403)
        if asked.method == "POST" and asked.path.endswith("/sobjects/Lead"):
            made = self._handle(asked)
            ref = json.loads(made.body)["id"]  # a flow that runs after the lead is saved
            threading.Thread(target=self.message, args=(ref,)).start()
            return made
        if asked.method == "PATCH":
            self.before_write()
            if self.refusals:
                return self.refusals.pop(0)
        return self._handle(asked)

    def add(self, name: str = "acme", **how: Any) -> None:
        how = how or {"parameters": {}, "secret_values": {}, "by_oauth": True}
        tenants.add_tenant(self.runtime, name, "salesforce", base_url=self.login_server.url, **how)
        with self.runtime.engine.connect() as conn:
            self.tenant = self.runtime.tenant_named(conn, name)

    def connect(self) -> Answer:
        begun = browse(oauth.link(self.runtime, self.tenant))
        agreed = browse(begun.headers["location"])
        return browse(agreed.headers["location"], begun.headers["set-cookie"].partition(";")[0])

    def queued(self, *refs: str) -> None:
        """Leads in the queue that holds unassigned ones."""
        self.fake.add_leads(*(LeadRow(ref, pond=QUEUE) for ref in refs))

    def message(self, *refs: str, account: str = ACCOUNT) -> Answer:
        """Post an outbound message about these leads."""
        body, headers = self.tell(*refs)
        return http_send(self.hook_url, body.replace(ACCOUNT.encode(), account.encode()), headers)

    def owned(self, *refs: str) -> None:
        until(lambda: all(self.fake.leads[ref].owner for ref in refs), 30.0, "owners")

    def session_ends(self) -> None:
        """The token ends before its time, some while after it was given."""
        # First its age: whoever calls meanwhile must not be refused with a token that counts as new.
        self.sql("UPDATE oauth_grants SET renewed_at = clock_timestamp() - interval '11 minutes' WHERE tenant_id = :t")
        self.fake.token = "another"


def is_ack(answer: Answer) -> bool:
    return (answer.status, answer.body, answer.headers["content-type"]) == (
        200, ACK.encode(), "text/xml; charset=utf-8",
    )  # fmt: skip


APP = {"parameters": {"client_id": "3MVG9.canary"}, "secret_values": {"client_secret": "canary-app-secret"}}


@pytest.fixture
def house(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sales]:
    """No tenant yet; the web server runs."""
    # The fake knows one instant.
    monkeypatch.setattr(
        "connector.runtime.Client", lambda *given, now, **named: Client(*given, now=lambda: NOW, **named)
    )
    with ExitStack() as stack:
        login, api = (stack.enter_context(Server(lambda _: Reply(500)).running()) for _ in range(2))
        made = Sales(runtime, login, api)
        stack.callback(made.stop)
        made.start_web()
        yield made


@pytest.fixture
def fresh(house: Sales) -> Sales:
    """Added, not connected."""
    apps.set_app(house.runtime, "salesforce", **APP)
    house.add()
    return house


@pytest.fixture
def live(fresh: Sales) -> Sales:
    """Connected, installed, configured; everything runs."""
    assert fresh.connect().status == 200
    fresh.start_worker()
    tenants.install(fresh.runtime, fresh.tenant)
    fresh.configure(CONFIG)
    fresh.written.clear()
    return fresh


def test_from_the_admins_consent_to_a_lead_with_its_agent(fresh: Sales) -> None:
    (finding,) = tenants.check(fresh.runtime, fresh.tenant)
    assert "turnlock connect" in finding.fix

    def last_delivery() -> str:
        return next(f.what for f in tenants.check(fresh.runtime, fresh.tenant) if f.where == "deliveries")

    page = fresh.connect()
    assert page.status == 200
    assert f"account {ACCOUNT}".encode() in page.body
    steps = tenants.install(fresh.runtime, fresh.tenant).by_hand
    assert fresh.hook_url in steps[0]
    fresh.configure(CONFIG)
    assert last_delivery() == "none yet"
    fresh.start_worker()
    fresh.queued("5001", "5002")
    fresh.fake.add_leads(LeadRow("5003", pond=OTHER_QUEUE), LeadRow("5004", owner="14"))
    assert is_ack(fresh.message("5001", "5002", "5003", "5004"))
    fresh.owned("5001", "5002")
    fresh.in_step("5001", "5002")
    assert fresh.held_by("5001", "5002") == ["12", "13"]
    assert fresh.fake.leads["5003"].pond == OTHER_QUEUE
    until(lambda: fresh.fake.leads["5002"].notes, what="a note")
    # The login gave consent and a token, and saw nothing else; all calls went where the token answer pointed.
    assert {asked.path for asked in fresh.login_server.received} == {
        "/services/oauth2/authorize",
        "/services/oauth2/token",
    }
    assert {asked.path.split("/")[2] for asked in fresh.server.received} == {"data"}
    assert all(f.ok for f in tenants.check(fresh.runtime, fresh.tenant))
    assert last_delivery().startswith("the last came ")
    (kept,) = fresh.rows(sa.text("SELECT sealed_access, sealed_refresh FROM oauth_grants"))
    assert all(b"canary" not in bytes(value) for value in kept)


def test_the_account_of_a_copy_is_refused_and_its_messages_change_nothing(live: Sales) -> None:
    live.queued("5001")
    refused = live.message("5001", account=id18("00D7Q000000Copy"))
    assert refused.status == 401
    assert b"Ack" not in refused.body
    assert live.events() == []
    assert is_ack(live.message("5001"))
    live.owned("5001")
    live.in_step("5001")


def test_what_could_not_be_stored_is_not_acknowledged_and_comes_again(
    live: Sales, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.queued("5001")

    def lost(*_: Any) -> Any:
        raise OperationalError("INSERT", {}, Exception("gone"), connection_invalidated=True)

    with monkeypatch.context() as patch:
        patch.setattr(live.runtime.storing, "store", lost)
        answer = live.message("5001")
    assert answer.status == 503
    assert b"Ack" not in answer.body
    assert live.events() == []
    assert is_ack(live.message("5001"))
    live.owned("5001")
    assert is_ack(live.message("5001"))  # the answer may be lost on its way, too
    live.in_step("5001")
    assert live.decisions("5001") == [("new", "assigned", "12")]


def test_a_token_that_ends_between_reading_and_writing_costs_no_pause(live: Sales) -> None:
    def ends() -> None:
        live.before_write = lambda: None
        live.session_ends()

    live.queued("5001")
    live.before_write = ends
    assert is_ack(live.message("5001"))
    live.owned("5001")
    live.settle_owners()
    live.audit()
    assert (live.turns(), live.login.given) == (["12"], 2)
    assert "crm_refuses_us" not in live.alarms()


def test_a_token_that_ended_is_renewed_once_and_the_calls_are_made_again(live: Sales) -> None:
    refs = [str(5000 + n) for n in range(24)]
    live.queued(*refs)
    live.wait_chores()  # else one of them may be the first to hear of it
    live.session_ends()
    for start in range(0, 24, 6):
        assert is_ack(live.message(*refs[start : start + 6]))
    live.owned(*refs)
    live.in_step(*refs)
    assert [form["grant_type"] for form in live.login.asked] == ["authorization_code", "refresh_token"]
    assert not live.login.dead  # no refresh token was used twice
    assert "crm_refuses_us" not in live.alarms()
    assert "reconnect_needed" not in live.alarms()


def test_a_refresh_token_that_could_not_be_stored_at_once_is_not_lost(
    live: Sales, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.stop_worker()
    runtime, tenant, kept = live.runtime, live.tenant, oauth._kept
    live.sql("UPDATE oauth_grants SET due_at = clock_timestamp(), expires_at = clock_timestamp() WHERE tenant_id = :t")
    runtime.forget_secrets()

    def lost(*_: Any) -> Any:
        monkeypatch.setattr(oauth, "_kept", kept)
        raise OperationalError("UPDATE", {}, psycopg.OperationalError("gone"), connection_invalidated=True)

    monkeypatch.setattr(oauth, "_kept", lost)
    with pytest.raises(OperationalError):
        oauth.renew(runtime, tenant)
    live.sql("UPDATE oauth_grants SET lease = NULL WHERE tenant_id = :t")  # it ended with the connection
    runtime.abandoned.give_back(runtime.engine)  # as a worker does once the database answers
    assert oauth.client(runtime, tenant).credentials.secrets["access_token"] == "canary-session-2"
    live.sql("UPDATE oauth_grants SET due_at = clock_timestamp() WHERE tenant_id = :t")
    oauth.renew(runtime, tenant)
    assert not live.login.dead  # each refresh token was used once
    assert len(live.login.asked) == 3


def test_while_few_of_the_days_calls_are_left_owners_are_set_and_all_else_waits(
    live: Sales, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.wait_chores()
    live.fake.usage = "api-usage=4600/5000"
    live.queued("5001", "5002")
    assert is_ack(live.message("5001"))
    live.owned("5001")
    until(lambda: live.runtime.limits.closed(live.tenant.tenant_id, Lane.NOTES), what="that notes wait")
    assert is_ack(live.message("5002"))
    live.owned("5002")  # who waits is no owner
    live.want("sweep")
    swept = "SELECT last_error FROM chores WHERE tenant_id = :t AND kind = 'sweep'"
    until(lambda: live.one(swept) == "wait_budget", what="that the sweep waits")
    assert [live.fake.leads[ref].notes for ref in ("5001", "5002")] == [[], []]
    alarm = live.one("SELECT text FROM alarms WHERE tenant_id = :t AND kind = 'crm_budget_low' AND closed_at IS NULL")
    assert "Of the 5000 calls" in alarm
    assert " 400 are left" in alarm
    assert "Below 500 notes, tasks, syncs and sweeps wait" in alarm
    found = {f.where: f for f in tenants.check(live.runtime, live.tenant)}  # somebody waits for this: it is let through
    assert (found["limit daily"].ok, found["limit daily"].what[:20]) == (False, "400 of 5000 left, sh")
    live.fake.usage = "api-usage=20/5000"
    monkeypatch.setattr(daily, "_BELIEVED", 0.0)  # a quarter of an hour passes
    live.runtime.limits._opens.clear()
    live.due_now()
    until(lambda: all(live.fake.leads[ref].notes for ref in ("5001", "5002")), what="the notes")
    until(lambda: "crm_budget_low" not in live.alarms(), what="the end of the alarm")
    live.run_chore("sweep")


def test_a_token_that_another_worker_renewed_is_not_doubted_again(live: Sales) -> None:
    runtime, tenant = live.runtime, live.tenant
    live.stop_worker()
    used = oauth.client(runtime, tenant).credentials.secrets["access_token"]
    live.sql("UPDATE oauth_grants SET due_at = clock_timestamp() WHERE tenant_id = :t")
    oauth.renew(runtime, tenant)
    with unit(runtime.engine) as (conn, _):
        assert oauth.doubt(runtime, conn, tenant)  # what was refused is the token from before
    assert oauth.client(runtime, tenant).credentials.secrets["access_token"] != used
    with unit(runtime.engine) as (conn, _):
        assert not oauth.doubt(runtime, conn, tenant)  # refused although it is new: not a matter of the token
    assert len(live.login.asked) == 2


def test_an_account_that_was_moved_is_called_where_it_is_now(live: Sales) -> None:
    with Server(live._answer).running() as moved:
        live.login.api = moved.url
        live.queued("5001")
        live.session_ends()
        assert is_ack(live.message("5001"))
        live.owned("5001")
        live.settle_owners()
        assert any(asked.method == "PATCH" for asked in moved.received)
        assert not any(asked.method == "PATCH" for asked in live.server.received)


def test_a_lead_that_cannot_be_read_parks_alone(live: Sales) -> None:
    refs = [str(5000 + n) for n in range(9)]
    live.queued(*refs)
    live.fake.leads["5003"].pond, live.fake.leads["5003"].owner = None, "who's this"
    assert is_ack(live.message(*refs))
    rest = [ref for ref in refs if ref != "5003"]
    live.owned(*rest)
    live.in_step(*rest)
    (parked,) = [event for event in live.events() if event.state == "parked"]
    assert (parked.ref, parked.reason) == ("5003", "crm_answer_unreadable")
    assert live.alarms() == {"event_parked"}
    assert len(live.turns()) == 8


def test_an_address_that_sends_elsewhere_is_told_before_any_lead_is_read(live: Sales) -> None:
    live.wait_chores()  # else one of them tells of it
    real, live.server.handle = live.server.handle, lambda _: Reply(302, headers={"Location": "https://new.example.com"})
    live.queued("5001")
    assert is_ack(live.message("5001"))
    until(lambda: "crm_refuses_us" in live.alarms(), what="the alarm")
    said = live.one("SELECT text FROM alarms WHERE tenant_id = :t AND kind = 'crm_refuses_us'")
    assert "enter the final address" in str(said)
    live.server.handle = real
    live.due_now()
    live.owned("5001")
    live.in_step("5001")


def test_a_consent_that_was_taken_back_needs_a_human_and_then_all_goes_on(live: Sales) -> None:
    live.queued("5001")
    live.login.dead = True
    live.session_ends()
    assert is_ack(live.message("5001"))
    until(lambda: "reconnect_needed" in live.alarms(), what="the alarm")
    assert live.fake.leads["5001"].owner is None
    assert len([form for form in live.login.asked if form["grant_type"] == "refresh_token"]) == 1
    assert live.connect().status == 200
    live.due_now()
    live.owned("5001")
    live.in_step("5001")
    assert "reconnect_needed" not in live.alarms()


def test_a_consent_to_another_account_is_refused_and_the_one_there_was_goes_on(live: Sales) -> None:
    live.login.account = id18("00D7Q000000Copy")  # signed in to a sandbox, say: no lead of the account exists there
    page = live.connect()
    assert page.status == 400
    assert b"another account than the one" in page.body
    assert live.one("SELECT account_ref FROM tenants WHERE tenant_id = :t") == ACCOUNT
    live.login.account = ACCOUNT
    assert live.connect().status == 200
    live.queued("5001")
    assert is_ack(live.message("5001"))
    live.owned("5001")
    live.in_step("5001")


@pytest.mark.parametrize(
    "refusal",
    [
        error("UNABLE_TO_LOCK_ROW", "unable to obtain exclusive access to this record"),
        error("REQUEST_LIMIT_EXCEEDED", "ConcurrentRequests (Concurrent API Requests) Limit exceeded.", 403),
    ],
    ids=["locked", "too many at once"],
)
def test_what_salesforce_cannot_do_now_is_done_later(live: Sales, refusal: Reply) -> None:
    live.refusals.append(refusal)
    live.queued("5001")
    assert is_ack(live.message("5001"))
    until(lambda: not live.refusals, what="the refusal")
    until(lambda: live.one("SELECT lease FROM outbox WHERE tenant_id = :t AND state = 'open'") is None, what="its end")
    live.due_now()
    live.owned("5001")
    live.in_step("5001")
    assert live.turns() == ["12"]


@pytest.mark.parametrize("code", ["TRANSFER_REQUIRES_READ", "INVALID_CROSS_REFERENCE_KEY"])
def test_an_agent_whom_salesforce_does_not_take_is_passed_over(live: Sales, code: str) -> None:
    live.refusals.append(error(code))  # the list of users shows them as active
    live.queued("5001")
    assert is_ack(live.message("5001"))
    live.owned("5001")
    live.settle_owners()
    assert live.held_by("5001") == ["13"]
    assert live.void_turns() == {1: "refused"}
    live.audit()


def test_a_lead_that_is_none_any_more_is_dropped_and_the_turn_given_back(live: Sales) -> None:
    live.queued("5001", "5002")

    def goes() -> None:
        live.before_write = lambda: None
        live.fake.converted.add("5001")

    live.before_write = goes
    assert is_ack(live.message("5001"))
    until(lambda: live.standing("5001")["state"] == "gone", what="an end")
    assert is_ack(live.message("5002"))
    live.owned("5002")
    live.settle_owners()
    assert live.held_by("5002") == ["12"]  # owed the turn
    live.audit()
    assert live.alarms() == set()


def test_a_human_who_is_quicker_wins(live: Sales) -> None:
    live.queued("5001")

    def takes() -> None:
        live.before_write = lambda: None
        live.fake.leads["5001"].owner, live.fake.leads["5001"].pond = "14", None
        live.fake.touch("5001")

    live.before_write = takes
    assert is_ack(live.message("5001"))
    until(lambda: live.standing("5001")["state"] == "owned", what="an end")
    live.settle_owners()
    assert live.held_by("5001") == ["14"]
    assert live.void_turns() == {1: "superseded"}


def test_a_write_whose_answer_was_lost_is_found_done(live: Sales) -> None:
    lost = iter([True])
    live.lose_answer = lambda kind: kind == "owner" and next(lost, False)
    live.queued("5001")
    assert is_ack(live.message("5001"))
    attempts = "SELECT max(attempt) FROM outbox WHERE tenant_id = :t AND kind = 'owner'"
    until(lambda: live.one(attempts), what="a lost answer")
    live.due_now()
    live.in_step("5001")  # one write: the reading before a second one showed the first
    assert live.turns() == ["12"]


def test_a_rule_of_the_account_is_shown_to_the_admin(live: Sales) -> None:
    live.refusals.append(error("FIELD_CUSTOM_VALIDATION_EXCEPTION", "Ask lena.leadman@example.com first"))
    live.queued("5001")
    assert is_ack(live.message("5001"))
    until(lambda: "owner_not_written" in live.alarms(), what="the alarm")
    said = live.one("SELECT text FROM alarms WHERE tenant_id = :t AND kind = 'owner_not_written'")
    assert "A validation rule in Salesforce refuses the lead" in str(said)
    assert "example.com" not in str(said)


def test_a_merged_lead_goes_on_under_the_id_that_stayed(live: Sales) -> None:
    live.queued("5001")
    assert is_ack(live.message("5001"))
    live.owned("5001")
    live.settle_owners()
    live.fake.add_leads(LeadRow("5009", owner="12"))
    live.fake.deleted["5001"] = "5009"
    live.sql("DELETE FROM dedupe_keys WHERE tenant_id = :t")
    assert is_ack(live.message("5001"))
    live.settle_owners()
    assert live.lead_id("5009") == live.lead_id("5001")
    assert live.standing("5009")["state"] == "assigned"


def test_the_sweep_finds_what_no_message_told_of(live: Sales) -> None:
    live.queued("5001", "5002")
    live.fake.add_leads(LeadRow("5003", pond=OTHER_QUEUE))
    assert sweep(live.runtime, live.tenant, NOW - timedelta(hours=2)).found == 2
    live.owned("5001", "5002")
    live.in_step("5001", "5002")
    assert live.held_by("5003") == [None]


@pytest.mark.parametrize("keeps", [False, True], ids=["and is removed", "and stays where the user may not delete"])
def test_a_test_lead_goes_to_its_agent_without_a_turn(live: Sales, keeps: bool) -> None:
    live.keeps_leads = keeps
    way = testing.send(live.runtime, live.tenant, live.agent_id("13"), patience=20)
    assert (way.whole, way.removed) == (True, not keeps)
    assert way.heard is not None
    assert way.noted is not None
    assert ("Modify All on leads" in (way.stays_because or "")) is keeps
    assert live.fake.leads[way.ref].owner == "13"  # not whom the account's assignment rule would give it
    assert (way.ref in live.fake.deleted) is not keeps
    live.settle_owners()
    assert live.decisions(way.ref) == [("new", "assigned", "13")]
    assert live.position() == 0
    assert live.alarms() == set()


def test_a_test_lead_needs_an_owner_that_stands_for_nobody(live: Sales) -> None:
    live.configure("default_queue: All\nqueues: {All: {members: ['12']}}\n")
    with pytest.raises(CrmError) as caught:
        testing.send(live.runtime, live.tenant, live.agent_id("12"), patience=1)
    assert "under `unassigned`" in caught.value.text
    assert live.fake.leads == {}


def test_after_removal_messages_are_acknowledged_and_ignored_and_the_consent_is_given_back(live: Sales) -> None:
    url = live.hook_url
    tenants.uninstall(live.runtime, live.tenant)
    live.queued("5001")
    body, headers = live.kit.dump(live.kit.batch(["5001"])), {"Content-Type": "text/xml"}
    assert is_ack(http_send(url, body, headers))
    assert live.events() == []
    assert live.fake.leads["5001"].owner is None
    assert live.login.revoked == [f"canary-refresh-{live.login.given}"]


def test_an_account_is_connected_once_and_removed_though_salesforce_is_away(live: Sales) -> None:
    first = live.tenant
    live.add("beta")
    page = live.connect()
    assert page.status == 400
    assert b"connected as another tenant" in page.body
    live.tenant = first
    live.login_server.handle = lambda _: Reply(503)
    tenants.uninstall(live.runtime, live.tenant)
    with live.runtime.engine.connect() as conn, pytest.raises(TurnlockError):
        live.runtime.tenant_named(conn, "acme")


# -- an app of the account's own: no consent, no refresh token ---------------------------------------------------------


@pytest.fixture
def own(house: Sales) -> Sales:
    """A tenant with an app of its own, added and no more."""
    house.add(**APP)
    return house


def test_an_app_of_the_account_itself_needs_nobodys_consent(own: Sales) -> None:
    assert all(f.ok for f in tenants.check(own.runtime, own.tenant) if f.where != "agents")
    assert {asked.path for asked in own.login_server.received} == {"/services/oauth2/token"}
    tenants.install(own.runtime, own.tenant)
    own.configure(CONFIG)
    own.start_worker()
    own.wait_chores()
    own.queued("5001", "5002")
    assert is_ack(own.message("5001"))
    own.owned("5001")
    own.session_ends()
    assert is_ack(own.message("5002"))
    own.owned("5002")
    own.settle_owners()
    assert own.held_by("5001", "5002") == ["12", "13"]
    assert own.turns() == ["12", "13"]
    assert own.login.given == 2  # one for the beginning, one for the session that ended
    assert own.alarms() == set()
    own.stop_worker()
    tenants.uninstall(own.runtime, own.tenant)
    assert own.login.revoked == ["canary-session-2"]


def test_many_who_want_the_first_token_ask_for_it_once(own: Sales) -> None:
    got = [client.credentials.secrets["access_token"] for client in ask_at_once(own.runtime, own.tenant, 8)]
    assert got == ["canary-session-1"] * 8
    assert len(own.login.asked) == 1


def test_an_app_that_is_given_no_token_is_no_loop_and_goes_on_when_it_is(own: Sales) -> None:
    own.login.dead = True
    (finding,) = tenants.check(own.runtime, own.tenant)
    assert "client credentials flow" in finding.fix
    for _ in range(3):
        with pytest.raises(NotConnected, match="client credentials flow"):
            oauth.client(own.runtime, own.tenant)
    assert len(own.login.asked) == 1
    assert own.alarms() == {"reconnect_needed"}
    with pytest.raises(DeadGrant):
        oauth.again(own.runtime, own.tenant)
    own.login.dead = False
    oauth.again(own.runtime, own.tenant)
    assert len(own.login.asked) == 3
    assert own.alarms() == set()
    assert oauth.client(own.runtime, own.tenant).credentials.secrets["access_token"] == "canary-session-1"


def test_a_wrong_secret_of_an_app_is_corrected_and_problems_are_told_at_once(own: Sales) -> None:
    tenants.set_secret(own.runtime, own.tenant, "client_secret", "mistyped", at_once=True)
    (finding,) = tenants.check(own.runtime, own.tenant)
    assert "turnlock tenant secret" in finding.fix
    assert "mistyped" not in finding.fix
    tenants.set_secret(own.runtime, own.tenant, "client_secret", "canary-app-secret", at_once=True)
    oauth.again(own.runtime, own.tenant)
    assert own.login.given == 1
    for how, told in (
        ({"parameters": {"client_id": "x"}, "secret_values": {"access_token": "t"}},
         ["client_secret: missing", "access_token: the app is given one"]),
        ({"parameters": {}, "secret_values": {"client_secret": "x"}}, ["client_id: missing"]),
        ({**APP, "by_oauth": True}, ["no app is registered", "client_id: the app", "client_secret: the app"]),
        ({"parameters": {}, "secret_values": {}}, ["access_token: missing"]),
    ):  # fmt: skip
        with pytest.raises(TurnlockError) as caught:
            own.add("beta", **how)
        assert all(text in str(caught.value) for text in told)
        assert len(str(caught.value).splitlines()) == len(told)
