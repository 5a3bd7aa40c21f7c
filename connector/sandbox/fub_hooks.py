"""Follow Up Boss webhooks: what a change of leads is told as, and how it is signed.

Source: https://docs.followupboss.com/reference/webhooks-guide. The signature is the lower-case hex HMAC-SHA256, keyed
with the system key, of the *base64 text* of the raw body.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any
from uuid import uuid4

from connector.sandbox.deliver import Delivery
from connector.sandbox.state import Change, Hook, State

FACE = "followupboss"
TOPICS = {
    "created": "peopleCreated",
    "updated": "peopleUpdated",
    "deleted": "peopleDeleted",
    "inquiry": "eventsCreated",
    "tags": "peopleTagsCreated",
    "stage": "peopleStageUpdated",
}
USUAL = ("peopleCreated", "peopleUpdated", "peopleDeleted", "eventsCreated")
# Seconds until each retry: about 1, 5, 5, 10, 30 min, then every 30 min up to 8 hours in all.
RETRIES = (60, 300, 300, 600, *(1800,) * 15)
DELETES_HOOK = (406, 410)


def sign(body: bytes, system_key: str) -> str:
    """The value of ``FUB-Signature``."""
    return hmac.new(system_key.encode(), base64.b64encode(body), hashlib.sha256).hexdigest()


def told(changes: Sequence[Change]) -> Iterator[tuple[str, list[int], dict[str, Any] | None]]:
    """Topic, ids and ``data`` of what a block of changes says, in order; equal neighbours in one."""
    # A merge has no event of its own here.
    for kind, group in groupby((c for c in changes if c.kind in TOPICS), key=lambda change: change.kind):
        members = list(group)
        numbers = [change.inquiry or change.lead.id for change in members]
        yield TOPICS[kind], list(dict.fromkeys(numbers)), None
        for tags, tagged in groupby(members, key=lambda change: change.tags_added):
            if tags:
                yield TOPICS["tags"], [change.lead.id for change in tagged], {"tags": list(tags)}
        for stage, staged in groupby(members, key=lambda change: change.stage):
            if stage:
                yield TOPICS["stage"], [change.lead.id for change in staged], {"stage": stage}


def deliveries(state: State, base: str, changes: Sequence[Change]) -> list[Delivery]:
    """What goes to whom because of `changes`; long id lists are cut at the batch size."""
    made = []
    for topic, numbers, data in told(changes):
        for hook in state.hooks_for(FACE, topic):
            for start in range(0, len(numbers), state.settings.batch):
                made.append(_delivery(state, hook, base, topic, numbers[start : start + state.settings.batch], data))
    return made


def _delivery(
    state: State, hook: Hook, base: str, topic: str, numbers: list[int], data: dict[str, Any] | None
) -> Delivery:
    event_id = str(uuid4())
    path = "events" if topic == "eventsCreated" else "people"
    joined = ",".join(map(str, numbers))
    event: dict[str, Any] = {
        "eventId": event_id,
        "eventCreated": datetime.now(UTC).isoformat(timespec="seconds"),
        "event": topic,
        "resourceIds": numbers,
        "uri": None if topic == "peopleDeleted" else f"{base}/{path}?id={joined}",
    }
    if data is not None:
        event["data"] = data
    # PHP by default writes "\/" for "/" and escapes everything outside ASCII.
    php = state.settings.php_escapes
    text = json.dumps(event, ensure_ascii=php, separators=(",", ":"))
    body = (text.replace("/", r"\/") if php else text).encode()
    return Delivery(
        id=state.number("delivery"),
        hook=hook,
        topic=topic,
        leads=numbers,
        message_id=event_id,
        body=body,
        sign=lambda raw: signed_headers(state, hook, raw),
        retries=RETRIES,
        deletes_hook=DELETES_HOOK,
        event=event,
    )


def signed_headers(state: State, hook: Hook, body: bytes) -> dict[str, str]:
    """Headers of a delivery of `body`."""
    return {
        "Content-Type": "application/json",
        "User-Agent": "FollowUpBoss",
        "X-System": hook.system,
        "FUB-Signature": sign(body, state.account.system_key),
    }
