"""The card above the panels: the worst finding with its fix, or what was verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.traces import sample_trace
from support.tui import screen_lines, screen_text, settle, until
from support.undeclared import SECOND, THIRD, blocks, write
from textual.events import MouseScrollDown, MouseScrollUp
from textual.pilot import Pilot

from flexinspect.core.errors import TraceError
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.diagnosis_card import DiagnosisCard, card_height
from flexinspect.tui.screens.text_screens import TextScreen

ONE_EARLY = blocks([SECOND - 1, THIRD - 1], reader=THIRD - 1)


async def reviewed(pilot: Pilot[None], *texts: str) -> list[str]:
    """Wait until the card has the height of a finding and shows all texts; return its lines.

    A finding is drawn first in the lines that the card had before, with less of the text.
    """
    for _ in range(3000):
        await settle(pilot)
        card = pilot.app.screen.query_one(DiagnosisCard)
        lines = screen_lines(pilot.app)[card.region.y : card.region.bottom]
        shown = " ".join(" ".join(lines).split())
        is_laid_out = len(card.strips) == card.size.height == card_height(pilot.app.size.height)
        if is_laid_out and all(text in shown for text in texts):
            return lines
        await pilot.pause(0.02)
    raise AssertionError(lines)


@pytest.mark.usefixtures("with_review")
async def test_the_card_shows_the_finding_its_fix_and_the_cells_around_it(tmp_path: Path) -> None:
    path = write(tmp_path / "run.flextrace", ONE_EARLY)
    async with InspectorApp(path).run_test(size=(120, 40)) as pilot:
        lines = await reviewed(pilot, "1 token early", "i reads on", "·")
        assert lines[0].startswith("● ")
        assert any("Fix: " in line for line in lines)
        assert "i reads on" in lines[-1]
        assert "D declares the mask" in lines[-1]
        assert "■" in lines[2]
        assert "·" in lines[2]


@pytest.mark.usefixtures("with_review")
async def test_cells_that_cannot_be_read_leave_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TraceError("The trace is damaged.")

    monkeypatch.setattr("flexinspect.panels.mask.cells_around.load_cells_around", refuse)
    path = write(tmp_path / "run.flextrace", ONE_EARLY)
    async with InspectorApp(path).run_test(size=(120, 40)) as pilot:
        lines = await reviewed(pilot, "1 token early")
        assert any("Fix: " in line for line in lines)


@pytest.mark.usefixtures("with_review")
async def test_the_code_is_that_of_the_cell_that_a_suspect_border_closes(tmp_path: Path) -> None:
    path = write(tmp_path / "run.flextrace", ONE_EARLY)
    app: Any = InspectorApp(path)
    async with app.run_test(size=(120, 40)) as pilot:
        await reviewed(pilot, "1 token early")
        await pilot.press("y")
        await settle(pilot)
        (options,) = [v.options for v in app.screen.slots.views() if v.panel.name == "code"]
        assert (options.q, options.kv) == (SECOND - 1, SECOND - 2)


@pytest.mark.usefixtures("with_review")
async def test_the_first_line_has_the_cause_and_a_cut_text_ends_with_an_ellipsis(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "run.flextrace", ONE_EARLY)
    async with InspectorApp(path).run_test(size=(80, 24)) as pilot:
        sentence, *_, fix, keys = await reviewed(pilot, "there is more")
        assert "Every segment border is 1 token early, as if counted without the BOS" in sentence
        assert fix.rstrip().endswith("…")
        assert "there is more" in keys


@pytest.mark.usefixtures("with_review")
async def test_declared_segments_are_not_declared_again(tmp_path: Path) -> None:
    declared = {"segments": [{"label": "one", "start": 1, "stop": SECOND - 1}]}
    path = write(tmp_path / "run.flextrace", ONE_EARLY, declared=declared)
    async with InspectorApp(path).run_test(size=(120, 40)) as pilot:
        lines = await reviewed(pilot, "1 token early", "i reads on")
        assert "declare the mask beside the segments" in " ".join(lines)
        assert "D declares the mask" not in lines[-1]


@pytest.mark.usefixtures("with_review")
async def test_at_80x24_one_key_shows_the_whole_fix(tmp_path: Path) -> None:
    path = write(tmp_path / "run.flextrace", ONE_EARLY)
    async with InspectorApp(path).run_test(size=(80, 24)) as pilot:
        lines = await reviewed(pilot, "there is more")
        assert len(lines) == 4
        await pilot.press("i")
        await until(pilot, lambda: isinstance(pilot.app.screen, TextScreen))
        await settle(pilot)
        text = screen_text(pilot.app)
        assert "segments.suspect-border" in text
        assert "Fix: " in text
        assert "How to confirm: " in text
        await pilot.press("escape")
        assert not isinstance(pilot.app.screen, TextScreen)


@pytest.mark.usefixtures("with_review")
async def test_the_wheel_scrolls_the_card_to_the_end_of_the_fix_and_back(tmp_path: Path) -> None:
    path = write(tmp_path / "run.flextrace", ONE_EARLY)
    async with InspectorApp(path).run_test(size=(80, 24)) as pilot:
        first = await reviewed(pilot, "there is more")
        card = pilot.app.screen.query_one(DiagnosisCard)
        fix = card.finding.fix.split()[-3:] if card.finding is not None else []
        seen = []
        for _ in range(10):
            await pilot._post_mouse_events([MouseScrollDown], card)
            await settle(pilot)
            seen = screen_lines(pilot.app)[card.region.y : card.region.bottom]
        assert " ".join(fix) in " ".join(" ".join(seen).replace("┃", "").split())
        assert "there is more" not in seen[-1]
        for _ in range(10):
            await pilot._post_mouse_events([MouseScrollUp], card)
        await settle(pilot)
        assert screen_lines(pilot.app)[card.region.y : card.region.bottom] == first


async def test_without_findings_the_card_says_what_was_checked_and_what_was_not(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "run.flextrace", ONE_EARLY)
    async with InspectorApp(path).run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        text = " ".join(screen_text(pilot.app).split())
        assert "No findings are recorded in this trace." in text
        assert "No mask was declared, so the executed mask was not compared" in text


async def test_i_typed_ahead_of_the_first_frame_opens_the_finding(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "sample.flextrace")
    app: Any = InspectorApp(path)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("i")
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        assert not app._notifications


async def test_a_click_on_the_card_opens_the_finding(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "sample.flextrace")
    async with InspectorApp(path).run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.click(DiagnosisCard)
        await until(pilot, lambda: isinstance(pilot.app.screen, TextScreen))


def test_a_small_screen_keeps_its_lines_for_the_panels() -> None:
    assert [card_height(lines) for lines in (6, 12, 16, 24, 40, 55)] == [0, 1, 2, 4, 5, 6]


@pytest.mark.usefixtures("with_review")
async def test_segments_that_nobody_declared_are_named_in_the_strip(tmp_path: Path) -> None:
    path = write(tmp_path / "run.flextrace", ONE_EARLY)
    async with InspectorApp(path).run_test(size=(120, 40)) as pilot:
        assert "╵prompt" in screen_lines(pilot.app)[2] or not screen_lines(pilot.app)[2].strip()
        await reviewed(pilot, "1 token early")
        await settle(pilot)
        assert "╵What is the mon…?" in screen_lines(pilot.app)[2]
        assert "╵↵Name its curre…?" in screen_lines(pilot.app)[2]
