"""One module per CRM, a base they share, and the client that carries their requests.

Import boundary: adapters speak HTTP. They never open a database, never import Flask or ``connector``, and of
``routing`` they know only ``routing.model``.
"""
