"""Attention weights that a forward returns, held against what weights are.

They are drawn nowhere: what is drawn is recomputed. But the program may draw them, and they may be
something else: a log-sum-exp, or a layer's output under the name of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.records.step import CallRecord, EventRecord
from flexinspect_hooks.capture.buffer import StepBuffer, Values
from flexinspect_hooks.capture.hook import CaptureContext, Remove, StepDraft
from flexinspect_hooks.capture.step_clock import StepContext

NO_WEIGHTS = "no-weights"

TOLERANCE = 0.05
"""How far the sum of a row of weights may be from 1: rounding of bfloat16 over many keys."""

_Shapes = list[tuple[int, ...] | None]


class WeightsHook:
    """Looks at `output.attentions`, in steps whose forward returned them."""

    name = "weights"
    own_code_only = True

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Put a hook on the model."""
        root = id(context.model)
        self._weights: Sequence[Any] = ()

        # A function with a number: one that lies in a model must not keep it alive.
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) == root and not torch.compiler.is_compiling() and context.is_open:
                self._weights = getattr(output, "attentions", None) or ()

        return [context.model.register_forward_hook(leave).remove]

    def begin(self, context: CaptureContext) -> None:
        """Nothing to prepare per generation."""

    def open(self, step: StepContext) -> None:
        """Forget what an aborted step may have left."""
        self._weights = ()

    def reduce(self, step: StepContext, buffer: StepBuffer) -> _Shapes:
        """Return the shape of each layer's weights; put how far their rows are from 1."""
        weights, self._weights = self._weights, ()
        each = [one if isinstance(one, Tensor) else None for one in weights]
        sums = [_sum_error(one) for one in each if one is not None and one.dim() > 1]
        if sums:
            buffer.put("weights.off", torch.stack(sums))
        return [None if one is None else tuple(one.shape) for one in each]

    def record(self, step: StepContext, kept: _Shapes, values: Values, draft: StepDraft) -> None:
        """Write an event for what is no weights."""
        off = iter(values["weights.off"].tolist() if "weights.off" in values else ())
        call_of = {call.layer: call for call in draft.calls}
        for layer, shape in enumerate(kept):
            if shape is None:
                continue
            text = _weights_problem(shape, next(off) if len(shape) > 1 else 0.0, call_of.get(layer))
            if text:
                facts = {"layer": layer, "shape": list(shape)}
                what = f"Layer {layer} returned {text}"
                place = (step.started_at, step.generation, step.step)
                draft.events.append(EventRecord(NO_WEIGHTS, what, *place, facts))


def _sum_error(weights: Tensor) -> Tensor:
    """Return how far the last row of batch 0 is from a sum of 1, over the heads if it has any."""
    rows = weights[0, ..., -1, :] if weights.dim() > 2 else weights[-1]
    return (rows.float().sum(-1) - 1).abs().amax()


def _weights_problem(shape: tuple[int, ...], off: float, call: CallRecord | None) -> str:
    expected = (call.batch, call.q_heads, call.q_len, call.kv_len) if call is not None else None
    if len(shape) != 4 or (expected is not None and shape != expected):
        meant = expected or "(sequences, heads, rows, keys)"
        sums = "" if off <= TOLERANCE else ", whose rows do not sum to 1"
        return f"as attention weights a tensor {shape}{sums}; weights would be {meant}."
    if not off <= TOLERANCE:
        return f"attention weights whose newest row does not sum to 1: it is {off:.3g} off."
    return ""
