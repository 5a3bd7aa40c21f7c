"""Erasing a person: what tells who they are goes, everywhere; decisions, turns and ledger stay whole.

A lead's facts stand in a row of their own, so nothing that a line or an audit rests on is touched. What stays of the
lead are ids: Turnlock's own and the CRM's, by which later webhooks of the same lead are known.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector.database import unit
from connector.errors import NotFound
from connector.past_rules import PastRules
from connector.runtime import Runtime, Tenant
from connector.tables import deliveries, delivery_bodies, events
from routing import store
from routing import tables as t
from routing.facts import identities, lead_from_json, normal_email, normal_phone
from routing.model import Lead

# Bodies and events have no index by lead: looking through them is rare, and may take longer than a worker may.
_PATIENCE = "600s"


@dataclass(frozen=True, slots=True)
class Erased:
    """What was erased: how many leads, decisions whose recorded values were taken out, and deliveries' bodies."""

    leads: int
    decisions: int
    bodies: int


def erase(runtime: Runtime, tenant: Tenant, text: str) -> Erased:
    """Erase everybody whom `text` names: the CRM's id of a lead or ours, an email or a phone number.

    Erase them in the CRM first: a lead that the CRM still shows comes back with its next webhook. Raises
    :class:`NotFound` when nothing is known of them.
    """
    tenant_id = tenant.tenant_id
    with runtime.engine.connect() as conn:
        lead_ids = _leads(conn, tenant, text)
        words = _words(conn, tenant_id, lead_ids)
    if (email := normal_email(text)) or normal_phone(text):
        words.add(email or text.strip())
    with unit(runtime.engine) as (conn, _):
        decisions = forget(conn, tenant_id, lead_ids)
    with unit(runtime.engine) as (conn, _):
        conn.execute(sa.select(sa.func.set_config("statement_timeout", _PATIENCE, True)))
        bodies = _forget_deliveries(conn, tenant_id, lead_ids, words)
    if not lead_ids and not bodies:
        raise NotFound(f"nothing is known of this lead, email or phone in {tenant.name!r}; nothing was erased")
    return Erased(len(lead_ids), decisions, bodies)


def forget(conn: sa.Connection, tenant_id: UUID, lead_ids: Collection[UUID]) -> int:
    """Take what is personal from these leads and their decisions; how many decisions held any of it. Locks the leads.

    No rule field is compared with what it was any more: a lead that was left stays left.
    """
    if not lead_ids:
        return 0
    # In the lock order of the project: whoever decides one of these leads now is done before, or begins after.
    store.lock_leads(conn, tenant_id, lead_ids)
    ids = sa.cast(sorted(lead_ids), sa.ARRAY(sa.Uuid))
    f, li, i, s = t.lead_facts.c, t.lead_identities.c, t.identities.c, t.lead_roles.c
    conn.execute(sa.delete(t.lead_facts).where(f.tenant_id == tenant_id, f.lead_id == sa.any_(ids)))
    mine = sa.and_(li.tenant_id == tenant_id, li.lead_id == sa.any_(ids))
    digests = list(conn.execute(sa.select(li.digest).where(mine)).scalars())
    store.lock_identities(conn, tenant_id, digests)
    conn.execute(sa.delete(t.lead_identities).where(mine))
    others = sa.exists().where(li.tenant_id == i.tenant_id, li.digest == i.digest)
    conn.execute(
        sa.delete(t.identities).where(
            i.tenant_id == tenant_id, i.digest == sa.any_(sa.cast(digests, sa.ARRAY(sa.LargeBinary))), ~others
        )
    )
    conn.execute(
        sa.update(t.lead_roles).where(s.tenant_id == tenant_id, s.lead_id == sa.any_(ids)).values(facts_digest=None)
    )
    return _forget_values(conn, tenant_id, ids)


def _forget_values(conn: sa.Connection, tenant_id: UUID, ids: Any) -> int:
    """Take the leads' own values out of the rules that were tried on them; what was tested and the result stay."""
    d = t.decisions.c
    past, changed = PastRules(conn, tenant_id), []
    query = sa.select(d.decision_id, d.role, d.config_version, d.record)
    for row in conn.execute(query.where(d.tenant_id == tenant_id, d.lead_id == sa.any_(ids))).all():
        record = past.forgotten(row)
        if record is not None:
            changed.append({"b_id": row.decision_id, "b_record": record})
    if changed:
        conn.execute(
            sa.update(t.decisions)
            .where(d.tenant_id == tenant_id, d.decision_id == sa.bindparam("b_id"))
            .values(record=sa.bindparam("b_record")),
            changed,
        )
    return len(changed)


