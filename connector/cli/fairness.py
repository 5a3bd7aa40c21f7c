"""Fairness: who was to expect which share of the turns, who had it, and why the two differ."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from connector.cli.output import agent, print_json, say, table
from connector.cli.support import Since, find_queue, json_option, tenant_argument, tenant_session

Json = Mapping[str, Any]
_COLUMNS = (
    "period", "agent_ref", "agent", "in_line", "expected", "expected_share", "actual", "actual_share", "difference",
    "others_absent", "owed_turns", "given_back", "debits", "order_of_the_line", "with_even_weights", "by_weight",
    "given_next", "without_turn", "longest_wait_turns", "longest_wait_seconds",
)  # fmt: skip


@click.command()
@tenant_argument
@click.option("--queue", "name", metavar="QUEUE", help="One queue; all of them otherwise.")
@click.option("--rule", help="Only leads that came from this rule.")
@click.option("--since", type=Since(), default="30d", show_default=True, help="From the day of this moment on (UTC).")
@click.option("--until", type=Since(), help="To the day of this moment (UTC), included; today otherwise.")
@click.option("--per", type=click.Choice(["whole", "day", "week", "month"]), default="whole", show_default=True)
@click.option("--format", "form", type=click.Choice(["text", "csv", "svg"]), default="text", show_default=True)
@click.option("--rebuild", is_flag=True, help="First make the sums anew from the ledgers.")
@json_option
def fairness(
    tenant: str,
    name: str | None,
    rule: str | None,
    since: timedelta | datetime,
    until: timedelta | datetime | None,
    per: str,
    form: str,
    rebuild: bool,
    as_json: bool,
) -> None:
    """Show each agent's share of the turns.

    What they were to expect by their weight, what they had, and the difference by its reasons: absences, others'
    absences, turns owed and given back, the order of the line; the leads they had without a turn, which are in no
    share; and the longest wait.

    Example: turnlock fairness acme --queue Everyone --since 30d
    """
    from connector import fairness as sums
    from connector.fairness_chart import chart

    with tenant_session(tenant, removed=True) as (runtime, found):
        with runtime.engine.connect() as conn:
            now = runtime.database_clock.read(conn)
        first = (now - since if isinstance(since, timedelta) else since).astimezone(UTC).date()
        last = now if until is None else now - until if isinstance(until, timedelta) else until
        if last.astimezone(UTC).date() < first:
            raise click.UsageError("--until lies before --since")
        queue_id = None
        if name is not None:
            with runtime.engine.connect() as conn:
                queue_id = find_queue(conn, found, name)
        if rebuild:
            sums.rebuild(runtime, found.tenant_id)
        until_day = last.astimezone(UTC).date()
        told = sums.report(runtime, found, since=first, until=until_day, per=per, queue_id=queue_id, rule=rule)
    if as_json:
        print_json(told)
    elif form == "csv":
        click.echo(_csv(told), nl=False)
    elif form == "svg":
        click.echo(chart(told), nl=False)
    else:
        _tell(told)


def _rows(told: Json) -> Iterator[tuple[str, Json]]:
    for period in told["periods"]:
        for row in period["agents"]:
            yield period["start"], row


def _csv(told: Json) -> str:
    """One line per agent and period; each reason of an absence and each way without a turn has a column of its own."""
    reasons = sorted({reason for _, row in _rows(told) for reason in row["because"]["absent"]})
    ways = sorted({how for _, row in _rows(told) for how in row["without_turn_by"]})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    more = (*(f"absent_{reason}" for reason in reasons), *(f"without_turn_{how}" for how in ways))
    writer.writerow((*_COLUMNS, *more))
    for start, row in _rows(told):
        wait = row["longest_wait"]
        flat = {"period": start, "agent_ref": row["agent"]["ref"], "agent": _plain(row["agent"]["name"])}
        flat |= {"longest_wait_turns": wait["turns"], "longest_wait_seconds": wait["seconds"]}
        values = row | row["because"] | flat
        absent, without = row["because"]["absent"], row["without_turn_by"]
        more = (*(absent.get(reason, 0) for reason in reasons), *(without.get(how, 0) for how in ways))
        writer.writerow((*(values[column] for column in _COLUMNS), *more))
    return out.getvalue()


def _plain(text: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _tell(told: Json) -> None:
    of = f"queue {told['queue']}" if told["queue"] else "all queues"
    rule = f", rule {told['rule']}" if told["rule"] else ""
    say(f"{told['tenant']}, {of}{rule}, {told['since']} to {told['until']} (UTC)")
    if not told["periods"]:
        say("No lead was assigned in this time.")
    for period in told["periods"]:
        beside = f"; {period['without_turn']} leads without a turn" if period["without_turn"] else ""
        say("", f"From {period['start']}: {period['turns']} turns, {period['kept']} kept{beside}")
        columns = ("agent", "expected", "", "had", "", "difference", "because", "without a turn", "longest wait")
        table(columns, [_cells(row) for row in period["agents"]])


def _cells(row: Json) -> tuple[object, ...]:
    return (
        agent(row["agent"]),
        f"{row['expected']:.2f}",
        _percent(row["expected_share"]),
        row["actual"],
        _percent(row["actual_share"]),
        f"{row['difference']:+.2f}",
        _because(row),
        _without(row),
        f"{row['longest_wait']['turns']} turns, {_span(row['longest_wait']['seconds'])}",
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _because(row: Json) -> str:
    because = row["because"]
    said = [(f"absent ({reason})", turns) for reason, turns in because["absent"].items()]
    said += [
        ("others absent", because["others_absent"]),
        ("owed", because["owed_turns"]),
        ("given back", because["given_back"]),
        ("debits", because["debits"]),
        ("order", because["order_of_the_line"]),
    ]
    return ", ".join(f"{what} {turns:+.2f}" for what, turns in said if abs(turns) >= 0.005)


#: How an agent came to a lead without a turn.
_WAYS = {
    "agent": "named by a rule",
    "default_agent": "default agent",
    "existing_owner": "had the person",
    "same_household": "had the household",
    "rank": "rotation off",
}


def _without(row: Json) -> str:
    if not row["without_turn_by"]:
        return "0"
    ways = ", ".join(f"{_WAYS.get(how, how)} {leads}" for how, leads in row["without_turn_by"].items())
    return f"{row['without_turn']} ({ways})"


def _span(seconds: int) -> str:
    for size, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.1f} {letter}"
    return f"{seconds} s"


COMMANDS = (fairness,)
