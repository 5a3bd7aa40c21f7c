"""Capabilities per tenant in stages: `off`, `shadow`, `on`.

`off` is always one command and loses nothing. `on` keeps the order of the migrations and wants a shadow that ran clean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from connector import work
from connector.alarms import SHADOW_ERRORS, close_alarm
from connector.configuration import has_ledger, reweight, start_line
from connector.database import unit
from connector.errors import TurnlockError
from connector.lanes import present
from connector.migrate import SHADOW, STAGES
from connector.runtime import Runtime
from routing import saving, staging, store
from routing import tables as t
from routing.ledger import Kind
from routing.model import Flag
from routing.stages import Mode, Stage
from routing.tables_shadow import flag_versions, shadow_records

#: What must be on before: the stages build on each other. Write-back and settle stand apart.
NEEDS = {
    Flag.ROTATION: Flag.RULES,
    Flag.WEIGHTS: Flag.ROTATION,
    Flag.SKIPS: Flag.WEIGHTS,
    Flag.HOUSEHOLDS: Flag.RULES,
    Flag.CAPACITY: Flag.SKIPS,
    Flag.CREDITS: Flag.ROTATION,
    Flag.TEAMS: Flag.ROTATION,
}
#: A queue has one line, and its tags are either weighted or flat: these cannot be on for some leads only.
WHOLE = frozenset({Flag.WEIGHTS})
#: So many decisions a shadow must have made, all without an error, before its flag may be on.
MIN_DECISIONS = 20


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run of a shadow came to."""

    decisions: int
    same: int
    different: int
    errors: int


def start_flags(conn: sa.Connection, tenant_id: UUID, stages: frozenset[Flag]) -> None:
    """A new tenant starts with every capability on that the database has."""
    conn.execute(
        sa.insert(t.flags),
        [
            {"tenant_id": tenant_id, "flag": flag.value, "mode": "on" if flag in stages else "off", "changed_by": "new"}
            for flag in Flag
        ],
    )


def settings(runtime: Runtime, conn: sa.Connection, tenant_id: UUID) -> dict[Flag, Stage]:
    """Every flag with its mode, its limits and its last shadow run."""
    row = store.tenant_row(conn, tenant_id)
    return present(row, runtime.settings_at(conn, tenant_id, row.flag_version))


def modes(conn: sa.Connection, tenant_id: UUID) -> dict[Flag, str]:
    """Every flag with its mode, whatever its limits; one that was never set is off."""
    return {flag: stage.mode.value for flag, stage in present(store.tenant_row(conn, tenant_id), {}).items()}


def shown(runtime: Runtime, conn: sa.Connection, tenant_id: UUID) -> list[dict[str, Any]]:
    """Every flag as JSON-safe values: mode, limits, since when and by whom, and the reason if it was forced."""
    found, stages = settings(runtime, conn, tenant_id), runtime.stages(conn)
    f, v = t.flags.c, flag_versions.c
    rows = conn.execute(sa.select(f.flag, f.changed_at, f.changed_by).where(f.tenant_id == tenant_id))
    changed = {row.flag: row for row in rows}
    reasons: dict[str, str | None] = {}
    if runtime.shadows(conn):
        of_each = sa.select(v.flag, v.reason).where(v.tenant_id == tenant_id).order_by(v.version)
        reasons = {row.flag: row.reason for row in conn.execute(of_each)}
    return [
        {
            "flag": flag.value,
            "mode": stage.mode.value,
            "sources": list(stage.sources),
            "percent": stage.percent,
            "since": changed[flag.value].changed_at.isoformat() if flag.value in changed else None,
            "by": changed[flag.value].changed_by if flag.value in changed else None,
            "forced": reasons.get(flag.value),
            "in_schema": flag in stages,
        }
        for flag, stage in found.items()
    ]


