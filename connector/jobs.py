"""What a sender needs for one write: the outbox row, and beside it all that is asked before the CRM is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from adapters.base import Adapter
from adapters.client import Client
from connector import oauth, work
from connector.breaker import breaker_left
from connector.kept import KEPT, Kept
from connector.runtime import Runtime, Tenant
from connector.tables import breakers
from routing import tables as t
from routing.flight import Ask, Statement
from routing.model import TELLING, UnassignedDefinition
from routing.store import unassigned_definition

# A worker this close to the end of its lease does not start a write: another may be about to take the row over.
_LEASE_MARGIN = 15.0


@dataclass(frozen=True, slots=True)
class Job:
    """One leased outbox row with what its write needs."""

    row: sa.Row[Any]
    tenant: Tenant
    lease: UUID
    client: Client
    lead_ref: str
    agent_ref: str
    agent_seen_at: datetime
    expects_ref: str | None
    epoch: int
    definition: UnassignedDefinition
    breaker_failures: int
    wait: float | None
    now: datetime
    read_at: float
    deadline: float

    @property
    def adapter(self) -> Adapter:
        """The code for this row's CRM."""
        return self.tenant.adapter

    @property
    def sent(self) -> bool:
        """Whether a write of an earlier try may have reached the CRM."""
        return bool(self.row.sent)


@dataclass(slots=True)
class Leased:
    """A write that was born leased, on its way to a sender of this process.

    ``row`` is what :func:`look` gives, if that was asked already: no earlier than ``read_at`` (monotonic seconds). With
    a ``lead_ref`` the write may still be on its way into the database, and until ``kept`` says that it is there, the
    sender reads that lead in the CRM and does nothing else.
    """

    tenant: Tenant
    lease: UUID
    outbox_id: UUID
    lead_ref: str | None = None
    kept: Kept = KEPT
    row: sa.Row[Any] | None = None
    read_at: float = field(default_factory=time.monotonic)

    def looked(self, found: Sequence[Any]) -> None:
        """What :func:`look` gave."""
        self.row = found[0] if found else None


#: Hands a tenant's writes that were born leased to the senders of this process, and says whether there are others.
Send = Callable[[UUID, Sequence[Leased], bool], None]


def _agent_ref(agent_id: Any) -> Any:
    r = t.agent_refs.c
    return (
        sa.select(r.ref)
        .where(r.tenant_id == t.outbox.c.tenant_id, r.agent_id == agent_id)
        .order_by(r.ref)
        .limit(1)
        .scalar_subquery()
    )


def _looking() -> Statement:
    o, lr, a, s, b, c = t.outbox.c, t.lead_refs.c, t.agents.c, t.lead_roles.c, breakers.c, t.tenants.c
    tells = o.kind.in_(TELLING)
    lane = sa.or_(b.lane == "all", sa.and_(b.lane == "note", tells))
    failures = sa.select(sa.func.max(b.failures)).where(b.tenant_id == o.tenant_id, lane).scalar_subquery()
    seen = sa.select(a.seen_at).where(a.tenant_id == o.tenant_id, a.agent_id == o.agent_id).scalar_subquery()
    epoch = sa.select(s.epoch).where(s.tenant_id == o.tenant_id, s.lead_id == o.lead_id, s.role == o.role)
    # A merge adds a ref: the newest is the one the CRM answers to.
    newest = sa.select(lr.ref).where(lr.tenant_id == o.tenant_id, lr.lead_id == o.lead_id)
    newest = newest.order_by(lr.created_at.desc(), lr.ref).limit(1)
    tenant_id: Any = sa.bindparam("tenant", type_=sa.Uuid)
    return Statement(
        sa.select(
            c.tenant_id,
            c.name,
            c.crm,
            c.base_url,
            c.parameters,
            c.status,
            c.sending,
            c.unassigned,
            sa.func.clock_timestamp().label("now"),
            sa.case((tells, breaker_left(tenant_id, "note")), else_=breaker_left(tenant_id)).label("wait"),
            newest.scalar_subquery().label("lead_ref"),
            _agent_ref(o.agent_id).label("agent_ref"),
            _agent_ref(o.expects_agent_id).label("expects_ref"),
            seen.label("seen_at"),
            epoch.scalar_subquery().label("newest_epoch"),
            failures.label("failures"),
            *work.OUTBOX,
        )
        .select_from(t.outbox.join(t.tenants, c.tenant_id == o.tenant_id))
        .where(
            o.tenant_id == tenant_id,
            o.outbox_id == sa.bindparam("row", type_=sa.Uuid),
            o.lease == sa.bindparam("held", type_=sa.Uuid),
            o.state == "open",
            o.leased_until > sa.func.clock_timestamp(),
        )
    )


_LOOK = _looking()


def look(tenant_id: UUID, lease: UUID, outbox_id: UUID) -> Ask:
    """Asks for the row, if this lease still holds it, with all that :func:`job_of` makes a job of."""
    return _LOOK(tenant=tenant_id, row=outbox_id, held=lease)


def tenant_of(found: sa.Row[Any]) -> Tenant:
    """The tenant of a row that :func:`look` gave."""
    return Tenant(found.tenant_id, found.name, found.crm, found.base_url, found.parameters, found.status, found.sending)


def job_of(runtime: Runtime, lease: UUID, found: sa.Row[Any], read_at: float) -> Job:
    """The job of a row that :func:`look` gave at `read_at` (monotonic seconds).

    Raises :class:`CrmError` where the CRM grants no access.
    """
    tenant = tenant_of(found)
    return Job(
        row=found,
        tenant=tenant,
        lease=lease,
        client=oauth.client(runtime, tenant),
        lead_ref=found.lead_ref,
        agent_ref=found.agent_ref,
        agent_seen_at=found.seen_at,
        expects_ref=found.expects_ref,
        epoch=found.newest_epoch,
        definition=unassigned_definition(found.unassigned),
        wait=found.wait,
        breaker_failures=found.failures or 0,
        now=found.now,
        read_at=read_at,
        deadline=read_at + work.LEASE.total_seconds() - _LEASE_MARGIN,
    )
