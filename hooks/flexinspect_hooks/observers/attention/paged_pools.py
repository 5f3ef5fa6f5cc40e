"""Finds caches whose slots are not in the order of positions, such as the pages of a pool.

A kernel of such a cache gets all slots, and which position a slot holds is known to the program
alone: the columns of its mask are no positions. Only the first prompt of a generation is checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.observers.attention.call_references import AttentionCall, Calls
from flexinspect_hooks.step_writer.call_check_records import PAGED_KEYS_VALUE


def put_paged_keys(refs: Calls, step: StepContext, buffer: StepBuffer) -> None:
    """Put whether the first call's keys are in slots; only if it has more keys than tokens."""
    ref = refs[0]
    n = step.q_len
    if step.step or step.kv_before or ref.query.shape[2] != n or ref.key.shape[2] <= n:
        return
    buffer.put(PAGED_KEYS_VALUE, torch.stack([_has_gaps(ref.key, n), _adds_slots(ref, n)]))


def _has_gaps(key: Tensor, n: int) -> Tensor:
    """Return whether one of the first n slots is empty, all zero, and a later one is not."""
    is_zero = (key[0] == 0).all(-1).all(0)
    return is_zero[:n].any() & ~is_zero[n:].all()


def _adds_slots(ref: AttentionCall, n: int) -> Tensor:
    """Return whether each row sees the slots of the row before and one more, in another order."""
    cells = ref.captured.cells
    if cells is None or cells.shape[1] != n:
        return torch.zeros((), dtype=torch.bool, device=ref.key.device)
    rows = cells[0]
    counts = torch.arange(1, n + 1, device=rows.device)
    is_nested = (rows.sum(1) == counts).all() & ~(rows[:-1] & ~rows[1:]).any()
    return is_nested & rows[:, n:].any()
