"""Stage `skips`: pauses and working hours. Until its flag is on only a deactivated agent is passed over."""

from alembic import op

revision = "0005_skips"
down_revision = "0004_weights"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE agents
    ADD COLUMN paused_by_crm BOOLEAN DEFAULT false NOT NULL,
    ADD COLUMN paused_by_admin BOOLEAN DEFAULT false NOT NULL,
    ADD COLUMN zone TEXT DEFAULT 'UTC' NOT NULL,
    ADD COLUMN zone_by_admin TEXT,
    ADD COLUMN hours JSONB;
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
