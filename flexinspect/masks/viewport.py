"""Views of a mask grid: cells counted per pixel, and pixels mapped to states.

The counts per pixel are exact, so that a single open or masked cell is never lost in a view of any
scale.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.masks.counting import BIT_COUNTS, TILE, CellCounts, Counts, PackedMask, Tiles
from flexinspect.masks.mask_presets import IntArray

States = npt.NDArray[np.uint8]


class PixelGrid(Struct, frozen=True):
    """A view of a mask grid in pixels: pixel (0, 0) begins at (`row`, `key`).

    A pixel is `row_scale` rows high and `key_scale` keys wide (both from `SCALES`), the view
    `height` by `width` pixels. `row` and `key` are multiples of the scales.
    """

    row: int
    key: int
    height: int
    width: int
    row_scale: int = 1
    key_scale: int = 1

    @property
    def in_tiles(self) -> bool:
        """Whether its pixels consist of whole tiles."""
        return self.row_scale % TILE == 0 and self.key_scale % TILE == 0

    @property
    def row_stop(self) -> int:
        """The row after the last one of the view."""
        return self.row + self.height * self.row_scale

    @property
    def key_stop(self) -> int:
        """The key after the last one of the view."""
        return self.key + self.width * self.key_scale

    def empty(self) -> Counts:
        """Return zeros, int64 (height, width)."""
        return np.zeros((self.height, self.width), np.int64)


_OCTAVE = (40, 48, 56, 64)
MAX_EXACT_SCALE = 32
"""Every scale up to this one is possible: so few cells are counted one by one."""

SCALES: tuple[int, ...] = (
    *range(1, MAX_EXACT_SCALE + 1),
    *(m << k for k in range(20) for m in _OCTAVE),
)
"""Cells per side of a pixel; large ones are multiples of `TILE`, so that tiles can be summed."""


def fold_tiles(plane: CellCounts | None, first_row: int, grid: PixelGrid, out: Counts) -> None:
    """Add counted cells to `out`, from their tiles; their row 0 is row `first_row` of the grid."""
    if plane is not None and plane.tiles is not None:
        at = (first_row // TILE, 0)
        start = (grid.row // TILE, grid.key // TILE)
        _fold(out, plane.tiles, at, start, (grid.row_scale // TILE, grid.key_scale // TILE))


def fold_rows(packed: PackedMask, first_row: int, grid: PixelGrid, out: Counts) -> None:
    """Add the cells of packed rows to `out`; their row 0 is row `first_row` of the grid."""
    if grid.key_scale % TILE == 0:
        start, scale = (grid.row, grid.key // TILE), (grid.row_scale, grid.key_scale // TILE)
        _fold(out, BIT_COUNTS[packed], (first_row, 0), start, scale)
        return
    low = grid.key // 8
    bits = np.unpackbits(packed[:, low : -(-grid.key_stop // 8)], axis=1)
    at, start = (first_row, 8 * low), (grid.row, grid.key)
    _fold(out, bits, at, start, (grid.row_scale, grid.key_scale))


def _fold(
    out: Counts, values: Tiles, at: tuple[int, int], start: tuple[int, int], scale: tuple[int, int]
) -> None:
    """Add `values`, whose first one is at `at`, to pixels of `scale` values from `start`."""
    axes = zip(at, values.shape, start, scale, out.shape, strict=True)
    rows, keys = (_axis_pixels(*axis) for axis in axes)
    if rows is None or keys is None:
        return
    (row_span, row_edges, row), (key_span, key_edges, key) = rows, keys
    sums = np.add.reduceat(values[row_span], row_edges, axis=0, dtype=np.int32)
    sums = np.add.reduceat(sums[:, key_span], key_edges, axis=1, dtype=np.int64)
    out[row : row + len(sums), key : key + sums.shape[1]] += sums


def _axis_pixels(
    at: int, length: int, start: int, scale: int, n_pixels: int
) -> tuple[slice, npt.NDArray[np.intp], int] | None:
    """Return the values of an axis that are in view, where each pixel starts, and the first one."""
    low, high = max(start - at, 0), min(start + scale * n_pixels - at, length)
    if low >= high:
        return None
    pixel = (np.arange(low, high) + (at - start)) // scale
    return slice(low, high), np.flatnonzero(np.diff(pixel, prepend=-1)), int(pixel[0])


class BlockLayout(Struct, frozen=True):
    """Block tables over a mask grid: ascending edges of the blocks along rows and keys.

    `partial` and `full` are bool (row blocks, key blocks). The last blocks may extend beyond the
    mask; the edges do not.
    """

    rows: IntArray
    keys: IntArray
    partial: npt.NDArray[np.bool_]
    full: npt.NDArray[np.bool_]


def fold_blocks(blocks: BlockLayout, grid: PixelGrid, partial: Counts, full: Counts) -> None:
    """Add the number of cells in partial and in full blocks to each pixel."""
    rows = _overlap(blocks.rows, grid.row, grid.row_scale, grid.height)
    keys = _overlap(blocks.keys, grid.key, grid.key_scale, grid.width).T
    used = np.flatnonzero(rows.any(axis=0))
    for out, table in ((partial, blocks.partial), (full, blocks.full)):
        out += np.rint(rows[:, used] @ table[used].astype(np.float64) @ keys).astype(np.int64)


def _overlap(edges: IntArray, start: int, scale: int, n_pixels: int) -> npt.NDArray[np.float64]:
    """Return the number of rows (or keys) of each block in each pixel, (pixels, blocks)."""
    pixel = start + scale * np.arange(n_pixels + 1)
    low = np.maximum(pixel[:-1, None], edges[None, :-1])
    high = np.minimum(pixel[1:, None], edges[None, 1:])
    cells: npt.NDArray[np.float64] = np.maximum(high - low, 0).astype(np.float64)
    return cells


def pixel_sizes(grid: PixelGrid, known: Iterable[tuple[int, int]], n_keys: int) -> Counts:
    """Return the number of cells per pixel in the row ranges (start, stop) of `known`."""
    rows = np.zeros((grid.height, 1))
    for span in known:
        rows += _overlap(np.array(span, np.int32), grid.row, grid.row_scale, grid.height)
    keys = _overlap(np.array((0, n_keys), np.int32), grid.key, grid.key_scale, grid.width)
    return (rows * keys.T).astype(np.int64)


CLOSED, OPEN, UNKNOWN, LOST, LEAKED, BOTH, APPLIED = 0, 6, 7, 8, 9, 10, 11
"""States of a pixel; 1 to 5 are shares between closed and open. `APPLIED` is a partial block, in
which the `mask_mod` decides."""

N_STATES = 12
_N_BETWEEN = OPEN - 1


class PixelCounts(Struct, frozen=True):
    """Counts per pixel: known cells (`size`) and cells of each kind, int64 (height, width)."""

    size: Counts
    open: Counts
    lost: Counts | None = None
    leaked: Counts | None = None

    def pixel_states(self) -> States:
        """Return the state of each pixel, uint8 (height, width)."""
        states = share_states(self.open, self.size)
        if self.lost is not None and self.leaked is not None:
            states[self.lost > 0] = LOST
            states[self.leaked > 0] = LEAKED
            states[(self.lost > 0) & (self.leaked > 0)] = BOTH
        return states


def share_states(n_open: Counts, size: Counts) -> States:
    """Return states by the share of open cells; closed and open only if all known cells are."""
    safe = np.maximum(size, 1)
    states = np.clip(1 + n_open * _N_BETWEEN // safe, 1, _N_BETWEEN).astype(np.uint8)
    states[n_open == 0] = CLOSED
    states[n_open >= safe] = OPEN
    states[size == 0] = UNKNOWN
    return states


def block_states(partial: Counts, full: Counts, size: Counts) -> States:
    """Return the states of a view of block tables: `APPLIED` for partial blocks, else by share."""
    states = share_states(partial + full, size)
    inside = (partial + full == size) & (size > 0)
    states[inside & (partial > 0)] = APPLIED
    return states
