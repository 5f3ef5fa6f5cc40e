"""Masks packed into bits, and counts of their cells by row, by key and by tile.

A mask grid is the mask of a whole sequence: its rows in the order of the forward passes, one column
per key. It is never expanded to one byte per cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.masks.mask_presets import IntArray, MaskSpec

PackedMask = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
Tiles = npt.NDArray[np.uint8]
TILE = 8  # rows and keys of a tile, so that a byte of a packed row lies in one tile
CHUNK_ROWS = 248  # rows counted at once: fewer than 256, so that their sums fit into a byte

_LEADING_BITS = np.array([0x00, 0x80, 0xC0, 0xE0, 0xF0, 0xF8, 0xFC, 0xFE, 0xFF], np.uint8)
BIT_COUNTS = np.array([byte.bit_count() for byte in range(256)], np.uint8)


def shift_keys(packed: PackedMask, n_keys: int, offset: int) -> PackedMask:
    """Return packed rows of `n_keys` with `offset` masked keys before them."""
    if offset == 0:
        return packed
    if offset % 8 == 0:
        return np.pad(packed, ((0, 0), (offset // 8, 0)))
    bits = np.unpackbits(packed, axis=1, count=n_keys)
    return np.packbits(np.pad(bits, ((0, 0), (offset, 0))), axis=1)


def pack_spec(
    spec: MaskSpec,
    positions: npt.NDArray[np.integer],
    n_keys: int,
    *,
    kv_offset: int = 0,
    window: int | None = None,
) -> PackedMask:
    """Return the rows of a mask at these positions, packed: uint8 (rows, ceil(n_keys / 8)).

    Key 0 is at position `kv_offset`. With a `window`, a row sees only so many keys up to its own.
    """
    rows = _pack_leading(positions + 1 - kv_offset, n_keys)
    if window is not None:
        rows &= ~_pack_leading(positions + 1 - window - kv_offset, n_keys)
    regions = np.maximum(np.searchsorted(spec.starts, positions, side="right") - 1, 0)
    for region in np.flatnonzero(np.bincount(regions)).tolist():
        stops = np.array((spec.prefix_stops[region], spec.local_starts[region])) - kv_offset
        prefix, hidden = _pack_leading(stops, n_keys)
        rows[regions == region] &= prefix | ~hidden
    return rows


def _pack_leading(stops: npt.NDArray[np.integer], n_keys: int) -> PackedMask:
    """Return packed rows that see the keys below `stops`, one stop per row."""
    rows = np.zeros((len(stops), -(-n_keys // 8)), np.uint8)
    for row, stop in zip(rows, np.clip(stops, 0, n_keys).tolist(), strict=True):
        full, rest = divmod(stop, 8)
        row[:full] = 0xFF
        if rest:
            row[full] = _LEADING_BITS[rest]
    return rows


class CellCounts(Struct):
    """Counts of the cells of one kind, per row and per tile (`tiles` is None without any cell).

    `first` is the first cell as (row of the counted part, key). Tiles are aligned to the mask grid:
    row 0 is row `tile_offset` of its tile.
    """

    row_counts: npt.NDArray[np.int32]
    n_keys: int
    tile_offset: int
    tiles: Tiles | None = None
    first: tuple[int, int] | None = None

    @property
    def n(self) -> int:
        """Number of cells."""
        return int(self.row_counts.sum(dtype=np.int64))

    def add(self, row: int, packed: PackedMask) -> None:
        """Count a chunk of packed rows whose first row is `row`."""
        ones = BIT_COUNTS[packed]
        counts = ones.sum(axis=1, dtype=np.int32)
        if not counts.any():
            return
        self.row_counts[row : row + len(packed)] = counts
        if self.tiles is None:
            n_rows = self.tile_offset + len(self.row_counts)
            self.tiles = np.zeros((-(-n_rows // TILE), -(-self.n_keys // TILE)), np.uint8)
            at = int(np.flatnonzero(counts)[0])
            self.first = row + at, int(np.flatnonzero(np.unpackbits(packed[at]))[0])
        tile = (self.tile_offset + row + np.arange(len(packed))) // TILE
        edges = np.flatnonzero(np.diff(tile, prepend=-1))
        sums = np.add.reduceat(ones, edges, axis=0, dtype=np.uint8)
        self.tiles[tile[0] : tile[0] + len(sums)] += sums


class MaskCounts(Struct, frozen=True):
    """Counts of the open cells of some rows, and of the differences from the declared mask.

    `key_counts` is the number of rows that attend to each key, int32 (keys,). `group_counts` counts
    open cells by group of the row and group of the key, int64 (groups, groups). `lost` cells are
    declared open but not executed, `leaked` cells executed but declared masked; both are None
    without a declared mask. `lost_groups` and `leaked_groups` count them as `group_counts` does,
    None without any cell.
    """

    open: CellCounts
    key_counts: npt.NDArray[np.int32]
    group_counts: Counts
    lost: CellCounts | None = None
    leaked: CellCounts | None = None
    lost_groups: Counts | None = None
    leaked_groups: Counts | None = None


class PositionGroups(Struct, frozen=True):
    """Groups of positions: `starts` is ascending from 0, and the last group has no end."""

    starts: tuple[int, ...] = (0,)

    def group_of(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.intp]:
        """Return the group of each position."""
        group: npt.NDArray[np.intp] = np.searchsorted(self.starts, positions, side="right") - 1
        return np.maximum(group, 0)

    def empty_table(self) -> Counts:
        """Return zeros, int64 (groups, groups)."""
        return np.zeros((len(self.starts), len(self.starts)), np.int64)


def count_cells(
    chunks: Iterable[tuple[int, PackedMask]],
    positions: IntArray,
    n_keys: int,
    *,
    first_row: int = 0,
    groups: PositionGroups | None = None,
    declared: Callable[[int, int], PackedMask] | None = None,
) -> MaskCounts:
    """Count the cells of packed rows, given as chunks (first row, at most `CHUNK_ROWS` rows).

    `positions` are the positions of the rows, `first_row` the index of row 0 in the mask grid,
    which tiles are aligned to. `declared(start, stop)` returns the declared rows, packed.
    """
    groups = groups or PositionGroups()
    n_rows = len(positions)
    names = ("open",) if declared is None else ("open", "lost", "leaked")
    offset = first_row % TILE
    counts = {name: CellCounts(np.zeros(n_rows, np.int32), n_keys, offset) for name in names}
    columns = np.zeros(n_keys, np.int32)
    tables = {"open": groups.empty_table()}
    of_row, borders = groups.group_of(positions), np.minimum((*groups.starts, n_keys), n_keys)
    for row, packed in chunks:
        counts["open"].add(row, packed)
        group = of_row[row : row + len(packed)]
        for number, sums in _sum_runs(packed, n_keys, group):
            columns += sums
            tables["open"][number] += _sum_groups(sums, borders)
        if declared is None:
            continue
        expected = declared(row, row + len(packed))
        for kind, cells in (("lost", expected & ~packed), ("leaked", packed & ~expected)):
            counts[kind].add(row, cells)
            if cells.any():
                table = tables.setdefault(kind, groups.empty_table())
                for number, sums in _sum_runs(cells, n_keys, group):
                    table[number] += _sum_groups(sums, borders)
    lost, leaked = (counts.get(kind) for kind in ("lost", "leaked"))
    differing = (tables.get(kind) for kind in ("lost", "leaked"))
    return MaskCounts(counts["open"], columns, tables["open"], lost, leaked, *differing)


def _sum_runs(
    packed: PackedMask, n_keys: int, group: npt.NDArray[np.intp]
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield the group of each run of rows of one group, and its number of cells per key."""
    bits = np.unpackbits(packed, axis=1, count=n_keys)
    edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(group)]
    for start, stop in pairwise(edges):
        yield int(group[start]), np.add.reduce(bits[start:stop], axis=0, dtype=np.uint8)


def _sum_groups(counts: npt.NDArray[np.uint8], borders: npt.NDArray[np.integer]) -> Counts:
    """Return the sums of counts per key between borders, int64 (groups,)."""
    totals = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    sums: Counts = np.diff(totals[borders])
    return sums