def old_leads(conn: sa.Connection, tenant_id: UUID, before: datetime, limit: int) -> list[UUID]:
    """Leads that were read last before this moment, the oldest first."""
    f = t.lead_facts.c
    query = sa.select(f.lead_id).where(f.tenant_id == tenant_id, f.read_at < before).order_by(f.read_at).limit(limit)
    return list(conn.execute(query).scalars())


# -- finding them -----------------------------------------------------------------------------------------------------


def _leads(conn: sa.Connection, tenant: Tenant, text: str) -> set[UUID]:
    tenant_id = tenant.tenant_id
    r, li, c = t.lead_refs.c, t.lead_identities.c, t.leads.c
    found = set(conn.execute(sa.select(r.lead_id).where(r.tenant_id == tenant_id, r.ref == text)).scalars())
    try:
        own = UUID(text)
    except ValueError:
        pass
    else:
        found |= set(conn.execute(sa.select(c.lead_id).where(c.tenant_id == tenant_id, c.lead_id == own)).scalars())
    named = Lead(ref="", emails=(text,), phones=(text,))
    digests = list(identities(tenant_id, named, households=tenant.households, country=tenant.country).personal)
    if digests:
        found |= set(
            conn.execute(
                sa.select(li.lead_id).where(
                    li.tenant_id == tenant_id, li.digest == sa.any_(sa.cast(digests, sa.ARRAY(sa.LargeBinary)))
                )
            ).scalars()
        )
    return found


def _words(conn: sa.Connection, tenant_id: UUID, lead_ids: Collection[UUID]) -> set[str]:
    """By what a body names these people: their emails and phones as the CRM wrote them."""
    f = t.lead_facts.c
    rows = conn.execute(
        sa.select(f.facts).where(
            f.tenant_id == tenant_id, f.lead_id == sa.any_(sa.cast(list(lead_ids), sa.ARRAY(sa.Uuid)))
        )
    ).scalars()
    leads = [lead_from_json(facts) for facts in rows]
    # Shorter texts say nobody's name: they would meet every body.
    return {word for lead in leads for word in (*lead.emails, *lead.phones) if len(word) >= 7}


def _forget_deliveries(conn: sa.Connection, tenant_id: UUID, lead_ids: Collection[UUID], words: Collection[str]) -> int:
    """Drop the bodies of deliveries that told of these leads or name them, and what their events hold of them."""
    e, d, b, r = events.c, deliveries.c, delivery_bodies.c, t.lead_refs.c
    ids = sa.cast(sorted(lead_ids), sa.ARRAY(sa.Uuid))
    refs = list(conn.execute(sa.select(r.ref).where(r.tenant_id == tenant_id, r.lead_id == sa.any_(ids))).scalars())
    mine = sa.or_(e.lead_id == sa.any_(ids), e.ref == sa.any_(sa.cast(refs, sa.ARRAY(sa.Text))))
    told = set(
        conn.execute(
            sa.update(events).where(e.tenant_id == tenant_id, mine).values(payload=None).returning(e.delivery_id)
        ).scalars()
    )
    told |= _naming(conn, tenant_id, sorted(words))
    gone = sa.cast(sorted(told), sa.ARRAY(sa.Uuid))
    # An unreadable delivery may have named them too: its event waits for a human, and now without a payload.
    conn.execute(sa.update(events).where(e.tenant_id == tenant_id, e.delivery_id == sa.any_(gone)).values(payload=None))
    conn.execute(
        sa.update(deliveries).where(d.tenant_id == tenant_id, d.delivery_id == sa.any_(gone)).values(headers={})
    )
    done = sa.delete(delivery_bodies).where(b.tenant_id == tenant_id, b.delivery_id == sa.any_(gone))
    return conn.execute(done).rowcount


def _naming(conn: sa.Connection, tenant_id: UUID, words: Sequence[str]) -> set[UUID]:
    """The deliveries whose body holds one of these words, whatever its case."""
    if not words:
        return set()
    b = delivery_bodies.c
    text = sa.func.lower(sa.func.encode(b.body, "escape"))
    holds = sa.or_(*(sa.func.strpos(text, word.lower()) > 0 for word in words))
    return set(conn.execute(sa.select(b.delivery_id).where(b.tenant_id == tenant_id, holds)).scalars())
