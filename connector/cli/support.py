"""What the commands share: their options, the way to a runtime and a tenant, and finding things by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import click

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from connector.config_model import KnownAgent
    from connector.runtime import Runtime, Tenant

F = TypeVar("F", bound=Callable[..., Any])

_SPAN = re.compile(r"(\d{1,6})\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class Stderr:
    """Standard error as it is when something is written: a logger keeps its stream for the life of the process."""

    def write(self, text: str) -> int:
        """Write there."""
        return sys.stderr.write(text)

    def flush(self) -> None:
        """Flush it."""
        sys.stderr.flush()


def json_option(command: F) -> F:
    """``--json``, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(command)


def param_option(about: str) -> Callable[[F], F]:
    """``--param``, any number of them, as a dict `params`."""
    return click.option("--param", "params", multiple=True, callback=_pairs, metavar="NAME=VALUE", help=about)


def _pairs(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise click.BadParameter("write NAME=VALUE")
        pairs[key] = text
    return pairs


def tenant_argument(command: F) -> F:
    """``TENANT``, the name of an account."""
    return click.argument("tenant")(command)


class Since(click.ParamType[timedelta | datetime]):
    """A moment: ISO 8601, or how long ago (90m, 24h, 7d)."""

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta | datetime:
        """A length of time, or an aware time; one without a zone is meant as UTC."""
        if span := _SPAN.fullmatch(value.strip()):
            return timedelta(**{_UNITS[span[2]]: int(span[1])})
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            self.fail(f"{value!r} is no time; write 24h, 7d or 2026-07-01T08:00:00Z", param, ctx)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class Until(click.ParamType[timedelta | datetime]):
    """A moment to come: ISO 8601, or how long from now (90m, 24h, 7d). Without a zone it is on the agent's clock."""

    name = "until"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta | datetime:
        """A length of time, or a time with or without a zone."""
        if span := _SPAN.fullmatch(value.strip()):
            return timedelta(**{_UNITS[span[2]]: int(span[1])})
        try:
            return datetime.fromisoformat(value.strip())
        except ValueError:
            self.fail(f"{value!r} is no time; write 24h, 7d, 2026-07-06 or '2026-07-06 13:00'", param, ctx)


@contextmanager
def session(*, upgrade: bool = False, threads: int = 4, chatty: bool = False) -> Iterator[Runtime]:
    """A runtime for one command. Logs go to standard error: warnings, or with `chatty` all that a server says.

    The schema is upgraded only where asked for: an operator's one-off command must not change a database that other
    processes work on. A new embedded database gets its schema with the first command, whichever that is.
    """
    import logging

    from connector import log
    from connector.process import open_runtime
    from connector.settings import from_environment

    log.configure(level=logging.INFO if chatty else logging.WARNING, stream=Stderr())
    settings = from_environment()
    fresh = settings.database_url is None and not (settings.home / "data").exists()
    with open_runtime(settings, upgrade=upgrade or fresh, threads=threads) as runtime:
        yield runtime


@contextmanager
def tenant_session(name: str, *, removed: bool = False) -> Iterator[tuple[Runtime, Tenant]]:
    """A runtime and the tenant of this name; with `removed` also one that was uninstalled, whose records stay."""
    from connector.errors import TurnlockError

    with session() as runtime:
        with runtime.engine.connect() as conn:
            tenant = runtime.tenant_named(conn, name)
        if tenant.status != "active" and not removed:
            raise TurnlockError(f"{name!r} was uninstalled; `turnlock tenant add` adds the account anew")
        yield runtime, tenant


def each_tenant(runtime: Runtime, name: str | None) -> list[Tenant]:
    """The tenant of this name, or all that are installed."""
    import sqlalchemy as sa

    from routing.tables import tenants

    with runtime.engine.connect() as conn:
        if name is not None:
            return [runtime.tenant_named(conn, name)]
        c = tenants.c
        ids = conn.execute(sa.select(c.tenant_id).where(c.status == "active").order_by(c.name)).scalars().all()
        found = [runtime.tenant(conn, tenant_id) for tenant_id in ids]
    return [tenant for tenant in found if not tenant.is_app]


def actor() -> str:
    """Who is at the terminal, for the ledger and the versions of configurations."""
    import getpass

    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # a container's user may have no name
        return "cli"


# -- finding by name ----------------------------------------------------------------------------------------------


def find_agent(conn: Connection, tenant: Tenant, text: str) -> KnownAgent:
    """The agent whom `text` names: CRM id, email or name. Raises :class:`NotFound` that lists who there is."""
    from connector.config_build import Directory
    from connector.configuration import known_agents
    from connector.errors import NotFound

    everyone = known_agents(conn, tenant.tenant_id)
    found = Directory(everyone).find(text)
    if len(found) == 1:
        return found[0]
    if found:
        who = ", ".join(f"{agent.ref} ({agent.name})" for agent in found)
        raise NotFound(f"{text!r} may be {who}; use the CRM id")
    there = ", ".join(f"{agent.name} ({agent.ref})" for agent in everyone[:50])
    more = f" and {len(everyone) - 50} more" if len(everyone) > 50 else ""
    none = "none yet; `turnlock agents sync` reads them"
    raise NotFound(f"no agent {text!r} in {tenant.name!r}; there are: {there + more or none}")


def find_queue(conn: Connection, tenant: Tenant, text: str) -> UUID:
    """The line called `text`: a queue, else that of a team or rule, whose name will do too.

    Raises :class:`NotFound` that lists the lines there are.
    """
    import sqlalchemy as sa

    from connector.errors import NotFound
    from routing.tables import queues

    c = queues.c
    rows = conn.execute(
        sa.select(c.queue_id, c.name).where(c.tenant_id == tenant.tenant_id, c.active).order_by(c.name)
    ).all()
    exact = [row.queue_id for row in rows if row.name == text]
    said = text.strip().casefold()
    near = exact or [row.queue_id for row in rows if row.name.casefold() == said]
    near = near or [row.queue_id for row in rows if row.name.casefold() in (f"team {said}", f"rule {said}")]
    if not near:
        there = ", ".join(row.name for row in rows) or "none yet; `turnlock config apply` makes them"
        raise NotFound(f"no queue {text!r} in {tenant.name!r}; there are: {there}")
    queue_id: UUID = near[0]
    return queue_id


def find_member(conn: Connection, tenant: Tenant, text: str) -> UUID:
    """The agent whom `text` names, or the line of the team: ``team`` and its name. Raises as :func:`find_agent`."""
    import sqlalchemy as sa

    from routing.tables import queues

    c = queues.c
    line = sa.func.lower(c.name) == text.strip().lower()
    found: UUID | None = None
    if text.strip().lower().startswith("team "):
        found = conn.execute(
            sa.select(c.queue_id).where(c.tenant_id == tenant.tenant_id, c.active, line).limit(1)
        ).scalar_one_or_none()
    return find_agent(conn, tenant, text).agent_id if found is None else found


def find_lead(conn: Connection, tenant: Tenant, text: str) -> tuple[str, UUID] | None:
    """The newest CRM id and our id of the lead that `text` (either of the two) names; None when it is not known."""
    import sqlalchemy as sa

    from routing.tables import lead_refs

    c = lead_refs.c
    of_tenant = c.tenant_id == tenant.tenant_id
    lead_id = conn.execute(sa.select(c.lead_id).where(of_tenant, c.ref == text)).scalar_one_or_none()
    if lead_id is None:
        try:
            lead_id = UUID(text)
        except ValueError:
            return None
    ref = conn.execute(
        sa.select(c.ref).where(of_tenant, c.lead_id == lead_id).order_by(c.created_at.desc(), c.ref).limit(1)
    ).scalar_one_or_none()
    return None if ref is None else (ref, lead_id)
