"""What panels read from: one trace, and what is worth keeping of it between two steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from flexinspect.trace.reader import TraceReader

T = TypeVar("T")

BUDGET = 96 << 20
"""Bytes that are kept in memory at most; the oldest goes first."""


class Source:
    """A trace and a store of what was made from it. Any thread may use it.

    Only what never changes may be kept under a key: a mask by its fingerprint, a finished step.
    """

    def __init__(self, reader: TraceReader) -> None:
        self.reader = reader
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}

    def keep(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return what is kept under `key`; make it if need be (once, whoever asks meanwhile).

        `size` tells its bytes; something larger than the whole budget is not kept.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]  # type: ignore[no-any-return]
            turn = self._making.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                if key in self._kept:
                    return self._kept[key][0]  # type: ignore[no-any-return]
            try:
                made = make()
                self._store(key, made, size(made))
                return made
            finally:
                with self._lock:
                    self._making.pop(key, None)

    def _store(self, key: Hashable, made: Any, n_bytes: int) -> None:
        if n_bytes > BUDGET:
            return
        with self._lock:
            self._kept[key] = (made, n_bytes)
            self._bytes += n_bytes
            while self._bytes > BUDGET:
                _, (_, gone) = self._kept.popitem(last=False)
                self._bytes -= gone
