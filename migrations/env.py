"""Runs the revisions on the connection that connector.migrate hands over; nothing here opens a database."""

from alembic import context

import connector.tables  # noqa: F401 - its tables join the shared metadata
from routing.tables import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    # A stage is whole or absent: each revision commits by itself, so a stop between two leaves a usable schema.
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
