"""Leads that agents give back: ask, approve, refuse, list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from connector.cli.output import agent as named
from connector.cli.output import print_json, say, table, when
from connector.cli.support import actor, find_agent, find_lead, json_option, tenant_argument, tenant_session

if TYPE_CHECKING:
    from connector.cli.support import F


class ReasonType(click.ParamType[str]):
    """A reason of the closed list."""

    name = "reason"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The reason's word; a wrong one is answered with all that there are."""
        from connector.returns import ReturnReason

        word = str(value).strip().lower().replace(" ", "_").replace("-", "_")
        if word not in {reason.value for reason in ReturnReason}:
            there = "; ".join(f"{reason.value} ({reason.text})" for reason in ReturnReason)
            self.fail(f"{value!r} is no reason; there are: {there}", param, ctx)
        return word


def _by(command: F) -> F:
    return click.option("--by", metavar="NAME", help="Who does it; the user at this terminal otherwise.")(command)


@click.group("return")
def returns() -> None:
    """Leads that agents give back.

    An agent asks, a manager approves or refuses. For an approved one the agent is owed one turn.

    Example: turnlock return list acme
    """


@returns.command("ask")
@tenant_argument
@click.argument("lead")
@click.argument("reason", type=ReasonType())
@click.option("--text", "words", metavar="TEXT", help="What the agent says. Shown to whoever decides, never logged.")
@click.option("--agent", help="Whose lead it must be; anybody's otherwise.")
@_by
@json_option
def return_ask(
    tenant: str, lead: str, reason: str, words: str | None, agent: str | None, by: str | None, as_json: bool
) -> None:
    """Ask to return LEAD for a REASON.

    REASON is one of bogus, duplicate, out_of_area, already_represented, unreachable, wrong_kind, conflict, other.
    The agent keeps the lead until it is approved.

    Example: turnlock return ask acme 1042 out_of_area --text "lives in another state"
    """
    from connector.errors import NotFound
    from connector.returns import ReturnReason, ask

    with tenant_session(tenant) as (runtime, found):
        with runtime.engine.connect() as conn:
            known = find_lead(conn, found, lead)
            if known is None:
                raise NotFound(f"Turnlock has not seen a lead {lead!r} of {found.name!r}; give the CRM's id")
            agent_id = find_agent(conn, found, agent).agent_id if agent is not None else None
        asked = ask(runtime, found, known[1], ReturnReason(reason), actor=by or actor(), words=words, agent_id=agent_id)
    if as_json:
        print_json({"tenant": found.name} | asked)
    else:
        say(f"{named(asked['agent'])} asks to return lead {asked['lead']} ({asked['return_id']}).")


@returns.command("approve")
@tenant_argument
@click.argument("which", metavar="RETURN")
@click.option("--void", "outcome", flag_value="void", help="The lead goes nowhere; the CRM's owner is left as it is.")
@click.option("--next", "outcome", flag_value="next", help="The lead goes to somebody who has not had it.")
@click.option("--why", metavar="TEXT", help="Kept in the ledger for ever.")
@_by
@json_option
def return_approve(
    tenant: str, which: str, outcome: str | None, why: str | None, by: str | None, as_json: bool
) -> None:
    """Approve RETURN: its id, or its lead's CRM id.

    The agent's turn is given back: they are owed one. Say what becomes of the lead: --void or --next.

    Example: turnlock return approve acme 1042 --next
    """
    from connector.returns import approve, find

    if outcome is None:
        raise click.UsageError("say what becomes of the lead: --void (nowhere) or --next (to somebody else)")
    with tenant_session(tenant) as (runtime, found):
        with runtime.engine.connect() as conn:
            return_id = find(conn, found, which)
        done = approve(runtime, found, return_id, void=outcome == "void", actor=by or actor(), why=why)
    if as_json:
        print_json({"tenant": found.name} | done)
        return
    turn = done["turn_given_back"]
    back = f"turn {turn} is given back and {named(done['agent'])} is owed one" if turn else "it had taken no turn"
    then = "goes nowhere" if outcome == "void" else "goes to somebody who has not had it"
    say(f"Approved: lead {done['lead']} {then}; {back}.")


@returns.command("refuse")
@tenant_argument
@click.argument("which", metavar="RETURN")
@click.option("--why", required=True, metavar="TEXT", help="Kept with the return.")
@_by
@json_option
def return_refuse(tenant: str, which: str, why: str, by: str | None, as_json: bool) -> None:
    """Refuse RETURN: its id, or its lead's CRM id. The lead stays with its agent.

    Example: turnlock return refuse acme 1042 --why "it is in your area"
    """
    from connector.returns import find, refuse

    with tenant_session(tenant) as (runtime, found):
        with runtime.engine.connect() as conn:
            return_id = find(conn, found, which)
        done = refuse(runtime, found, return_id, actor=by or actor(), why=why)
    if as_json:
        print_json({"tenant": found.name} | done)
    else:
        say(f"Refused: lead {done['lead']} stays with {named(done['agent'])}.")


@returns.command("list")
@tenant_argument
@click.option("--all", "decided", is_flag=True, help="Also those that are decided, newest first, 200 at most.")
@json_option
def return_list(tenant: str, decided: bool, as_json: bool) -> None:
    """List the returns that wait for a decision.

    Example: turnlock return list acme
    """
    from connector.returns import listing

    with tenant_session(tenant, removed=True) as (runtime, found):
        rows = listing(runtime, found, decided=decided)
    if as_json:
        print_json({"tenant": found.name, "returns": rows})
        return
    columns = ("return", "lead", "agent", "reason", "in their words", "asked", "state", "decided by", "why")
    cells = [
        (
            r["return_id"],
            r["lead"],
            named(r["agent"]),
            r["reason"],
            r["words"],
            when(r["asked_at"]),
            f"{r['state']}, {r['outcome']}" if r["outcome"] else r["state"],
            r["decided_by"],
            r["why"],
        )
        for r in rows
    ]
    table(columns, cells, none="No return waits for a decision." if not decided else "No lead was ever returned.")


COMMANDS = (returns,)
