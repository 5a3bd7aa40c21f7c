"""A kill run: leads come in, everything is killed again and again, and every promise is held against the result."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from connector import configuration, tenants
from tests.kill.house import WEB, WORKERS, House, connection
from tests.kill.invariants import Broken, Leases, in_the_crm, look, lost, notes_twice, off_rotation, repeated
from tests.kill.points import POINTS, TAKE_BOTH, Missed

QUEUE = "version: 1\ndefault_queue: All\nqueues:\n  All:\n    members: ['12', '13', '14', '15', '16']\n"
#: What goes wrong in the CRM all the time. It asks for short pauses, because a pause is for the whole account.
FAULTS: tuple[dict[str, Any], ...] = (
    {"what": "status", "status": 429, "retry_after": 0.2, "probability": 0.03},
    {"what": "status", "status": 503, "retry_after": 0.2, "probability": 0.03},
    {"what": "drop", "apply": True, "method": "PUT", "probability": 0.04},
    {"what": "drop", "apply": True, "method": "POST", "probability": 0.04},
    {"what": "lost_owner", "owner": "empty", "method": "PUT", "probability": 0.01},
)
# How much faster than the vendor the CRM repeats a delivery that was not answered: the last pauses are seconds.
_RETRY_SCALE = {"followupboss": 0.003, "generic": 0.0005}
# One lead in so many is edited by hand right after it came in: a second event about a lead that is being decided.
_EDITED = 10
# What still waits, at its longest: why, how often tried and claimed, seconds until it is due, whether it is leased.
_LEFT = """
    SELECT kind, reason, count(*), max(attempt), max(claims),
        max(extract(epoch FROM due_at - clock_timestamp()))::int, count(leased_until)
    FROM (
        SELECT 'event' AS kind, reason, attempt, claims, due_at, leased_until FROM events WHERE state = 'waiting'
        UNION ALL
        SELECT kind, reason, attempt, claims, due_at, leased_until FROM outbox WHERE state = 'open' AND kind <> 'note'
    ) waiting GROUP BY kind, reason
