"""Plots of block characters (bars, sparklines, timelines), and short forms of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from textual.strip import Strip

from flexinspect.drawing.text_lines import Pen, align_right, merge_spans
from flexinspect.drawing.theme import Theme

_HORIZONTAL_BLOCKS = " ▏▎▍▌▋▊▉█"
_VERTICAL_BLOCKS = " ▁▂▃▄▅▆▇█"
MARK = "┊"
"""Stands above the value of the marked column."""


def bar(fraction: float, width: int) -> str:
    """Return a bar over `fraction` of `width` cells, to an eighth of a cell; "?" for NaN.

    The fraction is clipped to 0 and 1. One above zero is at least an eighth of a cell.
    """
    if width <= 0:
        return ""
    if math.isnan(fraction):
        return "?".ljust(width)
    eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
    if fraction > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_HORIZONTAL_BLOCKS[rest] if rest else "")).ljust(width)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return one character per value in `width` characters, scaled as in `timeline`.

    With more values than characters, each shows the highest value of a bucket. None is a blank.
    NaN or Inf is a "!", also in a bucket with finite values.
    """
    columns = _bucket_columns(values, width)
    heights = zip(columns, _scale_to_eighths(columns, 8), strict=True)
    chars = ("!" if _is_nonfinite(value) else _VERTICAL_BLOCKS[height] for value, height in heights)
    return "".join(chars).ljust(max(width, 0))


def timeline(
    values: Sequence[float | None],
    width: int,
    height: int,
    theme: Theme,
    *,
    marked: int | None = None,
    style: str = "accent",
) -> list[Strip]:
    """Draw values as columns of eighth blocks: `height` strips of `width` cells.

    The scale goes from 0, or the lowest value if that is negative, to the highest value. With
    more values than columns, each column shows the highest value of a bucket. None is an empty
    column, a finite value is at least an eighth of a cell high, and NaN or Inf is a "!" at the
    foot. `marked` is the index of a value: its column is drawn in the colour of text, with a dotted
    line above the value; reversed without colours.
    """
    columns = _bucket_columns(values, width)
    heights = _scale_to_eighths(columns, 8 * height)
    cursor = None
    if marked is not None and 0 <= marked < len(values) and columns:
        # The inverse of `_bucket_columns`.
        cursor = ((marked + 1) * len(columns) - 1) // len(values)
    strips = []
    for row in range(height - 1, -1, -1):
        cells: list[tuple[str, str]] = []
        for column, (value, eighths) in enumerate(zip(columns, heights, strict=True)):
            text, name = _VERTICAL_BLOCKS[min(max(eighths - 8 * row, 0), 8)], style
            if row == 0 and _is_nonfinite(value):
                text, name = "!", "bad"
            if column == cursor:
                text, name = _mark_cell(text, theme)
            cells.append((text, name))
        strips.append(Pen(theme, width).line(*merge_spans(cells)))
    return strips


def _mark_cell(text: str, theme: Theme) -> tuple[str, str]:
    """Return a cell of the marked column and its style; the value stays visible."""
    if theme.no_color or text == "!":
        return text, "cursor"
    return (MARK, "muted") if text == " " else (text, "strong")


def format_number(value: float | None, width: int = 0) -> str:
    """Return a number with two or three significant digits: "0.0032", "12.4"; "-" for None.

    With a `width` it is right-aligned in that many cells, with fewer digits where they do not
    fit, and "…" where no form fits: a number is never cut to another number.
    """
    forms = _number_forms(value)
    if width <= 0:
        return forms[0]
    return align_right(next((form for form in forms if len(form) <= width), "…"), width)


def _number_forms(value: float | None) -> list[str]:
    if value is None:
        return ["-"]
    size = abs(value)
    if size == 0 or not math.isfinite(size):
        return ["0" if size == 0 else str(float(value))]
    mantissa, exponent = f"{value:.0e}".split("e")
    whole = [f"{value:.0f}"] if 1 <= size < 1e5 else []
    if size < 1e-3 or size >= 1e5:
        best = f"{value:.1e}"
    elif size >= 100:
        best = f"{value:.0f}"
    else:
        best = f"{value:.3g}" if size >= 0.01 else f"{value:.2g}"
    return [best, *whole, f"{mantissa}e{int(exponent)}"]


def finite_bounds(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Return the lowest and the highest finite value, None without any."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return min(finite, default=None), max(finite, default=None)


def _is_nonfinite(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def _bucket_columns(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return the maximum of each of at most `width` buckets; NaN for one with NaN or Inf."""
    count = len(values)
    buckets = min(count, max(width, 0))
    edges = [bucket * count // buckets for bucket in range(buckets)] + [count]
    columns: list[float | None] = []
    for start, stop in pairwise(edges):
        known = [value for value in values[start:stop] if value is not None]
        columns.append(max(known, default=None) if all(map(math.isfinite, known)) else math.nan)
    return columns


def _scale_to_eighths(columns: Sequence[float | None], top: int) -> list[int]:
    """Return the height of each column, 1 to `top` eighths; 0 for None, NaN and Inf."""
    lowest, highest = finite_bounds(columns)
    low, high = min(0.0, lowest or 0.0), max(0.0, highest or 0.0)
    span = high / 2 - low / 2 or 1.0  # halves: the difference itself may overflow
    return [
        max(round((value / 2 - low / 2) / span * top), min(top, 1))
        if value is not None and math.isfinite(value)
        else 0
        for value in columns
    ]
