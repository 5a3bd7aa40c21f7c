"""BottleCRM: the REST API of the package ``django-crm`` 1.35.0 (https://github.com/Django-CRM/Django-CRM).

Deliveries and most answers are documented nowhere: what stands here was seen on a running, unmodified server. The
traffic is kept in ``tests/fixtures/bottlecrm/captured``; ``make realcrm`` repeats the essence on a new server.

What shapes this module: leads are held by *profiles* (not users), in a list; an owner write replaces the list, answers
200 and no record, and **leaves nobody** when the profile is unknown or inactive. A payload lacks address, tags and
custom fields, and a delivery that is sent again still shows the lead as it was. Bad credentials are answered 403, as
missing rights are. Only a person who is signed in can make webhooks. There is no conditional write, no limit of calls.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from adapters import payload, signing
from adapters.base import (
    Adapter,
    Capability,
    Credentials,
    Event,
    EventKind,
    Finding,
    OwnerWrite,
    Rejected,
    Subscribed,
    Unreadable,
    WebhookRequest,
)
from adapters.outcome import Outcome
from adapters.payload import Fields
from adapters.upkeep import (
    agents,
    clock,
    each_once,
    elsewhere,
    http_date,
    leads_one_by_one,
    not_there,
    pages,
    probes,
    unassigned,
    unless_gone,
)
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Client
    from adapters.upkeep import Next

_SIGNATURE = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})")
_TOLERANCE = 300  # seconds; the sender signs each attempt anew, so its clock is all that can differ
# Seconds from the change to the signature. A first attempt takes less than one, the first retry comes after 60.
_FIRST_ATTEMPT = 30.0
_LOGIN = "Organization context is required"  # 403 for a token that is wrong, revoked, expired or missing
_PAGE = 100
# Lists are ordered by random ids: a row that leaves one while it is read moves later rows up by a place.
_OVERLAP = 10
_DAY = timedelta(days=1)  # of margin, because created_at__gte knows days only, in the organisation's own zone

T = TypeVar("T")


class BottleCrm(Adapter):
    """See the module's text."""

    name = "bottlecrm"
    capabilities = frozenset(
        {
            Capability.SIGNED_WEBHOOKS,
            Capability.SIGNED_TIME,
            Capability.TENANT_SECRET,
            Capability.EVENT_ID,
            Capability.COMPLETE_PAYLOAD,
            Capability.NULL_OWNER,
            Capability.SWEEP,
            Capability.TEST_LEAD,
        }
    )
    default_base_url = None
    hook_secret = "webhook_secret"  # noqa: S105 - the name of a secret
    topics: ClassVar[Mapping[str, EventKind]] = MappingProxyType(
        {
            "lead.created": EventKind.LEAD_CREATED,
            "lead.updated": EventKind.LEAD_CHANGED,
            "lead.deleted": EventKind.LEAD_DELETED,
        }
    )
    not_in_payload = frozenset({"street", "city", "state", "zip", "country", "tags", "custom"})

    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        """``X-BottleCRM-Signature: t=<s>,v1=<hex>``, HMAC-SHA256 of ``<t>.<body>`` with the secret as it is shown."""
        keys = signing.keys(secrets)
        given = request.headers.get("x-bottlecrm-signature", "")
        if not given:
            raise Rejected("no_signature")
        parts = _SIGNATURE.fullmatch(given)
        if parts is None:
            raise Rejected("bad_signature")
        signed = f"{parts[1]}.".encode() + request.body
        wanted = [hmac.new(key, signed, hashlib.sha256).hexdigest().encode() for key in keys]
        signing.prove(parts[2], wanted)
        signing.fresh(int(parts[1]), now, _TOLERANCE)

    def parse(self, request: WebhookRequest) -> list[Event]:
        """One event. Its key is the body's own id, which retries and redeliveries keep.

        The lead is handed on only as the change left it; that of a later attempt is old and is read again.
        """
        body = Fields(payload.read_json(request.body), strict=True)
        kind = self.topics.get(body.required_text("event"))
        if kind is None:  # ping, or a record that is no lead
            return [Event(EventKind.UNKNOWN, f"unknown:{str(body.data.get('id'))[:100]}")]
        key = body.ref("id")
        if body.data.get("data") is None:
            raise payload.missing("data")
        data = body.object("data")
        ref = data.ref("id")
        occurred_at = Fields(body.data, strict=False).time("created_at")
        current = kind is not EventKind.LEAD_DELETED and _first_attempt(request, occurred_at)
        return [Event(kind, key, ref=ref, lead=_told(data) if current else None, occurred_at=occurred_at)]

    def refine(self, status: int, data: Any) -> Outcome | None:
        """403 is also what a call with a wrong token gets; only the text tells."""
        login = status == 403 and isinstance(data, dict) and str(data.get("detail", "")).startswith(_LOGIN)
        return Outcome.REAUTHORISE if login else None

    def asks_to_wait(self, status: int, headers: Mapping[str, str], data: Any) -> float | None:
        """A 404 without a detail comes from somewhere else."""
        return elsewhere(status, isinstance(data, dict) and "detail" in data)

    def words(self, status: int, headers: Mapping[str, str], data: Any) -> str | None:
        """What is not BottleCRM at all."""
        return not_there("BottleCRM's API") if self.asks_to_wait(status, headers, data) else None

    def headers(self, credentials: Credentials) -> Mapping[str, str]:
        """A personal access token of an admin: other users see only leads that are theirs."""
        token = credentials.secrets.get("api_token")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        """``GET /api/leads/{id}/``, one by one: there is no reading of several."""
        return leads_one_by_one(
            refs, lambda ref: client.get(f"/api/leads/{ref}/"), lambda data: _lead(data.object("lead_obj"))
        )

    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        """``PATCH /api/leads/{id}/`` with the whole list: the agent in the owner's place, other holders kept."""
        holders = payload.unique((agent_ref, *lead.collaborator_refs))
        client.patch(f"/api/leads/{payload.ref(lead.ref)}/", json={"assigned_to": holders})
        return OwnerWrite()

    def add_test_lead(self, client: Client, name: str, email: str, definition: UnassignedDefinition) -> str:
        """``POST /api/leads/``."""
        first, _, last = name.partition(" ")
        made = {"title": name, "first_name": first, "last_name": last, "email": email}
        answer = client.post("/api/leads/", json=made)
        with answer.reading(write=True):
            return Fields(answer.data, strict=False).ref("id")

    def remove_test_lead(self, client: Client, ref: str) -> None:
        """``DELETE /api/leads/{id}/``."""
        unless_gone(lambda: client.delete(f"/api/leads/{payload.ref(ref)}/"))

    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        """``GET /api/users/``, for admins only: active and inactive profiles, paged side by side."""
        return each_once(_listing(client, "/api/users/", {}, ("active_users", "inactive_users"), _agent))

    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        """Out of the list: a profile has no address of its own."""
        return next((agent for agent in self.list_agents(client) if agent.ref == ref), None)

    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """All open leads since the day before, filtered here: the server has no filter for "nobody"."""
        query = {"open": "true", "created_at__gte": (since.astimezone(UTC) - _DAY).strftime("%Y-%m-%d")}
        leads = _listing(client, "/api/leads/", query, ("open_leads",), _lead)
        return unassigned(leads, definition, since=since)

    def subscribe(self, client: Client, url: str) -> Subscribed:
        """By hand: tokens are refused at ``/api/webhooks/`` whatever their scopes."""
        return Subscribed(
            by_hand=(
                "BottleCRM lets no token make webhooks. Unless this one stands already, sign in as an admin, open the "
                f"settings of webhooks and add one: URL {url}, format JSON, events {', '.join(self.topics)}. The URL "
                "must be https on port 443. The signing secret is shown once: give it to "
                "`turnlock tenant secret <tenant> webhook_secret`, then send the test event",
            )
        )

    def unsubscribe(self, client: Client, url: str) -> int:
        """Nothing: an admin removes the webhook in BottleCRM."""
        return 0

    def check(self, client: Client, url: str | None) -> list[Finding]:
        """Leads, clock, agents. Webhooks cannot be looked at with a token."""

        def leads() -> Iterator[Finding]:
            answer = client.get("/api/leads/", params={"open": "true", "limit": "1"})
            with answer.reading():
                count = Fields(answer.data, strict=False).object("open_leads").number("leads_count")
                if count is None:
                    raise payload.missing("leads_count")
            yield Finding("leads", True, f"{count} open")
            yield clock(http_date(answer.headers.get("Date")), client.now())

        return [
            *probes(
                ("leads", leads),
                ("agents", lambda: [agents(sum(a.active for a in self.list_agents(client)))]),
            ),
            Finding("hooks", True, "cannot be read with a token; BottleCRM lists deliveries in the webhook's settings"),
        ]


