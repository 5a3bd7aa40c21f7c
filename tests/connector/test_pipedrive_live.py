"""Pipedrive end to end, against a server that tells what it does by webhooks, as Pipedrive does."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit
from uuid import NAMESPACE_URL, uuid5

import pytest

from connector import apps, oauth, teams, tenants, testing
from connector.chores import sweep
from connector.runtime import Runtime
from connector.sandbox import Sandbox
from tests.adapters.kit import NOW, AgentRow, LeadRow
from tests.adapters.kit_pipedrive import ME, FakePipedrive
from tests.adapters.loopback import Received, Reply, Server
from tests.connector.oauth_rig import browse
from tests.rig import ABC, ANA, BEN, CY, Rig, http_send, until
from tests.rig import Reply as Answer

TOKEN = "canary-api-token-1"
CLIENT = ("client-id-123", "client-secret-456")
FOREIGN = "https://other.example.com/hooks/token"


class Account(FakePipedrive):
    """An account that calls its webhooks. Each lead has a UUID and a person of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.add_agents(*(AgentRow(ref) for ref in (ANA, BEN, CY)))
        self.add_hook("create", FOREIGN, active=False)
        self.clock_is_off = datetime.now(UTC) - NOW
        self.deaf = False  # deliveries are lost, as in a ban
        self.statuses: list[int] = []
        self.written: list[tuple[str, str]] = []
        self.url = ""
        self.granted = True
        self.renewed = 0
        self.revoked: list[tuple[str, str | None]] = []

    def come_in(self, *, created: datetime | None = None) -> str:
        """A lead of a web form, owned by whoever stands for nobody."""
        ref = str(uuid5(NAMESPACE_URL, self.new_ref()))
        # A second ago: a sweep at once must see it, and its clock, the database's, may be a moment behind this one.
        self.add_leads(LeadRow(ref, created=created or datetime.now(UTC) - timedelta(seconds=1)))
        self.tell("create", ref, None)
        return ref

    def give(self, ref: str, owner: str | None) -> None:
        """Somebody changes the owner by hand."""
        before = self.leads[ref].owner
        self.leads[ref].owner = owner
        self.tell("change", ref, {"owner_id": int(before or ME)})

    def tell(self, action: str, ref: str, previous: Any, *, user: str = "7", source: str = "app", **meta: Any) -> None:
        about = {
            "action": action, "entity": "lead", "entity_id": ref, "id": f"event-{self.new_ref()}", "version": "2.0",
            "company_id": "13052000", "user_id": user, "webhook_owner_id": ME, "change_source": source,
            "timestamp": datetime.now(UTC).isoformat(), "attempt": 1, **meta,
        }  # fmt: skip
        data = self.lead(self.leads[ref]) if ref in self.leads else None
        body = json.dumps({"meta": about, "data": data, "previous": previous}).encode()
        for hook in list(self.hooks):
            if hook.active and hook.topic == action and not self.deaf:
                pair = base64.b64encode(f"turnlock:{self.passwords[hook.ref]}".encode()).decode()
                self.statuses.append(http_send(hook.url, body, {"Authorization": f"Basic {pair}"}).status)

    def person_of(self, row: LeadRow) -> int:
        return 1 + int(row.ref.replace("-", "")[:8], 16)

    def lead(self, row: LeadRow) -> dict[str, Any]:
        self.emails.setdefault(str(self.person_of(row)), f"{row.ref[:8]}@example.com")
        return super().lead(row)

    def handle(self, asked: Received) -> Reply:
        if asked.path == "/oauth/token":
            return self._token(asked)
        if asked.path == "/oauth/revoke":
            self.revoked.append((dict(parse_qsl(asked.body.decode()))["token"], asked.headers.get("authorization")))
            return Reply(200)
        if asked.method == "PATCH":
            ref, agent = asked.path.rpartition("/")[2], str(asked.json["owner_id"])
            self.written.append((ref, agent))
            if not self.agents[agent].active:
                return Reply(400, {"success": False, "error": "owner_id: no such active user"})
            before = self.leads[ref].owner
            reply = super().handle(asked)
            self.tell("change", ref, {"owner_id": int(before or ME)}, user=ME, source="api")
            return reply
        reply = super().handle(asked)
        if asked.method == "POST" and asked.path == "/api/v1/leads":
            ref = cast(dict[str, Any], reply.body)["data"]["id"]
            self.emails[str(self.person_of(self.leads[ref]))] = self.emails.get(str(asked.json["person_id"]), "")
            self.tell("create", ref, None, user=ME, source="api")
        if asked.method == "DELETE" and asked.path.startswith("/api/v1/leads/"):
            self.tell("delete", asked.path.rpartition("/")[2], {"owner_id": int(ME)}, user=ME, source="api")
        return reply

    def _token(self, asked: Received) -> Reply:
        basic = "Basic " + base64.b64encode(":".join(CLIENT).encode()).decode()
        form = dict(parse_qsl(asked.body.decode()))
        if asked.headers.get("authorization") != basic or form.get("code", "code-1") != "code-1":
            return Reply(400, {"success": False, "message": "Invalid client: client is invalid"})
        self.renewed += form["grant_type"] == "refresh_token"
        if not self.granted:
            return Reply(400, {"success": False, "message": "Invalid grant: refresh token is invalid"})
        tokens = {"access_token": TOKEN, "refresh_token": "1:2:3", "expires_in": 3599, "scope": "base,admin"}
        return Reply(body={**tokens, "token_type": "Bearer", "api_domain": self.url})


