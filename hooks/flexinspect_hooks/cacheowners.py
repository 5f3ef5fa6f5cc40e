"""Which generation a cache was filled by, as two caches of one length look alike."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

MAX_CACHES = 256
"""Caches that are remembered; the one met longest ago is forgotten first."""


class CacheOwners:
    """Remembers, by identity, the last generation that fed each cache. Keeps none alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def owner_of(self, cache: Any) -> int | None:
        """Return the generation that fed this very cache last, None for one not met before."""
        found = self._known.get(id(cache))
        return found[1] if found is not None and found[0]() is cache else None

    def set_owner(self, cache: Any, generation: int) -> None:
        """Say that a forward of this generation fed a cache; what is no object of its own is not
        remembered."""
        if cache is None or isinstance(cache, tuple):
            return
        self._known.pop(id(cache), None)
        with suppress(TypeError):  # a class with slots may allow no such reference
            self._known[id(cache)] = (weakref.ref(cache), generation)
        if len(self._known) > MAX_CACHES:
            del self._known[next(iter(self._known))]
