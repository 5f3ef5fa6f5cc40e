"""Statistics of the gradients of many parameters at once.

One batched reduction and one small transfer for each device and dtype; NaN and Inf are counted only
for those whose norm is not finite, because a finite norm rules them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import overload

import torch
from torch import Tensor, nn

from flexinspect.records.training_step import (
    EXPLODING_NORM,
    VANISHING_NORM,
    ParameterGradient,
    combined_norm,
)
from flexinspect_hooks.training.parameters import NamedParameter, NamedParameters, trainable

NormsOf = Callable[[Sequence[Tensor]], list[float]]

CHUNK_SIZE = 1 << 20
"""Values that are converted to float64 at a time."""


class Gradients(Sequence[ParameterGradient]):
    """Statistics of all gradients of a step; the records are made on first use.

    `parameters` are those that have a gradient; `norms` and `maxima` (None: not measured) are in
    their order, `counts` are the numbers of (NaN, Inf) of non-finite gradients by index.
    """

    def __init__(
        self,
        parameters: NamedParameters,
        norms: list[float],
        maxima: list[float] | None,
        counts: Mapping[int, tuple[int, int]],
    ) -> None:
        self.parameters, self.norms = parameters, norms
        self._maxima, self._counts = maxima, counts

    @overload
    def __getitem__(self, at: int) -> ParameterGradient: ...
    @overload
    def __getitem__(self, at: slice) -> list[ParameterGradient]: ...
    def __getitem__(self, at: int | slice) -> ParameterGradient | list[ParameterGradient]:
        return self._facts[at]

    def __len__(self) -> int:
        return len(self.parameters)

    @cached_property
    def total(self) -> float:
        """The norm of all gradients together; NaN or Inf if one is non-finite."""
        return combined_norm(self.norms)

    @property
    def has_nonfinite(self) -> bool:
        """Whether any gradient has a non-finite value."""
        return bool(self._counts)

    def outliers(
        self, explosion: float = EXPLODING_NORM, vanishing: float = VANISHING_NORM
    ) -> list[ParameterGradient]:
        """The gradients that are non-finite, 0, or beyond a threshold."""
        norms = enumerate(self.norms)
        outside = {at for at, norm in norms if not (norm and vanishing <= norm <= explosion)}
        return [self._make_facts(at) for at in sorted(outside.union(self._counts))]

    def unscaled(self, scale: float) -> Gradients:
        """The gradients divided by a loss scale."""
        maxima = None if self._maxima is None else [one / scale for one in self._maxima]
        return Gradients(self.parameters, [one / scale for one in self.norms], maxima, self._counts)

    @cached_property
    def _facts(self) -> list[ParameterGradient]:
        return [self._make_facts(at) for at in range(len(self.parameters))]

    def _make_facts(self, at: int) -> ParameterGradient:
        name, _, group, is_matrix = self.parameters[at]
        largest = None if self._maxima is None else self._maxima[at]
        counts = self._counts.get(at, (0, 0))
        return ParameterGradient(name, self.norms[at], largest, *counts, group, is_matrix)


def gradient_facts(
    named: NamedParameters, *, with_max: bool = True, norms_of: NormsOf | None = None
) -> Gradients:
    """The statistics of every parameter that has a gradient, in order.

    `with_max` costs a second pass over the gradients. `norms_of` replaces `tensor_norms`.
    """
    parameters, grads = list[NamedParameter](), list[Tensor]()
    for one in named:
        if (grad := gradient_of(one.parameter)) is not None:
            parameters.append(one)
            grads.append(grad)
    norms = (norms_of or tensor_norms)(grads)
    nonfinite = [at for at, norm in enumerate(norms) if not math.isfinite(norm)]
    each = _count_nonfinite_each([grads[at] for at in nonfinite])
    counts = dict(zip(nonfinite, each, strict=True))
    for at in [at for at, count in counts.items() if count == (0, 0)]:
        norms[at] = _float64_norm(grads[at])
        del counts[at]
    return Gradients(parameters, norms, _maxima(grads) if with_max else None, counts)


def model_gradients(model: nn.Module, *, with_max: bool = True) -> Gradients:
    """The statistics of every parameter of a model that has a gradient."""
    return gradient_facts(trainable(model), with_max=with_max)


def exploding(
    gradients: Iterable[ParameterGradient], threshold: float = EXPLODING_NORM
) -> list[str]:
    """Return the names of the parameters whose gradient norm is above the threshold."""
    return [facts.name for facts in gradients if facts.explodes(threshold)]


def vanishing(
    gradients: Iterable[ParameterGradient], threshold: float = VANISHING_NORM
) -> list[str]:
    """Return the names of the parameters whose gradient norm is below the threshold, 0 too."""
    return [facts.name for facts in gradients if facts.norm < threshold]


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """The values of a parameter's gradient as real numbers, None without a gradient."""
    return None if parameter.grad is None else real_values(parameter.grad)


