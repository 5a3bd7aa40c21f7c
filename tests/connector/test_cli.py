"""The command line: help, settings and errors, the schema, tenants and their secrets, configuration, flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from connector.cli import cli
from connector.embedded import EmbeddedPostgres
from connector.migrate import head
from connector.settings import Settings
from tests.connector.cli_rig import Cli, command_line, program

SECRET = "s3cret-value-of-nobody"
FUB = ("--crm", "followupboss", "--base-url", "http://127.0.0.1:9")
KEYS = {"TURNLOCK_SECRET_API_KEY": SECRET, "TURNLOCK_SECRET_SYSTEM_KEY": "another-s3cret"}


@pytest.fixture
def turnlock(database: Settings) -> Iterator[Cli]:
    with command_line(database) as found:
        yield found


@pytest.fixture
def acme(turnlock: Cli) -> Cli:
    """A command line with the tenant "acme", whose CRM nobody asks."""
    turnlock("tenant", "add", "acme", *FUB, **KEYS)
    return turnlock


def _commands() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]

    def walk(group: click.Group, path: tuple[str, ...]) -> None:
        for name in group.list_commands(click.Context(group)):
            found.append((*path, name))
            command = group.commands.get(name)
            if isinstance(command, click.Group):
                walk(command, (*path, name))

    walk(cli, ())
    return found


# -- help ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", _commands(), ids=" ".join)
def test_each_command_explains_itself_with_an_example(path: tuple[str, ...], turnlock_help: Cli) -> None:
    text = " ".join(turnlock_help(*path, "--help").stdout.split())
    assert f"Example: turnlock {' '.join(path or ('demo',))}" in text


@pytest.fixture
def turnlock_help() -> Iterator[Cli]:
    """A command line that needs no database."""
    with command_line(Settings(database_url="postgresql://nowhere", migrate_url="postgresql://nowhere")) as found:
        yield found


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['turnlock', '--help']\n"
        "from connector.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'sqlalchemy', 'psycopg', 'flask', 'waitress', 'requests', 'rich', 'alembic', 'cryptography'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "heavy: []" in done.stdout
    for name in ("serve", "migrate", "tenant", "explain", "give-up", "demo"):
        assert f"\n  {name} " in done.stdout


def test_usage_errors_exit_2(acme: Cli) -> None:
    assert "No such command 'nope'" in acme("nope", code=2).stderr
    assert "Missing argument 'TENANT'" in acme("install", code=2).stderr
    assert "say off, shadow or on" in acme("flags", "acme", "rules", code=2).stderr
    assert "'soon' is no time; write 24h" in acme("sweep", "acme", "--since", "soon", code=2).stderr
    assert "say --all" in acme("replay", "acme", code=2).stderr


# -- settings, database, schema --------------------------------------------------------------------------------


def test_wrong_settings_are_told_at_once_and_without_a_traceback(turnlock: Cli) -> None:
    env = {
        "TURNLOCK_PORT": "x",
        "TURNLOCK_PUBLIC_URL": "crm.example.com",
        "TURNLOCK_DATABASE_URL": f"mysql://u:{SECRET}@h",
    }
    done = turnlock.process("check", env=env)
    assert done.returncode == 1
    for name in ("TURNLOCK_PORT", "TURNLOCK_PUBLIC_URL", "TURNLOCK_DATABASE_URL", "TURNLOCK_SECRET_KEYS"):
        assert f"{name}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        (f"postgresql://turn:{SECRET}@127.0.0.1:1/leads", "at 127.0.0.1:1/leads cannot be used: nothing listens there"),
        (f"postgresql://turn:{SECRET}@{SECRET}@127.0.0.1:1/leads", "at 127.0.0.1:1/leads cannot be used"),
        (f"postgresql://turn:{SECRET}@127.0.0.1:port/leads", "TURNLOCK_DATABASE_URL: not a PostgreSQL address"),
    ],
)
def test_a_database_out_of_reach_is_told_with_its_fix_and_without_its_password(
    turnlock: Cli, url: str, cause: str
) -> None:
    done = turnlock("tenant", "list", code=1, TURNLOCK_DATABASE_URL=url)
    assert cause in done.stderr
    assert "TURNLOCK_DATABASE_URL" in done.stderr
    assert SECRET not in done.output


def test_a_wrong_password_is_told_as_such(turnlock: Cli, database: Settings) -> None:
    url = sa.make_url(database.database_url or "").set(password=SECRET).render_as_string(hide_password=False)
    done = turnlock("tenant", "list", code=1, TURNLOCK_DATABASE_URL=url)
    assert "it refuses the user or the password" in done.stderr
    assert SECRET not in done.output


def test_what_nobody_foresaw_is_one_line_without_its_text(acme: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("Ana Alvarez, ana@example.com")

    monkeypatch.setattr("connector.auditing.audit_queues", broken)
    done = acme("audit", code=1)
    assert "unexpected error (ValueError, broken:" in done.stderr
    assert "ana" not in done.output.lower()


@pytest.fixture
def empty(server: EmbeddedPostgres, database: Settings) -> Iterator[Cli]:
    """A command line on a database without any schema."""
    name = f"turnlock_empty_{os.getpid()}"
    server.create_database(name)
    urls = [
        sa.make_url(url or "").set(database=name).render_as_string(hide_password=False)
        for url in (database.database_url, database.migrate_url)
    ]
    settings = Settings(database_url=urls[0], migrate_url=urls[1], secret_keys=database.secret_keys)
    with command_line(settings) as found:
        yield found
    server.drop_database(name)


def test_the_schema_comes_by_migrate_alone_as_far_as_asked(empty: Cli) -> None:
    assert "run `turnlock migrate`" in empty("tenant", "list", code=1).stderr
    done = empty("migrate", "--revision", "0009_x", code=1)
    assert "no revision '0009_x'; there are: 0001_base, 0002_rules" in done.stderr
    first = empty.json("migrate", "--revision", "0003_rotation")
    assert (first["before"], first["after"], first["changed"]) == (None, "0003_rotation", True)

    empty("tenant", "add", "acme", *FUB, **KEYS)
    modes = {row["flag"]: (row["mode"], row["in_schema"]) for row in empty.json("flags", "acme")["flags"]}
    assert modes["rotation"] == ("on", True)
    assert modes["skips"] == ("off", False)
    assert "revision 0006_skips_more is not applied" in empty("flags", "acme", "skips", "on", code=1).stderr
    brings = "weights, skips, households, capacity, credits, settle"
    assert f"0003_rotation; `turnlock migrate` brings {brings}" in empty("check", code=1).stdout
    assert empty("agents", "list", "acme").stdout.startswith("No agent yet")
    assert "no agent 'ana'" in empty("pause", "acme", "ana", code=1).stderr

    assert empty.json("migrate", "--revision", "0005_skips")["after"] == "0005_skips"
    assert "in the middle of a stage; run `turnlock migrate`" in empty("check", code=1).stderr
    assert empty.json("migrate")["after"] == head()
    assert empty("migrate").stdout == f"The schema is at {head()}; nothing to do.\n"


def test_a_new_embedded_database_gets_its_schema_with_the_first_command(tmp_path: Path) -> None:
    env = {
        "PATH": os.environ["PATH"],
        "TURNLOCK_HOME": str(tmp_path / "home"),
        "TURNLOCK_SECRET_KEYS": Fernet.generate_key().decode(),
    }
    for _ in range(2):
        done = subprocess.run([program(), "tenant", "list"], env=env, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "No tenant yet; `turnlock tenant add` makes one.\n"


# -- tenants and secrets ---------------------------------------------------------------------------------------


def test_a_tenant_is_added_by_the_installed_program_and_listed(turnlock: Cli, tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("another-s3cret\n")
    given = ("--secret", "api_key", "--secret", f"system_key=@{tmp_path}/key.txt", "--param", "system=Homes")
    env = turnlock.env | {"TURNLOCK_SECRET_API_KEY": SECRET}
    done = turnlock.process("tenant", "add", "acme", *FUB, *given, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Added acme. Next: `turnlock check acme`, then `turnlock install acme`.\n"

    done = turnlock.process("tenant", "list", "--json")
    (row,) = json.loads(done.stdout)["tenants"]
    assert (row["name"], row["crm"], row["status"], row["sending"]) == ("acme", "followupboss", "active", True)
    with sa.create_engine(turnlock.settings.database_url or "", poolclass=sa.NullPool).connect() as conn:
        stored = conn.execute(sa.text("SELECT name, sealed FROM secrets ORDER BY name")).all()
        parameters = conn.execute(sa.text("SELECT parameters FROM tenants")).scalar_one()
    assert [name for name, _ in stored] == ["api_key", "system_key"]
    assert not any(value.encode() in bytes(sealed) for _, sealed in stored for value in (SECRET, "another-s3cret"))
    assert parameters["system"] == "Homes"

    done = turnlock.process("tenant", "hook", "nobody")
    assert (done.returncode, done.stderr) == (1, "Error: no tenant 'nobody'; there are: acme\n")


def test_the_generic_crm_takes_its_address(turnlock: Cli) -> None:
    secrets = ("--secret", "api_secret", "--secret", "webhook_secret")
    missing = turnlock("tenant", "add", "own", "--crm", "generic", code=1).stderr
    assert "api_secret: missing" in missing
    assert "webhook_secret: missing" in missing
    assert "base URL: missing" in missing
    found = turnlock.json(
        "tenant", "add", "own", "--crm", "generic", "--base-url", "https://crm.example.com/api/", *secrets,
        TURNLOCK_SECRET_API_SECRET="whsec_YQ==", TURNLOCK_SECRET_WEBHOOK_SECRET="whsec_Yg==",
    )  # fmt: skip
    assert (found["tenant"], found["crm"]) == ("own", "generic")
    assert turnlock.json("tenant", "list")["tenants"][0]["base_url"] == "https://crm.example.com/api"


def test_secrets_are_asked_for_without_being_shown(turnlock: Cli) -> None:
    done = turnlock(
        "tenant", "add", "acme", *FUB, "--secret", "api_key", "--secret", "system_key", text=f"{SECRET}\nother\n"
    )
    assert SECRET not in done.output
    assert "api_key:" in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (f"api_key={SECRET}", "api_key: a value in the command line can be seen by others"),
        (SECRET, "a secret is named by one of: api_key, system_key"),
        ("system", "a secret is named by one of: api_key, system_key"),
        ("api_key=@/nowhere/at/all", "api_key: the file cannot be read"),
        ("api_key=@/dev/null", "api_key: the value is empty"),
    ],
)
def test_a_secret_given_in_a_wrong_way_is_refused_and_not_repeated(turnlock: Cli, given: str, said: str) -> None:
    done = turnlock("tenant", "add", "acme", *FUB, "--secret", given, code=2)
    assert said in done.stderr
    assert SECRET not in done.output
    assert turnlock.json("tenant", "list")["tenants"] == []


def test_what_is_wrong_with_a_new_tenant_is_told(acme: Cli) -> None:
    done = acme("tenant", "add", "beta", *FUB, "--param", "colour=red", code=1)
    assert "colour: followupboss has no such parameter; it has api_key, system_key, system" in done.stderr
    assert "system_key: missing; give it with --secret system_key" in done.stderr
    assert "a tenant 'acme' exists already" in acme("tenant", "add", "acme", *FUB, code=1, **KEYS).stderr
    assert "'pipes' is not known; use one of " in acme("tenant", "add", "b", "--crm", "pipes", code=1).stderr
    assert "write NAME=VALUE" in acme("tenant", "add", "b", *FUB, "--param", "x", code=2).stderr
    assert "write a name" in acme("tenant", "add", " b", *FUB, code=2).stderr
    address = ("--crm", "followupboss", "--base-url", f"https://u:{SECRET}@crm.example.com")
    done = acme("tenant", "add", "b", *address, code=2)
    assert "without user or password" in done.stderr
    assert SECRET not in done.output


def test_a_secret_is_rotated_and_the_old_one_lives_for_a_day_unless_told(acme: Cli) -> None:
    live = sa.text("SELECT count(*) FROM secrets WHERE name = 'system_key'")
    engine = sa.create_engine(acme.settings.database_url or "", poolclass=sa.NullPool)
    done = acme("tenant", "secret", "acme", "system_key", TURNLOCK_SECRET_SYSTEM_KEY="new-s3cret")
    assert done.stdout == "system_key of acme is set. The old value lives 24 hours.\n"
    with engine.connect() as conn:
        assert conn.execute(live).scalar_one() == 2
    done = acme("tenant", "secret", "acme", "system_key=@-", "--at-once", text="newer\n")
    assert "The old value is not accepted any more." in done.stdout
    with engine.connect() as conn:
        assert conn.execute(live).scalar_one() == 1
    assert "one of: api_key, system_key" in acme("tenant", "secret", "acme", "colour", code=2).stderr


def test_the_hook_is_shown_to_the_admin(acme: Cli) -> None:
    url = acme("tenant", "hook", "acme").stdout.strip()
    assert url.startswith("http://127.0.0.1:8080/hooks/")
    assert acme.json("tenant", "hook", "acme") == {"schema": 1, "tenant": "acme", "url": url}


def test_sending_is_stopped_and_started(acme: Cli) -> None:
    assert acme("outbox", "stop", "acme").stdout.startswith("Sending to the CRM of acme is stopped")
    assert acme.json("tenant", "list")["tenants"][0]["sending"] is False
    acme("outbox", "start", "acme")
    assert acme.json("tenant", "list")["tenants"][0]["sending"] is True


def test_a_piped_table_keeps_every_character_and_has_no_colours(turnlock: Cli) -> None:
    address = "https://crm.example.com/" + "long-" * 60 + "end"
    turnlock("tenant", "add", "acme [red]", "--crm", "followupboss", "--base-url", address, **KEYS)
    done = turnlock.process("tenant", "list")
    header, row = done.stdout.splitlines()
    assert header.split() == ["name", "crm", "address", "status", "sending", "configuration"]
    assert address in row
    assert "acme [red]" in row
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout


# -- configuration ---------------------------------------------------------------------------------------------

GOOD = "version: 1\ndefault_queue: All\nqueues:\n  All:\n    members: []\n"
BAD = """\
version: 1
default_queue: Nowhere
queues:
  All:
    members: [nobody@example.com]
    when_nobody: sleep
