"""Tenants: adding one, its hook and secrets, installing into its CRM and leaving it again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from adapters import registry
from adapters.base import Capability, Credentials, Finding, Subscribed
from adapters.budget import Bucket
from adapters.outcome import CrmError
from connector import apps, breaker, chores, daily, flags, manifest, oauth, subscribing, work
from connector.buckets import spent
from connector.database import at_rest, new_id, unit
from connector.errors import SettingsError, TurnlockError
from connector.hooks import OLD_SECRET_LIVES, hook_url, new_hook, set_secret, store_secret
from connector.runtime import Runtime, Tenant
from connector.tables import deliveries, hooks, oauth_grants, oauth_states, secrets
from routing.tables import tenants

__all__ = [
    "OLD_SECRET_LIVES", "Installed", "add_tenant", "check", "check_keys", "hook_url", "install", "reseal", "set_secret",
    "set_sending", "uninstall",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Installed:
    """What an install did and what a human must still do."""

    hook_url: str
    agents: Mapping[str, int]
    topics: tuple[str, ...]
    by_hand: tuple[str, ...] = field(default=())


def _access(crm: str, by_oauth: bool, given: Collection[str]) -> tuple[bool, frozenset[str]]:
    """Whether a tenant that is given these has an app of its own, and what it need not be given for how it connects."""
    spec = registry.adapter(crm).oauth
    if spec is None:
        return False, frozenset()
    of_own_app = apps.OF_OWN_APP if spec.client_credentials else frozenset()
    if by_oauth:
        return False, spec.replaces | of_own_app
    own_app = not of_own_app.isdisjoint(given)
    return own_app, spec.replaces if own_app else frozenset()


def needed_of(crm: str, *, by_oauth: bool, given: Collection[str]) -> frozenset[str]:
    """The parameters and secrets that a new tenant must be given, which depends on how it connects and so on others."""
    own_app, replaced = _access(crm, by_oauth, given)
    listed = manifest.load()["adapters"][crm]["parameters"]
    return (
        frozenset(p["name"] for p in listed if p["required"]) | (apps.OF_OWN_APP if own_app else frozenset())
    ) - replaced


def add_tenant(
    runtime: Runtime,
    name: str,
    crm: str,
    *,
    base_url: str | None,
    parameters: Mapping[str, str],
    secret_values: Mapping[str, str],
    by_oauth: bool = False,
) -> UUID:
    """Add a tenant with its credentials and a hook. Raises :class:`TurnlockError` with every problem at once.

    With `by_oauth` its access is what the account grants to the app of its CRM (:mod:`connector.oauth`); with a
    client_id and a client_secret it has an app of its own, where its CRM gives such a one tokens.
    """
    if crm not in registry.names():
        raise TurnlockError(f"no adapter for {crm!r}; there are: {', '.join(registry.names())}")
    problems = []
    spec = registry.adapter(crm).oauth
    if by_oauth and spec is None:
        problems.append(f"--oauth: {crm} has no OAuth; give its credentials")
    if name.startswith("app:"):
        problems.append("name: names that begin with app: are those of apps; choose another")
    with runtime.engine.connect() as conn:
        if by_oauth and spec is not None:
            try:
                app_base_url = apps.app_tenant(runtime, conn, crm).base_url
                base_url = base_url or app_base_url
            except TurnlockError as error:
                problems.append(str(error))
    own_app, replaced = _access(crm, by_oauth, {*parameters, *secret_values})
    known = {p["name"]: p for p in manifest.load()["adapters"][crm]["parameters"]}
    needed = needed_of(crm, by_oauth=by_oauth, given={*parameters, *secret_values})
    for given in (*parameters, *secret_values):
        if given not in known:
            problems.append(f"{given}: {crm} has no such parameter; it has {', '.join(known)}")
    for p in known.values():
        if p["name"] in replaced:
            if p["name"] in {*parameters, *secret_values}:
                why = "the app has it; leave it out with --oauth" if by_oauth else "the app is given one; leave it out"
                problems.append(f"{p['name']}: {why}")
            continue
        if p["name"] == "base_url":
            continue  # not a parameter among others: `base_url`, checked below
        given_in = secret_values if p["secure"] else parameters
        other = parameters if p["secure"] else secret_values
        if p["name"] in other:
            how = "--secret" if p["secure"] else "--param"
            problems.append(f"{p['name']}: give it with {how}")
        elif p["name"] in needed and not given_in.get(p["name"]) and "default" not in p:
            how = "--secret" if p["secure"] else "--param"
            problems.append(f"{p['name']}: missing; give it with {how} {p['name']} ({p['help']})")
    told = by_oauth and spec is not None and spec.base_url is not None  # with the account's consent
    if base_url is not None:
        problems += apps.address_problems(runtime, base_url)
    if base_url is None and registry.adapter(crm).default_base_url is None and not told:
        problems.append(f"base URL: missing; {crm} has no address of its own, give it with --base-url")
    if problems:
        raise TurnlockError("\n".join(problems))
    filled = {p["name"]: p["default"] for p in known.values() if "default" in p and not p["secure"]} | dict(parameters)
    if by_oauth or own_app:
        filled["auth"] = "oauth" if by_oauth else "client_credentials"
    tenant_id = new_id()
    try:
        with unit(runtime.engine) as (conn, _):
            conn.execute(
                sa.insert(tenants).values(tenant_id=tenant_id, name=name, crm=crm, base_url=base_url, parameters=filled)
            )
            flags.start_flags(conn, tenant_id, runtime.stages(conn))
            for secret_name, value in secret_values.items():
                store_secret(runtime, conn, tenant_id, secret_name, value)
            new_hook(runtime, conn, tenant_id)
            if own_app:
                conn.execute(sa.insert(oauth_grants).values(tenant_id=tenant_id))
    except IntegrityError:
        raise TurnlockError(f"a tenant {name!r} exists already; choose another name") from None
    return tenant_id


def check_keys(runtime: Runtime) -> None:
    """Refuse to serve while a secret in use is sealed with a key that is not there: else a lead would find out."""
    problems = []
    with runtime.engine.connect() as conn:
        for name in conn.execute(sa.select(tenants.c.name).where(tenants.c.status == "active")).scalars().all():
            tenant = runtime.tenant_named(conn, name)
            try:
                runtime.secrets(conn, tenant)
                hook_url(runtime, conn, tenant)
            except SettingsError as error:
                problems.append(f"  {name}: {error}")
    if problems:
        raise SettingsError("\n".join(["Turnlock cannot serve:", *problems]))


def reseal(runtime: Runtime) -> int:
    """Seal anew whatever an older key sealed; how many secrets and hook tokens. After it the older keys may go.

    Raises :class:`SettingsError` that names everything which no key opens; what could be opened is sealed anew first.
    """
    count, problems = 0, []
    sealing = [
        (secrets, secrets.c.secret_id, secrets.c.name, secrets.c.sealed),
        (hooks, hooks.c.hook_id, sa.literal("hook_token"), hooks.c.sealed_token),
    ]
    with runtime.engine.connect() as conn:
        active = conn.execute(sa.select(tenants.c.tenant_id, tenants.c.name).where(tenants.c.status == "active")).all()
        if sa.inspect(conn).has_table(oauth_grants.name):
            g = oauth_grants.c
            sealing += [
                (oauth_grants, g.tenant_id, sa.literal(oauth.ACCESS), g.sealed_access),
                (oauth_grants, g.tenant_id, sa.literal(oauth.REFRESH), g.sealed_refresh),
            ]
    for tenant_id, tenant in active:
        for table, key, name, sealed in sealing:
            with unit(runtime.engine) as (conn, _):
                held = sa.and_(table.c.tenant_id == tenant_id, sealed.is_not(None))
                rows = conn.execute(sa.select(key, name, sealed).where(held)).all()
                for row_id, word, old in rows:
                    if runtime.vault.is_newest(old):
                        continue
                    try:
                        new = runtime.vault.seal(tenant_id, word, runtime.vault.open(tenant_id, word, old))
                    except SettingsError as error:
                        problems.append(f"  {tenant}: {error}")
                        continue
                    here = sa.and_(table.c.tenant_id == tenant_id, key == row_id, sealed == old)
                    count += conn.execute(sa.update(table).where(here).values({sealed: new})).rowcount
    if problems:
        raise SettingsError("\n".join(["not everything could be sealed anew:", *problems]))
    return count


def install(runtime: Runtime, tenant: Tenant) -> Installed:
    """Sync the agents, subscribe the hook, start the chores. Repeating it repairs what is missing."""
    counts = chores.sync_agents(runtime, tenant)
    _name_account(runtime, tenant)
    of_app = subscribing.served_by_app(tenant)
    with runtime.engine.connect() as conn:
        url = hook_url(runtime, conn, apps.app_tenant(runtime, conn, tenant.crm) if of_app else tenant)
    subscribed = Subscribed() if of_app else subscribing.subscribe(runtime, tenant, url)
    with unit(runtime.engine) as (conn, _):
        chores.schedule(conn, tenant.tenant_id)
        if tenant.own_app:  # nobody's consent begins it
            work.want(conn, tenant.tenant_id, "tokens")
    runtime.wake()
    topics = tuple(sorted({hook.topic for hook in subscribed.hooks if hook.active}))
    return Installed(url, counts, topics, subscribed.by_hand)


def _name_account(runtime: Runtime, tenant: Tenant) -> None:
    """Keep which account it is, for a CRM whose deliveries name theirs: those of other accounts are then refused."""
    account = tenant.adapter.account(oauth.client(runtime, tenant))
    if account is not None:
        with unit(runtime.engine) as (conn, _):
            apps.claim(conn, tenant, account)
        runtime.hooks.clear()


def uninstall(runtime: Runtime, tenant: Tenant, *, force: bool = False) -> int:
    """Remove our hooks from the CRM and stop all work; how many hooks there were. Decisions and ledger stay.

    With `force` it goes on when the CRM cannot be reached (the account is closed, the key revoked). Deliveries that
    still come are answered 200 and ignored: 410 would be an error to some CRMs.
    """
    removed = 0
    try:
        with runtime.engine.connect() as conn:
            url = hook_url(runtime, conn, tenant)
        # Where hooks are made by hand there is nothing to call for, be the consent dead.
        if Capability.WEBHOOK_API in tenant.adapter.capabilities and not subscribing.served_by_app(tenant):
            removed = tenant.adapter.unsubscribe(oauth.client(runtime, tenant), url)
    except CrmError as error:
        if not force:
            raise TurnlockError(f"{error}\nThe hooks were not removed; try again, or use --force to go on") from error
    if tenant.has_tokens:
        oauth.give_back(runtime, tenant)
    with unit(runtime.engine) as (conn, _):
        c = tenants.c
        conn.execute(
            # The name is free again for a later install; the row stays for the ledger's sake.
            sa.update(tenants)
            .where(c.tenant_id == tenant.tenant_id)
            .values(status="removed", sending=False, name=f"{tenant.name} (removed {tenant.tenant_id.hex[-12:]})")
        )
        conn.execute(sa.delete(secrets).where(secrets.c.tenant_id == tenant.tenant_id))
        if tenant.has_tokens:
            conn.execute(sa.delete(oauth_grants).where(oauth_grants.c.tenant_id == tenant.tenant_id))
            conn.execute(sa.delete(oauth_states).where(oauth_states.c.tenant_id == tenant.tenant_id))
            apps.leave(conn, tenant)
    runtime.forget_secrets()
    return removed


def check(runtime: Runtime, tenant: Tenant) -> list[Finding]:
    """Prove the connection with read-only calls."""
    with runtime.engine.connect() as conn:
        url = hook_url(runtime, conn, tenant)
    try:
        client = oauth.client(runtime, tenant)
    except CrmError as error:
        return [Finding("connection", False, str(error.status or error.outcome), error.text)]
    found = tenant.adapter.check(client, url)
    # Where hooks cannot be looked at, only what they sent shows whether they stand.
    if Capability.WEBHOOK_API not in tenant.adapter.capabilities:
        found.append(_deliveries(runtime, tenant))
    return [*found, *_limits(runtime, tenant, client.credentials)]


def _deliveries(runtime: Runtime, tenant: Tenant) -> Finding:
    d = deliveries.c
    age = sa.extract("epoch", sa.func.clock_timestamp() - d.received_at)
    newest = sa.select(age).where(d.tenant_id == tenant.tenant_id, d.source == "webhook")
    with at_rest(runtime.engine) as conn:
        seconds = conn.execute(newest.order_by(d.received_at.desc()).limit(1)).scalar_one_or_none()
    if seconds is None:
        return Finding("deliveries", True, "none yet")
    minutes = int(seconds) // 60
    return Finding("deliveries", True, f"the last came {minutes} min ago" if minutes else "the last came just now")


def _limits(runtime: Runtime, tenant: Tenant, credentials: Credentials) -> list[Finding]:
    """What the CRM lets the account call and what of it was taken lately; a pause that it asked for."""
    table = {bucket.name: bucket for bucket in tenant.adapter.buckets_of(credentials)}
    with at_rest(runtime.engine) as conn:
        shut = breaker.pauses(conn, tenant.tenant_id)
        taken = spent(conn, tenant.tenant_id, table) if runtime.keeps_limits(conn) else {}
    found = [Finding("pause", True, f"{lane} until {until:%H:%M:%S} UTC: {why}") for lane, until, why in shut]
    for name, bucket in table.items():
        if bucket.told:
            found += _told(runtime, tenant, bucket)
            continue
        ours, kept, others = taken.get(name, (0, 0, 0))
        what = f"{bucket.limit} in {bucket.window:g} s; counted lately: {ours}, dealt out to processes: {kept}"
        what += f", by others of the account: {others}"
        found.append(Finding(f"limit {name}", True, what))
    return found


def _told(runtime: Runtime, tenant: Tenant, bucket: Bucket) -> list[Finding]:
    said = runtime.limits.told(tenant.tenant_id, bucket)
    if said is None:
        return []
    what = f"{said.left} of {said.limit} left, shared by all programs of the account"
    kept = round(said.limit * bucket.kept)
    low = said.left < kept * daily.OPENS
    fix = f"see what else calls the CRM, or buy more; below {kept} notes, tasks and sweeps wait" if low else ""
    return [Finding(f"limit {bucket.name}", not low, what, fix)]


def set_sending(runtime: Runtime, tenant: Tenant, sending: bool) -> None:
    """Stop or start all sending to this tenant's CRM. Decisions go on; their writes wait."""
    with unit(runtime.engine) as (conn, _):
        conn.execute(sa.update(tenants).where(tenants.c.tenant_id == tenant.tenant_id).values(sending=sending))
    runtime.wake()
