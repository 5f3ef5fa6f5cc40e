"""`flexinspect tour` builds its run and opens it; the start screen offers it first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.interface_fixtures import own_state
from support.traces import sample_trace
from support.tui import screen_text, settle, until

from flexinspect.analysis import broken_run_check
from flexinspect.cli import interface
from flexinspect.cli.main import main
from flexinspect.inputs import broken_run_catalog
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.guided_tour import EXHIBIT, TourLine

__all__ = ["own_state"]


def test_the_run_of_the_tour_is_built_and_opened_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[str, Any] = {}
    built: list[str] = []
    monkeypatch.setattr(interface, "_has_terminal", lambda: True)
    monkeypatch.setattr(broken_run_catalog, "exhibit_path", lambda run: tmp_path / "x.flextrace")
    monkeypatch.setattr(
        broken_run_check, "build_exhibit", lambda run, path, on_stage: built.append(run.name)
    )

    def open_trace_file(trace: Path, place: Any, *, has_tour: bool) -> int:
        opened.update(trace=trace, place=place, has_tour=has_tour)
        return 0

    monkeypatch.setattr(interface, "open_trace_file", open_trace_file)
    assert main(["tour"]) == 0
    assert built == [EXHIBIT]
    assert opened == {"trace": tmp_path / "x.flextrace", "place": {"step": 0}, "has_tour": True}


def test_without_a_terminal_nothing_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tour"]) == 2
    err = capsys.readouterr().err
    assert "The interface needs a terminal" in err
    assert "flexinspect museum" in err


@pytest.mark.usefixtures("own_state")
async def test_a_first_start_highlights_the_tour_and_enter_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cache"
    folder.mkdir()
    trace = sample_trace(folder / "tour.flextrace")
    monkeypatch.setattr("flexinspect.tui.screens.exhibit_screen.exhibit_path", lambda run: trace)
    app: Any = InspectorApp()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        assert "Take the tour" in screen_text(app)
        await pilot.press("enter")
        await pilot.pause(0.3)
        await pilot.press("enter")  # in the window with its story
        await until(pilot, lambda: app.screen.query(TourLine))
        await settle(pilot)
        assert "1 of 7" in screen_text(app)
