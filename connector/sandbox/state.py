"""The one truth of the sandbox CRM: leads, agents, ponds, notes, hooks, and append-only logs, under one lock.

Every change happens inside :meth:`State.transaction`. When the outermost one ends, the faces turn its changes into
deliveries, still under the lock: so deliveries leave in the order of the changes and show exactly what was changed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from connector.sandbox.people import invent

if TYPE_CHECKING:
    from connector.sandbox.deliver import Delivery


@dataclass(slots=True)
class Settings:
    """Switches of the CRM, changeable while it runs. Times in seconds, limits in calls per ``rate_window``.

    ``fub_inactive``, ``generic_inactive`` and ``hubspot_inactive`` say what happens when a deactivated agent is made
    owner: ``accept`` (the owner is set), ``empty`` (success, and nobody owns the lead), ``refuse`` (an error).
    """

    limits: bool = False
    rate_window: float = 10.0
    limit_global: int = 250
    limit_events: int = 20
    limit_people: int = 25
    limit_notes: int = 10
    limit_generic: int = 250
    limit_hubspot: int = 190
    php_escapes: bool = False
    batch: int = 100
    generic_page: int = 100
    generic_single: bool = True
    fub_inactive: str = "accept"
    generic_inactive: str = "empty"
    hubspot_inactive: str = "refuse"
    hubspot_token_lives: float = 1800.0
    hubspot_revoked: bool = False
    retry_scale: float = 1.0
    concurrency: int = 8
    timeout: float = 10.0

    def change(self, values: Mapping[str, Any]) -> None:
        """Set several at once. Raises :class:`ValueError` for an unknown name or a wrong kind of value."""
        for name, value in values.items():
            now = getattr(self, name, None) if name in {item.name for item in fields(self)} else None
            if now is None:
                raise ValueError(f"settings: no setting {name!r}")
            if type(value) is not type(now) and not (isinstance(now, float) and type(value) is int):
                raise ValueError(f"settings: {name} must be {type(now).__name__}")
            if name.endswith("_inactive") and value not in ("accept", "empty", "refuse"):
                raise ValueError(f"settings: {name} must be accept, empty or refuse")
        for name, value in values.items():
            setattr(self, name, value)


@dataclass(frozen=True, slots=True)
class Account:
    """Who the CRM account is and the keys it gave out. All invented: they open nothing but this sandbox."""

    id: int = 1234567890
    name: str = "Acme Homes"
    domain: str = "acmehomes"
    api_key: str = "fka_sandbox_owner"
    agent_key: str = "fka_sandbox_agent"
    system_key: str = "sandbox-system-key-0123456789abcdef"
    api_secret: str = "whsec_c2FuZGJveC1hcGktc2VjcmV0LTAxMjM0NTY3ODk="  # noqa: S105 - invented
    api_token: str = "bcrm_pat_sandbox-0123456789"  # noqa: S105 - invented
    hubspot_portal: int = 62515
    hubspot_app: int = 9318066
    hubspot_client: str = "5c2f1f4e-0000-4000-8000-sandbox00001"
    hubspot_secret: str = "5c2f1f4e-0000-4000-8000-sandbox00002"  # noqa: S105 - invented
    hubspot_developer: str = "00000000-0000-4000-8000-sandbox00003"
    hubspot_token: str = "pat-na1-sandbox-0123456789"  # noqa: S105 - invented
    hubspot_refresh: str = "na1-sandbox-refresh-0123456789"
    webhook_secret: str = "whsec_c2FuZGJveC1ob29rLXNlY3JldC0wMTIzNDU2Nzg="  # noqa: S105 - invented


@dataclass(slots=True, eq=False)
class Lead:
    """A lead as the CRM holds it. ``born`` is the monotonic time of creation; ``history`` the last holders."""

    id: int
    created: datetime
    updated: datetime
    born: float
    owner: int | None = None
    pond: int | None = None
    unclaimed: bool = False
    lender: int | None = None
    collaborators: list[int] = field(default_factory=list)
    name: str | None = None
    source: str | None = None
    source_url: str | None = None
    type: str | None = None
    stage: str | None = None
    price: int | None = None
    contacted: bool = False
    background: str | None = None
    street: str | None = None
    city: str | None = None
    county: str | None = None
    state: str | None = None
    zip: str | None = None
    country: str | None = None
    latitude: float | None = None
    longitude: float | None = None
    form: str | None = None
    campaign: str | None = None
    language: str | None = None
    tags: list[str] = field(default_factory=list)
    emails: list[str] = field(default_factory=list)
    phones: list[str] = field(default_factory=list)
    custom: dict[str, Any] = field(default_factory=dict)
    former: list[int] = field(default_factory=list)
    history: deque[tuple[float, int | None, int | None]] = field(default_factory=lambda: deque(maxlen=20))


EDITABLE = frozenset(item.name for item in fields(Lead)) - {"id", "created", "updated", "born", "former", "history"}


@dataclass(slots=True, eq=False)
class Agent:
    """Somebody of the account. ``status`` is Active, Invited or Deleted; ``role`` Agent, Broker or Lender."""

    id: int
    name: str
    email: str
    created: datetime
    updated: datetime
    role: str = "Agent"
    status: str = "Active"
    paused: bool = False
    zone: str = "America/Chicago"
    is_owner: bool = False

    @property
    def active(self) -> bool:
        """Whether the CRM itself would give this agent leads (paused or not)."""
        return self.status == "Active" and self.role != "Lender"


@dataclass(slots=True, eq=False)
class Hook:
    """A webhook subscription of one face."""

    id: int
    face: str
    url: str
    topics: tuple[str, ...]
    active: bool = True
    system: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """One effective change of one lead: ``created``, ``updated``, ``deleted``, ``merged``, ``inquiry``; and by whom."""

    kind: str
    lead: Lead
    tags_added: tuple[str, ...] = ()
    stage: str | None = None
    inquiry: int | None = None
    owner_changed: bool = False
    by: str = "human"


@dataclass(slots=True)
class Transaction:
    """What a block of changes did, and the deliveries that tell of it (filled when the block has ended)."""

    changes: list[Change] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)


def utc_now() -> datetime:
    """Now, aware UTC."""
    return datetime.now(UTC)


class State:
    """Everything the CRM knows. Hold :attr:`lock` (or a :meth:`transaction`) for any read of more than one value."""

    def __init__(self, seed: int = 0, settings: Settings | None = None, account: Account | None = None) -> None:
        # One lock for the whole CRM: calls are microseconds long, and one order of all changes makes the logs an
        # oracle. Re-entrant, because a call's transaction contains those of the methods it uses.
        self.lock = threading.RLock()
        self.seed = seed
        self.settings = settings or Settings()
        self.account = account or Account()
        self.leads: dict[int, Lead] = {}
        self.agents: dict[int, Agent] = {}
        self.ponds: dict[int, dict[str, Any]] = {}
        self.hooks: dict[int, Hook] = {}
        self.notes: dict[int, list[dict[str, Any]]] = {}
        self.tasks: dict[int, list[dict[str, Any]]] = {}
        self.inquiries: dict[int, dict[str, Any]] = {}
        self.owner_log: list[dict[str, Any]] = []
        self.write_log: list[dict[str, Any]] = []
        self.call_log: list[dict[str, Any]] = []
        self.deliveries: dict[int, Delivery] = {}
        self.publishers: list[Callable[[list[Change]], list[Delivery]]] = []
        self.send: Callable[[list[Delivery]], None] = lambda deliveries: None
        self._transaction: Transaction | None = None
        self._numbers = {"lead": 40_000, "agent": 10, "pond": 6}
        self._invented = 0
        self._people()

    def _people(self) -> None:
        owner = self.add_agent("Olive Owner", role="Broker")
        owner.is_owner = True
        zones = ("America/Chicago", "America/Chicago", "America/New_York", "America/Denver", "America/Los_Angeles")
        for name, zone in zip(("Ana Alvarez", "Ben Brown", "Cy Chen", "Dee Davis", "Eli Evans"), zones, strict=True):
            self.add_agent(name, zone=zone)
        agents = [agent.id for agent in self.agents.values() if agent.role == "Agent"]
        self.add_pond("Shared pond", agents)
        self.keys = {self.account.api_key: owner.id, self.account.agent_key: agents[0]}

    def number(self, kind: str) -> int:
        """The next id of a kind."""
        with self.lock:
            self._numbers[kind] = self._numbers.get(kind, 0) + 1
            return self._numbers[kind]

    def stamp(self) -> dict[str, Any]:
        """The head of a log entry: ``seq``, ``at`` (UTC text), ``mono`` (seconds of this machine's clock)."""
        return {"seq": self.number("log"), "at": utc_now().isoformat(), "mono": time.monotonic()}

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A block of changes that is told in one go. Joins the block around it, if any.

        What was changed is told even when the block then fails: it is changed.
        """
        with self.lock:
            if self._transaction is not None:
                yield self._transaction
                return
            self._transaction = current = Transaction()
            try:
                yield current
            finally:
                self._transaction = None
                if current.changes:
                    for publish in self.publishers:
                        current.deliveries += publish(current.changes)
                    self.deliveries.update((delivery.id, delivery) for delivery in current.deliveries)
                    self.send(current.deliveries)

    # -- leads --------------------------------------------------------------------------------------------
    def create(self, values: Mapping[str, Any], by: str = "human") -> Lead:
        """A new lead: invented fields, overridden by `values` (:data:`EDITABLE` names, and ``created``)."""
        given = dict(values)
        created = given.pop("created", None) or utc_now()
        if isinstance(created, str):
            created = datetime.fromisoformat(created)
        if created.tzinfo is None:
            raise ValueError("leads: created must name its zone")
        self.check(given)
        with self.transaction() as transaction:
            now, number = time.monotonic(), self._invented
            self._invented += 1
            born = now - max((utc_now() - created) / timedelta(seconds=1), 0.0)
            lead = Lead(self.number("lead"), created.astimezone(UTC), utc_now(), born)
            for name, value in {**invent(self.seed, number), **given}.items():
                setattr(lead, name, copy(value))
            lead.history.append((born, lead.owner, lead.pond))
            self.leads[lead.id] = lead
            if lead.owner is not None:
                self._log_owner(lead, None, by)
            transaction.changes.append(Change("created", lead, by=by))
            return lead

    def edit(self, lead: Lead, values: Mapping[str, Any], by: str = "human") -> bool:
        """Change fields of a lead; whether anything was different. Only a difference is told."""
        given = dict(values)
        self.check(given)
        with self.transaction() as transaction:
            before = (lead.owner, lead.pond)
            old_tags, old_stage = list(lead.tags), lead.stage
            changed = False
            for name, value in given.items():
                if getattr(lead, name) != value:
                    setattr(lead, name, copy(value))
                    changed = True
            if not changed:
                return False
            lead.updated = utc_now()
            if (lead.owner, lead.pond) != before:
                lead.history.append((time.monotonic(), lead.owner, lead.pond))
            if lead.owner != before[0]:
                self._log_owner(lead, before[0], by)
            tags = tuple(tag for tag in lead.tags if tag not in old_tags)
            stage = lead.stage if lead.stage != old_stage else None
            new_owner = lead.owner != before[0]
            transaction.changes.append(Change("updated", lead, tags, stage, owner_changed=new_owner, by=by))
            return True

    def set_owner(self, lead: Lead, owner: int | None, by: str, pond: int | None = None) -> bool:
        """Give the lead to an agent (or a pond, or nobody); whether that is a change. An offer on it ends."""
        return self.edit(lead, {"owner": owner, "pond": pond, "unclaimed": False}, by)

    def write_owner(self, lead: Lead, target: int | None, effect: str | None, pond: int | None = None) -> None:
        """An owner write through the API. `effect`: None as ordered, ``empty`` or ``unchanged`` (both a lie)."""
        with self.transaction():
            changed = False
            if effect != "unchanged":
                kept = None if effect == "empty" else target
                changed = self.set_owner(lead, kept, "api", None if effect == "empty" else pond)
            entry = {"lead": lead.id, "target": target, "owner": lead.owner, "changed": changed, "effect": effect}
            self.write_log.append({**self.stamp(), **entry})

    def delete(self, lead: Lead) -> None:
        """Remove a lead with its notes and inquiries."""
        with self.transaction() as transaction:
            del self.leads[lead.id]
            self.notes.pop(lead.id, None)
            self.tasks.pop(lead.id, None)
            for key in [key for key, item in self.inquiries.items() if item["lead"] == lead.id]:
                del self.inquiries[key]
            transaction.changes.append(Change("deleted", lead))

    def merge(self, kept: Lead, lost: Lead) -> int:
        """One lead out of two, under a new id: `kept` with what was put on both. The ids from before are gone."""
        with self.transaction() as transaction:
            before = (kept.id, lost.id)
            notes = [note for number in before for note in self.notes.pop(number, [])]
            tasks = [task for number in before for task in self.tasks.pop(number, [])]
            for number in before:
                del self.leads[number]
            kept.id, kept.former, kept.updated = self.number("lead"), [*kept.former, *lost.former, *before], utc_now()
            self.leads[kept.id], self.notes[kept.id], self.tasks[kept.id] = kept, notes, tasks
            transaction.changes.append(Change("merged", kept))
            return kept.id

    def add_inquiry(self, lead: Lead, values: Mapping[str, Any]) -> int:
        """A new inquiry of a known lead; its id."""
        with self.transaction() as transaction:
            number = self.number("inquiry")
            self.inquiries[number] = {**values, "id": number, "lead": lead.id, "created": utc_now()}
            transaction.changes.append(Change("inquiry", lead, inquiry=number))
            return number

    def add_note(self, lead: Lead, subject: str, body: str) -> dict[str, Any]:
        """A new note on a lead."""
        with self.lock:
            note = {"id": self.number("note"), "created": utc_now(), "subject": subject, "body": body}
            self.notes.setdefault(lead.id, []).append(note)
            return note

    def add_task(self, lead: Lead, agent: int, text: str, body: str, due: str) -> dict[str, Any]:
        """A new task of an agent about a lead; `due` is the time as it was sent."""
        with self.lock:
            task = {"id": self.number("task"), "agent": agent, "text": text, "body": body, "due": due}
            self.tasks.setdefault(lead.id, []).append(task)
            return task

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise :class:`ValueError` for a field, agent or pond that does not exist."""
        if unknown := sorted(set(values) - EDITABLE):
            raise ValueError(f"leads: no field {', '.join(unknown)}; there are {', '.join(sorted(EDITABLE))}")
        for agent in (values.get("owner"), *values.get("collaborators", ())):
            if agent is not None and agent not in self.agents:
                raise ValueError(f"leads: no agent {agent}")
        if values.get("pond") is not None and values["pond"] not in self.ponds:
            raise ValueError(f"leads: no pond {values['pond']}")

    def _log_owner(self, lead: Lead, old: int | None, by: str) -> None:
        self.owner_log.append({**self.stamp(), "lead": lead.id, "old": old, "new": lead.owner, "by": by})

    # -- agents, ponds, hooks -----------------------------------------------------------------------------
    def add_agent(self, name: str, **values: Any) -> Agent:
        """A new agent; an email is invented when none is given."""
        with self.lock:
            values.setdefault("email", f"{name.lower().replace(' ', '.')}@example.com")
            agent = Agent(self.number("agent"), name, created=utc_now(), updated=utc_now(), **values)
            self.agents[agent.id] = agent
            return agent

    def add_pond(self, name: str, agents: list[int]) -> dict[str, Any]:
        """A new pond that `agents` share."""
        with self.lock:
            number = self.number("pond")
            self.ponds[number] = {"id": number, "name": name, "agents": list(agents)}
            return self.ponds[number]

    def add_hook(self, face: str, url: str, topics: tuple[str, ...], system: str = "") -> Hook:
        """A new active hook."""
        with self.lock:
            hook = Hook(self.number("hook"), face, url, topics, system=system)
            self.hooks[hook.id] = hook
            return hook

    def hooks_for(self, face: str, topic: str) -> list[Hook]:
        """Active hooks of a face that want a topic."""
        return [hook for hook in self.hooks.values() if hook.face == face and hook.active and topic in hook.topics]
