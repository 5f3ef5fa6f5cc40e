"""Where a patched model gets its block masks: from a `MaskSpec`, or from the user's `mask_mod`.

The `MaskSpec` of `flexinspect.masks.mask_presets` is the object that numpy draws and tests. It has
two forms of `mask_mod`. The arithmetic form compares indices with constants: uncompiled flex runs
it under four nested vmaps, where a gather costs milliseconds and a comparison tens of microseconds.
The table form gathers from tensors, so that one compiled graph serves all prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexinspect.core.errors import MaskError, summarize_error
from flexinspect.masks import key_blocks
from flexinspect.masks.key_blocks import BlockTables, row_chunks
from flexinspect.masks.mask_presets import BoolArray, MaskSpec
from flexinspect_hooks.debugger.frames import breakpoints_disabled
from flexinspect_hooks.python_internals.mask_mod_identity import mask_mod_identity

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")

_MAX_ARITHMETIC_REGIONS = 24
MAX_EVALUATED_CELLS = 1 << 22  # of one mask_mod call: 32 MiB for each int64 it computes


class ForwardWindow(Struct, frozen=True):
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


class MaskSource:
    """Builds the block mask of one forward pass, for all layers of one type."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self._device = name, device
        self._tables_key: tuple[object, ...] = ()
        self._table_tensors: dict[str, Any] = {}

    def block_mask(self, window: ForwardWindow, overlay: MaskMod | None) -> BlockMask:
        """The mask of these rows; `overlay` narrows it (a sliding window), in positions."""
        raise NotImplementedError

    def _make_block_mask(
        self, tables: BlockTables, mask_mod: MaskMod, window: ForwardWindow
    ) -> BlockMask:
        """A BlockMask of batch 1; tensors are rebuilt only when the set of visited blocks changes.

        Tables of shape (row blocks, key blocks) are for all heads; with a leading axis of heads,
        each head has its own.
        """
        key = (tables.partial.shape, tables.partial.tobytes(), tables.full.tobytes())
        if key != self._tables_key:
            lists = (*_block_list(tables.partial), *_block_list(tables.full))
            tensors = (torch.from_numpy(one).to(self._device) for one in lists)
            self._table_tensors = dict(zip(BLOCK_TABLES, tensors, strict=True))
            self._tables_key = key
        return BlockMask.from_kv_blocks(
            **self._table_tensors,
            BLOCK_SIZE=key_blocks.BLOCK_SIZE,
            mask_mod=mask_mod,
            seq_lengths=(window.q_len, window.kv_len),
            compute_q_blocks=False,
        )


class SpecMaskSource(MaskSource):
    """Block masks of a `MaskSpec`, built from the rows of the window only, never the full grid."""

    def __init__(
        self, spec: MaskSpec, *, length: int, device: torch.device, compiled: bool
    ) -> None:
        super().__init__(spec.name, device)
        self.spec = spec
        gather = compiled or len(spec.starts) > _MAX_ARITHMETIC_REGIONS
        self._tables = SpecTables(spec, length, device) if gather else None

    def block_mask(self, window: ForwardWindow, overlay: MaskMod | None) -> BlockMask:
        """The mask of the window; a decode step computes its one row."""
        tables = window_block_tables(self.spec, window)
        mask_mod = self.mask_mod(window)
        set_identity(mask_mod, f"{self.spec}@{window.q_offset},{window.kv_offset}", broadcasts=True)
        mask_mod.flexinspect_name = self.name  # type: ignore[attr-defined]
        if overlay is not None:
            mask_mod = with_overlay(mask_mod, overlay, window)
            # The overlay narrows blocks, so the mask_mod has to be applied in every one.
            tables = BlockTables(tables.partial | tables.full, np.zeros_like(tables.full))
        return self._make_block_mask(tables, mask_mod, window)

    def mask_mod(self, window: ForwardWindow) -> MaskMod:
        """The mask_mod of the window."""
        tables = self._tables
        return arithmetic_mask_mod(self.spec, window) if tables is None else tables.mask_mod(window)


