"""The stopwatch: ratios against a floor in the same run on the same machine. ``make bench`` runs it.

Prints and writes docs/benchmarks.md. Absolute figures say little (machines are shared and noisy); ratios say more.
"""

from __future__ import annotations

import argparse
import base64
import cProfile
import io
import json
import os
import platform
import pstats
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import sqlalchemy as sa
from cryptography.fernet import Fernet

from connector import inbox, tenants
from connector.database import at_rest
from connector.decide import Decider
from connector.embedded import EmbeddedPostgres
from connector.process import open_runtime
from connector.runtime import Runtime
from connector.sandbox import Sandbox, bottlecrm
from connector.settings import Settings
from tests import homes
from tests.bench import cpu, long_past
from tests.ports import free_port
from tests.rig import ABC, Rig

CLI = ("-c", "from connector.cli import main; main()")
ROUNDS = 5  # in turn, because the machine itself is now faster, now slower
LEADS = 40  # one at a time, in a round
REST = 0.02  # seconds between two of them
_AT_WORK = sa.text(
    "SELECT exists(SELECT FROM outbox WHERE state = 'open') OR exists(SELECT FROM events WHERE state = 'waiting')"
)
BURST = 3000
CLIENTS = 16
BOUNDS = {"bottlecrm": 3.0, "followupboss": 5.0}
HOT_BOUND = 0.6
PARTS = ["latency", "hot", "flat", "past"]
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


# What the profiles of this page, and traces of single leads, came to; to be read again when the code changes.
READING = """
## The three largest costs, and what was tried

A machine that is busy with other things flatters the ratios of the wall clock; the CPU time beside them is what to
compare. On two cores a lone lead waits for CPU time, not for the disk: what is done beside it takes as long.

1. **Python and the calls of the CRM.** A lead alone is some nine thousand steps of the interpreter, a quarter of them
   in requests and urllib3, and three round trips to PostgreSQL until its owner is set: store, and what is known of it;
   the lead, locks and all that is read under them; all that is written, what the sender needs, and COMMIT. Between two
   leads everything leaves the caches of two cores, so each step costs three to five times what it does in a burst.
   Tried and kept: flights (`routing/flight.py`): a statement through SQLAlchemy is 210 us, through a cursor of psycopg
   30 us, in a flight 7 us; events born leased to an idle decider and writes to an idle sender, with what it needs; each
   is handed over ahead of its commit, and made ready meanwhile (half a millisecond each: the lead is decided while its
   delivery goes to the disk, and read in the CRM while the decision is being saved); it is stored in the transaction
   that decides it; statements over a list are planned once, not once per lone lead (0.4 ms); a thread that wakes the
   next one lets it run; calls by the transport of requests without session, cookies and proxies. Tried and left: one
   core for the whole process; simpler statements for a delivery of one event (30 us); the sender's row asked for
   halfway through what is saved (1 %). Not tried: reading the lead in the CRM while it is decided (a call for each lead
   that is given to nobody, and too early to be what stands before the write).
2. **Python in the web process.** Accepting is bound by one interpreter: request, signature, parsing, one statement.
   Tried and kept: deliveries that come during a commit share the next one; they go past Flask's routing and contexts,
   which took as long as proving one, and their answer is made once (5 %); one message to the workers elsewhere for many
   commits (a third of the process's time went into telling them of each); the garbage collector looks after every
   20,000 objects, not 700 (a tenth of what the worker does). Tried and left: 4, 12 and 16 threads instead of 8; calling
   whoever stores next ahead of those whose commit is through; other intervals of switching threads. More processes of
   `turnlock web` scale it.
3. **PostgreSQL.** A lead is some twenty rows in as many tables with their indexes and foreign keys: about 0.1 ms to
   store it and 0.25 ms to decide it in a unit of 35. Tried and kept: one array per column for everything that a unit
   writes, no waiting for the disk where a later commit covers it, look-ups by key one by one (joined, a plan made while
   the tables were empty read all of them: 0.3 ms a lead after 3,000 leads, and growing); nobody claims more for a
   tenant while a unit of it is at work. Tried and left: waiting 25 ms for larger units (2 %, and later leads).
"""


