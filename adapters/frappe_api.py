"""Lists and webhooks of Frappe, its refusals, and the time zone of a site."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from adapters import payload, upkeep
from adapters.base import Finding, Hook
from adapters.frappe_reading import lead_of, wall, zone
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from routing.model import Lead

if TYPE_CHECKING:
    from adapters.client import Client

#: The document type of a lead, and where leads are.
LEAD, LEADS = "CRM Lead", "/api/resource/CRM%20Lead"
_HOOKS, _SETTINGS = "/api/resource/Webhook", "/api/resource/System%20Settings/System%20Settings"
_PAGE = 100
_NO_CRM = "This site has no leads: install the app Frappe CRM on it, or correct the base address."
_SITES_ZONE = "the Time Zone of the site's System Settings, such as America/Denver"
_UNSET = "Asia/Kolkata"  # frappe/utils/data.py: the zone of a site whose settings name none
_OWN_ADDRESS = (
    "Frappe gives no lead to an agent who has the lead's own e-mail address. Give it to somebody else by hand, or "
    "correct the address of the lead and replay the write."
)

T = TypeVar("T")


def kind_of(data: Any) -> str | None:
    """The name that an error has in Frappe; None where the answer is not Frappe's."""
    kind = data.get("exc_type") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None


def words(status: int, data: Any) -> str | None:
    """What the admin is told of what is not this site at all, and of an owner whom no lead of theirs may have."""
    if upkeep.elsewhere(status, kind_of(data) is not None) is not None:
        return upkeep.not_there("your Frappe site")
    told = str(data.get("exception")) if status == 417 and isinstance(data, dict) else ""
    return _OWN_ADDRESS if "Lead Owner cannot be same as the Lead Email" in told else None


def query(fields: Sequence[str], filters: Sequence[Sequence[Any]], order: str) -> dict[str, str]:
    """The query of a list. Without white space: gunicorn takes a first line of 4,094 bytes at most."""
    said = {"fields": fields, "filters": filters}
    return {key: json.dumps(value, separators=(",", ":")) for key, value in said.items()} | {"order_by": order}


def some_leads(
    client: Client, fields: Sequence[str], filters: Sequence[Any], order: str, most: int = _PAGE
) -> list[Lead]:
    """At most `most` leads, in one answer."""
    try:
        answer = client.get(LEADS, params=query(fields, filters, order) | {"limit_page_length": str(most)})
    except CrmError as error:
        if error.outcome is not Outcome.GONE:
            raise
        raise CrmError(Outcome.ANSWER_UNREADABLE, status=error.status, call=f"GET {LEADS}", text=_NO_CRM) from None
    with answer.reading():
        return _rows(Fields(answer.data, strict=False), lambda row: lead_of(row, zone(client)))


def _rows(data: Fields, make: Callable[[Fields], T]) -> list[T]:
    if not isinstance(data.data.get("data"), list):
        raise payload.missing("data")
    return [make(row) for row in data.objects("data")]


def listing(
    client: Client, path: str, asked: Mapping[str, str], make: Callable[[Fields], T], most: int = upkeep.MAX_PAGES
) -> Iterator[list[T]]:
    """The pages of a list: there is neither total nor link."""
    asked = {**asked, "limit_page_length": str(_PAGE)}
    rows = partial(_rows, make=make)
    return upkeep.overlapping(client, path, asked, rows, by="limit_start", size=_PAGE, most=most)


def open_leads(client: Client, field: str, since: datetime) -> Iterator[list[Lead]]:
    """All by a time, oldest first.

    A list of the unassigned alone would lose a page of them for each page that is assigned while it is read.
    """
    filters = [(field, ">=", wall(since, client)), ("converted", "=", 0)]
    asked = query(("name", "lead_owner", "creation", "modified"), filters, "creation asc, name asc")
    return listing(client, LEADS, asked, lambda row: lead_of(row, zone(client)))


# -- the time zone ---------------------------------------------------------------------------------------------------


