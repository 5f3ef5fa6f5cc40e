"""D writes the segments that nobody declared to a file, with the borders that the user chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.traces import sample_trace
from support.tui import screen_text, settle, until
from support.undeclared import SECOND, THIRD, blocks, write
from textual.pilot import Pilot

from flexinspect.inputs.declarations import read_declaration
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.screens.dialogs import ChoiceDialog

ONE_EARLY = blocks([SECOND - 1, THIRD - 1], reader=THIRD - 1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def asked(pilot: Pilot[None]) -> bool:
    """Press D; return whether a dialog opened."""
    await settle(pilot)
    await pilot.press("D")
    app = pilot.app
    await until(pilot, lambda: isinstance(app.screen, ChoiceDialog) or app._notifications)
    return isinstance(app.screen, ChoiceDialog)


async def test_the_likeliest_choice_comes_first_and_is_written(here: Path) -> None:
    path = write(here / "run.flextrace", ONE_EARLY)
    async with InspectorApp(path).run_test(size=(100, 30)) as pilot:
        assert await asked(pilot)
        shown = screen_text(pilot.app)
        assert "Every border of the executed mask is 1 token before the beginning" in shown
        assert "moved by +1: What is the mon… | Name its curren…" in shown
        assert "as it ran: What is the mon… | tokens 8-14" in shown
        assert "moved by -1" not in shown
        await pilot.press("enter")
        await settle(pilot)
    declared = read_declaration(here / "run.toml")
    assert declared.segments[1] == ("Name its currency.", "paraphrase 2")


async def test_a_second_file_gets_a_number_and_escape_writes_none(here: Path) -> None:
    path = write(here / "run.flextrace", ONE_EARLY)
    (here / "run.toml").write_text("mine", "utf-8")
    async with InspectorApp(path).run_test(size=(100, 30)) as pilot:
        assert await asked(pilot)
        await pilot.press("escape")
        await settle(pilot)
        assert not (here / "run-2.toml").exists()
        assert await asked(pilot)
        await pilot.press("down", "enter")
        await settle(pilot)
    assert (here / "run.toml").read_text("utf-8") == "mine"
    assert read_declaration(here / "run-2.toml").segments[1][:2] == (SECOND - 1, THIRD - 1)


async def test_a_trace_with_a_declaration_has_nothing_to_declare(here: Path) -> None:
    path = sample_trace(here / "sample.flextrace")
    async with InspectorApp(path).run_test(size=(100, 30)) as pilot:
        assert not await asked(pilot)
        (note,) = pilot.app._notifications
        assert "were declared when it was recorded" in note.message
    assert not [*here.glob("*.toml")]


async def shown(pilot: Pilot[None], text: str) -> None:
    await until(pilot, lambda: text in screen_text(pilot.app).replace("Japan ?", "Japan?"))


async def test_one_border_can_be_moved_by_its_words(here: Path) -> None:
    path = write(here / "run.flextrace", blocks([SECOND - 1, THIRD], reader=THIRD))
    async with InspectorApp(path).run_test(size=(100, 40)) as pilot:
        assert await asked(pilot)
        await pilot.press("end", "enter")  # … move one border
        await shown(pilot, "8:  of Japan? | ↵Name its")
        await pilot.press("enter")
        await shown(pilot, "9:  Japan?↵ | Name its cur")
        await pilot.press(*["down"] * 5, "enter")
        await shown(pilot, "border 8 at 9: What is the mon… | Name its curren…")
        await pilot.press("home", "enter")
        await settle(pilot)
    assert read_declaration(here / "run.toml").segments[1] == ("Name its currency.", "paraphrase 2")
