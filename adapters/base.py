"""The contract between Turnlock and one CRM.

An adapter is stateless: the :class:`adapters.client.Client` that carries its calls is handed in, as is `now`.
What a CRM cannot do is a missing :class:`Capability`, never an ``if vendor``. Every adapter inherits the
conformance suite in ``tests/adapters/conformance.py``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from adapters.budget import Bucket, Left, left_by
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Client
    from adapters.oauth import OAuth
    from adapters.outcome import Outcome

_SLUG = re.compile(r"[a-z0-9_]{1,60}")

#: A header of :class:`WebhookRequest` that no sender can set: what stood after the token in the address of the hook
#: (``/hooks/<token>/<topic>``). For CRMs whose deliveries do not say what they tell of: each topic has an address.
HOOK_TOPIC = ":topic"


class _Declared(Exception):
    """An error with a reason slug: the only text of it that may reach a log."""

    def __init__(self, reason: str) -> None:
        if not _SLUG.fullmatch(reason):
            raise ValueError(f"reason must match {_SLUG.pattern}, not {reason!r}")
        super().__init__(reason)
        self.reason = reason


class Rejected(_Declared):
    """The delivery is not proven to come from the CRM: answered 401, nothing stored."""


class Unreadable(_Declared):
    """The delivery is genuine but its body cannot be read: stored and parked, answered 2xx."""


class Capability(StrEnum):
    """What a CRM can do. Declared in manifest.json, checked against the adapter."""

    SIGNED_WEBHOOKS = "signed_webhooks"
    HOOK_PASSWORD = "hook_password"  # noqa: S105 - a word; each delivery shows a secret that covers nothing of it
    SIGNED_TIME = "signed_time"
    TENANT_SECRET = "tenant_secret"  # noqa: S105 - a word, not a secret
    EVENT_ID = "event_id"
    COMPLETE_PAYLOAD = "complete_payload"
    BATCH_DELIVERY = "batch_delivery"
    BATCH_READ = "batch_read"
    WEBHOOK_API = "webhook_api"
    CONDITIONAL_WRITE = "conditional_write"
    WRITE_ANSWERS_OWNER = "write_answers_owner"
    NULL_OWNER = "null_owner"
    NOTES = "notes"
    TASKS = "tasks"  # something to do for an agent, with a due time
    COLLABORATORS = "collaborators"
    AGENT_PAUSE = "agent_pause"
    SWEEP = "sweep"
    SWEEP_CHANGES = "sweep_changes"  # leads can be listed by the time of their last change
    TEST_LEAD = "test_lead"  # a lead can be made and removed by the API, to try the whole way
    TEAMS = "teams"  # agents stand in named teams or groups, which make good first queues
    APP_HOOKS = "app_hooks"  # an app has one hook for the accounts of all who installed it
    APP_HOOKS_API = "app_hooks_api"  # and the app's developer can make it by the API


@dataclass(frozen=True, slots=True)
class WebhookRequest:
    """One HTTP request of a CRM as received. ``headers`` has lower-case names; ``body`` is the raw bytes.

    Where the address held a topic, ``headers`` has it as :data:`HOOK_TOPIC`.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes


