"""Checks the attention of the newest row, and that the calls of a run agree on their arguments.

- `AttentionShapeRule`: attention that is collapsed to one key, to BOS, uniform, or infinite.
  Trained models have many heads that attend to one key, or to BOS only. So the checks apply to all
  heads of a layer or model at once, over several steps, and only to rows with several open keys.
- `CallFactsRule`: scale, softcap and dtype. A patched layer typically differs from the other
  layers, or from itself in another phase. Models with alternating layer types are not reported:
  their layer types also differ in masks or head dimension.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.core.text import plural
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import SegmentKind
from flexinspect.records.step import CallRecord, StepRecord
from flexinspect.rules.context import RuleContext, format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds

NumberArray = npt.NDArray[Any]
ROW_STREAMS = ("attention.mass", "attention.lse", "attention.entropy")

SINK_SHARE = 0.99
ONE_KEY_ENTROPY = 0.01  # nats; 0.999 on one key and the rest on a thousand others has less
MIN_STEPS_IN_A_ROW = 3  # consecutive steps from which all layers are reported
MIN_LAYER_CHECKS = 4  # consecutive checks from which single layers are reported
LAYER_CHECK_INTERVAL = 4  # single layers are checked in the first steps, then in each n-th one
ENTROPY_TOLERANCE = 2e-5  # rounding error of an entropy compared with log(n)
ZERO_OFFSET, MIN_OFFSET = 3e-6, 0.05
"""Scores count as equal if they are all 0 (up to `ZERO_OFFSET`), or all far from it: small random
weights give scores that are close to 0 and to each other, which is not a fault."""
MIN_UNIFORM_TOKENS = 2  # different input tokens required for a uniform layer
MIN_OPEN_KEYS = 4  # rows with fewer open keys are not checked
LSE_CHECK_TOLERANCE = 1e-2  # calls whose LSE check is above it have no reliable log-sum-exp
RESCALED_EVENT = "scores-rescaled"  # of an attention function that ignored the scale it received


class NewestRow(NamedTuple):
    """The arrays of the newest row, by call.

    `segment_attention` is (calls, heads, segments), the others are (calls, heads). A call whose row
    was not recomputed has NaN here, and no LSE check in its record.
    """

    segment_attention: NumberArray
    lse: NumberArray
    entropy: NumberArray


def newest_row(step: StepRecord) -> NewestRow | None:
    """The arrays of the newest row of a step, None if attention was not recorded."""
    found = {one.stream: one.array for one in step.arrays if one.stream in ROW_STREAMS}
    if len(found) < len(ROW_STREAMS):
        return None
    arrays = NewestRow(*(found[stream] for stream in ROW_STREAMS))
    return arrays if len(arrays.lse) == len(step.calls) else None


def count_open_keys(step: StepRecord, context: RuleContext, call: int) -> NumberArray | None:
    """Number of open keys of a call's newest row, (1,) or (heads,); None if unknown or averaged."""
    mask = context.mask(step.calls[call].mask)
    averaged = None if mask is None else mask.uniform_rows
    if mask is None or mask.cells is None or (averaged is not None and averaged[:, -1].any()):
        return None
    counts: NumberArray = np.count_nonzero(mask.cells[:, -1], axis=-1)
    return counts


class _Counts(Struct):
    """Consecutive steps with each fault."""

    collapsed: int = 0
    sink: int = 0
    layers: dict[int, int] = {}
    uniform: dict[int, set[int]] = {}  # by layer: the input tokens of the last uniform steps


