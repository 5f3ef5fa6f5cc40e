"""The blocks of keys that the rows of a mask visit, as FlexAttention has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.masks.mask_presets import BoolArray, MaskSpec

BlockStates = npt.NDArray[np.uint8]

BLOCK_SIZE = 128  # tokens per block of a block mask, the default of `create_block_mask`


def row_chunks(n_rows: int, size: int = BLOCK_SIZE) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of row chunks, so that a whole mask is never in memory."""
    for start in range(0, n_rows, size):
        yield start, min(start + size, n_rows)


class BlockTables(Struct, frozen=True):
    """The key blocks that each row block visits; only `partial` blocks evaluate the `mask_mod`.

    Both are bool of shape (row blocks, key blocks).
    """

    partial: BoolArray
    full: BoolArray


def block_tables(spec: MaskSpec, n_q: int, n_kv: int, *, q_offset: int = 0) -> BlockTables:
    """Return the block tables of a mask, computed one row of blocks at a time.

    A block that extends beyond the mask is never full, as in `create_block_mask`.
    """
    chunks = ((stop - start, q_offset + start) for start, stop in row_chunks(n_q))
    return stack_block_rows(spec.dense(n, n_kv, q_offset=first) for n, first in chunks)


def row_block_tables(spec: MaskSpec, q_idx: int, n_kv: int) -> BlockTables:
    """Return the block tables of one row, as in a decode step, without computing the mask.

    A block of one row is never full, so every block that overlaps the visible keys is partial.
    """
    region = spec.region(q_idx)
    starts = np.arange(0, n_kv, BLOCK_SIZE)
    stops = starts + BLOCK_SIZE
    partial: BoolArray = (starts <= q_idx) & (
        (starts < spec.prefix_stops[region])
        | ((stops > spec.local_starts[region]) & (spec.local_starts[region] <= q_idx))
    )
    return BlockTables(partial[None], np.zeros((1, len(starts)), np.bool_))


def stack_block_rows(chunks: Iterable[BoolArray]) -> BlockTables:
    """Return the block tables of a mask in chunks of at most `BLOCK_SIZE` rows, (rows, n_kv)."""
    states = np.stack([block_row_states(chunk, BLOCK_SIZE, BLOCK_SIZE) for chunk in chunks])
    return BlockTables(partial=states == 1, full=states == 2)


def block_row_states(cells: BoolArray, size_q: int, size_kv: int) -> BlockStates:
    """Return which cells of each block are open, uint8 (..., key blocks): 0 none, 1 some, 2 all.

    `cells` are (..., at most `size_q` rows, keys): the rows of one row of blocks. A block that
    extends beyond the mask counts at most as 1.
    """
    n_rows, n_kv = cells.shape[-2:]
    edges = np.arange(0, n_kv, size_kv)
    states = np.logical_or.reduceat(cells.any(axis=-2), edges, axis=-1).astype(np.uint8)
    if n_rows == size_q:
        full = np.logical_and.reduceat(cells.all(axis=-2), edges, axis=-1)
        full[..., -1] &= n_kv % size_kv == 0
        states += full
    return states
