"""An admin's and operator's daily switches: pause and resume agents, stop and start sending, sweep."""

from __future__ import annotations

from datetime import datetime, timedelta

import click

from connector.cli.output import print_json, say
from connector.cli.support import Since, actor, find_agent, json_option, tenant_argument, tenant_session


@click.command()
@tenant_argument
@click.argument("agent")
def pause(tenant: str, agent: str) -> None:
    """Pause AGENT: no lead of a rotation goes to them.

    AGENT is an email, CRM id or name. Their place in every line is kept until `turnlock resume`.

    Example: turnlock pause acme ana@example.com
    """
    _switch(tenant, agent, paused=True)


@click.command()
@tenant_argument
@click.argument("agent")
def resume(tenant: str, agent: str) -> None:
    """End the admin's pause of AGENT.

    AGENT is an email, CRM id or name. Also ends the mark that the CRM refused them. A pause that the agent set
    in the CRM stays. Leads that wait for somebody are decided again.

    Example: turnlock resume acme ana@example.com
    """
    _switch(tenant, agent, paused=False)


def _switch(tenant: str, agent: str, *, paused: bool) -> None:
    from connector import switches

    with tenant_session(tenant) as (runtime, found):
        with runtime.engine.connect() as conn:
            who = find_agent(conn, found, agent)
        change = switches.pause if paused else switches.resume
        changed = change(runtime, found, who.agent_id, actor())
    word = "paused" if paused else "not paused by the admin"
    say(f"{who.name} ({who.ref}) is {word} {'now' if changed else 'already'}.")


@click.group()
def outbox() -> None:
    """Stop or start all sending to a CRM.

    Example: turnlock outbox stop acme
    """


@outbox.command("stop")
@tenant_argument
def outbox_stop(tenant: str) -> None:
    """Send nothing to the CRM of TENANT. Decisions go on; their writes wait.

    Example: turnlock outbox stop acme
    """
    _sending(tenant, sending=False)


@outbox.command("start")
@tenant_argument
def outbox_start(tenant: str) -> None:
    """Send to the CRM of TENANT again. What has waited goes first.

    Example: turnlock outbox start acme
    """
    _sending(tenant, sending=True)


def _sending(tenant: str, *, sending: bool) -> None:
    from connector.tenants import set_sending

    with tenant_session(tenant) as (runtime, found):
        set_sending(runtime, found, sending)
    state = "on" if sending else "stopped; decisions go on and their writes wait"
    say(f"Sending to the CRM of {found.name} is {state}.")


@click.command()
@tenant_argument
@click.option("--since", type=Since(), default="24h", show_default=True, help="A time, or how long ago: 90m, 24h, 7d.")
@json_option
def sweep(tenant: str, since: datetime | timedelta, as_json: bool) -> None:
    """Look in the CRM for leads that were missed.

    Leads that nobody has and Turnlock does not know of go to the inbox and are decided. A worker does so every
    5 minutes for the time since the last sweep.

    Example: turnlock sweep acme --since 7d
    """
    from connector.chores import sweep as run

    with tenant_session(tenant) as (runtime, found):
        with runtime.engine.connect() as conn:
            now = runtime.database_clock.read(conn)
        moment = now - since if isinstance(since, timedelta) else since
        swept = run(runtime, found, moment)
    if as_json:
        print_json({"tenant": found.name, "since": moment.isoformat(), "seen": swept.seen, "found": swept.found})
    else:
        say(f"{swept.seen} lead(s) without an agent in the CRM, {swept.found} of them new to Turnlock.")


COMMANDS = (pause, resume, outbox, sweep)
