"""Counting the processes that a program forks or starts with `multiprocessing`: nobody sees inside.

Commands that it runs with `subprocess` are not counted; few of them run models.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any


class ChildProcessCounter:
    """`n` children so far. `forked` is called in each forked child, before anything else there."""

    def __init__(self, on_fork: Callable[[], None]) -> None:
        self.n = 0
        self._is_over = False
        self._local = threading.local()
        self._on_fork = on_fork
        if hasattr(os, "register_at_fork"):
            # It cannot be taken back, so it does nothing once the count is over.
            os.register_at_fork(
                after_in_parent=self._after_fork_in_parent, after_in_child=self._after_fork_in_child
            )

    def _after_fork_in_parent(self) -> None:
        if not self._is_over and not getattr(self._local, "starting", False):
            self.n += 1

    def _after_fork_in_child(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_fork()

    def watch_multiprocessing(self) -> None:
        """Count what `multiprocessing` starts, in whatever way; call it when that is loaded."""
        cls: Any = sys.modules["multiprocessing.process"].BaseProcess
        original = self._original = cls.start

        @functools.wraps(original)
        def start(process: Any, /) -> None:
            self._local.starting = True
            try:
                original(process)
            finally:
                self._local.starting = False
            self.n += 1

        cls.start = start

    def end(self) -> None:
        """Stop counting and put everything back."""
        self._is_over = True
        loaded: Any = sys.modules.get("multiprocessing.process")
        if loaded is not None and hasattr(self, "_original"):
            loaded.BaseProcess.start = self._original
