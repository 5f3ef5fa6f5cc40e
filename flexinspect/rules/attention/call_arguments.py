"""Checks that the calls of one run agree on scale, softcap and dtype.

The model defines which scale or softcap is right. A patched layer typically differs from the other
layers, or from itself in another phase. Models with alternating layer types are not reported: their
layer types also differ in masks or head dimension. `find_capped_layers` serves another rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from flexinspect.core.text import format_layers as in_layers
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, StepRecord
from flexinspect.rules.attention.attention_shape import count_open_keys, newest_row
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule

SCALE = "attention.scale"
SOFTCAP = "attention.softcap-differs"
DTYPE = "attention.dtype-differs"
RESCALED_EVENT = "scores-rescaled"
"""Event of a user's attention function that did not apply the scale it received."""

_compared_fields = attrgetter("scale", "head_dim", "softcap", "dtype", "layer")

CAP_SHARE = 0.98
"""Share of the softcap from which scores count as capped: tanh(2.3)."""


class _CallFact(NamedTuple):
    """One argument of a call that is compared, and how it is formatted."""

    finding_id: str
    phrase: str
    value: Callable[[CallRecord], Any]
    format_value: Callable[[CallRecord], str]


def _scale_factor(call: CallRecord) -> float:
    """The scale relative to the default, 1/sqrt(head_dim)."""
    usual = call.head_dim**-0.5
    return 1.0 if call.scale is None else float(f"{call.scale / usual:.4g}")


def _format_scale(call: CallRecord) -> str:
    usual = call.head_dim**-0.5
    scale = usual if call.scale is None else call.scale
    return f"{scale:.4g} ({_scale_factor(call):g} times 1/sqrt({call.head_dim}))"


_CALL_FACTS = (
    _CallFact(SCALE, "scores are scaled by", _scale_factor, _format_scale),
    _CallFact(
        SOFTCAP,
        "scores are",
        lambda call: call.softcap,
        lambda call: "not capped" if call.softcap is None else f"capped at {call.softcap:g}",
    ),
    _CallFact(DTYPE, "attention runs in", lambda call: call.dtype, lambda call: call.dtype),
)


def _make_kind(meaning: str, why: str, fix: str) -> FindingKind:
    return FindingKind(
        Severity.WARNING,
        meaning,
        why=why,
        confirm=(
            "Compare the layers in the path panel, or run the query: it lists the arguments of "
            "each call of the step."
        ),
        fix=fix,
        query=(
            "SELECT layer, path, backend, scale, head_dim, softcap, dtype FROM calls WHERE "
            "generation = {generation} AND branch = {branch} AND step = {step} ORDER BY call"
        ),
    )


