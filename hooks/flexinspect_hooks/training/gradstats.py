"""Statistics of the gradients of many parameters at once.

One batched reduction and one small transfer for each device and dtype; NaN and Inf are counted only
for those whose norm is not finite, because a finite norm rules them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flexinspect.trainingfacts import EXPLOSION, VANISHING, GradientFacts, group_of

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class _Counts:
    """What the values of one tensor with a norm that is not finite hold."""

    norm: float
    n_nan: int
    n_inf: int


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that gradients are wanted for, by name, in the model's order."""
    named = model.named_parameters()
    # `torch.compile` puts a name of its own in front of all others.
    return [(name.removeprefix("_orig_mod."), one) for name, one in named if one.requires_grad]


def gradient_facts(named: Named, *, with_max: bool = True) -> list[GradientFacts]:
    """Return the facts of every parameter that has a gradient, in the order given.

    `with_max` costs a second pass over the gradients.
    """
    have = [(name, grad) for name, one in named if (grad := gradient_of(one)) is not None]
    norms = tensor_norms([grad for _, grad in have])
    largest = _maxima([grad for _, grad in have]) if with_max else [None] * len(have)
    return [
        _facts(name, grad, norm, high)
        for (name, grad), norm, high in zip(have, norms, largest, strict=True)
    ]


def model_gradients(model: nn.Module, *, with_max: bool = True) -> list[GradientFacts]:
    """Return the facts of every parameter of a model that has a gradient."""
    return gradient_facts(trainable(model), with_max=with_max)


def exploding(gradients: Iterable[GradientFacts], threshold: float = EXPLOSION) -> list[str]:
    """Return the names of the parameters whose gradient norm is above the threshold."""
    return [facts.name for facts in gradients if facts.explodes(threshold)]


def vanishing(gradients: Iterable[GradientFacts], threshold: float = VANISHING) -> list[str]:
    """Return the names of the parameters whose gradient norm is below the threshold, 0 too."""
    return [facts.name for facts in gradients if facts.norm < threshold]


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Return the values of a parameter's gradient: of a sparse one those that it holds."""
    grad = parameter.grad
    if grad is None:
        return None
    grad = grad.detach()
    if grad.is_sparse:
        grad = grad.coalesce().values()
    return grad


def tensor_norms(tensors: Sequence[Tensor]) -> list[float]:
    """Return the Euclidean norms of some tensors, in float32 at least."""
    return _batched(tensors, _norms)


@torch.no_grad()
def _batched(
    tensors: Sequence[Tensor], reduce: Callable[[list[Tensor]], list[Tensor]]
) -> list[float]:
    """Reduce each tensor to a number, those of a device and dtype together, with one transfer."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, one in enumerate(tensors):
        kinds.setdefault((one.device, one.dtype), []).append(index)
    found = [0.0] * len(tensors)
    for where in kinds.values():
        values = torch.stack(reduce([tensors[index] for index in where])).tolist()
        for index, value in zip(where, values, strict=True):
            found[index] = value
    return found


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    is_small = tensors[0].dtype.itemsize < 4  # the norm of float16 values need not fit in float16
    return list(torch._foreach_norm(tensors, 2, dtype=torch.float32 if is_small else None))


def _maxima(tensors: Sequence[Tensor]) -> list[float]:
    return _batched(tensors, _largest)


def _largest(tensors: list[Tensor]) -> list[Tensor]:
    if tensors[0].device.type == "cuda":
        return list(torch._foreach_norm(tensors, math.inf))
    # On CPU the norm of order infinity was measured at a hundred times the price of this.
    return [_absolute_max(one) for one in tensors]


def _absolute_max(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return tensor.new_zeros(())
    low, high = torch.aminmax(tensor)
    return torch.maximum(high, -low)


def _facts(name: str, grad: Tensor, norm: float, largest: float | None) -> GradientFacts:
    group, is_matrix = group_of(name), grad.dim() > 1
    if math.isfinite(norm):
        return GradientFacts(name, norm, largest, group=group, is_matrix=is_matrix)
    counts = _count(grad)
    sizes = (counts.norm, largest, counts.n_nan, counts.n_inf)
    return GradientFacts(name, *sizes, group, is_matrix)


@torch.no_grad()
def _count(grad: Tensor) -> _Counts:
    n_nan, n_inf = (int(count) for count in (grad.isnan().sum(), grad.isinf().sum()))
    # Squares of finite values overflow float32 from 1e19 on.
    return _Counts(float(grad.double().norm()), n_nan, n_inf)
