"""Loading in threads: the newest request wins, and preloaded data is not loaded twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from support.tui import screen_lines, settle

from flexinspect.panels.base import TracePlace
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.panel_view import Loader
from flexinspect.tui.screens.trace_screen import clamp_place, extrapolate_place
from flexinspect.tui.trace_session import RunStatus


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


def test_the_next_place_continues_in_the_same_direction() -> None:
    assert extrapolate_place(TracePlace(step=3), TracePlace(step=4)) == TracePlace(step=5)
    assert extrapolate_place(
        TracePlace(step=14, layer=2), TracePlace(step=4, layer=2)
    ) == TracePlace(step=-6, layer=2)
    assert extrapolate_place(TracePlace(layer=1), TracePlace(layer=2)) == TracePlace(layer=3)
    assert extrapolate_place(TracePlace(generation=0), TracePlace(generation=1)) is None


async def test_a_second_step_in_one_direction_loads_only_ahead(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: Any = InspectorApp(trace)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        for _ in range(2):
            await pilot.press("right")
            await settle(pilot)
        app.screen._preload_next()  # a frame that is late, on a busy machine, does without
        submitted: list[Any] = []
        submit = ThreadPoolExecutor.submit

        def watched(pool: Any, load: Any, request: Any) -> Any:
            submitted.append(request)
            return submit(pool, load, request)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", watched)
        await pilot.press("right")
        await settle(pilot)
        assert "token 4 of 6" in screen_lines(app)[0]
        places = [
            request[0] if isinstance(request[0], TracePlace) else request[1].place
            for request in submitted
        ]
        assert {place.step for place in places} <= {4}


async def test_a_complete_frame_loads_the_next_place(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A frame that is late, on a busy machine, does without.
    monkeypatch.setattr("flexinspect.tui.screens.trace_screen.FRAME_S", 60.0)
    app: Any = InspectorApp(trace)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        loader = app.screen.slots.views()[0].loader
        await pilot.press("right")
        for _ in range(500):
            await pilot.pause(0.01)
            if loader._preloaded is not None:
                break
        assert loader._preloaded[0][1].place.step == 2


async def test_preloaded_data_is_dropped_when_the_trace_grows(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        screen: Any = app.screen
        await pilot.press("right")
        await settle(pilot)
        view = screen.slots.views()[0]
        screen._preload_next()
        assert view.loader._preloaded[0][2] == screen.version
        screen.version += 1
        await settle(pilot)
        assert view.loader._preloaded is None


def test_without_a_step_places_are_limited_to_the_first() -> None:
    assert clamp_place(TracePlace(step=-1), RunStatus()).step == 0
    assert clamp_place(TracePlace(step=-1), RunStatus(first_step=2, last_step=4)).step == 2
