"""The tables that routing reads and writes, as SQLAlchemy Core.

Every primary, unique and foreign key leads with ``tenant_id``, so that the schema can be distributed by tenant.
Code selects the columns that a stage's migration adds only while that stage's flag is on, which is what lets it run on
a database that stopped at an earlier revision.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

metadata = sa.MetaData(
    naming_convention={
        "pk": "%(table_name)s_pk",
        "fk": "%(table_name)s_%(column_1_name)s_fk",
        "ck": "%(table_name)s_%(constraint_name)s_ck",
    }
)


class Whole(sa.types.TypeDecorator[int]):
    """``numeric(60,0)`` as a Python int: a tag has 41 digits and is never rounded."""

    impl = sa.Numeric(60, 0)
    cache_ok = True

    def process_result_value(self, value: Decimal | None, dialect: sa.Dialect) -> int | None:
        """What the driver gives, as an int."""
        return None if value is None else int(value)


class Word(sa.Text):
    """One of few words, of which an index may hold some alone; the words it is compared with stand in the statement.

    As a parameter the word would be unknown where a statement is planned, and no such index could serve it.
    """

    class comparator_factory(sa.Text.Comparator[str]):
        """Comparisons as text has them."""

        def operate(self, op: Any, *other: Any, **named: Any) -> Any:
            """As SQLAlchemy's, with words as part of the statement."""
            return super().operate(op, *map(_spoken, other), **named)


def _spoken(other: Any) -> Any:
    if isinstance(other, str):
        return sa.literal(other, sa.Text(), literal_execute=True)
    if isinstance(other, (list, tuple, set, frozenset)):
        words = sorted(map(str, other))
        return sa.bindparam("words", words, type_=sa.Text(), expanding=True, literal_execute=True, unique=True)
    return other


def _tenant() -> sa.Column[Any]:
    return sa.Column("tenant_id", sa.Uuid, nullable=False)


def _time(name: str, *, nullable: bool = False, now: bool = False) -> sa.Column[Any]:
    default = sa.text("clock_timestamp()") if now else None
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable, server_default=default)


def _ref(name: str = "ref", *, nullable: bool = False) -> sa.Column[Any]:
    # Collation C: Python and the database must sort a CRM's ids alike, or two units lock in different orders.
    return sa.Column(name, sa.Text(collation="C"), nullable=nullable)


def _fk(table: str, column: str, name: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["tenant_id", column], [f"{table}.tenant_id", f"{table}.{column}"], name=name)


tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("tenant_id", sa.Uuid, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("crm", sa.Text, nullable=False),
    sa.Column("base_url", sa.Text),
    sa.Column("parameters", JSONB, nullable=False, server_default=sa.text("'{}'")),
    sa.Column("account_ref", sa.Text),
    sa.Column("status", sa.Text, nullable=False, server_default=sa.text("'active'")),
    sa.Column("sending", sa.Boolean, nullable=False, server_default=sa.text("true")),
    sa.Column("config_version", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("flag_version", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("default_queue_id", sa.Uuid),
    sa.Column("unassigned", JSONB, nullable=False, server_default=sa.text("'{}'")),
    sa.Column("released", sa.Text, nullable=False, server_default=sa.text("'route_again'")),
    # On which clock caps count, where it is not each agent's own; stages (lower case) whose leads are not open.
    sa.Column("caps_zone", sa.Text),
    sa.Column("closed_stages", JSONB, nullable=False, server_default=sa.text("'[]'")),
    # How many leads an agent may ask to return in a day of theirs.
    sa.Column("returns_per_day", sa.Integer, nullable=False, server_default=sa.text("5")),
    sa.Column("wording", JSONB(none_as_null=True)),
    # How long new leads settle before they are decided: {"default": seconds, "sources": {source: seconds}}.
    sa.Column("settle", JSONB, nullable=False, server_default=sa.text("'{}'")),
    _time("created_at", now=True),
    sa.Column("country", sa.Text),
    sa.PrimaryKeyConstraint("tenant_id"),
    sa.CheckConstraint("status IN ('active', 'removed')", name="status"),
    sa.CheckConstraint("released IN ('route_again', 'leave')", name="released"),
    sa.Index("tenants_name_uq", "name", unique=True),
)

flags = sa.Table(
    "flags",
    metadata,
    _tenant(),
    sa.Column("flag", sa.Text, nullable=False),
    sa.Column("mode", sa.Text, nullable=False),
    _time("changed_at", now=True),
    sa.Column("changed_by", sa.Text, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "flag"),
    # `shadow` and `partly` (on, for some leads): which leads is in flag_versions.
    sa.CheckConstraint("mode IN ('off', 'on', 'shadow', 'partly')", name="mode"),
)

leads = sa.Table(
    "leads",
    metadata,
    _tenant(),
    sa.Column("lead_id", sa.Uuid, nullable=False),
    # Rises with every change Turnlock makes or learns; a CRM read begun at an older version proves nothing newer.
    sa.Column("version", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    _time("crm_created_at", nullable=True),
    _time("created_at", now=True),
    # Set once, when a new lead of a source that settles is first seen: not decided before this.
    _time("settles_at", nullable=True),
    sa.PrimaryKeyConstraint("tenant_id", "lead_id"),
)

lead_refs = sa.Table(
    "lead_refs",
    metadata,
    _tenant(),
    _ref(),
    sa.Column("lead_id", sa.Uuid, nullable=False),
    _time("created_at", now=True),
    sa.PrimaryKeyConstraint("tenant_id", "ref"),
    _fk("leads", "lead_id", "lead_refs_lead_fk"),
    sa.Index("lead_refs_lead_ix", "tenant_id", "lead_id"),
)

# Apart from the lead, so that erasing a person leaves the ledger whole.
lead_facts = sa.Table(
    "lead_facts",
    metadata,
    _tenant(),
    sa.Column("lead_id", sa.Uuid, nullable=False),
    sa.Column("facts", JSONB, nullable=False),
    _time("read_at", now=True),
    sa.PrimaryKeyConstraint("tenant_id", "lead_id"),
    _fk("leads", "lead_id", "lead_facts_lead_fk"),
)

identities = sa.Table(
    "identities",
    metadata,
    _tenant(),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    _time("created_at", now=True),
    sa.PrimaryKeyConstraint("tenant_id", "digest"),
)

lead_identities = sa.Table(
    "lead_identities",
    metadata,
    _tenant(),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("lead_id", sa.Uuid, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "digest", "lead_id"),
    _fk("leads", "lead_id", "lead_identities_lead_fk"),
    sa.Index("lead_identities_lead_ix", "tenant_id", "lead_id"),
)

# Where a lead stands in one role: the present, of which decisions are the history.
lead_roles = sa.Table(
    "lead_roles",
    metadata,
    _tenant(),
    sa.Column("lead_id", sa.Uuid, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("state", Word, nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("agent_id", sa.Uuid),
    sa.Column("queue_id", sa.Uuid),
    sa.Column("seq", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("epoch", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("confirmed_version", sa.BigInteger),
    sa.Column("facts_digest", sa.LargeBinary),
    sa.Column("releases", JSONB, nullable=False, server_default=sa.text("'[]'")),
    _time("since", now=True),
    # In which mode each staged flag counts for this lead, until its decision closes. Selected only with 0012_shadow.
    sa.Column("modes", JSONB(none_as_null=True)),
    sa.PrimaryKeyConstraint("tenant_id", "lead_id", "role"),
    _fk("leads", "lead_id", "lead_roles_lead_fk"),
    sa.CheckConstraint("role IN ('owner', 'collaborator')", name="role"),
    sa.CheckConstraint("state IN ('assigned', 'held', 'left', 'owned', 'gone', 'parked', 'refused')", name="state"),
    sa.Index("lead_roles_held_ix", "tenant_id", "queue_id", "since", postgresql_where=sa.text("state = 'held'")),
    sa.Index("lead_roles_parked_ix", "tenant_id", "since", postgresql_where=sa.text("state = 'parked'")),
)

# Also one row, of the same id and without a ref, for each line that is a member of another: a team takes turns there.
agents = sa.Table(
    "agents",
    metadata,
    _tenant(),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("email", sa.Text),
    sa.Column("active", sa.Boolean, nullable=False, server_default=sa.text("true")),
    # The CRM accepted a write for this agent and left the lead without an owner: nothing goes to them until a later
    # read shows them active; after three in a row only a human ends it.
    sa.Column("refusals", sa.Integer, nullable=False, server_default=sa.text("0")),
    _time("refused_at", nullable=True),
    _time("seen_at", now=True),
    sa.Column("paused_by_crm", sa.Boolean, nullable=False, server_default=sa.text("false")),
    sa.Column("paused_by_admin", sa.Boolean, nullable=False, server_default=sa.text("false")),
    # The CRM's, and the configuration's, which wins: kept apart, so that a sync never undoes the admin.
    sa.Column("zone", sa.Text, nullable=False, server_default=sa.text("'UTC'")),
    sa.Column("zone_by_admin", sa.Text),
    sa.Column("hours", JSONB(none_as_null=True)),
    # With paused_by_admin: when that pause ends by itself.
    _time("paused_until", nullable=True),
    sa.Column("leave", JSONB(none_as_null=True)),
    sa.Column("holidays", JSONB(none_as_null=True)),
    sa.Column("caps", JSONB(none_as_null=True)),
    sa.PrimaryKeyConstraint("tenant_id", "agent_id"),
)

# A row is only a lock: queues that share a capped agent decide one after the other. What the agent has is counted.
agent_counters = sa.Table(
    "agent_counters",
    metadata,
    _tenant(),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "agent_id"),
    _fk("agents", "agent_id", "agent_counters_agent_fk"),
)

agent_refs = sa.Table(
    "agent_refs",
    metadata,
    _tenant(),
    _ref(),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "ref"),
    _fk("agents", "agent_id", "agent_refs_agent_fk"),
    sa.Index("agent_refs_agent_ix", "tenant_id", "agent_id"),
)

queues = sa.Table(
    "queues",
    metadata,
    _tenant(),
    sa.Column("queue_id", sa.Uuid, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("active", sa.Boolean, nullable=False, server_default=sa.text("true")),
    sa.Column("when_nobody", sa.Text, nullable=False, server_default=sa.text("'hold'")),
    sa.Column("fallback_queue_id", sa.Uuid),
    sa.Column("default_agent_id", sa.Uuid),
    sa.Column("next_rank", sa.Integer, nullable=False, server_default=sa.text("1")),
    # Turns ever taken; the floor v of the line; the last ledger entry. Changed only under this row's lock.
    sa.Column("position", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("floor", Whole, nullable=False, server_default=sa.text("0")),
    sa.Column("seq", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("quiet_hours", JSONB(none_as_null=True)),
    sa.Column("skip_policy", JSONB, nullable=False, server_default=sa.text("'{}'")),
    # The members as configured where a team of the CRM is among them, which is kept in step: see connector.team_lines.
    sa.Column("follows", JSONB(none_as_null=True)),
    sa.PrimaryKeyConstraint("tenant_id", "queue_id"),
    sa.UniqueConstraint("tenant_id", "name", name="queues_name_uq"),
    sa.CheckConstraint(
        "when_nobody IN ('hold', 'fallback_queue', 'default_agent', 'leave_unassigned')", name="when_nobody"
    ),
)

members = sa.Table(
    "members",
    metadata,
    _tenant(),
    sa.Column("queue_id", sa.Uuid, nullable=False),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.Column("rank", sa.Integer, nullable=False),
    # Null: not in the line yet (joined while the rotation flag was off).
    sa.Column("tag", Whole),
    sa.Column("last_turn", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("weight", sa.Integer, nullable=False, server_default=sa.text("1")),
    # Away at the last turn under the policy `average`; part of the line, changed only under the queue's lock.
    sa.Column("averaging", sa.Boolean, nullable=False, server_default=sa.text("false")),
    sa.PrimaryKeyConstraint("tenant_id", "queue_id", "agent_id"),
    sa.UniqueConstraint("tenant_id", "queue_id", "rank", name="members_rank_uq"),
    _fk("queues", "queue_id", "members_queue_fk"),
    _fk("agents", "agent_id", "members_agent_fk"),
    sa.CheckConstraint("weight BETWEEN 0 AND 100", name="weight"),
    sa.Index("members_agent_ix", "tenant_id", "agent_id"),
)

rules = sa.Table(
    "rules",
    metadata,
    _tenant(),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("precedence", sa.Integer, nullable=False),
    sa.Column("condition", JSONB, nullable=False),
    sa.Column("targets", JSONB, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "name"),
    sa.UniqueConstraint("tenant_id", "role", "precedence", name="rules_precedence_uq"),
)

decisions = sa.Table(
    "decisions",
    metadata,
    _tenant(),
    sa.Column("decision_id", sa.Uuid, nullable=False),
    sa.Column("lead_id", sa.Uuid, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("seq", sa.Integer, nullable=False),
    _time("decided_at"),
    _time("received_at", nullable=True),
    sa.Column("event_id", sa.Uuid),
    sa.Column("cause", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("rule", sa.Text),
    sa.Column("queue_id", sa.Uuid),
    sa.Column("agent_id", sa.Uuid),
    sa.Column("turn", sa.BigInteger),
    sa.Column("config_version", sa.Integer, nullable=False),
    sa.Column("record", JSONB, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "decision_id"),
    sa.UniqueConstraint("tenant_id", "lead_id", "role", "seq", name="decisions_seq_uq"),
    _fk("leads", "lead_id", "decisions_lead_fk"),
    sa.CheckConstraint("outcome IN ('assigned', 'held', 'left', 'parked')", name="outcome"),
)

assignments = sa.Table(
    "assignments",
    metadata,
    _tenant(),
    sa.Column("assignment_id", sa.Uuid, nullable=False),
    sa.Column("decision_id", sa.Uuid, nullable=False),
    sa.Column("lead_id", sa.Uuid, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.Column("queue_id", sa.Uuid),
    sa.Column("turn", sa.BigInteger),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("state", Word, nullable=False, server_default=sa.text("'active'")),
    _time("assigned_at"),
    _time("confirmed_at", nullable=True),
    _time("ended_at", nullable=True),
    sa.PrimaryKeyConstraint("tenant_id", "assignment_id"),
    _fk("leads", "lead_id", "assignments_lead_fk"),
    sa.CheckConstraint("state IN ('active', 'superseded', 'overridden', 'released', 'refused', 'void')", name="state"),
    sa.Index(
        "assignments_active_uq",
        "tenant_id",
        "lead_id",
        "role",
        unique=True,
        postgresql_where=sa.text("state = 'active'"),
    ),
    sa.Index("assignments_agent_ix", "tenant_id", "agent_id", "assigned_at"),
    sa.Index("assignments_decision_ix", "tenant_id", "decision_id"),
)

turns = sa.Table(
    "turns",
    metadata,
    _tenant(),
    sa.Column("queue_id", sa.Uuid, nullable=False),
    sa.Column("turn", sa.BigInteger, nullable=False),
    sa.Column("decision_id", sa.Uuid, nullable=False),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.Column("void_reason", sa.Text),
    _time("taken_at"),
    sa.PrimaryKeyConstraint("tenant_id", "queue_id", "turn"),
    _fk("queues", "queue_id", "turns_queue_fk"),
)

ledger = sa.Table(
    "ledger",
    metadata,
    _tenant(),
    sa.Column("queue_id", sa.Uuid, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("kind", Word, nullable=False),
    _time("at"),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("data", JSONB, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "queue_id", "seq"),
    _fk("queues", "queue_id", "ledger_queue_fk"),
    sa.Index("ledger_checkpoint_ix", "tenant_id", "queue_id", "seq", postgresql_where=sa.text("kind = 'checkpoint'")),
)

# Turns that members are owed (given back) and those an admin gives next; served oldest first, deleted when served.
owed_turns = sa.Table(
    "owed_turns",
    metadata,
    _tenant(),
    sa.Column("queue_id", sa.Uuid, nullable=False),
    sa.Column("owed_id", sa.Uuid, nullable=False),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("tenant_id", "queue_id", "owed_id"),
    _fk("queues", "queue_id", "owed_turns_queue_fk"),
    sa.CheckConstraint("kind IN ('give_next', 'owed')", name="kind"),
)

outbox = sa.Table(
    "outbox",
    metadata,
    _tenant(),
    sa.Column("outbox_id", sa.Uuid, nullable=False),
    sa.Column("lead_id", sa.Uuid, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("decision_id", sa.Uuid, nullable=False),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.Column("expects_agent_id", sa.Uuid),
    sa.Column("state", Word, nullable=False, server_default=sa.text("'open'")),
    sa.Column("reason", sa.Text),
    # Whether a write may have reached the CRM: decides if a turn can be given back, and that a repeat reads first.
    sa.Column("sent", sa.Boolean, nullable=False, server_default=sa.text("false")),
    sa.Column("empty_writes", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("attempt", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("claims", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("lease", sa.Uuid),
    _time("due_at", now=True),
    _time("leased_until", nullable=True),
    _time("created_at", now=True),
    _time("closed_at", nullable=True),
    sa.PrimaryKeyConstraint("tenant_id", "outbox_id"),
    sa.UniqueConstraint("tenant_id", "lead_id", "role", "epoch", "kind", name="outbox_epoch_uq"),
    _fk("leads", "lead_id", "outbox_lead_fk"),
    sa.CheckConstraint("kind IN ('owner', 'collaborator', 'note', 'task')", name="kind"),
    sa.CheckConstraint(
        "state IN ('open', 'parked', 'confirmed', 'superseded', 'refused', 'gone', 'stale', 'given_up')", name="state"
    ),
    sa.Index("outbox_due_ix", "tenant_id", "due_at", postgresql_where=sa.text("state = 'open'")),
    sa.Index("outbox_open_ix", "tenant_id", "lead_id", postgresql_where=sa.text("state IN ('open', 'parked')")),
)

# Leads that agents gave back: asked for by the agent, approved or refused by a manager.
returns = sa.Table(
    "returns",
    metadata,
    _tenant(),
    sa.Column("return_id", sa.Uuid, nullable=False),
    sa.Column("lead_id", sa.Uuid, nullable=False),
    sa.Column("assignment_id", sa.Uuid, nullable=False),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    # What the agent wrote. It may be about a person: never logged, and emptied when raw deliveries are dropped.
    sa.Column("words", sa.Text),
    sa.Column("state", Word, nullable=False, server_default=sa.text("'asked'")),
    sa.Column("outcome", sa.Text),
    _time("asked_at"),
    sa.Column("asked_by", sa.Text, nullable=False),
    _time("decided_at", nullable=True),
    sa.Column("decided_by", sa.Text),
    sa.Column("why", sa.Text),
    sa.PrimaryKeyConstraint("tenant_id", "return_id"),
    _fk("leads", "lead_id", "returns_lead_fk"),
    sa.CheckConstraint("state IN ('asked', 'approved', 'refused')", name="state"),
    sa.CheckConstraint("outcome IN ('void', 'next')", name="outcome"),
    # One credit per assignment, whoever asks how often.
    sa.Index(
        "returns_open_uq", "tenant_id", "assignment_id", unique=True, postgresql_where=sa.text("state <> 'refused'")
    ),
    sa.Index("returns_agent_ix", "tenant_id", "agent_id", "asked_at"),
    sa.Index("returns_lead_ix", "tenant_id", "lead_id"),
    sa.Index("returns_asked_ix", "tenant_id", "asked_at", postgresql_where=sa.text("state = 'asked'")),
)
