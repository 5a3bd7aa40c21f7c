"""A report on shadows (:mod:`connector.shadow_report`) as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connector.cli.output import agent, say, table, when

Json = Mapping[str, Any]


def tell(told: Json) -> None:
    """Print all of it."""
    if not told["shadows"]:
        say(f"No shadow has run; `turnlock flags {told['tenant']} FLAG shadow` starts one.")
    for run in told["shadows"]:
        _run(run)
    if "differences" in told:
        say("")
        table(
            ("lead", "flag", "decided", "live", "shadow", "why"),
            [
                (r["lead"]["ref"], r["flag"], when(r["decided_at"]), _came_to(r["live"]), _came_to(r), r["text"])
                for r in told["differences"]
            ],
            none="No decision differs.",
        )
    if "score" in told:
        say("")
        _score(told["score"])


def _run(run: Json) -> None:
    say(
        f"{run['flag']} ({run['mode']} now), shadow since {when(run['began'])}: {run['decisions']} decision(s), "
        f"{run['same']} same, {run['different']} different, {run['errors']} failed."
    )
    if run["would_have_written"] is not None:
        say(f"  {run['would_have_written']} lead(s) would have been written to the CRM.")
    for row in run["why"]:
        say(f"  {row['count']} x {row['text']}")


def _came_to(one: Json | None) -> str | None:
    if one is None or one["outcome"] is None:
        return None
    return agent(one["agent"]) if one["agent"] else f"{one['outcome']} ({one['reason']})"


def _score(score: Json) -> None:
    if not score["owned_by_crm"]:
        say("No score yet: of the leads that write_back's shadow decided, the CRM has given none to an agent.")
        return
    say(
        f"Of {score['leads']} lead(s) the CRM gave {score['owned_by_crm']} to an agent; "
        f"Turnlock would have chosen the same one for {score['agreed']} ({score['agreement']:.0%})."
    )
    table(
        ("agent", "Turnlock", "CRM"),
        [
            (agent(r["agent"]), f"{r['turnlock']} ({r['turnlock_share']:.0%})", f"{r['crm']} ({r['crm_share']:.0%})")
            for r in score["shares"]
        ],
    )
    for name, seconds in (
        ("Turnlock", score["seconds_to_owner"]["turnlock"]),
        ("CRM", score["seconds_to_owner"]["crm"]),
    ):
        say(f"Time to owner, {name}: {seconds['median']} s in the middle, nine of ten within {seconds['p90']} s.")
