"""Many rows in one statement: what a unit writes goes to the server as one array per column.

One statement per row costs the driver and the server far more than the row itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from routing.flight import Ask, Statement

_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]

Rows = Sequence[Mapping[str, Any]]


def _arrays(table: sa.Table, names: Sequence[str]) -> str:
    """The FROM item that gives the columns `names` of `table` from a parameter for each."""
    arrays = (f"CAST(:{name} AS {table.c[name].type.compile(_DIALECT)}[])" for name in names)
    return f"unnest({', '.join(arrays)}) AS given({', '.join(names)})"


@lru_cache(maxsize=64)
def _of_json(table: sa.Table) -> frozenset[str]:
    return frozenset(column.name for column in table.c if isinstance(column.type, postgresql.JSONB))


def _columns(table: sa.Table, names: Sequence[str], rows: Rows) -> dict[str, list[Any]]:
    of_json = _of_json(table)
    return {
        name: [_json(row[name]) for row in rows] if name in of_json else [row[name] for row in rows] for name in names
    }


def _json(value: object) -> str | None:
    return None if value is None else json.dumps(value)


@lru_cache(maxsize=64)
def _insert(table: sa.Table, names: tuple[str, ...], computed: tuple[tuple[str, str], ...], ending: str) -> Statement:
    values = dict(zip(names, (f"given.{name}" for name in names), strict=True)) | dict(computed)
    return Statement(
        sa.text(
            f"INSERT INTO {table.name} ({', '.join(values)}) "  # noqa: S608 - names of our own schema
            f"SELECT {', '.join(values.values())} FROM {_arrays(table, names)} {ending}"
        )
    )


def insert(
    table: sa.Table, rows: Rows, *, ending: str = "", computed: Mapping[str, str] | None = None, **values: object
) -> list[Ask]:
    """What inserts `rows`, which all have the same columns; nothing for none. `ending` is an ON CONFLICT clause.

    `computed` are columns with the SQL that fills them for every row, from the row as ``given`` and `values`.
    """
    if not rows:
        return []
    names = tuple(rows[0])
    statement = _insert(table, names, tuple((computed or {}).items()), ending)
    return [statement(**_columns(table, names, rows), **values)]


@lru_cache(maxsize=8)
def _update(table: sa.Table, keys: tuple[str, ...], names: tuple[str, ...]) -> Statement:
    sets = ", ".join(f"{name} = given.{name}" for name in names if name not in keys)
    where = " AND ".join(f"{table.name}.{name} = given.{name}" for name in keys)
    return Statement(
        sa.text(
            f"UPDATE {table.name} SET {sets} FROM {_arrays(table, names)} "  # noqa: S608 - names of our own schema
            f"WHERE {table.name}.tenant_id = CAST(:tenant AS uuid) AND {where}"
        )
    )


def update(table: sa.Table, tenant_id: UUID, keys: tuple[str, ...], rows: Rows) -> list[Ask]:
    """What sets the other columns of `rows` on the rows of `tenant_id` with the same `keys`; nothing for none."""
    if not rows:
        return []
    names = tuple(rows[0])
    return [_update(table, keys, names)(tenant=tenant_id, **_columns(table, names, rows))]
