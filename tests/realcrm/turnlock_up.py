"""Turnlock as its users run it: the command line, and ``turnlock serve`` as a process that can be stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import requests
import structlog
from click.testing import CliRunner
from cryptography.fernet import Fernet

from connector.cli import cli
from tests.ports import free_port
from tests.realcrm.bottlecrm_up import tied


class Turnlock:
    """One installation in `home`, with the embedded database. Nothing runs until :meth:`serve`."""

    def __init__(self, home: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._home = home
        self._log = home / "serve.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._environ = {
            "TURNLOCK_DATABASE_URL": "",  # the embedded one, whatever the caller's environment says
            "TURNLOCK_HOME": str(home),
            "TURNLOCK_PORT": str(port),
            "TURNLOCK_PUBLIC_URL": self.url,
            "TURNLOCK_SECRET_KEYS": Fernet.generate_key().decode(),
            "TURNLOCK_ALLOW_PRIVATE_HOSTS": "1",
        }

    def run(self, *words: str, code: int = 0, **secrets: str) -> str:
        """Run one command to its end, which must exit with `code`; what it printed. `secrets` go by the environment."""
        environ = {f"TURNLOCK_SECRET_{name.upper()}": value for name, value in secrets.items()}
        done = CliRunner().invoke(cli, words, env=self._environ | environ)
        structlog.reset_defaults()  # a command logs to the stream that the runner lends it
        assert done.exit_code == code, f"turnlock {' '.join(words)}: {done.exit_code}\n{done.output}"
        return done.stdout

    def json(self, *words: str) -> Any:
        """What a command says with ``--json``."""
        return json.loads(self.run(*words, "--json"))

    def serve(self) -> None:
        """Start the service and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                tied(sys.executable, "-c", "from connector.cli import main; main()", "serve"),
                env={**os.environ, **self._environ},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        ends = time.monotonic() + 90
        while True:
            try:
                requests.get(f"{self.url}/hooks/none", timeout=5)
                return
            except requests.ConnectionError:
                assert self._process.poll() is None, self._log.read_text()[-4000:]
                assert time.monotonic() < ends, "turnlock serve never answered"
                time.sleep(0.1)

    def stop(self) -> None:
        """Stop the service as an operator does; it must end well."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(40)
        finally:
            process.kill()
        assert code == 0, self._log.read_text()[-4000:]

    def remove(self) -> None:
        """Stop it, and remove its data also where they had to lie elsewhere: under root, behind a link."""
        self.stop()
        data = (self._home / "data").resolve()
        shutil.rmtree(data, ignore_errors=True)
        Path(f"{data}.lock").unlink(missing_ok=True)
