"""Loading in a thread without ever falling behind, and one step ahead where there is time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

W = TypeVar("W")
R = TypeVar("R")


class Loader(Generic[W, R]):
    """Loads the newest wish; wishes that come meanwhile replace each other.

    `wish` says what is wanted now (None: nothing), `load` runs in the pool, `take` in the
    interface's thread. So what is shown is at most one load old, and never waits for a queue.
    What will probably be wanted next can be loaded before it is (`expect`).
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
        self._expected: tuple[W, Future[R]] | None = None

    @property
    def busy(self) -> bool:
        """Whether something is still to be loaded."""
        return not self._rest.is_set()

    def want(self) -> None:
        """Load as soon as possible."""
        self._rest.clear()
        self._wake.set()

    def expect(self, wish: W) -> None:
        """Load what will probably be wanted next; it is kept until something is wanted."""
        if not self.busy:
            self._cancel()
            self._expected = wish, self._pool.submit(self._load, wish)

    async def rest(self) -> None:
        """Wait until all that is wanted is loaded and taken."""
        await self._rest.wait()

    async def run(self) -> None:
        """Load whenever something is wanted, for ever; the body of a worker."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            wish = self._wish()
            if wish is not None:
                self._take(wish, await self._loaded(wish))
            if not self._wake.is_set():
                self._rest.set()

    async def _loaded(self, wish: W) -> R:
        if self._expected is not None and self._expected[0] == wish:
            future = self._expected[1]
        else:
            self._cancel()
            future = self._pool.submit(self._load, wish)
        self._expected = None
        return future.result() if future.done() else await asyncio.wrap_future(future)

    def _cancel(self) -> None:
        if self._expected is not None:
            self._expected[1].cancel()  # no effect on one that has begun
