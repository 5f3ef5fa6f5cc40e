"""Loading in threads: the newest request wins, and preloaded data is not loaded twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from flexinspect.tui.panel_view import Loader


class LoaderBench:
    """A loader with a request that the test sets, and a list of what was loaded and taken."""

    def __init__(self) -> None:
        self.request = "a"
        self.loaded: list[str] = []
        self.taken: list[tuple[str, str]] = []
        self.may_load = Event()
        self.may_load.set()
        self.pool = ThreadPoolExecutor(1)
        self.loader = Loader(self.pool, lambda: self.request, self._load, self._take)

    def _load(self, request: str) -> str:
        self.may_load.wait(10)
        self.loaded.append(request)
        return request.upper()

    def _take(self, request: str, found: str) -> None:
        self.taken.append((request, found))

    async def shows(self, request: str) -> None:
        """Request something and wait until it is loaded."""
        self.request = request
        self.loader.request_load()
        await self.loader.wait_idle()


def with_loader(scenario: Callable[[LoaderBench], Awaitable[None]]) -> LoaderBench:
    """Run a scenario with a running loader."""

    async def run() -> LoaderBench:
        bench = LoaderBench()
        task = asyncio.create_task(bench.loader.run())
        await scenario(bench)
        task.cancel()
        bench.pool.shutdown()
        return bench

    return asyncio.run(run())


def test_a_preload_is_taken_without_a_second_load() -> None:
    async def scenario(bench: LoaderBench) -> None:
        await bench.shows("a")
        bench.loader.preload("b")
        await bench.shows("b")

    bench = with_loader(scenario)
    assert bench.loaded == ["a", "b"]
    assert bench.taken == [("a", "A"), ("b", "B")]


def test_an_unused_preload_is_never_taken() -> None:
    async def scenario(bench: LoaderBench) -> None:
        await bench.shows("a")
        bench.loader.preload("b")
        await bench.shows("c")
        await bench.shows("b")

    assert [request for request, _ in with_loader(scenario).taken] == ["a", "c", "b"]


def test_requesting_what_is_being_preloaded_waits_for_that_load() -> None:
    async def scenario(bench: LoaderBench) -> None:
        await bench.shows("a")
        bench.may_load.clear()
        bench.loader.preload("b")
        asyncio.get_running_loop().call_later(0.02, bench.may_load.set)
        await bench.shows("b")

    bench = with_loader(scenario)
    assert bench.loaded == ["a", "b"]
    assert bench.taken[-1] == ("b", "B")


def test_nothing_is_preloaded_while_a_request_waits() -> None:
    async def scenario(bench: LoaderBench) -> None:
        bench.may_load.clear()
        bench.request = "a"
        bench.loader.request_load()
        bench.loader.preload("b")
        bench.may_load.set()
        await bench.loader.wait_idle()

    assert with_loader(scenario).loaded == ["a"]
