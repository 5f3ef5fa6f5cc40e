"""Our own service threads beside a debugger that holds the process."""

from __future__ import annotations

from threading import Thread


def keep_running_when_stopped(thread: Thread) -> Thread:
    """Let a thread run on while a debugger holds all others; give it before it is started.

    For threads whose use is to go on meanwhile: they write finished steps, or answer a viewer.
    """
    vars(thread).update(pydev_do_not_trace=True, is_pydev_daemon_thread=True)
    return thread
