"""The shared core: what a lead is, which rule wins, whose turn it is, and why.

Import boundary: this package never imports ``connector`` or ``adapters``, never commits, never speaks HTTP and
has no clock and no randomness of its own. ``import-linter`` (pyproject.toml) holds it to that.
"""