class UserMaskSource(MaskSource):
    """Block masks of a user's `mask_mod`, whose indices are positions of the whole sequence.

    If the mask_mod depends on the head, each query head gets its own block tables, because a
    compiled kernel trusts its tables. If it depends on the batch, batch 0 is used, the only one.
    Raises `MaskError` if FlexAttention would refuse the mask_mod (see `check_mask_mod`).
    """

    def __init__(self, mask_mod: MaskMod, *, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.mask_mod = mask_mod
        self._zero = torch.zeros((), dtype=torch.int64, device=device)
        check_mask_mod(mask_mod, name, device)

    def block_mask(self, window: ForwardWindow, overlay: MaskMod | None) -> BlockMask:
        """The mask of the window, in blocks of 128 rows. Raises `MaskError`."""
        mask_mod = shift_mask_mod(self.mask_mod, window)
        mask_mod.flexinspect_rule = self.mask_mod  # type: ignore[attr-defined]
        identity = mask_mod_identity(self.mask_mod)
        set_identity(mask_mod, f"{self.name}{identity}@{window.q_offset},{window.kv_offset}")
        if overlay is not None:
            mask_mod = with_overlay(mask_mod, overlay, window)
        return self._make_block_mask(self._block_tables(mask_mod, window), mask_mod, window)

    def dense(self, n_q: int, n_kv: int | None = None, *, q_offset: int = 0) -> BoolArray:
        """The cells of head 0, bool (n_q, n_kv), for the rows from `q_offset` on."""
        n_keys = q_offset + n_q if n_kv is None else n_kv
        indices = torch.arange(max(q_offset + n_q, n_keys), device=self._device)
        rows = indices[q_offset : q_offset + n_q]
        with breakpoints_disabled():
            cells = evaluate_mask_mod(self.mask_mod, self._zero, self._zero, rows, indices[:n_keys])
        return np.asarray(cells.cpu())

    def _block_tables(self, mask_mod: MaskMod, window: ForwardWindow) -> BlockTables:
        try:
            rows = [self._block_states(mask_mod, window, *c) for c in row_chunks(window.q_len)]
            states = np.stack(rows, axis=1)
        except MaskError:
            raise
        except Exception as error:
            last = window.q_offset + window.q_len - 1
            text = f"The mask_mod {self.name} failed for rows {window.q_offset} to {last} over "
            text += f"{window.kv_len} keys: {summarize_error(error)}"
            hint = "Indices are positions of the whole sequence, generated tokens included."
            raise MaskError(text, hint=hint) from error
        states = states if len(states) > 1 else states[0]
        return BlockTables(partial=states == 1, full=states == 2)

    def _block_states(
        self, mask_mod: MaskMod, window: ForwardWindow, start: int, stop: int
    ) -> key_blocks.BlockStates:
        """One row of blocks, (heads, key blocks); one head if all heads share it."""
        indices = torch.arange(max(stop, window.kv_len), device=self._device)
        h_idx = torch.arange(window.heads or 2, device=self._device)
        q_idx, kv_idx = indices[start:stop], indices[: window.kv_len]
        groups = head_groups(mask_mod, self._zero, h_idx, q_idx, kv_idx)
        size = key_blocks.BLOCK_SIZE
        states = [key_blocks.block_row_states(cells.cpu().numpy(), size, size) for cells in groups]
        heads = np.concatenate(states)
        if len(heads) > 1 and not window.heads:
            text = f"The mask_mod {self.name} depends on the head, but the model's configuration "
            text += "does not have the number of query heads."
            raise MaskError(text, hint="Use a mask_mod that is the same for all heads.")
        return heads


def shift_mask_mod(mask_mod: MaskMod, window: ForwardWindow) -> MaskMod:
    """A mask_mod in indices local to the window, from one in positions of the sequence."""
    q_offset, kv_offset = window.q_offset, window.kv_offset

    def local(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, q_idx + q_offset, kv_idx + kv_offset)

    return local


def with_overlay(mask_mod: MaskMod, overlay: MaskMod, window: ForwardWindow) -> MaskMod:
    """A local mask_mod that opens a cell if `mask_mod` (local) and `overlay` (positions) do."""
    other = shift_mask_mod(overlay, window)

    def both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, q_idx, kv_idx) & other(b, h, q_idx, kv_idx)

    identity = f"{getattr(mask_mod, 'flexinspect_identity', '')}&{mask_mod_identity(overlay)}"
    set_identity(both, identity)
    return both


def set_identity(mask_mod: MaskMod, identity: str, *, broadcasts: bool = False) -> None:
    """Store on a mask_mod what it is made from, and whether it may be called with index grids.

    `broadcasts` is true only if the mask_mod consists of comparisons and one-dimensional look-ups:
    then one call on (n, 1) and (1, n) indices equals n x n calls on 0-dim ones.
    """
    mask_mod.flexinspect_identity = identity  # type: ignore[attr-defined]
    mask_mod.flexinspect_broadcasts = broadcasts  # type: ignore[attr-defined]


