"""Traces of earlier builds, which lack tables and columns that came without a new version.

A temporary view of the same name is what an unqualified name means in a connection: it gives what
there is, and in place of what is missing what a run without it has.
"""

from __future__ import annotations

import sqlite3

from flexinspect.trace import schema
from flexinspect.trace.columns import Column, Table

ADDED_TABLES = (
    schema.INPUTS,
    schema.BUILDS,
    schema.GRADIENTS,
    schema.TRAINING_STEPS,
    schema.REVIEWS,
    schema.OUTPUT,
)
"""Tables that the first traces of this version did not have; the others are in every trace."""

_COLUMNS_SQL = (
    "SELECT m.name, p.name FROM main.sqlite_schema m JOIN pragma_table_info(m.name, 'main') p "
    "WHERE m.type = 'table'"
)
_DEFAULT_LITERALS = {"int": "0", "bool": "0", "text": "''", "json": "'[]'"}


def compatibility_selects(db: sqlite3.Connection) -> dict[str, str]:
    """Return for each table that lacks something, by name, the SELECT that gives it whole."""
    held: dict[str, set[str]] = {}
    for table, column in db.execute(_COLUMNS_SQL):
        held.setdefault(table, set()).add(column)
    return {
        table.name: _compatibility_select(table, held.get(table.name, set()))
        for table in schema.TABLES
        if _is_incomplete(table, held.get(table.name))
    }


def _is_incomplete(table: Table, held: set[str] | None) -> bool:
    if held is None:
        return table in ADDED_TABLES
    return not held.issuperset(table.names)


def _compatibility_select(table: Table, held: set[str]) -> str:
    parts = [
        column.name if column.name in held else f"{_default_literal(column)} AS {column.name}"
        for column in table.columns
    ]
    source = f"FROM main.{table.name}" if held else "WHERE 0"
    return f"SELECT {', '.join(parts)} {source}"


def _default_literal(column: Column) -> str:
    """Return the literal of a column that was not recorded; NULL where that is allowed."""
    if column.kind == "json" and "an object" in column.meaning:
        return "'{}'"
    return _DEFAULT_LITERALS.get(column.kind, "NULL")
