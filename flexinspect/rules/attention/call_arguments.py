"""Checks that the calls of one run agree on scale, softcap and dtype.

The model defines which scale or softcap is right. A patched layer typically differs from the other
layers, or from itself in another phase. Models with alternating layer types are not reported: their
layer types also differ in masks or head dimension. `find_capped_layers` serves another rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from flexinspect.records.finding import Finding
from flexinspect.records.step import CallRecord, StepRecord
from flexinspect.rules.attention.attention_shape import count_open_keys, newest_row
from flexinspect.rules.context import RuleContext, format_step_layers
from flexinspect.rules.engine import Rule, finding_kinds

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
    return 1.0 if call.scale is None else float(f"{call.scale / call.head_dim**-0.5:.4g}")


def _format_scale(call: CallRecord) -> str:
    scale = call.head_dim**-0.5 if call.scale is None else call.scale
    return f"{scale:.4g} ({_scale_factor(call):g} times 1/sqrt({call.head_dim}))"


_CALL_FACTS = (
    _CallFact("attention.scale", "scores are scaled by", _scale_factor, _format_scale),
    _CallFact(
        "attention.softcap-differs",
        "scores are",
        lambda call: call.softcap,
        lambda call: "not capped" if call.softcap is None else f"capped at {call.softcap:g}",
    ),
    _CallFact(
        "attention.dtype-differs",
        "attention runs in",
        lambda call: call.dtype,
        lambda call: call.dtype,
    ),
)


class CallFactsRule(Rule):
    """Compares the calls of a step with each other and with those of the step before."""

    name = "call facts"
    findings = finding_kinds(
        "attention.scale", "attention.softcap-differs", "attention.dtype-differs"
    )

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the calls of a generation."""
        super().on_generation_start(context)
        self._last_calls: dict[int, tuple[list[Any], Sequence[CallRecord]]] = {}

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Compare the calls of a step with each other and with those of the previous step."""
        if not step.calls:
            return
        facts = list(map(_compared_fields, step.calls))
        known = self._last_calls.get(step.branch)
        if known is not None and known[0] == facts:
            return
        self._last_calls[step.branch] = (facts, step.calls)
        is_scale_reported = False
        for fact in _CALL_FACTS:
            found = self._check_odd_layers(step, fact)
            if found is None and known is not None:
                found = self._check_changed(step, fact, known[1])
            if found is not None:
                is_scale_reported |= fact.finding_id == "attention.scale"
                yield found
        for event in step.events:
            if event.kind == RESCALED_EVENT and not is_scale_reported:
                yield self._rescaled_finding(step, event.data)

    def _rescaled_finding(self, step: StepRecord, facts: Mapping[str, Any]) -> Finding:
        """A user's attention function applied another scale than the layers requested."""
        layers, factor, score_mod = list(map(int, facts["layers"])), float(facts["factor"]), ""
        kernel = "its default" if facts["scale"] is None else f"{float(facts['scale']):.4g}"
        if facts.get("score_mod") is not None:
            score_mod = f", and its `score_mod` multiplies by {float(facts['score_mod']):.4g}"
        sentence = (
            f"In {format_step_layers(layers, step)} scores are scaled by {factor:.4g} times the "
            f"requested scale in step {step.step}: the attention function received `scaling`, and "
            f"its kernel uses {kernel} on queries and keys that may have been scaled before"
            f"{score_mod}."
        )
        return self.finding(
            step, "attention.scale", sentence, layers=layers, evidence=facts, series="asked"
        )

    def _check_odd_layers(self, step: StepRecord, fact: _CallFact) -> Finding | None:
        """Report the layers that differ from the majority."""
        calls = list({call.layer: call for call in step.calls}.values())
        counts, scales = Counter(map(fact.value, calls)), {call.scale for call in calls}
        # One scale for any head dimension is the same scale.
        is_same_scale = fact.finding_id == "attention.scale" and len(scales) == 1
        if len(counts) == 1 or (is_same_scale and None not in scales):
            return None
        usual, n_usual = counts.most_common(1)[0]
        odd = [call for call in calls if fact.value(call) != usual]
        others = [call for call in calls if fact.value(call) == usual]
        has_majority = n_usual > len(odd) or len(calls) <= 2
        if not has_majority or _are_other_kinds(odd, others):
            return None
        rest = "the other layer" if len(others) == 1 else f"the {len(others)} others"
        return self._fact_finding(step, fact, odd, others[0], f"in step {step.step}, in {rest}")

    def _check_changed(
        self, step: StepRecord, fact: _CallFact, before: Sequence[CallRecord]
    ) -> Finding | None:
        """Report the layers whose argument differs from the previous step."""
        previous = {call.layer: call for call in before}
        calls = [call for call in step.calls if call.layer in previous]
        odd = [call for call in calls if fact.value(call) != fact.value(previous[call.layer])]
        if not odd:
            return None
        place = f"from step {step.step} ({step.phase}) on, in the step before"
        return self._fact_finding(step, fact, odd, previous[odd[0].layer], place)

    def _fact_finding(
        self,
        step: StepRecord,
        fact: _CallFact,
        odd: Sequence[CallRecord],
        other: CallRecord,
        place: str,
    ) -> Finding:
        layers = sorted({call.layer for call in odd})
        sentence = (
            f"In {format_step_layers(layers, step)} {fact.phrase} {fact.format_value(odd[0])} "
            f"{place} {fact.format_value(other)}."
        )
        values = {"odd": fact.value(odd[0]), "others": fact.value(other), "path": odd[0].path}
        series = f"layer {layers[0]}"
        return self.finding(
            step, fact.finding_id, sentence, layers=layers, evidence=values, series=series
        )


def _are_other_kinds(odd: Sequence[CallRecord], others: Sequence[CallRecord]) -> bool:
    """Whether the layers are another layer type: other heads, or several with other masks."""
    heads = {(call.head_dim, call.kv_heads) for call in odd}
    if heads.isdisjoint((call.head_dim, call.kv_heads) for call in others):
        return True
    return len(odd) > 1 and {call.mask for call in odd}.isdisjoint(call.mask for call in others)


def find_capped_layers(step: StepRecord, context: RuleContext) -> list[int]:
    """The layers in which the attended keys have scores at the softcap in every head.

    The attention-weighted mean score of a row is its log-sum-exp minus its entropy.
    """
    row = newest_row(step)
    if row is None:
        return []
    caps = np.array([call.softcap or np.inf for call in step.calls])
    level = np.abs(row.lse - row.entropy).min(axis=1)
    found = []
    for number in np.flatnonzero(level >= CAP_SHARE * caps).tolist():
        n_open = count_open_keys(step, context, number)
        if n_open is not None and n_open.min() > 1 and level[number] < np.inf:
            found.append(step.calls[number].layer)
    return found
