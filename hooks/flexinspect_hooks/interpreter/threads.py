"""How many cores this process may use."""

from __future__ import annotations

import os
from threading import Thread


def available_cores() -> int:
    """Return the cores that the scheduler gives us, which a container may have cut down."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_running_when_stopped(thread: Thread) -> Thread:
    """Let a thread run on while a debugger holds all others; give it before it is started.

    For threads whose use is to go on meanwhile: they write finished steps, or answer a viewer.
    """
    vars(thread).update(pydev_do_not_trace=True, is_pydev_daemon_thread=True)
    return thread
