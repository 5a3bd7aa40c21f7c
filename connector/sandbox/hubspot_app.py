"""The webhooks of the HubSpot face's app, as its developer sets them: where it posts to, and what it tells of.

Source: https://developers.hubspot.com/docs/api-reference/legacy/webhooks/guide. A subscription is not active unless it
is asked to be.
"""

from __future__ import annotations

import re
from typing import Any

from connector.sandbox.exchange import Answer, ApiError, Request, Routes
from connector.sandbox.state import Hook, State

_SETTINGS, _SUBSCRIPTIONS = "/webhooks/v3/([0-9]{1,18})/settings", "/webhooks/v3/([0-9]{1,18})/subscriptions"


class AppHooks:
    """Settings and subscriptions of the one app. What they come to is a hook of the face."""

    def __init__(self, state: State, face: str) -> None:
        self._state, self._face = state, face
        self._hook: Hook | None = None
        self._subscriptions: dict[str, dict[str, Any]] = {}
        self.routes = Routes(
            ("GET", _SETTINGS, self._settings),
            ("PUT", _SETTINGS, self._set),
            ("GET", _SUBSCRIPTIONS, self._list),
            ("POST", _SUBSCRIPTIONS, self._add),
            ("PATCH", f"{_SUBSCRIPTIONS}/([0-9]{{1,18}})", self._change),
        )

    def answer(self, request: Request) -> Answer:
        """Serve one request, which shows the developer's key in its query. Raises :class:`ApiError`."""
        if request.query.get("hapikey") != self._state.account.hubspot_developer:
            raise ApiError(401, "The API key used to make this call is not valid.")
        if request.path.split("/")[3] != str(self._state.account.hubspot_app):
            raise ApiError(404, "resource not found")
        return self.routes.serve(request)

    def _settings(self, request: Request, match: re.Match[str]) -> Answer:
        if self._hook is None:
            raise ApiError(404, "resource not found")
        return Answer(200, {"targetUrl": self._hook.url, "throttling": {"maxConcurrentRequests": 10}})

    def _set(self, request: Request, match: re.Match[str]) -> Answer:
        given = request.json(400)
        if not given.get("targetUrl") or int(given.get("throttling", {}).get("maxConcurrentRequests", 0)) <= 5:
            raise ApiError(400, "targetUrl, and maxConcurrentRequests above 5, are required.")
        if self._hook is None:
            self._hook = self._state.add_hook(self._face, given["targetUrl"], ())
        self._hook.url = given["targetUrl"]
        self._apply()
        return self._settings(request, match)

    def _list(self, request: Request, match: re.Match[str]) -> Answer:
        return Answer(200, {"results": list(self._subscriptions.values())})

    def _add(self, request: Request, match: re.Match[str]) -> Answer:
        given = request.json(400)
        kind, name = str(given.get("eventType")), given.get("propertyName")
        if (kind.endswith(".propertyChange")) is (name is None):
            raise ApiError(400, "propertyName goes with changes of properties.")
        if any((one["eventType"], one.get("propertyName")) == (kind, name) for one in self._subscriptions.values()):
            raise ApiError(409, "This subscription exists.")
        number = str(self._state.number("subscription"))
        made = {"id": number, "eventType": kind, "active": given.get("active") is True}
        self._subscriptions[number] = made | ({"propertyName": name} if name else {})
        self._apply()
        return Answer(201, self._subscriptions[number])

    def _change(self, request: Request, match: re.Match[str]) -> Answer:
        given = request.json(400)
        if given.keys() != {"active"} or match[2] not in self._subscriptions:
            raise ApiError(400, "Only active can be changed.")
        self._subscriptions[match[2]]["active"] = given["active"] is True
        self._apply()
        return Answer(200, self._subscriptions[match[2]])

    def _apply(self) -> None:
        if self._hook is not None:
            active = [one for one in self._subscriptions.values() if one["active"]]
            names = (":".join(filter(None, (one["eventType"], one.get("propertyName")))) for one in active)
            self._hook.topics = tuple(names)
