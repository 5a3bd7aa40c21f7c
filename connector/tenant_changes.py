"""What an admin changes of a tenant later: its plain parameters, and the address of its CRM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from connector import apps, manifest
from connector.database import unit
from connector.errors import TurnlockError
from connector.runtime import Runtime, Tenant
from routing.tables import tenants


def change(
    runtime: Runtime, tenant: Tenant, *, parameters: Mapping[str, str], base_url: str | None = None
) -> Mapping[str, str]:
    """Change parameters and address; the parameters as they are then. An empty text takes one back to its default.

    Another address must be that of the same account: where its CRM can tell, it is asked.

    Raises:
        TurnlockError: with every problem at once; nothing is changed.
        CrmError: the other address does not answer.
    """
    known = {p["name"]: p for p in manifest.load()["adapters"][tenant.crm]["parameters"]}
    plain = sorted(name for name, p in known.items() if not p["secure"] and name != "base_url")
    problems = [_wrong(tenant, known, plain, name, value) for name, value in parameters.items()]
    problems += apps.address_problems(runtime, base_url) if base_url is not None else []
    if not parameters and base_url is None:
        problems.append("nothing to change; give --param NAME=VALUE or --base-url")
    if found := [problem for problem in problems if problem]:
        raise TurnlockError("\n".join(found))
    filled = {name: value or str(known[name].get("default", "")) for name, value in parameters.items()}
    # Where tokens are given, the CRM names its address with each of them, and gives them for the account alone.
    if base_url is not None and not tenant.has_tokens:
        _same_account(runtime, replace(tenant, base_url=base_url, parameters=tenant.parameters | filled))
    c = tenants.c
    gone = [name for name, value in filled.items() if not value]
    # One expression, so that two admins who change two parameters at once both have their way.
    kept: Any = c.parameters.op("||")(sa.cast({n: v for n, v in filled.items() if v}, JSONB))
    values = {"parameters": kept.op("-")(sa.cast(gone, sa.ARRAY(sa.Text)))}
    with unit(runtime.engine) as (conn, _):
        changed = sa.update(tenants).where(c.tenant_id == tenant.tenant_id)
        values |= {"base_url": base_url} if base_url is not None else {}
        stored = conn.execute(changed.values(values).returning(c.parameters)).scalar_one()
    runtime.forget_secrets()
    return {name: value for name, value in stored.items() if name in known}


def _wrong(
    tenant: Tenant, known: Mapping[str, Mapping[str, Any]], plain: list[str], name: str, value: str
) -> str | None:
    """What is wrong with giving a parameter this value."""
    if name == "base_url":
        return "base_url: give it with --base-url"
    if name not in known:
        return f"{name}: {tenant.crm} has no such parameter; it has {', '.join(plain)}"
    if known[name]["secure"]:
        return f"{name}: is a secret; give it with `turnlock tenant secret {tenant.name} {name}`"
    if name in apps.OF_OWN_APP and not tenant.own_app:
        return f"{name}: {tenant.name} has no app of its own; add a tenant with one"
    if not value and (known[name]["required"] or name in apps.OF_OWN_APP) and "default" not in known[name]:
        return f"{name}: cannot be empty ({known[name]['help']})"
    return None


def _same_account(runtime: Runtime, moved: Tenant) -> None:
    with runtime.engine.connect() as conn:
        c = tenants.c
        known = conn.execute(sa.select(c.account_ref).where(c.tenant_id == moved.tenant_id)).scalar_one()
    if known is not None and moved.adapter.account(runtime.client(moved)) != known:
        raise TurnlockError(apps.ANOTHER)
