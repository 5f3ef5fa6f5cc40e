"""What tells the values of two batches apart, without keeping them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_HASHED_VALUES = 1 << 15  # larger tensors are compared by a part of their values


def batch_values(batch: Any) -> tuple[tuple[Any, ...], bool]:
    """What only an equal batch has too, and whether its values are never equal by chance.

    That needs floating values on the CPU that differ, with at least two rows.
    """
    key, is_telling = [], False
    for tensor in _tensors(batch):
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            continue
        values = tensor.detach().reshape(-1)
        values = values[:: -(-values.numel() // MAX_HASHED_VALUES) or 1]
        if values.is_complex() or not values.numel():
            continue
        total = values.sum(dtype=torch.float64)
        some = values[:: -(-values.numel() // 16)].tolist()
        key.append((tuple(tensor.shape), float(total), *some))
        if values.is_floating_point() and tensor.dim() > 1 and tensor.shape[0] > 1:
            low, high = torch.aminmax(values)
            is_telling = is_telling or bool(low < high)
    return tuple(key), is_telling


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for one in value:
            yield from _tensors(one)
