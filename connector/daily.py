"""Budgets that the CRM itself counts, such as a day's calls, shared by all programs of the account.

Its answers say what is left. Nothing is counted here, for most of it is used by others; each process goes by the
answers it gets. While little is left, notes, tasks and chores wait, so that owners can still be set, and an alarm says
so, well before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from adapters.budget import Bucket, Lane, Left
from connector import log
from connector.alarms import close_alarm, open_alarm
from connector.database import unit

ALARM = "crm_budget_low"
# Seconds for which an answer is believed. Who waits does not hear that the budget is whole again: after this it asks.
_BELIEVED = 900.0
# The alarm is opened while twice as much is left as is kept for owners, and closed well above that, not to flap.
OPENS, _CLOSES = 2.0, 2.5
# Seconds after which a chore sees to the alarm again: who opened it may have ended since.
_AGAIN = 600.0
_WAITING = frozenset({Lane.NOTES, Lane.TASKS, Lane.CHORES})

_log = log.get("limits")


@dataclass(slots=True)
class _Budget:
    """What this process heard of one budget last. Times are monotonic."""

    said: Left | None = None
    heard_at: float = 0.0
    low: bool | None = None  # None: the alarm may be open or not
    seen_to_at: float = float("-inf")


class Budgets:
    """The budgets of one tenant in this process. Safe to share between threads: whoever heard last, that counts."""

    def __init__(self, engine: sa.Engine, tenant_id: UUID, table: tuple[Bucket, ...]) -> None:
        self._engine, self._tenant_id = engine, tenant_id
        self._budgets: Mapping[str, _Budget] = {bucket.name: _Budget() for bucket in table if bucket.told}

    def said(self, bucket: Bucket) -> Left | None:
        """What is left of how much, as the last answer told this process; None: none did."""
        return self._budgets[bucket.name].said

    def wait(self, bucket: Bucket, lane: Lane) -> float:
        """Seconds for which calls of this lane leave what is left to owners; 0: none."""
        budget = self._budgets[bucket.name]
        said = budget.said
        if said is None or lane not in _WAITING or said.left > said.limit * bucket.kept:
            return 0.0
        return max(0.0, budget.heard_at + min(said.resets_in or _BELIEVED, _BELIEVED) - time.monotonic())

    def hear(self, bucket: Bucket, said: Left, lane: Lane) -> None:
        """An answer to a call of this lane told what is left. Never raises."""
        budget, now = self._budgets[bucket.name], time.monotonic()
        if said.limit <= 0:
            return
        budget.said, budget.heard_at = said, now
        low = said.left < said.limit * bucket.kept * (_CLOSES if budget.low else OPENS)
        # No owner waits for it that the alarm, as far as this process knows, is as it should be.
        if low == bool(budget.low) and (lane not in _WAITING or now - budget.seen_to_at < _AGAIN):
            return
        before = budget.low, budget.seen_to_at
        budget.low, budget.seen_to_at = low, now
        try:
            with unit(self._engine) as (conn, _):
                if low:
                    open_alarm(conn, self._tenant_id, ALARM, bucket.name, _text(bucket, said))
                else:
                    close_alarm(conn, self._tenant_id, ALARM, bucket.name)
        except SQLAlchemyError as error:  # the answer must not be lost for it
            budget.low, budget.seen_to_at = before
            _log.warning("alarm not kept", **log.fault(error))


def _text(bucket: Bucket, said: Left) -> str:
    return (
        f"Of the {said.limit} calls or tokens that the CRM lets all programs of this account use in a day, {said.left} "
        f"are left. Below {round(said.limit * bucket.kept)} notes, tasks, syncs and sweeps wait, so that owners can "
        "still be set, and go on by themselves. See what else calls the CRM, or buy more."
    )
