"""Statistics of the outputs of a forward's modules: at once, or when a device has come to them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.records import LayerStatRecord
from flexinspect_hooks.training.analysis import tensor_facts
from flexinspect_hooks.training.reductions import dense_tensors, stack_numbers

ModuleOutputs = Sequence[tuple[str, nn.Module, Any]]
"""Modules by name, with what they returned."""

OutputKey = tuple[int, str, int]
"""A module's place, its name, and how many values its output has."""


@dataclass(frozen=True, slots=True)
class PendingStats:
    """Statistics of the outputs of one forward, still on their device.

    A row of `numbers` is norm, mean, least and greatest value, of `counts` the NaN and Inf.
    """

    numbers: Tensor
    counts: Tensor
    keys: tuple[OutputKey, ...]

    def records(self) -> list[LayerStatRecord]:
        """Return the records after one synchronisation; a second one tells how much is sick.

        Least, greatest, mean and deviation of an output that is not finite are unknown (NaN).
        """
        rows: list[list[float]] = self.numbers.tolist()
        is_sick = not all(math.isfinite(row[0]) for row in rows)
        counts = self.counts.tolist() if is_sick else [(0, 0)] * len(rows)
        return [_stat_record(*one) for one in zip(self.keys, rows, counts, strict=True)]


def pending_stats(outputs: ModuleOutputs, device: torch.device) -> PendingStats | None:
    """Reduce the outputs that were kept, without waiting for the device; None where none is."""
    outs = list(_first_tensors(outputs))
    if not outs:
        return None
    numbers = stack_numbers([_reduce_output(tensor) for _, tensor in outs], device)
    counts = [torch.stack([tensor.isnan().sum(), tensor.isinf().sum()]) for _, tensor in outs]
    later = device.type != "cpu"
    placed = torch.stack([one.to(device, non_blocking=later) for one in counts])
    return PendingStats(numbers, placed, tuple(of for of, _ in outs))


def output_stats(outputs: ModuleOutputs) -> list[LayerStatRecord]:
    """Return statistics of the outputs that were kept, waiting for each."""
    return [_output_stat(of, tensor) for of, tensor in _first_tensors(outputs)]


def _first_tensors(outputs: ModuleOutputs) -> Iterator[tuple[OutputKey, Tensor]]:
    for index, (name, _, output) in enumerate(outputs):
        tensor = next(dense_tensors(output), None)
        if tensor is not None:
            yield (index, name, tensor.numel()), tensor.detach()


def _reduce_output(tensor: Tensor) -> Tensor:
    """Return norm, mean, least and greatest value, in three passes."""
    wide = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
    if not tensor.numel():
        return tensor.new_zeros(4, dtype=wide)
    norm, mean = torch.linalg.vector_norm(tensor, dtype=wide), tensor.mean(dtype=wide)
    return torch.stack([norm, mean, *(end.to(wide) for end in torch.aminmax(tensor))])


def _stat_record(key: OutputKey, row: Sequence[float], counts: Sequence[int]) -> LayerStatRecord:
    index, name, n_values = key
    norm, mean, least, most = row
    n_nan, n_inf = counts
    if not n_values or n_nan + n_inf:
        least = most = mean = deviation = math.nan
    elif math.isfinite(norm):
        deviation = math.sqrt(max(norm * norm / n_values - mean * mean, 0.0))
    else:
        deviation = math.nan  # the squares left the range
    return LayerStatRecord(index, name, n_nan, n_inf, least, most, mean, deviation, norm)


def _output_stat(key: OutputKey, tensor: Tensor) -> LayerStatRecord:
    """Return statistics of one output; more passes only where it is not finite."""
    row = _reduce_output(tensor.float() if tensor.dtype.itemsize < 4 else tensor).tolist()
    if math.isfinite(row[0]):
        return _stat_record(key, row, (0, 0))
    facts = tensor_facts(tensor)
    values = (facts.min_value, facts.max_value, facts.mean_value, facts.std_value)
    return LayerStatRecord(*key[:2], facts.n_nan, facts.n_inf, *values, row[0])
