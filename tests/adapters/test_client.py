"""The client: its table, its limits on real sockets, and what it never lets out."""

from __future__ import annotations

import datetime as dt
import gzip
import socket
import ssl
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
import responses
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from adapters.base import Credentials, Unreadable
from adapters.client import Answer, Client, CrmError, Fault, Outcome, PrivateHost, Who, parse_retry_after, verdict
from adapters.outcome import _MEANINGS
from adapters.transport import is_public
from tests.adapters.loopback import Received, Reply, Server, drip, endless, reset, silent

NOW = dt.datetime(2026, 4, 6, 9, 20, tzinfo=dt.UTC)
SECRET = "canary-secret-7711"


def client(url: str, **options: Any) -> Client:
    options = {"allow_private_hosts": True, "now": lambda: NOW} | options
    return Client(url, {"X-Key": SECRET}, Credentials(secrets={"key": SECRET}), **options)


def error_of(call: Callable[[], Any]) -> CrmError:
    with pytest.raises(CrmError) as caught:
        call()
    return caught.value


# -- the table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [True, False])
def test_the_table_is_total(write: bool) -> None:
    for cause in [*range(600), 600, 999, -1, *Fault]:
        found = verdict(cause, write=write)
        assert isinstance(found.outcome, Outcome)
        assert isinstance(found.who, Who)
        assert found.text.endswith(".")
        assert found.internal
        success = isinstance(cause, int) and 200 <= cause < 300
        assert (found.outcome is Outcome.OK) is success


def test_every_outcome_has_a_meaning() -> None:
    assert set(_MEANINGS) == set(Outcome)


@pytest.mark.parametrize(
    ("cause", "write", "read"),
    [
        (200, Outcome.OK, Outcome.OK),
        (204, Outcome.OK, Outcome.OK),
        (100, Outcome.UNKNOWN, Outcome.ANSWER_UNREADABLE),
        (302, Outcome.REDIRECTED, Outcome.REDIRECTED),
        (307, Outcome.REDIRECTED, Outcome.REDIRECTED),
        (400, Outcome.REFUSED, Outcome.REFUSED),
        (401, Outcome.REAUTHORISE, Outcome.REAUTHORISE),
        (403, Outcome.FORBIDDEN, Outcome.FORBIDDEN),
        (404, Outcome.GONE, Outcome.GONE),
        (408, Outcome.UNKNOWN, Outcome.NOT_SENT),
        (409, Outcome.CONFLICT, Outcome.CONFLICT),
        (410, Outcome.GONE, Outcome.GONE),
        (412, Outcome.CONFLICT, Outcome.CONFLICT),
        (418, Outcome.REFUSED, Outcome.REFUSED),
        (422, Outcome.REFUSED, Outcome.REFUSED),
        (429, Outcome.WAIT, Outcome.WAIT),
        (500, Outcome.UNKNOWN, Outcome.NOT_SENT),
        (502, Outcome.UNKNOWN, Outcome.NOT_SENT),
        (503, Outcome.WAIT, Outcome.WAIT),
        (504, Outcome.UNKNOWN, Outcome.NOT_SENT),
        (599, Outcome.UNKNOWN, Outcome.NOT_SENT),
        (Fault.NAME, Outcome.NOT_SENT, Outcome.NOT_SENT),
        (Fault.CONNECT, Outcome.NOT_SENT, Outcome.NOT_SENT),
        (Fault.TLS, Outcome.NOT_SENT, Outcome.NOT_SENT),
        (Fault.PRIVATE_HOST, Outcome.PRIVATE_HOST, Outcome.PRIVATE_HOST),
        (Fault.BROKEN, Outcome.UNKNOWN, Outcome.NOT_SENT),
        (Fault.UNREADABLE, Outcome.UNKNOWN, Outcome.ANSWER_UNREADABLE),
        (Fault.TOO_BIG, Outcome.UNKNOWN, Outcome.ANSWER_UNREADABLE),
        (Fault.FOREIGN, Outcome.REDIRECTED, Outcome.REDIRECTED),
    ],
)
def test_what_a_cause_means(cause: int | Fault, write: Outcome, read: Outcome) -> None:
    assert verdict(cause, write=True).outcome is write
    assert verdict(cause, write=False).outcome is read


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        ("1.5", 1.5),
        ("-30", 0.0),
        ("3601", 3600.0),
        ("9" * 300, 3600.0),
        ("Mon, 06 Apr 2026 09:20:30 GMT", 30.0),
        ("Mon, 06 Apr 2026 09:19:00 GMT", 0.0),
        ("Mon, 06 Apr 2126 09:19:00 GMT", 3600.0),
        ("Mon, 06 Apr 2026 11:20:30 +0200", 30.0),
        ("Mon, 06 Apr 2026 09:20:30", 30.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("1e3", None),
        ("٧", None),
        ("9" * 5000, None),
        ("Mon, 99 Foo 99999 99:99:99 GMT", None),
        ("7, 9", None),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, NOW) == seconds


