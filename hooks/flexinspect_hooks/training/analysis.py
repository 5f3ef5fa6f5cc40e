"""Facts of tensors and of a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flexinspect.trainingfacts import TensorFacts


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """What a model holds, in bytes; `on` is the total by device."""

    parameters: int
    gradients: int
    buffers: int
    on: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.buffers


@torch.no_grad()
def tensor_facts(tensor: Tensor, name: str = "tensor") -> TensorFacts:
    """Return the facts of a tensor, after one synchronisation."""
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values)
    about = (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    counts, spread = _counted(values)
    return TensorFacts(*about, str(tensor.device), values.nbytes, *counts, *spread)


def parameter_facts(model: nn.Module) -> dict[str, TensorFacts]:
    """Return the facts of every parameter of a model, by name."""
    return {name: tensor_facts(one, name) for name, one in model.named_parameters()}


def model_bytes(model: nn.Module) -> ModelBytes:
    """Return what the parameters, gradients and buffers of a model take."""
    on: dict[str, int] = {}
    parameters = list(model.parameters())
    gradients = [one.grad for one in parameters if one.grad is not None]
    buffers = list(model.buffers())
    for one in (*parameters, *gradients, *buffers):
        on[str(one.device)] = on.get(str(one.device), 0) + one.nbytes
    return ModelBytes(_sum(parameters), _sum(gradients), _sum(buffers), on)


def _sum(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


def _counted(values: Tensor) -> tuple[tuple[int, int], tuple[float, float, float, float]]:
    """Return how many values are NaN and Inf, and minimum, maximum, mean and deviation."""
    nothing = (float("nan"),) * 4
    if not values.numel():
        return (0, 0), nothing
    if not values.is_floating_point():
        return (0, 0), _spread(values.double())
    nan, inf = values.isnan(), values.isinf()
    n_nan, n_inf = (int(count) for count in torch.stack([nan.sum(), inf.sum()]).tolist())
    if n_nan or n_inf:
        values = values[~(nan | inf)]
    return (n_nan, n_inf), _spread(values) if values.numel() else nothing


def _spread(values: Tensor) -> tuple[float, float, float, float]:
    if values.dtype.itemsize < 4:
        values = values.float()
    low, high = torch.aminmax(values)
    std, mean = torch.std_mean(values, correction=0)
    lowest, highest, middle, deviation = torch.stack([low, high, mean, std]).tolist()
    return lowest, highest, middle, deviation
