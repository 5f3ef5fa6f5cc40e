"""Captures the masks that layers received: identity, block tables, executed cells, fingerprint.

A mask is evaluated once per step even if many layers share it, and stored once per fingerprint. The
object that the layer received is evaluated, never the declared mask, for every query head and for
batch 0; other batch rows are not recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexinspect.masks import key_blocks
from flexinspect.records.step import OWN_FUNCTION
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.debugger.frames import breakpoints_disabled
from flexinspect_hooks.generation.mask_source import head_groups
from flexinspect_hooks.observers.attention.call_references import AttentionCall, CapturedMask
from flexinspect_hooks.observers.attention.mask_mod_code import MaskModCodes
from flexinspect_hooks.observers.attention.score_mod_cells import CLOSED_SCORE, ScoreModCells
from flexinspect_hooks.python_internals import mask_mod_identity as mask_mods
from flexinspect_hooks.step_writer.mask_records import TABLE_NAMES

SCORE_MOD = "score_mod"
"""The kind of a mask that no layer received: a score_mod closes cells."""

MAX_CELLS = 1 << 26
"""Largest mask, over the heads that differ, whose cells are stored (8 MiB of bits)."""


class MaskCapture:
    """Captures the masks of steps."""

    def __init__(self) -> None:
        self._indices: dict[torch.device, _IndexTensors] = {}  # layers may be on several
        self._codes = MaskModCodes()
        self._score_mods = ScoreModCells()

    def begin(self) -> None:
        """A generation begins."""
        self._score_mods.begin()

    def capture_masks(
        self,
        refs: Sequence[AttentionCall],
        step: StepContext,
        buffer: StepBuffer,
        numbers: Sequence[int] | None = None,
    ) -> tuple[CapturedMask, ...]:
        """Set `captured` of each call, shared by calls with one mask; return the distinct masks.

        `numbers` are those of the calls' masks, if it is known which calls share one.
        """
        if numbers is not None:
            shared_masks: list[CapturedMask] = []
            for ref, number in zip(refs, numbers, strict=True):
                if number == len(shared_masks):
                    capture = self._capture_no_mask if ref.mask is None else self._capture_mask
                    shared_masks.append(capture(ref, number, step, buffer))
                ref.captured = shared_masks[number]
            return tuple(shared_masks)
        masks: dict[tuple[Any, ...], CapturedMask] = {}
        by_head: set[tuple[Any, ...]] = set()
        for ref in refs:
            mask = ref.mask
            shared: tuple[Any, ...] = (id(mask), ref.path)
            if self._score_mods.may_close(score_mod := _score_mod_of(ref)):
                shared = (*shared, mask_mods.mask_mod_identity(score_mod))
            # A block mask must fit its call exactly, so its identity implies the lengths.
            if not isinstance(mask, BlockMask):
                shared = (*shared, ref.query.shape[2], ref.key.shape[2])
            if mask is None:  # the executed mask depends on the call
                shared = (*shared, _implied_causal(ref))
            key = shared
            if by_head and shared in by_head:
                key = (*shared, ref.query.shape[1])
            if key not in masks:
                captured = self._capture_mask(ref, len(masks), step, buffer)
                if captured.cells is not None and len(captured.cells) > 1:
                    # Layers with another number of heads do not share it.
                    by_head.add(shared)
                    key = (*shared, ref.query.shape[1])
                masks[key] = captured
            ref.captured = masks[key]
        return tuple(masks.values())

    def _capture_mask(
        self, ref: AttentionCall, number: int, step: StepContext, buffer: StepBuffer
    ) -> CapturedMask:
        mask = _describe_mask(ref, number, step)
        opened = self._left_open(ref, mask, step)
        if mask.mask_mod is not None and mask.kind != SCORE_MOD:
            mask.code, mask.new_sources = self._codes.capture(mask.mask_mod, buffer)
        if mask.mask_mod is not None:
            mask.name = mask_mods.mask_mod_name(mask.mask_mod)
            mask.source = mask_mods.mask_mod_source(mask.mask_mod)
        # At level basic a decode row is identified by its mask_mod and lengths; its tables add
        # little information and half the cost of the step's record.
        if isinstance(ref.mask, BlockMask) and (step.level != "basic" or mask.q_len > 1):
            for name in TABLE_NAMES:
                table = getattr(ref.mask, name)
                if table is not None:
                    buffer.put(f"mask.{number}.{name}", table)
        if step.level == "basic" or mask.q_len * mask.kv_len > MAX_CELLS:
            return mask
        mask.cells = _executed(ref, mask, self._indices_on(ref.query.device))
        if opened is not None and mask.cells is not None:
            mask.cells = mask.cells & opened
        for name in ("cells", "averaged", "mask_mod_blocks"):
            if (tensor := getattr(mask, name)) is not None:
                buffer.put(f"mask.{number}.{name}", tensor)
        if mask.added is not None:
            # The mask of several rows is the program's own tensor, which may change later.
            describe = partial(added_values, f"mask.{number}.")
            buffer.defer(describe, wait=mask.added.shape[1] == 1, values=mask.added)
        return mask

    def _left_open(
        self, ref: AttentionCall, mask: CapturedMask, step: StepContext
    ) -> Tensor | None:
        """Return the cells that the call's score_mod leaves open; None if it closes none."""
        score_mod, opened = _score_mod_of(ref), None
        if not self._score_mods.may_close(score_mod):
            return None
        if step.level != "basic" or mask.q_len > 1:
            size = (ref.query.shape[1], mask.q_len, mask.kv_len)
            opened = self._score_mods.open_cells(score_mod, *size, ref.query.device)
        if self._score_mods.closes(score_mod):
            mask.identity += mask_mods.mask_mod_identity(score_mod)
            if ref.mask is None:
                mask.kind, mask.mask_mod = SCORE_MOD, score_mod
        return opened

    def _capture_no_mask(
        self, ref: AttentionCall, number: int, step: StepContext, buffer: StepBuffer
    ) -> CapturedMask:
        """Capture the mask of one query row that was called without a mask: all keys are open."""
        if ref.causal:
            return self._capture_mask(ref, number, step, buffer)
        kv_len = ref.key.shape[2]
        first = max(step.kv_after - kv_len, 0)
        is_compiled = ref.path == "flex compiled"
        mask = CapturedMask(number, 1, kv_len, step.kv_before, first, is_compiled, is_open=True)
        if step.level != "basic" and kv_len <= MAX_CELLS:
            mask.cells = self._indices_on(ref.query.device).all_open(mask)
            buffer.put(f"mask.{number}.cells", mask.cells)
        return mask

    def _indices_on(self, device: torch.device) -> _IndexTensors:
        found = self._indices.get(device)
        if found is None:
            found = self._indices[device] = _IndexTensors(device)
        return found


