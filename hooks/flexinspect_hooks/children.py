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


class ChildCount:
    """`n` children so far. `forked` is called in each forked child, before anything else there."""

    def __init__(self, forked: Callable[[], None]) -> None:
        self.n = 0
        self._is_over = False
        self._here = threading.local()
        self._forked = forked
        if hasattr(os, "register_at_fork"):
            # It cannot be taken back, so it does nothing once the count is over.
            os.register_at_fork(after_in_parent=self._fork, after_in_child=self._child)

    def _fork(self) -> None:
        if not self._is_over and not getattr(self._here, "starting", False):
            self.n += 1

    def _child(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._forked()

    def watch_multiprocessing(self) -> None:
        """Count what `multiprocessing` starts, in whatever way; call it when that is loaded."""
        cls: Any = sys.modules["multiprocessing.process"].BaseProcess
        original = self._original = cls.start

        @functools.wraps(original)
        def start(process: Any, /) -> None:
            self._here.starting = True
            try:
                original(process)
            finally:
                self._here.starting = False
            self.n += 1

        cls.start = start

    def end(self) -> None:
        """Stop counting and put everything back."""
        self._is_over = True
        loaded: Any = sys.modules.get("multiprocessing.process")
        if loaded is not None and hasattr(self, "_original"):
            loaded.BaseProcess.start = self._original
