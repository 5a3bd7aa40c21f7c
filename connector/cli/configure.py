"""What a tenant is configured to do: its file, its flags, and what the manifest claims."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, Any

import click

from connector.cli.output import print_json, say, table, when
from connector.cli.plans import tell_plan
from connector.cli.shadows import tell as story_of_shadows
from connector.cli.support import actor, json_option, tenant_argument, tenant_session

if TYPE_CHECKING:
    from connector.configuration import Applied


def _tell_applied(tenant: str, applied: Applied, as_json: bool) -> None:
    if as_json:
        rest = {"changed": applied.changed, "warnings": list(applied.warnings)}
        print_json({"tenant": tenant, "version": applied.version} | rest)
        return
    say(*(f"Note: {warning}" for warning in applied.warnings))
    if applied.changed:
        say(f"Applied as version {applied.version} of {tenant}.")
    else:
        say(f"It means the same as version {applied.version} of {tenant}; nothing was changed.")


@click.group()
def config() -> None:
    """Rules, queues and members of a tenant, as one YAML file.

    Example: turnlock config export acme > acme.yaml
    """


@config.command("apply")
@tenant_argument
@click.argument("file", type=click.File("rb"))
@json_option
def config_apply(tenant: str, file: IO[bytes], as_json: bool) -> None:
    """Make FILE the configuration of TENANT.

    As a whole or not at all: everything that is wrong is listed with its line. FILE may be - for standard input.

    Example: turnlock config apply acme acme.yaml
    """
    from connector import configuration

    text = file.read()
    with tenant_session(tenant) as (runtime, found):
        applied = configuration.apply(runtime, found, text, actor())
    _tell_applied(found.name, applied, as_json)


@config.command("plan")
@tenant_argument
@click.argument("file", type=click.File("rb"), required=False)
@click.option(
    "--version", "number", type=click.IntRange(min=1), help="Instead of FILE: what a rollback to it would do."
)
@json_option
def config_plan(tenant: str, file: IO[bytes] | None, number: int | None, as_json: bool) -> None:
    """Show what applying FILE would change. Applies nothing.

    The differences to the configuration in force, and what becomes of each line: who joins, who leaves, whose weight
    changes, who keeps which place. The apply itself is run and taken back, so the plan is what happens.

    Example: turnlock config plan acme acme.yaml
    """
    from connector import configuration
    from connector.plan import plan

    if (file is None) is (number is None):
        raise click.UsageError("give FILE, or --version for a rollback")
    with tenant_session(tenant) as (runtime, found):
        if file is not None:
            text: str | bytes = file.read()
        else:
            with runtime.engine.connect() as conn:
                text, _ = configuration.earlier(runtime, conn, found, number)
        shown = plan(runtime, found, text)
    if as_json:
        print_json(shown)
    else:
        tell_plan(shown)


@config.command("history")
@tenant_argument
@json_option
def config_versions(tenant: str, as_json: bool) -> None:
    """List every applied version of TENANT's configuration, newest first: when, and by whom.

    `turnlock config export --version` prints one; `turnlock config rollback` applies one again.

    Example: turnlock config history acme
    """
    from connector import config_kept

    with tenant_session(tenant, removed=True) as (runtime, found), runtime.engine.connect() as conn:
        rows = [
            {
                "version": one.version,
                "applied_at": one.applied_at.isoformat(),
                "actor": one.actor,
                "note": one.note,
            }
            for one in config_kept.versions(runtime, conn, found.tenant_id)
        ]
        current = config_kept.in_force(conn, found.tenant_id)
    for row in rows:
        row["in_force"] = row["version"] == current
    if as_json:
        print_json({"tenant": found.name, "versions": rows})
        return
    cells = [
        (r["version"], when(str(r["applied_at"])), r["actor"], r["note"], "in force" if r["in_force"] else None)
        for r in rows
    ]
    none = f"No configuration yet; `turnlock config export {found.name}` prints one to start from."
    table(("version", "applied", "by", "note", ""), cells, none=none)


@config.command("rollback")
@tenant_argument
@click.option("--version", "number", type=click.IntRange(min=1), help="Which; the one before that in force otherwise.")
@json_option
def config_rollback(tenant: str, number: int | None, as_json: bool) -> None:
    """Return to an earlier version of the configuration.

    It is applied as a new version, as any other: members keep their places in line, and who is back joins at the
    end. `turnlock config plan --version` shows beforehand what it does.

    Example: turnlock config rollback acme --version 3
    """
    from connector import configuration

    with tenant_session(tenant) as (runtime, found):
        applied = configuration.rollback(runtime, found, number, actor())
    _tell_applied(found.name, applied, as_json)


@config.command("export")
@tenant_argument
@click.option("--version", "number", type=click.IntRange(min=1), help="An earlier version; the newest otherwise.")
def config_export(tenant: str, number: int | None) -> None:
    """Print the configuration of TENANT as it was applied.

    Before the first one: a file to start from, with one queue of every active agent.

    Example: turnlock config export acme --version 3
    """
    from connector import configuration
    from connector.errors import NotFound

    with tenant_session(tenant, removed=True) as (runtime, found), runtime.engine.connect() as conn:
        stored = configuration.current(conn, found.tenant_id, number)
        if stored is None and number is not None:
            newest = configuration.current(conn, found.tenant_id)
            there = f"the newest is {newest[0]}" if newest else "there is none yet"
            raise NotFound(f"{found.name!r} has no version {number}; {there}")
        text = stored[1] if stored else configuration.starter(conn, found.tenant_id)
    click.echo(text, nl=not text.endswith("\n"))


@config.command("check")
@tenant_argument
@click.argument("file", type=click.File("rb"))
@json_option
def config_check(tenant: str, file: IO[bytes], as_json: bool) -> None:
    """Say what is wrong with FILE. Applies nothing.

    FILE is meant as a configuration of TENANT; - is standard input. Exit code 1 when it cannot be applied; notes
    are no errors.

    Example: turnlock config check acme acme.yaml
    """
    from connector import config as yaml_config
    from connector import configuration
    from connector.config_yaml import ConfigProblems

    text = file.read()
    with tenant_session(tenant) as (runtime, found), runtime.engine.connect() as conn:
        agents = configuration.known_agents(conn, found.tenant_id)
        teams = configuration.known_teams(runtime, conn, found.tenant_id)
    capabilities = frozenset(c.value for c in found.adapter.capabilities)
    problems: list[dict[str, Any]] = []
    warnings: list[str] = []
    try:
        parsed = yaml_config.parse(text, known_agents=agents, capabilities=capabilities, known_teams=teams)
        warnings = [str(note) for note in yaml_config.warnings(parsed)]
    except ConfigProblems as error:
        if not as_json:
            raise
        problems = [
            {"line": p.line, "column": p.column, "path": p.path, "what": p.what, "fix": p.fix} for p in error.problems
        ]
    if as_json:
        print_json({"tenant": found.name, "ok": not problems, "problems": problems, "warnings": warnings})
    else:
        say(*(f"Note: {warning}" for warning in warnings))
        say("It can be applied.")
    if problems:
        sys.exit(1)


# -- rules ----------------------------------------------------------------------------------------------------------


@click.group()
def rules() -> None:
    """The rules of a tenant.

    Example: turnlock rules suggest acme
    """


@rules.command("suggest")
@tenant_argument
@click.argument("file", required=False, type=click.File("rb"))
@json_option
def rules_suggest(tenant: str, file: IO[bytes] | None, as_json: bool) -> None:
    """Say which rules should stand before which: the specific before the general that takes all their leads.

    Of the rules of TENANT in force, or of FILE (- is standard input). Changes nothing: the order is yours. Notes on
    rules that can never win, and on pairs that only their order decides, come with it.

    Example: turnlock rules suggest acme acme.yaml
    """
    from connector import config as yaml_config
    from connector import configuration
    from routing.model import Role
    from routing.rule_lint import lint_rules, suggest_moves, suggest_order

    with tenant_session(tenant) as (runtime, found), runtime.engine.connect() as conn:
        agents = configuration.known_agents(conn, found.tenant_id)
        stored = configuration.current(conn, found.tenant_id)
    text = file.read() if file is not None else stored[1] if stored is not None else "version: 1"
    capabilities = frozenset(c.value for c in found.adapter.capabilities)
    written = yaml_config.rules_of(yaml_config.parse(text, known_agents=agents, capabilities=capabilities))
    moves, order, notes = suggest_moves(written), suggest_order(written), lint_rules(written)
    if as_json:
        print_json(
            {
                "tenant": found.name,
                "order": order,
                "moves": [{"rule": m.rule, "now": m.now, "before": m.before, "where": m.where} for m in moves],
                "notes": [{"kind": n.kind, "rule": n.rule, "other": n.other, "text": n.text} for n in notes],
            }
        )
        return
    say(*(f'Note: rule "{note.rule}": {note.text}' for note in notes))
    if not moves:
        say("The specific rules stand before the general ones already.")
        return
    moved = {move.rule: move for move in moves}
    places = {name: at for at, name in enumerate((r.name for role in Role for r in written if r.role is role), 1)}
    say("Suggested order (nothing was changed):")
    rows = []
    for at, name in enumerate(order, 1):
        move = moved.get(name)
        why = f'before "{move.before}", which takes all of its leads' if move is not None else None
        rows.append((at, name, f"was {places[name]}" if move is not None else None, why))
    table(("#", "rule", "", ""), rows, indent=2)


# -- flags ----------------------------------------------------------------------------------------------------------


class Names(click.ParamType[tuple[str, ...]]):
    """Names with commas between them."""

    name = "a,b"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Each name without the blanks around it."""
        if isinstance(value, tuple):
            return value
        found = tuple(name for part in str(value).split(",") if (name := part.strip()))
        if not found:
            self.fail("names no source; write --sources 'Zillow,Open house'", param, ctx)
        return found


