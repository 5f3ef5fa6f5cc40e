"""This machine and this installation: processes that live, and the data that the package ships."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGE_DATA = Path(__file__).parent / "data"
"""The files that the package ships: the demo model, architectures."""


def is_recorder_alive(run: Mapping[str, Any]) -> bool:
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
