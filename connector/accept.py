"""Accept: prove a delivery, store it, answer. No queue lock, no outbound call, no routing.

A 2xx means that the delivery is committed. It never answers 406 or 410: CRMs delete a hook that does.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.wrappers import Request, Response

from adapters.base import HOOK_TOPIC, Adapter, Event, EventKind, Rejected, Unreadable, WebhookRequest
from connector import log, refused
from connector.alarms import open_alarm
from connector.database import is_contention, is_outage, new_id, unit
from connector.packed import pack
from connector.runtime import Runtime, Tenant
from connector.storing import STORE, Delivery, values
from connector.tables import hooks
from connector.wake import EVENTS
from routing.facts import lead_to_json
from routing.flight import fly
from routing.tables import tenants

#: Larger than any CRM's delivery by far; read under this limit before anything is parsed.
MAX_BODY = 1024 * 1024
_KEPT_HEADERS = ("content-type", "user-agent", "webhook-id", "webhook-timestamp", HOOK_TOPIC)

_log = log.get("accept")


def token_hash(token: str) -> bytes:
    """How a hook's token is looked up: the table never holds the token in the clear."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


class Accepted(NamedTuple):
    """What a CRM hears of a delivery that needs nothing more: body and content type of a 200."""

    text: str
    content_type: str


class TooLarge(Exception):
    """The body is over :data:`MAX_BODY`."""


def _raw_body(request: Request) -> bytes:
    """The body as sent, once. A chunked body over the limit is an error here, where Werkzeug would cut it short."""
    declared = request.content_length
    if declared is not None and declared > MAX_BODY:
        raise TooLarge
    body = request.stream.read(MAX_BODY + 1)
    if len(body) > MAX_BODY:
        raise TooLarge
    return body


@dataclass(frozen=True, slots=True)
class _Hook:
    """A hook with what verifying needs, as read at `read_at` (monotonic seconds)."""

    hook_id: UUID
    flag_version: int
    account: str | None  # the connected account at the CRM, where it is known
    tenant: Tenant
    adapter: Adapter
    secrets: Sequence[bytes]
    read_at: float


# A hook is asked for on every delivery and changes hardly ever. What another process changed is seen this late; a
# signature that fails is judged on a fresh reading.
_HOOK_FRESH = 2.0


def _hook(runtime: Runtime, token: str, *, fresh: bool = False) -> _Hook | None:
    key = token_hash(token)
    kept: _Hook | None = runtime.hooks.get(key)
    if kept is not None and not fresh and time.monotonic() - kept.read_at < _HOOK_FRESH:
        return kept
    began = time.monotonic()
    with runtime.engine.connect() as conn:
        c, h = tenants.c, hooks.c
        row = conn.execute(
            sa.select(
                h.hook_id,
                c.flag_version,
                c.account_ref,
                c.tenant_id,
                c.name,
                c.crm,
                c.base_url,
                c.parameters,
                c.status,
                c.sending,
            )
            .join(tenants, c.tenant_id == h.tenant_id)
            .where(h.token_hash == key)
        ).one_or_none()
        if row is None:
            return None
        runtime.database_clock.read(conn, fresh=fresh)
        tenant = Tenant(*row[3:])
        secrets = [s.encode() for s in runtime.secrets(conn, tenant).get(tenant.adapter.hook_secret or "", [])]
    found = _Hook(row.hook_id, row.flag_version, row.account_ref, tenant, tenant.adapter, secrets, began)
    runtime.hooks[key] = found
    return found


def receive(runtime: Runtime, request: Request, token: str, topic: str | None) -> Accepted | Response:
    """One delivery of a CRM. Where its body does not say what it tells of, the address has a `topic`."""
    try:
        return _receive(runtime, request, token, topic)
    except TooLarge:
        return _plain(413, f"The body is over {MAX_BODY} bytes.")
    except (SQLAlchemyError, OSError) as error:
        if isinstance(error, SQLAlchemyError) and not (is_outage(error) or is_contention(error)):
            raise
        # Nothing is stored, so nothing is promised: the CRM sends it again.
        _log.warning("not stored", **log.fault(error))
        return _plain(503, "Not stored, please send it again.", {"Retry-After": "5"})


