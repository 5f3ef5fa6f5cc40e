"""Compares a sample of a mask between batch rows; cells are recorded for batch row 0 only.

A mask_mod that ignores the batch costs one evaluation of the sample, once per mask_mod and kind of
step. A block mask with one batch row whose mask_mod reads `b` is correct uncompiled and wrong
compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexinspect_hooks.capture.buffer import StepBuffer, Values
from flexinspect_hooks.capture.hook import StepDraft
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.debugger.frames import breakpoints_disabled
from flexinspect_hooks.generation.mask_source import evaluate_mask_mod
from flexinspect_hooks.python_internals.mask_mod_identity import mask_mod_name

if TYPE_CHECKING:
    from flexinspect_hooks.observers.attention.call_references import AttentionCall
    from flexinspect_hooks.observers.attention.mask_capture import CapturedMask

BATCH_ROWS = "batch-rows"
SAMPLE_ROWS = 32
"""Rows of a mask that are evaluated for every batch row."""
MAX_SAMPLE_CELLS = 1 << 22
"""Most cells, over all batch rows, that are evaluated; larger samples are skipped."""

_PREFIX, _N_COLUMNS = "batchrows/", 6


def put_batch_rows(
    refs: Sequence[AttentionCall],
    masks: Sequence[CapturedMask],
    compared: set[tuple[Any, ...]],
    buffer: StepBuffer,
) -> None:
    """Put a summary of the batch rows of each new mask; calls with one batch row have none.

    `compared` are the masks that were compared before in this generation.
    """
    if refs[0].query.shape[0] < 2:
        return
    calls: dict[int, tuple[AttentionCall, CapturedMask]] = {}
    for ref, mask in zip(refs, masks, strict=True):
        calls.setdefault(mask.number, (ref, mask))
    for ref, mask in calls.values():
        name = None if mask.mask_mod is None else mask_mod_name(mask.mask_mod)
        key = (ref.layer, mask.kind, name, mask.q_len == 1, ref.query.shape[0])
        if key in compared:
            continue
        compared.add(key)
        with suppress(Exception):  # a mask_mod may fail for indices its kernel never passed
            summary = _compare_batch_rows(ref, mask)
            if summary is not None:
                buffer.put(f"{_PREFIX}{mask.number}", summary)


def _compare_batch_rows(ref: AttentionCall, mask: CapturedMask) -> Tensor | None:
    """Return the summary of a mask's batch rows, zeros if one mask applies to all of them.

    None if they cannot be compared.
    """
    received, batch, rows = ref.mask, ref.query.shape[0], _sample_row_numbers(mask.q_len)
    equal = torch.zeros((batch, _N_COLUMNS), dtype=torch.int64, device=ref.query.device)
    is_dense = isinstance(received, Tensor)
    if received is None or (is_dense and (received.dim() < 4 or received.shape[0] == 1)):
        return equal
    if batch * len(rows) * mask.kv_len > MAX_SAMPLE_CELLS:
        return None
    if isinstance(received, BlockMask):
        cells = _evaluate_mask_mod(received, batch, rows, mask.kv_len)
        return equal if cells.stride(0) == 0 else _summarize_rows(cells, mask)
    if not is_dense or received.shape[0] != batch or received.shape[2] != mask.q_len:
        return None
    part = received[:, 0, rows.to(received.device), : mask.kv_len]
    is_open = part if part.dtype is torch.bool else part > torch.finfo(part.dtype).min / 2
    return _summarize_rows(is_open, mask)


def _sample_row_numbers(n_rows: int) -> Tensor:
    """Return up to `SAMPLE_ROWS` evenly spaced rows, the first and the last among them."""
    return torch.linspace(0, n_rows - 1, min(n_rows, SAMPLE_ROWS)).round().long()


def _evaluate_mask_mod(block_mask: BlockMask, batch: int, rows: Tensor, n_keys: int) -> Tensor:
    """Evaluate a mask_mod, bool (batch, rows, keys), for head 0."""
    device = block_mask.kv_num_blocks.device
    batches, keys = torch.arange(batch, device=device), torch.arange(n_keys, device=device)
    with breakpoints_disabled():
        return evaluate_mask_mod(
            block_mask.mask_mod, batches, torch.zeros_like(keys[0]), rows.to(device), keys
        )


def _summarize_rows(cells: Tensor, mask: CapturedMask) -> Tensor:
    """Return int64 (batch, 6), for each batch row of `cells` (batch, sample rows, keys).

    The columns: cells that differ from batch row 0, the first of them (row, key), open cells, open
    cells in the future of their row, and the first key that the newest row attends to (the number
    of keys if it attends to none).
    """
    rows = _sample_row_numbers(mask.q_len).to(cells.device)
    keys = torch.arange(cells.shape[2], device=cells.device)
    differs = (cells != cells[:1]).flatten(1)
    first = differs.int().argmax(1)
    is_future = keys + mask.kv_offset > (rows + mask.q_offset)[:, None]
    columns = [
        differs.sum(1),
        rows[first // cells.shape[2]],
        keys[first % cells.shape[2]],
        cells.flatten(1).sum(1),
        (cells & is_future).flatten(1).sum(1),
        torch.where(cells[:, -1], keys, len(keys)).amin(1),
    ]
    return torch.stack(columns, 1)


def record_batch_rows(
    values: Values,
    masks: Sequence[CapturedMask],
    fingerprints: Sequence[str],
    step: StepContext,
    draft: StepDraft,
    *,
    reports_equal: bool,
) -> None:
    """Record an event for each mask whose batch rows differ (writer thread).

    With `reports_equal` also for each mask that was compared and does not differ.
    """
    for mask, fingerprint in zip(masks, fingerprints, strict=True):
        rows = values.get(f"{_PREFIX}{mask.number}")
        if rows is None or not (reports_equal or rows[:, 0].any()):
            continue
        data: dict[str, Any] = {
            "mask": fingerprint,
            "made_for": int(mask.batch),
            "batch": len(rows),
        }
        differ = np.flatnonzero(rows[:, 0]).tolist()
        text = f"A mask is the same in all {len(rows)} batch rows."
        if differ:
            text = f"A mask differs between {len(differ) + 1} of {len(rows)} batch rows."
            data |= {
                "first": [differ[0], *(int(n) for n in rows[differ[0], 1:3])],
                "open": rows[:, 3].tolist(),
                "future": rows[:, 4].tolist(),
                "newest_from": rows[:, 5].tolist(),
            }
        data["differ"] = differ
        draft.add_event(step, BATCH_ROWS, text, data)
