"""The analysis figure says in numbers what its colours show."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flexinspect.core.languages import load_labels
from flexinspect.figures.analysis_figure import (
    PhaseNumbers,
    SegmentTable,
    draw_analysis_figure,
    percent,
)
from flexinspect.figures.themes import THEMES

ENCODING = PhaseNumbers(n_rows=49, own=426, others=0, closed=799)
GENERATION = PhaseNumbers(n_rows=5, own=15, others=245, closed=0)


def table(n: int) -> SegmentTable:
    cells = np.tril(np.full((n, n), 225))
    names = tuple(f"Seg{number}" for number in range(1, n + 1))
    return SegmentTable(names, np.diag(np.full(n, 120)), cells)


def texts(**options: object) -> list[str]:
    numbers = {"encoding": ENCODING, "generation": GENERATION, "table": table(3), **options}
    labels = load_labels("en")
    figure = draw_analysis_figure(**numbers, labels=labels, title="a mask")  # type: ignore[arg-type]
    return [text.get_text() for text in figure.axes[0].texts]


def test_each_phase_has_its_density_and_counts() -> None:
    shown = texts()
    assert [each for each in shown if "queries" in each][:2] == ["49 queries", "5 queries"]
    assert {"34.8 %", "100 %", "426", "799", "245"} <= set(shown)


def test_cells_of_the_heat_map_have_counts_and_shares() -> None:
    shown = texts()
    assert shown.count("120") == 3
    assert shown.count("53.3 %") == 3
    assert shown.count("0 %") == 3


def test_a_cell_after_its_query_is_pointed_out() -> None:
    future = PhaseNumbers(n_rows=49, own=426, others=0, closed=799, future=2)
    shown = texts(encoding=future)
    assert "49 queries; cells after the query: 2" in shown
    assert "after the query" in shown
    assert "after the query" not in texts()


def test_without_generated_tokens_there_is_one_bar() -> None:
    assert "Generation" not in texts(generation=None)


def test_shares_round_neither_to_none_nor_to_all() -> None:
    assert [percent(x) for x in (0, 1e-6, 0.5, 0.123, 0.99999, 1)] == [
        *("0 %", "<0.1 %", "50 %", "12.3 %", ">99.9 %", "100 %")
    ]


@pytest.mark.parametrize("width", [3.3, 6.5, 13.3])
@pytest.mark.parametrize("n", [1, 6, 40])
def test_texts_neither_overlap_nor_leave_the_sheet(width: float, n: int) -> None:
    figure = draw_analysis_figure(
        ENCODING,
        GENERATION,
        table(n),
        labels=load_labels("zh"),
        title="掩码 segment-isolation",
        theme=THEMES["dark"],
        width=width,
        notes=["34.5 %"],
    )
    figure.draw_without_rendering()
    boxes = [(t.get_text(), t.get_window_extent()) for t in figure.axes[0].texts]
    for text, box in boxes:
        assert min(box.x0, box.y0) >= -1, text
        assert max(box.x1 - figure.bbox.x1, box.y1 - figure.bbox.y1) <= 1, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
        assert not overlap, (one, other)
