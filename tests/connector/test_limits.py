"""What a CRM lets an account call, kept over all processes: nothing too much, owners first, nothing for a lone lead."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa

from adapters import registry
from adapters.base import Credentials
from adapters.budget import Bucket, Lane, Left, charges, left_by
from adapters.followupboss import FollowUpBoss
from adapters.hubspot_reading import BUCKETS
from connector import alive, breaker, buckets, daily, limits, tenants
from connector.alive import Life
from connector.database import make_engine, new_id, unit
from connector.limits import Limits, TenantGate, lane
from connector.runtime import Runtime
from tests.rig import Rig, until


@pytest.mark.parametrize(
    ("method", "path", "names"),
    [
        ("PUT", "/people/7", ["people"]),
        ("GET", "/people", ["global"]),
        ("GET", "/notes", ["global"]),
        ("POST", "/notes", ["notes"]),
        ("GET", "/events/3", ["events"]),
        ("POST", "/tasks", ["global"]),
    ],
)
def test_a_call_to_follow_up_boss_falls_into_one_context(method: str, path: str, names: list[str]) -> None:
    assert [bucket.name for bucket, _ in charges(FollowUpBoss.buckets, method, path)] == names


def test_searches_of_hubspot_are_counted_apart_and_every_call_counts_for_the_day() -> None:
    search = charges(BUCKETS, "POST", "/crm/v3/objects/contacts/search")
    assert [bucket.name for bucket, _ in search] == ["daily", "search"]
    assert [bucket.name for bucket, _ in charges(BUCKETS, "PATCH", "/crm/v3/objects/contacts/1")] == ["daily", "burst"]


def test_a_call_may_cost_more_than_one() -> None:
    tokens = Bucket("tokens", 100, 10.0, cost=lambda method, path: 20 if method == "GET" else 10)
    assert [cost for _, cost in charges([tokens], "GET", "/leads")] == [20]


@pytest.mark.parametrize("said", [{}, {"L": "25"}, {"L": "25", "R": "many"}, {"L": "２５", "R": "1"}])
def test_headers_that_do_not_say_how_much_is_left_say_nothing(said: dict[str, str]) -> None:
    assert left_by(said, "R", "L") is None


# -- the count in the database ------------------------------------------------------------------------------------

SMALL = Bucket("small", 10, 1.0)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_bucket_gives_what_it_holds_and_not_one_more_to_many_at_once(rig_at_rest: Rig, pooled: bool) -> None:
    tenant_id, settings = rig_at_rest.tenant.tenant_id, rig_at_rest.runtime.settings
    engine = make_engine(settings.database_url or "", pooled=pooled, pool_timeout=5)
    slow = replace(SMALL, window=60.0)  # so that no window is over before all have asked
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: buckets.take(engine, tenant_id, slow, 1, 10), range(24)))
    engine.dispose()
    assert sum(one.slot is not None for one in taken) == 10
    waits = [one.wait for one in taken if one.slot is None]
    assert all(0 < wait <= buckets.hold(slow) + slow.window / 100 for wait in waits)


def test_what_is_empty_is_full_again_when_it_said_so(rig_at_rest: Rig) -> None:
    runtime, tenant_id = rig_at_rest.runtime, rig_at_rest.tenant.tenant_id
    began = time.monotonic()
    assert buckets.take(runtime.engine, tenant_id, SMALL, 10, 10).slot is not None
    while (taken := buckets.take(runtime.engine, tenant_id, SMALL, 10, 10)).slot is None:
        time.sleep(taken.wait)
    assert SMALL.window <= time.monotonic() - began < 30


def test_what_is_used_later_than_it_was_taken_counts_from_then(rig_at_rest: Rig) -> None:
    runtime, tenant_id = rig_at_rest.runtime, rig_at_rest.tenant.tenant_id
    slot = buckets.take(runtime.engine, tenant_id, SMALL, 2, 10).slot
    assert slot is not None
    until(lambda: runtime_now(runtime) > (slot + 5) * SMALL.window / 100, what="a later slot")
    buckets.move(runtime.engine, tenant_id, SMALL, slot)
    row = rig_at_rest.rows(sa.text("SELECT slots, counts FROM buckets"))[0]
    assert row.counts == [1, 1]
    assert row.slots[0] == slot < row.slots[1]


def runtime_now(runtime: Runtime) -> float:
    with runtime.engine.connect() as conn:
        return float(conn.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())


def test_what_the_crm_says_that_others_took_is_not_there_for_us(rig_at_rest: Rig) -> None:
    runtime, tenant_id = rig_at_rest.runtime, rig_at_rest.tenant.tenant_id
    assert buckets.take(runtime.engine, tenant_id, SMALL, 3, 10).slot is not None
    buckets.hear(runtime.engine, tenant_id, SMALL, 8, None)  # 3 are ours, so 5 are others'
    with runtime.engine.connect() as conn:
        assert buckets.spent(conn, tenant_id, {"small": SMALL}) == {"small": (3, 0, 5)}
    assert buckets.take(runtime.engine, tenant_id, SMALL, 3, 10).slot is None
    assert buckets.take(runtime.engine, tenant_id, SMALL, 2, 10).slot is not None
    buckets.hear(runtime.engine, tenant_id, SMALL, 5, None)  # the CRM knows better
    assert buckets.take(runtime.engine, tenant_id, SMALL, 5, 10).slot is not None


# -- the gate of a process ----------------------------------------------------------------------------------------


class Living(Life):
    """So many processes, this one among them by its number, for long; 0: nobody knows how many."""

    def __init__(self, processes: int, number: int = 1) -> None:
        super().__init__()
        self.alive: list[int] | None = list(range(1, processes + 1)) or None
        self.shown = (number, 0.0) if processes else None

    def numbers(self) -> list[int] | None:
        return self.alive

    def known(self) -> tuple[int, float] | None:
        return self.shown


def gate(engine: sa.Engine, tenant_id: UUID, life: Life | None = None) -> TenantGate:
    """The gate of a process with this life; by default it has just started and knows nothing of others."""
    limits = Limits(engine, life or Living(0))
    return limits.gate(tenant_id, registry.adapter("followupboss"), Credentials(), at_home=True)


def taken_by(one: TenantGate, method: str = "PUT", path: str = "/people/7") -> int:
    """How many calls it lets through, one after the other, until it makes one wait."""
    return next(n for n in range(300) if one.take(method, path))


@pytest.fixture
def as_lane() -> Iterator[Callable[[Lane], None]]:
    """Call for the sake of this lane from now on."""
    before = lane.set(Lane.OWNERS)
    yield lane.set
    lane.reset(before)


def test_a_lone_lead_asks_nobody(rig_at_rest: Rig, as_lane: Callable[[Lane], None]) -> None:
    engine, tenant_id = rig_at_rest.runtime.engine, rig_at_rest.tenant.tenant_id
    asked: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda conn, cursor, statement, *_: asked.append(statement))
    alone = gate(engine, tenant_id, Living(1))
    assert alone.take("PUT", "/people/7") == 0.0  # the first of a process, by which it gets its part
    asked.clear()
    assert [alone.take("PUT", "/people/7") for _ in range(5)] == [0.0] * 5  # a fifth of 25
    assert asked == []
    assert alone.take("PUT", "/people/7") == 0.0
    assert asked != []
    one_of_eight = gate(engine, tenant_id, Living(8, 2))
    one_of_eight.take("GET", "/people")
    asked.clear()
    assert [one_of_eight.take("GET", "/people") for _ in range(6)] == [0.0] * 6  # an eighth of a fifth of 250
    assert asked == []
    one_of_eight.take("GET", "/people")
    assert asked != []


def test_a_fresh_installation_may_use_all_of_a_bucket_at_once(
    rig_at_rest: Rig, as_lane: Callable[[Lane], None]
) -> None:
    engine, tenant_id = rig_at_rest.runtime.engine, rig_at_rest.tenant.tenant_id
    assert taken_by(gate(engine, tenant_id)) == 25


def test_what_a_killed_process_kept_counts_until_it_is_seen_dead_and_one_window_longer(
    rig_at_rest: Rig, as_lane: Callable[[Lane], None]
) -> None:
    engine, tenant_id = rig_at_rest.runtime.engine, rig_at_rest.tenant.tenant_id
    killed = gate(engine, tenant_id, Living(1))
    assert killed.take("PUT", "/people/7") == 0.0
    a_window_passes(rig_at_rest)
    assert [killed.take("PUT", "/people/7") for _ in range(5)] == [0.0] * 5  # of its part: the database knows nothing
    assert taken_by(gate(engine, tenant_id)) == 20  # who has just started cannot tell that the other is dead
    a_window_passes(rig_at_rest)
    life = Living(1, number=2)
    life.alive = [2]
    limits_after = Limits(engine, life)
    after = limits_after.gate(tenant_id, registry.adapter("followupboss"), Credentials(), at_home=True)
    assert taken_by(after) == 20  # it sees now that the other is dead; since when, nobody knows
    a_window_passes(rig_at_rest)
    assert taken_by(gate(engine, tenant_id)) == 20  # all but what the living one keeps
    a_window_passes(rig_at_rest)
    limits_after.leave()
    assert taken_by(gate(engine, tenant_id)) == 25 - 5  # that one's own calls count from when it left
    a_window_passes(rig_at_rest)
    assert taken_by(gate(engine, tenant_id)) == 25


def test_a_worker_keeps_its_part_from_one_lead_to_the_next_and_gives_it_back_when_it_stops(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alive, "GRACE", 0.1)
    rig = make_rig(limits=True)
    until(lambda: rig.runtime.life.known(), what="that the process knows itself to be seen")
    until(lambda: rig.assign() and kept(rig), what="a part of its own")
    before = rig.one("SELECT slots FROM buckets WHERE tenant_id = :t AND bucket = 'people'")
    rig.assign()
    assert rig.one("SELECT slots FROM buckets WHERE tenant_id = :t AND bucket = 'people'") == before
    rig.stop_worker()
    assert kept(rig) == {}


def a_window_passes(rig: Rig) -> None:
    """By the database's count of the bucket of owner writes."""
    bucket = FollowUpBoss.buckets[1]
    slots = int(buckets.hold(bucket) / bucket.window * 100) + 2  # a call counts to the end of its slot
    rig.sql(
        "UPDATE buckets SET slots = (SELECT array_agg(CASE WHEN s < :parts THEN s - :slots ELSE s END ORDER BY at) "
        "FROM unnest(slots) WITH ORDINALITY AS x(s, at)) WHERE tenant_id = :t AND bucket = 'people'",
        parts=buckets._PARTS,
        slots=slots,
    )