def capture_call_mask(ref: AttentionCall, step: StepContext) -> CapturedMask:
    """Return the mask of one call with its cells, as they are recorded."""
    mask = _describe_mask(ref, 0, step)
    if mask.q_len * mask.kv_len <= MAX_CELLS:
        mask.cells = _executed(ref, mask, _IndexTensors(ref.query.device))
        if mask.cells is not None and (score_mod := _score_mod_of(ref)) is not None:
            size = (ref.query.shape[1], mask.q_len, mask.kv_len)
            opened = ScoreModCells().open_cells(score_mod, *size, ref.query.device)
            mask.cells = mask.cells if opened is None else mask.cells & opened
    return mask


def _score_mod_of(ref: AttentionCall) -> Any:
    return None if ref.kernel is None else ref.kernel.arguments.get("score_mod")


def open_cells(block_mask: BlockMask, heads: int, *, compiled: bool) -> Tensor | None:
    """Return a block mask's open cells, bool (1 or heads, rows, keys); None as in `_executed`."""
    q_len, kv_len = (int(n) for n in block_mask.seq_lengths)
    indices = _IndexTensors(block_mask.kv_num_blocks.device)
    cells = _mask_mod_cells(block_mask, heads, q_len, kv_len, indices)
    return _compiled_cells(cells, block_mask, heads) if compiled and cells is not None else cells