def _first_attempt(request: WebhookRequest, occurred_at: datetime | None) -> bool:
    parts = _SIGNATURE.fullmatch(request.headers.get("x-bottlecrm-signature", ""))
    return not parts or occurred_at is None or int(parts[1]) - occurred_at.timestamp() <= _FIRST_ATTEMPT


def _told(data: Fields) -> Lead | None:
    """The lead of a delivery; None when a field is odd: by its id it can be read."""
    try:
        return _lead(data)
    except Unreadable:
        return None


def _lead(lead: Fields) -> Lead:
    """A lead of a delivery (``assigned_to`` holds ids) or of an answer (it holds profiles).

    The order of the list is the CRM's own, not that of assigning: the first is taken as the owner, the others are
    kept as collaborators. Deliveries cut times to milliseconds, so all are, or the same lead would look changed.
    """
    if not isinstance(lead.data.get("assigned_to"), list):
        raise payload.missing("assigned_to")  # nobody is guessed
    holders = [payload.ref(h.get("id") if isinstance(h, dict) else h) for h in lead.items("assigned_to")]
    names = payload.unique((lead.text("first_name"), lead.text("last_name")))
    custom = lead.object("custom_fields")
    return Lead(
        ref=lead.ref("id"),
        owner_ref=holders[0] if holders else None,
        collaborator_refs=payload.unique(holders[1:]),
        source=lead.text("source"),
        stage=lead.text("status"),
        price=lead.number("opportunity_amount"),
        street=lead.text("address_line"),
        city=lead.text("city"),
        state=lead.text("state"),
        zip=lead.text("postcode"),
        country=lead.text("country"),
        tags=lead.texts("tags", "name"),
        emails=payload.emails([lead.text("email")]),
        phones=payload.phones([lead.text("phone")]),
        custom=MappingProxyType(custom.scalars(custom.data)),
        created_at=_milliseconds(lead.time("created_at")),
        updated_at=_milliseconds(lead.time("updated_at")),
        name=" ".join(names) or lead.text("title"),
    )


