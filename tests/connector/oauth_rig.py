"""What the tests of OAuth and apps share: an app at the sandbox's HubSpot, an admin with a browser, and deliveries."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from adapters.client import Client
from adapters.oauth import StaleToken
from connector import apps, oauth, tenants
from connector.runtime import Runtime, Tenant
from connector.sandbox import hubspot
from tests.rig import ABC, Reply, Rig, http_send


def browse(url: str, cookie: str | None = None) -> Reply:
    """GET an address as a browser would, without following where it leads."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=15)
    try:
        headers = {"Cookie": cookie} if cookie else {}
        connection.request("GET", parts.path + (f"?{parts.query}" if parts.query else ""), headers=headers)
        answer = connection.getresponse()
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def ask_at_once(runtime: Runtime, tenant: Tenant, threads: int) -> list[Client]:
    """The clients that so many threads of two processes get who ask at once, each again while others renew."""
    both = (runtime, Runtime(runtime.settings, runtime.engine))
    start = threading.Barrier(threads)

    def ask(of: Runtime) -> Client:
        start.wait(10)
        while True:
            try:
                return oauth.client(of, tenant)
            except StaleToken as error:
                threading.Event().wait((error.retry_after or 0.1) / 10)

    with ThreadPoolExecutor(threads) as pool:
        asked = [pool.submit(ask, both[n % 2]) for n in range(threads)]
        return [one.result(20) for one in asked]


class AppRig(Rig):
    """One tenant by OAuth of an app at the sandbox's HubSpot."""

    def register_app(self) -> None:
        """As an operator does, once."""
        account = self.sandbox.account()
        apps.set_app(
            self.runtime,
            "hubspot",
            parameters={
                "client_id": account["hubspot_client"],
                "authorize_url": f"{self.sandbox.hubspot_url}/oauth/authorize",
            },
            secret_values={"client_secret": account["hubspot_secret"]},
            base_url=self.sandbox.hubspot_url,
        )

    def add(self, name: str = "acme") -> None:
        """Add the tenant; nothing is granted yet."""
        tenants.add_tenant(self.runtime, name, "hubspot", base_url=None, parameters={}, secret_values={}, by_oauth=True)
        with self.runtime.engine.connect() as conn:
            self.tenant = self.runtime.tenant_named(conn, name)

    def consent(self) -> tuple[str, str]:
        """The admin opens the link and agrees: where the CRM sends the browser, and the browser's cookie."""
        begun = browse(oauth.link(self.runtime, self.tenant))
        assert begun.status == 302
        agreed = browse(begun.headers["location"])
        assert agreed.status == 302
        return agreed.headers["location"], begun.headers["set-cookie"].partition(";")[0]

    def connect(self) -> Reply:
        """The whole way."""
        return browse(*self.consent())

    def install(self) -> None:
        """As an admin does after connecting; the CRM's app posts to the app's hook."""
        tenants.install(self.runtime, self.tenant)
        self.sandbox.add_hook("hubspot", apps.app_hook_url(self.runtime, "hubspot"))
        self.configure(ABC)

    def tokens(self) -> list[Mapping[str, Any]]:
        """Calls of the CRM's token address."""
        return [c for c in self.sandbox.call_log() if c["path"] == "/hubspot/oauth/v3/token"]

    def grant(self) -> Mapping[str, Any]:
        """The row of the tenant's grant."""
        (row,) = self.rows(
            sa.text("SELECT * FROM oauth_grants WHERE tenant_id = :t").bindparams(t=self.tenant.tenant_id)
        )
        return row._mapping  # type: ignore[no-any-return]

    def tell_app(self, elements: Sequence[Mapping[str, Any]], secret: str | None = None) -> Reply:
        """A delivery to the app's hook."""
        url = apps.app_hook_url(self.runtime, "hubspot")
        body = json.dumps(list(elements)).encode()
        headers = hubspot.signed_headers(secret or self.sandbox.account()["hubspot_secret"], url, body)
        return http_send(url, body, headers)

    def stale(self) -> None:
        """As if the token's time were over."""
        self.sql(
            "UPDATE oauth_grants SET expires_at = clock_timestamp(), due_at = clock_timestamp() WHERE tenant_id = :t"
        )
        self.runtime.forget_secrets()
