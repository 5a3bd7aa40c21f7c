"""Ports for servers of the tests and benches."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN_TO_CALLERS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port of the loopback address that nobody uses, and none of those that the system gives to callers.

    Such a one would be free only as long as its server runs: while that is killed and started again, a connection of
    anybody may take it, and keep it for minutes.
    """
    lowest = int(_GIVEN_TO_CALLERS.read_text().split()[0]) if _GIVEN_TO_CALLERS.exists() else 32_768
    while True:
        port = random.SystemRandom().randrange(10_000, max(lowest, 20_000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
