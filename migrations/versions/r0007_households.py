"""Stage `households`: phones read in the account's country, and people at one address known as one household.

Until its flag is on a lead is known by email and by the bare digits of its phones alone.
"""

from alembic import op

revision = "0007_households"
down_revision = "0006_skips_more"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE tenants ADD COLUMN country TEXT;
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