class AttentionShapeRule(Rule):
    """Checks entropy, segment attention and log-sum-exp of the newest row, from level advanced."""

    name = "attention_shape"
    needs = (imported.ATTENTION,)
    streams = ROW_STREAMS
    findings = finding_kinds(
        "attention.sink", "attention.collapsed", "attention.uniform", "attention.lse"
    )

    def reset(self) -> None:
        self._counts = defaultdict[int, _Counts](_Counts)
        first = self.context.segments[0] if self.context.segments else None
        self._has_bos = first is not None and first.kind is SegmentKind.BOS and len(first) == 1

    def on_step(self, step: StepRecord) -> Findings:
        """Check the newest row of a step."""
        row = newest_row(step)
        if row is None:
            return
        if not math.isfinite(float(row.lse.sum())):
            yield from self._check_infinite_lse(step, row)
            return
        runs, is_decode = self._counts[step.branch], step.phase == "decode"
        if is_decode:
            yield from self._check_model(step, runs, row)
        # Checking all heads of single layers costs more.
        if step.step < LAYER_CHECK_INTERVAL or step.step % LAYER_CHECK_INTERVAL == 0:
            high = row.entropy.max(axis=1).tolist()
            yield from self._check_uniform(step, runs, row, high)
            if is_decode and self._has_bos and not runs.collapsed and not runs.sink:
                yield from self._check_collapsed_layers(step, runs, row, high)

    def _check_model(self, step: StepRecord, runs: _Counts, row: NewestRow) -> Findings:
        """Check all heads of all layers; the first head is enough to skip most steps."""
        is_sharp = row.entropy[0, 0] < ONE_KEY_ENTROPY and row.entropy.max() < ONE_KEY_ENTROPY
        runs.collapsed = runs.collapsed + 1 if is_sharp and self._sees_several(step) else 0
        if runs.collapsed >= MIN_STEPS_IN_A_ROW:
            where = format_step_layers((call.layer for call in step.calls), step)
            sentence = (
                f"Every head of {where} puts more than 0.999 of its attention on one key in "
                f"{runs.collapsed} consecutive steps (up to step {step.step}), although up to "
                f"{step.kv_after} keys are open."
            )
            facts, id_ = {"steps": runs.collapsed}, "attention.collapsed"
            yield self._finding(step, id_, sentence, evidence=facts)
            return
        share = float(row.segment_attention[0, 0, 0]) if self._has_bos else 0.0
        if share > SINK_SHARE:
            share = float(row.segment_attention[:, :, 0].min())
        runs.sink = runs.sink + 1 if share > SINK_SHARE and self._sees_several(step) else 0
        if runs.sink >= MIN_STEPS_IN_A_ROW:
            sentence = (
                f"Every head of every layer gives BOS at least {share:.3f} of its attention in "
                f"{runs.sink} consecutive generated rows (up to step {step.step}): almost nothing "
                f"is read from {plural(step.kv_after - 1, 'other key')}."
            )
            evidence = {"share": share, "steps": runs.sink}
            yield self._finding(step, "attention.sink", sentence, evidence=evidence)

    def _check_collapsed_layers(
        self, step: StepRecord, runs: _Counts, row: NewestRow, high: list[float]
    ) -> Findings:
        """A note on single layers whose heads all attend to one key that is not BOS."""
        sharp = {
            step.calls[number].layer
            for number, entropy in enumerate(high)
            if entropy < ONE_KEY_ENTROPY
            and float((row.segment_attention[number, :, 0] > 0.5).mean()) < 0.5
            and self._sees_several(step, number)
        }
        runs.layers = {layer: runs.layers.get(layer, 0) + 1 for layer in sharp}
        which = sorted(layer for layer, n in runs.layers.items() if n >= MIN_LAYER_CHECKS)
        if which:
            sentence = (
                f"Every head of {format_step_layers(which, step)} puts more than 0.999 of its "
                f"attention on one key other than BOS in {MIN_LAYER_CHECKS} consecutive checks (up "
                f"to step {step.step})."
            )
            evidence = {"layers": which, "steps": MIN_LAYER_CHECKS}
            options: dict[str, Any] = {"layers": which, "severity": Severity.NOTE}
            yield self._finding(step, "attention.collapsed", sentence, evidence=evidence, **options)

    def _sees_several(self, step: StepRecord, number: int | None = None) -> bool:
        """Whether the newest row has several open keys, in one call or in every call."""
        numbers = range(len(step.calls)) if number is None else (number,)
        counts = (count_open_keys(step, self.context, number) for number in numbers)
        return all(n_open is not None and n_open.min() >= MIN_OPEN_KEYS for n_open in counts)

    def _check_uniform(
        self, step: StepRecord, runs: _Counts, row: NewestRow, high: list[float]
    ) -> Findings:
        """Check for layers whose weights are all equal, for several input tokens."""
        low = row.entropy.min(axis=1).tolist()
        flat = [n for n, b in enumerate(high) if b - low[n] < ENTROPY_TOLERANCE < b]
        if not flat:
            runs.uniform.clear()
            return
        token = self.context.token(step.kv_after - 1)
        if token is None:
            return
        # A single token may have a zero embedding by design, such as padding.
        seen = {step.calls[n].layer for n in flat if self._is_uniform(step, n, row)}
        seen -= {stat.layer + 1 for stat in step.layer_stats if stat.min == stat.max}
        runs.uniform = {layer: runs.uniform.get(layer, set()) | {token.token_id} for layer in seen}
        which = sorted(n for n, ids in runs.uniform.items() if len(ids) >= MIN_UNIFORM_TOKENS)
        if not which:
            return
        number = next(n for n, call in enumerate(step.calls) if call.layer == which[0])
        n_keys = round(math.exp(high[number]))
        sentence = (
            f"Every head of {format_step_layers(which, step)} gives each of the {n_keys} keys open "
            f"to the newest row of step {step.step} the same weight (1/{n_keys}), for any input "
            "token: its scores do not depend on the keys."
        )
        evidence = {"entropy": high[number], "keys": n_keys}
        yield self._finding(step, "attention.uniform", sentence, evidence=evidence, layers=which)

    def _is_uniform(self, step: StepRecord, number: int, row: NewestRow) -> bool:
        """Whether the weights of a call are equal; capped scores belong to another rule."""
        n_open = count_open_keys(step, self.context, number)
        if n_open is None or n_open.min() < MIN_OPEN_KEYS or step.calls[number].softcap is not None:
            return False
        most = np.log(n_open)
        offset = np.abs(row.lse[number] - most)
        are_the_same = bool(((offset < ZERO_OFFSET) | (offset > MIN_OFFSET)).all())
        return are_the_same and float(np.abs(most - row.entropy[number]).max()) < ENTROPY_TOLERANCE

    def _check_infinite_lse(self, step: StepRecord, row: NewestRow) -> Findings:
        """Report an infinite log-sum-exp in a row with open keys; another rule reports NaN."""
        nonfinite = [stat.layer for stat in step.layer_stats if stat.n_nan or stat.n_inf]
        for number, call in enumerate(step.calls):
            lse, n_open = row.lse[number], count_open_keys(step, self.context, number)
            has_check = call.lse_error is not None and call.lse_error <= LSE_CHECK_TOLERANCE
            if not np.isinf(lse).any() or n_open is None or not has_check:
                continue
            if call.layer >= min(nonfinite, default=math.inf):
                return
            wrong = np.flatnonzero(np.isinf(lse) & (n_open > 0)).tolist()
            if not wrong:
                continue
            first, most = float(lse[wrong[0]]), int(n_open.max())
            one = len(wrong) == 1
            heads = f"head {wrong[0]}" if one else f"{len(wrong)} of {len(lse)} heads"
            sentence = (
                f"The log-sum-exp of the newest row is {'+' if first > 0 else '-'}Inf in {heads} "
                f"of layer {call.layer} in step {step.step}, although the row attends to "
                f"{plural(most, 'key')}."
            )
            facts, head = {"heads": wrong, "lse": first, "open": most}, wrong[0] if one else None
            id_, layers = "attention.lse", [call.layer]
            yield self._finding(step, id_, sentence, evidence=facts, layers=layers, head=head)
            return

    def _finding(self, step: StepRecord, id_: str, sentence: str, **options: Any) -> Finding:
        """Return a finding about the newest row; its series depends on the option `layers`."""
        layers, at = options.get("layers"), (step.kv_after - 1,)
        series = f"layer {layers[0]}" if layers else "all"
        return self.finding(step, id_, sentence, positions=at, series=series, **options)


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


