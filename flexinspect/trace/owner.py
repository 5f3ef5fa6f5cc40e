"""Whose trace it is: whether the process that records it still lives."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from flexinspect.trace.values import from_json


def recorder_lives(run: Mapping[str, Any]) -> bool:
    """Tell from a manifest whether its process still runs, on this machine; True when unknown.

    A process number that was given to another process since then does not count.
    """
    pid, started = run.get("pid"), run.get("started_at")
    if not isinstance(pid, int) or not 0 < pid < 1 << 31 or not isinstance(started, (int, float)):
        return True
    if pid == os.getpid():
        return True
    import psutil

    try:
        process = psutil.Process(pid)
        gone = process.status() == psutil.STATUS_ZOMBIE
        return not gone and bool(process.create_time() <= started + 1)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def recorded_by(path: Path) -> int | None:
    """Return the process that is recording a trace at this moment, None when nobody is."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            run = {key: from_json(value) for key, value in db.execute("SELECT key, value FROM run")}
    except (sqlite3.Error, ValueError, OSError):
        return None
    pid = run.get("pid")
    live = run.get("state") == "recording" and isinstance(pid, int) and recorder_lives(run)
    return pid if live else None