class Report:
    """Lines for the terminal and the page, and which bounds were missed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.missed: list[str] = []

    def say(self, line: str = "") -> None:
        """One line."""
        self.lines.append(line)
        print(line, flush=True)

    def bound(self, name: str, good: bool) -> str:
        """Whether a bound is kept, in a word."""
        if not good:
            self.missed.append(name)
        return "kept" if good else "MISSED"


def _cpu(running: subprocess.Popen[bytes]) -> float:
    """Seconds of CPU that a process has used: steady where the wall clock is not."""
    times = psutil.Process(running.pid).cpu_times()
    return float(times.user + times.system)


def _spread(times: list[float]) -> str:
    ordered = sorted(times)
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return f"p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms"


@contextmanager
def process(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this Python, ended with its group."""
    env = os.environ | (environment or {})
    with subprocess.Popen(
        [sys.executable, *arguments], env=env, stderr=subprocess.DEVNULL, start_new_session=True
    ) as running:
        try:
            yield running
        finally:
            os.killpg(running.pid, signal.SIGTERM)
            try:
                running.wait(25)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)


def await_port(port: int) -> None:
    """Wait until somebody listens."""
    for _ in range(400):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=0.2):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the server did not start")


def post(connection: HTTPConnection, path: str, body: bytes, headers: dict[str, str]) -> None:
    """POST and read the answer; anything but 200 is an error."""
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    response.read()
    if response.status != 200:
        raise RuntimeError(f"{path}: status {response.status}")


@dataclass(slots=True)
class _Run:
    """Who is timed: what sends it a lead, its process, and the seconds of leads alone and back to back."""

    send: Callable[[int], None]
    process: subprocess.Popen[bytes]
    alone: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    cpu: float = 0.0


def _rest(runtime: Runtime) -> None:
    """Until nothing is left to do, and a moment more."""
    with at_rest(runtime.engine) as conn:
        while conn.execute(_AT_WORK).scalar_one():
            time.sleep(0.002)
    time.sleep(REST)


def _rates(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):.0f}/s ({min(rates):.0f} to {max(rates):.0f})"


