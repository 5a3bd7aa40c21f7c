"""Stage `weights`: members take turns in proportion. Until its flag is on every weight counts as 1."""

from alembic import op

revision = "0004_weights"
down_revision = "0003_rotation"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE members
    ADD COLUMN weight INTEGER DEFAULT 1 NOT NULL,
    ADD CONSTRAINT members_weight_ck CHECK (weight BETWEEN 0 AND 100);
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
