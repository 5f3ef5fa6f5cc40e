"""Changes that damage a trace: its bytes, its schema, the values of its rows, its arrays."""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import zstandard

from flexinspect.core.parsing import parse_json
from flexinspect.trace.schema import TABLES
from tools.torture.plain_data import changed

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
MAX_MILLIONS = 50  # instructions of SQLite that one change takes at most
MAX_JSON_BYTES = 200_000
NUMBERS = (0, 1, -1, 2, 7, 255, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63))
REALS = (0.0, -0.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), 0.5)
TEXTS = (
    *("", "x", "nan", "\x1b[2J\x07", "\u202e\u0301\ud7ff", "a\0b", "'; --", "%s{}{0.__class__}"),
    *("x" * 100_000, "[" * 20_000, "\n" * 500, "-1", "[[[", "/etc/passwd", "[bold]x[/nothing]"),
)
JSON_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 1e308, "", [], {}, [None], [[0, 1]], [2**63], {"": ""}, {"a": {"b": []}}),
    *({"$float": "NaN"}, {"$float": "x"}, [{"$float": []}], ["\x1b[31m"], list(range(5000))),
)
SHAPES = ("[]", "[0]", "[1]", "[-1]", "[1, 1, 1]", "[99999999999]", "[3, 0, 2]", "null", "[1.5]")
ITEMS = ("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "object")


def mutate(path: Path, seed: int) -> str:
    """Damage the trace at `path` in one to four ways; returns them in words."""
    rng, done = random.Random(seed), []
    for _ in range(rng.choice((1, 1, 2, 4))):
        change = rng.choice((_value, _value, _value, _array, _array, _rows, _schema, _bytes))
        try:
            done.append(change(path, rng))
        except (
            sqlite3.Error,
            IndexError,
            TypeError,
            ValueError,
        ) as error:  # an earlier change was worse
            done.append(f"{change.__name__} failed ({type(error).__name__})")
    return "; ".join(done)


def _edit(path: Path, edit: Callable[[sqlite3.Connection], str]) -> str:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute("PRAGMA synchronous = OFF")
        calls = itertools.count()  # an earlier change may have made a view that never ends
        db.set_progress_handler(lambda: next(calls) > MAX_MILLIONS, 1_000_000)
        return edit(db)


def _pick_table(db: sqlite3.Connection, rng: random.Random) -> str:
    """Return a table that has rows."""
    stored = _stored_tables(db)
    return rng.choice([t for t in stored if db.execute(f"SELECT 1 FROM {t} LIMIT 1").fetchone()])


def _stored_tables(db: sqlite3.Connection) -> list[str]:
    """Return the tables that the file has; earlier versions had fewer."""
    found = {name for (name,) in db.execute("SELECT name FROM sqlite_schema")}
    return [table.name for table in TABLES if table.name in found]


def _column(db: sqlite3.Connection, table: str, rng: random.Random) -> tuple[str, str]:
    """Return a column of a table, and its type."""
    found: tuple[str, str] = rng.choice(
        [(row[1], row[2]) for row in db.execute(f"PRAGMA table_info({table})")]
    )
    return found


def _some_rows(db: sqlite3.Connection, table: str, rng: random.Random) -> str:
    """Return a condition that holds for one row, or for all."""
    if rng.random() < 0.4:
        return "1"
    columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[5]]
    n_rows = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    key = ", ".join(columns)
    order = f"SELECT {key} FROM {table} LIMIT 1 OFFSET {rng.randrange(n_rows)}"
    return f"({key}) = ({order})"


def _value(path: Path, rng: random.Random) -> str:
    """Set a column of some rows to a value that its type allows."""

    def edit(db: sqlite3.Connection) -> str:
        table = _pick_table(db, rng)
        column, kind = _column(db, table, rng)
        where = _some_rows(db, table, rng)
        new: Any
        if kind == "INTEGER":
            new = rng.choice((*NUMBERS, None))
        elif kind == "REAL":
            new = rng.choice((*REALS, None))
        elif kind == "BLOB":
            new = rng.randbytes(rng.choice((0, 1, 40)))
        else:
            new = rng.choice((*TEXTS, json.dumps(rng.choice(JSON_VALUES))))
            if kind == "ANY":
                new = rng.choice((new, *NUMBERS, *REALS, b"\xff"))
            elif rng.random() < 0.6:
                new = _changed_json(db, table, column, where, rng) or new
        db.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {where}", (new,))
        return f"{table}.{column} = {new!a:.60} where {where:.60}"

    return _edit(path, edit)


