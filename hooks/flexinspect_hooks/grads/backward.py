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
from flexinspect_hooks.grads.gate import KeptLogits, distance
from flexinspect_hooks.grads.observe import Observer, Seen
from flexinspect_hooks.grads.patch import GradientPatch, flex_has_backward
from flexinspect_hooks.masksource import MaskSource

_FOUND_NAN = "returned nan values"
"""In the message of what autograd's anomaly mode raises."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be differentiated: "logprob" or "margin", with anomaly mode or without.

    `by_flex` None takes FlexAttention where it has a backward.
    """

    target: str = "logprob"
    detect_anomaly: bool = False
    by_flex: bool | None = None


@dataclass(frozen=True, slots=True)
class Before:
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
        self._extra: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._device = next(model.parameters()).device

    def gradients(
        self, before: Before, kept: KeptLogits, source: MaskSource, wish: Wish
    ) -> GradientRecord:
        """Return the gradients of the token that `kept` belongs to.

        They are left out where the forward is not the one that ran (see `GradientRecord.agrees`).
        """
        started = time.perf_counter()
        note = self._anomaly(before, kept, source, wish) if wish.detect_anomaly else None
        record = self._once(before, kept, source, wish)
        wall_ms = (time.perf_counter() - started) * 1e3
        return replace(record, anomaly=note, wall_ms=wall_ms)

    def is_by_flex(self, wish: Wish) -> bool:
        """Say whether FlexAttention is differentiated itself."""
        return flex_has_backward(self._device) if wish.by_flex is None else wish.by_flex

    def _once(
        self,
        before: Before,
        kept: KeptLogits,
        source: MaskSource,
        wish: Wish,
        *,
        keeps_weights: bool = False,
    ) -> GradientRecord:
        patch = GradientPatch(
            self._model,
            source,
            compiled=self._compiled,
            by_flex=self.is_by_flex(wish),
            keeps_weights=keeps_weights,
        )
        unreached = 0
        with patch, Observer(self._model, self._blocks) as observer, torch.enable_grad():
            logits = self._forward(before)
            gate = distance(kept, logits)
            slope = slope_of(logits, kept.token_id, wish.target)
            if gate <= kept.tolerance:
                unreached = _backward(logits, slope, observer)
                observer.note_unreached_layers()
            seen = observer.seen
        return _record(before, kept, wish, (patch.path, gate), slope, seen, unreached)

    def _forward(self, before: Before) -> Tensor:
        """Return the logits (V,) after the sequence."""
        from transformers import DynamicCache

        def row(values: Sequence[int]) -> Tensor:
            return torch.tensor([list(values)], device=self._device)

        # An empty cache, as in the prefill: without one transformers looks for packed sequences in
        # the position ids. `forward` itself, as the model's own hooks belong to recorded steps.
        output = self._model.forward(
            input_ids=row(before.ids),
            position_ids=row(before.positions),
            past_key_values=DynamicCache(config=self._model.config),
            use_cache=True,
            **self._extra,
        )
        logits: Tensor = output.logits[0, -1]
        return logits

    def _anomaly(
        self, before: Before, kept: KeptLogits, source: MaskSource, wish: Wish
    ) -> str | None:
        """Return what autograd's anomaly mode says: the function that made a NaN, and from where.

        The traceback is that of the forward call which the function belongs to.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with torch.autograd.set_detect_anomaly(True):
                    self._once(before, kept, source, wish, keeps_weights=True)
            except RuntimeError as error:
                if _FOUND_NAN not in str(error):
                    raise
                said = [str(warning.message) for warning in caught]
                traces = [text for text in said if "Traceback of forward call" in text]
                return "\n".join([str(error), *traces])
        return None


@dataclass(frozen=True, slots=True)
class Slope:
    """What is differentiated and its gradient at the logits: `unit` (V,) times `scale`."""

    value: float
    rival: int | None
    scale: float
    unit: Tensor

    @property
    def factor(self) -> float:
        """What gradients of the unit are to be multiplied with."""
        return self.scale if 0 < self.scale < math.inf else 1.0


def slope_of(logits: Tensor, token_id: int, target: str) -> Slope:
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
    return Slope(float(value.detach()), rival, scale, unit.to(logits.dtype))


def _backward(logits: Tensor, slope: Slope, observer: Observer) -> int:
    """Run the backward; returns how many parameters the logits do not depend on."""
    by = [*observer.parameters, *observer.leaves]
    found = torch.autograd.grad(logits, by, slope.unit, allow_unused=True)
    return sum(gradient is None for gradient in found[: len(observer.parameters)])


def _record(
    before: Before,
    kept: KeptLogits,
    wish: Wish,
    how: tuple[str, float],
    slope: Slope,
    seen: Seen,
    n_unreached: int,
) -> GradientRecord:
    factor = slope.factor
    return GradientRecord(
        *(before.generation, before.step, kept.token_id, wish.target, slope.value, slope.scale),
        *(*how, kept.tolerance),
        wall_ms=0.0,
        branch=before.branch,
        rival=slope.rival,
        n_unreached=n_unreached,
        stats=tuple(_scaled(stat, factor) for stat in seen.stats.values()),
        tokens=_token_shares(seen, factor),
        layers=_layer_norms(seen, factor),
    )


def _scaled(stat: GradientStat, factor: float) -> GradientStat:
    return replace(stat, norm=stat.norm * factor, max=stat.max * factor)


def _token_shares(seen: Seen, factor: float) -> Array | None:
    """Return gradient times input, and the gradient's norm, of each token: float (2, positions)."""
    if seen.embeddings is None or not seen.stats:
        return None
    gradient = torch.zeros_like(seen.embeddings) if seen.gradient is None else seen.gradient
    gradient, inputs = gradient[0].double(), seen.embeddings[0].double()
    both = torch.stack([(gradient * inputs).sum(-1), gradient.norm(dim=-1)]) * factor
    return both.float().cpu().numpy()


def _layer_norms(seen: Seen, factor: float) -> Array | None:
    """Return the norms at the embeddings and at the output of each layer, by its number.

    0 where the backward did not arrive, NaN for the number of a layer that is not watched.
    """
    if not seen.stats:
        return None
    norms = np.full(max(seen.blocks, default=-1) + 2, np.nan, np.float32)
    for layer in (-1, *seen.blocks):
        norms[layer + 1] = float(seen.layers.get(layer, 0.0)) * factor
    return norms
