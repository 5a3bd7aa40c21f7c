"""What a tenant is configured to do: its file, its flags, and what the manifest claims."""

from __future__ import annotations

import sys
from typing import IO, Any

import click

from connector.cli.output import print_json, say, table, when
from connector.cli.shadows import tell as story_of_shadows
from connector.cli.support import actor, json_option, tenant_argument, tenant_session


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
    if as_json:
        print_json(
            {
                "tenant": found.name,
                "version": applied.version,
                "changed": applied.changed,
                "warnings": list(applied.warnings),
            }
        )
        return
    say(*(f"Note: {warning}" for warning in applied.warnings))
    if applied.changed:
        say(f"Applied as version {applied.version} of {found.name}.")
    else:
        say(f"It means the same as version {applied.version} of {found.name}; nothing was changed.")


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
    capabilities = frozenset(c.value for c in found.adapter.capabilities)
    problems: list[dict[str, Any]] = []
    warnings: list[str] = []
    try:
        parsed = yaml_config.parse(text, known_agents=agents, capabilities=capabilities)
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


COMMANDS = (config, flags, shadow, manifest)
