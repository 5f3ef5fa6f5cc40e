"""Adding what rules say to a trace that is no longer recorded: one transaction, whole or not."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexinspect.errors import TraceWriteError
from flexinspect.findings import Finding
from flexinspect.records import EventRecord
from flexinspect.trace import encode
from flexinspect.trace.connections import ReviewKey, check_header
from flexinspect.trace.encode import Statement
from flexinspect.trace.owner import recorded_by
from flexinspect.trace.salvage import is_copy

BUSY_S = 5.0
"""How long to wait for another program that adds something at the same time."""


@dataclass(frozen=True, slots=True)
class Reviewed:
    """What one rule said of one generation afterwards; `at` in seconds since the epoch."""

    rule: str
    generation: int
    findings: tuple[Finding, ...]
    events: tuple[EventRecord, ...]
    at: float
    wall_ms: float


def append(path: Path, reviewed: Sequence[Reviewed]) -> None:
    """Write findings and events, and that these rules have looked, in one transaction.

    What another program has written meanwhile for the same rule and generation counts, and is not
    written twice. Raises `TraceWriteError`, with nothing written, when the trace is being recorded
    or cannot be written to; `TraceError` when it is no trace.
    """
    check_header(path)
    if is_copy(path):
        raise _refusal(path, "it is a mended copy of a damaged trace")
    pid = recorded_by(path)
    if pid is not None:
        raise _refusal(path, f"process {pid} is recording it")
    if not os.access(path, os.W_OK):
        raise _refusal(path, "it is read-only")
    try:
        uri = f"{path.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)) as db:
            _transaction(db, reviewed)
    except sqlite3.Error as error:
        raise _refusal(path, _reason(error)) from error


def _transaction(db: sqlite3.Connection, reviewed: Iterable[Reviewed]) -> None:
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("BEGIN IMMEDIATE")
    try:
        done = set(db.execute("SELECT rule, generation FROM reviews"))
        for key, parts in statements(reviewed).items():
            for sql, params in () if key in done else parts:
                db.execute(sql, params)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def statements(reviewed: Iterable[Reviewed]) -> dict[ReviewKey, list[Statement]]:
    """Return by rule and generation what writes these reviews."""
    out: dict[ReviewKey, list[Statement]] = {}
    for one in reviewed:
        parts = out[one.rule, one.generation] = []
        encode.findings(parts, one.findings)
        encode.events(parts, one.events)
        parts.append(encode.review(one.rule, one.generation, one.at, one.wall_ms))
    return out


def _refusal(path: Path, why: str) -> TraceWriteError:
    return TraceWriteError(
        f"What was found is not stored in {path}: {why}.",
        hint="The findings are complete; looking for them again takes a moment each time.",
    )


def _reason(error: sqlite3.Error) -> str:
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith("SQLITE_FULL"):
        return "the disk is full"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return "it is read-only"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "another program holds it locked"
    return "".join(char if char.isprintable() else "?" for char in str(error))


def annotate(path: Path, facts: Mapping[str, Any], event: EventRecord) -> None:
    """Add facts to the manifest of a trace that is finished, and an event that tells of them.

    Raises `sqlite3.Error`: only for a trace that was made a moment ago.
    """
    out = encode.run(facts)
    encode.events(out, (event,))
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        for sql, params in out:
            db.execute(sql, params)
        db.execute("COMMIT")
