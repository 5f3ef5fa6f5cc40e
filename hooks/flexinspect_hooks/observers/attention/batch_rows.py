"""What a mask does in batch rows beyond the first, whose cells alone are recorded: a sample.

A rule that ignores the batch costs one evaluation of the sample, once for each rule and kind of
step. A mask made for one batch row whose rule reads `b` is right uncompiled and wrong compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexinspect.records.step import EventRecord
from flexinspect_hooks.capture.buffer import StepBuffer, Values
from flexinspect_hooks.capture.hook import StepDraft
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.debugger.frames import breakpoints_disabled
from flexinspect_hooks.interpreter.user_functions import mask_mod_name

if TYPE_CHECKING:
    from flexinspect_hooks.observers.attention.call_references import AttentionCall
    from flexinspect_hooks.observers.attention.mask_capture import CapturedMask

BATCH_ROWS = "batch-rows"
SAMPLE_ROWS = 32
"""Rows of a mask that are evaluated for every batch row."""
MAX_SAMPLE_CELLS = 1 << 22
"""Cells, over batch rows, that are evaluated at once; larger masks are left alone."""

_PREFIX, _N_COLUMNS = "batchrows/", 6


class BatchRowChecker:
    """Looks at each mask of a batch once, and tells where its batch rows differ, if they do."""

    def __init__(self) -> None:
        self._checked: set[tuple[Any, ...]] = set()

    def begin(self) -> None:
        """A generation begins: its rules may have captured other things."""
        self._checked.clear()

    def put(
        self,
        refs: Sequence[AttentionCall],
        numbers: Sequence[int],
        masks: Sequence[CapturedMask],
        buffer: StepBuffer,
    ) -> None:
        """Put, for each mask that is new and for several batch rows, how these differ."""
        if refs[0].query.shape[0] < 2:
            return
        first = {number: ref for ref, number in zip(reversed(refs), reversed(numbers), strict=True)}
        for mask in masks:
            ref = first.get(mask.number)
            if ref is None or not self._is_new(ref, mask):
                continue
            with suppress(Exception):  # a rule may not take what the call itself never gave it
                found = _compare_batch_rows(ref, mask)
                if found is not None:
                    buffer.put(f"{_PREFIX}{mask.number}", found)

    def _is_new(self, ref: AttentionCall, mask: CapturedMask) -> bool:
        rule = None if mask.mask_mod is None else mask_mod_name(mask.mask_mod)
        key = (ref.layer, mask.kind, rule, mask.q_len == 1, ref.query.shape[0])
        if key in self._checked:
            return False
        self._checked.add(key)
        return True


def _compare_batch_rows(ref: AttentionCall, mask: CapturedMask) -> Tensor | None:
    """Return the summary of a mask's batch rows, zeros where one mask is given to all of them.

    None where they cannot be looked at.
    """
    received, batch, rows = ref.mask, ref.query.shape[0], _sample_row_numbers(mask.q_len)
    alike = torch.zeros((batch, _N_COLUMNS), dtype=torch.int64, device=ref.query.device)
    is_dense = isinstance(received, Tensor)
    if received is None or (is_dense and (received.dim() < 4 or received.shape[0] == 1)):
        return alike
    if batch * len(rows) * mask.kv_len > MAX_SAMPLE_CELLS:
        return None
    if isinstance(received, BlockMask):
        cells = _evaluate_mask_mod(received, batch, rows, mask.kv_len)
        return alike if cells.stride(0) == 0 else _summarize_rows(cells, mask)
    if not is_dense or received.shape[0] != batch or received.shape[2] != mask.q_len:
        return None
    part = received[:, 0, rows.to(received.device), : mask.kv_len]
    is_open = part if part.dtype is torch.bool else part > torch.finfo(part.dtype).min / 2
    return _summarize_rows(is_open, mask)


def _sample_row_numbers(n_rows: int) -> Tensor:
    """Return the first rows, the last, and some between."""
    return torch.linspace(0, n_rows - 1, min(n_rows, SAMPLE_ROWS)).round().long()


def _evaluate_mask_mod(block_mask: BlockMask, batch: int, rows: Tensor, n_keys: int) -> Tensor:
    """Evaluate a rule as flex does. vmap gives batch rows that it ignores a stride of 0."""
    device = block_mask.kv_num_blocks.device
    over_kv = torch.vmap(block_mask.mask_mod, in_dims=(None, None, None, 0))
    over_q = torch.vmap(over_kv, in_dims=(None, None, 0, None))
    over_b = torch.vmap(over_q, in_dims=(0, None, None, None))
    zero, keys = torch.zeros((), dtype=torch.int64, device=device), torch.arange(n_keys)
    batches = torch.arange(batch, device=device)
    with breakpoints_disabled():
        cells: Tensor = over_b(batches, zero, rows.to(device), keys.to(device))
    return cells


def _summarize_rows(cells: Tensor, mask: CapturedMask) -> Tensor:
    """Return int64 (batch, 6) for each batch row.

    Cells that differ from batch row 0, the first of them (row, key), open cells, cells that lie in
    the future of their row, and the first key that the newest row sees (how many there are if it
    sees none).
    """
    rows = _sample_row_numbers(mask.q_len).to(cells.device)
    keys = torch.arange(cells.shape[2], device=cells.device)
    differs = (cells != cells[:1]).flatten(1)
    at = differs.int().argmax(1)
    later = keys + mask.kv_offset > (rows + mask.q_offset)[:, None]
    counts = [(cells & later).flatten(1).sum(1), cells.flatten(1).sum(1)]
    place = (rows[at // cells.shape[2]], keys[at % cells.shape[2]])
    newest = torch.where(cells[:, -1], keys, len(keys)).amin(1)
    return torch.stack([differs.sum(1), *place, *reversed(counts), newest], 1)


def record_batch_rows(
    values: Values,
    masks: Sequence[CapturedMask],
    fingerprints: Sequence[str],
    step: StepContext,
    draft: StepDraft,
    *,
    reports_equal: bool,
) -> None:
    """Tell of the masks whose batch rows differ (writer thread); `names` are fingerprints.

    `reports_equal` says that those are told of as well that were looked at and do not differ.
    """
    for mask, name in zip(masks, fingerprints, strict=True):
        found = values.get(f"{_PREFIX}{mask.number}")
        if found is None or not (reports_equal or found[:, 0].any()):
            continue
        data: dict[str, Any] = {"mask": name, "made_for": int(mask.batch), "batch": len(found)}
        differ = np.flatnonzero(found[:, 0]).tolist()
        text = f"A mask is the same in all {len(found)} batch rows."
        if differ:
            text = f"A mask differs between {len(differ) + 1} of {len(found)} batch rows."
            data |= {
                "first": [differ[0], *(int(n) for n in found[differ[0], 1:3])],
                "open": found[:, 3].tolist(),
                "future": found[:, 4].tolist(),
                "newest_from": found[:, 5].tolist(),
            }
        data["differ"] = differ
        draft.events.append(
            EventRecord(BATCH_ROWS, text, step.started_at, step.generation, step.step, data)
        )
