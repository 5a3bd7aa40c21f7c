"""Lists, sweeps and hooks of Follow Up Boss: calls that several of the adapter's methods make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from adapters import followupboss_reading as reading
from adapters import payload, upkeep
from adapters.base import Hook, Unreadable
from adapters.payload import Fields
from routing.model import UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Answer, Client
    from adapters.upkeep import Next

PAGE = 100  # https://docs.followupboss.com/reference/pagination: default 10, at most 100
# https://docs.followupboss.com/reference/common-filters: an older guide shows times without a zone. A day of margin
# covers every zone; the own comparison is exact.
_ZONE_MARGIN = timedelta(days=1)
_LAG = timedelta(seconds=120)  # in which the CRM's own lead flow may still be choosing somebody
_UNCLAIMED = "/people/unclaimed"

T = TypeVar("T")


def rows(data: Fields) -> list[Fields]:
    """The list of an answer: named by ``_metadata.collection``, else the only list there is."""
    name = data.object("_metadata").text("collection")
    if name is None or name not in data.data:
        lists = [k for k, v in data.data.items() if isinstance(v, list)]
        if len(lists) != 1:
            raise Unreadable("wrong_type")
        name = lists[0]
    return data.objects(name)


def pages(
    client: Client, path: str, params: Mapping[str, str], make: Callable[[Fields], T], most: int = upkeep.MAX_PAGES
) -> Iterator[list[T]]:
    """A list by ``_metadata.next``, else ``nextLink``, else by offset while ``total`` says that there is more."""
    base = {"limit": str(PAGE), **params}
    got = 0

    def read(data: Fields) -> tuple[list[T], Next | None]:
        nonlocal got
        found = [make(row) for row in rows(data)]
        got += len(found)
        meta = data.object("_metadata")
        if token := meta.text("next"):
            return found, (path, base | {"next": token})
        if link := meta.text("nextLink"):
            return found, (link, {})
        total = meta.number("total") if found else None
        return found, (path, base | {"offset": str(got)}) if total is not None and got < total else None

    return upkeep.pages(lambda link, query: client.get(link, params=query), (path, base), read, most)


def sweep(client: Client, by: str, since: datetime, definition: UnassignedDefinition) -> Iterator[list[str]]:
    """Pages of refs of people who look unassigned, and were ``created`` or ``updated`` (`by`) since `since`.

    They come in the order of that time, the newest first, so that a page which goes beyond `since` is the last: should
    the server leave the filter out of account, that costs nothing. Where it leaves the order out of account, all that
    it lists is read.
    """
    newest = client.now() - payload.seconds(client.credentials.parameters.get("sweep_min_age"), _LAG)
    fields = {"fields": f"id,{by},assignedUserId,assignedPondId"}
    after = (since.astimezone(UTC) - _ZONE_MARGIN).strftime("%Y-%m-%d %H:%M:%S")
    base = {"sort": f"-{by}", f"{by}After": after, **fields}
    listings = [("/people", base)]
    # The filter by pond is reported unreliable, so it only adds to the plain list and its rows are checked too.
    listings += [("/people", base | {"assignedPondId": pond}) for pond in sorted(definition.pond_refs)]
    if definition.include_unclaimed:
        listings.append((_UNCLAIMED, fields))

    def found() -> Iterator[list[str]]:
        for path, params in listings:
            for page in pages(client, path, params, reading.lead_of):
                dated = [(lead, (lead.created_at if by == "created" else lead.updated_at) or since) for lead in page]
                yield [
                    lead.ref
                    for lead, moment in dated
                    if since <= moment <= newest and (path == _UNCLAIMED or definition.covers(lead))
                ]
                moments = [moment for _, moment in dated]
                in_order = "sort" in params and moments == sorted(moments, reverse=True)
                if in_order and moments and moments[-1] < since:
                    break

    return upkeep.fresh_refs(found())


def _hook(hook: Fields) -> Hook:
    return Hook(hook.ref("id"), hook.text("event") or "", hook.text("url") or "", hook.text("status") == "Active")


def written(answer: Answer) -> Hook:
    """The hook that a write answers."""
    with answer.reading(write=True):
        return _hook(Fields(answer.data, strict=False))


def hooks(client: Client) -> list[Hook]:
    """All hooks of this system on the account."""
    return [hook for page in pages(client, "/webhooks", {}, _hook) for hook in page]


def remove(client: Client, hook: Hook) -> bool:
    """Remove a hook; whether there was one."""
    return upkeep.unless_gone(lambda: client.delete(f"/webhooks/{hook.hook_ref}")) is not None
