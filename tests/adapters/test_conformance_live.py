"""Every adapter of the registry inside the running service: PostgreSQL, real sockets, a fake of its CRM.

The fakes are those of the conformance suite, so a new CRM is here as soon as it has its kit. Each check is also run
against an adapter, or a part of the service, that is broken in the way that the check is there to notice.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from adapters import registry
from adapters.base import HOOK_TOPIC, Capability, EventKind
from adapters.client import Client
from connector import chores, manifest, tenants, writeback
from connector.runtime import Runtime
from connector.sandbox import Sandbox
from routing import gate
from tests.adapters.kit import NOW, AgentRow, Kit, LeadRow, deliveries, kit
from tests.adapters.loopback import Received, Reply, Server, reset
from tests.rig import Rig, http_send, until

HOUSE, BUCKET, FOREIGN_BUCKET, STRANGER = "3", "7", "8", "99"
CONFIG = f"""
unassigned: {{users: ['{HOUSE}'], ponds: ['{BUCKET}']}}
default_queue: All
queues: {{All: {{members: ['12', '13', '14']}}}}
"""
# The fakes give every lead one address; without it no two of them are the same person.
ADDRESS = b"canary@example.com"


class Live(Rig):
    """One tenant whose CRM is the fake of an adapter's kit."""

    def __init__(self, runtime: Runtime, of: Kit, server: Server, secret: bytes, name: str) -> None:
        super().__init__(runtime, cast(Sandbox, None), of.name)
        self.kit, self.server, self.secret = of, server, secret
        self.fake = of.fake()
        self.fake.add_agents(*(AgentRow(ref) for ref in ("12", "13", "14", HOUSE)))
        self.lose_answer: Callable[[str], bool] = lambda kind: False
        self.written: list[str] = []
        self._lock = threading.Lock()
        server.handle = self._handle
        known = {p["name"] for p in manifest.load()["adapters"][of.name]["parameters"]}
        tenants.add_tenant(
            runtime,
            name,
            of.name,
            base_url=server.url,
            parameters={k: v for k, v in of.credentials.parameters.items() if k in known},
            secret_values={**of.credentials.secrets}
            | ({of.adapter.hook_secret: secret.decode()} if of.adapter.hook_secret else {}),
        )
        with runtime.engine.connect() as conn:
            self.tenant = runtime.tenant_named(conn, name)

    def _handle(self, asked: Received) -> Reply:
        with self._lock:
            before = self._shape()
            reply = self.fake.handle(asked)
            kind = "owner"
            for name, was, now in zip(("hook", "note", "task", "collaborator"), before, self._shape(), strict=True):
                kind = name if was != now else kind
            if self.kit.writes(asked):
                self.written.append(kind)
            if self.kit.writes(asked) and self.lose_answer(kind):
                return reset()
        if isinstance(reply.body, dict | list):
            body = json.dumps(reply.body).encode().replace(ADDRESS, b"")
            return Reply(reply.status, body, {"Content-Type": "application/json", **reply.headers})
        return reply

    def _shape(self) -> tuple[int, int, int, int]:
        leads = self.fake.leads.values()
        hooks = sum(2 if hook.active else 1 for hook in self.fake.hooks)
        notes, tasks = sum(len(row.notes) for row in leads), sum(len(row.tasks) for row in leads)
        return hooks, notes, tasks, sum(len(row.collaborators) for row in leads)

    def open(self) -> None:
        """Install it; all that was written until now does not count."""
        tenants.install(self.runtime, self.tenant)
        self.configure(CONFIG)
        self.written.clear()

    def free(self, *refs: str) -> None:
        """Leads that nobody has, by the way that this CRM has."""
        nobody = None if Capability.NULL_OWNER in self.kit.adapter.capabilities else HOUSE
        self.fake.add_leads(*(LeadRow(ref, owner=nobody) for ref in refs))

    def tell(self, *refs: str | None, kind: EventKind = EventKind.LEAD_CREATED) -> tuple[bytes, Mapping[str, str]]:
        """A delivery about these leads, signed now. None stands for one that cannot be read."""
        headers: Mapping[str, str] = {}
        self.kit.url = self.hook_url
        if Capability.BATCH_DELIVERY in self.kit.adapter.capabilities:
            topics = [topic for topic, what in self.kit.adapter.topics.items() if what is kind]
            body = self.kit.dump(self.kit.retopic(self.kit.batch(refs), topics[0]))
            headers = self.kit.topic_headers(topics[0])
        else:
            told = next(f for f in deliveries(self.crm) if [e["kind"] for e in f.about["events"]] == [kind])
            (ref,) = refs
            body, headers = self.kit.about(told, str(ref)), told.headers
        return body, self.kit.sign(body, self.secret, datetime.now(UTC), headers)

    def send(self, delivery: tuple[bytes, Mapping[str, str]]) -> int:
        """Post a delivery to the own hook; the status of the answer."""
        return send_to(self.hook_url, delivery)

    def settle_owners(self, seconds: float = 20.0) -> None:
        """Wait until no event waits and no owner write is open."""
        query = (
            "SELECT (SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'waiting') + "
            "(SELECT count(*) FROM outbox WHERE tenant_id = :t AND state = 'open' AND kind NOT IN ('note', 'task'))"
        )
        until(lambda: self.one(query) == 0, seconds, "a quiet system")

    def held_by(self, *refs: str) -> list[str | None]:
        """The owners in the CRM."""
        return [self.fake.leads[ref].owner for ref in refs]

    def in_step(self, *refs: str) -> None:
        """These leads took the turns, one write each, and the ledger follows."""
        self.settle_owners()
        assert self.held_by(*refs) == self.turns()
        assert self.written.count("owner") == len(refs)
        self.audit()


