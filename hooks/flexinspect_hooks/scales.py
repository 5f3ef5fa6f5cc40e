"""What own code made of the scale that a layer asked for: forgotten, or applied twice.

The kernel's scale alone does not tell, as queries or keys may have been multiplied before: their
newest row of head 0 is compared with the one that the layer gave.
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
    from flexinspect_hooks.callrefs import CallRef, CallShape

RESCALED = "scores-rescaled"
_NAME = "scales"
_ALIKE = 0.02
"""By how much a vector may be off a multiple of another, or a scale off the one asked for."""


def put_scales(refs: Sequence[CallRef], step: StepContext, buffer: StepBuffer) -> None:
    """Put for each call of a prompt that can be compared: its number, and by what it was scaled."""
    if step.phase != "prefill" or step.step:
        return
    found: dict[tuple[int, torch.dtype], list[tuple[int, float, CallRef]]] = {}
    for number, ref in enumerate(refs):
        ratio = _ratio(ref)
        if ratio is not None:
            found.setdefault((ref.query.shape[-1], ref.query.dtype), []).append(
                (number, ratio, ref)
            )
    for width, dtype in found:
        members = found[width, dtype]
        buffer.put(f"{_NAME}/{members[0][0]}", _factors(members))


def _ratio(ref: CallRef) -> float | None:
    """Return the kernel's scale over the one asked for; None where that cannot be compared."""
    asked = ref.asked
    if asked is None or ref.unknown_scores or ref.query.shape != asked.query.shape:
        return None
    if ref.key.shape[2:] != asked.key.shape[2:] or not asked.scale:
        return None
    used = ref.scale
    return float(ref.query.shape[-1] ** -0.5 if used is None else used) / asked.scale


def _factors(members: Sequence[tuple[int, float, CallRef]]) -> Tensor:
    """Return float32 (calls, 3): number, scale over the scale asked for, and how far it is off."""
    pairs = [(ref.query, ref.asked.query) for _, _, ref in members if ref.asked is not None]
    query, query_off = _multiple(pairs)
    pairs = [(ref.key, ref.asked.key) for _, _, ref in members if ref.asked is not None]
    key, key_off = _multiple(pairs)
    known = query.new_tensor([[number, ratio] for number, ratio, _ in members])
    return torch.stack([known[:, 0], known[:, 1] * query * key, query_off.maximum(key_off)], 1)


def _multiple(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return by what newest rows were multiplied, and how far they are off that, each (calls)."""
    now = torch.stack([new[0, 0, -1] for new, _ in pairs]).float()
    before = torch.stack([old[0, 0, -1] for _, old in pairs]).float()
    factor = (now * before).sum(1) / (before * before).sum(1)
    off = (now - factor[:, None] * before).abs().amax(1) / now.abs().amax(1)
    return factor, off


def record_scales(
    values: Values, calls: Sequence[CallShape], step: StepContext, draft: StepDraft
) -> None:
    """Tell of the layers whose scores are not scaled as they asked for (writer thread)."""
    odd: dict[int, float] = {}
    for name, rows in values.items():
        if name.startswith(f"{_NAME}/"):
            for number, factor, off in rows.tolist():
                if off < _ALIKE and abs(factor - 1) > _ALIKE:
                    odd[int(number)] = factor
    if not odd:
        return
    first = min(odd)
    layers = sorted({calls[number].layer for number in odd})
    text = (
        f"The scores of layers {layers} are scaled by {odd[first]:.4g} times what they asked for."
    )
    data = {"layers": layers, "factor": odd[first], "scale": calls[first].scale}
    place = (step.started_at, step.generation, step.step, data)
    draft.events.append(EventRecord(RESCALED, text, *place))
