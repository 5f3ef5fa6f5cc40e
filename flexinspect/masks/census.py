"""Counting the open cells of a mask of any size, in bands of rows and in bounded memory.

A census counts open cells by ranges of rows and of keys, notes which rows see anything, and counts
the cells that a mask shares with other masks (probes), each with its first cell. Bands are counted
in threads: numpy releases the GIL while it compares.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.core.errors import MaskError
from flexinspect.masks.cell_mask import CellMask
from flexinspect.masks.counting import Counts
from flexinspect.masks.mask_presets import BoolArray, IntArray

BAND_ROWS = 240  # fewer than 256, so that the sum of a key's cells fits into a byte
TILE_KEYS = 8192  # with `BAND_ROWS`: cells that are evaluated at once, 2 MB
MAX_TABLE = 1 << 24
"""Most ranges of rows times ranges of keys of a census: 128 MB."""

Report = Callable[[float], None]
"""Is called with the share of the work that is done, 0 to 1."""

T = TypeVar("T")


def part_of(report: Report | None, number: int, n_parts: int) -> Report | None:
    """Return what reports part `number` of `n_parts` equal parts of the work."""
    if report is None:
        return None
    return lambda share: report((number + share) / n_parts)


class Probe(Struct, frozen=True):
    """How many cells two masks share, and the first one as (row, key), None without any."""

    count: int = 0
    first: tuple[int, int] | None = None


class Census(Struct, frozen=True):
    """The open cells of a mask.

    `table` counts them by range of rows and range of keys, int64 (row ranges, key ranges).
    `row_any` says which rows attend to any key, bool (rows,); `key_counts` is how many rows attend
    to each key, int64 (keys,). `probes` are the cells shared with each probe, in order.
    """

    table: Counts
    row_any: BoolArray
    key_counts: Counts
    probes: tuple[Probe, ...] = ()

    @property
    def n_open(self) -> int:
        """The number of open cells."""
        return int(self.key_counts.sum())


def take_census(
    mask: CellMask,
    row_edges: IntArray,
    key_edges: IntArray,
    *,
    head: int = 0,
    probes: Sequence[CellMask] = (),
    report: Report | None = None,
    threads: int | None = None,
) -> Census:
    """Count the open cells of the rows and keys between the first and the last of the edges.

    The edges ascend strictly; range n holds positions `edges[n]` to `edges[n + 1] - 1`. Raises
    `MaskError` for more than `MAX_TABLE` pairs of ranges.
    """
    shape = (len(row_edges) - 1, len(key_edges) - 1)
    if shape[0] * shape[1] > MAX_TABLE:
        what = f"A table of {shape[0]} by {shape[1]} ranges is too large to count cells in."
        raise MaskError(what, hint="Use fewer segments or a larger block size.")
    first_row, first_key = int(row_edges[0]), int(key_edges[0])
    n_rows, n_keys = int(row_edges[-1]) - first_row, int(key_edges[-1]) - first_key
    row_any, table = np.zeros(n_rows, np.bool_), np.zeros(shape, np.int64)
    key_counts, found = np.zeros(n_keys, np.int64), [Probe()] * len(probes)
    counter = _BandCounter(mask, row_edges, key_edges, head, tuple(probes))
    for band in map_bands(counter.count, first_row, first_row + n_rows, report, threads):
        row_any[band.start - first_row :][: len(band.row_any)] = band.row_any
        key_counts += band.key_counts
        table[band.first_range :][: len(band.table)] += band.table
        found = [_joined(*pair) for pair in zip(found, band.probes, strict=True)]
    return Census(table, row_any, key_counts, tuple(found))


def map_bands(
    function: Callable[[int, int], T],
    start: int,
    stop: int,
    report: Report | None = None,
    threads: int | None = None,
) -> Iterator[T]:
    """Yield `function(first row, row after the last)` of each band of rows, in order.

    The bands are computed in `threads` threads, by default one per processor.
    """
    bands = [(row, min(row + BAND_ROWS, stop)) for row in range(start, stop, BAND_ROWS)]
    n_threads = min(threads or _n_processors(), len(bands))

    def report_band(number: int) -> None:
        if report is not None:
            report((number + 1) / len(bands))

    if n_threads <= 1:
        for number, band in enumerate(bands):
            yield function(*band)
            report_band(number)
        return
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(n_threads) as executor:
        try:
            for number in range(len(bands)):
                while len(pending) < 2 * n_threads and number + len(pending) < len(bands):
                    pending.append(executor.submit(function, *bands[number + len(pending)]))
                yield pending.popleft().result()
                report_band(number)
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _n_processors() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def tiles(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield (first key, key after the last) of each tile of a band."""
    for key in range(start, stop, TILE_KEYS):
        yield key, min(key + TILE_KEYS, stop)


