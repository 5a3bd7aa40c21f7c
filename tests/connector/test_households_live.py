"""Who has a household already, and phones of every country: known leads keep being found whatever is switched on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from connector import flags
from routing.model import Flag
from tests.rig import ABC, ANA, BEN, CY, Rig

HOUSEHOLD = ABC + "rules:\n- {name: household, to: same_household}\n- {name: rest, to: {queue: All}}\n"
OAK = {"street": "7 Oak Street, Apt. 4", "zip": "78701-1234"}
SAME = {"street": "7 OAK ST #4", "zip": "78701"}


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig("generic")


def lead(rig: Rig, **fields: Any) -> str:
    """A lead of nobody known, but for `fields`; its owner."""
    number = rig.one("SELECT count(*) FROM leads WHERE tenant_id = :t")
    plain = {"emails": [f"somebody{number}@example.com"], "phones": [], "street": f"{number} Elm Road", "zip": "10001"}
    ref = rig.create(**plain | fields)
    owner = rig.wait_owner(ref)
    rig.settle_owners()
    return owner


def switched(rig: Rig, mode: str) -> None:
    assert flags.switch(rig.runtime, rig.tenant.tenant_id, Flag.HOUSEHOLDS, mode, "test", force="as before")


def test_a_household_goes_to_who_has_it_without_a_turn(rig: Rig) -> None:
    rig.configure(HOUSEHOLD)
    assert [lead(rig, **OAK), lead(rig), lead(rig, **SAME)] == [ANA, BEN, ANA]
    assert rig.position() == 2
    other_flat = {"street": "7 Oak Street, Apt. 5", "zip": "78701"}
    assert lead(rig, **other_flat) == CY
    assert lead(rig, street="Oak Street", zip="78701") == ANA, "a street alone is no household; the line goes on"
    assert rig.position() == 4
    rig.audit()


def test_without_such_a_rule_a_household_means_nothing(rig: Rig) -> None:
    rig.configure(ABC)
    assert [lead(rig, **OAK), lead(rig, **SAME)] == [ANA, BEN]


def test_many_at_one_address_are_no_household_and_no_alarm(rig: Rig) -> None:
    rig.configure(ABC)
    for _ in range(6):
        lead(rig, **OAK)
    rig.configure(HOUSEHOLD)
    before = rig.position()
    lead(rig, **SAME)
    assert rig.position() == before + 1
    assert "shared_identity" not in rig.alarms()


def test_leads_of_before_are_found_as_households_once_the_chore_was_there(rig: Rig) -> None:
    switched(rig, "off")
    rig.configure(HOUSEHOLD)
    assert [lead(rig, **OAK), lead(rig, **SAME)] == [ANA, BEN], "off: no lead has a household"
    switched(rig, "on")
    rig.run_chore("identities")
    assert lead(rig, **SAME) in (ANA, BEN)
    assert rig.position() == 2


def test_phones_are_read_in_the_tenants_country_and_old_ones_still_match(rig: Rig) -> None:
    switched(rig, "off")
    rig.configure(ABC)
    assert lead(rig, phones=["(512) 555-0100"]) == ANA
    assert lead(rig, phones=["+1 512 555 0100"]) == ANA, "by the bare digits"
    assert lead(rig, phones=["030 5550100"]) == BEN
    assert lead(rig, phones=["+49 30 5550100"]) == CY, "bare digits do not know that the 0 is Germany's"
    switched(rig, "on")
    rig.configure("country: DE\n" + ABC)
    rig.run_chore("identities")
    assert lead(rig, phones=["512-555-0100"]) == ANA, "whoever was stored by bare digits is found by them"
    assert lead(rig, phones=["0049 30 5550100"]) in (BEN, CY)
    assert rig.position() == 3


def test_what_too_many_share_identifies_nobody_in_any_spelling(rig: Rig) -> None:
    switched(rig, "off")
    rig.configure(ABC)
    for _ in range(6):
        lead(rig, phones=["(512) 555-0199"])
    switched(rig, "on")
    rig.configure("country: US\n" + ABC)
    before = rig.position()
    lead(rig, phones=["+1 512 555 0199"])
    lead(rig, phones=["+1 512 555 0199"])
    assert rig.position() == before + 2
    assert "shared_identity" in rig.alarms()