rules:
  - name: Broken
    when: {field: price, at_least: much}
    to: {queue: All}
"""


def test_every_problem_is_listed_with_its_line_and_nothing_is_applied(acme: Cli, tmp_path: Path) -> None:
    file = tmp_path / "acme.yaml"
    file.write_text(BAD)
    for verb in ("apply", "check"):
        done = acme("config", verb, "acme", str(file), code=1)
        assert "4 problems in the configuration, the first at line 2; nothing was applied:" in done.stderr
        for line in (2, 5, 6, 9):
            assert f"  line {line}, column " in done.stderr
    assert acme.json("tenant", "list")["tenants"][0]["config_version"] == 0
    found = acme.json("config", "check", "acme", str(file), code=1)
    assert found["ok"] is False
    assert [problem["line"] for problem in found["problems"]] == [2, 5, 6, 9]
    assert found["problems"][0].keys() == {"line", "column", "path", "what", "fix"}


def test_a_configuration_is_applied_kept_and_given_back(acme: Cli, tmp_path: Path) -> None:
    started = acme("config", "export", "acme").stdout
    assert "default_queue: Everyone" in started
    assert 'Note: queue "All"' in acme("config", "check", "acme", "-", text=GOOD).stdout
    assert acme("config", "apply", "acme", "-", text=GOOD).stdout.endswith("Applied as version 1 of acme.\n")
    file = tmp_path / "acme.yaml"
    file.write_text("# the same\n" + GOOD)
    again = acme.json("config", "apply", "acme", str(file))
    assert (again["version"], again["changed"], len(again["warnings"])) == (1, False, 1)
    file.write_text(GOOD + "released: leave\n")
    assert acme.json("config", "apply", "acme", str(file))["version"] == 2
    assert acme("config", "export", "acme").stdout == GOOD + "released: leave\n"
    assert acme("config", "export", "acme", "--version", "1").stdout == GOOD
    assert "no version 7; the newest is 2" in acme("config", "export", "acme", "--version", "7", code=1).stderr


RULES = """rules:
  - {name: Texas, when: {field: state, equals: TX}, to: {queue: All}}
  - {name: Elsewhere, when: {field: state, equals: OK}, to: {queue: All}}
  - {name: Downtown, when: {all: [{field: state, equals: TX}, {field: city, equals: Austin}]}, to: leave_alone}