def _joined(one: Probe, other: Probe) -> Probe:
    return Probe(one.count + other.count, one.first or other.first)


class _Band(Struct, frozen=True):
    """The census of a band: its ranges of rows begin with number `first_range`."""

    start: int
    first_range: int
    table: Counts
    row_any: BoolArray
    key_counts: npt.NDArray[np.int32]
    probes: list[Probe]


class _BandCounter(Struct, frozen=True):
    """Counts bands of one mask."""

    mask: CellMask
    row_edges: IntArray
    key_edges: IntArray
    head: int
    probes: tuple[CellMask, ...]

    def count(self, start: int, stop: int) -> _Band:
        """Return the census of the rows `start` to `stop`."""
        rows = np.arange(start, stop, dtype=np.int32)
        ranges = np.searchsorted(self.row_edges, rows, side="right") - 1
        runs = np.flatnonzero(np.diff(ranges, prepend=-1))
        sums = np.zeros((len(runs), int(self.key_edges[-1] - self.key_edges[0])), np.uint8)
        row_any = np.zeros(len(rows), np.bool_)
        found = [Probe()] * len(self.probes)
        for low, high in tiles(int(self.key_edges[0]), int(self.key_edges[-1])):
            keys = np.arange(low, high, dtype=np.int32)
            cells = self.mask.cells(rows, keys, self.head)
            own_any = cells.any(axis=1)
            if not own_any.any():
                continue
            row_any |= own_any
            bits, at = cells.view(np.uint8), low - int(self.key_edges[0])
            for number, (first, last) in enumerate(zip(runs, [*runs[1:], len(rows)], strict=True)):
                part = sums[number, at : at + len(keys)]
                np.add.reduce(bits[first:last], axis=0, dtype=np.uint8, out=part)
            for number, probe in enumerate(self.probes):
                found[number] = self._probe(probe, cells, rows, keys, found[number])
        key_counts = np.add.reduce(sums, axis=0, dtype=np.int32)
        borders = self.key_edges[:-1] - self.key_edges[0]
        table = np.add.reduceat(sums, borders, axis=1, dtype=np.int64)
        return _Band(start, int(ranges[0]), table, row_any, key_counts, found)

    def _probe(
        self, probe: CellMask, cells: BoolArray, rows: IntArray, keys: IntArray, before: Probe
    ) -> Probe:
        shared = np.logical_and(cells, probe.cells(rows, keys, self.head))
        count = int(np.count_nonzero(shared))
        if not count:
            return before
        row = int(shared.any(axis=1).argmax())
        first = int(rows[row]), int(keys[int(shared[row].argmax())])
        if before.first is not None and before.first <= first:  # of a tile with lower keys
            first = before.first
        return Probe(before.count + count, first)


def full_edges(n: int) -> IntArray:
    """Return the edges of one range of `n` positions."""
    return np.array((0, n), np.int32)


def fold_table(table: Counts, edges: IntArray, coarse: IntArray, axis: int) -> Counts:
    """Return a table with the ranges of one axis joined to those of `coarse`, a subset of `edges`.

    Its last edge is the last one of `edges`.
    """
    at = np.searchsorted(edges, coarse[:-1])
    folded: Counts = np.add.reduceat(table, at, axis=axis)
    return folded


def past_cells(row_edges: IntArray, key_edges: IntArray) -> Counts:
    """Return the number of cells up to the diagonal, int64 (row ranges, key ranges)."""
    rows, keys = row_edges.astype(np.int64)[:, None], key_edges.astype(np.int64)[None]
    diagonal = np.minimum(rows, keys)  # the rows before each edge that end before the key's edge
    below = diagonal * (diagonal + 1) // 2 + (rows - diagonal) * keys
    cells: Counts = np.diff(np.diff(below, axis=0), axis=1)
    return cells
