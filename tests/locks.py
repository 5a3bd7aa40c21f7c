"""Sessions of somebody else that hold rows of a rig, and who waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests.rig import Rig


@contextmanager
def queue_held(rig: Rig, name: str = "All", dsn: str | None = None) -> Iterator[psycopg.Connection]:
    """Another session, with no time-outs of ours, holds the queue's row; gives its connection."""
    url = rig.runtime.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn or url) as conn:
        conn.execute("SET idle_in_transaction_session_timeout = 0")
        held = "SELECT queue_id FROM queues WHERE tenant_id = %s AND name = %s FOR UPDATE"
        assert conn.execute(held, [rig.tenant.tenant_id, name]).fetchone()
        yield conn
        conn.rollback()


def waiting_for_locks(rig: Rig) -> int:
    """How many sessions wait for a lock at this instant."""
    return int(
        rig.one("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
    )
