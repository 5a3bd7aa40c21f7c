"""Errors as texts for the terminal: what is wrong and how to mend it. Holds no secret and nobody's data."""

from __future__ import annotations

import errno
import os

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from adapters.outcome import CrmError
from adapters.registry import UnknownAdapter
from connector import log
from connector.config_yaml import ConfigProblems
from connector.database import is_contention, is_outage, sqlstate
from connector.errors import TurnlockError
from connector.manifest import ManifestError

# What libpq says when no connection comes about, and the one cause and fix that it means.
_CONNECT = (
    ("password authentication failed", "it refuses the user or the password"),
    ("no password supplied", "it asks for a password and the address has none"),
    ("no pg_hba.conf entry", "it does not let this machine in (pg_hba.conf)"),
    ("does not exist", "it has no such database or user"),
    ("refused", "nothing listens there"),
    ("resolve host", "the host's name has no address"),
    ("translate host", "the host's name has no address"),
    ("timeout", "there is no answer in time"),
    ("starting up", "it is starting up; try again in a moment"),
    ("shutting down", "it is shutting down"),
)
_MISSING = ("42P01", "42703")  # undefined table, undefined column
_DENIED = "42501"


def text_of(error: Exception) -> str:
    """What to print for `error`."""
    if isinstance(error, ConfigProblems):
        return "\n".join([f"{error}; nothing was applied:", *(f"  {problem}" for problem in error.problems)])
    if isinstance(error, (TurnlockError, ManifestError, CrmError, UnknownAdapter)):
        return str(error)
    if isinstance(error, SQLAlchemyError):
        return _database(error)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return "the port is taken by another program; end that, or set TURNLOCK_PORT to another one"
    said = ", ".join(log.fault(error).values())
    return f"unexpected error ({said}); this is a defect of Turnlock, please report this line"


def _database(error: SQLAlchemyError) -> str:
    state = sqlstate(error)
    if is_outage(error):
        return f"the database {_where()}cannot be used: {_cause(error)}; start it, or correct TURNLOCK_DATABASE_URL"
    if is_contention(error):
        return "somebody else holds what this needs; try again in a moment"
    if state in _MISSING:
        return "the database lacks tables or columns of this version; run `turnlock migrate`"
    if state == _DENIED:
        return (
            "the user of TURNLOCK_DATABASE_URL lacks rights on the tables; grant them, "
            "and set TURNLOCK_MIGRATE_URL to the owner for `turnlock migrate`"
        )
    said = ", ".join(log.fault(error).values())
    return f"unexpected database error ({said}); this is a defect of Turnlock, please report this line"


def _where() -> str:
    """Where the database should be, without user and password."""
    text = os.environ.get("TURNLOCK_DATABASE_URL")
    if not text:
        return ""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        return ""
    # An "@" in the password that was not escaped ends up in what looks like the host.
    host = (url.host or "").rpartition("@")[2]
    return f"at {host or 'the local socket'}{f':{url.port}' if url.port else ''}/{url.database or ''} "


def _cause(error: SQLAlchemyError) -> str:
    said = str(getattr(error, "orig", None) or error)
    return next((cause for words, cause in _CONNECT if words in said), "the connection fails")
