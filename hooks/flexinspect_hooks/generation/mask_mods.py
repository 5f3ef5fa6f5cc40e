"""A `mask_mod` and a `BlockMask` for FlexAttention from a `MaskSpec`.

The `flexinspect.masks.algebra.MaskSpec` is the same object that numpy draws and tests. It has two
forms of `mask_mod`. The arithmetic form compares indices with constants: uncompiled flex runs it
under four nested vmaps, where a gather costs milliseconds and a comparison tens of microseconds.
The table form gathers from tensors, so that one compiled graph serves all prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexinspect.masks.algebra import (
    BLOCK_SIZE,
    BlockTables,
    BoolArray,
    MaskSpec,
    block_tables,
    row_block_tables,
    row_chunks,
    stack_block_rows,
)

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

MAX_EVALUATED_CELLS = 1 << 22
"""Cells, over heads, evaluated in one mask_mod call: 32 MiB for each int64 it computes."""


@dataclass(frozen=True, slots=True)
class ForwardWindow:
    """The rows and keys of one forward pass, as positions in the sequence.

    There are `q_len` rows from `q_offset` on, and `kv_len` keys from `kv_offset` on (not 0 when a
    sliding cache has dropped the oldest keys). `heads` is the model's number of query heads, for a
    mask_mod that depends on the head; 0 if its configuration does not have it.
    """

    q_len: int
    kv_len: int
    q_offset: int
    kv_offset: int = 0
    heads: int = 1


def arithmetic_mask_mod(spec: MaskSpec, window: ForwardWindow) -> MaskMod:
    """The mask_mod as comparisons with constants, from indices local to the window."""
    if window.q_len == 1:
        return _row_mask_mod(spec, window)
    q_offset, kv_offset = window.q_offset, window.kv_offset
    last = spec.region(q_offset + window.q_len - 1)
    regions = range(spec.region(q_offset), last + 1)
    steps = [(spec.starts[r], spec.prefix_stops[r], spec.local_starts[r]) for r in regions]
    lows = _steps([(start, low) for start, _, low in steps])
    heads = _steps(_free_heads(steps))
    if lows == [(steps[0][0], 0)]:
        return _causal_mask_mod(q_offset - kv_offset)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q, kv = q_idx + q_offset, kv_idx + kv_offset
        return (kv <= q) & ((kv >= _piecewise(lows, q)) | (kv < _piecewise(heads, q)))

    return mask_mod


def _row_mask_mod(spec: MaskSpec, window: ForwardWindow) -> MaskMod:
    """The mask_mod of one row, whose position is known: under vmap each operation is expensive."""
    offset, region = window.kv_offset, spec.region(window.q_offset)
    last = window.q_offset - offset
    low, head = int(spec.local_starts[region]) - offset, int(spec.prefix_stops[region]) - offset

    def up_to(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= last

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= last) & ((kv_idx >= low) | (kv_idx < head))

    return up_to if low <= 0 else mask_mod


def _causal_mask_mod(offset: int) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx + offset

    return mask_mod


def _free_heads(steps: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Where `low` is 0 every key is open and `head` has no effect: take that of the neighbour."""
    bound = [head for _, head, low in steps if low]
    head = bound[0] if bound else 0
    out = []
    for start, own, low in steps:
        head = own if low else head
        out.append((start, head))
    return out


