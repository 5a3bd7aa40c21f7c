"""Every adapter of the registry against the whole suite, and the suite against adapters that are broken."""

from __future__ import annotations

import pytest

from adapters import registry
from adapters.base import Capability
from tests.adapters import broken, checks_api, checks_deliveries
from tests.adapters.conformance import CHECKS, cases
from tests.adapters.kit import Kit, kit

MODULES = (checks_deliveries, checks_api)  # importing one registers its checks


@pytest.mark.parametrize(("name", "check"), cases())
def test_conformance(name: str, check: str) -> None:
    CHECKS[check].check(kit(name))


# TENANT_SECRET says whose the secret is, which no delivery shows; NULL_OWNER and the rest each select a check.
_SHOWN_ELSEWHERE = {Capability.TENANT_SECRET}


def test_every_module_brings_checks() -> None:
    homes = {case.check.__module__ for case in CHECKS.values()}
    assert homes == {module.__name__ for module in MODULES}


def test_every_capability_selects_a_check() -> None:
    assert {need for case in CHECKS.values() for need in case.needs | case.instead} == set(
        Capability
    ) - _SHOWN_ELSEWHERE


def fails(check: str, broken_kit: Kit) -> bool:
    try:
        CHECKS[check].check(broken_kit)
    except (Exception, pytest.fail.Exception):
        return True
    return False


@pytest.mark.parametrize("name", sorted(broken.BROKEN))
def test_the_suite_fails_a_broken_adapter(name: str) -> None:
    made, failing, passing = broken.BROKEN[name]
    assert {check: fails(check, made()) for check in failing} == dict.fromkeys(failing, True)
    for check in passing:  # it is the fault that fails, not the set-up
        CHECKS[check].check(made())


def test_the_registry_names_its_adapters() -> None:
    assert registry.names() == (
        "bottlecrm", "espocrm", "followupboss", "frappe", "generic", "hubspot", "odoo", "pipedrive",
        "salesforce", "twenty",
    )  # fmt: skip
    assert [registry.adapter(n).name for n in registry.names()] == list(registry.names())
    with pytest.raises(registry.UnknownAdapter, match="'nocrm' is not known; use one of bottlecrm, e"):
        registry.adapter("nocrm")
