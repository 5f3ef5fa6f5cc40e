"""The parameters of a model, and statistics of their gradients and of other tensors.

One batched reduction and one small transfer for each device and dtype; NaN and Inf of gradients are
counted only for those whose norm is not finite, because a finite norm rules them out.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn

from flexinspect.records import training_step
from flexinspect.records.training_step import ParameterGradient, TrainingStepRecord, group_of
from flexinspect_hooks.gradients.reduction import NORM_CHUNK_SIZE, gradient_norm
from flexinspect_hooks.python_internals.torch_private import module_tables


def learning_rates(optimizer: Any) -> tuple[float, ...]:
    """The learning rate of each parameter group, NaN if unknown (as Adafactor's relative steps)."""
    rates = []
    for group in optimizer.param_groups:
        try:
            rates.append(float(group.get("lr")))
        except (TypeError, ValueError):
            rates.append(math.nan)  # the same object, so that unknown rates compare as unchanged
    return tuple(rates)


class NamedParameter(NamedTuple):
    """A parameter, its group, and whether it is a matrix: only these are checked for vanishing."""

    name: str
    parameter: nn.Parameter
    group: str
    is_matrix: bool


NamedParameters = Sequence[NamedParameter]
NormsOf = Callable[[Sequence[Tensor]], list[float]]


def _parameters_of(model: nn.Module) -> list[NamedParameter]:
    # `torch.compile` adds this to the names of what it wraps.
    named = ((name.replace("_orig_mod.", ""), one) for name, one in model.named_parameters())
    return [NamedParameter(name, one, group_of(name), one.dim() > 1) for name, one in named]


def trainable(model: nn.Module) -> list[NamedParameter]:
    """The parameters that require gradients, in the model's order."""
    return [one for one in _parameters_of(model) if one.parameter.requires_grad]


class ParameterList:
    """A cache of the parameters of one model.

    Walking through a model takes ten times as long as checking that all of its parts are the same.
    The model itself is not kept alive.
    """

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self._all: list[NamedParameter] = []
        self._tables: Sequence[Mapping[str, Any]] = []
        self._parts: Sequence[tuple[Mapping[str, Any], str, Any]] = []

    def trainable_of(self, model: nn.Module) -> list[NamedParameter]:
        """The parameters that require gradients now."""
        is_known = self._model is not None and self._model() is model
        is_known = is_known and sum(map(len, self._tables)) == len(self._parts)
        if not is_known or any(table.get(name) is not part for table, name, part in self._parts):
            self._walk(model)
        return [one for one in self._all if one.parameter.requires_grad]

    def _walk(self, model: nn.Module) -> None:
        every = _parameters_of(model)
        tables = [table for module in model.modules() for table in module_tables(module)]
        parts = [(one, name, part) for one in tables for name, part in one.items()]

        def forget(_: object) -> None:
            for cached in (every, tables, parts):
                cached.clear()

        self._all, self._tables, self._parts = every, tables, parts
        self._model = weakref.ref(model, forget)


GradientLimits = tuple[float, float]  # above which a gradient explodes, below which it vanishes


class Gradients(Struct, dict=True):
    """Statistics of all gradients of a step; the records (`rows`) are made on first use.

    `parameters` are those that have a gradient; `norms` and `maxima` (None: not measured) are in
    their order, `counts` are the numbers of (NaN, Inf) of non-finite gradients by index.
    """

    parameters: NamedParameters
    norms: list[float]
    maxima: list[float] | None
    counts: Mapping[int, tuple[int, int]]

    @cached_property
    def rows(self) -> list[ParameterGradient]:
        """The statistics of each gradient."""
        return [self._make_row(at) for at in range(len(self.parameters))]

    @cached_property
    def total(self) -> float:
        """The norm of all gradients together; NaN or Inf if one is non-finite."""
        return training_step.combined_norm(self.norms)

    def outliers(self, limits: GradientLimits) -> list[ParameterGradient]:
        """The gradients that are non-finite, 0, or beyond a limit."""
        explosion, vanishing = limits
        norms = enumerate(self.norms)
        outside = {at for at, norm in norms if not (norm and vanishing <= norm <= explosion)}
        return [self._make_row(at) for at in sorted(outside.union(self.counts))]

    def step_record(
        self, outliers: Sequence[ParameterGradient], limits: GradientLimits
    ) -> TrainingStepRecord:
        """What is known of a step from its gradients alone; its loss is unknown.

        Only matrices vanish: the gradient of a key bias is 0 up to rounding in any transformer.
        """
        explosion, vanishing = limits
        return TrainingStepRecord(
            loss=math.nan,
            loss_source="",
            learning_rates=(),
            total_norm=self.total,
            n_parameters=len(self.norms),
            n_exploding=sum(one.explodes(explosion) for one in outliers),
            n_vanishing=sum(one.is_matrix and one.vanishes(vanishing) for one in outliers),
            n_dead=sum(one.is_dead for one in outliers),
            n_nonfinite=sum(one.has_nonfinite for one in outliers),
        )

    def unscaled(self, scale: float) -> Gradients:
        """The gradients divided by a loss scale."""
        maxima = None if self.maxima is None else [one / scale for one in self.maxima]
        return replace(self, norms=[one / scale for one in self.norms], maxima=maxima)

    def _make_row(self, at: int) -> ParameterGradient:
        name, _, group, is_matrix = self.parameters[at]
        largest = None if self.maxima is None else self.maxima[at]
        counts = self.counts.get(at, (0, 0))
        return ParameterGradient(name, self.norms[at], largest, *counts, group, is_matrix)


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
    return reduce_batched(tensors, _stack_norms)


def gradient_facts(
    named: NamedParameters, *, with_max: bool = True, norms_of: NormsOf = tensor_norms
) -> Gradients:
    """The statistics of every parameter that has a gradient; `with_max` costs a second pass."""
    pairs = [(one, grad) for one in named if (grad := gradient_of(one.parameter)) is not None]
    grads = [grad for _, grad in pairs]
    norms = norms_of(grads)
    nonfinite = [at for at, norm in enumerate(norms) if not math.isfinite(norm)]
    each = count_nonfinite([grads[at] for at in nonfinite])
    counts = dict(zip(nonfinite, each, strict=True))
    for at in [at for at, count in counts.items() if count == (0, 0)]:
        norms[at] = float(gradient_norm(grads[at]))  # the squares overflow float32
        del counts[at]
    maxima = reduce_batched(grads, _stack_max_abs) if with_max else None
    return Gradients([one for one, _ in pairs], norms, maxima, counts)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that FSDP or tensor parallelism split, else the tensor.

    Nothing may be sent to other ranks here: they may not be at the same place.
    """
    if type(tensor) is Tensor:
        return tensor  # to ask it for an attribute that it lacks takes longer
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


@torch.no_grad()
def reduce_batched(tensors: Sequence[Tensor], call: Callable[[list[Tensor]], Tensor]) -> list[Any]:
    """Reduce each tensor to a number, or a row of numbers, with one transfer for each kind."""
    tensors = [*map(local_part, tensors)]
    numbers: list[Any] = [None] * len(tensors)
    for indices in indices_by_kind(tensors):
        values = call([tensors[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            numbers[index] = value
    return numbers


def indices_by_kind(tensors: Sequence[Tensor]) -> list[Sequence[int]]:
    """The indices of the tensors that torch can process at once: of one device and dtype."""
    if not tensors:
        return []
    dtype, device = tensors[0].dtype, tensors[0].device
    if all(one.dtype is dtype and one.device == device for one in tensors):
        return [range(len(tensors))]
    kinds = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
    for index, one in enumerate(tensors):
        kinds[one.device, one.dtype].append(index)
    return [*kinds.values()]


def _stack_norms(tensors: list[Tensor]) -> Tensor:
    device, dtype = tensors[0].device, tensors[0].dtype
    is_dense = all(type(one) is Tensor and one.is_contiguous() for one in tensors)
    if is_dense and device.type == "cpu" and dtype in (torch.float32, torch.float64):
        # Takes a fifth less time than `_foreach_norm`, and is nearer to the norm in float64: BLAS
        # reads at the speed of the memory, and sums in several lanes.
        flat = [one.view(-1) for one in tensors]
        return torch.stack([torch.dot(one, one) for one in flat]).sqrt()
    return stack_foreach_norms(tensors)


def stack_foreach_norms(tensors: list[Tensor]) -> Tensor:
    """As torch's clipping: on a CPU inexact for many values (0.2 % for 30 million in float32)."""
    is_small = tensors[0].dtype.itemsize < 4  # the norm of float16 values need not fit in float16
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32 if is_small else None)
    return torch.stack(list(norms))


