"""CRMs that post one new lead after the other, and each again until it is answered 200, as they do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.rig import Rig


class Senders:
    """Posts a delivery for each of `refs`; where nobody listens any more, to the next of `urls`.

    `answered` are the leads answered 200 so far, `statuses` counts what was answered.
    """

    def __init__(self, rig: Rig, refs: list[str], *urls: str, threads: int = 4) -> None:
        self._rig, self._refs, self._urls = rig, iter(refs), list(urls or [rig.hook_url])
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads)
        self.answered: list[str] = []
        self.statuses: Counter[int] = Counter()
        self._running = [self._pool.submit(self._post) for _ in range(threads)]

    def _post(self) -> None:
        while True:
            with self._lock:
                ref = next(self._refs, None)
            if ref is None:
                return
            while self._send(ref) != 200:
                time.sleep(0.01)  # a CRM's pause before it repeats, made short
            with self._lock:
                self.answered.append(ref)

    def _send(self, ref: str) -> int | None:
        body, url = self._rig.delivery(ref, event=ref), self._urls[0]
        try:
            status = self._rig.post(body, event=ref, url=url).status
        except OSError:
            with self._lock:
                if len(self._urls) > 1 and self._urls[0] == url:
                    self._urls.pop(0)
            return None
        with self._lock:
            self.statuses[status] += 1
        return status

    def wait(self) -> None:
        """Until every lead is answered 200."""
        for one in self._running:
            one.result(60)
        self._pool.shutdown()
