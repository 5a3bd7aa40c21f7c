"""What an admin changes of a tenant later, by the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import sqlalchemy as sa

from connector import tenants
from connector.errors import TurnlockError
from connector.runtime import Runtime
from connector.settings import Settings
from connector.tenant_changes import change
from tests.adapters.kit_salesforce import ACCOUNT, FakeSalesforce
from tests.adapters.loopback import Received, Reply, Server
from tests.connector.cli_rig import Cli


@pytest.fixture
def acme(database: Settings) -> Cli:
    cli = Cli(database, {"TURNLOCK_SECRET_ACCESS_TOKEN": "canary-session-1"})
    add = ("tenant", "add", "acme", "--crm", "salesforce", "--base-url", "http://127.0.0.1:1")
    cli(*add, "--secret", "access_token", "--param", "fields=Beds__c")
    return cli


def test_who_has_an_app_is_asked_for_its_secret_and_for_no_token(database: Settings) -> None:
    cli = Cli(database, {"TURNLOCK_SECRET_ACCESS_TOKEN": "of another", "TURNLOCK_SECRET_CLIENT_SECRET": "canary"})
    add = ("tenant", "add", "beta", "--crm", "salesforce", "--base-url", "https://acme.example.com")
    cli(*add, "--param", "client_id=3MVG9")
    assert cli.json("tenant", "set", "beta", "--param", "client_id=3MVG8")["parameters"]["client_id"] == "3MVG8"
    assert "client_id: cannot be empty" in cli("tenant", "set", "beta", "--param", "client_id=", code=1).stderr


def test_parameters_are_changed_and_taken_back(acme: Cli) -> None:
    assert "price_field=Budget__c" in acme("tenant", "set", "acme", "--param", "price_field=Budget__c").stdout
    found = acme.json("tenant", "set", "acme", "--param", "fields=", "--param", "sweep_min_age=")
    assert found["parameters"] == {
        "api_version": "66.0", "all_queues": "no", "price_field": "Budget__c", "sweep_min_age": "120",
    }  # fmt: skip
    assert found["base_url"] == "http://127.0.0.1:1"
    moved = acme.json("tenant", "set", "acme", "--base-url", "http://127.0.0.1:2/")
    assert moved["base_url"] == "http://127.0.0.1:2"
    (row,) = acme.json("tenant", "list")["tenants"]
    assert row["base_url"] == "http://127.0.0.1:2"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "nothing to change"),
        (("--param", "price=1"), "salesforce has no such parameter; it has all_queues, api_version, client_id"),
        (("--param", "access_token=canary"), "turnlock tenant secret acme access_token"),
        (("--param", "base_url=https://x.example.com"), "--base-url"),
        (("--param", "client_id=3MVG9"), "acme has no app of its own"),
    ],
)
def test_what_cannot_be_changed_is_told_and_nothing_is(acme: Cli, given: tuple[str, ...], said: str) -> None:
    good = ("--param", "price_field=Budget__c") if given else ()
    answer = acme("tenant", "set", "acme", *good, *given, code=1)
    assert said in answer.stderr
    assert "canary" not in answer.output
    assert "price_field" not in acme.json("tenant", "set", "acme", "--param", "fields=Beds__c")["parameters"]


@pytest.fixture
def servers() -> Iterator[dict[str, str]]:
    """The account of a tenant, where it was moved to, and another one."""

    def other(asked: Received) -> Reply:
        return Reply(body={"identity": "https://login.salesforce.com/id/00D7Q000000Othr/0057Q000000Ntgr"})

    with ExitStack() as stack:
        handlers = {"here": FakeSalesforce().handle, "moved": FakeSalesforce().handle, "other": other}
        yield {name: stack.enter_context(Server(handle).running()).url for name, handle in handlers.items()}


def test_another_address_is_of_the_same_account(runtime: Runtime, servers: dict[str, str]) -> None:
    tenants.add_tenant(
        runtime, "acme", "salesforce", base_url=servers["here"], parameters={},
        secret_values={"access_token": "canary-session-1"},
    )  # fmt: skip
    with runtime.engine.connect() as conn:
        tenant = runtime.tenant_named(conn, "acme")
    tenants.install(runtime, tenant)
    with pytest.raises(TurnlockError, match="another account than the one"):
        change(runtime, tenant, parameters={}, base_url=servers["other"])
    change(runtime, tenant, parameters={}, base_url=servers["moved"])
    with runtime.engine.connect() as conn:
        kept = conn.execute(sa.text("SELECT base_url, account_ref FROM tenants WHERE name = 'acme'")).one()
    assert kept == (servers["moved"], ACCOUNT)
