"""The one way out to a CRM: bounded in time and size, never redirected, never repeated once something was sent.

:class:`Client` sends; :mod:`adapters.outcome` says what an answer means. What is retried here is a connection that
could not be made, once; everything longer is the due time of a row. That ``requests`` alone is not enough was
measured: a 307 carried the body and the API key to another host.
"""

from __future__ import annotations

import http.client
import json as json_
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any
from urllib.parse import SplitResult, urlsplit

import requests
import urllib3
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random
from urllib3.exceptions import MaxRetryError, NameResolutionError

from adapters.base import Credentials, Unreadable
from adapters.budget import Gate
from adapters.outcome import CrmError, Fault, Outcome, PrivateHost, Verdict, Who, verdict
from adapters.payload import ANSWER, Limits, read_json
from adapters.transport import Call, NotPublic, Transport, running
from adapters.upkeep import http_date

__all__ = ["Answer", "Client", "CrmError", "Fault", "Outcome", "PrivateHost", "Unsendable", "Verdict", "Who", "verdict"]

MAX_RETRY_AFTER = 3600.0  # seconds; a CRM that asks for more is asked again after an hour
_READS = frozenset({"GET", "HEAD"})
_PORTS = {"https": 443, "http": 80}
_UNSENDABLE = "The address or a header cannot be sent. Correct the CRM's base address and credentials."
_FAILURES = (requests.RequestException, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, UnicodeError)


class Unsendable(CrmError):
    """A base address or a header with which no call can be made, until an admin corrects it. Nothing was sent."""

    def __init__(self, text: str) -> None:
        super().__init__(Outcome.FORBIDDEN, text=text)