def zone_finding(client: Client, newest: Sequence[Lead]) -> Finding:
    """Whether the parameter names the site's zone: by its settings where we may read them, else by its newest lead."""
    named = client.credentials.parameters.get("time_zone") or ""
    site = _zone_of_site(client)
    ahead = any(x.updated_at and (x.updated_at - client.now()).total_seconds() > upkeep.MAX_SKEW for x in newest)
    # Several names mean one zone (Asia/Calcutta, Asia/Kolkata): what counts is that the clocks agree, all year round.
    year = (client.now(), client.now() + timedelta(days=182))
    other = site is not None and any(wall(time, client) != wall(time, client, site) for time in year)
    if ahead or other or zone(client).key != named:
        fix = f"set the parameter time_zone to {site or _SITES_ZONE}"
        return Finding("time zone", False, f"{named or 'none'} is not the site's", fix)
    return Finding("time zone", True, named)


def _zone_of_site(client: Client) -> str | None:
    """Only a System Manager may read it."""
    try:
        answer = client.get(_SETTINGS)
    except CrmError as error:
        if error.outcome not in (Outcome.FORBIDDEN, Outcome.GONE, Outcome.REFUSED):
            raise
        return None
    with answer.reading():
        settings = Fields(answer.data, strict=False).object("data")
        return settings.zone("time_zone") if settings.text("time_zone") else _UNSET


# -- webhooks --------------------------------------------------------------------------------------------------------


def _name(url: str, topic: str, secret: str) -> str:
    """The name of a webhook of ours, which it is asked for. It changes with the secret, which no reading shows."""
    return f"turnlock-{topic}-{hmac.new(secret.encode(), url.encode(), hashlib.sha256).hexdigest()[:12]}"


def hooks(client: Client, secret: str) -> list[Hook]:
    """Webhooks on leads. One that is disabled or has another secret, and so another name, is for no topic of ours."""

    def read(row: Fields) -> Hook:
        name, topic = row.text("name") or "", row.text("webhook_docevent") or ""
        url = (row.text("request_url") or "").removesuffix(f"/{topic}")
        good = name == _name(url, topic, secret) and row.flag("enabled") is True
        return Hook(name, topic if good else f"{topic} ({name})", url, good)

    fields = ("name", "webhook_docevent", "enabled", "request_url")
    asked = query(fields, [("webhook_doctype", "=", LEAD)], "name asc")
    return [hook for page in listing(client, _HOOKS, asked, read) for hook in page]


def create_hook(client: Client, url: str, topic: str, secret: str) -> Hook:
    """Make a webhook that tells of leads without an owner."""
    name = _name(url, topic, secret)
    body: dict[str, Any] = {
        "webhook_doctype": LEAD,
        "webhook_docevent": topic,
        "enabled": 1,
        "request_url": f"{url}/{topic}",
        "request_method": "POST",
        "webhook_data": [{"fieldname": k, "key": k} for k in ("name", "lead_owner", "modified", "modified_by")],
        "webhook_headers": [{"key": "Content-Type", "value": "application/json"}],
        "enable_security": 1,
        "webhook_secret": secret,
        "condition": "not doc.lead_owner",
    }
    try:
        client.post(_HOOKS, json={"name": name, **body})
    except CrmError as error:
        if error.outcome is not Outcome.CONFLICT:
            raise
        client.put(_path(name), json=body)  # one of ours that could only be disabled
    return Hook(name, topic, url, True)


def remove_hook(client: Client, hook: Hook) -> bool:
    """Remove a webhook; whether there was one.

    One that has sent anything is linked with the log of that, and Frappe removes nothing that is linked: it is disabled
    (webhook_request_log.json of the framework; a removal of the log would be no business of ours).
    """
    path = _path(hook.hook_ref)
    return upkeep.remove(lambda: client.delete(path), or_else=lambda: client.put(path, json={"enabled": 0}))


def _path(name: str) -> str:
    return f"{_HOOKS}/{quote(name)}"