def real_values(grad: Tensor) -> Tensor:
    """The values of a gradient as real numbers; of a sparse one, the stored values."""
    if grad.requires_grad:
        grad = grad.detach()
    if grad.is_sparse:
        grad = grad.coalesce().values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def tensor_norms(tensors: Sequence[Tensor]) -> list[float]:
    """The Euclidean norms of tensors, computed in at least float32."""
    return _reduce_batched(tensors, _stack_norms)


def foreach_norms(tensors: Sequence[Tensor]) -> list[float]:
    """The norms of tensors as torch's own clipping computes them.

    On a CPU they are inexact for many values: 0.2 % for 30 million in float32.
    """
    return _reduce_batched(tensors, _stack_foreach_norms)


@torch.no_grad()
def _reduce_batched(
    tensors: Sequence[Tensor], reduce: Callable[[list[Tensor]], Tensor]
) -> list[float]:
    """Reduce each tensor to a number, those of a device and dtype together, with one transfer."""
    if not tensors:
        return []
    dtype, device = tensors[0].dtype, tensors[0].device
    if all(one.dtype is dtype and one.device == device for one in tensors):
        return list(reduce([*tensors]).tolist())
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, one in enumerate(tensors):
        kinds.setdefault((one.device, one.dtype), []).append(index)
    numbers = [0.0] * len(tensors)
    for indices in kinds.values():
        values = reduce([tensors[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            numbers[index] = value
    return numbers


def _stack_norms(tensors: list[Tensor]) -> Tensor:
    if all(map(_is_dense_on_cpu, tensors)):
        # Takes a fifth less time than `_foreach_norm`, and is nearer to the norm in float64: BLAS
        # reads at the speed of the memory, and sums in several lanes.
        flat = [one.view(-1) for one in tensors]
        return torch.stack([torch.dot(one, one) for one in flat]).sqrt()
    return _stack_foreach_norms(tensors)


def _stack_foreach_norms(tensors: list[Tensor]) -> Tensor:
    is_small = tensors[0].dtype.itemsize < 4  # the norm of float16 values need not fit in float16
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32 if is_small else None)
    return torch.stack(list(norms))


def _is_dense_on_cpu(one: Tensor) -> bool:
    return (
        type(one) is Tensor
        and one.device.type == "cpu"
        and one.dtype in (torch.float32, torch.float64)
        and one.is_contiguous()
    )


def _maxima(tensors: Sequence[Tensor]) -> list[float]:
    return _reduce_batched(tensors, _stack_max_abs)


def _stack_max_abs(tensors: list[Tensor]) -> Tensor:
    if tensors[0].device.type == "cuda":
        return torch.stack(list(torch._foreach_norm(tensors, math.inf)))
    # On CPU the norm of order infinity was measured to take a hundred times as long as this.
    zero = tensors[0].new_zeros(1)
    ends = [torch.aminmax(one if one.numel() else zero) for one in tensors]
    lows, highs = (torch.stack(side) for side in zip(*ends, strict=True))
    return torch.maximum(highs, -lows)


def _count_nonfinite_each(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """The numbers of NaN and of Inf in each tensor, with one transfer for each device."""
    n_nan = _reduce_batched(tensors, lambda all_: torch.stack([one.isnan().sum() for one in all_]))
    n_inf = _reduce_batched(tensors, lambda all_: torch.stack([one.isinf().sum() for one in all_]))
    return [(int(nan), int(inf)) for nan, inf in zip(n_nan, n_inf, strict=True)]


@torch.no_grad()
def _float64_norm(grad: Tensor) -> float:
    """The norm of values whose squares overflow float32, as they do from 1e19 on."""
    parts = torch.split(grad.reshape(-1), CHUNK_SIZE)
    return math.hypot(*(float(part.double().norm()) for part in parts))
