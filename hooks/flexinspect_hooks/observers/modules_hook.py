"""Checks what modules return: statistics of decoder layers, and returned attention weights.

The interface shows recomputed weights, never those that a forward returns. But the program may use
them, and they may be something else: a log-sum-exp, or a layer's output under the name of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexinspect.records.step import LENS_EVENT
from flexinspect_hooks.capture.buffer import (
    StepBuffer,
    stack_layers,
    unless_modified,
)
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.observers.hidden_digests import HiddenDigests, version_of
from flexinspect_hooks.observers.logit_lens import LogitLens
from flexinspect_hooks.step_writer.layer_records import (
    LayerRecords,
    ReducedLayers,
    ReturnedWeightsRecords,
    WeightShapes,
)


class ModuleHook(Hook):
    """Keeps each decoder layer's output during the forward and reduces them together.

    At level basic only layers with NaN/Inf are recorded, if the best logit is not finite; from
    advanced on all of them, and digests of some rows. At extreme the rows of the chosen layers are
    stored as stream "hidden", and read through the logit lens.
    """

    name = "modules"

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Put one forward hook on each decoder layer."""
        self._context = context
        self._outputs: list[tuple[int, Tensor, int | None]] = []
        self._digests = HiddenDigests()
        blocks = context.blocks.items()
        names = {layer: name for layer, (name, _) in blocks}
        self.records = LayerRecords(names, max(names, default=0), context.decode)
        context.layer_outputs = lambda: self._outputs
        self._lens: LogitLens | None = None
        self._is_lens_made = self._is_modified = False
        return [context.on_output(one, self._keeper(layer)) for layer, (_, one) in blocks]

    def _keeper(self, layer: int) -> Callable[[Any], None]:
        """Return a function that keeps each output of a layer."""

        def keep(output: Any) -> None:
            rows = output if isinstance(output, Tensor) else output[0]
            shape = rows.shape
            # One row is not worth the check, which costs more than all else here.
            version = version_of(rows) if len(shape) > 1 and shape[1] > 1 else None
            self._outputs.append((layer, rows, version))

        return keep

    def open(self, step: StepContext) -> None:
        self._outputs.clear()

    def reduce(self, step: StepContext, buffer: StepBuffer) -> ReducedLayers:
        """Reduce the outputs (batch, rows, hidden) of all layers in one pass over their stack."""
        kept, self._outputs = self._outputs, []
        if not kept:
            return ReducedLayers()
        on_cpu = kept[0][1].device.type == "cpu"
        if step.level == "basic" and on_cpu and step.logits is not None:
            if step.q_len == 1 and step.logits.dtype is torch.float32 and self._can_wait(kept):
                outputs = [output for _, output, _ in kept]
                reduce = unless_modified(outputs)(_statistics_if_not_finite)
                buffer.defer(reduce, outputs=outputs, logits=step.logits)
                return ReducedLayers([layer for layer, *_ in kept])
            if math.isfinite(float(step.logits.max())):
                return ReducedLayers()
        stack: Sequence[Tensor] | Tensor | None = None
        guard = None
        if step.q_len == 1 and on_cpu and self._can_wait(kept):
            stack = [output for _, output, _ in kept]  # stacked in the writer thread
            guard = unless_modified(stack)
            buffer.defer(guard(_one_row_statistics), outputs=stack)
        elif step.q_len == 1:
            stack = stack_layers([output[0] for _, output, _ in kept]).flatten(1).float()
            buffer.defer(partial(_statistics, on_cpu, 1), rows=stack)
        else:
            # A prompt is reduced layer by layer: a float32 stack of it may not fit in memory.
            rows = [output[0] for _, output, _ in kept]
            per_layer = [_statistics(on_cpu, len(r), torch, r.reshape(1, -1).float()) for r in rows]
            stats = stack_layers([one["modules.stats"] for one in per_layer]).flatten(0, 1)
            buffer.put("modules.stats", stats)
        if step.level == "extreme":
            chosen = [(layer, output) for layer, output, _ in kept if layer in self._context.layers]
            stored = [output[0] for _, output in chosen]
            buffer.put_activations("hidden", [layer for layer, _ in chosen], stored)
        if step.level != "basic":
            self._digests.reduce(kept, stack, self._context.model, step, buffer, guard)
        layers = [(layer, output) for layer, output, _ in kept]
        lens = self._reduce_lens(layers, step, buffer) if step.level == "extreme" else []
        return ReducedLayers([layer for layer, _ in layers], lens)

    def stop_deferring(self) -> None:
        """Outputs are modified in place: from now on they are copied."""
        self._is_modified = True

    def _can_wait(self, kept: Sequence[tuple[int, Tensor, int | None]]) -> bool:
        """Whether the outputs may be read later, when it shows if they were modified meanwhile."""
        # Not by `all`: a generator runs once for each layer.
        kinds = {(output.dtype, output.is_inference()) for _, output, _ in kept}
        return not self._is_modified and kinds == {(torch.float32, False)}

    def _reduce_lens(
        self, kept: list[tuple[int, Tensor]], step: StepContext, buffer: StepBuffer
    ) -> list[int]:
        """Return the layers that the logit lens has read; a failure turns only the lens off."""
        try:
            if not self._is_lens_made:
                self._is_lens_made = True
                self._lens = LogitLens(self._context.model, self._context.blocks)
                if reason := self._lens.reason:
                    step.events.append((LENS_EVENT, f"There is no logit lens: {reason}."))
            if self._lens is not None:
                return self._lens.reduce(kept, self._context.layers, step, buffer)
        except Exception as error:
            self._lens = None
            text = f"The logit lens failed at step {step.step} and is off: "
            step.events.append((LENS_EVENT, f"{text}{type(error).__name__}: {error}"))
        return []


