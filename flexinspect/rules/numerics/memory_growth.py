"""Memory that attention does not explain: masks in the making, growth per step, our own share."""

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
"""Growth of the peak while a mask is built, from which on it is told of."""

MAX_BYTES_PER_CELL = 64
"""Bytes for a cell of the grid; ten were measured."""

HUGE_BUILD_BYTES = 1024 * MIB
"""Growth that needs no reason to be too much."""

MIN_GROWTH_STEPS = 16
"""Steps that a slope needs."""

MIN_GROWTH_PER_STEP = MIB
MIN_TOTAL_GROWTH = 96 * MIB
MIN_RISING_SHARE = 0.75
"""Growth beyond the cache, per step and in all, and the share of windows in which it rises."""

MIN_CAPTURE_SHARE = 0.25
MIN_CAPTURE_BYTES = 256 * MIB


class MemoryRule(Rule):
    """Looks at what building masks costs, and at how the process grows from step to step."""

    name: ClassVar[str] = "memory"
    streams: ClassVar[tuple[str, ...]] = ("*",)
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        MASK_CREATION: FindingKind(
            Severity.NOTE,
            "the peak of memory lies in building a block mask, not in attention",
            "Uncompiled building evaluates the rule on the whole grid of sequences, heads, rows "
            "and keys, so memory runs out before attention has begun.",
            "The memory panel shows the peak; the query lists what was built with its grid, time "
            "and growth.",
            "Pass None for B and H where the rule ignores them, build with BlockMask."
            "from_kv_blocks or a compiled create_block_mask, or in chunks of rows.",
            "SELECT step, layer, batch, heads, q_len, kv_len, wall_ms, peak_growth FROM builds "
            "WHERE generation = {generation} AND branch = {branch} ORDER BY peak_growth DESC",
        ),
        MEMORY_GROWTH: FindingKind(
            Severity.NOTE,
            "the process grows with every step, beyond what its cache explains",
            "A long generation, or many of them, ends with memory running out; something keeps "
            "what each step made.",
            "The memory panel draws the curve with the cache under it; the query gives the bytes.",
            "Look for a list that collects tensors or masks in the loop, for hooks that keep "
            "outputs, and for outputs that still carry gradients (torch.no_grad).",
            "SELECT step, rss, kv_cache, cuda_allocated FROM memory WHERE generation = "
            "{generation} AND branch = {branch} ORDER BY step",
        ),
        CAPTURE_MEMORY: FindingKind(
            Severity.NOTE,
            "a large part of the memory at this step is what the debugger recorded",
            "Memory figures of this step are ours as much as the program's.",
            "The query lists what was stored for the step; at level advanced it is far less.",
            "Record fewer layers (--layers) or a lower level.",
            "SELECT stream, layer, shape, dtype FROM arrays WHERE generation = {generation} AND "
            "branch = {branch} AND step = {step} AND chunk = 0",
        ),
    }

    def __init__(self) -> None:
        self._built_without_heads: set[tuple[str, int, int]] = set()
        """Rules and grids that a mask was built for without naming heads: for the whole run."""
        self._reset()

    def _reset(self) -> None:
        self._bytes: list[int] = []
        self._steps: list[int] = []
        self._peak = 0
        self._branch = 0

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with no step seen."""
        super().on_generation_start(context)
        self._reset()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Look at the step's builds, and note its memory."""
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
        """Return whether the steps grew steadily."""
        if len(self._bytes) < MIN_GROWTH_STEPS:
            return ()
        values = np.asarray(self._bytes, np.float64)
        values = values[len(values) // 4 :]  # caches of allocators fill up in the beginning
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
                MEMORY_GROWTH, Severity.NOTE, sentence, generation, step=last, evidence=evidence
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
        for_nothing = self._heads_ignored(step, largest)
        severity = Severity.NOTE
        if for_nothing or largest.peak_growth >= HUGE_BUILD_BYTES:
            severity = Severity.WARNING
        sizes = (largest.batch or 1, largest.heads or 1, largest.q_len, largest.kv_len)
        grid = " x ".join(map(str, sizes))
        sentence = (
            f"The peak of memory {_format_place(step, self.context)} lies in building a block mask, not in "
            f"attention: {largest.peak_growth / MIB:.0f} MiB for the grid {grid} in "
            f"{largest.wall_ms:.0f} ms (rule {printable(largest.rule)})"
            f"{_format_advice(largest, for_nothing)}."
        )
        evidence = {
            "grid": list(sizes),
            "peak_growth": largest.peak_growth,
            "wall_ms": round(largest.wall_ms, 1),
            "heads_ignored": for_nothing,
        }
        return [_memory_finding(step, MASK_CREATION, severity, sentence, evidence, largest.layer)]

    def _heads_ignored(self, step: StepRecord, build: BuildRecord) -> bool:
        """Say whether heads were named for a rule that is known to be the same for all of them.

        Known from the cells of the mask that was used, or from the same rule built without heads.
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

    # -- our own share ---------------------------------------------------------------------------

    def _check_capture(self, step: StepRecord, memory: MemoryRecord) -> list[Finding]:
        own = sum(array.array.nbytes for array in step.arrays)
        if own < MIN_CAPTURE_BYTES or own < MIN_CAPTURE_SHARE * memory.rss:
            return []
        sentence = (
            f"Capture recorded {own / MIB:.0f} MiB of step {step.step} "
            f"({plural(len(step.arrays), 'array')}), {own / memory.rss:.0%} of the "
            f"{memory.rss / MIB:.0f} MiB that the process held."
        )
        evidence = {"bytes": own, "rss": memory.rss, "arrays": len(step.arrays)}
        return [_memory_finding(step, CAPTURE_MEMORY, Severity.NOTE, sentence, evidence, None)]


def _grid_peak_growth(build: BuildRecord) -> int:
    """Return by how much a build raised the peak, 0 where its grid cannot be the reason.

    A compiled build of a small grid takes memory too: that of the compiler.
    """
    cells = (build.batch or 1) * (build.heads or 1) * build.q_len * build.kv_len
    return build.peak_growth if build.peak_growth <= cells * MAX_BYTES_PER_CELL else 0


def _bytes_beyond_cache(memory: MemoryRecord) -> int:
    held = memory.rss if memory.cuda_allocated is None else memory.cuda_allocated
    return held - memory.kv_cache


def _format_place(step: StepRecord, context: RuleContext) -> str:
    return "outside of a model" if context.is_standalone else f"of step {step.step}"


def _format_advice(build: BuildRecord, for_nothing: bool) -> str:
    if (build.heads or 1) == 1:
        return ""
    if for_nothing:
        return "; H can be None, as the rule ignores the head"
    return "; H can be None if the rule ignores the head"


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
