"""No text of a trace reaches the terminal with control characters, whichever column holds it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.earlier_traces import unpack

from flexinspect.cli.main import main

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


def poisoned(value: Any) -> Any:
    """Add control characters to all texts and keys of a JSON value."""
    if isinstance(value, str):
        return value + ESCAPE
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    if isinstance(value, dict):
        items = {key: poisoned(item) for key, item in value.items()}
        return {**items, f"{ESCAPE}key": ESCAPE}
    return value


def poison(text: str | None) -> str | None:
    """Add control characters to a column's text; JSON stays JSON."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return text + ESCAPE
    return json.dumps(poisoned(value)) if isinstance(value, dict | list | str) else text + ESCAPE


def commands(path: Path) -> Iterator[list[str]]:
    """Yield the commands that print the trace: all of it, and every panel at its last step."""
    with closing(sqlite3.connect(path)) as db:
        sql = "SELECT generation, branch, max(step) FROM steps GROUP BY 1, 2 ORDER BY 1, 2"
        generation, branch, step = db.execute(sql).fetchall()[-1]
    show = ["show", str(path), f"--generation={generation}", f"--branch={branch}", f"--step={step}"]
    yield from (["dump", str(path)], ["findings", str(path)], show, [*show, "--picture"])


@pytest.mark.parametrize("name", ["branches", "extreme", "training"])
def test_no_column_of_text_reaches_the_terminal_unescaped(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, path = unpack(name, tmp_path), tmp_path / "poisoned.flextrace"
    columns = text_columns(whole)
    assert len(columns) > 30
    for table, column in columns:
        shutil.copy(whole, path)
        with closing(sqlite3.connect(path)) as db, db:
            db.create_function("poison", 1, poison)
            try:
                db.execute(f"UPDATE {table} SET {column} = poison({column})")
            except sqlite3.IntegrityError:
                continue  # an index allows each text once
        for command in commands(path):
            main(command)
            printed = capsys.readouterr()
            assert "\x1b" not in printed.out + printed.err, f"{table}.{column}: {command}"