class Live(Rig):
    """One tenant of such an account, with everything running."""

    def __init__(self, runtime: Runtime, account: Account) -> None:
        super().__init__(runtime, cast(Sandbox, None), "pipedrive")
        self.account = account
        self.start_web()

    def add(self, *, by_oauth: bool = False) -> None:
        tenants.add_tenant(
            self.runtime,
            "acme",
            "pipedrive",
            base_url=None if by_oauth else self.account.url,
            parameters={"sweep_min_age": "0"},
            secret_values={} if by_oauth else {"api_token": TOKEN},
            by_oauth=by_oauth,
        )
        with self.runtime.engine.connect() as conn:
            self.tenant = self.runtime.tenant_named(conn, "acme")

    def open(self) -> tenants.Installed:
        installed = tenants.install(self.runtime, self.tenant)
        self.configure(ABC)
        self.start_worker()
        self.first_round()
        return installed

    def owner(self, ref: str) -> str | None:
        return self.account.leads[ref].owner

    def create(self, **fields: Any) -> str:
        return self.account.come_in(**fields)

    def settle(self, seconds: float = 30.0) -> None:
        query = (
            "SELECT (SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'waiting') + "
            "(SELECT count(*) FROM outbox WHERE tenant_id = :t AND state = 'open')"
        )
        until(lambda: self.one(query) == 0, seconds, "a quiet system")


@pytest.fixture
def account() -> Iterator[Account]:
    made = Account()
    with Server(made.handle).running() as server:
        made.url = server.url
        yield made


@pytest.fixture
def bare(runtime: Runtime, account: Account) -> Iterator[Live]:
    """The web server runs; no tenant yet."""
    rig = Live(runtime, account)
    yield rig
    rig.stop()


@pytest.fixture
def live(bare: Live) -> Live:
    """Installed by API token; everything runs."""
    bare.add()
    bare.open()
    return bare


