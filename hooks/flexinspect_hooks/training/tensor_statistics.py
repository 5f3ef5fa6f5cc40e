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
    return reduce_batched([_reduce_spread(_widen(one)) for one in values], torch.stack)


def _reduce_spread(values: Tensor) -> Tensor:
    if not values.numel():
        return values.new_full((4,), math.nan)
    return torch.stack([*torch.aminmax(values), *_moments(values)])


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
        """The origin of the first non-finite output: the inputs, weights, a module, or the loss.

        Waits for the device. `is_updated` says that the weights may have changed since.
        """
        values = self.values.tolist()
        inputs, outputs = values[: self.n_inputs], values[self.n_inputs :]
        nonfinite = [at for at, value in enumerate(outputs) if not math.isfinite(value)]
        if not nonfinite or nonfinite[-1] < len(outputs) - self.n_deciding:
            return None  # an inner -inf, as masks have it, is not an anomaly
        if any(not value < math.inf for value in inputs):
            return AnomalyOrigin("input", "", detail="the batch")
        name, module, dtype = self.sources[nonfinite[0]]
        if not name:
            return AnomalyOrigin("loss", "")
        kind, detail = "module", str(dtype).removeprefix("torch.")
        n_carriers = len({self.sources[at][0] for at in nonfinite} - {name, MODEL_OUTPUT, ""})
        bad = next((n for n, one in module.named_parameters() if not one.isfinite().all()), None)
        if bad is not None and is_updated:  # the update may have made the weights so
            detail = f"{detail}; {UNCHECKED_WEIGHTS}"
        elif bad is not None:
            kind, n_carriers = "weights", n_carriers + 1
            prefix = "" if name == MODEL_OUTPUT else f"{name}."
            name = prefix + bad.removeprefix("_orig_mod.")
        return AnomalyOrigin(kind, name, n_carriers, detail)


def reduce_extremes(
    inputs: Any, outs: Sequence[ModuleOutput], n_deciding: int, device: torch.device
) -> Extremes:
    """Reduce the inputs of a model and the outputs of its modules, in their order."""
    # A float mask contains -inf by design, so only the maximum of an input is checked.
    maxima = [one.max() for value in inputs for one in dense_tensors(value) if one.numel()]
    values = [*maxima, *(max_abs(tensor) for _, _, tensor in outs)]
    sources = tuple((name, module, tensor.dtype) for name, module, tensor in outs)
    return Extremes(stack_numbers(values, device), len(maxima), n_deciding, sources)


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
    parts: Iterable[Any] = (value,)
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, Sequence):
        parts = value
    for one in parts:
        if isinstance(one, Tensor) and one.is_floating_point():
            yield one


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
