"""Self-hosted CRMs on their first day: behind proxies, with few rights, under a wrong address.

What their servers answer of themselves is in the tests of each; here stands what others answer in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adapters.client import CrmError, Outcome
from tests.adapters.conformance import lead
from tests.adapters.kit import AgentRow, LeadRow, Running, kit
from tests.adapters.loopback import Received, Reply

CRMS = ("bottlecrm", "espocrm", "frappe", "odoo", "twenty")
URL = "https://hooks.example.com/hooks/token"


def failed(call: Callable[[], Any]) -> CrmError:
    with pytest.raises(CrmError) as caught:
        call()
    return caught.value


# -- behind a proxy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CRMS)
@pytest.mark.parametrize("body", [b"404 page not found", b"<html>No such app</html>", b"", b'{"error": "no route"}'])
def test_a_404_of_a_proxy_says_nothing_of_a_lead(name: str, body: bytes) -> None:
    this = kit(name)
    with this.running() as running:
        running.fake.add_leads(LeadRow("5001"))
        running.server.handle = lambda _: Reply(404, body)
        for call in (
            lambda: this.adapter.fetch_leads(running.client, ["5001"]),
            lambda: this.adapter.set_owner(running.client, lead(), "12"),
            lambda: list(this.adapter.list_agents(running.client)),
        ):
            error = failed(call)
            # The tenant waits, all of it, until the CRM is back: nothing is over, and no try is used up.
            assert (error.outcome, error.retry_after) == (Outcome.WAIT, 10.0)
            assert "base address" in error.text
        running.server.handle = running.fake.handle
        assert this.adapter.fetch_leads(running.client, ["5001"]).keys() == {"5001"}


@pytest.mark.parametrize("name", [name for name in CRMS if kit(name).missing is not None])
def test_a_404_of_the_crm_itself_does(name: str) -> None:
    this = kit(name)
    with this.running() as running:
        running.fake.add_leads(LeadRow("5001"))
        own = Reply(404, this.missing, this.refusal)
        running.server.handle = lambda asked: own if this.writes(asked) else running.fake.handle(asked)
        assert failed(lambda: this.adapter.set_owner(running.client, lead(), "12")).outcome is Outcome.GONE


@pytest.mark.parametrize("name", [name for name in CRMS if kit(name).missing is not None])
def test_users_are_never_all_gone(name: str) -> None:
    this = kit(name)
    with this.running() as running:
        running.server.handle = lambda _: Reply(404, this.missing, this.refusal)
        error = failed(lambda: list(this.adapter.list_agents(running.client)))
        assert error.outcome is Outcome.ANSWER_UNREADABLE
        assert "base address" in error.text


def test_leads_are_not_gone_where_the_site_has_no_crm() -> None:
    this = kit("frappe")
    with this.running() as running:
        running.server.handle = lambda _: Reply(404, {"exc_type": "DoesNotExistError"})
        error = failed(lambda: this.adapter.fetch_leads(running.client, ["5001"]))
        assert error.outcome is Outcome.ANSWER_UNREADABLE
        assert "Frappe CRM" in error.text


# -- the first check -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CRMS)
@pytest.mark.parametrize(
    "reply", [Reply(401), Reply(404, b"not here"), Reply(307, headers={"Location": "https://other.example.com/"})]
)
def test_a_check_asks_no_more_once_all_is_said(name: str, reply: Reply) -> None:
    this = kit(name)
    with this.running() as running:
        running.fake.add_agents(AgentRow("12"))
        running.server.handle = lambda _: reply
        findings = [f for f in this.adapter.check(running.client, URL) if not f.ok]
        assert len(running.server.received) == 1  # EspoCRM locks an address out after ten wrong logins in a minute
        assert len(findings) >= 2
        assert all(f.fix for f in findings)


def only(running: Running, true: Callable[[Received], bool], reply: Reply) -> None:
    """Have the CRM answer `reply` to the calls for which `true` holds."""
    running.server.handle = lambda asked: reply if true(asked) else running.fake.handle(asked)


def test_a_check_goes_on_where_one_right_lacks() -> None:
    this = kit("espocrm")
    with this.running() as running:
        running.fake.add_agents(AgentRow("12"))
        only(running, lambda asked: "/Lead" in asked.path, Reply(403, b"", {"X-Status-Reason": "No access."}))
        found = {f.where: f.ok for f in this.adapter.check(running.client, None)}
        assert found == {"user": True, "rights": True, "collaborators": True, "clock": True, "leads": False,
                         "agents": True, "hooks": True}  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (Reply(403), "too many wrong logins"),
        (Reply(403, b"", {"X-Status-Reason": "Assignment failure: assigned user or team not allowed."}), "Assignment"),
        (Reply(403, b"", {"X-Status-Reason": "No edit access."}), "Give that user the right"),
    ],
)
def test_each_refusal_of_espocrm_has_its_own_remedy(reply: Reply, word: str) -> None:
    this = kit("espocrm")
    with this.running() as running:
        running.server.handle = lambda _: reply
        assert word in failed(lambda: this.adapter.set_owner(running.client, lead(), "12")).text
