"""The learning rates of an optimizer's parameter groups: a curve for each that is another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from textual.strip import Strip

from flexinspect.panels.parts.curves import CurveSpan, draw_curve
from flexinspect.panels.parts.windows import Area
from flexinspect.trace.trainingqueries import CurvePoint
from flexinspect.widgets.lines import line
from flexinspect.widgets.look import Theme
from flexinspect.widgets.plots import format_number

Curve = Mapping[int, float | None]

CURVE_STYLES = ("good", "accent", "strong")
"""Of the first curve, the second and so on, which lie below each other."""


def rate_curves(points: Mapping[int, CurvePoint]) -> list[tuple[str, Curve]]:
    """Return each curve by point, with the numbers of the groups that have it: "0-2, 4"."""
    curves: list[tuple[Curve, list[int]]] = []
    for group in range(max((len(point.rates) for point in points.values()), default=0)):
        values = {at: _group_rate(point, group) for at, point in points.items()}
        same = next((groups for curve, groups in curves if curve == values), None)
        if same is None:
            curves.append((values, [group]))
        else:
            same.append(group)
    return [(_format_groups(groups), curve) for curve, groups in curves]


def format_range(curve: Curve) -> str:
    """Return "0.001 to 0.1", or one number for a rate that stays."""
    low, high = map(format_number, _bounds(curve))
    return low if low == high else f"{low} to {high}"


def _bounds(curve: Curve) -> tuple[float | None, float | None]:
    known = [value for value in curve.values() if value is not None]
    return min(known, default=None), max(known, default=None)


def draw_rates(
    curves: list[tuple[str, Curve]], span: CurveSpan, area: Area, theme: Theme
) -> list[Strip]:
    """Draw curves below each other, as many as there are rows, under a title that tells each."""
    shown = curves[: max(area.height, 0)]
    strips: list[Strip] = []
    for at, (_, curve) in enumerate(shown):
        height = area.height * (at + 1) // len(shown) - area.height * at // len(shown)
        rows = Area(area.x, area.y, area.width, height)
        strips += draw_curve(curve, span, rows, theme, style=CURVE_STYLES[at % len(CURVE_STYLES)])
    more = f" and {len(curves) - len(shown)} more" if len(shown) < len(curves) else ""
    return [_draw_title(shown, more, area.width, theme), *strips]


def _draw_title(curves: Sequence[tuple[str, Curve]], more: str, width: int, theme: Theme) -> Strip:
    """Return the range of each curve, or the highest rate of each where there is no room."""
    head, texts = "learning rate, group", [f" {of}: {format_range(curve)}" for of, curve in curves]
    if len(head) + sum(map(len, texts)) + len(more) > width:
        head = "learning rate up to"
        texts = [f" {of}: {format_number(_bounds(curve)[1])}" for of, curve in curves]
    parts = [(head, theme.style("title"))]
    parts += [
        (text, theme.style(CURVE_STYLES[at % len(CURVE_STYLES)])) for at, text in enumerate(texts)
    ]
    return line([*parts, (more, theme.style("muted"))], width, theme.style("text"))


def _group_rate(point: CurvePoint, group: int) -> float | None:
    return point.rates[group] if group < len(point.rates) else None


def _format_groups(groups: list[int]) -> str:
    runs = groupby(enumerate(groups), key=lambda pair: pair[1] - pair[0])
    ends = [[group for _, group in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)
