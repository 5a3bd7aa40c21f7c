"""Speaking Odoo's JSON-RPC (https://www.odoo.com/documentation/18.0/developer/reference/external_api.html).

Each call names the database, the number of the user and the key; every error of the application is a 200.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from adapters import payload, upkeep
from adapters.base import Unreadable
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields

if TYPE_CHECKING:
    from adapters.client import Answer, Client

T = TypeVar("T")

# https://github.com/odoo/odoo/blob/18.0/odoo/exceptions.py, as ``error.data.name`` shows them. Others are refusals.
_ERRORS: Mapping[str, Outcome] = MappingProxyType(
    {
        "odoo.exceptions.AccessDenied": Outcome.REAUTHORISE,
        "odoo.exceptions.AccessError": Outcome.FORBIDDEN,
        "odoo.exceptions.MissingError": Outcome.GONE,
    }
)
_NO_DATABASE = "Odoo has no database of this name. Correct the parameter database."
#: Rows of a page.
PAGE = 100
#: The context in which archived records are found, too.
ALSO_ARCHIVED: Mapping[str, Any] = MappingProxyType({"active_test": False})


def call(client: Client, service: str, method: str, args: list[Any], *, write: bool) -> tuple[Answer, Any]:
    """``POST /jsonrpc``: the answer and its result. Raises :class:`CrmError`, also for the error that a 200 holds."""
    params = {"service": service, "method": method, "args": args}
    body = {"jsonrpc": "2.0", "method": "call", "params": params, "id": 1}
    answer = client.post("/jsonrpc", json=body, write=write)
    with answer.reading(write=write):
        told = Fields(answer.data, strict=False)
        if told.data.get("error") is not None:
            data = told.object("error").object("data")
            name = data.text("name") or ""
            if name == "psycopg2.OperationalError" and "does not exist" in (data.text("message") or ""):
                raise answer.failed(Outcome.REAUTHORISE, text=_NO_DATABASE)
            # After five tries of its own Odoo gives a lost race of the database back; nothing is kept of it.
            raced = name.startswith("psycopg2.")
            raise answer.failed(Outcome.NOT_SENT if raced else _ERRORS.get(name, Outcome.REFUSED))
        if not told.has("result"):
            raise payload.missing("result")
    return answer, told.data["result"]


def _login(client: Client) -> list[str]:
    known = client.credentials.parameters
    return [known.get("database", ""), known.get("login", ""), client.credentials.secrets.get("api_key", "")]


def uid(client: Client) -> int:
    """The number of the connected user, asked for once. A wrong login is told by ``false``."""
    if "uid" not in client.learnt:
        answer, found = call(client, "common", "authenticate", [*_login(client), {}], write=False)
        if not isinstance(found, int) or not found:
            raise answer.failed(Outcome.REAUTHORISE)
        client.learnt["uid"] = found
    known: int = client.learnt["uid"]
    return known


def execute(client: Client, model: str, method: str, args: list[Any], *, write: bool, **named: Any) -> Any:
    """``execute_kw``: call `method` of `model` with `args` and `named`."""
    database, _, key = _login(client)
    what = [database, uid(client), key, model, method, args, named]
    try:
        return call(client, "object", "execute_kw", what, write=write)[1]
    except CrmError as error:
        if error.outcome is Outcome.REFUSED:
            client.learnt.pop("fields", None)  # one of them may be gone by now
        raise


def if_allowed(call: Callable[[], T], otherwise: T) -> T:
    """What `call` answers, or `otherwise` where Odoo refuses it to the connected user, or knows nothing of it."""
    try:
        return call()
    except CrmError as error:
        if error.outcome not in (Outcome.FORBIDDEN, Outcome.REFUSED):
            raise
        return otherwise


def search(
    client: Client, model: str, domain: list[Any], fields: Sequence[str], make: Callable[[Fields], T], **named: Any
) -> list[T]:
    """``search_read``: what `make` makes of each record that `domain` finds."""
    context = dict(named.pop("context", {}))
    rows = execute(client, model, "search_read", [domain], write=False, fields=list(fields), context=context, **named)
    truths = client.learnt.get("truths", frozenset())
    return reading(lambda: [make(shown(row, truths)) for row in _list(rows)])


def ids(client: Client, model: str, domain: list[Any]) -> list[int]:
    """``search``: the numbers of the records that `domain` finds."""
    found = execute(client, model, "search", [domain], write=False)
    return reading(lambda: [int(payload.ref(one)) for one in _list(found)])


def field_kinds(client: Client, model: str) -> dict[str, str | None]:
    """The fields that `model` has, with their types."""
    found = execute(client, model, "fields_get", [], write=False, attributes=["type"])
    return reading(lambda: {k: shown(v).text("type") for k, v in Fields(found, strict=False).data.items()})


def names_of(client: Client, model: str, numbers: Sequence[Any]) -> Mapping[int, str]:
    """The names of these records of `model`, by number."""
    wanted = sorted({n for n in numbers if isinstance(n, int)})
    if not wanted:
        return {}
    domain, fields = [["id", "in", wanted]], ("id", "name")
    return dict(search(client, model, domain, fields, lambda row: (int(row.ref("id")), row.text("name") or "")))


def users_of(client: Client, partners: Sequence[Any]) -> Mapping[int, str]:
    """The users that these partners are, by the partner's number; most partners are none."""
    known: dict[int, str] = client.learnt.setdefault("users", {})
    if wanted := sorted({n for n in partners if isinstance(n, int) and n not in known}):
        known |= {partner: user for user, partner in _partners(client, ["partner_id", "in", wanted])}
    return known


