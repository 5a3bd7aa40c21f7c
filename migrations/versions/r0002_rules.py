"""Stage `rules`: conditions and targets in an explicit order of precedence.

Until its flag is on every lead goes to the tenant's default queue.
"""

from alembic import op

revision = "0002_rules"
down_revision = "0001_base"
branch_labels = None
depends_on = None

STATEMENTS = """
CREATE TABLE rules (
    tenant_id UUID NOT NULL,
    name TEXT NOT NULL,
    role TEXT NOT NULL,
    precedence INTEGER NOT NULL,
    condition JSONB NOT NULL,
    targets JSONB NOT NULL,
    CONSTRAINT rules_pk PRIMARY KEY (tenant_id, name),
    CONSTRAINT rules_precedence_uq UNIQUE (tenant_id, role, precedence)
);
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
