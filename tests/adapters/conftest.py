"""No test of the adapters opens a socket to anything but loopback."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest

pytest.register_assert_rewrite(*(f"tests.adapters.{m}" for m in ("conformance", "checks_deliveries", "checks_api")))


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and not ipaddress.ip_address(address[0]).is_loopback:
            raise AssertionError(f"a test tried to reach {address[0]}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
