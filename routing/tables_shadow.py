"""What staged rollout keeps: the settings behind each flag version, shadow lines, and what shadows would have decided.

A shadow writes here and nowhere else. Records name the decision they stand beside by lead, role and ``seq``; seq 0 is
a lead that came with an owner, about which nothing was decided.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from routing.tables import Word, _tenant, _time, metadata

# Never changed once written, so that the stamp of an older event can be resolved.
flag_versions = sa.Table(
    "flag_versions",
    metadata,
    _tenant(),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("settings", JSONB, nullable=False),
    sa.Column("flag", sa.Text, nullable=False),
    _time("changed_at", now=True),
    sa.Column("changed_by", sa.Text, nullable=False),
    sa.Column("reason", sa.Text),
    sa.PrimaryKeyConstraint("tenant_id", "version"),
)

# A line as a ledger checkpoint holds it. Protected by the lock of its queue's row, like the live one.
shadow_lines = sa.Table(
    "shadow_lines",
    metadata,
    _tenant(),
    sa.Column("flag", sa.Text, nullable=False),
    sa.Column("queue_id", sa.Uuid, nullable=False),
    sa.Column("line", JSONB, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "flag", "queue_id"),
    sa.ForeignKeyConstraint(
        ["tenant_id", "queue_id"], ["queues.tenant_id", "queues.queue_id"], name="shadow_lines_queue_fk"
    ),
)

shadow_records = sa.Table(
    "shadow_records",
    metadata,
    _tenant(),
    sa.Column("flag", sa.Text, nullable=False),
    # The flag version at which this run of the shadow began.
    sa.Column("run", sa.Integer, nullable=False),
    sa.Column("lead_id", sa.Uuid, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("seq", sa.Integer, nullable=False),
    _time("decided_at"),
    sa.Column("verdict", Word, nullable=False),
    sa.Column("why", sa.Text),
    sa.Column("outcome", sa.Text),
    sa.Column("reason", sa.Text),
    sa.Column("rule", sa.Text),
    sa.Column("queue_id", sa.Uuid),
    sa.Column("agent_id", sa.Uuid),
    sa.Column("turn", sa.BigInteger),
    sa.Column("record", JSONB, nullable=False, server_default=sa.text("'{}'")),
    # Whom the CRM itself gave the lead to, and when Turnlock saw it: what write_back in shadow is scored against.
    sa.Column("crm_agent_id", sa.Uuid),
    _time("crm_seen_at", nullable=True),
    sa.PrimaryKeyConstraint("tenant_id", "flag", "run", "lead_id", "role", "seq"),
    sa.ForeignKeyConstraint(
        ["tenant_id", "lead_id"], ["leads.tenant_id", "leads.lead_id"], name="shadow_records_lead_fk"
    ),
    sa.CheckConstraint("verdict IN ('same', 'different', 'error')", name="verdict"),
    sa.Index("shadow_records_lead_ix", "tenant_id", "lead_id"),
    sa.Index(
        "shadow_records_told_ix",
        "tenant_id",
        "flag",
        "run",
        "decided_at",
        postgresql_where=sa.text("verdict <> 'same'"),
    ),
)
