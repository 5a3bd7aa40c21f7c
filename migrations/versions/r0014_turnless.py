"""Turnless: how many leads each agent had without a turn, rolled up from the assignments. No decision reads it."""

from alembic import op

revision = "0014_turnless"
down_revision = "0013_oauth"
branch_labels = None
depends_on = None

STATEMENTS = """
CREATE TABLE turnless_days (
    tenant_id UUID NOT NULL,
    day DATE NOT NULL,
    rule TEXT NOT NULL,
    how TEXT NOT NULL,
    queue TEXT NOT NULL,
    agent_id UUID NOT NULL,
    leads BIGINT NOT NULL,
    CONSTRAINT turnless_days_pk PRIMARY KEY (tenant_id, day, rule, how, queue, agent_id)
);

CREATE TABLE turnless_marks (
    tenant_id UUID NOT NULL,
    folded_until timestamptz NOT NULL,
    unsettled JSONB NOT NULL,
    CONSTRAINT turnless_marks_pk PRIMARY KEY (tenant_id)
);
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
