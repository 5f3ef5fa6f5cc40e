"""The data source of all panels: a trace reader and a cache of what was computed from it."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from msgspec import Struct
from msgspec.structs import astuple

from flexinspect.trace.reader import TraceReader

T = TypeVar("T")

CACHE_BYTES = 48 << 20
"""Maximum size of the cache; the least recently used value is dropped first."""


N_SAMPLED, N_NESTED = 32, 8
"""How many parts of a long sequence are measured to estimate the size of all; of one within it."""
_PLAIN = frozenset((int, float, bool, type(None)))


def estimate_bytes(value: Any, n_sampled: int = N_SAMPLED) -> int:
    """Estimate the memory of a value: that of its arrays, and 64 bytes for every other object."""
    if type(value) in _PLAIN:
        return 64
    if isinstance(value, str):
        return 64 + len(value)
    parts: Sequence[Any] = ()
    step = 1
    if isinstance(value, Struct):
        parts = astuple(value)  # any of its fields may be a large array
    elif isinstance(value, list | tuple | Mapping):
        parts = value if isinstance(value, list | tuple) else [*value.values()]
        step = max(len(parts) // n_sampled, 1)
    else:
        numpy = sys.modules.get("numpy")  # an array exists only once it is imported
        if numpy is not None and isinstance(value, numpy.ndarray):
            return 128 + int(value.nbytes)
    if not parts:
        return 64
    sample = parts[::step]
    return 64 + sum(estimate_bytes(part, N_NESTED) for part in sample) * len(parts) // len(sample)


class Source:
    """A trace reader with a cache, safe to use from any thread.

    Cache only values that never change: a mask by its fingerprint, a finished step.
    """

    def __init__(self, reader: TraceReader) -> None:
        self.reader = reader
        self._cache: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        # The locks of the keys that are being computed: each exists while a thread uses it.
        self._key_locks: WeakValueDictionary[Hashable, threading.Lock] = WeakValueDictionary()

    def get_or_create(
        self, key: Hashable, make: Callable[[], T], size: Callable[[T], int] | None = None
    ) -> T:
        """Return the cached value of `key`, or compute it with `make` and cache it.

        Threads that ask for the same key meanwhile wait for the one computation. `size` returns
        the bytes of a value, by default `estimate_bytes`; one larger than `CACHE_BYTES` is not
        cached.
        """
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key][0]  # type: ignore[no-any-return]
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        with key_lock:
            with self._lock:
                if key in self._cache:
                    return self._cache[key][0]  # type: ignore[no-any-return]
            value = make()
            self._store(key, value, (size or estimate_bytes)(value))
            return value

    def get_newest(self, key: Hashable, stamp: Hashable, make: Callable[[], T]) -> T:
        """Return the cached value of `key` with this stamp, or compute it in place of an older one.

        For values that change with the trace, of which only the newest is worth its memory.
        """
        with self._lock:
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        with key_lock:
            with self._lock:
                known = self._cache.get(key)
                if known is not None and known[0][0] == stamp:
                    self._cache.move_to_end(key)
                    return known[0][1]  # type: ignore[no-any-return]
            value = make()
            self._store(key, (stamp, value), estimate_bytes(value))
            return value

    def _store(self, key: Hashable, value: Any, n_bytes: int) -> None:
        if n_bytes > CACHE_BYTES:
            return
        with self._lock:
            _, old_bytes = self._cache.pop(key, (None, 0))
            self._cache[key] = (value, n_bytes)
            self._bytes += n_bytes - old_bytes
            while self._bytes > CACHE_BYTES:
                _, (_, dropped_bytes) = self._cache.popitem(last=False)
                self._bytes -= dropped_bytes
