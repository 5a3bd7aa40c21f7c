"""Lists and hooks of Follow Up Boss: calls that several of the adapter's methods make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from adapters import upkeep
from adapters.base import Hook, Unreadable
from adapters.payload import Fields

if TYPE_CHECKING:
    from adapters.client import Answer, Client
    from adapters.upkeep import Next

PAGE = 100  # https://docs.followupboss.com/reference/pagination: default 10, at most 100

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