@click.command()
@tenant_argument
@click.argument("flag", required=False)
@click.argument("mode", required=False, type=click.Choice(["off", "shadow", "on"]))
@click.option("--sources", type=Names(), default=(), help="Only leads of these sources.")
@click.option("--percent", type=click.IntRange(1, 100), default=100, help="Only so many leads of a hundred.")
@click.option(
    "--min-decisions", type=click.IntRange(min=1), default=20, show_default=True, help="What `on` asks of the shadow."
)
@click.option("--force", metavar="REASON", help="`on` without a clean shadow; the reason is recorded.")
@json_option
def flags(
    tenant: str,
    flag: str | None,
    mode: str | None,
    sources: tuple[str, ...],
    percent: int,
    min_decisions: int,
    force: str | None,
    as_json: bool,
) -> None:
    """Show the flags of TENANT, or switch one.

    `off` is always possible and loses nothing. In `shadow` a capability decides beside the live path and writes only
    its own record; see `turnlock shadow`. `on` keeps the order of the flags and wants a shadow that ran clean.

    Example: turnlock flags acme skips shadow --percent 25
    """
    from connector import flags as switches
    from connector.errors import NotFound
    from routing.model import Flag

    known = {one.value: one for one in Flag}
    if flag is not None and mode is None:
        raise click.UsageError("say off, shadow or on after the flag")
    if force is not None and not force.strip():
        raise click.UsageError("--force needs a reason, which is recorded")
    with tenant_session(tenant) as (runtime, found):
        if flag is not None and mode is not None:
            if flag not in known:
                raise NotFound(f"no flag {flag!r}; there are: {', '.join(known)}")
            switches.switch(
                runtime,
                found.tenant_id,
                known[flag],
                mode,
                actor(),
                sources=sources,
                percent=percent,
                min_decisions=min_decisions,
                force=force,
            )
        with runtime.engine.connect() as conn:
            rows = switches.shown(runtime, conn, found.tenant_id)
    if as_json:
        print_json({"tenant": found.name, "flags": rows})
        return
    missing = "needs `turnlock migrate`"
    table(
        ("flag", "mode", "for", "since", "by", ""),
        [
            (
                r["flag"],
                r["mode"],
                _limits(r),
                when(r["since"]),
                r["by"],
                (f"forced: {r['forced']}" if r["forced"] else None) if r["in_schema"] else missing,
            )
            for r in rows
        ],
    )


