"""Checks layer outputs for float16 overflow, constant or unchanged values, and jumps of the norm.

Trained models have a few channels in the first layers that are a thousand times as large as the
others (at BOS or a line break), and norms that grow from layer to layer. So a layer is compared
with itself in other steps of the same phase, and only the range of float16 is a fixed limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter, eq, lt
from typing import Any, ClassVar

import numpy as np

from flexinspect.core.text import format_layers as in_layers
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, LayerStatRecord, StepRecord
from flexinspect.rules.attention.attention_shape import ROW_STREAMS
from flexinspect.rules.attention.call_arguments import find_capped_layers
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule

OVERFLOW_RISK = "numbers.overflow-risk"
SATURATION = "numbers.saturation"
NORM_JUMP = "numbers.jump"

FLOAT16_MAX = 65504.0
NEAR_LIMIT_SHARE = 0.5
"""Share of the float16 range from which an output is reported."""
AT_LIMIT_SHARE = 0.9

MAX_NORM_FACTOR = 100.0
"""Factor by which a norm must differ from those of other steps."""
MAX_CHANNEL_FACTOR = 1e4
"""The same if a single channel dominates the norm: trained models have activations up to a thousand
times as large as the others (Sun et al. 2024, Massive Activations in Large Language Models)."""
MIN_HEALTHY_STEPS = 3
"""Steps required before another one is compared with them."""

_get_norm = attrgetter("norm")


@dataclass(slots=True)
class _NormHistory:
    """The norms of the layers in one phase of one branch."""

    n: int = 0
    smallest: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    last_norms: list[float] = field(default_factory=list)
    last_stats: Sequence[LayerStatRecord] = ()
    """The layer statistics of the last step with one row."""
    last_token_id: int | None = None
    """The input token of that step."""

    def are_in_range(self, norms: list[float]) -> bool:
        """Whether all norms are within the range of earlier steps."""
        if self.n < MIN_HEALTHY_STEPS:
            return True
        return all(map(lt, self.low, norms)) and all(map(lt, norms, self.high))

    def add(self, norms: list[float]) -> None:
        """Add the norms of a healthy step; after the first few, only at powers of two."""
        self.n += 1
        if self.n > MIN_HEALTHY_STEPS and self.n & (self.n - 1):
            return
        self.smallest = list(map(min, self.smallest or norms, norms))
        self.largest = list(map(max, self.largest or norms, norms))
        if self.n >= MIN_HEALTHY_STEPS:
            self.low = [norm / MAX_NORM_FACTOR for norm in self.smallest]
            self.high = [norm * MAX_NORM_FACTOR for norm in self.largest]


class OutputRangeRule(Rule):
    """Checks the statistics of layer outputs, and capped scores.

    From level advanced on, which records every layer of every step.
    """

    name: ClassVar[str] = "ranges"
    streams: ClassVar[tuple[str, ...]] = ROW_STREAMS
    findings: ClassVar[Mapping[str, FindingKind]] = {
        OVERFLOW_RISK: FindingKind(
            Severity.NOTE,
            "a layer's output is close to the largest float16",
            why=(
                "Above 65504 a float16 is Inf, and the next norm turns the whole row into NaN. "
                "Another or a longer prompt may be enough."
            ),
            confirm=(
                "Check min and max in the layers panel, and run again with --dtype bfloat16, which "
                "has the range of float32."
            ),
            fix="Run in bfloat16, or keep the named layer and the residual stream in float32.",
            query=(
                "SELECT layer, module, min, max FROM layer_stats WHERE generation = {generation} "
                "AND branch = {branch} AND step = {step} AND max(abs(min), abs(max)) > 32752"
            ),
        ),
        SATURATION: FindingKind(
            Severity.WARNING,
            "a layer's output is constant, equals its input or does not depend on it, or its "
            "scores are at the softcap",
            why=(
                "Such a layer carries no information about the text, and later layers get an input "
                "they were not trained on."
            ),
            confirm=(
                "Step through the layers panel: the row of the layer does not change, or equals "
                "the row above it. For capped scores compare attention.lse minus entropy with the "
                "cap."
            ),
            fix=(
                "Look for weights that were not loaded (zeros), a hook or patch that returns its "
                "input or a buffer, and scores that are not scaled before the softcap."
            ),
            query=(
                "SELECT step, layer, module, min, max, mean, std, norm FROM layer_stats "
                "WHERE generation = {generation} AND branch = {branch} AND layer = {layer} "
                "AND step <= {step} ORDER BY step"
            ),
        ),
        NORM_JUMP: FindingKind(
            Severity.WARNING,
            "the norm of a layer's output differs by orders of magnitude from other steps",
            why=(
                "The norms of a layer stay within a small factor from token to token. They change "
                "by orders of magnitude if the computation differs: other weights, another scale, "
                "overwritten memory."
            ),
            confirm=(
                "Compare the norms of this step and the previous one in the layers panel; the "
                "fault begins at the first layer that jumps."
            ),
            fix=(
                "Check what modifies this layer between the two steps: hooks, switched adapters, "
                "quantized or offloaded weights, reused buffers."
            ),
            query=(
                "SELECT step, norm, min, max FROM layer_stats WHERE generation = {generation} "
                "AND branch = {branch} AND layer = {layer} ORDER BY step"
            ),
        ),
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the norms."""
        super().on_generation_start(context)
        self._histories: dict[tuple[int, str], _NormHistory] = {}

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Check the outputs of a step; another rule reports NaN and Inf."""
        stats = step.layer_stats
        found: list[Finding] = []
        if step.calls and step.calls[0].softcap is not None:
            found += self._check_capped(step)
        if len(stats) < 2:  # level basic records only non-finite layers
            return found
        norms = list(map(_get_norm, stats))
        history = self._norm_history(step)
        if not history.are_in_range(norms):
            found += self._check_jump(step, history, norms)
        else:
            history.add(norms)
        constant = [stat for stat in stats if stat.min == stat.max]
        if constant:
            found.append(self._constant_finding(step, constant))
        elif any(map(eq, norms, norms[1:])):
            found += self._check_identity(step)
        if step.q_len == 1 and not constant:
            found += self._check_unchanged(step, history, norms)
        history.last_norms = norms
        if step.calls and step.calls[0].dtype == "float16":
            found += self._check_overflow(step)
        return found

    def _norm_history(self, step: StepRecord) -> _NormHistory:
        """The history of the step's phase; a new one if the number of recorded layers changes."""
        history = self._histories.get((step.branch, step.phase))
        if history is None or len(history.last_norms) != len(step.layer_stats):
            history = self._histories[step.branch, step.phase] = _NormHistory()
        return history

    # -- float16 ---------------------------------------------------------------------------------

    def _check_overflow(self, step: StepRecord) -> list[Finding]:
        near = [
            stat
            for stat in step.layer_stats
            if NEAR_LIMIT_SHARE * FLOAT16_MAX < _abs_max(stat) < np.inf
        ]
        near = [stat for stat in near if _is_float16(stat)]
        if not near:
            return []
        worst = max(near, key=_abs_max)
        is_at_limit = _abs_max(worst) >= AT_LIMIT_SHARE * FLOAT16_MAX
        which = sorted(stat.layer for stat in near)
        sentence = (
            f"The output of layer {worst.layer} reaches {_abs_max(worst):.0f} in step {step.step}, "
            f"{_abs_max(worst) / FLOAT16_MAX:.0%} of the largest float16 (65504)"
        )
        if len(which) > 1:
            sentence += f"; {in_layers(which, len(step.layer_stats))} are above half of it"
        evidence = {"module": worst.module, "min": worst.min, "max": worst.max}
        return [
            _range_finding(
                step,
                OVERFLOW_RISK,
                f"{sentence}.",
                evidence,
                [worst.layer],
                severity=Severity.WARNING if is_at_limit else Severity.NOTE,
                series="at the end" if is_at_limit else "near",
            )
        ]

    # -- constant, identity, unchanged, capped ---------------------------------------------------

    def _constant_finding(self, step: StepRecord, constant: Sequence[LayerStatRecord]) -> Finding:
        which, value = sorted(stat.layer for stat in constant), constant[0].min
        rows = "the row" if step.q_len == 1 else f"all {step.q_len} rows"
        sentence = (
            f"Every value in the output of layer {which[0]} is {value:g} in {rows} of step "
            f"{step.step}: the layer passes on no information about the text"
        )
        if len(which) > 1:
            sentence += f"; also constant: {in_layers(which[1:], len(step.layer_stats))}"
        evidence = {"value": value}
        return _range_finding(step, SATURATION, f"{sentence}.", evidence, which, series="dead")

    def _check_identity(self, step: StepRecord) -> list[Finding]:
        pairs = pairwise(step.layer_stats)
        which = [
            b.layer for a, b in pairs if a.layer < b.layer and _stat_values(a) == _stat_values(b)
        ]
        if not which:
            return []
        one = len(which) == 1
        sentence = (
            f"{in_layers(which, len(step.layer_stats)).capitalize()} "
            f"{'returns its input' if one else 'return their input'} unchanged in step "
            f"{step.step}: neither attention nor MLP adds anything."
        )
        return [_range_finding(step, SATURATION, sentence, {"layers": which}, which, series="idle")]

    def _check_unchanged(
        self, step: StepRecord, history: _NormHistory, norms: list[float]
    ) -> list[Finding]:
        """Report layers with the output of the previous step although the input token differs."""
        same = any(map(eq, norms, history.last_norms))
        token = self.context.token(step.kv_before)
        last_token_id = history.last_token_id
        history.last_token_id = None if token is None else token.token_id
        stats, history.last_stats = history.last_stats, step.layer_stats
        if not same or token is None or last_token_id in (None, token.token_id):
            return []
        pairs = zip(step.layer_stats, stats, strict=True)
        which = [now.layer for now, then in pairs if _stat_values(now) == _stat_values(then)]
        if not which:
            return []
        one = len(which) == 1
        sentence = (
            f"The output of {in_layers(which, len(norms))} in step {step.step} is the same as in "
            f"step {step.step - 1}, although the input token differs: "
            f"{'it does' if one else 'they do'} not depend on the input."
        )
        return [
            _range_finding(step, SATURATION, sentence, {"layers": which}, which, series="stuck")
        ]

    def _check_capped(self, step: StepRecord) -> list[Finding]:
        which = find_capped_layers(step, self.context)
        if not which:
            return []
        cap = next(call.softcap for call in step.calls if call.layer == which[0])
        sentence = (
            f"The keys that the newest row of step {step.step} attends to have scores at the "
            f"softcap of {cap:g} in every head of {in_layers(which, len(_layer_set(step.calls)))}: "
            "the softcap makes them all equal."
        )
        query = (
            f"SELECT layer, softcap, scale, head_dim FROM calls WHERE generation = "
            f"{step.generation} AND branch = {step.branch} AND step = {step.step} "
            f"AND layer = {which[0]}"
        )
        evidence = {"softcap": cap}
        return [
            _range_finding(
                step, SATURATION, sentence, evidence, which, series="capped", query=query
            )
        ]

    # -- jumps -----------------------------------------------------------------------------------

    def _check_jump(
        self, step: StepRecord, history: _NormHistory, norms: list[float]
    ) -> list[Finding]:
        if any(stat.n_nan or stat.n_inf for stat in step.layer_stats):
            return []
        # The norm of finite numbers may be infinite; use the largest of them instead.
        norms = [
            n if n < math.inf else _abs_max(s) for n, s in zip(norms, step.layer_stats, strict=True)
        ]
        jumps = [
            (stat, norm / high if norm > high else norm / low)
            for stat, norm, low, high in zip(
                step.layer_stats, norms, history.smallest, history.largest, strict=False
            )
            if norm > 0 < low and _is_jump(stat, norm, low, high)
        ]
        if not jumps:
            return []
        first, ratio = min(jumps, key=lambda jump: jump[0].layer)
        which = sorted(stat.layer for stat, _ in jumps)
        more = ratio > 1
        times = ratio if more else 1 / ratio
        sentence = (
            f"The output of layer {first.layer} is {_format_ratio(times)} times "
            f"{'larger' if more else 'smaller'} in step {step.step} than in any {step.phase} step "
            f"before (largest value {_abs_max(first):.3g})"
        )
        if first.layer > min(stat.layer for stat in step.layer_stats):
            sentence += ", while the layers before it are unchanged"
        if len(which) > 1:
            sentence += f"; it continues in {in_layers(which[1:], len(norms))}"
        evidence = {"norm": first.norm, "times": times, "module": first.module, "layers": which}
        series = f"layer {first.layer} {'up' if more else 'down'}"
        return [_range_finding(step, NORM_JUMP, f"{sentence}.", evidence, which, series=series)]


