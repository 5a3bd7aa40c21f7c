"""`turnlock demo`: everything at once on this machine, with a sandbox CRM, and nothing left behind.

Starts an embedded PostgreSQL in a folder of its own, a sandbox CRM in a process of its own, installs Turnlock into it
as an admin would, lets leads come in, and shows who got which and why.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

import click
import sqlalchemy as sa
from cryptography.fernet import Fernet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from connector import configuration, log, switches, tenants
from connector.auditing import audit_queues
from connector.process import Web, open_runtime
from connector.runtime import Runtime, Tenant
from connector.sandbox.remote import Remote
from connector.settings import Settings
from connector.worker import Worker

# The wait for the last owner: the sandbox's rate limits are on, so a burst is held up by Retry-After now and then.
_PATIENCE = 120.0
_COLUMNS = ("lead", "what", "rule", "agent", "turn", "skipped", "ms")
_WIDTHS = (6, 30, 20, 12, 16, 30, 6)

_FEED = sa.text(
    """
    SELECT o.outbox_id, r.ref, f.facts, d.rule, a.name AS agent, q.name AS queue, d.turn, d.record,
           EXTRACT(epoch FROM o.closed_at - d.received_at) * 1000 AS ms
    FROM outbox o
    JOIN decisions d USING (tenant_id, decision_id)
    JOIN agents a ON (a.tenant_id, a.agent_id) = (o.tenant_id, o.agent_id)
    JOIN lead_refs r ON (r.tenant_id, r.lead_id) = (o.tenant_id, o.lead_id)
    LEFT JOIN lead_facts f ON (f.tenant_id, f.lead_id) = (o.tenant_id, o.lead_id)
    LEFT JOIN queues q ON (q.tenant_id, q.queue_id) = (d.tenant_id, d.queue_id)
    WHERE o.tenant_id = :tenant AND o.kind = 'owner' AND o.state = 'confirmed'
    ORDER BY o.closed_at
    """
)


@dataclass
class Show:
    """What has been shown, and the figures for the summary."""

    console: Console
    agents: dict[str, str]
    seen: set[Any] = field(default_factory=set)
    per_agent: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)

    def header(self) -> None:
        """The column titles, once."""
        self._line([name.upper() if name != "ms" else "MS" for name in _COLUMNS], style="bold")

    def feed(self, rows: Iterator[sa.Row[Any]]) -> None:
        """Show the assignments that are new."""
        for row in rows:
            if row.outbox_id in self.seen:
                continue
            self.seen.add(row.outbox_id)
            self.per_agent[row.agent] += 1
            self.times.append(float(row.ms))
            away = [x for path in row.record.get("paths", ()) for x in path.get("unavailable", ())]
            passed = {x for path in row.record.get("paths", ()) for x in path.get("passed_over", ())}
            shown = [f"{self.agents[x['agent']]}: {x['skip']}" for x in away if x["agent"] in passed]
            self.skipped.update(x["skip"] for x in away if x["agent"] in passed)
            facts = row.facts or {}
            price = facts.get("price", {}).get("decimal")
            what = f"{facts.get('type', '')} {facts.get('city', '')} {f'${int(price):,}' if price else ''}"
            how = row.record.get("how")
            rule = row.rule or ("already their client" if how == "existing_owner" else "(default queue)")
            turn = f"{row.turn} {row.queue}" if row.turn else "-"
            cells = [row.ref, what, rule, row.agent, turn, ", ".join(shown), f"{row.ms:.0f}"]
            self._line(cells, style="")

    def say(self, text: str) -> None:
        """A line of news between the leads."""
        self.console.print(Text(f"-- {text}"), style="yellow", soft_wrap=True)

    def _line(self, cells: list[str], style: str) -> None:
        padded = [cell[:width].ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)]
        self.console.print(Text("  ".join(padded).rstrip()), style=style, soft_wrap=True)


@contextmanager
def _sandbox(seed: int) -> Iterator[Remote]:
    """A sandbox CRM in a process of its own, rate limits on; out of reach of the terminal's Ctrl-C."""
    command = [sys.executable, "-m", "connector.sandbox", "--limits", "on", "--seed", str(seed)]
    with subprocess.Popen(  # noqa: S603 - our own module
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - a pipe was asked for
            yield Remote(json.loads(process.stdout.readline())["url"])
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


# What an admin would enter for each CRM of the sandbox: secrets by name, each with the sandbox's name of it, and plain
# parameters, so that the demo's rules see what they look at.
_FACES: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "followupboss": ({"api_key": "api_key", "system_key": "system_key"}, {}),
    "hubspot": (
        {"access_token": "hubspot_token", "client_secret": "hubspot_secret"},
        {"price_property": "budget_max", "tags_property": "lead_tags", "type_property": "lead_type"},
    ),
}


def _install(runtime: Runtime, crm: Remote, name: str) -> Tenant:
    account = crm.account()
    secrets, parameters = _FACES[name]
    tenants.add_tenant(
        runtime,
        "demo",
        name,
        base_url=account["bases"][name],
        parameters=parameters,
        secret_values={secret: account[source] for secret, source in secrets.items()},
    )
    with runtime.engine.connect() as conn:
        tenant = runtime.tenant_named(conn, "demo")
    installed = tenants.install(runtime, tenant)
    if installed.by_hand:  # what an admin does then, in the CRM's own pages
        crm.add_hook(face=name, url=installed.hook_url)
    text = files("connector").joinpath("demo.yaml").read_bytes()
    configuration.apply(runtime, tenant, text, "demo")
    return tenant


def _confirmed(runtime: Runtime, tenant: Tenant) -> Iterator[sa.Row[Any]]:
    with runtime.engine.connect() as conn:
        yield from conn.execute(_FEED, {"tenant": tenant.tenant_id}).all()