def _limits(row: dict[str, Any]) -> str | None:
    words = [f"sources {', '.join(row['sources'])}"] if row["sources"] else []
    words += [f"{row['percent']} % of the leads"] if row["percent"] < 100 else []
    return ", ".join(words) or None


@click.command()
@tenant_argument
@click.argument("flag", required=False)
@click.option("--differences", is_flag=True, help="List the decisions that differ or failed, newest first, and why.")
@click.option("--score", is_flag=True, help="Hold write_back in shadow against whom the CRM itself chose.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many to list.")
@json_option
def shadow(tenant: str, flag: str | None, differences: bool, score: bool, limit: int, as_json: bool) -> None:
    """Show what the shadows of TENANT would have decided.

    Counts of the last run of each flag (or of FLAG): same, different and failed. With write_back in shadow nothing
    is written, and what would have been is counted.

    Example: turnlock shadow acme --differences
    """
    from connector import shadow_report
    from connector.errors import NotFound
    from routing.model import Flag

    if flag is not None and flag not in {one.value for one in Flag}:
        raise NotFound(f"no flag {flag!r}; there are: {', '.join(Flag)}")
    only = None if flag is None else Flag(flag)
    with tenant_session(tenant, removed=True) as (runtime, found):
        told = shadow_report.report(runtime, found, flag=only, differences=limit if differences else 0, score=score)
    if as_json:
        print_json(told)
        return
    story_of_shadows(told)


# -- manifest ---------------------------------------------------------------------------------------------------------


@click.group()
def manifest() -> None:
    """What the plugin says of itself.

    Example: turnlock manifest check
    """


@manifest.command("check")
@json_option
def manifest_check(as_json: bool) -> None:
    """Hold manifest.json against the code. Exit code 1 when a claim is not borne out.

    Example: turnlock manifest check
    """
    from connector import manifest as claims

    problems = claims.check()
    if as_json:
        rows = [{"where": p.where, "what": p.what, "fix": p.fix} for p in problems]
        print_json({"ok": not problems, "problems": rows})
    elif problems:
        say(*map(str, problems))
    else:
        say("Every claim of manifest.json is borne out.")
    if problems:
        sys.exit(1)


COMMANDS = (config, rules, flags, shadow, manifest)
