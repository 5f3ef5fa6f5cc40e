"""The layout of the mask panel: margins, visible window and scale."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Literal

from flexinspect.masks.viewport import SCALES, PixelGrid

MaskViewMode = Literal["executed", "received", "declared", "difference"]

CELL_WIDTHS = (8, 6, 4, 2)
"""Columns per cell of small masks, largest first; half as many lines, so that cells are square."""

FLAT_RATIO = 4
"""Ratio of the scale of keys to that of rows from which the two scales are independent."""


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """Options of the mask panel.

    `zoom` counts levels from the whole mask (0) to single cells. The cursor is at the positions `q`
    and `kv`, None without a cursor. `row` and `key` are the first visible ones, None for a window
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

    From the top: `header` lines for segments, `token_lines` for the tokens of the keys, `lines` of
    the grid, `footer` lines. The margin is `left` columns wide, the last one for marks. The grid's
    pixels are `cell_width` columns wide and as many half lines high.
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
        """First line of the grid."""
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
    """Lay out a mask of `shape` (rows, keys) around the cell `focus` (row, key)."""
    left, header = _margin_width(width), int(height >= 5)
    footer = (height >= 3) + (height >= 10) + (height >= 26)
    lines, columns = max(height - header - footer, 1), max(width - left, 1)
    steps = zoom_steps(shape, lines, columns)
    zoom = min(max(zoom, 0), len(steps) - 1)
    row_scale, key_scale, cell = steps[zoom]
    needed = -(-(-(-shape[0] // row_scale) * cell) // 2)
    token_lines = 0
    if (row_scale, key_scale) == (1, 1) and height >= 12:
        whole = needed <= lines and zoom == 0
        token_lines = _token_header_lines(cell, lines - needed, whole=whole)
    lines = min(lines - token_lines, needed)
    rows = max(2 * lines // cell, 1)
    row, rows = _visible_span(shape[0], row_scale, rows, focus[0], options.row)
    key, keys = _visible_span(shape[1], key_scale, max(columns // cell, 1), focus[1], options.key)
    return MaskLayout(
        width=width,
        height=height,
        left=left,
        header=header,
        token_lines=token_lines,
        lines=-(-rows * cell // 2),
        footer=footer,
        grid=PixelGrid(row, key, rows, keys, row_scale, key_scale),
        cell_width=cell,
        zoom=zoom,
        last_zoom=len(steps) - 1,
    )


def _margin_width(width: int) -> int:
    steps = ((80, 15), (56, 11), (34, 7), (20, 3))
    return next((columns for least, columns in steps if width >= least), 0)


def _token_header_lines(cell_width: int, spare: int, *, whole: bool) -> int:
    most = 1 if cell_width >= 6 else 6
    lines = min(spare, most) if whole else most
    return lines if most == 1 or lines >= 3 else 0


def zoom_steps(shape: tuple[int, int], lines: int, columns: int) -> list[tuple[int, int, int]]:
    """Return (row scale, key scale, cell width) from the whole mask to single large cells."""
    for width in CELL_WIDTHS:
        if shape[0] * width <= 2 * lines and shape[1] * width <= columns:
            return [(1, 1, width)] + [
                (1, 1, larger) for larger in (4, 8) if width < larger <= min(columns, 2 * lines)
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
    """Return (first cell, number of pixels) of the visible part of an axis of `total` cells.

    Without a `start` the focus is in the second half of the room, and the window moves by halves
    of the room, so that it does not move at most steps.
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
    """Return the first row and key of a window that contains a cell.

    The window does not move along an axis on which the cell is visible; otherwise the cell comes
    to its middle.
    """
    grid = layout.grid
    first_row, first_key = grid.row, grid.key
    if not grid.row <= row < grid.row_stop:
        first_row = row - grid.height * grid.row_scale // 2
    if not grid.key <= key < grid.key_stop:
        first_key = key - grid.width * grid.key_scale // 2
    return max(first_row, 0), max(first_key, 0)


def format_scale(layout: MaskLayout) -> str:
    """Return the scale as "1:4", "2:1" or "1:8 x 1:512" (rows, then keys)."""
    grid = layout.grid
    if layout.cell_width > 1:
        return f"{layout.cell_width}:1"
    if grid.row_scale == grid.key_scale:
        return f"1:{grid.row_scale}"
    return f"1:{grid.row_scale} x 1:{grid.key_scale}"
