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

from flexinspect.records.step import MemoryRecord
from flexinspect_hooks.capture.buffer import StepBuffer, Values
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove, StepDraft
from flexinspect_hooks.capture.step_clock import StepContext

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")


class MemoryHook(Hook):
    """Reads counters only; it does not synchronise the device."""

    name = "memory"

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Sum the bytes of parameters and buffers, and choose the cheapest way to read the RSS."""
        self._device = context.device
        self._model = sum(p.nbytes for p in context.model.parameters())
        self._model += sum(b.nbytes for b in context.model.buffers())
        self._rss, close = rss_reader()
        return [close]

    def open(self, step: StepContext) -> None:
        """Reset the CUDA peak counter, so that it measures this step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def reduce(
        self, step: StepContext, buffer: StepBuffer
    ) -> tuple[int, tuple[int, int, int] | None]:
        """Read the RSS and the CUDA allocator's counters (None on other devices).

        Here and not in the writer thread, which may write this step with seven later ones.
        """
        if self._device.type != "cuda":
            return self._rss(), None
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return self._rss(), (allocated["current"], reserved["current"], allocated["peak"])

    def record(
        self,
        step: StepContext,
        kept: tuple[int, tuple[int, int, int] | None],
        values: Values,
        draft: StepDraft,
    ) -> None:
        """Write the step's `MemoryRecord`; the cache's size is computed from the calls' shapes."""
        rss, cuda = kept
        kv_cache = 0
        for call in draft.calls:
            n_values = call.batch * call.kv_heads * call.kv_len * call.head_dim
            kv_cache += 2 * n_values * int(getattr(torch, call.dtype).itemsize)
        draft.memory = MemoryRecord(rss, self._model, kv_cache, *(cuda or (None, None, None)))


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


def rss_reader() -> tuple[Callable[[], int], Remove]:
    """Return a function that reads the resident set size in bytes, and one that closes its file.

    On Linux the file stays open: opening it costs five times as much as reading it.
    """
    if not _STATM.exists():
        process = psutil.Process()
        return lambda: int(process.memory_info().rss), lambda: None
    handle = os.open(_STATM, os.O_RDONLY)

    def read() -> int:
        return int(os.pread(handle, 128, 0).split()[1]) * mmap.PAGESIZE

    return read, partial(os.close, handle)
