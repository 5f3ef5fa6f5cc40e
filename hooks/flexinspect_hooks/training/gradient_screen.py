"""A look at a few gradients of a step that is not measured."""

from __future__ import annotations

import ctypes
import functools
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect_hooks.training.gradient_statistics import NamedParameters

MAX_PARAMETERS = 4  # that are looked at, evenly spaced in the model
N_VALUES = 16  # of each that are read
HISTORY = 50  # norms of earlier steps that a norm is compared with
MIN_HISTORY = 4  # with fewer of them, no finite norm stands out
RATIO = 10.0  # of a norm to the largest one before

_C_TYPES: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
}


class GradientScreen:
    """Finds the steps whose gradients stand out: by NaN or Inf, or by their size.

    Of each gradient a few values are read, in the next step the following ones: NaN and explosions
    come from above in a backward pass, so they are in nearly all values. Gradients that are on a
    device are not read, because the training would wait for it.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=HISTORY)
        self._named: NamedParameters = ()
        self._chosen: Sequence[nn.Parameter] = ()

    def is_suspicious(self, named: NamedParameters, step: int) -> bool:
        """Whether a step is to be measured."""
        if named is not self._named:
            spacing = -(-len(named) // MAX_PARAMETERS) or 1
            self._named, self._chosen = named, [one.parameter for one in named[::spacing]]
        values: list[float] = []
        for one in self._chosen:
            gradient = one.grad
            if gradient is not None:
                values += _values(gradient, step)
        if not values:
            return False
        norm = math.hypot(*values)
        if not math.isfinite(norm):
            return True
        before = self._norms
        if len(before) >= MIN_HISTORY and norm > RATIO * max(before):
            return True
        before.append(norm)
        return False


def _values(gradient: Tensor, step: int) -> list[float]:
    """Some values of a gradient; none if it is on a device, or neither float32 nor float64."""
    kind = _C_TYPES.get(gradient.dtype)
    is_plain = type(gradient) is Tensor and gradient.is_cpu and gradient.layout is torch.strided
    if kind is None or not is_plain or gradient.requires_grad:
        return []
    n = gradient.numel()
    begin = step * N_VALUES % n if n else 0
    n_read = min(N_VALUES, n - begin)
    if not gradient.is_contiguous():
        values: list[float] = gradient.reshape(-1)[begin : begin + n_read].tolist()
        return values
    if not n_read:
        return []
    # With operations of torch the look takes twice as long: their code is in no cache here.
    address = gradient.data_ptr() + begin * ctypes.sizeof(kind)
    read: list[float] = _array_type(kind, n_read).from_address(address)[:]
    return read


@functools.cache  # ctypes makes a type anew where nothing holds it
def _array_type(kind: Any, n: int) -> Any:
    return kind * n