def _steps(values: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Drop the starts at which a piecewise constant function does not change."""
    return [v for i, v in enumerate(values) if i == 0 or v[1] != values[i - 1][1]]


def _piecewise(steps: list[tuple[int, int]], q: Tensor) -> Tensor | int:
    value: Tensor | int = steps[0][1]
    for start, new in steps[1:]:
        value = torch.where(q >= start, new, value)
    return value


class SpecTables:
    """A `MaskSpec` as int32 tensors over positions, for compiled kernels: one graph, any prompt.

    `q_offset` and `kv_offset` are 0-dim tensors that are written in place before each forward
    pass, so that the decode graph is compiled once.
    """

    def __init__(self, spec: MaskSpec, length: int, device: torch.device) -> None:
        region = np.searchsorted(spec.starts, np.arange(length), side="right") - 1
        prefix_stops = np.asarray(spec.prefix_stops, np.int32)[region]
        local_starts = np.asarray(spec.local_starts, np.int32)[region]
        self.prefix_stops = torch.from_numpy(prefix_stops).to(device)
        self.local_starts = torch.from_numpy(local_starts).to(device)
        self.q_offset = torch.zeros((), dtype=torch.int32, device=device)
        self.kv_offset = torch.zeros((), dtype=torch.int32, device=device)

    def mask_mod(self, window: ForwardWindow) -> MaskMod:
        """The mask_mod of this window; it also moves those of earlier windows."""
        self.q_offset.fill_(window.q_offset)
        self.kv_offset.fill_(window.kv_offset)
        head, low = self.prefix_stops, self.local_starts
        q_offset, kv_offset = self.q_offset, self.kv_offset

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            q, kv = q_idx + q_offset, kv_idx + kv_offset
            return (kv <= q) & ((kv >= low[q]) | (kv < head[q]))

        return mask_mod


class BlockTableCache:
    """Block tables as tensors, rebuilt only when the set of visited blocks changes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._key: tuple[object, ...] = ()
        self._tensors: tuple[Tensor, ...] = ()

    def block_mask(
        self, tables: BlockTables, mask_mod: MaskMod, window: ForwardWindow
    ) -> BlockMask:
        """A BlockMask of batch 1 with these tables and this mask_mod.

        Tables of shape (row blocks, key blocks) are for all heads; with a leading axis of heads,
        each head has its own.
        """
        key = (tables.partial.shape, tables.partial.tobytes(), tables.full.tobytes())
        if key != self._key:
            partial, full = _block_list(tables.partial), _block_list(tables.full)
            tensors = (*partial, *full)
            self._tensors = tuple(torch.from_numpy(t).to(self._device) for t in tensors)
            self._key = key
        kv_num, kv_idx, full_num, full_idx = self._tensors
        return BlockMask.from_kv_blocks(
            kv_num,
            kv_idx,
            full_num,
            full_idx,
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=mask_mod,
            seq_lengths=(window.q_len, window.kv_len),
            compute_q_blocks=False,
        )


def _block_list(blocks: BoolArray) -> tuple[np.ndarray, np.ndarray]:
    """The counts (1, heads, rows) and indices (1, heads, rows, key blocks), both int32."""
    order = np.argsort(~blocks, axis=-1, kind="stable").astype(np.int32)
    counts = blocks.sum(axis=-1, dtype=np.int32)
    if blocks.ndim == 2:
        counts, order = counts[None], order[None]
    return counts[None], order[None]


def window_block_tables(spec: MaskSpec, window: ForwardWindow) -> BlockTables:
    """The block tables of a window, built from its rows only, never from the full grid."""
    if window.kv_offset:
        whole = spec.dense(window.q_len, window.kv_offset + window.kv_len, q_offset=window.q_offset)
        kept = whole[:, window.kv_offset :]
        return stack_block_rows(kept[a:b] for a, b in row_chunks(window.q_len))
    if window.q_len == 1:
        return row_block_tables(spec, window.q_offset, window.kv_len)
    return block_tables(spec, window.q_len, window.kv_len, q_offset=window.q_offset)


def all_partial(tables: BlockTables) -> BlockTables:
    """Tables that apply the mask_mod in every visited block, for one that was narrowed."""
    return BlockTables(tables.partial | tables.full, np.zeros_like(tables.full))


def head_groups(
    mask_mod: MaskMod, zero: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Iterator[Tensor]:
    """Yield the cells of a mask_mod, bool (heads, rows, keys), one group of heads at a time.

    The mask_mod is called with 0-dim index tensors under vmap, exactly as flex calls it; `zero` is
    the batch index. If it ignores the head, there is one group of one head, at the cost of one
    head: vmap then gives the heads a stride of 0, so they cannot differ.
    """
    over_kv = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    over_q = torch.vmap(over_kv, in_dims=(None, None, 0, None))
    over_h = torch.vmap(over_q, in_dims=(None, 0, None, None))
    # A single head would not show whether the mask_mod depends on the head.
    size = max(MAX_EVALUATED_CELLS // max(len(q_idx) * len(kv_idx), 1), 2)
    for start in range(0, len(h_idx), size):
        cells: Tensor = over_h(zero, h_idx[start : start + size], q_idx, kv_idx)
        if start == 0 and len(cells) > 1 and cells.stride(0) == 0:
            yield cells[:1]
            return
        yield cells
