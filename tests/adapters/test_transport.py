"""The client on real sockets: which addresses it speaks to, and how long and how much it listens."""

from __future__ import annotations

import datetime as dt
import gzip
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from adapters.client import CrmError, Fault, Outcome, PrivateHost, Who
from adapters.transport import is_public
from tests.adapters.loopback import Received, Reply, Server, drip, endless, reset, silent
from tests.adapters.sockets import client, error_of

# -- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "100.100.100.200", "168.63.129.16", "0.0.0.0", "255.255.255.255", "224.0.0.1", "198.18.0.1", "192.0.0.192",
        "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%1", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1",
        "2001:db8::1", "::7f00:1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:93.184.215.14"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f.1", "0177.0.0.1", "[::1]", "[::ffff:7f00:1]"])
def test_private_hosts_are_refused_before_a_connection(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    with client(f"https://{host}", allow_private_hosts=False) as crm:
        error = error_of(lambda: crm.post("/leads", json={}))
    assert isinstance(error, PrivateHost)
    assert error.outcome is Outcome.PRIVATE_HOST
    assert "TURNLOCK_ALLOW_PRIVATE_HOSTS=1" in str(error)


def looks_up(monkeypatch: pytest.MonkeyPatch, answers: list[list[str]]) -> list[str]:
    """Answer name look-ups with `answers` in turn; literal addresses resolve as ever."""
    real, asked = socket.getaddrinfo, []

    def fake(host: str, port: int, *rest: Any) -> Any:
        if host != "crm.example.com":
            return real(host, port, *rest)
        asked.append(host)
        found = answers[min(len(asked), len(answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", fake)
    return asked


def test_one_private_address_among_public_ones_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    looks_up(monkeypatch, [["93.184.215.14", "127.0.0.1"]])
    with client("https://crm.example.com", allow_private_hosts=False) as crm:
        assert isinstance(error_of(lambda: crm.get("/")), PrivateHost)


def test_a_name_that_rebinds_is_connected_by_the_address_that_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = looks_up(monkeypatch, [["93.184.215.14"], ["127.0.0.1"]])
    reached = []

    def connect(self: socket.socket, address: Any) -> None:
        reached.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", connect)
    with client("https://crm.example.com", allow_private_hosts=False) as crm:
        error = error_of(lambda: crm.get("/"))
    # The first try judged and used the public address; its repeat was judged anew and went nowhere.
    assert isinstance(error, PrivateHost)
    assert (reached, len(asked)) == (["93.184.215.14"], 2)


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(dt.datetime.now(dt.UTC) - dt.timedelta(days=1))
        .not_valid_after(dt.datetime.now(dt.UTC) + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = folder / "certificate.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret = folder / "key.pem"
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, secret)
    return context, pem


def test_tls_keeps_host_sni_and_certificate_check_on_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = looks_up(monkeypatch, [["127.0.0.1"]])
    context, pem = certificate(tmp_path, "crm.example.com")
    names: list[str | None] = []
    context.sni_callback = lambda _, name, __: names.append(name)
    with Server(lambda _: Reply(body={})).running(context) as server:
        url = f"https://crm.example.com:{server.port}"
        with client(url) as crm:
            crm._session.verify = str(pem)
            assert crm.get("/").status == 200
            assert crm.get("/").status == 200
        assert (names, asked) == (["crm.example.com"], ["crm.example.com"])  # one connection, one look-up
        assert server.received[0].headers["host"] == f"crm.example.com:{server.port}"
        with client(url) as crm:  # a certificate that nobody vouches for
            error = error_of(lambda: crm.put("/", json={}))
        assert (error.outcome, error.fault) == (Outcome.NOT_SENT, Fault.TLS)
        assert "TURNLOCK_CA_FILE" in error.text
        with client(url, ca_file=str(pem)) as crm:  # unless the operator does
            assert crm.get("/").status == 200
            trusted = crm._session.get_adapter(url).poolmanager.connection_pool_kw["ssl_context"]  # type: ignore[attr-defined]
            assert trusted.cert_store_stats()["x509"] > 9  # beside all those whom everybody trusts
        with client(f"https://localhost:{server.port}") as crm:  # and one for another name
            crm._session.verify = str(pem)
            assert error_of(lambda: crm.get("/")).fault is Fault.TLS
    assert len(server.received) == 3


# -- faults on real sockets ------------------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail(*_: Any) -> Any:
        tries.append(1)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with client("https://crm.example.com") as crm:
        error = error_of(lambda: crm.put("/leads", json={}))
    assert (error.outcome, error.fault, error.who) == (Outcome.NOT_SENT, Fault.NAME, Who.ADMIN)
    assert len(tries) == 2


def test_a_refused_connection_is_tried_twice_and_was_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tries = []
    guarded = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda self, to: tries.append(to) or guarded(self, to))
    with client(f"http://127.0.0.1:{port}") as crm:
        error = error_of(lambda: crm.post("/leads", json={}))
    assert (error.outcome, error.fault) == (Outcome.NOT_SENT, Fault.CONNECT)
    assert len(tries) == 2


def test_a_connection_that_comes_up_at_the_second_try_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded, failed = socket.socket.connect, []

    def once(self: socket.socket, to: Any) -> None:
        if not failed:
            failed.append(1)
            raise TimeoutError
        guarded(self, to)

    with Server(lambda _: Reply(body={})).running() as server, client(server.url) as crm:
        monkeypatch.setattr(socket.socket, "connect", once)
        assert crm.post("/leads", json={}).status == 200
        assert len(server.received) == 1


@pytest.mark.parametrize("reply", [reset(), silent(0.6), Reply(raw=lambda _: None)], ids=["reset", "silent", "closed"])
def test_a_write_without_an_answer_is_unknown_and_goes_out_once(reply: Reply) -> None:
    with Server(lambda _: reply).running() as server, client(server.url, read_timeout=0.3) as crm:
        error = error_of(lambda: crm.put("/leads/1", json={}))
        assert (error.outcome, error.fault, error.status) == (Outcome.UNKNOWN, Fault.BROKEN, None)
        assert error_of(lambda: crm.get("/leads/1")).outcome is Outcome.NOT_SENT
        assert [r.method for r in server.received] == ["PUT", "GET"]


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Slow: ", None),
        (OK + b"Content-Length: 5000\r\n\r\n", 200),
        (OK + b"Connection: close\r\n\r\n", 200),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n400\r\n", 200),
    ],
    ids=["headers", "length", "close", "chunk"],
)
def test_a_dripping_server_is_left_at_the_deadline(first: bytes, status: int | None) -> None:
    with Server(lambda _: drip(first, b"1", 0.05)).running() as server, client(server.url, deadline=0.5) as crm:
        start = time.monotonic()
        error = error_of(lambda: crm.put("/leads/1", json={}))
        assert 0.4 < time.monotonic() - start < 3
        assert (error.outcome, error.status) == (Outcome.UNKNOWN, status)


def test_an_error_status_is_not_lost_with_its_dripping_body() -> None:
    first = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 9\r\nContent-Length: 5000\r\n\r\n"
    with Server(lambda _: drip(first, b"1", 0.05)).running() as server, client(server.url, deadline=0.4) as crm:
        error = error_of(lambda: crm.put("/leads/1", json={}))
    assert (error.outcome, error.status, error.retry_after) == (Outcome.WAIT, 429, 9.0)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Reply(body=b'"' + b"x" * 70000 + b'"'), Outcome.ANSWER_UNREADABLE),
        (Reply(body=gzip.compress(b" " * (64 << 20)), headers={"Content-Encoding": "gzip"}), Outcome.ANSWER_UNREADABLE),
    ],
    ids=["long", "bomb"],
)
def test_a_body_over_the_limit_is_not_kept(reply: Reply, outcome: Outcome) -> None:
    with Server(lambda _: reply).running() as server, client(server.url, max_answer=65536) as crm:
        start = time.monotonic()
        error = error_of(lambda: crm.get("/leads"))
        assert time.monotonic() - start < 3
    assert (error.status, error.outcome, error.fault) == (200, outcome, Fault.TOO_BIG)