def test_who_was_taken_for_dead_meanwhile_asks_again_before_it_uses_what_it_kept(
    rig_at_rest: Rig, as_lane: Callable[[Lane], None]
) -> None:
    engine, tenant_id = rig_at_rest.runtime.engine, rig_at_rest.tenant.tenant_id
    life = Living(1)
    one = gate(engine, tenant_id, life)
    assert one.take("PUT", "/people/7") == 0.0
    life.shown = None  # its lock is lost
    others = Living(1, number=2)
    others.alive = [2]
    assert taken_by(gate(engine, tenant_id, others)) == 25 - 1 - 5
    assert one.take("PUT", "/people/7") > 0
    life.shown = (1, 1.0)  # and is there again
    assert one.take("PUT", "/people/7") > 0


def test_who_kept_a_part_of_the_bucket_keeps_less_of_it_as_soon_as_there_are_more_processes(
    rig_at_rest: Rig, as_lane: Callable[[Lane], None]
) -> None:
    engine, tenant_id = rig_at_rest.runtime.engine, rig_at_rest.tenant.tenant_id
    life = Living(1)
    one, two = gate(engine, tenant_id, life), gate(engine, tenant_id, Living(2, number=2))
    assert [one.take("GET", "/people") for _ in range(4)] == [0.0] * 4
    assert two.take("GET", "/people") == 0.0
    assert kept(rig_at_rest) == {1: 50}  # a fifth, of which nothing is left for the other
    life.alive = [1, 2]
    assert [each.take("GET", "/people") for each in (one, two)] == [0.0, 0.0]
    assert kept(rig_at_rest) == {1: 25, 2: 25}


