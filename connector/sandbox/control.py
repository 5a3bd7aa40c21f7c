"""The other side of the sandbox: what a test (or a demonstration) does to it and asks of it.

Every public method of :class:`Control` is also ``POST /_sandbox/<method>`` with a JSON object of its arguments,
answered ``{"result": ...}``, or 400 ``{"error": ...}``; loopback only. Times are seconds, ids are the CRM's numbers.
"""

from __future__ import annotations

import base64
import inspect
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any
from uuid import uuid4

from connector.sandbox import bottlecrm, fub_hooks, generic, hubspot
from connector.sandbox.crm import Crm
from connector.sandbox.deliver import Delivery
from connector.sandbox.exchange import Answer
from connector.sandbox.state import Agent, Hook, Lead, utc_now


class Control:
    """Orders and questions to a :class:`~connector.sandbox.crm.Crm`. An unknown id or name is a :class:`ValueError`."""

    crm: Crm

    # -- the account --------------------------------------------------------------------------------------
    def account(self) -> dict[str, Any]:
        """The account with its (invented) keys, and the bases of the faces."""
        bases = {face.name: self.crm.base + face.prefix for face in self.crm.faces}
        return {**asdict(self.crm.state.account), "bases": bases}

    def configure(self, **values: Any) -> dict[str, Any]:
        """Change :class:`~connector.sandbox.state.Settings`; all of them as they are now."""
        self.crm.state.settings.change(values)
        return asdict(self.crm.state.settings)

    def errors(self) -> list[str]:
        """Defects of the sandbox itself that came up while it served."""
        return list(self.crm.errors)

    # -- leads --------------------------------------------------------------------------------------------
    def create_lead(self, **fields: Any) -> int:
        """Create one invented lead with these fields as given; its id."""
        return self.create_leads(1, **fields)[0]

    def create_leads(self, count: int = 1, each: Sequence[dict[str, Any]] | None = None, **fields: Any) -> list[int]:
        """Create leads in bulk, told in one go: `count` of them or one per item of `each`; their ids in order."""
        state = self.crm.state
        rows = [{**fields, **item} for item in each] if each is not None else [fields] * count
        for row in rows:
            state.check({name: value for name, value in row.items() if name != "created"})
        with state.transaction():
            return [state.create(row).id for row in rows]

    def edit_leads(self, leads: Sequence[int], **fields: Any) -> int:
        """Edit leads in bulk by hand, told in one go; how many were different before."""
        with self.crm.state.transaction():
            return sum(self.crm.state.edit(self._lead(number), fields) for number in leads)

    def set_owner(self, lead: int, agent: int | None, by: str = "human") -> bool:
        """Make an agent the owner (None: nobody, no pond); whether that is a change. `by` is for the log."""
        with self.crm.state.transaction():
            if agent is not None:
                self._agent(agent)
            return self.crm.state.set_owner(self._lead(lead), agent, by)

    def clear_owner(self, lead: int, pond: int | None = None) -> bool:
        """Take the owner away, into `pond` if given; whether that is a change."""
        with self.crm.state.transaction():
            if pond is not None and pond not in self.crm.state.ponds:
                raise ValueError(f"no pond {pond}")
            return self.crm.state.set_owner(self._lead(lead), None, "human", pond)

    def merge_leads(self, kept: int, lost: int) -> int:
        """Merge two leads into one under a new id, as some CRMs do; that id."""
        with self.crm.state.transaction():
            return self.crm.state.merge(self._lead(kept), self._lead(lost))

    def delete_leads(self, leads: Sequence[int]) -> None:
        """Delete leads, told in one go."""
        with self.crm.state.transaction():
            for lead in [self._lead(number) for number in leads]:
                self.crm.state.delete(lead)

    def add_inquiry(self, lead: int, **fields: Any) -> int:
        """A new inquiry of a known lead (``type``, ``source``, ``message``, ``property``, ...); its id."""
        with self.crm.state.transaction():
            return self.crm.state.add_inquiry(self._lead(lead), fields)

    def lead(self, lead: int) -> dict[str, Any] | None:
        """The truth about a lead, with its notes and tasks; None when there is none."""
        with self.crm.state.lock:
            found = self.crm.state.leads.get(lead)
            if found is None:
                return None
            state = self.crm.state
            shown = {**asdict(found), "notes": state.notes.get(lead, []), "tasks": state.tasks.get(lead, [])}
            del shown["history"], shown["born"]
            plain: dict[str, Any] = _plain(shown)
            return plain

    def owners(self) -> list[list[int | None]]:
        """``[lead, owner]`` of every lead by ascending id."""
        with self.crm.state.lock:
            return [[lead.id, lead.owner] for lead in self.crm.state.leads.values()]

    def counts(self) -> dict[str, int]:
        """How many there are of each kind."""
        state = self.crm.state
        with state.lock:
            return {
                "leads": len(state.leads),
                "unowned": sum(lead.owner is None for lead in state.leads.values()),
                "agents": len(state.agents),
                "hooks": len(state.hooks),
                "notes": sum(map(len, state.notes.values())),
                "owner_changes": len(state.owner_log),
                "owner_writes": len(state.write_log),
                "calls": len(state.call_log),
                "deliveries": len(state.deliveries),
            }

    # -- agents and ponds ---------------------------------------------------------------------------------
    def agents(self) -> list[dict[str, Any]]:
        """All agents, deactivated ones included."""
        with self.crm.state.lock:
            return [_plain(asdict(agent)) for agent in self.crm.state.agents.values()]

    def ponds(self) -> list[dict[str, Any]]:
        """All ponds."""
        with self.crm.state.lock:
            return [dict(pond) for pond in self.crm.state.ponds.values()]

    def add_agent(self, name: str, **fields: Any) -> int:
        """Add an agent (``email``, ``role``, ``status``, ``paused``, ``zone``); their id."""
        try:
            return self.crm.state.add_agent(name, **fields).id
        except TypeError:
            raise ValueError("agents: unknown field") from None

    def add_pond(self, name: str, agents: Sequence[int] = ()) -> int:
        """Add a pond; its id."""
        return int(self.crm.state.add_pond(name, list(agents))["id"])

    def change_pond(self, pond: int, agents: Sequence[int] | None) -> None:
        """Other agents share the pond from now on; None: it is removed."""
        with self.crm.state.lock:
            if pond not in self.crm.state.ponds:
                raise ValueError(f"no pond {pond}")
            if agents is None:
                del self.crm.state.ponds[pond]
            else:
                self.crm.state.ponds[pond]["agents"] = list(agents)

    def change_agent(self, agent: int, **fields: Any) -> None:
        """Change ``name``, ``email``, ``role``, ``status``, ``paused`` or ``zone``."""
        if unknown := set(fields) - {"name", "email", "role", "status", "paused", "zone"}:
            raise ValueError(f"agents: no field {', '.join(sorted(unknown))}")
        with self.crm.state.lock:
            found = self._agent(agent)
            for name, value in fields.items():
                setattr(found, name, value)
            found.updated = utc_now()

    def deactivate_agent(self, agent: int, assign_to: int | None = None) -> None:
        """Delete an agent the way the CRM does; their leads go to `assign_to` if given."""
        with self.crm.state.transaction():
            self.change_agent(agent, status="Deleted")
            if assign_to is not None:
                self._agent(assign_to)
                for lead in [item for item in self.crm.state.leads.values() if item.owner == agent]:
                    self.crm.state.set_owner(lead, assign_to, "human")

    def activate_agent(self, agent: int) -> None:
        """Bring an agent back."""
        self.change_agent(agent, status="Active")

    def pause_agent(self, agent: int) -> None:
        """Turn the agent's own pause switch on."""
        self.change_agent(agent, paused=True)

    def resume_agent(self, agent: int) -> None:
        """Turn the agent's own pause switch off."""
        self.change_agent(agent, paused=False)

    # -- logs ---------------------------------------------------------------------------------------------
    def owner_log(self, since: int = 0, lead: int | None = None) -> list[dict[str, Any]]:
        """Every change of an owner with ``seq`` above `since`: lead, old, new, by (api, human, rule), times."""
        return [row for row in _after(self.crm.state.owner_log, since) if lead is None or row["lead"] == lead]

    def write_log(self, since: int = 0, lead: int | None = None) -> list[dict[str, Any]]:
        """Every owner write through the API that was applied, repeats of the same value included."""
        return [row for row in _after(self.crm.state.write_log, since) if lead is None or row["lead"] == lead]

    def call_log(self, since: int = 0) -> list[dict[str, Any]]:
        """Every API call: face, method, path, query, status (None: unanswered), faults; no bodies."""
        return _after(self.crm.state.call_log, since)

    def clear_logs(self) -> None:
        """Forget the logs and the deliveries that are done."""
        state = self.crm.state
        with state.lock:
            for log in (state.owner_log, state.write_log, state.call_log):
                log.clear()
            for number in [key for key, item in state.deliveries.items() if item.state != "waiting"]:
                del state.deliveries[number]

    # -- faults -------------------------------------------------------------------------------------------
    def fault(self, what: str, **values: Any) -> int:
        """Add a fault (:mod:`connector.sandbox.faults` lists them); its id."""
        return self.crm.faults.add(what, values)

    def set_faults(self, rules: Sequence[dict[str, Any]]) -> list[int]:
        """Put these faults (each a dict of ``what`` and its values) in the place of all others; their ids."""
        self.crm.faults.clear()
        return [self.crm.faults.add(**_split(rule)) for rule in rules]

    def faults(self) -> list[dict[str, Any]]:
        """The faults with how often each matched (``seen``) and struck (``hits``)."""
        return self.crm.faults.rules()

    def clear_faults(self, fault: int | None = None) -> None:
        """Remove one fault, or all. What is held stays held."""
        self.crm.faults.clear(fault)

    def webhook_faults(self, **values: Any) -> dict[str, Any]:
        """Set what goes wrong with deliveries from now on; without arguments: nothing."""
        with self.crm.state.lock:
            self.crm.webhook_faults.change(values)
            return asdict(self.crm.webhook_faults)

    def held(self) -> list[dict[str, Any]]:
        """The calls that are held now."""
        with self.crm.held_changed:
            return [
                {"id": item.id, "method": item.method, "path": item.path, "seconds": time.monotonic() - item.since}
                for item in self.crm.held.values()
            ]

    def wait_held(self, count: int = 1, timeout: float = 10.0) -> bool:
        """Wait until at least `count` calls are held; False after `timeout`."""
        with self.crm.held_changed:
            return self.crm.held_changed.wait_for(lambda: len(self.crm.held) >= count, timeout)

    def release(self, held: int | None = None, outcome: str = "answer") -> int:
        """Let one held call (or all) go on, or reset its connection (``drop``); how many."""
        if outcome not in ("answer", "drop"):
            raise ValueError("outcome must be answer or drop")
        with self.crm.held_changed:
            chosen = [item for item in self.crm.held.values() if held in (None, item.id)]
            for item in chosen:
                item.outcome = outcome
                item.done.set()
                del self.crm.held[item.id]
            return len(chosen)

    # -- deliveries ---------------------------------------------------------------------------------------
    def hooks(self) -> list[dict[str, Any]]:
        """All hooks of all faces."""
        with self.crm.state.lock:
            return [_plain(asdict(hook)) for hook in self.crm.state.hooks.values()]

    def add_hook(self, face: str, url: str, topics: Sequence[str] | None = None) -> list[int]:
        """Subscribe by hand, as an admin does in the CRM's own screens; the ids of the hooks.

        Without `topics`: all topics in one hook, or one hook for each lead and inquiry topic of Follow Up Boss.
        """
        add = self.crm.state.add_hook
        for other in (generic, bottlecrm, hubspot):
            if face == other.FACE:
                return [add(face, url, tuple(topics or dict.fromkeys(other.TOPICS.values()))).id]
        if face != fub_hooks.FACE:
            raise ValueError(f"no face {face!r}")
        return [add(face, url, (topic,), "Turnlock").id for topic in topics or fub_hooks.USUAL]

    def change_hook(self, hook: int, active: bool) -> None:
        """Switch a hook on or off, as a CRM does after too many failures."""
        self._hook(hook).active = active

    def deliveries(self, since: int = 0) -> list[dict[str, Any]]:
        """Deliveries with an id above `since`: topic, leads, message_id, state, attempts with status and times."""
        with self.crm.state.lock:
            chosen = [item for item in self.crm.state.deliveries.values() if item.id > since]
            names = ("id", "topic", "leads", "message_id", "state", "attempts")
            return [
                {**{name: getattr(item, name) for name in names}, "attempts": list(item.attempts), "hook": item.hook.id}
                for item in chosen
            ]

    def pause_dispatch(self) -> None:
        """Let deliveries pile up."""
        self.crm.dispatcher.pause()

    def resume_dispatch(self) -> None:
        """Send what has piled up."""
        self.crm.dispatcher.resume()

    def wait_idle(self, timeout: float = 10.0, retries: bool = True) -> bool:
        """Wait until nothing is queued or on its way (with ``retries=False`` later retries do not count)."""
        return self.crm.dispatcher.wait_idle(timeout, retries)

    def resend(self, delivery: int, copies: int = 1) -> None:
        """Send a past delivery again, with the same bytes and headers, `copies` times at once."""
        found = self.crm.state.deliveries.get(delivery)
        if found is None:
            raise ValueError(f"no delivery {delivery}")
        self.crm.dispatcher.resend(found, copies)

    def send_raw(self, hook: int, body: str | bytes, signed: bool = True, headers: dict[str, str] | None = None) -> int:
        """Send any body to a hook once, signed as its face signs or not at all; the delivery's id.

        Text that begins with ``base64:`` is sent decoded. `headers` add to, or replace, what the face sends.
        """
        target, state = self._hook(hook), self.crm.state
        if isinstance(body, str):
            body = base64.b64decode(body[7:]) if body.startswith("base64:") else body.encode()
        message_id, raw = f"raw_{uuid4().hex}", body

        def sign(data: bytes) -> dict[str, str]:
            made = {"Content-Type": "application/json"}
            if signed and target.face == fub_hooks.FACE:
                made = fub_hooks.signed_headers(state, target, data)
            elif signed and target.face == bottlecrm.FACE:
                made = bottlecrm.signed_headers(state.account.webhook_secret, "raw", message_id, data)
            elif signed and target.face == hubspot.FACE:
                made = hubspot.signed_headers(state.account.hubspot_secret, target.url, data)
            elif signed:
                made = generic.signed_headers(state.account.webhook_secret, message_id, data)
            return {**made, **(headers or {})}

        delivery = Delivery(state.number("delivery"), target, "raw", [], message_id, raw, sign)
        with state.lock:
            state.deliveries[delivery.id] = delivery
        self.crm.dispatcher.send([delivery])
        return delivery.id

    # -- look-ups -----------------------------------------------------------------------------------------
    def _lead(self, number: int) -> Lead:
        if number not in self.crm.state.leads:
            raise ValueError(f"no lead {number}")
        return self.crm.state.leads[number]

    def _agent(self, number: int) -> Agent:
        if number not in self.crm.state.agents:
            raise ValueError(f"no agent {number}")
        return self.crm.state.agents[number]

    def _hook(self, number: int) -> Hook:
        if number not in self.crm.state.hooks:
            raise ValueError(f"no hook {number}")
        return self.crm.state.hooks[number]


def _after(log: list[dict[str, Any]], since: int) -> list[dict[str, Any]]:
    return [dict(row) for row in list(log) if row["seq"] > since]


def _split(rule: dict[str, Any]) -> dict[str, Any]:
    return {"what": rule.get("what", ""), "values": {key: value for key, value in rule.items() if key != "what"}}


def _plain(value: Any) -> Any:
    """`value` with times as ISO text, ready for JSON."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value


def call(control: Control, name: str, body: bytes) -> Answer:
    """Serve ``/_sandbox/<name>``: call the public method with the JSON object in `body` (none: no arguments)."""
    method: Callable[..., Any] | None = vars(Control).get(name)
    if name.startswith("_") or not inspect.isfunction(method):
        known = ", ".join(key for key, item in vars(Control).items() if inspect.isfunction(item) and key[0] != "_")
        return Answer(404, {"error": f"no order {name!r}; there are {known}"})
    try:
        values = json.loads(body) if body else {}
        return Answer(200, {"result": method(control, **values)})
    except (TypeError, ValueError) as error:
        return Answer(400, {"error": str(error)})