@pytest.mark.parametrize(
    ("first", "status", "outcome"),
    [
        (OK, 200, Outcome.ANSWER_UNREADABLE),
        (b"HTTP/1.1 500 Oops\r\n", 500, Outcome.NOT_SENT),
        (b"HTTP/1.1 307 Away\r\nLocation: /other\r\n", 307, Outcome.REDIRECTED),
    ],
)
def test_an_endless_body_is_left_at_the_limit(first: bytes, status: int, outcome: Outcome) -> None:
    taken: list[int] = []
    reply = endless(first + b"\r\n", taken)
    with Server(lambda _: reply).running() as server, client(server.url, max_answer=65536) as crm:
        error = error_of(lambda: crm.get("/leads"))
    assert (error.status, error.outcome) == (status, outcome)
    assert sum(taken) < 32 << 20  # what the buffers of two sockets swallow, of 128 MiB


def test_a_compressed_answer_is_read() -> None:
    reply = Reply(body=gzip.compress(b'{"a": 1}', mtime=0), headers={"Content-Encoding": "gzip"})
    with Server(lambda _: reply).running() as server, client(server.url) as crm:
        assert crm.get("/").data == {"a": 1}


@pytest.mark.parametrize("body", [b"not gzip", gzip.compress(b'{"a": 1}', mtime=0)[:-12]])
def test_a_broken_compression_is_a_broken_answer(body: bytes) -> None:
    reply = Reply(body=body, headers={"Content-Encoding": "gzip"})
    with Server(lambda _: reply).running() as server, client(server.url) as crm:
        assert error_of(lambda: crm.get("/")).status == 200


