"""Calls to Pipedrive that several of the adapter's methods make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from adapters import payload, upkeep
from adapters import pipedrive_reading as reading
from adapters.base import Hook, Unreadable
from adapters.budget import Bucket
from adapters.oauth import OAuth
from adapters.outcome import CrmError, Fault, Outcome
from adapters.payload import Fields
from routing.model import UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Answer, Client
    from adapters.upkeep import Next

USERS = "/api/v1/users"
HOOKS = "/api/v1/webhooks"
HOOK_USER = "turnlock"
PAGE = "100"  # of at most 500, so that a page with many custom fields stays under the limit of an answer

_LAG = timedelta(seconds=120)  # in which a webhook that failed once or twice still comes

# The smallest plan's for an API token. The day's tokens are the whole company's, until midnight of Pipedrive's servers.
BUCKETS = (Bucket("daily", 0, 86400.0, kept=0.1), Bucket("burst", 20, 2.0, owner=4, note=1))

# https://pipedrive.readme.io/docs/marketplace-oauth-authorization
OAUTH = OAuth(
    authorize_url="https://oauth.pipedrive.com/oauth/authorize",
    token_url="https://oauth.pipedrive.com/oauth/token",  # noqa: S106 - an address
    scopes=(),
    pkce=False,
    account=lambda _: None,  # the answer names none: :func:`company` asks
    base_url=lambda answer: answer.text("api_domain"),
    replaces=frozenset({"api_token"}),
    revoke_url="https://oauth.pipedrive.com/oauth/revoke",
    removed=lambda told: told.ref("company_id"),  # https://pipedrive.readme.io/docs/app-uninstallation
    basic=True,
)

T = TypeVar("T")


@contextmanager
def understood() -> Iterator[None]:
    """Turn an :class:`Unreadable` of what was read earlier into the :class:`CrmError` it is."""
    try:
        yield
    except Unreadable:
        raise CrmError(Outcome.ANSWER_UNREADABLE, fault=Fault.UNREADABLE) from None


def thing(client: Client) -> reading.Thing:
    """What the tenant works with as leads."""
    named = client.credentials.parameters.get("object") or "lead"
    if named not in reading.THINGS:
        raise CrmError(Outcome.REFUSED, text=f"The parameter object must be one of {', '.join(reading.THINGS)}.")
    return reading.THINGS[named]


def nobody(client: Client) -> frozenset[str]:
    """The users who stand for nobody: those whom the admin named, else the connected one."""
    if named := reading.refs_of(client.credentials.parameters.get("nobody") or ""):
        return frozenset(named)
    if "me" not in client.learnt:
        answer = client.get(f"{USERS}/me")
        with answer.reading():
            client.learnt["me"] = reading.row_of(answer.data).ref("id")
    return frozenset({client.learnt["me"]})


def company(client: Client) -> str | None:
    """The id of the connected user's company."""
    answer = client.get(f"{USERS}/me")
    with answer.reading():
        return reading.row_of(answer.data).optional_ref("company_id")


def one(client: Client, path: str) -> Fields | None:
    """One object by its id; None where there is none."""
    answer = upkeep.unless_gone(functools.partial(client.get, path))
    if answer is None:
        return None
    with answer.reading():
        return reading.row_of(answer.data)


def lead_row(client: Client, ref: str) -> Fields | None:
    """A lead, deal or person; None where there is none, or where `ref` is the id of something else (400)."""
    try:
        return one(client, f"{thing(client).path}/{payload.ref(ref)}")
    except CrmError as error:
        if error.outcome is not Outcome.REFUSED or error.status != 400:
            raise
        return None


def behind(client: Client, ref: str) -> str | None:
    """The person behind a lead or deal, or who is the lead; None where there is none."""
    if thing(client).entity == "person":
        return payload.ref(ref)
    row = lead_row(client, ref)
    with understood():
        return None if row is None else row.optional_ref("person_id")


def made(answer: Answer) -> str:
    """The id of what was just made."""
    with answer.reading(write=True):
        return reading.row_of(answer.data).ref("id")


