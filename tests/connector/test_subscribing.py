"""Hooks that a CRM switched off by itself stand again, and somebody hears of it."""

from __future__ import annotations

from tests.rig import ANA, Rig


def test_hooks_that_the_crm_disabled_are_enabled_and_an_alarm_says_so(rig: Rig) -> None:
    rig.first_round()
    assert rig.alarms() == set()  # the first look, at the install, found nothing wrong
    hooks = [hook["id"] for hook in rig.sandbox.hooks()]
    for hook in hooks:
        rig.sandbox.change_hook(hook, active=False)
    rig.run_chore("hooks")
    assert [(hook["id"], hook["active"]) for hook in rig.sandbox.hooks()] == [(hook, True) for hook in hooks]
    assert rig.alarms() == {"hooks_lost"}
    assert rig.assign() == ANA
    rig.run_chore("hooks")
    assert rig.alarms() == set()
