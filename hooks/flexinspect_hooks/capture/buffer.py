"""The buffer of one step: named tensors that go from the model's device to the writer thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flexinspect_hooks.step_writer.values import ACTIVATION_PREFIX, BFLOAT16, MODIFIED

Inputs = Tensor | Sequence[Tensor] | None

Reduction = Callable[..., Mapping[str, Any]]
"""A reduction written once for torch and numpy, whose functions share names and `axis`."""


OnError = Callable[[Any, Exception], None]


def unless_modified(tensors: Sequence[Tensor]) -> Callable[[Reduction], Reduction]:
    """Return what makes reductions give only `MODIFIED` if a tensor is modified before.

    The tensors are not those of inference mode, for which torch does not count modifications.
    """
    versions = [tensor._version for tensor in tensors]

    def guard(reduce: Reduction) -> Reduction:
        def checked(xp: Any, **inputs: Any) -> Mapping[str, Any]:
            reduced = reduce(xp, **inputs)
            if versions == [tensor._version for tensor in tensors]:
                return reduced
            return {MODIFIED: xp.ones(())}

        return checked

    return guard


def _raise_error(owner: Any, error: Exception) -> None:
    raise error


class StepBuffer:
    """The results of one step's reduction, by name.

    On CUDA all of them are packed into one byte tensor and copied once, asynchronously, to pinned
    memory on a side stream; on other devices they are not copied here. Tensors that are put here
    must not change afterwards. `owner` is the hook that puts results now; a failure is reported
    under its name. Without `has_graph` no tensor has a graph of autograd, which would stay in
    memory until the step is written; looking at each takes time.
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
        *,
        has_graph: bool = True,
    ) -> None:
        self.owner: Any = None
        self._has_graph = has_graph
        self._owners: dict[str, Any] = {}
        self._device = device
        self._stream = stream
        self._tensors: dict[str, Tensor] = {}
        self._pending: list[tuple[Any, Reduction, dict[str, Any]]] = []
        self._packed_facts: list[tuple[str, torch.Size, torch.dtype, int]] = []
        """Name, shape, dtype and bytes of each tensor in `_host`."""
        self._host: Tensor | None = None
        self._packed: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def put(self, name: str, tensor: Tensor) -> None:
        """Add a result; the name must be new in this step."""
        self._tensors[name] = _without_graph(tensor)
        self._owners[name] = self.owner

    def put_activations(self, stream: str, layers: Sequence[int], tensors: list[Tensor]) -> None:
        """Add a tensor of each layer to store, in its own precision."""
        if len({(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors}) > 1:
            for layer, tensor in zip(layers, tensors, strict=True):
                self.put_activations(stream, [layer], [tensor])
        elif tensors:
            prefix = ACTIVATION_PREFIX + (BFLOAT16 if tensors[0].dtype is torch.bfloat16 else "")
            # A copy, because the model may write to a tensor (or its cache) before it is on disk;
            # one for all layers, because each operation costs time.
            self.put(f"{prefix}{stream}.{','.join(map(str, layers))}", torch.stack(tensors))

    def defer(self, reduction: Reduction, *, wait: bool = True, **inputs: Inputs) -> None:
        """Add the results of `reduction(xp, **inputs)`, with `xp` torch or numpy.

        On CPU the model's thread runs each operation with cold caches, and the writer thread beside
        the model or several steps in a row, so the work waits for that thread and is done in numpy.
        Not in torch: the first parallel operation of a second thread makes OpenMP keep a second
        pool of threads, after which every barrier of the model sleeps instead of spinning (a decode
        step of 18 ms was measured at 25 ms). On an accelerator it is done in torch, where the
        inputs are. Inputs must not change afterwards; `wait=False` does the work at once.
        """
        if wait and self._device.type == "cpu" and all(map(_is_on_cpu, inputs.values())):
            if self._has_graph:
                inputs = {name: _map(_without_graph, value) for name, value in inputs.items()}
            self._pending.append((self.owner, reduction, inputs))
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
        # Layers may be on several GPUs; a copy between two of them waits for both streams.
        on_device = {
            name: tensor.to(self._device, non_blocking=True).contiguous()
            for name, tensor in self._tensors.items()
            if tensor.is_cuda
        }
        if not on_device:
            return
        packed = torch.cat([t.view(-1).view(torch.uint8) for t in on_device.values()])
        self._packed_facts = [(n, t.shape, t.dtype, t.nbytes) for n, t in on_device.items()]
        self._host = torch.empty(packed.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._host.copy_(packed, non_blocking=True)
            packed.record_stream(self._stream)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(self._stream)
        self._packed = packed
        self._tensors = {n: t for n, t in self._tensors.items() if n not in on_device}

    def values(self, on_error: OnError = _raise_error) -> dict[str, npt.NDArray[Any]]:
        """Return the results as numpy arrays, waiting for the copy (bfloat16 as its uint16 bits).

        Called in the writer thread. For a result that fails `on_error` is called with its owner and
        the exception, and the result is left out; by default the exception propagates.
        """
        out: dict[str, npt.NDArray[Any]] = {}
        for name, tensor in self._tensors.items():
            try:
                out[name] = _as_numpy(tensor)
            except Exception as error:
                on_error(self._owners.get(name), error)
        with np.errstate(all="ignore"):  # NaN and Inf are reported as findings, not as warnings
            for owner, reduction, inputs in self._pending:
                try:
                    out.update(reduction(np, **{n: _map(_as_numpy, v) for n, v in inputs.items()}))
                except Exception as error:
                    on_error(owner, error)
        if self._done is not None and self._host is not None:
            self._done.synchronize()
            data, start = self._host.numpy(), 0
            for name, shape, dtype, n_bytes in self._packed_facts:
                tensor = torch.empty(shape, dtype=dtype, device="cpu")
                tensor.view(-1).view(torch.uint8).numpy()[:] = data[start : start + n_bytes]
                out[name] = _as_numpy(tensor)
                start += n_bytes
            self._packed = None
        return out


def stack_layers(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of equal shape as one, on the device of the first: layers may be on several.

    Raises `RuntimeError` for tensors of different shapes.
    """
    try:
        return torch.stack(list(tensors))
    except RuntimeError:
        device = tensors[0].device
        return torch.stack([one.to(device, non_blocking=True) for one in tensors])


def _without_graph(tensor: Tensor) -> Tensor:
    # Each operation of torch costs 5 µs between two forwards, a detach that changes nothing too.
    return tensor.detach() if tensor.requires_grad else tensor


def _map(convert: Callable[[Tensor], Any], value: Inputs) -> Any:
    if value is None or isinstance(value, Tensor):
        return None if value is None else convert(value)
    return [convert(tensor) for tensor in value]


def _is_on_cpu(value: Inputs) -> bool:
    if value is None or isinstance(value, Tensor):
        return value is None or value.is_cpu
    return not value or value[0].is_cpu  # the writer thread copies others to the CPU


def _as_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    tensor = _without_graph(tensor)
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()  # MPS and others: no side stream, the writer thread waits
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a CUDA stream to copy results on, or None if the device is not a CUDA device."""
    if device.type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
