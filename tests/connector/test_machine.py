"""A state machine on a real PostgreSQL: whatever happens to an account in whatever order, every ledger still follows.

Leads come new, twice and late; agents come and go; configuration, flags and the clock change; humans take leads over
and clear owners; the CRM refuses agents; turns are owed and given next. The service's own code does all of it, in this
process, against the sandbox CRM. After every step the ledger of every queue is replayed from its first entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from adapters.base import Event, EventKind
from connector import flags
from connector.accept import store_delivery
from connector.chores import CHORES, Call
from connector.database import unit
from connector.decide import Decider
from connector.errors import TurnlockError
from connector.runtime import Runtime
from connector.sandbox import Sandbox
from connector.writeback import Sender
from routing import saving, store
from routing import tables as t
from routing.ledger import Kind
from routing.model import Flag
from tests.rig import ANA, BEN, CY, DEE, ELI, Rig

AGENTS = (ANA, BEN, CY, DEE)
HOURS = "agents: {'13': {zone: America/Chicago, hours: {mon: ['08:00-18:00'], thu: ['08:00-18:00']}}}\n"
RULES = (
    "rules:\n"
    "  - {name: alone, when: {field: tags, contains: alone}, to: leave_alone}\n"
    "  - {name: web, when: {field: source, equals: Web}, to: {queue: Two}, else: [{queue: All}]}\n"
    "  - {name: eli, when: {field: source, equals: Eli}, to: {agent: '16'}, else: [{queue: Two}]}\n"
)
POLICIES = ("hold", "leave_unassigned", "{fallback_queue: All}", "{default_agent: '16'}")
SOURCES = ("Web", "Zillow", "Eli")
PEOPLE = (None, "kim@example.com", "lee@example.com")
MOVES = (Kind.OWE, Kind.GIVE_NEXT, Kind.DEBIT, Kind.SEND_TO_BACK, Kind.AVERAGE)
EVERY = ("owner", "collaborator")
_names = itertools.count(1)

weight = st.integers(0, 5)
membership = st.dictionaries(st.sampled_from(AGENTS), weight, max_size=4)
some_lead = st.integers(0, 10_000)


def text_of(
    everyone: dict[str, int],
    two: dict[str, int],
    policy: str,
    *,
    rules: bool,
    hours: bool,
    west: dict[str, int] | None = None,
    nested: bool = False,
) -> str:
    """A configuration. `west` is a team in the queue All, nested or everybody of it."""

    def members(those: dict[str, int]) -> str:
        return ", ".join(f"{{agent: '{who}', weight: {much}}}" for who, much in those.items())

    teams, team = "", ""
    if west:
        teams = f"teams: {{West: {{members: [{members(west)}]}}}}\n"
        team = f"{', ' if everyone else ''}{{team: West, nested: {str(nested).lower()}, weight: 2}}"
    return (
        f"{teams}default_queue: All\nqueues:\n  All: {{members: [{members(everyone)}{team}]}}\n"
        f"  Two: {{members: [{members(two)}], when_nobody: {policy}}}\n"
        f"{RULES if rules else ''}{HOURS if hours else ''}"
    )


class Account(RuleBasedStateMachine):
    """One tenant of the sandbox's account, driven by hand: no thread of its own, so a failure repeats."""

    runtime: Runtime
    sandbox: Sandbox

    def __init__(self) -> None:
        super().__init__()
        for agent in (*AGENTS, ELI):
            self.sandbox.activate_agent(int(agent))
            self.sandbox.resume_agent(int(agent))
        self.sandbox.clear_faults()
        self.runtime.clock = lambda now: now
        self.rig = Rig(self.runtime, self.sandbox, "generic")
        self.rig.add_tenant(f"acme{next(_names)}", subscribe=False, config=None)
        self.rig.sync()
        west = {BEN: 2, DEE: 1}
        start = text_of({ANA: 1, CY: 1}, {CY: 1, DEE: 1}, "hold", rules=True, hours=False, west=west, nested=True)
        self.rig.configure(start)
        self.leads: list[str] = []
        self.decider = Decider(self.runtime, lambda *_: None, lambda: 0)
        self.sender = Sender(self.runtime)

    # -- leads ----------------------------------------------------------------------------------------------

    def tell(self, kind: EventKind, *refs: str, key: str | None = None) -> int:
        """A delivery of the CRM about these leads is stored; how many events were new."""
        with self.runtime.engine.connect() as conn:
            version = store.tenant_row(conn, self.rig.tenant.tenant_id).flag_version
        found = [Event(kind, f"{kind}:{ref}:{key or uuid4()}", ref=ref) for ref in refs]
        return store_delivery(
            self.runtime, self.rig.tenant, found, hook_id=None, body=b"{}", flag_version=version, headers={}
        )

    @rule(
        count=st.integers(1, 4),
        source=st.sampled_from(SOURCES),
        who=st.sampled_from(PEOPLE),
        alone=st.sampled_from([False, False, False, True]),
    )
    def leads_come(self, count: int, source: str, who: str | None, alone: bool) -> None:
        fields: dict[str, Any] = {"source": source, "tags": ["alone"] if alone else [], "emails": [who] if who else []}
        refs = [str(number) for number in self.sandbox.create_leads(count, **fields)]
        assert self.tell(EventKind.LEAD_CREATED, *refs, key="first") == count
        self.leads += refs

    @precondition(lambda self: self.leads)
    @rule(which=some_lead)
    def a_delivery_comes_twice(self, which: int) -> None:
        assert self.tell(EventKind.LEAD_CREATED, self.leads[which % len(self.leads)], key="first") == 0

    @precondition(lambda self: self.leads)
    @rule(which=some_lead, source=st.sampled_from(SOURCES))
    def a_lead_is_edited(self, which: int, source: str) -> None:
        ref = self.leads[which % len(self.leads)]
        self.sandbox.edit_leads([int(ref)], source=source)
        self.tell(EventKind.LEAD_CHANGED, ref)

    @precondition(lambda self: self.leads)
    @rule(which=some_lead, to=st.sampled_from((*AGENTS, None)))
    def a_human_hands_a_lead_over(self, which: int, to: str | None) -> None:
        ref = self.leads[which % len(self.leads)]
        self.sandbox.set_owner(int(ref), None if to is None else int(to))
        self.tell(EventKind.LEAD_CHANGED, ref)

    # -- agents, configuration, flags, clock ----------------------------------------------------------------

    @rule(who=st.sampled_from(AGENTS), paused=st.booleans())
    def an_admin_pauses_or_resumes(self, who: str, paused: bool) -> None:
        # Not `rig.pause`: the sandbox's agents are those of every account that this test has made.
        from connector.switches import pause, resume

        (pause if paused else resume)(self.runtime, self.rig.tenant, self.rig.agent_id(who), "test")

    @rule(who=st.sampled_from(AGENTS), how=st.sampled_from(("deactivate", "activate", "pause", "resume")))
    def the_crm_switches_an_agent(self, who: str, how: str) -> None:
        getattr(self.sandbox, f"{how}_agent")(int(who))
        self.rig.sync()

    @rule(
        everyone=membership,
        two=membership,
        policy=st.sampled_from(POLICIES),
        rules=st.booleans(),
        hours=st.booleans(),
        west=membership,
        nested=st.sampled_from((True, True, False)),
    )
    def the_configuration_changes(
        self,
        everyone: dict[str, int],
        two: dict[str, int],
        policy: str,
        rules: bool,
        hours: bool,
        west: dict[str, int],
        nested: bool,
    ) -> None:
        self.rig.configure(text_of(everyone, two, policy, rules=rules, hours=hours, west=west, nested=nested))

    @rule(
        flag=st.sampled_from(list(Flag)),
        mode=st.sampled_from(("off", "shadow", "on")),
        percent=st.sampled_from((100, 100, 50)),
    )
    def a_flag_is_switched(self, flag: Flag, mode: str, percent: int) -> None:
        with suppress(TurnlockError):  # their order is kept
            flags.switch(
                self.runtime, self.rig.tenant.tenant_id, flag, mode, "test", percent=percent, force="a machine"
            )

    @rule(hours=st.integers(0, 200))
    def the_clock_moves(self, hours: int) -> None:
        self.runtime.clock = lambda now: now + timedelta(hours=hours)

    @rule(queue=st.sampled_from(("All", "Two", "team West")), which=st.integers(0, 3), kind=st.sampled_from(MOVES))
    def an_admin_moves_the_line(self, queue: str, which: int, kind: Kind) -> None:
        move_line(self.rig, queue, kind, which)

    @rule(times=st.sampled_from((1, 2)))
    def the_crm_loses_an_owner(self, times: int) -> None:
        """Once: it is written again. Twice: the agent is refused, and the turn given back."""
        self.sandbox.fault("lost_owner", times=times)

    # -- work -----------------------------------------------------------------------------------------------

    @rule(sends=st.booleans())
    def a_worker_does_a_little(self, sends: bool) -> None:
        tenant_id = self.rig.tenant.tenant_id
        _ = self.sender.run(tenant_id, EVERY) if sends else self.decider.run(tenant_id)

    @rule()
    def workers_do_everything(self) -> None:
        tenant_id = self.rig.tenant.tenant_id
        before, now = None, self.picture()
        while before != now:  # held leads are fed again each time: it ends when that changes nothing
            CHORES["held"](self.runtime, self.rig.tenant, Call(None, 0))
            self.rig.due_now()
            for _ in range(500):
                if not self.decider.run(tenant_id) + self.sender.run(tenant_id, EVERY):
                    break
            before, now = now, self.picture()
        self.all_is_decided()

    def picture(self) -> Any:
        """How far the account is: decisions, writes, versions of leads, what waits."""
        return self.rig.rows(
            sa.text(
                "SELECT (SELECT count(*) FROM decisions WHERE tenant_id = :t), "
                "(SELECT count(*) FROM outbox WHERE tenant_id = :t AND state <> 'open'), "
                "(SELECT sum(version) FROM leads WHERE tenant_id = :t), "
                "(SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'waiting')"
            ).bindparams(t=self.rig.tenant.tenant_id)
        )

    def all_is_decided(self) -> None:
        """Nothing waits, and the CRM shows whom Turnlock says."""
        assert not self.rig.one("SELECT count(*) FROM events WHERE tenant_id = :t AND state IN ('waiting', 'parked')")
        assert not self.rig.one(
            "SELECT count(*) FROM outbox WHERE tenant_id = :t AND state IN ('open', 'parked') AND kind <> 'note'"
        )
        refs = {row.agent_id: row.ref for row in self.rig.rows(sa.select(t.agent_refs))}
        for ref in self.leads:
            standing, owner = self.rig.standing(ref), self.rig.owner(ref)
            state = standing["state"]
            assert state in ("assigned", "held", "left", "owned", "parked"), (ref, state)
            if state == "assigned":
                # Decided while write-back was off or in shadow, it was not written: the CRM may have come to the same.
                unwritten = standing["confirmed_version"] is None
                assert owner == refs[standing["agent_id"]] or (unwritten and owner is None), ref
            elif state in ("held", "left", "parked"):
                assert owner is None, (ref, state)
            else:
                assert owner is not None, ref

    # -- what always holds ----------------------------------------------------------------------------------

    @invariant()
    def every_ledger_follows(self) -> None:
        self.rig.audit()
        # No shadow fails, and nothing of data or code is tried in vain.
        assert not self.rig.one("SELECT count(*) FROM shadow_records WHERE tenant_id = :t AND verdict = 'error'")
        assert not self.rig.one("SELECT count(*) FROM events WHERE tenant_id = :t AND attempt > 0")

    def teardown(self) -> None:
        self.sandbox.clear_faults()
        self.workers_do_everything()
        self.every_ledger_follows()


