"""The installed app's own tables: what came in, leased work, alarms, secrets, configuration versions.

They share :data:`routing.tables.metadata`, so that the whole schema is one and is held against the migrations.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from routing import tables_shadow  # noqa: F401 - its tables are part of the one schema
from routing.tables import Word, _ref, _tenant, _time, metadata

hooks = sa.Table(
    "hooks",
    metadata,
    _tenant(),
    sa.Column("hook_id", sa.Uuid, nullable=False),
    # Looked up by the token's hash alone: the one place where a tenant is found rather than named.
    sa.Column("token_hash", sa.LargeBinary, nullable=False),
    sa.Column("sealed_token", sa.LargeBinary, nullable=False),
    _time("created_at", now=True),
    sa.PrimaryKeyConstraint("tenant_id", "hook_id"),
    sa.Index("hooks_token_uq", "token_hash", unique=True),
)

secrets = sa.Table(
    "secrets",
    metadata,
    _tenant(),
    sa.Column("secret_id", sa.Uuid, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
    _time("created_at", now=True),
    _time("retires_at", nullable=True),
    sa.PrimaryKeyConstraint("tenant_id", "secret_id"),
    sa.Index("secrets_name_ix", "tenant_id", "name"),
)

deliveries = sa.Table(
    "deliveries",
    metadata,
    _tenant(),
    sa.Column("delivery_id", sa.Uuid, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("hook_id", sa.Uuid),
    sa.Column("headers", JSONB, nullable=False, server_default=sa.text("'{}'")),
    sa.Column("size", sa.Integer, nullable=False, server_default=sa.text("0")),
    _time("received_at"),
    sa.PrimaryKeyConstraint("tenant_id", "delivery_id"),
    sa.CheckConstraint("source IN ('webhook', 'sweep', 'held', 'console', 'replay', 'again')", name="source"),
    sa.Index("deliveries_received_ix", "tenant_id", "received_at"),
)

# Partitioned by time so that retention drops whole partitions; keys that outlive them stand in dedupe_keys.
delivery_bodies = sa.Table(
    "delivery_bodies",
    metadata,
    _tenant(),
    sa.Column("delivery_id", sa.Uuid, nullable=False),
    _time("received_at"),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "delivery_id", "received_at"),
    postgresql_partition_by="RANGE (received_at)",
)

dedupe_keys = sa.Table(
    "dedupe_keys",
    metadata,
    _tenant(),
    _ref("key"),
    sa.Column("event_id", sa.Uuid, nullable=False),
    # Not final: the key falls when a worker claims its event, so that an equal body later is news.
    sa.Column("final", sa.Boolean, nullable=False),
    _time("seen_at", now=True),
    sa.PrimaryKeyConstraint("tenant_id", "key"),
    sa.Index("dedupe_keys_event_ix", "tenant_id", "event_id", postgresql_where=sa.text("NOT final")),
    sa.Index("dedupe_keys_seen_ix", "tenant_id", "seen_at"),
)

events = sa.Table(
    "events",
    metadata,
    _tenant(),
    sa.Column("event_id", sa.Uuid, nullable=False),
    sa.Column("delivery_id", sa.Uuid, nullable=False),
    sa.Column("ordinal", sa.Integer, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    _ref(nullable=True),
    sa.Column("lead_id", sa.Uuid),
    sa.Column("payload", JSONB(none_as_null=True)),
    sa.Column("flag_version", sa.Integer, nullable=False),
    sa.Column("state", Word, nullable=False, server_default=sa.text("'waiting'")),
    sa.Column("reason", sa.Text),
    sa.Column("attempt", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("claims", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("lease", sa.Uuid),
    _time("received_at"),
    _time("occurred_at", nullable=True),
    _time("due_at", now=True),
    _time("leased_until", nullable=True),
    _time("closed_at", nullable=True),
    sa.PrimaryKeyConstraint("tenant_id", "event_id"),
    sa.ForeignKeyConstraint(
        ["tenant_id", "delivery_id"], ["deliveries.tenant_id", "deliveries.delivery_id"], name="events_delivery_fk"
    ),
    sa.CheckConstraint("state IN ('waiting', 'done', 'ignored', 'parked')", name="state"),
    sa.Index("events_due_ix", "tenant_id", "due_at", postgresql_where=sa.text("state = 'waiting'")),
    sa.Index("events_delivery_ix", "tenant_id", "delivery_id", "ordinal"),
    sa.Index("events_behind_ix", "tenant_id", "lead_id", postgresql_where=sa.text("state = 'waiting'")),
    sa.Index("events_parked_ix", "tenant_id", "received_at", postgresql_where=sa.text("state = 'parked'")),
)

chores = sa.Table(
    "chores",
    metadata,
    _tenant(),
    sa.Column("kind", sa.Text, nullable=False),
    # A wake adds one in the transaction that causes it; a chore sleeps only if it saw the latest.
    sa.Column("wanted", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("cursor", JSONB(none_as_null=True)),
    sa.Column("attempt", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("lease", sa.Uuid),
    sa.Column("last_error", sa.Text),
    _time("due_at", now=True),
    _time("leased_until", nullable=True),
    _time("last_ok_at", nullable=True),
    sa.PrimaryKeyConstraint("tenant_id", "kind"),
)

alarms = sa.Table(
    "alarms",
    metadata,
    _tenant(),
    sa.Column("alarm_id", sa.Uuid, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("times", sa.Integer, nullable=False, server_default=sa.text("1")),
    _time("opened_at", now=True),
    _time("last_at", now=True),
    _time("closed_at", nullable=True),
    sa.PrimaryKeyConstraint("tenant_id", "alarm_id"),
    sa.Index(
        "alarms_open_uq",
        "tenant_id",
        "kind",
        "subject",
        unique=True,
        postgresql_where=sa.text("closed_at IS NULL"),
    ),
)

# One row per tenant and lane whose CRM asked for, or earned, a pause: no call of any worker goes out before open_at.
# Notes have a lane of their own, so that their limits never delay an owner.
breakers = sa.Table(
    "breakers",
    metadata,
    _tenant(),
    sa.Column("lane", sa.Text, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("reason", sa.Text),
    _time("open_at"),
    sa.PrimaryKeyConstraint("tenant_id", "lane"),
    sa.CheckConstraint("lane IN ('all', 'note')", name="lane"),
)

# What was lately taken of each bucket of calls that a CRM lets an account make: how many in each slot of its window,
# and how many others of the account took besides, by the CRM's word.
buckets = sa.Table(
    "buckets",
    metadata,
    _tenant(),
    _ref("bucket"),
    sa.Column("slots", sa.ARRAY(sa.BigInteger), nullable=False, server_default=sa.text("'{}'")),
    sa.Column("counts", sa.ARRAY(sa.Integer), nullable=False, server_default=sa.text("'{}'")),
    sa.Column("others", sa.Integer, nullable=False, server_default=sa.text("0")),
    _time("others_until", nullable=True),
    sa.PrimaryKeyConstraint("tenant_id", "bucket"),
)

config_versions = sa.Table(
    "config_versions",
    metadata,
    _tenant(),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    _time("applied_at", now=True),
    # The same with every agent by Turnlock's own id: what an agent is called in the CRM may change.
    sa.Column("canonical", sa.Text),
    sa.Column("note", sa.Text),
    # Its rules (name, role, when) in order: to tell of a decision, reading the document again would take far too long.
    sa.Column("rules", JSONB(none_as_null=True)),
    sa.PrimaryKeyConstraint("tenant_id", "version"),
)

# What the account behind a tenant granted by OAuth. Renewing it is leased work: one worker asks, all others wait.
oauth_grants = sa.Table(
    "oauth_grants",
    metadata,
    _tenant(),
    sa.Column("state", sa.Text, nullable=False, server_default=sa.text("'new'")),
    sa.Column("account", sa.Text),
    sa.Column("base_url", sa.Text),
    sa.Column("sealed_access", sa.LargeBinary),
    sa.Column("sealed_refresh", sa.LargeBinary),
    sa.Column("attempt", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("lease", sa.Uuid),
    _time("expires_at", nullable=True),
    _time("renewed_at", nullable=True),
    _time("due_at", now=True),
    _time("leased_until", nullable=True),
    sa.PrimaryKeyConstraint("tenant_id"),
    sa.CheckConstraint("state IN ('new', 'live', 'reconnect')", name="state"),
    sa.CheckConstraint("state <> 'live' OR sealed_access IS NOT NULL", name="tokens"),
)

# Connections under way: an admin's link (no browser yet), and the state that the CRM hands back to that browser.
oauth_states = sa.Table(
    "oauth_states",
    metadata,
    _tenant(),
    sa.Column("state_hash", sa.LargeBinary, nullable=False),
    sa.Column("browser_hash", sa.LargeBinary),
    sa.Column("sealed_verifier", sa.LargeBinary),
    _time("expires_at"),
    sa.PrimaryKeyConstraint("tenant_id", "state_hash"),
)

# Under the reserved tenant of an app: which account of the CRM is which tenant.
app_accounts = sa.Table(
    "app_accounts",
    metadata,
    _tenant(),
    _ref("account"),
    sa.Column("member_id", sa.Uuid, nullable=False),
    _time("since", now=True),
    sa.PrimaryKeyConstraint("tenant_id", "account"),
    sa.UniqueConstraint("tenant_id", "member_id", name="app_accounts_member_uq"),
)

# Shares of turns per queue, day (UTC), rule and agent, rolled up from the ledger; it can be made anew from it at any
# time. Turns are counted in billionths, so that sums are exact whatever the order in which they are made.
fairness_days = sa.Table(
    "fairness_days",
    metadata,
    _tenant(),
    sa.Column("queue_id", sa.Uuid, nullable=False),
    sa.Column("day", sa.Date, nullable=False),
    sa.Column("rule", sa.Text, nullable=False),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.Column("counts", JSONB, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "queue_id", "day", "rule", "agent_id"),
    sa.ForeignKeyConstraint(
        ["tenant_id", "queue_id"], ["queues.tenant_id", "queues.queue_id"], name="fairness_days_queue_fk"
    ),
)

# How far each queue's ledger is rolled up, and what must be known there to go on.
fairness_marks = sa.Table(
    "fairness_marks",
    metadata,
    _tenant(),
    sa.Column("queue_id", sa.Uuid, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("state", JSONB, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "queue_id"),
    sa.ForeignKeyConstraint(
        ["tenant_id", "queue_id"], ["queues.tenant_id", "queues.queue_id"], name="fairness_marks_queue_fk"
    ),
)

# Leads that agents had without a turn, by UTC day; `rule` and `queue` (an id as text) are empty where there was none.
turnless_days = sa.Table(
    "turnless_days",
    metadata,
    _tenant(),
    sa.Column("day", sa.Date, nullable=False),
    sa.Column("rule", sa.Text, nullable=False),
    sa.Column("how", sa.Text, nullable=False),
    sa.Column("queue", sa.Text, nullable=False),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.Column("leads", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "day", "rule", "how", "queue", "agent_id"),
)

# Up to when a tenant's assignments are in those sums, and those of before whose write to the CRM was not settled then.
turnless_marks = sa.Table(
    "turnless_marks",
    metadata,
    _tenant(),
    _time("folded_until"),
    sa.Column("unsettled", JSONB, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id"),
)
