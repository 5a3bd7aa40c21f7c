"""The Follow Up Boss person: how a lead is shown, listed and changed (people-get, people-id-get, people-id-put).

Source: https://docs.followupboss.com/reference/people-get and the pages beside it.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from connector.sandbox.exchange import ApiError, Request, View
from connector.sandbox.state import Lead, State

STAGES = (
    "Lead",
    "Attempted contact",
    "Spoke with customer",
    "Appointment set",
    "Met with customer",
    "Showing homes",
    "Under contract",
    "Sale closed",
    "Nurture",
    "Rejected",
    "Trash",
)
NOT_BY_DEFAULT = frozenset({"type", "addresses", "collaborators", "background", "ponds"})
PLAIN_FIELDS = {"type": str, "stage": str, "price": int, "contacted": bool, "name": str, "background": str}
LIST_FIELDS = {"emails": "value", "phones": "value"}
ADDRESS_FIELDS = {"street": "street", "city": "city", "state": "state", "code": "zip", "country": "country"}
DEEPEST_OFFSET = 2000


def stamp(moment: datetime) -> str:
    """A time as the vendor writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def custom_name(name: str) -> str:
    """The flat key of a custom field."""
    return name if name.startswith("custom") else "custom" + name[:1].upper() + name[1:]


def person(state: State, lead: Lead, view: View) -> dict[str, Any]:
    """The whole person, as `view` shows it."""
    owner, pond = view.holder(lead, time.monotonic())
    first, _, last = (lead.name or "").partition(" ")
    shared = state.ponds.get(pond) if pond else None
    address = {key: getattr(lead, name) for key, name in ADDRESS_FIELDS.items()}
    extra = {"preferredLanguage": lead.language, "form": lead.form, "campaign": lead.campaign, **lead.custom}
    return {
        "id": lead.id,
        "created": stamp(lead.created),
        "updated": stamp(lead.updated),
        "createdVia": "API",
        "lastActivity": stamp(lead.updated),
        "name": lead.name,
        "firstName": first or None,
        "lastName": last or None,
        "stage": lead.stage,
        "stageId": STAGES.index(lead.stage) + 2 if lead.stage in STAGES else None,
        "type": lead.type,
        "source": lead.source,
        "sourceUrl": lead.source_url,
        "contacted": int(lead.contacted),
        "price": lead.price,
        "background": lead.background,
        "assignedUserId": owner,
        "assignedTo": state.agents[owner].name if owner in state.agents else None,
        "assignedPondId": pond,
        "ponds": [{"id": shared["id"], "name": shared["name"]}] if shared else [],
        "assignedLenderId": lead.lender,
        "assignedLenderName": state.agents[lead.lender].name if lead.lender in state.agents else None,
        "tags": list(lead.tags),
        "emails": [
            {"value": value, "type": "home", "status": "Valid", "isPrimary": int(not place)}
            for place, value in enumerate(lead.emails)
        ],
        "phones": [
            {
                "value": value,
                "normalized": "".join(char for char in value if char.isdigit()),
                "type": "mobile",
                "status": "Valid",
                "isPrimary": int(not place),
                "isLandline": False,
            }
            for place, value in enumerate(lead.phones)
        ],
        "addresses": [{"type": "home", **address}] if any(address.values()) else [],
        "collaborators": [
            {"id": agent.id, "name": agent.name, "assigned": False, "role": agent.role}
            for agent in (state.agents[number] for number in lead.collaborators)
        ],
        **{custom_name(name): value for name, value in extra.items() if value is not None},
    }


def pick(row: Mapping[str, Any], wanted: str | None, *, person: bool = False) -> dict[str, Any]:
    """Only the fields that ``fields=`` asks for (``id`` always); a person without ``fields=`` shows a subset."""
    words = set(wanted.split(",")) if wanted else set()
    if "allFields" in words or not (words or person):
        return dict(row)
    if not words - {"allCustom", "relationships"}:
        return {
            name: value
            for name, value in row.items()
            if name not in NOT_BY_DEFAULT and (not name.startswith("custom") or "allCustom" in words)
        }
    return {
        name: value
        for name, value in row.items()
        if name == "id" or name in words or ("allCustom" in words and name.startswith("custom"))
    }


def page(
    request: Request,
    base: str,
    collection: str,
    rows: Sequence[Any],
    key: Callable[[Any], tuple[Any, ...]],
    show: Callable[[Any], Mapping[str, Any]],
    *,
    descending: bool = True,
) -> dict[str, Any]:
    """One page of a list: ``limit`` (10, at most 100), then ``offset`` or the opaque ``next``.

    `key` must be unique and made of JSON values: ``next`` holds the key of the last row shown, so rows that come or
    go between two pages neither repeat nor hide another.
    """
    query = request.query
    limit, offset = _whole(query, "limit", 10), _whole(query, "offset", 0)
    if offset > DEEPEST_OFFSET:
        raise ApiError(400, "Deep pagination is disabled. Use the next link.")
    limit = min(max(limit, 1), 100)
    ordered = sorted(rows, key=key, reverse=descending)
    rest = ordered[offset:]
    if token := query.get("next"):
        try:
            last = tuple(json.loads(base64.urlsafe_b64decode(token)))
            rest = [row for row in ordered if (key(row) < last if descending else key(row) > last)]
        except (ValueError, TypeError):
            raise ApiError(400, "The next value is not valid.") from None
    shown = rest[:limit]
    metadata: dict[str, Any] = {"collection": collection, "offset": offset, "limit": limit, "total": len(rows)}
    if len(rest) > limit:
        metadata["next"] = base64.urlsafe_b64encode(json.dumps(key(shown[-1])).encode()).decode()
        kept = "&".join(part for part in request.query_text.split("&") if part.partition("=")[0] not in ("next", ""))
        metadata["nextLink"] = f"{base}{request.path}?{kept + '&' if kept else ''}next={metadata['next']}"
    return {"_metadata": metadata, collection: [show(row) for row in shown]}


