"""Keys that change the place: steps, layers, heads, generations, and the replay."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.traces import LAYERS, RUN
from support.tui import place, press, screen_lines, settle

from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.tui import navigation
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.navigation import MAX_PLACES, Navigation, clamp_place
from flexinspect.tui.trace_session import RunStatus

SMALL = (80, 24)


async def test_arrows_step_forwards_and_backwards_and_stop_at_the_ends(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await press(pilot, "right", "l", "right")
        assert place(app).step == 3
        await press(pilot, "left", "h")
        assert place(app).step == 1
        await press(pilot, "end")
        assert place(app).step == 5
        await press(pilot, "right")
        assert place(app).step == 5
        await press(pilot, "home", "left")
        assert place(app).step == 0
        assert "token 1 of 6 (step 0, prefill)" in screen_lines(app)[0]


async def test_layers_and_heads_stay_within_the_model(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await press(pilot, *["down"] * (LAYERS + 2), "]", "]", "]")
        assert (place(app).layer, place(app).head) == (LAYERS - 1, 1)
        await press(pilot, "up", "[", "[")
        assert (place(app).layer, place(app).head) == (LAYERS - 2, 0)


async def test_keys_step_through_generations(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await press(pilot, "right", ">")
        assert place(app) == TracePlace(1, 0, 0)
        await press(pilot, ">")
        assert place(app).generation == 1
        await press(pilot, "<")
        assert place(app).generation == 0


async def test_the_replay_goes_on_to_the_last_step_and_stops(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(navigation, "REPLAY_S", 0.01)
    app: Any = InspectorApp(trace)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("P")
        for _ in range(200):
            await pilot.pause(0.02)
            if app.screen.replay.timer is None:
                break
        assert app.screen.place.step == 5
        await pilot.press("P", "P")
        assert app.screen.replay.timer is None


async def test_without_a_step_nothing_is_replayed(tmp_path: Path) -> None:
    TraceWriter.create(tmp_path / "empty.flextrace", RUN).close("failed")
    app: Any = InspectorApp(tmp_path / "empty.flextrace")
    async with app.run_test(size=SMALL) as pilot:
        await press(pilot, "P")
        assert app.screen.replay.timer is None
        assert "No step was recorded." in [note.message for note in app._notifications]


class FakeScreen:
    """A screen without a trace, whose place takes any value."""

    def __init__(self) -> None:
        self.place, self.following = TracePlace(), True
        self.messages: list[str] = []
        self.app = SimpleNamespace(notify=self.messages.append)


def test_the_last_jumps_are_undone_in_turn() -> None:
    screen: Any = FakeScreen()
    go = Navigation(screen)
    for step in range(1, MAX_PLACES + 3):
        go.jump(Navigate(step=step))
    go.jump(Navigate(step=step))  # to the same place
    undone = []
    for _ in range(MAX_PLACES):
        go.go_back()
        undone.append(screen.place.step)
    assert undone == [*range(MAX_PLACES + 1, 1, -1)]
    assert not screen.following
    go.go_back()
    assert screen.messages == ["There was no jump yet."]


def test_without_a_step_places_are_limited_to_the_first() -> None:
    assert clamp_place(TracePlace(step=-1), RunStatus()).step == 0
    assert clamp_place(TracePlace(step=-1), RunStatus(first_step=2, last_step=4)).step == 2
