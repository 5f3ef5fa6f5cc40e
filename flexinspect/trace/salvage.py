"""What can still be read of a file that is no whole trace."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from flexinspect.trace import schema

MOST_COPIED = 2 << 30
"""Bytes of a damaged file above which no copy is made of it."""


def mended(path: Path) -> Path | None:
    """Return a temporary copy of a trace that was cut short, filled up with empty pages.

    SQLite refuses a file that is shorter than its header says; filled up, it reads all pages that
    are there and reports the others as damaged. None for a file that is not cut short.
    """
    try:
        with path.open("rb") as file:
            head = file.read(100)
        size = path.stat().st_size
        wanted = _promised(head)
        if not 0 < size < wanted or size > MOST_COPIED or wanted > 4 * MOST_COPIED:
            return None
        copy = Path(tempfile.mkdtemp(prefix="flexinspect-left-")) / path.name
        shutil.copyfile(path, copy)
        with copy.open("r+b") as file:
            file.truncate(wanted)
        return copy
    except OSError:
        return None


def _promised(head: bytes) -> int:
    """Return the bytes that a SQLite header promises, 0 for anything else."""
    if len(head) < 100 or int.from_bytes(head[68:72], "big") != schema.APPLICATION_ID:
        return 0
    page = int.from_bytes(head[16:18], "big")
    return int.from_bytes(head[28:32], "big") * (65536 if page == 1 else page)


def forget(copy: Path) -> None:
    """Remove a copy that `mended` made."""
    shutil.rmtree(copy.parent, ignore_errors=True)


def what_is_left(path: Path) -> list[str]:
    """Return sentences about what a damaged or foreign file still holds; never raises."""
    try:
        size = path.stat().st_size
    except OSError:
        return []
    counts = _counts(path)
    lines = [f"The file has {size} bytes."]
    if counts:
        lines.append("Readable in it: " + ", ".join(f"{n} {name}" for name, n in counts) + ".")
    elif size:
        lines.append("Nothing in it can be read as a trace.")
    return lines


def _counts(path: Path) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            for table in schema.TABLES:
                number = _count(db, table.name)
                if number:
                    found.append((table.name, number))
    except (sqlite3.Error, OSError, ValueError):
        return found
    return found


def _count(db: sqlite3.Connection, table: str) -> int:
    """Count the rows that can be read, up to the first page that cannot."""
    number = 0
    try:
        # A constant, so that a broken payload does not end the count.
        for _ in db.execute(f"SELECT 1 FROM {table}"):
            number += 1
    except sqlite3.Error:
        pass
    return number