def run(*, once: bool, leads: int, seed: int, console: Console, crm: str = "followupboss") -> int:
    """The demo; its exit code: 0 only if every lead has exactly one owner in the CRM and the ledgers replay."""
    log.configure(level=logging.ERROR)
    ended = threading.Event()

    def end(_: int, __: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnlock demo ")))
            home.chmod(0o711)  # root's server runs as another user, who must get through to its folder
            key = Fernet.generate_key().decode()
            settings = Settings(home=home / "db", secret_keys=(key,), allow_private_hosts=True)
            console.print("Starting PostgreSQL, the sandbox CRM and Turnlock ...")
            runtime = stack.enter_context(open_runtime(settings, upgrade=True, threads=30))
            sandbox = stack.enter_context(_sandbox(seed))
            web = Web(runtime, host="127.0.0.1", port=0, threads=settings.web_threads)
            runtime.settings = replace(settings, public_url=f"http://127.0.0.1:{web.port}")
            worker = Worker(runtime)
            web.start()
            stack.callback(web.stop)
            worker.start()
            stack.callback(worker.stop)
            tenant = _install(runtime, sandbox, crm)
            return _drive(runtime, tenant, sandbox, console, ended, once=once, leads=leads)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _drive(
    runtime: Runtime, tenant: Tenant, crm: Remote, console: Console, ended: threading.Event, *, once: bool, leads: int
) -> int:
    with runtime.engine.connect() as conn:
        known = configuration.known_agents(conn, tenant.tenant_id)
    by_name = {agent.name: agent.agent_id for agent in known}
    show = Show(console, {str(agent.agent_id): agent.name for agent in known})
    console.print(f"Installed: {len(known)} users synced, webhooks subscribed. Ctrl-C ends it.\n")
    show.header()
    paused = False
    made: list[int] = []
    while not ended.is_set() and (not once or len(made) < leads):
        made.append(crm.create_lead())
        if len(made) % 20 == 6:
            switches.pause(runtime, tenant, by_name["Dee Davis"], "demo")
            show.say("the admin pauses Dee Davis; her place in line is kept")
            paused = True
        if paused and len(made) % 20 == 14:
            switches.resume(runtime, tenant, by_name["Dee Davis"], "demo")
            show.say("the admin resumes Dee Davis; she is next, once")
            paused = False
        # A pace that the CRM's limit of 25 owner writes in 10 seconds allows, of which a process that has just started
        # leaves a fifth to whoever may have worked a moment ago.
        pause_ends = time.monotonic() + (0.55 if once else 1.0)
        while time.monotonic() < pause_ends and not ended.is_set():
            show.feed(_confirmed(runtime, tenant))
            ended.wait(0.05)
    if paused:
        switches.resume(runtime, tenant, by_name["Dee Davis"], "demo")
    patience = time.monotonic() + (_PATIENCE if once else 15.0)
    while time.monotonic() < patience and len(show.seen) < len(made):
        show.feed(_confirmed(runtime, tenant))
        time.sleep(0.05)
    show.feed(_confirmed(runtime, tenant))
    return _summary(runtime, tenant, crm, show, made)


def _summary(runtime: Runtime, tenant: Tenant, crm: Remote, show: Show, made: list[int]) -> int:
    console = show.console
    owners = {lead: owner for lead, owner in crm.owners() if lead in set(made)}
    changes = Counter(row["lead"] for row in crm.owner_log() if row["new"] is not None)
    agents = {agent["id"] for agent in crm.agents()}
    bad = [lead for lead in made if owners.get(lead) not in agents or changes[lead] != 1]
    audits = audit_queues(runtime, tenant.tenant_id, whole=True)
    table = Table(title="\nWho got how many", title_justify="left", box=None)
    table.add_column("agent")
    table.add_column("leads", justify="right")
    for name, count in show.per_agent.most_common():
        table.add_row(name, str(count))
    console.print(table)
    times = sorted(show.times)
    if times:
        middle, late = times[len(times) // 2], times[min(len(times) - 1, len(times) * 95 // 100)]
        console.print(f"\nWebhook to owner in the CRM: half within {middle:.0f} ms, 95 % within {late:.0f} ms")
    for audit in audits:
        state = "replays" if audit.ok else f"DOES NOT REPLAY: {audit.problems[0]}"
        console.print(f"Ledger of {audit.queue}: {audit.position} turns, {state}")
    good = not bad and all(audit.ok for audit in audits) and bool(made)
    console.print(f"Leads: {len(made)}; with exactly one owner in the CRM: {len(made) - len(bad)}")
    if bad:
        console.print(f"Without: {', '.join(map(str, bad[:20]))}", style="red")
    console.print("All is well." if good else "NOT all is well.", style="green" if good else "red")
    return 0 if good else 1


@click.command(short_help="Everything at once on this machine, with a sandbox CRM.")
@click.option("--once", is_flag=True, help="Stop after --leads leads, print the summary, exit 0 only if all is well.")
@click.option("--leads", type=click.IntRange(1, 10_000), default=25, show_default=True, help="Leads for --once.")
@click.option("--seed", type=int, default=1, show_default=True, help="Same seed, same invented leads.")
@click.option("--crm", type=click.Choice(list(_FACES)), default="followupboss", show_default=True, help="Which CRM.")
def demo(once: bool, leads: int, seed: int, crm: str) -> None:
    """Show Turnlock at work: PostgreSQL, a sandbox CRM and leads, all on this machine, nothing left behind.

    Example: turnlock demo --once --leads 25
    """
    sys.exit(run(once=once, leads=leads, seed=seed, console=Console(highlight=False), crm=crm))
