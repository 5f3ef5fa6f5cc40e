"""Going from finding to finding, and reading all of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.traces import RUN, SEGMENTS, sample_generation, sample_step, sample_trace
from support.tui import place, press, screen_lines, screen_text, settle, until

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import GenerationEnd
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.screens.text_screens import TextScreen

SMALL = (80, 24)


async def test_n_goes_to_the_finding_and_its_layer(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        await until(pilot, lambda: screen_lines(app)[4].startswith("✖ "))
        assert "1 error" in screen_lines(app)[7]
        await press(pilot, "n")
        assert (place(app).step, place(app).layer) == (3, 2)
        await press(pilot, "backspace")
        assert (place(app).step, place(app).layer) == (0, 0)
        await press(pilot, "home", "N")
        assert place(app).step == 3


async def test_n_in_the_window_of_a_finding_reads_the_next_one(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "sample.flextrace")
    async with InspectorApp(path).run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.press("n", "i")
        await until(pilot, lambda: isinstance(pilot.app.screen, TextScreen))
        await settle(pilot)
        first = screen_text(pilot.app)
        await pilot.press("n")
        await settle(pilot)
        assert isinstance(pilot.app.screen, TextScreen)
        assert "Error: " in first or "Warning: " in first


async def test_going_to_a_finding_brings_the_panel_that_shows_it(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "sample.flextrace")
    app = InspectorApp(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("8", "x")  # the findings alone
        await settle(pilot)
        await pilot.press("n")
        await settle(pilot)
        names = [view.panel.name for view in app.screen.slots.views()]  # type: ignore[attr-defined]
        assert "layers" in names
        assert "findings" in names


async def test_n_at_the_only_finding_says_that_there_is_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run.flextrace"
    with TraceWriter.create(path, RUN) as writer:
        writer.begin_generation(sample_generation(0))
        writer.write_step(sample_step(0))
        writer.write_findings([Finding("mask.leak", Severity.ERROR, "A leak.", step=0)])
        writer.end_generation(GenerationEnd(0, "finished", "", SEGMENTS, "eos"))
    app = InspectorApp(path)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        await press(pilot, "n")
        only = "There is no other finding in this trace."
        assert only not in [text for _, text in app.messages()]
        await press(pilot, "n")
        assert app.messages()[0][1] == only


@pytest.mark.parametrize("key", ["n", "N"])
async def test_the_first_finding_to_go_to_is_the_worst_even_if_typed_ahead(
    key: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.flextrace"
    with TraceWriter.create(path, RUN) as writer:
        writer.begin_generation(sample_generation(0))
        for step in range(2):
            writer.write_step(sample_step(step))
        note = Finding("mask.leak", Severity.NOTE, "A cell leaks.", step=0, positions=(2,))
        error = Finding("segments.shifted", Severity.ERROR, "Borders.", step=1, positions=(2,))
        writer.write_findings([note, error])
        writer.end_generation(GenerationEnd(0, "finished", "", SEGMENTS, "eos"))
    app: Any = InspectorApp(path)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press(key)
        await settle(pilot)
        assert app.screen.findings.last.finding.severity is Severity.ERROR
