"""What kill runs found, each small and by itself."""

from __future__ import annotations

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
