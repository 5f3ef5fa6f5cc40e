"""Accuracies of methods with their intervals, against the number of paraphrases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from flexinspect.figures.figure_files import check_figure_path, save_figure
from flexinspect.figures.sheet import (
    PAD,
    Sheet,
    base_font_size,
    check_size,
    figure_settings,
    new_sheet,
    require_matplotlib,
    typesetter,
)
from flexinspect.figures.themes import THEMES, FigureTheme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000")
"""The colours of Okabe and Ito, told apart by readers who are colour-blind."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""Each method has a marker of its own, so that the lines differ without colour."""
_ASPECT = 0.58
_LABEL = "exact match, % (bars: 95 % interval)"


class AccuracySeries(Struct, frozen=True):
    """A method, with (number of paraphrases, share, low, high) for each number, ascending."""

    method: str
    points: tuple[tuple[int, float, float, float], ...]


def draw_accuracy_figure(
    series: Sequence[AccuracySeries],
    title: str,
    *,
    theme: FigureTheme = THEMES["light"],
    width: float = 6.5,
    figure: Figure | None = None,
) -> Figure:
    """Draw a line for each method, or with one number of paraphrases a bar for each.

    Raises `UsageError` when matplotlib or a font is missing, or for an impossible width.
    """
    require_matplotlib()
    check_size(width, None)
    size = base_font_size(width)
    with figure_settings():
        type_ = typesetter((title, _LABEL, *(one.method for one in series)))
        heading = type_.wrap(title, width - 2 * PAD, size * 1.15, bold=True)
        top = PAD + len(heading) * type_.line_height(size * 1.15) + 0.1
        sheet = new_sheet(width, top + width * _ASPECT, theme, type_, figure=figure)
        sheet.lines(PAD, PAD, heading, size * 1.15, bold=True)
        is_one_count = all(len(one.points) == 1 for one in series)
        left = max(type_.size(one.method, size) for one in series) + 0.25 if is_one_count else 0.6
        bottom = 0.5
        right = 0.3 if is_one_count else 1.35
        axes = sheet.axes(left, top, width - left - right, width * _ASPECT - bottom)
        draw = _draw_bars if is_one_count else _draw_lines
        draw(axes, series, theme)
        _style_axes(axes, sheet, size)
    return sheet.figure


def save_accuracy_figure(
    series: Sequence[AccuracySeries], title: str, path: str | Path, *, dpi: int = 300
) -> Path:
    """Draw the figure into a file by its suffix; return the path.

    Raises as `draw_accuracy_figure` and `save_figure` do.
    """
    check_figure_path(path)
    return save_figure(draw_accuracy_figure(series, title), path, title=title, dpi=dpi)


def _draw_lines(axes: Any, series: Sequence[AccuracySeries], theme: FigureTheme) -> None:
    n, step = len(series), 0.05
    for index, one in enumerate(series):
        shift = (index - (n - 1) / 2) * step  # so that equal accuracies do not hide each other
        xs = [count + shift for count, *_ in one.points]
        axes.errorbar(xs, *_values(one), **_style(index), markersize=4, linewidth=1.1)
    axes.set_xlabel("paraphrases", color=theme.ink)
    axes.set_ylabel(_LABEL, color=theme.ink)
    axes.set_xticks([count for count, *_ in series[0].points])
    axes.legend(
        list(axes.containers),
        [one.method for one in series],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        labelcolor=theme.ink,
        fontsize=7,
    )


def _draw_bars(axes: Any, series: Sequence[AccuracySeries], theme: FigureTheme) -> None:
    for index, one in enumerate(series):
        (value,), errors = _values(one)
        place = len(series) - 1 - index
        axes.errorbar(
            [value], [place], xerr=errors, **_style(index), markersize=5, linestyle="none"
        )
        axes.text(value, place + 0.18, f"{value:.1f}", ha="center", color=theme.ink, fontsize=7)
    axes.set_yticks(range(len(series)), [one.method for one in reversed(series)])
    axes.set_ylim(-0.6, len(series) - 0.3)
    axes.set_xlabel(_LABEL, color=theme.ink)


def _values(series: AccuracySeries) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Return the shares in percent, and how far their intervals reach below and above."""
    values = [100 * value for _, value, _, _ in series.points]
    low = [100 * (value - low) for _, value, low, _ in series.points]
    high = [100 * (high - value) for _, value, _, high in series.points]
    return values, ([max(each, 0.0) for each in low], [max(each, 0.0) for each in high])


def _style(index: int) -> dict[str, Any]:
    color = COLORS[index % len(COLORS)]
    return {
        "color": color,
        "marker": MARKERS[index % len(MARKERS)],
        "capsize": 2,
        "elinewidth": 0.8,
    }


def _style_axes(axes: Any, sheet: Sheet, size: float) -> None:
    theme = sheet.theme
    axes.set_facecolor(theme.background)
    axes.grid(True, color=theme.frame, linewidth=0.3, alpha=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.ink, labelsize=size * 0.9)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(size)
    for side in axes.spines.values():
        side.set_color(theme.frame)
