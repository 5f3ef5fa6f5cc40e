"""What the tensors of a forward are reduced to, on their device, and what that tells later.

Nothing waits for a device but what says so. Tensors that are not dense are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.trainingfacts import AnomalyOrigin

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