def _changed_json(
    db: sqlite3.Connection, table: str, column: str, where: str, rng: random.Random
) -> str | None:
    """Return the JSON of a column with one value in it changed, None if it holds something else."""
    row = db.execute(f"SELECT {column} FROM {table} WHERE {where} LIMIT 1").fetchone()
    try:
        data = parse_json(row[0] if row else "")
    except (TypeError, ValueError):
        return None
    if not isinstance(data, (dict, list)):
        return None
    new = json.dumps(changed(data, rng))
    return new if len(new) < MAX_JSON_BYTES else None  # each row may get it


def _array(path: Path, rng: random.Random) -> str:
    """Change an array in a way that its checksum does not notice."""

    def edit(db: sqlite3.Connection) -> str:
        sql = "SELECT rowid, stream, item, shape, codec, data FROM arrays ORDER BY rowid"
        rows = db.execute(sql).fetchall()
        row, stream, item, shape, codec, data = rng.choice(rows)
        kind = rng.choice(("shape", "item", "data", "stream", "bomb", "owner"))
        if kind == "shape":
            shape = rng.choice((*SHAPES, json.dumps(json.loads(shape)[::-1]), f"[1, {shape[1:]}"))
        elif kind == "item":
            item = rng.choice(ITEMS)
        elif kind == "data":
            data = rng.choice((rng.randbytes(len(data)), b"\xff" * len(data), data[:-1], b""))
        elif kind == "stream":
            stream = rng.choice(rows)[1]
        elif kind == "bomb":
            codec, shape, item = "bits+zstd", "[1, 30000, 30000]", "bool"
            data = _bomb()
        db.execute(
            "UPDATE OR IGNORE arrays SET stream = ?, item = ?, shape = ?, codec = ?, data = ?, "
            "checksum = ? WHERE rowid = ?",
            (stream, item, shape, codec, data, zlib.crc32(data), row),
        )
        if kind == "owner":
            db.execute("UPDATE arrays SET owner = 'x' WHERE rowid = ?", (row,))
        return f"{kind} of array {stream} ({item} {shape} {codec})"

    return _edit(path, edit)


@cache
def _bomb() -> bytes:
    """Return 112 MB of zeros, compressed."""
    return bytes(zstandard.ZstdCompressor().compress(bytes(30_000 * 30_000 // 8)))


def _rows(path: Path, rng: random.Random) -> str:
    """Remove some rows, or move them to another place."""

    def edit(db: sqlite3.Connection) -> str:
        table = _pick_table(db, rng)
        where = _some_rows(db, table, rng)
        names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        places = [name for name in ("generation", "branch", "step", "layer") if name in names]
        if places and rng.random() < 0.5:
            place, to = rng.choice(places), rng.choice(NUMBERS)
            db.execute(f"UPDATE OR IGNORE {table} SET {place} = ? WHERE {where}", (to,))
            return f"{table}.{place} = {to} where {where:.60}"
        db.execute(f"DELETE FROM {table} WHERE {where}")
        return f"rows of {table} removed where {where:.60}"

    return _edit(path, edit)


def _schema(path: Path, rng: random.Random) -> str:
    """Change the schema: a table or column is missing, renamed, or computed."""

    def edit(db: sqlite3.Connection) -> str:
        table = rng.choice(_stored_tables(db))
        column, _ = _column(db, table, rng)
        changes = (
            [f"DROP TABLE {table}"],
            [f"ALTER TABLE {table} DROP COLUMN {column}"],
            [f"ALTER TABLE {table} RENAME TO old"],
            [f"DROP TABLE {table}", f"CREATE VIEW {table} AS {ENDLESS}"],
            [f"DROP TABLE {table}", f"CREATE TABLE {table} (a AS (hex(zeroblob(9e8))))"],
            [f"DROP TABLE {table}", f"CREATE TABLE {table} ({column})"],
            [f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN {ENDLESS}; END"],
            [f"PRAGMA user_version = {rng.choice((-1, 0, 1, 3, 2**31 - 1))}"],
        )
        statements = rng.choice(changes)
        for sql in statements:
            db.execute(sql)
        return statements[-1][:80]

    return _edit(path, edit)


def _bytes(path: Path, rng: random.Random) -> str:
    """Change single bytes, a page, or the length of the file."""
    data = bytearray(path.read_bytes())
    kind = rng.choice(("byte", "header", "page", "cut", "grow"))
    if kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "grow":
        data += rng.randbytes(rng.choice((1, 4096, 40_000)))
    elif kind == "page":
        at = rng.randrange(len(data) // 4096) * 4096
        data[at : at + 4096] = rng.choice((bytes(4096), rng.randbytes(4096)))
    else:
        end = 100 if kind == "header" else len(data)
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(end)] = rng.randrange(256)
    path.write_bytes(data)
    return f"{kind} of the file"
