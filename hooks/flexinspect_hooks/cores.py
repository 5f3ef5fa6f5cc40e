"""How many cores this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return the cores that the scheduler gives us, which a container may have cut down."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
