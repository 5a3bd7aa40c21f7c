"""EspoCRM 8 and 9: the REST API ``/api/v1`` (https://docs.espocrm.com/development/api/, .../development/webhooks/).

What no page tells was seen on a running 8.4.2; the traffic is kept in ``tests/fixtures/espocrm/captured``.

What shapes this module: a delivery is a bare array of records, with no name of the event, no id and no time, so each
topic has an address of its own, and deliveries up to two minutes late (cron) are only taken for a reason to read.
EspoCRM makes the secret of each webhook itself. 403 means a missing right, an unknown user, or, without a reason in
its headers, that too many wrong logins came from this address: then the right key is refused too. An owner write is
not conditional and takes an inactive user. A user of the API does not see inactive users at all.

Not captured, but read: posts (https://docs.espocrm.com/development/api/stream/), followers, who stand for
collaborators (Espo/Tools/Stream/Api/PostFollowers.php), and the users of a team.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from adapters import espocrm_api as api
from adapters import payload, signing, upkeep
from adapters.base import (
    HOOK_TOPIC,
    Adapter,
    Capability,
    Credentials,
    Event,
    EventKind,
    Finding,
    Hook,
    OwnerWrite,
    Rejected,
    Subscribed,
    Team,
    Unreadable,
    WebhookRequest,
)
from adapters.espocrm_reading import agent_of, lead_of, rows_of
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Client

# https://docs.espocrm.com/development/webhooks/#events
_KINDS: Mapping[str, EventKind] = MappingProxyType(
    {
        "Lead.create": EventKind.LEAD_CREATED,
        "Lead.update": EventKind.LEAD_CHANGED,
        "Lead.fieldUpdate.assignedUser": EventKind.LEAD_CHANGED,
        "Lead.delete": EventKind.LEAD_DELETED,
    }
)
# Every own owner write would come back twice by Lead.update (the owner, then the followers).
_TOPICS = ("Lead.create", "Lead.fieldUpdate.assignedUser", "Lead.delete")
_DONE = frozenset({"Converted", "Recycled", "Dead"})
_REFUSALS = ("cannotRelateNonExisting", "couldNotAddFollowerUserHasNoAccessToStream")
_RIGHTS = (  # what App/user must show of the connected user's roles, and the words for the admin
    (("table", "Lead", "read"), "all", "Leads: read all"),
    (("table", "Lead", "edit"), "all", "Leads: edit all"),
    (("table", "Lead", "stream"), "all", "Leads: stream all"),
    (("assignmentPermission",), "all", "Assignment Permission: all"),
    (("userPermission",), "all", "User Permission: all"),
    (("table", "Webhook"), True, "Webhooks: enabled"),
)
_NO_FOLLOWERS = "rules with collaborators need the role's Follower Management Permission: all"
_USER = "id,userName,name,isActive,emailAddress,type"
_LAG = timedelta(seconds=150)  # cron sends webhooks every two minutes


class EspoCrm(Adapter):
    """See the module's text."""

    name = "espocrm"
    capabilities = frozenset(
        {
            Capability.SIGNED_WEBHOOKS,
            Capability.TENANT_SECRET,
            Capability.BATCH_DELIVERY,
            Capability.WEBHOOK_API,
            Capability.NULL_OWNER,
            Capability.NOTES,
            Capability.COLLABORATORS,
            Capability.SWEEP,
            Capability.SWEEP_CHANGES,
            Capability.TEST_LEAD,
            Capability.TEAMS,
        }
    )
    default_base_url = None
    hook_secret = "webhook_secret"  # noqa: S105 - the name of a secret
    topics: ClassVar[Mapping[str, EventKind]] = MappingProxyType({t: _KINDS[t] for t in _TOPICS})

    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        """``X-Signature: base64(<id>:<raw HMAC-SHA256 of the body>)``, id and key being the webhook's own.

        A secret is ``<id>:<key>`` of each webhook, separated by commas. From version 9.3 on ``Signature`` has the
        HMAC in hex, and ``X-Signature`` is to end with version 11.
        """
        keys = [(i, key) for s in secrets for i, _, key in (p.partition(b":") for p in s.split(b",")) if i and key]
        if not keys:
            raise Rejected("bad_secret" if any(secrets) else "no_secret")
        given = request.headers.get("x-signature", "")
        newer = not given
        given = given or request.headers.get("signature", "")
        if not given:
            raise Rejected("no_signature")
        macs = [(hook_id, hmac.new(key, request.body, hashlib.sha256)) for hook_id, key in keys]
        proofs = [hook_id + b":" + (mac.hexdigest().encode() if newer else mac.digest()) for hook_id, mac in macs]
        signing.prove(given, map(base64.b64encode, proofs))

    def parse(self, request: WebhookRequest) -> list[Event]:
        """One event per lead. Its key joins it with one about the same lead that nobody has read yet."""
        topic = request.headers.get(HOOK_TOPIC, "")
        body = payload.read_json(request.body)
        if not isinstance(body, list):
            raise Unreadable("wrong_type")
        kind = _KINDS.get(topic)
        digest = hashlib.sha256(request.body).hexdigest()
        if kind is None:
            return [Event(EventKind.UNKNOWN, f"unknown:{digest}", key_is_final=False)]
        events: dict[str, Event] = {}
        for position, element in enumerate(body):
            try:
                ref = Fields(element, strict=True).ref("id")
                key = f"{topic}:{ref}"
                events.setdefault(key, Event(kind, key, key_is_final=False, ref=ref))
            except Unreadable as error:
                key = f"{digest}:{position}"
                events[key] = Event(EventKind.UNREADABLE, key, key_is_final=False, problem=error.reason)
        return list(events.values())

    def refine(self, status: int, data: Any) -> Outcome | None:
        """403 also says that a user does not exist, or may not follow leads."""
        told = data.get("messageTranslation") if isinstance(data, dict) else None
        of_a_user = isinstance(told, dict) and told.get("label") in _REFUSALS
        return Outcome.REFUSED if status == 403 and of_a_user else None

    def asks_to_wait(self, status: int, headers: Mapping[str, str], data: Any) -> float | None:
        """The lock after wrong logins, and what is not EspoCRM at all."""
        return api.wait(status, headers)

    def words(self, status: int, headers: Mapping[str, str], data: Any) -> str | None:
        """Of those, and of the right to assign."""
        return api.words(status, headers)

    def headers(self, credentials: Credentials) -> Mapping[str, str]:
        """The key of a user of the type API."""
        key = credentials.secrets.get("api_key")
        return {"X-Api-Key": key} if key else {}

    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        """``GET Lead/{id}``, one by one; 404 for one that is deleted."""
        return upkeep.leads_one_by_one(refs, lambda ref: client.get(f"/api/v1/Lead/{ref}"), lead_of)

    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        """``PUT Lead/{id}`` with ``assignedUserId`` alone."""
        client.put(f"/api/v1/Lead/{payload.ref(lead.ref)}", json={"assignedUserId": agent_ref})
        return OwnerWrite()

    def add_collaborator(self, client: Client, lead: Lead, agent_ref: str) -> None:
        """``POST Lead/{id}/followers``: the right to it is the role's *Follower Management Permission*."""
        try:
            client.post(f"/api/v1/Lead/{payload.ref(lead.ref)}/followers", json={"id": agent_ref})
        except CrmError as error:
            # 404 and 403 may be said of the user as well as of the lead and of us.
            if error.outcome not in (Outcome.GONE, Outcome.FORBIDDEN) or self.get_agent(client, agent_ref):
                raise
            raise CrmError(Outcome.REFUSED, status=error.status, call="POST followers") from None

    def find_note(self, client: Client, ref: str, marker: str) -> bool:
        """The stream comes newest first, so a post of ours is on the first page as a rule; ten pages are looked at."""
        path = f"Lead/{payload.ref(ref)}/stream"
        found = api.listing(client, path, {}, lambda note: note.text("post") or "", most=10)
        return any(marker in text for page in found for text in page)

    def add_note(self, client: Client, ref: str, subject: str, body: str) -> None:
        """``POST Note``: a post in the lead's stream, in Markdown."""
        post = {"type": "Post", "parentType": "Lead", "parentId": payload.ref(ref), "post": f"**{subject}**\n\n{body}"}
        client.post("/api/v1/Note", json=post)

    def add_test_lead(self, client: Client, name: str, email: str, definition: UnassignedDefinition) -> str:
        """``POST Lead``, past the look for duplicates: the role must let the API user create leads."""
        first, _, last = name.partition(" ")
        made = {"firstName": first, "lastName": last, "emailAddress": email}
        answer = client.post("/api/v1/Lead", json=made, headers={"X-Skip-Duplicate-Check": "true"})
        with answer.reading(write=True):
            return Fields(answer.data, strict=False).ref("id")

    def remove_test_lead(self, client: Client, ref: str) -> None:
        """``DELETE Lead/{id}``: the role must let the API user delete what is its own."""
        upkeep.unless_gone(lambda: client.delete(f"/api/v1/Lead/{payload.ref(ref)}"))

    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        """Users who work with leads, admins among them. The deactivated are not shown, so they count as gone."""
        query = {
            "where[0][type]": "in",
            "where[0][attribute]": "type",
            "where[0][value][]": ["regular", "admin"],
            "select": _USER,
        }
        return upkeep.each_once(api.listing(client, "User", query, agent_of))

    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        """Out of the list, which is known to leave out the deactivated."""
        return next((agent for agent in self.list_agents(client) if agent.ref == ref), None)

    def list_teams(self, client: Client) -> Iterator[Team]:
        """``GET Team``, then the users of each."""
        working = {agent.ref for agent in self.list_agents(client) if agent.active}
        teams = api.listing(client, "Team", {"select": "id,name"}, lambda t: (t.ref("id"), t.text("name")))
        for ref, name in dict(row for page in teams for row in page).items():
            users = api.listing(client, f"Team/{ref}/users", {"select": "id"}, lambda user: user.ref("id"))
            members = payload.unique(user for page in users for user in page)
            yield Team(ref, name or ref, tuple(user for user in members if user in working))

    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Leads created since. Those younger than the parameter ``sweep_min_age`` (seconds, default 150) are left to
        the next sweep, because cron may not have sent their webhooks yet.
        """
        return _sweep(client, "createdAt", since, definition)

    def changed_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Leads modified since, in the order of their creation: nothing leaves its place in that."""
        return _sweep(client, "modifiedAt", since, definition)

    def subscribe(self, client: Client, url: str) -> Subscribed:
        """One webhook per topic, each at an address of its own; their secrets are EspoCRM's."""

        def make(topic: str, instead_of: Hook | None = None) -> Hook:
            # Not of new leads: a form may make them with the same key.
            own = _KINDS[topic] is EventKind.LEAD_CHANGED
            return api.create_hook(client, url, topic, skip_own=own, instead_of=instead_of)

        left = upkeep.reconcile(
            [hook for hook, _ in api.hooks(client)],
            url,
            _TOPICS,
            create=make,
            enable=lambda hook: make(hook.topic, hook),
            remove=lambda hook: api.remove_hook(client, hook),
        )
        pairs = sorted(f"{hook.hook_ref}:{key}" for hook, key in api.hooks(client) if hook.url == url and key)
        return Subscribed(left.hooks, left.by_hand, ",".join(pairs) or None)

    def unsubscribe(self, client: Client, url: str) -> int:
        """Remove every webhook at `url`."""
        return sum(api.remove_hook(client, hook) for hook, _ in api.hooks(client) if hook.url == url)

    def check(self, client: Client, url: str | None) -> list[Finding]:
        """User and rights, clock, leads, agents, webhooks."""

        def user() -> Iterator[Finding]:
            answer = client.get("/api/v1/App/user")
            with answer.reading():
                about = Fields(answer.data, strict=False)
                who, rights = about.object("user"), about.object("acl")
                what = f"{who.text('userName') or ''} {who.ref('id')}"
            yield Finding("user", True, what)
            lacking = [words for path, wanted, words in _RIGHTS if _at(rights.data, path) != wanted]
            fix = f"give the API user a role with {'; '.join(lacking)}" if lacking else ""
            yield Finding("rights", not lacking, f"{len(lacking)} lacking" if lacking else "sufficient", fix)
            may = "allowed" if rights.text("followerManagementPermission") == "all" else _NO_FOLLOWERS
            yield Finding("collaborators", True, may)
            yield upkeep.clock(upkeep.http_date(answer.headers.get("Date")), client.now())

        def leads() -> Iterator[Finding]:
            answer = client.get("/api/v1/Lead", params={"maxSize": "1", "select": api.ROW})
            with answer.reading():
                rows_of(Fields(answer.data, strict=False), lead_of)
            yield Finding("leads", True, "readable")

        return upkeep.probes(
            ("user", user),
            ("leads", leads),
            ("agents", lambda: [upkeep.agents(sum(a.active for a in self.list_agents(client)))]),
            ("hooks", lambda: [upkeep.hooks_alive([hook for hook, _ in api.hooks(client)], url, _TOPICS)]),
        )


def _at(data: Any, path: Sequence[str]) -> Any:
    for step in path:
        data = data.get(step) if isinstance(data, dict) else None
    return data


def _sweep(client: Client, field: str, since: datetime, definition: UnassignedDefinition) -> Iterator[list[str]]:
    """All leads by a time, oldest first, filtered here.

    A list of the unassigned alone would lose a page of them for each page that is assigned while it is read.
    """
    pages = ([lead for lead in page if lead.stage not in _DONE] for page in api.leads_after(client, field, since))
    return upkeep.unassigned(
        pages,
        definition,
        since=since.replace(microsecond=0),
        until=client.now() - payload.seconds(client.credentials.parameters.get("sweep_min_age"), _LAG),
        changed=field == "modifiedAt",
    )
