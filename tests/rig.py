"""A whole Turnlock for tests: a database of its own, the web server on a real socket, a worker, the sandbox CRM."""

from __future__ import annotations

import http.client
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import sqlalchemy as sa
import structlog

from connector import configuration, log, tenants
from connector.auditing import audit_queues
from connector.database import unit
from connector.process import Web
from connector.runtime import Runtime, Tenant
from connector.sandbox import Sandbox, fub_hooks, generic
from connector.tables import events
from connector.worker import Worker
from routing import tables as t

ANA, BEN, CY, DEE, ELI = "12", "13", "14", "15", "16"
ABC = "default_queue: All\nqueues:\n  All:\n    members: ['12', '13', '14']\n"


def until(true: Callable[[], Any], seconds: float = 20.0, what: str = "it") -> Any:
    """Wait for something that happens elsewhere; gives what `true` gave."""
    ends = time.monotonic() + seconds
    while True:
        found = true()
        if found:
            return found
        assert time.monotonic() < ends, f"{what} never happened"
        time.sleep(0.01)


@contextmanager
def captured_logs() -> Iterator[io.StringIO]:
    """Everything that is logged meanwhile, as an operator gets it."""
    stream = io.StringIO()
    log.configure(stream=stream)
    try:
        yield stream
    finally:
        structlog.reset_defaults()


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def http_send(url: str, body: bytes, headers: Mapping[str, str], method: str = "POST") -> Reply:
    """One request on a connection of its own; header names of the answer in lower case."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=15)
    try:
        connection.request(method, parts.path, body, dict(headers))
        answer = connection.getresponse()
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


@dataclass
class Rig:
    """One tenant of a sandbox, by default with queue "All" of Ana, Ben and Cy and nothing running yet."""

    runtime: Runtime
    sandbox: Sandbox
    crm: str = "followupboss"
    tenant: Tenant = field(init=False)
    web: Web | None = None
    worker: Worker | None = None

    # -- life ---------------------------------------------------------------------------------------------
    def start_web(self) -> None:
        """Serve the hooks on a free port."""
        self.web = Web(self.runtime, host="127.0.0.1", port=0, threads=16)
        object.__setattr__(self.runtime.settings, "public_url", f"http://127.0.0.1:{self.web.port}")
        self.web.start()

    def start_worker(self) -> None:
        """Start the threads of a worker; a rig may be stopped and started again."""
        self.worker = Worker(self.runtime)
        self.worker.start()

    def stop_worker(self) -> None:
        """Drain and stop."""
        if self.worker is not None:
            assert self.worker.stop(), "the worker did not drain"
            self.runtime.wake.unsubscribe(self.worker.woken)
            self.worker = None

    def stop(self) -> None:
        """Stop everything that runs."""
        self.stop_worker()
        if self.web is not None:
            self.web.stop()
            self.web = None

    # -- an admin's work ----------------------------------------------------------------------------------
    def add_tenant(self, name: str = "acme", *, subscribe: bool = True, config: str | None = ABC) -> Tenant:
        """Add and install a tenant as the CLI does, then apply `config`."""
        account = self.sandbox.account()
        if self.crm == "followupboss":
            base, secrets = self.sandbox.fub_url, {k: account[k] for k in ("api_key", "system_key")}
        else:
            base, secrets = self.sandbox.generic_url, {k: account[k] for k in ("api_secret", "webhook_secret")}
        tenants.add_tenant(self.runtime, name, self.crm, base_url=base, parameters={}, secret_values=secrets)
        with self.runtime.engine.connect() as conn:
            self.tenant = self.runtime.tenant_named(conn, name)
        if subscribe:
            tenants.install(self.runtime, self.tenant)
        if config is not None:
            self.configure(config)
        return self.tenant

    def configure(self, text: str) -> configuration.Applied:
        """Apply a configuration; "version: 1" is added."""
        return configuration.apply(self.runtime, self.tenant, "version: 1\n" + text, "test")

    @property
    def hook_url(self) -> str:
        """Where the CRM posts to."""
        with self.runtime.engine.connect() as conn:
            return tenants.hook_url(self.runtime, conn, self.tenant)

    # -- deliveries made by hand --------------------------------------------------------------------------
    def delivery(self, *refs: str, event: str = "evt_1") -> bytes:
        """The body of a delivery that tells of new leads; `event` is its id where the body holds one."""
        if self.crm == "followupboss":
            body: dict[str, Any] = {"eventId": event, "event": "peopleCreated", "resourceIds": [int(r) for r in refs]}
        else:
            body = {"type": "lead.created", "data": {"leads": [{"id": r} for r in refs]}}
        return json.dumps(body).encode()

    def signed(self, body: bytes, event: str = "evt_1") -> dict[str, str]:
        """All headers of a delivery, signed now as the CRM signs; `event` is its id where a header holds one."""
        account = self.sandbox.account()
        if self.crm == "followupboss":
            return {"Content-Type": "application/json", "FUB-Signature": fub_hooks.sign(body, account["system_key"])}
        return generic.signed_headers(account["webhook_secret"], event, body)

    def post(
        self, body: bytes, headers: Mapping[str, str] | None = None, *, event: str = "evt_1", url: str | None = None
    ) -> Reply:
        """Post a delivery to the hook; signed unless `headers` are given."""
        return http_send(url or self.hook_url, body, self.signed(body, event) if headers is None else headers)

    def events(self) -> list[Any]:
        """Every event of the tenant in order of receipt: state, reason, kind, ref, body of its delivery ..."""
        return self.rows(
            sa.text(
                "SELECT e.*, b.body FROM events e LEFT JOIN delivery_bodies b USING (tenant_id, delivery_id) "
                "WHERE tenant_id = :t ORDER BY e.received_at, e.delivery_id, e.ordinal"
            ).bindparams(t=self.tenant.tenant_id)
        )

    # -- what happened ------------------------------------------------------------------------------------
    def create(self, **fields: Any) -> str:
        """A lead comes in at the CRM; its id there."""
        return str(self.sandbox.create_lead(**fields))

    def owner(self, ref: str) -> str | None:
        """The owner in the CRM, as its id."""
        owner = self.sandbox.lead(int(ref))["owner"]  # type: ignore[index]
        return None if owner is None else str(owner)

    def wait_owner(self, ref: str, seconds: float = 20.0) -> str:
        """Wait until the CRM shows an agent."""
        return str(until(lambda: self.owner(ref), seconds, f"an owner for lead {ref}"))

    def assign(self, **fields: Any) -> str:
        """Create a lead and wait for its owner."""
        return self.wait_owner(self.create(**fields))

    def settle(self, seconds: float = 30.0) -> None:
        """Wait until nothing is waiting: no event, no write that is due."""

        def quiet() -> bool:
            with self.runtime.engine.connect() as conn:
                waiting = conn.execute(
                    sa.select(sa.func.count()).where(
                        events.c.tenant_id == self.tenant.tenant_id, events.c.state == "waiting"
                    )
                ).scalar_one()
                writes = conn.execute(
                    sa.select(sa.func.count()).where(
                        t.outbox.c.tenant_id == self.tenant.tenant_id, t.outbox.c.state == "open"
                    )
                ).scalar_one()
            return not waiting and not writes

        assert self.sandbox.wait_idle(seconds)
        until(quiet, seconds, "a quiet system")

    def rows(self, query: Any) -> list[Any]:
        """Read something."""
        with self.runtime.engine.connect() as conn:
            return list(conn.execute(query).all())

    def one(self, text: str, **values: Any) -> Any:
        """One value by plain SQL; :t is the tenant."""
        with self.runtime.engine.connect() as conn:
            return conn.execute(sa.text(text), {"t": self.tenant.tenant_id, **values}).scalar()

    def turns(self, queue: str = "All") -> list[str]:
        """The CRM ids of the agents, turn by turn; fails unless turns are 1, 2, 3 ... without a gap."""
        rows = self.rows(
            sa.text(
                "SELECT turn, r.ref FROM turns JOIN queues q USING (tenant_id, queue_id) "
                "JOIN agent_refs r USING (tenant_id, agent_id) WHERE tenant_id = :t AND q.name = :q ORDER BY turn"
            ).bindparams(t=self.tenant.tenant_id, q=queue)
        )
        assert [row.turn for row in rows] == list(range(1, len(rows) + 1))
        return [row.ref for row in rows]

    def position(self, queue: str = "All") -> int:
        """Turns taken so far."""
        return int(self.one("SELECT position FROM queues WHERE tenant_id = :t AND name = :q", q=queue))

    def alarms(self) -> set[str]:
        """Kinds of the open alarms."""
        rows = self.rows(
            sa.text("SELECT kind FROM alarms WHERE tenant_id = :t AND closed_at IS NULL").bindparams(
                t=self.tenant.tenant_id
            )
        )
        return {row.kind for row in rows}

    def standing(self, ref: str) -> Mapping[str, Any]:
        """Where the lead stands as owner: state, reason, epoch ..."""
        rows = self.rows(
            sa.text(
                "SELECT s.* FROM lead_roles s JOIN lead_refs r USING (tenant_id, lead_id) "
                "WHERE tenant_id = :t AND r.ref = :r AND role = 'owner'"
            ).bindparams(t=self.tenant.tenant_id, r=ref)
        )
        return rows[0]._mapping if rows else {"state": None}

    def lead_id(self, ref: str) -> UUID:
        """Our id of the CRM's lead."""
        return UUID(str(self.one("SELECT lead_id FROM lead_refs WHERE tenant_id = :t AND ref = :r", r=ref)))

    def pause(self, ref: str, paused: bool = True) -> None:
        """The admin pauses or resumes an agent."""
        from connector.switches import pause, resume

        with self.runtime.engine.connect() as conn:
            agent_id = conn.execute(
                sa.text("SELECT agent_id FROM agent_refs WHERE tenant_id = :t AND ref = :r"),
                {"t": self.tenant.tenant_id, "r": ref},
            ).scalar_one()
        (pause if paused else resume)(self.runtime, self.tenant, agent_id, "test")

    def audit(self) -> None:
        """The ledger of every queue replays to its present state."""
        for found in audit_queues(self.runtime, self.tenant.tenant_id, whole=True):
            assert found.ok, (found.queue, found.problems)

    def owner_writes(self, ref: str | None = None) -> list[dict[str, Any]]:
        """Owner writes that reached the CRM through its API."""
        log = [row for row in self.sandbox.write_log() if ref is None or str(row["lead"]) == ref]
        return list(log)

    def want(self, kind: str) -> None:
        """Make a chore due now."""
        from connector import work

        with unit(self.runtime.engine) as (conn, _):
            work.want(conn, self.tenant.tenant_id, kind)
        self.runtime.wake()
