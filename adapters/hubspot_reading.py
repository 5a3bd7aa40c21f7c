"""What HubSpot sends, in Turnlock's words: events, contacts, owners, pages. and how its lists are read."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from adapters import payload
from adapters.base import Event, EventKind, Finding, Team, Unreadable, WebhookRequest
from adapters.budget import Bucket, Left, left_by
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from adapters.upkeep import Next, in_halves, pages, unassigned, unless_gone
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Client

# https://developers.hubspot.com/docs/api-reference/legacy/webhooks/guide
KINDS: Mapping[str, EventKind] = MappingProxyType(
    {
        "creation": EventKind.LEAD_CREATED,
        "propertyChange": EventKind.LEAD_CHANGED,
        "merge": EventKind.LEAD_CHANGED,
        "restore": EventKind.LEAD_CHANGED,
        "deletion": EventKind.LEAD_DELETED,
        "privacyDeletion": EventKind.LEAD_DELETED,
    }
)
# https://developers.hubspot.com/docs/developer-tooling/platform/usage-guidelines: the smallest plan's, searches apart
BUCKETS = (
    Bucket("daily", 0, 86400.0, kept=0.1),
    Bucket("search", 5, 1.0, frozenset({"POST"}), r"/crm/v3/objects/\w+/search", alone=True),
    Bucket("burst", 110, 10.0, owner=4, note=1),
)
_SAID = "X-HubSpot-RateLimit-"
LEADS = "/crm/v3/objects/contacts"
OWNERS = "/crm/v3/owners"
PAGE = 100
_SEARCH_PAGE = 200
_IN = 80  # owners in one filter: two filters keep below the 3,000 characters of a search
_LAG = timedelta(seconds=120)  # in which search may not show a contact, or show it with an old owner
_TYPE = "0-1"  # the objectTypeId of contacts, in subscriptions that are not made for one type of object

# The escapes that are decoded before hashing, and no others (validating-requests, version 3).
_DECODED: Mapping[str, str] = MappingProxyType(
    {"%3A": ":", "%2F": "/", "%3F": "?", "%40": "@", "%21": "!", "%24": "$", "%27": "'", "%28": "(", "%29": ")"}
    | {"%2A": "*", "%2C": ",", "%3B": ";"}
)
_MERGED = ("hs_merged_object_ids", "hs_calculated_merged_vids")
_CUSTOM = ("hs_lead_status", "hs_analytics_source_data_1", "hs_analytics_source_data_2", "hs_object_source_label")
PROPERTIES = (
    "createdate", "lastmodifieddate", "firstname", "lastname", "email", "hs_additional_emails", "phone", "mobilephone",
    "address", "city", "state", "zip", "country", "lifecyclestage", "hubspot_owner_id", "hs_analytics_source",
    "first_conversion_event_name", "recent_conversion_event_name", "hs_language", *_CUSTOM, *_MERGED,
)  # fmt: skip


_SCOPES = (
    "HubSpot misses a scope. Give the private app crm.objects.contacts.read, crm.objects.contacts.write and "
    "crm.objects.owners.read; an account that is connected by an app of yours must agree again: `turnlock connect`."
)
_NO_OWNER = (
    "HubSpot does not take this agent as an owner: deactivated there, or the id is that of a user and not of an owner. "
    "The lead goes to the next one; run `turnlock agents sync`."
)
_DAILY = (
    "The account has used up its calls of the day in HubSpot, which all private apps share, until midnight there. "
    "Turnlock asks again each hour."
)
_LOCKED = "Other programs change many contacts in HubSpot at once, and this one is locked. Turnlock tries again."
_MOVING = "HubSpot moves the account to another data centre and takes no calls meanwhile. Turnlock waits."
_INVALID = (
    "HubSpot refuses the values: a property does not exist, or a rule of the account forbids them. Correct that in "
    "HubSpot; then `turnlock replay` tries again."
)


def names_a_bad_owner(status: int, data: Any) -> bool:
    """Whether an error says that the owner is none, in a code of its own or within its message."""
    told = data if status == 400 and isinstance(data, dict) else {}
    errors = told.get("errors")
    codes = [one.get("code") for one in errors if isinstance(one, dict)] if isinstance(errors, list) else []
    return any("INVALID_OWNER_ID" in str(said).upper() for said in (*codes, told.get("message")))


def words_for(status: int, data: Any) -> str | None:
    """What the admin is told of an error (https://developers.hubspot.com/docs/api-reference/error-handling)."""
    told = data if isinstance(data, dict) else {}
    if names_a_bad_owner(status, data):
        return _NO_OWNER
    if status == 403 and told.get("category") == "MISSING_SCOPES":
        return _SCOPES
    if status == 429 and told.get("policyName") == "DAILY":
        return _DAILY
    if status == 400 and told.get("category") == "VALIDATION_ERROR":
        return _INVALID
    return {423: _LOCKED, 477: _MOVING}.get(status)


def left_of(headers: Mapping[str, str], charged: Sequence[Bucket]) -> Mapping[str, Left]:
    """What an answer says is left, of the day and of the last ten seconds."""
    said = {
        "daily": left_by(headers, _SAID + "Daily-Remaining", _SAID + "Daily"),
        "burst": left_by(headers, _SAID + "Remaining", _SAID + "Max"),
    }
    return {bucket.name: left for bucket in charged if (left := said.get(bucket.name)) is not None}


def signed_text(request: WebhookRequest, signed_at: str) -> bytes:
    """What version 3 signs: method, the hook's address, body and the time's own text."""
    url = re.sub("%[0-9A-Fa-f]{2}", lambda m: _DECODED.get(m[0].upper(), m[0]), request.url)
    return f"{request.method.upper()}{url}".encode("utf-8", "replace") + request.body + signed_at.encode()


def account_of(element: Any) -> str | None:
    """The portal that an element is about, also of one that cannot be read any further."""
    try:
        return Fields(element, strict=True).ref("portalId")
    except Unreadable:
        return None


def events_of(element: Any) -> list[Event]:
    """What one element tells. ``eventId`` is not unique, so the key has all that makes it so, but the attempt."""
    body = Fields(element, strict=True)
    topic = body.text("subscriptionType") or body.text("eventType")  # the guide's table has the second name
    if topic is None:
        raise payload.missing("subscriptionType")
    account, event_id, ref = body.ref("portalId"), body.ref("eventId"), record_id(body, "objectId")
    occurred = body.number("occurredAt")
    if occurred is None:
        raise payload.missing("occurredAt")
    changed = body.text("propertyName") or ""
    key = f"{account}:{topic[:60]}:{ref}:{event_id}:{occurred}:{changed[:100]}"
    what, _, verb = topic.partition(".")
    ours = what == "contact" or (what == "object" and body.text("objectTypeId") == _TYPE)
    kind = KINDS.get(verb) if ours else None
    # Our own write, come back: the app that made it is named. A new contact is never dropped so, even one of ours.
    echo = verb == "propertyChange" and body.text("changeSource") == "INTEGRATION"
    if kind is None or (echo and body.text("sourceId") == body.text("appId") is not None):
        return [Event(EventKind.UNKNOWN, key, account=account)]
    occurred_at = _time(occurred)
    if verb != "merge":
        return [Event(kind, key, ref=ref, occurred_at=occurred_at, account=account)]
    kept = body.optional_ref("newObjectId") or ref
    gone = payload.unique([body.optional_ref("primaryObjectId"), *map(payload.ref, body.items("mergedObjectIds"))])
    return [
        Event(kind, key, ref=kept, occurred_at=occurred_at, account=account),
        *(
            Event(EventKind.LEAD_DELETED, f"{key}:{old}", ref=old, occurred_at=occurred_at, account=account)
            for old in gone
            if old != kept
        ),
    ]


def is_id(ref: str) -> bool:
    """Whether a ref can be a record's id."""
    return ref.isascii() and ref.isdigit()


def record_id(row: Fields, key: str) -> str:
    """An id of a record: a whole number, in one spelling."""
    ref = row.ref(key)
    if not is_id(ref):
        raise Unreadable("wrong_type")
    return str(int(ref))


def _time(milliseconds: Any) -> datetime | None:
    try:
        return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def stamp(moment: datetime) -> str:
    """A time as the API takes it."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def further(said: Mapping[str, str]) -> list[str]:
    """Properties that the admin named for rules: names apart, and those of price, tags and type."""
    named = [said.get(f"{word}_property") or "" for word in ("price", "tags", "type")]
    found = payload.unique(name.strip() for name in [*(said.get("properties") or "").split(","), *named])
    return [name for name in found if re.fullmatch("[a-z0-9_]{1,100}", name)]


def lead_of(row: Fields, said: Mapping[str, str]) -> Lead:
    """A contact: all values are texts or null. What the admin named for price, tags and type stands there."""
    values = row.object("properties")
    merged = [values.text(name) or "" for name in _MERGED]
    more = (values.text("hs_additional_emails") or "").split(";")
    tags = (values.text(said.get("tags_property") or "-") or "").split(";")
    names = payload.unique((values.text("firstname"), values.text("lastname")))
    kept = [name for name in (*_CUSTOM, *further(said)) if values.has(name)]
    return Lead(
        ref=record_id(row, "id"),
        former_refs=payload.unique(re.split("[:,]", part)[0].strip() for text in merged for part in text.split(";")),
        owner_ref=values.optional_ref("hubspot_owner_id"),
        source=values.text("hs_analytics_source"),
        type=values.text(said.get("type_property") or "-"),
        stage=values.text("lifecyclestage"),
        price=values.number(said.get("price_property") or "-"),
        street=values.text("address"),
        city=values.text("city"),
        state=values.text("state"),
        zip=values.text("zip"),
        country=values.text("country"),
        form=values.text("recent_conversion_event_name") or values.text("first_conversion_event_name"),
        language=values.text("hs_language"),
        tags=payload.unique(tag.strip() for tag in tags),
        emails=payload.emails((values.text("email"), *more)),
        phones=payload.phones(values.text(k) for k in ("phone", "mobilephone")),
        custom=MappingProxyType(values.scalars(kept)),
        created_at=values.time("createdate") or row.time("createdAt"),
        updated_at=values.time("lastmodifieddate") or row.time("updatedAt"),
        name=" ".join(names) or None,
    )


def agent_of(owner: Fields, archived: bool) -> AgentSeen:
    """An owner. ``type`` QUEUE is a shared bucket, no person: leads are taken from it, never given to it."""
    ref = owner.ref("id")
    names = payload.unique((owner.text("firstName"), owner.text("lastName")))
    active = not archived and owner.flag("archived") is not True and owner.text("type") != "QUEUE"
    return AgentSeen(
        ref=ref, name=" ".join(names) or owner.text("email") or ref, email=owner.text("email"), active=active
    )


def teams_of(owners: Iterable[Fields]) -> list[Team]:
    """The teams that these owners say they are in, by name."""
    names: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    for owner in owners:
        for team in owner.objects("teams"):
            ref = team.ref("id")
            names[ref] = team.text("name") or ref
            members.setdefault(ref, []).append(owner.ref("id"))
    return [Team(ref, names[ref], payload.unique(members[ref])) for ref in sorted(names, key=lambda r: (names[r], r))]


def scopes(client: Client, needed: Iterable[str]) -> Iterator[Finding]:
    """Whether the token has all scopes. Only that of a private app tells; consent to an app is to all or to nothing.

    https://developers.hubspot.com/docs/apps/legacy-apps/private-apps/overview
    """
    if client.credentials.parameters.get("auth") == "oauth":
        yield Finding("scopes", True, "granted with the account's consent")
        return
    token = client.credentials.secrets.get("access_token", "")
    try:
        answer = client.post("/oauth/v2/private-apps/get/access-token-info", json={"tokenKey": token}, write=False)
    except CrmError as error:
        # Not the token's fault: the other calls of a check tell of that.
        if error.outcome not in (Outcome.REFUSED, Outcome.GONE, Outcome.FORBIDDEN, Outcome.REAUTHORISE):
            raise
        yield Finding("scopes", True, "not told of this kind of token")
        return
    with answer.reading():
        granted = Fields(answer.data, strict=False).texts("scopes")
    lacking = sorted(set(needed) - {"oauth"} - set(granted))
    fix = f"give the private app {', '.join(lacking)}" if lacking else ""
    yield Finding("scopes", not lacking, "missing" if lacking else "all granted", fix)


def results(data: Fields) -> list[Fields]:
    """The rows of a page."""
    if not isinstance(data.data.get("results"), list):
        raise payload.missing("results")
    return data.objects("results")


def following(data: Fields, path: str, query: Mapping[str, str]) -> Next | None:
    """The next page by ``paging.next.after``; ``link`` is not followed."""
    after = data.object("paging").object("next").text("after")
    return (path, {**query, "after": after}) if after else None


def owners(client: Client, archived: str) -> Iterator[Fields]:
    """All owners, or all that are archived."""
    base = {"limit": str(PAGE), "archived": archived}

    def read(data: Fields) -> tuple[list[Fields], Next | None]:
        return results(data), following(data, OWNERS, base)

    for page in pages(getter(client), (OWNERS, base), read):
        yield from page


def getter(client: Client) -> Callable[[str, Mapping[str, str]], Any]:
    """How :func:`adapters.upkeep.pages` reads."""
    return lambda path, query: client.get(path, params=query)


def batch(client: Client, path: str, refs: Sequence[str], properties: Sequence[str]) -> list[Fields]:
    """``POST .../batch/read``; 207 where some are missing, which are then absent.

    Raises :class:`CrmError` also where some lack for another reason: they must not be taken for gone.
    """

    def read(some: Sequence[str]) -> list[Fields]:
        asked = {"properties": properties, "propertiesWithHistory": [], "inputs": [{"id": ref} for ref in some]}
        answer = unless_gone(lambda: client.post(f"{path}/batch/read", json=asked, write=False))
        if answer is None:
            return []
        with answer.reading():
            data = Fields(answer.data, strict=False)
            if any(error.text("category") != "OBJECT_NOT_FOUND" for error in data.objects("errors")):
                raise CrmError(Outcome.NOT_SENT, status=answer.status, call=f"POST {path}/batch/read")
            return results(data)

    return in_halves(refs, read)


def marked(client: Client, ref: str, kind: str, name: str, marker: str) -> bool:
    """Whether one of the newest 100 notes or tasks (`kind`) of a contact holds `marker` in this property."""
    path = f"/crm/v4/objects/contacts/{payload.ref(ref)}/associations/{kind}"

    def read(data: Fields) -> tuple[list[int], Next | None]:
        ids = [int(record_id(row, "toObjectId")) for row in results(data)]
        return ids, following(data, path, {"limit": "500"})

    ids = [i for page in pages(getter(client), (path, {"limit": "500"}), read, most=20) for i in page]
    newest = [str(i) for i in sorted(set(ids))[-PAGE:]]
    rows = batch(client, f"/crm/v3/objects/{kind}", newest, [name]) if newest else []
    return any(marker in html.unescape(row.object("properties").text(name) or "") for row in rows)


def put_on(ref: str, association: int, properties: Mapping[str, str]) -> dict[str, Any]:
    """The body that makes an object of these properties on a contact."""
    types = [{"associationCategory": "HUBSPOT_DEFINED", "associationTypeId": association}]
    return {"properties": properties, "associations": [{"to": {"id": payload.ref(ref)}, "types": types}]}


def sweep(client: Client, by: str, since: datetime, definition: UnassignedDefinition) -> Iterator[list[str]]:
    """Pages of refs of contacts that look unassigned and whose ``createdate`` or ``lastmodifieddate`` (`by`) is not
    before `since`.

    By search in the order of ids, each page from the last id on. An id does not change, so no contact is missed when
    rows leave a list of matches or change again while it is read; and the limit of 10,000 rows per search is never met.
    """
    said = client.credentials.parameters
    newest = client.now() - payload.seconds(said.get("sweep_min_age"), _LAG)
    nobody: list[dict[str, Any]] = [{"propertyName": "hubspot_owner_id", "operator": "NOT_HAS_PROPERTY"}]
    users = sorted(definition.user_refs)
    parts = [users[start : start + _IN] for start in range(0, len(users), _IN)]
    nobody += [{"propertyName": "hubspot_owner_id", "operator": "IN", "values": part} for part in parts]
    timed = {"propertyName": by, "operator": "GTE", "value": str(int(since.timestamp() * 1000))}

    def found(owners: Sequence[Mapping[str, Any]]) -> Iterator[list[Lead]]:
        last = 0
        while True:
            after = {"propertyName": "hs_object_id", "operator": "GT", "value": str(last)}
            query = {
                "filterGroups": [{"filters": [owner, timed, after]} for owner in owners],
                "sorts": [{"propertyName": "hs_object_id", "direction": "ASCENDING"}],
                "properties": [by, "hubspot_owner_id"],
                "limit": _SEARCH_PAGE,
            }
            answer = client.post(f"{LEADS}/search", json=query, write=False)
            with answer.reading():
                rows = [lead_of(row, said) for row in results(Fields(answer.data, strict=False))]
                highest = max((int(row.ref) for row in rows), default=last)
                if rows and highest <= last:
                    raise Unreadable("endless_list")
            yield rows
            if len(rows) < _SEARCH_PAGE:
                return
            last = highest

    # One search as a rule; many owners who stand for nobody would not fit into one.
    rows = chain(*(found(nobody[start : start + 2]) for start in range(0, len(nobody), 2)))
    return unassigned(rows, definition, since=since, until=newest, changed=by == "lastmodifieddate")
