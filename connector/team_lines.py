"""Teams of the CRM as they are stored, and the lines that follow them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from adapters.base import Team
from connector.config_lines import Kept, members_of
from connector.config_model import KnownTeam
from connector.config_teams import find_team
from routing import tables as t
from routing.tables_teams import crm_teams


@dataclass(frozen=True, slots=True)
class Teams:
    """The CRM's teams as they were read last: who is in each, and the house users, whom no team brings into a line."""

    known: Sequence[KnownTeam] = ()
    agents: Mapping[str, Sequence[UUID]] = field(default_factory=dict)
    house: frozenset[UUID] = frozenset()

    @classmethod
    def load(cls, conn: sa.Connection, tenant_id: UUID, house: Iterable[str] | None = None) -> Teams:
        """As they are stored; `house` are the house users by CRM id, None: those of the configuration in force."""
        c, r = crm_teams.c, t.agent_refs.c
        rows = conn.execute(sa.select(crm_teams).where(c.tenant_id == tenant_id).order_by(c.name, c.ref)).all()
        if house is None:
            unassigned = sa.select(t.tenants.c.unassigned).where(t.tenants.c.tenant_id == tenant_id)
            house = conn.execute(unassigned).scalar_one().get("users", ())
        refs = sa.cast(sorted(house), sa.ARRAY(sa.Text))
        away = conn.execute(sa.select(r.agent_id).where(r.tenant_id == tenant_id, r.ref == sa.any_(refs))).scalars()
        known = [KnownTeam(row.ref, row.name, row.gone_at is not None) for row in rows]
        return cls(known, {row.ref: row.agent_ids for row in rows}, frozenset(away))

    def ref(self, entry: Kept) -> str | None:
        """The team that a stored entry follows: the one it was stored for, while the CRM has it, else one that is
        called as the configuration says. None: the CRM has neither."""
        there = [team for team in self.known if not team.gone]
        if any(team.ref == entry["team"] for team in there):
            return str(entry["team"])
        found = find_team(entry["named"], there)
        return found[0].ref if len(found) == 1 else None

    def named(self, text: str) -> str:
        """The id of the team that a configuration names; it was checked when the configuration was read."""
        return find_team(text, self.known)[0].ref

    def agents_in(self, entry: Kept) -> Sequence[UUID]:
        """Who is in the team that a stored entry follows; of one that is gone, who was in it last."""
        ids = self.agents.get(self.ref(entry) or entry["team"], ())
        return [agent_id for agent_id in ids if agent_id not in self.house]


def take_places(conn: sa.Connection, tenant_id: UUID, lines: Mapping[str, UUID]) -> None:
    """Let lines (ids by name) be members of other lines: each gets a row among the agents, without a CRM id."""
    rows = [{"tenant_id": tenant_id, "agent_id": lines[name], "name": name, "active": False} for name in sorted(lines)]
    if rows:
        conn.execute(insert(t.agents).on_conflict_do_nothing(), rows)


def following(conn: sa.Connection, tenant_id: UUID) -> dict[UUID, list[dict[str, Any]]]:
    """The lines that follow a team of the CRM, with the entries of their members."""
    q = t.queues.c
    rows = conn.execute(
        sa.select(q.queue_id, q.follows).where(q.tenant_id == tenant_id, q.active, q.follows.is_not(None))
    )
    return {row.queue_id: row.follows for row in rows}


def keep_teams(conn: sa.Connection, tenant_id: UUID, seen: Sequence[Team], now: datetime) -> None:
    """Store what a reading of the CRM's teams shows.

    A CRM lists who is active: whoever is deactivated stays where they were until they are back, and keeps their place.
    So does everybody of a team that it lists no more. A reading without any team is a hiccup of the CRM, and says
    nothing.
    """
    if not seen:
        return
    c, a, r = crm_teams.c, t.agents.c, t.agent_refs.c
    before = {
        row.ref: row.agent_ids for row in conn.execute(sa.select(c.ref, c.agent_ids).where(c.tenant_id == tenant_id))
    }
    known = conn.execute(sa.select(r.ref, r.agent_id).where(r.tenant_id == tenant_id))
    ids = {row.ref: row.agent_id for row in known}
    off = set(conn.execute(sa.select(a.agent_id).where(a.tenant_id == tenant_id, ~a.active)).scalars())
    rows = []
    # In order of id: two readings at once store in one order, and wait for each other in no circle.
    for team in sorted(seen, key=lambda team: team.ref.encode("utf-8")):
        listed = [ids[ref] for ref in team.agent_refs if ref in ids]
        away = [agent_id for agent_id in before.get(team.ref, ()) if agent_id in off]
        rows.append(
            {
                "tenant_id": tenant_id,
                "ref": team.ref,
                "name": " ".join(team.name.split()),
                "agent_ids": list(dict.fromkeys([*listed, *away])),
                "seen_at": now,
                "gone_at": None,
            }
        )
    new = insert(crm_teams)
    kept = {name: new.excluded[name] for name in ("name", "agent_ids", "seen_at", "gone_at")}
    conn.execute(new.on_conflict_do_update(index_elements=["tenant_id", "ref"], set_=kept), rows)
    gone = sa.cast(sorted(before.keys() - {team.ref for team in seen}), sa.ARRAY(sa.Text))
    unseen = sa.update(crm_teams).where(c.tenant_id == tenant_id, c.ref == sa.any_(gone), c.gone_at.is_(None))
    conn.execute(unseen.values(gone_at=now))


def out_of_step(conn: sa.Connection, tenant_id: UUID) -> dict[UUID, dict[UUID, int]]:
    """The lines whose members are not those of the teams that they follow, with who they should be."""
    lines = following(conn, tenant_id)
    if not lines:
        return {}
    teams = Teams.load(conn, tenant_id)
    m = t.members.c
    present: dict[UUID, dict[UUID, int]] = {queue_id: {} for queue_id in lines}
    wanted = sa.cast(list(present), sa.ARRAY(sa.Uuid))
    for row in conn.execute(
        sa.select(m.queue_id, m.agent_id, m.weight).where(m.tenant_id == tenant_id, m.queue_id == sa.any_(wanted))
    ):
        present[row.queue_id][row.agent_id] = row.weight
    should = {queue_id: members_of(entries, teams.agents_in) for queue_id, entries in lines.items()}
    return {queue_id: members for queue_id, members in should.items() if members != present[queue_id]}
