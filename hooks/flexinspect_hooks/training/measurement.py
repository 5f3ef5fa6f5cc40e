"""Measures the gradients of each optimizer step, and how much the step changed the weights."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn

from flexinspect.records import training_step
from flexinspect_hooks.training import gradient_statistics
from flexinspect_hooks.training.cost_governor import Detail
from flexinspect_hooks.training.gradient_statistics import gradient_facts, local_part, tensor_norms
from flexinspect_hooks.training.torch_calls import ClippingNorms, NormSource

HISTORY = 50  # gradient norms of earlier steps that a norm is compared with
MIN_HISTORY = 10  # with fewer of them, their scatter is unknown
EXPLOSION_RATIO = 100.0  # of a total norm to the median of those before
MIN_LOG_DEVIATIONS = 6.0  # by which it must stand out among their logarithms too
INITIAL_RATIO = 1e4  # of the first norm of a matrix, which has none before it, to its weights
MIN_SHARE = 1e-4  # of the total norm that a gradient always had before it counts as lost
MAX_SAMPLE = 1 << 16  # the most values of a parameter that are copied: rows, evenly spaced
MAX_FULL_STEPS = 10  # steps with an anomaly that are recorded with all parameters


def _rounded(ratio: float) -> str:
    """A large ratio with three digits."""
    return f"{float(f'{ratio:.3g}'):,.0f}"


class NormHistory:
    """Judges the total gradient norm of a step by those of the steps before.

    A loss that is a sum over many values has large gradients, and norms of small batches vary by
    powers of ten, so no fixed limit tells an explosion.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=HISTORY)

    def explosion(self, norm: float, first_ratio: Callable[[], float]) -> str:
        """Why a norm is an explosion, "" if it is none.

        `first_ratio` returns the largest norm of a matrix' gradient relative to the matrix, with
        which the first step is judged.
        """
        if not math.isfinite(norm):
            return ""
        if self._norms and norm <= training_step.EXPLODING_NORM:
            self._norms.append(norm)
            return ""
        if not self._norms:
            self._norms.append(norm)
            ratio = first_ratio() if norm > INITIAL_RATIO else 0.0
            reason = f"the gradient of a matrix is {_rounded(ratio)} times as large as the matrix"
            return reason if ratio > INITIAL_RATIO else ""
        middle = median(self._norms)
        is_large = norm > max(EXPLOSION_RATIO * middle, training_step.EXPLODING_NORM)
        if is_large and middle > 0 and self._is_outlier(norm):
            n = len(self._norms)
            before = f"the median of the {n} before" if n > 1 else "that of the step before"
            return f"the norm of the gradients is {_rounded(norm / middle)} times {before}"
        self._norms.append(norm)
        return ""

    def _is_outlier(self, norm: float) -> bool:
        if len(self._norms) < MIN_HISTORY:
            return True
        logs = [math.log(one) for one in self._norms if one > 0]
        middle = median(logs)
        deviation = 1.4826 * median(abs(one - middle) for one in logs)
        return math.log(norm) > middle + MIN_LOG_DEVIATIONS * deviation


class LostGradients:
    """Finds gradients that are exactly 0 in one step, in the middle of others that are not.

    A gradient that became 0 in the backward pass leaves none to the layers below it, and an expert
    that no token reaches has none in any of its parameters. Memory that was lost has neither sign.
    """

    def __init__(self) -> None:
        self._parameters: gradient_statistics.NamedParameters = ()
        self._names: list[str] = []
        self._least: list[float] = []  # the least norm of each gradient so far
        self._largest_total = 0.0

    def find(self, gradients: gradient_statistics.Gradients) -> list[str]:
        """The names of such gradients in a step."""
        total, norms, parameters = gradients.total, gradients.norms, gradients.parameters
        if not 0.0 < total < math.inf:
            return []
        if parameters is not self._parameters:
            self._parameters, known = parameters, self._names
            self._names = [one.name for one in parameters]
            if self._names != known:
                self._least, self._largest_total = norms, total
                return []
        names = self._names
        before, enough = self._least, MIN_SHARE * self._largest_total
        self._least = list(map(min, before, norms))
        self._largest_total = max(self._largest_total, total)
        if 0.0 not in norms:
            return []
        alive = {_parent(name) for name, norm in zip(names, norms, strict=True) if norm != 0.0}
        each = zip(names, norms, before, strict=True)
        lost = [name for name, norm, least in each if norm == 0.0 and least > enough]
        return [name for name in lost if self._has_siblings(name, alive)]

    @staticmethod
    def _has_siblings(name: str, alive: set[str]) -> bool:
        """Whether the module of a parameter, or if it has no other one its parent, has others."""
        module = _parent(name)
        return module in alive or any(_parent(one) == _parent(module) for one in alive)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


