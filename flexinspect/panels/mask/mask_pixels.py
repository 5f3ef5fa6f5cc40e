"""The pixels of a mask as coloured cells: their palette, the grid, the map, and the legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from rich.cells import cell_len
from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from flexinspect.drawing.heatmap import RGB, Levels, Palette, blend, heat, replace_cells
from flexinspect.drawing.text_lines import NamedSpan, Pen, align_right, join_strips, merge_spans
from flexinspect.drawing.theme import Theme
from flexinspect.masks.viewport import (
    APPLIED,
    BOTH,
    CLOSED,
    LEAKED,
    LOST,
    N_STATES,
    OPEN,
    UNKNOWN,
    PixelGrid,
)
from flexinspect.panels.mask import mask_text
from flexinspect.panels.mask.mask_data import MaskData
from flexinspect.panels.mask.mask_layout import column_edges, strip_columns
from flexinspect.records.prompt import SegmentKind

EVEN, ODD, GENERATED, CROSS, CURSOR, UNVISITED, PARTIAL, FULL = range(8)
"""Tints of a cell: neighbouring segments, generated text, the cursor's row and column, the cursor,
and the states of the block tables."""

_CLOSED_RGB: tuple[RGB, ...] = (
    *((22, 26, 38), (33, 39, 56), (20, 42, 46), (62, 66, 84), (120, 70, 160)),
    *((40, 40, 44), (24, 36, 74), (20, 60, 44)),
)
_OPEN_RGB: tuple[RGB, ...] = (
    *((233, 206, 92), (206, 172, 58), (140, 208, 160), (255, 240, 178), (255, 255, 255)),
    *((220, 150, 130), (240, 222, 120), (150, 225, 150)),
)
_STATE_RGB: dict[int, RGB] = {
    UNKNOWN: (96, 62, 84),
    LOST: (86, 180, 233),
    LEAKED: (240, 52, 92),
    BOTH: (205, 120, 230),
    APPLIED: (106, 140, 196),
}
_STATE_NAMES = {
    LEAKED: "leaked: should be closed",
    LOST: "lost: should be open",
    BOTH: "both",
    UNKNOWN: "not recorded",
    OPEN: "open",
    3: "partly open",
    CLOSED: "closed",
    APPLIED: "partial block",
}
"""In the order of the legend, of which a narrow panel cuts the end."""
_TINT_NAMES = {
    UNVISITED: "not visited",
    PARTIAL: "partial",
    FULL: "full",
    CROSS: "cursor",
    GENERATED: "generated",
}
_STATE_CHARS = {LOST: "-", LEAKED: "+", BOTH: "±", UNKNOWN: "?", APPLIED: "▒"}
"""Characters of states on terminals without colours; open and closed cells are half blocks."""

_CLOSED_CELL = "·"
_SHADE_CHARS = "·░░▒▓▓█"


@cache
def mask_palette() -> Palette:
    """Return the palette of all states in all tints: level `tint * N_STATES + state`."""
    rgb: list[RGB] = []
    for closed, open_ in zip(_CLOSED_RGB, _OPEN_RGB, strict=True):
        # From 28 % to 72 % of the way, so that a partly open pixel differs from both however small
        # its part is.
        mixed = blend((closed, open_), 26)
        rgb += [closed, *blend((mixed[7], mixed[18]), OPEN - 1), open_]
        rgb += [_STATE_RGB[state] for state in sorted(_STATE_RGB)]
    return Palette(rgb, " " * len(rgb))


# -- the grid -------------------------------------------------------------------------------------


def grid_strips(data: MaskData, tints: Levels, theme: Theme) -> list[Strip]:
    """Draw the lines of the grid, each as wide as the grid."""
    layout = data.layout
    widths = np.diff(column_edges(layout.grid, layout.columns))
    states, wide_tints = (
        pixels.repeat(layout.cell_height, axis=0).repeat(widths, axis=1)
        for pixels in (data.states, tints)
    )
    strips = _draw_pixels(states, wide_tints, theme)
    return strips if theme.no_color else _mark_cursor(data, strips)


def _mark_cursor(data: MaskData, strips: list[Strip]) -> list[Strip]:
    """Put brackets around the cell under the cursor if it is large enough."""
    layout, cursor = data.layout, data.cursor
    if cursor is None or layout.cell_height < 2 or layout.cell_width < 2:
        return strips
    row, key = cursor[0] - layout.grid.row, cursor[1] - layout.grid.key
    if not (0 <= row < layout.grid.height and 0 <= key < layout.grid.width):
        return strips
    level = CURSOR * N_STATES + int(data.states[row, key])
    mark = Segment(f"[{' ' * (layout.cell_width - 2)}]", mask_palette().style(level))
    line = row * layout.cell_height // 2
    marked = replace_cells(strips[line], key * layout.cell_width, mark)
    return [*strips[:line], marked, *strips[line + 1 :]]


def map_strips(data: MaskData, theme: Theme) -> list[Strip]:
    """Draw the map of the whole mask, with the visible window marked."""
    whole, grid = data.layout.map_grid, data.layout.grid
    if whole is None or data.map_states is None:
        return []
    tints = np.full(data.map_states.shape, EVEN, np.uint8)
    rows = slice(grid.row // whole.row_scale, -(-grid.row_stop // whole.row_scale))
    keys = slice(grid.key // whole.key_scale, -(-grid.key_stop // whole.key_scale))
    tints[rows, keys] = CURSOR
    return _draw_pixels(data.map_states, tints, theme)


def step_strip(data: MaskData, pen: Pen) -> Strip | None:
    """Draw which keys the newest row of the step attends to, in one line for all keys."""
    layout, grid = data.layout, data.layout.strip_grid
    if grid is None or data.strip_states is None or not data.current:
        return None
    counts = mask_text.count_row(data, data.current[-1])
    texts = [f"sees {counts[0]} of {counts[1]}", f"{counts[0]}/{counts[1]}"] if counts else [""]
    room = max(layout.left - 1, 0)
    text = next((text for text in texts if len(text) <= room), "")
    margin = pen.resize(layout.left).line((align_right(text, room), "text"), ("▶", "accent"))
    widths = np.diff(column_edges(grid, strip_columns(layout)))
    states, tints = (
        pixels.repeat(2, axis=0).repeat(widths, axis=1)
        for pixels in (data.strip_states, _segment_tints(data, grid))
    )
    cells = _draw_pixels(states, tints, pen.theme)
    return join_strips(margin, *cells).adjust_cell_length(pen.width, pen.style("text"))


def _draw_pixels(states: Levels, tints: Levels, theme: Theme) -> list[Strip]:
    if theme.no_color:
        return _colorless_strips(states, tints, theme)
    return heat(tints * np.uint8(N_STATES) + states, mask_palette(), theme)


def grid_tints(data: MaskData) -> Levels:
    """Return the tint of each pixel, from the segments (or block tables) and the cursor."""
    tables, grid = data.tables, data.layout.grid
    if tables is None:
        tints = _segment_tints(data, grid)
    else:
        tints = np.full(tables.shape, PARTIAL, np.uint8)
        for state, tint in ((CLOSED, UNVISITED), (OPEN, FULL), (UNKNOWN, EVEN)):
            tints[tables == state] = tint
    if data.cursor is not None:
        row = (data.cursor[0] - grid.row) // grid.row_scale
        key = (data.cursor[1] - grid.key) // grid.key_scale
        has_row, has_key = 0 <= row < grid.height, 0 <= key < grid.width
        if has_row:
            tints[row] = CROSS
        if has_key:
            tints[:, key] = CROSS
        if has_row and has_key:
            tints[row, key] = CURSOR
    return tints


def _segment_tints(data: MaskData, grid: PixelGrid) -> Levels:
    mask_view = data.mask_view
    rows = np.minimum(grid.row + grid.row_scale * np.arange(grid.height), mask_view.n_rows - 1)
    keys = grid.key + grid.key_scale * np.arange(grid.width)
    # A number for each owner of segments, to which its separators belong.
    first, ids, is_generated = [0], [0], [False]
    owner = -1
    for index, segment in enumerate(data.segments):
        own = segment.owner if segment.kind is SegmentKind.SEPARATOR else index
        first.append(segment.start)
        ids.append(ids[-1] + (own != owner))
        is_generated.append(segment.kind is SegmentKind.GENERATED)
        owner = own
    starts, numbers, generated = np.array(first), np.array(ids), np.array(is_generated)
    of_row = np.searchsorted(starts, mask_view.positions[rows], side="right") - 1
    of_key = np.searchsorted(starts, keys, side="right") - 1
    tints: Levels = ((numbers[of_row][:, None] + numbers[of_key][None]) % 2).astype(np.uint8)
    tints[generated[of_row]] = GENERATED
    tints[:, generated[of_key]] = GENERATED
    return tints


def _colorless_strips(states: Levels, tints: Levels, theme: Theme) -> list[Strip]:
    """Draw states as half blocks and shades, with styles for the cursor."""
    if len(states) % 2:
        states, tints = (np.vstack([part, part[-1:]]) for part in (states, tints))
    pen, strips = Pen(theme, states.shape[1]), []
    pairs = zip(states[::2], states[1::2], tints[::2], tints[1::2], strict=True)
    for upper, lower, tint, under in pairs:
        marks = np.where(under == CURSOR, under, tint).tolist()
        cells = []
        for a, b, mark in zip(upper.tolist(), lower.tolist(), marks, strict=True):
            char = cell_char(a, b)
            if char == _CLOSED_CELL:
                char = _CLOSED_CELL_CHARS.get(mark, char)
            cells.append((char, _TINT_STYLES.get(mark, "text")))
        strips.append(pen.line(*merge_spans(cells)))
    return strips


_TINT_STYLES = {CURSOR: "cursor", CROSS: "strong"}
_CLOSED_CELL_CHARS = {UNVISITED: " ", FULL: ":"}
"""Characters of a closed cell by the state of its block."""


def cell_char(upper: int, lower: int) -> str:
    for letter in (BOTH, LEAKED, LOST, UNKNOWN):
        if letter in (upper, lower):
            return _STATE_CHARS[letter]
    if upper in (OPEN, CLOSED) and lower in (OPEN, CLOSED):
        return f"{_CLOSED_CELL}▄▀█"[2 * (upper == OPEN) + (lower == OPEN)]
    if APPLIED in (upper, lower):
        return _STATE_CHARS[APPLIED]
    return _SHADE_CHARS[min(max((upper + lower) // 2, 1), OPEN - 1)]


# -- the legend -----------------------------------------------------------------------------------


def mask_legend(
    data: MaskData, grid_tints: Levels, pen: Pen, *, short: bool = False
) -> list[NamedSpan]:
    """Draw the meaning of the colours on screen, and the counts of the block tables if shown."""
    visible = {3 if CLOSED < n < OPEN else n for n in _visible_states(data)}
    names = {**_STATE_NAMES, **({OPEN: "full block"} if data.view_mode == "received" else {})}
    spans: list[NamedSpan] = []
    for state in (n for n in _STATE_NAMES if n in visible):
        name = names[state].partition(":")[0] if short else names[state]
        spans += [swatch(state, EVEN, pen), (f" {name}  ", "text")]
    if data.tables is not None:
        label = mask_text.format_block_counts(data)
        spans.append((f"{label}  " if label else "", "title"))
        if pen.theme.no_color:
            spans.append(("closed cells: blank not visited, · partial, : full  ", "text"))
    if pen.theme.no_color or data.layout.zoom < 0:
        return spans
    tints = _levels_in(grid_tints)
    for tint in (n for n in _TINT_NAMES if n in tints):
        spans += [swatch(CLOSED, tint, pen), swatch(OPEN, tint, pen)]
        spans.append((f" {_TINT_NAMES[tint]}  ", "text"))
    if {EVEN, ODD} <= tints and not short:
        spans += [
            swatch(OPEN, EVEN, pen),
            swatch(OPEN, ODD, pen),
            (" neighbouring segments  ", "text"),
        ]
    return spans


def _visible_states(data: MaskData) -> set[int]:
    if data.layout.zoom >= 0 or data.matrix is None:
        return _levels_in(data.states)
    strip = set() if data.strip_states is None else _levels_in(data.strip_states)
    pairs = ((LOST, data.matrix.pairs.lost), (LEAKED, data.matrix.pairs.leaked))
    return {*strip, *(state for state, counts in pairs if counts.any())}


def _levels_in(levels: Levels) -> set[int]:
    # Not np.unique, which imports numpy.ma: that takes longer than the first picture.
    return set(np.flatnonzero(np.bincount(levels.ravel())).tolist())


def swatch(state: int, tint: int, pen: Pen) -> NamedSpan:
    """Draw one cell of a state and tint for a legend."""
    if pen.theme.no_color:
        return cell_char(state, state), "text"
    rgb = mask_palette().rgb[tint * N_STATES + state]
    return "■", pen.style("text") + Style(color=Color.from_rgb(*rgb))


def wrap_legend(legend: Sequence[NamedSpan], pen: Pen) -> list[Strip]:
    """Distribute the swatches with their names over lines."""
    lines: list[list[NamedSpan]] = [[]]
    used = 0
    for entry in _legend_entries(legend):
        length = sum(cell_len(text) for text, _ in entry)
        if used and used + length > pen.width + 2:  # the two blanks at its end may be cut
            lines.append([])
            used = 0
        lines[-1] += entry
        used += length
    return [pen.line(*spans) for spans in lines if spans]


def _legend_entries(legend: Sequence[NamedSpan]) -> Iterator[list[NamedSpan]]:
    """Yield the spans of each entry: swatches and the name that follows them."""
    entry: list[NamedSpan] = []
    for span in legend:
        entry.append(span)
        if span[0].endswith("  "):
            yield entry
            entry = []
    if entry:
        yield entry
