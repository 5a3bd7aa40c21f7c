"""OAuth: an account's consent, and the renewal of what it granted.

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
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from adapters import oauth as calls
from adapters.base import Credentials
from adapters.client import Client
from adapters.oauth import DeadGrant, OAuth, StaleToken, Tokens
from adapters.outcome import CrmError
from connector import apps, log, work
from connector.alarms import close_alarm, open_alarm
from connector.alive import free
from connector.database import at_rest, unit
from connector.errors import TurnlockError
from connector.runtime import ACCESS, Runtime, Tenant
from connector.tables import breakers, oauth_grants, oauth_states
from routing.tables import tenants

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
    "ACCESS", "LINK_LIVES", "MARGIN", "REFRESH", "begin", "client", "doubt", "finish", "give_back", "link", "renew",
]  # fmt: skip

_log = log.get("oauth")


# -- renewal ----------------------------------------------------------------------------------------------------


def renew(runtime: Runtime, tenant: Tenant, *, look_again: float = 60.0) -> float:
    """Renew the tenant's token if that is due and nobody is at it; seconds until it should be looked at again.

    Raises :class:`CrmError` when the CRM did not renew it: :class:`DeadGrant` once and for all, any other for now.
    """
    g = oauth_grants.c
    lease, living = runtime.life.new_lease(), runtime.life.living()
    mine = sa.and_(g.tenant_id == tenant.tenant_id, g.lease == lease, g.state == "live")
    with unit(runtime.engine) as (conn, _):
        row = conn.execute(
            sa.update(oauth_grants)
            .where(g.tenant_id == tenant.tenant_id, g.state == "live", g.due_at <= _CLOCK, free(oauth_grants, living))
            .values(lease=lease, leased_until=_CLOCK + _LEASE, attempt=g.attempt + 1)
            .returning(g.sealed_refresh, g.attempt)
        ).one_or_none()
        if row is None:
            due = conn.execute(
                sa.select(sa.extract("epoch", g.due_at - _CLOCK)).where(
                    g.tenant_id == tenant.tenant_id, g.state == "live"
                )
            ).scalar_one_or_none()
            return 86400.0 if due is None else max(float(due), 1.0)
        app_tenant, app = apps.app_credentials(runtime, conn, tenant.crm)
    refresh = runtime.vault.open(tenant.tenant_id, REFRESH, row.sealed_refresh) if row.sealed_refresh else ""
    try:
        with _token_client(runtime, tenant, app_tenant) as client:
            tokens = calls.renew(client, _spec(tenant), app, refresh)
    except DeadGrant:
        with unit(runtime.engine) as (conn, _):
            # The row is read again by this very statement: where another token stands by now, that one counts.
            same = sa.and_(mine, g.sealed_refresh.is_not_distinct_from(row.sealed_refresh))
            if conn.execute(sa.update(oauth_grants).where(same).values(_freed("reconnect"))).rowcount:
                text = f"the account took its consent back; run `turnlock connect {tenant.name}` and open its link"
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
    with unit(runtime.engine) as (conn, _):
        if not conn.execute(sa.update(oauth_grants).where(mine).values(_kept(runtime, tenant, tokens))).rowcount:
            _log.warning("renewed too late", tenant=tenant.name)
            return look_again
        close_alarm(conn, tenant.tenant_id, _ALARM)
    runtime.forget_secrets()
    return _until_due(tokens)


def give_back(runtime: Runtime, tenant: Tenant) -> None:
    """Tell the CRM that the grant is not needed any more. One that cannot be told keeps it until its admin ends it."""
    if _spec(tenant).revoke_url is None:
        return
    g = oauth_grants.c
    live = sa.and_(g.tenant_id == tenant.tenant_id, g.state == "live")
    with at_rest(runtime.engine) as conn:
        sealed = conn.execute(sa.select(g.sealed_refresh).where(live)).scalar_one_or_none()
        app_tenant, app = apps.app_credentials(runtime, conn, tenant.crm)
    if sealed is None:
        return
    try:
        with _token_client(runtime, tenant, app_tenant) as made:
            calls.revoke(made, _spec(tenant), app, runtime.vault.open(tenant.tenant_id, REFRESH, sealed))
    except CrmError as error:
        _log.warning("grant not given back", tenant=tenant.name, outcome=error.outcome.value, status=error.status)


def doubt(runtime: Runtime, conn: sa.Connection, tenant: Tenant) -> bool:
    """The CRM answered this thread 401: have the token renewed, once, should it have ended before the clock says so.

    True when the call may be made again at once, with another token: it is renewed before the next call, or was by
    another worker since this thread read it. Some CRMs never say how long a token lives, and tell of its end so.

    Call in the transaction that notes the refusal. Tenants that have credentials of their own are left alone.
    """
    if not tenant.by_oauth:
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
def _token_client(runtime: Runtime, tenant: Tenant, app: Tenant) -> Iterator[Client]:
    """A client for the CRM's token address: the tenant's own, else that of the app (a sandbox), else the CRM's."""
    spec = _spec(tenant)
    parts = urlsplit(spec.token_url)
    own = tenant.base_url if spec.own_host else None
    with at_rest(runtime.engine) as conn:
        runtime.database_clock.read(conn)
    with Client(
        own or app.base_url or f"{parts.scheme}://{parts.netloc}",
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
        TurnlockError: the state is not valid, or the account is another tenant's; the text is for the admin.
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
    _grant(runtime, tenant, tokens)
    return tenant, tokens.account


def _grant(runtime: Runtime, tenant: Tenant, tokens: Tokens) -> None:
    tenant_id = tenant.tenant_id
    values = _kept(runtime, tenant, tokens) | {"account": tokens.account}
    with unit(runtime.engine) as (conn, _):
        if tokens.account is not None and not apps.join(conn, tenant.crm, tokens.account, tenant):
            raise TurnlockError(apps.TAKEN)
        new = insert(oauth_grants).values(tenant_id=tenant_id, **values)
        conn.execute(new.on_conflict_do_update(index_elements=["tenant_id"], set_=values))
        if tokens.account is not None:
            conn.execute(sa.update(tenants).where(tenants.c.tenant_id == tenant_id).values(account_ref=tokens.account))
        for alarm in (_ALARM, "crm_refuses_us"):
            close_alarm(conn, tenant_id, alarm)
        b = breakers.c  # the pause of a CRM that refused us is over
        conn.execute(
            sa.delete(breakers).where(b.tenant_id == tenant_id, b.lane == "all", b.reason.endswith("reauthorise"))
        )
        for kind in ("tokens", "agents"):
            work.want(conn, tenant_id, kind)
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
