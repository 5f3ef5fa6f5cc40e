"""Where a patched model gets its block mask from: a rule of ours, or a `mask_mod` of the user's."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexinspect.errors import MaskError
from flexinspect.masks import BlockTables, MaskRule, row_chunks, stack_block_rows
from flexinspect_hooks.maskmods import (
    BlockTableCache,
    MaskMod,
    RuleTables,
    Window,
    all_partial,
    arithmetic_mask_mod,
    evaluate,
    window_tables,
)
from flexinspect_hooks.ruleidentity import rule_parameters

_MAX_ARITHMETIC_REGIONS = 24


class MaskSource(Protocol):
    """Makes the block mask of one forward, for all layers of one type."""

    name: str

    def block_mask(self, window: Window, overlay: MaskMod | None) -> BlockMask:
        """Return the mask of these rows; `overlay` narrows it (a sliding window), in positions."""
        ...


class RuleMask:
    """Block masks of a `MaskRule`: from the rows of the window alone, never a full grid."""

    def __init__(
        self, rule: MaskRule, *, length: int, device: torch.device, compiled: bool
    ) -> None:
        self.name = rule.name
        self.rule = rule
        self._device = device
        self._cache = BlockTableCache(device)
        gather = compiled or len(rule.starts) > _MAX_ARITHMETIC_REGIONS
        self._tables = RuleTables(rule, length, device) if gather else None

    def block_mask(self, window: Window, overlay: MaskMod | None) -> BlockMask:
        """Return the mask of the window; a decode step computes its one row."""
        tables = window_tables(self.rule, window)
        mask_mod = self._mask_mod(window)
        identity = f"{self.rule}@{window.q_offset},{window.kv_offset}"
        mark(mask_mod, identity, broadcasts=True)
        if overlay is not None:
            mask_mod = narrowed(mask_mod, overlay, window)
            tables = all_partial(tables)
        return self._cache.block_mask(tables, mask_mod, window)

    def _mask_mod(self, window: Window) -> MaskMod:
        if self._tables is None:
            return arithmetic_mask_mod(self.rule, window)
        return self._tables.mask_mod(window)


class OwnMask:
    """Block masks of a user's `mask_mod`, which is written in positions of the whole sequence."""

    def __init__(self, mask_mod: MaskMod, *, name: str, device: torch.device) -> None:
        self.name = name
        self.mask_mod = mask_mod
        self._device = device
        self._cache = BlockTableCache(device)
        check_mask_mod(mask_mod, name, device)

    def block_mask(self, window: Window, overlay: MaskMod | None) -> BlockMask:
        """Return the mask of the window, its tables made from 128 rows at a time."""
        mask_mod = shifted(self.mask_mod, window)
        values = rule_parameters(self.mask_mod)
        mark(mask_mod, f"{self.name}{values}@{window.q_offset},{window.kv_offset}")
        if overlay is not None:
            mask_mod = narrowed(mask_mod, overlay, window)
        return self._cache.block_mask(self._table(mask_mod, window), mask_mod, window)

    def _table(self, mask_mod: MaskMod, window: Window) -> BlockTables:
        try:
            return stack_block_rows(
                evaluate(mask_mod, window, self._device, rows=slice(start, stop)).cpu().numpy()
                for start, stop in row_chunks(window.q_len)
            )
        except Exception as error:
            last = window.q_offset + window.q_len - 1
            raise MaskError(
                f"The mask rule {self.name} failed for rows {window.q_offset} to {last} over "
                f"{window.kv_len} keys: {type(error).__name__}: {str(error).splitlines()[0]}",
                hint="Indices are positions of the whole sequence, generated tokens included.",
            ) from error


def shifted(mask_mod: MaskMod, window: Window) -> MaskMod:
    """Return a rule in local indices from one in positions: the row offset of a decode step."""
    q_offset, kv_offset = window.q_offset, window.kv_offset

    def local(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, q_idx + q_offset, kv_idx + kv_offset)

    return local


def narrowed(mask_mod: MaskMod, overlay: MaskMod, window: Window) -> MaskMod:
    """Return a local rule and an overlay given in positions, both of which must allow a cell."""
    other = shifted(overlay, window)

    def both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, q_idx, kv_idx) & other(b, h, q_idx, kv_idx)

    identity = f"{getattr(mask_mod, 'flexinspect_identity', '')}&{rule_parameters(overlay)}"
    mark(both, identity)
    return both


def mark(mask_mod: MaskMod, identity: str, *, broadcasts: bool = False) -> None:
    """Note on a rule what it is made from, and whether it may be called with index grids.

    `broadcasts` is true only for rules of comparisons and one-dimensional look-ups, for which one
    call on (n, 1) and (1, n) indices equals n x n calls on 0-dim ones.
    """
    mask_mod.flexinspect_identity = identity  # type: ignore[attr-defined]
    mask_mod.flexinspect_broadcasts = broadcasts  # type: ignore[attr-defined]


def check_mask_mod(mask_mod: MaskMod, name: str, device: torch.device) -> None:
    """Call a rule once with four 0-dim tensors and look at what comes back.

    Raises `MaskError` with one sentence for each way in which FlexAttention would refuse it later,
    with a worse message (table in the FlexAttention notes of the documentation).
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    try:
        got = mask_mod(zero, zero, zero, zero)
    except Exception as error:
        raise MaskError(
            f"The mask rule {name} failed when called as mask_mod(b, h, q_idx, kv_idx) with four "
            f"0-dim tensors: {type(error).__name__}: {error}",
            hint="It must take four index tensors and return a 0-dim bool tensor.",
        ) from error
    problem = _wrong_result(got, device)
    if problem:
        raise MaskError(
            f"The mask rule {name} returned {problem}; it must return a 0-dim bool tensor.",
            hint="Compare the index tensors (for instance `kv_idx <= q_idx`), without `if`.",
        )
    _check_vmap(mask_mod, name, device)


def _wrong_result(got: object, device: torch.device) -> str:
    if not isinstance(got, Tensor):
        return f"a Python {type(got).__name__}"
    if got.dtype is not torch.bool:
        return f"a tensor of {got.dtype}"
    if got.dim() != 0:
        return f"a tensor of shape {tuple(got.shape)}"
    if got.device.type != device.type:
        return f"a tensor on {got.device} (the model is on {device})"
    return ""


def _check_vmap(mask_mod: MaskMod, name: str, device: torch.device) -> None:
    try:
        evaluate(mask_mod, Window(2, 2, 0), device, rows=slice(0, 2))
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        raise MaskError(
            f"The mask rule {name} cannot be vectorised over indices: "
            f"{type(error).__name__}: {first}",
            hint="Replace Python `if` and `and` on indices by torch.where, & and |.",
        ) from error
