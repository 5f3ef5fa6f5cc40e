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

_DECADES = 3.0
"""Powers of ten below the tolerance that the colours span, and at least as many above it."""

_HISTOGRAM_HEIGHT = 5


def difference_picture(
    maps: Mapping[str, Errors], tolerance: float, theme: Theme, *, width: int, height: int
) -> list[Strip]:
    """Draw the errors of a kernel in at most `width` cells.

    `maps` has the arrays of `KernelEvaluation.maps`: "rows" (rows, head size), "heads" (heads,
    rows) and "errors", all of them. A heat map is at most `height` lines; a larger array is
    reduced to the largest error of each of its parts. NaN is red.
    """
    scale = _ErrorScale(tolerance, maps["errors"])
    strips = [_scale_line(scale, tolerance, theme, width), Strip([], 0)]
    for name, down, across in (("rows", "row", "column of the head"), ("heads", "head", "row")):
        values = maps[name]
        text = f"largest error by {down} (down, {values.shape[0]}) and {across} "
        text += f"(across, {values.shape[1]})"
        strips.append(line([(text, theme.style("muted"))], width))
        levels = quantise_marked(
            scale.positions(reduce_max(values, 2 * height, width)), -1.0, 1.0, CIVIDIS_MARKED
        )
        if levels.shape[0] <= height:  # a line for each row, where there is room for it
            levels = np.repeat(levels, 2, axis=0)
        strips += [*heat(levels, CIVIDIS_MARKED, theme), Strip([], 0)]
    return [*strips, *_histogram(maps["errors"], scale, tolerance, theme, width)]


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


class _ErrorScale:
    """Errors on a scale from -1 to 1, logarithmic on both sides of the tolerance, which is at 0.

    -1 is 3 powers of ten below the tolerance. 1 is the largest error, or 3 powers above if it is
    smaller: so parts of a picture differ however large the errors are.
    """

    def __init__(self, tolerance: float, errors: Errors) -> None:
        self._middle = math.log10(tolerance) if 0 < tolerance < math.inf else -6.0
        finite = errors[np.isfinite(errors)]
        largest = float(finite.max()) if finite.size else 0.0
        above = math.log10(largest) - self._middle if largest > 0 else 0.0
        self._above = max(above, _DECADES)

    @property
    def ends(self) -> tuple[float, float]:
        """The errors at -1 and 1."""
        return 10 ** (self._middle - _DECADES), 10 ** (self._middle + self._above)

    def positions(self, values: Errors) -> npt.NDArray[np.float64]:
        """Return the place of each error; NaN stays, and 0 is below the scale."""
        positive = np.where(values > 0, values, np.where(np.isnan(values), np.nan, 1e-300))
        logs = np.log10(positive.astype(np.float64)) - self._middle
        places: npt.NDArray[np.float64] = np.where(logs > 0, logs / self._above, logs / _DECADES)
        return places


def _scale_line(scale: _ErrorScale, tolerance: float, theme: Theme, width: int) -> Strip:
    muted: Style = theme.style("muted")
    low, high = map(format_number, scale.ends)
    spans = [(f"error {low} ", muted), *draw_scale(CIVIDIS_MARKED, theme)]
    spans.append((f" {high}; the middle is the tolerance, {format_number(tolerance)}", muted))
    return line(spans, width)


def _histogram(
    errors: Errors, scale: _ErrorScale, tolerance: float, theme: Theme, width: int
) -> list[Strip]:
    finite = errors[np.isfinite(errors)]
    n_columns = min(width, 60)
    places = np.clip(scale.positions(finite), -1.0, 1.0)
    counts, _ = np.histogram(places, bins=n_columns, range=(-1.0, 1.0))
    above = int((finite > tolerance).sum())
    low, high = map(format_number, scale.ends)
    text = f"histogram of {errors.size} errors, {low} to {high}, {above} above the tolerance (┴)"
    title = line([(text, theme.style("muted"))], width)
    bars = timeline([float(n) or None for n in counts], n_columns, _HISTOGRAM_HEIGHT, theme)
    axis = "─" * (n_columns // 2) + "┴" + "─" * (n_columns - n_columns // 2 - 1)
    return [title, *bars, line([(axis, theme.style("muted"))], n_columns)]