def _milliseconds(time: datetime | None) -> datetime | None:
    return time and time.replace(microsecond=time.microsecond // 1000 * 1000)


def _agent(profile: Fields) -> AgentSeen:
    ref, user = profile.ref("id"), profile.object("user_details")
    return AgentSeen(
        ref=ref,
        name=user.text("name") or user.text("email") or ref,
        email=user.text("email"),
        active=profile.flag("is_active") is True and user.flag("is_active") is not False,
    )


def _listing(
    client: Client, path: str, query: Mapping[str, str], names: Sequence[str], make: Callable[[Fields], T]
) -> Iterator[list[T]]:
    """The pages of one list, or of several that share limit and offset.

    Each stands in an object of its own name with ``offset``: where its next page begins, null after the last one.
    """
    start = 0

    def read(data: Fields) -> tuple[list[T], Next | None]:
        nonlocal start
        rows: list[T] = []
        following = 0
        for name in names:
            shown = data.object(name)
            if not shown.has(name):
                raise payload.missing(name)
            rows += [make(row) for row in shown.objects(name)]
            following = max(following, int(shown.number("offset") or 0))
        if following <= start:
            return rows, None
        start = max(following - _OVERLAP, start + 1)
        return rows, (path, base | {"offset": str(start)})

    base = {**query, "limit": str(_PAGE)}
    return pages(lambda link, params: client.get(link, params=params), (path, base | {"offset": "0"}), read)