def _request(port: int, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A POST as it goes over the wire. Made beforehand, because what it costs to send is other computers' to pay."""
    sent = {"Host": f"127.0.0.1:{port}", "Content-Length": str(len(body))} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def _exchange(line: socket.socket, request: bytes) -> None:
    """Send it and read the answer; anything but 200 is an error."""
    line.sendall(request)
    answer = b""
    while True:
        part = line.recv(65536)
        answer += part
        head, whole, body = answer.partition(b"\r\n\r\n")
        if whole:
            length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            if not head.startswith(b"HTTP/1.1 200 ") or length is None:
                raise RuntimeError(head.decode("latin-1"))
            if len(body) >= int(length[1]):
                return
        if not part:
            raise RuntimeError("the server hung up")


class Bench:
    """One database, one sandbox; Turnlock and the floor as processes of their own."""

    def __init__(self, report: Report, folder: Path) -> None:
        self.report = report
        kept = folder / "key"
        if not kept.exists():
            folder.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(Fernet.generate_key())
        self.key = kept.read_text()
        self.settings = Settings(home=folder / "db", secret_keys=(self.key,), allow_private_hosts=True)
        self.floor_port, self.port = free_port(), free_port()
        self.owner_url = ""

    def environment(self) -> dict[str, str]:
        """What `turnlock serve` needs."""
        return {
            "TURNLOCK_SECRET_KEYS": self.key,
            "TURNLOCK_HOME": str(self.settings.home),
            "TURNLOCK_ALLOW_PRIVATE_HOSTS": "1",
            "TURNLOCK_PORT": str(self.port),
            "TURNLOCK_WEB_THREADS": "16",
        }

    @contextmanager
    def floor(self, runtime: Runtime, sandbox: Sandbox) -> Iterator[subprocess.Popen[bytes]]:
        """The floor, serving."""
        with sa.create_engine(self.owner_url, poolclass=sa.NullPool).begin() as conn:
            conn.execute(sa.text("CREATE TABLE IF NOT EXISTS floor (id bigserial PRIMARY KEY, body bytea NOT NULL)"))
            conn.execute(sa.text("GRANT ALL ON floor, floor_id_seq TO turnlock_app"))
        dsn = runtime.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        account = sandbox.account()
        basic = "Basic " + base64.b64encode(f"{account['api_key']}:".encode()).decode()
        arguments = [str(self.floor_port), dsn, sandbox.fub_url, basic, "Turnlock", account["system_key"]]
        with process("-m", "tests.bench.floor", *arguments) as running:
            await_port(self.floor_port)
            yield running

    # -- one at a time --------------------------------------------------------------------------------------
    def one_at_a_time(self, runtime: Runtime) -> None:
        """Webhook received to owner set, for each contract, beside the floor."""
        say = self.report.say
        say("## Webhook received to owner set, one at a time")
        say()
        say(
            f"A lead comes {REST * 1000:.0f} ms after the one before it is done with and noted: alone, as leads "
            "do. The floor's come so, too. Back to back the next is sent the moment an owner is set, and Turnlock is "
            f"still reading back, confirming and noting the one before. {ROUNDS} rounds in turn, {LEADS} leads each."
        )
        say()
        with Sandbox() as sandbox:
            sandbox.pause_dispatch()
            rigs = {crm: self._tenant(runtime, sandbox, crm) for crm in BOUNDS}
            with self.floor(runtime, sandbox) as floor, process(*CLI, "serve", environment=self.environment()) as serve:
                await_port(self.port)
                runs = {"floor": _Run(self._floor_poster(sandbox), floor)}
                runs |= {
                    crm: _Run(self._hook_poster(rig, urlsplit(rig.hook_url).path), serve) for crm, rig in rigs.items()
                }
                for run in runs.values():
                    self._timed(sandbox, run.send, 2 * LEADS)
                for rig in rigs.values():
                    rig.wait_chores()  # the first round of them reads all that there is
                for _ in range(ROUNDS):
                    for run in runs.values():
                        run.alone += self._timed(sandbox, run.send, LEADS, partial(_rest, runtime))
                    for run in runs.values():
                        before = _cpu(run.process)
                        run.after += self._timed(sandbox, run.send, LEADS)
                        _rest(runtime)  # what is left to do is the lead's as well
                        run.cpu += (_cpu(run.process) - before) / LEADS / ROUNDS
        base = runs.pop("floor")
        say(
            f"- floor (one HTTP in, one insert and commit, one HTTP out): {_spread(base.alone)}; back to back "
            f"{_spread(base.after)}; {base.cpu * 1000:.1f} ms of its CPU a lead"
        )
        for crm, run in runs.items():
            ratio = statistics.median(run.alone) / statistics.median(base.alone)
            after = statistics.median(run.after) / statistics.median(base.after)
            word = self.report.bound(f"{crm} latency", ratio <= BOUNDS[crm])
            kind = "payload complete" if crm == "bottlecrm" else "id only"
            say(
                f"- {crm} ({kind}): {_spread(run.alone)}; {ratio:.2f} x the floor (bound {BOUNDS[crm]:.0f}: {word}); "
                f"back to back {_spread(run.after)}, {after:.2f} x; {run.cpu * 1000:.1f} ms of CPU a lead, "
                f"{run.cpu / base.cpu:.1f} x the floor's"
            )
        say()

    def _tenant(self, runtime: Runtime, sandbox: Sandbox, crm: str) -> Rig:
        object.__setattr__(runtime.settings, "public_url", f"http://127.0.0.1:{self.port}")
        rig = Rig(runtime, sandbox, crm)
        rig.add_tenant(f"bench-{crm}-{time.monotonic_ns()}", config=None)
        rig.configure(ABC)
        return rig

    def _timed(
        self, sandbox: Sandbox, send: Callable[[int], None], count: int, rest: Callable[[], None] = lambda: None
    ) -> list[float]:
        times = []
        for _ in range(count):
            rest()
            lead = sandbox.create_lead()
            seen = len(sandbox.state.owner_log)
            began = time.monotonic()
            send(lead)
            while len(sandbox.state.owner_log) <= seen:
                time.sleep(0.002)
                if time.monotonic() - began > 20:
                    raise RuntimeError("no owner was set")
            times.append(sandbox.state.owner_log[seen]["mono"] - began)
        return times

    def _floor_poster(self, sandbox: Sandbox) -> Callable[[int], None]:
        connection = HTTPConnection("127.0.0.1", self.floor_port, timeout=20)
        body = json.dumps({"resourceIds": [1]}).encode()
        return lambda lead: post(connection, f"/call/{lead}/12", body, {"Content-Type": "application/json"})

    def _hook_poster(self, rig: Rig, path: str) -> Callable[[int], None]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)

        def send(lead: int) -> None:
            event = f"bench-{lead}"
            if rig.crm == "bottlecrm":
                with rig.sandbox.state.lock:
                    whole = bottlecrm.lead_data(rig.sandbox.state.leads[lead])
                body = bottlecrm.event_body("lead.created", event, whole)
            else:
                body = rig.delivery(str(lead), event=event)
            post(connection, path, body, rig.signed(body, event))

        return send

    # -- one hot queue --------------------------------------------------------------------------------------
    def hot_queue(self, runtime: Runtime) -> None:
        """16 clients, write-back held: leads accepted and decided per second beside plain inserts."""
        say = self.report.say
        say(f"## One hot queue, {CLIENTS} clients, {ROUNDS} rounds of {BURST} leads, write-back held")
        say()
        with Sandbox() as sandbox:
            sandbox.pause_dispatch()
            rig = self._tenant(runtime, sandbox, "generic")
            tenants.set_sending(runtime, rig.tenant, False)
            with self.floor(runtime, sandbox):
                plain = [_request(self.floor_port, "/insert", b"x" * 400, {})] * BURST
                for name, commands in {"web and worker apart": ("web", "worker"), "all in one": ("serve",)}.items():
                    with ExitStack() as stack:
                        for command in commands:
                            stack.enter_context(process(*CLI, command, environment=self.environment()))
                        await_port(self.port)
                        self._burst(rig)
                        self._storm(self.floor_port, plain)
                        rig.wait_chores()
                        floor, hot, accepted = list[float](), list[float](), list[float]()
                        for _ in range(ROUNDS):
                            floor.append(BURST / self._storm(self.floor_port, plain))
                            took, all_in = self._burst(rig)
                            hot.append(BURST / took)
                            accepted.append(BURST / all_in)
                    ratio = statistics.median(hot) / statistics.median(floor)
                    counts = Counter(rig.turns())
                    fair = max(counts.values()) - min(counts.values()) <= 1
                    word = "-"
                    if commands == ("web", "worker"):
                        word = self.report.bound("hot queue", ratio >= HOT_BOUND and fair)
                    say(f"- floor (plain one-row inserts through the same web server): {_rates(floor)}")
                    say(
                        f"- {name}: {_rates(hot)} accepted and decided (accepted {_rates(accepted)}), {ratio:.2f} x "
                        f"the floor (bound {HOT_BOUND}: {word}); {'exactly fair' if fair else 'UNFAIR'}: "
                        f"{dict(sorted(counts.items()))}"
                    )
            rig.audit()
        say()

    def _burst(self, rig: Rig) -> tuple[float, float]:
        """Seconds until :data:`BURST` leads are decided, and until they are accepted."""
        path, first = urlsplit(rig.hook_url).path, rig.position()

        def request(number: int) -> bytes:
            lead = {"id": f"hot-{number}", "owner": None, "type": "Buyer", "price": 450000, "source": "Portal"}
            contact = {"emails": [f"lead{number}@example.com"], "address": {"city": "Austin", "zip": "78701"}}
            body = json.dumps({"type": "lead.created", "data": lead | contact}).encode()
            return _request(self.port, path, body, rig.signed(body, f"hot-{os.getpid()}-{number}"))

        requests = [request(first + number) for number in range(BURST)]
        began = time.monotonic()
        accepted = self._storm(self.port, requests)
        ends = began + 120
        while rig.position() < first + BURST:
            time.sleep(0.02)
            if time.monotonic() > ends:
                raise RuntimeError(f"stuck at {rig.position()} of {first + BURST}")
        return time.monotonic() - began, accepted

    def _storm(self, port: int, requests: Sequence[bytes]) -> float:
        """Seconds until :data:`CLIENTS` clients have sent these and heard 200."""
        waiting = iter(requests)
        lock = threading.Lock()
        failures: list[BaseException] = []

        def client() -> None:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
                    while True:
                        with lock:
                            request = next(waiting, None)
                        if request is None:
                            return
                        _exchange(line, request)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return time.monotonic() - began

    # -- flat -----------------------------------------------------------------------------------------------
    def past(self, runtime: Runtime, count: int) -> None:
        """Everything that could grow with the number of past decisions."""
        say = self.report.say
        say(f"## A long past: {count:,} decisions, a queue of 200 members, 1,000 rules")
        say()
        say(f"Measured on {datetime.now(UTC):%Y-%m-%d}.")
        say()
        with Sandbox() as sandbox:
            sandbox.pause_dispatch()
            long_past.run(runtime, sandbox, self.owner_url, count, say, self.report.bound)
        say()

    def flat(self, runtime: Runtime) -> None:
        """Deciding with many rules, and one lead per transaction."""
        say = self.report.say
        say("## Deciding, in process, 200 leads in units of 50")
        say()
        with Sandbox() as sandbox:
            sandbox.pause_dispatch()
            rig = self._tenant(runtime, sandbox, "generic")
            self._decide(rig, 200)
            few = self._decide(rig, 200)
            say(f"- after about a thousand past decisions: {few * 1000:.2f} ms a lead")
            alone = self._decide(rig, 200, alone=True)
            say(f"- one transaction per lead: {alone * 1000:.2f} ms a lead, {alone / few:.1f} x the unit of 50")
            rules = "rules:\n" + "".join(
                f"  - {{name: r{n}, when: {{field: city, equals: Town {n}}}, to: {{queue: All}}}}\n" for n in range(500)
            )
            rig.configure(ABC + rules)
            self._decide(rig, 50)
            ruled = self._decide(rig, 200)
            word = self.report.bound("500 rules", ruled <= 2 * few)
            say(
                f"- with 500 rules, none of which matches: {ruled * 1000:.2f} ms a lead, {ruled / few:.2f} x "
                f"(bound 2: {word})"
            )
            say()
            say("## CPU time of many rules and long queues")
            say()
            cpu.run(runtime, sandbox, say, self.report.bound)
            say()
            self._profile(rig)

    def _decide(self, rig: Rig, count: int, *, alone: bool = False) -> float:
        decider = Decider(rig.runtime, lambda *_: None, lambda: 0)
        self._feed(rig, count)
        keep = inbox.BATCH_DELIVERIES
        inbox.BATCH_DELIVERIES = 1 if alone else keep
        try:
            began = time.perf_counter()
            done = 0
            while done < count:
                done += decider.run(rig.tenant.tenant_id)
            return (time.perf_counter() - began) / count
        finally:
            inbox.BATCH_DELIVERIES = keep

    def _feed(self, rig: Rig, count: int) -> None:
        from adapters.base import Event, EventKind
        from connector.accept import store_delivery
        from routing.model import Lead

        for _ in range(count):
            number = time.monotonic_ns()
            lead = Lead(ref=f"flat-{number}", city="Austin", type="Buyer", emails=(f"flat{number}@example.com",))
            event = Event(EventKind.LEAD_CREATED, f"flat-{number}", ref=lead.ref, lead=lead)
            store_delivery(rig.runtime, rig.tenant, [event], hook_id=None, body=b"", flag_version=0, headers={})

    def _profile(self, rig: Rig) -> None:
        rig.configure(ABC)
        self._decide(rig, 50)
        self._feed(rig, 300)
        decider = Decider(rig.runtime, lambda *_: None, lambda: 0)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(6):
            decider.run(rig.tenant.tenant_id)
        profile.disable()
        text = io.StringIO()
        stats = pstats.Stats(profile, stream=text)
        stats.sort_stats("tottime").print_stats(12)
        self.report.say("## Where the time of deciding goes (300 leads, units of 50)")
        self.report.say()
        self.report.say("```")
        for line in text.getvalue().splitlines():
            if line.strip() and ("/" in line or "{" in line or "ncalls" in line):
                # Where things are installed is of this machine alone.
                installed = re.search(r"/\S*/(?:site-packages|python3\.\d+)/", line)
                where = line[installed.end() :] if installed else line
                head = line[:46] if installed else ""
                self.report.say((head + where).replace(str(Path(__file__).parents[2]) + "/", "")[:118])
        self.report.say("```")
        self.report.say()


