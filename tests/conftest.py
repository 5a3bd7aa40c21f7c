"""Fixtures that many tests share: one PostgreSQL for the run, a fresh migrated database per test, a rig on it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet
from hypothesis import HealthCheck, settings

from connector import migrate, worker
from connector.database import make_engine
from connector.embedded import EmbeddedPostgres
from connector.runtime import Runtime
from connector.sandbox import Sandbox
from connector.settings import Settings
from tests import homes
from tests.rig import Rig
from tests.serving import Serving

# Machines are shared: an example's time says nothing about the code. What must pass before a change lands judges that
# change: the same examples each time. Who looks for new ones adds --hypothesis-profile=seek.
settings.register_profile("turnlock", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("seek", settings.get_profile("turnlock"), derandomize=False, print_blob=True)
settings.load_profile("turnlock")

TEMPLATE = "turnlock_template"
# Room for eight processes at once, each with a connection per thread that is busy and one to listen on, beside a rig.
_SERVER = {"max_connections": "200"}
_numbers = itertools.count(1)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three on two cores: a third of the time of a test goes in waiting. What takes long is busy all the time."""
    cores = os.cpu_count() or 1
    return cores if config.option.markexpr == "proof" else cores + cores // 2


def pytest_sessionfinish(session: pytest.Session) -> None:
    """pytest removes its folders by itself, but not what lies outside of them."""
    homes.forget(session.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def _no_pauses_for_manners() -> Iterator[None]:
    """What the product waits for out of politeness alone is waited for only in the tests of it: idle looks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "HEARING", 0.02)
        patch.setattr(worker, "LOOK", 0.1)
        yield


def _fast_folder() -> str | None:
    """Where the data of the server lie: in memory where there is plenty, for the tests wait for its disk all the time.

    Nothing is tested less: no test takes the power away, and the server itself works as on a disk.
    """
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 6 << 30 else None


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedPostgres]:
    """A real PostgreSQL with the safety settings of production, and a migrated template database in it."""
    with (
        homes.passing(_fast_folder()) as folder,
        EmbeddedPostgres(folder / "postgres", settings=_SERVER) as running,
    ):
        running.create_database(TEMPLATE)
        owner = sa.create_engine(_of(running.owner_url, TEMPLATE), poolclass=sa.NullPool)
        migrate.migrate(owner)
        owner.dispose()
        yield running


def _of(url: str, database: str) -> str:
    return sa.make_url(url).set(database=database).render_as_string(hide_password=False)


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[Settings]:
    """A fresh, migrated database: its settings, with a sealing key and the sandbox's addresses allowed."""
    name = f"turnlock_test_{next(_numbers)}"
    server.create_database(name, TEMPLATE)
    yield Settings(
        database_url=_of(server.app_url, name),
        migrate_url=_of(server.owner_url, name),
        secret_keys=(Fernet.generate_key().decode(),),
        allow_private_hosts=True,
        deciders=3,
        senders=6,
    )
    server.drop_database(name)


class _Compiled(dict[Any, Any]):
    """Statements compiled in one test serve the next, whose engine is another on the same server by the same driver.

    SQLAlchemy looks by dialect object, which is one per engine, and by what the statement is.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key[1:], default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        super().__setitem__(key[1:], compiled)


_compiled = _Compiled()


@pytest.fixture
def runtime(database: Settings) -> Iterator[Runtime]:
    """A runtime on a fresh database."""
    assert database.database_url is not None
    engine = make_engine(database.database_url, pool_size=30, pool_timeout=5)
    yield Runtime(database, engine.execution_options(compiled_cache=_compiled))
    engine.dispose()


@pytest.fixture
def make_rig(runtime: Runtime) -> Iterator[Callable[..., Rig]]:
    """Builds rigs: ``make_rig(crm="generic", worker=False, config=..., **sandbox settings)``."""
    with ExitStack() as stack:

        def make(crm: str = "followupboss", *, worker: bool = True, config: str | None = None, **sandbox: Any) -> Rig:
            running = stack.enter_context(Sandbox(retry_scale=0.001, **sandbox))
            rig = Rig(runtime, running, crm)
            stack.callback(rig.stop)
            rig.start_web()
            rig.add_tenant(**({"config": config} if config is not None else {}))
            if worker:
                rig.start_worker()
            return rig

        yield make


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """Follow Up Boss's sandbox with queue "All" of Ana, Ben, Cy; everything runs."""
    return make_rig()


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    """Starts processes: ``serve(rig, worker=True)``; ``ready=False`` does not wait for it. None outlives the test."""
    started: list[Serving] = []

    def start(rig: Rig, *, ready: bool = True, **how: Any) -> Serving:
        started.append(Serving(rig, **how))
        if ready:
            started[-1].wait_ready()
        return started[-1]

    yield start
    for one in started:
        one.kill()
