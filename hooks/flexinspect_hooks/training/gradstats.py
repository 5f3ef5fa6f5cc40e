"""Statistics of the gradients of many parameters at once.

One batched reduction and one small transfer for each device and dtype; NaN and Inf are counted only
for those whose norm is not finite, because a finite norm rules them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from flexinspect.trainingfacts import EXPLOSION, VANISHING, GradientFacts, group_of

Named = Sequence[tuple[str, nn.Parameter]]


PART = 1 << 20
"""Values that are widened to float64 at a time."""


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that gradients are wanted for, by name, in the model's order."""
    named = model.named_parameters()
    # `torch.compile` puts a name of its own in front of all others.
    return [(name.removeprefix("_orig_mod."), one) for name, one in named if one.requires_grad]


def gradient_facts(named: Named, *, with_max: bool = True) -> list[GradientFacts]:
    """Return the facts of every parameter that has a gradient, in the order given.

    `with_max` costs a second pass over the gradients.
    """
    have = [
        (name, one.dim() > 1, grad) for name, one in named if (grad := gradient_of(one)) is not None
    ]
    all_ = [grad for *_, grad in have]
    norms = tensor_norms(all_)
    largest = _maxima(all_) if with_max else [None] * len(have)
    sick = [at for at, norm in enumerate(norms) if not math.isfinite(norm)]
    counts = dict(zip(sick, _counted([all_[at] for at in sick]), strict=True))
    found = []
    for at, (name, is_matrix, grad) in enumerate(have):
        norm, (n_nan, n_inf) = norms[at], counts.get(at, (0, 0))
        if not math.isfinite(norm) and not n_nan and not n_inf:
            norm = _wide_norm(grad)
        about = (group_of(name), is_matrix)
        found.append(GradientFacts(name, norm, largest[at], n_nan, n_inf, *about))
    return found


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
    """Return the values of a parameter's gradient, as real numbers.

    Of a sparse one they are those that it holds.
    """
    grad = parameter.grad
    if grad is None:
        return None
    grad = grad.detach()
    if grad.is_sparse:
        grad = grad.coalesce().values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


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


def _counted(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return how many values of each tensor are NaN and Inf, with one transfer for each device."""
    n_nan = _batched(tensors, lambda all_: [one.isnan().sum() for one in all_])
    n_inf = _batched(tensors, lambda all_: [one.isinf().sum() for one in all_])
    return [(int(nan), int(inf)) for nan, inf in zip(n_nan, n_inf, strict=True)]


@torch.no_grad()
def _wide_norm(grad: Tensor) -> float:
    """Return the norm of values whose squares overflow float32, as they do from 1e19 on."""
    parts = torch.split(grad.reshape(-1), PART)
    return math.hypot(*(float(part.double().norm()) for part in parts))