def test_from_install_to_an_owner_and_a_note_that_says_why(bare: Live) -> None:
    bare.add()
    lacking = [f.where for f in tenants.check(bare.runtime, bare.tenant) if not f.ok]
    assert lacking == ["hooks"]
    assert bare.account.standing(bare.hook_url) == []  # a check changes nothing
    installed = bare.open()
    assert (installed.topics, installed.by_hand) == (("change", "create", "delete"), ())
    assert all(f.ok for f in tenants.check(bare.runtime, bare.tenant))
    assert [bare.assign() for _ in range(4)] == [ANA, BEN, CY, ANA]
    refs = list(bare.account.leads)
    bare.settle()
    bare.audit()
    assert sorted(bare.account.written) == sorted(zip(refs, [ANA, BEN, CY, ANA], strict=True))
    ((subject, body),) = bare.account.leads[refs[0]].notes
    assert "All" in subject + body
    assert set(bare.account.statuses) == {200}
    assert {e.state for e in bare.events() if e.kind == "unknown"} == {"ignored"}  # our writes, come back
    assert bare.alarms() == set()
    assert tenants.uninstall(bare.runtime, bare.tenant) == 3
    assert [hook.url for hook in bare.account.hooks] == [FOREIGN]


def test_strangers_other_companies_and_hooks_of_version_1_route_nothing(live: Live) -> None:
    (hook, *_) = [hook for hook in live.account.hooks if hook.topic == "create" and hook.active]
    right = live.account.passwords[hook.ref]
    live.account.passwords[hook.ref] = "guessed"
    ref = live.create()
    assert live.account.statuses == [401]
    assert live.events() == []
    live.account.passwords[hook.ref] = right
    live.account.tell("create", ref, None, company_id="13052001")  # a copy of the account keeps its hooks
    assert live.account.statuses == [401, 401]
    live.account.tell("create", ref, None, version="1.0")
    assert live.account.statuses == [401, 401, 200]
    (event,) = live.events()
    assert (event.state, event.reason) == ("parked", "not_version_2")
    assert live.alarms() == {"deliveries_refused", "unreadable_event"}
    live.settle()
    assert live.owner(ref) is None


def test_hooks_that_pipedrive_deleted_are_made_again_and_the_sweep_finds_what_was_lost(live: Live) -> None:
    # The clock by which a lead is too young to be swept is the database's, as it was read a moment ago.
    a_minute_ago = datetime.now(UTC) - timedelta(minutes=1)
    before = dict(live.account.passwords)
    live.account.hooks = [hook for hook in live.account.hooks if hook.url == FOREIGN]
    lost = live.create(created=a_minute_ago)
    assert sweep(live.runtime, live.tenant, datetime.now(UTC) - timedelta(hours=1)).found == 1
    assert live.wait_owner(lost) == ANA
    topics = [("change", True), ("create", True), ("delete", True)]
    until(lambda: live.account.standing(live.hook_url) == topics, what="the hooks")  # the sweep had them looked at
    assert set(live.account.passwords.values()) == set(before.values())  # no delivery on its way is refused
    until(lambda: live.alarms() == {"webhooks_missing", "hooks_lost"}, what="the alarms")
    assert live.assign() == BEN
    live.settle()
    live.run_chore("hooks")
    assert "hooks_lost" not in live.alarms()
    # A ban only loses deliveries: there is nothing to make again.
    live.account.deaf = True
    refs = [live.create(created=a_minute_ago) for _ in range(3)]
    assert sweep(live.runtime, live.tenant, datetime.now(UTC) - timedelta(hours=1)).found == 3
    assert sorted(live.wait_owner(ref) for ref in refs) == sorted([CY, ANA, BEN])
    live.settle()
    live.audit()
    assert "hooks_lost" not in live.alarms()


def test_while_sending_is_stopped_no_hook_is_made(live: Live) -> None:
    live.account.hooks.clear()
    tenants.set_sending(live.runtime, live.tenant, False)
    live.run_chore("hooks")
    assert live.account.hooks == []
    tenants.set_sending(live.runtime, live.tenant, True)
    live.run_chore("hooks")
    assert len(live.account.standing(live.hook_url)) == 3


def test_an_agent_whom_pipedrive_refuses_is_passed_over(live: Live) -> None:
    live.account.agents[ANA] = replace(live.account.agents[ANA], active=False)  # read as active a moment ago
    ref = live.create()
    assert live.wait_owner(ref) == BEN
    live.settle()
    assert live.void_turns() == {1: "refused"}
    assert live.account.written == [(ref, ANA), (ref, BEN)]