"""


def test_an_order_of_rules_is_suggested_and_never_made(acme: Cli) -> None:
    acme("config", "apply", "acme", "-", text=GOOD + RULES)
    told = acme("rules", "suggest", "acme").stdout
    assert "Note: rule \"Downtown\": 'Texas' stands before it" in told
    assert [line.split() for line in told.splitlines() if "Downtown" in line][-1] == [
        *("1", "Downtown", "was", "3", "before", '"Texas",', "which", "takes", "all", "of", "its", "leads"),
    ]
    found = acme.json("rules", "suggest", "acme")
    assert found["order"] == ["Downtown", "Texas", "Elsewhere"]
    assert found["moves"] == [{"rule": "Downtown", "now": 3, "before": "Texas", "where": 1}]
    assert [note["kind"] for note in found["notes"]] == ["shadowed"]
    assert acme("config", "export", "acme").stdout == GOOD + RULES
    calm = acme("rules", "suggest", "acme", "-", text=GOOD).stdout
    assert calm == "The specific rules stand before the general ones already.\n"


def test_names_that_do_not_exist_are_told_with_those_that_do(acme: Cli) -> None:
    acme("config", "apply", "acme", "-", text=GOOD)
    assert "no queue 'Al' in 'acme'; there are: All" in acme("queue", "next", "acme", "Al", code=1).stderr
    assert "no agent 'ana' in 'acme'; there are: none yet" in acme("pause", "acme", "ana", code=1).stderr
    assert "Turnlock has not seen a lead '7' of 'acme'" in acme("explain", "acme", "7", code=1).stderr
    assert "nothing parked has the id '7'" in acme("replay", "acme", "7", code=1).stderr
    assert "no write 01997c7e-" in acme("give-up", "acme", "01997c7e-3b3f-7d7c-9c56-0d6c2b7a4f10", code=1).stderr
    assert "no flag 'x'; there are: write_back, rules" in acme("flags", "acme", "x", "on", code=1).stderr
    assert "no tenant 'zeta'; there are: acme" in acme("audit", "zeta", code=1).stderr


def test_an_empty_queue_says_what_would_happen(acme: Cli) -> None:
    acme("config", "apply", "acme", "-", text=GOOD)
    shown = acme.json("queue", "next", "acme", "all")
    assert (shown["queue"], shown["position"], shown["next"], shown["unavailable"]) == ("All", 0, [], [])
    assert "Nobody is available; a lead is treated as: hold." in acme("queue", "next", "acme", "All").stdout
    assert "It has no members." in acme("queue", "show", "acme", "All").stdout
    assert acme("audit").stdout.splitlines()[1].split() == ["acme", "All", "0", "1", "follows"]
    assert acme("parked", "acme").stdout == "Nothing is parked.\n"
    assert acme("alarms").stdout == "No alarm is open.\n"


# -- flags and manifest ----------------------------------------------------------------------------------------


def test_flags_keep_their_order(acme: Cli) -> None:
    for flag in ("skips", "weights", "rotation"):
        acme("flags", "acme", flag, "off")
    done = acme("flags", "acme", "weights", "on", code=1)
    assert "weights cannot be on while rotation is off; `turnlock flags TENANT rotation on`" in done.stderr
    found = acme.json("flags", "acme", "rotation", "on", "--force", "back after a look")
    modes = {row["flag"]: row["mode"] for row in found["flags"]}
    off = {"weights": "off", "skips": "off"}
    on = ("write_back", "rules", "rotation", "households", "capacity", "credits", "settle", "teams")
    assert modes == dict.fromkeys(on, "on") | off


def test_a_ledger_still_follows_after_members_changed_while_the_rotation_was_off(acme: Cli) -> None:
    acme("config", "apply", "acme", "-", text=GOOD)
    for flag in ("skips", "weights", "rotation"):
        acme("flags", "acme", flag, "off")
    acme("config", "apply", "acme", "-", text=GOOD + "  Late:\n    members: []\n")
    assert acme.json("audit")["ok"] is True
    acme("flags", "acme", "rotation", "on", "--force", "back after a look")
    assert acme.json("audit", "acme")["ok"] is True


def test_the_manifest_is_held_against_the_code(turnlock: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connector.manifest.check", lambda: [])
    assert turnlock.json("manifest", "check") == {"schema": 1, "ok": True, "problems": []}
    monkeypatch.undo()
    monkeypatch.setattr("connector.manifest.load", lambda: {})
    done = turnlock("manifest", "check", code=1)
    assert "manifest.json" in done.stdout
    assert turnlock.json("manifest", "check", code=1)["ok"] is False
