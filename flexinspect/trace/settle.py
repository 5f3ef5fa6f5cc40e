"""Ending a trace whose recording process is dead: one file again, and a state that says so."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

from flexinspect.trace import encode
from flexinspect.trace.values import to_json

BUSY_MS = 500


def settle(path: Path, reason: str, pid: int) -> bool:
    """Fold the WAL of a trace that nobody records any more and mark it as failed.

    Returns whether that was possible; the trace is as readable if it was not. Only for a trace
    whose process `pid` is known to be dead: one that another process has put in its place, or that
    was ended, is left alone.
    """
    with suppress(sqlite3.Error), closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        db.execute("BEGIN IMMEDIATE")
        known = dict(db.execute("SELECT key, value FROM run WHERE key IN ('pid', 'state')"))
        if known != {"pid": to_json(pid), "state": to_json("recording")}:
            return False
        facts = {"ended_at": time.time(), "reason": reason}
        for sql, params in encode.close("failed", facts):
            db.execute(sql, params)
        db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return bool(db.execute("PRAGMA journal_mode = DELETE").fetchone()[0] == "delete")
    return False
