"""CPU time of deciding, as ratios and differences: what many rules and long queues add. No wall clock, so it is steady.

Part of the stopwatch (``flat``); by itself: ``python -m tests.bench.cpu``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

from cryptography.fernet import Fernet

from adapters.base import Event, EventKind
from connector import inbox
from connector.accept import store_delivery
from connector.config_build import rules_as_written
from connector.decide import Decider
from connector.embedded import EmbeddedPostgres
from connector.process import open_runtime
from connector.runtime import Runtime
from connector.sandbox import Sandbox
from connector.settings import Settings
from routing.decide import Bench, Case, Plan, QueueState
from routing.fields import DAYS
from routing.model import Agent, Flag, Hours, Lead, Role, Target, TargetKind
from routing.rotation import new_line
from routing.rules import RuleSet
from tests import homes
from tests.rig import ABC, Rig

RULES_BOUND = 2.0  # times the cost of one rule, for a unit of 50 leads that none of 500 rules takes
LARGE_BOUND = 2.0  # milliseconds that 1,000 rules and 200 members may add to one lead
Bound = Callable[[str, bool], str]

#: Kinds of rules of which none takes the lead of :func:`new_lead`.
KINDS: dict[str, Callable[[int], str]] = {
    "by city": lambda n: f"{{field: city, equals: Town {n}}}",
    "by price": lambda n: f"{{field: price, between: [{900_000 + n}, {900_500 + n}]}}",
    "by zip range": lambda n: f'{{field: zip, between: ["{n:05}", "{n + 50:05}"]}}',
    "by source, state and price": lambda n: (
        f"{{all: [{{field: source, one_of: [Portal, S{n}]}}, {{field: state, equals: TX}}, "
        f"{{field: price, at_least: {900_000 + n}}}]}}"
    ),
    "by a custom field": lambda n: f"{{field: custom.team, contains: team {n}}}",
}


def rules(count: int, kind: str) -> str:
    """So many rules of one kind as YAML."""
    when = KINDS[kind]
    return "rules:\n" + "".join(f"  - {{name: r{n}, when: {when(n)}, to: {{queue: All}}}}\n" for n in range(count))


def queue(members: Sequence[int]) -> str:
    """A configuration with one queue of these agents, each with working hours."""
    names = ", ".join(f'"{n}"' for n in members)
    open_now = "{" + ", ".join(f"{day}: ['00:00-24:00']" for day in DAYS) + "}"
    hours = "".join(f'  "{n}": {{zone: America/Chicago, hours: {open_now}}}\n' for n in members)
    return f"default_queue: All\nagents:\n{hours}queues:\n  All: {{members: [{names}]}}\n"


def new_lead() -> Lead:
    """A lead that no rule of :data:`KINDS` takes."""
    number = time.monotonic_ns()
    return Lead(
        ref=f"cpu-{number}",
        city="Austin",
        state="TX",
        zip="78701",
        source="Portal",
        type="Buyer",
        price=Decimal(450_000),
        custom={"team": "none"},
        emails=(f"cpu{number}@example.com",),
    )


def feed(rig: Rig, count: int) -> None:
    """So many new leads, accepted."""
    for _ in range(count):
        lead = new_lead()
        event = Event(EventKind.LEAD_CREATED, lead.ref, ref=lead.ref, lead=lead)
        store_delivery(rig.runtime, rig.tenant, [event], hook_id=None, body=b"", flag_version=0, headers={})


def costs(rigs: Sequence[Rig], count: int, rounds: int) -> list[float]:
    """Milliseconds of CPU for a unit of `count` leads in each of `rigs`, measured in turns; the lower quartile each."""
    keep, inbox.BATCH_DELIVERIES = inbox.BATCH_DELIVERIES, count
    took: list[list[float]] = [[] for _ in rigs]
    try:
        for at in range(rounds + 1):
            for rig, times in zip(rigs, took, strict=True):
                decider = Decider(rig.runtime, lambda *_: None, lambda: 0)
                feed(rig, count)
                began = time.process_time()
                done = decider.run(rig.tenant.tenant_id)
                if done != count:
                    raise RuntimeError(f"decided {done} of {count}")
                if at:  # the first compiles the rules
                    times.append((time.process_time() - began) * 1000)
    finally:
        inbox.BATCH_DELIVERIES = keep
    return [statistics.quantiles(times, n=4)[0] for times in took]


def measure(one: Rig, many: Rig, agents: Sequence[int], say: Callable[[str], None], bound: Bound) -> None:
    """Tell what many rules and long queues cost. Takes about a minute; `agents` are 200 whom both rigs know."""
    for kind in KINDS:
        one.configure(ABC + rules(1, kind))
        many.configure(ABC + rules(500, kind))
        few, lot = costs([one, many], 50, 7)
        word = bound(f"500 rules {kind}", lot <= RULES_BOUND * few)
        say(
            f"- a unit of 50 leads, 500 rules {kind} of which none matches: {lot:.1f} ms of CPU, {lot / few:.2f} x "
            f"one rule (bound {RULES_BOUND:.0f}: {word})"
        )
    small = min(deciding(rules_of(1, kind), 5) for kind in KINDS)
    for kind in KINDS:
        large = deciding(rules_of(1000, kind), 200)
        word = bound(f"1000 rules {kind} and 200 members", large - small <= LARGE_BOUND)
        say(
            f"- deciding one lead by 1,000 rules {kind} in a queue of 200: {large:.2f} ms of CPU, "
            f"{large - small:+.2f} ms over 1 rule and 5 members (bound {LARGE_BOUND:.0f}: {word})"
        )
    one.configure(queue(agents[:5]) + rules(1, "by price"))
    many.configure(queue(agents) + rules(1000, "by price"))
    few, lot = costs([one, many], 1, 60)
    say(f"- the same with all that is read and written for one lead: {lot:.1f} ms, {lot - few:+.1f} ms")


def rules_of(count: int, kind: str) -> RuleSet:
    """The rules of :func:`rules`, compiled."""
    written = rules_as_written("version: 1\n" + rules(count, kind))
    return RuleSet([replace(rule, targets=(Target(TargetKind.QUEUE, UUID(int=1)),)) for rule in written])


def deciding(rule_set: RuleSet, members: int) -> float:
    """Milliseconds of CPU for deciding one lead that no rule takes: the rules, who is there, the pick, the record."""
    queue_id, ids = UUID(int=1), [UUID(int=n + 2) for n in range(members)]
    hours = Hours(dict.fromkeys(range(7), ((0, 1440),)))
    agents = {one: Agent(one, str(one), "Agent", zone="America/Chicago", hours=hours) for one in ids}
    line = new_line([(one, 1 + at % 3) for at, one in enumerate(ids)])
    queues = {queue_id: QueueState(queue_id, "All", line)}
    plan = Plan(1, frozenset(Flag), rule_set, queue_id, {queue_id: "All"})

    def decide() -> None:
        lead = new_lead()
        _, tried = plan.first_choice(lead, Role.OWNER)
        decision = Bench(plan, agents, queues, datetime.now(UTC)).decide(Case(UUID(int=1), lead, tried=tried))
        json.dumps(decision.record)

    took = []
    for _ in range(40):
        began = time.process_time()
        decide()
        took.append((time.process_time() - began) * 1000)
    return statistics.quantiles(took, n=4)[0]


def main() -> int:
    """The measurement by itself; 1 when a bound was missed."""
    missed: list[str] = []

    def bound(name: str, good: bool) -> str:
        if not good:
            missed.append(name)
        return "kept" if good else "MISSED"

    with homes.passing() as folder:
        settings = Settings(home=folder / "db", secret_keys=(Fernet.generate_key().decode(),), allow_private_hosts=True)
        with (
            EmbeddedPostgres(settings.home),
            open_runtime(settings, upgrade=True, threads=4) as runtime,
            Sandbox() as sandbox,
        ):
            run(runtime, sandbox, print, bound)
    return 1 if missed else 0


def run(runtime: Runtime, sandbox: Sandbox, say: Callable[[str], None], bound: Bound) -> None:
    """Measure on a tenant of its own."""
    sandbox.pause_dispatch()
    agents = [sandbox.add_agent(f"Agent {n}", zone="America/Chicago") for n in range(200)]
    rigs = []
    for name in ("one", "many"):
        rig = Rig(runtime, sandbox, "generic")
        rig.add_tenant(f"cpu-{name}-{time.monotonic_ns()}", config=None)
        rig.sync()
        rigs.append(rig)
    measure(*rigs, agents, say, bound)


if __name__ == "__main__":
    sys.exit(main())
