"""What panels read from: one trace, and what is worth keeping of it between two steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from flexinspect.trace.reader import TraceReader

T = TypeVar("T")

CACHE_BYTES = 96 << 20
"""Bytes that are kept in memory at most; the oldest goes first."""


class _KeyLock:
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
        self._cache: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._key_locks: dict[Hashable, _KeyLock] = {}

    def get_or_create(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return what is kept under `key`; make it if need be (once, whoever asks meanwhile).

        `size` tells its bytes; something larger than the whole budget is not kept.
        """
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key][0]  # type: ignore[no-any-return]
        with self._lock_key(key):
            with self._lock:
                if key in self._cache:
                    return self._cache[key][0]  # type: ignore[no-any-return]
            made = make()
            self._store(key, made, size(made))
            return made

    @contextmanager
    def _lock_key(self, key: Hashable) -> Iterator[None]:
        """Hold the lock of a key, which is forgotten with the last who wants it."""
        with self._lock:
            turn = self._key_locks.setdefault(key, _KeyLock())
            turn.n_users += 1
        try:
            with turn.lock:
                yield
        finally:
            with self._lock:
                turn.n_users -= 1
                if not turn.n_users:
                    del self._key_locks[key]

    def _store(self, key: Hashable, value: Any, n_bytes: int) -> None:
        if n_bytes > CACHE_BYTES:
            return
        with self._lock:
            _, old = self._cache.pop(key, (None, 0))
            self._cache[key] = (value, n_bytes)
            self._bytes += n_bytes - old
            while self._bytes > CACHE_BYTES:
                _, (_, gone) = self._cache.popitem(last=False)
                self._bytes -= gone
