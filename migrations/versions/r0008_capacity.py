"""Stage `capacity`: caps per agent over all queues. Until its flag is on nobody is passed over for what they have.

A row of `agent_counters` holds nothing: it is what two queues lock that share an agent with a cap. What the agent has
is counted from the assignments.
"""

from alembic import op

revision = "0008_capacity"
down_revision = "0007_households"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE agents ADD COLUMN caps JSONB;

ALTER TABLE tenants
    ADD COLUMN caps_zone TEXT,
    ADD COLUMN closed_stages JSONB DEFAULT '[]' NOT NULL;

CREATE TABLE agent_counters (
    tenant_id UUID NOT NULL,
    agent_id UUID NOT NULL,
    CONSTRAINT agent_counters_pk PRIMARY KEY (tenant_id, agent_id),
    CONSTRAINT agent_counters_agent_fk FOREIGN KEY(tenant_id, agent_id) REFERENCES agents (tenant_id, agent_id)
);
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
