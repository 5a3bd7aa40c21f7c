"""A whole Turnlock for tests: a database of its own, the web server on a real socket, a worker, the sandbox CRM."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import sqlalchemy as sa
import structlog

from adapters import registry
from connector import configuration, inbox, log, tenants, work
from connector.auditing import audit_queues
from connector.chores import sync_agents
from connector.database import make_engine, unit
from connector.process import Web
from connector.runtime import Runtime, Tenant
from connector.sandbox import Sandbox, bottlecrm, fub_hooks, generic, hubspot
from connector.sandbox.server import Server
from connector.tables import events
from connector.worker import Worker
from routing import rotation, store
from routing import tables as t
from routing.skips import unavailable

# CRMs of which the sandbox has no face: in the running service the fakes of the conformance suite stand for them.
_NO_FACE = frozenset({"espocrm", "frappe", "odoo", "pipedrive", "salesforce", "twenty"})
SANDBOXED = tuple(name for name in registry.names() if name not in _NO_FACE)
ANA, BEN, CY, DEE, ELI = "12", "13", "14", "15", "16"
ABC = "default_queue: All\nqueues:\n  All:\n    members: ['12', '13', '14']\n"


def until(true: Callable[[], Any], seconds: float = 20.0, what: str = "it") -> Any:
    """Wait for something that happens elsewhere; gives what `true` gave."""
    ends, pause = time.monotonic() + seconds, 0.005
    while True:
        found = true()
        if found:
            return found
        assert time.monotonic() < ends, f"{what} never happened"
        time.sleep(pause)
        pause = min(pause * 1.3, 0.05)  # most questions are statements, and take from what is waited for


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
        self.runtime.engine.dispose()  # the one of a restart is nobody else's to close

    # -- an admin's work ----------------------------------------------------------------------------------
    def add_tenant(self, name: str = "acme", *, subscribe: bool = True, config: str | None = ABC) -> Tenant:
        """Add and install a tenant as the CLI does, then apply `config`."""
        account = self.sandbox.account()
        if self.crm == "followupboss":
            base, secrets = self.sandbox.fub_url, {k: account[k] for k in ("api_key", "system_key")}
        elif self.crm == "bottlecrm":
            base, secrets = self.sandbox.bottlecrm_url, {k: account[k] for k in ("api_token", "webhook_secret")}
        elif self.crm == "hubspot":
            base = self.sandbox.hubspot_url
            secrets = {"access_token": account["hubspot_token"], "client_secret": account["hubspot_secret"]}
        else:
            base, secrets = self.sandbox.generic_url, {k: account[k] for k in ("api_secret", "webhook_secret")}
        tenants.add_tenant(self.runtime, name, self.crm, base_url=base, parameters={}, secret_values=secrets)
        with self.runtime.engine.connect() as conn:
            self.tenant = self.runtime.tenant_named(conn, name)
        if subscribe:
            installed = tenants.install(self.runtime, self.tenant)
            if installed.by_hand:  # what an admin does then
                self.sandbox.add_hook(self.crm, installed.hook_url)
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
        elif self.crm == "bottlecrm":
            (ref,) = refs
            return bottlecrm.event_body("lead.created", event, {"id": ref})
        elif self.crm == "hubspot":
            number = zlib.crc32(event.encode())
            made = [hubspot.element(62515, 9318066, "contact.creation", int(ref), number) for ref in refs]
            return json.dumps(made).encode()
        else:
            body = {"type": "lead.created", "data": {"leads": [{"id": r} for r in refs]}}
        return json.dumps(body).encode()

    def signed(self, body: bytes, event: str = "evt_1") -> dict[str, str]:
        """All headers of a delivery, signed now as the CRM signs; `event` is its id where a header holds one."""
        account = self.sandbox.account()
        if self.crm == "followupboss":
            return {"Content-Type": "application/json", "FUB-Signature": fub_hooks.sign(body, account["system_key"])}
        if self.crm == "bottlecrm":
            return bottlecrm.signed_headers(account["webhook_secret"], "lead.created", event, body)
        if self.crm == "hubspot":
            return hubspot.signed_headers(account["hubspot_secret"], self.hook_url, body)
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
        with unit(self.runtime.engine) as (conn, _):
            work.want(conn, self.tenant.tenant_id, kind)
        self.runtime.wake()

    def sql(self, text: str, **values: Any) -> int:
        """Change rows as the passing of time would; :t is the tenant. How many rows it met."""
        with unit(self.runtime.engine) as (conn, _):
            return conn.execute(sa.text(text), {"t": self.tenant.tenant_id, **values}).rowcount

    def due_now(self) -> None:
        """As if the pauses of the CRM and of every row that waits were over; but whoever tries the CRM stays the one.

        Another who became it meanwhile might be a reader, and the pause of a write be left to the next write.
        """
        self.sql(
            "UPDATE breakers SET open_at = clock_timestamp() "
            "WHERE tenant_id = :t AND coalesce(reason, '') NOT LIKE 'probe %'"
        )
        for table, state in (("events", "waiting"), ("outbox", "open")):
            self.sql(
                f"UPDATE {table} SET due_at = clock_timestamp() "
                f"WHERE tenant_id = :t AND state = '{state}' AND due_at > clock_timestamp()"
            )
        self.runtime.wake(self.tenant.tenant_id)

    def agent_id(self, ref: str) -> UUID:
        """Our id of the CRM's agent."""
        return UUID(str(self.one("SELECT agent_id FROM agent_refs WHERE tenant_id = :t AND ref = :r", r=ref)))

    def decisions(self, ref: str) -> list[tuple[str, str, str | None]]:
        """Cause, outcome and agent (CRM id) of each decision about the owner of a lead, in order."""
        rows = self.rows(
            sa.text(
                "SELECT d.cause, d.outcome, a.ref FROM decisions d JOIN lead_refs r USING (tenant_id, lead_id) "
                "LEFT JOIN agent_refs a ON (a.tenant_id, a.agent_id) = (d.tenant_id, d.agent_id) "
                "WHERE d.tenant_id = :t AND r.ref = :r AND d.role = 'owner' ORDER BY d.seq"
            ).bindparams(t=self.tenant.tenant_id, r=ref)
        )
        return [tuple(row) for row in rows]

    def void_turns(self) -> dict[int, str]:
        """Turns that were given back, with the reason."""
        rows = self.rows(
            sa.text(
                "SELECT turn, void_reason FROM turns WHERE tenant_id = :t AND void_reason IS NOT NULL ORDER BY turn"
            ).bindparams(t=self.tenant.tenant_id)
        )
        return {row.turn: row.void_reason for row in rows}

    def most_tries(self) -> int:
        """The most tries that were counted against any event or write."""
        return int(
            self.one(
                "SELECT greatest((SELECT coalesce(max(attempt), 0) FROM events WHERE tenant_id = :t), "
                "(SELECT coalesce(max(attempt), 0) FROM outbox WHERE tenant_id = :t))"
            )
        )

    def neighbour(self, sandbox: Sandbox, name: str = "beta", crm: str = "followupboss") -> Rig:
        """A second tenant, of another CRM account, in the same Turnlock."""
        other = Rig(self.runtime, sandbox, crm)
        other.add_tenant(name)
        return other

    # -- ways in, restarts, and why ------------------------------------------------------------------------
    def restart(self) -> None:
        """Stop web and worker and start both anew, on new connections to the same database, at the same address."""
        assert self.web is not None
        port, settings, clock = self.web.port, self.runtime.settings, self.runtime.clock
        self.stop()
        assert settings.database_url is not None
        self.runtime = Runtime(settings, make_engine(settings.database_url, pool_size=30, pool_timeout=5))
        self.runtime.clock = clock
        with self.runtime.engine.connect() as conn:
            self.tenant = self.runtime.tenant_named(conn, self.tenant.name)
        self.web = Web(self.runtime, host="127.0.0.1", port=port, threads=16)
        self.web.start()
        self.start_worker()

    def feed(self, source: str, *refs: str) -> None:
        """Leads come in by another way than a webhook: sweep, console, replay, again."""
        with unit(self.runtime.engine) as (conn, _):
            inbox.enqueue(conn, self.tenant.tenant_id, source, [(ref, None) for ref in refs])
        self.runtime.wake(self.tenant.tenant_id)

    def at(self, moment: str) -> None:
        """From now on availability is judged at this instant (ISO, with its zone)."""
        instant = datetime.fromisoformat(moment)
        assert instant.tzinfo is not None
        self.runtime.clock = lambda _: instant

    def sync(self) -> dict[str, int]:
        """Read the CRM's agents now."""
        return sync_agents(self.runtime, self.tenant)

    def run_chore(self, kind: str) -> None:
        """Run a chore once and wait until it has ended well."""
        before = self.one("SELECT last_ok_at FROM chores WHERE tenant_id = :t AND kind = :k", k=kind)
        self.want(kind)

        def ended() -> bool:
            after = self.one("SELECT last_ok_at FROM chores WHERE tenant_id = :t AND kind = :k", k=kind)
            return bool(after is not None and after != before)

        until(ended, what=f"the chore {kind}")

    def first_round(self) -> None:
        """Wait until every chore has run once: from now on the calls to the CRM are those of the test."""
        query = "SELECT count(*) FROM chores WHERE tenant_id = :t AND last_ok_at IS NULL"
        until(lambda: self.one(query) == 0, what="a first run of every chore")

    def settle_owners(self, seconds: float = 30.0) -> None:
        """As :meth:`settle`, but notes may still be on their way: a CRM may take no more than one a second."""
        assert self.sandbox.wait_idle(seconds)
        query = (
            "SELECT (SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'waiting') + "
            "(SELECT count(*) FROM outbox WHERE tenant_id = :t AND state = 'open' AND kind NOT IN ('note', 'task'))"
        )
        until(lambda: self.one(query) == 0, seconds, "a quiet system")

    def owners(self, refs: Sequence[str]) -> list[str | None]:
        """The owners in the CRM of several leads."""
        found = {str(lead): owner for lead, owner in self.sandbox.owners()}
        return [None if found[ref] is None else str(found[ref]) for ref in refs]

    def burst(self, count: int, **fields: Any) -> list[str]:
        """Leads come in at once, told in one go; their ids, once the CRM shows an agent for each."""
        refs = [str(number) for number in self.sandbox.create_leads(count, **fields)]
        until(lambda: all(self.owners(refs)), 30.0, f"owners for {count} leads")
        return refs

    def decided(self, ref: str) -> list[Any]:
        """Every decision about a lead in order: role, cause, outcome, reason, rule, agent and queue (as named) ..."""
        return self.rows(
            sa.text(
                "SELECT d.role, d.cause, d.outcome, d.reason, d.rule, d.turn, d.config_version, d.record, "
                "a.ref AS agent, q.name AS queue FROM decisions d JOIN lead_refs r USING (tenant_id, lead_id) "
                "LEFT JOIN agent_refs a ON a.tenant_id = d.tenant_id AND a.agent_id = d.agent_id "
                "LEFT JOIN queues q ON q.tenant_id = d.tenant_id AND q.queue_id = d.queue_id "
                "WHERE d.tenant_id = :t AND r.ref = :r ORDER BY d.decided_at, d.role DESC, d.seq"
            ).bindparams(t=self.tenant.tenant_id, r=ref)
        )

    def decision(self, ref: str) -> Any:
        """The one decision about a lead; fails if there are more or none."""
        (found,) = self.decided(ref)
        return found

    def skips(self, ref: str) -> dict[str, str]:
        """Who was unavailable at the last decision about a lead, and why: CRM ids and reasons."""
        refs = {str(row.agent_id): row.ref for row in self.rows(sa.select(t.agent_refs))}
        paths = self.decided(ref)[-1].record.get("paths", [])
        return {refs[out["agent"]]: out["skip"] for path in paths for out in path.get("unavailable", [])}

    def assignments(self, ref: str) -> list[tuple[str, str]]:
        """Agent and state of every assignment of a lead, oldest first."""
        rows = self.rows(
            sa.text(
                "SELECT a.ref, s.state FROM assignments s JOIN lead_refs r USING (tenant_id, lead_id) "
                "JOIN agent_refs a ON a.tenant_id = s.tenant_id AND a.agent_id = s.agent_id "
                "WHERE s.tenant_id = :t AND r.ref = :r ORDER BY s.assigned_at, s.assignment_id"
            ).bindparams(t=self.tenant.tenant_id, r=ref)
        )
        return [(row.ref, row.state) for row in rows]

    def next_up(self, queue: str = "All", count: int = 1) -> list[str]:
        """Whom the next leads go to if nothing changes, from the line and the agents as they are now."""
        tenant_id = self.tenant.tenant_id
        with unit(self.runtime.engine) as (conn, now):
            row = store.tenant_row(conn, tenant_id)
            queue_id = conn.execute(
                sa.select(t.queues.c.queue_id).where(t.queues.c.tenant_id == tenant_id, t.queues.c.name == queue)
            ).scalar_one()
            line = store.load_queues(conn, tenant_id, row.flags, [queue_id])[queue_id].line
            agents = store.load_agents(conn, tenant_id, row.flags)
        at = self.runtime.clock(now)
        free = [
            p.agent_id
            for p in line.places
            if unavailable(agents[p.agent_id], p.weight, at, (), skips=True, weights=True) is None
        ]
        return [agents[pick.agent_id].ref for pick in rotation.next_up(line, free, count)]

    def wait_chores(self) -> None:
        """Wait until every chore of the installation has run once."""
        until(
            lambda: not self.one("SELECT count(*) FROM chores WHERE tenant_id = :t AND last_ok_at IS NULL"),
            what="the end of the first chores",
        )

    def unplug(self) -> None:
        """The CRM's server goes away; its data stay."""
        self.sandbox._server.shutdown()
        self.sandbox._server.server_close()

    def plug_in(self) -> None:
        """The CRM's server is back at its old address."""
        sandbox = self.sandbox
        sandbox._server = Server(("127.0.0.1", sandbox.port), sandbox.crm, sandbox)
        serve = sandbox._server.serve_forever
        sandbox._thread = threading.Thread(target=serve, kwargs={"poll_interval": 0.05}, daemon=True)
        sandbox._thread.start()
