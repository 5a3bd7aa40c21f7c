"""Real processes for the kill runs: a database server, a sandbox CRM, a web server and workers, killed and restarted.

Nothing here knows what a lead is. Every process runs the packages below one source folder, which may be a copy with a
seeded bug. Linux: the processes are found in /proc.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psycopg
import sqlalchemy as sa
from cryptography.fernet import Fernet
from psycopg import sql

from connector.database import make_engine
from connector.embedded import EmbeddedPostgres
from connector.embedded_cluster import EmbeddedError
from connector.runtime import Runtime
from connector.sandbox.remote import Remote
from connector.settings import Settings
from tests.kill import guard
from tests.kill.guard import MARK
from tests.ports import free_port

WEB, WORKERS = "web", ("worker_1", "worker_2")
# A command that cannot reach the database ends and is started again; after an outage that is no death of its own.
_OUTAGE_ECHO = 15.0  # seconds
# Sessions of the killed linger beside the new ones; long statements must be shown whole, to be told apart.
_SERVER = {"max_connections": "120", "track_activity_query_size": "16384"}
_TURNLOCK = ("-c", "from connector.cli import main; main()")


def children_of(pid: int) -> list[int]:
    """Process ids of the children of `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(stat.parent.name))
    return found


@dataclass
class Managed:
    """One process that is started again whenever it ends."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    kills: int = 0
    shot: bool = False  # the present process was killed by us


@dataclass
class House:
    """All processes of one run, in the folder `home`. A context manager: leaving it ends them all.

    `faults` of what ended by itself gather in :attr:`died`.
    """

    home: Path
    source: Path
    seed: int
    retry_scale: float
    one_process: bool = False
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    died: list[str] = field(default_factory=list)
    postgres_kills: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        self.server = EmbeddedPostgres(self.home / "postgres", settings=_SERVER)
        self.port = free_port()
        self._key = Fernet.generate_key().decode()
        self._crew: dict[str, Managed] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._outage = -_OUTAGE_ECHO  # when the database was last seen down (monotonic)
        self._threads: list[threading.Thread] = []
        self._sandbox: subprocess.Popen[str] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._files: list[IO[Any]] = []

    # -- life ---------------------------------------------------------------------------------------------
    def __enter__(self) -> House:
        try:
            self.server.start()
            self._start_guard()
            self._make_roles()
            self._sandbox = self._start_sandbox()
            assert self._sandbox.stdout is not None
            self.crm = Remote(json.loads(self._sandbox.stdout.readline())["url"])
            self.turnlock("migrate")
            self.runtime = Runtime(self._settings(), make_engine(self.server.app_url))
        except BaseException:
            self.stop(gently=False)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(gently=False)

    def start_crew(self) -> None:
        """Start web server and workers, and whoever starts them again."""
        for name in (WEB, *WORKERS):
            does = "worker" if name != WEB else "serve" if self.one_process else "web"
            command = (sys.executable, *_TURNLOCK, does)
            self._crew[name] = Managed(name, command, self.env(name), self.home / f"{name}.log")
            self._start(self._crew[name])
        for loop in (self._supervise, self._keep_postgres):
            thread = threading.Thread(target=loop, name=f"kill{loop.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()
        for name in self._crew:
            self.wait_ready(name)

    def stop(self, *, gently: bool) -> dict[str, int]:
        """End everything; exit codes of the crew. `gently` with SIGTERM, for which they have 30 seconds."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._threads = []
        codes = {}
        living = [one for one in self._crew.values() if one.process is not None]
        for one in living:
            assert one.process is not None
            one.process.send_signal(signal.SIGTERM if gently else signal.SIGKILL)
        for one in living:
            assert one.process is not None
            try:
                codes[one.name] = one.process.wait(30)
            except subprocess.TimeoutExpired:
                one.process.kill()
                codes[one.name] = one.process.wait()
        self._crew = {}
        if self._sandbox is not None:
            self._sandbox.kill()
            self._sandbox.communicate()
            self._sandbox = None
        if hasattr(self, "runtime"):
            self.runtime.engine.dispose()
        self.server.stop()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        for file in self._files:
            file.close()
        self._files = []
        return codes

    def left_behind(self) -> list[str]:
        """Processes of this run that still live; to be asked after :meth:`stop`."""
        return [f"{pid}: {what[:120]}" for pid, what in guard.processes_of(self.run, str(self.server.data)).items()]

    # -- set-up -------------------------------------------------------------------------------------------
    def _start_guard(self) -> None:
        # Deaf to what ends this process: its pipe tells it.
        command = [sys.executable, guard.__file__, self.run, str(self.server.data)]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def _make_roles(self) -> None:
        # A role for each process, so that the server's views tell whose session waits.
        with self.admin() as conn:
            for name in (WEB, *WORKERS):
                create = "CREATE ROLE {} LOGIN PASSWORD {} IN ROLE turnlock_app"
                conn.execute(sql.SQL(create).format(sql.Identifier(name), sql.Literal(self.run)))

    def _start_sandbox(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "connector.sandbox", "--seed", str(self.seed)]
        command += ["--retry-scale", str(self.retry_scale)]
        log = self._open(self.home / "sandbox.log")
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=self.env(),
            cwd=self.home,
            start_new_session=True,
        )

    def _settings(self) -> Settings:
        return Settings(
            database_url=self.server.app_url,
            migrate_url=self.server.owner_url,
            public_url=f"http://127.0.0.1:{self.port}",
            secret_keys=(self._key,),
            allow_private_hosts=True,
        )

    def env(self, role: str | None = None) -> dict[str, str]:
        """The environment of a process, of a member of the crew with its own way into the database."""
        url = sa.make_url(self.server.app_url)
        if role is not None:
            url = url.set(username=role, password=self.run)
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.source),
            MARK: self.run,
            "TURNLOCK_DATABASE_URL": url.render_as_string(hide_password=False),
            "TURNLOCK_MIGRATE_URL": self.server.owner_url,
            "TURNLOCK_SECRET_KEYS": self._key,
            "TURNLOCK_ALLOW_PRIVATE_HOSTS": "1",
            "TURNLOCK_PORT": str(self.port),
            "TURNLOCK_PUBLIC_URL": f"http://127.0.0.1:{self.port}",
        }

    def turnlock(self, *args: str) -> str:
        """Run a command to its end; what it printed. It must run the source of this run, and end well."""
        where = "import connector, sys; sys.stdout.write(connector.__file__ + chr(10)); sys.stdout.flush(); "
        command = [sys.executable, "-c", where + _TURNLOCK[1], *args]
        done = subprocess.run(command, env=self.env(), cwd=self.home, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        file, _, printed = done.stdout.partition("\n")
        assert Path(file).is_relative_to(self.source), f"runs {file}, not {self.source}"
        return printed

    def admin(self) -> psycopg.Connection[Any]:
        """A connection of the superuser, each statement committed by itself."""
        return psycopg.connect(self.server.superuser_dsn("turnlock"), autocommit=True, connect_timeout=5)

    def _open(self, path: Path) -> IO[bytes]:
        file = path.open("ab")
        self._files.append(file)
        return file

    # -- starting again ----------------------------------------------------------------------------------
    def _start(self, one: Managed) -> None:
        with one.log.open("ab") as log:
            one.process = subprocess.Popen(
                one.command,
                env=one.env,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        one.shot = False

    def _supervise(self) -> None:
        while not self._ended.wait(0.02):
            for one in self._crew.values():
                with self._lock:
                    assert one.process is not None
                    code = one.process.poll()
                    if code is None:
                        continue
                    if not one.shot and time.monotonic() - self._outage > _OUTAGE_ECHO:
                        self.died.append(f"{one.name} ended by itself with {code}: {_tail(one.log)}")
                    self.restarts += 1
                    self._start(one)

    def _keep_postgres(self) -> None:
        while not self._ended.wait(0.05):
            try:
                if self.server.ensure_running():
                    self._outage = time.monotonic()
            except EmbeddedError as error:
                self.died.append(str(error))
                self._ended.wait(1.0)

    # -- killing -----------------------------------------------------------------------------------------
    def kill(self, name: str) -> None:
        """kill -9."""
        one = self._crew[name]
        with self._lock:
            assert one.process is not None
            one.shot = True
            one.kills += 1
            with suppress(ProcessLookupError):
                os.kill(one.process.pid, signal.SIGKILL)
            one.process.wait()

    def kill_postgres(self) -> None:
        """kill -9 of the postmaster and, before they hear of it, of all its processes: as a crash takes them."""
        pid = self.server.postmaster_pid()
        assert pid is not None, "there is no server to kill"
        family = [pid, *children_of(pid)]
        self._outage = time.monotonic()
        for one in family:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self.postgres_kills += 1

    @property
    def kills(self) -> int:
        """kill -9 of web server and workers so far."""
        return sum(one.kills for one in self._crew.values())

    # -- looking -----------------------------------------------------------------------------------------
    def ready(self, name: str) -> bool:
        """Whether a member of the crew is at work: the web server answers, a worker has sessions beside its first."""
        if name == WEB:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
            return False
        with suppress(psycopg.Error), self.admin() as conn:
            query = "SELECT count(*) FROM pg_stat_activity WHERE usename = %s AND query LIKE 'LISTEN%%'"
            found = conn.execute(query, [name]).fetchone()
            return found is not None and found[0] > 0
        return False

    def wait_ready(self, name: str, seconds: float = 60.0) -> None:
        """Wait until it is at work."""
        ends = time.monotonic() + seconds
        while not self.ready(name):
            assert time.monotonic() < ends, f"{name} is not ready: {_tail(self._crew[name].log)}"
            time.sleep(0.05)


def _tail(path: Path, lines: int = 12) -> str:
    with suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return ""


@contextmanager
def connection(house: House) -> Iterator[psycopg.Connection[Any] | None]:
    """An administrator's connection, or None while the database is away."""
    try:
        conn = house.admin()
    except psycopg.Error:
        yield None
        return
    with conn:
        yield conn
