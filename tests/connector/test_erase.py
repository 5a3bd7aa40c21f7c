"""A person is erased from everything that is stored, and nothing that the rotation rests on notices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from connector.settings import Settings
from routing.facts import identities
from routing.model import Lead
from routing.tables import metadata
from tests.connector.cli_rig import Cli, command_line
from tests.rig import ABC, ANA, BEN, CY, Rig, until

RULES = "rules: [{name: web, when: {field: city, equals: Nowhere}, to: {queue: All}}]\n"
KIM: dict[str, Any] = {
    "name": "Kim Quimby",
    "emails": ["Kim.Quimby@example.com"],
    "phones": ["(555) 555-0142"],
    "city": "Xanadu Springs",
}
WORDS = ("Kim Q", "Quimby", "555-0142", "5550142", "Xanadu")


@pytest.fixture
def turnlock(database: Settings) -> Iterator[Cli]:
    with command_line(database) as found:
        yield found


def found_in(rig: Rig, *words: str) -> set[tuple[str, str]]:
    """Every table and column of any type whose content holds one of the words, whatever their case."""
    hits = set()
    for table in metadata.tables.values():
        holds = []
        for column in table.columns:
            text = f"encode({column.name}, 'escape')" if isinstance(column.type, sa.LargeBinary) else column.name
            some = (f"position(lower(:w{n}) IN lower({text}::text)) > 0" for n in range(len(words)))
            holds.append(f"coalesce(bool_or({' OR '.join(some)}), false)")
        query = sa.text(f"SELECT {', '.join(holds)} FROM {table.name}")
        (row,) = rig.rows(query.bindparams(**{f"w{n}": word for n, word in enumerate(words)}))
        hits |= {(table.name, column.name) for column, hit in zip(table.columns, row, strict=True) if hit}
    return hits


def digests_left(rig: Rig) -> int:
    lead = Lead(ref="", emails=tuple(KIM["emails"]), phones=tuple(KIM["phones"]))
    digests = identities(rig.tenant.tenant_id, lead).all
    assert len(digests) == 2
    query = "SELECT count(*) FROM {} WHERE digest = ANY(:d)"
    return sum(int(rig.one(query.format(name), d=list(digests))) for name in ("identities", "lead_identities"))


@pytest.mark.parametrize("by", ["email", "phone", "ref"])
def test_a_person_is_erased_everywhere_and_the_line_does_not_notice(
    make_rig: Callable[..., Rig], turnlock: Cli, by: str
) -> None:
    rig = make_rig("generic", config=ABC + RULES)
    lead = {"name": "Lee Long", "emails": ["lee@example.com"], "phones": []}
    assert rig.assign(**lead) == ANA
    kim = rig.create(**KIM)
    assert rig.wait_owner(kim) == BEN
    rig.settle()
    # Genuine, unreadable, and it names them: parked with its body.
    body = json.dumps({"type": "lead.created", "data": {"leads": "Kim.Quimby@example.com"}}).encode()
    assert rig.post(body, event="evt_odd").status == 200
    held = {table for table, _ in found_in(rig, *WORDS)}
    assert {"lead_facts", "delivery_bodies", "decisions"} <= held
    assert digests_left(rig) == 4
    before = (rig.turns(), rig.next_up(count=5), rig.rows(sa.text("SELECT * FROM ledger ORDER BY 2, 3")))
    told = turnlock.json("explain", "acme", kim)

    who = {"email": "kim.quimby@EXAMPLE.com", "phone": "+1 555 555 0142", "ref": kim}[by]
    assert "Aborted" in turnlock("erase", "acme", who, code=1, text="n\n").stderr
    assert held == {table for table, _ in found_in(rig, *WORDS)}
    done = turnlock.json("erase", "acme", who, "--yes")
    assert (done["leads"], done["decisions"]) == (1, 1)
    assert done["bodies"] >= 1
    assert found_in(rig, *WORDS) == set()
    assert digests_left(rig) == 0
    assert "lead_facts" in {table for table, _ in found_in(rig, "lee@example.com")}  # nobody else

    assert before == (rig.turns(), rig.next_up(count=5), rig.rows(sa.text("SELECT * FROM ledger ORDER BY 2, 3")))
    rig.audit()
    after = turnlock.json("explain", "acme", kim)
    (test,) = after["decisions"][0]["rules"][0]["tests"]
    assert (test["result"], test["lead"]) == ("failed", None)
    told["decisions"][0]["rules"][0]["tests"][0]["lead"] = None
    assert after["decisions"] == told["decisions"]
    assert "nothing is known" in turnlock("erase", "acme", "nobody@example.com", "--yes", code=1).stderr
    assert rig.assign(**lead | {"emails": ["max@example.com"], "name": "Max Moon"}) == CY


def test_what_is_known_of_leads_goes_by_age_when_that_is_asked_for(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic", config=ABC + RULES)
    kim = rig.create(**KIM)
    rig.wait_owner(kim)
    rig.create(name="Lee Long", emails=["lee@example.com"])
    rig.settle()
    rig.wait_chores()
    rig.sql("UPDATE lead_facts SET read_at = read_at - interval '400 days' WHERE facts->>'name' = 'Kim Quimby'")
    rig.sql("UPDATE delivery_bodies SET received_at = received_at - interval '400 days' WHERE tenant_id = :t")
    rig.run_chore("retention")
    assert "lead_facts" in {table for table, _ in found_in(rig, "Quimby")}  # nobody asked
    object.__setattr__(rig.runtime.settings, "facts_retention_days", 365)
    rig.run_chore("retention")
    until(lambda: not found_in(rig, *WORDS), what="an end of what is known")
    assert digests_left(rig) == 0
    assert found_in(rig, "lee@example.com")
    rig.audit()
