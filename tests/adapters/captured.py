"""Captured traffic as tests use it: deliveries as they came, answers as they were given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import responses

from adapters.base import Adapter, Credentials, WebhookRequest
from adapters.client import Client
from tests.adapters.kit import FIXTURES

BASE = "https://crm.example.com"
# What a server says of the connection, not of the answer; ``responses`` writes its own.
_OF_THE_WIRE = {"content-length", "content-encoding", "transfer-encoding", "connection", "set-cookie"}


@dataclass(frozen=True)
class Captures:
    """The folder ``captured`` of one CRM."""

    crm: Adapter

    @property
    def folder(self) -> Path:
        return FIXTURES / self.crm.name / "captured"

    def names(self, start: str) -> list[str]:
        """The files that start so, without their ending."""
        found = sorted(path.stem for path in self.folder.glob(f"{start}*.json"))
        assert found
        return found

    def load(self, name: str) -> Any:
        """The one file of this name, or of this number."""
        (path,) = (p for p in self.folder.glob("*.json") if name in (p.stem, p.stem.partition("_")[0]))
        return json.loads(path.read_text("utf-8"))

    def delivery(self, name: str, **more: str) -> tuple[WebhookRequest, datetime]:
        """A captured delivery, with `more` headers, and when it came."""
        found = self.load(name)
        headers = {key.lower(): value for key, value in found["headers"]} | more
        request = WebhookRequest("POST", f"https://hooks.example.com{found['path']}", headers, found["body"].encode())
        return request, datetime.fromisoformat(found["received_at"]).replace(tzinfo=UTC)

    @contextmanager
    def client(self, credentials: Credentials, now: datetime) -> Iterator[Client]:
        """A client of the adapter, whose calls a mock must answer."""
        with Client(
            BASE,
            self.crm.headers(credentials),
            credentials,
            now=lambda: now,
            refine=self.crm.refine,
            asks_to_wait=self.crm.asks_to_wait,
            words=self.crm.words,
        ) as made:
            yield made

    def answer(
        self, mock: responses.RequestsMock, name: str, change: Callable[[Any], Any] | None = None, *, path: str = ""
    ) -> Any:
        """Have the captured request answered as it was, or with a changed body, or at another `path`."""
        found = self.load(name)
        body = found["response"]
        if change is not None:
            body = change(body)
        mock.add(
            found["request"]["method"],
            BASE + (path or urlsplit(found["request"]["url"]).path),
            body=body if isinstance(body, str) else json.dumps(body),
            status=found["status"],
            headers={k: v for k, v in found["response_headers"] if k.lower() not in _OF_THE_WIRE | {"content-type"}},
        )
        return found

    def repeat(self, client: Client, name: str) -> Any:
        """Send the captured request again, as far as it was JSON."""
        asked = self.load(name)["request"]
        parts = urlsplit(asked["url"])
        query = f"?{parts.query}" if parts.query else ""
        return client.request(asked["method"], parts.path + query, json=asked["body"])


def exact(body: Any) -> Any:
    """`body` with its fractions as the client reads them."""
    return json.loads(json.dumps(body), parse_float=Decimal)


def sent(mock: responses.RequestsMock, number: int = 0) -> Any:
    """The JSON body of a call that was made."""
    return json.loads(mock.calls[number].request.body or b"null")
