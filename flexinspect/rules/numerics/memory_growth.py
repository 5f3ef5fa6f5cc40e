"""Checks memory that attention does not explain: mask builds, growth, capture; and its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from flexinspect.core.text import plural, printable
from flexinspect.records import imported
from flexinspect.records.finding import Severity
from flexinspect.records.step import BuildRecord, EventRecord, MemoryRecord, StepRecord
from flexinspect.rules.attention.kernel_path import grid_sizes
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.numerics.out_of_memory import out_of_memory_finding

MIB = 1 << 20
MIN_BUILD_BYTES = 96 * MIB  # peak growth during a mask build from which it is reported
MAX_BYTES_PER_CELL = 64  # peak growth that a build can explain; ten bytes were measured
HUGE_BUILD_BYTES = 1024 * MIB  # peak growth that is always a warning
MIN_GROWTH_STEPS = 16  # steps required to estimate a slope
MIN_GROWTH_PER_STEP = MIB
MIN_TOTAL_GROWTH = 96 * MIB
MIN_RISING_SHARE = 0.75
"""Growth beyond the KV cache, per step and in total, and the share of windows in which it rises."""
MIN_CAPTURE_SHARE, MIN_CAPTURE_BYTES = 0.25, 256 * MIB


MAX_VALUES = 4096
"""Values of memory that are kept; of a longer generation every second one is, then every fourth."""


def steady_growth(n_bytes: Sequence[int], every: int = 1) -> tuple[float, float, int] | None:
    """Judge the memory of every step, or of every second or fourth one, without their KV cache.

    Returns the growth per step, the growth in total, and the number of steps in which it grew; None
    if memory does not rise steadily, or too little to be reported.
    """
    if len(n_bytes) < MIN_GROWTH_STEPS:
        return None
    values = np.asarray(n_bytes, np.float64)
    values = values[len(values) // 4 :]  # allocator caches fill up at first
    window = max(len(values) // 4, 1)
    rises = values[window:] - values[:-window]
    slope, total = float(np.median(rises)) / (window * every), float(values[-1] - values[0])
    is_steady = float(np.mean(rises > 0)) >= MIN_RISING_SHARE
    if slope < MIN_GROWTH_PER_STEP or total < MIN_TOTAL_GROWTH or not is_steady:
        return None
    return slope, total, len(values) * every


class MemoryRule(Rule):
    """Checks the memory of mask builds and the growth of the process from step to step."""

    name = "memory"
    needs = (imported.MEMORY,)
    streams = ("*",)
    handles_standalone_calls = True
    handles_packed_requests = True
    findings = finding_kinds("memory.*")

    def __init__(self) -> None:
        self._built_without_heads: set[str] = set()  # mask_mods of masks built with H=None

    def reset(self) -> None:
        """Reset the memory of earlier steps."""
        self._bytes: list[int] = []
        self._steps: list[int] = []
        self._n_decoded, self._every = 0, 1
        self._peak = 0

    def on_step(self, step: StepRecord) -> Findings:
        """Check the builds of a step, and store its memory."""
        if step.builds:
            yield from self._check_builds(step)
        memory = step.memory
        if memory is None:
            return
        n_bytes = sum(array.array.nbytes for array in step.arrays) if step.q_len > 1 else 0
        if n_bytes >= max(MIN_CAPTURE_BYTES, MIN_CAPTURE_SHARE * memory.rss):
            sentence = (
                f"Capture recorded {n_bytes / MIB:.0f} MiB of step {step.step} "
                f"({plural(len(step.arrays), 'array')}), {n_bytes / memory.rss:.0%} of the "
                f"{memory.rss / MIB:.0f} MiB that the process used."
            )
            evidence = {"bytes": n_bytes, "rss": memory.rss, "arrays": len(step.arrays)}
            id_ = "memory.capture"
            yield self.finding(step, id_, sentence, evidence=evidence, series=id_)
        if step.phase == "decode" and step.branch == 0:
            self._keep(step.step, memory)

    def _keep(self, step: int, memory: MemoryRecord) -> None:
        """Keep the memory of a decode step, or of some only, so that this memory does not grow."""
        if self._n_decoded % self._every == 0:
            used = memory.rss if memory.cuda_allocated is None else memory.cuda_allocated
            self._bytes.append(used - memory.kv_cache)
            self._steps.append(step)
        self._n_decoded += 1
        if len(self._bytes) > MAX_VALUES:
            del self._bytes[1::2], self._steps[1::2]
            self._every *= 2

    def on_event(self, event: EventRecord) -> Findings:
        """Report that memory ran out."""
        finding = out_of_memory_finding(event, self.context.generation.generation)
        if finding is not None:
            yield finding

    def on_generation_end(self) -> Findings:
        """Report steady growth."""
        growth = steady_growth(self._bytes, self._every)
        if growth is None:
            return
        slope, total, n_values = growth
        first, last = self._steps[len(self._steps) // 4], self._steps[-1]
        sentence = (
            f"Memory beyond the KV cache grew by {slope / MIB:.1f} MiB per step, "
            f"{total / MIB:.0f} MiB from step {first} to {last}."
        )
        evidence = {"per_step": round(slope), "total": round(total), "steps": n_values}
        yield replace(self.finding(None, "memory.growth", sentence, evidence=evidence), step=last)

    def _check_builds(self, step: StepRecord) -> Findings:
        self._built_without_heads.update(one.mask_mod for one in step.builds if not one.heads)
        largest = max(step.builds, key=_grid_peak_growth)
        if _grid_peak_growth(largest) < max(MIN_BUILD_BYTES, self._peak + 1):
            return
        self._peak = largest.peak_growth
        ignores_heads = self._ignores_heads(step, largest)
        is_serious = ignores_heads or largest.peak_growth >= HUGE_BUILD_BYTES
        sizes = grid_sizes(largest)
        grid = " x ".join(map(str, sizes))
        place = "a standalone call" if self.context.is_standalone else f"step {step.step}"
        advice = ""
        if (largest.heads or 1) > 1:
            condition = "because" if ignores_heads else "if"
            advice = f"; H can be None {condition} the mask_mod ignores the head"
        sentence = (
            f"Building a block mask sets the memory peak of {place}, not "
            f"attention: {largest.peak_growth / MIB:.0f} MiB for the grid {grid} in "
            f"{largest.wall_ms:.0f} ms (mask_mod {printable(largest.mask_mod)}){advice}."
        )
        evidence = {"grid": list(sizes), "peak_growth": largest.peak_growth}
        evidence |= {"wall_ms": round(largest.wall_ms, 1), "heads_ignored": ignores_heads}
        id_, severity = "memory.mask-creation", Severity.WARNING if is_serious else Severity.NOTE
        layers = () if largest.layer is None else (largest.layer,)
        options: dict[str, Any] = {"severity": severity, "layers": layers, "series": id_}
        yield self.finding(step, id_, sentence, evidence=evidence, **options)

    def _ignores_heads(self, step: StepRecord, build: BuildRecord) -> bool:
        """Whether H was passed for a mask_mod that is known to ignore the head."""
        # Known from the cells of the mask, or from a build of the same mask_mod with H=None.
        if (build.heads or 1) == 1:
            return False
        if build.mask_mod in self._built_without_heads:
            return True
        for mask in (self.context.mask(call.mask) for call in step.calls):
            if mask is not None and (mask.q_len, mask.kv_len) == (build.q_len, build.kv_len):
                has_one_head = mask.cells is not None and len(mask.cells) == 1
                return has_one_head and mask.mask_mod == build.mask_mod
        return False


def _grid_peak_growth(build: BuildRecord) -> int:
    """The peak growth of a build in bytes, 0 if its grid does not explain it (compilation)."""
    is_explained = build.peak_growth <= math.prod(grid_sizes(build)) * MAX_BYTES_PER_CELL
    return build.peak_growth if is_explained else 0
