"""Layer outputs out of range: near the end of float16, dead, idle or stuck, or grown by orders.

What a real model does is no trouble: a few channels of the first layers that are a thousand times
as large as the others (at BOS, at a line break), or a norm that grows from layer to layer. So a
layer is held against itself in other steps of the same phase, and float16 alone has an end that
outputs come near.
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
"""Share of float16's range from which on an output is said to come near its end."""
AT_LIMIT_SHARE = 0.9

MAX_NORM_FACTOR = 100.0
"""Times by which a norm must leave those of other steps."""
MAX_CHANNEL_FACTOR = 1e4
"""The same where a single channel makes the norm: models do that by themselves, up to a thousand
times (Sun et al. 2024, massive activations)."""
MIN_HEALTHY_STEPS = 3
"""Steps that must have been seen before one can leave them."""

_get_norm = attrgetter("norm")


@dataclass(slots=True)
class _NormHistory:
    """What is known of the norms of the layers in one phase of one branch."""

    n: int = 0
    smallest: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    last_norms: list[float] = field(default_factory=list)
    last_stats: Sequence[LayerStatRecord] = ()
    last_token_id: int | None = None
    """The statistics of the last step, and the token that it was fed, of one row."""

    def are_in_range(self, norms: list[float]) -> bool:
        """Whether all lie where those of earlier steps let expect them."""
        if self.n < MIN_HEALTHY_STEPS:
            return True
        return all(map(lt, self.low, norms)) and all(map(lt, norms, self.high))

    def add(self, norms: list[float]) -> None:
        """Take the norms of a healthy step: the first few, then ever fewer."""
        self.n += 1
        if self.n > MIN_HEALTHY_STEPS and self.n & (self.n - 1):
            return
        self.smallest = list(map(min, self.smallest or norms, norms))
        self.largest = list(map(max, self.largest or norms, norms))
        if self.n >= MIN_HEALTHY_STEPS:
            self.low = [norm / MAX_NORM_FACTOR for norm in self.smallest]
            self.high = [norm * MAX_NORM_FACTOR for norm in self.largest]


