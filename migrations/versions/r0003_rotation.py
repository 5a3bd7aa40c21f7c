"""Stage `rotation`: the line of each queue, its turns, its ledger and the turns it owes.

Until its flag is on the first available member by rank gets the lead and no turn is taken.
"""

from alembic import op

revision = "0003_rotation"
down_revision = "0002_rules"
branch_labels = None
depends_on = None

STATEMENTS = """
ALTER TABLE queues
    ADD COLUMN position BIGINT DEFAULT 0 NOT NULL,
    ADD COLUMN floor NUMERIC(60, 0) DEFAULT 0 NOT NULL,
    ADD COLUMN seq BIGINT DEFAULT 0 NOT NULL;

ALTER TABLE members
    ADD COLUMN tag NUMERIC(60, 0),
    ADD COLUMN last_turn BIGINT DEFAULT 0 NOT NULL;

CREATE TABLE turns (
    tenant_id UUID NOT NULL,
    queue_id UUID NOT NULL,
    turn BIGINT NOT NULL,
    decision_id UUID NOT NULL,
    agent_id UUID NOT NULL,
    void_reason TEXT,
    taken_at timestamptz NOT NULL,
    CONSTRAINT turns_pk PRIMARY KEY (tenant_id, queue_id, turn),
    CONSTRAINT turns_queue_fk FOREIGN KEY(tenant_id, queue_id) REFERENCES queues (tenant_id, queue_id)
);

CREATE TABLE ledger (
    tenant_id UUID NOT NULL,
    queue_id UUID NOT NULL,
    seq BIGINT NOT NULL,
    kind TEXT NOT NULL,
    at timestamptz NOT NULL,
    actor TEXT NOT NULL,
    reason TEXT,
    data JSONB NOT NULL,
    CONSTRAINT ledger_pk PRIMARY KEY (tenant_id, queue_id, seq),
    CONSTRAINT ledger_queue_fk FOREIGN KEY(tenant_id, queue_id) REFERENCES queues (tenant_id, queue_id)
);
CREATE INDEX ledger_checkpoint_ix ON ledger (tenant_id, queue_id, seq) WHERE kind = 'checkpoint';

CREATE TABLE owed_turns (
    tenant_id UUID NOT NULL,
    queue_id UUID NOT NULL,
    owed_id UUID NOT NULL,
    agent_id UUID NOT NULL,
    kind TEXT NOT NULL,
    seq BIGINT NOT NULL,
    CONSTRAINT owed_turns_pk PRIMARY KEY (tenant_id, queue_id, owed_id),
    CONSTRAINT owed_turns_queue_fk FOREIGN KEY(tenant_id, queue_id) REFERENCES queues (tenant_id, queue_id),
    CONSTRAINT owed_turns_kind_ck CHECK (kind IN ('give_next', 'owed'))
);
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
