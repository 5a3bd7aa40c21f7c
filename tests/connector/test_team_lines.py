"""Teams in queues: everybody of a team as a member, a team that takes turns as one, and a rule's own ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from connector import configuration, preview, turns
from tests.rig import ANA, BEN, CY, DEE, ELI, Rig, until

NESTED = """
default_queue: All
teams:
  North: {members: ['12', '13']}
  South: {members: ['14', '15', '16']}
queues:
  All:
    members: [{team: North, nested: true, weight: 2}, {team: South, nested: true}]
"""


def line_of(rig: Rig, line: str) -> UUID:
    return UUID(str(rig.one("SELECT queue_id FROM queues WHERE tenant_id = :t AND name = :q", q=line)))


def taken(rig: Rig, line: str) -> list[str]:
    """Who took each turn of a line, agents by CRM id and teams by the name of their line; without a gap."""
    query = sa.text(
        "SELECT turn, coalesce(r.ref, inner_.name) AS who FROM turns JOIN queues q USING (tenant_id, queue_id) "
        "LEFT JOIN agent_refs r ON (r.tenant_id, r.agent_id) = (turns.tenant_id, turns.agent_id) "
        "LEFT JOIN queues inner_ ON (inner_.tenant_id, inner_.queue_id) = (turns.tenant_id, turns.agent_id) "
        "WHERE turns.tenant_id = :t AND q.name = :q ORDER BY turn"
    ).bindparams(t=rig.tenant.tenant_id, q=line)
    rows = rig.rows(query)
    assert [row.turn for row in rows] == list(range(1, len(rows) + 1)) == list(range(1, rig.position(line) + 1))
    return [row.who for row in rows]


def test_a_rotation_over_teams_then_inside_the_team(rig: Rig) -> None:
    rig.configure(NESTED)
    first = rig.next_up_decided(9) if hasattr(rig, "next_up_decided") else None
    owners = [rig.assign() for _ in range(9)]
    print(owners, taken(rig, "All"), taken(rig, "team North"), taken(rig, "team South"))
    rig.settle_owners()
    rig.audit()
    from connector.explain import explain
    from connector.cli import story
    story.tell(explain(rig.runtime, rig.tenant, rig.lead_id("1001"))) if False else None
    refs = [r.ref for r in rig.rows(sa.text("select ref from lead_refs order by created_at desc limit 1"))]
    story.tell(explain(rig.runtime, rig.tenant, rig.lead_id(refs[0])))
    print(preview.next_up(rig.runtime, rig.tenant, line_of(rig, "All"), 3))
    print(preview.show(rig.runtime, rig.tenant, line_of(rig, "All")))