# -- requests and answers (no socket) -----------------------------------------------------------------------------


def mocked(**reply: Any) -> CrmError | Answer:
    with responses.RequestsMock() as mock, client("https://crm.example.com/v1") as crm:
        mock.add(responses.PUT, "https://crm.example.com/v1/leads/1", **reply)
        try:
            return crm.put("/leads/1", json={"a": 1}, params={"q": "secret-query", "none": None})
        except CrmError as error:
            return error
        finally:
            assert mock.calls[0].request.url == "https://crm.example.com/v1/leads/1?q=secret-query"
            assert mock.calls[0].request.body == b'{"a":1}'
            assert mock.calls[0].request.headers["Content-Type"] == "application/json"
            assert mock.calls[0].request.headers["X-Key"] == SECRET


def test_an_answer_is_parsed_and_its_headers_are_found_in_any_case() -> None:
    answer = mocked(json={"price": 1.10}, headers={"X-Rate": "5"})
    assert isinstance(answer, Answer)
    assert str(answer.data["price"]) == "1.1"
    assert answer.headers["x-rate"] == "5"


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_success_is_no_data(body: bytes) -> None:
    answer = mocked(body=body)
    assert isinstance(answer, Answer)
    assert answer.data is None


@pytest.mark.parametrize("body", [b"<html>ok</html>", b'{"a":', b"\xff\xfe", b"[" * 100 + b"]" * 100, b"NaN"])
def test_a_success_that_cannot_be_read(body: bytes) -> None:
    error = mocked(body=body)
    assert isinstance(error, CrmError)
    assert (error.outcome, error.status) == (Outcome.UNKNOWN, 200)


def test_an_error_keeps_status_wait_and_body_but_tells_neither_query_nor_body() -> None:
    error = mocked(status=429, json={"error": "canary-person"}, headers={"Retry-After": "11"})
    assert isinstance(error, CrmError)
    assert (error.outcome, error.status, error.retry_after, error.who) == (Outcome.WAIT, 429, 11.0, Who.NOBODY)
    assert error.data == {"error": "canary-person"}
    assert str(error) == f"PUT /leads/1: 429: {error.text}"
    assert "canary" not in repr(error)


def test_a_search_by_post_is_a_read() -> None:
    with responses.RequestsMock() as mock, client("https://crm.example.com") as crm:
        mock.add(responses.POST, "https://crm.example.com/search", status=500)
        assert error_of(lambda: crm.post("/search", json={}, write=False)).outcome is Outcome.NOT_SENT
        assert error_of(lambda: crm.post("/search", json={})).outcome is Outcome.UNKNOWN


def test_a_form_and_bytes_are_sent_as_they_are() -> None:
    with responses.RequestsMock() as mock, client("https://crm.example.com") as crm:
        mock.add(responses.POST, "https://crm.example.com/token", json={})
        crm.post("/token", data={"grant_type": "refresh_token"})
        crm.post("/token", data=b"\x00raw")
        assert mock.calls[0].request.body == "grant_type=refresh_token"
        assert mock.calls[1].request.body == b"\x00raw"


def test_reading_turns_unreadable_into_the_error_it_is() -> None:
    answer = Answer(200, None, {}, "PUT /x")
    for write, outcome in ((True, Outcome.UNKNOWN), (False, Outcome.ANSWER_UNREADABLE)):
        with pytest.raises(CrmError, match="PUT /x") as caught, answer.reading(write=write):
            raise Unreadable("wrong_type")
        assert caught.value.outcome is outcome


def test_a_next_link_of_the_same_origin_is_followed() -> None:
    with responses.RequestsMock() as mock, client("https://crm.example.com/v1") as crm:
        mock.add(responses.GET, "https://crm.example.com/v1/leads?next=2", json=[])
        assert crm.get("https://crm.example.com/v1/leads?next=2").data == []
        assert crm._url("HTTPS://CRM.example.com:443/v1/leads", "")


@pytest.mark.parametrize(
    "link",
    [
        "https://evil.example.com/v1/leads",
        "http://crm.example.com/v1/leads",
        "https://crm.example.com:444/v1/leads",
        "https://user:pw@crm.example.com/v1/leads",
        "https://crm.example.com.evil.example.com/",
        "//evil.example.com/leads",
        "leads",
        "",
        "https://[::1",
        "/../leads",
        "/leads/./1",
        "https://crm.example.com:x/",
    ],
)
def test_a_link_elsewhere_is_refused(link: str) -> None:
    with client("https://crm.example.com/v1", allow_private_hosts=False) as crm:
        if link.startswith("//"):  # a path, whatever it looks like: it stays below the base address
            assert crm._url(link, "") == "https://crm.example.com/v1//evil.example.com/leads"
            return
        assert error_of(lambda: crm.get(link)).outcome is Outcome.REDIRECTED


