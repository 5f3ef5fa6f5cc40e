"""The buffer of one step: named tensors that go from the model's device to the writer thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Values = Mapping[str, npt.NDArray[Any]]

_NUMPY_DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


Inputs = Tensor | Sequence[Tensor] | None

Reduction = Callable[..., Mapping[str, Any]]
"""A reduction written once for torch and numpy, whose functions share names and `axis`."""


@dataclass(frozen=True, slots=True)
class _PackedTensor:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    n_bytes: int


class StepBuffer:
    """The results of one step's reduction, by name.

    On CUDA all of them are packed into one byte tensor and copied once, asynchronously, to pinned
    memory on a side stream; on other devices they are not copied here. Tensors that are put here
    must not change afterwards. `owner` is the hook that puts results now; a failure is reported
    under its name.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.owner: Any = None
        self._owners: dict[str, Any] = {}
        self._device = device
        self._stream = stream
        self._tensors: dict[str, Tensor] = {}
        self._pending: list[tuple[Any, Reduction, dict[str, Any]]] = []
        self._parts: list[_PackedTensor] = []
        self._host: Tensor | None = None
        self._packed: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def put(self, name: str, tensor: Tensor) -> None:
        """Add a result; the name must be new in this step."""
        self._tensors[name] = tensor.detach()
        self._owners[name] = self.owner

    def defer(self, reduction: Reduction, *, wait: bool = True, **inputs: Inputs) -> None:
        """Add the results of `reduction(xp, **inputs)`, with `xp` torch or numpy.

        On CPU the model's thread runs each operation with cold caches, and the writer thread
        several steps in a row, so there the work waits for the writer thread and is done in numpy.
        Not in torch: the first parallel operation of a second thread makes OpenMP keep a second
        pool of threads, after which every barrier of the model sleeps instead of spinning (a decode
        step of 18 ms was measured at 25 ms). On an accelerator it is done in torch, where the
        inputs are. Inputs must not change afterwards; `wait=False` does the work at once.
        """
        if self._device.type == "cpu" and wait:
            detached = {name: _map(Tensor.detach, value) for name, value in inputs.items()}
            self._pending.append((self.owner, reduction, detached))
            return
        for name, tensor in reduction(torch, **inputs).items():
            self.put(name, tensor)

    def tensor(self, name: str) -> Tensor:
        """Return a result that was put earlier in this step; it is still on the device."""
        return self._tensors[name]

    def start_copy(self) -> None:
        """Start the copy to the host without waiting for it."""
        if self._stream is None or not self._tensors:
            return
        on_device = {n: t.contiguous() for n, t in self._tensors.items() if t.is_cuda}
        if not on_device:
            return
        packed = torch.cat([t.view(-1).view(torch.uint8) for t in on_device.values()])
        self._parts = [
            _PackedTensor(n, tuple(t.shape), t.dtype, t.numel() * t.element_size())
            for n, t in on_device.items()
        ]
        self._host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._host.copy_(packed, non_blocking=True)
            packed.record_stream(self._stream)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(self._stream)
        self._packed = packed
        self._tensors = {n: t for n, t in self._tensors.items() if n not in on_device}

    def values(
        self, on_error: Callable[[Any, Exception], None] | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the results as numpy arrays, waiting for the copy (bfloat16 as its uint16 bits).

        Called in the writer thread. With `on_error`, a result that fails is left out and
        `on_error(owner, error)` is called; without it the exception propagates.
        """
        out: dict[str, npt.NDArray[Any]] = {}

        def attempt(owner: Any, make: Callable[[], Mapping[str, Any]]) -> None:
            try:
                out.update(make())
            except Exception as error:
                if on_error is None:
                    raise
                on_error(owner, error)

        for name, tensor in self._tensors.items():
            attempt(self._owners.get(name), partial(_named_array, name, tensor))
        with np.errstate(all="ignore"):  # NaN and Inf are reported as findings, not as warnings
            for owner, reduction, inputs in self._pending:
                attempt(owner, partial(_reduce_in_numpy, reduction, inputs))
        if self._done is not None and self._host is not None:
            self._done.synchronize()
            out |= _unpack(self._host.numpy(), self._parts)
            self._packed = None
        return out


def _named_array(name: str, tensor: Tensor) -> dict[str, npt.NDArray[Any]]:
    return {name: _as_numpy(tensor)}


def _reduce_in_numpy(reduction: Reduction, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return reduction(np, **{name: _map(_as_numpy, value) for name, value in inputs.items()})


def _map(convert: Callable[[Tensor], Any], value: Inputs) -> Any:
    if value is None or isinstance(value, Tensor):
        return None if value is None else convert(value)
    return [convert(tensor) for tensor in value]


def _as_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()  # MPS and others: no side stream, the writer thread waits
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _unpack(data: npt.NDArray[np.uint8], parts: list[_PackedTensor]) -> dict[str, npt.NDArray[Any]]:
    out: dict[str, npt.NDArray[Any]] = {}
    start = 0
    for part in parts:
        raw = data[start : start + part.n_bytes]
        out[part.name] = raw.copy().view(_NUMPY_DTYPES[part.dtype]).reshape(part.shape)
        start += part.n_bytes
    return out


def with_prefix(values: Values, prefix: str) -> dict[str, npt.NDArray[Any]]:
    """Return the values whose names begin with `prefix`, by the rest of their names."""
    names = [name for name in values if name.startswith(prefix)]
    return {name.removeprefix(prefix): values[name] for name in names}


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a CUDA stream to copy results on, or None if the device is not a CUDA device."""
    if device.type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
