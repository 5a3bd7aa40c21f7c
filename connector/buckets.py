"""The buckets of calls in the database: one row per tenant and bucket, shared by every process that calls its CRM.

A row holds how many calls were begun in each slot of the last window, so that what is taken anywhere is never more
than the bucket holds in any window of time, whoever takes it. Each statement is a transaction of its own: its row lock
is over before anything is sent. Time is the database's, so that no process with a wrong clock takes too much.

A process may keep a part of a bucket, which it then uses without asking. The part counts as taken for as long as the
process lives, and one window longer: nobody knows what it used of it last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import sqlalchemy as sa

from adapters.budget import Bucket
from connector.database import at_once
from connector.tables import buckets
from routing.flight import Statement

# Slots per window: a call counts to the end of its slot, which costs a hundredth of the pace at most.
_SLOTS = 100
# For how long what was taken may be used, in seconds and as a part of the window: then the count must know of it.
_LIFE, _LIFE_PART = 0.25, 1 / 40
# Seconds between the moment at which a call is counted and that at which the CRM counts it.
_ON_THE_WAY = 0.25
# Slots from this one on are no times: there stand the parts that processes keep, each by its number. No time comes so
# far, so a part is never over, until its process is seen dead: then it counts as taken at that moment.
_PARTS = 1 << 50
# The CRM's word on what is left is older than our count: calls that have left the window since still explain it.
_LATE_WORD = 1.0

_NOW = "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
_SLOT = f"CAST(ceil({_NOW} / :width) AS bigint)"
_LIVE = f"x.slot * :width > {_NOW} - :hold"
_COUNTED = "unnest(b.slots, b.counts) AS x(slot, n)"
_SPENT = f"(SELECT coalesce(sum(x.n), 0) FROM {_COUNTED} WHERE {_LIVE})"  # noqa: S608 - all parts of these are constants of this module
_OTHERS = "CASE WHEN b.others_until > clock_timestamp() THEN b.others ELSE 0 END"
_MERGED = f"""
    SELECT array_agg(g.slot ORDER BY g.slot), array_agg(g.n ORDER BY g.slot)
    FROM (
        SELECT x.slot, CAST(sum(x.n) AS integer) AS n
        FROM ({{}} UNION ALL {{}}) AS x(slot, n)
        WHERE {_LIVE} GROUP BY x.slot HAVING sum(x.n) > 0
    ) g"""  # noqa: S608
_ALL = "SELECT * FROM unnest(b.slots, b.counts)"
# Of a row as it is for who asks: without its own part, which is set anew, and with those of the dead at this moment.
_NOT_MINE = "x.slot IS DISTINCT FROM :mine"
_KEPT = f"""
    SELECT CASE WHEN x.slot >= {_PARTS} AND x.slot <> ALL(:living) THEN {_SLOT} ELSE x.slot END, x.n
    FROM {_COUNTED} WHERE {_NOT_MINE}"""  # noqa: S608
# What is taken with `n` more, by all others and beyond the own part.
_WITH_N = f"(SELECT coalesce(sum(x.n), 0) FROM {_COUNTED} WHERE {_LIVE} AND {_NOT_MINE}) + {_OTHERS} + :n"  # noqa: S608
_THEIRS = f"x.slot >= {_PARTS} AND {_NOT_MINE} AND (x.slot = ANY(:living)) IS NOT FALSE"
_ROOM = f":parts - (SELECT coalesce(sum(x.n), 0) FROM {_COUNTED} WHERE {_THEIRS})"  # noqa: S608
_PART = f"SELECT :mine, CAST(greatest(:least, least(:part, {_ROOM}, :most - ({_WITH_N}))) AS integer)"
_TAKEN = _MERGED.format(_KEPT, f"SELECT {_SLOT}, CAST(:n AS integer) UNION ALL {_PART} WHERE :mine IS NOT NULL")

_KINDS = {
    "tenant": "uuid",
    "bucket": "text",
    "n": "integer",
    "most": "integer",
    "used": "integer",
    "mine": "bigint",
    "part": "integer",
    "parts": "integer",
    "least": "integer",
    "living": "bigint[]",
    "slot": "bigint",
    "width": "double precision",
    "hold": "double precision",
    "until": "double precision",
}


def _ready(text: str) -> Statement:
    """The statement with its parameters as what they are, which PostgreSQL could not tell from where they stand."""
    return Statement(sa.text(re.sub(r":(\w+)", lambda found: f"CAST({found[0]} AS {_KINDS[found[1]]})", text)))


# Concurrent takers wait for each other's row lock; PostgreSQL then looks at the condition and the row anew.
_TAKE = _ready(f"""
    WITH took AS (
        UPDATE buckets b SET (slots, counts) = ({_TAKEN})
        WHERE b.tenant_id = :tenant AND b.bucket = :bucket AND {_WITH_N} + :least <= :most
        RETURNING
            (SELECT max(x.slot) FROM {_COUNTED} WHERE x.slot < {_PARTS}) AS slot,
            (SELECT coalesce(sum(x.n), 0) FROM {_COUNTED} WHERE x.slot = :mine) AS part
    )
    SELECT slot, CAST(part AS integer) AS part, CAST(0 AS double precision) AS wait FROM took
    UNION ALL
    SELECT NULL, 0, coalesce(
        (
            SELECT min(c.slot) * :width + :hold FROM (
                SELECT x.slot, sum(x.n) OVER (ORDER BY x.slot) AS freed
                FROM {_COUNTED} WHERE {_LIVE} AND x.slot < {_PARTS}
            ) c WHERE c.freed >= {_WITH_N} + :least - :most
        ),
        CAST(extract(epoch FROM b.others_until) AS double precision)
    ) - {_NOW}
    FROM buckets b WHERE b.tenant_id = :tenant AND b.bucket = :bucket AND NOT EXISTS (SELECT FROM took)
