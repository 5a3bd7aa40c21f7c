"""``python -m connector.sandbox``: run the sandbox CRM as a process of its own.

Prints one line of JSON, ``{"url": ..., "pid": ...}``, when it is ready, and ends with 0 on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from types import FrameType

from connector.sandbox.server import Sandbox


def main() -> int:
    """Run until told to end; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m connector.sandbox", description="A CRM to try things on.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--limits", choices=("on", "off"), default="off", help="the vendors' rate limits")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same invented leads and faults")
    parser.add_argument("--retry-scale", type=float, default=1.0, help="factor on the waits between deliveries")
    options = parser.parse_args()
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    with Sandbox(
        options.host,
        options.port,
        seed=options.seed,
        limits=options.limits == "on",
        retry_scale=options.retry_scale,
    ) as sandbox:
        sys.stdout.write(json.dumps({"url": sandbox.url, "pid": os.getpid()}) + "\n")
        sys.stdout.flush()
        ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
