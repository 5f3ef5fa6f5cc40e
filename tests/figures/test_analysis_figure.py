"""The analysis figure says in numbers what its colours show."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.mask_pictures import paraphrase_segments

from flexinspect.core.languages import load_labels
from flexinspect.figures.analysis_figure import draw_analysis_figure, percent
from flexinspect.figures.themes import THEMES
from flexinspect.masks.known_masks import full, preset_mask
from flexinspect.masks.mask_analysis import analyse_mask

ENGLISH = load_labels("en")


def figure_of(shape: tuple[int, int, int, int], mask: Any = None, **options: Any) -> Any:
    segments = paraphrase_segments(*shape)
    mask, n = mask or preset_mask("segment-isolation", segments), segments[-1].stop
    analysis = analyse_mask(mask, n, n, segments=segments)
    return draw_analysis_figure(analysis, segments, **{"labels": ENGLISH, **options})


def texts(*arguments: Any, **options: Any) -> list[str]:
    return [text.get_text() for text in figure_of(*arguments, **options).axes[0].texts]


def test_each_phase_has_its_density_and_counts() -> None:
    shown = texts((3, 15, 2, 5))
    assert [each for each in shown if each.endswith("queries")] == ["49 queries", "5 queries"]
    own = 2 * (17 * 18 // 2) + 15 * 16 // 2
    reach = 49 * 50 // 2
    assert {f"{own}", f"{reach - own}", f"{5 * 49}", "100 %"} <= set(shown)
    assert percent(own / reach) in shown
    assert any("skips 0 % of the blocks of 128 × 128" in text for text in shown)


def test_cells_of_the_heat_map_have_counts_and_shares() -> None:
    shown = texts((3, 15, 0, 5))
    assert shown.count("120") == 3
    assert shown.count("75") == 3
    assert shown.count("0 %") == 3
    assert shown.count("Seg2") == 2


def test_a_mask_that_is_not_causal_is_measured_by_all_cells() -> None:
    shown = texts((3, 15, 0, 5), full(()))
    assert "rows: queries, columns: keys; shares of all cells" in shown
    assert shown.count("225") == 10  # nine pairs, and 5 × 45 cells of the bar of generation


def test_without_generated_tokens_or_segments_there_is_less_to_draw() -> None:
    segments = paraphrase_segments(2, 4, 0, 0)[:-1]
    analysis = analyse_mask(preset_mask("segment-isolation", segments), 8, 8, segments=segments)
    figure = draw_analysis_figure(analysis, labels=ENGLISH)
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert "Encoding" in shown
    assert "Generation" not in shown
    assert "Cells attended to, by segment" not in shown


def test_shares_round_neither_to_none_nor_to_all() -> None:
    assert [percent(x) for x in (0, 1e-6, 0.5, 0.123, 0.99999, 1)] == [
        *("0 %", "<0.1 %", "50 %", "12.3 %", ">99.9 %", "100 %")
    ]


@pytest.mark.parametrize("width", [3.3, 13.3])
@pytest.mark.parametrize("shape", [(1, 5, 0, 1), (5, 50, 2, 20), (40, 6, 0, 3)])
def test_texts_neither_overlap_nor_leave_the_sheet(
    width: float, shape: tuple[int, int, int, int]
) -> None:
    figure = figure_of(shape, labels=load_labels("zh"), theme=THEMES["dark"], width=width)
    figure.draw_without_rendering()
    boxes = [(t.get_text(), t.get_window_extent()) for t in figure.axes[0].texts]
    for text, box in boxes:
        assert min(box.x0, box.y0) >= -1, text
        assert max(box.x1 - figure.bbox.x1, box.y1 - figure.bbox.y1) <= 1, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
        assert not overlap, (one, other)
