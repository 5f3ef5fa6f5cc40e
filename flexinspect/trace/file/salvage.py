"""Read what is left of a trace that was cut short or damaged.

SQLite stores the pages of the schema between the first pages of the tables, and cannot read a file
that lacks one of them. They are the same in all traces of one build, so lost ones are rebuilt.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

from flexinspect.trace import schema
from flexinspect.trace.file import connections
from flexinspect.trace.file.connections import HEADER_BYTES

OFFER = "Open what is left of it, as a copy"  # what the interface offers for a repairable trace
MAX_COPIED_BYTES = 2 << 30  # size in bytes above which a damaged file is not copied
MAX_COUNTING_S = 2.0  # seconds spent at most on counting the readable rows of a file
_COPY_PREFIX = "flexinspect-left-"
_COPY_CHUNK = 8 << 20  # bytes that are copied at once
_SCHEMA_BYTES = 1 << 20  # bytes at the beginning of a trace that hold its schema
_PROGRESS_INTERVAL = 10_000  # instructions of SQLite between two checks of the clock


def is_repairable(path: Path) -> bool:
    """Tell whether a file is a trace that was cut short and whose copy can be repaired. Quick.

    A lost schema can be rebuilt if this build writes the same schema.
    """
    try:
        return _lost_pages(path) is not None
    except OSError:
        return False


def is_repaired_copy(path: Path) -> bool:
    """Tell whether a trace is a copy that `repair_copy` made."""
    return path.parent.name.startswith(_COPY_PREFIX)


def repair_copy(path: Path, stop: Callable[[], bool] = lambda: False) -> Path | None:
    """Return a temporary copy of a trace that was cut short, padded with empty pages.

    SQLite refuses a file that is shorter than its header says. Of a padded file it reads all
    complete pages and reports the others as damaged. Lost pages of the schema are rebuilt. Returns
    None for a file that is not cut short or has the schema of another build, when there is no space
    for a copy, and when `stop`, which is called between chunks, returns True.
    """
    folder: Path | None = None
    try:
        lost = _lost_pages(path)
        if lost is None:
            return None
        folder = Path(tempfile.mkdtemp(prefix=_COPY_PREFIX))
        copy = folder / path.name
        with path.open("rb") as source, copy.open("wb") as target:
            head = source.read(HEADER_BYTES)
            source.seek(0)
            while (piece := source.read(_COPY_CHUNK)) and not stop():
                target.write(piece)
            page = connections.page_bytes(head)
            target.truncate(target.tell() // page * page)
            for number, data in lost.items():
                target.seek((number - 1) * page)
                target.write(data)
            target.truncate(connections.declared_bytes(head))
    except OSError:
        copy = None
    if folder is not None and (copy is None or stop()):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return copy


def _lost_pages(path: Path) -> dict[int, bytes] | None:
    """Return the `missing_schema_pages` of a trace that was cut short, None for any other file.

    Raises `OSError`.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        kept = file.read(_SCHEMA_BYTES)
    is_trace = len(kept) >= HEADER_BYTES and connections.is_trace_header(kept)
    wanted = connections.declared_bytes(kept) if is_trace else 0
    if not size < wanted <= 4 * MAX_COPIED_BYTES or size > MAX_COPIED_BYTES:
        return None
    page = connections.page_bytes(kept)
    return missing_schema_pages(kept[: len(kept) // page * page], page)


def delete_repaired_copy(copy: Path) -> None:
    """Remove a copy that `repair_copy` made."""
    shutil.rmtree(copy.parent, ignore_errors=True)


def describe_readable(path: Path) -> list[str]:
    """Return sentences about what can be read of a damaged or foreign file; never raises.

    Takes at most `MAX_COUNTING_S`, even for a large or hostile file.
    """
    try:
        size = path.stat().st_size
    except OSError:
        return []
    if path.is_dir():
        return []
    counts, ran_out = _count_tables(path)
    lines = [f"The file has {size} bytes."]
    if counts:
        lines.append(f"Readable in it: {', '.join(counts)}.")
    elif size and not ran_out:
        lines.append("Nothing in it can be read as a trace.")
    if ran_out:
        lines.append(f"Counting stopped after {MAX_COUNTING_S:g} seconds, so there may be more.")
    return lines


_WORDS = {
    "run": ("fact about the run", "facts about the run"),
    "branches": ("branch", "branches"),
    "candidates": ("candidate token", "candidate tokens"),
    "calls": ("kernel call", "kernel calls"),
    "builds": ("mask that was built", "masks that were built"),
    "layer_stats": ("statistic of a layer", "statistics of layers"),
    "memory": ("memory measurement", "memory measurements"),
    "gpus": ("measurement of a GPU", "measurements of GPUs"),
    "lens": ("layer with a logit lens", "layers with a logit lens"),
    "grads": ("gradient of a parameter", "gradients of parameters"),
    "gradients": ("token with gradients", "tokens with gradients"),
    "training_steps": ("training step", "training steps"),
    "reviews": ("rule that was run", "rules that were run"),
    "output": ("piece of printed output", "pieces of printed output"),
}
"""The words for one row and for several rows of the tables whose names are no plain plurals."""


def _count_tables(path: Path) -> tuple[list[str], bool]:
    """Return the number of readable rows of each table, in words, and whether the time ran out."""
    end = time.monotonic() + MAX_COUNTING_S
    found: list[str] = []
    ran_out = False

    def is_over() -> bool:
        nonlocal ran_out
        ran_out = ran_out or time.monotonic() > end
        return ran_out

    with suppress(sqlite3.Error, OSError, ValueError), closing(_open_damaged(path)) as db:
        db.set_progress_handler(is_over, _PROGRESS_INTERVAL)
        db.execute("PRAGMA trusted_schema=OFF")
        # With this pragma SQLite does not refuse a file that is cut short; nothing is written.
        db.execute("PRAGMA writable_schema=ON")
        for table in schema.TABLES:
            number = _count_rows(db, table.name)
            if number:
                least = "at least " if ran_out else ""
                one, many = _WORDS.get(table.name, (table.name[:-1], table.name))
                found.append(f"{least}{number} {one if number == 1 else many}")
            if ran_out:
                break
    return found, ran_out


def _open_damaged(path: Path) -> sqlite3.Connection:
    """Open a file; if its schema is cut off, open it in memory with a rebuilt schema."""
    lost = _lost_pages(path)
    if not lost:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    kept = path.read_bytes()
    page = connections.page_bytes(kept)
    whole = bytearray(kept[: len(kept) // page * page].ljust(max(lost) * page, b"\0"))
    for number, data in lost.items():
        whole[(number - 1) * page : number * page] = data
    whole[18:20] = b"\1\1"  # a database in memory has no WAL
    db = sqlite3.connect(":memory:")
    db.execute("PRAGMA writable_schema=ON")
    db.deserialize(bytes(whole))
    return db


_IS_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND name = ?"
"""Only stored tables: a view or a virtual table of a hostile file may never end."""


def _count_rows(db: sqlite3.Connection, table: str) -> int:
    """Count the rows before the first page that cannot be read."""
    number = 0
    with suppress(sqlite3.Error):
        if db.execute(_IS_TABLE, (table,)).fetchone() is not None:
            # A constant, so that damage in the payload does not end the count.
            for _ in db.execute(f"SELECT 1 FROM {table}"):
                number += 1
    return number


_SCHEMA_COOKIE = slice(40, 44)  # bytes of the header that count the changes of the schema
_INTERIOR_PAGE, _LEAF_PAGE = 5, 13  # types of a table's pages


def missing_schema_pages(available: bytes, page: int) -> dict[int, bytes] | None:
    """Return the rebuilt pages of the schema that `available` lacks, by number from 1.

    `available` is the beginning of a trace, in whole pages of `page` bytes. None if a page is lost
    and the trace has the schema of another build.
    """
    wanted = _schema_page_numbers(available[:page])
    if wanted is not None and max(wanted) * page <= len(available):
        return {}
    ours = _empty_trace()
    numbers = _schema_page_numbers(ours[:page])
    parts = (_SCHEMA_COOKIE, slice(HEADER_BYTES, page))
    alike = all(available[part] == ours[part] for part in parts)
    if wanted is None or wanted != numbers or not alike:
        return None
    pages = {number: ours[(number - 1) * page : number * page] for number in numbers}
    present = {number for number in pages if number * page <= len(available)}
    if any(available[(n - 1) * page : n * page] != pages[n] for n in present):
        return None
    return {number: data for number, data in pages.items() if number not in present}


@cache
def _empty_trace() -> bytes:
    """Return the bytes of an empty trace of this build."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.execute("BEGIN")
        for sql in schema.create_statements():
            db.execute(sql)
        db.execute("COMMIT")
        return db.serialize()


def _schema_page_numbers(first: bytes) -> list[int] | None:
    """Return the page numbers of the schema, from the first page; None if it is not readable."""
    if len(first) <= HEADER_BYTES + 12 or first[HEADER_BYTES] not in (_INTERIOR_PAGE, _LEAF_PAGE):
        return None
    if first[HEADER_BYTES] == _LEAF_PAGE:
        return [1]
    n_cells = _read_int(first, HEADER_BYTES + 3, 2)
    cells = (_read_int(first, HEADER_BYTES + 12 + 2 * index, 2) for index in range(n_cells))
    return [*(_read_int(first, cell, 4) for cell in cells), _read_int(first, HEADER_BYTES + 8, 4)]


def _read_int(page: bytes, start: int, size: int) -> int:
    return int.from_bytes(page[start : start + size], "big")
