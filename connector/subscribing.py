"""Hooks in the CRM: made at an install, and made again where a CRM removes them by itself.

Some CRMs delete a hook whose deliveries failed for days. Nothing tells of that, and from then on only the sweep finds
leads, so a chore looks, and so does a sweep that found any.
"""

from __future__ import annotations

from typing import Any

from adapters.base import Capability, Subscribed
from connector import log, oauth
from connector.alarms import close_alarm, open_alarm
from connector.database import unit
from connector.hooks import hook_url, set_secret
from connector.runtime import Runtime, Tenant

# Seconds between two looks. A CRM deletes a hook after days of failures at the soonest, and each look costs a call.
_LOOK_AGAIN = 86400.0
_ALARM = "hooks_lost"

_log = log.get("subscribing")


def served_by_app(tenant: Tenant) -> bool:
    """Whether an app's one hook serves the account: then there is none of its own to make or remove."""
    return tenant.by_oauth and Capability.APP_HOOKS in tenant.adapter.capabilities


def subscribe(runtime: Runtime, tenant: Tenant, url: str) -> Subscribed:
    """Have the CRM post to `url`, and keep the secret that its deliveries show or are signed with."""
    subscribed = tenant.adapter.subscribe(oauth.client(runtime, tenant), url)
    name, secret = tenant.adapter.hook_secret, subscribed.secret
    if name is not None and secret is not None:
        with runtime.engine.connect() as conn:
            newest = runtime.secrets(conn, tenant).get(name, [])[:1]
        if secret not in newest:
            set_secret(runtime, tenant, name, secret)
    return subscribed


def mend(runtime: Runtime, tenant: Tenant) -> tuple[str, ...]:
    """Make again the hooks that the CRM has removed by itself; their topics. Finding any is an alarm.

    While the tenant's sending is stopped nothing is looked at: making a hook is a write.
    """
    if served_by_app(tenant) or not tenant.sending:
        return ()
    with runtime.engine.connect() as conn:
        url = hook_url(runtime, conn, tenant)
    lost = tenant.adapter.lost_hooks(oauth.client(runtime, tenant), url)
    by_hand = subscribe(runtime, tenant, url).by_hand if lost else ()
    with unit(runtime.engine) as (conn, _):
        if not lost:
            close_alarm(conn, tenant.tenant_id, _ALARM)
            return ()
        done = f"left to do: {'; '.join(by_hand)}" if by_hand else "Turnlock made them again"
        text = (
            f"the CRM had removed or switched off hooks ({', '.join(lost)}); {done}. It does so when deliveries fail "
            "for long: see that TURNLOCK_PUBLIC_URL is reachable from the internet"
        )
        open_alarm(conn, tenant.tenant_id, _ALARM, "hooks", text)
    _log.warning("hooks were lost", tenant=tenant.name, topics=list(lost), again=not by_hand)
    return lost


def run(runtime: Runtime, tenant: Tenant) -> tuple[float, Any]:
    """The chore."""
    mend(runtime, tenant)
    return _LOOK_AGAIN, None
