"""Telling: leads without a turn by day, rolled up from the assignments; the rules of each version as they were read.

No decision reads any of it.
"""

from alembic import op

revision = "0014_telling"
down_revision = "0013_oauth"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE config_versions
    ADD COLUMN rules JSONB;

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
