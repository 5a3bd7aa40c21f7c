"""The CRM as a whole: state, faces, faults and dispatcher, from a request to its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from connector.sandbox.bottlecrm import BottleCrm
from connector.sandbox.deliver import Delivery, Dispatcher, WebhookFaults
from connector.sandbox.exchange import Answer, Request
from connector.sandbox.faults import Faults, Plan, Rule, retry_after
from connector.sandbox.followupboss import FollowUpBoss
from connector.sandbox.generic import Generic
from connector.sandbox.hubspot import HubSpot
from connector.sandbox.state import State

Face = FollowUpBoss | Generic | BottleCrm | HubSpot
ECHO_WAIT = 10.0  # seconds that an answer waits at most for its own deliveries


@dataclass(slots=True)
class Held:
    """An answer that waits. ``outcome`` is ``answer`` or ``drop``, chosen at release."""

    id: int
    method: str
    path: str
    since: float
    done: threading.Event = field(default_factory=threading.Event)
    outcome: str = "answer"


class Crm:
    """Everything but sockets. ``base`` is the address of the server, known once it listens."""

    def __init__(self, state: State, seed: int) -> None:
        self.state = state
        self.base = ""
        self.faults = Faults(seed)
        self.webhook_faults = WebhookFaults()
        self.dispatcher = Dispatcher(state, self.webhook_faults, seed)
        self.errors: list[str] = []  # defects of the sandbox itself
        self.stopping = threading.Event()
        self.faces: list[Face] = [
            FollowUpBoss(state, lambda: self.base + FollowUpBoss.prefix),
            Generic(state, lambda: self.base + Generic.prefix),
            BottleCrm(state, lambda: self.base + BottleCrm.prefix),
            HubSpot(state, lambda: self.base + HubSpot.prefix),
        ]
        state.publishers = [face.publish for face in self.faces]
        state.send = self.dispatcher.send
        self.held: dict[int, Held] = {}
        self.held_changed = threading.Condition()
        self._held_count = 0
        self._timers: set[threading.Timer] = set()

    def stop(self) -> None:
        """Wake whatever waits, forget what was planned, end the dispatcher."""
        self.stopping.set()
        with self.held_changed:
            for held in self.held.values():
                held.outcome = "drop"
                held.done.set()
        with self.state.lock:
            timers = list(self._timers)
        for timer in timers:
            timer.cancel()
        for timer in timers:
            timer.join(1.0)
        self.dispatcher.stop()

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do `action` in `seconds`, unless the CRM stops before."""

        def run() -> None:
            try:
                if not self.stopping.is_set():
                    action()
            finally:
                with self.state.lock:
                    self._timers.discard(timer)

        timer = threading.Timer(seconds, run)
        timer.daemon = True
        with self.state.lock:
            self._timers.add(timer)
        timer.start()

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Serve one API call, faults included, and log it. ``status`` None in the log: no answer was sent."""
        path, _, query = target.partition("?")
        face = next((item for item in self.faces if path.startswith(item.prefix + "/")), None)
        if face is None:
            return Answer(404, {"error": "There is nothing at this address."})
        plan = self.faults.plan(face.name, method, path)
        request = Request(method, path.removeprefix(face.prefix), query, headers, body, plan.view)
        entry = {**self.state.stamp(), "face": face.name, "method": method, "path": path, "query": query}
        entry |= {"status": None, "faults": plan.names, "seconds": None}
        self.state.call_log.append(entry)
        answer = self._spoiled(face, plan, plan.hard, request) if plan.hard else self._apply(face, plan, request)
        if answer.wire in ("plain", "drip"):
            entry["status"] = answer.status
        entry["seconds"] = time.monotonic() - entry["mono"]
        return answer

    def _apply(self, face: Face, plan: Plan, request: Request) -> Answer:
        """Do the call, start what follows from it."""
        with self.state.transaction() as transaction:
            answer = face.answer(request)
        if plan.flip and request.owner_written is not None:
            number, owner = request.owner_written, plan.flip.params["owner"]
            self.later(plan.flip.params["seconds"], lambda: self._flip(number, owner))
        if self.webhook_faults.echo_first:
            self._await(transaction.deliveries)
        return answer

    def _await(self, deliveries: list[Delivery]) -> None:
        deadline = time.monotonic() + ECHO_WAIT
        for delivery in deliveries:
            delivery.first.wait(max(deadline - time.monotonic(), 0.0))

    def _flip(self, number: int, owner: int | None) -> None:
        with self.state.transaction():
            if lead := self.state.leads.get(number):
                self.state.set_owner(lead, owner, "rule")

    def _spoiled(self, face: Face, plan: Plan, rule: Rule, request: Request) -> Answer:
        """Serve a call that a hard fault befalls."""
        params = rule.params

        def apply() -> Answer:
            return self._apply(face, plan, request)

        match rule.what:
            case "slow":
                answer = apply() if params["apply_first"] else None
                self.stopping.wait(params["seconds"])
                return answer or apply()
            case "drip":
                return self._dripping(apply(), params["seconds"], params["pace"])
            case "twice":
                apply()
                return apply()
            case "hold":
                return self._hold(request, params["apply"], apply)
            case "empty":
                return _emptied(apply()) if request.method == "GET" else Answer(200, {})
            case "redirect":
                return Answer(params["status"], None, {"Location": params["location"]})
            case "zombie":
                self.later(params["seconds"], apply)
                return face.error(params["status"], "Gateway time-out.") if params["status"] else _reset("reset")
        if params["apply"]:
            apply()
        match rule.what:
            case "raw" | "html":
                return Answer(params["status"], params["body"], content_type=params["content_type"])
            case "endless":
                return Answer(200, wire="endless")
            case "drop":
                return _reset("headers" if params["sent"] == "headers" else "reset")
        value = retry_after(params["retry_after"], datetime.now(UTC))
        text = f"The sandbox answers {params['status']} on order."
        return face.error(params["status"], text, {} if value is None else {"Retry-After": value})

    def _dripping(self, answer: Answer, seconds: float, pace: float) -> Answer:
        """`answer`, padded with white space to last `seconds` at one byte per `pace` seconds."""
        answer.body = answer.encoded().ljust(round(seconds / pace))
        answer.wire, answer.pace = "drip", pace
        return answer

    def _hold(self, request: Request, first: bool, apply: Callable[[], Answer]) -> Answer:
        answer = apply() if first else None
        with self.held_changed:
            self._held_count += 1
            held = Held(self._held_count, request.method, request.path, time.monotonic())
            self.held[held.id] = held
            self.held_changed.notify_all()
            if self.stopping.is_set():
                held.outcome = "drop"
                held.done.set()
        held.done.wait()
        with self.held_changed:
            self.held.pop(held.id, None)
            self.held_changed.notify_all()
        if held.outcome == "drop":
            return _reset("reset")
        return answer or apply()


def _reset(wire: str) -> Answer:
    return Answer(0, wire=wire)


def _emptied(answer: Answer) -> Answer:
    """The answer with every list in it empty, or nothing in it where it has none."""
    body: Any = answer.body
    if answer.status != 200 or not isinstance(body, dict):
        return answer
    lists: dict[str, list[Any]] = {name: [] for name, value in body.items() if isinstance(value, list)}
    single = len(lists) != 1 or "id" in body
    answer.body = {} if single else {name: lists.get(name, value) for name, value in body.items()}
    if isinstance(answer.body.get("_metadata"), dict):
        answer.body["_metadata"] = {
            name: 0 if name == "total" else value
            for name, value in body["_metadata"].items()
            if not name.startswith("next")
        }
    if "next" in answer.body:
        answer.body["next"] = None
    return answer
