"""The installed app: web, workers, CLI, settings, database session, leased work. All commits happen here.

Import boundary: this package may import ``routing`` and ``adapters``; neither imports it.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("turnlock")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0"
