"""The gradient of one generated token: one forward of the sequence before it, one backward."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flexinspect.gradientrecords import GradientRecord, GradientStat
from flexinspect.records import Array
from flexinspect_hooks.grads.gate import SampledLogits, logits_distance
from flexinspect_hooks.grads.observe import GradientObserver, ReducedGradients
from flexinspect_hooks.grads.patch import GradientPatch, flex_has_backward
from flexinspect_hooks.masksource import MaskSource

_NAN_MESSAGE = "returned nan values"
"""In the message of what autograd's anomaly mode raises."""


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """What is to be differentiated: "logprob" or "margin", with anomaly mode or without.

    `by_flex` None takes FlexAttention where it has a backward.
    """

    target: str = "logprob"
    detect_anomaly: bool = False
    use_flex: bool | None = None


@dataclass(frozen=True, slots=True)
class TokenContext:
    """Where a token stands, and what led to it: ids and position ids of all tokens before it."""

    generation: int
    branch: int
    step: int
    ids: Sequence[int]
    positions: Sequence[int]


class Differentiator:
    """Takes gradients through one model; `blocks` maps a layer to (name, decoder layer).

    `compiled` is whether the kernels were that ran. The model is left as it was: no `.grad` is
    written, `requires_grad` is put back, and no hook stays.
    """

    def __init__(
        self, model: Any, blocks: Mapping[int, tuple[str, nn.Module]], *, compiled: bool
    ) -> None:
        self._model, self._blocks, self._compiled = model, dict(blocks), compiled
        takes = inspect.signature(model.forward).parameters
        self._extra_arguments: dict[str, Any] = (
            {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        )
        self._device = next(model.parameters()).device

    def compute(
        self, context: TokenContext, sampled: SampledLogits, source: MaskSource, spec: GradientSpec
    ) -> GradientRecord:
        """Return the gradients of the token that `kept` belongs to.

        They are left out where the forward is not the one that ran (see `GradientRecord.agrees`).
        """
        started = time.perf_counter()
        note = self._detect_anomaly(context, sampled, source, spec) if spec.detect_anomaly else None
        record = self._forward_backward(context, sampled, source, spec)
        wall_ms = (time.perf_counter() - started) * 1e3
        return replace(record, anomaly=note, wall_ms=wall_ms)

    def uses_flex(self, spec: GradientSpec) -> bool:
        """Say whether FlexAttention is differentiated itself."""
        return flex_has_backward(self._device) if spec.use_flex is None else spec.use_flex

    def _forward_backward(
        self,
        context: TokenContext,
        sampled: SampledLogits,
        source: MaskSource,
        spec: GradientSpec,
        *,
        keeps_weights: bool = False,
    ) -> GradientRecord:
        patch = GradientPatch(
            self._model,
            source,
            compiled=self._compiled,
            use_flex=self.uses_flex(spec),
            keeps_weights=keeps_weights,
        )
        unreached = 0
        with patch, GradientObserver(self._model, self._blocks) as observer, torch.enable_grad():
            logits = self._forward(context)
            gate = logits_distance(sampled, logits)
            slope = target_gradient(logits, sampled.token_id, spec.target)
            if gate <= sampled.tolerance:
                unreached = _run_backward(logits, slope, observer)
                observer.note_unreached_layers()
            seen = observer.reduced
        return _gradient_record(context, sampled, spec, (patch.path, gate), slope, seen, unreached)

    def _forward(self, context: TokenContext) -> Tensor:
        """Return the logits (V,) after the sequence."""
        from transformers import DynamicCache

        def row(values: Sequence[int]) -> Tensor:
            return torch.tensor([list(values)], device=self._device)

        # An empty cache, as in the prefill: without one transformers looks for packed sequences in
        # the position ids. `forward` itself, as the model's own hooks belong to recorded steps.
        output = self._model.forward(
            input_ids=row(context.ids),
            position_ids=row(context.positions),
            past_key_values=DynamicCache(config=self._model.config),
            use_cache=True,
            **self._extra_arguments,
        )
        logits: Tensor = output.logits[0, -1]
        return logits

    def _detect_anomaly(
        self, context: TokenContext, sampled: SampledLogits, source: MaskSource, spec: GradientSpec
    ) -> str | None:
        """Return what autograd's anomaly mode says: the function that made a NaN, and from where.

        The traceback is that of the forward call which the function belongs to.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with torch.autograd.set_detect_anomaly(True):
                    self._forward_backward(context, sampled, source, spec, keeps_weights=True)
            except RuntimeError as error:
                if _NAN_MESSAGE not in str(error):
                    raise
                said = [str(warning.message) for warning in caught]
                traces = [text for text in said if "Traceback of forward call" in text]
                return "\n".join([str(error), *traces])
        return None


@dataclass(frozen=True, slots=True)
class TargetGradient:
    """What is differentiated and its gradient at the logits: `unit` (V,) times `scale`."""

    value: float
    rival: int | None
    scale: float
    unit: Tensor

    @property
    def factor(self) -> float:
        """What gradients of the unit are to be multiplied with."""
        return self.scale if 0 < self.scale < math.inf else 1.0


def target_gradient(logits: Tensor, token_id: int, target: str) -> TargetGradient:
    """Return a token's log-probability, or its logit less the next best, and the gradient.

    In float64, and brought to length 1: of a token with a probability near 1 the gradient is so
    small that it would be lost in the model's dtype.
    """
    row = logits.detach().double().requires_grad_(True)
    rival = None
    if target == "margin":
        others = row.detach().clone()
        others[token_id] = -torch.inf
        rival = int(others.argmax())
        value = row[token_id] - row[rival]
    else:
        value = torch.log_softmax(row, -1)[token_id]
    (gradient,) = torch.autograd.grad(value, row)
    scale = float(gradient.norm())
    unit = gradient / scale if 0 < scale < math.inf else gradient
    return TargetGradient(float(value.detach()), rival, scale, unit.to(logits.dtype))


def _run_backward(logits: Tensor, target: TargetGradient, observer: GradientObserver) -> int:
    """Run the backward; returns how many parameters the logits do not depend on."""
    by = [*observer.parameters, *observer.leaves]
    found = torch.autograd.grad(logits, by, target.unit, allow_unused=True)
    return sum(gradient is None for gradient in found[: len(observer.parameters)])


def _gradient_record(
    context: TokenContext,
    sampled: SampledLogits,
    spec: GradientSpec,
    how: tuple[str, float],
    target: TargetGradient,
    reduced: ReducedGradients,
    n_unreached: int,
) -> GradientRecord:
    factor = target.factor
    return GradientRecord(
        *(
            context.generation,
            context.step,
            sampled.token_id,
            spec.target,
            target.value,
            target.scale,
        ),
        *(*how, sampled.tolerance),
        wall_ms=0.0,
        branch=context.branch,
        rival=target.rival,
        n_unreached=n_unreached,
        stats=tuple(_scale_stat(stat, factor) for stat in reduced.stats.values()),
        tokens=_token_norms(reduced, factor),
        layers=_layer_norms(reduced, factor),
    )


def _scale_stat(stat: GradientStat, factor: float) -> GradientStat:
    return replace(stat, norm=stat.norm * factor, max=stat.max * factor)


def _token_norms(reduced: ReducedGradients, factor: float) -> Array | None:
    """Return gradient times input, and the gradient's norm, of each token: float (2, positions)."""
    if reduced.embeddings is None or not reduced.stats:
        return None
    gradient = (
        torch.zeros_like(reduced.embeddings) if reduced.gradient is None else reduced.gradient
    )
    gradient, inputs = gradient[0].double(), reduced.embeddings[0].double()
    both = torch.stack([(gradient * inputs).sum(-1), gradient.norm(dim=-1)]) * factor
    return both.float().cpu().numpy()


def _layer_norms(reduced: ReducedGradients, factor: float) -> Array | None:
    """Return the norms at the embeddings and at the output of each layer, by its number.

    0 where the backward did not arrive, NaN for the number of a layer that is not watched.
    """
    if not reduced.stats:
        return None
    norms = np.full(max(reduced.blocks, default=-1) + 2, np.nan, np.float32)
    for layer in (-1, *reduced.blocks):
        norms[layer + 1] = float(reduced.layers.get(layer, 0.0)) * factor
    return norms
