"""What a unit sees: everything that its decisions rest on, read once its locks are granted, and what it learns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

import sqlalchemy as sa

from connector.alarms import open_alarm
from connector.reading import Item
from connector.waiting import load_rules, load_waiting
from routing import kin, store
from routing import tables as t
from routing.decide import Plan, QueueState, Waiting
from routing.flight import Asking, Statement, one_of, side_by_side
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
    rules: dict[UUID, str | None] = field(default_factory=dict)
    ahead: list[Waiting] = field(default_factory=list)
    members: dict[UUID, dict[UUID, int]] = field(default_factory=dict)

    @classmethod
    def asked(
        cls,
        tenant_id: UUID,
        plan: Plan,
        queue_ids: Collection[UUID],
        items: Sequence[Item],
        digests: frozenset[bytes],
        chosen: Collection[UUID],
    ) -> Asking[Seen]:
        """Ask for what every decision needs. To be sent once the leads, identities and queues are locked."""
        refs = {item.lead.owner_ref for item in items if item.lead.owner_ref}
        roles, (owners, shared), queues, by_ref, agents = yield from side_by_side(
            store.load_roles.of(tenant_id, {item.lead_id for item in items}),
            kin.existing_owners.of(tenant_id, digests),
            store.load_queues.of(tenant_id, plan.flags, queue_ids),
            _agents_by_ref(tenant_id, refs),
            store.load_agents.of(tenant_id, plan.flags, {*plan.target_agents, *chosen}, of_queues=queue_ids),
        )
        wanted = {row.agent_id for row in roles.values() if row.agent_id is not None}
        wanted |= {agent_id for by_lead in owners.values() for _, agent_id in by_lead.values()}
        stood = {lead_id for lead_id, role in roles if role is Role.OWNER}
        more, returned = yield from side_by_side(
            store.load_agents.of(tenant_id, plan.flags, wanted - agents.keys()),
            kin.load_returned.of(tenant_id, stood if Flag.CREDITS in plan.flags else ()),
        )
        return cls(agents | more, queues, roles, owners, shared, by_ref, returned)

    def look_further(
        self, conn: sa.Connection, tenant_id: UUID, plan: Plan, items: Sequence[Item], at: datetime
    ) -> None:
        """Read what few decisions need: who waits already, and whom an identity that is shared by many concerns."""
        shared, roles, queues = self.shared, self.roles, self.queues
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
        mine = {lead_id for (lead_id, role), row in roles.items() if role is Role.OWNER and row.state == "held"}
        if any(queue.held for queue in queues.values()):
            served = {place.agent_id for queue in queues.values() for place in queue.line.places}
            members = self.members = kin.load_members(conn, tenant_id, plan.flags, served)
            homes = plan.homes(members.keys() | queues.keys())
            # Quiet hours hold a lead without a way out, so whoever waits in them has a claim on nobody.
            homes = frozenset(home for home in homes if not plan.is_quiet(home, at))
            members = {queue_id: them for queue_id, them in members.items() if not plan.is_quiet(queue_id, at)}
            self.ahead = load_waiting(conn, tenant_id, plan.flags, Role.OWNER, homes, mine)
        if mine:
            self.rules = load_rules(conn, tenant_id, mine)

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


_BY_REF = Statement(
    sa.select(t.agent_refs.c.ref, t.agent_refs.c.agent_id).where(
        t.agent_refs.c.tenant_id == sa.bindparam("tenant", type_=sa.Uuid),
        t.agent_refs.c.ref == one_of("refs", sa.Text()),
    )
)


def _agents_by_ref(tenant_id: UUID, refs: Collection[str]) -> Asking[dict[str, UUID]]:
    if not refs:
        return {}
    (rows,) = yield [_BY_REF(tenant=tenant_id, refs=sorted(refs))]
    return {row.ref: row.agent_id for row in rows}
