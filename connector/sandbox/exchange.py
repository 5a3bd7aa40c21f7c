"""What passes between the socket and a face of the sandbox: requests, answers, errors, routes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl

from connector.sandbox.state import Lead, utc_now


class ApiError(Exception):
    """An answer other than success: HTTP status, text for the caller, extra headers."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})


@dataclass(slots=True)
class View:
    """What the CRM pretends during one request. The defaults pretend nothing.

    ``hide_younger``: leads younger than so many seconds are not readable. ``stale``: owners are shown as they were so
    many seconds ago; HubSpot's face shows the times of changes so, too. ``lost_owner``: an owner write answers success
    and leaves the owner ``"empty"`` or ``"unchanged"``.
    """

    hide_younger: float = 0.0
    stale: float = 0.0
    lost_owner: str | None = None

    def sees(self, lead: Lead, mono: float) -> bool:
        """Whether `lead` is readable at the monotonic time `mono`."""
        return mono - lead.born >= self.hide_younger

    def holder(self, lead: Lead, mono: float) -> tuple[int | None, int | None]:
        """Owner and pond of `lead` as this request sees them."""
        if self.stale:
            shown: tuple[int | None, int | None] = (None, None)
            for at, owner, pond in lead.history:
                if at > mono - self.stale:
                    break
                shown = (owner, pond)
            return shown
        return lead.owner, lead.pond

    def changed(self, lead: Lead, mono: float) -> datetime:
        """The last change of `lead` as this request sees it."""
        if not self.stale:
            return lead.updated
        known = max((at for at, *_ in lead.history if at <= mono - self.stale), default=lead.born)
        return min(lead.updated, utc_now() - timedelta(seconds=mono - known))


@dataclass(slots=True)
class Request:
    """One API call. ``path`` is relative to the face; header names are lower case; ``query`` keeps the last value."""

    method: str
    path: str
    query_text: str
    headers: Mapping[str, str]
    body: bytes
    view: View = field(default_factory=View)
    owner_written: int | None = None  # lead id, set by a face that wrote an owner

    @property
    def query(self) -> dict[str, str]:
        """Query parameters."""
        return dict(parse_qsl(self.query_text, keep_blank_values=True))

    def json(self, status: int) -> dict[str, Any]:
        """The body as a JSON object, or :class:`ApiError` with `status`."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            raise ApiError(status, "The request body is not valid JSON.") from None
        if not isinstance(value, dict):
            raise ApiError(status, "The request body must be a JSON object.")
        return value


@dataclass(slots=True)
class Answer:
    """What goes back. ``wire`` says how: ``plain``, ``reset``, ``headers`` (a piece of them, then a reset), ``drip``
    (one byte per ``pace`` seconds), ``endless``."""

    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    wire: str = "plain"
    pace: float = 0.0

    def encoded(self) -> bytes:
        """The body as bytes: text and bytes as they are, None as nothing, everything else as JSON."""
        if self.body is None:
            return b""
        if isinstance(self.body, bytes):
            return self.body
        if isinstance(self.body, str):
            return self.body.encode()
        return json.dumps(self.body, ensure_ascii=False, separators=(",", ":")).encode()


Handler = Callable[[Request, re.Match[str]], Answer]


class Routes:
    """Which handler serves which method and path."""

    def __init__(self, *table: tuple[str, str, Handler]) -> None:
        self._table = [(method, re.compile(pattern), handler) for method, pattern, handler in table]

    def serve(self, request: Request) -> Answer:
        """Call the handler of `request`. Raises :class:`ApiError` 404 or 405 when there is none."""
        methods = []
        for method, pattern, handler in self._table:
            match = pattern.fullmatch(request.path)
            if match and method == request.method:
                return handler(request, match)
            if match:
                methods.append(method)
        if methods:
            raise ApiError(405, "This method is not allowed here.", {"Allow": ", ".join(methods)})
        raise ApiError(404, "There is nothing at this address.")
