"""Why: each configuration with agents by id, and shares of turns rolled up from the ledger. No decision reads them."""

from alembic import op

revision = "0011_why"
down_revision = "0010_settle"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE config_versions
    ADD COLUMN canonical TEXT,
    ADD COLUMN note TEXT;

CREATE TABLE fairness_days (
    tenant_id UUID NOT NULL,
    queue_id UUID NOT NULL,
    day DATE NOT NULL,
    rule TEXT NOT NULL,
    agent_id UUID NOT NULL,
    counts JSONB NOT NULL,
    CONSTRAINT fairness_days_pk PRIMARY KEY (tenant_id, queue_id, day, rule, agent_id),
    CONSTRAINT fairness_days_queue_fk FOREIGN KEY(tenant_id, queue_id) REFERENCES queues (tenant_id, queue_id)
);

CREATE TABLE fairness_marks (
    tenant_id UUID NOT NULL,
    queue_id UUID NOT NULL,
    seq BIGINT NOT NULL,
    state JSONB NOT NULL,
    CONSTRAINT fairness_marks_pk PRIMARY KEY (tenant_id, queue_id),
    CONSTRAINT fairness_marks_queue_fk FOREIGN KEY(tenant_id, queue_id) REFERENCES queues (tenant_id, queue_id)
);
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