def test_a_body_cut_short_is_a_broken_answer() -> None:
    first = OK + b'Content-Length: 50\r\n\r\n{"a": 1}'
    with Server(lambda _: Reply(raw=lambda s: s.sendall(first))).running() as server, client(server.url) as crm:
        assert error_of(lambda: crm.get("/")).fault is Fault.BROKEN


@pytest.mark.parametrize("first", [b"\x00\xff garbage\r\n\r\n", b"HTTP/1.1 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\n" * 200])
def test_what_is_no_http_is_a_broken_answer(first: bytes) -> None:
    with Server(lambda _: Reply(raw=lambda s: s.sendall(first))).running() as server, client(server.url) as crm:
        assert isinstance(error_of(lambda: crm.put("/", json={})), CrmError)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_carries_nothing_to_the_other_host(status: int) -> None:
    with Server(lambda _: Reply(body={})).running() as other:
        reply = Reply(status, headers={"Location": f"http://localhost:{other.port}/stolen"})
        with Server(lambda _: reply).running() as server, client(server.url) as crm:
            error = error_of(lambda: crm.put("/leads/1", json={"name": "Petra Prospect"}))
        assert (error.outcome, error.status, len(server.received)) == (Outcome.REDIRECTED, status, 1)
        assert other.received == []


def test_cookies_are_not_kept() -> None:
    with Server(lambda _: Reply(body={}, headers={"Set-Cookie": "a=b; Path=/"})).running() as server:
        with client(server.url) as crm:
            crm.get("/")
            crm.get("/")
        assert "cookie" not in server.received[1].headers


def test_a_call_after_closing_makes_a_new_connection() -> None:
    connections: list[threading.Thread] = []  # the server has a thread for each

    def handle(_: Received) -> Reply:
        connections.append(threading.current_thread())
        return Reply(body={})

    with Server(handle).running() as server, client(server.url) as crm:
        crm.get("/")
        crm.get("/")
        crm.close()
        crm.get("/")
    first, same, other = connections
    assert first is same is not other


def test_a_kept_connection_that_died_is_replaced() -> None:
    def handle(asked: Received) -> Reply:
        return Reply(body={}, headers={"Connection": "close"} if asked.path == "/last" else {})

    with Server(handle).running() as server, client(server.url) as crm:
        crm.get("/last")
        time.sleep(0.05)
        assert crm.put("/leads", json={}).status == 200
