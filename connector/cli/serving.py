"""Running Turnlock and its database: serve, web, worker, migrate, check."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from connector.cli.output import print_json, say, table
from connector.cli.support import each_tenant, json_option, session

if TYPE_CHECKING:
    from connector.runtime import Runtime, Tenant
    from connector.settings import Settings


def _run(*, web: bool, worker: bool) -> None:
    from connector.process import run
    from connector.settings import from_environment

    settings = from_environment()
    # Each thread uses one connection at a time; beside them the scout, the chores, the notifier and a spare.
    threads = 4 + (settings.web_threads if web else 0) + (settings.deciders + settings.senders if worker else 0)
    with session(upgrade=True, threads=threads, chatty=True) as runtime:
        code = run(runtime, web=web, worker=worker)
    sys.exit(code)


@click.command()
def serve() -> None:
    """Run everything in this one process.

    Web server and worker, with the embedded database where TURNLOCK_DATABASE_URL is not set. Brings the schema up to
    date first. Ends on SIGTERM or Ctrl-C, after the work in hand.

    Example: turnlock serve
    """
    _run(web=True, worker=True)


@click.command()
def web() -> None:
    """Run only the web server. It takes the CRMs' deliveries; workers run elsewhere.

    Example: turnlock web
    """
    _run(web=True, worker=False)


@click.command()
def worker() -> None:
    """Run only a worker. It decides and writes back; any number may run on one database.

    Example: turnlock worker
    """
    _run(web=False, worker=True)


@click.command()
@click.option("--revision", default="head", show_default=True, help="Go no further than this revision.")
@json_option
def migrate(revision: str, as_json: bool) -> None:
    """Bring the database's schema up to date. It never takes anything away, so it may run beside older processes.

    Uses TURNLOCK_MIGRATE_URL where it is set: the owner of the tables, past any pooler.

    Example: turnlock migrate --revision 0003_rotation
    """
    from connector.settings import from_environment

    before, after = _migrate(from_environment(), revision)
    if as_json:
        print_json({"before": before, "after": after, "changed": before != after})
    elif before == after:
        say(f"The schema is at {after}; nothing to do.")
    else:
        say(f"The schema is at {after} now (before: {before or 'none'}).")


def _migrate(settings: Settings, revision: str) -> tuple[str | None, str | None]:
    from contextlib import ExitStack
    from pkgutil import iter_modules

    import sqlalchemy as sa

    from connector import migrate as schema
    from connector.database import check_server
    from connector.embedded import EmbeddedPostgres
    from connector.errors import NotFound
    from migrations import versions

    known = sorted(module.name.removeprefix("r") for module in iter_modules(versions.__path__))
    if revision not in (*known, "head"):
        raise NotFound(f"no revision {revision!r}; there are: {', '.join(known)}, and head for the newest")
    with ExitStack() as stack:
        url = settings.migrate_url or settings.database_url
        if settings.database_url is None:
            url = stack.enter_context(EmbeddedPostgres(settings.home)).owner_url
        assert url is not None  # noqa: S101 - one of the three it is
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.connect() as conn:
            check_server(conn)
        return schema.migrate(engine, revision)


# -- check ----------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("tenant", required=False)
@json_option
def check(tenant: str | None, as_json: bool) -> None:
    """Check settings, database and CRM connections.

    Of TENANT, or of all. Changes nothing. Exit code 1 when something is wrong.

    Example: turnlock check acme
    """
    with session() as runtime:
        chosen = each_tenant(runtime, tenant)
        server = _server(runtime)
        found = [(one.name, _tenant(runtime, one)) for one in chosen]
    good = all(row["ok"] for rows in (server, *(rows for _, rows in found)) for row in rows)
    if as_json:
        print_json({"ok": good, "server": server, "tenants": [{"tenant": n, "findings": rows} for n, rows in found]})
    else:
        rows = [("turnlock", row) for row in server] + [(name, row) for name, rows in found for row in rows]
        columns = ("", "of", "where", "what", "how to fix it")
        table(columns, [("ok" if r["ok"] else "WRONG", of, r["where"], r["what"], r["fix"]) for of, r in rows])
    if not good:
        sys.exit(1)


def _finding(where: str, ok: bool, what: str, fix: str = "") -> dict[str, Any]:
    return {"where": where, "ok": ok, "what": what, "fix": "" if ok else fix}


def _server(runtime: Runtime) -> list[dict[str, Any]]:
    """What concerns all tenants. Unsafe servers, wrong settings and a missing schema were refused before this."""
    from urllib.parse import urlsplit

    import sqlalchemy as sa

    from connector import migrate as schema
    from routing.model import Flag

    settings = runtime.settings
    with runtime.engine.connect() as conn:
        version = conn.execute(sa.text("SHOW server_version")).scalar_one()
        revision, stages = schema.current(conn), runtime.stages(conn)
    kind = "embedded PostgreSQL" if settings.database_url is None else "PostgreSQL"
    missing = [flag.value for flag in Flag if flag not in stages]
    behind = f"; `turnlock migrate` brings {', '.join(missing)}" if missing else ""
    local = urlsplit(settings.public_url).hostname in ("127.0.0.1", "localhost", "::1")
    return [
        _finding("settings", True, f"{len(settings.secret_keys)} sealing key(s)"),
        _finding("database", True, f"{kind} {version}"),
        _finding("schema", True, f"{revision}{behind}"),
        _finding(
            "public URL",
            # Who allows private hosts tries things out on one machine, where this address is right.
            not local or settings.allow_private_hosts,
            settings.public_url,
            "no CRM can reach this machine's own address; set TURNLOCK_PUBLIC_URL to the address they can",
        ),
    ]


def _tenant(runtime: Runtime, tenant: Tenant) -> list[dict[str, Any]]:
    from adapters.outcome import CrmError
    from connector import tenants
    from connector.errors import TurnlockError

    start = f"writes wait; `turnlock outbox start {tenant.name}`"
    findings = [_finding("sending", tenant.sending, "on" if tenant.sending else "stopped", start)]
    try:
        found = tenants.check(runtime, tenant)
    except (TurnlockError, CrmError, ValueError) as error:
        # One account that cannot be asked must not hide what is found about the others.
        return [*findings, _finding("connection", False, str(error), "correct this, then check again")]
    return findings + [_finding(f.where, f.ok, f.what, f.fix) for f in found]


COMMANDS = (serve, web, worker, migrate, check)
