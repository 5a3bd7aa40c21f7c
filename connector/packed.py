"""An event on its way through an app's inbox, as JSON: all that the copy of it at its tenant needs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from adapters.base import Event, EventKind
from routing.facts import lead_from_json, lead_to_json


def pack(event: Event) -> dict[str, Any]:
    """`event` as JSON-safe values; :func:`unpack` gives it back."""
    return {
        "kind": event.kind.value,
        "key": event.key,
        "final": event.key_is_final,
        "ref": event.ref,
        "lead": lead_to_json(event.lead) if event.lead else None,
        "occurred_at": event.occurred_at.isoformat() if event.occurred_at else None,
        "problem": event.problem,
        "account": event.account,
    }


def unpack(told: Mapping[str, Any]) -> Event:
    """The event that :func:`pack` wrote."""
    return Event(
        kind=EventKind(told["kind"]),
        key=told["key"],
        key_is_final=told["final"],
        ref=told["ref"],
        lead=lead_from_json(told["lead"]) if told["lead"] else None,
        occurred_at=datetime.fromisoformat(told["occurred_at"]) if told["occurred_at"] else None,
        problem=told["problem"],
        account=told["account"],
    )
