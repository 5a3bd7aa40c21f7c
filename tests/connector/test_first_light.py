"""The spine, end to end: a webhook in, the right owner in the CRM, once, in turn."""

from __future__ import annotations

from tests.rig import ANA, BEN, CY, Rig


def test_leads_get_agents_in_turn(rig: Rig) -> None:
    assert [rig.assign() for _ in range(4)] == [ANA, BEN, CY, ANA]
    rig.settle()
    assert rig.turns() == [ANA, BEN, CY, ANA]
    assert rig.position() == 4
    rig.audit()
