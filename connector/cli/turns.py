"""Moves of a queue's turns and members by hand, and its ledger: the rest of ``turnlock queue``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from connector.cli.output import agent as named
from connector.cli.output import print_json, say, table, when
from connector.cli.support import (
    F,
    actor,
    find_member,
    find_queue,
    json_option,
    tenant_argument,
    tenant_session,
)

if TYPE_CHECKING:
    from connector.runtime import Runtime, Tenant

    Move = Callable[..., dict[str, Any]]

_MOVES = {
    "checkpoint": "the whole line is written down",
    "turn": "takes a turn",
    "join": "joins",
    "leave": "leaves",
    "reweight": "gets another weight",
    "reorder": "the line is put in another order",
    "send_to_back": "is sent to the back",
    "debit": "is charged a turn",
    "average": "is back and keeps no place ahead",
    "owe": "is owed a turn",
    "give_next": "gets the next lead",
    "withdraw": "an owed turn is withdrawn",
    "void": "gives a turn back",
}


def who_and_why(command: F) -> F:
    """``--why`` and ``--by``, for the ledger."""
    why = click.option("--why", required=True, metavar="TEXT", help="The reason, kept in the ledger for ever.")
    by = click.option("--by", metavar="NAME", help="Who decided it; the user at this terminal otherwise.")
    return why(by(command))


def _queue_and_agent(command: F) -> F:
    queue = click.argument("name", metavar="QUEUE")
    return tenant_argument(queue(click.argument("agent")(who_and_why(json_option(command)))))


def _found(runtime: Runtime, tenant: Tenant, name: str, *agents: str) -> tuple[UUID, list[UUID]]:
    with runtime.engine.connect() as conn:
        return find_queue(conn, tenant, name), [find_member(conn, tenant, one) for one in agents]


def _move(tenant: str, name: str, agent: str, why: str, by: str | None, as_json: bool, move: str) -> None:
    from connector import turns

    with tenant_session(tenant) as (runtime, found):
        queue_id, (agent_id,) = _found(runtime, found, name, agent)
        done = getattr(turns, move)(runtime, found, queue_id, agent_id, actor=by or actor(), why=why)
    _say_moved(found.name, done, as_json)


def _say_moved(tenant: str, done: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"tenant": tenant} | done)
        return
    who = f"{named(done['agent'])} " if done["agent"] else ""
    say(f"{who}{_MOVES[done['kind']]} in {done['queue']} (entry {done['seq']} of its ledger).")
    if done["order"]:
        say(f"First in line: {', '.join(named(one) for one in done['order'])}.")


@click.command("give-next")
@_queue_and_agent
def give_next(tenant: str, name: str, agent: str, why: str, by: str | None, as_json: bool) -> None:
    """Give AGENT the next lead of QUEUE that they may take.

    It counts as their turn. While they are away it waits for them.

    Example: turnlock queue give-next acme Everyone ana@example.com --why "asked for it at the meeting"
    """
    _move(tenant, name, agent, why, by, as_json, "give_next")


@click.command()
@_queue_and_agent
def back(tenant: str, name: str, agent: str, why: str, by: str | None, as_json: bool) -> None:
    """Send AGENT to the back of QUEUE.

    Example: turnlock queue back acme Everyone ana@example.com --why "closing all week"
    """
    _move(tenant, name, agent, why, by, as_json, "send_to_back")


@click.command()
@_queue_and_agent
def credit(tenant: str, name: str, agent: str, why: str, by: str | None, as_json: bool) -> None:
    """Owe AGENT one turn of QUEUE, beside their own.

    Example: turnlock queue credit acme Everyone ana@example.com --why "the last lead was a test"
    """
    _move(tenant, name, agent, why, by, as_json, "credit")


@click.command()
@_queue_and_agent
def debit(tenant: str, name: str, agent: str, why: str, by: str | None, as_json: bool) -> None:
    """Charge AGENT one turn of QUEUE that they did not take here.

    Example: turnlock queue debit acme Everyone ana@example.com --why "took a walk-in"
    """
    _move(tenant, name, agent, why, by, as_json, "debit")


@click.command()
@tenant_argument
@click.argument("name", metavar="QUEUE")
@click.argument("agents", metavar="AGENT...", nargs=-1, required=True)
@who_and_why
@json_option
def reorder(tenant: str, name: str, agents: tuple[str, ...], why: str, by: str | None, as_json: bool) -> None:
    """Put these AGENTs first in line of QUEUE, in this order.

    The others follow in the order in which they stand. Nobody is reset.

    Example: turnlock queue reorder acme Everyone ben@example.com ana@example.com --why "agreed on Monday"
    """
    from connector import turns

    with tenant_session(tenant) as (runtime, found):
        queue_id, ids = _found(runtime, found, name, *agents)
        done = turns.reorder(runtime, found, queue_id, ids, actor=by or actor(), why=why)
    _say_moved(found.name, done, as_json)


# -- members --------------------------------------------------------------------------------------------------------


def _change_members(
    tenant: str, name: str, agent: str, why: str, by: str | None, as_json: bool, change: str, **more: int
) -> None:
    from connector import turns

    with tenant_session(tenant) as (runtime, found):
        queue_id, (agent_id,) = _found(runtime, found, name, agent)
        with runtime.engine.connect() as conn:
            from connector.naming import Names

            names = Names.load(conn, found.tenant_id)
        queue = names.queue(queue_id) or name
        applied = getattr(turns, change)(runtime, found, queue, agent_id, actor=by or actor(), why=why, **more)
    if as_json:
        print_json(
            {
                "tenant": found.name,
                "queue": queue,
                "agent": names.agent(agent_id),
                "version": applied.version,
                "changed": applied.changed,
                "warnings": list(applied.warnings),
            }
        )
        return
    say(*(f"Note: {warning}" for warning in applied.warnings))
    version = f"version {applied.version} of the configuration"
    if not applied.changed:
        say(f"That is what {version} says already; nothing was changed.")
        return
    word = {"add": "joins at the back of", "remove": "leaves", "reweight": "has another weight in"}[change]
    say(f"{named(names.agent(agent_id))} {word} {queue}. This is {version}; `turnlock config export` prints it.")


@click.command()
@_queue_and_agent
@click.option("--weight", type=click.IntRange(0, 100), default=1, show_default=True, help="Turns in proportion.")
def add(tenant: str, name: str, agent: str, weight: int, why: str, by: str | None, as_json: bool) -> None:
    """Let AGENT join QUEUE at the back of its line.

    Makes a new version of the configuration, without its comments.

    Example: turnlock queue add acme Everyone dee@example.com --why "started today"
    """
    _change_members(tenant, name, agent, why, by, as_json, "add", weight=weight)


@click.command()
@_queue_and_agent
def remove(tenant: str, name: str, agent: str, why: str, by: str | None, as_json: bool) -> None:
    """Take AGENT out of QUEUE, with the turns they are owed there.

    Makes a new version of the configuration, without its comments.

    Example: turnlock queue remove acme Everyone dee@example.com --why "left the team"
    """
    _change_members(tenant, name, agent, why, by, as_json, "remove")


@click.command()
@tenant_argument
@click.argument("name", metavar="QUEUE")
@click.argument("agent")
@click.argument("weight", type=click.IntRange(0, 100))
@who_and_why
@json_option
def reweight(tenant: str, name: str, agent: str, weight: int, why: str, by: str | None, as_json: bool) -> None:
    """Give AGENT another WEIGHT in QUEUE; 0 is no turns.

    Makes a new version of the configuration, without its comments.

    Example: turnlock queue reweight acme Everyone ana@example.com 3 --why "top closer"
    """
    _change_members(tenant, name, agent, why, by, as_json, "reweight", weight=weight)


# -- the ledger -----------------------------------------------------------------------------------------------------


@click.command("ledger")
@tenant_argument
@click.argument("name", metavar="QUEUE")
@click.option("--count", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many entries.")
@click.option("--before", type=click.IntRange(min=1), help="Only entries of a lower number, to page back.")
@json_option
def queue_ledger(tenant: str, name: str, count: int, before: int | None, as_json: bool) -> None:
    """Show the newest entries of QUEUE's ledger.

    Every turn, and every move with who did it and why.

    Example: turnlock queue ledger acme Everyone --count 20
    """
    from connector.turns import ledger

    with tenant_session(tenant, removed=True) as (runtime, found):
        queue_id, _ = _found(runtime, found, name)
        shown = ledger(runtime, found, queue_id, limit=count, before=before)
    if as_json:
        print_json({"tenant": found.name} | shown)
        return
    rows = [
        (
            entry["seq"],
            when(entry["at"]),
            named(entry["agent"]) if entry["agent"] else None,
            f"{_MOVES.get(entry['kind'], entry['kind'])}{_more(entry)}",
            entry["actor"],
            entry["why"],
        )
        for entry in shown["entries"]
    ]
    table(("entry", "at", "agent", "what", "by", "why"), rows, none="The ledger has no entry.")


def _more(entry: dict[str, Any]) -> str:
    if entry["kind"] in ("turn", "void"):
        lead = f", lead {entry['lead']}" if entry["lead"] else ""
        how = f", {entry['how'].replace('_', ' ')}" if entry["how"] not in (None, "line") else ""
        return f" ({entry['turn']}{lead}{how})"
    if entry["kind"] in ("join", "reweight"):
        return f" ({entry['weight']})"
    if entry["order"]:
        return f": {', '.join(named(one) for one in entry['order'])}"
    return ""


MOVES = (give_next, back, credit, debit, reorder, reweight, add, remove, queue_ledger)
