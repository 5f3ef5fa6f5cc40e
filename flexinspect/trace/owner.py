"""Whose trace it is: whether the process that records it still lives."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from flexinspect.processes import is_recorder_alive
from flexinspect.trace.values import from_json


def recording_pid(path: Path) -> int | None:
    """Return the process that is recording a trace at this moment, None when nobody is."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            run = {key: from_json(value) for key, value in db.execute("SELECT key, value FROM run")}
    except (sqlite3.Error, ValueError, OSError):
        return None
    pid = run.get("pid")
    live = run.get("state") == "recording" and isinstance(pid, int) and is_recorder_alive(run)
    return pid if live else None