def check_mask_mod(mask_mod: MaskMod, name: str, device: torch.device) -> None:
    """Raise `MaskError` for what FlexAttention would refuse later with a less clear message."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    try:
        result = mask_mod(zero, zero, zero, zero)
    except Exception as error:
        text = f"The mask_mod {name} failed when called as mask_mod(b, h, q_idx, kv_idx) with "
        text += f"four 0-dim tensors: {type(error).__name__}: {error}"
        hint = "It must take four index tensors and return a 0-dim bool tensor."
        raise MaskError(text, hint=hint) from error
    problem = _wrong_result(result, device)
    if problem:
        text = f"The mask_mod {name} returned {problem}; it must return a 0-dim bool tensor."
        hint = "Compare the index tensors (for instance `kv_idx <= q_idx`), without `if`."
        raise MaskError(text, hint=hint)
    zeros, both = (torch.tensor(pair, device=device) for pair in ((0, 0), (0, 1)))
    try:
        # Head 0 twice, because a mask_mod may index a table that has only one head.
        list(head_groups(mask_mod, zeros[0], zeros, both, both))
    except Exception as error:
        text = f"The mask_mod {name} cannot be vectorised over indices: {summarize_error(error)}"
        hint = "Replace Python `if` and `and` on indices by torch.where, & and |."
        raise MaskError(text, hint=hint) from error


def _wrong_result(result: object, device: torch.device) -> str:
    if not isinstance(result, Tensor):
        return f"a Python {type(result).__name__}"
    if result.dtype is not torch.bool:
        return f"a tensor of {result.dtype}"
    if result.dim() != 0:
        return f"a tensor of shape {tuple(result.shape)}"
    if result.device.type != device.type:
        return f"a tensor on {result.device} (the model is on {device})"
    return ""


# -- the mask_mod and the tables of a `MaskSpec` ---------------------------------------------------


def arithmetic_mask_mod(spec: MaskSpec, window: ForwardWindow) -> MaskMod:
    """The mask_mod as comparisons with constants, from indices local to the window."""
    if window.q_len == 1:
        return _row_mask_mod(spec, window)
    q_offset, kv_offset = window.q_offset, window.kv_offset
    regions = range(spec.region(q_offset), spec.region(q_offset + window.q_len - 1) + 1)
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
    head = next((head for _, head, low in steps if low), 0)
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
        # Two allocations: a view of one could begin where it is not aligned for a kernel.
        self.prefix_stops, self.local_starts = (
            torch.from_numpy(np.asarray(values, np.int32)[region]).to(device)
            for values in (spec.prefix_stops, spec.local_starts)
        )
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


def _block_list(blocks: BoolArray) -> tuple[np.ndarray, np.ndarray]:
    """The counts (1, heads, rows) and indices (1, heads, rows, key blocks), both int32."""
    blocks = blocks if blocks.ndim == 3 else blocks[None]
    order = np.argsort(~blocks, axis=-1, kind="stable").astype(np.int32)
    return blocks.sum(axis=-1, dtype=np.int32)[None], order[None]


def window_block_tables(spec: MaskSpec, window: ForwardWindow) -> BlockTables:
    """The block tables of a window, built from its rows only, never from the full grid."""
    if window.kv_offset:
        whole = spec.dense(window.q_len, window.kv_offset + window.kv_len, q_offset=window.q_offset)
        kept = whole[:, window.kv_offset :]
        return key_blocks.stack_block_rows(kept[a:b] for a, b in row_chunks(window.q_len))
    if window.q_len == 1:
        return key_blocks.row_block_tables(spec, window.q_offset, window.kv_len)
    return key_blocks.block_tables(spec, window.q_len, window.kv_len, q_offset=window.q_offset)


def evaluate_mask_mod(mask_mod: MaskMod, *indices: Tensor) -> Tensor:
    """Return the cells of a mask_mod, bool, with a dimension for each index that has one.

    `indices` are b, h, q_idx and kv_idx, each 0-dim or 1-dim. The mask_mod is called with 0-dim
    tensors under vmap, exactly as flex calls it; vmap gives a dimension that it ignores a stride
    of 0.
    """
    function = mask_mod
    for position in (3, 2, 1, 0):
        if indices[position].dim():
            in_dims = tuple(0 if other == position else None for other in range(4))
            function = torch.vmap(function, in_dims=in_dims)
    return function(*indices)


def head_groups(
    mask_mod: MaskMod, zero: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Iterator[Tensor]:
    """Yield the cells of a mask_mod, bool (heads, rows, keys), one group of heads at a time.

    `zero` is the batch index. If the mask_mod ignores the head, there is one group of one head, at
    the cost of one head: heads with a stride of 0 cannot differ.
    """
    # A single head would not show whether the mask_mod depends on the head.
    size = max(MAX_EVALUATED_CELLS // max(len(q_idx) * len(kv_idx), 1), 2)
    for start in range(0, len(h_idx), size):
        cells = evaluate_mask_mod(mask_mod, zero, h_idx[start : start + size], q_idx, kv_idx)
        if start == 0 and len(cells) > 1 and cells.stride(0) == 0:
            yield cells[:1]
            return
        yield cells
