"""Statistics of tensors, and the origin of the first non-finite output of a model.

Functions that wait for a device say so. Tensors that are not dense are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexinspect.records.training_step import AnomalyOrigin
from flexinspect_hooks.gradients.reduction import NORM_CHUNK_SIZE
from flexinspect_hooks.training.gradient_statistics import (
    count_nonfinite,
    real_values,
    reduce_batched,
)


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
    """The statistics of each tensor, after one synchronisation for each device and dtype.

    A tensor with NaN or Inf, or whose squares leave the range of float32, needs further ones.
    """
    values = [real_values(tensor) for tensor in tensors]
    spreads = _read_spreads(values)
    return [_facts(*one) for one in zip(values, spreads, strict=True)]


def _facts(values: Tensor, spread: Sequence[float]) -> TensorFacts:
    is_finite = all(map(math.isfinite, spread[:2]))
    if is_finite or not values.numel() or not values.is_floating_point():
        # A NaN or Inf would be the minimum, the maximum or both.
        return TensorFacts(0, 0, *_fix_deviation(values, spread))
    (counts,) = count_nonfinite([values])
    values = values[values.isfinite()]
    return TensorFacts(*counts, *_fix_deviation(values, _read_spreads([values])[0]))


def _read_spreads(values: Iterable[Tensor]) -> list[list[float]]:
    """Minimum, maximum, mean and deviation of each tensor, with one transfer for each kind."""
    return reduce_batched([_reduce_spread(one) for one in values], torch.stack)


def _reduce_spread(values: Tensor) -> Tensor:
    """Minimum, maximum, mean and deviation (4,) on the values' device; NaN without values."""
    values = _widen(values)
    if not values.numel():
        return values.new_full((4,), math.nan)
    return torch.stack([*torch.aminmax(values), *_moments(values)])


def _fix_deviation(values: Tensor, spread: Sequence[float]) -> Sequence[float]:
    """The spread with an exact deviation if the squares of the values left float32's range."""
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
    # On CPU torch's own deviation was measured to take twenty times as long as these passes.
    mean = values.mean()
    parts = torch.split(values.reshape(-1), NORM_CHUNK_SIZE)
    norms = torch.stack([torch.linalg.vector_norm(part - mean) for part in parts])
    return mean, torch.linalg.vector_norm(norms) / math.sqrt(values.numel())


def _exact_moments(values: Tensor) -> tuple[Tensor, Tensor]:
    deviation, mean = torch.std_mean(values, correction=0)
    return mean, deviation


MODEL_OUTPUT = "(output)"
"""The name of a tensor that the model itself returned."""

UNCHECKED_WEIGHTS = "whose weights were looked at only after the update"
"""Detail of a module whose weights may have become non-finite only in the update itself."""

ModuleOutput = tuple[str, nn.Module, Tensor]
"""The name of a module ("" for a loss), the module, and a tensor that it returned."""


@dataclass(frozen=True, slots=True)
class Extremes:
    """The largest values of the inputs of one forward pass, and of its modules' outputs.

    `values` are still on their device: the first `n_inputs` are maxima of inputs, the others the
    largest magnitudes of outputs, in the order of `sources`. There is an anomaly only if one of the
    last `n_deciding` is non-finite.
    """

    values: Tensor
    n_inputs: int
    n_deciding: int
    sources: tuple[tuple[str, nn.Module, torch.dtype], ...]

    def producer(self, *, is_updated: bool = False) -> AnomalyOrigin | None:
        """The origin of the first non-finite output, after a synchronisation.

        `is_updated` says that the weights may have changed since.
        """
        values = self.values.tolist()
        inputs, outputs = values[: self.n_inputs], values[self.n_inputs :]
        nonfinite = [at for at, value in enumerate(outputs) if not math.isfinite(value)]
        if not nonfinite or nonfinite[-1] < len(outputs) - self.n_deciding:
            return None  # an inner -inf, as masks have it, is not an anomaly
        if any(not value < math.inf for value in inputs):
            return AnomalyOrigin("input", "", detail="the batch")
        name, module, dtype = self.sources[nonfinite[0]]
        others = {self.sources[at][0] for at in nonfinite} - {name, MODEL_OUTPUT, ""}
        dtype_name = str(dtype).removeprefix("torch.")
        return _find_producer(name, module, dtype_name, len(others), is_updated=is_updated)


def reduce_extremes(
    inputs: Any, outs: Sequence[ModuleOutput], n_deciding: int, device: torch.device
) -> Extremes:
    """Reduce the inputs of a model and the outputs of its modules, in their order."""
    # A float mask contains -inf by design, so only the maximum of an input is checked.
    maxima = [one.max() for value in inputs for one in dense_tensors(value) if one.numel()]
    values = [*maxima, *(max_abs(tensor) for _, _, tensor in outs)]
    sources = tuple((name, module, tensor.dtype) for name, module, tensor in outs)
    return Extremes(stack_numbers(values, device), len(maxima), n_deciding, sources)


def _find_producer(
    name: str, module: nn.Module, dtype: str, n_carriers: int, *, is_updated: bool
) -> AnomalyOrigin:
    """The origin of a module's non-finite output: its weights, itself, or (no name) the loss."""
    if not name:
        return AnomalyOrigin("loss", "")
    prefix = "" if name == MODEL_OUTPUT else f"{name}."
    for parameter_name, parameter in module.named_parameters():
        if not torch.isfinite(parameter).all():
            if is_updated:  # the update may have made them so
                return AnomalyOrigin("module", name, n_carriers, f"{dtype}; {UNCHECKED_WEIGHTS}")
            called = prefix + parameter_name.removeprefix("_orig_mod.")
            return AnomalyOrigin("weights", called, n_carriers + 1, dtype)
    return AnomalyOrigin("module", name, n_carriers, dtype)


def is_remote(tensor: Tensor) -> bool:
    """Whether reading a tensor would wait for its device."""
    return tensor.device.type != "cpu"


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite, after a synchronisation."""
    return math.isfinite((tensor if tensor.numel() == 1 else max_abs(tensor)).item())


def max_abs(tensor: Tensor) -> Tensor:
    """The largest magnitude in a tensor, NaN if it has one; 0-dim, on the tensor's device.

    Unlike a sum of squares it is finite whenever all values are.
    """
    if not tensor.numel():
        return tensor.new_zeros(())
    if is_remote(tensor):
        largest: Tensor = torch.linalg.vector_norm(tensor, math.inf)
        return largest
    low, high = torch.aminmax(tensor)  # on a CPU fifteen times as fast
    return torch.maximum(high, -low)


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating tensors in a module's input or output, one level deep."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from floating_tensors(one) if isinstance(one, Tensor) else ()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for one in value:
            yield from floating_tensors(one) if isinstance(one, Tensor) else ()


def dense_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating tensors that torch can reduce: neither float8 nor sparse."""
    for one in floating_tensors(value):
        if one.layout is torch.strided and one.dtype.itemsize > 1:
            yield one


def stack_numbers(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Numbers, or rows of numbers, of any device and precision as one tensor on `device`.

    Does not wait unless `device` is the CPU.
    """
    if not values:
        return torch.zeros(0)
    is_double = any(value.dtype is torch.float64 for value in values)
    dtype = torch.float64 if is_double else torch.float32
    non_blocking = device.type != "cpu"  # on the CPU, a copy could be read before it is complete
    return torch.stack([value.to(device, dtype, non_blocking=non_blocking) for value in values])
