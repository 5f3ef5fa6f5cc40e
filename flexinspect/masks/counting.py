"""Packed rows of masks, and their cells counted once, by row, by key and by tile.

A sheet is the mask of a whole sequence: rows in the order in which they were fed, one column per
key. Its cells are never held as bools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flexinspect.masks.algebra import IntArray, MaskSpec

PackedMask = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
Tiles = npt.NDArray[np.uint8]

TILE = 8
"""Rows and keys of a tile, so that a byte of a packed row lies in one tile."""

CHUNK_ROWS = 248
"""Rows that are counted at once: fewer than 256, so that their sums fit a byte."""

_LEADING_BITS = np.array([0x00, 0x80, 0xC0, 0xE0, 0xF0, 0xF8, 0xFC, 0xFE, 0xFF], np.uint8)
BIT_COUNTS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(
    axis=1, dtype=np.uint8
)


# -- packed rows ----------------------------------------------------------------------------------


def shift_keys(packed: PackedMask, n_keys: int, offset: int) -> PackedMask:
    """Return packed rows of `n_keys` with `offset` closed keys before them."""
    if offset == 0:
        return packed
    if offset % 8 == 0:
        return np.pad(packed, ((0, 0), (offset // 8, 0)))
    bits = np.unpackbits(packed, axis=1, count=n_keys)
    return np.packbits(np.pad(bits, ((0, 0), (offset, 0))), axis=1)


def pack_spec(spec: MaskSpec, positions: IntArray, n_keys: int) -> PackedMask:
    """Return a rule's rows at these positions, packed: uint8 (rows, ceil(n_keys / 8))."""
    n_bytes = -(-n_keys // 8)
    rows = np.zeros((len(positions), n_bytes), np.uint8)
    for row, position in zip(rows, positions.tolist(), strict=True):
        _set_leading_bits(row, min(position + 1, n_keys))
    regions = np.maximum(np.searchsorted(spec.starts, positions, side="right") - 1, 0)
    for region in np.unique(regions).tolist():
        rows[regions == region] &= _pack_region(
            spec.prefix_stops[region], spec.local_starts[region], n_keys
        )
    return rows


def _set_leading_bits(row: PackedMask, stop: int) -> None:
    full, rest = divmod(max(stop, 0), 8)
    row[:full] = 0xFF
    if rest:
        row[full] = _LEADING_BITS[rest]


def _pack_region(head: int, low: int, n_keys: int) -> PackedMask:
    """Return the keys below `head` and those from `low` on, packed."""
    below, under = (np.zeros(-(-n_keys // 8), np.uint8) for _ in range(2))
    _set_leading_bits(below, min(head, n_keys))
    _set_leading_bits(under, min(low, n_keys))
    every = np.zeros_like(below)
    _set_leading_bits(every, n_keys)
    seen: PackedMask = below | (every & ~under)
    return seen


# -- counting -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CellCounts:
    """Cells of one kind, counted: `rows` per row, `tiles` per tile (None where there are none).

    `first` is the first of them as (row of the part, key).
    """

    row_counts: npt.NDArray[np.int32]
    tiles: Tiles | None = None
    first: tuple[int, int] | None = None

    @property
    def n(self) -> int:
        """How many there are."""
        return int(self.row_counts.sum(dtype=np.int64))

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        return self.row_counts.nbytes + (0 if self.tiles is None else self.tiles.nbytes)


@dataclass(frozen=True, slots=True)
class MaskCounts:
    """What some rows of a sheet open, and how that differs from what was declared.

    `columns` counts the rows that see each key, int32 (keys,). `table` counts open cells by group
    of the row and group of the key, int64 (groups, groups). `lost` cells are declared open and not
    executed, `leaked` ones executed and declared closed; both are None where nothing was declared.
    """

    open: CellCounts
    key_counts: npt.NDArray[np.int32]
    group_counts: Counts
    lost: CellCounts | None = None
    leaked: CellCounts | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        planes = [plane for plane in (self.open, self.lost, self.leaked) if plane is not None]
        return (
            sum(p.n_bytes for p in planes) + self.key_counts.nbytes + self.group_counts.nbytes + 512
        )


@dataclass(frozen=True, slots=True)
class PositionGroups:
    """Spans of the sequence: `starts` ascending, the first of them 0; the last one is open."""

    starts: tuple[int, ...] = (0,)

    def group_of(self, positions: IntArray) -> npt.NDArray[np.intp]:
        """Return the group of each position."""
        found: npt.NDArray[np.intp] = np.searchsorted(self.starts, positions, side="right") - 1
        return np.maximum(found, 0)

    def sum_by_group(self, columns: npt.NDArray[np.uint8]) -> Counts:
        """Return the sum of a value per key over each group, int64 (groups,)."""
        edges = np.minimum((*self.starts, len(columns)), len(columns))
        return np.diff(np.concatenate(([0], np.cumsum(columns, dtype=np.int64)))[edges])


def count_cells(
    chunks: Iterable[tuple[int, PackedMask]],
    positions: IntArray,
    n_keys: int,
    *,
    first_row: int = 0,
    groups: PositionGroups | None = None,
    declared: Callable[[int, int], PackedMask] | None = None,
) -> MaskCounts:
    """Count packed rows, given as (row, at most `CHUNK_ROWS` rows from it on).

    `positions` are those of the rows, `first_row` is where row 0 lies on the sheet (tiles follow
    the sheet). `declared` returns the declared rows from one to another.
    """
    groups = groups or PositionGroups()
    n_rows = len(positions)
    counter = {"open": _CellCounter(n_rows, n_keys, first_row % TILE)}
    if declared is not None:
        counter |= {name: _CellCounter(n_rows, n_keys, first_row % TILE) for name in _DIFFERENCES}
    columns = np.zeros(n_keys, np.int32)
    table = np.zeros((len(groups.starts), len(groups.starts)), np.int64)
    of_row = groups.group_of(positions)
    for row, packed in chunks:
        counter["open"].add(row, packed)
        _add_key_counts(columns, table, packed, of_row[row : row + len(packed)], groups)
        if declared is not None:
            meant = declared(row, row + len(packed))
            counter["lost"].add(row, meant & ~packed)
            counter["leaked"].add(row, packed & ~meant)
    return MaskCounts(
        key_counts=columns, group_counts=table, **{name: c.result() for name, c in counter.items()}
    )


_DIFFERENCES = ("lost", "leaked")


def _add_key_counts(
    columns: npt.NDArray[np.int32],
    table: Counts,
    packed: PackedMask,
    of_row: npt.NDArray[np.intp],
    groups: PositionGroups,
) -> None:
    bits = np.unpackbits(packed, axis=1, count=len(columns))
    edges = [0, *(np.flatnonzero(np.diff(of_row)) + 1).tolist(), len(of_row)]
    for start, stop in pairwise(edges):
        sums = np.add.reduce(bits[start:stop], axis=0, dtype=np.uint8)
        columns += sums
        table[of_row[start]] += groups.sum_by_group(sums)


class _CellCounter:
    """Counts the cells of one plane, chunk after chunk; tiles are made once there is a cell."""

    def __init__(self, n_rows: int, n_keys: int, phase: int) -> None:
        self._tile_offset = phase
        self._shape = (-(-(phase + n_rows) // TILE), -(-n_keys // TILE))
        self._rows = np.zeros(n_rows, np.int32)
        self._tiles: Tiles | None = None
        self._first: tuple[int, int] | None = None

    def add(self, row: int, packed: PackedMask) -> None:
        """Count rows from `row` on."""
        ones = BIT_COUNTS[packed]
        counts = ones.sum(axis=1, dtype=np.int32)
        if not counts.any():
            return
        self._rows[row : row + len(packed)] = counts
        if self._tiles is None:
            self._tiles = np.zeros(self._shape, np.uint8)
            self._first = _first_cell(row, packed, counts)
        tile = (self._tile_offset + row + np.arange(len(packed))) // TILE
        edges = np.flatnonzero(np.diff(tile, prepend=-1))
        sums = np.add.reduceat(ones, edges, axis=0, dtype=np.uint8)
        self._tiles[tile[0] : tile[0] + len(sums)] += sums

    def result(self) -> CellCounts:
        """Return what was counted."""
        return CellCounts(self._rows, self._tiles, self._first)


def _first_cell(row: int, packed: PackedMask, counts: npt.NDArray[np.int32]) -> tuple[int, int]:
    at = int(np.flatnonzero(counts)[0])
    return row + at, int(np.flatnonzero(np.unpackbits(packed[at]))[0])