class OutputRangeRule(Rule):
    """Looks at the statistics of layer outputs, and at the cap of scores where there is one.

    From level advanced on, where every layer of every step is recorded.
    """

    name: ClassVar[str] = "ranges"
    streams: ClassVar[tuple[str, ...]] = ROW_STREAMS
    findings: ClassVar[Mapping[str, FindingKind]] = {
        OVERFLOW_RISK: FindingKind(
            Severity.NOTE,
            "a layer's output comes near the largest float16",
            why=(
                "Above 65504 a float16 is Inf, and the norm after it makes NaN of the whole row; "
                "a longer prompt or another one may be enough."
            ),
            confirm=(
                "Look at min and max in the layers panel, and run once more with --dtype bfloat16: "
                "the same values then have the range of float32."
            ),
            fix="Run in bfloat16, or keep the named layer and the residual stream in float32.",
            query=(
                "SELECT layer, module, min, max FROM layer_stats WHERE generation = {generation} "
                "AND branch = {branch} AND step = {step} AND max(abs(min), abs(max)) > 32752"
            ),
        ),
        SATURATION: FindingKind(
            Severity.WARNING,
            "a layer whose output is constant, adds nothing or does not depend on what it was fed, "
            "or scores that lie at their cap",
            why=(
                "What such a layer computes carries nothing of the text; the layers after it work "
                "on less than they were trained on."
            ),
            confirm=(
                "Step through the layers panel: the row of the layer stays as it is, or equals the "
                "row above it. For capped scores compare attention.lse minus entropy with the cap."
            ),
            fix=(
                "Look for weights that were not loaded (zeros), a hook or patch that returns its "
                "input or a buffer, and for scores that lack their scale before the cap."
            ),
            query=(
                "SELECT step, layer, module, min, max, mean, std, norm FROM layer_stats "
                "WHERE generation = {generation} AND branch = {branch} AND layer = {layer} "
                "AND step <= {step} ORDER BY step"
            ),
        ),
        NORM_JUMP: FindingKind(
            Severity.WARNING,
            "a layer's output is larger or smaller by orders than in the other steps of its phase",
            why=(
                "The norms of a layer stay within a small factor from token to token; by orders "
                "they change when something else was computed: other weights, another scale, "
                "memory that was overwritten."
            ),
            confirm=(
                "Go to the step and look at the norm in the layers panel, then one step back; the "
                "first layer that jumps is where it begins."
            ),
            fix=(
                "Look at what touches this layer between the two steps: hooks, adapters that are "
                "switched, quantised or offloaded weights, buffers that are reused."
            ),
            query=(
                "SELECT step, norm, min, max FROM layer_stats WHERE generation = {generation} "
                "AND branch = {branch} AND layer = {layer} ORDER BY step"
            ),
        ),
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with no norms known."""
        super().on_generation_start(context)
        self._histories: dict[tuple[int, str], _NormHistory] = {}

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return what is out of range; NaN and Inf are another rule's."""
        stats = step.layer_stats
        found: list[Finding] = []
        if step.calls and step.calls[0].softcap is not None:
            found += self._check_capped(step)
        if len(stats) < 2:  # at basic only sick layers are recorded
            return found
        norms = list(map(_get_norm, stats))
        known = self._norm_history(step)
        if not known.are_in_range(norms):
            found += self._check_jump(step, known, norms)
        else:
            known.add(norms)
        dead = [stat for stat in stats if stat.min == stat.max]
        if dead:
            found.append(self._dead_finding(step, dead))
        elif any(map(eq, norms, norms[1:])):
            found += self._check_idle(step)
        if step.q_len == 1 and not dead:
            found += self._check_stuck(step, known, norms)
        known.last_norms = norms
        if step.calls and step.calls[0].dtype == "float16":
            found += self._check_overflow(step)
        return found

    def _norm_history(self, step: StepRecord) -> _NormHistory:
        """Return what is known in the step's phase, nothing once other layers are recorded."""
        known = self._histories.get((step.branch, step.phase))
        if known is None or len(known.last_norms) != len(step.layer_stats):
            known = self._histories[step.branch, step.phase] = _NormHistory()
        return known

    # -- the end of float16 ----------------------------------------------------------------------

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
        at_the_end = _abs_max(worst) >= AT_LIMIT_SHARE * FLOAT16_MAX
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
                severity=Severity.WARNING if at_the_end else Severity.NOTE,
                series="at the end" if at_the_end else "near",
            )
        ]

    # -- dead, idle, stuck, capped ---------------------------------------------------------------

    def _dead_finding(self, step: StepRecord, dead: Sequence[LayerStatRecord]) -> Finding:
        which = sorted(stat.layer for stat in dead)
        value, rows = f"{dead[0].min:g}", "the row" if step.q_len == 1 else f"all {step.q_len} rows"
        sentence = (
            f"The output of layer {which[0]} is {value} in every number of {rows} of step "
            f"{step.step}: nothing of the text gets through it"
        )
        if len(which) > 1:
            sentence += f"; constant after it: {in_layers(which[1:], len(step.layer_stats))}"
        sentence += "."
        return _range_finding(
            step, SATURATION, sentence, {"value": dead[0].min}, which, series="dead"
        )

    def _check_idle(self, step: StepRecord) -> list[Finding]:
        pairs = pairwise(step.layer_stats)
        which = [
            b.layer for a, b in pairs if a.layer < b.layer and _stat_values(a) == _stat_values(b)
        ]
        if not which:
            return []
        one = len(which) == 1
        sentence = (
            f"{in_layers(which, len(step.layer_stats)).capitalize()} "
            f"{'gives' if one else 'give'} back exactly what {'it was' if one else 'they were'} "
            f"given in step {step.step}: neither attention nor MLP adds anything."
        )
        return [_range_finding(step, SATURATION, sentence, {"layers": which}, which, series="idle")]

    def _check_stuck(
        self, step: StepRecord, known: _NormHistory, norms: list[float]
    ) -> list[Finding]:
        """Say of a layer whose output is that of the step before, though another token was fed."""
        same = any(map(eq, norms, known.last_norms))
        token = self.context.token(step.kv_before)
        before, known.last_token_id = known.last_token_id, None if token is None else token.token_id
        stats, known.last_stats = known.last_stats, step.layer_stats
        if not same or token is None or before is None or before == token.token_id:
            return []
        pairs = zip(step.layer_stats, stats, strict=True)
        which = [now.layer for now, then in pairs if _stat_values(now) == _stat_values(then)]
        if not which:
            return []
        one = len(which) == 1
        sentence = (
            f"The output of {in_layers(which, len(norms))} in step {step.step} is that of step "
            f"{step.step - 1}, though another token was fed: {'it does' if one else 'they do'} not "
            "depend on what comes in."
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
            f"The keys that the newest row of step {step.step} looks at have scores at the cap of "
            f"{cap:g} in every head of {in_layers(which, len(_layer_set(step.calls)))}: the cap "
            "makes them all the same."
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
        self, step: StepRecord, known: _NormHistory, norms: list[float]
    ) -> list[Finding]:
        if any(stat.n_nan or stat.n_inf for stat in step.layer_stats):
            return []
        # The norm of finite numbers may be infinite; the largest of them says as much.
        norms = [
            n if n < math.inf else _abs_max(s) for n, s in zip(norms, step.layer_stats, strict=True)
        ]
        jumps = [
            (stat, norm / high if norm > high else norm / low)
            for stat, norm, low, high in zip(
                step.layer_stats, norms, known.smallest, known.largest, strict=False
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
            f"before it (largest number {_abs_max(first):.3g})"
        )
        if first.layer > min(stat.layer for stat in step.layer_stats):
            sentence += ", while the layers before it are as they were"
        if len(which) > 1:
            sentence += f"; it goes on to {in_layers(which[1:], len(norms))}"
        evidence = {"norm": first.norm, "times": times, "module": first.module, "layers": which}
        series = f"layer {first.layer} {'up' if more else 'down'}"
        return [_range_finding(step, NORM_JUMP, f"{sentence}.", evidence, which, series=series)]


def _format_ratio(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio < 1e6 else f"{ratio:.0e}"


def _abs_max(stat: LayerStatRecord) -> float:
    return max(-stat.min, stat.max)


def _is_float16(stat: LayerStatRecord) -> bool:
    """Say whether an output can be float16: under autocast the residual stream is float32."""
    with np.errstate(over="ignore"):
        return all(float(np.float16(value)) == value for value in (stat.min, stat.max))


def _is_jump(stat: LayerStatRecord, norm: float, low: float, high: float) -> bool:
    """Say whether a norm is out of range, and not by a massive activation in a channel or two."""
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