def _statistics_if_not_finite(xp: Any, outputs: Sequence[Any], logits: Any) -> dict[str, Any]:
    """Return statistics of the outputs (batch, 1, hidden) if the best logit is not finite, else {}.

    NaN and Inf of a layer reach the newest row's logits, because they survive norms and sums.
    """
    return {} if math.isfinite(float(xp.max(logits))) else _one_row_statistics(xp, outputs)


def _one_row_statistics(xp: Any, outputs: Sequence[Any]) -> dict[str, Any]:
    """Return the statistics of outputs (batch, 1, hidden) on a CPU."""
    return _statistics(True, 1, xp, xp.stack([output[0].reshape(-1) for output in outputs]))


def _statistics(on_cpu: bool, n_rows: int, xp: Any, rows: Any) -> dict[str, Any]:
    """Return (layers, 8): min, max, mean, std, norm, NaN count, non-finite count, first bad row.

    `rows` is float32 (layers, values), the values of `n_rows` rows per layer; `xp` is torch or
    numpy. std is that of the population, from norm and mean: fast reductions instead of a slow one,
    with an error of about 1e-7 * norm². NaN and Inf show in min and max; on CPU they are counted
    only if min or max is not finite, elsewhere always, because reading these would wait for the
    device.
    """
    n_values = rows.shape[1]
    low, high = xp.amin(rows, axis=1), xp.amax(rows, axis=1)
    mean, norm = xp.mean(rows, axis=1), xp.linalg.norm(rows, axis=1)
    std = xp.sqrt(xp.clip(norm * norm / n_values - mean * mean, 0, None))
    n_nan = n_bad = first = xp.zeros_like(mean)
    if not (on_cpu and bool(xp.isfinite(high - low).all())):
        one = xp.ones_like(mean)
        n_nan = xp.sum(xp.isnan(rows), axis=1) * one
        finite = xp.isfinite(rows)
        n_bad = (n_values - xp.sum(finite, axis=1)) * one
        is_bad = ~finite.reshape(len(rows), n_rows, -1).all(-1)
        first = xp.argmax(is_bad * 1, axis=1) * one
    return {"modules.stats": xp.stack((low, high, mean, std, norm, n_nan, n_bad, first), 1)}


class WeightsHook(Hook):
    """Checks `output.attentions` of steps whose forward returned them."""

    name = "weights"
    own_code_only = True

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Put a hook on the model."""
        self.records = ReturnedWeightsRecords()
        self._weights: Sequence[Any] = ()
        return [context.on_output(context.model, self._keep)]

    def _keep(self, output: Any) -> None:
        self._weights = getattr(output, "attentions", None) or ()

    def open(self, step: StepContext) -> None:
        self._weights = ()

    def reduce(self, step: StepContext, buffer: StepBuffer) -> WeightShapes:
        """Return the shape of each layer's weights; put how far their rows' sums are from 1."""
        weights, self._weights = self._weights, ()
        errors = [_sum_error(t) for t in weights if isinstance(t, Tensor) and t.dim() > 1]
        if errors:
            buffer.put("weights.off", torch.stack(errors))
        return [tuple(t.shape) if isinstance(t, Tensor) else None for t in weights]


def _sum_error(weights: Tensor) -> Tensor:
    """Return how far the sum of batch 0's last row is from 1, the largest over the heads."""
    rows = weights[0, ..., -1, :] if weights.dim() > 2 else weights[-1]
    return (rows.float().sum(-1) - 1).abs().amax()
