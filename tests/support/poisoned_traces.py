"""Traces with a mark in every text of one column, as a hostile program might record them."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any


def poisoned_copies(whole: Path, path: Path, mark: str) -> Iterator[str]:
    """Write a copy of a trace to `path` for each column of text that it has, one after the other.

    In all texts of the column, and in the keys of its JSON, stands `mark`. Yields the column as
    "table.column".
    """
    columns = text_columns(whole)
    assert len(columns) > 30
    for table, column in columns:
        shutil.copy(whole, path)
        with closing(sqlite3.connect(path)) as db, db:
            db.create_function("poison", 1, lambda text: _poison(text, mark))
            try:
                db.execute(f"UPDATE {table} SET {column} = poison({column})")
            except sqlite3.IntegrityError:
                continue  # an index allows each text once
        yield f"{table}.{column}"


def text_columns(path: Path) -> list[tuple[str, str]]:
    """Return (table, column) of each text that the trace holds a value of."""
    with closing(sqlite3.connect(path)) as db:
        names = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        columns = [
            (table, row[1])
            for (table,) in names
            for row in db.execute(f"PRAGMA table_info({table})")
            if row[2] == "TEXT"
        ]
        has_value = "SELECT 1 FROM {} WHERE {} <> '' LIMIT 1"
        return [pair for pair in columns if db.execute(has_value.format(*pair)).fetchone()]


def _poison(text: str | None, mark: str) -> str | None:
    """Add the mark to a column's text; JSON stays JSON, and numbers in it stay."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return text + mark
    return json.dumps(_mark(value, mark)) if isinstance(value, dict | list | str) else text


def _mark(value: Any, mark: str) -> Any:
    """Add the mark to all texts and keys of a JSON value."""
    if isinstance(value, str):
        return value + mark
    if isinstance(value, list):
        return [_mark(item, mark) for item in value]
    if isinstance(value, dict):
        items = {key: _mark(item, mark) for key, item in value.items()}
        return {**items, f"{mark}key": mark}
    return value
