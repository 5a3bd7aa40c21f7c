"""What the agents with caps have while the past is decided again, counted as a decision would have counted it.

In an hour, a day and a week counts what the draft gave them, and of the time before what they were given then. Open is
what they held when that time began and what the draft gave them since, except for leads that are closed by now: when
a lead was closed nobody recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa

from routing import caps, store
from routing import tables as t
from routing.decide import Bench, Decision
from routing.model import Agent, Caps, Lead, Load

# A week, and what the change of the clocks and the difference of zones may add to it.
_LONGEST_WINDOW = timedelta(days=8)


class PastLoads:
    """Keeps the loads of a bench that decides leads in order of time."""

    def __init__(
        self, conn: sa.Connection, tenant_id: UUID, bench: Bench, agents: Mapping[UUID, Agent], start: datetime
    ) -> None:
        """As of `start`, when the first lead came."""
        self._bench = bench
        self._caps: dict[UUID, Caps] = {one.agent_id: one.caps for one in agents.values() if one.caps is not None}
        self._times: dict[UUID, list[datetime]] = {agent_id: [] for agent_id in self._caps}
        # When the hour ends that an agent's counts are of; before that they only grow.
        self._until: dict[UUID, datetime] = {}
        bench.loads = dict.fromkeys(self._caps, Load())
        if not self._caps:
            return
        a, f = t.assignments.c, t.lead_facts.c
        theirs = sa.and_(
            a.tenant_id == tenant_id,
            a.agent_id == sa.any_(sa.cast(list(self._caps), sa.ARRAY(sa.Uuid))),
            a.state.not_in(store.NEVER_HAD),
            a.assigned_at < start,
        )
        for row in conn.execute(
            sa.select(a.agent_id, a.assigned_at)
            .where(theirs, a.assigned_at >= start - _LONGEST_WINDOW)
            .order_by(a.assigned_at)
        ):
            self._times[row.agent_id].append(row.assigned_at)
        stage = sa.func.coalesce(sa.func.lower(f.facts["stage"].astext), "")
        for row in conn.execute(
            sa.select(a.agent_id, sa.func.count(a.lead_id.distinct()).label("open"))
            .outerjoin(t.lead_facts, (f.tenant_id == a.tenant_id) & (f.lead_id == a.lead_id))
            .where(theirs, sa.or_(a.ended_at.is_(None), a.ended_at >= start), stage.not_in(bench.plan.closed_stages))
            .group_by(a.agent_id)
        ):
            bench.loads[row.agent_id] = Load(open=row.open)

    def at(self, now: datetime) -> None:
        """Let time pass until `now`: what was given in an hour, a day or a week that is over counts no more."""
        for agent_id, limits in self._caps.items():
            until = self._until.get(agent_id)
            if until is not None and now < until:
                continue
            windows, times = caps.windows(limits, now), self._times[agent_id]
            counts = {name: len(times) - bisect_left(times, start) for name, (start, _) in windows.items()}
            self._bench.loads[agent_id] = Load(**counts, open=self._bench.loads[agent_id].open)
            self._until[agent_id] = windows["hour"][1]

    def gave(self, decision: Decision, lead: Lead, now: datetime) -> None:
        """The bench gave a lead to an agent, and counted that already."""
        if decision.agent_id in self._times:
            self._times[decision.agent_id].append(now)
            if self._closed(lead):
                self._bench.freed(decision.agent_id)

    def _closed(self, lead: Lead) -> bool:
        return (lead.stage or "").lower() in self._bench.plan.closed_stages

    def took_back(self, agent_id: UUID, lead: Lead, given_at: datetime) -> None:
        """A lead that the bench gave to an agent at `given_at` counts no more: it was given back."""
        if agent_id in self._times:
            self._times[agent_id].remove(given_at)
            if not self._closed(lead):
                self._bench.freed(agent_id)
            self._until.pop(agent_id, None)  # counted anew at once
