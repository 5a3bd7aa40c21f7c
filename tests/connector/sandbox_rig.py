"""What the tests of the sandbox share: a hook's other end, a client of both faces, and fixtures for them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests
from standardwebhooks import Webhook

from connector.sandbox import Account, Sandbox

ACCOUNT = Account()
SYSTEM = {"X-System": "Turnlock", "X-System-Key": ACCOUNT.system_key}
ANA, BEN, CY, DEE, ELI = 12, 13, 14, 15, 16
OWNER, POND = 11, 7


def until(true: Callable[[], Any], seconds: float = 5.0) -> None:
    """Wait for something that happens elsewhere."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class Receiver:
    """A hook's other end: keeps what it gets, answers what it is told (the last status for ever)."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.at: list[float] = []
        self.statuses = [200]
        self.wait = 0.0
        self.now = self.most = 0
        lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    receiver.got.append(({key.lower(): value for key, value in self.headers.items()}, body))
                    receiver.at.append(time.monotonic())
                    receiver.now += 1
                    receiver.most = max(receiver.most, receiver.now)
                    status = receiver.statuses.pop(0) if len(receiver.statuses) > 1 else receiver.statuses[0]
                time.sleep(receiver.wait)
                with lock:
                    receiver.now -= 1
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hooks/token"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


class Api:
    """A client of both faces; the signature of the generic one is made by the scheme's own library."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.session = requests.Session()
        self.session.trust_env = False
        self.sandbox = sandbox

    def fub(self, method: str, path: str, key: str = ACCOUNT.api_key, system: bool = True, **more: Any) -> Any:
        headers = {**(SYSTEM if system else {}), **more.pop("headers", {})}
        url, auth = self.sandbox.fub_url + path, (key, "")
        more.setdefault("timeout", 10)
        return self.session.request(method, url, auth=auth, headers=headers, allow_redirects=False, **more)

    def generic(self, method: str, path: str, body: Any = None, at: datetime | None = None, **more: Any) -> Any:
        raw = "" if body is None else json.dumps(body)
        at = at or datetime.now(UTC)
        headers = {
            "webhook-id": "msg_1",
            "webhook-timestamp": str(int(at.timestamp())),
            "webhook-signature": Webhook(ACCOUNT.api_secret).sign("msg_1", at, raw),
            **more.pop("headers", {}),
        }
        url = self.sandbox.generic_url + path
        return self.session.request(method, url, data=raw, headers=headers, allow_redirects=False, timeout=10, **more)

    def subscribe(self, receiver: Receiver, *events: str) -> list[int]:
        answers = [self.fub("POST", "/webhooks", json={"event": event, "url": receiver.url}) for event in events]
        return [answer.json()["id"] for answer in answers]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(seed=1, retry_scale=0.0002) as made:
        yield made
        assert made.errors() == []


@pytest.fixture
def api(sandbox: Sandbox) -> Iterator[Api]:
    made = Api(sandbox)
    yield made
    made.session.close()


def put(api: Api, lead: int, agent: int = ANA, **more: Any) -> Any:
    return api.fub("PUT", f"/people/{lead}", json={"assignedUserId": agent}, **more)


def owner(api: Api, lead: int) -> Any:
    return api.sandbox.lead(lead)["owner"]