def _plain(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(text, status=status, content_type="text/plain", headers=headers)


def _receive(runtime: Runtime, request: Request, token: str, topic: str | None) -> Accepted | Response:
    body = _raw_body(request)
    hook = _hook(runtime, token)
    if hook is None:
        return _plain(404, "No such hook.")
    if hook.tenant.status == "removed":
        return _done(hook.adapter, "Ignored: Turnlock is no longer installed for this account.")
    sent = {name.lower(): value for name, value in request.headers.items()}
    sent.pop(HOOK_TOPIC, None)
    delivery = WebhookRequest(
        method=request.method,
        url=f"{runtime.settings.public_url}/hooks/{token}",
        headers=sent | {HOOK_TOPIC: topic} if topic else sent,
        body=body,
    )
    try:
        try:
            found = _events(hook, delivery, runtime)
        except Rejected:
            hook = _hook(runtime, token, fresh=True)  # the secret may be a new one, and this computer may have slept
            if hook is None:
                return _plain(404, "No such hook.")
            found = _events(hook, delivery, runtime)
    except Rejected as rejected:
        _log.warning("rejected", tenant=hook.tenant.name if hook else None, reason=rejected.reason)
        if hook is not None:
            refused.note(runtime, hook.tenant, rejected.reason)
        return _plain(401, f"Not accepted: {rejected.reason}.")
    headers = {name: delivery.headers[name][:200] for name in _KEPT_HEADERS if name in delivery.headers}
    store_delivery(
        runtime,
        hook.tenant,
        found,
        hook_id=hook.hook_id,
        body=body,
        flag_version=hook.flag_version,
        headers=headers,
    )
    return _done(hook.adapter)


def _events(hook: _Hook, delivery: WebhookRequest, runtime: Runtime) -> list[Event]:
    """What a delivery tells. Raises :class:`Rejected` unless it comes from the tenant's CRM, and from its account."""
    hook.adapter.verify(delivery, hook.secrets, runtime.database_clock.now())
    try:
        found = hook.adapter.parse(delivery)
    except Unreadable as unreadable:
        # Genuine, so it is kept: one parked event, however often the same bytes come.
        key = "unreadable:" + hashlib.sha256(delivery.body).hexdigest()
        return [Event(EventKind.UNREADABLE, key, problem=unreadable.reason)]
    if hook.account is not None and any(event.account not in (None, hook.account) for event in found):
        # A copy of the account, made to test with, sends to where its original did.
        raise Rejected("other_account")
    return found


def _done(adapter: Adapter, otherwise: str = "") -> Accepted:
    """What this CRM expects to hear; some send a delivery again until they do."""
    text, content_type = adapter.acknowledgement()
    return Accepted(text or otherwise, content_type)


_STATES = {EventKind.UNKNOWN: "ignored", EventKind.UNREADABLE: "parked"}


def store_delivery(
    runtime: Runtime,
    tenant: Tenant,
    found: list[Event],
    *,
    hook_id: UUID | None,
    body: bytes,
    flag_version: int,
    headers: dict[str, str],
    source: str = "webhook",
) -> int:
    """Commit a delivery with those of its events that are new; how many of them wait. Nothing new: nothing stored."""
    first: dict[str, tuple[int, Event]] = {}
    for number, event in enumerate(found):
        first.setdefault(event.key, (number, event))
    if not first:
        return 0
    delivery_id = new_id()
    rows = []
    for key, (number, event) in first.items():
        state, reason = _STATES.get(event.kind, "waiting"), event.problem
        payload: Any = lead_to_json(event.lead) if event.lead else None
        if tenant.is_app:
            # All that is about an account waits to be copied there, also what then parks there. The rest is nobody's.
            payload = pack(event) if event.account else None
            if event.kind is not EventKind.UNKNOWN:
                state = "waiting" if event.account else "parked"
                reason = reason or (None if event.account else "no_account")
        rows.append(
            {
                "key": key,
                "final": event.key_is_final,
                "event_id": str(new_id()),
                "delivery_id": str(delivery_id),
                "ordinal": number,
                "kind": event.kind.value,
                "ref": event.ref,
                "payload": payload if state == "waiting" else None,
                "state": state,
                "reason": reason,
                "occurred_at": event.occurred_at.isoformat() if event.occurred_at else None,
                "flag_version": flag_version,
                "settle": tenant.adapter.settle if source == "webhook" and not tenant.is_app else 0.0,
            }
        )
    row = {
        "delivery_id": str(delivery_id),
        "source": source,
        "hook_id": str(hook_id) if hook_id else None,
        "headers": headers,
        "size": len(body),
    }
    delivery = Delivery(delivery_id, row, body, rows)
    if all(one["state"] != "parked" for one in rows):
        stored = runtime.storing.store(tenant.tenant_id, delivery)
        return sum(one.state == "waiting" for one in stored)
    with unit(runtime.engine) as (conn, _):
        (stored,) = fly(conn, [STORE(**values(tenant.tenant_id, [delivery]))])
        for one in stored:
            if one.state == "parked":
                open_alarm(
                    conn,
                    tenant.tenant_id,
                    "unreadable_event",
                    one.reason or "unreadable",
                    "a genuine delivery could not be read and is parked; see `turnlock parked`, and `turnlock replay` "
                    "once it can be read",
                )
    runtime.wake(tenant.tenant_id, EVENTS)
    return sum(one.state == "waiting" for one in stored)
