"""Stage `settle`: new leads of slow sources wait before they are decided. Until its flag is on none does."""

from alembic import op

revision = "0010_settle"
down_revision = "0009_credits"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE tenants
    ADD COLUMN settle JSONB DEFAULT '{}' NOT NULL;

ALTER TABLE leads
    ADD COLUMN settles_at timestamptz;
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
