"""Search of the HubSpot face: filters, one order, pages by an offset, and the limits of each.

Source: https://developers.hubspot.com/docs/api-reference/latest/crm/search-the-crm. How far search lags behind is the
fault ``stale`` on its path: owners, and the times of changes, are then as they were so long ago.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from connector.sandbox.exchange import Answer, ApiError, Request

PAGE = 200
GROUPS, FILTERS, ALL_FILTERS, BODY, ROWS = 5, 6, 18, 3000, 10_000
_TIMES = frozenset({"createdate", "lastmodifieddate"})
_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    "GT": lambda a, b: a > b,
    "GTE": lambda a, b: a >= b,
    "LT": lambda a, b: a < b,
    "LTE": lambda a, b: a <= b,
}


def needed(body: Mapping[str, Any]) -> list[str]:
    """Names of the properties that the search looks at or shows."""
    filters = [f for group in body.get("filterGroups") or [] for f in group["filters"]]
    return [*(f["propertyName"] for f in filters), *body.get("properties", ())]


def search(request: Request, body: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Answer:
    """One page of the contacts in `rows`, which show what is :func:`needed`. Raises :class:`ApiError` 400."""
    groups, limit = body.get("filterGroups") or [], int(body.get("limit") or 10)
    start, counts = int(body.get("after") or 0), [len(group["filters"]) for group in groups]
    large = len(groups) > GROUPS or sum(counts) > ALL_FILTERS or max(counts, default=0) > FILTERS
    if large or limit > PAGE or len(request.body) > BODY:
        raise ApiError(400, "The search is too large.")
    if start + limit > ROWS:
        raise ApiError(400, "At most 10,000 results can be read of one search.")
    orders = body.get("sorts") or [{"propertyName": "createdate", "direction": "ASCENDING"}]
    if len(orders) > 1:
        raise ApiError(400, "At most one order can be given.")
    fitting = [row for row in rows if not groups or any(all(_fits(row, f) for f in g["filters"]) for g in groups)]
    name, descending = orders[0]["propertyName"], orders[0].get("direction") == "DESCENDING"
    fitting.sort(key=lambda row: (_number(row, name), int(row["id"])), reverse=descending)
    shown = fitting[start : start + limit]
    more = {"paging": {"next": {"after": str(start + limit)}}} if start + limit < len(fitting) else {}
    return Answer(200, {"total": len(fitting), "results": shown, **more})


def _number(row: Mapping[str, Any], name: str) -> float:
    """A property that has an order, as a number; times in milliseconds."""
    value = row["properties"].get(name)
    if name in _TIMES:
        return float(int(datetime.fromisoformat(str(value)).timestamp() * 1000))
    if name != "hs_object_id":
        raise ApiError(400, f"{name} has no order here.")
    return float(value)


def _fits(row: Mapping[str, Any], rule: Mapping[str, Any]) -> bool:
    """Whether a contact, as search shows it, meets one filter."""
    name, operator = rule["propertyName"], rule["operator"]
    value = row["properties"].get(name)
    if operator in ("HAS_PROPERTY", "NOT_HAS_PROPERTY"):
        return (value in (None, "")) is (operator == "NOT_HAS_PROPERTY")
    if operator == "IN":
        return value in rule["values"]
    if operator not in _COMPARED:
        raise ApiError(400, "operator is not known.")
    return _COMPARED[operator](_number(row, name), float(rule["value"]))
