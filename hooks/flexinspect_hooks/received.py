"""The masks that layers received in a step: identity, block tables, executed cells, fingerprint.

A mask is looked at once per step however many layers share it, and stored once per fingerprint.
What is evaluated is the object that the layer got, never the description that was meant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexinspect import masks as algebra
from flexinspect.records import MaskRecord
from flexinspect_hooks.buffer import StepBuffer, Values
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import StepDraft
from flexinspect_hooks.ruleidentity import rule_name, rule_parameters, rule_source

if TYPE_CHECKING:
    from flexinspect_hooks.attention import CallRef

MAX_CELLS = 1 << 26
"""Largest mask whose cells are evaluated and stored (8 MiB of bits)."""

_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


@dataclass(frozen=True, slots=True)
class ReceivedMask:
    """One distinct mask of a step. `cells` and `newest` leave before the writer thread gets it.

    `cells`: executed by rule, bool (heads, q_len, kv_len) or None at level basic; `newest`: its
    last row, (heads, kv_len).
    """

    number: int
    kind: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    q_offset: int
    compiled: bool
    parameters: str
    block: tuple[int, int] | None = None
    rule: Any = None
    cells: Tensor | None = None
    newest: Tensor | None = None

    def without_tensors(self) -> ReceivedMask:
        """Return the same without device memory, for the writer thread."""
        return replace(self, cells=None, newest=None)


class MaskBook:
    """Knows which masks the trace already holds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stored: set[str] = set()

    def collect(
        self, refs: Sequence[CallRef], step: StepContext, buffer: StepBuffer
    ) -> tuple[list[ReceivedMask], list[int]]:
        """Return the step's distinct masks and, per call, the number of its mask."""
        found: dict[tuple[Any, ...], ReceivedMask] = {}
        numbers = []
        for ref in refs:
            key = (id(ref.mask), ref.path, ref.query.shape[2], ref.key.shape[2])
            if key not in found:
                found[key] = self._look_at(ref, len(found), step, buffer)
            numbers.append(found[key].number)
        return list(found.values()), numbers

    def _look_at(
        self, ref: CallRef, number: int, step: StepContext, buffer: StepBuffer
    ) -> ReceivedMask:
        mask = _describe(ref, number, step)
        # A decode row at level basic is known by its rule and lengths; its tables are small change
        # in meaning and half the cost of the step's record.
        if isinstance(ref.mask, BlockMask) and (step.level != "basic" or mask.q_len > 1):
            for name in _TABLES:
                table = getattr(ref.mask, name)
                if table is not None:
                    buffer.put(f"mask.{number}.{name}", table)
        if step.level == "basic" or mask.heads * mask.q_len * mask.kv_len > MAX_CELLS:
            return mask
        cells = _cells(ref, mask, self._device)
        if mask.compiled and isinstance(ref.mask, BlockMask):
            cells = _as_compiled(cells, ref.mask)
        buffer.put(f"mask.{number}.cells", cells)
        return replace(mask, cells=cells, newest=cells[:, -1])

    def record(self, mask: ReceivedMask, values: Values, draft: StepDraft) -> str | None:
        """Store the mask if it is new; return its fingerprint (None when there was no mask)."""
        prefix = f"mask.{mask.number}."
        mine = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
        fingerprint = _fingerprint(mask, mine)
        if fingerprint not in self._stored:
            self._stored.add(fingerprint)
            draft.masks.append(_mask_record(mask, fingerprint, mine))
        return fingerprint


def _describe(ref: CallRef, number: int, step: StepContext) -> ReceivedMask:
    plain = ReceivedMask(
        number=number,
        kind="none",
        batch=1,
        heads=1,
        q_len=ref.query.shape[2],
        kv_len=ref.key.shape[2],
        q_offset=step.kv_before,
        compiled=ref.path == "flex compiled",
        parameters="",
    )
    if isinstance(ref.mask, BlockMask):
        return _describe_block_mask(ref.mask, plain)
    if isinstance(ref.mask, Tensor) and ref.mask.dim() == 4:
        return _describe_tensor(ref.mask, plain)
    return replace(plain, kind="none, causal") if _implied_causal(ref) else plain


def _describe_block_mask(mask: BlockMask, plain: ReceivedMask) -> ReceivedMask:
    size_q, size_kv = mask.BLOCK_SIZE
    return replace(
        plain,
        kind="block",
        batch=mask.shape[0],
        heads=mask.shape[1],
        block=(int(size_q), int(size_kv)),
        rule=mask.mask_mod,
        parameters=rule_parameters(mask.mask_mod),
    )


def _describe_tensor(mask: Tensor, plain: ReceivedMask) -> ReceivedMask:
    return replace(
        plain,
        kind="bool" if mask.dtype is torch.bool else "float",
        batch=int(mask.shape[0]),
        heads=int(mask.shape[1]),
        parameters=f"{tuple(mask.shape)}{mask.dtype}",
    )


def _implied_causal(ref: CallRef) -> bool:
    """SDPA without a mask is causal over a prompt; every other call without a mask is open."""
    return ref.path == "sdpa" and ref.is_causal and ref.query.shape[2] > 1


