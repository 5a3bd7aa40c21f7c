"""What a unit sees: everything that its decisions rest on, read once its locks are granted, and what it learns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

import sqlalchemy as sa

from connector.alarms import open_alarm
from connector.reading import Item
from connector.waiting import load_rules, load_waiting
from routing import kin, store
from routing import tables as t
from routing.decide import Plan, QueueState, Waiting
from routing.gate import Standing
from routing.model import Agent, Flag, Role

# Later than anything that is stored: what the unit at work has just decided.
_LATEST = datetime.max.replace(tzinfo=UTC)


@dataclass(slots=True)
class Seen:
    """What a unit reads once its locks are granted, and what it learns while it decides."""

    agents: dict[UUID, Agent]
    queues: dict[UUID, QueueState]
    roles: dict[tuple[UUID, Role], store.RoleRow]
    owners: dict[bytes, dict[UUID, tuple[datetime, UUID]]]
    shared: set[bytes]
    refs: dict[str, UUID]
    returned: dict[UUID, kin.Returned]
    rules: dict[UUID, str | None]
    ahead: list[Waiting]
    members: dict[UUID, dict[UUID, int]]

    @classmethod
    def load(
        cls,
        conn: sa.Connection,
        tenant_id: UUID,
        plan: Plan,
        queue_ids: Sequence[UUID],
        items: Sequence[Item],
        digests: frozenset[bytes],
        chosen: Iterable[UUID],
        at: datetime,
    ) -> Seen:
        """Read it all. Call with the leads, identities and queues locked."""
        roles = store.load_roles(conn, tenant_id, {item.lead_id for item in items})
        owners, shared = kin.existing_owners(conn, tenant_id, digests)
        shared |= frozenset[bytes]().union(*(item.identities.mute(shared) for item in items))
        # Many households at one address are a building, and nothing to worry about.
        if any(shared & item.identities.personal for item in items):
            open_alarm(
                conn,
                tenant_id,
                "shared_identity",
                "email or phone",
                f"more than {kin.SHARED_BY_MANY} leads share an email or phone, so it no longer says who the agent "
                "is; give these leads contact data of their own in the CRM",
            )
        queues = store.load_queues(conn, tenant_id, plan.flags, queue_ids)
        mine = {lead_id for (lead_id, role), row in roles.items() if role is Role.OWNER and row.state == "held"}
        ahead: list[Waiting] = []
        members: dict[UUID, dict[UUID, int]] = {}
        rules: dict[UUID, str | None] = {}
        if any(queue.held for queue in queues.values()):
            served = {place.agent_id for queue in queues.values() for place in queue.line.places}
            members = kin.load_members(conn, tenant_id, plan.flags, served)
            homes = plan.homes(members.keys() | queues.keys())
            # Quiet hours hold a lead without a way out, so whoever waits in them has a claim on nobody.
            homes = frozenset(home for home in homes if not plan.is_quiet(home, at))
            members = {queue_id: them for queue_id, them in members.items() if not plan.is_quiet(queue_id, at)}
            ahead = load_waiting(conn, tenant_id, plan.flags, Role.OWNER, homes, mine)
        if mine:
            rules = load_rules(conn, tenant_id, mine)
        wanted = {place.agent_id for queue in queues.values() for place in queue.line.places}
        wanted |= {row.agent_id for row in roles.values() if row.agent_id is not None}
        wanted |= {agent_id for by_lead in owners.values() for _, agent_id in by_lead.values()}
        wanted |= {queue.default_agent_id for queue in queues.values() if queue.default_agent_id is not None}
        wanted |= {*plan.target_agents, *chosen}
        agents = store.load_agents(conn, tenant_id, plan.flags, wanted)
        refs = _agents_by_ref(conn, tenant_id, {item.lead.owner_ref for item in items if item.lead.owner_ref})
        stood = {lead_id for lead_id, role in roles if role is Role.OWNER}
        returned = kin.load_returned(conn, tenant_id, stood) if stood and Flag.CREDITS in plan.flags else {}
        return cls(agents, queues, roles, owners, shared, refs, returned, rules, ahead, members)

    def agent_of(self, ref: str | None) -> UUID | None:
        """The agent behind a CRM id."""
        return self.refs.get(ref) if ref else None

    def waiting_since(self, item: Item, now: datetime) -> tuple[int, datetime, datetime, int]:
        """Held leads first, longest waiting first; the others in order of receipt."""
        row = self.roles.get((item.lead_id, item.role))
        held = row is not None and row.state == "held"
        return (0 if held else 1, row.since if held and row else now, item.event.received_at, item.event.ordinal)

    def standing(self, row: store.RoleRow | None) -> Standing | None:
        """Where the lead stands, as the gate needs it."""
        if row is None:
            return None
        agent = self.agents.get(row.agent_id) if row.agent_id else None
        return Standing(
            row.state,
            agent.ref if agent else None,
            row.confirmed_version is not None,
            row.facts_digest,
            row.releases,
            row.reason,
        )

    def owner_by(self, item: Item, digests: frozenset[bytes]) -> UUID | None:
        """The agent of another lead with one of these."""
        found = [
            known
            for digest in digests - self.shared
            for lead_id, known in self.owners.get(digest, {}).items()
            if lead_id != item.lead_id
        ]
        return kin.latest_owner(found, self.agents)

    def assigned(self, item: Item, agent_id: UUID) -> None:
        """Later leads of the same unit see this one, as the latest, by what says who the person is."""
        for digest in item.identities.all - self.shared:
            self.owners.setdefault(digest, {})[item.lead_id] = (_LATEST, agent_id)


def _agents_by_ref(conn: sa.Connection, tenant_id: UUID, refs: Collection[str]) -> dict[str, UUID]:
    if not refs:
        return {}
    r = t.agent_refs.c
    rows = conn.execute(
        sa.select(r.ref, r.agent_id).where(
            r.tenant_id == tenant_id, r.ref == sa.any_(sa.cast(sorted(refs), sa.ARRAY(sa.Text)))
        )
    )
    return {row.ref: row.agent_id for row in rows}