def partner_of(client: Client, user: str) -> int | None:
    """The partner that a user is; None where there is no such user."""
    if not (user.isascii() and user.isdigit()):
        return None
    return next((partner for _, partner in _partners(client, ["id", "=", int(user)])), None)


def _partners(client: Client, condition: list[Any]) -> list[tuple[str, int]]:
    def pair(row: Fields) -> tuple[str, int]:
        shown = row.data.get("partner_id")
        return row.ref("id"), int(payload.ref(shown[0] if isinstance(shown, list) and shown else shown))

    return search(client, "res.users", [condition], ("id", "partner_id"), pair, context=ALSO_ARCHIVED)


def named(row: Fields, key: str) -> str | None:
    """The name of another record that `row` shows: ``[id, name]``."""
    value = row.data.get(key)
    return value[1] if isinstance(value, list) and len(value) > 1 and isinstance(value[1], str) else None


def listing(
    client: Client,
    model: str,
    domain: list[Any],
    fields: Sequence[str],
    make: Callable[[Fields], T],
    context: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[list[T]]:
    """Pages by rising id, so that nothing is skipped whatever happens to the records meanwhile."""
    last = 0
    for _ in range(upkeep.MAX_PAGES):
        beyond = [["id", ">", last], *domain]

        def numbered(row: Fields) -> tuple[int, T]:
            return int(row.ref("id")), make(row)

        rows = search(client, model, beyond, fields, numbered, order="id asc", limit=PAGE, context=context)
        yield [made for _, made in rows]
        if len(rows) < PAGE:
            return
        last = max(last + 1, *(number for number, _ in rows))


def reading(make: Callable[[], T]) -> T:
    """What `make` reads out of a result; a result of another shape is the :class:`CrmError` that it is."""
    try:
        return make()
    except (Unreadable, ValueError):
        raise CrmError(Outcome.ANSWER_UNREADABLE, status=200, call="POST /jsonrpc") from None


def told_of(error: CrmError, key: str) -> str:
    """``error.data.<key>`` of a refusal: ``name`` or ``message``. Never for a log: it may hold a traceback."""
    data: Any = error.data
    for step in ("error", "data", key):
        data = data.get(step) if isinstance(data, dict) else None
    return str(data or "")


def shown(row: Any, truths: Collection[str] = ()) -> Fields:
    """A record whose empty fields, all of them ``false``, are empty; ``active`` and the fields `truths` mean it."""
    data = Fields(row, strict=False).data
    plain = {k: None if v is False and k != "active" and k not in truths else v for k, v in data.items()}
    return Fields(plain, strict=False)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Unreadable("wrong_type")
    return value
