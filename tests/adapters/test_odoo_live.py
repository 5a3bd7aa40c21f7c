"""Odoo in the running service: it posts inside a transaction that is still open, and may take it back."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest

from connector import decide
from tests.adapters.kit import NOW, LeadRow
from tests.adapters.test_conformance_live import Live, Make, make_live
from tests.rig import until

__all__ = ["make_live"]

LATER = NOW - timedelta(minutes=5)


def told(live: Live, ref: str) -> int:
    """Odoo posts a change of the lead that a reading does not show yet."""
    body, headers = live.tell(ref)
    written = f"{LATER:%Y-%m-%d %H:%M:%S}.250000"
    return live.send((json.dumps(json.loads(body) | {"write_date": written}).encode(), headers))


def waits(live: Live) -> bool:
    return any((event.state, event.reason) == ("waiting", "not_readable") for event in live.events())


def owned_by_us(live: Live) -> None:
    live.free("5001")
    live.send(live.tell("5001"))
    until(lambda: live.held_by("5001") == ["12"], what="an owner")
    live.settle_owners()


def test_a_lead_that_is_not_stored_yet_is_read_again(make_live: Callable[[str], Make]) -> None:
    live = make_live("odoo")()
    assert told(live, "5001") == 200
    until(lambda: waits(live), what="a first reading that shows nothing")
    live.fake.add_leads(LeadRow("5001", created=LATER))
    until(lambda: live.held_by("5001") == ["12"], what="an owner")
    live.in_step("5001")


def test_an_owner_that_is_cleared_is_no_echo_though_the_reading_is_old(make_live: Callable[[str], Make]) -> None:
    live = make_live("odoo")()
    owned_by_us(live)
    assert told(live, "5001") == 200
    until(lambda: waits(live), what="a first reading that shows the old owner")
    live.fake.leads["5001"].owner, live.fake.leads["5001"].created = None, LATER
    until(lambda: live.held_by("5001") == ["13"], what="the next owner")
    live.settle_owners()
    assert live.decisions("5001") == [("new", "assigned", "12"), ("released", "assigned", "13")]


def test_that_check_can_fail(make_live: Callable[[str], Make], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "_told_too_early", lambda item: False)
    live = make_live("odoo")()
    owned_by_us(live)
    assert told(live, "5001") == 200
    live.settle_owners()
    live.fake.leads["5001"].owner, live.fake.leads["5001"].created = None, LATER
    assert [event.state for event in live.events()] == ["done", "done"]  # an echo: nobody will ever look again


def test_what_was_taken_back_ends_with_the_lead_as_it_is(
    make_live: Callable[[str], Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = make_live("odoo")()
    monkeypatch.setattr(type(live.kit.adapter), "missing_is_final_after", 0.9)
    owned_by_us(live)
    assert told(live, "5001") == 200
    live.settle_owners()
    assert told(live, "5999") == 200  # a create that was taken back
    live.settle_owners()
    assert [event.state for event in live.events()] == ["done"] * 3
    live.in_step("5001")
    assert live.alarms() == set()
