"""Many rows in one statement: what a unit writes goes to the server as one JSON document per table.

One statement per row costs the driver and the server far more than the row itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]

Rows = Sequence[Mapping[str, Any]]


def _plain(value: object) -> object:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    raise TypeError(f"a {type(value).__name__} cannot be written in bulk")


def document(rows: Rows) -> str:
    """`rows` as the JSON array that :func:`recordset` reads. Numbers of any size stay exact."""
    return json.dumps(rows, default=_plain)


def recordset(table: sa.Table, names: Sequence[str], alias: str) -> str:
    """The FROM item that gives the columns `names` of `table` from the parameter ``rows``."""
    columns = ", ".join(f"{name} {table.c[name].type.compile(_DIALECT)}" for name in names)
    return f"jsonb_to_recordset(CAST(:rows AS jsonb)) AS {alias}({columns})"


@lru_cache(maxsize=64)
def _insert(table: sa.Table, names: tuple[str, ...], extra: str, extra_value: str, ending: str) -> sa.TextClause:
    columns = ", ".join(names)
    also, value = (f", {extra}", f", {extra_value}") if extra else ("", "")
    return sa.text(
        f"INSERT INTO {table.name} ({columns}{also}) SELECT {columns}{value} "  # noqa: S608 - names of our own schema
        f"FROM {recordset(table, names, 'given')} {ending}"
    )


def insert(
    conn: sa.Connection,
    table: sa.Table,
    rows: Rows,
    *,
    ending: str = "",
    computed: tuple[str, str] = ("", ""),
    **values: object,
) -> None:
    """Insert `rows`, which all have the same columns. `ending` is an ON CONFLICT clause.

    `computed` names one more column and the SQL that fills it for every row, from parameters given as `values`.
    """
    if rows:
        statement = _insert(table, tuple(rows[0]), *computed, ending)
        conn.execute(statement, {"rows": document(rows), **values})


@lru_cache(maxsize=8)
def _update(table: sa.Table, keys: tuple[str, ...], names: tuple[str, ...]) -> sa.TextClause:
    sets = ", ".join(f"{name} = given.{name}" for name in names if name not in keys)
    where = " AND ".join(f"{table.name}.{name} = given.{name}" for name in keys)
    return sa.text(
        f"UPDATE {table.name} SET {sets} FROM {recordset(table, names, 'given')} "  # noqa: S608 - names of our own schema
        f"WHERE {table.name}.tenant_id = :tenant AND {where}"
    )


def update(conn: sa.Connection, table: sa.Table, tenant_id: UUID, keys: tuple[str, ...], rows: Rows) -> None:
    """Set the other columns of `rows` on the rows of `tenant_id` with the same `keys`."""
    if rows:
        conn.execute(_update(table, keys, tuple(rows[0])), {"tenant": tenant_id, "rows": document(rows)})
