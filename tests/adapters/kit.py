"""What the conformance suite needs to know of one CRM: how it signs, how its bodies look, and a fake of its API.

For a new CRM write ``tests/adapters/kit_<name>.py`` with a class ``TheKit`` and the folder ``tests/fixtures/<name>``.
A fixture is two files: ``<name>.body``, the raw bytes, and ``<name>.json`` with ``from`` (where it comes from),
``topic`` and the ``events`` expected of a delivery, or ``lead`` for an answer of the API.
"""

from __future__ import annotations

import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from responses import RequestsMock

from adapters import registry
from adapters.base import Adapter, Credentials, WebhookRequest
from adapters.client import Client
from routing.model import Lead
from tests.adapters.loopback import Received, Reply, Server

NOW = datetime(2026, 4, 6, 9, 20, tzinfo=UTC)
FIXTURES = Path(__file__).parent.parent / "fixtures"


@dataclass(frozen=True)
class Fixture:
    """Raw bytes and what is expected of them."""

    name: str
    body: bytes
    about: Mapping[str, Any]

    @property
    def headers(self) -> Mapping[str, str]:
        return self.about.get("headers", {})


def fixtures(crm: str) -> list[Fixture]:
    """All fixtures of `crm`; none is a failure, and so is a body without its expectations."""
    found = [
        Fixture(path.stem, path.read_bytes(), json.loads(path.with_suffix(".json").read_text()))
        for path in sorted((FIXTURES / crm).glob("*.body"))
    ]
    assert found, f"tests/fixtures/{crm} holds no fixture"
    return found


def deliveries(crm: str) -> list[Fixture]:
    """Fixtures that a CRM posts."""
    found = [f for f in fixtures(crm) if "events" in f.about]
    assert found, f"tests/fixtures/{crm} holds no delivery"
    return found


@dataclass
class AgentRow:
    ref: str
    active: bool = True
    paused: bool = False


@dataclass
class LeadRow:
    ref: str
    owner: str | None = None
    pond: str | None = None
    created: datetime = NOW - timedelta(hours=1)
    changed: datetime | None = None  # the time of the last change, where it is not the creation
    collaborators: list[str] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    tasks: list[tuple[str, str, str]] = field(default_factory=list)  # agent, text with its marker, due


@dataclass
class HookRow:
    ref: str
    topic: str
    url: str
    active: bool = True


class Fake(ABC):
    """An account of a CRM in memory, with as much of its API as the adapter uses."""

    page: ClassVar[int] = 100

    def __init__(self) -> None:
        self.leads: dict[str, LeadRow] = {}
        self.agents: dict[str, AgentRow] = {}
        self.hooks: list[HookRow] = []
        self.teams: dict[str, tuple[str, list[str]]] = {}  # by their id: name, ids of agents
        self.app_target: str | None = None  # where the app posts to
        self.app_topics: dict[str, bool] = {}  # what it tells of, and whether that is active
        self._refs = 900
        self.clock_is_off = timedelta()
        self.refuses_owners = False  # answers 200 and stores nothing, as some CRMs do for an inactive owner

    def new_ref(self) -> str:
        self._refs += 1
        return str(self._refs)

    def add_leads(self, *rows: LeadRow) -> None:
        self.leads |= {row.ref: row for row in rows}

    def add_agents(self, *rows: AgentRow) -> None:
        self.agents |= {row.ref: row for row in rows}

    def add_hook(self, topic: str, url: str, active: bool = True) -> HookRow:
        row = HookRow(self.new_ref(), topic, url, active)
        self.hooks.append(row)
        return row

    def standing(self, url: str) -> list[tuple[str, bool]]:
        """Topics subscribed at `url` and whether they are active."""
        return sorted((h.topic, h.active) for h in self.hooks if h.url == url)

    @abstractmethod
    def handle(self, asked: Received) -> Reply: ...


@dataclass
class Running:
    """A client that talks to a fake over a real socket."""

    client: Client
    fake: Fake
    server: Server


