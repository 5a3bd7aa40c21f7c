"""An admin's and operator's daily switches: pause and resume agents, stop and start sending, sweep."""

from __future__ import annotations

from datetime import datetime, timedelta

import click

from connector.cli.output import print_json, say
from connector.cli.support import Since, Until, actor, find_agent, json_option, tenant_argument, tenant_session


@click.command()
@tenant_argument
@click.argument("agent")
@click.option(
    "--until", type=Until(), help="When the pause ends by itself: a time on the agent's clock, or 90m, 24h, 7d."
)
def pause(tenant: str, agent: str, until: datetime | timedelta | None) -> None:
    """Pause AGENT: no lead of a rotation goes to them.

    AGENT is an email, CRM id or name. The pause lasts until `turnlock resume`, or until the time given. Their place in
    every line is kept, unless a queue's skip_policy says otherwise.

    Example: turnlock pause acme ana@example.com --until "2026-07-06 09:00"
    """
    _switch(tenant, agent, paused=True, until=until)


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


def _switch(tenant: str, agent: str, *, paused: bool, until: datetime | timedelta | None = None) -> None:
    from connector import switches

    with tenant_session(tenant) as (runtime, found):
        with runtime.engine.connect() as conn:
            who = find_agent(conn, found, agent)
        if paused:
            done = switches.pause(runtime, found, who.agent_id, actor(), until)
        else:
            done = switches.resume(runtime, found, who.agent_id, actor())
    word = "paused" if paused else "not paused by the admin"
    ends = f", until {done.until}" if done.until else ""
    say(f"{who.name} ({who.ref}) is {word} {'now' if done.changed else 'already'}{ends}.")


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


@click.command("test-lead")
@tenant_argument
@click.option("--to", "agent", required=True, help="The agent who gets it: an email, CRM id or name.")
@click.option("--wait", "patience", type=click.IntRange(1, 600), default=60, show_default=True, help="Seconds.")
@click.option("--keep", is_flag=True, help="Leave the lead in the CRM.")
@json_option
def test_lead(tenant: str, agent: str, patience: int, keep: bool, as_json: bool) -> None:
    """Send one marked lead all the way and say how far it came; then remove it from the CRM.

    It is made in the CRM of TENANT, and goes to the agent of --to without taking a turn, whatever the rules say.
    `turnlock serve` (or web and worker) must be running. Exit code 1: it did not come all the way.

    Example: turnlock test-lead acme --to ana@example.com
    """
    import sys

    from connector import testing

    with tenant_session(tenant) as (runtime, found):
        with runtime.engine.connect() as conn:
            who = find_agent(conn, found, agent)
        way = testing.send(runtime, found, who.agent_id, patience=patience, keep=keep)
    steps = (
        ("heard", way.heard, "the CRM's webhook came in", "no webhook came in: see `turnlock check`"),
        ("decided", way.decided, f"decided for {who.name}", "not decided: see `turnlock explain` and the worker's log"),
        ("owned", way.owned, "the CRM shows the owner", "the CRM does not show the owner: see `turnlock parked`"),
        ("noted", way.noted, "the note is on the lead", "no note"),
    )
    if as_json:
        seconds = {name: None if at is None else round(at, 3) for name, at, *_ in steps}
        about = {"tenant": found.name, "lead": way.ref, "whole": way.whole, "removed": way.removed}
        print_json({**about, "stays_because": way.stays_because, **seconds})
    else:
        say(f"Test lead {way.ref}")
        say(*(f"  {at:6.2f} s  {good}" if at is not None else f"       -    {bad}" for _, at, good, bad in steps))
        say("It is removed from the CRM." if way.removed else "It is still in the CRM.")
        if way.stays_because:
            say(f"  {way.stays_because}")
    if not way.whole:
        sys.exit(1)


COMMANDS = (test_lead, pause, resume, outbox, sweep)
