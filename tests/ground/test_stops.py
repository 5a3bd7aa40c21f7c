"""Processes that are told to stop in the middle of their work, and CRMs that make that work long."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from tests.rig import ANA, BEN, CY, Rig, until
from tests.senders import Senders
from tests.serving import Serving


@pytest.mark.parametrize(
    ("leads", "slow"),
    [(24, 0.25), pytest.param(300, 1.5, marks=[pytest.mark.proof, pytest.mark.timeout(600)])],
    ids=["short", "hundreds of leads and a very slow CRM"],
)
def test_a_process_that_is_stopped_under_load_ends_well_in_time_and_loses_nothing(
    make_rig: Callable[..., Rig], serve: Callable[..., Serving], leads: int, slow: float
) -> None:
    rig = make_rig(crm="bottlecrm", worker=False)  # which shows one lead per call: the slowest to be read
    rig.sandbox.webhook_faults(drop=1.0)
    refs = [rig.create() for _ in range(leads)]
    rig.sandbox.fault("slow", seconds=slow)
    process = serve(rig, worker=True)
    path = urlsplit(rig.hook_url).path
    senders = Senders(rig, refs, process.base + path, rig.hook_url)
    until(lambda: rig.one("SELECT count(*) FROM outbox WHERE state = 'confirmed'"), 60, "the first write")
    waiting = "SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'waiting'"
    assert rig.one(waiting), "there is no load any more"
    began = time.monotonic()
    process.terminate()
    assert process.process.wait(30) == 0
    assert time.monotonic() - began <= 20.0
    held = [
        rig.one(f"SELECT count(*) FROM {table} WHERE lease IS NOT NULL") for table in ("events", "outbox", "chores")
    ]
    assert held == [0, 0, 0]
    senders.wait()
    assert sorted(senders.answered) == sorted(refs)
    rig.sandbox.clear_faults()
    rig.start_worker()
    until(lambda: all(rig.owners(refs)), 60, "an owner for every lead")
    rig.settle_owners()
    assert Counter(rig.turns()) == dict.fromkeys((ANA, BEN, CY), leads // 3)
    assert sorted(str(row["lead"]) for row in rig.owner_writes()) == sorted(refs)  # none was written twice
    assert rig.most_tries() == 0
    rig.audit()


def test_a_crm_that_shows_one_lead_per_call_keeps_the_first_of_a_burst_no_longer_than_it_must(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(crm="bottlecrm", worker=False)
    rig.sandbox.webhook_faults(drop=1.0)
    refs = [rig.create() for _ in range(24)]
    Senders(rig, refs).wait()
    rig.sandbox.fault("slow", seconds=0.2, path="/leads")
    rig.start_worker()
    until(lambda: rig.one("SELECT count(*) FROM decisions WHERE tenant_id = :t"), what="the first decision")
    assert rig.one("SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'waiting'") > 0
    rig.sandbox.clear_faults()
    rig.settle_owners()
    assert Counter(rig.turns()) == dict.fromkeys((ANA, BEN, CY), 8)
    assert rig.most_tries() == 0
    assert rig.one("SELECT max(claims) FROM events WHERE tenant_id = :t") == 1
