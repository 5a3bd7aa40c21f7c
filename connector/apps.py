"""Apps: one registration at a CRM that many accounts install, with one hook and one secret for all of them.

An app is a reserved tenant of its CRM, so that its hook, its secrets and what comes in are kept as any tenant's are.
It has no leads: a worker copies each event of a delivery to the tenant whose account it names, in one commit per
tenant, under the event's own key. So nothing that is sent on, twice or to a wrong address reaches another account.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from adapters import registry
from adapters.base import Capability, Credentials, Subscribed
from adapters.client import Unsendable, checked_base
from adapters.oauth import App
from connector import work
from connector.database import unit
from connector.errors import TurnlockError
from connector.hooks import hook_url, new_hook, set_secret, store_secret
from connector.runtime import Runtime, Tenant, app_id
from connector.tables import app_accounts
from routing.tables import tenants

_CLIENT_SECRET = "client_secret"  # noqa: S105 - the name of a secret
#: What the admin reads of an account that is another tenant's.
TAKEN = "This account is connected as another tenant. Uninstall that one first."
#: What the admin reads who signed in to another account than this tenant is: all its leads would be gone there.
ANOTHER = (
    "This is another account than the one that this tenant is. Sign in to that one and try again, or add a tenant of "
    "its own for this one."
)
#: What an app of a tenant's own shows its CRM.
OF_OWN_APP = frozenset({"client_id", _CLIENT_SECRET})
_PARAMETERS = ("client_id", "authorize_url", "pkce")


def app_name(crm: str) -> str:
    """What the reserved tenant of an app is called: no tenant of an admin may have such a name."""
    return f"app:{crm}"


def secrets_of(crm: str) -> tuple[str, ...]:
    """The secrets of an app: its own at the CRM, and what signs its hook where that is another one."""
    adapter = registry.adapter(crm)
    signs = adapter.hook_secret if Capability.APP_HOOKS in adapter.capabilities else None
    return tuple(dict.fromkeys((_CLIENT_SECRET, signs or _CLIENT_SECRET)))


def address_problems(runtime: Runtime, base_url: str) -> list[str]:
    """What keeps Turnlock from calling this address; empty where nothing does."""
    try:
        checked_base(base_url, runtime.settings.allow_private_hosts)
    except Unsendable as error:
        return [error.text]
    return []


def set_app(
    runtime: Runtime,
    crm: str,
    *,
    parameters: Mapping[str, str],
    secret_values: Mapping[str, str],
    base_url: str | None = None,
) -> Tenant:
    """Register the app of a CRM here, or change what is known of it. Raises :class:`TurnlockError` with every problem.

    ``parameters``: client_id; authorize_url where consent is asked for at another address; pkce=no for a CRM's server
    that does not take it.
    """
    if registry.adapter(crm).oauth is None:
        raise TurnlockError(f"{crm}: apps of this CRM are not supported; add tenants with credentials of their own")
    wanted = secrets_of(crm)
    problems = address_problems(runtime, base_url) if base_url is not None else []
    problems += [
        f"{name}: an app has no such {what}; it has {', '.join(known)}"
        for what, given, known in (("parameter", parameters, _PARAMETERS), ("secret", secret_values, wanted))
        for name in given.keys() - {*known}
    ]
    with runtime.engine.connect() as conn:
        present = runtime.found(conn, app_id(crm))
    if present is None:
        if not parameters.get("client_id"):
            problems.append("client_id: missing; give it with --param client_id=... (the CRM shows it with the app)")
        problems += [f"{n}: missing; give it with --secret {n}" for n in wanted if not secret_values.get(n)]
    if problems:
        raise TurnlockError("\n".join(sorted(problems)))
    if present is not None:
        with unit(runtime.engine) as (conn, _):
            values: dict[str, Any] = {"parameters": {**present.parameters, **parameters}}
            values |= {"base_url": base_url} if base_url else {}
            conn.execute(sa.update(tenants).where(tenants.c.tenant_id == present.tenant_id).values(values))
        for name, value in secret_values.items():
            set_secret(runtime, present, name, value)
    else:
        new = {"tenant_id": app_id(crm), "name": app_name(crm), "crm": crm, "base_url": base_url}
        try:
            with unit(runtime.engine) as (conn, _):
                conn.execute(sa.insert(tenants).values({**new, "parameters": dict(parameters)}))
                for name, value in secret_values.items():
                    store_secret(runtime, conn, app_id(crm), name, value)
                new_hook(runtime, conn, app_id(crm))
                work.want(conn, app_id(crm), "retention")  # its only chore: it has no leads and no agents
        except IntegrityError:
            raise TurnlockError(f"the app of {crm} was registered meanwhile; run it again to change it") from None
    runtime.forget_secrets()
    with runtime.engine.connect() as conn:
        return runtime.tenant(conn, app_id(crm))


def app_hook_url(runtime: Runtime, crm: str) -> str:
    """The one address that the CRM posts to for all accounts of the app."""
    with runtime.engine.connect() as conn:
        return hook_url(runtime, conn, app_tenant(runtime, conn, crm))


def app_tenant(runtime: Runtime, conn: sa.Connection, crm: str) -> Tenant:
    """The reserved tenant of a CRM's app. Raises :class:`TurnlockError` where there is none."""
    tenant = runtime.found(conn, app_id(crm))
    if tenant is None:
        raise TurnlockError(f"{crm}: no app is registered here; `turnlock app set {crm}` does so")
    return tenant