def dense_bias(ref: AttentionCall, mask: CapturedMask) -> Tensor | None:
    """Return what a dense mask adds to open cells, (1 or heads, rows, keys), None if nothing."""
    if mask.bias is None or mask.cells is None:
        return None
    heads = 1 if ref.path.startswith("flex") else None
    added = _expand_dense_mask(ref.mask, mask.q_len, mask.kv_len)[0, :heads]
    added = added[:, : mask.q_len, : mask.kv_len]
    return added.float().masked_fill(~mask.cells, 0.0)


def _describe_mask(ref: AttentionCall, number: int, step: StepContext) -> CapturedMask:
    compiled = ref.path == "flex compiled"
    q_len, kv_len = ref.query.shape[2], ref.key.shape[2]
    offsets = (step.kv_before, max(step.kv_after - kv_len, 0))
    mask = CapturedMask(number, q_len, kv_len, *offsets, compiled)
    received = ref.mask
    if isinstance(received, BlockMask):
        size_q, size_kv = received.BLOCK_SIZE
        mask.kind, mask.block = "block", (int(size_q), int(size_kv))
        mask.batch, mask.heads = received.kv_num_blocks.shape[:2]
        mask.mask_mod = received.mask_mod
        mask.identity = mask_mods.mask_mod_identity(received.mask_mod)
    elif isinstance(received, Tensor) and received.dim() >= 2:
        received = _expand_dense_mask(received, q_len, kv_len)
        mask.kind = "bool" if received.dtype is torch.bool else "float"
        mask.batch, mask.heads = received.shape[:2]
        mask.identity = f"{tuple(received.shape)}{received.dtype}"
    elif _implied_causal(ref):
        mask.kind = "none, causal"
    return mask


def _implied_causal(ref: AttentionCall) -> bool:
    """Whether a call without a mask is causal.

    In transformers SDPA without a mask is causal over a prompt; eager and flex attention are open.
    If `is_causal` is passed to SDPA itself, it is causal from the upper left for any number of
    rows, so that a single row attends to one key. What the program's own function does is seen in
    its output.
    """
    if ref.causal is not None:
        return ref.causal
    if ref.path == OWN_FUNCTION:
        return _sees_only_itself(ref)
    return ref.path == "sdpa" and ref.is_causal and ref.query.shape[2] > 1


def _sees_only_itself(ref: AttentionCall) -> bool:
    """Whether the first row of a prompt attends to its own key only, so that it gives its value.

    The order in which the function assigns value heads to query heads is left open.
    """
    q_len, output, value = ref.query.shape[2], ref.output, ref.value
    is_usual = isinstance(output, Tensor) and output.dim() == 4 and output.shape[1] == q_len
    if q_len < 2 or value.shape[2] != q_len or not is_usual:
        return False
    if output.shape[-1] != value.shape[-1]:
        return False
    first, own = output[0, 0].float(), value[0, :, 0].float()  # (heads, D), (kv heads, D)
    distance = (first[:, None] - own[None]).abs().amax(-1).amin(1)
    return bool((distance <= 8 * torch.finfo(output.dtype).eps * own.abs().max()).all())


def _expand_dense_mask(mask: Tensor, q_len: int, kv_len: int) -> Tensor:
    """Return a view (batch, heads, rows, keys) of a dense mask that may broadcast over any."""
    while mask.dim() < 4:
        mask = mask[None]
    rows = q_len if mask.shape[2] == 1 else mask.shape[2]
    keys = kv_len if mask.shape[3] == 1 else mask.shape[3]
    return mask.expand(-1, -1, rows, keys)


