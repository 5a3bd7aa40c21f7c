"""Twenty, core API of mid 2025 (https://twenty.com/developers/section/api-and-webhooks/api, .../webhooks).

What no page tells was seen on a running server; the traffic is kept in ``tests/fixtures/twenty/captured``.

What shapes this module: Twenty has no object for leads, so a tenant names one and its relation to a member; both stand
in the address of the hook, because a delivery is read without them. Deliveries hold the whole record, sign their time
in milliseconds (a nonce beside it is not signed), and are never repeated. The owner write is conditional by GraphQL,
whose errors are 200; by REST a missing record is 400. Pages by ``createdAt`` never end, so they go by id. Members who
left are not shown.

Not captured, but read in twenty-server: notes (modules/note/standard-objects), and the ``upsert`` of a creation
(engine/api/graphql/workspace-schema-builder/utils/get-resolver-args.util.ts).
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets as random_secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID, uuid5

from adapters import payload, signing, upkeep
from adapters import twenty_api as api
from adapters.base import (
    HOOK_TOPIC,
    Adapter,
    Capability,
    Credentials,
    Event,
    EventKind,
    Finding,
    OwnerWrite,
    Rejected,
    Subscribed,
    WebhookRequest,
)
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from adapters.twenty_reading import agent_of, lead_of
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Client

# modules/webhook/jobs/call-webhook.job.ts of twenty-server: the last part of ``eventName``.
_KINDS: Mapping[str, EventKind] = MappingProxyType(
    {
        "created": EventKind.LEAD_CREATED,
        "updated": EventKind.LEAD_CHANGED,
        "restored": EventKind.LEAD_CHANGED,
        "deleted": EventKind.LEAD_DELETED,
        "destroyed": EventKind.LEAD_DELETED,
    }
)
_NAMES = "correct the parameters object, objects and owner: API names of Settings, Data model"
_NOTE_IDS = UUID("3d1f0a52-6b7e-5c0e-9a44-7d0c1b6f2e11")  # ours alone
_TOLERANCE = 300  # seconds; nothing is sent twice


class Twenty(Adapter):
    """See the module's text."""

    name = "twenty"
    capabilities = frozenset(
        {
            Capability.SIGNED_WEBHOOKS,
            Capability.SIGNED_TIME,
            Capability.TENANT_SECRET,
            Capability.COMPLETE_PAYLOAD,
            Capability.WEBHOOK_API,
            Capability.CONDITIONAL_WRITE,
            Capability.NULL_OWNER,
            Capability.NOTES,
            Capability.SWEEP,
            Capability.SWEEP_CHANGES,
            Capability.TEST_LEAD,
        }
    )
    default_base_url = None
    hook_secret = "webhook_secret"  # noqa: S105 - the name of a secret
    topics: ClassVar[Mapping[str, EventKind]] = MappingProxyType({t: _KINDS[t] for t in api.TOPICS})

    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        """``X-Twenty-Webhook-Signature``: hex HMAC-SHA256 of ``<milliseconds>:<body>``. The nonce is not signed."""
        keys = signing.keys(secrets)
        at, given = (request.headers.get(f"x-twenty-webhook-{n}", "") for n in ("timestamp", "signature"))
        if not at or not given:
            raise Rejected("no_signature")
        if not re.fullmatch("[0-9]{1,15}", at, re.ASCII):
            raise Rejected("bad_time")
        signed = at.encode() + b":" + request.body
        signing.prove(given, [hmac.new(key, signed, hashlib.sha256).hexdigest().encode() for key in keys])
        signing.fresh(int(at) / 1000, now, _TOLERANCE)

    def parse(self, request: WebhookRequest) -> list[Event]:
        """One event with the whole record, if it is of the object that the address names."""
        thing, _, relation = request.headers.get(HOOK_TOPIC, "").partition(".")
        body = Fields(payload.read_json(request.body), strict=True)
        topic = body.required_text("eventName", 300).rpartition(".")[2]
        told = body.object("objectMetadata").required_text("nameSingular")
        kind = _KINDS.get(topic)
        if kind is None or not relation or told != thing:
            return [Event(EventKind.UNKNOWN, f"unknown:{hashlib.sha256(request.body).hexdigest()}", key_is_final=False)]
        ref = body.object("record").ref("id")
        record = Fields(body.data["record"], strict=False)
        lead = None if kind is EventKind.LEAD_DELETED or not record.has(f"{relation}Id") else lead_of(record, relation)
        key = f"{topic}:{ref}:{(record.text('updatedAt') or '')[:40]}"
        occurred_at = Fields(body.data, strict=False).time("eventDate")
        once = kind is EventKind.LEAD_CREATED  # in the life of a record; two updates may share a millisecond
        return [Event(kind, key, key_is_final=once, ref=ref, lead=lead, occurred_at=occurred_at)]

    def refine(self, status: int, data: Any) -> Outcome | None:
        """There is no 404; and a server that has lost its cache answers 500 until somebody signs in."""
        error = data.get("error") if isinstance(data, dict) else None
        messages = data.get("messages") if isinstance(data, dict) else None
        if status == 400 and (error == "EntityNotFoundError" or messages == ["Record not found"]):
            return Outcome.GONE
        if status == 403 and messages == ["Missing authentication token"]:
            return Outcome.REAUTHORISE
        return Outcome.NOT_SENT if status == 500 and error == "METADATA_VERSION_NOT_FOUND" else None

    def asks_to_wait(self, status: int, headers: Mapping[str, str], data: Any) -> float | None:
        """What this version tells of a missing record is a 400; later ones say 404, with messages."""
        return upkeep.elsewhere(status, api.told(data))

    def words(self, status: int, headers: Mapping[str, str], data: Any) -> str | None:
        """What is not Twenty's API at all."""
        return upkeep.not_there("Twenty's API") if self.asks_to_wait(status, headers, data) else None

    def headers(self, credentials: Credentials) -> Mapping[str, str]:
        """An API key."""
        key = credentials.secrets.get("api_key")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        """``GET /rest/<objects>/<id>``, one by one: with all fields there are."""
        thing, things, relation = api.names(client)
        return upkeep.leads_one_by_one(
            refs,
            lambda ref: client.get(f"/rest/{things}/{ref}"),
            lambda data: lead_of(data.object("data").object(thing), relation),
        )

    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        """``update<Objects>`` on condition that the owner is still the one just read; else no record is found."""
        _, things, relation = api.names(client)
        given, now = {"id": payload.ref(lead.ref), "o": agent_ref}, "is:NULL"
        kinds = "$id:UUID!,$o:ID!"
        if lead.owner_ref is not None:
            given, now, kinds = {**given, "e": lead.owner_ref}, "eq:$e", f"{kinds},$e:UUID!"
        query = (
            f"mutation({kinds}){{update{things[0].upper()}{things[1:]}(filter:{{id:{{eq:$id}},{relation}Id:{{{now}}}}},"
            f"data:{{{relation}Id:$o}}){{id {relation}Id}}}}"
        )
        try:
            api.graphql(client, query, given, write=True)
        except CrmError as error:
            if error.outcome is Outcome.GONE and error.status == 200:
                return OwnerWrite(conflict=True)  # taken, or gone: the next reading tells
            if lead.owner_ref is None or api.code_of(error) != api.NOT_UNDERSTOOD:
                raise
            # That nobody has it was seen to be understood; who cannot be told "in the place of" is replaced outright.
            client.patch(f"/rest/{things}/{payload.ref(lead.ref)}", json={f"{relation}Id": agent_ref})
        return OwnerWrite()

    def find_note(self, client: Client, ref: str, marker: str) -> bool:
        """The notes of the record. Who edits one in Twenty leaves backslashes before brackets in its text."""
        query = (
            f"query($id:UUID!,$c:String){{noteTargets(filter:{{{api.note_relation(client)}:{{eq:$id}}}},"
            f"orderBy:[{{id:AscNullsLast}}],first:{api.PAGE},after:$c)"
            "{pageInfo{hasNextPage endCursor} edges{node{id note{title bodyV2{markdown}}}}}}"
        )

        def text(node: Fields) -> str:
            note = node.object("note")
            return f"{note.text('title')} {note.object('bodyV2').text('markdown')}".replace("\\", "")

        found = api.connection(client, query, "noteTargets", text, {"id": payload.ref(ref)})
        return any(marker in one for page in found for one in page)

    def add_note(self, client: Client, ref: str, subject: str, body: str) -> None:
        """A note and its target in one call, under ids that follow from the text: a repeat finds them there."""
        own = uuid5(_NOTE_IDS, f"{ref} {subject} {body}")
        note = {"id": str(own), "title": subject, "bodyV2": {"markdown": body}}
        target = {"id": str(uuid5(own, "target")), "noteId": str(own), api.note_relation(client): payload.ref(ref)}
        query = (
            "mutation($n:[NoteCreateInput!]!,$t:[NoteTargetCreateInput!]!)"
            "{createNotes(data:$n,upsert:true){id} createNoteTargets(data:$t,upsert:true){id}}"
        )
        api.graphql(client, query, {"n": [note], "t": [target]}, write=True)

    def add_test_lead(self, client: Client, name: str, email: str, definition: UnassignedDefinition) -> str:
        """``POST /rest/<objects>``: the address stands in the name, because an object may have none of its own."""
        thing, things, _ = api.names(client)
        text = f"{name} {email}"
        try:
            answer = client.post(f"/rest/{things}", json={"name": text})
        except CrmError as error:
            if error.outcome is not Outcome.REFUSED:
                raise
            person = {"firstName": name, "lastName": email}  # the other form that a name has in Twenty
            answer = client.post(f"/rest/{things}", json={"name": person})
        with answer.reading(write=True):
            return (
                Fields(answer.data, strict=False)
                .object("data")
                .object(f"create{thing[0].upper()}{thing[1:]}")
                .ref("id")
            )

    def remove_test_lead(self, client: Client, ref: str) -> None:
        """``DELETE /rest/<objects>/<id>``, for good."""
        _, things, _ = api.names(client)
        upkeep.unless_gone(lambda: client.delete(f"/rest/{things}/{payload.ref(ref)}"))

    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        """Members of the workspace; leads are owned by members, not by users."""
        return upkeep.each_once(api.listing(client, "workspaceMembers", agent_of))

    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        """Out of the list, which is known to leave out who has left."""
        return next((agent for agent in self.list_agents(client) if agent.ref == ref), None)

    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Records created since."""
        return _sweep(client, "createdAt", since, definition)

    def changed_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Records updated since."""
        return _sweep(client, "updatedAt", since, definition)

    def subscribe(self, client: Client, url: str) -> Subscribed:
        """One webhook per topic at one address; with a secret made up here where there is none."""
        secret = client.credentials.secrets.get(self.hook_secret) or random_secrets.token_hex(32)
        left = upkeep.reconcile(
            api.hooks(client, secret),
            url,
            api.TOPICS,
            create=lambda topic: api.create_hook(client, url, topic, secret),
            enable=lambda hook: hook,  # never asked for: there is no switch
            remove=lambda hook: api.remove_hook(client, hook),
        )
        return Subscribed(left.hooks, left.by_hand, secret)

    def unsubscribe(self, client: Client, url: str) -> int:
        """Remove every webhook at `url`."""
        return sum(api.remove_hook(client, hook) for hook in api.hooks(client, None) if hook.url == url)

    def check(self, client: Client, url: str | None) -> list[Finding]:
        """Key and clock, the object, agents, webhooks."""

        def key() -> Iterator[Finding]:
            answer = client.get("/rest/workspaceMembers", params={"limit": "1"})
            with answer.reading():
                api.rows(Fields(answer.data, strict=False), "workspaceMembers", agent_of)
            yield Finding("key", True, "accepted")
            yield upkeep.clock(upkeep.http_date(answer.headers.get("Date")), client.now())

        def leads() -> Iterator[Finding]:
            _, things, relation = api.names(client)
            try:
                query = f"{{{things}(first:1){{edges{{node{{id {relation}Id}}}}}}}}"
                answer = api.graphql(client, query, {}, write=False)
            except CrmError as error:
                if api.code_of(error) != api.NOT_UNDERSTOOD:
                    raise
                yield Finding("leads", False, f"no {things} with the relation {relation}", _NAMES)
                return
            with answer.reading():
                found = Fields(answer.data, strict=False).object("data").object(things)
                if not found.has("edges"):
                    raise payload.missing("edges")
            yield Finding("leads", True, f"{things}, owned by {relation}")

        secret = client.credentials.secrets.get(self.hook_secret, "")
        return upkeep.probes(
            ("key", key),
            ("leads", leads),
            ("notes", lambda: upkeep.notes(lambda: self.find_note(client, str(UUID(int=0)), "[turnlock:]"))),
            ("agents", lambda: [upkeep.agents(sum(a.active for a in self.list_agents(client)))]),
            ("hooks", lambda: [upkeep.hooks_alive(api.hooks(client, secret), url, api.TOPICS)]),
        )


def _sweep(client: Client, field: str, since: datetime, definition: UnassignedDefinition) -> Iterator[list[str]]:
    """By GraphQL, since REST cannot filter by owner; in the order of ids, since no other order ends."""
    _, things, relation = api.names(client)
    free = "" if definition.user_refs else f"{relation}Id:{{is:NULL}},"

    def pages(when: str) -> Iterator[list[Lead]]:
        query = (
            f"query($c:String){{{things}(filter:{{{free}{when}}},"
            f"orderBy:[{{id:AscNullsLast}}],first:{api.PAGE},after:$c)"
            f"{{pageInfo{{hasNextPage endCursor}} edges{{node{{id createdAt updatedAt {relation}Id}}}}}}}}"
        )
        return api.connection(client, query, things, lambda node: lead_of(node, relation))

    def leads() -> Iterator[list[Lead]]:
        try:
            yield from pages(f'{field}:{{gte:"{since.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"}}')
        except CrmError as error:
            if error.outcome is not Outcome.REFUSED:
                raise
            yield from pages("")  # a version that compares times another way: all are read, and filtered here

    return upkeep.unassigned(leads(), definition, since=since, changed=field == "updatedAt")
