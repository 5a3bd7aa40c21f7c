"""Trying before use: what would happen to a lead, and what a draft would have done with those of the past."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any
from uuid import UUID

import click

from connector.cli.output import agent, print_json, say
from connector.cli.story import tell_paths, tell_rules
from connector.cli.support import find_lead, json_option, tenant_argument, tenant_session

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
    if lead is None:
        return [trying.lead_of(fields)]
    with runtime.engine.connect() as conn:
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


COMMANDS = (simulate,)
