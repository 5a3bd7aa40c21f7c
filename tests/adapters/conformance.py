"""The suite that every adapter inherits: how checks are made and which adapter gets which.

A check takes a :class:`tests.adapters.kit.Kit` and fails by raising. :func:`cases` pairs every adapter of the
registry with every check that its *declared* capabilities select: there is nothing to skip and no way to opt out.
The checks stand in ``checks_deliveries`` and ``checks_api``; a module of further ones (with a database, with a
running service) registers its own with :func:`check` and is imported beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest

from adapters import registry
from adapters.base import Adapter, Capability, Event, EventKind, Rejected, Unreadable, WebhookRequest
from adapters.client import CrmError
from routing.model import Lead, UnassignedDefinition
from tests.adapters.kit import NOW, Kit, Running

Check = Callable[[Kit], None]
URL = "https://hooks.example.com/hooks/token-now"
OLD_URL = "https://hooks.example.com/hooks/token-of-old"
FOREIGN_URL = "https://other.example.com/hooks/token-now"
CANARIES = ("canary", "Y2FuYXJ5")  # in clear, and at the start of base64


@dataclass(frozen=True)
class Case:
    check: Check
    needs: frozenset[Capability]
    instead: frozenset[Capability] = frozenset()  # one of these will do, too

    def fits(self, capabilities: frozenset[Capability]) -> bool:
        return self.needs <= capabilities or bool(self.instead & capabilities)


CHECKS: dict[str, Case] = {}


def check(*needs: Capability, instead: Capability | None = None) -> Callable[[Check], Check]:
    """Register a check for every adapter that declares all of `needs`, or `instead`."""

    def register(function: Check) -> Check:
        assert function.__name__ not in CHECKS
        CHECKS[function.__name__] = Case(function, frozenset(needs), frozenset({instead} if instead else ()))
        return function

    return register


def cases() -> list[Any]:
    """Every adapter with every check that its capabilities select."""
    return [
        pytest.param(name, title, id=f"{name}-{title}")
        for name in registry.names()
        for title, case in CHECKS.items()
        if case.fits(registry.adapter(name).capabilities)
    ]


# -- helpers ---------------------------------------------------------------------------------------------------------


def accepted(kit: Kit, request: WebhookRequest, *secrets: bytes, now: datetime = NOW) -> None:
    verdict: Any = kit.adapter.verify(request, secrets or kit.secrets[:1], now)  # type: ignore[func-returns-value]
    assert verdict is None, "a verdict is an exception, never a value that a caller may forget to look at"


def rejected(kit: Kit, request: WebhookRequest, *secrets: bytes, now: datetime = NOW) -> None:
    with pytest.raises(Rejected) as caught:
        kit.adapter.verify(request, secrets, now)
    told = f"{caught.value!r} {caught.value} {caught.value.__cause__!r} {caught.value.__context__!r}"
    assert not any(c in told for c in CANARIES)


def events(kit: Kit, body: Any, **headers: str) -> list[Event]:
    sent = body if isinstance(body, bytes) else kit.dump(body)
    return kit.adapter.parse(kit.signed(sent, headers=headers))


def parks(kit: Kit, body: Any, **headers: str) -> bool:
    """Whether `body` is refused as a whole or has an element that is parked."""
    try:
        return any(e.kind is EventKind.UNREADABLE for e in events(kit, body, **headers))
    except Unreadable:
        return True


def crm_error(call: Callable[[], Any]) -> CrmError:
    with pytest.raises(CrmError) as caught:
        call()
    return caught.value


def lead(ref: str = "5001", owner: str | None = None) -> Lead:
    return Lead(ref=ref, owner_ref=owner)


def calls(kit: Kit, running: Running) -> dict[str, Callable[[], Any]]:
    """Every outbound method of the adapter, by the capabilities it has."""
    adapter, client, has = kit.adapter, running.client, kit.adapter.capabilities.__contains__
    made: dict[str, Callable[[], Any]] = {
        "fetch_leads": lambda: adapter.fetch_leads(client, ["5001"]),
        "set_owner": lambda: adapter.set_owner(client, lead(), "12"),
        "list_agents": lambda: list(adapter.list_agents(client)),
        "get_agent": lambda: adapter.get_agent(client, "12"),
    }
    if type(adapter).resolve is not Adapter.resolve:  # else the ref of an event is the lead's own
        made["resolve"] = lambda: adapter.resolve(client, "61")
    if has(Capability.NOTES):
        made["find_note"] = lambda: adapter.find_note(client, "5001", "[marker]")
        made["add_note"] = lambda: adapter.add_note(client, "5001", "Routed", "To canary-person [marker]")
    if has(Capability.TASKS):
        made["find_task"] = lambda: adapter.find_task(client, "5001", "[marker]")
        made["add_task"] = lambda: adapter.add_task(client, "5001", "12", "Call canary-person", "[marker]", NOW)
    if has(Capability.COLLABORATORS):
        made["add_collaborator"] = lambda: adapter.add_collaborator(client, lead(), "12")
    everything = UnassignedDefinition(frozenset({"3"}), frozenset({"7"}), include_unclaimed=True)
    if has(Capability.SWEEP):
        made["unassigned_since"] = lambda: list(adapter.unassigned_since(client, NOW - timedelta(hours=2), everything))
    if has(Capability.SWEEP_CHANGES):
        made["changed_since"] = lambda: list(adapter.changed_since(client, NOW - timedelta(hours=2), everything))
    if has(Capability.WEBHOOK_API):
        made["subscribe"] = lambda: adapter.subscribe(client, URL)
        made["unsubscribe"] = lambda: adapter.unsubscribe(client, URL)
    return made


WRITES = ("set_owner", "add_note", "add_task", "add_collaborator", "subscribe")
