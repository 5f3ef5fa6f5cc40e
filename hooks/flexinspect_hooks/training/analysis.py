"""Facts of tensors and of a model's parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flexinspect.trainingfacts import TensorStats
from flexinspect_hooks.training.gradstats import CHUNK_SIZE

Spread = tuple[float, float, float, float]
"""Minimum, maximum, mean and standard deviation."""


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """What a model holds, in bytes; `on` is the total by device."""

    parameters: int
    gradients: int
    buffers: int
    by_device: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.buffers


def tensor_facts(tensor: Tensor, name: str = "tensor") -> TensorStats:
    """Return the facts of a tensor, after one synchronisation."""
    return facts_of_tensors({name: tensor})[name]


@torch.no_grad()
def facts_of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorStats]:
    """Return the facts of some tensors by name, after one synchronisation for all of a dtype.

    A tensor with NaN or Inf, or whose squares leave the range of float32, takes some of its own.
    """
    values = [_real_numbers(tensor) for tensor in tensors.values()]
    spreads = _transfer_spreads([_reduce_spread(one) for one in values])
    found = {}
    for (name, tensor), own, spread in zip(tensors.items(), values, spreads, strict=True):
        about = (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        counts, ends = _count_nonfinite(own, spread)
        found[name] = TensorStats(*about, str(tensor.device), own.nbytes, *counts, *ends)
    return found


def parameter_facts(model: nn.Module) -> dict[str, TensorStats]:
    """Return the facts of every parameter of a model, by name."""
    return facts_of_tensors(dict(model.named_parameters()))


def model_bytes(model: nn.Module) -> ModelBytes:
    """Return what the parameters, gradients and buffers of a model take."""
    parameters = list(model.parameters())
    gradients = [one.grad for one in parameters if one.grad is not None]
    held = (
        _bytes_by_device(parameters),
        _bytes_by_device(gradients),
        _bytes_by_device(model.buffers()),
    )
    of_parameters, of_gradients, of_buffers = (found.total() for found in held)
    on = {str(device): size for device, size in sum(held, Counter[torch.device]()).items()}
    return ModelBytes(of_parameters, of_gradients, of_buffers, on)


def _bytes_by_device(tensors: Iterable[Tensor]) -> Counter[torch.device]:
    """Return the bytes of some tensors on each device."""
    found = Counter[torch.device]()
    for one in tensors:
        found[one.device] += one.nbytes
    return found


def _real_numbers(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as real numbers; of a sparse one those that it holds."""
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return torch.view_as_real(values) if values.is_complex() else values


def _count_nonfinite(values: Tensor, spread: Spread) -> tuple[tuple[int, int], Spread]:
    """Return how many values are NaN and Inf, and the spread of the others."""
    is_finite = all(map(math.isfinite, spread[:2]))
    if is_finite or not values.numel() or not values.is_floating_point():
        # A NaN or Inf would be the minimum, the maximum or both.
        return (0, 0), _fix_deviation(values, spread)
    nan, inf = values.isnan(), values.isinf()
    n_nan, n_inf = (int(count) for count in torch.stack([nan.sum(), inf.sum()]).tolist())
    values = values[~(nan | inf)]
    return (n_nan, n_inf), _fix_deviation(values, _transfer_spreads([_reduce_spread(values)])[0])


def _reduce_spread(values: Tensor) -> Tensor:
    """Return minimum, maximum, mean and deviation (4,), where the values are; NaN of none."""
    values = _widen(values)
    if not values.numel():
        return values.new_full((4,), math.nan)
    return torch.stack([*torch.aminmax(values), *_moments(values)])


def _transfer_spreads(spreads: Sequence[Tensor]) -> list[Spread]:
    """Return them as numbers, with one transfer for each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, one in enumerate(spreads):
        kinds.setdefault((one.device, one.dtype), []).append(index)
    found: dict[int, Spread] = {}
    for where in kinds.values():
        rows = torch.stack([spreads[index] for index in where]).tolist()
        found.update(zip(where, map(tuple, rows), strict=True))
    return [found[index] for index in range(len(spreads))]


def _fix_deviation(values: Tensor, spread: Spread) -> Spread:
    """Return a spread with the deviation of values whose squares left the range of float32."""
    low, high, mean, deviation = spread
    if low < high and not 0.0 < deviation < math.inf:
        mean, deviation = torch.stack(_exact_moments(_widen(values))).tolist()
    return low, high, mean, deviation


def _widen(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values.double()
    return values.float() if values.dtype.itemsize < 4 else values


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation."""
    if values.device.type != "cpu":
        return _exact_moments(values)
    # On CPU torch's own deviation was measured at twenty times the price of these passes.
    mean = values.mean()
    parts = torch.split(values.reshape(-1), CHUNK_SIZE)
    norms = torch.stack([torch.linalg.vector_norm(part - mean) for part in parts])
    return mean, torch.linalg.vector_norm(norms) / math.sqrt(values.numel())


def _exact_moments(values: Tensor) -> tuple[Tensor, Tensor]:
    deviation, mean = torch.std_mean(values, correction=0)
    return mean, deviation
