"""The figure of accuracies: what it draws, and that its files are the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexinspect.core.errors import UsageError
from flexinspect.figures.accuracy_figure import (
    AccuracySeries,
    draw_accuracy_figure,
    save_accuracy_figure,
)

LINES = (
    AccuracySeries("flex", ((1, 0.8, 0.7, 0.9), (3, 0.95, 0.9, 0.98))),
    AccuracySeries("majority", ((1, 0.8, 0.7, 0.9), (3, 0.9, 0.85, 0.94))),
)
BARS = tuple(AccuracySeries(one.method, one.points[1:]) for one in LINES)


def test_each_method_is_a_line_with_its_intervals() -> None:
    figure = draw_accuracy_figure(LINES, "Exact match")
    axes = figure.axes[-1]
    assert len(axes.containers) == 2
    for series, container in zip(LINES, axes.containers, strict=True):
        line, _, (bars,) = container.lines
        assert list(line.get_ydata()) == pytest.approx([100 * p[1] for p in series.points])
        ends = [end for segment in bars.get_segments() for end in segment[:, 1]]
        assert ends == pytest.approx([100 * end for point in series.points for end in point[2:]])
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["flex", "majority"]
    markers = {container.lines[0].get_marker() for container in axes.containers}
    assert len(markers) == 2


def test_with_one_number_of_paraphrases_each_method_has_a_row() -> None:
    axes = draw_accuracy_figure(BARS, "Exact match").axes[-1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["majority", "flex"]
    assert [text.get_text() for text in axes.texts] == ["95.0", "90.0"]


@pytest.mark.parametrize("series", [LINES, BARS], ids=["lines", "bars"])
def test_files_are_the_same_each_time(series: tuple[AccuracySeries, ...], tmp_path: Path) -> None:
    written = [
        save_accuracy_figure(series, "a < b", tmp_path / name).read_bytes()
        for name in ("a.svg", "b.svg")
    ]
    assert written[0] == written[1]
    assert b"flex" in written[0]
    with pytest.raises(UsageError, match="no suffix"):
        save_accuracy_figure(series, "title", tmp_path / "a.bmp")
