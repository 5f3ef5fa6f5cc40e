"""A new trace on its way to a writer, and the words for a disk that takes no more of it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexinspect.errors import TraceWriteError
from flexinspect.trace import encode, schema

WAL_LIMIT_PAGES = 16_384
"""Pages (64 MiB) of WAL after which a commit folds them into the file, in the middle of a run."""

WRITE_BUSY_S = 10.0
"""How long a commit waits for another program that holds the file."""


def create_trace(path: Path, run: Mapping[str, Any]) -> sqlite3.Connection:
    """Open the empty file `path` as a trace with the manifest `run`.

    Raises `TraceWriteError`, with the file removed, when that cannot be.
    """
    if sqlite3.sqlite_version_info < (3, 37):
        raise TraceWriteError(
            f"This Python has SQLite {sqlite3.sqlite_version}; a trace needs 3.37 or newer.",
            hint="Use a Python of 2022 or later.",
        )
    db = None
    try:
        db = sqlite3.connect(
            f"{path.as_uri()}?mode=rw",
            uri=True,
            timeout=WRITE_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=512,
        )
        _create_tables(db, run)
    except sqlite3.Error as error:
        if db is not None:
            db.close()
        with suppress(OSError):
            path.unlink()
        raise creation_error(path, error) from error
    return db


def _create_tables(db: sqlite3.Connection, run: Mapping[str, Any]) -> None:
    # Without a journal: nothing is lost if this fails, and the file itself (not only its WAL) says
    # from the first moment what it is.
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("PRAGMA synchronous = OFF")
    db.execute("BEGIN")
    for sql in schema.create_statements():
        db.execute(sql)
    for sql, params in encode.encode_run_facts(run):
        db.execute(sql, params)
    db.execute("COMMIT")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute(f"PRAGMA wal_autocheckpoint = {WAL_LIMIT_PAGES}")


def recording_error(path: Path, what: str, error: sqlite3.Error) -> TraceWriteError:
    """Return the sentence for an error of SQLite that ends a recording at `what`."""
    reason, remedy = _recording_error_reason(error)
    kept = "Everything recorded so far stays readable; the generation itself goes on."
    hint = f"{kept} {remedy}".rstrip()
    return TraceWriteError(f"Recording to {path} stopped at {what}: {reason}.", hint=hint)


def creation_error(path: Path, error: sqlite3.Error) -> TraceWriteError:
    """Return the sentence for an error of SQLite at the first write: then nothing is run either."""
    reason, remedy = _recording_error_reason(error)
    return TraceWriteError(f"The trace {path} cannot be begun: {reason}.", hint=remedy or None)


def _recording_error_reason(error: sqlite3.Error) -> tuple[str, str]:
    """Return what went wrong, and what may be done about it (empty when nobody knows)."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith("SQLITE_FULL"):
        return "the disk is full", "Free some space, or choose another disk with --out."
    if name.startswith("SQLITE_READONLY"):
        return "it has become read-only", ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        said = "another program holds it locked"
        return said, "Close the program that has it open for writing."
    if name.startswith("SQLITE_IOERR"):
        return f"the disk reports an error ({error})", "Check the disk and the space left on it."
    return str(error), ""
