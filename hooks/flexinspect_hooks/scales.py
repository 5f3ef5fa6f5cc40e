"""What own code made of the scale that a layer asked for: forgotten, or applied twice.

The kernel's scale alone does not tell, as queries or keys may have been multiplied before: their
newest row of head 0 is compared with the one that the layer gave. A `score_mod` may scale, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexinspect.records import EventRecord
from flexinspect_hooks.buffer import StepBuffer, Values
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import StepDraft
from flexinspect_hooks.scorescales import has_score_mod, score_mod_slopes

if TYPE_CHECKING:
    from flexinspect_hooks.callrefs import AttentionCall, CallShape

RESCALED = "scores-rescaled"
_SCALES_PREFIX = "scales"
_SCALE_TOLERANCE = 0.02
"""By how much a vector may be off a multiple of another, or a scale off the one asked for."""


class _ScaledCall(NamedTuple):
    """A call, the kernel's scale over the one asked for, and what its `score_mod` multiplies by."""

    number: int
    ratio: float
    ref: AttentionCall
    slope: Tensor


def put_scales(refs: Sequence[AttentionCall], step: StepContext, buffer: StepBuffer) -> None:
    """Put for each call of a prompt that can be compared: its number, and by what it was scaled."""
    if step.phase != "prefill" or step.step:
        return
    known = [(number, _ratio(ref), ref) for number, ref in enumerate(refs)]
    pairs = [(number, ratio, ref) for number, ratio, ref in known if ratio is not None]
    found: dict[tuple[int, torch.dtype], list[_ScaledCall]] = {}
    for (number, ratio, ref), slope in zip(
        pairs, score_mod_slopes([ref for *_, ref in pairs]), strict=True
    ):
        if slope is not None:
            kind = ref.query.shape[-1], ref.query.dtype
            found.setdefault(kind, []).append(_ScaledCall(number, ratio, ref, slope))
    for members in found.values():
        buffer.put(f"{_SCALES_PREFIX}/{members[0].number}", _factors(members))


def _ratio(ref: AttentionCall) -> float | None:
    """Return the kernel's scale over the one asked for; None where that cannot be compared."""
    asked = ref.layer_inputs
    if asked is None or ref.query.shape != asked.query.shape:
        return None
    if ref.unknown_scores and not has_score_mod(ref):
        return None
    if ref.key.shape[2:] != asked.key.shape[2:] or not asked.scale:
        return None
    used = ref.scale
    return float(ref.query.shape[-1] ** -0.5 if used is None else used) / asked.scale


def _factors(members: Sequence[_ScaledCall]) -> Tensor:
    """Return float32 (calls, 4): number, scale over the one asked for, of that what a `score_mod`
    multiplied, and how far all that is off."""
    pairs = [
        (ref.query, ref.layer_inputs.query)
        for _, _, ref, _ in members
        if ref.layer_inputs is not None
    ]
    query, query_off = _multiple(pairs)
    pairs = [
        (ref.key, ref.layer_inputs.key) for _, _, ref, _ in members if ref.layer_inputs is not None
    ]
    key, key_off = _multiple(pairs)
    known = query.new_tensor([[number, ratio] for number, ratio, _, _ in members])
    rule = torch.stack([slope.mean() for _, _, _, slope in members])
    # A rule that drops the score says nothing of its scale: 0 / 0 is no small number.
    bent = torch.stack([(slope / slope.mean() - 1).abs().amax() for _, _, _, slope in members])
    off = torch.stack([query_off, key_off, bent]).amax(0)
    return torch.stack([known[:, 0], known[:, 1] * query * key * rule, rule, off], 1)


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
    odd: dict[int, tuple[float, float]] = {}
    for name, rows in values.items():
        if name.startswith(f"{_SCALES_PREFIX}/"):
            for number, factor, rule, off in rows.tolist():
                if off < _SCALE_TOLERANCE and abs(factor - 1) > _SCALE_TOLERANCE:
                    odd[int(number)] = factor, rule
    if not odd:
        return
    first = min(odd)
    factor, rule = odd[first]
    layers = sorted({calls[number].layer for number in odd})
    text = f"The scores of layers {layers} are scaled by {factor:.4g} times what they asked for."
    data = {"layers": layers, "factor": factor, "scale": calls[first].scale}
    if abs(rule - 1) > _SCALE_TOLERANCE:
        data["score_mod"] = rule
    place = (step.started_at, step.generation, step.step, data)
    draft.events.append(EventRecord(RESCALED, text, *place))
