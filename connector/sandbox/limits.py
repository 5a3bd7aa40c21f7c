"""Sliding rate windows."""

from __future__ import annotations

import threading
from collections import deque


class Windows:
    """How many calls of each context were let through within the last seconds. Refused calls do not count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[str, deque[float]] = {}

    def take(self, context: str, limit: int, window: float, mono: float) -> tuple[int, float]:
        """Count one call at the monotonic time `mono`.

        Returns how many more the window of `window` seconds holds, and the seconds to wait: 0 when the call was let
        through.
        """
        with self._lock:
            taken = self._taken.setdefault(context, deque())
            while taken and taken[0] <= mono - window:
                taken.popleft()
            if len(taken) >= limit:
                # Full again only when enough of the oldest calls have left the window to be below the limit.
                return 0, taken[len(taken) - limit] + window - mono if limit > 0 else window
            taken.append(mono)
            return limit - len(taken), 0.0
