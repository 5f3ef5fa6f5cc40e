"""Where everything lies in a picture of a mask: margins, the window that is seen, its scale."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Literal

from flexinspect.masks.viewport import SCALES, PixelGrid

MaskViewMode = Literal["executed", "received", "declared", "difference"]

CELL_WIDTHS = (8, 6, 4, 2)
"""Columns per cell of small masks, most first; half as many lines, so that a cell is square."""

FLAT_RATIO = 4
"""Keys per row of a sheet from which both sides are scaled each by itself."""


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """What the user chose.

    `zoom` counts steps from the whole mask (0) to single cells. The cursor stands on the positions
    `q` and `kv`, None for no cursor. `row` and `key` are the first ones shown, None for those
    around the cursor or the current step.
    """

    view: MaskViewMode = "executed"
    blocks: bool = False
    zoom: int = 0
    q: int | None = None
    kv: int | None = None
    row: int | None = None
    key: int | None = None


@dataclass(frozen=True, slots=True)
class MaskLayout:
    """The layout of a picture of `width` and `height` cells.

    From the top: `header` lines for segments, `words` lines for the words of the keys, `lines` of
    the grid, `footer` lines. At the left `label` columns and one for marks (`left` together). The
    grid's pixels are `enlarged` columns wide and as many half lines high.
    """

    width: int
    height: int
    left: int
    header: int
    token_lines: int
    lines: int
    footer: int
    grid: PixelGrid
    cell_width: int
    zoom: int
    last_zoom: int

    @property
    def top(self) -> int:
        """The first line of the grid."""
        return self.header + self.token_lines

    @property
    def columns(self) -> int:
        """Columns of the grid."""
        return self.grid.width * self.cell_width

    def cell_at(self, x: int, y: int) -> tuple[int, int] | None:
        """Return the (row, key) at a cell of the picture: the upper one of two."""
        column, line = x - self.left, y - self.top
        if not (0 <= column < self.columns and 0 <= line < self.lines):
            return None
        row = self.grid.row + 2 * line // self.cell_width * self.grid.row_scale
        key = self.grid.key + column // self.cell_width * self.grid.key_scale
        return row, key


def mask_layout(
    width: int,
    height: int,
    shape: tuple[int, int],
    zoom: int,
    focus: tuple[int, int],
    options: MaskOptions,
) -> MaskLayout:
    """Return the frame of a sheet of `shape` (rows, keys), around (row, key) `focus`."""
    left, header, footer = _margin_width(width), int(height >= 5), _footer_height(height)
    lines, columns = max(height - header - footer, 1), max(width - left, 1)
    steps = zoom_steps(shape, lines, columns)
    zoom = min(max(zoom, 0), len(steps) - 1)
    row_scale, key_scale, enlarged = steps[zoom]
    needed = -(-(-(-shape[0] // row_scale) * enlarged) // 2)
    words = 0
    if (row_scale, key_scale) == (1, 1) and height >= 12:
        words = _token_header_lines(enlarged, lines - needed, whole=needed <= lines and zoom == 0)
    lines = min(lines - words, needed)
    rows = max(2 * lines // enlarged, 1)
    row, rows = _visible_span(shape[0], row_scale, rows, focus[0], options.row)
    key, keys = _visible_span(
        shape[1], key_scale, max(columns // enlarged, 1), focus[1], options.key
    )
    grid = PixelGrid(row, key, rows, keys, row_scale, key_scale)
    lines = -(-rows * enlarged // 2)
    return MaskLayout(
        width, height, left, header, words, lines, footer, grid, enlarged, zoom, len(steps) - 1
    )


def _margin_width(width: int) -> int:
    for least, columns in ((80, 15), (56, 11), (34, 7), (20, 3)):
        if width >= least:
            return columns
    return 0


def _footer_height(height: int) -> int:
    return (height >= 3) + (height >= 10) + (height >= 26)


def _token_header_lines(enlarged: int, spare: int, *, whole: bool) -> int:
    most = 1 if enlarged >= 6 else 6
    words = min(spare, most) if whole else most
    return words if most == 1 or words >= 3 else 0


def zoom_steps(shape: tuple[int, int], lines: int, columns: int) -> list[tuple[int, int, int]]:
    """Return (row scale, key scale, enlarged) from the whole sheet to single large cells."""
    for enlarged in CELL_WIDTHS:
        if shape[0] * enlarged <= 2 * lines and shape[1] * enlarged <= columns:
            return [(1, 1, enlarged)] + [
                (1, 1, more) for more in (4, 8) if enlarged < more <= min(columns, 2 * lines)
            ]
    rows, keys = _fit_scale(shape[0], 2 * lines), _fit_scale(shape[1], columns)
    if keys <= FLAT_RATIO * rows:
        rows = keys = max(rows, keys)
    steps = [(rows, keys, 1)]
    while (rows, keys) != (1, 1):
        rows, keys = _finer_scale(rows), _finer_scale(keys)
        steps.append((rows, max(keys, rows), 1))
    most = min(columns, 2 * lines)
    return steps + [(1, 1, more) for more in (2, 4, 8) if more <= most]


def _fit_scale(total: int, room: int) -> int:
    return SCALES[min(bisect_left(SCALES, -(-total // max(room, 1))), len(SCALES) - 1)]


def _finer_scale(scale: int) -> int:
    return SCALES[max(bisect_right(SCALES, scale // 2) - 1, 0)]


def _visible_span(
    total: int, scale: int, room: int, focus: int, start: int | None
) -> tuple[int, int]:
    """Return (first cell, pixels) of what is seen of an axis of `total` cells.

    Without a `start` the focus lies in the second half of the room, and the window moves by whole
    halves: so that it stands still at most steps.
    """
    pixels = -(-total // scale)
    if pixels <= room:
        return 0, max(pixels, 1)
    if start is None:
        half = room // 2
        pixel = focus // scale
        first = (pixel // half - 1) * half if half else pixel
    else:
        first = start // scale
    return min(max(first, 0), pixels - room) * scale, room


def scroll_window(layout: MaskLayout, row: int, key: int) -> tuple[int | None, int | None]:
    """Return the first row and key of a window that holds a cell: as it is, or moved by a half.

    None where the cell is seen already.
    """
    grid = layout.grid
    first_row, first_key = grid.row, grid.key
    if not grid.row <= row < grid.row_stop:
        first_row = row - grid.height * grid.row_scale // 2
    if not grid.key <= key < grid.key_stop:
        first_key = key - grid.width * grid.key_scale // 2
    return max(first_row, 0), max(first_key, 0)


def format_scale(layout: MaskLayout) -> str:
    """Return the scale: "1:4", "2:1", "1:8 x 1:512" (rows, then keys)."""
    grid = layout.grid
    if layout.cell_width > 1:
        return f"{layout.cell_width}:1"
    if grid.row_scale == grid.key_scale:
        return f"1:{grid.row_scale}"
    return f"1:{grid.row_scale} x 1:{grid.key_scale}"
