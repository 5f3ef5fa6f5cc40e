"""The branches panel: the tree, the comparison with the parent branch, and clicks."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support.traces import N_PROMPT, SEGMENTS, sample_step, sample_trace
from support.tui import screen_text, settle

from flexinspect.analysis.branch_comparison import MaskChange
from flexinspect.drawing.theme import Theme
from flexinspect.panels import branches_panel
from flexinspect.panels.base import Navigate, NoOptions, Request, TracePlace
from flexinspect.panels.branches_panel import BranchesData, BranchesPanel
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import GenerationEnd, StepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.app import InspectorApp

TOKEN = {
    "kind": "token",
    "token_id": 77,
    "text": " Emily",
    "instead_id": 30,
    "instead_text": " Aus",
}
MASK = {"kind": "mask", "edits": ["drop paraphrase 2"], "mask_mod": "…", "recomputed": True}


def moved(step: StepRecord, by: float) -> StepRecord:
    """Return the step with the logit of its best candidate lowered."""
    assert step.logits is not None
    best, *others = step.logits.candidates
    lower = replace(best, logit=best.logit - by, logprob=best.logprob - by)
    return replace(step, logits=replace(step.logits, candidates=(lower, *others)))


def chosen(step: StepRecord, text: str) -> StepRecord:
    """Return the step with another token chosen."""
    assert step.logits is not None
    tokens = tuple(replace(token, token_id=77, text=text) for token in step.tokens)
    return replace(step, tokens=tokens, logits=replace(step.logits, chosen_id=77))


@pytest.fixture
def forked(tmp_path: Path) -> Path:
    """Branch 1 leaves branch 0 at step 2 with another token, branch 2 leaves branch 1 at 3."""
    path = tmp_path / "forked.flextrace"
    from support import traces

    with TraceWriter.create(path, traces.RUN) as writer:
        writer.begin_generation(traces.sample_generation(0))
        for step in range(5):
            writer.write_step(sample_step(step))
        writer.end_generation(GenerationEnd(0, "finished", " Jane Austen", SEGMENTS, "eos"))
        writer.begin_branch(0, 1, parent=0, fork_step=2, change=TOKEN, segments=SEGMENTS)
        own = chosen(sample_step(2), " Emily")
        writer.write_step(replace(own, branch=1, masks=()))
        writer.write_step(replace(moved(sample_step(3), 0.5), branch=1, masks=()))
        writer.begin_branch(0, 2, parent=1, fork_step=3, change=MASK, segments=SEGMENTS)
        writer.write_step(replace(sample_step(3), branch=2, masks=()))
    return path


def loaded(path: Path, place: TracePlace, height: int = 20) -> BranchesData:
    request = Request(place, NoOptions(), 90, height)
    return BranchesPanel().load(Source(TraceReader(path)), request)


def test_the_tree_shows_each_fork_and_its_change(forked: Path) -> None:
    lines = BranchesPanel().describe(loaded(forked, TracePlace(branch=1, step=2)))
    assert lines[0].startswith("  branch 0 · finished ·  Jane Austen".replace("·  ", "· "))
    assert "▸ └ branch 1 from step 2: ' Emily' instead of ' Aus'" in lines[1]
    assert "branch 2 from step 3: drop paraphrase 2, all keys recomputed" in lines[2]


def test_a_branch_is_compared_with_its_parent(forked: Path) -> None:
    data = loaded(forked, TracePlace(branch=1, step=3))
    assert [pair.step for pair in data.pairs] == [2, 3, 4]
    first, second, third = data.pairs
    assert first.is_different
    assert first.own == " Emily"
    assert data.diverged_at == 2
    assert not second.is_different
    assert second.change is not None
    assert second.change.kl > 0
    assert second.change.largest == pytest.approx(0.5)
    assert (third.base is None, third.own) == (False, None)  # the branch has no such step
    lines = BranchesPanel().describe(data)
    assert "step 3: " in lines[5]
    assert "largest logit change 0.5" in lines[5]
    assert "The texts diverge at step 2." in lines
    assert "the same in all" in lines[-1]


def test_the_divergence_may_be_above_the_window_and_the_mask_sentence_is_wrapped(
    forked: Path,
) -> None:
    request = Request(TracePlace(branch=1, step=3), NoOptions(), 38, 16)
    panel = BranchesPanel()
    data = panel.load(Source(TraceReader(forked)), request)
    narrow = replace(data, pairs=data.pairs[1:])  # step 2 is above the window
    picture = panel.paint(narrow, request, Theme("none"))
    assert picture.note == "diverges at step 2"
    shown = " ".join(" ".join(strip.text for strip in picture.strips).split())
    assert "Masks: the same in all" in shown
    assert "rows that both computed (layer 0, head 0, up to this step)." in shown


def test_another_step_reads_only_new_masks(forked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    of_trace = TraceReader.mask
    monkeypatch.setattr(TraceReader, "mask", lambda *args: read.append(args[1]) or of_trace(*args))
    source = Source(TraceReader(forked))
    for step, n_new in ((2, 4), (3, 2), (3, 0), (2, 0)):
        read.clear()
        request = Request(TracePlace(branch=1, step=step), NoOptions(), 90, 20)
        masks = BranchesPanel().load(source, request).masks
        assert masks is not None
        assert (masks.n_rows, masks.n_opened, masks.n_closed) == (N_PROMPT + step, 0, 0)
        assert len(read) == n_new


def test_the_root_is_compared_with_its_last_fork(forked: Path) -> None:
    shown = loaded(forked, TracePlace(branch=0, step=4)).compared
    assert shown is not None
    assert shown.branch == 1


def test_a_generation_without_forks_shows_how_to_fork(tmp_path: Path) -> None:
    data = loaded(sample_trace(tmp_path / "one.flextrace"), TracePlace())
    assert data.compared is None
    assert "F continues" in BranchesPanel().describe(data)[-1]
    picture = BranchesPanel().paint(data, Request(TracePlace(), NoOptions(), 80, 6), Theme("none"))
    assert "There is no fork" in "\n".join(strip.text for strip in picture.strips)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 8), (20, 4), (200, 3)])
def test_the_picture_fits_the_requested_size(forked: Path, width: int, height: int) -> None:
    request = Request(TracePlace(branch=1, step=3), NoOptions(), width, height)
    panel = BranchesPanel()
    data = panel.load(Source(TraceReader(forked)), request)
    picture = panel.paint(data, request, Theme("none"))
    assert len(picture.strips) <= height
    assert all(strip.cell_length == width for strip in picture.strips)


def test_a_click_goes_to_the_branch_or_the_step(forked: Path) -> None:
    place = TracePlace(branch=1, step=2)
    request, data = Request(place, NoOptions(), 90, 20), loaded(forked, place)
    point = BranchesPanel().on_mouse
    assert point(5, 2, data, request, click=True) == Navigate(branch=2)
    assert point(5, 3, data, request, click=True) is None  # the heading
    assert point(5, 5, data, request, click=True) == Navigate(step=3)
    assert point(5, 5, data, request, click=False) is None


async def test_the_interface_steps_from_a_branch_to_the_tokens_of_its_parent(forked: Path) -> None:
    app = InspectorApp(forked, place=TracePlace(branch=1, step=3))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        app.screen.slots.show_panel("branches")  # type: ignore[attr-defined]
        await settle(pilot)
        text = screen_text(app)
        assert "branch 1 from step 2" in text
        assert "branch 1" in text.splitlines()[0]
        assert "Emily" in text.splitlines()[1]
        await pilot.press("left", "left")
        await settle(pilot)
        assert app.screen.place.step == 1  # type: ignore[attr-defined]


async def test_a_branch_is_shown_at_its_first_step_as_at_any_other(forked: Path) -> None:
    app = InspectorApp(forked, place=TracePlace(branch=0, step=0))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert "Jane" in screen_text(app).splitlines()[1]
        await pilot.press("t")
        await settle(pilot)
        await pilot.press("down", "enter")
        await settle(pilot)
        lines = screen_text(app).splitlines()
        assert "branch 1 · token 1 of " in lines[0]
        assert "Emily" in lines[1]


@pytest.mark.parametrize(
    ("opened", "closed", "text"),
    [
        ((), (), "Masks: the same in all 9 rows"),
        (((4, 1),), (), "Masks: 1 cell opened, 0 closed, the first at row 4, key 1"),
        ((), ((5, 2),), "Masks: 0 cells opened, 1 closed, the first at row 5, key 2"),
    ],
)
def test_masks_are_the_same_only_without_opened_and_closed_cells(
    opened: tuple[tuple[int, int], ...], closed: tuple[tuple[int, int], ...], text: str
) -> None:
    change = MaskChange(3, 1, 9, len(opened), len(closed), opened, closed)
    assert branches_panel._describe_masks(change, TracePlace(layer=1)).startswith(text)
