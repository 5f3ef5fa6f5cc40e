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
        next_request: Callable[[], W | None],
        load: Callable[[W], R],
        show: Callable[[W, R], None],
    ) -> None:
        self._pool, self._next_request, self._load, self._show = pool, next_request, load, show
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._preloaded: tuple[W, Future[R]] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be loaded."""
        return not self._idle.is_set()

    def request_load(self) -> None:
        """Load as soon as possible."""
        self._idle.clear()
        self._wake.set()

    def preload(self, request: W) -> None:
        """Load what will probably be wanted next; it is kept until something is wanted."""
        if not self.is_busy:
            self._cancel_preload()
            self._preloaded = request, self._pool.submit(self._load, request)

    async def wait_idle(self) -> None:
        """Wait until all that is wanted is loaded and taken."""
        await self._idle.wait()

    async def run(self) -> None:
        """Load whenever something is wanted, for ever; the body of a worker."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            request = self._next_request()
            if request is not None:
                self._show(request, await self._load_result(request))
            if not self._wake.is_set():
                self._idle.set()

    async def _load_result(self, request: W) -> R:
        if self._preloaded is not None and self._preloaded[0] == request:
            future = self._preloaded[1]
        else:
            self._cancel_preload()
            future = self._pool.submit(self._load, request)
        self._preloaded = None
        return future.result() if future.done() else await asyncio.wrap_future(future)

    def _cancel_preload(self) -> None:
        if self._preloaded is not None:
            self._preloaded[1].cancel()  # no effect on one that has begun
