"""Speaking Twenty's API: REST with cursors, GraphQL whose errors are a 200, webhooks, the names that a tenant chose."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from adapters import payload, upkeep
from adapters.base import Hook
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields

if TYPE_CHECKING:
    from adapters.client import Answer, Client
    from adapters.upkeep import Next

#: What a webhook of ours tells of, each one of one thing; a deletion by REST is a destruction.
TOPICS = ("created", "updated", "destroyed")
#: Rows of a page: the most that REST gives.
PAGE = 60
#: The code of a query that this version does not understand; nothing was done.
NOT_UNDERSTOOD = "GRAPHQL_VALIDATION_FAILED"
# ``errors[0].extensions.code`` of a GraphQL answer, which is a 200. Of others nobody knows what came of the call.
_CODES: Mapping[str, Outcome] = MappingProxyType(
    {
        "NOT_FOUND": Outcome.GONE,
        "UNAUTHENTICATED": Outcome.REAUTHORISE,
        "FORBIDDEN": Outcome.FORBIDDEN,
        "BAD_USER_INPUT": Outcome.REFUSED,
        NOT_UNDERSTOOD: Outcome.REFUSED,
        "GRAPHQL_PARSE_FAILED": Outcome.REFUSED,
    }
)
# https://github.com/graphql/graphql-js, src/validation/rules: how its words on a query that is not valid begin.
_INVALID = re.compile('(Cannot query field|Unknown (argument|type|field)|Syntax Error|Field "|Variable "[$])')
_NAME = re.compile(r"[a-z][A-Za-z0-9]{0,62}")

T = TypeVar("T")


def names(client: Client) -> tuple[str, str, str]:
    """The object that stands for leads, in singular and plural, and its relation to a member."""
    known = client.credentials.parameters
    found = known.get("object") or "company", known.get("objects") or "companies", known.get("owner") or "accountOwner"
    if not all(_NAME.fullmatch(name) for name in found):
        text = "The parameters object, objects and owner are names of Twenty's API, such as company and accountOwner."
        raise CrmError(Outcome.REFUSED, call="names", text=text)
    return found


def note_relation(client: Client) -> str:
    """What the target of a note calls the record: ``companyId``, in versions from late 2025 on ``targetCompanyId``."""
    if "note_relation" not in client.learnt:
        thing, _, _ = names(client)
        plain = f"{thing}Id"
        try:
            graphql(client, f"{{noteTargets(first:1){{edges{{node{{id {plain}}}}}}}}}", {}, write=False)
        except CrmError as error:
            if error.outcome is not Outcome.REFUSED:
                raise
            plain = f"target{thing[0].upper()}{thing[1:]}Id"
        client.learnt["note_relation"] = plain
    found: str = client.learnt["note_relation"]
    return found


def code_of(error: CrmError) -> str | None:
    """The code of a refusal by GraphQL, be it in a 200 or in a 400."""
    told = Fields(error.data, strict=False) if isinstance(error.data, dict) else None
    errors = told.objects("errors") if told is not None else []
    return _code(errors[0]) if errors else None


def _code(error: Fields) -> str:
    """The code of one error; by its words where a query that was not understood has none."""
    code = error.object("extensions").text("code") or ""
    return NOT_UNDERSTOOD if code not in _CODES and _INVALID.match(error.text("message") or "") else code


def graphql(client: Client, query: str, given: Mapping[str, Any], *, write: bool) -> Answer:
    """``POST /graphql``; the answer, or the error that a 200 holds."""
    answer = client.post("/graphql", json={"query": query, "variables": dict(given)}, write=write)
    with answer.reading(write=write):
        told = Fields(answer.data, strict=False)
        errors = told.objects("errors")
        if not errors and not told.has("data"):
            raise payload.missing("data")
    if errors:
        unknown = Outcome.UNKNOWN if write else Outcome.NOT_SENT
        # The agent is no member (any more): told by the database, under the code of a fault of the server.
        refused = "foreign key constraint" in (errors[0].text("message") or "")
        raise answer.failed(Outcome.REFUSED if refused else _CODES.get(_code(errors[0]), unknown))
    return answer


def rows(data: Fields, name: str, make: Callable[[Fields], T]) -> list[T]:
    """What `make` makes of each record of an answer of REST. Raises :class:`Unreadable` where it holds no list."""
    if not isinstance(data.object("data").data.get(name), list):
        raise payload.missing(name)
    return [make(row) for row in data.object("data").objects(name)]


def listing(client: Client, name: str, make: Callable[[Fields], T]) -> Iterator[list[T]]:
    """A list of REST to its end."""

    def read(data: Fields) -> tuple[list[T], Next | None]:
        info = data.object("pageInfo")
        cursor = info.text("endCursor") if info.flag("hasNextPage") else None
        return rows(data, name, make), (path, base | {"starting_after": cursor}) if cursor else None

    path, base = f"/rest/{name}", {"limit": str(PAGE)}
    return upkeep.pages(lambda link, params: client.get(link, params=params), (path, base), read)


def connection(
    client: Client,
    query: str,
    name: str,
    make: Callable[[Fields], T],
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[list[T]]:
    """A list of GraphQL: what `query`, which takes `given` and its cursor as ``$c``, answers under `name`."""

    def read(data: Fields) -> tuple[list[T], Next | None]:
        found = data.object("data").object(name)
        if not found.has("edges"):
            raise payload.missing("edges")
        cursor = found.object("pageInfo").text("endCursor")
        more = found.object("pageInfo").flag("hasNextPage") and cursor
        rows = [make(edge.object("node")) for edge in found.objects("edges")]
        return rows, ("", {**given, "c": cursor}) if more else None

    return upkeep.pages(lambda _, page: graphql(client, query, page, write=False), ("", given), read)


def told(data: Any) -> bool:
    """Whether an error is one of the application's own."""
    return isinstance(data, dict) and isinstance(data.get("messages"), list)


def hooks(client: Client, secret: str | None) -> list[Hook]:
    """All webhooks. One of another object, of several topics or of another secret is for no topic of ours."""
    thing, _, relation = names(client)

    def read(row: Fields) -> Hook:
        operations = row.texts("operations")
        topics = [t for t in TOPICS if operations == (f"{thing}.{t}",) and secret in (None, row.text("secret"))]
        active = row.data.get("deletedAt") is None
        url = (row.text("targetUrl") or "").removesuffix(f"/{thing}.{relation}")
        return Hook(row.ref("id"), topics[0] if topics and active else " ".join(operations), url, active)

    return [hook for page in listing(client, "webhooks", read) for hook in page]


def create_hook(client: Client, url: str, topic: str, secret: str) -> Hook:
    """Make a webhook for one topic."""
    thing, _, relation = names(client)
    target = f"{url}/{thing}.{relation}"
    body = {"targetUrl": target, "operations": [f"{thing}.{topic}"], "description": "Turnlock", "secret": secret}
    answer = client.post("/rest/webhooks", json=body)
    with answer.reading(write=True):
        made = Fields(answer.data, strict=False).object("data").object("createWebhook")
        return Hook(made.ref("id"), topic, url, True)


def remove_hook(client: Client, hook: Hook) -> bool:
    """Remove a webhook; whether there was one."""
    return upkeep.unless_gone(lambda: client.delete(f"/rest/webhooks/{hook.hook_ref}")) is not None
