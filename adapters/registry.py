"""The adapters there are, by name. A new CRM is one module, one fixture folder, one manifest entry, and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from adapters.base import Adapter
from adapters.bottlecrm import BottleCrm
from adapters.espocrm import EspoCrm
from adapters.followupboss import FollowUpBoss
from adapters.frappe import Frappe
from adapters.generic import Generic
from adapters.hubspot import HubSpot
from adapters.odoo import Odoo
from adapters.pipedrive import Pipedrive
from adapters.salesforce import Salesforce
from adapters.twenty import Twenty

_ADAPTERS: Mapping[str, Adapter] = MappingProxyType(
    {
        adapter.name: adapter
        for adapter in (
            BottleCrm(),
            EspoCrm(),
            FollowUpBoss(),
            Frappe(),
            Generic(),
            HubSpot(),
            Odoo(),
            Pipedrive(),
            Salesforce(),
            Twenty(),
        )
    }
)


class UnknownAdapter(LookupError):
    """No adapter has this name; the text lists those there are."""


def names() -> tuple[str, ...]:
    """Names of all adapters, sorted."""
    return tuple(sorted(_ADAPTERS))


def adapter(name: str) -> Adapter:
    """The adapter called `name`. Adapters hold no state, so one serves everybody.

    Raises:
        UnknownAdapter: there is none.
    """
    try:
        return _ADAPTERS[name]
    except KeyError:
        raise UnknownAdapter(f"crm: {name[:60]!r} is not known; use one of {', '.join(names())}") from None
