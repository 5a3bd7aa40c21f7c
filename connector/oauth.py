"""OAuth: an account's consent, and the renewal of what it granted; tokens of a tenant's own app likewise.

Renewal is leased work on the tenant's row of ``oauth_grants``. Whoever finds it due claims it and commits, asks the
CRM with no transaction open, and stores the answer only while the claim is still theirs; all others see a claim that
stands and wait by due time. So one refresh token is never sent twice at once, which CRMs that rotate them answer by
ending the grant. ``invalid_grant`` is final, unless another token stands there by then: the tenant needs a human.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError

from adapters import oauth as calls
from adapters import registry
from adapters.base import Credentials
from adapters.client import Client
from adapters.oauth import App, DeadGrant, OAuth, StaleToken, Tokens
from adapters.outcome import CrmError
from adapters.payload import Fields, read_json
from connector import apps, log, work
from connector.alarms import close_alarm, open_alarm
from connector.alive import free
from connector.database import at_rest, unit
from connector.errors import TurnlockError
from connector.runtime import ACCESS, Runtime, Tenant, app_id
from connector.tables import breakers, oauth_grants, oauth_states

#: A renewal is due this long before the token ends, or at four fifths of its life where that is later.
MARGIN = 300.0
#: How long an admin's link, and a consent begun with it, may be used.
LINK_LIVES = timedelta(minutes=30)
# Longer than the call can take (its deadline is 10 s): a live worker's claim is never overtaken.
_LEASE = timedelta(seconds=30)
# A 401 with a token that the clock calls good: renewed once, and not again for this long. It may be a missing right.
_DOUBT_AGAIN = timedelta(minutes=10)
_BACKOFF = (2.0, 5.0, 15.0, 60.0, 300.0)
_CLOCK = sa.func.clock_timestamp()
#: Under which name refresh tokens are sealed.
REFRESH, _VERIFIER = "oauth_refresh", "oauth_verifier"
_ALARM = "reconnect_needed"

__all__ = [
    "ACCESS", "LINK_LIVES", "MARGIN", "REFRESH", "again", "begin", "client", "doubt", "finish", "give_back", "link",
    "removed", "renew",
]  # fmt: skip

_log = log.get("oauth")


# -- renewal ----------------------------------------------------------------------------------------------------


def renew(runtime: Runtime, tenant: Tenant, *, look_again: float = 60.0) -> float:
    """Renew the tenant's token if that is due and nobody is at it; seconds until it should be looked at again.

    Raises :class:`CrmError` when the CRM did not renew it: :class:`DeadGrant` once and for all, any other for now.
    """
    g = oauth_grants.c
    lease, living = runtime.life.new_lease(), runtime.life.living()
    # A consent begins with a token; an app of the tenant's own may ask for its first one.
    alive = sa.and_(g.tenant_id == tenant.tenant_id, g.state.in_(("live", "new") if tenant.own_app else ("live",)))
    mine = sa.and_(alive, g.lease == lease)
    with unit(runtime.engine) as (conn, _):
        row = conn.execute(
            sa.update(oauth_grants)
            .where(alive, g.due_at <= _CLOCK, free(oauth_grants, living))
            .values(lease=lease, leased_until=_CLOCK + _LEASE, attempt=g.attempt + 1)
            .returning(g.sealed_refresh, g.attempt)
        ).one_or_none()
        if row is None:
            due = conn.execute(sa.select(sa.extract("epoch", g.due_at - _CLOCK)).where(alive)).scalar_one_or_none()
            return 86400.0 if due is None else max(float(due), 1.0)
        app_tenant, app = _app(runtime, conn, tenant)
    refresh = runtime.vault.open(tenant.tenant_id, REFRESH, row.sealed_refresh) if row.sealed_refresh else ""
    try:
        with _token_client(runtime, tenant, app_tenant) as client:
            spec = _spec(tenant)
            tokens = calls.fetch(client, spec, app) if tenant.own_app else calls.renew(client, spec, app, refresh)
    except DeadGrant:
        with unit(runtime.engine) as (conn, _):
            # The row is read again by this very statement: where another token stands by now, that one counts.
            same = sa.and_(mine, g.sealed_refresh.is_not_distinct_from(row.sealed_refresh))
            if conn.execute(sa.update(oauth_grants).where(same).values(_freed("reconnect"))).rowcount:
                text = (
                    "the CRM gives the tenant's own app no token any more; see there that its client credentials flow "
                    f"is on and runs as an active user, then run `turnlock connect {tenant.name}`"
                    if tenant.own_app
                    else f"the account took its consent back; run `turnlock connect {tenant.name}` and open its link"
                )
                open_alarm(conn, tenant.tenant_id, _ALARM, "consent", text)
                _log.warning("grant is over", tenant=tenant.name)
        raise
    except CrmError as error:
        after = max(error.retry_after or 0.0, _BACKOFF[min(row.attempt, len(_BACKOFF)) - 1])
        with unit(runtime.engine) as (conn, _):
            values = {"lease": None, "leased_until": None, "due_at": _CLOCK + timedelta(seconds=after)}
            conn.execute(sa.update(oauth_grants).where(mine).values(values))
        _log.warning("not renewed", tenant=tenant.name, outcome=error.outcome.value, status=error.status)
        raise
    try:
        with unit(runtime.engine) as (conn, _):
            stored = _store(conn, runtime, tenant, tokens, mine)
    except SQLAlchemyError as error:
        # The CRM may have ended the old refresh token with its answer: what it gave must not be lost with the database.
        # It is stored once that is there again, as long as the old one stands; whoever asked with that meanwhile was
        # told that the grant is over, and sees by the new one that it is not.
        same = sa.and_(alive, g.sealed_refresh.is_not_distinct_from(row.sealed_refresh))
        later = partial(_store, runtime=runtime, tenant=tenant, tokens=tokens, still=same)
        runtime.abandoned.note(error, later)
        raise
    if not stored:
        _log.warning("renewed too late", tenant=tenant.name)
        return look_again
    runtime.forget_secrets()  # after the commit, or a thread would go on with what it reads before
    return _until_due(tokens)


def _store(
    conn: sa.Connection, runtime: Runtime, tenant: Tenant, tokens: Tokens, still: sa.ColumnElement[bool]
) -> bool:
    """Keep what the CRM gave, where that is `still` wanted; whether it is."""
    if not conn.execute(sa.update(oauth_grants).where(still).values(_kept(runtime, tenant, tokens))).rowcount:
        return False
    close_alarm(conn, tenant.tenant_id, _ALARM)
    return True


def give_back(runtime: Runtime, tenant: Tenant) -> None:
    """Tell the CRM that the grant is not needed any more. One that cannot be told keeps it until its admin ends it."""
    if _spec(tenant).revoke_url is None:
        return
    g = oauth_grants.c
    live = sa.and_(g.tenant_id == tenant.tenant_id, g.state == "live")
    with at_rest(runtime.engine) as conn:
        row = conn.execute(sa.select(g.sealed_refresh, g.sealed_access).where(live)).one_or_none()
        app_tenant, app = _app(runtime, conn, tenant)
    if row is None:
        return
    name, sealed = (REFRESH, row.sealed_refresh) if row.sealed_refresh else (ACCESS, row.sealed_access)
    try:
        with _token_client(runtime, tenant, app_tenant) as made:
            calls.revoke(made, _spec(tenant), app, runtime.vault.open(tenant.tenant_id, name, sealed))
    except CrmError as error:
        _log.warning("grant not given back", tenant=tenant.name, outcome=error.outcome.value, status=error.status)


def doubt(runtime: Runtime, conn: sa.Connection, tenant: Tenant) -> bool:
    """The CRM answered this thread 401: have the token renewed, once, should it have ended before the clock says so.

    True when the call may be made again at once, with another token: it is renewed before the next call, or was by
    another worker since this thread read it. Some CRMs never say how long a token lives, and tell of its end so.

    Call in the transaction that notes the refusal. Tenants that have credentials of their own are left alone.
    """
    if not tenant.has_tokens:
        return False
    g = oauth_grants.c
    live = sa.and_(g.tenant_id == tenant.tenant_id, g.state == "live")
    old = sa.and_(live, g.renewed_at < _CLOCK - _DOUBT_AGAIN)
    if conn.execute(sa.update(oauth_grants).where(old).values(due_at=_CLOCK, expires_at=_CLOCK)).rowcount:
        work.want(conn, tenant.tenant_id, "tokens")
    else:
        sealed = conn.execute(sa.select(g.sealed_access).where(live)).scalar_one_or_none()
        used = runtime.token_in_use(tenant.tenant_id)
        if sealed is None or used is None or runtime.vault.open(tenant.tenant_id, ACCESS, sealed) == used:
            return False
    runtime.forget_secrets()
    return True


def removed(runtime: Runtime, proof: str, body: bytes) -> bool:
    """A CRM tells that an account has removed the app; False where nothing proves that the CRM tells it.

    The token is renewed at once, and what the CRM says then counts: it may have been one of several users of the
    account who removed the app, for themselves.

    Raises :class:`adapters.base.Unreadable`.
    """
    g = oauth_grants.c
    with unit(runtime.engine) as (conn, _):
        for crm in registry.names():
            spec = registry.adapter(crm).oauth
            if spec is None or spec.removed is None or runtime.found(conn, app_id(crm)) is None:
                continue
            _, app = apps.app_credentials(runtime, conn, crm)
            if not hmac.compare_digest(calls.basic(app).encode(), proof.encode("utf-8", "replace")):
                continue
            tenant_id = apps.member(conn, crm, spec.removed(Fields(read_json(body), strict=True)))
            if tenant_id is not None:
                live = sa.and_(g.tenant_id == tenant_id, g.state == "live")
                conn.execute(sa.update(oauth_grants).where(live).values(due_at=_CLOCK, expires_at=_CLOCK))
                work.want(conn, tenant_id, "tokens")
            break
        else:
            return False
    runtime.forget_secrets()
    runtime.wake(tenant_id)
    return True


def client(runtime: Runtime, tenant: Tenant) -> Client:
    """The tenant's client, its token renewed first where it has run out. Call with no connection in hand.

    Raises :class:`CrmError`: among them :class:`StaleToken` while another worker is renewing it.
    """
    for last in (False, True):
        try:
            return runtime.client(tenant)
        except StaleToken:
            if last:
                raise
        renew(runtime, tenant)
    raise AssertionError("unreachable")


def again(runtime: Runtime, tenant: Tenant) -> None:
    """Have the tenant's own app ask for a token now, also where it was refused for good before.

    Raises :class:`CrmError`: it is refused again.
    """
    g = oauth_grants.c
    with unit(runtime.engine) as (conn, _):
        here = sa.update(oauth_grants).where(g.tenant_id == tenant.tenant_id)
        conn.execute(here.where(g.state == "reconnect").values(state="new"))
        conn.execute(here.values(due_at=_CLOCK, attempt=0))
    renew(runtime, tenant)
    with unit(runtime.engine) as (conn, _):
        _go_on(conn, tenant)
    runtime.wake(tenant.tenant_id)


def _go_on(conn: sa.Connection, tenant: Tenant) -> None:
    """The tenant is connected: what waited for that begins."""
    for alarm in (_ALARM, "crm_refuses_us"):
        close_alarm(conn, tenant.tenant_id, alarm)
    b = breakers.c  # the pause of a CRM that refused us is over
    conn.execute(
        sa.delete(breakers).where(b.tenant_id == tenant.tenant_id, b.lane == "all", b.reason.endswith("reauthorise"))
    )
    for kind in ("tokens", "agents"):
        work.want(conn, tenant.tenant_id, kind)


def _app(runtime: Runtime, conn: sa.Connection, tenant: Tenant) -> tuple[Tenant | None, App]:
    """The app that asks for a tenant's tokens, and its reserved tenant where it is that of all accounts."""
    if tenant.own_app:
        return None, apps.own_app(runtime, conn, tenant)
    return apps.app_credentials(runtime, conn, tenant.crm)


