"""The client: its table, its requests and answers, and what it never lets out."""

from __future__ import annotations

import socket
import traceback
from typing import Any

import pytest
import requests
import responses

from adapters.base import Credentials, Unreadable
from adapters.client import Answer, Client, CrmError, Fault, Outcome, Unsendable, Who, parse_retry_after, verdict
from adapters.outcome import _MEANINGS
from tests.adapters.loopback import Reply, Server, reset
from tests.adapters.sockets import NOW, SECRET, client, error_of

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
        (Fault.BUDGET, Outcome.WAIT, Outcome.WAIT),
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


def test_a_date_to_retry_after_is_measured_by_the_clock_of_whoever_names_it() -> None:
    date = {"Date": "Mon, 01 Jun 2020 12:00:00 GMT", "Retry-After": "Mon, 01 Jun 2020 12:00:30 GMT"}
    error = mocked(status=503, headers=date)
    assert isinstance(error, CrmError)
    assert error.retry_after == 30.0


class Counting:
    """A gate that lets `left` calls through and remembers what it was asked and told."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.said: list[tuple[Any, ...]] = []

    def take(self, method: str, path: str) -> float:
        self.said.append((method, path))
        self.left -= 1
        return 0.0 if self.left >= 0 else 7.0

    def told(self, method: str, path: str, headers: Any, wait: float | None) -> None:
        self.said.append((method, path, headers.get("x-left"), wait))


def test_the_gate_is_asked_by_the_adapters_own_path_and_told_of_every_answer_and_without_it_nothing_is_sent() -> None:
    gate = Counting(left=2)
    with responses.RequestsMock() as mock, client("https://crm.example.com/v1", gate=gate) as crm:
        mock.add(responses.GET, "https://crm.example.com/v1/leads", json={}, headers={"X-Left": "1"})
        mock.add(responses.PUT, "https://crm.example.com/v1/leads/1", status=429, headers={"Retry-After": "11"})
        crm.get("https://crm.example.com/v1/leads?page=2")
        asked_to_wait = error_of(lambda: crm.put("/leads/1", json={}))
        refused = error_of(lambda: crm.put("/leads/1", json={}))
        assert len(mock.calls) == 2
    put = ("PUT", "/leads/1")
    assert gate.said == [("GET", "/leads"), ("GET", "/leads", "1", None), put, (*put, None, 11.0), put]
    assert (asked_to_wait.status, asked_to_wait.fault) == (429, None)
    assert (refused.outcome, refused.fault, refused.retry_after) == (Outcome.WAIT, Fault.BUDGET, 7.0)
    assert refused.status is None


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
    with pytest.raises(Unsendable, match="base address"):
        client(url, allow_private_hosts=allow)


def test_private_addresses_are_named_with_the_setting_that_allows_them() -> None:
    with pytest.raises(Unsendable, match="TURNLOCK_ALLOW_PRIVATE_HOSTS=1"):
        client("http://crm.example.com", allow_private_hosts=False)


@pytest.mark.parametrize("value", ["canary\nX: y", "canary\r", "canär", " canary", "canary\x00"])
def test_a_header_that_cannot_be_sent_is_refused_without_its_value(value: str) -> None:
    with pytest.raises(Unsendable, match="header Authorization") as caught:
        Client("https://crm.example.com", {"Authorization": value}, Credentials(), now=lambda: NOW)
    assert "can" not in str(caught.value).replace("cannot", "")


def test_an_environment_with_proxies_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with Server(lambda _: Reply(body={})).running() as server, client(server.url) as crm:
        assert crm.get("/").status == 200


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


def test_an_answer_that_asks_to_wait_wins_over_what_its_status_says_and_a_retry_after_says_how_long() -> None:
    def locked(status: int, headers: Any, data: Any) -> float | None:
        return 60.0 if status == 403 and "x-reason" not in headers else None

    with responses.RequestsMock() as mock, Client(
        "https://crm.example.com", {}, Credentials(), now=lambda: NOW, asks_to_wait=locked,
        refine=lambda status, data: Outcome.REAUTHORISE,
    ) as made:  # fmt: skip
        for headers, outcome, wait in (
            ({}, Outcome.WAIT, 60.0),
            ({"Retry-After": "5"}, Outcome.WAIT, 5.0),
            ({"Retry-After": "90"}, Outcome.WAIT, 90.0),
            ({"X-Reason": "no"}, Outcome.REAUTHORISE, None),
        ):
            mock.add("GET", "https://crm.example.com/x", status=403, headers=headers)
            error = error_of(lambda: made.get("/x"))
            assert (error.outcome, error.retry_after) == (outcome, wait)


def test_an_answer_may_be_an_error_though_it_is_a_success() -> None:
    error = Answer(200, {"error": "canary"}, {}, "POST /x").failed(Outcome.GONE)
    assert (error.outcome, error.status, error.data) == (Outcome.GONE, 200, {"error": "canary"})
    assert "POST /x: 200" in str(error)
    assert "canary" not in str(error)
