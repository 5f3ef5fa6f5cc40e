"""Loading in a thread without ever falling behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Generic, TypeVar

W = TypeVar("W")
R = TypeVar("R")


class Loader(Generic[W, R]):
    """Loads the newest wish; wishes that come meanwhile replace each other.

    `wish` says what is wanted now (None: nothing), `load` runs in the pool, `take` in the
    interface's thread. So what is shown is at most one load old, and never waits for a queue.
    """

    def __init__(
        self,
        pool: Executor,
        wish: Callable[[], W | None],
        load: Callable[[W], R],
        take: Callable[[W, R], None],
    ) -> None:
        self._pool, self._wish, self._load, self._take = pool, wish, load, take
        self._wake = asyncio.Event()
        self._rest = asyncio.Event()
        self._rest.set()

    @property
    def busy(self) -> bool:
        """Whether something is still to be loaded."""
        return not self._rest.is_set()

    def want(self) -> None:
        """Load as soon as possible."""
        self._rest.clear()
        self._wake.set()

    async def rest(self) -> None:
        """Wait until all that is wanted is loaded and taken."""
        await self._rest.wait()

    async def run(self) -> None:
        """Load whenever something is wanted, for ever; the body of a worker."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            wish = self._wish()
            if wish is not None:
                result = await loop.run_in_executor(self._pool, self._load, wish)
                self._take(wish, result)
            if not self._wake.is_set():
                self._rest.set()
