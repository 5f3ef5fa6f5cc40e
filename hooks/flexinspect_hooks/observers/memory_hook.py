"""Records the memory at the end of each step: process, model, KV cache, CUDA allocator."""

from __future__ import annotations

import mmap
import os
import resource
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn

from flexinspect.records.step import MemoryRecord
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.step_writer.memory_records import MemoryRecords

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")


class StepMemory:
    """Reads the memory of the process, its model and its GPU, without synchronisation."""

    def __init__(self, model: nn.Module) -> None:
        self._model = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
        self._rss, self.close = _rss_reader()

    def read(self, device: torch.device) -> MemoryRecord:
        """The memory now, without the KV cache; the CUDA figures are those of the allocator."""
        if device.type != "cuda":
            return MemoryRecord(self._rss(), self._model, 0)
        stats = torch.cuda.memory.memory_stats_as_nested_dict(device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        sizes = (allocated["current"], reserved["current"], allocated["peak"])
        return MemoryRecord(self._rss(), self._model, 0, *sizes)


class MemoryHook(Hook):
    """Records the memory of each step."""

    name = "memory"

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Sum the bytes of parameters and buffers, and choose the cheapest way to read the RSS."""
        self._context, self._memory = context, StepMemory(context.model)
        self.records = MemoryRecords()
        return [self._memory.close]

    def open(self, step: StepContext) -> None:
        """Reset the CUDA peak counter, so that it measures this step."""
        device = self._context.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def reduce(self, step: StepContext, buffer: StepBuffer) -> MemoryRecord:
        """Read the memory, here because the writer thread may write this step with later ones."""
        return self._memory.read(self._context.device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far in bytes: of the CUDA allocator, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if _STATUS.exists():
        # Not `ru_maxrss`: in a new process it starts at its parent's RSS.
        for line in _STATUS.read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _rss_reader() -> tuple[Callable[[], int], Remove]:
    """Return a function that reads the resident set size in bytes, and one that closes its file."""
    if not _STATM.exists():
        process = psutil.Process()
        return lambda: int(process.memory_info().rss), lambda: None
    handle = os.open(_STATM, os.O_RDONLY)  # opening it costs five times as much as reading it

    def read() -> int:
        return int(os.pread(handle, 128, 0).split()[1]) * mmap.PAGESIZE

    return read, partial(os.close, handle)
