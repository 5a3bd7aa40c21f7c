"""A CRM that refuses everything for a while, with many leads waiting and many workers: one call per pause, then all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from adapters.followupboss import FollowUpBoss
from connector.database import make_engine
from connector.runtime import Runtime
from connector.worker import Worker
from tests.rig import Rig, until
from tests.serving import Serving

CONTEXTS = {"people": 25, "notes": 10, "events": 20, "global": 250}


def context(call: dict[str, Any]) -> str:
    """Which of Follow Up Boss's limits a call counts for."""
    method, path = call["method"], call["path"]
    if "/events" in path:
        return "events"
    if "/people/" in path and method == "PUT":
        return "people"
    return "notes" if "/notes" in path and method != "GET" else "global"


def most_in_a_window(calls: list[dict[str, Any]], window: float) -> dict[str, int]:
    """By context, the most calls that any window of time has seen."""
    most = dict.fromkeys(CONTEXTS, 0)
    for name in CONTEXTS:
        times = [call["mono"] for call in calls if context(call) == name]
        first = 0
        for number, at in enumerate(times):
            while times[first] <= at - window:
                first += 1
            most[name] = max(most[name], number - first + 1)
    return most


EVERYTHING: dict[str, str] = {}
WRITES = {"method": "PUT", "path": r"/people/\d+$"}


def storm(rig: Rig, where: dict[str, str], leads: int, seconds: float, pause: int, window: float, threads: int) -> None:
    """Let it rage, then look at what the CRM saw. `threads`: how many may be calling when it breaks out."""
    rig.sandbox.clear_logs()
    rig.sandbox.fault("status", status=429, retry_after=str(pause), **where)
    rig.sandbox.create_leads(leads)
    began = time.monotonic()

    def over() -> bool:
        """Long enough, and at least two pauses were waited out."""
        hit = [call["mono"] for call in rig.sandbox.call_log() if call["faults"]]
        return time.monotonic() - began >= seconds and len([at for at in hit if at >= hit[0] + pause]) >= 2

    until(over, seconds + 60.0, "two probes")
    rig.sandbox.clear_faults()
    ended = time.monotonic()
    bound = 60.0 + leads * window / CONTEXTS["people"]
    until(lambda: rig.sandbox.counts()["unowned"] == 0, bound, f"an owner for each of {leads} leads")
    print(f"{leads} leads: all written {time.monotonic() - ended:.1f} s after the storm, allowed {bound:.0f} s")
    calls = sorted(rig.sandbox.call_log(), key=lambda call: call["mono"])
    refused = [call["mono"] for call in calls if call["faults"]]
    first = refused[0]
    # Calls that were on their way when the first was refused; from then on one at a time.
    under_way = [at for at in refused if at - first < min(2.0, pause * 0.8)]
    probes = refused[len(under_way) - 1 :]
    assert len(under_way) <= threads
    assert min(later - earlier for earlier, later in pairwise(probes)) >= pause
    meanwhile = [call for call in calls if first < call["mono"] < ended and not call["faults"]]
    assert [call for call in meanwhile if where is EVERYTHING or context(call) == "people"] == []
    if where is WRITES:  # who reads goes first as well: one batch of new leads, or one lead before its write
        assert len(meanwhile) <= (4 + len(under_way)) * (len(probes) + 1)
    assert [call for call in calls if call["status"] == 429 and not call["faults"]] == []
    most = most_in_a_window([call for call in calls if not call["faults"]], window)
    print(f"most calls in {window:g} s: {most}; {len(under_way)} calls were under way, {len(probes) - 1} probes")
    assert {name: n for name, n in most.items() if n > CONTEXTS[name]} == {}
    assert len(rig.owner_writes()) == leads
    assert rig.most_tries() == 0


@contextmanager
def crew(rig: Rig, workers: int) -> Iterator[None]:
    """Workers that share nothing but the database, as processes do."""
    settings = rig.runtime.settings
    assert settings.database_url is not None
    with ExitStack() as stack:
        made = []
        for _ in range(workers):
            engine = make_engine(settings.database_url, pool_size=8, pool_timeout=5)
            stack.callback(engine.dispose)
            made.append(Worker(Runtime(replace(settings, deciders=2, senders=3), engine)))
        for worker in made:
            stack.callback(worker.stop)
            worker.start()
        yield


@pytest.mark.parametrize(
    "where", [pytest.param(EVERYTHING, marks=pytest.mark.proof), WRITES], ids=["everything", "writes"]
)
def test_in_a_storm_one_worker_of_all_calls_per_pause_and_then_all_is_written_at_the_pace_of_the_crm(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, where: dict[str, str]
) -> None:
    window = 1.0  # a tenth of the vendor's, so that it is over soon
    quick = tuple(replace(bucket, window=window) for bucket in FollowUpBoss.buckets)
    monkeypatch.setattr(FollowUpBoss, "buckets", quick)
    rig = make_rig(worker=False, limits=True, rate_window=window)
    with crew(rig, 3):
        rig.first_round()
        storm(rig, where, leads=40, seconds=0.0, pause=2, window=window, threads=3 * 7)
    rig.audit()


@pytest.mark.proof
@pytest.mark.timeout(0)
def test_a_long_storm_with_many_leads_and_eight_workers(
    make_rig: Callable[..., Rig], serve: Callable[..., Serving]
) -> None:
    """TURNLOCK_STORM=600,1000 is the full size: seconds, leads. Each worker is a process, at the vendor's own pace."""
    seconds, leads = (int(part) for part in os.environ.get("TURNLOCK_STORM", "60,300").split(","))
    rig = make_rig(worker=False, limits=True)
    # Few threads each: eight processes on a small machine have enough to do with one another.
    few = {"TURNLOCK_DECIDERS": "2", "TURNLOCK_SENDERS": "2"}
    for _ in range(8):  # one after the other: a small machine has enough to do with one start
        serve(rig, worker=True, extra=few)
    rig.first_round()
    storm(rig, EVERYTHING, leads, seconds, pause=10, window=10.0, threads=8 * 6)
    rig.audit()
