"""Apps: one registration at a CRM for many accounts, and connecting an account to it."""

from __future__ import annotations

from typing import Any

import click

from connector.cli import secrets
from connector.cli.output import print_json, say
from connector.cli.support import json_option, param_option, session, tenant_argument, tenant_session
from connector.cli.tenants import _address


@click.group()
def app() -> None:
    """Your app at a CRM: one id, one secret and one hook for all accounts that install it.

    Example: turnlock app show hubspot
    """


@app.command("set")
@click.argument("crm")
@click.option("--base-url", callback=_address, help="Another address of the CRM's API than its own (a sandbox).")
@param_option("client_id, pkce.")
@secrets.option("A secret.")
@json_option
def app_set(crm: str, base_url: str | None, params: dict[str, str], named: tuple[str, ...], as_json: bool) -> None:
    """Register your app of CRM here, or change what is known of it. Nothing is changed in the CRM.

    Example: turnlock app set hubspot --param client_id=1234 --secret client_secret
    """
    from connector import apps

    wanted: list[dict[str, Any]] = [
        {"name": name, "title": name, "secure": True, "required": False, "help": "of the app"}
        for name in apps.secrets_of(crm)
    ]
    with session() as runtime:
        values = secrets.gather(named, wanted)
        apps.set_app(runtime, crm, parameters=params, secret_values=values, base_url=base_url)
        told = _told(runtime, crm)
    if as_json:
        print_json({"crm": crm, **told})
    else:
        say(f"The app of {crm} is registered. Enter at the CRM:", *(f"  {k}: {v}" for k, v in told.items()))


@app.command("install")
@click.argument("crm")
@param_option("HubSpot: app_id.")
@secrets.option("HubSpot: developer_key, which is not kept.")
@click.option("--replace", is_flag=True, help="Also where the app posts to another address now.")
@json_option
def app_install(crm: str, params: dict[str, str], named: tuple[str, ...], replace: bool, as_json: bool) -> None:
    """Make the hook of your app at CRM and its subscriptions. Repeating it repairs what is missing.

    Exit code 1: something is left to be done by hand.

    Example: turnlock app install hubspot --param app_id=1234567 --secret developer_key
    """
    import sys

    from adapters import registry
    from connector import apps

    wanted: list[dict[str, Any]] = [
        {"name": name, "title": name, "secure": secret, "required": True, "help": "of the app's developer"}
        for name, secret in registry.adapter(crm).app_access.items()
    ]
    with session() as runtime:
        values = secrets.gather(named, wanted)
        done = apps.install_app(runtime, crm, parameters=params, secret_values=values, replace=replace)
    topics = [hook.topic for hook in done.hooks]
    if as_json:
        print_json({"crm": crm, "topics": topics, "by_hand": list(done.by_hand)})
    else:
        say(
            f"The app of {crm} tells of: {', '.join(topics) or 'nothing yet'}.", *(f"  - {one}" for one in done.by_hand)
        )
    if done.by_hand:
        sys.exit(1)


@app.command("show")
@click.argument("crm")
@json_option
def app_show(crm: str, as_json: bool) -> None:
    """Show what is to be entered at the CRM for your app: where consents come back to, and its hook.

    Example: turnlock app show hubspot
    """
    with session() as runtime:
        told = _told(runtime, crm)
    if as_json:
        print_json({"crm": crm, **told})
    else:
        say(*(f"{k}: {v}" for k, v in told.items()))


def _told(runtime: Any, crm: str) -> dict[str, str]:
    from adapters import registry
    from adapters.base import Capability
    from connector import apps

    with runtime.engine.connect() as conn:
        _, credentials = apps.app_credentials(runtime, conn, crm)
    told = {"redirect_url": credentials.redirect_uri}
    if Capability.APP_HOOKS in registry.adapter(crm).capabilities:
        told["hook_url"] = apps.app_hook_url(runtime, crm)
    return told


@click.command()
@tenant_argument
@json_option
def connect(tenant: str, as_json: bool) -> None:
    """Make a link with which the admin of TENANT's account grants access. It is good for 30 minutes.

    Whoever opens it can connect an account of theirs: send it to that admin only. A tenant with an app of its own needs
    no link: Turnlock asks for a token at once.

    Example: turnlock connect acme
    """
    from connector import oauth

    with tenant_session(tenant) as (runtime, found):
        url: str | None = None
        if found.own_app:
            oauth.again(runtime, found)
        else:
            url = oauth.link(runtime, found)
    if as_json:
        print_json({"tenant": found.name, "url": url})
    elif url is None:
        say(f"Connected: {found.name}.")
    else:
        say(f"Open this within 30 minutes, signed in to the account as an admin: {url}")


COMMANDS = (app, connect)