def matching(state: State, request: Request, visible: Callable[[Lead], bool]) -> list[Lead]:
    """The leads that the filters of ``GET /people`` leave."""
    query, view, now = request.query, request.view, time.monotonic()
    if text := query.get("id") or query.get("ids"):
        numbers = {int(part) for part in text.split(",") if part.strip().isdigit()}
        rows = [state.leads[number] for number in numbers if number in state.leads]
    else:
        rows = list(state.leads.values())
    for name, sign in (("createdAfter", 1), ("createdBefore", -1), ("updatedAfter", 1), ("updatedBefore", -1)):
        if limit := query.get(name):
            moment, field = _moment(limit), name[:7]
            rows = [lead for lead in rows if (getattr(lead, field) - moment).total_seconds() * sign >= 0]
    for name, place in (("assignedUserId", 0), ("assignedPondId", 1)):
        if name in query:
            number = _whole(query, name, 0) or None
            rows = [lead for lead in rows if view.holder(lead, now)[place] == number]
    trash, unclaimed = query.get("includeTrash") == "true", query.get("includeUnclaimed") == "true"
    return [
        lead
        for lead in rows
        if view.sees(lead, now)
        and visible(lead)
        and (trash or lead.stage != "Trash")
        and (unclaimed or not lead.unclaimed)
    ]


def order(request: Request) -> tuple[Callable[[Lead], tuple[Any, ...]], bool]:
    """Key and direction of ``sort=``; newest id first when it is absent."""
    text = request.query.get("sort") or "-id"
    name, descending = text.lstrip("-"), text.startswith("-")
    keys: dict[str, Callable[[Lead], tuple[Any, ...]]] = {
        "id": lambda lead: (lead.id,),
        "name": lambda lead: (lead.name or "", lead.id),
        "created": lambda lead: (lead.created.timestamp(), lead.id),
        "updated": lambda lead: (lead.updated.timestamp(), lead.id),
    }
    if name not in keys:
        raise ApiError(400, f"People cannot be sorted by {name}.")
    return keys[name], descending


def changes(state: State, lead: Lead, request: Request) -> tuple[dict[str, Any], dict[str, int | None]]:
    """The body of ``PUT /people/:id`` as fields of the lead, and the holder that it orders (empty: none).

    Lists replace what is there, except tags with ``mergeTags=true``. Raises :class:`ApiError` 400.
    """
    body = request.json(400)
    fields: dict[str, Any] = {}
    holder: dict[str, int | None] = {}
    for name, value in body.items():
        if name in ("source", "sourceUrl"):
            continue  # set at creation; later writes are ignored
        if name in ("assignedUserId", "assignedPondId", "assignedLenderId"):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ApiError(400, f"{name} must be an integer.")
            known = state.ponds if name == "assignedPondId" else state.agents
            if value and value not in known:
                raise ApiError(400, f"{name} {value} does not exist.")
            if name == "assignedLenderId":
                fields["lender"] = value or None
            else:
                holder["owner" if name == "assignedUserId" else "pond"] = value or None
        elif name == "assignedTo":
            found = [agent.id for agent in state.agents.values() if agent.name == value]
            if len(found) != 1:
                raise ApiError(400, "assignedTo does not name one user.")
            holder["owner"] = found[0]
        elif name == "tags":
            kept = lead.tags if request.query.get("mergeTags") == "true" else []
            fields["tags"] = list(dict.fromkeys([*kept, *_texts(name, value)]))
        elif name in LIST_FIELDS:
            fields[name] = [item["value"] for item in _objects(name, value, LIST_FIELDS[name])]
        elif name == "addresses":
            first = (_objects(name, value, None) or [{}])[0]
            fields.update({ours: first.get(theirs) for theirs, ours in ADDRESS_FIELDS.items()})
        elif name == "collaborators":
            numbers = [item["id"] for item in _objects(name, value, "id")]
            if unknown := [number for number in numbers if number not in state.agents]:
                raise ApiError(400, f"Collaborator {unknown[0]} does not exist.")
            fields["collaborators"] = list(dict.fromkeys(numbers))
        elif name in PLAIN_FIELDS:
            if value is not None and (not isinstance(value, PLAIN_FIELDS[name]) or (name == "price" and value is True)):
                raise ApiError(400, f"{name} is not valid.")
            fields[name] = value
        elif name.startswith("custom"):
            fields.setdefault("custom", dict(lead.custom))[name] = value
        else:
            raise ApiError(400, f"Invalid fields in the request body: {name}.")
    return fields, holder


def _objects(name: str, value: Any, key: str | None) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) and (not key or key in item) for item in value):
        raise ApiError(400, f"{name} must be a list of objects{f' with {key}' if key else ''}.")
    return value


def _texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ApiError(400, f"{name} must be a list of texts.")
    return value


def _whole(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name) or str(default)
    if not text.isdecimal() or len(text) > 12:
        raise ApiError(400, f"{name} must be a whole number.")
    return int(text)


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ApiError(400, "Times must read like 2016-11-23 01:02:03.") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
