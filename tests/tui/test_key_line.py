"""The last line has the keys that help in the state of the run and in the focused panel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.traces import RUN, sample_trace
from support.tui import press, screen_lines, settle, until

from flexinspect.control.messages import StatusResponse, StepRef
from flexinspect.panels.panel_registry import load_panel
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.tui import saved_state
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.key_line import LAST_ACTIONS, KeyLine, actions_to_show, lay_out_keys
from flexinspect.tui.panel_layout import Slots
from flexinspect.tui.panel_view import PanelView
from flexinspect.tui.trace_session import CaptureStatus, RunStatus

FINISHED = RunStatus("finished", generations=1, last_step=3)
LIVE = RunStatus("recording", generations=1, last_step=3)


def shown(status: RunStatus, panel: str = "run", *, following: bool = True) -> list[str]:
    capture = CaptureStatus()
    return [*actions_to_show(status, capture, load_panel(panel), generation=0, following=following)]


def test_a_finished_run_offers_no_control_of_a_model() -> None:
    assert not any(action.startswith(("run.", "travel.")) for action in shown(FINISHED))
    assert "step.next" in shown(FINISHED)


def test_a_training_offers_no_search_of_tokens() -> None:
    training = RunStatus("finished", generations=1, last_step=3, run={"watch_training": True})
    left_out = [action for action in shown(FINISHED) if action not in shown(training)]
    assert left_out == ["tokens.xray", "tokens.search"]


def test_a_trace_without_a_step_or_a_finding_offers_no_keys_for_them() -> None:
    empty = RunStatus("failed", generations=1, last_step=None)
    assert not any(action.startswith(("step.", "tokens.")) for action in shown(empty))
    clean = actions_to_show(
        FINISHED,
        CaptureStatus(),
        load_panel("layers"),
        generation=0,
        following=True,
        has_finding=False,
        has_effect=lambda action: action != "view.flip",
    )
    assert [*clean][:2] == ["view.measure", "step.next"]


def test_a_view_behind_a_live_run_offers_to_follow() -> None:
    assert shown(LIVE, following=False)[0] == "step.follow"
    assert "step.follow" not in shown(LIVE)


def test_a_run_that_is_paused_before_its_first_step_offers_to_run_it() -> None:
    status = RunStatus("recording", generations=1, last_step=None)
    capture = CaptureStatus(StatusResponse("paused", StepRef(), "paused before the first step"))
    actions = actions_to_show(status, capture, load_panel("run"), generation=0, following=True)
    assert [*actions][:2] == ["run.pause", "run.step"]


@pytest.mark.parametrize("state", ["paused", "holding"])
def test_only_the_answer_of_the_model_offers_to_fork(state: Any) -> None:
    status = StatusResponse(state, StepRef(1, 0, 2), state, can_rewind=True)
    capture, panel, own = CaptureStatus(status), load_panel("run"), {}
    for generation in (0, 1):
        shown_ = actions_to_show(LIVE, capture, panel, generation=generation, following=False)
        own[generation] = [*shown_]
    assert {"travel.fork", "travel.mask", "travel.restore"} <= set(own[1])
    assert not any(action.startswith("travel.") for action in own[0])
    assert "step.follow" in own[0]


def test_the_actions_of_the_focused_panel_come_before_the_moves() -> None:
    actions = shown(FINISHED, "mask")
    assert actions.index("zoom.in") < actions.index("step.next")
    assert "zoom.in" not in shown(FINISHED, "run")


def test_a_narrow_line_keeps_help_and_quit() -> None:
    placed = lay_out_keys(shown(FINISHED, "mask"), lambda action: action[0], 30)
    assert [action for _, action, _, _ in placed][-3:] == list(LAST_ACTIONS)
    ends = [column + len(key) + len(label) + 1 for column, _, key, label in placed]
    assert max(ends) <= 30


async def test_the_line_follows_the_focus_and_a_click_acts(tmp_path: Path) -> None:
    app: Any = InspectorApp(sample_trace(tmp_path / "sample.flextrace"))
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        line = screen_lines(app)[-1]
        assert "z zoom" in line
        assert line.rstrip().endswith("q quit")
        await pilot.press("tab")
        await pilot.pause()
        assert "z zoom" not in screen_lines(app)[-1]
        await pilot.click(KeyLine, offset=(screen_lines(app)[-1].index("→"), 0))
        await settle(pilot)
        assert app.screen.place.step == 1


async def test_keys_without_effect_are_not_offered_and_say_so(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "clean.flextrace", generations=1, nan_at=None)
    saved_state.save_layout("generation", saved_state.Layout(("layers", "memory"), 2))
    app: Any = InspectorApp(path)
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        await until(pilot, lambda: "n finding" not in screen_lines(app)[-1])
        line = screen_lines(app)[-1]
        assert "v measure" in line
        assert "m view" not in line
        assert "i read it" not in line
        await press(pilot, "m", "z")
        assert [text for _, text in app.messages()] == [
            "No panel on the screen answers this key (zoom in).",
            "Layers: there is no other view here.",
        ]


async def test_in_a_trace_without_steps_the_keys_of_steps_and_panels_answer(tmp_path: Path) -> None:
    TraceWriter.create(tmp_path / "empty.flextrace", RUN).close("failed")
    app: Any = InspectorApp(tmp_path / "empty.flextrace")
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        await until(pilot, lambda: "m view" not in screen_lines(app)[-1])
        line = screen_lines(app)[-1]
        assert not any(key in line for key in ("→ token", "a X-ray", "v measure", "z zoom"))
        await press(pilot, "right", "a", "m")
        assert [text for _, text in app.messages()] == [
            "Mask: there is nothing to show at this place.",
            *["No step was recorded."] * 2,
        ]


async def test_a_message_before_the_panels_are_made_changes_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: Any = InspectorApp(sample_trace(tmp_path / "a.flextrace"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        before = screen_lines(app)[-1]
        monkeypatch.setattr(Slots, "views", lambda self: [])
        app.screen.post_message(PanelView.EffectsChanged())
        await pilot.pause()
        assert screen_lines(app)[-1] == before
        monkeypatch.undo()