def test_a_human_who_is_faster_wins_and_one_who_gives_it_back_has_it_routed(live: Live) -> None:
    live.stop_worker()
    ref = live.create()
    live.account.give(ref, CY)
    live.start_worker()
    live.settle()
    assert (live.owner(ref), live.account.written) == (CY, [])
    live.account.give(ref, None)  # to the user who stands for nobody
    assert live.wait_owner(ref) == ANA
    live.settle()
    live.account.archived.add(ref)
    live.account.tell("change", ref, {"is_archived": False})
    until(lambda: live.standing(ref)["state"] == "gone", what="the end of it")
    live.audit()


def test_the_whole_way_can_be_tried_and_teams_are_read(live: Live) -> None:
    way = testing.send(live.runtime, live.tenant, live.agent_id(CY), patience=20)
    assert (way.whole, way.removed, way.heard is not None) == (True, True, True)
    assert way.ref not in live.account.leads
    live.settle()
    assert live.position() == 0
    live.account.teams = {"81": ("North", [ANA, BEN])}
    assert teams.as_queues(live.runtime, live.tenant).queues == ("North",)


def test_an_account_connects_by_oauth_and_brings_its_address(bare: Live) -> None:
    account = bare.account
    apps.set_app(
        bare.runtime,
        "pipedrive",
        parameters={"client_id": CLIENT[0], "authorize_url": f"{account.url}/oauth/authorize"},
        secret_values={"client_secret": CLIENT[1]},
        base_url=account.url,
    )
    bare.add(by_oauth=True)

    def consent() -> Answer:
        begun = browse(oauth.link(bare.runtime, bare.tenant))
        asked = dict(parse_qsl(urlsplit(begun.headers["location"]).query))
        assert set(asked) == {"client_id", "redirect_uri", "response_type", "state"}
        back = f"{asked['redirect_uri']}?state={asked['state']}&code=code-1"
        return browse(back, begun.headers["set-cookie"].partition(";")[0])

    assert b"account 13052000" in consent().body
    account.company = 13052001  # the admin of two companies, who is signed in to the other one
    assert (refused := consent()).status == 400
    assert b"another account than the one" in refused.body
    account.company = 13052000
    bare.open()
    assert [bare.assign() for _ in range(2)] == [ANA, BEN]
    bare.settle()
    assert bare.one("SELECT base_url FROM oauth_grants WHERE tenant_id = :t") == account.url
    assert bare.alarms() == set()
    # An account that removes the app: Pipedrive says so, and by a renewal it says whether that ended the consent.
    proof, told = "Basic Y2xpZW50LWlkLTEyMzpjbGllbnQtc2VjcmV0LTQ1Ng==", {"client_id": CLIENT[0], "user_id": 7}
    callback = f"{bare.runtime.settings.public_url}/oauth/callback"

    def removed(body: Any, said: str | None = proof) -> int:
        headers = {"Content-Type": "application/json"} | ({"Authorization": said} if said else {})
        return http_send(callback, json.dumps(body).encode(), headers, "DELETE").status

    ours = told | {"company_id": 13052000}
    assert [removed(ours, said) for said in (None, "", proof[:-1], proof + "x", "Basic Og==")] == [401] * 5
    assert (removed(told), removed([]), removed(told | {"company_id": 1})) == (400, 400, 200)
    assert account.renewed == 0
    assert removed(ours) == 200  # by another user, for themselves
    until(lambda: account.renewed == 1, what="a renewal")
    assert bare.assign() == CY
    bare.settle()
    account.granted = False
    assert removed(ours) == 200
    until(lambda: "reconnect_needed" in bare.alarms(), what="the alarm")
    account.granted = True
    assert consent().status == 200
    bare.stop_worker()
    tenants.uninstall(bare.runtime, bare.tenant)
    assert account.revoked == [("1:2:3", proof)]