@dataclass(frozen=True, slots=True)
class Answer:
    """A 2xx. `data` is the parsed JSON, None for an empty body; `headers` are looked up in any case."""

    status: int
    data: Any
    headers: Mapping[str, str]
    call: str = ""

    @contextmanager
    def reading(self, *, write: bool = False) -> Iterator[None]:
        """Turn an :class:`Unreadable` of the adapter's own reading of `data` into the :class:`CrmError` it is."""
        try:
            yield
        except Unreadable:
            fault = Fault.UNREADABLE
            outcome = verdict(fault, write=write).outcome
            raise CrmError(outcome, status=self.status, fault=fault, call=self.call) from None

    def failed(self, outcome: Outcome, *, text: str | None = None) -> CrmError:
        """The error that this answer is, where a CRM tells of one in the body of a success."""
        return CrmError(outcome, status=self.status, call=self.call, text=text, data=self.data)


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds from a ``Retry-After`` in seconds or as an HTTP date, clamped to 0..3600; None when unreadable.

    Source: RFC 9110, 10.2.3.
    """
    value = (value or "").strip()
    if re.fullmatch(r"-?[0-9]{1,300}(\.[0-9]{1,9})?", value, re.ASCII):
        return min(max(float(value), 0.0), MAX_RETRY_AFTER)
    date = http_date(value)
    return None if date is None else min(max((date - now).total_seconds(), 0.0), MAX_RETRY_AFTER)


# Why only once more, and only connections: nothing was sent, a lost SYN is common, and a longer wait would hold a
# worker of all tenants. Jitter, because many rows fall due together after a CRM's restart.
_retrying = Retrying(
    stop=stop_after_attempt(2),
    wait=wait_random(0.05, 0.25),
    retry=retry_if_exception(lambda error: isinstance(error, CrmError) and error.fault in (Fault.NAME, Fault.CONNECT)),
    reraise=True,
)


class Client:
    """Calls to one account of one CRM.

    Not safe for threads: one Client per thread, because a :class:`requests.Session` is not either. Close it, or use
    it as a context manager. `credentials`, `learnt` and :meth:`now` are there for the adapter.

    Args:
        base_url: where paths start; https on port 443 unless `allow_private_hosts`.
        headers: sent with every request, from :meth:`adapters.base.Adapter.headers`.
        now: the time, aware, by a clock that is right; time-outs use the monotonic clock of the process.
        allow_private_hosts: also speak to private and loopback addresses, and over http.
        ca_file: a PEM file of certificates that are trusted beside the public ones.
        connect_timeout: seconds for a connection; `read_timeout`: seconds of silence; `deadline`: seconds for the
            whole call with its body. The name look-up is bounded by the system's resolver only.
        max_answer: bytes of a decoded body.
        refine: another outcome for an answer other than 2xx, from :meth:`adapters.base.Adapter.refine`.
        asks_to_wait: seconds to wait where an answer says "not now", from :meth:`adapters.base.Adapter.asks_to_wait`.
        words: what the admin reads of an answer other than 2xx, from :meth:`adapters.base.Adapter.words`.
        gate: is asked before each call and told of each answer; without it nobody counts.

    Raises:
        Unsendable: a base address or header that can never be sent; the text names the fix, never a header's value.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        credentials: Credentials,
        *,
        now: Callable[[], datetime],
        allow_private_hosts: bool = False,
        ca_file: str | None = None,
        connect_timeout: float = 3.0,
        read_timeout: float = 8.0,
        deadline: float = 10.0,
        max_answer: int = 1 << 20,
        refine: Callable[[int, Any], Outcome | None] = lambda status, data: None,
        asks_to_wait: Callable[[int, Mapping[str, str], Any], float | None] = lambda status, headers, data: None,
        words: Callable[[int, Mapping[str, str], Any], str | None] = lambda status, headers, data: None,
        gate: Gate | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.credentials = credentials
        self.now = now
        # What an adapter has learnt of this account and would else ask before each call; gone with the client.
        self.learnt: dict[str, Any] = {}
        self._origin = _origin(checked_base(base_url, allow_private_hosts))
        self._allow_private = allow_private_hosts
        self._refine, self._asks_to_wait, self._words, self._gate = refine, asks_to_wait, words, gate
        self._times = (connect_timeout, read_timeout, deadline)
        self._limits = Limits(max_answer, ANSWER.max_depth, ANSWER.max_elements, ANSWER.max_keys)
        session = self._session = requests.Session()
        session.trust_env = False  # no proxy, no .netrc and no CA file from the environment
        session.adapters.clear()
        for scheme in ("https://", "http://") if allow_private_hosts else ("https://",):
            session.mount(scheme, Transport(ca_file=ca_file, pool_connections=1, pool_maxsize=1, max_retries=0))
        usual = {"Accept": "application/json", "Accept-Encoding": "gzip", "User-Agent": "Turnlock"}
        self._headers = usual | dict(_checked_headers(headers))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the connection that is kept open for the next call."""
        self._session.close()

    def get(self, path: str, **options: Any) -> Answer:
        """Read. Options as for :meth:`request`."""
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> Answer:
        """Create. Options as for :meth:`request`."""
        return self.request("POST", path, **options)

    def put(self, path: str, **options: Any) -> Answer:
        """Set. Options as for :meth:`request`."""
        return self.request("PUT", path, **options)

    def patch(self, path: str, **options: Any) -> Answer:
        """Change. Options as for :meth:`request`."""
        return self.request("PATCH", path, **options)

    def delete(self, path: str, **options: Any) -> Answer:
        """Remove. Options as for :meth:`request`."""
        return self.request("DELETE", path, **options)

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        data: bytes | str | Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        write: bool | None = None,
    ) -> Answer:
        """Send one request and read its answer.

        Args:
            path: begins with a slash; or a full URL of the same origin, as CRMs give for a next page.
            params: the query; None values are left out.
            json: sent as JSON. `data`: sent as it is (bytes) or as a form (mapping).
            write: whether the call may change the CRM; by default everything but GET does. A search by POST says
                False and is then safe to repeat.

        Raises:
            CrmError: anything but a readable 2xx.
        """
        write = method not in _READS if write is None else write
        sent = dict(_checked_headers(headers or {}))
        if json is not None:
            data = json_.dumps(json, separators=(",", ":"), allow_nan=False).encode()
            sent.setdefault("Content-Type", "application/json")
        call = f"{method} {re.sub('^https?://[^/]*|[?#].*', '', path)[:100]}"
        url = self._url(path, call)
        try:
            prepared = requests.PreparedRequest()
            prepared.prepare_method(method)
            prepared.prepare_url(url, params)
            prepared.prepare_headers(self._headers | sent)
            prepared.prepare_body(data, None)
        except _FAILURES:
            raise CrmError(Outcome.REFUSED, call=call, text=_UNSENDABLE) from None
        if self._gate and (wait := self._gate.take(method, self._counted(url))):
            raise CrmError(Outcome.WAIT, fault=Fault.BUDGET, retry_after=wait, call=call)
        ends = monotonic() + self._times[2]
        return _retrying(self._once, prepared, write, call, ends)

    def _url(self, path: str, call: str) -> str:
        if path.startswith("/") and not {".", ".."} & set(urlsplit(path).path.split("/")):
            return self.base_url + path
        try:
            parts = urlsplit(path)
            same = parts.scheme != "" and "@" not in parts.netloc and _origin(parts) == self._origin
        except ValueError:
            same = False
        if not same:
            raise CrmError(Outcome.REDIRECTED, fault=Fault.FOREIGN, call=call)
        return path

    def _counted(self, url: str) -> str:
        """The path by which a call is counted: as adapters write it."""
        return urlsplit(url).path.removeprefix(urlsplit(self.base_url).path)

    def _once(self, prepared: requests.PreparedRequest, write: bool, call: str, ends: float) -> Answer:
        connect, read, _ = self._times
        left = max(ends - monotonic(), 0.001)
        state = Call(ends, read, self._allow_private)
        token = running.set(state)
        status, body, fault = None, b"", None
        answered: Mapping[str, str] = {}
        try:
            # By the transport itself: the session would keep cookies, and read a redirect's body to prepare the next
            # call, even unfollowed; and it costs more than the call.
            transport = self._session.get_adapter(prepared.url or "")
            times = (min(connect, left), min(read, left))
            with transport.send(prepared, stream=True, timeout=times, verify=self._session.verify or True) as response:
                status, answered = response.status_code, response.headers
                body, fault = _read(response, ends, self._limits.max_bytes)
        except NotPublic:
            fault = Fault.PRIVATE_HOST
        except _FAILURES as error:
            fault = _fault(error, state)
        finally:
            running.reset(token)
        # Outside the except clause on purpose: the library's error holds the URL with its query, and would otherwise
        # hang on ours as its context and be printed with it.
        data_read = None
        if fault is None and body.strip():
            try:
                data_read = read_json(body, self._limits)
            except Unreadable:
                fault = Fault.UNREADABLE
        outcome, wait = Outcome.OK, None
        if status is not None and (outcome := verdict(status, write=write).outcome) is not Outcome.OK:
            # A date is meant by the CRM's own clock, which it tells beside it.
            wait = parse_retry_after(answered.get("Retry-After"), http_date(answered.get("Date")) or self.now())
            if (asked := self._asks_to_wait(status, answered, data_read)) is not None:
                outcome, wait = Outcome.WAIT, asked if wait is None or asked == math.inf else wait
                wait = min(wait, MAX_RETRY_AFTER)
            else:
                outcome = self._refine(status, data_read) or outcome
        if self._gate and status is not None:
            counted = self._counted(prepared.url or "")
            self._gate.told(prepared.method or "", counted, answered, wait if outcome is Outcome.WAIT else None)
        if status is not None and outcome is not Outcome.OK:
            text = self._words(status, answered, data_read)
            raise CrmError(outcome, status=status, retry_after=wait, call=call, text=text, data=data_read)
        if fault is not None:
            kind = PrivateHost if fault is Fault.PRIVATE_HOST else CrmError
            raise kind(verdict(fault, write=write).outcome, status=status, fault=fault, call=call)
        assert status is not None  # noqa: S101 - no fault means an answer
        return Answer(status, data_read, answered, call)


def _read(response: requests.Response, ends: float, limit: int) -> tuple[bytes, Fault | None]:
    """The decoded body. It never raises: a status that was read must not be lost with its body."""
    body = bytearray()
    try:
        while chunk := response.raw.read(65536, decode_content=True):
            body += chunk
            if len(body) > limit:
                return b"", Fault.TOO_BIG
            if monotonic() > ends:
                return b"", Fault.BROKEN
    except _FAILURES:
        return b"", Fault.BROKEN
    return bytes(body), None


def _fault(error: BaseException, call: Call) -> Fault:
    if call.sent:
        return Fault.BROKEN
    if isinstance(error, requests.exceptions.SSLError):
        return Fault.TLS
    inner = error.args[0] if error.args else None
    if isinstance(inner, MaxRetryError) and isinstance(inner.reason, NameResolutionError):
        return Fault.NAME
    return Fault.CONNECT


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    scheme = parts.scheme.lower()
    return scheme, (parts.hostname or "").lower(), parts.port or _PORTS.get(scheme, 0)


def checked_base(base_url: str, allow_private_hosts: bool) -> SplitResult:
    """The parts of a base address that can be called. Raises :class:`Unsendable` with what to correct."""
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError:
        raise Unsendable("base address: not a web address; give it the form https://crm.example.com") from None
    if parts.scheme not in _PORTS or not parts.hostname or "@" in parts.netloc or parts.query or parts.fragment:
        raise Unsendable(
            "base address: needs a host and may hold no user, query or fragment; give it the form "
            "https://crm.example.com/api"
        )
    if not allow_private_hosts and (parts.scheme != "https" or port not in (None, 443)):
        raise Unsendable(
            "base address: only https on port 443 is spoken to; correct it, or set TURNLOCK_ALLOW_PRIVATE_HOSTS=1 "
            "for a CRM of your own network"
        )
    return parts


def _checked_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Refused here because ``requests`` would name the value, which may be a secret, in its error."""
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()) or value != value.strip():
            raise Unsendable(f"header {name}: holds a character that cannot be sent; enter its value again")
    return headers
