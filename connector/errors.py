"""Errors that a person reads. Each says what is wrong and how to mend it."""

from __future__ import annotations


class TurnlockError(Exception):
    """Something that an admin or operator can mend; the text names the fix. The CLI prints it and exits 1."""


class SettingsError(TurnlockError):
    """The environment is not one that Turnlock will start in."""


class UnknownTenant(TurnlockError):
    """No tenant of that name."""


class NotFound(TurnlockError):
    """No queue, agent or lead of that name."""
