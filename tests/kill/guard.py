"""Ends what is left of a kill run when the test that started it is itself killed: run as a program, on its pipe.

``python guard.py RUN DATA`` waits for the end of its standard input, which comes with the end of the test, however it
ends. Nothing is left to do then unless the test could not clean up. Standard library alone: it starts for every run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "TURNLOCK_KILL_RUN"


def processes_of(run: str, data: str) -> dict[int, str]:
    """What lives of a run, with its command: marked in the environment, or at home in the data folder. Linux."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            marked = f"{MARK}={run}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if marked or os.readlink(folder / "cwd") == data:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command:  # a zombie has none
                    found[int(folder.name)] = command
    return found


def main() -> None:
    """Wait, then look for a few seconds: what is being started at this very moment must go, too."""
    sys.stdin.read()
    for _ in range(30):
        for pid in processes_of(sys.argv[1], sys.argv[2]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