def _spec(tenant: Tenant) -> OAuth:
    spec = tenant.adapter.oauth
    assert spec is not None  # noqa: S101 - no tenant is by OAuth otherwise
    return spec


def _until_due(tokens: Tokens) -> float:
    return max(tokens.lives - MARGIN, tokens.lives * 0.8)


def _freed(state: str) -> dict[str, Any]:
    return {"state": state, "lease": None, "leased_until": None, "sealed_access": None, "sealed_refresh": None}


def _kept(runtime: Runtime, tenant: Tenant, tokens: Tokens) -> dict[str, Any]:
    """The columns that a token answer sets. A refresh token that is not given anew stays the one it was."""
    seal = runtime.vault.seal
    values: dict[str, Any] = {
        "state": "live",
        "sealed_access": seal(tenant.tenant_id, ACCESS, tokens.access),
        "expires_at": _CLOCK + timedelta(seconds=tokens.lives),
        "due_at": _CLOCK + timedelta(seconds=_until_due(tokens)),
        "renewed_at": _CLOCK,
        "attempt": 0,
        "lease": None,
        "leased_until": None,
    }
    if tokens.refresh is not None:
        values["sealed_refresh"] = seal(tenant.tenant_id, REFRESH, tokens.refresh)
    if tokens.base_url is not None:
        values["base_url"] = tokens.base_url
    return values


