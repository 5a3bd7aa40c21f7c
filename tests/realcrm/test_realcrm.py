"""A real BottleCRM and a real ``turnlock serve``: signed webhooks in, owners out, whatever one of them does.

One CRM and one installation for the whole module, because a CRM takes long to start. The tests stand in the order of a
day's work; each leaves both sides quiet.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.realcrm.bottlecrm_up import BottleCrm
from tests.realcrm.turnlock_up import Turnlock

pytestmark = [pytest.mark.realcrm, pytest.mark.timeout(600)]
EVENTS = ["lead.created", "lead.updated", "lead.deleted"]
_people = itertools.count(1)


def until(true: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Wait for something that happens in another process; gives what `true` gave."""
    ends = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < ends, f"{what} never happened"
        time.sleep(0.1)
    return found


class House:
    """The CRM with agents Ana, Ben and Cy, and Turnlock installed in it as its guide says."""

    def __init__(self, crm: BottleCrm, turnlock: Turnlock, folder: Path) -> None:
        self.crm, self.turnlock, self._folder = crm, turnlock, folder
        self.users: dict[str, Any] = {}
        for name in ("ana", "ben", "cy"):
            self.add_user(name)
        scopes = ["leads:read", "leads:write", "users:read"]
        token = self.admin("POST", "/profile/tokens/", {"name": "turnlock", "scopes": scopes}, status=201)
        self.token: str = token["token"]
        turnlock.serve()
        turnlock.run(
            "tenant", "add", "acme", "--crm", "bottlecrm", "--base-url", crm.url, "--secret", "api_token",
            api_token=self.token,
        )  # fmt: skip
        installed = turnlock.json("install", "acme")
        url = turnlock.json("tenant", "hook", "acme")["url"]
        assert url in installed["by_hand"][0]
        # By hand: what `install` asks the admin to do.
        hook = self.admin("POST", "/webhooks/", {"url": url, "events": EVENTS, "format": "json"}, status=201)
        self.hook: str = hook["id"]
        turnlock.run("tenant", "secret", "acme", "webhook_secret", webhook_secret=hook["secret"])
        self.configure("All", All=("ana", "ben", "cy"))

    # -- the CRM ------------------------------------------------------------------------------------------
    def admin(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        """What a person does who is signed in as the admin."""
        found, answer = self.crm.call(method, path, body)
        assert found == status, (method, path, found, answer)
        return answer

    def add_user(self, name: str) -> None:
        """The admin invites somebody; the name is the address up to the @."""
        self.admin("POST", "/users/", {"email": f"{name}@example.com", "role": "USER", "phone": ""}, status=201)
        profiles = self.admin("GET", "/users/?limit=100")["active_users"]["active_users"]
        self.users |= {profile["user_details"]["name"]: profile for profile in profiles}
        self.refs = {name: profile["id"] for name, profile in self.users.items()}
        self.names = {ref: name for name, ref in self.refs.items()}

    def create(self, *holders: str, **more: Any) -> str:
        """A lead comes in; its id."""
        number = next(_people)
        lead = {"title": f"Lead {number}", "first_name": "Lena", "last_name": f"Barros {number}"}
        lead |= {"email": f"lena{number}@example.com", "assigned_to": [self.refs[h] for h in holders]}
        return str(self.admin("POST", "/leads/", lead | more)["id"])

    def holders(self, lead: str) -> list[str]:
        shown = self.admin("GET", f"/leads/{lead}/")["lead_obj"]["assigned_to"]
        return [self.names[holder["id"]] for holder in shown]

    def wait_owner(self, lead: str) -> str:
        return str(until(lambda: self.holders(lead), f"an owner of lead {lead}")[0])

    def assign(self, lead: str, *holders: str) -> None:
        """A colleague changes who has the lead."""
        self.admin("PATCH", f"/leads/{lead}/", {"assigned_to": [self.refs[h] for h in holders]})

    def deliveries(self, lead: str) -> list[Any]:
        """The CRM's own log of what it sent about a lead, oldest first."""
        rows = self.admin("GET", f"/webhooks/{self.hook}/deliveries/?limit=200")["results"]
        return [row for row in reversed(rows) if row["payload"]["data"].get("id") == lead]

    # -- Turnlock -----------------------------------------------------------------------------------------
    def configure(self, default: str, **queues: Sequence[str]) -> None:
        """Queues with their members; all leads go to the one called `default`."""
        members = {name: {"members": [self.refs[m] for m in listed]} for name, listed in queues.items()}
        config = self._folder / "acme.yaml"
        config.write_text(yaml.safe_dump({"version": 1, "default_queue": default, "queues": members}))
        self.turnlock.run("config", "apply", "acme", str(config))

    def settle(self, *leads: str) -> None:
        """Wait until the CRM has said all there is to say of these leads, and Turnlock has done all that follows."""

        def quiet() -> bool:
            if any(row["status"] == "pending" for lead in leads for row in self.deliveries(lead)):
                return False
            told = [self.explain(lead) for lead in leads]
            writes = [w["state"] for t in told for d in t["decisions"] for w in d["writes"]]
            return not any(t["open_events"] for t in told) and "open" not in writes

        until(quiet, "quiet")

    def explain(self, lead: str) -> Any:
        return self.turnlock.json("explain", "acme", lead)

    def decisions(self, lead: str) -> list[tuple[str, str]]:
        """Outcome and agent of every decision about a lead."""
        found = self.explain(lead)["decisions"]
        return [(d["outcome"], self.names[d["agent"]["ref"]] if d["agent"] else "") for d in found]

    def next_up(self) -> list[str]:
        """Whom the next leads go to."""
        shown = self.turnlock.json("queue", "next", "acme", "All", "--count", "3")["next"]
        return [self.names[row["agent"]["ref"]] for row in shown]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("turnlock")
    with ExitStack() as stack:
        crm = stack.enter_context(BottleCrm())
        turnlock = Turnlock(folder)
        stack.callback(turnlock.remove)
        yield House(crm, turnlock, folder)


@pytest.fixture(autouse=True)
def _sound(house: House) -> Iterator[None]:
    """After each test: every ledger follows, and nothing waits for a human."""
    yield
    house.turnlock.run("audit", "acme")
    parked = house.turnlock.json("parked", "acme")
    assert [parked[kind] for kind in ("events", "writes", "leads")] == [[], [], []]


def test_its_users_are_agents(house: House) -> None:
    agents = house.turnlock.json("agents", "list", "acme")["agents"]
    assert {a["ref"]: (a["name"], a["active"]) for a in agents} == {r: (n, True) for r, n in house.names.items()}
    house.turnlock.run("check", "acme")


def test_leads_get_owners_in_turn(house: House) -> None:
    leads = []
    for owner in ("ana", "ben", "cy", "ana"):
        leads.append(house.create())
        assert house.wait_owner(leads[-1]) == owner
    house.settle(*leads)
    for lead in leads:
        assert len(house.decisions(lead)) == 1
        # Told of once as new and once as changed by us, each accepted at the first attempt.
        sent = [(row["event"], row["response_status"], row["attempts"]) for row in house.deliveries(lead)]
        assert sent == [("lead.created", 200, 1), ("lead.updated", 200, 1)]
    assert house.next_up() == ["ben", "cy", "ana"]


def test_a_test_lead_goes_all_the_way_and_is_removed_again(house: House) -> None:
    before = house.next_up()
    way = house.turnlock.json("test-lead", "acme", "--to", house.refs["cy"])
    assert (way["whole"], way["removed"]) == (True, True)
    assert way["heard"] is not None
    until(lambda: not house.explain(way["lead"])["open_events"], "the notice of its end")
    assert house.decisions(way["lead"]) == [("assigned", "cy")]
    assert house.next_up() == before


def test_a_lead_that_a_colleague_gave_away_is_left_alone(house: House) -> None:
    with_owner = house.create("cy")
    until(lambda: [row["status"] for row in house.deliveries(with_owner)] == ["succeeded"], "its delivery")
    ours = house.create()
    assert house.wait_owner(ours) == "ben"
    house.settle(ours)
    house.assign(ours, "cy")
    house.settle(ours, with_owner)
    assert (house.holders(with_owner), house.holders(ours)) == (["cy"], ["cy"])
    assert house.decisions(with_owner) == []
    assert house.decisions(ours) == [("assigned", "ben")]
    assert [row["event"] for row in house.deliveries(with_owner)] == ["lead.created"]
    assert house.next_up() == ["cy", "ana", "ben"]


def test_an_agent_whom_the_crm_drops_ends_with_the_next_and_no_loop(house: House) -> None:
    away, second, third = house.next_up()
    user = house.users[away]["user_details"]["id"]
    house.turnlock.run("agents", "sync", "acme")  # read as active a moment ago, so the writes are tried
    house.admin("POST", f"/user/{user}/status/", {"status": "Inactive"})
    lead = house.create()
    dropped(house, lead, away, second)
    assert house.wait_owner(house.create()) == third
    house.admin("POST", f"/user/{user}/status/", {"status": "Active"})
    house.turnlock.run("agents", "sync", "acme")
    assert house.next_up()[0] == away  # their turn was kept


def test_an_agent_who_is_unknown_to_the_crm_by_then_ends_with_the_next(house: House) -> None:
    house.add_user("dee")
    house.turnlock.run("agents", "sync", "acme")
    house.configure("New", All=("ana", "ben", "cy"), New=("dee", "ben"))
    house.admin("DELETE", f"/user/{house.users['dee']['user_details']['id']}/")
    lead = house.create()
    dropped(house, lead, "dee", "ben")
    house.configure("All", All=("ana", "ben", "cy"))


def dropped(house: House, lead: str, away: str, then: str) -> None:
    """Writes that were answered 200 and left nobody: `away` is tried, `then` has the lead, and that is the end."""
    assert house.wait_owner(lead) == then
    house.settle(lead)
    assert house.decisions(lead) == [("assigned", away), ("assigned", then)]
    # Created, emptied twice by us, then owned: and no word after that.
    told = ["lead.created", *["lead.updated"] * 3]
    assert [row["event"] for row in house.deliveries(lead)] == told
    time.sleep(2)
    assert [row["event"] for row in house.deliveries(lead)] == told
    assert house.holders(lead) == [then]


def test_what_happened_while_turnlock_was_stopped_is_sent_again(house: House) -> None:
    first, second, _ = house.next_up()
    house.turnlock.stop()
    leads = [house.create(), house.create()]
    for lead in leads:
        until(lambda lead=lead: house.deliveries(lead)[0]["attempts"], "a vain attempt")
    house.turnlock.serve()
    owners = [house.wait_owner(lead) for lead in leads]
    assert sorted(owners) == sorted([first, second])
    house.settle(*leads)
    for lead in leads:
        row = house.deliveries(lead)[0]
        assert row["status"] == "succeeded"
        assert row["attempts"] > 1
        assert len(house.decisions(lead)) == 1


def test_an_old_body_sent_again_changes_nothing(house: House) -> None:
    known = house.create()
    had = house.wait_owner(known)
    house.settle(known)
    position = house.turnlock.json("queue", "show", "acme", "All")["position"]
    house.turnlock.stop()
    fresh = house.create()  # its delivery says: nobody
    house.admin("PATCH", f"/leads/{known}/", {"title": "Seen twice"})  # ... says: ours
    for lead in (known, fresh):
        house.assign(lead, "cy" if had != "cy" else "ben")
    chosen = {lead: house.admin("GET", f"/leads/{lead}/")["lead_obj"]["updated_at"] for lead in (known, fresh)}
    house.turnlock.serve()
    house.settle(known, fresh)
    for lead, changed in chosen.items():
        shown = house.admin("GET", f"/leads/{lead}/")["lead_obj"]
        assert shown["updated_at"] == changed  # nobody wrote to it after the colleague
        assert house.holders(lead) == ["cy" if had != "cy" else "ben"]
    show = house.turnlock.json("queue", "show", "acme", "All")
    owed = sum(row["owed_turns"] for row in show["members"])
    assert show["position"] - owed == position  # a turn taken in good faith was given back


def test_the_sweep_finds_what_no_webhook_told(house: House) -> None:
    house.admin("PATCH", f"/webhooks/{house.hook}/", {"is_active": False})
    leads = [house.create() for _ in range(3)]
    owned = house.create("ben")
    house.admin("PATCH", f"/webhooks/{house.hook}/", {"is_active": True})
    swept = house.turnlock.json("sweep", "acme", "--since", "1h")
    assert swept["found"] == 3
    assert sorted(house.wait_owner(lead) for lead in leads) == ["ana", "ben", "cy"]
    house.settle(*leads)
    assert all(house.deliveries(lead)[0]["event"] == "lead.updated" for lead in leads)
    assert house.holders(owned) == ["ben"]


def test_a_token_that_is_revoked_is_told_from_a_missing_right(house: House) -> None:
    narrow = house.admin("POST", "/profile/tokens/", {"name": "narrow", "scopes": ["leads:read"]}, status=201)
    house.turnlock.run("tenant", "secret", "acme", "api_token", "--at-once", api_token=narrow["token"])
    assert "forbids this to the connected user" in house.turnlock.run("check", "acme", "--json", code=1)
    house.admin("DELETE", f"/profile/tokens/{narrow['id']}/")
    assert "no longer accepts the credentials" in house.turnlock.run("check", "acme", "--json", code=1)
    house.turnlock.run("tenant", "secret", "acme", "api_token", "--at-once", api_token=house.token)
    house.turnlock.run("check", "acme")
    lead = house.create()
    house.wait_owner(lead)
    house.settle(lead)
