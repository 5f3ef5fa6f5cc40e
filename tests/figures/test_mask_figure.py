"""Figures of masks: nothing overlaps, nothing is lost, and colour is never the only sign."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.mask_pictures import full_picture, isolation_picture

from flexinspect.core.errors import UsageError
from flexinspect.core.languages import load_labels
from flexinspect.figures.cell_drawing import SIGNS, join_cells, state_colors
from flexinspect.figures.mask_figure import FigureStyle, draw_mask_figure, draw_mask_sheet
from flexinspect.figures.sheet import MIN_FONT_SIZE
from flexinspect.figures.themes import THEMES, find_theme
from flexinspect.masks.mask_picture import MaskPicture
from flexinspect.masks.viewport import BOTH, CLOSED, LEAKED, LOST, OPEN, UNKNOWN

WORDS = ("<s>", " Which", " city", " 首都", "\n", " government", "🗼", " $x_1$", " ", "?")
ENGLISH = load_labels("en")


def words(n: int) -> dict[int, str]:
    return {pos: WORDS[pos % len(WORDS)] for pos in range(n)}


def shown_texts(figure: Any) -> Iterator[Any]:
    """Yield the texts of a figure that are drawn, tick labels included."""
    figure.draw_without_rendering()
    paper, *axes = figure.axes
    yield from (text for text in paper.texts if text.get_text())
    for each in axes:
        yield from (t for t in (*each.get_xticklabels(), *each.get_yticklabels()) if t.get_text())


def overlaps(figure: Any) -> list[tuple[str, str]]:
    renderer = figure.canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown_texts(figure)]
    return [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
    ]


def outside(figure: Any) -> list[str]:
    renderer, sheet = figure.canvas.get_renderer(), figure.bbox
    return [
        text.get_text()
        for text in shown_texts(figure)
        if (box := text.get_window_extent(renderer)).x0 < sheet.x0 - 1
        or box.x1 > sheet.x1 + 1
        or box.y0 < sheet.y0 - 1
        or box.y1 > sheet.y1 + 1
    ]


SIZES = ((3.3, None), (6.5, None), (13.3, 7.5))


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(
    ("shape", "language", "has_words"),
    [
        ((3, 4, 1, 2), "en", True),
        ((3, 15, 1, 8), "zh", False),
        ((5, 25, 2, 10), "en", False),
        ((5, 25, 2, 10), "zh", True),
        ((12, 20, 1, 30), "en", True),
    ],
)
def test_texts_neither_overlap_nor_leave_the_sheet_nor_are_too_small(
    shape: tuple[int, int, int, int],
    width: float,
    height: float | None,
    language: str,
    has_words: bool,
) -> None:
    picture = isolation_picture(*shape, separators="isolated")
    picture = replace(picture, words=words(picture.states.shape[1]) if has_words else {})
    labels = load_labels(language)
    figure = draw_mask_figure(picture, labels=labels, width=width, height=height, note="34.5 %")
    assert overlaps(figure) == []
    assert outside(figure) == []
    assert min(text.get_fontsize() for text in shown_texts(figure)) >= MIN_FONT_SIZE
    assert figure.get_size_inches()[0] <= width + 1e-6
    assert height is None or figure.get_size_inches()[1] <= height + 1e-6


@settings(max_examples=8, deadline=None)
@given(
    n_rows=st.integers(1, 300),
    n_keys=st.integers(1, 300),
    width=st.floats(3.3, 13),
    first=st.integers(0, 100_000),
    has_words=st.booleans(),
)
@example(n_rows=3, n_keys=10, width=4.25, first=0, has_words=False)  # its title just fits
@example(n_rows=10, n_keys=111, width=4.25, first=0, has_words=True)
def test_a_mask_of_any_shape_is_labelled_without_overlaps(
    n_rows: int, n_keys: int, width: float, first: int, has_words: bool
) -> None:
    cells = np.ones((n_rows, n_keys), np.bool_)
    picture = full_picture(cells, words=words(n_keys) if has_words else {})
    picture = replace(picture, row_edges=picture.row_edges + first)
    figure = draw_mask_figure(picture, labels=ENGLISH, width=width)
    assert overlaps(figure) == []
    assert outside(figure) == []


def test_ticks_name_every_word_where_they_fit_and_otherwise_some_with_their_positions() -> None:
    picture = isolation_picture(2, 6, 1, 3, words=words(16))
    axes = draw_mask_figure(picture, labels=ENGLISH).axes[1]
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown == [
        *("<s>", "Which", "city", "首都", "↵", "government", "<U+1F5FC>", "$x_1$", "␣", "?"),
        *("<s>", "Which", "city", "首都", "↵", "government"),
    ]
    large = isolation_picture(5, 40, 1, 3, words=words(210))
    axes = draw_mask_figure(large, labels=ENGLISH, width=3.3).axes[1]
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown[:2] == ["0 <s>", "20 <s>"]


@pytest.mark.parametrize("name", THEMES)
def test_every_state_has_its_colour_and_differences_have_a_sign_too(name: str) -> None:
    theme = THEMES[name]
    kinds = (CLOSED, OPEN, UNKNOWN, LOST, LEAKED, BOTH)
    colors = state_colors(np.array([kinds], np.uint8), theme)[0]
    assert len({tuple(color) for color in colors.tolist()}) == len(kinds)
    assert len({SIGNS[kind] for kind in (LOST, LEAKED, BOTH)}) == 3
    states = np.full((6, 6), OPEN, np.uint8)
    states[1, 0], states[2, 1], states[3, 2] = LOST, LEAKED, BOTH
    picture = full_picture(np.ones((6, 6), np.bool_), states=states)
    axes = draw_mask_figure(picture, labels=ENGLISH, theme=theme).axes[1]
    places = {tuple(c.get_offsets()[0]) for c in axes.collections}
    assert {(0.5, 1.5), (1.5, 2.5), (2.5, 3.5)} <= places


def test_cells_too_small_for_signs_have_some_and_a_single_one_has_its_own() -> None:
    states = np.full((400, 400), OPEN, np.uint8)
    states[10, 20], states[200:300, 100:200], states[350, 300] = LOST, LEAKED, BOTH
    picture = full_picture(np.ones((400, 400), np.bool_), states=states)
    axes = draw_mask_figure(picture, labels=ENGLISH, width=3.3).axes[1]
    lost, leaked, both = (signs.get_offsets() for signs in axes.collections)
    n_cells = axes.images[0].get_array().shape[0]
    scale = 400 / n_cells
    assert np.abs(lost * scale - (20, 10)).max() <= 2 * scale
    assert np.abs(both * scale - (300, 350)).max() <= 2 * scale
    assert 20 < len(leaked) < 400


def legend(picture: MaskPicture, **options: Any) -> list[str]:
    paper = draw_mask_figure(picture, labels=ENGLISH, **options).axes[0]
    names = {text: key for key, text in ENGLISH.texts.items() if key.startswith("figure_")}
    return [names[t.get_text()] for t in paper.texts if t.get_text() in names]


def test_the_legend_names_what_the_picture_has_and_nothing_else() -> None:
    axes = ["figure_key_axis", "figure_query_axis"]
    shown = [key for key in legend(isolation_picture()) if "segment" not in key]
    lines = ["figure_boundary", "figure_generation"]
    assert shown == [*axes, "figure_open", "figure_closed", *lines]
    cells = np.tri(4, dtype=np.bool_)
    cells[2], cells[:, 1] = False, False
    marks = ["figure_empty_row", "figure_unseen_key"]
    assert legend(full_picture(cells)) == [*axes, "figure_open", "figure_closed", *marks]


def test_a_line_stands_at_every_border_and_another_where_generation_starts() -> None:
    picture = isolation_picture(3, 5, 1, 4)
    axes = draw_mask_figure(picture, labels=ENGLISH).axes[1]
    theme = THEMES["light"]
    found = {
        (line.get_color(), line.get_xdata()[0])
        for line in axes.lines
        if line.get_xdata()[0] == line.get_xdata()[1]
    }
    assert found == {(theme.boundary, 6), (theme.boundary, 12), (theme.generation, 17)}


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_joined_cells_keep_a_single_deviating_cell(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 60))
    limit = data.draw(st.integers(1, n))
    base, odd = data.draw(st.sampled_from([(OPEN, CLOSED), (CLOSED, OPEN), (OPEN, LOST)]))
    states = np.full((n, n), base, np.uint8)
    row, key = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    states[row, key] = odd
    joined = join_cells(full_picture(np.ones((n, n), np.bool_), states=states), limit)
    assert max(joined.states.shape) <= limit
    at = tuple(
        int(np.searchsorted(edges, place, side="right")) - 1
        for edges, place in ((joined.row_edges, row), (joined.key_edges, key))
    )
    assert joined.states[at] != base
    rest = np.delete(joined.states.ravel(), np.ravel_multi_index(at, joined.states.shape))
    assert (rest == base).all()


def test_joined_cells_keep_empty_rows_and_both_kinds_of_differences() -> None:
    states = np.full((8, 8), OPEN, np.uint8)
    states[0, 0], states[1, 1], states[4:6, 4:6] = LOST, LEAKED, UNKNOWN
    picture = full_picture(np.ones((8, 8), np.bool_), states=states)
    picture = replace(picture, empty_rows=np.arange(8) == 5)
    joined = join_cells(picture, 4)
    assert joined.states[0, 0] == BOTH
    assert joined.states[2, 2] == UNKNOWN
    assert joined.empty_rows.tolist() == [False, False, True, False]
    assert joined.row_edges.tolist() == [0, 2, 4, 6, 8]


def test_the_pixels_of_a_large_mask_show_one_open_cell() -> None:
    cells = np.zeros((2000, 2000), np.bool_)
    cells[777, 555] = True
    style = FigureStyle(labels=ENGLISH, width=3.3)
    sheet, area = draw_mask_sheet(full_picture(cells), style)
    sheet.figure.set_dpi(300)
    sheet.figure.canvas.draw()
    pixels = np.asarray(sheet.figure.canvas.buffer_rgba())[..., :3]
    x = int((area.left + area.width * 555.5 / 2000) * 300)
    y = int((area.top + area.height * 777.5 / 2000) * 300)
    closed = state_colors(np.array([[CLOSED]], np.uint8), THEMES["light"])[0, 0]
    near = pixels[y - 3 : y + 4, x - 3 : x + 4].reshape(-1, 3)
    assert (near != closed).any()
    assert sheet.figure.axes[1].images[0].get_array().shape[0] <= 1000


def test_an_impossible_size_and_an_unknown_theme_are_refused() -> None:
    picture = isolation_picture()
    with pytest.raises(UsageError, match=r"cannot be 0\.5 inches wide"):
        draw_mask_figure(picture, labels=ENGLISH, width=0.5)
    with pytest.raises(UsageError, match=r"does not fit into 13 by 2 inches"):
        draw_mask_figure(picture, labels=ENGLISH, width=13, height=2)
    with pytest.raises(UsageError, match="There is no theme 'drak'") as error:
        find_theme("drak")
    assert error.value.hint == "Did you mean dark?"
