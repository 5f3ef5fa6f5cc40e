"""Cells of a mask as colours and characters: states in the tints of segments, blocks and cursor."""

from __future__ import annotations

from functools import cache
from itertools import groupby

import numpy as np
import numpy.typing as npt
from rich.color import Color
from rich.segment import Segment as RichSegment
from rich.style import Style
from textual.strip import Strip

from flexinspect.colormap import RGB, Levels, Palette, blend
from flexinspect.masksheets.windows import (
    APPLIED,
    BOTH,
    CLOSED,
    LEAKED,
    LOST,
    N_STATES,
    OPEN,
    UNKNOWN,
)
from flexinspect.panels.parts.maskdata import MaskData
from flexinspect.panels.parts.maskwords import format_block_counts
from flexinspect.prompts import SegmentKind
from flexinspect.widgets.heat import heat
from flexinspect.widgets.lines import Span
from flexinspect.widgets.look import Theme

EVEN, ODD, GENERATED, CROSS, CURSOR, UNVISITED, PARTIAL, FULL = range(8)
"""Tints of a cell: neighbouring segments, generated text, the cursor's row and column, the cursor,
and what the block tables say."""

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
    CLOSED: "closed",
    3: "partly open",
    OPEN: "open",
    APPLIED: "partial block",
    LOST: "lost",
    LEAKED: "leaked",
    BOTH: "both",
    UNKNOWN: "not recorded",
}
_STATE_CHARS = {LOST: "-", LEAKED: "+", BOTH: "±", UNKNOWN: "?", APPLIED: "▒"}
"""Characters of states without colours; open and closed cells are half blocks."""

_CLOSED_CELL = "·"
_SHADE_CHARS = "·░░▒▓▓█"


@cache
def mask_palette() -> Palette:
    """Return the colours of all states in all tints: level `tint * N_STATES + state`."""
    rgb: list[RGB] = []
    for closed, open_ in zip(_CLOSED_RGB, _OPEN_RGB, strict=True):
        # Halves, so that what is partly open is told from both ends however little it is.
        between = blend(
            (_mix_colors(closed, open_, 0.28), _mix_colors(closed, open_, 0.72)), OPEN - 1
        )
        rgb += [closed, *between, open_]
        rgb += [_STATE_RGB[state] for state in sorted(_STATE_RGB)]
    return Palette(rgb, " " * len(rgb))


def _mix_colors(low: RGB, high: RGB, share: float) -> RGB:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return red, green, blue


# -- the grid -------------------------------------------------------------------------------------


def grid_strips(data: MaskData, theme: Theme) -> list[Strip]:
    """Return the lines of the grid, each as wide as the grid."""
    times = data.layout.cell_width
    if theme.no_color:
        return _colorless_strips(_enlarge(data.states, times), _enlarge(_tints(data), times), theme)
    return heat(_enlarge(_palette_levels(data), times), mask_palette(), theme)


def _enlarge(pixels: Levels, times: int) -> Levels:
    if times == 1:
        return pixels
    return pixels.repeat(times, axis=0).repeat(times, axis=1)


def _palette_levels(data: MaskData) -> Levels:
    levels: Levels = _tints(data) * np.uint8(N_STATES) + data.states
    return levels


def _tints(data: MaskData) -> Levels:
    """Return a tint per pixel: of the segments (or blocks), and of the cursor."""
    tables = data.tables
    tints = _segment_tints(data) if tables is None else _block_tints(tables)
    if data.cursor is not None:
        _add_cursor_cross(tints, data)
    return tints


def _block_tints(tables: Levels) -> Levels:
    tints = np.full(tables.shape, PARTIAL, np.uint8)
    tints[tables == CLOSED] = UNVISITED
    tints[tables == OPEN] = FULL
    tints[tables == UNKNOWN] = EVEN
    return tints


def _segment_tints(data: MaskData) -> Levels:
    grid, mask_view = data.layout.grid, data.mask_view
    rows = np.minimum(grid.row + grid.row_scale * np.arange(grid.height), mask_view.n_rows - 1)
    keys = grid.key + grid.key_scale * np.arange(grid.width)
    starts, numbers, generated = _tint_groups(data)
    of_row = np.searchsorted(starts, mask_view.positions[rows], side="right") - 1
    of_key = np.searchsorted(starts, keys, side="right") - 1
    tints = ((numbers[of_row][:, None] + numbers[of_key][None]) % 2).astype(np.uint8)
    tints[generated[of_row]] = GENERATED
    tints[:, generated[of_key]] = GENERATED
    return tints


