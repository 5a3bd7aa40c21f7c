"""What every part of a running Turnlock shares: settings, engine, vault, caches and the wake of its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, lru_cache
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

import sqlalchemy as sa

from adapters import registry
from adapters.base import Adapter, Credentials
from adapters.client import Client
from adapters.oauth import NotConnected, StaleToken
from connector.abandoned import Abandoned
from connector.alive import Life
from connector.breaker import breaker_left
from connector.busy import BusyQueues, Units
from connector.database import DatabaseClock, at_rest
from connector.errors import UnknownTenant
from connector.limits import Limits, TenantGate
from connector.migrate import COUNTING, LIMITS, SHADOW, TELLING, WHY, WORDING, reaches, stages
from connector.settings import Settings
from connector.storing import Storing
from connector.tables import oauth_grants, secrets
from connector.vault import Vault
from connector.wake import Wake
from routing import staging, store
from routing.decide import Plan
from routing.flight import Asking, Statement
from routing.model import Flag
from routing.stages import Stage
from routing.tables import flags, tenants


@cache
def app_id(crm: str) -> UUID:
    """The id of the reserved tenant of this CRM's app: the same everywhere, so there is one at most."""
    return uuid5(NAMESPACE_URL, f"turnlock:app:{crm}")


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
    #: Whether a lead is also known by its address, and phones by their country's rules; and that country.
    households: bool = False
    country: str | None = None

    @property
    def adapter(self) -> Adapter:
        """The code for this tenant's CRM."""
        return registry.adapter(self.crm)

    @property
    def is_app(self) -> bool:
        """Whether this is the reserved tenant of an app: it has a hook and no leads."""
        return self.tenant_id == app_id(self.crm)

    @property
    def by_oauth(self) -> bool:
        """Whether its access is granted by OAuth, to the app of its CRM."""
        return self.parameters.get("auth") == "oauth"

    @property
    def own_app(self) -> bool:
        """Whether it has an app of its own at its CRM, which is given tokens without anybody's consent."""
        return self.parameters.get("auth") == "client_credentials"

    @property
    def has_tokens(self) -> bool:
        """Whether it is called with tokens that Turnlock renews: those of ``oauth_grants``."""
        return self.by_oauth or self.own_app


_TENANT = tuple(tenants.c[name] for name in ("tenant_id", "name", "crm", "base_url", "parameters", "status", "sending"))


def _columns(households: bool) -> list[Any]:
    """What a :class:`Tenant` is made of, as far as the database has it."""
    if not households:
        return list(_TENANT)
    c, f = tenants.c, flags.c
    is_on = sa.exists().where(f.tenant_id == c.tenant_id, f.flag == Flag.HOUSEHOLDS.value, f.mode == "on")
    return [*_TENANT, is_on.label("households"), c.country]


@lru_cache(maxsize=2)
def _with_wait(households: bool) -> Statement:
    tenant_id: Any = sa.bindparam("tenant", type_=sa.Uuid)
    columns = [*_columns(households), breaker_left(tenant_id).label("wait")]
    return Statement(sa.select(*columns).where(tenants.c.tenant_id == tenant_id))


_SECRETS_FRESH = 2.0
#: Under which name access tokens are sealed.
ACCESS = "oauth_access"
# A token with less than this left, in seconds, may run out before the last call that it is read for.
_TOKEN_LEFT = 15.0
# Settings of flag versions that a process remembers; a few per tenant are in use at a time.
_SETTINGS_KEPT = 10_000


