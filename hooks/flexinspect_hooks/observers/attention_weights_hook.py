"""Checks the attention weights that a forward returns: their shape, and that rows sum to 1.

The interface shows recomputed weights, never these. But the program may use them, and they may be
something else: a log-sum-exp, or a layer's output under the name of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexinspect.records.step import CallRecord
from flexinspect_hooks.capture.buffer import StepBuffer, Values
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove, StepDraft
from flexinspect_hooks.capture.step_clock import StepContext

NO_WEIGHTS = "not-attention-weights"

TOLERANCE = 0.05
"""Largest deviation of a row's sum from 1: rounding of bfloat16 over many keys."""

_Shapes = list[tuple[int, ...] | None]


class WeightsHook(Hook):
    """Checks `output.attentions` of steps whose forward returned them."""

    name = "weights"
    own_code_only = True

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Put a hook on the model."""
        self._weights: Sequence[Any] = ()
        return [context.on_output(context.model, self._keep)]

    def _keep(self, output: Any) -> None:
        self._weights = getattr(output, "attentions", None) or ()

    def open(self, step: StepContext) -> None:
        self._weights = ()

    def reduce(self, step: StepContext, buffer: StepBuffer) -> _Shapes:
        """Return the shape of each layer's weights; put how far their rows' sums are from 1."""
        weights, self._weights = self._weights, ()
        errors = [_sum_error(t) for t in weights if isinstance(t, Tensor) and t.dim() > 1]
        if errors:
            buffer.put("weights.off", torch.stack(errors))
        return [tuple(t.shape) if isinstance(t, Tensor) else None for t in weights]

    def record(self, step: StepContext, kept: _Shapes, values: Values, draft: StepDraft) -> None:
        """Write an event for each layer whose tensor cannot be attention weights."""
        errors = iter(values["weights.off"].tolist() if "weights.off" in values else ())
        call_of = {call.layer: call for call in draft.calls}
        for layer, shape in enumerate(kept):
            if shape is None:
                continue
            error = next(errors) if len(shape) > 1 else 0.0
            if problem := _weights_problem(shape, error, call_of.get(layer)):
                facts = {"layer": layer, "shape": list(shape)}
                draft.add_event(step, NO_WEIGHTS, f"Layer {layer} returned {problem}", facts)


def _sum_error(weights: Tensor) -> Tensor:
    """Return how far the sum of batch 0's last row is from 1, the largest over the heads."""
    rows = weights[0, ..., -1, :] if weights.dim() > 2 else weights[-1]
    return (rows.float().sum(-1) - 1).abs().amax()


def _weights_problem(shape: tuple[int, ...], error: float, call: CallRecord | None) -> str:
    expected = (call.batch, call.q_heads, call.q_len, call.kv_len) if call is not None else None
    if len(shape) != 4 or (expected is not None and shape != expected):
        wanted = expected or "(sequences, heads, rows, keys)"
        sums = "" if error <= TOLERANCE else ", whose rows do not sum to 1"
        return f"as attention weights a tensor {shape}{sums}; weights would be {wanted}."
    if not error <= TOLERANCE:  # a NaN is an error, too
        return f"attention weights whose newest row does not sum to 1: it is {error:.3g} off."
    return ""
