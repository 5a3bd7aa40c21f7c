"""Trying before use: what would happen to a lead, and what a draft would have done with those of the past."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import IO, TYPE_CHECKING, Any
from uuid import UUID

import click

from connector.cli.output import agent, print_json, say, table, when
from connector.cli.story import tell_paths, tell_rules
from connector.cli.support import Since, find_lead, json_option, tenant_argument, tenant_session

if TYPE_CHECKING:
    from connector.runtime import Runtime, Tenant
    from routing.model import Lead


@click.command()
@tenant_argument
@click.option("--field", "fields", multiple=True, metavar="NAME=VALUE", help="A field as rules name it; repeatable.")
@click.option("--lead", metavar="LEAD", help="A lead that Turnlock knows, as it was read last.")
@click.option("--delivery", type=click.UUID, help="A stored delivery, by its id.")
@click.option("--config", "file", type=click.File("rb"), help="Under this configuration instead of the one in force.")
@json_option
def simulate(
    tenant: str,
    fields: tuple[str, ...],
    lead: str | None,
    delivery: UUID | None,
    file: IO[bytes] | None,
    as_json: bool,
) -> None:
    """Show what would happen to a lead now.

    Which rule wins, who gets it and why, who is passed over. It is decided as a new and unassigned lead and not
    kept: no turn is taken and nothing is written.

    Example: turnlock simulate acme --field source=Zillow --field price=450000
    """
    from connector.draft import rehearse
    from connector.simulate import simulate as try_out

    if sum((bool(fields), lead is not None, delivery is not None)) != 1:
        raise click.UsageError("give --field (as often as needed), --lead or --delivery")
    with tenant_session(tenant) as (runtime, found):
        leads = _leads(runtime, found, fields, lead, delivery)
        draft = None if file is None else rehearse(runtime, found, file.read())
        told = try_out(runtime, found, leads, draft)
    if as_json:
        print_json(told)
        return
    for number, decision in enumerate(told["decisions"]):
        if number:
            say("")
        _tell(decision)
    say("Nothing was kept: no turn was taken and nothing was written.")


def _leads(
    runtime: Runtime, tenant: Tenant, fields: tuple[str, ...], lead: str | None, delivery: UUID | None
) -> list[Lead]:
    from connector import simulate as trying
    from connector.errors import NotFound

    if delivery is not None:
        return trying.leads_of_delivery(runtime, tenant, delivery)
    with runtime.engine.connect() as conn:
        if lead is None:
            return [trying.lead_of(fields, runtime.database_clock.read(conn))]
        known = find_lead(conn, tenant, lead)
        stored = None if known is None else trying.stored_lead(conn, tenant.tenant_id, known[1])
    if stored is None:
        raise NotFound(f"Turnlock knows no fields of a lead {lead!r} of {tenant.name!r}; give them by --field")
    return [stored]


def _tell(d: dict[str, Any]) -> None:
    what = f"{d['outcome']} to {agent(d['agent'])}" if d["agent"] else d["outcome"]
    turn = f", turn {d['turn']} of queue {d['queue']}" if d["turn"] is not None else ""
    say(f"It would be {what}{turn}.")
    if d["reason"]:
        say(f"  reason: {d['reason']}{': ' + d['remedy'] if d['remedy'] else ''}")
    say(f"  by: {'rule ' + repr(d['rule']) if d['rule'] else 'no rule'}")
    tell_rules(d["rules"])
    tell_paths(d["paths"])


@click.command("replay-history")
@tenant_argument
@click.option("--since", type=Since(), default="90d", show_default=True, help="The leads from this moment on.")
@click.option("--config", "file", type=click.File("rb"), help="The draft; the configuration in force otherwise.")
@click.option("--show", type=click.IntRange(0), default=20, show_default=True, help="How many differences to print.")
@json_option
def replay_past(tenant: str, since: timedelta | datetime, file: IO[bytes] | None, show: int, as_json: bool) -> None:
    """Decide the leads of the past again under a draft.

    Side by side: who would have got what, shares, held leads and each difference. Nothing is written.

    Example: turnlock replay-history acme --since 90d --config draft.yaml
    """
    from connector.past import replay_past as again

    with tenant_session(tenant) as (runtime, found):
        told = again(runtime, found, None if file is None else file.read(), since)
    if as_json:
        print_json(told)
    else:
        _side_by_side(told, show)


def _side_by_side(told: dict[str, Any], show: int) -> None:
    say(f"{told['leads']} leads of {told['tenant']} since {when(told['since'])}, decided again. Nothing was written.")
    if told["unknown"]:
        say(f"Of {told['unknown']} more nothing is known any more.")
    rows = [
        (agent(r["agent"]), r["actual"], _percent(r["actual_share"]), r["draft"], _percent(r["draft_share"]),
         f"{r['difference']:+d}")
        for r in told["agents"]
    ]  # fmt: skip
    table(("agent", "had", "", "would have", "", "difference"), rows)
    held, left = told["held"], told["left"]
    say("", f"Held for a time: {held['actual']}, would be {held['draft']}; still: {held['draft_still']}.")
    say(f"Left alone: {left['actual']}, would be {left['draft']}.")
    back, moves = told["given_back"], told["moves"]
    say(f"Given back: {back['actual']}, would be {back['draft']}; each is given back again by whoever has it.")
    if moves["repeated"] or moves["not_repeated"]:
        say(
            f"Credits, charges and turns given next by hand: {moves['repeated']} repeated at their time, "
            f"{moves['not_repeated']} not (the agent is no member by the draft)."
        )
    say(f"{told['same']} of {told['leads']} leads the same; {len(told['differences'])} differ:")
    differ = [(r["lead"], when(r["came"]), _end(r["actual"]), _end(r["draft"])) for r in told["differences"][:show]]
    table(("lead", "came", "had", "would have"), differ, indent=2)
    if len(told["differences"]) > show:
        say(f"  ... and {len(told['differences']) - show} more; see --json")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _end(side: dict[str, Any]) -> str:
    by = f", rule {side['rule']!r}" if side["rule"] else ""
    back = f", given back ({side['given_back']})" if side["given_back"] else ""
    return (agent(side["agent"]) if side["agent"] else f"{side['outcome']} ({side['reason']})") + by + back


COMMANDS = (simulate, replay_past)