class EventKind(StrEnum):
    """What an event tells about one lead."""

    LEAD_CREATED = "lead_created"
    LEAD_CHANGED = "lead_changed"
    LEAD_DELETED = "lead_deleted"
    INQUIRY = "inquiry"  # ``ref`` names a vendor object that must be resolved to a lead first
    UNKNOWN = "unknown"  # answered 2xx and ignored
    UNREADABLE = "unreadable"  # this element is parked, its neighbours are not


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a delivery tells about one lead.

    ``key`` names the event for ever when ``key_is_final`` (the vendor's own event id); otherwise it only joins it
    with an equal event that no worker has claimed yet. ``lead`` is set when the payload holds the whole lead.
    ``problem`` is a reason slug, for ``UNREADABLE`` only. ``account`` is the vendor's id of the account that the event
    is about, where a delivery tells it: by that an app's one hook is split among its tenants.
    """

    kind: EventKind
    key: str
    key_is_final: bool = True
    ref: str | None = None
    lead: Lead | None = None
    occurred_at: datetime | None = None
    problem: str | None = None
    account: str | None = None


@dataclass(frozen=True, slots=True)
class OwnerWrite:
    """What a CRM answered to an owner write.

    ``owner_ref`` is the owner that the answer itself shows (None: nobody). It counts only where the adapter has
    ``WRITE_ANSWERS_OWNER``; elsewhere the caller reads the lead again. ``conflict`` means that a conditional
    write found someone else's change and wrote nothing.
    """

    owner_ref: str | None = None
    conflict: bool = False


@dataclass(frozen=True, slots=True)
class Team:
    """A team or group of agents in the CRM, as a template for a queue."""

    ref: str
    name: str
    agent_refs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hook:
    """A webhook subscription at the CRM, as its API shows it."""

    hook_ref: str
    topic: str
    url: str
    active: bool


@dataclass(frozen=True, slots=True)
class Subscribed:
    """What :meth:`Adapter.subscribe` left behind: hooks that stand now and what a human must still do.

    ``secret`` is what signs the deliveries of these hooks, where the CRM or the adapter made it up and no admin can
    know it: the caller keeps it under the adapter's ``hook_secret``.
    """

    hooks: tuple[Hook, ...] = ()
    by_hand: tuple[str, ...] = ()
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a connection check: ``where: what; how to fix``. ``fix`` is empty when ``ok``."""

    where: str
    ok: bool
    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a tenant configured for its CRM: plain parameters and opened secrets, by the manifest's names."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


class Adapter(ABC):
    """The code for one CRM. Subclasses hold tables and pure functions, no state."""

    name: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]]
    default_base_url: ClassVar[str | None]
    hook_secret: ClassVar[str | None]  # the manifest's name of the secret that signs deliveries; None: nothing does
    topics: ClassVar[Mapping[str, EventKind]]  # what is subscribed to; `parse` may know more
    missing_is_final_after: ClassVar[float] = 0.0  # seconds for which a 404 may mean "not readable yet"
    # Seconds from a delivery to the first reading of its leads, for a CRM that tells of what it has not stored yet. An
    # event that is younger than the lead as read (`occurred_at`, to the second) is then read again until it is not, or
    # until `missing_is_final_after`: a change that was taken back is never stored.
    settle: ClassVar[float] = 0.0
    max_batch: ClassVar[int] = 1  # leads per read call
    app_access: ClassVar[Mapping[str, bool]] = {}  # with what an app's hook is made: names, and whether it is a secret
    oauth: ClassVar[OAuth | None] = None  # how an account grants access to an app of this CRM
    # What the CRM lets an account call, the special before the general; empty: it does not limit calls.
    buckets: ClassVar[tuple[Bucket, ...]] = ()
    # Attributes of Lead that only a reading shows: where the rules look at one, a payload is not enough to decide on.
    not_in_payload: ClassVar[frozenset[str]] = frozenset()

    # -- inbound: pure and bounded ------------------------------------------------------------------------
    @abstractmethod
    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        """Raise :class:`Rejected` unless one of `secrets` proves `request`. No secret proves nothing.

        Secrets are the bytes of the text that was configured, with any prefix it has. With
        :attr:`Capability.HOOK_PASSWORD` the sender shows the secret itself. With neither that nor
        :attr:`Capability.SIGNED_WEBHOOKS` only the token in the hook's address guards it: everything passes. Unless
        its body is signed no event may hold a lead, so that a delivery is never more than a reason to read.
        """

    @abstractmethod
    def parse(self, request: WebhookRequest) -> list[Event]:
        """Events of a verified delivery, in its order. Raises :class:`Unreadable` when nothing can be told."""

    def acknowledgement(self) -> tuple[str, str]:
        """Body and content type that this CRM expects with a 2xx."""
        return "", "text/plain"

    # -- outbound: through the client ---------------------------------------------------------------------
    def refine(self, status: int, data: Any) -> Outcome | None:
        """What an answer other than 2xx means where this CRM's `status` alone misleads; None: what it says.

        `data` is the parsed body, None where it is no JSON. Called by the client for every such answer.
        """
        return None

    def asks_to_wait(self, status: int, headers: Mapping[str, str], data: Any) -> float | None:
        """Seconds to wait where an answer other than 2xx says "not now" in a way of its CRM's own; None: it does not.

        Looked at before :meth:`refine`, which then is not asked; a ``Retry-After`` says better how long, unless this
        is infinite: longer than any that is honoured. `headers` are looked up in any case, `data` is the parsed body
        or None.
        """
        return None

    def words(self, status: int, headers: Mapping[str, str], data: Any) -> str | None:
        """What the admin is told of an answer other than 2xx, where this CRM's own cause has a remedy of its own.

        None: what its outcome says. Never a text out of `data`, which may name people. Both as in :meth:`asks_to_wait`.
        """
        return None

    def canonical_ref(self, ref: str) -> str:
        """The one form of an id that a CRM writes in several; what is no id stays as it is."""
        return ref

    def buckets_of(self, credentials: Credentials) -> Sequence[Bucket]:
        """The buckets of this account, where they differ by how it is connected."""
        return self.buckets

    def left(self, headers: Mapping[str, str], charged: Sequence[Bucket]) -> Mapping[str, Left]:
        """What an answer's headers say is left, by the names of buckets; `charged` are those that its call took from.

        Headers are looked up in any case. By default ``X-RateLimit-Remaining`` and ``-Limit``, of the last bucket.
        """
        said = left_by(headers, "X-RateLimit-Remaining", "X-RateLimit-Limit")
        return {charged[-1].name: said} if said is not None and charged else {}

    @abstractmethod
    def headers(self, credentials: Credentials) -> Mapping[str, str]:
        """Headers that identify and authorise every request."""

    def account(self, client: Client) -> str | None:
        """The CRM's id of the connected account, where deliveries name it and nothing signs them; None elsewhere.

        A delivery that names another account is then refused: it is of a copy of the account, or of a stranger.
        """
        return None

    @abstractmethod
    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        """The leads with these refs as they are now; one that the CRM does not show is absent from the answer."""

    def resolve(self, client: Client, ref: str) -> str | None:
        """Lead ref behind an ``INQUIRY`` ref, or None when it is gone."""
        return ref

    @abstractmethod
    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        """Make `agent_ref` the owner of `lead` (as just read). Idempotent by value."""

    def add_collaborator(self, client: Client, lead: Lead, agent_ref: str) -> None:
        """Add `agent_ref` as a collaborator, keeping those already there."""
        raise NotImplementedError(f"{self.name} lacks {Capability.COLLABORATORS}")

    def find_note(self, client: Client, ref: str, marker: str) -> bool:
        """Whether a note holding `marker` is already on the lead."""
        raise NotImplementedError(f"{self.name} lacks {Capability.NOTES}")

    def add_note(self, client: Client, ref: str, subject: str, body: str) -> None:
        """Put a note on the lead. Not idempotent: callers look with :meth:`find_note` before a repeat."""
        raise NotImplementedError(f"{self.name} lacks {Capability.NOTES}")

    def find_task(self, client: Client, ref: str, marker: str) -> bool:
        """Whether a task holding `marker` is already on the lead."""
        raise NotImplementedError(f"{self.name} lacks {Capability.TASKS}")

    def add_task(self, client: Client, ref: str, agent_ref: str, text: str, marker: str, due: datetime) -> None:
        """Give the agent something to do about the lead until `due`. Callers look with :meth:`find_task` first."""
        raise NotImplementedError(f"{self.name} lacks {Capability.TASKS}")

    def add_test_lead(self, client: Client, name: str, email: str, definition: UnassignedDefinition) -> str:
        """Make a lead that nobody has (by `definition`, in a CRM where each has an owner), to try the whole way with.

        Returns its ref.
        """
        raise NotImplementedError(f"{self.name} lacks {Capability.TEST_LEAD}")

    def remove_test_lead(self, client: Client, ref: str) -> None:
        """Remove such a lead again. One that is gone already is no error."""
        raise NotImplementedError(f"{self.name} lacks {Capability.TEST_LEAD}")

    @abstractmethod
    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        """Every agent, deactivated ones included, each once."""

    def list_teams(self, client: Client) -> Iterator[Team]:
        """Every team or group with its active agents, each once."""
        raise NotImplementedError(f"{self.name} lacks {Capability.TEAMS}")

    @abstractmethod
    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        """One agent as they are now, or None when the CRM has no such agent."""

    @abstractmethod
    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Pages of refs of leads created since `since` that look unassigned. Ids only: callers read each again."""

    def changed_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Pages of refs of leads changed since `since` that look unassigned, however old they are. Ids only.

        By that an owner who was cleared while nobody listened is found. Callers drop what they have never known: in
        some CRMs a nightly job changes every lead.
        """
        raise NotImplementedError(f"{self.name} lacks {Capability.SWEEP_CHANGES}")

    @abstractmethod
    def subscribe(self, client: Client, url: str) -> Subscribed:
        """Reconcile: exactly our active hooks at `url` for every topic, stale ones of ours removed."""

    def subscribe_app(self, client: Client, url: str, *, replace: bool) -> Subscribed:
        """The one hook of an app at `url`, with all subscriptions active. The client has :attr:`app_access`.

        An app that posts elsewhere is only turned to `url` with `replace`: another installation may live by it.
        """
        raise NotImplementedError(f"{self.name} lacks {Capability.APP_HOOKS_API}")

    def lost_hooks(self, client: Client, url: str) -> tuple[str, ...]:
        """Topics whose hook at `url` this CRM has removed or switched off by itself, for a CRM that does so."""
        return ()

    @abstractmethod
    def unsubscribe(self, client: Client, url: str) -> int:
        """Remove our hooks at `url`; how many there were."""

    @abstractmethod
    def check(self, client: Client, url: str | None) -> list[Finding]:
        """Prove the connection with read-only calls. Problems are findings, not exceptions."""