class UpdateNorms(Struct, frozen=True):
    """The norms of a step's changes, of the weights before it, and of the gradients, by name.

    Changes and weights are estimated from samples.
    """

    changes: Mapping[str, float]
    weights: Mapping[str, float]
    gradients: Mapping[str, float]


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
        self._history, self._lost = NormHistory(), LostGradients()
        self.lost: list[str] = []
        """The gradients of the last measured step that were lost."""
        self.changes: UpdateNorms | None = None
        """The norms of the last step whose change was measured; None after another step."""
        self._norms: Mapping[str, float] = {}
        self._n_problem_steps = 0
        self._listed = self._parameters.trainable_of(model)
        self._set_parameters(self._listed)

    def refresh(self) -> str | None:
        """Update the parameters, and return a sentence on a change. New groups come last."""
        named = self._parameters.trainable_of(self.model)
        if named is self._listed:
            return None
        self._listed = named
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
        self._group_of_each = [self._group_at[one.group] for one in named]
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
        if not self._hooked or not self._backward_order:
            return []
        self._order_hooks.close()
        hooked, self._hooked = self._hooked, []
        return [name for name in hooked if name not in self._backward_order]

    def release(self) -> None:
        """Remove the hooks, and drop the copies of weights."""
        self._order_hooks.close()
        self._parameters.close()
        self._drop_copies()

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy samples of the weights before a step."""
        # Not kept between steps: a parameter may get other memory, and the old one must be freed.
        self._samples = [_sample_rows(one.parameter) for one in self.named]
        if [*map(_kind_of, self._copies)] != [*map(_kind_of, self._samples)]:
            self._copies = _empty_copies(self._samples)
        _foreach_by_kind(torch._foreach_copy_, self._copies, self._samples)
        self.has_copies = True

    def measure_change(self) -> tuple[float, ...]:
        """The ratio of change to weights of each group (NaN if all are 0); () without copies."""
        self.changes = None
        return self._measure_copies() if self.has_copies else ()

    @torch.no_grad()
    def _measure_copies(self) -> tuple[float, ...]:
        self.has_copies = False
        sizes = [
            (a.parameter.numel(), b.numel()) for a, b in zip(self.named, self._copies, strict=True)
        ]
        scales = [math.sqrt(all_ / max(sampled, 1)) for all_, sampled in sizes]
        weights = list(map(operator.mul, tensor_norms(self._copies), scales))
        _foreach_by_kind(torch._foreach_sub_, self._copies, self._samples)
        self._samples = []
        changes = list(map(operator.mul, tensor_norms(self._copies), scales))
        names = [one.name for one in self.named]
        changed, before = (dict(zip(names, each, strict=True)) for each in (changes, weights))
        self.changes = UpdateNorms(changed, before, self._norms)
        squares = [[0.0, 0.0] for _ in self.groups]
        for one, change, weight in zip(self.named, changes, weights, strict=True):
            group = squares[self._group_at[one.group]]
            group[0] += change * change
            group[1] += weight * weight
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
    ) -> training_step.TrainingStepRecord:
        """The gradients as the optimizer receives them.

        `scale` is the loss scale that they still contain, `norms` are those known from clipping.
        While a learning rate `is_warming`, no gradient counts as vanishing: some start small.
        """
        norms_of = partial(self._norm_source.norms, step, norms)
        gradients = gradient_facts(self.named, with_max=detail.maxima, norms_of=norms_of)
        if scale != 1.0:
            gradients = gradients.unscaled(scale)
        vanishing = 0.0 if is_warming else training_step.VANISHING_NORM
        self.lost = self._lost.find(gradients)
        if detail.compares_weights(step):
            names = (one.name for one in gradients.parameters)
            self._norms = dict(zip(names, gradients.norms, strict=True))
        explosion = self._history.explosion(gradients.total, partial(self._first_ratio, gradients))
        limits = training_step.EXPLODING_NORM if explosion else math.inf, vanishing
        outliers = gradients.outliers(limits)
        producer = self._producer(outliers, vanishing, explosion)
        self._n_problem_steps += producer is not None
        is_first_problem = producer is not None and self._n_problem_steps <= MAX_FULL_STEPS
        is_recorded = is_first_problem or step % detail.rows_every == 0
        squares = [0.0] * len(self.groups)
        for at, norm in zip(self._groups_of(gradients.parameters), gradients.norms, strict=True):
            squares[at] += norm * norm
        return replace(
            gradients.step_record(outliers, limits),
            gradients=tuple(gradients.rows) if is_recorded else (),
            group_norms=tuple(math.sqrt(one) if one >= 0 else one for one in squares),
            anomaly_origin=producer,
        )

    def _groups_of(self, named: gradient_statistics.NamedParameters) -> Sequence[int]:
        """The number of the group of each parameter."""
        if named is self.named:
            return self._group_of_each
        return [self._group_at[one.group] for one in named]

    def _first_ratio(self, gradients: gradient_statistics.Gradients) -> float:
        matrices = [at for at, one in enumerate(gradients.parameters) if one.is_matrix]
        values = [gradients.parameters[at].parameter for at in matrices]
        weights = tensor_norms([gradient_statistics.real_values(one) for one in values])
        pairs = zip(matrices, weights, strict=True)
        return max((gradients.norms[at] / w for at, w in pairs if w > 0), default=0.0)

    def _producer(
        self,
        outliers: Sequence[training_step.ParameterGradient],
        vanishing: float,
        explosion: str,
    ) -> training_step.AnomalyOrigin | None:
        """The parameter in which an anomaly first appears in the backward pass."""
        last = len(self._backward_order)
        ordered = sorted(outliers, key=lambda one: self._backward_order.get(one.name, last))
        if bad := [one for one in ordered if one.has_nonfinite]:
            counts = f"{bad[0].n_nan} NaN, {bad[0].n_inf} Inf"
            return training_step.AnomalyOrigin("backward", bad[0].name, len(bad) - 1, counts)
        if explosion and (bad := [one for one in ordered if one.explodes()]):
            detail = f"{bad[0].norm:.4g}; {explosion}"
            return training_step.AnomalyOrigin("explosion", bad[0].name, len(bad) - 1, detail)
        if not bad:
            kind, bad = "vanishing", [o for o in outliers if o.is_matrix and o.vanishes(vanishing)]
            bad.sort(key=lambda one: one.norm)
        if not bad:
            return None
        return training_step.AnomalyOrigin(kind, bad[0].name, len(bad) - 1, f"{bad[0].norm:.4g}")


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _empty_copies(samples: Sequence[Tensor]) -> list[Tensor]:
    """Return uninitialized tensors of the shapes of `samples`.

    On a CPU they share one block of memory. Tensors that stay between activations which come and go
    divide the heap: the C library then returned memory to the system in each step, and took it
    again, which cost more than the copies (2000 page faults in a step of 50 ms).
    """
    rest = sum(one.nbytes + _ALIGNMENT for one in samples if one.is_cpu)
    size = max(rest, _OWN_BLOCK) if rest else 0
    block = torch.empty(size, dtype=torch.uint8, device="cpu")
    copies, begin = [], 0
    for one in samples:
        if one.is_cpu:
            values = block[begin : begin + one.nbytes].view(one.dtype)
            copies.append(values.view(one.shape))
            begin += -(-one.nbytes // _ALIGNMENT) * _ALIGNMENT
        else:
            copies.append(torch.empty_like(one))
    return copies


_ALIGNMENT = 64  # bytes, of torch's own tensors
_OWN_BLOCK = (1 << 25) + 1
"""Bytes from which glibc maps a block apart from its heap, see M_MMAP_THRESHOLD in mallopt(3).
Only pages that are written take memory."""


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
