"""Teams as the CRM has them, kept in step by the sync of agents."""

from __future__ import annotations

import sqlalchemy as sa

from routing.tables import _ref, _tenant, _time, metadata

# Read and written as a whole, in the CRM's order. A team that the CRM no longer lists keeps its last agents.
crm_teams = sa.Table(
    "crm_teams",
    metadata,
    _tenant(),
    _ref(),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("agent_ids", sa.ARRAY(sa.Uuid), nullable=False),
    _time("seen_at"),
    _time("gone_at", nullable=True),
    sa.PrimaryKeyConstraint("tenant_id", "ref"),
)
