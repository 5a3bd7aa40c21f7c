"""`turnlock queue import`: the CRM's teams become queues that a configuration takes as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from connector import teams
from connector.errors import NotFound, TurnlockError
from tests.rig import ANA, BEN, CY, DEE, Rig


def members(rig: Rig, queue: str) -> set[str]:
    """CRM ids of the members of a queue."""
    query = sa.text(
        "SELECT r.ref FROM members m JOIN queues q USING (tenant_id, queue_id) "
        "JOIN agent_refs r USING (tenant_id, agent_id) WHERE tenant_id = :t AND q.name = :q"
    ).bindparams(t=rig.tenant.tenant_id, q=queue)
    return {row.ref for row in rig.rows(query)}


@pytest.mark.parametrize("crm", ["hubspot", "followupboss"])
def test_teams_become_queues_that_the_configuration_takes(make_rig: Callable[..., Rig], crm: str) -> None:
    live = make_rig(crm, worker=False)
    new = str(live.sandbox.add_agent("New Norton"))
    for name, agents in (
        ("Austin: north, “west”", [BEN, ANA, CY, new]), ("All", [CY, DEE]), ("Twins", [CY, DEE]), ("Twins", [BEN]),
    ):  # fmt: skip
        live.sandbox.add_pond(name, [int(agent) for agent in agents])
    live.sandbox.deactivate_agent(int(CY))
    read = teams.as_queues(live.runtime, live.tenant)
    twins = [name for name in read.queues if name.startswith("Twins")]
    assert len(twins) == 2
    assert {*read.queues} == {"Austin: north, “west”", "Shared pond", *twins}
    assert (read.present, read.unknown) == (("All",), 1)
    live.configure("default_queue: Shared pond\n" + read.text)
    assert members(live, "Austin: north, “west”") == {ANA, BEN}  # one is deactivated, one not read yet
    assert {frozenset(members(live, name)) for name in twins} == {frozenset({DEE}), frozenset({BEN})}
    again = teams.as_queues(live.runtime, live.tenant, ["Austin: north, “west”"])
    assert (again.queues, again.present, again.text) == ((), ("Austin: north, “west”",), "")
    with pytest.raises(NotFound, match="no team 'Houston' in the CRM; there are: All, Austin"):
        teams.as_queues(live.runtime, live.tenant, ["Houston"])


def test_a_crm_without_teams_says_so(make_rig: Callable[..., Rig]) -> None:
    live = make_rig("generic", worker=False)
    with pytest.raises(TurnlockError, match="write the queues by hand"):
        teams.as_queues(live.runtime, live.tenant)
