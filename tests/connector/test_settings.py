"""Settings and server: everything wrong is said at once, each with its fix, and no secret is ever shown."""

from __future__ import annotations

from pathlib import Path

import certifi
import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from connector import process
from connector.database import check_server
from connector.embedded import EmbeddedPostgres
from connector.errors import SettingsError
from connector.settings import Settings, from_environment

KEY, OLDER = Fernet.generate_key().decode(), Fernet.generate_key().decode()
GOOD = {"TURNLOCK_SECRET_KEYS": KEY}


def problems(environment: dict[str, str]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        from_environment(environment)
    first, *rest = str(caught.value).splitlines()
    assert first == "Turnlock cannot start:"
    return [line.strip() for line in rest]


def test_a_key_is_all_that_must_be_set() -> None:
    found = from_environment(GOOD)
    assert found.database_url is None
    assert found.public_url == "http://127.0.0.1:8080"
    assert found.secret_keys == (KEY,)
    assert not found.allow_private_hosts


def test_everything_that_is_set_is_taken() -> None:
    found = from_environment(
        {
            "TURNLOCK_SECRET_KEYS": f" {KEY} , {OLDER},",
            "TURNLOCK_DATABASE_URL": "postgres://u:p@db.example.com/t",
            "TURNLOCK_MIGRATE_URL": "postgresql://o:p@db.example.com/t?sslmode=require",
            "TURNLOCK_LISTEN_URL": "postgresql+psycopg://u:p@db.example.com:5433/t",
            "TURNLOCK_PUBLIC_URL": "https://hooks.example.com/turnlock/",
            "TURNLOCK_ALLOW_PRIVATE_HOSTS": "Yes",
            "TURNLOCK_HOST": "::",
            "TURNLOCK_PORT": "9000",
            "TURNLOCK_WEB_THREADS": "16",
            "TURNLOCK_DECIDERS": "4",
            "TURNLOCK_SENDERS": "12",
            "TURNLOCK_BODY_RETENTION_DAYS": "7",
            "TURNLOCK_HOME": "/srv/turnlock",
            "TURNLOCK_CA_FILE": certifi.where(),
        }
    )
    assert found == Settings(
        database_url="postgresql+psycopg://u:p@db.example.com/t",
        migrate_url="postgresql+psycopg://o:p@db.example.com/t?sslmode=require",
        listen_url="postgresql+psycopg://u:p@db.example.com:5433/t",
        public_url="https://hooks.example.com/turnlock",
        home=Path("/srv/turnlock"),
        ca_file=certifi.where(),
        secret_keys=(KEY, OLDER),
        allow_private_hosts=True,
        host="::",
        port=9000,
        web_threads=16,
        deciders=4,
        senders=12,
        body_retention_days=7,
    )


def test_what_is_set_to_nothing_is_not_set() -> None:
    names = ("DATABASE_URL", "MIGRATE_URL", "LISTEN_URL", "PUBLIC_URL", "HOME", "HOST", "PORT", "WEB_THREADS")
    more = ("DECIDERS", "SENDERS", "BODY_RETENTION_DAYS", "ALLOW_PRIVATE_HOSTS", "CA_FILE")
    assert from_environment(GOOD | {f"TURNLOCK_{name}": "" for name in names + more}) == from_environment(GOOD)


def test_all_problems_come_at_once_each_with_its_fix() -> None:
    found = problems(
        {
            "TURNLOCK_SECRET_KEYS": f"canary-key,{KEY}",
            "TURNLOCK_DATABASE_URL": "mysql://canary-user:canary-password@db.example.com/t",
            "TURNLOCK_MIGRATE_URL": "postgresql://canary-user:canary-password@db.example.com:port/t",
            "TURNLOCK_LISTEN_URL": "canary-nonsense",
            "TURNLOCK_PUBLIC_URL": "hooks.example.com",
            "TURNLOCK_PORT": "70000",
            "TURNLOCK_WEB_THREADS": "0",
            "TURNLOCK_DECIDERS": "three",
            "TURNLOCK_SENDERS": "-1",
            "TURNLOCK_BODY_RETENTION_DAYS": "9" * 5000,
            "TURNLOCK_ALLOW_PRIVATE_HOSTS": "ture",
            "TURNLOCK_CA_FILE": __file__,
        }
    )
    where = {line.partition(":")[0] for line in found}
    assert where == {
        f"TURNLOCK_{name}"
        for name in ("SECRET_KEYS", "DATABASE_URL", "MIGRATE_URL", "LISTEN_URL", "PUBLIC_URL", "PORT", "WEB_THREADS",
                     "DECIDERS", "SENDERS", "BODY_RETENTION_DAYS", "ALLOW_PRIVATE_HOSTS", "CA_FILE")
    }  # fmt: skip
    assert len(found) == len(where)
    assert all(";" in line for line in found), "a problem without its fix"
    assert "canary" not in "".join(found)
    assert max(map(len, found)) < 300


@pytest.mark.parametrize(
    "keys",
    ["", " , ", "short", "é" * 44, KEY[:-1], f"{KEY};{OLDER}"],
    ids=["none", "blank", "short", "not ASCII", "cut", "wrong separator"],  # a key is new in every process
)
def test_a_missing_or_wrong_sealing_key_says_how_to_make_one(keys: str) -> None:
    (found,) = problems({"TURNLOCK_SECRET_KEYS": keys})
    assert "Fernet.generate_key()" in found
    assert keys.strip(" ,") == "" or keys not in found


@pytest.mark.parametrize(
    "url",
    ["ftp://x.example.com", "//x.example.com", "https://", "https://[::1", "https://x.example.com/?a=1",
     "https://x.example.com/#a", "https://x.example.com:port", "https://user:pass@x.example.com", "https://x .com"],
)  # fmt: skip
def test_a_public_address_that_no_crm_could_call_is_refused(url: str) -> None:
    (found,) = problems(GOOD | {"TURNLOCK_PUBLIC_URL": url})
    assert found.startswith("TURNLOCK_PUBLIC_URL: ")


def test_settings_never_show_a_secret() -> None:
    secret = "canary-password"
    found = from_environment(
        GOOD | {f"TURNLOCK_{name}_URL": f"postgresql://u:{secret}@h/d" for name in ("DATABASE", "MIGRATE", "LISTEN")}
    )
    for shown in (repr(found), str(found), f"{found}"):
        assert secret not in shown
        assert KEY not in shown


# -- the server -------------------------------------------------------------------------------------------------


def test_a_server_that_could_lose_what_it_acknowledged_is_refused_with_everything_wrong(tmp_path: Path) -> None:
    unsafe = {
        "fsync": "off",
        "full_page_writes": "off",
        "synchronous_commit": "local",
        "synchronous_standby_names": "nobody",
    }
    with EmbeddedPostgres(tmp_path / "postgres", settings=unsafe) as server:
        settings = Settings(database_url=server.app_url, migrate_url=server.owner_url, secret_keys=(KEY,))
        with pytest.raises(SettingsError) as caught, process.open_runtime(settings, upgrade=True):
            pytest.fail("it was accepted")
        engine = sa.create_engine(server.owner_url, poolclass=sa.NullPool)
        with engine.connect() as conn:
            assert not sa.inspect(conn).get_table_names(), "it was touched before it was refused"
    text = str(caught.value)
    assert "fsync: is off; a crash could lose accepted leads. Set fsync = on" in text
    assert "full_page_writes: is off" in text
    assert "synchronous_commit: is local; an accepted lead could be lost. Set synchronous_commit = on" in text


@pytest.mark.parametrize("value", ["off", "local", "remote_write", "on"])
def test_a_role_that_does_not_wait_for_the_disk_is_refused(database: Settings, value: str) -> None:
    engine = sa.create_engine(database.database_url or "", poolclass=sa.NullPool)
    with engine.connect() as conn:
        conn.execute(sa.text(f"SET synchronous_commit = {value}"))
        if value == "off":
            with pytest.raises(SettingsError, match="synchronous_commit: is off"):
                check_server(conn)
        else:
            check_server(conn)  # without a standby these wait for the own disk, as on does
    engine.dispose()


def test_a_database_without_a_schema_says_what_to_run(server: EmbeddedPostgres, request: pytest.FixtureRequest) -> None:
    server.create_database("turnlock_empty")
    request.addfinalizer(lambda: server.drop_database("turnlock_empty"))
    app, owner = (
        sa.make_url(url).set(database="turnlock_empty").render_as_string(hide_password=False)
        for url in (server.app_url, server.owner_url)
    )
    settings = Settings(database_url=app, migrate_url=owner, secret_keys=(KEY,))
    with (
        pytest.raises(SettingsError, match="no schema yet; run `turnlock migrate`"),
        process.open_runtime(settings, upgrade=False),
    ):
        pytest.fail("it was accepted")
    with process.open_runtime(settings, upgrade=True) as runtime, runtime.engine.connect() as conn:
        assert runtime.stages(conn)
