"""An exhibit of the museum is solved when its fault was named, and not before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.traces import RUN, sample_trace
from support.tui import screen_text, settle, until

from flexinspect.core.keyboard import all_keys
from flexinspect.inputs.broken_run_catalog import BROKEN_RUNS, find_broken_run
from flexinspect.panels.panel_registry import panel_number
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.tui import saved_state
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.saved_state import load_state
from flexinspect.tui.screens.dialogs import ChoiceDialog
from flexinspect.tui.screens.exhibit_screen import N_CHOICES, fault_of, faults_to_choose

EXHIBIT = find_broken_run("decode-without-offset")


@pytest.mark.parametrize("run", BROKEN_RUNS, ids=lambda run: run.name)
def test_the_fault_is_one_of_several_different_choices(run: Any) -> None:
    choices = faults_to_choose(run)
    assert len(set(choices)) == len(choices) == N_CHOICES
    assert fault_of(run) in choices


def exhibit_trace(path: Path, name: str = EXHIBIT.name, *, repaired: bool = False) -> Path:
    exhibit = {"name": name, "repaired": repaired}
    TraceWriter.create(path, {**RUN, "exhibit": exhibit}).close()
    return path


async def answer(app: Any, pilot: Any, fault: str) -> str:
    """Choose a fault and return the message that follows."""
    await pilot.press("A")
    await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
    assert "What is the fault?" in screen_text(app)
    await pilot.press(*["down"] * faults_to_choose(EXHIBIT).index(fault), "enter")
    await until(pilot, lambda: len(app._notifications) > 0)
    return str(list(app._notifications)[-1].message)


async def test_only_the_right_fault_solves_an_exhibit(tmp_path: Path) -> None:
    app: Any = InspectorApp(exhibit_trace(tmp_path / "a.flextrace"))
    right = fault_of(EXHIBIT)
    wrong = next(fault for fault in faults_to_choose(EXHIBIT) if fault != right)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        message = await answer(app, pilot, wrong)
        assert message.startswith("That is not it: look at the mask panel (2) at step 1")
        assert load_state().solved_exhibits == ()
        app.clear_notifications()
        message = await answer(app, pilot, right)
        assert message == f"Right. {EXHIBIT.answer} 1 of {len(BROKEN_RUNS)} exhibits solved."
    assert load_state().solved_exhibits == (EXHIBIT.name,)


async def test_an_exhibit_opens_with_the_panel_of_its_answer_and_saves_no_layout(
    tmp_path: Path,
) -> None:
    mine = saved_state.Layout(("logits", "layers", "memory", "run"), 2)
    saved_state.save_layout("generation", mine)
    path = tmp_path / "a.flextrace"
    exhibit = next(run for run in BROKEN_RUNS if run.panel == "path")
    TraceWriter.create(path, {**RUN, "exhibit": {"name": exhibit.name}}).close()
    app: Any = InspectorApp(path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        names = [view.panel.name for view in app.screen.slots.views()]
        assert names == ["path", "mask", "logits"]
        await pilot.press("f3")
        await settle(pilot)
    assert saved_state.load_state().layouts == {"generation": mine}


@pytest.mark.parametrize("run", BROKEN_RUNS, ids=lambda run: run.name)
def test_the_panel_of_each_answer_has_a_key(run: Any) -> None:
    assert f"panel.show-{panel_number(run.panel)}" in {key.id for key in all_keys()}


@pytest.mark.parametrize("kind", ["no exhibit", "repaired"])
async def test_a_trace_without_a_fault_to_name_says_so(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    if kind == "repaired":
        exhibit_trace(path, repaired=True)
    else:
        sample_trace(path)
    app: Any = InspectorApp(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("A")
        await until(pilot, lambda: len(app._notifications) > 0)
        (note,) = app._notifications
        assert "no exhibit of the museum" in note.message


async def test_an_exhibit_of_another_version_is_named_in_a_message(tmp_path: Path) -> None:
    app: Any = InspectorApp(exhibit_trace(tmp_path / "a.flextrace", "renamed\x1b[2J"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("A")
        await until(pilot, lambda: len(app._notifications) > 0)
        (note,) = app._notifications
        assert note.message.startswith("The museum has no exhibit 'renamed\\x1b[2J'.\n")
