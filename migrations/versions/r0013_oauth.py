"""OAuth: what an account granted and its renewal, connections under way, and the accounts that an app's hook serves."""

from alembic import op

revision = "0013_oauth"
down_revision = "0012_shadow"
branch_labels = None
depends_on = None

STATEMENTS = """
CREATE TABLE oauth_grants (
    tenant_id UUID NOT NULL,
    state TEXT DEFAULT 'new' NOT NULL,
    account TEXT,
    base_url TEXT,
    sealed_access BYTEA,
    sealed_refresh BYTEA,
    attempt INTEGER DEFAULT 0 NOT NULL,
    lease UUID,
    expires_at timestamptz,
    renewed_at timestamptz,
    due_at timestamptz DEFAULT clock_timestamp() NOT NULL,
    leased_until timestamptz,
    CONSTRAINT oauth_grants_pk PRIMARY KEY (tenant_id),
    CONSTRAINT oauth_grants_state_ck CHECK (state IN ('new', 'live', 'reconnect')),
    CONSTRAINT oauth_grants_tokens_ck CHECK (state <> 'live' OR sealed_access IS NOT NULL)
);

CREATE TABLE oauth_states (
    tenant_id UUID NOT NULL,
    state_hash BYTEA NOT NULL,
    browser_hash BYTEA,
    sealed_verifier BYTEA,
    expires_at timestamptz NOT NULL,
    CONSTRAINT oauth_states_pk PRIMARY KEY (tenant_id, state_hash)
);

CREATE TABLE app_accounts (
    tenant_id UUID NOT NULL,
    account TEXT COLLATE "C" NOT NULL,
    member_id UUID NOT NULL,
    since timestamptz DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT app_accounts_pk PRIMARY KEY (tenant_id, account),
    CONSTRAINT app_accounts_member_uq UNIQUE (tenant_id, member_id)
);
"""


def upgrade() -> None:
    op.execute(STATEMENTS)
