"""Block masks that were built for nothing: the same one in each layer, head or step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexinspect.findings import Finding, Severity
from flexinspect.records import BuildRecord, StepRecord
from flexinspect.rules.base import FindingKind
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.words import format_layers as in_layers
from flexinspect.rules.words import printable

NEEDLESS = "path.needless-builds"

NEEDLESS_KIND = FindingKind(
    Severity.NOTE,
    "the same block mask was built several times",
    "Uncompiled building evaluates the rule on every cell, for each head that is named: in a long "
    "prompt it costs more than the attention.",
    "The query lists the builds of the step with their grid and their time; the calls of all these "
    "layers have one mask fingerprint.",
    "Build the mask once per forward, outside of the layers, with None for the batch and heads "
    "that the rule ignores, and hand the object on.",
    "SELECT layer, batch, heads, q_len, kv_len, rule, wall_ms, peak_growth FROM builds WHERE "
    "generation = {generation} AND branch = {branch} AND step = {step} ORDER BY build",
)

COSTLY_MS = 50.0
COSTLY_SHARE = 0.2
COSTLY_LAYERS = 4
"""Needless builds are no trifle any more from this many layers, time and share of the step on."""

MIN_UNCHANGED_STEPS = 3
"""Steps in a row in which an unchanged mask is built anew, before it is told of."""


class BuildTracker:
    """Looks at the builds of one run, step by step.

    What a step built is held against the step before, be it of another generation: a loop over
    sequences of one length builds the same mask again for each.
    """

    def __init__(self) -> None:
        self._last_mask: str | None = None
        self._n_unchanged = 0
        self._reported: set[str] = set()

    def on_step(self, step: StepRecord, context: RuleContext) -> list[Finding]:
        """Return what was built for nothing in a step; nothing where masks are not known."""
        found = []
        groups: dict[tuple[Any, ...], list[BuildRecord]] = {}
        mask_of = {call.layer: call.mask for call in step.calls}
        for build in step.builds:
            if build.layer is not None and mask_of.get(build.layer) is not None:
                groups.setdefault((mask_of[build.layer], *_grid_shape(build)), []).append(build)
        for (mask, *_), builds in groups.items():
            layers = sorted({build.layer for build in builds if build.layer is not None})
            if len(builds) > 1:
                found.append(self._layers_finding(step, context, str(mask), builds, layers))
        return found or self._check_steps(step)

    def _layers_finding(
        self,
        step: StepRecord,
        context: RuleContext,
        mask: str,
        builds: Sequence[BuildRecord],
        layers: Sequence[int],
    ) -> Finding:
        first, ms = builds[0], sum(build.wall_ms for build in builds)
        spare = ms * (len(builds) - 1) / len(builds)
        known = context.mask(mask)
        cells = known.cells if known is not None else None
        for_nothing = (first.heads or 1) > 1 and cells is not None and len(cells) == 1
        heads = f", for {first.heads} heads that all share it" if for_nothing else ""
        n_layers = len({call.layer for call in step.calls})
        sentence = (
            f"The same mask was built {len(builds)} times in step {step.step}, in "
            f"{in_layers(layers, n_layers)} (grid {_format_grid(first)}, {ms:.1f} ms, rule "
            f"{printable(first.rule)}){heads}."
        )
        is_costly = (
            len(layers) >= COSTLY_LAYERS
            and spare >= COSTLY_MS
            and spare >= COSTLY_SHARE * step.wall_ms
        )
        evidence = {
            "builds": len(builds),
            "grid": _format_grid(first),
            "ms": round(ms, 2),
            "needless_ms": round(spare, 2),
            "peak_growth": sum(build.peak_growth for build in builds),
            "heads_ignored": for_nothing,
        }
        severity = Severity.WARNING if is_costly else Severity.NOTE
        return _build_finding(step, severity, sentence, evidence, layers, "layers")

    def _check_steps(self, step: StepRecord) -> list[Finding]:
        """Tell of a mask that is built anew in each step, and is the one before's."""
        masks = {call.mask for call in step.calls}
        lengths = {(call.q_len, call.kv_len) for call in step.calls}
        built = [build for build in step.builds if (build.q_len, build.kv_len) in lengths]
        only = masks.pop() if len(masks) == 1 else None
        self._n_unchanged = (
            self._n_unchanged + 1 if built and only is not None and only == self._last_mask else 0
        )
        self._last_mask = only
        if self._n_unchanged < MIN_UNCHANGED_STEPS - 1 or only is None or only in self._reported:
            return []
        self._reported.add(only)
        ms = built[0].wall_ms
        sentence = (
            f"The mask of step {step.step} is the one of the {self._n_unchanged} steps before it, and "
            f"was built anew in each (grid {_format_grid(built[0])}, {ms:.1f} ms)."
        )
        evidence = {
            "steps": self._n_unchanged + 1,
            "grid": _format_grid(built[0]),
            "ms": round(ms, 2),
        }
        return [_build_finding(step, Severity.NOTE, sentence, evidence, (), "steps")]


def _grid_shape(build: BuildRecord) -> tuple[Any, ...]:
    return build.rule, build.batch, build.heads, build.q_len, build.kv_len


def _format_grid(build: BuildRecord) -> str:
    return f"{build.batch or 1} x {build.heads or 1} x {build.q_len} x {build.kv_len}"


def _build_finding(
    step: StepRecord,
    severity: Severity,
    sentence: str,
    evidence: Mapping[str, Any],
    layers: Sequence[int],
    series: str,
) -> Finding:
    return Finding(
        id=NEEDLESS,
        severity=severity,
        sentence=sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        layer=layers[0] if layers else None,
        layers=tuple(layers) if len(layers) > 1 else (),
        evidence=evidence,
        series=series,
    )
