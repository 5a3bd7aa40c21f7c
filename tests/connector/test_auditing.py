"""What an audit finds that nothing of ours writes: assignments and turns that do not belong together."""

from __future__ import annotations

import pytest

from connector.auditing import audit_queues
from connector.database import new_id
from tests.rig import Rig


@pytest.mark.parametrize("turn", [1, 99])
def test_an_assignment_whose_turn_is_not_its_own_is_found(rig: Rig, turn: int) -> None:
    rig.assign()
    rig.settle()
    rig.audit()
    rig.sql(
        "INSERT INTO assignments (tenant_id, assignment_id, decision_id, lead_id, role, agent_id, queue_id, turn, "
        "epoch, state, assigned_at) SELECT tenant_id, :a, :d, lead_id, role, agent_id, queue_id, :turn, epoch, 'void', "
        "assigned_at FROM assignments WHERE tenant_id = :t",
        a=new_id(),
        d=new_id(),
        turn=turn,
    )
    (found,) = audit_queues(rig.runtime, rig.tenant.tenant_id)
    assert not found.ok
    assert "position 1, but 2 assignments with 1 turns" in found.problems[0]
