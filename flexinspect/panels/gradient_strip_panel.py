"""The gradient strip: norms of the gradients, step by step, for every group of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.heatmap import CIVIDIS_MARKED, Palette, boxes, quantise
from flexinspect.drawing.plots import format_number
from flexinspect.drawing.text_lines import clip_text, join_blocks, line
from flexinspect.drawing.theme import Theme
from flexinspect.panels import timeline
from flexinspect.panels.base import (
    Help,
    Missing,
    Navigate,
    NoOptions,
    Panel,
    Picture,
    Request,
    require_training_facts,
)
from flexinspect.panels.source import Source
from flexinspect.panels.timeline import load_curve_span
from flexinspect.records.training_step import EXPLODING_NORM, VANISHING_NORM

NORMS_PALETTE = Palette([*CIVIDIS_MARKED.rgb, (58, 58, 62)], CIVIDIS_MARKED.ramp + "·")
"""From dark (vanishing) to bright (exploding), then red for NaN, and grey for what is not known."""

_BAD_LEVEL, _MISSING_LEVEL = NORMS_PALETTE.size - 2, NORMS_PALETTE.size - 1
_MAX_LABEL_WIDTH = 18


@dataclass(frozen=True, slots=True)
class GradientStripData:
    """Norms by group and point: NaN is a sick one, -1 one that was not measured."""

    groups: tuple[str, ...]
    norms: npt.NDArray[np.float64]
    span: timeline.CurveSpan


class GradientStripPanel(Panel[GradientStripData, NoOptions]):
    """A row of cells for each group of parameters, a column for each step or some of them."""

    name: ClassVar[str] = "gradstrip"
    title: ClassVar[str] = "Gradient strip"
    help: ClassVar[Help] = Help(
        "It shows the norm of the gradients of each layer or module, from the first step of the "
        "run to the last.",
        "Dark is 1e-6 and below, bright is 10 and above, red is NaN or infinite, grey is not "
        "measured; a column of several steps shows their highest; click one to go there.",
        "Look for rows that turn bright before the loss jumps, and for dark ones at the top: "
        "layers that the signal does not reach.",
    )
    depends_on_size: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> GradientStripData:
        """Read the norms in as many points as there are columns."""
        place = request.place
        declared = tuple(map(str, require_training_facts(source, place).get("groups", [])))
        groups = source.reader.added_groups(place.generation) or declared
        span = load_curve_span(
            source.reader, place, max(request.width - _label_width(request.width), 1)
        )
        sizes = (span.first, span.n_steps, span.n_points)
        found = source.reader.group_curve(place.generation, *sizes, place.branch)
        if not found:
            raise Missing("No gradient of this run is measured yet.")
        return GradientStripData(groups, _norm_table(found, len(groups), span.n_points), span)

    def describe(self, data: GradientStripData) -> list[str]:
        """Return a line for each group: its norm at the current step, and its range."""
        lines = [
            f"Gradient norms by group, {data.span.format_steps()}; now step {data.span.current}."
        ]
        width = max(map(len, data.groups), default=0)
        for group, row in zip(data.groups, data.norms, strict=True):
            known = row[np.isfinite(row) & (row >= 0)]
            now = _format_group_norm(row[data.span.current_point])
            low, high = (
                format_number(float(f(known))) if known.size else "-" for f in (np.min, np.max)
            )
            n_bad = int(np.isnan(row).sum())
            trouble = f"  not finite in {n_bad} of {len(row)}" if n_bad else ""
            lines.append(
                f"{escape_unprintable(group):<{width}}  {now:>8}  {low} to {high}{trouble}"
            )
        return lines

    def paint(self, data: GradientStripData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw as many groups as there is room for, from the current window of rows."""
        width, height = request.width, request.height
        label, span = _label_width(width), data.span
        rows = _choose_groups(data, height - 1)
        levels = norm_levels(data.norms[rows])
        cells = boxes(levels, NORMS_PALETTE, theme, cell_width=span.columns_per_point, marked=None)
        names = [_draw_group_name(data, row, label, theme) for row in rows]
        head = [("group", theme.style("muted")), (" ", theme.style("text"))]
        ruler = (
            " " * (span.current_point * span.columns_per_point + span.columns_per_point // 2) + "▼"
        )
        top = line([(clip_text("group", label), head[0][1]), (ruler, theme.style("chosen"))], width)
        plain = theme.style("text")
        body = [strip.crop(0, width) for strip in join_blocks(names, cells, plain)] if rows else []
        strips = [top, *(_fill_width(strip, width, theme) for strip in body)]
        more = len(data.groups) - len(rows)
        note = span.format_steps() + (f", {more} groups more" if more else "")
        return Picture(strips[:height], note, alarm=bool(np.isnan(data.norms).any()))

    def on_mouse(
        self, x: int, y: int, data: GradientStripData, request: Request[NoOptions], *, click: bool
    ) -> Navigate | None:
        """Go to the step of a column."""
        step = data.span.step_at(x - _label_width(request.width)) if click and y > 0 else None
        return None if step is None else Navigate(step=step)


def norm_levels(norms: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Return levels of `CELLS`: the logarithm between vanishing and exploding."""
    with np.errstate(all="ignore"):
        logs = np.log10(np.where(norms > 0, norms, VANISHING_NORM))
    levels = quantise(logs, math.log10(VANISHING_NORM), math.log10(EXPLODING_NORM), _BAD_LEVEL)
    levels[norms < 0] = _MISSING_LEVEL
    levels[~np.isfinite(norms)] = _BAD_LEVEL
    return levels


def _norm_table(
    found: Mapping[tuple[int, int], float], n_groups: int, n_points: int
) -> npt.NDArray[np.float64]:
    norms = np.full((n_groups, n_points), -1.0)
    for (point, group), norm in found.items():
        if 0 <= group < n_groups and 0 <= point < n_points:
            norms[group, point] = norm
    return norms


def _choose_groups(data: GradientStripData, room: int) -> list[int]:
    """Return the groups that are drawn: all, or those with the highest and lowest norms."""
    n_groups = len(data.groups)
    if n_groups <= room:
        return list(range(n_groups))
    norms = np.nan_to_num(data.norms, nan=np.inf, posinf=np.inf)
    high, low = norms.max(axis=1), np.where(norms < 0, np.inf, norms).min(axis=1)
    n_dark = max(room, 0) // 2
    bright = np.argsort(-high, kind="stable")[: max(room, 0) - n_dark].tolist()
    dark = [row for row in np.argsort(low, kind="stable").tolist() if row not in bright]
    return sorted([*bright, *dark[:n_dark]])


def _draw_group_name(data: GradientStripData, row: int, width: int, theme: Theme) -> Strip:
    style = theme.style("bad" if np.isnan(data.norms[row]).any() else "text")
    name = escape_unprintable(data.groups[row])
    short = name if len(name) < width else "…" + name[-(width - 2) :]
    return line([(clip_text(short, width), style)], width)


def _fill_width(strip: Strip, width: int, theme: Theme) -> Strip:
    missing = width - strip.cell_length
    if missing <= 0:
        return strip
    return Strip.join([strip, line([], missing, theme.style("text"))])


def _label_width(width: int) -> int:
    return min(_MAX_LABEL_WIDTH, max(width // 3, 1))


def _format_group_norm(value: float) -> str:
    if math.isnan(value):
        return "sick"
    return "-" if value < 0 else format_number(float(value))
