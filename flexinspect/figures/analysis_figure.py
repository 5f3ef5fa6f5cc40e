"""The analysis of a mask as a figure: encoding against generation, and segments as a heat map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from flexinspect.core.languages import Labels
from flexinspect.core.text import printable
from flexinspect.figures.figure_files import check_figure_path, save_figure
from flexinspect.figures.legend import LegendItem, draw_legend, place_legend
from flexinspect.figures.mask_margins import segment_names
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
from flexinspect.masks.counting import Counts
from flexinspect.masks.mask_analysis import MaskAnalysis, PhaseFacts
from flexinspect.masks.mask_presets import Segments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CELL = 0.14
"""Shares of the width that a cell of the heat map has at most."""


class _Pairs(Struct, frozen=True):
    """Open cells by segment of the query (row) and of the key, `n_cells` those in reach."""

    row_names: tuple[str, ...]
    key_names: tuple[str, ...]
    n_open: Counts
    n_cells: Counts


def _pairs(analysis: MaskAnalysis, segments: Segments, labels: Labels) -> _Pairs | None:
    if not len(analysis.pairs) or len(segments) < 2:
        return None
    names = tuple(segment_names(segment, segments, labels)[0] for segment in segments)
    n_rows, n_keys = analysis.pairs.shape
    return _Pairs(names[:n_rows], names[:n_keys], analysis.pairs, analysis.pair_cells)


def draw_analysis_figure(
    analysis: MaskAnalysis,
    segments: Segments = (),
    *,
    labels: Labels,
    title: str | None = None,
    theme: FigureTheme = THEMES["light"],
    width: float = 6.5,
    figure: Figure | None = None,
) -> Figure:
    """Draw bars of what the queries of each phase attend to, and a heat map of the segments.

    `segments` are those of the analysis; without them there is no heat map. `title` is by default
    the name of the mask, `figure` an empty figure to draw on. Raises `UsageError` when matplotlib
    or a font is missing, or for an impossible width.
    """
    require_matplotlib()
    check_size(width, None)
    phases = {name: getattr(analysis, name) for name in ("encoding", "generation")}
    known = [(name, facts) for name, facts in phases.items() if facts is not None]
    title = printable(analysis.name if title is None else title)
    with figure_settings():
        pairs = _pairs(analysis, segments, labels)
        names = (*pairs.row_names, *pairs.key_names) if pairs else ()
        texts = (text for key, text in labels.texts.items() if key.startswith(("figure_", "anal")))
        type_ = typesetter((*texts, title, *names, "…<U+>%"))
        parts = _AnalysisParts(
            labels, theme, type_, base_font_size(width), width, analysis.is_causal
        )
        heading = type_.wrap(title, parts.room, parts.size * 1.15, bold=True)
        notes = [line for text in _notes(analysis, labels) for line in _wrapped(parts, text)]
        bars_top = PAD + len(heading) * parts.line(1.15) + len(notes) * parts.line(0.88)
        bars_top += parts.line(0.6)
        legend = place_legend(_legend_items(parts), type_, parts.small, parts.room)
        legend_top = bars_top + len(known) * parts.line(2.2) + parts.line(0.3)
        map_top = legend_top + legend.height + parts.line(1)
        height = map_top + _map_height(parts, pairs) if pairs else legend_top + legend.height
        sheet = new_sheet(width, height + PAD, theme, type_, figure=figure)
        y = sheet.lines(PAD, PAD, heading, parts.size * 1.15, bold=True)
        sheet.lines(PAD, y, notes, parts.small, color=theme.muted)
        _draw_bars(sheet, parts, known, bars_top)
        draw_legend(sheet, legend, PAD, legend_top, parts.small)
        if pairs:
            _draw_map(sheet, parts, pairs, map_top)
    return sheet.figure


def save_analysis_figure(
    analysis: MaskAnalysis,
    path: str | Path,
    segments: Segments = (),
    *,
    labels: Labels,
    title: str | None = None,
    theme: FigureTheme = THEMES["light"],
    width: float = 6.5,
    dpi: int = 300,
) -> Path:
    """Draw an analysis into a file by its suffix; return the path.

    Raises as `draw_analysis_figure` and `save_figure` do.
    """
    check_figure_path(path)
    options: dict[str, Any] = {"labels": labels, "title": title, "theme": theme, "width": width}
    figure = draw_analysis_figure(analysis, segments, **options)
    name = analysis.name if title is None else title
    return save_figure(figure, path, title=name, language=labels.language, dpi=dpi)


def _notes(analysis: MaskAnalysis, labels: Labels) -> list[str]:
    """Return the sentences below the title: density, and the work that FlexAttention skips."""
    reach = labels("analysis_reach_causal" if analysis.is_causal else "analysis_reach_all")
    share, blocks = percent(analysis.density), analysis.blocks
    return [
        labels(
            "analysis_density",
            open=f"{analysis.n_open:,}",
            total=f"{analysis.n_cells:,}",
            reach=reach,
            share=share,
        ),
        labels(
            "figure_blocks",
            size=blocks.size,
            visited=f"{blocks.visited:,}",
            total=f"{blocks.visited + blocks.empty:,}",
            share=percent(blocks.skipped),
        ),
    ]


def _wrapped(parts: _AnalysisParts, text: str) -> list[str]:
    return parts.type.wrap(text, parts.room, parts.small)


class _AnalysisParts(Struct, frozen=True):
    labels: Labels
    theme: FigureTheme
    type: Typesetter
    size: float
    width: float
    is_causal: bool

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


def _shares(theme: FigureTheme, phase: PhaseFacts) -> list[tuple[int, str]]:
    """Return the count and the colour of each part of a bar."""
    return [
        (phase.n_open - phase.n_cross, theme.open),
        (phase.n_cross, _others_color(theme)),
        (phase.n_cells - phase.n_open, theme.closed),
    ]


def _others_color(theme: FigureTheme) -> str:
    return mix_colors(theme.open, theme.generation, 0.75)


def _legend_items(parts: _AnalysisParts) -> list[LegendItem]:
    labels, theme = parts.labels, parts.theme
    return [
        LegendItem(labels("figure_own_segment"), "square", theme.open),
        LegendItem(labels("figure_other_segments"), "square", _others_color(theme)),
        LegendItem(labels("figure_not_attended"), "square", theme.closed),
    ]


def _draw_bars(
    sheet: Sheet, parts: _AnalysisParts, phases: Sequence[tuple[str, PhaseFacts]], top: float
) -> None:
    names = {kind: parts.labels(f"figure_phase_{kind}") for kind, _ in phases}
    widths = (parts.type.size(name, parts.size, bold=True) for name in names.values())
    left = PAD + max(widths, default=0.0) + 0.1
    right = parts.type.size(">99.9 %", parts.size) + 0.1
    room, high = parts.width - left - right - PAD, parts.line(1)
    for number, (kind, phase) in enumerate(phases):
        y = top + number * parts.line(2.2)
        sheet.text(PAD, y + high / 2, names[kind], parts.size, bold=True)
        share = percent(phase.density)
        sheet.text(parts.width - PAD, y + high / 2, share, parts.size, ha="right")
        _draw_bar(sheet, parts, phase, (left, y, room, high))
        note = parts.labels("figure_phase_rows", rows=f"{phase.n_rows:,}")
        sheet.text(left, y + 1.5 * high, note, parts.small, color=parts.theme.muted)


def _draw_bar(
    sheet: Sheet, parts: _AnalysisParts, phase: PhaseFacts, area: tuple[float, float, float, float]
) -> None:
    """Draw the parts of a bar in an area (left, top, width, height), with counts that fit."""
    x, y, room, high = area
    for n, (count, color) in enumerate(_shares(parts.theme, phase)):
        share = room * count / max(phase.n_cells, 1)
        _box(sheet, x, y, share, high, color)
        text = f"{count:,}"
        if count and parts.type.size(text, parts.small) + 0.06 <= share:
            options: dict[str, Any] = {"ha": "center", "color": sign_color(color)}
            sheet.text(x + share / 2, y + high / 2, text, parts.small, **options)
        if n == 1 and count:  # a gap, besides the colours
            sheet.line([x, x], [y, y + high], parts.theme.background, linewidth=1.2)
        x += share


def _box(sheet: Sheet, x: float, y: float, width: float, height: float, color: str) -> None:
    from matplotlib.patches import Rectangle

    edge = sheet.theme.frame
    box = Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=0.4)
    sheet.paper.add_patch(box)


# -- heat map --------------------------------------------------------------------------------------


def _map_sizes(parts: _AnalysisParts, pairs: _Pairs) -> tuple[float, float, float]:
    """Return the side of a cell, the left edge of the cells, and the height of the names above."""
    limit = parts.width / 4
    row_names = max(parts.type.size(name, parts.small) for name in pairs.row_names)
    left = PAD + min(row_names, limit) + 0.08
    side = min((parts.width - left - PAD) / len(pairs.key_names), MAX_CELL * parts.width)
    widest = max(parts.type.size(name, parts.small) for name in pairs.key_names)
    return side, left, parts.line(1) if widest <= side else min(widest, limit) + 0.08


def _map_height(parts: _AnalysisParts, pairs: _Pairs) -> float:
    side, _, names = _map_sizes(parts, pairs)
    note = len(_axes_note(parts)) * parts.line(0.88)
    return parts.line(1.4) + names + side * len(pairs.row_names) + parts.line(0.2) + note


def _axes_note(parts: _AnalysisParts) -> list[str]:
    key = "figure_pair_axes" if parts.is_causal else "figure_pair_axes_all"
    return _wrapped(parts, parts.labels(key))


def _draw_map(sheet: Sheet, parts: _AnalysisParts, pairs: _Pairs, top: float) -> None:
    side, left, names = _map_sizes(parts, pairs)
    theme, heading = parts.theme, parts.labels("figure_pairs")
    sheet.text(PAD, top + parts.line(0.5), heading, parts.size, bold=True)
    top += parts.line(1.4) + names
    _draw_names(sheet, parts, pairs, (left, top))
    texts = _cell_texts(pairs)
    style = _text_style(parts, texts.values(), side - 0.06)
    for row, key in np.ndindex(*pairs.n_open.shape):
        share = min(int(pairs.n_open[row, key]) / max(int(pairs.n_cells[row, key]), 1), 1.0)
        lines = texts.get((row, key), [])
        color = mix_colors(theme.closed, theme.open, share) if lines else theme.background
        x, y = left + key * side, top + row * side
        _box(sheet, x, y, side, side, color)
        if style and lines:
            points, lines = style[0], lines[style[1] :]
            y += side / 2 - len(lines) / 2 * parts.type.line_height(points)
            options: dict[str, Any] = {"ha": "center", "color": sign_color(color)}
            sheet.lines(x + side / 2, y, lines, points, **options)
    y = top + side * len(pairs.row_names) + parts.line(0.2)
    sheet.lines(PAD, y, _axes_note(parts), parts.small, color=theme.muted)


def _draw_names(
    sheet: Sheet, parts: _AnalysisParts, pairs: _Pairs, corner: tuple[float, float]
) -> None:
    """Write the names beside and above the cells; of many only every second or third one."""
    side, _, names = _map_sizes(parts, pairs)
    (left, top), small = corner, parts.small
    stride = max(int(np.ceil(parts.line(0.9) / side)), 1)
    for number, name in list(enumerate(pairs.row_names))[::stride]:
        text = parts.type.shorten(name, parts.width / 4, small)
        sheet.text(left - 0.06, top + (number + 0.5) * side, text, small, ha="right")
    is_turned = names > parts.line(1)
    turned: dict[str, Any] = {"rotation": 90, "va": "bottom"} if is_turned else {}
    y = top - 0.05 if is_turned else top - parts.line(0.5)
    for number, name in list(enumerate(pairs.key_names))[::stride]:
        text = parts.type.shorten(name, parts.width / 4, small)
        sheet.text(left + (number + 0.5) * side, y, text, small, ha="center", **turned)


def _cell_texts(pairs: _Pairs) -> dict[tuple[int, int], list[str]]:
    """Return the open cells and their share of each pair in reach, by place."""
    return {
        (row, key): [f"{n_open:,}", percent(n_open / n_cells)]
        for (row, key), n_cells in np.ndenumerate(pairs.n_cells)
        if n_cells
        for n_open in (int(pairs.n_open[row, key]),)
    }


def _text_style(
    parts: _AnalysisParts, texts: Iterable[Sequence[str]], room: float
) -> tuple[float, int] | None:
    """Return the size of text, and the first line to write, with which all cells have room."""
    widest = [max(column, key=len) for column in zip(*texts, strict=True)]
    for points, first in ((parts.small, 0), (MIN_FONT_SIZE, 0), (MIN_FONT_SIZE, 1)):
        lines = widest[first:]
        width = max(parts.type.size(text, points) for text in lines)
        if width <= room and len(lines) * parts.type.line_height(points) <= room:
            return points, first
    return None
