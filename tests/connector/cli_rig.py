"""The command line in tests: through click's runner, and as the installed program in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from click.testing import CliRunner, Result

from connector.cli import cli
from connector.settings import Settings


@dataclass
class Cli:
    """Runs ``turnlock`` against the database of `settings`."""

    settings: Settings
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """The environment that says what `settings` say."""
        s = self.settings
        assert s.database_url is not None
        assert s.migrate_url is not None
        return {
            "TURNLOCK_DATABASE_URL": s.database_url,
            "TURNLOCK_MIGRATE_URL": s.migrate_url,
            "TURNLOCK_SECRET_KEYS": ",".join(s.secret_keys),
            "TURNLOCK_ALLOW_PRIVATE_HOSTS": "1",
            "TURNLOCK_PUBLIC_URL": s.public_url,
            **self.extra,
        }

    def __call__(self, *args: str, code: int = 0, text: str | None = None, **env: str) -> Result:
        """Run a command in this process; fails unless it ends with `code`. `text` is standard input."""
        result = CliRunner().invoke(cli, args, input=text, env=self.env | env)
        assert result.exit_code == code, (args, result.exit_code, result.output, result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    def json(self, *args: str, code: int = 0, **env: str) -> dict[str, Any]:
        """Run with ``--json``; what it printed, which carries its schema."""
        found: dict[str, Any] = json.loads(self(*args, "--json", code=code, **env).stdout)
        assert found["schema"] == 1
        return found

    def process(self, *args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run the installed program, with nothing else in its environment."""
        return subprocess.run(
            [program(), *args],
            env={"PATH": os.environ["PATH"], **(self.env if env is None else env)},
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )


def program() -> str:
    """The console script of this environment."""
    return str(Path(sys.executable).parent / "turnlock")


@contextmanager
def command_line(settings: Settings) -> Iterator[Cli]:
    """A command line on `settings`; what it did to the logs of this process is undone."""
    try:
        yield Cli(settings)
    finally:
        structlog.reset_defaults()
