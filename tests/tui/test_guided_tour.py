"""The guided tour waits for each key that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.traces import sample_trace
from support.tui import screen_text, settle, until

from flexinspect.core.keyboard import all_keys
from flexinspect.tui import saved_state
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.guided_tour import STEPS, TourLine


def test_every_step_waits_for_an_action_that_has_a_key() -> None:
    known = {key.id for key in all_keys()}
    assert {step.action for step in STEPS} <= known
    assert all("{keys}" in step.text for step in STEPS)


async def test_the_tour_goes_on_only_at_the_key_that_it_names(tmp_path: Path) -> None:
    app: Any = InspectorApp(sample_trace(tmp_path / "sample.flextrace"), has_tour=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        tour = app.screen.query_one(TourLine)
        assert "1 of 7" in screen_text(app)
        await pilot.press("left", "down")
        assert tour.position == 0
        for number, key in enumerate(("right", "a", "n", "i", "m", "f2", "question_mark")):
            assert tour.position == number
            await pilot.press(key)
            await settle(pilot)
            if len(app.screen_stack) > 2:  # a window to read
                await pilot.press("escape")
                await settle(pilot)
        assert tour.position == len(STEPS)
        assert "This was the tour." in screen_text(app)


async def test_while_a_window_is_open_the_tour_says_how_to_close_it(tmp_path: Path) -> None:
    app: Any = InspectorApp(sample_trace(tmp_path / "sample.flextrace"), has_tour=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        for key in ("right", "a", "n", "i"):
            await pilot.press(key)
            await settle(pilot)
        await until(pilot, lambda: "n next finding · esc close" in screen_text(app))
        assert "Press  esc  to close this window" in screen_text(app)
        assert "5 of 7" not in screen_text(app)
        await pilot.press("escape")
        await until(pilot, lambda: "5 of 7" in screen_text(app))
        assert "to close this window" not in screen_text(app)


async def test_a_layout_of_the_tour_is_not_saved(tmp_path: Path) -> None:
    mine = saved_state.Layout(("logits", "layers", "tokens", "run"), 2)
    saved_state.save_layout("generation", mine)
    app: Any = InspectorApp(sample_trace(tmp_path / "sample.flextrace"), has_tour=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        names = [view.panel.name for view in app.screen.slots.views()]
        assert "mask" in names
        await pilot.press("f2", "minus")
        await settle(pilot)
    assert saved_state.load_state().layouts == {"generation": mine}


async def test_without_a_tour_no_line_is_taken(tmp_path: Path) -> None:
    app = InspectorApp(sample_trace(tmp_path / "sample.flextrace"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert not app.screen.query(TourLine)