def _format_softcap(call: CallRecord) -> str:
    return "not capped" if call.softcap is None else f"capped at {call.softcap:g}"


_softcap, _dtype = attrgetter("softcap"), attrgetter("dtype")
_CALL_FACTS = (
    _CallFact("attention.scale", "scores are scaled by", _scale_factor, _format_scale),
    _CallFact("attention.softcap-differs", "scores are", _softcap, _format_softcap),
    _CallFact("attention.dtype-differs", "attention runs in", _dtype, _dtype),
)


class CallFactsRule(Rule):
    """Compares the calls of a step with each other and with those of the step before."""

    name = "call_facts"
    needs = (imported.CALLS,)
    findings = finding_kinds("attention.scale", "attention.*-differs")

    def reset(self) -> None:
        self._last_calls: dict[int, tuple[list[Any], Sequence[CallRecord]]] = {}

    def on_step(self, step: StepRecord) -> Findings:
        """Compare the calls of a step with each other and with those of the previous step."""
        if not step.calls:
            return
        facts = list(map(attrgetter("scale", "head_dim", "softcap", "dtype", "layer"), step.calls))
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
        return self.finding(step, "attention.scale", sentence, layers, facts, series="asked")

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
        kinds, odd_kinds = ({(c.head_dim, c.kv_heads) for c in some} for some in (others, odd))
        masks, odd_masks = ({c.mask for c in some} for some in (others, odd))
        is_other_kind = not odd_kinds & kinds or (len(odd) > 1 and not odd_masks & masks)
        if not has_majority or is_other_kind:  # a layer type with other heads or other masks
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
        self, step: StepRecord, fact: _CallFact, odd: list[CallRecord], other: CallRecord, at: str
    ) -> Finding:
        layers = sorted({call.layer for call in odd})
        sentence = (
            f"In {format_step_layers(layers, step)} {fact.phrase} {fact.format_value(odd[0])} "
            f"{at} {fact.format_value(other)}."
        )
        evidence = {"odd": fact.value(odd[0]), "others": fact.value(other), "path": odd[0].path}
        series = f"layer {layers[0]}"
        return self.finding(step, fact.finding_id, sentence, layers, evidence, series=series)
