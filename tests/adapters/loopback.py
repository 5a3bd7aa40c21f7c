"""A tiny HTTP server on loopback, for faults that only a real socket can show."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True)
class Received:
    """One request as the server saw it."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def writes(self) -> bool:
        return self.method not in ("GET", "HEAD")


@dataclass(frozen=True)
class Reply:
    """What the server answers: an object is sent as JSON, bytes as they are."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: Callable[[socket.socket], None] | None = None  # takes over the connection instead


def drip(first: bytes, byte: bytes, every: float) -> Reply:
    """Send `first`, then one byte after the other for ever: no time-out between bytes ever fires."""

    def run(sock: socket.socket) -> None:
        try:
            sock.sendall(first)
            for _ in range(2000):
                time.sleep(every)
                sock.sendall(byte)
        except OSError:
            return

    return Reply(raw=run)


def endless(first: bytes, taken: list[int]) -> Reply:
    """Send `first`, then as much as the client takes; `taken` gets the size of each piece that it took."""

    def run(sock: socket.socket) -> None:
        try:
            sock.sendall(first)
            for _ in range(2000):
                sock.sendall(b"x" * 65536)
                taken.append(65536)
        except OSError:
            return

    return Reply(raw=run)


def reset() -> Reply:
    """Reset the connection after the request was read."""

    def run(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return Reply(raw=run)


def silent(seconds: float) -> Reply:
    """Read the request and say nothing for a while."""
    return Reply(raw=lambda sock: time.sleep(seconds))


class Server:
    """Answers with `handle` and remembers what it was asked."""

    def __init__(self, handle: Callable[[Received], Reply]) -> None:
        self.handle = handle
        self.received: list[Received] = []
        self.writes: Callable[[Received], bool] = lambda asked: asked.writes
        self._http: ThreadingHTTPServer | None = None

    @property
    def port(self) -> int:
        assert self._http is not None
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def written(self) -> list[Received]:
        return [r for r in self.received if self.writes(r)]

    @contextmanager
    def running(self, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else every answer with a body waits 40 ms for an acknowledgement

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = urlsplit(self.path)
                asked = Received(
                    self.command,
                    parts.path,
                    dict(parse_qsl(parts.query, keep_blank_values=True)),
                    {k.lower(): v for k, v in self.headers.items()},
                    body,
                )
                outer.received.append(asked)
                reply = outer.handle(asked)
                if reply.raw is not None:
                    self.close_connection = True
                    reply.raw(self.connection)
                    return
                sent = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                sent = b"" if reply.body is None or reply.status == 204 else sent
                self.send_response_only(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                if reply.status >= 200:
                    self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

            def log_message(self, *_: object) -> None: ...

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None: ...  # clients that go away are part of the tests

        self._http = Quiet(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()