def counts(conn: sa.Connection, tenant_id: UUID, flag: Flag, run: int) -> Counts:
    """How often a run of this flag's shadow decided, and to what."""
    c = shadow_records.c
    rows = conn.execute(
        sa.select(c.verdict, sa.func.count().label("number"))
        .where(c.tenant_id == tenant_id, c.flag == flag.value, c.run == run)
        .group_by(c.verdict)
    )
    found = {row.verdict: row.number for row in rows}
    same, different, errors = (found.get(word, 0) for word in ("same", "different", "error"))
    return Counts(same + different + errors, same, different, errors)


def switch(
    runtime: Runtime,
    tenant_id: UUID,
    flag: Flag,
    mode: str,
    actor: str,
    *,
    sources: Collection[str] = (),
    percent: int = 100,
    min_decisions: int = MIN_DECISIONS,
    force: str | None = None,
) -> bool:
    """Switch a flag; whether it changed. Raises :class:`TurnlockError` with everything that stands against it.

    `sources` and `percent` (1 to 100) limit ``shadow`` and ``on`` to some leads. `force` is a reason for which the
    flag may be on without a clean shadow of `min_decisions`; it is recorded. Decisions in flight are safe: a unit that
    began before sees the new version under its locks and starts again.
    """
    wanted = Stage(Mode(mode), tuple(dict.fromkeys(sources)), percent)
    with unit(runtime.engine) as (conn, now):
        c = t.tenants.c
        # First in the lock order, so that two switches, or a switch and a configuration, take turns.
        version = conn.execute(
            sa.select(c.flag_version).where(c.tenant_id == tenant_id).with_for_update(key_share=True)
        ).scalar_one()
        before = settings(runtime, conn, tenant_id)
        if replace(before[flag], run=0) == wanted:
            return False
        if problems := _problems(runtime, conn, tenant_id, flag, wanted, before, min_decisions, force):
            raise TurnlockError("\n".join(problems))
        shadowing = wanted.mode is Mode.SHADOW
        begins = shadowing and before[flag].mode is not Mode.SHADOW
        after = before | {flag: replace(wanted, run=version + 1 if begins else before[flag].run)}
        old, new = _on(before), _on(after)
        moves = flag is Flag.WEIGHTS or (flag is Flag.ROTATION and flag in new) or (flag is Flag.SKIPS and flag in old)
        if old != new and moves:
            _carry_lines(conn, tenant_id, old, new, actor, now)
        stored = "partly" if wanted.mode is Mode.ON and wanted.limited else wanted.mode.value
        row = insert(t.flags).values(
            tenant_id=tenant_id, flag=flag.value, mode=stored, changed_by=actor, changed_at=now
        )
        conn.execute(
            row.on_conflict_do_update(
                index_elements=["tenant_id", "flag"],
                set_={"mode": stored, "changed_by": actor, "changed_at": now},
            )
        )
        conn.execute(sa.update(t.tenants).where(c.tenant_id == tenant_id).values(flag_version=version + 1))
        if wanted.mode is Mode.ON:  # by a clean run or with a reason: whoever had to hear of its shadow has
            close_alarm(conn, tenant_id, SHADOW_ERRORS, flag.value)
        if runtime.shadows(conn):
            if begins or not shadowing:
                staging.drop_lines(conn, tenant_id, flag)
            staging.keep_settings(conn, tenant_id, version + 1, after, flag=flag, actor=actor, reason=force, now=now)
        work.want(conn, tenant_id, "held")
        if flag is Flag.HOUSEHOLDS:
            work.want(conn, tenant_id, "identities")
        if flag is Flag.TEAMS:
            work.want(conn, tenant_id, "agents")  # who joined and left meanwhile
    runtime.hooks.clear()  # deliveries are stamped with the new version from here on
    runtime.wake()
    return True


def _on(settings: Mapping[Flag, Stage]) -> frozenset[Flag]:
    return frozenset(flag for flag, stage in settings.items() if stage.mode is Mode.ON)