@contextmanager
def _token_client(runtime: Runtime, tenant: Tenant, app: Tenant | None) -> Iterator[Client]:
    """A client for the CRM's token address: the tenant's own, else that of the app (a sandbox), else the CRM's."""
    spec = _spec(tenant)
    parts = urlsplit(spec.token_url)
    own = tenant.base_url if spec.own_host else None
    with at_rest(runtime.engine) as conn:
        runtime.database_clock.read(conn)
    with Client(
        own or (app and app.base_url) or f"{parts.scheme}://{parts.netloc}",
        {},
        Credentials(),
        now=runtime.database_clock.now,
        allow_private_hosts=runtime.settings.allow_private_hosts,
        ca_file=runtime.settings.ca_file,
    ) as made:
        yield made


# -- consent ----------------------------------------------------------------------------------------------------


def link(runtime: Runtime, tenant: Tenant) -> str:
    """A link for the account's admin, good for :data:`LINK_LIVES`: whoever opens it can connect their account."""
    if not tenant.by_oauth:
        raise TurnlockError(f"{tenant.name} has credentials of its own; add a tenant with --oauth to connect one")
    with unit(runtime.engine) as (conn, _):
        apps.app_credentials(runtime, conn, tenant.crm)
        c = oauth_states.c
        conn.execute(sa.delete(oauth_states).where(c.tenant_id == tenant.tenant_id, c.expires_at < _CLOCK))
        ticket = _new_state(conn, tenant.tenant_id)
    return f"{runtime.settings.public_url}/oauth/start/{ticket}"


