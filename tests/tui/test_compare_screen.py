"""Two branches side by side: tokens, candidates, KL and masks at one place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.traces import RUN, SEGMENTS, sample_generation, sample_step, sample_trace
from support.tui import screen_lines, screen_text, settle, until
from support.undeclared import SECOND, THIRD, blocks, write

from flexinspect.cli import interface
from flexinspect.cli.main import main
from flexinspect.core.errors import TraceError
from flexinspect.panels.base import Navigate
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import GenerationEnd, StepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.comparison_data import Side, next_difference
from flexinspect.tui.comparison_view import KL_LINE, LAYER_LINE
from flexinspect.tui.screens import compare_screen
from flexinspect.tui.screens.compare_screen import CompareScreen, PairView
from flexinspect.tui.screens.trace_screen import TraceScreen

SIZE = (100, 30)


def chosen(step: StepRecord, text: str) -> StepRecord:
    """Return the step with another token chosen."""
    assert step.logits is not None
    tokens = tuple(replace(token, token_id=77, text=text) for token in step.tokens)
    logits = replace(step.logits, chosen_id=77, chosen_rank=40, chosen_logprob=math.log(1.8e-6))
    return replace(step, tokens=tokens, logits=logits)


@pytest.fixture
def forked(tmp_path: Path) -> Path:
    """Branch 1 leaves branch 0 at step 2 with another token; another answer follows."""
    path = tmp_path / "forked.flextrace"
    change = {"kind": "token", "step": 2, "token_id": 77, "text": " Emily", "instead": " Aus"}
    with TraceWriter.create(path, RUN) as writer:
        writer.begin_generation(sample_generation(0))
        for step in range(5):
            writer.write_step(sample_step(step))
        writer.end_generation(GenerationEnd(0, "finished", " Jane Austen", SEGMENTS, "eos"))
        writer.begin_branch(0, 1, parent=0, fork_step=2, change=change, segments=SEGMENTS)
        writer.write_step(replace(chosen(sample_step(2), " Emily"), branch=1, masks=()))
        writer.write_step(replace(sample_step(3), branch=1, masks=()))
        writer.begin_generation(sample_generation(1))
        writer.write_step(sample_step(0, 1))
    return path


async def test_a_branch_is_shown_beside_its_parent_at_the_fork(forked: Path) -> None:
    app: Any = InspectorApp(forked)
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        await pilot.press("C")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen))
        await until(pilot, lambda: "token 3 of 5" in screen_text(app))
        lines = screen_lines(app)
        assert lines[0].startswith("Branch 1 and branch 0, of which it is a fork")
        assert "Aus" in lines[2]
        assert "Emily" in lines[3]
        assert "≠" in lines[4]
        assert "candidates of branch 0" in screen_text(app)
        await pilot.press("escape")
        assert isinstance(app.screen, TraceScreen)


async def test_in_another_answer_the_newest_fork_of_the_trace_is_shown(forked: Path) -> None:
    app: Any = InspectorApp(forked)
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        app.screen.navigation.navigate(Navigate(generation=1))
        await pilot.press("C")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen))
        await until(pilot, lambda: "token 3 of 5" in screen_text(app))
        title = "Branch 1 and branch 0, of which it is a fork, of answer 1"
        assert screen_lines(app)[0].startswith(title)


async def test_a_forced_token_that_is_no_candidate_is_listed_with_its_probability(
    forked: Path,
) -> None:
    app: Any = InspectorApp(forked)
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        await pilot.press("C")
        await until(pilot, lambda: "candidates of branch 0" in screen_text(app))
        chosen_lines = [line for line in screen_lines(app) if "*" in line]
        assert any("*40 ·Emily" in line and "1.8e-06" in line for line in chosen_lines)


@pytest.mark.parametrize("live", [True, False])
async def test_without_a_fork_a_message_names_the_key_that_forks_if_it_can(
    tmp_path: Path, live: bool
) -> None:
    app: Any = InspectorApp(sample_trace(tmp_path / "sample.flextrace"))
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        if live:
            app.screen.status = replace(app.screen.status, state="recording")
        await pilot.press("t")
        await until(pilot, lambda: len(app._notifications) > 0)
        await pilot.press("C")
        ended = (
            "this run has ended, and only one in progress can be forked (flexinspect run --hold)"
        )
        choose, compare = ("F forks it", "F tries another token") if live else (ended, ended)
        assert [text for _, text in app.messages()] == [
            f"There is no fork to compare with; {compare}.",
            f"This generation has one branch; {choose}.",
        ]


async def test_two_traces_share_one_cursor_and_enter_opens_the_first(
    tmp_path: Path, forked: Path
) -> None:
    other = sample_trace(tmp_path / "other.flextrace", generations=1)
    app: Any = InspectorApp(compare=(forked, other, 0))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "candidates of A forked" in screen_text(app))
        first = "The two runs differ. First: step 3, layer 2: hidden [value]"
        assert screen_lines(app)[0].startswith(first)
        assert "token 4 of 6 (step 3)" in screen_text(app)
        layers = screen_lines(app)[LAYER_LINE]
        assert layers.startswith("layers  ··██  layer 2: ≠ hidden other · step: equal")
        await pilot.press("home")
        await until(pilot, lambda: "token 1 of 6" in screen_text(app))
        await pilot.press("n")  # the step that only one of them has
        await until(pilot, lambda: "token 6 of 6" in screen_text(app))
        await pilot.press("left", "left", "down")
        await until(pilot, lambda: "token 4 of 6 (step 3)" in screen_text(app))
        await until(pilot, lambda: "layer 3" in screen_text(app))
        await pilot.click(PairView, offset=(5, KL_LINE))
        await until(pilot, lambda: "token 1 of 6" in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, TraceScreen))
        assert app.screen.place.layer == 3
        await settle(pilot)
        await pilot.press("q")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, TraceScreen))


async def test_masks_that_differ_are_shown_at_the_first_cell(tmp_path: Path) -> None:
    one = write(tmp_path / "one.flextrace", blocks([SECOND - 1, THIRD], reader=THIRD))
    other = write(tmp_path / "other.flextrace", blocks([SECOND, THIRD], reader=THIRD))
    app: Any = InspectorApp(compare=(one, other, 0))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "The executed masks differ:" in screen_text(app))
        text = screen_text(app)
        # The row of the line break sees itself alone, or the 7 tokens of its line; the 7 rows of
        # the next line see the line break, or not.
        assert "□ 7 cells are open in A one only" in text
        assert "✖ 7 cells are open in B other only" in text
        assert "no KL" in text
        await pilot.press("down", "n")
        await until(pilot, lambda: len(app._notifications) > 0)
        assert app.screen.place.layer == 0
        (note,) = app._notifications
        assert note.message == "All tokens are the same; layer 0 ran other masks here."


@pytest.mark.parametrize(("size", "n_rows"), [((80, 24), 7), ((160, 50), 20)])
async def test_a_larger_window_shows_more_cells_of_the_masks(
    tmp_path: Path, size: tuple[int, int], n_rows: int
) -> None:
    one = write(tmp_path / "one.flextrace", blocks([THIRD - 1]))
    other = write(tmp_path / "other.flextrace", blocks([THIRD]))
    app: Any = InspectorApp(compare=(one, other, 0))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "The executed masks differ:" in screen_text(app))
        await pilot.resize_terminal(*size)
        await until(pilot, lambda: sum("■  " in line for line in screen_lines(app)) >= n_rows)


async def test_equal_traces_have_nothing_to_go_to(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "a.flextrace", generations=1, nan_at=None)
    app: Any = InspectorApp(compare=(path, path, 0))
    async with app.run_test(size=(60, 20)) as pilot:
        await until(pilot, lambda: "0 of 6 tokens differ" in screen_text(app))
        assert "The executed masks are the same up to this step." in screen_text(app)
        await pilot.press("n")
        await until(pilot, lambda: len(app._notifications) > 0)
        assert [note.message for note in app._notifications] == [
            "All tokens and masks are the same."
        ]


def test_masks_with_equal_cells_are_the_same_whatever_their_names_are(tmp_path: Path) -> None:
    cells = blocks([THIRD])
    one = write(tmp_path / "one.flextrace", cells)
    other = write(tmp_path / "other.flextrace", cells, name="renamed")
    third = write(tmp_path / "third.flextrace", blocks([SECOND]))
    readers = [TraceReader(path) for path in (one, other, third)]
    left, *others = (Side(Source(reader), 0, "") for reader in readers)
    differences = [next_difference((left, right), 0, 0, 1) for right in others]
    assert differences == [None, (0, 0)]
    for reader in readers:
        reader.close()


async def test_the_help_lists_the_keys_and_escape_ends_nothing(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "a.flextrace", generations=1)
    app: Any = InspectorApp(compare=(path, path, 0))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "candidates of A" in screen_text(app))
        await pilot.press("question_mark")
        await until(pilot, lambda: "next difference" in screen_text(app))
        assert "open A here" in screen_text(app)
        await pilot.press("escape", "escape")
        assert isinstance(app.screen, CompareScreen)
        assert [note.message for note in app._notifications] == ["q quits."]
        await pilot.press("q")
        assert not app.is_running


async def test_a_page_that_cannot_be_read_is_named_in_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TraceError("The page is damaged.")

    path = sample_trace(tmp_path / "a.flextrace", generations=1)
    app: Any = InspectorApp(compare=(path, path, 0))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "candidates of A" in screen_text(app))
        monkeypatch.setattr(compare_screen, "step_bounds_of", fail)
        await pilot.press("right")
        assert [note.message for note in app._notifications] == ["The page is damaged."]


def test_compare_ui_needs_a_terminal_and_excludes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(sample_trace(tmp_path / "a.flextrace"))
    assert main(["compare", path, path, "--ui"]) == 2
    assert "flexinspect diff prints where two traces differ" in capsys.readouterr().err
    monkeypatch.setattr(interface, "_has_terminal", lambda: True)
    assert main(["compare", path, path, "--ui", "--json"]) == 2
    assert main(["compare", path, str(tmp_path / "none"), "--ui"]) == 2
    assert "There is no trace at" in capsys.readouterr().err


def larger(step: StepRecord, layer: int, by: float) -> StepRecord:
    """Return a step whose layer is larger by a factor, in its statistics."""
    stats = tuple(
        replace(one, norm=one.norm * by, max=one.max * by) if one.layer == layer else one
        for one in step.layer_stats
    )
    return replace(step, layer_stats=stats)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_layer_beyond_noise_is_lit_and_gone_to(
    size: tuple[int, int], tmp_path: Path
) -> None:
    paths = [tmp_path / "a.flextrace", tmp_path / "b.flextrace"]
    for path, layers in zip(paths, ({}, {1: 1.000001, 3: 1.2}), strict=True):
        with TraceWriter.create(path, RUN) as writer:
            writer.begin_generation(sample_generation(0))
            for number in range(3):
                step = sample_step(number)
                for layer, by in layers.items() if number == 1 else ():
                    step = larger(step, layer, by)
                writer.write_step(step)
    app: Any = InspectorApp(compare=(*paths, 0))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "layer 3: ≠ hidden 0.17" in screen_text(app))
        assert screen_lines(app)[LAYER_LINE].startswith("layers  ·▁·█  ")
        await pilot.click(PairView, offset=(len("layers  ·"), LAYER_LINE))
        await until(pilot, lambda: "layer 1: hidden 1e-06" in screen_text(app))
        await pilot.press("home", "n")
        await until(pilot, lambda: app.screen.place.step == 1 and app.screen.place.layer == 3)
        (note,) = app._notifications
        assert note.message.startswith("All tokens and masks are the same; step 1, layer 3: hidden")


def test_two_trainings_are_not_shown_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.flextrace"
    with TraceWriter.create(path, RUN) as writer:
        writer.begin_generation(
            replace(sample_generation(0), tokens=(), declared={"training": {"groups": []}})
        )
    monkeypatch.setattr(interface, "_has_terminal", lambda: True)
    assert main(["diff", str(path), str(path), "--ui"]) == 2
    assert "A and B are trainings" in capsys.readouterr().err
