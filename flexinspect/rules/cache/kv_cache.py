"""The rule for the key-value cache: empty, lost, filled twice, of another prompt, or not used.

The cached lengths are compared with the input and with the number of keys of the attention calls.
Sliding windows, crops after rejected drafts and caches that drop keys by design are not faults.
Capture writes the stream `attention.slots` only if empty or stale slots take part in the softmax.
Its numbers are counted or summed from the keys and weights of the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import capitalize, format_layers, format_ranges, plural
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, EventRecord, InputsRecord, StepRecord
from flexinspect.rules.cache.cache_contents import (
    CACHE_DUPLICATED,
    CACHE_LOST,
    CACHE_NOT_USED,
    CACHE_SHARED,
    CacheTextTracker,
)
from flexinspect.rules.context import RuleContext, format_step_layers, step_array
from flexinspect.rules.engine import Rule, finding_kinds

EMPTY_LAYER = "cache.empty-layer"
EMPTY_SLOTS = "cache.empty-slots"
STALE_SLOTS = "cache.stale-slots"

SLOT_STREAM = "attention.slots"
OPEN_COLUMN, EMPTY_COLUMN, EMPTY_WEIGHT_COLUMN, STALE_COLUMN, STALE_WEIGHT_COLUMN = range(5)
"""Columns of `attention.slots` (calls, 5): open keys; empty (all-zero) keys and their weight; stale
keys beyond the filled length and their weight. Weights are means over heads."""


class CacheRule(Rule):
    """Follows the cache through the steps and generations of one model.

    In standalone calls only empty slots are checked. If no layer stores anything, each step is a
    generation of its own, and one finding is enough for all of them.
    """

    name: ClassVar[str] = "caches"
    streams: ClassVar[tuple[str, ...]] = (SLOT_STREAM,)
    handles_standalone_calls: ClassVar[bool] = True
    findings = finding_kinds(
        *(EMPTY_LAYER, CACHE_LOST, CACHE_NOT_USED, EMPTY_SLOTS, STALE_SLOTS),
        *(CACHE_DUPLICATED, CACHE_SHARED),
    )

    def __init__(self) -> None:
        self._texts = CacheTextTracker(self)
        self._is_always_empty = False

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin a generation; the texts of earlier ones are kept."""
        super().on_generation_start(context)
        self._texts.on_generation_start(context)
        self._last_cached: tuple[int, ...] = ()
        self._reported_layers: set[int] = set()
        """Layers that already have a finding in this generation."""

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Store the prompt that the caller assumes to be cached."""
        self._texts.on_event(event)
        return ()

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Check the slots, the lengths and the text of the cache at a step."""
        yield from self._check_slots(step)
        if step.inputs is not None:
            if not self._is_healthy(step, step.inputs):
                yield from self._check_layers(step, step.inputs)
            self._last_cached = step.inputs.cached_after
            text_finding = self._texts.on_step(step)
            # If all layers are always empty, the tokens show the same fault.
            if text_finding is not None and not self._is_always_empty:
                yield text_finding

    def on_generation_end(self) -> Sequence[Finding]:
        """Report that no cache was used."""
        return () if self.context.is_standalone else self._texts.on_generation_end()

    def _is_healthy(self, step: StepRecord, inputs: InputsRecord) -> bool:
        """Whether all layers hold the same length: the previous one plus the rows of this step."""
        after = inputs.cached_after
        if not after:
            return True
        n = after[0]
        return (
            n == step.kv_after
            and after.count(n) == len(after)
            and len(inputs.cached_before) in (0, len(after))
            and inputs.cached_before == (self._last_cached or inputs.cached_before)
            and not (
                step.kv_before
                and step.calls
                and min(call.kv_len for call in step.calls) <= step.q_len
            )
        )

    def _check_layers(self, step: StepRecord, inputs: InputsRecord) -> list[Finding]:
        """Report layers that are empty, lost keys, or store keys twice."""
        held = {n: keys for n, keys in enumerate(inputs.cached_after) if keys >= 0}
        called = {call.layer: call for call in step.calls}
        empty = _find_empty(step, held, called)
        lost = [n for n in self._find_lost(step, inputs, called) if n not in empty]
        before = dict(enumerate(inputs.cached_before))
        twice = [n for n, keys in held.items() if keys - before.get(n, 0) > step.q_len]
        found = []
        if empty:
            found.append(self._empty_finding(step, inputs, empty, called))
        if lost:
            found.append(self._lost_finding(step, inputs, lost, called))
        if twice and (before or not step.kv_before):
            first = twice[0]
            sentence = (
                f"The cache of {format_layers(twice, len(inputs.cached_after))} grew by "
                f"{held[first] - before.get(first, 0)} keys in step {step.step}, which has "
                f"{plural(step.q_len, 'row')}: keys are stored more than once"
            )
            found.append(self._finding(step, CACHE_DUPLICATED, sentence, twice, inputs, {}))
        is_known = self._is_always_empty
        self._is_always_empty = bool(empty) and not any(held.values())
        if is_known and self._is_always_empty:
            return []
        new = [one for one in found if {*one.layers, one.layer} - {None, *self._reported_layers}]
        for one in new:
            self._reported_layers |= {*one.layers, one.layer} - {None}
        return new

    def _find_lost(
        self, step: StepRecord, inputs: InputsRecord, called: Mapping[int, CallRecord]
    ) -> list[int]:
        """Layers that lost keys, stopped growing, or do not attend to their cached keys."""
        if not step.kv_before:
            return []
        blind = [n for n, call in called.items() if call.kv_len <= step.q_len]
        pairs = list(zip(inputs.cached_before, inputs.cached_after, strict=False))
        grew = {after - before for before, after in pairs if after >= 0}
        stuck = []
        if len(grew) > 1 and max(grew) == step.q_len:
            stuck = [n for n, (b, a) in enumerate(pairs) if 0 <= a - b < step.q_len and a >= 0]
        return sorted({*blind, *stuck, *self._find_shrunk(inputs)})

    def _find_shrunk(self, inputs: InputsRecord) -> list[int]:
        """Layers that lost keys since the last step, while others did not."""
        pairs = list(zip(self._last_cached, inputs.cached_before, strict=False))
        shrunk = [n for n, (before, now) in enumerate(pairs) if 0 <= now < before]
        return shrunk if any(before == now > 0 for before, now in pairs) else []

    def _empty_finding(
        self,
        step: StepRecord,
        inputs: InputsRecord,
        empty: Sequence[int],
        called: Mapping[int, CallRecord],
    ) -> Finding:
        filled = [n for n, keys in enumerate(inputs.cached_after) if keys > 0]
        others = "no layer holds any keys"
        if filled:
            verb = "holds" if len(filled) == 1 else "hold"
            others = f"{format_layers(filled, 0)} {verb} {max(inputs.cached_after)}"
        who = _name_layers(empty, called, inputs)
        sentence = f"{who} received a cache and left it empty (0), {others}"
        sees = [called[n].kv_len for n in empty if n in called]
        if step.kv_before and sees:
            attends = "it attends" if len(empty) == 1 else "they attend"
            sentence += f": in step {step.step} {attends} to {plural(max(sees), 'key')} instead of "
            sentence += f"{step.kv_after}"
        return self._finding(step, EMPTY_LAYER, sentence, empty, inputs, called)

    def _lost_finding(
        self,
        step: StepRecord,
        inputs: InputsRecord,
        lost: Sequence[int],
        called: Mapping[int, CallRecord],
    ) -> Finding:
        one, severity = len(lost) == 1, Severity.ERROR
        shrunk = set(self._find_shrunk(inputs)) & set(lost)
        if shrunk:
            before, now = (held[min(shrunk)] for held in (self._last_cached, inputs.cached_before))
            what = f"lost keys between steps {step.step - 1} and {step.step}: "
            what += f"the cache held {before} and now holds {now}"
        elif all(n in called and called[n].kv_len <= step.q_len for n in lost):
            seen = plural(called[lost[0]].kv_len, "key")
            what = f"{'attends' if one else 'attend'} to only {seen} in step {step.step}, those of "
            what += f"the step itself; the cache held {step.kv_before} before it"
        else:
            # A cache that drops keys by design looks the same if its layers differ.
            grew, severity = plural(step.q_len, "row"), Severity.WARNING
            what = f"{'does' if one else 'do'} not store the {grew} of step {step.step}: "
            what += f"{'its' if one else 'their'} cache stays at {inputs.cached_after[lost[0]]}, "
            what += f"the other layers hold {max(inputs.cached_after)}"
        sentence = f"{_name_layers(lost, called, inputs)} {what}"
        return self._finding(step, CACHE_LOST, sentence, lost, inputs, called, severity)

    def _finding(
        self,
        step: StepRecord,
        finding_id: str,
        sentence: str,
        which: Sequence[int],
        inputs: InputsRecord,
        called: Mapping[int, CallRecord],
        severity: Severity = Severity.ERROR,
    ) -> Finding:
        return self.finding(
            step,
            finding_id,
            f"{sentence}.",
            severity=severity,
            layers=which,
            evidence={
                "rows": step.q_len,
                "cached_before": list(inputs.cached_before),
                "cached_after": list(inputs.cached_after),
                "kv_len": [call.kv_len for call in called.values()],
            },
            series=format_ranges(which),
        )

    def _check_slots(self, step: StepRecord) -> Iterator[Finding]:
        """At most one finding about empty and one about stale slots of a step."""
        slots = step_array(step, SLOT_STREAM)
        if slots is None:
            return
        is_known = step.inputs is not None and bool(step.inputs.cached_after)
        for finding_id, column in ((EMPTY_SLOTS, EMPTY_COLUMN), (STALE_SLOTS, STALE_COLUMN)):
            rows = np.flatnonzero(slots[:, column] > 0)
            # The filled length is unknown for keys that a program stores itself.
            if len(rows) and (is_known or finding_id == EMPTY_SLOTS):
                yield self._slot_finding(step, slots, finding_id, column, rows)

    def _slot_finding(
        self,
        step: StepRecord,
        slots: npt.NDArray[np.float32],
        finding_id: str,
        column: int,
        rows: npt.NDArray[np.intp],
    ) -> Finding:
        weights = {int(row): float(slots[row, column + 1]) for row in rows}
        worst = max(weights, key=weights.__getitem__)
        n_open, n_bad = int(slots[worst, OPEN_COLUMN]), int(slots[worst, column])
        layers = {step.calls[row].layer for row in rows}
        where, what, most = "", "call", ""
        if not self.context.is_standalone:
            where = f"{capitalize(format_step_layers(layers, step))}, step {step.step}: "
            what = "step"
            most = f" (layer {step.calls[worst].layer})" if len(rows) > 1 else ""
        kind = "empty slots" if finding_id == EMPTY_SLOTS else "slots with keys of an earlier text"
        share = f"{weights[worst]:.0%}".replace("%", " %")
        share = share if weights[worst] >= 0.01 else "less than 1 %"
        sentence = (
            f"{where}{plural(n_open, 'key')} open, {n_open - n_bad} filled: {share} of the "
            f"attention of this {what} is on {kind}{most}."
        )
        evidence = {
            "allowed": n_open,
            "filled": n_open - n_bad,
            "slots": n_bad,
            "weight": round(weights[worst], 4),
            "weights": {step.calls[row].layer: round(weight, 4) for row, weight in weights.items()},
        }
        return self.finding(
            step, finding_id, sentence, layers=layers, evidence=evidence, series=finding_id
        )


def _find_empty(
    step: StepRecord, held: Mapping[int, int], called: Mapping[int, CallRecord]
) -> list[int]:
    """Layers that ran and store nothing."""
    ran = set(called) or {stat.layer for stat in step.layer_stats}
    none = [n for n, keys in held.items() if keys == 0 and n in ran]
    # A layer that shares the keys of another one stores none, but attends to them.
    if step.kv_before:
        none += [n for n in called if n >= len(held) and n not in held]
        none = [n for n in none if n not in called or called[n].kv_len <= step.q_len]
    return sorted(set(none))


def _name_layers(
    which: Sequence[int], called: Mapping[int, CallRecord], inputs: InputsRecord
) -> str:
    return capitalize(format_layers(which, len(called) or len(inputs.cached_after)))
