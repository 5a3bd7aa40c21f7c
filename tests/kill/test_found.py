"""What kill runs found, each small and by itself."""

from __future__ import annotations

from collections.abc import Callable

from connector import inbox
from connector.database import new_id, unit
from tests.rig import ANA, BEN, Rig, until


def test_an_owner_does_not_wait_for_the_note_of_the_agent_before(rig: Rig) -> None:
    rig.sandbox.fault("status", status=503, retry_after=300, method="POST", path="/notes")
    ref = rig.create()
    assert rig.wait_owner(ref) == ANA
    until(lambda: rig.standing(ref)["confirmed_version"] is not None)
    rig.sandbox.fault("status", status=503, retry_after=0.1, method="PUT", times=1)  # so that it is claimed anew
    rig.sandbox.clear_owner(int(ref))
    assert rig.wait_owner(ref) == BEN
    rig.settle_owners()
    assert rig.one("SELECT count(*) FROM outbox WHERE tenant_id = :t AND kind = 'note' AND state = 'open'") == 2


def test_an_event_that_crashes_its_worker_is_soon_alone_and_the_others_are_not_claimed_one_by_one(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(worker=False)
    count = 40
    refs = [rig.create() for _ in range(count)]
    assert rig.sandbox.wait_idle()
    crasher, sizes = refs[0], list[int]()
    while rig.one("SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'waiting'") > 1:
        assert len(sizes) < 100
        lease = new_id()
        with unit(rig.runtime.engine) as (conn, _):
            rows = inbox.claim_events(conn, rig.tenant.tenant_id, lease)
            sizes.append(len(rows))
            # Whoever has the one dies of it; the first two workers died of something else.
            if crasher not in {row.ref for row in rows} and len(sizes) > 2:
                inbox.end_events(conn, rig.tenant.tenant_id, lease, [row.event_id for row in rows])
        rig.sql("UPDATE events SET leased_until = now() - interval '1 s' WHERE tenant_id = :t AND lease IS NOT NULL")
    assert sizes[:3] == [count, count, count // 4]
    assert sizes[-1] == 1
