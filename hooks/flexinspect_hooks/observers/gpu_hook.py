"""Reads NVML beside a run: utilization, memory of all processes, temperature, power of its GPU.

NVML is NVIDIA's management library (https://docs.nvidia.com/deploy/nvml-api/); its binding for
Python is the package nvidia-ml-py, module `pynvml`. It counts what torch's allocator does not see:
contexts, libraries, and the other processes of the device.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from flexinspect.records.step import GPU_EVENT, GpuRecord
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts
from flexinspect_hooks.step_writer.values import Values

NO_BINDING = (
    "The GPU is not read, because the package nvidia-ml-py is not installed: "
    "pip install 'flexinspect[gpu]'"
)
MIN_INTERVAL_S = 0.25
"""NVML itself averages the utilization over 1/6 s to 1 s."""


class GpuHook(Hook):
    """Reads the GPU of the model, in the writer thread and at most a few times a second."""

    name = "gpu"

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Start NVML if the model is on a CUDA device; an event says why not."""
        self._nvml: Nvml | None = None
        self._read_at = -math.inf
        if context.device.type != "cuda":
            return ()
        try:
            self._nvml = Nvml(context.device.index or 0)
        except ImportError:
            context.record_event(GPU_EVENT, NO_BINDING, {})
            return ()
        except Exception as error:  # NVMLError of the binding: no driver, no permission, …
            text = f"NVML cannot read the GPU: {type(error).__name__}: {error}"
            context.record_event(GPU_EVENT, text, {})
            return ()
        return [self._nvml.close]

    def reduce(self, step: StepContext, buffer: StepBuffer) -> None:
        """Nothing is read in the model's thread: NVML may take a millisecond."""

    def record(self, step: StepFacts, kept: Any, values: Values, draft: StepDraft) -> None:
        """Read the GPU if the last reading is old enough."""
        now = time.monotonic()
        if self._nvml is not None and now - self._read_at >= MIN_INTERVAL_S:
            self._read_at = now
            draft.gpus.append(self._nvml.read())


class Nvml:
    """NVML for one CUDA device of this process.

    Raises `ImportError` without the binding, and its `NVMLError` if NVML cannot be used.
    """

    def __init__(self, device: int) -> None:
        self._binding: Any = import_module("pynvml")
        self._device = device
        self._binding.nvmlInit()
        try:
            self._handle = self._find_handle(device)
            self._name = _text(self._binding.nvmlDeviceGetName(self._handle))
        except BaseException:
            self.close()
            raise

    def _find_handle(self, device: int) -> Any:
        """Return the handle of a device of torch, whose numbers CUDA_VISIBLE_DEVICES changes."""
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if uuid is not None:
            with suppress(self._binding.NVMLError):
                return self._binding.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return self._binding.nvmlDeviceGetHandleByIndex(device)

    def close(self) -> None:
        """End the use of NVML."""
        with suppress(self._binding.NVMLError):
            self._binding.nvmlShutdown()

    def read(self) -> GpuRecord:
        """Return the figures now; what the device does not support is None or NaN."""
        nvml, handle = self._binding, self._handle
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        kind = nvml.NVML_TEMPERATURE_GPU
        temperature = self._ask(nvml.nvmlDeviceGetTemperature, handle, kind)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        processes = self._processes()
        return GpuRecord(
            self._device,
            self._name,
            math.nan if rates is None else float(rates.gpu),
            0 if memory is None else int(memory.used),
            0 if memory is None else int(memory.total),
            processes.get(os.getpid()),
            None if temperature is None else int(temperature),
            None if milliwatts is None else milliwatts / 1e3,
            tuple(sorted(processes.items(), key=lambda item: -item[1])),
        )

    def _processes(self) -> dict[int, int]:
        """Return the bytes of each process that NVML sees; in a container it may see none."""
        found: dict[int, int] = {}
        for name in (
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
        ):
            listed = self._ask(getattr(self._binding, name), self._handle)
            for process in listed or ():
                if process.usedGpuMemory is not None:  # not available under some drivers
                    found[int(process.pid)] = int(process.usedGpuMemory)
        return found

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what NVML answers, None for what this device or user may not ask."""
        try:
            return function(*args)
        except self._binding.NVMLError:
            return None


def _text(name: str | bytes) -> str:
    """Return a name; older versions of the binding return bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name
