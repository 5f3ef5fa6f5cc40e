"""A mask reduced to a picture of any size that keeps its structure.

Uniform sampling would lose a single cell, and a border that is one token off. Here the ranges of a
picture begin where the mask changes. A border between two rows counts as a change where cells
differ from the row before in another way than a diagonal does, which moves by one key per row: a
causal or sliding mask has no change inside, an isolated segment one at each end, a single cell one
before and one after it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.masks.cell_mask import CellMask
from flexinspect.masks.census import Report, map_bands, part_of, take_census, tiles
from flexinspect.masks.counting import Counts
from flexinspect.masks.known_masks import CombinedMask, ShiftedMask, difference_masks
from flexinspect.masks.mask_picture import MaskPicture
from flexinspect.masks.mask_presets import BoolArray, IntArray
from flexinspect.masks.viewport import PixelCounts
from flexinspect.records.prompt import Segment, generated_start

MAX_SMALL_CHANGE = 4
"""Cells up to which a change is kept first: a change of more cells shows in shares as well."""

Numbers = npt.NDArray[np.intp]


def reduce_mask(
    mask: CellMask,
    n_rows: int,
    n_keys: int,
    max_rows: int,
    max_keys: int,
    *,
    segments: tuple[Segment, ...] = (),
    words: Mapping[int, str] | None = None,
    title: str | None = None,
    head: int = 0,
    declared: CellMask | None = None,
    report: Report | None = None,
    threads: int | None = None,
) -> MaskPicture:
    """Return the picture of a mask in at most `max_rows` by `max_keys` cells.

    A cell of the picture is `CLOSED` or `OPEN` only if all of its cells are, else a share between.
    With a `declared` mask, `LOST`, `LEAKED` and `BOTH` mark cells that differ from it. Rows without
    an open cell and keys without one are marked whatever the size. Ranges begin at segments and at
    changes of the mask while there is room, at changes of few cells first; remaining room divides
    the longest ranges. A square picture of a square mask has the same ranges of rows and keys.
    """
    is_reduced, n_masks = n_rows > max_rows or n_keys > max_keys, 1 if declared is None else 3
    n_parts = n_masks + (min(n_masks, 2) if is_reduced else 0)
    parts = (part_of(report, number, n_parts) for number in range(n_parts))
    changes = np.zeros(n_rows + 1, np.int64), np.zeros(n_keys + 1, np.int64)
    for part in (mask, _unlike(mask, declared))[: min(n_masks, 2)] if is_reduced else ():
        found = find_changes(part, n_rows, n_keys, head, next(parts), threads)
        changes = _join_changes(changes[0], found[0]), _join_changes(changes[1], found[1])
    borders = {edge for segment in segments for edge in (segment.start, segment.stop)}
    edges = _choose_edges(changes, borders, (max_rows, max_keys))
    masks = (mask,) if declared is None else (mask, *difference_masks(mask, declared))
    census, *others = (
        take_census(part, *edges, head=head, report=next(parts), threads=threads) for part in masks
    )
    size = np.diff(edges[0])[:, None] * np.diff(edges[1]).astype(np.int64)
    counts = PixelCounts(size, census.table, *(other.table for other in others))
    generated = generated_start(segments)
    return MaskPicture(
        title=mask.name if title is None else title,
        states=counts.pixel_states(),
        row_edges=edges[0],
        key_edges=edges[1],
        empty_rows=_any_in(~census.row_any, edges[0]),
        unseen_keys=_any_in(census.key_counts == 0, edges[1]),
        segments=segments,
        first_generated=generated,
        words=words or {},
    )


def reduce_phases(
    mask: CellMask, segments: tuple[Segment, ...], limit: int
) -> tuple[MaskPicture, MaskPicture | None]:
    """Return the picture of the encoding phase and that of the generation phase.

    The first one has the rows and keys of the prompt, the second one, None without generated
    tokens, their rows with all keys. Both have at most `limit` rows and keys.
    """
    stop = segments[-1].stop if segments else 0
    first = generated_start(segments)
    start = stop if first is None else first
    prompt = tuple(segment for segment in segments if segment.start < start)
    encoding = reduce_mask(mask, start, start, limit, limit, segments=prompt)
    if start == stop:
        return encoding, None
    rows = ShiftedMask(mask, 0, -start)
    found = reduce_mask(rows, stop - start, stop, limit, limit, segments=segments, title=mask.name)
    return encoding, replace(found, row_edges=found.row_edges + np.int32(start))


def _any_in(flags: BoolArray, edges: IntArray) -> BoolArray:
    found: BoolArray = np.logical_or.reduceat(flags, edges[:-1])
    return found


def _unlike(mask: CellMask, declared: CellMask | None) -> CellMask:
    """Return the cells in which two masks differ, as a mask."""
    return mask if declared is None else CombinedMask("or", difference_masks(mask, declared))


# -- where a mask changes -------------------------------------------------------------------------


def find_changes(
    mask: CellMask,
    n_rows: int,
    n_keys: int,
    head: int = 0,
    report: Report | None = None,
    threads: int | None = None,
) -> tuple[Counts, Counts]:
    """Return how many cells change before each row and before each key.

    int64 (rows + 1,) and (keys + 1,). Cells that change as along a diagonal do not count. Beyond
    its ends a mask counts as continuing along its diagonals. A change is 1 only before and after a
    cell that differs from all of its neighbours, and otherwise at least 2.
    """
    finder = _ChangeFinder(mask, n_rows, n_keys, head)
    of_rows, of_keys = np.zeros(n_rows + 1, np.int64), np.zeros(n_keys + 1, np.int64)
    alone_rows, alone_keys = np.zeros(n_rows + 2, np.bool_), np.zeros(n_keys + 2, np.bool_)
    for band in map_bands(finder.find, 0, n_rows, report, threads):
        of_rows[band.start :][: len(band.rows)] = band.rows
        of_keys[:-1] += band.keys
        alone_rows[band.alone_rows] = alone_rows[band.alone_rows + 1] = True
        alone_keys[band.alone_keys] = alone_keys[band.alone_keys + 1] = True
    for counts, alone in ((of_rows, alone_rows), (of_keys, alone_keys)):
        counts[counts == 1] = 2
        counts[alone[:-1]] = 1
        counts[[0, -1]] = 0
    return of_rows, of_keys


class _Changes(Struct, frozen=True):
    """The changes before each row of a band, and before each key in these rows.

    `alone_rows` and `alone_keys` are the rows and keys of cells that differ from all neighbours.
    """

    start: int
    rows: Counts
    keys: Counts
    alone_rows: Numbers
    alone_keys: Numbers


class _ChangeFinder(Struct, frozen=True):
    mask: CellMask
    n_rows: int
    n_keys: int
    head: int

    def find(self, start: int, stop: int) -> _Changes:
        """Return the changes of the rows `start` to `stop`."""
        rows, keys = np.zeros(stop - start, np.int64), np.zeros(self.n_keys, np.int64)
        alone: list[tuple[Numbers, Numbers]] = [(np.zeros(0, np.intp),) * 2]
        for low, high in tiles(0, self.n_keys):
            cells = self._padded(start, stop, low, high)
            # Whether a cell differs from the one before it: [row, key] from [row, key - 1], and
            # from [row - 1, key], for the rows and keys of `cells` but the first.
            across, down = cells[:, 1:] ^ cells[:, :-1], cells[1:] ^ cells[:-1]
            if not (down.any() or across.any()):
                continue
            # A cell that differs from the row before lies on a diagonal if that row changes before
            # this key, and its own row after it. The same with rows and keys exchanged.
            row_changes = down[:, 1:-1] & ~(across[:-1, :-1] & across[1:, 1:])
            key_changes = (across[1:-1] & ~(down[:-1, :-1] & down[1:, 1:]))[:, :-1]
            is_changed = np.logical_or.reduce(row_changes, axis=1)
            changed = np.flatnonzero(is_changed[:-1])
            rows[changed] += np.count_nonzero(row_changes[changed], axis=1)
            is_changed[0] |= start == 0  # cells in the corners, at which padding begins
            is_changed[-1] |= stop == self.n_rows
            keys[low:high] = np.add.reduce(key_changes.view(np.uint8), axis=0, dtype=np.uint8)
            candidates = np.flatnonzero(is_changed[:-1] | is_changed[1:])
            alone.append(self._find_alone(cells, candidates, start, low))
        return _Changes(start, rows, keys, *map(np.concatenate, zip(*alone, strict=True)))

    def _find_alone(
        self, cells: BoolArray, candidates: Numbers, start: int, low: int
    ) -> tuple[Numbers, Numbers]:
        """Return the rows and keys of cells that differ from all neighbours, also diagonal ones.

        Only in the rows `candidates` of a padded tile, counted after its padding. A cell at an end
        of the mask has fewer neighbours.
        """
        above, own, below = (cells[candidates + step] for step in (0, 1, 2))
        inside, row = own[:, 1:-1], candidates + start
        key = np.arange(low, low + inside.shape[1])
        is_first, is_last = (row == 0)[:, None], (row == self.n_rows - 1)[:, None]
        is_alone = (above[:, 1:-1] != inside) | is_first
        is_alone &= (below[:, 1:-1] != inside) | is_last
        is_alone &= (own[:, :-2] != inside) | (key == 0)
        is_alone &= (own[:, 2:] != inside) | (key == self.n_keys - 1)
        is_alone &= (above[:, :-2] != inside) | is_first | (key == 0)
        is_alone &= (below[:, 2:] != inside) | is_last | (key == self.n_keys - 1)
        number, at = np.nonzero(is_alone)
        return row[number], key[at]

    def _padded(self, start: int, stop: int, low: int, high: int) -> BoolArray:
        """Return the cells of a tile with one more row and key on each side."""
        cells = np.zeros((stop - start + 2, high - low + 2), np.bool_)
        first_row, last_row = max(start - 1, 0), min(stop + 1, self.n_rows)
        first_key, last_key = max(low - 1, 0), min(high + 1, self.n_keys)
        rows, keys = slice(first_row - start + 1, None), slice(first_key - low + 1, None)
        inside = self.mask.cells(
            np.arange(first_row, last_row, dtype=np.int32),
            np.arange(first_key, last_key, dtype=np.int32),
            self.head,
        )
        cells[rows, keys][: inside.shape[0], : inside.shape[1]] = inside
        if start == 0:
            cells[0, :-1] = cells[1, 1:]
        if stop == self.n_rows:
            cells[-1, 1:] = cells[-2, :-1]
        if low == 0:
            cells[:-1, 0] = cells[1:, 1]
        if high == self.n_keys:
            cells[1:, -1] = cells[:-1, -2]
        return cells


def _join_changes(one: Counts, other: Counts) -> Counts:
    """Join the changes of a mask and of its difference: where both change, the smaller counts."""
    return np.where((one > 0) & (other > 0), np.minimum(one, other), one + other)


# -- the ranges of a picture ----------------------------------------------------------------------


def _choose_edges(
    changes: tuple[Counts, Counts], borders: set[int], limits: tuple[int, int]
) -> tuple[IntArray, IntArray]:
    """Return the edges of the ranges of rows and of keys."""
    rows, keys = (_Axis(*axis, tuple(borders)) for axis in zip(changes, limits, strict=True))
    if len(rows.changes) == len(keys.changes) and rows.limit == keys.limit:
        both = replace(rows, changes=_join_changes(rows.changes, keys.changes))
        if both.fits:
            edges = both.edges()
            return edges, edges
    return rows.edges(), keys.edges()


class _Axis(Struct, frozen=True):
    """How many cells change before each position of an axis, and where segments begin.

    At most `limit` ranges may be made of it.
    """

    changes: Counts
    limit: int
    borders: tuple[int, ...]

    def positions(self, least: int, most: int) -> Numbers:
        """Return where from `least` to `most` cells change."""
        return np.flatnonzero((self.changes >= least) & (self.changes <= most))

    def inner_borders(self) -> Numbers:
        """Return where segments begin inside of the axis."""
        n = len(self.changes) - 1
        return np.array(sorted(edge for edge in self.borders if 0 < edge < n), np.intp)

    @property
    def fits(self) -> bool:
        """Whether small changes and segments are all edges."""
        important = np.union1d(self.positions(1, MAX_SMALL_CHANGE), self.inner_borders())
        return len(self.changes) - 1 <= self.limit or len(important) < self.limit

    def edges(self) -> IntArray:
        """Return at most `limit` + 1 edges, from 0 to the length."""
        length, room, borders = len(self.changes) - 1, self.limit - 1, self.inner_borders()
        if length <= self.limit:
            return np.arange(length + 1, dtype=np.int32)
        # Many small changes are a texture, which must not take the place of all segments; a single
        # cell has two.
        for_small = max(room - min(len(borders), room // 2), min(room, 2))
        chosen = np.zeros(0, np.intp)
        for size in range(1, MAX_SMALL_CHANGE + 1):
            more = _spread(self.positions(size, size), for_small - len(chosen))
            chosen = np.union1d(chosen, more)
        for group in (borders, self.positions(MAX_SMALL_CHANGE + 1, int(self.changes.max()))):
            more = _spread(np.setdiff1d(group, chosen), room - len(chosen))
            chosen = np.union1d(chosen, more)
        return _divide([0, *chosen.tolist(), length], self.limit)


def _spread(positions: Numbers, room: int) -> Numbers:
    """Return at most `room` of some positions, evenly chosen."""
    if len(positions) <= room:
        return positions
    at = np.linspace(0, len(positions) - 1, max(room, 0)).round().astype(np.intp)
    return positions[at]


def _divide(edges: list[int], limit: int) -> IntArray:
    """Divide the longest ranges until there are `limit`, each into parts of about one length."""
    lengths = np.diff(edges)
    low, high = 1, int(lengths.max())
    while low < high:  # the shortest part length with which all ranges fit
        middle = (low + high) // 2
        if int((-(-lengths // middle)).sum()) <= limit:
            high = middle
        else:
            low = middle + 1
    parts = [
        np.linspace(start, start + length, -(-length // low) + 1).round()[:-1]
        for start, length in zip(edges[:-1], lengths.tolist(), strict=True)
    ]
    return np.concatenate([*parts, edges[-1:]]).astype(np.int32)
