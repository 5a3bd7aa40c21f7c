"""`turnlock test-lead`: one marked lead all the way, to the chosen agent, without a turn, and away again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from connector import testing
from connector.errors import TurnlockError
from routing.model import Lead
from tests.rig import ANA, CY, Rig, until

LEAVE = """
default_queue: All
queues:
  All: {members: ['12', '13', '14']}
rules:
- {name: nobody, when: {field: email, contains: "@"}, to: leave_alone}
"""


@pytest.mark.parametrize("crm", ["hubspot", "followupboss"])
def test_a_test_lead_goes_to_its_agent_without_a_turn_and_is_removed(make_rig: Callable[..., Rig], crm: str) -> None:
    live = make_rig(crm)
    assert live.assign() == ANA
    live.settle()
    way = testing.send(live.runtime, live.tenant, live.agent_id(CY), patience=20)
    assert way.whole
    assert way.removed
    assert way.heard is not None
    assert way.noted is not None
    assert (way.heard <= way.owned) if way.owned else False
    assert live.sandbox.lead(int(way.ref)) is None
    until(lambda: live.standing(way.ref)["state"] == "gone", what="the end of it")
    assert live.decisions(way.ref) == [("new", "assigned", CY)]
    assert live.position() == 1  # the rotation goes on as if nothing had been
    live.settle()
    live.audit()
    assert live.alarms() == set()


def test_rules_do_not_come_into_it_and_a_stopped_service_is_told(make_rig: Callable[..., Rig]) -> None:
    live = make_rig("hubspot", config=LEAVE)
    way = testing.send(live.runtime, live.tenant, live.agent_id(CY), patience=20, keep=True)
    assert (live.owner(way.ref), way.removed) == (CY, False)
    live.stop_worker()
    way = testing.send(live.runtime, live.tenant, live.agent_id(CY), patience=2)
    assert way.heard is not None
    assert (way.decided, way.whole, way.removed) == (None, False, True)
    live.sandbox.webhook_faults(drop=1.0)
    live.sandbox.fault("status", method="DELETE", status=403)  # some CRMs remove nothing that has been worked on
    way = testing.send(live.runtime, live.tenant, live.agent_id(CY), patience=1)
    assert (way.heard, way.removed) == (None, False)


def test_a_mark_is_the_tenants_own_cannot_be_made_up_and_ends(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("generic", worker=False)
    now = datetime.now(UTC)
    tenant, agent = rig.tenant.tenant_id, uuid4()
    good = testing.mark(rig.runtime, tenant, agent, now)
    assert len(good.partition("@")[0]) <= 64
    later = now + timedelta(seconds=testing.LIVES + 1)

    def chosen(email: str, at: datetime = now, of: object = tenant) -> object:
        return testing.chosen(rig.runtime, of, Lead(ref="1", emails=("a@example.com", email)), at)  # type: ignore[arg-type]

    assert chosen(good) == agent
    assert chosen(good, later) is None
    assert chosen(good, of=uuid4()) is None
    other = "1" if good[-13] == "0" else "0"
    named = Lead(ref="1", name=f"Turnlock Test {good}")  # where leads have no address
    assert testing.chosen(rig.runtime, tenant, named, now) == agent
    forged = [good[:2] + uuid4().hex + good[34:], good[:-13] + other + good[-12:], good.replace("example.com", "x.com")]
    assert [chosen(email) for email in forged] == [None] * 3
    with pytest.raises(TurnlockError, match="by hand"):
        testing.send(rig.runtime, rig.tenant, agent, patience=1)
