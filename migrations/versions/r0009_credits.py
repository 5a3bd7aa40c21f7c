"""Stage `credits`: an admin's moves of turns, and leads that agents return. Until its flag is on both are refused."""

from alembic import op

revision = "0009_credits"
down_revision = "0008_capacity"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE tenants
    ADD COLUMN returns_per_day INTEGER DEFAULT 5 NOT NULL;

CREATE TABLE returns (
    tenant_id UUID NOT NULL,
    return_id UUID NOT NULL,
    lead_id UUID NOT NULL,
    assignment_id UUID NOT NULL,
    agent_id UUID NOT NULL,
    reason TEXT NOT NULL,
    words TEXT,
    state TEXT DEFAULT 'asked' NOT NULL,
    outcome TEXT,
    asked_at timestamptz NOT NULL,
    asked_by TEXT NOT NULL,
    decided_at timestamptz,
    decided_by TEXT,
    why TEXT,
    CONSTRAINT returns_pk PRIMARY KEY (tenant_id, return_id),
    CONSTRAINT returns_lead_fk FOREIGN KEY(tenant_id, lead_id) REFERENCES leads (tenant_id, lead_id),
    CONSTRAINT returns_state_ck CHECK (state IN ('asked', 'approved', 'refused')),
    CONSTRAINT returns_outcome_ck CHECK (outcome IN ('void', 'next'))
);
CREATE UNIQUE INDEX returns_open_uq ON returns (tenant_id, assignment_id) WHERE state <> 'refused';
CREATE INDEX returns_agent_ix ON returns (tenant_id, agent_id, asked_at);
CREATE INDEX returns_lead_ix ON returns (tenant_id, lead_id);
CREATE INDEX returns_asked_ix ON returns (tenant_id, asked_at) WHERE state = 'asked';
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
