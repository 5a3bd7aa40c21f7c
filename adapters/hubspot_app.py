"""The webhooks of an app at HubSpot: one address for all accounts that install it, by its developer's key.

https://developers.hubspot.com/docs/api-reference/legacy/webhooks/guide. An app that is a project of the developer
platform has its webhooks in a file of the project instead: no call makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from adapters.base import Hook, Subscribed
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from adapters.upkeep import unless_gone

if TYPE_CHECKING:
    from adapters.client import Client

#: What is subscribed: types of events, and for changes the properties.
WANTED = (
    ("contact.creation", None),
    ("contact.deletion", None),
    ("contact.privacyDeletion", None),
    ("contact.merge", None),
    ("contact.restore", None),
    ("contact.propertyChange", "hubspot_owner_id"),
    ("contact.propertyChange", "lifecyclestage"),
    ("contact.propertyChange", "hs_lead_status"),
)
_AT_ONCE = 10  # requests in flight per account: the vendor's own default
_NOT_THE_DEVELOPERS = (
    "HubSpot does not take the developer key for this app. Enter the app's id, and the key of the developer account "
    "that it belongs to."
)


def subscribe(client: Client, url: str, *, replace: bool) -> Subscribed:
    """As :meth:`adapters.base.Adapter.subscribe_app`. Subscriptions that others made stay as they are."""
    said = client.credentials
    app_id = said.parameters.get("app_id", "")
    if not app_id.isascii() or not app_id.isdigit():
        return Subscribed(by_hand=("app_id: must be the app's number, which HubSpot shows with the app",))
    path, query = f"/webhooks/v3/{app_id}", {"hapikey": said.secrets["developer_key"]}
    try:
        answer = unless_gone(lambda: client.get(f"{path}/settings", params=query))
        target = None
        if answer is not None:
            with answer.reading():
                target = Fields(answer.data, strict=False).text("targetUrl")
        if target not in (None, url) and not replace:
            host = urlsplit(target or "").hostname
            return Subscribed(by_hand=(f"the app posts to another address, at {host}: --replace makes it this one",))
        if target != url:
            settings = {"targetUrl": url, "throttling": {"maxConcurrentRequests": _AT_ONCE}}
            client.put(f"{path}/settings", params=query, json=settings)
        return Subscribed(tuple(_subscriptions(client, path, query, url)))
    except CrmError as error:
        if error.outcome not in (Outcome.REAUTHORISE, Outcome.FORBIDDEN):
            raise
        raise CrmError(error.outcome, status=error.status, text=_NOT_THE_DEVELOPERS, call="webhooks") from None


def _subscriptions(client: Client, path: str, query: dict[str, str], url: str) -> list[Hook]:
    answer = client.get(f"{path}/subscriptions", params=query)
    with answer.reading():
        rows = Fields(answer.data, strict=False).objects("results")
        there = {(row.text("eventType"), row.text("propertyName")): (row.ref("id"), row.flag("active")) for row in rows}
    stand = []
    for kind, name in WANTED:
        found, active = there.get((kind, name), (None, False))
        if found is None:
            wanted = {"eventType": kind, "active": True} | ({"propertyName": name} if name else {})
            made = client.post(f"{path}/subscriptions", params=query, json=wanted)
            with made.reading(write=True):
                found = Fields(made.data, strict=False).ref("id")
        elif not active:
            client.patch(f"{path}/subscriptions/{found}", params=query, json={"active": True})
        stand.append(Hook(found, f"{kind} {name}" if name else kind, url, True))
    return stand
