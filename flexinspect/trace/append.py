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
from flexinspect.trace.owner import recording_pid
from flexinspect.trace.salvage import is_repaired_copy

APPEND_BUSY_S = 5.0
"""How long to wait for another program that adds something at the same time."""


@dataclass(frozen=True, slots=True)
class RuleReview:
    """What one rule said of one generation afterwards; `at` in seconds since the epoch."""

    rule: str
    generation: int
    findings: tuple[Finding, ...]
    events: tuple[EventRecord, ...]
    at: float
    wall_ms: float


def append_reviews(path: Path, reviews: Sequence[RuleReview]) -> None:
    """Write findings and events, and that these rules have looked, in one transaction.

    What another program has written meanwhile for the same rule and generation counts, and is not
    written twice. Raises `TraceWriteError`, with nothing written, when the trace is being recorded
    or cannot be written to; `TraceError` when it is no trace.
    """
    check_header(path)
    if is_repaired_copy(path):
        raise _append_error(path, "it is a mended copy of a damaged trace")
    pid = recording_pid(path)
    if pid is not None:
        raise _append_error(path, f"process {pid} is recording it")
    if not os.access(path, os.W_OK):
        raise _append_error(path, "it is read-only")
    try:
        uri = f"{path.absolute().as_uri()}?mode=rw"
        with closing(
            sqlite3.connect(uri, uri=True, timeout=APPEND_BUSY_S, isolation_level=None)
        ) as db:
            _write_reviews(db, reviews)
    except sqlite3.Error as error:
        raise _append_error(path, _append_error_reason(error)) from error


def _write_reviews(db: sqlite3.Connection, reviews: Iterable[RuleReview]) -> None:
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("BEGIN IMMEDIATE")
    try:
        done = set(db.execute("SELECT rule, generation FROM reviews"))
        for key, parts in review_statements(reviews).items():
            for sql, params in () if key in done else parts:
                db.execute(sql, params)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def review_statements(reviews: Iterable[RuleReview]) -> dict[ReviewKey, list[Statement]]:
    """Return by rule and generation what writes these reviews."""
    out: dict[ReviewKey, list[Statement]] = {}
    for one in reviews:
        parts = out[one.rule, one.generation] = []
        encode.encode_findings(parts, one.findings)
        encode.encode_events(parts, one.events)
        parts.append(encode.encode_review(one.rule, one.generation, one.at, one.wall_ms))
    return out


def _append_error(path: Path, why: str) -> TraceWriteError:
    return TraceWriteError(
        f"What was found is not stored in {path}: {why}.",
        hint="The findings are complete; looking for them again takes a moment each time.",
    )


def _append_error_reason(error: sqlite3.Error) -> str:
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith("SQLITE_FULL"):
        return "the disk is full"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return "it is read-only"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "another program holds it locked"
    return "".join(char if char.isprintable() else "?" for char in str(error))


def add_run_facts(path: Path, facts: Mapping[str, Any], event: EventRecord) -> None:
    """Add facts to the manifest of a trace that is finished, and an event that tells of them.

    Raises `sqlite3.Error`: only for a trace that was made a moment ago.
    """
    out = encode.encode_run_facts(facts)
    encode.encode_events(out, (event,))
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        for sql, params in out:
            db.execute(sql, params)
        db.execute("COMMIT")
