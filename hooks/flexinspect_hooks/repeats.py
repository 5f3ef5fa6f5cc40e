"""Keys that own code repeated for its query heads: as the model groups them, or in another order.

Query heads of a group are neighbours, so head 0's keys must be those of head 1 again. Repeated as a
whole (`repeat` for `repeat_interleave`) every group reads the keys of others, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexinspect.records import EventRecord
from flexinspect_hooks.buffer import StepBuffer, Values
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import StepDraft

if TYPE_CHECKING:
    from flexinspect_hooks.callrefs import AttentionCall, CallShape

KEYS_TILED = "keys-tiled"
_REPEATS_PREFIX = "repeats/"


def put_repeats(refs: Sequence[AttentionCall], step: StepContext, buffer: StepBuffer) -> None:
    """Put for each call of a prompt whether its keys are repeated head by head, and otherwise."""
    if step.phase != "prefill":
        return
    for index, ref in enumerate(refs):
        groups = _groups(ref)
        if groups > 1:
            buffer.put(f"{_REPEATS_PREFIX}{index}", _compare_orders(ref.key[0, :, -1], groups))


def _groups(ref: AttentionCall) -> int:
    """Return by how much the keys were repeated before the call, 1 when they were not.

    With a single head of keys there is one order alone.
    """
    groups = getattr(ref.module, "num_key_value_groups", 1)
    heads = ref.key.shape[1]
    if type(groups) is not int or groups < 2 or ref.query.shape[1] != heads:
        return 1
    return groups if heads % groups == 0 and heads // groups > 1 else 1


def _compare_orders(newest: Tensor, groups: int) -> Tensor:
    """Return whether the newest key (heads, D) repeats as neighbours, and as a whole."""
    n_heads, width = newest.shape
    neighbours = newest.reshape(n_heads // groups, groups, width)
    whole = newest.reshape(groups, n_heads // groups, width)
    return torch.stack([(neighbours == neighbours[:, :1]).all(), (whole == whole[:1]).all()])


def record_repeats(
    values: Values, calls: Sequence[CallShape], step: StepContext, draft: StepDraft
) -> None:
    """Tell of the layers whose keys are repeated as a whole (writer thread)."""
    found = {
        int(k.removeprefix(_REPEATS_PREFIX)): v
        for k, v in values.items()
        if k.startswith(_REPEATS_PREFIX)
    }
    tiled = sorted({calls[i].layer for i, (near, whole) in found.items() if whole and not near})
    if not tiled:
        return
    heads = next(calls[i].q[1] for i, (near, whole) in found.items() if whole and not near)
    text = f"The keys of layers {tiled} were repeated as a whole, not head by head."
    data = {"layers": tiled, "q_heads": int(heads)}
    place = (step.started_at, step.generation, step.step, data)
    draft.events.append(EventRecord(KEYS_TILED, text, *place))
