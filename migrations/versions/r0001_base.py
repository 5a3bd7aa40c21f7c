"""The base: tenants, what comes in, leads, agents, queues, decisions, write-back, leased work, alarms.

Tenant first in every key, facts of a person apart from the ledger, bodies partitioned by time and dedupe keys apart
from them: cheap now, dear once there is data.
"""

from alembic import op

revision = "0001_base"
down_revision = None
branch_labels = None
depends_on = None

STATEMENTS = """
CREATE TABLE agents (
    tenant_id UUID NOT NULL,
    agent_id UUID NOT NULL,
    name TEXT NOT NULL,
    email TEXT,
    active BOOLEAN DEFAULT true NOT NULL,
    refusals INTEGER DEFAULT 0 NOT NULL,
    refused_at timestamptz,
    seen_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT agents_pk PRIMARY KEY (tenant_id, agent_id)
);

CREATE TABLE alarms (
    tenant_id UUID NOT NULL,
    alarm_id UUID NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    text TEXT NOT NULL,
    times INTEGER DEFAULT 1 NOT NULL,
    opened_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    last_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    closed_at timestamptz,
    CONSTRAINT alarms_pk PRIMARY KEY (tenant_id, alarm_id)
);
CREATE UNIQUE INDEX alarms_open_uq ON alarms (tenant_id, kind, subject) WHERE closed_at IS NULL;

CREATE TABLE breakers (
    tenant_id UUID NOT NULL,
    lane TEXT NOT NULL,
    failures INTEGER DEFAULT 0 NOT NULL,
    reason TEXT,
    open_at timestamptz NOT NULL,
    CONSTRAINT breakers_pk PRIMARY KEY (tenant_id, lane),
    CONSTRAINT breakers_lane_ck CHECK (lane IN ('all', 'note'))
);

CREATE TABLE chores (
    tenant_id UUID NOT NULL,
    kind TEXT NOT NULL,
    wanted BIGINT DEFAULT 0 NOT NULL,
    cursor JSONB,
    attempt INTEGER DEFAULT 0 NOT NULL,
    lease UUID,
    last_error TEXT,
    due_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    leased_until timestamptz,
    last_ok_at timestamptz,
    CONSTRAINT chores_pk PRIMARY KEY (tenant_id, kind)
);

CREATE TABLE config_versions (
    tenant_id UUID NOT NULL,
    version INTEGER NOT NULL,
    document TEXT NOT NULL,
    digest BYTEA NOT NULL,
    actor TEXT NOT NULL,
    applied_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT config_versions_pk PRIMARY KEY (tenant_id, version)
);

CREATE TABLE dedupe_keys (
    tenant_id UUID NOT NULL,
    key TEXT COLLATE "C" NOT NULL,
    event_id UUID NOT NULL,
    final BOOLEAN NOT NULL,
    seen_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT dedupe_keys_pk PRIMARY KEY (tenant_id, key)
);
CREATE INDEX dedupe_keys_event_ix ON dedupe_keys (tenant_id, event_id) WHERE NOT final;
CREATE INDEX dedupe_keys_seen_ix ON dedupe_keys (tenant_id, seen_at);

CREATE TABLE deliveries (
    tenant_id UUID NOT NULL,
    delivery_id UUID NOT NULL,
    source TEXT NOT NULL,
    hook_id UUID,
    headers JSONB DEFAULT '{}' NOT NULL,
    size INTEGER DEFAULT 0 NOT NULL,
    received_at timestamptz NOT NULL,
    CONSTRAINT deliveries_pk PRIMARY KEY (tenant_id, delivery_id),
    CONSTRAINT deliveries_source_ck CHECK (source IN ('webhook', 'sweep', 'held', 'console', 'replay', 'again'))
);
CREATE INDEX deliveries_received_ix ON deliveries (tenant_id, received_at);

CREATE TABLE delivery_bodies (
    tenant_id UUID NOT NULL,
    delivery_id UUID NOT NULL,
    received_at timestamptz NOT NULL,
    body BYTEA NOT NULL,
    CONSTRAINT delivery_bodies_pk PRIMARY KEY (tenant_id, delivery_id, received_at)
)
 PARTITION BY RANGE (received_at);

CREATE TABLE flags (
    tenant_id UUID NOT NULL,
    flag TEXT NOT NULL,
    mode TEXT NOT NULL,
    changed_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    changed_by TEXT NOT NULL,
    CONSTRAINT flags_pk PRIMARY KEY (tenant_id, flag),
    CONSTRAINT flags_mode_ck CHECK (mode IN ('off', 'on'))
);

CREATE TABLE hooks (
    tenant_id UUID NOT NULL,
    hook_id UUID NOT NULL,
    token_hash BYTEA NOT NULL,
    sealed_token BYTEA NOT NULL,
    created_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT hooks_pk PRIMARY KEY (tenant_id, hook_id)
);
CREATE UNIQUE INDEX hooks_token_uq ON hooks (token_hash);

CREATE TABLE identities (
    tenant_id UUID NOT NULL,
    digest BYTEA NOT NULL,
    created_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT identities_pk PRIMARY KEY (tenant_id, digest)
);

CREATE TABLE leads (
    tenant_id UUID NOT NULL,
    lead_id UUID NOT NULL,
    version BIGINT DEFAULT 0 NOT NULL,
    crm_created_at timestamptz,
    created_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT leads_pk PRIMARY KEY (tenant_id, lead_id)
);

CREATE TABLE queues (
    tenant_id UUID NOT NULL,
    queue_id UUID NOT NULL,
    name TEXT NOT NULL,
    active BOOLEAN DEFAULT true NOT NULL,
    when_nobody TEXT DEFAULT 'hold' NOT NULL,
    fallback_queue_id UUID,
    default_agent_id UUID,
    next_rank INTEGER DEFAULT 1 NOT NULL,
    CONSTRAINT queues_pk PRIMARY KEY (tenant_id, queue_id),
    CONSTRAINT queues_name_uq UNIQUE (tenant_id, name),
    CONSTRAINT queues_when_nobody_ck CHECK (when_nobody IN ('hold', 'fallback_queue', 'default_agent',
        'leave_unassigned'))
);

CREATE TABLE secrets (
    tenant_id UUID NOT NULL,
    secret_id UUID NOT NULL,
    name TEXT NOT NULL,
    sealed BYTEA NOT NULL,
    created_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    retires_at timestamptz,
    CONSTRAINT secrets_pk PRIMARY KEY (tenant_id, secret_id)
);
CREATE INDEX secrets_name_ix ON secrets (tenant_id, name);

CREATE TABLE tenants (
    tenant_id UUID NOT NULL,
    name TEXT NOT NULL,
    crm TEXT NOT NULL,
    base_url TEXT,
    parameters JSONB DEFAULT '{}' NOT NULL,
    account_ref TEXT,
    status TEXT DEFAULT 'active' NOT NULL,
    sending BOOLEAN DEFAULT true NOT NULL,
    config_version INTEGER DEFAULT 0 NOT NULL,
    flag_version INTEGER DEFAULT 0 NOT NULL,
    default_queue_id UUID,
    unassigned JSONB DEFAULT '{}' NOT NULL,
    released TEXT DEFAULT 'route_again' NOT NULL,
    created_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT tenants_pk PRIMARY KEY (tenant_id),
    CONSTRAINT tenants_status_ck CHECK (status IN ('active', 'removed')),
    CONSTRAINT tenants_released_ck CHECK (released IN ('route_again', 'leave'))
);
CREATE UNIQUE INDEX tenants_name_uq ON tenants (name);

CREATE TABLE agent_refs (
    tenant_id UUID NOT NULL,
    ref TEXT COLLATE "C" NOT NULL,
    agent_id UUID NOT NULL,
    CONSTRAINT agent_refs_pk PRIMARY KEY (tenant_id, ref),
    CONSTRAINT agent_refs_agent_fk FOREIGN KEY(tenant_id, agent_id) REFERENCES agents (tenant_id, agent_id)
);
CREATE INDEX agent_refs_agent_ix ON agent_refs (tenant_id, agent_id);

CREATE TABLE assignments (
    tenant_id UUID NOT NULL,
    assignment_id UUID NOT NULL,
    decision_id UUID NOT NULL,
    lead_id UUID NOT NULL,
    role TEXT NOT NULL,
    agent_id UUID NOT NULL,
    queue_id UUID,
    turn BIGINT,
    epoch INTEGER NOT NULL,
    state TEXT DEFAULT 'active' NOT NULL,
    assigned_at timestamptz NOT NULL,
    confirmed_at timestamptz,
    ended_at timestamptz,
    CONSTRAINT assignments_pk PRIMARY KEY (tenant_id, assignment_id),
    CONSTRAINT assignments_lead_fk FOREIGN KEY(tenant_id, lead_id) REFERENCES leads (tenant_id, lead_id),
    CONSTRAINT assignments_state_ck CHECK (state IN ('active', 'superseded', 'overridden', 'released',
        'refused', 'void'))
);
CREATE UNIQUE INDEX assignments_active_uq ON assignments (tenant_id, lead_id, role) WHERE state = 'active';
CREATE INDEX assignments_agent_ix ON assignments (tenant_id, agent_id, assigned_at);
CREATE INDEX assignments_decision_ix ON assignments (tenant_id, decision_id);

CREATE TABLE decisions (
    tenant_id UUID NOT NULL,
    decision_id UUID NOT NULL,
    lead_id UUID NOT NULL,
    role TEXT NOT NULL,
    seq INTEGER NOT NULL,
    decided_at timestamptz NOT NULL,
    received_at timestamptz,
    event_id UUID,
    cause TEXT NOT NULL,
    outcome TEXT NOT NULL,
    reason TEXT,
    rule TEXT,
    queue_id UUID,
    agent_id UUID,
    turn BIGINT,
    config_version INTEGER NOT NULL,
    record JSONB NOT NULL,
    CONSTRAINT decisions_pk PRIMARY KEY (tenant_id, decision_id),
    CONSTRAINT decisions_seq_uq UNIQUE (tenant_id, lead_id, role, seq),
    CONSTRAINT decisions_lead_fk FOREIGN KEY(tenant_id, lead_id) REFERENCES leads (tenant_id, lead_id),
    CONSTRAINT decisions_outcome_ck CHECK (outcome IN ('assigned', 'held', 'left', 'parked'))
);

CREATE TABLE events (
    tenant_id UUID NOT NULL,
    event_id UUID NOT NULL,
    delivery_id UUID NOT NULL,
    ordinal INTEGER NOT NULL,
    kind TEXT NOT NULL,
    ref TEXT COLLATE "C",
    lead_id UUID,
    payload JSONB,
    flag_version INTEGER NOT NULL,
    state TEXT DEFAULT 'waiting' NOT NULL,
    reason TEXT,
    attempt INTEGER DEFAULT 0 NOT NULL,
    claims INTEGER DEFAULT 0 NOT NULL,
    lease UUID,
    received_at timestamptz NOT NULL,
    occurred_at timestamptz,
    due_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    leased_until timestamptz,
    closed_at timestamptz,
    CONSTRAINT events_pk PRIMARY KEY (tenant_id, event_id),
    CONSTRAINT events_delivery_fk FOREIGN KEY(tenant_id, delivery_id) REFERENCES deliveries (tenant_id,
        delivery_id),
    CONSTRAINT events_state_ck CHECK (state IN ('waiting', 'done', 'ignored', 'parked'))
);
CREATE INDEX events_behind_ix ON events (tenant_id, lead_id) WHERE state = 'waiting';
CREATE INDEX events_delivery_ix ON events (tenant_id, delivery_id, ordinal);
CREATE INDEX events_due_ix ON events (tenant_id, due_at) WHERE state = 'waiting';
CREATE INDEX events_parked_ix ON events (tenant_id, received_at) WHERE state = 'parked';

CREATE TABLE lead_facts (
    tenant_id UUID NOT NULL,
    lead_id UUID NOT NULL,
    facts JSONB NOT NULL,
    read_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT lead_facts_pk PRIMARY KEY (tenant_id, lead_id),
    CONSTRAINT lead_facts_lead_fk FOREIGN KEY(tenant_id, lead_id) REFERENCES leads (tenant_id, lead_id)
);

CREATE TABLE lead_identities (
    tenant_id UUID NOT NULL,
    digest BYTEA NOT NULL,
    lead_id UUID NOT NULL,
    CONSTRAINT lead_identities_pk PRIMARY KEY (tenant_id, digest, lead_id),
    CONSTRAINT lead_identities_lead_fk FOREIGN KEY(tenant_id, lead_id) REFERENCES leads (tenant_id, lead_id)
);
CREATE INDEX lead_identities_lead_ix ON lead_identities (tenant_id, lead_id);

CREATE TABLE lead_refs (
    tenant_id UUID NOT NULL,
    ref TEXT COLLATE "C" NOT NULL,
    lead_id UUID NOT NULL,
    created_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT lead_refs_pk PRIMARY KEY (tenant_id, ref),
    CONSTRAINT lead_refs_lead_fk FOREIGN KEY(tenant_id, lead_id) REFERENCES leads (tenant_id, lead_id)
);
CREATE INDEX lead_refs_lead_ix ON lead_refs (tenant_id, lead_id);

CREATE TABLE lead_roles (
    tenant_id UUID NOT NULL,
    lead_id UUID NOT NULL,
    role TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    agent_id UUID,
    queue_id UUID,
    seq INTEGER DEFAULT 0 NOT NULL,
    epoch INTEGER DEFAULT 0 NOT NULL,
    confirmed_version BIGINT,
    facts_digest BYTEA,
    releases JSONB DEFAULT '[]' NOT NULL,
    since timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT lead_roles_pk PRIMARY KEY (tenant_id, lead_id, role),
    CONSTRAINT lead_roles_lead_fk FOREIGN KEY(tenant_id, lead_id) REFERENCES leads (tenant_id, lead_id),
    CONSTRAINT lead_roles_role_ck CHECK (role IN ('owner', 'collaborator')),
    CONSTRAINT lead_roles_state_ck CHECK (state IN ('assigned', 'held', 'left', 'owned', 'gone', 'parked',
        'refused'))
);
CREATE INDEX lead_roles_held_ix ON lead_roles (tenant_id, queue_id, since) WHERE state = 'held';
CREATE INDEX lead_roles_parked_ix ON lead_roles (tenant_id, since) WHERE state = 'parked';

CREATE TABLE members (
    tenant_id UUID NOT NULL,
    queue_id UUID NOT NULL,
    agent_id UUID NOT NULL,
    rank INTEGER NOT NULL,
    CONSTRAINT members_pk PRIMARY KEY (tenant_id, queue_id, agent_id),
    CONSTRAINT members_rank_uq UNIQUE (tenant_id, queue_id, rank),
    CONSTRAINT members_queue_fk FOREIGN KEY(tenant_id, queue_id) REFERENCES queues (tenant_id, queue_id),
    CONSTRAINT members_agent_fk FOREIGN KEY(tenant_id, agent_id) REFERENCES agents (tenant_id, agent_id)
);
CREATE INDEX members_agent_ix ON members (tenant_id, agent_id);

CREATE TABLE outbox (
    tenant_id UUID NOT NULL,
    outbox_id UUID NOT NULL,
    lead_id UUID NOT NULL,
    role TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    kind TEXT NOT NULL,
    decision_id UUID NOT NULL,
    agent_id UUID NOT NULL,
    expects_agent_id UUID,
    state TEXT DEFAULT 'open' NOT NULL,
    reason TEXT,
    sent BOOLEAN DEFAULT false NOT NULL,
    empty_writes INTEGER DEFAULT 0 NOT NULL,
    attempt INTEGER DEFAULT 0 NOT NULL,
    claims INTEGER DEFAULT 0 NOT NULL,
    lease UUID,
    due_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    leased_until timestamptz,
    created_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    closed_at timestamptz,
    CONSTRAINT outbox_pk PRIMARY KEY (tenant_id, outbox_id),
    CONSTRAINT outbox_epoch_uq UNIQUE (tenant_id, lead_id, role, epoch, kind),
    CONSTRAINT outbox_lead_fk FOREIGN KEY(tenant_id, lead_id) REFERENCES leads (tenant_id, lead_id),
    CONSTRAINT outbox_kind_ck CHECK (kind IN ('owner', 'collaborator', 'note')),
    CONSTRAINT outbox_state_ck CHECK (state IN ('open', 'parked', 'confirmed', 'superseded', 'refused', 'gone',
        'stale', 'given_up'))
);
CREATE INDEX outbox_due_ix ON outbox (tenant_id, due_at) WHERE state = 'open';
CREATE INDEX outbox_open_ix ON outbox (tenant_id, lead_id) WHERE state IN ('open', 'parked');

CREATE TABLE delivery_bodies_default PARTITION OF delivery_bodies DEFAULT;
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
