"""What the attention panel draws, describes and answers, and its text where data is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.attention_trace import (
    COLOR,
    N_PROMPT,
    PANEL,
    PLAIN,
    Made,
    described,
    load,
    paint,
    request,
)

from flexinspect.core.errors import TraceError
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import display_text
from flexinspect.panels.attention.attention_data import AttentionOptions
from flexinspect.panels.attention.attention_panel import attention_layout
from flexinspect.panels.base import Missing, Navigate
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import StepRecord

# -- what is missing ------------------------------------------------------------------------------


def test_level_basic_says_which_level_records_attention(made: Made) -> None:
    _, source = made(level="basic")
    with pytest.raises(Missing) as caught:
        load(source, step=1)
    assert caught.value.lines() == [
        "Step 1 has no recorded attention.",
        "Record with --level advanced (by segment) or --level extreme (by token).",
    ]


def test_a_step_that_is_not_there_is_missing(made: Made) -> None:
    _, source = made()
    with pytest.raises(Missing, match="Step 77 of generation 0 is not recorded"):
        load(source, step=77)


def test_level_advanced_shows_mass_and_names_the_level_for_tokens(made: Made) -> None:
    _, source = made(level="advanced")
    data = load(source, step=1)
    assert data.missing_reason == "Weights of single tokens are recorded at --level extreme."
    assert data.segment_attention is not None
    text = "\n".join(paint(source, 60, 30, step=1)[0])
    assert data.missing_reason in text
    assert "paraphrase 2" in text
    assert "level extreme" in paint(source, 38, 14, step=1)[1].note


def test_a_layer_whose_keys_are_not_stored_names_those_that_are(made: Made) -> None:
    _, source = made(stored=(1,))
    assert load(source, step=1, layer=1).tokens is not None
    why = load(source, step=1, layer=0).missing_reason
    assert why == "The queries and keys of layer 0 are not stored; those of layers 1 are."


def test_a_level_that_was_raised_later_names_the_step_without_keys(made: Made) -> None:
    def late(step: StepRecord) -> StepRecord:
        kept = [a for a in step.arrays if step.step >= 2 or a.stream not in ("q", "k")]
        return replace(step, arrays=tuple(kept))

    _, source = made(change=late)
    assert load(source, step=2).missing_reason == "The keys of layer 0 in step 0 are not stored."


def test_a_mask_without_cells_says_so(made: Made) -> None:
    def bare(step: StepRecord) -> StepRecord:
        return replace(step, masks=(replace(step.masks[0], cells=None),))

    _, source = made(change=bare)
    assert load(source, step=1).missing_reason == "The executed mask of layer 0 was not recorded."


def test_keys_beyond_the_bound_are_not_read(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = made()
    monkeypatch.setattr("flexinspect.panels.attention.row_recompute.MAX_READ_BYTES", 100)
    assert "more than the limit of 0 MiB" in load(source, step=1).missing_reason


def with_zeros(stream: str, shape: tuple[int, ...]) -> Callable[[StepRecord], StepRecord]:
    """A change of step 1: the arrays of a stream are zeros of another shape."""

    def change(step: StepRecord) -> StepRecord:
        zeros = np.zeros(shape, np.float32)
        arrays = [replace(a, array=zeros) if a.stream == stream else a for a in step.arrays]
        return replace(step, arrays=tuple(arrays)) if step.step == 1 else step

    return change


@pytest.mark.parametrize(("stream", "shape"), [("k", (2, 1, 6)), ("q", (4, 1, 5))])
def test_arrays_of_a_foreign_shape_are_a_sentence_not_a_crash(
    made: Made, stream: str, shape: tuple[int, ...]
) -> None:
    _, source = made(change=with_zeros(stream, shape))
    data = load(source, step=1)
    assert data.tokens is None
    assert data.missing_reason.endswith(".")


@pytest.mark.parametrize(("stream", "shape"), [("q", (4, 8)), ("k", (8,))])
def test_arrays_of_other_dimensions_are_damage(
    made: Made, stream: str, shape: tuple[int, ...]
) -> None:
    _, source = made(change=with_zeros(stream, shape))
    with pytest.raises(TraceError, match="has 3 dimensions"):
        load(source, step=1)


def test_scores_that_are_not_finite_are_no_weights(made: Made) -> None:
    def nonfinite(step: StepRecord) -> StepRecord:
        arrays = [
            replace(a, array=np.full_like(a.array, np.nan)) if a.stream == "q" else a
            for a in step.arrays
        ]
        return replace(step, arrays=tuple(arrays))

    _, source = made(change=nonfinite)
    data = load(source, step=1)
    assert data.missing_reason == "The scores of this row are not finite, so it has no weights."
    assert "not finite" in "\n".join(paint(source, 100, 30, step=1)[0])


def test_a_row_that_sees_nothing_says_so(made: Made) -> None:
    def with_empty_rows(step: StepRecord) -> StepRecord:
        if step.step:
            return step
        cells = step.masks[0].cells
        assert cells is not None
        cells = cells.copy()
        cells[:, 4] = False
        return replace(step, masks=(replace(step.masks[0], cells=cells),))

    _, source = made(change=with_empty_rows)
    lines, _ = paint(source, 100, 30, step=0, row=4)
    assert "This row attends to no key: its output is zero." in " ".join(lines)
    assert "This row attends to no key" in described(load(source, step=0, row=4))


def test_layer_and_head_beyond_the_model_are_brought_inside(made: Made) -> None:
    _, source = made()
    data = load(source, step=1, layer=50, head=50)
    assert (data.layer, data.head) == (0, 3)


# -- what is drawn --------------------------------------------------------------------------------


def test_the_panel_in_a_small_terminal_without_colours(made: Made) -> None:
    synthetic, source = made()
    lines, picture = paint(source, 38, 14, step=1, layer=1, head=2)
    value = synthetic.weights(1, 2, N_PROMPT)[1:4].sum()
    assert lines[0].startswith(f"paraphrase 1 {value:.4f}")
    assert lines[1].startswith("  0  1  2  3")
    assert lines[3].startswith("1▸")
    assert lines[3][8:11].startswith("[")
    assert "LSE error" in lines[4]
    assert lines[5].startswith("layer 1 head 2 newest row 10  w10")
    heaviest = int(synthetic.weights(1, 2, N_PROMPT).argmax())
    assert lines[8].split()[0] == str(heaviest)
    assert picture.note.startswith("paraphrase 1 · LSE error ")


def test_a_wide_picture_has_the_row_next_to_the_grid_and_every_token_in_order(made: Made) -> None:
    synthetic, source = made()
    lines, _ = paint(source, 120, 40, step=1, layer=1, head=2)
    assert "layer 1 head 2" in lines[0]
    text = "\n".join(lines)
    positions = [int(line[36:].split()[0]) for line in lines[2:13]]
    assert positions == list(range(11))
    assert "attention by segment" in text
    weight = synthetic.weights(1, 2, N_PROMPT)[7]
    assert f"{weight:.4f}" in lines[9]
    assert "paraphrase 2" in lines[9]
    assert lines[6][36:].split()[1] == display_text("Ċ", "\n", special=False)[0]


def test_closed_keys_are_named_and_have_no_bar(made: Made) -> None:
    _, source = made()
    lines, _ = paint(source, 120, 40, step=0, row=6)
    rows = {int(line[36:].split()[0]): line for line in lines[2:12]}
    assert rows[2].rstrip().endswith("closed")
    assert "closed" not in rows[5]
    assert rows[9].rstrip().endswith("closed")


@pytest.mark.parametrize("look", [PLAIN, COLOR, Theme("256")])
def test_no_size_and_no_theme_makes_it_fail(made: Made, look: Theme) -> None:
    scenes = [made()[1], made(level="advanced")[1], made(softcap=1.0)[1]]
    many = made(layers=20, heads=36, kv_heads=4, level="advanced", n_steps=2)[1]
    sizes = [(1, 1), (2, 3), (7, 2), (20, 6), (38, 14), (71, 9), (72, 6), (120, 40), (240, 70)]
    for width, height in sizes:
        for source in (*scenes, many):
            lines, _ = paint(source, width, height, look, step=1, layer=1, head=3)
            assert lines


def test_the_chosen_cell_stays_visible_in_a_grid_larger_than_the_screen(made: Made) -> None:
    _, source = made(layers=20, heads=36, kv_heads=4, level="advanced", n_steps=2)
    for layer, head in ((0, 0), (11, 20), (19, 35)):
        lines, picture = paint(source, 30, 14, step=1, layer=layer, head=head)
        marked = [line for line in lines if f"{layer:>2}▸" in line]
        assert len(marked) == 1
        assert "+" in marked[0]
        assert "of 20" in picture.note
        assert "of 36" in picture.note


def test_a_narrow_grid_takes_the_lines_that_the_segments_do_not_need(made: Made) -> None:
    _, source = made(layers=6, level="advanced")
    data = load(source, step=1)
    one = replace(data, segments=data.segments[:1])
    assert len(attention_layout(one, 40, 12).rows) == 6
    assert len(attention_layout(data, 40, 12).rows) == 6 // 2


def test_text_of_the_model_cannot_reach_the_terminal(made: Made) -> None:
    def evil(step: StepRecord) -> StepRecord:
        return replace(step, tokens=(replace(step.tokens[0], text="\x1b[31m\x07[b]"),))

    _, source = made(change=evil)
    lines, _ = paint(source, 120, 40, step=2)
    text = "\n".join(lines) + described(load(source, step=2))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b[31m\\x07[b]"[:10] in text


# -- what it answers ------------------------------------------------------------------------------


def test_the_next_measure_goes_round(made: Made) -> None:
    _, source = made()
    options = AttentionOptions()
    seen = []
    for _ in range(9):
        made_request = replace(request(step=1), options=options)
        data = PANEL.load(source, made_request)
        seen.append(data.grid.measure)
        answer = PANEL.on_action("view.measure", data, made_request)
        assert isinstance(answer, AttentionOptions)
        options = answer
    assert seen == [*data.grid.measures, "paraphrase 1"]


def act(source: Source, action: str, **changes: Any) -> Any:
    made_request = request(**changes)
    return PANEL.on_action(action, PANEL.load(source, made_request), made_request)


def test_the_cursor_moves_layers_and_heads_and_stops_at_the_edge(made: Made) -> None:
    _, source = made()
    assert act(source, "cursor.down", step=1) == Navigate(layer=1)
    assert act(source, "cursor.up", step=1) is None
    assert act(source, "cursor.right", step=1) == Navigate(head=1)
    assert act(source, "cursor.left", step=1) is None
    assert act(source, "cursor.right", step=1, head=3) is None
    assert act(source, "zoom.in", step=1) is None


def test_in_a_prefill_with_stored_queries_the_cursor_moves_the_row(made: Made) -> None:
    _, source = made()
    assert act(source, "cursor.left", step=0).row == N_PROMPT - 2
    assert act(source, "cursor.right", step=0) is None
    assert act(source, "cursor.right", step=0, row=N_PROMPT - 2).row is None
    assert act(source, "cursor.left", step=0, row=0) is None
    _, advanced = made(level="advanced")
    assert act(advanced, "cursor.right", step=0) == Navigate(head=1)


@pytest.mark.parametrize(("width", "height"), [(38, 14), (120, 40)])
def test_a_click_in_the_grid_goes_to_that_layer_and_head(
    made: Made, width: int, height: int
) -> None:
    _, source = made()
    made_request = request(width, height, step=1)
    data = PANEL.load(source, made_request)
    assert PANEL.on_mouse(2 + 3 * 2 + 1, 3, data, made_request, click=True) == Navigate(
        layer=1, head=2
    )
    assert PANEL.on_mouse(2 + 3 * 2 + 1, 3, data, made_request, click=False) is None
    for x, y in ((0, 3), (5, 0), (5, 12), (37, 3)):
        assert PANEL.on_mouse(x, y, data, made_request, click=True) is None


# -- the description ------------------------------------------------------------------------------


def test_the_description_has_the_table_the_mass_and_the_heaviest_tokens(made: Made) -> None:
    synthetic, source = made()
    lines = PANEL.describe(load(source, step=1, layer=1, head=2))
    assert lines[0].startswith(
        "Step 1, newest row, share of its attention on paraphrase 1, by layer and head (LSE error"
    )
    values = [float(value) for value in lines[3].split()[1:]]
    expected = [synthetic.weights(1, head, N_PROMPT)[1:4].sum() for head in range(4)]
    np.testing.assert_allclose(values, expected, atol=1e-4)
    text = "\n".join(lines)
    assert "Layer 1, head 2, newest row 10 ' w10':" in text
    assert "11 of 11 keys are open" in text
    weights = synthetic.weights(1, 2, N_PROMPT)
    top = int(weights.argmax())
    first = lines[lines.index("Heaviest tokens, the first 10:") + 1].split()
    assert first[:2] == [f"{weights[top]:.4f}", str(top)]


def test_a_large_grid_is_described_by_layer(made: Made) -> None:
    synthetic, source = made(layers=20, heads=36, kv_heads=4, level="advanced", n_steps=2)
    text = described(load(source, step=1))
    values = [synthetic.weights(7, head, N_PROMPT)[1:4].sum() for head in range(36)]
    line = next(line for line in text.splitlines() if line.startswith("Layer 7:"))
    assert f"highest {max(values):.4f} at head {int(np.argmax(values))}" in line
    assert f"mean {np.mean(values):.4f}" in line


def test_the_help_is_three_sentences() -> None:
    assert all(line.endswith(".") for line in PANEL.help)
    assert len(PANEL.help) == 3
