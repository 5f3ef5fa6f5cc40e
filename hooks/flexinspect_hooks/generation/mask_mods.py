"""From a mask rule to what FlexAttention takes: a `mask_mod` and a `BlockMask`.

The rule is the same object that numpy draws and tests (`flexinspect.masks.algebra.MaskRule`). Two forms of
`mask_mod` are made from it. The arithmetic form compares indices with constants: uncompiled flex
runs the rule under four nested vmaps, where a gather costs milliseconds and a comparison tens of
microseconds. The table form gathers from tensors, so that one compiled graph serves all prompts.
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
"""Cells, over heads, that a rule is evaluated on at once: 32 MiB for each int64 it computes."""


@dataclass(frozen=True, slots=True)
class ForwardWindow:
    """Which rows and keys a forward computes: `q_len` rows from `q_offset`, `kv_len` keys from
    `kv_offset` (not 0 when a sliding cache has dropped the oldest keys).

    `heads` is the model's number of query heads, for rules that tell heads apart; 0 when its
    configuration does not say.
    """

    q_len: int
    kv_len: int
    q_offset: int
    kv_offset: int = 0
    heads: int = 1


def arithmetic_mask_mod(spec: MaskSpec, window: ForwardWindow) -> MaskMod:
    """Return the rule as comparisons with constants, local indices in, bool out."""
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
    """Return the rule of one row, whose position is known: each operation under vmap counts."""
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
    """Where `low` is 0 the row sees everything and `head` may be anything: take the neighbour's."""
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
    """A rule as int32 tensors over positions, for compiled kernels: one graph, any prompt.

    `offsets` holds (q_offset, kv_offset) and is written in place before each forward, so that the
    decode graph is compiled once.
    """

    def __init__(self, spec: MaskSpec, length: int, device: torch.device) -> None:
        region = np.searchsorted(spec.starts, np.arange(length), side="right") - 1
        self.prefix_stops = torch.from_numpy(np.asarray(spec.prefix_stops, np.int32)[region]).to(
            device
        )
        self.local_starts = torch.from_numpy(np.asarray(spec.local_starts, np.int32)[region]).to(
            device
        )
        self.q_offset = torch.zeros((), dtype=torch.int32, device=device)
        self.kv_offset = torch.zeros((), dtype=torch.int32, device=device)

    def mask_mod(self, window: ForwardWindow) -> MaskMod:
        """Return the rule for this window; the offsets of earlier windows move with it."""
        self.q_offset.fill_(window.q_offset)
        self.kv_offset.fill_(window.kv_offset)
        head, low, offset, kv_offset = (
            self.prefix_stops,
            self.local_starts,
            self.q_offset,
            self.kv_offset,
        )

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            q, kv = q_idx + offset, kv_idx + kv_offset
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
        """Return a BlockMask of batch 1 with these tables and this rule.

        Tables of shape (row blocks, key blocks) are for all heads; with an axis of heads before
        these, each head has its own.
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
    """Return (counts, indices) as int32, (1, heads, rows) and (1, heads, rows, key blocks)."""
    order = np.argsort(~blocks, axis=-1, kind="stable").astype(np.int32)
    counts = blocks.sum(axis=-1, dtype=np.int32)
    if blocks.ndim == 2:
        counts, order = counts[None], order[None]
    return counts[None], order[None]


def window_block_tables(spec: MaskSpec, window: ForwardWindow) -> BlockTables:
    """Return the block tables of a window, made from its rows alone, never from a full grid."""
    if window.kv_offset:
        whole = spec.dense(window.q_len, window.kv_offset + window.kv_len, q_offset=window.q_offset)
        kept = whole[:, window.kv_offset :]
        return stack_block_rows(kept[a:b] for a, b in row_chunks(window.q_len))
    if window.q_len == 1:
        return row_block_tables(spec, window.q_offset, window.kv_len)
    return block_tables(spec, window.q_len, window.kv_len, q_offset=window.q_offset)


def all_partial(tables: BlockTables) -> BlockTables:
    """Return tables that apply the rule in every visited block, for a rule narrowed afterwards."""
    return BlockTables(tables.partial | tables.full, np.zeros_like(tables.full))


def head_groups(
    mask_mod: MaskMod, zero: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Iterator[Tensor]:
    """Yield a rule's cells for these indices, bool (group, rows, keys), some heads after others.

    The rule is called with 0-dim index tensors under vmap, exactly as flex calls it; `zero` is the
    batch. Where the rule takes no notice of the head, one group of one comes, at the
    price of one head: vmap then gives the heads a stride of 0, so they cannot differ.
    """
    over_kv = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    over_q = torch.vmap(over_kv, in_dims=(None, None, 0, None))
    over_h = torch.vmap(over_q, in_dims=(None, 0, None, None))
    # One head alone would not show whether the rule tells heads apart.
    size = max(MAX_EVALUATED_CELLS // max(len(q_idx) * len(kv_idx), 1), 2)
    for start in range(0, len(h_idx), size):
        cells: Tensor = over_h(zero, h_idx[start : start + size], q_idx, kv_idx)
        if start == 0 and len(cells) > 1 and cells.stride(0) == 0:
            yield cells[:1]
            return
        yield cells