@dataclass(slots=True)
class _Kept:
    """A thread's client for one tenant, with what it was made for and when its secrets were read."""

    said: tuple[object, ...]
    base_url: str | None
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
        self.units = Units()
        self.life = Life()
        self.limits = Limits(engine, self.life)
        self.storing = Storing(engine, self.wake)
        self.abandoned = Abandoned()
        # What time it is. No part of a running Turnlock asks the computer it runs on.
        self.database_clock = DatabaseClock()
        # Hooks as accept read them last, by the hash of their token.
        self.hooks: dict[bytes, Any] = {}
        self.refused: dict[UUID, float] = {}  # when a refused delivery was last looked into (monotonic), by tenant
        # How often this process set or removed a secret: what was read before that is read again.
        self.secrets_set = 0
        # The instant at which availability is judged, from the database's time; tests move it.
        self.clock: Callable[[datetime], datetime] = lambda now: now
        self._plans: dict[UUID, tuple[tuple[int, int], dict[frozenset[Flag], Plan]]] = {}
        self._settings: dict[tuple[UUID, int], Mapping[Flag, Stage]] = {}
        self._stages: frozenset[Flag] | None = None
        self._reached: set[str] = set()
        self._local = threading.local()
        # What to do when the database is lost: the embedded one is looked after by whoever started it.
        self.database_lost: Callable[[], None] = lambda: None

    def forget_secrets(self) -> None:
        """A secret was set or removed: neither hooks nor clients of this process go on with the old ones."""
        self.hooks.clear()
        self.secrets_set += 1

    @property
    def knows_schema(self) -> bool:
        """Whether all is remembered to be there, so that :meth:`stages` and the like need no connection to ask."""
        return self._stages is not None and SHADOW in self._reached

    def stages(self, conn: sa.Connection | None) -> frozenset[Flag]:
        """The capabilities whose columns the database has. Revisions only add, so a full set is remembered."""
        if self._stages is None:
            assert conn is not None  # noqa: S101 - see `knows_schema`
            found = stages(conn)
            if found != frozenset(Flag):
                return found
            self._stages = found
        return self._stages

    def keeps_why(self, conn: sa.Connection) -> bool:
        """Whether the database has what revision 0011 brings: canonical configurations and the fairness tables."""
        return self._reaches(conn, WHY)

    def shadows(self, conn: sa.Connection | None) -> bool:
        """Whether the database has what shadows and limited flags need."""
        return self._reaches(conn, SHADOW)

    def tells(self, conn: sa.Connection) -> bool:
        """Whether the database has the sums of leads without a turn, and each version's rules as they were read."""
        return self._reaches(conn, TELLING)

    def _reaches(self, conn: sa.Connection | None, revision: str) -> bool:
        if revision in self._reached:
            return True
        assert conn is not None  # noqa: S101 - see `knows_schema`
        if reaches(conn, revision):
            self._reached.add(revision)  # revisions only add
        return revision in self._reached

    def keeps_limits(self, conn: sa.Connection) -> bool:
        """Whether the database has the buckets of calls."""
        return self._reaches(conn, LIMITS)

    def keeps_wording(self, conn: sa.Connection) -> bool:
        """Whether the database has what agents read, and tasks."""
        return self._reaches(conn, WORDING)

    def counts_rows(self, conn: sa.Connection) -> bool:
        """Whether the database lets whoever serves it have the rows of a table counted."""
        return self._reaches(conn, COUNTING)

    def settings_at(self, conn: sa.Connection | None, tenant_id: UUID, version: int) -> Mapping[Flag, Stage]:
        """The flags' settings at a flag version, read once per process: they never change. Empty when none is kept."""
        found = self._settings.get((tenant_id, version))
        if found is None:
            with nullcontext(conn) if conn is not None else at_rest(self.engine) as reading:
                found = staging.settings_at(reading, tenant_id, version) if self.shadows(reading) else {}
            if len(self._settings) >= _SETTINGS_KEPT:
                self._settings.clear()
            self._settings[tenant_id, version] = found
        return found

    def plan(self, conn: sa.Connection | None, row: store.TenantRow, flags: frozenset[Flag] | None = None) -> Plan:
        """The compiled configuration at ``row.version`` with these flags on (default: the tenant's).

        Compiled once per version, flags and process; without `conn` on a connection taken for it.
        """
        flags = row.flags if flags is None else flags
        cached = self._plans.get(row.tenant_id)
        if cached is None or cached[0] != row.version:
            cached = self._plans[row.tenant_id] = (row.version, {})
        plan = cached[1].get(flags)
        if plan is None:
            with nullcontext(conn) if conn is not None else at_rest(self.engine) as reading:
                plan = cached[1][flags] = store.load_plan(reading, replace(row, flags=flags))
        return plan

    def tenant(self, conn: sa.Connection, tenant_id: UUID) -> Tenant:
        """The tenant with this id. Raises :class:`UnknownTenant`."""
        return self._one(conn, tenants.c.tenant_id == tenant_id, str(tenant_id))

    def tenant_named(self, conn: sa.Connection, name: str) -> Tenant:
        """The active tenant of this name. Raises :class:`UnknownTenant` that lists the names there are."""
        return self._one(conn, tenants.c.name == name, name)

    def tenant_and_wait(self, conn: sa.Connection | None, tenant_id: UUID) -> Asking[tuple[Tenant, float | None]]:
        """Asks for the tenant with this id, and how long its CRM must not be called: :func:`breaker.breaker_left`."""
        ((row,),) = yield [_with_wait(Flag.HOUSEHOLDS in self.stages(conn))(tenant=tenant_id)]
        return Tenant(*row[:-1]), row.wait

    def found(self, conn: sa.Connection, tenant_id: UUID) -> Tenant | None:
        """The tenant with this id, or None."""
        row = conn.execute(sa.select(*self._columns(conn)).where(tenants.c.tenant_id == tenant_id)).one_or_none()
        return None if row is None else Tenant(*row)

    def _columns(self, conn: sa.Connection) -> list[Any]:
        return _columns(Flag.HOUSEHOLDS in self.stages(conn))

    def _one(self, conn: sa.Connection, where: sa.ColumnElement[bool], said: str) -> Tenant:
        c = tenants.c
        row = conn.execute(sa.select(*self._columns(conn)).where(where)).one_or_none()
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

    def client(self, tenant: Tenant) -> Client:
        """The client for this tenant's CRM: one per thread, made anew when address or credentials change."""
        kept: dict[UUID, _Kept] = self._local.__dict__.setdefault("clients", {})
        last = kept.get(tenant.tenant_id)
        said = (tenant.base_url, tuple(sorted(tenant.parameters.items())), self.secrets_set)
        # Secrets change hardly ever: they are read every two seconds, not for every call.
        if last is not None and last.said == said and time.monotonic() - last.read_at < _SECRETS_FRESH:
            return last.client
        with at_rest(self.engine) as conn:
            return self._client(conn, tenant, kept, said)

    def _client(self, conn: sa.Connection, tenant: Tenant, kept: dict[UUID, _Kept], said: tuple[object, ...]) -> Client:
        last = kept.get(tenant.tenant_id)
        self.database_clock.read(conn)
        newest = {name: values[0] for name, values in self.secrets(conn, tenant).items()}
        base_url = tenant.base_url
        if tenant.has_tokens:
            newest["access_token"], granted = self._granted(conn, tenant)
            base_url = granted or base_url
        credentials = Credentials(parameters=tenant.parameters, secrets=newest)
        if last is not None and (last.said, last.base_url, last.client.credentials) == (said, base_url, credentials):
            last.read_at = time.monotonic()
            return last.client
        address = base_url or tenant.adapter.default_base_url
        if address is None:
            raise UnknownTenant(f"tenant {tenant.name!r} has no base URL; give it one with `turnlock tenant set`")
        gate = self._gate(conn, tenant, credentials, address)
        client = self.client_with(tenant.adapter, address, credentials, gate)
        kept[tenant.tenant_id] = _Kept(said, base_url, client, time.monotonic())
        return client

    def client_with(
        self, adapter: Adapter, address: str, credentials: Credentials, gate: TenantGate | None = None
    ) -> Client:
        """A client with credentials that are not kept, for the caller alone, to be closed."""
        return Client(
            address,
            adapter.headers(credentials),
            credentials,
            now=self.database_clock.now,
            allow_private_hosts=self.settings.allow_private_hosts,
            ca_file=self.settings.ca_file,
            refine=adapter.refine,
            asks_to_wait=adapter.asks_to_wait,
            words=adapter.words,
            gate=gate,
        )

    def token_in_use(self, tenant_id: UUID) -> str | None:
        """The access token of this thread's client for the tenant."""
        kept: dict[UUID, _Kept] = self._local.__dict__.get("clients", {})
        return kept[tenant_id].client.credentials.secrets.get("access_token") if tenant_id in kept else None

    def _gate(self, conn: sa.Connection, tenant: Tenant, credentials: Credentials, address: str) -> TenantGate | None:
        if not self.keeps_limits(conn):
            return None
        at_home = address == tenant.adapter.default_base_url
        return self.limits.gate(tenant.tenant_id, tenant.adapter, credentials, at_home=at_home)

    def _granted(self, conn: sa.Connection, tenant: Tenant) -> tuple[str, str | None]:
        """The access token that the account gave, and the address it comes with.

        Raises :class:`adapters.oauth.StaleToken` when it has run out, :class:`NotConnected` when there is none.
        """
        g = oauth_grants.c
        left = sa.extract("epoch", g.expires_at - sa.func.clock_timestamp()).label("left")
        row = conn.execute(
            sa.select(g.state, g.sealed_access, g.base_url, left).where(g.tenant_id == tenant.tenant_id)
        ).one_or_none()
        if tenant.own_app and row is not None and row.state == "new":
            raise StaleToken  # there was none yet, and nobody has to agree to the first
        if row is None or row.state != "live":
            raise NotConnected(before=row is not None and row.state == "reconnect", own_app=tenant.own_app)
        if row.left < _TOKEN_LEFT:
            raise StaleToken
        return self.vault.open(tenant.tenant_id, ACCESS, row.sealed_access), row.base_url
