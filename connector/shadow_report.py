"""What shadows came to: counts, each difference with its explanation, and the score against the CRM's own routing.

JSON-safe values. Of a lead only its CRM ids are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from uuid import UUID

import sqlalchemy as sa

from connector import flags
from connector.naming import Json, Names, iso
from connector.runtime import Runtime, Tenant
from connector.shadow_words import record_of, text_of
from routing import tables as t
from routing.model import Flag
from routing.stages import Mode
from routing.tables_shadow import flag_versions, shadow_records


def report(
    runtime: Runtime, tenant: Tenant, *, flag: Flag | None = None, differences: int = 0, score: bool = False
) -> Json:
    """The last run of each flag's shadow (or of `flag`'s), with the newest `differences` of them and the score."""
    tenant_id = tenant.tenant_id
    with runtime.engine.connect() as conn:
        found: Json = {"tenant": tenant.name, "shadows": []}
        if not runtime.shadows(conn):
            return found
        runs = {
            one: stage
            for one, stage in flags.settings(runtime, conn, tenant_id).items()
            if stage.run and flag in (None, one)
        }
        for one, stage in runs.items():
            found["shadows"].append(_run(conn, tenant_id, one, stage.mode, stage.run))
        if differences:
            names = Names.load(conn, tenant_id)
            found["differences"] = _differences(
                conn, tenant_id, names, {one: stage.run for one, stage in runs.items()}, differences
            )
        if score:
            run = runs[Flag.WRITE_BACK].run if Flag.WRITE_BACK in runs else 0
            found["score"] = _score(conn, tenant_id, Names.load(conn, tenant_id), run)
        return found


def _run(conn: sa.Connection, tenant_id: UUID, flag: Flag, mode: Mode, run: int) -> Json:
    c, v = shadow_records.c, flag_versions.c
    of_run = sa.and_(c.tenant_id == tenant_id, c.flag == flag.value, c.run == run)
    counts = flags.counts(conn, tenant_id, flag, run)
    began = conn.execute(sa.select(v.changed_at).where(v.tenant_id == tenant_id, v.version == run)).scalar_one_or_none()
    why = conn.execute(
        sa.select(c.verdict, c.why, sa.func.count().label("number"))
        .where(of_run, c.verdict != "same")
        .group_by(c.verdict, c.why)
        .order_by(sa.func.count().desc(), c.why)
    ).all()
    unwritten = conn.execute(
        sa.select(sa.func.count()).where(of_run, c.outcome == "assigned", sa.literal(flag is Flag.WRITE_BACK))
    ).scalar_one()
    return {
        "flag": flag.value,
        "mode": mode.value,
        "run": run,
        "began": iso(began),
        "decisions": counts.decisions,
        "same": counts.same,
        "different": counts.different,
        "errors": counts.errors,
        "clean": counts.decisions > 0 and not counts.errors,
        "would_have_written": unwritten if flag is Flag.WRITE_BACK else None,
        "why": [
            {"verdict": row.verdict, "why": row.why, "text": text_of(row.verdict, row.why), "count": row.number}
            for row in why
        ],
    }


def _differences(
    conn: sa.Connection, tenant_id: UUID, names: Names, runs: Mapping[Flag, int], limit: int
) -> list[Json]:
    c, d = shadow_records.c, t.decisions.c
    of_runs = sa.or_(sa.false(), *(sa.and_(c.flag == flag.value, c.run == run) for flag, run in runs.items()))
    rows = conn.execute(
        sa.select(
            shadow_records,
            d.outcome.label("live_outcome"),
            d.reason.label("live_reason"),
            d.rule.label("live_rule"),
            d.queue_id.label("live_queue"),
            d.agent_id.label("live_agent"),
            d.turn.label("live_turn"),
        )
        .outerjoin(
            t.decisions,
            (d.tenant_id == c.tenant_id) & (d.lead_id == c.lead_id) & (d.role == c.role) & (d.seq == c.seq),
        )
        .where(c.tenant_id == tenant_id, c.verdict != "same", of_runs)
        .order_by(c.decided_at.desc(), c.lead_id.desc())
        .limit(limit)
    ).all()
    refs = _refs(conn, tenant_id, {row.lead_id for row in rows})
    return [
        record_of(names, row)
        | {
            "lead": {"lead_id": str(row.lead_id), "ref": refs.get(row.lead_id)},
            "live": None
            if row.live_outcome is None
            else {
                "outcome": row.live_outcome,
                "reason": row.live_reason,
                "rule": row.live_rule,
                "queue": names.queue(row.live_queue),
                "agent": names.agent(row.live_agent),
                "turn": row.live_turn,
            },
        }
        for row in rows
    ]


def _refs(conn: sa.Connection, tenant_id: UUID, lead_ids: Collection[UUID]) -> dict[UUID, str]:
    r = t.lead_refs.c
    rows = conn.execute(
        sa.select(r.lead_id, r.ref)
        .where(r.tenant_id == tenant_id, r.lead_id == sa.any_(sa.cast(list(lead_ids), sa.ARRAY(sa.Uuid))))
        .order_by(r.created_at, r.ref)
    )
    return {row.lead_id: row.ref for row in rows}


# -- the score --------------------------------------------------------------------------------------------------


def _score(conn: sa.Connection, tenant_id: UUID, names: Names, run: int) -> Json:
    """Whom write_back in shadow would have written against whom the CRM chose, per lead the first of each.

    Seconds count from the creation in the CRM (or, without one, from when Turnlock knew the lead): to Turnlock's
    decision, and to when Turnlock saw the CRM's owner, which is that owner's latest possible time.
    """
    c, d = shadow_records.c, t.leads.c
    rows = conn.execute(
        sa.select(
            c.lead_id,
            c.agent_id,
            c.crm_agent_id,
            c.decided_at,
            c.crm_seen_at,
            sa.func.coalesce(d.crm_created_at, d.created_at).label("created"),
        )
        .join(t.leads, (d.tenant_id == c.tenant_id) & (d.lead_id == c.lead_id))
        .where(
            c.tenant_id == tenant_id,
            c.flag == Flag.WRITE_BACK.value,
            c.run == run,
            c.role == "owner",
            c.outcome == "assigned",
        )
        .order_by(c.lead_id, c.seq.desc())
    ).all()
    rows = list({row.lead_id: row for row in rows}.values())
    owned = [row for row in rows if row.crm_agent_id is not None]
    agreed = sum(row.agent_id == row.crm_agent_id for row in owned)
    ours, theirs = Counter(row.agent_id for row in owned), Counter(row.crm_agent_id for row in owned)
    return {
        "leads": len(rows),
        "owned_by_crm": len(owned),
        "without_owner": len(rows) - len(owned),
        "agreed": agreed,
        "agreement": round(agreed / len(owned), 4) if owned else None,
        "shares": [
            {
                "agent": names.agent(agent_id),
                "turnlock": ours[agent_id],
                "crm": theirs[agent_id],
                "turnlock_share": round(ours[agent_id] / len(owned), 4),
                "crm_share": round(theirs[agent_id] / len(owned), 4),
            }
            for agent_id in sorted({*ours, *theirs}, key=lambda a: (-ours[a], -theirs[a], str(a)))
        ],
        "seconds_to_owner": {
            "turnlock": _spread([(row.decided_at - row.created).total_seconds() for row in owned]),
            "crm": _spread([(row.crm_seen_at - row.created).total_seconds() for row in owned]),
        },
    }


def _spread(seconds: Sequence[float]) -> Json | None:
    """Median and 90th percentile; None without any."""
    if not seconds:
        return None
    ordered = sorted(max(0.0, one) for one in seconds)
    return {"median": round(median(ordered), 3), "p90": round(ordered[(len(ordered) * 9 - 1) // 10], 3)}
