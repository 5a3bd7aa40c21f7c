"""PostgreSQL as the ground gives way: no connection is free, or the server is stopped and started under load."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from connector.database import make_engine
from connector.embedded import EmbeddedPostgres
from connector.runtime import Runtime
from connector.sandbox import Sandbox
from connector.settings import Settings
from tests.rig import ANA, BEN, CY, Rig, captured_logs, http_send, until
from tests.senders import Senders

# -- no connection is free ----------------------------------------------------------------------------------------


@contextmanager
def small(database: Settings, size: int) -> Iterator[Rig]:
    """A rig whose web server has `size` connections, and the time to wait for one that operators get."""
    assert database.database_url is not None
    with ExitStack() as stack:
        engine = make_engine(database.database_url, pool_size=size)
        stack.callback(engine.dispose)
        rig = Rig(Runtime(database, engine), stack.enter_context(Sandbox(retry_scale=0.001)))
        stack.callback(rig.stop)
        rig.start_web()
        rig.add_tenant()
        rig.sandbox.webhook_faults(drop=1.0)
        yield rig


def test_with_every_connection_taken_the_crm_is_asked_within_a_second_to_come_again(database: Settings) -> None:
    with small(database, 2) as rig:
        body, url, took = rig.delivery("1"), rig.hook_url, []
        with rig.runtime.engine.connect(), rig.runtime.engine.connect():
            for _ in range(3):
                began = time.monotonic()
                answer = rig.post(body, url=url)
                took.append(time.monotonic() - began)
                assert answer.status == 503
                assert 0 < int(answer.headers["retry-after"]) <= 60
            ready = http_send(url.partition("/hooks/")[0] + "/readyz", b"", {}, "GET")
        assert ready.status == 503
        assert min(took) < 1.0, took  # the others may be those of a busy machine
        assert rig.post(body).status == 200
        assert len(rig.events()) == 1


# -- the server is stopped and started ----------------------------------------------------------------------------


def restart(server: EmbeddedPostgres, how: signal.Signals) -> None:
    """Stop the server, as ``pg_ctl stop -m fast`` (SIGINT) or ``-m immediate`` (SIGQUIT) do, and start it again."""
    pid = server.postmaster_pid()
    assert pid is not None
    os.kill(pid, how)
    until(lambda: server.postmaster_pid() != pid, what="the end of the server")
    server.ensure_running()
    assert server.postmaster_pid() not in (None, pid)


@pytest.mark.parametrize(
    ("leads", "rounds"),
    [(60, 1), pytest.param(600, 5, marks=[pytest.mark.proof, pytest.mark.timeout(300)])],
    ids=["once", "again and again"],
)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["fast", "immediate"])
def test_a_restart_of_postgres_under_load_loses_nothing_that_was_answered(
    make_rig: Callable[..., Rig], server: EmbeddedPostgres, how: signal.Signals, leads: int, rounds: int
) -> None:
    rig = make_rig()
    rig.sandbox.webhook_faults(drop=1.0)
    refs = [rig.create() for _ in range(leads)]
    with captured_logs() as logs:
        senders = Senders(rig, refs)
        for number in range(1, rounds + 1):
            until(lambda number=number: len(senders.answered) >= leads * number // (rounds + 2), 60, "some answers")
            told = senders.answered.copy()
            restart(server, how)
            kept = {e.ref for e in rig.events()}
            assert set(told) <= kept
        senders.wait()
        # Far sooner than the leases of what was in hand run out, which is a minute.
        until(lambda: all(rig.owners(refs)), 20, "an owner for every lead")
        rig.settle_owners()
    assert set(senders.statuses) <= {200, 503}
    assert sorted(senders.answered) == sorted(refs)
    assert Counter(rig.turns()) == dict.fromkeys((ANA, BEN, CY), leads // 3)
    assert all(row["old"] is None for row in rig.sandbox.owner_log())
    assert rig.most_tries() == 0
    assert '"level": "error"' not in logs.getvalue()
    rig.audit()