def kept(rig: Rig) -> dict[int, int]:
    """What processes keep of the bucket of all calls, by their numbers."""
    (row,) = rig.rows(sa.text("SELECT slots, counts FROM buckets WHERE bucket = 'global'"))
    return {s - buckets._PARTS: n for s, n in zip(row.slots, row.counts, strict=True) if s >= buckets._PARTS}


def test_all_processes_together_never_take_more_than_the_crm_lets_them(
    rig_at_rest: Rig, as_lane: Callable[[Lane], None]
) -> None:
    runtime, tenant_id = rig_at_rest.runtime, rig_at_rest.tenant.tenant_id
    gates = [gate(runtime.engine, tenant_id, Living(3, number)) for number in (1, 2, 3)]

    def rush(one: TenantGate) -> int:
        lane.set(Lane.OWNERS)  # each thread says for itself
        return sum(one.take("PUT", "/people/7") == 0.0 for _ in range(25))

    with ThreadPoolExecutor(6) as pool:
        got = sum(pool.map(rush, gates * 2))
    assert got == 25


def test_owners_have_a_share_that_notes_and_chores_cannot_take(
    rig_at_rest: Rig, as_lane: Callable[[Lane], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = gate(rig_at_rest.runtime.engine, rig_at_rest.tenant.tenant_id, Living(1))
    monkeypatch.setattr(limits, "_PATIENCE", 0.0)
    as_lane(Lane.CHORES)
    assert taken_by(one, "GET", "/people") == 250 - 50 - 50  # what is dealt out, and what is kept for owners
    as_lane(Lane.NOTES)
    assert one.take("GET", "/notes") > 0
    as_lane(Lane.OWNERS)
    assert taken_by(one, "GET", "/people") == 50 + 50


def test_a_write_that_was_begun_has_what_it_needs_though_all_else_is_gone(
    rig_at_rest: Rig, as_lane: Callable[[Lane], None]
) -> None:
    runtime, tenant_id = rig_at_rest.runtime, rig_at_rest.tenant.tenant_id
    one = runtime.limits.gate(tenant_id, registry.adapter("followupboss"), Credentials(), at_home=True)
    with runtime.limits.row(tenant_id, Lane.OWNERS) as now:
        assert now
        with ThreadPoolExecutor(1) as pool:
            pool.submit(exhaust, one).result()
        assert [one.take("GET", "/people"), one.take("PUT", "/people/7"), one.take("GET", "/people")] == [0.0] * 3
        assert one.take("PUT", "/people/7") > 0
    with runtime.limits.row(tenant_id, Lane.OWNERS) as now:
        assert not now
    assert (
        0 < runtime.limits.next_look(60.0) <= buckets.hold(FollowUpBoss.buckets[1]) + 0.2
    )  # a slot is a fiftieth of a window


def exhaust(one: TenantGate) -> None:
    """Another thread takes all that there is for owners."""
    lane.set(Lane.OWNERS)
    for method, path in (("GET", "/people"), ("PUT", "/people/7")):
        while not one.take(method, path):
            pass


def test_an_answer_that_says_less_is_left_is_believed(rig_at_rest: Rig, as_lane: Callable[[Lane], None]) -> None:
    one = gate(rig_at_rest.runtime.engine, rig_at_rest.tenant.tenant_id)
    one.told("PUT", "/people/7", {"X-RateLimit-Limit": "25", "X-RateLimit-Remaining": "2"}, None)
    assert taken_by(one) == 2
    assert one.take("GET", "/people") == 0.0


def test_limits_count_at_the_crm_itself_and_elsewhere_once_an_answer_tells_of_them(
    rig_at_rest: Rig, as_lane: Callable[[Lane], None]
) -> None:
    runtime, tenant_id = rig_at_rest.runtime, rig_at_rest.tenant.tenant_id
    elsewhere = runtime.limits.gate(tenant_id, registry.adapter("followupboss"), Credentials(), at_home=False)
    assert [elsewhere.take("PUT", "/people/7") for _ in range(50)] == [0.0] * 50
    elsewhere.told("PUT", "/people/7", {"X-RateLimit-Limit": "25", "X-RateLimit-Remaining": "24"}, None)
    assert any(elsewhere.take("PUT", "/people/7") for _ in range(50))


@pytest.mark.parametrize(("of", "window", "waits"), [(Lane.CHORES, 0.2, True), (Lane.OWNERS, 60.0, False)])
def test_a_chore_waits_a_moment_where_it_stands_for_it_cannot_put_its_place_down(
    rig_at_rest: Rig,
    as_lane: Callable[[Lane], None],
    monkeypatch: pytest.MonkeyPatch,
    of: Lane,
    window: float,
    waits: bool,
) -> None:
    monkeypatch.setattr(FollowUpBoss, "buckets", (Bucket("global", 5, window),))
    one = gate(rig_at_rest.runtime.engine, rig_at_rest.tenant.tenant_id)
    taken = buckets.take(rig_at_rest.runtime.engine, rig_at_rest.tenant.tenant_id, one.table[0], 5, 5)
    assert taken.slot is not None
    as_lane(of)
    assert (one.take("GET", "/people") == 0.0) is waits


# -- budgets that the CRM counts ----------------------------------------------------------------------------------

DAY = Bucket("daily", 0, 86400.0, kept=0.1)


@pytest.mark.parametrize(
    ("of", "left", "waits"),
    [
        (Lane.NOTES, 500, True),
        (Lane.TASKS, 500, True),
        (Lane.CHORES, 500, True),
        (Lane.CHORES, 501, False),
        (Lane.OWNERS, 0, False),
        (Lane.COMMANDS, 0, False),
    ],
)
def test_what_is_left_of_a_day_is_for_owners_until_a_quarter_of_an_hour_after_it_was_told(
    rig_at_rest: Rig, monkeypatch: pytest.MonkeyPatch, of: Lane, left: int, waits: bool
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(daily, "time", clock)
    one = daily.Budgets(rig_at_rest.runtime.engine, rig_at_rest.tenant.tenant_id, (DAY,))
    assert one.wait(DAY, of) == 0.0  # nothing was told yet
    one.hear(DAY, Left(left, 5000), Lane.OWNERS)
    assert one.wait(DAY, of) == (900.0 if waits else 0.0)
    clock.now += 900.0  # a note or chore must ask, or it would never hear that the day is over
    assert one.wait(DAY, of) == 0.0


def test_the_alarm_of_a_day_is_closed_by_any_process_that_hears_better_but_never_while_an_owner_waits(
    rig_at_rest: Rig,
) -> None:
    rig, asked = rig_at_rest, []
    one, other = (daily.Budgets(rig.runtime.engine, rig.tenant.tenant_id, (DAY,)) for _ in range(2))
    sa.event.listen(rig.runtime.engine, "before_cursor_execute", lambda *statement: asked.append(statement[2]))
    one.hear(DAY, Left(1000, 5000), Lane.OWNERS)
    assert asked == []
    one.hear(DAY, Left(999, 5000), Lane.OWNERS)
    assert rig.alarms() == {"crm_budget_low"}
    one.hear(DAY, Left(1249, 5000), Lane.CHORES)
    assert rig.alarms() == {"crm_budget_low"}  # it must not flap
    asked.clear()
    other.hear(DAY, Left(4999, 5000), Lane.OWNERS)
    assert asked == []
    other.hear(DAY, Left(4998, 5000), Lane.CHORES)
    assert rig.alarms() == set()
    one.hear(DAY, Left(1250, 5000), Lane.OWNERS)
    one.hear(DAY, Left(999, 5000), Lane.OWNERS)
    assert rig.alarms() == {"crm_budget_low"}


def test_notes_are_limited_by_their_bucket_and_delay_no_owner(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = tuple(
        replace(bucket, window=1.0, limit=2 if bucket.name == "notes" else bucket.limit)
        for bucket in FollowUpBoss.buckets
    )
    monkeypatch.setattr(FollowUpBoss, "buckets", quick)
    rig = make_rig(limits=True, rate_window=1.0, limit_notes=2)
    rig.first_round()
    refs = rig.burst(6)
    assert rig.sandbox.counts()["notes"] < 6
    rig.settle()
    assert [len(rig.sandbox.lead(int(ref))["notes"]) for ref in refs] == [1] * 6  # type: ignore[index]
    assert [call for call in rig.sandbox.call_log() if call["status"] == 429] == []


def test_check_shows_what_is_allowed_and_what_was_taken(rig_at_rest: Rig) -> None:
    runtime, tenant_id = rig_at_rest.runtime, rig_at_rest.tenant.tenant_id
    buckets.take(runtime.engine, tenant_id, FollowUpBoss.buckets[1], 3, 25)
    with runtime.engine.begin() as conn:
        breaker.shut_breaker(conn, tenant_id, seconds=60, reason="crm_asked_to_wait", lane="note")
    found = {one.where: one.what for one in tenants.check(runtime, rig_at_rest.tenant)}
    assert (
        found["limit people"]
        == "25 in 600 s; counted lately: 3, dealt out to processes: 0, by others of the account: 0"
    )
    assert re.fullmatch(r"notes until [0-9:]{8} UTC: crm_asked_to_wait", found["pause"])


@pytest.fixture
def rig_at_rest(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A tenant without a worker, and windows that no busy machine sees the end of."""
    long = tuple(replace(bucket, window=600.0) for bucket in FollowUpBoss.buckets)
    monkeypatch.setattr(FollowUpBoss, "buckets", long)
    rig: Rig = make_rig(worker=False)
    return rig


def test_a_probe_whose_process_died_keeps_nobody_waiting(rig_at_rest: Rig) -> None:
    rig = rig_at_rest
    tenant_id, life = rig.tenant.tenant_id, Life()
    url = rig.runtime.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)

    def asked(lease: UUID) -> tuple[float, bool]:
        with unit(rig.runtime.engine) as (conn, _):
            wait, mine = breaker.admit(conn, tenant_id, lease)
            return wait, mine is not None

    with unit(rig.runtime.engine) as (conn, _):
        breaker.shut_breaker(conn, tenant_id, seconds=0.0, reason="crm_asked_to_wait")
    with psycopg.connect(url, autocommit=True) as session, life.held(session):
        assert asked(life.new_lease()) == (0.0, True)
        wait, is_probe = asked(new_id())
        assert wait > 0
        assert not is_probe
    until(lambda: asked(new_id()) == (0.0, True), 5, "a probe in the place of the dead one")
    wait, is_probe = asked(new_id())  # of a process that does not show whether it lives
    assert wait > 0
    assert not is_probe
