"""Facts of tensors and of a model's parameters.

Nothing waits for a device but what says so. Tensors that are not dense are passed over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.records.training_step import AnomalyOrigin, TensorStats
from flexinspect_hooks.training.gradient_statistics import CHUNK_SIZE

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


MODEL_OUTPUT = "(output)"
"""Stands for a module's name where the model itself returned a tensor."""

UNCHECKED_WEIGHTS = "whose weights were looked at only after the update"
"""Said of a module whose weights may have become sick only by the step itself."""

ModuleOutput = tuple[str, nn.Module, Tensor]
"""A tensor, what it is said to come from (nothing for a loss), and the module that made it."""


@dataclass(frozen=True, slots=True)
class Extremes:
    """The largest values of what went into one forward, and of what came out of its modules.

    `values` are still on their device: the first `n_inputs` are maxima of inputs, the others
    magnitudes of outputs, each `of` a module; the last `n_telling` tell whether there is trouble.
    """

    values: Tensor
    n_inputs: int
    n_deciding: int
    sources: tuple[tuple[str, nn.Module, torch.dtype], ...]

    def producer(self, *, is_updated: bool = False) -> AnomalyOrigin | None:
        """Return where the first sick output came from, after a synchronisation.

        `is_updated` says that the weights may have changed since.
        """
        values = self.values.tolist()
        inputs, outs = values[: self.n_inputs], values[self.n_inputs :]
        sick = [at for at, value in enumerate(outs) if not math.isfinite(value)]
        if not sick or sick[-1] < len(outs) - self.n_deciding:
            return None  # what a mask sets to -inf within is no trouble
        if any(not value < math.inf for value in inputs):
            return AnomalyOrigin("input", "", detail="the batch")
        name, module, dtype = self.sources[sick[0]]
        others = {self.sources[at][0] for at in sick} - {name, MODEL_OUTPUT, ""}
        of = str(dtype).removeprefix("torch.")
        return _find_producer(name, module, of, len(others), is_updated=is_updated)


def reduce_extremes(
    inputs: Any, outs: Sequence[ModuleOutput], n_deciding: int, device: torch.device
) -> Extremes:
    """Reduce the inputs of a model and the outputs of its modules, in the order they were made."""
    # A float mask is -inf by design, so of an input only the maximum tells.
    maxima = [one.max() for value in inputs for one in dense_tensors(value) if one.numel()]
    values = [*maxima, *(max_abs(tensor) for _, _, tensor in outs)]
    of = tuple((name, module, tensor.dtype) for name, module, tensor in outs)
    return Extremes(stack_numbers(values, device), len(maxima), n_deciding, of)


def _find_producer(
    name: str, module: nn.Module, dtype: str, n_carriers: int, *, is_updated: bool
) -> AnomalyOrigin:
    """Return what made the output of a module sick: its weights, itself, or (no name) the loss."""
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
    """Tell whether looking at a tensor would wait for its device."""
    return tensor.device.type != "cpu"


def is_finite(tensor: Tensor) -> bool:
    """Tell whether all values of a tensor are finite, after a synchronisation."""
    return math.isfinite((tensor if tensor.numel() == 1 else max_abs(tensor)).item())


def max_abs(tensor: Tensor) -> Tensor:
    """Return the largest magnitude in a tensor, NaN where it holds one, on the tensor's device.

    Unlike a sum of squares it is finite whenever all values are.
    """
    if not tensor.numel():
        return tensor.new_zeros(())
    if is_remote(tensor):
        found: Tensor = torch.linalg.vector_norm(tensor, math.inf)
        return found
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
    """Yield those that can be reduced: torch reduces no float8, and only some sparse ones."""
    for one in floating_tensors(value):
        if one.layout is torch.strided and one.dtype.itemsize > 1:
            yield one


def stack_numbers(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return numbers of any device and precision as one tensor, waiting only for a CPU.

    They may be rows of numbers, too.
    """
    if not values:
        return torch.zeros(0)
    is_double = any(value.dtype is torch.float64 for value in values)
    dtype = torch.float64 if is_double else torch.float32
    later = device.type != "cpu"  # where the copies could be read before they are there
    return torch.stack([value.to(device, dtype, non_blocking=later) for value in values])
