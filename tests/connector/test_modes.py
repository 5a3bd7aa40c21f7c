"""Flags that change all the time: every lead is decided in one mode of each, and the CRM hears what that says."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa

from connector import flags
from connector.errors import TurnlockError
from routing.model import Flag
from routing.stages import Mode, Stage, lower, modes_of
from tests.rig import Rig, until

SOURCES = ("Web", "Zillow")
CONFIG = (
    "default_queue: All\nqueues:\n  All: {members: [{agent: '12', weight: 3}, '13', '14']}\n  Two: {members: ['13']}\n"
    "rules: [{name: web, when: {field: tags, contains: web}, to: {queue: Two}}]\n"
)
#: What flips: each flag goes round these, with its limits.
ROUND: list[dict[str, Any]] = [
    {"mode": "off"},
    {"mode": "shadow"},
    {"mode": "shadow", "sources": ["Web"]},
    {"mode": "on", "percent": 50},
    {"mode": "on", "sources": ["zillow"]},
    {"mode": "on"},
]


@pytest.mark.parametrize("leads", [150, pytest.param(2000, marks=pytest.mark.proof)])
def test_flags_flipped_every_50_ms_give_each_lead_one_mode(make_rig: Callable[..., Rig], leads: int) -> None:
    rig = make_rig(crm="generic", config=CONFIG)
    stop, flips, draw = threading.Event(), Counter[str](), random.Random(20)

    def flip() -> None:
        while not stop.wait(0.05):
            flag = draw.choice((Flag.WRITE_BACK, Flag.ROTATION, Flag.RULES))
            with suppress(sa.exc.OperationalError, TurnlockError):  # the queue was busy; or the order of the flags
                order = draw.choice(ROUND) | {"force": "a flip"}
                flips[f"{flag} {order['mode']}"] += flags.switch(
                    rig.runtime, rig.tenant.tenant_id, flag, actor="test", **order
                )

    flipping = threading.Thread(target=flip)
    flipping.start()
    for number in range(leads):
        rig.create(source=SOURCES[number % 2], tags=["web"] if number % 5 == 0 else [])
    query = "SELECT count(*) FROM decisions WHERE tenant_id = :t AND role = 'owner'"
    until(lambda: rig.one(query) == leads, 120, "a decision about every lead")
    stop.set()
    flipping.join()
    rig.settle_owners()
    assert sum(flips.values()) > 5

    writes = Counter(str(write["lead"]) for write in rig.owner_writes())
    seen = Counter[str]()
    for row in decided(rig):
        beside = set(row.beside or [])
        modes = row.record.get("modes", {})
        told = writes[row.ref]
        # One mode of each flag: the live path and its shadow never both, and never twice.
        assert row.decisions == 1
        assert told == row.ordered <= 1
        assert not (told and "write_back" in beside)
        assert not (row.turn is not None and "rotation" in beside)
        # And it is the mode that the lead was given.
        for flag, did in (("write_back", bool(told)), ("rotation", row.turn is not None)):
            if flag in modes:
                assert did == (modes[flag] == "on"), (flag, modes)
                assert (flag in beside) == (modes[flag] == "shadow"), (flag, modes, beside)
                seen[f"{flag} {modes[flag]}"] += 1
        assert ("rules" in beside) == (modes.get("rules") == "shadow")
    if leads > 1000:
        assert set(seen) == {f"{flag} {mode}" for flag in ("write_back", "rotation") for mode in Mode}
    assert rig.one("SELECT count(*) FROM shadow_records WHERE tenant_id = :t AND verdict = 'error'") == 0
    assert rig.most_tries() == 0
    rig.turns()
    rig.audit()


def decided(rig: Rig) -> list[Any]:
    """Each decision about an owner with the lead's CRM id, writes ordered, and the flags whose shadow noted it."""
    return rig.rows(
        sa.text(
            "SELECT r.ref, d.turn, d.record, count(*) OVER (PARTITION BY d.lead_id) AS decisions, "
            "(SELECT count(*) FROM outbox o WHERE o.tenant_id = d.tenant_id AND o.lead_id = d.lead_id "
            " AND o.kind = 'owner') AS ordered, "
            "(SELECT array_agg(s.flag) FROM shadow_records s WHERE s.tenant_id = d.tenant_id "
            " AND s.lead_id = d.lead_id) AS beside "
            "FROM decisions d JOIN lead_refs r ON r.tenant_id = d.tenant_id AND r.lead_id = d.lead_id "
            "WHERE d.tenant_id = :t AND d.role = 'owner'"
        ).bindparams(t=rig.tenant.tenant_id)
    )


# -- the rule by itself -------------------------------------------------------------------------------------------

ON, SHADOW, OFF = Stage(Mode.ON), Stage(Mode.SHADOW), Stage(Mode.OFF)
WEB = Stage(Mode.ON, sources=("Web",))
SHADOW_WEB = Stage(Mode.SHADOW, sources=("Web",))


@pytest.mark.parametrize(
    ("now", "stamped", "kept", "source", "mode"),
    [
        (ON, None, None, "Web", None),  # nothing is staged: the flag is simply on
        (OFF, None, None, "Web", None),
        (SHADOW, None, None, "Web", "shadow"),
        (WEB, None, None, "web ", "on"),
        (WEB, None, None, "Zillow", "off"),
        (WEB, None, None, None, "off"),
        (ON, WEB, None, "Zillow", "off"),  # as it was when the event was accepted
        (ON, WEB, None, "Web", "on"),
        (ON, SHADOW_WEB, None, "Web", "off"),  # the shadow has ended; the live path is the same
        (ON, ON, None, "Web", None),
        (ON, None, "off", "Web", "off"),  # an open decision keeps its mode when the flag goes forward ...
        (ON, None, "shadow", "Web", "off"),
        (SHADOW, None, "on", "Web", "shadow"),  # ... and goes back with it
        (OFF, WEB, "on", "Web", "off"),
        (OFF, WEB, None, "Web", "off"),
        (SHADOW_WEB, WEB, None, "Web", "shadow"),
    ],
)
def test_the_mode_of_a_lead(now: Stage, stamped: Stage | None, kept: str | None, source: str | None, mode: str) -> None:
    def only(value: Any) -> Mapping[Flag, Any]:
        return {} if value is None else {Flag.SKIPS: value}

    found = modes_of(UUID(int=5), source, now=only(now), stamped=only(stamped), kept=only(Mode(kept) if kept else None))
    assert found == only(Mode(mode) if mode else None)


def test_modes_have_an_order() -> None:
    assert [lower(Mode.ON, mode) for mode in Mode] == [Mode.OFF, Mode.SHADOW, Mode.ON]
    assert [lower(mode, Mode.OFF) for mode in Mode] == [Mode.OFF] * 3


def test_a_percentage_is_that_of_the_leads_and_grows_by_inclusion() -> None:
    leads = [uuid4() for _ in range(4000)]
    before: set[UUID] = set()
    for percent in (1, 25, 50, 99, 100):
        stage = Stage(Mode.ON, percent=percent)
        within = {lead for lead in leads if stage.mode_of(lead, None) is Mode.ON}
        assert before <= within
        assert abs(len(within) - 40 * percent) < 200
        before = within
    assert before == set(leads)
