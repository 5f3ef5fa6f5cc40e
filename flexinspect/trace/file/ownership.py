"""Which process records a trace, and how to close a trace whose process has died."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from flexinspect.core.environment import is_recorder_alive
from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord
from flexinspect.trace import codec
from flexinspect.trace.codec import from_json, to_json


def recording_pid(path: Path) -> int | None:
    """Return the id of the process that is recording a trace now, None when there is none."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            run = {key: from_json(value) for key, value in db.execute("SELECT key, value FROM run")}
    except (sqlite3.Error, ValueError, OSError):
        return None
    pid = run.get("pid")
    live = run.get("state") == "recording" and isinstance(pid, int) and is_recorder_alive(run)
    return pid if live else None


CLOSE_BUSY_MS = 500  # how long closing the trace of a dead process waits for another program
ExplainEnd = Callable[[int | None, int | None], tuple[EventRecord, Sequence[Finding]] | None]
"""Explains how a process ended, given the generation and step that were written last."""


def close_dead_trace(path: Path, reason: str, pid: int, explain: ExplainEnd | None = None) -> bool:
    """Mark the trace of a dead process as failed, and fold in its WAL.

    Only for a trace whose process `pid` is known to be dead. A trace that another process has put
    in its place, or that has ended, is left alone. The event and findings that `explain` returns
    are written with it. Returns whether this succeeded; if not, the trace is as readable as before.
    """
    with suppress(sqlite3.Error), closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"PRAGMA busy_timeout = {CLOSE_BUSY_MS}")
        db.execute("BEGIN IMMEDIATE")
        known = dict(db.execute("SELECT key, value FROM run WHERE key IN ('pid', 'state')"))
        if known != {"pid": to_json(pid), "state": to_json("recording")}:
            return False
        facts = {"ended_at": time.time(), "reason": reason}
        last_step = db.execute(_LAST_STEP_SQL).fetchone() or (None, None)
        event, findings = (explain(*last_step) if explain else None) or (None, ())
        statements = codec.encode_events([event] if event else []) + codec.encode_findings(findings)
        for sql, params in statements + codec.encode_trace_end("failed", facts):
            db.execute(sql, params)
        db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return bool(db.execute("PRAGMA journal_mode = DELETE").fetchone()[0] == "delete")
    return False


_LAST_STEP_SQL = (
    "SELECT generation, step FROM steps ORDER BY generation DESC, branch DESC, step DESC LIMIT 1"
)
