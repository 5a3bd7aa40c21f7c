"""A shadow beside one unit: a staged flag's path decides the same leads over a line of its own and keeps a record.

It runs in the unit's transaction, under the same locks, and writes nothing but its record and its line. Whatever goes
wrong in it is counted against it and never reaches the live path: its SQL stands in a savepoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector import log
from connector.alarms import SHADOW_ERRORS, open_alarm
from connector.database import is_contention, is_outage
from connector.lanes import Watch
from connector.tables import alarms
from routing import staging, store
from routing.decide import Bench, Case, Decision, NeedQueues, Outcome, Plan
from routing.model import Flag, Role
from routing.saving import Decided
from routing.shadow import compare, flat, follow, skip_of
from routing.tables_shadow import shadow_records

_log = log.get("shadow")


class Beside:
    """One flag's shadow of one unit. Call :meth:`load`, then :meth:`decide` in the unit's order, then :meth:`save`."""

    def __init__(self, conn: sa.Connection, tenant_id: UUID, watch: Watch, now: datetime) -> None:
        self._conn = conn
        self._tenant_id = tenant_id
        self._watch = watch
        self._now = now
        self._bench: Bench | None = None
        self._earlier: Mapping[tuple[UUID, Role], Any] = {}
        self._rows: list[dict[str, Any]] = []
        self._moved: set[UUID] = set()
        self._fault: str | None = None

    @property
    def flag(self) -> Flag:
        """The flag in shadow."""
        return self._watch.flag

    def load(
        self, live: Plan, bench_of: Callable[[Plan], Bench], queue_ids: Collection[UUID], held: Collection[UUID]
    ) -> None:
        """Read what it decides from: what the live path would read with the flag on, with the shadow's own lines.

        `held` are the leads that wait since an earlier decision.
        """

        def read() -> None:
            plan = self._watch.plan
            bench = bench_of(plan)
            if Flag.ROTATION in plan.flags and queue_ids:
                self._own_lines(bench, live, queue_ids)
            self._bench = bench
            if held:
                # What it gave away already it does not give away again when the live path comes to decide.
                self._earlier = staging.earlier_picks(self._conn, self._tenant_id, self.flag, self._watch.run, held)

        self._guarded(read)

    def _own_lines(self, bench: Bench, live: Plan, queue_ids: Collection[UUID]) -> None:
        conn, tenant_id, flags = self._conn, self._tenant_id, self._watch.plan.flags
        kept = staging.load_lines(conn, tenant_id, self.flag, queue_ids)
        members = store.load_queues(conn, tenant_id, flags - {Flag.ROTATION}, queue_ids)
        for queue_id, queue in list(bench.queues.items()):
            line = kept.get(queue_id)
            if line is None:
                # It begins where the live line stands; one that never turned begins with its members by rank.
                begun = bool(queue.line.places or queue.line.position)
                line = queue.line if begun else members[queue_id].line
                if begun and Flag.WEIGHTS not in live.flags:
                    line = flat(line)
            bench.lines[queue_id] = follow(line, members[queue_id].line.places)
        strangers = {p.agent_id for line in bench.lines.values() for p in line.places} - bench.agents.keys()
        if strangers:
            bench.agents = {**bench.agents, **store.load_agents(conn, tenant_id, flags, strangers)}
        bench.queues = {q: replace(state, line=bench.lines[q]) for q, state in bench.queues.items()}

    # -- deciding -------------------------------------------------------------------------------------------

    def decide(self, case: Case, decided: Decided) -> None:
        """Decide beside a live decision. Raises :class:`NeedQueues` as the live path does, and nothing else."""
        live, seq = decided.decision, (decided.before.seq if decided.before else 0) + 1
        if self.flag is Flag.WRITE_BACK:
            # The decision is the live one; what differs is that nobody is told.
            self._note(live, seq, None)
            return
        shadow = self._ask(case, seq, live.role)
        if shadow is not None:
            self._note(shadow, seq, live)

    def came_owned(self, case: Case, crm_agent_id: UUID, seen_at: datetime) -> None:
        """Decide a lead that came with an owner, as it would have been: what the CRM's own routing is held against."""
        shadow = self._ask(case, 0, case.role)
        if shadow is not None:
            self._note(shadow, 0, None, crm_agent_id=crm_agent_id, crm_seen_at=seen_at)

    def _ask(self, case: Case, seq: int, role: Role) -> Decision | None:
        earlier = self._earlier.get((case.lead_id, role))
        if earlier is not None:
            return Decision(
                case.lead_id,
                role,
                Outcome.ASSIGNED,
                rule=earlier.rule,
                queue_id=earlier.queue_id,
                agent_id=earlier.agent_id,
                record={"how": "earlier"},
            )
        if self._bench is None:
            self._rows.append(self._key(case.lead_id, role, seq) | {"verdict": "error", "why": self._fault})
            return None
        try:
            return self._bench.decide(replace(case, tried=None))
        except NeedQueues:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the live decision stands
            _log.warning("shadow failed", tenant=str(self._tenant_id), **log.fault(error))
            self._rows.append(
                self._key(case.lead_id, role, seq) | {"verdict": "error", "why": type(error).__name__.lower()}
            )
            return None

    def _key(self, lead_id: UUID, role: Role, seq: int) -> dict[str, Any]:
        return {
            "tenant_id": self._tenant_id,
            "flag": self.flag.value,
            "run": self._watch.run,
            "lead_id": lead_id,
            "role": role.value,
            "seq": seq,
            "decided_at": self._now,
        }

    def _note(self, shadow: Decision, seq: int, live: Decision | None, **more: Any) -> None:
        why = compare(live, shadow) if live is not None else None
        # Beside a live decision write-back keeps no line: that one is the live one.
        if shadow.pick is not None and shadow.queue_id is not None and (seq == 0 or self.flag is not Flag.WRITE_BACK):
            self._moved |= {shadow.queue_id, *(one.queue_id for one in shadow.inner)}
        record = dict(shadow.record) if why is not None or live is None else {}
        if live is not None and why is not None and (skip := skip_of(live, shadow)):
            record["skip"] = dict(skip)
        self._rows.append(
            self._key(shadow.lead_id, shadow.role, seq)
            | {
                "verdict": "same" if why is None else "different",
                "why": why.value if why else None,
                "outcome": shadow.outcome.value,
                "reason": shadow.reason.value if shadow.reason else None,
                "rule": shadow.rule,
                "queue_id": shadow.queue_id,
                "agent_id": shadow.agent_id,
                "turn": shadow.pick.turn if shadow.pick else None,
                "record": record,
            }
            | more
        )

    # -- saving ---------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Keep the records and the moved lines. Call in the unit's transaction, after the live path has saved."""
        bench = self._bench

        def write() -> None:
            # Rows differ in their columns, which one statement cannot mix.
            by_columns: dict[frozenset[str], list[dict[str, Any]]] = {}
            for row in self._rows:
                by_columns.setdefault(frozenset(row), []).append(row)
            for rows in by_columns.values():
                staging.save_records(self._conn, rows)
            if bench is not None and Flag.ROTATION in self._watch.plan.flags:
                lines = {queue_id: line for queue_id, line in bench.lines.items() if queue_id in self._moved}
                staging.save_lines(self._conn, self._tenant_id, self.flag, lines)
            if self._rows and not failed:
                self._clean()

        failed = any(row["verdict"] == "error" for row in self._rows)
        if self._rows and not self._guarded(write):
            failed = True
            keys = ("tenant_id", "flag", "run", "lead_id", "role", "seq", "decided_at")
            lost = [{key: row[key] for key in keys} | {"verdict": "error", "why": self._fault} for row in self._rows]
            self._guarded(lambda: staging.save_records(self._conn, lost))
        if failed:
            self._guarded(self._tell)

    def _tell(self) -> None:
        """Open the alarm, or bring its count up to date."""
        times = self._conn.execute(sa.select(sa.func.count()).where(*self._errors())).scalar_one()
        text = (
            f"the shadow of {self.flag.value} failed {times} time(s) in its present run, so the flag cannot be on; "
            "see `turnlock shadow TENANT --differences`, mend the cause, then begin anew with off and shadow"
        )
        open_alarm(self._conn, self._tenant_id, SHADOW_ERRORS, self.flag.value, text)

    def _clean(self) -> None:
        """Close the alarm of an earlier run once this one has decided and never failed."""
        a = alarms.c
        here = sa.and_(a.tenant_id == self._tenant_id, a.kind == SHADOW_ERRORS, a.subject == self.flag.value)
        clean = ~sa.exists().where(*self._errors())
        query = sa.update(alarms).where(here, a.closed_at.is_(None), clean)
        self._conn.execute(query.values(closed_at=sa.func.clock_timestamp()))

    def _errors(self) -> tuple[sa.ColumnElement[bool], ...]:
        r = shadow_records.c
        of_run = (r.tenant_id == self._tenant_id, r.flag == self.flag.value, r.run == self._watch.run)
        return (*of_run, r.verdict == "error")

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Run `work` in a savepoint; whether it went well. What speaks of the server, or of a lost race, is raised."""
        try:
            with self._conn.begin_nested():
                work()
        except sa.exc.SQLAlchemyError as error:
            if is_outage(error) or is_contention(error):
                raise
            self._fault = type(error).__name__.lower()
            _log.warning("shadow failed", tenant=str(self._tenant_id), **log.fault(error))
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the live path goes on
            self._fault = type(error).__name__.lower()
            _log.warning("shadow failed", tenant=str(self._tenant_id), **log.fault(error))
            return False
        return True
