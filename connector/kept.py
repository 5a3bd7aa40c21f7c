"""What is handed to the next thread while it is being committed: to be made ready with, never to be built upon."""

from __future__ import annotations

import threading


class NotKept(Exception):
    """What was handed over is lost, or nobody knows: whoever sent it sends it again, or somebody else takes it up."""


class Kept:
    """Whether what was handed over is committed. Told once, by whoever commits; asked by whoever has it."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._kept = False

    def tell(self, kept: bool) -> None:
        """It is, or nobody may go on. The first word counts."""
        if not self._told.is_set():
            self._kept = kept
            self._told.set()

    def sure(self) -> None:
        """Wait until that is known. Raises :class:`NotKept`.

        Whoever commits tells, however that ends; time-outs of its own end it.
        """
        self._told.wait()
        if not self._kept:
            raise NotKept


#: What was committed before it was handed over.
KEPT = Kept()
KEPT.tell(True)
