"""Cores of this process, threads that run on at a debugger stop, switches that threads share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Thread


def available_cores() -> int:
    """Return the number of cores that this process may run on; a container may limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def background_thread(name: str, target: Callable[..., object], *args: object) -> Thread:
    """Return a daemon thread, not started, that continues to work at debugger stops."""
    thread = Thread(target=target, name=name, args=args, daemon=True)
    # pydevd, the core of debugpy, reads these two attributes.
    vars(thread).update(pydev_do_not_trace=True, is_pydev_daemon_thread=True)
    return thread


class SharedSwitch:
    """On while a thread is in a block of `on`: the last one calls what `turn_on` has returned."""

    def __init__(self, turn_on: Callable[[], Callable[[], object]]) -> None:
        self._turn_on, self._lock, self._n_users = turn_on, Lock(), 0
        self._turn_off: Callable[[], object] = lambda: None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Context manager in which it is on."""
        with self._lock:
            if not self._n_users:
                self._turn_off = self._turn_on()
            self._n_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_users -= 1
                if not self._n_users:
                    self._turn_off()
