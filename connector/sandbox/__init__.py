"""A CRM to try things on: a local HTTP server with the APIs of several CRMs, a generic one, and faults.

It follows the vendors' documents by itself: nothing here imports an adapter, so that each keeps the other honest.
All people and keys in it are invented.
"""

from connector.sandbox.remote import Remote
from connector.sandbox.server import Sandbox
from connector.sandbox.state import Account, Settings

__all__ = ["Account", "Remote", "Sandbox", "Settings"]