def _executed(ref: AttentionCall, mask: CapturedMask, indices: _IndexTensors) -> Tensor | None:
    """Return the mask that a call's path executes, bool (1 or heads, q_len, kv_len), batch 0.

    None if heads differ and have too many cells to store, or if the executed mask is not known.
    """
    received = ref.mask
    if isinstance(received, BlockMask):
        heads = ref.query.shape[1]
        cells = _mask_mod_cells(received, heads, mask.q_len, mask.kv_len, indices)
        if cells is None or not mask.compiled:
            return cells
        mask.mask_mod_blocks = _mask_mod_blocks(cells, received)
        return _compiled_cells(cells, received, heads)
    if isinstance(received, Tensor) and received.dim() >= 2:
        return _dense_cells(ref, mask, indices)
    everything = indices.all_open(mask)
    return everything.tril() if mask.kind == "none, causal" else everything


def _dense_cells(ref: AttentionCall, mask: CapturedMask, indices: _IndexTensors) -> Tensor | None:
    """Return the open cells of a dense mask; set `mask.bias` of the newest row, and `mask.added`.

    Eager attention and transformers' flex add every mask, so a bool mask closes nothing there: it
    adds 1 to the scores of its open cells. Transformers' flex reads head 0 for all heads.
    """
    tensor = _expand_dense_mask(ref.mask, mask.q_len, mask.kv_len)[0, :, :, : mask.kv_len]
    flex = ref.path.startswith("flex")
    if flex:
        tensor = tensor[:1, : mask.q_len]
    if tensor.numel() > MAX_CELLS:
        return None
    if tensor.dtype is torch.bool:
        if not flex and ref.path != "eager":
            return tensor
        mask.bias = tensor[:, -1].float()
        return indices.all_open(mask)
    cells = _float_cells(tensor, mask)
    mask.bias = tensor[:, -1].float().masked_fill(~cells[:, -1], 0.0)
    if tensor.numel() and _may_add(tensor, cells, mask.bias):
        mask.added = mask.bias[:, None] if tensor.shape[1] == 1 else tensor.float()
    return cells


def _may_add(tensor: Tensor, cells: Tensor, bias: Tensor) -> bool:
    """Whether a float mask may add other values than 0 to open cells, `bias` in its newest row.

    Most masks add none. On a CPU this is found in a fraction of the time of `added_values`; on an
    accelerator the program would wait for the answer.
    """
    if tensor.device.type != "cpu":
        return True
    return bool(bias.any()) if tensor.shape[1] == 1 else not torch.equal(tensor == 0, cells)


def _float_cells(tensor: Tensor, mask: CapturedMask) -> Tensor:
    """Return the open cells of a mask that is added to the scores, and set `mask.averaged`.

    transformers closes a cell with the lowest float, other programs with -1e4 or -1e9. If a whole
    row has the lowest float, adding it removes the scores by rounding, and softmax gives each key
    the same weight: all are open. In float16 the scores are not removed completely, but the keys
    are open as well. A row of -Inf is closed.
    """
    top = tensor.amax(-1, keepdim=True)
    lowest = (top <= CLOSED_SCORE) & (top > -torch.inf)
    mask.averaged = (lowest & (top * torch.finfo(tensor.dtype).eps <= -1))[..., 0]
    return (tensor > CLOSED_SCORE) | (lowest & (tensor == top))


def added_values(prefix: str, xp: Any, values: Any) -> dict[str, Any]:
    """Return what a float mask (heads, rows, keys) adds to open cells, for `MaskRecord.added`.

    `added` has the lowest value, the highest, and the highest below 0; `added_at` the index of the
    first cell with the lowest, and the number of those below 0. Nothing is read back from a GPU.
    """
    values = xp.where(values > CLOSED_SCORE, values, 0.0)
    below = values < 0
    highest_below = xp.where(below, values, -math.inf).max()
    return {
        f"{prefix}added": xp.stack([values.min(), values.max(), highest_below]),
        f"{prefix}added_at": xp.stack([values.argmin(), below.sum()]),
    }