def _format_ratio(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio < 1e6 else f"{ratio:.0e}"


def _abs_max(stat: LayerStatRecord) -> float:
    return max(-stat.min, stat.max)


def _is_float16(stat: LayerStatRecord) -> bool:
    """Whether an output can be float16; under autocast the residual stream is float32."""
    with np.errstate(over="ignore"):
        return all(float(np.float16(value)) == value for value in (stat.min, stat.max))


def _is_jump(stat: LayerStatRecord, norm: float, low: float, high: float) -> bool:
    """Whether a norm is out of range, and not because of massive activations in a few channels."""
    factor = MAX_CHANNEL_FACTOR if norm > high and _abs_max(stat) > norm / 2 else MAX_NORM_FACTOR
    return norm > high * factor or norm < low / factor


def _stat_values(stat: LayerStatRecord) -> tuple[float, ...]:
    return stat.min, stat.max, stat.mean, stat.norm


def _layer_set(calls: Sequence[CallRecord]) -> set[int]:
    return {call.layer for call in calls}


def _range_finding(
    step: StepRecord,
    finding_id: str,
    sentence: str,
    evidence: dict[str, Any],
    which: Sequence[int],
    *,
    series: str,
    severity: Severity | None = None,
    query: str = "",
) -> Finding:
    return Finding(
        id=finding_id,
        severity=severity or OutputRangeRule.findings[finding_id].severity,
        sentence=sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        layer=which[0],
        evidence=evidence,
        layers=tuple(which) if len(which) > 1 else (),
        series=series,
        query=query,
    )
