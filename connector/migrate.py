"""Bringing the schema up to date, once, however many processes start together."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

import migrations
from connector.database import is_contention
from connector.errors import TurnlockError
from routing.model import Flag

#: The revision that brings each capability's tables and columns. Write-back has been there since the base.
STAGES = {
    Flag.WRITE_BACK: "0001_base",
    Flag.RULES: "0002_rules",
    Flag.ROTATION: "0003_rotation",
    Flag.WEIGHTS: "0004_weights",
    Flag.SKIPS: "0006_skips_more",
    Flag.HOUSEHOLDS: "0007_households",
    Flag.CAPACITY: "0008_capacity",
    Flag.CREDITS: "0009_credits",
    Flag.SETTLE: "0010_settle",
    Flag.TEAMS: "0017_teams",
}
#: Revisions that bring no capability of their own: for showing and keeping, for shadows and flags that are on for some
#: leads, for connecting, for telling more, for what CRMs let an account call, for agents' eyes, for a new database.
WHY, SHADOW, OAUTH, TELLING = "0011_why", "0012_shadow", "0013_oauth", "0014_telling"
LIMITS, WORDING, COUNTING = "0015_limits", "0016_wording", "0018_counting"
EXTRAS = (WHY, SHADOW, OAUTH, TELLING, LIMITS, WORDING, COUNTING)
_LOCK_KEY = 0x7475726E6C6F636B  # "turnlock"
_TRIES = 8


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def head() -> str:
    """The newest revision that this code knows."""
    newest = ScriptDirectory.from_config(_config()).get_current_head()
    assert newest is not None  # noqa: S101 - the package ships its revisions
    return newest


@cache
def order() -> tuple[str, ...]:
    """Every revision that this code knows, the first one first."""
    return tuple(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())[::-1]


def current(conn: sa.Connection) -> str | None:
    """The revision of the database, None before the first."""
    return MigrationContext.configure(conn).get_current_revision()


def reaches(conn: sa.Connection, revision: str) -> bool:
    """Whether the database stands at `revision` or beyond it."""
    found = current(conn)
    if found is None:
        return False
    known = order()
    # What is not known is of a newer Turnlock that has migrated on; revisions only add, so all of ours are there.
    return found not in known or known.index(revision) <= known.index(found)


def stages(conn: sa.Connection) -> frozenset[Flag]:
    """The capabilities whose tables and columns the database has."""
    found, known = current(conn), order()
    if found is None:
        return frozenset()
    reached = known.index(found) if found in known else len(known)
    return frozenset(flag for flag, needed in STAGES.items() if known.index(needed) <= reached)


def half_way(conn: sa.Connection) -> bool:
    """Whether the schema has a part of a stage only: a tenant may have that stage on from before it grew."""
    revision = current(conn)
    return revision in order() and revision not in (*STAGES.values(), *EXTRAS)


def migrate(
    engine: sa.Engine, revision: str = "head", *, tries: int = _TRIES, lock_timeout: str = "2s"
) -> tuple[str | None, str | None]:
    """Upgrade to `revision`; gives the revisions before and after. Needs a direct connection, not a pooler's.

    A table that another session holds is waited for `tries` times, `lock_timeout` each; then :class:`TurnlockError`,
    and the schema stands at a whole revision. A database of a newer Turnlock is left as it is.
    """
    with engine.connect() as conn:
        conn.execute(sa.text("SET statement_timeout = 0"))
        # One migrates, the others wait here and then find nothing to do. Advisory, because there is no row to lock
        # before the first revision; of the session, because each revision is a transaction of its own.
        conn.execute(sa.text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK_KEY})
        conn.commit()
        try:
            # A revision that queues behind a long transaction would make every later query queue behind it.
            conn.execute(sa.text("SELECT set_config('lock_timeout', :wait, false)"), {"wait": lock_timeout})
            conn.execute(sa.text("SET statement_timeout = '60s'"))
            conn.commit()
            before = current(conn)
            conn.commit()
            config = _config()
            if before is not None and before not in order():
                return before, before  # revisions only add: this code runs on what a newer one made
            config.attributes["connection"] = conn
            for left in reversed(range(tries)):
                try:
                    command.upgrade(config, revision)
                    conn.commit()
                    break
                except sa.exc.DBAPIError as error:
                    conn.rollback()
                    if not is_contention(error) or not left:
                        raise (
                            TurnlockError(
                                "the schema could not be upgraded because another session holds its tables; "
                                "end long transactions and run `turnlock migrate` again"
                            )
                            if is_contention(error)
                            else error
                        ) from None
                    time.sleep(0.5)
            return before, current(conn)
        finally:
            conn.rollback()
            conn.execute(sa.text("SELECT pg_advisory_unlock(:key)"), {"key": _LOCK_KEY})
            conn.commit()
