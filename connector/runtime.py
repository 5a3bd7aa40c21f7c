"""What every part of a running Turnlock shares: settings, engine, vault, caches and the wake of its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from adapters import registry
from adapters.base import Adapter, Credentials
from adapters.client import Client
from connector.alive import Life
from connector.breaker import breaker_left
from connector.busy import BusyQueues
from connector.errors import UnknownTenant
from connector.migrate import SHADOW, reaches, stages
from connector.settings import Settings
from connector.storing import Storing
from connector.tables import secrets
from connector.vault import Vault
from connector.wake import Wake
from routing import staging, store
from routing.decide import Plan
from routing.model import Flag
from routing.stages import Stage
from routing.tables import tenants


@dataclass(frozen=True, slots=True)
class Tenant:
    """One CRM account with Turnlock installed, as the connector needs it."""

    tenant_id: UUID
    name: str
    crm: str
    base_url: str | None
    parameters: dict[str, str]
    status: str
    sending: bool

    @property
    def adapter(self) -> Adapter:
        """The code for this tenant's CRM."""
        return registry.adapter(self.crm)


_TENANT = tuple(tenants.c[name] for name in ("tenant_id", "name", "crm", "base_url", "parameters", "status", "sending"))
_SECRETS_FRESH = 2.0
# Settings of flag versions that a process remembers; a few per tenant are in use at a time.
_SETTINGS_KEPT = 10_000


@dataclass(slots=True)
class _Kept:
    """A thread's client for one tenant, with what it was made for and when its secrets were read."""

    said: tuple[object, ...]
    client: Client
    read_at: float


