"""Logs as JSON lines with an allow-list: a field that is not named here never leaves the process.

Bodies, names, addresses, numbers, tokens and URLs are not on the list, so they cannot slip in by way of an error.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import MutableMapping
from typing import Any, cast

import structlog

ALLOWED = frozenset(
    {
        "event", "level", "timestamp", "tenant", "crm", "reason", "outcome", "status", "delivery", "event_id", "lead",
        "decision", "queue", "agent", "turn", "rule", "chore", "count", "ms", "seconds", "attempt", "error", "sqlstate",
        "flag", "mode", "revision", "version", "port", "threads", "where", "kind", "alarm", "signal", "pid",
    }
)  # fmt: skip


def _only_allowed(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {k: v for k, v in fields.items() if k in ALLOWED}


def configure(*, level: int = logging.INFO, stream: Any = None) -> None:
    """Send structured logs to `stream` (standard error). Third-party loggers pass only warnings, by name alone."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _only_allowed,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream or sys.stderr),
        # Not cached: a logger of a module that spoke before this call would stay with what stood then.
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    if not any(isinstance(handler, _Library) for handler in root.handlers):
        root.addHandler(_Library(logging.WARNING))


class _Library(logging.Handler):
    """A library's warning, by its logger's name alone: its text may hold a URL with a token in it, or worse."""

    def emit(self, record: logging.LogRecord) -> None:
        """Say that `record` came."""
        get("library").log(record.levelno, "library warning", kind=record.name)


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger. `name` tells readers of the code which part speaks."""
    # Not .bind(): that would settle on the configuration of this moment, which for a module's logger is none yet.
    return cast(structlog.typing.FilteringBoundLogger, structlog.get_logger(where=name))


def watch_threads() -> None:
    """From now on a thread that dies of an error says so here, without the traceback that Python would print."""
    threading.excepthook = lambda died: get("thread").error("thread died", **fault(died.exc_value or RuntimeError()))


def fault(error: BaseException) -> dict[str, str]:
    """What may be said of an unexpected error: its class, its SQLSTATE, and where. Never its text."""
    from connector.database import sqlstate

    said = {"error": type(error).__name__}
    if state := sqlstate(error):
        said["sqlstate"] = state
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None:
        said["where"] = f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}"
    return said
