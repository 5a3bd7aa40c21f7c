"""The hooks and secrets of a tenant: made, shown, replaced."""

from __future__ import annotations

import secrets as random_secrets
from uuid import UUID

import sqlalchemy as sa

from connector.accept import token_hash
from connector.database import new_id, unit
from connector.runtime import Runtime, Tenant
from connector.tables import hooks, secrets

#: Deliveries signed with the old secret are accepted this long after a new one is set.
OLD_SECRET_LIVES = "24 hours"  # noqa: S105 - a duration, not a secret


def store_secret(runtime: Runtime, conn: sa.Connection, tenant_id: UUID, name: str, value: str) -> None:
    """Seal a secret for this tenant and keep it, beside any of the same name."""
    conn.execute(
        sa.insert(secrets).values(
            tenant_id=tenant_id, secret_id=new_id(), name=name, sealed=runtime.vault.seal(tenant_id, name, value)
        )
    )


def set_secret(runtime: Runtime, tenant: Tenant, name: str, value: str, *, at_once: bool = False) -> None:
    """Set a new value. The old one stays live for :data:`OLD_SECRET_LIVES`, or ends `at_once`; at most two live."""
    c = secrets.c
    with unit(runtime.engine) as (conn, _):
        of_name = sa.and_(c.tenant_id == tenant.tenant_id, c.name == name)
        conn.execute(sa.delete(secrets).where(of_name, c.retires_at.is_not(None)))
        if at_once:
            conn.execute(sa.delete(secrets).where(of_name))
        else:
            conn.execute(
                sa.update(secrets)
                .where(of_name)
                .values(retires_at=sa.func.clock_timestamp() + sa.cast(OLD_SECRET_LIVES, sa.Interval))
            )
        store_secret(runtime, conn, tenant.tenant_id, name, value)
    runtime.forget_secrets()


def new_hook(runtime: Runtime, conn: sa.Connection, tenant_id: UUID) -> None:
    """Make a hook with a token that nobody can guess."""
    token = random_secrets.token_urlsafe(32)
    conn.execute(
        sa.insert(hooks).values(
            tenant_id=tenant_id,
            hook_id=new_id(),
            token_hash=token_hash(token),
            sealed_token=runtime.vault.seal(tenant_id, "hook_token", token),
        )
    )


def hook_url(runtime: Runtime, conn: sa.Connection, tenant: Tenant) -> str:
    """The address that this tenant's CRM posts to. It holds the hook's token: show it to the admin only."""
    c = hooks.c
    sealed = conn.execute(
        sa.select(c.sealed_token).where(c.tenant_id == tenant.tenant_id).order_by(c.created_at.desc()).limit(1)
    ).scalar_one()
    return f"{runtime.settings.public_url}/hooks/{runtime.vault.open(tenant.tenant_id, 'hook_token', sealed)}"
