"""Memory that attention does not explain: masks in the making, growth per step, our own share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from flexinspect.findings import Finding, Severity
from flexinspect.records import BuildRecord, MemoryRecord, StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted, printable

CREATION = "memory.mask-creation"
GROWTH = "memory.growth"
CAPTURE = "memory.capture"

MIB = 1 << 20
LARGE = 96 * MIB
"""Growth of the peak while a mask is built, from which on it is told of."""

MOST_PER_CELL = 64
"""Bytes for a cell of the grid; ten were measured."""

HUGE = 1024 * MIB
"""Growth that needs no reason to be too much."""

FEWEST = 16
"""Steps that a slope needs."""

PER_STEP = MIB
IN_ALL = 96 * MIB
STEADY = 0.75
"""Growth beyond the cache, per step and in all, and the share of windows in which it rises."""

OWN_SHARE = 0.25
OWN_BYTES = 256 * MIB


class MemoryRule(Rule):
    """Looks at what building masks costs, and at how the process grows from step to step."""

    name: ClassVar[str] = "memory"
    streams: ClassVar[tuple[str, ...]] = ("*",)
    loose: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        CREATION: FindingKind(
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
        GROWTH: FindingKind(
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
        CAPTURE: FindingKind(
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
        self._without_heads: set[tuple[str, int, int]] = set()
        """Rules and grids that a mask was built for without naming heads: for the whole run."""
        self._forget()

    def _forget(self) -> None:
        self._bytes: list[int] = []
        self._steps: list[int] = []
        self._peak = 0
        self._branch = 0

    def begin(self, scene: Scene) -> None:
        """Begin with no step seen."""
        super().begin(scene)
        self._forget()

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Look at the step's builds, and note its memory."""
        found = self._built(step) if step.builds else []
        memory = step.memory
        if memory is None:
            return found
        if step.q_len > 1 and step.arrays:
            found += self._own(step, memory)
        if step.phase == "decode" and step.branch == self._branch:
            self._bytes.append(_beyond_cache(memory))
            self._steps.append(step.step)
        return found

    def end(self) -> Sequence[Finding]:
        """Return whether the steps grew steadily."""
        if len(self._bytes) < FEWEST:
            return ()
        values = np.asarray(self._bytes, np.float64)
        values = values[len(values) // 4 :]  # caches of allocators fill up in the beginning
        window = max(len(values) // 4, 1)
        rises = values[window:] - values[:-window]
        slope, total = float(np.median(rises)) / window, float(values[-1] - values[0])
        if slope < PER_STEP or total < IN_ALL or float(np.mean(rises > 0)) < STEADY:
            return ()
        first, last = self._steps[len(self._steps) // 4], self._steps[-1]
        sentence = (
            f"Memory beyond the KV cache grew by {slope / MIB:.1f} MiB per step, "
            f"{total / MIB:.0f} MiB from step {first} to {last}."
        )
        evidence = {"per_step": round(slope), "total": round(total), "steps": len(values)}
        generation = self.scene.generation.generation
        return [Finding(GROWTH, Severity.NOTE, sentence, generation, step=last, evidence=evidence)]

    # -- building masks --------------------------------------------------------------------------

    def _built(self, step: StepRecord) -> list[Finding]:
        for build in step.builds:
            if not build.heads:
                self._without_heads.add((build.rule, build.q_len, build.kv_len))
        largest = max(step.builds, key=_of_grid)
        if _of_grid(largest) < LARGE or _of_grid(largest) <= self._peak:
            return []
        self._peak = largest.peak_growth
        for_nothing = self._heads_ignored(step, largest)
        severity = Severity.NOTE
        if for_nothing or largest.peak_growth >= HUGE:
            severity = Severity.WARNING
        sizes = (largest.batch or 1, largest.heads or 1, largest.q_len, largest.kv_len)
        grid = " x ".join(map(str, sizes))
        sentence = (
            f"The peak of memory {_place(step, self.scene)} lies in building a block mask, not in "
            f"attention: {largest.peak_growth / MIB:.0f} MiB for the grid {grid} in "
            f"{largest.wall_ms:.0f} ms (rule {printable(largest.rule)})"
            f"{_advice(largest, for_nothing)}."
        )
        evidence = {
            "grid": list(sizes),
            "peak_growth": largest.peak_growth,
            "wall_ms": round(largest.wall_ms, 1),
            "heads_ignored": for_nothing,
        }
        return [_finding(step, CREATION, severity, sentence, evidence, largest.layer)]

    def _heads_ignored(self, step: StepRecord, build: BuildRecord) -> bool:
        """Say whether heads were named for a rule that is known to be the same for all of them.

        Known from the cells of the mask that was used, or from the same rule built without heads.
        """
        if (build.heads or 1) == 1:
            return False
        if any((build.rule, *size) in self._without_heads for size in self._sizes_of(build.rule)):
            return True
        for call in step.calls:
            mask = self.scene.mask(call.mask)
            if mask is not None and (mask.q_len, mask.kv_len) == (build.q_len, build.kv_len):
                return mask.rule == build.rule and mask.cells is not None and len(mask.cells) == 1
        return False

    def _sizes_of(self, rule: str) -> list[tuple[int, int]]:
        return [(q_len, kv_len) for name, q_len, kv_len in self._without_heads if name == rule]

    # -- our own share ---------------------------------------------------------------------------

    def _own(self, step: StepRecord, memory: MemoryRecord) -> list[Finding]:
        own = sum(array.array.nbytes for array in step.arrays)
        if own < OWN_BYTES or own < OWN_SHARE * memory.rss:
            return []
        sentence = (
            f"Capture recorded {own / MIB:.0f} MiB of step {step.step} "
            f"({counted(len(step.arrays), 'array')}), {own / memory.rss:.0%} of the "
            f"{memory.rss / MIB:.0f} MiB that the process held."
        )
        evidence = {"bytes": own, "rss": memory.rss, "arrays": len(step.arrays)}
        return [_finding(step, CAPTURE, Severity.NOTE, sentence, evidence, None)]


RULE: type[Rule] = MemoryRule


def _of_grid(build: BuildRecord) -> int:
    """Return by how much a build raised the peak, 0 where its grid cannot be the reason.

    A compiled build of a small grid takes memory too: that of the compiler.
    """
    cells = (build.batch or 1) * (build.heads or 1) * build.q_len * build.kv_len
    return build.peak_growth if build.peak_growth <= cells * MOST_PER_CELL else 0


def _beyond_cache(memory: MemoryRecord) -> int:
    held = memory.rss if memory.cuda_allocated is None else memory.cuda_allocated
    return held - memory.kv_cache


def _place(step: StepRecord, scene: Scene) -> str:
    return "outside of a model" if scene.is_loose else f"of step {step.step}"


def _advice(build: BuildRecord, for_nothing: bool) -> str:
    if (build.heads or 1) == 1:
        return ""
    if for_nothing:
        return "; H can be None, as the rule ignores the head"
    return "; H can be None if the rule ignores the head"


def _finding(
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