def _cells(ref: CallRef, mask: ReceivedMask, device: torch.device) -> Tensor:
    """Return what the call's mask opens, bool (heads, q_len, kv_len), batch 0."""
    if isinstance(ref.mask, BlockMask):
        return _rule_cells(ref.mask, mask.heads, mask.q_len, mask.kv_len, device)
    if isinstance(ref.mask, Tensor) and ref.mask.dim() == 4:
        tensor = ref.mask[0, :, :, : mask.kv_len]
        if tensor.dtype is torch.bool:
            return tensor
        # transformers closes a cell with the lowest float; halving it leaves room for sums.
        return tensor > torch.finfo(tensor.dtype).min / 2
    everything = torch.ones(1, mask.q_len, mask.kv_len, dtype=torch.bool, device=device)
    if mask.kind == "none, causal":
        return everything.tril()
    return everything


def _rule_cells(
    block_mask: BlockMask, heads: int, q_len: int, kv_len: int, device: torch.device
) -> Tensor:
    mask_mod = block_mask.mask_mod
    q_idx = torch.arange(q_len, device=device)
    kv_idx = torch.arange(kv_len, device=device)
    h_idx = torch.arange(heads, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    if getattr(mask_mod, "flexinspect_broadcasts", False):
        grid = mask_mod(zero, zero, q_idx[:, None], kv_idx[None])
        return grid.expand(heads, q_len, kv_len)
    over_kv = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    over_q = torch.vmap(over_kv, in_dims=(None, None, 0, None))
    over_h = torch.vmap(over_q, in_dims=(None, 0, None, None))
    rows = [over_h(zero, h_idx, q_idx[a:b], kv_idx) for a, b in algebra.row_chunks(q_len)]
    return torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]


def _as_compiled(cells: Tensor, block_mask: BlockMask) -> Tensor:
    """Apply the compiled kernel's formula, (partial and rule) or full, on the device."""
    q_len, kv_len = cells.shape[1:]
    partial = _spread(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask, q_len, kv_len)
    full_num, full_idx = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if full_num is None or full_idx is None:
        return cells & partial
    return (cells & partial) | _spread(full_num, full_idx, block_mask, q_len, kv_len)


def _spread(
    counts: Tensor, indices: Tensor, block_mask: BlockMask, q_len: int, kv_len: int
) -> Tensor:
    """Return a block list of batch 0 as a token mask (heads, q_len, kv_len), without a sync."""
    n_columns = indices.shape[-1]
    listed = torch.arange(n_columns, device=counts.device) < counts[0, :, :, None]
    # Entries past the count are undefined, so they are sent to a column that is cut off.
    target = torch.where(listed, indices[0].long(), n_columns)
    blocks = torch.zeros(
        *target.shape[:-1], n_columns + 1, dtype=torch.bool, device=counts.device
    ).scatter_(-1, target, True)[..., :n_columns]
    size_q, size_kv = block_mask.BLOCK_SIZE
    spread = blocks.repeat_interleave(int(size_q), 1).repeat_interleave(int(size_kv), 2)
    return spread[:, :q_len, :kv_len]


def _fingerprint(mask: ReceivedMask, values: dict[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    key = (mask.kind, mask.batch, mask.heads, mask.q_len, mask.kv_len, mask.block, mask.compiled)
    name = "" if mask.rule is None else rule_name(mask.rule)
    digest.update(f"{key}{name}{mask.parameters}".encode())
    if mask.kind in ("bool", "float", "none", "none, causal") and "cells" in values:
        digest.update(np.packbits(values["cells"]).tobytes())
    for name in _TABLES:
        if name in values:
            digest.update(_listed(values, name).tobytes())
    return digest.hexdigest()


def _listed(values: dict[str, npt.NDArray[Any]], name: str) -> npt.NDArray[Any]:
    """Return a table with its undefined entries, those past each row's count, set to -1."""
    table = values[name]
    if not name.endswith("indices"):
        return np.ascontiguousarray(table)
    counts = values[name.replace("indices", "num_blocks")]
    listed = np.arange(table.shape[-1]) < counts[..., None]
    return np.where(listed, table, -1).astype(np.int32)


def _mask_record(
    mask: ReceivedMask, fingerprint: str, values: dict[str, npt.NDArray[Any]]
) -> MaskRecord:
    cells = values.get("cells")
    return MaskRecord(
        fingerprint=fingerprint,
        kind=mask.kind,
        batch=mask.batch,
        heads=mask.heads,
        q_len=mask.q_len,
        kv_len=mask.kv_len,
        q_offset=mask.q_offset,
        block_q=mask.block[0] if mask.block else None,
        block_kv=mask.block[1] if mask.block else None,
        rule=None if mask.rule is None else rule_name(mask.rule),
        rule_source=None if mask.rule is None else rule_source(mask.rule),
        compiled=mask.compiled,
        cells=None if cells is None else np.asarray(cells, np.bool_),
        partial=_block_grid(values, "kv_num_blocks", "kv_indices"),
        full=_block_grid(values, "full_kv_num_blocks", "full_kv_indices"),
    )


def _block_grid(
    values: dict[str, npt.NDArray[Any]], counts: str, indices: str
) -> npt.NDArray[np.bool_] | None:
    """Return a block list of batch 0 as bool (heads, row blocks, key blocks)."""
    if counts not in values or indices not in values:
        return None
    listed = _listed(values, indices)[0]
    n_columns = listed.shape[-1]
    grid = np.zeros((*listed.shape[:-1], n_columns + 1), np.bool_)
    np.put_along_axis(grid, np.where(listed < 0, n_columns, listed), True, axis=-1)
    return grid[..., :n_columns]
