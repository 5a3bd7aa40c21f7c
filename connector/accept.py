"""Accept: prove a delivery, store it, answer. No queue lock, no outbound call, no routing.

A 2xx means that the delivery is committed. It never answers 406 or 410: CRMs delete a hook that does.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from flask import Blueprint, Response, current_app, request
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError

from adapters.base import Event, EventKind, Rejected, Unreadable, WebhookRequest
from connector import log
from connector.alarms import open_alarm
from connector.database import is_contention, is_outage, new_id, unit
from connector.runtime import Runtime, Tenant
from connector.tables import dedupe_keys, deliveries, delivery_bodies, events, hooks
from routing.facts import lead_to_json
from routing.tables import tenants

#: Larger than any CRM's delivery by far; read under this limit before anything is parsed.
MAX_BODY = 1024 * 1024
_KEPT_HEADERS = ("content-type", "user-agent", "webhook-id", "webhook-timestamp")

blueprint = Blueprint("hooks", __name__)
_log = log.get("accept")


def token_hash(token: str) -> bytes:
    """How a hook's token is looked up: the table never holds the token in the clear."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


class TooLarge(Exception):
    """The body is over :data:`MAX_BODY`."""


def _raw_body() -> bytes:
    """The body as sent, once. A chunked body over the limit is an error here, where Werkzeug would cut it short."""
    declared = request.content_length
    if declared is not None and declared > MAX_BODY:
        raise TooLarge
    body = request.stream.read(MAX_BODY + 1)
    if len(body) > MAX_BODY:
        raise TooLarge
    return body


@blueprint.post("/hooks/<token>")
def receive(token: str) -> Response:
    """One delivery of a CRM."""
    runtime: Runtime = current_app.extensions["turnlock"]
    try:
        body = _raw_body()
        return _receive(runtime, token, body)
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


def _receive(runtime: Runtime, token: str, body: bytes) -> Response:
    with runtime.engine.connect() as conn:
        c, h = tenants.c, hooks.c
        row = conn.execute(
            sa.select(
                h.hook_id, c.flag_version, c.tenant_id, c.name, c.crm, c.base_url, c.parameters, c.status, c.sending
            )
            .join(tenants, c.tenant_id == h.tenant_id)
            .where(h.token_hash == token_hash(token))
        ).one_or_none()
        if row is None:
            return _plain(404, "No such hook.")
        tenant = Tenant(*row[2:])
        if tenant.status == "removed":
            return _plain(200, "Ignored: Turnlock is no longer installed for this account.")
        adapter = tenant.adapter
        secrets = [s.encode() for s in runtime.secrets(conn, tenant).get(adapter.hook_secret, [])]
    delivery = WebhookRequest(
        method=request.method,
        url=f"{runtime.settings.public_url}/hooks/{token}",
        headers={name.lower(): value for name, value in request.headers.items()},
        body=body,
    )
    try:
        adapter.verify(delivery, secrets, datetime.now(UTC))
    except Rejected as rejected:
        _log.warning("rejected", tenant=tenant.name, reason=rejected.reason)
        return _plain(401, f"Not accepted: {rejected.reason}.")
    try:
        found = adapter.parse(delivery)
    except Unreadable as unreadable:
        # Genuine, so it is kept: one parked event, however often the same bytes come.
        key = "unreadable:" + hashlib.sha256(body).hexdigest()
        found = [Event(EventKind.UNREADABLE, key, problem=unreadable.reason)]
    stored = store_delivery(
        runtime,
        tenant,
        found,
        hook_id=row.hook_id,
        body=body,
        flag_version=row.flag_version,
        headers={name: delivery.headers[name][:200] for name in _KEPT_HEADERS if name in delivery.headers},
    )
    if stored:
        runtime.wake(tenant.tenant_id)
    text, content_type = adapter.acknowledgement()
    return Response(text, status=200, content_type=content_type)


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
    """Commit a delivery with those of its events that are new; how many. Nothing new: nothing is stored."""
    fresh: dict[str, tuple[UUID, int, Event]] = {}
    for number, event in enumerate(found):
        fresh.setdefault(event.key, (new_id(), number, event))
    if not fresh:
        return 0
    with unit(runtime.engine) as (conn, now):
        # Sorted, so that two deliveries with common keys wait for each other in one direction only. A key that is
        # taken, by a committed event or by one being committed now, is a duplicate: done already.
        taken = insert(dedupe_keys).on_conflict_do_nothing(index_elements=["tenant_id", "key"])
        keys = set(
            conn.execute(
                taken.returning(dedupe_keys.c.key),
                [
                    {"tenant_id": tenant.tenant_id, "key": key, "event_id": e_id, "final": event.key_is_final}
                    for key, (e_id, _, event) in sorted(fresh.items())
                ],
            ).scalars()
        )
        if not keys:
            return 0
        delivery_id = new_id()
        conn.execute(
            sa.insert(deliveries).values(
                tenant_id=tenant.tenant_id,
                delivery_id=delivery_id,
                source=source,
                hook_id=hook_id,
                headers=headers,
                size=len(body),
                received_at=now,
            )
        )
        conn.execute(
            sa.insert(delivery_bodies).values(
                tenant_id=tenant.tenant_id, delivery_id=delivery_id, received_at=now, body=body
            )
        )
        rows: list[dict[str, Any]] = []
        for key, (event_id, number, event) in fresh.items():
            if key not in keys:
                continue
            state = {EventKind.UNKNOWN: "ignored", EventKind.UNREADABLE: "parked"}.get(event.kind, "waiting")
            rows.append(
                {
                    "tenant_id": tenant.tenant_id,
                    "event_id": event_id,
                    "delivery_id": delivery_id,
                    "ordinal": number,
                    "kind": event.kind.value,
                    "ref": event.ref,
                    "payload": lead_to_json(event.lead) if event.lead and state == "waiting" else None,
                    "flag_version": flag_version,
                    "state": state,
                    "reason": event.problem,
                    "received_at": now,
                    "occurred_at": event.occurred_at,
                    "closed_at": now if state == "ignored" else None,
                }
            )
            if state == "parked":
                open_alarm(
                    conn,
                    tenant.tenant_id,
                    "unreadable_event",
                    event.problem or "unreadable",
                    "a genuine delivery could not be read and is parked; see `turnlock parked`, and `turnlock replay` "
                    "once it can be read",
                )
        conn.execute(sa.insert(events), rows)
    return sum(row["state"] == "waiting" for row in rows)
