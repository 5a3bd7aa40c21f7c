"""`turnlock serve` as a process of its own on the database of a rig: to be killed, stopped, given a wrong clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.ports import free_port
from tests.rig import Rig, http_send, until

SOURCE = Path(__file__).resolve().parents[1]
_SERVE = """
import sys
from connector.process import open_runtime, run
from connector.settings import from_environment
with open_runtime(from_environment(), upgrade=False, threads=20) as runtime:
    sys.exit(run(runtime, web=True, worker=sys.argv[1] == "worker"))
"""


class Serving:
    """A web server, with a worker beside it or not, that runs the packages in the folder `source`."""

    def __init__(
        self, rig: Rig, *, worker: bool, source: Path = SOURCE, extra: Mapping[str, str] | None = None
    ) -> None:
        port = free_port()
        settings = rig.runtime.settings
        self.base = f"http://127.0.0.1:{port}"
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("TURNLOCK_", "PG"))},
            "TURNLOCK_DATABASE_URL": (settings.database_url or "").replace("postgresql+psycopg:", "postgresql:"),
            "TURNLOCK_SECRET_KEYS": ",".join(settings.secret_keys),
            "TURNLOCK_ALLOW_PRIVATE_HOSTS": "1",
            "TURNLOCK_PORT": str(port),
            "TURNLOCK_PUBLIC_URL": settings.public_url,  # some CRMs sign the address
            **(extra or {}),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, "worker" if worker else "web"], env=environment, cwd=source
        )

    def wait_ready(self) -> None:
        """Wait until it serves."""
        until(self._answers, 60, "the start of the process")

    def _answers(self) -> bool:
        assert self.process.poll() is None, "the process ended"
        with suppress(OSError):
            return http_send(self.base + "/readyz", b"", {}, "GET").status == 200
        return False

    def terminate(self) -> None:
        """SIGTERM: stop in order."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9: nothing is cleaned up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
