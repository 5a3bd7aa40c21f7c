"""From settings to a running process: database, schema, runtime, web server, worker, and a clean end."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import sqlalchemy as sa
from waitress import wasyncore
from waitress.server import create_server

from connector import log, migrate, tenants
from connector.app import create_app
from connector.database import check_server, make_engine
from connector.embedded import EmbeddedPostgres
from connector.errors import SettingsError
from connector.runtime import Runtime
from connector.settings import Settings
from connector.wake import Notifier
from connector.worker import DRAIN, Worker

# A body is read by us under MAX_BODY; the server's own limit stands a little above, so that ours answers.
_SERVER_BODY_LIMIT = 2 * 1024 * 1024
# A client that stops sending in the middle of a request holds a channel, not a thread: this long at most.
_CHANNEL_TIMEOUT = 30

_log = log.get("process")


@contextmanager
def open_runtime(settings: Settings, *, upgrade: bool, threads: int = 4) -> Iterator[Runtime]:
    """A runtime on the configured database, or the embedded one. `upgrade` brings the schema up to date first.

    `threads` says how many of this process use the database at once. Raises :class:`SettingsError` for a server that
    could lose what it acknowledged, or a schema older than this code when it may not be upgraded.
    """
    embedded: EmbeddedPostgres | None = None
    if settings.database_url is None:
        embedded = EmbeddedPostgres(settings.home)
        embedded.start()
        url, owner_url = embedded.app_url, embedded.owner_url
    else:
        url = settings.database_url
        owner_url = settings.migrate_url or url
    engine = make_engine(url, pooled=settings.listen_url is not None, pool_size=threads)
    try:
        with engine.connect() as conn:
            check_server(conn)
        if upgrade:
            owner = sa.create_engine(owner_url, poolclass=sa.NullPool)
            before, after = migrate.migrate(owner)
            owner.dispose()
            if before != after:
                _log.info("migrated", revision=after)
        with engine.connect() as conn:
            if migrate.current(conn) is None:
                raise SettingsError("the database has no schema yet; run `turnlock migrate`")
            if migrate.half_way(conn):
                raise SettingsError("the schema stands in the middle of a stage; run `turnlock migrate`")
        runtime = Runtime(settings, engine)
        if embedded is not None:
            runtime.database_lost = _restarter(embedded)
        yield runtime
    finally:
        engine.dispose()
        if embedded is not None:
            embedded.stop()


def _restarter(embedded: EmbeddedPostgres) -> _Restart:
    return _Restart(embedded)


class _Restart:
    """Brings a dead embedded server back; one thread at a time, the others go on waiting."""

    def __init__(self, embedded: EmbeddedPostgres) -> None:
        self._embedded = embedded
        self._lock = threading.Lock()

    def __call__(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._embedded.ensure_running():
                _log.warning("embedded database restarted")
        except Exception as error:  # noqa: BLE001 - the next outage tries again
            _log.error("embedded database cannot start", **log.fault(error))
        finally:
            self._lock.release()


class Web:
    """The web server in a thread of its own."""

    def __init__(self, runtime: Runtime, *, host: str, port: int, threads: int) -> None:
        self._server = create_server(
            create_app(runtime),
            host=host,
            port=port,
            threads=threads,
            ident=None,
            clear_untrusted_proxy_headers=True,
            max_request_body_size=_SERVER_BODY_LIMIT,
            channel_timeout=_CHANNEL_TIMEOUT,
            connection_limit=1000,
        )
        self.port: int = self._server.effective_port
        self._thread = threading.Thread(target=self._server.run, name="web", daemon=True)

    def start(self) -> None:
        """Serve in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Answer what is in hand, take nothing more."""
        # Only the server's own thread may touch its sockets, and it hears of an answer by the trigger: closed first,
        # as ``close()`` of the server does, an answer in hand would be written to a file that is not ours any more.
        self._server.trigger.pull_trigger(lambda: wasyncore.dispatcher.close(self._server))
        self._server.task_dispatcher.shutdown(timeout=10)
        self._server.trigger.pull_trigger(self._hang_up)
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._server.trigger.close()

    def _hang_up(self) -> None:
        for channel in list(self._server.active_channels.values()):
            channel.close_when_flushed = True
        self._server.trigger.del_channel()  # the server's thread ends when nothing is left to watch


def _spare_what_stands() -> None:
    """Have the garbage collector leave alone what is there by now, and look for cycles more seldom.

    Rows in their hundreds come and go without one. To look after every 700 objects is a tenth of what a worker does in
    a burst. Source: https://docs.python.org/3/library/gc.html#gc.freeze.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def run(runtime: Runtime, *, web: bool, worker: bool) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Work in hand is finished, for 20 seconds at most.

    Raises :class:`SettingsError` if a secret in use is sealed with a key that is not configured.
    """
    tenants.check_keys(runtime)
    log.watch_threads()
    ended = threading.Event()

    def end(number: int, _: FrameType | None) -> None:
        _log.info("stopping", signal=number)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    _spare_what_stands()
    settings = runtime.settings
    notifier = None
    server = None
    workers = None
    if worker:
        workers = Worker(runtime)
        workers.start()
    if web:
        if not worker:
            notifier = Notifier(runtime.engine)
            runtime.wake.subscribe(notifier)
        server = Web(runtime, host=settings.host, port=settings.port, threads=settings.web_threads)
        server.start()
        _log.info("listening", port=server.port)
    ended.wait()
    began = time.monotonic()
    if server is not None:
        server.stop()
    # One time for both: a process manager counts from its signal.
    clean = workers.stop(DRAIN - (time.monotonic() - began)) if workers is not None else True
    if notifier is not None:
        notifier.stop()
    return 0 if clean else 1
