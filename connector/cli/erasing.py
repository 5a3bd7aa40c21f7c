"""Erasing a person at their request."""

from __future__ import annotations

import click

from connector.cli.output import print_json, say
from connector.cli.support import json_option, tenant_argument, tenant_session


@click.command()
@tenant_argument
@click.argument("who", metavar="PERSON")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def erase(tenant: str, who: str, yes: bool, as_json: bool) -> None:
    """Erase what is known of PERSON.

    PERSON is the CRM's id of a lead or Turnlock's, an email or a phone number; all leads that share it are erased.
    Facts, identities, deliveries and the values in decisions go; decisions, turns and the audit stay whole. Erase them
    in the CRM first, or its next webhook brings them back.

    Example: turnlock erase acme kim@example.com
    """
    from connector.erase import erase as forget

    if not yes:
        click.confirm("Erase for good what is known of this person?", abort=True, err=True)
    with tenant_session(tenant, removed=True) as (runtime, found):
        done = forget(runtime, found, who)
    if as_json:
        counts = {"leads": done.leads, "decisions": done.decisions, "bodies": done.bodies}
        print_json({"tenant": found.name} | counts)
        return
    say(f"Erased: {done.leads} lead(s), values in {done.decisions} decision(s), {done.bodies} stored delivery(s).")


COMMANDS = (erase,)
