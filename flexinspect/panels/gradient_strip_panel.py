"""The gradient strip: the norm of the gradients of every parameter group over the training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.heatmap import CIVIDIS_MISSING, boxes, quantise
from flexinspect.drawing.plots import format_number
from flexinspect.drawing.text_lines import Pen, clip_text, join_blocks
from flexinspect.drawing.theme import Theme
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
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import StepWindow, load_whole_run
from flexinspect.records.training_step import EXPLODING_NORM, VANISHING_NORM

_BAD_LEVEL, _MISSING_LEVEL = CIVIDIS_MISSING.size - 2, CIVIDIS_MISSING.size - 1
_MAX_LABEL_WIDTH = 18


@dataclass(frozen=True, slots=True)
class GradientStripData:
    """Norms, float64 (groups, points): NaN is non-finite, -1 was not measured."""

    groups: tuple[str, ...]
    norms: npt.NDArray[np.float64]
    window: StepWindow


class GradientStripPanel(Panel[GradientStripData, NoOptions]):
    """A row of cells for each parameter group, a column for each step or bucket of steps."""

    name = "gradstrip"
    title = "Gradient strip"
    help = Help(
        "It shows the norm of the gradients of each layer or module, from the first step of the "
        "run to the last.",
        "Dark is 1e-6 and below, bright is 10 and above, red is NaN or infinite, grey is not "
        "measured; a column of several steps shows their highest norm; click a column to go there.",
        "Look for rows that turn bright before the loss jumps, and for dark rows at the top: "
        "layers that the gradient does not reach.",
    )
    depends_on_size = True

    def load(self, source: Source, request: Request[NoOptions]) -> GradientStripData:
        """Read the norms in as many points as there are columns."""
        place = request.place
        declared = tuple(map(str, require_training_facts(source, place).get("groups", [])))
        groups = source.reader.added_groups(place.generation) or declared
        window = load_whole_run(source.reader, place, _strip_width(request.width))
        norms = source.reader.group_curve(
            place.generation, window.start, len(window), window.n_points, place.branch
        )
        if not norms:
            raise Missing("No gradient of this run is measured yet.")
        return GradientStripData(groups, _norm_table(norms, len(groups), window.n_points), window)

    def describe(self, data: GradientStripData) -> list[str]:
        """Return a line for each group: its norm at the current step, and its range."""
        steps, current_step = data.window.format_steps(), data.window.current
        lines = [f"Gradient norms by group, {steps}; current step {current_step}."]
        width = max(map(len, data.groups), default=0)
        for group, row in zip(data.groups, data.norms, strict=True):
            measured = row[np.isfinite(row) & (row >= 0)]
            current = _format_group_norm(row[data.window.current_point])
            low, high = (
                format_number(float(f(measured))) if measured.size else "-"
                for f in (np.min, np.max)
            )
            n_bad = int(np.isnan(row).sum())
            bad = f"  non-finite in {n_bad} of {len(row)}" if n_bad else ""
            name = escape_unprintable(group)
            lines.append(f"{name:<{width}}  {current:>8}  {low} to {high}{bad}")
        return lines

    def paint(self, data: GradientStripData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw all groups, or if there is no room those with the highest and lowest norms."""
        pen, window = Pen(theme, request.width), data.window
        rows, columns = _choose_groups(data, request.height - 1), _strip_width(request.width)
        label = pen.resize(_label_width(request.width))
        each = window.columns_per_point(columns)
        cells = boxes(norm_levels(data.norms[rows]), CIVIDIS_MISSING, theme, cell_width=each)
        names = [_draw_group_name(data, row, label) for row in rows]
        mark = " " * window.current_column(columns) + "▼"
        body = join_blocks(names, cells, pen.style("text")) if rows else []
        strips = [pen.line((clip_text("group", label.width), "muted"), (mark, "chosen"))]
        strips += [strip.adjust_cell_length(pen.width, pen.style("text")) for strip in body]
        more = len(data.groups) - len(rows)
        note = window.format_steps() + (f", {more} more groups" if more else "")
        return Picture(strips[: request.height], note, alarm=bool(np.isnan(data.norms).any()))

    def on_click(
        self, x: int, y: int, data: GradientStripData, request: Request[NoOptions]
    ) -> Navigate | None:
        """Go to the step of a column."""
        column = x - _label_width(request.width) if y > 0 else -1
        step = data.window.step_at(column, _strip_width(request.width))
        return None if step is None else Navigate(step=step)


def norm_levels(norms: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Return levels of `CIVIDIS_MISSING`, logarithmic from vanishing to exploding norms."""
    with np.errstate(all="ignore"):
        logs = np.log10(np.where(norms > 0, norms, VANISHING_NORM))
    levels = quantise(logs, math.log10(VANISHING_NORM), math.log10(EXPLODING_NORM), _BAD_LEVEL)
    levels[norms < 0] = _MISSING_LEVEL
    levels[~np.isfinite(norms)] = _BAD_LEVEL
    return levels


def _norm_table(
    norms: Mapping[tuple[int, int], float], n_groups: int, n_points: int
) -> npt.NDArray[np.float64]:
    """Return norms by (point, group) as an array (groups, points)."""
    table = np.full((n_groups, n_points), -1.0)
    for (point, group), norm in norms.items():
        if 0 <= group < n_groups and 0 <= point < n_points:
            table[group, point] = norm
    return table


def _choose_groups(data: GradientStripData, room: int) -> list[int]:
    """Return the groups to draw: all, or those with the highest and lowest norms."""
    n_groups = len(data.groups)
    if n_groups <= room:
        return list(range(n_groups))
    norms = np.nan_to_num(data.norms, nan=np.inf, posinf=np.inf)
    high, low = norms.max(axis=1), np.where(norms < 0, np.inf, norms).min(axis=1)
    n_dark = max(room, 0) // 2
    bright = np.argsort(-high, kind="stable")[: max(room, 0) - n_dark].tolist()
    dark = [row for row in np.argsort(low, kind="stable").tolist() if row not in bright]
    return sorted([*bright, *dark[:n_dark]])


def _draw_group_name(data: GradientStripData, row: int, pen: Pen) -> Strip:
    name = escape_unprintable(data.groups[row])
    short = name if len(name) < pen.width else "…" + name[-(pen.width - 2) :]
    return pen.line((short, "bad" if np.isnan(data.norms[row]).any() else "text"))


def _strip_width(width: int) -> int:
    return max(width - _label_width(width), 1)


def _label_width(width: int) -> int:
    return min(_MAX_LABEL_WIDTH, max(width // 3, 1))


def _format_group_norm(value: float) -> str:
    if math.isnan(value):
        return "NaN/Inf"
    return "-" if value < 0 else format_number(float(value))
