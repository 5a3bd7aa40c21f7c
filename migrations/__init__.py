"""Alembic revisions, one per stage of the rollout. They only add; each runs under the code before it."""
