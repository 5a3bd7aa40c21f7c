"""Teams of the CRM as they are stored, and places for lines that are members of other lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from adapters.base import Team
from connector.config_lines import follows, members_of
from connector.config_model import Config, KnownTeam
from connector.config_teams import find_team
from routing import tables as t
from routing.tables_teams import crm_teams


def known_teams(conn: sa.Connection, tenant_id: UUID) -> list[KnownTeam]:
    """The CRM's teams, as they were read last."""
    c = crm_teams.c
    rows = conn.execute(sa.select(c.ref, c.name).where(c.tenant_id == tenant_id).order_by(c.name, c.ref))
    return [KnownTeam(*row) for row in rows]


def agents_of_teams(conn: sa.Connection, tenant_id: UUID) -> dict[str, list[UUID]]:
    """Who is in each of the CRM's teams (by its id), in the CRM's order."""
    c = crm_teams.c
    return {
        row.ref: row.agent_ids for row in conn.execute(sa.select(c.ref, c.agent_ids).where(c.tenant_id == tenant_id))
    }


def house_agents(conn: sa.Connection, tenant_id: UUID, refs: Sequence[str]) -> frozenset[UUID]:
    """House users among the agents: whatever they receive is unassigned again, so no team brings them into a line."""
    r = t.agent_refs.c
    rows = conn.execute(
        sa.select(r.agent_id).where(r.tenant_id == tenant_id, r.ref == sa.any_(sa.cast(list(refs), sa.ARRAY(sa.Text))))
    )
    return frozenset(rows.scalars())


@dataclass(frozen=True, slots=True)
class Teams:
    """The CRM's teams that a configuration follows: ids by how it names them, who is in each, who is left out."""

    refs: Mapping[str, str] = field(default_factory=dict)
    agents: Mapping[str, Sequence[UUID]] = field(default_factory=dict)
    house: frozenset[UUID] = frozenset()

    @classmethod
    def load(cls, conn: sa.Connection, tenant_id: UUID, config: Config) -> Teams:
        """As they were read last. The configuration was parsed with :func:`known_teams`."""
        known = known_teams(conn, tenant_id)
        named = {team.from_crm for team in config.teams if team.from_crm is not None}
        refs = {text: find_team(text, known)[0].ref for text in named}
        house = house_agents(conn, tenant_id, sorted(config.unassigned.user_refs))
        return cls(refs, agents_of_teams(conn, tenant_id), house)


def take_places(conn: sa.Connection, tenant_id: UUID, lines: Mapping[str, UUID]) -> None:
    """Let lines (ids by name) be members of other lines: each gets a row among the agents, without a CRM id."""
    rows = [{"tenant_id": tenant_id, "agent_id": lines[name], "name": name} for name in sorted(lines)]
    if rows:
        conn.execute(insert(t.agents).on_conflict_do_nothing(), rows)


def following(conn: sa.Connection, tenant_id: UUID) -> dict[UUID, set[str]]:
    """Which teams of the CRM (ids) each line follows."""
    q = t.queues.c
    rows = conn.execute(
        sa.select(q.queue_id, q.follows).where(q.tenant_id == tenant_id, q.active, q.follows.is_not(None))
    )
    return {row.queue_id: follows(row.follows) for row in rows}


def keep_teams(conn: sa.Connection, tenant_id: UUID, seen: Sequence[Team], now: datetime) -> dict[str, str]:
    """Store what a reading of the CRM's teams shows; those that it shows no more, names by id.

    A CRM lists who is active: whoever is deactivated stays where they were until they are back, and keeps their place.
    So does everybody of a team that is gone. A reading without any team is a hiccup of the CRM, and says nothing.
    """
    c, a, r = crm_teams.c, t.agents.c, t.agent_refs.c
    before = {row.ref: row for row in conn.execute(sa.select(crm_teams).where(c.tenant_id == tenant_id))}
    if seen:
        ids = {
            row.ref: row.agent_id for row in conn.execute(sa.select(r.ref, r.agent_id).where(r.tenant_id == tenant_id))
        }
        off = set(conn.execute(sa.select(a.agent_id).where(a.tenant_id == tenant_id, ~a.active)).scalars())
        rows = []
        # In order of id: two readings at once store in one order, and wait for each other in no circle.
        for team in sorted(seen, key=lambda team: team.ref.encode("utf-8")):
            listed = [ids[ref] for ref in team.agent_refs if ref in ids]
            last = before[team.ref].agent_ids if team.ref in before else ()
            away = [agent_id for agent_id in last if agent_id in off and agent_id not in listed]
            rows.append(
                {
                    "tenant_id": tenant_id,
                    "ref": team.ref,
                    "name": " ".join(team.name.split()),
                    "agent_ids": [*dict.fromkeys(listed), *away],
                    "seen_at": now,
                    "gone_at": None,
                }
            )
        new = insert(crm_teams)
        kept = {name: new.excluded[name] for name in ("name", "agent_ids", "seen_at", "gone_at")}
        conn.execute(new.on_conflict_do_update(index_elements=["tenant_id", "ref"], set_=kept), rows)
        missing = sorted(before.keys() - {team.ref for team in seen})
        unseen = sa.update(crm_teams).where(
            c.tenant_id == tenant_id, c.ref == sa.any_(sa.cast(missing, sa.ARRAY(sa.Text))), c.gone_at.is_(None)
        )
        conn.execute(unseen.values(gone_at=now))
    gone = conn.execute(sa.select(c.ref, c.name).where(c.tenant_id == tenant_id, c.gone_at.is_not(None)))
    return {row.ref: row.name for row in gone}


def out_of_step(conn: sa.Connection, tenant_id: UUID) -> dict[UUID, dict[UUID, int]]:
    """The lines whose members are not those of the teams that they follow, with who they should be."""
    q, m, c = t.queues.c, t.members.c, t.tenants.c
    rows = conn.execute(
        sa.select(q.queue_id, q.follows).where(q.tenant_id == tenant_id, q.active, q.follows.is_not(None))
    ).all()
    if not rows:
        return {}
    teams = agents_of_teams(conn, tenant_id)
    unassigned = conn.execute(sa.select(c.unassigned).where(c.tenant_id == tenant_id)).scalar_one()
    house = house_agents(conn, tenant_id, unassigned.get("users", ()))
    present: dict[UUID, dict[UUID, int]] = {row.queue_id: {} for row in rows}
    wanted = sa.cast(list(present), sa.ARRAY(sa.Uuid))
    for row in conn.execute(
        sa.select(m.queue_id, m.agent_id, m.weight).where(m.tenant_id == tenant_id, m.queue_id == sa.any_(wanted))
    ):
        present[row.queue_id][row.agent_id] = row.weight
    should = {row.queue_id: members_of(row.follows, teams, house) for row in rows}
    return {queue_id: members for queue_id, members in should.items() if members != present[queue_id]}
