"""Pictures of the difference of two arrays: heat maps against a tolerance, and a histogram."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from rich.style import Style
from textual.strip import Strip

from flexinspect.drawing.heatmap import CIVIDIS_MARKED, draw_scale, heat, quantise_marked
from flexinspect.drawing.plots import format_number, timeline
from flexinspect.drawing.text_lines import line
from flexinspect.drawing.theme import Theme

Errors = npt.NDArray[np.float32]

_DECADES_BELOW, _DECADES_ABOVE = 3.0, 3.0
"""Powers of ten around the tolerance that the colours span."""

_HISTOGRAM_HEIGHT = 5


def difference_picture(
    maps: Mapping[str, Errors], tolerance: float, theme: Theme, *, width: int, height: int
) -> list[Strip]:
    """Draw the errors of a kernel in at most `width` cells.

    `maps` has the arrays of `KernelEvaluation.maps`: "rows" (rows, head size), "heads" (heads,
    rows) and "errors", all of them. A heat map is at most `height` lines; a larger array is
    reduced to the largest error of each of its parts. NaN is red.
    """
    low, high = _bounds(tolerance)
    strips = [_scale_line(low, high, tolerance, theme, width), Strip([], 0)]
    for name, down, across in (("rows", "row", "column of the head"), ("heads", "head", "row")):
        values = maps[name]
        text = f"largest error by {down} (down, {values.shape[0]}) and {across} "
        text += f"(across, {values.shape[1]})"
        strips.append(line([(text, theme.style("muted"))], width))
        levels = quantise_marked(
            _decades(reduce_max(values, 2 * height, width)), low, high, CIVIDIS_MARKED
        )
        if levels.shape[0] <= height:  # a line for each row, where there is room for it
            levels = np.repeat(levels, 2, axis=0)
        strips += [*heat(levels, CIVIDIS_MARKED, theme), Strip([], 0)]
    return [*strips, *_histogram(maps["errors"], low, high, tolerance, theme, width)]


def reduce_max(values: Errors, n_rows: int, n_columns: int) -> Errors:
    """Return the largest value of each part of an array of at most (n_rows, n_columns) parts.

    A part with NaN is NaN.
    """
    for axis, limit in ((0, n_rows), (1, n_columns)):
        size = values.shape[axis]
        if size > limit:
            starts = np.arange(limit) * size // limit
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def _bounds(tolerance: float) -> tuple[float, float]:
    middle = math.log10(tolerance) if 0 < tolerance < math.inf else -6.0
    return middle - _DECADES_BELOW, middle + _DECADES_ABOVE


def _decades(values: Errors) -> npt.NDArray[np.float64]:
    """log10 of errors; the lowest finite number for 0, which is no error."""
    positive = np.where(values > 0, values, np.where(np.isnan(values), np.nan, 1e-300))
    logs: npt.NDArray[np.float64] = np.log10(positive.astype(np.float64))
    return logs


def _scale_line(low: float, high: float, tolerance: float, theme: Theme, width: int) -> Strip:
    muted: Style = theme.style("muted")
    ends = [format_number(10**end) for end in (low, high)]
    spans = [(f"error {ends[0]} ", muted), *draw_scale(CIVIDIS_MARKED, theme)]
    spans.append((f" {ends[1]}; the middle is the tolerance, {format_number(tolerance)}", muted))
    return line(spans, width)


def _histogram(
    errors: Errors, low: float, high: float, tolerance: float, theme: Theme, width: int
) -> list[Strip]:
    finite = errors[np.isfinite(errors)]
    n_columns = min(width, 60)
    logs = np.clip(_decades(finite), low, high)
    counts, _ = np.histogram(logs, bins=n_columns, range=(low, high))
    above = int((finite > tolerance).sum())
    text = f"histogram of {errors.size} errors from {format_number(10**low)} to "
    text += f"{format_number(10**high)} (logarithmic), {above} above the tolerance"
    title = line([(text, theme.style("muted"))], width)
    bars = timeline([float(n) or None for n in counts], n_columns, _HISTOGRAM_HEIGHT, theme)
    axis = "─" * (n_columns // 2) + "┴" + "─" * (n_columns - n_columns // 2 - 1)
    return [title, *bars, line([(axis, theme.style("muted"))], n_columns)]
