"""Stage `skips`, its second half: leave, holidays, pauses that end by themselves, quiet hours, what a skip costs.

A pause with an end is a pause to the code before this revision too: it lasts there until somebody ends it.
"""

from alembic import op

revision = "0006_skips_more"
down_revision = "0005_skips"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE agents
    ADD COLUMN paused_until timestamptz,
    ADD COLUMN leave JSONB,
    ADD COLUMN holidays JSONB;

ALTER TABLE queues
    ADD COLUMN quiet_hours JSONB,
    ADD COLUMN skip_policy JSONB DEFAULT '{}' NOT NULL;

ALTER TABLE members
    ADD COLUMN averaging BOOLEAN DEFAULT false NOT NULL;
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
