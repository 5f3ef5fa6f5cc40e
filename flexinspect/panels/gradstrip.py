"""The gradient strip: norms of the gradients, step by step, for every group of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from textual.strip import Strip

from flexinspect.colormap import CIVIDIS_MARKED, Palette, quantise
from flexinspect.panels.base import Go, Help, Missing, NoOptions, Panel, Picture, Request
from flexinspect.panels.parts import curves
from flexinspect.panels.parts.curves import span_of
from flexinspect.panels.parts.trainingrun import run_of
from flexinspect.panels.source import Source
from flexinspect.text import visible
from flexinspect.trainingfacts import EXPLOSION, VANISHING
from flexinspect.widgets.heat import boxes
from flexinspect.widgets.lines import beside, clipped, line
from flexinspect.widgets.look import Look
from flexinspect.widgets.plots import number

CELLS = Palette([*CIVIDIS_MARKED.rgb, (58, 58, 62)], CIVIDIS_MARKED.ramp + "·")
"""From dark (vanishing) to bright (exploding), then red for NaN, and grey for what is not known."""

_SICK, _NOTHING = CELLS.size - 2, CELLS.size - 1
_LABEL = 18


@dataclass(frozen=True, slots=True)
class StripData:
    """Norms by group and point: NaN is a sick one, -1 one that was not measured."""

    groups: tuple[str, ...]
    norms: npt.NDArray[np.float64]
    span: curves.Span


class GradientStripPanel(Panel[StripData, NoOptions]):
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
    sized: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> StripData:
        """Read the norms in as many points as there are columns."""
        place = request.place
        declared = tuple(map(str, run_of(source, place).get("groups", [])))
        groups = source.reader.added_groups(place.generation) or declared
        span = span_of(source.reader, place, max(request.width - _label(request.width), 1))
        sizes = (span.first, span.n_steps, span.n_points)
        found = source.reader.group_curve(place.generation, *sizes, place.branch)
        if not found:
            raise Missing("No gradient of this run is measured yet.")
        return StripData(groups, _table(found, len(groups), span.n_points), span)

    def describe(self, data: StripData) -> list[str]:
        """Return a line for each group: its norm at the current step, and its range."""
        lines = [f"Gradient norms by group, {data.span.words()}; now step {data.span.current}."]
        width = max(map(len, data.groups), default=0)
        for group, row in zip(data.groups, data.norms, strict=True):
            known = row[np.isfinite(row) & (row >= 0)]
            now = _words(row[data.span.marked])
            low, high = (number(float(f(known))) if known.size else "-" for f in (np.min, np.max))
            sick = int(np.isnan(row).sum())
            trouble = f"  not finite in {sick} of {len(row)}" if sick else ""
            lines.append(f"{visible(group):<{width}}  {now:>8}  {low} to {high}{trouble}")
        return lines

    def paint(self, data: StripData, request: Request[NoOptions], look: Look) -> Picture:
        """Draw as many groups as there is room for, from the current window of rows."""
        width, height = request.width, request.height
        label, span = _label(width), data.span
        rows = _rows(data, height - 1)
        levels = levels_of(data.norms[rows])
        cells = boxes(levels, CELLS, look, cell_width=span.each, marked=None)
        names = [_name(data, row, label, look) for row in rows]
        head = [("group", look.style("muted")), (" ", look.style("text"))]
        ruler = " " * (span.marked * span.each + span.each // 2) + "▼"
        top = line([(clipped("group", label), head[0][1]), (ruler, look.style("chosen"))], width)
        plain = look.style("text")
        body = [strip.crop(0, width) for strip in beside(names, cells, plain)] if rows else []
        strips = [top, *(_filled(strip, width, look) for strip in body)]
        more = len(data.groups) - len(rows)
        note = span.words() + (f", {more} groups more" if more else "")
        return Picture(strips[:height], note, alarm=bool(np.isnan(data.norms).any()))

    def point(
        self, x: int, y: int, data: StripData, request: Request[NoOptions], *, click: bool
    ) -> Go | None:
        """Go to the step of a column."""
        step = data.span.step_at(x - _label(request.width)) if click and y > 0 else None
        return None if step is None else Go(step=step)


def levels_of(norms: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Return levels of `CELLS`: the logarithm between vanishing and exploding."""
    with np.errstate(all="ignore"):
        logs = np.log10(np.where(norms > 0, norms, VANISHING))
    levels = quantise(logs, math.log10(VANISHING), math.log10(EXPLOSION), _SICK)
    levels[norms < 0] = _NOTHING
    levels[~np.isfinite(norms)] = _SICK
    return levels


def _table(
    found: Mapping[tuple[int, int], float], n_groups: int, n_points: int
) -> npt.NDArray[np.float64]:
    norms = np.full((n_groups, n_points), -1.0)
    for (point, group), norm in found.items():
        if 0 <= group < n_groups and 0 <= point < n_points:
            norms[group, point] = norm
    return norms


def _rows(data: StripData, room: int) -> list[int]:
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


def _name(data: StripData, row: int, width: int, look: Look) -> Strip:
    style = look.style("bad" if np.isnan(data.norms[row]).any() else "text")
    name = visible(data.groups[row])
    short = name if len(name) < width else "…" + name[-(width - 2) :]
    return line([(clipped(short, width), style)], width)


def _filled(strip: Strip, width: int, look: Look) -> Strip:
    missing = width - strip.cell_length
    if missing <= 0:
        return strip
    return Strip.join([strip, line([], missing, look.style("text"))])


def _label(width: int) -> int:
    return min(_LABEL, max(width // 3, 1))


def _words(value: float) -> str:
    if math.isnan(value):
        return "sick"
    return "-" if value < 0 else number(float(value))
