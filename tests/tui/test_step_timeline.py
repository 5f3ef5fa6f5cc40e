"""The timeline above the panels: entropy per token, marks, clicks, drags and the replay."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from support.traces import sample_trace
from support.tui import press, screen_lines, settle, until
from textual import events

from flexinspect.drawing.text_lines import Pen
from flexinspect.drawing.theme import Theme
from flexinspect.panels.timeline import StepWindow
from flexinspect.records.finding import Severity
from flexinspect.trace import queries
from flexinspect.trace.file.connections import TraceConnections
from flexinspect.trace.reader import open_trace
from flexinspect.tui import step_timeline
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.step_timeline import StepTimeline, TimelineData, draw_steps


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


@pytest.mark.parametrize("depth", ["truecolor", "none"])
def test_steps_with_a_close_second_have_the_style_of_the_legend(depth: Any) -> None:
    theme = Theme(depth)
    window = StepWindow(0, 4, 3, 0, 3, 4)
    levels = {0: 0.1, 1: 0.5, 2: 0.5, 3: 0.9}
    strip = draw_steps(TimelineData(window, levels, {1, 2}, {2: ("✖", "bad")}), Pen(theme, 110))
    styles = [segment.style for segment in strip for _ in segment.text]
    close, plain = theme.style("warn"), theme.style("muted")
    assert close != plain
    assert strip.text.startswith("▁▁▁▁▅▅▅▅✖▅▅▅████  entropy · █ margin < 0.7 · ")
    assert strip.text.rstrip().endswith("┣ fork")
    assert styles[0] == plain
    assert styles[4] == styles[9] == styles[28] == close
    assert styles[8] == theme.style("bad")
    assert styles[12] == theme.style("cursor")


def test_the_legend_is_cut_between_its_parts() -> None:
    data = TimelineData(StepWindow(0, 4, 0, 0, 3, 4), {}, set(), {})
    texts = [draw_steps(data, Pen(Theme("none"), width)).text[16:].rstrip() for width in (24, 60)]
    assert texts == ["", "  entropy · █ margin < 0.7 · ✖▲● findings"]


async def test_a_small_margin_is_read_from_the_step(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE steps SET margin = 0.2 WHERE step = 2")
    async with InspectorApp(path).run_test(size=(110, 24)) as pilot:
        await settle(pilot)
        await until(pilot, lambda: "margin" in drawn(pilot.app))
        data = pilot.app.screen.query_one(StepTimeline)._data
        assert data is not None
        assert data.close == {2}


async def test_the_legend_of_a_training_names_no_entropy(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_timeline, "trace_kind", lambda source: "training")
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
        await pilot._post_mouse_events([events.MouseMove], StepTimeline, offset=(17, 0), button=1)
        await settle(pilot)
        assert app.screen.place.step == 4


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


async def test_a_step_further_looks_at_no_branch_whose_row_holds_an_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sqlite3.connect(path) as db:
        db.execute(
            "INSERT INTO branches SELECT generation, branch + 1, 0, 2, state, answer, stop_reason, "
            "started_at, ended_at, change FROM branches WHERE generation = 0 AND branch = 0"
        )
    db.close()
    statements: list[str] = []
    query = TraceConnections.query

    def counted(self: TraceConnections, sql: str, params: Any = ()) -> list[Any]:
        statements.append(sql)
        return query(self, sql, params)

    monkeypatch.setattr(TraceConnections, "query", counted)
    async with InspectorApp(path).run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await until(pilot, lambda: "┣" in drawn(pilot.app))
        statements.clear()
        await press(pilot, "right")
        assert statements
        assert not [sql for sql in statements if "branches" in sql]
