"""Tenants: adding one, its secrets and hook, installing into its CRM and leaving it, its agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import click

from connector.cli import secrets
from connector.cli.output import agent as named
from connector.cli.output import print_json, say, table, yes
from connector.cli.support import json_option, param_option, session, tenant_argument, tenant_session


@click.group()
def tenant() -> None:
    """Add and list tenants: one per CRM account.

    Example: turnlock tenant list
    """


def _name(_: click.Context, __: click.Parameter, value: str) -> str:
    if not value.strip() or value != value.strip() or len(value) > 100 or not value.isprintable() or value[0] == "-":
        raise click.BadParameter("write a name of 1 to 100 characters, without blanks around it or a leading dash")
    return value


def _address(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise click.BadParameter("write an address like https://crm.example.com, without user or password")
    return value.rstrip("/")


def _parameters(crm: str) -> list[dict[str, Any]]:
    from adapters import registry
    from connector import manifest

    registry.adapter(crm)  # raises for one that there is not, with those there are
    found: list[dict[str, Any]] = manifest.load()["adapters"][crm]["parameters"]
    return found


@tenant.command("add")
@click.argument("name", callback=_name)
@click.option("--crm", required=True, help="Which CRM, by the name of its adapter, such as followupboss or generic.")
@click.option("--base-url", callback=_address, help="The CRM's address, where it has none of its own.")
@param_option("A plain parameter.")
@secrets.option("A secret.")
@click.option("--oauth", "by_oauth", is_flag=True, help="Access is granted to the app of this CRM: `turnlock connect`.")
@json_option
def tenant_add(
    name: str,
    crm: str,
    base_url: str | None,
    params: dict[str, str],
    named: tuple[str, ...],
    by_oauth: bool,
    as_json: bool,
) -> None:
    """Add the tenant NAME with its credentials. Nothing is changed in the CRM until `turnlock install`.

    Example: turnlock tenant add acme --crm followupboss --secret api_key --secret system_key=@key.txt
    """
    from connector import tenants

    parameters = _parameters(crm)
    with session() as runtime:
        given = {*params, *(one.partition("=")[0] for one in named)}
        needed = tenants.needed_of(crm, by_oauth=by_oauth, given=given)
        values = secrets.gather(named, [p | {"required": p["name"] in needed} for p in parameters])
        tenant_id = tenants.add_tenant(
            runtime, name, crm, base_url=base_url, parameters=params, secret_values=values, by_oauth=by_oauth
        )
    if as_json:
        print_json({"tenant": name, "tenant_id": str(tenant_id), "crm": crm})
    else:
        first = f"`turnlock connect {name}`, then " if by_oauth else ""
        say(f"Added {name}. Next: {first}`turnlock check {name}`, then `turnlock install {name}`.")


@tenant.command("list")
@click.option("--all", "removed", is_flag=True, help="Also those that were uninstalled.")
@json_option
def tenant_list(removed: bool, as_json: bool) -> None:
    """List the tenants.

    Example: turnlock tenant list --json
    """
    import sqlalchemy as sa

    from connector.runtime import app_id
    from routing.tables import tenants

    c = tenants.c
    query = sa.select(c.tenant_id, c.name, c.crm, c.base_url, c.status, c.sending, c.config_version).order_by(c.name)
    if not removed:
        query = query.where(c.status == "active")
    with session() as runtime, runtime.engine.connect() as conn:
        found = [row for row in conn.execute(query).mappings() if row["tenant_id"] != app_id(row["crm"])]
        rows = [dict(row) | {"tenant_id": str(row["tenant_id"])} for row in found]
    if as_json:
        print_json({"tenants": rows})
        return
    columns = ("name", "crm", "address", "status", "sending", "configuration")
    cells = [
        (r["name"], r["crm"], r["base_url"], r["status"], yes(r["sending"]), r["config_version"] or "none")
        for r in rows
    ]
    table(columns, cells, none="No tenant yet; `turnlock tenant add` makes one.")


@tenant.command("set")
@click.argument("name")
@click.option("--base-url", callback=_address, help="The new address of the CRM, of the same account.")
@param_option("Empty: the default.")
@json_option
def tenant_set(name: str, base_url: str | None, params: dict[str, str], as_json: bool) -> None:
    """Change plain parameters of a tenant, or where its CRM is. Secrets are set with `turnlock tenant secret`.

    Example: turnlock tenant set acme --param price_field=Budget__c
    """
    from connector import tenant_changes

    with tenant_session(name) as (runtime, found):
        now = tenant_changes.change(runtime, found, parameters=params, base_url=base_url)
    if as_json:
        print_json({"tenant": found.name, "parameters": dict(now), "base_url": base_url or found.base_url})
    else:
        shown = ", ".join(f"{key}={value}" for key, value in sorted(now.items())) or "all as by default"
        say(f"{found.name}: {shown}. Next: `turnlock check {found.name}`.")


@tenant.command("secret")
@click.argument("name")
@click.argument("key")
@click.option("--at-once", is_flag=True, help="End the old value now; it is valid for 24 hours more otherwise.")
def tenant_secret(name: str, key: str, at_once: bool) -> None:
    """Set a new value for the secret KEY of a tenant.

    It comes from TURNLOCK_SECRET_<KEY>, from FILE with KEY=@FILE, or is asked for.

    Example: turnlock tenant secret acme webhook_secret=@new.txt
    """
    from connector import tenants

    with tenant_session(name) as (runtime, found):
        word, file = secrets.split(key, [p["name"] for p in _parameters(found.crm) if p["secure"]])
        tenants.set_secret(runtime, found, word, secrets.read(word, file), at_once=at_once)
    old = "The old value is not accepted any more." if at_once else f"The old value lives {tenants.OLD_SECRET_LIVES}."
    say(f"{word} of {found.name} is set. {old}")


@tenant.command("reseal")
@json_option
def tenant_reseal(as_json: bool) -> None:
    """Seal all stored secrets with the newest key of TURNLOCK_SECRET_KEYS. After it the older keys may go.

    Example: turnlock tenant reseal
    """
    from connector import tenants

    with session() as runtime:
        count = tenants.reseal(runtime)
    if as_json:
        print_json({"resealed": count})
    else:
        say(f"Sealed anew: {count}. The first key of TURNLOCK_SECRET_KEYS opens everything now.")


@tenant.command("hook")
@click.argument("name")
@json_option
def tenant_hook(name: str, as_json: bool) -> None:
    """Show the address that a tenant's CRM posts to. Whoever knows it can knock: keep it to yourself.

    Example: turnlock tenant hook acme
    """
    from connector import tenants

    with tenant_session(name) as (runtime, found), runtime.engine.connect() as conn:
        url = tenants.hook_url(runtime, conn, found)
    if as_json:
        print_json({"tenant": found.name, "url": url})
    else:
        say(url)


# -- into the CRM and out of it -----------------------------------------------------------------------------------


@click.command()
@tenant_argument
@json_option
def install(tenant: str, as_json: bool) -> None:
    """Install TENANT into its CRM.

    Reads the agents, subscribes the hook, starts the chores. Repeating it repairs what is missing.

    Example: turnlock install acme
    """
    from connector import tenants

    with tenant_session(tenant) as (runtime, found):
        done = tenants.install(runtime, found)
    if as_json:
        print_json(
            {
                "tenant": found.name,
                "agents": dict(done.agents),
                "topics": list(done.topics),
                "by_hand": list(done.by_hand),
            }
        )
        return
    say(f"Installed {found.name}. Agents: {_counts(done.agents)}. Subscribed: {', '.join(done.topics) or 'nothing'}.")
    if done.by_hand:
        say(f"To be done by hand, with the address from `turnlock tenant hook {found.name}`:")
        say(*(f"  - {step}" for step in done.by_hand))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {word}" for word, number in counts.items() if number) or "none"


@click.command()
@tenant_argument
@click.option("--force", is_flag=True, help="Go on although the CRM cannot be reached and keeps our hooks.")
@click.option("--yes", "sure", is_flag=True, help="Do not ask.")
@json_option
def uninstall(tenant: str, force: bool, sure: bool, as_json: bool) -> None:
    """Take TENANT out of its CRM.

    Removes our hooks, forgets the secrets, stops all work. Decisions and ledger stay.

    Example: turnlock uninstall acme --yes
    """
    from connector import tenants

    with tenant_session(tenant) as (runtime, found):
        if not sure:
            click.confirm(f"Uninstall {found.name}? Its secrets are deleted", abort=True, err=True)
        removed = tenants.uninstall(runtime, found, force=force)
    if as_json:
        print_json({"tenant": found.name, "hooks_removed": removed})
    else:
        by_hand = "" if removed else " Remove there what was made by hand."
        say(f"Uninstalled {found.name}; {removed} hook(s) removed from the CRM.{by_hand}")


# -- agents ---------------------------------------------------------------------------------------------------------


@click.group()
def agents() -> None:
    """The agents of a tenant, as the CRM has them.

    Example: turnlock agents list acme
    """


@agents.command("sync")
@tenant_argument
@json_option
def agents_sync(tenant: str, as_json: bool) -> None:
    """Read the agents of TENANT from its CRM now. A worker does so every 15 minutes.

    Example: turnlock agents sync acme
    """
    from connector.chores import sync_agents

    with tenant_session(tenant) as (runtime, found):
        counts = sync_agents(runtime, found)
    if as_json:
        print_json({"tenant": found.name, "agents": counts})
    else:
        say(f"Agents of {found.name}: {_counts(counts)}.")


@agents.command("teams")
@tenant_argument
@json_option
def agents_teams(tenant: str, as_json: bool) -> None:
    """List the teams of TENANT's CRM as they were read last.

    Who is in each, and which lines follow it. `turnlock agents sync` reads them now.

    Example: turnlock agents teams acme
    """
    from connector.teams import shown

    with tenant_session(tenant) as (runtime, found):
        rows = shown(runtime, found)
    if as_json:
        print_json({"tenant": found.name, "teams": rows})
        return
    cells = [
        (r["ref"], r["name"], ", ".join(map(named, r["agents"])), ", ".join(r["lines"]), "gone" if r["gone"] else None)
        for r in rows
    ]
    none = "None is known: the CRM has no teams that Turnlock can read, or they were not read yet."
    table(("team", "name", "agents", "followed by", ""), cells, none=none)


@agents.command("list")
@tenant_argument
@json_option
def agents_list(tenant: str, as_json: bool) -> None:
    """List the agents of TENANT.

    Whether a lead could go to them now, if not why, and in which queues they are.

    Example: turnlock agents list acme
    """
    from connector.preview import everyone

    with tenant_session(tenant) as (runtime, found):
        rows = everyone(runtime, found)
    if as_json:
        print_json({"tenant": found.name, "agents": rows})
        return
    columns = ("id", "name", "email", "available", "why not", "zone", "queues")
    table(
        columns,
        [
            (r["ref"], r["name"], r["email"], yes(r["available"]), r["detail"], r["zone"], ", ".join(r["queues"]))
            for r in rows
        ],
        none=f"No agent yet; `turnlock agents sync {found.name}` reads them.",
    )


COMMANDS = (tenant, install, uninstall, agents)