def _merged(page: str, lines: list[str], *, whole: bool) -> str:
    """The page with the sections that were measured. Those of parts that were not run stay, and unless the run was
    `whole`, its head does."""

    def sections(text: str) -> dict[str, str]:
        text = re.sub(r"^Bounds missed.*$", "", text, flags=re.MULTILINE)
        found = re.split(r"^(?=## )", text, flags=re.MULTILINE)
        return {part.split("\n", 1)[0]: part.strip() for part in found}

    old, new = sections(page), sections("\n".join(lines))
    titles = dict.fromkeys([*old, *new])
    kept = [(old if title == "# Benchmarks" and not whole else old | new)[title] for title in titles]
    kept = [text for text in kept if not READING.strip().startswith(text.split("\n", 1)[0])]
    missed = f"Bounds missed, each marked above: {' '.join(kept).count('MISSED')}."
    return "\n\n".join([*kept, missed, READING.strip()]) + "\n"


def main() -> int:
    """Run all or the named parts; 1 when a bound was missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--past", type=int, default=int(os.environ.get("BENCH_PAST", "1000000")))
    parser.add_argument("--home", type=Path, help="keep the database in this folder, or measure the one that is there")
    options = parser.parse_args()
    report = Report()
    report.say("# Benchmarks")
    report.say()
    report.say(
        f"Written by `make bench` on {datetime.now(UTC):%Y-%m-%d}: {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, the embedded PostgreSQL with fsync on, the sandbox's limits off. The machine is "
        "shared, so read the ratios, not the milliseconds."
    )
    report.say()
    with nullcontext(options.home) if options.home else homes.passing() as folder:
        bench = Bench(report, Path(folder))
        with (
            EmbeddedPostgres(bench.settings.home) as server,
            open_runtime(bench.settings, upgrade=True, threads=12) as runtime,
        ):
            bench.owner_url = server.owner_url
            if "latency" in options.parts:
                bench.one_at_a_time(runtime)
            if "hot" in options.parts:
                bench.hot_queue(runtime)
            if "flat" in options.parts:
                bench.flat(runtime)
            if "past" in options.parts:
                bench.past(runtime, options.past)
    report.say(f"Bounds missed: {', '.join(report.missed) or 'none'}.")
    PAGE.write_text(_merged(PAGE.read_text(), report.lines, whole=set(options.parts) == set(PARTS)))
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