"""
_ANYBODY, _DATABASE = "anybody", "the database"
_LOOK_EVERY = 0.5  # seconds
# So many units before one row: one of each worker, and more of one of them.
_GATHERED = 3
_WAITING = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND wait_event_type = 'Lock'"


@dataclass(frozen=True)
class Size:
    """How much. `each_point` is how often every point is met; what is left of `kills` strikes at random.

    `quiet` leads come first, one by one, with nothing going wrong. `edited`: a human edits some leads as they come in.
    `gathered`: before each kill the queue's row is held for a moment, so that units of several workers stand before it.
    `one_process`: what answers the CRM decides and sends, too, beside the other workers.
    """

    leads: int
    kills: int
    postgres_kills: int = 0
    each_point: int = 0
    points: tuple[str, ...] = tuple(POINTS)
    crm: str = "followupboss"
    seed: int = 1
    faults: bool = True
    quiet: int = 0
    edited: bool = True
    gathered: bool = False
    one_process: bool = False


@dataclass
class Report:
    """What a run came to."""

    size: Size
    broken: list[Broken] = field(default_factory=list)
    seconds: float = 0.0
    drained: float = 0.0
    kills: int = 0
    postgres_kills: int = 0
    restarts: int = 0
    faults: int = 0
    repeats: int = 0
    refused: int = 0
    looks: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def names(self) -> set[str]:
        """The promises that were not kept."""
        return {one.name for one in self.broken}

    def __str__(self) -> str:
        s = self.size
        lines = [
            f"{s.crm}, seed {s.seed}: {s.leads} leads, {self.kills} + {self.postgres_kills} kills at "
            f"{len(self.met)} points and at random, {self.restarts} restarts, {self.faults} faults of the CRM: "
            f"{self.seconds:.0f} s, backlog gone {self.drained:.1f} s after the last fault; "
            f"{self.counts['assigned']} assigned, {self.repeats} equal writes repeated, {self.refused} turns given "
            f"back, {self.looks} looks while it ran",
            *(f"NOT KEPT {one}" for one in self.broken),
        ]
        return "\n".join(lines)


class KillRun:
    """One run in `home` of a copy of the source. Make it, :meth:`run` it once."""

    def __init__(self, home: Path, source: Path, size: Size) -> None:
        self.size = size
        self.house = House(home, source, size.seed, _RETRY_SCALE[size.crm], size.one_process)
        self.report = Report(size)
        self.sent: list[int] = []
        self.tenant_id = UUID(int=0)
        self._rng = random.Random(size.seed)
        self._broken = threading.Event()
        self._quota = threading.Semaphore(0)
        self._all_out = threading.Event()  # every lead may come in now
        self._done = threading.Event()

    # -- the whole ----------------------------------------------------------------------------------------
    def run(self) -> Report:
        """Everything; ends early at the first promise that is broken while it runs."""
        began = time.monotonic()
        with self.house as house:
            self._install()
            house.start_crew()
            self._quiet()
            if self.size.faults:
                house.crm.set_faults(rules=list(FAULTS))
            works = (self._feed, self._watch)
            threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True) for work in works]
            for thread in threads:
                thread.start()
            try:
                self._kill_all(threads[0])
                self._drain()
            finally:
                self._done.set()
                for thread in threads:
                    thread.join()
            self._finish()
            codes = house.stop(gently=not self.report.broken)
            if not self.report.broken and set(codes.values()) != {0}:
                self._break(Broken("died", f"exit codes at the end: {codes}"))
        if left := house.left_behind():
            self._break(Broken("left_behind", "; ".join(left)))
        self.report.seconds = time.monotonic() - began
        return self.report

    def _quiet(self) -> None:
        """The happy path: one lead after the other, no fault, no kill. A seeded bug that fails here hides nothing."""
        for _ in range(self.size.quiet):
            self._come()
            ends = time.monotonic() + 20
            while dict(self.house.crm.owners())[self.sent[-1]] is None and time.monotonic() < ends:
                time.sleep(0.01)
        if self.size.quiet:
            self._drain()
            self._finish()
            assert not self.report.broken, f"the happy path itself fails: {self.report}"

    def _come(self) -> None:
        self.sent.append(self.house.crm.create_lead())

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a thread that dies must not look like a run without a fault
            self._break(Broken("died", f"the run's own {work.__name__}: {error!r}"))

    def _break(self, *broken: Broken) -> None:
        self.report.broken += broken
        if broken:
            self._broken.set()

    def _install(self) -> None:
        house, crm = self.house, self.house.crm
        account = crm.account()
        names = {"followupboss": ("api_key", "system_key"), "generic": ("api_secret", "webhook_secret")}[self.size.crm]
        self.tenant_id = tenants.add_tenant(
            house.runtime,
            "kill",
            self.size.crm,
            base_url=account["bases"][self.size.crm],
            parameters={},
            secret_values={name: account[name] for name in names},
        )
        with house.runtime.engine.connect() as conn:
            tenant = house.runtime.tenant(conn, self.tenant_id)
        tenants.install(house.runtime, tenant)
        configuration.apply(house.runtime, tenant, QUEUE, "test")

    # -- what goes on meanwhile ---------------------------------------------------------------------------
    def _feed(self) -> None:
        """Leads come in: alone, many at once, many told in one go; never more than the kills so far allow."""
        rng, crm = random.Random(self.size.seed + 1), self.house.crm
        while count := self._allowed(rng.choice((1, 1, 2, 3, 6, 20))):
            told = (count,) if rng.random() < 0.5 else (1,) * count
            leads = [lead for number in told for lead in crm.create_leads(count=number)]
            self.sent += leads
            if edited := [lead for lead in leads if self.size.edited and lead % _EDITED == 0]:
                crm.edit_leads(leads=edited, stage="Hot")
            time.sleep(rng.uniform(0.0, 0.04) * count)

    def _allowed(self, count: int) -> int:
        """How many of `count` may come in now: waits for the first; none when all are in."""
        for number in range(count):
            while not self._quota.acquire(timeout=0.0 if number else 0.2):
                if number or self._broken.is_set() or self._all_out.is_set():
                    return number
        return count

    def _watch(self) -> None:
        """Look at every promise that must hold at every instant."""
        leases = Leases()
        while not self._done.wait(_LOOK_EVERY):
            with connection(self.house) as conn:
                if conn is None:
                    continue
                try:
                    broken = [*look(conn).broken, *leases.look(conn, time.monotonic())]
                except psycopg.Error:
                    continue  # the database was killed; what it shows afterwards counts
                self.report.looks += 1
                if not self._broken.is_set():
                    self._break(*broken)

    # -- killing ------------------------------------------------------------------------------------------
    def _kill_all(self, feeder: threading.Thread) -> None:
        size = self.size
        points = list(size.points) * size.each_point
        taken = sum(1 + (name in TAKE_BOTH) for name in points)
        actions = points + [_ANYBODY] * max(0, size.kills - taken)
        self._rng.shuffle(actions)
        for number in range(size.postgres_kills):  # spread over the time in which leads come in
            actions.insert(len(actions) * (2 * number + 1) // (2 * size.postgres_kills), _DATABASE)
        # Leads come in as long as things are killed; at each point the run adds one more, so that somebody comes there.
        fed = size.leads - len(points)
        each = fed // max(1, len(actions))
        for number, what in enumerate(actions):
            self._quota.release(each if number else each + fed - each * len(actions))
            if self._broken.is_set():
                return
            if self.size.gathered:
                self._gather()
            began = time.monotonic()
            if what == _ANYBODY:
                self._anybody()
            elif what == _DATABASE:
                self._database()
            else:
                self._at(what)
            print(f"{number}: {what}, {time.monotonic() - began:.1f} s; {len(self.sent)} leads so far", flush=True)
            time.sleep(self._rng.uniform(0.0, 0.3))
        if not actions:
            self._quota.release(fed)
        self._all_out.set()
        feeder.join()

    def _gather(self) -> None:
        """Units come to the queue with what they know by then, and go on one after the other."""
        with self.house.admin() as held, self.house.admin() as conn, held.transaction():
            held.execute("SELECT FROM queues FOR UPDATE")
            ends = time.monotonic() + 1.5  # a unit gives the queue up after two seconds
            while (conn.execute(_WAITING).fetchone() or (0,))[0] < _GATHERED and time.monotonic() < ends:
                time.sleep(0.01)

    def _anybody(self) -> None:
        """One process that is at work, at any moment of it."""
        while not self._broken.is_set():
            name = self._rng.choice((WEB, *WORKERS, *WORKERS))
            if self.house.ready(name):
                time.sleep(self._rng.uniform(0.0, 0.5))
                self.house.kill(name)
                return

    def _at(self, name: str) -> None:
        for _ in range(6):
            if self._broken.is_set():
                return
            try:
                for one in (WEB, *WORKERS):
                    self.house.wait_ready(one)  # somebody must be there to be stopped
                POINTS[name](self.house, self._come)
                self.report.met[name] += 1
                return
            except (Missed, psycopg.Error):
                self.report.missed[name] += 1

    def _database(self) -> None:
        time.sleep(self._rng.uniform(0.2, 0.6))
        self.house.kill_postgres()
        time.sleep(0.2)
        self.house.server.ensure_running()
        with self.house.admin() as conn:
            self._break(*lost(conn, self.house.crm))

    # -- the end ------------------------------------------------------------------------------------------
    def _drain(self) -> None:
        house = self.house
        house.crm.clear_faults()
        last_fault = time.monotonic()
        with house.admin() as conn:
            backlog = look(conn).backlog + len(self.sent) - house.crm.counts()["leads"] + house.crm.counts()["unowned"]
            allowed, told, rows = 60 + backlog / 50, 5.0, []
            while not self._broken.is_set():
                self.report.drained = time.monotonic() - last_fault
                left = look(conn).backlog
                if not left and house.crm.wait_idle(timeout=0.1) and not look(conn).backlog:
                    return
                if self.report.drained >= told:
                    rows = conn.execute(_LEFT).fetchall()
                    print(f"{self.report.drained:.0f} s after the last fault {left} are left: {rows}", flush=True)
                    told += 5.0
                if self.report.drained > allowed:
                    self._break(Broken("liveness", f"{left} of {backlog} left after {allowed:.0f} s: {rows}"))
                    return
                time.sleep(0.1)

    def _finish(self) -> None:
        house, report = self.house, self.report
        house.runtime.engine.dispose()  # its connections are those of a server that may have been killed
        report.kills, report.postgres_kills, report.restarts = house.kills, house.postgres_kills, house.restarts
        report.faults = sum(bool(row["faults"]) for row in house.crm.call_log())
        report.repeats = repeated(house.crm)
        self._break(*(Broken("died", what) for what in house.died))
        self._break(*(Broken("died", f"the sandbox: {what}") for what in house.crm.errors()))
        stopped_early = bool(report.names - {"liveness"})
        troubles = report.kills + report.postgres_kills + report.faults
        with house.admin() as conn:
            seen = look(conn)
            report.counts = seen.counts
            void = conn.execute("SELECT count(*) FROM turns WHERE void_reason IS NOT NULL").fetchone()
            report.refused = void[0] if void is not None else 0
            if stopped_early:
                return  # the first sign is the telling one; what follows from it would only hide its name
            self._break(*seen.broken, *lost(conn, house.crm))
            self._break(*off_rotation(conn, house.runtime, self.tenant_id))
            if set(seen.counts) - {"assigned"} or seen.counts["assigned"] != len(self.sent):
                self._break(Broken("not_assigned", f"of {len(self.sent)} leads: {dict(seen.counts)}"))
            self._break(*in_the_crm(conn, house.crm, self.sent, troubles), *notes_twice(house.crm, self.sent))
