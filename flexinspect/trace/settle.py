"""Ending a trace whose recording process is dead: one file again, and a state that says so."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from flexinspect.findings import Finding
from flexinspect.records import EventRecord
from flexinspect.trace import encode
from flexinspect.trace.encode import Statement
from flexinspect.trace.values import to_json

CLOSE_BUSY_MS = 500

ExplainEnd = Callable[[int | None, int | None], tuple[EventRecord, Sequence[Finding]] | None]
"""Says what became of a process, given generation and step that were written last."""


def close_dead_trace(path: Path, reason: str, pid: int, explain: ExplainEnd | None = None) -> bool:
    """Fold the WAL of a trace that nobody records any more and mark it as failed.

    Returns whether that was possible; the trace is as readable if it was not. Only for a trace
    whose process `pid` is known to be dead: one that another process has put in its place, or that
    was ended, is left alone. What `explain` says is written with it.
    """
    with suppress(sqlite3.Error), closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"PRAGMA busy_timeout = {CLOSE_BUSY_MS}")
        db.execute("BEGIN IMMEDIATE")
        known = dict(db.execute("SELECT key, value FROM run WHERE key IN ('pid', 'state')"))
        if known != {"pid": to_json(pid), "state": to_json("recording")}:
            return False
        facts = {"ended_at": time.time(), "reason": reason}
        for sql, params in (
            *_explanation_statements(db, explain),
            *encode.encode_trace_end("failed", facts),
        ):
            db.execute(sql, params)
        db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return bool(db.execute("PRAGMA journal_mode = DELETE").fetchone()[0] == "delete")
    return False


_LAST_STEP_SQL = (
    "SELECT generation, step FROM steps ORDER BY generation DESC, branch DESC, step DESC LIMIT 1"
)


def _explanation_statements(db: sqlite3.Connection, explain: ExplainEnd | None) -> list[Statement]:
    statements: list[Statement] = []
    if explain is None:
        return statements
    said = explain(*(db.execute(_LAST_STEP_SQL).fetchone() or (None, None)))
    if said is not None:
        event, findings = said
        encode.encode_events(statements, (event,))
        encode.encode_findings(statements, findings)
    return statements
