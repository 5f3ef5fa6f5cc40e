"""The analysis of a mask as a figure: encoding against generation, and segments as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.core.languages import Labels
from flexinspect.core.text import printable
from flexinspect.figures.legend import LegendItem, draw_legend, place_legend
from flexinspect.figures.sheet import (
    MIN_FONT_SIZE,
    PAD,
    Sheet,
    Typesetter,
    base_font_size,
    check_size,
    figure_settings,
    new_sheet,
    require_matplotlib,
    typesetter,
)
from flexinspect.figures.themes import THEMES, FigureTheme, mix_colors, sign_color

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Counts = npt.NDArray[np.int64]

MAX_CELL = 0.14
"""Shares of the width that a cell of the heat map has at most."""


class PhaseNumbers(Struct, frozen=True):
    """The cells of the rows of one phase, the queries of the prompt or the generated ones.

    `own` and `others` count open cells at or before the query, in its own segment and in other
    ones; `closed` counts the other cells at or before the query, `future` the open ones after it.
    """

    n_rows: int
    own: int
    others: int
    closed: int
    future: int = 0

    @property
    def density(self) -> float:
        """The share of open cells among those at or before the query, 0 to 1; 0 without any."""
        n_open = self.own + self.others
        return n_open / max(n_open + self.closed, 1)


class SegmentTable(Struct, frozen=True):
    """Open cells by segment: row n are the queries of segment n, column n its keys.

    `n_open` and `n_cells` are int64 (segments, segments); `n_cells` counts the cells at or before
    the query, so that a causal mask has a density of 1 everywhere.
    """

    names: tuple[str, ...]
    n_open: Counts
    n_cells: Counts


def draw_analysis_figure(
    encoding: PhaseNumbers,
    generation: PhaseNumbers | None,
    table: SegmentTable,
    *,
    labels: Labels,
    title: str,
    theme: FigureTheme = THEMES["light"],
    width: float = 6.5,
    notes: Sequence[str] = (),
    figure: Figure | None = None,
) -> Figure:
    """Draw bars of what the rows of each phase attend to, and below them the segments' densities.

    `generation` is None without generated tokens. `notes` are lines below the title, `figure` is an
    empty figure to draw on. Raises `UsageError` when matplotlib or a font is missing, or for an
    impossible width.
    """
    require_matplotlib()
    check_size(width, None)
    phases = [("encoding", encoding), *([("generation_phase", generation)] if generation else [])]
    with figure_settings():
        texts = (text for key, text in labels.texts.items() if key.startswith("figure_"))
        type_ = typesetter(map(printable, (*texts, title, *notes, *table.names, "…<U+>%")))
        parts = _Parts(labels, theme, type_, base_font_size(width), width)
        heading = type_.wrap(printable(title), parts.room, parts.size * 1.15, bold=True)
        lines = [line for note in notes for line in type_.wrap(note, parts.room, parts.small)]
        below = PAD + len(heading) * parts.line(1.15) + len(lines) * parts.line(0.88)
        legend = place_legend(_legend_items(parts, phases), type_, parts.small, parts.room)
        bars_top = below + parts.line(1.4)
        legend_top = bars_top + len(phases) * parts.line(2.2) + parts.line(0.3)
        map_top = legend_top + legend.height + parts.line(1)
        side, map_left = _map_places(parts, table)
        names_top = map_top + parts.line(1.4)
        depth = _name_depth(parts, table, side)
        height = names_top + depth + side * len(table.names) + PAD
        height += parts.line(0.2 + 0.88 * len(_axes_note(parts)))
        sheet = new_sheet(width, height, theme, type_, figure=figure)
        y = sheet.lines(PAD, PAD, heading, parts.size * 1.15, bold=True)
        sheet.lines(PAD, y, lines, parts.small, color=theme.muted)
        _draw_bars(sheet, parts, phases, bars_top)
        draw_legend(sheet, legend, PAD, legend_top, parts.small)
        sheet.text(PAD, map_top + parts.line(0.5), labels("figure_segments"), parts.size, bold=True)
        _draw_map(sheet, parts, table, (map_left, names_top + depth), side)
    return sheet.figure


class _Parts(Struct, frozen=True):
    labels: Labels
    theme: FigureTheme
    type: Typesetter
    size: float
    width: float

    @property
    def small(self) -> float:
        """The size of secondary text in points."""
        return max(self.size * 0.88, MIN_FONT_SIZE)

    @property
    def room(self) -> float:
        """The width between the margins in inches."""
        return self.width - 2 * PAD

    def line(self, n: float) -> float:
        """Return the height of `n` lines in inches."""
        return n * self.type.line_height(self.size)


def percent(share: float) -> str:
    """Return a share of 1 in percent; only exactly none and all are 0 % and 100 %."""
    if 0 < share < 0.001:
        return "<0.1 %"
    if 0.999 < share < 1:
        return ">99.9 %"
    return f"{100 * share:.1f} %".replace(".0 %", " %")


# -- bars ------------------------------------------------------------------------------------------

_Phases = Sequence[tuple[str, PhaseNumbers]]


def _shares(parts: _Parts, phase: PhaseNumbers) -> list[tuple[int, str]]:
    """Return the count and the colour of each part of a bar."""
    theme = parts.theme
    return [
        (phase.own, theme.open),
        (phase.others, _others_color(theme)),
        (phase.closed, theme.closed),
    ]


def _others_color(theme: FigureTheme) -> str:
    return mix_colors(theme.open, theme.generation, 0.75)


def _legend_items(parts: _Parts, phases: _Phases) -> list[LegendItem]:
    labels, theme = parts.labels, parts.theme
    items = [
        LegendItem(labels("figure_own_segment"), "square", theme.open),
        LegendItem(labels("figure_other_segments"), "square", _others_color(theme)),
        LegendItem(labels("figure_not_attended"), "square", theme.closed),
    ]
    if any(phase.future for _, phase in phases):
        items.append(LegendItem(labels("figure_future"), "square", theme.leaked))
    return items


def _draw_bars(sheet: Sheet, parts: _Parts, phases: _Phases, top: float) -> None:
    names = {kind: parts.labels(f"figure_{kind}") for kind, _ in phases}
    left = PAD + max(parts.type.size(name, parts.size, bold=True) for name in names.values()) + 0.1
    shown = {kind: percent(phase.density) for kind, phase in phases}
    right = max(parts.type.size(text, parts.size) for text in shown.values()) + 0.1
    room, high = parts.width - left - right - PAD, parts.line(1)
    for number, (kind, phase) in enumerate(phases):
        y = top + number * parts.line(2.2)
        sheet.text(PAD, y + high / 2, names[kind], parts.size, bold=True)
        sheet.text(parts.width - PAD, y + high / 2, shown[kind], parts.size, ha="right")
        total, x = max(phase.own + phase.others + phase.closed, 1), left
        for n, (count, color) in enumerate(_shares(parts, phase)):
            share = room * count / total
            _box(sheet, x, y, share, high, color)
            text = f"{count:,}"
            if count and parts.type.size(text, parts.small) + 0.06 <= share:
                options: dict[str, Any] = {"ha": "center", "color": sign_color(color)}
                sheet.text(x + share / 2, y + high / 2, text, parts.small, **options)
            if n == 1 and count:  # besides its colour
                sheet.line([x, x], [y, y + high], parts.theme.background, linewidth=1.2)
            x += share
        note = parts.labels("figure_phase_rows", rows=f"{phase.n_rows:,}")
        if phase.future:
            note += parts.labels("figure_future_cells", cells=f"{phase.future:,}")
        color = parts.theme.leaked if phase.future else parts.theme.muted
        sheet.text(left, y + 1.5 * high, note, parts.small, color=color)


def _box(sheet: Sheet, x: float, y: float, width: float, height: float, color: str) -> None:
    from matplotlib.patches import Rectangle

    edge = sheet.theme.frame
    box = Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=0.4)
    sheet.paper.add_patch(box)


# -- heat map --------------------------------------------------------------------------------------


def _map_places(parts: _Parts, table: SegmentTable) -> tuple[float, float]:
    """Return the side of a cell and the left edge of the map, in inches."""
    names = max(parts.type.size(name, parts.small) for name in table.names)
    left = PAD + min(names, parts.width / 4) + 0.08
    return min((parts.width - left - PAD) / len(table.names), MAX_CELL * parts.width), left


def _name_depth(parts: _Parts, table: SegmentTable, side: float) -> float:
    """Return the height of the names over the map: they are turned where one is too wide."""
    widest = max(parts.type.size(name, parts.small) for name in table.names)
    return parts.line(1) if widest <= side else min(widest, parts.width / 4) + 0.08


def _draw_map(
    sheet: Sheet, parts: _Parts, table: SegmentTable, place: tuple[float, float], side: float
) -> None:
    left, top = place
    theme, small = parts.theme, parts.small
    share = np.minimum(table.n_open / np.maximum(table.n_cells, 1), 1)
    is_turned = _name_depth(parts, table, side) > parts.line(1)
    stride = max(int(np.ceil(parts.line(0.9) / side)), 1)
    for number, name in enumerate(table.names):
        middle = (number + 0.5) * side
        text = parts.type.shorten(printable(name), parts.width / 4, small)
        if number % stride == 0:
            sheet.text(left - 0.06, top + middle, text, small, ha="right")
            turned: dict[str, Any] = {"rotation": 90, "va": "bottom"} if is_turned else {}
            y = top - 0.05 if is_turned else top - parts.line(0.5)
            sheet.text(left + middle, y, text, small, ha="center", **turned)
    for row, key in np.ndindex(*share.shape):
        x, y = left + key * side, top + row * side
        color = mix_colors(theme.closed, theme.open, float(share[row, key]))
        if not table.n_cells[row, key]:
            color = theme.leaked if table.n_open[row, key] else theme.background
        _box(sheet, x, y, side, side, color)
        _draw_cell_text(sheet, parts, table, (row, key), (x + side / 2, y + side / 2), side, color)
    y = top + side * len(table.names) + parts.line(0.2)
    sheet.lines(PAD, y, _axes_note(parts), small, color=theme.muted)


def _axes_note(parts: _Parts) -> list[str]:
    return parts.type.wrap(parts.labels("figure_segments_axes"), parts.room, parts.small)


def _draw_cell_text(
    sheet: Sheet,
    parts: _Parts,
    table: SegmentTable,
    cell: tuple[int, int],
    middle: tuple[float, float],
    side: float,
    color: str,
) -> None:
    """Write the open cells and their share into a cell, or only the share, or nothing."""
    n_open, n_cells = int(table.n_open[cell]), int(table.n_cells[cell])
    if not n_cells and not n_open:
        return
    lines = [f"{n_open:,}", percent(n_open / n_cells) if n_cells else ">100 %"]
    points, room = MIN_FONT_SIZE, side - 0.06
    high = parts.type.line_height(points)
    for size in (parts.small, points):
        widest = max(parts.type.size(text, size) for text in lines)
        if widest <= room and 2 * parts.type.line_height(size) <= room:
            points, high = size, parts.type.line_height(size)
            break
    else:
        lines = lines[1:]
        if parts.type.size(lines[0], points) > room or high > room:
            return
    for number, text in enumerate(lines):
        y = middle[1] + (number - (len(lines) - 1) / 2) * high
        options: dict[str, Any] = {"ha": "center", "color": sign_color(color)}
        sheet.text(middle[0], y, text, points, **options)
