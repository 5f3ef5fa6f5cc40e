"""Where a patched model gets its block masks: from a `MaskSpec`, or from the user's `mask_mod`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexinspect.core.errors import MaskError
from flexinspect.masks.algebra import BlockTables, MaskSpec, row_chunks, stack_block_rows
from flexinspect_hooks.generation.mask_mods import (
    BlockTableCache,
    ForwardWindow,
    MaskMod,
    SpecTables,
    all_partial,
    arithmetic_mask_mod,
    head_groups,
    window_block_tables,
)
from flexinspect_hooks.python_internals.mask_mod_identity import mask_mod_identity

_MAX_ARITHMETIC_REGIONS = 24


class MaskSource(Protocol):
    """Builds the block mask of one forward pass, for all layers of one type."""

    name: str

    def block_mask(self, window: ForwardWindow, overlay: MaskMod | None) -> BlockMask:
        """The mask of these rows; `overlay` narrows it (a sliding window), in positions."""
        ...


class SpecMaskSource:
    """Block masks of a `MaskSpec`, built from the rows of the window only, never the full grid."""

    def __init__(
        self, spec: MaskSpec, *, length: int, device: torch.device, compiled: bool
    ) -> None:
        self.name = spec.name
        self.spec = spec
        self._device = device
        self._cache = BlockTableCache(device)
        gather = compiled or len(spec.starts) > _MAX_ARITHMETIC_REGIONS
        self._tables = SpecTables(spec, length, device) if gather else None

    def block_mask(self, window: ForwardWindow, overlay: MaskMod | None) -> BlockMask:
        """The mask of the window; a decode step computes its one row."""
        tables = window_block_tables(self.spec, window)
        mask_mod = self._mask_mod(window)
        identity = f"{self.spec}@{window.q_offset},{window.kv_offset}"
        set_identity(mask_mod, identity, broadcasts=True)
        mask_mod.flexinspect_name = self.name  # type: ignore[attr-defined]
        if overlay is not None:
            mask_mod = with_overlay(mask_mod, overlay, window)
            tables = all_partial(tables)
        return self._cache.block_mask(tables, mask_mod, window)

    def _mask_mod(self, window: ForwardWindow) -> MaskMod:
        if self._tables is None:
            return arithmetic_mask_mod(self.spec, window)
        return self._tables.mask_mod(window)


class UserMaskSource:
    """Block masks of a user's `mask_mod`, whose indices are positions of the whole sequence.

    If the mask_mod depends on the head, each query head gets its own block tables, because a
    compiled kernel trusts its tables. If it depends on the batch, batch 0 is used, the only one.

    Raises `MaskError` if FlexAttention would refuse the mask_mod (see `check_mask_mod`).
    """

    def __init__(self, mask_mod: MaskMod, *, name: str, device: torch.device) -> None:
        self.name = name
        self.mask_mod = mask_mod
        self._device = device
        self._zero = torch.zeros((), dtype=torch.int64, device=device)
        self._cache = BlockTableCache(device)
        check_mask_mod(mask_mod, name, device)

    def block_mask(self, window: ForwardWindow, overlay: MaskMod | None) -> BlockMask:
        """The mask of the window, its tables built from 128 rows at a time.

        Raises `MaskError` if the mask_mod fails, or if it depends on the head and the number of
        heads is unknown.
        """
        mask_mod = shift_mask_mod(self.mask_mod, window)
        mask_mod.flexinspect_rule = self.mask_mod  # type: ignore[attr-defined]
        identity = mask_mod_identity(self.mask_mod)
        set_identity(mask_mod, f"{self.name}{identity}@{window.q_offset},{window.kv_offset}")
        if overlay is not None:
            mask_mod = with_overlay(mask_mod, overlay, window)
        return self._cache.block_mask(self._block_tables(mask_mod, window), mask_mod, window)

    def _block_tables(self, mask_mod: MaskMod, window: ForwardWindow) -> BlockTables:
        try:
            return _stacked(
                [self._block_row(mask_mod, window, *c) for c in row_chunks(window.q_len)]
            )
        except MaskError:
            raise
        except Exception as error:
            last = window.q_offset + window.q_len - 1
            raise MaskError(
                f"The mask_mod {self.name} failed for rows {window.q_offset} to {last} over "
                f"{window.kv_len} keys: {type(error).__name__}: {str(error).splitlines()[0]}",
                hint="Indices are positions of the whole sequence, generated tokens included.",
            ) from error

    def _block_row(
        self, mask_mod: MaskMod, window: ForwardWindow, start: int, stop: int
    ) -> BlockTables:
        """One row of blocks, (heads, 1, key blocks); one head if all heads share it."""
        zero, indices = self._zero, torch.arange(max(stop, window.kv_len), device=self._device)
        h_idx = torch.arange(window.heads or 2, device=self._device)
        q_idx, kv_idx = indices[start:stop], indices[: window.kv_len]
        heads: list[BlockTables] = []
        for group in head_groups(mask_mod, zero, h_idx, q_idx, kv_idx):
            heads += [stack_block_rows([cells]) for cells in group.cpu().numpy()]
        if len(heads) > 1 and not window.heads:
            raise MaskError(
                f"The mask_mod {self.name} depends on the head, but the model's configuration "
                "does not have the number of query heads.",
                hint="Use a mask_mod that is the same for all heads.",
            )
        return BlockTables(np.stack([t.partial for t in heads]), np.stack([t.full for t in heads]))


def _stacked(rows: list[BlockTables]) -> BlockTables:
    """Rows of blocks as tables, without the axis of heads if it is 1."""
    partial = np.concatenate([row.partial for row in rows], axis=1)
    full = np.concatenate([row.full for row in rows], axis=1)
    return BlockTables(partial, full) if len(partial) > 1 else BlockTables(partial[0], full[0])


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
    """Call a mask_mod once with four 0-dim tensors and check its result.

    Raises `MaskError` for everything that FlexAttention would refuse later with a less clear
    message.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    try:
        result = mask_mod(zero, zero, zero, zero)
    except Exception as error:
        raise MaskError(
            f"The mask_mod {name} failed when called as mask_mod(b, h, q_idx, kv_idx) with four "
            f"0-dim tensors: {type(error).__name__}: {error}",
            hint="It must take four index tensors and return a 0-dim bool tensor.",
        ) from error
    problem = _wrong_result(result, device)
    if problem:
        raise MaskError(
            f"The mask_mod {name} returned {problem}; it must return a 0-dim bool tensor.",
            hint="Compare the index tensors (for instance `kv_idx <= q_idx`), without `if`.",
        )
    _check_vmap(mask_mod, name, device)


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


def _check_vmap(mask_mod: MaskMod, name: str, device: torch.device) -> None:
    zeros, both = (torch.tensor(pair, device=device) for pair in ((0, 0), (0, 1)))
    try:
        # Head 0 twice, because a mask_mod may index a table that has only one head.
        list(head_groups(mask_mod, zeros[0], zeros, both, both))
    except Exception as error:
        first_line = str(error).splitlines()[0] if str(error) else ""
        raise MaskError(
            f"The mask_mod {name} cannot be vectorised over indices: "
            f"{type(error).__name__}: {first_line}",
            hint="Replace Python `if` and `and` on indices by torch.where, & and |.",
        ) from error