def begin(runtime: Runtime, ticket: str) -> tuple[str, str] | None:
    """Begin a consent with an admin's link: the CRM's address to go to, and the browser's secret. None: not valid.

    The link may be opened again (chats open links by themselves); each time is a consent of its own, bound to the
    browser that began it.
    """
    found = _split(ticket)
    if found is None:
        return None
    tenant_id, digest = found
    with unit(runtime.engine) as (conn, _):
        c = oauth_states.c
        here = sa.and_(c.tenant_id == tenant_id, c.state_hash == digest, c.browser_hash.is_(None))
        if conn.execute(sa.select(c.tenant_id).where(here, c.expires_at > _CLOCK)).one_or_none() is None:
            return None
        tenant = runtime.tenant(conn, tenant_id)
        if tenant.status != "active":
            return None
        app_tenant, app = apps.app_credentials(runtime, conn, tenant.crm)
        spec, said = _spec(tenant), app_tenant.parameters
        verifier = secrets.token_urlsafe(48) if spec.pkce and said.get("pkce") != "no" else None
        browser = secrets.token_urlsafe(32)
        state = _new_state(
            conn, tenant_id, browser_hash=_hash(browser), sealed_verifier=_sealed(runtime, tenant, verifier)
        )
    own = None
    if spec.own_host and tenant.base_url:
        own = tenant.base_url.rstrip("/") + urlsplit(spec.authorize_url).path
    return calls.consent_url(spec, app, state, verifier, at=own or said.get("authorize_url")), browser


