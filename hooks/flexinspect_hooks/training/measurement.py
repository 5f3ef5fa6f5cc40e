"""Measures the gradients of each optimizer step, and how much the step changed the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from flexinspect.records import training_step
from flexinspect_hooks.training import gradient_statistics
from flexinspect_hooks.training.cost_governor import Detail
from flexinspect_hooks.training.gradient_statistics import gradient_facts, local_part, tensor_norms
from flexinspect_hooks.training.torch_calls import ClippingNorms, NormSource

MAX_SAMPLE = 1 << 16  # the most values of a parameter that are copied: rows, evenly spaced
MAX_FULL_STEPS = 10  # steps with an anomaly that are recorded with all parameters


class GradientMeter:
    """Measures a model's gradients step by step, and how much a step changes its weights.

    Of the weights it copies samples. The copies are reused: new memory costs more than copying.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._parameters = model, gradient_statistics.ParameterList()
        self.groups: tuple[str, ...] = ()
        self._backward_order: dict[str, int] = {}
        self._hooked: list[str] = []
        self._order_hooks = ExitStack()
        self._norm_source = NormSource()
        self._n_problem_steps = 0
        self._set_parameters(self._parameters.trainable_of(model))

    def refresh(self) -> str | None:
        """Update the parameters, and return a sentence on a change. New groups come last."""
        named = self._parameters.trainable_of(self.model)
        pairs = zip(named, self.named, strict=False)
        if len(named) == len(self.named) and all(a.parameter is b.parameter for a, b in pairs):
            return None
        known = len(self.groups)
        self._set_parameters(named)
        new = ", ".join(self.groups[known:][:10])
        more = f"; new groups: {new}" if new else ""
        return f"{len(named)} parameters are trained from this step on{more}."

    def _set_parameters(self, named: gradient_statistics.NamedParameters) -> None:
        self.named, self.parameter_ids = named, {id(one.parameter) for one in named}
        self.groups = tuple(dict.fromkeys((*self.groups, *(one.group for one in named))))
        self._group_at = {group: at for at, group in enumerate(self.groups)}
        self._drop_copies()

    def _drop_copies(self) -> None:
        self._samples: list[Tensor] = []
        self._copies: list[Tensor] = []
        self.has_copies = False

    def learn_order(self) -> None:
        """Hook the first backward pass to learn the order of the parameters."""

        def hook(name: str, _: Tensor) -> None:
            self._backward_order.setdefault(name, len(self._backward_order))

        for name, parameter, *_ in self.named:
            add: Any = parameter.register_post_accumulate_grad_hook
            self._order_hooks.enter_context(add(partial(hook, name)))
            self._hooked.append(name)

    def take_unreached(self) -> list[str]:
        """The parameters that got no gradient in the first backward pass; later none."""
        if not self._backward_order:
            return []
        self._order_hooks.close()
        hooked, self._hooked = self._hooked, []
        return [name for name in hooked if name not in self._backward_order]

    def release(self) -> None:
        """Remove the hooks, and drop the copies of weights."""
        self._order_hooks.close()
        self._drop_copies()

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy samples of the weights before a step."""
        # Not kept between steps: a parameter may get other memory, and the old one must be freed.
        self._samples = [_sample_rows(one.parameter) for one in self.named]
        if [*map(_kind_of, self._copies)] != [*map(_kind_of, self._samples)]:
            self._copies = [torch.empty_like(one) for one in self._samples]
        _foreach_by_kind(torch._foreach_copy_, self._copies, self._samples)
        self.has_copies = True

    @torch.no_grad()
    def measure_change(self) -> tuple[float, ...]:
        """The ratio of change to weights of each group (NaN if all are 0); () without copies."""
        if not self.has_copies:
            return ()
        self.has_copies = False
        weights = tensor_norms(self._copies)
        _foreach_by_kind(torch._foreach_sub_, self._copies, self._samples)
        self._samples = []
        squares = [[0.0, 0.0] for _ in self.groups]
        measured = zip(self.named, self._copies, tensor_norms(self._copies), weights, strict=True)
        for one, copy, change, weight in measured:
            size = one.parameter.numel() / max(copy.numel(), 1)
            group = squares[self._group_at[one.group]]
            group[0] += size * change * change
            group[1] += size * weight * weight
        return tuple(math.sqrt(c / w) if w else math.nan for c, w in squares)

    @torch.no_grad()
    def sum_weight_bits(self, *, sampled: bool) -> Tensor:
        """Return for each group the sum of the bits of its weights as integers, int64 (groups,).

        Equal weights have equal sums on all ranks; parameters of which each rank has a part do not
        count. With `sampled`, only the sample of each parameter counts.
        """
        sums: dict[str, list[Tensor]] = {}
        for one in self.named:
            if not hasattr(one.parameter, "placements"):
                values = _sample_rows(one.parameter) if sampled else one.parameter.detach()
                sums.setdefault(one.group, []).append(_sum_bits(values))
        device = next(iter(self.named)).parameter.device
        zero = torch.zeros((), dtype=torch.int64, device=device)
        parts = (sums.get(group, [zero]) for group in self.groups)
        return torch.stack([torch.stack([each.to(device) for each in own]).sum() for own in parts])

    def measure(
        self, step: int, detail: Detail, scale: float, is_warming: bool, norms: ClippingNorms | None
    ) -> training_step.TrainingStepRecord | None:
        """The gradients as the optimizer receives them, None in a step that is not measured.

        `scale` is the loss scale that they still contain, `norms` are those known from clipping.
        While a learning rate `is_warming`, no gradient counts as vanishing: some start small.
        """
        if not detail.measures(step):
            return None
        norms_of = partial(self._norm_source.norms, step, norms)
        gradients = gradient_facts(self.named, with_max=detail.maxima, norms_of=norms_of)
        if scale != 1.0:
            gradients = gradients.unscaled(scale)
        vanishing = 0.0 if is_warming else training_step.VANISHING_NORM
        limits = training_step.EXPLODING_NORM, vanishing
        outliers = gradients.outliers(limits)
        producer = self._producer(outliers, vanishing)
        self._n_problem_steps += producer is not None
        is_first_problem = producer is not None and self._n_problem_steps <= MAX_FULL_STEPS
        is_recorded = is_first_problem or step % detail.rows_every == 0
        squares = [0.0] * len(self.groups)
        for one, norm in zip(gradients.parameters, gradients.norms, strict=True):
            squares[self._group_at[one.group]] += norm * norm
        return replace(
            gradients.step_record(outliers, limits),
            gradients=tuple(gradients.rows) if is_recorded else (),
            group_norms=tuple(math.sqrt(one) if one >= 0 else one for one in squares),
            anomaly_origin=producer,
        )

    def _producer(
        self, outliers: Sequence[training_step.ParameterGradient], vanishing: float
    ) -> training_step.AnomalyOrigin | None:
        """The parameter in which an anomaly first appears in the backward pass."""
        last = len(self._backward_order)
        ordered = sorted(outliers, key=lambda one: self._backward_order.get(one.name, last))
        if bad := [one for one in ordered if one.has_nonfinite]:
            counts = f"{bad[0].n_nan} NaN, {bad[0].n_inf} Inf"
            return training_step.AnomalyOrigin("backward", bad[0].name, len(bad) - 1, counts)
        kind, bad = "explosion", [one for one in ordered if one.explodes()]
        if not bad:
            kind, bad = "vanishing", [o for o in outliers if o.is_matrix and o.vanishes(vanishing)]
            bad.sort(key=lambda one: one.norm)
        if not bad:
            return None
        return training_step.AnomalyOrigin(kind, bad[0].name, len(bad) - 1, f"{bad[0].norm:.4g}")


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _sum_bits(values: Tensor) -> Tensor:
    """Return the sum of a tensor's values with their bits read as integers, modulo 2^64."""
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of a number of bytes."""


def _sample_rows(parameter: Tensor) -> Tensor:
    """A view of evenly spaced rows of a parameter, at most `MAX_SAMPLE` values together."""
    values = local_part(parameter.detach())
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.numel() <= MAX_SAMPLE:
        return values
    # In memory order, every dense parameter can be viewed as rows.
    strides = values.stride()
    values = values.permute(sorted(range(values.dim()), key=lambda at: -strides[at]))
    if not values.is_contiguous():
        return values[:: -(-values.numel() // MAX_SAMPLE)]
    width = values.shape[-1] if values.shape[-1] <= MAX_SAMPLE else 1
    rows = values.view(-1, width)
    return rows[:: -(-len(rows) // (MAX_SAMPLE // width))]


def _foreach_by_kind(call: Any, first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    for where in gradient_statistics.indices_by_kind(first):
        call([first[i] for i in where], [second[i] for i in where])