class _IndexTensors:
    """Index tensors that are created once and sliced, because each operation costs time."""

    def __init__(self, device: torch.device) -> None:
        self.zero = torch.zeros((), dtype=torch.int64, device=device)
        self._true = torch.ones((1, 1, 1), dtype=torch.bool, device=device)
        self._range = torch.arange(0, device=device)

    def upto(self, n: int) -> Tensor:
        """Return 0, 1, ..., n - 1."""
        if n > self._range.numel():
            self._range = torch.arange(max(2 * n, 1024), device=self._range.device)
        return self._range[:n]

    def all_open(self, mask: CapturedMask) -> Tensor:
        """Return an all-open mask as a view of one element, because allocating it is expensive."""
        return self._true.expand(1, mask.q_len, mask.kv_len)


def _mask_mod_cells(
    block_mask: BlockMask, heads: int, q_len: int, kv_len: int, indices: _IndexTensors
) -> Tensor | None:
    """Return the mask_mod's cells, bool (1 or heads, q_len, kv_len), 1 if it ignores the head.

    None if heads may differ and have too many cells to store; every cell would have to be compared
    to know that they are equal.
    """
    mask_mod, zero = block_mask.mask_mod, indices.zero
    q_idx, kv_idx = indices.upto(q_len), indices.upto(kv_len)
    if getattr(mask_mod, "flexinspect_broadcasts", False):
        return mask_mod(zero, zero, q_idx[:, None], kv_idx[None]).expand(1, q_len, kv_len)
    h_idx, rows = indices.upto(heads), []
    with breakpoints_disabled():
        for start, stop in key_blocks.row_chunks(q_len):
            groups = []
            for group in head_groups(mask_mod, zero, h_idx, q_idx[start:stop], kv_idx):
                if len(group) > 1 and heads * q_len * kv_len > MAX_CELLS:
                    return None
                groups.append(group)
            rows.append(torch.cat(groups) if len(groups) > 1 else groups[0])
    return torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]


def _compiled_cells(cells: Tensor, block_mask: BlockMask, heads: int) -> Tensor | None:
    """Apply the compiled kernel's formula, (partial blocks and mask_mod) or full blocks.

    The block tables are for one head or for every head. For another number of heads kernels differ
    in the table that a head reads, so the result is None; so it is for too many cells.
    """
    q_len, kv_len = cells.shape[1:]
    tables = block_mask.kv_num_blocks.shape[1]
    if tables > 1 and (tables != heads or tables * q_len * kv_len > MAX_CELLS):
        return None
    numbers, columns = block_mask.kv_num_blocks, block_mask.kv_indices
    cells = cells & _expand_blocks(numbers, columns, block_mask, q_len, kv_len)
    full_num, full_idx = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if full_num is None or full_idx is None:
        return cells
    return cells | _expand_blocks(full_num, full_idx, block_mask, q_len, kv_len)


def _mask_mod_blocks(cells: Tensor, block_mask: BlockMask) -> Tensor:
    """Return how many cells of each block a mask_mod opens, uint8: 0 none, 1 some, 2 all.

    A block that extends beyond the mask is never full, as in `create_block_mask`.
    """
    heads, q_len, kv_len = cells.shape
    size_q, size_kv = (int(size) for size in block_mask.BLOCK_SIZE)
    padded = torch.nn.functional.pad(cells, (0, -kv_len % size_kv, 0, -q_len % size_q))
    blocks = padded.view(heads, -1, size_q, padded.shape[2] // size_kv, size_kv)
    counts = blocks.sum((2, 4), dtype=torch.int32)
    return ((counts > 0).to(torch.uint8) + (counts == size_q * size_kv)).to(torch.uint8)


def _expand_blocks(
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
    size_q, size_kv = (int(size) for size in block_mask.BLOCK_SIZE)
    return blocks.repeat_interleave(size_q, 1).repeat_interleave(size_kv, 2)[:, :q_len, :kv_len]
