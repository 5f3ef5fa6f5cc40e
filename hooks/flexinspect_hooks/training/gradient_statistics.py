"""The parameters of a model, and statistics of their gradients and of other tensors.

One batched reduction and one small transfer for each device and dtype; NaN and Inf of gradients are
counted only for those whose norm is not finite, because a finite norm rules them out.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, compress, islice
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from flexinspect.records import training_step
from flexinspect.records.training_step import ParameterGradient, TrainingStepRecord, group_of
from flexinspect_hooks.gradients.reduction import NORM_CHUNK_SIZE, gradient_norm
from flexinspect_hooks.python_internals.torch_private import module_tables

CHECK_INTERVAL = 8  # steps after which the parts of a model are looked at without a reason


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


class _Walk(Struct):
    """What a walk through a model found: its parameters, and where each part is registered."""

    parameters: Sequence[NamedParameter]
    lookups: Sequence[Callable[[str], Any]]  # of the table of each part
    names: list[str]
    parts: list[Any]
    tables: Sequence[Mapping[str, Any]]
    values: list[nn.Parameter]
    flags: list[bool]  # whether each parameter requires gradients, as of the last look
    trainable: list[NamedParameter]

    @classmethod
    def through(cls, model: nn.Module) -> _Walk:
        """Walk through a model."""
        every = _parameters_of(model)
        tables = [table for module in model.modules() for table in module_tables(module)]
        lookups = [one.get for one in tables for _ in one]
        names = [name for one in tables for name in one]
        parts = [part for one in tables for part in one.values()]
        values = [one.parameter for one in every]
        return cls(every, lookups, names, parts, tables, values, flags=[], trainable=[])

    def has_as_many(self) -> bool:
        """Whether the model has as many parts as were found."""
        return sum(map(len, self.tables)) == len(self.parts)

    def is_current(self) -> bool:
        """Whether every part is still where it was found."""
        found = map(operator.call, self.lookups, self.names)
        return all(map(operator.is_, found, self.parts))

    def forget(self) -> None:
        """Drop every reference to the model, without changing lists that others have."""
        for name in self.__struct_fields__:
            setattr(self, name, [])


class ParameterList:
    """A cache of the parameters of one model.

    Walking through a model takes far longer than checking that all of its parts are the same, and
    that takes longer than asking torch whether any module got a new part. So each part is checked
    only if one did, and in every eighth step, because torch does not tell of those that are put
    into the tables of a module directly. The model itself is not kept alive.
    """

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self._walk: _Walk | None = None
        self._n_unchecked = 0
        news = self._news = [True]

        def note(*_: object) -> None:
            news[0] = True

        self._removals = [weakref.finalize(self, add(note).remove) for add in _ON_REGISTRATION]

    def close(self) -> None:
        """Stop listening to torch; else the end of this object does."""
        for remove in self._removals:
            remove()

    def trainable_of(self, model: nn.Module) -> list[NamedParameter]:
        """The parameters that require gradients now; the same list as before if they are the same.

        The caller may not change it.
        """
        walk = self._walk
        is_known = walk is not None and self._model is not None and self._model() is model
        if walk is None or not (is_known and self._is_current(walk)):
            walk = self._begin_walk(model)
        if (flags := [*map(_REQUIRES_GRAD, walk.values)]) != walk.flags:
            walk.flags = flags
            walk.trainable = [*compress(walk.parameters, flags)]
        return walk.trainable

    def _is_current(self, walk: _Walk) -> bool:
        self._n_unchecked += 1
        if not walk.has_as_many():
            return False
        if not self._news[0] and self._n_unchecked < CHECK_INTERVAL:
            return True
        self._news[0], self._n_unchecked = False, 0
        return walk.is_current()

    def _begin_walk(self, model: nn.Module) -> _Walk:
        walk = self._walk = _Walk.through(model)

        def forget(_: object) -> None:
            walk.forget()

        self._model = weakref.ref(model, forget)
        return walk


_ON_REGISTRATION = (
    nn_module.register_module_parameter_registration_hook,
    nn_module.register_module_module_registration_hook,
)
_REQUIRES_GRAD, _LAYOUT = operator.attrgetter("requires_grad"), operator.attrgetter("layout")
_DTYPE, _IS_CPU = operator.attrgetter("dtype"), operator.attrgetter("is_cpu")

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
    if is_plain(tensors) and all(map(Tensor.is_contiguous, tensors)):
        return _contiguous_norms(tensors)
    return reduce_batched(tensors, _stack_norms)


def gradient_facts(
    named: NamedParameters, *, with_max: bool = True, norms_of: NormsOf = tensor_norms
) -> Gradients:
    """The statistics of every parameter that has a gradient; `with_max` costs a second pass."""
    given = [one.parameter.grad for one in named]
    has_grad = [one is not None for one in given]
    if not all(has_grad):
        named = [*compress(named, has_grad)]
    grads = [one for one in given if one is not None]
    if not is_plain(grads):
        grads = [*map(real_values, grads)]
    norms = norms_of(grads)
    counts = {} if all(map(math.isfinite, norms)) else _count_nonfinite_of(grads, norms)
    maxima = reduce_batched(grads, _stack_max_abs) if with_max else None
    return Gradients(named, norms, maxima, counts)


def _count_nonfinite_of(grads: Sequence[Tensor], norms: list[float]) -> dict[int, tuple[int, int]]:
    """NaN and Inf of each gradient that has some, by index; corrects norms that overflowed."""
    nonfinite = [at for at, norm in enumerate(norms) if not math.isfinite(norm)]
    each = count_nonfinite([grads[at] for at in nonfinite])
    counts = dict(zip(nonfinite, each, strict=True))
    for at in [at for at, count in counts.items() if count == (0, 0)]:
        norms[at] = float(gradient_norm(grads[at]))  # the squares overflow float32
        del counts[at]
    return counts


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are of float32 or of float64, dense, without a graph, and on the CPU."""
    # Sets of C functions: a look at each tensor in Python takes longer than reading small ones.
    return (
        {*map(type, tensors)} == {Tensor}
        and len(kinds := {*map(_DTYPE, tensors)}) == 1
        and kinds <= _EXACT_DTYPES
        and all(map(_IS_CPU, tensors))
        and {*map(_LAYOUT, tensors)} == {torch.strided}
        and not any(map(_REQUIRES_GRAD, tensors))
    )