""")  # noqa: S608
_MOVE = _ready(f"""
    UPDATE buckets b SET (slots, counts) = (
        {_MERGED.format(_ALL, f"SELECT {_SLOT}, 1 UNION ALL SELECT CAST(:slot AS bigint), -1")}
    ) WHERE b.tenant_id = :tenant AND b.bucket = :bucket
""")  # noqa: S608
_LEAVE = _ready(f"""
    UPDATE buckets b SET (slots, counts) = (
        {_MERGED.format(f"SELECT * FROM {_COUNTED} WHERE {_NOT_MINE}", f"SELECT {_SLOT}, CAST(:used AS integer)")}
    ) WHERE b.tenant_id = :tenant AND b.bucket = :bucket
""")  # noqa: S608
_HEAR = _ready(f"""
    UPDATE buckets b SET
        others = greatest(0, :used - {_SPENT}),
        others_until = clock_timestamp() + make_interval(secs => :until)
    WHERE b.tenant_id = :tenant AND b.bucket = :bucket
""")  # noqa: S608
_MAKE = _ready("INSERT INTO buckets (tenant_id, bucket) VALUES (:tenant, :bucket) ON CONFLICT DO NOTHING")


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of asking: the slot that it is counted in and the part that who asked has now; or seconds to wait."""

    slot: int | None
    wait: float = 0.0
    part: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """What a process would keep of a bucket for itself.

    `number`: of the process. `wanted`: how much it would keep, `most` all processes together. `least`: so much it keeps
    in any case, for it was used of it in the last window.
    """

    number: int
    wanted: int
    most: int
    least: int


def life(bucket: Bucket) -> float:
    """Seconds for which what was taken may still be used."""
    return max(_LIFE, bucket.window * _LIFE_PART)


def hold(bucket: Bucket) -> float:
    """Seconds for which what was taken counts: the CRM's window, and as long as it may reach the CRM later."""
    return bucket.window + life(bucket) + _ON_THE_WAY


def take(
    engine: sa.Engine,
    tenant_id: UUID,
    bucket: Bucket,
    n: int,
    most: int,
    part: Part | None = None,
    living: Sequence[int] | None = None,
) -> Taken:
    """Take `n` of what the last window holds if it then holds `most` or fewer. One round trip.

    With `part` what the process keeps is set as well, as far as there is room. `living` are the numbers of all
    processes that may still use what they keep; None: nobody knows, so all count.
    """
    values = {**_of(tenant_id, bucket), "n": n, "most": most, "mine": None, "part": 0, "parts": 0, "least": 0}
    values["living"] = None if living is None else [_PARTS + number for number in living]
    if part is not None:
        values |= {"mine": _PARTS + part.number, "part": part.wanted, "parts": part.most, "least": part.least}
    rows = at_once(engine, _TAKE, values)
    if not rows:  # the first call ever
        at_once(engine, _MAKE, {"tenant": tenant_id, "bucket": bucket.name})
        rows = at_once(engine, _TAKE, values)
    # Of two rows with the same snapshot the one that took counts; a wait is a lower bound, others ask, too.
    took = next((row for row in rows if row.slot is not None), None)
    if took is not None:
        return Taken(took.slot, part=took.part)
    return Taken(None, max((float(row.wait or 0) for row in rows), default=0.0))


def move(engine: sa.Engine, tenant_id: UUID, bucket: Bucket, slot: int) -> None:
    """What was taken in `slot` is used only now: it counts from now on."""
    at_once(engine, _MOVE, {**_of(tenant_id, bucket), "slot": slot})


def leave(engine: sa.Engine, tenant_id: UUID, bucket: Bucket, number: int, used: int) -> None:
    """The process of this number keeps nothing any more; `used` of it in the last window, which counts from now on."""
    at_once(engine, _LEAVE, {**_of(tenant_id, bucket), "mine": _PARTS + number, "used": used})


def hear(engine: sa.Engine, tenant_id: UUID, bucket: Bucket, used: int, resets_in: float | None) -> None:
    """The CRM says that `used` of the bucket are gone: what we do not know of, others of the account have taken."""
    values = _of(tenant_id, bucket)
    values |= {"used": used, "hold": hold(bucket) + _LATE_WORD, "until": resets_in or hold(bucket)}
    at_once(engine, _MAKE, {"tenant": tenant_id, "bucket": bucket.name})
    at_once(engine, _HEAR, values)


def spent(conn: sa.Connection, tenant_id: UUID, table: Mapping[str, Bucket]) -> dict[str, tuple[int, int, int]]:
    """By bucket: what was taken in the last window, what processes keep, and what others of the account took.

    The last by the CRM's word.
    """
    b = buckets.c
    now = sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp()), sa.Double).label("now")
    others = sa.case((b.others_until > sa.func.clock_timestamp(), b.others), else_=0).label("others")
    rows = conn.execute(
        sa.select(b.bucket, b.slots, b.counts, others, now).where(b.tenant_id == tenant_id, b.bucket.in_(table))
    )
    found = {}
    for row in rows:
        bucket, counted = table[row.bucket], list(zip(row.slots, row.counts, strict=True))
        live = [n for s, n in counted if s < _PARTS and s * _width(bucket) > row.now - hold(bucket)]
        found[row.bucket] = (sum(live), sum(n for s, n in counted if s >= _PARTS), row.others)
    return found


def _width(bucket: Bucket) -> float:
    return bucket.window / _SLOTS


def _of(tenant_id: UUID, bucket: Bucket) -> dict[str, object]:
    return {"tenant": tenant_id, "bucket": bucket.name, "width": _width(bucket), "hold": hold(bucket)}
