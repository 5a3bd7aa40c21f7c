"""The schema, stage by stage: every revision serves leads, upgrades under running code, and is what the code knows."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from cryptography.fernet import Fernet

import adapters
import connector
import connector.tables
import routing
from connector import flags, migrate, tenants
from connector.database import make_engine
from connector.embedded import EmbeddedPostgres
from connector.errors import TurnlockError
from connector.runtime import Runtime
from connector.sandbox import Sandbox
from connector.settings import Settings
from migrations import versions
from routing.model import Flag
from routing.tables import metadata
from tests.connector.cli_rig import program
from tests.connector.oauth_rig import AppRig
from tests.rig import ABC, ANA, BEN, CY, Rig, until

ORDER = list(migrate.STAGES)
_numbers = itertools.count(1)


def url(server: EmbeddedPostgres, database: str, *, owner: bool = False) -> str:
    found = sa.make_url(server.owner_url if owner else server.app_url)
    return found.set(database=database).render_as_string(hide_password=False)


@pytest.fixture
def fresh(server: EmbeddedPostgres) -> Iterator[Callable[[], str]]:
    """Makes empty databases; gives their names."""
    made: list[str] = []

    def make() -> str:
        made.append(f"turnlock_fresh_{next(_numbers)}")
        server.create_database(made[-1])
        return made[-1]

    yield make
    for name in made:
        server.drop_database(name)


@pytest.fixture
def owned(server: EmbeddedPostgres, fresh: Callable[[], str]) -> Iterator[Callable[..., sa.Engine]]:
    """Makes engines of the owner, on an empty database or the one named."""
    with ExitStack() as stack:

        def make(database: str | None = None) -> sa.Engine:
            engine = sa.create_engine(url(server, database or fresh(), owner=True), poolclass=sa.NullPool)
            stack.callback(engine.dispose)
            return engine

        yield make


@pytest.fixture
def stopped_at(
    server: EmbeddedPostgres, fresh: Callable[[], str], owned: Callable[..., sa.Engine]
) -> Iterator[Callable[[str], tuple[Rig, sa.Engine]]]:
    """Makes a whole Turnlock on a database that stopped at a revision: the rig, and the engine of the owner."""
    with ExitStack() as stack:

        def make(revision: str) -> tuple[Rig, sa.Engine]:
            name = fresh()
            owner = owned(name)
            migrate.migrate(owner, revision)
            settings = Settings(
                database_url=url(server, name),
                secret_keys=(Fernet.generate_key().decode(),),
                allow_private_hosts=True,
                deciders=3,
                senders=6,
            )
            engine = make_engine(settings.database_url or "", pool_size=30, pool_timeout=5)
            stack.callback(engine.dispose)
            rig = Rig(Runtime(settings, engine), stack.enter_context(Sandbox(retry_scale=0.001)))
            stack.callback(rig.stop)
            rig.start_web()
            rig.add_tenant()
            rig.start_worker()
            return rig, owner

        yield make


# -- every stage by itself --------------------------------------------------------------------------------------

RULES = "rules: [{name: web, when: {field: source, equals: Web}, to: {agent: '14'}}]\n"
WEIGHTS = "default_queue: All\nqueues: {All: {members: [{agent: '12', weight: 2}, '13', '14']}}\n"
HOURS = "agents: {'12': {zone: Europe/Rome}}\n"
BEYOND = {
    Flag.RULES: ABC + RULES,
    Flag.WEIGHTS: WEIGHTS,
    Flag.SKIPS: ABC + HOURS,
    Flag.CAPACITY: ABC + "caps_zone: UTC\n",
    Flag.TEAMS: ABC + "teams: {North: {members: ['12']}}\n",
}


@pytest.mark.parametrize("reached", range(len(ORDER)), ids=list(migrate.STAGES.values()))
def test_each_revision_routes_leads_and_the_line_goes_on_when_the_rest_comes(
    stopped_at: Callable[[str], tuple[Rig, sa.Engine]], reached: int
) -> None:
    rig, owner = stopped_at(migrate.STAGES[ORDER[reached]])
    tenant_id = rig.tenant.tenant_id
    here, missing = ORDER[: reached + 1], ORDER[reached + 1 :]
    with rig.runtime.engine.connect() as conn:
        assert flags.modes(conn, tenant_id) == dict.fromkeys(here, "on") | dict.fromkeys(missing, "off")
    for flag in missing:
        with pytest.raises(TurnlockError, match=f"{migrate.STAGES[flag]} is not applied; run `turnlock migrate`"):
            flags.switch(rig.runtime, tenant_id, flag, "on", "test")
        if flag in BEYOND:
            with pytest.raises(TurnlockError, match=f"uses {flag.value}, which the database lacks"):
                rig.configure(BEYOND[flag])
    if Flag.SKIPS in missing:
        with pytest.raises(TurnlockError, match="needs the stage `skips`"):
            rig.pause(ANA)
    turns = Flag.ROTATION in here
    assert [rig.assign() for _ in range(4)] == ([ANA, BEN, CY, ANA] if turns else [ANA] * 4)
    if Flag.RULES in here:
        rig.configure(ABC + RULES)
        assert rig.assign(source="Web") == CY
    rig.audit()

    # The rest of the schema comes while this code goes on working.
    migrate.migrate(owner)
    for flag in missing:
        if needs := flags.NEEDS.get(flag):
            assert flags.switch(rig.runtime, tenant_id, needs, "off", "test") or needs not in here
            with pytest.raises(TurnlockError, match=f"cannot be on while {needs.value} is off"):
                flags.switch(rig.runtime, tenant_id, flag, "on", "test")
            flags.switch(rig.runtime, tenant_id, needs, "on", "test", force="came late")
        assert flags.switch(rig.runtime, tenant_id, flag, "on", "test", force="came late")
    owners = [rig.assign() for _ in range(3)]
    assert owners == ([BEN, CY, ANA] if turns else [ANA, BEN, CY])
    rig.pause(BEN)
    rig.configure(WEIGHTS + RULES)
    assert rig.assign(source="Web") == CY
    assert BEN not in {rig.assign() for _ in range(3)}
    rig.settle_owners()
    rig.audit()
    assert rig.position() == (10 if turns else 6)


def test_a_database_of_a_newer_turnlock_is_left_as_it_is(
    stopped_at: Callable[[str], tuple[Rig, sa.Engine]],
) -> None:
    rig, owner = stopped_at("head")
    with owner.begin() as conn:
        conn.execute(sa.text("UPDATE alembic_version SET version_num = '0099_later'"))
    assert migrate.migrate(owner) == ("0099_later", "0099_later")
    assert [rig.assign() for _ in range(2)] == [ANA, BEN]
    with rig.runtime.engine.connect() as conn:
        assert migrate.stages(conn) == frozenset(Flag)


# -- migrating beside others ------------------------------------------------------------------------------------


def test_of_eight_that_migrate_at_once_one_does_and_all_succeed(
    server: EmbeddedPostgres, fresh: Callable[[], str], owned: Callable[..., sa.Engine]
) -> None:
    name = fresh()
    engines = [owned(name) for _ in range(8)]
    done: list[tuple[str | None, str | None]] = []
    at_once = threading.Barrier(8)

    def run(engine: sa.Engine) -> None:
        at_once.wait()
        done.append(migrate.migrate(engine))

    threads = [threading.Thread(target=run, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    head = migrate.head()
    assert sorted(done, key=str) == sorted([(None, head)] + [(head, head)] * 7, key=str)


@pytest.mark.proof
def test_of_eight_processes_that_migrate_at_once_one_does_and_all_succeed(
    server: EmbeddedPostgres, fresh: Callable[[], str]
) -> None:
    owner = url(server, fresh(), owner=True).replace("postgresql+psycopg:", "postgresql:")
    names = {"TURNLOCK_DATABASE_URL": owner, "TURNLOCK_SECRET_KEYS": Fernet.generate_key().decode()}
    command = [program(), "migrate"]
    running = [Popen(command, env=names, stdout=PIPE, stderr=PIPE, text=True) for _ in range(8)]
    said = [one.communicate(timeout=100) for one in running]
    assert [one.returncode for one in running] == [0] * 8, said
    assert sum("before: none" in out for out, _ in said) == 1, said
    assert all(migrate.head() in out for out, _ in said)


def test_a_migration_waits_politely_for_a_long_transaction_and_says_what_to_do(
    stopped_at: Callable[[str], tuple[Rig, sa.Engine]],
) -> None:
    rig, owner = stopped_at("0002_rules")
    with rig.runtime.engine.connect() as reader:
        reader.execute(sa.text("SELECT count(*) FROM queues"))  # and its ACCESS SHARE is kept
        with pytest.raises(TurnlockError, match="end long transactions and run `turnlock migrate` again"):
            migrate.migrate(owner, tries=2, lock_timeout="200ms")
        with owner.connect() as conn:
            assert migrate.current(conn) == "0002_rules"
            held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"  # 1: a key in one part
            assert conn.execute(sa.text(held)).scalar() == 0
        assert rig.assign() == ANA
    assert migrate.migrate(owner) == ("0002_rules", migrate.head())


def test_deliveries_are_answered_while_a_migration_waits_for_a_long_transaction(
    stopped_at: Callable[[str], tuple[Rig, sa.Engine]],
) -> None:
    rig, owner = stopped_at("0002_rules")
    rig.sandbox.webhook_faults(drop=1.0)
    refs = [rig.create() for _ in range(20)]
    migrating = threading.Thread(target=migrate.migrate, args=(owner,), kwargs={"lock_timeout": "300ms"})
    with rig.runtime.engine.connect() as reader:
        reader.execute(sa.text("SELECT count(*) FROM queues"))
        migrating.start()
        until(lambda: rig.one("SELECT count(*) FROM pg_locks WHERE NOT granted"), what="a migration that waits")
        assert {rig.post(rig.delivery(ref, event=ref)).status for ref in refs} == {200}
    migrating.join()
    with owner.connect() as conn:
        assert migrate.current(conn) == migrate.head()
    assert {rig.wait_owner(ref) for ref in refs} == {ANA}


# -- only ever more ---------------------------------------------------------------------------------------------

_ADDITION = re.compile(
    r"CREATE TABLE \w+ .*"
    r"|CREATE (?:UNIQUE )?INDEX (?!CONCURRENTLY)\w+ ON (?P<on>\w+) .*"
    r"|ALTER TABLE \w+ (?:ADD (?:COLUMN (?!.*\b(?:UNIQUE|REFERENCES|GENERATED)\b)|CONSTRAINT (?P<check>\w+) CHECK ).*)"
    r"|CREATE FUNCTION \w+\(\) .*"
    r"|(?:INSERT INTO|UPDATE) alembic_version .*"
    r"|CREATE TABLE alembic_version .*"
)


def contracts(statements: list[str]) -> list[str]:
    """Of the statements of one revision those that the code before it could not live with."""
    texts = [re.sub(r"\$\$.*?\$\$", "$$ $$", text, flags=re.DOTALL) for text in statements]  # what runs when called
    flat = [" ".join(re.sub(r"--.*", "", part).split()) for text in texts for part in text.split(";")]
    flat = [text for text in flat if not widens(text)]
    made = {found[1] for text in flat if (found := re.match(r"CREATE TABLE (\w+)", text))}
    wrong = []
    for text in filter(None, flat):
        found = _ADDITION.fullmatch(text)
        # An index on a table that has rows, made in a transaction, shuts writers out; NOT NULL needs a default.
        old_index = found and found["on"] is not None and found["on"] not in made
        columns = re.findall(r"ADD COLUMN .*?(?=, ADD |$)", text)
        if not found or old_index or any("NOT NULL" in c and "DEFAULT" not in c for c in columns):
            wrong.append(text)
    return wrong


_LISTED = re.compile(
    r"ALTER TABLE (\w+) DROP CONSTRAINT (\w+), ADD CONSTRAINT (\w+) CHECK \((\w+) IN \(((?:'\w+'(?:, )?)+)\)\)"
)


def widens(statement: str) -> bool:
    """Whether a statement only lets a column hold more words than any revision before let it."""
    found = _LISTED.fullmatch(statement)
    if found is None or found[2] != found[3]:
        return False
    words = re.compile(rf"CONSTRAINT {found[2]} CHECK \({found[4]} IN \(((?:'\w+'(?:,\s+)?)+)\)\)")
    texts = [path.read_text() for path in Path(versions.__file__ or "").parent.glob("r*.py")]
    lists = [set(re.findall(r"'(\w+)'", one)) for text in texts for one in words.findall(text)]
    narrow = min(lists, key=len, default=set())
    return bool(narrow) and narrow <= set(re.findall(r"'(\w+)'", found[5]))


def test_every_revision_only_adds(owned: Callable[..., sa.Engine]) -> None:
    engine = owned()
    for revision in migrate.order():
        told: list[str] = []
        reads = re.compile(r"\s*(SELECT|SET)\b", re.IGNORECASE)

        def hear(*args: Any, told: list[str] = told, reads: re.Pattern[str] = reads) -> None:
            if not reads.match(args[2]):
                told.append(args[2])

        sa.event.listen(engine, "before_cursor_execute", hear)
        migrate.migrate(engine, revision)
        sa.event.remove(engine, "before_cursor_execute", hear)
        assert len(told) >= 2, "the revision told nothing"
        assert contracts(told) == []


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE rules",
        "ALTER TABLE queues DROP COLUMN floor",
        "ALTER TABLE queues RENAME COLUMN floor TO ground",
        "ALTER TABLE queues RENAME TO lines",
        "ALTER TABLE queues ALTER COLUMN name TYPE varchar(10)",
        "ALTER TABLE queues ALTER COLUMN fallback_queue_id SET NOT NULL",
        "ALTER TABLE queues ADD COLUMN colour text NOT NULL",
        "ALTER TABLE queues ADD COLUMN a int,\n  ADD COLUMN b int NOT NULL",
        "ALTER TABLE queues ADD COLUMN a int UNIQUE",
        "ALTER TABLE queues ADD CONSTRAINT queues_a_uq UNIQUE (name)",
        "CREATE INDEX queues_ix ON queues (name)",
        "ALTER TABLE flags DROP CONSTRAINT flags_mode_ck",
        "ALTER TABLE flags DROP CONSTRAINT flags_mode_ck, ADD CONSTRAINT flags_mode_ck CHECK (mode IN ('on', 'half'))",
        "ALTER TABLE flags DROP CONSTRAINT flags_mode_ck, ADD CONSTRAINT flags_m_ck CHECK (mode IN ('off', 'on'))",
        "UPDATE queues SET floor = 0",
        "CREATE TRIGGER t AFTER INSERT ON queues EXECUTE FUNCTION f()",
    ],
)
def test_a_statement_that_takes_away_would_be_noticed(statement: str) -> None:
    assert contracts(["CREATE TABLE fresh (a int NOT NULL); CREATE INDEX fresh_ix ON fresh (a)", statement]) == [
        " ".join(statement.split())
    ]


# -- schema == migrations ---------------------------------------------------------------------------------------

_CATALOG = """
SELECT format('%s.%s: %s%s', r.relname, a.attname, format_type(a.atttypid, a.atttypmod),
              concat(' null ', NOT a.attnotnull, ' default ', pg_get_expr(d.adbin, d.adrelid),
                     ' collation ', nullif(a.attcollation, t.typcollation)))