def _tint_groups(
    data: MaskData,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return starts of segments, a number per owner (separators go with theirs), generated ones."""
    starts, numbers, generated = [0], [0], [False]
    owner = -1
    for index, segment in enumerate(data.segments):
        own = segment.owner if segment.kind is SegmentKind.SEPARATOR else index
        starts.append(segment.start)
        numbers.append(numbers[-1] + (own != owner))
        generated.append(segment.kind is SegmentKind.GENERATED)
        owner = own
    return np.array(starts), np.array(numbers), np.array(generated)


def _add_cursor_cross(tints: Levels, data: MaskData) -> None:
    assert data.cursor is not None
    grid = data.layout.grid
    row = (data.cursor[0] - grid.row) // grid.row_scale
    key = (data.cursor[1] - grid.key) // grid.key_scale
    if 0 <= row < grid.height:
        tints[row] = CROSS
    if 0 <= key < grid.width:
        tints[:, key] = CROSS
    if 0 <= row < grid.height and 0 <= key < grid.width:
        tints[row, key] = CURSOR


def _colorless_strips(states: Levels, tints: Levels, theme: Theme) -> list[Strip]:
    """Return half blocks and shades of one colour; generated text and the cursor in styles."""
    if len(states) % 2:
        states, tints = (np.vstack([part, part[-1:]]) for part in (states, tints))
    strips = []
    pairs = zip(states[::2], states[1::2], tints[::2], tints[1::2], strict=True)
    for upper, lower, tint, under in pairs:
        marks = np.where(under == CURSOR, under, tint).tolist()
        cells = [
            (_closed_cell_char(_cell_char(a, b), mark), mark)
            for a, b, mark in zip(upper.tolist(), lower.tolist(), marks, strict=True)
        ]
        segments = [
            RichSegment(
                "".join(text for text, _ in run), theme.style(_TINT_STYLES.get(mark, "text"))
            )
            for mark, run in groupby(cells, key=lambda cell: cell[1])
        ]
        strips.append(Strip(segments, states.shape[1]))
    return strips


_TINT_STYLES = {CURSOR: "cursor", CROSS: "strong"}


_CLOSED_CELL_CHARS = {UNVISITED: " ", FULL: ":"}
"""A closed cell, by what the block tables say of it."""


def _closed_cell_char(character: str, tint: int) -> str:
    return _CLOSED_CELL_CHARS.get(tint, character) if character == _CLOSED_CELL else character


def _cell_char(upper: int, lower: int) -> str:
    for letter in (BOTH, LEAKED, LOST, UNKNOWN):
        if letter in (upper, lower):
            return _STATE_CHARS[letter]
    ends = {
        (CLOSED, CLOSED): _CLOSED_CELL,
        (OPEN, OPEN): "█",
        (OPEN, CLOSED): "▀",
        (CLOSED, OPEN): "▄",
    }
    found = ends.get((upper, lower))
    if found is not None:
        return found
    if APPLIED in (upper, lower):
        return _STATE_CHARS[APPLIED]
    return _SHADE_CHARS[min(max((upper + lower) // 2, 1), OPEN - 1)]


# -- what they mean -------------------------------------------------------------------------------


def mask_legend(data: MaskData, theme: Theme) -> list[Span]:
    """Return what the colours on screen mean, and the label of the block layer."""
    seen = {3 if CLOSED < n < OPEN else n for n in np.unique(data.states).tolist()}
    text = theme.style("text")
    spans: list[Span] = []
    for state in (n for n in _STATE_NAMES if n in seen):
        spans.append(_swatch(state, EVEN, theme))
        name = (
            "full block" if data.view_mode == "received" and state == OPEN else _STATE_NAMES[state]
        )
        spans.append((f" {name}  ", text))
    if data.tables is not None:
        label = format_block_counts(data)
        spans.append((f"{label}  " if label else "", theme.style("title")))
        if theme.no_color:
            spans.append(("closed cells: blank not visited, · partial, : full", text))
        else:
            for tint, name in ((UNVISITED, "not visited"), (PARTIAL, "partial"), (FULL, "full")):
                spans += [_swatch(CLOSED, tint, theme), _swatch(OPEN, tint, theme)]
                spans.append((f" {name}  ", text))
    return spans


def _swatch(state: int, tint: int, theme: Theme) -> Span:
    if theme.no_color:
        return _cell_char(state, state), theme.style("text")
    rgb = mask_palette().rgb[tint * N_STATES + state]
    return "■", theme.style("text") + Style(color=Color.from_rgb(*rgb))
