"""Stage `teams`: teams of the CRM, and lines that follow them. Until its flag is on no team takes a turn."""

from alembic import op

revision = "0017_teams"
down_revision = "0016_wording"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE queues
    ADD COLUMN follows JSONB;

CREATE TABLE crm_teams (
    tenant_id UUID NOT NULL,
    ref TEXT COLLATE "C" NOT NULL,
    name TEXT NOT NULL,
    agent_ids UUID[] NOT NULL,
    seen_at timestamptz NOT NULL,
    gone_at timestamptz,
    CONSTRAINT crm_teams_pk PRIMARY KEY (tenant_id, ref)
);
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
