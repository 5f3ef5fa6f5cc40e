"""Loading in threads: the newest wish wins, and what was expected is not loaded twice."""

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


class Desk:
    """A loader with a wish that the test sets, and a list of what was loaded and taken."""

    def __init__(self) -> None:
        self.wish = "a"
        self.loaded: list[str] = []
        self.taken: list[tuple[str, str]] = []
        self.gate = Event()
        self.gate.set()
        self.pool = ThreadPoolExecutor(1)
        self.loader = Loader(self.pool, lambda: self.wish, self._load, self._take)

    def _load(self, wish: str) -> str:
        self.gate.wait(10)
        self.loaded.append(wish)
        return wish.upper()

    def _take(self, wish: str, found: str) -> None:
        self.taken.append((wish, found))

    async def shows(self, wish: str) -> None:
        """Want something and wait until it is there."""
        self.wish = wish
        self.loader.request_load()
        await self.loader.wait_idle()


def at_desk(play: Callable[[Desk], Awaitable[None]]) -> Desk:
    """Run a play with a desk whose loader is running."""

    async def run() -> Desk:
        desk = Desk()
        task = asyncio.create_task(desk.loader.run())
        await play(desk)
        task.cancel()
        desk.pool.shutdown()
        return desk

    return asyncio.run(run())


def test_what_was_expected_is_taken_without_a_second_load() -> None:
    async def play(desk: Desk) -> None:
        await desk.shows("a")
        desk.loader.preload("b")
        await desk.shows("b")

    desk = at_desk(play)
    assert desk.loaded == ["a", "b"]
    assert desk.taken == [("a", "A"), ("b", "B")]


def test_what_was_expected_in_vain_is_never_taken() -> None:
    async def play(desk: Desk) -> None:
        await desk.shows("a")
        desk.loader.preload("b")
        await desk.shows("c")
        await desk.shows("b")

    assert [wish for wish, _ in at_desk(play).taken] == ["a", "c", "b"]


def test_wanting_what_is_being_loaded_ahead_waits_for_that_load() -> None:
    async def play(desk: Desk) -> None:
        await desk.shows("a")
        desk.gate.clear()
        desk.loader.preload("b")
        asyncio.get_running_loop().call_later(0.02, desk.gate.set)
        await desk.shows("b")

    desk = at_desk(play)
    assert desk.loaded == ["a", "b"]
    assert desk.taken[-1] == ("b", "B")


def test_nothing_is_expected_while_something_is_wanted() -> None:
    async def play(desk: Desk) -> None:
        desk.gate.clear()
        desk.wish = "a"
        desk.loader.request_load()
        desk.loader.preload("b")
        desk.gate.set()
        await desk.loader.wait_idle()

    assert at_desk(play).loaded == ["a"]


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

        def watched(pool: Any, load: Any, wish: Any) -> Any:
            submitted.append(wish)
            return submit(pool, load, wish)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", watched)
        await pilot.press("right")
        await settle(pilot)
        assert "step 3/5" in screen_lines(app)[0]
        places = [
            wish[0] if isinstance(wish[0], TracePlace) else wish[1].place for wish in submitted
        ]
        assert {place.step for place in places} <= {4}


async def test_what_is_ahead_is_forgotten_when_the_trace_grows(trace: Path) -> None:
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
