"""Finds the rows of a mask that see no key, and counts who reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexinspect.masks import BoolArray, row_chunks
from flexinspect.records import MaskRecord
from flexinspect.rules.words import Positions

_EMPTY_ROW_CHUNK = 256
"""Rows looked at in one piece, so that a copy of a large mask takes a few MiB."""


@dataclass(frozen=True, slots=True)
class EmptyRows:
    """Rows of one mask that see no key, in all heads or only in `heads`.

    `mask` comes without its cells. `rows` counts from the mask's first row, ascending; `last` is
    the mask's last row. `readers` says for each of the rows how many other rows have it among their
    keys, in any head, and `first_reader` which is the first of them (-1: none); both are None where
    cells were not recorded. `averaged` says of each row whether softmax gave all keys the same
    weight instead of none (None: of no row).
    """

    mask: MaskRecord
    rows: Positions
    last: int
    readers: npt.NDArray[np.int64] | None
    heads: tuple[int, ...] = ()
    n_heads: int = 1
    averaged: BoolArray | None = None
    first_reader: npt.NDArray[np.int64] | None = None

    def select(self, keep: BoolArray) -> EmptyRows:
        """Return some of the rows."""
        readers = None if self.readers is None else self.readers[keep]
        averaged = None if self.averaged is None else self.averaged[keep]
        first = None if self.first_reader is None else self.first_reader[keep]
        rows = self.rows[keep]
        return replace(self, rows=rows, readers=readers, averaged=averaged, first_reader=first)

    @property
    def has_newest(self) -> bool:
        """Whether the last row is one of them: the one whose output chooses the next token."""
        return int(self.rows[-1]) == self.last

    @property
    def n_read(self) -> int:
        """How many of the rows others read (0 where that is not known)."""
        return 0 if self.readers is None else int(np.count_nonzero(self.readers))


def find_empty_rows(mask: MaskRecord) -> tuple[EmptyRows, ...]:
    """Return the rows of a mask that see nothing in any head, and those that do so in some."""
    cells, offset = intended_cells(mask), mask.q_offset - mask.kv_offset
    if cells is None:
        return _empty_blocks(mask)
    if mask.kind.startswith("none"):
        return ()
    if cells.shape[1] == 1 < mask.q_len:  # one row that is broadcast
        cells = np.broadcast_to(cells, (len(cells), mask.q_len, cells.shape[2]))
    empty = _empty_by_head(cells, offset)
    if empty is None:
        return ()
    everywhere = empty.all(axis=0)
    parts = []
    for rows, heads in (
        (np.flatnonzero(everywhere), ()),
        (np.flatnonzero(empty.any(axis=0) & ~everywhere), _heads_with_any(empty & ~everywhere)),
    ):
        if len(rows):
            readers = count_readers(cells, rows + offset, offset)
            first = _find_first_readers(cells, rows + offset, offset)
            last, n_heads = cells.shape[1] - 1, len(cells)
            averaged = _averaged_rows(mask, rows)
            parts.append(
                EmptyRows(
                    _without_arrays(mask), rows, last, readers, heads, n_heads, averaged, first
                )
            )
    return tuple(parts)


def intended_cells(mask: MaskRecord) -> BoolArray | None:
    """Return the cells without the rows that were meant to be closed and are averaged instead.

    Such a row has all keys, but nobody asked for them, and what it makes of them is no attention:
    it sees no key in any sense that matters, and whom it reads does not matter either.
    """
    if mask.cells is None or mask.averaged is None:
        return mask.cells
    asked: BoolArray = mask.cells & ~mask.averaged[..., None]
    return asked


def _averaged_rows(mask: MaskRecord, rows: Positions) -> BoolArray | None:
    if mask.averaged is None:
        return None
    averaged: BoolArray = np.any(mask.averaged, axis=0)
    return averaged.repeat(len(rows)) if len(averaged) == 1 else averaged[rows]


def _empty_by_head(cells: BoolArray, offset: int) -> BoolArray | None:
    """Return which rows are empty, bool (heads, rows), or None when none is.

    A row that sees itself is not empty, which settles most masks by their diagonal: of 8192 rows
    and keys in a hundredth of the time that reading all cells takes.
    """
    heads, n_rows, n_keys = cells.shape
    closed = np.ones((heads, n_rows), np.bool_)
    if 0 <= offset <= n_keys - n_rows:
        closed = ~cells.diagonal(offset, 1, 2)
        if not closed.any():
            return None
    rows = np.flatnonzero(closed.any(axis=0))
    empty = np.zeros((heads, n_rows), np.bool_)
    for start, stop in row_chunks(len(rows), _EMPTY_ROW_CHUNK):
        some = rows[start:stop]
        empty[:, some] = ~cells[:, some].any(axis=2)
    return empty if empty.any() else None


def count_readers(cells: BoolArray, columns: Positions, offset: int) -> npt.NDArray[np.int64]:
    """Return for each key how many rows see it in any head, without the key's own row.

    `columns` count from the mask's first key and may lie outside; row r is at column r + offset.
    """
    counts = np.zeros(len(columns), np.int64)
    for inside, _, seen in _iter_readers(cells, columns, offset):
        counts[inside] += np.count_nonzero(seen, axis=0)
    return counts


def _find_first_readers(cells: BoolArray, columns: Positions, offset: int) -> npt.NDArray[np.int64]:
    """Return for each key the first row that sees it (see `count_readers`), -1 for none."""
    first = np.full(len(columns), -1, np.int64)
    for inside, start, seen in _iter_readers(cells, columns, offset):
        new = inside[(first[inside] < 0) & seen.any(axis=0)]
        first[new] = start + seen.argmax(axis=0)[np.isin(inside, new)]
    return first


def _iter_readers(
    cells: BoolArray, columns: Positions, offset: int
) -> Iterator[tuple[Positions, int, BoolArray]]:
    """Yield the columns inside, and for each piece of rows its start and who sees them.

    What is seen is bool (rows of the piece, columns inside), in any head, own rows left out.
    """
    inside = np.flatnonzero((columns >= 0) & (columns < cells.shape[2]))
    columns = columns[inside]
    for start, stop in row_chunks(cells.shape[1], _EMPTY_ROW_CHUNK):
        seen: BoolArray = np.any(cells[:, start:stop, columns], axis=0)
        own_row = columns - offset - start
        here = np.flatnonzero((own_row >= 0) & (own_row < stop - start))
        seen[own_row[here], here] = False
        yield inside, start, seen


def _empty_blocks(mask: MaskRecord) -> tuple[EmptyRows, ...]:
    """Return the rows of blocks that the compiled kernel never visits."""
    if not mask.compiled or mask.partial is None or mask.block_q is None:
        return ()
    visited = mask.partial if mask.full is None else mask.partial | mask.full
    empty = ~visited.any(axis=(0, 2))
    rows = np.flatnonzero(empty.repeat(mask.block_q)[: mask.q_len])
    if not len(rows):
        return ()
    return (EmptyRows(_without_arrays(mask), rows, mask.q_len - 1, None, n_heads=len(visited)),)


def _without_arrays(mask: MaskRecord) -> MaskRecord:
    """Return the mask without what is large, as it is remembered for the whole run."""
    return replace(mask, cells=None, averaged=None, partial=None, full=None)


def _heads_with_any(empty: BoolArray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(empty.any(axis=1)).tolist())