def finish(runtime: Runtime, state: str, browser: str, code: str) -> tuple[Tenant, str | None]:
    """Take a consent that the CRM sent back; the tenant and its account. A state is used once, in its own browser.

    Raises:
        TurnlockError: the state is not valid, the account is another tenant's, or the tenant another account; the
            text is for the admin.
        CrmError: the CRM did not take the code.
    """
    found = _split(state)
    tenant_id, digest = found if found is not None else (UUID(int=0), b"")
    c = oauth_states.c
    with unit(runtime.engine) as (conn, _):
        here = sa.and_(c.tenant_id == tenant_id, c.state_hash == digest, c.expires_at > _CLOCK)
        row = conn.execute(sa.select(c.browser_hash, c.sealed_verifier).where(here)).one_or_none()
        if row is None or row.browser_hash is None or not hmac.compare_digest(row.browser_hash, _hash(browser)):
            raise TurnlockError("This consent was not begun in this browser, or too long ago. Open the link again.")
        if not conn.execute(sa.delete(oauth_states).where(c.tenant_id == tenant_id, c.state_hash == digest)).rowcount:
            raise TurnlockError("This consent was used already. Open the link again.")
        tenant = runtime.tenant(conn, tenant_id)
        app_tenant, app = apps.app_credentials(runtime, conn, tenant.crm)
    verifier = runtime.vault.open(tenant_id, _VERIFIER, row.sealed_verifier) if row.sealed_verifier else None
    with _token_client(runtime, tenant, app_tenant) as made:
        tokens = calls.redeem(made, _spec(tenant), app, code, verifier)
    if tokens.account is None:
        tokens = replace(tokens, account=_account(runtime, tenant, tokens))
    _grant(runtime, tenant, tokens)
    return tenant, tokens.account


def _account(runtime: Runtime, tenant: Tenant, tokens: Tokens) -> str | None:
    """Which account a token is of, where its answer does not say: asked before anything is done with it."""
    adapter = tenant.adapter
    address = tokens.base_url or tenant.base_url or adapter.default_base_url
    if address is None:
        return None
    credentials = Credentials(tenant.parameters, {"access_token": tokens.access})
    with runtime.client_with(adapter, address, credentials) as made:
        return adapter.account(made)


def _grant(runtime: Runtime, tenant: Tenant, tokens: Tokens) -> None:
    tenant_id = tenant.tenant_id
    values = _kept(runtime, tenant, tokens) | {"account": tokens.account}
    with unit(runtime.engine) as (conn, _):
        if tokens.account is not None:
            apps.claim(conn, tenant, tokens.account)
        new = insert(oauth_grants).values(tenant_id=tenant_id, **values)
        conn.execute(new.on_conflict_do_update(index_elements=["tenant_id"], set_=values))
        _go_on(conn, tenant)
    runtime.forget_secrets()
    runtime.wake(tenant_id)


def _sealed(runtime: Runtime, tenant: Tenant, verifier: str | None) -> bytes | None:
    return None if verifier is None else runtime.vault.seal(tenant.tenant_id, _VERIFIER, verifier)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def _new_state(conn: sa.Connection, tenant_id: UUID, **values: Any) -> str:
    """A text that nobody can guess and that names its tenant, so that it is looked up as that tenant's."""
    text = f"{tenant_id.hex}.{secrets.token_urlsafe(32)}"
    conn.execute(
        sa.insert(oauth_states).values(
            tenant_id=tenant_id, state_hash=_hash(text), expires_at=_CLOCK + LINK_LIVES, **values
        )
    )
    return text


def _split(text: str) -> tuple[UUID, bytes] | None:
    try:
        return UUID(hex=text.partition(".")[0]), _hash(text)
    except ValueError:
        return None