class Kit(ABC):
    """One CRM for the suite. ``adapter`` may be replaced by a broken one, which must then fail."""

    name: ClassVar[str]
    secrets: ClassVar[tuple[bytes, bytes]]  # two tenants', or an old and a new one
    void_secrets: ClassVar[tuple[bytes, ...]]  # what counts as no secret at all
    signature_headers: ClassVar[tuple[str, ...]]  # each must be there
    credentials: ClassVar[Credentials]
    required: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]]  # fixture -> paths without which it is unreadable
    texts: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]]  # fixture -> paths of texts that events carry
    hostile: ClassVar[Sequence[bytes]] = ()  # further bodies that must not be read, of the kind that this CRM sends
    app_access: ClassVar[Mapping[str, str]] = {}  # with what an app's hook is made
    ponds: ClassVar[bool] = True  # whether this CRM has shared buckets of leads
    pond_is_owner: ClassVar[bool] = False  # where a bucket has a lead, nobody owns it
    zone: ClassVar[str | None] = "America/Denver"  # of every agent of the fake; None where the CRM tells none
    shows_deactivated: ClassVar[bool] = True  # else a deactivated agent is listed no more, which counts as gone
    url: str = "https://hooks.example.com/hooks/token"  # of the hook; some CRMs sign it

    def __init__(self, adapter: Adapter | None = None) -> None:
        self.adapter = adapter or registry.adapter(self.name)

    refusal: ClassVar[Mapping[str, str]] = {}  # headers of an answer that says no, where a bare one says "wait"
    missing: ClassVar[Any] = {"error": "x"}  # the body of a 404 of the CRM's own; None where it never answers one

    @abstractmethod
    def sign(self, body: bytes, secret: bytes, at: datetime = NOW, headers: Mapping[str, str] = {}) -> dict[str, str]:
        """All headers of a delivery, signed as the CRM would with `secret`, however odd it is."""

    def load(self, body: bytes) -> Any:
        """The body of a delivery, parsed; for a CRM that sends no JSON as if it were."""
        return json.loads(body)

    def dump(self, body: Any) -> bytes:
        """A parsed body as it is sent."""
        return json.dumps(body).encode()

    @abstractmethod
    def retopic(self, body: Any, topic: str) -> Any:
        """The parsed `body` under another topic."""

    def writes(self, asked: Received) -> bool:
        """Whether a call may change the CRM; for those whose readings are POSTs, too."""
        return asked.writes

    def about(self, fixture: Fixture, ref: str) -> bytes:
        """The body of a delivery as it would be about another lead."""
        return fixture.body.replace(fixture.about["events"][0]["ref"].encode(), ref.encode())

    def topic_headers(self, topic: str) -> Mapping[str, str]:
        """What an address of its own tells of `topic`, for a CRM whose bodies do not."""
        return {}

    @abstractmethod
    def batch(self, refs: Sequence[str | None]) -> Any:
        """A parsed body with one element for each ref; None stands for an element that cannot be read."""

    @abstractmethod
    def fake(self) -> Fake: ...

    def request(self, body: bytes, headers: Mapping[str, str]) -> WebhookRequest:
        return WebhookRequest("POST", self.url, headers, body)

    def signed(self, body: bytes, secret: bytes | None = None, at: datetime = NOW, **kw: Any) -> WebhookRequest:
        return self.request(body, self.sign(body, secret or self.secrets[0], at, **kw))

    def delivery(self, fixture: Fixture) -> WebhookRequest:
        return self.signed(fixture.body, headers=fixture.headers)

    @contextmanager
    def running(self) -> Iterator[Running]:
        fake = self.fake()
        answering = Server(fake.handle)
        answering.writes = self.writes
        with (
            answering.running() as server,
            Client(
                server.url,
                self.adapter.headers(self.credentials),
                self.credentials,
                now=lambda: NOW,
                allow_private_hosts=True,
                read_timeout=3.0,
                deadline=5.0,
                refine=self.adapter.refine,
                asks_to_wait=self.adapter.asks_to_wait,
                words=self.adapter.words,
            ) as client,
        ):
            yield Running(client, fake, server)


Answering = Callable[[str, str, dict[str, str]], Any]


class Scripted:
    """A client without sockets: a function of method, path and query gives the body, or status and body."""

    def __init__(self, base: str, answer: Answering, mock: RequestsMock, credentials: Credentials) -> None:
        self.calls: list[tuple[str, str, dict[str, str]]] = []
        self.client = Client(base, {}, credentials, now=lambda: NOW)

        def callback(request: Any) -> tuple[int, dict[str, str], Any]:
            parts = urlsplit(request.url)
            self.calls.append(
                (request.method, parts.path.removeprefix(urlsplit(base).path), dict(parse_qsl(parts.query)))
            )
            found = answer(*self.calls[-1])
            status, body = found if isinstance(found, tuple) else (200, found)
            return status, {}, body if isinstance(body, bytes) else json.dumps(body)

        for method in ("GET", "PUT", "PATCH", "POST", "DELETE"):
            mock.add_callback(method, re.compile(f"{re.escape(base)}/.*"), callback)


def kit(name: str, adapter: Adapter | None = None) -> Kit:
    """The kit of the CRM `name`. A CRM of the registry without one fails here: no adapter can opt out."""
    made: Kit = importlib.import_module(f"tests.adapters.kit_{name}").TheKit(adapter)
    return made


def plain(value: Any) -> Any:
    """`value` in the words of JSON, for comparison with a fixture; of a Lead only what it fills."""
    if isinstance(value, Lead):
        full = {f.name: getattr(value, f.name) for f in fields(Lead)}
        return {k: plain(v) for k, v in full.items() if v is not None and v is not False and v not in ((), {})}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def replaced(body: Any, path: Sequence[str | int], value: Any) -> Any:
    """A copy of `body` with `value` at `path`; ``...`` removes what is there."""
    copy = json.loads(json.dumps(body))
    at = copy
    for step in path[:-1]:
        at = at[step]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return copy
