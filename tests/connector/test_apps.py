"""An app's one hook: each element reaches the tenant whose account it names, once, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from connector import apps, splitting, tenants
from connector.apps import app_tenant
from connector.runtime import Runtime
from connector.sandbox import Sandbox
from connector.sandbox.hubspot import element
from tests.connector.oauth_rig import AppRig
from tests.rig import ANA, BEN, CY, until

OURS, THEIRS, NOBODYS = 62515, 62516, 7


@pytest.fixture
def pair(runtime: Runtime) -> Iterator[tuple[AppRig, AppRig]]:
    """Two tenants of one app, each with an account of its own; everything runs."""
    with Sandbox(retry_scale=0.001) as one, Sandbox(retry_scale=0.001) as two:
        two.crm.state.account = type(two.crm.state.account)(hubspot_portal=THEIRS)
        acme, beta = AppRig(runtime, one, "hubspot"), AppRig(runtime, two, "hubspot")
        acme.start_web()
        for rig, name in ((acme, "acme"), (beta, "beta")):
            rig.register_app()  # the second's server is another, but the app is one
            rig.add(name)
            assert rig.connect().status == 200
            rig.install()
        acme.start_worker()
        yield acme, beta
        acme.stop()
        assert one.errors() == two.errors() == []


def app_events(rig: AppRig) -> list[tuple[str, str]]:
    """State and reason of the app's own events."""
    with rig.runtime.engine.connect() as conn:
        app = app_tenant(rig.runtime, conn, "hubspot").tenant_id
        query = sa.text("SELECT state, reason FROM events WHERE tenant_id = :t ORDER BY received_at, ordinal")
        return [(row.state, row.reason or "") for row in conn.execute(query, {"t": app})]


def test_each_element_goes_to_its_own_tenant_in_order(pair: tuple[AppRig, AppRig]) -> None:
    acme, beta = pair
    for rig in pair:
        rig.sandbox.webhook_faults(drop=1.0)
    ours = [acme.create() for _ in range(3)]
    theirs = [beta.create() for _ in range(2)]
    told = [
        element(OURS, 1, "contact.creation", int(ours[0]), 1),
        element(THEIRS, 1, "contact.creation", int(theirs[0]), 2),
        element(NOBODYS, 1, "contact.creation", 5, 3),
        element(OURS, 1, "contact.creation", int(ours[1]), 4),
        element(OURS, 1, "company.creation", 5, 5),
        element(THEIRS, 1, "contact.creation", int(theirs[1]), 6),
        element(OURS, 1, "contact.creation", int(ours[2]), 7),
    ]
    assert acme.tell_app(told).status == 200
    assert [acme.wait_owner(ref) for ref in ours] == [ANA, BEN, CY]
    assert [beta.wait_owner(ref) for ref in theirs] == [ANA, BEN]
    assert [e.ref for e in acme.events()] == ours
    assert [e.ref for e in beta.events()] == theirs
    assert sorted(app_events(acme)) == sorted(
        [("done", "copied")] * 5 + [("ignored", "unknown_account"), ("ignored", "")]
    )
    # Again, whole and in parts, as a CRM's retries do: nothing new anywhere.
    assert acme.tell_app([{**e, "attemptNumber": 1} for e in told]).status == 200
    assert acme.tell_app(told[3:]).status == 200
    for rig in pair:
        rig.settle()
        rig.audit()
    assert (len(acme.events()), len(beta.events())) == (3, 2)
    assert (acme.position(), beta.position()) == (3, 2)


def test_a_delivery_for_one_account_changes_nothing_at_another(pair: tuple[AppRig, AppRig]) -> None:
    acme, beta = pair
    for rig in pair:
        rig.sandbox.webhook_faults(drop=1.0)
    ref = acme.create()
    assert ref == beta.create()  # the same id in two accounts
    told = [element(OURS, 1, "contact.creation", int(ref), 1)]
    assert acme.tell_app(told).status == 200
    assert acme.wait_owner(ref) == ANA
    acme.settle()
    assert beta.events() == []
    assert beta.owner(ref) is None
    assert beta.position() == 0
    # Not signed by the app, or sent on to a tenant's own hook: refused.
    assert acme.tell_app(told, secret="other").status == 401
    assert beta.post(beta.delivery(ref), {**beta.signed(beta.delivery(ref))}).status == 401


def test_the_copies_end_with_the_tenant(pair: tuple[AppRig, AppRig]) -> None:
    acme, beta = pair
    tenants.uninstall(beta.runtime, beta.tenant)
    assert acme.tell_app([element(THEIRS, 1, "contact.creation", 5001, 1)]).status == 200
    until(lambda: app_events(acme) == [("ignored", "unknown_account")], what="its end")


def test_a_crash_between_copy_and_end_copies_nothing_twice(
    pair: tuple[AppRig, AppRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    acme, beta = pair
    for rig in pair:
        rig.sandbox.webhook_faults(drop=1.0)
    ours, theirs = acme.create(), beta.create()
    ended: list[Any] = []
    real = splitting._end

    def dies_first(*args: Any, **named: Any) -> None:
        ended.append(named)
        if len(ended) == 1:
            raise RuntimeError
        real(*args, **named)

    monkeypatch.setattr(splitting, "_end", dies_first)
    told = [
        element(OURS, 1, "contact.creation", int(ours), 1),
        element(THEIRS, 1, "contact.creation", int(theirs), 2),
    ]
    assert acme.tell_app(told).status == 200
    assert (acme.wait_owner(ours), beta.wait_owner(theirs)) == (ANA, ANA)
    until(lambda: app_events(acme) == [("done", "copied")] * 2, what="the end")
    assert (len(acme.events()), len(beta.events())) == (1, 1)


def test_what_cannot_be_read_parks_at_its_tenant_or_at_the_app(pair: tuple[AppRig, AppRig]) -> None:
    acme, _ = pair
    bad = {**element(OURS, 1, "contact.creation", 1, 1), "objectId": "x y"}
    nobodys = {**bad, "portalId": None}
    assert acme.tell_app([bad, nobodys]).status == 200
    until(lambda: [e.state for e in acme.events()] == ["parked"], what="the copy")
    assert acme.alarms() == {"unreadable_event"}
    ends = [("done", "copied"), ("parked", "missing_portal_id")]
    until(lambda: sorted(app_events(acme)) == ends, what="the end")  # what is copied is closed after the copy


def test_an_app_is_no_tenant_to_route_for(pair: tuple[AppRig, AppRig]) -> None:
    acme, _ = pair
    from connector.cli.support import each_tenant

    assert [t.name for t in each_tenant(acme.runtime, None)] == ["acme", "beta"]
    assert tenants.install(acme.runtime, acme.tenant).hook_url == apps.app_hook_url(acme.runtime, "hubspot")
    assert tenants.install(acme.runtime, acme.tenant).by_hand == ()