def send_to(url: str, delivery: tuple[bytes, Mapping[str, str]]) -> int:
    """Post a delivery to a hook, at the address of its topic where it has one."""
    body, headers = delivery[0], dict(delivery[1])
    topic = headers.pop(HOOK_TOPIC, None)
    return http_send(f"{url}/{topic}" if topic else url, body, headers).status


Make = Callable[..., Live]
Check = Callable[[Make], None]
CHECKS: dict[str, tuple[Check, tuple[frozenset[Capability], ...]]] = {}


def check(*needs: Capability, instead: Capability | None = None) -> Callable[[Check], Check]:
    """Run this for every adapter that declares all of `needs`, or `instead`."""

    def register(function: Check) -> Check:
        ways = (frozenset(needs), *([frozenset({instead})] if instead else []))
        CHECKS[function.__name__] = (function, ways)
        return function

    return register


def cases() -> list[tuple[str, str]]:
    """Every adapter of the registry with every check that its capabilities select."""
    return [
        (name, title)
        for name in registry.names()
        for title, (_, ways) in CHECKS.items()
        if any(needs <= registry.adapter(name).capabilities for needs in ways)
    ]


@pytest.fixture
def make_live(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Make]]:
    """For the name of a CRM: what makes tenants of it, the first with the web server and the worker."""
    # The fakes know one instant, by which they judge the signatures of our calls.
    monkeypatch.setattr(
        "connector.runtime.Client", lambda *given, now, **named: Client(*given, now=lambda: NOW, **named)
    )
    with ExitStack() as stack:

        def of(crm: str) -> Make:
            made = kit(crm)

            def make(name: str = "acme", *, secret: bytes = made.secrets[0]) -> Live:
                server = stack.enter_context(Server(lambda _: Reply(500)).running())
                live = Live(runtime, made, server, secret, name)
                if name == "acme":
                    stack.callback(live.stop)
                    live.start_web()
                    live.start_worker()
                live.open()
                return live

            return make

        yield of


