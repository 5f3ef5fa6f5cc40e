"""The layout of the mask panel: its zoom levels, and the part of the mask that is visible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.masks.counting import TILE
from flexinspect.masks.viewport import MAX_EXACT_SCALE, SCALES, PixelGrid

MaskViewMode = Literal["executed", "received", "declared", "difference"]

MAX_CELL_WIDTH = 10
"""Maximum number of columns of a cell."""

MAX_CELL_HEIGHT = 8
"""Maximum number of half lines of a cell; it is even where it is more than 1."""

WORD_WIDTHS = (3, 6, MAX_CELL_WIDTH)
"""Columns of a cell that zooming in on single cells leads to."""

ZOOM_FACTOR = 4
"""How much finer the next zoom level is."""

MIN_PAIR_WIDTH = 6
"""Columns of a pair of segments from which their matrix is shown above the whole mask."""

MAP_WIDTH, MAP_LINES = 16, 8
"""Maximum size of the map of the whole mask, which is shown beside a part of it."""

MIN_WIDTH_OF_MAP = 60

_MARGINS = ((80, 15), (56, 11), (34, 7), (20, 3))
"""Columns of the margin from a width on."""


class MaskOptions(Struct, frozen=True):
    """Options of the mask panel.

    `zoom` counts levels from the whole mask (0) to single cells; -1 is the matrix of segments. The
    cursor is at the positions `q` and `kv`, None without a cursor. `row` and `key` are the first
    visible ones, None for a window around the cursor or the current step.
    """

    view: MaskViewMode | Literal["auto"] = "auto"
    blocks: bool = False
    zoom: int = 0
    q: int | None = None
    kv: int | None = None
    row: int | None = None
    key: int | None = None


class Zoom(NamedTuple):
    """A zoom level: the rows and keys of a pixel, and its size in half lines and columns."""

    row_scale: int
    key_scale: int
    height: int = 1
    width: int = 1


class MaskLayout(Struct, frozen=True):
    """The layout of a picture of `width` and `height` cells.

    From the top: `matrix` lines for the pairs of segments, `header` lines for segments,
    `token_lines` for the tokens of the keys, `lines` of the grid, `strip` lines for the row of the
    step, `footer` lines. The margin is `left` columns wide, the last one for marks. The grid takes
    `columns` columns; its pixels are `cell_height` half lines high. `strip_grid` are the pixels of
    the step's row, `map_grid` those of the map, None where it is not shown.
    """

    width: int
    height: int
    left: int
    matrix: int
    header: int
    token_lines: int
    lines: int
    strip: int
    footer: int
    grid: PixelGrid
    columns: int
    cell_height: int
    zoom: int
    first_zoom: int
    last_zoom: int
    strip_grid: PixelGrid | None = None
    map_grid: PixelGrid | None = None

    @property
    def top(self) -> int:
        """First line of the grid."""
        return self.matrix + self.header + self.token_lines

    @property
    def word_zoom(self) -> int:
        """The zoom level from which on cells have room for words."""
        return max(self.last_zoom - len(WORD_WIDTHS) + 1, 0)

    @property
    def cell_width(self) -> int:
        """Columns of a pixel; where it is 1, some have one more, so that they fill the width."""
        return self.columns // self.grid.width

    @property
    def grid_width(self) -> int:
        """Columns of the lines from the header to the grid, with their margin."""
        return self.width - (self.map_grid.width + 1 if self.map_grid else 0)

    def cell_at(self, x: int, y: int) -> tuple[int, int] | None:
        """Return the (row, key) at a cell of the picture: the upper one of two."""
        column, line = x - self.left, y - self.top
        if not (0 <= column < self.columns and 0 <= line < self.lines):
            return None
        row = self.grid.row + 2 * line // self.cell_height * self.grid.row_scale
        pixel = int(np.searchsorted(column_edges(self.grid, self.columns), column, "right")) - 1
        return row, self.grid.key + pixel * self.grid.key_scale


def column_edges(grid: PixelGrid, columns: int) -> npt.NDArray[np.intp]:
    """Return the column where each pixel of a grid begins that fills `columns`, and the end."""
    edges: npt.NDArray[np.intp] = np.arange(grid.width + 1) * columns // grid.width
    return edges


def mask_layout(
    width: int,
    height: int,
    shape: tuple[int, int],
    focus: tuple[int, int],
    options: MaskOptions,
    *,
    centred: bool = False,
    step_row: int | None = None,
    n_segments: int = 0,
) -> MaskLayout:
    """Lay out a mask of `shape` (rows, keys) around the cell `focus` (row, key).

    The focus is in the middle if `centred`. `step_row` is the row of the step, None without one.
    """
    left = next((columns for least, columns in _MARGINS if width >= least), 0)
    header = int(height >= 5)
    footer = (height >= 3) + (height >= 10) + (height >= 26)
    strip = 0 if step_row is None else (height >= 12) + (height >= 16)
    lines, columns = max(height - header - footer - strip, 1), max(width - left, 1)
    steps = zoom_steps(shape, lines, columns)
    matrix = _matrix_lines(n_segments, width, lines - _needed_lines(shape[0], steps[0]), steps[0])
    first_zoom = -1 if n_segments > 1 and not matrix else 0
    zoom = min(max(options.zoom, first_zoom), len(steps) - 1)
    strip_grid = (
        _strip_grid(step_row, shape[1], columns) if strip and step_row is not None else None
    )
    map_grid = None
    if zoom > 0:
        matrix = 0
        if width >= MIN_WIDTH_OF_MAP:
            map_grid = whole_grid(shape, min(MAP_LINES, lines), MAP_WIDTH)
            columns -= map_grid.width + 1
    lines -= matrix
    level, token_lines, lines = _fit_level(steps[max(zoom, 0)], zoom, shape[0], lines, height)
    grid = _visible_grid(shape, level, (lines, columns), focus, options, centred=centred)
    is_matrix = zoom < 0  # the pairs of segments fill the picture
    return MaskLayout(
        width=width,
        height=height,
        left=left,
        matrix=max(height - strip - footer, 1) if is_matrix else matrix,
        header=0 if is_matrix else header,
        token_lines=0 if is_matrix else token_lines,
        lines=0 if is_matrix else -(-grid.height * level.height // 2),
        strip=strip,
        footer=footer,
        grid=grid,
        columns=columns if level.width == 1 else grid.width * level.width,
        cell_height=level.height,
        zoom=zoom,
        first_zoom=first_zoom,
        last_zoom=len(steps) - 1,
        strip_grid=strip_grid,
        map_grid=map_grid,
    )


def _fit_level(
    level: Zoom, zoom: int, n_rows: int, lines: int, height: int
) -> tuple[Zoom, int, int]:
    """Return the level with cells as high as there is room, the lines of tokens and of the grid."""
    free = lines - _needed_lines(n_rows, level) if zoom == 0 else lines // 3
    token_lines = _token_lines(level, free, height)
    lines -= token_lines
    if zoom == 0 and level.row_scale == 1:
        level = _heighten(level, n_rows, lines)
    return level, token_lines, min(lines, _needed_lines(n_rows, level))


def _visible_grid(
    shape: tuple[int, int],
    level: Zoom,
    size: tuple[int, int],
    focus: tuple[int, int],
    options: MaskOptions,
    *,
    centred: bool,
) -> PixelGrid:
    """Return the pixels that a grid of `size` (lines, columns) shows of a mask."""
    start = (options.row, options.key)
    room = max(2 * size[0] // level.height, 1), max(size[1] // level.width, 1)
    (row, rows), (key, keys) = (
        _visible(*axis, centred=centred)
        for axis in zip(shape, level[:2], room, focus, start, strict=True)
    )
    return PixelGrid(row, key, rows, keys, *level[:2])


def zoom_steps(shape: tuple[int, int], lines: int, columns: int) -> list[Zoom]:
    """Return the zoom levels from the whole mask to single cells with room for words."""
    rows, keys = _fit_scales(shape, lines, columns)
    height = 2 if rows == 1 and shape[0] <= lines else 1
    width = min(columns // shape[1], MAX_CELL_WIDTH) if keys == 1 else 1
    steps = [Zoom(rows, keys, height, max(width, 1))]
    # Rows and keys have the same scales in the end: the window of a causal mask is about square.
    while (rows, keys) != (1, 1):
        rows, keys = _round_scales((max(rows // ZOOM_FACTOR, 1), max(keys // ZOOM_FACTOR, 1)))
        height, width = (1, 1) if rows * keys > 1 else (2, min(WORD_WIDTHS[0], columns))
        steps.append(Zoom(rows, keys, height, width))
    width = steps[-1].width
    return steps + [Zoom(1, 1, 2, n) for n in WORD_WIDTHS if width < n <= columns]


def _fit_scales(shape: tuple[int, int], lines: int, columns: int) -> tuple[int, int]:
    fitting = (-(-shape[0] // (2 * lines)), -(-shape[1] // columns))
    rows, keys = (SCALES[min(bisect_left(SCALES, n), len(SCALES) - 1)] for n in fitting)
    return _round_scales((rows, keys))


def _round_scales(scales: tuple[int, int]) -> tuple[int, int]:
    """Make both scales multiples of tiles where one of them is large."""
    if max(scales) <= MAX_EXACT_SCALE:
        return scales
    rows, keys = (scale if scale <= TILE else -(-scale // TILE) * TILE for scale in scales)
    return rows, keys


def whole_grid(shape: tuple[int, int], lines: int, columns: int) -> PixelGrid:
    """Return the grid of a whole mask of this shape: at most 2 * `lines` by `columns` pixels."""
    rows, keys = _fit_scales(shape, lines, columns)
    return PixelGrid(0, 0, -(-shape[0] // rows), -(-shape[1] // keys), rows, keys)


def _strip_grid(row: int, n_keys: int, columns: int) -> PixelGrid:
    (_, scale) = _fit_scales((1, n_keys), 1, columns)
    return PixelGrid(row, 0, 1, -(-n_keys // scale), 1, scale)


def strip_columns(layout: MaskLayout) -> int:
    """Return the columns that the row of the step takes."""
    grid, columns = layout.strip_grid, layout.width - layout.left
    if grid is None or columns < 2 * grid.width:
        return columns
    return grid.width * min(columns // grid.width, MAX_CELL_WIDTH)


def _needed_lines(n_rows: int, level: Zoom) -> int:
    return -(-(-(-n_rows // level.row_scale) * level.height) // 2)


def _matrix_lines(n_segments: int, width: int, spare: int, level: Zoom) -> int:
    """Return the lines of the matrix of segments above the whole mask, 0 where it has no room."""
    lines = n_segments + 2  # its head, and a blank line after it
    words = _MAX_WORD_LINES if level.width > 1 else 0
    fits = lines + words <= spare and n_segments * MIN_PAIR_WIDTH <= width * 2 // 3
    return lines if n_segments > 1 and fits else 0


_MAX_WORD_LINES = 2
_MIN_LETTER_LINES, _MAX_LETTER_LINES = 3, 6


def _token_lines(level: Zoom, spare: int, height: int) -> int:
    """Return the lines for the tokens of the keys: words, or letters from top to bottom."""
    if level.key_scale > 1 or height < 12:
        return 0
    if level.width > 1:
        return min(spare, 1 if level.width == MAX_CELL_WIDTH else _MAX_WORD_LINES)
    return 0 if spare < _MIN_LETTER_LINES else min(spare, _MAX_LETTER_LINES)


def _heighten(level: Zoom, n_rows: int, lines: int) -> Zoom:
    """Return the level with cells as high as the room allows, but not higher than wide."""
    most = min(2 * lines // n_rows, level.width, MAX_CELL_HEIGHT)
    return level._replace(height=max(most // 2 * 2, level.height))


def _visible(
    total: int, scale: int, room: int, focus: int, start: int | None, *, centred: bool
) -> tuple[int, int]:
    """Return (first cell, number of pixels) of the visible part of an axis of `total` cells.

    Without a `start` the focus is in the middle, or, if it is not `centred`, in the second half of
    the room, and the window moves by halves of the room, so that it does not move at most steps.
    """
    pixels = -(-total // scale)
    if pixels <= room:
        return 0, max(pixels, 1)
    half, first = room // 2, (focus if start is None else start) // scale
    if start is None and half:
        first = first - half if centred else (first // half - 1) * half
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
    if layout.zoom < 0:
        return "segments"
    grid = layout.grid
    scales: Sequence[str] = [
        f"1:{scale}" if scale > 1 else f"{size}:1"
        for scale, size in (
            (grid.row_scale, layout.cell_height),
            (grid.key_scale, layout.cell_width),
        )
    ]
    return " x ".join(dict.fromkeys(scales))
