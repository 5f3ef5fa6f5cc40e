"""The legend of a figure: a sign and a text per item, in as many rows as they need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

from msgspec import Struct

from flexinspect.figures.sheet import POINTS, Sheet, Typesetter
from flexinspect.figures.themes import sign_color

_GAP = 0.16
_SWATCH = 1.7  # widths of a sign, in line heights


class LegendItem(Struct, frozen=True):
    """An item: `kind` is the sign, with `marker` and `dashes` as matplotlib has them."""

    text: str
    kind: Literal["square", "dot", "half", "line", "mark"]
    color: str
    marker: str = ""
    dashes: Any = "solid"


class Legend(Struct, frozen=True):
    """Items with their places (x, row) relative to the legend's corner, and its size in inches."""

    items: tuple[tuple[LegendItem, float, int], ...]
    width: float
    height: float


def place_legend(
    items: Sequence[LegendItem], type_: Typesetter, points: float, room: float
) -> Legend:
    """Place items in one row if `room` inches suffice, else in as many columns as fit (0: one)."""
    step = type_.line_height(points)
    widths = [_SWATCH * step + 0.05 + type_.size(each.text, points) + _GAP for each in items]
    if sum(widths) - _GAP <= room:
        starts = accumulate(widths, initial=0.0)
        placed = tuple((each, x, 0) for each, x in zip(items, starts, strict=False))
        return Legend(placed, sum(widths) - _GAP, step)
    column = max(widths)
    n = min(max(int((room + _GAP) / column), 1), len(items))
    placed = tuple((each, (k % n) * column, k // n) for k, each in enumerate(items))
    return Legend(placed, n * column - _GAP, step * -(-len(items) // n))


def draw_legend(sheet: Sheet, legend: Legend, left: float, top: float, points: float) -> None:
    """Draw a legend with its upper left corner at (left, top)."""
    step = sheet.type.line_height(points)
    for item, x, row in legend.items:
        middle = top + (row + 0.5) * step
        _draw_sign(sheet, item, left + x, middle, step)
        sheet.text(left + x + _SWATCH * step + 0.05, middle, item.text, points)


def _draw_sign(sheet: Sheet, item: LegendItem, x: float, y: float, step: float) -> None:
    from matplotlib.patches import Polygon, Rectangle

    theme, width = sheet.theme, _SWATCH * step
    if item.kind == "line":
        sheet.line([x, x + width], [y, y], item.color, linewidth=1.1, linestyle=item.dashes)
        return
    side = 0.72 * step
    left, top = x + (width - side) / 2, y - side / 2
    center = (x + width / 2, y)
    if item.kind != "mark":
        edge = sign_color(item.color) if item.marker else "none"
        box = Rectangle((left, top), side, side, facecolor=item.color, edgecolor=edge, lw=0.4)
        sheet.paper.add_patch(box)
    if item.kind == "half":
        corners = [(left, top), (left + side, top + side), (left, top + side)]
        sheet.paper.add_patch(Polygon(corners, facecolor=theme.open, edgecolor="none"))
    size = side * POINTS
    if item.kind == "dot":
        style = {"markerfacecolor": theme.dot, "markeredgecolor": theme.dot_edge}
        sheet.paper.plot(*center, marker="o", markersize=0.5 * size, markeredgewidth=0.5, **style)
    elif item.marker:
        color = item.color if item.kind == "mark" else sign_color(item.color)
        sheet.paper.plot(*center, marker=item.marker, markersize=0.6 * size, color=color)
