"""A lead that comes alone is made ready for the next step while the one before is committed, and not a step further."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
import sqlalchemy as sa

from tests.rig import BEN, Rig, until

_HELD = 7001
_WAITS = f"PERFORM pg_advisory_xact_lock_shared({_HELD})"
_COMMITTING = "state = 'active' AND wait_event = 'advisory' AND datname = current_database()"


class Commits:
    """What becomes of the commits that are held."""

    def __init__(self, conn: psycopg.Connection) -> None:
        self._conn = conn

    def next(self, what: str) -> None:
        """From now on each does this, in PL/pgSQL; those that wait go on waiting."""
        self._conn.execute(
            "CREATE OR REPLACE FUNCTION when_committed() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN {what}; RETURN NULL; END $$"
        )

    def go(self) -> None:
        """Those that wait go on."""
        self._conn.execute("SELECT pg_advisory_unlock_all()")

    def lose(self) -> None:
        """The session that waits is ended."""
        self._conn.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {_COMMITTING}")


@contextmanager
def commits_held(rig: Rig, table: str = "events") -> Iterator[Commits]:
    """Every commit of new rows of a table waits until this ends."""
    url = sa.make_url(rig.runtime.settings.migrate_url or "").set(drivername="postgresql")
    with psycopg.connect(url.render_as_string(hide_password=False), autocommit=True) as conn:
        commits = Commits(conn)
        commits.next(_WAITS)
        conn.execute(
            f"CREATE CONSTRAINT TRIGGER held AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION when_committed()"
        )
        conn.execute(f"SELECT pg_advisory_lock({_HELD})")
        yield commits


def committing(rig: Rig) -> bool:
    """Whether a commit is held."""
    return bool(rig.one(f"SELECT count(*) FROM pg_stat_activity WHERE {_COMMITTING}"))


@pytest.fixture
def alone(make_rig: Callable[..., Rig]) -> Rig:
    """A CRM whose webhooks the test sends itself, and whose leads have to be read."""
    rig = make_rig("followupboss")
    rig.sandbox.webhook_faults(drop=1.0)
    rig.wait_chores()
    return rig


def leads_read(rig: Rig, ref: str) -> int:
    """How often the CRM was asked for this lead."""
    return sum(call["method"] == "GET" and ref in f"{call['path']}?{call['query']}" for call in rig.sandbox.call_log())


def test_nothing_is_decided_before_its_delivery_is_committed(alone: Rig) -> None:
    ref = str(alone.sandbox.create_lead())
    with ThreadPoolExecutor(1) as pool, commits_held(alone):
        answer = pool.submit(alone.post, alone.delivery(ref), event=f"evt-{ref}")
        until(lambda: leads_read(alone, ref), what="the CRM was asked")
        assert committing(alone)
        assert not answer.done()
        assert alone.turns() == []
        assert alone.one("SELECT count(*) FROM leads WHERE tenant_id = :t") == 0
    assert answer.result().status == 200
    assert alone.wait_owner(ref) is not None
    alone.settle()
    assert len(alone.turns()) == 1
    alone.audit()


def test_a_commit_that_is_lost_is_decided_once_when_it_comes_again(alone: Rig) -> None:
    ref = str(alone.sandbox.create_lead())
    with ThreadPoolExecutor(1) as pool, commits_held(alone) as commits:
        answer = pool.submit(alone.post, alone.delivery(ref), event=f"evt-{ref}")
        until(lambda: leads_read(alone, ref), what="the CRM was asked")
        until(lambda: committing(alone))
        commits.next("NULL")
        commits.lose()
        assert answer.result().status == 200
    assert alone.wait_owner(ref) is not None
    alone.settle()
    assert len(alone.turns()) == 1
    alone.audit()


def test_what_is_not_committed_after_all_leaves_nothing_behind(alone: Rig) -> None:
    ref = str(alone.sandbox.create_lead())
    with ThreadPoolExecutor(1) as pool, commits_held(alone) as commits:
        answer = pool.submit(alone.post, alone.delivery(ref), event=f"evt-{ref}")
        until(lambda: leads_read(alone, ref), what="the CRM was asked")
        until(lambda: committing(alone))
        commits.next("RAISE 'no more'")
        commits.lose()
        assert answer.result().status == 503
        assert alone.one("SELECT count(*) FROM leads WHERE tenant_id = :t") == 0
        assert alone.turns() == []
        assert alone.events() == []
        commits.next("NULL")
    assert alone.post(alone.delivery(ref), event=f"evt-{ref}").status == 200
    assert alone.wait_owner(ref) is not None
    alone.settle()
    assert len(alone.turns()) == 1
    alone.audit()


@pytest.mark.parametrize("status", [404, 503], ids=["not shown", "not read"])
def test_what_cannot_be_read_meanwhile_goes_back_once_it_is_committed(alone: Rig, status: int) -> None:
    ref = str(alone.sandbox.create_lead())
    alone.sandbox.fault("status", status=status, times=1, method="GET", path="/people")
    with ThreadPoolExecutor(1) as pool, commits_held(alone):
        answer = pool.submit(alone.post, alone.delivery(ref), event=f"evt-{ref}")
        until(lambda: leads_read(alone, ref), what="the CRM was asked")
        time.sleep(0.2)  # whoever gave it back by now would have found nothing to give back
        assert committing(alone)
    assert answer.result().status == 200
    assert alone.wait_owner(ref) is not None
    alone.settle()
    assert len(alone.turns()) == 1
    alone.audit()


def before_the_write(rig: Rig, ref: str) -> bool:
    """Whether the lead was read for its decision, and once more to see that nobody was quicker."""
    return leads_read(rig, ref) == 2


def test_nothing_is_written_to_the_crm_before_the_decision_is_committed(alone: Rig) -> None:
    ref = str(alone.sandbox.create_lead())
    with commits_held(alone, "outbox"):
        assert alone.post(alone.delivery(ref), event=f"evt-{ref}").status == 200
        until(lambda: before_the_write(alone, ref), what="the CRM was asked")
        until(lambda: committing(alone))
        assert alone.owner_writes() == []
    assert alone.wait_owner(ref) is not None
    alone.settle()
    assert len(alone.owner_writes(ref)) == len(alone.turns()) == 1
    alone.audit()


def test_what_was_read_ahead_is_not_read_again(alone: Rig) -> None:
    ref = str(alone.sandbox.create_lead())
    assert alone.post(alone.delivery(ref), event=f"evt-{ref}").status == 200
    assert alone.wait_owner(ref) is not None
    alone.settle()
    assert before_the_write(alone, ref)


def test_a_crm_that_asked_to_wait_is_not_asked_ahead(alone: Rig) -> None:
    ref = str(alone.sandbox.create_lead())
    # Over, and whoever calls first looks for the others whether it is.
    alone.sql("INSERT INTO breakers VALUES (:t, 'all', 1, 'crm_asked_to_wait', clock_timestamp() - interval '1 s')")
    with commits_held(alone, "outbox"):
        assert alone.post(alone.delivery(ref), event=f"evt-{ref}").status == 200
        until(lambda: committing(alone))
        time.sleep(0.2)
        assert leads_read(alone, ref) == 1
    assert alone.wait_owner(ref) is not None
    alone.settle()
    alone.audit()


def test_a_decision_is_on_the_disk_before_it_is_told_of(alone: Rig) -> None:
    ref = str(alone.sandbox.create_lead())
    with commits_held(alone, "outbox") as commits:
        commits.next("IF current_setting('synchronous_commit') <> 'on' THEN RAISE 'only in memory'; END IF")
        assert alone.post(alone.delivery(ref), event=f"evt-{ref}").status == 200
        assert alone.wait_owner(ref) is not None
    alone.settle()
    assert alone.most_tries() == 0
    alone.audit()


def test_whoever_takes_the_lead_while_the_commit_hangs_keeps_it(alone: Rig) -> None:
    ref = str(alone.sandbox.create_lead())
    with commits_held(alone, "outbox"):
        assert alone.post(alone.delivery(ref), event=f"evt-{ref}").status == 200
        until(lambda: before_the_write(alone, ref), what="the CRM was asked")
        until(lambda: committing(alone))
        assert alone.sandbox.set_owner(int(ref), int(BEN))
        time.sleep(0.2)  # what was read ahead is old by now
    alone.settle()
    assert alone.owner(ref) == BEN
    assert alone.owner_writes(ref) == []
    assert alone.standing(ref)["state"] == "owned"
    alone.audit()


def test_a_crm_that_asks_to_wait_ahead_of_the_commit_is_not_asked_again_after_it(alone: Rig) -> None:
    ref = str(alone.sandbox.create_lead())
    alone.sandbox.fault("status", status=429, retry_after="2", skip=1, times=1, method="GET", path="/people")
    since = len(alone.sandbox.call_log())
    with commits_held(alone, "outbox"):
        assert alone.post(alone.delivery(ref), event=f"evt-{ref}").status == 200
        until(lambda: before_the_write(alone, ref), what="the CRM was asked")
        until(lambda: committing(alone))
        time.sleep(0.2)
    assert alone.wait_owner(ref) is not None
    alone.settle()
    _, told, again, *_ = alone.sandbox.call_log(since)
    assert told["status"] == 429
    assert again["mono"] - told["mono"] >= 2.0
    alone.audit()


def test_a_decision_whose_commit_is_lost_is_never_written(alone: Rig) -> None:
    ref = str(alone.sandbox.create_lead())
    with commits_held(alone, "outbox") as commits:
        assert alone.post(alone.delivery(ref), event=f"evt-{ref}").status == 200
        until(lambda: before_the_write(alone, ref), what="the CRM was asked")
        until(lambda: committing(alone))
        commits.lose()
        until(lambda: leads_read(alone, ref) >= 4, what="it was decided again")
        assert alone.owner_writes() == []
        commits.next("NULL")
    assert alone.wait_owner(ref) is not None
    alone.settle()
    assert len(alone.owner_writes(ref)) == len(alone.turns()) == 1
    alone.audit()


def test_a_worker_that_stops_meanwhile_leaves_the_write_to_the_next(alone: Rig) -> None:
    ref = str(alone.sandbox.create_lead())
    with ThreadPoolExecutor(1) as pool, commits_held(alone, "outbox") as commits:
        assert alone.post(alone.delivery(ref), event=f"evt-{ref}").status == 200
        until(lambda: before_the_write(alone, ref), what="the CRM was asked")
        until(lambda: committing(alone))
        stopped = pool.submit(alone.stop_worker)
        with pytest.raises(TimeoutError):
            stopped.result(0.2)
        assert alone.owner_writes() == []
        commits.go()
        stopped.result()
    alone.start_worker()
    assert alone.wait_owner(ref) is not None
    alone.settle()
    assert len(alone.owner_writes(ref)) == len(alone.turns()) == 1
    alone.audit()


def test_an_agent_is_asked_for_again_only_once_the_decision_is_committed(alone: Rig) -> None:
    alone.sql("UPDATE agents SET seen_at = seen_at - interval '5 minutes' WHERE tenant_id = :t")
    ref, since = str(alone.sandbox.create_lead()), len(alone.sandbox.call_log())
    with commits_held(alone, "outbox"):
        assert alone.post(alone.delivery(ref), event=f"evt-{ref}").status == 200
        until(lambda: before_the_write(alone, ref), what="the CRM was asked")
        until(lambda: committing(alone))
        assert {call["path"] for call in alone.sandbox.call_log(since)} == {"/v1/people"}
    assert alone.wait_owner(ref) is not None
    alone.settle()
    assert len(alone.owner_writes(ref)) == 1