class CallFactsRule(Rule):
    """Compares the calls of a step with each other and with those of the step before."""

    name: ClassVar[str] = "call facts"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        SCALE: _make_kind(
            "the scale differs between layers or steps, or from the requested scale",
            "A wrong scale makes attention too sharp or too flat, without an error.",
            "Pass the scale that the layer receives (scaling=) on to the kernel, in each branch of "
            "the patched code. Do not divide the queries by sqrt(head_dim) as well.",
        ),
        SOFTCAP: _make_kind(
            "the softcap differs between layers or steps",
            "A model trained with a softcap gets other attention weights without it, most of all "
            "where scores are large.",
            "Pass the model's softcap to the kernel (softcap=, or a score_mod for FlexAttention) "
            "in every layer and in both phases.",
        ),
        DTYPE: _make_kind(
            "the dtype of attention differs between layers or steps",
            "A layer in a narrower dtype loses precision, and one in a wider dtype costs memory "
            "and time. Comparisons between layers then show rounding as if it were a fault.",
            "Look for a cast in the patched layer, an autocast around part of the model, or "
            "weights of one layer loaded in another dtype.",
        ),
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the calls of a generation."""
        super().on_generation_start(context)
        self._last_calls: dict[int, tuple[list[Any], Sequence[CallRecord]]] = {}

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Compare the calls of a step with each other and with those of the previous step."""
        if not step.calls:
            return ()
        facts = list(map(_compared_fields, step.calls))
        known = self._last_calls.get(step.branch)
        if known is not None and known[0] == facts:
            return ()
        self._last_calls[step.branch] = (facts, step.calls)
        found: list[Finding] = []
        for kind in _CALL_FACTS:
            odd = self._check_odd_layers(step, kind)
            changed = [] if known is None or odd else _check_changed(step, kind, known[1])
            found += odd or changed
        if all(finding.id != SCALE for finding in found):
            found += [
                self._rescaled_finding(step, event.data)
                for event in step.events
                if event.kind == RESCALED_EVENT
            ]
        return found

    def _rescaled_finding(self, step: StepRecord, facts: Mapping[str, Any]) -> Finding:
        """A user's attention function applied another scale than the layers requested."""
        layers, factor = list(map(int, facts["layers"])), float(facts["factor"])
        where = in_layers(layers, len({call.layer for call in step.calls}))
        kernel = "its default" if facts["scale"] is None else f"{float(facts['scale']):.4g}"
        sentence = (
            f"In {where} scores are scaled by {factor:.4g} times the requested scale in step "
            f"{step.step}: the attention function received `scaling`, and its kernel uses "
            f"{kernel} on queries and keys that may have been scaled "
            f"before{_format_score_mod(facts)}."
        )
        return self.finding(step, SCALE, sentence, layers=layers, evidence=facts, series="asked")

    def _check_odd_layers(self, step: StepRecord, kind: _CallFact) -> list[Finding]:
        """Report the layers that differ from the majority."""
        calls = {call.layer: call for call in step.calls}
        counts = Counter(map(kind.value, calls.values()))
        if len(counts) == 1 or (kind.finding_id == SCALE and _have_same_scale(calls.values())):
            return []
        usual, n_usual = counts.most_common(1)[0]
        odd = [call for call in calls.values() if kind.value(call) != usual]
        others = [call for call in calls.values() if kind.value(call) == usual]
        has_majority = n_usual > len(odd) or len(calls) <= 2
        if not has_majority or self._are_other_kinds(odd, others):
            return []
        which = sorted(call.layer for call in odd)
        sentence = (
            f"In {in_layers(which, len(calls))} {kind.phrase} {kind.format_value(odd[0])} in step "
            f"{step.step}, in {_format_others(len(others))} {kind.format_value(others[0])}."
        )
        return [_call_fact_finding(step, kind, sentence, odd[0], others[0], which)]

    def _are_other_kinds(self, odd: Sequence[CallRecord], others: Sequence[CallRecord]) -> bool:
        """Whether the layers are another layer type: other heads, or several with other masks."""
        heads = {(call.head_dim, call.kv_heads) for call in odd}
        if not heads & {(call.head_dim, call.kv_heads) for call in others}:
            return True
        masks = {call.mask for call in odd}
        return len(odd) > 1 and not masks & {call.mask for call in others}


def _format_score_mod(facts: Mapping[str, Any]) -> str:
    factor = facts.get("score_mod")
    return "" if factor is None else f", and its `score_mod` multiplies by {float(factor):.4g}"


def _have_same_scale(calls: Iterable[CallRecord]) -> bool:
    """Whether all have the same scale, for any head dimension."""
    scales = {call.scale for call in calls}
    return len(scales) == 1 and None not in scales


def _check_changed(
    step: StepRecord, kind: _CallFact, before: Sequence[CallRecord]
) -> list[Finding]:
    """Report the layers whose argument differs from the previous step."""
    previous = {call.layer: call for call in before}
    odd = [
        (call, previous[call.layer])
        for call in step.calls
        if call.layer in previous and kind.value(call) != kind.value(previous[call.layer])
    ]
    if not odd:
        return []
    now, old = odd[0]
    which = sorted({call.layer for call, _ in odd})
    sentence = (
        f"In {in_layers(which, len(previous))} {kind.phrase} {kind.format_value(now)} from step "
        f"{step.step} ({step.phase}) on, in the step before {kind.format_value(old)}."
    )
    return [_call_fact_finding(step, kind, sentence, now, old, which)]


def _format_others(n: int) -> str:
    return "the other layer" if n == 1 else f"the {n} others"


def _call_fact_finding(
    step: StepRecord,
    kind: _CallFact,
    sentence: str,
    odd: CallRecord,
    other: CallRecord,
    which: Sequence[int],
) -> Finding:
    return Finding(
        id=kind.finding_id,
        severity=Severity.WARNING,
        sentence=sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        layer=which[0],
        evidence={"odd": kind.value(odd), "others": kind.value(other), "path": odd.path},
        layers=tuple(which) if len(which) > 1 else (),
        series=f"layer {which[0]}",
    )


def find_capped_layers(step: StepRecord, context: RuleContext) -> list[int]:
    """The layers in which the attended keys have scores at the softcap in every head.

    The attention-weighted mean score of a row is its log-sum-exp minus its entropy.
    """
    row = newest_row(step)
    caps = [call.softcap or np.inf for call in step.calls]
    if row is None:
        return []
    level = np.abs(row.lse - row.entropy).min(axis=1)
    found = []
    for number in np.flatnonzero(level >= CAP_SHARE * np.array(caps)).tolist():
        n_open = count_open_keys(step, context, number)
        if n_open is not None and n_open.min() > 1 and level[number] < np.inf:
            found.append(step.calls[number].layer)
    return found