def _stack_max_abs(tensors: list[Tensor]) -> Tensor:
    if tensors[0].device.type == "cuda":
        return torch.stack(list(torch._foreach_norm(tensors, math.inf)))
    # On CPU the norm of order infinity was measured to take a hundred times as long as this.
    zero = tensors[0].new_zeros(1)
    ends = [torch.aminmax(one if one.numel() else zero) for one in tensors]
    lows, highs = (torch.stack(side) for side in zip(*ends, strict=True))
    return torch.maximum(highs, -lows)


def count_nonfinite(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """The numbers of NaN and of Inf in each tensor, with one transfer for each kind."""
    return [(int(nan), int(inf)) for nan, inf in reduce_batched(tensors, stack_nonfinite_counts)]


def stack_nonfinite_counts(tensors: Sequence[Tensor]) -> Tensor:
    """The numbers of NaN and of Inf in each tensor, (tensors, 2), on their device."""
    counts = [torch.stack([one.isnan().sum(), one.isinf().sum()]) for one in tensors]
    return torch.stack(counts)


class TensorFacts(NamedTuple):
    """Numbers of NaN and Inf, and the spread of the finite values (NaN without any)."""

    n_nan: int
    n_inf: int
    min: float
    max: float
    mean: float
    std: float


@torch.no_grad()
def tensor_facts(tensors: Iterable[Tensor]) -> list[TensorFacts]:
    """The statistics of each tensor; if all are finite, with one wait per device and dtype."""
    values = [real_values(tensor) for tensor in tensors]
    return [_facts(*one) for one in zip(values, _read_spreads(values), strict=True)]


def _facts(values: Tensor, spread: Sequence[float]) -> TensorFacts:
    counts = 0, 0
    # A NaN or Inf would be the minimum, the maximum or both.
    is_finite = all(map(math.isfinite, spread[:2])) or not values.is_floating_point()
    if values.numel() and not is_finite:
        (counts,) = count_nonfinite([values])
        values = values[values.isfinite()]
        (spread,) = _read_spreads([values])
    low, high, mean, deviation = spread
    if low < high and not 0.0 < deviation < math.inf:  # the squares left the range of float32
        mean, deviation = torch.stack(_moments(_widen(values), is_exact=True)).tolist()
    return TensorFacts(*counts, low, high, mean, deviation)


def _read_spreads(values: Iterable[Tensor]) -> list[list[float]]:
    """Minimum, maximum, mean and deviation of each tensor, with one transfer for each kind."""
    spreads = [
        torch.stack([*torch.aminmax(one), *_moments(one)])
        if one.numel()
        else one.new_full((4,), math.nan)
        for one in map(_widen, values)
    ]
    return reduce_batched(spreads, torch.stack)


def _widen(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values.double()
    return values.float() if values.dtype.itemsize < 4 else values


def _moments(values: Tensor, *, is_exact: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation; unless exact, the deviation may leave the range of the dtype."""
    if is_exact or values.device.type != "cpu":
        deviation, mean = torch.std_mean(values, correction=0)
        return mean, deviation
    # On CPU torch's own deviation was measured to take twenty times as long as these passes.
    mean = values.mean()
    parts = torch.split(values.reshape(-1), NORM_CHUNK_SIZE)
    norms = torch.stack([torch.linalg.vector_norm(part - mean) for part in parts])
    return mean, torch.linalg.vector_norm(norms) / math.sqrt(values.numel())
