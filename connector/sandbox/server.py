"""The sandbox's HTTP server: threads, real sockets, and the faults that live on the wire."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
import threading
import traceback
from http.client import responses
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from connector.sandbox import control
from connector.sandbox.crm import Crm
from connector.sandbox.exchange import Answer
from connector.sandbox.state import Account, Settings, State

CONTROL = "/_sandbox/"
LARGEST_BODY = 10 * 1024 * 1024  # bytes of a request


class Handler(BaseHTTPRequestHandler):
    """One connection. Answers leave in one piece, so no small packet ever waits for an acknowledgement."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Keep silent: the call log has it all."""

    def _serve(self) -> None:
        body = self._body()
        if body is None:
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        crm = self.server.crm
        try:
            if self.path.startswith(CONTROL):
                answer = self._control(body)
            else:
                answer = crm.answer(self.command, self.path, headers, body)
        except Exception:  # noqa: BLE001 - a defect of the sandbox is recorded and answered, never a hung client
            crm.errors.append(traceback.format_exc())
            answer = Answer(500, {"error": "The sandbox itself failed; ask it for its errors."})
        self._send(answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _body(self) -> bytes | None:
        """The request's body; None when it was refused."""
        length = self.headers.get("Content-Length", "0")
        problem = 0
        if "Transfer-Encoding" in self.headers:
            problem = 411
        elif not length.isdecimal() or len(length) > 9:
            problem = 400
        elif int(length) > LARGEST_BODY:
            problem = 413
        if problem:
            self.close_connection = True
            self._send(Answer(problem, {"error": "The body must have a Content-Length below the limit."}))
            return None
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True  # the client died while sending: half a call must not be done
            return None
        return body

    def _control(self, body: bytes) -> Answer:
        if not ipaddress.ip_address(self.client_address[0]).is_loopback:
            return Answer(403, {"error": "Only from this machine."})
        if self.command != "POST":
            return Answer(405, {"error": "Orders are sent with POST."}, {"Allow": "POST"})
        return control.call(self.server.control, self.path.removeprefix(CONTROL).partition("?")[0], body)

    def _send(self, answer: Answer) -> None:
        if answer.wire == "reset":
            return self._reset()
        endless = answer.wire == "endless"
        body = b"" if endless else answer.encoded()
        headers = {
            "Date": self.date_time_string(),
            "Content-Type": answer.content_type,
            "Transfer-Encoding" if endless else "Content-Length": "chunked" if endless else str(len(body)),
            **answer.headers,
        }
        if self.close_connection:
            headers["Connection"] = "close"
        status = answer.status or 200
        lines = [
            f"HTTP/1.1 {status} {responses.get(status, '')}",
            *(f"{key}: {value}" for key, value in headers.items()),
        ]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
        match answer.wire:
            case "headers":
                self.connection.sendall(head[: len(head) // 2])
                self._reset()
            case "endless":
                self.connection.sendall(head)
                self._endless()
            case "drip":
                self.connection.sendall(head)
                self._drip(body, answer.pace)
            case _:
                self.connection.sendall(head + body)
        return None

    def _drip(self, body: bytes, pace: float) -> None:
        for place in range(len(body)):
            if self.server.crm.stopping.wait(pace):
                return self._reset()
            self.connection.sendall(body[place : place + 1])
        return None

    def _endless(self) -> None:
        piece = b"10000\r\n" + b" " * 65_536 + b"\r\n"
        # Ends by the client's closing (an error of the socket), or with the sandbox.
        while not self.server.crm.stopping.wait(0.001):
            self.connection.sendall(piece)
        self._reset()

    def _reset(self) -> None:
        """Close so that the client sees a reset, not an end: linger 0 sends RST, once nothing else holds the socket."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self.rfile.close()  # it holds the socket open
            self.connection.close()


class Server(ThreadingHTTPServer):
    """Accepts connections and ends them all when it is closed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024  # a burst of connections must not meet a full backlog: a lost SYN costs a second

    def __init__(self, address: tuple[str, int], crm: Crm, orders: control.Control) -> None:
        self.crm = crm
        self.control = orders
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remember the connection, then serve it in a thread."""
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection and forget it."""
        super().shutdown_request(request)
        with self._open_lock:
            self._open.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is the client's affair (or a fault's); anything else is recorded."""
        if not isinstance(sys.exc_info()[1], OSError):
            self.crm.errors.append(traceback.format_exc())

    def server_close(self) -> None:
        """Stop listening and end every connection."""
        super().server_close()
        with self._open_lock:
            left = list(self._open)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Sandbox(control.Control):
    """A sandbox CRM that serves while the ``with`` block runs.

    `seed` makes invented leads and faults repeatable. `limits` switches the vendors' rate limits on. Any other keyword
    is a field of :class:`~connector.sandbox.state.Settings`. :attr:`url` is the address; ``account()`` tells the keys.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        seed: int = 0,
        limits: bool = False,
        account: Account | None = None,
        **settings: Any,
    ) -> None:
        switches = Settings()
        switches.change({"limits": limits, **settings})
        self.state = State(seed, switches, account)
        self.crm = Crm(self.state, seed)
        self._server = Server((host, port), self.crm, self)
        self.port: int = self._server.server_address[1]
        self.url = self.crm.base = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="sandbox-http", daemon=True
        )

    @property
    def fub_url(self) -> str:
        """Base of the Follow Up Boss face."""
        return f"{self.url}/v1"

    @property
    def generic_url(self) -> str:
        """Base of the generic face."""
        return f"{self.url}/generic"

    @property
    def hubspot_url(self) -> str:
        """Base of the HubSpot face."""
        return f"{self.url}/hubspot"

    @property
    def bottlecrm_url(self) -> str:
        """Base of the BottleCRM face."""
        return f"{self.url}/bottlecrm"

    def start(self) -> None:
        """Serve in the background."""
        self.crm.dispatcher.start()
        self._thread.start()

    def stop(self) -> None:
        """End: no further answer, no further delivery."""
        self.crm.stop()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
