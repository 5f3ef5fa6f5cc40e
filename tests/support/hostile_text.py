"""Text that attacks whatever shows or stores it, in the columns of a trace."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

ESCAPE = "\x1b[2J"


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


def poison_column(path: Path, table: str, column: str, change: Callable[[str], str]) -> bool:
    """Change all texts of a column, within JSON its strings and keys; False if one is a key."""
    with closing(sqlite3.connect(path)) as db, db:
        db.create_function("poison", 1, lambda text: _poison(text, change))
        try:
            db.execute(f"UPDATE {table} SET {column} = poison({column})")
        except sqlite3.IntegrityError:
            return False  # an index allows each text once
    return True


def _poison(text: str | None, change: Callable[[str], str]) -> str | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return change(text)
    if isinstance(value, dict | list | str):
        return json.dumps(_poison_json(value, change))
    return change(text)


def _poison_json(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_poison_json(item, change) for item in value]
    if isinstance(value, dict):
        items = {key: _poison_json(item, change) for key, item in value.items()}
        return {**items, change("key"): change("")}
    return value
