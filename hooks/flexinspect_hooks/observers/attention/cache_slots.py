"""Key slots that the newest row sees and that hold nothing of its text: counted and weighed.

Looked for where keys are allocated ahead (more of them than the sequence has tokens) and in calls
outside of models; an ordinary step pays one comparison per distinct mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flexinspect.records.step import ArrayRecord
from flexinspect_hooks.capture.buffer import StepBuffer, Values
from flexinspect_hooks.capture.hook import StepDraft
from flexinspect_hooks.observers.attention.mask_capture import CapturedMask
from flexinspect_hooks.observers.attention.segment_attention import newest_weights

if TYPE_CHECKING:
    from flexinspect_hooks.observers.attention.call_references import AttentionCall

SLOTS_STREAM = "attention.slots"
_SLOTS_PREFIX = "slots/"


def put_slots(
    refs: Sequence[AttentionCall],
    numbers: Sequence[int],
    masks: Sequence[CapturedMask],
    filled: int | None,
    buffer: StepBuffer,
) -> None:
    """Put five numbers for each call that sees slots from `filled` on (None: any may be empty).

    Open keys of the newest row; all-zero ones among those slots and their weight; others among
    them and their weight. Weights are means over heads, of batch 0.
    """
    suspects = {mask.number for mask in masks if _is_open(mask, filled)}
    if not suspects:
        return
    for index, (ref, number) in enumerate(zip(refs, numbers, strict=True)):
        if number not in suspects or ref.unknown_scores:
            continue
        if filled is None and ref.query.shape[2] >= ref.key.shape[2]:
            continue  # as many keys as rows: no cache
        buffer.put(f"{_SLOTS_PREFIX}{index}", _count_slots(ref, masks[number], filled))
        if ref.key.device.type != "cpu":
            suspects.discard(number)  # one layer of each mask: whether it is open is not known here


def _is_open(mask: CapturedMask, filled: int | None) -> bool:
    """Say whether the newest row may see such slots; on an accelerator nothing waits to know."""
    if mask.cells is None:
        return False
    if filled is None:
        return True
    if mask.kv_len <= filled:
        return False
    return mask.cells.device.type != "cpu" or bool(mask.cells[:, -1, filled:].any())


def _count_slots(ref: AttentionCall, mask: CapturedMask, filled: int | None) -> Tensor:
    """Return the five numbers; no element is looked at here, as on an accelerator that waits."""
    assert mask.cells is not None
    weights = newest_weights(ref, mask).mean(0)
    sees = mask.cells[:, -1].any(0)
    is_zero = (ref.key[0] == 0).all(-1).all(0)
    suspect = sees & (torch.arange(len(sees), device=sees.device) >= (filled or 0))
    empty, stale = suspect & is_zero, suspect & ~is_zero
    if filled is None:
        # Keys that are zero throughout were meant to be, and a row of zeros is padding itself.
        empty = empty & ~is_zero.all() & ref.query[0, :, -1].any()
        stale = torch.zeros_like(empty)
    parts = (sees.sum(), empty.sum(), weights @ empty.float())
    return torch.stack([part.float() for part in (*parts, stale.sum(), weights @ stale.float())])


def record_slots(values: Values, n_calls: int, draft: StepDraft) -> None:
    """Write the stream, where any call has such slots (writer thread)."""
    found = {
        int(k.removeprefix(_SLOTS_PREFIX)): v
        for k, v in values.items()
        if k.startswith(_SLOTS_PREFIX)
    }
    if not any(row[1] or row[3] for row in found.values()):
        return
    array = np.zeros((n_calls, 5), np.float32)
    for index, row in found.items():
        array[index] = row
    draft.arrays.append(ArrayRecord(SLOTS_STREAM, array))
