"""Checks memory that attention does not explain: mask creation, growth per step, capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from flexinspect.core.text import plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import BuildRecord, MemoryRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule

MASK_CREATION = "memory.mask-creation"
MEMORY_GROWTH = "memory.growth"
CAPTURE_MEMORY = "memory.capture"

MIB = 1 << 20
MIN_BUILD_BYTES = 96 * MIB
"""Peak growth during a mask build from which it is reported."""

MAX_BYTES_PER_CELL = 64
"""Peak growth per cell of the grid that a build can explain; ten bytes were measured."""

HUGE_BUILD_BYTES = 1024 * MIB
"""Peak growth that is always a warning."""

MIN_GROWTH_STEPS = 16
"""Steps required to estimate a slope."""

MIN_GROWTH_PER_STEP = MIB
MIN_TOTAL_GROWTH = 96 * MIB
MIN_RISING_SHARE = 0.75
"""Growth beyond the KV cache, per step and in total, and the share of windows in which it rises."""

MIN_CAPTURE_SHARE = 0.25
MIN_CAPTURE_BYTES = 256 * MIB


class MemoryRule(Rule):
    """Checks the memory of mask builds and the growth of the process from step to step."""

    name: ClassVar[str] = "memory"
    streams: ClassVar[tuple[str, ...]] = ("*",)
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        MASK_CREATION: FindingKind(
            Severity.NOTE,
            "building a block mask sets the memory peak, not attention",
            why="An uncompiled build evaluates the mask_mod on the whole grid of batch, heads, "
            "rows and keys, so memory can run out before attention begins.",
            confirm="The memory panel shows the peak; the query lists the builds with grid, time "
            "and growth.",
            fix="Pass None for B and H if the mask_mod ignores them, build with BlockMask."
            "from_kv_blocks or a compiled create_block_mask, or build in chunks of rows.",
            query="SELECT step, layer, batch, heads, q_len, kv_len, wall_ms, peak_growth FROM "
            "builds WHERE generation = {generation} AND branch = {branch} ORDER BY peak_growth "
            "DESC",
        ),
        MEMORY_GROWTH: FindingKind(
            Severity.NOTE,
            "memory grows with every step by more than the KV cache",
            why="Something keeps the tensors of each step, so a long generation, or many of them, "
            "runs out of memory.",
            confirm="The memory panel draws memory and KV cache; the query returns the bytes.",
            fix="Look for a list that collects tensors or masks in the loop, for hooks that keep "
            "outputs, and for outputs with gradients (use torch.no_grad).",
            query="SELECT step, rss, kv_cache, cuda_allocated FROM memory WHERE generation = "
            "{generation} AND branch = {branch} ORDER BY step",
        ),
        CAPTURE_MEMORY: FindingKind(
            Severity.NOTE,
            "a large part of the memory of this step is captured data",
            why="The memory figures of this step include the capture itself.",
            confirm="The query lists the arrays of the step; level advanced stores far fewer.",
            fix="Record fewer layers (--layers) or a lower level.",
            query="SELECT stream, layer, shape, dtype FROM arrays WHERE generation = {generation} "
            "AND branch = {branch} AND step = {step} AND chunk = 0",
        ),
    }

    def __init__(self) -> None:
        self._built_without_heads: set[tuple[str, int, int]] = set()
        """mask_mod, rows and keys of masks built with H=None, for the whole run."""
        self._reset()

    def _reset(self) -> None:
        self._bytes: list[int] = []
        self._steps: list[int] = []
        self._peak = 0
        self._branch = 0

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the memory of earlier steps."""
        super().on_generation_start(context)
        self._reset()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Check the builds of a step, and store its memory."""
        found = self._check_builds(step) if step.builds else []
        memory = step.memory
        if memory is None:
            return found
        if step.q_len > 1 and step.arrays:
            found += self._check_capture(step, memory)
        if step.phase == "decode" and step.branch == self._branch:
            self._bytes.append(_bytes_beyond_cache(memory))
            self._steps.append(step.step)
        return found

    def on_generation_end(self) -> Sequence[Finding]:
        """Report steady growth."""
        if len(self._bytes) < MIN_GROWTH_STEPS:
            return ()
        values = np.asarray(self._bytes, np.float64)
        values = values[len(values) // 4 :]  # allocator caches fill up at first
        window = max(len(values) // 4, 1)
        rises = values[window:] - values[:-window]
        slope, total = float(np.median(rises)) / window, float(values[-1] - values[0])
        if (
            slope < MIN_GROWTH_PER_STEP
            or total < MIN_TOTAL_GROWTH
            or float(np.mean(rises > 0)) < MIN_RISING_SHARE
        ):
            return ()
        first, last = self._steps[len(self._steps) // 4], self._steps[-1]
        sentence = (
            f"Memory beyond the KV cache grew by {slope / MIB:.1f} MiB per step, "
            f"{total / MIB:.0f} MiB from step {first} to {last}."
        )
        evidence = {"per_step": round(slope), "total": round(total), "steps": len(values)}
        generation = self.context.generation.generation
        return [
            Finding(
                id=MEMORY_GROWTH,
                severity=Severity.NOTE,
                sentence=sentence,
                generation=generation,
                step=last,
                evidence=evidence,
            )
        ]

    # -- building masks --------------------------------------------------------------------------

    def _check_builds(self, step: StepRecord) -> list[Finding]:
        for build in step.builds:
            if not build.heads:
                self._built_without_heads.add((build.rule, build.q_len, build.kv_len))
        largest = max(step.builds, key=_grid_peak_growth)
        if _grid_peak_growth(largest) < MIN_BUILD_BYTES or _grid_peak_growth(largest) <= self._peak:
            return []
        self._peak = largest.peak_growth
        ignores_heads = self._ignores_heads(step, largest)
        severity = Severity.NOTE
        if ignores_heads or largest.peak_growth >= HUGE_BUILD_BYTES:
            severity = Severity.WARNING
        sizes = (largest.batch or 1, largest.heads or 1, largest.q_len, largest.kv_len)
        grid = " x ".join(map(str, sizes))
        sentence = (
            f"Building a block mask sets the memory peak {_format_place(step, self.context)}, not "
            f"attention: {largest.peak_growth / MIB:.0f} MiB for the grid {grid} in "
            f"{largest.wall_ms:.0f} ms (mask_mod {printable(largest.rule)})"
            f"{_format_advice(largest, ignores_heads)}."
        )
        evidence = {
            "grid": list(sizes),
            "peak_growth": largest.peak_growth,
            "wall_ms": round(largest.wall_ms, 1),
            "heads_ignored": ignores_heads,
        }
        return [_memory_finding(step, MASK_CREATION, severity, sentence, evidence, largest.layer)]

    def _ignores_heads(self, step: StepRecord, build: BuildRecord) -> bool:
        """Whether H was passed for a mask_mod that is known to ignore the head.

        Known from the cells of the executed mask, or from a build of the same mask_mod with H=None.
        """
        if (build.heads or 1) == 1:
            return False
        if any(
            (build.rule, *size) in self._built_without_heads
            for size in self._built_sizes(build.rule)
        ):
            return True
        for call in step.calls:
            mask = self.context.mask(call.mask)
            if mask is not None and (mask.q_len, mask.kv_len) == (build.q_len, build.kv_len):
                return mask.rule == build.rule and mask.cells is not None and len(mask.cells) == 1
        return False

    def _built_sizes(self, rule: str) -> list[tuple[int, int]]:
        return [
            (q_len, kv_len) for name, q_len, kv_len in self._built_without_heads if name == rule
        ]

    # -- captured data ---------------------------------------------------------------------------

    def _check_capture(self, step: StepRecord, memory: MemoryRecord) -> list[Finding]:
        n_bytes = sum(array.array.nbytes for array in step.arrays)
        if n_bytes < MIN_CAPTURE_BYTES or n_bytes < MIN_CAPTURE_SHARE * memory.rss:
            return []
        sentence = (
            f"Capture recorded {n_bytes / MIB:.0f} MiB of step {step.step} "
            f"({plural(len(step.arrays), 'array')}), {n_bytes / memory.rss:.0%} of the "
            f"{memory.rss / MIB:.0f} MiB that the process used."
        )
        evidence = {"bytes": n_bytes, "rss": memory.rss, "arrays": len(step.arrays)}
        return [_memory_finding(step, CAPTURE_MEMORY, Severity.NOTE, sentence, evidence, None)]


def _grid_peak_growth(build: BuildRecord) -> int:
    """The peak growth of a build in bytes, 0 if its grid cannot explain it.

    A compiled build of a small grid uses memory too, for the compiler.
    """
    cells = (build.batch or 1) * (build.heads or 1) * build.q_len * build.kv_len
    return build.peak_growth if build.peak_growth <= cells * MAX_BYTES_PER_CELL else 0


def _bytes_beyond_cache(memory: MemoryRecord) -> int:
    used = memory.rss if memory.cuda_allocated is None else memory.cuda_allocated
    return used - memory.kv_cache


def _format_place(step: StepRecord, context: RuleContext) -> str:
    return "of a standalone call" if context.is_standalone else f"of step {step.step}"


def _format_advice(build: BuildRecord, ignores_heads: bool) -> str:
    if (build.heads or 1) == 1:
        return ""
    condition = "because" if ignores_heads else "if"
    return f"; H can be None {condition} the mask_mod ignores the head"


def _memory_finding(
    step: StepRecord,
    finding_id: str,
    severity: Severity,
    sentence: str,
    evidence: Mapping[str, Any],
    layer: int | None,
) -> Finding:
    return Finding(
        id=finding_id,
        severity=severity,
        sentence=sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        layer=layer,
        evidence=evidence,
        series=finding_id,
    )
