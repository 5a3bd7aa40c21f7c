"""Wording: what agents read in their CRM, by tenant, and writes of a task beside those of a note."""

from alembic import op

revision = "0016_wording"
down_revision = "0015_limits"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE tenants
    ADD COLUMN wording JSONB;

ALTER TABLE outbox
    DROP CONSTRAINT outbox_kind_ck,
    ADD CONSTRAINT outbox_kind_ck CHECK (kind IN ('owner', 'collaborator', 'note', 'task'));
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
