"""Sends deliveries in the background: a few threads, retries, and webhook faults."""

from __future__ import annotations

import heapq
import http.client
import ipaddress
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any
from urllib.parse import SplitResult, urlsplit

from connector.sandbox.state import Hook, State

WORKERS = 16


@dataclass(slots=True, eq=False)
class Delivery:
    """One HTTP request that tells a hook of something, and what became of it.

    ``state``: waiting, delivered, failed (no retry left), dropped (by a fault), cancelled (the hook is gone).
    ``first`` is set once the first attempt, its concurrent copies included, has ended. ``sign`` makes the headers of an
    attempt; ``sent`` are those of the last one. ``retries`` are seconds before each retry.
    """

    id: int
    hook: Hook
    topic: str
    leads: list[int]
    message_id: str
    body: bytes
    sign: Callable[[bytes], dict[str, str]]
    retries: tuple[int, ...] = ()
    deletes_hook: tuple[int, ...] = ()
    event: Mapping[str, Any] | None = None
    sent: dict[str, str] = field(default_factory=dict)
    state: str = "waiting"
    attempts: list[dict[str, Any]] = field(default_factory=list)
    first: threading.Event = field(default_factory=threading.Event)
    open_copies: int = 1


@dataclass(slots=True)
class WebhookFaults:
    """What goes wrong with deliveries. ``copies``: each is sent so many times at once. ``reorder``: each waits a random
    time below so many seconds. ``delay``: each waits so long. ``drop``: probability that one is never sent.
    ``echo_first``: an API write is answered only after the deliveries that it causes were tried once.
    """

    copies: int = 1
    reorder: float = 0.0
    delay: float = 0.0
    drop: float = 0.0
    echo_first: bool = False

    def change(self, values: Mapping[str, Any]) -> None:
        """Set all: those not named go back to harmless. Raises :class:`ValueError` for an unknown name."""
        if unknown := set(values) - {item.name for item in fields(self)}:
            raise ValueError(f"webhook faults: no fault {', '.join(sorted(unknown))}")
        for name, value in {item.name: item.default for item in fields(self)}.items():
            setattr(self, name, values.get(name, value))


@dataclass(order=True, slots=True)
class _Task:
    due: float
    order: int
    delivery: Delivery = field(compare=False)
    retry: int = field(compare=False, default=0)  # 0: the first attempt
    copy: int = field(compare=False, default=0)  # 0: the one whose answer counts
    headers: dict[str, str] | None = field(compare=False, default=None)  # sent again as they were


