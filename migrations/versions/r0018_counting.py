"""For a burst into a new database: who serves it may have the rows of tables counted that nobody has counted yet.

Only the owner of a table may have it counted, and autovacuum, which does, looks once a minute.
"""

from alembic import op

revision = "0018_counting"
down_revision = "0017_teams"
branch_labels = None
depends_on = None

# One at a time, which an advisory lock of this transaction sees to, and nobody waits: not for another that counts, nor
# for a table that somebody holds, whose size cannot even be seen. After a hundred milliseconds the rest is left to the
# next call: of a database that was restored without its counts there may be many large tables.
STATEMENTS = """
CREATE FUNCTION turnlock_count_rows() RETURNS integer LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '10ms' AS $$
DECLARE
    counted integer := 0;
    uncounted regclass[];
    one regclass;
BEGIN
    IF NOT pg_try_advisory_xact_lock(8391739299115005294) THEN  -- "turncoun"
        RETURN 0;
    END IF;
    BEGIN
        SELECT array_agg(c.oid ORDER BY pg_relation_size(c.oid)) INTO uncounted
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = <schema> AND c.relkind = 'r' AND c.relowner = current_user::regrole
            AND c.reltuples < 0  -- not known
            AND pg_relation_size(c.oid) > 8192;  -- more than a page: fifty rows, a hundred
    EXCEPTION WHEN lock_not_available THEN
        RETURN 0;
    END;
    FOREACH one IN ARRAY coalesce(uncounted, '{}') LOOP
        EXECUTE format('ANALYZE (SKIP_LOCKED) %s', one);
        counted := counted + 1;
        EXIT WHEN clock_timestamp() > statement_timestamp() + interval '100 milliseconds';
    END LOOP;
    RETURN counted;
END $$;
"""


def upgrade() -> None:
    schema = op.get_bind().exec_driver_sql("SELECT quote_literal(current_schema())").scalar_one()
    op.execute(STATEMENTS.replace("<schema>", schema))