def _problems(
    runtime: Runtime,
    conn: sa.Connection,
    tenant_id: UUID,
    flag: Flag,
    wanted: Stage,
    before: Mapping[Flag, Stage],
    min_decisions: int,
    force: str | None,
) -> list[str]:
    """Everything that stands against a switch, each with what to do."""
    if wanted.mode is Mode.OFF:
        return [f"{flag.value} off is off for every lead; leave the limits out"] if wanted.limited else []
    cannot, found = f"{flag.value} cannot be {_words(wanted)}", []
    if flag not in runtime.stages(conn):
        return [f"{cannot}: revision {STAGES[flag]} is not applied; run `turnlock migrate`"]
    if not runtime.shadows(conn):
        return [f"{cannot}: revision {SHADOW} is not applied; run `turnlock migrate`"]
    needs = NEEDS.get(flag)
    if needs is not None and before[needs].mode is not Mode.ON:
        found.append(
            f"{cannot} while {needs.value} is {before[needs].mode.value}; `turnlock flags TENANT {needs.value} on`"
        )
    if not 1 <= wanted.percent <= 100:
        found.append(f"{cannot}: a percentage is a whole number from 1 to 100")
    if wanted.mode is Mode.ON and wanted.limited and flag in WHOLE:
        found.append(f"{cannot} for some leads only: a queue has one line, weighted or flat; limit its shadow instead")
    if wanted.mode is Mode.ON and before[flag].mode is not Mode.ON and force is None:
        run = before[flag].run
        seen = counts(conn, tenant_id, flag, run)
        shadow = f"`turnlock flags TENANT {flag.value} shadow`"
        besides = "or give a reason with --force"
        if not run:
            found.append(f"{cannot} before its shadow has run; {shadow}, {besides}")
        elif seen.errors:
            found.append(
                f"{cannot}: its shadow failed {seen.errors} time(s); see `turnlock shadow TENANT --differences`, then "
                f"begin anew with off and shadow, {besides}"
            )
        elif seen.decisions < min_decisions:
            found.append(
                f"{cannot}: its shadow has made {seen.decisions} of {min_decisions} decisions; wait for more, {besides}"
            )
    return found


def _words(stage: Stage) -> str:
    return "in shadow" if stage.mode is Mode.SHADOW else stage.mode.value


def _carry_lines(
    conn: sa.Connection,
    tenant_id: UUID,
    old: frozenset[Flag],
    new: frozenset[Flag],
    actor: str,
    now: datetime,
) -> None:
    """Bring every line over a change of the rotation, weights or skips flag.

    A line that has begun goes on where it stands: members who came and went meanwhile moved it by ledger entries. Who
    is away under the policy `average` counts as back once skips are off, because nobody looks for them any more.
    """
    q, m = t.queues.c, t.members.c
    ids = list(conn.execute(sa.select(q.queue_id).where(q.tenant_id == tenant_id)).scalars())
    store.lock_queues(conn, tenant_id, ids)
    for queue_id in ids:
        stored = store.load_queues(conn, tenant_id, old | {Flag.ROTATION}, [queue_id])[queue_id]
        moves = saving.Moves(stored.line, stored.next_rank, actor)
        rows = conn.execute(
            sa.select(m.agent_id, m.rank, *([m.weight] if Flag.WEIGHTS in old | new else []))
            .where(m.tenant_id == tenant_id, m.queue_id == queue_id)
            .order_by(m.rank)
        ).all()
        weights = {row.agent_id: row.weight if Flag.WEIGHTS in new else 1 for row in rows}
        if has_ledger(conn, tenant_id, queue_id):
            for place in moves.line.places:
                if weights[place.agent_id] != place.weight:
                    reweight(moves, place, weights[place.agent_id])
            for place in moves.line.places:
                if place.averaging and Flag.SKIPS not in new:
                    moves.do(Kind.AVERAGE, "skips are off", agent=str(place.agent_id))
        elif Flag.ROTATION in new:
            start_line(moves, [(row.agent_id, row.rank, weights[row.agent_id]) for row in rows])
        if moves.drafts:
            saving.save_lines(
                conn, tenant_id, {queue_id: stored}, {queue_id: moves.line}, {queue_id: moves.drafts}, now
            )
