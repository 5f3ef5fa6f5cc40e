"""How many cores this process may use, and threads that keep running at a debugger stop."""

from __future__ import annotations

import os
from threading import Thread


def available_cores() -> int:
    """Return the number of cores that this process may run on; a container may limit it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_running_when_stopped(thread: Thread) -> Thread:
    """Exempt a thread from debugger stops, before it is started; return the thread.

    For threads that have to work while the others are stopped: they write finished steps or answer
    a viewer. pydevd, the core of debugpy, reads these two attributes.
    """
    vars(thread).update(pydev_do_not_trace=True, is_pydev_daemon_thread=True)
    return thread
