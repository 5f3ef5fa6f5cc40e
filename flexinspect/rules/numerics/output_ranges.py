"""Checks layer outputs for float16 overflow, constant or unchanged values, and jumps of the norm.

Trained models have a few channels in the first layers that are a thousand times as large as the
others (at BOS or a line break), and norms that grow from layer to layer. So a layer is compared
with itself in other steps of the same phase, and only the range of float16 is a fixed limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter, eq, lt
from typing import Any

import numpy as np
from msgspec import Struct

from flexinspect.core.text import capitalize, format_layers
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import LayerStatRecord, StepRecord
from flexinspect.rules.attention.attention_shape import ROW_STREAMS, count_open_keys, newest_row
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds

FLOAT16_MAX = 65504.0
NEAR_LIMIT_SHARE = 0.5  # share of the float16 range from which an output is reported
AT_LIMIT_SHARE = 0.9

MAX_NORM_FACTOR = 100.0  # factor by which a norm must differ from those of other steps
MAX_CHANNEL_FACTOR = 1e4
"""The same if a single channel dominates the norm: trained models have activations up to a thousand
times as large as the others (Sun et al. 2024, Massive Activations in Large Language Models)."""
CAP_SHARE = 0.98  # share of the softcap from which scores count as capped: tanh(2.3)
MIN_HEALTHY_STEPS = 3  # steps required before another one is compared with them

_get_norm, _stat_values = attrgetter("norm"), attrgetter("min", "max", "mean", "norm")


class _NormHistory(Struct):
    """The norms of the layers in one phase of one branch."""

    n: int = 0
    smallest: list[float] = []
    largest: list[float] = []
    low: list[float] = []
    high: list[float] = []
    last_norms: list[float] = []
    last_stats: Sequence[LayerStatRecord] = ()  # the layer statistics of the last step with one row
    last_token_id: int | None = None  # the input token of that step

    def are_in_range(self, norms: list[float]) -> bool:
        """Whether all norms are within the range of earlier steps, if there are enough of them."""
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

    name = "ranges"
    needs = (imported.STATISTICS,)
    streams = ROW_STREAMS
    findings = finding_kinds("numbers.overflow-risk", "numbers.saturation", "numbers.jump")

    def reset(self) -> None:
        self._histories: dict[tuple[int, str], _NormHistory] = {}

    def on_step(self, step: StepRecord) -> Findings:
        """Check the outputs of a step; another rule reports NaN and Inf."""
        stats = step.layer_stats
        if step.calls and step.calls[0].softcap is not None:
            yield from self._check_capped(step)
        if len(stats) < 2:  # level basic records only non-finite layers
            return
        norms = list(map(_get_norm, stats))
        key = (step.branch, step.phase)
        history = self._histories.get(key)
        if history is None or len(history.last_norms) != len(stats):  # another number of layers
            history = self._histories[key] = _NormHistory()
        if not history.are_in_range(norms):
            yield from self._check_jump(step, history, norms)
        else:
            history.add(norms)
        constant = [stat for stat in stats if stat.min == stat.max]
        if constant:
            yield self._constant_finding(step, constant)
        elif any(map(eq, norms, norms[1:])):
            yield from self._check_identity(step)
        if step.q_len == 1 and not constant:
            yield from self._check_unchanged(step, history, norms)
        history.last_norms = norms
        if step.calls and step.calls[0].dtype == "float16":
            yield from self._check_overflow(step)

    def _check_overflow(self, step: StepRecord) -> Findings:
        near = [
            stat
            for stat in step.layer_stats
            if NEAR_LIMIT_SHARE * FLOAT16_MAX < _abs_max(stat) < np.inf and _is_float16(stat)
        ]
        if not near:
            return
        worst = max(near, key=_abs_max)
        which, largest = sorted(stat.layer for stat in near), _abs_max(worst)
        sentence = (
            f"The output of layer {worst.layer} reaches {largest:.0f} in step {step.step}, "
            f"{largest / FLOAT16_MAX:.0%} of the largest float16 (65504)"
        )
        if len(which) > 1:
            sentence += f"; {format_layers(which, len(step.layer_stats))} are above half of it"
        options: dict[str, Any] = {"severity": Severity.NOTE, "series": "near"}
        if largest >= AT_LIMIT_SHARE * FLOAT16_MAX:
            options = {"severity": Severity.WARNING, "series": "at the end"}
        options["evidence"] = {"module": worst.module, "min": worst.min, "max": worst.max}
        id_, layers = "numbers.overflow-risk", (worst.layer,)
        yield self.finding(step, id_, f"{sentence}.", layers=layers, **options)

    def _constant_finding(self, step: StepRecord, constant: Sequence[LayerStatRecord]) -> Finding:
        which, value = sorted(stat.layer for stat in constant), constant[0].min
        rows = "the row" if step.q_len == 1 else f"all {step.q_len} rows"
        sentence = (
            f"Every value in the output of layer {which[0]} is {value:g} in {rows} of step "
            f"{step.step}: the layer passes on no information about the text"
        )
        if len(which) > 1:
            sentence += f"; also constant: {format_layers(which[1:], len(step.layer_stats))}"
        return self._saturation(step, f"{sentence}.", which, "dead", value=value)

    def _check_identity(self, step: StepRecord) -> Findings:
        pairs = [(a, b) for a, b in pairwise(step.layer_stats) if a.layer < b.layer]
        which = [b.layer for a, b in pairs if _stat_values(a) == _stat_values(b)]
        if which:
            verb = "returns its input" if len(which) == 1 else "return their input"
            sentence = (
                f"{capitalize(format_layers(which, len(step.layer_stats)))} {verb} unchanged in "
                f"step {step.step}: neither attention nor MLP adds anything."
            )
            yield self._saturation(step, sentence, which, "idle", layers=which)

    def _check_unchanged(
        self, step: StepRecord, history: _NormHistory, norms: list[float]
    ) -> Findings:
        """Report layers with the output of the previous step although the input token differs."""
        same = any(map(eq, norms, history.last_norms))
        token = self.context.token(step.kv_before)
        last_token_id = history.last_token_id
        history.last_token_id = None if token is None else token.token_id
        stats, history.last_stats = history.last_stats, step.layer_stats
        if not same or token is None or last_token_id in (None, token.token_id):
            return
        pairs = zip(step.layer_stats, stats, strict=True)
        which = [now.layer for now, then in pairs if _stat_values(now) == _stat_values(then)]
        if which:
            sentence = (
                f"The output of {format_layers(which, len(norms))} in step {step.step} is the same "
                f"as in step {step.step - 1}, although the input token differs: "
                f"{'it does' if len(which) == 1 else 'they do'} not depend on the input."
            )
            yield self._saturation(step, sentence, which, "stuck", layers=which)

    def _check_capped(self, step: StepRecord) -> Findings:
        """Report layers in which the attended keys have scores at the softcap in every head."""
        row, which = newest_row(step), list[int]()
        if row is None:
            return
        caps = np.array([call.softcap or np.inf for call in step.calls])
        # The attention-weighted mean score of a row is its log-sum-exp minus its entropy.
        level = np.abs(row.lse - row.entropy).min(axis=1)
        for number in np.flatnonzero(level >= CAP_SHARE * caps).tolist():
            n_open = count_open_keys(step, self.context, number)
            if n_open is not None and n_open.min() > 1 and level[number] < np.inf:
                which.append(step.calls[number].layer)
        if which:
            cap = next(call.softcap for call in step.calls if call.layer == which[0])
            sentence = (
                f"The keys that the newest row of step {step.step} attends to have scores at the "
                f"softcap of {cap:g} in every head of {format_step_layers(which, step)}: the "
                "softcap makes them all equal."
            )
            yield self._saturation(step, sentence, which, "capped", softcap=cap)

    def _saturation(
        self, step: StepRecord, sentence: str, which: Sequence[int], series: str, **evidence: Any
    ) -> Finding:
        id_, query = "numbers.saturation", "capped" if series == "capped" else ""
        return self.finding(step, id_, sentence, which, evidence, series=series, query=query)

    def _check_jump(self, step: StepRecord, history: _NormHistory, norms: list[float]) -> Findings:
        if any(stat.n_nan or stat.n_inf for stat in step.layer_stats):
            return
        # The norm of finite numbers may be infinite; use the largest of them instead.
        norms = [
            n if n < math.inf else _abs_max(s) for n, s in zip(norms, step.layer_stats, strict=True)
        ]
        rows = zip(step.layer_stats, norms, history.smallest, history.largest, strict=False)
        jumps = [
            (stat, norm / high if norm > high else norm / low)
            for stat, norm, low, high in rows
            if norm > 0 < low and _is_jump(stat, norm, low, high)
        ]
        if not jumps:
            return
        first, ratio = min(jumps, key=lambda jump: jump[0].layer)
        which, more = sorted(stat.layer for stat, _ in jumps), ratio > 1
        times = ratio if more else 1 / ratio
        how_often = f"{times:,.0f}" if times < 1e6 else f"{times:.0e}"
        sentence = (
            f"The output of layer {first.layer} is {how_often} times "
            f"{'larger' if more else 'smaller'} in step {step.step} than in any {step.phase} step "
            f"before (largest value {_abs_max(first):.3g})"
        )
        if first.layer > min(stat.layer for stat in step.layer_stats):
            sentence += ", while the layers before it are unchanged"
        if len(which) > 1:
            sentence += f"; it continues in {format_layers(which[1:], len(norms))}"
        evidence = {"norm": first.norm, "times": times, "module": first.module, "layers": which}
        series = f"layer {first.layer} {'up' if more else 'down'}"
        yield self.finding(step, "numbers.jump", f"{sentence}.", which, evidence, series=series)


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
