"""Lists and webhooks of EspoCRM, its refusals, and what an older or newer version may not take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from adapters import upkeep
from adapters.base import Hook
from adapters.espocrm_reading import lead_of, rows_of
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from routing.model import Lead

if TYPE_CHECKING:
    from adapters.client import Client

#: What a list of leads shows of each.
ROW = "id,status,assignedUserId,createdAt,modifiedAt"
_PAGE = 100  # more than 200 are refused
_WIDEST = timedelta(hours=14)  # between UTC and any zone of the earth
_REASON = "X-Status-Reason"  # of every refusal; its text may name people
# Application/Espo/Core/Authentication/Hook/Hooks/FailedAttemptsLimit.php: 10 in 60 s from one address.
_LOCKED = 60.0
_LOCKED_OUT = (
    "EspoCRM lets nobody in from this address for a minute: there were too many wrong logins. Turnlock waits and tries "
    "again; correct whatever logs in from here with a wrong key or password. A proxy may answer the same: see its log."
)
_MAY_NOT_ASSIGN = (
    "EspoCRM does not let the API user assign this lead to this agent. Set Assignment Permission to all in its role."
)

T = TypeVar("T")


def wait(status: int, headers: Mapping[str, str]) -> float | None:
    """Seconds to wait after an answer: EspoCRM gives each refusal a reason, but for one, the lock after wrong logins.

    Each further try would prolong that. A 404 without a reason comes from somewhere else.
    """
    told = _REASON in headers
    return _LOCKED if status == 403 and not told else upkeep.elsewhere(status, told)


def words(status: int, headers: Mapping[str, str]) -> str | None:
    """What the admin is told of the lock, of the right to assign, and of what is not EspoCRM at all."""
    if wait(status, headers) is not None:
        return _LOCKED_OUT if status == 403 else upkeep.not_there("EspoCRM")
    lacks = status == 403 and headers[_REASON].startswith("Assignment failure")
    return _MAY_NOT_ASSIGN if lacks else None


def listing(
    client: Client, kind: str, query: Mapping[str, Any], make: Callable[[Fields], T], most: int = upkeep.MAX_PAGES
) -> Iterator[list[T]]:
    """The pages of a list of records: what `make` makes of each."""
    query = {**query, "maxSize": str(_PAGE)}
    rows = partial(rows_of, make=make)
    return upkeep.overlapping(client, f"/api/v1/{kind}", query, rows, by="offset", size=_PAGE, most=most)


def leads_after(client: Client, field: str, since: datetime) -> Iterator[list[Lead]]:
    """All leads whose time `field` is not before `since`, in the order of their creation."""
    after = since.astimezone(UTC) - timedelta(seconds=1)  # times are whole seconds, and "after" is later than

    def query(after: datetime, **zone: str) -> dict[str, str]:
        where = {"type": "after", "attribute": field, "value": f"{after:%Y-%m-%d %H:%M:%S}", "dateTime": "true"}
        return {f"where[0][{key}]": value for key, value in (where | zone).items()} | {
            "orderBy": "createdAt",
            "order": "asc",
            "select": ROW,
        }

    try:  # the zone of the value, else it may be taken for one of the site's, though answers are in UTC
        yield from listing(client, "Lead", query(after, timeZone="UTC"), lead_of)
    except CrmError as error:
        if error.outcome is not Outcome.REFUSED:
            raise
        # A version that knows no such parameter: whatever zone it takes instead, nothing is left out.
        yield from listing(client, "Lead", query(after - _WIDEST), lead_of)


def hooks(client: Client) -> list[tuple[Hook, str | None]]:
    """The webhooks of the API user, each with its key."""
    return [row for page in listing(client, "Webhook", {}, _hook) for row in page]


def _hook(hook: Fields) -> tuple[Hook, str | None]:
    """Its address is told without the topic that ours end with."""
    topic = hook.text("event") or ""
    url = (hook.text("url") or "").removesuffix(f"/{topic}")
    return Hook(hook.ref("id"), topic, url, hook.flag("isActive") is True), hook.text("secretKey")


def create_hook(client: Client, url: str, topic: str, *, skip_own: bool, instead_of: Hook | None = None) -> Hook:
    """Make a webhook. From 9.3 on it need not tell of the API user's own changes: `skip_own`."""
    if instead_of is not None:
        remove_hook(client, instead_of)
    body = {"event": topic, "url": f"{url}/{topic}"}
    try:
        answer = client.post("/api/v1/Webhook", json=body | ({"skipOwn": True} if skip_own else {}))
    except CrmError as error:
        if error.outcome is not Outcome.REFUSED or not skip_own:
            raise
        answer = client.post("/api/v1/Webhook", json=body)  # our own changes come back then, and are known again
    with answer.reading(write=True):
        return _hook(Fields(answer.data, strict=False))[0]


def remove_hook(client: Client, hook: Hook) -> bool:
    """Remove a webhook, or switch it off where that is refused; whether there was one."""
    path = f"/api/v1/Webhook/{hook.hook_ref}"
    return upkeep.remove(lambda: client.delete(path), or_else=lambda: client.put(path, json={"isActive": False}))
