"""Connections to a CRM: only to public addresses, resolved once, and never past the call's deadline.

Sources: OWASP ASVS 5.0 13.2.4 and 15.3.2 (outgoing requests). Measured with ``requests`` alone: ``timeout=`` never
fired on a server that drips one byte a second, because every byte starts it anew.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
from contextvars import ContextVar
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from time import monotonic
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.structures import CaseInsensitiveDict
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import NameResolutionError, NewConnectionError
from urllib3.util.connection import allowed_gai_family, create_connection
from urllib3.util.ssl_ import create_urllib3_context

# Addresses inside clouds that Python counts as public: services that answer a machine about itself.
_METADATA = frozenset(ipaddress.ip_address(a) for a in ("168.63.129.16", "192.0.0.192"))
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether `address` is on the public internet, also by what an IPv6 address that embeds an IPv4 one leads to."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and ip not in _METADATA


@dataclass(slots=True)
class Call:
    """What the sockets must know of the call that uses them; ``sent`` is what they report back."""

    ends: float
    read_timeout: float
    allow_private: bool
    sent: bool = False

    def left(self, at_most: float) -> float:
        """Seconds that the next wait may take, `at_most` or what is left of the call; an error when nothing is."""
        left = min(self.ends - monotonic(), at_most)
        if left <= 0:
            raise TimeoutError("the call's time is over")
        return left


# urllib3 makes connections and reads sockets in the calling thread, so the running call can be found here.
running: ContextVar[Call] = ContextVar("running")


class NotPublic(Exception):
    """Raised between the name look-up and the connection."""


def _connect(conn: HTTPConnection) -> socket.socket:
    """Resolve once, judge every address found, and connect to one of *these*.

    A check followed by a second look-up could be answered differently (DNS rebinding). Host header, SNI and the
    certificate check keep using the name.
    """
    call = running.get()
    try:
        found = socket.getaddrinfo(conn._dns_host, conn.port, allowed_gai_family(), socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NameResolutionError(conn.host, conn, error) from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not call.allow_private and not all(is_public(a) for a in addresses):
        raise NotPublic
    timeout = conn.timeout if isinstance(conn.timeout, int | float) else call.read_timeout
    for address in addresses:
        try:
            return create_connection((address, conn.port), call.left(timeout), conn.source_address, conn.socket_options)
        except OSError:  # the next address may answer; the caller learns that none did
            continue
    raise NewConnectionError(conn, "no address of the host could be reached in time")


class _TimedFile(RawIOBase):
    """A socket's reading side that keeps the call's deadline: ``timeout=`` alone starts anew with every byte."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        call = running.get()
        self._sock.settimeout(call.left(call.read_timeout))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedSocket:
    """What :class:`http.client.HTTPResponse` wants of a socket: a file."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def makefile(self, mode: str) -> BufferedReader:
        return BufferedReader(_TimedFile(self._sock))


class _TimedResponse(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_TimedSocket(sock), *args, **kwargs)  # type: ignore[arg-type]


class _Http(HTTPConnection):
    response_class = _TimedResponse

    def _new_conn(self) -> socket.socket:
        return _connect(self)

    def send(self, data: Any) -> None:
        if self.sock is None:  # connect first: a failure to connect has sent nothing
            self.connect()
        running.get().sent = True
        super().send(data)


class _Https(_Http, HTTPSConnection):
    """The same over TLS: ``super()`` in :class:`_Http` leads to :class:`HTTPSConnection` here."""


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https


class Transport(HTTPAdapter):
    """The adapter of ``requests`` whose connections look where they lead before they send. For one host.

    `ca_file` is a PEM file of certificates that are trusted beside the public ones: ``verify`` would put them in the
    place of those, and one Turnlock may speak to a CRM of its own house and to one of the world.
    """

    def __init__(self, *, ca_file: str | None = None, **options: Any) -> None:
        self._ca_file = ca_file
        self._pool: Any = None
        super().__init__(**options)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """As the library's, with connections of this module."""
        if self._ca_file is not None:
            kwargs["ssl_context"] = create_urllib3_context()  # the public ones are added as ever
            kwargs["ssl_context"].load_verify_locations(self._ca_file)
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}

    # What follows leaves out what no call here has, and what would be a fifth of it: proxies, cookies, a second host.

    def get_connection_with_tls_context(self, request: Any, verify: Any, proxies: Any = None, cert: Any = None) -> Any:
        """The pool of the only host."""
        if self._pool is None:
            self._pool = super().get_connection_with_tls_context(request, verify, proxies, cert)
        return self._pool

    def close(self) -> None:
        """Give up the connections; a call after that makes new ones."""
        self._pool = None
        super().close()

    def request_url(self, request: Any, proxies: Any) -> str:
        """The path."""
        return str(request.path_url)

    def build_response(self, req: Any, resp: Any) -> requests.Response:
        """The answer, without its cookies."""
        response = requests.Response()
        response.status_code, response.headers, response.raw = resp.status, CaseInsensitiveDict(resp.headers), resp
        response.request, response.url = req, req.url
        return response
