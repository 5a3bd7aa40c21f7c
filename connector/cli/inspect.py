"""Asking why and who is next: queue, explain, audit, alarms."""

from __future__ import annotations

import sys
from typing import Any

import click

from connector.cli import story
from connector.cli.output import agent, print_json, say, table, when, yes
from connector.cli.support import (
    each_tenant,
    find_lead,
    find_queue,
    json_option,
    session,
    tenant_argument,
    tenant_session,
)
from connector.cli.turns import MOVES


@click.group()
def queue() -> None:
    """Who is next in a queue and who is away; moves of its turns by hand.

    Example: turnlock queue next acme Everyone
    """


for move in MOVES:
    queue.add_command(move)


@queue.command("next")
@tenant_argument
@click.argument("name", metavar="QUEUE")
@click.option("--count", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many turns.")
@json_option
def queue_next(tenant: str, name: str, count: int, as_json: bool) -> None:
    """Show who gets the next leads of QUEUE.

    If nothing changes; and who is unavailable now, with the reason. It asks what a decision would ask at this
    moment, so the next lead goes to the first.

    Example: turnlock queue next acme Everyone --count 5
    """
    from connector.preview import next_up

    with tenant_session(tenant) as (runtime, found):
        with runtime.engine.connect() as conn:
            queue_id = find_queue(conn, found, name)
        shown = next_up(runtime, found, queue_id, count)
    if as_json:
        print_json({"tenant": found.name} | shown)
        return
    _head(shown)
    nobody = f"Nobody is available; a lead is treated as: {_policy(shown)}."
    nobody = "Whatever comes now is held." if shown["quiet"] else nobody
    other = {r["queue"] for r in shown["next"]} - {shown["queue"]}
    teams = any(r["teams"] for r in shown["next"])
    columns = ("turn", "agent", "by", *(["in"] if teams else []), *(["through queue"] if other else []))
    rows = [
        (r["turn"], agent(r["agent"]), r["how"], *([_teams(r)] if teams else []), *([r["queue"]] if other else []))
        for r in shown["next"]
    ]
    table(columns, rows, none=nobody)
    if shown["unavailable"]:
        say("", "Unavailable:")
        rows = [(agent(r["agent"]), r["skip"], r["detail"], r["remedy"]) for r in shown["unavailable"]]
        table(("agent", "why", "in detail", "what would change it"), rows)


def _teams(row: dict[str, Any]) -> str:
    """The turns of the teams on the way to the agent."""
    return ", ".join(f"{one['team']}: {one['turn']}" for one in row["teams"])


def _policy(shown: dict[str, Any]) -> str:
    if shown["fallback_queue"]:
        return f"{shown['when_nobody']} {shown['fallback_queue']}"
    if shown["default_agent"]:
        return f"{shown['when_nobody']} {agent(shown['default_agent'])}"
    return str(shown["when_nobody"])


def _head(shown: dict[str, Any]) -> None:
    say(f"Queue {shown['queue']}: position {shown['position']}, as of {when(shown['as_of'])}.")
    if shown["quiet"]:
        say(f"It is quiet and holds its leads {shown['quiet']}.")
    if shown["held"]:
        say(f"{shown['held']} lead(s) are held and get the next agents who are free.")


@queue.command("import")
@tenant_argument
@click.option("--team", "only", multiple=True, metavar="NAME", help="Only this team; may be given several times.")
@json_option
def queue_import(tenant: str, only: tuple[str, ...], as_json: bool) -> None:
    """Print the CRM's teams and groups as queues, to be put into the configuration. Nothing is applied.

    Members are the active agents, in the CRM's order, all with weight 1. A team whose name a queue has already is left
    out.

    Example: turnlock queue import acme --team Austin
    """
    from connector import teams

    with tenant_session(tenant) as (runtime, found):
        read = teams.as_queues(runtime, found, only)
    if as_json:
        print_json(
            {
                "tenant": found.name,
                "queues": list(read.queues),
                "present": list(read.present),
                "unknown_agents": read.unknown,
                "yaml": read.text,
            }
        )
        return
    click.echo(read.text, nl=False)
    if not read.queues:
        click.echo("No new queue: the CRM has no team that is not one already.", err=True)
    if read.present:
        click.echo(f"Queues already: {', '.join(read.present)}.", err=True)
    if read.unknown:
        click.echo(f"{read.unknown} agent(s) are not known yet: `turnlock agents sync {found.name}`.", err=True)


@queue.command("show")
@tenant_argument
@click.argument("name", metavar="QUEUE")
@json_option
def queue_show(tenant: str, name: str, as_json: bool) -> None:
    """Show the members of QUEUE.

    In the order in which they would be served next if all were available.

    Example: turnlock queue show acme Everyone
    """
    from connector.preview import show

    with tenant_session(tenant) as (runtime, found):
        with runtime.engine.connect() as conn:
            queue_id = find_queue(conn, found, name)
        shown = show(runtime, found, queue_id)
    if as_json:
        print_json({"tenant": found.name} | shown)
        return
    _head(shown)
    say(f"When nobody is available: {_policy(shown)}.")
    columns = ("agent", "weight", "last turn", "given next", "owed turns", "available", "why not")
    rows = [
        (
            agent(r["agent"]),
            r["weight"],
            r["last_turn"],
            r["given_next"] or None,
            r["owed_turns"] or None,
            yes(r["available"]),
            r["detail"],
        )
        for r in shown["members"]
    ]
    table(columns, rows, none="It has no members.")


@click.command()
@tenant_argument
@click.argument("lead")
@json_option
def explain(tenant: str, lead: str, as_json: bool) -> None:
    """Tell why LEAD is where it is.

    LEAD is the CRM's id or Turnlock's. Shows every decision in order: the rules tried, the members considered and why
    they were passed over, the turn, and what became of the write to the CRM.

    Example: turnlock explain acme 1042
    """
    from connector.errors import NotFound
    from connector.explain import explain as tell

    with tenant_session(tenant, removed=True) as (runtime, found):
        with runtime.engine.connect() as conn:
            known = find_lead(conn, found, lead)
        if known is None:
            raise NotFound(
                f"Turnlock has not seen a lead {lead!r} of {found.name!r}; give the CRM's id, "
                f"or let it be decided: `turnlock route {found.name} {lead}`"
            )
        told = tell(runtime, found, known[1])
    if as_json:
        print_json(told)
    else:
        story.tell(told)


@click.command()
@click.argument("tenant", required=False)
@click.option("--whole", is_flag=True, help="From the first entry of each ledger, not from the last checkpoint.")
@json_option
def audit(tenant: str | None, whole: bool, as_json: bool) -> None:
    """Replay every ledger and compare with the present.

    Of TENANT, or of all. Exit code 1 when a turn does not follow; the first one is printed.

    Example: turnlock audit acme --whole
    """
    from connector.auditing import audit_queues

    with session() as runtime:
        found = [(one.name, audit_queues(runtime, one.tenant_id, whole=whole)) for one in each_tenant(runtime, tenant)]
    good = all(one.ok for _, audits in found for one in audits)
    if as_json:
        print_json(
            {
                "ok": good,
                "tenants": [
                    {
                        "tenant": name,
                        "queues": [
                            {
                                "queue": one.queue,
                                "ok": one.ok,
                                "position": one.position,
                                "entries": one.entries,
                                "problems": list(one.problems),
                            }
                            for one in audits
                        ],
                    }
                    for name, audits in found
                ],
            }
        )
    else:
        rows = [
            (name, one.queue, one.position, one.entries, "follows" if one.ok else "DOES NOT FOLLOW")
            for name, audits in found
            for one in audits
        ]
        table(("tenant", "queue", "position", "entries replayed", ""), rows, none="There is no queue with a ledger.")
        broken = [(name, one) for name, audits in found for one in audits if not one.ok]
        for name, one in broken:
            say("", f"{name}, queue {one.queue}: the first that does not follow:", f"  {one.problems[0]}")
            if len(one.problems) > 1:
                say(f"  ({len(one.problems) - 1} more; see --json)")
    if not good:
        sys.exit(1)


@click.command()
@click.argument("tenant", required=False)
@click.option("--all", "closed", is_flag=True, help="Also those that are closed, newest first, 200 at most.")
@json_option
def alarms(tenant: str | None, closed: bool, as_json: bool) -> None:
    """List the open alarms. Of TENANT, or of all. The software opens and closes them by itself.

    Example: turnlock alarms
    """
    import sqlalchemy as sa

    from connector.tables import alarms as stored

    c = stored.c
    rows = []
    with session() as runtime:
        for one in each_tenant(runtime, tenant):
            query = sa.select(stored).where(c.tenant_id == one.tenant_id).order_by(c.last_at.desc()).limit(200)
            with runtime.engine.connect() as conn:
                for row in conn.execute(query if closed else query.where(c.closed_at.is_(None))):
                    times = {
                        name: value.isoformat() if value else None
                        for name in ("opened_at", "last_at", "closed_at")
                        for value in [getattr(row, name)]
                    }
                    rows.append(
                        {
                            "tenant": one.name,
                            "kind": row.kind,
                            "subject": row.subject,
                            "text": row.text,
                            "times": row.times,
                        }
                        | times
                    )
    if as_json:
        print_json({"alarms": rows})
        return
    columns = ("tenant", "alarm", "about", "times", "since", "last", *(["closed"] if closed else []), "what to do")
    cells = [
        (
            r["tenant"],
            r["kind"],
            r["subject"],
            r["times"],
            when(r["opened_at"]),
            when(r["last_at"]),
            *([when(r["closed_at"])] if closed else []),
            r["text"],
        )
        for r in rows
    ]
    table(columns, cells, none="No alarm is open." if not closed else "There was never an alarm.")


COMMANDS = (queue, explain, audit, alarms)