FROM pg_attribute a JOIN pg_class r ON r.oid = a.attrelid JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE r.relnamespace = 'public'::regnamespace AND r.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT format('%s: constraint %s %s', r.relname, c.conname, pg_get_constraintdef(c.oid))
FROM pg_constraint c JOIN pg_class r ON r.oid = c.conrelid WHERE r.relnamespace = 'public'::regnamespace
UNION ALL
SELECT format('%s: index %s', tablename, indexdef) FROM pg_indexes WHERE schemaname = 'public'
UNION ALL
SELECT format('%s: %s %s', relname, relkind, pg_get_partkeydef(oid)) FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind NOT IN ('i', 'I')
"""


def catalog(conn: sa.Connection) -> set[str]:
    """Everything that the database itself says of its tables, in words."""
    found = set(conn.execute(sa.text(_CATALOG)).scalars())
    return {line for line in found if not line.startswith(("alembic_version", "delivery_bodies_default"))}


def test_the_migrations_make_exactly_the_tables_that_the_code_knows(owned: Callable[..., sa.Engine]) -> None:
    by_migrations, by_code = owned("turnlock_template"), owned()
    metadata.create_all(by_code)
    with by_migrations.connect() as conn, by_code.connect() as other:
        assert catalog(conn) ^ catalog(other) == set()
        options = {"compare_type": True, "compare_server_default": True, "include_object": _ours}
        assert compare_metadata(MigrationContext.configure(conn, opts=options), metadata) == []


def _ours(_: Any, name: str | None, kind: str, *__: Any) -> bool:
    return not (kind == "table" and name == "delivery_bodies_default")


DRIFTS = (
    "ALTER TABLE lead_roles DROP CONSTRAINT lead_roles_state_ck",
    "ALTER TABLE members DROP CONSTRAINT members_weight_ck, "
    "ADD CONSTRAINT members_weight_ck CHECK (weight BETWEEN 0 AND 99)",
    "DROP INDEX assignments_active_uq; CREATE UNIQUE INDEX assignments_active_uq ON assignments "
    "(tenant_id, lead_id, role) WHERE state = 'void'",
    "DROP INDEX events_due_ix",
    'ALTER TABLE lead_refs ALTER COLUMN ref TYPE text COLLATE "C.utf8"',
    "ALTER TABLE queues ALTER COLUMN position DROP NOT NULL",
    "ALTER TABLE queues ALTER COLUMN floor TYPE numeric(50, 0)",
    "ALTER TABLE outbox RENAME CONSTRAINT outbox_epoch_uq TO outbox_uq",
    "ALTER TABLE alarms ALTER COLUMN times SET DEFAULT 2",
    "CREATE TABLE more (a int)",
)


def test_a_schema_that_drifts_would_be_noticed(fresh: Callable[[], str], owned: Callable[..., sa.Engine]) -> None:
    engine = owned()
    metadata.create_all(engine)
    with engine.connect() as conn:
        before = catalog(conn)
        conn.rollback()
        for drift in DRIFTS:
            conn.execute(sa.text(drift))
            assert catalog(conn) != before, drift
            conn.rollback()


def test_every_key_of_a_tenants_table_leads_with_the_tenant() -> None:
    found = []
    for table in metadata.tables.values():
        keys = [list(c.columns) for c in table.constraints if not isinstance(c, sa.CheckConstraint)]
        keys += [list(index.columns) for index in table.indexes]
        keys += [[e.column for e in c.elements] for c in table.foreign_key_constraints]
        found += [(table.name, key[0].name) for key in keys if key[0].name != "tenant_id"]
    # The one that finds the tenant of a delivery, and the one that keeps two tenants from having one name.
    assert sorted(found) == [("hooks", "token_hash"), ("tenants", "name")]


# -- every statement names its tenant ---------------------------------------------------------------------------

_TABLES = "|".join(sorted(name for name in metadata.tables))
_MENTION = re.compile(
    rf"(?:\b(FROM|JOIN|UPDATE|INTO|USING)\s+|,\s*)({_TABLES})\b(?!\.)(?:\s+AS\s+(\w+))?", re.IGNORECASE
)


def nameless(statement: str) -> list[str]:
    """Tables of tenants that `statement` touches without holding their tenant_id against a value."""
    wrong = []
    for word, table, alias in _MENTION.findall(statement):
        if word.upper() == "INTO":
            held = re.search(rf"INTO {table} \([^)]*\btenant_id\b", statement, re.IGNORECASE)
        elif not word and not re.search(rf"FROM [^()]*,\s*{table}\b", statement):
            continue  # a label in a list of columns
        else:
            name = alias or table
            held = re.search(rf"\b{name}\.tenant_id (?:=|IN|IS NOT DISTINCT)|= {name}\.tenant_id\b", statement)
        if not held:
            wrong.append(table)
    return wrong


def excused(statement: str) -> bool:
    """The exceptions: a hook found by its token, which tenants have due rows, a tenant found by its name."""
    if "hooks.token_hash = " in statement or "tenants.name = " in statement:
        return True
    return statement.startswith("SELECT tenants.tenant_id, ") and "tenants.status = " in statement


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT queues.name FROM queues WHERE queues.queue_id = %(q)s",
        "SELECT q.name, q.tenant_id FROM queues AS q WHERE q.queue_id = %(q)s",
        "UPDATE events SET state=%(s)s WHERE events.event_id = %(e)s",
        "DELETE FROM owed_turns WHERE owed_turns.owed_id = %(o)s",
        "INSERT INTO turns (queue_id, turn) VALUES (%(q)s, %(t)s)",
        "SELECT d.rule FROM decisions AS d JOIN agents ON agents.agent_id = d.agent_id WHERE d.tenant_id = %(t)s",
        "SELECT 1 FROM turns, queues WHERE turns.tenant_id = %(t)s",
    ],
)
def test_a_statement_without_its_tenant_would_be_noticed(statement: str) -> None:
    assert nameless(statement)


def test_every_statement_on_a_tenants_table_names_the_tenant_and_locks_the_agreed_way(
    make_rig: Callable[..., Rig], server: EmbeddedPostgres
) -> None:
    rig = make_rig(config=ABC + RULES)
    heard: set[str] = set()

    def hear(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        frame = sys._getframe()
        while frame.f_code is hear.__code__ or "sqlalchemy" in frame.f_code.co_filename:
            assert frame.f_back is not None
            frame = frame.f_back
        if not frame.f_code.co_filename.startswith(str(Path(__file__).parent.parent)):  # the product speaks, no test
            heard.add(statement)

    sa.event.listen(rig.runtime.engine, "before_cursor_execute", hear)
    a_day(rig)
    an_apps_day(rig)
    sa.event.remove(rig.runtime.engine, "before_cursor_execute", hear)
    touching = {s for s in heard if _MENTION.search(s)}
    assert {s: nameless(s) for s in touching if nameless(s) and not excused(s)} == {}
    assert {t for s in touching for _, t, _ in _MENTION.findall(s)} >= set(metadata.tables) - {"lead_identities"}
    locking = {s: re.findall(r"FOR (\w+(?: KEY)?(?: \w+)?)", s[s.rfind("FOR ") :])[0] for s in heard if " FOR " in s}
    assert set(locking.values()) <= {"NO KEY UPDATE", "SHARE"}
    many = {s for s in locking if "ANY (" in s or "LIMIT" in s}
    assert all("ORDER BY" in s for s in many)
    assert len(many) >= 5


def an_apps_day(rig: Rig) -> None:
    """An app is registered, an account connected and renewed, told of a lead, taken away."""
    app = AppRig(rig.runtime, rig.sandbox, "hubspot")
    app.register_app()
    app.add("connected")
    assert app.connect().status == 200
    app.install()
    app.assign()
    app.stale()
    app.assign()
    app.settle()
    tenants.uninstall(app.runtime, app.tenant)


def a_day(rig: Rig) -> None:
    """All that happens to an account: rules, turns, the same person again, pauses, refusals, hands, chores, removal."""
    rig.assign(emails=["kim@example.com"])
    rig.assign(emails=["kim@example.com"])
    rig.assign(source="Web")
    by_hand = rig.create()
    rig.wait_owner(by_hand)
    rig.settle_owners()
    rig.sandbox.set_owner(int(by_hand), int(BEN))
    rig.sandbox.clear_owner(int(by_hand))
    rig.wait_owner(by_hand)
    for agent in (ANA, BEN, CY):
        rig.pause(agent)
    held = rig.create()
    until(lambda: rig.standing(held)["state"] == "held")
    rig.pause(ANA, False)
    rig.wait_owner(held)
    rig.sandbox.add_inquiry(int(held), type="Inquiry")
    rig.sandbox.fault("lost_owner", method="PUT", times=2)
    rig.assign()
    rig.sandbox.fault("status", status=429, retry_after=0.1, method="PUT", times=1)
    rig.assign()
    rig.post(b"no JSON")
    rig.configure(WEIGHTS + RULES + "agents: {'12': {zone: Europe/Rome, caps: {week: 99, open: 99}}}\n")
    for flag in (Flag.ROTATION, Flag.WEIGHTS):
        flags.switch(rig.runtime, rig.tenant.tenant_id, flag, "off", "test")
        flags.switch(rig.runtime, rig.tenant.tenant_id, flag, "shadow", "test")
        rig.assign()
        flags.switch(rig.runtime, rig.tenant.tenant_id, flag, "on", "test", min_decisions=1)
    gone = rig.create()
    rig.wait_owner(gone)
    rig.settle_owners()
    rig.sandbox.delete_leads([int(gone)])
    until(lambda: rig.standing(gone)["state"] == "gone")
    with rig.runtime.engine.begin() as conn:  # every chore runs once more, over assignments that are old enough
        conn.execute(sa.text("UPDATE assignments SET assigned_at = assigned_at - interval '2 hours'"))
        conn.execute(sa.text("UPDATE chores SET due_at = now(), last_ok_at = NULL"))
    until(lambda: not rig.one("SELECT count(*) FROM chores WHERE tenant_id = :t AND last_ok_at IS NULL"))
    rig.audit()
    tenants.set_secret(rig.runtime, rig.tenant, "api_key", "fka_sandbox_owner")
    tenants.check(rig.runtime, rig.tenant)
    tenants.set_sending(rig.runtime, rig.tenant, True)
    tenants.uninstall(rig.runtime, rig.tenant)


# -- locks, in the source ---------------------------------------------------------------------------------------

#: Every function that locks rows, or statement that one function sends, and the table whose rows it locks. A new one is
#: a decision: say here what it is.
LOCKS = {
    ("routing.store", "HOLD_STILL"): "tenants",
    ("routing.store", "LOCK_LEADS"): "leads",
    ("routing.store", "LOCK_IDENTITIES"): "identities",
    ("routing.store", "LOCK_QUEUES"): "queues",
    ("routing.store", "lock_counters"): "agent_counters",
    ("connector.inbox", "_claiming"): "deliveries",
    ("connector.work", "_claiming"): "outbox",
    ("connector.work", "claim_chore"): "chores",
    ("connector.flags", "switch"): "tenants",
    ("connector.configuration", "hold"): "tenants",
    ("connector.returns", "_keep_to_the_limit"): "agents",
    ("connector.switches", "_set"): "agents",
    ("connector.apps", "join"): "app_accounts",
    ("connector.replay", "replay_one"): "events",
    ("connector.waiting", "_lock_alarms"): "alarms",
    ("connector.fairness", "_roll"): "fairness_marks",
    ("connector.turnless", "_mark"): "turnless_marks",
}


def sources() -> Iterator[tuple[str, str]]:
    """Every module of the product: its name and its text."""
    for package in (routing, adapters, connector):
        root = Path(package.__file__ or "").parent
        for path in sorted(root.rglob("*.py")):
            yield ".".join((package.__name__, *path.relative_to(root).with_suffix("").parts)), path.read_text()


def test_rows_are_locked_where_the_project_says_and_a_queues_row_in_one_function_alone() -> None:
    found, unexplained, written = set(), [], []
    for module, text in sources():
        lines = text.splitlines()
        nodes = list(ast.walk(ast.parse(text)))
        functions = {
            node.name: (node, "\n".join(lines[node.lineno - 1 : node.end_lineno]))
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        locking = {name: name for name, (_, body) in functions.items() if ".with_for_update(" in body}
        for node in nodes:
            if isinstance(node, ast.Assign) and ".with_for_update(" in ast.unparse(node):
                if node.col_offset:
                    continue  # part of a function
                (name,) = (target.id for target in node.targets if isinstance(target, ast.Name))
                (locking[name],) = (by for by, (_, body) in functions.items() if f"{name}(" in body)
        for name, by in locking.items():
            found.add((module, name))
            node, body = functions[by]
            said = f"{ast.get_docstring(node)} {' '.join(re.findall('#.*', body))}"
            if not re.search("lock|wait|turns", said, re.IGNORECASE):
                unexplained.append((module, name))
        code = re.sub(r'"""(?:.|\n)*?"""|#.*', "", text)
        if re.search(r"FOR (NO KEY )?UPDATE|FOR (KEY )?SHARE|LOCK TABLE|pg_advisory(?!_(un)?lock)", code):
            written.append(module)
    assert found == set(LOCKS)
    assert [key for key, table in LOCKS.items() if table == "queues"] == [("routing.store", "LOCK_QUEUES")]
    assert unexplained == []
    assert written == []


def test_the_revisions_are_one_line_in_the_order_of_the_capabilities() -> None:
    root = Path(versions.__file__ or "").parent
    texts = [path.read_text() for path in sorted(root.glob("r*.py"))]
    ids = [re.search(r'^revision = "(.*)"', text, re.MULTILINE) for text in texts]
    downs = [re.search(r'^down_revision = (?:"(.*)"|None)', text, re.MULTILINE) for text in texts]
    revisions = [found[1] for found in ids if found]
    assert tuple(revisions) == migrate.order()
    # A stage ends with its last revision; one that came in two parts has another before it.
    assert [r for r in revisions if r != "0005_skips" and r not in migrate.EXTRAS] == list(migrate.STAGES.values())
    assert [found[1] for found in downs if found] == [None, *revisions[:-1]]
    assert list(migrate.STAGES) == list(Flag)
    assert list(migrate.STAGES.values()) == sorted(migrate.STAGES.values())
