"""A new place is painted once, and the place that follows is loaded ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tui import screen_lines, settle

from flexinspect.panels.base import TracePlace
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.load_threads import LoadThreads
from flexinspect.tui.place_frames import PlaceFrames, extrapolate_place, next_place
from flexinspect.tui.trace_session import RunStatus


def test_the_next_place_continues_in_the_same_direction() -> None:
    assert extrapolate_place(TracePlace(step=3), TracePlace(step=4)) == TracePlace(step=5)
    assert extrapolate_place(
        TracePlace(step=14, layer=2), TracePlace(step=4, layer=2)
    ) == TracePlace(step=-6, layer=2)
    assert extrapolate_place(TracePlace(layer=1), TracePlace(layer=2)) == TracePlace(layer=3)
    assert extrapolate_place(TracePlace(generation=0), TracePlace(generation=1)) is None


def test_no_place_is_loaded_ahead_at_the_end_or_in_a_live_trace() -> None:
    old, new, last = (TracePlace(step=step) for step in (3, 4, 5))
    finished = RunStatus("finished", last_step=5)
    assert next_place(old, new, finished) == last
    assert next_place(new, last, finished) is None
    assert next_place(old, new, RunStatus("recording", last_step=5)) is None


async def test_a_second_step_in_one_direction_loads_only_ahead(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: Any = InspectorApp(trace)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        for _ in range(2):
            await pilot.press("right")
            await settle(pilot)
        app.screen.frames.load_next()  # a frame that is late, on a busy machine, does without
        submitted: list[Any] = []
        submit = LoadThreads.submit

        def watched(pool: Any, load: Any, request: Any) -> Any:
            submitted.append(request)
            return submit(pool, load, request)

        monkeypatch.setattr(LoadThreads, "submit", watched)
        await pilot.press("right")
        await settle(pilot)
        assert "token 4 of 6" in screen_lines(app)[0]
        places = [
            request[0] if isinstance(request[0], TracePlace) else request[1].place
            for request in submitted
            if isinstance(request, tuple)  # else the search for rules that have not run
        ]
        assert {place.step for place in places} <= {4}


async def test_a_complete_frame_loads_the_next_place(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A frame that is late, on a busy machine, does without.
    defaults: Any = PlaceFrames.show.__kwdefaults__  # where `FRAME_S` was read once
    monkeypatch.setitem(defaults, "within_s", 60.0)
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
        screen.frames.load_next()
        assert view.loader._preloaded[0][2] == screen.version
        screen.version += 1
        await settle(pilot)
        assert view.loader._preloaded is None
