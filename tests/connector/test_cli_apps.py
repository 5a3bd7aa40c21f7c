"""The command line of apps: registering one, connecting an account, trying the whole way, reading its teams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from connector.runtime import Runtime
from connector.sandbox import Sandbox
from connector.settings import Settings
from tests.connector.cli_rig import command_line
from tests.connector.oauth_rig import AppRig, browse
from tests.rig import ABC, CY


@pytest.fixture
def live(runtime: Runtime) -> Iterator[AppRig]:
    """A sandbox CRM and a running service without any tenant."""
    with Sandbox(retry_scale=0.001) as sandbox:
        rig = AppRig(runtime, sandbox, "hubspot")
        rig.start_web()
        rig.start_worker()
        yield rig
        rig.stop()


def test_from_an_app_to_a_test_lead(live: AppRig, database: Settings) -> None:
    account = live.sandbox.account()
    secret = {"TURNLOCK_SECRET_CLIENT_SECRET": account["hubspot_secret"]}
    with command_line(replace(database, public_url=live.runtime.settings.public_url)) as turnlock:
        wrong = turnlock("tenant", "add", "acme", "--crm", "hubspot", "--oauth", code=1)
        assert "turnlock app set hubspot" in wrong.stderr
        registered = turnlock(
            "app", "set", "hubspot", "--base-url", live.sandbox.hubspot_url,
            "--param", f"client_id={account['hubspot_client']}",
            "--param", f"authorize_url={live.sandbox.hubspot_url}/oauth/authorize", "--secret", "client_secret",
            **secret,
        )  # fmt: skip
        assert account["hubspot_secret"] not in registered.output
        addresses = turnlock.json("app", "show", "hubspot")
        assert addresses["redirect_url"].endswith("/oauth/callback")
        assert addresses["hook_url"] in registered.stdout
        add = ("tenant", "add", "acme", "--crm", "hubspot", "--oauth")
        # A secret that is there for another tenant is none of this one's.
        assert "`turnlock connect acme`" in turnlock(*add, TURNLOCK_SECRET_ACCESS_TOKEN="canary").stdout
        assert "not connected yet" in turnlock("install", "acme", code=1).stderr
        link = turnlock.json("connect", "acme")["url"]
        begun = browse(link)
        cookie = begun.headers["set-cookie"].partition(";")[0]
        assert browse(browse(begun.headers["location"]).headers["location"], cookie).status == 200
        assert turnlock.json("install", "acme")["by_hand"] == []
        assert [row["name"] for row in turnlock.json("tenant", "list")["tenants"]] == ["acme"]
        with live.runtime.engine.connect() as conn:
            live.tenant = live.runtime.tenant_named(conn, "acme")
        live.configure(ABC)
        app_id = ("--param", f"app_id={account['hubspot_app']}")
        key = {"TURNLOCK_SECRET_DEVELOPER_KEY": account["hubspot_developer"]}
        install = ("app", "install", "hubspot")
        refused = turnlock(*install, *app_id, code=1, **{"TURNLOCK_SECRET_DEVELOPER_KEY": "guessed"}).stderr
        assert "does not take the developer key" in refused
        assert "guessed" not in refused
        assert "app_id: must be the app's number" in turnlock(*install, "--param", "app_id=x", code=1, **key).stdout
        missing = turnlock(*install, code=1).stderr
        assert "app_id: missing; give it with --param app_id" in missing
        assert "developer_key: missing; give it with --secret developer_key" in missing
        for _ in range(2):
            done = turnlock.json(*install, *app_id, **key)
            assert (len(done["topics"]), done["by_hand"]) == (8, [])
        (hook,) = live.sandbox.hooks()
        assert (hook["url"], hook["active"]) == (addresses["hook_url"], True)
        way = turnlock.json("test-lead", "acme", "--to", CY, "--wait", "20")
        assert (way["whole"], way["removed"]) == (True, True)
        live.sandbox.webhook_faults(drop=1.0)
        missed = turnlock("test-lead", "acme", "--to", CY, "--wait", "1", code=1).stdout
        assert "no webhook came in: see `turnlock check`" in missed
        assert "It is removed from the CRM." in missed
        live.sandbox.webhook_faults()
        for hook in live.sandbox.crm.state.hooks.values():
            hook.url = "https://other.example.com/hooks/canary"
        elsewhere = turnlock(*install, *app_id, code=1, **key).stdout
        assert "at other.example.com: --replace makes it this one" in elsewhere
        assert "canary" not in elsewhere
        turnlock(*install, *app_id, "--replace", **key)
        assert turnlock.json("test-lead", "acme", "--to", CY, "--wait", "20")["whole"] is True
        teams = turnlock("queue", "import", "acme")
        assert teams.stdout.startswith("queues:\n  Shared pond:\n")
