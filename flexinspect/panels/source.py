"""What panels read from: one trace, and what is worth keeping of it between two steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from flexinspect.trace.reader import TraceReader

T = TypeVar("T")

BUDGET = 96 << 20
"""Bytes that are kept in memory at most; the oldest goes first."""


class _Turn:
    """A key that is being made, and how many are making it or wait for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.n_users = 0


class Source:
    """A trace and a store of what was made from it. Any thread may use it.

    Only what never changes may be kept under a key: a mask by its fingerprint, a finished step.
    """

    def __init__(self, reader: TraceReader) -> None:
        self.reader = reader
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._making: dict[Hashable, _Turn] = {}

    def keep(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return what is kept under `key`; make it if need be (once, whoever asks meanwhile).

        `size` tells its bytes; something larger than the whole budget is not kept.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]  # type: ignore[no-any-return]
        with self._turn(key):
            with self._lock:
                if key in self._kept:
                    return self._kept[key][0]  # type: ignore[no-any-return]
            made = make()
            self._store(key, made, size(made))
            return made

    @contextmanager
    def _turn(self, key: Hashable) -> Iterator[None]:
        """Hold the lock of a key, which is forgotten with the last who wants it."""
        with self._lock:
            turn = self._making.setdefault(key, _Turn())
            turn.n_users += 1
        try:
            with turn.lock:
                yield
        finally:
            with self._lock:
                turn.n_users -= 1
                if not turn.n_users:
                    del self._making[key]

    def _store(self, key: Hashable, made: Any, n_bytes: int) -> None:
        if n_bytes > BUDGET:
            return
        with self._lock:
            _, old = self._kept.pop(key, (None, 0))
            self._kept[key] = (made, n_bytes)
            self._bytes += n_bytes - old
            while self._bytes > BUDGET:
                _, (_, gone) = self._kept.popitem(last=False)
                self._bytes -= gone
