"""What waits for a human, and deciding by hand: parked, replay, give-up, route."""

from __future__ import annotations

import sys
from uuid import UUID

import click

from connector.cli import story
from connector.cli.output import agent, print_json, say, table, when
from connector.cli.support import find_lead, json_option, tenant_argument, tenant_session


@click.command()
@tenant_argument
@json_option
def parked(tenant: str, as_json: bool) -> None:
    """List what waits for a human in TENANT.

    Events, writes to the CRM and leads, each with its reason and remedy.

    Example: turnlock parked acme
    """
    from connector.replay import parked as look

    with tenant_session(tenant) as (runtime, found):
        shown = look(runtime, found)
    if as_json:
        print_json(shown)
        return
    if not any(shown[kind] for kind in ("events", "writes", "leads")):
        say("Nothing is parked.")
        return
    for kind, key in (("events", "event_id"), ("writes", "write_id"), ("leads", "lead_id")):
        if shown[kind]:
            say(f"Parked {kind}:")
            rows = [
                (
                    r[key],
                    r["lead"],
                    r.get("kind") or r.get("role"),
                    agent(r["agent"]) if "agent" in r else None,
                    r["reason"],
                    when(r.get("received_at") or r.get("ordered_at") or r.get("since")),
                    r["remedy"],
                )
                for r in shown[kind]
            ]
            table(("id", "lead", "what", "agent", "reason", "since", "what to do"), rows, indent=2)


@click.command()
@tenant_argument
@click.argument("what", metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="Everything that is parked.")
@json_option
def replay(tenant: str, what: str | None, everything: bool, as_json: bool) -> None:
    """Try again what is parked.

    An event, a write or a lead, by the ID that `turnlock parked` shows. A body that could not be read is read
    again. Exit code 1 when something stays parked.

    Example: turnlock replay acme --all
    """
    from connector.replay import replay_all, replay_one

    if (what is None) is not everything:
        raise click.UsageError("name one ID of `turnlock parked`, or say --all")
    with tenant_session(tenant) as (runtime, found):
        done = [replay_one(runtime, found, what)] if what is not None else replay_all(runtime, found)
    if as_json:
        rows = [{"kind": one.kind, "id": one.id, "again": one.again, "text": one.text} for one in done]
        print_json({"tenant": found.name, "replayed": rows})
    else:
        say(*(f"{one.kind} {one.id}: {one.text}" for one in done) if done else ["Nothing is parked."])
    if not all(one.again for one in done):
        sys.exit(1)


@click.command("give-up")
@tenant_argument
@click.argument("write_id", type=click.UUID)
@json_option
def give_up(tenant: str, write_id: UUID, as_json: bool) -> None:
    """End a parked write for good.

    The agent's turn is given back, and the lead stays as it is in the CRM.

    Example: turnlock give-up acme 01997c7e-3b3f-7d7c-9c56-0d6c2b7a4f10
    """
    from connector.replay import give_up as end

    with tenant_session(tenant) as (runtime, found):
        done = end(runtime, found, write_id)
    if as_json:
        print_json({"tenant": found.name} | done)
        return
    turn = done["turn_given_back"]
    back = f"Turn {turn} is given back; {agent(done['agent'])} is owed one." if turn else "It had taken no turn."
    say(f"Given up. {back} Lead {done['lead']} can be decided again: `turnlock route {found.name} {done['lead']}`.")


@click.command()
@tenant_argument
@click.argument("lead")
@click.option("--wait", type=click.FloatRange(0, 600), default=30.0, show_default=True, help="Seconds to go on for.")
@json_option
def route(tenant: str, lead: str, wait: float, as_json: bool) -> None:
    """Decide LEAD now, write its owner, tell why.

    LEAD is the CRM's id or Turnlock's. Whoever has the lead in the CRM keeps it. Needs no worker and does not mind one.

    Example: turnlock route acme 1042
    """
    from connector.byhand import route as decide
    from connector.explain import explain

    with tenant_session(tenant) as (runtime, found):
        with runtime.engine.connect() as conn:
            ref, lead_id = find_lead(conn, found, lead) or (lead, None)
        routed = decide(runtime, found, ref, lead_id, patience=wait)
        told = explain(runtime, found, routed.lead_id)
    if as_json:
        print_json({"result": routed.word, "decided": routed.decided} | told)
        return
    if not routed.decided:
        say(f"Nothing was decided: {routed.text}.", "")
    story.tell(told)


COMMANDS = (parked, replay, give_up, route)
