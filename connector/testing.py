"""A test lead: one marked lead all the way, from the CRM through webhook and decision back into the CRM.

The mark is the lead's email address, or stands in its name where a CRM's leads have no address. It says who the agent
is and when it was made, and proves that Turnlock wrote it for this tenant, so nothing need be stored before the CRM is
asked, and nobody can make one up. A lead so marked goes to that agent without a turn, whatever the rules say; ten
minutes later the mark means nothing any more.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from adapters.base import Capability
from adapters.outcome import CrmError
from connector import oauth
from connector.database import at_rest
from connector.errors import TurnlockError
from connector.runtime import Runtime, Tenant
from connector.tables import deliveries, events
from routing import store
from routing import tables as t
from routing.model import Lead

#: For how long a mark is good, in seconds.
LIVES = 600
_MARK = re.compile(r"tl([0-9a-f]{32})([0-9a-f]{8})([0-9a-f]{20})@example\.com")
_LOOK = 0.1


def mark(runtime: Runtime, tenant_id: UUID, agent_id: UUID, now: datetime) -> str:
    """The email address of a test lead for this agent; example.com is nobody's (RFC 2606)."""
    said = f"{agent_id.hex}{int(now.timestamp()):08x}"
    return f"tl{said}{runtime.vault.proof(f'{tenant_id.hex}{said}')}@example.com"


def chosen(runtime: Runtime, tenant_id: UUID, lead: Lead, now: datetime) -> UUID | None:
    """The agent whom the mark of a test lead names; None for all other leads, forged and old marks among them."""
    for text in (*lead.emails, lead.name or ""):
        found = _MARK.search(text)
        if found is None:
            continue
        agent, made, proof = found.groups()
        young = abs(now.timestamp() - int(made, 16)) <= LIVES
        if young and runtime.vault.proves(f"{tenant_id.hex}{agent}{made}", proof):
            return UUID(hex=agent)
    return None


@dataclass(slots=True)
class Way:
    """How far a test lead came, each in seconds from its making; None: not that far."""

    ref: str
    heard: float | None = None
    decided: float | None = None
    owned: float | None = None
    noted: float | None = None
    removed: bool = False
    stays_because: str | None = None  # the CRM's refusal to remove it, in words for the admin

    @property
    def whole(self) -> bool:
        """Whether it came all the way to its owner."""
        return self.owned is not None


def send(runtime: Runtime, tenant: Tenant, agent_id: UUID, *, patience: float, keep: bool = False) -> Way:
    """Make a test lead in the CRM and watch the running service bring it to its agent; then remove it.

    Raises :class:`TurnlockError` where the CRM has no way to make a lead, or the tenant's sending is stopped.
    """
    if Capability.TEST_LEAD not in tenant.adapter.capabilities:
        raise TurnlockError(f"{tenant.crm} lets no API make a lead and remove it; make one there by hand")
    if not tenant.sending:
        raise TurnlockError(f"sending is stopped; `turnlock outbox start {tenant.name}`")
    client = oauth.client(runtime, tenant)
    with at_rest(runtime.engine) as conn:
        now = conn.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
        nobody = store.tenant_row(conn, tenant.tenant_id).unassigned
    began = time.monotonic()
    email = mark(runtime, tenant.tenant_id, agent_id, now)
    ref = tenant.adapter.add_test_lead(client, "Turnlock Test", email, nobody)
    way = Way(ref)
    try:
        notes = Capability.NOTES in tenant.adapter.capabilities
        while time.monotonic() - began < patience:
            _look(runtime, tenant, way, time.monotonic() - began)
            if way.owned is not None and (way.noted is not None or not notes):
                break
            time.sleep(_LOOK)
    finally:
        if not keep:
            try:
                tenant.adapter.remove_test_lead(oauth.client(runtime, tenant), ref)
                way.removed = True
            except CrmError as error:  # how far the lead came is told all the same
                way.stays_because = error.text
    return way


def _look(runtime: Runtime, tenant: Tenant, way: Way, after: float) -> None:
    e, d, o, r = events.c, deliveries.c, t.outbox.c, t.lead_refs.c
    with at_rest(runtime.engine) as conn:
        if way.heard is None:
            heard = conn.execute(
                sa.select(e.event_id)
                .join(deliveries, (d.tenant_id == e.tenant_id) & (d.delivery_id == e.delivery_id))
                .where(e.tenant_id == tenant.tenant_id, e.ref == way.ref, d.source == "webhook")
                .limit(1)
            ).scalar_one_or_none()
            way.heard = after if heard is not None else None
        rows = conn.execute(
            sa.select(o.kind, o.state)
            .join(t.lead_refs, (r.tenant_id == o.tenant_id) & (r.lead_id == o.lead_id))
            .where(o.tenant_id == tenant.tenant_id, r.ref == way.ref)
        ).all()
    if rows and way.decided is None:
        way.decided = after
    states = {row.kind: row.state for row in rows}
    if states.get("owner") == "confirmed" and way.owned is None:
        way.owned = after
    if states.get("note") == "confirmed" and way.noted is None:
        way.noted = after
