"""OAuth: a consent is the right admin's, a token is renewed once whoever asks, and a grant that is over is no loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from adapters.oauth import DeadGrant, NotConnected, StaleToken
from adapters.outcome import CrmError, Outcome
from connector import apps, oauth, tenants
from connector.errors import TurnlockError
from connector.runtime import Runtime
from connector.sandbox import Sandbox
from connector.vault import Vault
from tests.connector.oauth_rig import AppRig, ask_at_once, browse
from tests.rig import ANA, BEN, CY, captured_logs, until


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(retry_scale=0.001) as made:
        yield made
        assert made.errors() == []


@pytest.fixture
def live(runtime: Runtime, sandbox: Sandbox) -> Iterator[AppRig]:
    """A tenant by OAuth that is added and not connected; the web server runs, no worker yet."""
    rig = AppRig(runtime, sandbox, "hubspot")
    rig.start_web()
    rig.register_app()
    rig.add()
    yield rig
    rig.stop()


# -- consent -----------------------------------------------------------------------------------------------------------


def test_from_the_admins_link_to_leads_with_agents(live: AppRig) -> None:
    (finding,) = tenants.check(live.runtime, live.tenant)
    assert not finding.ok
    assert "turnlock connect" in finding.fix
    page = live.connect()
    assert page.status == 200
    assert b"acme, account 62515" in page.body
    assert live.one("SELECT account_ref FROM tenants WHERE tenant_id = :t") == "62515"
    live.install()
    live.start_worker()
    assert [live.assign() for _ in range(4)] == [ANA, BEN, CY, ANA]
    live.settle()
    live.audit()
    assert all(f.ok for f in tenants.check(live.runtime, live.tenant))
    assert len(live.tokens()) == 1
    assert live.alarms() == set()


def test_the_consent_asks_for_what_is_needed_and_proves_itself(live: AppRig) -> None:
    begun = browse(oauth.link(live.runtime, live.tenant))
    asked = dict(parse_qsl(urlsplit(begun.headers["location"]).query))
    assert set(asked) == {
        "client_id", "redirect_uri", "response_type", "scope", "state", "code_challenge", "code_challenge_method",
    }  # fmt: skip
    assert asked["code_challenge_method"] == "S256"
    assert "crm.objects.contacts.write" in asked["scope"].split()
    assert asked["state"].startswith(live.tenant.tenant_id.hex)
    cookie = begun.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert "Path=/oauth" in cookie


def test_a_state_is_good_once_in_its_own_browser_for_its_own_tenant(live: AppRig) -> None:
    url, cookie = live.consent()
    other = AppRig(live.runtime, live.sandbox, "hubspot")
    other.add("beta")
    _, foreign = other.consent()
    swapped = url.replace(live.tenant.tenant_id.hex, other.tenant.tenant_id.hex)
    for asked, brought in (
        (url, None), (url, foreign), (url, "turnlock_oauth=x"), (swapped, cookie), (swapped, foreign),
        (url.partition("&state")[0], cookie), (url.replace("code=", "c="), cookie), (url + "x", cookie),
    ):  # fmt: skip
        assert browse(asked, brought).status == 400
    assert live.tokens() == []
    assert browse(url, cookie).status == 200
    again = browse(url, cookie)
    assert again.status == 400
    assert len(live.tokens()) == 1
    assert other.one("SELECT count(*) FROM oauth_grants WHERE tenant_id = :t") == 0


def test_an_old_link_and_one_of_a_removed_tenant_lead_nowhere(live: AppRig) -> None:
    link = oauth.link(live.runtime, live.tenant)
    assert browse(link[:-1]).status == 404
    assert browse(link + "?x").status == 302  # a chat that looks at it first does not use it up
    url, cookie = live.consent()
    live.sql("UPDATE oauth_states SET expires_at = clock_timestamp() WHERE tenant_id = :t")
    assert browse(link).status == 404
    assert browse(url, cookie).status == 400
    assert b"Open the link again" in browse(url, cookie).body


def test_one_account_is_one_tenant(live: AppRig) -> None:
    assert live.connect().status == 200
    other = AppRig(live.runtime, live.sandbox, "hubspot")
    other.add("beta")
    refused = other.connect()
    assert refused.status == 400
    assert b"another tenant" in refused.body
    assert other.one("SELECT count(*) FROM oauth_grants WHERE tenant_id = :t") == 0
    tenants.uninstall(live.runtime, live.tenant)
    assert other.connect().status == 200  # free again


def test_an_account_that_never_agreed_is_uninstalled_without_asking_the_crm(live: AppRig) -> None:
    link = oauth.link(live.runtime, live.tenant)
    assert tenants.uninstall(live.runtime, live.tenant) == 0
    assert browse(link).status == 404
    assert live.sandbox.call_log() == []


def test_an_uninstall_gives_the_consent_back(live: AppRig) -> None:
    live.connect()
    tenants.uninstall(live.runtime, live.tenant)
    given = [c for c in live.sandbox.call_log() if c["path"] == "/hubspot/oauth/v3/token/revoke"]
    assert [c["status"] for c in given] == [200]
    live.add("beta")
    assert live.connect().status == 200  # and the account may agree anew


def test_problems_are_told_at_once_with_their_fix(live: AppRig) -> None:
    with pytest.raises(TurnlockError) as caught:
        tenants.add_tenant(
            live.runtime, "app:x", "hubspot", base_url=None, parameters={}, by_oauth=True,
            secret_values={"access_token": "x"},
        )  # fmt: skip
    assert "choose another" in str(caught.value)
    assert "leave it out with --oauth" in str(caught.value)
    with pytest.raises(TurnlockError, match="has no OAuth"):
        tenants.add_tenant(
            live.runtime, "x", "bottlecrm", base_url="http://127.0.0.1:1", parameters={}, by_oauth=True,
            secret_values={"api_token": "x"},
        )  # fmt: skip
    with pytest.raises(TurnlockError) as caught:
        apps.set_app(live.runtime, "hubspot", parameters={"clientid": "1"}, secret_values={"secret": "x"})
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(TurnlockError, match="apps of this CRM are not supported"):
        apps.set_app(live.runtime, "bottlecrm", parameters={}, secret_values={})


def test_an_address_or_a_secret_that_cannot_be_sent_is_told_with_its_fix(runtime: Runtime) -> None:
    def add(base_url: str, token: str) -> tenants.Finding:
        given = {"base_url": base_url, "parameters": {}, "secret_values": {"access_token": token}}
        tenants.add_tenant(runtime, "acme", "salesforce", **given)  # type: ignore[arg-type]
        with runtime.engine.connect() as conn:
            (finding,) = tenants.check(runtime, runtime.tenant_named(conn, "acme"))
        return finding

    runtime.settings = replace(runtime.settings, allow_private_hosts=False)
    with pytest.raises(TurnlockError, match="only https on port 443"):
        add("http://acme.example.com", "t")
    with pytest.raises(TurnlockError, match="only https on port 443"):
        apps.set_app(runtime, "hubspot", parameters={"client_id": "1"}, secret_values={"client_secret": "x"},
                     base_url="http://acme.example.com")  # fmt: skip
    finding = add("https://acme.example.com", "canary é")
    assert (finding.ok, "canary" in repr(finding)) == (False, False)
    assert "header Authorization" in finding.fix


def test_no_token_is_stored_or_told_in_clear(live: AppRig) -> None:
    with captured_logs() as told:
        live.connect()
        live.install()
        live.start_worker()
        assert live.assign() == ANA
        live.settle()
        account = live.sandbox.account()
        for secret in (account["hubspot_refresh"], account["hubspot_secret"], "CK-sandbox"):
            assert secret not in told.getvalue()
            for table in ("oauth_grants", "oauth_states", "secrets", "tenants", "events", "alarms"):
                found = live.one(f"SELECT count(*) FROM {table} x WHERE x::text LIKE :like", like=f"%{secret}%")
                assert found == 0, (secret, table)
    before = bytes(live.grant()["sealed_refresh"])
    assert tenants.reseal(live.runtime) == 0
    keys = (Fernet.generate_key().decode(), *live.runtime.settings.secret_keys)
    live.runtime.settings = replace(live.runtime.settings, secret_keys=keys)
    live.runtime.vault = Vault(keys)
    assert tenants.reseal(live.runtime) >= 4
    assert bytes(live.grant()["sealed_refresh"]) != before


# -- renewal -----------------------------------------------------------------------------------------------------------


def test_two_workers_at_once_renew_once(live: AppRig, runtime: Runtime) -> None:
    live.connect()
    live.install()
    live.stale()
    second = Runtime(runtime.settings, runtime.engine)
    live.sandbox.fault("hold", path="/oauth/v3/token", times=1, apply=True)
    outcomes: list[Any] = []

    def ask(of: Runtime) -> None:
        try:
            outcomes.append(oauth.client(of, live.tenant))
        except CrmError as error:
            outcomes.append(error)

    first = threading.Thread(target=ask, args=(runtime,))
    first.start()
    try:
        assert live.sandbox.wait_held()
        for _ in range(5):
            ask(second)  # the claim stands, committed: nobody else calls, and nobody waits for a lock
        assert all(isinstance(o, StaleToken) and o.retry_after for o in outcomes)
        assert live.one("SELECT count(*) FROM pg_locks WHERE NOT granted") == 0
    finally:
        live.sandbox.release()
        first.join(20)
    assert not isinstance(outcomes[-1], Exception)
    ask(second)
    assert not isinstance(outcomes[-1], Exception)
    assert len(live.tokens()) == 2  # the consent's and one renewal


def test_without_the_claim_two_workers_would_renew_twice(
    live: AppRig, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oauth, "free", lambda *_: sa.true())
    with pytest.raises(AssertionError):
        test_two_workers_at_once_renew_once(live, runtime)


def test_many_threads_of_two_processes_renew_once(live: AppRig, runtime: Runtime) -> None:
    live.connect()
    live.stale()
    assert len(ask_at_once(runtime, live.tenant, 12)) == 12
    assert len(live.tokens()) == 2


def test_a_process_killed_between_call_and_store_blocks_nobody(live: AppRig, monkeypatch: pytest.MonkeyPatch) -> None:
    live.connect()
    live.stale()

    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> dict[str, Any]:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(oauth, "_kept", die)
        with pytest.raises(Killed):
            oauth.renew(live.runtime, live.tenant)
    assert len(live.tokens()) == 2
    with pytest.raises(StaleToken):
        oauth.client(live.runtime, live.tenant)  # its claim stands until its time is over
    assert len(live.tokens()) == 2
    live.sql("UPDATE oauth_grants SET leased_until = clock_timestamp() WHERE tenant_id = :t")
    oauth.client(live.runtime, live.tenant)
    assert len(live.tokens()) == 3
    assert live.grant()["state"] == "live"


def test_one_who_comes_back_too_late_stores_nothing(live: AppRig) -> None:
    live.connect()
    live.stale()
    live.sandbox.fault("hold", path="/oauth/v3/token", times=1, apply=True)
    late = threading.Thread(target=oauth.renew, args=(live.runtime, live.tenant))
    late.start()
    assert live.sandbox.wait_held()
    live.sql("UPDATE oauth_grants SET leased_until = clock_timestamp() WHERE tenant_id = :t")  # as if it hung for long
    oauth.renew(live.runtime, live.tenant)
    kept = dict(live.grant())
    live.sandbox.release()
    late.join(20)
    assert dict(live.grant()) == kept


def test_a_grant_that_is_over_needs_a_human_and_is_asked_for_once(live: AppRig) -> None:
    live.connect()
    live.install()
    live.start_worker()
    assert live.assign() == ANA
    live.settle()
    live.sandbox.configure(hubspot_revoked=True)
    live.stale()
    ref = live.create()
    until(lambda: "reconnect_needed" in live.alarms(), what="the alarm")
    asked = len(live.tokens())
    assert asked == 2
    for kind in ("agents", "sweep", "tokens"):
        live.want(kind)
    live.due_now()
    until(lambda: not chores_due(live), what="the chores")
    assert len(live.tokens()) == asked  # never a loop
    with pytest.raises(NotConnected) as caught:
        oauth.client(live.runtime, live.tenant)
    assert "turnlock connect" in caught.value.text
    assert live.owner(ref) is None
    # The human: connects again, and everything goes on by itself.
    live.sandbox.configure(hubspot_revoked=False)
    assert live.connect().status == 200
    live.due_now()
    assert live.wait_owner(ref) == BEN
    assert "reconnect_needed" not in live.alarms()


def chores_due(live: AppRig) -> list[Any]:
    return live.rows(
        sa.text("SELECT kind FROM chores WHERE tenant_id = :t AND due_at <= clock_timestamp()").bindparams(
            t=live.tenant.tenant_id
        )
    )


def test_invalid_grant_for_a_token_that_was_replaced_meanwhile_is_nothing(live: AppRig) -> None:
    live.connect()
    live.stale()
    live.sandbox.fault("hold", path="/oauth/v3/token", times=1, apply=False)
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            oauth.renew(live.runtime, live.tenant)
        except CrmError as error:
            caught.append(error)

    late = threading.Thread(target=ask)
    late.start()
    assert live.sandbox.wait_held()
    assert live.connect().status == 200  # the admin connects anew while the old token is being asked about
    live.sandbox.configure(hubspot_revoked=True)
    live.sandbox.release()
    late.join(20)
    assert isinstance(caught[0], DeadGrant)
    assert live.grant()["state"] == "live"
    assert "reconnect_needed" not in live.alarms()
    oauth.client(live.runtime, live.tenant)


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 429, "retry_after": 7}])
def test_a_crm_that_does_not_renew_now_is_asked_later(live: AppRig, fault: dict[str, Any]) -> None:
    live.connect()
    live.stale()
    live.sandbox.fault("status", path="/oauth/v3/token", times=1, **fault)
    with pytest.raises(CrmError):
        oauth.client(live.runtime, live.tenant)
    with pytest.raises(StaleToken):
        oauth.client(live.runtime, live.tenant)
    assert len(live.tokens()) == 2
    left = live.one("SELECT extract(epoch FROM due_at - clock_timestamp()) FROM oauth_grants WHERE tenant_id = :t")
    assert (5 < left <= 7) if "retry_after" in fault else (0 < left <= 2)
    live.sql("UPDATE oauth_grants SET due_at = clock_timestamp() WHERE tenant_id = :t")
    oauth.client(live.runtime, live.tenant)


def test_an_app_that_is_refused_says_so(live: AppRig) -> None:
    live.connect()
    live.stale()
    apps.set_app(live.runtime, "hubspot", parameters={"client_id": "other"}, secret_values={})
    with pytest.raises(CrmError) as caught:
        oauth.client(live.runtime, live.tenant)
    assert caught.value.outcome is Outcome.FORBIDDEN
    assert "turnlock app" in caught.value.text
    assert live.grant()["state"] == "live"  # the account's grant is not over


def test_a_refused_token_is_renewed_once_before_the_clock_says_so(live: AppRig) -> None:
    live.connect()
    live.install()
    live.start_worker()
    live.wait_chores()  # the refused call is to be the lead's
    assert live.assign() == ANA
    live.settle()
    live.first_round()  # else the reading of teams may be refused instead of a lead's
    live.sql("UPDATE oauth_grants SET renewed_at = clock_timestamp() - interval '11 minutes' WHERE tenant_id = :t")
    live.sandbox.fault("status", status=401, path="/crm/v3", times=1)
    ref = live.create()
    until(lambda: len(live.tokens()) == 2, what="a renewal")
    until(lambda: live.grant()["lease"] is None, what="its end")
    live.due_now()
    assert live.wait_owner(ref) == BEN
    live.settle()
    live.sandbox.fault("status", status=401, path="/crm/v3", times=1)
    live.create()
    until(lambda: "crm_refuses_us" in live.alarms(), what="the alarm")
    assert len(live.tokens()) == 2  # renewed just now, so it is not the token


def test_the_token_is_renewed_ahead_of_its_end_by_the_chore(live: AppRig) -> None:
    live.connect()
    live.install()
    live.start_worker()
    until(lambda: not chores_due(live), what="the chores")
    due = live.one(
        "SELECT extract(epoch FROM due_at - clock_timestamp()) FROM chores WHERE tenant_id = :t AND kind = 'tokens'"
    )
    assert 1200 < due <= 1500  # of 1800 seconds
    live.sql("UPDATE oauth_grants SET due_at = clock_timestamp() WHERE tenant_id = :t")
    live.want("tokens")
    until(lambda: len(live.tokens()) == 2, what="the renewal")
