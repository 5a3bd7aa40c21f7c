"""Self-hosted CRMs on their first day: behind proxies, with few rights, under a wrong address.

What their servers answer of themselves is in the tests of each; here stands what others answer in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from adapters.client import CrmError, Outcome
from routing.model import UnassignedDefinition
from tests.adapters.conformance import lead
from tests.adapters.kit import NOW, AgentRow, LeadRow, Running, kit
from tests.adapters.kit_frappe import FakeFrappe
from tests.adapters.loopback import Received, Reply

CRMS = ("bottlecrm", "espocrm", "frappe", "odoo", "twenty")
URL = "https://hooks.example.com/hooks/token"
LONG_AGO = NOW - timedelta(days=3)
ODOO_REMOVES = [["unlink"], ["write"]]
ODOO_NO = {"error": {"data": {"name": "odoo.exceptions.AccessError", "message": "canary"}}}
REFUSALS = {"odoo": Reply(body=ODOO_NO), "frappe": Reply(403, {"exc_type": "PermissionError"})}


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


WRONG_KEY = {
    "bottlecrm": Reply(403, {"detail": "Organization context is required. Please login again."}),
    "odoo": Reply(body={"result": False}),
}


@pytest.mark.parametrize("name", CRMS)
def test_a_wrong_key_says_how_to_enter_another(name: str) -> None:
    this = kit(name)
    with this.running() as running:
        only(running, lambda asked: b'"version"' not in asked.body, WRONG_KEY.get(name, Reply(401)))
        first = next(f for f in this.adapter.check(running.client, URL) if not f.ok)
        assert "turnlock tenant secret" in first.fix
        assert first.what != "200"
        assert len(running.server.received) <= 2  # of Odoo the version, then the login


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


# -- what a server may refuse ----------------------------------------------------------------------------------------

OLD = "https://hooks.example.com/hooks/former"
NO = Reply(403, b"", {"X-Status-Reason": "No access."})


def test_frappe_disables_a_webhook_that_has_sent_something_and_takes_it_up_again() -> None:
    this = kit("frappe")
    with this.running() as running:
        fake = running.fake
        assert isinstance(fake, FakeFrappe)
        this.adapter.subscribe(running.client, URL)
        fake.logged |= {hook.ref for hook in fake.hooks}
        assert this.adapter.unsubscribe(running.client, URL) == 2
        assert [hook.active for hook in fake.hooks] == [False, False]
        left = this.adapter.subscribe(running.client, URL)
        assert (left.by_hand, len(left.hooks)) == ((), 2)
        assert [hook.active for hook in fake.hooks] == [True, True]


def test_espocrm_switches_a_webhook_off_that_may_not_be_removed() -> None:
    this = kit("espocrm")
    with this.running() as running:
        running.fake.add_hook("Lead.create", OLD)
        switched: list[Any] = []

        def answer(asked: Received) -> Reply:
            if asked.method == "DELETE":
                return NO
            if asked.method == "PUT":
                switched.append(asked.json)
                return Reply(body={})
            return running.fake.handle(asked)

        running.server.handle = answer
        left = this.adapter.subscribe(running.client, URL)
        assert (left.by_hand, len(left.hooks)) == ((), 3)
        assert switched == [{"isActive": False}]


@pytest.mark.parametrize("name", [name for name in CRMS if name != "bottlecrm"])
def test_a_hook_that_cannot_be_removed_stops_no_installation(name: str) -> None:
    this = kit(name)
    with this.running() as running:
        topic = sorted(this.adapter.topics)[0]
        stale = running.fake.add_hook(topic, OLD)
        no = REFUSALS.get(name, NO)
        only(running, lambda asked: removes(asked) or asked.method == "PUT", no)
        left = this.adapter.subscribe(running.client, URL)
        assert sorted(h.topic for h in left.hooks) == sorted(this.adapter.topics)
        (todo,) = left.by_hand
        assert stale.ref in todo


def removes(asked: Received) -> bool:
    """Whether a call removes or switches off a hook; of Odoo, whose calls are all alike, by its method."""
    return asked.method == "DELETE" or (asked.path == "/jsonrpc" and asked.json["params"]["args"][4:5] in ODOO_REMOVES)


def test_espocrm_may_know_no_way_to_keep_own_changes_back() -> None:
    this = kit("espocrm")
    with this.running() as running:
        refused = Reply(400, b"", {"X-Status-Reason": "Unknown attribute."})
        only(running, lambda asked: asked.method == "POST" and "skipOwn" in asked.json, refused)
        left = this.adapter.subscribe(running.client, URL)
        assert (left.by_hand, len(left.hooks)) == ((), 3)


def test_espocrm_may_know_no_zone_of_a_time() -> None:
    this = kit("espocrm")
    with this.running() as running:
        running.fake.add_leads(LeadRow("5001", created=NOW - timedelta(minutes=30)), LeadRow("old", created=LONG_AGO))
        refused = Reply(400, b"", {"X-Status-Reason": "Unknown parameter 'timeZone'."})
        only(running, lambda asked: "where[0][timeZone]" in asked.query, refused)
        pages = this.adapter.unassigned_since(running.client, NOW - timedelta(hours=1), UnassignedDefinition())
        assert list(pages) == [["5001"]]


@pytest.mark.parametrize("name", ["frappe", "odoo"])
def test_who_may_not_see_hooks_removes_none(name: str) -> None:
    this = kit(name)
    with this.running() as running:
        only(running, sees_hooks, REFUSALS[name])
        assert this.adapter.unsubscribe(running.client, URL) == 0


def sees_hooks(asked: Received) -> bool:
    if asked.path == "/jsonrpc":
        return asked.json["params"]["args"][3:4] in (["ir.actions.server"], ["base.automation"])
    return asked.path.endswith("/Webhook")


def asks(model: str, method: str = "") -> Callable[[Received], bool]:
    """Whether a call of Odoo is to this model, and this method of it."""

    def true(asked: Received) -> bool:
        args = asked.json["params"]["args"]
        return bool(args[3:4] == [model] and (not method or args[4] == method))

    return true


@pytest.mark.parametrize("told", ["odoo.exceptions.AccessError", "builtins.ValueError"])
@pytest.mark.parametrize("refused", [asks("crm.lead", "fields_get"), asks("crm.tag"), asks("res.users", "search_read")])
def test_odoo_shows_leads_to_a_user_of_few_rights(refused: Callable[[Received], bool], told: str) -> None:
    this = kit("odoo")
    with this.running() as running:
        running.fake.add_leads(LeadRow("5001", owner="12", collaborators=["3"]))
        fake = running.fake

        def answer(asked: Received) -> Reply:
            if refused(asked):
                return Reply(body={"error": {"data": {"name": told, "message": "canary"}}})
            if asks("crm.tag")(asked):
                return Reply(body={"result": []})
            reply = fake.handle(asked)
            if asks("crm.lead", "fields_get")(asked):
                reply.body["result"] |= {"tag_ids": {"type": "many2many"}}
            if asks("crm.lead", "search_read")(asked):
                for row in reply.body["result"]:
                    row["tag_ids"] = [4]
            return reply

        lead_rows, fake._lead = fake._lead, lambda row: lead_rows(row) | EMPTY  # type: ignore[attr-defined]
        running.server.handle = answer
        for _ in range(2):
            found = this.adapter.fetch_leads(running.client, ["5001"])["5001"]
            assert (found.owner_ref, found.emails) == ("12", ("canary@example.com",))


#: Fields that each Odoo has and the fake's leads show to nobody else.
EMPTY = dict.fromkeys(
    ("contact_name", "partner_name", "phone", "city", "zip", "country_id", "source_id", "team_id", "stage_id", "type",
     "expected_revenue", "tag_ids"), False
)  # fmt: skip


def test_odoo_without_automation_rules_says_which_app_lacks() -> None:
    this = kit("odoo")
    with this.running() as running:
        only(running, asks("ir.model", "search"), Reply(body={"result": []}))
        left = this.adapter.subscribe(running.client, URL)
        assert left.hooks == ()
        assert "base_automation" in left.by_hand[0]


def test_odoo_archives_a_rule_that_may_not_be_removed() -> None:
    this = kit("odoo")
    with this.running() as running:
        this.adapter.subscribe(running.client, URL)
        written: list[Any] = []

        def answer(asked: Received) -> Reply:
            if asks("base.automation", "unlink")(asked):
                return Reply(body=ODOO_NO)
            if asks("base.automation", "write")(asked):
                written.append(asked.json["params"]["args"][5][1])
                return Reply(body={"result": True})
            return running.fake.handle(asked)

        running.server.handle = answer
        assert this.adapter.unsubscribe(running.client, URL) == 1
        assert written == [{"active": False}]


@pytest.mark.parametrize(
    ("answer", "well"),
    [({"result": True}, True), ({"result": False}, False), (ODOO_NO, True),
     ({"error": {"data": {"name": "builtins.TypeError", "message": "canary"}}}, True)],
)  # fmt: skip
def test_a_user_who_sees_only_their_own_leads_is_told_so(answer: Any, well: bool) -> None:
    this = kit("odoo")
    with this.running() as running:
        running.fake.add_agents(AgentRow("12"))
        only(running, asks("res.users", "has_group"), Reply(body=answer))
        (found,) = (f for f in this.adapter.check(running.client, None) if f.where == "rights")
        assert found.ok == well
        assert well or "All Documents" in found.fix


@pytest.mark.parametrize("name", CRMS)
@pytest.mark.parametrize("status", [403, 417])
def test_a_test_lead_that_the_crm_keeps_is_told(name: str, status: int) -> None:
    this = kit(name)
    with this.running() as running:
        ref = this.adapter.add_test_lead(running.client, "Turnlock Test", "tl1@example.com", UnassignedDefinition())
        only(running, lambda asked: removes(asked), REFUSALS.get(name, Reply(status, {"error": "x"}, NO.headers)))
        error = failed(lambda: this.adapter.remove_test_lead(running.client, ref))
        assert error.outcome in (Outcome.FORBIDDEN, Outcome.REFUSED)


@pytest.mark.parametrize("name", ["frappe", "odoo", "twenty"])
def test_a_check_says_that_notes_cannot_be_written_and_goes_on(name: str) -> None:
    this = kit(name)

    def of_notes(asked: Received) -> bool:
        return b"mail.message" in asked.body or b"noteTargets" in asked.body or "Note" in asked.path

    with this.running() as running:
        running.fake.add_agents(AgentRow("12"))
        this.adapter.subscribe(running.client, URL)
        only(running, of_notes, REFUSALS.get(name, Reply(403, {"messages": ["No right."]})))
        assert [f.where for f in this.adapter.check(running.client, URL) if not f.ok] == ["notes"]
