"""Deciding without keeping: what a decision would come to now, asked of the very code that decides.

Nothing is locked and nothing is written. Everything is read in one snapshot, so that two turns are never mixed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from connector.draft import Draft
from connector.runtime import Runtime, Tenant
from connector.waiting import load_waiting
from routing import kin, store
from routing.decide import Bench, Case, Decision, NeedQueues, QueueState
from routing.facts import Identities, identities
from routing.model import Flag, Lead, Role
from routing.rotation import Line
from routing.rules import RuleSet


@contextmanager
def snapshot(runtime: Runtime) -> Iterator[sa.Connection]:
    """A connection on which everything is of one moment."""
    with runtime.engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
        yield conn


def moment(runtime: Runtime, conn: sa.Connection) -> datetime:
    """The instant at which availability is judged now."""
    found: datetime = conn.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
    return runtime.clock(found)


class Trial:
    """Decides leads one after the other as they would be now, moving lines in memory alone."""

    def __init__(self, runtime: Runtime, conn: sa.Connection, tenant: Tenant, draft: Draft | None = None) -> None:
        """On a :func:`snapshot`. With `draft` as if it had been applied."""
        self._conn = conn
        self._tenant_id = tenant.tenant_id
        self._country = tenant.country if draft is None else draft.config.country
        self.now = moment(runtime, conn)
        self._queues: dict[UUID, QueueState] = {}
        if draft is None:
            self.plan = runtime.plan(conn, store.tenant_row(conn, tenant.tenant_id))
            self._agents = store.load_agents(conn, tenant.tenant_id, self.plan.flags, self.plan.target_agents)
        else:
            self.plan, self._agents = draft.plan, dict(draft.agents)
        self.bench = Bench(self.plan, self._agents, self._queues, self.now, draft.loads if draft else None)
        if draft is not None:
            self._keep(draft.after)

    def only(self, queue_id: UUID) -> None:
        """From now on every lead goes to this queue, as if there were no rules."""
        self.plan = replace(self.plan, rules=RuleSet(()), default_queue_id=queue_id)
        self.bench.plan = self.plan

    def queue(self, queue_id: UUID) -> QueueState:
        """A queue as it stood when it was read."""
        if queue_id not in self._queues:
            self._load(self.plan.lines_of([queue_id]))
        return self._queues[queue_id]

    def know(self, agent_ids: Collection[UUID]) -> None:
        """Read further agents whom a decision may come to."""
        missing = set(agent_ids) - self._agents.keys()
        if missing:
            self._agents |= store.load_agents(self._conn, self._tenant_id, self.plan.flags, missing)

    def identities(self, lead: Lead) -> Identities:
        """By what this lead is known."""
        households = Flag.HOUSEHOLDS in self.plan.flags
        return identities(self._tenant_id, lead, households=households, country=self._country)

    def line(self, queue_id: UUID) -> Line:
        """The line of a queue after what was decided so far."""
        self.queue(queue_id)
        return self.bench.lines[queue_id]

    def decide(self, case: Case) -> Decision:
        """Decide one lead; the next one finds the lines as this one left them."""
        while True:
            try:
                return self.bench.decide(case)
            except NeedQueues as need:  # raised before any line moved
                self._load(need.queue_ids)

    def _load(self, queue_ids: Collection[UUID]) -> None:
        found = store.load_queues(self._conn, self._tenant_id, self.plan.flags, queue_ids)
        self._keep(found)
        wanted = {place.agent_id for queue in found.values() for place in queue.line.places}
        self.know(wanted | {queue.default_agent_id for queue in found.values() if queue.default_agent_id})
        # Caps stop members alone; what was counted before has grown by what was decided since.
        capped = [self._agents[one] for one in wanted & self._agents.keys() - self.bench.loads.keys()]
        self.bench.loads |= store.count_loads(self._conn, self._tenant_id, capped, self.now)

    def _keep(self, found: Mapping[UUID, QueueState]) -> None:
        self._queues |= found
        self.bench.lines |= {queue_id: queue.line for queue_id, queue in found.items()}
        if any(queue.held for queue in found.values()):
            self._respect()

    def _respect(self) -> None:
        """Whoever waits comes before a new lead, as in a unit."""
        conn, tenant_id, plan = self._conn, self._tenant_id, self.plan
        served = {place.agent_id for queue in self._queues.values() for place in queue.line.places}
        members = kin.load_members(conn, tenant_id, plan.flags, served)
        waiting = load_waiting(conn, tenant_id, plan.flags, Role.OWNER)
        self.bench.members = {q: them for q, them in members.items() if not plan.is_quiet(q, self.now)}
        self.bench.ahead = [one for one in waiting if not plan.is_quiet(one.home, self.now)]