class Runtime:
    """One per process. Safe to share between threads."""

    def __init__(self, settings: Settings, engine: sa.Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.vault = Vault(settings.secret_keys)
        self.wake = Wake()
        self.busy = BusyQueues()
        self.life = Life()
        self.storing = Storing(engine, self.wake)
        # Hooks as accept read them last, by the hash of their token.
        self.hooks: dict[bytes, Any] = {}
        # How often this process set or removed a secret: what was read before that is read again.
        self.secrets_set = 0
        # The instant at which availability is judged, from the database's time; tests move it.
        self.clock: Callable[[datetime], datetime] = lambda now: now
        self._plans: dict[UUID, tuple[tuple[int, int], dict[frozenset[Flag], Plan]]] = {}
        self._settings: dict[tuple[UUID, int], Mapping[Flag, Stage]] = {}
        self._stages: frozenset[Flag] | None = None
        self._shadows = False
        self._local = threading.local()
        # What to do when the database is lost: the embedded one is looked after by whoever started it.
        self.database_lost: Callable[[], None] = lambda: None

    def forget_secrets(self) -> None:
        """A secret was set or removed: neither hooks nor clients of this process go on with the old ones."""
        self.hooks.clear()
        self.secrets_set += 1

    def stages(self, conn: sa.Connection) -> frozenset[Flag]:
        """The capabilities whose columns the database has. Revisions only add, so a full set is remembered."""
        if self._stages is None:
            found = stages(conn)
            if found != frozenset(Flag):
                return found
            self._stages = found
        return self._stages

    def shadows(self, conn: sa.Connection) -> bool:
        """Whether the database has what shadows and limited flags need. Revisions only add, so a yes is remembered."""
        self._shadows = self._shadows or reaches(conn, SHADOW)
        return self._shadows

    def settings_at(self, conn: sa.Connection, tenant_id: UUID, version: int) -> Mapping[Flag, Stage]:
        """The flags' settings at a flag version, read once per process: they never change. Empty when none is kept."""
        found = self._settings.get((tenant_id, version))
        if found is None:
            found = staging.settings_at(conn, tenant_id, version) if self.shadows(conn) else {}
            if len(self._settings) >= _SETTINGS_KEPT:
                self._settings.clear()
            self._settings[tenant_id, version] = found
        return found

    def plan(self, conn: sa.Connection, row: store.TenantRow, flags: frozenset[Flag] | None = None) -> Plan:
        """The compiled configuration at ``row.version`` with these flags on (default: the tenant's).

        Compiled once per version, flags and process.
        """
        flags = row.flags if flags is None else flags
        cached = self._plans.get(row.tenant_id)
        if cached is None or cached[0] != row.version:
            cached = self._plans[row.tenant_id] = (row.version, {})
        plan = cached[1].get(flags)
        if plan is None:
            plan = cached[1][flags] = store.load_plan(conn, replace(row, flags=flags))
        return plan

    def tenant(self, conn: sa.Connection, tenant_id: UUID) -> Tenant:
        """The tenant with this id. Raises :class:`UnknownTenant`."""
        return self._one(conn, tenants.c.tenant_id == tenant_id, str(tenant_id))

    def tenant_named(self, conn: sa.Connection, name: str) -> Tenant:
        """The active tenant of this name. Raises :class:`UnknownTenant` that lists the names there are."""
        return self._one(conn, tenants.c.name == name, name)

    def tenant_and_wait(self, conn: sa.Connection, tenant_id: UUID) -> tuple[Tenant, float]:
        """The tenant with this id, and for how many seconds its CRM must not be called."""
        c = tenants.c
        row = conn.execute(
            sa.select(*_TENANT, breaker_left(tenant_id).label("wait")).where(c.tenant_id == tenant_id)
        ).one()
        return Tenant(*row[:-1]), max(0.0, float(row.wait or 0))

    def _one(self, conn: sa.Connection, where: sa.ColumnElement[bool], said: str) -> Tenant:
        c = tenants.c
        row = conn.execute(sa.select(*_TENANT).where(where)).one_or_none()
        if row is None:
            names = conn.execute(sa.select(c.name).where(c.status == "active").order_by(c.name)).scalars().all()
            known = ", ".join(names) or "none yet; `turnlock tenant add` makes one"
            raise UnknownTenant(f"no tenant {said!r}; there are: {known}")
        return Tenant(*row)

    def secrets(self, conn: sa.Connection, tenant: Tenant) -> dict[str, list[str]]:
        """The live secrets of a tenant by name, newest first, opened."""
        c = secrets.c
        rows = conn.execute(
            sa.select(c.name, c.sealed)
            .where(
                c.tenant_id == tenant.tenant_id,
                sa.or_(c.retires_at.is_(None), c.retires_at > sa.func.clock_timestamp()),
            )
            .order_by(c.created_at.desc(), c.secret_id.desc())
        )
        found: dict[str, list[str]] = {}
        for row in rows:
            found.setdefault(row.name, []).append(self.vault.open(tenant.tenant_id, row.name, row.sealed))
        return found

    def client(self, conn: sa.Connection, tenant: Tenant) -> Client:
        """The client for this tenant's CRM: one per thread, made anew when address or credentials change."""
        kept: dict[UUID, _Kept] = self._local.__dict__.setdefault("clients", {})
        last = kept.get(tenant.tenant_id)
        said = (tenant.base_url, tuple(sorted(tenant.parameters.items())), self.secrets_set)
        # Secrets change hardly ever: they are read every two seconds, not for every call.
        if last is not None and last.said == said and time.monotonic() - last.read_at < _SECRETS_FRESH:
            return last.client
        newest = {name: values[0] for name, values in self.secrets(conn, tenant).items()}
        credentials = Credentials(parameters=tenant.parameters, secrets=newest)
        if last is not None and (last.said, last.client.credentials) == (said, credentials):
            last.read_at = time.monotonic()
            return last.client
        adapter = tenant.adapter
        base_url = tenant.base_url or adapter.default_base_url
        if base_url is None:
            raise UnknownTenant(f"tenant {tenant.name!r} has no base URL; give it one with `turnlock tenant add`")
        client = Client(
            base_url,
            adapter.headers(credentials),
            credentials,
            now=lambda: datetime.now(UTC),
            allow_private_hosts=self.settings.allow_private_hosts,
            refine=adapter.refine,
        )
        kept[tenant.tenant_id] = _Kept(said, client, time.monotonic())
        return client
