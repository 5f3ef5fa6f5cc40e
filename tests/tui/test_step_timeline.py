"""The timeline above the panels: entropy per token, marks, clicks, drags and the replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.traces import sample_trace
from support.tui import screen_lines, settle, until

from flexinspect.records.finding import Severity
from flexinspect.trace import queries
from flexinspect.trace.reader import open_trace
from flexinspect.tui import step_timeline
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.screens import trace_screen
from flexinspect.tui.step_timeline import StepTimeline


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return sample_trace(tmp_path / "sample.flextrace")


def drawn(app: Any) -> str:
    return screen_lines(app)[app.screen.query_one(StepTimeline).region.y]


async def test_a_finding_marks_its_step_and_the_current_step_is_reversed(path: Path) -> None:
    async with InspectorApp(path).run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await until(pilot, lambda: "entropy" in drawn(pilot.app))
        line = drawn(pilot.app)
        assert line[12] == "✖"  # four columns per step, and the finding is in step 3
        assert line.count("✖") == 2  # one is in the legend
        (strip,) = pilot.app.screen.query_one(StepTimeline).strips
        first = next(iter(strip))
        assert first.style is not None
        assert first.style.reverse


async def test_the_legend_of_a_training_names_no_entropy(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_timeline, "is_training_trace", lambda source: True)
    async with InspectorApp(path).run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "✖▲● findings" in drawn(pilot.app))
        assert "entropy" not in drawn(pilot.app)
        assert "fork" not in drawn(pilot.app)


async def test_a_click_and_a_drag_go_to_a_step(path: Path) -> None:
    app: Any = InspectorApp(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.click(StepTimeline, offset=(9, 0))
        await settle(pilot)
        assert app.screen.place.step == 2
        await pilot.mouse_down(StepTimeline, offset=(9, 0))
        await pilot._post_mouse_events(
            [trace_screen.events.MouseMove], StepTimeline, offset=(17, 0), button=1
        )
        await settle(pilot)
        assert app.screen.place.step == 4


async def test_the_replay_goes_on_to_the_last_step_and_stops(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_screen, "REPLAY_S", 0.01)
    app: Any = InspectorApp(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("P")
        for _ in range(200):
            await pilot.pause(0.02)
            if app.screen._replay_timer is None:
                break
        assert app.screen.place.step == 5
        await pilot.press("P", "P")
        assert app.screen._replay_timer is None


async def test_a_small_window_and_a_single_step_have_no_timeline(
    path: Path, tmp_path: Path
) -> None:
    async with InspectorApp(path).run_test(size=(80, 16)) as pilot:
        await settle(pilot)
        assert not pilot.app.screen.query_one(StepTimeline).display
    short = sample_trace(tmp_path / "short.flextrace", steps=1)
    async with InspectorApp(short).run_test(size=(80, 30)) as pilot:
        await settle(pilot)
        assert not pilot.app.screen.query_one(StepTimeline).display


def test_the_steps_with_findings_have_the_worst_severity(path: Path) -> None:
    reader = open_trace(path)
    assert queries.finding_steps(reader, 0, 0, 6) == {3: Severity.ERROR}
    assert queries.finding_steps(reader, 1, 0, 6) == {}
    assert queries.finding_steps(reader, 0, 4, 6) == {}