def app_credentials(runtime: Runtime, conn: sa.Connection, crm: str) -> tuple[Tenant, App]:
    """The app's tenant and what it shows the CRM at a consent and a renewal."""
    tenant = app_tenant(runtime, conn, crm)
    secret = runtime.secrets(conn, tenant).get(_CLIENT_SECRET, [""])[0]
    return tenant, App(tenant.parameters["client_id"], secret, f"{runtime.settings.public_url}/oauth/callback")


def install_app(
    runtime: Runtime, crm: str, *, parameters: Mapping[str, str], secret_values: Mapping[str, str], replace: bool
) -> Subscribed:
    """Have the CRM post what befalls all accounts of the app to its hook. The developer's secrets are not kept.

    Raises:
        TurnlockError: with every problem of what was given, or where the CRM's API makes no such hook.
        CrmError: the CRM's own no.
    """
    adapter = registry.adapter(crm)
    if Capability.APP_HOOKS_API not in adapter.capabilities:
        raise TurnlockError(
            f"{crm}: no call makes an app's webhooks; `turnlock app show {crm}` says what to enter there"
        )
    problems = []
    for what, given, secret in (("parameter", parameters, False), ("secret", secret_values, True)):
        known = [name for name, is_secret in adapter.app_access.items() if is_secret is secret]
        option = f"--{'secret' if secret else 'param'}"
        problems += [f"{name}: no such {what}; there is {', '.join(known)}" for name in given.keys() - {*known}]
        problems += [f"{name}: missing; give it with {option} {name}" for name in known if not given.get(name)]
    if problems:
        raise TurnlockError("\n".join(sorted(problems)))
    with runtime.engine.connect() as conn:
        tenant = app_tenant(runtime, conn, crm)
        url = hook_url(runtime, conn, tenant)
        runtime.database_clock.read(conn)
    address = tenant.base_url or adapter.default_base_url
    if address is None:
        raise TurnlockError(f"the app of {crm} has no base URL; give it one with `turnlock app set`")
    with runtime.client_with(adapter, address, Credentials(parameters, secret_values)) as client:
        return adapter.subscribe_app(client, url, replace=replace)


def own_app(runtime: Runtime, conn: sa.Connection, tenant: Tenant) -> App:
    """What a tenant's own app shows the CRM. Nobody is ever called back for it."""
    secret = runtime.secrets(conn, tenant).get(_CLIENT_SECRET, [""])[0]
    return App(tenant.parameters["client_id"], secret, "")


# -- accounts ---------------------------------------------------------------------------------------------------


def claim(conn: sa.Connection, tenant: Tenant, account: str) -> None:
    """Keep that this tenant is `account`, in the transaction that stores its grant. A tenant stays what it became.

    Raises:
        TurnlockError: the account is another tenant's, or this tenant is another account.
    """
    if tenant.by_oauth and not join(conn, tenant.crm, account, tenant):
        raise TurnlockError(TAKEN)
    c = tenants.c
    # Looked at and set in one statement: of two admins who connect it at once, one names the account.
    here = sa.and_(c.tenant_id == tenant.tenant_id, sa.or_(c.account_ref.is_(None), c.account_ref == account))
    if not conn.execute(sa.update(tenants).where(here).values(account_ref=account)).rowcount:
        raise TurnlockError(ANOTHER)


def join(conn: sa.Connection, crm: str, account: str, tenant: Tenant) -> bool:
    """Say that `account` is this tenant, in the transaction that stores its grant; False when it is another's.

    An account of a removed tenant is free again, and a tenant has one account at a time.
    """
    a, t = app_accounts.c, tenants.c
    here = a.tenant_id == app_id(crm)
    conn.execute(sa.delete(app_accounts).where(here, a.member_id == tenant.tenant_id, a.account != account))
    new = insert(app_accounts).values(tenant_id=app_id(crm), account=account, member_id=tenant.tenant_id)
    conn.execute(new.on_conflict_do_nothing(index_elements=["tenant_id", "account"]))
    # Locked: of two tenants that an account's admins connect at once, the second waits and then sees whose it is.
    holder = conn.execute(
        sa.select(a.member_id, a.account).where(here, a.account == account).with_for_update(key_share=True)
    ).one()
    if holder.member_id == tenant.tenant_id:
        return True
    status = conn.execute(sa.select(t.status).where(t.tenant_id == holder.member_id)).scalar_one_or_none()
    if status == "active":
        return False
    conn.execute(sa.update(app_accounts).where(here, a.account == account).values(member_id=tenant.tenant_id))
    return True


def member(conn: sa.Connection, crm: str, account: str) -> UUID | None:
    """The tenant whose account this is, None where it is nobody's."""
    a = app_accounts.c
    here = sa.and_(a.tenant_id == app_id(crm), a.account == account)
    return conn.execute(sa.select(a.member_id).where(here)).scalar_one_or_none()


def leave(conn: sa.Connection, tenant: Tenant) -> None:
    """Forget which account this tenant was: what the app is still told of it is ignored."""
    a = app_accounts.c
    conn.execute(sa.delete(app_accounts).where(a.tenant_id == app_id(tenant.crm), a.member_id == tenant.tenant_id))