_EXACT_DTYPES = {torch.float32, torch.float64}  # whose norms are computed in their own precision


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
    is_dense = all(type(one) is Tensor and one.is_contiguous() for one in tensors)
    if is_dense and tensors[0].is_cpu and tensors[0].dtype in _EXACT_DTYPES:
        return torch.tensor(_contiguous_norms(tensors), dtype=torch.float64, device="cpu")
    return stack_foreach_norms(tensors)


def _contiguous_norms(tensors: Sequence[Tensor]) -> list[float]:
    # A dot product of BLAS is as fast, but may wait for its other threads: beside two busy
    # processes on two cores, it took 100 ms instead of 1 for 22 MB.
    flat = [one.view(-1) for one in tensors]
    if max(map(Tensor.numel, flat)) <= _PIECE:
        norms: list[float] = torch.stack(torch._foreach_norm(flat)).tolist()
        return norms
    pieces = [torch.split(one, _PIECE) if one.numel() > _PIECE else (one,) for one in flat]
    each = iter(torch.stack(torch._foreach_norm([*chain.from_iterable(pieces)])).tolist())
    return [math.hypot(*islice(each, len(one))) for one in pieces]


_PIECE = 1 << 19
"""Values whose norm torch sums in float32 with an error of 4e-6; of 4 million it is 1e-4."""


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