@check()
def one_delivery_from_eight_threads_is_one_assignment_and_one_write(make: Make) -> None:
    live = make()
    live.free("5001")
    delivery = live.tell("5001")
    start = threading.Barrier(8)
    statuses: list[int] = []

    def post() -> None:
        start.wait(10)
        statuses.append(live.send(delivery))

    threads = [threading.Thread(target=post) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert statuses == [200] * 8
    until(lambda: live.held_by("5001") == ["12"], what="an owner")
    live.in_step("5001")
    assert live.assignments("5001") == [("12", "active")]


@check()
def an_own_echo_routes_nothing(make: Make) -> None:
    live = make()
    live.free("5001")
    live.send(live.tell("5001"))
    until(lambda: live.held_by("5001") == ["12"], what="an owner")
    live.settle_owners()
    for kind in (EventKind.LEAD_CHANGED, EventKind.LEAD_CREATED):
        live.sql("DELETE FROM dedupe_keys WHERE tenant_id = :t")  # as if under an event id of its own
        before = live.one("SELECT count(*) FROM events WHERE tenant_id = :t")
        assert live.send(live.tell("5001", kind=kind)) == 200
        live.settle_owners()
        assert live.one("SELECT count(*) FROM events WHERE tenant_id = :t") == before + 1
    live.in_step("5001")
    assert live.decisions("5001") == [("new", "assigned", "12")]


@check(Capability.BATCH_DELIVERY)
def a_batch_is_dealt_in_its_order_and_the_bad_one_parks_alone(make: Make) -> None:
    live = make()
    refs = ["5006", "5001", "5005", "5002", "5004"]
    live.free(*refs)
    assert live.send(live.tell(*refs[:2], None, *refs[2:])) == 200
    until(lambda: None not in live.held_by(*refs) and HOUSE not in live.held_by(*refs), what="all owners")
    live.in_step(*refs)
    assert live.held_by(*refs) == ["12", "13", "14", "12", "13"]
    assert live.one("SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'parked'") == 1
    assert "unreadable_event" in live.alarms()


@check()
def only_what_is_unassigned_by_the_tenants_word_is_routed(make: Make) -> None:
    live = make()
    taken = [LeadRow("5004", owner=STRANGER), LeadRow("5005", owner="13")]
    live.fake.add_leads(LeadRow("5001", owner=HOUSE), *taken)
    live.free("5002")
    unassigned = ["5001", "5002"]
    if live.kit.ponds:
        live.fake.add_leads(LeadRow("5003", pond=BUCKET), LeadRow("5006", pond=FOREIGN_BUCKET))
        unassigned.append("5003")
    refs = sorted(live.fake.leads)
    live.feed("again", *refs)
    until(lambda: all(live.standing(ref)["state"] for ref in refs), what="a standing of each")
    live.in_step(*unassigned)
    assert live.held_by("5004", "5005") == [STRANGER, "13"]
    assert {live.standing(ref)["state"] for ref in refs if ref not in unassigned} == {"owned"}


@check(Capability.SWEEP_CHANGES)
def an_owner_cleared_while_nobody_listened_is_found_by_the_sweep(make: Make) -> None:
    live = make()
    live.wait_chores()  # so that no sweep of the worker closes the alarm
    live.free("5001")
    live.send(live.tell("5001"))
    until(lambda: live.held_by("5001") == ["12"], what="an owner")
    live.settle_owners()
    # Both are old leads that were changed just now; only one of them ever had to do with Turnlock.
    long_ago, just_now = NOW - timedelta(days=90), NOW - timedelta(minutes=5)
    live.fake.add_leads(*(LeadRow(ref, created=long_ago, changed=just_now) for ref in ("5001", "5002")))
    swept = chores.sweep(live.runtime, live.tenant, NOW - timedelta(hours=1))
    assert (swept.seen, swept.found) == (1, 1)
    assert live.alarms() == {"webhooks_missing"}
    until(lambda: live.held_by("5001") == ["13"], what="the next owner")
    live.settle_owners()
    assert live.decisions("5001") == [("new", "assigned", "12"), ("released", "assigned", "13")]
    assert live.held_by("5002") == [None]
    assert chores.sweep(live.runtime, live.tenant, NOW - timedelta(hours=1)).found == 0
    assert live.alarms() == set()


@check(Capability.NOTES)
def a_note_is_written_once_though_its_answer_is_lost(make: Make) -> None:
    live = make()
    lost = iter([True])
    live.lose_answer = lambda kind: kind == "note" and next(lost, False)
    live.free("5001")
    live.send(live.tell("5001"))
    note = "SELECT state FROM outbox WHERE tenant_id = :t AND kind = 'note'"
    until(lambda: live.fake.leads["5001"].notes, what="a note")
    until(lambda: live.one("SELECT attempt FROM outbox WHERE tenant_id = :t AND kind = 'note'"), what="its repeat")
    live.due_now()
    until(lambda: live.one(note) == "confirmed", what="the end of it")
    assert len(live.fake.leads["5001"].notes) == 1
    live.in_step("5001")


@check(Capability.TASKS)
def a_task_is_written_once_though_its_answer_is_lost(make: Make) -> None:
    live = make()
    live.configure(CONFIG + "task: {within_minutes: 5}\n")
    lost = iter([True])
    live.lose_answer = lambda kind: kind == "task" and next(lost, False)
    live.free("5001")
    live.send(live.tell("5001"))
    until(lambda: live.fake.leads["5001"].tasks, what="a task")
    until(lambda: live.one("SELECT attempt FROM outbox WHERE tenant_id = :t AND kind = 'task'"), what="its repeat")
    live.due_now()
    task = "SELECT state FROM outbox WHERE tenant_id = :t AND kind = 'task'"
    until(lambda: live.one(task) == "confirmed", what="the end of it")
    ((agent, text, _),) = live.fake.leads["5001"].tasks
    assert agent == live.held_by("5001")[0]
    assert text.startswith("New lead: make contact within 5 minutes [turnlock:")
    live.in_step("5001")


@check(Capability.SIGNED_WEBHOOKS, instead=Capability.HOOK_PASSWORD)
def a_delivery_sent_on_to_another_tenant_changes_nothing_there(make: Make) -> None:
    live = make()
    own = Capability.TENANT_SECRET in live.kit.adapter.capabilities
    other = make("beta", secret=live.kit.secrets[1] if own else live.secret)
    live.free("5001")
    delivery = live.tell("5001")
    status = send_to(other.hook_url, delivery)
    if own:
        assert status == 401
        assert other.events() == []
    else:
        assert status == 200
        until(lambda: all(row.reason or row.state != "waiting" for row in other.events()), what="a reading")
    for name in ("decisions", "assignments", "lead_roles", "turns"):
        assert other.one(f"SELECT count(*) FROM {name} WHERE tenant_id = :t") == 0
    assert other.position() == 0
    assert other.written == []
    assert live.events() == []
    assert live.send(delivery) == 200  # and the right hook still takes it
    until(lambda: live.held_by("5001") == ["12"], what="an owner")
    live.in_step("5001")


@pytest.mark.parametrize(("crm", "title"), cases())
def test_conformance_live(make_live: Callable[[str], Make], crm: str, title: str) -> None:
    CHECKS[title][0](make_live(crm))


# -- the checks can fail -------------------------------------------------------------------------------------------


def _accept_all(monkeypatch: pytest.MonkeyPatch, crm: str) -> None:
    monkeypatch.setattr(type(registry.adapter(crm)), "verify", lambda self, request, secrets, now: None)


def _finds_no_note(monkeypatch: pytest.MonkeyPatch, crm: str) -> None:
    monkeypatch.setattr(type(registry.adapter(crm)), "find_note", lambda self, client, ref, marker: False)


def _reverses(monkeypatch: pytest.MonkeyPatch, crm: str) -> None:
    parse = type(registry.adapter(crm)).parse
    monkeypatch.setattr(type(registry.adapter(crm)), "parse", lambda self, request: parse(self, request)[::-1])


def _sees_no_owner(monkeypatch: pytest.MonkeyPatch, crm: str) -> None:
    """A service that takes every lead for unassigned."""
    monkeypatch.setattr("routing.model.UnassignedDefinition.covers", lambda self, lead: True)


def _takes_up_everything(monkeypatch: pytest.MonkeyPatch, crm: str) -> None:
    """A sweep that takes every changed lead for one that had an owner here."""
    monkeypatch.setattr("connector.chores._once_owned", lambda conn, tenant_id, refs: refs)


def _sweeps_by_creation(monkeypatch: pytest.MonkeyPatch, crm: str) -> None:
    """A sweep of changes that lists new leads only."""
    of = type(registry.adapter(crm))
    monkeypatch.setattr(of, "changed_since", of.unassigned_since)


def _writes_blindly(monkeypatch: pytest.MonkeyPatch, crm: str) -> None:
    """A sender that never finds its own write and repeats it."""
    twice = writeback.Sender._owner

    def owner(self: writeback.Sender, job: writeback.Job) -> None:
        job.adapter.set_owner(job.client, self._read(job), job.agent_ref)  # type: ignore[arg-type]
        job.adapter.set_owner(job.client, self._read(job), job.agent_ref)  # type: ignore[arg-type]
        twice(self, job)

    monkeypatch.setattr(writeback.Sender, "_owner", owner)


def _takes_echoes_for_news(monkeypatch: pytest.MonkeyPatch, crm: str) -> None:
    real = gate.gate

    def forgetful(*args: Any, **named: Any) -> gate.Verdict:
        found = real(*args, **named)
        return gate.Verdict(gate.Step.DECIDE, "new") if found.step is gate.Step.ECHO else found

    monkeypatch.setattr("connector.units.gate", forgetful)


@pytest.mark.parametrize(
    ("crm", "title", "broken"),
    [
        ("generic", "a_delivery_sent_on_to_another_tenant_changes_nothing_there", _accept_all),
        ("followupboss", "a_note_is_written_once_though_its_answer_is_lost", _finds_no_note),
        ("generic", "a_batch_is_dealt_in_its_order_and_the_bad_one_parks_alone", _reverses),
        ("followupboss", "only_what_is_unassigned_by_the_tenants_word_is_routed", _sees_no_owner),
        ("generic", "one_delivery_from_eight_threads_is_one_assignment_and_one_write", _writes_blindly),
        ("followupboss", "an_own_echo_routes_nothing", _takes_echoes_for_news),
        ("odoo", "an_owner_cleared_while_nobody_listened_is_found_by_the_sweep", _takes_up_everything),
        ("hubspot", "an_owner_cleared_while_nobody_listened_is_found_by_the_sweep", _sweeps_by_creation),
    ],
)
def test_the_checks_notice_what_is_broken(
    make_live: Callable[[str], Make],
    monkeypatch: pytest.MonkeyPatch,
    crm: str,
    title: str,
    broken: Callable[[pytest.MonkeyPatch, str], None],
) -> None:
    patient = until
    monkeypatch.setattr("tests.adapters.test_conformance_live.until", lambda true, *_, **__: patient(true, 3.0))
    broken(monkeypatch, crm)
    with pytest.raises(AssertionError):
        CHECKS[title][0](make_live(crm))