def move_line(rig: Rig, queue: str, kind: Kind, which: int) -> None:
    """An admin's move of one member of a queue, through the store, under the queue's lock."""
    tenant_id, q = rig.tenant.tenant_id, t.queues.c
    with unit(rig.runtime.engine) as (conn, now):
        queue_id = conn.execute(sa.select(q.queue_id).where(q.tenant_id == tenant_id, q.name == queue)).scalar_one()
        store.lock_queues(conn, tenant_id, [queue_id])
        row = store.tenant_row(conn, tenant_id)
        states = store.load_queues(conn, tenant_id, row.flags | {Flag.ROTATION}, [queue_id])
        line = states[queue_id].line
        if not line.places:
            return
        moves = saving.Moves(line, states[queue_id].next_rank, "test")
        given: dict[str, Any] = {"agent": str(line.places[which % len(line.places)].agent_id)}
        if kind in (Kind.OWE, Kind.GIVE_NEXT):
            given["owed"] = str(uuid4())
        if kind is Kind.SEND_TO_BACK:
            given["rank"] = moves.rank()
        moves.do(kind, "a machine's move", **given)
        saving.save_lines(conn, tenant_id, states, {queue_id: moves.line}, {queue_id: moves.drafts}, now)


def run(make_rig: Callable[..., Rig], examples: int, steps: int) -> None:
    rig = make_rig(crm="generic", worker=False, config=None)

    class Machine(Account):
        runtime, sandbox = rig.runtime, rig.sandbox

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # A step costs a real transaction: to shrink a failure takes minutes, to read it unshrunk does not.
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
        ),
    )


def test_every_ledger_follows_whatever_happens(make_rig: Callable[..., Rig]) -> None:
    run(make_rig, examples=4, steps=20)


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_every_ledger_follows_whatever_happens_for_long(make_rig: Callable[..., Rig]) -> None:
    run(make_rig, examples=40, steps=50)
