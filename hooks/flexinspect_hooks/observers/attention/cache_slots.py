"""Finds key slots that the newest row attends to and that hold no token of its sequence.

Such slots exist where keys are allocated ahead (more keys than the sequence has tokens), and in
standalone calls. An ordinary step costs one comparison per distinct mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flexinspect.records.step import ArrayRecord
from flexinspect_hooks.capture.buffer import StepBuffer, Values, with_prefix
from flexinspect_hooks.capture.hook import StepDraft
from flexinspect_hooks.observers.attention.mask_capture import CapturedMask
from flexinspect_hooks.observers.attention.segment_attention import newest_weights

if TYPE_CHECKING:
    from flexinspect_hooks.observers.attention.call_references import AttentionCall

SLOTS_STREAM = "attention.slots"
_SLOTS_PREFIX = "slots/"


def put_slots(
    refs: Sequence[AttentionCall],
    masks: Sequence[CapturedMask],
    filled: int | None,
    buffer: StepBuffer,
) -> None:
    """Put five numbers for each call whose newest row attends to slots from `filled` on.

    With `filled` None any slot may be empty. The numbers: open keys of the newest row; all-zero
    keys among those slots, and their weight; other keys among them, and their weight. Weights are
    means over heads, of batch 0.
    """
    distinct = {mask.number: mask for mask in masks}
    suspects = {number for number, mask in distinct.items() if _is_open(mask, filled)}
    if not suspects:
        return
    for index, (ref, mask) in enumerate(zip(refs, masks, strict=True)):
        if mask.number not in suspects or ref.unknown_scores:
            continue
        if filled is None and ref.query.shape[2] >= ref.key.shape[2]:
            continue  # as many keys as rows: no cache
        buffer.put(f"{_SLOTS_PREFIX}{index}", _count_slots(ref, mask, filled))
        if ref.key.device.type != "cpu":
            # On an accelerator `_is_open` did not read the mask, so check one layer of each mask.
            suspects.discard(mask.number)


def _is_open(mask: CapturedMask, filled: int | None) -> bool:
    """Whether the newest row may attend to such slots; on an accelerator the mask is not read."""
    if mask.cells is None:
        return False
    if filled is None:
        return True
    if mask.kv_len <= filled:
        return False
    return mask.cells.device.type != "cpu" or bool(mask.cells[:, -1, filled:].any())


def _count_slots(ref: AttentionCall, mask: CapturedMask, filled: int | None) -> Tensor:
    """Return the five numbers; no element is read here, which would wait for an accelerator."""
    assert mask.cells is not None
    weights = newest_weights(ref, mask).mean(0)
    is_open = mask.cells[:, -1].any(0)
    is_zero = (ref.key[0] == 0).all(-1).all(0)
    suspect = is_open & (torch.arange(len(is_open), device=is_open.device) >= (filled or 0))
    empty, stale = suspect & is_zero, suspect & ~is_zero
    if filled is None:
        # If all keys are zero, that is on purpose; and a query of zeros is a padding row itself.
        empty = empty & ~is_zero.all() & ref.query[0, :, -1].any()
        stale = torch.zeros_like(empty)
    numbers = (
        is_open.sum(),
        empty.sum(),
        weights @ empty.float(),
        stale.sum(),
        weights @ stale.float(),
    )
    return torch.stack([number.float() for number in numbers])


def record_slots(values: Values, n_calls: int, draft: StepDraft) -> None:
    """Write the stream if any call has such slots (writer thread)."""
    rows = with_prefix(values, _SLOTS_PREFIX)
    if any(row[1] or row[3] for row in rows.values()):
        array = np.zeros((n_calls, 5), np.float32)
        array[[int(index) for index in rows]] = list(rows.values())
        draft.arrays.append(ArrayRecord(SLOTS_STREAM, array))
