"""Faults of the API: which call goes wrong, how often, and how.

A rule says *where* (``face``, ``method``, ``path``), *how often* (``times``, ``skip``, ``probability``; neither: until
cleared) and *what*. The whats, with their parameters:

===========  =============================================================================================
status       ``status``, ``retry_after``, ``apply`` (False): an error; with ``apply`` the call was done all the same.
slow         ``seconds``, ``apply_first`` (False): waits, before or after the call is done.
drip         ``seconds`` (60), ``pace`` (1): done, then answered byte by byte for that long.
endless      ``apply`` (True): an answer that never ends.
raw          ``status`` (200), ``body``, ``content_type``, ``apply`` (False): this body instead.
html         as raw, with a page of HTML.
empty        a GET shows empty lists; anything else is not done and answers ``{}``.
redirect     ``location``, ``status`` (307): not done.
drop         ``apply`` (False), ``sent`` (``nothing`` or ``headers``): the connection is reset.
zombie       ``seconds``, ``status`` (0: reset): not done now but after so many seconds, whatever was answered.
twice        done twice, answered once.
hold         ``apply`` (True): the answer waits until it is released; with False the call itself waits.
-----------  ---------------------------------------------------------------------------------------------
unreadable   ``seconds``: leads younger than that are absent.
stale        ``seconds``: owners (HubSpot: and the times of changes) are shown as they were so long ago.
lost_owner   ``owner`` (``empty`` or ``unchanged``): an owner write answers success and does not set the owner.
flip         ``seconds``, ``owner``: so long after a write the CRM itself gives the lead to that agent (None: nobody).
===========  =============================================================================================

Of the first group the first rule that matches a call acts alone; those of the second act together and with it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from random import Random
from typing import Any

from connector.sandbox.exchange import View

WHERE = {"face": None, "method": None, "path": "", "times": None, "skip": 0, "probability": None}
PAGE = "<!doctype html><title>One moment</title><p>We will be right back.</p>"
HARD: dict[str, dict[str, Any]] = {
    "status": {"status": 503, "retry_after": None, "apply": False},
    "slow": {"seconds": 1.0, "apply_first": False},
    "drip": {"seconds": 60.0, "pace": 1.0},
    "endless": {"apply": True},
    "raw": {"status": 200, "body": "", "content_type": "application/json", "apply": False},
    "html": {"status": 200, "body": PAGE, "content_type": "text/html; charset=utf-8", "apply": False},
    "empty": {},
    "redirect": {"location": "http://127.0.0.1:9/", "status": 307},
    "drop": {"apply": False, "sent": "nothing"},
    "zombie": {"seconds": 1.0, "status": 0},
    "twice": {},
    "hold": {"apply": True},
}
SOFT: dict[str, dict[str, Any]] = {
    "unreadable": {"seconds": 1.0},
    "stale": {"seconds": 1.0},
    "lost_owner": {"owner": "empty"},
    "flip": {"seconds": 1.0, "owner": None},
}
CHOICES = {"sent": ("nothing", "headers"), ("lost_owner", "owner"): ("empty", "unchanged")}
RETRY_AFTER = {"huge": "99999999", "negative": "-5", "garbage": "soon"}


def retry_after(value: Any, now: datetime) -> str | None:
    """A Retry-After header: None absent; a number of seconds as it is; ``date:N`` the HTTP date N seconds after `now`;
    ``huge``, ``negative``, ``garbage``; any other text as it is."""
    if value is None:
        return None
    if isinstance(value, str) and value.startswith("date:"):
        # Rounded up: the header has whole seconds, and a promise of N seconds must not be shorter.
        moment = now.astimezone(UTC) + timedelta(seconds=float(value[5:]) + 1, microseconds=-1)
        return format_datetime(moment.replace(microsecond=0), usegmt=True)
    return RETRY_AFTER.get(str(value), str(value))


@dataclass(slots=True)
class Rule:
    """One fault. ``seen`` counts calls that matched, ``hits`` those that it spoiled."""

    id: int
    what: str
    where: dict[str, Any]
    params: dict[str, Any]
    pattern: re.Pattern[str]
    seen: int = 0
    hits: int = 0

    def shown(self) -> dict[str, Any]:
        """The rule as plain data."""
        return {"id": self.id, "what": self.what, **self.where, **self.params, "seen": self.seen, "hits": self.hits}


@dataclass(slots=True)
class Plan:
    """What befalls one call."""

    hard: Rule | None = None
    flip: Rule | None = None
    view: View = field(default_factory=View)
    names: list[str] = field(default_factory=list)


class Faults:
    """The list of rules. The same seed and calls give the same faults."""

    def __init__(self, seed: int) -> None:
        self._lock = threading.Lock()
        self._rng = Random(f"{seed}:faults")  # noqa: S311 - repeatable faults, not a secret
        self._rules: dict[int, Rule] = {}
        self._last = 0

    def add(self, what: str, values: Mapping[str, Any]) -> int:
        """Add a rule; its id. Raises :class:`ValueError` for an unknown what or parameter."""
        known = HARD.get(what, SOFT.get(what))
        if known is None:
            raise ValueError(f"faults: no fault {what!r}; there are {', '.join([*HARD, *SOFT])}")
        if unknown := sorted(set(values) - set(WHERE) - set(known)):
            raise ValueError(f"faults: {what} has no {', '.join(unknown)}; it has {', '.join([*known, *WHERE])}")
        for name, value in values.items():
            choices = CHOICES.get(name) or CHOICES.get((what, name))
            if choices and value not in choices:
                raise ValueError(f"faults: {name} must be one of {', '.join(choices)}")
        where = {name: values.get(name, default) for name, default in WHERE.items()}
        params = {name: values.get(name, default) for name, default in known.items()}
        try:
            pattern = re.compile(where["path"])
        except re.error as error:
            raise ValueError(f"faults: path is not a regular expression: {error}") from None
        with self._lock:
            self._last += 1
            self._rules[self._last] = Rule(self._last, what, where, params, pattern)
            return self._last

    def clear(self, number: int | None = None) -> None:
        """Remove one rule, or all."""
        with self._lock:
            if number is None:
                self._rules.clear()
            else:
                self._rules.pop(number, None)

    def rules(self) -> list[dict[str, Any]]:
        """The rules as plain data, used-up ones included."""
        with self._lock:
            return [rule.shown() for rule in self._rules.values()]

    def plan(self, face: str, method: str, path: str) -> Plan:
        """What befalls this call; counts it on the rules that it meets. `path` is searched with ``path``."""
        plan = Plan()
        with self._lock:
            for rule in self._rules.values():
                if (plan.hard and rule.what in HARD) or not self._strikes(rule, face, method, path):
                    continue
                plan.names.append(rule.what)
                match rule.what:
                    case "unreadable":
                        plan.view.hide_younger = rule.params["seconds"]
                    case "stale":
                        plan.view.stale = rule.params["seconds"]
                    case "lost_owner":
                        plan.view.lost_owner = rule.params["owner"]
                    case "flip":
                        plan.flip = rule
                    case _:
                        plan.hard = rule
        return plan

    def _strikes(self, rule: Rule, face: str, method: str, path: str) -> bool:
        where = rule.where
        if where["face"] not in (None, face) or where["method"] not in (None, method) or not rule.pattern.search(path):
            return False
        rule.seen += 1
        if rule.seen <= where["skip"] or (where["times"] is not None and rule.hits >= where["times"]):
            return False
        if where["probability"] is not None and self._rng.random() >= where["probability"]:
            return False
        rule.hits += 1
        return True
