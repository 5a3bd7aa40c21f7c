"""What would happen to a lead: decided as it would be now, by the code that decides, and not kept."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from adapters.base import EventKind, Unreadable, WebhookRequest
from connector.database import new_id
from connector.draft import Draft
from connector.errors import NotFound, TurnlockError
from connector.naming import Json, Names, iso
from connector.paths import taker_of, tell_path, tell_rule
from connector.reasons import remedy_of
from connector.runtime import Runtime, Tenant
from connector.tables import deliveries, delivery_bodies
from connector.trial import Trial, snapshot
from routing import kin
from routing import tables as t
from routing.decide import Case
from routing.facts import lead_from_json
from routing.fields import CUSTOM, FIELDS, field_kind
from routing.model import Lead, Role, Scalar
from routing.rules import retold

_NUMBERS = {"price": "450000", "location": "30.27,-97.74"}
_FLAGS: dict[str, Scalar] = {"true": True, "false": False}


def lead_of(fields: Sequence[str], now: datetime) -> Lead:
    """A lead from texts like ``source=Zillow``; a field with several values may be given several times.

    When it came to the CRM is `now`, unless ``created_at`` is among the fields; a place is ``location=30.27,-97.74``.
    Raises :class:`TurnlockError` with everything that is wrong.
    """
    problems: list[str] = []
    values: dict[str, Any] = {"created_at": now}
    custom: dict[str, Any] = {}
    for text in fields:
        name, sign, value = text.partition("=")
        name = name.strip()
        kind = field_kind(name)
        if not sign:
            problems.append(f"{text!r}: no value; write FIELD=VALUE, as in source=Zillow")
        elif name == "created_at":
            try:
                values["created_at"] = datetime.fromisoformat(value)
                values["created_at"].utcoffset().total_seconds()
            except (ValueError, AttributeError):
                problems.append(f"created_at: {value!r} is no time; write it as 2026-07-04T18:30:00-05:00")
        elif kind is None:
            known = ", ".join((*FIELDS, "custom.<key>"))
            problems.append(f"{name!r}: names no field of a lead; there are: {known}")
        elif kind.zoned:
            problems.append(f"{name}: is read from when the lead came; give created_at=2026-07-04T18:30:00-05:00")
        elif kind is CUSTOM:
            custom[name.removeprefix("custom.")] = _FLAGS.get(value, value)
        elif not kind.single:
            (attribute,) = kind.attributes
            values[attribute] = (*values.get(attribute, ()), value)
        elif kind.attributes[0] in values:
            problems.append(f"{name}: given twice; a lead has one")
        elif name in _NUMBERS:
            try:
                values |= zip(kind.attributes, map(Decimal, value.split(",")), strict=True)
            except (InvalidOperation, ValueError):
                problems.append(f"{name}: {value!r} is no number; write it as {_NUMBERS[name]}")
        else:
            values[kind.attributes[0]] = value
    if problems:
        raise TurnlockError("this lead cannot be tried:\n" + "\n".join(f"  {one}" for one in problems))
    return Lead(ref="(a lead that is tried)", custom=custom, **values)


def stored_lead(conn: sa.Connection, tenant_id: UUID, lead_id: UUID) -> Lead | None:
    """A lead as it was read last; None when its facts were erased."""
    f = t.lead_facts.c
    facts = conn.execute(sa.select(f.facts).where(f.tenant_id == tenant_id, f.lead_id == lead_id)).scalar_one_or_none()
    return None if facts is None else lead_from_json(facts)


def leads_of_delivery(runtime: Runtime, tenant: Tenant, delivery_id: UUID) -> list[Lead]:
    """The leads that a stored delivery tells of: as its body shows them, else as Turnlock read them last.

    Raises :class:`NotFound` when there is no such delivery or its body is past its time, :class:`TurnlockError` when
    it cannot be read or tells of no lead that is known.
    """
    b, d, r = delivery_bodies.c, deliveries.c, t.lead_refs.c
    with runtime.engine.connect() as conn:
        stored = conn.execute(
            sa.select(b.body, d.headers)
            .join(deliveries, (d.tenant_id == b.tenant_id) & (d.delivery_id == b.delivery_id))
            .where(b.tenant_id == tenant.tenant_id, b.delivery_id == delivery_id)
        ).one_or_none()
        if stored is None:
            raise NotFound(f"no delivery {delivery_id} with a body of {tenant.name!r}; bodies are dropped after a time")
        request = WebhookRequest("POST", f"{runtime.settings.public_url}/hooks/try", stored.headers, bytes(stored.body))
        try:
            events = tenant.adapter.parse(request)
        except Unreadable as unreadable:
            raise TurnlockError(f"this delivery cannot be read ({unreadable.reason})") from None
        leads: list[Lead] = []
        for event in events:
            if event.kind in (EventKind.UNKNOWN, EventKind.UNREADABLE):
                continue
            lead = event.lead
            if lead is None and event.ref is not None:
                lead_id = conn.execute(
                    sa.select(r.lead_id).where(r.tenant_id == tenant.tenant_id, r.ref == event.ref)
                ).scalar_one_or_none()
                lead = None if lead_id is None else stored_lead(conn, tenant.tenant_id, lead_id)
            if lead is not None:
                leads.append(lead)
    if not leads:
        raise TurnlockError("this delivery tells of no lead whose fields are known; try one by --field")
    return leads


def simulate(runtime: Runtime, tenant: Tenant, leads: Sequence[Lead], draft: Draft | None = None) -> Json:
    """What these leads would come to now, one after the other, as if each were new and unassigned. Nothing is kept."""
    with snapshot(runtime) as conn:
        trial = Trial(runtime, conn, tenant, draft)
        names = Names.load(conn, tenant.tenant_id)
        if draft is not None:
            names = Names(names.agents, dict(names.queues) | {str(q): s.name for q, s in draft.after.items()})
        decided = [_decide(conn, trial, names, tenant.tenant_id, lead) for lead in leads]
    return {
        "tenant": tenant.name,
        "as_of": iso(trial.now),
        "config_version": trial.plan.config_version,
        "draft": draft is not None,
        "decisions": decided,
    }


def _decide(conn: sa.Connection, trial: Trial, names: Names, tenant_id: UUID, lead: Lead) -> Json:
    known_by = trial.identities(lead)
    owners, shared = kin.existing_owners(conn, tenant_id, known_by.all)
    mute = known_by.mute(shared)
    r = t.lead_refs.c
    own = conn.execute(sa.select(r.lead_id).where(r.tenant_id == tenant_id, r.ref == lead.ref)).scalar_one_or_none()
    trial.know({agent_id for by_lead in owners.values() for _, agent_id in by_lead.values()})

    def owner_by(digests: frozenset[bytes]) -> UUID | None:
        leads = [owners[digest] for digest in digests - mute if digest in owners]
        known = [found for by_lead in leads for lead_id, found in by_lead.items() if lead_id != own]
        return kin.latest_owner(known, trial.bench.agents)

    lines = dict(trial.bench.lines)
    existing, household = owner_by(known_by.personal), owner_by(known_by.household)
    decision = trial.decide(Case(new_id(), lead, existing_owner=existing, household_owner=household))
    rules = decision.record.get("rules")
    tried = () if rules is None else retold(trial.plan.rules, Role.OWNER, rules)
    assert tried is not None  # noqa: S101 - they are the very rules that were tried
    paths = []
    for path in decision.record.get("paths", ()):
        before = after = None
        taker = taker_of(path, decision.queue_id, decision.agent_id)
        if taker is not None and decision.pick is not None:
            queue_id = UUID(path["queue"])
            before, after = lines.get(queue_id, trial.queue(queue_id).line), trial.line(queue_id)
        paths.append(tell_path(names, path, taker, before, after))
    return {
        "outcome": decision.outcome.value,
        "reason": decision.reason.value if decision.reason else None,
        "remedy": remedy_of(decision.reason.value if decision.reason else None),
        "rule": decision.rule,
        "queue": names.queue(decision.queue_id),
        "agent": names.agent(decision.agent_id),
        "how": decision.record.get("how"),
        "turn": decision.pick.turn if decision.pick else None,
        "rules": [tell_rule(one.as_json()) for one in tried],
        "paths": paths,
    }