# -- what a Client refuses to be ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "allow"),
    [
        ("http://crm.example.com", False),
        ("https://crm.example.com:8443", False),
        ("https://user:pw@crm.example.com", True),
        ("https://crm.example.com/?a=b", True),
        ("https://crm.example.com/#a", True),
        ("ftp://crm.example.com", True),
        ("https://", True),
        ("crm.example.com", True),
        ("https://crm.example.com:x", True),
        ("https://[::1", True),
    ],
)
def test_base_addresses_that_are_refused(url: str, allow: bool) -> None:
    with pytest.raises(ValueError, match="base address"):
        client(url, allow_private_hosts=allow)


def test_private_addresses_are_named_with_the_setting_that_allows_them() -> None:
    with pytest.raises(ValueError, match="TURNLOCK_ALLOW_PRIVATE_HOSTS=1"):
        client("http://crm.example.com", allow_private_hosts=False)


@pytest.mark.parametrize("value", ["canary\nX: y", "canary\r", "canär", " canary", "canary\x00"])
def test_a_header_that_cannot_be_sent_is_refused_without_its_value(value: str) -> None:
    with pytest.raises(ValueError, match="header Authorization") as caught:
        Client("https://crm.example.com", {"Authorization": value}, Credentials(), now=lambda: NOW)
    assert "can" not in str(caught.value).replace("cannot", "")


def test_an_environment_with_proxies_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with Server(lambda _: Reply(body={})).running() as server, client(server.url) as crm:
        assert crm.get("/").status == 200


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
        with client(f"https://localhost:{server.port}") as crm:  # and one for another name
            crm._session.verify = str(pem)
            assert error_of(lambda: crm.get("/")).fault is Fault.TLS
    assert len(server.received) == 2


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
    ("reply", "status", "outcome"),
    [
        (endless(OK + b"\r\n"), 200, Outcome.ANSWER_UNREADABLE),
        (endless(b"HTTP/1.1 500 Oops\r\n\r\n"), 500, Outcome.NOT_SENT),
        (endless(b"HTTP/1.1 307 Away\r\nLocation: /other\r\n\r\n"), 307, Outcome.REDIRECTED),
        (Reply(body=b'"' + b"x" * 70000 + b'"'), 200, Outcome.ANSWER_UNREADABLE),
        (
            Reply(body=gzip.compress(b" " * (64 << 20)), headers={"Content-Encoding": "gzip"}),
            200,
            Outcome.ANSWER_UNREADABLE,
        ),
    ],
    ids=["endless", "endless error", "endless redirect", "long", "bomb"],
)
def test_no_more_than_the_limit_is_read(reply: Reply, status: int, outcome: Outcome) -> None:
    with Server(lambda _: reply).running() as server, client(server.url, max_answer=65536) as crm:
        start = time.monotonic()
        error = error_of(lambda: crm.get("/leads"))
        assert time.monotonic() - start < 3
    assert (error.status, error.outcome) == (status, outcome)


def test_a_compressed_answer_is_read() -> None:
    reply = Reply(body=gzip.compress(b'{"a": 1}'), headers={"Content-Encoding": "gzip"})
    with Server(lambda _: reply).running() as server, client(server.url) as crm:
        assert crm.get("/").data == {"a": 1}


@pytest.mark.parametrize("body", [b"not gzip", gzip.compress(b'{"a": 1}')[:-12]])
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


def test_a_kept_connection_that_died_is_replaced() -> None:
    def handle(asked: Received) -> Reply:
        return Reply(body={}, headers={"Connection": "close"} if asked.path == "/last" else {})

    with Server(handle).running() as server, client(server.url) as crm:
        crm.get("/last")
        time.sleep(0.05)
        assert crm.put("/leads", json={}).status == 200


# -- nothing leaks -----------------------------------------------------------------------------------------------------


PERSON, EMAIL = "canary-person", "canary@example.com"


@pytest.mark.parametrize("reply", [Reply(400, {"error": PERSON}), reset(), Reply(body=PERSON.encode())])
def test_no_secret_query_or_body_is_printed_with_an_error(reply: Reply) -> None:
    with Server(lambda _: reply).running() as server, client(server.url) as crm:
        error = error_of(lambda: crm.put("/leads/1", params={"email": EMAIL}, json={"name": PERSON}))
    printed = "".join(traceback.format_exception(error)) + repr(error) + repr(error.__context__)
    assert "PUT /leads/1" in printed
    for word in (PERSON, EMAIL, "canary", SECRET, "127.0.0.1"):
        assert word not in printed


def test_the_library_alone_would_leak_so_the_guard_guards_something() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(requests.ConnectionError, match="canary-query"):
        requests.get(f"http://127.0.0.1:{port}/?email=canary-query", timeout=1)
