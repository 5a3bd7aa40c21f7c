"""Shadow: what a staged capability would have decided, its lines, and the settings behind each flag version.

The modes of a flag grow by two: to the code before this both look like "not on", which is what its path is for.
"""

from alembic import op

revision = "0012_shadow"
down_revision = "0011_why"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE flags
    DROP CONSTRAINT flags_mode_ck,
    ADD CONSTRAINT flags_mode_ck CHECK (mode IN ('off', 'on', 'shadow', 'partly'));

ALTER TABLE lead_roles
    ADD COLUMN modes JSONB;

CREATE TABLE flag_versions (
    tenant_id UUID NOT NULL,
    version INTEGER NOT NULL,
    settings JSONB NOT NULL,
    flag TEXT NOT NULL,
    changed_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    changed_by TEXT NOT NULL,
    reason TEXT,
    CONSTRAINT flag_versions_pk PRIMARY KEY (tenant_id, version)
);

CREATE TABLE shadow_lines (
    tenant_id UUID NOT NULL,
    flag TEXT NOT NULL,
    queue_id UUID NOT NULL,
    line JSONB NOT NULL,
    CONSTRAINT shadow_lines_pk PRIMARY KEY (tenant_id, flag, queue_id),
    CONSTRAINT shadow_lines_queue_fk FOREIGN KEY(tenant_id, queue_id) REFERENCES queues (tenant_id, queue_id)
);

CREATE TABLE shadow_records (
    tenant_id UUID NOT NULL,
    flag TEXT NOT NULL,
    run INTEGER NOT NULL,
    lead_id UUID NOT NULL,
    role TEXT NOT NULL,
    seq INTEGER NOT NULL,
    decided_at timestamptz NOT NULL,
    verdict TEXT NOT NULL,
    why TEXT,
    outcome TEXT,
    reason TEXT,
    rule TEXT,
    queue_id UUID,
    agent_id UUID,
    turn BIGINT,
    record JSONB DEFAULT '{}' NOT NULL,
    crm_agent_id UUID,
    crm_seen_at timestamptz,
    CONSTRAINT shadow_records_pk PRIMARY KEY (tenant_id, flag, run, lead_id, role, seq),
    CONSTRAINT shadow_records_lead_fk FOREIGN KEY(tenant_id, lead_id) REFERENCES leads (tenant_id, lead_id),
    CONSTRAINT shadow_records_verdict_ck CHECK (verdict IN ('same', 'different', 'error'))
);
CREATE INDEX shadow_records_lead_ix ON shadow_records (tenant_id, lead_id);
CREATE INDEX shadow_records_told_ix ON shadow_records (tenant_id, flag, run, decided_at) WHERE verdict <> 'same';
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
