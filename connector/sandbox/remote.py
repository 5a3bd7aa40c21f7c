"""Orders to a sandbox that runs in another process."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any

PREFIX = "/_sandbox/"


class Remote:
    """The methods of :class:`~connector.sandbox.control.Control`, called by keyword, for the sandbox at `url`.

    What the sandbox refuses raises :class:`ValueError`. `timeout` in seconds is for one order.
    """

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        self.url = url
        self._address = url.removeprefix("http://")
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        def order(**values: Any) -> Any:
            connection = HTTPConnection(self._address, timeout=self._timeout)
            try:
                connection.request("POST", PREFIX + name, json.dumps(values), {"Content-Type": "application/json"})
                response = connection.getresponse()
                answer = json.loads(response.read())
            finally:
                connection.close()
            if response.status != 200:
                raise ValueError(answer["error"])
            return answer["result"]

        return order
