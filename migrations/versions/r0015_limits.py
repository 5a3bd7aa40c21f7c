"""Limits: what was lately taken of each bucket of calls that a CRM lets an account make, shared by all workers."""

from alembic import op

revision = "0015_limits"
down_revision = "0014_telling"
branch_labels = None
depends_on = None

STATEMENTS = """
CREATE TABLE buckets (
    tenant_id UUID NOT NULL,
    bucket TEXT COLLATE "C" NOT NULL,
    slots BIGINT[] DEFAULT '{}' NOT NULL,
    counts INTEGER[] DEFAULT '{}' NOT NULL,
    others INTEGER DEFAULT 0 NOT NULL,
    others_until timestamptz,
    CONSTRAINT buckets_pk PRIMARY KEY (tenant_id, bucket)
);
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