def pages(
    client: Client, path: str, query: Mapping[str, str], make: Callable[[Fields], T], most: int = upkeep.MAX_PAGES
) -> Iterator[list[T]]:
    """The pages of a list, of either version."""

    def read(data: Fields) -> tuple[list[T], Next | None]:
        return [make(row) for row in reading.rows_of(data.data)], reading.following(data, path, query)

    return upkeep.pages(lambda where, asked: client.get(where, params=asked), (path, query), read, most)


def listed(client: Client, since: datetime, definition: UnassignedDefinition, *, by: str) -> Iterator[Sequence[str]]:
    """One list per user who stands for nobody, of what was changed since, for there is no filter by creation.

    All pages are read before any is given out: what is assigned meanwhile would move the rows behind it. What a page
    still misses so, the next sweep finds: it looks further back than this one began.
    """
    kind, free = thing(client), nobody(client)
    newest = client.now() - payload.seconds(client.credentials.parameters.get("sweep_min_age"), _LAG)
    base = {"updated_since": f"{since.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}", "limit": PAGE}
    base |= {"status": "open"} if kind.entity == "deal" else {}

    def read(row: Fields) -> str | None:
        fits = reading.is_there(row) and since.replace(microsecond=0) <= (row.time(by) or since) <= newest
        owner = reading.owner_of(row, free)
        return row.text("id") if fits and (owner is None or owner in definition.user_refs) else None

    found = [
        page
        for owner in sorted({*free, *definition.user_refs})
        for page in pages(client, kind.path, base | {"owner_id": owner}, read)
    ]
    yield from upkeep.fresh_refs([ref for ref in page if ref] for page in found)


def labels(client: Client, row: Fields) -> Mapping[str, str]:
    """The names of a lead's labels, asked for once and again where one is new."""
    ids = {str(label) for label in row.items("label_ids")}
    if not ids <= client.learnt.setdefault("labels", {}).keys():
        answer = client.get("/api/v1/leadLabels")
        with answer.reading():
            names = {one.ref("id"): one.text("name") or one.ref("id") for one in reading.rows_of(answer.data)}
        client.learnt["labels"] = {label: label for label in ids} | names  # one that was deleted is not asked for again
    return dict(client.learnt["labels"])


def hook_rows(client: Client) -> list[Fields]:
    """All hooks. The rows hold passwords."""
    answer = client.get(HOOKS)
    with answer.reading():
        return reading.rows_of(answer.data)


def hooks(client: Client, password: str | None, rows: Sequence[Fields] | None = None) -> list[Hook]:
    """All hooks (`rows`, where they were read). One of another object, version or `password` (None: any) is for no
    topic of ours.
    """
    rows, entity = hook_rows(client) if rows is None else rows, thing(client).entity
    with understood():
        return [_hook(row, entity, password) for row in rows]


def _hook(row: Fields, entity: str, password: str | None) -> Hook:
    action, what = row.text("event_action") or "", row.text("event_object")
    shown = (row.text("http_auth_user"), row.text("http_auth_password"))
    ours = what == entity and (row.text("version") or "")[:1] == "2" and password in (None, shown[1])
    ours = ours and (password is None or shown[0] == HOOK_USER)
    topic = action if ours else f"{action}.{what}"
    return Hook(row.ref("id"), topic, row.text("subscription_url") or "", row.flag("is_active") is True)


def create_hook(client: Client, url: str, topic: str, password: str) -> Hook:
    """``POST /webhooks``. Pipedrive tries the address at once, so it must answer by then."""
    entity = thing(client).entity
    about = {"event_action": topic, "event_object": entity, "version": "2.0", "name": f"Turnlock {topic}.{entity}"}
    access = {"http_auth_user": HOOK_USER, "http_auth_password": password}
    answer = client.post(HOOKS, json={"subscription_url": url, **about, **access})
    with answer.reading(write=True):
        return Hook(reading.row_of(answer.data).ref("id"), topic, url, True)


def remove_hook(client: Client, hook: Hook) -> bool:
    """``DELETE /webhooks/{id}``; whether there was one."""
    return upkeep.unless_gone(functools.partial(client.delete, f"{HOOKS}/{hook.hook_ref}")) is not None


def renew_hook(client: Client, hook: Hook, url: str, password: str) -> Hook:
    """Nothing changes a hook: one that is switched off is made anew."""
    remove_hook(client, hook)
    return create_hook(client, url, hook.topic, password)