def is_loopback(parts: SplitResult) -> bool:
    """Whether an address points to this machine: the only place this sandbox ever sends to."""
    if parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def post(url: str, headers: Mapping[str, str], body: bytes, timeout: float) -> tuple[int | None, str | None]:
    """POST `body`; the status, or None and what went wrong. `timeout` in seconds, for each wait on the socket."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        return None, "bad_url"
    if parts.scheme != "http" or not is_loopback(parts):
        return None, "not_loopback"
    # A new connection each time: an idle one that the receiver has closed would fail a delivery for nothing.
    connection = http.client.HTTPConnection(parts.hostname or "", port, timeout=timeout)
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body, {**headers, "Connection": "close"})
        response = connection.getresponse()
        response.read(65_536)
        return response.status, None
    except (OSError, http.client.HTTPException) as error:
        return None, type(error).__name__
    finally:
        connection.close()


class Dispatcher:
    """A heap of tasks by due time, worked by threads. Always taken after the state's lock, never before it."""

    def __init__(self, state: State, faults: WebhookFaults, seed: int) -> None:
        self._state = state
        self._faults = faults
        self._rng = Random(f"{seed}:webhooks")  # noqa: S311 - repeatable faults, not a secret
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._heap: list[_Task] = []
        self._busy = 0
        self._count = 0
        self._paused = False
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        self._threads = [
            threading.Thread(target=self._work, name=f"sandbox-send-{number}", daemon=True) for number in range(WORKERS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Send nothing more; wait up to `timeout` seconds for requests on their way."""
        with self._lock:
            self._stopping = True
            left = [task.delivery for task in self._heap]
            self._heap.clear()
            self._ready.notify_all()
        for delivery in left:
            delivery.first.set()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def send(self, deliveries: list[Delivery]) -> None:
        """Queue new deliveries, as the webhook faults will have them."""
        faults, now = self._faults, time.monotonic()
        with self._lock:
            for delivery in deliveries:
                if faults.drop and self._rng.random() < faults.drop:
                    delivery.state = "dropped"
                    delivery.first.set()
                    continue
                wait = faults.delay + (self._rng.random() * faults.reorder if faults.reorder else 0.0)
                delivery.open_copies = max(faults.copies, 1)
                for copy in range(delivery.open_copies):
                    self._push(_Task(now + wait, 0, delivery, copy=copy))

    def resend(self, delivery: Delivery, copies: int = 1) -> None:
        """Send a past delivery again: same bytes, same headers. Its state stays as it was."""
        headers = delivery.sent or delivery.sign(delivery.body)
        with self._lock:
            known = len(delivery.attempts)
            for copy in range(copies):
                self._push(_Task(time.monotonic(), 0, delivery, copy=known + copy + 1, headers=headers))

    def pause(self) -> None:
        """Let deliveries pile up."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Send what has piled up."""
        with self._lock:
            self._paused = False
            self._ready.notify_all()

    def wait_idle(self, timeout: float = 10.0, retries: bool = True) -> bool:
        """Wait until nothing is queued or on its way; False after `timeout` seconds.

        With ``retries=False`` a delivery that waits for its retry counts as done.
        """
        with self._idle:
            return self._idle.wait_for(
                lambda: not self._busy and not any(retries or not task.retry for task in self._heap), timeout
            )

    def _push(self, task: _Task) -> None:
        if self._stopping:
            task.delivery.first.set()
            return
        self._count += 1
        task.order = self._count
        heapq.heappush(self._heap, task)
        self._ready.notify()

    def _next(self) -> _Task | None:
        with self._ready:
            while not self._stopping:
                wait: float | None = None
                if self._heap and not self._paused and self._busy < self._state.settings.concurrency:
                    wait = self._heap[0].due - time.monotonic()
                    if wait <= 0:
                        self._busy += 1
                        return heapq.heappop(self._heap)
                self._ready.wait(wait)
            return None

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                self._attempt(task)
            finally:
                with self._lock:
                    self._busy -= 1
                    self._ready.notify()
                    self._idle.notify_all()

    def _attempt(self, task: _Task) -> None:
        delivery, hook = task.delivery, task.delivery.hook
        gone = task.headers is None and (hook.id not in self._state.hooks or not hook.active)
        if not gone:
            headers = task.headers or delivery.sign(delivery.body)
            entry = {**self._state.stamp(), "copy": task.copy, "retry": task.retry}
            status, problem = post(hook.url, headers, delivery.body, self._state.settings.timeout)
            entry |= {"status": status, "error": problem, "seconds": time.monotonic() - entry["mono"]}
            delivery.sent = headers
            delivery.attempts.append(entry)
        if task.headers is None and task.copy == 0:
            self._settle(task, None if gone else status, gone)
        if task.headers is None and task.retry == 0:
            with self._lock:
                delivery.open_copies -= 1
                if delivery.open_copies == 0:
                    delivery.first.set()

    def _settle(self, task: _Task, status: int | None, gone: bool) -> None:
        """Decide what comes after the attempt whose answer counts."""
        delivery, settings = task.delivery, self._state.settings
        if status in delivery.deletes_hook:
            with self._state.lock:
                self._state.hooks.pop(delivery.hook.id, None)
            gone = True
        if gone:
            delivery.state = "cancelled"
        elif status is not None and 200 <= status < 300:
            delivery.state = "delivered"
        elif task.retry >= len(delivery.retries):
            delivery.state = "failed"
        else:
            due = time.monotonic() + delivery.retries[task.retry] * settings.retry_scale
            with self._lock:
                self._push(_Task(due, 0, delivery, retry=task.retry + 1))
